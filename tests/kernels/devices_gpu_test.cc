// Two CUDA devices in one process. Skipped where there is one.
#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "kernels/backend.h"
#include "tests/kernels/op_runner.h"

namespace logitd::testing {
namespace {

// Devices 0 and 1, or none.
std::vector<std::unique_ptr<Backend>> TwoDevices() {
  auto backends = CreateBackends("cuda", {.devices = {0, 1}});
  return backends.ok() ? *std::move(backends) : std::vector<std::unique_ptr<Backend>>();
}

HostTensor Matrix(DType dtype, int64_t rows, int64_t cols) {
  HostTensor matrix(dtype, rows, cols, cols, 0);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < cols; ++c) {
      matrix.Set(r, c, static_cast<float>((r * 7919 + c * 104729) % 2003) / 1001.5f - 1);
    }
  }
  return matrix;
}

std::vector<SoftmaxTopKRow> TopRows(int64_t rows, int32_t k) {
  std::vector<SoftmaxTopKRow> top;
  for (int64_t r = 0; r < rows; ++r) {
    top.push_back({.first_entry = r * k, .temperature = 0.7f, .k = k});
  }
  return top;
}

TEST(CudaDevicesTest, OneThreadUsesBothInTurnAndBothGiveTheSameBits) {
  const auto backends = TwoDevices();
  if (backends.empty()) GTEST_SKIP() << "there are no two CUDA devices";
  std::vector<std::unique_ptr<OpRunner>> runners;
  for (const auto& backend : backends) runners.push_back(OpRunner::Create(backend.get()).value());
  for (const int64_t rows : {1, 3, 64, 300}) {
    const HostTensor logits = Matrix(DType::kF32, rows, 50257);
    const HostTensor hidden = Matrix(DType::kBF16, rows, 512);
    const HostHead head = {.weight = Matrix(DType::kBF16, 4096, 512)};
    const std::vector<SoftmaxTopKRow> top = TopRows(rows, 5);
    LossBatch losses;
    losses.rows.assign(static_cast<size_t>(rows), {.target = 17});
    std::vector<TopKAnswer> tops, linear_tops;
    std::vector<LossAnswer> loss, linear_loss;
    for (const auto& runner : runners) {
      tops.push_back(runner->SoftmaxTopK(logits, top, 5 * rows).value());
      linear_tops.push_back(runner->LinearTopK(hidden, head, top, 5 * rows).value());
      loss.push_back(runner->CrossEntropy(logits, losses).value());
      linear_loss.push_back(runner->LinearCrossEntropy(hidden, head, losses).value());
    }
    EXPECT_EQ(tops[0].indices, tops[1].indices) << rows;
    EXPECT_EQ(tops[0].probs, tops[1].probs) << rows;
    EXPECT_EQ(linear_tops[0].indices, linear_tops[1].indices) << rows;
    EXPECT_EQ(linear_tops[0].probs, linear_tops[1].probs) << rows;
    EXPECT_EQ(loss[0].loss, loss[1].loss) << rows;
    EXPECT_EQ(linear_loss[0].loss, linear_loss[1].loss) << rows;
  }
}

// Uploads the host's part of one slab to the device's part of another one, and back.
void ExpectCopies(Backend& owner, Backend& backend) {
  constexpr size_t kBytes = size_t{1} << 20;
  const Slab host = owner.AllocateSlab(kBytes).value();
  const Slab device = backend.AllocateSlab(kBytes).value();
  const Slab mixed = {.host = host.host, .device = device.device, .bytes = kBytes};
  const auto stream = backend.CreateStream(StreamUse::kCopies).value();
  std::memset(host.host, 0x5c, kBytes);
  ASSERT_TRUE(stream->Upload(mixed, 0, kBytes).ok());
  ASSERT_TRUE(stream->Wait().ok());
  std::memset(host.host, 0, kBytes);
  ASSERT_TRUE(stream->Download(mixed, 0, kBytes).ok());
  ASSERT_TRUE(stream->Wait().ok());
  for (size_t i = 0; i < kBytes; ++i) ASSERT_EQ(host.host[i], std::byte{0x5c}) << i;
  backend.FreeSlab(device);
}

TEST(CudaDevicesTest, ADeviceCopiesFromHostMemoryThatAnotherOnePinned) {
  const auto backends = TwoDevices();
  if (backends.empty()) GTEST_SKIP() << "there are no two CUDA devices";
  ExpectCopies(*backends[0], *backends[1]);
  ExpectCopies(*backends[1], *backends[0]);
}

// CUDA gave no more of device 0 after an illegal access on device 1.
constexpr int kBothLost = 12;

// Loses device 1, then uses device 0, with memory that device 1 pinned.
[[noreturn]] void LoseOneAndUseTheOther() {
  const auto backends = TwoDevices();
  const Slab pinned = backends[1]->AllocateSlab(size_t{1} << 20).value();
  const auto lost = backends[1]->CreateStream(StreamUse::kOps).value();
  SoftmaxTopKArgs wild;
  wild.logits = {.data = reinterpret_cast<const void*>(0x10000),
                 .dtype = DType::kF32,
                 .rows = 4,
                 .cols = 4096,
                 .row_stride = 4096};
  wild.rows = reinterpret_cast<const SoftmaxTopKRow*>(0x20000);
  wild.max_k = 1;
  lost->Run(wild).IgnoreError();
  const absl::Status error = lost->Wait().status();
  std::fprintf(stderr, "device 1: %s\n", error.ToString().c_str());
  if (!absl::IsInternal(error)) std::_Exit(10);
  if (!absl::IsInternal(lost->Wait().status())) std::_Exit(11);  // it stays lost

  const auto runner = OpRunner::Create(backends[0].get());
  if (!runner.ok()) {
    std::fprintf(stderr, "device 0: %s\n", runner.status().ToString().c_str());
    std::_Exit(kBothLost);
  }
  const HostTensor logits = Matrix(DType::kF32, 8, 50257);
  if (!(*runner)->SoftmaxTopK(logits, TopRows(8, 1), 8).ok()) std::_Exit(13);
  const Slab own = backends[0]->AllocateSlab(pinned.bytes).value();
  const auto stream = backends[0]->CreateStream(StreamUse::kCopies).value();
  std::memset(pinned.host, 0x3d, pinned.bytes);
  const Slab mixed = {.host = pinned.host, .device = own.device, .bytes = pinned.bytes};
  if (!stream->Upload(mixed, 0, mixed.bytes).ok() || !stream->Wait().ok()) std::_Exit(14);
  std::memset(pinned.host, 0, pinned.bytes);
  if (!stream->Download(mixed, 0, mixed.bytes).ok() || !stream->Wait().ok()) std::_Exit(15);
  for (size_t i = 0; i < pinned.bytes; ++i) {
    if (pinned.host[i] != std::byte{0x3d}) std::_Exit(16);
  }
  std::_Exit(0);
}

// An illegal access may take the whole process from CUDA; then device 0 says so at once, and the
// server exits for a restart. Where device 0 still works, its answers and copies are right.
TEST(CudaDevicesDeathTest, AfterOneIsLostTheOtherOneWorksOrSaysThatItIsLostToo) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  if (TwoDevices().empty()) GTEST_SKIP() << "there are no two CUDA devices";
  const auto works_or_says_so = [](int status) {
    return ::testing::ExitedWithCode(0)(status) || ::testing::ExitedWithCode(kBothLost)(status);
  };
  EXPECT_EXIT(LoseOneAndUseTheOther(), works_or_says_so, "device 1: INTERNAL");
}

}  // namespace
}  // namespace logitd::testing
