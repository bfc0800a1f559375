// Calls of Divergence over a device that fails, or that is slow to copy their second payload.
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <string>

#include "absl/time/clock.h"
#include "logitd/v1/scorer.grpc.pb.h"
#include "tests/rpc/served_engine.h"

namespace logitd::rpc {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kRows = 64;
constexpr int64_t kVocab = 1024;

class DivergenceCallTest : public ServedEngine {
 protected:
  DivergenceCallTest()
      : ServedEngine(/*max_bytes=*/int64_t{2} << 20, /*max_held_bytes=*/int64_t{64} << 20),
        stub_(v1::Scorer::NewStub(Start())) {
    // All logits are equal: both distributions are uniform.
    const std::string zeros(static_cast<size_t>(kRows * kVocab) * sizeof(float), '\0');
    request_.set_dtype(v1::DTYPE_F32);
    request_.set_rows(kRows);
    request_.set_vocab(kVocab);
    request_.set_logits(zeros);
    request_.set_reference_logits(zeros);
    request_.add_reference_top_logprobs(1);
  }

  grpc::Status Call(absl::Duration time = absl::Seconds(60)) {
    grpc::ClientContext context;
    context.set_deadline(absl::ToChronoTime(absl::Now() + time));
    return stub_->Divergence(&context, request_, &answer_);
  }
  void ExpectAnswer() {
    ASSERT_EQ(answer_.forward_kl_size(), kRows);
    EXPECT_EQ(answer_.forward_kl(kRows - 1), 0);
    EXPECT_NEAR(answer_.reference_entropies(kRows - 1), std::log(kVocab), 1e-5);
    EXPECT_EQ(answer_.reference_top_ids(kRows - 1), 0);
    EXPECT_NEAR(answer_.reference_top_logprobs(kRows - 1), -std::log(kVocab), 1e-5);
  }

  const std::unique_ptr<v1::Scorer::Stub> stub_;
  v1::DivergenceRequest request_;
  v1::DivergenceResponse answer_;
};

TEST_F(DivergenceCallTest, ADeviceErrorEndsOnlyItsCall) {
  for (const FaultPoint point : {FaultPoint::kUpload, FaultPoint::kOp}) {
    backend_.FailNext(point, absl::UnavailableError("hiccup"));
    const grpc::Status failed = Call();
    EXPECT_EQ(failed.error_code(), grpc::StatusCode::UNAVAILABLE);
    EXPECT_THAT(failed.error_message(), HasSubstr("hiccup"));
    const grpc::Status next = Call();
    ASSERT_TRUE(next.ok()) << next.error_message();
    ExpectAnswer();
  }
  EXPECT_TRUE(device_lost().ok());
}

TEST_F(DivergenceCallTest, ADeviceErrorEndsAStreamAfterTheEarlierAnswers) {
  backend_.SetFaults([ops = 0](FaultPoint point) mutable -> absl::Status {
    if (point != FaultPoint::kOp || ++ops != 3) return absl::OkStatus();
    return absl::UnavailableError("hiccup");
  });
  grpc::ClientContext context;
  context.set_deadline(absl::ToChronoTime(absl::Now() + absl::Seconds(60)));
  const auto stream = stub_->DivergenceStream(&context);
  for (int message = 0; message < 3; ++message) {
    ASSERT_TRUE(stream->Write(request_));
    ASSERT_EQ(stream->Read(&answer_), message < 2);
    EXPECT_EQ(answer_.totals().counted(), std::min(message + 1, 2) * kRows);
    ExpectAnswer();
  }
  const grpc::Status status = stream->Finish();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_THAT(status.error_message(), HasSubstr("hiccup"));
}

TEST_F(DivergenceCallTest, ADeadlineThatPassesWhileTheInputsAreCopiedLeavesNothing) {
  backend_.Hold(FaultPoint::kUpload);
  // On a busy machine a deadline may pass before the call gets so far: then a later one is tried.
  for (absl::Duration time = absl::Milliseconds(50); backend_.held() == 0; time *= 2) {
    ASSERT_LT(time, absl::Seconds(60));
    EXPECT_EQ(Call(time).error_code(), grpc::StatusCode::DEADLINE_EXCEEDED);
  }
  backend_.Release();
  EXPECT_TRUE(engine_->WaitIdle(SteadyNow() + absl::Seconds(20)));
  EXPECT_TRUE(Becomes([&] { return admission_.held_bytes() == 0; }));
  const size_t ran = backend_.log().size();
  const grpc::Status next = Call();
  ASSERT_TRUE(next.ok()) << next.error_message();
  ExpectAnswer();
  EXPECT_EQ(backend_.log().size(), ran + 1);
}

}  // namespace
}  // namespace logitd::rpc
