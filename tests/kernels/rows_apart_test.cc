// Logits whose rows lie apart (TensorView::row_data), on the CPU backend: the same bits as
// together.
#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <vector>

#include "kernels/cross_entropy.h"
#include "kernels/sample.h"
#include "kernels/softmax_topk.h"
#include "tests/kernels/cpu_test.h"

namespace logitd::testing {
namespace {

// Rows together, and the same rows in memory of their own, in another order and each at an odd
// element.
struct Rows {
  Rows(int64_t rows, int64_t vocab) : rows(rows), vocab(vocab), together(Size(rows * vocab)) {
    std::mt19937 random(7);
    std::normal_distribution<float> normal(0, 3);
    for (float& x : together) x = normal(random);
    apart.resize(Size(rows * (vocab + 1) + 1));
    for (int64_t r = 0; r < rows; ++r) {
      float* const to = &apart[Size((rows - 1 - r) * (vocab + 1) + 1)];
      std::memcpy(to, &together[Size(r * vocab)], Size(vocab) * sizeof(float));
      places.push_back(to);
    }
  }
  static size_t Size(int64_t n) { return static_cast<size_t>(n); }
  TensorView Together() const {
    return {.data = together.data(), .rows = rows, .cols = vocab, .row_stride = vocab};
  }
  TensorView Apart() const { return {.rows = rows, .cols = vocab, .row_data = places.data()}; }

  const int64_t rows;
  const int64_t vocab;
  std::vector<float> together;
  std::vector<float> apart;
  std::vector<const void*> places;
};

class RowsApartTest : public CpuTest, public ::testing::WithParamInterface<std::pair<int, int>> {
 protected:
  // Runs the op on both, and compares what it wrote.
  template <typename Answer, typename Run>
  void ExpectSame(const Run& run) {
    auto stream = backend_->CreateStream(StreamUse::kOps).value();
    Answer together(rows_.rows);
    Answer apart(rows_.rows);
    ASSERT_TRUE(run(*stream, rows_.Together(), &together).ok());
    ASSERT_TRUE(stream->Wait().ok());
    ASSERT_TRUE(run(*stream, rows_.Apart(), &apart).ok());
    ASSERT_TRUE(stream->Wait().ok());
    EXPECT_TRUE(together == apart);
    EXPECT_FALSE(together == Answer(rows_.rows)) << "nothing was written";
  }

  const Rows rows_{GetParam().first, GetParam().second};
};

TEST_P(RowsApartTest, TopK) {
  constexpr int kK = 5;
  struct Answer {
    explicit Answer(int64_t rows)
        : indices(Rows::Size(rows * kK)), probs(indices.size()), logsumexp(Rows::Size(rows)) {}
    bool operator==(const Answer&) const = default;
    std::vector<int32_t> indices;
    std::vector<float> probs;
    std::vector<float> logsumexp;
  };
  std::vector<SoftmaxTopKRow> asks;
  for (int64_t r = 0; r < rows_.rows; ++r) {
    asks.push_back({.first_entry = r * kK, .temperature = 0.9f, .k = kK});
  }
  ExpectSame<Answer>([&](Stream& stream, const TensorView& logits, Answer* answer) {
    std::vector<RowStatus> status(asks.size());
    return stream.Run(SoftmaxTopKArgs{.logits = logits,
                                      .rows = asks.data(),
                                      .max_k = kK,
                                      .indices = answer->indices.data(),
                                      .probs = answer->probs.data(),
                                      .logsumexp = answer->logsumexp.data(),
                                      .status = status.data()});
  });
}

TEST_P(RowsApartTest, Sample) {
  struct Answer {
    explicit Answer(int64_t rows) : tokens(Rows::Size(rows), -1), logprobs(Rows::Size(rows)) {}
    bool operator==(const Answer&) const = default;
    std::vector<int32_t> tokens;
    std::vector<float> logprobs;
  };
  std::vector<SampleRow> asks;
  for (int64_t r = 0; r < rows_.rows; ++r) {
    asks.push_back({.seed = 11,
                    .position = static_cast<uint64_t>(r),
                    .first_mask_word = -1,
                    .active = 1,
                    .temperature = 0.8f,
                    .top_p = 0.9f,
                    .repetition = 1});
  }
  ExpectSame<Answer>([&](Stream& stream, const TensorView& logits, Answer* answer) {
    std::vector<int32_t> ranks(asks.size()), support_size(asks.size());
    std::vector<float> logsumexp(asks.size()), entropies(asks.size()), raw_entropies(asks.size());
    std::vector<RowStatus> status(asks.size());
    return stream.Run(SampleArgs{.logits = logits,
                                 .rows = asks.data(),
                                 .tokens = answer->tokens.data(),
                                 .logprobs = answer->logprobs.data(),
                                 .ranks = ranks.data(),
                                 .logsumexp = logsumexp.data(),
                                 .status = status.data(),
                                 .support_size = support_size.data(),
                                 .entropies = entropies.data(),
                                 .raw_entropies = raw_entropies.data()});
  });
}

TEST_P(RowsApartTest, CrossEntropy) {
  struct Answer {
    explicit Answer(int64_t rows) : loss(Rows::Size(rows)), logsumexp(loss), target(loss) {}
    bool operator==(const Answer&) const = default;
    std::vector<float> loss;
    std::vector<float> logsumexp;
    std::vector<float> target;
  };
  std::vector<CrossEntropyRow> asks;
  for (int64_t r = 0; r < rows_.rows; ++r) {
    asks.push_back({.active = 1, .target = static_cast<int32_t>(r), .temperature = 1});
  }
  ExpectSame<Answer>([&](Stream& stream, const TensorView& logits, Answer* answer) {
    std::vector<RowStatus> status(asks.size());
    return stream.Run(CrossEntropyArgs{.logits = logits,
                                       .rows = asks.data(),
                                       .want = 0,
                                       .max_top_logprobs = 0,
                                       .max_extra_ids = 0,
                                       .answers = {.loss = answer->loss.data(),
                                                   .logsumexp = answer->logsumexp.data(),
                                                   .target_logprob = answer->target.data(),
                                                   .status = status.data()}});
  });
}

INSTANTIATE_TEST_SUITE_P(All, RowsApartTest,
                         ::testing::Values(std::pair(1, 131072), std::pair(3, 5001),
                                           std::pair(40, 1003)),
                         [](const auto& info) {
                           return absl::StrCat(info.param.first, "x", info.param.second);
                         });

}  // namespace
}  // namespace logitd::testing
