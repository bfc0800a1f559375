// cross_entropy on the CPU: one streaming read of a row leaves a sketch (rows/sketch.h), from which
// come the loss and the top tokens.
//
//   read:    32 cells at a time: their sketch; for label smoothing their sum; for the entropy the
//            sum of exp(y) y, both out of L2. A softcap may make unequal logits equal and so hide
//            their order: maxima are those of the row as sent, and only sums see the softcap. A
//            rank is counted meanwhile, unless top tokens are wanted too.
//   answer:  the cells' sums are brought to the row's maximum in cell order, in double precision.
//
// Cost at 64 x 131072 f32: reads 33.6 MB once, which is the floor. Smoothing and the entropy are
// passes over cells in L2. A rank with top tokens reads again the cells that hold a token before the
// target. A cell whose logits are small against the softcap takes 5 or 8 powers for it instead of a
// table: 18 or 21 operations to a vector's sum instead of 29.
//
// Limited by: memory for a plain loss; by arithmetic for f16 and for a softcap.
//
// Measured: bench/results/cpu/losses.json, as shares of a bare read; before and after powers of tanh
// and counted ranks, bench/results/cpu/softcap.json.
#include "kernels/cpu/loss/cross_entropy.h"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/loss/cross_entropy.cc"
#include "hwy/contrib/sort/vqsort.h"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/cpu/rows/sketch-inl.h"
#include "kernels/cpu/rows/softcap-inl.h"
#include "kernels/cpu/rows/token_list-inl.h"

#ifndef LOGITD_KERNELS_CPU_CROSS_ENTROPY_ONCE_
#define LOGITD_KERNELS_CPU_CROSS_ENTROPY_ONCE_

namespace logitd::cpu {

// Scratch of one thread.
struct LossThreadScratch {
  LossScratch row;
  Buffer<float> capped;
  Buffer<float> extra;
  Buffer<uint64_t> keys;
  ListScratch list;
};

// A row on its way to its answers, or a shard's part of one.
struct LossRow {
  Row sent;  // as sent; sketched, at temperature 1, only where has_order is
  Row x;     // after softcap, at the row's temperature; with a softcap there are no logits of it
  bool has_order;      // the order of the tokens is that of `sent`, which has a sketch of its own
  int64_t vocab;       // of the whole row
  RankTarget counted;  // has a logit where the rank is counted while the row is read
  float* total;        // [cells], sum of x * kTotalShrink
  float* moment;       // [cells], sum of exp((x - max) / temperature) * (x - max) * MomentShrink()
};

// Keeps the sum of a cell finite.
inline constexpr float kTotalShrink = 1.0f / 4096;

// Keeps the moment of a cell finite. Logits as far apart as f32 allows have weights above 0 only at
// a large temperature. It is a power of two, so it costs a moment no digits.
inline float MomentShrink(float temperature) { return temperature < 1 ? kShrink : kShrink / 16; }

inline bool RankIsWanted(const CrossEntropyRow& ask) {
  return ask.target != kIgnoredTarget && (ask.want & kWantRank) != 0;
}

// Where top tokens are wanted, a rank comes from the maxima of groups that they need anyway.
inline bool RankIsCounted(const CrossEntropyRow& ask) {
  return RankIsWanted(ask) && ask.top_logprobs == 0;
}

// Row r, with sketches in slot `slot` of `slots` of the scratch.
inline LossRow LossRowAt(const CrossEntropyArgs& args, int64_t r, LossScratch& scratch,
                         int64_t slots, int64_t slot) {
  const TensorView& logits = args.logits;
  const CrossEntropyRow& ask = args.rows[r];
  const size_t offset = static_cast<size_t>(r * logits.row_stride) * SizeOf(logits.dtype);
  const int64_t cells = CellCount(logits.cols);
  LossRow row;
  row.vocab = logits.cols;
  row.sent = {.logits = static_cast<const std::byte*>(logits.data) + offset,
              .dtype = logits.dtype,
              .vocab = logits.cols,
              .temperature = 1,
              .sketch = {}};
  row.x = row.sent;
  row.x.temperature = ask.temperature;
  row.x.sketch = SketchAt(scratch.x, slots, slot, logits.cols);
  row.has_order = ask.softcap > 0 && ask.top_logprobs > 0;
  if (row.has_order) row.sent.sketch = SketchAt(scratch.order, slots, slot, logits.cols);
  if (RankIsCounted(ask)) {
    const size_t target = static_cast<size_t>(ask.target) * SizeOf(logits.dtype);
    row.counted = {.logit = static_cast<const std::byte*>(row.sent.logits) + target,
                   .index = ask.target,
                   .before = scratch.before.Get(slots * cells) + slot * cells};
  }
  row.total = scratch.total.Get(slots * cells) + slot * cells;
  row.moment = scratch.moment.Get(slots * cells) + slot * cells;
  return row;
}

}  // namespace logitd::cpu

#endif  // LOGITD_KERNELS_CPU_CROSS_ENTROPY_ONCE_

HWY_BEFORE_NAMESPACE();
namespace logitd::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Calls body(vector, elements in it, u) for `count` elements, kUnroll vectors in turn; zeros follow
// the last element.
constexpr int64_t kUnroll = 4;
template <typename T, class Body>
HWY_INLINE void ForEachVector(const T* from, int64_t count, const Body& body) {
  const DF d;
  const int64_t lanes = hn::Lanes(d);
  int64_t i = 0;
  for (; i + kUnroll * lanes <= count; i += kUnroll * lanes) {
    for (int64_t u = 0; u < kUnroll; ++u) body(LoadF32(d, from + i + u * lanes), lanes, u);
  }
  for (; i + lanes <= count; i += lanes) body(LoadF32(d, from + i), lanes, 0);
  if (i == count) return;
  T last[kMaxLanes];
  CopyTail(from + i, count - i, last);
  body(LoadF32(d, last), count - i, 0);
}

HWY_INLINE float SumOf(const VF* s) {
  const DF d;
  return hn::GetLane(hn::SumOfLanes(d, hn::Add(hn::Add(s[0], s[1]), hn::Add(s[2], s[3]))));
}

// sum x * kTotalShrink
template <typename T>
float CellTotal(const T* cell, int64_t count) {
  const DF d;
  const VF shrink = hn::Set(d, kTotalShrink);
  VF s[kUnroll];
  for (VF& v : s) v = hn::Zero(d);
  ForEachVector(cell, count,
                [&](VF x, int64_t, int64_t u) HWY_ATTR { s[u] = hn::MulAdd(x, shrink, s[u]); });
  return SumOf(s);
}

// sum exp((x - max) / temperature) * (x - max) * shrink_by, by the exponentials of CellSummer; max
// is finite. shrink_by: MomentShrink().
template <typename T>
float CellMoment(const T* cell, int64_t count, const Exponent& e, float shrink_by, float max) {
  const DF d;
  const float more = shrink_by / kShrink;
  const VF shrink = hn::Set(d, shrink_by);
  const VF log2e_over_temperature = hn::Set(d, e.log2e_over_temperature / more);
  const VF top = hn::Set(d, max * shrink_by), floor = hn::Set(d, e.floor * more);
  VF s[kUnroll];
  for (VF& v : s) v = hn::Zero(d);
  ForEachVector(cell, count, [&](VF x, int64_t n, int64_t u) HWY_ATTR {
    const VF y = hn::Max(hn::MulSub(x, shrink, top), floor);
    const ExpFactors exp = ExpForSum(d, y, log2e_over_temperature);
    VF w = hn::Mul(exp.rest, exp.power);
    if (n < static_cast<int64_t>(hn::Lanes(d))) {
      w = hn::IfThenElseZero(hn::FirstN(d, static_cast<size_t>(n)), w);
    }
    s[u] = hn::MulAdd(w, y, s[u]);
  });
  return SumOf(s);
}

// Total and moment of cells [begin, end) of `x`, whose sketch is done.
template <typename T>
void SumCells(const T* x, const Row& row, int64_t begin, int64_t end, float* total, float* moment) {
  const Exponent e = MakeExponent(row.temperature);
  const float shrink = MomentShrink(row.temperature);
  for (int64_t c = begin; c < end; ++c) {
    const T* cell = x + c * kCellElements;
    const int64_t count = std::min(kCellElements, row.vocab - c * kCellElements);
    const float max = row.sketch.max[c];
    if (total != nullptr) total[c] = CellTotal(cell, count);
    if (moment != nullptr)
      moment[c] = std::isfinite(max) ? CellMoment(cell, count, e, shrink, max) : 0;
  }
}

void SumCellsOf(const Row& row, int64_t begin, int64_t end, float* total, float* moment) {
  if (total == nullptr && moment == nullptr) return;
  AsType(row.dtype, static_cast<const std::byte*>(row.logits),
         [&](const auto* x) { SumCells(x, row, begin, end, total, moment); });
}

// `count` elements of a row after the softcap, as f32.
template <typename T>
void Cap(const T* from, int64_t count, float softcap, float* to) {
  const DF d;
  const SoftCap cap(EffectiveSoftcap(softcap));
  for (int64_t i = 0; i < count; i += hn::Lanes(d)) {
    StoreAs(d, cap(d, LoadUpTo(d, from + i, count - i)), count - i, to + i);
  }
}

// One logit after the softcap, with the bits it has in a vector of others.
float CapOne(float logit, float softcap) {
  if (softcap == 0) return logit;
  const DF d;
  return hn::GetLane(SoftCap(EffectiveSoftcap(softcap))(d, hn::Set(d, logit)));
}

// Cells [begin, end) of a row with a softcap, which the sums see.
template <Order kOrder, typename T>
void SketchCapped(const T* sent, const LossRow& row, float softcap, int64_t begin, int64_t end) {
  HWY_ALIGN T padded[kCellElements];
  HWY_ALIGN float capped[kCellElements];
  const SoftCap cap(EffectiveSoftcap(softcap));
  CellSketcher<T, kOrder, SoftCap> sketcher({.groups = row.sent.sketch,
                                             .target = row.counted,
                                             .sums = row.x.sketch,
                                             .temperature = row.x.temperature},
                                            cap);
  for (int64_t c = begin; c < end; ++c) {
    sketcher.Add(CellAt(sent, row.sent.vocab, c, padded), c);
  }
  const int64_t last = (end - 1) * kCellElements;
  if (row.sent.vocab - last >= kCellElements) return sketcher.Finish();
  // What fills up the last cell is -inf, also after the softcap.
  std::fill(capped, capped + kCellElements, -kInf);
  Cap(sent + last, row.sent.vocab - last, softcap, capped);
  sketcher.FinishWith(capped);
}

// Reads cells [begin, end) of the row, at most kItemCells.
void ReadCells(const LossRow& row, const CrossEntropyRow& ask, int64_t begin, int64_t end,
               LossThreadScratch& scratch) {
  const bool is_smooth = EffectiveSmoothing(ask, row.vocab) > 0;
  float* total = is_smooth ? row.total : nullptr;
  float* moment = (ask.want & kWantEntropy) != 0 ? row.moment : nullptr;
  if (ask.softcap == 0) {
    if (ask.top_logprobs > 0) {
      SketchCells(row.x, begin, end);
    } else {
      SketchSums(row.x, row.counted, begin, end);
    }
    SumCellsOf(row.x, begin, end, total, moment);
    return;
  }
  AsType(row.sent.dtype, row.sent.logits, [&](const auto* sent) {
    if (row.has_order) {
      SketchCapped<Order::kGroups>(sent, row, ask.softcap, begin, end);
    } else if (row.counted.logit != nullptr) {
      SketchCapped<Order::kCount>(sent, row, ask.softcap, begin, end);
    } else {
      SketchCapped<Order::kNone>(sent, row, ask.softcap, begin, end);
    }
    if (total == nullptr && moment == nullptr) return;
    // These cells after the softcap, as a row of their own.
    float* capped = scratch.capped.Get(kItemCells * kCellElements);
    const int64_t first = begin * kCellElements;
    const Row part = {.logits = capped,
                      .dtype = DType::kF32,
                      .vocab = std::min(row.x.vocab, end * kCellElements) - first,
                      .temperature = ask.temperature,
                      .sketch = {.max = row.x.sketch.max + begin}};
    Cap(sent + first, part.vocab, ask.softcap, capped);
    SumCellsOf(part, 0, end - begin, total == nullptr ? nullptr : total + begin,
               moment == nullptr ? nullptr : moment + begin);
  });
}

// A row's distribution.
struct Distribution {
  double max;  // of x, before the temperature divides it; not NaN
  double temperature;
  double log_sum;  // ln sum exp((x - max) / temperature); where max is +inf, ln of their number

  double Logprob(float x) const {
    constexpr double kMinusInf = -std::numeric_limits<double>::infinity();
    if (x == -kInf) return kMinusInf;
    if (max == kInf) return x == kInf ? -log_sum : kMinusInf;
    return (double{x} - max) / temperature - log_sum;
  }
  double LogSumExp() const { return std::isfinite(max) ? max / temperature + log_sum : max; }
};

// -sum p ln p. max is not -inf.
double Entropy(const LossRow& row, const Distribution& of) {
  if (of.max == kInf) return of.log_sum;
  const double inverse = 1 / std::max(of.temperature, double{kLeastTemperature});
  const double moment_to_x = inverse / MomentShrink(row.x.temperature);
  double sum = 0, moment = 0;
  for (int64_t c = 0; c < CellCount(row.x.vocab); ++c) {
    const double below = (double{row.x.sketch.max[c]} - of.max) * inverse;
    const double share = std::exp(below);
    if (share == 0) continue;
    sum += share * row.x.sketch.sum[c];
    moment += share * (row.moment[c] * moment_to_x + below * row.x.sketch.sum[c]);
  }
  return std::max(0.0, std::log(sum) - moment / sum);
}

// The mean of x, before the temperature divides it.
double MeanOf(const LossRow& row) {
  double total = 0;
  for (int64_t c = 0; c < CellCount(row.x.vocab); ++c) total += row.total[c];
  return total / kTotalShrink / static_cast<double>(row.x.vocab);
}

// The loss of a counted row. max is not -inf.
double LossOf(const LossRow& row, const CrossEntropyRow& ask, const Distribution& of, float x) {
  constexpr double kPlusInf = std::numeric_limits<double>::infinity();
  const double e = EffectiveSmoothing(ask, row.vocab);
  const double plain = -of.Logprob(x);
  if (of.max == kInf) return e == 0 && ask.z_loss == 0 ? plain : kPlusInf;
  if (x == -kInf) return kPlusInf;
  double loss = plain;
  // A mean of -inf makes it +inf.
  if (e > 0) loss = (1 - e) * plain + e * (of.log_sum - (MeanOf(row) - of.max) / of.temperature);
  if (ask.z_loss > 0) loss += double{ask.z_loss} * of.LogSumExp() * of.LogSumExp();
  return loss;
}

// All answers of a row whose lowest NaN is `nan`.
void AnswerNan(const CrossEntropyArgs& args, int64_t r, int32_t nan) {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  const CrossEntropyRow& ask = args.rows[r];
  const CrossEntropyAnswers& out = args.answers;
  out.status[r] = {RowCode::kNanLogit, nan};
  out.loss[r] = out.logsumexp[r] = out.target_logprob[r] = kNan;
  if (out.rank != nullptr) out.rank[r] = 0;
  if (out.entropy != nullptr) out.entropy[r] = (ask.want & kWantEntropy) != 0 ? kNan : 0;
  if (ask.top_logprobs > 0) {
    std::fill_n(out.top_ids + ask.first_top_entry, ask.top_logprobs, -1);
    std::fill_n(out.top_logprobs + ask.first_top_entry, ask.top_logprobs, kNan);
  }
  if (ask.extra_count > 0) {
    std::fill_n(out.extra_logprobs + ask.first_extra_entry, ask.extra_count, kNan);
  }
}

// What the answers of a row need besides the sums of its cells.
struct LossTokens {
  float target = 0;                // the target's logit as sent
  int64_t before = 0;              // tokens before the target, if its rank is wanted
  const uint64_t* keys = nullptr;  // of the top tokens
  const float* extra = nullptr;    // logits as sent of the extra ids
};

// Writes the answers of row r, whose cells are read, and which has no NaN.
void AnswerWhole(const CrossEntropyArgs& args, int64_t r, const LossRow& row, float max,
                 const LossTokens& tokens) {
  const CrossEntropyRow& ask = args.rows[r];
  const CrossEntropyAnswers& out = args.answers;
  const bool is_empty = max == -kInf;
  out.status[r] = {is_empty ? RowCode::kEmptySupport : RowCode::kOk, -1};
  Distribution of = {.max = max, .temperature = ask.temperature, .log_sum = 0};
  if (!is_empty) {
    of.log_sum = std::log(double{TotalSum(row.x, max, MakeExponent(ask.temperature))});
  }
  out.logsumexp[r] = static_cast<float>(of.LogSumExp());

  constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
  double loss = 0, logprob = 0;
  if (ask.target != kIgnoredTarget) {
    const float x = CapOne(tokens.target, ask.softcap);
    logprob = of.Logprob(x);
    loss = is_empty ? kNan : LossOf(row, ask, of, x);
  }
  out.loss[r] = static_cast<float>(loss);
  out.target_logprob[r] = static_cast<float>(logprob);
  if (out.rank != nullptr) {
    out.rank[r] = RankIsWanted(ask) ? static_cast<int32_t>(1 + tokens.before) : 0;
  }
  if (out.entropy != nullptr) {
    const bool wanted = (ask.want & kWantEntropy) != 0;
    out.entropy[r] = static_cast<float>(!wanted ? 0 : is_empty ? kNan : Entropy(row, of));
  }
  for (int32_t i = 0; i < ask.top_logprobs; ++i) {
    out.top_ids[ask.first_top_entry + i] = KeyIndex(tokens.keys[i]);
    out.top_logprobs[ask.first_top_entry + i] =
        static_cast<float>(of.Logprob(CapOne(KeyLogit(tokens.keys[i]), ask.softcap)));
  }
  for (int32_t i = 0; i < ask.extra_count; ++i) {
    out.extra_logprobs[ask.first_extra_entry + i] =
        static_cast<float>(of.Logprob(CapOne(tokens.extra[i], ask.softcap)));
  }
}

// The first `count` tokens, whose maximum is `max`, in the memory of the thread.
const uint64_t* TopOf(const Row& order, int64_t count, float max, LossThreadScratch& scratch) {
  if (count == 0) return nullptr;
  return TopKeys(order, count, max, -kInf, RowThreads(), scratch.list).keys;
}

// Writes the answers of row r, which has been read.
void Answer(const CrossEntropyArgs& args, int64_t r, const LossRow& row,
            LossThreadScratch& scratch) {
  const CrossEntropyRow& ask = args.rows[r];
  const Peak peak = FindPeak(row.x);
  if (HWY_UNLIKELY(peak.nan_cell >= 0)) {
    return AnswerNan(args, r, FirstNan(row.sent, peak.nan_cell));
  }
  const Row& order = row.has_order ? row.sent : row.x;
  LossTokens tokens;
  if (ask.target != kIgnoredTarget) tokens.target = Element(row.sent, ask.target);
  if (RankIsCounted(ask)) {
    const int32_t* const before = row.counted.before;
    tokens.before = std::accumulate(before, before + CellCount(row.vocab), int64_t{0});
  } else if (RankIsWanted(ask)) {
    tokens.before = CountBefore(order, tokens.target, ask.target);
  }
  const bool has_own_max = row.has_order && ask.top_logprobs > 0;
  tokens.keys =
      TopOf(order, ask.top_logprobs, has_own_max ? FindPeak(order).max : peak.max, scratch);
  float* const extra = scratch.extra.Get(ask.extra_count);
  for (int32_t i = 0; i < ask.extra_count; ++i) {
    extra[i] = Element(row.sent, args.extra_ids[ask.first_extra + i]);
  }
  tokens.extra = extra;
  AnswerWhole(args, r, row, peak.max, tokens);
}

// ---- Shards

// Adds the cell's tokens to the first `k` of those read before, in order. `cell` is sketched.
void AddTop(const Row& cell, int64_t first_token, int64_t k, uint64_t* keys, int64_t& count,
            LossThreadScratch& scratch) {
  const float max = *cell.sketch.max;
  const int64_t most = std::min(k, cell.vocab);
  const float bound = count < k ? BoundOf(cell, most, max) : KeyLogit(keys[k - 1]);
  if (max < bound) return;
  uint64_t* const own = scratch.keys.Get(kCellElements + 2 * k);
  const int64_t found = TopKeysFrom(cell, most, bound, own, scratch.list.sorter);
  for (int64_t i = 0; i < found; ++i) own[i] = LaterKey(own[i], first_token);
  uint64_t* const merged = own + kCellElements;
  std::merge(keys, keys + count, own, own + found, merged, std::greater<>());
  count = std::min(k, count + found);
  std::copy_n(merged, count, keys);
}

// Writes what a cell says of row r. No softcap: the head has its own.
void ReadCellOfRow(const LossShard& of, const LossCell& cell, int64_t r,
                   LossThreadScratch& scratch) {
  const CrossEntropyRow& ask = of.rows[r];
  const VocabShards& shards = of.shape.shards;
  const VocabShard here = {.first = shards.at(of.index).first + cell.first, .tokens = cell.tokens};
  const int64_t at = r * shards.most_cells() + cell.first / kCellElements;
  const auto place = [at](float* array) { return array == nullptr ? nullptr : array + at; };
  LossRow row = {};
  row.vocab = shards.vocab;
  row.x = {.logits = cell.logits + (r - cell.first_row) * cell.row_stride,
           .dtype = DType::kF32,
           .vocab = cell.tokens,
           .temperature = ask.temperature,
           .sketch = SketchAt(scratch.row.x, 1, 0, kCellElements)};
  row.x.sketch.max = place(of.to.max);
  row.x.sketch.sum = place(of.to.sum);
  row.total = place(of.to.total);
  row.moment = place(of.to.moment);
  const float* target = nullptr;
  if (RankIsWanted(ask)) {
    target = &of.targets[shards.OwnerOf(ask.target) * of.shape.rows + r];
  }
  const int64_t target_index = int64_t{ask.target} - here.first;
  int32_t before = 0;
  if (RankIsCounted(ask)) row.counted = {target, target_index, &before};
  ReadCells(row, ask, 0, 1, scratch);

  LossStretch& part = of.parts[of.PartOf(r, cell.stretch)];
  if (HWY_UNLIKELY(std::isnan(*row.x.sketch.sum))) {
    if (part.nan < 0) part.nan = static_cast<int32_t>(here.first + FirstNan(row.x, 0));
    return;
  }
  if (here.Holds(ask.target)) of.to.target[r] = Element(row.x, ask.target - here.first);
  if (target != nullptr && !RankIsCounted(ask)) {
    before = static_cast<int32_t>(CountBefore(row.x, *target, target_index));
  }
  part.before += before;
  if (ask.top_logprobs > 0) {
    uint64_t* const keys = of.keys + of.PartOf(r, cell.stretch) * of.shape.max_top;
    AddTop(row.x, here.first, ask.top_logprobs, keys, part.keys, scratch);
  }
  for (int32_t i = 0; i < ask.extra_count; ++i) {
    const int32_t id = of.extra_ids[ask.first_extra + i];
    if (!here.Holds(id)) continue;
    of.to.extra[r * of.shape.max_extra + i] = Element(row.x, id - here.first);
  }
}

void ReadCellOfRows(const LossShard& of, const LossCell& cell, LossThreadScratch& scratch) {
  for (int64_t r = cell.first_row; r < cell.first_row + cell.rows; ++r) {
    if (of.rows[r].active != 0) ReadCellOfRow(of, cell, r, scratch);
  }
}

void JoinStretchesOf(const LossShard& of, int64_t r, LossThreadScratch& scratch) {
  const CrossEntropyRow& ask = of.rows[r];
  uint64_t* const keys = scratch.keys.Get(of.stretches.count * int64_t{ask.top_logprobs});
  int64_t key_count = 0;
  int32_t before = 0;
  int32_t nan = -1;
  for (int s = 0; s < of.stretches.count; ++s) {
    const int64_t at = of.PartOf(r, s);
    const LossStretch& part = of.parts[at];
    if (nan < 0) nan = part.nan;
    before += part.before;
    if (part.keys > 0) std::copy_n(of.keys + at * of.shape.max_top, part.keys, keys + key_count);
    key_count += part.keys;
  }
  of.to.nan[r] = nan;
  if (RankIsWanted(ask)) of.to.before[r] = before;
  if (key_count == 0) return;
  scratch.list.sorter(keys, static_cast<size_t>(key_count), hwy::SortDescending());
  const int64_t top = std::min<int64_t>(ask.top_logprobs, key_count);
  std::copy_n(keys, top, of.to.keys + r * of.shape.keys());
}

// Writes the answers of row r from the blocks of all shards.
void AnswerMerged(const LinearCrossEntropyMergeArgs& args, int64_t r, LossThreadScratch& scratch) {
  const CrossEntropyRow& ask = args.cross_entropy.rows[r];
  const VocabShards& shards = args.shape.shards;
  LossRow row = {};
  row.vocab = shards.vocab;
  row.x = {.logits = nullptr,
           .dtype = DType::kF32,
           .vocab = shards.vocab,
           .temperature = ask.temperature,
           .sketch = SketchAt(scratch.row.x, 1, 0, shards.vocab)};
  row.total = scratch.row.total.Get(shards.cells());
  row.moment = scratch.row.moment.Get(shards.cells());
  LossTokens tokens;
  float* const extra = scratch.extra.Get(ask.extra_count);
  uint64_t* const keys = scratch.keys.Get(shards.count * int64_t{ask.top_logprobs});
  int64_t key_count = 0;
  int32_t nan = -1;
  for (int s = 0; s < shards.count; ++s) {
    const VocabShard shard = shards.at(s);
    if (shard.tokens == 0) break;
    const LossPartials from = args.shape.Of(args.blocks, s);
    const int64_t cells = shard.cells();
    const int64_t first = r * shards.most_cells();
    const int64_t to = shard.first / kCellElements;
    std::copy_n(from.max + first, cells, row.x.sketch.max + to);
    std::copy_n(from.sum + first, cells, row.x.sketch.sum + to);
    if (EffectiveSmoothing(ask, row.vocab) > 0) {
      std::copy_n(from.total + first, cells, row.total + to);
    }
    if ((ask.want & kWantEntropy) != 0) std::copy_n(from.moment + first, cells, row.moment + to);
    if (nan < 0) nan = from.nan[r];
    if (shard.Holds(ask.target)) tokens.target = from.target[r];
    if (RankIsWanted(ask)) tokens.before += from.before[r];
    const int64_t top = std::min<int64_t>(ask.top_logprobs, shard.tokens);
    if (top > 0) std::copy_n(from.keys + r * args.shape.keys(), top, keys + key_count);
    key_count += top;
    for (int32_t i = 0; i < ask.extra_count; ++i) {
      if (!shard.Holds(args.cross_entropy.extra_ids[ask.first_extra + i])) continue;
      extra[i] = from.extra[r * args.shape.max_extra + i];
    }
  }
  if (HWY_UNLIKELY(nan >= 0)) return AnswerNan(args.cross_entropy, r, nan);
  if (key_count > 0) {
    scratch.list.sorter(keys, static_cast<size_t>(key_count), hwy::SortDescending());
  }
  tokens.keys = keys;
  tokens.extra = extra;
  AnswerWhole(args.cross_entropy, r, row, FindPeak(row.x).max, tokens);
}

}  // namespace logitd::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace logitd::cpu {

HWY_EXPORT(ReadCells);
HWY_EXPORT(Answer);
HWY_EXPORT(ReadCellOfRows);
HWY_EXPORT(JoinStretchesOf);
HWY_EXPORT(AnswerMerged);

namespace {

LossThreadScratch& ScratchOfThisThread() {
  thread_local LossThreadScratch scratch;
  return scratch;
}

void ReadCellsOfRow(const CrossEntropyArgs& args, int64_t r, const LossRow& row, int64_t begin,
                    int64_t count) {
  const int64_t end = std::min(CellCount(args.logits.cols), begin + count);
  HWY_DYNAMIC_DISPATCH(ReadCells)(row, args.rows[r], begin, end, ScratchOfThisThread());
}

void AnswerRow(const CrossEntropyArgs& args, int64_t r, const LossRow& row) {
  HWY_DYNAMIC_DISPATCH(Answer)(args, r, row, ScratchOfThisThread());
}

}  // namespace

void CrossEntropyOfRow(const CrossEntropyArgs& args, int64_t r) {
  if (args.rows[r].active == 0) return;
  const LossRow row = LossRowAt(args, r, ScratchOfThisThread().row, 1, 0);
  const int64_t cells = CellCount(args.logits.cols);
  for (int64_t c = 0; c < cells; c += kItemCells) ReadCellsOfRow(args, r, row, c, kItemCells);
  AnswerRow(args, r, row);
}

void CrossEntropy(const CrossEntropyArgs& args, ThreadPool& pool, LossScratch& scratch) {
  const int64_t rows = args.logits.rows;
  const int64_t cells = CellCount(args.logits.cols);
  if (TakesWholeRows(rows, args.logits.cols, pool)) {
    ForWholeRows(rows, args.logits.cols, pool, [&](int64_t r) { CrossEntropyOfRow(args, r); });
    return;
  }
  // Sized here: no thread may grow memory that another reads.
  SketchAt(scratch.x, rows, 0, args.logits.cols);
  SketchAt(scratch.order, rows, 0, args.logits.cols);
  scratch.before.Get(rows * cells);
  scratch.total.Get(rows * cells);
  scratch.moment.Get(rows * cells);
  const int64_t at_once = ItemCells(rows * cells, pool.threads());
  const int64_t per_row = (cells + at_once - 1) / at_once;
  pool.ParallelFor(rows * per_row, [&](int64_t item) {
    const int64_t r = item / per_row;
    if (args.rows[r].active == 0) return;
    ReadCellsOfRow(args, r, LossRowAt(args, r, scratch, rows, r), item % per_row * at_once,
                   at_once);
  });
  pool.ParallelFor(rows, [&](int64_t r) {
    if (args.rows[r].active != 0) AnswerRow(args, r, LossRowAt(args, r, scratch, rows, r));
  });
}

void StartStretch(const LossShard& of, int stretch, int64_t first_row, int64_t rows) {
  for (int64_t r = first_row; r < first_row + rows; ++r) {
    of.parts[of.PartOf(r, stretch)] = {.nan = -1, .before = 0, .keys = 0};
  }
}

void ReadLossCell(const LossShard& of, const LossCell& cell) {
  HWY_DYNAMIC_DISPATCH(ReadCellOfRows)(of, cell, ScratchOfThisThread());
}

void JoinStretches(const LossShard& of, int64_t r) {
  if (of.rows[r].active == 0) return;
  HWY_DYNAMIC_DISPATCH(JoinStretchesOf)(of, r, ScratchOfThisThread());
}

void CrossEntropyMerge(const LinearCrossEntropyMergeArgs& args, ThreadPool& pool) {
  pool.ParallelFor(args.shape.rows, [&](int64_t r) {
    if (args.cross_entropy.rows[r].active == 0) return;
    HWY_DYNAMIC_DISPATCH(AnswerMerged)(args, r, ScratchOfThisThread());
  });
}

}  // namespace logitd::cpu
#endif  // HWY_ONCE
