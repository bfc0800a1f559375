// The engine runs jobs in batches on the streams of its devices.
#ifndef LOGITD_SERVER_ENGINE_ENGINE_H_
#define LOGITD_SERVER_ENGINE_ENGINE_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string_view>

#include "absl/functional/any_invocable.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "kernels/backend.h"
#include "server/base/clock.h"
#include "server/engine/job.h"

namespace logitd::engine {

class Costs;
class Activity;
class Devices;
class Metrics;

// `streams` and `slabs_per_stream` are of each device.
struct EngineOptions {
  int streams = 2;           // batches that run at once
  int slabs_per_stream = 2;  // for batches between two slices, and answers that are sent from them
  // Payload and lists of a batch, and so of the largest request.
  int64_t slab_payload_bytes = int64_t{64} << 20;
  // Outputs of a batch, and so of the largest request.
  int64_t slab_answer_bytes = int64_t{64} << 20;
  int64_t max_batch_rows = 65536;
  // Jobs wait for others of their key, also while a stream is idle: so long at most.
  absl::Duration max_batch_delay = absl::ZeroDuration();
  // Every op that a job may have. Slabs have room for the parameters of each.
  absl::Span<const OpTraits* const> ops;
  // Work that takes longer, by estimate, runs in slices of about this time, and other work runs in
  // between. 0: 2 ms on the CPU, where a cut costs little; 25 ms on CUDA, where a launch and its
  // last wave of blocks do.
  absl::Duration max_slice = absl::ZeroDuration();
  // How long one idle stream polls before it sleeps. A sleeping thread takes 20 us to wake.
  absl::Duration idle_spin = absl::Microseconds(30);
  // The clock of deadlines and delays. Outlives the engine.
  Clock* clock = &SteadyClock();
};

// A batch of which a stream runs a slice.
struct RunningBatch {
  std::string_view op;
  int64_t rows;
  absl::Duration age;
  int device;  // as Devices counts them
};

// Thread-safe. Create allocates everything (slabs, arenas, threads). Jobs allocate nothing.
class Engine {
 public:
  // A device whose backend reports INTERNAL is lost: its batches that have begun end with
  // UNAVAILABLE, and the other devices do all other work. `on_device_lost` runs once, on an engine
  // thread or in DeviceLost or SubmitAlone, when no device is left. From then on every job ends
  // with UNAVAILABLE, and the owner should end the process. The callback must not call Stop or
  // WaitIdle, which wait for its thread. `metrics` may be null. `metrics` and the backends of
  // `devices` outlive the engine. INVALID_ARGUMENT: an option is out of range.
  static absl::StatusOr<std::unique_ptr<Engine>> Create(
      std::shared_ptr<Devices> devices, const EngineOptions& options, Metrics* metrics,
      absl::AnyInvocable<void(absl::Status)> on_device_lost);
  // With one device.
  static absl::StatusOr<std::unique_ptr<Engine>> Create(
      Backend* backend, const EngineOptions& options, Metrics* metrics,
      absl::AnyInvocable<void(absl::Status)> on_device_lost);
  virtual ~Engine() = default;

  // INVALID_ARGUMENT, with value and limit, if a job of this size can never run.
  virtual absl::Status CheckFits(const JobSpec& spec) const = 0;

  // Runs the job: it waits until a stream is free, shares a batch with others of its key, and is
  // Done. Done runs exactly once, possibly before Submit returns, with OK or
  //
  //   DEADLINE_EXCEEDED  the deadline passed before its last slice ended
  //   CANCELLED          Cancel came before its last slice ended
  //   UNAVAILABLE        a device failed for its batch, none is left, or the engine has stopped
  //   INVALID_ARGUMENT   the job can never run: see CheckFits
  //
  // Order. Jobs of Priority::kInteractive go before those of kBatch, at every step: a stream, the
  // next slice. A batch goes to the device that is free first, and stays there once it has begun.
  // Among jobs of one priority the callers share the streams by weight, counted in estimated time;
  // jobs of one caller go in the order in which they came, the short ones and those that take more
  // than one slice each among themselves. Jobs of any caller may share a batch. Batches run in
  // slices (EngineOptions::max_slice), and the most urgent batch gets the next one. A slice is
  // longer than max_slice only where a job may not be cut (JobSpec::whole), or where one pass over
  // a head takes longer.
  void Submit(std::shared_ptr<Job> job) { Submit({&job, 1}); }
  // Submits several jobs under one lock. Moves them out of the span.
  virtual void Submit(absl::Span<std::shared_ptr<Job>> jobs) = 0;

  // Submits one job by a thread that has nothing else to do until the job has ended: where no other
  // job is there, and a stream is idle, the thread runs a short job itself, in this call. That
  // spares the job two hand-overs to other threads. It is not done on the host, nor for a kind of
  // job that has not run before. Then `ended` runs when the stream is free again: for what should
  // not wait until the engine has counted. Done has run by then, unless the job goes on in another
  // slice.
  virtual void SubmitAlone(std::shared_ptr<Job> job, absl::FunctionRef<void()> ended) = 0;

  // The caller of `job` is gone. If the job waits or is between two slices, it ends, and
  // Done(CANCELLED) runs in this call or soon after on another thread. Otherwise that happens after
  // the slice. A slice in which no job has a caller any more is cut short where the device can.
  virtual void Cancel(const Job& job) = 0;

  // A user of a backend other than the engine got INTERNAL. It counts like INTERNAL from a batch of
  // the device that DeviceOf(cause) names, or of the first device.
  virtual void DeviceLost(const absl::Status& cause) = 0;

  // Waits until every submitted job is done, or until `deadline`. True: nothing is left.
  virtual bool WaitIdle(absl::Time deadline) = 0;

  // The batch that has run for the longest time, if any runs.
  virtual std::optional<RunningBatch> OldestRunning() = 0;

  // Ends jobs with UNAVAILABLE and joins the threads of streams. When it returns, Done of every job
  // has run. Waits for the slices that run, for ever if the device does not end them; jobs for
  // which that is the last slice get their answers. The destructor calls it too. Not from inside
  // Done.
  virtual void Stop() = 0;

  virtual const EngineOptions& options() const = 0;

  // The devices, and which of them are lost. Lives as long as the engine.
  virtual const Devices& devices() const = 0;

  // Costs of work here. Lives as long as the engine.
  virtual const Costs& costs() const = 0;

  // The share of time that streams work. Lives as long as the engine.
  virtual const Activity& activity() const = 0;
};

}  // namespace logitd::engine

#endif  // LOGITD_SERVER_ENGINE_ENGINE_H_
