// A GPU as a device of the bench. An op is timed as it runs in service: launches in a row on one
// stream, replayed from a graph so that the host is not what is measured.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <vector>

#include "bench/kernels/device.h"
#include "kernels/cuda/linear/product.h"
#include "kernels/cuda/ops.h"
#include "kernels/cuda/stream.h"

namespace logitd::bench {
namespace {

absl::Status ToStatus(cudaError_t error) {
  return error == cudaSuccess ? absl::OkStatus() : absl::InternalError(cudaGetErrorString(error));
}

constexpr size_t kInputBytes = size_t{4} << 30;
constexpr int kReplays = 25;
constexpr int kWarmReplays = 3;
// The same for a brief figure.
constexpr size_t kBriefInputBytes = size_t{1} << 30;
constexpr int kBriefReplays = 5;
constexpr int kBriefWarmReplays = 1;
constexpr int kBriefLaunches = 64;
// A tool that watches a launch is slow, and looks after the caches itself.
constexpr size_t kOnceInputBytes = size_t{64} << 20;

__device__ uint32_t Mix(uint32_t x) {
  x = (x ^ (x >> 16)) * 0x7feb352du;
  x = (x ^ (x >> 15)) * 0x846ca68bu;
  return x ^ (x >> 16);
}

template <class T>
__global__ void FillNormal(T* out, size_t n) {
  const size_t step = static_cast<size_t>(gridDim.x) * blockDim.x;
  for (size_t i = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < n; i += step) {
    const uint32_t high = static_cast<uint32_t>(i >> 32);
    const float u = (Mix(static_cast<uint32_t>(i) * 2 + 1 + high) + 0.5f) * 0x1p-32f;
    const float v = (Mix(static_cast<uint32_t>(i) * 2 + 2 + high) + 0.5f) * 0x1p-32f;
    out[i] = static_cast<T>(sqrtf(-2.0f * logf(u)) * cospif(2.0f * v));
  }
}

__global__ void ReadAll(const uint4* in, size_t n, uint32_t* sink) {
  const size_t step = static_cast<size_t>(gridDim.x) * blockDim.x;
  uint32_t all = 0;
  size_t i = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  for (; i + 3 * step < n; i += 4 * step) {
    const uint4 a = __ldcs(in + i), b = __ldcs(in + i + step), c = __ldcs(in + i + 2 * step),
                d = __ldcs(in + i + 3 * step);
    all ^= a.x ^ a.y ^ a.z ^ a.w ^ b.x ^ b.y ^ b.z ^ b.w ^ c.x ^ c.y ^ c.z ^ c.w ^ d.x ^ d.y ^ d.z ^
           d.w;
  }
  for (; i < n; i += step) {
    const uint4 a = __ldcs(in + i);
    all ^= a.x ^ a.y ^ a.z ^ a.w;
  }
  if (all == 0x12345678u) *sink = all;
}

__global__ void CopyAll(const uint4* in, uint4* out, size_t n) {
  const size_t step = static_cast<size_t>(gridDim.x) * blockDim.x;
  size_t i = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  for (; i + 3 * step < n; i += 4 * step) {
    const uint4 a = __ldcs(in + i), b = __ldcs(in + i + step), c = __ldcs(in + i + 2 * step),
                d = __ldcs(in + i + 3 * step);
    __stcs(out + i, a);
    __stcs(out + i + step, b);
    __stcs(out + i + 2 * step, c);
    __stcs(out + i + 3 * step, d);
  }
  for (; i < n; i += step) __stcs(out + i, __ldcs(in + i));
}

class CudaDevice final : public Device {
 public:
  explicit CudaDevice(Effort effort) : effort_(effort) {}

  absl::Status Init() {
    LOGITD_RETURN_IF_ERROR(Use(CreateCudaBackend({})));
    cudaDeviceProp properties;
    LOGITD_RETURN_IF_ERROR(ToStatus(cudaGetDeviceProperties(&properties, 0)));
    scratch_.multiprocessors = properties.multiProcessorCount;
    scratch_.block_shared_bytes = static_cast<int>(properties.sharedMemPerBlockOptin);
    scratch_.clusters = properties.major >= 9;
    scratch_.bytes = cuda::Scratch::BytesFor(properties.totalGlobalMem);
    products_status_.Update(products_.Init(cuda::ProductWorkspaceBytes(scratch_)));
    LOGITD_RETURN_IF_ERROR(ToStatus(cudaMalloc(&scratch_.data, scratch_.bytes)));
    LOGITD_RETURN_IF_ERROR(ToStatus(cudaMalloc(&workspace_, products_.workspace_bytes() + 256)));
    return ToStatus(cudaMemset(scratch_.data, 0, scratch_.bytes));
  }

  ~CudaDevice() override {
    cudaFree(workspace_);
    cudaFree(scratch_.data);
  }

  int multiprocessors() const override { return scratch_.multiprocessors; }
  size_t input_bytes() const override {
    switch (effort_) {
      case Effort::kFull:
        return kInputBytes;
      case Effort::kBrief:
        return kBriefInputBytes;
      case Effort::kOnce:
        return kOnceInputBytes;
    }
    __builtin_unreachable();
  }
  DType product_dtype(DType dtype) const override { return dtype; }

  absl::Status CopyIn(std::byte* to, const void* from, size_t bytes) override {
    LOGITD_RETURN_IF_ERROR(
        ToStatus(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, queue())));
    return ToStatus(cudaStreamSynchronize(queue()));
  }
  absl::Status FillNormals(DType dtype, std::byte* data, size_t bytes) override {
    const size_t n = bytes / SizeOf(dtype);
    const auto fill = [&](auto* out) { FillNormal<<<blocks(), 512, 0, queue()>>>(out, n); };
    if (dtype == DType::kF32) fill(reinterpret_cast<float*>(data));
    if (dtype == DType::kF16) fill(reinterpret_cast<__half*>(data));
    if (dtype == DType::kBF16) fill(reinterpret_cast<__nv_bfloat16*>(data));
    return ToStatus(cudaGetLastError());
  }

  absl::Status Read(const std::byte* from, size_t bytes) override {
    ReadAll<<<blocks(), 512, 0, queue()>>>(reinterpret_cast<const uint4*>(from),
                                           bytes / sizeof(uint4),
                                           reinterpret_cast<uint32_t*>(workspace_));
    return ToStatus(cudaGetLastError());
  }
  absl::Status Copy(std::byte* to, const std::byte* from, size_t bytes) override {
    CopyAll<<<blocks(), 512, 0, queue()>>>(reinterpret_cast<const uint4*>(from),
                                           reinterpret_cast<uint4*>(to), bytes / sizeof(uint4));
    return ToStatus(cudaGetLastError());
  }
  absl::Status Run(const BareProduct& product) override {
    LOGITD_RETURN_IF_ERROR(products_status_);
    const auto view = [&](const void* data, int64_t rows) {
      return TensorView{data, product.dtype, rows, product.hidden, product.hidden};
    };
    return ToStatus(products_.Enqueue(
        {.a = view(product.states, product.rows),
         .b = view(product.weight, product.vocab),
         .transpose_b = true,
         .out = {product.logits, product.dtype, product.rows, product.vocab, product.logits_stride},
         .workspace = workspace_},
        queue()));
  }

  absl::Status Run(const LinearCrossEntropyTrainingArgs& args) override {
    // Training has a goal of memory too: 300 MiB besides the gradients, and 16 bits for every logit
    // that d_weight has no room for.
    const LinearCrossEntropyBackwardArgs& of = args.gradient;
    const int64_t logits = of.hidden.rows * of.head.vocab() * 2;
    const int64_t room =
        of.d_weight.rows * of.d_weight.cols * static_cast<int64_t>(SizeOf(of.d_weight.dtype));
    cuda::Scratch lean = scratch_;
    lean.bytes = std::min(
        lean.bytes, (size_t{290} << 20) + static_cast<size_t>(std::max<int64_t>(0, logits - room)));
    LOGITD_RETURN_IF_ERROR(products_status_);
    return ToStatus(cuda::LinearCrossEntropyTraining(args, products_, lean, queue()));
  }

  absl::StatusOr<double> Time(const Repeat& repeat,
                              const std::function<absl::Status(int)>& launch) override {
    cudaEvent_t begin, end;
    LOGITD_RETURN_IF_ERROR(ToStatus(cudaEventCreate(&begin)));
    LOGITD_RETURN_IF_ERROR(ToStatus(cudaEventCreate(&end)));
    std::vector<double> us;
    const auto timed = [&](int launches, const auto& run) -> absl::Status {
      LOGITD_RETURN_IF_ERROR(ToStatus(cudaEventRecord(begin, queue())));
      LOGITD_RETURN_IF_ERROR(run());
      LOGITD_RETURN_IF_ERROR(ToStatus(cudaEventRecord(end, queue())));
      LOGITD_RETURN_IF_ERROR(ToStatus(cudaEventSynchronize(end)));
      float ms = 0;
      LOGITD_RETURN_IF_ERROR(ToStatus(cudaEventElapsedTime(&ms, begin, end)));
      us.push_back(ms * 1e3 / launches);
      return absl::OkStatus();
    };
    // Once before it is recorded: what libraries load at first use cannot be.
    LOGITD_RETURN_IF_ERROR(timed(1, [&] { return launch(0); }));
    if (effort_ == Effort::kOnce) return us[0];
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    const bool full = effort_ == Effort::kFull;
    const int launches = full ? repeat.launches : std::min(repeat.launches, kBriefLaunches);
    LOGITD_RETURN_IF_ERROR(
        ToStatus(cudaStreamBeginCapture(queue(), cudaStreamCaptureModeThreadLocal)));
    absl::Status launched = absl::OkStatus();
    for (int i = 0; i < launches && launched.ok(); ++i) launched.Update(launch(i));
    LOGITD_RETURN_IF_ERROR(ToStatus(cudaStreamEndCapture(queue(), &graph)));
    LOGITD_RETURN_IF_ERROR(launched);
    LOGITD_RETURN_IF_ERROR(ToStatus(cudaGraphInstantiate(&exec, graph, 0)));
    const int warm = full ? kWarmReplays : kBriefWarmReplays;
    const int replays = warm + (full ? kReplays : kBriefReplays);
    for (int i = 0; i < replays; ++i) {
      if (i == warm) us.clear();
      LOGITD_RETURN_IF_ERROR(
          timed(launches, [&] { return ToStatus(cudaGraphLaunch(exec, queue())); }));
    }
    cudaEventDestroy(begin);
    cudaEventDestroy(end);
    cudaGraphExecDestroy(exec);
    cudaGraphDestroy(graph);
    return Median(std::move(us));
  }

 private:
  int blocks() const { return scratch_.multiprocessors * 8; }
  cudaStream_t queue() const { return static_cast<cuda::DeviceStream&>(*stream_).native(); }

  const Effort effort_;
  cuda::Scratch scratch_;  // of training
  cuda::Products products_;
  absl::Status products_status_;
  std::byte* workspace_ = nullptr;  // of bare products, and a sink of reads
};

}  // namespace

absl::StatusOr<std::unique_ptr<Device>> CreateCudaDevice(Effort effort) {
  auto device = std::make_unique<CudaDevice>(effort);
  LOGITD_RETURN_IF_ERROR(device->Init());
  return device;
}

}  // namespace logitd::bench
