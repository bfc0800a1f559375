// softmax_topk, a warp per row: rows of one cell, k <= 22.
//
// 65536 x 1000 f32 k 10: 72 us, 725 instructions a row, issued in 67% of the cycles by 24 warps a
// multiprocessor. Tried and dropped: one stage and 32 warps of 64 registers (spills; slower);
// blocks of 8 warps, rows dealt out beforehand or in turns (77 us both); a row's keys ranked in 4
// instructions a key instead of 3 (nothing).
#ifndef LOGITD_KERNELS_CUDA_SAMPLING_TOPK_WARP_CUH_
#define LOGITD_KERNELS_CUDA_SAMPLING_TOPK_WARP_CUH_

#include <type_traits>

#include "kernels/cuda/rows/ring.cuh"
#include "kernels/cuda/sampling/topk_row.cuh"

namespace logitd::cuda {

// For larger k the floor of the lanes is so low that more logits than the pool holds reach it: k 22
// some 37, k 30 some 90.
constexpr int kWarpRowMaxK = 22;
constexpr int kWarpRowWarps = 24;
constexpr int kWarpRowPool = 64;
constexpr int kWarpRowStages = 2;
constexpr int kWarpRowsEnded = 32;   // whose statistics wait to be written
constexpr int kWarpRowResident = 1;  // blocks per multiprocessor

// A row whose statistics wait to be written.
struct EndedRow {
  Stats cell;
  uint32_t turn;
};
template <class T>
struct WarpRowShared {
  typename CellRing<T, kWarpRowStages>::Storage rings[kWarpRowWarps];
  Key pools[kWarpRowWarps][kWarpRowPool];
  uint4 maxima[kWarpRowWarps][4];                // of the lanes, 16 bits each
  uint16_t places[kWarpRowWarps][kWarpRowPool];  // lane << 5 | bit, of candidates
  EndedRow ended[kWarpRowWarps][kWarpRowsEnded];
  uint32_t next_turn;
};

// ---- candidates --------------------------------------------------------------------------------

// Two logits coarsely, 16 bits each, in the same order: f32 loses its lower half, so that logits
// that differ may become equal.
template <class T>
using CoarsePair = PairOf<std::conditional_t<std::is_same_v<T, float>, __nv_bfloat16, T>>;

template <class T>
__device__ inline CoarsePair<T> CoarsePairOf(uint32_t bits) {
  return reinterpret_cast<const CoarsePair<T>&>(bits);
}

// 16 bits of a logit.
template <class T>
__device__ inline uint16_t CoarseBits(float x) {
  if constexpr (std::is_same_v<T, __half>) {
    return __half_as_ushort(__float2half_rn(x));  // exact, x came from one
  } else {
    return static_cast<uint16_t>(__float_as_uint(x) >> 16);
  }
}

// Which of the lane's elements are coarsely >= `floor` (both halves of it the same): bit w for
// element 2 w, bit 16 + w for element 2 w + 1.
template <class T>
__device__ inline uint32_t Reached(const LaneCell<T>& x, CoarsePair<T> floor) {
  uint32_t reached = 0;
#pragma unroll
  for (int w = 0; w < kLaneElements / 2; ++w) {
    uint32_t pair;
    if constexpr (sizeof(T) == 4) {
      pair = __byte_perm(x.words[2 * w], x.words[2 * w + 1], 0x7632);
    } else {
      pair = x.words[w];
    }
    reached |= __hge2_mask(CoarsePairOf<T>(pair), floor) & (0x10001u << w);
  }
  return reached;
}

// As Reached(), by the elements themselves.
template <class T>
__device__ inline uint32_t ReachedExactly(const LaneCell<T>& x, float floor) {
  uint32_t reached = 0;
#pragma unroll
  for (int e = 0; e < kLaneElements; ++e) {
    if (x[e] >= floor) reached |= 1u << (e / 2 + e % 2 * 16);
  }
  return reached;
}

// Place in the cell of the element that Reached() reports for lane `place` / 32 as bit
// `place` % 32.
template <class T>
__device__ inline int ReachedIndex(uint32_t place) {
  return CellIndex<T>(place >> 5, (place & 15) << 1 | (place >> 4 & 1));
}

// How many of the 32 lanes' values, 16 bits each in `maxima`, are above the lane's own.
template <class T>
__device__ inline int LanesAbove(const uint4* maxima, uint16_t mine) {
  const CoarsePair<T> own = CoarsePairOf<T>(mine * 0x10001u);
  CoarsePair<T> sums[2] = {CoarsePairOf<T>(0), CoarsePairOf<T>(0)};
#pragma unroll
  for (int v = 0; v < 4; ++v) {
    const uint4 four = maxima[v];
    sums[0] = __hadd2(sums[0], __hgt2(CoarsePairOf<T>(four.x), own));
    sums[1] = __hadd2(sums[1], __hgt2(CoarsePairOf<T>(four.y), own));
    sums[0] = __hadd2(sums[0], __hgt2(CoarsePairOf<T>(four.z), own));
    sums[1] = __hadd2(sums[1], __hgt2(CoarsePairOf<T>(four.w), own));
  }
  const CoarsePair<T> sum = __hadd2(sums[0], sums[1]);
  return static_cast<int>(ToFloat(sum.x) + ToFloat(sum.y));
}

// Lists the places of the row's candidates, all of its k largest tokens among them. Returns their
// number; above kWarpRowPool not all of them are listed.
template <class T>
__device__ __forceinline__ int ListPlaces(const LaneCell<T>& x, float lane_max, int k,
                                          uint4* maxima, uint16_t* places, int lane) {
  // At least k logits are not below the k-th largest of the 32 lane maxima, nor below anything
  // that equals it coarsely.
  const uint16_t coarse = CoarseBits<T>(lane_max);
  reinterpret_cast<uint16_t*>(maxima)[lane] = coarse;
  __syncwarp();
  const bool among = LanesAbove<T>(maxima, coarse) < k;
  const uint32_t floor = __reduce_min_sync(kFullWarp, among ? OrderedBits(lane_max) : ~0u);
  uint32_t reached =
      Reached<T>(x, CoarsePairOf<T>(CoarseBits<T>(FromOrderedBits(floor)) * 0x10001u));
  int n = 0;
  bool exact = sizeof(T) == 2;
#pragma unroll 1
  while (true) {  // the lanes' candidates, one of each lane a round
    const uint32_t lanes = __ballot_sync(kFullWarp, reached != 0);
    if (lanes == 0) {
      if (exact || n <= kWarpRowPool) break;
      // Logits far from zero for their spread: coarsely all alike.
      exact = true;
      n = 0;
      reached =
          ReachedExactly<T>(x, __shfl_sync(kFullWarp, WarpSortDescending(lane_max, lane), k - 1));
      continue;
    }
    const int at = n + __popc(lanes & ((1u << lane) - 1));
    if (reached != 0 && at < kWarpRowPool)
      places[at] = static_cast<uint16_t>(lane << 5 | (31 - __clz(reached & -reached)));
    reached &= reached - 1;
    n += __popc(lanes);
  }
  __syncwarp();
  return n;
}

// ---- answers -----------------------------------------------------------------------------------

// rank -= key > mine, by the borrow of mine - key.
__device__ inline void CountAbove(Key key, Key mine, int& rank) {
  asm("{\n\t"
      ".reg .u32 low;\n\t"
      "sub.cc.u32 low, %1, %3;\n\t"
      "subc.cc.u32 low, %2, %4;\n\t"
      "subc.u32 %0, %0, 0;\n\t"
      "}"
      : "+r"(rank)
      : "r"(static_cast<uint32_t>(mine)), "r"(static_cast<uint32_t>(mine >> 32)),
        "r"(static_cast<uint32_t>(key)), "r"(static_cast<uint32_t>(key >> 32)));
}

// Ranks the n keys of the pool, which zeros follow, and writes the first k. `mine` is the lane's
// key of the first 32.
__device__ __forceinline__ void EmitPool(const Key* pool, Key mine, int n, int k,
                                         const RowResult& result, int32_t* indices, float* probs,
                                         int lane) {
#pragma unroll 1
  for (int base = 0;; base += 32) {
    const ulonglong2* pairs = reinterpret_cast<const ulonglong2*>(pool);
    int rank = 0;
#pragma unroll 1
    for (int j = 0; j < n; j += 4) {
      const ulonglong2 first = *pairs++;
      const ulonglong2 second = *pairs++;
      CountAbove(first.x, mine, rank);
      CountAbove(first.y, mine, rank);
      CountAbove(second.x, mine, rank);
      CountAbove(second.y, mine, rank);
    }
    rank = -rank;
    if (base + lane < n && rank < k) {
      indices[rank] = KeyIndex(mine);
      probs[rank] = result.Probability(KeyLogit(mine));
    }
    if (base + 32 >= n) break;
    mine = pool[lane + 32];
  }
}

// A row that ends in a rare way: it holds a NaN, or equal logits flood the pool; then its largest
// keys are found one at a time. Right for any row.
template <class T>
__device__ __noinline__ void FinishRareRow(const TopKParams& p, int64_t row_index, Stats stats,
                                           int lane) {
  const SoftmaxTopKRow ask = p.args.rows[row_index];
  const T* row = p.Row<T>(row_index);
  const RowResult result(stats, ask.temperature);
  WriteRow<T>(p, row_index, ask, result, lane, [](int) { return true; });
  if (result.Nan()) return EmitNothing(p.args, ask, lane, 32);
  Key ceiling = ~Key{0};
  for (int rank = 0; rank < ask.k; ++rank) {
    Key best = 0;
    for (int i = lane; i < p.vocab; i += 32) {
      const Key key = MakeKey(ToFloat(row[i]), i);
      if (key < ceiling) best = max(best, key);
    }
    best = WarpMax(best);
    if (lane == 0) {
      p.args.indices[ask.first_entry + rank] = KeyIndex(best);
      p.args.probs[ask.first_entry + rank] = result.Probability(KeyLogit(best));
    }
    ceiling = best;
  }
}

// ---- a warp's rows -----------------------------------------------------------------------------

// The row of a block's turn. A warp takes the block's next turn when it can, for warps do not run
// equally fast.
__device__ inline int64_t RowOfTurn(uint32_t turn) {
  return blockIdx.x + static_cast<int64_t>(turn) * gridDim.x;
}

// A warp's queue of rows: the current one, whose cell is in the ring, and the following one, whose
// copy is under way.
template <class T>
class RowQueue {
 public:
  __device__ RowQueue(const TopKParams& p, WarpRowShared<T>& s, int warp, int lane)
      : p_(p), s_(s), lane_(lane), ring_(s.rings[warp], lane), turn_(warp) {
    static_assert(kWarpRowStages == 2);
    following_ = kWarpRowWarps + warp;
    Push(turn_);
    Push(following_);
    if (threadIdx.x == 0) s.next_turn = kWarpRowWarps * kWarpRowStages;
    __syncthreads();
    Prefetch(turn_);
  }

  __device__ uint32_t turn() const { return turn_; }
  __device__ int64_t row() const { return RowOfTurn(turn_); }
  __device__ bool Done() const { return row() >= p_.args.logits.rows; }

  // Loads the current row's cell, k and temperature.
  __device__ void Load(LaneCell<T>& x, int& k, float& temperature) {
    k = next_k_;
    temperature = next_temperature_;
    Prefetch(following_);
    ring_.PopShort(p_.Row<T>(row()), p_.vocab, x);
  }
  // Element i of the current row, from shared memory.
  __device__ float operator[](int i) { return ToFloat(ring_.Cell(p_.Row<T>(row()))[i]); }

  // Ends the current row: its slot of the ring is free.
  __device__ void Advance() {
    turn_ = following_;
    if (lane_ == 0) following_ = atomicAdd(&s_.next_turn, 1u);
    following_ = __shfl_sync(kFullWarp, following_, 0);
    Push(following_);
  }

 private:
  __device__ void Push(uint32_t turn) {
    // A row with k = 0 is copied too: its parameters are not known before the copy starts.
    if (RowOfTurn(turn) < p_.args.logits.rows) {
      ring_.PushShort(p_.Row<T>(RowOfTurn(turn)), p_.vocab);
    } else {
      ring_.PushNothing();
    }
  }
  __device__ void Prefetch(uint32_t turn) {
    if (RowOfTurn(turn) >= p_.args.logits.rows) return;
    next_k_ = p_.args.rows[RowOfTurn(turn)].k;
    next_temperature_ = p_.args.rows[RowOfTurn(turn)].temperature;
  }

  const TopKParams& p_;
  WarpRowShared<T>& s_;
  const int lane_;
  CellRing<T, kWarpRowStages> ring_;
  uint32_t turn_;
  uint32_t following_;
  int next_k_ = 0;
  float next_temperature_ = 0.0f;
};

// Statistics of rows that ended wait here until there are kRows, at most 32: 32 logarithms cost as much
// as one.
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

template <class T>
__global__ void __launch_bounds__(kWarpRowWarps * 32, kWarpRowResident)
    WarpRowKernel(const __grid_constant__ TopKParams p) {
  extern __shared__ __align__(128) uint4 dynamic[];
  WarpRowShared<T>& s = *reinterpret_cast<WarpRowShared<T>*>(dynamic);
  const int lane = threadIdx.x & 31;
  const int warp = threadIdx.x >> 5;
  Key* pool = s.pools[warp];
  uint16_t* places = s.places[warp];
  RowQueue<T> queue(p, s, warp, lane);
  using Ended = EndedRows<kWarpRowsEnded>;
  Ended ended(p, s.ended[warp], lane);
  float temperature = 0.0f;  // what the next two are of
  float log2e_over_temperature = 0.0f;
  double exact_log2e_over_temperature = 0.0;
#pragma unroll 1
  while (!queue.Done()) {
    LaneCell<T> x;
    int k;
    float row_temperature;
    queue.Load(x, k, row_temperature);
    ended.Reserve();
    if (k == 0) {
      ended.Set(Ended::Nothing(), queue.turn());
      queue.Advance();
      continue;
    }
    if (row_temperature != temperature) {
      temperature = row_temperature;
      log2e_over_temperature = kLog2E / temperature;
      exact_log2e_over_temperature = RowResult::Log2EOver(temperature);
    }

    const float lane_max = x.Max(0, kLaneElements);
    const int n = ListPlaces<T>(x, lane_max, k, s.maxima[warp], places, lane);
    // The cell is the row: a merge of one cell does not change its bits.
    const Stats cell =
        MergeLanes(LaneStats(x, lane_max, log2e_over_temperature), log2e_over_temperature);
    const bool rare = isnan(cell.sum) || n > kWarpRowPool;
    ended.Set(rare ? Ended::Nothing() : cell, queue.turn());
    const int64_t row_index = queue.row();
    if (rare) {
      queue.Advance();
      FinishRareRow<T>(p, row_index, cell, lane);
      continue;
    }
    // A place beyond the row has the lowest key of all, and is never among the k.
    const auto key_at = [&](int at) {
      const int i = ReachedIndex<T>(places[at]);
      return at < n && i < p.vocab ? MakeKey(queue[i], i) : 0;
    };
    const Key mine = lane < n ? key_at(lane) : 0;
    pool[lane] = mine;
    if (n > 32) pool[lane + 32] = key_at(lane + 32);
    __syncwarp();
    queue.Advance();
    const int64_t first_entry = p.args.rows[row_index].first_entry;
    const RowResult result(cell, log2e_over_temperature, exact_log2e_over_temperature);
    EmitPool(pool, mine, n, k, result, p.args.indices + first_entry, p.args.probs + first_entry,
             lane);
  }
  ended.Write();
}

}  // namespace logitd::cuda

#endif  // LOGITD_KERNELS_CUDA_SAMPLING_TOPK_WARP_CUH_
