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
#include "absl/synchronization/notification.h"
#include "absl/time/time.h"
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
  absl::Notification done;
};

class RefusedCallsTest : public ServedEngine {
 protected:
  // More calls than can be done by the deadline, at 20 ms each. On a busy machine a call may take
  // six times as long, and still more than 50 can be done.
  static constexpr int kCalls = 800;
  static constexpr absl::Duration kDeadline = absl::Seconds(12);

  RefusedCallsTest() : ServedEngine(1 << 20, 64 << 20) {
    backend_.SetOpTime(std::chrono::milliseconds(20));  // and a call fills a batch
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

  void Send(int i, absl::Duration deadline) {
    Sent* const sent = sent_.emplace_back(std::make_unique<Sent>()).get();
    Fill(sent, i, deadline);
    stub_->async()->TopK(&sent->context, &sent->request, &sent->response,
                         [sent](grpc::Status status) {
                           sent->status = std::move(status);
                           sent->done.Notify();
                         });
  }
  // kCalls calls come while the device stands still. Each is let in or refused by the end.
  void Flood() {
    backend_.Hold();
    for (int i = 0; i < kCalls; ++i) Send(i, kDeadline);
    EXPECT_TRUE(Becomes([&] {
      return server_->calls() + static_cast<int>(Sum("logitd_refused_total")) == kCalls;
    }));
  }
  // The device is quick from here on. Waits for all calls.
  void Finish() {
    backend_.SetOpTime(std::chrono::microseconds(0));
    backend_.Release();
    for (const auto& sent : sent_) sent->done.WaitForNotification();
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
  std::vector<std::unique_ptr<Sent>> sent_;
};

TEST_F(RefusedCallsTest, SayWhenToComeBackAndAreCounted) {
  Flood();
  Finish();
  std::map<grpc::StatusCode, int> codes;
  int i = 0;
  for (const auto& sent : sent_) {
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
  EXPECT_GT(codes[grpc::StatusCode::OK], 50);
  EXPECT_GT(codes[grpc::StatusCode::RESOURCE_EXHAUSTED], 50);
  EXPECT_EQ(Sum("logitd_requests_total{code=\"RESOURCE_EXHAUSTED\""),
            codes[grpc::StatusCode::RESOURCE_EXHAUSTED]);
  EXPECT_EQ(Sum("logitd_refused_total"), codes[grpc::StatusCode::RESOURCE_EXHAUSTED]);
  EXPECT_TRUE(Becomes([&] { return server_->calls() == 0; }));
  Sent after;
  Fill(&after, 0, absl::Seconds(20));
  EXPECT_TRUE(stub_->TopK(&after.context, after.request, &after.response).ok());
}

TEST_F(RefusedCallsTest, OtherCallsOfTheConnectionPassMeanwhile) {
  Flood();
  EXPECT_GT(Sum("logitd_refused_total"), 0);
  grpc::ClientContext context;
  v1::GetInfoResponse response;
  EXPECT_TRUE(
      v1::Server::NewStub(channel_)->GetInfo(&context, v1::GetInfoRequest(), &response).ok())
      << "another method";
  Sent wrong;
  Fill(&wrong, 0, kDeadline, "sometimes");
  EXPECT_EQ(stub_->TopK(&wrong.context, wrong.request, &wrong.response).error_code(),
            grpc::StatusCode::INVALID_ARGUMENT);
  Send(0, absl::Seconds(60));
  Finish();
  const grpc::Status& patient = sent_.back()->status;
  EXPECT_TRUE(patient.ok()) << "with more time: " << patient.error_message();
}

}  // namespace
}  // namespace logitd::rpc
