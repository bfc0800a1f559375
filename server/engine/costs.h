// How long work takes, learned from the work that ran.
#ifndef LOGITD_SERVER_ENGINE_COSTS_H_
#define LOGITD_SERVER_ENGINE_COSTS_H_

#include <cstdint>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/time/time.h"
#include "server/engine/job.h"
#include "server/engine/sync.h"

namespace logitd::engine {

// Thread-safe. Estimates are times on a stream: copies and kernels, without any wait. They follow
// the last few slices of the same kind. A slice counts at most 16 times its kind's estimate: one
// that lost its core for a while must not make its kind look long, while a kind that did become
// slower is known after a few slices.
class Costs {
 public:
  // A slice: `rows` > 0 rows of `key` with `payload_bytes` took `time` on a stream. Returns what
  // PerRow is now.
  double Ran(const BatchKey& key, int64_t rows, int64_t payload_bytes, absl::Duration time);

  // Nanoseconds. A row's share of the slices it ran in: where a call costs about the same for few
  // and many rows, it falls as slices grow. A kind that never ran: as its op's other kinds, by
  // bytes. An op that never ran: 0.
  double PerRow(const BatchKey& key) const;

  // The time of a call, from its op and the size of its message. 0: the op never ran.
  absl::Duration OfCall(const OpTraits& op, int64_t payload_bytes) const;

 private:
  // Sums that forget: the last few slices count most.
  struct Average {
    double time_ns = 0;
    double units = 0;
    void Add(double ns, double of);
    double PerUnit() const { return units > 0 ? time_ns / units : 0; }
  };

  mutable Mutex mutex_;
  absl::flat_hash_map<BatchKey, Average> per_row_ ABSL_GUARDED_BY(mutex_);  // of any device
  absl::flat_hash_map<const OpTraits*, Average> per_byte_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace logitd::engine

#endif  // LOGITD_SERVER_ENGINE_COSTS_H_
