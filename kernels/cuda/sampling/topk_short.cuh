// softmax_topk, a warp per row, the whole row in the warp's shared memory: rows of up to 8 cells, or
// 12 of 16 bits, k <= 64.
//
// A block has as many warps as shared memory holds rows of the launch's number of cells, and a last
// cell of which the row has at most a quarter takes less time. So a row just above a cell's border
// takes little longer than one below it.
//
// A row's end has no barrier: the floor is found among the maxima of the row's groups by halving,
// then the cells that reach it are read again from shared memory. The candidates are sorted by 32 bits
// of each: a 16-bit logit and its index; or the upper 25 bits of what an f32 logit is above the floor
// and its place in the pool, and where those do not tell neighbours apart, by all 64 bits. The row's
// memory is free before that, so the next row's copy runs meanwhile; 16 rows' logarithms are one.
//
// Limited by instructions, and by latencies where f32 rows of 4 cells leave room for 12 warps a
// multiprocessor: 16384 x 4096 bf16 k 50 takes 2460 instructions a row (3035 when a candidate was
// ranked by comparing it with all). Measured on an H100 (bench/results/h100/short_rows.json, with the
// tree before), as a share of one read: that 64% (54%); f32 79%, k 5 87%; 65536 x 1000 f32 k 50 51%
// (44%). 65536 x 1025 bf16 k 10 100 us (112), where 1024 tokens take 61 by topk_warp.cuh.
// Few f32 rows of up to 3 cells with K from 33 to 64 take 5 to 15% more than in the tree before.
// Tried and dropped: branches by quarters in the loop over whole cells (up to 10% slower); f32 candidates
// by logit and index where both fit in 32 bits (32768 x 2000 k 20 9% slower).
#ifndef LOGITD_KERNELS_CUDA_SAMPLING_TOPK_SHORT_CUH_
#define LOGITD_KERNELS_CUDA_SAMPLING_TOPK_SHORT_CUH_

#include <algorithm>
#include <bit>

#include "kernels/cuda/rows/row_block.cuh"
#include "kernels/cuda/sampling/topk_warp.cuh"

namespace logitd::cuda {

constexpr int kShortRowMaxK = 64;
constexpr int kShortRowPool = 128;
constexpr int kShortRowsEnded = 16;  // whose statistics wait to be written

// Blocks for rows of kLeastCells to kMaxCells cells; one is resident on a multiprocessor. It has as
// many warps as shared memory holds rows of the launch.
template <class T, int kLeastCells, int kMaxCells>
struct ShortRowShape {
  using Element = T;
  using Ring = CellRing<T, kMaxCells>;
  // 128 groups of a row, or about 256 and more of a longer one: k <= 64 of them are well below all.
  using Pool = PoolShape<128, kMaxCells <= 2 ? 4 : 2>;
  using PoolKey = std::conditional_t<sizeof(T) == 4, Key, uint32_t>;
  static constexpr int kFewest = kLeastCells;
  static constexpr int kCells = kMaxCells;
  struct alignas(128) Warp {
    union {
      alignas(16) PoolKey pool[kShortRowPool];
      // In its last bytes: cell << 10 | lane << 5 | bit, of candidates.
      struct {
        uint8_t unused[kShortRowPool * (sizeof(PoolKey) - sizeof(uint16_t))];
        uint16_t places[kShortRowPool];
      };
    };
    EndedRow ended[kShortRowsEnded];
    double log2e_over_temperature;  // of the row; kept here, as registers are few
    // Only the first ones, of the row's cells, are there.
    alignas(128) typename Pool::Sketch sketch[kMaxCells][32];
    // Then slots of the ring for the row's cells.
    __device__ typename Ring::Storage& OfRing(int cells) {
      return *reinterpret_cast<typename Ring::Storage*>(&sketch[cells]);
    }
  };
  struct alignas(128) Shared {
    uint32_t next_turn;
    // Then the warps' memory.
    __device__ Warp& OfWarp(int warp, int cells) {
      return *reinterpret_cast<Warp*>(reinterpret_cast<char*>(this + 1) + warp * WarpBytes(cells));
    }
  };
  __host__ __device__ static constexpr int WarpBytes(int cells) {
    constexpr int kSketchBytes = sizeof(typename Pool::Sketch[32]);
    static_assert((sizeof(Warp) - kMaxCells * kSketchBytes) % 128 == 0 && kSketchBytes % 128 == 0);
    return static_cast<int>(sizeof(Warp)) - (kMaxCells - cells) * kSketchBytes +
           cells * Ring::kCellBytes;
  }
  static constexpr int kMostWarps = sizeof(T) == 4 ? 24 : 32;  // by registers
  // Warps of a block for rows of `cells` cells, where it may have so much shared memory.
  static constexpr int Warps(int cells, int shared_bytes) {
    return std::min(kMostWarps,
                    (shared_bytes - static_cast<int>(sizeof(Shared))) / WarpBytes(cells));
  }
  static constexpr int kMostThreads = 32 * Warps(kLeastCells, 227 * 1024);
};

// A row in shared memory, cell by cell.
template <class Shape>
struct RowInShared {
  using T = typename Shape::Element;
  const T* first;
  __device__ float operator[](int i) const { return ToFloat(*At<T>(i)); }
  // The bits of a 16-bit element.
  __device__ uint32_t Bits(int i) const { return *At<uint16_t>(i); }

 private:
  template <class As>
  __device__ const As* At(int i) const {
    const char* cell = reinterpret_cast<const char*>(first) + i / kCell * Shape::Ring::kCellBytes;
    return reinterpret_cast<const As*>(cell) + i % kCell;
  }
};

// ---- candidates --------------------------------------------------------------------------------

// The lowest logit, as OrderedBits, with these first 16 bits.
__device__ inline uint32_t LowestOf(uint32_t coarse) {
  return max(coarse << 16, OrderedBits(-kInfinity));  // below it are the bits of NaN
}

// The lane's group maxima, two in a word: ordered and 16 bits each; 0 for cells that the row does not
// have.
template <class Shape>
class GroupMaxima {
 public:
  __device__ GroupMaxima(const typename Shape::Warp& s, int cells, int lane) {
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      const int c = w / kOfCell;
      pairs_[w] = c < Shape::kFewest || c < cells
                      ? reinterpret_cast<const uint32_t*>(&s.sketch[c][lane])[w % kOfCell]
                      : 0;
    }
  }

  // The first 16 bits of an ordered logit that at least k of the row reach: near the k-th largest of
  // the group maxima.
  __device__ uint32_t Floor(int k) {
    uint32_t best = 0;
    uint32_t second = 0;
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      second = __vmaxu2(second, __vminu2(best, pairs_[w]));
      best = __vmaxu2(best, pairs_[w]);
      pairs_[w] = FloatsOf(pairs_[w]);
    }
    second = max(max(second & 0xffff, second >> 16), min(best & 0xffff, best >> 16));
    best = max(best & 0xffff, best >> 16);
    static_assert(kShortRowMaxK <= 64);
    uint32_t low = WarpMin(k <= 32 ? best : second);  // k groups reach it
    uint32_t high = WarpMax(best);
    const int enough = k + k / 8;
#pragma unroll 1
    while (low < high) {
      const uint32_t middle = (low + high + 1) / 2;
      const int count = CountNotBelow(middle);
      if (count >= k) {
        low = middle;
        if (count <= enough) break;
      } else {
        high = middle - 1;
      }
    }
    return low;
  }

 private:
  using Pair = __nv_bfloat162;                                  // the first 16 bits of two floats
  static constexpr int kOfCell = Shape::Pool::kLaneGroups / 2;  // words
  static constexpr int kWords = Shape::kCells * kOfCell;

  // Of ordered bits the floats' own. 0 becomes a NaN, which reaches nothing.
  __device__ static uint32_t FloatsOf(uint32_t ordered) {
    const uint32_t positive =
        (ordered >> 15 & 0x10001u) * 0xffffu;  // the upper bits, 16 times each
    return ordered ^ (~positive | 0x80008000u);
  }
  // How many of the row's groups are not below.
  __device__ int CountNotBelow(uint32_t ordered) const {
    const uint32_t both = FloatsOf(ordered * 0x10001u);
    uint32_t masks = 0;
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      masks += __hge2_mask(reinterpret_cast<const Pair&>(pairs_[w]),
                           reinterpret_cast<const Pair&>(both));
    }
    // A lower half that counts adds 2^16 - 1, an upper half -2^16.
    const uint32_t lower = -masks & 0xffffu;
    const uint32_t upper = (lower - ((masks + lower) >> 16)) & 0xffffu;
    return __reduce_add_sync(kFullWarp, static_cast<int>(lower + upper));
  }

  uint32_t pairs_[kWords];
};

// The same from the largest logits that the lanes have seen: the floor is lower, and found in fewer
// instructions.
template <class T>
__device__ inline uint32_t FloorOfLanes(float lane_best, int k, uint4* maxima, int lane) {
  const uint16_t coarse = CoarseBits<T>(lane_best);
  reinterpret_cast<uint16_t*>(maxima)[lane] = coarse;
  __syncwarp();
  const bool among = LanesAbove<T>(maxima, coarse) < k;
  __syncwarp();
  return __reduce_min_sync(kFullWarp, among ? OrderedBits(lane_best) : ~0u) >> 16;
}

// For k up to this, some 20 logits reach the floor of lanes.
constexpr int kFewOfLanes = 16;

// The floor of a row that has just been read.
template <class Shape>
__device__ __forceinline__ uint32_t CoarseFloor(float lane_best, int k, int cells,
                                                typename Shape::Warp& s, int lane) {
  if (k <= kFewOfLanes)
    return FloorOfLanes<typename Shape::Element>(lane_best, k, reinterpret_cast<uint4*>(s.pool),
                                                 lane);
  return GroupMaxima<Shape>(s, cells, lane).Floor(k);
}

// The same floor for Reached(): two coarse logits that what is not below it is not below.
template <class T>
__device__ inline CoarsePair<T> CoarsePairOfFloor(uint32_t coarse) {
  const float floor = FromOrderedBits(LowestOf(coarse));
  uint16_t bits;
  if constexpr (std::is_same_v<T, __half>) {
    bits = __half_as_ushort(__float2half_rd(floor));
  } else {
    bits = static_cast<uint16_t>(__float_as_uint(floor) >> 16);
  }
  return CoarsePairOf<T>(bits * 0x10001u);
}

// Lists the places of the row's logits that reach the floor coarsely. Returns their number; above
// kShortRowPool not all of them are listed.
template <class Shape>
__device__ __forceinline__ int ListPlacesOfRow(typename Shape::Ring& ring,
                                               const typename Shape::Element* row, int vocab,
                                               uint32_t coarse, typename Shape::Warp& s, int lane) {
  using T = typename Shape::Element;
  const CoarsePair<T> floor = CoarsePairOfFloor<T>(coarse);
  int n = 0;
#pragma unroll 1
  for (int c = 0; c * kCell < vocab; ++c) {
    bool hit = false;
    const auto* of_cell = reinterpret_cast<const uint16_t*>(&s.sketch[c][lane]);
#pragma unroll
    for (int g = 0; g < Shape::Pool::kLaneGroups; ++g) hit |= of_cell[g] >= coarse;
    if (!__any_sync(kFullWarp, hit)) continue;
    LaneCell<T> x;
    ring.Reread(row, c, vocab - c * kCell, x);
    uint32_t reached = Reached<T>(x, floor);
#pragma unroll 1
    while (true) {  // the lanes' candidates, one of each lane a round
      const uint32_t lanes = __ballot_sync(kFullWarp, reached != 0);
      if (lanes == 0) break;
      const int at = n + __popc(lanes & ((1u << lane) - 1));
      if (reached != 0 && at < kShortRowPool)
        s.places[at] =
            static_cast<uint16_t>(c << 10 | lane << 5 | (31 - __clz(reached & -reached)));
      reached &= reached - 1;
      n += __popc(lanes);
    }
    if (n > kShortRowPool) break;
  }
  __syncwarp();
  return n;
}

// A candidate in the pool: of f32 a Key, of 16-bit types a Key's bits that are not the same for all:
// the ordered logit, then the index, from the highest on. 0: none.
template <class Shape>
__device__ inline typename Shape::PoolKey PoolKeyOf(const RowInShared<Shape>& row, int i) {
  using T = typename Shape::Element;
  if constexpr (sizeof(T) == 4) {
    return MakeKey(row[i], i);
  } else {
    uint32_t bits = row.Bits(i);
    if (bits == 0x8000) bits = 0;  // -0
    const uint32_t ordered = bits ^ ((bits & 0x8000) != 0 ? 0xffff : 0x8000);
    return ordered << 16 | (0xffff - static_cast<uint32_t>(i));
  }
}
template <class T>
__device__ inline float PoolKeyLogit(uint32_t key) {
  const uint32_t ordered = key >> 16;
  const uint32_t bits = ordered ^ ((ordered & 0x8000) != 0 ? 0x8000 : 0xffff);
  return WordElement<T>(&bits, 0);
}

// Fills the pool with the keys of the listed places, and zeros up to 32, 64 or 128.
template <class Shape>
__device__ __forceinline__ void KeysOfPlaces(RowInShared<Shape> row, int vocab, int n,
                                             typename Shape::Warp& s, int lane) {
  const int end = n <= 64 ? n : kShortRowPool;
#pragma unroll 1
  for (int at = lane; at - lane < end; at += 32) {
    typename Shape::PoolKey key = 0;
    if (at < n) {
      const uint32_t place = s.places[at];
      const int i = static_cast<int>(place >> 10) * kCell +
                    ReachedIndex<typename Shape::Element>(place & 1023);
      if (i < vocab) key = PoolKeyOf<Shape>(row, i);
    }
    __syncwarp();  // the last keys take the place of the last places
    s.pool[at] = key;
  }
  __syncwarp();
}

// Where too many logits reach the floor coarsely: fills the pool with the k largest keys, or some
// more. At least k logits of the row are not below `low`, in OrderedBits. Returns their number.
template <class Shape>
__device__ __noinline__ int FillByHalving(RowInShared<Shape> row, int vocab, int k, uint32_t low,
                                          uint32_t high, typename Shape::Warp& s, int lane) {
  const auto count = [&](auto take) {
    int n = 0;
#pragma unroll 4
    for (int i = lane; i < vocab; i += 32) n += take(row[i]);
    return __reduce_add_sync(kFullWarp, n);
  };
  bool few = false;
#pragma unroll 1
  while (low < high && !few) {
    const uint32_t middle = low + (high - low) / 2 + 1;
    const float edge = FromOrderedBits(middle);
    const int n = count([=](float x) { return x >= edge; });
    if (n >= k) {
      low = middle;
      few = n <= kShortRowPool;
    } else {
      high = middle - 1;
    }
  }
  // Of logits equal to the floor, the first.
  const float floor = FromOrderedBits(low);
  int equals = few ? vocab : k - count([=](float x) { return x > floor; });
  int n = 0;
#pragma unroll 1
  for (int base = 0; base < vocab; base += 32) {
    const int i = base + lane;
    const float x = i < vocab ? row[i] : 0.0f;
    const uint32_t equal = __ballot_sync(kFullWarp, i < vocab && x == floor);
    const uint32_t below = (1u << lane) - 1;
    const bool take = i < vocab && (x > floor || (x == floor && __popc(equal & below) < equals));
    const uint32_t taken = __ballot_sync(kFullWarp, take);
    if (take) s.pool[n + __popc(taken & below)] = PoolKeyOf<Shape>(row, i);
    n += __popc(taken);
    equals = max(0, equals - __popc(equal));
  }
  for (int at = n + lane; at < kShortRowPool; at += 32) s.pool[at] = 0;
  __syncwarp();
  return n;
}

// ---- answers -----------------------------------------------------------------------------------

// Which of two keys a lane keeps when it exchanges them with another, for SortOverWarp: bit 15 - i is
// of the i-th exchange at sizes up to 16, then of those at distances 16 to 1: 1 for the larger.
__device__ inline uint32_t SortDirections(int lane) {
  uint32_t directions = 0;
#pragma unroll
  for (int size = 2; size <= 16; size *= 2) {
#pragma unroll
    for (int stride = size / 2; stride > 0; stride /= 2)
      directions = directions << 1 | (((lane & size) == 0) == ((lane & stride) == 0));
  }
#pragma unroll
  for (int stride = 16; stride > 0; stride /= 2)
    directions = directions << 1 | ((lane & stride) == 0);
  return directions << 1;
}

// Sorts 32 * kKeys keys over the warp, descending; place i is keys[i / 32] of lane i % 32.
template <class V, int kKeys>
__device__ __forceinline__ void SortOverWarp(V (&keys)[kKeys], uint32_t directions) {
  int bit = 15;
#pragma unroll
  for (int size = 2; size <= 32 * kKeys; size *= 2) {
#pragma unroll
    for (int stride = size / 2; stride >= 32; stride /= 2) {
#pragma unroll
      for (int r = 0; r < kKeys; ++r) {
        if (((32 * r) & stride) != 0) continue;
        V& low = keys[r];
        V& high = keys[r + stride / 32];
        const V larger = max(low, high);
        const V smaller = min(low, high);
        const bool descends = ((32 * r) & size) == 0;
        low = descends ? larger : smaller;
        high = descends ? smaller : larger;
      }
    }
    if (size >= 32) bit = 5;
#pragma unroll
    for (int stride = min(size / 2, 16); stride > 0; stride /= 2, --bit) {
      const bool takes_larger = (directions >> bit & 1) != 0;
#pragma unroll
      for (int r = 0; r < kKeys; ++r) {
        const V other = __shfl_xor_sync(kFullWarp, keys[r], stride);
        const bool larger = size >= 32 && ((32 * r) & size) != 0 ? !takes_larger : takes_larger;
        keys[r] = larger == (other > keys[r]) ? other : keys[r];
      }
    }
  }
}

// Where a row's answers go.
struct RowAnswers {
  static constexpr int kKeys = kShortRowMaxK / 32;  // of a lane, the most

  int k;
  int32_t* indices;
  float* probs;

  __device__ void Write(int rank, int32_t index, float logit, const RowResult& result) const {
    if (rank >= k) return;
    indices[rank] = index;
    probs[rank] = result.Probability(logit);
  }
};

// Where 32 bits do not tell keys apart.
__device__ __noinline__ void EmitByKeys(const Key* pool, RowAnswers answers, RowResult result,
                                        uint32_t directions, int lane) {
  constexpr int kKeys = kShortRowPool / 32;
  Key keys[kKeys];
#pragma unroll
  for (int r = 0; r < kKeys; ++r) keys[r] = pool[32 * r + lane];
  SortOverWarp(keys, directions);
#pragma unroll
  for (int r = 0; r < RowAnswers::kKeys; ++r)
    answers.Write(32 * r + lane, KeyIndex(keys[r]), KeyLogit(keys[r]), result);
}

// The logits of a pool, as OrderedBits.
struct LogitRange {
  uint32_t low;
  uint32_t high;
};

// Writes the k largest of the 32 * kKeys keys of a pool by sorting 32 bits of each.
template <int kKeys, class Shape>
__device__ __forceinline__ void EmitSorted(typename Shape::Warp& s, LogitRange range,
                                           const RowAnswers& answers, const RowResult& result,
                                           uint32_t directions, int lane) {
  using T = typename Shape::Element;
  uint32_t keys[kKeys];
  if constexpr (sizeof(T) == 2) {
#pragma unroll
    for (int r = 0; r < kKeys; ++r) keys[r] = s.pool[32 * r + lane];
    SortOverWarp(keys, directions);
#pragma unroll
    for (int r = 0; r < std::min(kKeys, RowAnswers::kKeys); ++r) {
      answers.Write(32 * r + lane, 0xffff - static_cast<int32_t>(keys[r] & 0xffff),
                    PoolKeyLogit<T>(keys[r]), result);
    }
  } else {
    // The upper 25 bits of what a logit is above the lowest, and the place in the pool. Where neighbours
    // in that order agree in those bits, it may not be the right one.
    constexpr int kPlaceBits = 7;
    static_assert(kShortRowPool == 1 << kPlaceBits);
    const int shift = max(0, kPlaceBits - __clz(range.high - range.low));
#pragma unroll
    for (int r = 0; r < kKeys; ++r) {
      const int place = 32 * r + lane;
      const Key key = s.pool[place];
      const auto ordered = static_cast<uint32_t>(key >> 32);
      const uint32_t above = (ordered - range.low) >> shift;
      keys[r] = ordered < range.low ? 0 : above << kPlaceBits | place;
    }
    SortOverWarp(keys, directions);
    bool equal = false;
#pragma unroll
    for (int r = 0; r < std::min(kKeys, RowAnswers::kKeys); ++r) {
      // Lane 31 compares with the next 32's first.
      uint32_t next = r + 1 < kKeys && lane == 0 ? keys[r + 1 < kKeys ? r + 1 : r] : keys[r];
      next = __shfl_sync(kFullWarp, next, (lane + 1) % 32);
      const bool has_next = r + 1 < kKeys || lane < 31;
      equal |= has_next && 32 * r + lane < answers.k && (next ^ keys[r]) < 1u << kPlaceBits;
    }
    if (__any_sync(kFullWarp, equal)) {
      for (int at = 32 * kKeys + lane; at < kShortRowPool; at += 32) s.pool[at] = 0;
      __syncwarp();
      return EmitByKeys(s.pool, answers, result, directions, lane);
    }
#pragma unroll
    for (int r = 0; r < std::min(kKeys, RowAnswers::kKeys); ++r) {
      const Key key = s.pool[keys[r] % kShortRowPool];
      answers.Write(32 * r + lane, KeyIndex(key), KeyLogit(key), result);
    }
  }
}

// ---- a warp's rows -----------------------------------------------------------------------------

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
    if (threadIdx.x == 0) s.next_turn = blockDim.x / 32;
    Start();
    __syncthreads();
  }

  __device__ uint32_t turn() const { return turn_; }
  __device__ int64_t row() const { return RowOfTurn(turn_); }
  __device__ bool Done() const { return row() >= p_.args.logits.rows; }
  __device__ const SoftmaxTopKRow& ask() const { return ask_; }
  __device__ const T* logits() const { return p_.Row<T>(row()); }
  __device__ typename Shape::Ring& ring() { return ring_; }
  __device__ RowInShared<Shape> in_shared() { return {ring_.Row(logits())}; }

  // Loads the row's next cell, which begins at `first`.
  __device__ void Next(int first, LaneCell<T>& x) {
    ring_.PopQuarters(logits() + first, p_.vocab - first, x);
    ring_.PushNothing();
  }
  // The same where only the cell's first quarter is in the row.
  __device__ void NextQuarter(int first, LaneCell<T>& x) {
    ring_.PopQuarter(logits() + first, p_.vocab - first, x);
    ring_.PushNothing();
  }
  // Ends the row: its shared memory is free.
  __device__ void Advance() {
    __syncwarp();
    if (lane_ == 0) turn_ = atomicAdd(&s_.next_turn, 1u);
    turn_ = __shfl_sync(kFullWarp, turn_, 0);
    Start();
  }

 private:
  __device__ void Start() {
    if (Done()) return;
    ring_.PushRow(logits(), p_.vocab);
    ask_ = p_.args.rows[row()];
  }

  const TopKParams& p_;
  typename Shape::Shared& s_;
  const int lane_;
  typename Shape::Ring ring_;
  uint32_t turn_;
  SoftmaxTopKRow ask_;
};

// What a lane knows of a row that the warp has read.
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
  using Ended = EndedRows<kShortRowsEnded>;
  Ended ended(p, s.ended, lane);
  const uint32_t directions = SortDirections(lane);
  float temperature = 0.0f;  // what the next one, and the warp's, are of
  float log2e_over_temperature = 0.0f;
#pragma unroll 1
  while (!rows.Done()) {
    const SoftmaxTopKRow ask = rows.ask();
    if (ask.k == 0) {
      WaitAsync<0>();
      rows.Advance();
      continue;
    }
    if (ask.temperature != temperature) {
      temperature = ask.temperature;
      log2e_over_temperature = kLog2E / temperature;
      if (lane == 0) s.log2e_over_temperature = RowResult::Log2EOver(temperature);
    }
    const ReadRow row = ReadShortRow<Shape>(rows, p.vocab, log2e_over_temperature, s, lane);
    RowResult result(MergeShortRow<Shape>(row, log2e_over_temperature), log2e_over_temperature,
                     /*exactly=*/0.0);
    ended.Reserve();
    ended.Set(result.Nan() ? Ended::Nothing() : result.stats, rows.turn());
    if (result.Nan()) {
      WriteRow<T>(p, rows.row(), ask, result, lane,
                  [=](int c) { return __shfl_sync(kFullWarp, isnan(row.cell.sum), c); });
      if (!p.statistics_only) EmitNothing(p.args, ask, lane, 32);
    }
    if (p.statistics_only || result.Nan()) {
      rows.Advance();
      continue;
    }

    const uint32_t floor = CoarseFloor<Shape>(row.lane_best, ask.k, p.cells, s, lane);
    int n = ListPlacesOfRow<Shape>(rows.ring(), rows.logits(), p.vocab, floor, s, lane);
    if (n <= kShortRowPool) {
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
      EmitSorted<1, Shape>(s, range, answers, result, directions, lane);
    } else if (n <= 64) {
      EmitSorted<2, Shape>(s, range, answers, result, directions, lane);
    } else {
      EmitSorted<kShortRowPool / 32, Shape>(s, range, answers, result, directions, lane);
    }
  }
  WaitAsync<0>();
  ended.Write();
}

}  // namespace logitd::cuda

#endif  // LOGITD_KERNELS_CUDA_SAMPLING_TOPK_SHORT_CUH_
