// Which rows of linear_cross_entropy go through logits where hopper/loss.cu takes the others.
#ifndef LOGITD_KERNELS_CUDA_LINEAR_SPLIT_ROWS_H_
#define LOGITD_KERNELS_CUDA_LINEAR_SPLIT_ROWS_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/cross_entropy.h"
#include "kernels/cuda/scratch.h"

namespace logitd::cuda {

// A row is skipped in the list of the other kind.
struct SplitRowLists {
  CrossEntropyRow* plain;  // rows that want only losses and extras
  CrossEntropyRow* more;
  int32_t* plain_groups;  // one for every hopper::kLossGroupRows rows: whether one of them is plain
};

// Fills lists in pieces of `scratch` from rows [count].
cudaError_t SplitRows(const CrossEntropyRow* rows, int64_t count, SplitRowLists& lists,
                      Scratch& scratch, cudaStream_t stream);

}  // namespace logitd::cuda

#endif  // LOGITD_KERNELS_CUDA_LINEAR_SPLIT_ROWS_H_
