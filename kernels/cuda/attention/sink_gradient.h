// d_sinks of attention_softmax_backward, summed pass by pass.
#ifndef LOGITD_KERNELS_CUDA_ATTENTION_SINK_GRADIENT_H_
#define LOGITD_KERNELS_CUDA_ATTENTION_SINK_GRADIENT_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/attention_softmax.h"
#include "kernels/cuda/scratch.h"

namespace logitd::cuda::attention {

// The most rows of a pass: scratch has room for their dots on any device.
constexpr int64_t kSinkPassRows = int64_t{1} << 24;

struct SinkScratch {
  float* dots;   // [rows of a pass], sum of y dy of each row; the rows' kernels write it
  double* sums;  // parts of the heads' sums
};
SinkScratch TakeSinkScratch(const AttentionShape& shape, Scratch& scratch);

// Adds the terms of the call's rows [begin, begin + count) to d_sinks, which the first call with
// begin == 0 sets. `scratch.dots` holds those rows' sums.
cudaError_t AddSinkTerms(const AttentionSoftmaxBackwardArgs& args, int64_t begin, int64_t count,
                         const SinkScratch& scratch, cudaStream_t stream);

}  // namespace logitd::cuda::attention

#endif  // LOGITD_KERNELS_CUDA_ATTENTION_SINK_GRADIENT_H_
