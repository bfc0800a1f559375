// The meaning of sampling parameters: names, defaults and ranges, the steps of a row in order, and
// the arithmetic on which all backends must agree. Host and device include this file; draw.h has
// the random numbers and the integer weights, watermark.h the scores of watermarks.
#ifndef LOGITD_KERNELS_SAMPLING_RULES_H_
#define LOGITD_KERNELS_SAMPLING_RULES_H_

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include "kernels/draw.h"
#include "kernels/row_params.h"
#include "kernels/types.h"
#include "kernels/watermark.h"

namespace logitd {

// The logits that log-probabilities, top tokens and the rank refer to.
enum class LogprobMode : int32_t {
  kRaw = 0,        // as sent, at temperature 1
  kProcessed = 1,  // after the whole pipeline, renormalised over what may be drawn
  kTempered = 2,   // as sent, at the row's temperature; as raw where it is 0
};

// Limits of one row.
inline constexpr int32_t kMaxTopLogprobs = 1024;
inline constexpr int32_t kMaxExtraIds = 1024;
inline constexpr int32_t kMaxHistory = 1 << 20;
inline constexpr int32_t kMaxSupport = 1024;
inline constexpr int32_t kMaxDraws = 1024;
inline constexpr int32_t kMostKept = 128;  // of KeptTokens

// One row's parameters, and the places of its lists and answers. All bytes zero: the row is
// skipped, and nothing is written for it.
struct SampleRow {
  uint64_t seed;                // the sequence of random numbers
  uint64_t position;            // the place in it; a decode loop counts it up
  int64_t first_history;        // history[first_history, first_history + history_count)
  int64_t first_bias;           // bias[first_bias, first_bias + bias_count)
  int64_t first_extra;          // extra_ids[first_extra, first_extra + extra_count)
  int64_t first_mask_word;      // mask_words[first_mask_word, + MaskWords(vocab)); -1 = no mask
  int64_t first_top_entry;      // answers [first_top_entry, first_top_entry + top_logprobs)
  int64_t first_extra_entry;    // answers [first_extra_entry, first_extra_entry + extra_count)
  int64_t first_support_entry;  // answers [first_support_entry, first_support_entry + want_support)
  int64_t first_draw_entry;     // answers [first_draw_entry, first_draw_entry + draws)
  uint64_t watermark_key;
  int32_t active;         // 1; 0 = skip the row
  float temperature;      // finite, >= 0; 0 = the highest logit, nothing random
  int32_t top_k;          // >= -1; -1, 0, and vocab or more = off
  float top_p;            // (0, 1]; 1 = off
  float top_n_sigma;      // finite, >= 0; 0 = off
  float min_p;            // [0, 1]; 0 = off
  float repetition;       // finite, > 0; 1 = off
  float presence;         // finite; 0 = off
  float frequency;        // finite; 0 = off
  float typical_p;        // (0, 1]; 1 = off
  float xtc_threshold;    // [0, 1]
  float xtc_probability;  // [0, 1]; 0 = off
  int32_t history_count;  // 0..kMaxHistory; each token as often as it was seen
  int32_t prompt_tokens;  // 0..history_count: the first of the history, only repetition's
  int32_t bias_count;     // 0..vocab
  int32_t extra_count;    // 0..kMaxExtraIds
  int32_t top_logprobs;   // 0..min(kMaxTopLogprobs, vocab)
  LogprobMode logprob_mode;
  int32_t want_support;  // 0..min(kMaxSupport, vocab)
  int32_t draws;         // 0..kMaxDraws: tokens to report of this row, the first of them its token
  int32_t watermark_width;  // 0..kMaxWatermarkWidth, of the last tokens in the history; 0 = off
  bool want_rank;           // the token's rank is reported; it may cost a further look at the row
  bool want_entropy;        // both entropies are reported
};
static_assert(sizeof(SampleRow) == 176);

// The parameters of a row: name on the wire, member, default, allowed range.
inline constexpr RowParam<SampleRow> kSampleParams[] = {
    {"seed", &SampleRow::seed, 0, kFinite},  // stays first: the server checks that it was sent
    {"position", &SampleRow::position, 0, kFinite},
    {"temperature", &SampleRow::temperature, 1, kZeroOrMore},
    {"top_k", &SampleRow::top_k, 0, {.low = -1}},
    {"top_p", &SampleRow::top_p, 1, {.low = 0, .high = 1, .above_low = true}},
    {"top_n_sigma", &SampleRow::top_n_sigma, 0, kZeroOrMore},
    {"min_p", &SampleRow::min_p, 0, {.low = 0, .high = 1}},
    {"typical_p", &SampleRow::typical_p, 1, {.low = 0, .high = 1, .above_low = true}},
    {"xtc_threshold", &SampleRow::xtc_threshold, 0.1f, {.low = 0, .high = 1}},
    {"xtc_probability", &SampleRow::xtc_probability, 0, {.low = 0, .high = 1}},
    {"prompt_tokens", &SampleRow::prompt_tokens, 0, {.low = 0, .high = kMaxHistory}},
    {"repetition_penalty", &SampleRow::repetition, 1, kAboveZero},
    {"presence_penalty", &SampleRow::presence, 0, kFinite},
    {"frequency_penalty", &SampleRow::frequency, 0, kFinite},
    {"top_logprobs",
     &SampleRow::top_logprobs,
     0,
     {.low = 0, .high = kMaxTopLogprobs, .up_to_vocab = true}},
    {"logprob_mode",
     &SampleRow::logprob_mode,
     0,
     {.low = 0, .high = 2, .names = "raw, processed, tempered"}},
    {"want_support",
     &SampleRow::want_support,
     0,
     {.low = 0, .high = kMaxSupport, .up_to_vocab = true}},
    {"want_entropy", &SampleRow::want_entropy, 0, {.low = 0, .high = 1}},
    {"draws", &SampleRow::draws, 0, {.low = 0, .high = kMaxDraws}},
    {"watermark_key", &SampleRow::watermark_key, 0, kFinite},
    {"watermark_width", &SampleRow::watermark_width, 0, {.low = 0, .high = kMaxWatermarkWidth}},
    {"want_rank", &SampleRow::want_rank, 0, {.low = 0, .high = 1}},
};

// The steps. With x the row as sent, in this order:
//
//   bias         x_i += value
//   penalties    for each token in the history:
//                x = x > 0 ? x / repetition : x * repetition; then, where it was seen `count` >= 1
//                times after the prompt, x -= frequency * count; x -= presence
//   mask         x_i = -inf where bit i is 0 (bit i % 32, least significant first, of word i/32)
//   temperature  z = x / temperature; max is the largest z
//   top_n_sigma  keeps x_i >= max x - top_n_sigma * sigma, with sigma the standard deviation of the
//                row's x above -inf (below); it does not depend on the temperature
//   min_p        keeps z_i >= max + ln(min_p)
//   top_k        keeps the first k by (x descending, index ascending)
//   top_p        keeps the shortest prefix, in that order, whose share of the weight of what the
//                filters before it left is >= top_p; at least one token
//   typical_p    keeps, of what is left, the tokens whose -ln p is nearest to the entropy, until
//                their share of the weight is >= typical_p; at least one token (below)
//   xtc          with probability xtc_probability, by the row's CoinBits: of what is left, removes
//                the tokens with a share >= xtc_threshold, except the last of them in the order
//   draw         with w = exp(z - max), the lowest i of what is left, in index order, with
//                sum_{j <= i} w_j > UniformBits(seed, position) / 2^64 * sum w
//
// A row with draws > 1 is drawn from as often: draw j, from 0, by UniformBits(seed, position, j).
// The steps before the draw are done once, xtc by its one coin. Draw 0 is the row's token.
//
// A row with a watermark has, in place of the draw, the token of what is left with the largest
// MarkScore(z_i - max, WatermarkBits(state, i)), the lowest index of equals (watermark.h). Its
// state is that of watermark_key after the last watermark_width tokens of the history, or all where
// there are fewer. Its seed is used only for xtc's coin.
//
// The edits are bias, penalties and mask. They round to f32 after every operation. Where infinities
// of both signs meet, the result is -inf: a ban wins. Equal logits (-0 equals +0) rank by ascending
// index.
//
// Temperature 0 is greedy: the token is the highest logit after the edits, the lowest index of
// equals, and the steps after them do nothing. A temperature below kLeastTemperature acts as
// kLeastTemperature everywhere, log-probabilities included.
//
// The support is the set of tokens that may be drawn. -inf is never in it. +inf is certain: where
// there is one, the +inf are the support, with equal weights. The filters are the steps between
// temperature and draw. A row is filtered where one of them is on. It also keeps nothing below z_i
// = max + kLogLeastWeight: a lower weight rounds to 0. The support of an unfiltered row is every
// token above -inf. No filter has a cap on candidates. Every token is drawn at its true rate, to a
// relative 4e-6 and an absolute 2^-43.
//
// Weights (draw.h has the constants). A filtered row: integers w_i = round(exp(z_i - max) * 2^43),
// so every sum is exact. The whole of top_p is the sum of the integers where a filter before it is
// on, else the sum over the row by cells (below) times 2^43. An unfiltered row is drawn in two
// steps. Cells are 1024 tokens, counted from token 0, each with its maximum m_c and s_c = sum
// exp((x - m_c) / temperature). P_c is the prefix sum of s_c exp((m_c - max x) / temperature) in
// double, P the last one, and u the upper 53 of the 64 bits as a fraction. The cell is the first
// one with P_c > u P. Inside it, the weights are integers relative to m_c, and the target is
// floor((u P - P_(c-1)) / (P_c - P_(c-1)) * their sum), at most that sum less 1.
//
// sigma = sqrt(Q / N - (D / N)^2), of N tokens above -inf, with D the sum of d_i = max x - x_i and
// Q that of d_i^2, in double. Every operation rounds; in Q / N - (D / N)^2 and in max x -
// top_n_sigma * sigma the product does not. A difference below 0, by rounding, counts as 0. Sums
// are in one order: by 32 sums, of which sum j adds up the numbers j, j + 32, j + 64 and so on;
// then sum j + 16 is added to sum j for j < 16, then j + 8 for j < 8, and so on. First the d of a
// cell, then the cells. Source: Tang et al., Top-n-sigma: not all logits are you need,
// arXiv:2411.07641.
//
// typical_p and xtc choose among the tokens that the filters before them left, by the integer
// weights W of a filtered row. typical_p: with b_i = (max - x_i) / temperature, 0 where max is
// +inf, B = sum round(W_i b_i) / sum W, and the distance d_i = |b_i - B| rounded to f32, which is
// | -ln p_i - entropy |: it keeps the shortest prefix of (d ascending, index ascending) whose W
// reach MassNeeded(typical_p). xtc: where CoinShows, with t the last token in the order whose W is
// at least MassNeeded(xtc_threshold), of the W of what is left, it removes the tokens before t.
// Where no token or one has that share, it removes none. Sources: Meister et al., Locally typical
// sampling, arXiv:2202.00666; xtc: text-generation-webui, pull request 6335.

// ---- what is on --------------------------------------------------------------------------------

constexpr bool PenaltiesAreOn(const SampleRow& ask) {
  return ask.history_count > 0 && (ask.repetition != 1 || ask.presence != 0 || ask.frequency != 0);
}
// Tokens of the history that count.
constexpr int32_t CountedHistory(const SampleRow& ask) {
  return PenaltiesAreOn(ask) ? ask.history_count : 0;
}
// True where single tokens are edited: by bias or penalties.
constexpr bool HasPatches(const SampleRow& ask) {
  return ask.bias_count > 0 || PenaltiesAreOn(ask);
}
constexpr bool IsEdited(const SampleRow& ask) {
  return ask.first_mask_word >= 0 || HasPatches(ask);
}
// True where no edit can raise a logit.
constexpr bool EditsOnlyLower(const SampleRow& ask) {
  const bool penalties_lower = ask.repetition >= 1 && ask.presence >= 0 && ask.frequency >= 0;
  return ask.bias_count == 0 && (penalties_lower || !PenaltiesAreOn(ask));
}

constexpr bool IsGreedy(const SampleRow& ask) { return ask.temperature == 0; }
constexpr bool TopKIsOn(const SampleRow& ask, int64_t vocab) {
  return ask.top_k > 0 && ask.top_k < vocab;
}
constexpr bool SigmaIsOn(const SampleRow& ask) { return ask.top_n_sigma > 0; }
// True where a filter keeps the tokens within some distance below the largest logit.
constexpr bool DistanceIsOn(const SampleRow& ask) { return ask.min_p > 0 || SigmaIsOn(ask); }
constexpr bool TypicalIsOn(const SampleRow& ask) { return ask.typical_p < 1; }
// True where a filter chooses among the tokens that the filters before it left, so that what is
// left need not be the first tokens of the order.
constexpr bool ChoiceIsOn(const SampleRow& ask) {
  return !IsGreedy(ask) && (TypicalIsOn(ask) || ask.xtc_probability > 0);
}
constexpr bool IsFiltered(const SampleRow& ask, int64_t vocab) {
  return TopKIsOn(ask, vocab) || ask.top_p < 1 || DistanceIsOn(ask) || ChoiceIsOn(ask);
}
// True where the draw, or the whole of top_p, is by sums over the row at its temperature.
constexpr bool SumsAreOfRow(const SampleRow& ask, int64_t vocab) {
  return !IsGreedy(ask) && !TopKIsOn(ask, vocab) && !DistanceIsOn(ask) &&
         (ask.top_p < 1 || !ChoiceIsOn(ask));
}

// True where a key takes the place of the draw's random bits.
constexpr bool MarkIsOn(const SampleRow& ask) { return !IsGreedy(ask) && ask.watermark_width > 0; }
// True where the row's token, or what it is drawn from, depends on its seed.
constexpr bool UsesSeed(const SampleRow& ask) {
  return !IsGreedy(ask) && (!MarkIsOn(ask) || ask.xtc_probability > 0);
}

// ---- what a row needs ---------------------------------------------------------------------------

// True where the first tokens of the order tell what the filters leave: at most `few`, or those
// within a distance from the first.
constexpr bool FirstTokensTell(const SampleRow& ask, int64_t vocab, int32_t few) {
  if (IsGreedy(ask)) return true;
  if (SigmaIsOn(ask) || ChoiceIsOn(ask)) return false;  // they look at all that is left
  return DistanceIsOn(ask) || (TopKIsOn(ask, vocab) && ask.top_k <= few);
}

// True where a row asks for what few rows do. Kernels that are told that no row of a call does are
// smaller.
constexpr bool AsksMore(const SampleRow& ask) {
  return ask.logprob_mode == LogprobMode::kTempered || ask.want_support > 0 || ask.want_entropy ||
         ask.top_logprobs > kMostKept || ask.draws > 0 || ChoiceIsOn(ask) || MarkIsOn(ask);
}

// How many of the first tokens by (logit descending, index ascending) are all that a row's draw and
// report need, besides the logsumexp: 1..kMostKept, for a row without edits, without ids whose
// log-probability is wanted and without AsksMore, which is greedy or has a top_k of at most
// kMostKept and no top_n_sigma. A vocabulary may have no more tokens than that, and then the row's
// top_k is off. 0: the row may need others too.
constexpr int32_t KeptTokens(const SampleRow& ask) {
  const bool few = IsGreedy(ask) || (ask.top_k > 0 && ask.top_k <= kMostKept && !SigmaIsOn(ask));
  const bool edited = ask.first_mask_word >= 0 || ask.bias_count > 0 || ask.history_count > 0;
  if (!few || edited || ask.extra_count > 0 || AsksMore(ask)) return 0;
  const int32_t drawn_from = IsGreedy(ask) ? 1 : ask.top_k;
  return ask.top_logprobs > drawn_from ? ask.top_logprobs : drawn_from;
}

// ---- edits --------------------------------------------------------------------------------------

// -inf in place of the NaN of two infinities: the ban wins.
constexpr float BanIfNan(float x) { return x != x ? -std::numeric_limits<float>::infinity() : x; }

constexpr float Biased(float x, float value) { return BanIfNan(x + value); }

// a * b, rounded before anything is added to it.
constexpr float RoundedProduct(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fmul_rn(a, b);
#else
  return a * b;  // the library is compiled with -ffp-contract=off
#endif
}

// A token's sightings: how often it was seen after the prompt, and kSeenInPrompt where it is in the
// prompt. They fit in 21 bits: a row with a prompt has at most kMaxHistory - 1 other tokens.
inline constexpr uint32_t kSeenInPrompt = kMaxHistory;
static_assert(std::has_single_bit(kSeenInPrompt));

// The sighting at place i of the history. kSeenInPrompt is set, once or more often; others add up.
constexpr uint32_t SightingAt(int32_t i, int32_t prompt_tokens) {
  return i < prompt_tokens ? kSeenInPrompt : 1;
}

struct Penalties {
  float repetition;
  float presence;
  float frequency;
  uint32_t count_bits;  // of sightings: without a prompt, a count may be kSeenInPrompt

  constexpr explicit Penalties(const SampleRow& ask)
      : repetition(ask.repetition),
        presence(ask.presence),
        frequency(ask.frequency),
        count_bits(ask.prompt_tokens > 0 ? kSeenInPrompt - 1 : ~0u) {}

  // The logit of a token with these sightings.
  constexpr float Of(float x, uint32_t sightings) const {
    if (sightings == 0) return x;
    x = x > 0 ? x / repetition : RoundedProduct(x, repetition);
    const uint32_t count = sightings & count_bits;
    if (count == 0) return x;
    return BanIfNan(x - RoundedProduct(frequency, static_cast<float>(count))) - presence;
  }
};

// ---- filters ------------------------------------------------------------------------------------

// The temperature that divides the logits of a row that is not greedy.
constexpr float ActingTemperature(const SampleRow& ask) {
  return ask.temperature > kLeastTemperature ? ask.temperature : kLeastTemperature;
}

// The lowest float that is not below x, a number of at most the largest float.
constexpr float RoundedUp(double x) {
  constexpr float kLargest = std::numeric_limits<float>::max();
  if (x < -kLargest) return -kLargest;
  const auto nearest = static_cast<float>(x);
  if (nearest >= x) return nearest;
  return std::bit_cast<float>(std::bit_cast<int32_t>(nearest) + (nearest < 0 ? -1 : 1));
}

// The lowest logit after the edits that a row keeps, whose largest is `max`, above -inf: by the
// distance that the filters allow, and by kLogLeastWeight.
constexpr float LeastKept(const SampleRow& ask, float max) {
  if (max == std::numeric_limits<float>::infinity()) return max;
  const double log_share = ask.min_p > 0x1p-44f ? std::log(double{ask.min_p}) : kLogLeastWeight;
  return RoundedUp(std::fma(double{ActingTemperature(ask)}, log_share, double{max}));
}

// ---- top_n_sigma --------------------------------------------------------------------------------

inline constexpr int kSigmaSums = 32;

// How far x is below the row's largest logit, which is finite. -inf does not count.
constexpr double BelowMax(float max, float x) {
  return x > -std::numeric_limits<float>::infinity() ? static_cast<double>(max) - x : 0.0;
}
// The sums and the number of tokens above -inf of a row, of which some part or all is added up.
struct SigmaSums {
  double below;    // of BelowMax
  double squares;  // of their squares
  int64_t count;
};
// The lowest logit that top_n_sigma keeps in a row whose largest, which is finite, is `max`.
constexpr float SigmaBorder(const SampleRow& ask, float max, const SigmaSums& row) {
  const auto count = static_cast<double>(row.count);
  const double mean = row.below / count;
  const double variance = std::fma(-mean, mean, row.squares / count);
  const double sigma = variance > 0 ? std::sqrt(variance) : 0;
  return RoundedUp(std::fma(-double{ask.top_n_sigma}, sigma, double{max}));
}

// ---- typical_p and xtc --------------------------------------------------------------------------

// How much larger -ln p of logit x is than that of the row's largest, `max`.
constexpr double Surprise(float x, float max, double temperature) {
  if (max == std::numeric_limits<float>::infinity()) return 0;
  return (static_cast<double>(max) - x) / temperature;
}
// A token's part of the sum of surprises by weight, as an integer.
constexpr uint64_t WeighedSurprise(uint64_t weight, double surprise) {
  return static_cast<uint64_t>(std::nearbyint(static_cast<double>(weight) * surprise));
}
// The mean surprise of tokens with these sums.
constexpr double MeanSurprise(uint64_t weighed, uint64_t weights) {
  return static_cast<double>(weighed) / static_cast<double>(weights);
}
// The distance of a token from the mean, below 0: larger is nearer, as a logit is for the order.
constexpr float Typicality(double surprise, double mean) {
  const double above = surprise - mean;
  return 0.0f - static_cast<float>(above < 0 ? -above : above);
}

// True where xtc removes what reaches its threshold; two tokens cannot both have more than half.
constexpr bool XtcActs(const SampleRow& ask) {
  return ask.xtc_threshold <= 0.5f &&
         CoinShows(ask.xtc_probability, CoinBits(ask.seed, ask.position));
}

// The tokens that typical_p and xtc choose, by keys: a key is larger the earlier its token is in an
// order of (value descending, index ascending).
struct Choice {
  double mean;            // of the surprises
  uint64_t typical_last;  // the least key of Typicality; 0: typical_p keeps all
  uint64_t first;         // the largest key of the logits: xtc removes those above

  static constexpr Choice All() { return {.mean = 0, .typical_last = 0, .first = ~uint64_t{0}}; }
  constexpr bool KeepsAll() const { return typical_last == 0 && first == ~uint64_t{0}; }

  // True where the row's largest logit is `max`, the token has the logit x and its key, and
  // `key_of` makes a key of the same token by another value.
  template <class KeyOf>
  constexpr bool Has(uint64_t key, float x, float max, double temperature, KeyOf key_of) const {
    if (key > first) return false;
    return typical_last == 0 ||
           key_of(Typicality(Surprise(x, max, temperature), mean)) >= typical_last;
  }
};

// ---- watermark ----------------------------------------------------------------------------------

// The state of the row's place in its text; `history` has the tokens of all rows.
constexpr uint64_t StateOfMark(const SampleRow& ask, const int32_t* history) {
  const int32_t count =
      ask.history_count < ask.watermark_width ? ask.history_count : ask.watermark_width;
  if (count == 0) return ask.watermark_key;
  const int32_t* const end = history + ask.first_history + ask.history_count;
  return WatermarkState(ask.watermark_key, end - count, count);
}

// ---- log-probabilities --------------------------------------------------------------------------

// True where log-probabilities, top tokens and the rank are of the row as sent.
constexpr bool ReportsSent(const SampleRow& ask) {
  return ask.logprob_mode != LogprobMode::kProcessed;
}
// True where those are at a temperature of the row's own.
constexpr bool IsTempered(const SampleRow& ask) {
  return ask.logprob_mode == LogprobMode::kTempered && !IsGreedy(ask) && ask.temperature != 1;
}

// Sums over the tokens of a distribution, with d = (max - x) / temperature.
struct Moments {
  double sum;    // of exp(-d)
  double below;  // of d exp(-d)
};
// -sum p ln p of it, in nats.
constexpr double EntropyOf(const Moments& sums) {
  const double entropy = std::log(sums.sum) + sums.below / sums.sum;
  return entropy > 0 ? entropy : 0;
}

// The log-probability of logit x in a support whose largest logit is `max`. `log_sum` is the
// logarithm of its sum of exp((x - max) / temperature); where max is +inf, of the number of +inf.
constexpr double LogprobOf(float x, float max, double temperature, double log_sum) {
  constexpr double kInfinite = std::numeric_limits<double>::infinity();
  if (max == std::numeric_limits<float>::infinity()) return x == max ? -log_sum : -kInfinite;
  return (static_cast<double>(x) - max) / temperature - log_sum;
}

}  // namespace logitd

#endif  // LOGITD_KERNELS_SAMPLING_RULES_H_
