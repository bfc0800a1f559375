// sample, the draw: one token of a row, by the integer weights of what the filters leave.
//
// Every sum that decides is of integers, or in one order fixed by the row.
#ifndef LOGITD_KERNELS_CUDA_SAMPLING_DRAW_ROW_CUH_
#define LOGITD_KERNELS_CUDA_SAMPLING_DRAW_ROW_CUH_

#include "kernels/cuda/sampling/nucleus.cuh"
#include "kernels/cuda/sampling/sample_row.cuh"
#include "kernels/cuda/sampling/weights.cuh"

namespace logitd::cuda {

// ---- by cells ----------------------------------------------------------------------------------

// The weights of a cell's tokens, by weigh(x, i), summed in index order by one warp. A token beyond
// the row has x = -inf, and must weigh 0.
template <class Element, class Weigh>
class CellPrefix {
 public:
  __device__ CellPrefix(const LaneCell<Element>& x, int first, Weigh weigh)
      : x_(x), first_(first), weigh_(weigh) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      through_[g] = 0;
#pragma unroll
      for (int e = 0; e < kTogether; ++e) through_[g] += Weight(g * kTogether + e);
    }
    // The groups' prefixes do not wait for each other.
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        const uint64_t other = __shfl_up_sync(kFullWarp, through_[g], offset);
        if (lane >= offset) through_[g] += other;
      }
    }
    uint64_t before = 0;
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      through_[g] += before;
      before = __shfl_sync(kFullWarp, through_[g], 31);
    }
  }

  __device__ uint64_t total() const { return __shfl_sync(kFullWarp, through_[kGroups - 1], 31); }

  // The lowest token with a sum up to it of more than `target`, which is less than the total. The
  // same in every lane.
  __device__ int TokenAt(uint64_t target) const {
    const int lane = threadIdx.x % 32;
    int group = -1;
    int owner = 0;
    uint64_t through = 0;
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      const unsigned over = __ballot_sync(kFullWarp, through_[g] > target);
      if (group < 0 && over != 0) {
        group = g;
        owner = __ffs(over) - 1;
        through = through_[g];
      }
    }
    int token = first_;
    if (lane == owner) {
      // From the group's last token down: the first one that is over is the lowest.
#pragma unroll
      for (int e = kLaneElements - 1; e >= 0; --e) {
        if (e / kTogether != group || through <= target) continue;
        token = first_ + CellIndex<Element>(lane, e);
        through -= Weight(e);
      }
    }
    return __shfl_sync(kFullWarp, token, owner);
  }

 private:
  static constexpr int kTogether = kVector<Element>;  // neighbours in the row
  static constexpr int kGroups = kLaneElements / kTogether;

  __device__ uint64_t Weight(int e) const {
    return weigh_(x_[e], first_ + CellIndex<Element>(threadIdx.x % 32, e));
  }

  const LaneCell<Element>& x_;
  const int first_;
  const Weigh weigh_;
  uint64_t through_[kGroups];  // sums up to the end of the lane's groups
};

// The sum of weigh(x, i) over a lane's part of the cell at `first`, added up over the warp.
template <class Element, class Weigh>
__device__ __forceinline__ uint64_t SumOfCell(const LaneCell<Element>& x, int first, Weigh weigh) {
  uint64_t sum = 0;
#pragma unroll
  for (int e = 0; e < kLaneElements; ++e)
    sum += weigh(x[e], first + CellIndex<Element>(threadIdx.x % 32, e));
  return WarpSum(sum);
}

// The sum of weigh(x, i) over the row; sums of cells are left in cell_sums. Called by all threads.
template <class Row, class Weigh>
__device__ __noinline__ uint64_t SumByCells(const Row& row, uint64_t* cell_sums, Weigh weigh) {
  uint64_t total = 0;
  __syncthreads();
  row.EachCell([&](const auto& x, int first) {
    const uint64_t sum = SumOfCell(x, first, weigh);
    if (threadIdx.x % 32 != 0) return;
    cell_sums[first / kCell] = sum;
    total += sum;
  });
  return BlockSum(total, Finish().draw);
}

// The lowest token with a sum of more than target, from the sums of cells. Called by all threads.
template <class Row, class Weigh>
__device__ __noinline__ int TokenByCells(const Row& row, const uint64_t* cell_sums, uint64_t target,
                                         Weigh weigh) {
  DrawShared& s = Finish().draw;
  __syncthreads();
  if (threadIdx.x < 32) {
    const int cells = CellsOf(row.vocab);
    const PrefixEnd end =
        FindPrefixEnd(0, cells, 0, target + 1, [=](int c) { return cell_sums[c]; });
    const int cell = end.index < 0 ? cells - 1 : end.index;
    const uint64_t before = end.through - cell_sums[cell];
    row.Cell(cell * kCell, [&](const auto& x, int first) {
      const int token = CellPrefix(x, first, weigh).TokenAt(target - before);
      if (threadIdx.x == 0) s.token = token;
    });
  }
  __syncthreads();
  return s.token;
}

// ---- by the statistics of cells ----------------------------------------------------------------

// The weights of a row's cells relative to its maximum, in double, for one warp.
class CellWeights {
 public:
  __device__ CellWeights(const Stats* cells, int count, float max, float log2e_over_temperature)
      : cells_(cells), count_(count), exponential_(max, log2e_over_temperature) {}

  __device__ double Total() const {
    double total = 0;
    EachGroup([&](int base, double, double through) {
      total = __shfl_sync(kFullWarp, total + through, min(31, count_ - 1 - base));
      return false;
    });
    return total;
  }
  // The sum of exp((x - max) / temperature) over the row.
  __device__ double Reach(double total) const { return total / exponential_.AtMax(); }

  // The first cell whose prefix exceeds bits / 2^64 of the total in s.cell, and in s.share the
  // share of the cell that is before the target.
  __device__ void FindCell(double total, uint64_t bits, DrawShared& s) const {
    const int lane = threadIdx.x % 32;
    const double target = static_cast<double>(bits >> 11) * 0x1p-53 * total;
    double before = 0;
    int last = 0;  // of the cells that weigh anything
    bool found = false;
    EachGroup([&](int base, double own, double through_group) {
      const double through = before + through_group;
      const double previous = __shfl_up_sync(kFullWarp, through, 1);
      const unsigned weighs = __ballot_sync(kFullWarp, own > 0);
      const unsigned over = __ballot_sync(kFullWarp, own > 0 && through > target);
      if (over != 0) {
        if (lane == __ffs(over) - 1) {
          const double from = lane == 0 ? before : previous;
          s.cell = base + lane;
          s.share = fmin(fmax((target - from) / (through - from), 0.0), 1.0);
        }
        found = true;
        return true;
      }
      if (weighs != 0) last = base + 31 - __clz(weighs);
      before = __shfl_sync(kFullWarp, through, 31);
      return false;
    });
    if (found) return;
    if (lane == 0) {  // a rounding below the end
      s.cell = last;
      s.share = 1.0;
    }
  }

 private:
  // Calls visit(base, own, through) for the cells by 32 from `base` on, until it returns true: the
  // lane's cell's weight, and the sum of weights up to it. Groups of 32 do not wait for each other
  // here; the caller adds them up in one order.
  template <class Visit>
  __device__ void EachGroup(Visit visit) const {
    constexpr int kAtOnce = 4;
    const int lane = threadIdx.x % 32;
    for (int base = 0; base < count_; base += 32 * kAtOnce) {
      double own[kAtOnce];
      double through[kAtOnce];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const int i = base + 32 * j + lane;
        own[j] = 0.0;
        if (i < count_ && cells_[i].max != -kInfinity)
          own[j] = static_cast<double>(cells_[i].sum) * exponential_.Factor(cells_[i].max);
        through[j] = own[j];
      }
#pragma unroll
      for (int offset = 1; offset < 32; offset *= 2) {
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) {
          const double other = __shfl_up_sync(kFullWarp, through[j], offset);
          if (lane >= offset) through[j] += other;
        }
      }
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        if (base + 32 * j >= count_ || visit(base + 32 * j, own[j], through[j])) return;
      }
    }
  }

  const Stats* cells_;
  int count_;
  Exponential exponential_;
};

// ---- the draw ----------------------------------------------------------------------------------

// What a row is drawn from.
struct DrawInput {
  float peak;          // the largest logit
  const Stats* stats;  // [cells], at the row's temperature where sums_needed
  int cells;           // of the row
  bool sums_needed;    // neither top_k nor min_p is on: the whole is the sum over the row by cells
  float log2e_over_temperature;
  int listed;           // tokens in s.sorted
  uint64_t* cell_sums;  // room for [cells]
  uint64_t bits;        // uniform
};

struct Drawn {
  int token;
  Key last;        // of the support
  double log_sum;  // of the support's exponentials
  uint64_t total;  // of the support's weights, where it is not the whole row
};

__device__ inline Drawn DrawGreedy(const DrawShared& s) {
  return {KeyIndex(s.sorted[0]), s.sorted[0], 0.0, uint64_t{1} << kWeightBits};
}

// From the whole row: a cell by its statistics, then a token of it by integers.
template <class Row>
__device__ __forceinline__ Drawn DrawUnfiltered(const SampleRow& ask, const Row& row,
                                                const DrawInput& in, DrawShared& s) {
  if (threadIdx.x < 32) {
    const CellWeights weights(in.stats, in.cells, in.peak, in.log2e_over_temperature);
    const double total = weights.Total();
    if (threadIdx.x == 0) s.reach = weights.Reach(total);
    weights.FindCell(total, in.bits, s);
  }
  __syncthreads();
  const double log_sum = log(s.reach);
  const Weigher weigh_cell(in.stats[s.cell].max, ask.temperature);
  const auto weigh = [&](float x, int) { return weigh_cell(x); };
  if (threadIdx.x < 32) {
    row.Cell(s.cell * kCell, [&](const auto& x, int first) {
      const CellPrefix prefix(x, first, weigh);
      const uint64_t sum = prefix.total();
      const int token =
          prefix.TokenAt(min(static_cast<uint64_t>(s.share * static_cast<double>(sum)), sum - 1));
      if (threadIdx.x == 0) s.token = token;
    });
  }
  __syncthreads();
  return {s.token, AboveMinusInfinity(), log_sum, 0};
}

// How many of the listed tokens the filters leave, and the sum of their weights. 0: not all that
// the filters leave is listed. s.weights has the weights of the listed tokens, 0 for those that
// top_k and min_p cut.
struct ListedSupport {
  int count;
  uint64_t total;
};

// Called by all threads.
template <int kThreads>
__device__ __forceinline__ ListedSupport FilterListed(const SampleRow& ask, int vocab, Key low,
                                                      const Weigher& weigh, const DrawInput& in,
                                                      DrawShared& s) {
  int kept = 0;
  for (int i = threadIdx.x; i < in.listed; i += kThreads) {
    const Key key = s.sorted[i];
    const bool keep = key >= low && (!TopKIsOn(ask, vocab) || i < ask.top_k);
    s.weights[i] = keep ? weigh(KeyLogit(key)) : 0;
    kept += keep;
  }
  kept = static_cast<int>(BlockSum(kept, s));
  const bool complete =
      kept < in.listed || in.listed == vocab || (TopKIsOn(ask, vocab) && ask.top_k <= in.listed);
  if (in.sums_needed && threadIdx.x < 32) {
    const CellWeights weights(in.stats, in.cells, in.peak, in.log2e_over_temperature);
    const double reach = weights.Reach(weights.Total());
    if (threadIdx.x == 0) s.reach = reach;
  }
  __syncthreads();
  if (threadIdx.x < 32) {
    uint64_t total = 0;
    for (int i = threadIdx.x; i < kept; i += 32) total += s.weights[i];
    total = WarpSum(total);
    int count = complete ? kept : 0;
    if (ask.top_p < 1 && (complete || in.sums_needed)) {
      const uint64_t whole = in.sums_needed ? static_cast<uint64_t>(s.reach * kWeightOne) : total;
      const PrefixEnd end = FindPrefixEnd(0, kept, 0, MassNeeded(ask.top_p, whole),
                                          [&](int i) { return s.weights[i]; });
      if (end.index >= 0) {
        count = end.index + 1;
        total = end.through;
      }
    }
    if (threadIdx.x == 0) {
      s.count = count;
      s.mass = total;
    }
  }
  __syncthreads();
  return {s.count, s.mass};
}

// A token of the first `count` listed, in index order: the sum up to each token, by that token's
// thread. Called by all threads.
template <int kThreads>
__device__ __forceinline__ int DrawListed(int count, uint64_t target, DrawShared& s) {
  for (int i = threadIdx.x; i < count; i += kThreads) {
    const uint32_t place = static_cast<uint32_t>(s.sorted[i]);  // descending by index
    uint64_t through = 0;
    for (int j = 0; j < count; ++j) {
      if (static_cast<uint32_t>(s.sorted[j]) >= place) through += s.weights[j];
    }
    if (through > target && through - s.weights[i] <= target) s.token = KeyIndex(s.sorted[i]);
  }
  __syncthreads();
  return s.token;
}

// From a filtered row whose support is not all listed. Called by all threads.
template <int kThreads, class Row>
__device__ __forceinline__ Drawn DrawUnlisted(const SampleRow& ask, const Row& row, Key low,
                                              Weigher weigh, const DrawInput& in,
                                              const DrawShared& s) {
  uint64_t* cell_sums = in.cell_sums;
  const uint64_t whole_of_cells = in.sums_needed ? static_cast<uint64_t>(s.reach * kWeightOne) : 0;
  const Key high = MakeKey(in.peak, 0);
  Key last = low;
  if (TopKIsOn(ask, row.vocab)) {
    last = max(last, LastOfPrefix<kThreads>(row, low, high, static_cast<uint64_t>(ask.top_k),
                                            [](float) { return uint64_t{1}; }));
  }
  const auto weigh_from = [=](Key floor) {
    return [=](float x, int i) { return MakeKey(x, i) >= floor ? weigh(x) : uint64_t{0}; };
  };
  uint64_t total = 0;
  bool summed = false;
  if (ask.top_p < 1) {
    const Key floor = last;
    const uint64_t whole =
        in.sums_needed ? whole_of_cells : SumByCells(row, cell_sums, weigh_from(floor));
    const uint64_t need = MassNeeded(ask.top_p, whole);
    const Nucleus nucleus = FindNucleus<kThreads>(row, floor, weigh, whole, need, cell_sums);
    summed = nucleus.last != kLowestKey;
    total = nucleus.total;
    last = summed ? nucleus.last : max(last, LastOfPrefix<kThreads>(row, floor, high, need, weigh));
  }
  if (!summed) total = SumByCells(row, cell_sums, weigh_from(last));
  const int token = TokenByCells(row, cell_sums, DrawTarget(in.bits, total), weigh_from(last));
  return {token, last, 0.0, total};
}

// From what min_p, top_k and top_p leave. Called by all threads.
template <int kThreads, class Row>
__device__ __forceinline__ Drawn DrawFiltered(const SampleRow& ask, const Row& row, Weigher weigh,
                                              const DrawInput& in, DrawShared& s) {
  const float least =
      in.peak == kInfinity ? kInfinity : LeastKept(in.peak, ask.temperature, ask.min_p);
  const Key low = max(static_cast<Key>(OrderedBits(least)) << 32, AboveMinusInfinity());
  const ListedSupport listed = FilterListed<kThreads>(ask, row.vocab, low, weigh, in, s);
  Drawn drawn;
  if (listed.count > 0) {
    drawn.last = s.sorted[listed.count - 1];
    drawn.total = listed.total;
    drawn.token = DrawListed<kThreads>(listed.count, DrawTarget(in.bits, listed.total), s);
  } else {
    drawn = DrawUnlisted<kThreads>(ask, row, low, weigh, in, s);
  }
  drawn.log_sum = log(static_cast<double>(drawn.total) / kWeightOne);
  return drawn;
}

}  // namespace logitd::cuda

#endif  // LOGITD_KERNELS_CUDA_SAMPLING_DRAW_ROW_CUH_
