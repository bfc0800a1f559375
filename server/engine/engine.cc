#include "server/engine/engine.h"

#include <atomic>
#include <mutex>
#include <optional>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "server/engine/activity.h"
#include "server/engine/batch.h"
#include "server/engine/batcher.h"
#include "server/engine/costs.h"
#include "server/engine/metrics.h"
#include "server/engine/run_slice.h"
#include "server/engine/sync.h"
#include "spdlog/spdlog.h"

namespace logitd::engine {
namespace {

// How long the destructor waits for kept answers. The transport drops them when its connections
// end.
constexpr absl::Duration kKeptAnswersTimeout = absl::Seconds(5);

// Frees its slabs, also when Create fails halfway.
class SlabPool {
 public:
  explicit SlabPool(Backend* backend) : backend_(backend) {}
  ~SlabPool() {
    for (const Slab& slab : slabs_) backend_->FreeSlab(slab);
  }
  SlabPool(const SlabPool&) = delete;
  SlabPool& operator=(const SlabPool&) = delete;

  absl::Status Add(size_t bytes) {
    absl::StatusOr<Slab> slab = backend_->AllocateSlab(bytes);
    if (slab.ok()) slabs_.push_back(*slab);
    return slab.status();
  }
  // Leaks the slabs: an answer still uses them.
  void Leave() { slabs_.clear(); }
  const std::vector<Slab>& slabs() const { return slabs_; }

 private:
  Backend* const backend_;
  std::vector<Slab> slabs_;
};

// One thread per stream, the copy threads and the timer thread. All run the batcher's loops.
class ThreadedEngine final : public Engine {
 public:
  ThreadedEngine(std::unique_ptr<SlabPool> slabs, std::vector<std::unique_ptr<Stream>> streams,
                 const EngineOptions& options, const SliceRules& rules, Metrics* metrics,
                 absl::AnyInvocable<void(absl::Status)> on_device_lost)
      : options_(options),
        layout_(options),
        rules_(rules),
        metrics_(metrics),
        on_device_lost_(std::move(on_device_lost)),
        slabs_(std::move(slabs)),
        streams_(std::move(streams)),
        activity_(options.streams, options.ops),
        batcher_(options_, rules_, slabs_->slabs(), &costs_, metrics) {
    for (int i = 0; i < options_.streams; ++i) {
      threads_.emplace_back([this, i] { StreamLoop(i); });
    }
    for (int i = 0; i < options_.copy_threads; ++i) {
      threads_.emplace_back([this] { batcher_.CopyLoop(); });
    }
    threads_.emplace_back([this] { batcher_.ExpireLoop(); });
  }

  ~ThreadedEngine() override {
    Stop();
    if (!batcher_.WaitForKept(absl::Now() + kKeptAnswersTimeout)) {
      spdlog::error("the transport still keeps answers after {} s; their slabs are not freed",
                    absl::ToInt64Seconds(kKeptAnswersTimeout));
      slabs_->Leave();
    }
  }

  absl::Status CheckFits(const JobSpec& spec) const override {
    return engine::CheckFits(spec, options_);
  }
  void Submit(std::shared_ptr<Job> job) override { batcher_.Submit(std::move(job)); }
  void Cancel(const Job& job) override { batcher_.Cancel(job); }
  void DeviceLost(const absl::Status& cause) override {
    Close(cause);
    if (metrics_ != nullptr) metrics_->CountDeviceError(/*lost=*/true);
    TellOwner(cause);
  }
  bool WaitIdle(absl::Time deadline) override { return batcher_.WaitIdle(deadline); }

  std::optional<RunningBatch> OldestRunning() override { return batcher_.OldestRunning(); }

  void Stop() override {
    std::call_once(stop_once_, [this] {
      batcher_.Stop();
      for (std::thread& thread : threads_) thread.join();
      batcher_.WaitForCallers();
    });
  }

  const EngineOptions& options() const override { return options_; }
  const Costs& costs() const override { return costs_; }
  const Activity& activity() const override { return activity_; }

 private:
  void StreamLoop(int index) {
    Stream& stream = *streams_[static_cast<size_t>(index)];
    Batch* batch = nullptr;
    while ((batch = batcher_.Next(batch)) != nullptr) {
      const std::string_view op = batch->key.op->name;
      const int64_t begun_ns = MonotonicNanos();
      activity_.Begin(index, batch->key.op, begun_ns);
      JobTimes oldest;
      const absl::Status status = RunSlice(
          stream, layout_, rules_, costs_, *batch,
          [this](const absl::Status& cause) { Close(cause); },
          [this, batch] { return batcher_.Keep(batch); }, &oldest);
      const int64_t ended_ns = MonotonicNanos();
      activity_.End(index, batch->progress.slice_rows, ended_ns);
      if (status.ok()) {
        if (metrics_ == nullptr) continue;
        if (batch->progress.slice_rows > 0) {
          metrics_->CountSlice(op, static_cast<double>(ended_ns - begun_ns) * 1e-9);
        }
        if (oldest.batch_rows > 0) metrics_->CountBatch(op, oldest);
        continue;
      }
      const bool lost = absl::IsInternal(status);
      if (metrics_ != nullptr) metrics_->CountDeviceError(lost);
      spdlog::error("the device failed a batch of {} with {} rows: {}", op, oldest.batch_rows,
                    status.ToString());
      // Last: the owner may end the process in it, and by now the jobs have their answers.
      if (lost) TellOwner(status);
    }
  }

  void Close(const absl::Status& cause) {
    batcher_.Close(absl::StrCat("the device is lost: ", cause.message()));
  }

  void TellOwner(const absl::Status& cause) {
    if (!device_lost_.exchange(true)) on_device_lost_(cause);
  }

  const EngineOptions options_;
  const SlabLayout layout_;
  const SliceRules rules_;
  Costs costs_;
  Metrics* const metrics_;
  absl::AnyInvocable<void(absl::Status)> on_device_lost_;
  std::atomic<bool> device_lost_ = false;
  const std::unique_ptr<SlabPool> slabs_;
  const std::vector<std::unique_ptr<Stream>> streams_;
  Activity activity_;
  Batcher batcher_;
  std::once_flag stop_once_;
  std::vector<std::thread> threads_;
};

absl::Status CheckOptions(const EngineOptions& options) {
  struct Range {
    std::string_view name;
    int64_t value;
    int64_t low;
    int64_t high;
  };
  constexpr int64_t kMaxBytes = int64_t{1} << 40;
  const Range ranges[] = {
      {"streams", options.streams, 1, 64},
      {"slabs_per_stream", options.slabs_per_stream, 1, 64},
      {"slab_payload_bytes", options.slab_payload_bytes, 1, kMaxBytes},
      {"slab_answer_bytes", options.slab_answer_bytes, 1, kMaxBytes},
      {"max_batch_rows", options.max_batch_rows, 1, int64_t{1} << 24},
      {"copy_threads", options.copy_threads, 1, 256},
      {"ops", static_cast<int64_t>(options.ops.size()), 1, 64},
      {"max_batch_delay in microseconds", absl::ToInt64Microseconds(options.max_batch_delay), 0,
       absl::ToInt64Microseconds(absl::Hours(24))},
      {"max_slice in microseconds", absl::ToInt64Microseconds(options.max_slice), 0,
       absl::ToInt64Microseconds(absl::Hours(24))},
      {"idle_spin in microseconds", absl::ToInt64Microseconds(options.idle_spin), 0, 10000},
  };
  for (const Range& range : ranges) {
    if (range.value < range.low || range.value > range.high) {
      return absl::InvalidArgumentError(absl::StrFormat("%s: got %d, allowed %d..%d", range.name,
                                                        range.value, range.low, range.high));
    }
  }
  return absl::OkStatus();
}

SliceRules RulesFor(const EngineOptions& options, const DeviceInfo& device) {
  absl::Duration max_slice = options.max_slice;
  if (max_slice == absl::ZeroDuration()) {
    max_slice = absl::Milliseconds(device.backend == "cuda" ? 25 : 2);
  }
  return {.max_slice_ns = absl::ToInt64Nanoseconds(max_slice), .linear_rows = device.linear_rows};
}

}  // namespace

absl::StatusOr<std::unique_ptr<Engine>> Engine::Create(
    Backend* backend, const EngineOptions& options, Metrics* metrics,
    absl::AnyInvocable<void(absl::Status)> on_device_lost) {
  if (absl::Status status = CheckOptions(options); !status.ok()) return status;
  auto slabs = std::make_unique<SlabPool>(backend);
  const SlabLayout layout(options);
  for (int i = 0; i < options.streams * options.slabs_per_stream; ++i) {
    if (absl::Status status = slabs->Add(layout.bytes); !status.ok()) return status;
  }
  std::vector<std::unique_ptr<Stream>> streams;
  for (int i = 0; i < options.streams; ++i) {
    absl::StatusOr<std::unique_ptr<Stream>> stream = backend->CreateStream();
    if (!stream.ok()) return stream.status();
    streams.push_back(*std::move(stream));
  }
  return std::make_unique<ThreadedEngine>(std::move(slabs), std::move(streams), options,
                                          RulesFor(options, backend->device()), metrics,
                                          std::move(on_device_lost));
}

}  // namespace logitd::engine
