// What an operator and a balancer see of a running server: names of calls, logs, load, metrics.
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "logitd/v1/heads.grpc.pb.h"
#include "logitd/v1/sampler.grpc.pb.h"
#include "logitd/v1/server.grpc.pb.h"
#include "tests/becomes.h"
#include "tests/e2e/peers.h"
#include "tests/e2e/server_process.h"
#include "tests/e2e/shared_server.h"
#include "tests/e2e/topk_calls.h"

namespace logitd::e2e {
namespace {

using ::logitd::testing::Becomes;
using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::Pair;

constexpr char kParent[] = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
using Names = std::multimap<std::string, std::string>;

// The names that came back.
Names Echoed(const grpc::ClientContext& context) {
  Names names;
  for (const auto& [key, value] : context.GetServerTrailingMetadata()) {
    const std::string name(key.data(), key.size());
    if (name != "x-request-id" && name != "traceparent") continue;
    names.emplace(name, std::string(value.data(), value.size()));
  }
  return names;
}

void AddAll(const Names& names, grpc::ClientContext* context) {
  for (const auto& [name, value] : names) context->AddMetadata(name, value);
}

std::vector<std::string> LinesWith(const ServerProcess& server, const std::string& text) {
  std::vector<std::string> lines = absl::StrSplit(server.Log(), '\n');
  std::erase_if(lines,
                [&](const std::string& line) { return line.find(text) == std::string::npos; });
  return lines;
}

v1::GetLoadResponse GetLoad(const std::shared_ptr<grpc::Channel>& channel) {
  v1::GetLoadResponse load;
  const grpc::Status status =
      v1::Server::NewStub(channel)->GetLoad(Context().get(), v1::GetLoadRequest(), &load);
  EXPECT_TRUE(status.ok()) << status.error_message();
  return load;
}

class NamesTest : public SharedServerTest {
 protected:
  // The names that come back with a TopK.
  Names OfTopK(const Names& sent, int k = 1) {
    const auto context = Context();
    AddAll(sent, context.get());
    v1::TopKResponse response;
    status_ = v1::Sampler::NewStub(channel_)->TopK(context.get(), Request({1, 2}, 1, k), &response);
    return Echoed(*context);
  }

  const std::shared_ptr<grpc::Channel> channel_ = Connect(server_->tcp());
  const Names both_ = {{"x-request-id", "req-1"}, {"traceparent", kParent}};
  grpc::Status status_;
};

TEST_F(NamesTest, ComeBackWithAnswersAndErrors) {
  EXPECT_EQ(OfTopK(both_), both_);
  EXPECT_TRUE(status_.ok());
  EXPECT_EQ(OfTopK(both_, /*k=*/0), both_);
  EXPECT_EQ(status_.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(OfTopK({}), ElementsAre());
}

TEST_F(NamesTest, ComeBackWhereTheHeadersAreRefused) {
  Names sent = both_;
  sent.emplace("logitd-priority", "urgent");
  EXPECT_EQ(OfTopK(sent), both_);
  EXPECT_EQ(status_.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
}

TEST_F(NamesTest, ThatAreMalformedAreIgnored) {
  const std::vector<Names> malformed = {{{"x-request-id", "two words"}},
                                        {{"x-request-id", std::string(129, 'x')}},
                                        {{"x-request-id", "a"}, {"x-request-id", "b"}},
                                        {{"traceparent", "00-0-0-0"}},
                                        {{"traceparent", std::string(kParent) + "-more"}}};
  for (const Names& names : malformed) {
    EXPECT_THAT(OfTopK(names), ElementsAre()) << names.begin()->second;
    EXPECT_TRUE(status_.ok()) << status_.error_message();
  }
  EXPECT_THAT(OfTopK({{"x-request-id", "good"}, {"traceparent", "bad"}}),
              ElementsAre(Pair("x-request-id", "good")));
}

TEST_F(NamesTest, ComeBackAtTheEndOfAStream) {
  const auto context = Context();
  AddAll(both_, context.get());
  const auto stream = v1::Sampler::NewStub(channel_)->SampleStream(context.get());
  auto request = Of<v1::SampleRequest>({1, 2}, 1);
  request.add_seed(1);
  v1::SampleResponse response;
  EXPECT_TRUE(stream->Write(request));
  EXPECT_TRUE(stream->Read(&response));
  stream->WritesDone();
  EXPECT_TRUE(stream->Finish().ok());
  EXPECT_EQ(Echoed(*context), both_);
}

TEST_F(NamesTest, ComeBackFromOtherServices) {
  const auto check = [&](auto call) {
    const auto context = Context();
    AddAll(both_, context.get());
    call(context.get());
    EXPECT_EQ(Echoed(*context), both_);
  };
  const auto server = v1::Server::NewStub(channel_);
  const auto heads = v1::Heads::NewStub(channel_);
  v1::GetInfoResponse info;
  v1::GetLoadResponse load;
  v1::ListHeadsResponse list;
  v1::GetHeadResponse head;
  v1::UnloadHeadResponse unloaded;
  v1::LoadHeadResponse loaded;
  check([&](auto* context) { server->GetInfo(context, {}, &info); });
  check([&](auto* context) { server->GetLoad(context, {}, &load); });
  check([&](auto* context) { heads->List(context, {}, &list); });
  check([&](auto* context) { heads->Get(context, {}, &head); });
  check([&](auto* context) { heads->Unload(context, {}, &unloaded); });
  check([&](auto* context) {
    const auto reader = heads->Load(context, {});
    EXPECT_FALSE(reader->Read(&loaded));
    EXPECT_FALSE(reader->Finish().ok());
  });
}

void NamedTopK(const std::shared_ptr<grpc::Channel>& channel, const std::string& id, int k = 1) {
  const auto context = Context();
  context->AddMetadata("x-request-id", id);
  context->AddMetadata("traceparent", kParent);
  v1::TopKResponse response;
  v1::Sampler::NewStub(channel)->TopK(context.get(), Request({1, 2, 1, 2}, 2, k), &response);
}

TEST(CallLogTest, AtDebugEveryCallHasALine) {
  ServerProcess server({"--log-level=debug"});
  const auto channel = Connect(server.tcp());
  // A line may come after the answer, and so after the next call's.
  const auto has_lines = [&](size_t count) {
    return Becomes([&] { return LinesWith(server, " call method=").size() == count; });
  };
  NamedTopK(channel, "one");
  ASSERT_TRUE(has_lines(1)) << server.Log();
  NamedTopK(channel, "two", /*k=*/0);
  ASSERT_TRUE(has_lines(2)) << server.Log();
  EXPECT_TRUE(SmallTopK(channel).ok());
  ASSERT_TRUE(has_lines(3)) << server.Log();
  const std::vector<std::string> lines = LinesWith(server, " call method=");
  EXPECT_THAT(lines[0],
              ContainsRegex("debug call method=/logitd.v1.Sampler/TopK code=OK "
                            "peer=ipv4:127.0.0.1:[0-9]+ request_id=one "
                            "traceparent=00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01 "
                            "messages=1 rows=2 received_bytes=[1-9][0-9]* sent_bytes=[1-9][0-9]* "
                            "total_us=[1-9][0-9]* wait_us=[0-9]+ receive_us=[0-9]+ "));
  EXPECT_THAT(lines[0], ContainsRegex(" batch_rows=2$"));
  EXPECT_THAT(lines[1], AllOf(HasSubstr("code=INVALID_ARGUMENT"), HasSubstr("request_id=two"),
                              HasSubstr("sent_bytes=0")));
  EXPECT_THAT(lines[2], HasSubstr("request_id=- traceparent=- "));
}

TEST(CallLogTest, AtDebugCallsThatAreNoOpsHaveALineToo) {
  ServerProcess server({"--log-level=debug"});
  const auto channel = Connect(server.unix_socket());
  const auto info_context = Context();
  info_context->AddMetadata("x-request-id", "info-1");
  v1::GetInfoResponse info;
  ASSERT_TRUE(v1::Server::NewStub(channel)->GetInfo(info_context.get(), {}, &info).ok());
  const auto heads = v1::Heads::NewStub(channel);
  v1::GetHeadRequest get;
  get.set_name("missing");
  v1::GetHeadResponse head;
  EXPECT_EQ(heads->Get(Context().get(), get, &head).error_code(), grpc::StatusCode::NOT_FOUND);
  const auto load_context = Context();
  EXPECT_EQ(heads->Load(load_context.get(), {})->Finish().error_code(),
            grpc::StatusCode::FAILED_PRECONDITION);
  ASSERT_TRUE(Becomes([&] { return LinesWith(server, " call method=").size() == 3; }))
      << server.Log();
  EXPECT_THAT(LinesWith(server, " call method="),
              ElementsAre(ContainsRegex("debug call method=/logitd.v1.Server/GetInfo code=OK "
                                        "peer=unix:connection-[0-9]+ request_id=info-1 .* "
                                        "received_bytes=0 sent_bytes=[1-9]"),
                          ContainsRegex("method=/logitd.v1.Heads/Get code=NOT_FOUND .* "
                                        "received_bytes=9 sent_bytes=0 "),
                          ContainsRegex("method=/logitd.v1.Heads/Load code=FAILED_PRECONDITION ")));
}

TEST(CallLogTest, AStreamHasOneLineWithItsSums) {
  ServerProcess server({"--log-level=debug"});
  const auto channel = Connect(server.unix_socket());
  const auto context = Context();
  context->AddMetadata("x-request-id", "stream-7");
  const auto stream = v1::Sampler::NewStub(channel)->SampleStream(context.get());
  auto request = Of<v1::SampleRequest>({1, 2, 3, 4}, 2);
  request.add_seed(1);
  request.add_seed(2);
  v1::SampleResponse response;
  int64_t sent = 0;
  for (int i = 0; i < 3; ++i) {
    EXPECT_TRUE(stream->Write(request));
    EXPECT_TRUE(stream->Read(&response));
    sent += static_cast<int64_t>(request.ByteSizeLong());
  }
  EXPECT_TRUE(server.WaitForMetric("logitd_open_streams", '=', 1));
  stream->WritesDone();
  EXPECT_TRUE(stream->Finish().ok());
  ASSERT_TRUE(Becomes([&] { return !LinesWith(server, " call method=").empty(); }));
  const std::vector<std::string> lines = LinesWith(server, " call method=");
  ASSERT_EQ(lines.size(), 1u);
  EXPECT_THAT(lines[0], AllOf(HasSubstr("method=/logitd.v1.Sampler/SampleStream code=OK "),
                              HasSubstr("peer=unix:connection-"), HasSubstr("request_id=stream-7"),
                              HasSubstr("messages=3 rows=6 received_bytes=" + std::to_string(sent) +
                                        " sent_bytes=")));
  EXPECT_TRUE(server.WaitForMetric("logitd_open_streams", '=', 0));
  EXPECT_TRUE(server.WaitForMetric("logitd_open_calls", '=', 0));
}

TEST(CallLogTest, OnlySlowCallsHaveALineAtInfo) {
  ServerProcess server({"--slow-call=1s"});
  const auto channel = Connect(server.tcp());
  EXPECT_TRUE(SmallTopK(channel).ok());
  GenericCall slow(channel, kTopK);
  slow.context().AddMetadata("x-request-id", "slow-1");
  ASSERT_TRUE(slow.Start());
  absl::SleepFor(absl::Milliseconds(1200));  // the peer is the slow one
  const std::string message = Request({1, 2}, 1, 1).SerializeAsString();
  grpc::ByteBuffer answer;
  ASSERT_TRUE(slow.Write(ToBuffer(message), /*last=*/true));
  ASSERT_TRUE(slow.Read(&answer));
  EXPECT_TRUE(slow.Finish().ok());
  ASSERT_TRUE(Becomes([&] { return !LinesWith(server, "slow call").empty(); })) << server.Log();
  EXPECT_THAT(LinesWith(server, "call method="),
              ElementsAre(AllOf(HasSubstr(" info slow call method=/logitd.v1.Sampler/TopK code=OK"),
                                HasSubstr("request_id=slow-1"),
                                // The phase says why: more than a second of receiving.
                                ContainsRegex(" receive_us=[1-9][0-9]{6,} "))));
}

TEST(CallLogTest, LinesAboutSlowCallsAreLimited) {
  ServerProcess server({"--slow-call=0s"});
  const auto channel = Connect(server.tcp());
  constexpr int kCalls = 400;
  const absl::Time start = absl::Now();
  for (int i = 0; i < kCalls; ++i) ASSERT_TRUE(SmallTopK(channel).ok());
  const double seconds = absl::ToDoubleSeconds(absl::Now() - start) + 1;
  EXPECT_TRUE(
      server.WaitForMetric("logitd_log_lines_suppressed_total{source=\"slow_calls\"}", '>', 0));
  const auto lines = static_cast<double>(LinesWith(server, "slow call").size());
  EXPECT_GE(lines, 100);
  EXPECT_LE(lines, 101 + 20 * seconds);
}

TEST(CallLogTest, SignalsSetTheLevel) {
  ServerProcess server;
  const auto channel = Connect(server.tcp());
  NamedTopK(channel, "quiet");
  ASSERT_TRUE(server.WaitForMetric("logitd_open_calls", '=', 0));  // its line would be written
  server.Signal(SIGUSR1);
  ASSERT_TRUE(Becomes([&] { return !LinesWith(server, "log level debug").empty(); }));
  NamedTopK(channel, "loud");
  ASSERT_TRUE(Becomes([&] { return !LinesWith(server, "request_id=loud").empty(); }));
  server.Signal(SIGUSR2);
  ASSERT_TRUE(Becomes([&] { return !LinesWith(server, "log level info").empty(); }));
  NamedTopK(channel, "quiet");
  EXPECT_TRUE(server.WaitForMetric(Requests("OK"), '=', 3));
  server.Signal(SIGTERM);
  EXPECT_EQ(server.Wait(absl::Seconds(20)), 0);
  EXPECT_THAT(server.Log(), Not(HasSubstr("request_id=quiet")));
}

TEST(GetLoadTest, ShowsWhatWaitsAndWhatIsHeld) {
  ServerProcess server(With(kRoomForOne, {"--min-receive-rate=0"}));
  const auto channel = Connect(server.tcp());
  const v1::GetLoadResponse idle = GetLoad(channel);
  EXPECT_FALSE(idle.draining());
  EXPECT_EQ(idle.open_calls(), 0);
  EXPECT_EQ(idle.held_bytes(), 0);
  EXPECT_EQ(idle.max_held_bytes(), 9 << 20);
  EXPECT_EQ(idle.predicted_call_ns(), 0);
  EXPECT_EQ(idle.busy(), 0);
  EXPECT_EQ(idle.ops_size(), 0);

  AdmittedCall admitted(server, channel);
  AskingCall waits(channel);
  AskingCall stream(channel, "/logitd.v1.Sampler/SampleStream");
  ASSERT_TRUE(server.WaitForMetric(kWaitingCalls, '=', 2));
  const v1::GetLoadResponse load = GetLoad(channel);
  EXPECT_EQ(load.open_calls(), 3);
  EXPECT_EQ(load.open_streams(), 1);
  EXPECT_EQ(load.waiting_calls(), 2);
  EXPECT_GT(load.held_bytes(), 8 << 20);

  server.Signal(SIGTERM);
  ASSERT_TRUE(server.WaitForMetric("logitd_draining", '=', 1));
  EXPECT_TRUE(GetLoad(channel).draining());
}

TEST(GetLoadTest, ShowsHowBusyTheStreamsAreAndWithWhat) {
  ServerProcess server;
  const auto channel = Connect(server.tcp());
  const std::vector<float> logits(8 * 50000);
  const v1::TopKRequest request = Request(logits, 8, 10);
  v1::TopKResponse response;
  const absl::Time start = absl::Now();
  int64_t rows = 0;
  while (absl::Now() < start + absl::Seconds(2)) {
    ASSERT_TRUE(TopK(channel, request, &response).ok());
    rows += 8;
  }
  const double rows_per_s = static_cast<double>(rows) / absl::ToDoubleSeconds(absl::Now() - start);
  const v1::GetLoadResponse load = GetLoad(channel);
  ASSERT_EQ(load.ops_size(), 1);
  EXPECT_EQ(load.ops(0).name(), "softmax_topk");
  // A weighted mean of two seconds of an uneven machine against their plain mean.
  EXPECT_GT(load.ops(0).rows_per_s(), 0.2 * rows_per_s);
  EXPECT_LT(load.ops(0).rows_per_s(), 3 * rows_per_s);
  EXPECT_GT(load.busy(), 0);
  EXPECT_LE(load.busy(), 0.75);  // one call at a time leaves one of two streams idle
  EXPECT_DOUBLE_EQ(load.ops(0).busy(), load.busy());
  EXPECT_GT(load.predicted_call_ns(), 10'000);
  EXPECT_LT(load.predicted_call_ns(), 5'000'000'000);
  absl::SleepFor(absl::Seconds(3));
  EXPECT_LT(GetLoad(channel).busy(), 0.1 * load.busy());
}

TEST(SightMetricsTest, TheBuildTheProcessAndTheTrafficAreThere) {
  ServerProcess server;
  const auto channel = Connect(server.tcp());
  EXPECT_TRUE(SmallTopK(channel).ok());
  const double received = server.Metric("logitd_received_bytes_total");
  const double sent = server.Metric("logitd_sent_bytes_total");
  EXPECT_GT(received, 100);
  EXPECT_GT(sent, 100);
  const std::vector<float> logits(250000);
  v1::TopKResponse response;
  ASSERT_TRUE(TopK(channel, Request(logits, 1, 10), &response).ok());
  EXPECT_GE(server.Metric("logitd_received_bytes_total"), received + 1'000'000);
  EXPECT_LT(server.Metric("logitd_received_bytes_total"), received + 1'100'000);
  EXPECT_GT(server.Metric("logitd_sent_bytes_total"), sent);
  const std::string page = server.Scrape();
  EXPECT_THAT(page,
              ContainsRegex("logitd_build_info\\{backend=\"cpu\",grpc=\"nghttp2 [0-9.]+\",version="
                            "\"[0-9.]+\"\\} 1"));
  EXPECT_GT(server.Metric("process_cpu_seconds_total"), 0);
  EXPECT_NEAR(server.Metric("process_resident_memory_bytes"),
              static_cast<double>(server.RssBytes()), 64 << 20);
}

TEST(SightMetricsTest, EachPhaseOfACallIsCounted) {
  ServerProcess server(With(kRoomForOne, {"--min-receive-rate=0"}));
  const auto channel = Connect(server.tcp());
  AdmittedCall slow(server, channel);
  EXPECT_EQ(server.Metric("logitd_admission_wait_seconds_count"), 1);
  EXPECT_LT(server.Metric("logitd_admission_wait_seconds_sum"), 0.2);
  AskingCall waits(channel);
  ASSERT_TRUE(server.WaitForMetric(kWaitingCalls, '=', 1));
  absl::SleepFor(absl::Milliseconds(250));
  const grpc::ByteBuffer message = ToBuffer(Request({1, 2}, 1, 1).SerializeAsString());
  for (AskingCall* call : {static_cast<AskingCall*>(&slow), &waits}) {
    grpc::ByteBuffer answer;
    ASSERT_TRUE(call->Write(message, /*last=*/true));
    ASSERT_TRUE(call->Read(&answer));
    ASSERT_TRUE(call->Finish().ok());
  }
  EXPECT_TRUE(server.WaitForMetric("logitd_send_seconds_count", '=', 2));
  EXPECT_EQ(server.Metric("logitd_admission_wait_seconds_count"), 2);
  EXPECT_GE(server.Metric("logitd_admission_wait_seconds_sum"), 0.25);
  EXPECT_EQ(server.Metric("logitd_receive_seconds_count"), 2);
  EXPECT_GE(server.Metric("logitd_receive_seconds_sum"), 0.25);
  // The engine counts a batch after its answers.
  EXPECT_TRUE(
      server.WaitForMetric("logitd_batch_kernel_seconds_count{op=\"softmax_topk\"}", '=', 2));
  EXPECT_EQ(server.Metric("logitd_batch_queue_seconds_count{op=\"softmax_topk\"}"), 2);
  EXPECT_GT(server.Metric("logitd_stream_busy_seconds_total{op=\"softmax_topk\"}"), 0);
  EXPECT_EQ(server.Metric("logitd_stream_busy_seconds_total{op=\"sample\"}"), 0);
}

}  // namespace
}  // namespace logitd::e2e
