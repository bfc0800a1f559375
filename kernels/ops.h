// The ops that streams run. An op is known by the type of its arguments.
#ifndef LOGITD_KERNELS_OPS_H_
#define LOGITD_KERNELS_OPS_H_

#include <string_view>
#include <type_traits>
#include <variant>

#include "absl/status/status.h"
#include "kernels/attention_softmax.h"
#include "kernels/cross_entropy.h"
#include "kernels/cross_entropy_training.h"
#include "kernels/divergence.h"
#include "kernels/divergence_training.h"
#include "kernels/linear.h"
#include "kernels/sample.h"
#include "kernels/shard_gradients.h"
#include "kernels/shards.h"
#include "kernels/softmax_topk.h"
#include "kernels/verify.h"

namespace logitd {

namespace cuda {  // linear/shards.h; other backends have no such ops
struct ShardLogitsArgs;
struct KeptSamplePartialArgs;
struct KeptSampleMergeArgs;
}  // namespace cuda

// An op and its arguments, which the caller owns.
using Op = std::variant<
    const SoftmaxTopKArgs*, const SampleArgs*, const VerifyArgs*, const AttentionSoftmaxArgs*,
    const AttentionSoftmaxBackwardArgs*, const CrossEntropyArgs*, const CrossEntropyBackwardArgs*,
    const CrossEntropyTrainingArgs*, const DivergenceArgs*, const LinearTopKArgs*,
    const LinearSampleArgs*, const LinearVerifyArgs*, const LinearCrossEntropyArgs*,
    const LinearCrossEntropyBackwardArgs*, const LinearCrossEntropyTrainingArgs*,
    const LinearDivergenceArgs*, const LinearDivergenceTrainingArgs*,
    // The halves of linear ops on a sharded head: kernels/shards.h.
    const LinearTopKPartialArgs*, const LinearTopKMergeArgs*, const LinearSamplePartialArgs*,
    const LinearSampleMergeArgs*, const LinearVerifyMergeArgs*, const LinearDivergenceMergeArgs*,
    const LinearCrossEntropyTargetsArgs*, const LinearCrossEntropyPartialArgs*,
    const LinearCrossEntropyMergeArgs*, const LinearSupportMergeArgs*,
    const LinearCrossEntropyBackwardPartialArgs*, const LinearCrossEntropyBackwardMergeArgs*,
    const cuda::ShardLogitsArgs*, const cuda::KeptSamplePartialArgs*,
    const cuda::KeptSampleMergeArgs*>;

// The name of an op in errors.
std::string_view NameOf(const Op& op);

// UNIMPLEMENTED: this backend has no such op.
absl::Status NoSuchOp(const Op& op);

// Functions of different arguments as one.
template <class... Functions>
struct Overloaded : Functions... {
  using Functions::operator()...;
};
template <class... Functions>  // clang 14 does not deduce them for an aggregate
Overloaded(Functions...)->Overloaded<Functions...>;

// run(arguments) where `run` takes the op's, else NoSuchOp.
template <class Run>
absl::Status RunIfKnown(const Op& op, const Run& run) {
  return std::visit(
      [&](const auto* args) -> absl::Status {
        if constexpr (std::is_invocable_v<const Run&, decltype(*args)>) {
          return run(*args);
        } else {
          return NoSuchOp(args);
        }
      },
      op);
}

}  // namespace logitd

#endif  // LOGITD_KERNELS_OPS_H_
