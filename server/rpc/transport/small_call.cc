#include "server/rpc/transport/small_call.h"

#include <memory>

#include "absl/strings/string_view.h"
#include "server/engine/sync.h"
#include "server/rpc/transport/call_log.h"
#include "server/rpc/transport/call_tracker.h"
#include "server/rpc/transport/message.h"

namespace logitd::rpc {
namespace {

std::string PeerOf(const grpc::CallbackServerContext& context, const door::Connections& all) {
  const std::shared_ptr<door::Connection> connection = all.Find(context.peer());
  return connection == nullptr ? "" : connection->peer();
}

}  // namespace

SmallCall::SmallCall(grpc::CallbackServerContext* context, const CallEnvironment& environment,
                     std::string_view method, std::optional<door::Role> role)
    : context_(context),
      environment_(environment),
      method_(method),
      role_(role),
      started_ns_(engine::MonotonicNanos()),
      peer_(PeerOf(*context, *environment.connections)),
      trace_(ReadAndEchoTrace(context)) {}

absl::Status SmallCall::Read(const grpc::ByteBuffer& request,
                             google::protobuf::MessageLite* message) {
  received_bytes_ = static_cast<int64_t>(request.Length());
  const std::string_view name = method_.substr(method_.rfind('/') + 1);
  const absl::Status status =
      CheckAccess(*context_, environment_, {.method = {name.data(), name.size()}, .role = role_});
  return status.ok() ? ParseMessage(context_, request, message) : status;
}

CallReport SmallCall::Report(absl::StatusCode code, int64_t sent_bytes) const {
  return {.method = method_,
          .peer = peer_,
          .trace = &trace_,
          .code = code,
          .received_bytes = received_bytes_,
          .sent_bytes = sent_bytes,
          .total_ns = engine::MonotonicNanos() - started_ns_};
}

grpc::ServerUnaryReactor* SmallCall::Answer(const absl::Status& status,
                                            const google::protobuf::MessageLite& answer,
                                            grpc::ByteBuffer* response) {
  if (status.ok()) *response = ToBytes(answer);
  if (environment_.log->Wants(engine::MonotonicNanos() - started_ns_)) {
    environment_.log->Write(Report(status.code(), static_cast<int64_t>(response->Length())));
  }
  grpc::ServerUnaryReactor* const reactor = context_->DefaultReactor();
  reactor->Finish(ToGrpc(status));
  return reactor;
}

void SmallCall::LogStream(absl::StatusCode code, int64_t sent_bytes) const {
  if (environment_.log->WantsStream()) environment_.log->WriteStream(Report(code, sent_bytes));
}

}  // namespace logitd::rpc
