// How long calls take from their headers to their end, and which of them cannot meet their
// deadline.
#ifndef LOGITD_SERVER_ENGINE_LOAD_H_
#define LOGITD_SERVER_ENGINE_LOAD_H_

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "server/engine/caller.h"
#include "server/engine/costs.h"
#include "server/engine/job.h"
#include "server/engine/metrics.h"
#include "server/engine/sync.h"

namespace logitd::engine {

class Devices;

// RESOURCE_EXHAUSTED whose caller should wait `delay` before it tries again.
absl::Status WithRetryDelay(absl::Status status, absl::Duration delay);
// That delay; nullopt: the status has none.
std::optional<absl::Duration> RetryDelayOf(const absl::Status& status);

// Outstanding work by caller, and how long such work takes.
//
// A call's cost is an estimate of its time, from its op and bytes. The work ahead of a call is what
// fair queuing does until the call is done: its own work, and of every other caller not more than
// that (by weight). Batch calls also wait for all interactive work. Not thread-safe.
class WorkAhead {
 public:
  // One caller's work that has to be done.
  struct Share {
    std::array<int64_t, 2> work = {};  // by Priority, in nanoseconds of estimated time
    double weight = 1;
  };

  void Add(Share* share, Priority priority, int64_t cost);
  void Remove(Share* share, Priority priority, int64_t cost);
  // With `cost` more work of this caller, which is included.
  double Of(const Share& share, Priority priority, int64_t cost) const;

 private:
  // Callers whose work by weight has the same number of bits. A sum over buckets costs the same for
  // any number of callers; it is exact up to the bucket of the call itself.
  struct Bucket {
    int64_t work = 0;
    double weight = 0;
    int callers = 0;
  };
  static size_t BucketOf(const Share& share, size_t priority);
  void Move(Share* share, Priority priority, int64_t change);

  std::array<std::array<Bucket, 64>, 2> buckets_ = {};
  std::array<uint64_t, 2> used_ = {};  // a bit for each bucket with a caller
};

// The ratio of the time that calls took to the work that was ahead of them: a mean and a deviation
// that follow the last calls, weighted by their cost. In logarithms, and no call moves them far, so
// that a few strange calls do not count. Not thread-safe.
class Slowness {
 public:
  // `complete`: false for a call that ended before it was done, so it would have taken longer.
  void Sample(double ahead, double took, double cost, bool complete);
  // How long a call takes at most, mostly: the mean and `deviations` more. nullopt: not known yet.
  std::optional<double> Predict(double ahead, double deviations) const;
  // A mean over the last calls; 0 if there were none.
  double mean_cost() const { return mean_cost_; }

 private:
  double mean_ = 0;
  double deviation_ = 0;
  double mean_cost_ = 0;
  int samples_ = 0;
};

// Decides at a call's headers, and again when its message is there, whether it can meet its
// deadline. Thread-safe.
//
// The prediction is (work ahead) x (slowness), where the devices share the work of other calls, but a
// call's own work is one device's. Slowness is measured over all of a call: the socket,
// the line, copies, kernels. So it follows whatever limits the server, and the cost of refusals
// too. Rules that keep it honest:
// - Without an estimate few calls are refused: 256 of a server that have less than 5 s are let in, and
//   one more for each that ends.
// - A caller that has nothing outstanding is let in while few callers are active.
// - Where no call has ended for a while, one call now and then is let in, to measure.
// - A call counts only if its message came. So peers that send nothing do not slow the estimate.
//
// A refusal of this kind means that calls come faster than they end, and that the line is as long
// as the deadline allows: all calls wait for nearly all of their time, in memory that no cache
// holds. So the line of that caller is kept short: beside two outstanding calls, another one is
// refused where it would take longer than kShortTime of its time (a tenth, from a second on), and
// longer than some calls like it, or like the outstanding ones, one after another (ShortCallsFor). The
// server is as busy with a short line, its calls find their bytes in caches, and calls are answered
// sooner. Calls with twice the refused call's time, or without a deadline, may wait. The line may grow
// again when none of its calls was refused for kShortLine.
// Measured: bench/results/cpu/overload_lines.json.
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
    std::optional<int64_t> bytes;  // of its message; none: not known
    absl::Time deadline = absl::InfiniteFuture();
    bool received = false;  // the message is there, so the time from headers to end is not known
  };

  // One call's work. Ends when destroyed. Movable. The Load outlives it.
  class Work {
   public:
    Work() = default;
    Work(Work&& other) noexcept { *this = std::move(other); }
    Work& operator=(Work&& other) noexcept;
    ~Work() { End(false); }

    // The message is there. RESOURCE_EXHAUSTED: it has become hopeless, and must not be run.
    absl::Status Arrived(int64_t message_bytes, const JobSpec& spec);
    // The size of the message, as stated or by estimate. 0: not known.
    int64_t expected_bytes() const { return expected_bytes_; }
    // `complete`: the job ran. Later calls do nothing.
    void End(bool complete);

   private:
    friend class Load;
    Load* load_ = nullptr;
    Caller caller_;
    const OpTraits* op_ = nullptr;
    absl::Time deadline_;
    int64_t expected_bytes_ = 0;
    bool stated_ = false;
    bool received_ = false;
    bool arrived_ = false;
    std::array<int64_t, 2> cost_ = {};  // by Stage
    std::array<double, 2> ahead_ = {};
    std::array<absl::Time, 2> since_;
  };

  // OK: the call may come, and `work` is it. RESOURCE_EXHAUSTED with a retry delay: it would end
  // after its deadline, or make a line long that is kept short; the text has both times.
  absl::Status Begin(const Call& call, Work* work);

  // Callers with outstanding work.
  int callers() const;

  // From headers to end, of an interactive call that comes now, costs what the last calls did, and
  // is the only one of its caller. nullopt: not known yet.
  std::optional<absl::Duration> PredictNext() const;

 private:
  enum Stage { kCall, kJob };  // from the headers; from the message

  struct CallerWork {
    std::array<WorkAhead::Share, 2> share;  // by Stage
    int calls = 0;
  };

  // The line of a caller is kept short until then, for calls with less time than `below`.
  struct Shortened {
    absl::Time until = absl::InfinitePast();
    absl::Duration below;
  };

  // Why a call is refused.
  struct Refused {
    // The texts differ in what `allowed` is: the time until the deadline, the time in a short line, or
    // a number of calls. kUnknown: `got` calls are not over, `allowed` may be.
    enum class Why { kLate, kLongLine, kUnknown };
    Why why = Why::kLate;
    Refusal reason = {};
    int64_t got = 0;  // milliseconds, or calls
    int64_t allowed = 0;
    absl::Duration delay;  // after which to try again

    std::string Text() const;
    absl::Status ToStatus() const;  // RESOURCE_EXHAUSTED with the retry delay
  };

  // The decision about a call that comes.
  struct Decision {
    std::optional<Refused> refused;
    int64_t bytes = 0;  // of its message, as stated or by estimate
    int64_t cost = 0;
    double ahead = 0;
    bool probe = false;  // it is let in only to measure
  };

  int64_t CostOf(const OpTraits& op, int64_t bytes) const;
  // Work ahead of a call of cost `cost`, which `all` includes, until it is done.
  double Ahead(double all, int64_t cost) const;
  // The refusal of a call that cannot end in time.
  static Refused Hopeless(absl::Duration predicted, absl::Duration left);
  // The refusal of a call that comes while there is no estimate and many calls are outstanding.
  static Refused Unknown(int calls);
  // A call of the caller that had `left` until its deadline was refused: the line is kept short.
  void Shorten(uint64_t caller, absl::Time now, absl::Duration left)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The line of the caller, which has so many `calls`, is kept short for a call that has `left` until
  // its deadline.
  bool IsShort(uint64_t caller, int calls, absl::Time now, absl::Duration left) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The refusal of a call that would make a short line long.
  static Refused TooLong(absl::Duration predicted, absl::Duration allowed);
  Decision Decide(const Call& call, absl::Time now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status Arrived(Work* work, int64_t message_bytes, const JobSpec& spec);
  void End(Work* work, bool complete);

  const Costs* const costs_;
  Metrics* const metrics_;
  const Clock& clock_;
  const Devices* const devices_;
  const int short_calls_;
  mutable Mutex mutex_;
  std::array<WorkAhead, 2> ahead_ ABSL_GUARDED_BY(mutex_);
  std::array<Slowness, 2> slowness_ ABSL_GUARDED_BY(mutex_);
  absl::flat_hash_map<uint64_t, CallerWork> callers_ ABSL_GUARDED_BY(mutex_);
  // Also of callers without outstanding calls: a short line runs empty now and then.
  absl::flat_hash_map<uint64_t, Shortened> shortened_ ABSL_GUARDED_BY(mutex_);
  absl::Time shortened_swept_ ABSL_GUARDED_BY(mutex_) = absl::InfinitePast();
  int calls_ ABSL_GUARDED_BY(mutex_) = 0;  // outstanding, of all callers
  // Of messages whose size was not stated, by op.
  absl::flat_hash_map<const OpTraits*, double> mean_bytes_ ABSL_GUARDED_BY(mutex_);
  absl::Time last_end_ ABSL_GUARDED_BY(mutex_) = absl::InfinitePast();
  absl::Time last_probe_ ABSL_GUARDED_BY(mutex_) = absl::InfinitePast();
};

}  // namespace logitd::engine

#endif  // LOGITD_SERVER_ENGINE_LOAD_H_
