// No peer holds more than its share: slow, silent and idle peers beside an honest caller, and what
// calls state about themselves.
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "logitd/v1/sampler.grpc.pb.h"
#include "tests/e2e/elements.h"
#include "tests/e2e/peers.h"
#include "tests/e2e/server_process.h"
#include "tests/e2e/topk_calls.h"

namespace logitd::e2e {
namespace {

using ::testing::HasSubstr;

constexpr uint32_t kLargest = 8 << 20;

// Room for 15 messages of 8 MiB and their small fields.
const std::vector<std::string> kSomeRoom = {"--max-request-bytes=8MiB", "--slab-bytes=8MiB",
                                            "--max-batch-rows=1024", "--max-held-bytes=128MiB"};

std::string Refused(const std::string& reason) {
  return absl::StrCat("logitd_refused_total{identity=\"none\",reason=\"", reason, "\"}");
}

// A message of a SampleStream.
std::string Greedy(const std::vector<float>& logits, int64_t rows) {
  auto request = Of<v1::SampleRequest>(logits, rows);
  request.add_temperature(0);
  return request.SerializeAsString();
}

// Small calls on a connection of their own: each must succeed.
void ExpectServed(const ServerProcess& server, int calls) {
  const auto channel = Connect(server.tcp());
  for (int i = 0; i < calls; ++i) {
    const grpc::Status status = SmallTopK(channel, absl::Seconds(10));
    EXPECT_TRUE(status.ok()) << i << ": " << status.error_message();
    if (!status.ok()) return;
  }
}

TEST(FairnessTest, PeersThatSendAByteOfTheirMessageDoNotKeepOthersOut) {
  const ServerProcess server(kSomeRoom);
  std::deque<BarePeer> slow;
  for (int i = 0; i < 20; ++i) {
    slow.emplace_back(server.port());
    slow.back().SendHeaders(kTopK);
    slow.back().SendMessage(kLargest, "x", /*end_stream=*/false);
  }
  ASSERT_TRUE(server.WaitForMetric(kWaitingCalls, '>', 0));
  ExpectServed(server, 20);
  EXPECT_TRUE(server.WaitForMetric(Refused("slow_receive"), '>', 10));
}

TEST(FairnessTest, HeadersWithoutMessagesOnOneConnectionDoNotKeepOthersOut) {
  const ServerProcess server(kSomeRoom);
  const auto channel = Connect(server.tcp());
  std::deque<AskingCall> silent;
  for (int i = 0; i < 1100; ++i) silent.emplace_back(channel, kTopK, kLargest);
  ASSERT_TRUE(server.WaitForMetric(Refused("caller_share"), '>', 500));
  EXPECT_LE(server.Metric(kWaitingCalls), 512);
  ExpectServed(server, 20);
}

TEST(FairnessTest, HeadersThatStateNoSizeHoldNothingAndWaitForNothing) {
  const ServerProcess server(kSomeRoom);
  const auto channel = Connect(server.tcp());
  std::deque<GenericCall> silent;
  for (int i = 0; i < 1100; ++i) {
    silent.emplace_back(channel, i % 2 == 0 ? kTopK : "/logitd.v1.Sampler/SampleStream");
    ASSERT_TRUE(silent.back().Start());
  }
  ASSERT_TRUE(server.WaitForMetric("logitd_open_calls", '=', 1100));
  EXPECT_EQ(server.Metric(kHeldBytes), 0);
  EXPECT_EQ(server.Metric(kWaitingCalls), 0);
  ExpectServed(server, 20);
}

TEST(FairnessTest, IdleStreamsHoldNoRoom) {
  const ServerProcess server(kSomeRoom);
  const std::string message = Greedy(std::vector<float>(1'900'000, 0.0f), 2);
  std::deque<GenericCall> idle;
  for (int i = 0; i < 20; ++i) {
    idle.emplace_back(Connect(server.tcp()), "/logitd.v1.Sampler/SampleStream");
    ASSERT_TRUE(idle.back().Start());
    ASSERT_TRUE(idle.back().Write(ToBuffer(message)));
    grpc::ByteBuffer answer;
    ASSERT_TRUE(idle.back().Read(&answer)) << idle.back().Finish().error_message();
  }
  EXPECT_TRUE(server.WaitForMetric(kHeldBytes, '=', 0));
  for (GenericCall& stream : idle) {
    grpc::ByteBuffer answer;
    ASSERT_TRUE(stream.Write(ToBuffer(message), /*last=*/true));
    ASSERT_TRUE(stream.Read(&answer));
    EXPECT_FALSE(stream.Read(&answer));
    EXPECT_TRUE(stream.Finish().ok());
  }
  EXPECT_EQ(server.Metric(Refused("slow_receive")), 0);
}

// --- what calls state

grpc::Status StatedTopK(const ServerProcess& server, const std::string& name,
                        const std::string& value, const v1::TopKRequest& request,
                        v1::TopKResponse* response) {
  grpc::ClientContext context;
  context.set_deadline(absl::ToChronoTime(absl::Now() + absl::Seconds(5)));
  context.AddMetadata(name, value);
  return v1::Sampler::NewStub(Connect(server.tcp()))->TopK(&context, request, response);
}

TEST(FairnessTest, StatedSizesAndPrioritiesAreChecked) {
  const ServerProcess server(kSomeRoom);
  const v1::TopKRequest request = Request({1, 2}, 1, 1);
  const int64_t bytes = static_cast<int64_t>(request.ByteSizeLong());
  const int64_t most = (8 << 20) + (64 << 10) + 128 * 1024;
  const struct {
    const char* name;
    std::string value;
    std::string error;  // empty: OK
  } kCases[] = {
      {"logitd-priority", "interactive", ""},
      {"logitd-priority", "batch", ""},
      {"logitd-priority", "urgent",
       "logitd-priority: got \"urgent\", allowed interactive or batch"},
      {"logitd-payload-bytes", absl::StrCat(bytes), ""},
      {"logitd-payload-bytes", absl::StrCat(bytes + 1), ""},
      {"logitd-payload-bytes", absl::StrCat(most), ""},
      {"logitd-payload-bytes", absl::StrCat(bytes - 1),
       absl::StrCat("logitd-payload-bytes: got ", bytes - 1, ", allowed the size of the message, ",
                    bytes, ", or more")},
      {"logitd-payload-bytes", "-1",
       absl::StrCat("logitd-payload-bytes: got \"-1\", allowed 0..", most)},
      {"logitd-payload-bytes", "12x",
       absl::StrCat("logitd-payload-bytes: got \"12x\", allowed 0..", most)},
      {"logitd-payload-bytes", absl::StrCat(most + 1),
       absl::StrCat("logitd-payload-bytes: got \"", most + 1, "\", allowed 0..", most)},
      {"logitd-payload-bytes", "99999999999999999999",
       absl::StrCat("logitd-payload-bytes: got \"99999999999999999999\", allowed 0..", most)},
  };
  for (const auto& [name, value, error] : kCases) {
    SCOPED_TRACE(absl::StrCat(name, ": ", value));
    v1::TopKResponse response;
    const grpc::Status status = StatedTopK(server, name, value, request, &response);
    EXPECT_EQ(status.error_message(), error);
    EXPECT_EQ(status.error_code(),
              error.empty() ? grpc::StatusCode::OK : grpc::StatusCode::INVALID_ARGUMENT);
  }
  EXPECT_TRUE(server.WaitForMetric(kHeldBytes, '=', 0));
}

TEST(FairnessTest, AStreamEndsAtAMessageLargerThanStated) {
  const ServerProcess server(kSomeRoom);
  const std::string message = Greedy({1, 2}, 1);
  GenericCall stream(Connect(server.tcp()), "/logitd.v1.Sampler/SampleStream");
  stream.context().AddMetadata("logitd-payload-bytes", absl::StrCat(message.size()));
  ASSERT_TRUE(stream.Start());
  grpc::ByteBuffer answer;
  ASSERT_TRUE(stream.Write(ToBuffer(message)));
  ASSERT_TRUE(stream.Read(&answer));
  const std::string larger = Greedy({1, 2, 3}, 1);
  ASSERT_TRUE(stream.Write(ToBuffer(larger)));
  EXPECT_FALSE(stream.Read(&answer));
  const grpc::Status status = stream.Finish();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(status.error_message(),
            absl::StrCat("logitd-payload-bytes: got ", message.size(),
                         ", allowed the size of the message, ", larger.size(), ", or more"));
}

TEST(FairnessTest, AnAnswerMayNeedMoreThanTheStatedMessage) {
  const ServerProcess server(kSomeRoom);
  const std::vector<float> logits = Normal(100'000, 3);
  v1::TopKRequest request = Request(logits, 1, 100'000);  // the answer is twice the message
  v1::TopKResponse response;
  const grpc::Status status = StatedTopK(server, "logitd-payload-bytes",
                                         absl::StrCat(request.ByteSizeLong()), request, &response);
  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(response.indices_size(), 100'000);
  EXPECT_TRUE(server.WaitForMetric(kHeldBytes, '=', 0));
}

// All room except the part for small calls is held by calls of many connections.
TEST(FairnessTest, ASmallCallNeedNotWaitWhetherItStatesItsSizeOrNot) {
  const ServerProcess server(With(kSomeRoom, {"--min-receive-rate=0"}));
  std::deque<AskingCall> large;
  for (int i = 0; i < 20; ++i) large.emplace_back(Connect(server.tcp()), kTopK, kLargest);
  ASSERT_TRUE(server.WaitForMetric(kWaitingCalls, '>', 0));
  const v1::TopKRequest request = Request({1, 2}, 1, 1);
  v1::TopKResponse response;
  EXPECT_TRUE(StatedTopK(server, "logitd-payload-bytes", absl::StrCat(request.ByteSizeLong()),
                         request, &response)
                  .ok());
  EXPECT_TRUE(SmallTopK(Connect(server.tcp())).ok());
  grpc::ClientContext context;
  context.set_deadline(absl::ToChronoTime(absl::Now() + absl::Milliseconds(300)));
  EXPECT_EQ(TopKInAllTheRoom(Connect(server.tcp()), &context).error_code(),
            grpc::StatusCode::DEADLINE_EXCEEDED);
}

}  // namespace
}  // namespace logitd::e2e
