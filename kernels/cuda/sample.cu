// sample and verify: a block reads a row once, as softmax_topk does, and draws from what it kept.
//
//   edit    rows with bias, penalties or a mask are written, edited, to scratch in f32 first
//   read    cells at temperature 1 (logsumexp, NaN) and, where the draw is from the whole row, at
//           the row's own; the sketch
//   filter  the largest 128 come sorted from the sketch. They hold what a top_k to 128, a min_p or
//           a top_p usually leaves. A flat top_p takes two more looks: a histogram of approximate
//           mass that tells which logits may be the last, then exact sums of what is above them.
//           What neither finds is found by histograms, of counts or of integer mass, over ever
//           narrower ranges of keys: no sort, no cap
//   draw    over the short list; or a cell by sums, then a token of it
//   report  log-probabilities; a rank beyond the list by the groups of the sketch that reach it
//
// Every sum that decides is of integers, or in one order fixed by the row, so a row's bits depend
// on the row alone (kernels/draw.h, kernels/sample.h).
//
// Cost: reads rows * vocab * sizeof(T) once; an edited row is read twice and written once more; a
// flat top_p reads a row twice more (where the last logit is one of very many that are nearly
// equal, up to nine times), a rank beyond the list what reaches it of the row. verify with draft
// probabilities reads a row once more, and twice more where the draft is refused.
// Limited by: as softmax_topk, the chain of latencies that ends a row; measured in
// bench/results/h200/kernels.json.
#include <algorithm>
#include <type_traits>

#include "kernels/cuda/ops.h"
#include "kernels/cuda/row_block.cuh"
#include "kernels/draw.h"

namespace logitd::cuda {
namespace {

constexpr int kListed = 128;     // tokens that come sorted
constexpr int kDrawBins = 1024;  // of a histogram of keys
constexpr int kMassBins = 2048;  // of a histogram of approximate mass
constexpr int kEditThreads = 512;
constexpr int64_t kFewRows = 64;
// OfferGroups numbers a block's groups in 16 bits, and a block here may hold all of a row.
static_assert(kMaxVocab / kCell * SmallPool::kGroupsOfCell <= 65536);

struct Params {
  SampleArgs args;
  int64_t first_row;
  int32_t cells;     // of a row
  int32_t blocks;    // of a row's cluster
  float* edited;     // [rows of the launch, vocab]; null: no row is edited
  uint32_t* counts;  // [rows of the launch, vocab], of tokens in the history
  // verify: drafts and what became of them; null in sample.
  const VerifyDraft* drafts;
  const int32_t* draft_ids;
  const float* draft_probs;
  const uint8_t* has_draft;  // [rows]
  uint8_t* accepted;         // [rows]
};

__device__ inline bool TopKIsOn(const SampleRow& ask, int64_t vocab) {
  return ask.top_k > 0 && ask.top_k < vocab;
}
__device__ inline bool PenaltiesAreOn(const SampleRow& ask) {
  return ask.history_count > 0 && (ask.repetition != 1 || ask.presence != 0 || ask.frequency != 0);
}
__device__ inline bool IsEdited(const SampleRow& ask) {
  return ask.first_mask_word >= 0 || ask.bias_count > 0 || PenaltiesAreOn(ask);
}
__device__ inline bool IsFiltered(const SampleRow& ask, int64_t vocab) {
  return TopKIsOn(ask, vocab) || ask.top_p < 1 || ask.min_p > 0;
}

// ---- edit --------------------------------------------------------------------------------------

// Where infinities of both signs met, the ban wins.
__device__ inline float BanIfNan(float x) { return isnan(x) ? -kInfinity : x; }

template <class T>
__global__ void CopyMaskedKernel(const __grid_constant__ Params p) {
  const SampleRow& ask = p.args.rows[p.first_row + blockIdx.y];
  if (ask.active == 0 || !IsEdited(ask)) return;
  const int64_t vocab = p.args.logits.cols;
  const T* row = static_cast<const T*>(p.args.logits.data) +
                 (p.first_row + blockIdx.y) * p.args.logits.row_stride;
  const uint32_t* mask =
      ask.first_mask_word < 0 ? nullptr : p.args.mask_words + ask.first_mask_word;
  float* to = p.edited + blockIdx.y * vocab;
  uint32_t* counts = PenaltiesAreOn(ask) ? p.counts + blockIdx.y * vocab : nullptr;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < vocab;
       i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    const bool allowed = mask == nullptr || (mask[i / 32] >> (i % 32) & 1) != 0;
    to[i] = allowed ? ToFloat(row[i]) : -kInfinity;
    if (counts != nullptr) counts[i] = 0;
  }
}

// Bias and penalties, after the copy: -inf stays -inf through all of it.
__global__ void EditKernel(const __grid_constant__ Params p) {
  const SampleRow& ask = p.args.rows[p.first_row + blockIdx.x];
  if (ask.active == 0 || !IsEdited(ask)) return;
  const int64_t vocab = p.args.logits.cols;
  float* to = p.edited + blockIdx.x * vocab;
  for (int i = threadIdx.x; i < ask.bias_count; i += blockDim.x) {
    const SampleBias bias = p.args.bias[ask.first_bias + i];
    to[bias.id] = BanIfNan(__fadd_rn(to[bias.id], bias.value));
  }
  if (!PenaltiesAreOn(ask)) return;
  uint32_t* counts = p.counts + blockIdx.x * vocab;
  const int32_t* history = p.args.history + ask.first_history;
  for (int i = threadIdx.x; i < ask.history_count; i += blockDim.x)
    atomicAdd(&counts[history[i]], 1u);
  __syncthreads();
  for (int i = threadIdx.x; i < ask.history_count; i += blockDim.x) {
    const uint32_t count = atomicExch(&counts[history[i]], 0u);
    if (count == 0) continue;  // another of the same token has it
    float x = to[history[i]];
    x = x > 0 ? __fdiv_rn(x, ask.repetition) : __fmul_rn(x, ask.repetition);
    x = BanIfNan(__fsub_rn(x, __fmul_rn(ask.frequency, static_cast<float>(count))));
    to[history[i]] = __fsub_rn(x, ask.presence);
  }
}

// ---- what a block knows of its row -------------------------------------------------------------

struct DrawShared {
  union {
    uint64_t bin_mass[kDrawBins];
    uint32_t bin_share[kMassBins];
  };
  uint32_t bin_count[kDrawBins];
  uint64_t warp_sums[SelectScratch::kMaxWarps];
  uint64_t weights[kListed];
  Key sorted[kListed];  // the largest, in order
  Key key;              // what one thread tells the others
  uint64_t mass;
  double reach;
  int32_t token;
  int32_t cell;
  int32_t count;
  int32_t found;
  // The rank is looked for by all blocks of a cluster: of a token, -1 for none, and its logit.
  int32_t ranked_token;
  float ranked_logit;
  int32_t rank;
};

// Many rows: a block each. Few rows: a cluster each, whose first block draws.
template <class T, bool kInCluster>
using DrawBlock = std::conditional_t<kInCluster, BlockShape<T, SmallPool, 16, 2, 1, true>,
                                     BlockShape<T, SmallPool, 4, 2, 3>>;

struct DrawFinish {
  typename SmallPool::Shared pool;
  DrawShared draw;
};

// The rings of both element types, then the pool and what draws.
template <class T, bool kInCluster>
union DrawMemory {
  typename DrawBlock<T, kInCluster>::Shared stream;
  typename DrawBlock<float, kInCluster>::Shared edited_stream;
  DrawFinish finish;
};

__device__ inline DrawFinish& Finish() {
  extern __shared__ __align__(128) uint4 dynamic[];
  return *reinterpret_cast<DrawFinish*>(dynamic);
}

__device__ inline uint64_t BlockSum(uint64_t v, DrawShared& s) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) v += __shfl_xor_sync(kFullWarp, v, offset);
  __syncthreads();
  if (threadIdx.x % 32 == 0) s.warp_sums[threadIdx.x / 32] = v;
  __syncthreads();
  uint64_t sum = 0;
  for (int w = 0; w < blockDim.x / 32; ++w) sum += s.warp_sums[w];
  return sum;
}

__device__ inline uint64_t WarpPrefix(uint64_t v, int lane) {  // inclusive
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const uint64_t other = __shfl_up_sync(kFullWarp, v, offset);
    if (lane >= offset) v += other;
  }
  return v;
}

// Integer weights of logits (kernels/draw.h).
struct Weigher {
  float max;
  float rate;  // 1 / temperature

  __device__ Weigher(float row_max, float temperature)
      : max(row_max), rate(1.0f / fmaxf(temperature, 0x1p-118f)) {}
  __device__ uint64_t operator()(float x) const {
    if (x == max) return uint64_t{1} << kWeightBits;
    if (max == kInfinity || x == -kInfinity) return 0;
    const float power = __fmul_rn(__fsub_rn(x, max), rate);
    if (power < -87.0f) return 0;
    return __float2ull_rn(expf(power) * static_cast<float>(kWeightOne));  // the product is exact
  }
};

// The row after edits: as sent where there are none.
template <class T>
class Logits {
 public:
  __device__ Logits(const T* as_sent, int count) : sent(as_sent), vocab(count) {}

  const T* sent;
  const float* edited = nullptr;
  int vocab;

  __device__ float operator[](int i) const {
    return edited != nullptr ? edited[i] : ToFloat(sent[i]);
  }

  // Calls visit(x, i) for the thread's share of elements [begin, end); begin is a multiple of 8.
  template <class Visit>
  __device__ void Each(int begin, int end, int thread, int threads, Visit visit) const {
    if (edited != nullptr) {
      EachOf(edited, begin, end, thread, threads, visit);
    } else {
      EachOf(sent, begin, end, thread, threads, visit);
    }
  }

 private:
  template <class Element, class Visit>
  __device__ static void EachOf(const Element* from, int begin, int end, int thread, int threads,
                                Visit visit) {
    constexpr int kAtOnce = 8;
    constexpr int kEach = kVector<Element>;
    const bool aligned = (reinterpret_cast<uintptr_t>(from) & 15) == 0;
#pragma unroll 1
    for (int base = begin + kEach * thread; base < end; base += kAtOnce * kEach * threads) {
      uint4 vectors[kAtOnce];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const int i = base + j * kEach * threads;
        vectors[j] = i < end ? LoadVector(from + i, aligned, end - i) : uint4{};
      }
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const uint32_t words[4] = {vectors[j].x, vectors[j].y, vectors[j].z, vectors[j].w};
#pragma unroll
        for (int e = 0; e < kEach; ++e) {
          const int i = base + j * kEach * threads + e;
          if (i < end) visit(WordElement<Element>(words, e), i);
        }
      }
    }
  }
};

// What may be drawn: keys of `last` or more.
struct Support {
  Key last;
  float max;
  double temperature;
  double log_sum;  // of exp((x - max) / temperature); of +inf, of their number

  __device__ float Logprob(float x, int i) const {
    if (x == -kInfinity || MakeKey(x, i) < last) return -kInfinity;
    if (max == kInfinity) return x == kInfinity ? static_cast<float>(-log_sum) : -kInfinity;
    return static_cast<float>((static_cast<double>(x) - max) / temperature - log_sum);
  }
};

constexpr Key kLowestKey = 0;
// Of every key with a logit above -inf, the least is more than this; so is no key of -inf.
__device__ inline Key AboveMinusInfinity() {
  return (static_cast<Key>(OrderedBits(-kInfinity)) + 1) << 32;
}

// The lowest logit that min_p keeps.
__device__ inline float MinPFloor(float max, float temperature, float min_p) {
  const double least =
      max + fmax(static_cast<double>(temperature), 0x1p-118) * log(static_cast<double>(min_p));
  if (least < -3.402823466e38) return -3.402823466e38f;
  return __double2float_ru(least);
}

// ---- filter ------------------------------------------------------------------------------------

// The key that ends the shortest prefix, by descending key, of keys in [low, high] in which
// measure(x) adds up to `need` or more; kLowestKey where all of them have less. Called by all
// threads.
template <int kThreads, class T, class Measure>
__device__ __noinline__ Key LastOfPrefix(const Logits<T>& row, Key low, Key high, uint64_t need,
                                         Measure measure) {
  DrawFinish& memory = Finish();
  DrawShared& s = memory.draw;
  auto& pool = memory.pool;
  const int thread = threadIdx.x;
  const int lane = thread % 32;
  while (true) {
    const int shift = BitsToShift(high - low, 10);
    for (int b = thread; b < kDrawBins; b += kThreads) {
      s.bin_mass[b] = 0;
      s.bin_count[b] = 0;
    }
    if (thread == 0) s.found = -1;
    __syncthreads();
    row.Each(0, row.vocab, thread, kThreads, [&](float x, int i) {
      const Key key = MakeKey(x, i);
      if (key < low || key > high) return;
      const int bin = static_cast<int>((key - low) >> shift);
      const uint64_t mass = measure(x);
      if (mass != 0) atomicAdd(reinterpret_cast<unsigned long long*>(&s.bin_mass[bin]), mass);
      atomicAdd(&s.bin_count[bin], 1u);
    });
    __syncthreads();
    if (thread < 32) {  // from the top bin down: the bin in which the mass reaches `need`
      constexpr int kPerLane = kDrawBins / 32;
      const int top = kDrawBins - 1 - lane * kPerLane;
      uint64_t sum = 0;
      for (int b = 0; b < kPerLane; ++b) sum += s.bin_mass[top - b];
      uint64_t before = WarpPrefix(sum, lane) - sum;
      if (before < need && before + sum >= need) {
        int b = 0;
        for (; before + s.bin_mass[top - b] < need; ++b) before += s.bin_mass[top - b];
        s.found = top - b;
        s.mass = before;
      }
    }
    __syncthreads();
    const int bin = s.found;
    if (bin < 0) return kLowestKey;
    need -= s.mass;
    low += static_cast<Key>(bin) << shift;
    high = low + min(high - low, (Key{1} << shift) - 1);
    const uint32_t members = s.bin_count[bin];
    if (shift == 0) return low;
    __syncthreads();
    if (members > SmallPool::kPool / 2) continue;
    // Few enough to sort.
    if (thread == 0) pool.count = 0;
    __syncthreads();
    row.Each(0, row.vocab, thread, kThreads, [&](float x, int i) {
      const Key key = MakeKey(x, i);
      if (key >= low && key <= high) pool.pool[atomicAdd(&pool.count, 1)] = key;
    });
    __syncthreads();
    Key* sorted = reinterpret_cast<Key*>(s.bin_mass);  // the bins are done with
    EmitByRank<kThreads>(pool.pool, pool.count, pool.pool + SmallPool::kPool / 2, pool.select,
                         [&](int rank, Key key) { sorted[rank] = key; });
    __syncthreads();
    const int n = pool.count;
    if (thread < 32) {
      uint64_t before = 0;
      for (int base = 0; base < n; base += 32) {
        const int i = base + lane;
        const uint64_t through =
            before + WarpPrefix(i < n ? measure(KeyLogit(sorted[i])) : 0, lane);
        const unsigned reached = __ballot_sync(kFullWarp, i < n && through >= need);
        if (reached != 0) {
          if (lane == __ffs(reached) - 1) s.key = sorted[i];
          break;
        }
        before = __shfl_sync(kFullWarp, through, 31);
      }
    }
    __syncthreads();
    return s.key;
  }
}

// ---- draw --------------------------------------------------------------------------------------

// The lowest token of elements [begin, end) of the row, at most a cell, with a sum of weigh(x, i)
// up to it of more than target. By one warp.
template <class T, class Weigh>
__device__ inline int TokenOfCell(const Logits<T>& row, int begin, int end, uint64_t target,
                                  Weigh weigh) {
  const int lane = threadIdx.x % 32;
  uint64_t before = 0;
  for (int base = begin; base < end; base += 32) {
    const int i = base + lane;
    const uint64_t through = before + WarpPrefix(i < end ? weigh(row[i], i) : 0, lane);
    const unsigned reached = __ballot_sync(kFullWarp, through > target);
    if (reached != 0) return base + __ffs(reached) - 1;
    before = __shfl_sync(kFullWarp, through, 31);
  }
  return end - 1;
}

template <class T, class Weigh>
__device__ inline uint64_t SumOfCell(const Logits<T>& row, int begin, int end, Weigh weigh) {
  const int lane = threadIdx.x % 32;
  uint64_t sum = 0;
  row.Each(begin, end, lane, 32, [&](float x, int i) { sum += weigh(x, i); });
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(kFullWarp, sum, offset);
  return sum;
}

// The sum of weigh(x, i) over the row; sums of cells are left in cell_sums. Called by all threads.
template <class T, class Weigh>
__device__ __noinline__ uint64_t SumByCells(const Logits<T>& row, uint64_t* cell_sums,
                                            Weigh weigh) {
  DrawShared& s = Finish().draw;
  const int cells = (row.vocab + kCell - 1) / kCell;
  uint64_t total = 0;
  __syncthreads();
  for (int c = threadIdx.x / 32; c < cells; c += blockDim.x / 32) {
    const uint64_t sum = SumOfCell(row, c * kCell, min(row.vocab, (c + 1) * kCell), weigh);
    if (threadIdx.x % 32 == 0) cell_sums[c] = sum;
    total += threadIdx.x % 32 == 0 ? sum : 0;
  }
  return BlockSum(total, s);
}

// The lowest token with a sum of more than target, from the sums of cells. Called by all threads.
template <class T, class Weigh>
__device__ __noinline__ int TokenByCells(const Logits<T>& row, const uint64_t* cell_sums,
                                         uint64_t target, Weigh weigh) {
  DrawShared& s = Finish().draw;
  const int cells = (row.vocab + kCell - 1) / kCell;
  __syncthreads();
  if (threadIdx.x < 32) {
    const int lane = threadIdx.x;
    uint64_t before = 0;
    int cell = cells - 1;
    for (int base = 0; base < cells; base += 32) {
      const int c = base + lane;
      const uint64_t own = c < cells ? cell_sums[c] : 0;
      const uint64_t through = before + WarpPrefix(own, lane);
      const unsigned reached = __ballot_sync(kFullWarp, through > target);
      if (reached != 0) {
        const int first = __ffs(reached) - 1;
        cell = base + first;
        before = __shfl_sync(kFullWarp, through - own, first);
        break;
      }
      before = __shfl_sync(kFullWarp, through, 31);
    }
    const int token =
        TokenOfCell(row, cell * kCell, min(row.vocab, (cell + 1) * kCell), target - before, weigh);
    if (lane == 0) s.token = token;
  }
  __syncthreads();
  return s.token;
}

// The sum of the row's weights by its cells' statistics, in double, in the cells' order; where
// `find` is, also the first cell whose prefix exceeds bits / 2^64 of it, and the residue there. By
// warp 0; results in s.reach (the sum), s.cell and s.mass (the residue's share of the cell, as a
// double's bits).
__device__ inline void PrefixOfCells(const Stats* cells, int count, float max, float c, bool find,
                                     uint64_t bits, DrawShared& s) {
  const int lane = threadIdx.x % 32;
  const Exponential exponential(max, c);
  const auto own_of = [&](int i) {
    if (i >= count || cells[i].max == -kInfinity) return 0.0;
    return static_cast<double>(cells[i].sum) * exponential.Factor(cells[i].max);
  };
  const auto through_of = [&](double own, double before) {
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
      const double other = __shfl_up_sync(kFullWarp, own, offset);
      if (lane >= offset) own += other;
    }
    return before + own;
  };
  double total = 0;
  for (int base = 0; base < count; base += 32) {
    const double through = through_of(own_of(base + lane), total);
    total = __shfl_sync(kFullWarp, through, min(31, count - 1 - base));
  }
  // Plain sums are relative to 2^-shift, which is not quite the maximum.
  const float at_max =
      exponential.plain ? exp2f(fmaf(max, exponential.c, exponential.shift)) : 1.0f;
  if (lane == 0) s.reach = total / at_max;
  if (!find) return;
  const double reach = static_cast<double>(bits >> 11) * 0x1p-53 * total;
  double before = 0;
  int last = 0;  // of the cells that weigh anything
  for (int base = 0; base < count; base += 32) {
    const double own = own_of(base + lane);
    const double through = through_of(own, before);
    const double previous = __shfl_up_sync(kFullWarp, through, 1);
    const unsigned weighs = __ballot_sync(kFullWarp, own > 0);
    const unsigned over = __ballot_sync(kFullWarp, own > 0 && through > reach);
    if (over != 0) {
      if (lane == __ffs(over) - 1) {
        const double from = lane == 0 ? before : previous;
        s.cell = base + lane;
        s.mass = static_cast<uint64_t>(
            __double_as_longlong(fmin(fmax((reach - from) / (through - from), 0.0), 1.0)));
      }
      return;
    }
    if (weighs != 0) last = base + 31 - __clz(weighs);
    before = __shfl_sync(kFullWarp, through, 31);
  }
  if (lane == 0) {  // a rounding below the end
    s.cell = last;
    s.mass = static_cast<uint64_t>(__double_as_longlong(1.0));
  }
}

// The shortest prefix of keys that reaches a mass, its tokens' sums left by cells.
struct Nucleus {
  Key last;  // of the prefix; kLowestKey: not found
  uint64_t total;
};

// Of the row's keys from `floor` up, which weigh `whole` in all, those that reach `need`. The first
// look adds up approximate shares in bins of logits: that leaves a bin or two in which the last key
// can be. The second adds up what is above them exactly, and collects the keys between. Not found
// where those are too many, or the mass needed is nearly the whole. Called by all threads.
template <int kThreads, class T>
__device__ __noinline__ Nucleus FindNucleus(const Logits<T>& row, Key floor, const Weigher& weigh,
                                            uint64_t whole, uint64_t need, uint64_t* cell_sums) {
  DrawFinish& memory = Finish();
  DrawShared& s = memory.draw;
  auto& pool = memory.pool;
  const Nucleus none{kLowestKey, 0};
  const float peak = weigh.max;
  if (peak == kInfinity || need >= whole) return none;
  const int thread = threadIdx.x;
  const int lane = thread % 32;
  // All logits further than this below the peak weigh less, together, than may be left out.
  const float spare = static_cast<float>(static_cast<double>(whole - need) / kWeightOne);
  const float depth = logf(2.0f * static_cast<float>(row.vocab) / spare);
  const float bins_a_logit = kMassBins * weigh.rate / depth;
  const auto bin_of = [=](float x) {
    return min(kMassBins - 1, __float2int_rz((peak - x) * bins_a_logit));
  };
  const float floor_logit = KeyLogit(floor);
  const auto is_in = [=](float x, int i) {
    return x > floor_logit || (x == floor_logit && MakeKey(x, i) >= floor);
  };
  constexpr float kShares = 0x1p31f;
  const float scale = kShares * static_cast<float>(kWeightOne / static_cast<double>(whole));
  const float c = kLog2E * weigh.rate;
  __syncthreads();
  for (int b = thread; b < kMassBins; b += kThreads) s.bin_share[b] = 0;
  if (thread == 0) {
    s.found = kMassBins;     // the first bin in which the last key can be
    s.cell = kMassBins - 1;  // the last one
    s.key = kLowestKey;
    pool.count = 0;
  }
  __syncthreads();
  row.Each(0, row.vocab, thread, kThreads, [&](float x, int i) {
    const uint32_t share = __float2uint_rz(Exp2((x - peak) * c) * scale);
    if (share != 0 && is_in(x, i)) atomicAdd(&s.bin_share[bin_of(x)], share);
  });
  __syncthreads();
  if (thread < 32) {
    // Each share is rounded down, and off by the roundings of its exponential and of `whole`.
    const uint64_t slack = static_cast<uint64_t>(row.vocab) + (uint64_t{1} << 15);
    const uint64_t middle =
        static_cast<uint64_t>(static_cast<double>(need) / static_cast<double>(whole) * kShares);
    const uint64_t least = middle > slack ? middle - slack : 0;
    const uint64_t most = middle + slack;
    constexpr int kPerLane = kMassBins / 32;
    const uint32_t* shares = s.bin_share + lane * kPerLane;
    uint64_t sum = 0;
    for (int b = 0; b < kPerLane; ++b) sum += shares[b];
    uint64_t before = WarpPrefix(sum, lane) - sum;
    if (before < most && before + sum >= least) {
      for (int b = 0; b < kPerLane; ++b) {
        const uint64_t through = before + shares[b];
        if (through >= least && (before < least || lane + b == 0)) s.found = lane * kPerLane + b;
        if (through >= most && before < most) s.cell = lane * kPerLane + b;
        before = through;
      }
    }
  }
  __syncthreads();
  const int first = s.found;
  const int last = s.cell;
  const int cells = (row.vocab + kCell - 1) / kCell;
  uint64_t above = 0;
  for (int cell = thread / 32; cell < cells; cell += kThreads / 32) {
    uint64_t sum = 0;
    row.Each(cell * kCell, min(row.vocab, (cell + 1) * kCell), lane, 32, [&](float x, int i) {
      const int bin = bin_of(x);
      if (bin > last || !is_in(x, i)) return;
      if (bin < first) {
        sum += weigh(x);
      } else {
        const int at = atomicAdd(&pool.count, 1);
        if (at < SmallPool::kPool / 2) pool.pool[at] = MakeKey(x, i);
      }
    });
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(kFullWarp, sum, offset);
    if (lane == 0) {
      cell_sums[cell] = sum;
      above += sum;
    }
  }
  above = BlockSum(above, s);
  const int n = pool.count;
  if (n > SmallPool::kPool / 2 || above >= need) return none;
  Key* sorted = reinterpret_cast<Key*>(s.bin_share);  // the bins are done with
  EmitByRank<kThreads>(pool.pool, n, pool.pool + SmallPool::kPool / 2, pool.select,
                       [&](int rank, Key key) { sorted[rank] = key; });
  __syncthreads();
  if (thread < 32) {
    uint64_t before = above;
    for (int base = 0; base < n; base += 32) {
      const int i = base + lane;
      const uint64_t through = before + WarpPrefix(i < n ? weigh(KeyLogit(sorted[i])) : 0, lane);
      const unsigned reached = __ballot_sync(kFullWarp, i < n && through >= need);
      if (reached != 0) {
        if (lane == __ffs(reached) - 1) {
          s.key = sorted[i];
          s.mass = through;
          s.count = i + 1;
        }
        break;
      }
      before = __shfl_sync(kFullWarp, through, 31);
    }
  }
  __syncthreads();
  const Nucleus nucleus{s.key, s.mass};
  if (nucleus.last == kLowestKey) return none;
  for (int i = thread; i < s.count; i += kThreads) {
    const uint64_t weight = weigh(KeyLogit(sorted[i]));
    atomicAdd(reinterpret_cast<unsigned long long*>(&cell_sums[KeyIndex(sorted[i]) / kCell]),
              weight);
  }
  __syncthreads();
  return nucleus;
}

// What a draft was drawn from, as integers of the target's scale.
struct DraftMass {
  const int32_t* ids;  // null: a probability for each token
  const float* probs;
  int count;
  double scale;

  __device__ uint64_t operator()(int token) const {
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
    const float q = probs[at];
    if (!(q > 0)) return 0;
    return __double2ull_rn(fmin(static_cast<double>(q), 1.0) * scale);
  }
};

// ---- report ------------------------------------------------------------------------------------

__device__ inline void Refuse(const SampleArgs& args, int64_t r, const SampleRow& ask,
                              RowStatus status, int thread, int threads) {
  if (thread == 0) {
    args.status[r] = status;
    args.tokens[r] = -1;
    args.logprobs[r] = -kInfinity;
    args.ranks[r] = 0;
  }
  for (int i = thread; i < ask.top_logprobs; i += threads) {
    args.top_ids[ask.first_top_entry + i] = -1;
    args.top_logprobs[ask.first_top_entry + i] = -kInfinity;
  }
  for (int i = thread; i < ask.extra_count; i += threads)
    args.extra_logprobs[ask.first_extra_entry + i] = -kInfinity;
}

// The part of a row that a block reads: all of it, or its share in a cluster.
struct Part {
  int block;
  int blocks;
  int begin;  // a cell's border
  int end;

  __device__ int cells() const { return (end - begin + kCell - 1) / kCell; }
};

// The thread's count of tokens in the part that are no later in the order than `token` with logit
// x. Only groups that reach it are looked at, by the part's sketch of these logits; by null, all.
template <int kThreads, class Element>
__device__ int CountFromOf(const Element* row, const Part& part, const SmallPool::Sketch* sketch,
                           float x, int token) {
  constexpr int kVectors = kLaneElements / kVector<Element>;
  const int lane = threadIdx.x % 32;
  const bool aligned = (reinterpret_cast<uintptr_t>(row) & 15) == 0;
  const uint32_t edge = OrderedBits(x) & 0xffff0000u;
  int count = 0;
#pragma unroll 1
  for (int cell = threadIdx.x / 32; cell < part.cells(); cell += kThreads / 32) {
    const uint32_t maxima = sketch != nullptr ? sketch[cell * 32 + lane] : ~0u;
    const bool reaches[2] = {maxima << 16 >= edge, maxima >= edge};
    const int first = part.begin + cell * kCell;
    uint4 vectors[kVectors];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int i = first + CellIndex<Element>(lane, v * kVector<Element>);
      vectors[v] = reaches[2 * v / kVectors] && i < part.end
                       ? LoadVector(row + i, aligned, part.end - i)
                       : uint4{};
    }
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int i = first + CellIndex<Element>(lane, v * kVector<Element>);
      const uint32_t words[4] = {vectors[v].x, vectors[v].y, vectors[v].z, vectors[v].w};
      const int valid = reaches[2 * v / kVectors] ? part.end - i : 0;
#pragma unroll
      for (int e = 0; e < kVector<Element>; ++e) {
        const float other = WordElement<Element>(words, e);
        count += e < valid && (other > x || (other == x && i + e <= token));
      }
    }
  }
  return count;
}

template <int kThreads, class T>
__device__ __noinline__ int CountFrom(const Logits<T>& row, const Part& part,
                                      const SmallPool::Sketch* sketch, float x, int token) {
  return row.edited != nullptr ? CountFromOf<kThreads>(row.edited, part, sketch, x, token)
                               : CountFromOf<kThreads>(row.sent, part, sketch, x, token);
}

// Writes the top tokens and the asked ids, of logits whose first tokens are in s.sorted.
template <class T>
__device__ inline void ReportLists(const SampleArgs& args, const SampleRow& ask,
                                   const Logits<T>& row, const Support& support,
                                   const DrawShared& s) {
  for (int i = threadIdx.x; i < ask.top_logprobs; i += blockDim.x) {
    const int id = KeyIndex(s.sorted[i]);
    args.top_ids[ask.first_top_entry + i] = id;
    args.top_logprobs[ask.first_top_entry + i] = support.Logprob(KeyLogit(s.sorted[i]), id);
  }
  for (int i = threadIdx.x; i < ask.extra_count; i += blockDim.x) {
    const int id = args.extra_ids[ask.first_extra + i];
    args.extra_logprobs[ask.first_extra_entry + i] = support.Logprob(row[id], id);
  }
}

// Leaves the first `count` <= kListed tokens of the row just read in s.sorted of the first block,
// in order; by then, all that the cluster's blocks wrote there is there. Called by all threads
// after a barrier; passes one at its end.
template <class Block>
__device__ inline void List(const typename Block::Element* row, const Part& part,
                            const typename SmallPool::Sketch* sketch, float lane_best, int count) {
  constexpr int kThreads = Block::kThreads;
  DrawShared& s = Finish().draw;
  auto& pool = Pool<SmallPool>();
  Floor floor;
  if constexpr (Block::kCluster) {
    floor.RaiseToLogit(ClusterFloor<Block>(lane_best, part.block, part.blocks, count));
  } else {
    floor.RaiseToLogit(BlockFloor<Block>(lane_best, part.cells(), count));
  }
  Gather<typename Block::Element, kThreads, SmallPool>(row + part.begin, part.begin,
                                                       part.end - part.begin, sketch, floor, count);
  if constexpr (Block::kCluster) {
    SendToFirst<kThreads, SmallPool>(count, part.block);
    if (part.block != 0) return;
    OpenInbox<kThreads, SmallPool>(part.blocks);
  }
  const int n = Trim<kThreads, SmallPool>(count, SmallPool::kPool / 2);
  EmitByRank<kThreads>(pool.pool, n, pool.pool + SmallPool::kPool / 2, pool.select,
                       [&](int rank, Key key) {
                         if (rank < count) s.sorted[rank] = key;
                       });
  __syncthreads();
}

// ---- a row -------------------------------------------------------------------------------------

// Of the row as sent, at temperature 1.
__device__ inline Support RawSupport(Stats raw) {
  Support support{kLowestKey, raw.max, 1.0, 0.0};
  if (raw.max == -kInfinity) return support;
  support.log_sum = log(static_cast<double>(raw.sum));
  const Exponential exponential(raw.max, kLog2E);
  if (exponential.plain) {  // relative to 2^-shift, which is not quite the maximum
    support.log_sum -=
        (static_cast<double>(raw.max) * kLog2E + exponential.shift) * 0.6931471805599453;
  }
  return support;
}

// What the filters leave, found among the listed tokens. count = 0: not all of it is there.
struct Short {
  int count;
  uint64_t total;
};

// By all threads, after s.sorted and s.weights (0 for what top_k and min_p cut) are there.
__device__ inline Short ShortSupport(const SampleRow& ask, int listed, int kept, bool complete,
                                     bool whole_by_cells, DrawShared& s) {
  const int lane = threadIdx.x % 32;
  if (threadIdx.x < 32) {
    uint64_t total = 0;
    for (int i = lane; i < kept; i += 32) total += s.weights[i];
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2)
      total += __shfl_xor_sync(kFullWarp, total, offset);
    const uint64_t whole = whole_by_cells ? static_cast<uint64_t>(s.reach * kWeightOne) : total;
    int count = complete ? kept : 0;
    if (ask.top_p < 1 && (complete || whole_by_cells)) {
      const uint64_t need = MassNeeded(ask.top_p, whole);
      uint64_t before = 0;
      for (int base = 0; base < kept; base += 32) {
        const int i = base + lane;
        const uint64_t through = before + WarpPrefix(i < kept ? s.weights[i] : 0, lane);
        const unsigned reached = __ballot_sync(kFullWarp, i < kept && through >= need);
        if (reached != 0) {
          const int first = __ffs(reached) - 1;
          count = base + first + 1;
          total = __shfl_sync(kFullWarp, through, first);
          break;
        }
        before = __shfl_sync(kFullWarp, through, 31);
      }
    }
    if (lane == 0) {
      s.count = count;
      s.mass = total;
    }
  }
  __syncthreads();
  const Short result{s.count, s.mass};
  __syncthreads();
  return result;
}

template <class T, bool kInCluster>
__global__ void __launch_bounds__(DrawBlock<T, kInCluster>::kThreads,
                                  DrawBlock<T, kInCluster>::kResident)
    SampleRowKernel(const __grid_constant__ Params p) {
  using Block = DrawBlock<T, kInCluster>;
  using EditedBlock = DrawBlock<float, kInCluster>;
  constexpr int kThreads = Block::kThreads;
  extern __shared__ __align__(128) uint4 dynamic[];
  auto& memory = *reinterpret_cast<DrawMemory<T, kInCluster>*>(dynamic);
  if constexpr (kInCluster) ClusterArrive();
  const SampleArgs& args = p.args;
  const int place = static_cast<int>(blockIdx.x) / p.blocks;  // of the row, in the launch
  const int64_t r = p.first_row + place;
  const SampleRow& ask = args.rows[r];
  const int vocab = static_cast<int>(args.logits.cols);
  const int lane = threadIdx.x % 32;
  Part part;
  part.block = static_cast<int>(blockIdx.x) - place * p.blocks;
  part.blocks = p.blocks;
  part.begin = p.cells * part.block / p.blocks * kCell;
  part.end = min(p.cells * (part.block + 1) / p.blocks * kCell, vocab);
  DrawShared& s = memory.finish.draw;
  Stats* raw_cells = reinterpret_cast<Stats*>(&memory + 1);  // [cells]
  Stats* cells = raw_cells + p.cells + p.cells % 2;          // [cells], at the row's temperature
  auto* sketch = reinterpret_cast<SmallPool::Sketch*>(cells + p.cells + p.cells % 2);
  const T* sent = static_cast<const T*>(args.logits.data) + r * args.logits.row_stride;
  const auto in_first = [](Stats* here) { return kInCluster ? InBlock(here, 0) : here; };

  RowStream<Block> stream(memory.stream, sent, part.begin, part.end);
  if constexpr (kInCluster) ClusterWait();  // all blocks have begun: their memory is there
  if (ask.active == 0) return stream.Abandon();
  const bool edited = IsEdited(ask);
  const bool greedy = ask.temperature == 0;
  const bool filtered = IsFiltered(ask, vocab);
  const bool is_raw = ask.logprob_mode == LogprobMode::kRaw;
  // Sums at the row's temperature: lists have sums of their own.
  const bool sums_needed = !TopKIsOn(ask, vocab) && ask.min_p == 0 && !greedy;
  const float c = kLog2E / (sums_needed ? fmaxf(ask.temperature, 0x1p-118f) : 1.0f);
  const bool twice = !edited && sums_needed && ask.temperature != 1;
  float lane_best = stream.template Run<true>(kLog2E, in_first(raw_cells), sketch, c,
                                              twice ? in_first(cells) : nullptr);
  __syncthreads();  // from here on the rings' memory is the pool's

  const Logits<T> raw_row(sent, vocab);
  Logits<T> row = raw_row;
  if (edited) {
    if (is_raw) {
      // The row as sent is reported before its sketch makes way.
      List<Block>(sent, part, sketch, lane_best, max(1, ask.top_logprobs));
      if (part.block == 0) {
        const Stats raw = MergeCells(p.cells, kLog2E, lane, [&](int i) { return raw_cells[i]; });
        ReportLists(args, ask, raw_row, RawSupport(raw), s);
      }
      __syncthreads();
    }
    row.edited = p.edited + static_cast<int64_t>(place) * vocab;
    RowStream<EditedBlock> again(memory.edited_stream, row.edited, part.begin, part.end);
    lane_best = again.Run(c, in_first(cells), sketch);
    __syncthreads();
  }
  // The first tokens, sorted: for the report, and where the filters leave no more.
  const bool lists_are_sorted = !is_raw || !edited;  // the mode's logits are those just read
  int listed = lists_are_sorted ? max(1, ask.top_logprobs) : 1;
  if (TopKIsOn(ask, vocab)) {
    listed = max(listed, min(ask.top_k, kListed));
  } else if (filtered && !greedy) {
    listed = kListed;
  }
  listed = min(listed, vocab);
  const Logits<T>& mode_row = is_raw ? raw_row : row;
  const SmallPool::Sketch* mode_sketch = lists_are_sorted ? sketch : nullptr;
  if (kInCluster && threadIdx.x == 0) s.ranked_token = -1;
  if (edited) {
    List<EditedBlock>(row.edited, part, sketch, lane_best, listed);
  } else {
    List<Block>(sent, part, sketch, lane_best, listed);
  }
  // In a cluster, once its blocks know the token: each adds what it finds in its part of the row.
  const auto rank_in_part = [&] {
    const int count =
        CountFrom<kThreads>(mode_row, part, mode_sketch, s.ranked_logit, s.ranked_token);
    const int sum = static_cast<int>(BlockSum(count, s));
    if (threadIdx.x == 0) atomicAdd(InBlock(&s.rank, 0), sum);
    ClusterArrive();
  };
  if (part.block != 0) {
    ClusterArrive();
    ClusterWait();
    if (s.ranked_token >= 0) rank_in_part();
    return;
  }

  const Stats raw = MergeCells(p.cells, kLog2E, lane, [&](int i) { return raw_cells[i]; });
  const Support raw_support = RawSupport(raw);
  if (isnan(raw.sum)) {
    if (threadIdx.x < 32) {
      int cell = 0;
      while (cell + 1 < p.cells && !isnan(raw_cells[cell].sum)) ++cell;
      const int found = FindNan(sent, cell * kCell, vocab, lane);
      if (lane == 0) s.found = found;
    }
    __syncthreads();
    if (threadIdx.x == 0) args.logsumexp[r] = __int_as_float(0x7fffffff);
    return Refuse(args, r, ask, {RowCode::kNanLogit, s.found}, threadIdx.x, kThreads);
  }
  if (threadIdx.x == 0) {
    args.logsumexp[r] =
        raw.max == -kInfinity ? -kInfinity : Exponential(raw.max, kLog2E).LogSum(raw.sum, 1.0f);
    args.status[r] = {RowCode::kOk, -1};
  }
  const Stats* sums = twice || edited ? cells : raw_cells;
  const float peak =
      edited ? MergeCells(p.cells, c, lane, [&](int i) { return cells[i]; }).max : raw.max;
  if (peak == -kInfinity)
    return Refuse(args, r, ask, {RowCode::kEmptySupport, -1}, threadIdx.x, kThreads);

  const Weigher weigh(peak, ask.temperature);
  const uint64_t bits = UniformBits(ask.seed, ask.position);
  const float least = peak == kInfinity ? kInfinity
                      : ask.min_p > 0   ? MinPFloor(peak, ask.temperature, ask.min_p)
                                        : -3.402823466e38f;
  const Key low = max(static_cast<Key>(OrderedBits(least)) << 32, AboveMinusInfinity());
  uint64_t* cell_sums = reinterpret_cast<uint64_t*>(cells);
  Support support{low, peak, greedy ? 1.0 : static_cast<double>(ask.temperature), 0.0};
  int token;
  uint64_t total = 0;  // of the support's weights
  if (greedy) {
    support.last = s.sorted[0];
    token = KeyIndex(s.sorted[0]);
    total = uint64_t{1} << kWeightBits;
  } else if (!filtered) {
    if (threadIdx.x < 32) PrefixOfCells(sums, p.cells, peak, c, true, bits, s);
    __syncthreads();
    support.log_sum = log(s.reach);
    const int begin = s.cell * kCell;
    const int end = min(vocab, begin + kCell);
    const Weigher weigh_cell(sums[s.cell].max, ask.temperature);
    const auto weigh_of_cell = [&](float x, int) { return weigh_cell(x); };
    if (threadIdx.x < 32) {
      const uint64_t sum = SumOfCell(row, begin, end, weigh_of_cell);
      const double share = __longlong_as_double(static_cast<long long>(s.mass));
      const uint64_t target = min(static_cast<uint64_t>(share * static_cast<double>(sum)), sum - 1);
      const int drawn = TokenOfCell(row, begin, end, target, weigh_of_cell);
      if (lane == 0) s.token = drawn;
    }
    __syncthreads();
    token = s.token;
  } else {
    // Of the listed, those that top_k and min_p keep.
    int kept = 0;
    for (int i = threadIdx.x; i < listed; i += kThreads) {
      const Key key = s.sorted[i];
      const bool keep = key >= low && (!TopKIsOn(ask, vocab) || i < ask.top_k);
      s.weights[i] = keep ? weigh(KeyLogit(key)) : 0;
      kept += keep;
    }
    kept = static_cast<int>(BlockSum(kept, s));
    const bool complete =
        kept < listed || listed == vocab || (TopKIsOn(ask, vocab) && ask.top_k <= listed);
    const bool whole_by_cells = sums_needed;
    if (whole_by_cells && threadIdx.x < 32) PrefixOfCells(sums, p.cells, peak, c, false, bits, s);
    __syncthreads();
    const uint64_t whole_of_cells =
        whole_by_cells ? static_cast<uint64_t>(s.reach * kWeightOne) : 0;
    const Short found = ShortSupport(ask, listed, kept, complete, whole_by_cells, s);
    if (found.count > 0) {
      total = found.total;
      support.last = s.sorted[found.count - 1];
      // In index order: the sum up to each token, by that token's thread.
      const uint64_t target = DrawTarget(bits, total);
      for (int i = threadIdx.x; i < found.count; i += kThreads) {
        const uint32_t place = static_cast<uint32_t>(s.sorted[i]);  // descending by index
        uint64_t through = 0;
        for (int j = 0; j < found.count; ++j) {
          if (static_cast<uint32_t>(s.sorted[j]) >= place) through += s.weights[j];
        }
        if (through > target && through - s.weights[i] <= target) s.token = KeyIndex(s.sorted[i]);
      }
      __syncthreads();
      token = s.token;
    } else {
      const Key high = MakeKey(peak, 0);
      Key last = low;
      if (TopKIsOn(ask, vocab)) {
        last = max(last, LastOfPrefix<kThreads>(row, low, high, static_cast<uint64_t>(ask.top_k),
                                                [](float) { return uint64_t{1}; }));
      }
      bool summed = false;
      if (ask.top_p < 1) {
        const Key floor = last;
        const uint64_t whole =
            whole_by_cells ? whole_of_cells : SumByCells(row, cell_sums, [=](float x, int i) {
              return MakeKey(x, i) >= floor ? weigh(x) : uint64_t{0};
            });
        const uint64_t need = MassNeeded(ask.top_p, whole);
        const Nucleus nucleus = FindNucleus<kThreads>(row, floor, weigh, whole, need, cell_sums);
        summed = nucleus.last != kLowestKey;
        total = nucleus.total;
        last = summed ? nucleus.last
                      : max(last, LastOfPrefix<kThreads>(row, floor, high, need, weigh));
      }
      support.last = last;
      const auto weigh_support = [=](float x, int i) {
        return MakeKey(x, i) >= last ? weigh(x) : uint64_t{0};
      };
      if (!summed) total = SumByCells(row, cell_sums, weigh_support);
      token = TokenByCells(row, cell_sums, DrawTarget(bits, total), weigh_support);
    }
    support.log_sum = log(static_cast<double>(total) / kWeightOne);
  }

  if (p.drafts != nullptr && p.has_draft[r] != 0) {
    const VerifyDraft& draft = p.drafts[r];
    if (draft.kind != DraftKind::kGreedy) {
      const Key last = support.last;
      const auto weigh_target = [=](float x, int i) {
        if (MakeKey(x, i) < last) return uint64_t{0};
        return greedy ? uint64_t{1} << kWeightBits : weigh(x);
      };
      if (!greedy && !filtered) {  // the list's form of the distribution
        total = SumByCells(row, cell_sums, weigh_target);
        support.log_sum = log(static_cast<double>(total) / kWeightOne);
      }
      const DraftMass mass{draft.kind == DraftKind::kList ? p.draft_ids + draft.first_id : nullptr,
                           p.draft_probs + draft.first_prob, draft.count,
                           static_cast<double>(total)};
      const uint64_t coin = MulHigh(CoinBits(ask.seed, ask.position), mass(draft.token));
      if (coin < weigh_target(row[draft.token], draft.token)) {
        token = draft.token;
      } else {
        const auto weigh_left = [=](float x, int i) {
          const uint64_t weight = weigh_target(x, i);
          return weight == 0 ? uint64_t{0} : weight - min(weight, mass(i));
        };
        const uint64_t left = SumByCells(row, cell_sums, weigh_left);
        if (left > 0) {
          token = TokenByCells(row, cell_sums, DrawTarget(bits, left), weigh_left);
        } else {  // nothing but rounding sets the two apart: then the target's own
          SumByCells(row, cell_sums, weigh_target);
          token = TokenByCells(row, cell_sums, DrawTarget(bits, total), weigh_target);
        }
      }
    }
    if (threadIdx.x == 0) p.accepted[r] = token == draft.token;
  }

  // The rank, in the mode's logits.
  const Support& mode_support = is_raw ? raw_support : support;
  const float x = mode_row[token];
  const Key key = MakeKey(x, token);
  const bool rank_is_listed = lists_are_sorted && key >= s.sorted[listed - 1];
  int rank = 0;
  if (rank_is_listed) {
    for (int i = threadIdx.x; i < listed; i += kThreads) rank += s.sorted[i] >= key;
    rank = static_cast<int>(BlockSum(rank, s));
  }
  if constexpr (kInCluster) {
    if (!rank_is_listed) {
      if (threadIdx.x < part.blocks) {
        *InBlock(&s.ranked_logit, threadIdx.x) = x;
        *InBlock(&s.ranked_token, threadIdx.x) = token;
      }
      if (threadIdx.x == 0) s.rank = 0;
    }
    ClusterArrive();
    ClusterWait();
    if (!rank_is_listed) {
      rank_in_part();
      ClusterWait();
      rank = s.rank;
    }
  } else if (!rank_is_listed) {
    rank =
        static_cast<int>(BlockSum(CountFrom<kThreads>(mode_row, part, mode_sketch, x, token), s));
  }
  if (threadIdx.x == 0) {
    args.tokens[r] = token;
    args.logprobs[r] = mode_support.Logprob(x, token);
    args.ranks[r] = rank;
  }
  if (lists_are_sorted) ReportLists(args, ask, mode_row, mode_support, s);
}

// ---- verify ------------------------------------------------------------------------------------

__global__ void MarkDraftsKernel(const VerifySequence* sequences, int64_t count,
                                 uint8_t* has_draft) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= count) return;
  const VerifySequence& sequence = sequences[i];
  for (int j = 0; j < sequence.rows; ++j) has_draft[sequence.first_row + j] = j + 1 < sequence.rows;
}

// One block a sequence: how many drafts stand, and what lies behind the first that does not.
__global__ void JudgeKernel(const __grid_constant__ Params p, const VerifySequence* sequences,
                            int32_t* accepted) {
  const VerifySequence& sequence = sequences[blockIdx.x];
  if (sequence.rows == 0) return;
  int stand = 0;
  while (stand + 1 < sequence.rows) {
    const int64_t r = sequence.first_row + stand;
    if (p.args.status[r].code != RowCode::kOk || p.accepted[r] == 0) break;
    ++stand;
  }
  __syncthreads();  // before the status of what is not reached is written
  if (threadIdx.x == 0) accepted[blockIdx.x] = stand;
  for (int j = stand + 1; j < sequence.rows; ++j) {
    const int64_t r = sequence.first_row + j;
    Refuse(p.args, r, p.args.rows[r], {RowCode::kNotReached, -1}, threadIdx.x, blockDim.x);
    if (threadIdx.x == 0) p.args.logsumexp[r] = __int_as_float(0x7fffffff);
  }
}

// ---- launch ------------------------------------------------------------------------------------

template <class T, bool kInCluster>
int SharedBytes(const Params& p) {
  const int part_cells = (p.cells + p.blocks - 1) / p.blocks;
  return static_cast<int>(sizeof(DrawMemory<T, kInCluster>) +
                          2 * (p.cells + p.cells % 2) * sizeof(Stats) +
                          part_cells * 32 * sizeof(SmallPool::Sketch));
}

template <class T, bool kInCluster>
cudaError_t LaunchPass(const Params& p, unsigned rows, const Scratch& scratch,
                       cudaStream_t stream) {
  const auto kernel = &SampleRowKernel<T, kInCluster>;
  const int shared = SharedBytes<T, kInCluster>(p);
  if (shared > scratch.block_shared_bytes) return cudaErrorNotSupported;
  // The most any launch may ask for, as for softmax_topk.
  const cudaError_t error = cudaFuncSetAttribute(
      kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, scratch.block_shared_bytes);
  if (error != cudaSuccess) return error;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(rows * p.blocks);
  config.blockDim = dim3(DrawBlock<T, kInCluster>::kThreads);
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  cudaLaunchAttribute cluster = {};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {static_cast<unsigned>(p.blocks), 1, 1};
  config.attrs = &cluster;
  config.numAttrs = kInCluster ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, p);
}

// Blocks of a row's cluster; 0: a block alone takes the row.
template <class T>
int32_t ClusterBlocks(Params p, int64_t rows, const Scratch& scratch) {
  if (!scratch.clusters || rows > kFewRows) return 0;
  constexpr int kWarps = DrawBlock<T, true>::kWarps;
  const int32_t worth = (p.cells + kWarps - 1) / kWarps;
  p.blocks = static_cast<int32_t>(
      std::clamp<int64_t>(scratch.multiprocessors / rows, 1, std::min(worth, kMaxClusterBlocks)));
  while (SharedBytes<T, true>(p) > scratch.block_shared_bytes) {
    if (p.blocks == kMaxClusterBlocks) return 0;
    ++p.blocks;  // more of them for the row's sketch
  }
  return p.blocks;
}

template <class T>
cudaError_t LaunchRows(Params p, const Scratch& scratch, Carver carver, cudaStream_t stream) {
  const int64_t vocab = p.args.logits.cols;
  cudaError_t error = cudaSuccess;
  const int64_t rows = p.args.logits.rows;
  // Edited rows lie in scratch: as many rows a pass as it has room for.
  int64_t pass = rows;
  if (p.args.edited) {
    constexpr int64_t kMaxPass = 4096;
    const int64_t room = static_cast<int64_t>(carver.left()) * 9 / 10;
    pass = std::clamp<int64_t>(room / (vocab * 8), 1, std::min(rows, kMaxPass));
    p.edited = carver.Take<float>(pass * vocab);
    p.counts = carver.Take<uint32_t>(pass * vocab);
    if (p.counts == nullptr) return cudaErrorMemoryAllocation;
  }
  for (int64_t first = 0; first < rows; first += pass) {
    p.first_row = first;
    const unsigned count = static_cast<unsigned>(std::min(pass, rows - first));
    if (p.args.edited) {
      const unsigned parts = static_cast<unsigned>(
          std::clamp<int64_t>(vocab / (kEditThreads * 8), 1, scratch.multiprocessors));
      CopyMaskedKernel<T><<<dim3(parts, count), kEditThreads, 0, stream>>>(p);
      EditKernel<<<count, kEditThreads, 0, stream>>>(p);
      error = cudaGetLastError();
      if (error != cudaSuccess) return error;
    }
    const int32_t cluster = ClusterBlocks<T>(p, rows, scratch);
    p.blocks = std::max(cluster, 1);
    error = cluster > 0 ? LaunchPass<T, true>(p, count, scratch, stream)
                        : LaunchPass<T, false>(p, count, scratch, stream);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

cudaError_t Launch(const Params& p, const Scratch& scratch, Carver carver, cudaStream_t stream) {
  switch (p.args.logits.dtype) {
    case DType::kF32:
      return LaunchRows<float>(p, scratch, carver, stream);
    case DType::kF16:
      return LaunchRows<__half>(p, scratch, carver, stream);
    case DType::kBF16:
      return LaunchRows<__nv_bfloat16>(p, scratch, carver, stream);
  }
  return cudaErrorInvalidValue;
}

Params ParamsOf(const SampleArgs& args) {
  Params p{};
  p.args = args;
  p.cells = static_cast<int32_t>((args.logits.cols + kCell - 1) / kCell);
  return p;
}

}  // namespace

cudaError_t Sample(const SampleArgs& args, const Scratch& scratch, cudaStream_t stream) {
  if (args.logits.rows == 0) return cudaSuccess;
  return Launch(ParamsOf(args), scratch, Carver(scratch), stream);
}

cudaError_t Verify(const VerifyArgs& args, const Scratch& scratch, cudaStream_t stream) {
  if (args.sequence_count == 0 || args.sample.logits.rows == 0) return cudaSuccess;
  Params p = ParamsOf(args.sample);
  Carver carver(scratch);
  p.drafts = args.drafts;
  p.draft_ids = args.draft_ids;
  p.draft_probs = args.draft_probs;
  uint8_t* has_draft = carver.Take<uint8_t>(args.sample.logits.rows);
  p.has_draft = has_draft;
  p.accepted = carver.Take<uint8_t>(args.sample.logits.rows);
  if (p.accepted == nullptr) return cudaErrorMemoryAllocation;
  constexpr int kMarkThreads = 128;
  const unsigned blocks =
      static_cast<unsigned>((args.sequence_count + kMarkThreads - 1) / kMarkThreads);
  MarkDraftsKernel<<<blocks, kMarkThreads, 0, stream>>>(args.sequences, args.sequence_count,
                                                        has_draft);
  cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) return error;
  error = Launch(p, scratch, carver, stream);
  if (error != cudaSuccess) return error;
  JudgeKernel<<<static_cast<unsigned>(args.sequence_count), 128, 0, stream>>>(p, args.sequences,
                                                                              args.accepted);
  return cudaGetLastError();
}

}  // namespace logitd::cuda
