// The start and the end of the server: flags, drains, signals.
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "absl/time/clock.h"
#include "logitd/v1/sampler.grpc.pb.h"
#include "logitd/v1/server.grpc.pb.h"
#include "tests/e2e/elements.h"
#include "tests/e2e/peers.h"
#include "tests/e2e/raw_peer.h"
#include "tests/e2e/server_process.h"
#include "tests/e2e/topk_calls.h"

namespace logitd::e2e {
namespace {

using ::testing::AnyOf;
using ::testing::HasSubstr;
using ::testing::Not;

TEST(LifeTest, ADrainFinishesAdmittedCallsAndRefusesOthers) {
  ServerProcess server(kRoomForOne);
  const auto channel = Connect(server.tcp());
  AdmittedCall admitted(server, channel);
  AskingCall waits(channel);
  ASSERT_TRUE(server.WaitForMetric(kWaitingCalls, '=', 1));

  server.Signal(SIGTERM);
  ASSERT_TRUE(server.WaitForMetric("logitd_draining", '=', 1));
  grpc::ByteBuffer answer;
  EXPECT_FALSE(waits.Read(&answer));
  EXPECT_EQ(waits.Finish().error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_EQ(SmallTopK(channel).error_code(), grpc::StatusCode::UNAVAILABLE);
  GenericCall health(channel, "/grpc.health.v1.Health/Check");
  ASSERT_TRUE(health.Unary(ToBuffer(""), &answer).ok());
  EXPECT_EQ(ToString(answer), "\x08\x02");  // NOT_SERVING
  grpc::ClientContext context;
  v1::GetInfoResponse info;
  ASSERT_TRUE(v1::Server::NewStub(channel)->GetInfo(&context, {}, &info).ok());
  EXPECT_TRUE(info.draining());

  const std::vector<float> logits = {1, 3, 2};
  ASSERT_TRUE(admitted.Write(ToBuffer(Request(logits, 1, 3).SerializeAsString()), /*last=*/true));
  ASSERT_TRUE(admitted.Read(&answer));
  EXPECT_TRUE(admitted.Finish().ok());
  v1::TopKResponse response;
  ASSERT_TRUE(response.ParseFromString(ToString(answer)));
  ExpectRight(logits, 1, {3}, {}, response);
  EXPECT_EQ(server.Wait(kPatience), 0) << server.Log();
}

TEST(LifeTest, ASecondSignalEndsTheDrain) {
  ServerProcess server(With(kRoomForOne, {"--drain-grace=1h"}));
  const auto channel = Connect(server.tcp());
  AdmittedCall stalls(server, channel);
  server.Signal(SIGINT);
  ASSERT_TRUE(server.WaitForMetric("logitd_draining", '=', 1));
  EXPECT_FALSE(server.Wait(absl::Milliseconds(300)).has_value()) << "did not wait for the call";
  server.Signal(SIGTERM);
  EXPECT_EQ(server.Wait(kPatience), 0) << server.Log();
}

TEST(LifeTest, TheEndOfTheGraceCutsCallsShort) {
  ServerProcess server({"--drain-grace=200ms", "--max-batch-delay=1m"});
  GenericCall waits(Connect(server.tcp()), kTopK);  // its queue is not due
  ASSERT_TRUE(waits.Start());
  ASSERT_TRUE(waits.Write(ToBuffer(Request({1, 2}, 1, 1).SerializeAsString()), /*last=*/true));
  ASSERT_TRUE(server.WaitForMetric("logitd_queued_jobs", '=', 1));
  server.Signal(SIGTERM);
  EXPECT_EQ(server.Wait(kPatience), 0) << server.Log();
  EXPECT_THAT(server.Log(), HasSubstr("1 calls cut short"));
  EXPECT_EQ(waits.Finish().error_code(), grpc::StatusCode::UNAVAILABLE);
}

TEST(LifeTest, MessagesThatNeverArriveGetATenthOfTheGrace) {
  ServerProcess server({"--drain-grace=8s", "--receive-timeout=inf"});
  std::vector<std::unique_ptr<BarePeer>> peers;
  for (int i = 0; i < 10; ++i) {
    peers.push_back(std::make_unique<BarePeer>(server.port()));
    peers.back()->SendHeaders(kTopK);
    peers.back()->SendMessage(64 << 20, "\x10\x01", /*end_stream=*/false);
  }
  ASSERT_TRUE(server.WaitForMetric(kHeldBytes, '>', 670'000'000));  // all ten: 64 MiB each
  server.Signal(SIGTERM);
  EXPECT_TRUE(
      peers[0]->WaitForText("draining and did not receive the message within 800ms", kPatience));
  EXPECT_EQ(server.Wait(kPatience), 0) << server.Log();
  EXPECT_THAT(server.Log(), HasSubstr(" 0 calls cut short"));
}

TEST(LifeTest, HealthWatchersSeeTheDrainAndDoNotDelayIt) {
  ServerProcess server({"--drain-grace=10m"});
  GenericCall watch(Connect(server.tcp()), "/grpc.health.v1.Health/Watch");
  ASSERT_TRUE(watch.Start());
  ASSERT_TRUE(watch.Write(ToBuffer(""), /*last=*/true));
  grpc::ByteBuffer answer;
  ASSERT_TRUE(watch.Read(&answer));
  EXPECT_EQ(ToString(answer), "\x08\x01");
  server.Signal(SIGTERM);
  ASSERT_TRUE(watch.Read(&answer));
  EXPECT_EQ(ToString(answer), "\x08\x02");
  EXPECT_EQ(server.Wait(kPatience), 0) << server.Log();
}

TEST(LifeTest, ADrainUnderLoadAnswersEveryCall) {
  ServerProcess server;
  std::atomic<int> ok{0};
  std::atomic<int> refused{0};
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&] {
      const auto channel = Connect(server.tcp());
      const v1::TopKRequest request = Request(Normal(4 * 5000, 1), 4, 10);
      for (int i = 0; i < 100000; ++i) {
        v1::TopKResponse response;
        const grpc::Status status = TopK(channel, request, &response);
        if (!status.ok()) {
          EXPECT_EQ(status.error_code(), grpc::StatusCode::UNAVAILABLE) << status.error_message();
          ++refused;
          return;
        }
        ++ok;
      }
    });
  }
  absl::SleepFor(absl::Milliseconds(300));
  server.Signal(SIGTERM);
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(server.Wait(kPatience), 0) << server.Log();
  EXPECT_GT(ok.load(), 0);
  EXPECT_EQ(refused.load(), 4);
  EXPECT_THAT(server.Log(), HasSubstr(" 0 calls cut short"));
}

TEST(LifeTest, CallsThatComeAtTheEndAreUnavailable) {
  ServerProcess server({"--max-head-bytes=1"});  // no warning on a machine with little memory
  std::atomic<bool> over{false};
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 6; ++thread) {
    threads.emplace_back([&, thread] {
      const std::string address = thread % 2 == 0 ? server.tcp() : server.unix_socket();
      auto channel = Connect(address);
      const v1::TopKRequest request = Request(Normal(1000, 1), 1, 10);
      while (!over) {
        if (thread < 2)
          channel = Connect(address);  // new connections; the other threads keep theirs
        v1::TopKResponse response;
        const grpc::Status status = TopK(channel, request, &response);
        EXPECT_THAT(status.error_code(), AnyOf(grpc::StatusCode::OK, grpc::StatusCode::UNAVAILABLE))
            << status.error_message();
      }
    });
  }
  absl::SleepFor(absl::Milliseconds(100));
  server.Signal(SIGTERM);
  EXPECT_EQ(server.Wait(kPatience), 0) << server.Log();
  over = true;
  for (std::thread& thread : threads) thread.join();
  EXPECT_THAT(server.Log(), Not(HasSubstr("warn")));
}

// Wrong values of flags are in tests/rpc/config_test.cc.
TEST(UsageTest, ExitsWithTheCodeAndTheReason) {
  const struct {
    std::vector<std::string> flags;
    int exit_code;
    const char* text;
  } kCases[] = {
      {{"--help"}, 0, "--max-held-bytes"},
      {{"--version"}, 0, "logitd 0."},
      {{"--frobnicate"}, 2, "--frobnicate"},
      {{"--slab-bytes=1MiB"}, 2, "--slab-bytes"},
      {{"--backend=cpu", "--insecure", "--listen=192.0.2.1:7450", "--metrics-listen=off"},
       1,
       "192.0.2.1:7450"},
  };
  for (const auto& [flags, exit_code, text] : kCases) {
    const Ended ended = RunToEnd(flags);
    EXPECT_EQ(ended.exit_code, exit_code) << ended.text;
    EXPECT_THAT(ended.text, HasSubstr(text));
  }
}

TEST(LifeTest, UnfinishedRequestsDoNotKeepAScrapeWaiting) {
  ServerProcess server;
  std::vector<int> peers;
  for (int i = 0; i < 500; ++i) {
    peers.push_back(ConnectSocket(server.metrics_port()));
    const std::string_view half = "GET /metrics HTTP/1.1\r\nHost:";
    send(peers.back(), half.data(), half.size(), MSG_NOSIGNAL);
  }
  EXPECT_EQ(server.Metric("logitd_draining"), 0);
  char byte;
  EXPECT_EQ(recv(peers.back(), &byte, 1, MSG_DONTWAIT), -1) << "the scrape waited for its end";
  for (const int fd : peers) close(fd);
}

TEST(LifeTest, APeerCannotForgeLogLinesOrFillTheLog) {
  const std::string forged = "x\n2026-01-01 00:00:00.000 error forged \xff";
  for (const std::string format : {"text", "json"}) {
    ServerProcess server({"--log-format=" + format});
    BarePeer peer(server.port());
    uint32_t stream = 1;
    for (int i = 0; i < 500; ++i) {
      for (const char* name : {"grpc-timeout", "x-request-id", "logitd-priority", "user-agent"}) {
        peer.SendHeaders(kTopK, {{name, forged}}, stream);
        stream += 2;
      }
    }
    for (int i = 0; i < 300; ++i) {  // each end has a line, if the limit allows it
      RawPeer broken(server.port());
      broken.Send(Frame(kData, 0, /*stream=*/1, forged));
      EXPECT_TRUE(broken.EndsWithin(kPatience));
    }
    EXPECT_TRUE(
        server.WaitForMetric("logitd_log_lines_suppressed_total{source=\"connections\"}", '>', 0));
    absl::SleepFor(absl::Seconds(1.2));
    const std::string log = server.Log();
    EXPECT_THAT(log, HasSubstr("it broke the protocol"));
    EXPECT_THAT(log, Not(HasSubstr("\n2026-01-01")));
    EXPECT_THAT(log, Not(HasSubstr("\xff")));
    EXPECT_THAT(log, HasSubstr("log lines of connections: more than 20 a second"));
    EXPECT_LT(std::count(log.begin(), log.end(), '\n'), 300);
  }
}

}  // namespace
}  // namespace logitd::e2e
