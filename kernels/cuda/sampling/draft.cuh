// verify, at a row of the target: whether its draft token is accepted, and what is drawn where it
// is not (kernels/verify.h).
#ifndef LOGITD_KERNELS_CUDA_SAMPLING_DRAFT_CUH_
#define LOGITD_KERNELS_CUDA_SAMPLING_DRAFT_CUH_

#include "kernels/cuda/sampling/draw_row.cuh"

namespace logitd::cuda {

// What a draft was drawn from, as integers of the target's scale.
struct DraftMass {
  const int32_t* ids;  // null: a probability for each token
  const float* probs;
  int count;
  double scale;

  __device__ uint64_t operator()(int token) const {
    int at = token;
    if (ids != nullptr) {
      int low = 0, high = count;
      while (low < high) {
        const int middle = (low + high) / 2;
        if (ids[middle] < token) {
          low = middle + 1;
        } else {
          high = middle;
        }
      }
      if (low == count || ids[low] != token) return 0;
      at = low;
    }
    return DraftWeight(probs[at], scale);
  }
};

// Tests row r's draft, which was drawn from known probabilities. `drawn` is what sample draws from
// the row; its token becomes the draft, or what the residual distribution gives. Called by all
// threads.
template <class Row>
__device__ __forceinline__ void TestDraft(const SampleParams& p, const SampleRow& ask,
                                          const VerifyDraft& draft, const Row& row,
                                          const Weigher& weigh, const DrawInput& in, Drawn& drawn) {
  const bool greedy = IsGreedy(ask);
  const Key last = drawn.last;
  uint64_t* cell_sums = in.cell_sums;
  const auto weigh_target = [=](float x, int i) {
    if (MakeKey(x, i) < last) return uint64_t{0};
    return greedy ? uint64_t{1} << kWeightBits : weigh(x);
  };
  if (!greedy && !IsFiltered(ask, row.vocab)) {  // the distribution as integers
    drawn.total = SumByCells(row, cell_sums, weigh_target);
    drawn.log_sum = log(static_cast<double>(drawn.total) / kWeightOne);
  }
  const DraftMass mass{draft.kind == DraftKind::kList ? p.draft_ids + draft.first_id : nullptr,
                       p.draft_probs + draft.first_prob, draft.count,
                       static_cast<double>(drawn.total)};
  const uint64_t coin = MulHigh(CoinBits(ask.seed, ask.position), mass(draft.token));
  if (coin < weigh_target(row[draft.token], draft.token)) {
    drawn.token = draft.token;
    return;
  }
  const auto weigh_residual = [=](float x, int i) {
    const uint64_t weight = weigh_target(x, i);
    return weight == 0 ? uint64_t{0} : weight - min(weight, mass(i));
  };
  const uint64_t residual = SumByCells(row, cell_sums, weigh_residual);
  if (residual > 0) {
    drawn.token = TokenByCells(row, cell_sums, DrawTarget(in.bits, residual), weigh_residual);
  } else {  // the two distributions differ only by rounding: then the target's own
    SumByCells(row, cell_sums, weigh_target);
    drawn.token = TokenByCells(row, cell_sums, DrawTarget(in.bits, drawn.total), weigh_target);
  }
}

}  // namespace logitd::cuda

#endif  // LOGITD_KERNELS_CUDA_SAMPLING_DRAFT_CUH_
