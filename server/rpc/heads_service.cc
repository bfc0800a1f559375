#include "server/rpc/heads_service.h"

#include <algorithm>
#include <atomic>
#include <optional>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/time.h"
#include "kernels/status_macros.h"
#include "server/base/clock.h"
#include "server/engine/devices.h"

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
  out.set_head_version(info.version);
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

constexpr PlainMethod kLoad = {
    .path = "/logitd.v1.Heads/Load", .role = door::Role::kHeads, .counts = true};
constexpr PlainMethod kUnload = {.path = "/logitd.v1.Heads/Unload", .role = door::Role::kHeads};
constexpr PlainMethod kList = {.path = "/logitd.v1.Heads/List"};
constexpr PlainMethod kGet = {.path = "/logitd.v1.Heads/Get"};

}  // namespace

// One call of Load. The end of the load, a cancel or a drain ends it, whichever comes first.
// Report, Conclude and ended are for the thread of the loads, the rest for the call's loop.
class LoadCall final : public PlainCall {
 public:
  LoadCall(http2::Stream* stream, const CallEnvironment& environment, HeadsService* service)
      : PlainCall(stream, environment, kLoad), service_(service) {}

  const v1::LoadHeadRequest& request() const { return request_; }
  bool ended() const { return ended_; }

  // Sends a progress message, unless the last one is too recent or is still being sent.
  void Report(const engine::HeadProgress& progress) {
    const absl::Time now = SteadyNow();
    if (now < next_report_ || sending_) return;
    next_report_ = now + kProgressEvery;
    sending_ = true;
    v1::LoadHeadResponse message;
    message.set_done_bytes(progress.done_bytes);
    message.set_total_bytes(progress.total_bytes);
    OnLoop([this, message] { Send(message); });
  }

  // `last` is sent if the status is OK.
  void Conclude(const absl::Status& status, const v1::LoadHeadResponse& last = {}) {
    OnLoop([this, status = Bounded(status), last] { Answer(status, last); });
  }

  void OnDrain(absl::Duration) override { Leave(engine::DrainingError()); }

 private:
  void OnRequest(std::string_view message) override {
    absl::Status status = Parse(message, &request_);
    if (status.ok()) {
      status = service_->Enqueue(std::static_pointer_cast<LoadCall>(shared_from_this()));
    }
    if (!status.ok()) Conclude(status);
  }
  void OnWritten() override { sending_ = false; }
  void OnGone() override { Leave(absl::CancelledError("call cancelled")); }

  void Leave(const absl::Status& why) {
    ended_ = true;
    if (!over()) End(why);
    service_->LeaveLine(*this);
  }

  HeadsService* const service_;
  v1::LoadHeadRequest request_;
  absl::Time next_report_ = absl::InfinitePast();
  std::atomic<bool> sending_ = false;
  std::atomic<bool> ended_ = false;
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

void HeadsService::Register(Registry* registry) {
  registry->Add(std::string(kLoad.path), [this](http2::Stream* stream) {
    return std::make_shared<LoadCall>(stream, environment_, this);
  });
  AddUnary<v1::UnloadHeadRequest, v1::UnloadHeadResponse>(
      kUnload, environment_, registry, [this](const auto& request, auto* /*answer*/) {
        LOGITD_RETURN_IF_ERROR(CheckMayChange());
        return Bounded(environment_.heads->Unload(request.name()));
      });
  AddUnary<v1::ListHeadsRequest, v1::ListHeadsResponse>(
      kList, environment_, registry, [this](const auto& /*request*/, auto* answer) {
        for (const auto& head : environment_.heads->List()) *answer->add_heads() = Describe(*head);
        return absl::OkStatus();
      });
  AddUnary<v1::GetHeadRequest, v1::GetHeadResponse>(
      kGet, environment_, registry, [this](const auto& request, auto* answer) {
        const auto head = environment_.heads->Find(request.name());
        if (head.ok()) *answer->mutable_head() = Describe(**head);
        return Bounded(head.status());
      });
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
  LOGITD_RETURN_IF_ERROR(CheckMayChange());
  LOGITD_RETURN_IF_ERROR(environment_.heads->Check(RequestOf(*call)));
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
  absl::Status status = head.status();
  // A device that is lost while others are left is no reason not to try again.
  if (absl::IsInternal(status) && environment_.engine->devices().left() >= 2) {
    status = absl::UnavailableError(absl::StrCat(status.message(), "; the other devices serve on"));
  }
  call.Conclude(status, last);
  // Last: the engine's owner may end the process in it.
  if (absl::IsInternal(head.status())) environment_.engine->DeviceLost(head.status());
}

}  // namespace logitd::rpc
