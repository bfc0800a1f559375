// softmax_topk: one read of the logits leaves a sketch on chip; the few groups that matter are
// looked at again.
//
// A warp takes a cell of 1024 logits into registers, folds it into (max, sum), and leaves the
// maxima of its groups of 16 consecutive logits (8 for k above 128), 16 bits each, in shared
// memory. No barrier, no branch on the data: the loop is loads, maxima, a few shuffles and
// exponentials. Then a floor is found that at least k logits reach: r lanes of each of w warps have
// seen one, r * w >= k; or, for larger k, the k-th largest group maximum. Groups that reach it are
// read again, about k of them, and what is not below the floor is ranked. Cells merge in one order
// whatever the grid, so all variants give the same bits:
//
//   warp per row      vocab <= 1024, k <= 22 (topk_warp.cuh)
//   warp per row      vocab <= 3072, or <= 8192 (12288 where logits have 16 bits) and more than 512
//                     rows; k <= 64 (topk_short.cuh)
//   cluster per row   at most as many rows as multiprocessors: its blocks meet in the first one's
//                     shared memory (sm_90). Where not all clusters would run at once, they are
//                     smaller (cluster_blocks.h). It begins before the kernel before it has ended
//   block per row     as many rows as multiprocessors, or more
//   blocks per row    fewer long rows without a cluster; each leaves candidates and cells in
//                     scratch, the last one merges
//   sorted            k > 1024: statistics as above, then a radix sort (topk_sorted.cu)
//
// Cost: reads rows * vocab * sizeof(T) once, writes 8 k + 12 bytes a row.
// Measured, as a share of one read (bench/results/h200/kernels.json): 8192 x 50257 f32 k 10, 93%
// padded and 91% packed; 2048 x 131072 k 10, 93%; 512 x 131072 k 64, 79% f32, 64% bf16; k 1024,
// 47%; 64 rows 19 us; one row 11 us. On an H100 (bench/results/h100/rows_and_draws.json): 16 to 32
// rows of 131072 15 to 18 us; 16384 x 4096 k 50, 79% f32, 64% bf16 (short_rows.json). Since blocks without a cluster
// have no room for its messages (bench/results/h100/kernels.json): 777 x 151936 bf16 k 50, 80% (62%).
// Since a group is consecutive logits, and a second look reads one place for it and not two to four
// (bench/results/h100/groups_and_late_edits.json): 512 x 131072 f32 k 64 89% (85%), k 1024 64%
// (58%). Where the last of a few waves is fuller with fewer blocks at once (rows/waves.h;
// bench/results/h100/kernels.json): 1024 x 151936 bf16 k 50 80% (69%), 700 x 131072 f32 k 64 88%.
// Since blocks meet in device memory only where that pays, and lengths just above a cell's border have
// rows of warps that fit them (bench/results/h100/borders.json): 300 x 8192 bf16 k 64 12 us (20), k 1024
// one row of 131072 33 us (64), 64 of 32000 20 us (55).
// Limited by: HBM while a row is read. A cell keeps its place in the lines of 128 bytes on its way
// to shared memory: without that, a tenth less. Then by the chain of latencies that ends a row
// (floor, second look, rank, merge), about 10 us, which other blocks hide only in part: it is
// nearly all of the time for few rows, and the tail of a launch whose blocks all end together.
// Tried and dropped: candidates pushed to a pool inside the loop (divergence and a barrier a
// round); persistent blocks whose ring runs into the next row (registers; no gain); persistent
// blocks of streaming warps, followed by groups of finishing warps (both sides slower than blocks
// that hide each other, 8192 x 50257 11% slower); two cells at once in a warp (35% slower);
// prefetching the groups of the second look into L2 (nothing); one stage of 8 warps; for k 1024
// four blocks of 4 warps a multiprocessor with half the sketch (15 to 30% slower); an early begin of
// large launches (512 rows 15% slower); two blocks a row for 133 rows or more (only from 131072 tokens of
// 16 bits on faster, by up to 14%, and 20% slower at 264 rows).
#include <algorithm>
#include <limits>

#include "kernels/cuda/dispatch.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/ops.h"
#include "kernels/cuda/rows/cluster_blocks.h"
#include "kernels/cuda/rows/waves.h"
#include "kernels/cuda/sampling/topk_block.cuh"
#include "kernels/cuda/sampling/topk_short.cuh"
#include "kernels/cuda/sampling/topk_warp.cuh"

namespace logitd::cuda {
namespace {

constexpr int kMaxPooledK = 1024;

template <class T>
cudaError_t LaunchWarpRow(const TopKParams& p, const Scratch& scratch, cudaStream_t stream) {
  const int64_t most = kWarpRowResident * scratch.multiprocessors;
  return LaunchKernel(&WarpRowKernel<T>,
                      {.grid = GridFor(std::min(p.args.logits.rows, most)),
                       .threads = kWarpRowWarps * 32,
                       .shared_bytes = sizeof(WarpRowShared<T>)},
                      stream, p);
}

template <class Shape>
cudaError_t LaunchShortRow(const TopKParams& p, const Scratch& scratch, cudaStream_t stream) {
  const int64_t most = scratch.multiprocessors;
  const int warps =
      std::min(Shape::Warps(p.cells, scratch.block_shared_bytes), Shape::kMostThreads / 32);
  return LaunchKernel(&ShortRowKernel<Shape>,
                      {.grid = GridFor(std::min(p.args.logits.rows, most)),
                       .threads = warps * 32,
                       .shared_bytes = static_cast<int>(sizeof(typename Shape::Shared)) +
                                       warps * Shape::WarpBytes(p.cells),
                       .most_shared_bytes = scratch.block_shared_bytes},
                      stream, p);
}

template <class Block>
cudaError_t LaunchBlockRow(const TopKParams& p, const Scratch& scratch, cudaStream_t stream) {
  const int64_t blocks = p.args.logits.rows * p.splits;
  const int shared_bytes = SharedBytes<Block>(p.cells, (p.cells + p.splits - 1) / p.splits);
  return LaunchKernel(
      &BlockRowKernel<Block>,
      {.grid = GridFor(blocks),
       .threads = Block::kThreads,
       .cluster = Block::kCluster ? p.splits : 1,
       .shared_bytes = Block::kCluster
                           ? shared_bytes
                           : SharedBytesForWaves(blocks, Block::kResident, shared_bytes, scratch),
       .most_shared_bytes = scratch.block_shared_bytes,
       .early = Block::kCluster},
      stream, p);
}

// ---- variants ----------------------------------------------------------------------------------

constexpr int32_t kAnyRows = std::numeric_limits<int32_t>::max();
constexpr int64_t kFewRows = 64;
constexpr int32_t kOneWave = 512;  // of blocks: a block ends a row of some cells sooner than a warp

// By number of rows, row length, k and the device's shared memory: the first variant whose limits
// hold is taken.
struct Variant {
  int32_t max_vocab;
  int64_t max_rows;
  int32_t max_k;
  int32_t warps;     // of a block, where rows may be split over blocks
  int32_t resident;  // blocks per multiprocessor; 0: rows are never split over blocks
  cudaError_t (*launch)(const TopKParams&, const Scratch&, cudaStream_t);
  int (*max_item_cells)(int cells, const Scratch&);
  bool cluster = false;             // a row's blocks are a cluster
  int32_t cells_worth_meeting = 0;  // of the part of a row that a block at least takes
};

template <class Block>
constexpr Variant BlockRowVariant(int32_t max_rows = kAnyRows) {
  return {static_cast<int32_t>(kMaxVocab),
          max_rows,
          Block::Pool::kMaxK,
          Block::kWarps,
          Block::kResident,
          &LaunchBlockRow<Block>,
          &MaxItemCells<Block>,
          Block::kCluster,
          Block::Pool::kMaxK <= 128 ? 64 : 112};
}

template <class Shape>
constexpr Variant ShortRowVariant(int32_t max_cells = Shape::kCells) {
  return {max_cells * kCell,
          kAnyRows,
          kShortRowMaxK,
          0,
          0,
          &LaunchShortRow<Shape>,
          [](int cells, const Scratch& scratch) {
            constexpr int kEnough = 4;  // warps
            return Shape::Warps(cells, scratch.block_shared_bytes) < kEnough ? 0 : Shape::kCells;
          }};
}

// Warps, stages and resident blocks are what measured best on an H200.
template <class T>
using UsualBlock = BlockShape<T, SmallPool, 4, 2, sizeof(T) == 4 ? 4 : 6>;
template <class T>
using FewRowsBlock = BlockShape<T, SmallPool, 16, 2, 1, true>;
template <class T>
using LargeKBlock = BlockShape<T, LargePool, 8, 2, 2>;
template <class T>
using SmallMemoryBlock = BlockShape<T, LargePool, 4, 2, 1>;
template <class T>
constexpr Variant kVariants[] = {
    {kCell, kAnyRows, kWarpRowMaxK, kWarpRowWarps, 0, &LaunchWarpRow<T>,
     [](int, const Scratch& scratch) {
       return scratch.block_shared_bytes < static_cast<int>(sizeof(WarpRowShared<T>)) ? 0 : 1;
     }},
    ShortRowVariant<ShortRowShape<T, 1, 2>>(),
    ShortRowVariant<ShortRowShape<T, 3, 4>>(3),
    BlockRowVariant<FewRowsBlock<T>>(),
    BlockRowVariant<UsualBlock<T>>(kOneWave),
    ShortRowVariant<ShortRowShape<T, 3, 4>>(),
    // Of more than 8 cells only 16-bit rows: shared memory has room for few of f32.
    ShortRowVariant<ShortRowShape<T, 5, sizeof(T) == 4 ? 8 : 12>>(),
    BlockRowVariant<UsualBlock<T>>(),
    BlockRowVariant<LargeKBlock<T>>(),
    BlockRowVariant<SmallMemoryBlock<T>>(),
};

// Blocks a row is split over. One where the rows fill the device, or where blocks take longer to meet
// in device memory than to read what they would leave to others; else as many as are resident at once.
// Without clusters, where few rows always meet there, a block reads at least a cell with every warp.
int32_t SplitsOf(int64_t rows, int32_t cells, const Variant& variant, const Scratch& scratch) {
  if (variant.resident == 0) return 1;
  const int32_t largest = variant.max_item_cells(cells, scratch);
  const int32_t least = (cells + largest - 1) / largest;
  const int32_t worth = (cells + variant.warps - 1) / variant.warps;  // a cell for every warp
  if (variant.cluster) {
    return std::clamp(ClusterBlocksAtOnce(rows, scratch), least,
                      std::max(least, std::min(worth, kMaxClusterBlocks)));
  }
  if (rows >= scratch.multiprocessors) return least;
  const int64_t wanted = static_cast<int64_t>(variant.resident) * scratch.multiprocessors / rows;
  const int32_t most = scratch.clusters ? cells / variant.cells_worth_meeting : worth;
  return static_cast<int32_t>(std::clamp<int64_t>(wanted, least, std::max(least, most)));
}

// A cluster has a multiprocessor for each of its blocks. Above 64 rows it is one block, which pays
// from 4097 tokens on.
bool ClusterFits(int64_t rows, int32_t vocab, const Scratch& scratch) {
  return scratch.clusters && rows <= (vocab > 4 * kCell ? scratch.multiprocessors : kFewRows);
}

// All rows, for k of at most `k`, by the first of `variants` that fits them.
cudaError_t RunVariant(TopKParams p, int32_t k, const Variant* variant, Scratch scratch,
                       cudaStream_t stream) {
  const TensorView logits = p.args.logits;
  while (variant->max_vocab < p.vocab || variant->max_rows < logits.rows || variant->max_k < k ||
         variant->max_item_cells(p.cells, scratch) == 0 ||
         (variant->cluster && !ClusterFits(logits.rows, p.vocab, scratch))) {
    ++variant;
  }
  p.splits = SplitsOf(logits.rows, p.cells, *variant, scratch);
  if (p.splits == 1 || variant->cluster) return variant->launch(p, scratch, stream);
  // Split rows leave candidates in scratch: as many rows a launch as it has room and counters for.
  p.list_capacity = k + std::max(k / 2, 64);
  const int64_t row_bytes = p.cells * static_cast<int64_t>(sizeof(Stats)) +
                            p.splits * (p.list_capacity + 1) * static_cast<int64_t>(sizeof(Key));
  const int64_t pass = std::min<int64_t>({logits.rows, Scratch::kCounterBytes / sizeof(uint32_t),
                                          static_cast<int64_t>(scratch.bytes) / 2 / row_bytes});
  const size_t slots = static_cast<size_t>(pass) * p.splits;
  p.arrived = reinterpret_cast<uint32_t*>(scratch.data);
  p.cell_stats = scratch.Take<Stats>(static_cast<size_t>(pass) * p.cells);
  p.split_floor = scratch.Take<Key>(slots);
  p.split_keys = scratch.Take<Key>(slots * p.list_capacity);
  for (int64_t first = 0; first < logits.rows; first += pass) {
    TopKParams part = p;
    part.args = RowsFrom(p.args, first);
    part.args.logits = RowsOf(logits, first, std::min(pass, logits.rows - first));
    if (p.row_stats != nullptr) part.row_stats += first;
    const cudaError_t error = variant->launch(part, scratch, stream);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace

cudaError_t SoftmaxTopK(const SoftmaxTopKArgs& args, const Scratch& scratch, cudaStream_t stream) {
  if (args.logits.rows == 0) return cudaSuccess;
  const Variant* variants =
      VisitDType(args.logits.dtype, [&]<class T>() -> const Variant* { return kVariants<T>; });
  TopKParams p{};
  p.args = args;
  p.vocab = static_cast<int32_t>(args.logits.cols);
  p.cells = CellsOf(p.vocab);
  p.splits = 1;
  if (args.max_k <= kMaxPooledK) return RunVariant(p, args.max_k, variants, scratch, stream);
  Scratch left = scratch;
  p.row_stats = left.Take<Stats>(args.logits.rows);
  p.statistics_only = true;
  const cudaError_t error = RunVariant(p, 1, variants, left, stream);
  if (error != cudaSuccess) return error;
  return SortedTopK(args, p.row_stats, left, stream);
}

}  // namespace logitd::cuda
