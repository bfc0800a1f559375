// Keys of tokens, and how a block chooses the largest of many: a threshold found by narrowing bins,
// then a sort of what reaches it.
#ifndef LOGITD_KERNELS_CUDA_ROWS_SELECT_CUH_
#define LOGITD_KERNELS_CUDA_ROWS_SELECT_CUH_

#include <cstdint>
#include <type_traits>

#include "kernels/cuda/element.cuh"
#include "kernels/cuda/rows/reductions.cuh"

namespace logitd::cuda {

// A token as a key: larger logit first, then lower index. All keys of a row differ.
using Key = uint64_t;
__device__ inline Key MakeKey(float x, int32_t index) {
  return static_cast<Key>(OrderedBits(x)) << 32 | static_cast<uint32_t>(~index);
}
__device__ inline float KeyLogit(Key key) {
  return FromOrderedBits(static_cast<uint32_t>(key >> 32));
}
__device__ inline int32_t KeyIndex(Key key) {
  return static_cast<int32_t>(~static_cast<uint32_t>(key));
}

constexpr int kBins = 256;

// Shared memory of a selection.
struct SelectScratch {
  static constexpr int kMaxWarps = 16;
  uint64_t low[kMaxWarps];
  uint64_t high[kMaxWarps];
  uint64_t edge;
  int above;
  int reached;
  uint32_t bins[kBins];
};

__device__ inline int BitsToShift(uint64_t range, int bin_bits) {
  const int width = 64 - __clzll(static_cast<long long>(range));
  return width > bin_bits ? width - bin_bits : 0;
}

// The integer in which a selection compares keys of a type.
template <class AnyKey>
using WideKey = std::conditional_t<sizeof(AnyKey) == 8, uint64_t, uint32_t>;

// Makes the lowest and highest of the threads' keys those of the block, and all bins zero. Called
// by all threads; ends with a barrier passed.
template <int kThreads, class Wide>
__device__ __forceinline__ void BlockRange(Wide& low, Wide& high, SelectScratch& s) {
  constexpr int kWarps = kThreads / 32;
  static_assert(kWarps <= SelectScratch::kMaxWarps);
  low = WarpMin(low);
  high = WarpMax(high);
  if (threadIdx.x % 32 == 0) {
    s.low[threadIdx.x / 32] = low;
    s.high[threadIdx.x / 32] = high;
  }
  for (int b = threadIdx.x; b < kBins; b += kThreads) s.bins[b] = 0;
  __syncthreads();
  low = static_cast<Wide>(s.low[0]);
  high = static_cast<Wide>(s.high[0]);
#pragma unroll
  for (int w = 1; w < kWarps; ++w) {
    low = min(low, static_cast<Wide>(s.low[w]));
    high = max(high, static_cast<Wide>(s.high[w]));
  }
}

// Calls visit(key) for the thread's share of n keys. 16-bit keys come eight at a time: aligned to
// 16 bytes, n a multiple of 8.
template <int kThreads, class AnyKey, class Visit>
__device__ inline void VisitKeys(const AnyKey* keys, int n, Visit visit) {
  if constexpr (sizeof(AnyKey) == 2) {
    const uint4* blocks = reinterpret_cast<const uint4*>(keys);
#pragma unroll 2
    for (int i = static_cast<int>(threadIdx.x); i < n / 8; i += kThreads) {
      const uint4 block = blocks[i];
      const uint32_t words[4] = {block.x, block.y, block.z, block.w};
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        visit(words[w] & 0xffffu);
        visit(words[w] >> 16);
      }
    }
  } else {
#pragma unroll 4
    for (int i = static_cast<int>(threadIdx.x); i < n; i += kThreads) visit(keys[i]);
  }
}

// The bin, from the top one down, in which the count of keys reaches k; keys of higher ranges are
// counted in `above`. Leaves the bin's lowest key and the counts above and through it in `s`. By
// one warp.
template <class Wide>
__device__ __forceinline__ void FindBin(Wide low, int shift, int above, int k, SelectScratch& s) {
  constexpr int kPerLane = kBins / 32;
  const int lane = threadIdx.x % 32;
  const int top = kBins - 1 - lane * kPerLane;
  int counts[kPerLane];
  int sum = 0;
#pragma unroll
  for (int b = 0; b < kPerLane; ++b) {
    counts[b] = static_cast<int>(s.bins[top - b]);
    sum += counts[b];
  }
  int before = above + WarpPrefix(sum, lane) - sum;
  if (before >= k || before + sum < k) return;
#pragma unroll
  for (int b = 0; b < kPerLane; ++b) {
    if (before < k && before + counts[b] >= k) {
      s.edge = low + (static_cast<Wide>(top - b) << shift);
      s.above = before;
      s.reached = before + counts[b];
    }
    before += counts[b];
  }
}

// A key t with k <= |{i < n: keys[i] >= t}| <= k + slack, or the k-th largest key where equal keys
// allow no such t. 1 <= k <= n. Called by all threads of the block; ends with a barrier passed.
// AnyKey is an unsigned integer.
//
// Bins span the range that is left, so the first pass resolves 1/256 of the keys' own spread,
// whatever the values. Keys below every thread's best (or second best) are not looked at: the k-th
// largest is not among them.
template <int kThreads, class AnyKey>
__device__ __noinline__ AnyKey SelectThreshold(const AnyKey* keys, int n, int k, int slack,
                                               SelectScratch& s) {
  using Wide = WideKey<AnyKey>;
  const int thread = threadIdx.x;
  Wide best = 0;
  Wide second = 0;
  VisitKeys<kThreads>(keys, n, [&](Wide key) {
    second = max(second, min(best, key));
    best = max(best, key);
  });
  Wide low = k <= kThreads ? best : k <= 2 * kThreads ? second : Wide{0};
  Wide high = best;
  BlockRange<kThreads>(low, high, s);
  int above = 0;  // keys > high
#pragma unroll 1
  while (true) {
    const int shift = BitsToShift(high - low, 8);
    VisitKeys<kThreads>(keys, n, [&](Wide key) {
      if (key >= low && key <= high) atomicAdd(&s.bins[(key - low) >> shift], 1u);
    });
    __syncthreads();
    if (thread < 32) FindBin(low, shift, above, k, s);
    __syncthreads();
    low = static_cast<Wide>(s.edge);
    above = s.above;
    if (s.reached <= k + slack || shift == 0) break;
    // No sum wraps: keys of +inf are near the top.
    high = low + min(high - low, (Wide{1} << shift) - 1);
    for (int b = thread; b < kBins; b += kThreads) s.bins[b] = 0;
    __syncthreads();
  }
  __syncthreads();
  return static_cast<AnyKey>(low);
}

// Keeps, in place, the keys for which `keep` is true; returns how many. `counter` is in shared
// memory. Called by all threads; ends with a barrier passed. The order of what is kept is not
// defined.
template <int kThreads, class Keep>
__device__ int CompactKeys(Key* keys, int n, int& counter, Keep keep) {
  constexpr int kPerThread = 4;
  if (threadIdx.x == 0) counter = 0;
#pragma unroll 1
  for (int begin = 0; begin < n; begin += kThreads * kPerThread) {
    Key held[kPerThread];
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      const int at = begin + i * kThreads + static_cast<int>(threadIdx.x);
      held[i] = at < n ? keys[at] : 0;
    }
    __syncthreads();  // the writes below go to places that all threads have read
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      const int at = begin + i * kThreads + static_cast<int>(threadIdx.x);
      if (at < n && keep(held[i])) keys[atomicAdd(&counter, 1)] = held[i];
    }
  }
  __syncthreads();
  return counter;
}

// EmitByRank for few keys: each is compared with all.
template <int kThreads, class Emit>
__device__ __forceinline__ void EmitByComparing(Key* keys, int n, Emit emit) {
  const int thread = threadIdx.x;
  // A key is ranked by 2^shift neighbouring lanes, as there are threads for it, two keys a load.
  int shift = 0;
  while (shift < 5 && n << (shift + 1) <= kThreads) ++shift;
  const int parts = 1 << shift;
  const int chunk = (n + 2 * parts - 1) >> (shift + 1);  // pairs of keys a part looks at
  __syncthreads();
  if (thread < 2 * parts * chunk - n) keys[n + thread] = 0;  // below every key
  __syncthreads();
  const int part = thread & (parts - 1);
  const ulonglong2* pairs = reinterpret_cast<const ulonglong2*>(keys) + part * chunk;
#pragma unroll 1
  for (int first = thread / 32 * 32 >> shift; first < n; first += kThreads >> shift) {
    const int i = first + (thread % 32 >> shift);  // all lanes of a warp stay for the shuffles
    const Key mine = i < n ? keys[i] : 0;
    int rank = 0;
#pragma unroll(kThreads > 256 ? 4 : 8)
    for (int j = 0; j < chunk; ++j) {
      const ulonglong2 pair = pairs[j];
      rank += pair.x > mine;
      rank += pair.y > mine;
    }
#pragma unroll 1
    for (int offset = 1; offset < parts; offset *= 2)
      rank += __shfl_xor_sync(kFullWarp, rank, offset);
    if (part == 0 && i < n) emit(rank, mine);
  }
}

// Turns each bin's count into where the bin starts in descending order: the count of keys in higher
// bins. By one warp.
__device__ __forceinline__ void BinStarts(SelectScratch& s) {
  constexpr int kPerLane = kBins / 32;
  const int lane = threadIdx.x;
  const int top = kBins - 1 - lane * kPerLane;
  uint32_t sum = 0;
#pragma unroll
  for (int b = 0; b < kPerLane; ++b) sum += s.bins[top - b];
  uint32_t start = WarpPrefix(sum, lane) - sum;
#pragma unroll
  for (int b = 0; b < kPerLane; ++b) {
    const uint32_t count = s.bins[top - b];
    s.bins[top - b] = start;
    start += count;
  }
}

// The bin of a key among keys in [low, high]: the higher of two keys has no lower one. By the keys'
// bits, or by the values of their logits: bits crowd where logits lie on both sides of zero.
class RankBins {
 public:
  __device__ RankBins(Key low, Key high)
      : low_(low),
        shift_(BitsToShift(high - low, 8)),
        least_(KeyLogit(low)),
        most_(KeyLogit(high)) {}
  __device__ void UseValues() {
    least_ = fmaxf(least_, -3.402823466e38f);
    most_ = fminf(most_, 3.402823466e38f);
    bins_a_logit_ = most_ > least_ ? (kBins - 1) / (most_ - least_) : 0.0f;
    by_value_ = true;
  }
  __device__ int operator()(Key key) const {
    if (!by_value_) return static_cast<int>((key - low_) >> shift_);
    const float x = fminf(fmaxf(KeyLogit(key), least_), most_);
    return min(static_cast<int>((x - least_) * bins_a_logit_), kBins - 1);
  }

 private:
  const Key low_;
  const int shift_;
  float least_;
  float most_;
  float bins_a_logit_ = 0.0f;
  bool by_value_ = false;
};

// The most keys in a bin. The same in all threads.
__device__ __forceinline__ uint32_t FullestBin(const SelectScratch& s) {
  uint32_t most = 0;
#pragma unroll
  for (int b = threadIdx.x % 32; b < kBins; b += 32) most = max(most, s.bins[b]);
  return WarpMax(most);
}

// Calls emit(rank, key) for each of the n distinct keys, rank 0 the largest. `keys` is 16-byte
// aligned and has room for 64 keys more; `spare` is room for n keys, used above kRankDirectly keys.
// Called by all threads; the caller passes a barrier before the keys change.
constexpr int kRankDirectly = 256;
constexpr uint32_t kCrowd = 64;  // keys in a bin: each is compared with all of them

template <int kThreads, class Emit>
__device__ void EmitByRank(Key* keys, int n, Key* spare, SelectScratch& s, Emit emit) {
  if (n <= kRankDirectly) return EmitByComparing<kThreads>(keys, n, emit);
  // Scatter into bins over the keys' own range, then rank within the bin.
  const int thread = threadIdx.x;
  uint64_t low = ~uint64_t{0};
  uint64_t high = 0;
#pragma unroll 4
  for (int i = thread; i < n; i += kThreads) {
    low = min(low, keys[i]);
    high = max(high, keys[i]);
  }
  BlockRange<kThreads>(low, high, s);
  RankBins bin_of(low, high);
  const auto count = [&] {
#pragma unroll 2
    for (int i = thread; i < n; i += kThreads) atomicAdd(&s.bins[bin_of(keys[i])], 1u);
    __syncthreads();
  };
  count();
  if (FullestBin(s) > kCrowd) {
    __syncthreads();
    for (int b = thread; b < kBins; b += kThreads) s.bins[b] = 0;
    bin_of.UseValues();
    __syncthreads();
    count();
  }
  __syncthreads();
  if (thread < 32) BinStarts(s);
  __syncthreads();
#pragma unroll 2
  for (int i = thread; i < n; i += kThreads) {
    const Key key = keys[i];
    spare[atomicAdd(&s.bins[bin_of(key)], 1u)] = key;  // bins[b] ends as where bin b ends
  }
  __syncthreads();
#pragma unroll 2
  for (int i = thread; i < n; i += kThreads) {
    const Key mine = spare[i];
    const int bin = bin_of(mine);
    const int begin = bin == kBins - 1 ? 0 : static_cast<int>(s.bins[bin + 1]);
    const int end = static_cast<int>(s.bins[bin]);
    int rank = begin;
#pragma unroll 1
    for (int j = begin; j < end; ++j) rank += spare[j] > mine;
    emit(rank, mine);
  }
}

}  // namespace logitd::cuda

#endif  // LOGITD_KERNELS_CUDA_ROWS_SELECT_CUH_
