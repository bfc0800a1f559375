// sample and verify: a block reads a row once, as softmax_topk does, and draws from what it kept.
//
//   read    cells at temperature 1 (logsumexp, NaN) and, where the draw is from the whole row, at
//           the row's own; the sketch. A mask, and penalties that only lower logits, are applied
//           late, to the few candidates (late_edits.cuh), where no sum over the row needs them.
//           Other edits are applied on the way (edit.cuh), and the edited row goes to scratch in
//           f32, for later looks
//   list    the largest 128 come sorted from the sketch. They hold what a top_k to 128, or another
//           filter, usually leaves. A greedy row without top log-probabilities needs no list: the
//           maxima of its cells tell the token
//   filter  a flat top_p takes two more looks (nucleus.cuh): a histogram of approximate mass that
//           tells which logits may be the last, then exact sums of what is above them. What neither
//           finds is found by histograms, of counts or of integer mass, over ever narrower ranges
//           of keys: no sort, no cap
//   draw    over the short list; or a cell by sums, then a token of it (draw_row.cuh). In verify, a
//           test of the draft (draft.cuh)
//   report  log-probabilities; a rank beyond the list by the groups of the sketch that reach it
//           (report.cuh)
//
// Every sum that decides is of integers, or in one order fixed by the row, so a row's bits depend
// only on the row (kernels/sampling_rules.h, kernels/draw.h).
//
// Edited rows have kernels of their own (sample_edited_f32.cu and so on): a call without edits pays
// nothing for them.
//
// Cost: reads rows * vocab * sizeof(T) once. A row whose edits are not applied late is also written
// once, in f32. A flat top_p reads a row twice more (up to ten times, where the last logit is one of
// very many that are nearly equal), in a cluster each block its part, and a rank beyond the list
// reads the groups that reach it. verify with draft probabilities reads a row once more, and twice
// more where the draft is refused.
// Limited by: as softmax_topk, the chain of latencies that ends a row; edits on the way and a flat
// top_p by arithmetic. Where edits are applied late, the read of the row takes as long as without
// edits; then stages follow that run once (floor, second look, mask, history, lists, draw), most of
// whose time is waits for instructions.
// Measured (bench/results/h200/kernels.json), V 131072 f32, 512 rows: 83 us, 72% of one read, with
// top_k 64, top_p 0.9 and 20 log-probabilities; unfiltered 85, or 144 with the rank; 473 for a flat
// top_p. 64 rows 25 us, one row 17 us. Edits (bench/results/h200/sample_edits.json), where 512 rows
// without take 85 us: 134 with 4096 tokens of history and a mask (255 before edits were applied
// late), 117 with a mask only (191), 103 with 500 tokens of history (189); unfiltered with 4096
// tokens of history, where sums need the edits, 230. 64 rows 63 us (80), one row 43 us (46).
// On an H100 (bench/results/h100/groups_and_late_edits.json; in brackets with groups of the sketch
// that are not consecutive logits, and one block of a cluster that looks again): with history and
// mask 512 rows 155 us (165), 64 rows 68 (72), one row 38 (45); 512 rows of a flat top_p without the
// rank 391 (442), 64 rows 108 (137).
// On an H100 (bench/results/h100/rows_and_draws.json): unfiltered rows without rank and top
// log-probabilities, which are not listed and whose token is found in a cell's registers: 512 rows
// 87% of one read, 64 rows 24 us, one row 13. 16 to 32 rows with 20 log-probabilities 22 to 25 us.
// Greedy rows without a list (bench/results/h100/borders.json; in brackets with one): 16 x 201088 14 us
// (19), 64 x 131072 20 us (24).
// Tried and dropped: a history counted in device memory (partial sectors: 385 us for that step
// only); a copy of the row, edited, read afterwards (928 us); 64-bit sums in shared memory for a
// flat top_p (1565 us); one kernel for plain and edited rows (64 plain rows 34 us); candidates put
// into the table by the lanes that find them (edited rows 249 us for 141); where rows have no
// cluster, a launch that overlaps with the kernel that makes patches (rows edited on the way 302); a
// sample of the row for the first look of a flat top_p (452 us), the next cell requested early in
// later looks (471 us); on an H100, counts in place of masses in the first look (512 rows 383 us
// for 391, but bf16, whose logits are not spread evenly in a bin, 847 for 686); three blocks a
// multiprocessor, so that 777 rows are nearly two waves (50257 tokens 79 us for 73); no sketch where
// no list is wanted, and a read loop of its own for one temperature (64 rows 9% slower).
#include <algorithm>

#include "kernels/cuda/dispatch.cuh"
#include "kernels/cuda/ops.h"
#include "kernels/cuda/rows/plan.h"
#include "kernels/cuda/sampling/edit.cuh"
#include "kernels/cuda/sampling/sample_kernel.cuh"
#include "kernels/cuda/sampling/sample_pass.cuh"

namespace logitd::cuda {

extern template cudaError_t LaunchPass<float, false, true>(const SampleParams&, const Scratch&,
                                                           cudaStream_t);
extern template cudaError_t LaunchPass<float, true, true>(const SampleParams&, const Scratch&,
                                                          cudaStream_t);
extern template cudaError_t LaunchPass<__half, false, true>(const SampleParams&, const Scratch&,
                                                            cudaStream_t);
extern template cudaError_t LaunchPass<__half, true, true>(const SampleParams&, const Scratch&,
                                                           cudaStream_t);
extern template cudaError_t LaunchPass<__nv_bfloat16, false, true>(const SampleParams&,
                                                                   const Scratch&, cudaStream_t);
extern template cudaError_t LaunchPass<__nv_bfloat16, true, true>(const SampleParams&,
                                                                  const Scratch&, cudaStream_t);

namespace {

template <class T, bool kInCluster>
RowForm FormOf(const SampleParams& p, CostOf cost) {
  using Block = DrawBlock<T, kInCluster>;
  SampleParams of_cells = p;
  of_cells.blocks = 1;
  of_cells.cells = 0;
  return {.warps = Block::kWarps,
          .resident = Block::kResident,
          .most_blocks = kInCluster ? kMaxClusterBlocks : 1,
          .fixed_bytes = SharedBytes<T, kInCluster>(of_cells) + static_cast<int>(2 * sizeof(Stats)),
          .row_cell_bytes = 2 * sizeof(Stats),
          .part_cell_bytes = 32 * sizeof(SmallPool::Sketch),
          .cost = cost};
}

// Blocks of a row's cluster; 0: one block takes the row.
template <class T>
int32_t ClusterBlocks(const SampleParams& p, int64_t rows, const Scratch& scratch) {
  const RowForm forms[] = {FormOf<T, true>(p, CostOf::kSampleFewRows),
                           FormOf<T, false>(p, CostOf::kSampleManyRows)};
  const RowsPlan plan =
      PlanRows({rows, p.cells, static_cast<float>(p.args.logits.cols * sizeof(T)), sizeof(T) == 4},
               forms, scratch);
  return plan.form == 0 ? plan.blocks : 0;
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
  const int32_t cluster =
      VisitDType(args.logits.dtype, [&]<class T>() { return ClusterBlocks<T>(p, rows, scratch); });
  p.blocks = std::max(cluster, 1);
  for (int64_t first = 0; first < rows; first += pass) {
    p.args = RowsFrom(args, first);
    p.args.logits = RowsOf(args.logits, first, std::min(pass, rows - first));
    if (args.edited && (args.history != nullptr || args.bias != nullptr)) {
      const cudaError_t error = MakePatches(p, /*early=*/cluster > 0, stream);
      if (error != cudaSuccess) return error;
    }
    const cudaError_t error = VisitDType(args.logits.dtype, [&]<class T>() {
      const auto launch =
          cluster > 0   ? args.edited ? &LaunchPass<T, true, true> : &LaunchPass<T, true, false>
            : args.edited ? &LaunchPass<T, false, true>
                        : &LaunchPass<T, false, false>;
      return launch(p, scratch, stream);
    });
    if (error != cudaSuccess) return error;
    if (p.drafts != nullptr) {
      p.drafts += pass;
      p.has_draft += pass;
      p.accepted += pass;
    }
  }
  return cudaSuccess;
}

cudaError_t Sample(const SampleArgs& args, const Scratch& scratch, cudaStream_t stream) {
  return SampleRows({.args = args}, scratch, stream);
}

}  // namespace logitd::cuda
