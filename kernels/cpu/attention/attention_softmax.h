// The CPU form of attention_softmax; the contract is kernels/attention_softmax.h.
#ifndef LOGITD_KERNELS_CPU_ATTENTION_ATTENTION_SOFTMAX_H_
#define LOGITD_KERNELS_CPU_ATTENTION_ATTENTION_SOFTMAX_H_

#include "kernels/attention_softmax.h"
#include "kernels/cpu/rows/lanes.h"
#include "kernels/cpu/thread_pool.h"

namespace logitd::cpu {

// Blocks until done. The bits of the result depend on neither the pool nor what else runs on it.
void AttentionSoftmax(const AttentionSoftmaxArgs& args, ThreadPool& pool);

// As above. Only the caller may use `scratch` during the call; it is used where there are sinks.
void AttentionSoftmaxBackward(const AttentionSoftmaxBackwardArgs& args, ThreadPool& pool,
                              Buffer<double>& scratch);

}  // namespace logitd::cpu

#endif  // LOGITD_KERNELS_CPU_ATTENTION_ATTENTION_SOFTMAX_H_
