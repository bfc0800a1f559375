// What a stream computes: the ops, and small work that is kept to run as a graph.
#include <cuda_runtime.h>

#include <tuple>
#include <type_traits>
#include <utility>

#include "kernels/cuda/cuda_stream.h"
#include "kernels/cuda/linear/shards.h"
#include "kernels/cuda/loss/cross_entropy_training.h"
#include "kernels/status_macros.h"

namespace logitd::cuda {
namespace {

constexpr int64_t kFewRows = 8;  // work is small, and may be a graph, with up to so many

}  // namespace

absl::Status CudaStream::ShardLogits(const cuda::ShardLogitsArgs& args) {
  return RunLinear("logits of a shard", &cuda::ShardLogits, args, cuda::LinearOp::kTokens,
                   args.head);
}

absl::Status CudaStream::KeptSamplePartial(const cuda::KeptSamplePartialArgs& args) {
  return RunLinear("linear_sample on a shard", &cuda::KeptSamplePartial, args,
                   cuda::LinearOp::kTokens, args.head);
}

absl::Status CudaStream::KeptSampleMerge(const cuda::KeptSampleMergeArgs& args) {
  LOGITD_RETURN_IF_ERROR(Enter(kComputing));
  return ToStatus(cuda::KeptSampleMerge(args, stream_), "linear_sample on shards");
}

bool CudaStream::TrainingFits(const cuda::ShardTrainingArgs& args) {
  cudaSetDevice(device_);  // a route asks the thread's device
  return cuda::ShardTrainingFits(args, products_, scratch_);
}

absl::Status CudaStream::BeginTraining(const cuda::ShardTrainingArgs& args) {
  return RunLinear("losses of training on a shard", &cuda::BeginShardTraining, args,
                   cuda::LinearOp::kTraining, args.training.gradient.head);
}

absl::Status CudaStream::EndTraining(
    const cuda::ShardTrainingArgs& args,
    absl::FunctionRef<cudaError_t(const MutableTensorView&)> hidden_done) {
  const auto end = [&](const auto& of, auto& products, const auto& scratch, cudaStream_t stream) {
    return cuda::EndShardTraining(of, hidden_done, products, scratch, stream);
  };
  return RunLinear("gradients of training on a shard", end, args, cuda::LinearOp::kTraining,
                   args.training.gradient.head);
}

absl::Status CudaStream::SoftmaxTopK(const SoftmaxTopKArgs& args) {
  const auto& [logits, rows, max_k, indices, probs, logsumexp, status] = args;
  return RunSmall("softmax_topk", &cuda::SoftmaxTopK, args, logits,
                  std::make_tuple(rows, max_k, indices, probs, logsumexp, status));
}

absl::Status CudaStream::Sample(const SampleArgs& args) {
  const auto& [logits, rows, history, bias, extra_ids, mask_words, edited, tokens, logprobs, ranks,
               logsumexp, top_ids, top_logprobs, extra_logprobs, status] = args;
  return RunSmall(
      "sample", &cuda::Sample, args, logits,
      std::make_tuple(rows, history, bias, extra_ids, mask_words, edited, tokens, logprobs, ranks,
                      logsumexp, top_ids, top_logprobs, extra_logprobs, status));
}

absl::Status CudaStream::Verify(const VerifyArgs& args) {
  return Run("verify", &cuda::Verify, args);
}

absl::Status CudaStream::AttentionSoftmax(const AttentionSoftmaxArgs& args) {
  return Run("attention_softmax", &cuda::AttentionSoftmax, args);
}

absl::Status CudaStream::AttentionSoftmaxBackward(const AttentionSoftmaxBackwardArgs& args) {
  return Run("attention_softmax_backward", &cuda::AttentionSoftmaxBackward, args);
}

absl::Status CudaStream::CrossEntropy(const CrossEntropyArgs& args) {
  return Run("cross_entropy", &cuda::CrossEntropy, args);
}

absl::Status CudaStream::CrossEntropyBackward(const CrossEntropyBackwardArgs& args) {
  LOGITD_RETURN_IF_ERROR(Enter(kComputing));
  return ToStatus(cuda::CrossEntropyBackward(args, stream_), "cross_entropy_backward");
}

absl::Status CudaStream::CrossEntropyTraining(const CrossEntropyTrainingArgs& args) {
  return Run("cross_entropy_training", &cuda::CrossEntropyTraining, args);
}

absl::Status CudaStream::LinearTopK(const LinearTopKArgs& args) {
  return RunLinear("linear_topk", &cuda::LinearTopK, args, cuda::LinearOp::kTokens, args.head);
}

absl::Status CudaStream::LinearSample(const LinearSampleArgs& args) {
  return RunLinear("linear_sample", &cuda::LinearSample, args, cuda::LinearOp::kTokens, args.head);
}

absl::Status CudaStream::LinearCrossEntropy(const LinearCrossEntropyArgs& args) {
  return RunLinear("linear_cross_entropy", &cuda::LinearCrossEntropy, args, cuda::LinearOp::kLosses,
                   args.head);
}

absl::Status CudaStream::LinearCrossEntropyBackward(const LinearCrossEntropyBackwardArgs& args) {
  return RunLinear("linear_cross_entropy_backward", &cuda::LinearCrossEntropyBackward, args,
                   cuda::LinearOp::kGradients, args.head);
}

absl::Status CudaStream::LinearCrossEntropyTraining(const LinearCrossEntropyTrainingArgs& args) {
  return RunLinear("linear_cross_entropy_training", &cuda::LinearCrossEntropyTraining, args,
                   cuda::LinearOp::kTraining, args.gradient.head);
}

absl::Status CudaStream::LinearTopKPartial(const LinearTopKPartialArgs& args) {
  return RunLinear("linear_topk on a shard", &cuda::LinearTopKPartial, args,
                   cuda::LinearOp::kTokens, args.head);
}

absl::Status CudaStream::LinearTopKMerge(const LinearTopKMergeArgs& args) {
  LOGITD_RETURN_IF_ERROR(Enter(kComputing));
  return ToStatus(cuda::LinearTopKMerge(args, stream_), "linear_topk on shards");
}

absl::Status CudaStream::LinearSamplePartial(const LinearSamplePartialArgs& args) {
  return RunLinear("linear_sample on a shard", &cuda::LinearSamplePartial, args,
                   cuda::LinearOp::kTokens, args.head);
}

absl::Status CudaStream::LinearSampleMerge(const LinearSampleMergeArgs& args) {
  return Run("linear_sample on shards", &cuda::LinearSampleMerge, args);
}

absl::Status CudaStream::LinearCrossEntropyTargets(const LinearCrossEntropyTargetsArgs& args) {
  return RunLinear("linear_cross_entropy's targets", &cuda::LinearCrossEntropyTargets, args,
                   cuda::LinearOp::kLosses, args.head);
}

absl::Status CudaStream::LinearCrossEntropyPartial(const LinearCrossEntropyPartialArgs& args) {
  return RunLinear("linear_cross_entropy on a shard", &cuda::LinearCrossEntropyPartial, args,
                   cuda::LinearOp::kLosses, args.head);
}

absl::Status CudaStream::LinearCrossEntropyMerge(const LinearCrossEntropyMergeArgs& args) {
  LOGITD_RETURN_IF_ERROR(Enter(kComputing));
  return ToStatus(cuda::LinearCrossEntropyMerge(args, stream_), "linear_cross_entropy on shards");
}

absl::Status CudaStream::LinearCrossEntropyBackwardPartial(
    const LinearCrossEntropyBackwardPartialArgs& args) {
  return RunLinear("linear_cross_entropy_backward on a shard",
                   &cuda::LinearCrossEntropyBackwardPartial, args, cuda::LinearOp::kGradients,
                   args.gradient.head);
}

absl::Status CudaStream::LinearCrossEntropyBackwardMerge(
    const LinearCrossEntropyBackwardMergeArgs& args) {
  LOGITD_RETURN_IF_ERROR(Enter(kComputing));
  return ToStatus(cuda::LinearCrossEntropyBackwardMerge(args, stream_),
                  "linear_cross_entropy_backward on shards");
}

template <class Op, class Args, class Arguments>
absl::Status CudaStream::RunSmall(std::string_view name, Op op, const Args& args,
                                  const TensorView& logits, const Arguments& arguments) {
  if (phase_ != kIdle || uploads_.empty() || uploads_.size() > kMostSmallCopies ||
      small_.op != nullptr || marks_ == nullptr || logits.rows > kFewRows) {
    return Run(name, op, args);
  }
  small_ = {.name = name, .op = [this, op, args] { return op(args, scratch_, stream_); }};
  small_key_ = name;
  AppendToKey(logits.data, logits.dtype, logits.rows, logits.cols, logits.row_stride);
  std::apply([this](const auto&... each) { AppendToKey(each...); }, arguments);
  return absl::OkStatus();
}

template <class... Values>
void CudaStream::AppendToKey(const Values&... values) {
  const auto append = [this](const auto& value) {
    static_assert(std::is_scalar_v<std::decay_t<decltype(value)>>);  // no padding
    small_key_.append(reinterpret_cast<const char*>(&value), sizeof(value));
  };
  (append(values), ...);
}

absl::Status CudaStream::RunDeferred() {
  LOGITD_RETURN_IF_ERROR(ToStatus(cudaSetDevice(device_), "select device"));
  uploads_.push_back(small_.download);
  for (const RowsCopy& copy : uploads_) {
    AppendToKey(copy.from, copy.from_stride, copy.to, copy.to_stride, copy.row_bytes, copy.rows);
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
  cudaError_t error = cuda::GatherRows(
      uploads_, stream_,
      {.host = marks_, .device = device_marks_, .upload_begins = true, .upload_ends = true});
  if (error == cudaSuccess) error = small_.op();
  if (error != cudaSuccess) return error;
  return cuda::GatherRows(
      {&small_.download, 1}, stream_,
      {.host = marks_, .device = device_marks_, .download_begins = true, .download_ends = true});
}

absl::Status CudaStream::UndoDefer() {
  Small small = std::exchange(small_, {});
  LOGITD_RETURN_IF_ERROR(Enter(kComputing));
  LOGITD_RETURN_IF_ERROR(ToStatus(small.op(), small.name));
  if (small.download.rows == 0) return absl::OkStatus();
  LOGITD_RETURN_IF_ERROR(Enter(kDownloading));
  return ToStatus(cuda::GatherRows({&small.download, 1}, stream_, MarkDownload()), "download");
}

template <class Op, class Args>
absl::Status CudaStream::Run(std::string_view name, Op op, const Args& args) {
  LOGITD_RETURN_IF_ERROR(Enter(kComputing));
  return ToStatus(op(args, scratch_, stream_), name);
}

template <class Op, class Args>
absl::Status CudaStream::RunLinear(std::string_view name, Op op, const Args& args,
                                   cuda::LinearOp linear_op, const HeadView& head) {
  LOGITD_RETURN_IF_ERROR(Enter(kComputing));  // first: a route asks the stream's device
  if (cuda::RouteOf(linear_op, head, scratch_).cublas_lt) LOGITD_RETURN_IF_ERROR(products_status_);
  return ToStatus(op(args, products_, scratch_, stream_), name);
}

}  // namespace logitd::cuda
