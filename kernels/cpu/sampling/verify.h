// The CPU form of verify; the contract is kernels/verify.h.
#ifndef LOGITD_KERNELS_CPU_SAMPLING_VERIFY_H_
#define LOGITD_KERNELS_CPU_SAMPLING_VERIFY_H_

#include <cstdint>

#include "kernels/cpu/rows/lanes.h"
#include "kernels/cpu/thread_pool.h"
#include "kernels/verify.h"

namespace logitd::cpu {

// The state of a sequence's block verification.
struct BlockChoice {
  double share;         // s of the next row
  double chosen_share;  // s of the chosen row
  int32_t chosen;       // the row with the bonus token, from the sequence's first
  bool ended;
};

// Memory of one stream's calls.
struct VerifyScratch {
  Buffer<BlockChoice> choices;
};

// Blocks until done. The bits of the result depend on neither the pool nor what else runs on it.
// `scratch` belongs to the caller's stream, and stays for its next call.
void Verify(const VerifyArgs& args, ThreadPool& pool, VerifyScratch& scratch);

// Verifies where logits come a block of rows at a time. Each pass, from 0 on, goes over all rows in
// order: a call has those from `first` on, and args.sample.logits has no others. The rest of `args`
// is that of the whole call. A block may begin and end inside a sequence.
inline int VerifyPasses(const VerifyArgs& args) { return args.blocks ? 2 : 1; }
void VerifyRows(const VerifyArgs& args, int pass, int64_t first, ThreadPool& pool,
                VerifyScratch& scratch);

}  // namespace logitd::cpu

#endif  // LOGITD_KERNELS_CPU_SAMPLING_VERIFY_H_
