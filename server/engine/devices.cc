#include "server/engine/devices.h"

#include <algorithm>
#include <utility>

#include "absl/strings/cord.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace logitd::engine {
namespace {

constexpr char kDevice[] = "logitd/device";

}  // namespace

Devices::Devices(std::vector<Backend*> backends, const NumaNodes& nodes, const ShardOptions& shards)
    : backends_(std::move(backends)), lost_(backends_.size()), shards_(shards) {
  for (Backend* backend : backends_) {
    const int node = nodes.NodeOf(backend->device().pci_bus_id);
    cpus_.push_back(nodes.CpusOf(node));
    nodes_.push_back(cpus_.back().empty() ? -1 : node);
  }
}

std::string Devices::NameOf(int device) const {
  return absl::StrCat("device ", info(device).number);
}

int Devices::left() const {
  return static_cast<int>(
      std::count_if(lost_.begin(), lost_.end(), [](const auto& lost) { return !lost.load(); }));
}

absl::StatusOr<ShardExchange> Devices::CheckCanShard() const {
  if (!shards_refused_.ok()) return shards_refused_;
  absl::StatusOr<ShardExchange> exchange = logitd::CheckCanShard(backends(), shards_);
  if (exchange.ok() && count() == 1 && !info(0).is_host) {
    return absl::FailedPreconditionError(
        "shard: got 1 device, allowed 2 or more (--device); one holds the whole head");
  }
  return exchange;
}

absl::Status OfDevice(int device, absl::Status status) {
  if (!status.ok()) status.SetPayload(kDevice, absl::Cord(absl::StrCat(device)));
  return status;
}

std::optional<int> DeviceOf(const absl::Status& status) {
  const absl::optional<absl::Cord> payload = status.GetPayload(kDevice);
  int device = 0;
  if (!payload.has_value() || !absl::SimpleAtoi(std::string(*payload), &device)) {
    return std::nullopt;
  }
  return device;
}

}  // namespace logitd::engine
