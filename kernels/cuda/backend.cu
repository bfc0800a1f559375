// The CUDA backend: pinned slabs with device mirrors, streams with an arena and four events.
#include <cuda_runtime.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "kernels/backend.h"
#include "kernels/cuda/gather.h"
#include "kernels/cuda/linear/product.h"
#include "kernels/cuda/linear/routes.h"
#include "kernels/cuda/linear/shards.h"
#include "kernels/cuda/ops.h"
#include "kernels/cuda/shared_memory.h"
#include "kernels/cuda/stream.h"
#include "kernels/status_macros.h"

namespace logitd {
namespace {

// Errors after which the context still works: the call was refused, and nothing ran.
bool Recoverable(cudaError_t error) {
  return error == cudaErrorMemoryAllocation || error == cudaErrorInvalidValue ||
         error == cudaErrorInvalidConfiguration || error == cudaErrorLaunchOutOfResources ||
         error == cudaErrorNotSupported;
}

using cuda::ToStatus;

__global__ void ProbeKernel() {}

// Whether blocks of a cluster can share memory. The device must allow it, and so must the code that
// was loaded for it: that may be compiled from code for an older device.
absl::Status ProbeClusters(const cudaDeviceProp& properties, bool& clusters) {
  cudaFuncAttributes loaded;
  LOGITD_RETURN_IF_ERROR(ToStatus(cudaFuncGetAttributes(&loaded, ProbeKernel), "probe kernels"));
  clusters = properties.major >= 9 && loaded.ptxVersion >= 90;
  return absl::OkStatus();
}

// Host memory is pinned in pieces that end at multiples of this, because the driver lets nothing else
// run while it pins one: 9 ms. A copy stays within a piece.
constexpr size_t kPinPieceBytes = size_t{32} << 20;
constexpr absl::Duration kPinPause = absl::Milliseconds(1);

// Bytes from `at` to the end of its piece.
size_t LeftOfPiece(const std::byte* at) {
  return kPinPieceBytes - reinterpret_cast<uintptr_t>(at) % kPinPieceBytes;
}

class CudaStream final : public cuda::DeviceStream {
 public:
  static absl::StatusOr<std::unique_ptr<Stream>> Create(int device,
                                                        const cudaDeviceProp& properties,
                                                        StreamUse use) {
    auto stream = std::unique_ptr<CudaStream>(new CudaStream(device));
    LOGITD_RETURN_IF_ERROR(stream->Init(properties, use));
    return stream;
  }

  ~CudaStream() override {
    cudaSetDevice(device_);
    for (cudaEvent_t event : events_) {
      if (event != nullptr) cudaEventDestroy(event);
    }
    if (stream_ != nullptr) cudaStreamDestroy(stream_);
    cudaFree(scratch_.data);
  }

  int device() const override { return device_; }
  cudaStream_t native() const override { return stream_; }
  absl::Status BeginOps() override { return Enter(kComputing); }
  absl::Status ShardLogits(const cuda::ShardLogitsArgs& args) override {
    return RunLinear("logits of a shard", &cuda::ShardLogits, args, cuda::LinearOp::kTokens,
                     args.head);
  }

  absl::Status Upload(const Slab& slab, size_t offset, size_t bytes) override {
    LOGITD_RETURN_IF_ERROR(Enter(kUploading));
    std::byte* const to = slab.device + offset;
    const std::byte* const from = slab.host + offset;
    if (KernelCopies(to, from, bytes)) {
      uploads_.push_back(RowOf(to, from, bytes));  // for one launch with a Gather
      return absl::OkStatus();
    }
    return ToStatus(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, stream_), "upload");
  }

  absl::Status Download(const Slab& slab, size_t offset, size_t bytes) override {
    LOGITD_RETURN_IF_ERROR(Enter(kDownloading));
    std::byte* const to = slab.host + offset;
    const std::byte* const from = slab.device + offset;
    if (KernelCopies(to, from, bytes)) {
      const RowsCopy row = RowOf(to, from, bytes);
      return ToStatus(cuda::GatherRows({&row, 1}, stream_), "download");
    }
    return ToStatus(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, stream_), "download");
  }

  absl::Status Fill(const Slab& slab, size_t offset, size_t bytes, std::byte* to) override {
    LOGITD_RETURN_IF_ERROR(Enter(kUploading));
    return ToStatus(cudaMemcpyAsync(to, slab.host + offset, bytes, cudaMemcpyHostToDevice, stream_),
                    "fill");
  }

  absl::Status Gather(absl::Span<const RowsCopy> copies) override {
    LOGITD_RETURN_IF_ERROR(Enter(kUploading));
    for (const RowsCopy& copy : copies) {
      const auto apart = [&copy](const RowsCopy& upload) { return AreApart(copy, upload); };
      // What an upload wrote there comes first.
      if (!std::all_of(uploads_.begin(), uploads_.end(), apart)) {
        LOGITD_RETURN_IF_ERROR(FlushUploads());
      }
    }
    for (const RowsCopy& copy : copies) {
      if (copy.from_device) {
        uploads_.push_back(copy);
        continue;
      }
      LOGITD_RETURN_IF_ERROR(ToStatus(CopyFromHost(copy), "gather from the host"));
    }
    const auto on_device = [](const RowsCopy& copy) { return copy.from_device; };
    if (!std::any_of(copies.begin(), copies.end(), on_device)) return FlushUploads();
    const cudaError_t error = cuda::GatherRows(uploads_, stream_);
    uploads_.clear();
    return ToStatus(error, "gather");
  }

  absl::Status Deliver(std::byte* to, const std::byte* from, size_t bytes) override {
    LOGITD_RETURN_IF_ERROR(Enter(kDownloading));
    while (bytes > 0) {
      const size_t now = std::min(bytes, LeftOfPiece(to));
      LOGITD_RETURN_IF_ERROR(
          ToStatus(cudaMemcpyAsync(to, from, now, cudaMemcpyDefault, stream_), "deliver"));
      to += now;
      from += now;
      bytes -= now;
    }
    return absl::OkStatus();
  }

  absl::Status SoftmaxTopK(const SoftmaxTopKArgs& args) override {
    return Run("softmax_topk", &cuda::SoftmaxTopK, args);
  }
  absl::Status Sample(const SampleArgs& args) override {
    return Run("sample", &cuda::Sample, args);
  }
  absl::Status Verify(const VerifyArgs& args) override {
    return Run("verify", &cuda::Verify, args);
  }
  absl::Status AttentionSoftmax(const AttentionSoftmaxArgs& args) override {
    return Run("attention_softmax", &cuda::AttentionSoftmax, args);
  }
  absl::Status AttentionSoftmaxBackward(const AttentionSoftmaxBackwardArgs& args) override {
    return Run("attention_softmax_backward", &cuda::AttentionSoftmaxBackward, args);
  }
  absl::Status CrossEntropy(const CrossEntropyArgs& args) override {
    return Run("cross_entropy", &cuda::CrossEntropy, args);
  }
  absl::Status CrossEntropyBackward(const CrossEntropyBackwardArgs& args) override {
    LOGITD_RETURN_IF_ERROR(Enter(kComputing));
    return ToStatus(cuda::CrossEntropyBackward(args, stream_), "cross_entropy_backward");
  }
  absl::Status LinearTopK(const LinearTopKArgs& args) override {
    return RunLinear("linear_topk", &cuda::LinearTopK, args, cuda::LinearOp::kTokens, args.head);
  }
  absl::Status LinearSample(const LinearSampleArgs& args) override {
    return RunLinear("linear_sample", &cuda::LinearSample, args, cuda::LinearOp::kTokens,
                     args.head);
  }
  absl::Status LinearCrossEntropy(const LinearCrossEntropyArgs& args) override {
    return RunLinear("linear_cross_entropy", &cuda::LinearCrossEntropy, args,
                     cuda::LinearOp::kLosses, args.head);
  }
  absl::Status LinearCrossEntropyBackward(const LinearCrossEntropyBackwardArgs& args) override {
    return RunLinear("linear_cross_entropy_backward", &cuda::LinearCrossEntropyBackward, args,
                     cuda::LinearOp::kGradients, args.head);
  }
  absl::Status LinearCrossEntropyTraining(const LinearCrossEntropyTrainingArgs& args) override {
    return RunLinear("linear_cross_entropy_training", &cuda::LinearCrossEntropyTraining, args,
                     cuda::LinearOp::kTraining, args.gradient.head);
  }

  absl::Status LinearTopKPartial(const LinearTopKPartialArgs& args) override {
    return RunLinear("linear_topk on a shard", &cuda::LinearTopKPartial, args,
                     cuda::LinearOp::kTokens, args.head);
  }
  absl::Status LinearTopKMerge(const LinearTopKMergeArgs& args) override {
    LOGITD_RETURN_IF_ERROR(Enter(kComputing));
    return ToStatus(cuda::LinearTopKMerge(args, stream_), "linear_topk on shards");
  }
  absl::Status LinearSamplePartial(const LinearSamplePartialArgs& args) override {
    return RunLinear("linear_sample on a shard", &cuda::LinearSamplePartial, args,
                     cuda::LinearOp::kTokens, args.head);
  }
  absl::Status LinearSampleMerge(const LinearSampleMergeArgs& args) override {
    return Run("linear_sample on shards", &cuda::LinearSampleMerge, args);
  }
  absl::Status LinearCrossEntropyTargets(const LinearCrossEntropyTargetsArgs& args) override {
    return RunLinear("linear_cross_entropy's targets", &cuda::LinearCrossEntropyTargets, args,
                     cuda::LinearOp::kLosses, args.head);
  }
  absl::Status LinearCrossEntropyPartial(const LinearCrossEntropyPartialArgs& args) override {
    return RunLinear("linear_cross_entropy on a shard", &cuda::LinearCrossEntropyPartial, args,
                     cuda::LinearOp::kLosses, args.head);
  }
  absl::Status LinearCrossEntropyMerge(const LinearCrossEntropyMergeArgs& args) override {
    LOGITD_RETURN_IF_ERROR(Enter(kComputing));
    return ToStatus(cuda::LinearCrossEntropyMerge(args, stream_), "linear_cross_entropy on shards");
  }

  absl::StatusOr<StreamTimes> Wait() override {
    const absl::Status entered = Enter(kDone);
    phase_ = kIdle;  // the next work starts again, also after an error
    LOGITD_RETURN_IF_ERROR(entered);
    // A decode batch takes tens of microseconds, and so does the wake-up of a blocked thread: poll
    // first.
    const absl::Time poll_until = absl::Now() + kPollFor;
    cudaError_t state;
    while ((state = cudaEventQuery(events_[kDone])) == cudaErrorNotReady &&
           absl::Now() < poll_until) {
    }
    if (state == cudaErrorNotReady) state = cudaEventSynchronize(events_[kDone]);
    LOGITD_RETURN_IF_ERROR(ToStatus(state, "batch"));
    StreamTimes times;
    LOGITD_RETURN_IF_ERROR(Between(kUploading, kComputing, times.h2d_ns));
    LOGITD_RETURN_IF_ERROR(Between(kComputing, kDownloading, times.kernel_ns));
    LOGITD_RETURN_IF_ERROR(Between(kDownloading, kDone, times.d2h_ns));
    return times;
  }

 private:
  // An event marks the start of each phase.
  enum Phase { kUploading, kComputing, kDownloading, kDone, kPhases, kIdle = -1 };
  static constexpr absl::Duration kPollFor = absl::Microseconds(200);
  // A copy engine takes some microseconds to begin. A kernel that writes pinned memory takes less, up
  // to about this size: 4 us and 9, events included.
  static constexpr size_t kKernelCopyBytes = size_t{16} << 10;

  explicit CudaStream(int device) : device_(device) {}

  absl::Status Init(const cudaDeviceProp& properties, StreamUse use) {
    LOGITD_RETURN_IF_ERROR(ToStatus(cudaSetDevice(device_), "select device"));
    LOGITD_RETURN_IF_ERROR(
        ToStatus(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "create stream"));
    for (cudaEvent_t& event : events_) {
      LOGITD_RETURN_IF_ERROR(
          ToStatus(cudaEventCreateWithFlags(&event, cudaEventBlockingSync), "create event"));
    }
    if (use == StreamUse::kCopies) return absl::OkStatus();
    scratch_.bytes = cuda::Scratch::BytesFor(properties.totalGlobalMem);
    scratch_.multiprocessors = properties.multiProcessorCount;
    scratch_.block_shared_bytes = static_cast<int>(properties.sharedMemPerBlockOptin);
    LOGITD_RETURN_IF_ERROR(ProbeClusters(properties, scratch_.clusters));
    LOGITD_RETURN_IF_ERROR(
        ToStatus(cudaMalloc(&scratch_.data, scratch_.bytes), "allocate scratch"));
    products_status_.Update(products_.Init(cuda::ProductWorkspaceBytes(scratch_)));
    return ToStatus(cudaMemsetAsync(scratch_.data, 0, cuda::Scratch::kCounterBytes, stream_),
                    "clear scratch");
  }

  // Enqueues an op.
  template <class Op, class Args>
  absl::Status Run(std::string_view name, Op op, const Args& args) {
    LOGITD_RETURN_IF_ERROR(Enter(kComputing));
    return ToStatus(op(args, scratch_, stream_), name);
  }

  // Enqueues a linear op. UNAVAILABLE where its route needs cuBLASLt and there is none.
  template <class Op, class Args>
  absl::Status RunLinear(std::string_view name, Op op, const Args& args, cuda::LinearOp linear_op,
                         const HeadView& head) {
    LOGITD_RETURN_IF_ERROR(Enter(kComputing));  // first: a route asks the stream's device
    if (cuda::RouteOf(linear_op, head, scratch_).cublas_lt)
      LOGITD_RETURN_IF_ERROR(products_status_);
    return ToStatus(op(args, products_, scratch_, stream_), name);
  }

  // Whether a kernel copies so many bytes between the sides of a slab.
  static bool KernelCopies(const std::byte* to, const std::byte* from, size_t bytes) {
    const auto odd = reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from) | bytes;
    return bytes > 0 && bytes <= kKernelCopyBytes && odd % 2 == 0;
  }
  static RowsCopy RowOf(std::byte* to, const std::byte* from, size_t bytes) {
    return {.from = from,
            .from_stride = bytes,
            .to = to,
            .to_stride = bytes,
            .row_bytes = bytes,
            .rows = 1,
            .from_device = true};
  }

  // Whether the copies write to places of their own, so that one launch may do both.
  static bool AreApart(const RowsCopy& a, const RowsCopy& b) {
    const auto end = [](const RowsCopy& copy) {
      return copy.to + static_cast<size_t>(copy.rows - 1) * copy.to_stride + copy.row_bytes;
    };
    return end(a) <= b.to || end(b) <= a.to;
  }

  // Rows of pinned host memory, no copy across the border of two pieces.
  cudaError_t CopyFromHost(const RowsCopy& copy) {
    size_t row_bytes = copy.row_bytes;
    auto rows = static_cast<size_t>(copy.rows);
    if (copy.from_stride == row_bytes && copy.to_stride == row_bytes) {
      row_bytes *= rows;  // one long row
      rows = 1;
    }
    cudaError_t error = cudaSuccess;
    for (size_t r = 0; r < rows && error == cudaSuccess;) {
      std::byte* to = copy.to + r * copy.to_stride;
      const std::byte* from = copy.from + r * copy.from_stride;
      const size_t left = LeftOfPiece(from);
      if (rows > 1 && row_bytes <= left) {  // as many rows as the piece has whole
        const size_t whole = std::min(rows - r, (left - row_bytes) / copy.from_stride + 1);
        error = cudaMemcpy2DAsync(to, copy.to_stride, from, copy.from_stride, row_bytes, whole,
                                  cudaMemcpyHostToDevice, stream_);
        r += whole;
        continue;
      }
      for (size_t done = 0; done < row_bytes && error == cudaSuccess;) {
        const size_t now = std::min(row_bytes - done, LeftOfPiece(from + done));
        error = cudaMemcpyAsync(to + done, from + done, now, cudaMemcpyHostToDevice, stream_);
        done += now;
      }
      ++r;
    }
    return error;
  }

  // Alone, a copy engine brings them sooner than a kernel: 5 us and 8, events included.
  absl::Status FlushUploads() {
    cudaError_t error = cudaSuccess;
    for (const RowsCopy& upload : uploads_) {
      const cudaError_t next = cudaMemcpyAsync(upload.to, upload.from, upload.row_bytes,
                                               cudaMemcpyHostToDevice, stream_);
      if (error == cudaSuccess) error = next;
    }
    uploads_.clear();
    return ToStatus(error, "upload");
  }

  // Records the events of every phase up to `phase` that has not begun yet. The device is set each
  // time: the thread may have used another device's stream in between.
  absl::Status Enter(Phase phase) {
    LOGITD_RETURN_IF_ERROR(ToStatus(cudaSetDevice(device_), "select device"));
    if (phase > kUploading) LOGITD_RETURN_IF_ERROR(FlushUploads());
    while (phase_ < phase) {
      phase_ = static_cast<Phase>(phase_ + 1);
      LOGITD_RETURN_IF_ERROR(ToStatus(cudaEventRecord(events_[phase_], stream_), "record event"));
    }
    return absl::OkStatus();
  }

  absl::Status Between(Phase begin, Phase end, int64_t& ns) {
    float ms = 0;
    LOGITD_RETURN_IF_ERROR(
        ToStatus(cudaEventElapsedTime(&ms, events_[begin], events_[end]), "read event"));
    ns = static_cast<int64_t>(static_cast<double>(ms) * 1e6);
    return absl::OkStatus();
  }

  const int device_;
  cudaStream_t stream_ = nullptr;
  cudaEvent_t events_[kPhases] = {};
  Phase phase_ = kIdle;
  std::vector<RowsCopy> uploads_;  // small ones, not enqueued yet
  cuda::Scratch scratch_;
  cuda::Products products_;
  absl::Status products_status_;  // not OK: cuBLASLt is missing; the answer of ops that need it
};

class CudaBackend final : public Backend {
 public:
  CudaBackend(int device, const cudaDeviceProp& properties)
      : device_(device), properties_(properties) {
    info_.backend = "cuda";
    info_.number = device;
    info_.name = properties.name;
    info_.memory_bytes = static_cast<int64_t>(properties.totalGlobalMem);
    info_.pci_bus_id = absl::StrFormat("%08x:%02x:%02x.0", properties.pciDomainID,
                                       properties.pciBusID, properties.pciDeviceID);
    static_assert(sizeof(properties.uuid) == sizeof(info_.uuid));
    std::memcpy(info_.uuid.data(), &properties.uuid, sizeof(info_.uuid));
  }

  const DeviceInfo& device() const override { return info_; }

  absl::StatusOr<Slab> AllocateSlab(size_t bytes) override {
    LOGITD_RETURN_IF_ERROR(ToStatus(cudaSetDevice(device_), "select device"));
    Slab slab{.bytes = bytes};
    // Portable: streams of other devices copy from it and to it too.
    if (cudaHostAlloc(&slab.host, bytes, cudaHostAllocPortable) != cudaSuccess ||
        cudaMalloc(&slab.device, bytes) != cudaSuccess) {
      cudaGetLastError();
      FreeSlab(slab);
      return absl::ResourceExhaustedError(
          absl::StrFormat("CUDA: no memory for a slab of %d bytes", bytes));
    }
    return slab;
  }

  void FreeSlab(const Slab& slab) override {
    cudaSetDevice(device_);
    if (slab.host != nullptr) cudaFreeHost(slab.host);
    if (slab.device != nullptr) cudaFree(slab.device);
  }

  absl::StatusOr<DeviceMemory> AllocateDevice(size_t bytes) override {
    LOGITD_RETURN_IF_ERROR(ToStatus(cudaSetDevice(device_), "select device"));
    DeviceMemory memory{.bytes = bytes};
    const cudaError_t error = cudaMalloc(&memory.data, bytes);
    if (error != cudaErrorMemoryAllocation) {
      LOGITD_RETURN_IF_ERROR(ToStatus(error, "allocate"));
      return memory;
    }
    cudaGetLastError();
    size_t free = 0;
    size_t total = 0;
    LOGITD_RETURN_IF_ERROR(ToStatus(cudaMemGetInfo(&free, &total), "read free memory"));
    return absl::ResourceExhaustedError(absl::StrFormat(
        "device memory: no room for %d bytes; %d of %d are free", bytes, free, total));
  }

  void FreeDevice(const DeviceMemory& memory) override {
    cudaSetDevice(device_);
    cudaFree(memory.data);
  }

  absl::StatusOr<std::unique_ptr<Stream>> CreateStream(StreamUse use) override {
    return CudaStream::Create(device_, properties_, use);
  }

  absl::StatusOr<SharedDeviceMemory> AllocateShared(size_t bytes) override {
    LOGITD_RETURN_IF_ERROR(ToStatus(cudaSetDevice(device_), "select device"));
    absl::StatusOr<SharedDeviceMemory> memory = cuda::AllocateShared(device_, bytes);
    if (!memory.ok()) return memory.status();
    if (absl::Status status = Clear(*memory); !status.ok()) {
      close(memory->fd);
      cuda::FreeShared(*memory);
      return status;
    }
    return memory;
  }

  void FreeShared(const SharedDeviceMemory& memory) override {
    cudaSetDevice(device_);
    cuda::FreeShared(memory);
  }

  absl::Status WriteShared(std::byte* to, absl::Span<const std::byte> from) override {
    return OnOwnStream([&](cudaStream_t stream) {
      return cudaMemcpyAsync(to, from.data(), from.size(), cudaMemcpyHostToDevice, stream);
    });
  }

  absl::Status PinHost(std::byte* data, size_t bytes) override {
    LOGITD_RETURN_IF_ERROR(ToStatus(cudaSetDevice(device_), "select device"));
    for (size_t done = 0; done < bytes;) {
      const size_t now = std::min(bytes - done, LeftOfPiece(data + done));
      const cudaError_t error = cudaHostRegister(data + done, now, cudaHostRegisterPortable);
      if (error != cudaSuccess) {
        cudaGetLastError();
        Unpin(data, done);
        return absl::UnavailableError(absl::StrFormat(
            "CUDA: %d bytes of host memory are not pinned: %s", bytes, cudaGetErrorString(error)));
      }
      done += now;
      if (done < bytes) absl::SleepFor(kPinPause);
    }
    std::lock_guard lock(mutex_);
    pinned_[data] = bytes;
    return absl::OkStatus();
  }

  void UnpinHost(std::byte* data) override {
    size_t bytes = 0;
    {
      std::lock_guard lock(mutex_);
      bytes = pinned_[data];
      pinned_.erase(data);
    }
    cudaSetDevice(device_);
    Unpin(data, bytes);
  }

 private:
  static void Unpin(std::byte* data, size_t bytes) {
    for (size_t done = 0; done < bytes;) {
      if (done > 0) absl::SleepFor(kPinPause);
      cudaHostUnregister(data + done);
      done += std::min(bytes - done, LeftOfPiece(data + done));
    }
    cudaGetLastError();
  }

  // What the driver hands out again may hold what another client wrote.
  absl::Status Clear(const SharedDeviceMemory& memory) {
    return OnOwnStream(
        [&](cudaStream_t stream) { return cudaMemsetAsync(memory.data, 0, memory.bytes, stream); });
  }

  // Enqueues on a stream of its own, and waits.
  template <class Enqueue>
  absl::Status OnOwnStream(const Enqueue& enqueue) {
    LOGITD_RETURN_IF_ERROR(ToStatus(cudaSetDevice(device_), "select device"));
    cudaStream_t stream = nullptr;
    LOGITD_RETURN_IF_ERROR(
        ToStatus(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "create stream"));
    cudaError_t error = enqueue(stream);
    const cudaError_t ended = cudaStreamSynchronize(stream);
    if (error == cudaSuccess) error = ended;
    cudaStreamDestroy(stream);
    return ToStatus(error, "shared memory");
  }

  const int device_;
  const cudaDeviceProp properties_;
  DeviceInfo info_;
  std::mutex mutex_;
  std::map<std::byte*, size_t> pinned_ ABSL_GUARDED_BY(mutex_);  // bytes of what PinHost has pinned
};

}  // namespace

namespace cuda {

absl::Status ToStatus(cudaError_t error, std::string_view what) {
  if (error == cudaSuccess) return absl::OkStatus();
  cudaGetLastError();
  const std::string text = absl::StrFormat("CUDA: %s: %s (%s)", what, cudaGetErrorString(error),
                                           cudaGetErrorName(error));
  return Recoverable(error) ? absl::UnavailableError(text) : absl::InternalError(text);
}

}  // namespace cuda

int CountCudaDevices() {
  int count = 0;
  if (cudaGetDeviceCount(&count) == cudaSuccess) return count;
  cudaGetLastError();
  return 0;
}

absl::StatusOr<std::unique_ptr<Backend>> CreateCudaBackend(const BackendOptions& options) {
  const int count = CountCudaDevices();
  if (count == 0) return absl::UnavailableError("backend cuda: no CUDA device answers");
  if (options.device < 0 || options.device >= count) {
    return absl::InvalidArgumentError(
        absl::StrFormat("device: got %d, allowed 0..%d", options.device, count - 1));
  }
  cudaDeviceProp properties;
  LOGITD_RETURN_IF_ERROR(
      ToStatus(cudaGetDeviceProperties(&properties, options.device), "read device properties"));
  return std::make_unique<CudaBackend>(options.device, properties);
}

}  // namespace logitd
