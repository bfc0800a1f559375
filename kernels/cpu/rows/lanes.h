// The size of SIMD vectors, and memory that threads keep; for every CPU op. The per-target code is
// in lanes-inl.h.
#ifndef LOGITD_KERNELS_CPU_ROWS_LANES_H_
#define LOGITD_KERNELS_CPU_ROWS_LANES_H_

#include <cstdint>
#include <limits>
#include <memory>

namespace logitd::cpu {

inline constexpr int64_t kMaxLanes = 16;  // floats in the widest vector used
inline constexpr float kInf = std::numeric_limits<float>::infinity();

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

// As Buffer<float>, aligned for any vector.
class AlignedBuffer {
 public:
  float* Get(int64_t count) {
    const auto at = reinterpret_cast<uintptr_t>(buffer_.Get(count + kMaxLanes));
    constexpr uintptr_t kAlign = kMaxLanes * sizeof(float);
    return reinterpret_cast<float*>((at + kAlign - 1) / kAlign * kAlign);
  }

 private:
  Buffer<float> buffer_;
};

}  // namespace logitd::cpu

#endif  // LOGITD_KERNELS_CPU_ROWS_LANES_H_
