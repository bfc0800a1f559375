// divergence's sums of a cell of two rows, their merge, the answers from them, and the
// log-probabilities of top tokens. Host and device include this file.
#ifndef LOGITD_KERNELS_DIVERGENCE_SUMS_H_
#define LOGITD_KERNELS_DIVERGENCE_SUMS_H_

#include <cstdint>
#include <limits>

#include "kernels/divergence.h"
#include "kernels/softmax_topk.h"
#include "kernels/types.h"

namespace logitd {

// Here x are the logits and y the reference's; a = (x - largest x) / temperature and
// b = (y - largest y) / reference_temperature, of the cell or of the row.

// What a cell of both rows leaves; a and b are in units of ln 2.
struct DivergenceCell {
  float x_max, y_max;        // as sent
  float x_sum, y_sum;        // sum e^a, sum e^b
  float x_moment, y_moment;  // sum e^a a, sum e^b b
  float x_apart, y_apart;    // sum e^a (a - b), sum e^b (b - a), of tokens that both rows have
  int32_t found;             // kDivergence*
};
inline constexpr int32_t kDivergenceOnlyX = 1;  // a token is -inf in y only
inline constexpr int32_t kDivergenceOnlyY = 2;  // a token is -inf in x only
inline constexpr int32_t kDivergenceNan = 4;    // an element is NaN: the other numbers mean nothing
// An element is +inf, or further below the cell's largest than f32 can say: neither do its sums.
inline constexpr int32_t kDivergenceCertain = 8;

// What the two rows leave; a and b are of the row, in natural units.
struct DivergenceSums {
  double x_sum = 0, y_sum = 0;
  double x_moment = 0, y_moment = 0;
  double x_apart = 0, y_apart = 0;
  int32_t found = 0;
};

// The temperature that divides a row.
constexpr double ActingTemperature(float temperature) {
  return temperature > kLeastTemperature ? temperature : kLeastTemperature;
}

// What multiplies x - max so that it is a of a cell.
constexpr float DivergenceScale(float temperature) {
  return static_cast<float>(1.4426950408889634 / ActingTemperature(temperature));
}

// a of a row, of a logit or a cell's maximum. Where the row's maximum is +inf, only +inf counts.
constexpr double BelowMax(float x, float max, float temperature) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  if (x == -kInf || (max == kInf && x != kInf)) return -std::numeric_limits<double>::infinity();
  if (max == kInf) return 0;
  return (double{x} - double{max}) / ActingTemperature(temperature);
}

// Adds a cell whose maxima are at a = x_above and b = y_above of their rows; x_factor = e^x_above.
constexpr void AddCell(DivergenceSums& to, const DivergenceCell& cell, double x_above,
                       double y_above, double x_factor, double y_factor) {
  constexpr double kLn2 = 0.6931471805599453;
  constexpr double kMinusInf = -std::numeric_limits<double>::infinity();
  to.found |= cell.found;
  const double apart = x_above - y_above;  // not finite only where one row has no token here
  if (x_above != kMinusInf) {
    to.x_sum += x_factor * cell.x_sum;
    to.x_moment += x_factor * (kLn2 * cell.x_moment + x_above * cell.x_sum);
    if (y_above != kMinusInf) to.x_apart += x_factor * (kLn2 * cell.x_apart + apart * cell.x_sum);
  }
  if (y_above != kMinusInf) {
    to.y_sum += y_factor * cell.y_sum;
    to.y_moment += y_factor * (kLn2 * cell.y_moment + y_above * cell.y_sum);
    if (x_above != kMinusInf) to.y_apart += y_factor * (kLn2 * cell.y_apart - apart * cell.y_sum);
  }
}

// Adds one token: a, b, e^a and e^b.
constexpr void AddToken(DivergenceSums& to, double a, double b, double x_weight, double y_weight) {
  constexpr double kMinusInf = -std::numeric_limits<double>::infinity();
  const bool has_x = a != kMinusInf, has_y = b != kMinusInf;
  to.x_sum += x_weight;
  to.y_sum += y_weight;
  if (has_x) to.x_moment += x_weight * a;
  if (has_y) to.y_moment += y_weight * b;
  if (has_x && has_y) {
    to.x_apart += x_weight * (a - b);
    to.y_apart += y_weight * (b - a);
  } else {
    to.found |= has_x ? kDivergenceOnlyX : has_y ? kDivergenceOnlyY : 0;
  }
}

// True where the sums of cells say nothing: a row is certain, or logits are so far apart, for their
// temperature, that a difference is beyond f32. Then the tokens are added one by one.
constexpr bool NeedsTokens(const DivergenceSums& sums) {
  constexpr double kMost = std::numeric_limits<double>::max();
  const auto is_finite = [](double x) { return x >= -kMost && x <= kMost; };
  return (sums.found & kDivergenceCertain) != 0 || !is_finite(sums.x_apart) ||
         !is_finite(sums.y_apart) || !is_finite(sums.x_moment) || !is_finite(sums.y_moment);
}

// The answers of row r where an element is NaN, at `position` first.
constexpr void AnswerNan(const DivergenceAnswers& to, int64_t r, int32_t position) {
  to.forward_kl[r] = to.reverse_kl[r] = to.entropy[r] = to.reference_entropy[r] = to.logsumexp[r] =
      to.reference_logsumexp[r] = to.target_logprob[r] = to.reference_target_logprob[r] =
          std::numeric_limits<float>::quiet_NaN();
  to.status[r] = {RowCode::kNanLogit, position};
}

// ln of a token's probability, from its logit and the row's norms.
constexpr float LogprobOf(float logit, float max, float temperature, double log_sum) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  return max == -kInf ? -kInf : static_cast<float>(BelowMax(logit, max, temperature) - log_sum);
}

// The two inputs, for what is done with either in turn.
enum class DivergenceInput : uint8_t { kFirst, kReference };

// The top tokens of one input: where their answers go, and the most that any row wants.
struct DivergenceTops {
  DivergenceInput input;
  int32_t max_k;
  int32_t* ids;
  float* logprobs;

  constexpr static DivergenceTops Of(const DivergenceArgs& args, DivergenceInput input) {
    const DivergenceAnswers& to = args.answers;
    if (input == DivergenceInput::kFirst)
      return {input, args.max_top_logprobs, to.top_ids, to.top_logprobs};
    return {input, args.max_reference_top_logprobs, to.reference_top_ids,
            to.reference_top_logprobs};
  }

  // The row's parameters of softmax_topk. Only the order is used, so any temperature serves.
  constexpr SoftmaxTopKRow Ask(const DivergenceRow& row) const {
    const bool is_first = input == DivergenceInput::kFirst;
    const int32_t k = is_first ? row.top_logprobs : row.reference_top_logprobs;
    return {.first_entry = is_first ? row.first_top_entry : row.first_reference_top_entry,
            .temperature = 1,
            .k = row.active == 0 ? 0 : k};
  }

  // Writes entry `i` of a row with NaN.
  constexpr void WriteNan(int64_t i) const {
    ids[i] = -1;
    logprobs[i] = std::numeric_limits<float>::quiet_NaN();
  }
  // Writes the log-probability of entry `i`, whose id is there, from its logit and the row's norms.
  constexpr void Write(int64_t i, float logit, const DivergenceRow& row,
                       const DivergenceNorms& norms) const {
    logprobs[i] = input == DivergenceInput::kFirst
                      ? LogprobOf(logit, norms.max, row.temperature, norms.log_sum)
                      : LogprobOf(logit, norms.reference_max, row.reference_temperature,
                                  norms.reference_log_sum);
  }
};

// What the answers need besides the sums.
struct DivergenceRows {
  float x_max, y_max;         // of the rows, as sent
  double x_log, y_log;        // ln of the sums
  double x_target, y_target;  // a and b of the target
};

// The answers of row r, which has no NaN.
constexpr void AnswerWhole(const DivergenceAnswers& to, int64_t r, const DivergenceRow& ask,
                           const DivergenceSums& sums, const DivergenceRows& rows) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  const bool x_empty = rows.x_max == -kInf, y_empty = rows.y_max == -kInf;
  const auto least_zero = [](double x) { return x > 0 ? static_cast<float>(x) : 0.0f; };
  const auto logsumexp = [](float max, float temperature, double log) {
    const bool is_infinite = max == kInf || max == -kInf;
    return is_infinite ? max : static_cast<float>(max / ActingTemperature(temperature) + log);
  };
  const auto logprob = [&](bool is_empty, double target, double log) {
    return ask.target == kIgnoredTarget ? 0.0f
           : is_empty                   ? -kInf
                                        : static_cast<float>(target - log);
  };
  const auto divergence = [&](int32_t only, double apart, double sum, double more) {
    return x_empty || y_empty         ? kNan
           : (sums.found & only) != 0 ? kInf
                                      : least_zero(apart / sum + more);
  };
  to.status[r] = {x_empty || y_empty ? RowCode::kEmptySupport : RowCode::kOk, -1};
  to.forward_kl[r] =
      divergence(kDivergenceOnlyX, sums.x_apart, sums.x_sum, rows.y_log - rows.x_log);
  to.reverse_kl[r] =
      divergence(kDivergenceOnlyY, sums.y_apart, sums.y_sum, rows.x_log - rows.y_log);
  to.entropy[r] = x_empty ? kNan : least_zero(rows.x_log - sums.x_moment / sums.x_sum);
  to.reference_entropy[r] = y_empty ? kNan : least_zero(rows.y_log - sums.y_moment / sums.y_sum);
  to.logsumexp[r] = logsumexp(rows.x_max, ask.temperature, rows.x_log);
  to.reference_logsumexp[r] = logsumexp(rows.y_max, ask.reference_temperature, rows.y_log);
  to.target_logprob[r] = logprob(x_empty, rows.x_target, rows.x_log);
  to.reference_target_logprob[r] = logprob(y_empty, rows.y_target, rows.y_log);
  if (to.norms != nullptr) to.norms[r] = {rows.x_max, rows.y_max, rows.x_log, rows.y_log};
}

}  // namespace logitd

#endif  // LOGITD_KERNELS_DIVERGENCE_SUMS_H_
