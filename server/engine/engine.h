// The engine: jobs in, batches over streams, completions out.
#ifndef LOGITD_SERVER_ENGINE_ENGINE_H_
#define LOGITD_SERVER_ENGINE_ENGINE_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string_view>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "kernels/backend.h"
#include "server/engine/job.h"

namespace logitd::engine {

class Metrics;

struct EngineOptions {
  int streams = 2;           // batches that run at once
  int slabs_per_stream = 2;  // one fills while the other runs
  // Payload of a batch with its lists, and so of the largest request.
  int64_t slab_payload_bytes = int64_t{64} << 20;
  // Outputs of a batch, and so of the largest request.
  int64_t slab_answer_bytes = int64_t{64} << 20;
  int64_t max_batch_rows = 65536;
  // How long an open batch may wait for company though a stream is free.
  absl::Duration max_batch_delay = absl::ZeroDuration();
  int copy_threads = 2;  // copy payloads of jobs that had to wait for a slab
  // All ops that jobs are of. Slabs have room for the parameters of each.
  absl::Span<const OpTraits* const> ops;
  // How long one idle stream polls before it sleeps: a thread that sleeps takes 20 us to wake.
  absl::Duration idle_spin = absl::Microseconds(30);
};

// A batch that a stream has at work.
struct RunningBatch {
  std::string_view op;
  int64_t rows;  // those of dropped jobs included
  absl::Duration age;
};

// Thread-safe. Everything it will ever need (slabs, arenas, threads) is allocated by Create;
// nothing per job.
class Engine {
 public:
  // `on_device_lost` runs once, on an engine thread or in DeviceLost, when the backend reports
  // INTERNAL: from then on every job ends with UNAVAILABLE; the owner is expected to end the
  // process. It must not call Stop or WaitIdle, which wait for that thread. INVALID_ARGUMENT names
  // an option out of range. `metrics` may be null. Backend and metrics outlive the engine.
  static absl::StatusOr<std::unique_ptr<Engine>> Create(
      Backend* backend, const EngineOptions& options, Metrics* metrics,
      absl::AnyInvocable<void(absl::Status)> on_device_lost);
  virtual ~Engine() = default;

  // OK if a job of this size can ever run; INVALID_ARGUMENT with value and limit if not.
  virtual absl::Status CheckFits(const JobSpec& spec) const = 0;

  // Takes the job through: a place in the open batch of its key, one CopyPayload, a stream, Done.
  // Where a slab has room the payload is copied inside this call; otherwise the job waits, in
  // order, and a copy thread does it later. Done runs exactly once, perhaps before Submit returns,
  // with OK or
  //
  //   DEADLINE_EXCEEDED  passed before its batch was sealed; nothing was computed for it
  //   CANCELLED          Cancel came before its batch was sealed
  //   UNAVAILABLE        the device failed for its batch, or the engine has stopped
  //   INVALID_ARGUMENT   CheckFits would have said so
  virtual void Submit(std::shared_ptr<Job> job) = 0;

  // The caller of `job` is gone. If its batch is not sealed yet its rows are dropped and
  // Done(CANCELLED) runs (in this call, or soon after on another thread); otherwise it completes as
  // usual.
  virtual void Cancel(const Job& job) = 0;

  // Somebody beside the engine has had INTERNAL from the backend: as if a batch had.
  virtual void DeviceLost(const absl::Status& cause) = 0;

  // Waits until every submitted job is done, or until `deadline`. True: nothing is left.
  virtual bool WaitIdle(absl::Time deadline) = 0;

  // The one that has been at it longest, if any is.
  virtual std::optional<RunningBatch> OldestRunning() = 0;

  // Ends what is left with UNAVAILABLE and joins all threads: waits for the batches that run, for
  // ever if the device does not end them. Called by the destructor as well. Not from inside Done.
  virtual void Stop() = 0;

  virtual const EngineOptions& options() const = 0;
};

}  // namespace logitd::engine

#endif  // LOGITD_SERVER_ENGINE_ENGINE_H_
