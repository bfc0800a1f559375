// The routes of the linear ops: which kernel serves which op, dtype, device, head and number of
// rows.
//
// The first row of the table that matches serves. A match depends only on the op, the head and the
// device, so that a row's bits do not depend on other rows. Three choices are made later, where the
// call is known:
//
//   Which product on Hopper it is, and how it is cut, depends on the number of rows (hopper/few_rows.h,
//     middle_plan.h, schedule.h). The bits are the same.
//   Rows of linear_cross_entropy that want rank, entropy or top tokens need their logits. They take
//     the first route that makes logits (forward.cc).
//   A training call that does not fit into memory is two ops (training.cu).
//
// Devices without sm_90a multiply by cuBLASLt only. Nothing was measured on one.
#include "kernels/cuda/linear/routes.h"

#include "kernels/cuda/linear/hopper/kernels.h"

namespace logitd::cuda {
namespace {

bool AnyDType(DType) { return true; }

using enum LinearOp;
using enum LinearKernel;
constexpr bool kHopper = true;
constexpr bool kAnyDevice = false;
constexpr bool kPlainHead = true;
constexpr bool kAnyHead = false;
constexpr bool kCublasLt = true;
constexpr bool kNoLibrary = false;

constexpr LinearRoute kRoutes[] = {
    {kTokens, &Is16Bit, kHopper, kAnyHead, kHopperLogits, 512, kNoLibrary},
    {kTokens, &AnyDType, kAnyDevice, kAnyHead, kProduct, 64, kCublasLt},

    {kLosses, &Is16Bit, kHopper, kPlainHead, kHopperLosses, 0, kNoLibrary},
    {kLosses, &Is16Bit, kHopper, kAnyHead, kHopperLogits, 256, kNoLibrary},
    {kLosses, &Is16Bit, kAnyDevice, kAnyHead, kProduct, 256, kCublasLt},
    {kLosses, &AnyDType, kAnyDevice, kAnyHead, kProduct, 64, kCublasLt},

    {kGradients, &AnyDType, kAnyDevice, kAnyHead, kBackward, 0, kCublasLt},

    {kTraining, &Is16Bit, kHopper, kPlainHead, kHopperTraining, 0, kCublasLt},
    {kTraining, &AnyDType, kAnyDevice, kAnyHead, kTwoOps, 0, kCublasLt},
};

}  // namespace

const LinearRoute& RouteOf(LinearOp op, const HeadView& head, const Scratch& device, bool logits) {
  const bool hopper = hopper::KernelsRun(device);
  const bool plain_head = head.bias == nullptr && head.softcap == 0;
  const LinearRoute* route = kRoutes;
  while (route->op != op || !route->dtype(head.weight.dtype) || (route->hopper && !hopper) ||
         (route->plain_head && !plain_head) || (logits && route->block_rows == 0)) {
    ++route;
  }
  return *route;
}

}  // namespace logitd::cuda
