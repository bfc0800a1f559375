// The CPU form of sample; the contract is kernels/sample.h.
#ifndef LOGITD_KERNELS_CPU_SAMPLING_SAMPLE_H_
#define LOGITD_KERNELS_CPU_SAMPLING_SAMPLE_H_

#include "kernels/cpu/sampling/sample_row.h"
#include "kernels/cpu/thread_pool.h"
#include "kernels/sample.h"

namespace logitd::cpu {

// Blocks until done. The bits of the result depend on neither the pool nor what else runs on it.
// `scratch` belongs to the caller's stream, and stays for its next call.
void Sample(const SampleArgs& args, ThreadPool& pool, SampleCallScratch& scratch);

}  // namespace logitd::cpu

#endif  // LOGITD_KERNELS_CPU_SAMPLING_SAMPLE_H_
