// Which calls of a connection are refused without gRPC: those like one that was just refused.
//
// A refusal through gRPC costs about 150 us and this one a few, so under load the difference is what
// the server has left for the calls that it takes.
#ifndef LOGITD_SERVER_DOOR_TURNSTILE_H_
#define LOGITD_SERVER_DOOR_TURNSTILE_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/inlined_vector.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"
#include "server/door/header_list.h"

namespace logitd::door {

// What refusals are told to, after the answer was written. Methods run on any thread, without a
// lock of the door.
class RefusalEvents {
 public:
  virtual ~RefusalEvents() = default;
  // `echoed`: the values of Refusal::echoes; empty: the call has none.
  virtual void OnRefused(absl::Span<const std::string> echoed) = 0;
};

// A call was refused, and so are those like it. `path`, `allowed` and so on say which those are: all
// of it must hold. A call that has one of the named fields more than once is not like it.
struct Refusal {
  // A field and the values that it may have; nullopt: the call has no such field.
  struct Allowed {
    std::string name;
    std::vector<std::optional<std::string>> values;
  };
  // A field with a whole number.
  struct Number {
    std::string name;
    std::optional<std::pair<int64_t, int64_t>> range;  // least and most; nullopt: no such field
  };
  // A field whose value the answer repeats, if the call has it once and it is well-formed.
  struct Echo {
    std::string_view name;
    bool (*well_formed)(std::string_view value);
  };

  std::string path;
  std::vector<Allowed> allowed;
  Number size;
  int64_t longest_ns = 0;  // the call's timeout is not longer; a call without one is never refused
  int64_t until_ns = 0;    // of MonotonicNanos in turnstile.cc: from then on it does not hold
  // It holds while the caller has at least so many calls under way. Null: always.
  std::shared_ptr<const std::atomic<int>> under_way;
  int least_under_way = 0;

  // The answer: gRPC's code, its text, and further trailers.
  int code = 0;
  std::string text;
  std::vector<std::pair<std::string, std::string>> trailers;
  absl::Span<const Echo> echoes;          // live forever
  std::shared_ptr<RefusalEvents> events;  // not null
};

// The clock of Refusal::until_ns.
int64_t MonotonicNanos();

// The refusals of one connection that hold: a few, the oldest leave. Thread-safe; its lock is held
// for a few comparisons, and nothing else is called under it.
//
// When a refusal does not hold any longer, the next verdict on a call like it takes some time: gRPC
// has to read the call first. Until that verdict, or for kLinger, only kMostInTransit such calls may
// have passed and not begun. Otherwise a flood would fill gRPC with calls that come too late.
class Turnstile {
 public:
  // One for each path, size and set of allowed values, and not more than that.
  static constexpr size_t kMost = 8;
  static constexpr int kMostInTransit = 4;
  static constexpr int64_t kLinger = 100'000'000;  // ns

  // What is sent to a refused call, and who is told.
  struct Answer {
    std::string fields;  // encoded, see AppendEnd
    std::vector<std::string> echoed;
    std::shared_ptr<RefusalEvents> events;
  };

  // From here on calls like it are refused. It takes the place of an earlier one with the same path
  // and allowed values, and with a size in common.
  void Add(Refusal refusal);

  // A call of the connection has come out of gRPC: it is not in transit any longer.
  void Began();

  // None holds or lingers, so Ask has nothing to look for. Cheap.
  bool empty() const { return until_ns_.load(std::memory_order_relaxed) == 0; }

  // Whether the call with this whole list is refused. nullopt: gRPC gets it.
  std::optional<Answer> Ask(const HeaderList& list, int64_t now_ns);

 private:
  struct Held {
    Refusal refusal;
    std::string fields;  // of the answer, encoded
  };

  bool Holds(const Refusal& refusal, int64_t now_ns) const;

  absl::Mutex mutex_;
  std::atomic<int64_t> until_ns_ = 0;  // the latest of all; 0: none
  std::atomic<int> in_transit_ = 0;    // calls like a refused one that passed; about
  absl::InlinedVector<Held, 1> held_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace logitd::door

#endif  // LOGITD_SERVER_DOOR_TURNSTILE_H_
