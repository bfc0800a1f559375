// Divergences through the client library and logitctl, against the real server, and against one
// that loses streams.
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <numeric>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/client.h"
#include "client/messages/codec.h"
#include "client/tensor_file.h"
#include "logitd/v1/scorer.grpc.pb.h"
#include "tests/client/fake_server.h"
#include "tests/client/scoring_logitd.h"
#include "tests/client/subprocess.h"
#include "tests/client/test_files.h"
#include "tests/client/test_values.h"

namespace logitd {
namespace {

using ::logitd::testing::Normal;
using ::logitd::testing::NpyF32;
using ::logitd::testing::Ran;
using ::logitd::testing::ViewOf;
using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

v1::DivergenceRequest Read(const client::DivergenceRequest& request) {
  const absl::StatusOr<grpc::ByteBuffer> buffer = client::EncodeRequest(request, nullptr);
  EXPECT_TRUE(buffer.ok()) << buffer.status();
  grpc::Slice slice;
  EXPECT_TRUE(buffer->DumpToSingleSlice(&slice).ok());
  v1::DivergenceRequest read;
  EXPECT_TRUE(read.ParseFromArray(slice.begin(), static_cast<int>(slice.size())));
  return read;
}

TEST(DivergenceEncodeTest, GeneratedCodeReadsBothInputs) {
  const std::string states(24, 'x');
  const std::string logits(40, 'y');
  client::DivergenceRequest request;
  request.dtype = v1::DTYPE_BF16;
  request.rows = 2;
  request.head = "student";
  request.hidden_size = 6;
  request.hidden = {absl::string_view(states).substr(0, 10), absl::string_view(states).substr(10)};
  request.vocab = 5;
  request.reference_dtype = v1::DTYPE_F32;
  request.reference_logits = {logits};
  request.params.add_targets(7);
  request.params.set_reference_hidden("not looked at");
  const v1::DivergenceRequest read = Read(request);
  EXPECT_EQ(read.dtype(), v1::DTYPE_BF16);
  EXPECT_EQ(read.rows(), 2);
  EXPECT_EQ(read.head(), "student");
  EXPECT_EQ(read.hidden(), states);
  EXPECT_EQ(read.reference_dtype(), v1::DTYPE_F32);
  EXPECT_EQ(read.reference_case(), v1::DivergenceRequest::kReferenceLogits);
  EXPECT_EQ(read.reference_logits(), logits);
  EXPECT_THAT(read.targets(), ElementsAre(7));

  client::DivergenceRequest other = {};
  other.rows = 3;
  other.vocab = 1;
  other.logits = {absl::string_view(states).substr(0, 12)};
  other.reference_head = "teacher";
  other.reference_hidden_size = 2;
  other.reference_hidden = {states};
  const v1::DivergenceRequest mixed = Read(other);
  EXPECT_EQ(mixed.logits().size(), 12u);
  EXPECT_EQ(mixed.reference_dtype(), v1::DTYPE_F32);
  EXPECT_EQ(mixed.reference_head(), "teacher");
  EXPECT_EQ(mixed.reference_hidden(), states);
}

// --- the real server

class DivergenceTest : public testing::ScoringLogitd {
 protected:
  static constexpr int kVocab = 50;

  client::DivergenceRequest Logits(int64_t rows) {
    client::DivergenceRequest request;
    request.rows = rows;
    request.vocab = kVocab;
    request.logits = {ViewOf(logits_).substr(0, static_cast<size_t>(rows * kVocab) * 4)};
    request.reference_logits = {
        ViewOf(reference_).substr(0, static_cast<size_t>(rows * kVocab) * 4)};
    return request;
  }

  const std::vector<float> logits_ = Normal(100 * kVocab, 3);
  const std::vector<float> reference_ = Normal(100 * kVocab, 4);
};

TEST_F(DivergenceTest, IsTheDefinition) {
  client::DivergenceRequest request = Logits(4);
  request.params.add_temperature(2);
  for (int target : {3, -100, 49, 0}) request.params.add_targets(target);
  const absl::StatusOr<client::DivergenceResult> result = client_->Divergence(request);
  ASSERT_TRUE(result.ok()) << result.status();
  const v1::DivergenceResponse& answer = result->answer;
  ASSERT_EQ(result->rows(), 4);
  double sum = 0;
  for (int row = 0; row < 4; ++row) {
    const auto logprobs = [row](const std::vector<float>& all, double temperature) {
      std::vector<double> x(all.begin() + row * kVocab, all.begin() + (row + 1) * kVocab);
      double total = 0;
      for (double& v : x) total += std::exp(v /= temperature);
      for (double& v : x) v -= std::log(total);
      return x;
    };
    const std::vector<double> p = logprobs(logits_, 2), q = logprobs(reference_, 1);
    double forward = 0, reverse = 0;
    for (int i = 0; i < kVocab; ++i) {
      forward += std::exp(p[i]) * (p[i] - q[i]);
      reverse += std::exp(q[i]) * (q[i] - p[i]);
    }
    EXPECT_NEAR(answer.forward_kl(row), forward, 1e-5 * (1 + forward));
    EXPECT_NEAR(answer.reverse_kl(row), reverse, 1e-5 * (1 + reverse));
    const int target = request.params.targets(row);
    EXPECT_NEAR(answer.target_logprobs(row), target < 0 ? 0 : p[target], 1e-4);
    EXPECT_NEAR(answer.reference_target_logprobs(row), target < 0 ? 0 : q[target], 1e-4);
    if (target >= 0) sum += answer.forward_kl(row);
  }
  EXPECT_EQ(answer.totals().counted(), 3);
  EXPECT_DOUBLE_EQ(answer.totals().forward_kl_sum(), sum);
}

TEST_F(DivergenceTest, TopTokensOfBothInputsComeRowAfterRow) {
  // Two rows of 200 bytes, which count as 208 in the reference.
  const auto client = ConnectWith(/*message_bytes=*/2 * (200 + 208));
  client::DivergenceRequest request = Logits(5);
  for (int k : {2, 0, 3, 1, 0}) request.params.add_top_logprobs(k);
  request.params.add_reference_top_logprobs(4);
  const auto whole = client->Divergence(request);
  ASSERT_TRUE(whole.ok()) << whole.status();
  const auto streamed = client->DivergenceStream(request);
  ASSERT_TRUE(streamed.ok()) << streamed.status();
  EXPECT_EQ(streamed->messages, 3);
  for (const client::DivergenceResult* result : {&*whole, &*streamed}) {
    const v1::DivergenceResponse& answer = result->answer;
    EXPECT_THAT(result->top_offsets, ElementsAre(0, 2, 2, 5, 6, 6));
    EXPECT_THAT(result->reference_top_offsets, ElementsAre(0, 4, 8, 12, 16, 20));
    const auto expect = [](const std::vector<float>& all, const std::vector<int64_t>& offsets,
                           const auto& ids, const auto& logprobs) {
      for (int row = 0; row < 5; ++row) {
        const std::vector<double> x(all.begin() + row * kVocab, all.begin() + (row + 1) * kVocab);
        double sum = 0;
        for (double v : x) sum += std::exp(v);
        std::vector<int> order(kVocab);
        std::iota(order.begin(), order.end(), 0);
        std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return x[a] > x[b]; });
        for (int64_t e = offsets[row]; e < offsets[row + 1]; ++e) {
          const int entry = static_cast<int>(e);
          const int token = order[e - offsets[row]];
          EXPECT_EQ(ids[entry], token);
          EXPECT_NEAR(logprobs[entry], x[token] - std::log(sum), 1e-5);
        }
      }
    };
    expect(logits_, result->top_offsets, answer.top_ids(), answer.top_logprobs());
    expect(reference_, result->reference_top_offsets, answer.reference_top_ids(),
           answer.reference_top_logprobs());
  }
}

TEST_F(DivergenceTest, AStreamHasTheBitsOfACall) {
  const auto client = ConnectWith(/*message_bytes=*/16 * kVocab * 2 * 4);
  for (const bool hidden : {false, true}) {
    client::DivergenceRequest request = Logits(100);
    if (hidden) {  // the tiny head has rows of 8 bytes, which the server counts as 16
      request.vocab = 3;
      request.head = request.reference_head = "tiny";
      request.hidden_size = request.reference_hidden_size = 2;
      request.hidden = {ViewOf(logits_).substr(0, 800)};
      request.reference_hidden = {ViewOf(reference_).substr(0, 800)};
    }
    const auto whole = client->Divergence(request);
    ASSERT_TRUE(whole.ok()) << whole.status();
    int messages = 0;
    const auto streamed =
        client->DivergenceStream(request, [&](const client::DivergenceProgress& now) {
          ++messages;
          EXPECT_EQ(now.rows, now.totals.rows());
          EXPECT_EQ(now.total_rows, 100);
          return true;
        });
    ASSERT_TRUE(streamed.ok()) << streamed.status();
    EXPECT_EQ(messages, hidden ? 1 : 7);
    EXPECT_EQ(streamed->messages, messages);
    for (int row = 0; row < 100; ++row) {
      EXPECT_EQ(streamed->answer.forward_kl(row), whole->answer.forward_kl(row));
      EXPECT_EQ(streamed->answer.reference_entropies(row), whole->answer.reference_entropies(row));
    }
    EXPECT_DOUBLE_EQ(streamed->answer.totals().reverse_kl_sum(),
                     whole->answer.totals().reverse_kl_sum());
    EXPECT_EQ(streamed->answer.reference_head_version(), hidden ? 1 : 0);
  }
}

TEST_F(DivergenceTest, SizesThatDisagreeAreRefusedBeforeAnythingIsSent) {
  client::DivergenceRequest request = Logits(4);
  request.reference_logits[0].remove_suffix(4);
  EXPECT_EQ(client_->DivergenceStream(request).status(),
            absl::InvalidArgumentError(
                "reference_logits: got 796 bytes, allowed 800: 4 rows of 50 elements"));
  request = Logits(4);
  request.params.add_targets(1);
  EXPECT_EQ(client_->DivergenceStream(request).status(),
            absl::InvalidArgumentError("targets: got 1 values, allowed none or 4 (rows)"));
  request = Logits(4);
  request.reference_head = "tiny";
  request.reference_hidden_size = 2;
  request.reference_hidden = {ViewOf(logits_).substr(0, 32)};
  EXPECT_THAT(std::string(client_->Divergence(request).status().message()),
              HasSubstr("reference_head: got tiny with a vocabulary of 3, allowed one of 50"));
}

TEST_F(DivergenceTest, LogitctlPrintsRowsAndTotals) {
  const std::string logits =
      dir_.Write("logits.npy", NpyF32(2, kVocab, {logits_.begin(), logits_.begin() + 2 * kVocab}));
  const std::string reference = dir_.Write(
      "reference.npy", NpyF32(2, kVocab, {reference_.begin(), reference_.begin() + 2 * kVocab}));
  const auto whole = client_->Divergence(Logits(2));
  ASSERT_TRUE(whole.ok()) << whole.status();
  const std::string out = dir_.path("out.npy");
  const Ran json = Logitctl({"divergence", "--logits", logits, "--reference-logits", reference,
                             "--format", "json", "--out", out});
  ASSERT_EQ(json.code, 0) << json.err;
  const auto answer = nlohmann::json::parse(json.out);
  EXPECT_EQ(answer["forward_kl"].size(), 2u);
  EXPECT_NEAR(answer["totals"]["forward_kl_mean"].get<double>(),
              whole->answer.totals().forward_kl_mean(), 1e-6);
  const auto saved = client::LoadMatrix(out);
  ASSERT_TRUE(saved.ok()) << saved.status();
  EXPECT_THAT(saved->shape, ElementsAre(2, 2));
  const auto* values = reinterpret_cast<const float*>(saved->bytes.data());
  EXPECT_EQ(values[0], whole->answer.forward_kl(0));
  EXPECT_EQ(values[3], whole->answer.reverse_kl(1));

  const Ran table = Logitctl({"divergence", "--logits", logits, "--reference-logits", reference,
                              "--reference-temperature", "2", "--format", "table"});
  EXPECT_THAT(table.out, AllOf(HasSubstr("forward"), HasSubstr("2 rows: 2 counted")));
  EXPECT_THAT(table.out, Not(HasSubstr("top")));
  const Ran tops =
      Logitctl({"divergence", "--logits", logits, "--reference-logits", reference, "--top-logprobs",
                "2", "--reference-top-logprobs", "1", "--format", "table"});
  const auto largest = [](const std::vector<float>& all, int row) {
    const auto from = all.begin() + row * kVocab;
    return std::max_element(from, from + kVocab) - from;
  };
  for (int row = 0; row < 2; ++row) {
    EXPECT_THAT(tops.out, ContainsRegex(absl::StrCat("   top ", largest(logits_, row),
                                                     " -[0-9.]+, [0-9]+ -[0-9.]+   reference top ",
                                                     largest(reference_, row), " -[0-9.]+\n")));
  }
  const Ran totals = Logitctl({"divergence", "--logits", logits, "--reference-logits", reference,
                               "--totals", "--format", "table"});
  EXPECT_THAT(totals.out, Not(HasSubstr("entropy")));

  const std::string states =
      dir_.Write("states.npy", NpyF32(2, 2, {logits_.begin(), logits_.begin() + 4}));
  const Ran heads =
      Logitctl({"divergence", "--hidden", states, "--head", "tiny", "--reference-hidden", states,
                "--reference-head", "tiny", "--format", "json"});
  ASSERT_EQ(heads.code, 0) << heads.err;
  EXPECT_EQ(nlohmann::json::parse(heads.out)["totals"]["forward_kl_sum"].get<double>(), 0);

  const Ran none = Logitctl({"divergence", "--logits", logits});
  EXPECT_NE(none.code, 0);
  EXPECT_THAT(none.err, HasSubstr("reference"));
  const Ran wrong = Logitctl({"divergence", "--logits", logits, "--reference-hidden", states});
  EXPECT_THAT(wrong.err, HasSubstr("--reference-head is missing; with --reference-hidden"));
  const auto demanding = [&](const char* first, const char* second) {
    return Logitctl({"divergence", "--hidden", states, "--head", "tiny", "--head-version", first,
                     "--reference-hidden", states, "--reference-head", "tiny",
                     "--reference-head-version", second});
  };
  EXPECT_EQ(demanding("1", "1").code, 0);
  EXPECT_THAT(demanding("2", "1").err, HasSubstr("head_version: got 2, allowed 1"));
  EXPECT_THAT(demanding("1", "2").err, HasSubstr("reference_head_version: got 2, allowed 1"));
}

// --- a server that loses streams

// Answers as many messages of the first stream as it is told to.
class LosingServer final
    : public v1::Scorer::Service,
      public testing::StreamHandler<v1::DivergenceRequest, v1::DivergenceResponse> {
 public:
  using StreamHandler::StreamHandler;
  grpc::Status DivergenceStream(grpc::ServerContext*, Stream* stream) override {
    return Handle(stream);
  }
};

TEST(LostDivergenceTest, ANewStreamDemandsTheVersionsOfTheAnswers) {
  std::vector<v1::DivergenceRequest> firsts;
  LosingServer service([&](int call, LosingServer::Stream* stream) {
    v1::DivergenceRequest request;
    for (int i = 0; stream->Read(&request); ++i) {
      if (i == 0) firsts.push_back(request);
      if (call == 1 && i == 1) return grpc::Status(grpc::StatusCode::UNAVAILABLE, "lost");
      v1::DivergenceResponse answer;
      for (int r = 0; r < request.rows(); ++r) {
        answer.add_top_count(0);
        answer.add_reference_top_count(0);
        for (auto* values : {answer.mutable_forward_kl(), answer.mutable_reverse_kl(),
                             answer.mutable_entropies(), answer.mutable_reference_entropies(),
                             answer.mutable_logsumexp(), answer.mutable_reference_logsumexp()}) {
          values->Add(1);
        }
        answer.add_status(v1::ROW_STATUS_OK);
        answer.add_status_position(-1);
      }
      answer.set_offset(request.offset());
      answer.set_head_version(5);
      answer.set_reference_head_version(9);
      answer.mutable_totals()->set_rows(request.offset() + request.rows());
      stream->Write(answer);
    }
    return grpc::Status::OK;
  });
  testing::LocalServer server(&service);
  client::ClientOptions options = {.score_message_bytes = 16};
  options.address = server.address();
  const auto client = client::Client::Create(options);
  ASSERT_TRUE(client.ok()) << client.status();
  const std::string states(24, 'x');
  client::DivergenceRequest request;
  request.rows = 3;
  request.head = request.reference_head = "h";
  request.hidden_size = request.reference_hidden_size = 2;
  request.hidden = request.reference_hidden = {states};
  const auto result = (*client)->DivergenceStream(request);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->attempts, 2);
  EXPECT_EQ(result->rows(), 3);
  ASSERT_EQ(firsts.size(), 2u);
  EXPECT_EQ(firsts[0].reference_head_version(), 0);
  EXPECT_EQ(firsts[1].offset(), 1);
  EXPECT_EQ(firsts[1].totals().rows(), 1);
  EXPECT_EQ(firsts[1].head_version(), 5);
  EXPECT_EQ(firsts[1].reference_head_version(), 9);
  EXPECT_EQ(firsts[1].reference_hidden().size(), 8u);
}

}  // namespace
}  // namespace logitd
