// The CPU form of softmax_topk; the contract is kernels/softmax_topk.h.
#ifndef LOGITD_KERNELS_CPU_SAMPLING_SOFTMAX_TOPK_H_
#define LOGITD_KERNELS_CPU_SAMPLING_SOFTMAX_TOPK_H_

#include <cstdint>

#include "kernels/cpu/rows/sketch.h"
#include "kernels/cpu/thread_pool.h"
#include "kernels/softmax_topk.h"

namespace logitd::cpu {

// Name of the instruction set the op was dispatched to, e.g. "AVX3".
const char* SimdTarget();

// Blocks until done. The bits of the result depend on neither the pool nor what else runs on it.
// Only the caller may use `scratch` during the call; it is used where rows are few and split over
// threads.
void SoftmaxTopK(const SoftmaxTopKArgs& args, ThreadPool& pool, SketchScratch& scratch);

}  // namespace logitd::cpu

#endif  // LOGITD_KERNELS_CPU_SAMPLING_SOFTMAX_TOPK_H_
