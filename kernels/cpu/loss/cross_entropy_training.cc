// cross_entropy_training on the CPU: where there are many rows, a thread writes a row's gradient
// just after its loss, while the logits are in its cache.
//
// Cost: reads and writes the logits once each where a row fits into a cache of the core.
#include "kernels/cpu/loss/cross_entropy.h"

namespace logitd::cpu {

void CrossEntropyTraining(const CrossEntropyTrainingArgs& args, ThreadPool& pool,
                          LossScratch& scratch) {
  const TensorView& logits = args.loss.logits;
  const CrossEntropyBackwardArgs backward = args.Backward();
  if (!TakesWholeRows(logits.rows, logits.cols, pool)) {
    CrossEntropy(args.loss, pool, scratch);
    CrossEntropyBackward(backward, pool);
    return;
  }
  ForWholeRows(logits.rows, logits.cols, pool, [&](int64_t r) {
    CrossEntropyOfRow(args.loss, r);
    CrossEntropyBackwardOfRow(backward, r);
  });
}

}  // namespace logitd::cpu
