// The skeleton of ops on rows: a block, or a cluster of blocks, reads a row once; each cell leaves
// a few numbers, which one warp merges in the cells' order.
//
// An op says what it computes; the skeleton cuts rows, reads them and launches. An op is a struct
// that a kernel builds for a row:
//
//   struct Op {
//     using Element = ...;                      // of the logits
//     struct Params { TensorView logits; ... }; // Op::Logits(params) where they are elsewhere
//     using Cell = ...;                         // what a cell leaves, some numbers
//     Op(const Params&, int64_t row);           // loads what the row asks, before its copies begin
//     bool Active() const;                      // false: nothing is read or written
//     Cell Add(const LaneCell<Element>&, int first, int end, int lane) const;
//     void Finish(const Params&, int64_t row, const Cell* cells, int count, int lane) const;
//   };
//
// Add sums the cell at `first` of a row that ends at `end`, where elements after the end are -inf;
// it is the same in every lane. Finish is by one warp. Cells are merged in one order that depends
// only on their number (MergeCells), so a row's bits never depend on the plan. examples/row_entropy
// is such an op.
//
// An op may have more: `Read`, a loop of its own in place of Add; kTops and Tops(), where it
// selects a row's largest tokens, which then are in the pool of the block; Meanwhile, by all
// threads of the first block once all cells are there, before those tokens are; FinishBlock, by all
// threads, in place of Finish; kAllFinish, where all blocks of a cluster finish: each has all
// cells, which lane b writes for block b; Shared, memory between them. softmax_topk, cross_entropy
// and cross_entropy_training are such ops.
#ifndef LOGITD_KERNELS_CUDA_ROWS_ROW_KERNEL_CUH_
#define LOGITD_KERNELS_CUDA_ROWS_ROW_KERNEL_CUH_

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/rows/candidates.cuh"
#include "kernels/cuda/rows/plan.h"
#include "kernels/cuda/rows/row_block.cuh"

namespace logitd::cuda {

// Defaults for ops that need no more.
struct RowOp {
  static constexpr bool kTops = false;
  static constexpr bool kAllFinish = false;
  struct Shared {};
  template <class Params>
  __host__ __device__ static const TensorView& Logits(const Params& p) {
    return p.logits;
  }
};

// A block's shared memory: the rings and later the pool, what the op keeps, the row's cells (of a
// cluster in its first block), and the sketch of the block's part, only where there are tops.
template <class Op, class Block>
struct OpMemory {
  static constexpr int kOpBytes =
      std::is_empty_v<typename Op::Shared> ? 0 : (sizeof(typename Op::Shared) + 15) / 16 * 16;
  static constexpr int kFixedBytes = sizeof(typename Block::Shared) + kOpBytes + 16;

  typename Block::Shared& shared;
  typename Op::Shared& of_op;
  typename Op::Cell* cells;
  typename Block::Pool::Sketch* sketch;  // [cells of the block, 32]

  __device__ static OpMemory Of(int row_cells) {
    extern __shared__ __align__(128) uint4 dynamic[];
    char* begin = reinterpret_cast<char*>(dynamic);
    char* of_op = begin + sizeof(typename Block::Shared);
    char* cells = of_op + kOpBytes;
    const int cell_bytes = row_cells * static_cast<int>(sizeof(typename Op::Cell));
    return {*reinterpret_cast<typename Block::Shared*>(begin),
            *reinterpret_cast<typename Op::Shared*>(of_op),
            reinterpret_cast<typename Op::Cell*>(cells),
            reinterpret_cast<typename Block::Pool::Sketch*>(cells + (cell_bytes + 15) / 16 * 16)};
  }
};

// Reads the block's part of a row: leaves what each cell adds. Returns the largest logit the lane
// has seen, where the op needs it.
template <class Block, class Op>
__device__ __forceinline__ float ReadPart(Op& op, RowStream<Block>& stream, const Part& part,
                                          typename Op::Cell* cells,
                                          const OpMemory<Op, Block>& memory) {
  if constexpr (requires { op.template Read<Block>(stream, part, cells, memory); }) {
    return op.template Read<Block>(stream, part, cells, memory);
  } else {
    const int lane = threadIdx.x % 32;
    LaneCell<typename Op::Element> x;
#pragma unroll 1
    while (stream.Next(x)) {
      const int first = stream.first();
      stream.Release();
      const typename Op::Cell cell = op.Add(x, first, part.end, lane);
      if (lane < (Op::kAllFinish ? part.blocks : 1)) cells[first / kCell] = cell;
    }
    return 0;
  }
}

template <class Op, class Block>
__global__ void __launch_bounds__(Block::kThreads, Block::kResident)
    RowKernel(const __grid_constant__ typename Op::Params p, int blocks) {
  using T = typename Op::Element;
  const bool in_cluster = Block::kCluster && blocks > 1;
  if (in_cluster) ClusterArriveEmpty();
  AwaitEarlierKernels();
  const TensorView& logits = Op::Logits(p);
  const int vocab = static_cast<int>(logits.cols);
  const int row_cells = CellsOf(vocab);
  const auto memory = OpMemory<Op, Block>::Of(row_cells);
  const int64_t r = Block::kCluster ? ClusterOfGrid() : blockIdx.x;
  const Part part = Block::kCluster ? Part::Of(BlockOfCluster(), blocks, row_cells, vocab)
                                    : Part{0, 1, 0, vocab, vocab};
  const T* row = static_cast<const T*>(logits.data) + r * logits.row_stride;

  // Requested before the copies begin, or it arrives after all of them. Used once they are under
  // way.
  Op op(p, r);
  RowStream<Block> stream(memory.shared, row, part.begin, part.end);
  if (in_cluster) ClusterWait();  // all blocks have begun: their memory is there
  if (!op.Active()) return stream.Abandon();
  typename Op::Cell* cells = memory.cells;  // where the lane leaves them
  if (in_cluster)
    cells =
        InBlock(cells, Op::kAllFinish ? min(static_cast<int>(threadIdx.x % 32), blocks - 1) : 0);
  const float lane_best = ReadPart<Block>(op, stream, part, cells, memory);

  bool has_met = false;
  if constexpr (Op::kTops) {
    if (const int tops = op.Tops(); tops > 0) {
      __syncthreads();  // from here on the rings' memory is the pool's
      GatherRow<Block>(row, part, memory.sketch, lane_best, tops, memory.shared, [&] {
        if constexpr (requires { op.template Meanwhile<Block>(p, memory); }) {
          if (part.block == 0) op.template Meanwhile<Block>(p, memory);
        }
      });
      has_met = true;
    }
  }
  if (!has_met) {
    if (in_cluster) {
      ClusterArrive();
      ClusterWait();
    } else {
      __syncthreads();
    }
  }
  if (!Op::kAllFinish && part.block != 0) return;
  if constexpr (requires { op.template FinishBlock<Block>(p, r, part, memory); }) {
    op.template FinishBlock<Block>(p, r, part, memory);
  } else if (threadIdx.x < 32) {
    op.Finish(p, r, memory.cells, row_cells, static_cast<int>(threadIdx.x));
  }
}

// The form of RowKernel<Op, Block>.
template <class Op, class Block>
constexpr RowForm FormOf(CostOf cost) {
  return {.warps = Block::kWarps,
          .resident = Block::kResident,
          .most_blocks = Block::kCluster ? kMaxClusterBlocks : 1,
          .most_cells = Op::kTops ? Block::Pool::kMostCells : RowForm{}.most_cells,
          .fixed_bytes = OpMemory<Op, Block>::kFixedBytes,
          .row_cell_bytes = sizeof(typename Op::Cell),
          .part_cell_bytes =
              Op::kTops ? static_cast<int>(32 * sizeof(typename Block::Pool::Sketch)) : 0,
          .cost = cost};
}

// A call's rows, read once.
inline RowsShape ShapeOf(const TensorView& logits) {
  return {.rows = logits.rows,
          .cells = CellsOf(static_cast<int>(logits.cols)),
          .row_bytes = static_cast<float>(logits.cols * SizeOf(logits.dtype)),
          .wide = logits.dtype == DType::kF32};
}

// How ops that select nothing read few rows, and many.
template <class T>
using FewRowsStream = StreamShape<T, 16, 2, 1, true>;
template <class T>
using ManyRowsStream = StreamShape<T, 4, sizeof(T) == 4 ? 2 : 3, sizeof(T) == 4 ? 4 : 6>;

template <class Op, class Block>
cudaError_t LaunchRowKernel(const typename Op::Params& p, const RowsPlan& plan,
                            const Scratch& scratch, cudaStream_t stream) {
  return LaunchKernel(&RowKernel<Op, Block>, ShapeOfTeams(Op::Logits(p).rows, plan, scratch),
                      stream, p, plan.blocks);
}

// Enqueues a simple op for all rows.
template <class Op>
cudaError_t RunRows(const typename Op::Params& p, const Scratch& scratch, cudaStream_t stream) {
  using T = typename Op::Element;
  using Few = FewRowsStream<T>;
  using Many = ManyRowsStream<T>;
  constexpr RowForm kForms[] = {FormOf<Op, Few>(CostOf::kSimpleFewRows),
                                FormOf<Op, Many>(CostOf::kSimpleManyRows)};
  const TensorView& logits = Op::Logits(p);
  if (logits.rows == 0) return cudaSuccess;
  const RowsPlan plan = PlanRows(ShapeOf(logits), kForms, scratch);
  if (plan.form < 0) return cudaErrorNotSupported;
  return plan.form == 0 ? LaunchRowKernel<Op, Few>(p, plan, scratch, stream)
                        : LaunchRowKernel<Op, Many>(p, plan, scratch, stream);
}

}  // namespace logitd::cuda

#endif  // LOGITD_KERNELS_CUDA_ROWS_ROW_KERNEL_CUH_
