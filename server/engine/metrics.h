// Metrics of the engine and its calls. Names are stable. Every series exists from the start, so zero
// shows as zero. docs/operations.md says what to look at when.
//
// Counters
//   logitd_requests_total{op,code}    calls ended, by op and gRPC status name ("OK", "CANCELLED")
//   logitd_rows_total{op}             rows computed
//   logitd_batches_total{op}          batches computed
//   logitd_slices_total{op}           slices computed: a batch that is not cut is one
//   logitd_stream_busy_seconds_total{op}  time that streams spent on slices, by the host's clock
//   logitd_stopped_total{op}          requests that ended between slices of their batch: the caller
//                                     left, the deadline passed or the engine closed
//   logitd_refused_total{reason,identity}  calls refused before their payload was copied; see
//                                     Refusal and Proof
//   logitd_device_errors_total{device,kind}  batches the device failed: "batch" (later work may
//                                     succeed) or "lost"
//   logitd_device_rows_total{device}  rows computed, those of unfinished batches included
//   logitd_device_busy_seconds_total{device}  time that its streams spent on slices
//   logitd_log_lines_suppressed_total{source}  see server/log/limited.h; the server adds it
// Gauges: see Gauge, and
//   logitd_device_up{device}          1; 0: the device is lost
//   logitd_device_head_bytes{device}  its part of logitd_head_bytes
// The label `device` is DeviceInfo::number.
// Histograms, one observation per call
//   logitd_request_seconds{op}        from headers to status
//   logitd_admission_wait_seconds     from asking for room until the message may come; of a stream, only
//                                     for its first message
//   logitd_receive_seconds            from headers until the message is there, without that wait; of
//                                     unary calls
//   logitd_send_seconds               from the answer until the kernel has taken it; of unary calls
// Histograms, one observation per batch
//   logitd_batch_rows                 its rows
//   logitd_batch_queue_seconds{op}    its oldest job's wait for a place and its first slice
//   logitd_batch_copy_seconds{op}     the copy of its oldest job's payload into the slab
//   logitd_batch_{h2d,kernel,d2h}_seconds{op}  its times on the device, in all slices
#ifndef LOGITD_SERVER_ENGINE_METRICS_H_
#define LOGITD_SERVER_ENGINE_METRICS_H_

#include <cstdint>
#include <memory>
#include <string_view>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "server/engine/caller.h"
#include "server/engine/job.h"

namespace prometheus {
class Collectable;
class Registry;
}  // namespace prometheus

namespace logitd::engine {

// Why a call was refused before its payload was copied.
enum class Refusal {
  kDraining,         // "draining"
  kDeadline,         // "deadline": passed before there was room to receive the message
  kLineFull,         // "line_full": too many calls wait for memory
  kTooLarge,         // "too_large": can never fit
  kInvalid,          // "invalid": malformed, or shape and bytes disagree
  kCallerShare,      // "caller_share": too many calls of this caller wait for memory
  kSlowReceive,      // "slow_receive": its message came too slowly while other calls waited
  kHopeless,         // "hopeless": it would have ended after its deadline, by estimate
  kOverloaded,       // "overloaded": more calls come than end, and the caller's line is kept short
  kUnauthenticated,  // "unauthenticated": no identity, or a wrong token
  kRole,             // "role": the identity lacks the method's role
  kQuotaBytes,       // "quota_bytes": the identity holds as much room as it may
  kQuotaRows,        // "quota_rows": the identity has sent as many rows as it may
  kQuotaCalls,       // "quota_calls": the identity has as many calls as it may
  kHeaderList,       // "header_list": its metadata is larger than advertised
  kConnectionBytes,  // "connection_bytes": connections hold as much as they may
  kEarlyBytes,       // "early_bytes": its connection sends too many bytes that nobody asked for
};

enum class Gauge {
  kHeldBytes,       // logitd_held_bytes: host memory charged to calls
  kHeldBytesLimit,  // logitd_held_bytes_limit: the most that may be charged
  kWaitingCalls,    // logitd_waiting_calls: calls left unread until room or their turn comes
  kQueuedJobs,      // logitd_queued_jobs: jobs that wait for a stream
  kSlabsInUse,      // logitd_slabs_in_use: slabs that hold a batch
  kSlabs,           // logitd_slabs: all slabs
  kSlabsKept,       // logitd_slabs_kept: slabs in use whose answer is still being sent
  kHeads,           // logitd_heads: heads loaded
  // logitd_head_bytes: memory of heads on all devices, loading ones and unloaded ones included
  kHeadBytes,
  kOpenCalls,       // logitd_open_calls: calls of ops that are not over
  kOpenStreams,     // logitd_open_streams: those of them that are gRPC streams
  kPredictedDelay,  // logitd_predicted_delay_seconds: of the last call, from headers to its end
  kDraining,        // logitd_draining: 1 from the start of the drain
};

// Where a call spends its time outside the engine.
enum class CallPhase {
  kAdmission,  // logitd_admission_wait_seconds
  kReceive,    // logitd_receive_seconds
  kSend,       // logitd_send_seconds
};

// Thread-safe. Counting takes no lock. Functions that take a Metrics* also take null.
class Metrics {
 public:
  // `ops` are the values of the label `op`. "unknown" is added: it stands for a call that was
  // refused before its op was known, and for any name not in `ops`.
  // `devices`: their DeviceInfo::number, in the order in which the methods count them.
  explicit Metrics(absl::Span<const std::string_view> ops = {},
                   absl::Span<const int> devices = kOneDevice);
  ~Metrics();
  Metrics(const Metrics&) = delete;
  Metrics& operator=(const Metrics&) = delete;

  // All series, those that others added to registry() included. Lives until this object and all copies
  // of the pointer are gone.
  std::shared_ptr<prometheus::Collectable> page() const;
  // For series of other parts. What this object counts is up to date only on page().
  std::shared_ptr<prometheus::Registry> registry() const { return registry_; }

  // Once per call, by rpc, when the call's status is known. `seconds`: from headers to status.
  void CountRequest(std::string_view op, absl::StatusCode code, double seconds);

  // At most once per call and phase, by rpc, when the phase ends.
  void CountPhase(CallPhase phase, double seconds);

  // Once per refused call, besides CountRequest: by Admission and Load, or by rpc. `proof`: of its
  // caller.
  void CountRefused(Refusal reason, Proof proof);

  // Once per computed batch, by the engine. `oldest`: the times of the batch's oldest job.
  void CountBatch(std::string_view op, const JobTimes& oldest);

  // Once per computed slice, by the engine, which ran on `device`, or a part of every row on each of
  // kAllDevices. `seconds`: from the stream's start on it to its end.
  static constexpr int kAllDevices = -1;
  void CountSlice(std::string_view op, int device, int64_t rows, double seconds);

  // Once per job that ended between slices, by the engine.
  void CountStopped(std::string_view op);

  // Once per batch that the device failed, by each of several that failed it. `lost`: for good.
  void CountDeviceError(int device, bool lost);
  // Once per lost device.
  void SetDeviceLost(int device);

  // When memory of a device is taken for heads, or given back.
  void AddHeadBytes(int device, int64_t change);

  void Set(Gauge gauge, double value);
  void Add(Gauge gauge, int64_t change);
  int64_t Get(Gauge gauge) const;

 private:
  static constexpr int kOneDevice[] = {0};
  struct Series;
  const std::shared_ptr<prometheus::Registry> registry_;
  const std::shared_ptr<Series> series_;
};

}  // namespace logitd::engine

#endif  // LOGITD_SERVER_ENGINE_METRICS_H_
