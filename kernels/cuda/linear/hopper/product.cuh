// The product of hidden states and a head's weights on Hopper, or two in step, by wgmma and TMA. An
// epilogue takes each tile of logits from registers, in fp32, and decides what is written.
//
// A block is three warpgroups: one thread of the first asks the copy engine for stages of both
// operands; the others multiply 64 rows by a tile of 256 tokens each. Blocks are pairs, which take
// units (schedule.h): of 256 rows, four warpgroups with their own rows and one tile, of which each
// block loads half for both; of 128 rows, with a tile for each block; of 64 rows, with a tile for
// each warpgroup. A logit is one sum in one order, by the same instruction in all units: its bits
// do not depend on the unit or on other rows.
//
// Cost: 2 * rows * hidden * vocab operations. Limited by: the tensor cores at the clock that the
// power limit allows; up to 128 rows by HBM. Measured: loss.cu, divergence.cu.
// Dropped: 64 rows in place of 128 after the blocks (129 rows 2x); L2 hints, sets of 4 to 16 MB,
// clusters in step (the same); weights asked into L2 ahead (200 rows 5 to 18% slower); copies of
// absent rows; one array of sums for both products (it hangs).
#ifndef LOGITD_KERNELS_CUDA_LINEAR_HOPPER_PRODUCT_CUH_
#define LOGITD_KERNELS_CUDA_LINEAR_HOPPER_PRODUCT_CUH_

#include <cuda.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/linear/hopper/instructions.cuh"
#include "kernels/cuda/linear/hopper/schedule.h"
#include "kernels/cuda/rows/cell.cuh"
#include "kernels/cuda/rows/cluster.cuh"
#include "kernels/cuda/scratch.h"
#include "kernels/types.h"

namespace logitd::cuda::hopper {

constexpr int kConsumers = 2;  // warpgroups that multiply
constexpr int kThreads = (1 + kConsumers) * kGroupThreads;
// A thread's registers. A block begins with 168 for each, and cannot get more in all: warpgroups
// that ask for more wait for ever.
template <int kProducts>
struct Registers {
  static constexpr int kLoad = kProducts == 1 ? 56 : 40;
  static constexpr int kMultiply = kProducts == 1 ? 224 : 232;
  static_assert(kLoad + kConsumers * kMultiply <= (1 + kConsumers) * 168);
};
constexpr int kStep = 64;  // elements of the hidden size in a stage
constexpr int kLineBytes = kStep * 2;
static_assert(kCluster * kConsumers == kClusterGroups);

// What the number of rows decides. Up to 128 rows reading the weights takes the time: a stage is
// free as soon as it is multiplied, and up to 64 rows it is larger.
enum class Rows { k64, k128, kMany };

constexpr int kMostSharedBytes = 226 * 1024 + 512;  // of any kernel of this folder

// A stage in shared memory: states of the block's warpgroups, then weights of a tile, or of a tile
// for each warpgroup. kEpilogueBytes come after the last stage.
template <Rows kRows, int kEpilogueBytes>
struct Stage {
  static constexpr bool kFewRows = kRows != Rows::kMany;
  static constexpr bool kBothTiles = kRows == Rows::k64;
  static constexpr int kCopyStateLines = kGroupRows / (kBothTiles ? kCluster : 1);  // of one copy
  static constexpr int kCopyWeightLines = kTile / (kFewRows ? 1 : kCluster);
  static constexpr int kStateBytes = (kBothTiles ? 1 : kConsumers) * kGroupRows * kLineBytes;
  static constexpr int kBytes = kStateBytes + (kBothTiles ? kConsumers : 1) * kTile * kLineBytes;
  static constexpr int kRest = 1024 + kEpilogueBytes;  // stages are aligned to 1024
  static constexpr int kCount = std::min(4, (kMostSharedBytes - kRest) / kBytes);
  static constexpr int kSharedBytes = kCount * kBytes + kRest;
  static_assert(kCount >= 2);
};
constexpr int kGroupStateBytes = kGroupRows * kLineBytes;
constexpr int kTileBytes = kTile * kLineBytes;

// A product, or two over one vocabulary that share units: each tile of the first, then the same
// tile of the second.
constexpr int kMostProducts = 2;
struct ProductParams {
  const int32_t* groups;  // null, or one for every kBlockRows rows; 0: skip these rows
  int32_t rows;
  int32_t vocab;
  int32_t steps[kMostProducts];  // along the hidden size of each
  Schedule schedule;

  // Warpgroups of a block that have no row in a unit. Their rows are neither loaded nor multiplied.
  __device__ int AbsentGroups(const Unit& unit, int rank) const {
    int absent = 0;
#pragma unroll
    for (int warpgroup = 0; warpgroup < kConsumers; ++warpgroup)
      absent += unit.RowOf(rank, warpgroup) >= rows ? 1 : 0;
    return absent;
  }
};

struct ProductMaps {
  CUtensorMap states;
  CUtensorMap weights;
};
template <int kProducts>
struct AllMaps {
  ProductMaps of[kProducts];
};

// ---- work --------------------------------------------------------------------------------------

// The i-th logit of the thread's row `half`: its place in acc, and its token in the tile.
__device__ constexpr int SumOf(int half, int i) { return i / 2 * 4 + half * 2 + i % 2; }
__device__ constexpr int TokenOf(int lane, int i) { return i / 2 * 8 + lane % 4 * 2 + i % 2; }

// The sum over the four threads of a row, the same in each.
__device__ inline float QuadSum(float x) {
  x += __shfl_xor_sync(kFullWarp, x, 1);
  return x + __shfl_xor_sync(kFullWarp, x, 2);
}
// The largest of the four threads' logits, NaN left out; -inf where all are NaN.
template <int half>
__device__ inline float QuadMax(const float (&acc)[kThreadSums]) {
  float max = -kInfinity;
#pragma unroll
  for (int i = 0; i < kRowSums; ++i) max = fmaxf(max, acc[SumOf(half, i)]);
  max = fmaxf(max, __shfl_xor_sync(kFullWarp, max, 1));
  return fmaxf(max, __shfl_xor_sync(kFullWarp, max, 2));
}

// A ring of stages in shared memory.
template <class Stage>
struct Ring {
  uint32_t stages;  // addresses in shared memory
  uint32_t full;    // a barrier a stage: it has been filled
  uint32_t empty;   // a barrier a stage: all warps of the cluster have read or skipped it
  int stage = 0;
  uint32_t parity = 0;

  __device__ uint32_t At() const { return stages + stage * Stage::kBytes; }
  __device__ void Advance() {
    if (++stage == Stage::kCount) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// Calls take(unit) for all that this block's cluster takes.
template <class Take>
__device__ inline void ForEachUnit(const ProductParams& p, const Take& take) {
  const int32_t items = p.schedule.Items();
  const auto clusters = static_cast<int32_t>(gridDim.x / kCluster);
  for (auto item = static_cast<int32_t>(blockIdx.x / kCluster); item < items; item += clusters) {
    const Unit unit = p.schedule.At(item);
    if (p.groups == nullptr || p.groups[unit.row / kBlockRows] != 0) take(unit);
  }
}

// Fills stages, by one thread.
template <class Stage, int kProducts>
class Loader {
 public:
  __device__ Loader(const AllMaps<kProducts>& maps, const ProductParams& p, int rank,
                    const Ring<Stage>& ring)
      : maps_(maps), p_(p), rank_(rank), ring_(ring) {}

  __device__ void Run() {
    ForEachUnit(p_, [&](const Unit& unit) {
#pragma unroll 1
      for (int turn = 0; turn < unit.turns; ++turn) {
        const int tile = (unit.tile + turn) * kTile;  // its first token in the span
#pragma unroll
        for (int i = 0; i < kProducts; ++i) LoadTile(maps_.of[i], p_.steps[i], unit, tile);
      }
    });
  }

 private:
  __device__ void LoadTile(const ProductMaps& maps, int steps, const Unit& unit, int tile) {
#pragma unroll 1
    for (int element = 0; element < steps * kStep; element += kStep) {
      if constexpr (Stage::kBothTiles) {
        LoadBothTiles(maps, unit, element, tile);
      } else if (unit.groups == 2) {
        LoadPair(maps, unit, element, tile);
      } else if constexpr (!Stage::kFewRows) {
        if (unit.groups == 1) {
          LoadSingles(maps, unit, element, tile);
        } else {
          LoadBlock(maps, unit, element, tile);
        }
      }
    }
  }
  // Waits until the next stage is free, and says how much will come.
  __device__ void Begin(int bytes) {
    WaitFor(ring_.empty + 8 * ring_.stage, ring_.parity ^ 1);
    to_ = ring_.At();
    barrier_ = ring_.full + 8 * ring_.stage;
    Expect(barrier_, bytes);
    ring_.Advance();
  }
  __device__ void CopyWeights(const ProductMaps& maps, uint32_t to, int element, int token) {
    const uint64_t policy = CachePolicy</*kOnce=*/Stage::kFewRows>();
#pragma unroll
    for (int line = 0; line < kTile; line += Stage::kCopyWeightLines)
      CopyTile(to + line * kLineBytes, maps.weights, element, token + line, barrier_, policy);
  }

  // 256 rows: each block loads its own states, and half of the weights for both.
  __device__ void LoadBlock(const ProductMaps& maps, const Unit& unit, int element, int tile) {
    const uint64_t policy = CachePolicy</*kOnce=*/false>();
    Begin(Stage::kBytes - p_.AbsentGroups(unit, rank_) * kGroupStateBytes);
#pragma unroll
    for (int warpgroup = 0; warpgroup < kConsumers; ++warpgroup) {
      const int row = unit.RowOf(rank_, warpgroup);
      if (row < p_.rows)
        CopyTile(to_ + warpgroup * kGroupStateBytes, maps.states, element, row, barrier_, policy);
    }
    const int line = rank_ * Stage::kCopyWeightLines;
    CopyTileToAll(to_ + Stage::kStateBytes + line * kLineBytes, maps.weights, element,
                  unit.span * kSpan + tile + line, barrier_);
  }
  // 128 rows: each block loads its own weights, and half of the states for both.
  __device__ void LoadPair(const ProductMaps& maps, const Unit& unit, int element, int tile) {
    Begin(Stage::kBytes - p_.AbsentGroups(unit, rank_) * kGroupStateBytes);
    const int row = unit.row + rank_ * kGroupRows;
    if (row < p_.rows)
      CopyTileToAll(to_ + rank_ * kGroupStateBytes, maps.states, element, row, barrier_);
    CopyWeights(maps, to_ + Stage::kStateBytes, element, unit.SpanOf(rank_, 0) * kSpan + tile);
  }
  // 64 rows: a stage for each warpgroup; the block of the warpgroup's number loads the states.
  __device__ void LoadSingles(const ProductMaps& maps, const Unit& unit, int element, int tile) {
#pragma unroll 1
    for (int warpgroup = 0; warpgroup < kConsumers; ++warpgroup) {
      Begin(kGroupStateBytes + kTileBytes);
      if (warpgroup == rank_) CopyTileToAll(to_, maps.states, element, unit.row, barrier_);
      CopyWeights(maps, to_ + Stage::kStateBytes, element,
                  unit.SpanOf(rank_, warpgroup) * kSpan + tile);
    }
  }
  // 64 rows and no others: one stage for both warpgroups.
  __device__ void LoadBothTiles(const ProductMaps& maps, const Unit& unit, int element, int tile) {
    Begin(Stage::kBytes);
    const int line = rank_ * Stage::kCopyStateLines;
    CopyTileToAll(to_ + line * kLineBytes, maps.states, element, unit.row + line, barrier_);
#pragma unroll
    for (int warpgroup = 0; warpgroup < kConsumers; ++warpgroup) {
      CopyWeights(maps, to_ + Stage::kStateBytes + warpgroup * kTileBytes, element,
                  unit.SpanOf(rank_, warpgroup) * kSpan + tile);
    }
  }

  const AllMaps<kProducts>& maps_;
  const ProductParams& p_;
  const int rank_;
  Ring<Stage> ring_;
  uint32_t to_ = 0;       // the stage being filled
  uint32_t barrier_ = 0;  // its barrier
};

// Which stages a warpgroup reads, and where in them its operands are.
struct Reader {
  int states;  // bytes from the stage's begin
  int weights;
  bool before;  // whether a stage of the other warpgroup comes before each of its own
  bool after;   // or after it

  template <class Stage>
  __device__ Reader(const Unit& unit, int warpgroup, Stage) {
    const bool both_tiles = Stage::kBothTiles;
    const bool own_stages = !both_tiles && unit.groups == 1;
    states = both_tiles || own_stages ? 0 : warpgroup * kGroupStateBytes;
    weights = Stage::kStateBytes + (both_tiles ? warpgroup * kTileBytes : 0);
    before = own_stages && warpgroup > 0;
    after = own_stages && warpgroup == 0;
  }
};

// Releases `count` stages unread, when they have been filled: a barrier tells only the last phase
// from the one before it, so a warpgroup must see all phases, or it waits for ever.
template <class Stage>
__device__ inline void SkipStages(int count, int lane, Ring<Stage>& ring) {
#pragma unroll 1
  for (int i = 0; i < count; ++i) {
    WaitFor(ring.full + 8 * ring.stage, ring.parity);
    if (lane < kCluster) ArriveAt(ring.empty + 8 * ring.stage, lane);
    ring.Advance();
  }
}

// Multiplies a tile: acc becomes the sums over the hidden size.
template <class T, class Stage>
__device__ inline void MultiplyTile(float (&acc)[kThreadSums], int steps, const Reader& reader,
                                    int lane, Ring<Stage>& ring) {
  const auto release = [&](int stage) {
    if (lane < kCluster) ArriveAt(ring.empty + 8 * stage, lane);
  };
  const auto skip = [&] { SkipStages(1, lane, ring); };  // a stage of the other warpgroup
  int previous = 0;
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    if (reader.before) skip();
    WaitFor(ring.full + 8 * ring.stage, ring.parity);
    const uint64_t a = Descriptor(ring.At() + reader.states);
    const uint64_t b = Descriptor(ring.At() + reader.weights);
    Pin(acc);
    BeginMultiplying();
#pragma unroll
    for (int k = 0; k < kStep / 16; ++k)
      MultiplyAsync<T>(acc, a + 2 * k, b + 2 * k, step > 0 || k > 0);
    CommitMultiplying();
    Pin(acc);
    if constexpr (Stage::kFewRows) {
      WaitMultiplied<0>();
      release(ring.stage);
    } else if (step > 0) {
      WaitMultiplied<1>();
      release(previous);
    }
    previous = ring.stage;
    ring.Advance();
    if (reader.after) skip();
  }
  if constexpr (!Stage::kFewRows) {
    WaitMultiplied<0>();
    release(previous);
  }
  Pin(acc);
}

// Where the sums of an epilogue's thread are.
struct SumsPlace {
  int32_t row;  // the first of the thread's two rows, which are 8 apart
  int32_t span;
  int32_t split;      // -1: a whole unit; else the warpgroup's number among those of split units
  std::byte* shared;  // kSharedBytes of the epilogue, of the block
};

// An epilogue that has Keep() takes two products.
template <class Epilogue>
constexpr int kProductsOf = requires(Epilogue epilogue, float (&acc)[kThreadSums]) {
  epilogue.Keep(acc, 0, 0);
}
? 2 : 1;

template <class Epilogue>
constexpr int SharedBytesOf() {
  if constexpr (requires { Epilogue::kSharedBytes; }) return Epilogue::kSharedBytes;
  return 0;
}
template <class Epilogue, Rows kRows>
using StageOf = Stage<kRows, SharedBytesOf<Epilogue>()>;
template <class Epilogue>
__device__ inline int StepsOfTile(const ProductParams& p) {
  return kProductsOf<Epilogue> == 2 ? p.steps[0] + p.steps[1] : p.steps[0];
}

// Multiplies the stages that the Loader fills, by a warpgroup of those that multiply.
template <class T, class Stage, class Epilogue>
__device__ inline void MultiplyStages(const ProductParams& p,
                                      const typename Epilogue::Params& epilogue_params, int rank,
                                      int warpgroup, int lane, std::byte* shared,
                                      Ring<Stage> ring) {
  const int thread_row = static_cast<int>(threadIdx.x) % kGroupThreads / 32 * 16 + lane / 4;
  ForEachUnit(p, [&](const Unit& unit) {
    const int span = unit.SpanOf(rank, warpgroup);
    Epilogue epilogue(
        epilogue_params, p,
        {.row = unit.RowOf(rank, warpgroup) + thread_row,
         .span = span,
         .split = unit.split < 0 ? -1 : unit.split * kClusterGroups + rank * kConsumers + warpgroup,
         .shared = shared});
    if (unit.RowOf(rank, warpgroup) >= p.rows) {
      SkipStages(unit.turns * StepsOfTile<Epilogue>(p), lane, ring);
      return;
    }
    const Reader reader(unit, warpgroup, Stage());
#pragma unroll 1
    for (int turn = 0; turn < unit.turns; ++turn) {
      const int first = span * kSpan + (unit.tile + turn) * kTile;
      if constexpr (kProductsOf<Epilogue> == 2) {
        float acc[kThreadSums] = {};
        MultiplyTile<T>(acc, p.steps[0], reader, lane, ring);
        if (first < p.vocab) epilogue.Keep(acc, first, lane);
      }
      float acc[kThreadSums] = {};
      MultiplyTile<T>(acc, p.steps[kProductsOf<Epilogue> - 1], reader, lane, ring);
      if (first < p.vocab) epilogue.Take(acc, first, lane);
    }
    if constexpr (requires { epilogue.Leave(lane); }) epilogue.Leave(lane);
  });
}

// ---- kernel ------------------------------------------------------------------------------------

// Every thread that multiplies makes an Epilogue for each unit, from its Params, p and a SumsPlace.
// Take(acc, first token, lane) gets the sums of a tile and may change them; it is not called for
// tiles after the vocabulary. Keep(), where there is one, gets the first product's sums of the tile
// before Take() gets the second's. Leave(lane), where there is one, ends the unit. kSharedBytes,
// where it has them, are shared memory of its own.
template <class T, Rows kRows, class Epilogue>
__global__ void __launch_bounds__(kThreads, 1)
    ProductKernel(const __grid_constant__ AllMaps<kProductsOf<Epilogue>> maps,
                  const __grid_constant__ ProductParams p,
                  const __grid_constant__ typename Epilogue::Params epilogue_params) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ uint4 dynamic[];
  using Stage = StageOf<Epilogue, kRows>;
  constexpr int kStages = Stage::kCount;
  using Registers = Registers<kProductsOf<Epilogue>>;
  __shared__ alignas(8) uint64_t barriers[2 * kStages];
  const uint32_t full = static_cast<uint32_t>(__cvta_generic_to_shared(barriers));
  const uint32_t begin = static_cast<uint32_t>(__cvta_generic_to_shared(dynamic));
  const Ring<Stage> ring{
      .stages = (begin + 1023) / 1024 * 1024, .full = full, .empty = full + kStages * 8};
  const int rank = static_cast<int>(blockIdx.x) % kCluster;
  const int lane = threadIdx.x % 32;
  const int group = __shfl_sync(kFullWarp, static_cast<int>(threadIdx.x) / kGroupThreads, 0);
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kStages; ++stage) {
      InitBarrier(ring.full + 8 * stage, 1);
      // Once for each warp that multiplies, of both blocks.
      InitBarrier(ring.empty + 8 * stage, kCluster * kConsumers * (kGroupThreads / 32));
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  ClusterArrive();
  ClusterWait();
  if (group == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Registers::kLoad));
    if (threadIdx.x == 0) Loader(maps, p, rank, ring).Run();
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Registers::kMultiply));
    std::byte* rest =
        reinterpret_cast<std::byte*>(dynamic) + (ring.stages - begin) + kStages * Stage::kBytes;
    MultiplyStages<T, Stage, Epilogue>(p, epilogue_params, rank, group - 1, lane, rest, ring);
  }
  // Neither block ends while the other may still write to its memory.
  ClusterArrive();
  ClusterWait();
#endif
}

// ---- launch ------------------------------------------------------------------------------------

// The driver's encoder of tensor maps; null where there is none. The runtime looks it up, so that
// nothing here links the driver.
inline decltype(&cuTensorMapEncodeTiled) Encoder() {
  static const auto encoder = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result;
    if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                         cudaEnableDefault, &result) != cudaSuccess ||
        result != cudaDriverEntryPointSuccess) {
      cudaGetLastError();
      function = nullptr;
    }
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
  }();
  return encoder;
}

inline CUtensorMapDataType MapTypeOf(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
    case DType::kF16:
      return CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    case DType::kBF16:
      return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  }
  __builtin_unreachable();
}

// A map of boxes of `lines` rows by 128 bytes; elements outside the matrix read as 0. once: L2
// fetches only what is asked for; else the next step's elements too.
inline bool MakeMap(const TensorView& matrix, int lines, bool once, CUtensorMap& map) {
  const auto encode = Encoder();
  if (encode == nullptr) return false;
  const cuuint64_t dims[2] = {static_cast<cuuint64_t>(matrix.cols),
                              static_cast<cuuint64_t>(matrix.rows)};
  const cuuint64_t strides[1] = {static_cast<cuuint64_t>(matrix.row_stride) * SizeOf(matrix.dtype)};
  const cuuint32_t box[2] = {static_cast<cuuint32_t>(kLineBytes / SizeOf(matrix.dtype)),
                             static_cast<cuuint32_t>(lines)};
  const cuuint32_t element_strides[2] = {1, 1};
  return encode(&map, MapTypeOf(matrix.dtype), 2, const_cast<void*>(matrix.data), dims, strides,
                box, element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                once ? CU_TENSOR_MAP_L2_PROMOTION_L2_128B : CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

// Whether the device has the memory, the driver makes tensor maps, and the loaded code is that for
// sm_90a: only there does the kernel have a body, and with it barriers in shared memory.
template <auto* kKernel>
bool CanRun(const Scratch& scratch) {
  if (!scratch.clusters || scratch.block_shared_bytes < kMostSharedBytes || Encoder() == nullptr) {
    return false;
  }
  // Asked once for each device, because devices may have loaded different code.
  enum Answer : int { kNotAsked, kNoBody, kHasBody };
  constexpr int kDevices = 64;
  static std::array<std::atomic<int>, kDevices> answers = {};
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess || device >= kDevices) {
    cudaGetLastError();
    return false;
  }
  std::atomic<int>& answer = answers[static_cast<size_t>(device)];
  if (answer.load(std::memory_order_relaxed) == kNotAsked) {
    cudaFuncAttributes loaded;
    const bool has_body =
        cudaFuncGetAttributes(&loaded, kKernel) == cudaSuccess && loaded.sharedSizeBytes > 0;
    cudaGetLastError();
    answer.store(has_body ? kHasBody : kNoBody, std::memory_order_relaxed);
  }
  return answer.load(std::memory_order_relaxed) == kHasBody;
}

// The schedule of products by a head of `vocab` tokens, or by several whose units are the same.
// size: of a row's hidden states, of all products.
inline Schedule ScheduleOf(int64_t rows, int64_t size, int64_t vocab, const Scratch& scratch) {
  constexpr int64_t kSetBytes = int64_t{24} << 20;  // hidden states that stay in L2
  return Schedule::Of(rows, vocab, kSetBytes / (size * 2), scratch.multiprocessors / kCluster);
}

// The factors of a product: `hidden` [rows, size], after the head's norm, by `weight` [vocab,
// size], both 16-bit, of one dtype, with 16-byte aligned rows. Products of one launch have the same
// numbers of rows and tokens.
struct Factors {
  TensorView hidden;
  TensorView weight;
};

template <class T, Rows kRows, class Epilogue>
cudaError_t LaunchRows(const Factors (&factors)[kProductsOf<Epilogue>], const int32_t* groups,
                       const typename Epilogue::Params& epilogue, const Scratch& scratch,
                       cudaStream_t stream) {
  using Stage = StageOf<Epilogue, kRows>;
  constexpr int kProducts = kProductsOf<Epilogue>;
  const int64_t rows = factors[0].hidden.rows;
  const int64_t vocab = factors[0].weight.rows;
  AllMaps<kProducts> maps;
  ProductParams p{
      .groups = groups, .rows = static_cast<int32_t>(rows), .vocab = static_cast<int32_t>(vocab)};
  int64_t size = 0;
  for (int i = 0; i < kProducts; ++i) {
    const auto& [hidden, weight] = factors[i];
    if (!MakeMap(hidden, Stage::kCopyStateLines, /*once=*/false, maps.of[i].states) ||
        !MakeMap(weight, Stage::kCopyWeightLines, /*once=*/Stage::kFewRows, maps.of[i].weights)) {
      return cudaErrorNotSupported;
    }
    p.steps[i] = static_cast<int32_t>(CeilDiv(hidden.cols, kStep));
    size += hidden.cols;
  }
  p.schedule = ScheduleOf(rows, size, vocab, scratch);
  const int64_t clusters =
      std::min<int64_t>(scratch.multiprocessors / kCluster, p.schedule.Items());
  return LaunchKernel(&ProductKernel<T, kRows, Epilogue>,
                      {.grid = GridFor(kCluster * clusters),
                       .threads = kThreads,
                       .cluster = kCluster,
                       .shared_bytes = Stage::kSharedBytes},
                      stream, maps, p, epilogue);
}

// groups: as in ProductParams.
template <class T, class Epilogue>
cudaError_t LaunchProduct(const Factors (&factors)[kProductsOf<Epilogue>], const int32_t* groups,
                          const typename Epilogue::Params& epilogue, const Scratch& scratch,
                          cudaStream_t stream) {
  const int64_t rows = factors[0].hidden.rows;
  const auto launch = rows <= kGroupRows       ? &LaunchRows<T, Rows::k64, Epilogue>
                      : rows <= 2 * kGroupRows ? &LaunchRows<T, Rows::k128, Epilogue>
                                               : &LaunchRows<T, Rows::kMany, Epilogue>;
  return launch(factors, groups, epilogue, scratch, stream);
}

}  // namespace logitd::cuda::hopper

#endif  // LOGITD_KERNELS_CUDA_LINEAR_HOPPER_PRODUCT_CUH_
