// The launcher of every op, and how one is enqueued.
#ifndef LOGITD_KERNELS_CUDA_LAUNCHERS_H_
#define LOGITD_KERNELS_CUDA_LAUNCHERS_H_

#include <cuda_runtime_api.h>

#include <string_view>
#include <type_traits>
#include <variant>

#include "absl/status/status.h"
#include "kernels/cuda/linear/product.h"
#include "kernels/cuda/linear/routes.h"
#include "kernels/cuda/linear/shards.h"
#include "kernels/cuda/loss/cross_entropy_training.h"
#include "kernels/cuda/ops.h"
#include "kernels/cuda/stream.h"
#include "kernels/ops.h"
#include "kernels/status_macros.h"

namespace logitd::cuda {

// A launcher, which is found by the arguments that it takes.
template <class Args, class... More>
struct Launcher {
  constexpr Launcher(cudaError_t (*launch)(const Args&, More...), LinearOp op = {})
      : launch(launch), linear_op(op) {}
  constexpr const Launcher& operator()(const Args&) const { return *this; }

  cudaError_t (*launch)(const Args&, More...);
  LinearOp linear_op;  // of those that take products
};

inline constexpr Overloaded kLaunchers = {
    Launcher(&SoftmaxTopK),
    Launcher(&Sample),
    Launcher(&Verify),
    Launcher(&AttentionSoftmax),
    Launcher(&AttentionSoftmaxBackward),
    Launcher(&CrossEntropy),
    Launcher(&CrossEntropyBackward),
    Launcher(&CrossEntropyTraining),
    Launcher(&Divergence),
    Launcher(&LinearTopK, LinearOp::kTokens),
    Launcher(&LinearSample, LinearOp::kTokens),
    Launcher(&LinearVerify, LinearOp::kTokens),
    Launcher(&LinearCrossEntropy, LinearOp::kLosses),
    Launcher(&LinearCrossEntropyBackward, LinearOp::kGradients),
    Launcher(&LinearCrossEntropyTraining, LinearOp::kTraining),
    Launcher(&LinearDivergence, LinearOp::kTokens),
    Launcher(&LinearDivergenceTraining, LinearOp::kGradients),
    Launcher(&LinearTopKPartial, LinearOp::kTokens),
    Launcher(&LinearTopKMerge),
    Launcher(&LinearSamplePartial, LinearOp::kTokens),
    Launcher(&LinearSampleMerge),
    Launcher(&LinearVerifyMerge),
    Launcher(&LinearDivergenceMerge),
    Launcher(&LinearCrossEntropyTargets, LinearOp::kLosses),
    Launcher(&LinearCrossEntropyPartial, LinearOp::kLosses),
    Launcher(&LinearCrossEntropyMerge),
    Launcher(&LinearSupportMerge),
    Launcher(&LinearCrossEntropyBackwardPartial, LinearOp::kGradients),
    Launcher(&LinearCrossEntropyBackwardMerge),
    Launcher(&ShardLogits, LinearOp::kTokens),
    Launcher(&KeptSamplePartial, LinearOp::kTokens),
    Launcher(&KeptSampleMerge),
};

// The part of the head that the device has.
template <class Args>
const HeadView& HeadOf(const Args& args) {
  if constexpr (requires { args.head; }) {
    return args.head;
  } else if constexpr (requires { args.gradient; }) {
    return args.gradient.head;
  } else {
    return args.training.gradient.head;
  }
}

// Memory and libraries that ops on a stream use.
struct OpMeans {
  Products& products;
  const absl::Status& products_status;  // not OK: cuBLASLt is missing; the answer of ops with it
  const Scratch& scratch;
};

// Enqueues an op on the thread's device. `launch` takes the arguments and the stream; before the
// stream it may take the scratch, or products and the scratch. UNAVAILABLE where the route of
// `linear_op` needs cuBLASLt and there is none.
template <class Launch, class Args>
absl::Status Enqueue(std::string_view name, const Launch& launch, const Args& args,
                     [[maybe_unused]] LinearOp linear_op, const OpMeans& means,
                     cudaStream_t stream) {
  if constexpr (std::is_invocable_v<Launch, const Args&, cudaStream_t>) {
    return ToStatus(launch(args, stream), name);
  } else if constexpr (std::is_invocable_v<Launch, const Args&, const Scratch&, cudaStream_t>) {
    return ToStatus(launch(args, means.scratch, stream), name);
  } else {
    bool multiplies = RouteOf(linear_op, HeadOf(args), means.scratch).cublas_lt;
    if constexpr (requires { args.reference_head; }) {
      const auto by = [&](const HeadView& head) {
        return head.vocab() > 0 && RouteOf(linear_op, head, means.scratch).cublas_lt;
      };
      multiplies = by(args.head) || by(args.reference_head);
    }
    if (multiplies) LOGITD_RETURN_IF_ERROR(means.products_status);
    return ToStatus(launch(args, means.products, means.scratch, stream), name);
  }
}

}  // namespace logitd::cuda

#endif  // LOGITD_KERNELS_CUDA_LAUNCHERS_H_
