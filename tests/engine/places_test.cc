#include "server/engine/places.h"

#include <condition_variable>
#include <cstring>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "kernels/backend.h"

namespace logitd::engine {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;
constexpr size_t kPage = 4096;

// A device that only pins memory.
class PinningBackend final : public Backend {
 public:
  explicit PinningBackend(bool is_host) { info_.is_host = is_host; }

  // From the next piece on.
  void FailToPin() {
    const std::lock_guard lock(mutex_);
    fails_ = true;
  }
  int pieces() {
    const std::lock_guard lock(mutex_);
    return pieces_;
  }
  void WaitUntilTried(int times) {
    std::unique_lock lock(mutex_);
    tried_.wait(lock, [&] { return tries_ >= times; });
  }

  const DeviceInfo& device() const override { return info_; }
  absl::StatusOr<Slab> AllocateSlab(size_t) override { return absl::UnimplementedError(""); }
  void FreeSlab(const Slab&) override {}
  absl::StatusOr<DeviceMemory> AllocateDevice(size_t) override {
    return absl::UnimplementedError("");
  }
  void FreeDevice(const DeviceMemory&) override {}
  absl::StatusOr<std::unique_ptr<Stream>> CreateStream(StreamUse) override {
    return absl::UnimplementedError("");
  }
  absl::Status PinHost(std::byte*, size_t) override {
    const std::lock_guard lock(mutex_);
    ++tries_;
    tried_.notify_all();
    if (fails_) return absl::UnavailableError("no memory may be locked");
    ++pieces_;
    return absl::OkStatus();
  }
  void UnpinHost(std::byte*) override {
    const std::lock_guard lock(mutex_);
    --pieces_;
  }

 private:
  DeviceInfo info_;
  std::mutex mutex_;
  std::condition_variable tried_;
  bool fails_ = false;
  int tries_ = 0;
  int pieces_ = 0;
};

class PlacesTest : public ::testing::Test {
 protected:
  PinningBackend pages_{/*is_host=*/true};
  PinningBackend pins_{/*is_host=*/false};
  const Devices host_{{&pages_}};
  const Devices gpu_{{&pins_}};
};

TEST_F(PlacesTest, RunsDoNotOverlapAndComeBack) {
  Places places(host_, 8 * kMiB);
  constexpr unsigned kSeed = 7;
  std::mt19937 random(kSeed);
  struct Run {
    std::shared_ptr<std::byte> memory;
    size_t bytes;
    std::byte mark;
  };
  std::vector<Run> runs;
  for (int step = 0; step < 4000; ++step) {
    if (runs.empty() || random() % 5 < 3) {
      const size_t bytes = 1 + random() % (size_t{1} << (10 + random() % 11));
      auto memory = places.Take(bytes);
      if (memory == nullptr) continue;
      ASSERT_EQ(reinterpret_cast<uintptr_t>(memory.get()) % kPage, 0u);
      const auto mark = static_cast<std::byte>(random());
      std::memset(memory.get(), static_cast<int>(mark), bytes);
      runs.push_back({std::move(memory), bytes, mark});
    } else {
      const size_t i = random() % runs.size();
      ASSERT_EQ(runs[i].memory.get()[0], runs[i].mark);
      ASSERT_EQ(runs[i].memory.get()[runs[i].bytes - 1], runs[i].mark);
      std::swap(runs[i], runs.back());
      runs.pop_back();
    }
  }
  runs.clear();
  EXPECT_NE(places.Take(8 * kMiB), nullptr) << "free runs that touch are one run";
}

TEST_F(PlacesTest, TheSmallestRunThatFitsIsTaken) {
  Places places(host_, 10 * kPage);
  auto a = places.Take(2 * kPage);
  auto b = places.Take(kPage);
  auto c = places.Take(3 * kPage);
  auto d = places.Take(kPage);
  std::byte* const at_a = a.get();
  std::byte* const at_c = c.get();
  a.reset();
  c.reset();  // free: 2 pages, 3 pages, 3 pages at the end
  EXPECT_EQ(places.Take(2 * kPage - 1).get(), at_a);
  EXPECT_EQ(places.Take(3 * kPage).get(), at_c);
  EXPECT_EQ(places.Take(4 * kPage), nullptr);
}

TEST_F(PlacesTest, MemoryOutlivesTheObject) {
  auto places = std::make_unique<Places>(host_, kMiB);
  auto memory = places->Take(kMiB);
  places.reset();
  std::memset(memory.get(), 1, kMiB);
}

TEST_F(PlacesTest, WhatIsGivenBackReadsAsZeros) {
  Places places(host_, 4 * kMiB);
  const auto kept = places.Take(kPage);
  kept.get()[0] = std::byte{5};
  auto memory = places.Take(kMiB);
  std::byte* const at = memory.get();
  at[0] = std::byte{7};
  memory.reset();
  places.GiveBack();
  memory = places.Take(kMiB);
  ASSERT_EQ(memory.get(), at);
  EXPECT_EQ(at[0], std::byte{0});
  EXPECT_EQ(kept.get()[0], std::byte{5});
}

TEST_F(PlacesTest, OnlyPinnedPiecesAreHandedOutForAGpu) {
  {
    Places places(gpu_, 192 * kMiB);
    pins_.WaitUntilTried(3);
    std::shared_ptr<std::byte> all;
    while ((all = places.Take(192 * kMiB)) == nullptr) std::this_thread::yield();
    EXPECT_EQ(places.pinned(), 192 * kMiB);
    EXPECT_EQ(pins_.pieces(), 3);
    places.GiveBack();  // pinned memory stays
  }
  EXPECT_EQ(pins_.pieces(), 0);
}

TEST_F(PlacesTest, WithoutPinnedMemoryThereAreNone) {
  pins_.FailToPin();
  Places places(gpu_, 64 * kMiB);
  pins_.WaitUntilTried(1);
  EXPECT_EQ(places.Take(kPage), nullptr);
  EXPECT_EQ(places.pinned(), 0);
}

}  // namespace
}  // namespace logitd::engine
