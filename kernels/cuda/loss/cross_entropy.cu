// cross_entropy: one read of the logits leaves every cell's sums; one warp merges them and writes
// the losses. Backward: one read, one write.
//
// Forward. A warp takes cells of 1024 logits (cell.cuh) from a ring of copies and leaves for each
// its maximum and sum of exponentials; where the row asks for them also the sum of p ln p, the sum
// of the logits and the number of tokens before the target. These are branches of the row, the same
// in all its threads, and beside the sum of exponentials, whose bits they leave alone. Tops are a
// variant of the kernel, for they need shared memory that would cost the others residency: it keeps
// softmax_topk's sketch of the row and selects from it. Where a block may have 99 KB, f32 rows with
// tops end at about 460,000 tokens (cudaErrorNotSupported). Cells merge in one order whatever the
// grid:
//
//   warp per row      rows of up to 4 cells
//   cluster per row   at most as many rows as multiprocessors: up to 8 blocks leave their cells in
//                     the first one's shared memory (sm_90; before that a large block a row)
//   block per row     else
//
// What is of a row alone (logarithms, differences, means) is in double, once a row. A softcap is
// tanhf of every logit: the sums are of tanh(l / softcap), with the softcap in the exponent's
// scale.
//
// Cost: reads rows * vocab * sizeof(T) once, writes 16 to 24 bytes a row. Limited by: HBM; bf16
// takes about 7 instructions and one ex2 an element, 50% and 57% of what a multiprocessor issues at
// the read ceiling. Softcap, entropy and smoothing take up to 30, and are limited by those.
// Measured (bench/results/h200/kernels.json), as a share of one read, bf16: 8192 x 128256, 96%;
// 8192 x 32000, 87%; with rank 88%; with rank, entropy and 5 tops 54%; label smoothing 66%; softcap
// 30%; 64 rows 11 us, one 6.7. Tried and dropped at 32000 tokens, whose rows' ends are not hidden:
// blocks of 2 warps (1% slower), of one (5%), fewer stages and more blocks (3%).
//
// Backward. Threads take vectors of 16 bytes, aligned as the output is; an input that is aligned
// differently is read by elements. Cost: 2 * rows * vocab * sizeof(T). Limited by: HBM; about 6
// instructions and two ex2 an element. Measured there, as a share of the copy: 98 to 100%, rows off
// alignment 92%, softcap 70%.
#include <algorithm>
#include <limits>

#include "kernels/cross_entropy.h"
#include "kernels/cuda/loss/loss_row.cuh"
#include "kernels/cuda/ops.h"
#include "kernels/cuda/rows/candidates.cuh"

namespace logitd::cuda {
namespace {

struct Params {
  CrossEntropyArgs args;
  int32_t cells;   // of a row
  int32_t blocks;  // of a row's cluster
};

// ---- a row's values ----------------------------------------------------------------------------

// A cell's sums, or a lane's share of them.
struct CellSums {
  Stats stats;     // of the values
  float weighted;  // sum of e log2(e), for the e of stats.sum; 0 where not wanted
  float total;     // sum of the values, times kTotalUnit; 0 where not wanted
  int32_t before;  // tokens before the target; 0 where not wanted
};
// Room for a row's cells: what follows is aligned to 16 bytes, as the sketch must be.
__host__ __device__ inline int CellPlaces(const Params& p) { return (p.cells + 3) / 4 * 4; }
static_assert(sizeof(CellSums) % 4 == 0);
static_assert(sizeof(Outcome) % 16 == 0);
static_assert(kCell * kTotalUnit == 1.0f);

// The binary logarithm of Exponential::Factor; at least kLeastPower.
constexpr float kLeastPower = -1000.0f;  // 2^it is 0, and 0 times it
__device__ inline float FactorPower(const Exponential& to, float other_max) {
  float power = __fmul_rn(other_max - to.max, to.log2e_over_temperature);
  if (to.plain) {
    power = __fmul_rn(other_max, to.log2e_over_temperature) + to.shift;
  } else if (other_max == to.max) {
    power = 0;
  } else {
    const Exponential other(other_max, to.log2e_over_temperature);
    if (other.plain) power -= fmaf(other_max, other.log2e_over_temperature, other.shift);
  }
  return fmaxf(power, kLeastPower);
}

// `weighted` of a part, relative to a maximum not below its own.
__device__ inline float Reweighted(const Exponential& to, Stats part, float weighted) {
  if (part.max == -kInfinity) return 0.0f;
  return __fmul_rn(to.Factor(part.max), fmaf(FactorPower(to, part.max), part.sum, weighted));
}

// A lane's sums of a cell whose elements are valid where the bits of `valid` say so; the others are
// -inf. stats.sum has the bits of LaneStats where there is no softcap.
template <bool kCapped, class T>
__device__ inline CellSums LaneSums(const LaneCell<T>& x, float lane_max, Cap cap, float c,
                                    uint32_t valid) {
  const float max = kCapped ? cap.Tanh(lane_max) : lane_max;
  const Exponential exponential(max == -kInfinity ? 0.0f : max, c);
  float sums[kSums];
  float weighted[kSums];
#pragma unroll
  for (int i = 0; i < kSums; ++i) sums[i] = weighted[i] = 0.0f;
  float total = 0.0f;
  const auto add = [&](int e, auto power_of) {
    const bool is_valid = (valid >> e & 1) != 0;
    float value = x[e];
    if constexpr (kCapped) {
      value = cap.Tanh(value);
      value = value > max ? max : value;  // tanhf may not rise everywhere; NaN stays
      if (!is_valid) value = -kInfinity;
    }
    float power = power_of(value);
    power = power < kLeastPower ? kLeastPower : power;
    const float weight = Exp2(power);
    sums[e / kSumElements] += weight;
    weighted[e / kSumElements] = fmaf(weight, power, weighted[e / kSumElements]);
    total = fmaf(is_valid ? value : 0.0f, kTotalUnit, total);
  };
  if (__all_sync(kFullWarp, exponential.plain)) {
#pragma unroll
    for (int e = 0; e < kLaneElements; ++e)
      add(e, [&](float value) {
        return fmaf(value, exponential.log2e_over_temperature, exponential.shift);
      });
  } else {
#pragma unroll
    for (int e = 0; e < kLaneElements; ++e) {
      add(e, [&](float value) {
        if (exponential.plain)
          return fmaf(value, exponential.log2e_over_temperature, exponential.shift);
        return value == exponential.max
                   ? 0.0f
                   : (value - exponential.max) * exponential.log2e_over_temperature;
      });
    }
  }
  return {.stats = {max, (sums[0] + sums[1]) + (sums[2] + sums[3])},
          .weighted = (weighted[0] + weighted[1]) + (weighted[2] + weighted[3]),
          .total = total,
          .before = 0};
}

// Which of a lane's elements of the cell lie within the first `count`.
template <class T>
__device__ inline uint32_t ValidElements(int count, int lane) {
  if (count >= kCell) return ~0u;
  uint32_t valid = 0;
#pragma unroll
  for (int e = 0; e < kLaneElements; ++e) valid |= (CellIndex<T>(lane, e) < count ? 1u : 0u) << e;
  return valid;
}

// How many of the lane's elements of the cell at `first` rank before the target.
template <class T>
__device__ inline int CountBefore(const LaneCell<T>& x, int first, int lane, int target,
                                  float target_logit) {
  int before = 0;
  if (first + kCell <= target) {  // equals come first
#pragma unroll
    for (int e = 0; e < kLaneElements; ++e) before += x[e] >= target_logit;
  } else {
#pragma unroll
    for (int e = 0; e < kLaneElements; ++e) before += x[e] > target_logit;
    if (first <= target) {
#pragma unroll
      for (int e = 0; e < kLaneElements; ++e)
        before += x[e] == target_logit && first + CellIndex<T>(lane, e) < target;
    }
  }
  return before;
}

// ---- the end of a row --------------------------------------------------------------------------

// Merges a row's cells and writes what it is asked beside tops and extras, by one warp. Not
// inlined: one body whoever calls gives one row the same bits.
template <class T>
__device__ __noinline__ Outcome ConcludeRow(const Params& p, int64_t r, const T* row,
                                            const CellSums* cells) {
  const int lane = threadIdx.x % 32;
  const CrossEntropyRow& ask = p.args.rows[r];
  const int32_t vocab = static_cast<int32_t>(p.args.logits.cols);
  const double rate = Cap::Rate(ask.softcap, ask.temperature);
  const float c = PowerOf(rate);
  const Stats stats = MergeCells(p.cells, c, lane, [&](int i) { return cells[i].stats; });
  const Exponential exponential(stats.max, c);
  float weighted = 0.0f;
  double total = 0.0;
  int before = 0;
  for (int i = lane; i < p.cells; i += 32) {
    weighted += Reweighted(exponential, cells[i].stats, cells[i].weighted);
    total += cells[i].total;
    before += cells[i].before;
  }
  weighted = WarpSum(weighted);
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) total += __shfl_xor_sync(kFullWarp, total, offset);
  before = __reduce_add_sync(kFullWarp, before);

  int nan = vocab;
  if (isnan(stats.sum)) {
    int cell = 0;
    while (cell + 1 < p.cells && !isnan(cells[cell].stats.sum)) ++cell;
    nan = FindNan(row, cell * kCell, vocab, lane);
  }
  const float target_logit = ask.target < 0 ? 0.0f : ToFloat(row[ask.target]);
  return Conclude(p.args, r, {stats, weighted, total, before}, target_logit, nan, lane);
}

// ---- forward -----------------------------------------------------------------------------------

// A block that streams rows and selects nothing: BlockShape without its pool.
template <class T, int kBlockWarps, int kRingStages, int kResidentBlocks, bool kInCluster = false>
struct StreamShape {
  static constexpr bool kCluster = kInCluster;
  static constexpr bool kTop = false;
  using Element = T;
  using Pool = SmallPool;
  using Ring = CellRing<T, kRingStages>;
  static constexpr int kWarps = kBlockWarps;
  static constexpr int kThreads = kWarps * 32;
  static constexpr int kStages = kRingStages;
  static constexpr int kResident = kResidentBlocks;
  struct Shared {
    typename Ring::Storage rings[kWarps];
  };
};

template <class T, int kBlockWarps, int kRingStages, int kResidentBlocks, bool kInCluster = false>
struct TopShape : BlockShape<T, SmallPool, kBlockWarps, kRingStages, kResidentBlocks, kInCluster> {
  static constexpr bool kTop = true;
};
static_assert(kMaxTopLogprobs <= SmallPool::kMaxK);
// OfferGroups numbers a block's groups in 16 bits, and a block may hold all of a row.
static_assert(kMaxVocab / kCell * SmallPool::kGroupsOfCell <= 65536);

// The lane's part of the sketch of a cell; returns its largest logit.
template <class T>
__device__ inline float Sketched(const LaneCell<T>& x, SmallPool::Sketch* to) {
  static_assert(SmallPool::kLaneGroups == 2);
  const float low = x.Max(0, SmallPool::kElements);
  const float high = x.Max(SmallPool::kElements, SmallPool::kElements);
  *to = __byte_perm(OrderedBits(low), OrderedBits(high), 0x7632);
  return fmaxf(low, high);
}

// The row's largest `k` tokens into the pool, of the first block where it has a cluster. Called by
// all threads after a barrier; passes a barrier of the cluster where there is one.
template <class Block>
__device__ inline void SelectTop(typename Block::Shared& shared, float lane_best,
                                 const typename Block::Element* row, int begin, int end,
                                 const SmallPool::Sketch* sketch, int block, int blocks, int k) {
  using T = typename Block::Element;
  constexpr int kThreads = Block::kThreads;
  Floor floor;
  if (blocks > 1) {
    floor.RaiseToLogit(
        ClusterFloor<Block>(lane_best, block, blocks, k, shared.warp_bests, shared.row_floor));
    Gather<T, kThreads, SmallPool>(row + begin, begin, end - begin, sketch, floor, k);
    SendToFirst<kThreads, SmallPool>(k, block);
    if (block == 0) OpenInbox<kThreads, SmallPool>(blocks);
  } else {
    floor.RaiseToLogit(BlockFloor<Block>(lane_best, (end - begin + kCell - 1) / kCell, k));
    Gather<T, kThreads, SmallPool>(row + begin, begin, end - begin, sketch, floor, k);
  }
}

template <class Block>
__global__ void __launch_bounds__(Block::kThreads, Block::kResident)
    CrossEntropyKernel(const __grid_constant__ Params p) {
  using T = typename Block::Element;
  constexpr int kThreads = Block::kThreads;
  extern __shared__ __align__(128) uint4 dynamic[];
  if constexpr (Block::kCluster) ClusterArrive();
  auto& shared = *reinterpret_cast<typename Block::Shared*>(dynamic);
  Outcome* told = reinterpret_cast<Outcome*>(&shared + 1);  // what warp 0 tells the others
  CellSums* cells = reinterpret_cast<CellSums*>(told + 1);  // [CellPlaces(p)]
  auto* sketch = reinterpret_cast<SmallPool::Sketch*>(cells + CellPlaces(p));  // [cells, 32]
  const int lane = threadIdx.x % 32;
  const int64_t r = p.blocks == 1 ? blockIdx.x : blockIdx.x / p.blocks;
  const int block = static_cast<int>(blockIdx.x - r * p.blocks);
  const int32_t vocab = static_cast<int32_t>(p.args.logits.cols);
  const int begin = p.cells * block / p.blocks * kCell;
  const int end = min(p.cells * (block + 1) / p.blocks * kCell, vocab);
  const T* row = static_cast<const T*>(p.args.logits.data) + r * p.args.logits.row_stride;

  // Asked for first, or its answer would come behind all the copies; looked at once they are under
  // way.
  const CrossEntropyRow* ask = p.args.rows + r;
  const int is_active = ask->active;
  const int want = ask->want;
  const int asked_target = ask->target;
  const float softcap = ask->softcap;
  const float temperature = ask->temperature;
  const float smoothing = ask->label_smoothing;
  const int top = Block::kTop ? ask->top_logprobs : 0;
  RowStream<Block> stream(shared, row, begin, end);
  if constexpr (Block::kCluster) ClusterWait();  // all blocks have begun: their memory is there
  if (is_active == 0) return stream.Abandon();
  const int target = (want & kWantRank) != 0 ? asked_target : kIgnoredTarget;
  const bool summed = (want & kWantEntropy) != 0 || smoothing > 0;
  const float target_logit = target >= 0 ? ToFloat(row[target]) : 0.0f;
  const Cap cap = Cap::Of(softcap);
  const float c = PowerOf(Cap::Rate(softcap, temperature));
  CellSums* row_cells = cells;  // where the row's cells are brought together
  if constexpr (Block::kCluster) {
    if (p.blocks > 1) row_cells = InBlock(cells, 0);
  }

  float lane_best = -kInfinity;
  SmallPool::Sketch* sketch_to = sketch + threadIdx.x;
  LaneCell<T> x;
#pragma unroll 1
  while (stream.Next(x)) {
    const int first = stream.first();
    stream.Release();
    float lane_max;
    if constexpr (Block::kTop) {
      lane_max = Sketched<T>(x, sketch_to);
      lane_best = fmaxf(lane_best, lane_max);
      sketch_to += kThreads;
    } else {
      lane_max = x.Max(0, kLaneElements);
    }
    CellSums sums{};
    if (cap.on() || summed) {
      const uint32_t valid = ValidElements<T>(end - first, lane);
      sums = cap.on() ? LaneSums<true>(x, lane_max, cap, c, valid)
                      : LaneSums<false>(x, lane_max, cap, c, valid);
      const Stats stats = MergeLanes(sums.stats, c);
      sums.weighted = WarpSum(Reweighted(Exponential(stats.max, c), sums.stats, sums.weighted));
      sums.total = WarpSum(sums.total);
      sums.stats = stats;
    } else {
      sums.stats = MergeLanes(LaneStats(x, lane_max, c), c);
    }
    if (target >= 0)
      sums.before =
          __reduce_add_sync(kFullWarp, CountBefore<T>(x, first, lane, target, target_logit));
    if (lane == 0) row_cells[first / kCell] = sums;
  }
  __syncthreads();  // from here on the rings' memory is the pool's
  if constexpr (Block::kTop) {
    if (top > 0) SelectTop<Block>(shared, lane_best, row, begin, end, sketch, block, p.blocks, top);
  }
  if constexpr (Block::kCluster) {
    if (p.blocks > 1) {
      if (top == 0) {
        ClusterArrive();
        ClusterWait();
      }
      if (block != 0) return;
    }
  }

  const int extras = ask->extra_count;
  if (threadIdx.x < 32) {
    const Outcome outcome = ConcludeRow<T>(p, r, row, cells);
    if (lane == 0) *told = outcome;
  }
  if (top == 0 && extras == 0) return;
  __syncthreads();
  const Outcome outcome = *told;
  const CrossEntropyAnswers& to = p.args.answers;
  const int32_t* ids = p.args.extra_ids + ask->first_extra;
  const int64_t first_extra_entry = ask->first_extra_entry;
  for (int i = threadIdx.x; i < extras; i += kThreads)
    to.extra_logprobs[first_extra_entry + i] =
        static_cast<float>(outcome.Logprob(ToFloat(row[ids[i]])));
  if constexpr (Block::kTop) {
    if (top == 0) return;
    int32_t* top_ids = to.top_ids + ask->first_top_entry;
    float* top_logprobs = to.top_logprobs + ask->first_top_entry;
    if (outcome.Nan()) {
      for (int i = threadIdx.x; i < top; i += kThreads) {
        top_ids[i] = -1;
        top_logprobs[i] = outcome.sum;
      }
      return;
    }
    auto& s = Pool<SmallPool>();
    const int n = Trim<kThreads, SmallPool>(top, SmallPool::kPool / 2);
    EmitByRank<kThreads>(s.pool, n, s.pool + SmallPool::kPool / 2, s.select,
                         [&](int rank, Key key) {
                           if (rank >= top) return;
                           top_ids[rank] = KeyIndex(key);
                           top_logprobs[rank] = static_cast<float>(outcome.Logprob(KeyLogit(key)));
                         });
  }
}

// ---- backward ----------------------------------------------------------------------------------

constexpr int kBackwardThreads = 256;
constexpr int kBackwardVectors = 4;  // of a thread, all on their way at once
constexpr int kBackwardResident = 4;

// Blocks take chunks of a row: blockIdx.x = row * chunks + chunk.
template <class T>
__global__ void __launch_bounds__(kBackwardThreads, kBackwardResident)
    BackwardKernel(const __grid_constant__ CrossEntropyBackwardArgs args, int chunks) {
  constexpr int kTake = kVector<T>;
  const int64_t r = blockIdx.x / chunks;
  const int chunk = static_cast<int>(blockIdx.x - r * chunks);
  const int32_t vocab = static_cast<int32_t>(args.logits.cols);
  const T* from = static_cast<const T*>(args.logits.data) + r * args.logits.row_stride;
  T* to = static_cast<T*>(args.d_logits.data) + r * args.d_logits.row_stride;
  const CrossEntropyRow& ask = args.rows[r];
  __shared__ Gradient gradient_of_row;

  // Vectors begin where the output is aligned; the few elements before them are the first chunk's.
  const int head =
      min(vocab, static_cast<int>((-reinterpret_cast<uintptr_t>(to) & 15) / sizeof(T)));
  const bool aligned = (reinterpret_cast<uintptr_t>(from + head) & 15) == 0;
  const int first =
      head + (chunk * kBackwardVectors * kBackwardThreads + static_cast<int>(threadIdx.x)) * kTake;
  constexpr int kStep = kBackwardThreads * kTake;
  uint4 vectors[kBackwardVectors];
#pragma unroll
  for (int i = 0; i < kBackwardVectors; ++i) {
    const int at = first + i * kStep;
    vectors[i] = {};
    if (at + kTake > vocab) continue;
    if (aligned) {
      vectors[i] = __ldcs(reinterpret_cast<const uint4*>(from + at));
    } else {
      vectors[i] = LoadVector(from + at, false, kTake);
    }
  }
  // In double, by one thread, while the vectors are on their way.
  const int target = ask.target;
  const bool active = ask.active != 0;
  if (threadIdx.x == 0)
    gradient_of_row = Gradient::Of(ask, args.logsumexp[r], args.upstream[r], args.logits.cols);
  __syncthreads();
  if (!active) return;
  const Gradient gradient = gradient_of_row;
  const auto write = [&](auto at) {
#pragma unroll
    for (int i = 0; i < kBackwardVectors; ++i) {
      const int begin = first + i * kStep;
      if (begin >= vocab) break;
      if (begin + kTake > vocab) {  // the row's last elements
        for (int j = begin; j < vocab; ++j) to[j] = FromFloat<T>(at(ToFloat(from[j]), j == target));
        break;
      }
      const uint32_t words[4] = {vectors[i].x, vectors[i].y, vectors[i].z, vectors[i].w};
      const int place = target - begin;
      uint32_t out[4];
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        if constexpr (sizeof(T) == 4) {
          out[w] = __float_as_uint(at(WordElement<T>(words, w), w == place));
        } else {
          out[w] = PackPair<T>(at(WordElement<T>(words, 2 * w), 2 * w == place),
                               at(WordElement<T>(words, 2 * w + 1), 2 * w + 1 == place));
        }
      }
      __stcs(reinterpret_cast<uint4*>(to + begin), uint4{out[0], out[1], out[2], out[3]});
    }
    if (chunk == 0 && static_cast<int>(threadIdx.x) < head) {
      const int j = threadIdx.x;
      to[j] = FromFloat<T>(at(ToFloat(from[j]), j == target));
    }
  };
  if (target < 0) {
    write([](float, bool) { return 0.0f; });
  } else if (gradient.cap.on()) {
    write([&](float logit, bool is_target) { return gradient.At<true>(logit, is_target); });
  } else {
    write([&](float logit, bool is_target) { return gradient.At<false>(logit, is_target); });
  }
}

// ---- launch ------------------------------------------------------------------------------------

template <class Block>
int SharedBytes(const Params& p) {
  const int part_cells = (p.cells + p.blocks - 1) / p.blocks;
  return static_cast<int>(sizeof(typename Block::Shared) + sizeof(Outcome) +
                          CellPlaces(p) * sizeof(CellSums) +
                          (Block::kTop ? part_cells * 32 * sizeof(SmallPool::Sketch) : 0));
}

// Blocks of a row's cluster; more than would be best where the row's sketch needs the room.
template <class Block>
int32_t BlocksOfRow(Params p, const Scratch& scratch) {
  p.blocks = 1;
  if (Block::kCluster && scratch.clusters) {
    const int32_t worth = (p.cells + Block::kWarps - 1) / Block::kWarps;
    p.blocks = static_cast<int32_t>(std::clamp<int64_t>(
        scratch.multiprocessors / p.args.logits.rows, 1, std::min(worth, kMaxClusterBlocks)));
    while (SharedBytes<Block>(p) > scratch.block_shared_bytes && p.blocks < kMaxClusterBlocks)
      ++p.blocks;
  }
  return p.blocks;
}

template <class Block>
bool Fits(Params p, const Scratch& scratch) {
  p.blocks = BlocksOfRow<Block>(p, scratch);
  return SharedBytes<Block>(p) <= scratch.block_shared_bytes;
}

template <class Block>
cudaError_t Launch(Params p, const Scratch& scratch, cudaStream_t stream) {
  p.blocks = BlocksOfRow<Block>(p, scratch);
  const int shared = SharedBytes<Block>(p);
  if (shared > scratch.block_shared_bytes) return cudaErrorNotSupported;
  const auto kernel = &CrossEntropyKernel<Block>;
  // The most any launch may ask for, as for softmax_topk.
  const cudaError_t error = cudaFuncSetAttribute(
      kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, scratch.block_shared_bytes);
  if (error != cudaSuccess) return error;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(p.args.logits.rows * p.blocks));
  config.blockDim = dim3(Block::kThreads);
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  cudaLaunchAttribute cluster = {};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {static_cast<unsigned>(p.blocks), 1, 1};
  config.attrs = &cluster;
  config.numAttrs = p.blocks > 1 ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, p);
}

// Cells of a row that one warp takes.
constexpr int32_t kShortCells = 4;

template <class T>
cudaError_t LaunchForward(const Params& p, const Scratch& scratch, cudaStream_t stream) {
  constexpr int kStages = sizeof(T) == 4 ? 2 : 3;
  constexpr int kResident = sizeof(T) == 4 ? 4 : 6;
  using WideTop = TopShape<T, 16, 2, 1, true>;
  using Wide = StreamShape<T, 16, 2, 1, true>;
  const bool few = p.args.logits.rows <= scratch.multiprocessors && p.cells > kShortCells;
  if (p.args.max_top_logprobs > 0) {
    return few && Fits<WideTop>(p, scratch)
               ? Launch<WideTop>(p, scratch, stream)
               : Launch<TopShape<T, 4, 2, kResident>>(p, scratch, stream);
  }
  if (few && Fits<Wide>(p, scratch)) return Launch<Wide>(p, scratch, stream);
  if (p.cells <= kShortCells) return Launch<StreamShape<T, 1, 2, 24>>(p, scratch, stream);
  return Launch<StreamShape<T, 4, kStages, kResident>>(p, scratch, stream);
}

template <class T>
cudaError_t LaunchBackward(const CrossEntropyBackwardArgs& args, cudaStream_t stream) {
  constexpr int64_t kChunk = kBackwardThreads * kBackwardVectors * kVector<T>;
  const int64_t chunks = (args.logits.cols + kChunk - 1) / kChunk;
  BackwardKernel<T>
      <<<static_cast<unsigned>(args.logits.rows * chunks), kBackwardThreads, 0, stream>>>(
          args, static_cast<int>(chunks));
  return cudaGetLastError();
}

}  // namespace

cudaError_t CrossEntropy(const CrossEntropyArgs& args, const Scratch& scratch,
                         cudaStream_t stream) {
  if (args.logits.rows == 0) return cudaSuccess;
  const Params p{.args = args,
                 .cells = static_cast<int32_t>((args.logits.cols + kCell - 1) / kCell),
                 .blocks = 1};
  switch (args.logits.dtype) {
    case DType::kF32:
      return LaunchForward<float>(p, scratch, stream);
    case DType::kF16:
      return LaunchForward<__half>(p, scratch, stream);
    case DType::kBF16:
      return LaunchForward<__nv_bfloat16>(p, scratch, stream);
  }
  return cudaErrorInvalidValue;
}

cudaError_t CrossEntropyBackward(const CrossEntropyBackwardArgs& args, cudaStream_t stream) {
  if (args.logits.rows == 0) return cudaSuccess;
  switch (args.logits.dtype) {
    case DType::kF32:
      return LaunchBackward<float>(args, stream);
    case DType::kF16:
      return LaunchBackward<__half>(args, stream);
    case DType::kBF16:
      return LaunchBackward<__nv_bfloat16>(args, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace logitd::cuda
