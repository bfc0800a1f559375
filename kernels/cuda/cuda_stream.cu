// A stream's life, its end (Wait), and its phases.
#include "kernels/cuda/cuda_stream.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "kernels/cuda/patience.h"
#include "kernels/status_macros.h"

namespace logitd::cuda {
namespace {

constexpr absl::Duration kPollFor = absl::Microseconds(200);
constexpr absl::Duration kLookForErrors = absl::Microseconds(50);

__global__ void ProbeKernel() {}

}  // namespace

absl::Status DescribeDevice(const cudaDeviceProp& properties, Scratch& scratch) {
  scratch.multiprocessors = properties.multiProcessorCount;
  scratch.block_shared_bytes = static_cast<int>(properties.sharedMemPerBlockOptin);
  cudaFuncAttributes loaded;
  LOGITD_RETURN_IF_ERROR(ToStatus(cudaFuncGetAttributes(&loaded, ProbeKernel), "probe kernels"));
  // The device must allow it, and so must the code that was loaded for it: that may be compiled
  // from code for an older device.
  scratch.clusters = properties.major >= 9 && loaded.ptxVersion >= 90;
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<Stream>> CudaStream::Create(int device,
                                                           const cudaDeviceProp& properties,
                                                           StreamUse use) {
  auto stream = std::unique_ptr<CudaStream>(new CudaStream(device));
  LOGITD_RETURN_IF_ERROR(stream->Init(properties, use));
  return stream;
}

CudaStream::~CudaStream() {
  if (IsHung(device_)) {
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

absl::StatusOr<StreamTimes> CudaStream::Wait() {
  const absl::Status entered =
      small_.op != nullptr && small_.download.rows > 0 ? RunDeferred() : Enter(kDone);
  const bool by_marks = std::exchange(by_marks_, false);
  phase_ = kIdle;  // the next work starts again, also after an error
  DropUploads();
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

absl::Status CudaStream::StillRuns() const {
  return absl::DeadlineExceededError(
      absl::StrFormat("CUDA: a batch has not ended after %s", absl::FormatDuration(wait_limit_)));
}

bool CudaStream::Settle() {
  if (wait_limit_ == absl::InfiniteDuration()) {
    cudaStreamSynchronize(stream_);
    return true;
  }
  Patience patience(wait_limit_);
  while (cudaStreamQuery(stream_) == cudaErrorNotReady) {
    if (!patience.Sleep()) return false;
  }
  return true;
}

cudaError_t CudaStream::Block() {
  cudaError_t state = cudaEventRecord(blocking_, stream_);
  if (state != cudaSuccess) return state;
  if (wait_limit_ == absl::InfiniteDuration()) return cudaEventSynchronize(blocking_);
  Patience patience(wait_limit_);
  while ((state = cudaEventQuery(blocking_)) == cudaErrorNotReady && patience.Sleep()) {
  }
  return state;
}

absl::Status CudaStream::Init(const cudaDeviceProp& properties, StreamUse use) {
  LOGITD_RETURN_IF_ERROR(ToStatus(cudaSetDevice(device_), "select device"));
  LOGITD_RETURN_IF_ERROR(
      ToStatus(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "create stream"));
  for (cudaEvent_t& event : events_) {
    LOGITD_RETURN_IF_ERROR(ToStatus(cudaEventCreate(&event), "create event"));
  }
  LOGITD_RETURN_IF_ERROR(
      ToStatus(cudaEventCreateWithFlags(&blocking_, cudaEventBlockingSync | cudaEventDisableTiming),
               "create event"));
  if (use == StreamUse::kCopies) return absl::OkStatus();
  LOGITD_RETURN_IF_ERROR(
      ToStatus(cudaHostAlloc(&marks_, sizeof(*marks_), cudaHostAllocPortable), "allocate marks"));
  *marks_ = HostMarks{};
  LOGITD_RETURN_IF_ERROR(
      ToStatus(cudaMalloc(&device_marks_, sizeof(*device_marks_)), "allocate marks"));
  LOGITD_RETURN_IF_ERROR(
      ToStatus(cudaMemsetAsync(device_marks_, 0, sizeof(*device_marks_), stream_), "clear marks"));
  replays_ = std::make_unique<Replays>(stream_);
  scratch_.bytes = Scratch::BytesFor(properties.totalGlobalMem);
  LOGITD_RETURN_IF_ERROR(DescribeDevice(properties, scratch_));
  LOGITD_RETURN_IF_ERROR(ToStatus(cudaMalloc(&scratch_.data, scratch_.bytes), "allocate scratch"));
  products_status_.Update(products_.Init(ProductWorkspaceBytes(scratch_)));
  return ToStatus(cudaMemsetAsync(scratch_.data, 0, Scratch::kCounterBytes, stream_),
                  "clear scratch");
}

void CudaStream::BeginByMarks() {
  if (marks_ == nullptr) return;
  by_marks_ = true;
  upload_begun_ = upload_marked_ = download_begun_ = download_marked_ = false;
}

Marks CudaStream::MarkDownload() {
  if (!by_marks_) return {};
  download_marked_ = true;
  ++ends_;
  return {.host = marks_,
          .device = device_marks_,
          .download_begins = !std::exchange(download_begun_, true),
          .download_ends = true};
}

absl::Status CudaStream::MarkCopy() {
  if (!by_marks_) return absl::OkStatus();
  download_marked_ = false;
  if (std::exchange(download_begun_, true)) return absl::OkStatus();
  return ToStatus(Mark({.host = marks_, .device = device_marks_, .download_begins = true}, stream_),
                  "mark");
}

absl::Status CudaStream::MarkUpTo(Phase phase) {
  if (phase > kUploading && !std::exchange(upload_marked_, true)) {
    LOGITD_RETURN_IF_ERROR(ToStatus(
        Mark({.host = marks_, .device = device_marks_, .upload_ends = true}, stream_), "mark"));
  }
  if (phase < kDone || download_marked_) return absl::OkStatus();
  return ToStatus(Mark(MarkDownload(), stream_), "mark");
}

StreamTimes CudaStream::TimesOfMarks() const {
  const auto between = [](uint64_t begin, uint64_t end) {
    return std::max<int64_t>(0, static_cast<int64_t>(end - begin));
  };
  return {.h2d_ns = between(marks_->uploading_ns, marks_->computing_ns),
          .kernel_ns = between(marks_->computing_ns, marks_->downloading_ns),
          .d2h_ns = between(marks_->downloading_ns, marks_->done_ns)};
}

absl::Status CudaStream::Enter(Phase phase) {
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

absl::Status CudaStream::Between(Phase begin, Phase end, int64_t& ns) {
  float ms = 0;
  LOGITD_RETURN_IF_ERROR(
      ToStatus(cudaEventElapsedTime(&ms, events_[begin], events_[end]), "read event"));
  ns = static_cast<int64_t>(static_cast<double>(ms) * 1e6);
  return absl::OkStatus();
}

}  // namespace logitd::cuda
