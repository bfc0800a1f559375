// What an operator can see. Names are stable; every series is created at start, so that zero is
// visible as zero.
//
// Counters
//   logitd_requests_total{op,code}      calls ended, by op and gRPC status name ("OK", "CANCELLED",
//   ...) logitd_rows_total{op}               rows computed logitd_batches_total{op} batches
//   computed logitd_refused_total{reason}        calls turned away before their payload was copied;
//   see Refusal logitd_device_errors_total{kind}    batches the device failed: "batch" (later work
//   may succeed) or "lost"
// Gauges
//   logitd_held_bytes, logitd_held_bytes_limit   host memory charged to calls, and the most there
//   may be logitd_waiting_calls                         calls not yet read for want of that memory
//   logitd_queued_jobs                           jobs without a place in a slab
//   logitd_open_jobs                             jobs with a place, whose batch does not run yet
//   logitd_slabs_in_use, logitd_slabs            slabs that hold a batch, and all there are
//   logitd_slabs_kept                            those of them that hold an answer on its way
//   logitd_heads                                 heads loaded
//   logitd_head_bytes                            device memory of heads, those unloaded that jobs
//   still use included
//   logitd_draining                              1 from the start of the drain
// Histograms, one observation per call
//   logitd_request_seconds{op}          from headers to status
// Histograms, one observation per batch
//   logitd_batch_rows                   rows
//   logitd_batch_{queue,copy}_seconds   of the batch's oldest job
//   logitd_batch_{h2d,kernel,d2h}_seconds
#ifndef LOGITD_SERVER_ENGINE_METRICS_H_
#define LOGITD_SERVER_ENGINE_METRICS_H_

#include <cstdint>
#include <memory>
#include <string_view>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "server/engine/job.h"

namespace prometheus {
class Registry;
}

namespace logitd::engine {

// Why a call was turned away before its payload was copied.
enum class Refusal {
  kDraining,  // "draining"
  kDeadline,  // "deadline": passed before there was room to receive the message
  kLineFull,  // "line_full": too many calls wait for memory
  kTooLarge,  // "too_large": can never fit
  kInvalid,   // "invalid": malformed, or shape and bytes disagree
};

// Thread-safe; no method blocks for longer than a histogram's own lock. Whoever takes a Metrics*
// takes null as well.
class Metrics {
 public:
  // `ops` are the values of the label `op`. Besides them there is "unknown", which stands for a
  // call refused before its op was known, and for any name not in `ops`.
  explicit Metrics(absl::Span<const std::string_view> ops = {});
  ~Metrics();
  Metrics(const Metrics&) = delete;
  Metrics& operator=(const Metrics&) = delete;

  // For an exposer. Lives as long as the longer of this object and the last copy.
  std::shared_ptr<prometheus::Registry> registry() const { return registry_; }

  // Once per call, by rpc, when the call's status is known. `seconds`: from headers to status.
  void CountRequest(std::string_view op, absl::StatusCode code, double seconds);

  // Once per refused call, besides CountRequest: by Admission for the first three reasons, by rpc
  // for the others.
  void CountRefused(Refusal reason);

  // Once per computed batch, by the engine. `oldest` are the times of the batch's oldest job.
  void CountBatch(std::string_view op, const JobTimes& oldest);

  // Once per batch the device failed. `lost`: for good.
  void CountDeviceError(bool lost);

  void SetHeldBytes(int64_t bytes);
  void SetHeldBytesLimit(int64_t bytes);
  void SetWaitingCalls(int64_t calls);
  void SetQueuedJobs(int64_t jobs);
  void SetOpenJobs(int64_t jobs);
  void SetSlabsInUse(int64_t slabs);
  void SetSlabs(int64_t slabs);
  void SetSlabsKept(int64_t slabs);
  void SetHeads(int64_t heads);
  void AddHeadBytes(int64_t bytes);  // negative: less of them
  void SetDraining(bool draining);

 private:
  struct Series;
  std::shared_ptr<prometheus::Registry> registry_;
  std::unique_ptr<Series> series_;
};

}  // namespace logitd::engine

#endif  // LOGITD_SERVER_ENGINE_METRICS_H_
