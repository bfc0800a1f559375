// gRPC's interoperability cases by gRPC's C++ client. Against a server in this process, or the one
// that CONFORMANCE_TARGET names: over TLS if CONFORMANCE_AUTHORITIES names a file.
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "interop.grpc.pb.h"
#include "tests/conformance/server/interop_server.h"

namespace logitd::conformance {
namespace {

using ::grpc::ClientContext;
using ::grpc::Status;
using ::grpc::StatusCode;
using ::grpc::testing::Empty;
using ::grpc::testing::SimpleRequest;
using ::grpc::testing::SimpleResponse;
using ::grpc::testing::StreamingInputCallRequest;
using ::grpc::testing::StreamingInputCallResponse;
using ::grpc::testing::StreamingOutputCallRequest;
using ::grpc::testing::StreamingOutputCallResponse;
using ::grpc::testing::TestService;
using ::grpc::testing::UnimplementedService;

constexpr int kLargeRequest = 271828;
constexpr int kLargeResponse = 314159;
const std::vector<int> kRequestSizes = {27182, 8, 1828, 45904};
const std::vector<int> kResponseSizes = {31415, 9, 2653, 58979};

std::shared_ptr<grpc::ChannelCredentials> CredentialsOf(const char* authorities) {
  if (authorities == nullptr || *authorities == '\0') return grpc::InsecureChannelCredentials();
  std::ifstream file(authorities);
  return grpc::SslCredentials(
      {.pem_root_certs = std::string(std::istreambuf_iterator<char>(file), {})});
}

class GrpcCppTest : public ::testing::Test {
 protected:
  GrpcCppTest() {
    const char* target = std::getenv("CONFORMANCE_TARGET");
    if (target == nullptr) {
      server_ = std::make_unique<InteropServer>();
      if (!server_->Start("127.0.0.1:0").ok()) std::abort();
    }
    channel_ = grpc::CreateChannel(target != nullptr ? target : server_->listening(),
                                   CredentialsOf(std::getenv("CONFORMANCE_AUTHORITIES")));
    stub_ = TestService::NewStub(channel_);
    context_.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(60));
  }
  ~GrpcCppTest() override {
    stub_.reset();
    channel_.reset();
    if (server_ == nullptr) return;
    server_->Shutdown();
    EXPECT_EQ(server_->calls(), 0);
    EXPECT_EQ(server_->held_bytes(), 0);
    EXPECT_EQ(server_->cuts(), 0);
  }

  static SimpleRequest LargeRequest() {
    SimpleRequest request;
    request.set_response_size(kLargeResponse);
    request.mutable_payload()->set_body(std::string(kLargeRequest, '\0'));
    return request;
  }
  static StreamingOutputCallRequest Ping(int response_size, int request_size) {
    StreamingOutputCallRequest request;
    request.add_response_parameters()->set_size(response_size);
    request.mutable_payload()->set_body(std::string(request_size, '\0'));
    return request;
  }
  static void ExpectZeros(const std::string& body, int size) {
    EXPECT_EQ(body, std::string(size, '\0'));
  }
  // The unary and the streaming call both end with this status.
  void ExpectStatus(int code, const std::string& text) {
    SimpleRequest request;
    request.mutable_response_status()->set_code(code);
    request.mutable_response_status()->set_message(text);
    SimpleResponse response;
    const Status unary = stub_->UnaryCall(&context_, request, &response);
    EXPECT_EQ(unary.error_code(), code);
    EXPECT_EQ(unary.error_message(), text);

    ClientContext context;
    const auto stream = stub_->FullDuplexCall(&context);
    StreamingOutputCallRequest streamed;
    *streamed.mutable_response_status() = request.response_status();
    EXPECT_TRUE(stream->Write(streamed));
    stream->WritesDone();
    StreamingOutputCallResponse answer;
    EXPECT_FALSE(stream->Read(&answer));
    const Status status = stream->Finish();
    EXPECT_EQ(status.error_code(), code);
    EXPECT_EQ(status.error_message(), text);
  }

  std::unique_ptr<InteropServer> server_;  // null: another process
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<TestService::Stub> stub_;
  ClientContext context_;
};

TEST_F(GrpcCppTest, empty_unary) {
  Empty response;
  const Status status = stub_->EmptyCall(&context_, Empty(), &response);
  EXPECT_TRUE(status.ok()) << status.error_message();
}

TEST_F(GrpcCppTest, large_unary) {
  SimpleResponse response;
  const Status status = stub_->UnaryCall(&context_, LargeRequest(), &response);
  ASSERT_TRUE(status.ok()) << status.error_message();
  ExpectZeros(response.payload().body(), kLargeResponse);
}

TEST_F(GrpcCppTest, client_streaming) {
  StreamingInputCallResponse response;
  const auto stream = stub_->StreamingInputCall(&context_, &response);
  for (const int size : kRequestSizes) {
    StreamingInputCallRequest request;
    request.mutable_payload()->set_body(std::string(size, '\0'));
    ASSERT_TRUE(stream->Write(request));
  }
  stream->WritesDone();
  const Status status = stream->Finish();
  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(response.aggregated_payload_size(), 74922);
}

TEST_F(GrpcCppTest, server_streaming) {
  StreamingOutputCallRequest request;
  for (const int size : kResponseSizes) request.add_response_parameters()->set_size(size);
  const auto stream = stub_->StreamingOutputCall(&context_, request);
  StreamingOutputCallResponse response;
  for (const int size : kResponseSizes) {
    ASSERT_TRUE(stream->Read(&response));
    ExpectZeros(response.payload().body(), size);
  }
  EXPECT_FALSE(stream->Read(&response));
  EXPECT_TRUE(stream->Finish().ok());
}

TEST_F(GrpcCppTest, ping_pong) {
  const auto stream = stub_->FullDuplexCall(&context_);
  StreamingOutputCallResponse response;
  for (size_t i = 0; i < kRequestSizes.size(); ++i) {
    ASSERT_TRUE(stream->Write(Ping(kResponseSizes[i], kRequestSizes[i])));
    ASSERT_TRUE(stream->Read(&response));
    ExpectZeros(response.payload().body(), kResponseSizes[i]);
  }
  stream->WritesDone();
  EXPECT_FALSE(stream->Read(&response));
  EXPECT_TRUE(stream->Finish().ok());
}

TEST_F(GrpcCppTest, empty_stream) {
  const auto stream = stub_->FullDuplexCall(&context_);
  stream->WritesDone();
  StreamingOutputCallResponse response;
  EXPECT_FALSE(stream->Read(&response));
  EXPECT_TRUE(stream->Finish().ok());
}

TEST_F(GrpcCppTest, status_code_and_message) {
  ExpectStatus(StatusCode::UNKNOWN, "test status message");
}

TEST_F(GrpcCppTest, special_status_message) {
  ExpectStatus(StatusCode::UNKNOWN,
               "\t\ntest with whitespace\r\nand Unicode BMP \u263A and non-BMP \U0001F608\t\n");
}

TEST_F(GrpcCppTest, custom_metadata) {
  const std::string text = "test_initial_metadata_value";
  const std::string bytes = "\xab\xab\xab";
  const auto add = [&](ClientContext* context) {
    context->AddMetadata("x-grpc-test-echo-initial", text);
    context->AddMetadata("x-grpc-test-echo-trailing-bin", bytes);
  };
  const auto check = [&](const ClientContext& context) {
    const auto& initial = context.GetServerInitialMetadata();
    const auto& trailing = context.GetServerTrailingMetadata();
    ASSERT_EQ(initial.count("x-grpc-test-echo-initial"), 1);
    EXPECT_EQ(initial.find("x-grpc-test-echo-initial")->second, text);
    ASSERT_EQ(trailing.count("x-grpc-test-echo-trailing-bin"), 1);
    EXPECT_EQ(trailing.find("x-grpc-test-echo-trailing-bin")->second, bytes);
  };
  add(&context_);
  SimpleResponse response;
  ASSERT_TRUE(stub_->UnaryCall(&context_, LargeRequest(), &response).ok());
  check(context_);

  ClientContext context;
  add(&context);
  const auto stream = stub_->FullDuplexCall(&context);
  ASSERT_TRUE(stream->Write(Ping(kLargeResponse, kLargeRequest)));
  stream->WritesDone();
  StreamingOutputCallResponse answer;
  ASSERT_TRUE(stream->Read(&answer));
  EXPECT_FALSE(stream->Read(&answer));
  ASSERT_TRUE(stream->Finish().ok());
  check(context);
}

TEST_F(GrpcCppTest, unimplemented_method) {
  Empty response;
  EXPECT_EQ(stub_->UnimplementedCall(&context_, Empty(), &response).error_code(),
            StatusCode::UNIMPLEMENTED);
}

// More than the server's windows take before it has asked for it.
TEST_F(GrpcCppTest, refused_upload) {
  Empty upload;
  upload.GetReflection()->MutableUnknownFields(&upload)->AddLengthDelimited(
      1, std::string(size_t{4} << 20, '\0'));
  for (int i = 0; i < 5; ++i) {
    ClientContext context;
    Empty response;
    EXPECT_EQ(stub_->UnimplementedCall(&context, upload, &response).error_code(),
              StatusCode::UNIMPLEMENTED);
  }
}

TEST_F(GrpcCppTest, unimplemented_service) {
  Empty response;
  EXPECT_EQ(UnimplementedService::NewStub(channel_)
                ->UnimplementedCall(&context_, Empty(), &response)
                .error_code(),
            StatusCode::UNIMPLEMENTED);
}

TEST_F(GrpcCppTest, timeout_on_sleeping_server) {
  context_.set_deadline(std::chrono::system_clock::now() + std::chrono::milliseconds(1));
  const auto stream = stub_->FullDuplexCall(&context_);
  StreamingOutputCallRequest request;
  request.mutable_payload()->set_body(std::string(27182, '\0'));
  stream->Write(request);
  StreamingOutputCallResponse response;
  EXPECT_FALSE(stream->Read(&response));
  EXPECT_EQ(stream->Finish().error_code(), StatusCode::DEADLINE_EXCEEDED);
}

TEST_F(GrpcCppTest, cancel_after_begin) {
  StreamingInputCallResponse response;
  const auto stream = stub_->StreamingInputCall(&context_, &response);
  context_.TryCancel();
  EXPECT_EQ(stream->Finish().error_code(), StatusCode::CANCELLED);
}

TEST_F(GrpcCppTest, cancel_after_first_response) {
  const auto stream = stub_->FullDuplexCall(&context_);
  StreamingOutputCallResponse response;
  ASSERT_TRUE(stream->Write(Ping(kResponseSizes[0], kRequestSizes[0])));
  ASSERT_TRUE(stream->Read(&response));
  ExpectZeros(response.payload().body(), kResponseSizes[0]);
  context_.TryCancel();
  while (stream->Read(&response)) {
  }
  EXPECT_EQ(stream->Finish().error_code(), StatusCode::CANCELLED);
}

TEST_F(GrpcCppTest, compressed_request_is_refused) {
  for (const auto algorithm : {GRPC_COMPRESS_GZIP, GRPC_COMPRESS_DEFLATE}) {
    ClientContext context;
    context.set_compression_algorithm(algorithm);
    SimpleResponse response;
    EXPECT_EQ(stub_->UnaryCall(&context, LargeRequest(), &response).error_code(),
              StatusCode::UNIMPLEMENTED);
  }
}

}  // namespace
}  // namespace logitd::conformance
