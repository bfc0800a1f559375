#include "client/client.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "client/messages/codec.h"
#include "logitd/v1/sampler.pb.h"
#include "tests/becomes.h"
#include "tests/client/fake_server.h"
#include "tests/client/test_clock.h"
#include "tests/client/test_files.h"
#include "tests/client/test_values.h"

namespace logitd::client {
namespace {

using ::logitd::testing::Becomes;
using ::logitd::testing::ClientOf;
using ::logitd::testing::FakeServer;
using ::logitd::testing::ReferenceTopK;
using ::logitd::testing::StuckServer;
using ::logitd::testing::TempDir;
using ::logitd::testing::TestClock;
using ::logitd::testing::TopKParams;
using ::logitd::testing::ViewOf;
using ::testing::ElementsAre;
using ::testing::FloatNear;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

std::unique_ptr<Client> Connect(const std::string& address, ClientOptions options = {}) {
  options.address = address;
  absl::StatusOr<std::unique_ptr<Client>> client = Client::Create(std::move(options));
  EXPECT_TRUE(client.ok()) << client.status();
  return *std::move(client);
}

// softmax of (ln 1, ln 2, ln 5) is (1, 2, 5) / 8.
const std::vector<float> kLogits = {0.0f, 0.69314718f, 1.60943791f};

TopKRequest OneRow(int k = 2) {
  return {.dtype = v1::DTYPE_F32,
          .rows = 1,
          .vocab = 3,
          .logits = {ViewOf(kLogits)},
          .params = TopKParams({k})};
}

v1::TopKRequest Parse(const grpc::ByteBuffer& buffer) {
  grpc::Slice slice;
  EXPECT_TRUE(buffer.DumpToSingleSlice(&slice).ok());
  v1::TopKRequest message;
  EXPECT_TRUE(message.ParseFromArray(slice.begin(), static_cast<int>(slice.size())));
  return message;
}

TEST(EncodeTest, GeneratedCodeReadsWhatWeWrite) {
  const std::string first(1000, 'x');
  const std::string second = std::string("\0\xff", 2) + std::string(300000, 'y');
  const TopKRequest cases[] = {
      {},
      OneRow(),
      {.dtype = v1::DTYPE_BF16,
       .rows = int64_t{1} << 40,
       .vocab = -7,
       .logits = {first, "", second},
       .params = TopKParams({1, 2, 1 << 20}, {0.5f, std::numeric_limits<float>::infinity()})},
      {.dtype = v1::DTYPE_F16, .rows = 1, .vocab = 1, .logits = {""}, .params = TopKParams({-1})},
      {.dtype = v1::DTYPE_F16,
       .rows = 1,
       .vocab = 1,
       .logits = {absl::string_view(first).substr(0, 127)},
       .params = TopKParams({1})},
      {.dtype = v1::DTYPE_F16,
       .rows = 1,
       .vocab = 1,
       .logits = {absl::string_view(first).substr(0, 128)},
       .params = TopKParams({1})},
  };
  for (const TopKRequest& request : cases) {
    absl::StatusOr<grpc::ByteBuffer> buffer = EncodeRequest(request, nullptr);
    ASSERT_TRUE(buffer.ok()) << buffer.status();
    v1::TopKRequest want = request.params;
    want.set_dtype(request.dtype);
    want.set_rows(request.rows);
    want.set_vocab(request.vocab);
    want.mutable_logits();  // there, even if empty
    for (absl::string_view piece : request.logits) {
      want.mutable_logits()->append(piece.data(), piece.size());
    }
    const v1::TopKRequest got = Parse(*buffer);
    EXPECT_EQ(got.SerializeAsString(), want.SerializeAsString());
    EXPECT_EQ(got.input_case(), v1::TopKRequest::kLogits);
  }
}

TEST(EncodeTest, ThePayloadIsTheCallersMemoryAndComesLast) {
  const std::string first(70, 'x');
  const std::string second(100000, 'y');
  absl::StatusOr<grpc::ByteBuffer> buffer = EncodeRequest(TopKRequest{.dtype = v1::DTYPE_F32,
                                                                      .rows = 2,
                                                                      .vocab = 3,
                                                                      .logits = {first, second},
                                                                      .params = TopKParams({1})},
                                                          nullptr);
  ASSERT_TRUE(buffer.ok());
  std::vector<grpc::Slice> slices;
  ASSERT_TRUE(buffer->Dump(&slices).ok());
  ASSERT_EQ(slices.size(), 3u);
  EXPECT_EQ(static_cast<const void*>(slices[1].begin()), first.data());
  EXPECT_EQ(static_cast<const void*>(slices[2].begin()), second.data());
}

TEST(EncodeTest, EverySliceSharesTheOwner) {
  auto owner = std::make_shared<std::string>(1000, 'x');
  std::weak_ptr<std::string> watch = owner;
  absl::StatusOr<grpc::ByteBuffer> buffer = EncodeRequest(
      TopKRequest{.rows = 2, .vocab = 3, .logits = {*owner, *owner}, .params = TopKParams({1})},
      owner);
  ASSERT_TRUE(buffer.ok());
  owner.reset();
  EXPECT_EQ(watch.use_count(), 2);
  buffer->Clear();
  EXPECT_TRUE(watch.expired());
}

TEST(EncodeTest, RefusesWhatProtobufCannotCarry) {
  const std::string block(1 << 20, 'x');
  TopKRequest request = {.rows = 1, .vocab = 1, .params = TopKParams({1})};
  request.logits.assign(2048, block);  // 2 GiB
  EXPECT_EQ(EncodeRequest(request, nullptr).status().code(), absl::StatusCode::kInvalidArgument);
  request.logits.pop_back();
  EXPECT_TRUE(EncodeRequest(request, nullptr).ok());
}

v1::TopKResponse TwoRows() {
  v1::TopKResponse response;
  for (int k : {1, 2}) response.add_k(k);
  for (int index : {7, 8, 9}) response.add_indices(index);
  for (float prob : {0.5f, 0.25f, 0.125f}) response.add_probs(prob);
  for (float lse : {1.0f, 2.0f}) response.add_logsumexp(lse);
  for (int i = 0; i < 2; ++i) response.add_status(v1::ROW_STATUS_OK);
  for (int i = 0; i < 2; ++i) response.add_status_position(-1);
  return response;
}

TEST(DecodeTest, RowsAreWhereTheirKsSay) {
  grpc::ByteBuffer buffer = BufferOf(TwoRows().SerializeAsString());
  absl::StatusOr<TopKResult> result = DecodeResponse<v1::TopKResponse>(&buffer);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->rows(), 2);
  EXPECT_THAT(result->RowIndices(0), ElementsAre(7));
  EXPECT_THAT(result->RowIndices(1), ElementsAre(8, 9));
  EXPECT_THAT(result->RowProbs(1), ElementsAre(0.25f, 0.125f));
}

TEST(DecodeTest, AnAnswerThatDisagreesWithItselfIsInternal) {
  const std::function<void(v1::TopKResponse&)> changes[] = {
      [](v1::TopKResponse& r) { r.add_k(1); },
      [](v1::TopKResponse& r) {
        r.set_k(0, -1);
        r.set_k(1, 4);
      },
      [](v1::TopKResponse& r) { r.add_indices(1); },
      [](v1::TopKResponse& r) { r.clear_probs(); },
      [](v1::TopKResponse& r) { r.add_logsumexp(1); },
      [](v1::TopKResponse& r) { r.clear_status(); },
      [](v1::TopKResponse& r) { r.clear_status_position(); },
  };
  for (const auto& change : changes) {
    v1::TopKResponse response = TwoRows();
    change(response);
    grpc::ByteBuffer buffer = BufferOf(response.SerializeAsString());
    EXPECT_EQ(DecodeResponse<v1::TopKResponse>(&buffer).status().code(),
              absl::StatusCode::kInternal)
        << response.ShortDebugString();
  }
  grpc::ByteBuffer garbage = BufferOf("\xff\xff\xff garbage");
  EXPECT_EQ(DecodeResponse<v1::TopKResponse>(&garbage).status().code(),
            absl::StatusCode::kInternal);
}

TEST(ClientTest, RefusesOptionsThatCannotWork) {
  for (const char* address :
       {"", "localhost", "localhost:", ":80", "localhost:x", "localhost:70000", "localhost:+80",
        "unix:", "http://localhost:80", "localhost:80/", "::1:80", "[::1:80", "[localhost]:80",
        "a b:80", " localhost:80", "dns:///", "dns:///http://a:80", "ipv4:1.2.3.4:80,::1:80"}) {
    EXPECT_EQ(Client::Create({.address = address}).status().code(),
              absl::StatusCode::kInvalidArgument)
        << address;
  }
  EXPECT_FALSE(Client::Create({.deadline = absl::ZeroDuration()}).ok());
  EXPECT_FALSE(Client::Create({.deadline = absl::InfiniteDuration()}).ok());
  EXPECT_FALSE(Client::Create({.retry = {.max_attempts = 0}}).ok());
  EXPECT_FALSE(Client::Create({.request_id = "a b"}).ok());
  EXPECT_FALSE(Client::Create({.traceparent = "x"}).ok());
  for (const char* address : {"localhost:80", "[::1]:80", "[fe80::1%eth0]:80", "unix:/tmp/x",
                              "unix:relative", "a-b.c_d.example:80", "dns:///a.example:80",
                              "ipv4:1.2.3.4:80,5.6.7.8:81", "ipv6:[::1]:80,[::2]:81"}) {
    EXPECT_TRUE(Client::Create({.address = address}).ok()) << address;
  }
}

TEST(ClientTest, TopKComesBack) {
  FakeServer server;
  auto client = Connect(server.address());
  absl::StatusOr<TopKResult> result = client->TopK(OneRow());
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_THAT(result->answer.indices(), ElementsAre(2, 1));
  EXPECT_THAT(result->answer.probs(),
              ElementsAre(FloatNear(0.625f, 1e-6f), FloatNear(0.25f, 1e-6f)));
  EXPECT_THAT(result->answer.logsumexp(), ElementsAre(FloatNear(std::log(8.0f), 1e-6f)));
  EXPECT_THAT(result->answer.status(), ElementsAre(v1::ROW_STATUS_OK));
  EXPECT_EQ(result->attempts, 1);
  EXPECT_EQ(result->answer.timings().kernel_ns(), 5000);
  EXPECT_GT(result->round_trip, absl::ZeroDuration());
}

TEST(ClientTest, RowsMayComeInPiecesWithTheirOwnParameters) {
  FakeServer server;
  auto client = Connect(server.address());
  const std::vector<float> other = {5.0f, 5.0f, 5.0f};
  absl::StatusOr<TopKResult> result = client->TopK({.dtype = v1::DTYPE_F32,
                                                    .rows = 2,
                                                    .vocab = 3,
                                                    .logits = {ViewOf(kLogits), ViewOf(other)},
                                                    .params = TopKParams({1, 3}, {0.5f, 1.0f})});
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_THAT(result->RowIndices(0), ElementsAre(2));
  EXPECT_THAT(result->RowProbs(0), ElementsAre(FloatNear(25.0f / 30, 1e-6f)));  // squares: 1, 4, 25
  EXPECT_THAT(result->RowIndices(1), ElementsAre(0, 1, 2));
}

TEST(ClientTest, SpeaksOverAUnixSocket) {
  TempDir dir;
  FakeServer server(nullptr, dir.path("socket"));
  auto client = Connect("unix:" + dir.path("socket"));
  absl::StatusOr<TopKResult> result = client->TopK(OneRow());
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_THAT(result->answer.indices(), ElementsAre(2, 1));
}

TEST(ClientTest, OneClientServesManyThreads) {
  FakeServer server;
  auto client = Connect(server.address());
  std::atomic<int> right = 0;
  std::vector<std::thread> threads;
  for (int t = 0; t < 8; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 20; ++i) {
        std::vector<float> logits(100, 0.0f);
        logits[t * 10 + i % 10] = 9.0f;
        absl::StatusOr<TopKResult> result = client->TopK({.dtype = v1::DTYPE_F32,
                                                          .rows = 1,
                                                          .vocab = 100,
                                                          .logits = {ViewOf(logits)},
                                                          .params = TopKParams({1})});
        right += result.ok() && result->answer.indices(0) == t * 10 + i % 10;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(right, 160);
}

TEST(ClientTest, LargeMessagesPassBothWays) {
  FakeServer server;
  auto client = Connect(server.address());
  std::vector<float> logits(1 << 20);
  for (size_t i = 0; i < logits.size(); ++i) logits[i] = -static_cast<float>(i);
  absl::StatusOr<TopKResult> result =
      client->TopK({.dtype = v1::DTYPE_F32,
                    .rows = 1,
                    .vocab = 1 << 20,
                    .logits = {ViewOf(logits)},
                    .params = TopKParams({1 << 20})});  // an answer of 8 MiB
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->RowIndices(0).back(), (1 << 20) - 1);
}

TEST(ClientTest, RefusesWhatIsOverMaxMessageBytes) {
  FakeServer server;
  auto client = Connect(server.address(), {.max_message_bytes = 20});
  absl::StatusOr<TopKResult> result = client->TopK(OneRow());
  EXPECT_EQ(result.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(result.status().message()),
              HasSubstr("allowed 1..20 (max_message_bytes)"));
  EXPECT_EQ(server.calls(), 0);
}

// Retries. A handler that refuses the first `times` calls with `code`.
FakeServer::Handler Refuse(int times, grpc::StatusCode code, const char* pushback_ms = nullptr,
                           const char* text = "refused") {
  return [=](int call, grpc::ServerContext* context, const v1::TopKRequest& request,
             v1::TopKResponse* response) {
    if (call > times) {
      ReferenceTopK(request, response);
      return grpc::Status::OK;
    }
    if (pushback_ms != nullptr) context->AddTrailingMetadata("grpc-retry-pushback-ms", pushback_ms);
    return grpc::Status(code, text);
  };
}

constexpr int kAlways = std::numeric_limits<int>::max();

// By a clock whose waits are over at once.
class RetryTest : public ::testing::Test {
 protected:
  std::unique_ptr<Client> Connect(const std::string& address, ClientOptions options = {}) {
    options.address = address;
    return ClientOf(options, clock_);
  }

  TestClock clock_;
};

TEST_F(RetryTest, TriesAgainUntilItSucceeds) {
  for (grpc::StatusCode code : {grpc::UNAVAILABLE, grpc::RESOURCE_EXHAUSTED}) {
    FakeServer server(Refuse(2, code));
    absl::StatusOr<TopKResult> result = Connect(server.address())->TopK(OneRow());
    ASSERT_TRUE(result.ok()) << result.status();
    EXPECT_EQ(result->attempts, 3);
    EXPECT_THAT(result->answer.indices(), ElementsAre(2, 1));
  }
}

TEST_F(RetryTest, AStreamThatAProxyCutIsTriedAgain) {
  FakeServer server(Refuse(1, grpc::CANCELLED, nullptr, "Received RST_STREAM with error code 8"));
  absl::StatusOr<TopKResult> result = Connect(server.address())->TopK(OneRow());
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->attempts, 2);
}

TEST_F(RetryTest, WaitsAsLongAsTheServerSays) {
  FakeServer server(Refuse(2, grpc::RESOURCE_EXHAUSTED, "60"));
  ASSERT_TRUE(Connect(server.address())->TopK(OneRow()).ok());
  EXPECT_THAT(clock_.waits, ElementsAre(absl::Milliseconds(60), absl::Milliseconds(60)));
}

// Between half and all of 20 ms, twice that, and so on up to a second.
TEST_F(RetryTest, WaitsLongerEachTimeWhereTheServerSaysNothing) {
  FakeServer server(Refuse(kAlways, grpc::UNAVAILABLE));
  const absl::Status status = Connect(server.address())->TopK(OneRow()).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(status.message()), HasSubstr("refused (gave up after 12 attempts)"));
  EXPECT_EQ(server.calls(), 12);
  ASSERT_EQ(clock_.waits.size(), 11u);
  absl::Duration most = absl::Milliseconds(20);
  for (const absl::Duration wait : clock_.waits) {
    EXPECT_GE(wait, most / 2);
    EXPECT_LE(wait, most);
    most = std::min(most * 2, absl::Seconds(1));
  }
}

TEST_F(RetryTest, ANegativeDelayMeansNoRetry) {
  for (const char* pushback : {"-1", "soon"}) {
    FakeServer server(Refuse(kAlways, grpc::UNAVAILABLE, pushback));
    absl::StatusOr<TopKResult> result = Connect(server.address())->TopK(OneRow());
    EXPECT_EQ(result.status().code(), absl::StatusCode::kUnavailable);
    EXPECT_THAT(std::string(result.status().message()), HasSubstr("asks not to retry"));
    EXPECT_EQ(server.calls(), 1) << pushback;
  }
}

TEST_F(RetryTest, DoesNotWaitPastTheDeadline) {
  FakeServer server(Refuse(kAlways, grpc::RESOURCE_EXHAUSTED, "60000"));
  absl::StatusOr<TopKResult> result = Connect(server.address())->TopK(OneRow());
  EXPECT_EQ(result.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(result.status().message()), HasSubstr("would pass the deadline"));
  EXPECT_THAT(clock_.waits, IsEmpty());
  EXPECT_EQ(server.calls(), 1);
}

TEST_F(RetryTest, AllAttemptsShareOneDeadline) {
  FakeServer server(Refuse(kAlways, grpc::UNAVAILABLE, "40000"));
  auto client =
      Connect(server.address(), {.deadline = absl::Seconds(500), .retry = {.max_attempts = 1000}});
  EXPECT_FALSE(client->TopK(OneRow()).ok());
  EXPECT_EQ(server.calls(), 13);  // at 0, 40, ... 480 s
}

TEST_F(RetryTest, OtherErrorsAreFinal) {
  for (grpc::StatusCode code : {grpc::INVALID_ARGUMENT, grpc::NOT_FOUND, grpc::INTERNAL,
                                grpc::DEADLINE_EXCEEDED, grpc::CANCELLED, grpc::UNIMPLEMENTED}) {
    FakeServer server(Refuse(kAlways, code, "1"));
    absl::StatusOr<TopKResult> result = Connect(server.address())->TopK(OneRow());
    EXPECT_EQ(static_cast<int>(result.status().code()), static_cast<int>(code));
    EXPECT_EQ(result.status().message(), "refused");
    EXPECT_EQ(server.calls(), 1);
  }
}

TEST_F(RetryTest, NobodyListeningIsUnavailable) {
  std::string address;
  {
    FakeServer gone;
    address = gone.address();
  }
  auto client = Connect(address, {.retry = {.max_attempts = 2}});
  EXPECT_EQ(client->TopK(OneRow()).status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(client->Info().status().code(), absl::StatusCode::kUnavailable);
}

// A decode loop must not stand idle for seconds because its server was restarted. By gRPC's own
// defaults, the eighth connection that fails comes after 43 s, and a second after one that is
// silent after 20 s.
TEST_F(RetryTest, AServerThatIsAwayIsLookedForAgainAndAgain) {
  for (const bool silent : {false, true}) {
    const TempDir dir;
    sockaddr_un address = {.sun_family = AF_UNIX, .sun_path = {}};
    dir.path("peer").copy(address.sun_path, sizeof(address.sun_path) - 1);
    const int peer = socket(AF_UNIX, SOCK_STREAM, 0);
    ASSERT_EQ(bind(peer, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
    ASSERT_EQ(listen(peer, 100), 0);
    std::atomic<int> connections = 0;
    std::thread accepts([&] {
      std::vector<int> open;
      for (int fd; (fd = accept(peer, nullptr, nullptr)) >= 0; ++connections) {
        if (silent) open.push_back(fd);
        if (!silent) close(fd);
      }
      for (const int fd : open) close(fd);
    });
    auto client = Connect("unix:" + dir.path("peer"),
                          {.deadline = absl::Milliseconds(50), .retry = {.max_attempts = 1}});
    EXPECT_TRUE(Becomes([&] {
      EXPECT_FALSE(client->Info().ok());
      return connections >= (silent ? 3 : 8);
    }));
    shutdown(peer, SHUT_RDWR);  // ends accept
    accepts.join();
    close(peer);
  }
}

TEST_F(RetryTest, AServerThatComesUpDuringABackoffIsThereAfterIt) {
  TempDir dir;
  const ClientOptions options = {.address = "unix:" + dir.path("late.sock")};
  const std::shared_ptr<grpc::Channel> channel = *MakeChannel(options);
  std::unique_ptr<FakeServer> server;
  clock_.stands_still = [&, looks = 0]() mutable {
    if (server == nullptr) server = std::make_unique<FakeServer>(nullptr, dir.path("late.sock"));
    return ++looks < 4000 && channel->GetState(/*try_to_connect=*/false) != GRPC_CHANNEL_READY;
  };
  Client client(std::make_unique<Transport>(options, channel, clock_));
  const absl::StatusOr<TopKResult> result = client.TopK(OneRow());
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->attempts, 2);
}

// Life of the payload. 64 MiB do not fit the windows of a server that does not read, so that gRPC
// holds the payload when the deadline comes; the memory is freed at once, and AddressSanitizer
// watches.
TEST(PayloadTest, IsReleasedWhenACallEndsByDeadline) {
  StuckServer server;
  auto client = Connect(server.address(), {.deadline = absl::Milliseconds(300)});
  auto logits = std::make_unique<std::vector<float>>(16 << 20, 1.0f);
  const absl::Time start = absl::Now();
  absl::StatusOr<TopKResult> result = client->TopK({.dtype = v1::DTYPE_F32,
                                                    .rows = 16,
                                                    .vocab = 1 << 20,
                                                    .logits = {ViewOf(*logits)},
                                                    .params = TopKParams({1})});
  logits.reset();
  EXPECT_EQ(result.status().code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_LT(absl::Now() - start, absl::Seconds(10)) << "a dead connection lets go after 20 s";
}

TEST(PayloadTest, AnOwnerIsLetGo) {
  std::weak_ptr<std::vector<float>> watch;
  {
    StuckServer server;
    auto client = Connect(server.address(), {.deadline = absl::Milliseconds(300)});
    auto logits = std::make_shared<std::vector<float>>(16 << 20, 1.0f);
    watch = logits;
    EXPECT_EQ(client
                  ->TopK({.dtype = v1::DTYPE_F32,
                          .rows = 16,
                          .vocab = 1 << 20,
                          .logits = {ViewOf(*logits)},
                          .params = TopKParams({1}),
                          .owner = logits})
                  .status()
                  .code(),
              absl::StatusCode::kDeadlineExceeded);
  }
  EXPECT_TRUE(Becomes([&] { return watch.expired(); }));
}

TEST(AsyncTest, RunsDoneOnceWithTheResult) {
  FakeServer server;
  auto client = Connect(server.address());
  auto logits = std::make_shared<std::vector<float>>(kLogits);
  TopKRequest request = OneRow();
  request.logits = {ViewOf(*logits)};
  request.owner = logits;
  std::weak_ptr<std::vector<float>> watch = logits;
  logits.reset();
  absl::Notification done;
  absl::StatusOr<TopKResult> got = absl::UnknownError("");
  client->TopKAsync(request, [&](const absl::StatusOr<TopKResult>& result) {
    got = result;
    done.Notify();
  });
  request.owner.reset();
  ASSERT_TRUE(done.WaitForNotificationWithTimeout(absl::Seconds(20)));
  ASSERT_TRUE(got.ok()) << got.status();
  EXPECT_THAT(got->answer.indices(), ElementsAre(2, 1));
  EXPECT_TRUE(Becomes([&] { return watch.expired(); }));
}

TEST(AsyncTest, NeedsAnOwner) {
  FakeServer server;
  auto client = Connect(server.address());
  absl::Status status;
  client->TopKAsync(OneRow(),
                    [&](const absl::StatusOr<TopKResult>& result) { status = result.status(); });
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
}

TEST(AsyncTest, DoesNotRetry) {
  FakeServer server(Refuse(kAlways, grpc::UNAVAILABLE));
  auto client = Connect(server.address());
  TopKRequest request = OneRow();
  request.owner = std::make_shared<int>(0);  // kLogits outlives everything
  absl::Notification done;
  absl::Status status;
  client->TopKAsync(request, [&](const absl::StatusOr<TopKResult>& result) {
    status = result.status();
    done.Notify();
  });
  ASSERT_TRUE(done.WaitForNotificationWithTimeout(absl::Seconds(20)));
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(server.calls(), 1);
}

// Calls one after another. Returns how many of them were not sent.
int CallsThatWereNotSent(const ClientOptions& options, int calls) {
  auto client = *Client::Create(options);
  TopKRequest request = OneRow();
  request.owner = std::make_shared<int>(0);  // kLogits outlives everything
  int not_sent = 0;
  for (int i = 0; i < calls; ++i) {
    absl::Notification done;
    client->TopKAsync(request, [&](const absl::StatusOr<TopKResult>& result) {
      EXPECT_EQ(result.status().code(), absl::StatusCode::kResourceExhausted);
      not_sent += absl::StartsWith(result.status().message(), "not sent: ");
      done.Notify();
    });
    EXPECT_TRUE(done.WaitForNotificationWithTimeout(absl::Seconds(20)));
  }
  return not_sent;
}

TEST(ThrottledClientTest, DoesNotSendMostCallsThatWouldBeRefused) {
  FakeServer server(Refuse(kAlways, grpc::RESOURCE_EXHAUSTED, "1"));
  const int not_sent = CallsThatWereNotSent({.address = server.address()}, 300);
  EXPECT_EQ(server.calls(), 300 - not_sent);
  EXPECT_GT(not_sent, 100);
  EXPECT_LT(not_sent, 300 - 8) << "some show when the server takes calls again";
}

TEST(ThrottledClientTest, CanBeToldToSendAll) {
  FakeServer server(Refuse(kAlways, grpc::RESOURCE_EXHAUSTED, "1"));
  EXPECT_EQ(CallsThatWereNotSent({.address = server.address(), .throttle = false}, 300), 0);
  EXPECT_EQ(server.calls(), 300);
}

// It says "send less at once", not "later".
TEST(ThrottledClientTest, SendsCallsThatAreRefusedForTheirSize) {
  FakeServer server(Refuse(kAlways, grpc::RESOURCE_EXHAUSTED));
  EXPECT_EQ(CallsThatWereNotSent({.address = server.address()}, 300), 0);
}

TEST(InfoTest, ComesBack) {
  FakeServer server;
  absl::StatusOr<v1::GetInfoResponse> info = Connect(server.address())->Info();
  ASSERT_TRUE(info.ok()) << info.status();
  EXPECT_EQ(info->version(), "1.2.3");
  EXPECT_EQ(info->limits().max_vocab(), 1 << 20);
}

TEST(HealthTest, SaysWhetherTheServerServes) {
  FakeServer server;
  auto client = Connect(server.address());
  EXPECT_EQ(*client->Health(), ServingStatus::kServing);
  server.SetServing(false);
  EXPECT_EQ(*client->Health(), ServingStatus::kNotServing);
  EXPECT_EQ(client->Health("nothing.of.the.kind").status().code(), absl::StatusCode::kNotFound);
}

TEST(HealthTest, WatchSeesEveryChange) {
  FakeServer server;
  auto client = Connect(server.address());
  std::vector<ServingStatus> seen;
  EXPECT_TRUE(client
                  ->WatchHealth("",
                                [&](ServingStatus status) {
                                  seen.push_back(status);
                                  server.SetServing(false);
                                  return seen.size() < 2;
                                })
                  .ok());
  EXPECT_THAT(seen, ElementsAre(ServingStatus::kServing, ServingStatus::kNotServing));
}

TEST(HealthTest, WatchEndsWithTheServer) {
  FakeServer server;
  auto client = Connect(server.address());
  std::thread stopper;
  const absl::Status status = client->WatchHealth("", [&](ServingStatus) {
    stopper = std::thread([&] { server.Shutdown(); });
    return true;
  });
  stopper.join();
  EXPECT_FALSE(status.ok());
}

}  // namespace
}  // namespace logitd::client
