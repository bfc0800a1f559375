#include "server/engine/engine.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "kernels/sharded_stream.h"
#include "server/engine/activity.h"
#include "server/engine/batch.h"
#include "server/engine/batcher.h"
#include "server/engine/costs.h"
#include "server/engine/devices.h"
#include "server/engine/heads.h"
#include "server/engine/metrics.h"
#include "server/engine/run_slice.h"
#include "server/engine/sync.h"
#include "spdlog/spdlog.h"

namespace logitd::engine {
namespace {

// How long the destructor waits for kept answers. The transport drops them when its connections
// end.
constexpr absl::Duration kKeptAnswersTimeout = absl::Seconds(5);

// The same number of slabs of each device. Frees them, also when Create fails halfway.
class SlabPool {
 public:
  ~SlabPool() {
    for (size_t i = 0; i < slabs_.size(); ++i) owners_[i]->FreeSlab(slabs_[i]);
  }
  SlabPool() = default;
  SlabPool(const SlabPool&) = delete;
  SlabPool& operator=(const SlabPool&) = delete;

  absl::Status Add(Backend* backend, size_t bytes) {
    absl::StatusOr<Slab> slab = backend->AllocateSlab(bytes);
    if (!slab.ok()) return slab.status();
    slabs_.push_back(*slab);
    owners_.push_back(backend);
    return absl::OkStatus();
  }
  // Leaks the slabs: an answer still uses them.
  void Leave() { slabs_.clear(); }
  const std::vector<Slab>& slabs() const { return slabs_; }

 private:
  std::vector<Slab> slabs_;
  std::vector<Backend*> owners_;
};

// One thread per stream, the copy threads and the timer thread. All run the batcher's loops; those
// of a device run near it. Streams are counted over all devices, those of a device one after another.
class ThreadedEngine final : public Engine {
 public:
  ThreadedEngine(std::shared_ptr<Devices> devices, std::unique_ptr<SlabPool> slabs,
                 std::vector<std::unique_ptr<Stream>> streams, std::unique_ptr<Stream> over_all,
                 const EngineOptions& options, const SliceRules& rules, Metrics* metrics,
                 absl::AnyInvocable<void(absl::Status)> on_device_lost)
      : options_(options),
        layout_(options),
        rules_(rules),
        metrics_(metrics),
        on_device_lost_(std::move(on_device_lost)),
        devices_(std::move(devices)),
        slabs_(std::move(slabs)),
        streams_(std::move(streams)),
        over_all_(std::move(over_all)),
        activity_(static_cast<int>(streams_.size()), options.ops),
        batcher_(options_, rules_, *devices_, slabs_->slabs(), &costs_, metrics) {
    for (int device = 0; device < devices_->count(); ++device) {
      for (int i = 0; i < options_.streams; ++i) {
        threads_.emplace_back([this, device, i] {
          const CpuScope near(devices_->cpus(device));
          StreamLoop(device * options_.streams + i);
        });
      }
      for (int i = 0; i < options_.copy_threads; ++i) {
        threads_.emplace_back([this, device] {
          const CpuScope near(devices_->cpus(device));
          batcher_.CopyLoop(device);
        });
      }
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
  void Submit(absl::Span<std::shared_ptr<Job>> jobs) override { batcher_.Submit(jobs); }
  void SubmitAlone(std::shared_ptr<Job> job, absl::FunctionRef<void()> ended) override {
    const CallerScope scope = batcher_.EnterCall();
    const Batcher::Loan loan = batcher_.SubmitAlone(std::move(job));
    if (loan.batch == nullptr) return;
    const Ran ran = Run(loan.stream, *loan.batch);
    batcher_.Return(loan);
    const bool failed = !ran.status.ok();
    if (failed) Count(ran);  // whoever acts on a lost device need not wait for `ended`
    ended();
    if (!failed) Count(ran);
  }
  void Cancel(const Job& job) override { batcher_.Cancel(job); }
  void DeviceLost(const absl::Status& cause) override {
    const int device = DeviceOf(cause).value_or(0);
    Lose(device, cause);
    if (metrics_ != nullptr) metrics_->CountDeviceError(device, /*lost=*/true);
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
  const Devices& devices() const override { return *devices_; }
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

  void StreamLoop(int index) {
    Batch* batch = nullptr;
    while ((batch = batcher_.Next(index, batch)) != nullptr) Count(Run(index, *batch));
  }

  // Runs a slice of the batch on stream `index`, or on that over all devices.
  Ran Run(int index, Batch& batch) {
    const int device = index / options_.streams;
    const bool sharded = IsSharded(batch.key);
    Stream& stream = sharded ? *over_all_ : *streams_[static_cast<size_t>(index)];
    const int64_t begun_ns = MonotonicNanos();
    // On all devices, and the only slice of its kind: as much as the server can do.
    const int as_many = sharded ? static_cast<int>(streams_.size()) : 1;
    activity_.Begin(index, batch.key.op, begun_ns, as_many);
    Ran ran = {.op = batch.key.op->name, .device = device, .sharded = sharded};
    ran.status = RunSlice(
        stream, layout_, rules_, costs_, batch,
        [this, device](const absl::Status& cause) {
          const std::vector<int> failed = FailedShards(cause);
          if (failed.empty()) Lose(device, cause);
          for (const int each : failed) Lose(each, cause);
        },
        [this, &batch] { return batcher_.Keep(&batch); }, &ran.oldest);
    const int64_t ended_ns = MonotonicNanos();
    ran.rows = batch.progress.slice_rows;
    ran.ns = ended_ns - begun_ns;
    activity_.End(index, ran.rows, ended_ns);
    return ran;
  }

  void Count(const Ran& ran) {
    if (ran.status.ok()) {
      if (metrics_ == nullptr) return;
      if (ran.rows > 0) {
        metrics_->CountSlice(ran.op, ran.sharded ? Metrics::kAllDevices : ran.device, ran.rows,
                             static_cast<double>(ran.ns) * 1e-9);
      }
      if (ran.oldest.batch_rows > 0) metrics_->CountBatch(ran.op, ran.oldest);
      return;
    }
    const bool lost = absl::IsInternal(ran.status);
    std::vector<int> failed = FailedShards(ran.status);
    if (failed.empty()) failed.push_back(ran.device);
    std::vector<std::string> names;
    for (const int device : failed) {
      if (metrics_ != nullptr) metrics_->CountDeviceError(device, lost);
      names.push_back(devices_->NameOf(device));
    }
    spdlog::error("{} failed a batch of {} with {} rows: {}", absl::StrJoin(names, ", "), ran.op,
                  ran.oldest.batch_rows,
                  ran.status.ToString(absl::StatusToStringMode::kWithNoExtraData));
    // Last: the owner may end the process in it, and by now the jobs have their answers.
    if (lost) TellOwner(ran.status);
  }

  // Takes the device out. Does nothing if it is out already.
  void Lose(int device, const absl::Status& cause) {
    if (!devices_->Lose(device)) return;
    const int left = devices_->left();
    const std::string name = devices_->NameOf(device);
    for (int i = 0; i < options_.streams; ++i) activity_.Remove(device * options_.streams + i);
    if (left > 0) {
      batcher_.Lose(device, absl::StrCat(name, " is lost: ", cause.message()));
    } else {
      batcher_.Close(absl::StrCat("the device is lost: ", cause.message()));
    }
    if (metrics_ != nullptr) metrics_->SetDeviceLost(device);
    // The owner says so where none is left.
    if (left > 0) {
      spdlog::error("{} is lost, {} of {} devices serve on: {}", name, left, devices_->count(),
                    cause.ToString(absl::StatusToStringMode::kWithNoExtraData));
    }
  }

  void TellOwner(const absl::Status& cause) {
    if (devices_->left() == 0 && !told_.exchange(true)) on_device_lost_(cause);
  }

  const EngineOptions options_;
  const SlabLayout layout_;
  const SliceRules rules_;
  Costs costs_;
  Metrics* const metrics_;
  absl::AnyInvocable<void(absl::Status)> on_device_lost_;
  std::atomic<bool> told_ = false;
  const std::shared_ptr<Devices> devices_;
  const std::unique_ptr<SlabPool> slabs_;
  const std::vector<std::unique_ptr<Stream>> streams_;
  const std::unique_ptr<Stream> over_all_;  // for sharded heads; null: there can be none
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

SliceRules RulesFor(const EngineOptions& options, const Devices& devices) {
  absl::Duration max_slice = options.max_slice;
  if (max_slice == absl::ZeroDuration()) {
    max_slice = absl::Milliseconds(devices.info(0).backend == "cuda" ? 25 : 2);
  }
  SliceRules rules = {.max_slice_ns = absl::ToInt64Nanoseconds(max_slice), .linear_rows = 0};
  for (int i = 0; i < devices.count(); ++i) {
    rules.linear_rows = std::max(rules.linear_rows, devices.info(i).linear_rows);
  }
  return rules;
}

// Which device an error of Create came from, where there are several.
absl::Status Named(const Devices& devices, int device, const absl::Status& status) {
  if (devices.count() == 1) return status;
  return absl::Status(status.code(), absl::StrCat(devices.NameOf(device), ": ", status.message()));
}

}  // namespace

absl::StatusOr<std::unique_ptr<Engine>> Engine::Create(
    std::shared_ptr<Devices> devices, const EngineOptions& options, Metrics* metrics,
    absl::AnyInvocable<void(absl::Status)> on_device_lost) {
  if (absl::Status status = CheckOptions(options); !status.ok()) return status;
  auto slabs = std::make_unique<SlabPool>();
  const SlabLayout layout(options);
  std::vector<std::unique_ptr<Stream>> streams;
  for (int device = 0; device < devices->count(); ++device) {
    const CpuScope near(devices->cpus(device));
    Backend* const backend = devices->backend(device);
    for (int i = 0; i < options.streams * options.slabs_per_stream; ++i) {
      if (absl::Status status = slabs->Add(backend, layout.bytes); !status.ok()) {
        return Named(*devices, device, status);
      }
    }
    for (int i = 0; i < options.streams; ++i) {
      absl::StatusOr<std::unique_ptr<Stream>> stream = backend->CreateStream();
      if (!stream.ok()) return Named(*devices, device, stream.status());
      streams.push_back(*std::move(stream));
    }
  }
  std::unique_ptr<Stream> over_all;
  if (const absl::StatusOr<ShardExchange> exchange = devices->CheckCanShard(); exchange.ok()) {
    absl::StatusOr<std::unique_ptr<Stream>> stream =
        CreateShardedStream(devices->backends(), devices->shards());
    if (stream.ok()) {
      over_all = *std::move(stream);
      if (*exchange != ShardExchange::kAuto) {
        spdlog::info("shards of heads exchange by {}",
                     *exchange == ShardExchange::kPeers ? "peers" : "nccl");
      }
    } else if (absl::IsUnavailable(stream.status()) && !FailedShard(stream.status())) {
      // The devices are well, but NCCL does not join them, or their streams cannot wait for each other.
      const std::string why = absl::StrCat("shard: ", stream.status().message());
      spdlog::warn("heads cannot be cut over the devices: {}", why);
      devices->RefuseShards(absl::FailedPreconditionError(why));
    } else {
      return stream.status();
    }
  }
  const SliceRules rules = RulesFor(options, *devices);
  return std::make_unique<ThreadedEngine>(std::move(devices), std::move(slabs), std::move(streams),
                                          std::move(over_all), options, rules, metrics,
                                          std::move(on_device_lost));
}

absl::StatusOr<std::unique_ptr<Engine>> Engine::Create(
    Backend* backend, const EngineOptions& options, Metrics* metrics,
    absl::AnyInvocable<void(absl::Status)> on_device_lost) {
  return Create(std::make_shared<Devices>(std::vector<Backend*>{backend}), options, metrics,
                std::move(on_device_lost));
}

}  // namespace logitd::engine
