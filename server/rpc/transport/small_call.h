// A call with one small request, which is no op: of the services Heads and Server.
#ifndef LOGITD_SERVER_RPC_TRANSPORT_SMALL_CALL_H_
#define LOGITD_SERVER_RPC_TRANSPORT_SMALL_CALL_H_

#include <google/protobuf/message_lite.h>
#include <grpcpp/server_context.h>
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/server_callback.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "server/door/identities.h"
#include "server/rpc/transport/request_job.h"
#include "server/rpc/transport/trace.h"

namespace logitd::rpc {

struct CallReport;

// Who calls, what was asked, and the call's line in the log. Not thread-safe.
class SmallCall {
 public:
  // Its time starts here. `method`: "/logitd.v1.Heads/List"; it and the objects of `environment`
  // outlive this. `role`: what the method demands; none: any identity.
  SmallCall(grpc::CallbackServerContext* context, const CallEnvironment& environment,
            std::string_view method, std::optional<door::Role> role = std::nullopt);

  // Whether the caller may call, and its request. Errors as of Authorize and ParseMessage.
  absl::Status Read(const grpc::ByteBuffer& request, google::protobuf::MessageLite* message);

  // Ends a unary call, with `answer` in `response` if `status` is OK. Writes its line in the log.
  grpc::ServerUnaryReactor* Answer(const absl::Status& status,
                                   const google::protobuf::MessageLite& answer,
                                   grpc::ByteBuffer* response);

  // The line in the log of a call that has sent a stream of answers.
  void LogStream(absl::StatusCode code, int64_t sent_bytes) const;

 private:
  CallReport Report(absl::StatusCode code, int64_t sent_bytes) const;

  grpc::CallbackServerContext* const context_;  // used until the call's answer has begun
  const CallEnvironment& environment_;
  const std::string_view method_;
  const std::optional<door::Role> role_;
  const int64_t started_ns_;
  const std::string peer_;
  const Trace trace_;
  int64_t received_bytes_ = 0;
};

}  // namespace logitd::rpc

#endif  // LOGITD_SERVER_RPC_TRANSPORT_SMALL_CALL_H_
