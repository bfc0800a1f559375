// How often attention_softmax reads rows of more than 1536 keys. The launcher chooses by what it
// measured; a row has the same bits either way.
#ifndef LOGITD_KERNELS_CUDA_ATTENTION_READS_H_
#define LOGITD_KERNELS_CUDA_ATTENTION_READS_H_

namespace logitd::cuda::attention {

enum class Reads { kChosen, kOnce, kTwice };

// For tests: this thread's calls read such rows so. kOnce holds for rows that fit on chip.
void ForceReads(Reads reads);

}  // namespace logitd::cuda::attention

#endif  // LOGITD_KERNELS_CUDA_ATTENTION_READS_H_
