#include "tests/conformance/server/interop_server.h"

#include <string_view>
#include <utility>

#include "absl/container/inlined_vector.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/time.h"
#include "interop.pb.h"
#include "server/rpc/transport/server_call.h"

namespace logitd::conformance {
namespace {

using ::grpc::testing::EchoStatus;
using ::grpc::testing::Empty;
using ::grpc::testing::SimpleRequest;
using ::grpc::testing::SimpleResponse;
using ::grpc::testing::StreamingInputCallRequest;
using ::grpc::testing::StreamingInputCallResponse;
using ::grpc::testing::StreamingOutputCallRequest;
using ::grpc::testing::StreamingOutputCallResponse;

constexpr size_t kMaxMessage = size_t{4} << 20;
constexpr int kLoops = 2;
constexpr char kEchoInitial[] = "x-grpc-test-echo-initial";
constexpr char kEchoTrailing[] = "x-grpc-test-echo-trailing-bin";

absl::Status ToStatus(const EchoStatus& status) {
  return {static_cast<absl::StatusCode>(status.code()), status.message()};
}

// One call: its messages, and the metadata that goes back as it came.
class InteropCall : public rpc::ServerCall {
 public:
  InteropCall(http2::Stream* stream, rpc::CallTracker* tracker, bool client_streams)
      : ServerCall(stream, tracker), stream_(stream), client_streams_(client_streams) {}

 protected:
  virtual void OnRequest(std::string_view message) = 0;
  virtual void OnRequestsEnd() {}

  template <typename Message>
  bool Parse(std::string_view bytes, Message* message) {
    if (message->ParseFromArray(bytes.data(), static_cast<int>(bytes.size()))) return true;
    End(absl::InvalidArgumentError("request: malformed"));
    return false;
  }
  void Send(const google::protobuf::MessageLite& answer) {
    EchoHead();
    Write(rpc::EncodedMessage::Copy(answer.SerializeAsString()));
  }
  void Answer(const google::protobuf::MessageLite& answer) {
    Send(answer);
    End(absl::OkStatus());
  }
  void End(const absl::Status& status) override {
    if (over() || finished()) return;
    if (!echo_initial_.empty() || !echo_trailing_.empty()) EchoTrailers(status);
    Finish(status);
  }

 private:
  void Begin() override {
    echo_initial_ = metadata().Find(kEchoInitial);
    echo_trailing_ = metadata().Find(kEchoTrailing);
    StartReceiveTimer();
    if (client_streams_) Grant(0);
  }
  void OnMessageSize(size_t bytes) override {
    if (!client_streams_ && std::exchange(has_request_, true)) {
      return End(absl::UnimplementedError("request: got a second message, allowed exactly one"));
    }
    if (bytes > kMaxMessage) {
      return End(absl::ResourceExhaustedError(
          absl::StrFormat("request: got %d bytes, allowed %d", bytes, kMaxMessage)));
    }
    Grant(bytes);
    const auto memory = std::make_shared<std::string>(bytes, '\0');
    Receive({.bytes = {reinterpret_cast<std::byte*>(memory->data()), bytes}, .keep = memory});
  }
  void OnMessage(rpc::MessageMemory message) override {
    StopReceiveTimer();
    OnRequest({reinterpret_cast<const char*>(message.bytes.data()), message.bytes.size()});
    if (client_streams_ && !finished()) Grant(0);
  }
  void OnHalfClose() override {
    if (!client_streams_ && !has_request_) return End(rpc::TruncatedError());
    OnRequestsEnd();
  }
  void OnCancelled(const absl::Status& why) override { End(why); }

  // logitd's own calls have no metadata of their own, so these two write to the stream, before the
  // ServerCall does.
  void EchoHead() {
    if (echo_initial_.empty()) return;
    const http2::Field head[] = {
        {":status", "200"}, {"content-type", "application/grpc"}, {kEchoInitial, echo_initial_}};
    stream_->Respond(head);
  }
  void EchoTrailers(const absl::Status& status) {
    const http2::Field head[] = {{":status", "200"}, {"content-type", "application/grpc"}};
    EchoHead();
    stream_->Respond(head);
    const std::string code = absl::StrCat(static_cast<int>(status.code()));
    absl::InlinedVector<http2::Field, 2> trailers = {{"grpc-status", code}};
    if (!echo_trailing_.empty()) trailers.push_back({kEchoTrailing, echo_trailing_});
    stream_->End(trailers);
  }

  http2::Stream* const stream_;  // until the call is over
  const bool client_streams_;
  bool has_request_ = false;
  std::string echo_initial_;
  std::string echo_trailing_;
};

class EmptyCall final : public InteropCall {
 public:
  EmptyCall(http2::Stream* stream, rpc::CallTracker* tracker)
      : InteropCall(stream, tracker, /*client_streams=*/false) {}

 private:
  void OnRequest(std::string_view) override { Answer(Empty()); }
};

class UnaryCall final : public InteropCall {
 public:
  UnaryCall(http2::Stream* stream, rpc::CallTracker* tracker)
      : InteropCall(stream, tracker, /*client_streams=*/false) {}

 private:
  void OnRequest(std::string_view message) override {
    SimpleRequest request;
    if (!Parse(message, &request)) return;
    if (request.has_response_status()) return End(ToStatus(request.response_status()));
    SimpleResponse response;
    response.mutable_payload()->mutable_body()->resize(request.response_size());
    Answer(response);
  }
};

class StreamingInputCall final : public InteropCall {
 public:
  StreamingInputCall(http2::Stream* stream, rpc::CallTracker* tracker)
      : InteropCall(stream, tracker, /*client_streams=*/true) {}

 private:
  void OnRequest(std::string_view message) override {
    StreamingInputCallRequest request;
    if (Parse(message, &request)) bytes_ += static_cast<int32_t>(request.payload().body().size());
  }
  void OnRequestsEnd() override {
    StreamingInputCallResponse response;
    response.set_aggregated_payload_size(bytes_);
    Answer(response);
  }

  int32_t bytes_ = 0;
};

class StreamingOutputCall final : public InteropCall {
 public:
  StreamingOutputCall(http2::Stream* stream, rpc::CallTracker* tracker, bool client_streams)
      : InteropCall(stream, tracker, client_streams), client_streams_(client_streams) {}

 private:
  void OnRequest(std::string_view message) override {
    StreamingOutputCallRequest request;
    if (!Parse(message, &request)) return;
    for (const auto& parameters : request.response_parameters()) {
      StreamingOutputCallResponse response;
      response.mutable_payload()->mutable_body()->resize(parameters.size());
      Send(response);
    }
    if (request.has_response_status()) return End(ToStatus(request.response_status()));
    if (!client_streams_) End(absl::OkStatus());
  }
  void OnRequestsEnd() override { End(absl::OkStatus()); }

  const bool client_streams_;
};

template <typename Call, typename... Rest>
rpc::Registry::Make MakerOf(rpc::CallTracker* tracker, Rest... rest) {
  return [=](http2::Stream* stream) { return std::make_shared<Call>(stream, tracker, rest...); };
}

}  // namespace

InteropServer::InteropServer(std::shared_ptr<const door::TlsSource> tls)
    : tracker_(/*peer_timeout=*/absl::Seconds(30), /*retry_delay=*/absl::Milliseconds(10), kLoops),
      server_({.loops = kLoops, .tls = std::move(tls)}, this) {
  const auto add = [this](std::string_view method, rpc::Registry::Make make) {
    registry_.Add("/grpc.testing.TestService/" + std::string(method), std::move(make));
  };
  add("EmptyCall", MakerOf<EmptyCall>(&tracker_));
  add("UnaryCall", MakerOf<UnaryCall>(&tracker_));
  add("StreamingInputCall", MakerOf<StreamingInputCall>(&tracker_));
  add("StreamingOutputCall", MakerOf<StreamingOutputCall>(&tracker_, /*client_streams=*/false));
  add("FullDuplexCall", MakerOf<StreamingOutputCall>(&tracker_, /*client_streams=*/true));
}

InteropServer::~InteropServer() { Shutdown(); }

absl::Status InteropServer::Start(const std::string& address) {
  if (absl::Status status = server_.Listen({address}, std::nullopt); !status.ok()) return status;
  server_.Start();
  return absl::OkStatus();
}

void InteropServer::Shutdown() { server_.Shutdown(); }

}  // namespace logitd::conformance
