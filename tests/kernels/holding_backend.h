// A CUDA device that hangs in new streams, in the partials of linear_topk, in a shard's logits, and
// in the gradients of training, from Hold to Release.
#ifndef LOGITD_TESTS_KERNELS_HOLDING_BACKEND_H_
#define LOGITD_TESTS_KERNELS_HOLDING_BACKEND_H_

#include <cuda_runtime_api.h>

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>
#include <variant>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/backend.h"
#include "kernels/cuda/stream.h"
#include "kernels/status_macros.h"

namespace logitd::testing {

// Thread-safe. Has no slabs: those are the first device's.
class HoldingBackend final : public Backend {
 public:
  explicit HoldingBackend(std::unique_ptr<Backend> device) : device_(std::move(device)) {}

  void Hold() {
    const std::lock_guard lock(mutex_);
    hold_ = true;
  }
  void Release() {
    const std::lock_guard lock(mutex_);
    hold_ = false;
    changed_.notify_all();
  }

  const DeviceInfo& device() const override { return device_->device(); }
  absl::StatusOr<Slab> AllocateSlab(size_t) override {
    return absl::UnimplementedError("no slabs");
  }
  void FreeSlab(const Slab&) override {}
  absl::StatusOr<DeviceMemory> AllocateDevice(size_t bytes) override {
    return device_->AllocateDevice(bytes);
  }
  void FreeDevice(const DeviceMemory& memory) override { device_->FreeDevice(memory); }
  absl::StatusOr<std::unique_ptr<Stream>> CreateStream(StreamUse use) override {
    absl::StatusOr<std::unique_ptr<Stream>> stream = device_->CreateStream(use);
    if (!stream.ok()) return stream.status();
    auto holding = std::make_unique<HoldingStream>(
        this,
        std::unique_ptr<cuda::DeviceStream>(static_cast<cuda::DeviceStream*>(stream->release())));
    bool hold = false;
    {
      const std::lock_guard lock(mutex_);
      hold = hold_;
    }
    if (hold) LOGITD_RETURN_IF_ERROR(holding->Enqueue());
    return holding;
  }

  // Only what the second device of a sharded stream is asked for.
  class HoldingStream final : public cuda::DeviceStream {
   public:
    HoldingStream(HoldingBackend* backend, std::unique_ptr<cuda::DeviceStream> stream)
        : backend_(backend), stream_(std::move(stream)) {}

    int device() const override { return stream_->device(); }
    cudaStream_t native() const override { return stream_->native(); }
    int64_t replayed() const override { return stream_->replayed(); }
    absl::Status BeginOps() override { return stream_->BeginOps(); }
    void LimitWait(absl::Duration limit) override { stream_->LimitWait(limit); }
    absl::Status RunOp(const Op& op) override {
      const bool holds = std::holds_alternative<const cuda::ShardLogitsArgs*>(op) ||
                         std::holds_alternative<const cuda::KeptSamplePartialArgs*>(op) ||
                         std::holds_alternative<const LinearTopKPartialArgs*>(op);
      if (holds) LOGITD_RETURN_IF_ERROR(Enqueue());
      return stream_->RunOp(op);
    }
    bool TrainingFits(const cuda::ShardTrainingArgs& args) override {
      return stream_->TrainingFits(args);
    }
    absl::Status BeginTraining(const cuda::ShardTrainingArgs& args) override {
      return stream_->BeginTraining(args);
    }
    absl::Status EndTraining(
        const cuda::ShardTrainingArgs& args,
        absl::FunctionRef<cudaError_t(const MutableTensorView&)> hidden_done) override {
      absl::Status status = Enqueue();
      return status.ok() ? stream_->EndTraining(args, hidden_done) : status;
    }
    absl::Status Upload(const Slab&, size_t, size_t) override {
      return absl::UnimplementedError("upload");
    }
    absl::Status Download(const Slab&, size_t, size_t) override {
      return absl::UnimplementedError("download");
    }
    absl::Status Fill(const Slab&, size_t, size_t, std::byte*) override {
      return absl::UnimplementedError("fill");
    }
    absl::StatusOr<StreamTimes> Wait() override { return stream_->Wait(); }

    cuda::DeviceStream& inner() { return *stream_; }

    // What comes after it waits while the backend holds.
    absl::Status Enqueue() {
      const cudaError_t error = cudaLaunchHostFunc(
          native(), [](void* backend) { static_cast<HoldingBackend*>(backend)->Pass(); }, backend_);
      return cuda::ToStatus(error, "hold");
    }

   private:
    HoldingBackend* const backend_;
    const std::unique_ptr<cuda::DeviceStream> stream_;
  };

 private:
  void Pass() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return !hold_; });
  }

  const std::unique_ptr<Backend> device_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool hold_ = false;
};

}  // namespace logitd::testing

#endif  // LOGITD_TESTS_KERNELS_HOLDING_BACKEND_H_
