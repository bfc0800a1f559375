// Divergence of two inputs per row, logits or hidden states of two heads, through generated stubs,
// against double precision.
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <stdlib.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <limits>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "logitd/v1/heads.grpc.pb.h"
#include "logitd/v1/scorer.grpc.pb.h"
#include "tests/e2e/elements.h"
#include "tests/e2e/peers.h"
#include "tests/e2e/server_process.h"
#include "tests/e2e/shared_server.h"

namespace logitd::e2e {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kVocab = 1003;

// A head's numbers, and its file in a folder of the test.
struct TestHead {
  TestHead(const std::string& folder, const std::string& name, v1::DType dtype, int64_t vocab,
           int64_t hidden, uint32_t seed)
      : name(name), dtype(dtype), vocab(vocab), hidden(hidden) {
    const std::string bytes = Encode(dtype, Normal<double>(vocab * hidden, seed, 0.3));
    weight = Decode(dtype, bytes);
    const std::string header = absl::StrFormat(
        R"({"lm_head.weight":{"dtype":"%s","shape":[%d,%d],"data_offsets":[0,%d]}})",
        dtype == v1::DTYPE_F32 ? "F32" : "BF16", vocab, hidden, bytes.size());
    std::ofstream out(absl::StrCat(folder, "/", name, ".safetensors"), std::ios::binary);
    const uint64_t length = header.size();
    out.write(reinterpret_cast<const char*>(&length), sizeof(length));
    out << header << bytes;
  }

  // Random states in the head's type.
  std::string States(int64_t rows, uint32_t seed) const {
    return Encode(dtype, Normal<double>(rows * hidden, seed, 1));
  }
  std::vector<double> Logits(const std::string& states) const {
    const std::vector<double> h = Decode(dtype, states);
    const int64_t rows = static_cast<int64_t>(h.size()) / hidden;
    std::vector<double> logits(static_cast<size_t>(rows * vocab));
    for (int64_t i = 0; i < rows * vocab; ++i) {
      for (int64_t d = 0; d < hidden; ++d) {
        logits[i] += weight[i % vocab * hidden + d] * h[i / vocab * hidden + d];
      }
    }
    return logits;
  }

  const std::string name;
  const v1::DType dtype;
  const int64_t vocab;
  const int64_t hidden;
  std::vector<double> weight;
};

std::vector<double> LogProbs(std::vector<double> x, double temperature, double* logsumexp) {
  for (double& v : x) v /= temperature;
  const double max = *std::max_element(x.begin(), x.end());
  double sum = 0;
  for (double v : x) sum += std::exp(v - max);
  *logsumexp = max + std::log(sum);
  for (double& v : x) v -= *logsumexp;
  return x;
}

// Entries [first, first + count) are the first tokens by (logit descending, id ascending).
template <typename Ids, typename Logprobs>
void ExpectTops(const Ids& ids, const Logprobs& top, int first, int count,
                const std::vector<double>& logprobs) {
  std::vector<int32_t> order(logprobs.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int32_t a, int32_t b) { return logprobs[a] > logprobs[b]; });
  for (int i = 0; i < count; ++i) {
    EXPECT_EQ(ids.Get(first + i), order[i]);
    EXPECT_NEAR(top.Get(first + i), logprobs[order[i]], 2e-3);
  }
}

// Row `row` of the answer against docs/semantics.md#divergence; of row `row` of both logits.
void ExpectRow(const v1::DivergenceResponse& response, int row, const std::vector<double>& logits,
               const std::vector<double>& reference, double temperature,
               double reference_temperature, int target) {
  const auto row_of = [row](const std::vector<double>& all) {
    return std::vector<double>(all.begin() + row * kVocab, all.begin() + (row + 1) * kVocab);
  };
  double lse_p = 0, lse_q = 0;
  const std::vector<double> p = LogProbs(row_of(logits), temperature, &lse_p);
  const std::vector<double> q = LogProbs(row_of(reference), reference_temperature, &lse_q);
  double forward = 0, reverse = 0, entropy_p = 0, entropy_q = 0;
  for (size_t i = 0; i < p.size(); ++i) {
    forward += std::exp(p[i]) * (p[i] - q[i]);
    reverse += std::exp(q[i]) * (q[i] - p[i]);
    entropy_p -= std::exp(p[i]) * p[i];
    entropy_q -= std::exp(q[i]) * q[i];
  }
  constexpr double kNear = 1e-4;
  EXPECT_NEAR(response.forward_kl(row), forward, kNear * std::max(1.0, forward));
  EXPECT_NEAR(response.reverse_kl(row), reverse, kNear * std::max(1.0, reverse));
  EXPECT_NEAR(response.entropies(row), entropy_p, kNear * 7);
  EXPECT_NEAR(response.reference_entropies(row), entropy_q, kNear * 7);
  EXPECT_NEAR(response.logsumexp(row), lse_p, kNear * std::max(1.0, std::fabs(lse_p)));
  EXPECT_NEAR(response.reference_logsumexp(row), lse_q, kNear * std::max(1.0, std::fabs(lse_q)));
  EXPECT_EQ(response.status(row), v1::ROW_STATUS_OK);
  EXPECT_EQ(response.status_position(row), -1);
  const auto before = [row](const auto& counts) {
    return std::accumulate(counts.begin(), counts.begin() + row, 0);
  };
  ExpectTops(response.top_ids(), response.top_logprobs(), before(response.top_count()),
             response.top_count(row), p);
  ExpectTops(response.reference_top_ids(), response.reference_top_logprobs(),
             before(response.reference_top_count()), response.reference_top_count(row), q);
  if (response.target_logprobs_size() == 0) return;
  const double kRelative = kNear * 20;
  EXPECT_NEAR(response.target_logprobs(row), target < 0 ? 0 : p[target], kRelative);
  EXPECT_NEAR(response.reference_target_logprobs(row), target < 0 ? 0 : q[target], kRelative);
}

class DivergenceTest : public SharedServerTest {
 protected:
  static void SetUpTestSuite() {
    std::string folder = (std::filesystem::temp_directory_path() / "logitd-kl-XXXXXX").string();
    folder_ = mkdtemp(folder.data());
    // Rows of 80, 84 and 40 bytes: the second is no multiple of 16.
    student_ = std::make_unique<TestHead>(folder_, "student", v1::DTYPE_BF16, kVocab, 40, 1);
    teacher_ = std::make_unique<TestHead>(folder_, "teacher", v1::DTYPE_F32, kVocab, 21, 2);
    other_ = std::make_unique<TestHead>(folder_, "other", v1::DTYPE_F32, kVocab + 1, 10, 3);
    std::vector<std::string> flags = {absl::StrCat("--head-root=", folder_)};
    for (const TestHead* head : {student_.get(), teacher_.get(), other_.get()}) {
      flags.push_back(
          absl::StrCat("--head=", head->name, "=", folder_, "/", head->name, ".safetensors"));
    }
    StartServer(flags);
  }
  static void TearDownTestSuite() {
    SharedServerTest::TearDownTestSuite();
    std::filesystem::remove_all(folder_);
  }

  static void SetFirst(const TestHead& head, const std::string& states,
                       v1::DivergenceRequest* request) {
    request->set_dtype(head.dtype);
    request->set_rows(static_cast<int64_t>(states.size() / Width(head.dtype)) / head.hidden);
    request->set_head(head.name);
    request->set_hidden_size(head.hidden);
    request->set_hidden(states);
  }
  static void SetReference(const TestHead& head, const std::string& states,
                           v1::DivergenceRequest* request) {
    request->set_reference_dtype(head.dtype);
    request->set_reference_head(head.name);
    request->set_reference_hidden_size(head.hidden);
    request->set_reference_hidden(states);
  }
  static v1::DivergenceRequest OfHeads(int64_t rows, uint32_t seed) {
    v1::DivergenceRequest request;
    SetFirst(*student_, student_->States(rows, seed), &request);
    SetReference(*teacher_, teacher_->States(rows, seed + 1), &request);
    return request;
  }
  static void AddParameters(v1::DivergenceRequest* request) {
    for (int64_t r = 0; r < request->rows(); ++r) {
      request->add_targets(r % 3 == 2 ? -100 : static_cast<int32_t>(r * 97 % kVocab));
      request->add_temperature(r % 2 == 0 ? 1.0f : 2.0f);
      request->add_top_logprobs(static_cast<int32_t>(r % 4) * 3);
    }
    request->add_reference_temperature(1.5f);
    request->add_reference_top_logprobs(5);
  }
  static void ExpectAnswer(const v1::DivergenceRequest& request,
                           const v1::DivergenceResponse& response,
                           const std::vector<double>& logits,
                           const std::vector<double>& reference) {
    ASSERT_EQ(response.forward_kl_size(), request.rows());
    ASSERT_EQ(response.target_logprobs_size(), request.targets_size());
    const auto at = [](const auto& values, int r) {
      return values.empty() ? 0 : values[values.size() == 1 ? 0 : r];
    };
    for (int r = 0; r < request.rows(); ++r) {
      ASSERT_EQ(response.top_count(r), at(request.top_logprobs(), r));
      ASSERT_EQ(response.reference_top_count(r), at(request.reference_top_logprobs(), r));
    }
    for (int r = 0; r < request.rows(); ++r) {
      ExpectRow(response, r, logits, reference,
                request.temperature_size() == 0 ? 1 : request.temperature(r),
                request.reference_temperature_size() == 0 ? 1 : request.reference_temperature(0),
                request.targets_size() == 0 ? -1 : request.targets(r));
    }
  }

  grpc::Status Call(const v1::DivergenceRequest& request, v1::DivergenceResponse* response) {
    return scorer_->Divergence(Context().get(), request, response);
  }
  v1::DivergenceResponse Divergence(const v1::DivergenceRequest& request) {
    v1::DivergenceResponse response;
    const grpc::Status status = Call(request, &response);
    EXPECT_TRUE(status.ok()) << status.error_message();
    return response;
  }
  void ExpectRefused(const v1::DivergenceRequest& request, grpc::StatusCode code,
                     const std::string& text) {
    v1::DivergenceResponse response;
    const grpc::Status status = Call(request, &response);
    EXPECT_EQ(status.error_code(), code);
    EXPECT_THAT(status.error_message(), HasSubstr(text));
  }

  static inline std::string folder_;
  static inline std::unique_ptr<TestHead> student_, teacher_, other_;
  const std::shared_ptr<grpc::Channel> channel_ = Connect(server_->tcp());
  const std::unique_ptr<v1::Scorer::Stub> scorer_ = v1::Scorer::NewStub(channel_);
};

TEST_F(DivergenceTest, LogitsInEveryTypeGiveTheDivergencesOfTheirSoftmax) {
  for (const v1::DType dtype : {v1::DTYPE_F32, v1::DTYPE_F16, v1::DTYPE_BF16}) {
    v1::DivergenceRequest request;
    request.set_dtype(dtype);
    request.set_rows(6);
    request.set_vocab(kVocab);
    request.set_logits(Encode(dtype, Normal<double>(6 * kVocab, 5, 2)));
    request.set_reference_logits(Encode(dtype, Normal<double>(6 * kVocab, 6, 1)));
    for (const bool with_parameters : {false, true}) {
      if (with_parameters) AddParameters(&request);
      const v1::DivergenceResponse response = Divergence(request);
      ExpectAnswer(request, response, Decode(dtype, request.logits()),
                   Decode(dtype, request.reference_logits()));
      EXPECT_EQ(response.totals().counted(), with_parameters ? 4 : 6);
      EXPECT_EQ(response.totals().ignored(), with_parameters ? 2 : 0);
      double sum = 0;
      for (int r = 0; r < 6; ++r) {
        if (!with_parameters || r % 3 != 2) sum += response.forward_kl(r);
      }
      EXPECT_DOUBLE_EQ(response.totals().forward_kl_sum(), sum);
    }
  }
}

TEST_F(DivergenceTest, HiddenStatesOfTwoHeadsGiveTheDivergencesOfTheirLogits) {
  v1::DivergenceRequest request = OfHeads(150, 11);
  AddParameters(&request);
  const v1::DivergenceResponse response = Divergence(request);
  ExpectAnswer(request, response, student_->Logits(request.hidden()),
               teacher_->Logits(request.reference_hidden()));
  EXPECT_GT(response.head_version(), 0);
  EXPECT_GT(response.reference_head_version(), 0);

  // The bits of a row do not depend on the others.
  v1::DivergenceRequest one = OfHeads(1, 0);
  one.set_hidden(request.hidden().substr(7 * 80, 80));
  one.set_reference_hidden(request.reference_hidden().substr(7 * 84, 84));
  one.add_targets(request.targets(7));
  one.add_temperature(request.temperature(7));
  one.add_reference_temperature(request.reference_temperature(0));
  const v1::DivergenceResponse alone = Divergence(one);
  EXPECT_EQ(alone.forward_kl(0), response.forward_kl(7));
  EXPECT_EQ(alone.reverse_kl(0), response.reverse_kl(7));
  EXPECT_EQ(alone.reference_logsumexp(0), response.reference_logsumexp(7));
}

TEST_F(DivergenceTest, LogitsMayBeBesideHiddenStatesEitherWay) {
  const std::string states = student_->States(5, 21);
  const std::string logits = Encode(v1::DTYPE_F32, Normal<double>(5 * kVocab, 22, 1));
  const auto want = student_->Logits(states);
  const auto given = Decode(v1::DTYPE_F32, logits);
  v1::DivergenceRequest first;
  SetFirst(*student_, states, &first);
  first.set_reference_dtype(v1::DTYPE_F32);
  first.set_reference_logits(logits);
  ExpectAnswer(first, Divergence(first), want, given);
  v1::DivergenceRequest second;
  second.set_dtype(v1::DTYPE_F32);
  second.set_rows(5);
  second.set_vocab(kVocab);
  second.set_logits(logits);
  SetReference(*student_, states, &second);
  ExpectAnswer(second, Divergence(second), given, want);
}

TEST_F(DivergenceTest, OneHeadMayBeBoth) {
  v1::DivergenceRequest request;
  const std::string states = student_->States(3, 31);
  SetFirst(*student_, states, &request);
  SetReference(*student_, states, &request);
  const v1::DivergenceResponse response = Divergence(request);
  for (int r = 0; r < 3; ++r) {
    EXPECT_EQ(response.forward_kl(r), 0);
    EXPECT_EQ(response.reverse_kl(r), 0);
  }
  EXPECT_EQ(response.head_version(), response.reference_head_version());
}

TEST_F(DivergenceTest, WhatDoesNotGoTogetherIsRefused) {
  v1::DivergenceRequest request = OfHeads(2, 41);
  request.clear_reference();
  ExpectRefused(request, grpc::StatusCode::INVALID_ARGUMENT, "reference: got none, allowed");
  request = OfHeads(2, 41);
  SetReference(*other_, other_->States(2, 1), &request);
  ExpectRefused(request, grpc::StatusCode::INVALID_ARGUMENT,
                "reference_head: got other with a vocabulary of 1004, allowed one of 1003");
  request = OfHeads(2, 41);
  request.set_reference_head("unknown");
  ExpectRefused(request, grpc::StatusCode::NOT_FOUND, "reference: no head \"unknown\"");
  const v1::DivergenceResponse response = Divergence(OfHeads(2, 41));
  request = OfHeads(2, 41);
  request.set_head_version(response.head_version());
  request.set_reference_head_version(response.reference_head_version());
  EXPECT_EQ(Bits(Divergence(request)), Bits(response));
  request.set_reference_head_version(response.reference_head_version() + 1);
  ExpectRefused(request, grpc::StatusCode::FAILED_PRECONDITION, "reference_head_version: got");
}

TEST_F(DivergenceTest, AnAnswerThatNoMessageTakesIsRefused) {
  constexpr int64_t kRows = 4100, kTokens = 1024;
  v1::DivergenceRequest request;
  request.set_dtype(v1::DTYPE_F16);
  request.set_rows(kRows);
  request.set_vocab(kTokens);
  request.set_logits(std::string(kRows * kTokens * 2, '\0'));
  request.set_reference_logits(request.logits());
  request.add_top_logprobs(1024);
  request.add_reference_top_logprobs(1024);
  ExpectRefused(request, grpc::StatusCode::INVALID_ARGUMENT,
                "answer: got 67338400 bytes for 4100 rows, allowed 0..67108864");
}

TEST_F(DivergenceTest, ANaNInEitherInputAffectsOnlyItsRow) {
  v1::DivergenceRequest request = OfHeads(4, 51);
  request.add_top_logprobs(1);
  request.add_reference_top_logprobs(1);
  const v1::DivergenceResponse good = Divergence(request);
  request.mutable_hidden()->replace(80, 2, "\xff\x7f");
  request.mutable_reference_hidden()->replace(2 * 84, 4, std::string("\x00\x00\xc0\x7f", 4));
  const v1::DivergenceResponse damaged = Divergence(request);
  for (int r = 0; r < 4; ++r) {
    const bool is_nan = r == 1 || r == 2;
    EXPECT_EQ(damaged.status(r), is_nan ? v1::ROW_STATUS_NAN_LOGIT : v1::ROW_STATUS_OK);
    EXPECT_EQ(damaged.status_position(r), is_nan ? 0 : -1);
    if (is_nan) {
      EXPECT_TRUE(std::isnan(damaged.forward_kl(r)));
      EXPECT_EQ(damaged.top_ids(r), -1);
      EXPECT_EQ(damaged.reference_top_ids(r), -1);
      EXPECT_TRUE(std::isnan(damaged.reference_top_logprobs(r)));
    } else {
      EXPECT_EQ(damaged.forward_kl(r), good.forward_kl(r));
      EXPECT_EQ(damaged.top_ids(r), good.top_ids(r));
    }
  }
  EXPECT_EQ(damaged.totals().counted(), 2);
  EXPECT_EQ(damaged.totals().faulty(), 2);
}

// Messages of ten rows.
v1::DivergenceRequest Chunk(const v1::DivergenceRequest& all, int64_t row, bool first) {
  v1::DivergenceRequest chunk = all;
  chunk.set_rows(10);
  chunk.set_hidden(all.hidden().substr(static_cast<size_t>(row * 80), 800));
  chunk.set_reference_hidden(all.reference_hidden().substr(static_cast<size_t>(row * 84), 840));
  if (first) return chunk;
  chunk.clear_dtype();
  chunk.clear_head();
  chunk.clear_hidden_size();
  chunk.clear_reference_dtype();
  chunk.clear_reference_head();
  chunk.clear_reference_hidden_size();
  chunk.clear_temperature();
  chunk.clear_top_logprobs();
  return chunk;
}

TEST_F(DivergenceTest, AStreamKeepsItsSettingsAndTotalsAndCanBeResumed) {
  v1::DivergenceRequest all = OfHeads(40, 61);
  all.add_temperature(1.25f);
  all.add_top_logprobs(3);
  const v1::DivergenceResponse whole = Divergence(all);
  v1::DivergenceResponse answer;
  int read = 0;
  for (const int64_t from : {0, 20}) {
    const auto context = Context();
    const auto stream = scorer_->DivergenceStream(context.get());
    for (int64_t row = from; row < from + 20; row += 10) {
      v1::DivergenceRequest chunk = Chunk(all, row, row == from);
      if (from > 0 && row == from) {
        chunk.set_offset(answer.offset() + answer.forward_kl_size());
        *chunk.mutable_totals() = answer.totals();
      }
      ASSERT_TRUE(stream->Write(chunk));
      ASSERT_TRUE(stream->Read(&answer));
      EXPECT_EQ(answer.offset(), row);
      for (int r = 0; r < 10; ++r, ++read) {
        EXPECT_EQ(answer.forward_kl(r), whole.forward_kl(read));
        EXPECT_EQ(answer.reference_entropies(r), whole.reference_entropies(read));
        EXPECT_EQ(answer.top_count(r), 3);
        EXPECT_EQ(answer.top_ids(3 * r + 2), whole.top_ids(3 * read + 2));
        EXPECT_EQ(answer.top_logprobs(3 * r), whole.top_logprobs(3 * read));
      }
    }
    stream->WritesDone();
    EXPECT_TRUE(stream->Finish().ok());
  }
  EXPECT_EQ(answer.totals().rows(), 40);
  EXPECT_EQ(answer.totals().counted(), 40);
  EXPECT_DOUBLE_EQ(answer.totals().forward_kl_sum(), whole.totals().forward_kl_sum());
  EXPECT_DOUBLE_EQ(answer.totals().reverse_kl_mean(), whole.totals().reverse_kl_mean());
}

TEST_F(DivergenceTest, AStreamKeepsBothHeadsWhileOneIsUpdated) {
  const v1::DivergenceRequest all = OfHeads(20, 71);
  const v1::DivergenceResponse whole = Divergence(all);
  const auto context = Context();
  const auto stream = scorer_->DivergenceStream(context.get());
  v1::DivergenceResponse answer;
  ASSERT_TRUE(stream->Write(Chunk(all, 0, true)));
  ASSERT_TRUE(stream->Read(&answer));
  {
    v1::UpdateHeadRequest update;
    update.set_name("teacher");
    update.set_path("teacher.safetensors");
    const auto heads = v1::Heads::NewStub(channel_);
    const auto updating = Context();
    const auto call = heads->Update(updating.get());
    ASSERT_TRUE(call->Write(update));
    call->WritesDone();
    v1::UpdateHeadResponse progress;
    while (call->Read(&progress)) {
    }
    const grpc::Status updated = call->Finish();
    ASSERT_TRUE(updated.ok()) << updated.error_message();
  }
  ASSERT_TRUE(stream->Write(Chunk(all, 10, false)));
  ASSERT_TRUE(stream->Read(&answer));
  EXPECT_EQ(answer.reference_head_version(), whole.reference_head_version());
  EXPECT_EQ(answer.forward_kl(3), whole.forward_kl(13));
  stream->WritesDone();
  EXPECT_TRUE(stream->Finish().ok());
  EXPECT_GT(Divergence(all).reference_head_version(), whole.reference_head_version());
}

}  // namespace
}  // namespace logitd::e2e
