#include "server/device_arenas.h"

#include <unistd.h>

#include <cstring>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "kernels/backend.h"
#include "server/arena/pin_budget.h"
#include "server/base/clock.h"
#include "server/log/limited.h"

namespace logitd {
namespace {

// What has taken since `begun`.
void Spend(absl::Time begun, arena::PinBudget* budget) {
  const absl::Time now = SteadyNow();
  budget->Spend(now - begun, now);
}

class CudaArena final : public arena::DeviceArena {
 public:
  CudaArena(Backend* backend, int device, const SharedDeviceMemory& memory,
            arena::PinBudget* budget)
      : backend_(backend), device_(device), memory_(memory), budget_(budget), fd_(memory.fd) {}
  ~CudaArena() override {
    if (fd_ >= 0) close(fd_);
    const absl::Time begun = SteadyNow();
    backend_->FreeShared(memory_);
    Spend(begun, budget_);
  }

  std::byte* data() const override { return memory_.data; }
  int64_t bytes() const override { return static_cast<int64_t>(memory_.bytes); }
  int device() const override { return device_; }
  ArenaDevice description() const override {
    const DeviceInfo& info = backend_->device();
    return {.uuid = info.uuid, .number = static_cast<uint32_t>(info.number)};
  }
  int TakeDescriptor() override { return std::exchange(fd_, -1); }

  absl::Status Write(int64_t offset, absl::Span<const std::byte> from) const override {
    const absl::Status status = backend_->WriteShared(memory_.data + offset, from);
    if (status.ok()) return status;
    return absl::UnavailableError(
        absl::StrCat("shared_output: the device failed: ", std::string(status.message())));
  }

 private:
  Backend* const backend_;
  const int device_;
  const SharedDeviceMemory memory_;
  arena::PinBudget* const budget_;
  int fd_;  // until it is taken
};

// Any device pins for all.
class CudaArenas final : public arena::ArenaDevices {
 public:
  explicit CudaArenas(std::shared_ptr<const engine::Devices> devices)
      : devices_(std::move(devices)) {}

  int count() const override { return devices_->count(); }
  bool lost(int device) const override { return devices_->lost(device); }
  uint32_t number(int device) const override {
    return static_cast<uint32_t>(devices_->info(device).number);
  }

  absl::StatusOr<std::unique_ptr<arena::DeviceArena>> Make(int device, int64_t bytes) override {
    Backend* const backend = devices_->backend(device);
    const absl::Time begun = SteadyNow();
    if (!shared_budget_.Allows(begun)) {
      return absl::ResourceExhaustedError(
          "arena: got one more lease of a GPU's memory after leases without pause, allowed as many "
          "as take a fifth of the time to make; try again in a second");
    }
    const absl::StatusOr<SharedDeviceMemory> memory =
        backend->AllocateShared(static_cast<size_t>(bytes));
    Spend(begun, &shared_budget_);
    if (!memory.ok()) return memory.status();
    return std::make_unique<CudaArena>(backend, device, *memory, &shared_budget_);
  }

  std::shared_ptr<const void> Pin(std::byte* data, int64_t bytes) override {
    int device = 0;
    while (device + 1 < devices_->count() && devices_->lost(device)) ++device;
    Backend* const backend = devices_->backend(device);
    const absl::Time begun = SteadyNow();
    const absl::Status pinned = backend->PinHost(data, static_cast<size_t>(bytes));
    Spend(begun, &pin_budget_);
    if (!pinned.ok()) {
      log::Limited(log::Source::kArenas, spdlog::level::warn,
                   "arena: {}; rows of this lease are copied by the CPU",
                   std::string(pinned.message()));
      return nullptr;
    }
    return {data, [this, backend](std::byte* at) {
              const absl::Time unpins = SteadyNow();
              backend->UnpinHost(at);
              Spend(unpins, &pin_budget_);
            }};
  }

  bool pins() const override {
    if (pin_budget_.Allows(SteadyNow())) return true;
    log::Limited(log::Source::kArenas, spdlog::level::info,
                 "arena: leases come so fast that memory is not pinned: their rows are copied by "
                 "the CPU");
    return false;
  }

 private:
  const std::shared_ptr<const engine::Devices> devices_;
  mutable arena::PinBudget pin_budget_{SteadyNow()};
  arena::PinBudget shared_budget_{SteadyNow()};
};

}  // namespace

std::unique_ptr<arena::ArenaDevices> MakeArenaDevices(
    std::shared_ptr<const engine::Devices> devices) {
  if (devices->info(0).backend != "cuda") return nullptr;
  return std::make_unique<CudaArenas>(std::move(devices));
}

}  // namespace logitd
