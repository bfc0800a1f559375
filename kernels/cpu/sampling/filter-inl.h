// sample, filter: what min_p, top_k and top_p leave of a row, as a list of tokens with weights.
//
// top_k's tokens, and the first 256 for a top_p that needs no more, come sorted from the sketch. A
// flat top_p lists all tokens whose weight is not 0, and finds the last one by histograms.
#if defined(LOGITD_KERNELS_CPU_SAMPLING_FILTER_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef LOGITD_KERNELS_CPU_SAMPLING_FILTER_INL_H_
#undef LOGITD_KERNELS_CPU_SAMPLING_FILTER_INL_H_
#else
#define LOGITD_KERNELS_CPU_SAMPLING_FILTER_INL_H_
#endif

#include <algorithm>
#include <cmath>
#include <limits>

#include "hwy/highway.h"
#include "kernels/cpu/rows/sketch-inl.h"
#include "kernels/cpu/sampling/sample_row.h"

HWY_BEFORE_NAMESPACE();
namespace logitd::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// The tokens that a draw is from: those whose keys are `last` or more, except those of -inf.
struct Support {
  uint64_t last;
  float max;
  double temperature;
  double log_sum;  // ln sum exp((x - max) / temperature); where max is +inf, ln of their number

  // -inf where not in the support.
  double Logprob(float x, int64_t index) const {
    if (x == -kInf || MakeKey(x, index) < last) return -std::numeric_limits<double>::infinity();
    if (max == kInf) return x == kInf ? -log_sum : -std::numeric_limits<double>::infinity();
    return (double{x} - max) / temperature - log_sum;
  }
};

// Turns `count` values into exp((x - max) / temperature), in place; there is room for whole
// vectors. Where max is +inf, +inf has weight 1 and all else 0.
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

inline float* WeightsOf(const uint64_t* keys, int64_t count, float max, const Exponent& e,
                        Buffer<float>& buffer) {
  float* weights = buffer.Get(count + kMaxLanes);
  for (int64_t i = 0; i < count; ++i) weights[i] = KeyLogit(keys[i]);
  std::fill_n(weights + count, kMaxLanes, -kInf);
  Exponentials(weights, count, max, e);
  return weights;
}

// Writes the keys of all logits >= `least`, which is not -inf, in index order. Returns how many.
// Pick is for few of them, this is for many. `keys` has room for the row and one vector.
template <typename T>
int64_t PickManyTyped(const T* logits, const Row& row, float least, uint64_t* keys) {
  const DF d;
  const hn::CappedTag<uint64_t, kMaxLanes / 2> d64;
  const hn::Rebind<float, decltype(d64)> df;
  const hn::Rebind<uint32_t, decltype(d64)> du;
  const hn::Rebind<int32_t, decltype(d64)> di;
  const int64_t lanes = hn::Lanes(d64);
  const auto below = hn::Set(d64, MakeKey(least, std::numeric_limits<uint32_t>::max()) - 1);
  const auto sign = hn::Set(du, 0x80000000u);
  HWY_ALIGN T padded[kCellElements];
  HWY_ALIGN float values[kCellElements];
  int64_t count = 0;
  for (int64_t c = 0; c < CellCount(row.vocab); ++c) {
    if (row.sketch.max[c] < least) continue;
    const T* cell = CellAt(logits, row.vocab, c, padded);
    for (int64_t i = 0; i < kCellElements; i += hn::Lanes(d)) {
      hn::Store(LoadF32(d, cell + i), d, values + i);
    }
    for (int64_t i = 0; i < kCellElements; i += lanes) {
      // MakeKey, lane by lane: adding 0 makes +0 of -0.
      const auto bits = hn::BitCast(di, hn::Add(hn::Load(df, values + i), hn::Zero(df)));
      const auto negative = hn::BitCast(du, hn::BroadcastSignBit(bits));
      const auto order = hn::Xor(hn::BitCast(du, bits), hn::Or(negative, sign));
      const auto index = hn::Iota(du, static_cast<uint32_t>(c * kCellElements + i));
      const auto key =
          hn::Or(hn::ShiftLeft<32>(hn::PromoteTo(d64, order)), hn::PromoteTo(d64, hn::Not(index)));
      count += static_cast<int64_t>(hn::CompressStore(key, hn::Gt(key, below), d64, keys + count));
    }
  }
  return count;
}

inline int64_t PickMany(const Row& row, float least, uint64_t* keys) {
  return AsType(row.dtype, row.logits,
                [&](const auto* logits) { return PickManyTyped(logits, row, least, keys); });
}

// Tokens in the shortest prefix of the sorted tokens with mass `need`; 0 where all of them have
// less.
inline int64_t PrefixWithMass(const float* weights, int64_t count, uint64_t need) {
  uint64_t mass = 0;
  for (int64_t i = 0; i < count; ++i) {
    mass += FixedWeight(weights[i]);
    if (mass >= need) return i + 1;
  }
  return 0;
}

// The key that ends the shortest prefix, by descending key, with mass `need`; kLowestKey where all
// tokens have less. The tokens come in any order, with keys in [low, high]. A histogram of mass
// over the keys' leading bits finds the bin that holds the key; the next histogram is over that
// bin's members. So nothing is sorted but the last few, and there is no cap.
inline uint64_t LastOfUnsorted(const uint64_t* keys, const float* weights, int64_t count,
                               uint64_t low, uint64_t high, uint64_t need, float max,
                               const Exponent& e, SampleScratch& scratch) {
  uint64_t* kept = scratch.narrow_keys.Get(count);
  float* kept_weights = scratch.narrow_weights.Get(count);
  uint64_t* bins = scratch.bins.Get(1 << kBinBits);
  while (count > kSortable) {
    int shift = 0;
    while ((high - low) >> shift >> kBinBits != 0) ++shift;
    std::fill_n(bins, 1 << kBinBits, 0);
    for (int64_t i = 0; i < count; ++i) bins[(keys[i] - low) >> shift] += FixedWeight(weights[i]);
    int64_t bin = static_cast<int64_t>((high - low) >> shift);
    while (bin >= 0 && bins[bin] < need) need -= bins[bin--];
    if (bin < 0) return kLowestKey;
    low += static_cast<uint64_t>(bin) << shift;
    high = low + ((uint64_t{1} << shift) - 1);
    int64_t members = 0;
    for (int64_t i = 0; i < count; ++i) {
      kept[members] = keys[i];
      kept_weights[members] = weights[i];
      members += keys[i] >= low && keys[i] <= high;
    }
    keys = kept;
    weights = kept_weights;
    count = members;
  }
  if (keys != kept) std::copy_n(keys, count, kept);
  scratch.sorter(kept, static_cast<size_t>(count), hwy::SortDescending());
  const float* sorted_weights = WeightsOf(kept, count, max, e, scratch.narrow_weights);
  const int64_t prefix = PrefixWithMass(sorted_weights, count, need);
  return prefix == 0 ? kLowestKey : kept[prefix - 1];
}

// A list in index order, with weights. Tokens whose keys are `last` or more may be drawn; the list
// holds all of them.
struct Candidates {
  const uint64_t* keys;
  const float* weights;
  int64_t count;
  uint64_t last;

  uint64_t Weight(int64_t i) const {
    return FixedWeight(weights[i]) & (uint64_t{0} - uint64_t{keys[i] >= last});
  }
  uint64_t Total() const {
    uint64_t total = 0;
    for (int64_t i = 0; i < count; ++i) total += Weight(i);
    return total;
  }
  Support SupportOf(uint64_t total, float max, double temperature) const {
    return {.last = last,
            .max = max,
            .temperature = temperature,
            .log_sum = std::log(static_cast<double>(total) / kWeightOne)};
  }
};

// The sorted tokens [0, count), brought into index order.
inline Candidates InIndexOrder(const uint64_t* keys, const float* weights, int64_t count,
                               SampleScratch& scratch) {
  uint64_t* order = scratch.order.Get(count);
  for (int64_t i = 0; i < count; ++i) {
    order[i] = static_cast<uint64_t>(KeyIndex(keys[i])) << 32 | static_cast<uint64_t>(i);
  }
  scratch.sorter(order, static_cast<size_t>(count), hwy::SortAscending());
  float* ordered = scratch.narrow_weights.Get(count);
  const uint64_t last = keys[count - 1];
  for (int64_t i = 0; i < count; ++i) {
    const auto from = static_cast<uint32_t>(order[i]);
    ordered[i] = weights[from];
    order[i] = keys[from];
  }
  return {.keys = order, .weights = ordered, .count = count, .last = last};
}

inline uint64_t FixedSum(const float* weights, int64_t count) {
  uint64_t total = 0;
  for (int64_t i = 0; i < count; ++i) total += FixedWeight(weights[i]);
  return total;
}

// Writes the prefix sums, by cells, of exp((x - max) / temperature) to scratch.prefix. Returns the
// last one.
inline double CellPrefix(const Row& row, float max, const Exponent& e, SampleScratch& scratch) {
  const DF d;
  const int64_t lanes = hn::Lanes(d);
  const int64_t cells = CellCount(row.vocab);
  double* prefix = scratch.prefix.Get(cells + kMaxLanes);
  HWY_ALIGN float share[kMaxLanes];
  double total = 0;
  for (int64_t c = 0; c < cells; c += lanes) {
    const VF cell_max = hn::LoadU(d, row.sketch.max + c);
    hn::Store(max == kInf ? hn::IfThenElseZero(hn::Eq(cell_max, hn::Set(d, kInf)), hn::Set(d, 1.0f))
                          : PreciseExp(d, cell_max, hn::Set(d, max), e),
              d, share);
    for (int64_t j = 0; j < lanes; ++j) {
      total += double{share[j]} * row.sketch.sum[c + j];
      prefix[c + j] = total;
    }
  }
  return total;
}

// What min_p, top_k and top_p leave. At least one of them is on.
inline Candidates ListFiltered(const Row& row, const SampleRow& ask, float max,
                               SampleScratch& scratch) {
  const Exponent e = MakeExponent(ask.temperature);
  const float least = max == kInf ? kInf : LeastKept(max, ask.temperature, ask.min_p);
  uint64_t* keys = scratch.keys.Get(row.vocab + kMaxLanes);
  if (TopKIsOn(ask, row.vocab)) {
    int64_t count = TopKeys(row, ask.top_k, max, least, keys, scratch.sorter);
    const float* weights = WeightsOf(keys, count, max, e, scratch.weights);
    if (ask.top_p < 1) {
      const uint64_t need = MassNeeded(ask.top_p, FixedSum(weights, count));
      count = PrefixWithMass(weights, count, need);
    }
    return InIndexOrder(keys, weights, count, scratch);
  }
  uint64_t need = 0;
  if (ask.min_p == 0) {
    const double total = CellPrefix(row, max, e, scratch);
    need = MassNeeded(ask.top_p, static_cast<uint64_t>(total * kWeightOne));
    // Most nuclei are short: then a few sorted tokens hold them.
    const int64_t k = std::min(kShortPrefix, row.vocab);
    const int64_t count = TopKeys(row, k, max, least, keys, scratch.sorter);
    const float* weights = WeightsOf(keys, count, max, e, scratch.weights);
    const int64_t prefix = PrefixWithMass(weights, count, need);
    if (prefix > 0) return InIndexOrder(keys, weights, prefix, scratch);
  }
  const int64_t count = PickMany(row, least, keys);
  const float* weights = WeightsOf(keys, count, max, e, scratch.weights);
  uint64_t last = MakeKey(least, std::numeric_limits<uint32_t>::max());
  if (ask.top_p < 1) {
    if (ask.min_p > 0) need = MassNeeded(ask.top_p, FixedSum(weights, count));
    const uint64_t low = MakeKey(least, row.vocab), high = MakeKey(max, 0);
    last = std::max(last, LastOfUnsorted(keys, weights, count, low, high, need, max, e, scratch));
  }
  return {.keys = keys, .weights = weights, .count = count, .last = last};
}

}  // namespace logitd::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
