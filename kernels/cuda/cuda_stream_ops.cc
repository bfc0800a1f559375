// The ops of a stream, and small work that is kept to run as a graph.
#include <cuda_runtime.h>

#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <variant>

#include "kernels/cuda/cuda_stream.h"
#include "kernels/cuda/launchers.h"
#include "kernels/status_macros.h"

namespace logitd::cuda {
namespace {

constexpr int64_t kFewRows = 8;  // work is small, and may be a graph, with up to so many

template <class... Values>
void Append(std::string& key, const Values&... values) {
  const auto append = [&key](const auto& value) {
    static_assert(std::is_scalar_v<std::decay_t<decltype(value)>>);  // no padding
    key.append(reinterpret_cast<const char*>(&value), sizeof(value));
  };
  (append(values), ...);
}
void Append(std::string& key, const TensorView& of) {
  Append(key, of.data, of.dtype, of.rows, of.cols, of.row_stride);
}

// All that an op depends on, for those that may be small work.
void AppendArgs(std::string& key, const SoftmaxTopKArgs& args) {
  const auto& [logits, rows, max_k, indices, probs, logsumexp, status] = args;
  Append(key, logits);
  Append(key, rows, max_k, indices, probs, logsumexp, status);
}
void AppendArgs(std::string& key, const SampleArgs& args) {
  const auto& [logits, rows, history, bias, extra_ids, mask_words, edited, asks_more, tokens,
               logprobs, ranks, logsumexp, top_ids, top_logprobs, extra_logprobs, status,
               support_size, support_ids, support_logprobs, entropies, raw_entropies, draw_tokens,
               draw_logprobs] = args;
  Append(key, logits);
  Append(key, rows, history, bias, extra_ids, mask_words, edited, asks_more, tokens, logprobs,
         ranks, logsumexp, top_ids, top_logprobs, extra_logprobs, status, support_size, support_ids,
         support_logprobs, entropies, raw_entropies, draw_tokens, draw_logprobs);
}

}  // namespace

absl::Status CudaStream::RunOp(const Op& op) {
  return std::visit(
      [&, name = NameOf(op)](const auto* args) {
        const auto& [launch, linear_op] = kLaunchers(*args);
        if constexpr (requires { AppendArgs(small_key_, *args); }) {
          if (KeepsSmall(args->logits)) {
            small_ = {.name = name, .op = [this, launch = launch, args = *args] {
                        return launch(args, scratch_, stream_);
                      }};
            small_key_ = name;
            AppendArgs(small_key_, *args);
            return absl::OkStatus();
          }
        }
        return Start(name, launch, *args, linear_op);
      },
      op);
}

bool CudaStream::TrainingFits(const ShardTrainingArgs& args) {
  cudaSetDevice(device_);  // a route asks the thread's device
  return ShardTrainingFits(args, products_, scratch_);
}

absl::Status CudaStream::BeginTraining(const ShardTrainingArgs& args) {
  return Start("losses of training on a shard", &BeginShardTraining, args, LinearOp::kTraining);
}

absl::Status CudaStream::EndTraining(
    const ShardTrainingArgs& args,
    absl::FunctionRef<cudaError_t(const MutableTensorView&)> hidden_done) {
  const auto end = [&](const auto& of, auto& products, const auto& scratch, cudaStream_t stream) {
    return EndShardTraining(of, hidden_done, products, scratch, stream);
  };
  return Start("gradients of training on a shard", end, args, LinearOp::kTraining);
}

bool CudaStream::KeepsSmall(const TensorView& logits) const {
  return phase_ == kIdle && !uploads_.empty() && uploads_.size() <= kMostSmallCopies &&
         small_.op == nullptr && marks_ != nullptr && logits.rows <= kFewRows;
}

absl::Status CudaStream::RunDeferred() {
  LOGITD_RETURN_IF_ERROR(ToStatus(cudaSetDevice(device_), "select device"));
  uploads_.push_back(small_.download);
  for (const RowsCopy& copy : uploads_) {
    Append(small_key_, copy.from, copy.from_stride, copy.to, copy.to_stride, copy.row_bytes,
           copy.rows);
  }
  uploads_.pop_back();
  by_marks_ = true;
  ++ends_;
  // A kernel awaits the one before it only where its code is for devices with clusters.
  const cudaError_t error = replays_->Run(
      small_key_, [this] { return EnqueueDeferred(); }, /*last_awaits=*/scratch_.clusters);
  return ToStatus(error, small_.name);
}

cudaError_t CudaStream::EnqueueDeferred() {
  cudaError_t error = GatherRows(
      uploads_, stream_,
      {.host = marks_, .device = device_marks_, .upload_begins = true, .upload_ends = true});
  if (error == cudaSuccess) error = small_.op();
  if (error != cudaSuccess) return error;
  return GatherRows(
      {&small_.download, 1}, stream_,
      {.host = marks_, .device = device_marks_, .download_begins = true, .download_ends = true});
}

absl::Status CudaStream::UndoDefer() {
  Small small = std::exchange(small_, {});
  LOGITD_RETURN_IF_ERROR(Enter(kComputing));
  LOGITD_RETURN_IF_ERROR(ToStatus(small.op(), small.name));
  if (small.download.rows == 0) return absl::OkStatus();
  LOGITD_RETURN_IF_ERROR(Enter(kDownloading));
  return ToStatus(GatherRows({&small.download, 1}, stream_, MarkDownload()), "download");
}

template <class Launch, class Args>
absl::Status CudaStream::Start(std::string_view name, const Launch& launch, const Args& args,
                               [[maybe_unused]] LinearOp op) {
  LOGITD_RETURN_IF_ERROR(Enter(kComputing));  // first: a route asks the stream's device
  return Enqueue(name, launch, args, op,
                 {.products = products_, .products_status = products_status_, .scratch = scratch_},
                 stream_);
}

}  // namespace logitd::cuda
