// The gradients of linear_cross_entropy on a head that is cut over several devices.
#ifndef LOGITD_KERNELS_SHARD_GRADIENTS_H_
#define LOGITD_KERNELS_SHARD_GRADIENTS_H_

#include "kernels/cross_entropy.h"
#include "kernels/linear.h"
#include "kernels/shards.h"
#include "kernels/types.h"

namespace logitd {

// The backward of linear_cross_entropy has two halves, as the ops of kernels/shards.h have. The
// gradients of a shard's weight and bias stay with the shard: each needs only the rows' hidden
// states, and their logsumexp, which the merge of the forward gives. d_hidden is a sum over all
// tokens: each shard writes the part of its own, in fp32, one exchange gathers the parts of all, in
// the order of the shards, and the merge adds them in that order.
//
// Bits are the same from run to run. On the CPU d_weight and d_bias are those of one device,
// whatever the number of shards. d_hidden is not, as fp32 sums begin anew with every shard, and on
// CUDA neither is d_weight, as the products have other shapes. The accuracy is that of one device,
// with one more rounding of d_hidden for each shard. An exchange that adds the parts in another
// order, as an all-reduce does, is as good; its bits are its own. linear_cross_entropy_training has
// no halves: a ShardedStream (kernels/sharded_stream.h) runs it, others the forward and the
// backward.

// Writes the gradients of one shard.
struct LinearCrossEntropyBackwardPartialArgs {
  VocabShard shard;   // any tokens of the vocabulary: they need not be whole cells
  int64_t vocab = 0;  // of all shards
  // As in LinearCrossEntropyBackwardArgs, with the head, d_weight [tokens, hidden] and d_bias
  // [tokens] of the shard, and its part of d_hidden: f32 [rows, hidden]. Skipped rows of the part
  // are unspecified.
  LinearCrossEntropyBackwardArgs gradient;
};

struct LinearCrossEntropyBackwardMergeArgs {
  int shards = 1;
  const float* parts = nullptr;           // [shards, rows, hidden] of d_hidden
  const CrossEntropyRow* rows = nullptr;  // [rows], as in the partial
  MutableTensorView d_hidden;             // as in LinearCrossEntropyBackwardArgs
};

}  // namespace logitd

#endif  // LOGITD_KERNELS_SHARD_GRADIENTS_H_
