// The server as its callers see it: a process, sockets, protobuf. The clients use none of our code.
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <limits>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "logitd/v1/attention.pb.h"
#include "logitd/v1/sampler.grpc.pb.h"
#include "logitd/v1/scorer.pb.h"
#include "logitd/v1/server.grpc.pb.h"
#include "tests/e2e/elements.h"
#include "tests/e2e/peers.h"
#include "tests/e2e/server_process.h"
#include "tests/e2e/shared_server.h"
#include "tests/e2e/topk_calls.h"

namespace logitd::e2e {
namespace {

using ::testing::AnyOf;
using ::testing::HasSubstr;

constexpr int64_t kMiB = int64_t{1} << 20;

// --- right answers

using TransportTest = BothTransportsTest;
INSTANTIATE_TEST_SUITE_P(All, TransportTest, ::testing::Bool(), TransportName);

using BareTest = SharedServerTest;

TEST_P(TransportTest, AnswersAreRight) {
  for (const auto& [rows, vocab] :
       {std::pair<int64_t, int64_t>{1, 1}, {1, 1000}, {7, 333}, {3, 50257}}) {
    const std::vector<float> logits = Normal(static_cast<size_t>(rows * vocab), 11);
    const int k = static_cast<int>(std::min<int64_t>(vocab, 20));
    v1::TopKResponse response;
    const grpc::Status status = TopK(channel_, Request(logits, rows, k), &response);
    ASSERT_TRUE(status.ok()) << status.error_message();
    ExpectRight(logits, rows, {k}, {}, response);
  }
}

TEST_P(TransportTest, EveryRowHasItsKAndTemperature) {
  const std::vector<float> logits = Normal(4 * 1000, 12);
  const std::vector<int> k = {1, 1000, 3, 64};
  const std::vector<float> temperature = {0.5f, 1.0f, 2.0f, 0.1f};
  v1::TopKRequest request = Request(logits, 4, 1);
  request.mutable_k()->Assign(k.begin(), k.end());
  request.mutable_temperature()->Assign(temperature.begin(), temperature.end());
  v1::TopKResponse response;
  ASSERT_TRUE(TopK(channel_, request, &response).ok());
  ExpectRight(logits, 4, k, temperature, response);
}

TEST_P(TransportTest, HalfPrecisionLogitsAreRead) {
  // bf16 and f16 hold these values exactly.
  std::vector<float> logits(64);
  for (size_t i = 0; i < logits.size(); ++i) logits[i] = static_cast<float>((i * 29) % 64) / 4.0f;
  for (const v1::DType dtype : {v1::DTYPE_BF16, v1::DTYPE_F16}) {
    v1::TopKRequest request = Request(logits, 2, 5);
    request.set_dtype(dtype);
    request.set_logits(Encode(dtype, {logits.begin(), logits.end()}));
    v1::TopKResponse response;
    const grpc::Status status = TopK(channel_, request, &response);
    ASSERT_TRUE(status.ok()) << status.error_message();
    ExpectRight(logits, 2, {5}, {}, response);
  }
}

TEST_P(TransportTest, ABadRowAffectsNoOtherRow) {
  std::vector<float> logits = Normal(3 * 100, 13);
  logits[100 + 42] = std::numeric_limits<float>::quiet_NaN();
  v1::TopKResponse response;
  ASSERT_TRUE(TopK(channel_, Request(logits, 3, 2), &response).ok());
  EXPECT_EQ(response.status(0), v1::ROW_STATUS_OK);
  EXPECT_EQ(response.status(1), v1::ROW_STATUS_NAN_LOGIT);
  EXPECT_EQ(response.status_position(1), 42);
  EXPECT_EQ(response.status(2), v1::ROW_STATUS_OK);
}

TEST_P(TransportTest, TimingsAddUp) {
  v1::TopKResponse response;
  const absl::Time start = absl::Now();
  ASSERT_TRUE(TopK(channel_, Request(Normal(8 * 50257, 1), 8, 5), &response).ok());
  const int64_t wall = absl::ToInt64Nanoseconds(absl::Now() - start);
  const v1::Timings& t = response.timings();
  EXPECT_GT(t.copy_ns(), 0);
  EXPECT_GT(t.kernel_ns(), 0);
  EXPECT_GE(t.receive_ns(), 0);
  EXPECT_EQ(t.h2d_ns(), 0);
  EXPECT_GE(t.batch_rows(), 8);
  EXPECT_LE(t.receive_ns() + t.copy_ns() + t.queue_ns() + t.kernel_ns(), t.total_ns());
  EXPECT_LE(t.total_ns(), wall);
}

TEST_P(TransportTest, BadRequestsAreRefusedWithTheirReason) {
  v1::TopKRequest request = Request({1, 2, 3, 4}, 2, 3);
  v1::TopKResponse response;
  grpc::Status status = TopK(channel_, request, &response);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(status.error_message(), HasSubstr("k"));
  request.set_k(0, 1);
  request.set_rows(3);
  status = TopK(channel_, request, &response);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(status.error_message(), HasSubstr("logits"));

  GenericCall malformed(channel_, kTopK);
  grpc::ByteBuffer answer;
  status = malformed.Unary(ToBuffer("\x10\x01\x7a\x7fxyz"), &answer);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(status.error_message(), HasSubstr("logits at byte 2"));
}

TEST_P(TransportTest, AUnaryCallHasExactlyOneRequestMessage) {
  const grpc::ByteBuffer message = ToBuffer(Request(Normal(1000, 1), 1, 1).SerializeAsString());
  grpc::ByteBuffer answer;
  GenericCall none(channel_, kTopK);
  ASSERT_TRUE(none.Start());
  none.WritesDone();
  EXPECT_FALSE(none.Read(&answer));
  EXPECT_EQ(none.Finish().error_code(), grpc::StatusCode::UNIMPLEMENTED);

  // Two messages at once: refused, or answered as one if the answer was faster.
  GenericCall two(channel_, kTopK);
  ASSERT_TRUE(two.Start());
  if (two.Write(message)) two.Write(message, /*last=*/true);
  two.Read(&answer);
  const grpc::Status status = two.Finish();
  EXPECT_THAT(status.error_code(), AnyOf(grpc::StatusCode::UNIMPLEMENTED, grpc::StatusCode::OK));
}

TEST_P(TransportTest, CompressedMessagesAreRefused) {
  for (const grpc_compression_algorithm algorithm : {GRPC_COMPRESS_GZIP, GRPC_COMPRESS_DEFLATE}) {
    grpc::ClientContext context;
    context.set_compression_algorithm(algorithm);
    v1::TopKResponse response;
    const grpc::Status status = v1::Sampler::NewStub(channel_)->TopK(
        &context, Request(std::vector<float>(4096), 1, 1), &response);
    EXPECT_EQ(status.error_code(), grpc::StatusCode::UNIMPLEMENTED) << status.error_message();
  }
}

// The mark on the message decides, not the header that names an encoding.
TEST_F(BareTest, AMessageMarkedAsCompressedIsNeverReadAsPlain) {
  const std::string request = Request({1, 2}, 1, 1).SerializeAsString();
  const auto size = static_cast<uint32_t>(request.size());
  for (const std::string encoding : {"", "identity", "snappy", "zstd"}) {
    for (const std::string method :
         {kTopK, "/logitd.v1.Sampler/SampleStream", "/logitd.v1.Server/GetInfo"}) {
      BarePeer peer(server_->port());
      if (encoding.empty()) {
        peer.SendHeaders(method);
      } else {
        peer.SendHeaders(method, {{"grpc-encoding", encoding}});
      }
      peer.SendMessage(size, request, /*end_stream=*/true, /*marked_compressed=*/true);
      EXPECT_TRUE(peer.WaitForText("marked as compressed", kPatience)) << method << " " << encoding;
    }
  }
}

TEST_F(BareTest, ATruncatedMessageIsCalledSo) {
  for (const std::string method : {kTopK, "/logitd.v1.Server/GetInfo", "/logitd.v1.Heads/Get"}) {
    BarePeer peer(server_->port());
    peer.SendHeaders(method);
    peer.SendMessage(5000, "\x10\x01", /*end_stream=*/true);
    EXPECT_TRUE(peer.WaitForText("truncated", kPatience)) << method;
  }
}

TEST_F(BareTest, ADeadlineOfManyThousandYearsIsNone) {
  const std::string request = Request({1, 2}, 1, 1).SerializeAsString();
  for (const char* timeout : {"2562047H", "2562048H", "99999999H", "99999999M"}) {
    BarePeer peer(server_->port());
    peer.SendHeaders(kTopK, {{"grpc-timeout", timeout}});
    peer.SendMessage(static_cast<uint32_t>(request.size()), request, /*end_stream=*/true);
    EXPECT_TRUE(peer.WaitForFrame(kData, kPatience)) << timeout;  // the answer
  }
}

TEST_P(TransportTest, InfoHealthAndReflectionDescribeTheServices) {
  grpc::ClientContext context;
  v1::GetInfoResponse info;
  ASSERT_TRUE(v1::Server::NewStub(channel_)->GetInfo(&context, {}, &info).ok());
  EXPECT_EQ(info.backend(), "cpu");
  EXPECT_FALSE(info.version().empty());
  EXPECT_EQ(info.grpc_version(), absl::StrCat("nghttp2 ", nghttp2_version(0)->version_str));
  EXPECT_FALSE(info.draining());
  EXPECT_EQ(info.limits().max_request_bytes(), 64 * kMiB);
  EXPECT_EQ(info.limits().max_vocab(), 1 << 20);
  EXPECT_EQ(info.limits().max_keys(), 1 << 20);

  // Info names the methods that the proto files declare, and every op has its metrics.
  std::set<std::string> declared;
  for (const auto* message : {v1::TopKRequest::descriptor(), v1::ScoreRequest::descriptor(),
                              v1::AttentionSoftmaxRequest::descriptor()}) {
    const google::protobuf::ServiceDescriptor* service = message->file()->service(0);
    for (int i = 0; i < service->method_count(); ++i) {
      declared.insert(absl::StrCat(service->full_name(), "/", service->method(i)->name()));
    }
  }
  std::set<std::string> served;
  for (const v1::Op& op : info.ops()) {
    served.insert(op.method());
    EXPECT_EQ(op.dtypes_size(), 3) << op.name();
    EXPECT_GE(server_->Metric("logitd_rows_total{op=\"" + op.name() + "\"}"), 0) << op.name();
  }
  EXPECT_EQ(served, declared);

  grpc::ByteBuffer answer;
  for (const std::string service : {"", "logitd.v1.Attention", "logitd.v1.Heads",
                                    "logitd.v1.Sampler", "logitd.v1.Scorer", "logitd.v1.Server"}) {
    const std::string request =
        service.empty()
            ? ""
            : absl::StrCat("\x0a", std::string(1, static_cast<char>(service.size())), service);
    GenericCall check(channel_, "/grpc.health.v1.Health/Check");
    ASSERT_TRUE(check.Unary(ToBuffer(request), &answer).ok()) << service;
    EXPECT_EQ(ToString(answer), "\x08\x01") << service;  // SERVING
  }

  const std::string reflect = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo";
  GenericCall list(channel_, reflect);
  ASSERT_TRUE(list.Unary(ToBuffer(std::string("\x3a\x00", 2)), &answer).ok());
  EXPECT_THAT(ToString(answer), HasSubstr("logitd.v1.Sampler"));
  EXPECT_THAT(ToString(answer), HasSubstr("grpc.health.v1.Health"));
  GenericCall describe(channel_, reflect);
  const std::string symbol = "logitd.v1.Sampler.TopK";
  ASSERT_TRUE(describe
                  .Unary(ToBuffer(absl::StrCat(
                             "\x22", std::string(1, static_cast<char>(symbol.size())), symbol)),
                         &answer)
                  .ok());
  EXPECT_THAT(ToString(answer), HasSubstr("TopKRequest"));
  EXPECT_THAT(ToString(answer), HasSubstr("temperature"));
}

// --- many callers

TEST(LoadTest, ConcurrentCallersShareBatchesAndGetTheirOwnAnswers) {
  ServerProcess server({"--max-batch-delay=2ms"});
  constexpr int kThreads = 12;
  constexpr int kCalls = 30;
  std::atomic<int> shared{0};
  std::vector<std::thread> threads;
  for (int thread = 0; thread < kThreads; ++thread) {
    threads.emplace_back([&, thread] {
      const auto channel = Connect(thread % 2 == 0 ? server.tcp() : server.unix_socket());
      for (int call = 0; call < kCalls; ++call) {
        const int rows = 1 + (thread + call) % 3;
        const std::vector<float> logits =
            Normal(static_cast<size_t>(rows) * 512, static_cast<uint32_t>(thread * 100 + call));
        v1::TopKResponse response;
        const grpc::Status status = TopK(channel, Request(logits, rows, 1 + call % 7), &response);
        ASSERT_TRUE(status.ok()) << status.error_message();
        ExpectRight(logits, rows, {1 + call % 7}, {}, response);
        shared += response.timings().batch_rows() > rows;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_GT(shared.load(), 0) << "no batch was shared";
  EXPECT_EQ(server.Metric(Requests("OK")), kThreads * kCalls);
  EXPECT_LT(server.Metric("logitd_batches_total{op=\"softmax_topk\"}"), kThreads * kCalls);
  EXPECT_TRUE(server.WaitForMetric(kHeldBytes, '=', 0));
}

// A stream is woken while a payload of this size is copied.
TEST(LoadTest, ConcurrentCallersOfHalfAMegabyteGetRightAnswers) {
  ServerProcess server;
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 6; ++thread) {
    threads.emplace_back([&, thread] {
      const auto channel = Connect(thread % 2 == 0 ? server.tcp() : server.unix_socket());
      const int rows = 1 + thread % 3;
      const std::vector<float> logits =
          Normal(static_cast<size_t>(rows) * 50257, static_cast<uint32_t>(thread));
      for (int call = 0; call < 30; ++call) {
        v1::TopKResponse response;
        const grpc::Status status = TopK(channel, Request(logits, rows, 5), &response);
        ASSERT_TRUE(status.ok()) << status.error_message();
        if (call % 10 == 0) ExpectRight(logits, rows, {5}, {}, response);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_TRUE(server.WaitForMetric(kHeldBytes, '=', 0));
}

TEST(LoadTest, MetricsCountCallsRowsAndRefusals) {
  ServerProcess server;
  const auto channel = Connect(server.tcp());
  v1::TopKResponse response;
  for (int i = 0; i < 5; ++i)
    ASSERT_TRUE(TopK(channel, Request(Normal(300, 1), 3, 1), &response).ok());
  EXPECT_FALSE(TopK(channel, Request({1, 2}, 1, 3), &response).ok());
  EXPECT_EQ(server.Metric(Requests("OK")), 5);
  EXPECT_EQ(server.Metric(Requests("INVALID_ARGUMENT")), 1);
  // Rows are counted once per batch, after its calls are answered.
  EXPECT_TRUE(server.WaitForMetric("logitd_rows_total{op=\"softmax_topk\"}", '=', 15));
  EXPECT_EQ(server.Metric("logitd_refused_total{identity=\"none\",reason=\"invalid\"}"), 1);
  EXPECT_EQ(server.Metric("logitd_request_seconds_count{op=\"softmax_topk\"}"), 6);
  EXPECT_EQ(server.Metric("logitd_draining"), 0);
}

TEST(LoadTest, CancelledCallsFreeEverything) {
  ServerProcess server(kRoomForOne);
  for (int round = 0; round < 5; ++round) {
    ManyCalls calls(server.tcp(), 8);
    for (int i = 0; i < 8; ++i) calls.Start(i, LargeRequest(30));
    absl::SleepFor(absl::Milliseconds(1 + 4 * round));
    calls.CancelAll();
    for (const grpc::Status& status : calls.WaitAll()) {
      EXPECT_THAT(status.error_code(), AnyOf(grpc::StatusCode::CANCELLED, grpc::StatusCode::OK));
    }
  }
  EXPECT_TRUE(server.WaitForMetric(kHeldBytes, '=', 0));
  EXPECT_TRUE(server.WaitForMetric(kWaitingCalls, '=', 0));
  const grpc::Status small = SmallTopK(Connect(server.tcp()));
  EXPECT_TRUE(small.ok()) << small.error_code() << " " << small.error_message();
}

// --- bounded memory

TEST(ResidentMemoryTest, ManyLargeRequestsStayWithinTheFlag) {
  ServerProcess server({"--max-request-bytes=16MiB", "--slab-bytes=16MiB", "--max-batch-rows=1024",
                        "--max-held-bytes=40MiB", "--streams=1"});
  const auto touch = [&] {  // the first use faults the slabs in, which is not measured
    ManyCalls calls(server.tcp(), 4);
    for (int i = 0; i < 4; ++i) calls.Start(i, LargeRequest(64));
    calls.WaitAll();
  };
  touch();
  const int64_t before = server.RssBytes();
  ManyCalls calls(server.tcp(), 64);
  for (int i = 0; i < 64; ++i) calls.Start(i, LargeRequest(64));
  int ok = 0;
  for (const grpc::Status& status : calls.WaitAll()) {
    ok += status.ok();
    EXPECT_THAT(status.error_code(),
                AnyOf(grpc::StatusCode::OK, grpc::StatusCode::RESOURCE_EXHAUSTED))
        << status.error_message();
  }
  EXPECT_EQ(ok, 64);  // they waited in the line, unread
  // 64 x 16 MiB = 1 GiB were sent. The server may hold 40 MiB, 64 KiB for each unread call, and the
  // memory that malloc keeps.
  server.ExpectGrownLess(before, 100);
}

TEST(ResidentMemoryTest, UnreadCallsStayAtThePeer) {
  // The one admitted call sends nothing, and keeps the room.
  ServerProcess server({"--max-request-bytes=64MiB", "--max-batch-rows=1024",
                        "--max-held-bytes=65MiB", "--min-receive-rate=0"});
  const AdmittedCall holder(server, Connect(server.tcp()), 64 * kMiB);
  const int64_t before = server.RssBytes();
  ManyCalls calls(server.tcp(), 32);
  for (int i = 0; i < 32; ++i) calls.Start(i, LargeRequest(256));  // 64 MiB each
  ASSERT_TRUE(server.WaitForMetric(kWaitingCalls, '=', 32));
  absl::SleepFor(absl::Seconds(1));  // enough time to send everything, if the server read it
  server.ExpectGrownLess(before, 24);
  calls.CancelAll();
  calls.WaitAll();
  EXPECT_TRUE(server.WaitForMetric(kWaitingCalls, '=', 0));
}

TEST(MemoryTest, CallsWaitingOnOneConnectionDoNotBlockItsAdmittedCall) {
  ServerProcess server(kRoomForOne);
  const auto channel = Connect(server.tcp());
  AdmittedCall holder(server, channel);
  std::vector<std::thread> waiting;
  for (int i = 0; i < 16; ++i) {
    waiting.emplace_back([&] {
      GenericCall call(channel, kTopK);
      grpc::ByteBuffer answer;
      const grpc::Status status = call.Unary(LargeRequest(20), &answer);
      EXPECT_TRUE(status.ok()) << status.error_code() << " " << status.error_message();
    });
  }
  EXPECT_TRUE(server.WaitForMetric(kWaitingCalls, '=', 16));
  grpc::ByteBuffer answer;
  EXPECT_TRUE(holder.Write(LargeRequest(20), /*last=*/true));
  EXPECT_TRUE(holder.Read(&answer));
  EXPECT_TRUE(holder.Finish().ok());
  for (std::thread& thread : waiting) thread.join();
  EXPECT_EQ(server.Wait(absl::ZeroDuration()), std::nullopt) << server.Log();
}

TEST(ResidentMemoryTest, ACompressedBombIsNotInflated) {
  ServerProcess server;
  const int64_t before = server.RssBytes();
  {
    v1::TopKRequest request;
    request.set_logits(std::string(200 * kMiB, '\0'));
    grpc::ClientContext context;
    context.set_compression_algorithm(GRPC_COMPRESS_GZIP);
    v1::TopKResponse response;
    const grpc::Status status =
        v1::Sampler::NewStub(Connect(server.tcp()))->TopK(&context, request, &response);
    EXPECT_EQ(status.error_code(), grpc::StatusCode::UNIMPLEMENTED) << status.error_message();
  }
  server.ExpectGrownLess(before, 16);
}

TEST(ResidentMemoryTest, OversizedMessagesAreRefusedInBoundedMemory) {
  ServerProcess server(kRoomForOne);
  const int64_t before = server.RssBytes();
  const auto channel = Connect(server.tcp());
  grpc::ByteBuffer answer;
  GenericCall large(channel, kTopK);
  EXPECT_EQ(large.Unary(LargeRequest(40), &answer).error_code(),
            grpc::StatusCode::INVALID_ARGUMENT);
  GenericCall huge(channel, kTopK);  // 1 GiB
  EXPECT_EQ(huge.Unary(LargeRequest(4096), &answer).error_code(),
            grpc::StatusCode::INVALID_ARGUMENT);
  server.ExpectGrownLess(before, 24);
  const grpc::Status small = SmallTopK(Connect(server.tcp()));
  EXPECT_TRUE(small.ok()) << small.error_code() << " " << small.error_message();
}

// Messages that only say that they are large.
TEST(MemoryTest, ACallEndsWhenItsMessageSaysThatItIsTooLarge) {
  ServerProcess server(kRoomForOne);
  const auto other = Connect(server.tcp());
  EXPECT_TRUE(SmallTopK(other).ok());
  BarePeer peer(server.port());
  const std::string_view text = "got 4294967295 bytes, allowed 0..";
  for (const uint32_t stream : {1, 3, 5}) {
    peer.SendHeaders(kTopK, {}, stream);
    peer.SendMessage(4294967295, std::string(1000, 'x'), /*end_stream=*/false,
                     /*marked_compressed=*/false, stream);
    EXPECT_TRUE(peer.WaitForText(text, kPatience)) << stream;
  }
  EXPECT_EQ(server.Metric("logitd_messages_too_large_total"), 3);
  EXPECT_TRUE(server.WaitForMetric(kHeldBytes, '=', 0));
  for (int i = 0; i < 5; ++i) {
    const grpc::Status status = SmallTopK(Connect(server.tcp()));
    EXPECT_TRUE(status.ok()) << status.error_code() << " " << status.error_message();
  }
  EXPECT_TRUE(SmallTopK(other).ok());
}

// Also if a batch and the transport accept more.
TEST(MemoryTest, ThePayloadLimitIsExact) {
  ServerProcess server({"--max-request-bytes=4000", "--slab-bytes=1MiB"});
  const auto channel = Connect(server.tcp());
  v1::TopKResponse response;
  EXPECT_TRUE(TopK(channel, Request(std::vector<float>(1000), 1, 1), &response).ok());
  const grpc::Status status = TopK(channel, Request(std::vector<float>(1001), 1, 1), &response);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(status.error_message(), HasSubstr("got 4004 bytes, allowed 1..4000"));
}

TEST(MemoryTest, ARequestLargerThanABatchIsInvalid) {
  ServerProcess server({"--max-batch-rows=4"});
  v1::TopKResponse response;
  const grpc::Status status =
      TopK(Connect(server.tcp()), Request(std::vector<float>(50), 5, 1), &response);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(status.error_message(), HasSubstr("4"));
}

// --- waiting, deadlines, peers that misbehave

TEST(WaitingTest, AFullLineRefusesWithARetryDelay) {
  ServerProcess server(With(kRoomForOne, {"--max-waiting-calls=1"}));
  const auto channel = Connect(server.tcp());
  AdmittedCall holder(server, channel);
  AskingCall waits(channel);
  ASSERT_TRUE(server.WaitForMetric(kWaitingCalls, '=', 1));
  grpc::ClientContext context;
  const grpc::Status status = TopKInAllTheRoom(channel, &context);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  const auto& trailers = context.GetServerTrailingMetadata();
  const auto delay = trailers.find("grpc-retry-pushback-ms");
  ASSERT_NE(delay, trailers.end());
  EXPECT_GT(std::stoi(std::string(delay->second.data(), delay->second.size())), 0);
}

TEST(WaitingTest, ADeadlineEndsACallInTheLine) {
  ServerProcess server(kRoomForOne);
  const auto channel = Connect(server.tcp());
  AdmittedCall holder(server, channel);
  grpc::ClientContext context;
  context.set_deadline(absl::ToChronoTime(absl::Now() + absl::Milliseconds(100)));
  const grpc::Status status = TopKInAllTheRoom(channel, &context);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::DEADLINE_EXCEEDED);
  EXPECT_TRUE(server.WaitForMetric(kWaitingCalls, '=', 0));
}

TEST(WaitingTest, APeerThatSendsNoMessageLosesItsRoom) {
  ServerProcess server(With(kRoomForOne, {"--receive-timeout=2s", "--min-receive-rate=0"}));
  const auto channel = Connect(server.tcp());
  AdmittedCall stalls(server, channel);
  AskingCall stalls_too(channel);
  ASSERT_TRUE(server.WaitForMetric(kWaitingCalls, '=', 1));
  // Waits for the room longer than a message may take.
  const grpc::Status waited = TopKInAllTheRoom(channel, Context().get());
  EXPECT_TRUE(waited.ok()) << waited.error_message();
  for (AskingCall* call : {static_cast<AskingCall*>(&stalls), &stalls_too}) {
    grpc::ByteBuffer answer;
    EXPECT_FALSE(call->Read(&answer));
    const grpc::Status status = call->Finish();
    EXPECT_EQ(status.error_code(), grpc::StatusCode::DEADLINE_EXCEEDED);
    EXPECT_THAT(status.error_message(), HasSubstr("2s"));
  }
}

TEST(WaitingTest, APeerThatStopsInAMessageLosesItsRoom) {
  ServerProcess server(With(kRoomForOne, {"--receive-timeout=300ms"}));
  BarePeer peer(server.port());
  peer.SendHeaders(kTopK);
  peer.SendMessage(5000, "\x10\x01", /*end_stream=*/false);
  ASSERT_TRUE(server.WaitForMetric(kHeldBytes, '>', 0));
  EXPECT_TRUE(peer.WaitForFrame(kHeaders, kPatience));
  EXPECT_TRUE(server.WaitForMetric(kHeldBytes, '=', 0));
}

TEST(WaitingTest, APeerThatTakesNoAnswerIsCutOff) {
  ServerProcess server(With(kRoomForOne, {"--receive-timeout=300ms"}));
  BarePeer peer(server.port(), /*window=*/0);
  peer.SendHeaders(kTopK);
  const std::string request = Request(Normal(4000, 1), 1, 4000).SerializeAsString();
  peer.SendMessage(static_cast<uint32_t>(request.size()), request, /*end_stream=*/true);
  ASSERT_TRUE(server.WaitForMetric(Requests("OK"), '=', 1));
  EXPECT_GT(server.Metric(kHeldBytes), 0);  // the answer waits for the peer
  EXPECT_TRUE(peer.WaitForFrame(kReset, kPatience));
  EXPECT_TRUE(server.WaitForMetric(kHeldBytes, '=', 0));
}

TEST(WaitingTest, TruncatedMessagesAndLostPeersFreeTheirRoom) {
  ServerProcess server(kRoomForOne);
  {
    BarePeer truncated(server.port());
    truncated.SendHeaders(kTopK);
    truncated.SendMessage(5000, "\x10\x01", /*end_stream=*/true);
    EXPECT_TRUE(truncated.WaitForFrame(kHeaders, kPatience));  // trailers
  }
  for (int i = 0; i < 10; ++i) {
    BarePeer vanishes(server.port());
    vanishes.SendHeaders(kTopK);
    vanishes.SendMessage(5000000, std::string(1000, 'x'), /*end_stream=*/false);
    if (i % 2 == 0) {
      ASSERT_TRUE(server.WaitForMetric(kHeldBytes, '>', 0));
    }
  }
  EXPECT_TRUE(server.WaitForMetric(kHeldBytes, '=', 0));
  // Lost peers count as cancelled, not as peers that sent no message.
  EXPECT_TRUE(server.WaitForMetric(Requests("CANCELLED"), '>', 4));
  EXPECT_LE(server.Metric(Requests("UNIMPLEMENTED")), 1);
  const grpc::Status small = SmallTopK(Connect(server.tcp()));
  EXPECT_TRUE(small.ok()) << small.error_code() << " " << small.error_message();
}

TEST(WaitingTest, ASecondMessageIsRefusedWhileTheFirstWaits) {
  // The batch waits longer than it takes to see the second message.
  ServerProcess server({"--max-batch-delay=2s"});
  GenericCall two(Connect(server.tcp()), kTopK);
  const grpc::ByteBuffer message = ToBuffer(Request({1, 2}, 1, 1).SerializeAsString());
  ASSERT_TRUE(two.Start());
  ASSERT_TRUE(two.Write(message));
  ASSERT_TRUE(two.Write(message, /*last=*/true));
  grpc::ByteBuffer answer;
  EXPECT_FALSE(two.Read(&answer));
  const grpc::Status status = two.Finish();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::UNIMPLEMENTED);
  EXPECT_THAT(status.error_message(), HasSubstr("second"));
}

}  // namespace
}  // namespace logitd::e2e
