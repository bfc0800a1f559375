// The devices of a server. Each does the same work, except on heads that are cut over all of them.
#ifndef LOGITD_SERVER_ENGINE_DEVICES_H_
#define LOGITD_SERVER_ENGINE_DEVICES_H_

#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/backend.h"
#include "kernels/sharded_stream.h"
#include "server/engine/numa.h"

namespace logitd::engine {

// Devices are counted from 0 here. Operators know them by DeviceInfo::number. Thread-safe.
class Devices {
 public:
  // At least one; all outlive this. `shards`: how those that hold parts of heads work together.
  explicit Devices(std::vector<Backend*> backends, const NumaNodes& nodes = NumaNodes(),
                   const ShardOptions& shards = {});

  int count() const { return static_cast<int>(backends_.size()); }
  Backend* backend(int device) const { return backends_[static_cast<size_t>(device)]; }
  absl::Span<Backend* const> backends() const { return backends_; }
  const DeviceInfo& info(int device) const { return backend(device)->device(); }
  // "device 3", as operators know it.
  std::string NameOf(int device) const;

  // The processors on the device's node, for CpuScope. Empty: the system has one node, or does not
  // say which node the device is on.
  const CpuSet& cpus(int device) const { return cpus_[static_cast<size_t>(device)]; }
  // The device's node; -1 where cpus() is empty.
  int node(int device) const { return nodes_[static_cast<size_t>(device)]; }

  // A lost device runs nothing any more, and never comes back. True: it was not lost before.
  bool Lose(int device) { return !lost_[static_cast<size_t>(device)].exchange(true); }
  bool lost(int device) const { return lost_[static_cast<size_t>(device)]; }
  // Devices that are not lost.
  int left() const;

  // How they exchange, or why heads cannot be cut over them: see kernels/sharded_stream.h. One
  // GPU is refused too: it would only hold memory for the exchange with others.
  absl::StatusOr<ShardExchange> CheckCanShard() const;
  const ShardOptions& shards() const { return shards_; }
  // From now on CheckCanShard answers `why`, which is not OK. Called before other threads use this.
  void RefuseShards(absl::Status why) { shards_refused_ = std::move(why); }

 private:
  const std::vector<Backend*> backends_;
  std::vector<CpuSet> cpus_;
  std::vector<int> nodes_;
  std::vector<std::atomic<bool>> lost_;
  const ShardOptions shards_;
  absl::Status shards_refused_;
};

// An error of one device keeps which one it was.
absl::Status OfDevice(int device, absl::Status status);
// nullopt: the status does not say.
std::optional<int> DeviceOf(const absl::Status& status);

}  // namespace logitd::engine

#endif  // LOGITD_SERVER_ENGINE_DEVICES_H_
