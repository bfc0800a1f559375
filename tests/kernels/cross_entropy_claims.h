// Answers of cross_entropy by hand, for every backend.
#ifndef LOGITD_TESTS_KERNELS_CROSS_ENTROPY_CLAIMS_H_
#define LOGITD_TESTS_KERNELS_CROSS_ENTROPY_CLAIMS_H_

#include <cmath>
#include <cstdint>
#include <vector>

#include "kernels/cross_entropy.h"
#include "tests/kernels/reference.h"

namespace logitd::testing {

// A counted row with everything off.
inline CrossEntropyRow PlainLoss(int32_t target) {
  return {.active = 1, .target = target, .temperature = 1};
}

// What the row of a claim asks for.
struct LossAsk {
  int32_t target = 0;
  float temperature = 1;
  float softcap = 0;
  float label_smoothing = 0;
  Smoothing smoothing = Smoothing::kTorch;
  float z_loss = 0;
  int32_t top_logprobs = 0;
  int32_t want = kWantRank | kWantEntropy;
  bool active = true;

  CrossEntropyRow Row() const {
    if (!active) return {};
    return {.active = 1,
            .target = target,
            .temperature = temperature,
            .softcap = softcap,
            .label_smoothing = label_smoothing,
            .smoothing = smoothing,
            .z_loss = z_loss,
            .top_logprobs = top_logprobs,
            .want = want};
  }
};

struct LossClaim {
  const char* name;
  std::vector<float> logits;
  LossAsk ask;
  std::vector<int32_t> extra_ids;
  float loss;
  float logsumexp;
  float target_logprob;
  int32_t rank;
  float entropy;
  std::vector<int32_t> top_ids;
  std::vector<float> top_logprobs;
  std::vector<float> extra_logprobs;
  RowStatus status;
};

// `vocab` logits, all 0 except the first.
inline std::vector<float> OneOf(int64_t vocab, float first) {
  std::vector<float> logits(static_cast<size_t>(vocab));
  logits[0] = first;
  return logits;
}

// Of logits, temperatures and softcaps near the ends of f32's range.
inline std::vector<LossClaim> ExtremeLossClaims() {
  const float ln4 = std::log(4.0f);
  return {
      // clang-format off
      {.name = "logits far apart do not make NaN", .logits = {-3e38f, 3e38f}, .ask = {.target = 1},
       .extra_ids = {0}, .loss = 0, .logsumexp = 3e38f, .target_logprob = 0, .rank = 1,
       .entropy = 0, .extra_logprobs = {-kInf}},
      {.name = "the mean of huge logits is finite", .logits = {3e38f, 3e38f, 3e38f, 3e38f},
       .ask = {.target = 3, .label_smoothing = 0.5f}, .loss = ln4, .logsumexp = 3e38f,
       .target_logprob = -ln4, .rank = 4, .entropy = ln4},
      // x = {1, 0, 0, ...}
      {.name = "the entropy of logits far apart at a huge temperature is finite",
       .logits = OneOf(1024, 3e38f), .ask = {.temperature = 3e38f}, .loss = 5.93314841f,
       .logsumexp = 6.93314841f, .target_logprob = -5.93314841f, .rank = 1, .entropy = 6.93049828f},
      {.name = "a softcap above 2^100 acts as 2^100", .logits = {3e38f, -3e38f},
       .ask = {.temperature = 0x1p100f, .softcap = 3e38f}, .loss = 0.12692801f,
       .logsumexp = 1.12692801f, .target_logprob = -0.12692801f, .rank = 1, .entropy = 0.36533386f},
      {.name = "a softcap below 2^-100 acts as 2^-100", .logits = {1, -1},
       .ask = {.temperature = 0x1p-100f, .softcap = 1e-40f}, .loss = 0.12692801f,
       .logsumexp = 1.12692801f, .target_logprob = -0.12692801f, .rank = 1, .entropy = 0.36533386f},
      // clang-format on
  };
}

inline std::vector<LossClaim> OrdinaryLossClaims() {
  static const float ln2 = std::log(2.0f), ln3 = std::log(3.0f), ln4 = std::log(4.0f);
  static constexpr float kThreeToOne = 0.56233514f;  // the entropy of (1/4, 3/4)
  static constexpr RowStatus kEmpty = {RowCode::kEmptySupport, -1};
  return {
      // clang-format off
      {.name = "one token is certain", .logits = {-3}, .loss = 0, .logsumexp = -3,
       .target_logprob = 0, .rank = 1, .entropy = 0},
      {.name = "two equal logits have one half each", .logits = {0, 0}, .loss = ln2,
       .logsumexp = ln2, .target_logprob = -ln2, .rank = 1, .entropy = ln2},
      {.name = "equal logits rank by index", .logits = {0, 0}, .ask = {.target = 1}, .loss = ln2,
       .logsumexp = ln2, .target_logprob = -ln2, .rank = 2, .entropy = ln2},
      {.name = "minus zero equals plus zero", .logits = {-0.0f, 0.0f}, .ask = {.target = 1},
       .loss = ln2, .logsumexp = ln2, .target_logprob = -ln2, .rank = 2, .entropy = ln2},
      {.name = "the target has a quarter", .logits = {0, ln3}, .loss = ln4, .logsumexp = ln4,
       .target_logprob = -ln4, .rank = 2, .entropy = kThreeToOne},
      {.name = "the temperature divides logits", .logits = {0, 2 * ln3}, .ask = {.temperature = 2},
       .loss = ln4, .logsumexp = ln4, .target_logprob = -ln4, .rank = 2, .entropy = kThreeToOne},
      // 0.8 ln 4/3 + 0.2 (ln 4 - ln 3 / 2)
      {.name = "torch smoothing includes the target", .logits = {0, ln3},
       .ask = {.target = 1, .label_smoothing = 0.2f}, .loss = 0.39754330f, .logsumexp = ln4,
       .target_logprob = ln3 - ln4, .rank = 1, .entropy = kThreeToOne},
      // 0.8 ln 4/3 + 0.2 ln 4
      {.name = "megatron smoothing excludes the target", .logits = {0, ln3},
       .ask = {.target = 1, .label_smoothing = 0.2f, .smoothing = Smoothing::kMegatron},
       .loss = 0.50740453f, .logsumexp = ln4, .target_logprob = ln3 - ln4, .rank = 1,
       .entropy = kThreeToOne},
      {.name = "megatron smoothing of one token does nothing", .logits = {3},
       .ask = {.label_smoothing = 0.5f, .smoothing = Smoothing::kMegatron}, .loss = 0,
       .logsumexp = 3, .target_logprob = 0, .rank = 1, .entropy = 0},
      // ln 2 + (ln 2)^2 / 2
      {.name = "z-loss adds the square of logsumexp", .logits = {0, 0}, .ask = {.z_loss = 0.5f},
       .loss = 0.93337369f, .logsumexp = ln2, .target_logprob = -ln2, .rank = 1, .entropy = ln2},
      // x = {0, 2}
      {.name = "the softcap bounds logits", .logits = {0, 1e9f},
       .ask = {.target = 1, .softcap = 2, .want = kWantRank}, .extra_ids = {0}, .loss = 0.12692801f,
       .logsumexp = 2.12692801f, .target_logprob = -0.12692801f, .rank = 1, .entropy = 0,
       .extra_logprobs = {-2.12692801f}},
      {.name = "logits are ranked before the softcap", .logits = {1e9f, 2e9f},
       .ask = {.softcap = 2, .top_logprobs = 2}, .loss = ln2, .logsumexp = 2 + ln2,
       .target_logprob = -ln2, .rank = 2, .entropy = ln2, .top_ids = {1, 0},
       .top_logprobs = {-ln2, -ln2}},
      // x = {0, 1}
      {.name = "the softcap comes before the temperature", .logits = {0, kInf},
       .ask = {.temperature = 2, .softcap = 2, .want = kWantRank}, .extra_ids = {1},
       .loss = 1.31326169f, .logsumexp = 1.31326169f, .target_logprob = -1.31326169f, .rank = 2,
       .entropy = 0, .extra_logprobs = {-0.31326169f}},
      {.name = "the softcap makes minus inf finite", .logits = {-kInf, -kInf},
       .ask = {.target = 1, .softcap = 3}, .loss = ln2, .logsumexp = -3 + ln2,
       .target_logprob = -ln2, .rank = 2, .entropy = ln2},
      {.name = "a target of minus inf has a loss of plus inf", .logits = {0, -kInf},
       .ask = {.target = 1}, .loss = kInf, .logsumexp = 0, .target_logprob = -kInf, .rank = 2,
       .entropy = 0},
      {.name = "equal minus inf rank by index", .logits = {-kInf, -kInf, 0, -kInf},
       .ask = {.target = 1}, .loss = kInf, .logsumexp = 0, .target_logprob = -kInf, .rank = 3,
       .entropy = 0},
      {.name = "minus inf at another token changes nothing", .logits = {0, -kInf}, .loss = 0,
       .logsumexp = 0, .target_logprob = 0, .rank = 1, .entropy = 0},
      {.name = "with smoothing, minus inf at another token makes the loss plus inf",
       .logits = {0, -kInf}, .ask = {.label_smoothing = 0.1f}, .loss = kInf, .logsumexp = 0,
       .target_logprob = 0, .rank = 1, .entropy = 0},
      {.name = "smoothing above one does not turn the sign of an infinite loss",
       .logits = {0, -kInf},
       .ask = {.target = 1, .label_smoothing = 0.9f, .smoothing = Smoothing::kMegatron},
       .loss = kInf, .logsumexp = 0, .target_logprob = -kInf, .rank = 2, .entropy = 0},
      {.name = "several plus inf share the probability", .logits = {kInf, 5, kInf},
       .ask = {.target = 2, .top_logprobs = 3}, .extra_ids = {1, 2}, .loss = ln2, .logsumexp = kInf,
       .target_logprob = -ln2, .rank = 2, .entropy = ln2, .top_ids = {0, 2, 1},
       .top_logprobs = {-ln2, -ln2, -kInf}, .extra_logprobs = {-kInf, -ln2}},
      {.name = "plus inf at another token takes all probability", .logits = {kInf, 5},
       .ask = {.target = 1}, .loss = kInf, .logsumexp = kInf, .target_logprob = -kInf, .rank = 2,
       .entropy = 0},
      {.name = "plus inf with smoothing makes the loss plus inf", .logits = {kInf, 5},
       .ask = {.label_smoothing = 0.1f}, .loss = kInf, .logsumexp = kInf, .target_logprob = 0,
       .rank = 1, .entropy = 0},
      {.name = "plus inf with z-loss makes the loss plus inf", .logits = {kInf, -kInf},
       .ask = {.z_loss = 0.1f}, .loss = kInf, .logsumexp = kInf, .target_logprob = 0, .rank = 1,
       .entropy = 0},
      {.name = "a row of only minus inf has no loss", .logits = {-kInf, -kInf},
       .ask = {.target = 1, .top_logprobs = 2}, .extra_ids = {0}, .loss = kNan, .logsumexp = -kInf,
       .target_logprob = -kInf, .rank = 2, .entropy = kNan, .top_ids = {0, 1},
       .top_logprobs = {-kInf, -kInf}, .extra_logprobs = {-kInf}, .status = kEmpty},
      {.name = "an ignored row of only minus inf has a loss of 0", .logits = {-kInf, -kInf},
       .ask = {.target = kIgnoredTarget}, .loss = 0, .logsumexp = -kInf, .target_logprob = 0,
       .rank = 0, .entropy = kNan, .status = kEmpty},
      {.name = "NaN shows in every float of its row", .logits = {1, kNan, kNan},
       .ask = {.top_logprobs = 2}, .extra_ids = {0}, .loss = kNan, .logsumexp = kNan,
       .target_logprob = kNan, .rank = 0, .entropy = kNan, .top_ids = {-1, -1},
       .top_logprobs = {kNan, kNan}, .extra_logprobs = {kNan}, .status = {RowCode::kNanLogit, 1}},
      {.name = "NaN shows in an ignored row too", .logits = {kNan, 1},
       .ask = {.target = kIgnoredTarget, .softcap = 5}, .loss = kNan, .logsumexp = kNan,
       .target_logprob = kNan, .rank = 0, .entropy = kNan, .status = {RowCode::kNanLogit, 0}},
      {.name = "an ignored row still has logsumexp, entropy, top and extra tokens",
       .logits = {0, ln3},
       .ask = {.target = kIgnoredTarget, .label_smoothing = 0.5f, .z_loss = 1, .top_logprobs = 1},
       .extra_ids = {0}, .loss = 0, .logsumexp = ln4, .target_logprob = 0, .rank = 0,
       .entropy = kThreeToOne, .top_ids = {1}, .top_logprobs = {ln3 - ln4},
       .extra_logprobs = {-ln4}},
      {.name = "extra ids keep their order and may repeat", .logits = {0, ln3},
       .extra_ids = {1, 0, 1}, .loss = ln4, .logsumexp = ln4, .target_logprob = -ln4, .rank = 2,
       .entropy = kThreeToOne, .extra_logprobs = {ln3 - ln4, -ln4, ln3 - ln4}},
      {.name = "rank and entropy are 0 where not wanted", .logits = {0, 0},
       .ask = {.target = 1, .want = 0}, .loss = ln2, .logsumexp = ln2, .target_logprob = -ln2,
       .rank = 0, .entropy = 0},
      {.name = "nothing is written for a skipped row", .logits = {0, 0}, .ask = {.active = 0},
       .loss = -77.5f, .logsumexp = -77.5f, .target_logprob = -77.5f, .rank = -77,
       .entropy = -77.5f, .status = {RowCode::kOk, -77}},
      // clang-format on
  };
}

inline const std::vector<LossClaim>& LossClaims() {
  static const auto& claims = *[] {
    auto* const all = new std::vector<LossClaim>(OrdinaryLossClaims());
    const std::vector<LossClaim> extreme = ExtremeLossClaims();
    all->insert(all->end(), extreme.begin(), extreme.end());
    return all;
  }();
  return claims;
}

}  // namespace logitd::testing

#endif  // LOGITD_TESTS_KERNELS_CROSS_ENTROPY_CLAIMS_H_
