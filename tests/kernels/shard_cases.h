// Inputs for which any number of shards must give the bits of one device, and those bits.
#ifndef LOGITD_TESTS_KERNELS_SHARD_CASES_H_
#define LOGITD_TESTS_KERNELS_SHARD_CASES_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/shards.h"
#include "tests/kernels/divergence_cases.h"
#include "tests/kernels/linear_cases.h"
#include "tests/kernels/linear_gradient_cases.h"
#include "tests/kernels/op_check.h"
#include "tests/kernels/op_runner.h"
#include "tests/kernels/support_cases.h"
#include "tests/kernels/verify_cases.h"

namespace logitd::testing {

// What the head's bias does besides being random.
enum class Logits { kRandom, kTied, kNans, kBans, kAllBanned, kCertain };

struct ShardCase {
  LinearCase linear;
  Logits logits = Logits::kRandom;
};

inline std::string DescribeShards(const ShardCase& c) {
  return absl::StrCat(Describe(c.linear), ", logits ", static_cast<int>(c.logits));
}

inline LinearInput InputOf(const ShardCase& c) {
  LinearInput input = RandomTensors(c.linear);
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const int64_t vocab = c.linear.vocab;
  if (c.logits == Logits::kRandom) return input;
  std::vector<float>& bias = input.head.bias;
  bias.resize(static_cast<size_t>(vocab));
  // Tokens spread over the vocabulary, some on both sides of a border.
  std::vector<int64_t> some = {vocab / 3, vocab / 2, vocab - 1};
  for (int64_t cell = 1; cell * kVocabCell < vocab; cell += 2) {
    some.push_back(cell * kVocabCell - 1);
    some.push_back(cell * kVocabCell);
  }
  switch (c.logits) {
    case Logits::kRandom:
      break;
    case Logits::kTied:
      // Whole numbers: hundreds of tokens tie for each place.
      for (int64_t i = 0; i < vocab; ++i) {
        for (int64_t d = 0; d < c.linear.hidden; ++d) {
          input.head.weight.Set(i, d, static_cast<float>((i * 7 + d) % 3) - 1);
        }
        bias[static_cast<size_t>(i)] = 0;
      }
      for (int64_t r = 0; r < c.linear.rows; ++r) {
        for (int64_t d = 0; d < c.linear.hidden; ++d) {
          input.hidden.Set(r, d, static_cast<float>((r + d) % 3) - 1);
        }
      }
      input.head.scale = 1;
      input.head.softcap = 0;
      break;
    case Logits::kNans:
      for (const int64_t i : some) bias[static_cast<size_t>(i)] = kNan;
      break;
    case Logits::kBans:  // the first two thirds, so whole cells and shards
      std::fill_n(bias.begin(), vocab * 2 / 3, -kInfinity);
      break;
    case Logits::kAllBanned:
      std::fill(bias.begin(), bias.end(), -kInfinity);
      break;
    case Logits::kCertain:
      for (const int64_t i : some) bias[static_cast<size_t>(i)] = kInfinity;
      break;
  }
  return input;
}

template <typename T>
void Append(const std::vector<T>& values, std::string* bits) {
  bits->append(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T));
  bits->append("|");
}

inline std::vector<SoftmaxTopKRow> AsksOf(const LinearCase& c, int64_t* entries) {
  const int64_t ks[] = {1, 20, c.vocab, 0, 1500, 40};
  std::vector<SoftmaxTopKRow> asks;
  for (int64_t r = 0; r < c.rows; ++r) {
    const auto k = static_cast<int32_t>(std::min(c.vocab, ks[r % 6]));
    asks.push_back({.first_entry = *entries, .temperature = r % 2 == 0 ? 1.0f : 0.6f, .k = k});
    *entries += k;
  }
  return asks;
}

inline void Append(const SampleAnswer& drawn, std::string* bits) {
  Append(drawn.tokens, bits);
  Append(drawn.logprobs, bits);
  Append(drawn.ranks, bits);
  Append(drawn.logsumexp, bits);
  Append(drawn.status, bits);
  Append(drawn.top_ids, bits);
  Append(drawn.top_logprobs, bits);
  Append(drawn.extra_logprobs, bits);
  Append(drawn.entropies, bits);
  Append(drawn.raw_entropies, bits);
  Append(drawn.support_size, bits);
  Append(drawn.support_ids, bits);
  Append(drawn.support_logprobs, bits);
  Append(drawn.draw_tokens, bits);
  Append(drawn.draw_logprobs, bits);
}

// Rows that need only a few of their first tokens.
inline SampleBatch KeptBatchOf(const LinearCase& c) {
  SampleBatch batch;
  const auto most = static_cast<int32_t>(std::min<int64_t>(kMostKept, c.vocab));
  const int32_t top_ks[] = {1, 50, kMostKept, 7};  // may be more than the vocabulary
  for (int64_t r = 0; r < c.rows; ++r) {
    SampleRow row = PlainRow();
    row.seed = c.seed;
    row.position = static_cast<uint64_t>(r);
    row.active = r % 11 != 3 ? 1 : 0;
    row.temperature = r % 5 == 0 ? 0.0f : r % 5 == 1 ? 0.7f : r % 5 == 2 ? 1e-4f : 1.0f;
    row.top_k = row.temperature == 0 && r % 2 == 0 ? 0 : top_ks[r % 4];
    row.top_p = r % 3 == 0 ? 0.9f : 1.0f;
    row.min_p = r % 7 == 0 ? 0.05f : 0.0f;
    row.want_rank = r % 4 != 0;
    row.logprob_mode = r % 6 < 3 ? LogprobMode::kRaw : LogprobMode::kProcessed;
    row.top_logprobs = r % 3 == 1 ? most : static_cast<int32_t>(r % 3);
    row.top_logprobs = std::min(row.top_logprobs, most);
    row.first_top_entry = batch.top_entries;
    batch.top_entries += row.top_logprobs;
    batch.rows.push_back(row);
  }
  return batch;
}

// The answers to KeptBatchOf.
inline std::string KeptBits(OpRunner& runner, const ShardCase& c, bool says_kept) {
  const LinearInput input = InputOf(c);
  const SampleBatch batch = KeptBatchOf(c.linear);
  std::string bits;
  Append(runner.LinearSample(input.hidden, input.head, batch, says_kept).value(), &bits);
  return bits;
}

inline void Append(const LossAnswer& scored, std::string* bits) {
  Append(scored.loss, bits);
  Append(scored.logsumexp, bits);
  Append(scored.target_logprob, bits);
  Append(scored.rank, bits);
  Append(scored.entropy, bits);
  Append(scored.status, bits);
  Append(scored.top_ids, bits);
  Append(scored.top_logprobs, bits);
  Append(scored.extra_logprobs, bits);
}

// Losses of which two of three have supports of random tokens.
inline LossBatch SupportedLossesOf(const LinearCase& c) {
  LossBatch batch;
  std::mt19937_64 random(c.seed);
  for (int64_t r = 0; r < c.rows; ++r) {
    AddRandomLoss(batch, c.vocab, /*with_softcap=*/false, random);
    if (r % 3 == 2) continue;
    std::set<int32_t> ids;
    const uint64_t size = 1 + random() % std::min<uint64_t>(60, static_cast<uint64_t>(c.vocab));
    while (ids.size() < size)
      ids.insert(static_cast<int32_t>(random() % static_cast<uint64_t>(c.vocab)));
    CrossEntropyRow& row = batch.rows.back();
    row = PlainLoss(*ids.rbegin());
    row.temperature = r % 2 == 0 ? 1.0f : 0.6f;
    row.want = r % 4 == 0 ? kWantEntropy : 0;
    row.first_support = static_cast<int64_t>(batch.support_ids.size());
    row.support_count = static_cast<int32_t>(size);
    batch.support_ids.insert(batch.support_ids.end(), ids.begin(), ids.end());
  }
  batch.says_all_wanted = true;
  return batch;
}

// Answers of linear_verify to drafts of every kind, in sequences of up to 90 rows of which about
// half have block verification.
inline std::string VerifyBitsOf(OpRunner& runner, const LinearInput& input, const LinearCase& c,
                                int64_t longest = 90) {
  const SampleBatch batch = VerifyRowsOf(c);
  const auto drawn = runner.LinearSample(input.hidden, input.head, batch).value();
  std::mt19937_64 random(c.seed);
  std::string bits;
  for (const Blocks blocks : {Blocks::kNone, Blocks::kSome}) {
    const VerifyBatch verify =
        RandomDrafts(drawn.tokens, c.vocab, longest, longest / 2, blocks, random);
    bits += VerifyBits(runner.LinearVerify(input.hidden, input.head, batch, verify).value(), batch);
  }
  return bits;
}

// Answers of linear_divergence: of two heads, and where `mixed` of each beside logits.
inline std::vector<std::string> DivergencesBits(OpRunner& runner, const ShardCase& c,
                                                bool mixed = true) {
  ShardCase other = c;
  other.linear.dtype = c.linear.dtype == DType::kF32 ? DType::kBF16 : DType::kF32;
  other.linear.hidden += 24;
  other.linear.bias = !c.linear.bias;
  other.linear.seed += 50;
  if (c.linear.seed % 2 == 0) other.logits = Logits::kRandom;
  const LinearInput x = InputOf(c), y = InputOf(other);
  const int64_t vocab = c.linear.vocab;
  HostTensor logits(DType::kF32, c.linear.rows, vocab, vocab + 3, 0);
  std::vector<DivergenceRow> rows;
  std::mt19937_64 random(c.linear.seed);
  for (int64_t r = 0; r < c.linear.rows; ++r) {
    FillRow(logits, r, Fill::kNormal, c.linear.seed);
    rows.push_back(RandomDivergence(vocab, random));
  }
  std::vector<std::string> bits;
  const auto add = [&](const absl::StatusOr<DivergenceAnswer>& answer) {
    bits.emplace_back();
    for (int64_t r = 0; r < c.linear.rows; ++r) bits.back() += DivergenceBits(answer.value(), r);
  };
  add(runner.LinearDivergence(x.hidden, x.head, y.hidden, y.head, rows));
  if (!mixed) return bits;
  add(runner.MixedDivergence(x.hidden, x.head, logits, true, rows));
  add(runner.MixedDivergence(y.hidden, y.head, logits, false, rows));
  return bits;
}

// Every answer of the ops on one head, losses three times; a separate string for each call.
inline std::vector<std::string> AllBits(OpRunner& runner, const ShardCase& c) {
  const LinearInput input = InputOf(c);
  int64_t entries = 0;
  const std::vector<SoftmaxTopKRow> asks = AsksOf(c.linear, &entries);
  std::vector<std::string> bits(6);
  const auto top = runner.LinearTopK(input.hidden, input.head, asks, entries).value();
  Append(top.indices, &bits[0]);
  Append(top.probs, &bits[0]);
  Append(top.logsumexp, &bits[0]);
  Append(top.status, &bits[0]);
  const auto drawn = runner.LinearSample(input.hidden, input.head, SampleBatchOf(c.linear)).value();
  Append(drawn, &bits[1]);
  const auto add_losses = [&](const LossBatch& batch, std::string* to) {
    Append(runner.LinearCrossEntropy(input.hidden, input.head, batch).value(), to);
  };
  LossBatch losses = LossBatchOf(c.linear);
  add_losses(losses, &bits[2]);
  // Rows that want only losses and extras may take another way.
  losses.says_all_wanted = false;
  for (CrossEntropyRow& row : losses.rows) row.want = row.top_logprobs = 0;
  add_losses(losses, &bits[3]);
  add_losses(SupportedLossesOf(c.linear), &bits[4]);
  bits[5] = VerifyBitsOf(runner, input, c.linear);
  return bits;
}

// What holds between ops on one head, whose logits all have the same bits.
inline std::vector<OpCheck> ChecksOfExchangedLogits() {
  return {ForAll("LogprobsOfSupportsHaveTheBitsOfLinearSample", LinearSupportCases,
                 OtherBitsThanLinearSample),
          ForAll("GreedyDraftsGiveTheBitsOfLinearSample", LinearVerifyCases, BrokenLinearGreedy)};
}

inline std::vector<ShardCase> ShardCases() {
  std::vector<ShardCase> cases;
  uint64_t n = 0;
  for (const int64_t vocab : {1, 7, 1023, 1024, 1025, 2049, 3000, 5003, 9216}) {
    for (const int64_t rows : {1, 3, 70}) {
      ++n;
      const DType dtype = n % 3 == 0 ? DType::kF32 : n % 3 == 1 ? DType::kBF16 : DType::kF16;
      cases.push_back({{dtype, rows, vocab, 24, n % 2 == 0, n % 4 < 2, n % 5 == 0 ? 5.0f : 0.0f,
                        static_cast<int64_t>(n % 3), n}});
    }
    for (const Logits logits :
         {Logits::kTied, Logits::kNans, Logits::kBans, Logits::kAllBanned, Logits::kCertain}) {
      ++n;
      cases.push_back({{n % 2 == 0 ? DType::kF32 : DType::kBF16, 12, vocab, 16, true, false,
                        n % 3 == 0 ? 4.0f : 0.0f, 0, n},
                       logits});
    }
  }
  cases.push_back({{DType::kBF16, 33, 50257, 64, true, false, 30, 0, ++n}});
  return cases;
}

inline std::string DescribeSharded(const LinearCase& c, int shards) {
  return absl::StrCat(Describe(c), ", ", shards, " shards");
}

// The bits of all answers of training except gradients.
inline std::string BitsOfLosses(const LossAnswer& answer) {
  std::string bits;
  Append(answer.loss, &bits);
  Append(answer.logsumexp, &bits);
  Append(answer.target_logprob, &bits);
  Append(answer.status, &bits);
  return bits;
}

// "" where the gradients differ by rounding only: by 2^-7 of the largest.
inline std::string GradientDifference(const std::string& name, const HostTensor& a,
                                      const HostTensor& b) {
  float most = 0;
  for (int64_t r = 0; r < a.rows(); ++r) {
    for (int64_t d = 0; d < a.cols(); ++d) most = std::max(most, std::fabs(b.At(r, d)));
  }
  for (int64_t r = 0; r < a.rows(); ++r) {
    for (int64_t d = 0; d < a.cols(); ++d) {
      if (std::fabs(a.At(r, d) - b.At(r, d)) <= 0x1p-7f * most) continue;
      return absl::StrCat(name, "[", r, ", ", d, "]: ", a.At(r, d), " and ", b.At(r, d));
    }
  }
  return "";
}
inline std::string HiddenDifference(const LinearBackwardAnswer& got,
                                    const LinearBackwardAnswer& want) {
  return GradientDifference("d_hidden", got.d_hidden, want.d_hidden);
}
inline std::string WeightDifference(const LinearBackwardAnswer& got,
                                    const LinearBackwardAnswer& want) {
  return GradientDifference("d_weight", got.d_weight, want.d_weight);
}

// Gradients of heads with several cells, the last one short.
inline std::vector<LinearCase> ShardGradientCases() {
  struct Shape {
    int64_t rows, vocab, hidden;
  };
  std::vector<LinearCase> cases;
  uint64_t n = 300;
  for (const Shape& shape :
       {Shape{3, 1, 8}, Shape{5, 2049, 8}, Shape{70, 3000, 24}, Shape{9, 5003, 40}}) {
    for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
      ++n;
      cases.push_back({dtype, shape.rows, shape.vocab, shape.hidden, n % 2 == 0, false,
                       n % 4 < 2 ? 0.0f : 30.0f, static_cast<int64_t>(n % 3), n});
    }
  }
  return cases;
}

}  // namespace logitd::testing

#endif  // LOGITD_TESTS_KERNELS_SHARD_CASES_H_
