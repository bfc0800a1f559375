// sample, the draw: one token of a row, by the integer weights of what the filters leave.
//
// Every sum that decides is of integers, or in one order fixed by the row.
//
// Cost of what few rows ask for, 64 x 131072 f32, floor one read, 7.4 us: xtc 36 us, typical_p 44,
// where the list holds what is left; 396 and 862 (1%) on flat rows without another filter, which
// are read four times and more. top_n_sigma is one more read: 84 us (unfiltered 19), 512 rows 340
// (floor 59, 17%). Measured: bench/results/h200/sample_b5435172.json.
#ifndef LOGITD_KERNELS_CUDA_SAMPLING_DRAW_ROW_CUH_
#define LOGITD_KERNELS_CUDA_SAMPLING_DRAW_ROW_CUH_

#include "kernels/cuda/sampling/nucleus.cuh"
#include "kernels/cuda/sampling/sample_row.cuh"
#include "kernels/cuda/sampling/weights.cuh"

namespace logitd::cuda {

// ---- by cells ----------------------------------------------------------------------------------

// What a draft was drawn from, as integers of the target's scale.
struct DraftMass {
  const int32_t* ids;  // null: a probability for each token
  const float* probs;  // null: there is no draft
  int count;
  double scale;

  __device__ __noinline__ uint64_t operator()(int token) const {
    int at = token;
    if (ids != nullptr) {
      int low = 0, high = count;
      while (low < high) {
        const int middle = (low + high) / 2;
        if (ids[middle] < token) {
          low = middle + 1;
        } else {
          high = middle;
        }
      }
      if (low == count || ids[low] != token) return 0;
      at = low;
    }
    return DraftWeight(probs[at], scale);
  }
};

// The integer weights that tokens are drawn by: 0 for keys below `last`. A token beyond the row has
// x = -inf, and weighs 0.
struct TokenWeights {
  Weigher weigh;
  Key last;
  bool greedy = false;                   // all others weigh the same
  DraftMass less{};                      // what is taken from them
  const ChosenTokens* chosen = nullptr;  // all others weigh nothing; null: there are none

  __device__ uint64_t operator()(float x, int i) const {
    const Key key = MakeKey(x, i);
    if (key < last || (chosen != nullptr && !chosen->Has(key))) return 0;
    const uint64_t weight = greedy ? uint64_t{1} << kWeightBits : weigh(x);
    return weight == 0 || less.probs == nullptr ? weight : weight - min(weight, less(i));
  }
};

// A cell's integer weights in order of token id, by one warp: a lane holds vectors of neighbours,
// and vector v of all lanes comes before vector v + 1 of any. `first` is the cell's first token,
// weigh(x, i) the weight of token i. A token beyond the row has x = -inf, and must weigh 0.
// kInLoops: vectors are visited in loops, as in EachOfCell.
template <bool kInLoops, class Element, class Weigh>
class WeightsOfCell {
 public:
  __device__ WeightsOfCell(const LaneCell<Element>& x, int first, Weigh weigh)
      : x_(x), first_(first), weigh_(weigh) {
#pragma unroll kAtOnce
    for (int v = 0; v < kVectors; ++v) {
      own_[v] = 0;
#pragma unroll
      for (int e = v * kVector<Element>; e < (v + 1) * kVector<Element>; ++e)
        own_[v] += weigh_(x_[e], Token(e));
    }
#pragma unroll
    for (int v = 0; v < kVectors; ++v) of_all_[v] = WarpSum(own_[v]);
  }

  __device__ uint64_t Total() const {
    uint64_t total = 0;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) total += of_all_[v];
    return total;
  }

  // The lowest token with a sum up to it of more than target; the last token before `end` where no
  // sum is. The same in every lane.
  __device__ int TokenAt(uint64_t target, int end) const {
    const int lane = threadIdx.x % 32;
    uint64_t before = 0;  // of vectors before the one with the token
    uint64_t own = 0;
    int vector = -1;
    float x[kVector<Element>];  // of the vector
#pragma unroll kAtOnce
    for (int v = 0; v < kVectors; ++v) {
      if (vector >= 0) continue;
      if (before + of_all_[v] > target) {
        vector = v;
        own = own_[v];
#pragma unroll
        for (int e = 0; e < kVector<Element>; ++e) x[e] = x_[v * kVector<Element> + e];
      } else {
        before += of_all_[v];
      }
    }
    if (vector < 0) return end - 1;
    const uint64_t through = before + WarpPrefix(own, lane);
    const int holder = __ffs(__ballot_sync(kFullWarp, through > target)) - 1;
    const int first = Token(vector * kVector<Element>);
    uint64_t sum = through - own;
    int token = -1;
#pragma unroll
    for (int e = 0; e < kVector<Element>; ++e) {
      sum += weigh_(x[e], first + e);
      if (token < 0 && sum > target) token = first + e;
    }
    return __shfl_sync(kFullWarp, token, holder);
  }

 private:
  static constexpr int kVectors = kLaneElements / kVector<Element>;
  static constexpr int kAtOnce = kInLoops ? 1 : kVectors;

  __device__ int Token(int e) const { return first_ + CellIndex<Element>(threadIdx.x % 32, e); }

  const LaneCell<Element>& x_;
  const int first_;
  const Weigh weigh_;
  uint64_t own_[kVectors];     // sums of the lane's vectors
  uint64_t of_all_[kVectors];  // the same, added up over the lanes
};

// The sum of the weights of the row; sums of cells are left in cell_sums. Called by all threads.
template <class Row, class Weights = TokenWeights>
__device__ __noinline__ uint64_t SumByCells(Row row, uint64_t* cell_sums, Weights weigh) {
  AreInShared(cell_sums);
  uint64_t total = 0;
  __syncthreads();
  row.EachCell([&](const auto& x, int first) {
    uint64_t sum = 0;
    EachOfCell(x, first, [&](float logit, int i) { sum += weigh(logit, i); });
    sum = WarpSum(sum);
    if (threadIdx.x % 32 != 0) return;
    cell_sums[first / kCell] = sum;
    total += sum;
  });
  return BlockSum(total, Finish().draw);
}

// The lowest token with a sum of more than target, from the sums of cells. By a warp; the same in
// every lane.
template <class Row, class Weights>
__device__ __forceinline__ int TokenOfCells(const Row& row, const uint64_t* cell_sums,
                                            uint64_t target, const Weights& weigh) {
  const int cells = CellsOf(row.vocab);
  const PrefixEnd end = FindPrefixEnd(0, cells, 0, target + 1, [=](int c) { return cell_sums[c]; });
  const int cell = end.index < 0 ? cells - 1 : end.index;
  const uint64_t before = end.through - cell_sums[cell];
  int token = 0;
  row.Cell(cell * kCell, [&]<class Element>(const LaneCell<Element>& x, int first) {
    const WeightsOfCell</*kInLoops=*/true, Element, Weights> weights(x, first, weigh);
    token = weights.TokenAt(target - before, min(row.vocab, first + kCell));
  });
  return token;
}

// The lowest token with a sum of more than target, as TokenOfCells. Called by all threads.
template <class Row, class Weights = TokenWeights>
__device__ __noinline__ int TokenByCells(Row row, const uint64_t* cell_sums, uint64_t target,
                                         Weights weigh) {
  AreInShared(cell_sums);
  DrawShared& s = Finish().draw;
  __syncthreads();
  if (threadIdx.x < 32) {
    const int token = TokenOfCells(row, cell_sums, target, weigh);
    if (threadIdx.x == 0) s.token = token;
  }
  __syncthreads();
  return s.token;
}

// ---- by the statistics of cells ----------------------------------------------------------------

// The weights of a row's cells relative to its maximum, in double, for one warp. Sums are in one
// order: over the lanes of 32 cells, then over the 32s.
class CellWeights {
 public:
  __device__ CellWeights(const Stats* cells, int count, float max, float log2e_over_temperature)
      : cells_(cells), count_(count), exponential_(max, log2e_over_temperature), first_(Load(0)) {
    for (int base = 0; base < count_; base += kAtOnce) {
      const Group group = At(base);
#pragma unroll
      for (int j = 0; j < kThirtyTwos; ++j) {
        const int left = count_ - 1 - base - 32 * j;
        if (left >= 0) total_ = __shfl_sync(kFullWarp, total_ + group.through[j], min(31, left));
      }
    }
  }

  // The sum of exp((x - max) / temperature) over the row.
  __device__ double Reach() const { return total_ / exponential_.AtMax(); }

  // Writes, by one lane, the first cell whose prefix exceeds bits / 2^64 of the total, and the
  // share of the cell that is before the target.
  __device__ void FindCell(uint64_t bits, int32_t& cell, double& share) const {
    const int lane = threadIdx.x % 32;
    const double target = UnitOf(bits) * total_;
    double before = 0;
    int last = 0;  // of the cells that weigh anything
    for (int base = 0; base < count_; base += kAtOnce) {
      const Group group = At(base);
#pragma unroll
      for (int j = 0; j < kThirtyTwos; ++j) {
        if (base + 32 * j >= count_) break;
        const double own = group.own[j];
        const double through = before + group.through[j];
        const double previous = __shfl_up_sync(kFullWarp, through, 1);
        const unsigned weighs = __ballot_sync(kFullWarp, own > 0);
        const unsigned over = __ballot_sync(kFullWarp, own > 0 && through > target);
        if (over != 0) {
          if (lane == __ffs(over) - 1) {
            const double from = lane == 0 ? before : previous;
            cell = base + 32 * j + lane;
            share = fmin(fmax((target - from) / (through - from), 0.0), 1.0);
          }
          return;
        }
        if (weighs != 0) last = base + 32 * j + 31 - __clz(weighs);
        before = __shfl_sync(kFullWarp, through, 31);
      }
    }
    if (lane == 0) {  // a rounding below the end
      cell = last;
      share = 1.0;
    }
  }

 private:
  static constexpr int kThirtyTwos =
      4;  // looked at together, so that one does not wait for another
  static constexpr int kAtOnce = 32 * kThirtyTwos;
  // The lane's cells of kAtOnce: a cell's weight, and the sum up to it from the first of its 32.
  struct Group {
    double own[kThirtyTwos];
    double through[kThirtyTwos];
  };

  __device__ Group Load(int base) const {
    const int lane = threadIdx.x % 32;
    Group group;
#pragma unroll
    for (int j = 0; j < kThirtyTwos; ++j) {
      const int i = base + 32 * j + lane;
      group.own[j] = 0.0;
      if (i < count_ && cells_[i].max != -kInfinity)
        group.own[j] = static_cast<double>(cells_[i].sum) * exponential_.Factor(cells_[i].max);
    }
#pragma unroll
    for (int j = 0; j < kThirtyTwos; ++j) group.through[j] = WarpPrefix(group.own[j], lane);
    return group;
  }
  __device__ Group At(int base) const { return base == 0 ? first_ : Load(base); }

  const Stats* cells_;
  const int count_;
  const Exponential exponential_;
  const Group first_;
  double total_ = 0;
};

// ---- the draw ----------------------------------------------------------------------------------

// What a row is drawn from.
struct DrawInput {
  Part part;           // of the row, that of the first block, where other blocks help
  float peak;          // the largest logit
  const Stats* stats;  // [cells], at the row's temperature where sums_needed
  int cells;           // of the row
  bool sums_needed;    // the whole is the sum over the row by cells
  float log2e_over_temperature;
  int listed;           // tokens in s.sorted
  uint64_t* cell_sums;  // room for [cells]
  Key* first_list;      // room for first_keys; null: there is none
  int first_keys;
  uint64_t bits;  // uniform
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

// The first token of a row of which none are listed: of the first cell whose maximum is the row's.
// A warp calls write_cell(first) before it reads a cell. Called by all threads.
template <class Row, class WriteCell>
__device__ __forceinline__ Drawn DrawGreedyByCells(const Row& row, const DrawInput& in,
                                                   DrawShared& s, WriteCell write_cell) {
  if (threadIdx.x < 32) {
    const int lane = static_cast<int>(threadIdx.x);
    int cell = in.cells;
    for (int i = lane; i < in.cells; i += 32) {
      if (in.stats[i].max == in.peak) cell = min(cell, i);
    }
    cell = __reduce_min_sync(kFullWarp, cell);
    write_cell(cell * kCell);
    row.Cell(cell * kCell, [&]<class Element>(const LaneCell<Element>& x, int first) {
      int token = row.vocab;
#pragma unroll
      for (int e = 0; e < kLaneElements; ++e) {
        if (x[e] == in.peak) token = min(token, first + CellIndex<Element>(lane, e));
      }
      token = __reduce_min_sync(kFullWarp, token);
      if (lane == 0) s.token = token;
    });
  }
  __syncthreads();
  return {s.token, MakeKey(in.peak, s.token), 0.0, uint64_t{1} << kWeightBits};
}

// From the whole row: a cell by its statistics, then a token of it by integers. `write_cell` as
// above.
template <class Row, class WriteCell>
__device__ __forceinline__ Drawn DrawUnfiltered(const SampleRow& ask, const Row& row,
                                                const DrawInput& in, DrawShared& s,
                                                WriteCell write_cell) {
  if (threadIdx.x < 32) {
    const CellWeights weights(in.stats, in.cells, in.peak, in.log2e_over_temperature);
    if (threadIdx.x == 0) s.reach = weights.Reach();
    weights.FindCell(in.bits, s.cell, s.share);
  }
  __syncthreads();
  const double log_sum = log(s.reach);
  const int begin = s.cell * kCell;
  const int end = min(row.vocab, begin + kCell);
  const Weigher weigh_cell(in.stats[s.cell].max, ask);
  const auto weigh = [&](float x, int) { return weigh_cell(x); };
  if (threadIdx.x < 32) {
    write_cell(begin);
    row.Cell(begin, [&]<class Element>(const LaneCell<Element>& x, int first) {
      const WeightsOfCell</*kInLoops=*/false, Element, decltype(weigh)> weights(x, first, weigh);
      const int token = weights.TokenAt(TargetInCell(s.share, weights.Total()), end);
      if (threadIdx.x == 0) s.token = token;
    });
  }
  __syncthreads();
  return {s.token, AboveMinusInfinity(), log_sum, 0};
}

// How many of the listed tokens the filters leave, and the sum of their weights. 0: not all that
// the filters leave is listed. s.weights has the weights of the listed tokens, 0 for those that
// the filters before top_p cut.
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
    const double reach = weights.Reach();
    if (threadIdx.x == 0) s.reach = reach;
  }
  __syncthreads();
  if (threadIdx.x < 32) {
    uint64_t total = 0;
    for (int i = threadIdx.x; i < kept; i += 32) total += s.weights[i];
    total = WarpSum(total);
    int count = complete ? kept : 0;
    if (ask.top_p < 1 && (complete || in.sums_needed)) {
      const uint64_t whole = in.sums_needed ? WholeOf(s.reach) : total;
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
__device__ __noinline__ Drawn DrawUnlisted(const SampleRow& ask, Row row, Key low, Weigher weigh,
                                           DrawInput in) {
  const DrawShared& s = Finish().draw;
  uint64_t* cell_sums = in.cell_sums;
  const uint64_t whole_of_cells = in.sums_needed ? WholeOf(s.reach) : 0;
  const Key high = MakeKey(in.peak, 0);
  Key last = low;
  uint64_t total = 0;
  bool summed = false;
  if (TopKIsOn(ask, row.vocab)) {
    summed = FilterFirst<kThreads>(row, ask, low, weigh, in.first_list, in.first_keys, cell_sums);
    if (summed) {
      last = s.key;
      total = s.mass;
    } else {
      last = max(last, LastOfPrefix<kThreads>(row, low, high, static_cast<uint64_t>(ask.top_k),
                                              Measure{weigh, /*counts=*/true}));
    }
  }
  if (ask.top_p < 1 && !summed) {
    const Key floor = last;
    const uint64_t whole =
        in.sums_needed ? whole_of_cells : SumByCells(row, cell_sums, {weigh, floor});
    const uint64_t need = MassNeeded(ask.top_p, whole);
    const Nucleus nucleus =
        FindNucleus<kThreads>(row, in.part, floor, weigh, whole, need, cell_sums);
    summed = nucleus.last != kLowestKey;
    total = nucleus.total;
    last = summed
               ? nucleus.last
               : max(last, LastOfPrefix<kThreads>(row, floor, high, need, Measure{weigh, false}));
  }
  if (!summed) total = SumByCells(row, cell_sums, {weigh, last});
  const int token = TokenByCells(row, cell_sums, DrawTarget(in.bits, total), {weigh, last});
  return {token, last, 0.0, total};
}

// The lowest logit that top_n_sigma keeps; the row's largest, `peak`, is finite. A second read of
// the row, by the block. Called by all threads.
template <class Row>
__device__ __noinline__ float SigmaBorderOf(Row row, const SampleRow& ask, float peak) {
  static_assert(kSigmaSums == 32, "a lane each");
  constexpr int kMostCells = static_cast<int>(kMaxVocab) / kCell;
  static_assert(2 * kMostCells * sizeof(double) <= sizeof(DrawShared::mass_bins));
  DrawShared& s = Finish().draw;
  double* const below = reinterpret_cast<double*>(s.mass_bins);  // [cells]
  double* const squares = below + kMostCells;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int vocab = row.vocab;
  const int cells = CellsOf(vocab);
  constexpr int kAtOnce = 16;  // loads of a lane
  const auto fold = [](double sum) {
#pragma unroll
    for (int half = 16; half > 0; half /= 2) sum += __shfl_xor_sync(kFullWarp, sum, half);
    return sum;
  };
  uint32_t count = 0;
  __syncthreads();
#pragma unroll 1
  for (int c = static_cast<int>(threadIdx.x) / 32; c < cells; c += blockDim.x / 32) {
    double sum = 0, square_sum = 0;
#pragma unroll 1
    for (int first = c * kCell + lane; first < (c + 1) * kCell; first += 32 * kAtOnce) {
      float x[kAtOnce];
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k)
        x[k] = first + 32 * k < vocab ? row[first + 32 * k] : -kInfinity;
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        const double distance = BelowMax(peak, x[k]);
        sum += distance;
        square_sum = __dadd_rn(square_sum, __dmul_rn(distance, distance));
        count += x[k] > -kInfinity;
      }
    }
    sum = fold(sum);
    square_sum = fold(square_sum);
    if (lane == 0) {
      below[c] = sum;
      squares[c] = square_sum;
    }
  }
  const auto tokens = static_cast<int64_t>(BlockSum(count, s));
  double sum = 0, square_sum = 0;
  for (int c = lane; c < cells; c += 32) {
    sum += below[c];
    square_sum += squares[c];
  }
  return SigmaBorder(ask, peak, {fold(sum), fold(square_sum), tokens});
}

// ---- typical_p and xtc -------------------------------------------------------------------------

// The keys of what the filters before typical_p leave.
template <class Row>
struct LeftKeys {
  Row row;
  Key last;
  int listed;  // so many of s.sorted; 0: those of the row

  // Calls visit(key, logit) for the thread's share.
  template <class Visit>
  __device__ void EachKey(Visit visit) const {
    const DrawShared& s = Finish().draw;
    for (int i = threadIdx.x; i < listed; i += blockDim.x)
      visit(s.sorted[i], KeyLogit(s.sorted[i]));
    if (listed > 0) return;
    row.EachKey([&](Key key, float x) {
      if (key >= last) visit(key, x);
    });
  }
};

// Keys of LeftKeys by typicality in place of the logit.
template <class Row>
struct TypicalKeys {
  LeftKeys<Row> left;
  float max;
  double temperature;
  double mean;

  template <class Visit>
  __device__ void EachKey(Visit visit) const {
    left.EachKey([&](Key key, float x) {
      visit(MakeKey(Typicality(Surprise(x, max, temperature), mean), KeyIndex(key)), x);
    });
  }
};
template <class Row>
struct TypicalMeasure {
  Row row;
  Weigher weigh;

  __device__ uint64_t operator()(float x) const { return weigh(x); }
  __device__ uint64_t OfKey(Key key) const { return weigh(row[KeyIndex(key)]); }
};

// Applies typical_p and xtc to what the filters before them leave, `drawn`: the first `listed` of
// s.sorted, or, where that is 0, all of the row from drawn.last up. Draws from what they choose,
// and leaves that in s.chosen. Looks at all those tokens up to four times, and a few times more for
// the last key of typical_p. Called by all threads.
template <int kThreads, class Row>
__device__ __noinline__ Drawn DrawChosen(const SampleRow& ask, Row row, Weigher weigh, DrawInput in,
                                         int listed, Drawn drawn) {
  DrawShared& s = Finish().draw;
  const double temperature = ActingTemperature(ask);
  const LeftKeys<Row> left{row, drawn.last, listed};
  const auto change = [&](auto write) {
    __syncthreads();
    if (threadIdx.x == 0) write();
    __syncthreads();
  };
  const auto sum_chosen = [&] {
    uint64_t sum = 0;
    left.EachKey([&](Key key, float x) { sum += s.chosen.Has(key) ? weigh(x) : 0; });
    return BlockSum(sum, s);
  };
  change([&] { s.chosen = {Choice::All(), in.peak, temperature}; });
  if (TypicalIsOn(ask)) {
    uint64_t sum = 0;
    left.EachKey(
        [&](Key, float x) { sum += WeighedSurprise(weigh(x), Surprise(x, in.peak, temperature)); });
    const double mean = MeanSurprise(BlockSum(sum, s), drawn.total);
    const Key last = LastOfPrefix<kThreads>(
        TypicalKeys<Row>{left, in.peak, temperature, mean}, AboveMinusInfinity(), MakeKey(0, 0),
        MassNeeded(ask.typical_p, drawn.total), TypicalMeasure<Row>{row, weigh});
    change([&] {
      s.chosen.choice.mean = mean;
      s.chosen.choice.typical_last = last;
    });
    drawn.total = sum_chosen();
  }
  if (XtcActs(ask)) {
    const uint64_t need = MassNeeded(ask.xtc_threshold, drawn.total);
    Key first = s.chosen.choice.first;
    left.EachKey([&](Key key, float x) {
      if (weigh(x) >= need && s.chosen.Has(key)) first = min(first, key);
    });
    __syncthreads();
    atomicMin(reinterpret_cast<unsigned long long*>(&s.chosen.choice.first),
              static_cast<unsigned long long>(first));
    __syncthreads();
    drawn.total = sum_chosen();
  }
  const uint64_t target = DrawTarget(in.bits, drawn.total);
  if (listed > 0) {
    for (int i = threadIdx.x; i < listed; i += kThreads) {
      if (!s.chosen.Has(s.sorted[i])) s.weights[i] = 0;
    }
    __syncthreads();
    drawn.token = DrawListed<kThreads>(listed, target, s);
  } else {
    const TokenWeights weights{weigh, drawn.last, /*greedy=*/false, {}, &s.chosen};
    SumByCells(row, in.cell_sums, weights);
    drawn.token = TokenByCells(row, in.cell_sums, target, weights);
  }
  return drawn;
}

// From the tokens that the filters leave. Called by all threads.
template <int kThreads, class Row>
__device__ __forceinline__ Drawn DrawFiltered(const SampleRow& ask, const Row& row, Weigher weigh,
                                              const DrawInput& in, DrawShared& s) {
  Key low = LowestKept(ask, in.peak);
  if (SigmaIsOn(ask) && in.peak < kInfinity)
    low = max(low, static_cast<Key>(OrderedBits(SigmaBorderOf(row, ask, in.peak))) << 32);
  const ListedSupport listed = FilterListed<kThreads>(ask, row.vocab, low, weigh, in, s);
  Drawn drawn;
  if (listed.count > 0) {
    drawn.last = s.sorted[listed.count - 1];
    drawn.total = listed.total;
    drawn.token = DrawListed<kThreads>(listed.count, DrawTarget(in.bits, listed.total), s);
  } else {
    drawn = DrawUnlisted<kThreads>(ask, row, low, weigh, in);
  }
  if constexpr (Row::kMayAskMore) {
    if (ChoiceIsOn(ask)) drawn = DrawChosen<kThreads>(ask, row, weigh, in, listed.count, drawn);
  }
  drawn.log_sum = log(static_cast<double>(drawn.total) / kWeightOne);
  return drawn;
}

}  // namespace logitd::cuda

#endif  // LOGITD_KERNELS_CUDA_SAMPLING_DRAW_ROW_CUH_
