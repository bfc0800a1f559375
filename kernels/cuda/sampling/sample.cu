// sample and verify: a block reads a row once, as softmax_topk does, and draws from what it kept.
//
//   read    cells at temperature 1 (logsumexp, NaN) and, where the draw is from the whole row, at
//           the row's own; the sketch. Bias and penalties, which a kernel before has sorted by
//           cells, and the mask are applied on the way, and the edited row goes to scratch in f32,
//           for later looks
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
// Cost: reads rows * vocab * sizeof(T) once; an edited row is also written once, in f32; a flat
// top_p reads a row twice more (where the last logit is one of very many that are nearly
// equal, up to ten times), and a rank beyond the list what reaches it of the row. verify with
// draft probabilities reads a row once more, and twice more where the draft is refused.
// Limited by: as softmax_topk, the chain of latencies that ends a row; edits and a flat top_p by
// arithmetic.
// Measured (bench/results/h200/kernels.json), V 131072 f32, 512 rows: 90 us, 64% of one read, with
// top_k 64, top_p 0.9 and 20 log-probabilities; 259 with 4096 tokens of history and a mask besides;
// 148 unfiltered; 477 for a flat top_p. 64 rows 28 us, one row 19 us. Tried and dropped: a history
// counted in device memory (partial sectors: 385 us for that alone); a copy of the row, edited,
// read afterwards (928 us); 64-bit sums in shared memory for a flat top_p (1565 us); one kernel for
// plain and edited rows (64 plain rows 34 us).
#include <algorithm>
#include <type_traits>

#include "kernels/cuda/ops.h"
#include "kernels/cuda/rows/row_block.cuh"
#include "kernels/draw.h"

namespace logitd::cuda {
namespace {

constexpr int kListed = 128;     // tokens that come sorted
constexpr int kDrawBins = 1024;  // of a histogram of keys
constexpr int kMassBins = 2048;  // of a histogram of approximate mass
constexpr int kPatchThreads = 512;
constexpr int64_t kFewRows = 64;
// OfferGroups numbers a block's groups in 16 bits, and a block here may hold all of a row.
static_assert(kMaxVocab / kCell * SmallPool::kGroupsOfCell <= 65536);

struct Params {
  SampleArgs args;
  int64_t first_row;
  int32_t cells;   // of a row
  int32_t blocks;  // of a row's cluster
  // Of edited rows, in scratch: [rows of the launch, edited_stride] each.
  float* edited;       // null: no row is edited
  uint32_t* counts;    // of tokens in the history, while patches are made
  float* bias_values;  // null: no row has bias
  int64_t edited_stride;
  int* patch_counts;  // [rows of the launch, cells]
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
__device__ inline bool HasPatches(const SampleRow& ask) {
  return ask.bias_count > 0 || PenaltiesAreOn(ask);
}
__device__ inline bool IsEdited(const SampleRow& ask) {
  return ask.first_mask_word >= 0 || HasPatches(ask);
}
__device__ inline bool IsFiltered(const SampleRow& ask, int64_t vocab) {
  return TopKIsOn(ask, vocab) || ask.top_p < 1 || ask.min_p > 0;
}

// ---- edit --------------------------------------------------------------------------------------

// A token to edit, in its cell: 10 bits of place, whether it has a bias, its count in the history.
constexpr uint32_t kPatchCount = (1u << 21) - 1;
constexpr uint32_t kPatchBias = 1u << 21;
constexpr int kPatchPlace = 22;
static_assert(kMaxHistory <= kPatchCount && kCell == 1 << (32 - kPatchPlace));

// Sorts what a row's bias and history edit by cells, a patch for each token. Patches of a cell lie
// where its edited logits will, for they are read before those are written. A block a row. Tokens
// are counted in a table in shared memory, where they are too many for it in device memory.
struct PatchTable {
  static constexpr int kMaxSlots = 8192;
  static constexpr int kMaxTokens = kMaxSlots * 3 / 4;
  static constexpr uint32_t kFree = ~0u;
  uint32_t tokens[kMaxSlots];
  uint32_t counts[kMaxSlots];
  int patches_of_cell[kMaxVocab / kCell];

  // `slots`: a power of two.
  __device__ void Add(uint32_t token, uint32_t count, uint32_t slots) {
    uint32_t slot = __umulhi(token * 2654435761u, slots);
    while (true) {
      const uint32_t held = atomicCAS(&tokens[slot], kFree, token);
      if (held == kFree || held == token) break;
      slot = (slot + 1) & (slots - 1);
    }
    atomicAdd(&counts[slot], count);
  }
};

__global__ void __launch_bounds__(kPatchThreads) PatchKernel(const __grid_constant__ Params p) {
  extern __shared__ uint4 dynamic[];
  auto& table = *reinterpret_cast<PatchTable*>(dynamic);
  const SampleRow& ask = p.args.rows[p.first_row + blockIdx.x];
  if (ask.active == 0 || !HasPatches(ask)) return;
  const int64_t at = blockIdx.x * p.edited_stride;
  uint32_t* counts = p.counts + at;
  uint32_t* patches = reinterpret_cast<uint32_t*>(p.edited + at);
  const SampleBias* bias = p.args.bias + ask.first_bias;
  const int32_t* history = p.args.history + ask.first_history;
  const int history_count = PenaltiesAreOn(ask) ? ask.history_count : 0;
  const int bias_count = ask.bias_count;
  const int thread = threadIdx.x;
  const bool tabled = history_count <= PatchTable::kMaxTokens - bias_count;
  const auto patch = [&](int token, uint32_t count) {
    const int cell = token / kCell;
    patches[cell * kCell + atomicAdd(&table.patches_of_cell[cell], 1)] =
        static_cast<uint32_t>(token % kCell) << kPatchPlace | count;
  };
  for (int cell = thread; cell < p.cells; cell += kPatchThreads) table.patches_of_cell[cell] = 0;
  for (int i = thread; i < bias_count; i += kPatchThreads)
    p.bias_values[at + bias[i].id] = bias[i].value;
  if (tabled) {
    int slots = kPatchThreads;
    while (slots * 3 / 4 < history_count + bias_count) slots *= 2;
    for (int i = thread; i < slots; i += kPatchThreads) {
      table.tokens[i] = PatchTable::kFree;
      table.counts[i] = 0;
    }
    __syncthreads();
    for (int i = thread; i < history_count; i += kPatchThreads) table.Add(history[i], 1, slots);
    for (int i = thread; i < bias_count; i += kPatchThreads)
      table.Add(bias[i].id, kPatchBias, slots);
    __syncthreads();
    for (int i = thread; i < slots; i += kPatchThreads) {
      if (table.tokens[i] != PatchTable::kFree)
        patch(static_cast<int>(table.tokens[i]), table.counts[i]);
    }
  } else {
    for (int i = thread; i < history_count; i += kPatchThreads) counts[history[i]] = 0;
    for (int i = thread; i < bias_count; i += kPatchThreads) counts[bias[i].id] = 0;
    __syncthreads();
    for (int i = thread; i < history_count; i += kPatchThreads) atomicAdd(&counts[history[i]], 1u);
    for (int i = thread; i < bias_count; i += kPatchThreads)
      atomicAdd(&counts[bias[i].id], kPatchBias);
    __syncthreads();
    const auto patch_once = [&](int token) {
      const uint32_t count = atomicExch(&counts[token], 0u);
      if (count != 0) patch(token, count);  // else another of the same token has it
    };
    for (int i = thread; i < history_count; i += kPatchThreads) patch_once(history[i]);
    for (int i = thread; i < bias_count; i += kPatchThreads) patch_once(bias[i].id);
  }
  __syncthreads();
  for (int cell = thread; cell < p.cells; cell += kPatchThreads)
    p.patch_counts[static_cast<int64_t>(blockIdx.x) * p.cells + cell] = table.patches_of_cell[cell];
}

// Where infinities of both signs met, the ban wins.
__device__ inline float BanIfNan(float x) { return isnan(x) ? -kInfinity : x; }

// A row's edits, for the warps that read it.
struct Edits {
  const uint32_t* mask;      // null: none
  const int* patch_counts;   // of cells; null: no patches
  const float* bias_values;  // of tokens, where a patch says so
  float* edited;             // the row after edits; until a cell is written, its patches
  int end;                   // of the block's part of the row
  float repetition;
  float presence;
  float frequency;

  __device__ int PatchesOf(int first) const {
    return patch_counts != nullptr && first < end ? patch_counts[first / kCell] : 0;
  }
  __device__ uint32_t PatchAt(int first, int i) const {
    return reinterpret_cast<const uint32_t*>(edited)[first + i];
  }
  // The lane's word of the mask of the cell at `first`.
  __device__ uint32_t MaskWord(int first, int lane) const {
    const int word = first / 32 + lane;
    return mask != nullptr && word < MaskWords(end) ? mask[word] : ~0u;
  }
  // Applies a patch to the cell at `first`, which lies at `values`: -inf stays -inf through it.
  __device__ void Apply(uint32_t patch, int first, float* values) const {
    const int place = static_cast<int>(patch >> kPatchPlace);
    const uint32_t count = patch & kPatchCount;
    float x = values[place];
    if ((patch & kPatchBias) != 0) x = BanIfNan(__fadd_rn(x, bias_values[first + place]));
    if (count != 0) {
      x = x > 0 ? __fdiv_rn(x, repetition) : __fmul_rn(x, repetition);
      x = BanIfNan(__fsub_rn(x, __fmul_rn(frequency, static_cast<float>(count))));
      x = __fsub_rn(x, presence);
    }
    values[place] = x;
  }
};

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
                                     BlockShape<T, SmallPool, 4, 2, 4>>;

// An edited row has two sketches, of groups twice as large: as sent, and after edits.
using EditPool = PoolShape<128, 1>;
static_assert(2 * sizeof(EditPool::Sketch) == sizeof(SmallPool::Sketch) &&
              sizeof(EditPool::Shared) == sizeof(SmallPool::Shared));
template <class T, bool kInCluster>
using EditBlock = std::conditional_t<kInCluster, BlockShape<T, EditPool, 16, 2, 1, true>,
                                     BlockShape<T, EditPool, 4, 2, 4>>;

struct DrawFinish {
  typename SmallPool::Shared pool;
  DrawShared draw;
};

// The rings, and of 16-bit rows a cell of each warp as floats; then the pool and what draws.
template <class T, bool kInCluster>
union DrawMemory {
  using Block = DrawBlock<T, kInCluster>;
  struct {
    typename Block::Shared stream;
    float cells[sizeof(T) == 2 ? Block::kWarps : 1][sizeof(T) == 2 ? kCell : 1];
  };
  DrawFinish finish;
  // Blocks that have begun to list write to warp_bests of those that still read, or list.
  static_assert(!kInCluster || sizeof(DrawFinish) <= sizeof(Block::Shared::rings));
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
      : max(row_max), rate(1.0f / fmaxf(temperature, kLeastTemperature)) {}
  __device__ uint64_t operator()(float x) const {
    if (max == kInfinity) return x == max ? uint64_t{1} << kWeightBits : 0;
    return __float2ull_rn(BeforeRounding(x));
  }
  // Of a finite maximum.
  __device__ float BeforeRounding(float x) const {
    // By halves, for the difference may be twice the largest float; they are exact.
    const float power = __fmul_rn(__fsub_rn(0.5f * x, 0.5f * max), 2 * rate);
    return expf(power) * static_cast<float>(kWeightOne);  // the product is exact
  }
};

// Adds up to kLaneElements weights as Weigher rounds them, without conversions, which are slow: in
// two parts, each rounded by adding a float whose last place is one.
class WeightSum {
 public:
  __device__ void Add(float before_rounding) {
    const float high = __fmaf_rn(before_rounding, 0x1p-22f, kRound);
    high_ += __float_as_uint(high) - __float_as_uint(kRound);
    const float low = __fmaf_rn(__fsub_rn(high, kRound), -0x1p22f, before_rounding);  // exact
    low_ += static_cast<int32_t>(__float_as_uint(__fadd_rn(low, kRound)) - __float_as_uint(kRound));
  }
  __device__ uint64_t total() const {
    return (static_cast<uint64_t>(high_) << 22) + static_cast<uint64_t>(int64_t{low_});
  }

 private:
  static constexpr float kRound = 0x1.8p23f;
  uint32_t high_ = 0;
  int32_t low_ = 0;
};

// The lane's part of the cell at `first` of a row, from device memory; -inf from `end` on, and in a
// half of it that is not wanted.
template <class Element>
__device__ inline void ReadCell(const Element* row, int first, int end, bool low, bool high,
                                LaneCell<Element>& x) {
  constexpr int kVectors = kLaneElements / kVector<Element>;
  constexpr uint32_t kNothing = sizeof(Element) == 4                     ? 0xff800000u
                                : std::is_same_v<Element, __nv_bfloat16> ? 0xff80ff80u
                                                                         : 0xfc00fc00u;
  const int lane = threadIdx.x % 32;
  const bool aligned = (reinterpret_cast<uintptr_t>(row) & 15) == 0;
  const bool whole = aligned && first + kCell <= end;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int i = first + CellIndex<Element>(lane, v * kVector<Element>);
    const bool wanted = 2 * v < kVectors ? low : high;
    uint4 words{kNothing, kNothing, kNothing, kNothing};
    if (whole) {
      if (wanted) words = *reinterpret_cast<const uint4*>(row + i);
    } else if (wanted && i < end) {
      words = LoadVector(row + i, aligned, end - i);
      uint32_t* parts[4] = {&words.x, &words.y, &words.z, &words.w};
#pragma unroll
      for (int e = 0; e < kVector<Element>; ++e) {
        if (i + e < end) continue;
        uint32_t& part = *parts[e * sizeof(Element) / 4];
        const uint32_t bits = sizeof(Element) == 4 ? ~0u : e % 2 == 0 ? 0xffffu : 0xffff0000u;
        part = (part & ~bits) | (kNothing & bits);
      }
    }
    x.words[4 * v] = words.x;
    x.words[4 * v + 1] = words.y;
    x.words[4 * v + 2] = words.z;
    x.words[4 * v + 3] = words.w;
  }
}

// The row after edits: as sent where there are none.
template <class T, bool kMayBeEdited>
class Logits {
 public:
  static constexpr bool kEditable = kMayBeEdited;

  __device__ Logits(const T* as_sent, int count) : sent(as_sent), vocab(count) {}

  const T* sent;
  const float* edited = nullptr;
  int vocab;

  __device__ float operator[](int i) const {
    if constexpr (kEditable) {
      if (edited != nullptr) return edited[i];
    }
    return ToFloat(sent[i]);
  }

  // Calls visit(x, first) for every cell that is the warp's: x is the lane's part of it, -inf
  // beyond the row; `first` is the cell's first element.
  template <class Visit>
  __device__ void EachCell(int warp, int warps, Visit visit) const {
    if constexpr (kEditable) {
      if (edited != nullptr) return EachCellOf(edited, warp, warps, visit);
    }
    EachCellOf(sent, warp, warps, visit);
  }

  // Calls visit(x, i) for the thread's share of elements [begin, end); begin is a multiple of 8.
  template <class Visit>
  __device__ void Each(int begin, int end, int thread, int threads, Visit visit) const {
    if constexpr (kEditable) {
      if (edited != nullptr) return EachOf(edited, begin, end, thread, threads, visit);
    }
    EachOf(sent, begin, end, thread, threads, visit);
  }

 private:
  template <class Element, class Visit>
  __device__ void EachCellOf(const Element* row, int warp, int warps, Visit visit) const {
#pragma unroll 1
    for (int first = warp * kCell; first < vocab; first += warps * kCell) {
      LaneCell<Element> x;
      ReadCell(row, first, vocab, true, true, x);
      visit(x, first);
    }
  }

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

// The lowest logit that a filtered row keeps: min_p's border, or the one below which weights are 0.
__device__ inline float LeastKept(float max, float temperature, float min_p) {
  const double log_share = min_p > 0x1p-44f ? log(static_cast<double>(min_p)) : kLogLeastWeight;
  const double least = max + static_cast<double>(fmaxf(temperature, kLeastTemperature)) * log_share;
  if (least < -3.402823466e38) return -3.402823466e38f;
  return __double2float_ru(least);
}

// ---- filter ------------------------------------------------------------------------------------

// The key that ends the shortest prefix, by descending key, of keys in [low, high] in which
// measure(x) adds up to `need` or more; kLowestKey where all of them have less. Called by all
// threads.
template <int kThreads, class Row, class Measure>
__device__ __noinline__ Key LastOfPrefix(const Row& row, Key low, Key high, uint64_t need,
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
template <class Row, class Weigh>
__device__ inline int TokenOfCell(const Row& row, int begin, int end, uint64_t target,
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

template <class Row, class Weigh>
__device__ inline uint64_t SumOfCell(const Row& row, int begin, int end, Weigh weigh) {
  const int lane = threadIdx.x % 32;
  uint64_t sum = 0;
  row.Each(begin, end, lane, 32, [&](float x, int i) { sum += weigh(x, i); });
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(kFullWarp, sum, offset);
  return sum;
}

// The sum of weigh(x, i) over the row; sums of cells are left in cell_sums. Called by all threads.
template <class Row, class Weigh>
__device__ __noinline__ uint64_t SumByCells(const Row& row, uint64_t* cell_sums, Weigh weigh) {
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
template <class Row, class Weigh>
__device__ __noinline__ int TokenByCells(const Row& row, const uint64_t* cell_sums, uint64_t target,
                                         Weigh weigh) {
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
template <int kThreads, class Row>
__device__ __noinline__ Nucleus FindNucleus(const Row& row, Key floor, const Weigher& weigh,
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
  const float bins_a_logit = fminf(kMassBins / depth * weigh.rate, 1e38f);  // 0 times it is 0
  const auto bin_of = [=](float x) {  // rounded by adding a float whose last place is one
    const float place = fminf((peak - x) * bins_a_logit, kMassBins - 1.0f);
    return static_cast<int>(__float_as_uint(__fadd_rn(place, 0x1p23f)) & 0x7fffffu);
  };
  const float floor_logit = KeyLogit(floor);
  const auto is_out = [=](float x, int i) { return MakeKey(x, i) < floor; };
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
  const int warp = thread / 32;
  row.EachCell(warp, kThreads / 32, [&]<class Element>(const LaneCell<Element>& x, int begin) {
#pragma unroll
    for (int e = 0; e < kLaneElements; ++e) {
      const uint32_t share = __float2uint_rz(Exp2((x[e] - peak) * c) * scale);
      if (share == 0 || x[e] < floor_logit) continue;
      if (x[e] == floor_logit && is_out(x[e], begin + CellIndex<Element>(lane, e))) continue;
      atomicAdd(&s.bin_share[bin_of(x[e])], share);
    }
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
  uint64_t above = 0;
  row.EachCell(warp, kThreads / 32, [&]<class Element>(const LaneCell<Element>& x, int begin) {
    WeightSum weights;
    uint32_t between = 0;  // elements whose bin is neither above nor below
#pragma unroll
    for (int e = 0; e < kLaneElements; ++e) {
      const int bin = bin_of(x[e]);
      const bool is_above = bin < first && x[e] > floor_logit;
      weights.Add(is_above ? weigh.BeforeRounding(x[e]) : 0.0f);
      // A tie with the floor is looked at again, wherever it is.
      if (bin <= last && x[e] >= floor_logit && !is_above) between |= 1u << e;
    }
    uint64_t sum = weights.total();
#pragma unroll
    for (int e = 0; e < kLaneElements; ++e) {
      if ((between >> e & 1) == 0) continue;
      const int i = begin + CellIndex<Element>(lane, e);
      if (is_out(x[e], i)) continue;
      const int at = atomicAdd(&pool.count, 1);
      if (at < SmallPool::kPool / 2) pool.pool[at] = MakeKey(x[e], i);
    }
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(kFullWarp, sum, offset);
    if (lane == 0) {
      cell_sums[begin / kCell] = sum;
      above += sum;
    }
  });
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
  // In a cluster, where its blocks find a floor: Shared::warp_bests and row_floor of the stream.
  float* warp_bests;
  float* row_floor;

  __device__ int cells() const { return (end - begin + kCell - 1) / kCell; }
};

// The thread's count of tokens in the part that are no later in the order than `token` with logit
// x. Only groups that reach it are looked at, by the part's sketch of these logits.
template <int kThreads, class Element, class Sketch>
__device__ int CountFromOf(const Element* row, const Part& part, const Sketch* sketch, float x,
                           int token) {
  const int lane = threadIdx.x % 32;
  const uint32_t edge = OrderedBits(x) & 0xffff0000u;
  int count = 0;
#pragma unroll 1
  for (int cell = threadIdx.x / 32; cell < part.cells(); cell += kThreads / 32) {
    const uint32_t maxima = sketch[cell * 32 + lane];
    const bool low = maxima << 16 >= edge;
    const int first = part.begin + cell * kCell;
    LaneCell<Element> others;
    ReadCell(row, first, part.end, low, sizeof(Sketch) == 2 ? low : maxima >= edge, others);
    bool ties = false;
#pragma unroll
    for (int e = 0; e < kLaneElements; ++e) {
      count += others[e] > x;
      ties |= others[e] == x;
    }
    if (!ties) continue;
#pragma unroll
    for (int e = 0; e < kLaneElements; ++e)
      count += others[e] == x && first + CellIndex<Element>(lane, e) <= token;
  }
  return count;
}

// How many tokens of the part are no later in the order than `token` with logit x: one by one where
// few groups of the part's sketch of these logits reach it. Called by all threads.
template <int kThreads, class Shape, class Row>
__device__ __noinline__ int CountFrom(const Row& row, const Part& part,
                                      const typename Shape::Sketch* sketch, float x, int token) {
  auto& pool = Pool<Shape>();
  const auto count_of = [&]<class Element>(const Element* elements) {
    __syncthreads();
    if (threadIdx.x == 0) pool.count = 0;
    Floor floor;
    floor.Raise(MakeKey(x, token));
    if (OfferGroups<Element, kThreads, Shape>(elements + part.begin, part.begin,
                                              part.end - part.begin, sketch, 0, part.cells(),
                                              floor)) {
      return pool.count;
    }
    const int count = CountFromOf<kThreads>(elements, part, sketch, x, token);
    return static_cast<int>(BlockSum(count, Finish().draw));
  };
  if constexpr (Row::kEditable) {
    if (row.edited != nullptr) return count_of(row.edited);
  }
  return count_of(row.sent);
}

// Writes the top tokens and the asked ids, of logits whose first tokens are in s.sorted.
template <class Row>
__device__ inline void ReportLists(const SampleArgs& args, const SampleRow& ask, const Row& row,
                                   const Support& support, const DrawShared& s) {
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

// Reads the warp's cells of an edited row: writes the statistics of what was sent, at temperature
// 1, and of what the edits leave, at scale c, with a sketch of each; and the edited logits to
// scratch. `cell_floats`: the warp's cell as floats, of 16-bit rows. Leaves the largest logits the
// lane has seen.
template <class Block, class T>
__device__ __forceinline__ void ReadEdited(RowStream<Block>& stream, const Edits& edits, int begin,
                                           float c, Stats* raw_cells, Stats* cells,
                                           EditPool::Sketch* raw_sketch, EditPool::Sketch* sketch,
                                           float* cell_floats, float& raw_best, float& best) {
  const int lane = threadIdx.x % 32;
  constexpr int kRound = Block::kWarps * kCell;
  int patch_count = edits.PatchesOf(stream.first());
  uint32_t patch = lane < patch_count ? edits.PatchAt(stream.first(), lane) : 0;
  uint32_t word = edits.MaskWord(stream.first(), lane);
  raw_best = -kInfinity;
  best = -kInfinity;
  LaneCell<T> x;
  while (stream.Next(x)) {
    const int first = stream.first();
    const int count = patch_count;
    const float raw_max = x.Max(0, kLaneElements);
    const Stats raw = LaneStats(x, raw_max, kLog2E);
    LaneCell<float> y;
    const auto apply = [&](float* values) {
      if (lane < count) edits.Apply(patch, first, values);
      for (int i = lane + 32; i < count; i += 32)
        edits.Apply(edits.PatchAt(first, i), first, values);
      __syncwarp();
      LoadCell(values, lane, y);
      __syncwarp();
    };
    if constexpr (sizeof(T) == 4) {
      if (count > 0) {
        apply(stream.InShared());
      } else {
        y = x;
      }
    } else {
#pragma unroll
      for (int e = 0; e < kLaneElements; e += 4) {
        *reinterpret_cast<float4*>(cell_floats + CellIndex<T>(lane, e)) = {x[e], x[e + 1], x[e + 2],
                                                                           x[e + 3]};
      }
      __syncwarp();
      apply(cell_floats);
    }
    stream.Release();
    const uint32_t word_here = word;
    const int next = first + kRound;
    patch_count = edits.PatchesOf(next);
    patch = lane < patch_count ? edits.PatchAt(next, lane) : 0;
    word = edits.MaskWord(next, lane);
    if (edits.mask != nullptr) {
#pragma unroll
      for (int v = 0; v < kLaneElements / 4; ++v) {
        const uint32_t allowed =
            __shfl_sync(kFullWarp, word_here, 4 * v + lane / 8) >> (lane % 8 * 4);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if ((allowed & 1u << e) == 0) y.words[4 * v + e] = __float_as_uint(-kInfinity);
        }
      }
    }
    uint4* to = reinterpret_cast<uint4*>(edits.edited + first) + lane;
    const bool whole = first + kCell <= edits.end;
#pragma unroll
    for (int v = 0; v < kLaneElements / 4; ++v) {
      // Rows are padded to whole vectors.
      if (whole || first + CellIndex<float>(lane, 4 * v) < edits.end)
        to[32 * v] = {y.words[4 * v], y.words[4 * v + 1], y.words[4 * v + 2], y.words[4 * v + 3]};
    }
    const float max = y.Max(0, kLaneElements);
    const Stats raw_of_cell = MergeLanes(raw, kLog2E);
    const Stats of_cell = MergeLanes(LaneStats(y, max, c), c);
    if (lane == 0) {
      raw_cells[first / kCell] = raw_of_cell;
      cells[first / kCell] = of_cell;
    }
    const int at = (first - begin) / 32 + lane;
    raw_sketch[at] = static_cast<EditPool::Sketch>(OrderedBits(raw_max) >> 16);
    sketch[at] = static_cast<EditPool::Sketch>(OrderedBits(max) >> 16);
    raw_best = fmaxf(raw_best, raw_max);
    best = fmaxf(best, max);
  }
}

// Leaves the first `count` <= kListed tokens of the row just read in s.sorted of the first block,
// in order; by then, all that the cluster's blocks wrote there is there. Called by all threads
// after a barrier; passes one at its end.
template <class Block>
__device__ inline void List(const typename Block::Element* row, const Part& part,
                            const typename Block::Pool::Sketch* sketch, float lane_best,
                            int count) {
  using Shape = typename Block::Pool;
  constexpr int kThreads = Block::kThreads;
  DrawShared& s = Finish().draw;
  auto& pool = Pool<Shape>();
  Floor floor;
  if constexpr (Block::kCluster) {
    floor.RaiseToLogit(ClusterFloor<Block>(lane_best, part.block, part.blocks, count,
                                           part.warp_bests, *part.row_floor));
  } else {
    floor.RaiseToLogit(BlockFloor<Block>(lane_best, part.cells(), count));
  }
  Gather<typename Block::Element, kThreads, Shape>(row + part.begin, part.begin,
                                                   part.end - part.begin, sketch, floor, count);
  if constexpr (Block::kCluster) {
    SendToFirst<kThreads, Shape>(count, part.block);
    if (part.block != 0) return;
    OpenInbox<kThreads, Shape>(part.blocks);
  }
  const int n = Trim<kThreads, Shape>(count, Shape::kPool / 2);
  EmitByRank<kThreads>(pool.pool, n, pool.pool + Shape::kPool / 2, pool.select,
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

template <class T, bool kInCluster, bool kEditable>
__global__ void __launch_bounds__(DrawBlock<T, kInCluster>::kThreads,
                                  DrawBlock<T, kInCluster>::kResident)
    SampleRowKernel(const __grid_constant__ Params p) {
  using Block = DrawBlock<T, kInCluster>;
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
  const int warp = threadIdx.x / 32;
  Part part;
  part.block = static_cast<int>(blockIdx.x) - place * p.blocks;
  part.blocks = p.blocks;
  part.begin = p.cells * part.block / p.blocks * kCell;
  part.end = min(p.cells * (part.block + 1) / p.blocks * kCell, vocab);
  part.warp_bests = memory.stream.warp_bests;
  part.row_floor = &memory.stream.row_floor;
  DrawShared& s = memory.finish.draw;
  Stats* raw_cells = reinterpret_cast<Stats*>(&memory + 1);  // [cells]
  Stats* cells = raw_cells + p.cells + p.cells % 2;          // [cells], at the row's temperature
  auto* sketch = reinterpret_cast<SmallPool::Sketch*>(cells + p.cells + p.cells % 2);
  const T* sent = static_cast<const T*>(args.logits.data) + r * args.logits.row_stride;
  const auto in_first = [](Stats* here) { return kInCluster ? InBlock(here, 0) : here; };

  RowStream<Block> stream(memory.stream, sent, part.begin, part.end);
  if constexpr (kInCluster) ClusterWait();  // all blocks have begun: their memory is there
  if (ask.active == 0) return stream.Abandon();
  const bool edited = kEditable && IsEdited(ask);
  const bool greedy = ask.temperature == 0;
  const bool filtered = IsFiltered(ask, vocab);
  const bool is_raw = ask.logprob_mode == LogprobMode::kRaw;
  // Sums at the row's temperature: lists have sums of their own.
  const bool sums_needed = !TopKIsOn(ask, vocab) && ask.min_p == 0 && !greedy;
  const float c = kLog2E / (sums_needed ? fmaxf(ask.temperature, kLeastTemperature) : 1.0f);
  const bool twice = !edited && sums_needed && ask.temperature != 1;
  // Of an edited row, two sketches in the place of one.
  auto* raw_sketch = reinterpret_cast<EditPool::Sketch*>(sketch);
  auto* edited_sketch = raw_sketch + part.cells() * 32;
  float lane_best, edited_best;
  if (edited) {
    const int64_t at = place * p.edited_stride;
    const Edits edits{
        ask.first_mask_word < 0 ? nullptr : args.mask_words + ask.first_mask_word,
        HasPatches(ask) ? p.patch_counts + static_cast<int64_t>(place) * p.cells : nullptr,
        p.bias_values + at,
        p.edited + at,
        part.end,
        ask.repetition,
        ask.presence,
        ask.frequency};
    ReadEdited<Block, T>(stream, edits, part.begin, c, in_first(raw_cells), in_first(cells),
                         raw_sketch, edited_sketch, memory.cells[sizeof(T) == 2 ? warp : 0],
                         lane_best, edited_best);
  } else {
    lane_best = stream.template Run<true>(kLog2E, in_first(raw_cells), sketch, c,
                                          twice ? in_first(cells) : nullptr);
  }
  __syncthreads();  // from here on the rings' memory is the pool's

  using Row = Logits<T, kEditable>;
  const Row raw_row(sent, vocab);
  Row row = raw_row;
  if (edited) {
    row.edited = p.edited + place * p.edited_stride;
    if (is_raw && ask.top_logprobs + ask.extra_count > 0) {
      // The lists of the row as sent are reported first.
      List<EditBlock<T, kInCluster>>(sent, part, raw_sketch, lane_best, max(1, ask.top_logprobs));
      if (part.block == 0) {
        const Stats raw = MergeCells(p.cells, kLog2E, lane, [&](int i) { return raw_cells[i]; });
        ReportLists(args, ask, raw_row, RawSupport(raw), s);
      }
      __syncthreads();
    }
  }
  // The first tokens, sorted: for the report, and where the filters leave no more.
  const bool lists_are_sorted = !is_raw || !edited;  // of the mode's logits
  int listed = lists_are_sorted ? max(1, ask.top_logprobs) : 1;
  if (TopKIsOn(ask, vocab)) {
    listed = max(listed, min(ask.top_k, kListed));
  } else if (filtered && !greedy) {
    listed = kListed;
  }
  listed = min(listed, vocab);
  const Row& mode_row = is_raw ? raw_row : row;
  if (kInCluster && threadIdx.x == 0) s.ranked_token = -1;
  if (edited) {
    List<EditBlock<float, kInCluster>>(row.edited, part, edited_sketch, edited_best, listed);
  } else {
    List<Block>(sent, part, sketch, lane_best, listed);
  }
  // How many tokens of the block's part are no later than this one.
  const auto count_from = [&](float logit, int last) {
    if constexpr (kEditable) {
      if (edited) {
        return CountFrom<kThreads, EditPool>(mode_row, part, is_raw ? raw_sketch : edited_sketch,
                                             logit, last);
      }
    }
    return CountFrom<kThreads, SmallPool>(mode_row, part, sketch, logit, last);
  };
  // In a cluster, once its blocks know the token: each adds what it finds in its part of the row.
  const auto rank_in_part = [&] {
    const int sum = count_from(s.ranked_logit, s.ranked_token);
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
                      : filtered        ? LeastKept(peak, ask.temperature, ask.min_p)
                                        : -3.402823466e38f;
  const Key low = max(static_cast<Key>(OrderedBits(least)) << 32, AboveMinusInfinity());
  uint64_t* cell_sums = reinterpret_cast<uint64_t*>(cells);
  Support support{low, peak, greedy ? 1.0 : fmaxf(ask.temperature, kLeastTemperature), 0.0};
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
    rank = count_from(x, token);
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

template <class T, bool kInCluster, bool kEditable>
cudaError_t LaunchPass(const Params& p, unsigned rows, const Scratch& scratch,
                       cudaStream_t stream) {
  const auto kernel = &SampleRowKernel<T, kInCluster, kEditable>;
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
    p.edited_stride = (vocab + 31) / 32 * 32;
    const int64_t row_bytes = p.edited_stride * (p.args.bias == nullptr ? 8 : 12) + p.cells * 4;
    pass = std::clamp<int64_t>(room / row_bytes, 1, std::min(rows, kMaxPass));
    p.edited = carver.Take<float>(pass * p.edited_stride);
    p.counts = carver.Take<uint32_t>(pass * p.edited_stride);
    if (p.args.bias != nullptr) p.bias_values = carver.Take<float>(pass * p.edited_stride);
    p.patch_counts = carver.Take<int>(pass * p.cells);
    if (p.patch_counts == nullptr) return cudaErrorMemoryAllocation;
    error = cudaFuncSetAttribute(&PatchKernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 sizeof(PatchTable));
    if (error != cudaSuccess) return error;
  }
  for (int64_t first = 0; first < rows; first += pass) {
    p.first_row = first;
    const unsigned count = static_cast<unsigned>(std::min(pass, rows - first));
    if (p.args.edited) {
      if (p.args.history != nullptr || p.args.bias != nullptr) {
        PatchKernel<<<count, kPatchThreads, sizeof(PatchTable), stream>>>(p);
        error = cudaGetLastError();
        if (error != cudaSuccess) return error;
      }
    }
    const int32_t cluster = ClusterBlocks<T>(p, rows, scratch);
    p.blocks = std::max(cluster, 1);
    const auto launch =
        cluster > 0     ? p.args.edited ? &LaunchPass<T, true, true> : &LaunchPass<T, true, false>
            : p.args.edited ? &LaunchPass<T, false, true>
                        : &LaunchPass<T, false, false>;
    error = launch(p, count, scratch, stream);
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
