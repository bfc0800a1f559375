// Which kernels serve a call of cross_entropy_training: a rule, without the device.
#ifndef LOGITD_KERNELS_CUDA_LOSS_TRAINING_KERNELS_H_
#define LOGITD_KERNELS_CUDA_LOSS_TRAINING_KERNELS_H_

#include <cstdint>

#include "kernels/types.h"

namespace logitd::cuda {

// All give a row the same bits.
enum class TrainingKernels {
  kShortRows,  // a warp holds rows (short_training.cu)
  kHeldRows,   // a block or a cluster holds a row (cross_entropy_training.cu)
  kTwoCalls,   // cross_entropy's kernel, then its backward's
};

struct TrainingShape {
  DType dtype;
  int64_t rows;
  int64_t vocab;
  bool softcap;  // a row may have one
  bool tops;     // a row may want top tokens
};

// The most tokens of a row that ShortTraining takes, and the multiple of the multiprocessors that its
// rows must reach: where they are fewer, blocks end a row sooner than warps.
constexpr int64_t kShortTrainingVocab = 2048;
constexpr int64_t kLeastShortRows = 4;

// A row that is held is read once, but fewer warps do its arithmetic. So two calls are faster for
// 16-bit logits with a softcap, of about 40 instructions an element, and where a row of five cells
// keeps one warp of two waiting.
constexpr TrainingKernels TrainingKernelsFor(const TrainingShape& shape, int multiprocessors) {
  if (shape.tops) return TrainingKernels::kTwoCalls;
  if (shape.vocab <= kShortTrainingVocab && shape.rows >= kLeastShortRows * multiprocessors)
    return TrainingKernels::kShortRows;
  const bool wide = shape.dtype == DType::kF32;
  if (!wide && shape.softcap) return TrainingKernels::kTwoCalls;
  const bool five_cells = shape.vocab > 4 * 1024 && shape.vocab <= 5 * 1024;
  return !wide && five_cells && shape.rows > multiprocessors ? TrainingKernels::kTwoCalls
                                                             : TrainingKernels::kHeldRows;
}

}  // namespace logitd::cuda

#endif  // LOGITD_KERNELS_CUDA_LOSS_TRAINING_KERNELS_H_
