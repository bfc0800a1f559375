// sample and verify: a block reads a row once, as softmax_topk does, and draws from what it kept.
//
//   read    cells at temperature 1 (logsumexp, NaN) and, where the draw is from the whole row, at
//           the row's own; the sketch. Bias, penalties and the mask are applied on the way
//           (edit.cuh), and the edited row goes to scratch in f32, for later looks
//   list    the largest 128 come sorted from the sketch. They hold what a top_k to 128, a min_p or
//           a top_p usually leaves
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
// only on the row (kernels/draw.h, kernels/sample.h).
//
// Cost: reads rows * vocab * sizeof(T) once. An edited row is also written once, in f32. A flat
// top_p reads a row twice more (up to ten times, where the last logit is one of very many that are
// nearly equal), and a rank beyond the list reads the groups that reach it. verify with draft
// probabilities reads a row once more, and twice more where the draft is refused.
// Limited by: as softmax_topk, the chain of latencies that ends a row; edits and a flat top_p by
// arithmetic.
// Measured (bench/results/h200/kernels.json), V 131072 f32, 512 rows: 83 us, 72% of one read, with
// top_k 64, top_p 0.9 and 20 log-probabilities; 257 with 4096 tokens of history and a mask as well;
// unfiltered 85, or 144 with the rank; 473 for a flat top_p. 64 rows 25 us, one row 17 us.
// Tried and dropped: a history counted in device memory (partial sectors: 385 us for that step
// only); a copy of the row, edited, read afterwards (928 us); 64-bit sums in shared memory for a
// flat top_p (1565 us); one kernel for plain and edited rows (64 plain rows 34 us).
#include <algorithm>

#include "kernels/cuda/dispatch.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/ops.h"
#include "kernels/cuda/sampling/draft.cuh"
#include "kernels/cuda/sampling/draw_row.cuh"
#include "kernels/cuda/sampling/edit.cuh"
#include "kernels/cuda/sampling/report.cuh"
#include "kernels/cuda/sampling/sample_row.cuh"

namespace logitd::cuda {
namespace {

constexpr int64_t kFewRows = 64;

// What a row's parameters ask of the stages.
struct RowPlan {
  bool edited;
  bool greedy;
  bool is_raw;  // log-probabilities and rank are of the row as sent
  // Whether sums over the row at its temperature are needed. With top_k or min_p the sums are those
  // of what they leave.
  bool sums_needed;
  bool twice;  // the row as sent is summed at temperature 1 and at its own
  float log2e_over_temperature;
  int listed;             // tokens that come sorted: for the report, and what filters usually leave
  bool lists_are_sorted;  // those are of the logits that the report is of

  __device__ RowPlan(const SampleRow& ask, int vocab, bool editable)
      : edited(editable && IsEdited(ask)),
        greedy(ask.temperature == 0),
        is_raw(ask.logprob_mode == LogprobMode::kRaw),
        sums_needed(!TopKIsOn(ask, vocab) && ask.min_p == 0 && !greedy),
        twice(!edited && sums_needed && ask.temperature != 1),
        log2e_over_temperature(kLog2E /
                               (sums_needed ? fmaxf(ask.temperature, kLeastTemperature) : 1.0f)),
        lists_are_sorted(!is_raw || !edited) {
    listed = lists_are_sorted ? max(1, ask.top_logprobs) : 1;
    if (TopKIsOn(ask, vocab)) {
      listed = max(listed, min(ask.top_k, kListed));
    } else if (IsFiltered(ask, vocab) && !greedy) {
      listed = kListed;
    }
    listed = min(listed, vocab);
  }
};

// A block's memory after DrawMemory.
struct RowMemory {
  Stats* raw_cells;           // [cells], of the row as sent, at temperature 1
  Stats* cells;               // [cells], of the row after edits, at its temperature
  SmallPool::Sketch* sketch;  // [cells of the part, 32]
  // An edited row has two in its place.
  EditPool::Sketch* raw_sketch;
  EditPool::Sketch* edited_sketch;

  __device__ RowMemory(void* begin, int row_cells, int part_cells)
      : raw_cells(static_cast<Stats*>(begin)),
        cells(raw_cells + row_cells + row_cells % 2),
        sketch(reinterpret_cast<SmallPool::Sketch*>(cells + row_cells + row_cells % 2)),
        raw_sketch(reinterpret_cast<EditPool::Sketch*>(sketch)),
        edited_sketch(raw_sketch + part_cells * 32) {}
};

// Writes logsumexp and status. False: the row is refused, for nothing can be drawn from it.
template <class T>
__device__ __forceinline__ bool AcceptRow(const SampleParams& p, int r, const SampleRow& ask,
                                          const T* sent, const Stats* raw_cells, Stats raw,
                                          float peak, DrawShared& s) {
  const SampleArgs& args = p.args;
  if (isnan(raw.sum)) {
    RefuseNan(args, r, ask, sent, static_cast<int>(args.logits.cols), raw_cells, s);
    return false;
  }
  if (threadIdx.x == 0) {
    args.logsumexp[r] =
        raw.max == -kInfinity ? -kInfinity : Exponential(raw.max, kLog2E).LogSum(raw.sum, 1.0f);
    args.status[r] = {RowCode::kOk, -1};
  }
  if (peak == -kInfinity)
    Refuse(args, r, ask, {RowCode::kEmptySupport, -1}, threadIdx.x, blockDim.x);
  return peak != -kInfinity;
}

// Filters the row and draws from it; in verify, tests the row's draft.
template <int kThreads, class Row>
__device__ __forceinline__ Drawn DrawToken(const SampleParams& p, int r, const SampleRow& ask,
                                           const Row& row, const DrawInput& in, DrawShared& s) {
  const Weigher weigh(in.peak, ask.temperature);
  Drawn drawn;
  if (ask.temperature == 0) {
    drawn = DrawGreedy(s);
  } else if (!IsFiltered(ask, row.vocab)) {
    drawn = DrawUnfiltered(ask, row, in, s);
  } else {
    drawn = DrawFiltered<kThreads>(ask, row, weigh, in, s);
  }
  if (p.drafts != nullptr && p.has_draft[r] != 0) {
    const VerifyDraft& draft = p.drafts[r];
    if (draft.kind != DraftKind::kGreedy) TestDraft(p, ask, draft, row, weigh, in, drawn);
    if (threadIdx.x == 0) p.accepted[r] = drawn.token == draft.token;
  }
  return drawn;
}

template <class T, bool kInCluster, bool kEditable>
__global__ void __launch_bounds__(DrawBlock<T, kInCluster>::kThreads,
                                  DrawBlock<T, kInCluster>::kResident)
    SampleRowKernel(const __grid_constant__ SampleParams p) {
  using Block = DrawBlock<T, kInCluster>;
  using Row = Logits<T, kEditable>;
  constexpr int kThreads = Block::kThreads;
  extern __shared__ __align__(128) uint4 dynamic[];
  auto& memory = *reinterpret_cast<DrawMemory<T, kInCluster>*>(dynamic);
  if constexpr (kInCluster) ClusterArrive();
  const SampleArgs& args = p.args;
  const int r = static_cast<int>(blockIdx.x) / p.blocks;
  const SampleRow& ask = args.rows[r];
  const int vocab = static_cast<int>(args.logits.cols);
  const Part part = Part::Of(static_cast<int>(blockIdx.x) - r * p.blocks, p.blocks, p.cells, vocab);
  DrawShared& s = memory.finish.draw;
  const RowMemory m(&memory + 1, p.cells, part.cells());
  const Row raw_row(static_cast<const T*>(args.logits.data) + r * args.logits.row_stride, vocab);

  // Read.
  RowStream<Block> stream(memory.stream, raw_row.sent, part.begin, part.end);
  if constexpr (kInCluster) ClusterWait();  // all blocks have begun: their memory is there
  if (ask.active == 0) return stream.Abandon();
  const RowPlan plan(ask, vocab, kEditable);
  const auto in_first = [](Stats* here) { return kInCluster ? InBlock(here, 0) : here; };
  const CellStats raw_stats{kLog2E, in_first(m.raw_cells)};
  const CellStats own_stats{plan.log2e_over_temperature, in_first(m.cells)};
  LaneBests bests;
  if (plan.edited) {
    const int warp = threadIdx.x / 32;
    bests = ReadEdited<Block, T>(stream, Edits(p, ask, r, part.end), part.begin, raw_stats,
                                 own_stats, m.raw_sketch, m.edited_sketch,
                                 memory.cells[sizeof(T) == 2 ? warp : 0]);
  } else {
    bests.raw =
        stream.template Run<true>(raw_stats, m.sketch, plan.twice ? own_stats : CellStats{});
  }
  __syncthreads();  // from here on the rings' memory is the pool's

  // List the first tokens.
  Row row = raw_row;
  if (plan.edited) {
    row.edited = p.edited + r * p.edited_stride;
    if (plan.is_raw && ask.top_logprobs + ask.extra_count > 0) {
      // The lists of the row as sent are reported first.
      List<DrawBlock<T, kInCluster, EditPool>>(raw_row.sent, part, m.raw_sketch, bests.raw,
                                               max(1, ask.top_logprobs), memory.stream);
      if (part.block == 0)
        ReportLists(args, ask, raw_row, RawSupport(MergeCells(m.raw_cells, p.cells, kLog2E)), s);
      __syncthreads();
    }
  }
  if (kInCluster && threadIdx.x == 0) s.ranked_token = -1;
  if (plan.edited) {
    List<DrawBlock<float, kInCluster, EditPool>>(row.edited, part, m.edited_sketch, bests.edited,
                                                 plan.listed, memory.stream);
  } else {
    List<Block>(raw_row.sent, part, m.sketch, bests.raw, plan.listed, memory.stream);
  }
  const Row& mode_row = plan.is_raw ? raw_row : row;
  // How many tokens of the block's part are no later in the mode's order than this one.
  const auto count_in_part = [&](float logit, int last) {
    if constexpr (kEditable) {
      if (plan.edited) {
        return CountFrom<kThreads, EditPool>(
            mode_row, part, plan.is_raw ? m.raw_sketch : m.edited_sketch, logit, last);
      }
    }
    return CountFrom<kThreads, SmallPool>(mode_row, part, m.sketch, logit, last);
  };
  if (part.block != 0) return HelpToRank(s, count_in_part);

  // Filter and draw.
  const Stats raw = MergeCells(m.raw_cells, p.cells, kLog2E);
  const float peak =
      plan.edited ? MergeCells(m.cells, p.cells, plan.log2e_over_temperature).max : raw.max;
  if (!AcceptRow(p, r, ask, raw_row.sent, m.raw_cells, raw, peak, s)) return;
  const Drawn drawn =
      DrawToken<kThreads>(p, r, ask, row,
                          {.peak = peak,
                           .stats = plan.twice || plan.edited ? m.cells : m.raw_cells,
                           .cells = p.cells,
                           .sums_needed = plan.sums_needed,
                           .log2e_over_temperature = plan.log2e_over_temperature,
                           .listed = plan.listed,
                           .cell_sums = reinterpret_cast<uint64_t*>(m.cells),
                           .bits = UniformBits(ask.seed, ask.position)},
                          s);

  // Report.
  const Support support =
      plan.is_raw
          ? RawSupport(raw)
          : Support{drawn.last, peak, plan.greedy ? 1.0 : fmaxf(ask.temperature, kLeastTemperature),
                    drawn.log_sum};
  const float x = mode_row[drawn.token];
  const int rank = FindRank<kInCluster, kThreads>(ask.want_rank, x, drawn.token,
                                                  plan.lists_are_sorted ? plan.listed : 0,
                                                  part.blocks, s, count_in_part);
  if (threadIdx.x == 0) {
    args.tokens[r] = drawn.token;
    args.logprobs[r] = support.Logprob(x, drawn.token);
    args.ranks[r] = rank;
  }
  if (plan.lists_are_sorted) ReportLists(args, ask, mode_row, support, s);
}

// ---- launch ------------------------------------------------------------------------------------

template <class T, bool kInCluster>
int SharedBytes(const SampleParams& p) {
  const int part_cells = (p.cells + p.blocks - 1) / p.blocks;
  return static_cast<int>(sizeof(DrawMemory<T, kInCluster>) +
                          2 * (p.cells + p.cells % 2) * sizeof(Stats) +
                          part_cells * 32 * sizeof(SmallPool::Sketch));
}

template <class T, bool kInCluster, bool kEditable>
cudaError_t LaunchPass(const SampleParams& p, const Scratch& scratch, cudaStream_t stream) {
  const int shared = SharedBytes<T, kInCluster>(p);
  if (shared > scratch.block_shared_bytes) return cudaErrorNotSupported;
  return LaunchKernel(&SampleRowKernel<T, kInCluster, kEditable>,
                      {.grid = GridFor(p.args.logits.rows * p.blocks),
                       .threads = DrawBlock<T, kInCluster>::kThreads,
                       .cluster = kInCluster ? p.blocks : 1,
                       .shared_bytes = shared,
                       .most_shared_bytes = scratch.block_shared_bytes},
                      stream, p);
}

// Blocks of a row's cluster; 0: one block takes the row.
template <class T>
int32_t ClusterBlocks(SampleParams p, int64_t rows, const Scratch& scratch) {
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
  for (int64_t first = 0; first < rows; first += pass) {
    p.args = RowsFrom(args, first);
    p.args.logits = RowsOf(args.logits, first, std::min(pass, rows - first));
    if (args.edited && (args.history != nullptr || args.bias != nullptr)) {
      const cudaError_t error = MakePatches(p, stream);
      if (error != cudaSuccess) return error;
    }
    const cudaError_t error = VisitDType(args.logits.dtype, [&]<class T>() {
      const int32_t cluster = ClusterBlocks<T>(p, rows, scratch);
      p.blocks = std::max(cluster, 1);
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
