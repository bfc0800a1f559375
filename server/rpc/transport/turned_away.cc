#include "server/rpc/transport/turned_away.h"

#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/types/span.h"
#include "formats/trace_context.h"
#include "server/door/connection.h"
#include "server/rpc/transport/call_log.h"
#include "server/rpc/transport/trace.h"

namespace logitd::rpc {
namespace {

constexpr door::LikeCalls::Echo kEchoes[] = {{kRequestId, &formats::IsRequestId},
                                             {kTraceparent, &formats::IsTraceparent}};

// The values that a call with the same identity has.
door::LikeCalls::Allowed SameAuthorization(const grpc::CallbackServerContext& context) {
  door::LikeCalls::Allowed allowed = {.name = kAuthorization, .values = {std::nullopt}};
  const auto& metadata = context.client_metadata();
  if (const auto it = metadata.find(kAuthorization); it != metadata.end()) {
    allowed.values = {std::string(it->second.data(), it->second.size())};
  }
  return allowed;
}

door::LikeCalls::Allowed SamePriority(engine::Priority priority) {
  if (priority == engine::Priority::kBatch) return {.name = kPriority, .values = {kBatch}};
  return {.name = kPriority, .values = {std::nullopt, kInteractive}};
}

}  // namespace

// Judges the calls that are like one refused call.
class TurnedAway::LoadJudge final : public door::Judge {
 public:
  LoadJudge(std::shared_ptr<TurnedAway> owner, std::string_view method, const engine::OpTraits& op,
            std::string peer, const engine::Caller& caller)
      : method(method), op(op), peer(std::move(peer)), caller(caller), owner_(std::move(owner)) {}

  std::optional<Verdict> Ask(const Call& call) override { return owner_->Ask(*this, call); }
  void OnRefused(int reason, absl::Span<const std::string> echoed) override {
    owner_->Count(*this, static_cast<engine::Refusal>(reason), echoed[0], echoed[1]);
  }

  const std::string method;
  const engine::OpTraits& op;
  const std::string peer;
  const engine::Caller caller;

 private:
  const std::shared_ptr<TurnedAway> owner_;
};

void TurnedAway::Tell(const grpc::CallbackServerContext& context, const CallHeaders& headers,
                      std::string_view method, const engine::OpTraits& op,
                      int64_t max_message_bytes) {
  if (headers.connection == nullptr) return;
  headers.connection->Refuse(
      {.path = std::string(method),
       .allowed = {SameAuthorization(context), SamePriority(headers.caller.priority)},
       .size = kPayloadBytes,
       .max_size = max_message_bytes,
       .echoes = kEchoes,
       .judge = std::make_shared<LoadJudge>(shared_from_this(), method, op,
                                            headers.connection->peer(), headers.caller)});
}

std::optional<door::Judge::Verdict> TurnedAway::Ask(const LoadJudge& judge,
                                                    const door::Judge::Call& call) {
  absl::ReaderMutexLock lock(&mutex_);
  if (load_ == nullptr) return std::nullopt;
  const auto refused = load_->Look({.caller = judge.caller,
                                    .op = &judge.op,
                                    .bytes = call.size,
                                    .deadline = absl::Now() + absl::Nanoseconds(call.timeout_ns)},
                                   call.coming);
  if (!refused.has_value()) return std::nullopt;
  door::Judge::Verdict verdict = {.code = static_cast<int>(absl::StatusCode::kResourceExhausted),
                                  .text = refused->Text(),
                                  .trailers = {},
                                  .reason = static_cast<int>(refused->reason)};
  verdict.trailers.emplace_back(kRetryPushback,
                                absl::StrCat(absl::ToInt64Milliseconds(refused->delay)));
  return verdict;
}

void TurnedAway::Count(const LoadJudge& judge, engine::Refusal reason,
                       const std::string& request_id, const std::string& traceparent) {
  absl::ReaderMutexLock lock(&mutex_);
  if (metrics_ == nullptr) return;
  constexpr absl::StatusCode kCode = absl::StatusCode::kResourceExhausted;
  metrics_->CountRefused(reason, judge.caller.proof);
  metrics_->CountRequest(judge.op.name, kCode, /*seconds=*/0);
  if (!log_->Wants(/*total_ns=*/0)) return;
  const Trace trace = {.request_id = request_id, .traceparent = traceparent};
  log_->Write(
      {.method = judge.method, .peer = judge.peer, .trace = &trace, .code = kCode, .messages = 0});
}

void TurnedAway::End() {
  absl::MutexLock lock(&mutex_);
  load_ = nullptr;
  metrics_ = nullptr;
  log_ = nullptr;
}

}  // namespace logitd::rpc
