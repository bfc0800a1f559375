#include "server/rpc/transport/turned_away.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "formats/trace_context.h"
#include "server/door/connection.h"
#include "server/door/turnstile.h"
#include "server/rpc/transport/call_log.h"
#include "server/rpc/transport/trace.h"

namespace logitd::rpc {
namespace {

constexpr door::Refusal::Echo kEchoes[] = {{kRequestId, &formats::IsRequestId},
                                           {kTraceparent, &formats::IsTraceparent}};

// The values that a call with the same identity has.
door::Refusal::Allowed SameAuthorization(const grpc::CallbackServerContext& context) {
  door::Refusal::Allowed allowed = {.name = kAuthorization, .values = {std::nullopt}};
  const auto& metadata = context.client_metadata();
  if (const auto it = metadata.find(kAuthorization); it != metadata.end()) {
    allowed.values = {std::string(it->second.data(), it->second.size())};
  }
  return allowed;
}

door::Refusal::Allowed SamePriority(engine::Priority priority) {
  if (priority == engine::Priority::kBatch) return {.name = kPriority, .values = {kBatch}};
  return {.name = kPriority, .values = {std::nullopt, kInteractive}};
}

}  // namespace

// What is known of the calls that one refusal stands for.
class TurnedAway::Events final : public door::RefusalEvents {
 public:
  Events(std::shared_ptr<TurnedAway> owner, std::string_view method, std::string_view op,
         std::string peer, engine::Refusal reason, engine::Proof proof)
      : method(method),
        op(op),
        peer(std::move(peer)),
        reason(reason),
        proof(proof),
        owner_(std::move(owner)) {}

  void OnRefused(absl::Span<const std::string> echoed) override {
    owner_->Count(*this, echoed[0], echoed[1]);
  }

  const std::string method;
  const std::string_view op;
  const std::string peer;
  const engine::Refusal reason;
  const engine::Proof proof;

 private:
  const std::shared_ptr<TurnedAway> owner_;
};

void TurnedAway::Tell(const grpc::CallbackServerContext& context, const CallHeaders& headers,
                      std::string_view method, const engine::OpTraits& op,
                      int64_t max_message_bytes, const engine::Load::Alike& alike,
                      const absl::Status& status) {
  if (headers.connection == nullptr || alike.holds <= absl::ZeroDuration()) return;
  door::Refusal refusal;
  refusal.path = std::string(method);
  refusal.allowed = {SameAuthorization(context), SamePriority(headers.caller.priority)};
  refusal.size.name = kPayloadBytes;
  if (headers.stated_bytes.has_value()) {
    refusal.size.range = {alike.least_bytes, std::min(alike.most_bytes, max_message_bytes)};
  }
  refusal.longest_ns = absl::ToInt64Nanoseconds(alike.longest);
  refusal.until_ns = door::MonotonicNanos() + absl::ToInt64Nanoseconds(alike.holds);
  refusal.under_way = alike.calls;
  refusal.least_under_way = alike.least_calls;
  refusal.code = static_cast<int>(status.code());
  refusal.text = std::string(status.message());
  refusal.trailers = {{kRetryPushback, absl::StrCat(absl::ToInt64Milliseconds(
                                           engine::RetryDelayOf(status).value_or(alike.holds)))}};
  refusal.echoes = kEchoes;
  refusal.events =
      std::make_shared<Events>(shared_from_this(), method, op.name, headers.connection->peer(),
                               alike.reason, headers.caller.proof);
  headers.connection->Refuse(std::move(refusal));
}

void TurnedAway::Count(const Events& events, const std::string& request_id,
                       const std::string& traceparent) {
  absl::MutexLock lock(&mutex_);
  if (metrics_ == nullptr) return;
  constexpr absl::StatusCode kCode = absl::StatusCode::kResourceExhausted;
  metrics_->CountRefused(events.reason, events.proof);
  metrics_->CountRequest(events.op, kCode, /*seconds=*/0);
  if (!log_->Wants(/*total_ns=*/0)) return;
  const Trace trace = {.request_id = request_id, .traceparent = traceparent};
  log_->Write({.method = events.method,
               .peer = events.peer,
               .trace = &trace,
               .code = kCode,
               .messages = 0});
}

void TurnedAway::End() {
  absl::MutexLock lock(&mutex_);
  metrics_ = nullptr;
  log_ = nullptr;
}

}  // namespace logitd::rpc
