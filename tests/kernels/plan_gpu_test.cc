// Plans of ops on rows. Those without clusters run without a GPU.
#include "kernels/cuda/rows/plan.h"

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>

#include "kernels/cuda/rows/devices.h"
#include "tests/kernels/cuda_test.h"

namespace logitd::testing {
namespace {

using cuda::PlanRows;
using cuda::RowForm;
using cuda::RowsPlan;
using cuda::RowsShape;
using cuda::Scratch;

constexpr RowForm kBlock = {
    .warps = 4, .resident = 6, .fixed_bytes = 20000, .row_cell_bytes = 8, .part_cell_bytes = 128};
constexpr RowForm kCluster = {.warps = 16, .most_blocks = 8, .fixed_bytes = 100000};
constexpr RowForm kWarp = {.warps = 24,
                           .warp_takes_row = true,
                           .most_cells = 4,
                           .fixed_bytes = 128,
                           .warp_bytes = 1000,
                           .warp_cell_bytes = 4224};

Scratch Device() {
  Scratch device;
  device.multiprocessors = 132;
  device.block_shared_bytes = 227 << 10;
  return device;
}

// How many blocks of so many bytes fit on a multiprocessor.
int Fitting(int shared_bytes) { return (228 << 10) / (shared_bytes + 1024); }

RowsShape Of(int64_t rows, int32_t cells) {
  return {.rows = rows, .cells = cells, .row_bytes = cells * 4096.0f, .wide = true};
}

TEST(PlanTest, NothingFitsAFormOfShorterRowsOrWithoutRoom) {
  EXPECT_EQ(PlanRows(Of(10, 5), {&kWarp, 1}, Device()).form, -1);
  EXPECT_EQ(PlanRows(Of(10, 2000), {&kBlock, 1}, Device()).form, -1);
  EXPECT_EQ(PlanRows(Of(10, 5), {&kCluster, 1}, Device()).form, -1) << "a device without clusters";
}

TEST(PlanTest, AWarpTakesManyShortRowsAndABlockFewLongOnes) {
  const RowForm forms[] = {kBlock, kWarp};
  EXPECT_EQ(PlanRows(Of(65536, 1), forms, Device()).form, 1);
  EXPECT_EQ(PlanRows(Of(100, 100), forms, Device()).form, 0);
}

TEST(PlanTest, ABlockHasAsManyWarpsAsThereIsRoomFor) {
  const RowsPlan plan = PlanRows(Of(65536, 4), {&kWarp, 1}, Device());
  EXPECT_EQ(plan.warps, ((227 << 10) - 128) / (1000 + 4 * 4224));
  EXPECT_LE(plan.shared_bytes, 227 << 10);
}

TEST(PlanTest, FewerBlocksAtOnceFillTheLastWave) {
  // 1024 long rows, 6 at once: 1.29 waves; 4: 1.94.
  const RowsPlan plan = PlanRows(Of(1024, 100), {&kBlock, 1}, Device());
  EXPECT_EQ(plan.teams, 4);
  EXPECT_EQ(Fitting(plan.shared_bytes), 4);
}

TEST(PlanTest, BlocksOfOneWaveOrOfManyAskForWhatTheyNeed) {
  const int needed = 20000 + 100 * (8 + 128);
  for (const int64_t rows :
       {int64_t{1}, int64_t{300}, int64_t{6 * 132}, int64_t{18 * 132 + 1}, int64_t{1} << 40}) {
    const RowsPlan plan = PlanRows(Of(rows, 100), {&kBlock, 1}, Device());
    EXPECT_EQ(plan.teams, 6) << rows << " rows";
    EXPECT_EQ(plan.shared_bytes, needed) << rows << " rows";
  }
}

TEST(PlanTest, ABlockThatIsTheOnlyOneStaysTheOnlyOne) {
  const RowForm by_registers = {.resident = 1, .fixed_bytes = 20000};
  const RowForm by_memory = {.resident = 6, .fixed_bytes = 227 << 10};
  for (const RowForm& form : {by_registers, by_memory}) {
    const RowsPlan plan = PlanRows(Of(200, 100), {&form, 1}, Device());
    EXPECT_EQ(plan.teams, 1);
    EXPECT_EQ(plan.shared_bytes, form.fixed_bytes);
  }
}

TEST(PlanTest, AsksForNoLessThanIsNeededAndNoMoreThanThereIs) {
  for (int resident = 1; resident <= 8; ++resident) {
    for (int fixed_bytes = 0; fixed_bytes <= 227 << 10; fixed_bytes += 5000) {
      const RowForm form = {.resident = resident, .fixed_bytes = fixed_bytes};
      for (int64_t rows = 1; rows < 4000; rows += 61) {
        const RowsPlan plan = PlanRows(Of(rows, 100), {&form, 1}, Device());
        ASSERT_EQ(plan.form, 0);
        ASSERT_GE(plan.shared_bytes, fixed_bytes);
        ASSERT_LE(plan.shared_bytes, 227 << 10);
        ASSERT_LE(plan.teams, Fitting(plan.shared_bytes));
        // At least two thirds of what may run at once still does.
        ASSERT_GE(3 * plan.teams, 2 * std::min(resident, Fitting(fixed_bytes)));
      }
    }
  }
}

TEST(PlanTest, ADevicesColumnIsFoundByItsName) {
  EXPECT_EQ(cuda::RatesOf("NVIDIA H200 NVL").name, "NVIDIA H200");
  EXPECT_EQ(cuda::RatesOf("Another").name, "");
}

class PlanGpuTest : public CudaTest {
 protected:
  void SetUp() override {
    CudaTest::SetUp();
    if (IsSkipped()) return;
    cudaDeviceProp properties;
    ASSERT_EQ(cudaGetDeviceProperties(&properties, CudaTestDevice()), cudaSuccess);
    if (properties.major < 9) GTEST_SKIP() << "the device has no clusters";
    ASSERT_EQ(cudaSetDevice(CudaTestDevice()), cudaSuccess);
    scratch_.multiprocessors = properties.multiProcessorCount;
    scratch_.block_shared_bytes = static_cast<int>(properties.sharedMemPerBlockOptin);
    scratch_.clusters = true;
  }

  Scratch scratch_;
};

TEST_F(PlanGpuTest, OneLongRowGetsTheLargestCluster) {
  const RowsPlan plan = PlanRows(Of(1, 128), {&kCluster, 1}, scratch_);
  EXPECT_EQ(plan.blocks, 8);
  EXPECT_TRUE(plan.early);
}

TEST_F(PlanGpuTest, LongRowsThatAreReadAgainGetClustersSoThatL2HoldsThem) {
  const RowForm form = {.warps = 8, .resident = 3, .rereads = true, .most_blocks = 8};
  EXPECT_EQ(PlanRows(Of(8192, 16), {&form, 1}, scratch_).blocks, 1);
  EXPECT_GE(PlanRows(Of(8192, 256), {&form, 1}, scratch_).blocks, 2);
}

}  // namespace
}  // namespace logitd::testing
