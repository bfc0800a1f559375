// sample and verify: a block, or a cluster of blocks, reads a row once and draws from what it kept:
// cells' sums and a sketch, a sorted list of 128 tokens (filters usually leave no others), what
// filters leave beyond it (nucleus.cuh), the draw (draw_row.cuh), more of them (draws.cuh), or one
// by a watermark (watermark.cuh), the test of a draft (draft.cuh), the report (report.cuh). Edits
// that only lower logits are applied late, to few candidates (late_edits.cuh), others on the way
// (edit.cuh), in kernels of their own (sample_edited_f32.cu); so are rows that AsksMore (Serves).
// Every sum that decides is of integers, or in one order fixed by the row.
//
// Cost: reads rows * vocab * sizeof(T) once; edits on the way also write it, in f32, where filters
// or the report look at it again. Beyond the list a top_k reads it once more and a ninth, a top_p
// twice more, a rank what reaches it; sums of moments.cuh once more each, more than 128 top tokens
// three times more. Limited by: as softmax_topk, the latencies that end a row.
// 512 x 131072 f32: 74% of one read (bench/results/h200/sample_b5435172.json).
// Tried and dropped: edits in one route, on the way and without writing (history and mask 218 us
// for 118); one kernel for plain and edited rows (64 plain rows 34 us), or for edited rows and
// those that AsksMore (sample_edited.json: 64 rows with history and mask 48 us for 44.5); the first
// look of a flat top_p at a sample (sample_filters.json: 512 rows 329 us for 351, but 64 rows 113
// for 95).
#include <algorithm>

#include "kernels/cuda/dispatch.cuh"
#include "kernels/cuda/ops.h"
#include "kernels/cuda/rows/plan.h"
#include "kernels/cuda/sampling/edit.cuh"
#include "kernels/cuda/sampling/sample_kernel.cuh"

namespace logitd::cuda {

extern template PassLauncher LaunchPass<float, false, Serves::kEdited>;
extern template PassLauncher LaunchPass<float, true, Serves::kEdited>;
extern template PassLauncher LaunchPass<__half, false, Serves::kEdited>;
extern template PassLauncher LaunchPass<__half, true, Serves::kEdited>;
extern template PassLauncher LaunchPass<__nv_bfloat16, false, Serves::kEdited>;
extern template PassLauncher LaunchPass<__nv_bfloat16, true, Serves::kEdited>;
extern template PassLauncher LaunchPass<float, false, Serves::kAll>;
extern template PassLauncher LaunchPass<float, true, Serves::kAll>;
extern template PassLauncher LaunchPass<__half, false, Serves::kAll>;
extern template PassLauncher LaunchPass<__half, true, Serves::kAll>;
extern template PassLauncher LaunchPass<__nv_bfloat16, false, Serves::kAll>;
extern template PassLauncher LaunchPass<__nv_bfloat16, true, Serves::kAll>;

namespace {

template <class T, bool kInCluster>
RowForm FormOf(bool edited, CostOf cost) {
  using Block = DrawBlock<T, kInCluster, SmallPool>;
  const size_t memory =
      edited ? sizeof(DrawMemory<T, kInCluster, true>) + (kInCluster ? sizeof(LateInbox) : 0)
             : sizeof(DrawMemory<T, kInCluster, false>);
  return {.warps = Block::kWarps,
          .resident = Block::kResident,
          .most_blocks = kInCluster ? kMaxClusterBlocks : 1,
          // With the row's parameters, and cells to an even number.
          .fixed_bytes = static_cast<int>(memory + sizeof(SampleRow) + 2 * sizeof(Stats)),
          .row_cell_bytes = 2 * sizeof(Stats),
          .part_cell_bytes = 32 * sizeof(SmallPool::Sketch),
          .cost = cost};
}

}  // namespace

cudaError_t SampleRows(SampleParams p, Scratch scratch, cudaStream_t stream) {
  const SampleArgs args = p.args;
  const int64_t rows = args.logits.rows;
  if (rows == 0) return cudaSuccess;
  const int64_t vocab = args.logits.cols;
  p.cells = CellsOf(static_cast<int>(vocab));
  // Edited rows are in scratch: as many rows a pass as it has room for.
  int64_t pass = rows;
  if (args.edited) {
    constexpr int64_t kMaxPass = 4096;
    const int64_t room = static_cast<int64_t>(scratch.left()) * 9 / 10;
    p.edited_stride = RoundUp(vocab, 32);
    const int64_t row_bytes = p.edited_stride * (args.bias == nullptr ? 8 : 12) + p.cells * 4;
    pass = std::clamp<int64_t>(room / row_bytes, 1, std::min(rows, kMaxPass));
    p.edited = scratch.Take<float>(pass * p.edited_stride);
    p.counts = scratch.Take<uint32_t>(pass * p.edited_stride);
    if (args.bias != nullptr) p.bias_values = scratch.Take<float>(pass * p.edited_stride);
    p.patch_counts = scratch.Take<int>(pass * p.cells);
    if (p.patch_counts == nullptr) return cudaErrorMemoryAllocation;
  }
  p.first_keys = static_cast<int32_t>(std::min<int64_t>(vocab, kFirstKeys));
  p.first_rows = std::min<int64_t>(pass, scratch.left() / (p.first_keys * sizeof(Key)));
  p.first_lists = scratch.Take<Key>(p.first_rows * p.first_keys);
  if (p.first_lists == nullptr) p.first_rows = 0;
  const bool edited = args.edited;
  const Serves serves = !edited ? Serves::kPlain : !args.asks_more ? Serves::kEdited : Serves::kAll;
  const RowsPlan plan = VisitDType(args.logits.dtype, [&]<class T>() {
    const RowForm forms[] = {FormOf<T, true>(edited, CostOf::kSampleFewRows),
                             FormOf<T, false>(edited, CostOf::kSampleManyRows)};
    return PlanRows({rows, p.cells, static_cast<float>(vocab * sizeof(T)), sizeof(T) == 4}, forms,
                    scratch);
  });
  if (plan.form < 0) return cudaErrorNotSupported;
  p.blocks = plan.blocks;
  for (int64_t first = 0; first < rows; first += pass) {
    p.args = RowsFrom(args, first);
    p.args.logits = RowsOf(args.logits, first, std::min(pass, rows - first));
    if (edited && (args.history != nullptr || args.bias != nullptr)) {
      const cudaError_t error = MakePatches(p, plan.early, stream);
      if (error != cudaSuccess) return error;
    }
    const cudaError_t error = VisitDType(args.logits.dtype, [&]<class T>() {
      constexpr PassLauncher* kLaunchers[][2] = {
          // by Serves and form
          {&LaunchPass<T, true, Serves::kPlain>, &LaunchPass<T, false, Serves::kPlain>},
          {&LaunchPass<T, true, Serves::kEdited>, &LaunchPass<T, false, Serves::kEdited>},
          {&LaunchPass<T, true, Serves::kAll>, &LaunchPass<T, false, Serves::kAll>}};
      return kLaunchers[static_cast<int>(serves)][plan.form](
          p, ShapeOfTeams(p.args.logits.rows, plan, scratch), stream);
    });
    if (error != cudaSuccess) return error;
    if (p.drafts != nullptr) {
      p.drafts += pass;
      p.has_draft += pass;
      p.accepted += pass;
      if (p.block_rows != nullptr) p.block_rows += pass;
    }
  }
  return cudaSuccess;
}

cudaError_t Sample(const SampleArgs& args, const Scratch& scratch, cudaStream_t stream) {
  return SampleRows({.args = args}, scratch, stream);
}

}  // namespace logitd::cuda
