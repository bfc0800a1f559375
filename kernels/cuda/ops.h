// Launchers of the CUDA ops. They enqueue and return: no allocation, no synchronisation, no
// logging. Pointers in the arguments are device memory.
#ifndef LOGITD_KERNELS_CUDA_OPS_H_
#define LOGITD_KERNELS_CUDA_OPS_H_

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstddef>

#include "kernels/attention_softmax.h"
#include "kernels/cross_entropy.h"
#include "kernels/cuda/scratch.h"
#include "kernels/divergence.h"
#include "kernels/divergence_training.h"
#include "kernels/linear.h"
#include "kernels/sample.h"
#include "kernels/softmax_topk.h"
#include "kernels/verify.h"

namespace logitd::cuda {

class Products;

cudaError_t SoftmaxTopK(const SoftmaxTopKArgs& args, const Scratch& scratch, cudaStream_t stream);
cudaError_t Sample(const SampleArgs& args, const Scratch& scratch, cudaStream_t stream);
cudaError_t Verify(const VerifyArgs& args, const Scratch& scratch, cudaStream_t stream);
cudaError_t AttentionSoftmax(const AttentionSoftmaxArgs& args, const Scratch& scratch,
                             cudaStream_t stream);
cudaError_t AttentionSoftmaxBackward(const AttentionSoftmaxBackwardArgs& args,
                                     const Scratch& scratch, cudaStream_t stream);
cudaError_t CrossEntropy(const CrossEntropyArgs& args, const Scratch& scratch, cudaStream_t stream);
cudaError_t CrossEntropyBackward(const CrossEntropyBackwardArgs& args, cudaStream_t stream);
cudaError_t Divergence(const DivergenceArgs& args, const Scratch& scratch, cudaStream_t stream);
// Only the top tokens, of rows whose norms and statuses are there.
cudaError_t TopsOfDivergence(const DivergenceArgs& args, const Scratch& scratch,
                             cudaStream_t stream);

// The linear ops. `products` belongs to the stream and has a workspace of
// ProductWorkspaceBytes(scratch) bytes.
inline size_t ProductWorkspaceBytes(const Scratch& scratch) {
  return std::min(scratch.bytes / 16, size_t{32} << 20) / 256 * 256;
}
cudaError_t LinearTopK(const LinearTopKArgs& args, Products& products, const Scratch& scratch,
                       cudaStream_t stream);
cudaError_t LinearSample(const LinearSampleArgs& args, Products& products, const Scratch& scratch,
                         cudaStream_t stream);
cudaError_t LinearVerify(const LinearVerifyArgs& args, Products& products, const Scratch& scratch,
                         cudaStream_t stream);
cudaError_t LinearCrossEntropy(const LinearCrossEntropyArgs& args, Products& products,
                               const Scratch& scratch, cudaStream_t stream);
cudaError_t LinearDivergence(const LinearDivergenceArgs& args, Products& products,
                             const Scratch& scratch, cudaStream_t stream);
cudaError_t LinearDivergenceTraining(const LinearDivergenceTrainingArgs& args, Products& products,
                                     const Scratch& scratch, cudaStream_t stream);
cudaError_t LinearCrossEntropyBackward(const LinearCrossEntropyBackwardArgs& args,
                                       Products& products, const Scratch& scratch,
                                       cudaStream_t stream);
cudaError_t LinearCrossEntropyTraining(const LinearCrossEntropyTrainingArgs& args,
                                       Products& products, const Scratch& scratch,
                                       cudaStream_t stream);

}  // namespace logitd::cuda

#endif  // LOGITD_KERNELS_CUDA_OPS_H_
