// A simulated device for sharded heads. It computes as the CPU backend does; a test holds the half
// of linear_topk, of linear_cross_entropy's backward, or of an op that exchanges logits, that runs
// on it, or makes it fail.
#ifndef LOGITD_TESTS_SHARD_BACKEND_H_
#define LOGITD_TESTS_SHARD_BACKEND_H_

#include <condition_variable>
#include <memory>
#include <mutex>
#include <utility>
#include <variant>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/backend.h"
#include "kernels/shards.h"
#include "kernels/status_macros.h"

namespace logitd {

// Thread-safe.
class ShardBackend final : public Backend {
 public:
  explicit ShardBackend(int number, bool is_host = true) {
    info_ = cpu_->device();
    info_.number = number;
    info_.is_host = is_host;
    if (!is_host) info_.backend = "fake";
  }

  // The next partials end with `fault`, until it is OK again.
  void Fail(absl::Status fault) {
    const std::lock_guard lock(mutex_);
    fault_ = std::move(fault);
  }
  // From Hold to Release partials wait on this device.
  void Hold() {
    const std::lock_guard lock(mutex_);
    hold_ = true;
  }
  void Release() {
    const std::lock_guard lock(mutex_);
    hold_ = false;
    changed_.notify_all();
  }
  // Waits until a partial waits.
  void WaitUntilHeld() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return held_ > 0; });
  }
  // Waits until all of its streams are gone.
  void WaitUntilUnused() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return streams_ == 0; });
  }
  int partials() {  // that began
    const std::lock_guard lock(mutex_);
    return partials_;
  }

  const DeviceInfo& device() const override { return info_; }
  absl::StatusOr<Slab> AllocateSlab(size_t bytes) override { return cpu_->AllocateSlab(bytes); }
  void FreeSlab(const Slab& slab) override { cpu_->FreeSlab(slab); }
  absl::StatusOr<DeviceMemory> AllocateDevice(size_t bytes) override {
    return cpu_->AllocateDevice(bytes);
  }
  void FreeDevice(const DeviceMemory& memory) override { cpu_->FreeDevice(memory); }
  absl::StatusOr<std::unique_ptr<Stream>> CreateStream(StreamUse use) override {
    absl::StatusOr<std::unique_ptr<Stream>> stream = cpu_->CreateStream(use);
    if (!stream.ok()) return stream.status();
    return std::make_unique<ShardStream>(this, *std::move(stream));
  }

 private:
  class ShardStream final : public Stream {
   public:
    ShardStream(ShardBackend* backend, std::unique_ptr<Stream> stream)
        : backend_(backend), stream_(std::move(stream)) {
      const std::lock_guard lock(backend_->mutex_);
      ++backend_->streams_;
    }
    ~ShardStream() override {
      stream_.reset();
      const std::lock_guard lock(backend_->mutex_);
      --backend_->streams_;
      backend_->changed_.notify_all();
    }
    absl::Status Upload(const Slab& slab, size_t offset, size_t bytes) override {
      return stream_->Upload(slab, offset, bytes);
    }
    absl::Status Download(const Slab& slab, size_t offset, size_t bytes) override {
      return stream_->Download(slab, offset, bytes);
    }
    absl::Status Fill(const Slab& slab, size_t offset, size_t bytes, std::byte* to) override {
      return stream_->Fill(slab, offset, bytes, to);
    }
    absl::Status Gather(absl::Span<const RowsCopy> copies) override {
      return stream_->Gather(copies);
    }
    absl::Status RunOp(const Op& op) override {
      if (std::holds_alternative<const LinearTopKPartialArgs*>(op) ||
          std::holds_alternative<const LinearSamplePartialArgs*>(op) ||
          std::holds_alternative<const LinearCrossEntropyBackwardPartialArgs*>(op)) {
        LOGITD_RETURN_IF_ERROR(backend_->Begin());
      }
      return stream_->RunOp(op);
    }
    absl::StatusOr<StreamTimes> Wait() override { return stream_->Wait(); }

   private:
    ShardBackend* const backend_;
    std::unique_ptr<Stream> stream_;
  };

  absl::Status Begin() {
    std::unique_lock lock(mutex_);
    ++partials_;
    ++held_;
    changed_.notify_all();
    changed_.wait(lock, [this] { return !hold_; });
    --held_;
    return fault_;
  }

  const std::unique_ptr<Backend> cpu_ = CreateCpuBackend({.cpu_threads = 1}).value();
  DeviceInfo info_;
  std::mutex mutex_;
  std::condition_variable changed_;
  absl::Status fault_;
  bool hold_ = false;
  int held_ = 0;
  int streams_ = 0;
  int partials_ = 0;
};

}  // namespace logitd

#endif  // LOGITD_TESTS_SHARD_BACKEND_H_
