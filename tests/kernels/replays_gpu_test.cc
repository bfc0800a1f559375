// Small work of a stream: several launches the first time, a graph from then on.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/backend.h"
#include "kernels/cuda/replays.h"
#include "kernels/softmax_topk.h"
#include "tests/kernels/cuda_test.h"

namespace logitd::testing {
namespace {

class ReplaysTest : public CudaTest {
 protected:
  void SetUp() override {
    CudaTest::SetUp();
    if (IsSkipped()) return;
    ASSERT_EQ(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), cudaSuccess);
    ASSERT_EQ(cudaMalloc(reinterpret_cast<void**>(&word_), 4), cudaSuccess);
    replays_ = std::make_unique<cuda::Replays>(stream_);
  }
  void TearDown() override {
    if (stream_ == nullptr) return;
    cudaStreamSynchronize(stream_);
    replays_.reset();
    cudaFree(word_);
    cudaStreamDestroy(stream_);
  }

  // Runs work that sets the word to `value`, and returns the word.
  int Set(const std::string& key, int value) {
    const cudaError_t error = replays_->Run(key, [&] {
      ++enqueued_;
      return cudaMemsetAsync(word_, value, 4, stream_);
    });
    EXPECT_EQ(error, cudaSuccess);
    int word = 0;
    cudaMemcpyAsync(&word, word_, 4, cudaMemcpyDeviceToHost, stream_);
    EXPECT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
    return word & 0xff;
  }

  cudaStream_t stream_ = nullptr;
  int* word_ = nullptr;
  int enqueued_ = 0;
  std::unique_ptr<cuda::Replays> replays_;
};

TEST_F(ReplaysTest, TheSecondRunMakesAGraphAndTheThirdNeedsNoLaunches) {
  EXPECT_EQ(Set("a", 1), 1);
  EXPECT_EQ(replays_->replayed(), 0);
  EXPECT_EQ(Set("b", 2), 2);
  EXPECT_EQ(Set("a", 1), 1);
  EXPECT_EQ(replays_->replayed(), 1);
  EXPECT_EQ(enqueued_, 3);
  for (int i = 0; i < 5; ++i) EXPECT_EQ(Set("a", 1), 1);
  EXPECT_EQ(enqueued_, 3);
}

TEST_F(ReplaysTest, TheGraphThatWasUsedLongestAgoMakesRoom) {
  for (int round = 0; round < 3; ++round) {
    for (int i = 0; i < 100; ++i) {
      ASSERT_EQ(Set(absl::StrCat(i), i), i);
      ASSERT_EQ(Set("often", 200), 200);
    }
  }
  EXPECT_EQ(replays_->replayed(), 299);  // "often"; the others are gone before they come again
}

TEST_F(ReplaysTest, WorkThatCannotBeAGraphRunsEachTime) {
  int runs = 0;
  for (int i = 0; i < 4; ++i) {
    const cudaError_t error = replays_->Run("waits", [&] {
      ++runs;
      const cudaError_t set = cudaMemsetAsync(word_, 7, 4, stream_);
      return set != cudaSuccess ? set : cudaStreamSynchronize(stream_);  // not within a capture
    });
    EXPECT_EQ(error, cudaSuccess) << i;
  }
  EXPECT_EQ(runs, 5);
  EXPECT_EQ(replays_->replayed(), 0);
}

// Rows that change where they lie, at few and at many places, with the same parameters and others.
TEST_F(ReplaysTest, AStreamAnswersForTheRowsAsTheyAreNow) {
  constexpr int64_t kVocab = 1000;
  constexpr size_t kRowBytes = kVocab * 4;
  constexpr size_t kParamsAt = size_t{64} << 10;
  constexpr size_t kAnswersAt = size_t{128} << 10;
  Backend* const backend = Cuda()->get();
  const Slab slab = backend->AllocateSlab(size_t{256} << 10).value();
  const SharedDeviceMemory shared = backend->AllocateShared(size_t{1} << 20).value();
  auto stream = backend->CreateStream().value();
  std::mt19937 random(5);
  std::normal_distribution<float> normal;
  for (int round = 0; round < 600; ++round) {
    const int64_t rows = 1 + static_cast<int64_t>(random() % 2);
    const auto k = static_cast<int32_t>(random() % 2 == 0 ? 1 : 4);
    const bool on_device = random() % 3 != 0;
    const size_t place = random() % (round % 200 < 100 ? 2 : 60) * 2 * kRowBytes;
    std::vector<float> logits(static_cast<size_t>(rows * kVocab));
    for (float& logit : logits) logit = normal(random);
    auto* const params = reinterpret_cast<SoftmaxTopKRow*>(slab.host + kParamsAt);
    for (int64_t r = 0; r < rows; ++r) {
      params[r] = {.first_entry = r * k, .temperature = 0.5f + 0.25f * (round % 5), .k = k};
    }
    const size_t params_bytes = static_cast<size_t>(rows) * sizeof(SoftmaxTopKRow);
    const size_t row_bytes = static_cast<size_t>(rows) * kRowBytes;
    std::memset(slab.host + kAnswersAt, 0x7f, 4096);
    if (on_device) {
      ASSERT_TRUE(backend
                      ->WriteShared(shared.data + place,
                                    {reinterpret_cast<const std::byte*>(logits.data()), row_bytes})
                      .ok());
    } else {
      std::memcpy(slab.host, logits.data(), row_bytes);
      ASSERT_TRUE(stream->Upload(slab, 0, row_bytes).ok());
    }
    ASSERT_TRUE(stream->Upload(slab, kParamsAt, params_bytes).ok());
    const RowsCopy copy = {.from = shared.data + place,
                           .from_stride = kRowBytes,
                           .to = slab.device,
                           .to_stride = kRowBytes,
                           .row_bytes = kRowBytes,
                           .rows = rows,
                           .from_device = true};
    if (on_device) {
      ASSERT_TRUE(stream->Gather({&copy, 1}).ok());
    }
    std::byte* const answers = slab.device + kAnswersAt;
    ASSERT_TRUE(
        stream
            ->SoftmaxTopK({.logits = {.data = slab.device,
                                      .rows = rows,
                                      .cols = kVocab,
                                      .row_stride = kVocab},
                           .rows = reinterpret_cast<const SoftmaxTopKRow*>(slab.device + kParamsAt),
                           .max_k = k,
                           .indices = reinterpret_cast<int32_t*>(answers),
                           .probs = reinterpret_cast<float*>(answers + 64),
                           .logsumexp = reinterpret_cast<float*>(answers + 128),
                           .status = reinterpret_cast<RowStatus*>(answers + 256)})
            .ok());
    ASSERT_TRUE(stream->Download(slab, kAnswersAt, 512).ok());
    const auto times = stream->Wait();
    ASSERT_TRUE(times.ok()) << times.status();
    EXPECT_GT(times->kernel_ns, 0);
    const auto* const indices = reinterpret_cast<const int32_t*>(slab.host + kAnswersAt);
    const auto* const probs = reinterpret_cast<const float*>(slab.host + kAnswersAt + 64);
    for (int64_t r = 0; r < rows; ++r) {
      const float* const row = logits.data() + r * kVocab;
      std::vector<int32_t> order(kVocab);
      std::iota(order.begin(), order.end(), 0);
      std::stable_sort(order.begin(), order.end(),
                       [row](int32_t a, int32_t b) { return row[a] > row[b]; });
      double sum = 0;
      for (int64_t i = 0; i < kVocab; ++i) {
        sum += std::exp((double{row[i]} - row[order[0]]) / params[r].temperature);
      }
      for (int32_t i = 0; i < k; ++i) {
        ASSERT_EQ(indices[r * k + i], order[static_cast<size_t>(i)]) << "round " << round;
        const double prob = std::exp((double{row[order[static_cast<size_t>(i)]]} - row[order[0]]) /
                                     params[r].temperature) /
                            sum;
        ASSERT_NEAR(probs[r * k + i], prob, 1e-5) << "round " << round;
      }
    }
  }
  stream.reset();
  backend->FreeSlab(slab);
  close(shared.fd);
  backend->FreeShared(shared);
}

}  // namespace
}  // namespace logitd::testing
