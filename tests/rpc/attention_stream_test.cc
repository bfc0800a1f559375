// A stream of chunks over a device that is slow or fails, seen from the client and the server.
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <string>
#include <thread>

#include "absl/time/clock.h"
#include "logitd/v1/attention.grpc.pb.h"
#include "logitd/v1/server.grpc.pb.h"
#include "tests/rpc/served_engine.h"

namespace logitd::rpc {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kKeys = 1024;
constexpr int64_t kChunkRows = 256;
constexpr int64_t kChunkBytes = kChunkRows * kKeys * 4;  // sent from the slab
constexpr int64_t kMaxMessage = int64_t{2} << 20;

class AttentionStreamTest : public ServedEngine {
 protected:
  using ClientStream =
      grpc::ClientReaderWriter<v1::AttentionSoftmaxRequest, v1::AttentionSoftmaxResponse>;

  AttentionStreamTest() : ServedEngine(kMaxMessage, /*max_held_bytes=*/64 << 20) {
    stub_ = v1::Attention::NewStub(channel_);
    context_.set_deadline(absl::ToChronoTime(absl::Now() + absl::Seconds(60)));
    first_.set_dtype(v1::DTYPE_F32);
    first_.set_batch(1);
    first_.set_heads(1);
    first_.set_queries(100 * kChunkRows);
    first_.set_keys(kKeys);
    next_.set_scores(std::string(static_cast<size_t>(kChunkBytes), '\1'));
    first_.set_scores(next_.scores());
    // All scores are equal, so every probability is 1/1024.
    const float prob = 1.0f / kKeys;
    for (int64_t i = 0; i < kChunkRows * kKeys; ++i) {
      probs_.append(reinterpret_cast<const char*>(&prob), sizeof(prob));
    }
  }

  const std::shared_ptr<grpc::Channel> channel_ = Start();
  std::unique_ptr<v1::Attention::Stub> stub_;
  grpc::ClientContext context_;
  v1::AttentionSoftmaxRequest first_;
  v1::AttentionSoftmaxRequest next_;
  std::string probs_;
};

TEST_F(AttentionStreamTest, ADeviceErrorEndsTheStreamAfterTheEarlierAnswers) {
  backend_.SetFaults([ops = 0](FaultPoint point) mutable -> absl::Status {
    if (point != FaultPoint::kOp || ++ops != 3) return absl::OkStatus();
    return absl::UnavailableError("hiccup");
  });
  const std::unique_ptr<ClientStream> stream = stub_->SoftmaxStream(&context_);
  v1::AttentionSoftmaxResponse answer;
  for (int chunk = 0; chunk < 3; ++chunk) {
    ASSERT_TRUE(stream->Write(chunk == 0 ? first_ : next_));
    ASSERT_EQ(stream->Read(&answer), chunk < 2);
    if (chunk < 2) {
      EXPECT_EQ(answer.first_row(), chunk * kChunkRows);
      EXPECT_TRUE(answer.probs() == probs_);
    }
  }
  const grpc::Status status = stream->Finish();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_THAT(status.error_message(), HasSubstr("hiccup"));
}

TEST_F(AttentionStreamTest, ASlowDeviceHoldsFourChunksAndACancelFreesThem) {
  backend_.Hold();
  const std::unique_ptr<ClientStream> stream = stub_->SoftmaxStream(&context_);
  // A fifth write succeeds only if the server reads it.
  std::atomic<int> written = 0;
  std::thread writer([&] {
    while (written < 50 && stream->Write(written == 0 ? first_ : next_)) ++written;
  });
  EXPECT_TRUE(Becomes([&] { return backend_.log().size() == 1; }));
  EXPECT_TRUE(Becomes([&] { return admission_.held_bytes() >= 4 * kChunkBytes; }));
  const auto info_stub = v1::Server::NewStub(channel_);
  for (int i = 0; i < 100; ++i) {  // what was sent before a call has arrived when that is answered
    grpc::ClientContext context;
    v1::GetInfoResponse info;
    EXPECT_TRUE(info_stub->GetInfo(&context, v1::GetInfoRequest(), &info).ok());
  }
  EXPECT_LT(admission_.held_bytes(), 5 * kChunkBytes);
  EXPECT_LT(written, 10);  // the transport buffers some unread
  EXPECT_EQ(backend_.log().size(), 1u);
  context_.TryCancel();
  writer.join();
  EXPECT_EQ(stream->Finish().error_code(), grpc::StatusCode::CANCELLED);
  // The client knows at once, the server a little later. Only the running chunk stays.
  EXPECT_TRUE(Becomes([&] { return admission_.held_bytes() < 2 * kChunkBytes; }));
  backend_.Release();
  EXPECT_TRUE(engine_->WaitIdle(SteadyNow() + absl::Seconds(20)));
  EXPECT_EQ(backend_.log().size(), 1u) << "a dropped chunk ran";
}

TEST_F(AttentionStreamTest, AStreamOfMoreChunksThanSlabsGetsEverySlabBack) {
  const std::unique_ptr<ClientStream> stream = stub_->SoftmaxStream(&context_);
  std::thread writer([&] {
    for (int chunk = 0; chunk < 100; ++chunk) stream->Write(chunk == 0 ? first_ : next_);
    stream->WritesDone();
  });
  v1::AttentionSoftmaxResponse answer;
  int answers = 0;
  for (; stream->Read(&answer); ++answers) {
    EXPECT_EQ(answer.first_row(), answers * kChunkRows);
    EXPECT_TRUE(answer.probs() == probs_);
  }
  writer.join();
  EXPECT_EQ(answers, 100);
  EXPECT_TRUE(stream->Finish().ok());
}

}  // namespace
}  // namespace logitd::rpc
