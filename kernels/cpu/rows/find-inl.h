// Tokens found again in a finished sketch (sketch-inl.h), few of them, one by one.
//
//   bound:  the k-th largest group maximum is a lower bound of the k-th largest logit, as each
//           group holds a logit that large. It is found by bisection over the maxima. No row is
//           slow: fewer than k groups are above an exact bound, whatever the order of the values.
//   pick:   groups that reach the bound are read again. Their logits above it, and the first k
//           equal to it, become 64-bit keys (order of the value, then of the index).
#if defined(LOGITD_KERNELS_CPU_ROWS_FIND_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef LOGITD_KERNELS_CPU_ROWS_FIND_INL_H_
#undef LOGITD_KERNELS_CPU_ROWS_FIND_INL_H_
#else
#define LOGITD_KERNELS_CPU_ROWS_FIND_INL_H_
#endif

#include <algorithm>
#include <cstring>
#include <functional>

#include "hwy/highway.h"
#include "kernels/cpu/rows/key_sorter.h"
#include "kernels/cpu/rows/row_threads.h"
#include "kernels/cpu/rows/sketch-inl.h"

HWY_BEFORE_NAMESPACE();
namespace logitd::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// A value that at least k of maxima[0, count) reach, and few more than k unless there are ties.
// count >= k is a multiple of the lanes. `top` is the largest maximum.
inline float Bound(const float* maxima, int64_t count, int64_t k, float top) {
  const DF d;
  const DI di;
  const int64_t lanes = hn::Lanes(d);
  const int64_t enough = k + k / 8;
  int64_t low = OrderedBits(BitsOf(-kInf));              // reached by all
  int64_t high = int64_t{OrderedBits(BitsOf(top))} + 1;  // reached by too few
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    const VF value = hn::Set(d, FloatOf(OrderedBits(static_cast<int32_t>(middle))));
    auto minus_reached = hn::Zero(di);
    for (int64_t i = 0; i < count; i += lanes) {
      const auto reaches = hn::Ge(hn::LoadU(d, maxima + i), value);
      minus_reached = hn::Add(minus_reached, hn::BitCast(di, hn::VecFromMask(d, reaches)));
    }
    const int64_t reached = -int64_t{hn::GetLane(hn::SumOfLanes(di, minus_reached))};
    if (reached < k) {
      high = middle;
      continue;
    }
    low = middle;
    if (reached <= enough) break;
  }
  return FloatOf(OrderedBits(static_cast<int32_t>(low)));
}

// Keys of all logits above `bound` and of the first k equal to it. Returns how many; k or more.
template <typename T>
int64_t PickTyped(const T* logits, const Row& row, float bound, int64_t k, uint64_t* keys) {
  const DF d;
  const int64_t lanes = hn::Lanes(d);
  const VF vbound = hn::Set(d, bound);
  const int64_t cells = CellCount(row.vocab);
  HWY_ALIGN T padded[kCellElements];
  HWY_ALIGN float values[kMaxLanes];
  uint8_t bits[8] = {};
  int64_t count = 0;
  int64_t ties_left = k;
  for (int64_t c = 0; c < cells; ++c) {
    if (ties_left > 0 ? row.sketch.max[c] < bound : row.sketch.max[c] <= bound) continue;
    const T* cell = CellAt(logits, row.vocab, c, padded);
    const float* fine = row.sketch.fine + c * kFinePerCell;
    for (int64_t i = 0; i < kCellElements; i += kFineGroup * lanes) {
      const VF group = hn::LoadU(d, fine + i / kFineGroup);
      if (hn::AllFalse(d, ties_left > 0 ? hn::Ge(group, vbound) : hn::Gt(group, vbound))) continue;
      for (int64_t j = i; j < i + kFineGroup * lanes; j += lanes) {
        const VF x = LoadF32(d, cell + j);
        const auto hit = ties_left > 0 ? hn::Ge(x, vbound) : hn::Gt(x, vbound);
        hn::StoreMaskBits(d, hit, bits);
        uint32_t left;
        std::memcpy(&left, bits, sizeof(left));
        if (left == 0) continue;
        hn::StoreU(x, d, values);
        for (; left != 0; left &= left - 1) {
          const int lane = hwy::Num0BitsBelowLS1Bit_Nonzero32(left);
          const int64_t index = c * kCellElements + j + lane;
          if (index >= row.vocab) return count;  // padding, which reaches a bound of -inf
          if (values[lane] == bound && ties_left-- <= 0) continue;
          keys[count++] = MakeKey(values[lane], index);
        }
      }
    }
  }
  return count;
}

inline int64_t Pick(const Row& row, float bound, int64_t k, uint64_t* keys) {
  return AsType(row.dtype, row.logits,
                [&](const auto* logits) { return PickTyped(logits, row, bound, k, keys); });
}

// Tokens of cells [begin, end) before (x, index) by (logit descending, index ascending).
template <typename T>
int64_t CountBeforeTyped(const T* logits, const Row& row, int64_t begin, int64_t end, float x,
                         int64_t index) {
  const DF d;
  const int64_t lanes = hn::Lanes(d);
  const VF vx = hn::Set(d, x);
  HWY_ALIGN T padded[kCellElements];
  int64_t before = 0;
  for (int64_t c = begin; c < end; ++c) {
    if (row.sketch.max[c] < x) continue;
    const T* cell = CellAt(logits, row.vocab, c, padded);
    const float* fine = row.sketch.fine + c * kFinePerCell;
    for (int64_t i = 0; i < kCellElements; i += kFineGroup * lanes) {
      if (hn::AllFalse(d, hn::Ge(hn::LoadU(d, fine + i / kFineGroup), vx))) continue;
      for (int64_t j = i; j < i + kFineGroup * lanes; j += lanes) {
        const VF v = LoadF32(d, cell + j);
        before += static_cast<int64_t>(hn::CountTrue(d, hn::Gt(v, vx)));
        const int64_t lower = index - (c * kCellElements + j);  // lanes with a lower index
        if (lower <= 0) continue;
        const auto ties =
            hn::And(hn::Eq(v, vx), hn::FirstN(d, static_cast<size_t>(std::min(lower, lanes))));
        before += static_cast<int64_t>(hn::CountTrue(d, ties));
      }
    }
  }
  return before;
}

inline int64_t CountBeforeIn(const Row& row, int64_t begin, int64_t end, float x, int64_t index) {
  return AsType(row.dtype, row.logits, [&](const auto* logits) {
    return CountBeforeTyped(logits, row, begin, end, x, index);
  });
}

// About how many cells' worth of tokens has to be read for CountBefore.
inline int64_t CellsBefore(const Row& row, float x) {
  const DF d;
  const int64_t lanes = hn::Lanes(d);
  const VF vx = hn::Set(d, x);
  int64_t groups = 0;
  for (int64_t c = 0; c < CellCount(row.vocab); ++c) {
    const VF group = hn::LoadU(d, row.sketch.coarse + c * lanes);
    groups += static_cast<int64_t>(hn::CountTrue(d, hn::Ge(group, vx)));
  }
  return groups / lanes;
}

// How many tokens of the row go before (x, index).
inline int64_t CountBefore(const Row& row, float x, int64_t index, const RowThreads& threads = {}) {
  const RowPieces pieces = threads.Cut(row.vocab);
  if (pieces.count == 1 || CellsBefore(row, x) < kLeastCutCells) {
    return CountBeforeIn(row, 0, pieces.cells, x, index);
  }
  int64_t before[kMostPieces];
  threads.For(pieces.count, [&](int64_t p) {
    before[p] = CountBeforeIn(row, pieces.begin(p), pieces.end(p), x, index);
  });
  int64_t total = 0;
  for (int64_t p = 0; p < pieces.count; ++p) total += before[p];
  return total;
}

// A lower bound of the k-th largest logit; `max` is the largest. Coarse maxima give one for a
// fraction of the work, where there are enough of them. Where the fine ones are too few, the bound
// is -inf, which every logit reaches.
inline float BoundOf(const Row& row, int64_t k, float max) {
  const int64_t cells = CellCount(row.vocab);
  if (const int64_t maxima = cells * hn::Lanes(DF()); k + k / 2 <= maxima) {
    return Bound(row.sketch.coarse, maxima, k, max);
  }
  if (const int64_t maxima = cells * kFinePerCell; k + k / 8 <= maxima) {
    return Bound(row.sketch.fine, maxima, k, max);
  }
  return -kInf;
}

// Writes the keys of the first k logits >= `bound`, in order. `keys` has room for the whole row.
// Returns how many there are: k, or fewer where `bound` leaves fewer. Takes long where it leaves
// many more.
inline int64_t TopKeysFrom(const Row& row, int64_t k, float bound, uint64_t* keys,
                           const KeySorter& sorter) {
  int64_t count = Pick(row, bound, k, keys);
  if (count > 2 * k + 128) {
    std::nth_element(keys, keys + k, keys + count, std::greater<>());
    count = k;
  }
  sorter(keys, static_cast<size_t>(count), hwy::SortDescending());
  return std::min(count, k);
}

}  // namespace logitd::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // LOGITD_KERNELS_CPU_ROWS_FIND_INL_H_
