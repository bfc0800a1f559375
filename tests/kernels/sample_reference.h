// sample by its contract, in double precision: sort everything, add everything up. An answer on
// either side of a border that f32 rounding may move is accepted.
#ifndef LOGITD_TESTS_KERNELS_SAMPLE_REFERENCE_H_
#define LOGITD_TESTS_KERNELS_SAMPLE_REFERENCE_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_format.h"
#include "kernels/draw.h"
#include "tests/kernels/op_runner.h"
#include "tests/kernels/reference.h"

namespace logitd::testing {

// The share of a sum that f32 rounding may shift.
inline constexpr double kShift = 4e-6;

// The share of the logits by which rounding may shift top_n_sigma's border.
inline constexpr double kSigmaShift = 1e-9;

// How far rounding may move the mean that typical_p measures from, and, as a share, a token's
// weight against xtc's threshold.
inline constexpr double kMeanShift = 1e-6;
inline constexpr double kWeightShift = 1e-5;

// Logits in an order, with weights: one of the distributions a row has.
struct Ranked {
  std::vector<float> x;
  std::vector<int32_t> order;  // token ids by (x descending, id ascending)
  std::vector<int32_t> rank;   // the reverse, from 1

  explicit Ranked(std::vector<float> logits)
      : x(std::move(logits)), order(x.size()), rank(x.size()) {
    // A row with NaN is refused; only the sort needs an order.
    std::replace_if(
        x.begin(), x.end(), [](float v) { return std::isnan(v); }, -kInf);
    std::iota(order.begin(), order.end(), 0);
    std::sort(order.begin(), order.end(),
              [this](int32_t a, int32_t b) { return x[a] != x[b] ? x[a] > x[b] : a < b; });
    for (size_t i = 0; i < order.size(); ++i) rank[order[i]] = static_cast<int32_t>(i) + 1;
  }
  float max() const { return x[order[0]]; }
  double Weight(int32_t id, double temperature) const {
    if (x[id] == -kInf) return 0;
    if (max() == kInf) return x[id] == kInf ? 1 : 0;
    return std::exp((double{x[id]} - max()) / temperature);
  }
};

// ---- edits

// The logits after bias, penalties and mask.
inline std::vector<float> EditedLogits(const std::vector<float>& sent, const SampleRow& ask,
                                       const SampleBatch& batch) {
  std::vector<float> x = sent;
  const auto settle = [](float v) { return std::isnan(v) ? -kInf : v; };
  for (int32_t i = 0; i < ask.bias_count; ++i) {
    const SampleBias& bias = batch.bias[ask.first_bias + i];
    x[bias.id] = settle(x[bias.id] + bias.value);
  }
  std::map<int32_t, int> seen;  // after the prompt
  for (int32_t i = 0; i < ask.history_count; ++i)
    seen[batch.history[ask.first_history + i]] += i >= ask.prompt_tokens ? 1 : 0;
  for (const auto& [id, count] : seen) {
    volatile float v = x[id];  // every step rounds
    v = v > 0 ? v / ask.repetition : v * ask.repetition;
    x[id] = v;
    if (count == 0) continue;
    volatile const float often = ask.frequency * static_cast<float>(count);
    v = settle(v - often);
    v = v - ask.presence;
    x[id] = v;
  }
  for (size_t i = 0; ask.first_mask_word >= 0 && i < x.size(); ++i) {
    if ((batch.mask_words[ask.first_mask_word + i / 32] >> (i % 32) & 1) == 0) x[i] = -kInf;
  }
  return x;
}

// What may be drawn: of the first `count` of the processed order, those of `chosen`.
struct ReferenceSupport {
  int64_t count;
  double sum;                // of weights
  std::vector<bool> chosen;  // by token; empty: all
};

class ReferenceSample {
 public:
  ReferenceSample(std::vector<float> sent, const SampleRow& ask, const SampleBatch& batch)
      : ask_(ask), raw_(sent), processed_(EditedLogits(sent, ask, batch)) {
    mark_ = ask.watermark_key;
    const int32_t marked = std::min(ask.watermark_width, ask.history_count);
    for (int32_t i = ask.history_count - marked; i < ask.history_count; ++i) {
      const auto token = static_cast<uint64_t>(batch.history[ask.first_history + i]);
      const PhiloxBlock block =
          Philox4x32(mark_, token | static_cast<uint64_t>(marked) << 32, uint64_t{1} << 32);
      mark_ = block.word[0] | uint64_t{block.word[1]} << 32;
    }
    for (size_t i = 0; i < sent.size(); ++i) {
      if (!std::isnan(sent[i])) continue;
      status_ = {RowCode::kNanLogit, static_cast<int32_t>(i)};
      return;
    }
    for (int32_t id : raw_.order) {
      raw_sum_ += raw_.Weight(id, 1);
      tempered_sum_ += raw_.Weight(id, Temperature());
    }
    if (processed_.max() == -kInf) {
      status_ = {RowCode::kEmptySupport, -1};
      return;
    }
    FindSupports();
  }

  RowStatus status() const { return status_; }
  double logsumexp() const { return raw_.max() + std::log(raw_sum_); }
  const std::vector<ReferenceSupport>& supports() const { return supports_; }
  const Ranked& processed() const { return processed_; }

  double Temperature() const {
    return ask_.temperature == 0 ? 1.0 : double{std::max(ask_.temperature, 0x1p-118f)};
  }

  // Probabilities of all tokens under supports()[0].
  std::vector<double> Probabilities() const {
    std::vector<double> p(processed_.x.size());
    for (int32_t id : IdsOf(supports_[0]))
      p[id] = processed_.Weight(id, Temperature()) / supports_[0].sum;
    return p;
  }

  double Logprob(const ReferenceSupport& support, int32_t id) const {
    return Logprob(support, id, ask_.logprob_mode);
  }
  double Logprob(const ReferenceSupport& support, int32_t id, LogprobMode mode) const {
    const bool processed = mode == LogprobMode::kProcessed;
    const bool raw = mode == LogprobMode::kRaw;
    const Ranked& of = processed ? processed_ : raw_;
    const double temperature = raw ? 1 : Temperature();
    const double weight = of.Weight(id, temperature);
    if (of.x[id] == -kInf || (of.max() == kInf && weight == 0)) return -kInf;
    if (processed && !Has(support, id)) return -kInf;
    const double log_weight = of.max() == kInf ? 0 : (double{of.x[id]} - of.max()) / temperature;
    return log_weight - std::log(processed ? support.sum : raw ? raw_sum_ : tempered_sum_);
  }

  // In nats, of these tokens at the temperature.
  static double Entropy(const Ranked& of, const std::vector<int32_t>& ids, double temperature) {
    double sum = 0, below = 0;
    for (const int32_t id : ids) {
      const double weight = of.Weight(id, temperature);
      if (weight == 0) continue;
      sum += weight;
      if (of.max() < kInf) below += weight * (of.max() - double{of.x[id]}) / temperature;
    }
    return std::log(sum) + below / sum;
  }
  // The entropy of the row as sent; NaN where all its logits are -inf.
  double RawEntropy() const { return raw_.max() == -kInf ? kNan : Entropy(raw_, raw_.order, 1); }

  // True where the bits of draw `draw` point at `token` in `support`, or so near to it that
  // rounding decides.
  bool Accepts(const ReferenceSupport& support, int32_t token, uint32_t draw = 0) const {
    if (ask_.temperature == 0) return token == processed_.order[0];
    if (ask_.watermark_width > 0) return AcceptsMarked(support, token);
    return Accepts(BordersOf(support), token, draw);
  }

  // "" where row r of the answer is right for one of the supports.
  std::string Difference(const SampleAnswer& got, int64_t r, const SampleBatch& batch) const {
    std::string first;
    if (const std::string difference = DescribeStatus(got.status[r], status_);
        !difference.empty()) {
      return difference;
    }
    if (status_.code != RowCode::kOk) return RefusedDifference(got, r);
    for (const ReferenceSupport& support : supports_) {
      const std::string difference = Difference(support, got, r, batch);
      if (difference.empty()) return "";
      if (first.empty()) first = difference;
    }
    return first;
  }

 private:
  // The tokens of a support by ascending id, with their prefix sums as shares of its sum.
  struct Borders {
    std::vector<int32_t> ids;
    std::vector<double> through;
    double slack;
  };
  Borders BordersOf(const ReferenceSupport& support) const {
    Borders borders{.ids = IdsOf(support), .through = {}, .slack = 0};
    std::sort(borders.ids.begin(), borders.ids.end());
    if (borders.ids.size() > 1) borders.slack = kShift + RoundedWeights(support);
    double through = 0;
    for (int32_t id : borders.ids)
      borders.through.push_back(through += processed_.Weight(id, Temperature()) / support.sum);
    return borders;
  }
  // True where the token has the largest score of the watermark, or one that rounding cannot tell
  // from it.
  bool AcceptsMarked(const ReferenceSupport& support, int32_t token) const {
    const auto score = [&](int32_t id) {
      const PhiloxBlock block = Philox4x32(mark_, static_cast<uint64_t>(id), uint64_t{2} << 32);
      const uint64_t bits = (block.word[0] | uint64_t{block.word[1]} << 32) >> 12;
      const double u = std::ldexp(static_cast<double>(2 * bits + 1), -53);
      return LogWeight(id) - std::log(-std::log(u));
    };
    if (!Has(support, token)) return false;
    const double own = score(token);
    for (const int32_t id : IdsOf(support)) {
      const double size = std::max({1.0, -LogWeight(token), -LogWeight(id)});
      if (score(id) > own + 1e-13 * size) return false;
    }
    return true;
  }
  double LogWeight(int32_t id) const {
    return processed_.max() == kInf ? 0
                                    : (double{processed_.x[id]} - processed_.max()) / Temperature();
  }

  bool Accepts(const Borders& borders, int32_t token, uint32_t draw) const {
    const auto at = std::lower_bound(borders.ids.begin(), borders.ids.end(), token);
    if (at == borders.ids.end() || *at != token) return false;
    const auto i = static_cast<size_t>(at - borders.ids.begin());
    const double before = i == 0 ? 0 : borders.through[i - 1];
    const double reach =
        std::ldexp(static_cast<double>(UniformBits(ask_.seed, ask_.position, draw)), -64);
    return processed_.Weight(token, Temperature()) > 0 && before - borders.slack <= reach &&
           reach < borders.through[i] + borders.slack;
  }

  void FindSupports() {
    if (IsGreedy(ask_)) {
      supports_ = {{1, 1.0}};
      return;
    }
    int64_t count = 0;  // of the last support
    for (const double share : {0.0, -kSigmaShift, kSigmaShift}) {
      const ReferenceSupport left = FirstFrom(std::max(LeastKept(), LeastBySigma(share)));
      if (left.count == 0 || left.count == count) continue;
      count = left.count;
      if (ask_.top_p == 1) {
        supports_.push_back(left);
      } else {
        FindNuclei(left);
      }
    }
    if (ask_.typical_p < 1) {
      for (const ReferenceSupport& left : std::exchange(supports_, {})) {
        for (const double shift : {0.0, -kMeanShift, kMeanShift}) FindTypical(left, shift);
      }
    }
    const double coin = std::ldexp(static_cast<double>(CoinBits(ask_.seed, ask_.position)), -64);
    if (coin < ask_.xtc_probability) {
      for (const ReferenceSupport& left : std::exchange(supports_, {})) {
        for (const double shift : {0.0, -kWeightShift, kWeightShift}) FindXtc(left, shift);
      }
    }
  }

  // The share of what is left that rounding its weights to integers may shift. It is more than
  // nothing where typical_p and xtc leave little.
  static double RoundedWeights(const ReferenceSupport& support) {
    if (support.chosen.empty()) return 0;
    return static_cast<double>(support.count) * 0x1p-44 / support.sum;
  }

  bool Has(const ReferenceSupport& support, int32_t id) const {
    return processed_.rank[id] <= support.count && (support.chosen.empty() || support.chosen[id]);
  }
  // The tokens of the support in the processed order.
  std::vector<int32_t> IdsOf(const ReferenceSupport& support) const {
    std::vector<int32_t> ids;
    for (int64_t i = 0; i < support.count; ++i) {
      if (Has(support, processed_.order[i])) ids.push_back(processed_.order[i]);
    }
    return ids;
  }
  ReferenceSupport SupportOf(int64_t count, const std::vector<int32_t>& ids, size_t from,
                             size_t to) const {
    ReferenceSupport support{count, 0, std::vector<bool>(processed_.x.size())};
    for (size_t i = from; i < to; ++i) {
      support.chosen[ids[i]] = true;
      support.sum += processed_.Weight(ids[i], Temperature());
    }
    return support;
  }

  // What typical_p keeps of `left`, with its mean moved by `shift`, and what it keeps by a
  // rounding.
  void FindTypical(const ReferenceSupport& left, double shift) {
    const auto surprise = [&](int32_t id) {
      return processed_.max() == kInf
                 ? 0
                 : (double{processed_.max()} - processed_.x[id]) / Temperature();
    };
    std::vector<int32_t> ids = IdsOf(left);
    double weighed = 0;  // integers: a mean of less than 2^-44 is 0
    for (int32_t id : ids) {
      const double weight = std::nearbyint(processed_.Weight(id, Temperature()) * kWeightOne);
      weighed += std::nearbyint(weight * surprise(id));
    }
    const double mean = weighed / (left.sum * kWeightOne) + shift;
    std::vector<float> distances(processed_.x.size());
    for (int32_t id : ids) distances[id] = static_cast<float>(std::fabs(surprise(id) - mean));
    std::sort(ids.begin(), ids.end(), [&](int32_t a, int32_t b) {
      return distances[a] != distances[b] ? distances[a] < distances[b] : a < b;
    });
    const size_t first = supports_.size();
    bool has_exact = false;
    double whole = 0;
    for (size_t n = 1; n <= ids.size(); ++n) {
      const double before = whole;
      whole += processed_.Weight(ids[n - 1], Temperature());
      if (before >= (ask_.typical_p + kShift) * left.sum && n > 1) break;
      if (whole < (ask_.typical_p - kShift) * left.sum && n < ids.size()) continue;
      supports_.push_back(SupportOf(left.count, ids, 0, n));
      if (!has_exact && (whole >= ask_.typical_p * left.sum || n == ids.size())) {
        has_exact = true;
        std::swap(supports_[first], supports_.back());
      }
    }
  }

  // What xtc keeps of `left`, with its threshold moved by the share `shift`.
  void FindXtc(const ReferenceSupport& left, double shift) {
    const std::vector<int32_t> ids = IdsOf(left);
    const double need = ask_.xtc_threshold * (1 + shift) * left.sum;
    size_t last = 0;
    while (last + 1 < ids.size() && processed_.Weight(ids[last + 1], Temperature()) >= need) ++last;
    supports_.push_back(SupportOf(left.count, ids, last, ids.size()));
  }

  // The lowest logit that top_n_sigma keeps, moved by a share of the logits.
  double LeastBySigma(double share) const {
    if (ask_.top_n_sigma == 0 || processed_.max() == kInf) return -kInf;
    double count = 0, mean = 0, variance = 0;
    for (float x : processed_.x) count += x > -kInf;
    for (float x : processed_.x) mean += x > -kInf ? x / count : 0;
    for (float x : processed_.x) variance += x > -kInf ? (x - mean) * (x - mean) / count : 0;
    const double distance = ask_.top_n_sigma * std::sqrt(variance);
    return processed_.max() - distance + share * (std::fabs(processed_.max()) + distance);
  }

  // The lowest logit that is kept. Less than 2^-44 of the maximum rounds to 0 in a filtered row.
  double LeastKept() const {
    if (!IsFiltered(ask_, static_cast<int64_t>(processed_.order.size()))) return -kInf;
    return processed_.max() + Temperature() * std::log(std::max(double{ask_.min_p}, 0x1p-44));
  }

  // The tokens from the logit `least` up, above -inf, at most top_k of them.
  ReferenceSupport FirstFrom(double least) const {
    ReferenceSupport left{.count = 0, .sum = 0};
    for (int32_t id : processed_.order) {
      const bool drawable =
          processed_.x[id] > -kInf && (processed_.max() < kInf || processed_.x[id] == kInf);
      if (!drawable || processed_.x[id] < least) break;
      if (ask_.top_k > 0 && left.count == ask_.top_k) break;
      ++left.count;
      left.sum += processed_.Weight(id, Temperature());
    }
    return left;
  }

  // The prefix that reaches top_p of what is left, and those that do by a rounding.
  void FindNuclei(const ReferenceSupport& left) {
    double whole = 0;
    std::vector<ReferenceSupport> supports;
    for (int64_t i = 0; i < left.count; ++i) {
      const double before = whole;
      whole += processed_.Weight(processed_.order[i], Temperature());
      if (before >= (ask_.top_p + kShift) * left.sum && i > 0) break;
      if (whole >= (ask_.top_p - kShift) * left.sum || i + 1 == left.count)
        supports.push_back({i + 1, whole});
    }
    // The exact one first.
    const auto exact = std::find_if(supports.begin(), supports.end(), [&](const auto& s) {
      return s.sum >= ask_.top_p * left.sum || s.count == left.count;
    });
    if (exact != supports.end()) std::iter_swap(supports.begin(), exact);
    supports_.insert(supports_.end(), supports.begin(), supports.end());
  }

  std::string RefusedDifference(const SampleAnswer& got, int64_t r) const {
    bool right = got.tokens[r] == -1 && got.logprobs[r] == -kInf && got.ranks[r] == 0;
    right &= status_.code == RowCode::kNanLogit ? std::isnan(got.logsumexp[r])
                                                : LogSumExpAgrees(got.logsumexp[r], logsumexp());
    for (int32_t i = 0; i < ask_.top_logprobs; ++i) {
      right &= got.top_ids[ask_.first_top_entry + i] == -1 &&
               got.top_logprobs[ask_.first_top_entry + i] == -kInf;
    }
    for (int32_t i = 0; i < ask_.extra_count; ++i) {
      right &= got.extra_logprobs[ask_.first_extra_entry + i] == -kInf;
    }
    right &= got.support_size[r] == 0;
    for (int32_t i = 0; i < ask_.want_support; ++i) {
      right &= got.support_ids[ask_.first_support_entry + i] == -1 &&
               got.support_logprobs[ask_.first_support_entry + i] == -kInf;
    }
    for (int32_t i = 0; i < ask_.draws; ++i) {
      right &= got.draw_tokens[ask_.first_draw_entry + i] == -1 &&
               got.draw_logprobs[ask_.first_draw_entry + i] == -kInf;
    }
    if (!right) return "a refused row has answers";
    const double raw = status_.code == RowCode::kNanLogit ? kNan : RawEntropy();
    return EntropyDifference(got, r, kNan, raw);
  }

  std::string EntropyDifference(const SampleAnswer& got, int64_t r, double entropy,
                                double raw) const {
    const auto agrees = [&](float value, double want) {
      if (!ask_.want_entropy) want = 0;
      return std::isnan(want) ? std::isnan(value)
                              : std::fabs(value - want) <= 4e-6 * std::max(1.0, want);
    };
    if (agrees(got.entropies[r], entropy) && agrees(got.raw_entropies[r], raw)) return "";
    return absl::StrFormat("entropies: got %.9g and %.9g, want %.12g and %.12g", got.entropies[r],
                           got.raw_entropies[r], entropy, raw);
  }

  static std::string LogprobDifference(std::string_view field, int64_t at, float got, double want,
                                       double rounded_weights) {
    // Where the double is beyond f32, infinity is right.
    const auto rounded = static_cast<float>(want);
    const bool agrees =
        std::isinf(rounded)
            ? got == rounded
            : std::fabs(got - want) <= 4e-6 * std::max(1.0, std::fabs(want)) + rounded_weights;
    return agrees ? "" : absl::StrFormat("%s %d: got %.9g, want %.12g", field, at, got, want);
  }

  std::string Difference(const ReferenceSupport& support, const SampleAnswer& got, int64_t r,
                         const SampleBatch& batch) const {
    const int32_t token = got.tokens[r];
    if (token < 0 || token >= static_cast<int64_t>(raw_.x.size())) {
      return absl::StrFormat("token: got %d", token);
    }
    if (!Accepts(support, token)) {
      return absl::StrFormat("token: got %d (rank %d of %d)", token, processed_.rank[token],
                             support.count);
    }
    const Ranked& mode = ask_.logprob_mode == LogprobMode::kProcessed ? processed_ : raw_;
    const int32_t rank = ask_.want_rank ? mode.rank[token] : 0;
    if (got.ranks[r] != rank) {
      return absl::StrFormat("rank: got %d, want %d", got.ranks[r], rank);
    }
    if (!LogSumExpAgrees(got.logsumexp[r], logsumexp())) {
      return absl::StrFormat("logsumexp: got %.9g, want %.12g", got.logsumexp[r], logsumexp());
    }
    const double rounded =
        ask_.logprob_mode == LogprobMode::kProcessed ? RoundedWeights(support) : 0;
    std::string difference = LogprobDifference("logprob of token", token, got.logprobs[r],
                                               Logprob(support, token), rounded);
    if (difference.empty()) {
      difference = EntropyDifference(got, r, Entropy(processed_, IdsOf(support), Temperature()),
                                     RawEntropy());
    }
    for (int32_t i = 0; i < ask_.top_logprobs && difference.empty(); ++i) {
      const int32_t id = got.top_ids[ask_.first_top_entry + i];
      if (id != mode.order[i]) {
        return absl::StrFormat("top id %d: got %d, want %d", i, id, mode.order[i]);
      }
      difference = LogprobDifference("top logprob", i, got.top_logprobs[ask_.first_top_entry + i],
                                     Logprob(support, id), rounded);
    }
    for (int32_t i = 0; i < ask_.extra_count && difference.empty(); ++i) {
      const int32_t id = batch.extra_ids[ask_.first_extra + i];
      difference =
          LogprobDifference("extra logprob", i, got.extra_logprobs[ask_.first_extra_entry + i],
                            Logprob(support, id), rounded);
    }
    if (difference.empty()) difference = SupportDifference(support, got, r);
    return difference.empty() ? DrawsDifference(support, got, r) : difference;
  }

  std::string DrawsDifference(const ReferenceSupport& support, const SampleAnswer& got,
                              int64_t r) const {
    if (ask_.draws == 0) return "";
    const Borders borders = BordersOf(support);
    const int32_t* const tokens = got.draw_tokens.data() + ask_.first_draw_entry;
    if (tokens[0] != got.tokens[r])
      return absl::StrFormat("draw 0: got %d beside token %d", tokens[0], got.tokens[r]);
    const double rounded =
        ask_.logprob_mode == LogprobMode::kProcessed ? RoundedWeights(support) : 0;
    for (int32_t j = 0; j < ask_.draws; ++j) {
      const bool right = ask_.temperature == 0 || ask_.watermark_width > 0
                             ? tokens[j] == tokens[0]
                             : Accepts(borders, tokens[j], static_cast<uint32_t>(j));
      if (!right) return absl::StrFormat("draw %d: got %d", j, tokens[j]);
      const std::string difference =
          LogprobDifference("logprob of draw", j, got.draw_logprobs[ask_.first_draw_entry + j],
                            Logprob(support, tokens[j]), rounded);
      if (!difference.empty()) return difference;
    }
    return "";
  }

  std::string SupportDifference(const ReferenceSupport& support, const SampleAnswer& got,
                                int64_t r) const {
    const std::vector<int32_t> ids = IdsOf(support);
    const auto size = static_cast<int64_t>(ask_.want_support > 0 ? ids.size() : 0);
    if (got.support_size[r] != size) {
      return absl::StrFormat("support size: got %d, want %d", got.support_size[r], size);
    }
    for (int32_t i = 0; i < ask_.want_support; ++i) {
      const int32_t want = i < size ? ids[i] : -1;
      const int32_t id = got.support_ids[ask_.first_support_entry + i];
      if (id != want) return absl::StrFormat("support id %d: got %d, want %d", i, id, want);
      const float logprob = got.support_logprobs[ask_.first_support_entry + i];
      const std::string difference =
          LogprobDifference("support logprob", i, logprob,
                            i < size ? Logprob(support, id, LogprobMode::kProcessed) : -kInf,
                            RoundedWeights(support));
      if (!difference.empty()) return difference;
    }
    return "";
  }

  const SampleRow ask_;
  const Ranked raw_;
  const Ranked processed_;
  uint64_t mark_;  // the watermark's state
  RowStatus status_;
  double raw_sum_ = 0;                      // at temperature 1
  double tempered_sum_ = 0;                 // of the row as sent, at its temperature
  std::vector<ReferenceSupport> supports_;  // the exact one first
};

}  // namespace logitd::testing

#endif  // LOGITD_TESTS_KERNELS_SAMPLE_REFERENCE_H_
