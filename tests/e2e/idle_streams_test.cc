// Peers that hold streams and do nothing: what they hold is counted, they lose it first, and others
// are served, probes in any case.
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "logitd/v1/scorer.pb.h"
#include "tests/e2e/peers.h"
#include "tests/e2e/raw_peer.h"
#include "tests/e2e/server_process.h"
#include "tests/e2e/topk_calls.h"

namespace logitd::e2e {
namespace {

constexpr const char* kWatch = "/grpc.health.v1.Health/Watch";
constexpr const char* kCheck = "/grpc.health.v1.Health/Check";
constexpr const char* kScoreStream = "/logitd.v1.Scorer/ScoreStream";
constexpr const char* kReflection = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo";
constexpr const char* kHeldByConnections = "logitd_connection_bytes";
constexpr const char* kCutForMemory = "logitd_connections_cut_total{reason=\"memory\"}";
constexpr absl::Duration kPatience = absl::Seconds(20);

std::string Message(std::string_view bytes) {
  std::string framed(1, '\0');
  AppendBigEndian(&framed, static_cast<uint32_t>(bytes.size()), 4);
  return framed.append(bytes);
}

// `streams` calls of `method`, each with `body`.
std::unique_ptr<RawPeer> Open(const ServerProcess& server, int streams, const char* method,
                              const std::string& body, bool ends) {
  auto peer = std::make_unique<RawPeer>(server.port());
  uint32_t id = 1;
  for (int i = 0; i < streams; ++i, id += 2) {
    std::string frames = Frame(kHeaders, kEndHeaders, id, CallHeaders(method));
    if (!body.empty()) frames += Frame(kData, ends ? kEndStream : 0, id, body);
    if (!peer->Send(frames)) break;
  }
  return peer;
}

std::unique_ptr<RawPeer> OpenWatches(const ServerProcess& server, int streams) {
  return Open(server, streams, kWatch, Message(""), /*ends=*/true);
}

// A small call. While there is no room it is refused, and may come again.
grpc::Status Served(const std::shared_ptr<grpc::Channel>& channel) {
  const absl::Time end = absl::Now() + kPatience;
  grpc::Status status = SmallTopK(channel);
  while (status.error_code() == grpc::StatusCode::RESOURCE_EXHAUSTED && absl::Now() < end) {
    absl::SleepFor(absl::Milliseconds(10));
    status = SmallTopK(channel);
  }
  return status;
}

grpc::Status Probe(const std::string& address) {
  GenericCall check(Connect(address), kCheck, absl::Seconds(10));
  grpc::ByteBuffer answer;
  const grpc::Status status = check.Unary(ToBuffer(""), &answer);
  if (status.ok()) {
    EXPECT_EQ(ToString(answer), "\x08\x01") << "SERVING";
  }
  return status;
}

TEST(IdleStreamsTest, WhoeverHoldsMostIsCutAndNobodyElse) {
  const ServerProcess server({"--max-connection-bytes=16MiB"});
  const auto caller = Connect(server.tcp());
  ASSERT_TRUE(SmallTopK(caller).ok());
  GenericCall honest(Connect(server.tcp()), kWatch);  // as a balancer does
  grpc::ByteBuffer answer;
  ASSERT_TRUE(honest.Start() && honest.Write(ToBuffer("")) && honest.Read(&answer));
  std::vector<std::unique_ptr<RawPeer>> holders;
  for (int i = 0; i < 4; ++i) {
    holders.push_back(OpenWatches(server, 2000));
    const grpc::Status served = Served(caller);
    EXPECT_TRUE(served.ok()) << i << ": " << served.error_message() << server.Log();
  }
  EXPECT_TRUE(server.WaitForMetric(kCutForMemory, '>', 0));
  const grpc::Status served = Served(Connect(server.tcp()));
  EXPECT_TRUE(served.ok()) << served.error_message() << server.Log();
  holders.clear();
  EXPECT_TRUE(server.WaitForMetric("logitd_connections", '=', 2)) << server.Log();
  EXPECT_TRUE(honest.WritesDone());
}

TEST(IdleStreamsTest, StreamsWithoutMessagesKeepNobodyOutOfASmallServer) {
  const ServerProcess server(kRoomForOne);
  std::vector<std::unique_ptr<RawPeer>> holders;
  for (int i = 0; i < 2; ++i) {
    holders.push_back(Open(server, 2000, kScoreStream, "", /*ends=*/false));
    holders.push_back(OpenWatches(server, 2000));
  }
  ASSERT_TRUE(server.WaitForMetric("logitd_open_streams", '=', 4000));
  const auto caller = Connect(server.tcp());
  for (int i = 0; i < 20; ++i) ASSERT_TRUE(SmallTopK(caller).ok()) << i;
  EXPECT_TRUE(SmallTopK(Connect(server.tcp())).ok());
  EXPECT_EQ(server.Metric(kCutForMemory), 0) << "all of it has room";
  holders.clear();
  EXPECT_TRUE(server.WaitForMetric("logitd_open_streams", '=', 0));
  EXPECT_TRUE(SmallTopK(caller).ok());
}

TEST(ResidentMemoryTest, StreamsHoldWhatIsCounted) {
  ServerProcess server;
  ASSERT_TRUE(SmallTopK(Connect(server.tcp())).ok());
  const int64_t before = server.RssBytes();
  ASSERT_TRUE(server.WaitForMetric(kHeldByConnections, '=', 0));
  std::vector<std::unique_ptr<RawPeer>> holders;
  for (const char* method : {kTopK, kScoreStream, "/logitd.v1.Sampler/SampleStream"}) {
    holders.push_back(Open(server, 2000, method, "", /*ends=*/false));
  }
  holders.push_back(OpenWatches(server, 2000));
  ASSERT_TRUE(server.WaitForMetric("logitd_open_calls", '=', 6000));
  const auto counted = static_cast<int64_t>(server.Metric(kHeldByConnections));
  EXPECT_LT(server.RssBytes() - before, counted + (int64_t{8} << 20));
  EXPECT_GT(counted, int64_t{8} << 20);
  holders.clear();
  EXPECT_TRUE(server.WaitForMetric(kHeldByConnections, '=', 0));
}

// A message that a call of the health service says it will send is received into memory that nobody
// admitted.
TEST(ResidentMemoryTest, MessagesThatNobodyAdmitsAreCounted) {
  ServerProcess server({"--max-connection-bytes=32MiB"});
  const auto caller = Connect(server.tcp());
  ASSERT_TRUE(SmallTopK(caller).ok());
  const int64_t before = server.RssBytes();
  std::vector<std::unique_ptr<RawPeer>> holders;
  for (int i = 0; i < 4; ++i) {
    holders.push_back(Open(server, 2000, kCheck, std::string("\0\0\1\0\0", 5), /*ends=*/false));
    EXPECT_TRUE(Served(caller).ok()) << i;
  }
  EXPECT_TRUE(server.WaitForMetric(kCutForMemory, '>', 0));
  server.ExpectGrownLess(before, 64);
}

TEST(ResidentMemoryTest, NamesOfWatchedServicesAreNotKept) {
  ServerProcess server({"--max-connection-bytes=16MiB"});
  const int64_t before = server.RssBytes();
  // A HealthCheckRequest with a name of 16,000 bytes.
  const std::string name = absl::StrCat("\x0a\x80\x7d", std::string(16'000, 'n'));
  std::vector<std::unique_ptr<RawPeer>> holders;
  for (int i = 0; i < 4; ++i) {
    holders.push_back(Open(server, 2000, kWatch, Message(name), /*ends=*/true));
  }
  EXPECT_TRUE(server.WaitForMetric(kCutForMemory, '>', 0));
  EXPECT_TRUE(Served(Connect(server.tcp())).ok());
  server.ExpectGrownLess(before, 48);
}

// Each request of a few bytes asks for an answer of many KiB.
TEST(ResidentMemoryTest, AnswersOfReflectionWaitForTheirReader) {
  ServerProcess server;
  const int64_t before = server.RssBytes();
  const std::string file = "grpc/reflection/v1/reflection.proto";
  const std::string ask =
      absl::StrCat("\x1a", std::string(1, static_cast<char>(file.size())), file);
  std::string asks;
  for (int i = 0; i < 1000; ++i) asks += Message(ask);
  std::vector<std::unique_ptr<RawPeer>> peers;
  for (int i = 0; i < 20; ++i) {
    peers.push_back(Open(server, 20, kReflection, asks, /*ends=*/false));
  }
  EXPECT_TRUE(SmallTopK(Connect(server.tcp())).ok());
  server.ExpectGrownLess(before, 48);
}

// Rows of targets are of no use between messages.
TEST(ResidentMemoryTest, AnIdleScoreStreamKeepsNothingOfItsMessages) {
  ServerProcess server;
  constexpr int64_t kRows = 65536;
  auto request = Of<v1::ScoreRequest>(std::vector<float>(2 * kRows, 0.0f), kRows);
  for (int64_t i = 0; i < kRows; ++i) request.add_targets(i % 2);
  const grpc::ByteBuffer message = ToBuffer(request.SerializeAsString());
  const auto channel = Connect(server.tcp());
  std::deque<GenericCall> idle;
  const auto open = [&](int streams) {
    for (int i = 0; i < streams; ++i) {
      idle.emplace_back(channel, kScoreStream);
      grpc::ByteBuffer answer;
      ASSERT_TRUE(idle.back().Start() && idle.back().Write(message) && idle.back().Read(&answer))
          << idle.back().Finish().error_message();
    }
  };
  open(20);  // what malloc keeps of all messages is there now
  const int64_t before = server.RssBytes();
  constexpr int64_t kStreams = 300;  // many, because malloc grows in steps of megabytes
  open(kStreams);
  EXPECT_LT(server.RssBytes() - before, kStreams * (64 << 10));
}

TEST(ProbeListenTest, AnswersWhereTheServerTakesNoMoreConnections) {
  const std::string path = absl::StrCat("unix:", ::testing::TempDir(), "/probes_", getpid());
  ServerProcess server({"--probe-listen", path, "--max-connections=4"});
  std::vector<std::unique_ptr<RawPeer>> holders;
  for (int i = 0; i < 2; ++i) holders.push_back(OpenWatches(server, 1));
  const auto others = {Connect(server.unix_socket()), Connect(server.unix_socket())};
  for (const auto& channel : others) ASSERT_TRUE(SmallTopK(channel).ok());
  EXPECT_EQ(Probe(server.unix_socket()).error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_TRUE(Probe(path).ok());
}

TEST(ProbeListenTest, AnswersWhereConnectionsHoldTooMuchAndNothingElse) {
  const std::string path = absl::StrCat("unix:", ::testing::TempDir(), "/probes_", getpid());
  ServerProcess server({"--probe-listen", path, "--max-connection-bytes=16MiB"});
  std::vector<std::unique_ptr<RawPeer>> holders;
  for (int i = 0; i < 4; ++i) {
    holders.push_back(OpenWatches(server, 2000));
    EXPECT_TRUE(Probe(path).ok()) << i;
  }
  const grpc::Status refused = SmallTopK(Connect(path));
  EXPECT_EQ(refused.error_code(), grpc::StatusCode::UNIMPLEMENTED);
  EXPECT_THAT(refused.error_message(),
              ::testing::HasSubstr("only grpc.health.v1.Health is served here"));
}

}  // namespace
}  // namespace logitd::e2e
