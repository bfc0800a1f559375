// CUDA side of the kernel bench. An op is timed as it runs in service: launches in a row on one
// stream, replayed from a graph so that the host is not what is measured, each on another part of a
// buffer of random normals larger than L2.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <type_traits>
#include <vector>

#include "absl/strings/str_format.h"
#include "bench/kernels/device.h"
#include "kernels/cuda/linear/product.h"
#include "kernels/cuda/ops.h"
#include "kernels/status_macros.h"

namespace logitd::bench {
namespace {

absl::Status ToStatus(cudaError_t error) {
  return error == cudaSuccess ? absl::OkStatus() : absl::InternalError(cudaGetErrorString(error));
}

constexpr size_t kBufferBytes = size_t{4} << 30;
constexpr int kReplays = 25;
constexpr size_t kWarmReadBytes = size_t{1} << 30;

// Of an op that moves so many bytes: enough that the buffer is walked through and none finds its
// input in L2, and that the first one's start weighs little.
int LaunchesOf(size_t bytes) {
  return static_cast<int>(std::clamp<size_t>(kWarmReadBytes / bytes, 8, 200));
}

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

// A quarter of the mask hides its key.
template <class T>
__global__ void FillMask(T* out, size_t n, T hides, T shows) {
  const size_t step = static_cast<size_t>(gridDim.x) * blockDim.x;
  for (size_t i = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < n; i += step)
    out[i] = Mix(static_cast<uint32_t>(i)) % 4 == 0 ? hides : shows;
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

// Device memory that is handed out in pieces, each aligned for any use here.
class DeviceBlock {
 public:
  ~DeviceBlock() { cudaFree(data_); }
  cudaError_t Allocate(size_t bytes) { return cudaMalloc(&data_, bytes); }
  template <class U>
  U* Take(size_t count) {
    U* piece = reinterpret_cast<U*>(data_ + at_);
    at_ += (count * sizeof(U) + 255) / 256 * 256;
    return piece;
  }

 private:
  std::byte* data_ = nullptr;
  size_t at_ = 0;
};

class CudaDevice final : public Device {
 public:
  absl::Status Init() {
    cudaDeviceProp properties;
    LOGITD_RETURN_IF_ERROR(ToStatus(cudaGetDeviceProperties(&properties, 0)));
    name_ = properties.name;
    scratch_.multiprocessors = properties.multiProcessorCount;
    scratch_.block_shared_bytes = static_cast<int>(properties.sharedMemPerBlockOptin);
    scratch_.clusters = properties.major >= 9;
    scratch_.bytes = cuda::Scratch::BytesFor(properties.totalGlobalMem);
    LOGITD_RETURN_IF_ERROR(ToStatus(cudaStreamCreate(&stream_)));
    LOGITD_RETURN_IF_ERROR(ToStatus(cudaMalloc(&buffer_, kBufferBytes)));
    LOGITD_RETURN_IF_ERROR(ToStatus(cudaMalloc(&scratch_.data, scratch_.bytes)));
    products_status_.Update(products_.Init(cuda::ProductWorkspaceBytes(scratch_)));
    return ToStatus(cudaMemset(scratch_.data, 0, scratch_.bytes));
  }

  ~CudaDevice() override {
    cudaFree(scratch_.data);
    cudaFree(buffer_);
    cudaStreamDestroy(stream_);
  }

  std::string name() const override { return name_; }

  absl::StatusOr<double> ReadCeiling() override {
    LOGITD_RETURN_IF_ERROR(Fill(DType::kF32));
    const size_t n = kBufferBytes / sizeof(uint4);
    auto us = Time(1, [&](int) {
      ReadAll<<<scratch_.multiprocessors * 8, 512, 0, stream_>>>(
          reinterpret_cast<const uint4*>(buffer_), n, reinterpret_cast<uint32_t*>(scratch_.data));
      return cudaGetLastError();
    });
    if (!us.ok()) return us.status();
    return kBufferBytes / *us * 1e6;
  }

  absl::StatusOr<double> CopyCeiling() override {
    LOGITD_RETURN_IF_ERROR(Fill(DType::kF32));
    const size_t n = kBufferBytes / 2 / sizeof(uint4);
    uint4* words = reinterpret_cast<uint4*>(buffer_);
    auto us = Time(1, [&](int) {
      CopyAll<<<scratch_.multiprocessors * 8, 512, 0, stream_>>>(words, words + n, n);
      return cudaGetLastError();
    });
    if (!us.ok()) return us.status();
    return kBufferBytes / *us * 1e6;
  }

  absl::StatusOr<double> TimeTopK(const TopKCase& c) override {
    LOGITD_RETURN_IF_ERROR(Fill(c.dtype));
    std::vector<SoftmaxTopKRow> rows(c.rows);
    for (int64_t i = 0; i < c.rows; ++i)
      rows[i] = {.first_entry = i * c.k, .temperature = 1.0f, .k = c.k};
    const size_t entries = static_cast<size_t>(c.rows) * c.k;
    std::byte* out = nullptr;
    LOGITD_RETURN_IF_ERROR(
        ToStatus(cudaMalloc(&out, entries * 8 + c.rows * (12 + sizeof(SoftmaxTopKRow)))));
    SoftmaxTopKArgs args;
    SoftmaxTopKRow* device_rows = reinterpret_cast<SoftmaxTopKRow*>(out);
    args.rows = device_rows;
    args.status = reinterpret_cast<RowStatus*>(device_rows + c.rows);
    args.logsumexp = reinterpret_cast<float*>(args.status + c.rows);
    args.probs = args.logsumexp + c.rows;
    args.indices = reinterpret_cast<int32_t*>(args.probs + entries);
    args.max_k = c.k;
    args.logits = {.dtype = c.dtype, .rows = c.rows, .cols = c.vocab, .row_stride = c.row_stride};
    LOGITD_RETURN_IF_ERROR(ToStatus(cudaMemcpyAsync(
        device_rows, rows.data(), rows.size() * sizeof(rows[0]), cudaMemcpyHostToDevice, stream_)));
    LOGITD_RETURN_IF_ERROR(ToStatus(cudaStreamSynchronize(stream_)));

    const size_t bytes = static_cast<size_t>(c.rows) * c.row_stride * SizeOf(c.dtype);
    const int parts = static_cast<int>(std::max<size_t>(1, kBufferBytes / bytes));
    const int launches = LaunchesOf(bytes);
    auto us = Time(launches, [&](int i) {
      args.logits.data = buffer_ + static_cast<size_t>(next_part_ + i) % parts * bytes;
      return cuda::SoftmaxTopK(args, scratch_, stream_);
    });
    next_part_ += launches;
    LOGITD_RETURN_IF_ERROR(ToStatus(cudaFree(out)));
    return us;
  }

  absl::StatusOr<double> TimeSample(const SampleCase& c) override {
    LOGITD_RETURN_IF_ERROR(Fill(c.dtype));
    const size_t rows = static_cast<size_t>(c.rows);
    const size_t words = c.lists.mask ? rows * MaskWords(c.vocab) : 0;
    const size_t history_count = rows * c.lists.history;
    const size_t top_entries = rows * c.row.top_logprobs;
    std::mt19937_64 random(1);
    std::vector<int32_t> history(history_count);
    for (int32_t& id : history) id = static_cast<int32_t>(random() % c.vocab);
    std::vector<uint32_t> mask(words);
    for (uint32_t& word : mask) word = static_cast<uint32_t>(random());
    std::vector<SampleRow> params(rows, c.row);
    for (size_t i = 0; i < rows; ++i) {
      params[i].seed = i;
      params[i].first_history = static_cast<int64_t>(i) * c.lists.history;
      params[i].history_count = c.lists.history;
      params[i].first_mask_word = c.lists.mask ? static_cast<int64_t>(i) * MaskWords(c.vocab) : -1;
      params[i].first_top_entry = static_cast<int64_t>(i) * c.row.top_logprobs;
    }
    DeviceBlock block;
    const auto copy_in = [&](const auto& values) {
      using Value = typename std::decay_t<decltype(values)>::value_type;
      Value* to = block.Take<Value>(values.size());
      if (to != nullptr && !values.empty())
        cudaMemcpy(to, values.data(), values.size() * sizeof(Value), cudaMemcpyHostToDevice);
      return to;
    };
    LOGITD_RETURN_IF_ERROR(ToStatus(block.Allocate(rows * (sizeof(SampleRow) + 64) + words * 4 +
                                                   history_count * 4 + top_entries * 8 + 8192)));
    SampleArgs args;
    args.logits = {.dtype = c.dtype, .rows = c.rows, .cols = c.vocab, .row_stride = c.vocab};
    args.rows = copy_in(params);
    args.history = copy_in(history);
    args.mask_words = copy_in(mask);
    args.edited = c.lists.mask || c.lists.history > 0;
    args.tokens = block.Take<int32_t>(rows);
    args.logprobs = block.Take<float>(rows);
    args.ranks = block.Take<int32_t>(rows);
    args.logsumexp = block.Take<float>(rows);
    args.status = block.Take<RowStatus>(rows);
    args.top_ids = block.Take<int32_t>(top_entries);
    args.top_logprobs = block.Take<float>(top_entries);
    const size_t bytes = rows * c.vocab * SizeOf(c.dtype);
    const int parts = static_cast<int>(std::max<size_t>(1, kBufferBytes / bytes));
    const int launches = LaunchesOf(bytes);
    auto us = Time(launches, [&](int i) {
      args.logits.data = buffer_ + static_cast<size_t>(next_part_ + i) % parts * bytes;
      return cuda::Sample(args, scratch_, stream_);
    });
    next_part_ += launches;
    return us;
  }

  absl::StatusOr<double> TimeAttention(const AttentionCase& c) override {
    const int64_t rows = c.rows();
    const size_t bytes = (static_cast<size_t>(rows * c.keys) * SizeOf(c.dtype) + 255) / 256 * 256;
    const size_t tensors = c.backward ? 3 : 2;
    const size_t parts = std::max<size_t>(1, kBufferBytes / (tensors * bytes));
    const size_t mask_elements = static_cast<size_t>(c.batch * c.queries * c.keys);
    const size_t mask_bytes = c.mask == MaskKind::kNone   ? 0
                              : c.mask == MaskKind::kBool ? mask_elements
                                                          : mask_elements * SizeOf(c.dtype);
    DeviceBlock block;
    LOGITD_RETURN_IF_ERROR(ToStatus(block.Allocate(parts * tensors * bytes + mask_bytes +
                                                   rows * (sizeof(RowStatus) + 4) + 4096)));
    std::byte* data = block.Take<std::byte>(parts * tensors * bytes);
    FillWith(c.dtype, data, parts * tensors * bytes);
    std::byte* mask = block.Take<std::byte>(mask_bytes);
    FillMaskOf(c, mask, mask_elements);
    float* logsumexp = block.Take<float>(rows);
    RowStatus* status = block.Take<RowStatus>(rows);
    const AttentionShape shape = {
        .batch = c.batch, .heads = c.heads, .queries = c.queries, .keys = c.keys, .rows = rows};
    const int launches = LaunchesOf(static_cast<size_t>(c.FloorBytes()));
    auto us = Time(launches, [&](int i) {
      std::byte* at = data + static_cast<size_t>(i) % parts * tensors * bytes;
      const auto tensor = [&](int t) {
        return TensorView{at + t * bytes, c.dtype, rows, c.keys, c.keys};
      };
      const MutableTensorView to = {at + (tensors - 1) * bytes, c.dtype, rows, c.keys, c.keys};
      if (c.backward) {
        return cuda::AttentionSoftmaxBackward({.shape = shape,
                                               .probs = tensor(0),
                                               .d_probs = tensor(1),
                                               .window = c.window,
                                               .d_scores = to,
                                               .status = status},
                                              scratch_, stream_);
      }
      return cuda::AttentionSoftmax({.shape = shape,
                                     .scores = tensor(0),
                                     .window = c.window,
                                     .mask = {.kind = c.mask,
                                              .dtype = c.dtype,
                                              .data = mask,
                                              .batch_stride = c.queries * c.keys,
                                              .query_stride = c.keys},
                                     .probs = to,
                                     .logsumexp = logsumexp,
                                     .status = status},
                                    scratch_, stream_);
    });
    return us;
  }

  absl::StatusOr<double> TimeLoss(const LossCase& c) override {
    LOGITD_RETURN_IF_ERROR(Fill(c.dtype));
    const size_t rows = static_cast<size_t>(c.rows);
    DeviceBlock block;
    LOGITD_RETURN_IF_ERROR(ToStatus(block.Allocate(LossBytes(rows, c.row))));
    const TensorView logits{nullptr, c.dtype, c.rows, c.vocab, c.vocab};
    CrossEntropyArgs args = TakeLoss(block, c.rows, c.vocab, c.row);
    args.logits = logits;
    const size_t bytes = (rows * c.vocab * SizeOf(c.dtype) + 255) / 256 * 256;
    const size_t tensors = c.backward ? 2 : 1;
    const size_t parts = std::max<size_t>(1, kBufferBytes / (tensors * bytes));
    const int launches = LaunchesOf(tensors * bytes);
    if (!c.backward) {
      return Time(launches, [&](int i) {
        args.logits.data = buffer_ + static_cast<size_t>(i) % parts * bytes;
        return cuda::CrossEntropy(args, scratch_, stream_);
      });
    }
    // The logsumexp of normals, nearly.
    std::vector<float> ones(rows, 1.0f);
    std::vector<float> logsumexp(rows, std::log(static_cast<float>(c.vocab)) + 0.5f);
    float* device_ones = block.Take<float>(rows);
    float* device_logsumexp = block.Take<float>(rows);
    cudaMemcpy(device_ones, ones.data(), rows * 4, cudaMemcpyHostToDevice);
    cudaMemcpy(device_logsumexp, logsumexp.data(), rows * 4, cudaMemcpyHostToDevice);
    CrossEntropyBackwardArgs backward{.logits = logits,
                                      .rows = args.rows,
                                      .logsumexp = device_logsumexp,
                                      .upstream = device_ones,
                                      .d_logits = {nullptr, c.dtype, c.rows, c.vocab, c.vocab}};
    filled_ = false;  // gradients lie where the normals were
    return Time(launches, [&](int i) {
      std::byte* at = buffer_ + static_cast<size_t>(i) % parts * 2 * bytes;
      backward.logits.data = at;
      backward.d_logits.data = at + bytes;
      return cuda::CrossEntropyBackward(backward, stream_);
    });
  }

  absl::StatusOr<double> TimeHead(const HeadCase& c) override {
    LOGITD_RETURN_IF_ERROR(products_status_);
    LOGITD_RETURN_IF_ERROR(Fill(c.dtype));
    const size_t rows = static_cast<size_t>(c.rows);
    const size_t size = SizeOf(c.dtype);
    const size_t weight_bytes = static_cast<size_t>(c.vocab) * c.hidden * size;
    const size_t hidden_bytes = rows * c.hidden * size;
    const bool backward = c.op == HeadOp::kLossBackward;
    const CrossEntropyRow loss_row{.active = 1, .temperature = 1.0f};
    DeviceBlock block;
    LOGITD_RETURN_IF_ERROR(ToStatus(block.Allocate((backward ? weight_bytes + hidden_bytes : 0) +
                                                   hidden_bytes + LossBytes(rows, loss_row) +
                                                   rows * (sizeof(SampleRow) + 256) + 65536)));
    std::byte* states = block.Take<std::byte>(hidden_bytes);
    FillWith(c.dtype, states, hidden_bytes);
    const TensorView hidden{states, c.dtype, c.rows, c.hidden, c.hidden};
    HeadView head{.weight = {nullptr, c.dtype, c.vocab, c.hidden, c.hidden},
                  .scale = 1.0f / std::sqrt(static_cast<float>(c.hidden))};

    LinearTopKArgs top{.hidden = hidden, .head = head, .topk = {}};
    LinearSampleArgs sample{.hidden = hidden, .head = head, .sample = {}};
    LinearCrossEntropyArgs loss{.hidden = hidden, .head = head, .cross_entropy = {}};
    LinearCrossEntropyTrainingArgs training{.gradient = {.hidden = hidden, .head = head}};
    if (c.op == HeadOp::kTopK) {
      constexpr int32_t kTop = 20;
      std::vector<SoftmaxTopKRow> asks(rows);
      for (size_t i = 0; i < rows; ++i)
        asks[i] = {.first_entry = static_cast<int64_t>(i) * kTop, .temperature = 1.0f, .k = kTop};
      top.topk.rows = CopyIn(block, asks);
      top.topk.max_k = kTop;
      top.topk.indices = block.Take<int32_t>(rows * kTop);
      top.topk.probs = block.Take<float>(rows * kTop);
      top.topk.logsumexp = block.Take<float>(rows);
      top.topk.status = block.Take<RowStatus>(rows);
    } else if (c.op == HeadOp::kSample) {
      std::vector<SampleRow> asks(rows, SampleRow{.first_mask_word = -1,
                                                  .active = 1,
                                                  .temperature = 1.0f,
                                                  .top_k = 50,
                                                  .top_p = 0.9f,
                                                  .repetition = 1.0f});
      for (size_t i = 0; i < rows; ++i) asks[i].seed = i;
      sample.sample.rows = CopyIn(block, asks);
      sample.sample.edited = false;
      sample.sample.tokens = block.Take<int32_t>(rows);
      sample.sample.logprobs = block.Take<float>(rows);
      sample.sample.ranks = block.Take<int32_t>(rows);
      sample.sample.logsumexp = block.Take<float>(rows);
      sample.sample.status = block.Take<RowStatus>(rows);
    } else {
      loss.cross_entropy = TakeLoss(block, c.rows, c.vocab, loss_row);
      if (backward) {
        LinearCrossEntropyBackwardArgs& gradient = training.gradient;
        training.answers = loss.cross_entropy.answers;
        gradient.rows = loss.cross_entropy.rows;
        std::vector<float> upstream(rows, 1.0f / static_cast<float>(rows));
        gradient.upstream = CopyIn(block, upstream);
        gradient.d_hidden = {block.Take<std::byte>(hidden_bytes), c.dtype, c.rows, c.hidden,
                             c.hidden};
        gradient.d_weight = {block.Take<std::byte>(weight_bytes), c.dtype, c.vocab, c.hidden,
                             c.hidden};
      }
    }
    // Its goal is of memory too: 300 MiB beside the gradients.
    cuda::Scratch lean = scratch_;
    lean.bytes = std::min(lean.bytes, size_t{290} << 20);
    const size_t parts = std::max<size_t>(1, kBufferBytes / weight_bytes);
    const auto launch = [&](int i) {
      const std::byte* weight = buffer_ + static_cast<size_t>(i) % parts * weight_bytes;
      switch (c.op) {
        case HeadOp::kTopK:
          top.head.weight.data = weight;
          return cuda::LinearTopK(top, products_, scratch_, stream_);
        case HeadOp::kSample:
          sample.head.weight.data = weight;
          return cuda::LinearSample(sample, products_, scratch_, stream_);
        case HeadOp::kLoss:
          loss.head.weight.data = weight;
          return cuda::LinearCrossEntropy(loss, products_, scratch_, stream_);
        case HeadOp::kLossBackward:
          training.gradient.head.weight.data = weight;
          return cuda::LinearCrossEntropyTraining(training, products_, lean, stream_);
      }
      return cudaErrorInvalidValue;
    };
    // Once before it is recorded: what the library loads at first use cannot be.
    LOGITD_RETURN_IF_ERROR(ToStatus(launch(0)));
    LOGITD_RETURN_IF_ERROR(ToStatus(cudaStreamSynchronize(stream_)));
    return Time(c.rows <= 512 ? 8 : 2, launch);
  }

  absl::StatusOr<double> TimeProduct(const HeadCase& c) override {
    LOGITD_RETURN_IF_ERROR(products_status_);
    LOGITD_RETURN_IF_ERROR(Fill(c.dtype));
    const size_t size = SizeOf(c.dtype);
    const size_t weight_bytes = static_cast<size_t>(c.vocab) * c.hidden * size;
    DeviceBlock block;
    LOGITD_RETURN_IF_ERROR(
        ToStatus(block.Allocate(static_cast<size_t>(c.rows) * (c.hidden + c.vocab + 32) * size +
                                products_.workspace_bytes() + 4096)));
    std::byte* states = block.Take<std::byte>(static_cast<size_t>(c.rows) * c.hidden * size);
    FillWith(c.dtype, states, static_cast<size_t>(c.rows) * c.hidden * size);
    const int64_t stride = (c.vocab + 31) / 32 * 32;
    std::byte* out = block.Take<std::byte>(static_cast<size_t>(c.rows) * stride * size);
    std::byte* workspace = block.Take<std::byte>(products_.workspace_bytes());
    const size_t parts = std::max<size_t>(1, kBufferBytes / weight_bytes);
    const auto launch = [&](int i) {
      return products_.Enqueue({.inputs = c.dtype,
                                .output = c.dtype,
                                .transpose_a = true,
                                .m = c.vocab,
                                .n = c.rows,
                                .k = c.hidden,
                                .a_stride = c.hidden,
                                .b_stride = c.hidden,
                                .out_stride = stride},
                               {.a = buffer_ + static_cast<size_t>(i) % parts * weight_bytes,
                                .b = states,
                                .out = out,
                                .workspace = workspace},
                               stream_);
    };
    LOGITD_RETURN_IF_ERROR(ToStatus(launch(0)));
    LOGITD_RETURN_IF_ERROR(ToStatus(cudaStreamSynchronize(stream_)));
    return Time(c.rows <= 512 ? 8 : 2, launch);
  }

 private:
  template <class U>
  static U* CopyIn(DeviceBlock& block, const std::vector<U>& values) {
    U* to = block.Take<U>(values.size());
    cudaMemcpy(to, values.data(), values.size() * sizeof(U), cudaMemcpyHostToDevice);
    return to;
  }

  static size_t LossBytes(size_t rows, const CrossEntropyRow& row) {
    return rows * (sizeof(CrossEntropyRow) + 64 + row.top_logprobs * 8) + 16384;
  }

  // What `rows` rows like `row` ask, with targets of their own, and room for their answers.
  static CrossEntropyArgs TakeLoss(DeviceBlock& block, int64_t rows, int64_t vocab,
                                   const CrossEntropyRow& row) {
    std::mt19937_64 random(1);
    std::vector<CrossEntropyRow> asks(rows, row);
    for (int64_t i = 0; i < rows; ++i) {
      asks[i].target = static_cast<int32_t>(random() % static_cast<uint64_t>(vocab));
      asks[i].first_top_entry = i * row.top_logprobs;
    }
    CrossEntropyArgs args;
    args.rows = CopyIn(block, asks);
    args.want = row.want;
    args.max_top_logprobs = row.top_logprobs;
    args.answers = {.loss = block.Take<float>(rows),
                    .logsumexp = block.Take<float>(rows),
                    .target_logprob = block.Take<float>(rows),
                    .rank = block.Take<int32_t>(rows),
                    .entropy = block.Take<float>(rows),
                    .top_ids = block.Take<int32_t>(rows * row.top_logprobs),
                    .top_logprobs = block.Take<float>(rows * row.top_logprobs),
                    .status = block.Take<RowStatus>(rows)};
    return args;
  }

  absl::Status Fill(DType dtype) {
    if (filled_ && filled_dtype_ == dtype) return absl::OkStatus();
    FillWith(dtype, buffer_, kBufferBytes);
    filled_ = true;
    filled_dtype_ = dtype;
    return ToStatus(cudaStreamSynchronize(stream_));
  }

  void FillWith(DType dtype, std::byte* data, size_t bytes) {
    const size_t n = bytes / SizeOf(dtype);
    const int blocks = scratch_.multiprocessors * 8;
    if (dtype == DType::kF32)
      FillNormal<<<blocks, 512, 0, stream_>>>(reinterpret_cast<float*>(data), n);
    if (dtype == DType::kF16)
      FillNormal<<<blocks, 512, 0, stream_>>>(reinterpret_cast<__half*>(data), n);
    if (dtype == DType::kBF16)
      FillNormal<<<blocks, 512, 0, stream_>>>(reinterpret_cast<__nv_bfloat16*>(data), n);
  }

  void FillMaskOf(const AttentionCase& c, std::byte* mask, size_t n) {
    const int blocks = scratch_.multiprocessors * 8;
    const auto fill = [&](auto hides) {
      using T = decltype(hides);
      FillMask<<<blocks, 512, 0, stream_>>>(reinterpret_cast<T*>(mask), n, hides, T{});
    };
    if (c.mask == MaskKind::kBool) fill(uint8_t{1});
    if (c.mask != MaskKind::kAdditive) return;
    if (c.dtype == DType::kF32) fill(uint32_t{0xff800000});  // -inf, by its bits
    if (c.dtype == DType::kF16) fill(uint16_t{0xfc00});
    if (c.dtype == DType::kBF16) fill(uint16_t{0xff80});
  }

  // Median time of one of `launches` launches, in microseconds.
  template <class Launch>
  absl::StatusOr<double> Time(int launches, Launch launch) {
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    cudaEvent_t begin, end;
    LOGITD_RETURN_IF_ERROR(
        ToStatus(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal)));
    absl::Status launched = absl::OkStatus();
    for (int i = 0; i < launches && launched.ok(); ++i) launched.Update(ToStatus(launch(i)));
    LOGITD_RETURN_IF_ERROR(ToStatus(cudaStreamEndCapture(stream_, &graph)));
    LOGITD_RETURN_IF_ERROR(launched);
    LOGITD_RETURN_IF_ERROR(ToStatus(cudaGraphInstantiate(&exec, graph, 0)));
    LOGITD_RETURN_IF_ERROR(ToStatus(cudaEventCreate(&begin)));
    LOGITD_RETURN_IF_ERROR(ToStatus(cudaEventCreate(&end)));
    std::vector<double> us;
    for (int i = 0; i < kReplays + 3; ++i) {
      LOGITD_RETURN_IF_ERROR(ToStatus(cudaEventRecord(begin, stream_)));
      LOGITD_RETURN_IF_ERROR(ToStatus(cudaGraphLaunch(exec, stream_)));
      LOGITD_RETURN_IF_ERROR(ToStatus(cudaEventRecord(end, stream_)));
      LOGITD_RETURN_IF_ERROR(ToStatus(cudaEventSynchronize(end)));
      float ms = 0;
      LOGITD_RETURN_IF_ERROR(ToStatus(cudaEventElapsedTime(&ms, begin, end)));
      if (i >= 3) us.push_back(ms * 1e3 / launches);
    }
    cudaEventDestroy(begin);
    cudaEventDestroy(end);
    cudaGraphExecDestroy(exec);
    cudaGraphDestroy(graph);
    std::nth_element(us.begin(), us.begin() + us.size() / 2, us.end());
    return us[us.size() / 2];
  }

  std::string name_;
  cudaStream_t stream_ = nullptr;
  std::byte* buffer_ = nullptr;
  cuda::Scratch scratch_;
  cuda::Products products_;
  absl::Status products_status_;
  bool filled_ = false;
  DType filled_dtype_ = DType::kF32;
  size_t next_part_ = 0;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Device>> CreateCudaDevice() {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) {
    cudaGetLastError();
    return absl::UnavailableError("no CUDA device answers");
  }
  auto device = std::make_unique<CudaDevice>();
  LOGITD_RETURN_IF_ERROR(device->Init());
  return device;
}

}  // namespace logitd::bench
