// sample on every backend: answers by hand, parity with double precision, and bits that do not
// depend on other rows. One table for the CPU and the GPU. Long because all cases of a new
// parameter go into one file.
#ifndef LOGITD_TESTS_KERNELS_SAMPLE_CASES_H_
#define LOGITD_TESTS_KERNELS_SAMPLE_CASES_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/strings/str_format.h"
#include "tests/kernels/op_check.h"
#include "tests/kernels/op_runner.h"
#include "tests/kernels/reference.h"
#include "tests/kernels/sample_reference.h"

namespace logitd::testing {

// A row that draws from the whole of its logits at temperature 1.
inline SampleRow PlainRow() {
  return {.first_mask_word = -1,
          .active = 1,
          .temperature = 1,
          .top_p = 1,
          .repetition = 1,
          .typical_p = 1,
          .xtc_threshold = 0.1f,
          .want_rank = true};
}

// ---- Answers by hand

// With seed 0: UniformBits / 2^64 by position.
//   0: 0.8805   1: 0.3621   4: 0.6937   5: 0.0277
inline constexpr uint64_t kAt088 = 0, kAt036 = 1, kAt069 = 4, kAt003 = 5;

// What the row of a claim asks for; its seed is 0.
struct SampleAsk {
  uint64_t position = 0;
  float temperature = 1;
  int32_t top_k = 0;
  float top_p = 1;
  float top_n_sigma = 0;
  float min_p = 0;
  float typical_p = 1;
  float xtc_threshold = 0.1f;
  float xtc_probability = 0;
  float repetition = 1;
  float presence = 0;
  float frequency = 0;
  int32_t prompt_tokens = 0;
  int32_t top_logprobs = 0;
  bool processed = false;  // log-probabilities of the processed logits
  bool tempered = false;   // or of those as sent, at the temperature
  bool want_rank = true;
  bool want_entropy = false;
  int32_t want_support = 0;
  int32_t draws = 0;
  int32_t watermark_width = 0;
  uint64_t watermark_key = 7;
};

struct SampleClaim {
  const char* name;
  std::vector<float> logits;
  SampleAsk ask;
  std::vector<int32_t> history;
  std::vector<SampleBias> bias;
  std::vector<uint32_t> mask_words;  // empty: no mask
  int32_t token;
  float logprob;
  int32_t rank;
  std::vector<int32_t> top_ids;
  std::vector<float> top_logprobs;
  RowStatus status;
  float entropy = 0;
  float raw_entropy = 0;
  int32_t support_size = 0;
  std::vector<int32_t> support_ids = {};  // want_support of them
  std::vector<float> support_logprobs = {};
  std::vector<int32_t> draw_tokens = {};  // `draws` of them
  std::vector<float> draw_logprobs = {};
};

// The claim's row, whose lists are the claim's.
inline SampleRow RowOf(const SampleClaim& claim) {
  SampleRow row = PlainRow();
  const SampleAsk& ask = claim.ask;
  row.position = ask.position;
  row.temperature = ask.temperature;
  row.top_k = ask.top_k;
  row.top_p = ask.top_p;
  row.top_n_sigma = ask.top_n_sigma;
  row.min_p = ask.min_p;
  row.typical_p = ask.typical_p;
  row.xtc_threshold = ask.xtc_threshold;
  row.xtc_probability = ask.xtc_probability;
  row.repetition = ask.repetition;
  row.presence = ask.presence;
  row.frequency = ask.frequency;
  row.prompt_tokens = ask.prompt_tokens;
  row.top_logprobs = ask.top_logprobs;
  row.logprob_mode = ask.processed  ? LogprobMode::kProcessed
                     : ask.tempered ? LogprobMode::kTempered
                                    : LogprobMode::kRaw;
  row.want_rank = ask.want_rank;
  row.want_entropy = ask.want_entropy;
  row.want_support = ask.want_support;
  row.draws = ask.draws;
  row.watermark_width = ask.watermark_width;
  row.watermark_key = ask.watermark_key;
  row.first_mask_word = claim.mask_words.empty() ? -1 : 0;
  row.history_count = static_cast<int32_t>(claim.history.size());
  row.bias_count = static_cast<int32_t>(claim.bias.size());
  return row;
}

// The order of tokens, temperature and filters.
inline const std::vector<SampleClaim>& SampleClaims() {
  static const float ln2 = std::log(2.0f), ln3 = std::log(3.0f), ln4 = std::log(4.0f);
  static const auto& claims = *new std::vector<SampleClaim>{
      // clang-format off
      {.name = "one token is certain", .logits = {-3}, .ask = {.position = kAt088}, .token = 0,
       .logprob = 0, .rank = 1},
      {.name = "bits below one half draw the first of two equals", .logits = {5, 5},
       .ask = {.position = kAt036}, .token = 0, .logprob = -ln2, .rank = 1},
      {.name = "bits above one half draw the second of two equals", .logits = {5, 5},
       .ask = {.position = kAt069}, .token = 1, .logprob = -ln2, .rank = 2},
      // Prefix sums 0.25, 1: in index order, not by probability.
      {.name = "prefix sums go by index, not by probability", .logits = {0, ln3},
       .ask = {.position = kAt003}, .token = 0, .logprob = -ln4, .rank = 2},
      {.name = "the first prefix sum above the bits is drawn", .logits = {0, ln3},
       .ask = {.position = kAt036}, .token = 1, .logprob = ln3 - ln4, .rank = 1},
      {.name = "minus inf is never drawn", .logits = {-kInf, 0, -kInf, 0, -kInf},
       .ask = {.position = kAt088}, .token = 3, .logprob = -ln2, .rank = 2},
      {.name = "plus inf is certain", .logits = {5, kInf, 7}, .ask = {.position = kAt003},
       .token = 1, .logprob = 0, .rank = 1},
      {.name = "several plus inf share the probability", .logits = {kInf, 5, kInf},
       .ask = {.position = kAt088, .top_logprobs = 3}, .token = 2, .logprob = -ln2, .rank = 2,
       .top_ids = {0, 2, 1}, .top_logprobs = {-ln2, -ln2, -kInf}},
      {.name = "a greedy row takes the lowest index of equals", .logits = {1, 3, 3},
       .ask = {.position = kAt088, .temperature = 0}, .token = 1, .logprob = -0.75862378f,
       .rank = 1},
      {.name = "a greedy row takes minus zero as zero", .logits = {-0.0f, 0.0f},
       .ask = {.position = kAt088, .temperature = 0}, .token = 0, .logprob = -ln2, .rank = 1},
      {.name = "a greedy row gives its token probability 1", .logits = {1, 3, 3},
       .ask = {.position = kAt088, .temperature = 0, .top_logprobs = 3, .processed = true},
       .token = 1, .logprob = 0, .rank = 1, .top_ids = {1, 2, 0},
       .top_logprobs = {0, -kInf, -kInf}},
      {.name = "the temperature divides logits", .logits = {0, 2 * ln3},
       .ask = {.position = kAt003, .temperature = 2, .processed = true}, .token = 0,
       .logprob = -ln4, .rank = 2},
      {.name = "a low temperature draws the highest logit", .logits = {1, 1.5f, 0},
       .ask = {.position = kAt003, .temperature = 1e-4f}, .token = 1, .logprob = -0.60413155f,
       .rank = 1},
      {.name = "a high temperature makes the row flat", .logits = {1, 5, 0},
       .ask = {.position = kAt088, .temperature = 1e4f}, .token = 2, .logprob = -5.024745f,
       .rank = 3},
      {.name = "logits far apart do not make NaN", .logits = {-3e38f, 3e38f},
       .ask = {.position = kAt003}, .token = 1, .logprob = 0, .rank = 1},
      {.name = "top k cuts ties by index", .logits = {1, 1, 1, 1},
       .ask = {.position = kAt088, .top_k = 2, .top_logprobs = 3, .processed = true}, .token = 1,
       .logprob = -ln2, .rank = 2, .top_ids = {0, 1, 2}, .top_logprobs = {-ln2, -ln2, -kInf}},
      // 0.5, 0.25, 0.25
      {.name = "top p keeps the token that reaches it", .logits = {ln2, 0, 0},
       .ask = {.position = kAt088, .top_p = 0.6f, .processed = true}, .token = 1, .logprob = -ln3,
       .rank = 2},
      {.name = "top_p stops where it is reached exactly", .logits = {0, 0, 0, 0},
       .ask = {.position = kAt088, .top_p = 0.5f}, .token = 1, .logprob = -ln4, .rank = 2},
      {.name = "top_p keeps at least one token", .logits = {0, 1},
       .ask = {.position = kAt003, .top_p = 1e-45f}, .token = 1, .logprob = -0.31326169f,
       .rank = 1},
      {.name = "top_p keeps at least one of more tokens than the kernel lists",
       .logits = std::vector<float>(200, 0.0f),
       .ask = {.position = kAt088, .top_p = 1e-45f, .min_p = 0.5f, .processed = true}, .token = 0,
       .logprob = 0, .rank = 1},
      // Their difference is no f32.
      {.name = "logits far apart at a high temperature keep their mass", .logits = {3e38f, -3e38f},
       .ask = {.position = kAt088, .temperature = 1e38f, .min_p = 0.001f, .processed = true},
       .token = 0, .logprob = -0.00247568f, .rank = 1},
      // The first has 2/3 of the first two, which is enough, but only 1/2 of the whole row.
      {.name = "top_p is a share of what top_k left", .logits = {ln2, 0, 0},
       .ask = {.position = kAt088, .top_k = 2, .top_p = 0.6f, .processed = true}, .token = 0,
       .logprob = 0, .rank = 1},
      {.name = "min_p of 1 keeps every tie of the highest logit", .logits = {3, 1, 3},
       .ask = {.position = kAt088, .min_p = 1, .processed = true}, .token = 2, .logprob = -ln2,
       .rank = 2},
      // Ratios 1 and 1/16; at temperature 4, 1 and 1/2.
      {.name = "min_p comes after the temperature", .logits = {0, 4 * ln2, 4 * ln2},
       .ask = {.position = kAt003, .temperature = 4, .min_p = 0.49f, .processed = true}, .token = 0,
       .logprob = -1.6094379f, .rank = 3},
      // clang-format on
  };
  return claims;
}

// The mean of {0, 2} is 1, and so is its standard deviation.
inline const std::vector<SampleClaim>& SampleSigmaClaims() {
  static const float ln2 = std::log(2.0f), ln4 = std::log(4.0f);
  static const auto& claims = *new std::vector<SampleClaim>{
      // clang-format off
      {.name = "top_n_sigma keeps a token at its border", .logits = {0, 2},
       .ask = {.position = kAt003, .top_n_sigma = 2, .processed = true}, .token = 0,
       .logprob = -2.126928f, .rank = 2},
      {.name = "top_n_sigma drops a token below its border", .logits = {0, 2},
       .ask = {.position = kAt003, .top_n_sigma = 1.9999999f, .top_logprobs = 2,
               .processed = true},
       .token = 1, .logprob = 0, .rank = 1, .top_ids = {1, 0}, .top_logprobs = {0, -kInf}},
      // A sample's would be 1.15, and keep all.
      {.name = "top_n_sigma takes the deviation of all tokens, not of a sample",
       .logits = {0, 0, 2, 2}, .ask = {.position = kAt088, .top_n_sigma = 1.9f, .processed = true},
       .token = 3, .logprob = -ln2, .rank = 2},
      {.name = "top_n_sigma of a row of equal logits keeps all", .logits = {5, 5, 5, 5},
       .ask = {.position = kAt088, .top_n_sigma = 1e-3f, .processed = true}, .token = 3,
       .logprob = -ln4, .rank = 4},
      {.name = "top_n_sigma does not depend on the temperature", .logits = {0, 2, 2},
       .ask = {.position = kAt003, .temperature = 1e4f, .top_n_sigma = 2, .top_logprobs = 3,
               .processed = true},
       .token = 1, .logprob = -ln2, .rank = 1, .top_ids = {1, 2, 0},
       .top_logprobs = {-ln2, -ln2, -kInf}},
      {.name = "a masked token does not count for top_n_sigma", .logits = {0, 2, 1000},
       .ask = {.position = kAt003, .top_n_sigma = 2, .processed = true}, .mask_words = {0b011},
       .token = 0, .logprob = -2.126928f, .rank = 2},
      {.name = "top_n_sigma sees the logits after bias and penalties", .logits = {1, 2, 7},
       .ask = {.position = kAt003, .top_n_sigma = 2, .presence = 1, .processed = true},
       .history = {0}, .bias = {{2, -kInf}}, .token = 0, .logprob = -2.126928f, .rank = 2},
      {.name = "top_n_sigma before top_p, which is a share of what it left", .logits = {0, 2, 2},
       .ask = {.position = kAt003, .top_p = 0.5f, .top_n_sigma = 2, .processed = true}, .token = 1,
       .logprob = 0, .rank = 1},
      {.name = "top_n_sigma and min_p: the higher border counts", .logits = {0, 2},
       .ask = {.position = kAt003, .top_n_sigma = 2, .min_p = 0.5f, .processed = true}, .token = 1,
       .logprob = 0, .rank = 1},
      {.name = "plus inf is certain with top_n_sigma", .logits = {5, kInf, -kInf, kInf},
       .ask = {.position = kAt088, .top_n_sigma = 1, .processed = true}, .token = 3,
       .logprob = -ln2, .rank = 2},
      {.name = "a greedy row takes the highest logit whatever its top_n_sigma", .logits = {1, 3, 2},
       .ask = {.position = kAt088, .temperature = 0, .top_n_sigma = 1e-3f, .processed = true},
       .token = 1, .logprob = 0, .rank = 1},
      {.name = "top_n_sigma of logits far apart", .logits = {-3e38f, 3e38f},
       .ask = {.position = kAt003, .temperature = 1e38f, .top_n_sigma = 3e38f, .top_logprobs = 2,
               .processed = true},
       .token = 1, .logprob = -0.0024757f, .rank = 1, .top_ids = {1, 0},
       .top_logprobs = {-0.0024757f, -6.0024757f}},
      {.name = "top_n_sigma alone keeps nothing below 2^-44 of the maximum",
       .logits = {0, -30.4f, -30.6f, -40},
       .ask = {.position = kAt003, .top_n_sigma = 100, .top_logprobs = 4, .processed = true},
       .token = 0, .logprob = 0, .rank = 1, .top_ids = {0, 1, 2, 3},
       .top_logprobs = {0, -30.4f, -kInf, -kInf}},
      // clang-format on
  };
  return claims;
}

// Log-probabilities of the row as sent at its temperature.
inline const std::vector<SampleClaim>& SampleTemperedClaims() {
  static const float ln2 = std::log(2.0f), ln3 = std::log(3.0f), ln4 = std::log(4.0f);
  static const auto& claims = *new std::vector<SampleClaim>{
      // clang-format off
      {.name = "tempered log-probabilities are those of logits over the temperature",
       .logits = {0, 2 * ln3}, .ask = {.position = kAt003, .temperature = 2, .top_logprobs = 2,
                                       .tempered = true},
       .token = 0, .logprob = -ln4, .rank = 2, .top_ids = {1, 0},
       .top_logprobs = {ln3 - ln4, -ln4}},
      // At temperature 2: 2, 1, 1 of 4. The filters leave token 0.
      {.name = "tempered log-probabilities are over the whole vocabulary, whatever the filters",
       .logits = {2 * ln2, 0, 0}, .ask = {.position = kAt088, .temperature = 2, .top_k = 1,
                                          .top_logprobs = 3, .tempered = true},
       .token = 0, .logprob = -ln2, .rank = 1, .top_ids = {0, 1, 2},
       .top_logprobs = {-ln2, -ln4, -ln4}},
      {.name = "tempered log-probabilities of a row with top_p are over the whole vocabulary",
       .logits = {2 * ln2, 0, 0}, .ask = {.position = kAt088, .temperature = 2, .top_p = 0.4f,
                                          .top_logprobs = 3, .tempered = true},
       .token = 0, .logprob = -ln2, .rank = 1, .top_ids = {0, 1, 2},
       .top_logprobs = {-ln2, -ln4, -ln4}},
      {.name = "tempered log-probabilities are without bias, penalties and mask",
       .logits = {2 * ln2, 0, 0}, .ask = {.position = kAt088, .temperature = 2, .presence = 9,
                                          .top_logprobs = 2, .tempered = true},
       .history = {0}, .bias = {{1, -9}}, .mask_words = {0b110}, .token = 2, .logprob = -ln4,
       .rank = 3, .top_ids = {0, 1}, .top_logprobs = {-ln2, -ln4}},
      {.name = "tempered log-probabilities of a masked row with min_p", .logits = {2 * ln2, 0, 0},
       .ask = {.position = kAt088, .temperature = 2, .min_p = 0.5f, .tempered = true},
       .mask_words = {0b110}, .token = 2, .logprob = -ln4, .rank = 3},
      {.name = "tempered log-probabilities of a greedy row are at temperature 1",
       .logits = {1, 3, 3}, .ask = {.position = kAt088, .temperature = 0, .tempered = true},
       .token = 1, .logprob = -0.75862378f, .rank = 1},
      {.name = "tempered log-probabilities at temperature 1 are the raw ones", .logits = {0, ln3},
       .ask = {.position = kAt036, .tempered = true}, .token = 1, .logprob = ln3 - ln4, .rank = 1},
      {.name = "several plus inf share the probability at any temperature",
       .logits = {kInf, 5, kInf}, .ask = {.position = kAt088, .temperature = 0.5f,
                                          .top_logprobs = 3, .tempered = true},
       .token = 2, .logprob = -ln2, .rank = 2, .top_ids = {0, 2, 1},
       .top_logprobs = {-ln2, -ln2, -kInf}},
      {.name = "tempered log-probabilities of logits far apart", .logits = {-3e38f, 3e38f, -kInf},
       .ask = {.position = kAt003, .temperature = 1e38f, .min_p = 0.5f, .top_logprobs = 3,
               .tempered = true},
       .token = 1, .logprob = -0.0024757f, .rank = 1, .top_ids = {1, 0, 2},
       .top_logprobs = {-0.0024757f, -6.0024757f, -kInf}},
      // 2^-118 apart: at temperature 2^-118 that is 1.
      {.name = "a temperature below 2^-118 acts as 2^-118 in tempered log-probabilities",
       .logits = {0x1p-118f, 0},
       .ask = {.position = kAt003, .temperature = 0x1p-130f, .min_p = 0.9f, .top_logprobs = 2,
               .tempered = true},
       .token = 0, .logprob = -0.31326169f, .rank = 1, .top_ids = {0, 1},
       .top_logprobs = {-0.31326169f, -1.3132617f}},
      // clang-format on
  };
  return claims;
}

// Entropies of what is drawn from, and of the row as sent.
inline const std::vector<SampleClaim>& SampleEntropyClaims() {
  static const float ln2 = std::log(2.0f), ln3 = std::log(3.0f), ln4 = std::log(4.0f);
  // Of weights 2, 1, 1; 4, 1, 1; 1, 3.
  static constexpr float kOf211 = 1.0397208f, kOf411 = 0.86756323f, kOf13 = 0.56233514f;
  static const auto& claims = *new std::vector<SampleClaim>{
      // clang-format off
      {.name = "the entropy of the draw is at the temperature, the raw one is not",
       .logits = {2 * ln2, 0, 0},
       .ask = {.position = kAt003, .temperature = 2, .processed = true, .want_entropy = true},
       .token = 0, .logprob = -ln2, .rank = 1, .entropy = kOf211, .raw_entropy = kOf411},
      {.name = "the entropy is of the tokens that top_k leaves", .logits = {0, 0, 0, 0},
       .ask = {.position = kAt003, .top_k = 2, .want_entropy = true}, .token = 0, .logprob = -ln4,
       .rank = 1, .entropy = ln2, .raw_entropy = ln4},
      {.name = "the entropy is of the tokens that top_p leaves", .logits = {0, 0, 0, ln2},
       .ask = {.position = kAt003, .top_p = 0.5f, .want_entropy = true}, .token = 0,
       .logprob = -1.6094379f, .rank = 2, .entropy = 0.6365142f, .raw_entropy = 1.3321790f},
      {.name = "the entropy is of the row after bias, penalties and mask", .logits = {0, 0, 0, 9},
       .ask = {.position = kAt088, .presence = 1, .want_rank = false, .want_entropy = true},
       .history = {0}, .bias = {{0, 1}, {1, ln3}}, .mask_words = {0b0011}, .token = 1,
       .logprob = -9.0003702f, .rank = 0, .entropy = kOf13, .raw_entropy = 0.0037010f},
      {.name = "a masked greedy row has the entropy 0", .logits = {0, ln3},
       .ask = {.position = kAt088, .temperature = 0, .want_entropy = true}, .mask_words = {0b01},
       .token = 0, .logprob = -ln4, .rank = 2, .entropy = 0, .raw_entropy = kOf13},
      {.name = "a certain token has the entropy 0", .logits = {-kInf, 5},
       .ask = {.position = kAt088, .want_entropy = true}, .token = 1, .logprob = 0, .rank = 1,
       .entropy = 0, .raw_entropy = 0},
      {.name = "n of plus inf have the entropy ln n", .logits = {kInf, 5, kInf, kInf},
       .ask = {.position = kAt088, .top_k = 2, .want_entropy = true}, .token = 2, .logprob = -ln3,
       .rank = 2, .entropy = ln2, .raw_entropy = ln3},
      {.name = "the entropy of logits far apart", .logits = {-3e38f, 3e38f},
       .ask = {.position = kAt003, .temperature = 1e38f, .want_entropy = true}, .token = 1,
       .logprob = 0, .rank = 1, .entropy = 0.0173113f, .raw_entropy = 0},
      {.name = "entropies of a row with every token masked", .logits = {0, ln3},
       .ask = {.position = kAt003, .want_entropy = true}, .mask_words = {0}, .token = -1,
       .logprob = -kInf, .rank = 0, .status = {RowCode::kEmptySupport, -1}, .entropy = kNan,
       .raw_entropy = kOf13},
      {.name = "entropies of a row of only minus inf", .logits = {-kInf, -kInf},
       .ask = {.position = kAt003, .want_entropy = true}, .token = -1, .logprob = -kInf, .rank = 0,
       .status = {RowCode::kEmptySupport, -1}, .entropy = kNan, .raw_entropy = kNan},
      {.name = "entropies of a row with a NaN", .logits = {0, kNan},
       .ask = {.position = kAt003, .want_entropy = true}, .token = -1, .logprob = -kInf, .rank = 0,
       .status = {RowCode::kNanLogit, 1}, .entropy = kNan, .raw_entropy = kNan},
      // clang-format on
  };
  return claims;
}

// A history whose first tokens are the prompt.
inline const std::vector<SampleClaim>& SamplePromptClaims() {
  static const float ln2 = std::log(2.0f);
  static const std::vector<int32_t> longest(kMaxHistory, 0);
  static const auto& claims = *new std::vector<SampleClaim>{
      // clang-format off
      // 2 - 0.5 - 0.25, 1 - 0.5 - 0.25, 0.
      {.name = "presence and frequency count what comes after the prompt", .logits = {2, 1, 0},
       .ask = {.position = kAt003, .presence = 0.25f, .frequency = 0.5f, .prompt_tokens = 2,
               .top_logprobs = 3, .processed = true},
       .history = {0, 0, 1, 0}, .token = 0, .logprob = -0.50342888f, .rank = 1,
       .top_ids = {0, 1, 2}, .top_logprobs = {-0.50342888f, -1.50342888f, -1.75342888f}},
      // 4 / 2, -1 * 2, untouched 0.
      {.name = "repetition counts the prompt, presence and frequency do not", .logits = {4, -1, 0},
       .ask = {.position = kAt003, .repetition = 2, .presence = 5, .frequency = 5,
               .prompt_tokens = 4, .top_logprobs = 3, .processed = true},
       .history = {1, 0, 0, 1}, .token = 0, .logprob = -0.14293163f, .rank = 1,
       .top_ids = {0, 2, 1}, .top_logprobs = {-0.14293163f, -2.1429316f, -4.1429316f}},
      // (-1 + 3) / 2 = 1
      {.name = "a bias of a token of the prompt comes before repetition", .logits = {-1, 1},
       .ask = {.position = kAt003, .repetition = 2, .presence = 9, .prompt_tokens = 1,
               .processed = true},
       .history = {0}, .bias = {{0, 3}}, .token = 0, .logprob = -ln2, .rank = 1},
      {.name = "a greedy row takes a token of the prompt", .logits = {2, 1},
       .ask = {.position = kAt003, .temperature = 0, .presence = 2, .prompt_tokens = 1},
       .history = {0}, .token = 0, .logprob = -0.31326169f, .rank = 1},
      {.name = "a greedy row leaves a token that is seen after the prompt as well",
       .logits = {2, 1},
       .ask = {.position = kAt003, .temperature = 0, .presence = 2, .prompt_tokens = 1},
       .history = {0, 0}, .token = 1, .logprob = -1.3132617f, .rank = 2},
      // 0 - 2^20 * 2^-20 = -1
      {.name = "the longest history may be one token", .logits = {0, 0},
       .ask = {.position = kAt003, .frequency = 0x1p-20f, .processed = true}, .history = longest,
       .token = 0, .logprob = -1.3132617f, .rank = 2},
      {.name = "all of the longest history but one may come after the prompt", .logits = {0, 0},
       .ask = {.position = kAt003, .frequency = 0x1p-20f, .prompt_tokens = 1, .processed = true},
       .history = longest, .token = 0, .logprob = -1.313261f, .rank = 2},
      {.name = "all of the longest history may be the prompt", .logits = {0, 0},
       .ask = {.position = kAt003, .frequency = 1, .prompt_tokens = kMaxHistory,
               .processed = true},
       .history = longest, .token = 0, .logprob = -ln2, .rank = 1},
      // 1.5 - 1 < 1
      {.name = "the longest history may be the greedy token", .logits = {1.5f, 1},
       .ask = {.position = kAt003, .temperature = 0, .frequency = 0x1p-20f}, .history = longest,
       .token = 1, .logprob = -0.97407698f, .rank = 2},
      {.name = "a greedy row counts the longest history after a prompt", .logits = {1.5f, 1},
       .ask = {.position = kAt003, .temperature = 0, .frequency = 0x1p-20f,
               .prompt_tokens = 1000},
       .history = longest, .token = 1, .logprob = -0.97407698f, .rank = 2},
      // clang-format on
  };
  return claims;
}

// What may be drawn.
inline const std::vector<SampleClaim>& SampleSupportClaims() {
  static const float ln2 = std::log(2.0f), ln3 = std::log(3.0f), ln4 = std::log(4.0f);
  static const auto& claims = *new std::vector<SampleClaim>{
      // clang-format off
      // 0.5, 0.25, 0.25
      {.name = "a support is what the filters leave, highest logit first", .logits = {0, ln2, 0},
       .ask = {.position = kAt003, .top_p = 0.6f, .processed = true, .want_support = 2},
       .token = 0, .logprob = -ln3, .rank = 2, .support_size = 2, .support_ids = {1, 0},
       .support_logprobs = {ln2 - ln3, -ln3}},
      {.name = "a support beyond its cap says its size", .logits = {0, 0, ln2, -kInf},
       .ask = {.position = kAt003, .processed = true, .want_support = 2}, .token = 0,
       .logprob = -ln4, .rank = 2, .support_size = 3, .support_ids = {2, 0},
       .support_logprobs = {-ln2, -ln4}},
      {.name = "after a support of fewer tokens than asked for come none", .logits = {0, 1, 0},
       .ask = {.position = kAt003, .top_k = 1, .processed = true, .want_support = 3}, .token = 1,
       .logprob = 0, .rank = 1, .support_size = 1, .support_ids = {1, -1, -1},
       .support_logprobs = {0, -kInf, -kInf}},
      {.name = "the support of a greedy row is its token", .logits = {1, 3, 3},
       .ask = {.temperature = 0, .processed = true, .want_support = 2}, .token = 1, .logprob = 0,
       .rank = 1, .support_size = 1, .support_ids = {1, -1}, .support_logprobs = {0, -kInf}},
      {.name = "a support has processed log-probabilities in a raw row too", .logits = {0, 0, 0, 0},
       .ask = {.position = kAt003, .temperature = 2, .top_k = 2, .want_support = 2}, .token = 0,
       .logprob = -ln4, .rank = 1, .support_size = 2, .support_ids = {0, 1},
       .support_logprobs = {-ln2, -ln2}},
      {.name = "a support is of the logits after bias and mask", .logits = {0, 0, 0},
       .ask = {.position = kAt088, .want_support = 3}, .bias = {{2, ln3}}, .mask_words = {0b110},
       .token = 2, .logprob = -ln3, .rank = 3, .support_size = 2, .support_ids = {2, 1, -1},
       .support_logprobs = {ln3 - ln4, -ln4, -kInf}},
      // Repetition only lowers logits.
      {.name = "a support is of the logits after penalties", .logits = {1, 1, 1, 1},
       .ask = {.position = kAt003, .top_k = 3, .presence = 1, .want_support = 3},
       .history = {0, 3}, .token = 0, .logprob = -ln4, .rank = 1, .support_size = 3,
       .support_ids = {1, 2, 0}, .support_logprobs = {-0.86199480f, -0.86199480f, -1.8619948f}},
      {.name = "the support of plus inf is all plus inf", .logits = {kInf, 5, kInf},
       .ask = {.position = kAt088, .want_support = 3}, .token = 2, .logprob = -ln2, .rank = 2,
       .support_size = 2, .support_ids = {0, 2, -1}, .support_logprobs = {-ln2, -ln2, -kInf}},
      {.name = "a support keeps ties by index", .logits = {2, 2, 2, 2, 2},
       .ask = {.position = kAt003, .top_k = 2, .processed = true, .want_support = 4}, .token = 0,
       .logprob = -ln2, .rank = 1, .support_size = 2, .support_ids = {0, 1, -1, -1},
       .support_logprobs = {-ln2, -ln2, -kInf, -kInf}},
      {.name = "a refused row has no support", .logits = {1, kNan},
       .ask = {.position = kAt003, .want_support = 2}, .token = -1, .logprob = -kInf, .rank = 0,
       .status = {RowCode::kNanLogit, 1}, .support_size = 0, .support_ids = {-1, -1},
       .support_logprobs = {-kInf, -kInf}},
      {.name = "a row with every token masked has a support of none", .logits = {1, 2},
       .ask = {.position = kAt003, .want_support = 1}, .mask_words = {0}, .token = -1,
       .logprob = -kInf, .rank = 0, .status = {RowCode::kEmptySupport, -1}, .support_size = 0,
       .support_ids = {-1}, .support_logprobs = {-kInf}},
      // clang-format on
  };
  return claims;
}

// Weights 4, 16, 1, 8, 2, 1 of 32, in an order that is not theirs.
inline std::vector<float> FilterCaseLogits() {
  const float ln2 = std::log(2.0f);
  return {2 * ln2, 4 * ln2, 0, 3 * ln2, ln2, 0};
}

// In units of ln 2 the surprises of FilterCaseLogits are 2, 0, 4, 1, 3, 4, and their mean 30/32.
// The coin at position 0 is 0.6055.
inline const std::vector<SampleClaim>& SampleChoiceClaims() {
  static const float ln2 = std::log(2.0f), ln4 = std::log(4.0f);
  static const auto& claims = *new std::vector<SampleClaim>{
      // clang-format off
      {.name = "typical_p keeps the token nearest to the entropy, not the most likely",
       .logits = FilterCaseLogits(),
       .ask = {.position = kAt003, .typical_p = 0.2f, .top_logprobs = 3, .processed = true},
       .token = 3, .logprob = 0, .rank = 2, .top_ids = {1, 3, 0},
       .top_logprobs = {-kInf, 0, -kInf}},
      {.name = "typical_p stops where it is reached exactly, at the lower index of equals",
       .logits = {0, 0, 0, 0},
       .ask = {.position = kAt088, .typical_p = 0.5f, .top_logprobs = 3, .processed = true},
       .token = 1, .logprob = -ln2, .rank = 2, .top_ids = {0, 1, 2},
       .top_logprobs = {-ln2, -ln2, -kInf}},
      {.name = "typical_p keeps at least one token", .logits = {0, 1},
       .ask = {.position = kAt003, .typical_p = 1e-45f, .processed = true}, .token = 1,
       .logprob = 0, .rank = 1},
      // Of 16 and 8 the mean is 1/3, so the first is nearer, and has 2/3.
      {.name = "typical_p is a share of what top_k left", .logits = FilterCaseLogits(),
       .ask = {.position = kAt088, .top_k = 2, .typical_p = 0.6f, .processed = true}, .token = 1,
       .logprob = 0, .rank = 1},
      {.name = "typical_p of more tokens than the kernel lists",
       .logits = std::vector<float>(200, 0.0f),
       .ask = {.position = kAt088, .typical_p = 0.5f, .processed = true}, .token = 88,
       .logprob = -std::log(100.0f), .rank = 89},
      {.name = "typical_p alone keeps nothing below 2^-44 of the maximum",
       .logits = {0, -30.4f, -30.6f, -40},
       .ask = {.position = kAt003, .typical_p = 0.99999994f, .top_logprobs = 4, .processed = true},
       .token = 0, .logprob = 0, .rank = 1, .top_ids = {0, 1, 2, 3},
       .top_logprobs = {0, -kInf, -kInf, -kInf}},
      {.name = "plus inf is certain with typical_p", .logits = {5, kInf, -kInf, kInf},
       .ask = {.position = kAt088, .typical_p = 0.5f, .processed = true}, .token = 1, .logprob = 0,
       .rank = 1},
      {.name = "plus inf is certain with xtc", .logits = {5, kInf, -kInf, kInf},
       .ask = {.position = kAt036, .xtc_threshold = 0.5f, .xtc_probability = 1, .processed = true},
       .token = 3, .logprob = 0, .rank = 2},
      {.name = "a greedy row takes the highest logit whatever its typical_p and xtc",
       .logits = {1, 3, 2},
       .ask = {.position = kAt088, .temperature = 0, .typical_p = 1e-3f, .xtc_threshold = 0,
               .xtc_probability = 1, .processed = true},
       .token = 1, .logprob = 0, .rank = 1},
      // It leaves 4, 0, 1, 8, 2, 1.
      {.name = "xtc removes the tokens from its threshold up except the last of them",
       .logits = FilterCaseLogits(),
       .ask = {.position = kAt088, .xtc_threshold = 0.2f, .xtc_probability = 1, .top_logprobs = 2,
               .processed = true},
       .token = 4, .logprob = -3 * ln2, .rank = 4, .top_ids = {1, 3},
       .top_logprobs = {-kInf, -ln2}},
      {.name = "xtc needs two tokens at its threshold", .logits = FilterCaseLogits(),
       .ask = {.position = kAt088, .xtc_threshold = 0.3f, .xtc_probability = 1, .processed = true},
       .token = 3, .logprob = -ln4, .rank = 2},
      {.name = "a threshold of xtc above one half removes nothing", .logits = {0, 0},
       .ask = {.position = kAt036, .xtc_threshold = 0.50001f, .xtc_probability = 1,
               .processed = true},
       .token = 0, .logprob = -ln2, .rank = 1},
      {.name = "xtc keeps the highest index of equals", .logits = {0, 0},
       .ask = {.position = kAt036, .xtc_threshold = 0.5f, .xtc_probability = 1, .processed = true},
       .token = 1, .logprob = 0, .rank = 2},
      {.name = "a threshold of xtc of 0 keeps the least likely token", .logits = {0, 1, 2},
       .ask = {.position = kAt088, .xtc_threshold = 0, .xtc_probability = 1, .processed = true},
       .token = 0, .logprob = 0, .rank = 3},
      {.name = "xtc acts where its coin is below its probability", .logits = {0, 0},
       .ask = {.position = kAt088, .xtc_threshold = 0.5f, .xtc_probability = 0.606f,
               .processed = true},
       .token = 1, .logprob = 0, .rank = 2},
      {.name = "xtc does nothing where its coin is not", .logits = {0, 0},
       .ask = {.position = kAt088, .xtc_threshold = 0.5f, .xtc_probability = 0.605f,
               .processed = true},
       .token = 1, .logprob = -ln2, .rank = 2},
      {.name = "xtc of more tokens than the kernel lists", .logits = std::vector<float>(200, 0.0f),
       .ask = {.position = kAt003, .xtc_threshold = 0.004f, .xtc_probability = 1,
               .processed = true},
       .token = 199, .logprob = 0, .rank = 200},
      // clang-format on
  };
  return claims;
}

// With seed 0 the draws at position 0 have the bits 0.8805, 0.9397, 0.7129, 0.0678, those at
// position 1 0.3621, 0.8507, 0.1352, 0.9178.
inline const std::vector<SampleClaim>& SampleDrawsClaims() {
  static const float ln2 = std::log(2.0f), ln3 = std::log(3.0f), ln4 = std::log(4.0f);
  static const auto& claims = *new std::vector<SampleClaim>{
      // clang-format off
      {.name = "one draw is the row's token", .logits = {5, 5},
       .ask = {.position = kAt088, .draws = 1}, .token = 1, .logprob = -ln2, .rank = 2,
       .draw_tokens = {1}, .draw_logprobs = {-ln2}},
      // Prefix sums 0.25, 0.5, 0.75, 1.
      {.name = "each draw has bits of its own", .logits = {1, 1, 1, 1},
       .ask = {.position = kAt088, .draws = 4}, .token = 3, .logprob = -ln4, .rank = 4,
       .draw_tokens = {3, 3, 2, 0}, .draw_logprobs = {-ln4, -ln4, -ln4, -ln4}},
      // 0.25 and 0.75, at temperature 2.
      {.name = "draws are at the temperature, and raw log-probabilities are not",
       .logits = {0, 2 * ln3},
       .ask = {.position = kAt036, .temperature = 2, .draws = 4}, .token = 1,
       .logprob = -0.10536052f, .rank = 1, .draw_tokens = {1, 1, 0, 1},
       .draw_logprobs = {-0.10536052f, -0.10536052f, -2.3025851f, -0.10536052f}},
      {.name = "tempered log-probabilities of draws", .logits = {0, 2 * ln3},
       .ask = {.position = kAt036, .temperature = 2, .tempered = true, .draws = 4}, .token = 1,
       .logprob = ln3 - ln4, .rank = 1, .draw_tokens = {1, 1, 0, 1},
       .draw_logprobs = {ln3 - ln4, ln3 - ln4, -ln4, ln3 - ln4}},
      // 2/3 and 1/3 of what top_k leaves.
      {.name = "draws are from what the filters leave", .logits = {ln2, 0, 0},
       .ask = {.position = kAt088, .top_k = 2, .processed = true, .draws = 4}, .token = 1,
       .logprob = -ln3, .rank = 2, .draw_tokens = {1, 1, 1, 0},
       .draw_logprobs = {-ln3, -ln3, -ln3, ln2 - ln3}},
      // 2^43 each of 200, of which typical_p keeps the first 100.
      {.name = "draws of more tokens than the kernel lists",
       .logits = std::vector<float>(200, 0.0f),
       .ask = {.position = kAt088, .typical_p = 0.5f, .processed = true, .draws = 4}, .token = 88,
       .logprob = -std::log(100.0f), .rank = 89, .draw_tokens = {88, 93, 71, 6},
       .draw_logprobs = std::vector<float>(4, -std::log(100.0f))},
      {.name = "draws from a whole row of several cells", .logits = std::vector<float>(5000, 3.0f),
       .ask = {.position = kAt036, .processed = true, .draws = 4}, .token = 1810,
       .logprob = -std::log(5000.0f), .rank = 1811, .draw_tokens = {1810, 4253, 675, 4589},
       .draw_logprobs = std::vector<float>(4, -std::log(5000.0f))},
      // The coin of the first draw, 0.6055, shows.
      {.name = "xtc's coin is that of the first draw", .logits = {0, 0},
       .ask = {.position = kAt088, .xtc_threshold = 0.5f, .xtc_probability = 0.606f,
               .processed = true, .draws = 4},
       .token = 1, .logprob = 0, .rank = 2, .draw_tokens = {1, 1, 1, 1},
       .draw_logprobs = {0, 0, 0, 0}},
      {.name = "draws are of the logits after bias, penalties and mask", .logits = {0, 0, 9, 0},
       .ask = {.position = kAt036, .presence = ln2, .processed = true, .draws = 4},
       .history = {0}, .bias = {{0, ln2}, {3, ln2}}, .mask_words = {0b1011}, .token = 1,
       .logprob = -ln4, .rank = 3, .draw_tokens = {1, 3, 0, 3},
       .draw_logprobs = {-ln4, -ln2, -ln4, -ln2}},
      {.name = "draws of a masked row without more to report", .logits = {7, 7, 7, 7},
       .ask = {.position = kAt036, .want_rank = false, .draws = 3}, .mask_words = {0b1010},
       .token = 1, .logprob = -ln4, .rank = 0, .draw_tokens = {1, 3, 1},
       .draw_logprobs = {-ln4, -ln4, -ln4}},
      {.name = "a greedy row repeats its token", .logits = {1, 3, 3},
       .ask = {.position = kAt088, .temperature = 0, .processed = true, .draws = 3}, .token = 1,
       .logprob = 0, .rank = 1, .draw_tokens = {1, 1, 1}, .draw_logprobs = {0, 0, 0}},
      {.name = "draws share plus inf", .logits = {kInf, 5, kInf},
       .ask = {.position = kAt036, .processed = true, .draws = 4}, .token = 0, .logprob = -ln2,
       .rank = 1, .draw_tokens = {0, 2, 0, 2}, .draw_logprobs = {-ln2, -ln2, -ln2, -ln2}},
      {.name = "a refused row has no draws", .logits = {1, kNan},
       .ask = {.position = kAt003, .draws = 2}, .token = -1, .logprob = -kInf, .rank = 0,
       .status = {RowCode::kNanLogit, 1}, .draw_tokens = {-1, -1}, .draw_logprobs = {-kInf, -kInf}},
      {.name = "a row with every token masked has no draws", .logits = {1, 2},
       .ask = {.position = kAt003, .draws = 1}, .mask_words = {0}, .token = -1, .logprob = -kInf,
       .rank = 0, .status = {RowCode::kEmptySupport, -1}, .draw_tokens = {-1},
       .draw_logprobs = {-kInf}},
      // clang-format on
  };
  return claims;
}

// The numbers u and the scores -ln(-ln u) of the first tokens by key 7, after no token and after
// token 0, to which the logits add:
//   none: 0.7863 0.6728 0.2742 0.1981, 1.43 0.93 -0.26 -0.48
//   0:    0.9757 0.9192 0.5692 0.9662, 3.71 2.47 0.57 3.37
//   1, 0: 0.3436 0.4950 0.0591 0.4609, -0.07 0.35 -1.04 0.26
//   0, 1: 0.5038 0.8660 0.1904 0.7827, 0.38 1.94 -0.51 1.41
inline const std::vector<SampleClaim>& SampleWatermarkClaims() {
  static const float ln2 = std::log(2.0f), ln3 = std::log(3.0f), ln4 = std::log(4.0f);
  static const auto& claims = *new std::vector<SampleClaim>{
      // clang-format off
      {.name = "of equals a watermark takes the token with the largest number",
       .logits = {1, 1, 1, 1}, .ask = {.position = kAt088, .watermark_width = 1}, .token = 0,
       .logprob = -ln4, .rank = 1},
      {.name = "a watermark of another key", .logits = {1, 1, 1, 1},
       .ask = {.position = kAt088, .watermark_width = 2, .watermark_key = 8}, .history = {0, 1},
       .token = 1, .logprob = -ln4, .rank = 2},
      {.name = "a watermark adds the logits to its scores", .logits = {0, 0.6f, 0, 1.8f},
       .ask = {.position = kAt003, .processed = true, .watermark_width = 1}, .token = 1,
       .logprob = -1.6896788f, .rank = 2},
      {.name = "a watermark is at the temperature", .logits = {0, 1.2f, 0, 3.6f},
       .ask = {.position = kAt003, .temperature = 2, .processed = true, .watermark_width = 1},
       .token = 1, .logprob = -1.6896788f, .rank = 2},
      {.name = "a watermark depends on the last token", .logits = {1, 1, 1, 1.5f},
       .ask = {.position = kAt003, .watermark_width = 1}, .history = {3, 1, 0}, .token = 3,
       .logprob = -1.0365922f, .rank = 1},
      {.name = "a watermark depends on the last tokens and on their order",
       .logits = {1, 1, 1, 1.2f}, .ask = {.position = kAt003, .watermark_width = 2},
       .history = {3, 1, 0}, .token = 3, .logprob = -1.2401675f, .rank = 1},
      {.name = "a watermark of fewer tokens than its width takes all", .logits = {1, 1, 1, 1.2f},
       .ask = {.position = kAt003, .watermark_width = 16}, .history = {0, 1}, .token = 1,
       .logprob = -1.4401675f, .rank = 3},
      {.name = "a watermark does not penalise its history, and penalties do", .logits = {1, 1, 1, 1},
       .ask = {.position = kAt003, .presence = 1, .processed = true, .watermark_width = 1},
       .history = {0}, .token = 3, .logprob = -1.2142833f, .rank = 3},
      {.name = "a watermark takes what the filters leave", .logits = {0, ln2, 0, 0},
       .ask = {.position = kAt003, .top_k = 1, .processed = true, .watermark_width = 1},
       .history = {0}, .token = 1, .logprob = 0, .rank = 1},
      // Token 46 has the largest u of the first 100 tokens, after no context.
      {.name = "a watermark of more tokens than the kernel lists",
       .logits = std::vector<float>(200, 0.0f),
       .ask = {.position = kAt088, .typical_p = 0.5f, .processed = true, .watermark_width = 1},
       .token = 46, .logprob = -std::log(100.0f), .rank = 47},
      {.name = "a watermark of a whole row of several cells",
       .logits = std::vector<float>(5000, 3.0f),
       .ask = {.position = kAt036, .processed = true, .watermark_width = 4}, .token = 3899,
       .logprob = -std::log(5000.0f), .rank = 3900},
      // The coin is 0.6055.
      {.name = "xtc before a watermark has its coin from the seed", .logits = {0, 0, -9},
       .ask = {.position = kAt088, .xtc_threshold = 0.4f, .xtc_probability = 0.606f,
               .processed = true, .watermark_width = 1},
       .token = 1, .logprob = -0.00012340218f, .rank = 2},
      {.name = "a masked row with a watermark and nothing else to report",
       .logits = {7, 7, 7, 7},
       .ask = {.position = kAt036, .want_rank = false, .watermark_width = 1},
       .mask_words = {0b1100}, .token = 2, .logprob = -ln4, .rank = 0},
      {.name = "one draw of a row with a watermark is its token", .logits = {0, 0},
       .ask = {.position = kAt088, .draws = 1, .watermark_width = 1}, .token = 0, .logprob = -ln2,
       .rank = 1, .draw_tokens = {0}, .draw_logprobs = {-ln2}},
      {.name = "a watermark among plus inf", .logits = {kInf, 9, kInf, kInf},
       .ask = {.position = kAt003, .watermark_width = 2}, .history = {0, 1}, .token = 3,
       .logprob = -ln3, .rank = 3},
      {.name = "a greedy row takes the highest logit whatever its watermark", .logits = {1, 1, 3, 1},
       .ask = {.position = kAt088, .temperature = 0, .processed = true, .watermark_width = 1},
       .token = 2, .logprob = 0, .rank = 1},
      {.name = "a refused row with a watermark", .logits = {1, kNan},
       .ask = {.position = kAt003, .watermark_width = 1}, .token = -1, .logprob = -kInf, .rank = 0,
       .status = {RowCode::kNanLogit, 1}},
      // clang-format on
  };
  return claims;
}

// Bias, penalties, masks, statuses, and where weights round to 0.
inline const std::vector<SampleClaim>& SampleEditClaims() {
  static const float ln2 = std::log(2.0f), ln3 = std::log(3.0f), ln4 = std::log(4.0f);
  static const auto& claims = *new std::vector<SampleClaim>{
      // clang-format off
      {.name = "bias adds to the logit", .logits = {0, 0},
       .ask = {.position = kAt003, .processed = true}, .bias = {{0, ln3}}, .token = 0,
       .logprob = ln3 - ln4, .rank = 1},
      {.name = "raw log-probabilities are those of the row as sent", .logits = {0, 0},
       .ask = {.position = kAt088, .temperature = 0.5f, .top_logprobs = 2}, .bias = {{1, 10}},
       .token = 1, .logprob = -ln2, .rank = 2, .top_ids = {0, 1}, .top_logprobs = {-ln2, -ln2}},
      {.name = "a ban wins over plus inf", .logits = {kInf, 0}, .ask = {.position = kAt003},
       .bias = {{0, -kInf}}, .token = 1, .logprob = -kInf, .rank = 2},
      {.name = "a bias of plus inf does not lift minus inf", .logits = {-kInf, 0},
       .ask = {.position = kAt003}, .bias = {{0, kInf}}, .token = 1, .logprob = 0, .rank = 1},
      // 4 / 2, -1 * 2, untouched 0.
      {.name = "repetition divides logits above zero and multiplies those below",
       .logits = {4, -1, 0},
       .ask = {.position = kAt003, .repetition = 2, .top_logprobs = 3, .processed = true},
       .history = {1, 0, 0, 1}, .token = 0, .logprob = -0.14293163f, .rank = 1,
       .top_ids = {0, 2, 1}, .top_logprobs = {-0.14293163f, -2.1429316f, -4.1429316f}},
      // 2 - 0.5 * 2 - 0.25, 1 - 0.5 - 0.25, 0.
      {.name = "frequency counts occurrences and presence does not", .logits = {2, 1, 0},
       .ask = {.position = kAt003, .presence = 0.25f, .frequency = 0.5f, .top_logprobs = 3,
         .processed = true},
       .history = {0, 1, 0}, .token = 0, .logprob = -0.73183757f, .rank = 1, .top_ids = {0, 1, 2},
       .top_logprobs = {-0.73183757f, -1.2318376f, -1.4818376f}},
      // (-1 + 3) / 2 = 1
      {.name = "bias comes before repetition", .logits = {-1, 1},
       .ask = {.position = kAt003, .repetition = 2, .top_logprobs = 1, .processed = true},
       .history = {0}, .bias = {{0, 3}}, .token = 0, .logprob = -ln2, .rank = 1, .top_ids = {0},
       .top_logprobs = {-ln2}},
      {.name = "the mask allows tokens whose bit is one", .logits = {9, 0, 9, 0},
       .ask = {.position = kAt088, .processed = true}, .mask_words = {0b1010}, .token = 3,
       .logprob = -ln2, .rank = 2},
      {.name = "a bias does not lift the mask", .logits = {0, 0}, .ask = {.position = kAt003},
       .bias = {{0, kInf}}, .mask_words = {0b10}, .token = 1, .logprob = -ln2, .rank = 2},
      {.name = "a row that does not want its rank gets 0", .logits = {5, 5},
       .ask = {.position = kAt088, .want_rank = false}, .token = 1, .logprob = -ln2, .rank = 0},
      {.name = "top tokens bring no rank that is not wanted", .logits = {5, 5},
       .ask = {.position = kAt088, .top_logprobs = 2, .want_rank = false}, .token = 1,
       .logprob = -ln2, .rank = 0, .top_ids = {0, 1}, .top_logprobs = {-ln2, -ln2}},
      {.name = "an edited row that does not want its rank gets 0", .logits = {5, 4},
       .ask = {.position = kAt088, .want_rank = false}, .bias = {{1, 1}}, .token = 1,
       .logprob = -1.3132617f, .rank = 0},
      {.name = "a row with every token masked has no support", .logits = {1, 2},
       .ask = {.position = kAt003, .top_logprobs = 1}, .mask_words = {0}, .token = -1,
       .logprob = -kInf, .rank = 0, .top_ids = {-1}, .top_logprobs = {-kInf},
       .status = {RowCode::kEmptySupport, -1}},
      {.name = "a row of only minus inf has no support", .logits = {-kInf, -kInf},
       .ask = {.position = kAt003, .temperature = 0}, .token = -1, .logprob = -kInf, .rank = 0,
       .status = {RowCode::kEmptySupport, -1}},
      // Weights below 2^-44 round to 0.
      {.name = "a row with top_k keeps nothing below 2^-44 of its maximum",
       .logits = {0, -30.4f, -30.6f, -40},
       .ask = {.position = kAt003, .top_k = 3, .top_logprobs = 4, .processed = true}, .token = 0,
       .logprob = 0, .rank = 1, .top_ids = {0, 1, 2, 3}, .top_logprobs = {0, -30.4f, -kInf, -kInf}},
      {.name = "a row with min_p keeps nothing below 2^-44 of its maximum",
       .logits = {0, -30.4f, -30.6f, -40},
       .ask = {.position = kAt003, .min_p = 1e-20f, .top_logprobs = 4, .processed = true},
       .token = 0, .logprob = 0, .rank = 1, .top_ids = {0, 1, 2, 3},
       .top_logprobs = {0, -30.4f, -kInf, -kInf}},
      // At temperature 0.1 too, and with top_p.
      {.name = "a row with every filter keeps nothing below 2^-44 of its maximum",
       .logits = {0, 0, -3.06f, -4},
       .ask = {.position = kAt069, .temperature = 0.1f, .top_k = 3, .top_p = 0.99999994f,
               .min_p = 1e-30f, .top_logprobs = 3, .processed = true},
       .token = 1, .logprob = -ln2, .rank = 2, .top_ids = {0, 1, 2},
       .top_logprobs = {-ln2, -ln2, -kInf}},
      {.name = "an unfiltered row keeps every token above minus inf", .logits = {0, -40, -kInf},
       .ask = {.position = kAt003, .top_logprobs = 3, .processed = true}, .token = 0, .logprob = 0,
       .rank = 1, .top_ids = {0, 1, 2}, .top_logprobs = {0, -40, -kInf}},
      // 2^-118 apart: at temperature 2^-118 that is 1.
      {.name = "a temperature below 2^-118 acts as 2^-118", .logits = {0x1p-118f, 0},
       .ask = {.position = kAt088, .temperature = 0x1p-130f, .top_logprobs = 2, .processed = true},
       .token = 1, .logprob = -1.3132617f, .rank = 2, .top_ids = {0, 1},
       .top_logprobs = {-0.31326169f, -1.3132617f}},
      // exp(-1) is 0.37.
      {.name = "a temperature below 2^-118 acts as 2^-118 in a filtered row",
       .logits = {0x1p-118f, 0},
       .ask = {.position = kAt088, .temperature = 0x1p-130f, .min_p = 0.3f, .top_logprobs = 2,
               .processed = true},
       .token = 1, .logprob = -1.3132617f, .rank = 2, .top_ids = {0, 1},
       .top_logprobs = {-0.31326169f, -1.3132617f}},
      {.name = "the status names the lowest NaN", .logits = {1, kNan, kNan},
       .ask = {.position = kAt003}, .token = -1, .logprob = -kInf, .rank = 0,
       .status = {RowCode::kNanLogit, 1}},
      {.name = "a masked NaN still makes its row faulty", .logits = {1, kNan},
       .ask = {.position = kAt003}, .mask_words = {0b01}, .token = -1, .logprob = -kInf, .rank = 0,
       .status = {RowCode::kNanLogit, 1}},
      // clang-format on
  };
  return claims;
}

// "" where the backend keeps the claim, else what it did instead.
inline std::string BrokenClaim(OpRunner& runner, const SampleClaim& claim) {
  const auto got = runner.Sample(TensorOf(DType::kF32, 1, claim.logits),
                                 {.rows = {RowOf(claim)},
                                  .history = claim.history,
                                  .bias = claim.bias,
                                  .mask_words = claim.mask_words,
                                  .top_entries = claim.ask.top_logprobs,
                                  .support_entries = claim.ask.want_support,
                                  .draw_entries = claim.ask.draws});
  if (!got.ok()) return got.status().ToString();
  const auto near = [](float a, float b) {
    return a == b || std::fabs(a - b) <= 2e-6f * (1 + std::fabs(b));
  };
  if (std::string status = DescribeStatus(got->status[0], claim.status); !status.empty()) {
    return status;
  }
  if (got->tokens[0] != claim.token || got->ranks[0] != claim.rank ||
      !near(got->logprobs[0], claim.logprob)) {
    return absl::StrFormat("got token %d rank %d logprob %.9g, want %d %d %.9g", got->tokens[0],
                           got->ranks[0], got->logprobs[0], claim.token, claim.rank, claim.logprob);
  }
  const auto same = [&](float a, float b) { return std::isnan(b) ? std::isnan(a) : near(a, b); };
  if (!same(got->entropies[0], claim.entropy) || !same(got->raw_entropies[0], claim.raw_entropy)) {
    return absl::StrFormat("got entropies %.9g and %.9g, want %.9g and %.9g", got->entropies[0],
                           got->raw_entropies[0], claim.entropy, claim.raw_entropy);
  }
  for (size_t i = 0; i < claim.top_ids.size(); ++i) {
    if (got->top_ids[i] == claim.top_ids[i] && near(got->top_logprobs[i], claim.top_logprobs[i])) {
      continue;
    }
    return absl::StrFormat("top %d: got %d %.9g, want %d %.9g", i, got->top_ids[i],
                           got->top_logprobs[i], claim.top_ids[i], claim.top_logprobs[i]);
  }
  if (got->support_size[0] != claim.support_size) {
    return absl::StrFormat("support size: got %d, want %d", got->support_size[0],
                           claim.support_size);
  }
  for (size_t i = 0; i < claim.support_ids.size(); ++i) {
    if (got->support_ids[i] == claim.support_ids[i] &&
        near(got->support_logprobs[i], claim.support_logprobs[i])) {
      continue;
    }
    return absl::StrFormat("support %d: got %d %.9g, want %d %.9g", i, got->support_ids[i],
                           got->support_logprobs[i], claim.support_ids[i],
                           claim.support_logprobs[i]);
  }
  for (size_t i = 0; i < claim.draw_tokens.size(); ++i) {
    if (got->draw_tokens[i] == claim.draw_tokens[i] &&
        near(got->draw_logprobs[i], claim.draw_logprobs[i])) {
      continue;
    }
    return absl::StrFormat("draw %d: got %d %.9g, want %d %.9g", i, got->draw_tokens[i],
                           got->draw_logprobs[i], claim.draw_tokens[i], claim.draw_logprobs[i]);
  }
  return "";
}

// ---- Distributions by hand

// The weights of FilterCaseLogits that a filter leaves.
struct FilterCase {
  const char* name;
  void (*change)(SampleRow&);
  std::vector<double> weights;
};

inline std::vector<FilterCase> FilterCases() {
  return {
      {"unfiltered", [](SampleRow&) {}, {4, 16, 1, 8, 2, 1}},
      {"top_k", [](SampleRow& row) { row.top_k = 5; }, {4, 16, 1, 8, 2, 0}},
      {"top_p", [](SampleRow& row) { row.top_p = 0.8f; }, {4, 16, 0, 8, 0, 0}},
      {"min_p", [](SampleRow& row) { row.min_p = 0.12f; }, {4, 16, 0, 8, 2, 0}},
      // In units of ln 2: mean 5/3, sigma 1.49; 4 - 1.5 * 1.49 = 1.76.
      {"top_n_sigma", [](SampleRow& row) { row.top_n_sigma = 1.5f; }, {4, 16, 0, 8, 0, 0}},
      {"temperature", [](SampleRow& row) { row.temperature = 0.5f; }, {16, 256, 1, 64, 4, 1}},
      // The surprises' mean is 0.94 ln 2: first comes 8, then 16.
      {"typical_p", [](SampleRow& row) { row.typical_p = 0.5f; }, {0, 16, 0, 8, 0, 0}},
      // Square roots; the surprises, halved, have the mean 0.78 ln 2: 4, 8, 2, 16 is their order.
      {"typical_p without the most likely",
       [](SampleRow& row) { row.temperature = 2, row.typical_p = 0.45f; },
       {2, 0, 0, std::sqrt(8.0), std::sqrt(2.0), 0}},
      {"xtc",
       [](SampleRow& row) { row.xtc_threshold = 0.2f, row.xtc_probability = 1; },
       {4, 0, 1, 8, 2, 1}},
      // Half of {4, 16, 1, 8, 2, 1} / 32 and of {4, 0, 1, 8, 2, 1} / 16.
      {"xtc half the time",
       [](SampleRow& row) { row.xtc_threshold = 0.2f, row.xtc_probability = 0.5f; },
       {12, 16, 3, 24, 6, 3}},
      // 2 and sqrt(8) reach it.
      {"xtc of what typical_p left",
       [](SampleRow& row) {
         row.temperature = 2;
         row.typical_p = 0.45f;
         row.xtc_threshold = 0.3f;
         row.xtc_probability = 1;
       },
       {2, 0, 0, 0, std::sqrt(2.0), 0}},
      // Weights 16, 8, 4, 2: the first two have 0.8.
      {"all",
       [](SampleRow& row) {
         row.temperature = 2;
         row.min_p = 0.3f;  // square roots: 4, 2.83, 2, 1.41 of 4
         row.top_k = 3;
         row.top_p = 0.7f;  // of 4, 2.83, 2: two have 0.774
       },
       {0, std::sqrt(16.0), 0, std::sqrt(8.0), 0, 0}},
  };
}

// ---- Parity with double precision

struct SampleCase {
  DType dtype = DType::kF32;
  int64_t rows = 1;
  int64_t vocab = 1;
  int64_t stride_extra = 0;
  int64_t offset = 0;
  Fill fill = Fill::kNormal;
  uint64_t seed = 1;
};

inline std::string Describe(const SampleCase& c) {
  return absl::StrFormat("sample [%d, %d] %s fill=%s stride=+%d offset=%d seed=%d", c.rows, c.vocab,
                         Name(c.dtype), Name(c.fill), c.stride_extra, c.offset, c.seed);
}

// The parameters that are not at their defaults, and the lists.
inline std::string Describe(const SampleRow& row) {
  std::string text;
  for (const RowParam<SampleRow>& param : kSampleParams) {
    const auto value = std::visit(
        [&](const auto member) { return static_cast<double>(row.*member); }, param.member);
    if (value == param.default_value) continue;
    absl::StrAppendFormat(&text, "%s=%.9g ", param.name, value);
  }
  absl::StrAppendFormat(&text, "history=%d bias=%d mask=%d", row.history_count, row.bias_count,
                        row.first_mask_word >= 0);
  return text;
}

// Appends a row with a random mix of parameters, and an unused entry after those of its answers.
inline void AddRandomRow(SampleBatch& batch, int64_t vocab, std::mt19937_64& random) {
  const auto one_in = [&](int n) { return random() % n == 0; };
  const auto id = [&] { return static_cast<int32_t>(random() % vocab); };
  SampleRow row = PlainRow();
  row.seed = random();
  row.position = random() >> (random() % 64);
  row.want_rank = !one_in(4);
  static constexpr float kTemperatures[] = {0, 1, 1, 0.7f, 1.3f, 0.05f, 1e-4f, 1e4f};
  row.temperature = kTemperatures[random() % 8];
  if (one_in(2)) {
    const int64_t most = one_in(3) ? vocab : std::min<int64_t>(vocab, 100);
    row.top_k = static_cast<int32_t>(random() % (most + 3)) - 1;  // -1..most + 1
  }
  static constexpr float kTopPs[] = {0.9f, 0.5f, 0.99f, 0.1f, 1e-6f, 0.9999999f};
  if (one_in(2)) row.top_p = kTopPs[random() % 6];
  static constexpr float kSigmas[] = {1, 0.5f, 2, 3, 1e-3f, 1e30f};
  if (row.seed % 4 == 0) row.top_n_sigma = kSigmas[row.seed / 4 % 6];
  static constexpr float kMinPs[] = {0.05f, 0.5f, 1e-3f, 1.0f, 1e-20f};
  if (one_in(3)) row.min_p = kMinPs[random() % 5];
  static constexpr float kTypicals[] = {0.9f, 0.5f, 0.2f, 0.99f, 1e-6f};
  if ((row.seed >> 8) % 5 == 0) row.typical_p = kTypicals[(row.seed >> 16) % 5];
  static constexpr float kThresholds[] = {0.1f, 0.01f, 0.3f, 1e-4f, 0, 0.6f};
  if ((row.seed >> 24) % 5 == 0) {
    row.xtc_threshold = kThresholds[(row.seed >> 32) % 6];
    row.xtc_probability = (row.seed >> 40) % 2 == 0 ? 1 : 0.7f;
  }
  if (one_in(3)) {
    row.repetition = one_in(2) ? 1.2f : 0.7f;
    row.presence = one_in(2) ? 0.6f : 0;
    row.frequency = one_in(2) ? -0.3f : 0.1f;
    row.first_history = static_cast<int64_t>(batch.history.size());
    const uint64_t most = vocab > 4096 && one_in(3) ? 20000 : 300;
    const bool crowded = vocab > 20000 && one_in(2);  // all of them in one cell
    row.history_count = static_cast<int32_t>(random() % most);
    const int32_t favourite = id();
    for (int32_t i = 0; i < row.history_count; ++i) {
      batch.history.push_back(one_in(3) ? favourite
                              : crowded ? static_cast<int32_t>(15 * 1024 + random() % 1024)
                                        : id());
    }
    if (row.seed / 64 % 2 == 0)
      row.prompt_tokens = static_cast<int32_t>(row.seed / 128 % (row.history_count + 1));
  }
  if (one_in(3)) {
    row.first_bias = static_cast<int64_t>(batch.bias.size());
    row.bias_count = static_cast<int32_t>(std::min<int64_t>(vocab, 1 + random() % 20));
    const int32_t first = id();
    static constexpr float kBiases[] = {5, -5, 0.1f, -kInf, 100, -100};
    for (int32_t i = 0; i < row.bias_count; ++i) {
      batch.bias.push_back(
          {static_cast<int32_t>((first + 7 * int64_t{i}) % vocab), kBiases[random() % 6]});
      // 7 i meets itself where 7 divides the vocabulary.
      if (vocab % 7 == 0) batch.bias.back().id = static_cast<int32_t>((first + i) % vocab);
    }
  }
  if (one_in(3)) {
    row.first_mask_word = static_cast<int64_t>(batch.mask_words.size());
    const int sparse = static_cast<int>(random() % 3);
    for (int64_t w = 0; w < MaskWords(vocab); ++w) {
      uint64_t bits = random();
      if (sparse > 0) bits &= random();
      if (sparse > 1) bits &= random() & random() & random();
      batch.mask_words.push_back(static_cast<uint32_t>(bits));
    }
  }
  row.logprob_mode = one_in(2) ? LogprobMode::kRaw : LogprobMode::kProcessed;
  if (row.seed / 1024 % 4 == 0) row.logprob_mode = LogprobMode::kTempered;
  row.want_entropy = row.seed / 4096 % 4 == 0;
  if (one_in(2)) {
    const int64_t most = row.seed / 16384 % 4 == 0 ? kMaxTopLogprobs : 128;
    row.top_logprobs = static_cast<int32_t>(random() % (std::min(most, vocab) + 1));
  }
  row.first_top_entry = batch.top_entries;
  batch.top_entries += row.top_logprobs + 1;
  if (one_in(2)) {
    row.first_extra = static_cast<int64_t>(batch.extra_ids.size());
    row.extra_count = static_cast<int32_t>(random() % 9);
    for (int32_t i = 0; i < row.extra_count; ++i) batch.extra_ids.push_back(id());
  }
  row.first_extra_entry = batch.extra_entries;
  batch.extra_entries += row.extra_count + 1;
  if (row.seed / 32 % 3 == 0) {
    const int64_t most = std::min<int64_t>(row.seed / 128 % 2 == 0 ? kMaxSupport : 20, vocab);
    row.want_support = static_cast<int32_t>(row.seed / 256 % static_cast<uint64_t>(most) + 1);
  }
  row.first_support_entry = batch.support_entries;
  batch.support_entries += row.want_support + 1;
  if (row.seed / 512 % 4 == 0)
    row.draws = static_cast<int32_t>(row.seed / 2048 % 5 == 0 ? kMaxDraws : row.seed / 8192 % 6);
  if (row.seed / 64 % 5 == 0) {
    row.watermark_width = static_cast<int32_t>(row.seed / 1024 % (kMaxWatermarkWidth + 1));
    row.watermark_key = row.seed / 3;
    row.draws = std::min(row.draws, 1);
    if (row.history_count == 0) {  // no penalty is on
      row.first_history = static_cast<int64_t>(batch.history.size());
      row.history_count = static_cast<int32_t>(row.seed / 32768 % 20);
      for (int32_t i = 0; i < row.history_count; ++i)
        batch.history.push_back(
            static_cast<int32_t>((row.seed >> i) % static_cast<uint64_t>(vocab)));
    }
  }
  row.first_draw_entry = batch.draw_entries;
  batch.draw_entries += row.draws + 1;
  if (one_in(10)) {
    row.active = 0;
    row.temperature = -1;  // a skipped row's parameters are not looked at
  }
  batch.rows.push_back(row);
}

// "" where every row agrees with the reference and nothing else was written.
inline std::string FirstWrongRow(OpRunner& runner, const SampleCase& c, const HostTensor& tensor,
                                 const SampleBatch& batch) {
  auto got = runner.Sample(tensor, batch);
  if (!got.ok()) return absl::StrFormat("%s: %s", Describe(c), got.status().ToString());
  for (int64_t r = 0; r < c.rows; ++r) {
    const SampleRow& row = batch.rows[r];
    std::string difference;
    const bool skipped = row.active == 0;
    if (got->top_ids[row.first_top_entry + row.top_logprobs] != kUnwrittenIndex ||
        got->extra_logprobs[row.first_extra_entry + row.extra_count] != kUnwrittenFloat ||
        (batch.support_entries > 0 &&
         got->support_ids[row.first_support_entry + row.want_support] != kUnwrittenIndex) ||
        (batch.draw_entries > 0 &&
         got->draw_tokens[row.first_draw_entry + row.draws] != kUnwrittenIndex)) {
      difference = "wrote after its entries";
    } else if (skipped) {
      if (got->tokens[r] != kUnwrittenIndex) difference = "wrote for a skipped row";
    } else {
      difference = ReferenceSample(RowOf(tensor, r), row, batch).Difference(*got, r, batch);
    }
    if (!difference.empty()) {
      return absl::StrFormat("%s: row %d (%s): %s", Describe(c), r, Describe(row), difference);
    }
  }
  return "";
}

inline std::string FirstDifference(OpRunner& runner, const SampleCase& c) {
  HostTensor tensor(c.dtype, c.rows, c.vocab, c.vocab + c.stride_extra, c.offset);
  SampleBatch batch;
  std::mt19937_64 random(c.seed);
  for (int64_t r = 0; r < c.rows; ++r) {
    FillRow(tensor, r, c.fill, c.seed);
    AddRandomRow(batch, c.vocab, random);
  }
  return FirstWrongRow(runner, c, tensor, batch);
}

// Every type and kind of row at lengths around the cells' borders; parameters are random in each.
inline std::vector<SampleCase> SampleCases() {
  struct Shape {
    int64_t vocab, rows;
  };
  static constexpr Shape kShapes[] = {{1, 20},    {2, 40},    {7, 60},    {31, 60},
                                      {33, 60},   {1000, 30}, {1024, 30}, {1025, 30},
                                      {4097, 20}, {32000, 8}, {50257, 6}};
  std::vector<SampleCase> cases;
  uint64_t n = 0;
  for (const Shape& shape : kShapes) {
    for (DType dtype : kAllDTypes) {
      for (Fill fill : kAllFills) {
        ++n;
        cases.push_back({.dtype = dtype,
                         .rows = shape.rows,
                         .vocab = shape.vocab,
                         .stride_extra = kStrides[n % 5],
                         .offset = kOffsets[n % 7],
                         .fill = fill,
                         .seed = n});
      }
    }
  }
  cases.push_back({.rows = 12, .vocab = 131072, .seed = ++n});
  cases.push_back({.rows = 6, .vocab = 131072, .fill = Fill::kUniform, .seed = ++n});
  cases.push_back({.dtype = DType::kBF16, .rows = 3, .vocab = kMaxVocab, .seed = ++n});
  return cases;
}

// ---- Borders

// A row whose draws come next to borders. Rounding errors of its many tokens average out, so that a
// border moves far less than by kernels/sample.h's bound: the row says by how much.
struct BorderCase {
  const char* name;
  Fill fill;
  float temperature;
  int32_t top_k;  // 0: unfiltered
  double moved;   // most, as a share of the mass
};

inline std::vector<BorderCase> BorderCases() {
  return {{"equal tokens are exact", Fill::kAllEqual, 1, 0, 1e-13},
          {"equal tokens are exact with top_k", Fill::kAllEqual, 1, 75000, 1e-11},
          {"uniform", Fill::kUniform, 1, 0, 5e-8},
          {"uniform, high temperature", Fill::kUniform, 30, 0, 5e-8},
          {"uniform with top_k", Fill::kUniform, 1, 75000, 1e-8},
          {"normal", Fill::kNormal, 1, 0, 2e-7},
          {"normal, high temperature", Fill::kNormal, 5, 0, 5e-8},
          {"normal with top_k", Fill::kNormal, 1, 75000, 1e-7}};
}

inline constexpr int64_t kBorderVocab = 150000;

// Among many positions, those whose bits point next to a border, but further from it than c.moved:
// there the token must be the exact one. "" where it is.
inline std::string MovedBorder(OpRunner& runner, const BorderCase& c) {
  struct Draw {
    double distance;
    uint64_t position;
    int32_t token;
  };
  HostTensor row(DType::kF32, 1, kBorderVocab, kBorderVocab, 0);
  FillRow(row, 0, c.fill, /*seed=*/3);
  SampleRow ask = PlainRow();
  ask.temperature = c.temperature;
  ask.top_k = c.top_k;
  const ReferenceSample reference(RowOf(row, 0), ask, SampleBatch());
  std::vector<double> prefix = reference.Probabilities();
  std::partial_sum(prefix.begin(), prefix.end(), prefix.begin());
  std::vector<Draw> draws;
  for (uint64_t position = 0; position < 1 << 18; ++position) {
    const double reach = std::ldexp(static_cast<double>(UniformBits(ask.seed, position)), -64);
    const auto above = std::upper_bound(prefix.begin(), prefix.end(), reach);
    if (above == prefix.begin() || above == prefix.end()) continue;
    const double distance = std::min(*above - reach, reach - *(above - 1));
    if (distance <= c.moved) continue;
    draws.push_back({distance, position, static_cast<int32_t>(above - prefix.begin())});
  }
  constexpr int64_t kNearest = 24;
  std::nth_element(draws.begin(), draws.begin() + kNearest, draws.end(),
                   [](const Draw& a, const Draw& b) { return a.distance < b.distance; });
  HostTensor tensor(DType::kF32, kNearest, kBorderVocab, kBorderVocab, 0);
  SampleBatch batch;
  for (int64_t r = 0; r < kNearest; ++r) {
    for (int64_t i = 0; i < kBorderVocab; ++i) tensor.Set(r, i, row.At(0, i));
    batch.rows.push_back(ask);
    batch.rows.back().position = draws[r].position;
  }
  auto got = runner.Sample(tensor, batch);
  if (!got.ok()) return got.status().ToString();
  for (int64_t r = 0; r < kNearest; ++r) {
    if (got->tokens[r] == draws[r].token) continue;
    return absl::StrFormat("%s: position %d is %g from a border: got token %d, want %d", c.name,
                           draws[r].position, draws[r].distance, got->tokens[r], draws[r].token);
  }
  return "";
}

// The same for the last token that top_p keeps: its whole and its prefixes are sums of two kinds.
inline std::string MovedNucleus(OpRunner& runner, const Fill& fill) {
  constexpr double moved = 5e-7;  // at most, as a share of the mass
  constexpr int64_t kRows = 24;
  HostTensor row(DType::kF32, 1, kBorderVocab, kBorderVocab, 0);
  FillRow(row, 0, fill, /*seed=*/3);
  const ReferenceSample reference(RowOf(row, 0), PlainRow(), SampleBatch());
  const std::vector<double> p = reference.Probabilities();
  const std::vector<int32_t>& order = reference.processed().order;
  HostTensor tensor(DType::kF32, kRows, kBorderVocab, kBorderVocab, 0);
  SampleBatch batch;
  std::vector<int64_t> kept;  // of each row, exactly
  double mass = 0;
  for (int64_t n = 1; static_cast<int64_t>(batch.rows.size()) < kRows; ++n) {
    mass += p[order[n - 1]];
    if (mass < (batch.rows.size() + 1) / (kRows + 2.0)) continue;
    const int64_t r = static_cast<int64_t>(batch.rows.size());
    const bool above = r % 2 == 0;  // the border, so that one token more is needed
    for (int64_t i = 0; i < kBorderVocab; ++i) tensor.Set(r, i, row.At(0, i));
    SampleRow ask = PlainRow();
    ask.logprob_mode = LogprobMode::kProcessed;
    ask.top_p = static_cast<float>(above ? mass + moved : mass - moved);
    while (std::fabs(ask.top_p - mass) <= moved) {
      ask.top_p = std::nextafter(ask.top_p, above ? 1.0f : 0.0f);
    }
    kept.push_back(above ? n + 1 : n);
    ask.first_extra = static_cast<int64_t>(batch.extra_ids.size());
    ask.extra_count = 2;
    ask.first_extra_entry = batch.extra_entries;
    batch.extra_entries += 2;
    batch.extra_ids.push_back(order[kept[r] - 1]);
    batch.extra_ids.push_back(order[kept[r]]);
    batch.rows.push_back(ask);
  }
  auto got = runner.Sample(tensor, batch);
  if (!got.ok()) return got.status().ToString();
  for (int64_t r = 0; r < kRows; ++r) {
    if (got->extra_logprobs[2 * r] > -kInf && got->extra_logprobs[2 * r + 1] == -kInf) continue;
    return absl::StrFormat("%s: top_p %.9g: %s than the %d tokens that reach it", Name(fill),
                           batch.rows[r].top_p,
                           got->extra_logprobs[2 * r] > -kInf ? "more" : "fewer", kept[r]);
  }
  return "";
}

inline std::vector<Fill> NucleusFills() { return {Fill::kUniform, Fill::kNormal}; }

// ---- Many top tokens

struct ManyTopsCase {
  const char* name;
  Fill fill;
  DType dtype;
  int64_t vocab;
};

inline std::vector<ManyTopsCase> ManyTopsCases() {
  return {{"one more than a list", Fill::kNormal, DType::kF32, 129},
          {"all of a short row", Fill::kWithPlusInf, DType::kF16, 1024},
          {"equal logits", Fill::kAllEqual, DType::kF32, 5000},
          {"ties", Fill::kManyTies, DType::kBF16, 40000},
          {"a long row", Fill::kNormal, DType::kF32, 131072}};
}

// Rows with and without edits and filters that want more top tokens than the kernel lists, and one
// that does not. "" where all agree with double precision.
inline std::string WrongManyTops(OpRunner& runner, const ManyTopsCase& c) {
  for (const auto& [first, rows] : {std::pair(0, 40), {0, 1}, {6, 1}, {9, 1}, {10, 1}}) {
    const SampleCase shape{
        .dtype = c.dtype, .rows = rows, .vocab = c.vocab, .fill = c.fill, .seed = 5};
    HostTensor tensor(c.dtype, rows, c.vocab, c.vocab, 0);
    SampleBatch batch;
    batch.history = {1, 7, 7, 100};
    batch.bias = {{3, 2.0f}, {99, -kInf}};
    for (int64_t r = first; r < first + rows; ++r) {
      FillRow(tensor, r - first, c.fill, shape.seed);
      SampleRow row = PlainRow();
      row.seed = shape.seed;
      row.position = static_cast<uint64_t>(r);
      row.temperature = r % 5 == 3 ? 0.0f : r % 5 == 4 ? 0.7f : 1.0f;
      row.top_k = r % 2 == 1 ? 50 : 0;
      row.top_p = r % 7 == 2 ? 0.8f : 1.0f;
      row.logprob_mode = static_cast<LogprobMode>(r % 3);
      if (r % 4 == 1) {  // its edits only lower logits
        row.history_count = static_cast<int32_t>(batch.history.size());
        row.presence = 0.5f;
      } else if (r % 4 == 2) {
        row.bias_count = static_cast<int32_t>(batch.bias.size());
      }
      row.top_logprobs =
          r == 1 ? 128 : static_cast<int32_t>(std::min<int64_t>(kMaxTopLogprobs - r / 8, c.vocab));
      row.first_top_entry = batch.top_entries;
      batch.top_entries += row.top_logprobs + 1;
      row.first_extra_entry = batch.extra_entries++;
      batch.rows.push_back(row);
    }
    if (std::string wrong = FirstWrongRow(runner, shape, tensor, batch); !wrong.empty())
      return absl::StrFormat("%s: %s", c.name, wrong);
  }
  return "";
}

// ---- Bits that depend only on the row

// The bits of one row's answer.
inline std::string SampleBits(const SampleAnswer& got, const SampleRow& row, int64_t r) {
  std::string bits;
  const auto add = [&bits](const auto* values, int64_t count) {
    bits.append(reinterpret_cast<const char*>(values), count * sizeof(*values));
  };
  add(&got.tokens[r], 1);
  add(&got.logprobs[r], 1);
  add(&got.ranks[r], 1);
  add(&got.logsumexp[r], 1);
  add(&got.status[r], 1);
  add(&got.entropies[r], 1);
  add(&got.raw_entropies[r], 1);
  add(got.top_ids.data() + row.first_top_entry, row.top_logprobs);
  add(got.top_logprobs.data() + row.first_top_entry, row.top_logprobs);
  add(got.extra_logprobs.data() + row.first_extra_entry, row.extra_count);
  add(&got.support_size[r], 1);
  add(got.support_ids.data() + row.first_support_entry, row.want_support);
  add(got.support_logprobs.data() + row.first_support_entry, row.want_support);
  add(got.draw_tokens.data() + row.first_draw_entry, row.draws);
  add(got.draw_logprobs.data() + row.first_draw_entry, row.draws);
  return bits;
}

// "" where a row has the same bits in a call of its own and as the last row of every batch.
inline std::string BrokenSampleInvariance(OpRunner& runner, const SampleCase& c) {
  for (uint64_t seed = 0; seed < 12; ++seed) {
    std::string want;
    for (const int64_t rows : {int64_t{1}, int64_t{2}, c.rows}) {
      HostTensor tensor(c.dtype, rows, c.vocab, c.vocab + (rows > 1 ? c.stride_extra : 0),
                        rows > 1 ? c.offset : 0);
      SampleBatch batch;
      std::mt19937_64 others(seed * 100 + rows), own(seed);
      HostTensor row(c.dtype, 1, c.vocab, c.vocab, 0);
      FillRow(row, 0, c.fill, c.seed + seed);
      for (int64_t r = 0; r + 1 < rows; ++r) {
        FillRow(tensor, r, r % 5 == 4 ? Fill::kWithNan : Fill::kUniform, seed);
        AddRandomRow(batch, c.vocab, others);
      }
      for (int64_t i = 0; i < c.vocab; ++i) tensor.Set(rows - 1, i, row.At(0, i));
      AddRandomRow(batch, c.vocab, own);
      batch.rows.back().active = 1;
      if (batch.rows.back().temperature < 0) batch.rows.back().temperature = 1;
      batch.says_edited = rows == 2;
      auto got = runner.Sample(tensor, batch);
      if (!got.ok()) return got.status().ToString();
      const std::string bits = SampleBits(*got, batch.rows.back(), rows - 1);
      if (rows == 1) want = bits;
      if (bits != want) {
        return absl::StrFormat("%s: other bits as the last of %d rows (%s)", Describe(c), rows,
                               Describe(batch.rows.back()));
      }
    }
  }
  return "";
}

// ---- top_k off

// The values of top_k that cut nothing.
inline std::vector<int32_t> TopKsOff(int64_t vocab) {
  constexpr int32_t kMost = std::numeric_limits<int32_t>::max();
  return {0, -1, static_cast<int32_t>(vocab), static_cast<int32_t>(vocab) + 1, kMost - 1, kMost};
}

// "" where every row has the same bits with each of TopKsOff.
inline std::string BrokenTopKOff(OpRunner& runner, const SampleCase& c) {
  HostTensor tensor(c.dtype, c.rows, c.vocab, c.vocab, 0);
  SampleBatch batch;
  std::mt19937_64 random(c.seed);
  for (int64_t r = 0; r < c.rows; ++r) {
    FillRow(tensor, r, c.fill, c.seed);
    AddRandomRow(batch, c.vocab, random);
  }
  std::vector<std::string> want;
  for (const int32_t top_k : TopKsOff(c.vocab)) {
    for (SampleRow& row : batch.rows) row.top_k = top_k;
    auto got = runner.Sample(tensor, batch);
    if (!got.ok()) return got.status().ToString();
    for (int64_t r = 0; r < c.rows; ++r) {
      if (batch.rows[r].active == 0) continue;
      std::string bits = SampleBits(*got, batch.rows[r], r);
      if (top_k == 0) {
        want.resize(r + 1);
        want[r] = bits;
      }
      if (bits == want[r]) continue;
      return absl::StrFormat("%s: other bits in row %d (%s)", Describe(c), r,
                             Describe(batch.rows[r]));
    }
  }
  return "";
}

inline std::vector<SampleCase> SampleInvarianceCases() {
  return {{.rows = 700, .vocab = 7, .stride_extra = 1, .offset = 1},
          {.rows = 40, .vocab = 1000, .stride_extra = 3, .offset = 7},
          {.dtype = DType::kBF16, .rows = 9, .vocab = 33333, .stride_extra = 5, .offset = 3},
          {.dtype = DType::kF16, .rows = 9, .vocab = 4097, .offset = 1, .fill = Fill::kManyTies},
          {.rows = 5, .vocab = 131072, .stride_extra = 1, .offset = 1, .fill = Fill::kUniform}};
}

inline std::vector<OpCheck> SampleChecks() {
  return {
      ForAll("KeepsEveryClaim", SampleClaims, BrokenClaim),
      ForAll("KeepsEveryClaimOfTopNSigma", SampleSigmaClaims, BrokenClaim),
      ForAll("KeepsEveryClaimOfTypicalPAndXtc", SampleChoiceClaims, BrokenClaim),
      ForAll("KeepsEveryClaimOfEdits", SampleEditClaims, BrokenClaim),
      ForAll("KeepsEveryClaimOfPrompts", SamplePromptClaims, BrokenClaim),
      ForAll("KeepsEveryClaimOfTemperedLogprobs", SampleTemperedClaims, BrokenClaim),
      ForAll("KeepsEveryClaimOfEntropies", SampleEntropyClaims, BrokenClaim),
      ForAll("KeepsEveryClaimOfSupports", SampleSupportClaims, BrokenClaim),
      ForAll("KeepsEveryClaimOfDraws", SampleDrawsClaims, BrokenClaim),
      ForAll("KeepsEveryClaimOfWatermarks", SampleWatermarkClaims, BrokenClaim),
      ForAll("EveryMixOfParametersAgreesWithDoublePrecision", SampleCases, FirstDifference),
      ForAll("BordersMoveByFarLessThanTheMassOfAToken", BorderCases, MovedBorder),
      ForAll("BordersOfTopPMoveByFarLessThanTheMassOfAToken", NucleusFills, MovedNucleus),
      ForAll("ManyTopTokensAgreeWithDoublePrecision", ManyTopsCases, WrongManyTops),
      ForAll("ARowsBitsDoNotDependOnOtherRows", SampleInvarianceCases, BrokenSampleInvariance),
      ForAll("ATopKThatKeepsAllHasTheBitsOfNone", SampleInvarianceCases, BrokenTopKOff),
  };
}

}  // namespace logitd::testing

#endif  // LOGITD_TESTS_KERNELS_SAMPLE_CASES_H_
