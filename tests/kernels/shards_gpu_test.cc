// Heads cannot be cut over CUDA devices today: the sentence that says so.
#include <gtest/gtest.h>

#include <vector>

#include "kernels/sharded_stream.h"
#include "tests/kernels/cuda_test.h"

namespace logitd::testing {
namespace {

class ShardsGpuTest : public CudaTest {};

TEST_F(ShardsGpuTest, CudaDevicesAreRefusedWithASentence) {
  const std::vector<Backend*> backends = {Cuda()->get()};
  const absl::Status refused = absl::FailedPreconditionError(
      "shard: got backend cuda, allowed cpu; on other backends each device holds the whole head");
  EXPECT_EQ(CheckCanShard(backends), refused);
  EXPECT_EQ(CreateShardedStream(backends).status(), refused);
}

}  // namespace
}  // namespace logitd::testing
