// sample, further draws: the tokens of a row that wants several, after its first. Only rows that
// ask for them come here.
//
// Cost: nothing of the row where its sorted list holds what the filters leave, and a thread a draw.
// Else a warp a draw, which reads one cell; of filtered rows one more read of the row before.
// 64 x 131072 f32, floor one read, 7.4 us: 16 draws from a list 38 us (20%; without draws 23, by a
// kernel with less code), unfiltered 54 (without 19), of a flat top_p 192 (without 87).
// Measured: bench/results/h200/sample_b5435172.json.
#ifndef LOGITD_KERNELS_CUDA_SAMPLING_DRAWS_CUH_
#define LOGITD_KERNELS_CUDA_SAMPLING_DRAWS_CUH_

#include "kernels/cuda/sampling/draw_row.cuh"
#include "kernels/cuda/sampling/sample_row.cuh"
#include "kernels/cuda/sampling/weights.cuh"

namespace logitd::cuda {

// Calls write(draw, token) for the thread's share of the draws after the first, from the first
// `listed` tokens, whose weights are `weigh` and add up to `total`. Called by all threads.
template <int kThreads, class Write>
__device__ __forceinline__ void DrawMoreListed(const SampleRow& ask, int listed, uint64_t total,
                                               const TokenWeights& weigh, DrawShared& s,
                                               Write write) {
  for (int i = threadIdx.x; i < listed; i += kThreads)
    s.weights[i] = weigh(KeyLogit(s.sorted[i]), KeyIndex(s.sorted[i]));
  __syncthreads();
  for (int i = threadIdx.x; i < listed; i += kThreads) {
    const uint32_t place = static_cast<uint32_t>(s.sorted[i]);  // descending by index
    uint64_t through = 0;
    for (int j = 0; j < listed; ++j) {
      if (static_cast<uint32_t>(s.sorted[j]) >= place) through += s.weights[j];
    }
    s.through[i] = s.weights[i] == 0 ? 0 : through;  // 0: not drawn
  }
  __syncthreads();
  for (int draw = 1 + threadIdx.x; draw < ask.draws; draw += kThreads) {
    const uint64_t target = DrawTarget(UniformBits(ask.seed, ask.position, draw), total);
    uint64_t least = ~uint64_t{0};
    int found = 0;
    for (int j = 0; j < listed; ++j) {
      const uint64_t through = s.through[j];
      if (through <= target || through >= least) continue;
      least = through;
      found = j;
    }
    write(draw, KeyIndex(s.sorted[found]));
  }
}

// Draws from the whole row, as DrawUnfiltered does. Called by all threads.
template <class Row, class Write>
__device__ __forceinline__ void DrawMoreUnfiltered(const SampleRow& ask, const Row& row,
                                                   const DrawInput& in, DrawShared& s,
                                                   Write write) {
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const CellWeights weights(in.stats, in.cells, in.peak, in.log2e_over_temperature);
#pragma unroll 1
  for (int draw = 1 + warp; draw < ask.draws; draw += static_cast<int>(blockDim.x) / 32) {
    weights.FindCell(UniformBits(ask.seed, ask.position, draw), s.index_of_warp[warp],
                     s.value_of_warp[warp]);
    __syncwarp();
    const int cell = s.index_of_warp[warp];
    const double share = s.value_of_warp[warp];
    const Weigher weigh_cell(in.stats[cell].max, ask);
    const auto weigh = [&](float x, int) { return weigh_cell(x); };
    int token = 0;
    row.Cell(cell * kCell, [&]<class Element>(const LaneCell<Element>& x, int first) {
      const WeightsOfCell</*kInLoops=*/true, Element, decltype(weigh)> of_cell(x, first, weigh);
      token = of_cell.TokenAt(TargetInCell(share, of_cell.Total()), min(row.vocab, first + kCell));
    });
    if (threadIdx.x % 32 == 0) write(draw, token);
    __syncwarp();
  }
}

// Writes the tokens of a row that wants several, whose first is `drawn`. Log-probabilities are
// those of `support`, whose logits are the row `reported`. `in` is what `row` was drawn from. Uses
// the memory of bins. Called by all threads.
template <int kThreads, class Row>
__device__ __noinline__ void ReportDraws(const SampleArgs& args, const SampleRow& ask, Row row,
                                         DrawInput in, Drawn drawn, Row reported, Support support) {
  DrawShared& s = Finish().draw;
  AreInShared(in.stats, in.cell_sums);
  const auto write = [&](int draw, int token) {
    args.draw_tokens[ask.first_draw_entry + draw] = token;
    args.draw_logprobs[ask.first_draw_entry + draw] = support.Logprob(reported[token], token);
  };
  if (threadIdx.x == 0) write(0, drawn.token);
  if (ask.draws == 1) return;
  if (IsGreedy(ask)) {
    for (int draw = 1 + threadIdx.x; draw < ask.draws; draw += kThreads) write(draw, drawn.token);
    return;
  }
  __syncthreads();
  if (!IsFiltered(ask, row.vocab)) return DrawMoreUnfiltered(ask, row, in, s, write);
  const TokenWeights weigh{Weigher(in.peak, ask),
                           drawn.last,
                           /*greedy=*/false,
                           {},
                           ChoiceIsOn(ask) ? &s.chosen : nullptr};
  if (AreListed(row.vocab, in.listed, drawn.last, s))
    return DrawMoreListed<kThreads>(ask, in.listed, drawn.total, weigh, s, write);
  SumByCells(row, in.cell_sums, weigh);
#pragma unroll 1
  for (int draw = 1 + static_cast<int>(threadIdx.x) / 32; draw < ask.draws; draw += kThreads / 32) {
    const uint64_t target = DrawTarget(UniformBits(ask.seed, ask.position, draw), drawn.total);
    const int token = TokenOfCells(row, in.cell_sums, target, weigh);
    if (threadIdx.x % 32 == 0) write(draw, token);
  }
}

}  // namespace logitd::cuda

#endif  // LOGITD_KERNELS_CUDA_SAMPLING_DRAWS_CUH_
