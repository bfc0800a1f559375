// Metrics of the engine and its calls. docs/operations.md lists the series and says what to look
// at; metrics.cc has their names. Names are stable. Every series exists from the start, so zero
// shows as zero.
#ifndef LOGITD_SERVER_ENGINE_METRICS_H_
#define LOGITD_SERVER_ENGINE_METRICS_H_

#include <cstdint>
#include <memory>
#include <string>
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

// Why a call was refused before its payload was copied: the label `reason`, in small letters.
enum class Refusal {
  kDraining,
  kDeadline,         // passed before there was room to receive the message
  kLineFull,         // too many calls wait for memory
  kTooLarge,         // can never fit
  kInvalid,          // malformed, or shape and bytes disagree
  kCallerShare,      // too many calls of this caller wait for memory
  kSlowReceive,      // its message came too slowly while other calls waited
  kHopeless,         // it would have ended after its deadline, by estimate
  kOverloaded,       // more calls come than end, and the caller's line is kept short
  kUnauthenticated,  // no identity, or a wrong token
  kRole,             // the identity lacks the method's role
  kQuotaBytes,       // the identity holds as much room as it may
  kQuotaRows,        // the identity has sent as many rows as it may
  kQuotaCalls,       // the identity has as many calls as it may
  kHeaderList,       // its metadata is larger than advertised
  kConnectionBytes,  // connections hold as much as they may
  kEarlyBytes,       // its connection sends too many bytes that nobody asked for
};

enum class Gauge {
  kHeldBytes,
  kHeldBytesLimit,
  kWaitingCalls,
  kQueuedJobs,
  kSlabsInUse,
  kSlabs,
  kSlabsKept,
  kHeads,
  kHeadBytes,
  kOpenCalls,
  kOpenStreams,
  kPredictedDelay,
  kDraining,
};

// Where a call spends its time outside the engine.
enum class CallPhase {
  kAdmission,  // of a stream, only for its first message
  kReceive,    // of unary calls, as is the next
  kSend,
};

// Thread-safe. Counting takes no lock, except for heads. Functions that take a Metrics* also take
// null.
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

  // All series, those that others added to registry() included. Lives until this object and all
  // copies of the pointer are gone.
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

  // Once per computed slice, by the engine, which ran on `device`, or a part of every row on each
  // of kAllDevices. `seconds`: from the stream's start on it to its end.
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

  // Once per update of a head, when it has ended.
  void CountHeadUpdate(absl::StatusCode code, double seconds);
  // `version` 0: the head is unloaded.
  void SetHeadVersion(const std::string& name, int64_t version);

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
