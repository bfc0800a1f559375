// How a warp of softmax_topk finds and sorts the largest logits of a row that it has read.
#ifndef LOGITD_KERNELS_CUDA_SAMPLING_TOPK_CANDIDATES_CUH_
#define LOGITD_KERNELS_CUDA_SAMPLING_TOPK_CANDIDATES_CUH_

#include <algorithm>
#include <bit>
#include <type_traits>

#include "kernels/cuda/rows/ring.cuh"
#include "kernels/cuda/rows/row_block.cuh"
#include "kernels/cuda/sampling/topk_row.cuh"

namespace logitd::cuda {

// A row whose statistics wait to be written.
struct EndedRow {
  Stats cell;
  uint32_t turn;
};
// Blocks for rows of kLeastCells to kMaxCells cells and k up to kLargestK; one is resident on a
// multiprocessor. It has as many warps as shared memory holds rows of the launch.
template <class T, int kLeastCells, int kMaxCells, int kLargestK = 64>
struct ShortRowShape {
  using Element = T;
  // A row of one cell stays in registers, and the next one's copy is under way meanwhile.
  static constexpr bool kHeld = kMaxCells == 1;
  using Ring = CellRing<T, kHeld ? 2 : kMaxCells>;
  static constexpr int kMaxK = kLargestK;
  static constexpr int kPool = 2 * kMaxK;
  static constexpr int kEnded = kHeld ? 10 : 16;  // rows whose statistics wait to be written
  // 128 groups of a row, or about 256 and more of a longer one: k of them are well below all.
  using Pool = PoolShape<128, (kMaxCells <= 2 || kMaxK > 64) ? 4 : 2>;
  using PoolKey = std::conditional_t<sizeof(T) == 4, Key, uint32_t>;
  static constexpr int kFewest = kLeastCells;
  static constexpr int kCells = kMaxCells;
  struct alignas(128) Warp {
    union {
      alignas(16) PoolKey pool[kPool];
      uint16_t groups[kPool];  // of the sketch, that reach the floor
      // In its last bytes: cell << 10 | lane << 5 | bit, of candidates.
      struct {
        uint8_t unused[kPool * (sizeof(PoolKey) - sizeof(uint16_t))];
        uint16_t places[kPool];
      };
      typename Pool::Sketch held_sketch[32];  // until places are listed
    };
    EndedRow ended[kEnded];
    double log2e_over_temperature;  // of the row; kept here, as registers are few
    // Only the first ones, of the row's cells, are there.
    alignas(kHeld ? 8 : 128) typename Pool::Sketch sketch[kHeld ? 0 : kMaxCells][32];
    // Then slots of the ring for the row's cells.
    __device__ typename Ring::Storage& OfRing(int cells) {
      if constexpr (kHeld) return *reinterpret_cast<typename Ring::Storage*>(this + 1);
      return *reinterpret_cast<typename Ring::Storage*>(&sketch[cells]);
    }
    __device__ typename Pool::Sketch* OfCell(int c) { return kHeld ? held_sketch : sketch[c]; }
    __device__ const typename Pool::Sketch* OfCell(int c) const {
      return kHeld ? held_sketch : sketch[c];
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
    if constexpr (kHeld) return static_cast<int>(sizeof(Warp) + sizeof(typename Ring::Storage));
    constexpr int kSketchBytes = sizeof(typename Pool::Sketch[32]);
    static_assert((sizeof(Warp) - kMaxCells * kSketchBytes) % 128 == 0 && kSketchBytes % 128 == 0);
    return static_cast<int>(sizeof(Warp)) - (kMaxCells - cells) * kSketchBytes +
           cells * Ring::kCellBytes;
  }
  static constexpr int kMostWarps = sizeof(T) == 2 ? 32 : kMaxK > 64 ? 16 : 24;  // by registers
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
  const T* first;  // of a row of one cell, its own place
  __device__ float operator[](int i) const { return ToFloat(*At<T>(i)); }
  // The bits of a 16-bit element.
  __device__ uint32_t Bits(int i) const { return *At<uint16_t>(i); }
  // Loads kElements of the elements that a lane has of cell c, from `from` on; whatever is in
  // memory where they are not in the row.
  template <int kElements>
  __device__ void Read(int c, int lane, int from, LaneCell<T>& x) const {
    const char* cell = reinterpret_cast<const char*>(first) + c * Shape::Ring::kCellBytes;
    ReadCellAt<T, kElements / kVector<T>>(cell + from / kVector<T> * 512,
                                          reinterpret_cast<uintptr_t>(first) % 16, lane, x);
  }

 private:
  template <class As>
  __device__ const As* At(int i) const {
    if constexpr (Shape::kHeld) return reinterpret_cast<const As*>(first) + i;
    const char* cell = reinterpret_cast<const char*>(first) + i / kCell * Shape::Ring::kCellBytes;
    return reinterpret_cast<const As*>(cell) + i % kCell;
  }
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

// Which of the first kElements elements are coarsely >= `floor` (both halves of it the same): bit w
// for element 2 w, bit 16 + w for element 2 w + 1.
template <int kElements, class T>
__device__ inline uint32_t Reached(const LaneCell<T>& x, CoarsePair<T> floor) {
  uint32_t reached = 0;
#pragma unroll
  for (int w = 0; w < kElements / 2; ++w) {
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

// The lowest logit, as OrderedBits, with these first 16 bits.
__device__ inline uint32_t LowestOf(uint32_t coarse) {
  return max(coarse << 16, OrderedBits(-kInfinity));  // below it are the bits of NaN
}

// The lane's group maxima, two in a word, 16 bits each; NaN for cells that the row does not have.
template <class Shape>
class GroupMaxima {
 public:
  __device__ GroupMaxima(const typename Shape::Warp& s, int cells, int lane) : cells_(cells) {
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      const int c = w / kOfCell;
      const bool is_there = c < Shape::kFewest || c < cells;
      const uint32_t ordered =
          is_there ? reinterpret_cast<const uint32_t*>(&s.OfCell(c)[lane])[w % kOfCell] : 0;
      if (is_there) least_ = min(least_, max(ordered & 0xffff, ordered >> 16));
      second_ = __vmaxu2(second_, __vminu2(best_, ordered));
      best_ = __vmaxu2(best_, ordered);
      pairs_[w] = FloatsOf(ordered);
    }
  }

  // The first 16 bits of an ordered logit that at least k of the row reach: near the k-th largest
  // of the group maxima.
  __device__ uint32_t Floor(int k) const {
    const uint32_t best = max(best_ & 0xffff, best_ >> 16);
    uint32_t low = 0;  // k groups reach it
    if (k <= 32) {
      low = WarpMin(best);
    } else if (k <= 64) {
      low = WarpMin(max(max(second_ & 0xffff, second_ >> 16), min(best_ & 0xffff, best_ >> 16)));
    } else if (k <= 32 * kOfCell * cells_) {
      low = WarpMin(least_);
    }
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

  // Lists the groups that reach the floor, numbered over cells and lanes. Returns their number;
  // above Shape::kPool not all of them are listed.
  __device__ int List(uint32_t coarse, typename Shape::Warp& s, int lane) const {
    const uint32_t both = FloatsOf((LowestOf(coarse) >> 16) * 0x10001u);
    int n = 0;
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      const int c = w / kOfCell;
      if (c >= Shape::kFewest && c >= cells_) break;
      const uint32_t reached = NotBelow(w, both);
#pragma unroll
      for (int g = 0; g < 2; ++g) {
        const bool hit = (reached >> (16 * g) & 1) != 0;
        const uint32_t lanes = __ballot_sync(kFullWarp, hit);
        const int at = n + __popc(lanes & ((1u << lane) - 1));
        if (hit && at < Shape::kPool)
          s.groups[at] = static_cast<uint16_t>(2 * ((c * 32 + lane) * kOfCell + w % kOfCell) + g);
        n += __popc(lanes);
      }
    }
    __syncwarp();
    return n;
  }

 private:
  using Pair = __nv_bfloat162;                                  // the first 16 bits of two floats
  static constexpr int kOfCell = Shape::Pool::kLaneGroups / 2;  // words
  static constexpr int kWords = Shape::kCells * kOfCell;
  static constexpr int kHalf = Shape::kCells / 2;  // cells

  // Of ordered bits the floats' own. 0 becomes a NaN, which reaches nothing.
  __device__ static uint32_t FloatsOf(uint32_t ordered) {
    const uint32_t positive =
        (ordered >> 15 & 0x10001u) * 0xffffu;  // the upper bits, 16 times each
    return ordered ^ (~positive | 0x80008000u);
  }
  // Which of a word's groups are not below those of `both`: bit 0, bit 16.
  __device__ uint32_t NotBelow(int w, uint32_t both) const {
    return 0x10001u & __hge2_mask(reinterpret_cast<const Pair&>(pairs_[w]),
                                  reinterpret_cast<const Pair&>(both));
  }
  // How many of the row's groups are not below.
  __device__ int CountNotBelow(uint32_t ordered) const {
    const uint32_t both = FloatsOf(ordered * 0x10001u);
    uint32_t counts = 0;  // of the lower halves and of the upper ones
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      if (Shape::kFewest < kHalf && w == kHalf * kOfCell && cells_ <= kHalf) break;
      counts += NotBelow(w, both);
    }
    counts = __reduce_add_sync(kFullWarp, counts);
    return static_cast<int>((counts & 0xffffu) + (counts >> 16));
  }

  const int cells_;
  uint32_t best_ = 0;     // of the lower halves and of the upper ones, in order
  uint32_t second_ = 0;   // the same
  uint32_t least_ = ~0u;  // of the larger one of each word
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

// The floor as a pair of coarse logits, for Reached(): every logit >= floor passes.
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

// Adds the places of the lane's elements that Reached() reports to the `n` listed ones; above
// Shape::kPool they are only counted. place_of(bit) is the place of such an element.
template <class Shape, class PlaceOf>
__device__ __forceinline__ void ListPlaces(uint32_t reached, typename Shape::Warp& s, int lane,
                                           int& n, PlaceOf place_of) {
  const int through = WarpPrefix(__popc(reached), lane);
  int at = n + through - __popc(reached);
  n += __shfl_sync(kFullWarp, through, 31);
#pragma unroll 1
  for (; reached != 0 && at < Shape::kPool; reached &= reached - 1, ++at)
    s.places[at] = static_cast<uint16_t>(place_of(31 - __clz(reached & -reached)));
}

// Lists the places of the row's logits that reach the floor coarsely: a lane reads listed groups
// again. Returns their number; above Shape::kPool not all of them are listed.
template <class Shape>
__device__ __forceinline__ int ListPlacesOfRow(RowInShared<Shape> row, int vocab, uint32_t coarse,
                                               int groups, typename Shape::Warp& s, int lane) {
  using T = typename Shape::Element;
  constexpr int kGroups = Shape::Pool::kLaneGroups;
  constexpr int kElements = Shape::Pool::kElements;
  constexpr int kAtOnce = 32 / kElements;    // groups, whose bits Reached() reports are of one word
  if (groups > Shape::kPool) return groups;  // each has such a logit
  const CoarsePair<T> floor = CoarsePairOfFloor<T>(coarse);
  int n = 0;
#pragma unroll 1
  for (int first = lane; first - lane < groups && n <= Shape::kPool; first += 32 * kAtOnce) {
    uint32_t reached = 0;
    uint64_t places = 0;  // of the groups, 16 bits each
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      if (first + 32 * j >= groups) break;
      const int group = s.groups[first + 32 * j];
      const int c = group / kGroups / 32;
      const int of_lane = group / kGroups % 32;
      const int from = group % kGroups * kElements;  // of the lane's elements
      LaneCell<T> x;                                 // only its first kElements elements
      row.template Read<kElements>(c, of_lane, from, x);
      uint32_t of_group = Reached<kElements>(x, floor);
      if (vocab % kCell != 0) {
        const int left = vocab - c * kCell - CellIndex<T>(of_lane, from);
#pragma unroll
        for (int e = 0; e < kElements; ++e) {
          if (CellIndex<T>(0, e) >= left) of_group &= ~(1u << (e / 2 + e % 2 * 16));
        }
      }
      reached |= of_group << (j * kElements / 2);
      places |= static_cast<uint64_t>(group / kGroups * 32 + from / 2) << (16 * j);
    }
    ListPlaces<Shape>(reached, s, lane, n, [&](int bit) {
      const int j = bit % 16 / (kElements / 2);
      return static_cast<uint32_t>(places >> (16 * j)) + bit - j * (kElements / 2);
    });
  }
  __syncwarp();
  return n;
}

// A candidate in the pool: of f32 a Key, of 16-bit types a Key's bits that are not the same for
// all: the ordered logit, then the index, from the highest on. 0: none.
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

// Fills the pool with the keys of the listed places, and zeros up to 32, kMaxK or the next 32.
template <class Shape>
__device__ __forceinline__ void KeysOfPlaces(RowInShared<Shape> row, int vocab, int n,
                                             typename Shape::Warp& s, int lane) {
  const int end = n <= 32 ? n : max(n, Shape::kMaxK);
#pragma unroll 1
  for (int at = lane; at - lane < end; at += 32) {
    typename Shape::PoolKey key = 0;
    if (at < n) {
      const uint32_t place = s.places[at];
      const int cell = Shape::kHeld ? 0 : static_cast<int>(place >> 10) * kCell;
      const int i = cell + ReachedIndex<typename Shape::Element>(place & 1023);
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
      few = n <= Shape::kPool;
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
  for (int at = n + lane; at < Shape::kPool; at += 32) s.pool[at] = 0;
  __syncwarp();
  return n;
}

// ---- answers -----------------------------------------------------------------------------------

// Which of two keys a lane keeps when it exchanges them with another, for SortOverWarp: bit 15 - i
// is of the i-th exchange at sizes up to 16, then of those at distances 16 to 1: 1 for the larger.
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

// Merges bitonic runs of `size` keys each into sorted ones; every second run is sorted upwards.
template <int kKeys>
__device__ __forceinline__ void MergeRuns(uint32_t (&keys)[kKeys], int size, uint32_t directions,
                                          int bit = 5) {
#pragma unroll
  for (int stride = size / 2; stride >= 32; stride /= 2) {
#pragma unroll
    for (int r = 0; r < kKeys; ++r) {
      if (((32 * r) & stride) != 0) continue;
      uint32_t& low = keys[r];
      uint32_t& high = keys[r + stride / 32];
      const uint32_t larger = max(low, high);
      const uint32_t smaller = min(low, high);
      const bool descends = ((32 * r) & size) == 0;
      low = descends ? larger : smaller;
      high = descends ? smaller : larger;
    }
  }
#pragma unroll
  for (int stride = min(size / 2, 16); stride > 0; stride /= 2, --bit) {
    const bool takes_larger = (directions >> bit & 1) != 0;
#pragma unroll
    for (int r = 0; r < kKeys; ++r) {
      const uint32_t other = __shfl_xor_sync(kFullWarp, keys[r], stride);
      const bool larger = size >= 32 && ((32 * r) & size) != 0 ? !takes_larger : takes_larger;
      keys[r] = larger ? max(keys[r], other) : min(keys[r], other);
    }
  }
}

// Sorts 32 * kKeys keys over the warp, descending; place i is keys[i / 32] of lane i % 32.
template <int kKeys>
__device__ __forceinline__ void SortOverWarp(uint32_t (&keys)[kKeys], uint32_t directions) {
  int bit = 15;
#pragma unroll
  for (int size = 2; size <= 16; size *= 2) {
    MergeRuns(keys, size, directions, bit);
    bit -= std::bit_width(static_cast<unsigned>(size)) - 1;
  }
#pragma unroll
  for (int size = 32; size <= 32 * kKeys; size *= 2) MergeRuns(keys, size, directions);
}

// Where a row's answers go.
struct RowAnswers {
  int k;
  int32_t* indices;
  float* probs;

  __device__ void Write(int rank, int32_t index, float logit, const RowResult& result) const {
    if (rank >= k) return;
    indices[rank] = index;
    probs[rank] = result.Probability(logit);
  }
};

// Adds to `above` the key > mine, by the borrow of mine - key.
__device__ inline void CountAbove(Key key, Key mine, int& above) {
  int borrow;
  asm("{\n\t"
      ".reg .u32 low;\n\t"
      "sub.cc.u32 low, %1, %3;\n\t"
      "subc.cc.u32 low, %2, %4;\n\t"
      "subc.u32 %0, 0, 0;\n\t"
      "}"
      : "=r"(borrow)
      : "r"(static_cast<uint32_t>(mine)), "r"(static_cast<uint32_t>(mine >> 32)),
        "r"(static_cast<uint32_t>(key)), "r"(static_cast<uint32_t>(key >> 32)));
  above -= borrow;
}
__device__ inline void CountAbove(uint32_t key, uint32_t mine, int& above) { above += key > mine; }

// Writes the k largest of the n keys of a pool, which zeros follow: each is compared with all.
// kFew: there are at most 32.
template <class Shape, bool kFew>
__device__ __forceinline__ void EmitRanked(const typename Shape::Warp& s, int n,
                                           const RowAnswers& answers, const RowResult& result,
                                           int lane) {
  using PoolKey = typename Shape::PoolKey;
#pragma unroll 1
  for (int place = lane; place - lane < n; place += 32) {
    const PoolKey mine = s.pool[place];
    int rank = 0;
#pragma unroll 1
    for (int j = 0; j < n; j += 4) {
      PoolKey keys[4];
      if constexpr (sizeof(PoolKey) == 8) {
        const ulonglong2* pairs = reinterpret_cast<const ulonglong2*>(s.pool + j);
        keys[0] = pairs[0].x, keys[1] = pairs[0].y, keys[2] = pairs[1].x, keys[3] = pairs[1].y;
      } else {
        const uint4 four = *reinterpret_cast<const uint4*>(s.pool + j);
        keys[0] = four.x, keys[1] = four.y, keys[2] = four.z, keys[3] = four.w;
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) CountAbove(keys[i], mine, rank);
    }
    if (mine != 0) {
      if constexpr (sizeof(PoolKey) == 8) {
        answers.Write(rank, KeyIndex(mine), KeyLogit(mine), result);
      } else {
        answers.Write(rank, 0xffff - static_cast<int32_t>(mine & 0xffff),
                      PoolKeyLogit<typename Shape::Element>(mine), result);
      }
    }
    if (kFew) break;
  }
}

// The logits of a pool, as OrderedBits.
struct LogitRange {
  uint32_t low;
  uint32_t high;
  __device__ int UnusedBits() const { return __clz(high - low); }  // of what is above `low`
};

// 32 bits of the key at a place of the pool, for sorting: all of a 16-bit logit's; of an f32 one
// the upper bits of what it is above the lowest, and the place. Where neighbours in that order
// agree in those bits, it may not be the right one.
template <class Shape>
struct SortedBits {
  static constexpr int kPlaceBits = std::bit_width(static_cast<unsigned>(Shape::kPool)) - 1;
  static_assert(Shape::kPool == 1 << kPlaceBits);

  const uint32_t low;
  const int shift;

  __device__ explicit SortedBits(LogitRange range)
      : low(range.low), shift(max(0, kPlaceBits - range.UnusedBits())) {}
  __device__ uint32_t operator()(uint32_t key, int /*place*/) const { return key; }
  __device__ uint32_t operator()(Key key, int place) const {
    const auto ordered = static_cast<uint32_t>(key >> 32);
    return ordered < low ? 0 : (ordered - low) >> shift << kPlaceBits | place;
  }
};

// Writes a row's answers by sorting 32 bits of each key: first of as many as k may be, into which
// the others are merged 32 at a time. False, and nothing is written, where those bits do not tell
// keys apart.
template <class Shape>
__device__ __forceinline__ bool EmitSorted(const typename Shape::Warp& s, int n, LogitRange range,
                                           const RowAnswers& answers, const RowResult& result,
                                           uint32_t directions, int lane) {
  using T = typename Shape::Element;
  constexpr int kKeys = Shape::kMaxK / 32;
  const SortedBits<Shape> bits(range);
  uint32_t keys[kKeys];
#pragma unroll
  for (int r = 0; r < kKeys; ++r) keys[r] = bits(s.pool[32 * r + lane], 32 * r + lane);
  SortOverWarp(keys, directions);
  uint32_t dropped = 0;  // the largest key that is no longer there
#pragma unroll 1
  for (int place = Shape::kMaxK + lane; place - lane < n; place += 32) {
    uint32_t more[] = {bits(s.pool[place], place)};
    SortOverWarp(more, directions);
    const uint32_t other = __shfl_xor_sync(kFullWarp, more[0], 31);
    dropped = max(dropped, min(keys[kKeys - 1], other));
    keys[kKeys - 1] = max(keys[kKeys - 1], other);
    MergeRuns(keys, Shape::kMaxK, directions);
  }
  if constexpr (sizeof(T) == 2) {
#pragma unroll
    for (int r = 0; r < kKeys; ++r) {
      answers.Write(32 * r + lane, 0xffff - static_cast<int32_t>(keys[r] & 0xffff),
                    PoolKeyLogit<T>(keys[r]), result);
    }
  } else {
    dropped = WarpMax(dropped);
    bool equal = false;
#pragma unroll
    for (int r = 0; r < kKeys; ++r) {
      // Lane 31 compares with the next 32's first, or with what was dropped.
      const uint32_t first = r + 1 < kKeys ? keys[r + 1 < kKeys ? r + 1 : r] : dropped;
      const uint32_t next = __shfl_sync(kFullWarp, lane == 0 ? first : keys[r], (lane + 1) % 32);
      equal |= 32 * r + lane < answers.k && (next ^ keys[r]) < 1u << SortedBits<Shape>::kPlaceBits;
    }
    if (__any_sync(kFullWarp, equal)) return false;
#pragma unroll
    for (int r = 0; r < kKeys; ++r) {
      const Key key = s.pool[keys[r] % Shape::kPool];
      answers.Write(32 * r + lane, KeyIndex(key), KeyLogit(key), result);
    }
  }
  return true;
}

}  // namespace logitd::cuda

#endif  // LOGITD_KERNELS_CUDA_SAMPLING_TOPK_CANDIDATES_CUH_
