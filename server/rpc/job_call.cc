#include "server/rpc/job_call.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "absl/strings/str_format.h"
#include "server/engine/batch.h"

namespace logitd::rpc {
namespace {

int64_t NowNs() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// Slices point into the transport's read buffers; a small message keeps a whole one of them.
constexpr int64_t kReadBufferBytes = 8192;

}  // namespace

JobCall::JobCall(grpc::CallbackServerContext* context, const CallEnvironment& environment,
                 std::unique_ptr<OpCodec> codec)
    : RawUnaryCall(context, environment.tracker),
      environment_(environment),
      codec_(std::move(codec)),
      started_ns_(NowNs()) {}

std::shared_ptr<JobCall> JobCall::Self() {
  return std::static_pointer_cast<JobCall>(shared_from_this());
}

void JobCall::OnHeaders() {
  spec_.deadline = deadline();
  const engine::Admission::WaiterId waiter = environment_.admission->Enter(
      spec_.deadline, [call = Self()](absl::StatusOr<engine::Admission::Ticket> ticket) {
        call->Admitted(std::move(ticket));
      });
  if (waiter == 0) return;
  bool gone = false;
  {
    absl::MutexLock lock(&mutex_);
    waiter_ = waiter;
    gone = gone_;
  }
  if (gone) environment_.admission->Abandon(waiter);
}

void JobCall::Admitted(absl::StatusOr<engine::Admission::Ticket> ticket) {
  if (!ticket.ok()) {
    Finish(ticket.status(), {}, environment_.admission->options().retry_delay);
    return;
  }
  ticket_ = *std::move(ticket);
  Receive();
}

void JobCall::OnMessage(grpc::ByteBuffer* message) {
  receive_ns_ = NowNs() - started_ns_;
  message_.Take(message);
  if (absl::Status status =
          codec_->Parse(message_.pieces(), environment_.engine->options().max_batch_rows, &spec_);
      !status.ok()) {
    environment_.metrics->CountRefused(engine::Refusal::kInvalid);
    Finish(status);
    return;
  }
  if (absl::Status status = CheckFits(); !status.ok()) {
    environment_.metrics->CountRefused(engine::Refusal::kTooLarge);
    Finish(status);
    return;
  }
  // An answer can be larger than its request, and a peer may be slow to take it.
  message_.KeepOnly(codec_->payload().range);
  HoldAtMost(
      std::max(static_cast<int64_t>(message_.bytes()) + kReadBufferBytes + codec_->list_bytes(),
               codec_->answer_bytes()));
  {
    absl::MutexLock lock(&mutex_);
    if (gone_) return;
    submitted_ = true;
  }
  environment_.engine->Submit(Self());
  // OnGone came while Submit ran, and may have asked the engine for a job it did not know yet.
  bool gone = false;
  {
    absl::MutexLock lock(&mutex_);
    gone = gone_;
  }
  if (gone) environment_.engine->Cancel(*this);
}

// A batch may take more than one request, and the transport counts the small fields as well.
absl::Status JobCall::CheckFits() const {
  const int64_t payload_bytes = engine::SizeOfJob(spec_).payload_bytes;
  if (payload_bytes > environment_.max_payload_bytes) {
    return absl::InvalidArgumentError(absl::StrFormat("payload and lists: %d bytes, allowed 1..%d",
                                                      payload_bytes,
                                                      environment_.max_payload_bytes));
  }
  return environment_.engine->CheckFits(spec_);
}

void JobCall::OnGone() {
  engine::Admission::WaiterId waiter = 0;
  bool submitted = false;
  {
    absl::MutexLock lock(&mutex_);
    gone_ = true;
    waiter = waiter_;
    submitted = submitted_;
  }
  if (waiter != 0) environment_.admission->Abandon(waiter);
  if (submitted) environment_.engine->Cancel(*this);
}

void JobCall::OnFinish(absl::StatusCode code) {
  environment_.metrics->CountRequest(codec_->op().name, code,
                                     static_cast<double>(NowNs() - started_ns_) * 1e-9);
}

void JobCall::CopyPayload(std::byte* dst, size_t row_stride) {
  environment_.copier->Copy(message_.pieces(), codec_->payload(), dst, row_stride);
  message_.Release();
  HoldAtMost(std::max(codec_->list_bytes(), codec_->answer_bytes()));
}

void JobCall::WriteInputs(absl::Span<std::byte* const> inputs, const engine::AxisCounts& first) {
  codec_->WriteInputs(inputs, first);
  HoldAtMost(codec_->answer_bytes());
}

void JobCall::Done(const absl::Status& status,
                   absl::Span<const absl::Span<const std::byte>> outputs,
                   const engine::JobTimes& times) {
  if (!status.ok()) {
    Finish(status, {}, environment_.admission->options().retry_delay);
    return;
  }
  {
    absl::MutexLock lock(&mutex_);
    if (gone_) return;  // nobody to encode for
  }
  Finish(status, codec_->Encode(
                     outputs,
                     {.receive_ns = receive_ns_, .total_ns = NowNs() - started_ns_, .job = times}));
}

void JobCall::HoldAtMost(int64_t bytes) {
  if (bytes < ticket_.bytes()) ticket_.ShrinkTo(bytes);
}

}  // namespace logitd::rpc
