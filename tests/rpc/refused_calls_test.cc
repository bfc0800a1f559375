// Calls that are refused because they could not end in time: what a real client sees, and what is
// counted.
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <chrono>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/synchronization/blocking_counter.h"
#include "absl/time/clock.h"
#include "logitd/v1/sampler.grpc.pb.h"
#include "logitd/v1/server.grpc.pb.h"
#include "tests/engine/test_job.h"
#include "tests/rpc/served_engine.h"

namespace logitd::rpc {
namespace {

using ::testing::HasSubstr;

// One call under way.
struct Sent {
  grpc::ClientContext context;
  v1::TopKRequest request;
  v1::TopKResponse response;
  grpc::Status status;
};

class RefusedCallsTest : public ServedEngine {
 protected:
  static constexpr absl::Duration kDeadline = absl::Milliseconds(300);

  RefusedCallsTest() : ServedEngine(1 << 20, 64 << 20) {
    backend_.SetOpTime(std::chrono::microseconds(3000));  // and a call fills a batch
    channel_ = Start();
    stub_ = v1::Sampler::NewStub(channel_);
    // The server learns how long a call takes.
    for (int i = 0; i < 30; ++i) {
      Sent sent;
      Fill(&sent, i, absl::Seconds(20));
      EXPECT_TRUE(stub_->TopK(&sent.context, sent.request, &sent.response).ok());
    }
  }

  void Fill(Sent* sent, int i, absl::Duration deadline, const std::string& priority = "") {
    sent->context.set_deadline(std::chrono::system_clock::now() +
                               absl::ToChronoNanoseconds(deadline));
    sent->context.AddMetadata("x-request-id", absl::StrCat("call-", i));
    sent->context.AddMetadata("logitd-payload-bytes", "9000");
    if (!priority.empty()) sent->context.AddMetadata("logitd-priority", priority);
    sent->request.set_rows(1024);
    sent->request.set_vocab(2);
    sent->request.set_dtype(v1::DTYPE_F32);
    sent->request.set_logits(std::string(8 * 1024, '\0'));
    sent->request.add_k(1);
    sent->request.add_temperature(1);
  }

  // Sends one call each half millisecond, six times as many as can be done, and waits for them all.
  std::vector<std::unique_ptr<Sent>> Flood(int calls) {
    std::vector<std::unique_ptr<Sent>> all;
    absl::BlockingCounter left(calls);
    for (int i = 0; i < calls; ++i) {
      Sent* const sent = all.emplace_back(std::make_unique<Sent>()).get();
      Fill(sent, i, kDeadline);
      stub_->async()->TopK(&sent->context, &sent->request, &sent->response,
                           [sent, &left](grpc::Status status) {
                             sent->status = std::move(status);
                             left.DecrementCount();
                           });
      absl::SleepFor(absl::Microseconds(500));
    }
    left.Wait();
    return all;
  }

  // The sum of the samples that begin with `prefix`.
  double Sum(const std::string& prefix) {
    double sum = 0;
    const std::vector<std::string> lines = absl::StrSplit(engine::Scrape(metrics_), '\n');
    for (const std::string& line : lines) {
      if (line.rfind(prefix, 0) == 0) sum += std::stod(line.substr(line.rfind(' ')));
    }
    return sum;
  }

  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<v1::Sampler::Stub> stub_;
};

TEST_F(RefusedCallsTest, SayWhenToComeBackAndAreCounted) {
  std::map<grpc::StatusCode, int> codes;
  // A flood is short, and a slow machine answers few of its calls.
  const auto enough = [&] {
    return codes[grpc::StatusCode::RESOURCE_EXHAUSTED] > 50 && codes[grpc::StatusCode::OK] > 50;
  };
  for (int attempt = 0; attempt < 5 && !enough(); ++attempt) {
    int i = 0;
    for (const auto& sent : Flood(600)) {
      ++codes[sent->status.error_code()];
      const std::string id = absl::StrCat("call-", i++);
      if (sent->status.error_code() != grpc::StatusCode::RESOURCE_EXHAUSTED) continue;
      EXPECT_THAT(sent->status.error_message(), HasSubstr("predicted "));
      EXPECT_THAT(sent->status.error_message(), HasSubstr("; retry after "));
      const auto& trailers = sent->context.GetServerTrailingMetadata();
      ASSERT_EQ(trailers.count("grpc-retry-pushback-ms"), 1U);
      const auto pushback = trailers.find("grpc-retry-pushback-ms")->second;
      EXPECT_GT(std::stoi(std::string(pushback.data(), pushback.size())), 0);
      ASSERT_EQ(trailers.count("x-request-id"), 1U);
      EXPECT_EQ(trailers.find("x-request-id")->second, id);
    }
  }
  EXPECT_TRUE(enough()) << codes[grpc::StatusCode::OK] << " were OK, "
                        << codes[grpc::StatusCode::RESOURCE_EXHAUSTED] << " refused, "
                        << codes[grpc::StatusCode::DEADLINE_EXCEEDED] << " late";
  EXPECT_EQ(Sum("logitd_requests_total{code=\"RESOURCE_EXHAUSTED\""),
            codes[grpc::StatusCode::RESOURCE_EXHAUSTED]);
  EXPECT_EQ(Sum("logitd_refused_total"), codes[grpc::StatusCode::RESOURCE_EXHAUSTED]);
  EXPECT_TRUE(Becomes([&] { return server_->calls() == 0; }));
  Sent after;
  Fill(&after, 0, absl::Seconds(20));
  EXPECT_TRUE(stub_->TopK(&after.context, after.request, &after.response).ok());
}

TEST_F(RefusedCallsTest, OtherCallsOfTheConnectionPassMeanwhile) {
  const auto info = v1::Server::NewStub(channel_);
  const absl::Time end = absl::Now() + absl::Seconds(20);
  while (Sum("logitd_refused_total") == 0 && absl::Now() < end) {
    std::vector<std::unique_ptr<Sent>> flood;
    absl::BlockingCounter left(500);
    for (int i = 0; i < 500; ++i) {
      Sent* const sent = flood.emplace_back(std::make_unique<Sent>()).get();
      Fill(sent, i, kDeadline);
      stub_->async()->TopK(&sent->context, &sent->request, &sent->response,
                           [&left](const grpc::Status&) { left.DecrementCount(); });
      absl::SleepFor(absl::Microseconds(200));
    }
    grpc::ClientContext context;
    v1::GetInfoResponse response;
    EXPECT_TRUE(info->GetInfo(&context, v1::GetInfoRequest(), &response).ok()) << "another method";
    Sent patient;
    Fill(&patient, 0, absl::Seconds(60));
    const grpc::Status status = stub_->TopK(&patient.context, patient.request, &patient.response);
    EXPECT_TRUE(status.ok()) << "with more time: " << status.error_message();
    Sent wrong;
    Fill(&wrong, 0, kDeadline, "sometimes");
    EXPECT_EQ(stub_->TopK(&wrong.context, wrong.request, &wrong.response).error_code(),
              grpc::StatusCode::INVALID_ARGUMENT);
    left.Wait();
  }
  EXPECT_GT(Sum("logitd_refused_total"), 0);
}

}  // namespace
}  // namespace logitd::rpc
