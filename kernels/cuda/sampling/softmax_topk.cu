// softmax_topk: one read of the logits leaves a sketch on chip; the few groups that matter are
// looked at again.
//
// A warp takes a cell of 1024 logits, folds it into (max, sum), and leaves the maxima of its
// groups, 16 bits each. Then a floor is found that at least k logits reach; groups that reach it
// are read again, and what is not below the floor is ranked. Cells merge in one order, so all forms
// give the same bits. A call's form is planned (rows/plan.h): a warp a row (topk_warp.cuh), a block
// or a cluster a row (topk_block.cuh), or for k > 1024 a sort (topk_sorted.cu).
//
// Cost: reads rows * vocab * sizeof(T) once, writes 8 k + 12 bytes a row.
// Limited by: HBM while a row is read; then by the chain of latencies that ends a row (floor,
// second look, rank, merge), which other blocks hide only in part, few rows not at all:
// instructions that a block runs once take some 10 cycles each. Short rows by instructions.
// Measured on an H200 (bench/results/h200/kernels_a6bebcf6.json), of one read: 512 x 131072 k 64
// f32 82%, bf16 68%; 65536 x 1000 f32 k 10 78%; 1, 16 and 64 rows of 131072 f32 k 64 7.4, 11.1 and
// 17.5 us. Dropped: a pool inside the loop; blocks that meet in device
// memory; a cluster's second look in the ring's memory; a cell of -inf before the row, to fetch the
// loop early.
#include <array>
#include <span>

#include "kernels/cuda/dispatch.cuh"
#include "kernels/cuda/ops.h"
#include "kernels/cuda/sampling/topk_block.cuh"
#include "kernels/cuda/sampling/topk_warp.cuh"

namespace logitd::cuda {
namespace {

template <class Shape>
cudaError_t LaunchShortRow(const TopKParams& p, const RowsPlan& plan, const Scratch& scratch,
                           cudaStream_t stream) {
  return LaunchKernel(&ShortRowKernel<Shape>, ShapeOfWarps(p.args.logits.rows, plan, scratch),
                      stream, p);
}

// ---- forms -------------------------------------------------------------------------------------

// A way to take rows, for k up to max_k.
struct TopKForm {
  int32_t max_k;
  cudaError_t (*launch)(const TopKParams&, const RowsPlan&, const Scratch&, cudaStream_t);
  RowForm rows;
};

template <class T, class Block>
constexpr TopKForm BlockForm(CostOf cost) {
  return {Block::Pool::kMaxK, &LaunchRowKernel<TopKOp<T>, Block>, FormOf<TopKOp<T>, Block>(cost)};
}
template <class Shape>
constexpr TopKForm ShortForm(CostOf cost) {
  return {Shape::kMaxK,
          &LaunchShortRow<Shape>,
          {.warps = Shape::kMostThreads / 32,
           .warp_takes_row = true,
           .least_cells = Shape::kFewest,
           .most_cells = Shape::kCells,
           .fixed_bytes = sizeof(typename Shape::Shared),
           .warp_bytes = Shape::WarpBytes(0),
           .warp_cell_bytes = Shape::WarpBytes(1) - Shape::WarpBytes(0),
           .cost = cost}};
}

template <class T>
using FewRows = BlockShape<T, SmallPool, 16, 2, 1, true>;
template <class T>
using ManyRows = BlockShape<T, SmallPool, 4, 2, sizeof(T) == 4 ? 4 : 6>;
template <class T>
using LargeKFewRows = BlockShape<T, LargeClusterPool, 16, 2, 1, true>;
template <class T>
using LargeK = BlockShape<T, LargePool, 8, 2, 2>;
template <class T>
using LargeKManyRows = BlockShape<T, LargePool, 4, 2, 3>;

// A warp takes f32 rows of at most 8 cells: shared memory has room for few longer ones.
template <class T>
constexpr int kMostShortCells = sizeof(T) == 4 ? 8 : 12;

template <class T>
constexpr TopKForm kForms[] = {
    ShortForm<ShortRowShape<T, 1, 1>>(CostOf::kTopKOneCell),
    ShortForm<ShortRowShape<T, 2, 2>>(CostOf::kTopKTwoCells),
    ShortForm<ShortRowShape<T, 3, 4>>(CostOf::kTopKFourCells),
    ShortForm<ShortRowShape<T, 5, kMostShortCells<T>>>(CostOf::kTopKManyCells),
    ShortForm<ShortRowShape<T, 1, kMostShortCells<T>, 128>>(CostOf::kTopK128),
    BlockForm<T, FewRows<T>>(CostOf::kTopKFewRows),
    BlockForm<T, ManyRows<T>>(CostOf::kTopKManyRows),
    BlockForm<T, LargeKFewRows<T>>(CostOf::kTopK1024FewRows),
    BlockForm<T, LargeK<T>>(CostOf::kTopK1024),
    BlockForm<T, LargeKManyRows<T>>(CostOf::kTopK1024ManyRows),
};

}  // namespace

cudaError_t SoftmaxTopK(const SoftmaxTopKArgs& args, const Scratch& scratch, cudaStream_t stream) {
  const TensorView& logits = args.logits;
  if (logits.rows == 0) return cudaSuccess;
  const TopKParams p{.args = args,
                     .vocab = static_cast<int32_t>(logits.cols),
                     .cells = CellsOf(static_cast<int>(logits.cols))};
  const std::span<const TopKForm> forms =
      VisitDType(logits.dtype, [&]<class T>() -> std::span<const TopKForm> { return kForms<T>; });
  std::array<RowForm, std::size(kForms<float>)> candidates;
  for (size_t i = 0; i < forms.size(); ++i) {
    candidates[i] = forms[i].rows;
    if (args.max_k > forms[i].max_k) candidates[i].most_cells = 0;
  }
  const RowsPlan plan = PlanRows(
      {.rows = logits.rows,
       .cells = p.cells,
       .row_bytes = static_cast<float>(logits.cols * SizeOf(logits.dtype) + 8 * args.max_k),
       .wide = logits.dtype == DType::kF32,
       .k = args.max_k},
      candidates, scratch);
  if (plan.form < 0 && IsForced()) return cudaErrorNotSupported;
  if (plan.form < 0) return SortedTopK(args, scratch, stream);
  return forms[plan.form].launch(p, plan, scratch, stream);
}

}  // namespace logitd::cuda
