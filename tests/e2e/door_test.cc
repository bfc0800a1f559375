// Peers that attack the transport: what they send is bounded, they are cut, and others are served.
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <deque>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "logitd/v1/attention.pb.h"
#include "tests/e2e/peers.h"
#include "tests/e2e/raw_peer.h"
#include "tests/e2e/server_process.h"
#include "tests/e2e/topk_calls.h"

namespace logitd::e2e {
namespace {

using ::testing::ContainsRegex;
using ::testing::HasSubstr;

constexpr int64_t kMiB = int64_t{1} << 20;

std::string Cut(const std::string& reason) {
  return "logitd_connections_cut_total{reason=\"" + reason + "\"}";
}

// Small calls, one after another, while attacks run, at least one. Each must succeed.
class HonestCaller {
 public:
  explicit HonestCaller(const ServerProcess& server)
      : channel_(Connect(server.tcp())), thread_([this] {
          do {
            const grpc::Status status = SmallTopK(channel_, kPatience);
            EXPECT_TRUE(status.ok()) << status.error_message();
          } while (!stop_);
        }) {}
  ~HonestCaller() {
    stop_ = true;
    thread_.join();
  }

 private:
  const std::shared_ptr<grpc::Channel> channel_;
  std::atomic<bool> stop_ = false;
  std::thread thread_;
};

// Sends `piece` again and again until the connection ends. False: it took `most` of them.
bool SendUntilCut(RawPeer* peer, const std::string& piece, int most) {
  for (int i = 0; i < most; ++i) {
    if (!peer->Send(piece)) return true;
  }
  return peer->EndsWithin(kPatience);
}

// --- header lists

TEST(ResidentMemoryTest, AHeaderListWithoutEndIsCut) {
  ServerProcess server;
  HonestCaller honest(server);
  absl::SleepFor(absl::Milliseconds(100));
  const int64_t before = server.RssBytes();
  RawPeer peer(server.port());
  ASSERT_TRUE(peer.Send(Frame(kHeaders, 0, 1, CallHeaders(kTopK))));
  // A field whose value is longer than all the frames.
  std::string head("\0\1x\x7f\x80\x80\x80\x80\x01", 9);
  peer.Send(Frame(kContinuation, 0, 1, head));
  EXPECT_TRUE(SendUntilCut(&peer, Frame(kContinuation, 0, 1, std::string(16000, 'a')), 4000));
  EXPECT_TRUE(server.WaitForMetric(Cut("protocol"), '=', 1));
  server.ExpectGrownLess(before, 16);
}

TEST(ResidentMemoryTest, AListOfManyFieldsIsCut) {
  ServerProcess server;
  HonestCaller honest(server);
  absl::SleepFor(absl::Milliseconds(100));
  const int64_t before = server.RssBytes();
  std::string fields;
  while (fields.size() < 16000) fields += Field("x", "y");
  for (const bool confirm : {true, false}) {
    std::vector<std::unique_ptr<RawPeer>> peers;
    for (int i = 0; i < 20; ++i) {
      auto& peer = *peers.emplace_back(std::make_unique<RawPeer>(server.port(), confirm));
      peer.Send(Frame(kHeaders, 0, 1, CallHeaders(kTopK)));
      ASSERT_TRUE(SendUntilCut(&peer, Frame(kContinuation, 0, 1, fields), 64)) << confirm;
    }
  }
  EXPECT_GT(server.Metric(Cut("header_list")), 0);
  server.ExpectGrownLess(before, 32);
}

// One byte stands for a field of 4 KiB.
TEST(ResidentMemoryTest, AListThatGrowsInDecompressionIsCut) {
  ServerProcess server;
  const int64_t before = server.RssBytes();
  for (int i = 0; i < 20; ++i) {
    RawPeer peer(server.port(), /*confirm=*/false);
    std::string block = CallHeaders(kTopK);
    std::string field = Field("x", std::string(4000, 'y'));
    field[0] = 0x40;                             // goes into the table, where it is number 62
    block += field + std::string(3500, '\xbe');  // below the 16 MiB of a peer without settings
    peer.Send(Frame(kHeaders, kEndHeaders, 1, block));
    EXPECT_TRUE(peer.EndsWithin(kPatience));
  }
  // The peer may see the end before it is counted.
  EXPECT_TRUE(server.WaitForMetric(Cut("header_list"), '=', 20));
  server.ExpectGrownLess(before, 32);
}

TEST(HeaderListTest, IsAcceptedUpToTheAdvertisedSize) {
  const struct {
    const char* name;
    size_t value_bytes;
    bool split;
    bool confirm;
    bool accepted;
  } kCases[] = {
      {"of_7_KiB", 7 << 10, false, true, true},
      {"of_7_KiB_in_two_frames", 7 << 10, true, true, true},
      {"of_9_KiB_in_two_frames", 9 << 10, true, true, false},
      {"of_13_KiB_before_the_settings_are_confirmed", 13 << 10, false, false, false},
  };
  const ServerProcess server;
  const std::string call = CallHeaders("/no.Such/Method");
  for (const auto& list : kCases) {
    SCOPED_TRACE(list.name);
    const std::string half = Field("x", std::string(list.value_bytes / 2, 'y'));
    RawPeer peer(server.port(), list.confirm);
    peer.Send(list.split
                  ? Frame(kHeaders, 0, 1, call + half) + Frame(kContinuation, kEndHeaders, 1, half)
                  : Frame(kHeaders, kEndHeaders, 1,
                          call + Field("x", std::string(list.value_bytes, 'y'))));
    std::string status;
    ASSERT_TRUE(peer.Gets(kHeaders, 1, kPatience, &status));
    if (list.accepted) {
      EXPECT_THAT(status, HasSubstr("grpc-status: 12\n"));  // UNIMPLEMENTED
    } else {
      EXPECT_THAT(status, HasSubstr("grpc-status: 8\n"));  // RESOURCE_EXHAUSTED
      EXPECT_THAT(status,
                  ContainsRegex("grpc-message: metadata: got [0-9]+ bytes, allowed 8192\n"));
    }
    // The other calls of the connection go on.
    ASSERT_TRUE(peer.Send(Frame(kHeaders, kEndHeaders, 3, call)));
    ASSERT_TRUE(peer.Gets(kHeaders, 3, kPatience, &status));
    EXPECT_THAT(status, HasSubstr("grpc-status: 12\n"));
  }
}

TEST(DoorTest, AClientsListAboveTheAdvertisedSizeFailsItsCall) {
  ServerProcess server;
  const auto channel = Connect(server.tcp());
  ASSERT_TRUE(SmallTopK(channel).ok());
  grpc::ClientContext context;
  context.AddMetadata("x", std::string(9 << 10, 'y'));
  v1::TopKResponse response;
  const grpc::Status status =
      v1::Sampler::NewStub(channel)->TopK(&context, Request({1, 2}, 1, 1), &response);
  EXPECT_FALSE(status.ok());
  // gRPC 1.51 sometimes ends the connection too. Then a later call opens a new one.
  bool served = false;
  for (int attempt = 0; attempt < 3 && !served; ++attempt) served = SmallTopK(channel).ok();
  EXPECT_TRUE(served);
}

// --- DATA frames

TEST(ResidentMemoryTest, MessagesInFramesOfOneByteAreCut) {
  ServerProcess server;
  HonestCaller honest(server);
  absl::SleepFor(absl::Milliseconds(100));
  const int64_t before = server.RssBytes();
  std::string frames;
  for (int i = 0; i < 20000; ++i) frames += Frame(kData, 0, 1, "z");
  std::vector<std::thread> attacks;
  for (int i = 0; i < 4; ++i) {
    attacks.emplace_back([&] {
      RawPeer peer(server.port());
      peer.Send(Frame(kHeaders, kEndHeaders, 1, CallHeaders(kTopK)));
      peer.Send(Frame(kData, 0, 1, std::string("\0\3\xff\xff\xff", 5)));  // 64 MiB
      ASSERT_TRUE(peer.Gets(kWindowUpdate, 1, kPatience));  // the server wants the message
      EXPECT_TRUE(SendUntilCut(&peer, frames, 40));
    });
  }
  for (std::thread& attack : attacks) attack.join();
  EXPECT_TRUE(server.WaitForMetric(Cut("tiny_frames"), '=', 4));
  server.ExpectGrownLess(before, 24);
}

// --- pings

const std::string kAPing = Frame(kPing, 0, 0, "12345678");

// Sends a ping and waits for its confirmation. False: the connection has ended.
bool PingIsConfirmed(RawPeer* peer) {
  return peer->Send(kAPing) && peer->Gets(kPing, 0, kPatience);
}

TEST(DoorTest, TheFlagSetsTheIntervalOfPings) {
  {
    ServerProcess server({"--min-ping-interval=0"});
    RawPeer peer(server.port());
    for (int i = 0; i < 100; ++i) ASSERT_TRUE(PingIsConfirmed(&peer)) << i;
    EXPECT_EQ(server.Metric(Cut("pings")), 0);
  }
  ServerProcess server({"--min-ping-interval=1h"});
  RawPeer peer(server.port());
  for (int i = 0; i < 10; ++i) ASSERT_TRUE(PingIsConfirmed(&peer)) << i;
  ASSERT_TRUE(peer.Send(kAPing));
  EXPECT_TRUE(peer.Gets(kGoAway, 0, kPatience));
  EXPECT_TRUE(peer.EndsWithin(kPatience));
  EXPECT_TRUE(server.WaitForMetric(Cut("pings"), '=', 1));
}

TEST(DoorTest, AFloodOfPingsIsCutWithTheDefaultFlags) {
  ServerProcess server;
  HonestCaller honest(server);
  for (const int pings : {50, 100'000}) {
    std::string flood;
    for (int i = 0; i < pings; ++i) flood += kAPing;
    RawPeer peer(server.port());
    EXPECT_TRUE(SendUntilCut(&peer, flood, 1)) << pings;
  }
  EXPECT_TRUE(server.WaitForMetric(Cut("pings"), '=', 2));
}

// --- connections

TEST(ResidentMemoryTest, AMessageFarLargerThanStatedEndsItsCallOnly) {
  ServerProcess server;
  HonestCaller honest(server);
  absl::SleepFor(absl::Milliseconds(100));
  const int64_t before = server.RssBytes();
  const auto channel = Connect(server.tcp());
  GenericCall liar(channel, kTopK);
  StateSize(&liar.context(), 100);
  grpc::ByteBuffer answer;
  const grpc::Status status = liar.Unary(LargeRequest(256), &answer);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(status.error_message(), HasSubstr("logitd-payload-bytes: got 100, allowed"));
  EXPECT_TRUE(SmallTopK(channel).ok());
  EXPECT_EQ(server.Metric("logitd_connections"), 2);  // with the honest caller's
  server.ExpectGrownLess(before, 24);
}

TEST(DoorTest, MoreConnectionsThanFilesAreRefusedAndTheServerRecovers) {
  ServerProcess server({}, /*max_files=*/200);
  HonestCaller honest(server);
  absl::SleepFor(absl::Milliseconds(100));
  const double limit = server.Metric("logitd_connections_limit");
  EXPECT_GT(limit, 50);
  EXPECT_LT(limit, 200);
  {
    std::vector<std::unique_ptr<RawPeer>> peers;
    for (int i = 0; i < 600; ++i) peers.push_back(std::make_unique<RawPeer>(server.port()));
    EXPECT_TRUE(server.WaitForMetric("logitd_connections_refused_total", '>', 0));
    EXPECT_LE(server.Metric("logitd_connections"), limit);
  }
  EXPECT_TRUE(server.WaitForMetric("logitd_connections", '=', 1));
  EXPECT_TRUE(SmallTopK(Connect(server.tcp())).ok());
}

TEST(DoorTest, TheSoftLimitOfFilesIsRaised) {
  ServerProcess server({}, /*max_files=*/0);
  EXPECT_GT(server.Metric("logitd_connections_limit"), 1024);
}

TEST(DoorTest, TheFlagBoundsConnections) {
  ServerProcess server({"--max-connections=2"});
  auto first = std::make_unique<RawPeer>(server.port());
  RawPeer second(server.port());
  ASSERT_TRUE(server.WaitForMetric("logitd_connections", '=', 2));
  RawPeer third(server.port());
  EXPECT_TRUE(third.EndsWithin(kPatience));
  EXPECT_EQ(server.Metric("logitd_connections_refused_total"), 1);
  first.reset();
  ASSERT_TRUE(server.WaitForMetric("logitd_connections", '=', 1));
  EXPECT_TRUE(SmallTopK(Connect(server.unix_socket())).ok());
}

// --- Unix sockets

Ended RunOn(const std::string& address) {
  return RunToEnd({"--backend=cpu", "--listen=" + address, "--metrics-listen=off"});
}

TEST(UnixSocketTest, OfALiveServerIsNotTakenOver) {
  ServerProcess server;
  const Ended second = RunOn(server.unix_socket());
  EXPECT_EQ(second.exit_code, 1);
  EXPECT_THAT(second.text,
              HasSubstr("cannot listen on " + server.unix_socket() + ": another process (pid "));
  EXPECT_TRUE(SmallTopK(Connect(server.unix_socket())).ok());
}

TEST(UnixSocketTest, OfADeadServerIsReplaced) {
  const std::string path = ::testing::TempDir() + absl::StrCat("/logitd_dead_", getpid());
  const auto start = [&] {
    return std::make_unique<ServerProcess>(std::vector<std::string>{"--listen=unix:" + path});
  };
  start()->Signal(SIGKILL);
  ASSERT_TRUE(std::filesystem::exists(path));
  const auto server = start();
  EXPECT_TRUE(SmallTopK(Connect("unix:" + path)).ok());
  server->Signal(SIGTERM);
  EXPECT_EQ(server->Wait(absl::Seconds(10)), 0);
  EXPECT_FALSE(std::filesystem::exists(path));
}

TEST(UnixSocketTest, OfAnotherServerIsNotRemovedAtTheEnd) {
  const std::string path = ::testing::TempDir() + absl::StrCat("/logitd_other_", getpid());
  ServerProcess first({"--listen=unix:" + path});
  std::filesystem::remove(path);
  ServerProcess second({"--listen=unix:" + path});
  first.Signal(SIGTERM);
  EXPECT_EQ(first.Wait(absl::Seconds(10)), 0);
  EXPECT_TRUE(SmallTopK(Connect("unix:" + path)).ok());
  std::filesystem::remove(path);
}

TEST(UnixSocketTest, PathOfAnotherFileIsRefused) {
  const std::string path = ::testing::TempDir() + absl::StrCat("/logitd_file_", getpid());
  std::ofstream(path) << "keep";
  const Ended ended = RunOn("unix:" + path);
  EXPECT_EQ(ended.exit_code, 1);
  EXPECT_THAT(ended.text, HasSubstr("not a socket"));
  EXPECT_TRUE(std::filesystem::exists(path));
  std::filesystem::remove(path);
}

TEST(UnixSocketTest, PathThatIsTooLongIsRefused) {
  const Ended ended = RunOn("unix:/tmp/" + std::string(110, 'a'));
  EXPECT_EQ(ended.exit_code, 2);
  EXPECT_THAT(ended.text, HasSubstr("allowed a path of at most 107 bytes"));
}

// --- memory

// Beyond 256 MiB, what docs/operations.md, "Memory", says.
TEST(ResidentMemoryTest, IsGivenBackWhenTheLoadHasEnded) {
  ServerProcess server({"--streams=1", "--slab-bytes=20MiB", "--max-request-bytes=20MiB"});
  const int64_t slabs = 4 * 20 * kMiB + 11 * kMiB;
  const int64_t most = server.RssBytes() + slabs + 256 * kMiB;
  v1::AttentionSoftmaxRequest request;
  request.set_dtype(v1::DTYPE_F32);
  request.set_batch(1);
  request.set_heads(1);
  request.set_queries(1280);
  request.set_keys(4096);
  request.set_scores(std::string(20 * kMiB, '\0'));
  const grpc::ByteBuffer message = ToBuffer(request.SerializeAsString());
  {
    // Answers that no peer takes, and that malloc keeps when they are freed: mapped ones are
    // larger.
    std::deque<UnreadCall> unread;
    for (int i = 1; i <= 32; ++i) {
      unread.emplace_back(server.tcp(), kSoftmax, message);
      ASSERT_TRUE(server.WaitForMetric(Requests("OK", "attention_softmax"), '=', i, kPatience));
    }
    EXPECT_GT(server.RssBytes(), most);
  }
  const absl::Time end = absl::Now() + absl::Minutes(1);
  while (server.RssBytes() > most && absl::Now() < end) absl::SleepFor(absl::Milliseconds(20));
  EXPECT_LE(server.RssBytes(), most);
  EXPECT_GT(server.Metric("logitd_resident_bytes"), 0);
}

}  // namespace
}  // namespace logitd::e2e
