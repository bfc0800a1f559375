// sample, draw: a token from the list that the filters left, or from the whole row: then a cell by
// the sketch's sums, and a token of that cell.
#if defined(LOGITD_KERNELS_CPU_SAMPLING_DRAW_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef LOGITD_KERNELS_CPU_SAMPLING_DRAW_INL_H_
#undef LOGITD_KERNELS_CPU_SAMPLING_DRAW_INL_H_
#else
#define LOGITD_KERNELS_CPU_SAMPLING_DRAW_INL_H_
#endif

#include <algorithm>
#include <cmath>

#include "absl/types/span.h"
#include "hwy/highway.h"
#include "kernels/cpu/rows/sketch-inl.h"
#include "kernels/cpu/sampling/filter-inl.h"
#include "kernels/cpu/sampling/sample_row.h"
#include "kernels/cpu/sampling/watermark-inl.h"

HWY_BEFORE_NAMESPACE();
namespace logitd::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

struct Drawn {
  int32_t token;
  Support support;
};

// The entry of a list at which the mass, by index, exceeds `target`, which is less than the total.
inline int32_t TokenAt(const Candidates& from, const uint64_t* blocks, uint64_t target) {
  const TokenList& list = from.list;
  uint64_t mass = 0;
  for (int64_t p = 0; p < list.pieces; ++p) {
    for (int64_t i = 0; i < list.counts[p]; i += kBlockEntries) {
      const uint64_t block = blocks[p * list.BlocksPerPiece() + i / kBlockEntries];
      if (mass + block <= target) {
        mass += block;
        continue;
      }
      while ((mass += from.Weight(p, i)) <= target) ++i;
      return KeyIndex(list.KeysOf(p)[i]);
    }
  }
  HWY_ABORT("a draw's target is beyond the total");
}

// The random bits of draw `draw` of the row.
inline uint64_t BitsOfDraw(const SampleRow& ask, int64_t draw) {
  return UniformBits(ask.seed, ask.position, static_cast<uint32_t>(draw));
}

// Writes the token of each draw; there is one or more.
inline Support DrawListed(const Candidates& from, const SampleRow& ask, float max,
                          const RowThreads& threads, ListScratch& scratch,
                          absl::Span<int32_t> tokens) {
  const uint64_t total = TotalOf(from, threads, scratch);
  const uint64_t* const blocks = scratch.blocks.Get(0);
  for (size_t j = 0; j < tokens.size(); ++j)
    tokens[j] = TokenAt(from, blocks, DrawTarget(BitsOfDraw(ask, j), total));
  return from.SupportOf(total, max, ActingTemperature(ask));
}

// The weights of cell c against the cell's own maximum.
template <typename T>
void CellWeights(const T* logits, const Row& row, int64_t c, const Exponent& e, float* weights) {
  const DF d;
  HWY_ALIGN T padded[kCellElements];
  const T* cell = CellAt(logits, row.vocab, c, padded);
  for (int64_t i = 0; i < kCellElements; i += hn::Lanes(d)) {
    hn::Store(LoadF32(d, cell + i), d, weights + i);
  }
  Exponentials(weights, kCellElements, row.sketch.max[c], e);
}

// The token at which the mass of the row, whose sums by cells are `prefix`, exceeds `reach`.
inline int32_t TokenOfCells(const Row& row, const double* prefix, const Exponent& e, double reach) {
  // It is less than the total, so some cell's prefix exceeds it, and the first that does has mass.
  int64_t c = 0;
  while (prefix[c] <= reach) ++c;
  const double before = c == 0 ? 0 : prefix[c - 1];

  HWY_ALIGN float weights[kCellElements];
  AsType(row.dtype, row.logits,
         [&](const auto* logits) { CellWeights(logits, row, c, e, weights); });
  const uint64_t sum = FixedSum(weights, kCellElements);
  const uint64_t target = TargetInCell((reach - before) / (prefix[c] - before), sum);
  uint64_t mass = 0;
  int64_t i = -1;
  while (mass <= target) mass += FixedWeight(weights[++i]);
  return static_cast<int32_t>(c * kCellElements + i);
}

// Draws from the whole row: a cell, then a token of it. The sketch is at the row's temperature.
// Writes the token of each draw.
inline Support DrawUnfiltered(const Row& row, const SampleRow& ask, float max,
                              SampleScratch& scratch, absl::Span<int32_t> tokens) {
  const Exponent e = MakeExponent(ask.temperature);
  const double total = CellPrefix(row, max, e, scratch);
  const double* const prefix = scratch.prefix.Get(0);
  for (size_t j = 0; j < tokens.size(); ++j)
    tokens[j] = TokenOfCells(row, prefix, e, UnitOf(BitsOfDraw(ask, j)) * total);
  return {.last = kLowestKey,
          .max = max,
          .temperature = ActingTemperature(ask),
          .log_sum = std::log(total)};
}

// The highest logit, the lowest index of equals.
inline Drawn DrawGreedy(const Row& row, float max) {
  uint64_t key = kLowestKey;
  Pick(row, max, 1, &key);
  return {.token = KeyIndex(key),
          .support = {.last = key, .max = max, .temperature = 1, .log_sum = 0}};
}

// A token of the row, whose maximum after edits is `max`. The tokens of a row with draws stay in
// scratch.draws. `history` has the tokens of all rows.
inline Drawn Draw(const Row& row, const SampleRow& ask, const int32_t* history, float max,
                  const RowThreads& threads, SampleScratch& scratch) {
  const int64_t count = std::max(1, ask.draws);
  const absl::Span<int32_t> tokens(scratch.draws.Get(count), count);
  if (IsGreedy(ask)) {
    const Drawn drawn = DrawGreedy(row, max);
    std::fill(tokens.begin(), tokens.end(), drawn.token);
    return drawn;
  }
  const Support support = IsFiltered(ask, row.vocab)
                              ? DrawListed(ListFiltered(row, ask, max, threads, scratch), ask, max,
                                           threads, scratch.list, tokens)
                              : DrawUnfiltered(row, ask, max, scratch, tokens);
  if (MarkIsOn(ask)) tokens[0] = DrawMarked(row, ask, history, support, threads);
  return {.token = tokens[0], .support = support};
}

}  // namespace logitd::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
