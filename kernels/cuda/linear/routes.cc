// The routes of the linear ops: which kernel serves which op, dtype, device, head and number of
// rows.
//
// A route depends only on the op, the head and the device, so that a row's bits do not depend on
// other rows. Three choices are made later, where the call is known:
//
//   Which product on Hopper it is, and how it is cut, depends on the number of rows
//     (hopper/few_rows.h, middle_plan.h, schedule.h). The bits are the same.
//   Rows of linear_cross_entropy that want rank, entropy or top tokens need their logits. They take
//     the route that makes logits (forward.cc).
//   A training call that does not fit into memory is two ops (training.cu).
//
// Devices without sm_90a multiply by cuBLASLt only. Nothing was measured on one.
#include "kernels/cuda/linear/routes.h"

#include "kernels/cuda/linear/hopper/kernels.h"

namespace logitd::cuda {

LinearRoute RouteOf(LinearOp op, const HeadView& head, const Scratch& device, bool logits) {
  using enum LinearKernel;
  const auto by_product = [](int rows) {
    return LinearRoute{.kernel = kProduct, .block_rows = rows, .cublas_lt = true};
  };
  const bool is_16_bit = Is16Bit(head.weight.dtype);
  const bool hopper = is_16_bit && hopper::KernelsRun(device);
  const bool plain_head = head.bias == nullptr && head.softcap == 0;
  switch (op) {
    case LinearOp::kTokens:
      return hopper ? LinearRoute{.kernel = kHopperLogits, .block_rows = 512} : by_product(64);
    case LinearOp::kLosses:
      if (!hopper) return by_product(is_16_bit ? 256 : 64);
      if (plain_head && !logits) return {.kernel = kHopperLosses};
      return {.kernel = kHopperLogits, .block_rows = 256};
    case LinearOp::kGradients:
      return {.kernel = kBackward, .cublas_lt = true};
    case LinearOp::kTraining:
      return {.kernel = hopper && plain_head ? kHopperTraining : kTwoOps, .cublas_lt = true};
  }
  __builtin_unreachable();
}

bool IsHopperDivergence(const HeadView& head, const HeadView& reference, const Scratch& device) {
  const auto served = [&](const HeadView& of) {
    return of.vocab() > 0 && of.scale > 0 &&
           RouteOf(LinearOp::kLosses, of, device).kernel == LinearKernel::kHopperLosses;
  };
  return served(head) && served(reference) && head.weight.dtype == reference.weight.dtype &&
         hopper::HaveRoomForDivergences(head.vocab(), device);
}

}  // namespace logitd::cuda
