#include "server/rpc/transport/plain_call.h"

#include <utility>

#include "absl/strings/str_format.h"
#include "server/rpc/transport/authorization.h"
#include "server/rpc/transport/call_log.h"

namespace logitd::rpc {

PlainCall::PlainCall(http2::Stream* stream, const CallEnvironment& environment,
                     const PlainMethod& method)
    : ServerCall(stream, environment.tracker), environment_(environment), method_(method) {}

namespace {

Access AccessOf(const PlainMethod& method) {
  const std::string_view name = method.path.substr(method.path.rfind('/') + 1);
  return {.method = {name.data(), name.size()}, .role = method.role};
}

}  // namespace

void PlainCall::Begin() {
  StartReceiveTimer();
  if (method_.open) return;
  absl::StatusOr<Authorization> authorization =
      Authorize(&metadata(), connection().peer(), environment_.identities, AccessOf(method_),
                environment_.metrics);
  if (!authorization.ok()) return End(authorization.status());
  authorization_ = *std::move(authorization);
}

absl::Status PlainCall::CheckMayStillCall() const {
  if (method_.open) return absl::OkStatus();
  return CheckStillAuthorized(authorization_, environment_.identities, AccessOf(method_));
}

void PlainCall::OnMessageSize(size_t bytes) {
  if (have_message_ && !method_.client_streams) {
    return End(absl::UnimplementedError("request: got a second message, allowed exactly one"));
  }
  if (bytes > kMaxMessage) {
    return End(absl::InvalidArgumentError(
        absl::StrFormat("request: got %d bytes, allowed 0..%d", bytes, kMaxMessage)));
  }
  Grant(bytes);
  ReceiveWhole();
}

void PlainCall::OnMessage(MessageMemory message) {
  have_message_ = true;
  OnRequest({reinterpret_cast<const char*>(message.bytes.data()), message.bytes.size()});
  if (finished() || over()) return;
  if (!method_.client_streams) return;
  Pause(unwritten_ > 0 || Busy());  // a peer that does not read its answers gets no more of them
  Grant(0);
}

void PlainCall::OnWritten() {
  if (unwritten_ > 0 && --unwritten_ == 0 && method_.client_streams) Pause(Busy());
}

void PlainCall::OnHalfClose() {
  if (!have_message_) End(TruncatedError());
}

void PlainCall::OnCancelled(const absl::Status& why) {
  if (code_ == absl::StatusCode::kUnknown) code_ = why.code();
  OnGone(why);
  if (!over()) End(why);
}

absl::Status PlainCall::Parse(std::string_view bytes, google::protobuf::MessageLite* message) {
  if (message->ParseFromArray(bytes.data(), static_cast<int>(bytes.size()))) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrFormat("request: got %d bytes that are not a protobuf message, allowed a %s",
                      bytes.size(), std::string(message->GetTypeName())));
}

void PlainCall::Send(const google::protobuf::MessageLite& answer) {
  ++unwritten_;
  Write(EncodedMessage::Copy(answer.SerializeAsString()));
}

void PlainCall::Answer(const absl::Status& status, const google::protobuf::MessageLite& answer) {
  if (status.ok()) Send(answer);
  End(status);
}

void PlainCall::End(const absl::Status& status) {
  if (!finished()) code_ = status.code();
  Finish(status);
}

void PlainCall::OnOver() {
  const bool wanted =
      method_.client_streams ? environment_.log->WantsStream() : environment_.log->Wants(age_ns());
  if (!wanted) return;
  environment_.log->Write({.method = method_.path,
                           .peer = peer(),
                           .trace = &trace(),
                           .code = code_,
                           .received_bytes = received_bytes(),
                           .sent_bytes = sent_bytes(),
                           .total_ns = age_ns()});
}

}  // namespace logitd::rpc
