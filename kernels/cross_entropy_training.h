// cross_entropy_training: per-token losses of rows of logits, and their gradient, in one call.
#ifndef LOGITD_KERNELS_CROSS_ENTROPY_TRAINING_H_
#define LOGITD_KERNELS_CROSS_ENTROPY_TRAINING_H_

#include "kernels/cross_entropy.h"
#include "kernels/types.h"

namespace logitd {

// cross_entropy, then its backward with the logsumexp just written, in one call. Answers, statuses,
// gradients, their bits and their accuracy are those of the two ops. A row is read twice: for the
// losses from memory, for the gradient from a cache (on CUDA L2) where one holds it,
// loss.max_top_logprobs is 0 and that is faster than the two calls.
//
// Errors: as cross_entropy; CheckCrossEntropy checks the parameters. All pointers are in the memory
// of the backend that runs the op.
struct CrossEntropyTrainingArgs {
  CrossEntropyArgs loss;
  const float* upstream = nullptr;  // [rows], d total / d loss of the row
  MutableTensorView d_logits;       // as in CrossEntropyBackwardArgs: may be the logits themselves
  bool softcap = false;             // whether a row has one: picks kernels, never the bits

  CrossEntropyBackwardArgs Backward() const {
    return {.logits = loss.logits,
            .rows = loss.rows,
            .logsumexp = loss.answers.logsumexp,
            .upstream = upstream,
            .d_logits = d_logits};
  }
};

}  // namespace logitd

#endif  // LOGITD_KERNELS_CROSS_ENTROPY_TRAINING_H_
