// The kernel of sample and verify: a row's stages in order (sample.cu says what they cost).
#ifndef LOGITD_KERNELS_CUDA_SAMPLING_SAMPLE_KERNEL_CUH_
#define LOGITD_KERNELS_CUDA_SAMPLING_SAMPLE_KERNEL_CUH_

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/sampling/draft.cuh"
#include "kernels/cuda/sampling/draw_row.cuh"
#include "kernels/cuda/sampling/edit.cuh"
#include "kernels/cuda/sampling/report.cuh"
#include "kernels/cuda/sampling/sample_pass.cuh"
#include "kernels/cuda/sampling/sample_row.cuh"

namespace logitd::cuda {

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
    listed = lists_are_sorted ? ask.top_logprobs : 0;
    if (greedy) {
      listed = max(listed, 1);
    } else if (TopKIsOn(ask, vocab)) {
      listed = max(listed, min(ask.top_k, kListed));
    } else if (IsFiltered(ask, vocab)) {
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
  EditEnds edit_ends;

  __device__ RowMemory(void* begin, int row_cells, int part_cells)
      : raw_cells(static_cast<Stats*>(begin)),
        cells(raw_cells + row_cells + row_cells % 2),
        sketch(reinterpret_cast<SmallPool::Sketch*>(cells + row_cells + row_cells % 2)),
        raw_sketch(reinterpret_cast<EditPool::Sketch*>(sketch)),
        edited_sketch(raw_sketch + part_cells * 32),
        edit_ends(edited_sketch + part_cells * 32, part_cells) {}
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
template <int kThreads, bool kVerify, class Row>
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
  if constexpr (kVerify) {
    if (p.has_draft[r] == 0) return drawn;
    const VerifyDraft& draft = p.drafts[r];
    if (draft.kind != DraftKind::kGreedy) TestDraft(p, ask, draft, row, weigh, in, drawn);
    if (threadIdx.x == 0) p.accepted[r] = drawn.token == draft.token;
  }
  return drawn;
}

template <class T, bool kInCluster, bool kEditable, bool kVerify>
__global__ void __launch_bounds__(DrawBlock<T, kInCluster>::kThreads,
                                  DrawBlock<T, kInCluster>::kResident)
    SampleRowKernel(const __grid_constant__ SampleParams p) {
  using Block = DrawBlock<T, kInCluster>;
  using Row = Logits<T, kEditable>;
  constexpr int kThreads = Block::kThreads;
  extern __shared__ __align__(128) uint4 dynamic[];
  auto& memory = *reinterpret_cast<DrawMemory<T, kInCluster, kEditable>*>(dynamic);
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
  Row row = raw_row;
  if constexpr (kEditable) {
    if (plan.edited) {
      const int warp = threadIdx.x / 32;
      const Edits edits = Edits::Prepare<kThreads>(p, ask, r, part, m.edit_ends);
      row.SetEdits(edits.mask, edits.tokens, edits.values);
      const bool raw_is_looked_at = plan.is_raw && (ask.top_logprobs > 0 || ask.want_rank);
      bests =
          ReadEdited<Block, T>(stream, edits,
                               {.raw = raw_stats,
                                .own = own_stats,
                                .sums_needed = plan.sums_needed,
                                .raw_sketch = raw_is_looked_at ? m.raw_sketch : nullptr,
                                .sketch = m.edited_sketch},
                               memory.cells[sizeof(T) == 2 ? warp : 0], memory.edited_bits[warp]);
    }
  }
  if (!plan.edited) {
    bests.raw =
        stream.template Run<true>(raw_stats, m.sketch, plan.twice ? own_stats : CellStats{});
  }
  __syncthreads();  // from here on the rings' memory is the pool's

  // List the first tokens.
  if (kInCluster && threadIdx.x == 0) s.ranked_token = -1;
  const bool raw_tops = !plan.lists_are_sorted && ask.top_logprobs > 0;
  if (raw_tops) {
    // The top tokens of the row as sent are reported first.
    List<DrawBlock<T, kInCluster, EditPool>>(SentRow<T>{raw_row.sent}, part, m.raw_sketch,
                                             bests.raw, ask.top_logprobs, memory.stream);
    if (part.block == 0)
      ReportLists(args, ask, raw_row, RawSupport(MergeCells(m.raw_cells, p.cells, kLog2E)), s);
    __syncthreads();
  }
  if (plan.listed == 0) {
    if constexpr (kInCluster) {  // all cells are there
      ClusterArrive();
      ClusterWait();
    }
  } else if (plan.edited) {
    List<DrawBlock<float, kInCluster, EditPool>>(row.Edited(), part, m.edited_sketch, bests.edited,
                                                 plan.listed, memory.stream);
  } else {
    List<Block>(SentRow<T>{raw_row.sent}, part, m.sketch, bests.raw, plan.listed, memory.stream);
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
      DrawToken<kThreads, kVerify>(p, r, ask, row,
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
  if (!raw_tops) ReportLists(args, ask, mode_row, support, s);
}

template <class T, bool kInCluster, bool kEditable, bool kVerify>
cudaError_t LaunchPass(const SampleParams& p, const Scratch& scratch, cudaStream_t stream) {
  const int shared = SharedBytes<T, kInCluster, kEditable>(p);
  if (shared > scratch.block_shared_bytes) return cudaErrorNotSupported;
  return LaunchKernel(&SampleRowKernel<T, kInCluster, kEditable, kVerify>,
                      {.grid = GridFor(p.args.logits.rows * p.blocks),
                       .threads = DrawBlock<T, kInCluster>::kThreads,
                       .cluster = kInCluster ? p.blocks : 1,
                       .shared_bytes = shared,
                       .most_shared_bytes = scratch.block_shared_bytes},
                      stream, p);
}

template <class T>
int ClusterOf(int64_t rows, int most, const Scratch& scratch) {
  return ClusterFor<&SampleRowKernel<T, true, false, false>>(
      rows, most, DrawBlock<T, true>::kThreads, scratch.block_shared_bytes);
}

}  // namespace logitd::cuda

#endif  // LOGITD_KERNELS_CUDA_SAMPLING_SAMPLE_KERNEL_CUH_
