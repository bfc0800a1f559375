// The logits of blocks of rows under two heads over one vocabulary, in scratch.
#ifndef LOGITD_KERNELS_CUDA_LINEAR_PAIR_LOGITS_H_
#define LOGITD_KERNELS_CUDA_LINEAR_PAIR_LOGITS_H_

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <optional>

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/linear/block_logits.h"
#include "kernels/cuda/linear/hopper/middle_plan.h"
#include "kernels/cuda/linear/routes.h"
#include "kernels/head.h"

namespace logitd::cuda {

// Takes pieces of `scratch`. Keeps references to what it is given. An empty head (0 tokens) has no
// logits to make: those of its rows are given.
class PairLogits {
 public:
  PairLogits(const HeadView& head, const HeadView& reference, Products& products, Scratch& scratch,
             cudaStream_t stream) {
    const int64_t hopper_rows = HopperRows(head, reference, scratch);
    const auto prepare = [&](const HeadView& of, std::optional<BlockLogits>& to) {
      if (of.vocab() == 0) return;
      LinearRoute route = RouteOfLogits(of, scratch);
      if (hopper_rows > 0) route.block_rows = static_cast<int>(hopper_rows);
      const int scratch_share = hopper_rows > 0 ? 2 : 4;  // HopperRows left room for both
      to.emplace(of, of.vocab(), route, scratch_share, products, scratch, stream);
      rows_ = std::min(rows_, to->rows());
    };
    prepare(head, logits_);
    prepare(reference, reference_);
  }

  // Rows of a block. They do not depend on the call.
  int64_t rows() const { return rows_; }

  // Makes `x` and `y` views of the logits of `rows` rows, from row `first` on, of both inputs, with
  // these hidden states; under an empty head, of the logits that its view is of. `scratch` is what
  // the constructor left.
  cudaError_t Make(const TensorView& hidden, const TensorView& reference_hidden, int64_t first,
                   int64_t rows, const Scratch& scratch, TensorView* x, TensorView* y) const {
    const auto make = [&](const std::optional<BlockLogits>& from, const TensorView& states,
                          TensorView* logits) {
      *logits = from.has_value() ? from->View(rows) : RowsOf(*logits, first, rows);
      return from.has_value() ? from->Make(RowsOf(states, first, rows), scratch) : cudaSuccess;
    };
    const cudaError_t error = make(logits_, hidden, x);
    return error == cudaSuccess ? make(reference_, reference_hidden, y) : error;
  }

 private:
  static LinearRoute RouteOfLogits(const HeadView& head, const Scratch& scratch) {
    return RouteOf(LinearOp::kTokens, head, scratch, /*logits=*/true);
  }

  // Rows of a block where Hopper's kernel makes the logits of both heads: whole groups of its rows,
  // as many as leave 3/8 of scratch to others. 0: those of the routes.
  static int64_t HopperRows(const HeadView& head, const HeadView& reference,
                            const Scratch& scratch) {
    constexpr int64_t kGroup = hopper::kMiddleBlocks * hopper::kMostMiddleBlockRows;
    constexpr int64_t kMostGroups = 4;
    for (const HeadView* const of : {&head, &reference}) {
      if (of->vocab() == 0 || RouteOfLogits(*of, scratch).kernel != LinearKernel::kHopperLogits) {
        return 0;
      }
    }
    const int64_t group_bytes = 2 * 4 * RoundUp(head.vocab(), 32) * kGroup;
    return kGroup *
           std::min(kMostGroups, static_cast<int64_t>(scratch.bytes) / 8 * 5 / group_bytes);
  }

  std::optional<BlockLogits> logits_, reference_;
  int64_t rows_ = std::numeric_limits<int64_t>::max();
};

}  // namespace logitd::cuda

#endif  // LOGITD_KERNELS_CUDA_LINEAR_PAIR_LOGITS_H_
