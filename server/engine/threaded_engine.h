// The engine's threads: one for each stream, and one for what happens at a time.
#ifndef LOGITD_SERVER_ENGINE_THREADED_ENGINE_H_
#define LOGITD_SERVER_ENGINE_THREADED_ENGINE_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string_view>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/any_invocable.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "kernels/backend.h"
#include "server/base/alarm.h"
#include "server/engine/activity.h"
#include "server/engine/batch.h"
#include "server/engine/costs.h"
#include "server/engine/devices.h"
#include "server/engine/engine.h"
#include "server/engine/idle_streams.h"
#include "server/engine/metrics.h"
#include "server/engine/run_slice.h"
#include "server/engine/scheduler.h"
#include "server/engine/sync.h"

namespace logitd::engine {

// The slabs of all devices, each with the same number. Frees them at its end.
class SlabPool {
 public:
  SlabPool() = default;
  ~SlabPool();
  SlabPool(const SlabPool&) = delete;
  SlabPool& operator=(const SlabPool&) = delete;

  absl::Status Add(Backend* backend, size_t bytes);
  // Leaks the slabs: an answer still uses them.
  void Leave() { slabs_.clear(); }
  const std::vector<Slab>& slabs() const { return slabs_; }

 private:
  std::vector<Slab> slabs_;
  std::vector<Backend*> owners_;
};

// A stream's thread runs near its device. The state is the scheduler's, under one lock.
class ThreadedEngine final : public Engine {
 public:
  // The engine's devices and memory. `over_all`: the stream for sharded heads; null: there can be
  // none.
  struct Parts {
    std::shared_ptr<Devices> devices;
    std::unique_ptr<SlabPool> slabs;
    std::vector<std::unique_ptr<Stream>> streams;
    std::unique_ptr<Stream> over_all;
  };
  ThreadedEngine(Parts parts, const EngineOptions& options, const SliceRules& rules,
                 Metrics* metrics, absl::AnyInvocable<void(absl::Status)> on_device_lost);
  ~ThreadedEngine() override;

  absl::Status CheckFits(const JobSpec& spec) const override;
  void Submit(absl::Span<std::shared_ptr<Job>> jobs) override;
  void SubmitAlone(std::shared_ptr<Job> job, absl::FunctionRef<void()> ended) override;
  void Cancel(const Job& job) override;
  void DeviceLost(const absl::Status& cause) override;
  bool WaitIdle(absl::Time deadline) override;
  std::optional<RunningBatch> OldestRunning() override;
  void Stop() override;
  const EngineOptions& options() const override { return options_; }
  const Devices& devices() const override { return *parts_.devices; }
  const Costs& costs() const override { return costs_; }
  const Activity& activity() const override { return activity_; }

 private:
  // A slice that has run.
  struct Ran {
    std::string_view op;
    int device;
    bool sharded;
    int64_t rows;
    int64_t ns;
    JobTimes oldest;
    absl::Status status;
  };

  // Kept answers reach the engine through this, because they may outlive it.
  struct ReturnDesk {
    Mutex mutex;
    ThreadedEngine* engine ABSL_GUARDED_BY(mutex);
  };

  Batch* Next(int stream, Batch* given_back);
  Batch* Borrow(const Job& job, int* stream) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Change(absl::FunctionRef<void(int64_t now_ns)> change);
  void Announce(int64_t now_ns, int except = IdleStreams::kNone)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void TellEnded(JobList ended);
  bool TellEndedUnlocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  Ran Run(int stream, Batch& batch);
  void Count(const Ran& ran);
  std::shared_ptr<const void> Keep(Batch* batch);
  void Lose(int device, const absl::Status& cause);
  void TellOwner(const absl::Status& cause);

  const EngineOptions options_;
  const SlabLayout layout_;
  const SliceRules rules_;
  const Clock& clock_;
  const bool on_host_;  // DeviceInfo::is_host
  Metrics* const metrics_;
  absl::AnyInvocable<void(absl::Status)> on_device_lost_;
  std::atomic<bool> told_ = false;
  Costs costs_;
  const Parts parts_;
  Activity activity_;
  const std::shared_ptr<ReturnDesk> desk_;

  Mutex mutex_;
  Scheduler scheduler_ ABSL_GUARDED_BY(mutex_);
  IdleStreams idle_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  CondVar all_done_;
  CondVar all_back_;
  std::atomic<int> callers_ = 0;       // threads of others inside a public call
  Alarm alarm_;                        // of the scheduler's next_due
  const std::shared_ptr<void> moved_;  // see Clock::WhenMoved
  std::once_flag stop_once_;
  std::vector<std::thread> threads_;
};

}  // namespace logitd::engine

#endif  // LOGITD_SERVER_ENGINE_THREADED_ENGINE_H_
