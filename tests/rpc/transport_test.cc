// Calls on one connection, with a client that writes any frames. The test's thread runs the loop,
// whose clock the test sets; the engine has a fake device and threads of its own.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <malloc.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "grpc/health/v1/health.pb.h"
#include "logitd/v1/sampler.pb.h"
#include "server/engine/load.h"
#include "server/http2/connection.h"
#include "server/rpc/health_service.h"
#include "server/rpc/registry.h"
#include "server/rpc/services.h"
#include "server/rpc/transport/call_log.h"
#include "server/rpc/transport/call_tracker.h"
#include "server/rpc/transport/turn_jobs.h"
#include "tests/engine/test_job.h"
#include "tests/http2/raw_client.h"
#include "tests/rpc/served_engine.h"

namespace logitd::rpc {
namespace {

using http2::testing::Big32;
using http2::testing::Fields;
using http2::testing::Frame;
using http2::testing::RawClient;
using ::testing::HasSubstr;

constexpr char kCheck[] = "/grpc.health.v1.Health/Check";
constexpr char kWatch[] = "/grpc.health.v1.Health/Watch";
constexpr char kTopK[] = "/logitd.v1.Sampler/TopK";
constexpr char kSampleStream[] = "/logitd.v1.Sampler/SampleStream";

constexpr int64_t kMaxMessage = int64_t{1} << 20;
constexpr int64_t kMaxHeld = int64_t{8} << 20;

int64_t now_ns = 1'000'000'000;
int64_t TestClock() { return now_ns; }

std::string Message(std::string_view bytes) {
  return absl::StrCat(std::string(1, '\0'), Big32(static_cast<uint32_t>(bytes.size())),
                      absl::string_view(bytes.data(), bytes.size()));
}

std::string CheckOf(const std::string& service) {
  grpc::health::v1::HealthCheckRequest request;
  request.set_service(service);
  return Message(request.SerializeAsString());
}

std::string SampleOf(int64_t rows, int64_t vocab) {
  v1::SampleRequest request;
  request.set_rows(rows);
  request.set_vocab(vocab);
  request.set_dtype(v1::DTYPE_F32);
  for (int64_t row = 0; row < rows; ++row) request.add_seed(1);
  request.set_logits(std::string(static_cast<size_t>(4 * rows * vocab), '\0'));
  return Message(request.SerializeAsString());
}

int64_t MallocBytes() { return static_cast<int64_t>(mallinfo2().uordblks); }

class TransportTest : public ServedEngine, public http2::ConnectionHost {
 protected:
  TransportTest() : ServedEngine(kMaxMessage, kMaxHeld) {
    environment_ = {.admission = &admission_,
                    .engine = engine_.get(),
                    .heads = &heads_,
                    .metrics = &metrics_,
                    .load = &load_,
                    .door_metrics = nullptr,
                    .identities = nullptr,
                    .tracker = &tracker_,
                    .log = &log_,
                    .leases = nullptr,
                    .writer = nullptr,
                    .turn_jobs = &turn_jobs_,
                    .places = nullptr,
                    .max_payload_bytes = kMaxMessage};
    RegisterOps(environment_, &registry_);
    health_.Register(&registry_);
    RegisterReflection({}, environment_, &registry_);
    health_.Set("", true);
    int fds[2];
    EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds), 0);
    for (const int fd : fds) {
      const int large = 8 << 20;
      setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &large, sizeof(large));
    }
    EXPECT_EQ(fcntl(fds[0], F_SETFL, O_NONBLOCK), 0);
    client_.emplace(fds[1]);
    connection_ =
        std::make_shared<http2::Connection>(&loop_, this, &held_, limits_, times_, fds[0],
                                            http2::PeerInfo{.id = 1, .name = "test"}, nullptr);
    connection_->Start();
    EXPECT_TRUE(client_->Begin());
    Run();
  }
  ~TransportTest() override {
    backend_.Release();
    connection_->Close();
    EXPECT_TRUE(Becomes([&] {
      loop_.Turn(/*wait=*/false);
      return admission_.held_bytes() == 0;
    }));
    EXPECT_EQ(total_, 0) << "bytes held without a connection";
    EXPECT_EQ(tracker_.alive(), 0);
  }

  std::shared_ptr<http2::StreamEvents> OnStream(http2::Stream* stream) override {
    return registry_.Start(stream, tracker_);
  }
  void OnConnectionClosed(http2::Connection*, http2::Cut cut) override { cut_ = cut; }

  const http2::Account& account() const { return connection_->account(); }

  // Turns until nothing moves.
  void Run() {
    for (int64_t before = -1; account().received + account().sent != before;) {
      before = account().received + account().sent;
      for (int i = 0; i < 3; ++i) loop_.Turn(/*wait=*/false);
      if (reads_) Read();
    }
  }
  void Read() {
    for (Frame& frame : client_->Take()) {
      if (frame.type == NGHTTP2_HEADERS) {
        for (auto& field : client_->Decode(frame)) trailers_[frame.stream].push_back(field);
      }
      if (frame.type == NGHTTP2_DATA) {
        bodies_[frame.stream] += frame.payload;
        client_->Send(RawClient::Window(0, static_cast<uint32_t>(frame.payload.size()) + 1));
      }
      if (frame.type == NGHTTP2_WINDOW_UPDATE)
        windows_[frame.stream] += http2::testing::Read32(frame.payload);
    }
  }
  // The clock goes on in small steps, as it does while a loop runs.
  void Pass(absl::Duration time) {
    for (absl::Duration step = absl::Milliseconds(250); time > absl::ZeroDuration(); time -= step) {
      now_ns += absl::ToInt64Nanoseconds(std::min(step, time));
      Run();
    }
  }
  bool Comes(const std::function<bool()>& condition) {
    return Becomes([&] {
      Run();
      return condition();
    });
  }

  // All that the admission has left.
  std::vector<engine::Admission::Ticket> TakeAllRoom() {
    std::vector<engine::Admission::Ticket> all;
    uint64_t caller = 1000;
    for (int64_t bytes = kMaxMessage; bytes >= 1024;) {
      auto entry = admission_.Enter({.caller = {.id = ++caller}, .bytes = bytes}, nullptr);
      if (entry.answer.has_value()) {
        all.push_back(**std::move(entry.answer));
        continue;
      }
      admission_.Abandon(entry.waiter);
      bytes /= 4;
    }
    return all;
  }

  int32_t Call(const std::string& path, const Fields& more = {}) {
    Fields fields = http2::testing::Request(path);
    fields.emplace_back("content-type", "application/grpc");
    fields.insert(fields.end(), more.begin(), more.end());
    const int32_t stream = next_stream_;
    next_stream_ += 2;
    EXPECT_TRUE(client_->Send(client_->Headers(stream, fields)));
    return stream;
  }
  void Send(int32_t stream, std::string_view bytes, bool ends = false) {
    EXPECT_TRUE(client_->Send(RawClient::Data(stream, std::string(bytes), ends)));
  }
  // The value of a field of the response's header lists; empty: it has none.
  std::string Field(int32_t stream, const std::string& name) {
    for (const auto& [known, value] : trailers_[stream]) {
      if (known == name) return value;
    }
    return "";
  }
  std::string StatusOf(int32_t stream) { return Field(stream, "grpc-status"); }
  // Messages of the response that have come.
  int Answers(int32_t stream) {
    int answers = 0;
    std::string_view body = bodies_[stream];
    while (body.size() >= kPrefixBytes) {
      body.remove_prefix(
          std::min(body.size(), kPrefixBytes + http2::testing::Read32(body.substr(1))));
      ++answers;
    }
    return answers;
  }

  engine::Load load_{&engine_->costs(), &metrics_, SteadyClock(), &engine_->devices()};
  const CallLog log_{absl::InfiniteDuration()};
  CallTracker tracker_{absl::Seconds(30), absl::Milliseconds(50), 2, &metrics_};
  TurnJobs turn_jobs_{engine_.get(), 1};
  CallEnvironment environment_;
  Registry registry_;
  HealthService health_{environment_};
  const http2::Limits limits_;
  const http2::Times times_{.keepalive = absl::InfiniteDuration()};
  std::atomic<int64_t> total_ = 0;
  http2::Held held_{&total_, int64_t{256} << 20};
  http2::Loop loop_{0, &TestClock};
  std::optional<RawClient> client_;
  std::shared_ptr<http2::Connection> connection_;
  http2::Cut cut_ = http2::Cut::kNone;
  bool reads_ = true;
  int32_t next_stream_ = 1;
  std::map<int32_t, Fields> trailers_;
  std::map<int32_t, std::string> bodies_;
  std::map<int32_t, uint32_t> windows_;
};

// ---- small messages

TEST_F(TransportTest, AnAnnouncedMessageTakesNoMemoryBeforeItComes) {
  constexpr int kCalls = 500;
  Call(kCheck);
  Run();
  const int64_t before = MallocBytes();
  for (int i = 0; i < kCalls; ++i) {
    Send(Call(kCheck), absl::StrCat(std::string(1, '\0'), Big32(64 << 10)));
    Run();
  }
  EXPECT_LT((MallocBytes() - before) / kCalls, 8 << 10);
}

TEST_F(TransportTest, WhatCameOfASmallMessageIsCountedUntilItIsWhole) {
  const std::string message = CheckOf(std::string(50'000, 'x'));
  const int32_t stream = Call(kCheck);
  Send(stream, message.substr(0, 20'000));
  Run();
  EXPECT_GE(account().early, 20'000 - 5);
  Send(stream, message.substr(20'000, 20'000));
  Run();
  EXPECT_GE(account().early, 40'000 - 5);
  Send(stream, message.substr(40'000), true);
  Run();
  EXPECT_EQ(StatusOf(stream), "5") << "NOT_FOUND";
  EXPECT_EQ(account().early, 0);
}

TEST_F(TransportTest, ASmallMessageInPiecesOfEverySizeIsRead) {
  const std::string message = CheckOf("");
  const std::string named = CheckOf("nobody");
  for (size_t cut = 0; cut <= named.size(); ++cut) {
    const int32_t stream = Call(kCheck);
    Send(stream, named.substr(0, cut));
    Run();
    Send(stream, named.substr(cut), true);
    Run();
    EXPECT_EQ(StatusOf(stream), "5") << cut;
  }
  const int32_t stream = Call(kCheck);
  Send(stream, message, true);
  Run();
  EXPECT_EQ(StatusOf(stream), "0");
  const int32_t truncated = Call(kCheck);
  Send(truncated, named.substr(0, named.size() - 1), true);
  Run();
  EXPECT_EQ(StatusOf(truncated), "12");
}

TEST_F(TransportTest, ACallWithAMalformedTimeoutIsNotOpenAfterwards) {
  for (const char* path : {kTopK, kSampleStream}) {
    const int32_t stream = Call(path, {{"grpc-timeout", "-1m"}});
    Run();
    EXPECT_EQ(StatusOf(stream), "3") << path;
  }
  EXPECT_EQ(metrics_.Get(engine::Gauge::kOpenCalls), 0);
  EXPECT_EQ(metrics_.Get(engine::Gauge::kOpenStreams), 0);
}

TEST_F(TransportTest, AWatchKeepsNoName) {
  constexpr int kCalls = 300;
  const std::string message = CheckOf(std::string(16'000, 'x'));
  Send(Call(kWatch), message);
  Run();
  const int64_t before = MallocBytes();
  int32_t last = 0;
  for (int i = 0; i < kCalls; ++i) {
    last = Call(kWatch);
    Send(last, message);
    Run();
    bodies_.clear();
    trailers_.clear();
  }
  EXPECT_LT((MallocBytes() - before) / kCalls, 8 << 10);
  EXPECT_EQ(StatusOf(last), "") << "it goes on";
}

TEST_F(TransportTest, AWatchThatEndsItselfIsForgotten) {
  const auto watch = [&] {
    const int32_t stream = Call(kWatch);
    Send(stream, CheckOf("") + CheckOf(""), true);
    Run();
    EXPECT_EQ(StatusOf(stream), "12");
    bodies_.clear();
    trailers_.clear();
  };
  watch();
  const int64_t before = MallocBytes();
  for (int i = 0; i < 300; ++i) watch();
  EXPECT_LT(MallocBytes() - before, 100'000);
}

// ---- messages of streams

TEST_F(TransportTest, ALaterMessageOfAStreamIsChargedWhileItComes) {
  const int32_t stream = Call(kSampleStream);
  Send(stream, SampleOf(1, 4));
  ASSERT_TRUE(Comes([&] { return Answers(stream) == 1; }));
  const std::string large = SampleOf(1, 100'000);
  Send(stream, large.substr(0, 50'000));
  ASSERT_TRUE(Comes([&] { return windows_[stream] > 300'000; }));
  EXPECT_GE(admission_.held_bytes(), 400'000);
  Send(stream, large.substr(50'000));
  EXPECT_TRUE(Comes([&] { return Answers(stream) == 2; }));
}

TEST_F(TransportTest, ALaterMessageOfAStreamWaitsUnreadForRoom) {
  const int32_t stream = Call(kSampleStream);
  Send(stream, SampleOf(1, 4));
  ASSERT_TRUE(Comes([&] { return Answers(stream) == 1; }));
  Run();
  std::vector<engine::Admission::Ticket> all = TakeAllRoom();
  const uint32_t window = windows_[stream];
  const std::string large = SampleOf(1, 200'000);
  Send(stream, large.substr(0, 50'000));
  Run();
  EXPECT_EQ(windows_[stream], window) << "nothing more may come";
  EXPECT_GE(account().early, 49'000);
  Pass(absl::Minutes(1));
  EXPECT_EQ(StatusOf(stream), "") << "the time does not count while the peer may not send";
  all.clear();
  ASSERT_TRUE(Comes([&] { return windows_[stream] > window + 700'000; }));
  Send(stream, large.substr(50'000));
  EXPECT_TRUE(Comes([&] { return Answers(stream) == 2; }));
}

TEST_F(TransportTest, ALaterMessageOfAStreamMustComeInTime) {
  const int32_t stream = Call(kSampleStream);
  Send(stream, SampleOf(1, 4));
  ASSERT_TRUE(Comes([&] { return Answers(stream) == 1; }));
  Pass(absl::Minutes(2));
  EXPECT_EQ(StatusOf(stream), "") << "it may be idle";
  Send(stream, SampleOf(1, 10'000).substr(0, 30'000));
  Run();
  Pass(absl::Seconds(29));
  EXPECT_EQ(StatusOf(stream), "");
  Pass(absl::Seconds(2));
  EXPECT_EQ(StatusOf(stream), "4") << "DEADLINE_EXCEEDED";
  EXPECT_THAT(Field(stream, "grpc-message"), HasSubstr("message not received within 30s"));
}

// ---- time in the line

TEST_F(TransportTest, TimeInTheLineIsNotTimeToSend) {
  std::vector<engine::Admission::Ticket> all = TakeAllRoom();
  const std::string size = absl::StrCat(1'000'000);
  const int32_t stated = Call(kTopK, {{"logitd-payload-bytes", size}});
  const int32_t streamed = Call(kSampleStream, {{"logitd-payload-bytes", size}});
  const int32_t unstated = Call(kTopK);
  Send(unstated, absl::StrCat(std::string(1, '\0'), Big32(1'000'000)));
  Pass(absl::Minutes(1));
  for (const int32_t stream : {stated, streamed, unstated}) EXPECT_EQ(StatusOf(stream), "");
  all.clear();
  ASSERT_TRUE(Comes([&] {
    return windows_[stated] > 900'000 && windows_[streamed] > 900'000 &&
           windows_[unstated] > 900'000;
  }));
  Pass(absl::Seconds(29));
  for (const int32_t stream : {stated, streamed, unstated}) EXPECT_EQ(StatusOf(stream), "");
  Pass(absl::Seconds(2));
  for (const int32_t stream : {stated, streamed, unstated}) EXPECT_EQ(StatusOf(stream), "4");
}

// ---- the account

// The server's own objects of an open call count as held by its connection.
TEST_F(TransportTest, AnOpenCallsObjectsAreCounted) {
  constexpr int kCalls = 200;
  for (const std::string path :
       {kTopK, "/logitd.v1.Sampler/Sample", "/logitd.v1.Sampler/Verify", "/logitd.v1.Scorer/Score",
        kSampleStream, "/logitd.v1.Attention/Softmax", "/logitd.v1.Scorer/ScoreStream", kCheck}) {
    Call(path);
    Run();
    const int64_t before = MallocBytes();
    const int64_t counted = account().held();
    for (int i = 0; i < kCalls; ++i) {
      Call(path);
      Run();
    }
    EXPECT_LE((MallocBytes() - before) / kCalls, (account().held() - counted) / kCalls) << path;
  }
}

TEST_F(TransportTest, AnAnswerThatATicketPaysForIsNotCountedAgain) {
  v1::TopKRequest request;
  request.set_rows(512);
  request.set_vocab(64);
  request.set_dtype(v1::DTYPE_F32);
  request.set_logits(std::string(4 * 512 * 64, '\0'));
  request.add_k(64);
  const int32_t stream = Call(kTopK);
  const std::string message = Message(request.SerializeAsString());
  Send(stream, message.substr(0, 50'000));
  ASSERT_TRUE(Comes([&] { return windows_[stream] > 100'000; }));
  Send(stream, message.substr(50'000), true);
  ASSERT_TRUE(Comes([&] { return bodies_[stream].size() > 60'000; }))
      << Field(stream, "grpc-message");
  EXPECT_LT(account().unsent, 10'000);
  EXPECT_GT(admission_.held_bytes(), 200'000);
}

TEST_F(TransportTest, RefusalsBeforeACallAreCounted) {
  const auto refused = [&](const std::string& reason) {
    const std::string page = engine::Scrape(metrics_);
    const std::string name =
        absl::StrCat("logitd_refused_total{identity=\"none\",reason=\"", reason, "\"} ");
    const size_t at = page.find(name);
    return at == std::string::npos ? -1 : std::stoi(page.substr(at + name.size()));
  };
  const int32_t large = Call(kTopK, {{"x-large", std::string(9000, 'x')}});
  Run();
  EXPECT_EQ(StatusOf(large), "8");
  EXPECT_EQ(refused("header_list"), 1);
  total_ += int64_t{1} << 30;
  const int32_t held = Call(kTopK);
  Run();
  total_ -= int64_t{1} << 30;
  EXPECT_EQ(StatusOf(held), "8");
  EXPECT_EQ(refused("connection_bytes"), 1);
  for (int i = 0; i < 400 && refused("early_bytes") == 0; ++i) {
    Send(Call(kCheck), CheckOf(std::string(60'000, 'x')).substr(0, 59'000));
    Run();
  }
  EXPECT_EQ(refused("early_bytes"), 1);
  admission_.BeginDrain();
  tracker_.BeginDrain(absl::Seconds(1));
  const int32_t unary = Call(kTopK);
  const int32_t streamed = Call(kSampleStream);
  Run();
  EXPECT_EQ(StatusOf(unary), "14");
  EXPECT_EQ(StatusOf(streamed), "14");
  EXPECT_EQ(refused("draining"), 2);
}

TEST_F(TransportTest, HealthAndReflectionNeedNoIdentity) {
  door::Identities nobody;
  environment_.identities = &nobody;
  const int32_t health = Call(kCheck);
  Send(health, CheckOf(""), true);
  const int32_t reflection = Call("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo");
  Send(reflection, Message("\x3a\x01*"), true);  // list_services
  const int32_t topk = Call(kTopK);
  Run();
  EXPECT_EQ(StatusOf(health), "0");
  EXPECT_EQ(StatusOf(reflection), "0");
  EXPECT_EQ(Answers(reflection), 1);
  EXPECT_EQ(StatusOf(topk), "16");
}

// ---- probes

TEST_F(TransportTest, ProbesAreServedApart) {
  const std::string path = absl::StrCat(::testing::TempDir(), "/logitd_probe_", getpid());
  ProbeServer probes(tracker_, /*loop=*/1, &health_);
  ASSERT_TRUE(probes.Listen({"unix:" + path}, std::nullopt).ok());
  total_ += int64_t{1} << 30;  // the other connections hold all that they may
  const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_un address = {.sun_family = AF_UNIX};
  path.copy(address.sun_path, sizeof(address.sun_path) - 1);
  ASSERT_EQ(connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  client_.emplace(fd);
  ASSERT_TRUE(client_->Begin());
  const int32_t health = Call(kCheck);
  Send(health, CheckOf(""), true);
  const int32_t topk = Call(kTopK);
  EXPECT_TRUE(Becomes([&] {
    Read();
    return !StatusOf(health).empty() && !StatusOf(topk).empty();
  }));
  EXPECT_EQ(StatusOf(health), "0");
  EXPECT_EQ(StatusOf(topk), "12") << "UNIMPLEMENTED: nothing else";
  total_ -= int64_t{1} << 30;
}

}  // namespace
}  // namespace logitd::rpc
