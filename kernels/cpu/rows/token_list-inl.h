// Tokens found again in a finished sketch (sketch-inl.h), many of them, a vector at a time, by one
// thread or by pieces on several.
//
//   list:   the tokens whose logits reach a bound, by index, with or without weights.
//   narrow: the key that ends the shortest prefix, by descending key, with some count or mass. A
//           histogram over the keys' leading bits finds the bin that holds it; the next histogram
//           is over that bin's members. So nothing is sorted but the last few.
//   top:    the first k, sorted: pieces share out their tokens by value, and each range of values
//           is sorted by itself.
//
// Cost of a token, with 16 lanes: 0.7 ns to list it, 1.0 with its weight, about 1 in a histogram of
// masses, 5 to sort it. A step in pieces waits about 4 us for threads to wake.
//
// Limited by: scalar integer sums for a mass; by the sort for a large K.
//
// Measured: bench/results/cpu/one_row.json, two cores: K = 20000 of one row of 131072 f32 248 us
// (before, a sort of all tokens by one thread, 1412), a flat top-p 341 (713), min_p 76 (258): 9%,
// 6% and 32% of a bare read.
//
// Tried and dropped: keys compressed as 64-bit lanes (1.7 times as long for a flat row); K = 1024
// in pieces (1.4 times as long for 50257 logits, and a list of it 1.4 times as long as one by one).
#if defined(LOGITD_KERNELS_CPU_ROWS_TOKEN_LIST_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef LOGITD_KERNELS_CPU_ROWS_TOKEN_LIST_INL_H_
#undef LOGITD_KERNELS_CPU_ROWS_TOKEN_LIST_INL_H_
#else
#define LOGITD_KERNELS_CPU_ROWS_TOKEN_LIST_INL_H_
#endif

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>

#include "hwy/highway.h"
#include "kernels/cpu/rows/find-inl.h"
#include "kernels/cpu/rows/sketch-inl.h"
#include "kernels/cpu/rows/token_list.h"

HWY_BEFORE_NAMESPACE();
namespace logitd::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using D64 = hn::CappedTag<uint64_t, kMaxLanes / 2>;

// ---- List

// What is listed: logits >= least, which may be -inf. After `most` tokens a piece takes none that
// only equals `least`: so many are before it.
struct Listed {
  float least;
  int64_t most = std::numeric_limits<int64_t>::max();
};

// Writes the keys of `count` logits, which are not -0, and of their indices: whole vectors of keys.
HWY_INLINE void MakeKeys(const float* x, const uint32_t* index, int64_t count, uint64_t* to) {
  const D64 d64;
  const hn::Rebind<uint32_t, D64> du;
  const hn::Rebind<int32_t, D64> di;
  const auto sign = hn::Set(du, 0x80000000u);
  for (int64_t i = 0; i < count; i += hn::Lanes(d64)) {
    // MakeKey, lane by lane.
    const auto bits = hn::BitCast(di, hn::Load(hn::Rebind<float, D64>(), x + i));
    const auto negative = hn::BitCast(du, hn::BroadcastSignBit(bits));
    const auto order = hn::Xor(hn::BitCast(du, bits), hn::Or(negative, sign));
    const auto later = hn::Not(hn::Load(du, index + i));
    hn::StoreU(hn::Or(hn::ShiftLeft<32>(hn::PromoteTo(d64, order)), hn::PromoteTo(d64, later)), d64,
               to + i);
  }
}

// Lists tokens of cells [begin, end); with kValues their logits too. Returns how many there are.
template <bool kValues, typename T>
int64_t ListTyped(const T* logits, const Row& row, const Listed& listed, int64_t begin, int64_t end,
                  uint64_t* keys, float* values) {
  const DF d;
  const int64_t lanes = hn::Lanes(d);
  const VF vleast = hn::Set(d, listed.least);
  HWY_ALIGN T padded[kCellElements];
  HWY_ALIGN float hits[kMaxLanes];
  HWY_ALIGN uint32_t indices[kMaxLanes];
  const hn::RebindToUnsigned<DF> du;
  int64_t count = 0;
  for (int64_t c = begin; c < end; ++c) {
    if (row.sketch.max[c] < listed.least) continue;
    const bool ties = count < listed.most;
    const T* cell = CellAt(logits, row.vocab, c, padded);
    const float* fine = row.sketch.fine + c * kFinePerCell;
    for (int64_t i = 0; i < kCellElements; i += kFineGroup * lanes) {
      if (hn::AllFalse(d, hn::Ge(hn::LoadU(d, fine + i / kFineGroup), vleast))) continue;
      for (int64_t j = i; j < i + kFineGroup * lanes; j += lanes) {
        // Adding 0 makes +0 of -0.
        const VF x = hn::Add(LoadF32(d, cell + j), hn::Zero(d));
        const auto hit = ties ? hn::Ge(x, vleast) : hn::Gt(x, vleast);
        if (hn::AllFalse(d, hit)) continue;
        const auto index = hn::Iota(du, static_cast<uint32_t>(c * kCellElements + j));
        const VF found = hn::AllTrue(d, hit) ? x : hn::Compress(x, hit);
        hn::Store(found, d, hits);
        hn::Store(hn::AllTrue(d, hit) ? index : hn::Compress(index, hn::RebindMask(du, hit)), du,
                  indices);
        const auto found_count = static_cast<int64_t>(hn::CountTrue(d, hit));
        if constexpr (kValues) hn::StoreU(found, d, values + count);
        MakeKeys(hits, indices, found_count, keys + count);
        count += found_count;
      }
    }
  }
  // The last cell's padding reaches a bound of -inf.
  while (count > 0 && KeyIndex(keys[count - 1]) >= row.vocab) --count;
  return count;
}

// ---- Weights

// Turns `count` values into exp((x - max) / temperature), in place; there is room for a vector
// more. Where max is +inf, +inf has weight 1 and all else 0.
inline void Exponentials(float* values, int64_t count, float max, const Exponent& e) {
  const DF d;
  if (max == kInf) {
    for (int64_t i = 0; i < count; ++i) values[i] = values[i] == kInf ? 1.0f : 0.0f;
    return;
  }
  const VF vmax = hn::Set(d, max);
  for (int64_t i = 0; i < count; i += hn::Lanes(d)) {
    hn::StoreU(PreciseExp(d, hn::LoadU(d, values + i), vmax, e), d, values + i);
  }
}

// What a token counts for where tokens are narrowed: its weight.
struct MassOfWeights {
  static constexpr bool kWeighs = true;
  float max;
  Exponent e;

  // Turns logits into their weights. There is room for a vector more, here and below.
  void WeighValues(float* values, int64_t count) const {
    std::fill_n(values + count, kMaxLanes, -kInf);
    Exponentials(values, count, max, e);
  }
  void Weigh(const uint64_t* keys, int64_t count, float* weights) const {
    for (int64_t i = 0; i < count; ++i) weights[i] = KeyLogit(keys[i]);
    WeighValues(weights, count);
  }
  static uint64_t Of(const float* weights, int64_t i) { return FixedWeight(weights[i]); }
};

// Every token counts as 1.
struct MassOfOnes {
  static constexpr bool kWeighs = false;
  void WeighValues(float*, int64_t) const {}
  void Weigh(const uint64_t*, int64_t, float*) const {}
  static uint64_t Of(const float*, int64_t) { return 1; }
};

// Lists tokens of the row, with weights if the mass has them.
template <class Mass>
TokenList ListTokens(const Row& row, const Listed& listed, const Mass& mass,
                     const RowThreads& threads, ListScratch& scratch) {
  const RowPieces pieces = threads.Cut(row.vocab);
  TokenList list;
  list.stride = pieces.per_piece * kCellElements + kMaxLanes;
  list.pieces = pieces.count;
  list.keys = scratch.keys.Get(list.pieces * list.stride);
  list.weights = Mass::kWeighs ? scratch.weights.Get(list.pieces * list.stride) : nullptr;
  threads.For(pieces.count, [&](int64_t p) {
    float* const weights = list.WeightsOf(p);
    list.counts[p] = AsType(row.dtype, row.logits, [&](const auto* logits) {
      return ListTyped<Mass::kWeighs>(logits, row, listed, pieces.begin(p), pieces.end(p),
                                      list.KeysOf(p), weights);
    });
    mass.WeighValues(weights, list.counts[p]);
  });
  return list;
}

// The mass of those of `count` entries whose keys are `last` or more; there is room for a vector
// more. The same integers as FixedWeight's.
inline uint64_t MassFrom(const uint64_t* keys, const float* weights, int64_t count, uint64_t last) {
  const D64 d64;
  const hn::Rebind<double, D64> dd;
  const hn::Rebind<float, D64> df;
  const int64_t lanes = hn::Lanes(d64);
  const auto low_bits = hn::Set(d64, (uint64_t{1} << 52) - 1);
  const auto vlast = hn::Set(d64, last);
  auto sum = hn::Zero(d64);
  for (int64_t i = 0; i < count; i += lanes) {
    const auto weight = hn::PromoteTo(dd, hn::LoadU(df, weights + i));
    const auto shifted = hn::Add(hn::Mul(weight, hn::Set(dd, kWeightOne)), hn::Set(dd, 0x1p52));
    const auto fixed = hn::And(hn::BitCast(d64, shifted), low_bits);
    auto out = hn::Gt(vlast, hn::LoadU(d64, keys + i));
    if (HWY_UNLIKELY(count - i < lanes)) {
      out = hn::Or(out, hn::Not(hn::FirstN(d64, static_cast<size_t>(count - i))));
    }
    sum = hn::Add(sum, hn::IfThenZeroElse(out, fixed));
  }
  HWY_ALIGN uint64_t sums[kMaxLanes / 2];
  hn::Store(sum, d64, sums);
  uint64_t total = 0;
  for (int64_t j = 0; j < lanes; ++j) total += sums[j];
  return total;
}

// The mass of the entries whose keys are `last` or more. Block b of piece p has that of
// kBlockEntries entries in blocks[p * BlocksPerPiece() + b].
inline uint64_t MassInBlocks(const TokenList& list, uint64_t last, uint64_t* blocks,
                             const RowThreads& threads) {
  uint64_t mass[kMostPieces];
  threads.For(list.pieces, [&](int64_t p) {
    uint64_t* const own = blocks + p * list.BlocksPerPiece();
    mass[p] = 0;
    for (int64_t i = 0; i < list.counts[p]; i += kBlockEntries) {
      const int64_t count = std::min(kBlockEntries, list.counts[p] - i);
      own[i / kBlockEntries] = MassFrom(list.KeysOf(p) + i, list.WeightsOf(p) + i, count, last);
      mass[p] += own[i / kBlockEntries];
    }
  });
  uint64_t total = 0;
  for (int64_t p = 0; p < list.pieces; ++p) total += mass[p];
  return total;
}

// ---- Narrow

struct KeyRange {
  uint64_t low, high;
};

// Copies the keys inside `range`, in order; `to` may be `keys`. Returns how many.
inline int64_t CopyInside(const uint64_t* keys, int64_t count, const KeyRange& range,
                          uint64_t* to) {
  const D64 d64;
  const int64_t lanes = hn::Lanes(d64);
  const auto low = hn::Set(d64, range.low), high = hn::Set(d64, range.high);
  int64_t copied = 0;
  for (int64_t i = 0; i < count; i += lanes) {
    const auto key = hn::LoadU(d64, keys + i);
    auto out = hn::Or(hn::Gt(low, key), hn::Gt(key, high));
    if (HWY_UNLIKELY(count - i < lanes)) {
      out = hn::Or(out, hn::Not(hn::FirstN(d64, static_cast<size_t>(count - i))));
    }
    copied += static_cast<int64_t>(hn::CompressStore(key, hn::Not(out), d64, to + copied));
  }
  return copied;
}

// Brings a list's entries next to each other, as one piece.
inline void Join(TokenList& list) {
  int64_t count = list.counts[0];
  for (int64_t p = 1; p < list.pieces; ++p) {
    std::copy_n(list.KeysOf(p), list.counts[p], list.keys + count);
    if (list.weights != nullptr) {
      std::copy_n(list.WeightsOf(p), list.counts[p], list.weights + count);
    }
    count += list.counts[p];
  }
  list.pieces = 1;
  list.counts[0] = count;
}

// The bin that holds the key at which `need` is reached from the highest bin down; what the bins
// above it have is taken from `need`. -1: all bins have less.
inline int64_t BinWith(const uint64_t* bins, int64_t pieces, int64_t bin, uint64_t& need) {
  for (; bin >= 0; --bin) {
    uint64_t sum = 0;
    for (int64_t p = 0; p < pieces; ++p) sum += bins[(p << kBinBits) + bin];
    if (sum >= need) return bin;
    need -= sum;
  }
  return bin;
}

// The key that ends the shortest prefix, by descending key, with `need` of the mass; kLowestKey
// where all tokens have less. All keys are inside `range`. The list stays.
template <class Mass>
uint64_t LastKey(TokenList list, KeyRange range, uint64_t need, const Mass& mass,
                 const RowThreads& threads, ListScratch& scratch) {
  constexpr int64_t kFewInPieces = 8 * kSortable;
  TokenList kept = list;
  kept.keys = scratch.kept_keys.Get(list.pieces * list.stride);
  kept.weights = Mass::kWeighs ? scratch.kept_weights.Get(list.pieces * list.stride) : nullptr;
  uint64_t* const bins = scratch.bins.Get(list.pieces << kBinBits);
  int64_t count = list.Count();
  while (count > kSortable) {
    int shift = 0;
    while ((range.high - range.low) >> shift >> kBinBits != 0) ++shift;
    threads.For(list.pieces, [&](int64_t p) {
      uint64_t* const own = bins + (p << kBinBits);
      const uint64_t* const keys = list.KeysOf(p);
      const float* const weights = list.WeightsOf(p);
      std::fill_n(own, 1 << kBinBits, 0);
      for (int64_t i = 0; i < list.counts[p]; ++i) {
        own[(keys[i] - range.low) >> shift] += Mass::Of(weights, i);
      }
    });
    const auto highest = static_cast<int64_t>((range.high - range.low) >> shift);
    const int64_t bin = BinWith(bins, list.pieces, highest, need);
    if (bin < 0) return kLowestKey;
    range.low += static_cast<uint64_t>(bin) << shift;
    range.high = range.low + ((uint64_t{1} << shift) - 1);
    threads.For(list.pieces, [&](int64_t p) {
      kept.counts[p] = CopyInside(list.KeysOf(p), list.counts[p], range, kept.KeysOf(p));
      mass.Weigh(kept.KeysOf(p), kept.counts[p], kept.WeightsOf(p));
    });
    list = kept;
    count = list.Count();
    if (count <= kFewInPieces) {
      Join(list);
      kept.pieces = 1;
    }
  }
  uint64_t* const few = scratch.few.Get(kSortable);
  int64_t copied = 0;
  for (int64_t p = 0; p < list.pieces; ++p) {
    std::copy_n(list.KeysOf(p), list.counts[p], few + copied);
    copied += list.counts[p];
  }
  scratch.sorter(few, static_cast<size_t>(count), hwy::SortDescending());
  float* const weights = Mass::kWeighs ? scratch.kept_weights.Get(kSortable + kMaxLanes) : nullptr;
  mass.Weigh(few, count, weights);
  uint64_t sum = 0;
  for (int64_t i = 0; i < count; ++i) {
    sum += Mass::Of(weights, i);
    if (sum >= need) return few[i];
  }
  return kLowestKey;
}

// ---- Top

// A guess of the k-th largest logit from a sample of the row: most often k or a few more reach it.
// -inf where k is almost all, or the row is short.
inline float GuessBound(const Row& row, int64_t k, float max, ListScratch& scratch) {
  constexpr int64_t kSample = 4096;
  const DF d;
  const int64_t lanes = hn::Lanes(d);
  const int64_t step = row.vocab / (kSample / lanes);
  // What four standard deviations add to a share.
  const double share = static_cast<double>(k) / static_cast<double>(row.vocab);
  const auto wanted =
      static_cast<int64_t>(kSample * share + 4 * std::sqrt(kSample * share * (1 - share)) + 1);
  if (step < 2 * lanes || wanted > kSample) return -kInf;
  float* const sample = scratch.sample.Get(kSample);
  AsType(row.dtype, row.logits, [&](const auto* logits) HWY_ATTR {
    for (int64_t i = 0; i < kSample / lanes; ++i) {
      hn::StoreU(LoadF32(d, logits + i * step), d, sample + i * lanes);
    }
  });
  return Bound(sample, kSample, wanted, max);
}

// All tokens among the first k whose logits reach `least`, and perhaps more. `max` is the row's,
// `proven` what BoundOf says. `range` holds their keys.
template <class Mass>
TokenList ListTop(const Row& row, int64_t k, float max, float proven, float least, KeyRange& range,
                  const Mass& mass, const RowThreads& threads, ListScratch& scratch) {
  const bool guessed = proven == -kInf;
  float bound = std::max(guessed ? GuessBound(row, k, max, scratch) : proven, least);
  TokenList list = ListTokens(row, {.least = bound, .most = k}, mass, threads, scratch);
  if (guessed && bound > least && list.Count() < k) {
    bound = least;
    list = ListTokens(row, {.least = bound, .most = k}, mass, threads, scratch);
  }
  range = {.low = MakeKey(bound, row.vocab), .high = MakeKey(max, 0)};
  return list;
}

// Ranges of values that hold about equally many of the list's tokens: border b is the lowest key of
// range b. As many ranges as pieces.
inline void ChooseBorders(const TokenList& list, uint64_t* borders, ListScratch& scratch) {
  constexpr int64_t kSamplesPerPiece = 64;
  uint64_t* const few = scratch.few.Get(kSamplesPerPiece * kMostPieces);
  int64_t sampled = 0;
  for (int64_t p = 0; p < list.pieces; ++p) {
    const int64_t step = list.counts[p] / kSamplesPerPiece + 1;
    for (int64_t i = 0; i < list.counts[p]; i += step) few[sampled++] = list.KeysOf(p)[i];
  }
  scratch.sorter(few, static_cast<size_t>(sampled), hwy::SortDescending());
  for (int64_t b = 0; b + 1 < list.pieces; ++b) {
    borders[b] = few[(b + 1) * sampled / list.pieces];
  }
  borders[list.pieces - 1] = 0;
}

// The first k of a list in pieces that holds them, sorted, in scratch.keys.
inline SortedKeys SortPieces(const TokenList& list, int64_t k, const RowThreads& threads,
                             ListScratch& scratch) {
  const int64_t pieces = list.pieces;
  uint64_t borders[kMostPieces];
  ChooseBorders(list, borders, scratch);
  TokenList parted = list;
  parted.keys = scratch.kept_keys.Get(pieces * list.stride);
  int64_t ends[kMostPieces][kMostPieces];  // of piece p's tokens of range b
  threads.For(pieces, [&](int64_t p) {
    int64_t end = 0;
    for (int64_t b = 0; b < pieces; ++b) {
      const uint64_t high = b == 0 ? ~uint64_t{0} : borders[b - 1] - 1;
      end += CopyInside(list.KeysOf(p), list.counts[p], {borders[b], high}, parted.KeysOf(p) + end);
      ends[p][b] = end;
    }
  });
  const auto begin_of = [&](int64_t p, int64_t b) { return b == 0 ? 0 : ends[p][b - 1]; };
  int64_t starts[kMostPieces + 1] = {};
  for (int64_t b = 0; b < pieces; ++b) {
    starts[b + 1] = starts[b];
    for (int64_t p = 0; p < pieces; ++p) starts[b + 1] += ends[p][b] - begin_of(p, b);
  }
  threads.For(pieces, [&](int64_t b) {
    if (starts[b] >= k) return;
    uint64_t* const to = list.keys + starts[b];
    int64_t count = 0;
    for (int64_t p = 0; p < pieces; ++p) {
      const int64_t begin = begin_of(p, b);
      std::copy_n(parted.KeysOf(p) + begin, ends[p][b] - begin, to + count);
      count += ends[p][b] - begin;
    }
    if (const int64_t wanted = k - starts[b]; count > 2 * wanted + 128) {
      std::nth_element(to, to + wanted, to + count, std::greater<>());
      count = wanted;
    }
    SorterOfThisThread()(to, static_cast<size_t>(count), hwy::SortDescending());
  });
  return {list.keys, std::min(k, starts[pieces])};
}

// The first k tokens whose logits reach `least`, sorted: k, or fewer where fewer do. `max` is the
// row's.
inline SortedKeys TopKeys(const Row& row, int64_t k, float max, float least,
                          const RowThreads& threads, ListScratch& scratch) {
  const float bound = BoundOf(row, k, max);
  if (k < (bound == -kInf ? kManyTokens : kManySorted)) {
    uint64_t* const keys = scratch.keys.Get(row.vocab);
    return {keys, TopKeysFrom(row, k, std::max(bound, least), keys, scratch.sorter)};
  }
  KeyRange range;
  TokenList list = ListTop(row, k, max, bound, least, range, MassOfOnes(), threads, scratch);
  if (list.pieces > 1) return SortPieces(list, k, threads, scratch);
  int64_t& count = list.counts[0];
  if (count > k + k / 2) {
    range.low = LastKey(list, range, static_cast<uint64_t>(k), MassOfOnes(), threads, scratch);
    count = CopyInside(list.keys, count, range, list.keys);
  }
  scratch.sorter(list.keys, static_cast<size_t>(count), hwy::SortDescending());
  return {list.keys, std::min(k, count)};
}

}  // namespace logitd::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // LOGITD_KERNELS_CPU_ROWS_TOKEN_LIST_INL_H_
