#include "server/rpc/heads_service.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/time.h"
#include "formats/safetensors.h"
#include "kernels/checks.h"
#include "kernels/status_macros.h"
#include "server/base/clock.h"
#include "server/engine/devices.h"
#include "server/engine/head_update.h"
#include "server/rpc/codecs/dtype.h"

namespace logitd::rpc {
namespace {

constexpr size_t kMaxWaitingLoads = 64;
constexpr absl::Duration kProgressEvery = absl::Milliseconds(100);
// A step of an update by leases ends with the piece that brings it to so many bytes.
constexpr int64_t kStepBytes = int64_t{64} << 20;

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
constexpr PlainMethod kUpdate = {.path = "/logitd.v1.Heads/Update",
                                 .role = door::Role::kHeads,
                                 .client_streams = true,
                                 .counts = true};
constexpr PlainMethod kUnload = {.path = "/logitd.v1.Heads/Unload", .role = door::Role::kHeads};
constexpr PlainMethod kList = {.path = "/logitd.v1.Heads/List"};
constexpr PlainMethod kGet = {.path = "/logitd.v1.Heads/Get"};

absl::Status FromProto(v1::HeadPart wire, engine::HeadPart* part) {
  static_assert(v1::HEAD_PART_WEIGHT == static_cast<int>(engine::HeadPart::kWeight));
  static_assert(v1::HEAD_PART_BIAS == static_cast<int>(engine::HeadPart::kBias));
  static_assert(v1::HEAD_PART_NORM == static_cast<int>(engine::HeadPart::kNorm));
  LOGITD_RETURN_IF_ERROR(CheckRange("rows.part", wire, v1::HEAD_PART_WEIGHT, v1::HEAD_PART_NORM));
  *part = static_cast<engine::HeadPart>(wire);
  return absl::OkStatus();
}

}  // namespace

// A call whose work a thread of the service does. The end of the work, a cancel or a drain ends it,
// whichever comes first. Run, Report, Conclude, ended and why_ended are for that thread, the rest
// for the call's loop.
class ChangeCall : public PlainCall {
 public:
  ChangeCall(http2::Stream* stream, const CallEnvironment& environment, const PlainMethod& method,
             HeadsService* service)
      : PlainCall(stream, environment, method), service_(*service) {}

  virtual const std::string& name() const = 0;
  virtual void Run() = 0;
  virtual void SayThatItWaits() = 0;  // before the thread has it

  void OnDrain(absl::Duration) override { Leave(engine::DrainingError()); }
  void OnIdentities() override {
    const absl::Status status = CheckMayStillCall();
    if (!status.ok() && !over()) Leave(status);
  }

 protected:
  HeadsService& service() { return service_; }
  bool ended() const { return ended_; }
  const absl::Status& why_ended() const { return why_ended_; }  // once it has
  void End(const absl::Status& status) override {
    SetEnded(status);
    PlainCall::End(status);
  }

  // Sends a progress message, unless the last one is too recent or is still being sent.
  template <typename Message>
  void Report(const engine::HeadProgress& progress) {
    const absl::Time now = SteadyNow();
    if (now < next_report_ || sending_) return;
    next_report_ = now + kProgressEvery;
    sending_ = true;
    Message message;
    message.set_done_bytes(progress.done_bytes);
    message.set_total_bytes(progress.total_bytes);
    OnLoop([this, message] { Send(message); });
  }

  // Loads or updates a head from a file: `change` gets what it is to report to.
  template <typename Message, typename Change>
  void ChangeByFile(const Change& change) {
    if (ended()) return;
    Message last;
    const absl::StatusOr<std::shared_ptr<const engine::Head>> head =
        change([&](const engine::HeadProgress& progress) {
          last.set_done_bytes(progress.done_bytes);
          last.set_total_bytes(progress.total_bytes);
          Report<Message>(progress);
          return !ended();
        });
    if (head.ok()) *last.mutable_head() = Describe(**head);
    Conclude(head.status(), last);
  }

  // `last` is sent if the status is OK.
  template <typename Message>
  void Conclude(absl::Status status, const Message& last) {
    // Before the caller gets its answer: it may change the same head again at once.
    service_.StopRunning(*this);
    const absl::Status result = status;
    engine::Engine& engine = *environment().engine;
    // A device that is lost while others are left is no reason not to try again.
    if (absl::IsInternal(status) && engine.devices().left() >= 2) {
      status =
          absl::UnavailableError(absl::StrCat(status.message(), "; the other devices serve on"));
    }
    OnLoop([this, status = Bounded(status), last] { Answer(status, last); });
    // Last: the engine's owner may end the process in it.
    if (absl::IsInternal(result)) engine.DeviceLost(result);
  }

  void Leave(const absl::Status& why) {
    SetEnded(why);
    if (!over()) End(Bounded(why));
    service_.LeaveLine(*this);
    Free();
  }
  virtual void Free() {}  // the work ends, if the thread has none of it now
  void OnWritten() override {
    sending_ = false;
    PlainCall::OnWritten();
  }
  void OnGone(const absl::Status& why) override { Leave(why); }

  std::shared_ptr<ChangeCall> self() {
    return std::static_pointer_cast<ChangeCall>(shared_from_this());
  }

 private:
  friend class HeadsService;

  void SetEnded(const absl::Status& why) {
    if (ended_) return;
    why_ended_ = why;
    ended_ = true;
  }

  HeadsService& service_;
  absl::Time next_report_ = absl::InfinitePast();
  std::atomic<bool> sending_ = false;
  std::atomic<bool> ended_ = false;
  absl::Status why_ended_;  // written before ended_
};

class LoadCall final : public ChangeCall {
 public:
  LoadCall(http2::Stream* stream, const CallEnvironment& environment, HeadsService* service)
      : ChangeCall(stream, environment, kLoad, service) {}

  const std::string& name() const override { return request_.name(); }
  void Run() override {
    ChangeByFile<v1::LoadHeadResponse>(
        [&](auto progress) { return environment().heads->Load(HeadRequest(), progress); });
  }
  void SayThatItWaits() override { Report<v1::LoadHeadResponse>({}); }

 private:
  engine::HeadRequest HeadRequest() {
    return {.name = request_.name(),
            .path = request_.path(),
            .root = service().root_,
            .final_norm = request_.final_norm(),
            .vocab = request_.vocab(),
            .shard = request_.shard()};
  }
  absl::Status Take() {
    LOGITD_RETURN_IF_ERROR(service().CheckMayChange());
    LOGITD_RETURN_IF_ERROR(environment().heads->Check(HeadRequest()));
    return service().EnqueueFile(self());
  }
  void OnRequest(std::string_view message) override {
    absl::Status status = Parse(message, &request_);
    if (status.ok()) status = Take();
    if (!status.ok()) End(Bounded(status));
  }

  v1::LoadHeadRequest request_;
};

// By a file: as a load. By leases: the thread copies a message in steps, and other updates have
// their turn between steps. The next message stays with the peer meanwhile. The half-close is one
// more step. After an answer the next message has message_timeout(), because the update holds the
// memory of a second head.
class UpdateCall final : public ChangeCall {
 public:
  UpdateCall(http2::Stream* stream, const CallEnvironment& environment, HeadsService* service)
      : ChangeCall(stream, environment, kUpdate, service) {}

  const std::string& name() const override { return name_; }
  void Run() override {
    if (!by_file_) return RunStep();
    ChangeByFile<v1::UpdateHeadResponse>(
        [&](auto progress) { return environment().heads->Update(HeadRequest(), progress); });
  }
  void SayThatItWaits() override { Report<v1::UpdateHeadResponse>({}); }

 private:
  engine::HeadRequest HeadRequest() {
    return {.name = name_, .path = request_.path(), .root = service().root_};
  }

  // ---- for the loop
  void OnRequest(std::string_view message) override {
    const bool first = !began_;
    v1::UpdateHeadRequest request;
    absl::Status status = Parse(message, &request);
    if (status.ok()) status = Take(std::move(request));
    if (status.ok()) return;
    if (first) environment().metrics->CountHeadUpdate(status.code(), /*seconds=*/0);
    Leave(status);
  }
  absl::Status Take(v1::UpdateHeadRequest request) {
    const bool first = !began_;
    if (first) {
      LOGITD_RETURN_IF_ERROR(service().CheckMayChange());
      name_ = request.name();
    } else if (!request.name().empty() && request.name() != name_) {
      return absl::InvalidArgumentError(
          absl::StrFormat("name: got %s, allowed %s, as in the first message, or none",
                          formats::Shown(request.name()), name_));
    }
    if (by_file_) {
      return absl::InvalidArgumentError(
          "request: got a second message, allowed none after one with a path");
    }
    const bool has_path = !request.path().empty();
    if (has_path && (!first || request.rows_size() > 0)) {
      return absl::InvalidArgumentError(
          absl::StrFormat("path: got %s, allowed only in the first message, and without rows",
                          formats::Shown(request.path())));
    }
    if (!has_path && request.rows_size() == 0) {
      return absl::InvalidArgumentError("rows: got none, allowed 1 or more, or a path");
    }
    by_file_ = has_path;
    request_ = std::move(request);
    next_piece_ = 0;
    if (by_file_) {
      LOGITD_RETURN_IF_ERROR(environment().heads->CheckUpdate(HeadRequest()));
    }
    began_ = true;
    working_ = true;
    if (!by_file_) {
      service().EnqueueLease(self());
      return absl::OkStatus();
    }
    return service().EnqueueFile(self());
  }
  bool Busy() const override { return working_ && !by_file_; }
  void OnHalfClose() override {
    if (!began_) return PlainCall::OnHalfClose();
    if (by_file_) return;
    StopReceiveTimer();
    closing_ = true;
    working_ = true;
    service().EnqueueLease(self());
  }
  void End(const absl::Status& status) override {
    ChangeCall::End(status);
    Free();
  }
  void Reply(const v1::UpdateHeadResponse& answer) {
    Send(answer);
    if (!working_ && !finished()) StartReceiveTimer();
  }
  // The update's memory is freed on the thread too.
  void Free() override {
    if (began_ && !by_file_ && !working_.exchange(true)) service().EnqueueLease(self());
  }

  // ---- for the thread
  void RunStep() {
    v1::UpdateHeadResponse answer;
    const bool gone = ended();
    // The caller has the reason already, and it is no failure of the device's.
    absl::Status status = gone ? absl::CancelledError("call cancelled") : Step(&answer);
    const bool last = !status.ok() || closing_;
    if (last) {
      if (update_ != nullptr) update_->Fail(gone ? why_ended() : status);
      update_.reset();  // before the caller has its answer
      return Conclude(status, answer);
    }
    service().StopRunning(*this);
    if (next_piece_ < request_.rows_size()) return service().EnqueueLease(self());
    working_ = false;
    if (!ended()) return OnLoop([this, answer] { Reply(answer); });
    if (working_.exchange(true)) return;  // Leave has enqueued a step
    if (update_ != nullptr) update_->Fail(why_ended());
    update_.reset();
  }
  absl::Status Step(v1::UpdateHeadResponse* answer) {
    if (update_ == nullptr) {
      auto update = environment().heads->BeginUpdate(name_);
      if (!update.ok()) return update.status();
      update_ = *std::move(update);
    }
    if (closing_) {
      const absl::StatusOr<std::shared_ptr<const engine::Head>> head = update_->Commit();
      if (!head.ok()) return head.status();
      *answer->mutable_head() = Describe(**head);
    } else {
      const int64_t end = update_->done_bytes() + kStepBytes;
      while (next_piece_ < request_.rows_size() && update_->done_bytes() < end) {
        if (ended()) break;
        LOGITD_RETURN_IF_ERROR(Write(request_.rows(next_piece_++)));
      }
    }
    answer->set_done_bytes(update_->done_bytes());
    return absl::OkStatus();
  }
  absl::Status Write(const v1::HeadRows& rows) {
    engine::HeadRows from = {
        .width = rows.width(), .first = rows.first_row(), .count = rows.rows()};
    LOGITD_RETURN_IF_ERROR(FromProto(rows.part(), &from.part));
    LOGITD_RETURN_IF_ERROR(DTypeFromWire("rows.dtype", rows.dtype(), &from.dtype));
    LOGITD_RETURN_IF_ERROR(update_->CheckRows(from));
    const size_t element = SizeOf(from.dtype);
    Payload payload = {.rows = from.count, .row_bytes = static_cast<size_t>(from.width) * element};
    const std::string& lease = rows.shared().lease();
    LOGITD_RETURN_IF_ERROR(LocateRows("rows.shared",
                                      {.lease_bytes = lease.size(),
                                       .lease = lease.substr(0, kLeaseIdBytes),
                                       .offset = rows.shared().offset(),
                                       .row_stride = rows.shared().row_stride()},
                                      element, service().find_lease_, &payload));
    from.row_stride = static_cast<size_t>(payload.arena_stride);
    if (payload.arena->address() != nullptr) {
      from.data = payload.arena->address() + payload.arena_offset;
      if (payload.arena->on_device()) from.device = payload.arena->device();
    } else {
      from.read = [&payload](int64_t first, int64_t count, std::byte* to, size_t to_stride) {
        Payload some = payload;
        some.rows = count;
        some.range.bytes = static_cast<size_t>(count) * some.row_bytes;
        some.arena_offset += first * some.arena_stride;
        CopyRows(/*message=*/{}, some, to, to_stride);
      };
    }
    return update_->Write(from);
  }

  bool began_ = false;  // the first message was accepted
  bool by_file_ = false;
  std::string name_;
  v1::UpdateHeadRequest request_;      // the last one
  int next_piece_ = 0;                 // of its rows; those before it are copied
  bool closing_ = false;               // there are no more
  std::atomic<bool> working_ = false;  // the thread has the call, or will have it
  std::unique_ptr<engine::HeadUpdate> update_;
};

HeadsService::HeadsService(std::string root, std::string remote_listen,
                           const CallEnvironment& environment)
    : root_(std::move(root)),
      remote_listen_(std::move(remote_listen)),
      environment_(environment),
      find_lease_(
          environment.leases == nullptr
              ? FindLease()
              : [leases = environment.leases](std::string_view id) { return leases->Find(id); }),
      files_thread_([this] { RunLine(&files_); }),
      leases_thread_([this] { RunLine(&leases_); }) {}

HeadsService::~HeadsService() { Join(); }

void HeadsService::Join() {
  {
    absl::MutexLock lock(&mutex_);
    ending_ = true;
  }
  if (files_thread_.joinable()) files_thread_.join();
  if (leases_thread_.joinable()) leases_thread_.join();
}

bool HeadsService::loading() const {
  absl::MutexLock lock(&mutex_);
  return files_.running != nullptr || leases_.running != nullptr || !leases_.waiting.empty();
}

void HeadsService::Register(Registry* registry) {
  registry->Add(std::string(kLoad.path), [this](http2::Stream* stream) {
    return std::make_shared<LoadCall>(stream, environment_, this);
  });
  registry->Add(std::string(kUpdate.path), [this](http2::Stream* stream) {
    return std::make_shared<UpdateCall>(stream, environment_, this);
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

absl::Status HeadsService::CheckMayChange() const {
  if (environment_.admission->draining()) return engine::DrainingError();
  if (root_.empty()) {
    return absl::FailedPreconditionError(
        "clients cannot load, update or unload heads: the server was started without --head-root "
        "DIR");
  }
  if (!remote_listen_.empty()) {
    return absl::PermissionDeniedError(
        absl::StrFormat("clients cannot load, update or unload heads: the server listens on %s, "
                        "which is not local, and "
                        "was started without --allow-remote-heads",
                        remote_listen_));
  }
  return absl::OkStatus();
}

absl::Status HeadsService::EnqueueFile(const std::shared_ptr<ChangeCall>& call) {
  const std::string& name = call->name();
  absl::MutexLock lock(&mutex_);
  const auto same = [&](const auto& other) { return other->name() == name; };
  if ((files_.running != nullptr && same(files_.running)) ||
      std::any_of(files_.waiting.begin(), files_.waiting.end(), same)) {
    return absl::AlreadyExistsError(
        absl::StrFormat("head %s is being loaded or updated, allowed one change at a time", name));
  }
  if (files_.waiting.size() >= kMaxWaitingLoads) {
    return absl::ResourceExhaustedError(absl::StrFormat("waiting loads: got %d already, allowed %d",
                                                        files_.waiting.size(), kMaxWaitingLoads));
  }
  if (files_.running != nullptr || !files_.waiting.empty()) call->SayThatItWaits();
  files_.waiting.push_back(call);
  return absl::OkStatus();
}

void HeadsService::EnqueueLease(const std::shared_ptr<ChangeCall>& call) {
  absl::MutexLock lock(&mutex_);
  leases_.waiting.push_back(call);
}

void HeadsService::LeaveLine(const ChangeCall& call) {
  std::shared_ptr<ChangeCall> left;  // freed without the lock
  absl::MutexLock lock(&mutex_);
  const auto it = std::find_if(files_.waiting.begin(), files_.waiting.end(),
                               [&](const auto& waiting) { return waiting.get() == &call; });
  if (it == files_.waiting.end()) return;
  left = std::move(*it);
  files_.waiting.erase(it);
}

void HeadsService::StopRunning(const ChangeCall& call) {
  absl::MutexLock lock(&mutex_);
  for (Line* line : {&files_, &leases_}) {
    if (line->running.get() == &call) line->running = nullptr;  // its thread keeps it
  }
}

void HeadsService::RunLine(Line* line) {
  while (true) {
    std::shared_ptr<ChangeCall> call;
    {
      absl::MutexLock lock(&mutex_);
      const auto something = [this, line]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
        return ending_ || !line->waiting.empty();
      };
      mutex_.Await(absl::Condition(&something));
      if (line->waiting.empty()) return;
      call = std::move(line->waiting.front());
      line->waiting.pop_front();
      line->running = call;
    }
    call->Run();
    StopRunning(*call);
  }
}

}  // namespace logitd::rpc
