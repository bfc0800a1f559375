// Which kernel serves a linear op: routes.cc is the only place that decides.
#ifndef LOGITD_KERNELS_CUDA_LINEAR_ROUTES_H_
#define LOGITD_KERNELS_CUDA_LINEAR_ROUTES_H_

#include <cstdint>

#include "kernels/cuda/scratch.h"
#include "kernels/head.h"
#include "kernels/types.h"

namespace logitd::cuda {

enum class LinearOp : uint8_t {
  kTokens,     // linear_topk, linear_sample, linear_verify; linear_divergence where it makes logits
  kLosses,     // linear_cross_entropy
  kGradients,  // its backward
  kTraining,   // both in one
};

enum class LinearKernel : uint8_t {
  // The logits of a block of rows in scratch, then the op that takes logits.
  kHopperLogits,  // hopper/logits.cu
  kProduct,       // cuBLASLt (product.h)
  // Without logits of whole rows.
  kHopperLosses,    // hopper/loss.cu
  kBackward,        // backward.cu
  kHopperTraining,  // training.cu
  kTwoOps,          // the routes of kLosses and kGradients, one after the other
};

struct LinearRoute {
  LinearKernel kernel;
  // Rows whose logits are made at once, fewer where scratch is small; 0: no logits.
  int block_rows = 0;
  bool cublas_lt = false;  // it does not run without cuBLASLt
};

// The route of all calls of `op` with this head on this device. logits: only routes that make
// logits.
LinearRoute RouteOf(LinearOp op, const HeadView& head, const Scratch& device, bool logits = false);

// True where hopper/divergence.cu serves all calls of linear_divergence with these heads on this
// device. Other calls make logits.
bool IsHopperDivergence(const HeadView& head, const HeadView& reference, const Scratch& device);

}  // namespace logitd::cuda

#endif  // LOGITD_KERNELS_CUDA_LINEAR_ROUTES_H_
