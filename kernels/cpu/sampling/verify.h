// The CPU form of verify; the contract is kernels/verify.h.
#ifndef LOGITD_KERNELS_CPU_SAMPLING_VERIFY_H_
#define LOGITD_KERNELS_CPU_SAMPLING_VERIFY_H_

#include "kernels/cpu/thread_pool.h"
#include "kernels/verify.h"

namespace logitd::cpu {

// Blocks until done. The bits of the result depend on neither the pool nor what else runs on it.
void Verify(const VerifyArgs& args, ThreadPool& pool);

// The same where logits come a block of rows at a time, in order: of the rows from `first` on,
// which are all that args.sample.logits has. Everything else is that of the whole call. A block may
// begin and end inside a sequence: `accepted` then has the drafts accepted so far.
void VerifyRows(const VerifyArgs& args, int64_t first, ThreadPool& pool);

}  // namespace logitd::cpu

#endif  // LOGITD_KERNELS_CPU_SAMPLING_VERIFY_H_
