// Launchers of the CUDA ops, and the scratch memory they share. They enqueue and return: no
// allocation, no synchronisation, no logging. Pointers in the arguments are device memory.
#ifndef LOGITD_KERNELS_CUDA_OPS_H_
#define LOGITD_KERNELS_CUDA_OPS_H_

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstddef>

#include "kernels/attention_softmax.h"
#include "kernels/cross_entropy.h"
#include "kernels/linear.h"
#include "kernels/sample.h"
#include "kernels/softmax_topk.h"
#include "kernels/verify.h"

namespace logitd::cuda {

class Products;

// Device memory of one stream, used by one op at a time. The first kCounterBytes are zero between
// ops: a kernel that counts there leaves zeros behind.
struct Scratch {
  static constexpr size_t kCounterBytes = size_t{16} << 10;
  static constexpr size_t kMinBytes = size_t{96} << 20;  // one row of any op at its largest

  // A share of the device's memory: rows that an op works on in scratch go in fewer passes.
  static constexpr size_t BytesFor(size_t device_bytes) {
    return std::clamp(device_bytes / 64, kMinBytes, size_t{1} << 30);
  }

  std::byte* data = nullptr;
  size_t bytes = 0;
  int multiprocessors = 0;
  int block_shared_bytes = 0;  // the most dynamic shared memory a block may ask for
  bool clusters = false;       // blocks of a cluster can share memory: sm_90 and newer
};

// Hands out pieces of scratch, each aligned for any use here.
class Carver {
 public:
  explicit Carver(const Scratch& scratch)
      : at_(scratch.data + Scratch::kCounterBytes), left_(scratch.bytes - Scratch::kCounterBytes) {}
  size_t left() const { return left_; }
  template <class U>
  U* Take(size_t count) {
    const size_t bytes = (count * sizeof(U) + 255) / 256 * 256;
    if (bytes > left_) return nullptr;
    U* piece = reinterpret_cast<U*>(at_);
    at_ += bytes;
    left_ -= bytes;
    return piece;
  }

 private:
  std::byte* at_;
  size_t left_;
};

cudaError_t SoftmaxTopK(const SoftmaxTopKArgs& args, const Scratch& scratch, cudaStream_t stream);
cudaError_t Sample(const SampleArgs& args, const Scratch& scratch, cudaStream_t stream);
cudaError_t Verify(const VerifyArgs& args, const Scratch& scratch, cudaStream_t stream);
cudaError_t AttentionSoftmax(const AttentionSoftmaxArgs& args, const Scratch& scratch,
                             cudaStream_t stream);
cudaError_t AttentionSoftmaxBackward(const AttentionSoftmaxBackwardArgs& args,
                                     const Scratch& scratch, cudaStream_t stream);
cudaError_t CrossEntropy(const CrossEntropyArgs& args, const Scratch& scratch, cudaStream_t stream);
cudaError_t CrossEntropyBackward(const CrossEntropyBackwardArgs& args, cudaStream_t stream);

// The linear ops. Products is one of the stream's own, with a workspace of
// ProductWorkspaceBytes(scratch).
inline size_t ProductWorkspaceBytes(const Scratch& scratch) {
  return std::min(scratch.bytes / 16, size_t{32} << 20) / 256 * 256;
}
cudaError_t LinearTopK(const LinearTopKArgs& args, Products& products, const Scratch& scratch,
                       cudaStream_t stream);
cudaError_t LinearSample(const LinearSampleArgs& args, Products& products, const Scratch& scratch,
                         cudaStream_t stream);
cudaError_t LinearCrossEntropy(const LinearCrossEntropyArgs& args, Products& products,
                               const Scratch& scratch, cudaStream_t stream);
cudaError_t LinearCrossEntropyBackward(const LinearCrossEntropyBackwardArgs& args,
                                       Products& products, const Scratch& scratch,
                                       cudaStream_t stream);
cudaError_t LinearCrossEntropyTraining(const LinearCrossEntropyTrainingArgs& args,
                                       Products& products, const Scratch& scratch,
                                       cudaStream_t stream);

}  // namespace logitd::cuda

#endif  // LOGITD_KERNELS_CUDA_OPS_H_
