#include "server/rpc/heads_service.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "server/engine/devices.h"
#include "server/rpc/transport/call_tracker.h"
#include "server/rpc/transport/message.h"
#include "server/rpc/transport/small_call.h"

namespace logitd::rpc {
namespace {

constexpr size_t kMaxWaitingLoads = 64;
constexpr absl::Duration kProgressEvery = absl::Milliseconds(100);

v1::DType ToProto(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return v1::DTYPE_F32;
    case DType::kF16:
      return v1::DTYPE_F16;
    case DType::kBF16:
      return v1::DTYPE_BF16;
  }
  return v1::DTYPE_UNSPECIFIED;
}

// Cuts the text so that it fits into the transport's trailers.
absl::Status Bounded(const absl::Status& status) {
  constexpr size_t kMost = 2048;
  if (status.message().size() <= kMost) return status;
  return absl::Status(status.code(), absl::StrCat(status.message().substr(0, kMost), "..."));
}

v1::Head Describe(const engine::Head& head) {
  const HeadView& view = head.view();
  const engine::HeadInfo& info = head.info();
  v1::Head out;
  out.set_name(info.name);
  out.set_path(info.path);
  out.set_tensor(info.tensor);
  out.set_dtype(ToProto(view.weight.dtype));
  out.set_vocab(view.vocab());
  out.set_hidden(view.hidden());
  out.set_stored_vocab(info.stored_vocab);
  out.set_bias(view.bias != nullptr);
  out.set_final_norm(view.norm != nullptr);
  out.set_norm_epsilon(view.norm_epsilon);
  out.set_scale(view.scale);
  out.set_softcap(view.softcap);
  out.set_device_bytes(info.device_bytes);
  out.set_loaded_unix_ms(absl::ToUnixMillis(info.loaded));
  out.set_load_ms(absl::ToInt64Milliseconds(info.load_time));
  for (const std::string& warning : info.warnings) out.add_warnings(warning);
  if (!head.sharded()) return out;
  int64_t first_token = 0;
  for (const engine::Head::Copy& part : head.copies()) {
    v1::HeadShard* const shard = out.add_shards();
    shard->set_device(part.backend->device().number);
    shard->set_first_token(first_token);
    shard->set_tokens(part.view.vocab());
    shard->set_device_bytes(static_cast<int64_t>(part.memory.bytes));
    first_token += part.view.vocab();
  }
  return out;
}

}  // namespace

// One call of Load. The end of the load, a cancel or a drain ends it, whichever comes first.
class LoadCall final : public grpc::ServerWriteReactor<grpc::ByteBuffer>, public DrainedCall {
 public:
  LoadCall(HeadsService* service, CallTracker* tracker, SmallCall call, v1::LoadHeadRequest request)
      : service_(service),
        tracker_(tracker),
        call_(std::move(call)),
        request_(std::move(request)) {}

  // Keeps the call until the transport is done with it.
  void Start(const std::shared_ptr<LoadCall>& self) {
    self_ = self;
    tracker_->Add(self);
  }

  const v1::LoadHeadRequest& request() const { return request_; }
  bool ended() const {
    absl::MutexLock lock(&mutex_);
    return status_.has_value();
  }

  // Sends a progress message, unless the last one is still being sent or is too recent. One thread
  // at a time.
  void Report(const engine::HeadProgress& progress) {
    const absl::Time now = absl::Now();
    {
      absl::MutexLock lock(&mutex_);
      if (status_.has_value() || writing_ || now < next_report_) return;
      writing_ = true;
    }
    next_report_ = now + kProgressEvery;
    v1::LoadHeadResponse message;
    message.set_done_bytes(progress.done_bytes);
    message.set_total_bytes(progress.total_bytes);
    message_ = ToBytes(message);
    {
      absl::MutexLock lock(&mutex_);
      sent_bytes_ += static_cast<int64_t>(message_.Length());
    }
    StartWrite(&message_);
  }

  // Only the first End counts. `last` is sent if the status is OK.
  void End(const absl::Status& status, const v1::LoadHeadResponse& last = {}) {
    {
      absl::MutexLock lock(&mutex_);
      if (status_.has_value()) return;
      status_ = Bounded(status);
      last_ = ToBytes(last);
      if (status.ok()) sent_bytes_ += static_cast<int64_t>(last_.Length());
      if (writing_) return;
    }
    FinishNow();
  }

  void OnDrain() override {
    End(engine::DrainingError());
    service_->LeaveLine(*this);
  }

 private:
  void OnWriteDone(bool) override {
    {
      absl::MutexLock lock(&mutex_);
      writing_ = false;
      if (!status_.has_value()) return;
    }
    FinishNow();
  }
  void OnCancel() override {
    End(absl::CancelledError("call cancelled"));
    service_->LeaveLine(*this);
  }
  void OnDone() override {
    {
      absl::MutexLock lock(&mutex_);
      call_.LogStream(status_->code(), sent_bytes_);
    }
    tracker_->Remove(self_);
    self_.reset();  // may delete this
  }

  // Once: from End, or from OnWriteDone if a message was still being sent.
  void FinishNow() {
    absl::Status status;
    {
      absl::MutexLock lock(&mutex_);
      status = *status_;
    }
    if (status.ok()) {
      StartWriteAndFinish(&last_, grpc::WriteOptions(), grpc::Status::OK);
    } else {
      Finish(ToGrpc(status));
    }
  }

  HeadsService* const service_;
  CallTracker* const tracker_;
  const SmallCall call_;
  const v1::LoadHeadRequest request_;
  std::shared_ptr<LoadCall> self_;
  absl::Time next_report_ = absl::InfinitePast();
  grpc::ByteBuffer message_;  // being sent while writing_
  grpc::ByteBuffer last_;
  mutable absl::Mutex mutex_;
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  int64_t sent_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  std::optional<absl::Status> status_ ABSL_GUARDED_BY(mutex_);  // ended
};

HeadsService::HeadsService(std::string root, std::string remote_listen,
                           const CallEnvironment& environment)
    : root_(std::move(root)),
      remote_listen_(std::move(remote_listen)),
      environment_(environment),
      thread_([this] { RunLoads(); }) {}

HeadsService::~HeadsService() {
  {
    absl::MutexLock lock(&mutex_);
    ending_ = true;
  }
  thread_.join();
}

bool HeadsService::loading() const {
  absl::MutexLock lock(&mutex_);
  return running_ != nullptr;
}

grpc::ServerWriteReactor<grpc::ByteBuffer>* HeadsService::Load(grpc::CallbackServerContext* context,
                                                               const grpc::ByteBuffer* request) {
  SmallCall small(context, environment_, "/logitd.v1.Heads/Load", door::Role::kHeads);
  v1::LoadHeadRequest parsed;
  absl::Status status = small.Read(*request, &parsed);
  auto call =
      std::make_shared<LoadCall>(this, environment_.tracker, std::move(small), std::move(parsed));
  call->Start(call);
  if (status.ok()) status = Enqueue(call);
  if (!status.ok()) call->End(status);
  return call.get();
}

engine::HeadRequest HeadsService::RequestOf(const LoadCall& call) const {
  const v1::LoadHeadRequest& request = call.request();
  return {.name = request.name(),
          .path = request.path(),
          .root = root_,
          .final_norm = request.final_norm(),
          .vocab = request.vocab(),
          .shard = request.shard()};
}

absl::Status HeadsService::CheckMayChange() const {
  if (environment_.admission->draining()) return engine::DrainingError();
  if (root_.empty()) {
    return absl::FailedPreconditionError(
        "clients cannot load or unload heads: the server was started without --head-root DIR");
  }
  if (!remote_listen_.empty()) {
    return absl::PermissionDeniedError(absl::StrFormat(
        "clients cannot load or unload heads: the server listens on %s, which is not local, and "
        "was started without --allow-remote-heads",
        remote_listen_));
  }
  return absl::OkStatus();
}

absl::Status HeadsService::Enqueue(const std::shared_ptr<LoadCall>& call) {
  if (absl::Status status = CheckMayChange(); !status.ok()) return status;
  if (absl::Status status = environment_.heads->Check(RequestOf(*call)); !status.ok()) {
    return status;
  }
  const std::string& name = call->request().name();
  absl::MutexLock lock(&mutex_);
  const auto same = [&](const auto& other) { return other->request().name() == name; };
  if ((running_ != nullptr && same(running_)) || std::any_of(loads_.begin(), loads_.end(), same)) {
    return absl::AlreadyExistsError(
        absl::StrFormat("head %s is being loaded, allowed another name", name));
  }
  if (loads_.size() >= kMaxWaitingLoads) {
    return absl::ResourceExhaustedError(absl::StrFormat("waiting loads: got %d already, allowed %d",
                                                        loads_.size(), kMaxWaitingLoads));
  }
  if (running_ != nullptr || !loads_.empty()) call->Report({});
  loads_.push_back(call);
  return absl::OkStatus();
}

void HeadsService::LeaveLine(const LoadCall& call) {
  std::shared_ptr<LoadCall> left;  // freed without the lock
  absl::MutexLock lock(&mutex_);
  const auto it = std::find_if(loads_.begin(), loads_.end(),
                               [&](const auto& waiting) { return waiting.get() == &call; });
  if (it == loads_.end()) return;
  left = std::move(*it);
  loads_.erase(it);
}

void HeadsService::RunLoads() {
  while (true) {
    std::shared_ptr<LoadCall> call;
    {
      absl::MutexLock lock(&mutex_);
      const auto something = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
        return ending_ || !loads_.empty();
      };
      mutex_.Await(absl::Condition(&something));
      if (loads_.empty()) return;
      call = std::move(loads_.front());
      loads_.pop_front();
      if (call->ended()) continue;
      running_ = call;
    }
    Run(*call);
  }
}

// A device that is lost while others are left is no reason not to try again.
absl::Status HeadsService::StatusOf(const absl::Status& load) const {
  if (!absl::IsInternal(load) || environment_.engine->devices().left() < 2) return load;
  return absl::UnavailableError(absl::StrCat(load.message(), "; the other devices serve on"));
}

void HeadsService::Run(LoadCall& call) {
  v1::LoadHeadResponse last;
  const auto head =
      environment_.heads->Load(RequestOf(call), [&](const engine::HeadProgress& progress) {
        last.set_done_bytes(progress.done_bytes);
        last.set_total_bytes(progress.total_bytes);
        call.Report(progress);
        return !call.ended();
      });
  if (head.ok()) *last.mutable_head() = Describe(**head);
  {
    // Before the caller gets its answer: it may load the same name again at once.
    absl::MutexLock lock(&mutex_);
    running_ = nullptr;
  }
  call.End(StatusOf(head.status()), last);
  // Last: the engine's owner may end the process in it.
  if (absl::IsInternal(head.status())) environment_.engine->DeviceLost(head.status());
}

grpc::ServerUnaryReactor* HeadsService::Unload(grpc::CallbackServerContext* context,
                                               const grpc::ByteBuffer* request,
                                               grpc::ByteBuffer* response) {
  SmallCall call(context, environment_, "/logitd.v1.Heads/Unload", door::Role::kHeads);
  v1::UnloadHeadRequest parsed;
  absl::Status status = call.Read(*request, &parsed);
  if (status.ok()) status = CheckMayChange();
  if (status.ok()) status = environment_.heads->Unload(parsed.name());
  return call.Answer(status, v1::UnloadHeadResponse(), response);
}

grpc::ServerUnaryReactor* HeadsService::List(grpc::CallbackServerContext* context,
                                             const grpc::ByteBuffer* request,
                                             grpc::ByteBuffer* response) {
  SmallCall call(context, environment_, "/logitd.v1.Heads/List");
  v1::ListHeadsRequest parsed;
  v1::ListHeadsResponse answer;
  absl::Status status = call.Read(*request, &parsed);
  if (status.ok()) {
    for (const auto& head : environment_.heads->List()) *answer.add_heads() = Describe(*head);
  }
  return call.Answer(status, answer, response);
}

grpc::ServerUnaryReactor* HeadsService::Get(grpc::CallbackServerContext* context,
                                            const grpc::ByteBuffer* request,
                                            grpc::ByteBuffer* response) {
  SmallCall call(context, environment_, "/logitd.v1.Heads/Get");
  v1::GetHeadRequest parsed;
  v1::GetHeadResponse answer;
  absl::Status status = call.Read(*request, &parsed);
  if (status.ok()) {
    const auto head = environment_.heads->Find(parsed.name());
    if (head.ok()) *answer.mutable_head() = Describe(**head);
    status = head.status();
  }
  return call.Answer(status, answer, response);
}

}  // namespace logitd::rpc
