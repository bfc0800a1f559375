// What the bench needs of a device: memory, one launch of each op, and the median time of a launch.
#ifndef LOGITD_BENCH_KERNELS_DEVICE_H_
#define LOGITD_BENCH_KERNELS_DEVICE_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/backend.h"
#include "kernels/status_macros.h"
#include "kernels/types.h"

namespace logitd::bench {

// How often a launch is repeated for one figure.
struct Repeat {
  int launches = 1;   // in a row, where the device has a queue
  bool slow = false;  // takes seconds on a CPU: fewer runs there
};

// logits = hidden weight^T, by the device's own library.
struct BareProduct {
  DType dtype;
  int64_t rows;
  int64_t hidden;
  int64_t vocab;
  const std::byte* weight;  // [vocab, hidden]
  const std::byte* states;  // [rows, hidden]
  std::byte* logits;        // [rows, logits_stride]
  int64_t logits_stride;    // elements, a multiple of 32
};

inline double Median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

// Read, Copy and Run only enqueue where the device has a queue.
class Device {
 public:
  virtual ~Device() = default;
  virtual std::string name() const { return backend_->device().name; }
  virtual size_t input_bytes() const = 0;  // far more than the caches hold
  virtual int multiprocessors() const { return 0; }
  // The type of bare products, and of a head's gradients, where the head has `dtype`.
  virtual DType product_dtype(DType dtype) const = 0;

  absl::StatusOr<DeviceMemory> Allocate(size_t bytes) { return backend_->AllocateDevice(bytes); }
  void Free(const DeviceMemory& memory) {
    if (memory.data != nullptr) backend_->FreeDevice(memory);
  }
  virtual absl::Status CopyIn(std::byte* to, const void* from, size_t bytes) = 0;
  virtual absl::Status FillNormals(DType dtype, std::byte* data, size_t bytes) = 0;

  virtual absl::Status Read(const std::byte* from, size_t bytes) = 0;
  virtual absl::Status Copy(std::byte* to, const std::byte* from, size_t bytes) = 0;
  virtual absl::Status Run(const BareProduct& product) = 0;
  virtual absl::Status Run(const LinearCrossEntropyTrainingArgs& args) {
    return stream_->Run(args);
  }
  // Any other op, by its arguments.
  template <class Args>
  absl::Status Run(const Args& args) {
    return stream_->Run(args);
  }

  // Median time in microseconds of launch(i), i = 0, 1, ...
  virtual absl::StatusOr<double> Time(const Repeat& repeat,
                                      const std::function<absl::Status(int)>& launch) = 0;

 protected:
  absl::Status Use(absl::StatusOr<std::unique_ptr<Backend>> backend) {
    if (!backend.ok()) return backend.status();
    backend_ = *std::move(backend);
    auto stream = backend_->CreateStream();
    if (!stream.ok()) return stream.status();
    stream_ = *std::move(stream);
    return absl::OkStatus();
  }

  std::unique_ptr<Backend> backend_;
  std::unique_ptr<Stream> stream_;
};

// What goes into a figure.
enum class Effort {
  kFull,   // a median of many runs
  kBrief,  // of few, for a sweep
  kOnce,   // one launch, for a profiler that watches it
};

absl::StatusOr<std::unique_ptr<Device>> CreateCpuDevice();
absl::StatusOr<std::unique_ptr<Device>> CreateCudaDevice(Effort effort);  // in builds with CUDA

// Arrays in a device's memory, freed together. A null pointer comes back for no values, and where
// there is no room; then status() says so.
class Arrays {
 public:
  explicit Arrays(Device& device) : device_(device) {}
  ~Arrays() {
    for (const DeviceMemory& memory : memory_) device_.Free(memory);
  }
  Arrays(const Arrays&) = delete;
  Arrays& operator=(const Arrays&) = delete;

  const absl::Status& status() const { return status_; }

  template <class T>
  T* Room(size_t count) {
    if (count == 0 || !status_.ok()) return nullptr;
    const auto memory = device_.Allocate(count * sizeof(T));
    status_.Update(memory.status());
    if (!memory.ok()) return nullptr;
    memory_.push_back(*memory);
    return reinterpret_cast<T*>(memory->data);
  }
  template <class T>
  T* Put(const std::vector<T>& values) {
    T* to = Room<T>(values.size());
    if (to != nullptr)
      status_.Update(device_.CopyIn(reinterpret_cast<std::byte*>(to), values.data(),
                                    values.size() * sizeof(T)));
    return to;
  }
  std::byte* Normals(DType dtype, size_t count) {
    std::byte* to = Room<std::byte>(count * SizeOf(dtype));
    if (to != nullptr) status_.Update(device_.FillNormals(dtype, to, count * SizeOf(dtype)));
    return to;
  }

 private:
  Device& device_;
  std::vector<DeviceMemory> memory_;
  absl::Status status_;
};

// The buffer of normals that ops read: launches walk over it, so that none finds its input in a
// cache.
class Inputs {
 public:
  struct Sets {
    std::byte* data;
    size_t bytes;  // of a set
    size_t count;
    std::byte* At(int launch) const { return data + static_cast<size_t>(launch) % count * bytes; }
  };

  explicit Inputs(Device& device) : device_(device) {}
  ~Inputs() { device_.Free(memory_); }
  Inputs(const Inputs&) = delete;
  Inputs& operator=(const Inputs&) = delete;

  // The buffer as sets of `set_bytes` bytes. `overwritten`: the caller writes to it.
  absl::StatusOr<Sets> Cut(DType dtype, size_t set_bytes, bool overwritten = false) {
    const size_t bytes = std::max(set_bytes, device_.input_bytes());
    if (memory_.bytes < bytes) {
      device_.Free(memory_);
      memory_ = {};
      const auto memory = device_.Allocate(bytes);
      if (!memory.ok()) return memory.status();
      memory_ = *memory;
      filled_ = false;
    }
    if (!filled_ || dtype_ != dtype)
      LOGITD_RETURN_IF_ERROR(device_.FillNormals(dtype, memory_.data, memory_.bytes));
    filled_ = !overwritten;
    dtype_ = dtype;
    return Sets{memory_.data, set_bytes, std::max<size_t>(1, device_.input_bytes() / set_bytes)};
  }

 private:
  Device& device_;
  DeviceMemory memory_;
  bool filled_ = false;
  DType dtype_ = DType::kF32;
};

}  // namespace logitd::bench

#endif  // LOGITD_BENCH_KERNELS_DEVICE_H_
