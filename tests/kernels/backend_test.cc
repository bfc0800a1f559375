#include "kernels/backend.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <limits>

#include "tests/kernels/op_runner.h"
#include "tests/kernels/softmax_topk_cases.h"

namespace logitd::testing {
namespace {

using ::testing::HasSubstr;

TEST(CreateBackendTest, UnknownKindNamesTheKindsThereAre) {
  const auto backend = CreateBackend("tpu", {});
  EXPECT_EQ(backend.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(backend.status().message(), "backend: got \"tpu\", allowed: auto, cpu, cuda");
}

TEST(CreateBackendTest, ThreadCountsOutOfRangeAreRefused) {
  EXPECT_EQ(CreateBackend("cpu", {.cpu_threads = -1}).status().message(),
            "cpu_threads: got -1, allowed 0..1024");
  EXPECT_EQ(CreateBackend("cpu", {.cpu_threads = 1025}).status().message(),
            "cpu_threads: got 1025, allowed 0..1024");
}

TEST(CreateBackendTest, AutoAlwaysFindsSomething) {
  const auto backend = CreateBackend("auto", {});
  ASSERT_TRUE(backend.ok()) << backend.status();
  EXPECT_THAT((*backend)->device().backend, ::testing::AnyOf("cpu", "cuda"));
}

TEST(CpuBackendTest, TellsItsThreadsAndMemory) {
  auto backend = CreateBackend("cpu", {.cpu_threads = 3}).value();
  EXPECT_EQ(backend->device().backend, "cpu");
  EXPECT_THAT(backend->device().name, HasSubstr("3 threads"));
  EXPECT_GT(backend->device().memory_bytes, 0);
}

TEST(CpuBackendTest, ASlabIsOneAddressAlignedForAnyElement) {
  auto backend = CreateBackend("cpu", {}).value();
  for (size_t bytes : {size_t{0}, size_t{1}, size_t{4097}, size_t{5} << 20}) {
    const Slab slab = backend->AllocateSlab(bytes).value();
    EXPECT_EQ(slab.host, slab.device);
    EXPECT_EQ(slab.bytes, bytes);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(slab.host) % 4096, 0u);
    std::memset(slab.host, 7, bytes);
    backend->FreeSlab(slab);
  }
}

TEST(CpuBackendTest, MoreMemoryThanThereIsIsRefusedWithBothNumbers) {
  auto backend = CreateBackend("cpu", {}).value();
  for (size_t bytes : {std::numeric_limits<size_t>::max(), size_t{1} << 60}) {
    const auto slab = backend->AllocateSlab(bytes);
    EXPECT_EQ(slab.status().code(), absl::StatusCode::kResourceExhausted);
    EXPECT_THAT(std::string(slab.status().message()), HasSubstr(std::to_string(bytes)));
  }
}

TEST(CpuBackendTest, WaitReportsTheOpsTimeOnce) {
  auto backend = CreateBackend("cpu", {}).value();
  auto stream = backend->CreateStream().value();
  float logits[] = {1, 2, 3};
  SoftmaxTopKRow row{.first_entry = 0, .temperature = 1, .k = 1};
  int32_t index;
  float prob, logsumexp;
  RowStatus status;
  ASSERT_TRUE(
      stream
          ->Run(SoftmaxTopKArgs{.logits = {.data = logits, .rows = 1, .cols = 3, .row_stride = 3},
                                .rows = &row,
                                .max_k = 1,
                                .indices = &index,
                                .probs = &prob,
                                .logsumexp = &logsumexp,
                                .status = &status})
          .ok());
  EXPECT_EQ(index, 2);
  const StreamTimes times = stream->Wait().value();
  EXPECT_GT(times.kernel_ns, 0);
  EXPECT_EQ(times.h2d_ns, 0);
  EXPECT_EQ(times.d2h_ns, 0);
  EXPECT_EQ(stream->Wait().value().kernel_ns, 0);
}

}  // namespace
}  // namespace logitd::testing
