// Which calls of a connection are refused without gRPC: those like one that was just refused, as long
// as they would be refused too.
//
// A refusal through gRPC costs about 300 us of a core and this one about 25, of which 9 are Linux's, to
// wake, read and write. So under load the difference is what the server has left for the calls that it
// takes. Measured: bench/results/cpu/overload_turns.json.
#ifndef LOGITD_SERVER_DOOR_TURNSTILE_H_
#define LOGITD_SERVER_DOOR_TURNSTILE_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
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

// Says of each call that is like a refused one whether it is refused too. Its methods are brief and run
// on any thread. Ask runs under a lock of the connection, so it must not call the door.
class Judge {
 public:
  struct Call {
    int64_t timeout_ns = 0;
    std::optional<int64_t> size;  // of LikeCalls::size; nullopt: the call does not say
    int coming = 0;               // such calls that passed just before and have not begun: about
  };
  // The end of a refused call: gRPC's code, its text, and further trailers.
  struct Verdict {
    int code = 0;
    std::string text;
    // Their names live forever.
    absl::InlinedVector<std::pair<std::string_view, std::string>, 1> trailers;
    int reason = 0;  // the judge's own
  };

  virtual ~Judge() = default;
  // nullopt: gRPC gets the call.
  virtual std::optional<Verdict> Ask(const Call& call) = 0;
  // The answer was written. `echoed`: the values of LikeCalls::echoes; empty: the call has none.
  virtual void OnRefused(int reason, absl::Span<const std::string> echoed) = 0;
};

// Calls like one that was refused: all of this must hold. A call that has one of the named fields more
// than once, or no timeout, is not like it.
struct LikeCalls {
  // A field and the values that it may have; nullopt: the call has no such field.
  struct Allowed {
    std::string name;
    std::vector<std::optional<std::string>> values;
  };
  // A field whose value the answer repeats, if the call has it once and it is well-formed.
  struct Echo {
    std::string_view name;
    bool (*well_formed)(std::string_view value);
  };

  std::string path;
  std::vector<Allowed> allowed;
  std::string size;  // the name of a field with a whole number, from 0 to `max_size`
  int64_t max_size = 0;
  absl::Span<const Echo> echoes;  // live forever
  std::shared_ptr<Judge> judge;   // not null
};

// The clock of Turnstile.
int64_t MonotonicNanos();

// The judges of one connection: a few, the oldest leave. A judge stays for kStay after the last call
// that was refused. Thread-safe.
class Turnstile {
 public:
  // One for each path and set of allowed values, and not more than that.
  static constexpr size_t kMost = 8;
  static constexpr int64_t kStay = 500'000'000;  // ns
  // A call that passed and has not begun after so long is not coming: its peer has taken it back.
  static constexpr int64_t kComing = 100'000'000;  // ns
  static constexpr size_t kMostComing = 256;

  // What is sent to a refused call, and who is told.
  struct Answer {
    std::string fields;  // encoded, see AppendEnd
    int reason = 0;
    absl::InlinedVector<std::string, 2> echoed;
    std::shared_ptr<Judge> judge;
  };

  // A call was refused: from here on its judge is asked about calls like it. It takes the place of an
  // earlier one with the same path and allowed values.
  void Add(LikeCalls calls, int64_t now_ns);

  // A call of the connection has come out of gRPC: it is not coming any longer.
  void Began();

  // No judge is here, so Ask has nothing to do. Cheap.
  bool empty() const { return until_ns_.load(std::memory_order_relaxed) == 0; }

  // Whether the call with this whole list is refused. nullopt: gRPC gets it.
  std::optional<Answer> Ask(const HeaderList& list, int64_t now_ns);

 private:
  absl::Mutex mutex_;
  std::atomic<int64_t> until_ns_ = 0;  // the judges leave then; 0: none is here
  absl::InlinedVector<std::shared_ptr<const LikeCalls>, 1> judged_ ABSL_GUARDED_BY(mutex_);
  // When calls passed that are like a refused one and have not begun: about, because the next calls
  // that begin are taken for them.
  std::deque<int64_t> coming_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace logitd::door

#endif  // LOGITD_SERVER_DOOR_TURNSTILE_H_
