// softmax_topk, a warp per row: a row of one cell in registers, a longer one, of up to 8 cells, or
// 12 of 16 bits, in the warp's shared memory; k <= 128.
//
// A block has as many warps as shared memory holds rows of the launch's number of cells, and a last
// cell of which the row has at most a quarter takes less time. A row's end has no barrier: the
// floor is found among the maxima of the row's groups by halving, then the groups that reach it are
// read again from shared memory, each by a lane. The candidates are sorted by 32 bits of each: a
// 16-bit logit and its index; or the upper bits of what an f32 logit is above the floor and its
// place in the pool; where those do not tell neighbours apart, each is compared with all. The row's
// memory is free before that, so the next row's copy runs meanwhile; 16 rows' logarithms are one.
//
// Limited by instructions, and by latencies where f32 rows of 4 cells leave room for 12 warps a
// multiprocessor. Figures: softmax_topk.cu.
#ifndef LOGITD_KERNELS_CUDA_SAMPLING_TOPK_WARP_CUH_
#define LOGITD_KERNELS_CUDA_SAMPLING_TOPK_WARP_CUH_

#include "kernels/cuda/sampling/topk_candidates.cuh"

namespace logitd::cuda {

// ---- a warp's rows -----------------------------------------------------------------------------

// The row of a block's turn. A warp takes the block's next turn when it can, for warps do not run
// equally fast.
__device__ inline int64_t RowOfTurn(uint32_t turn) {
  return blockIdx.x + static_cast<int64_t>(turn) * gridDim.x;
}

// Statistics of rows that ended wait here until there are kRows, at most 32: 32 logarithms cost as
// much as one.
template <int kRows>
class EndedRows {
 public:
  // The statistics of a row with nothing left to write.
  __device__ static constexpr Stats Nothing() { return {0.0f, -1.0f}; }

  __device__ EndedRows(const TopKParams& p, EndedRow* ended, int lane)
      : p_(p), ended_(ended), lane_(lane) {}

  // Makes room for the row that Set() is called for next.
  __device__ void Reserve() {
    if (count_ == kRows) {
      Write();
      count_ = 0;
      __syncwarp();
    }
    ++count_;
  }
  __device__ void Set(Stats cell, uint32_t turn) {
    if (lane_ == 0) ended_[count_ - 1] = {cell, turn};
  }
  __device__ void Write() const {
    __syncwarp();
    const Stats cell = lane_ < count_ ? ended_[lane_].cell : Nothing();
    if (cell.sum < 0.0f) return;
    const int64_t row_index = RowOfTurn(ended_[lane_].turn);
    const float temperature = p_.args.rows[row_index].temperature;
    const RowResult result(cell, temperature);
    p_.args.logsumexp[row_index] =
        result.Empty() ? -kInfinity : result.exponential.LogSum(cell.sum, temperature);
    p_.args.status[row_index] = {result.Empty() ? RowCode::kEmptySupport : RowCode::kOk, -1};
    if (p_.row_stats != nullptr) p_.row_stats[row_index] = cell;
  }

 private:
  const TopKParams& p_;
  EndedRow* const ended_;
  const int lane_;
  int count_ = 0;
};

// The warp's rows, one after the other: the copy of the next one, and its parameters, are under way
// while the present one's answers are ranked.
template <class Shape>
class ShortRows {
 public:
  using T = typename Shape::Element;

  __device__ ShortRows(const TopKParams& p, typename Shape::Shared& s, int warp, int lane)
      : p_(p),
        s_(s),
        lane_(lane),
        ring_(s.OfWarp(warp, p.cells).OfRing(p.cells), lane),
        turn_(warp) {
    const uint32_t warps = blockDim.x / 32;
    if (threadIdx.x == 0) s.next_turn = Shape::kHeld ? 2 * warps : warps;
    Start(turn_);
    if constexpr (Shape::kHeld) Start(following_ = turn_ + warps);
    ask_ = AskOf(turn_);
    __syncthreads();
  }

  __device__ uint32_t turn() const { return turn_; }
  __device__ int64_t row() const { return RowOfTurn(turn_); }
  __device__ bool Done() const { return row() >= p_.args.logits.rows; }
  __device__ const SoftmaxTopKRow& ask() const { return ask_; }
  __device__ const T* logits() const { return p_.Row<T>(row()); }
  __device__ RowInShared<Shape> in_shared() {
    return {Shape::kHeld ? ring_.Cell(logits()) : ring_.Row(logits())};
  }

  // Loads a row of one cell.
  __device__ void Load(LaneCell<T>& x) { ring_.PopShort(logits(), p_.vocab, x); }
  // Loads the row's next cell, which begins at `first`.
  __device__ void Next(int first, LaneCell<T>& x) {
    ring_.PopQuarters(logits() + first, p_.vocab - first, x);
    ring_.PushNothing();
  }
  // Loads the next cell where only its first quarter is in the row.
  __device__ void NextQuarter(int first, LaneCell<T>& x) {
    ring_.PopQuarter(logits() + first, p_.vocab - first, x);
    ring_.PushNothing();
  }
  // Loads what the next row of one cell asks, long before it is used.
  __device__ void LookAhead() { next_ask_ = AskOf(following_); }
  // Ends the row: its shared memory is free.
  __device__ void Advance() {
    __syncwarp();
    if constexpr (Shape::kHeld) {
      turn_ = following_;
      ask_ = next_ask_;
      following_ = NextTurn();
      Start(following_);
    } else {
      turn_ = NextTurn();
      Start(turn_);
      ask_ = AskOf(turn_);
    }
  }

 private:
  __device__ void Start(uint32_t turn) {
    const bool is_row = RowOfTurn(turn) < p_.args.logits.rows;
    if constexpr (Shape::kHeld) {
      if (!is_row) return ring_.PushNothing();
      ring_.Push(p_.Row<T>(RowOfTurn(turn)), p_.vocab);
    } else if (is_row) {
      ring_.PushRow(p_.Row<T>(RowOfTurn(turn)), p_.vocab);
    }
  }
  __device__ uint32_t NextTurn() {
    uint32_t next = 0;
    if (lane_ == 0) next = atomicAdd(&s_.next_turn, 1u);
    return __shfl_sync(kFullWarp, next, 0);
  }
  __device__ SoftmaxTopKRow AskOf(uint32_t turn) const {
    return RowOfTurn(turn) < p_.args.logits.rows ? p_.args.rows[RowOfTurn(turn)] : SoftmaxTopKRow{};
  }

  const TopKParams& p_;
  typename Shape::Shared& s_;
  const int lane_;
  typename Shape::Ring ring_;
  uint32_t turn_;
  uint32_t following_;  // of rows of one cell, as next_ask_
  SoftmaxTopKRow ask_;
  SoftmaxTopKRow next_ask_;
};

// A row that the warp has read, as a lane knows it.
struct ReadRow {
  Stats cell;       // of the cell with the lane's number
  float lane_best;  // the largest logit the lane has seen
  float row_max;    // the row's
};

// Reads the row: leaves its sketch.
template <class Shape>
__device__ __forceinline__ ReadRow ReadShortRow(ShortRows<Shape>& rows, int vocab,
                                                float log2e_over_temperature,
                                                typename Shape::Warp& s, int lane) {
  using T = typename Shape::Element;
  ReadRow row{{-kInfinity, 0.0f}, -kInfinity, -kInfinity};
  // A cell's lanes are merged a turn late, as in RowStream::Run.
  Stats late{-kInfinity, 0.0f};
  const auto merge_late = [&](int c) {
    const Stats stats = MergeLanes(late, log2e_over_temperature);
    if (lane == c) row.cell = stats;
    row.row_max = fmaxf(row.row_max, stats.max);
  };
  int c = 0;
#pragma unroll 1
  for (; vocab - c * kCell > kQuarter; ++c) {
    LaneCell<T> x;
    rows.Next(c * kCell, x);
    if (c > 0) merge_late(c - 1);
    float lane_max;
    s.sketch[c][lane] = SketchOfLane<typename Shape::Pool>(x, lane_max);
    late = LaneStats(x, lane_max, log2e_over_temperature);
    row.lane_best = fmaxf(row.lane_best, lane_max);
  }
  if (c * kCell < vocab) {  // a cell of which there is little
    LaneCell<T> x;
    rows.NextQuarter(c * kCell, x);
    if (c > 0) merge_late(c - 1);
    float group_max[Shape::Pool::kLaneGroups];
    for (float& max : group_max) max = -kInfinity;
    group_max[0] = x.Max(0, kSumElements);
    s.sketch[c][lane] = PackSketch<typename Shape::Pool>(group_max);
    late = LaneStatsOfQuarter(x, group_max[0], log2e_over_temperature);
    row.lane_best = fmaxf(row.lane_best, group_max[0]);
    ++c;
  }
  merge_late(c - 1);
  return row;
}

// The row's statistics, with the bits of MergeCells: a lane has a cell.
template <class Shape>
__device__ __forceinline__ Stats MergeShortRow(const ReadRow& row, float log2e_over_temperature) {
  const Exponential exponential(row.row_max, log2e_over_temperature);
  float sum = row.cell.max == -kInfinity
                  ? row.cell.sum
                  : __fmul_rn(row.cell.sum, exponential.Factor(row.cell.max));
#pragma unroll
  for (int offset = std::bit_ceil(static_cast<unsigned>(Shape::kCells)) / 2; offset > 0;
       offset /= 2)
    sum += __shfl_xor_sync(kFullWarp, sum, offset);
  return {row.row_max, __shfl_sync(kFullWarp, sum, 0)};
}

template <class Shape>
__global__ void __launch_bounds__(Shape::kMostThreads, 1)
    ShortRowKernel(const __grid_constant__ TopKParams p) {
  using T = typename Shape::Element;
  extern __shared__ __align__(128) uint4 dynamic[];
  typename Shape::Shared& shared = *reinterpret_cast<typename Shape::Shared*>(dynamic);
  const int lane = threadIdx.x & 31;
  const int warp = threadIdx.x >> 5;
  typename Shape::Warp& s = shared.OfWarp(warp, p.cells);
  ShortRows<Shape> rows(p, shared, warp, lane);
  using Ended = EndedRows<Shape::kEnded>;
  Ended ended(p, s.ended, lane);
  const uint32_t directions = SortDirections(lane);
  float temperature = 0.0f;  // of log2e_over_temperature, here and in the warp's memory
  float log2e_over_temperature = 0.0f;
#pragma unroll 1
  while (!rows.Done()) {
    const SoftmaxTopKRow ask = rows.ask();
    if (ask.k == 0) {
      if constexpr (!Shape::kHeld) WaitAsync<0>();
      LaneCell<T> skipped;
      if constexpr (Shape::kHeld) {
        rows.LookAhead();
        rows.Load(skipped);
      }
      rows.Advance();
      continue;
    }
    if (ask.temperature != temperature) {
      temperature = ask.temperature;
      log2e_over_temperature = kLog2E / temperature;
      __syncwarp();  // lanes have read the row before's
      if (lane == 0) s.log2e_over_temperature = RowResult::Log2EOver(temperature);
    }
    ReadRow row;
    Stats stats;
    uint32_t floor;
    int n;
    if constexpr (Shape::kHeld) {
      rows.LookAhead();
      LaneCell<T> x;
      rows.Load(x);
      if (ask.k > kFewOfLanes) {
        s.held_sketch[lane] = SketchOfLane<typename Shape::Pool>(x, row.lane_best);
        floor = GroupMaxima<Shape>(s, p.cells, lane).Floor(ask.k);
      } else {
        row.lane_best = x.Max(0, kLaneElements);
        floor = FloorOfLanes<T>(row.lane_best, ask.k, reinterpret_cast<uint4*>(s.pool), lane);
      }
      __syncwarp();  // the places take the sketch's memory
      n = 0;
      ListPlaces<Shape>(Reached<kLaneElements>(x, CoarsePairOfFloor<T>(floor)), s, lane, n,
                        [=](int bit) { return lane << 5 | bit; });
      __syncwarp();
      // The cell is the row: a merge of one cell does not change its bits.
      stats =
          MergeLanes(LaneStats(x, row.lane_best, log2e_over_temperature), log2e_over_temperature);
      row.cell = stats;
      row.row_max = stats.max;
    } else {
      row = ReadShortRow<Shape>(rows, p.vocab, log2e_over_temperature, s, lane);
      stats = MergeShortRow<Shape>(row, log2e_over_temperature);
    }
    RowResult result(stats, log2e_over_temperature, /*exactly=*/0.0);
    ended.Reserve();
    ended.Set(result.Nan() ? Ended::Nothing() : result.stats, rows.turn());
    if (result.Nan()) {
      WriteRow<T>(p, rows.row(), ask, result, lane,
                  [=](int c) { return __shfl_sync(kFullWarp, isnan(row.cell.sum), c); });
      EmitNothing(p.args, ask, lane, 32);
      rows.Advance();
      continue;
    }

    if constexpr (!Shape::kHeld) {
      const GroupMaxima<Shape> maxima(s, p.cells, lane);
      floor = ask.k <= kFewOfLanes
                  ? FloorOfLanes<T>(row.lane_best, ask.k, reinterpret_cast<uint4*>(s.pool), lane)
                  : maxima.Floor(ask.k);
      n = ListPlacesOfRow<Shape>(rows.in_shared(), p.vocab, floor, maxima.List(floor, s, lane), s,
                                 lane);
    }
    if (n <= Shape::kPool) {
      KeysOfPlaces<Shape>(rows.in_shared(), p.vocab, n, s, lane);
    } else {
      n = FillByHalving<Shape>(rows.in_shared(), p.vocab, ask.k, LowestOf(floor),
                               OrderedBits(row.row_max), s, lane);
    }
    rows.Advance();
    const RowAnswers answers{ask.k, p.args.indices + ask.first_entry,
                             p.args.probs + ask.first_entry};
    const LogitRange range{LowestOf(floor), OrderedBits(row.row_max)};
    result.log2e_over_temperature = s.log2e_over_temperature;
    if (n <= 32) {
      EmitRanked<Shape, true>(s, n, answers, result, lane);
    } else if (!EmitSorted<Shape>(s, n, range, answers, result, directions, lane)) {
      EmitRanked<Shape, false>(s, n, answers, result, lane);
    }
  }
  WaitAsync<0>();
  ended.Write();
}

}  // namespace logitd::cuda

#endif  // LOGITD_KERNELS_CUDA_SAMPLING_TOPK_WARP_CUH_
