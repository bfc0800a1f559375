// The C interface through the shared library, against double precision.
#include "kernels/c_api.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

namespace {

using testing::ElementsAre;
using testing::HasSubstr;

constexpr int64_t kVocab = 7;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

class CApiTest : public testing::Test {
 protected:
  void SetUp() override { ASSERT_EQ(logitd_open("cpu", 0, 2, 0, &context_), LOGITD_OK); }
  void TearDown() override { logitd_close(context_); }

  static logitd_tensor Tensor(std::vector<float>& values, int64_t cols) {
    const auto rows = static_cast<int64_t>(values.size()) / cols;
    return {values.data(), rows, cols, cols, LOGITD_F32, 0};
  }

  // Losses of rows of logits_.
  logitd_cross_entropy Losses() {
    logitd_cross_entropy op = {.struct_size = sizeof(op), .input = Tensor(logits_, kVocab)};
    op.rows.targets = targets_.data();
    op.rows.ignore_index = -100;
    op.rows.temperature.all = 1;
    op.loss = loss_.data();
    op.logsumexp = logsumexp_.data();
    op.status = status_.data();
    return op;
  }

  double LogSumExp(int64_t r) const {
    double sum = 0;
    for (int64_t i = 0; i < kVocab; ++i) sum += std::exp(double{logits_[r * kVocab + i]});
    return std::log(sum);
  }
  double Loss(int64_t r) const { return LogSumExp(r) - logits_[r * kVocab + targets_[r]]; }

  logitd_context* context_ = nullptr;
  logitd_call call_ = {};
  std::vector<float> logits_ = {0, 1, 2, 3, 2, 1, 0, 5, 1, -2, 0.5, 3, 1, 1, 0, 0, 0, 9, 0, 0, 0};
  std::vector<int64_t> targets_ = {3, 0, -100};
  std::vector<float> loss_ = std::vector<float>(3, -1);
  std::vector<float> logsumexp_ = std::vector<float>(3, -1);
  std::vector<logitd_row_status> status_ = std::vector<logitd_row_status>(3);
};

TEST_F(CApiTest, SaysItsVersion) { EXPECT_EQ(logitd_abi_version(), LOGITD_ABI_VERSION); }

TEST_F(CApiTest, CrossEntropyIsThatOfDoublePrecision) {
  const logitd_cross_entropy op = Losses();
  ASSERT_EQ(logitd_run_cross_entropy(context_, &call_, &op), LOGITD_OK) << logitd_error();
  EXPECT_NEAR(loss_[0], Loss(0), 4e-6);
  EXPECT_NEAR(loss_[1], Loss(1), 4e-6 * 5);
  EXPECT_EQ(loss_[2], 0);
  EXPECT_NEAR(logsumexp_[2], LogSumExp(2), 4e-6 * 9);
}

TEST_F(CApiTest, TrainingGivesTheGradientsOfTheBackward) {
  std::vector<float> upstream = {1, 0.5, 2}, first(21, 7), second(21, 8);
  logitd_cross_entropy_training op = {.struct_size = sizeof(op)};
  op.input = Tensor(logits_, kVocab);
  op.rows = Losses().rows;
  op.rows.label_smoothing.all = 0.1f;
  op.upstream = upstream.data();
  op.logsumexp = logsumexp_.data();
  op.d_input = Tensor(first, kVocab);
  ASSERT_EQ(logitd_run_cross_entropy_training(context_, &call_, &op), LOGITD_OK) << logitd_error();
  logitd_cross_entropy_backward backward = {.struct_size = sizeof(backward), .input = op.input};
  backward.rows = op.rows;
  backward.logsumexp = logsumexp_.data();
  backward.upstream = upstream.data();
  backward.d_input = Tensor(second, kVocab);
  ASSERT_EQ(logitd_run_cross_entropy_backward(context_, &call_, &backward), LOGITD_OK);
  EXPECT_EQ(first, second);
  for (int64_t r = 0; r < 2; ++r) {
    for (int64_t i = 0; i < kVocab; ++i) {
      const double p = std::exp(logits_[r * kVocab + i] - LogSumExp(r));
      const double expected =
          upstream[r] * (p - (i == targets_[r] ? 0.9 : 0.0) - 0.1 / double{kVocab});
      EXPECT_NEAR(first[r * kVocab + i], expected, 1e-6) << r << ' ' << i;
    }
  }
  EXPECT_EQ(std::vector<float>(first.begin() + 14, first.end()), std::vector<float>(7, 0));
}

TEST_F(CApiTest, ReductionsWeighRowsThatCount) {
  float total = 0;
  logitd_cross_entropy op = Losses();
  op.total = &total;
  for (const int32_t reduction : {LOGITD_REDUCE_SUM, LOGITD_REDUCE_MEAN}) {
    const double share = reduction == LOGITD_REDUCE_MEAN ? 0.5 : 1;
    op.reduction = reduction;
    ASSERT_EQ(logitd_run_cross_entropy(context_, &call_, &op), LOGITD_OK) << logitd_error();
    EXPECT_NEAR(total, share * (Loss(0) + Loss(1)), 1e-5);

    std::vector<float> gradient(21, 7);
    logitd_cross_entropy_training both = {.struct_size = sizeof(both), .input = op.input};
    both.rows = op.rows;
    both.reduction = reduction;
    both.total = &total;
    both.d_input = Tensor(gradient, kVocab);
    total = -1;
    ASSERT_EQ(logitd_run_cross_entropy_training(context_, &call_, &both), LOGITD_OK);
    EXPECT_NEAR(total, share * (Loss(0) + Loss(1)), 1e-5);
    EXPECT_NEAR(gradient[3], share * (std::exp(3 - LogSumExp(0)) - 1), 1e-6);
    EXPECT_EQ(gradient[15], 0);
  }
  targets_ = {-100, -100, -100};
  ASSERT_EQ(logitd_run_cross_entropy(context_, &call_, &op), LOGITD_OK);
  EXPECT_TRUE(std::isnan(total));
  op.reduction = 3;
  EXPECT_EQ(logitd_run_cross_entropy(context_, &call_, &op), LOGITD_INVALID_ARGUMENT);
  EXPECT_THAT(logitd_error(), HasSubstr("reduction: got 3, allowed 0..2"));
  op.reduction = LOGITD_REDUCE_SUM;
  op.total = nullptr;
  EXPECT_EQ(logitd_run_cross_entropy(context_, &call_, &op), LOGITD_INVALID_ARGUMENT);
  EXPECT_THAT(logitd_error(), HasSubstr("total: got null"));
}

// Two shards of 3 and 4 tokens: their gradients are parts of the whole head's.
TEST_F(CApiTest, ShardsOfAnySizeGiveTheGradientsOfTheHead) {
  constexpr int64_t kHidden = 4;
  std::vector<float> hidden = {1, 2, -1, 0.5, 0, 1, 3, -2, 2, 0, 1, 1};
  std::vector<float> weight(kVocab * kHidden), logsumexp(3), upstream = {1, -0.5, 2};
  for (size_t i = 0; i < weight.size(); ++i)
    weight[i] = static_cast<float>(std::sin(1.3 * static_cast<double>(i)));
  const auto head = [&](int64_t first, int64_t tokens) {
    return logitd_head{
        .weight = {weight.data() + first * kHidden, tokens, kHidden, kHidden, LOGITD_F32, 0},
        .scale = 1};
  };
  const logitd_head whole = head(0, kVocab);
  targets_ = {3, 0, 6};
  logitd_cross_entropy losses = Losses();
  losses.input = Tensor(hidden, kHidden);
  losses.head = &whole;
  losses.rows.label_smoothing.all = 0.2f;
  ASSERT_EQ(logitd_run_cross_entropy(context_, &call_, &losses), LOGITD_OK) << logitd_error();
  const auto gradients = [&](const logitd_head& of, int64_t first, int64_t vocab,
                             std::vector<float>& d_hidden, std::vector<float>& d_weight) {
    d_hidden.assign(hidden.size(), 7);
    d_weight.assign(static_cast<size_t>(of.weight.rows * kHidden), 7);
    logitd_cross_entropy_backward op = {.struct_size = sizeof(op), .input = losses.input};
    op.head = &of;
    op.rows = losses.rows;
    op.rows.first_token = first;
    op.rows.vocab = vocab;
    op.logsumexp = logsumexp_.data();
    op.upstream = upstream.data();
    op.d_input = Tensor(d_hidden, kHidden);
    op.d_weight = Tensor(d_weight, kHidden);
    ASSERT_EQ(logitd_run_cross_entropy_backward(context_, &call_, &op), LOGITD_OK)
        << logitd_error();
  };
  std::vector<float> d_hidden, d_weight, part_hidden[2], part_weight[2];
  gradients(whole, 0, 0, d_hidden, d_weight);
  gradients(head(0, 3), 0, kVocab, part_hidden[0], part_weight[0]);
  gradients(head(3, 4), 3, kVocab, part_hidden[1], part_weight[1]);
  for (size_t i = 0; i < hidden.size(); ++i)
    EXPECT_NEAR(part_hidden[0][i] + part_hidden[1][i], d_hidden[i], 1e-6) << i;
  part_weight[0].insert(part_weight[0].end(), part_weight[1].begin(), part_weight[1].end());
  for (size_t i = 0; i < weight.size(); ++i) EXPECT_NEAR(part_weight[0][i], d_weight[i], 1e-6) << i;
}

TEST_F(CApiTest, ArraysGiveEveryRowItsOwnValueAndBadOnesRefuseOnlyTheirRow) {
  logitd_cross_entropy op = Losses();
  const std::vector<float> temperatures = {2, 0, 1};
  targets_ = {3, 0, kVocab};
  op.rows.temperature.each = temperatures.data();
  std::vector<int32_t> rank(3, 5);
  op.rank = rank.data();
  ASSERT_EQ(logitd_run_cross_entropy(context_, &call_, &op), LOGITD_OK) << logitd_error();
  double sum = 0;
  for (int64_t i = 0; i < kVocab; ++i) sum += std::exp(logits_[i] / 2.0);
  EXPECT_NEAR(loss_[0], std::log(sum) - 1.5, 4e-6);
  EXPECT_EQ(status_[0].code, LOGITD_ROW_OK);
  EXPECT_EQ(rank[0], 1);
  for (const size_t r : {1, 2}) {
    EXPECT_TRUE(std::isnan(loss_[r]));
    EXPECT_EQ(rank[r], -1);
    EXPECT_EQ(status_[r].code, LOGITD_ROW_REFUSED);
  }
  EXPECT_EQ(status_[1].position, 2);  // temperature
  EXPECT_EQ(status_[2].position, 1);  // targets
}

TEST_F(CApiTest, SampleTakesHistoryBiasMaskAndRefusesTokensOutsideTheVocabulary) {
  std::vector<int32_t> tokens(3, 9);
  logitd_sample op = {.struct_size = sizeof(op), .input = Tensor(logits_, kVocab)};
  op.temperature.all = 0;
  op.top_p.all = op.typical_p.all = op.repetition_penalty.all = 1;
  op.tokens = tokens.data();
  op.status = status_.data();
  ASSERT_EQ(logitd_run_sample(context_, &call_, &op), LOGITD_OK) << logitd_error();
  EXPECT_THAT(tokens, ElementsAre(3, 0, 3));

  const std::vector<int32_t> history = {3, 3, 1, 3};
  const std::vector<int64_t> offsets = {0, 1, 3, 4};
  op.history = {history.data(), offsets.data(), 4};
  op.presence_penalty.all = 8.5;
  ASSERT_EQ(logitd_run_sample(context_, &call_, &op), LOGITD_OK) << logitd_error();
  EXPECT_THAT(tokens, ElementsAre(2, 0, 3));

  op.history = {};
  const std::vector<logitd_bias> bias = {{5, 20}, {6, -kInfinity}, {kVocab, 1}};
  const std::vector<int64_t> places = {0, 1, 2, 3};
  op.bias = {bias.data(), places.data(), 3};
  ASSERT_EQ(logitd_run_sample(context_, &call_, &op), LOGITD_OK) << logitd_error();
  EXPECT_THAT(tokens, ElementsAre(5, 0, -1));
  EXPECT_EQ(status_[2].code, LOGITD_ROW_REFUSED);
  EXPECT_EQ(status_[2].position, 16);

  op.bias = {};
  const std::vector<uint32_t> mask = {1u << 6, 1u << 2, 3};
  op.mask = mask.data();
  ASSERT_EQ(logitd_run_sample(context_, &call_, &op), LOGITD_OK) << logitd_error();
  EXPECT_THAT(tokens, ElementsAre(6, 2, 0));

  op.mask = nullptr;
  const std::vector<int64_t> falling = {0, 2, 1, 9};
  op.history = {history.data(), falling.data(), 4};
  ASSERT_EQ(logitd_run_sample(context_, &call_, &op), LOGITD_OK) << logitd_error();
  EXPECT_THAT(tokens, ElementsAre(2, -1, -1));
}

TEST_F(CApiTest, TopKAndAttentionAreThoseOfDoublePrecision) {
  std::vector<int32_t> ids(6);
  std::vector<float> probs(6);
  logitd_softmax_topk op = {.struct_size = sizeof(op), .input = Tensor(logits_, kVocab)};
  op.temperature.all = 1;
  op.k = 2;
  op.indices = ids.data();
  op.probs = probs.data();
  ASSERT_EQ(logitd_run_softmax_topk(context_, &call_, &op), LOGITD_OK) << logitd_error();
  EXPECT_THAT(ids, ElementsAre(3, 2, 0, 4, 3, 0));
  EXPECT_NEAR(probs[1], std::exp(2 - LogSumExp(0)), 1e-6);

  std::vector<float> softmax(21), sinks = {0};
  logitd_attention_softmax attention = {.struct_size = sizeof(attention)};
  attention.shape = {1, 1, 3, kVocab, -1, 0, 0.5, 0};
  attention.scores = Tensor(logits_, kVocab);
  attention.probs = Tensor(softmax, kVocab);
  attention.sinks = sinks.data();
  attention.status = status_.data();
  ASSERT_EQ(logitd_run_attention_softmax(context_, &call_, &attention), LOGITD_OK)
      << logitd_error();
  for (int64_t r = 0; r < 3; ++r) {
    const int64_t seen = kVocab - 2 + r;  // the last query sees the last key
    double sum = 1;                       // the sink
    for (int64_t i = 0; i < seen; ++i) sum += std::exp(0.5 * logits_[r * kVocab + i]);
    for (int64_t i = 0; i < kVocab; ++i) {
      const double expected = i < seen ? std::exp(0.5 * logits_[r * kVocab + i]) / sum : 0;
      EXPECT_NEAR(softmax[r * kVocab + i], expected, 1e-6) << r << ' ' << i;
    }
  }
}

TEST_F(CApiTest, DivergenceOfAHeadBesideItselfIsNothing) {
  std::vector<float> hidden = {1, 2, -1, 0.5}, weight(kVocab * 4, 0.25f), gradient(4, 7), one = {1};
  weight[5] = 2;
  const logitd_head head = {.weight = Tensor(weight, 4), .scale = 1};
  for (int32_t kind = LOGITD_FORWARD_KL; kind <= LOGITD_JENSEN_SHANNON; ++kind) {
    logitd_divergence_training op = {.struct_size = sizeof(op)};
    op.hidden = op.reference_hidden = Tensor(hidden, 4);
    op.head = op.reference_head = &head;
    op.temperature.all = op.reference_temperature.all = 1;
    op.kind = kind;
    op.beta = 0.5;
    op.upstream = one.data();
    op.loss = loss_.data();
    op.d_hidden = Tensor(gradient, 4);
    ASSERT_EQ(logitd_run_divergence_training(context_, &call_, &op), LOGITD_OK) << logitd_error();
    EXPECT_EQ(loss_[0], 0);
    EXPECT_THAT(gradient, ElementsAre(0, 0, 0, 0));
  }
}

TEST_F(CApiTest, RefusesWithTheFieldTheValueAndTheRange) {
  struct Case {
    std::string text;
    void (*spoil)(logitd_cross_entropy&);
  };
  const Case cases[] = {
      {"struct_size: got 4096", [](auto& op) { op.struct_size = 4096; }},
      {"struct_size: got 0", [](auto& op) { op.struct_size = 0; }},
      {"logits dtype: got 9, allowed 0..2", [](auto& op) { op.input.dtype = 9; }},
      {"logits rows: got 0, allowed 1..", [](auto& op) { op.input.rows = 0; }},
      {"logits row_stride: got 6, allowed 7..", [](auto& op) { op.input.row_stride = 6; }},
      {"logits: got null", [](auto& op) { op.input.data = nullptr; }},
      {"targets: got null", [](auto& op) { op.rows.targets = nullptr; }},
      {"ignore_index: got 3, allowed below 0, or 7", [](auto& op) { op.rows.ignore_index = 3; }},
      {"temperature: got 0 at row 0, allowed", [](auto& op) { op.rows.temperature.all = 0; }},
      {"label_smoothing: got 1 at row 0", [](auto& op) { op.rows.label_smoothing.all = 1; }},
      {"z_loss: got nan at row 0", [](auto& op) { op.rows.z_loss.all = std::nanf(""); }},
      {"softcap: got -1 at row 0", [](auto& op) { op.rows.softcap = -1; }},
      {"smoothing: got 2 at row 0", [](auto& op) { op.rows.smoothing = 2; }},
      {"counted_rows: got 4, allowed 0..3", [](auto& op) { op.rows.counted_rows = 4; }},
      {"top_logprobs: got 8 at row 0",
       [](auto& op) {
         static int32_t ids[1];
         static float values[1];
         op.top_logprobs = 8, op.top_ids = ids, op.top_values = values;
       }},
      {"top_ids: got null", [](auto& op) { op.top_logprobs = 1; }},
      {"rows.vocab: got a shard of 9, allowed 0", [](auto& op) { op.rows.vocab = 9; }},
  };
  for (const Case& of : cases) {
    logitd_cross_entropy op = Losses();
    of.spoil(op);
    loss_.assign(3, -1);
    EXPECT_EQ(logitd_run_cross_entropy(context_, &call_, &op), LOGITD_INVALID_ARGUMENT) << of.text;
    EXPECT_THAT(logitd_error(), HasSubstr(of.text));
    EXPECT_THAT(loss_, ElementsAre(-1, -1, -1)) << of.text;
  }
  logitd_context* none = nullptr;
  EXPECT_EQ(logitd_open("tpu", 0, 0, 0, &none), LOGITD_INVALID_ARGUMENT);
  EXPECT_THAT(logitd_error(), HasSubstr("backend: got tpu, allowed cpu, cuda"));
  EXPECT_EQ(logitd_open("cpu", 3, 0, 0, &none), LOGITD_INVALID_ARGUMENT);
  EXPECT_EQ(logitd_open("cuda", 999, 0, 0, &none), LOGITD_UNAVAILABLE);
  EXPECT_THAT(logitd_error(), HasSubstr("got "));
  EXPECT_EQ(none, nullptr);
  EXPECT_EQ(logitd_run_cross_entropy(nullptr, &call_, nullptr), LOGITD_INVALID_ARGUMENT);
  EXPECT_THAT(logitd_error(), HasSubstr("context: got null"));
}

// The fields that an older caller does not know count as 0, whatever its memory holds there.
TEST_F(CApiTest, ShorterStructsOfOlderCallersAreServed) {
  float total = -1;
  logitd_cross_entropy op = Losses();
  op.struct_size = offsetof(logitd_cross_entropy, total);
  op.total = &total;
  ASSERT_EQ(logitd_run_cross_entropy(context_, &call_, &op), LOGITD_OK) << logitd_error();
  EXPECT_NEAR(loss_[0], Loss(0), 4e-6);
  op.reduction = LOGITD_REDUCE_SUM;
  EXPECT_EQ(logitd_run_cross_entropy(context_, &call_, &op), LOGITD_INVALID_ARGUMENT);
  EXPECT_THAT(logitd_error(), HasSubstr("total: got null"));
  EXPECT_EQ(total, -1);
}

TEST_F(CApiTest, HeadsMustBeAligned) {
  std::vector<float> hidden(9, 1), weight(4 * kVocab, 1);
  logitd_head head = {.weight = Tensor(weight, 4), .scale = 1};
  logitd_cross_entropy op = Losses();
  op.input = {hidden.data() + 1, 1, 4, 4, LOGITD_F32, 0};
  op.head = &head;
  EXPECT_EQ(logitd_run_cross_entropy(context_, &call_, &op), LOGITD_INVALID_ARGUMENT);
  EXPECT_THAT(logitd_error(), HasSubstr("hidden: got rows at address"));
}

}  // namespace
