// Memory that a server on this machine leases to its client: rows that lie in it are named in
// requests and not sent. formats/arena_protocol.h has the protocol, docs/operations.md what each
// side may rely on.
#ifndef LOGITD_CLIENT_ARENA_H_
#define LOGITD_CLIENT_ARENA_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "logitd/v1/types.pb.h"

namespace logitd::client {

class CudaMemory;

// The memory of an arena: of the host, or of a GPU of this machine that both the server and this
// process can use.
enum class ArenaKind { kHost, kCuda };

// A lease and its memory, mapped to be read and written. The lease ends with the object, or with
// the server; a request that runs then still reads what was there. Another mapping of the host's
// memory reads zeros soon after the lease has ended, because the server takes its pages back.
// Writing to rows while a request that names them runs may change that request's answer.
// Thread-safe, as far as memory is.
class Arena {
 public:
  // Leases at least `bytes` bytes, all zero, from the server that listens at `address`
  // ("unix:PATH", its --arena-listen). INVALID_ARGUMENT: no such address, or a size that the server
  // never leases. UNAVAILABLE: nobody listens there, or not in time. Otherwise the server's error.
  static absl::StatusOr<std::unique_ptr<Arena>> Lease(const std::string& address, int64_t bytes,
                                                      absl::Duration timeout = absl::Seconds(10));

  // The same, of the kind `kind`. kCuda: `device` is the number of the server's device, or -1: the
  // server chooses. data() is then device memory, in the primary context of its device; kernels of
  // this process may write it, and must have ended before a request names what they wrote: the
  // server does not wait for them. UNIMPLEMENTED: the server has no GPU, or is of a version without
  // this. UNAVAILABLE: also that this machine has no such GPU.
  static absl::StatusOr<std::unique_ptr<Arena>> Lease(const std::string& address, int64_t bytes,
                                                      ArenaKind kind, int device = -1,
                                                      absl::Duration timeout = absl::Seconds(10));
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  char* data() const { return data_; }  // page-aligned; kCuda: device memory
  ArenaKind kind() const { return cuda_ == nullptr ? ArenaKind::kHost : ArenaKind::kCuda; }
  int socket() const { return socket_; }  // the lease's connection, for its ring
  // For Ring::Open: false where the arena already has a ring.
  bool TakeRing() { return !has_ring_.exchange(true); }
  void GiveRing() { has_ring_ = false; }
  int64_t bytes() const { return bytes_; }

  // Copy from or to memory of the host, and wait for it. OUT_OF_RANGE: it does not fit at `offset`.
  // INTERNAL: the GPU's driver failed.
  absl::Status Write(int64_t offset, absl::string_view from);
  absl::Status Read(int64_t offset, absl::Span<char> to) const;

  // Whether any of `bytes` lies in the arena. No bytes: no.
  bool Overlaps(absl::string_view bytes) const;

  // The place of a payload of `rows` rows of `row_bytes` bytes in the arena. Its pieces are either
  // one run of memory together, or one for each row at equal distances. INVALID_ARGUMENT: neither
  // holds, a piece is outside the arena, or the sizes do not add up.
  absl::StatusOr<v1::SharedRows> Find(const std::vector<absl::string_view>& pieces, int64_t rows,
                                      int64_t row_bytes) const;

 private:
  Arena(int socket, char* data, int64_t bytes, std::string lease, std::unique_ptr<CudaMemory> cuda);
  bool Has(int64_t offset, size_t bytes) const;

  const int socket_;  // the lease lives as long as the connection
  char* const data_;
  const int64_t bytes_;
  const std::string lease_;
  const std::unique_ptr<CudaMemory> cuda_;  // null: memory of the host
  std::atomic<bool> has_ring_ = false;
};

}  // namespace logitd::client

#endif  // LOGITD_CLIENT_ARENA_H_
