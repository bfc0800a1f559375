// A message of a stream whose answer needs more room than the message had.
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <memory>
#include <optional>
#include <string>

#include "logitd/v1/sampler.grpc.pb.h"
#include "tests/rpc/served_engine.h"

namespace logitd::rpc {
namespace {

constexpr int64_t kMaxMessage = int64_t{256} << 10;
constexpr int64_t kMessageRoom = int64_t{30} << 10;  // enough for the message, not for the answer

class StreamRoomTest : public ServedEngine {
 protected:
  StreamRoomTest() : ServedEngine(kMaxMessage, /*max_held_bytes=*/kMaxMessage) {
    stub_ = v1::Sampler::NewStub(channel_);
    // 8 KiB of logits, and an answer of more than 32 KiB.
    request_.set_dtype(v1::DTYPE_BF16);
    request_.set_rows(32);
    request_.set_vocab(128);
    request_.set_logits(std::string(32 * 128 * 2, '\0'));
    for (int row = 0; row < 32; ++row) {
      request_.add_temperature(0);
      request_.add_top_logprobs(128);
    }
  }

  // Leaves so much room to others.
  void LeaveRoom(int64_t bytes) {
    // The call before may hold its room a little longer than its client waits.
    ASSERT_TRUE(Becomes([&] { return admission_.callers() == 0; }));
    auto entry = admission_.Enter({.bytes = kMaxMessage - bytes}, nullptr);
    ASSERT_TRUE(entry.answer.has_value() && entry.answer->ok());
    mine_ = *std::move(*entry.answer);
  }
  bool MessageWaits() {
    return Becomes([&] { return metrics_.Get(engine::Gauge::kWaitingCalls) == 1; });
  }

  const std::shared_ptr<grpc::Channel> channel_ = Start();
  std::unique_ptr<v1::Sampler::Stub> stub_;
  v1::SampleRequest request_;
  std::optional<engine::Admission::Ticket> mine_;
};

TEST_F(StreamRoomTest, AMessageThatWaitsForMoreRoomIsAnsweredWhenThereIsSome) {
  for (const bool end : {false, true}) {  // the client may send no more while it waits
    SCOPED_TRACE(end);
    LeaveRoom(kMessageRoom);
    grpc::ClientContext context;
    const auto stream = stub_->SampleStream(&context);
    ASSERT_TRUE(stream->Write(request_));
    ASSERT_TRUE(MessageWaits());
    if (end) stream->WritesDone();
    mine_.reset();
    v1::SampleResponse answer;
    EXPECT_TRUE(stream->Read(&answer));
    EXPECT_EQ(answer.tokens_size(), 32);
    if (!end) stream->WritesDone();
    EXPECT_TRUE(stream->Finish().ok());
  }
}

TEST_F(StreamRoomTest, ACancelWhileItWaitsLeavesNothing) {
  for (const int64_t room : {kMessageRoom, int64_t{1} << 10}) {  // for the answer; for the message
    SCOPED_TRACE(room);
    LeaveRoom(room);
    grpc::ClientContext context;
    const auto stream = stub_->SampleStream(&context);
    ASSERT_TRUE(stream->Write(request_));
    ASSERT_TRUE(MessageWaits());
    context.TryCancel();
    EXPECT_EQ(stream->Finish().error_code(), grpc::StatusCode::CANCELLED);
    EXPECT_TRUE(Becomes([&] { return metrics_.Get(engine::Gauge::kWaitingCalls) == 0; }));
    EXPECT_TRUE(Becomes([&] { return metrics_.Get(engine::Gauge::kOpenStreams) == 0; }));
    EXPECT_EQ(admission_.callers(), 1);  // this test
    mine_.reset();
    // LeakSanitizer: the message and the stream do not keep each other.
  }
}

}  // namespace
}  // namespace logitd::rpc
