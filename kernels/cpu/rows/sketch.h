// One streaming read of a row and what it leaves; shared by the ops that pick tokens.
//
// A row is cut into cells of 1024 elements. Per cell, while it is in L1: the maximum, the maxima of
// groups of 8 and of 1024 / lanes elements, then the sum of exp against the cell's own maximum.
// Cells are counted from the row's start and every step has one fixed order, so a row's bits do not
// depend on who computed which cell. The per-target code is in sketch-inl.h.
#ifndef LOGITD_KERNELS_CPU_ROWS_SKETCH_H_
#define LOGITD_KERNELS_CPU_ROWS_SKETCH_H_

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "kernels/cpu/rows/lanes.h"
#include "kernels/types.h"

namespace logitd::cpu {

// Elements of a row that one fixed code path reduces, counted from the row's start. A row's bits
// follow from its cells, so they do not depend on which threads computed them.
inline constexpr int64_t kCellElements = 1024;

// What one read of a row leaves. The group maxima bound the k-th largest logit from below.
struct RowSketch {
  float* max;     // [cells], the largest logit; +-inf possible
  float* sum;     // [cells], of exp((x - max) / temperature); the number of +inf where max is +inf;
                  // 0 where max is -inf; NaN where a logit is NaN
  float* coarse;  // [cells, SIMD lanes], maxima of kCellElements / lanes elements each
  float* fine;    // [cells, kCellElements / 8], maxima of 8 elements each
};

// A token, and where to count how many go before it by (logit descending, index ascending).
struct RankTarget {
  const void* logit = nullptr;  // of the row's type; null: nothing is counted
  int64_t index = 0;            // in the row, or outside it
  int32_t* before = nullptr;    // [cells]
};

// Memory of sketches.
struct SketchScratch {
  Buffer<float> max, sum, coarse, fine;
};

inline constexpr int64_t kFineGroup = 8;  // elements under one fine maximum
inline constexpr int64_t kFinePerCell = kCellElements / kFineGroup;

// exp((x - max) / temperature) is computed as 2^((x * kShrink - max * kShrink) *
// log2e_over_temperature). Shrinking first keeps the difference of any two floats finite. It costs
// nothing: it is a fused multiply-subtract.
inline constexpr float kShrink = 1.0f / 256;
struct Exponent {
  float log2e_over_temperature;      // divided by kShrink, high part
  float log2e_over_temperature_low;  // what rounding took from it; single probabilities use it
  // Two shrunk differences. A sum counts less than 2^-120 (`floor`) as 2^-120: so no subnormal is
  // ever computed, which takes a hundred times as long. A single probability below 2^-126
  // (`nothing`) is 0.
  float floor;
  float nothing;
};

inline Exponent MakeExponent(float temperature) {
  const double log2e_over_temperature =
      256 * 1.4426950408889634 / std::max(temperature, kLeastTemperature);
  Exponent e;
  e.log2e_over_temperature = static_cast<float>(log2e_over_temperature);
  e.log2e_over_temperature_low =
      static_cast<float>(log2e_over_temperature - e.log2e_over_temperature);
  e.floor = static_cast<float>(-120 / log2e_over_temperature);
  e.nothing = static_cast<float>(-126 / log2e_over_temperature);
  return e;
}

// Signed integers in the order of the floats; its own inverse. -0 comes right below +0.
// Without a branch, because no processor can predict the signs.
inline int32_t OrderedBits(int32_t bits) { return bits ^ ((bits >> 31) & 0x7fffffff); }

inline int32_t BitsOf(float x) {
  int32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits;
}

inline float FloatOf(int32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}

// Larger keys come first in the answer: larger logits, then lower indices. -0 becomes +0.
inline uint64_t MakeKey(float x, int64_t index) {
  const uint32_t order = static_cast<uint32_t>(OrderedBits(BitsOf(x + 0.0f))) ^ 0x80000000u;
  return uint64_t{order} << 32 | (0xffffffffu - static_cast<uint32_t>(index));
}
inline float KeyLogit(uint64_t key) {
  return FloatOf(OrderedBits(static_cast<int32_t>(static_cast<uint32_t>(key >> 32) ^ 0x80000000u)));
}
inline int32_t KeyIndex(uint64_t key) {
  return static_cast<int32_t>(0xffffffffu - static_cast<uint32_t>(key));
}

// The key of the same logit `by` tokens later.
inline uint64_t LaterKey(uint64_t key, int64_t by) { return key - static_cast<uint64_t>(by); }

inline int64_t CellCount(int64_t vocab) { return (vocab + kCellElements - 1) / kCellElements; }

// Cells of few rows handed to a thread at once: enough to hide the cost of taking them, few enough
// that every thread gets some and that they stay in L2. `cells` are those of all rows.
inline constexpr int64_t kMostItemCells = 32;
inline int64_t ItemCells(int64_t cells, int64_t threads) {
  constexpr int64_t kLeast = 8;
  return std::clamp(cells / (2 * threads), kLeast, kMostItemCells);
}

// How far ahead memory is prefetched. The hardware does not look across pages; of 0.5 to 8 KiB half
// a page was fastest. A prefetch after the row's end is harmless.
inline constexpr int64_t kAheadBytes = 2048;

// A row to sketch.
struct Row {
  const void* logits;
  DType dtype;
  int64_t vocab;
  float temperature;  // > 0
  RowSketch sketch;
};

// The sketch of row `slot` among `slots` in `scratch`, with room for whole vectors of cells.
inline RowSketch SketchAt(SketchScratch& scratch, int64_t slots, int64_t slot, int64_t vocab) {
  const int64_t cells = (CellCount(vocab) + kMaxLanes - 1) / kMaxLanes * kMaxLanes;
  return {.max = scratch.max.Get(slots * cells) + slot * cells,
          .sum = scratch.sum.Get(slots * cells) + slot * cells,
          .coarse = scratch.coarse.Get(slots * cells * kMaxLanes) + slot * cells * kMaxLanes,
          .fine = scratch.fine.Get(slots * cells * kFinePerCell) + slot * cells * kFinePerCell};
}

}  // namespace logitd::cpu

#endif  // LOGITD_KERNELS_CPU_ROWS_SKETCH_H_
