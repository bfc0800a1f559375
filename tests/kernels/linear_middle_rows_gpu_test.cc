// Rows that hopper/middle_rows.cuh multiplies have the bits that the other products give them.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "kernels/cuda/linear/hopper/few_rows.h"
#include "kernels/cuda/linear/hopper/kernels.h"
#include "kernels/cuda/linear/hopper/middle_plan.h"
#include "tests/kernels/cross_entropy_cases.h"
#include "tests/kernels/cuda_test.h"
#include "tests/kernels/large_head.h"
#include "tests/kernels/linear_cases.h"

namespace logitd::testing {
namespace {

using cuda::hopper::MiddlePlan;
using cuda::hopper::MiddlePlanOf;
using cuda::hopper::PaysForLosses;

TEST(MiddlePlanTest, GroupsHaveAllRowsAndFewAbsentOnes) {
  constexpr int kUnit = cuda::hopper::kMiddleBlocks * cuda::hopper::kMiddleRowUnit;
  for (int64_t rows = 1; rows <= 3000; ++rows) {
    const MiddlePlan plan = MiddlePlanOf(rows);
    ASSERT_LE(plan.block_rows, cuda::hopper::kMostMiddleBlockRows) << rows;
    ASSERT_EQ(plan.block_rows % cuda::hopper::kMiddleRowUnit, 0) << rows;
    int next = 0;
    for (int group = 0; group < plan.groups; ++group) {
      ASSERT_EQ(plan.FirstRow(group), next) << rows;
      next += cuda::hopper::kMiddleBlocks * plan.BlockRows(group);
      // There is a product for every size of a group beside others.
      if (plan.groups > 1) {
        ASSERT_GE(plan.BlockRows(group), cuda::hopper::kLeastMiddleBlockRows) << rows;
      }
    }
    ASSERT_EQ(plan.PaidRows(), next) << rows;
    ASSERT_GE(next, rows);
    const bool least = plan.groups > 1 && plan.block_rows == cuda::hopper::kLeastMiddleBlockRows;
    ASSERT_LT(next, rows + (least ? plan.groups : 1) * kUnit) << rows;
  }
}

TEST(MiddlePlanTest, LossesGoThereWhereTheWeightsAreReadOnceOrTheOtherProductPaysMore) {
  for (int64_t rows = 1; rows <= 128; ++rows) ASSERT_FALSE(PaysForLosses(rows)) << rows;
  for (int64_t rows = 129; rows <= 320; ++rows) ASSERT_TRUE(PaysForLosses(rows)) << rows;
  for (int64_t rows : {340, 400, 450, 520, 600, 700, 777, 900})
    ASSERT_TRUE(PaysForLosses(rows)) << rows;
  for (int64_t rows : {384, 500, 512, 640, 768, 1000, 1024, 1030, 1100, 4096})
    ASSERT_FALSE(PaysForLosses(rows)) << rows;
}

// ---- bits --------------------------------------------------------------------------------------

DeviceArray<std::byte> OnDevice(const HostTensor& tensor) {
  return DeviceArray<std::byte>(tensor.bytes());
}

class LinearMiddleRowsGpuTest : public CudaTest {
 protected:
  static constexpr int64_t kScratchBytes = int64_t{64} << 20;

  void SetUp() override {
    CudaTest::SetUp();
    if (IsSkipped() || HasFatalFailure()) return;
    cudaDeviceProp properties;
    Must(cudaSetDevice(CudaTestDevice()));
    Must(cudaGetDeviceProperties(&properties, CudaTestDevice()));
    memory_ = std::make_unique<DeviceArray<std::byte>>(kScratchBytes);
    scratch_ = {.data = memory_->data(),
                .bytes = kScratchBytes,
                .multiprocessors = properties.multiProcessorCount,
                .block_shared_bytes = static_cast<int>(properties.sharedMemPerBlockOptin),
                .clusters = properties.major >= 9};
    if (!cuda::hopper::KernelsRun(scratch_)) GTEST_SKIP() << "not sm_90a";
  }

  std::unique_ptr<DeviceArray<std::byte>> memory_;
  cuda::Scratch scratch_;
};

const LinearCase kCases[] = {
    {DType::kBF16, 129, 1000, 72, false, false, 0, 1, 1},
    {DType::kF16, 176, 255, 200, false, false, 0, 0, 2},
    {DType::kBF16, 200, 5003, 72, false, false, 0, 0, 3},
    {DType::kBF16, 300, 20000, 136, false, false, 0, 0, 4},
    {DType::kF16, 320, 1025, 8, false, false, 0, 2, 5},
    {DType::kBF16, 321, 256, 64, false, false, 0, 0, 6},
    {DType::kBF16, 500, 1, 72, false, false, 0, 0, 7},
    {DType::kBF16, 520, 3000, 72, false, false, 0, 0, 8},
    {DType::kF16, 777, 700, 520, false, false, 0, 0, 9},
    {DType::kBF16, 777, 30001, 24, false, false, 0, 0, 11},
    {DType::kBF16, 960, 2049, 72, false, false, 0, 0, 10},
};

// Some rows with NaN and infinities.
LinearInput InputOf(const LinearCase& c) {
  LinearInput input = RandomTensors(c);
  for (int64_t r = 5; r < c.rows; r += 11)
    FillRow(input.hidden, r, r % 2 == 0 ? Fill::kWithNan : Fill::kWithPlusInf, c.seed);
  return input;
}

TEST_F(LinearMiddleRowsGpuTest, LossesHaveTheBitsOfTheProductOfManyRows) {
  for (const LinearCase& c : kCases) {
    if (!PaysForLosses(c.rows)) continue;
    const LinearInput input = InputOf(c);
    LossBatch batch;
    std::mt19937_64 random(c.seed);
    for (int64_t r = 0; r < c.rows; ++r) {
      AddRandomLoss(batch, c.vocab, /*with_softcap=*/false, random);
      batch.rows.back().want = 0;
      batch.rows.back().top_logprobs = 0;
    }
    const auto hidden = OnDevice(input.hidden), weight = OnDevice(input.head.weight);
    const DeviceArray<CrossEntropyRow> rows(batch.rows);
    batch.extra_ids.push_back(0);
    const DeviceArray<int32_t> extra_ids(batch.extra_ids);
    LinearCrossEntropyArgs args;
    args.hidden = input.hidden.View();
    args.hidden.data = hidden.data();
    args.head.weight = input.head.weight.View();
    args.head.weight.data = weight.data();
    args.head.scale = input.head.scale;
    args.cross_entropy.rows = rows.data();
    args.cross_entropy.extra_ids = extra_ids.data();
    // Where groups of rows may be skipped, the product is that of many rows.
    const DeviceArray<int32_t> all_groups(std::vector<int32_t>(8, 1));
    std::vector<uint32_t> bits[2];
    for (const bool middle : {false, true}) {
      const int64_t extras = batch.extra_entries + 1;
      const DeviceArray<float> answers(3 * c.rows + extras);
      const DeviceArray<RowStatus> status(c.rows);
      args.cross_entropy.answers = {.loss = answers.data(),
                                    .logsumexp = answers.data() + c.rows,
                                    .target_logprob = answers.data() + 2 * c.rows,
                                    .extra_logprobs = answers.data() + 3 * c.rows,
                                    .status = status.data()};
      Must(cuda::hopper::Losses(args, middle ? nullptr : all_groups.data(), scratch_, nullptr));
      Must(cudaDeviceSynchronize());
      for (float x : answers.Download()) bits[middle].push_back(BitsOf(x));
      for (const RowStatus& s : status.Download()) {
        bits[middle].push_back(static_cast<uint32_t>(s.code));
        bits[middle].push_back(static_cast<uint32_t>(s.position));
      }
    }
    EXPECT_EQ(bits[0], bits[1]) << Describe(c);
  }
}

TEST_F(LinearMiddleRowsGpuTest, LogitsHaveTheBitsOfTheProductOfFewRows) {
  for (LinearCase c : kCases) {
    c.bias = c.seed % 2 == 0;
    c.softcap = c.seed % 3 == 0 ? 30.0f : 0.0f;
    const LinearInput input = InputOf(c);
    const auto hidden = OnDevice(input.hidden), weight = OnDevice(input.head.weight);
    const std::vector<float>& bias = input.head.bias;
    const DeviceArray<float> device_bias(bias.empty() ? std::vector<float>{0} : bias);
    HeadView head;
    head.weight = input.head.weight.View();
    head.weight.data = weight.data();
    head.bias = bias.empty() ? nullptr : device_bias.data();
    head.scale = input.head.scale;
    head.softcap = c.softcap;
    TensorView states = input.hidden.View();
    states.data = hidden.data();
    const int64_t stride = c.vocab + c.vocab % 2 + 2;
    const std::vector<float> unwritten(c.rows * stride, -7.0f);  // also between rows, at the end
    const DeviceArray<float> middle(unwritten), few(unwritten);
    Must(cuda::hopper::Logits(states, head, middle.data(), stride, scratch_, nullptr));
    for (int64_t first = 0; first < c.rows; first += cuda::hopper::kFewRows) {
      TensorView part = states;
      part.rows = std::min(cuda::hopper::kFewRows, c.rows - first);
      part.data = hidden.data() + first * states.row_stride * 2;
      Must(
          cuda::hopper::Logits(part, head, few.data() + first * stride, stride, scratch_, nullptr));
    }
    Must(cudaDeviceSynchronize());
    const std::vector<float> got = middle.Download(), want = few.Download();
    for (int64_t r = 0; r < c.rows; ++r) {
      ASSERT_EQ(std::memcmp(&got[r * stride], &want[r * stride], c.vocab * sizeof(float)), 0)
          << Describe(c) << ", row " << r;
      for (int64_t t = c.vocab; t < stride; ++t) {
        ASSERT_EQ(got[r * stride + t], unwritten[0]) << Describe(c) << ", row " << r << ", " << t;
        ASSERT_EQ(want[r * stride + t], unwritten[0]) << Describe(c) << ", row " << r << ", " << t;
      }
    }
  }
}

}  // namespace
}  // namespace logitd::testing
