#include "server/rpc/heads_service.h"

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <optional>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "server/rpc/raw_unary.h"

namespace logitd::rpc {
namespace {

constexpr size_t kMaxWaitingLoads = 64;
constexpr absl::Duration kProgressEvery = absl::Milliseconds(100);
constexpr char kDraining[] = "the server is draining";

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

bool IsIn(const std::filesystem::path& path, const std::filesystem::path& root) {
  return std::mismatch(root.begin(), root.end(), path.begin(), path.end()).first == root.end();
}

// `path` in `root`, without links in it. The files inside a folder are not looked at: there may be
// links among them, as in Hugging Face's own cache.
absl::StatusOr<std::string> Resolve(const std::string& root, const std::string& path) {
  if (root.empty()) {
    return absl::FailedPreconditionError(
        "heads are not loaded by clients: the server was started without --head-root DIR");
  }
  const absl::Status outside = absl::PermissionDeniedError(
      absl::StrFormat("path: got \"%s\", allowed: a file or folder in the server's --head-root",
                      path.substr(0, 1024)));
  // By its letters first, so that a path outside does not tell what there is.
  const std::filesystem::path asked = (std::filesystem::path(root) / path).lexically_normal();
  if (path.empty() || path.find('\0') != std::string::npos || !IsIn(asked, root)) return outside;
  std::error_code error;
  const std::filesystem::path real = std::filesystem::canonical(asked, error);
  if (error == std::errc::permission_denied) {
    return absl::PermissionDeniedError(absl::StrFormat("%s: %s", path, error.message()));
  }
  if (error) return absl::NotFoundError(absl::StrFormat("%s: %s", path, error.message()));
  if (!IsIn(real, root)) return outside;
  return real.string();
}

void Finish(grpc::ServerUnaryReactor* reactor, const absl::Status& status) {
  reactor->Finish(ToGrpc(status));
}

}  // namespace

// One call of Load. Report and End come from the service's thread; the rest from gRPC's.
class LoadCall final : public grpc::ServerWriteReactor<v1::LoadHeadResponse> {
 public:
  explicit LoadCall(const v1::LoadHeadRequest& request) : request_(request) {}

  // Keeps the call until the transport is done with it.
  void Own(std::shared_ptr<LoadCall> self) { self_ = std::move(self); }

  const v1::LoadHeadRequest& request() const { return request_; }
  bool gone() const { return gone_; }

  // Left out where the last one is not on its way yet, or it is too soon.
  void Report(const engine::HeadProgress& progress) {
    const absl::Time now = absl::Now();
    {
      absl::MutexLock lock(&mutex_);
      if (writing_ || now < next_report_) return;
      writing_ = true;
    }
    next_report_ = now + kProgressEvery;
    message_.set_done_bytes(progress.done_bytes);
    message_.set_total_bytes(progress.total_bytes);
    StartWrite(&message_);
  }

  // `head` where the status is OK.
  void End(const absl::Status& status, v1::Head head) {
    last_.set_done_bytes(total_bytes_);
    last_.set_total_bytes(total_bytes_);
    *last_.mutable_head() = std::move(head);
    {
      absl::MutexLock lock(&mutex_);
      status_ = status;
      if (writing_) return;
    }
    FinishNow();
  }

  void set_total_bytes(int64_t bytes) { total_bytes_ = bytes; }

 private:
  void OnWriteDone(bool) override {
    {
      absl::MutexLock lock(&mutex_);
      writing_ = false;
      if (!status_.has_value()) return;
    }
    FinishNow();
  }
  void OnCancel() override { gone_ = true; }
  void OnDone() override { self_.reset(); }

  // Once: by End, or by OnWriteDone where a message was on its way.
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

  const v1::LoadHeadRequest request_;
  std::shared_ptr<LoadCall> self_;
  std::atomic<bool> gone_ = false;
  absl::Time next_report_ = absl::InfinitePast();
  int64_t total_bytes_ = 0;
  v1::LoadHeadResponse message_;  // on its way while writing_
  v1::LoadHeadResponse last_;
  absl::Mutex mutex_;
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  std::optional<absl::Status> status_ ABSL_GUARDED_BY(mutex_);  // ended
};

HeadsService::HeadsService(std::string root, const engine::Admission* admission,
                           engine::Heads* heads)
    : root_(std::move(root)),
      admission_(admission),
      heads_(heads),
      thread_([this] { RunLoads(); }) {}

HeadsService::~HeadsService() {
  {
    absl::MutexLock lock(&mutex_);
    ending_ = true;
  }
  thread_.join();
}

grpc::ServerWriteReactor<v1::LoadHeadResponse>* HeadsService::Load(
    grpc::CallbackServerContext*, const v1::LoadHeadRequest* request) {
  auto call = std::make_shared<LoadCall>(*request);
  call->Own(call);
  if (absl::Status status = Enqueue(call); !status.ok()) call->End(status, {});
  return call.get();
}

absl::Status HeadsService::Enqueue(const std::shared_ptr<LoadCall>& call) {
  if (admission_->draining()) return absl::UnavailableError(kDraining);
  absl::MutexLock lock(&mutex_);
  if (loads_.size() >= kMaxWaitingLoads) {
    return absl::ResourceExhaustedError(
        absl::StrFormat("%d loads wait already; allowed: %d", loads_.size(), kMaxWaitingLoads));
  }
  loads_.push_back(call);
  return absl::OkStatus();
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
    }
    Run(*call);
  }
}

void HeadsService::Run(LoadCall& call) {
  const v1::LoadHeadRequest& request = call.request();
  const auto wanted = [&] { return !call.gone() && !admission_->draining(); };
  absl::StatusOr<std::shared_ptr<const engine::Head>> head = absl::CancelledError();
  if (absl::StatusOr<std::string> path = Resolve(root_, request.path()); !path.ok()) {
    head = path.status();
  } else if (wanted()) {
    head = heads_->Load({.name = request.name(),
                         .path = *std::move(path),
                         .final_norm = request.final_norm(),
                         .vocab = request.vocab()},
                        [&](const engine::HeadProgress& progress) {
                          call.set_total_bytes(progress.total_bytes);
                          call.Report(progress);
                          return wanted();
                        });
  }
  if (absl::IsCancelled(head.status()) && admission_->draining()) {
    head = absl::UnavailableError(kDraining);
  }
  call.End(head.status(), head.ok() ? Describe(**head) : v1::Head());
}

grpc::ServerUnaryReactor* HeadsService::Unload(grpc::CallbackServerContext* context,
                                               const v1::UnloadHeadRequest* request,
                                               v1::UnloadHeadResponse*) {
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  Finish(reactor, admission_->draining() ? absl::UnavailableError(kDraining)
                                         : heads_->Unload(request->name()));
  return reactor;
}

grpc::ServerUnaryReactor* HeadsService::List(grpc::CallbackServerContext* context,
                                             const v1::ListHeadsRequest*,
                                             v1::ListHeadsResponse* response) {
  for (const auto& head : heads_->List()) *response->add_heads() = Describe(*head);
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  Finish(reactor, absl::OkStatus());
  return reactor;
}

grpc::ServerUnaryReactor* HeadsService::Get(grpc::CallbackServerContext* context,
                                            const v1::GetHeadRequest* request,
                                            v1::GetHeadResponse* response) {
  const auto head = heads_->Find(request->name());
  if (head.ok()) *response->mutable_head() = Describe(**head);
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  Finish(reactor, head.status());
  return reactor;
}

v1::Head HeadsService::Describe(const engine::Head& head) const {
  const HeadView& view = head.view();
  const engine::HeadInfo& info = head.info();
  v1::Head out;
  out.set_name(info.name);
  out.set_path(!root_.empty() && IsIn(info.path, root_)
                   ? std::filesystem::path(info.path).lexically_relative(root_).string()
                   : info.path);
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
  return out;
}

}  // namespace logitd::rpc
