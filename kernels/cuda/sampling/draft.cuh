// verify, at a row of the target: whether its draft token is accepted, and what is drawn where it
// is not (kernels/verify.h).
#ifndef LOGITD_KERNELS_CUDA_SAMPLING_DRAFT_CUH_
#define LOGITD_KERNELS_CUDA_SAMPLING_DRAFT_CUH_

#include "kernels/cuda/sampling/draw_row.cuh"

namespace logitd::cuda {

// The target's weights times `share`, less the draft's q: max(share W - Q, 0).
struct SharedWeights {
  TokenWeights target;
  DraftMass less;
  double share;

  __device__ uint64_t operator()(float x, int i) const {
    const uint64_t weight = WeightOfShare(share, target(x, i));
    return weight == 0 ? 0 : weight - min(weight, less(i));
  }
};

// The launch's step of block verification at a row's draft. `drawn.total` is the sum of all
// weights of `target`. Returns `drawn`, in the last step with the row's token. Called by all
// threads.
template <class Row>
__device__ __noinline__ Drawn VerifyInBlock(BlockStep step, BlockRow& block, int draft, Row row,
                                            TokenWeights target, DraftMass less, DrawInput in,
                                            Drawn drawn) {
  const SharedWeights left{target, less, block.share};
  switch (step) {
    case BlockStep::kWeigh:
      if (threadIdx.x == 0) {
        block.weight = target(row[draft], draft);
        block.mass = less(draft);
      }
      return drawn;
    case BlockStep::kSum: {
      const uint64_t sum = SumByCells(row, in.cell_sums, left);
      if (threadIdx.x == 0) {
        block.left = sum;
        block.total = drawn.total;
      }
      return drawn;
    }
    case BlockStep::kEmit:
      break;
  }
  if (block.place == BlockPlace::kBefore) drawn.token = draft;
  if (block.place != BlockPlace::kBonus) return drawn;
  const uint64_t sum = SumByCells(row, in.cell_sums, left);
  if (sum > 0) {
    drawn.token = TokenByCells(row, in.cell_sums, DrawTarget(in.bits, sum), left);
  } else {  // as in TestDraft
    SumByCells(row, in.cell_sums, target);
    drawn.token = TokenByCells(row, in.cell_sums, DrawTarget(in.bits, drawn.total), target);
  }
  return drawn;
}

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
  if constexpr (Row::kMayAskMore) {
    if (p.block_rows != nullptr) {
      BlockRow& block = p.block_rows[&draft - p.drafts];
      if (block.place != BlockPlace::kNone)
        return VerifyInBlock(p.block_step, block, draft.token, row, target, residual.less, in,
                             drawn);
    }
  }
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
