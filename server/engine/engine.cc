#include "server/engine/engine.h"

#include <algorithm>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "kernels/sharded_stream.h"
#include "server/engine/batch.h"
#include "server/engine/devices.h"
#include "server/engine/threaded_engine.h"
#include "spdlog/spdlog.h"

namespace logitd::engine {
namespace {

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
      // The devices are well, but NCCL does not join them, or their streams cannot wait for each
      // other.
      const std::string why = absl::StrCat("shard: ", stream.status().message());
      spdlog::warn("heads cannot be cut over the devices: {}", why);
      devices->RefuseShards(absl::FailedPreconditionError(why));
    } else {
      return stream.status();
    }
  }
  const SliceRules rules = RulesFor(options, *devices);
  return std::make_unique<ThreadedEngine>(ThreadedEngine::Parts{.devices = std::move(devices),
                                                                .slabs = std::move(slabs),
                                                                .streams = std::move(streams),
                                                                .over_all = std::move(over_all)},
                                          options, rules, metrics, std::move(on_device_lost));
}

absl::StatusOr<std::unique_ptr<Engine>> Engine::Create(
    Backend* backend, const EngineOptions& options, Metrics* metrics,
    absl::AnyInvocable<void(absl::Status)> on_device_lost) {
  return Create(std::make_shared<Devices>(std::vector<Backend*>{backend}), options, metrics,
                std::move(on_device_lost));
}

}  // namespace logitd::engine
