// How many blocks the clusters of a launch have, so that all clusters run at once.
#include "kernels/cuda/rows/cluster_blocks.h"

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cstdint>

#include "tests/kernels/cuda_test.h"

namespace logitd::testing {
namespace {

class ClusterBlocksGpuTest : public CudaTest {
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

  cuda::Scratch scratch_;
};

TEST_F(ClusterBlocksGpuTest, OneRowGetsTheLargestCluster) {
  EXPECT_EQ(cuda::ClusterBlocksAtOnce(1, scratch_), 8);
}

TEST_F(ClusterBlocksGpuTest, AllBlocksHaveAMultiprocessor) {
  int32_t before = 8;
  for (int64_t rows = 1; rows <= 2 * scratch_.multiprocessors; ++rows) {
    const int32_t blocks = cuda::ClusterBlocksAtOnce(rows, scratch_);
    EXPECT_GE(blocks, 1) << rows << " rows";
    EXPECT_LE(blocks, before) << rows << " rows: more rows never get larger clusters";
    if (blocks > 1) {
      EXPECT_LE(rows * blocks, scratch_.multiprocessors) << rows << " rows";
    }
    before = blocks;
  }
  EXPECT_EQ(before, 1);
}

TEST_F(ClusterBlocksGpuTest, ADeviceWithoutClustersGetsABlockForARow) {
  scratch_.clusters = false;
  EXPECT_EQ(cuda::ClusterBlocksAtOnce(1, scratch_), 1);
}

}  // namespace
}  // namespace logitd::testing
