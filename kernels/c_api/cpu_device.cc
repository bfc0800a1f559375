// The CPU as a device of the C interface: a call computes before it returns.
#include <memory>
#include <utility>
#include <vector>

#include "kernels/backend.h"
#include "kernels/c_api/device.h"
#include "kernels/status_macros.h"

namespace logitd::c_api {
namespace {

class CpuDevice final : public Device {
 public:
  CpuDevice(std::unique_ptr<Backend> backend, std::unique_ptr<Stream> stream)
      : backend_(std::move(backend)), stream_(std::move(stream)) {}

  size_t WorkspaceBytes(int64_t) const override { return 0; }
  absl::Status Prepare(const logitd_call&) override { return absl::OkStatus(); }

  absl::Status Begin(const logitd_call&, int64_t rows) override {
    if (memory_.size() < CallBytes(rows) + kAlignment) {
      memory_ = std::vector<std::byte>(CallBytes(rows) + kAlignment);
    }
    used_ = (kAlignment - reinterpret_cast<uintptr_t>(memory_.data()) % kAlignment) % kAlignment;
    return absl::OkStatus();
  }

  absl::Status Fill(const RowFill& fill) override {
    for (int64_t r = 0; r < fill.rows; ++r) {
      const int32_t refused = MakeRow(fill, r, 0, 1);
      if (refused != 0) RefuseRow(fill, r, refused, 0, 1);
    }
    return absl::OkStatus();
  }

  absl::Status Weigh(const Reduction& of) override {
    int64_t count = 0;
    for (int64_t r = 0; r < of.rows; ++r) count += of.targets[r] != of.ignored ? 1 : 0;
    const float weight = of.mean ? static_cast<float>(1.0 / static_cast<double>(count)) : 1.0f;
    for (int64_t r = 0; r < of.rows; ++r)
      of.weights[r] = of.targets[r] != of.ignored ? weight : 0.0f;
    of.weights[of.rows] = weight;
    return absl::OkStatus();
  }

  absl::Status Total(const Reduction& of) override {
    double sum = 0;
    for (int64_t r = 0; r < of.rows; ++r)
      sum += of.targets[r] != of.ignored ? double{of.losses[r]} : 0.0;
    *of.total = static_cast<float>(sum * double{of.weights[of.rows]});
    return absl::OkStatus();
  }

  absl::Status Run(const Op& op) override {
    LOGITD_RETURN_IF_ERROR(stream_->RunOp(op));
    return stream_->Wait().status();
  }

 private:
  static constexpr size_t kAlignment = 256;

  std::byte* TakeBytes(size_t bytes) override {
    std::byte* const taken = memory_.data() + used_;
    used_ += (bytes + kAlignment - 1) / kAlignment * kAlignment;
    return taken;
  }

  std::unique_ptr<Backend> backend_;
  std::unique_ptr<Stream> stream_;
  std::vector<std::byte> memory_;
  size_t used_ = 0;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Device>> OpenCpu(int threads) {
  auto backend = CreateBackend("cpu", {.cpu_threads = threads});
  if (!backend.ok()) return backend.status();
  auto stream = (*backend)->CreateStream();
  if (!stream.ok()) return stream.status();
  return std::make_unique<CpuDevice>(*std::move(backend), *std::move(stream));
}

}  // namespace logitd::c_api
