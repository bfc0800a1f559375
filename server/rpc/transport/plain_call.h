// A call with small messages, which is no op: of the services Heads, Server, Health and reflection.
#ifndef LOGITD_SERVER_RPC_TRANSPORT_PLAIN_CALL_H_
#define LOGITD_SERVER_RPC_TRANSPORT_PLAIN_CALL_H_

#include <google/protobuf/message_lite.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "absl/status/status.h"
#include "server/door/identities.h"
#include "server/rpc/registry.h"
#include "server/rpc/transport/authorization.h"
#include "server/rpc/transport/request_job.h"
#include "server/rpc/transport/server_call.h"

namespace logitd::rpc {

// The description of a method of these services.
struct PlainMethod {
  std::string_view path;                          // "/logitd.v1.Heads/List"; outlives the calls
  bool open = false;                              // anybody may call it
  std::optional<door::Role> role = std::nullopt;  // what it demands; none: any identity
  bool client_streams = false;                    // takes any number of messages
  bool counts = false;                            // ServerCall::counts
};

// On its loop only.
class PlainCall : public ServerCall {
 public:
  static constexpr size_t kMaxMessage = size_t{64} << 10;

  // `environment` outlives it.
  PlainCall(http2::Stream* stream, const CallEnvironment& environment, const PlainMethod& method);

  bool counts() const override { return method_.counts; }

 protected:
  // A message is there, of a caller that may call.
  virtual void OnRequest(std::string_view message) = 0;
  // True: a method that takes any number of messages leaves the next one with the peer, until an
  // answer is written.
  virtual bool Busy() const { return false; }
  // The peer has cancelled or is gone, or a message or the whole call came too late.
  virtual void OnGone(const absl::Status& why) {}

  // INVALID_ARGUMENT: it is malformed.
  static absl::Status Parse(std::string_view bytes, google::protobuf::MessageLite* message);
  // Ends the call: with `answer` if `status` is OK.
  void Answer(const absl::Status& status, const google::protobuf::MessageLite& answer);
  void Send(const google::protobuf::MessageLite& answer);
  void End(const absl::Status& status) override;
  void OnHalfClose() override;
  void OnOver() override;
  void OnWritten() override;

  const CallEnvironment& environment() const { return environment_; }
  const PlainMethod& method() const { return method_; }
  // After a change of identities: whether the caller still may call.
  absl::Status CheckMayStillCall() const;

 private:
  void Begin() override;
  void OnMessageSize(size_t bytes) override;
  void OnMessage(MessageMemory message) override;
  void OnCancelled(const absl::Status& why) override;

  const CallEnvironment& environment_;
  const PlainMethod& method_;
  Authorization authorization_;
  bool have_message_ = false;
  int unwritten_ = 0;  // answers
  absl::StatusCode code_ = absl::StatusCode::kUnknown;
};

// A call of a unary method that answers at once.
template <typename Request, typename Response>
class UnaryPlainCall final : public PlainCall {
 public:
  using Serve = std::function<absl::Status(const Request& request, Response* answer)>;

  // `serve` outlives it.
  UnaryPlainCall(http2::Stream* stream, const CallEnvironment& environment,
                 const PlainMethod& method, const Serve& serve)
      : PlainCall(stream, environment, method), serve_(serve) {}

 private:
  void OnRequest(std::string_view message) override {
    Request request;
    Response answer;
    absl::Status status = Parse(message, &request);
    if (status.ok()) status = serve_(request, &answer);
    Answer(status, answer);
  }

  const Serve& serve_;
};

// Adds such a method, which `serve` answers. `method` and `environment` outlive the registry.
template <typename Request, typename Response>
void AddUnary(const PlainMethod& method, const CallEnvironment& environment, Registry* registry,
              std::function<absl::Status(const Request& request, Response* answer)> serve) {
  registry->Add(std::string(method.path), [&method, &environment,
                                           serve = std::move(serve)](http2::Stream* stream) {
    return std::make_shared<UnaryPlainCall<Request, Response>>(stream, environment, method, serve);
  });
}

}  // namespace logitd::rpc

#endif  // LOGITD_SERVER_RPC_TRANSPORT_PLAIN_CALL_H_
