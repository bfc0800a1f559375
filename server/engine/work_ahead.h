// The work ahead of a call, and how long such work takes.
#ifndef LOGITD_SERVER_ENGINE_WORK_AHEAD_H_
#define LOGITD_SERVER_ENGINE_WORK_AHEAD_H_

#include <array>
#include <cstdint>
#include <optional>

#include "server/engine/caller.h"

namespace logitd::engine {

// Outstanding work by caller, in nanoseconds of estimated time.
//
// The work ahead of a call is what fair queuing does until the call is done: its own work, and of
// every other caller not more than that (by weight). Batch calls also wait for all interactive
// work. Not thread-safe.
class WorkAhead {
 public:
  // One caller's work that has to be done.
  struct Share {
    std::array<int64_t, 2> work = {};  // by Priority
    double weight = 1;
  };

  // `cost` < 0: it is done.
  void Add(Share* share, Priority priority, int64_t cost);
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
  std::array<std::array<Bucket, 64>, 2> buckets_ = {};
  std::array<uint64_t, 2> used_ = {};  // a bit for each bucket with a caller
  std::array<int64_t, 2> total_ = {};  // work
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

}  // namespace logitd::engine

#endif  // LOGITD_SERVER_ENGINE_WORK_AHEAD_H_
