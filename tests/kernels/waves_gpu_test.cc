// How many blocks a multiprocessor runs at once. It runs without a GPU.
#include "kernels/cuda/rows/waves.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>

namespace logitd::testing {
namespace {

using cuda::Scratch;
using cuda::SharedBytesForWaves;

Scratch Device() {
  Scratch device;
  device.multiprocessors = 132;
  device.block_shared_bytes = 227 << 10;
  return device;
}

// How many blocks of so many bytes fit on a multiprocessor.
int Fitting(int shared_bytes) { return (228 << 10) / (shared_bytes + 1024); }

TEST(WavesTest, FewerBlocksAtOnceFillTheLastWave) {
  // 1024 blocks, 6 at once: 1.29 waves; 5 at once: 1.55, 4: 1.94.
  EXPECT_EQ(Fitting(SharedBytesForWaves(1024, 6, 20000, Device())), 4);
}

TEST(WavesTest, BlocksOfOneWaveOrOfManyAskForWhatTheyNeed) {
  for (const int64_t blocks : {int64_t{0}, int64_t{1}, int64_t{300}, int64_t{6 * 132},
                               int64_t{18 * 132 + 1}, int64_t{1} << 40}) {
    EXPECT_EQ(SharedBytesForWaves(blocks, 6, 20000, Device()), 20000) << blocks << " blocks";
  }
}

TEST(WavesTest, ABlockThatIsAloneStaysAlone) {
  EXPECT_EQ(SharedBytesForWaves(200, 1, 20000, Device()), 20000);
  EXPECT_EQ(SharedBytesForWaves(200, 6, 227 << 10, Device()), 227 << 10);
}

TEST(WavesTest, AsksForNoLessThanIsNeededAndNoMoreThanThereIs) {
  for (int resident = 1; resident <= 8; ++resident) {
    for (int shared_bytes = 0; shared_bytes <= 227 << 10; shared_bytes += 5000) {
      for (int64_t blocks = 1; blocks < 4000; blocks += 61) {
        const int bytes = SharedBytesForWaves(blocks, resident, shared_bytes, Device());
        ASSERT_GE(bytes, shared_bytes);
        ASSERT_LE(bytes, 227 << 10);
        // At least two thirds of what may run at once still does.
        const int most = std::min(resident, Fitting(shared_bytes));
        ASSERT_GE(3 * std::min(resident, Fitting(bytes)), 2 * most)
            << blocks << " blocks of " << shared_bytes << " bytes, " << resident << " at once";
      }
    }
  }
}

}  // namespace
}  // namespace logitd::testing
