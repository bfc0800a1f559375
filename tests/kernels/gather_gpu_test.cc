// Rows that a stream copies from where they lie: shared memory of the device, and pinned host
// memory.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
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

// Host memory is pinned in pieces. Copies to and from it cross their borders.
TEST_F(GatherTest, LargePinnedMemoryIsOneMemoryForCopies) {
  constexpr size_t kLarge = size_t{100} << 20;
  auto* const large = static_cast<std::byte*>(
      mmap(nullptr, kLarge, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  ASSERT_TRUE(backend_->PinHost(large, kLarge).ok());
  for (size_t i = 0; i + 8 <= kLarge; i += 8) {
    const uint64_t value = i * 0x9E3779B97F4A7C15;
    std::memcpy(large + i, &value, sizeof(value));
  }
  const Slab slab = backend_->AllocateSlab(kLarge).value();
  const struct {
    size_t row;
    size_t stride;
    int64_t rows;
  } kCases[] = {{kLarge, kLarge, 1},
                {4096, 4096, 25600},
                {40000, 50002, 2000},
                {9000002, 9000002, 11},
                {9000002, 9500000, 10}};
  for (const auto& c : kCases) {
    std::memset(slab.host, 0, kLarge);
    const RowsCopy copy = {.from = large,
                           .from_stride = c.stride,
                           .to = slab.device,
                           .to_stride = c.row,
                           .row_bytes = c.row,
                           .rows = c.rows};
    EXPECT_TRUE(stream_->Gather({&copy, 1}).ok());
    EXPECT_TRUE(stream_->Download(slab, 0, c.row * static_cast<size_t>(c.rows)).ok());
    EXPECT_TRUE(stream_->Wait().ok());
    for (size_t r = 0; r < static_cast<size_t>(c.rows); ++r) {
      ASSERT_EQ(std::memcmp(slab.host + r * c.row, large + r * c.stride, c.row), 0)
          << c.row << " row " << r;
    }
  }
  // And back, one byte on, in the other direction.
  const size_t bytes = kLarge - 4;
  std::memset(slab.host, 0x77, kLarge);
  EXPECT_TRUE(stream_->Upload(slab, 0, kLarge).ok());
  EXPECT_TRUE(stream_->Deliver(large + 2, slab.device, bytes).ok());
  EXPECT_TRUE(stream_->Wait().ok());
  EXPECT_EQ(std::memcmp(large + 2, slab.host, bytes), 0);
  EXPECT_EQ(large[0], std::byte{0});
  backend_->FreeSlab(slab);
  backend_->UnpinHost(large);
  ASSERT_TRUE(backend_->PinHost(large, kLarge).ok()) << "a part of it was still pinned";
  backend_->UnpinHost(large);
  munmap(large, kLarge);
}

// A stream times work in two ways: small copies by what kernels write, others by events.
TEST_F(GatherTest, CopiesOfEverySizeArriveTogetherAndAreTimed) {
  constexpr size_t kUsed = size_t{1} << 20;
  const std::vector<std::byte> shared = Random(kUsed, 3);
  ASSERT_TRUE(backend_->WriteShared(memory_.data, shared).ok());
  std::memcpy(host_, shared.data(), kUsed);
  std::mt19937 random(4);
  const auto pick = [&](size_t low, size_t high) { return low + random() % (high - low + 1); };
  std::vector<std::byte> device(kUsed, std::byte{0});
  std::memset(slab_.host, 0, kUsed);
  ASSERT_TRUE(stream_->Upload(slab_, 0, kUsed).ok());
  ASSERT_TRUE(stream_->Wait().ok());
  for (int round = 0; round < 400; ++round) {
    const std::vector<std::byte> sent = Random(kUsed, static_cast<uint32_t>(100 + round));
    std::memcpy(slab_.host, sent.data(), kUsed);
    std::vector<std::byte> expected = sent;
    const absl::Time begin = absl::Now();
    size_t at = 0;
    for (size_t i = pick(0, 3); i > 0; --i) {
      const size_t bytes = (pick(0, 3) == 0 ? pick(17000, 90000) : pick(1, 16000)) / 2 * 2 + 2;
      if (const size_t kind = pick(0, 3); kind < 2) {
        ASSERT_TRUE(stream_->Upload(slab_, at, bytes).ok());
        std::copy_n(sent.begin() + at, bytes, device.begin() + at);
      } else {
        const bool from_device = kind == 2;
        const RowsCopy copy = {.from = (from_device ? memory_.data : host_) + at,
                               .from_stride = bytes,
                               .to = slab_.device + at,
                               .to_stride = bytes,
                               .row_bytes = bytes,
                               .rows = 1,
                               .from_device = from_device};
        ASSERT_TRUE(stream_->Gather({&copy, 1}).ok());
        std::copy_n(shared.begin() + at, bytes, device.begin() + at);
      }
      at += (bytes + 15) / 16 * 16;
    }
    size_t from = 0;
    for (size_t i = pick(0, 2); i > 0; --i) {
      const size_t bytes = (pick(0, 2) == 0 ? pick(17000, 90000) : pick(1, 16000)) / 2 * 2 + 2;
      ASSERT_TRUE(stream_->Download(slab_, from, bytes).ok());
      std::copy_n(device.begin() + from, bytes, expected.begin() + from);
      from += (bytes + 15) / 16 * 16;
    }
    const absl::StatusOr<StreamTimes> times = stream_->Wait();
    const int64_t wall_ns = absl::ToInt64Nanoseconds(absl::Now() - begin);
    ASSERT_TRUE(times.ok()) << times.status();
    ASSERT_TRUE(std::equal(expected.begin(), expected.end(), slab_.host)) << "round " << round;
    EXPECT_GE(std::min({times->h2d_ns, times->kernel_ns, times->d2h_ns}), 0) << round;
    // The device's clock has steps of its own.
    EXPECT_LE(times->h2d_ns + times->kernel_ns + times->d2h_ns, wall_ns + 3000) << round;
  }
}

// The end of small work is a word that a kernel writes after the answer. Nobody may see it first.
TEST_F(GatherTest, AnAnswerIsWholeWhenWaitReturns) {
  constexpr int kRounds = 3000;
  const auto run = [this](int thread) {
    auto stream = backend_->CreateStream().value();
    const Slab slab = backend_->AllocateSlab(size_t{64} << 10).value();
    auto* const words = reinterpret_cast<uint32_t*>(slab.host);
    std::mt19937 random(thread);
    for (int round = 0; round < kRounds && !HasFailure(); ++round) {
      const size_t count = 1 + random() % 4000;
      const auto tag = static_cast<uint32_t>(round * 8 + thread);
      for (size_t i = 0; i < count; ++i) words[i] = tag + static_cast<uint32_t>(i) * 4096;
      EXPECT_TRUE(stream->Upload(slab, 0, count * 4).ok());
      const RowsCopy move = {.from = slab.device,
                             .from_stride = count * 4,
                             .to = slab.device + 32768,
                             .to_stride = count * 4,
                             .row_bytes = count * 4,
                             .rows = 1,
                             .from_device = true};
      EXPECT_TRUE(stream->Wait().ok());
      EXPECT_TRUE(stream->Gather({&move, 1}).ok());
      EXPECT_TRUE(stream->Download(slab, 32768, count * 4).ok());
      EXPECT_TRUE(stream->Wait().ok());
      EXPECT_EQ(std::memcmp(slab.host, slab.host + 32768, count * 4), 0)
          << "thread " << thread << ", round " << round;
    }
    stream.reset();
    backend_->FreeSlab(slab);
  };
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) threads.emplace_back(run, t);
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
}  // namespace logitd::testing
