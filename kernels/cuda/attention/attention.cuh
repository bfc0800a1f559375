// A row of attention scores and the threads that hold it: what the forward and the backward kernel
// share.
//
// A row is cut into vectors of kElements elements, counted from the row's start, never from an
// address, and a warp holds neighbouring ones, dealt out to the row's lanes in turns. So
// which element a thread adds in which order depends on the index alone, and a row's bits are the
// same at any alignment and stride. How many warps own a row depends on its length, its types and
// whether it has a mask or a window.
#ifndef LOGITD_KERNELS_CUDA_ATTENTION_ATTENTION_CUH_
#define LOGITD_KERNELS_CUDA_ATTENTION_ATTENTION_CUH_

#include <algorithm>
#include <bit>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "kernels/attention_softmax.h"
#include "kernels/cuda/rows/cell.cuh"
#include "kernels/cuda/rows/cluster.cuh"

namespace logitd::cuda {

// Elements of a vector: 16 bytes of the wider side.
template <class In, class Out>
constexpr int kElements = 16 / static_cast<int>(std::max(sizeof(In), sizeof(Out)));

template <class T, int E>
constexpr int kWords = E* static_cast<int>(sizeof(T)) / 4;

constexpr int kNoPosition = std::numeric_limits<int>::max();

// Keys [begin, end) that a query sees; nothing where they are equal.
struct Seen {
  int begin;
  int end;

  // Of the E keys from `index`.
  template <int E>
  __device__ bool Some(int index) const {
    return index < end && index + E > begin;
  }
  template <int E>
  __device__ bool All(int index) const {
    return index >= begin && index + E <= end;
  }
  __device__ bool Has(int key) const { return key >= begin && key < end; }
};

// ---- vectors in memory, at any alignment -------------------------------------------------------

// Moves words down by kStep where `words` has that bit, then by half as many, down to one.
template <int kStep, int kCount>
__device__ inline void ShiftDown(uint32_t words, uint32_t (&shifted)[kCount]) {
  // A mask, not a choice of words: of those the compiler makes a lookup in memory.
  const uint32_t by = (words & kStep) != 0 ? ~0u : 0u;
#pragma unroll
  for (int i = 0; i + kStep < kCount; ++i)
    shifted[i] = (shifted[i] & ~by) | (shifted[i + kStep] & by);
  if constexpr (kStep > 1) ShiftDown<kStep / 2>(words, shifted);
}

// The words that begin `bytes` bytes into two blocks, bytes <= 4 * kCount.
template <int kCount>
__device__ inline void TakeFrom(const uint32_t (&two)[2 * kCount], uint32_t bytes,
                                uint32_t (&words)[kCount]) {
  uint32_t shifted[2 * kCount + 1];
#pragma unroll
  for (int i = 0; i < 2 * kCount; ++i) shifted[i] = two[i];
  shifted[2 * kCount] = 0;
  ShiftDown<kCount>(bytes / 4, shifted);
#pragma unroll
  for (int i = 0; i < kCount; ++i)
    words[i] = __funnelshift_r(shifted[i], shifted[i + 1], bytes % 4 * 8);
}

// kStream: what is read once, and need not stay in a cache.
template <bool kStream, int kCount>
__device__ inline void LoadAligned(const void* from, uint32_t (&words)[kCount]) {
  if constexpr (kCount == 8) {
    const uint4* vectors = static_cast<const uint4*>(from);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint4 v = kStream ? __ldcs(vectors + i) : vectors[i];
      words[4 * i] = v.x;
      words[4 * i + 1] = v.y;
      words[4 * i + 2] = v.z;
      words[4 * i + 3] = v.w;
    }
  } else if constexpr (kCount == 4) {
    const uint4* vector = static_cast<const uint4*>(from);
    const uint4 v = kStream ? __ldcs(vector) : *vector;
    words[0] = v.x;
    words[1] = v.y;
    words[2] = v.z;
    words[3] = v.w;
  } else if constexpr (kCount == 2) {
    const uint2* vector = static_cast<const uint2*>(from);
    const uint2 v = kStream ? __ldcs(vector) : *vector;
    words[0] = v.x;
    words[1] = v.y;
  } else {
    const uint32_t* vector = static_cast<const uint32_t*>(from);
    words[0] = kStream ? __ldcs(vector) : *vector;
  }
}

// kCount vectors of E elements of a row, loaded at any alignment by all lanes of a warp; every
// kLanes of them hold neighbours. A lane loads the aligned block where its vector begins; the rest
// of the vector is in the block of the next lane, or for the last lane in the next one of the
// first.
template <class T, int E, int kLanes, int kCount>
struct Blocks {
  static constexpr int kBlockWords = kWords<T, E>;
  uint32_t words[kCount][kBlockWords];
  uint32_t beyond[kBlockWords];  // of the last lane: the block after its last

  // Elements between a block's begin and the row's first element in it.
  __device__ static int Offset(const T* row) {
    return static_cast<int>(reinterpret_cast<uintptr_t>(row) % (4 * kBlockWords) / sizeof(T));
  }

  // Starts the loads of blocks with an element that is seen; no other is read, but for the first of
  // a row that sees none.
  __device__ void Load(const T* row, const Seen& seen, int first) {
    const int begin = first - Offset(row);
#pragma unroll
    for (int v = 0; v < kCount; ++v) {
      const int index = begin + v * kLanes * E;
      if (seen.Some<E>(index)) LoadAligned<false>(row + index, words[v]);
    }
    const int index = begin + (kCount - 1) * kLanes * E + E;
    if (threadIdx.x % kLanes == kLanes - 1 && seen.Some<E>(index))
      LoadAligned<false>(row + index, beyond);
  }

  // Turns blocks into vectors.
  __device__ void Align(const T* row) {
    const uint32_t bytes = Offset(row) * static_cast<uint32_t>(sizeof(T));
    const int lane = threadIdx.x % 32;
    const int place = lane % kLanes;
    const int next = place + 1 == kLanes ? lane + 1 - kLanes : lane + 1;
#pragma unroll
    for (int v = 0; v < kCount; ++v) {
      uint32_t two[2 * kBlockWords];
#pragma unroll
      for (int w = 0; w < kBlockWords; ++w) {
        two[w] = words[v][w];
        const uint32_t given =
            v + 1 < kCount && place == 0 ? words[min(v + 1, kCount - 1)][w] : words[v][w];
        two[kBlockWords + w] = __shfl_sync(kFullWarp, given, next);
        if (v + 1 == kCount && place + 1 == kLanes) two[kBlockWords + w] = beyond[w];
      }
      TakeFrom<kBlockWords>(two, bytes, words[v]);
    }
  }
};

template <int kCount>
__device__ inline void StoreAligned(void* to, const uint32_t (&words)[kCount]) {
  if constexpr (kCount == 4) {
    __stcs(static_cast<uint4*>(to), uint4{words[0], words[1], words[2], words[3]});
  } else {
    static_assert(kCount == 2);
    __stcs(static_cast<uint2*>(to), uint2{words[0], words[1]});
  }
}

template <class T>
__device__ inline void StoreElement(T* to, const uint32_t* words, int e) {
  if constexpr (sizeof(T) == 4) {
    *reinterpret_cast<uint32_t*>(to) = words[e];
  } else {
    *reinterpret_cast<uint16_t*>(to) = static_cast<uint16_t>(words[e / 2] >> (e % 2 * 16));
  }
}

// Writes kCount vectors of E elements of a row at any alignment, by all lanes of a warp, as Blocks
// loads them: a lane writes the aligned block where its vector begins. vector(v, words) gives the
// lane's v-th.
template <class T, int E, int kLanes, int kCount, class Vector>
__device__ inline void StoreBlocks(T* row, bool active, int first, int length, Vector vector) {
  constexpr int kBlockWords = kWords<T, E>;
  const int lane = threadIdx.x % 32;
  const int place = lane % kLanes;
  const int before = place == 0 ? lane + kLanes - 1 : lane - 1;
  const uint32_t bytes = reinterpret_cast<uintptr_t>(row) % (4 * kBlockWords);
  const int offset = static_cast<int>(bytes / sizeof(T));
  uint32_t previous[kBlockWords] = {};
#pragma unroll
  for (int v = 0; v <= kCount; ++v) {  // at last, what is left of the last lane's last vector
    uint32_t words[kBlockWords] = {};
    if (v < kCount) vector(v, words);
    uint32_t two[2 * kBlockWords];
#pragma unroll
    for (int w = 0; w < kBlockWords; ++w) {
      two[w] = __shfl_sync(kFullWarp, place + 1 == kLanes ? previous[w] : words[w], before);
      two[kBlockWords + w] = words[w];
      previous[w] = words[w];
    }
    const int index = first + v * kLanes * E;
    const int begin = v == 0 && place == 0 ? index : index - offset;
    const int end = min(v < kCount ? index - offset + E : place == 0 ? index : 0, length);
    if (!active || begin >= end) continue;
    uint32_t block[kBlockWords];
    TakeFrom<kBlockWords>(two, 4 * kBlockWords - bytes, block);
    T* to = row + (index - offset);
    if (end - begin == E) {
      StoreAligned(to, block);
    } else {
#pragma unroll
      for (int e = 0; e < E; ++e) {
        const int key = index - offset + e;
        if (key >= begin && key < end) StoreElement(to + e, block, e);
      }
    }
  }
}

template <class T, int E>
__device__ inline void Pack(const float* x, uint32_t (&words)[kWords<T, E>]) {
#pragma unroll
  for (int i = 0; i < kWords<T, E>; ++i) {
    if constexpr (sizeof(T) == 4) {
      words[i] = __float_as_uint(x[i]);
    } else if constexpr (std::is_same_v<T, __half>) {
      const __half2 pair = __floats2half2_rn(x[2 * i], x[2 * i + 1]);
      words[i] = reinterpret_cast<const uint32_t&>(pair);
    } else {
      const __nv_bfloat162 pair = __floats2bfloat162_rn(x[2 * i], x[2 * i + 1]);
      words[i] = reinterpret_cast<const uint32_t&>(pair);
    }
  }
}

// A tensor's rows in memory.
struct Matrix {
  std::byte* data;
  int64_t row_bytes;
  bool whole;  // rows are whole vectors, each aligned

  template <class T>
  __device__ T* Row(uint32_t row) const {
    return reinterpret_cast<T*>(data + row * row_bytes);
  }
  void Skip(int64_t rows) { data += rows * row_bytes; }
};

template <class T, int E>
Matrix MatrixOf(const void* data, int64_t row_stride, int64_t keys) {
  constexpr int64_t kBytes = E * static_cast<int64_t>(sizeof(T));
  const int64_t row_bytes = row_stride * static_cast<int64_t>(sizeof(T));
  return {
      static_cast<std::byte*>(const_cast<void*>(data)), row_bytes,
      keys % E == 0 && row_bytes % kBytes == 0 && reinterpret_cast<uintptr_t>(data) % kBytes == 0};
}

// ---- which rows, and what they see -------------------------------------------------------------

// n / divisor for n < 2^31 by a multiplication.
struct Divider {
  uint32_t divisor = 1;
  uint32_t factor = 0;
  uint32_t shift = 0;

  Divider() = default;
  explicit Divider(uint32_t by) : divisor(by) {
    if (by == 1) return;
    const int bits = 31 + std::bit_width(by - 1);
    factor = static_cast<uint32_t>(((uint64_t{1} << bits) + by - 1) / by);
    shift = static_cast<uint32_t>(bits - 32);
  }
  __device__ uint32_t operator()(uint32_t n) const {
    return divisor == 1 ? n : __umulhi(n, factor) >> shift;
  }
};

// Where a row stands in the tensor.
struct Place {
  int64_t batch;
  int64_t head;
  int64_t query;
};

// The rows of a launch, at most kMost.
struct PassRows {
  static constexpr int64_t kMost = int64_t{1} << 27;
  static constexpr int64_t kNarrow = int64_t{1} << 30;  // below: no number of a place needs 64 bits

  uint32_t count;
  int32_t keys;
  int64_t queries;
  int64_t heads;
  Place first;
  Divider by_queries;
  Divider by_heads;
  bool narrow;
  bool windowed;
  int64_t left;  // bounded so that sums with it fit
  int64_t right;

  PassRows() = default;
  // Rows [begin, begin + rows) of those the call works on.
  PassRows(const AttentionShape& shape, const AttentionWindow& window, int64_t begin,
           int64_t rows) {
    count = static_cast<uint32_t>(rows);
    keys = static_cast<int32_t>(shape.keys);
    queries = shape.queries;
    heads = shape.heads;
    const int64_t row = shape.first_row + begin;
    first = {row / queries / heads, row / queries % heads, row % queries};
    narrow = queries < kNarrow && heads < kNarrow;
    if (narrow) {
      by_queries = Divider(static_cast<uint32_t>(queries));
      by_heads = Divider(static_cast<uint32_t>(heads));
    }
    left = window.left < 0 ? -1 : std::min(window.left, shape.keys);
    right = window.right < 0 ? -1 : std::min(window.right, queries);
    windowed = left >= 0 || right >= 0;
  }

  __device__ Place PlaceOf(uint32_t row) const {
    if (narrow) {
      const uint32_t query = row + static_cast<uint32_t>(first.query);
      const uint32_t queries_before = by_queries(query);
      const uint32_t head = queries_before + static_cast<uint32_t>(first.head);
      const uint32_t heads_before = by_heads(head);
      return {first.batch + heads_before, head - heads_before * by_heads.divisor,
              query - queries_before * by_queries.divisor};
    }
    const int64_t query = row + first.query;
    const int64_t head = query / queries + first.head;
    return {first.batch + head / heads, head % heads, query % queries};
  }

  // What the query of a row sees.
  __device__ Seen SeenBy(uint32_t row) const {
    if (!windowed) return {0, keys};
    if (narrow) {
      const uint32_t at = row + static_cast<uint32_t>(first.query);
      const uint32_t query = at - by_queries(at) * by_queries.divisor;
      return Within(static_cast<int>(query) + keys - static_cast<int>(queries),
                    static_cast<int>(left), static_cast<int>(right));
    }
    return Within((row + first.query) % queries + keys - queries, left, right);
  }

 private:
  // `at`: the key the query is aligned with.
  template <class Int>
  __device__ Seen Within(Int at, Int to_left, Int to_right) const {
    const Int begin = to_left < 0 ? 0 : max(at - to_left, Int{0});
    const Int end = to_right < 0 ? keys : min(at + to_right + 1, static_cast<Int>(keys));
    if (begin >= end) return {0, 0};
    return {static_cast<int>(begin), static_cast<int>(end)};
  }
};

// ---- sums over the lanes that own a row --------------------------------------------------------

template <int kLanes, class Op>
__device__ inline auto LanesReduce(auto v, Op op) {
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2)
    v = op(v, __shfl_xor_sync(kFullWarp, v, offset));
  return v;
}
template <int kLanes>
__device__ inline float LanesMax(float v) {
  return LanesReduce<kLanes>(v, [](float a, float b) { return fmaxf(a, b); });
}
// Every lane gets the same bits: the butterfly adds the same pairs everywhere.
template <int kLanes>
__device__ inline float LanesSum(float v) {
  return LanesReduce<kLanes>(v, [](float a, float b) { return a + b; });
}
template <int kLanes>
__device__ inline int LanesMin(int v) {
  return LanesReduce<kLanes>(v, [](int a, int b) { return min(a, b); });
}

// The warps of a row that hold something its query sees; warp 0 where it sees nothing.
struct ActiveWarps {
  int begin;
  int end;

  // `held`: elements of a warp.
  __device__ ActiveWarps(const Seen& seen, int held)
      : begin(seen.begin / held), end(max((seen.end + held - 1) / held, begin + 1)) {}
  __device__ bool Has(int warp) const { return warp >= begin && warp < end; }
};

// ---- how rows are dealt out --------------------------------------------------------------------

// Threads of rows that are longer than a warp holds.
struct BlockPlan {
  int threads;     // of a block
  int blocks;      // of a row: a cluster
  bool two_reads;  // the row does not fit on chip
};

constexpr int kMaxRowWarps = 32;      // of a block
constexpr int kMaxRowThreads = 1024;  // of a block

// `per_thread`: elements a thread holds. `spread`: where a row would need more threads of a block,
// it is spread over more blocks. Several blocks of a multiprocessor hide each other's latencies.
inline BlockPlan PlanBlocks(int64_t keys, int per_thread, bool clusters, int spread) {
  const auto threads_at = [&](int blocks) {
    const int64_t elements = int64_t{32} * per_thread * blocks;
    return 32 * ((keys + elements - 1) / elements);
  };
  int blocks = 1;
  while (clusters && blocks < kMaxClusterBlocks && threads_at(blocks) > spread) blocks *= 2;
  const int64_t threads = threads_at(blocks);
  const bool fits = threads <= kMaxRowThreads;
  return {
      .threads = fits ? static_cast<int>(threads) : spread, .blocks = blocks, .two_reads = !fits};
}

// Launches `kernel` with a cluster of plan.blocks blocks for each row.
template <class Params>
cudaError_t LaunchBlocks(void (*kernel)(Params), const BlockPlan& plan, const Params& p,
                         cudaStream_t stream) {
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(p.rows.count * plan.blocks);
  config.blockDim = dim3(plan.threads);
  config.stream = stream;
  cudaLaunchAttribute cluster;
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {static_cast<unsigned>(plan.blocks), 1, 1};
  config.attrs = &cluster;
  config.numAttrs = plan.blocks > 1 ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, p);
}

// A thread's part in its row's blocks.
template <bool kCluster>
struct RowThread {
  int blocks;
  int warps;  // of the row
  int warp;   // neighbours are in different blocks, so that a part of a row is work for all of them

  __device__ RowThread() {
    blocks = 1;
    int block = 0;
#if __CUDA_ARCH__ >= 900
    if constexpr (kCluster) {
      asm("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(blocks));
      asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(block));
    }
#endif
    warps = blocks * static_cast<int>(blockDim.x / 32);
    warp = static_cast<int>(threadIdx.x / 32) * blocks + block;
  }
  __device__ uint32_t Row() const { return blockIdx.x / blocks; }

  // Leaves the items of the warps for which `given` in every block of the row, by warp, and waits
  // for all of them. Warps that have ended are not waited for.
  template <class Item>
  __device__ void Share(const Item& item, bool given, Item* items) const {
    const int lane = threadIdx.x % 32;
    if constexpr (kCluster) {
      ClusterWait();  // all blocks have begun: their memory is there
      if (given && lane < blocks) *InBlock(items + warp, lane) = item;
      ClusterArrive();
      ClusterWait();
    } else {
      if (given && lane == 0) items[warp] = item;
      __syncthreads();
    }
  }
};

}  // namespace logitd::cuda

#endif  // LOGITD_KERNELS_CUDA_ATTENTION_ATTENTION_CUH_
