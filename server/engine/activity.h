// How busy the streams are, and with what.
#ifndef LOGITD_SERVER_ENGINE_ACTIVITY_H_
#define LOGITD_SERVER_ENGINE_ACTIVITY_H_

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "server/engine/job.h"
#include "server/engine/sync.h"

namespace logitd::engine {

// Means over the recent past: what happened t ago counts with the weight exp(-t / kMemory). Times
// are nanoseconds of EngineOptions::clock. Thread-safe. Begin and End cost a lock that is held for
// some tens of nanoseconds.
class Activity {
 public:
  static constexpr absl::Duration kMemory = absl::Seconds(1);

  struct OfOp {
    std::string_view op;
    double rows_per_s = 0;
    double busy = 0;  // streams that work on it, as a share of all streams
  };
  struct View {
    double busy = 0;  // 0: all streams are idle; 1: all work all the time
    std::vector<OfOp> ops;
  };

  // `ops` outlives this.
  Activity(int streams, absl::Span<const OpTraits* const> ops);

  // Stream `stream` never works again: it no longer counts.
  void Remove(int stream);

  // Stream `stream` begins a slice of `op`, which counts as the op of its name, or ends it after
  // `rows` rows. `as_many`: the streams that the slice counts as, in View::busy.
  void Begin(int stream, const OpTraits* op, int64_t now_ns, int as_many = 1);
  void End(int stream, int64_t rows, int64_t now_ns);

  View Read(int64_t now_ns) const;

  // How long every stream that counts has been inside a slice without the end of one; 0: a stream
  // is free.
  absl::Duration Stalled(int64_t now_ns) const;

 private:
  struct Running {
    size_t op = 0;
    int64_t begun_ns = 0;  // 0: it runs no slice
    int as_many = 1;
    bool removed = false;
  };
  struct Means {
    double rows = 0;  // decayed sums, at `at_ns_`
    double busy = 0;
  };

  void DecayTo(int64_t now_ns) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const absl::Span<const OpTraits* const> ops_;
  mutable Mutex mutex_;
  std::vector<Running> streams_ ABSL_GUARDED_BY(mutex_);
  std::vector<Means> means_ ABSL_GUARDED_BY(mutex_);  // by op
  int64_t at_ns_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace logitd::engine

#endif  // LOGITD_SERVER_ENGINE_ACTIVITY_H_
