// verify, at a row of the target: whether its draft token is accepted, and what is drawn where it
// is not (kernels/verify.h).
#ifndef LOGITD_KERNELS_CUDA_SAMPLING_DRAFT_CUH_
#define LOGITD_KERNELS_CUDA_SAMPLING_DRAFT_CUH_

#include "kernels/cuda/sampling/draw_row.cuh"

namespace logitd::cuda {

// Tests row r's draft, which was drawn from known probabilities. `drawn` is what sample draws from
// the row. Returns it with the draft as its token, or with what the residual distribution gives.
// Called by all threads.
template <class Row>
__device__ __noinline__ Drawn TestDraft(const SampleParams& p, const SampleRow& ask,
                                        const VerifyDraft& draft, Row row, Weigher weigh,
                                        DrawInput in, Drawn drawn) {
  const TokenWeights target{weigh,
                            drawn.last,
                            IsGreedy(ask),
                            {},
                            Row::kMayAskMore && ChoiceIsOn(ask) ? &Finish().draw.chosen : nullptr};
  if (!IsGreedy(ask) && !IsFiltered(ask, row.vocab)) {  // the distribution as integers
    drawn.total = SumByCells(row, in.cell_sums, target);
    drawn.log_sum = log(static_cast<double>(drawn.total) / kWeightOne);
  }
  TokenWeights residual = target;
  residual.less = {draft.kind == DraftKind::kList ? p.draft_ids + draft.first_id : nullptr,
                   p.draft_probs + draft.first_prob, draft.count, static_cast<double>(drawn.total)};
  const uint64_t coin = MulHigh(CoinBits(ask.seed, ask.position), residual.less(draft.token));
  if (coin < target(row[draft.token], draft.token)) {
    drawn.token = draft.token;
    return drawn;
  }
  uint64_t total = SumByCells(row, in.cell_sums, residual);
  if (total == 0) {  // the two distributions differ only by rounding: then the target's own
    residual = target;
    SumByCells(row, in.cell_sums, target);
    total = drawn.total;
  }
  drawn.token = TokenByCells(row, in.cell_sums, DrawTarget(in.bits, total), residual);
  return drawn;
}

}  // namespace logitd::cuda

#endif  // LOGITD_KERNELS_CUDA_SAMPLING_DRAFT_CUH_
