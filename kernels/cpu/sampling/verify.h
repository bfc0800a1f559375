// The CPU form of verify; the contract is kernels/verify.h.
#ifndef LOGITD_KERNELS_CPU_SAMPLING_VERIFY_H_
#define LOGITD_KERNELS_CPU_SAMPLING_VERIFY_H_

#include "kernels/cpu/thread_pool.h"
#include "kernels/verify.h"

namespace logitd::cpu {

// Blocks until done. The bits of the result depend on neither the pool nor what else runs on it.
void Verify(const VerifyArgs& args, ThreadPool& pool);

}  // namespace logitd::cpu

#endif  // LOGITD_KERNELS_CPU_SAMPLING_VERIFY_H_
