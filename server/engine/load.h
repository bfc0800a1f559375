// How long calls take, and which of them cannot meet their deadline.
#ifndef LOGITD_SERVER_ENGINE_LOAD_H_
#define LOGITD_SERVER_ENGINE_LOAD_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "server/base/clock.h"
#include "server/engine/caller.h"
#include "server/engine/costs.h"
#include "server/engine/job.h"
#include "server/engine/metrics.h"
#include "server/engine/sync.h"
#include "server/engine/work_ahead.h"

namespace logitd::engine {

class Devices;

// RESOURCE_EXHAUSTED whose caller should wait `delay` before it tries again.
absl::Status WithRetryDelay(absl::Status status, absl::Duration delay);
// That delay; nullopt: the status has none.
std::optional<absl::Duration> RetryDelayOf(const absl::Status& status);

// Decides whether a call can meet its deadline, when the size of its message is known. Thread-safe.
//
// The prediction is (work ahead) x (slowness), where the devices share the work of other calls, but
// a call's own work is one device's. Slowness is measured over all of a call: the socket, the line,
// copies, kernels. So it follows whatever limits the server, and the cost of refusals too.
// - Without an estimate few calls are refused: 256 of a server that have less than 5 s are let in,
//   and
//   one more for each that ends.
// - A caller that has nothing outstanding is let in while few callers are active.
// - Where no call has ended for a while, one call now and then is let in, to measure.
// - A call counts only if its message came. So peers that send nothing do not slow the estimate.
//
// A refusal means that calls come faster than they end, and that all wait for nearly all of their
// time, in memory that no cache holds. So the line of that caller is kept short: beside two
// outstanding calls, another one is refused where it would take longer than kShortTime of its time
// (a tenth, from a second on), and longer than some calls like it, or like the outstanding ones,
// one after another (ShortCallsFor). The server is as busy, and calls are answered sooner. Calls
// with twice the refused call's time, or without a deadline, may wait. The line may grow again when
// none of its calls was refused for kShortLine. Measured: bench/results/cpu/overload_lines.json.
class Load {
 public:
  static constexpr absl::Duration kShortLine = absl::Seconds(5);
  static constexpr double kShortTime = 0.03;
  static constexpr int kShortCalls = 8;
  // Calls that a short line holds however short their time is: kShortCalls on few cores. With more,
  // more calls are received, copied and computed at the same time.
  static constexpr int ShortCallsFor(int cores) { return std::max(kShortCalls, 2 * cores); }

  // `costs`, `metrics` and `devices` may be null; otherwise they outlive this. Without `devices`
  // there is one.
  Load(const Costs* costs, Metrics* metrics, const Clock& clock = SteadyClock(),
       const Devices* devices = nullptr, int short_calls = kShortCalls);

  struct Call {
    Caller caller;
    const OpTraits* op = nullptr;
    int64_t bytes = 0;  // of its message
    absl::Time deadline = absl::InfiniteFuture();
  };

  // One call's work. Ends when destroyed. Movable. The Load outlives it.
  class Work {
   public:
    Work() = default;
    Work(Work&& other) noexcept : Work() { *this = std::move(other); }
    Work& operator=(Work&& other) noexcept {
      End(false);
      data_ = std::exchange(other.data_, {});
      return *this;
    }
    ~Work() { End(false); }

    // The message is there, and its rows have `bytes`, wherever they lie.
    void Arrived(int64_t bytes);
    // `complete`: the job ran. Later calls do nothing.
    void End(bool complete);

   private:
    friend class Load;
    struct Data {
      Load* load = nullptr;
      Call call;
      int64_t cost = 0;
      double ahead = 0;
      absl::Time since;
      bool arrived = false;
    } data_;
  };

  // OK: the call may come, and `work` is it. RESOURCE_EXHAUSTED with a retry delay: it would end
  // after its deadline, or make a line long that is kept short; the text has both times.
  absl::Status Begin(const Call& call, Work* work);

  // Callers with outstanding work.
  int callers() const;

  // The time of an interactive call that comes now, costs what the last calls did, and is the only
  // one of its caller. nullopt: not known yet.
  std::optional<absl::Duration> PredictNext() const;

 private:
  struct CallerWork {
    WorkAhead::Share share;
    int calls = 0;
  };

  // The line of a caller is kept short until then, for calls with less time than `below`.
  struct Shortened {
    absl::Time until = absl::InfinitePast();
    absl::Duration below;
  };

  int64_t CostOf(const OpTraits& op, int64_t bytes) const;
  // Work ahead of a call of cost `cost`, which `all` includes, until it is done.
  double Ahead(double all, int64_t cost) const;
  absl::Status Judge(const Call& call, const CallerWork& caller, int64_t cost, double ahead,
                     absl::Time now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The line of the caller is kept short, for calls with no more time than `left`.
  bool IsShort(const Call& call, const CallerWork& caller, absl::Time now,
               absl::Duration left) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // A call that had `left` was refused: the line is kept short.
  void Shorten(uint64_t caller, absl::Time now, absl::Duration left)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status Refuse(const Caller& caller, Refusal reason, const std::string& text,
                      absl::Duration delay) const;
  void Arrived(Work::Data* work, int64_t bytes);
  void End(const Work::Data& work, bool complete);

  const Costs* const costs_;
  Metrics* const metrics_;
  const Clock& clock_;
  const Devices* const devices_;
  const int short_calls_;
  mutable Mutex mutex_;
  WorkAhead ahead_ ABSL_GUARDED_BY(mutex_);
  Slowness slowness_ ABSL_GUARDED_BY(mutex_);
  absl::flat_hash_map<uint64_t, CallerWork> callers_ ABSL_GUARDED_BY(mutex_);
  // Also of callers without outstanding calls: a short line runs empty now and then.
  absl::flat_hash_map<uint64_t, Shortened> shortened_ ABSL_GUARDED_BY(mutex_);
  absl::Time shortened_swept_ ABSL_GUARDED_BY(mutex_) = absl::InfinitePast();
  int calls_ ABSL_GUARDED_BY(mutex_) = 0;  // outstanding, of all callers
  absl::Time last_end_ ABSL_GUARDED_BY(mutex_) = absl::InfinitePast();
  absl::Time last_probe_ ABSL_GUARDED_BY(mutex_) = absl::InfinitePast();
};

}  // namespace logitd::engine

#endif  // LOGITD_SERVER_ENGINE_LOAD_H_
