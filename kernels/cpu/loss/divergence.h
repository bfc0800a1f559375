// The CPU form of divergence; the contract is kernels/divergence.h.
#ifndef LOGITD_KERNELS_CPU_LOSS_DIVERGENCE_H_
#define LOGITD_KERNELS_CPU_LOSS_DIVERGENCE_H_

#include "kernels/cpu/rows/lanes.h"
#include "kernels/cpu/rows/sketch.h"
#include "kernels/cpu/thread_pool.h"
#include "kernels/divergence.h"
#include "kernels/divergence_sums.h"
#include "kernels/softmax_topk.h"

namespace logitd::cpu {

// Memory for the sums of the cells of all rows of a call, and for its top tokens.
struct DivergenceScratch {
  Buffer<DivergenceCell> cells;
  Buffer<DivergenceNorms> norms;
  Buffer<SoftmaxTopKRow> top_rows;
  Buffer<float> top_logsumexp;
  Buffer<RowStatus> top_status;
  SketchScratch topk;
};

// Blocks until done. The bits of the results depend on neither the pool nor what else runs on it.
// `scratch` belongs to the caller's stream, and stays for its next call.
void Divergence(const DivergenceArgs& args, ThreadPool& pool, DivergenceScratch& scratch);

}  // namespace logitd::cpu

#endif  // LOGITD_KERNELS_CPU_LOSS_DIVERGENCE_H_
