// Runs the load_bench binary against the fake server.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <fstream>
#include <mutex>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <vector>

#include "tests/client/fake_server.h"
#include "tests/client/subprocess.h"
#include "tests/client/test_files.h"

namespace logitd {
namespace {

using ::logitd::testing::FakeServer;
using ::logitd::testing::Ran;
using ::logitd::testing::ReferenceTopK;
using ::logitd::testing::RunBinary;
using ::logitd::testing::TempDir;
using ::testing::HasSubstr;

// What moving a json may throw is an assertion of its own.
// NOLINTNEXTLINE(bugprone-exception-escape)
struct Bench {
  Ran ran;
  nlohmann::json report;
  const nlohmann::json& result() const { return report["results"][0]; }
};

Bench LoadBench(const FakeServer& server, std::vector<std::string> args) {
  TempDir dir;
  const std::string file = dir.path("report.json");
  args.insert(args.end(), {"--addr", server.address(), "--rows", "2", "--vocab", "50", "--k", "3",
                           "--json", file});
  Bench bench;
  bench.ran = RunBinary("load_bench", args);
  std::ifstream in(file);
  if (in) bench.report = nlohmann::json::parse(in);
  return bench;
}

TEST(LoadBenchTest, ClosedLoopReportsWhatItDid) {
  FakeServer server;
  const Bench bench = LoadBench(server, {"--connections", "2", "--in-flight", "2", "--warmup",
                                         "0.1", "--duration", "0.5", "--dtype", "bf16"});
  ASSERT_EQ(bench.ran.code, 0) << bench.ran.err;
  EXPECT_EQ(bench.report["server"]["version"], "1.2.3");
  const nlohmann::json& result = bench.result();
  const int64_t answers = result["answers"];
  EXPECT_GT(answers, 0);
  EXPECT_LE(answers, server.calls());
  EXPECT_EQ(result["payload_bytes"], 2 * 50 * 2);
  EXPECT_DOUBLE_EQ(result["requests_per_s"], answers / 0.5);
  EXPECT_DOUBLE_EQ(result["rows_per_s"], 2 * answers / 0.5);
  EXPECT_TRUE(result["errors"].empty());
  EXPECT_EQ(result["median_ns"]["kernel"], 5000);
  EXPECT_EQ(result["median_batch_rows"], 2);
  int64_t last = 1;
  for (const char* point : {"p50", "p90", "p99", "p99_9", "max"}) {
    EXPECT_LE(last, result["latency_ns"][point]) << point;
    last = result["latency_ns"][point];
  }
}

TEST(LoadBenchTest, ErrorsAreCountedByCodeAndNoAnswerIsAFailure) {
  FakeServer server([](int, grpc::ServerContext*, const v1::TopKRequest&, v1::TopKResponse*) {
    return grpc::Status(grpc::RESOURCE_EXHAUSTED, "full");
  });
  const Bench bench = LoadBench(server, {"--warmup", "0", "--duration", "0.3"});
  EXPECT_EQ(bench.ran.code, 1);
  EXPECT_GT(bench.result()["errors"]["RESOURCE_EXHAUSTED"], 0);
  EXPECT_EQ(bench.result()["answers"], 0);
}

TEST(LoadBenchTest, RetriesWhenToldTo) {
  // Fewer are refused than would make the client send less by itself.
  FakeServer server([](int call, grpc::ServerContext* context, const v1::TopKRequest& request,
                       v1::TopKResponse* response) {
    if (call % 4 == 0) {
      context->AddTrailingMetadata("grpc-retry-pushback-ms", "1");
      return grpc::Status(grpc::RESOURCE_EXHAUSTED, "full");
    }
    ReferenceTopK(request, response);
    return grpc::Status::OK;
  });
  const Bench bench = LoadBench(server, {"--warmup", "0", "--duration", "0.5", "--retry"});
  ASSERT_EQ(bench.ran.code, 0) << bench.ran.err;
  EXPECT_TRUE(bench.result()["errors"].empty());
  const int answers = bench.result()["answers"];
  ASSERT_GT(answers, 3);
  EXPECT_EQ(bench.result()["retries"], (answers - 1) / 3);
}

// The server stands still for 600 ms, once. Of 2 s at 100 a second, about 60 requests are due
// meanwhile, and their latencies are spread evenly over 0..600 ms: an eighth of all is above 350
// ms. Counted from when they were sent by a client that waits, one would be.
TEST(LoadBenchTest, AnOpenLoopCountsTheRequestsAStallHeldUp) {
  std::mutex one_at_a_time;
  FakeServer server([&](int call, grpc::ServerContext*, const v1::TopKRequest& request,
                        v1::TopKResponse* response) {
    std::lock_guard<std::mutex> lock(one_at_a_time);
    if (call == 50) std::this_thread::sleep_for(std::chrono::milliseconds(600));
    ReferenceTopK(request, response);
    return grpc::Status::OK;
  });
  const Bench bench = LoadBench(server, {"--rate", "100", "--warmup", "0", "--duration", "2"});
  ASSERT_EQ(bench.ran.code, 0) << bench.ran.err;
  EXPECT_EQ(bench.result()["mode"], "open");
  EXPECT_NEAR(bench.result()["requests_per_s"], 100, 45);  // Poisson: a deviation of 7
  EXPECT_GT(bench.result()["latency_ns"]["p90"], 300'000'000);
}

TEST(LoadBenchTest, NoServerEndsWith1AndBadUsageWith2) {
  std::string address;
  {
    FakeServer gone;
    address = gone.address();
  }
  const Ran ran = RunBinary("load_bench", {"--addr", address});
  EXPECT_EQ(ran.code, 3);
  EXPECT_THAT(ran.err, HasSubstr("is logitd running at " + address));
  EXPECT_EQ(RunBinary("load_bench", {"--rows", "0"}).code, 2);
  EXPECT_EQ(RunBinary("load_bench", {"--addr", "nowhere"}).code, 2);
}

}  // namespace
}  // namespace logitd
