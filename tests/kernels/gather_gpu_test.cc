// Rows that a stream copies from where they lie: shared memory of the device, and pinned host memory.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/backend.h"
#include "tests/kernels/cuda_test.h"

namespace logitd::testing {
namespace {

constexpr size_t kArena = size_t{8} << 20;

std::vector<std::byte> Random(size_t bytes, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<std::byte> values(bytes);
  for (std::byte& value : values) value = static_cast<std::byte>(random());
  return values;
}

class GatherTest : public CudaTest {
 protected:
  void SetUp() override {
    CudaTest::SetUp();
    if (IsSkipped()) return;
    backend_ = Cuda()->get();
    slab_ = backend_->AllocateSlab(kArena).value();
    stream_ = backend_->CreateStream().value();
    memory_ = backend_->AllocateShared(kArena).value();
    host_ = static_cast<std::byte*>(
        mmap(nullptr, kArena, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
    ASSERT_TRUE(backend_->PinHost(host_, kArena).ok());
  }
  void TearDown() override {
    if (backend_ == nullptr) return;
    stream_.reset();
    close(memory_.fd);
    backend_->FreeShared(memory_);
    backend_->FreeSlab(slab_);
    backend_->UnpinHost(host_);
    munmap(host_, kArena);
  }

  // The slab after the copies, on a background of 0x5a.
  std::vector<std::byte> Gather(const std::vector<RowsCopy>& copies) {
    std::memset(slab_.host, 0x5a, slab_.bytes);
    EXPECT_TRUE(stream_->Upload(slab_, 0, slab_.bytes).ok());
    EXPECT_TRUE(stream_->Gather(copies).ok());
    EXPECT_TRUE(stream_->Download(slab_, 0, slab_.bytes).ok());
    EXPECT_TRUE(stream_->Wait().ok());
    return {slab_.host, slab_.host + slab_.bytes};
  }

  Backend* backend_ = nullptr;
  Slab slab_;
  std::unique_ptr<Stream> stream_;
  SharedDeviceMemory memory_;
  std::byte* host_ = nullptr;
};

TEST_F(GatherTest, SharedMemoryIsZeroAndInWholeUnits) {
  EXPECT_EQ(memory_.bytes, kArena);
  EXPECT_GE(memory_.fd, 0);
  const auto zero = Gather({{.from = memory_.data,
                             .from_stride = kArena,
                             .to = slab_.device,
                             .to_stride = kArena,
                             .row_bytes = kArena,
                             .rows = 1,
                             .from_device = true}});
  EXPECT_EQ(zero, std::vector<std::byte>(kArena));
  const auto small = backend_->AllocateShared(1).value();
  EXPECT_EQ(small.bytes, size_t{2} << 20);
  close(small.fd);
  backend_->FreeShared(small);
}

TEST_F(GatherTest, MoreThanTheDeviceHasIsRefused) {
  const auto memory = backend_->AllocateShared(size_t{1} << 45);
  EXPECT_EQ(memory.status().code(), absl::StatusCode::kResourceExhausted) << memory.status();
}

// Every alignment, width and distance, from both kinds of memory, at once and each on its own.
TEST_F(GatherTest, RowsArriveWhereTheyBelongAndNothingElseChanges) {
  const std::vector<std::byte> values = Random(kArena, 1);
  std::memcpy(host_, values.data(), kArena);
  ASSERT_TRUE(backend_->WriteShared(memory_.data, {host_, kArena}).ok());
  std::mt19937 random(2);
  const auto pick = [&](size_t low, size_t high) { return low + random() % (high - low + 1); };
  for (int round = 0; round < 60; ++round) {
    std::vector<RowsCopy> copies;
    std::vector<std::byte> expected(kArena, std::byte{0x5a});
    size_t to = 0;
    const size_t count = round < 30 ? 1 : pick(2, 150);
    for (size_t c = 0; c < count; ++c) {
      const size_t unit = size_t{2} << pick(0, 3);  // alignment: 2 to 16
      const size_t row = pick(1, count == 1 ? 300000 : 3000) / 2 * 2 + 2;
      const size_t rows = pick(1, count == 1 ? 6 : 3);
      const bool touching = pick(0, 2) == 0;
      const auto stride = [&] {
        return touching ? row : (row + unit - 1) / unit * unit + unit * pick(0, 5);
      };
      const size_t from_stride = stride();
      const size_t to_stride = stride();
      const size_t from = pick(0, (kArena - rows * from_stride) / unit) * unit;
      to = (to + unit - 1) / unit * unit;
      ASSERT_LE(to + rows * to_stride, kArena);
      const bool from_device = pick(0, 3) != 0;
      copies.push_back({.from = (from_device ? memory_.data : host_) + from,
                        .from_stride = from_stride,
                        .to = slab_.device + to,
                        .to_stride = to_stride,
                        .row_bytes = row,
                        .rows = static_cast<int64_t>(rows),
                        .from_device = from_device});
      for (size_t r = 0; r < rows; ++r) {
        std::memcpy(expected.data() + to + r * to_stride, values.data() + from + r * from_stride,
                    row);
      }
      to += rows * to_stride;
    }
    ASSERT_TRUE(Gather(copies) == expected) << "round " << round;
  }
}

// A small upload may share a launch with a gather, but not where both write.
TEST_F(GatherTest, AGatherWritesOverWhatWasUploadedBefore) {
  std::memset(host_, 0x11, kArena);
  ASSERT_TRUE(backend_->WriteShared(memory_.data, {host_, kArena}).ok());
  for (const size_t at : {size_t{0}, size_t{1000}, size_t{4090}, size_t{4096}, size_t{9000}}) {
    std::memset(slab_.host, 0x5a, 16384);
    EXPECT_TRUE(stream_->Upload(slab_, 0, 4096).ok());
    const RowsCopy copy = {.from = memory_.data,
                           .from_stride = 2000,
                           .to = slab_.device + at,
                           .to_stride = 2000,
                           .row_bytes = 2000,
                           .rows = 1,
                           .from_device = true};
    EXPECT_TRUE(stream_->Gather({&copy, 1}).ok());
    EXPECT_TRUE(stream_->Download(slab_, 0, 12288).ok());
    EXPECT_TRUE(stream_->Wait().ok());
    std::vector<std::byte> expected(4096, std::byte{0x5a});
    for (size_t i = at; i < std::min<size_t>(at + 2000, 4096); ++i) expected[i] = std::byte{0x11};
    EXPECT_TRUE(std::equal(expected.begin(), expected.end(), slab_.host)) << at;
    EXPECT_EQ(slab_.host[at + 1999], std::byte{0x11}) << at;
  }
}

}  // namespace
}  // namespace logitd::testing
