// What cross_entropy sums over a cell, besides its softmax statistics.
#ifndef LOGITD_KERNELS_CUDA_LOSS_CELL_SUMS_CUH_
#define LOGITD_KERNELS_CUDA_LOSS_CELL_SUMS_CUH_

#include <cstdint>
#include <type_traits>

#include "kernels/cuda/loss/loss_row.cuh"
#include "kernels/cuda/loss/softcap.cuh"
#include "kernels/cuda/rows/cell.cuh"

namespace logitd::cuda {

// A cell's sums, or a lane's share of them.
struct CellSums {
  Stats stats;     // of the values
  float weighted;  // sum of e log2(e), for the e of stats.sum; 0 where not wanted
  float total;     // sum of the values, times kTotalUnit; 0 where not wanted
  int32_t before;  // tokens before the target; 0 where not wanted
};
static_assert(sizeof(CellSums) % 4 == 0);
static_assert(kCell * kTotalUnit == 1.0f);

// The binary logarithm of Exponential::Factor; at least kLeastPower.
constexpr float kLeastPower = -1000.0f;  // 2^kLeastPower is 0
__device__ inline float FactorPower(const Exponential& to, float other_max) {
  float power = __fmul_rn(other_max - to.max, to.log2e_over_temperature);
  if (to.plain) {
    power = __fmul_rn(other_max, to.log2e_over_temperature) + to.shift;
  } else if (other_max == to.max) {
    power = 0;
  } else {
    const Exponential other(other_max, to.log2e_over_temperature);
    if (other.plain) power -= fmaf(other_max, other.log2e_over_temperature, other.shift);
  }
  return fmaxf(power, kLeastPower);
}

// `weighted` of a part, made relative to a maximum that is not below the part's own.
__device__ inline float Reweighted(const Exponential& to, Stats part, float weighted) {
  if (part.max == -kInfinity) return 0.0f;
  return __fmul_rn(to.Factor(part.max), fmaf(FactorPower(to, part.max), part.sum, weighted));
}

// True where a lane's element e is among the cell's first `count`. Compared with a constant: the
// compiler would keep the places of all elements, and spill them.
template <class T>
__device__ inline bool IsAmong(int count, int lane, int e) {
  return CellIndex<T>(/*lane=*/0, e) < count - CellIndex<T>(lane, 0);
}

// Which of a lane's elements of the cell are among its first `count`.
template <class T>
__device__ inline uint32_t ValidElements(int count, int lane) {
  if (count >= kCell) return ~0u;
  uint32_t valid = 0;
#pragma unroll
  for (int e = 0; e < kLaneElements; ++e) valid |= (IsAmong<T>(count, lane, e) ? 1u : 0u) << e;
  return valid;
}

// The binary logarithm of exponential(value), before rounding; PlainPower where it is plain.
__device__ inline float PlainPower(const Exponential& exponential, float value) {
  return fmaf(value, exponential.log2e_over_temperature, exponential.shift);
}
__device__ inline float Power(const Exponential& exponential, float value) {
  if (exponential.plain) return PlainPower(exponential, value);
  return value == exponential.max ? 0.0f
                                  : (value - exponential.max) * exponential.log2e_over_temperature;
}

// The smallest of a lane's elements among the cell's first `count`; +inf where there is no number.
template <class T>
__device__ inline float LaneMin(const LaneCell<T>& x) {
  if constexpr (sizeof(T) == 4) {
    float min = kInfinity;
#pragma unroll
    for (int e = 0; e < kLaneElements; ++e) min = fminf(min, x[e]);
    return min;
  } else {
    using Pair = PairOf<T>;
    Pair min = reinterpret_cast<const Pair&>(x.words[0]);
#pragma unroll
    for (int w = 1; w < kLaneElements / 2; ++w)
      min = __hmin2(min, reinterpret_cast<const Pair&>(x.words[w]));
    return fminf(fminf(ToFloat(min.x), ToFloat(min.y)), kInfinity);
  }
}
template <class T>
__device__ inline float LaneMin(LaneCell<T> x, int count, int lane) {
  constexpr uint32_t kInfinities = kMinusInfinities<T> & 0x7fff7fffu;
#pragma unroll
  for (int w = 0; w < kLaneElements / LaneCell<T>::kPerWord; ++w) {
    if constexpr (sizeof(T) == 4) {
      x.words[w] = IsAmong<T>(count, lane, w) ? x.words[w] : kInfinities;
    } else {  // two at once
      const int bits = 16 * (count - CellIndex<T>(lane, 0)) - 16 * CellIndex<T>(/*lane=*/0, 2 * w);
      const uint32_t among = __funnelshift_lc(~0u, 0u, max(0, bits));
      x.words[w] = (x.words[w] & among) | (kInfinities & ~among);
    }
  }
  return LaneMin(x);
}

// A logit's value beside that of the largest.
__device__ inline float CappedValue(Cap cap, float logit, float max) {
  const float value = cap.Tanh(logit);
  return value > max ? max : value;  // tanhf may not rise everywhere; NaN stays
}

// A lane's sums of a cell under a softcap, by tanhf. Bit e of `valid` says whether element e is in
// the row; the others are -inf. `count` is EachOfFirst'.
template <class T>
__device__ inline CellSums CappedLaneSums(const LaneCell<T>& x, float lane_max, Cap cap,
                                          float log2e_over_temperature, uint32_t valid, int count) {
  const float max = cap.Tanh(lane_max);
  const Exponential exponential(max, log2e_over_temperature);
  float sums[kSums];
  float weighted[kSums];
#pragma unroll
  for (int i = 0; i < kSums; ++i) sums[i] = weighted[i] = 0.0f;
  float total = 0.0f;
  const auto add = [&](int e, auto power_of) {
    const bool is_valid = (valid >> e & 1) != 0;
    float value = CappedValue(cap, x[e], max);
    if (!is_valid) value = -kInfinity;
    const float power = MaxOrNan(power_of(value), kLeastPower);
    const float weight = Exp2(power);
    sums[e / kSumElements] += weight;
    weighted[e / kSumElements] = fmaf(weight, power, weighted[e / kSumElements]);
    total = fmaf(is_valid ? value : 0.0f, kTotalUnit, total);
  };
  if (__all_sync(kFullWarp, exponential.plain)) {
    EachOfFirst(
        count, [&](int e) { add(e, [&](float value) { return PlainPower(exponential, value); }); });
  } else {
#pragma unroll
    for (int e = 0; e < kLaneElements; ++e)
      add(e, [&](float value) { return Power(exponential, value); });
  }
  return {.stats = {max, (sums[0] + sums[1]) + (sums[2] + sums[3])},
          .weighted = (weighted[0] + weighted[1]) + (weighted[2] + weighted[3]),
          .total = total,
          .before = 0};
}

// A lane's sums of a cell under a mild softcap, without tanhf; kAll: also the weighted one and the
// total. They are relative to a value near the maximum: NearMax(), at most 2^61 below or above in
// powers. The first `count` elements of the cell are in the row; the others are -inf.
__device__ inline float NearMax(const CappedPowers& powers, float max) {
  return fminf(fmaxf(__fmul_rn(max, powers.inverse), -1.0f), 1.0f);
}
// The sum of values, times kTotalUnit, from that of their `count` powers.
__device__ inline float TotalOfPowers(float sum, int count, float near_max,
                                      float log2e_over_temperature) {
  return __fmul_rn(fmaf(near_max, static_cast<float>(count), sum / log2e_over_temperature),
                   kTotalUnit);
}
template <bool kAll, class T>
__device__ inline CellSums MildlyCappedSums(const LaneCell<T>& x, float lane_max,
                                            const CappedPowers& powers,
                                            float log2e_over_temperature, int count, int lane) {
  const float near_max = NearMax(powers, lane_max);
  const float shift = -__fmul_rn(near_max, log2e_over_temperature);
  float sums[kSums] = {}, weighted[kSums] = {}, totals[kSums] = {};
  const auto add = [&](int e, float power) {
    const float weight = Exp2(power);
    sums[e / kSumElements] += weight;
    if constexpr (kAll) {
      weighted[e / kSumElements] = fmaf(weight, power, weighted[e / kSumElements]);
      totals[e / kSumElements] += power;
    }
  };
  int in_row = kLaneElements;
  if (count >= kCell) {
    const float reach = fmaxf(fabsf(lane_max), fabsf(LaneMin(x)));
    powers.Each<true>(x, __uint_as_float(WarpMax(__float_as_uint(reach))), shift, count, add);
  } else {
    // Of at most a quarter the same way for all, as row_tails.cuh does. A lane that has no number
    // of them leaves the reach to others.
    float reach = kInfinity;
    if (count > kQuarter) {
      const float min = LaneMin(x, count, lane);
      const bool none = lane_max == -kInfinity && min == kInfinity;
      reach = none ? 0.0f : fmaxf(fabsf(lane_max), fabsf(min));
    }
    in_row = __popc(ValidElements<T>(count, lane));
    powers.Each<false>(x, __uint_as_float(WarpMax(__float_as_uint(reach))), shift, count,
                       [&](int e, float power) {
                         if (IsAmong<T>(count, lane, e)) add(e, power);
                       });
  }
  const auto sum = [](const float(&of)[kSums]) { return (of[0] + of[1]) + (of[2] + of[3]); };
  return {.stats = {near_max, sum(sums)},
          .weighted = sum(weighted),
          .total = kAll ? TotalOfPowers(sum(totals), in_row, near_max, log2e_over_temperature) : 0,
          .before = 0};
}

// A lane's statistics of a cell, with the bits of LaneStats, and its sum of e log2(e). `count` is
// EachOfFirst'.
struct WeightedStats {
  Stats stats;
  float weighted;
};
template <class T>
__device__ inline WeightedStats LaneWeightedStats(const LaneCell<T>& x, float lane_max,
                                                  float log2e_over_temperature, int count) {
  const Exponential exponential(lane_max == -kInfinity ? 0.0f : lane_max, log2e_over_temperature);
  float sums[kSums];
  float weighted[kSums];
#pragma unroll
  for (int i = 0; i < kSums; ++i) sums[i] = weighted[i] = 0.0f;
  const auto add = [&](int e, float power) {
    power = MaxOrNan(power, kLeastPower);  // for -inf: 0 times it is 0
    const float weight = Exp2(power);
    sums[e / kSumElements] += weight;
    weighted[e / kSumElements] = fmaf(weight, power, weighted[e / kSumElements]);
  };
  if (__all_sync(kFullWarp, exponential.plain)) {
    EachOfFirst(count, [&](int e) { add(e, PlainPower(exponential, x[e])); });
  } else {
#pragma unroll
    for (int e = 0; e < kLaneElements; ++e) add(e, Power(exponential, x[e]));
  }
  return {.stats = {lane_max, (sums[0] + sums[1]) + (sums[2] + sums[3])},
          .weighted = (weighted[0] + weighted[1]) + (weighted[2] + weighted[3])};
}

// c += a times b by tensor cores: 16 rows, 16 products, 8 columns. A lane's words are in PTX's
// order.
template <class T>
__device__ inline void MultiplyAdd(const uint32_t* a, uint32_t b0, uint32_t b1, float (&c)[4]) {
  if constexpr (std::is_same_v<T, __half>) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

// The sum of a whole cell's elements times kTotalUnit, for 16-bit types: by tensor cores, which add
// exact products in fp32. The same in every lane.
template <class T>
__device__ inline float TotalOfWhole(const LaneCell<T>& x) {
  static_assert(sizeof(T) == 2);
  const uint32_t unit = PackPair<T>(kTotalUnit, kTotalUnit);
  float c[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
  for (int w = 0; w < kLaneElements / 2; w += 4) MultiplyAdd<T>(&x.words[w], unit, unit, c);
  // Columns are equal; a lane has two rows, and lanes of one group of four have the same.
  float sum = c[0] + c[2];
#pragma unroll
  for (int offset = 16; offset >= 4; offset /= 2) sum += __shfl_xor_sync(kFullWarp, sum, offset);
  return sum;
}

// The sum of a cell's first `count` elements times kTotalUnit, the same in every lane.
template <class T>
__device__ inline float TotalOf(const LaneCell<T>& x, int count, int lane) {
  if constexpr (sizeof(T) == 2) {
    if (count >= kCell) return TotalOfWhole(x);
  }
  float total = 0.0f;
  EachOfFirst(count, [&](int e) {
    total = fmaf(IsAmong<T>(count, lane, e) ? x[e] : 0.0f, kTotalUnit, total);
  });
  return WarpSum(total);
}

// Counts the tokens of a warp's cells that rank before the target. Counts are exact in any order.
template <class T>
class RankCounter {
 public:
  __device__ RankCounter(int target, float target_logit)
      : target_(target), target_logit_(target_logit) {}

  // Counts in the cell at `first`.
  __device__ void Add(const LaneCell<T>& x, int first, int lane) {
    if (first + kCell <= target_) return AddAbove<true>(x);  // equals rank before the target
    AddAbove<false>(x);
    if (first > target_) return;
#pragma unroll
    for (int e = 0; e < kLaneElements; ++e)
      counted_ += x[e] == target_logit_ && IsAmong<T>(target_ - first, lane, e);
  }
  // The count of the warp, in every lane.
  __device__ int Total() const {
    // A lower half that counts adds 2^16 - 1 to the masks, an upper half -2^16.
    const uint32_t lower = -masks_ & 0xffffu;
    const uint32_t upper = (lower - ((masks_ + lower) >> 16)) & 0xffffu;
    return __reduce_add_sync(kFullWarp, counted_ + static_cast<int>(lower + upper));
  }

 private:
  template <bool kOrEqual>
  __device__ void AddAbove(const LaneCell<T>& x) {
    if constexpr (sizeof(T) == 4) {
#pragma unroll
      for (int e = 0; e < kLaneElements; ++e)
        counted_ += kOrEqual ? x[e] >= target_logit_ : x[e] > target_logit_;
    } else {
      using Pair = PairOf<T>;
      const uint32_t both = PackPair<T>(target_logit_, target_logit_);
      const Pair to = reinterpret_cast<const Pair&>(both);
#pragma unroll
      for (int w = 0; w < kLaneElements / 2; ++w) {
        const Pair pair = reinterpret_cast<const Pair&>(x.words[w]);
        masks_ += kOrEqual ? __hge2_mask(pair, to) : __hgt2_mask(pair, to);
      }
    }
  }

  const int target_;
  const float target_logit_;
  int counted_ = 0;
  // The sum of the masks of compared pairs, for 16-bit types. A lane has at most kMaxVocab / 64
  // pairs, so that its halves do not overflow.
  uint32_t masks_ = 0;
};
static_assert(kMaxVocab / 64 < 65536);

// What a row asks of its cells.
struct CellAsk {
  int target;          // whose rank is wanted; else kIgnoredTarget
  float target_logit;  // where there is a target
  bool weighted;       // wanted, as in CellSums
  bool total;          // wanted
  float softcap;
  float log2e_over_temperature;

  // logit_of(): the target's, called where its rank is wanted.
  template <class LogitOf>
  __device__ static CellAsk Of(const CrossEntropyRow& row, LogitOf logit_of) {
    const bool ranked = (row.want & kWantRank) != 0 && row.target >= 0;
    return {.target = ranked ? row.target : kIgnoredTarget,
            .target_logit = ranked ? logit_of() : 0.0f,
            .weighted = (row.want & kWantEntropy) != 0,
            .total = row.label_smoothing > 0,
            .softcap = row.softcap,
            .log2e_over_temperature = Log2EOverTemperature(row.softcap, row.temperature)};
  }
};

// How a row's cells are summed. Each way is a loop of its own: together they would cost the plain
// one registers.
enum class Summing {
  kPlain,
  kWithRankOrTotal,
  kWeighted,
  kMildlyCapped,     // a softcap, neither entropy nor smoothing
  kMildlyCappedAll,  // with them
  kCapped,           // an extreme softcap
};

__device__ inline Summing SummingOf(const CellAsk& ask) {
  if (ask.softcap > 0) {
    if (!IsMildSoftcap(ask.softcap, ask.log2e_over_temperature)) return Summing::kCapped;
    return ask.weighted || ask.total ? Summing::kMildlyCappedAll : Summing::kMildlyCapped;
  }
  if (ask.weighted) return Summing::kWeighted;
  return ask.total || ask.target >= 0 ? Summing::kWithRankOrTotal : Summing::kPlain;
}

// The sums of the cell at `first` of a row that ends at `end`, the same in every lane, except
// `before`: it is 0, as the caller counts it over all cells. kOfFewCells: for rows of few cells,
// whose last one takes less time where only its first quarter is in the row.
template <Summing kSumming, class T, bool kOfFewCells = false>
__device__ inline CellSums SumCell(const LaneCell<T>& x, float lane_max, const CellAsk& ask,
                                   int first, int end, int lane) {
  const int count = kOfFewCells ? end - first : kCell;
  const float log2e_over_temperature = ask.log2e_over_temperature;
  const auto merge = [=](Stats stats) { return MergeLanes(stats, log2e_over_temperature); };
  const auto merge_weighted = [=](Stats part, float weighted, Stats stats) {
    const Exponential exponential(stats.max, log2e_over_temperature);
    return WarpSum(Reweighted(exponential, part, weighted));
  };
  CellSums sums{};
  if constexpr (kSumming == Summing::kPlain || kSumming == Summing::kWithRankOrTotal) {
    sums.stats = merge(LaneStats(x, lane_max, log2e_over_temperature, count));
  } else if constexpr (kSumming == Summing::kWeighted) {
    const WeightedStats of_lane = LaneWeightedStats(x, lane_max, log2e_over_temperature, count);
    sums.stats = merge(of_lane.stats);
    sums.weighted = merge_weighted(of_lane.stats, of_lane.weighted, sums.stats);
  } else {
    if constexpr (kSumming == Summing::kCapped) {
      const uint32_t valid = ValidElements<T>(end - first, lane);
      sums =
          CappedLaneSums(x, lane_max, Cap::Of(ask.softcap), log2e_over_temperature, valid, count);
    } else {
      sums = MildlyCappedSums<kSumming == Summing::kMildlyCappedAll>(
          x, lane_max, CappedPowers::Of(ask.softcap, log2e_over_temperature),
          log2e_over_temperature, end - first, lane);
    }
    const Stats stats = merge(sums.stats);
    if constexpr (kSumming != Summing::kMildlyCapped) {
      sums.weighted = merge_weighted(sums.stats, sums.weighted, stats);
      sums.total = WarpSum(sums.total);
    }
    sums.stats = stats;
  }
  if constexpr (kSumming == Summing::kWithRankOrTotal || kSumming == Summing::kWeighted) {
    if (ask.total) sums.total = TotalOf(x, end - first, lane);
  }
  return sums;
}

// Calls visit(std::integral_constant<Summing, summing>).
template <class Visit>
__device__ __forceinline__ void VisitSumming(Summing summing, const Visit& visit) {
  switch (summing) {
    case Summing::kPlain:
      return visit(std::integral_constant<Summing, Summing::kPlain>());
    case Summing::kWithRankOrTotal:
      return visit(std::integral_constant<Summing, Summing::kWithRankOrTotal>());
    case Summing::kWeighted:
      return visit(std::integral_constant<Summing, Summing::kWeighted>());
    case Summing::kMildlyCapped:
      return visit(std::integral_constant<Summing, Summing::kMildlyCapped>());
    case Summing::kMildlyCappedAll:
      return visit(std::integral_constant<Summing, Summing::kMildlyCappedAll>());
    case Summing::kCapped:
      return visit(std::integral_constant<Summing, Summing::kCapped>());
  }
  __builtin_unreachable();
}

// Sums the cells that a warp takes of a row: those of `stream`, which has RowStream's Next, first
// and Release. max_of(x) is the lane's largest element; cell_of(sums, x, first) is what the lanes
// that `write` leave of a cell in `cells`, CellSums or more.
template <Summing kSumming, class T, class Stream, class Cell, class MaxOf, class CellOf>
__device__ __forceinline__ void SumCells(Stream& stream, const CellAsk& ask, int end, bool write,
                                         Cell* cells, MaxOf max_of, CellOf cell_of) {
  const int lane = threadIdx.x % 32;
  LaneCell<T> x;
  RankCounter<T> rank(ask.target, ask.target_logit);
  int last = -1;  // cell
#pragma unroll 1
  while (stream.Next(x)) {
    const int first = stream.first();
    stream.Release();
    const float lane_max = max_of(x);
    if constexpr (kSumming != Summing::kPlain) {
      if (ask.target >= 0) rank.Add(x, first, lane);
    }
    const Cell cell = cell_of(SumCell<kSumming, T>(x, lane_max, ask, first, end, lane), x, first);
    last = first / kCell;
    if (write) cells[last] = cell;
  }
  if (kSumming != Summing::kPlain && ask.target >= 0 && last >= 0) {
    const int before = rank.Total();
    if (write) cells[last].before = before;
  }
}

// Merges a row's cells, by one warp, in an order that depends only on their number. The sums of
// cell i are sums_of(i), and `stats` those of MergeCells.
template <class SumsOf>
__device__ inline RowSums MergeMore(Stats stats, int count, float log2e_over_temperature, int lane,
                                    SumsOf sums_of) {
  const Exponential exponential(stats.max, log2e_over_temperature);
  float weighted = 0.0f;
  double total = 0.0;
  int before = 0;
  for (int i = lane; i < count; i += 32) {
    const CellSums& sums = sums_of(i);
    weighted += Reweighted(exponential, sums.stats, sums.weighted);
    total += sums.total;
    before += sums.before;
  }
  return {stats, WarpSum(weighted), WarpSum(total), __reduce_add_sync(kFullWarp, before)};
}
template <class SumsOf>
__device__ inline RowSums MergeRow(int count, float log2e_over_temperature, int lane,
                                   SumsOf sums_of) {
  const Stats stats =
      MergeCells(count, log2e_over_temperature, lane, [&](int i) { return sums_of(i).stats; });
  return MergeMore(stats, count, log2e_over_temperature, lane, sums_of);
}

// The sum of what kCount lanes hold, in the order of WarpSum; the other lanes hold 0.
template <class V, int kCount>
__device__ inline V SumLikeWarp(V (&values)[kCount]) {
#pragma unroll
  for (int offset = kCount / 2; offset > 0; offset /= 2) {
#pragma unroll
    for (int i = 0; i < offset; ++i) values[i] += values[i + offset];
  }
  return values[0];
}

// Merges a row of up to kCells cells by one lane, with the bits of MergeRow.
template <int kCells, class SumsOf>
__device__ inline RowSums MergeShort(int count, float log2e_over_temperature, SumsOf sums_of) {
  float max = -kInfinity;
  for (int i = 0; i < count; ++i) max = fmaxf(max, sums_of(i).stats.max);
  const Exponential exponential(max, log2e_over_temperature);
  float sums[kCells] = {};
  float weighted[kCells] = {};
  double totals[kCells] = {};
  int before = 0;
#pragma unroll
  for (int i = 0; i < kCells; ++i) {
    if (i >= count) continue;
    const CellSums& cell = sums_of(i);
    sums[i] = cell.stats.max == -kInfinity
                  ? cell.stats.sum
                  : __fmul_rn(cell.stats.sum, exponential.Factor(cell.stats.max));
    weighted[i] = Reweighted(exponential, cell.stats, cell.weighted);
    totals[i] = cell.total;
    before += cell.before;
  }
  return {{max, SumLikeWarp(sums)}, SumLikeWarp(weighted), SumLikeWarp(totals), before};
}

}  // namespace logitd::cuda

#endif  // LOGITD_KERNELS_CUDA_LOSS_CELL_SUMS_CUH_
