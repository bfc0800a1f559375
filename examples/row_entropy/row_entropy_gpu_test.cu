// row_entropy beside double precision, at lengths, strides and values that ops on rows must take;
// and its share of one read of many long rows.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "examples/row_entropy/row_entropy.cuh"
#include "kernels/cuda/dispatch.cuh"

namespace logitd::examples {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

class RowEntropyTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0)
      std::printf("no CUDA device: every test skipped\n");
  }
  void SetUp() override {
    cudaDeviceProp properties;
    if (cudaGetDeviceProperties(&properties, 0) != cudaSuccess) GTEST_SKIP();
    scratch_ = {.multiprocessors = properties.multiProcessorCount,
                .block_shared_bytes = static_cast<int>(properties.sharedMemPerBlockOptin),
                .clusters = properties.major >= 9};
  }

  template <class T>
  std::vector<float> Run(const std::vector<T>& logits, int64_t rows, int64_t vocab,
                         int64_t stride) {
    T* in;
    float* out;
    EXPECT_EQ(cudaMalloc(&in, logits.size() * sizeof(T)), cudaSuccess);
    EXPECT_EQ(cudaMalloc(&out, rows * sizeof(float)), cudaSuccess);
    cudaMemcpy(in, logits.data(), logits.size() * sizeof(T), cudaMemcpyHostToDevice);
    cudaMemset(out, 0xff, rows * sizeof(float));
    const TensorView view{.data = in, .rows = rows, .cols = vocab, .row_stride = stride};
    EXPECT_EQ(RunRowEntropy<T>({view, out}, scratch_, nullptr), cudaSuccess);
    std::vector<float> answers(rows);
    EXPECT_EQ(cudaMemcpy(answers.data(), out, rows * sizeof(float), cudaMemcpyDeviceToHost),
              cudaSuccess);
    cudaFree(in);
    cudaFree(out);
    return answers;
  }

  cuda::Scratch scratch_;
};

template <class T>
double EntropyOf(const T* row, int64_t vocab) {
  double max = -kInfinity;
  for (int64_t i = 0; i < vocab; ++i) max = std::max(max, static_cast<double>(float{row[i]}));
  double sum = 0;
  double weighted = 0;
  for (int64_t i = 0; i < vocab; ++i) {
    const double x = float{row[i]} - max;
    if (x == -kInfinity) continue;
    sum += std::exp(x);
    weighted += std::exp(x) * x;
  }
  return std::log(sum) - weighted / sum;
}

template <class T>
std::vector<T> Normals(int64_t count, float spread) {
  std::mt19937 random(7);
  std::normal_distribution<float> normal(0, spread);
  std::vector<T> values(count);
  for (T& value : values) value = static_cast<T>(normal(random));
  return values;
}

template <class T>
class RowEntropyTypedTest : public RowEntropyTest {};
using Types = ::testing::Types<float, __half, __nv_bfloat16>;
TYPED_TEST_SUITE(RowEntropyTypedTest, Types);

TYPED_TEST(RowEntropyTypedTest, AgreesWithDouble) {
  for (const int64_t vocab : {1, 2, 31, 1000, 1024, 1025, 4099, 32000, 131072, 200001}) {
    for (const int64_t rows : {1, 3, 200, 700}) {
      if (rows * vocab > 10'000'000) continue;
      for (const float spread : {0.1f, 3.0f, 100.0f}) {
        const int64_t stride = vocab + 3;
        auto logits = Normals<TypeParam>(rows * stride, spread);
        for (int64_t i = 0; i < rows * stride; i += 977)
          if (i % stride != 0) logits[i] = static_cast<TypeParam>(-INFINITY);
        const std::vector<float> answers = this->Run(logits, rows, vocab, stride);
        for (int64_t r = 0; r < rows; ++r) {
          const double want = EntropyOf(&logits[r * stride], vocab);
          ASSERT_NEAR(answers[r], want, 1e-5 + 1e-5 * want)
              << rows << " x " << vocab << ", spread " << spread << ", row " << r;
        }
      }
    }
  }
}

TYPED_TEST(RowEntropyTypedTest, ARowsBitsDoNotDependOnOtherRows) {
  constexpr int64_t kVocab = 50257;
  const auto logits = Normals<TypeParam>(300 * kVocab, 2);
  const std::vector<float> all = this->Run(logits, 300, kVocab, kVocab);
  for (const int64_t r : {0, 1, 299}) {
    const std::vector<TypeParam> row(&logits[r * kVocab], &logits[r * kVocab] + kVocab);
    const std::vector<float> only = this->Run(row, 1, kVocab, kVocab);
    EXPECT_EQ(std::memcmp(&only[0], &all[r], sizeof(float)), 0) << "row " << r;
  }
}

TYPED_TEST(RowEntropyTypedTest, NanStaysInItsRow) {
  auto logits = Normals<TypeParam>(3 * 5000, 1);
  logits[5000 + 4321] = static_cast<TypeParam>(NAN);
  const std::vector<float> answers = this->Run(logits, 3, 5000, 5000);
  EXPECT_FALSE(std::isnan(answers[0]));
  EXPECT_TRUE(std::isnan(answers[1]));
  EXPECT_FALSE(std::isnan(answers[2]));
}

// Printed, not checked: how fast a device is depends on who else uses it.
TYPED_TEST(RowEntropyTypedTest, ShareOfOneRead) {
  constexpr int64_t kRows = 8192;
  constexpr int64_t kVocab = 128256;
  const size_t bytes = kRows * kVocab * sizeof(TypeParam);
  std::byte* in;
  float* out;
  if (cudaMalloc(&in, 2 * bytes) != cudaSuccess) GTEST_SKIP();
  ASSERT_EQ(cudaMalloc(&out, kRows * sizeof(float)), cudaSuccess);
  const auto some = Normals<TypeParam>(1 << 20, 1);
  for (size_t at = 0; at < 2 * bytes;
       at += std::min(2 * bytes - at, some.size() * sizeof(TypeParam)))
    cudaMemcpy(in + at, some.data(), std::min(2 * bytes - at, some.size() * sizeof(TypeParam)),
               cudaMemcpyHostToDevice);
  const auto time = [&](auto launch) {  // ms, the median of launches
    std::vector<float> times;
    cudaEvent_t events[2];
    for (cudaEvent_t& event : events) cudaEventCreate(&event);
    for (int i = 0; i < 12; ++i) {
      cudaEventRecord(events[0]);
      launch();
      cudaEventRecord(events[1]);
      cudaEventSynchronize(events[1]);
      times.push_back(0);
      cudaEventElapsedTime(&times.back(), events[0], events[1]);
    }
    std::sort(times.begin(), times.end());
    return times[6];
  };
  const TensorView view{.data = in, .rows = kRows, .cols = kVocab, .row_stride = kVocab};
  const float entropy = time([&] {
    (void)RunRowEntropy<TypeParam>({view, out}, this->scratch_, nullptr);
  });
  const float copy =
      time([&] { cudaMemcpyAsync(in + bytes, in, bytes, cudaMemcpyDeviceToDevice); });
  std::printf(
      "row_entropy of %ld x %ld, %zu bytes an element: %.0f us, %.0f GB/s; a copy moves %.0f "
      "GB/s\n",
      long{kRows}, long{kVocab}, sizeof(TypeParam), 1e3 * entropy, bytes / entropy / 1e6,
      2 * bytes / copy / 1e6);
  cudaFree(in);
  cudaFree(out);
}

}  // namespace
}  // namespace logitd::examples
