// Who calls, what a caller may do, and how much of it. docs/operations.md has the file's format.
#ifndef LOGITD_SERVER_DOOR_IDENTITIES_H_
#define LOGITD_SERVER_DOOR_IDENTITIES_H_

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "absl/types/span.h"

namespace logitd::door {

enum class Role : uint8_t { kInfer, kScore, kHeads, kAdmin };
// In the order of Role.
inline constexpr auto kRoleNames =
    std::to_array<absl::string_view>({"infer", "score", "heads", "admin"});
constexpr absl::string_view NameOf(Role role) { return kRoleNames[static_cast<size_t>(role)]; }

// The usage of an identity at present. It outlives a reload of the file. Thread-safe.
class Usage {
 public:
  // Counts one more call. False: there are `most` already. 0: any number.
  bool BeginCall(int64_t most);
  void EndCall() { calls_.fetch_sub(1, std::memory_order_relaxed); }
  int64_t calls() const { return calls_.load(std::memory_order_relaxed); }

  // A bucket of one second's rows. A request takes its rows if the bucket is not empty, also more
  // than are in it: what it lacks is paid back before the next request. So a request may have more
  // rows than come in a second. `now_ns`: of MonotonicNanos. Zero: the rows were taken; else the
  // time until the next try.
  absl::Duration TakeRows(int64_t rows, double rows_per_second, int64_t now_ns);

 private:
  std::atomic<int64_t> calls_ = 0;
  absl::Mutex mutex_;
  int64_t full_ns_ ABSL_GUARDED_BY(mutex_) = 0;  // when the bucket is full again
};

// Immutable, except what it uses.
struct Identity {
  std::string name;
  uint64_t id = 0;  // equal for equal names as long as the process lives; not an id of a connection
  double weight = 1;
  std::array<bool, kRoleNames.size()> roles = {};
  int64_t max_held_bytes = 0;  // 0: no limit of its own, here and below
  double max_rows_per_second = 0;
  int64_t max_calls = 0;
  std::shared_ptr<Usage> usage;

  bool Has(Role role) const { return roles[static_cast<size_t>(role)]; }
  std::string RoleList() const;  // "infer, score"
};

// The credentials that a caller shows.
using TokenHash = std::array<unsigned char, 32>;
struct Credentials {
  std::optional<TokenHash> token;  // of the token that it sent
  // Proved by the connection: see http2::PeerInfo.
  std::vector<std::string> certificate_names;
  std::optional<uint32_t> uid;
};

// SHA-256.
TokenHash HashToken(std::string_view token);

// The identities of a file. Thread-safe.
class Identities {
 public:
  static constexpr size_t kMost = 4096;

  // Replaces all identities by those of the text, or none: INVALID_ARGUMENT gives the place in the
  // text, what it has and what is allowed.
  absl::Status Set(std::string_view text);

  // An identity, and which of the credentials proved it.
  enum class Proof : uint8_t { kToken, kCertificate, kUser };
  struct Found {
    std::shared_ptr<const Identity> identity;
    Proof proof;
  };

  // By the token if there is one, else by the names of the certificate, else by the user.
  // UNAUTHENTICATED says what is missing or wrong, without what the caller sent. Tokens are
  // compared in constant time.
  absl::StatusOr<Found> Find(const Credentials& credentials) const;

 private:
  struct Table;
  struct Persistent {
    uint64_t id;
    std::shared_ptr<Usage> usage;
  };

  static absl::StatusOr<Table> Parse(std::string_view text);

  mutable absl::Mutex mutex_;
  std::shared_ptr<const Table> table_ ABSL_GUARDED_BY(mutex_);
  absl::flat_hash_map<std::string, Persistent> persistent_ ABSL_GUARDED_BY(mutex_);  // by name
};

}  // namespace logitd::door

#endif  // LOGITD_SERVER_DOOR_IDENTITIES_H_
