// A call with small messages, which is no op: of the services Heads, Server, Health and reflection.
#ifndef LOGITD_SERVER_RPC_TRANSPORT_PLAIN_CALL_H_
#define LOGITD_SERVER_RPC_TRANSPORT_PLAIN_CALL_H_

#include <google/protobuf/message_lite.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "server/door/identities.h"
#include "server/rpc/transport/request_job.h"
#include "server/rpc/transport/server_call.h"

namespace logitd::rpc {

struct CallReport;

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
  // The peer sends no more. By default a call without a message ends with an error.
  virtual void OnRequestsEnd();
  virtual void OnGone() {}  // the peer has cancelled or is gone, or the deadline has passed

  // INVALID_ARGUMENT: it is malformed.
  static absl::Status Parse(std::string_view bytes, google::protobuf::MessageLite* message);
  // Ends the call: with `answer` if `status` is OK.
  void Answer(const absl::Status& status, const google::protobuf::MessageLite& answer);
  void Send(const google::protobuf::MessageLite& answer);
  void End(const absl::Status& status) override;
  void OnOver() override;

  const CallEnvironment& environment() const { return environment_; }
  const PlainMethod& method() const { return method_; }

 private:
  void Begin() override;
  void OnMessageSize(size_t bytes) override;
  void OnMessage(MessageMemory message) override;
  void OnHalfClose() override;
  void OnCancelled(const absl::Status& why) override;
  void OnWritten() override;

  const CallEnvironment& environment_;
  const PlainMethod& method_;
  bool have_message_ = false;
  int unwritten_ = 0;  // answers
  absl::StatusCode code_ = absl::StatusCode::kUnknown;
};

// A unary method that answers at once.
class UnaryPlainCall final : public PlainCall {
 public:
  // Fills `answer`, a serialized message, from a request.
  using Serve = std::function<absl::Status(std::string_view request, std::string* answer)>;

  // `serve` outlives it.
  UnaryPlainCall(http2::Stream* stream, const CallEnvironment& environment,
                 const PlainMethod& method, const Serve& serve)
      : PlainCall(stream, environment, method), serve_(serve) {}

  // A Serve of parsed messages.
  template <typename Request, typename Response>
  static Serve Parsed(std::function<absl::Status(const Request&, Response*)> serve) {
    return [serve = std::move(serve)](std::string_view bytes, std::string* answer) {
      Request request;
      Response response;
      absl::Status status = Parse(bytes, &request);
      if (status.ok()) status = serve(request, &response);
      if (status.ok()) *answer = response.SerializeAsString();
      return status;
    };
  }

 private:
  void OnRequest(std::string_view message) override;

  const Serve& serve_;
};

}  // namespace logitd::rpc

#endif  // LOGITD_SERVER_RPC_TRANSPORT_PLAIN_CALL_H_
