// The CUDA backend: pinned slabs with device mirrors, and streams, which time their work by events or
// marks.
// Long because all of a stream shares the state of its phases.
#include <cuda_runtime.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/any_invocable.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "kernels/backend.h"
#include "kernels/cuda/gather.h"
#include "kernels/cuda/linear/product.h"
#include "kernels/cuda/linear/routes.h"
#include "kernels/cuda/linear/shards.h"
#include "kernels/cuda/loss/cross_entropy_training.h"
#include "kernels/cuda/ops.h"
#include "kernels/cuda/patience.h"
#include "kernels/cuda/replays.h"
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
    if (cuda::IsHung(device_)) {
      static_cast<void>(replays_.release());
      products_.Abandon();
      return;
    }
    cudaSetDevice(device_);
    for (cudaEvent_t event : events_) {
      if (event != nullptr) cudaEventDestroy(event);
    }
    if (blocking_ != nullptr) cudaEventDestroy(blocking_);
    if (stream_ != nullptr) cudaStreamSynchronize(stream_);
    replays_.reset();
    if (stream_ != nullptr) cudaStreamDestroy(stream_);
    cudaFree(scratch_.data);
    cudaFree(device_marks_);
    cudaFreeHost(marks_);
  }

  int device() const override { return device_; }
  int64_t replayed() const override { return replays_ == nullptr ? 0 : replays_->replayed(); }
  cudaStream_t native() const override { return stream_; }
  absl::Status BeginOps() override { return Enter(kComputing); }
  void LimitWait(absl::Duration limit) override { wait_limit_ = limit; }
  absl::Status ShardLogits(const cuda::ShardLogitsArgs& args) override {
    return RunLinear("logits of a shard", &cuda::ShardLogits, args, cuda::LinearOp::kTokens,
                     args.head);
  }
  absl::Status KeptSamplePartial(const cuda::KeptSamplePartialArgs& args) override {
    return RunLinear("linear_sample on a shard", &cuda::KeptSamplePartial, args,
                     cuda::LinearOp::kTokens, args.head);
  }
  absl::Status KeptSampleMerge(const cuda::KeptSampleMergeArgs& args) override {
    LOGITD_RETURN_IF_ERROR(Enter(kComputing));
    return ToStatus(cuda::KeptSampleMerge(args, stream_), "linear_sample on shards");
  }
  bool TrainingFits(const cuda::ShardTrainingArgs& args) override {
    cudaSetDevice(device_);  // a route asks the thread's device
    return cuda::ShardTrainingFits(args, products_, scratch_);
  }
  absl::Status BeginTraining(const cuda::ShardTrainingArgs& args) override {
    return RunLinear("losses of training on a shard", &cuda::BeginShardTraining, args,
                     cuda::LinearOp::kTraining, args.training.gradient.head);
  }
  absl::Status EndTraining(
      const cuda::ShardTrainingArgs& args,
      absl::FunctionRef<cudaError_t(const MutableTensorView&)> hidden_done) override {
    const auto end = [&](const auto& of, auto& products, const auto& scratch, cudaStream_t stream) {
      return cuda::EndShardTraining(of, hidden_done, products, scratch, stream);
    };
    return RunLinear("gradients of training on a shard", end, args, cuda::LinearOp::kTraining,
                     args.training.gradient.head);
  }

  absl::Status Upload(const Slab& slab, size_t offset, size_t bytes) override {
    std::byte* const to = slab.device + offset;
    const std::byte* const from = slab.host + offset;
    if (small_.op != nullptr) LOGITD_RETURN_IF_ERROR(Enter(kComputing));  // it comes first
    const RowsCopy row = RowOf(to, from, bytes);
    if (phase_ <= kUploading && KernelUploads(to, from, bytes)) {
      if (!IsApart(row)) LOGITD_RETURN_IF_ERROR(EnterUpload(row));
      uploads_.push_back(row);  // for one launch with a Gather
      return absl::OkStatus();
    }
    LOGITD_RETURN_IF_ERROR(EnterUpload(row));
    return ToStatus(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, stream_), "upload");
  }

  absl::Status Download(const Slab& slab, size_t offset, size_t bytes) override {
    std::byte* const to = slab.host + offset;
    const std::byte* const from = slab.device + offset;
    const bool by_kernel = KernelCopies(to, from, bytes);
    if (by_kernel && small_.op != nullptr && small_.download.rows == 0) {
      small_.download = RowOf(to, from, bytes);
      return absl::OkStatus();
    }
    LOGITD_RETURN_IF_ERROR(Enter(kDownloading));
    if (by_kernel) {
      const RowsCopy row = RowOf(to, from, bytes);
      return ToStatus(cuda::GatherRows({&row, 1}, stream_, MarkDownload()), "download");
    }
    LOGITD_RETURN_IF_ERROR(MarkCopy());
    return ToStatus(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, stream_), "download");
  }

  absl::Status Fill(const Slab& slab, size_t offset, size_t bytes, std::byte* to) override {
    LOGITD_RETURN_IF_ERROR(EnterUpload(RowOf(to, slab.host + offset, bytes)));
    return ToStatus(cudaMemcpyAsync(to, slab.host + offset, bytes, cudaMemcpyHostToDevice, stream_),
                    "fill");
  }

  absl::Status Gather(absl::Span<const RowsCopy> copies) override {
    const auto on_device = [](const RowsCopy& copy) { return copy.from_device; };
    const bool by_kernel = phase_ == kIdle && marks_ != nullptr && KernelGathers(copies);
    // What an upload wrote there comes first.
    const bool apart = std::all_of(copies.begin(), copies.end(),
                                   [this](const RowsCopy& copy) { return IsApart(copy); });
    if (by_kernel) {
      if (apart && small_.op == nullptr && uploads_.size() + copies.size() <= kMostSmallCopies) {
        uploads_.insert(uploads_.end(), copies.begin(), copies.end());
        gathers_ = true;
        return absl::OkStatus();
      }
      BeginByMarks();
    }
    LOGITD_RETURN_IF_ERROR(Enter(kUploading));
    if (!apart) LOGITD_RETURN_IF_ERROR(FlushUploads());
    for (const RowsCopy& copy : copies) {
      if (copy.from_device || by_kernel) {
        uploads_.push_back(copy);
        continue;
      }
      if (phase_ == kUploading) upload_marked_ = false;
      LOGITD_RETURN_IF_ERROR(ToStatus(CopyFromHost(copy), "gather from the host"));
    }
    if (!by_kernel && !std::any_of(copies.begin(), copies.end(), on_device)) return FlushUploads();
    return GatherUploads();
  }

  absl::Status Deliver(std::byte* to, const std::byte* from, size_t bytes) override {
    LOGITD_RETURN_IF_ERROR(Enter(kDownloading));
    LOGITD_RETURN_IF_ERROR(MarkCopy());
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
    const auto& [logits, rows, max_k, indices, probs, logsumexp, status] = args;
    return RunSmall("softmax_topk", &cuda::SoftmaxTopK, args, logits,
                    std::make_tuple(rows, max_k, indices, probs, logsumexp, status));
  }
  absl::Status Sample(const SampleArgs& args) override {
    const auto& [logits, rows, history, bias, extra_ids, mask_words, edited, tokens, logprobs,
                 ranks, logsumexp, top_ids, top_logprobs, extra_logprobs, status] = args;
    return RunSmall(
        "sample", &cuda::Sample, args, logits,
        std::make_tuple(rows, history, bias, extra_ids, mask_words, edited, tokens, logprobs, ranks,
                        logsumexp, top_ids, top_logprobs, extra_logprobs, status));
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
  absl::Status CrossEntropyTraining(const CrossEntropyTrainingArgs& args) override {
    return Run("cross_entropy_training", &cuda::CrossEntropyTraining, args);
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
  absl::Status LinearCrossEntropyBackwardPartial(
      const LinearCrossEntropyBackwardPartialArgs& args) override {
    return RunLinear("linear_cross_entropy_backward on a shard",
                     &cuda::LinearCrossEntropyBackwardPartial, args, cuda::LinearOp::kGradients,
                     args.gradient.head);
  }
  absl::Status LinearCrossEntropyBackwardMerge(
      const LinearCrossEntropyBackwardMergeArgs& args) override {
    LOGITD_RETURN_IF_ERROR(Enter(kComputing));
    return ToStatus(cuda::LinearCrossEntropyBackwardMerge(args, stream_),
                    "linear_cross_entropy_backward on shards");
  }

  absl::StatusOr<StreamTimes> Wait() override {
    const absl::Status entered =
        small_.op != nullptr && small_.download.rows > 0 ? RunDeferred() : Enter(kDone);
    const bool by_marks = std::exchange(by_marks_, false);
    phase_ = kIdle;  // the next work starts again, also after an error
    uploads_.clear();
    gathers_ = false;
    small_ = {};
    if (!entered.ok()) {  // a part of the work may run
      if (!Settle()) return StillRuns();
      if (by_marks) ends_ = marks_->done;
      return entered;
    }
    // A decode batch takes tens of microseconds, and so does the wake-up of a blocked thread: poll
    // first.
    const absl::Time poll_until = absl::Now() + kPollFor;
    cudaError_t state = cudaErrorNotReady;
    if (by_marks) {
      // Nobody writes the mark of work that failed.
      absl::Time look = absl::Now() + kLookForErrors;
      while (!IsMarked()) {
        const absl::Time now = absl::Now();
        if (now < look) continue;
        look = now + kLookForErrors;
        state = cudaStreamQuery(stream_);
        if (state != cudaErrorNotReady || now >= poll_until) break;
      }
      if (IsMarked()) return TimesOfMarks();
    } else {
      while ((state = cudaEventQuery(events_[kDone])) == cudaErrorNotReady &&
             absl::Now() < poll_until) {
      }
    }
    if (state == cudaErrorNotReady) state = Block();
    if (state == cudaErrorNotReady) return StillRuns();
    LOGITD_RETURN_IF_ERROR(ToStatus(state, "batch"));
    if (by_marks) {
      ends_ = marks_->done;  // a launch that failed has not marked it
      return TimesOfMarks();
    }
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
  static constexpr absl::Duration kLookForErrors = absl::Microseconds(50);
  static constexpr size_t kKernelGatherBytes = size_t{1} << 20;
  // Work is small, and may be a graph, with up to so many copies and rows.
  static constexpr size_t kMostSmallCopies = 4;
  static constexpr int64_t kFewRows = 8;

  explicit CudaStream(int device) : device_(device) {}

  absl::Status StillRuns() const {
    return absl::DeadlineExceededError(
        absl::StrFormat("CUDA: a batch has not ended after %s", absl::FormatDuration(wait_limit_)));
  }

  // Waits until the stream has nothing to do, or has failed. False: the limit has passed.
  bool Settle() {
    if (wait_limit_ == absl::InfiniteDuration()) {
      cudaStreamSynchronize(stream_);
      return true;
    }
    cuda::Patience patience(wait_limit_);
    while (cudaStreamQuery(stream_) == cudaErrorNotReady) {
      if (!patience.Sleep()) return false;
    }
    return true;
  }

  // Waits for the stream's end. cudaErrorNotReady: the limit has passed.
  cudaError_t Block() {
    cudaError_t state = cudaEventRecord(blocking_, stream_);
    if (state != cudaSuccess) return state;
    if (wait_limit_ == absl::InfiniteDuration()) return cudaEventSynchronize(blocking_);
    cuda::Patience patience(wait_limit_);
    while ((state = cudaEventQuery(blocking_)) == cudaErrorNotReady && patience.Sleep()) {
    }
    return state;
  }

  absl::Status Init(const cudaDeviceProp& properties, StreamUse use) {
    LOGITD_RETURN_IF_ERROR(ToStatus(cudaSetDevice(device_), "select device"));
    LOGITD_RETURN_IF_ERROR(
        ToStatus(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "create stream"));
    for (cudaEvent_t& event : events_) {
      LOGITD_RETURN_IF_ERROR(ToStatus(cudaEventCreate(&event), "create event"));
    }
    LOGITD_RETURN_IF_ERROR(ToStatus(
        cudaEventCreateWithFlags(&blocking_, cudaEventBlockingSync | cudaEventDisableTiming),
        "create event"));
    if (use == StreamUse::kCopies) return absl::OkStatus();
    LOGITD_RETURN_IF_ERROR(
        ToStatus(cudaHostAlloc(&marks_, sizeof(*marks_), cudaHostAllocPortable), "allocate marks"));
    *marks_ = cuda::HostMarks{};
    LOGITD_RETURN_IF_ERROR(
        ToStatus(cudaMalloc(&device_marks_, sizeof(*device_marks_)), "allocate marks"));
    LOGITD_RETURN_IF_ERROR(ToStatus(
        cudaMemsetAsync(device_marks_, 0, sizeof(*device_marks_), stream_), "clear marks"));
    replays_ = std::make_unique<cuda::Replays>(stream_);
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

  // Work that is enqueued as a whole: uploads_, an op, a download. Until then nothing of it is.
  struct Small {
    std::string_view name;  // of the op
    absl::AnyInvocable<cudaError_t()> op;
    RowsCopy download = {};  // no rows: none
  };

  // Enqueues an op, or keeps it for RunDeferred. `arguments`: those beside the logits.
  template <class Op, class Args, class Arguments>
  absl::Status RunSmall(std::string_view name, Op op, const Args& args, const TensorView& logits,
                        const Arguments& arguments) {
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
  void AppendToKey(const Values&... values) {
    const auto append = [this](const auto& value) {
      static_assert(std::is_scalar_v<std::decay_t<decltype(value)>>);  // no padding
      small_key_.append(reinterpret_cast<const char*>(&value), sizeof(value));
    };
    (append(values), ...);
  }

  // Enqueues what was kept, as a graph where it was the same before.
  absl::Status RunDeferred() {
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

  cudaError_t EnqueueDeferred() {
    cudaError_t error = cuda::GatherRows(
        uploads_, stream_,
        {.host = marks_, .device = device_marks_, .upload_begins = true, .upload_ends = true});
    if (error == cudaSuccess) error = small_.op();
    if (error != cudaSuccess) return error;
    return cuda::GatherRows(
        {&small_.download, 1}, stream_,
        {.host = marks_, .device = device_marks_, .download_begins = true, .download_ends = true});
  }

  // Enqueues what was kept, because other work follows it.
  absl::Status UndoDefer() {
    Small small = std::exchange(small_, {});
    LOGITD_RETURN_IF_ERROR(Enter(kComputing));
    LOGITD_RETURN_IF_ERROR(ToStatus(small.op(), small.name));
    if (small.download.rows == 0) return absl::OkStatus();
    LOGITD_RETURN_IF_ERROR(Enter(kDownloading));
    return ToStatus(cuda::GatherRows({&small.download, 1}, stream_, MarkDownload()), "download");
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
  // The same to the device.
  bool KernelUploads(const std::byte* to, const std::byte* from, size_t bytes) const {
    if (marks_ == nullptr) return KernelCopies(to, from, bytes);
    const auto odd = reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from) | bytes;
    return bytes > 0 && bytes <= kKernelGatherBytes && odd % 2 == 0;
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

  // Whether one launch does all of the copies: rows of the device, and so few bytes of the host that a
  // copy engine would take longer to begin.
  static bool KernelGathers(absl::Span<const RowsCopy> copies) {
    size_t host_bytes = 0;
    for (const RowsCopy& copy : copies) {
      if (copy.from_device) continue;
      host_bytes += copy.row_bytes * static_cast<size_t>(copy.rows);
      const auto odd = reinterpret_cast<uintptr_t>(copy.from) |
                       reinterpret_cast<uintptr_t>(copy.to) | copy.from_stride | copy.to_stride |
                       copy.row_bytes;
      if (host_bytes > kKernelGatherBytes || odd % 2 != 0) return false;
    }
    return true;
  }

  // Whether the copies write to places of their own, so that one launch may do both.
  static bool AreApart(const RowsCopy& a, const RowsCopy& b) {
    const auto end = [](const RowsCopy& copy) {
      return copy.to + static_cast<size_t>(copy.rows - 1) * copy.to_stride + copy.row_bytes;
    };
    return end(a) <= b.to || end(b) <= a.to;
  }

  // Whether the copy may share a launch with those that are kept.
  bool IsApart(const RowsCopy& copy) const {
    return std::all_of(uploads_.begin(), uploads_.end(),
                       [&copy](const RowsCopy& kept) { return AreApart(copy, kept); });
  }

  // Before a copy that is enqueued at once. Work that was asked for before it comes before it: an op,
  // and copies to the same place. After an op, the time of a copy counts as the op's.
  absl::Status EnterUpload(const RowsCopy& copy) {
    LOGITD_RETURN_IF_ERROR(Enter(kUploading));
    if (!IsApart(copy)) LOGITD_RETURN_IF_ERROR(FlushUploads());
    if (phase_ == kUploading) upload_marked_ = false;
    return absl::OkStatus();
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

  // Small uploads that no Gather took.
  absl::Status FlushUploads() {
    if (uploads_.empty()) return absl::OkStatus();
    if (by_marks_) return GatherUploads();
    cudaError_t error = cudaSuccess;
    for (const RowsCopy& upload : uploads_) {
      const cudaError_t next = cudaMemcpyAsync(upload.to, upload.from, upload.row_bytes,
                                               cudaMemcpyHostToDevice, stream_);
      if (error == cudaSuccess) error = next;
    }
    uploads_.clear();
    return ToStatus(error, "upload");
  }

  // One launch for all of them.
  absl::Status GatherUploads() {
    cuda::Marks marks;
    if (by_marks_ && phase_ <= kUploading) {
      marks = {.host = marks_,
               .device = device_marks_,
               .upload_begins = !upload_begun_,
               .upload_ends = true};
      upload_begun_ = upload_marked_ = true;
    }
    const cudaError_t error = cuda::GatherRows(uploads_, stream_, marks);
    uploads_.clear();
    gathers_ = false;
    return ToStatus(error, "gather");
  }

  // Work whose upload is kernels only is timed by marks that those kernels write, and its end is a
  // mark too. Four events would cost it 10 us: they are calls of the driver, and the device ends
  // one kernel before it takes an event and begins the next.
  void BeginByMarks() {
    if (marks_ == nullptr) return;
    by_marks_ = true;
    upload_begun_ = upload_marked_ = download_begun_ = download_marked_ = false;
  }

  // For a download by a kernel. Without marks: none.
  cuda::Marks MarkDownload() {
    if (!by_marks_) return {};
    download_marked_ = true;
    ++ends_;
    return {.host = marks_,
            .device = device_marks_,
            .download_begins = !std::exchange(download_begun_, true),
            .download_ends = true};
  }

  // Before a download by a copy engine.
  absl::Status MarkCopy() {
    if (!by_marks_) return absl::OkStatus();
    download_marked_ = false;
    if (std::exchange(download_begun_, true)) return absl::OkStatus();
    return ToStatus(
        cuda::Mark({.host = marks_, .device = device_marks_, .download_begins = true}, stream_),
        "mark");
  }

  // The marks of phases that have ended without them.
  absl::Status MarkUpTo(Phase phase) {
    if (phase > kUploading && !std::exchange(upload_marked_, true)) {
      LOGITD_RETURN_IF_ERROR(ToStatus(
          cuda::Mark({.host = marks_, .device = device_marks_, .upload_ends = true}, stream_),
          "mark"));
    }
    if (phase < kDone || download_marked_) return absl::OkStatus();
    return ToStatus(cuda::Mark(MarkDownload(), stream_), "mark");
  }

  bool IsMarked() const { return __atomic_load_n(&marks_->done, __ATOMIC_ACQUIRE) == ends_; }

  StreamTimes TimesOfMarks() const {
    const auto between = [](uint64_t begin, uint64_t end) {
      return std::max<int64_t>(0, static_cast<int64_t>(end - begin));
    };
    return {.h2d_ns = between(marks_->uploading_ns, marks_->computing_ns),
            .kernel_ns = between(marks_->computing_ns, marks_->downloading_ns),
            .d2h_ns = between(marks_->downloading_ns, marks_->done_ns)};
  }

  // Records the events of every phase up to `phase` that has not begun yet. The device is set each
  // time: the thread may have used another device's stream in between.
  absl::Status Enter(Phase phase) {
    LOGITD_RETURN_IF_ERROR(ToStatus(cudaSetDevice(device_), "select device"));
    if (small_.op != nullptr) LOGITD_RETURN_IF_ERROR(UndoDefer());
    const bool flush = phase > kUploading || gathers_;
    if (phase_ == kIdle && flush && !uploads_.empty()) BeginByMarks();
    if (by_marks_) {
      if (phase < phase_) download_marked_ = false;  // the end comes after it
      if (flush) LOGITD_RETURN_IF_ERROR(FlushUploads());
      LOGITD_RETURN_IF_ERROR(MarkUpTo(phase));
      phase_ = std::max(phase_, phase);
      return absl::OkStatus();
    }
    while (phase_ < phase) {
      if (phase_ == kUploading) LOGITD_RETURN_IF_ERROR(FlushUploads());
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
  // Recorded only where a thread blocks: each end of such an event wakes a thread of the driver, which
  // takes 20 us of a core.
  cudaEvent_t blocking_ = nullptr;
  Phase phase_ = kIdle;
  std::vector<RowsCopy> uploads_;     // small ones, not enqueued yet
  cuda::HostMarks* marks_ = nullptr;  // null: the stream only copies
  cuda::DeviceMarks* device_marks_ = nullptr;
  absl::Duration wait_limit_ = absl::InfiniteDuration();
  uint32_t ends_ = 0;      // the last value of cuda::HostMarks::done that was asked for
  bool gathers_ = false;   // uploads_ has copies of a Gather
  Small small_;            // without an op: nothing is kept
  std::string small_key_;  // all that small_.op depends on
  std::unique_ptr<cuda::Replays> replays_;
  // How the work since the last Wait is timed: by marks or by events; which marks were asked for.
  bool by_marks_ = false;
  bool upload_begun_ = false;
  bool upload_marked_ = false;
  bool download_begun_ = false;
  bool download_marked_ = false;
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
    LOGITD_RETURN_IF_ERROR(RefuseIfHung());
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
    if (cuda::IsHung(device_)) return;
    cudaSetDevice(device_);
    if (slab.host != nullptr) cudaFreeHost(slab.host);
    if (slab.device != nullptr) cudaFree(slab.device);
  }

  absl::StatusOr<DeviceMemory> AllocateDevice(size_t bytes) override {
    LOGITD_RETURN_IF_ERROR(RefuseIfHung());
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
    if (cuda::IsHung(device_)) return;
    cudaSetDevice(device_);
    cudaFree(memory.data);
  }

  absl::StatusOr<std::unique_ptr<Stream>> CreateStream(StreamUse use) override {
    LOGITD_RETURN_IF_ERROR(RefuseIfHung());
    return CudaStream::Create(device_, properties_, use);
  }

  absl::StatusOr<SharedDeviceMemory> AllocateShared(size_t bytes) override {
    LOGITD_RETURN_IF_ERROR(RefuseIfHung());
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
    if (cuda::IsHung(device_)) return;
    cudaSetDevice(device_);
    cuda::FreeShared(memory);
  }

  absl::Status WriteShared(std::byte* to, absl::Span<const std::byte> from) override {
    return OnOwnStream([&](cudaStream_t stream) {
      cudaError_t error = cudaSuccess;
      while (!from.empty() && error == cudaSuccess) {
        const size_t now = std::min(from.size(), LeftOfPiece(from.data()));
        error = cudaMemcpyAsync(to, from.data(), now, cudaMemcpyHostToDevice, stream);
        to += now;
        from.remove_prefix(now);
      }
      return error;
    });
  }

  absl::Status PinHost(std::byte* data, size_t bytes) override {
    LOGITD_RETURN_IF_ERROR(RefuseIfHung());
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
    if (cuda::IsHung(device_)) return;  // the driver may wait for the device
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

  absl::Status RefuseIfHung() const {
    if (!cuda::IsHung(device_)) return absl::OkStatus();
    return absl::UnavailableError(absl::StrFormat("CUDA: device %d hangs", device_));
  }

  // What the driver hands out again may hold what another client wrote.
  absl::Status Clear(const SharedDeviceMemory& memory) {
    return OnOwnStream(
        [&](cudaStream_t stream) { return cudaMemsetAsync(memory.data, 0, memory.bytes, stream); });
  }

  // Enqueues on a stream of its own, and waits.
  template <class Enqueue>
  absl::Status OnOwnStream(const Enqueue& enqueue) {
    LOGITD_RETURN_IF_ERROR(RefuseIfHung());
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
namespace {

constexpr int kMostDevices = 64;
std::array<std::atomic<bool>, kMostDevices> hung;

}  // namespace

void SetHung(int device) {
  if (device < kMostDevices) hung[static_cast<size_t>(device)] = true;
}
bool IsHung(int device) { return device < kMostDevices && hung[static_cast<size_t>(device)]; }

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
