// linear_divergence_training on the CUDA backend: the checks of the CPU backend, and calls that do
// not fit into scratch.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <stdexcept>
#include <vector>

#include "kernels/cuda/linear/product.h"
#include "kernels/cuda/ops.h"
#include "tests/kernels/cuda_test.h"
#include "tests/kernels/divergence_training_cases.h"
#include "tests/kernels/large_head.h"

namespace logitd::testing {
namespace {

class DivergenceTrainingGpuTest : public CudaTest {};
const bool kRegistered = RegisterChecks<DivergenceTrainingGpuTest>("DivergenceTrainingGpuTest",
                                                                   DivergenceTrainingChecks());

// Scratch of `bytes`, and products that have their workspace in it.
class OwnScratch {
 public:
  explicit OwnScratch(int64_t bytes) : memory_(bytes) {
    cudaDeviceProp properties;
    Must(cudaGetDeviceProperties(&properties, CudaTestDevice()));
    scratch_ = {.data = memory_.data(),
                .bytes = static_cast<size_t>(bytes),
                .multiprocessors = properties.multiProcessorCount,
                .block_shared_bytes = static_cast<int>(properties.sharedMemPerBlockOptin),
                .clusters = properties.major >= 9};
    Must(cudaMemset(scratch_.data, 0, cuda::Scratch::kCounterBytes));
    const absl::Status made = products_.Init(cuda::ProductWorkspaceBytes(scratch_));
    if (!made.ok()) throw std::runtime_error(made.ToString());
  }

  cudaError_t Run(const LinearDivergenceTrainingArgs& args) {
    return cuda::LinearDivergenceTraining(args, products_, scratch_, nullptr);
  }

 private:
  DeviceArray<std::byte> memory_;
  cuda::Scratch scratch_;
  cuda::Products products_;
};

// A student of many rows and its reference, in device memory.
class ManyRows {
 public:
  static constexpr int64_t kRows = 12000, kVocab = 3001, kHidden = 512;

  explicit ManyRows(DType dtype)
      : student_(RandomTensors({dtype, kRows, kVocab, kHidden, false, false, 0, 0, 3})),
        reference_(RandomTensors({DType::kF32, kRows, kVocab, 256, false, false, 0, 0, 4})),
        hidden_(student_.hidden.bytes()),
        weight_(student_.head.weight.bytes()),
        reference_hidden_(reference_.hidden.bytes()),
        reference_weight_(reference_.head.weight.bytes()),
        rows_(std::vector<DivergenceRow>(kRows, kPlainDivergence)),
        upstream_(Upstream()),
        loss_(kRows),
        status_(kRows),
        memory_(kRows),
        d_hidden_(kRows * kHidden),
        d_weight_(kVocab * kHidden) {}

  struct Answer {
    std::vector<float> loss, d_hidden, d_weight;
  };

  Answer Run(DivergenceLoss kind, int64_t scratch_bytes) {
    OwnScratch own(scratch_bytes);
    Must(own.Run(
        {.hidden = View(student_.hidden, hidden_),
         .head = {.weight = View(student_.head.weight, weight_), .scale = student_.head.scale},
         .reference_hidden = View(reference_.hidden, reference_hidden_),
         .reference_head = {.weight = View(reference_.head.weight, reference_weight_),
                            .scale = reference_.head.scale},
         .rows = rows_.data(),
         .upstream = upstream_.data(),
         .kind = kind,
         .loss = loss_.data(),
         .status = status_.data(),
         .memory = memory_.data(),
         .d_hidden = {d_hidden_.data(), DType::kF32, kRows, kHidden, kHidden},
         .d_weight = {d_weight_.data(), DType::kF32, kVocab, kHidden, kHidden}}));
    Must(cudaDeviceSynchronize());
    return {loss_.Download(), d_hidden_.Download(), d_weight_.Download()};
  }

 private:
  static TensorView View(const HostTensor& of, const DeviceArray<std::byte>& data) {
    TensorView view = of.View();
    view.data = data.data();
    return view;
  }
  // Rows of different sizes, so that f16 has different factors for them.
  static std::vector<float> Upstream() {
    std::vector<float> upstream(kRows);
    for (int64_t r = 0; r < kRows; ++r) upstream[r] = r % 7 == 0 ? 1.0f : 0.25f;
    return upstream;
  }

  LinearInput student_, reference_;
  DeviceArray<std::byte> hidden_, weight_, reference_hidden_, reference_weight_;
  DeviceArray<DivergenceRow> rows_;
  DeviceArray<float> upstream_, loss_;
  DeviceArray<RowStatus> status_;
  DeviceArray<DivergenceTrainingRow> memory_;
  DeviceArray<float> d_hidden_, d_weight_;
};

// The size of a - b over that of b.
double Apart(const std::vector<float>& a, const std::vector<float>& b) {
  double difference = 0, size = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    difference += (double{a[i]} - b[i]) * (double{a[i]} - b[i]);
    size += double{b[i]} * b[i];
  }
  return std::sqrt(difference / size);
}

// In the smaller scratch G is not kept, and rows are taken in groups. Each G is rounded to 16 bits
// in both, from logits that differ by rounding.
TEST_F(DivergenceTrainingGpuTest, RowsThatDoNotFitIntoScratchHaveTheSameGradients) {
  Must(cudaSetDevice(CudaTestDevice()));
  for (const DType dtype : kAllDTypes) {
    ManyRows rows(dtype);
    for (const DivergenceLoss kind : kAllDivergenceLosses) {
      const ManyRows::Answer want = rows.Run(kind, int64_t{1} << 30);
      const ManyRows::Answer got = rows.Run(kind, cuda::Scratch::kMinBytes);
      const double allowed = 1e-5 + 2 * Rounding(dtype);
      EXPECT_LT(Apart(got.loss, want.loss), 1e-5) << Name(dtype) << " " << Name(kind);
      EXPECT_LT(Apart(got.d_hidden, want.d_hidden), allowed) << Name(dtype) << " " << Name(kind);
      EXPECT_LT(Apart(got.d_weight, want.d_weight), allowed) << Name(dtype) << " " << Name(kind);
    }
  }
}

}  // namespace
}  // namespace logitd::testing
