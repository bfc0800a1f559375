// The CPU form of softmax_topk; the contract is kernels/softmax_topk.h.
#ifndef LOGITD_KERNELS_CPU_SOFTMAX_TOPK_H_
#define LOGITD_KERNELS_CPU_SOFTMAX_TOPK_H_

#include <cstdint>
#include <memory>

#include "kernels/cpu/thread_pool.h"
#include "kernels/softmax_topk.h"

namespace logitd::cpu {

// Memory that grows to the largest size asked for and stays. Growing loses the contents. Not
// thread-safe.
template <typename T>
class Buffer {
 public:
  T* Get(int64_t count) {
    if (count > capacity_) {
      data_.reset(new T[count]);
      capacity_ = count;
    }
    return data_.get();
  }

 private:
  std::unique_ptr<T[]> data_;
  int64_t capacity_ = 0;
};

// Elements of a row that one fixed code path reduces, counted from the row's start. A row's bits
// follow from its cells, so they do not depend on which threads computed them.
inline constexpr int64_t kCellElements = 1024;

// What one read of a row leaves behind. The group maxima bound the k-th largest logit from below.
struct RowSketch {
  float* max;     // [cells], the largest logit; +-inf possible
  float* sum;     // [cells], of exp((x - max) / temperature); number of +inf if max is that; 0 if
                  // -inf; NaN if one is
  float* coarse;  // [cells, SIMD lanes], maxima of kCellElements / lanes elements each
  float* fine;    // [cells, kCellElements / 8], maxima of 8 elements each
};

// Memory of sketches.
struct SketchScratch {
  Buffer<float> max, sum, coarse, fine;
};

// Name of the instruction set the op was dispatched to, e.g. "AVX3".
const char* SimdTarget();

// Blocks until done. The bits of the result depend on neither the pool nor what else runs on it.
// `scratch` is the caller's alone during the call; it is used where rows are few and split over
// threads.
void SoftmaxTopK(const SoftmaxTopKArgs& args, ThreadPool& pool, SketchScratch& scratch);

}  // namespace logitd::cpu

#endif  // LOGITD_KERNELS_CPU_SOFTMAX_TOPK_H_
