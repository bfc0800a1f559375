// A head of a real model's size in the memory of a CUDA device, and hidden states for it.
#ifndef LOGITD_TESTS_KERNELS_LARGE_HEAD_H_
#define LOGITD_TESTS_KERNELS_LARGE_HEAD_H_

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <random>
#include <stdexcept>
#include <thread>
#include <vector>

#include "absl/types/span.h"
#include "kernels/types.h"
#include "tests/kernels/reference.h"

namespace logitd::testing {

inline constexpr int64_t kHidden = 4096;

// ---- Device memory

// Ends the test where a call failed.
inline void Must(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(cudaGetErrorString(error));
}

// Memory of cudaMalloc, which tests count. All bits are ones at first: NaN, and no valid status.
template <class T>
class DeviceArray {
 public:
  explicit DeviceArray(int64_t count) : count_(count) {
    void* data = nullptr;
    Must(cudaMalloc(&data, Bytes(count)));
    data_ = static_cast<T*>(data);
    Must(cudaMemset(data_, 0xff, Bytes(count)));
    Must(cudaDeviceSynchronize());
  }
  explicit DeviceArray(absl::Span<const T> values)
      : DeviceArray(static_cast<int64_t>(values.size())) {
    Must(cudaMemcpy(data_, values.data(), Bytes(count_), cudaMemcpyHostToDevice));
    Must(cudaDeviceSynchronize());  // streams of backends do not wait for this one
  }
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;
  ~DeviceArray() { cudaFree(data_); }

  T* data() const { return data_; }
  std::vector<T> Download() const { return Download(0, count_); }
  std::vector<T> Download(int64_t first, int64_t count) const {
    std::vector<T> values(count);
    Must(cudaMemcpy(values.data(), data_ + first, Bytes(count), cudaMemcpyDeviceToHost));
    return values;
  }

 private:
  static size_t Bytes(int64_t count) { return static_cast<size_t>(count) * sizeof(T); }

  T* data_ = nullptr;
  int64_t count_;
};

// ---- Hidden states and weights

// Calls f(0), ..., f(count - 1) on all cores.
template <class F>
void InParallel(int64_t count, F f) {
  const int64_t workers = std::max(1u, std::thread::hardware_concurrency());
  std::vector<std::jthread> threads;
  for (int64_t t = 0; t < workers; ++t) {
    threads.emplace_back([&f, t, count, workers] {
      for (int64_t i = t; i < count; i += workers) f(i);
    });
  }
}

inline float FloatOfBf16(uint16_t bits) { return FloatOf(uint32_t{bits} << 16); }

// Rows of kHidden bf16 numbers, uniform around 0. A row's values depend only on its number.
class RandomRows {
 public:
  RandomRows(uint64_t seed, double deviation) : seed_(seed), values_(1 << 16) {
    for (size_t i = 0; i < values_.size(); ++i) {
      const double unit = (static_cast<double>(i) + 0.5) / 0x1p15 - 1;
      values_[i] = Bf16Bits(static_cast<float>(deviation * std::sqrt(3.0) * unit));
    }
  }

  void Fill(int64_t row, uint16_t* to) const {
    std::mt19937_64 random(seed_ + row);
    for (int64_t i = 0; i < kHidden; i += 4) {
      const uint64_t bits = random();
      for (int j = 0; j < 4; ++j) to[i + j] = values_[bits >> (16 * j) & 0xffff];
    }
  }

 private:
  const uint64_t seed_;
  std::vector<uint16_t> values_;  // of 16 random bits
};

// Logits of these have a standard deviation of 4.
inline const RandomRows& States() {
  static const auto& rows = *new RandomRows(uint64_t{1} << 40, 1.0);
  return rows;
}
inline const RandomRows& Weights() {
  static const auto& rows = *new RandomRows(uint64_t{2} << 40, 4.0 / std::sqrt(kHidden));
  return rows;
}

inline constexpr int64_t kWeightRows = 256000;

// The largest head's weight; smaller heads are its first rows.
inline std::unique_ptr<DeviceArray<uint16_t>> MakeWeight() {
  const auto weight = std::make_unique_for_overwrite<uint16_t[]>(kWeightRows * kHidden);
  InParallel(kWeightRows, [&](int64_t i) { Weights().Fill(i, &weight[i * kHidden]); });
  return std::make_unique<DeviceArray<uint16_t>>(
      absl::MakeConstSpan(weight.get(), kWeightRows * kHidden));
}

// A hidden state for every target. The logits of the targets of even rows are about 18, near the
// logsumexp.
inline std::vector<uint16_t> MakeHidden(absl::Span<const int32_t> targets) {
  std::vector<uint16_t> hidden(targets.size() * kHidden);
  InParallel(static_cast<int64_t>(targets.size()), [&](int64_t r) {
    uint16_t* const state = &hidden[r * kHidden];
    States().Fill(r, state);
    if (r % 2 != 0) return;
    std::vector<uint16_t> weight(kHidden);
    Weights().Fill(targets[r], weight.data());
    for (int64_t d = 0; d < kHidden; ++d)
      state[d] = Bf16Bits(FloatOfBf16(state[d]) + 1.125f * FloatOfBf16(weight[d]));
  });
  return hidden;
}

inline TensorView Bf16View(const uint16_t* data, int64_t rows, int64_t cols) {
  return {.data = data, .dtype = DType::kBF16, .rows = rows, .cols = cols, .row_stride = cols};
}

inline MutableTensorView MutableBf16View(uint16_t* data, int64_t rows, int64_t cols) {
  return {.data = data, .dtype = DType::kBF16, .rows = rows, .cols = cols, .row_stride = cols};
}

}  // namespace logitd::testing

#endif  // LOGITD_TESTS_KERNELS_LARGE_HEAD_H_
