// divergence on the CPU: one read of both rows leaves six sums a cell, against the cell's own
// maxima, from which come all answers, in double precision.
//
//   read:    a pair of cells at a time: both maxima, then the sums out of L1. A cell with -inf,
//            with NaN, or with a number beyond f32 makes a sum NaN, and is summed again with care.
//   answer:  the cells' sums are brought to the rows' maxima in cell order. Rows with +inf are read
//            again, token by token.
//   tops:    softmax_topk reads an input whose top tokens are wanted once more.
//
// Cost at 64 x 131072 f32: reads 67 MB once, which is the floor; two exponentials and 12 further
// operations a pair of tokens. Limited by: arithmetic.
#include "kernels/cpu/loss/divergence.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <utility>

#include "kernels/cpu/rows/row_threads.h"
#include "kernels/cpu/rows/sketch.h"
#include "kernels/cpu/sampling/softmax_topk.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/loss/divergence.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/cpu/rows/sketch-inl.h"

HWY_BEFORE_NAMESPACE();
namespace logitd::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// The sums of one vector after another.
struct PairSums {
  VF x_sum, y_sum, x_moment, y_moment, x_apart, y_apart;
};

// e^a with a in units of ln 2; 0 below 2^-120, so that no subnormal is ever computed.
HWY_INLINE VF WeightOf(VF a) {
  const DF d;
  const VF least = hn::Set(d, -120.0f);
  const ExpFactors exp = ExpForSum(d, MaxOrSecond(a, least), hn::Set(d, 1.0f));
  return hn::IfThenElseZero(hn::Ge(a, least), hn::Mul(exp.rest, exp.power));
}

HWY_INLINE void AddPair(VF a, VF b, PairSums& to) {
  const VF x_weight = WeightOf(a), y_weight = WeightOf(b), apart = hn::Sub(a, b);
  to.x_sum = hn::Add(to.x_sum, x_weight);
  to.y_sum = hn::Add(to.y_sum, y_weight);
  to.x_moment = hn::MulAdd(x_weight, a, to.x_moment);
  to.y_moment = hn::MulAdd(y_weight, b, to.y_moment);
  to.x_apart = hn::MulAdd(x_weight, apart, to.x_apart);
  to.y_apart = hn::NegMulAdd(y_weight, apart, to.y_apart);
}

// Adds a pair of which a row may lack its token, as `has_x` and `has_y` say: a token that is not
// there adds nothing.
HWY_INLINE void AddPairWithCare(VF a, VF b, hn::Mask<DF> has_x, hn::Mask<DF> has_y, PairSums& to) {
  const VF x_weight = hn::IfThenElseZero(has_x, WeightOf(a));
  const VF y_weight = hn::IfThenElseZero(has_y, WeightOf(b));
  const VF zero = hn::Zero(DF());
  const auto x_counts = hn::Gt(x_weight, zero), y_counts = hn::Gt(y_weight, zero);
  const VF apart = hn::Sub(a, b);
  const auto add = [](VF sum, hn::Mask<DF> counts, VF weight, VF value) HWY_ATTR {
    return hn::IfThenElse(counts, hn::MulAdd(weight, value, sum), sum);
  };
  to.x_sum = hn::Add(to.x_sum, x_weight);
  to.y_sum = hn::Add(to.y_sum, y_weight);
  to.x_moment = add(to.x_moment, x_counts, x_weight, a);
  to.y_moment = add(to.y_moment, y_counts, y_weight, b);
  to.x_apart = add(to.x_apart, hn::And(x_counts, has_y), x_weight, apart);
  to.y_apart = add(to.y_apart, hn::And(y_counts, has_x), y_weight, hn::Neg(apart));
}

HWY_INLINE void AddSums(const PairSums& from, PairSums& to) {
  to.x_sum = hn::Add(to.x_sum, from.x_sum);
  to.y_sum = hn::Add(to.y_sum, from.y_sum);
  to.x_moment = hn::Add(to.x_moment, from.x_moment);
  to.y_moment = hn::Add(to.y_moment, from.y_moment);
  to.x_apart = hn::Add(to.x_apart, from.x_apart);
  to.y_apart = hn::Add(to.y_apart, from.y_apart);
}

HWY_INLINE PairSums NoSums() {
  const VF zero = hn::Zero(DF());
  return {zero, zero, zero, zero, zero, zero};
}

HWY_INLINE float Total(VF sum) { return hn::GetLane(hn::SumOfLanes(DF(), sum)); }

// Elements that are added up on their own first: so sums stay exact where vectors are short.
inline constexpr int64_t kBlock = 128;

// Sums a pair of cells against their maxima, which are given.
template <bool kCareful, typename T>
DivergenceCell SumCells(const T* HWY_RESTRICT x, const T* HWY_RESTRICT y, const DivergenceRow& ask,
                        float x_max, float y_max) {
  const DF d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  const VF zero = hn::Zero(d), minus_inf = hn::Set(d, -kInf);
  const VF x_scale = hn::Set(d, DivergenceScale(ask.temperature));
  const VF y_scale = hn::Set(d, DivergenceScale(ask.reference_temperature));
  // Any base serves a cell without tokens.
  const VF x_base = hn::Set(d, kCareful && x_max == -kInf ? 0 : x_max);
  const VF y_base = hn::Set(d, kCareful && y_max == -kInf ? 0 : y_max);
  auto only_x = hn::Lt(zero, zero), only_y = only_x, is_nan = only_x, is_certain = only_x;
  PairSums all = NoSums();
  PairSums sums[2] = {all, all};
  for (int64_t i = 0; i < kCellElements; i += 2 * lanes) {
    if (i % kBlock == 0) {
      for (PairSums& part : sums) AddSums(std::exchange(part, NoSums()), all);
    }
    VF vx[2], vy[2];
    LoadTwo(d, x + i, vx[0], vx[1]);
    LoadTwo(d, y + i, vy[0], vy[1]);
    for (int u = 0; u < 2; ++u) {
      const VF a = hn::Mul(hn::Sub(vx[u], x_base), x_scale);
      const VF b = hn::Mul(hn::Sub(vy[u], y_base), y_scale);
      if constexpr (kCareful) {
        const auto has_x = hn::Gt(vx[u], minus_inf), has_y = hn::Gt(vy[u], minus_inf);
        const VF inf = hn::Set(d, kInf);
        only_x = hn::Or(only_x, hn::AndNot(has_y, has_x));
        only_y = hn::Or(only_y, hn::AndNot(has_x, has_y));
        is_nan = hn::Or(is_nan, hn::Or(hn::IsNaN(vx[u]), hn::IsNaN(vy[u])));
        is_certain = hn::Or(is_certain, hn::Or(hn::Eq(vx[u], inf), hn::Eq(vy[u], inf)));
        // Logits of a cell that are more than f32's largest number apart.
        const VF x_below = hn::Sub(vx[u], x_base), y_below = hn::Sub(vy[u], y_base);
        is_certain = hn::Or(is_certain, hn::And(has_x, hn::Eq(x_below, minus_inf)));
        is_certain = hn::Or(is_certain, hn::And(has_y, hn::Eq(y_below, minus_inf)));
        AddPairWithCare(a, b, has_x, has_y, sums[u]);
      } else {
        AddPair(a, b, sums[u]);
      }
    }
  }
  for (const PairSums& part : sums) AddSums(part, all);
  DivergenceCell cell = {.x_max = x_max,
                         .y_max = y_max,
                         .x_sum = Total(all.x_sum),
                         .y_sum = Total(all.y_sum),
                         .x_moment = Total(all.x_moment),
                         .y_moment = Total(all.y_moment),
                         .x_apart = Total(all.x_apart),
                         .y_apart = Total(all.y_apart),
                         .found = 0};
  if (kCareful) {
    cell.found = (hn::AllFalse(d, only_x) ? 0 : kDivergenceOnlyX) |
                 (hn::AllFalse(d, only_y) ? 0 : kDivergenceOnlyY) |
                 (hn::AllFalse(d, is_nan) ? 0 : kDivergenceNan) |
                 (hn::AllFalse(d, is_certain) ? 0 : kDivergenceCertain);
  }
  return cell;
}

template <typename T>
float CellMax(const T* cell) {
  const DF d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  VF most[2] = {hn::Set(d, -kInf), hn::Set(d, -kInf)};
  for (int64_t i = 0; i < kCellElements; i += 2 * lanes) {
    VF v[2];
    LoadTwo(d, cell + i, v[0], v[1]);
    for (int u = 0; u < 2; ++u) most[u] = MaxOrSecond(v[u], most[u]);  // a NaN stays out
  }
  return hn::GetLane(hn::MaxOfLanes(d, hn::Max(most[0], most[1])));
}

// Reads cells [begin, end) of row r.
inline void ReadPairs(const DivergenceArgs& args, int64_t r, int64_t begin, int64_t end,
                      DivergenceCell* cells) {
  AsType(args.logits.dtype, RowData(args.logits, r), [&](const auto* x) {
    using T = std::remove_cv_t<std::remove_pointer_t<decltype(x)>>;
    const auto* y = reinterpret_cast<const T*>(RowData(args.reference_logits, r));
    HWY_ALIGN T x_padded[kCellElements];
    HWY_ALIGN T y_padded[kCellElements];
    for (int64_t c = begin; c < end; ++c) {
      const T* x_cell = CellAt(x, args.logits.cols, c, x_padded);
      const T* y_cell = CellAt(y, args.logits.cols, c, y_padded);
      const float x_max = CellMax(x_cell), y_max = CellMax(y_cell);
      cells[c] = SumCells<false>(x_cell, y_cell, args.rows[r], x_max, y_max);
      const float all = cells[c].x_moment + cells[c].y_moment + cells[c].x_apart + cells[c].y_apart;
      if (HWY_UNLIKELY(!std::isfinite(all))) {
        cells[c] = SumCells<true>(x_cell, y_cell, args.rows[r], x_max, y_max);
      }
    }
  });
}

// Writes the log-probabilities of row r's top tokens, whose ids are there.
inline void AnswerTops(const DivergenceArgs& args, const DivergenceTops& tops, int64_t r) {
  const TensorView& of =
      tops.input == DivergenceInput::kFirst ? args.logits : args.reference_logits;
  const Row row = {.logits = RowData(of, r),
                   .dtype = of.dtype,
                   .vocab = of.cols,
                   .temperature = 1,
                   .sketch = {}};
  const SoftmaxTopKRow ask = tops.Ask(args.rows[r]);
  for (int64_t i = ask.first_entry; i < ask.first_entry + ask.k; ++i) {
    if (args.answers.status[r].code == RowCode::kNanLogit) {
      tops.WriteNan(i);
    } else {
      tops.Write(i, Element(row, tops.ids[i]), args.rows[r], args.answers.norms[r]);
    }
  }
}

// Writes the answers of row r, whose cells are read.
inline void AnswerPair(const DivergenceArgs& args, int64_t r, const DivergenceCell* cells) {
  const DivergenceRow& ask = args.rows[r];
  const int64_t vocab = args.logits.cols, count = CellCount(vocab);
  const auto row_of = [&](const TensorView& of) {
    return Row{.logits = RowData(of, r),
               .dtype = of.dtype,
               .vocab = vocab,
               .temperature = 1,
               .sketch = {}};
  };
  const Row x = row_of(args.logits), y = row_of(args.reference_logits);
  DivergenceRows rows = {.x_max = -kInf, .y_max = -kInf};
  for (int64_t c = 0; c < count; ++c) {
    if ((cells[c].found & kDivergenceNan) != 0) {
      const int32_t in_x = FirstNan(x, c), in_y = FirstNan(y, c);
      const bool both = in_x >= 0 && in_y >= 0;
      return AnswerNan(args.answers, r, both ? std::min(in_x, in_y) : std::max(in_x, in_y));
    }
    rows.x_max = std::max(rows.x_max, cells[c].x_max);
    rows.y_max = std::max(rows.y_max, cells[c].y_max);
  }
  const auto a_of = [&](float logit) { return BelowMax(logit, rows.x_max, ask.temperature); };
  const auto b_of = [&](float logit) {
    return BelowMax(logit, rows.y_max, ask.reference_temperature);
  };
  DivergenceSums sums;
  for (int64_t c = 0; c < count; ++c) {
    const double a = a_of(cells[c].x_max), b = b_of(cells[c].y_max);
    AddCell(sums, cells[c], a, b, std::exp(a), std::exp(b));
  }
  if (HWY_UNLIKELY(NeedsTokens(sums))) {
    sums = {};
    for (int64_t i = 0; i < vocab; ++i) {
      const double a = a_of(Element(x, i)), b = b_of(Element(y, i));
      AddToken(sums, a, b, std::exp(a), std::exp(b));
    }
  }
  rows.x_log = std::log(sums.x_sum);
  rows.y_log = std::log(sums.y_sum);
  if (ask.target != kIgnoredTarget) {
    rows.x_target = a_of(Element(x, ask.target));
    rows.y_target = b_of(Element(y, ask.target));
  }
  AnswerWhole(args.answers, r, ask, sums, rows);
}

}  // namespace logitd::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace logitd::cpu {

HWY_EXPORT(ReadPairs);
HWY_EXPORT(AnswerPair);
HWY_EXPORT(AnswerTops);

namespace {

// Everything except the top tokens.
void Measure(const DivergenceArgs& args, ThreadPool& pool, DivergenceScratch& scratch) {
  const int64_t rows = args.logits.rows, vocab = args.logits.cols;
  const int64_t per_row = CellCount(vocab);
  DivergenceCell* const cells = scratch.cells.Get(rows * per_row);
  const auto read = [&](int64_t r, int64_t begin, int64_t end) {
    if (args.rows[r].active == 0) return;
    HWY_DYNAMIC_DISPATCH(ReadPairs)(args, r, begin, end, cells + r * per_row);
  };
  const auto answer = [&](int64_t r) {
    if (args.rows[r].active == 0) return;
    HWY_DYNAMIC_DISPATCH(AnswerPair)(args, r, cells + r * per_row);
  };
  if (TakesWholeRows(rows, vocab, pool)) {
    ForWholeRows(rows, vocab, pool, [&](int64_t r) {
      read(r, 0, per_row);
      answer(r);
    });
    return;
  }
  ForCells(rows, vocab, pool, read);
  pool.ParallelFor(rows, answer);
}

// Writes the top tokens of one input, after Measure.
void FindTops(const DivergenceArgs& args, DivergenceInput input, ThreadPool& pool,
              DivergenceScratch& scratch) {
  const DivergenceTops tops = DivergenceTops::Of(args, input);
  if (tops.max_k == 0) return;
  const int64_t rows = args.logits.rows;
  SoftmaxTopKRow* const asks = scratch.top_rows.Get(rows);
  for (int64_t r = 0; r < rows; ++r) asks[r] = tops.Ask(args.rows[r]);
  SoftmaxTopK({.logits = input == DivergenceInput::kFirst ? args.logits : args.reference_logits,
               .rows = asks,
               .max_k = tops.max_k,
               .indices = tops.ids,
               .probs = tops.logprobs,
               .logsumexp = scratch.top_logsumexp.Get(rows),
               .status = scratch.top_status.Get(rows)},
              pool, scratch.topk);
  pool.ParallelFor(rows, [&](int64_t r) { HWY_DYNAMIC_DISPATCH(AnswerTops)(args, tops, r); });
}

}  // namespace

void Divergence(const DivergenceArgs& args, ThreadPool& pool, DivergenceScratch& scratch) {
  DivergenceArgs with_norms = args;
  if (WantsTops(args) && args.answers.norms == nullptr)
    with_norms.answers.norms = scratch.norms.Get(args.logits.rows);
  Measure(with_norms, pool, scratch);
  for (const auto input : {DivergenceInput::kFirst, DivergenceInput::kReference})
    FindTops(with_norms, input, pool, scratch);
}

}  // namespace logitd::cpu
#endif  // HWY_ONCE
