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
#include "kernels/cuda/stream.h"
#include "kernels/sample.h"
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
            ->Run(SoftmaxTopKArgs{
                .logits = {.data = slab.device, .rows = rows, .cols = kVocab, .row_stride = kVocab},
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
  EXPECT_GT(static_cast<cuda::DeviceStream&>(*stream).replayed(), 200);
  stream.reset();
  backend->FreeSlab(slab);
  close(shared.fd);
  backend->FreeShared(shared);
}

// A slab with logits at 0, parameters and answers, and a stream.
struct Bench {
  static constexpr int64_t kVocab = 1000;
  static constexpr size_t kRowBytes = kVocab * 4;
  static constexpr size_t kParamsAt = size_t{64} << 10;
  static constexpr size_t kAnswersAt = size_t{128} << 10;
  static constexpr size_t kAnswersBytes = 4096;

  explicit Bench(size_t bytes = size_t{256} << 10) : backend(Cuda()->get()) {
    slab = backend->AllocateSlab(bytes).value();
    stream = backend->CreateStream().value();
    std::memset(slab.host, 0, slab.bytes);
  }
  ~Bench() {
    stream.reset();
    backend->FreeSlab(slab);
  }
  template <class T>
  T* At(size_t offset) const {
    return reinterpret_cast<T*>(slab.device + kAnswersAt + offset);
  }
  // The best token of the slab's first row; its answer comes to `at`, in 256 bytes.
  absl::Status TopTokenAt(size_t at) const {
    return stream->Run(SoftmaxTopKArgs{
        .logits = {.data = slab.device, .rows = 1, .cols = kVocab, .row_stride = kVocab},
        .rows = reinterpret_cast<const SoftmaxTopKRow*>(slab.device + kParamsAt),
        .max_k = 1,
        .indices = At<int32_t>(at),
        .probs = At<float>(at + 64),
        .logsumexp = At<float>(at + 128),
        .status = At<RowStatus>(at + 192)});
  }

  Backend* const backend;
  Slab slab;
  std::unique_ptr<Stream> stream;
};

std::vector<float> RandomLogits(int64_t count, std::mt19937& random) {
  std::normal_distribution<float> normal;
  std::vector<float> logits(static_cast<size_t>(count));
  for (float& logit : logits) logit = 3 * normal(random);
  return logits;
}

// As a graph, and in a batch that is too large for one: the same bits.
TEST_F(ReplaysTest, SampleAsAGraphAnswersAsWithoutOne) {
  Bench small;
  Bench large;
  std::mt19937 random(6);
  for (int round = 0; round < 100; ++round) {
    const int64_t rows = 1 + round % 3;
    const std::vector<float> logits = RandomLogits(rows * Bench::kVocab, random);
    for (Bench* const bench : {&small, &large}) {
      std::memcpy(bench->slab.host, logits.data(), logits.size() * 4);
      auto* const params = reinterpret_cast<SampleRow*>(bench->slab.host + Bench::kParamsAt);
      for (int64_t r = 0; r < rows; ++r) {
        params[r] = {.seed = 7,
                     .position = static_cast<uint64_t>(round),
                     .first_mask_word = -1,
                     .first_top_entry = 3 * r,
                     .active = 1,
                     .temperature = round % 5 == 0 ? 0.0f : 0.8f,
                     .top_k = round % 2 == 0 ? 0 : 50,
                     .top_p = round % 4 == 0 ? 1.0f : 0.9f,
                     .repetition = 1,
                     .top_logprobs = 3,
                     .want_rank = true};
      }
      if (bench == &large) {
        constexpr size_t kPieces = 8;  // more than a graph takes
        const size_t piece = bench->slab.bytes / kPieces;
        for (size_t i = 0; i < kPieces; ++i) {
          ASSERT_TRUE(bench->stream->Upload(bench->slab, i * piece, piece).ok());
        }
      } else {
        ASSERT_TRUE(bench->stream->Upload(bench->slab, 0, logits.size() * 4).ok());
        ASSERT_TRUE(bench->stream
                        ->Upload(bench->slab, Bench::kParamsAt,
                                 sizeof(SampleRow) * static_cast<size_t>(rows))
                        .ok());
      }
      ASSERT_TRUE(bench->stream
                      ->Run(SampleArgs{.logits = {.data = bench->slab.device,
                                                  .rows = rows,
                                                  .cols = Bench::kVocab,
                                                  .row_stride = Bench::kVocab},
                                       .rows = reinterpret_cast<const SampleRow*>(
                                           bench->slab.device + Bench::kParamsAt),
                                       .edited = false,
                                       .tokens = bench->At<int32_t>(0),
                                       .logprobs = bench->At<float>(64),
                                       .ranks = bench->At<int32_t>(128),
                                       .logsumexp = bench->At<float>(192),
                                       .top_ids = bench->At<int32_t>(512),
                                       .top_logprobs = bench->At<float>(768),
                                       .status = bench->At<RowStatus>(1024),
                                       .support_size = bench->At<int32_t>(256),
                                       .entropies = bench->At<float>(1280),
                                       .raw_entropies = bench->At<float>(1344)})
                      .ok());
      std::memset(bench->slab.host + Bench::kAnswersAt, 0, Bench::kAnswersBytes);
      ASSERT_TRUE(
          bench->stream->Download(bench->slab, Bench::kAnswersAt, Bench::kAnswersBytes).ok());
      const auto times = bench->stream->Wait();
      ASSERT_TRUE(times.ok()) << times.status();
    }
    const auto same = [&](size_t at, size_t bytes) {
      return std::memcmp(small.slab.host + Bench::kAnswersAt + at,
                         large.slab.host + Bench::kAnswersAt + at, bytes) == 0;
    };
    const auto n = static_cast<size_t>(rows) * 4;
    EXPECT_TRUE(same(0, n) && same(64, n) && same(128, n) && same(192, n)) << round;
    EXPECT_TRUE(same(512, 3 * n) && same(768, 3 * n)) << round;
    const auto* const lse =
        reinterpret_cast<const float*>(small.slab.host + Bench::kAnswersAt + 192);
    EXPECT_GT(lse[0], 3.0f) << "the row was read";
  }
  EXPECT_GT(static_cast<cuda::DeviceStream&>(*small.stream).replayed(), 80);
  EXPECT_EQ(static_cast<cuda::DeviceStream&>(*large.stream).replayed(), 0);
}

// One launch reads up to a mebibyte of the host, all uploads together. What is more goes by a copy
// engine, and then there is no graph.
TEST_F(ReplaysTest, UploadsOfMoreThanAMebibyteInSumAreNoGraph) {
  constexpr size_t kMost = size_t{1} << 20;
  constexpr size_t kOtherAt = size_t{256} << 10;  // what the op does not read
  constexpr size_t kOfOp = Bench::kRowBytes + sizeof(SoftmaxTopKRow);
  constexpr int kRounds = 20;
  std::mt19937 random(7);
  for (const size_t other : {kMost - kOfOp, kMost - kOfOp + 2}) {
    Bench bench(kOtherAt + kMost);
    Stream& stream = *bench.stream;
    *reinterpret_cast<SoftmaxTopKRow*>(bench.slab.host + Bench::kParamsAt) = {.temperature = 1,
                                                                              .k = 1};
    for (int round = 0; round < kRounds; ++round) {
      const std::vector<float> logits = RandomLogits(Bench::kVocab, random);
      const auto filler = static_cast<std::byte>(round + 1);
      std::memcpy(bench.slab.host, logits.data(), Bench::kRowBytes);
      std::fill_n(bench.slab.host + kOtherAt, other, filler);
      ASSERT_TRUE(stream.Upload(bench.slab, kOtherAt, other).ok());
      ASSERT_TRUE(stream.Upload(bench.slab, 0, Bench::kRowBytes).ok());
      ASSERT_TRUE(stream.Upload(bench.slab, Bench::kParamsAt, sizeof(SoftmaxTopKRow)).ok());
      ASSERT_TRUE(bench.TopTokenAt(0).ok());
      ASSERT_TRUE(stream.Download(bench.slab, Bench::kAnswersAt, 256).ok());
      ASSERT_TRUE(stream.Wait().ok());
      EXPECT_EQ(*reinterpret_cast<const int32_t*>(bench.slab.host + Bench::kAnswersAt),
                std::max_element(logits.begin(), logits.end()) - logits.begin())
          << other << " round " << round;
      std::byte* const got = bench.slab.host + kOtherAt;
      std::fill_n(got, other, std::byte{0});
      ASSERT_TRUE(stream.Download(bench.slab, kOtherAt, other).ok());
      ASSERT_TRUE(stream.Wait().ok());
      EXPECT_EQ(std::count(got, got + other, filler), static_cast<int64_t>(other)) << round;
    }
    const int64_t replayed = static_cast<cuda::DeviceStream&>(stream).replayed();
    if (other + kOfOp <= kMost) {
      EXPECT_GT(replayed, kRounds / 2);
    } else {
      EXPECT_EQ(replayed, 0);
    }
  }
}

// Uploads of all kinds to the same place, ops and downloads, in any order between two Waits.
TEST_F(ReplaysTest, EachCallComesAfterThoseBeforeIt) {
  constexpr int kSources = 6;
  constexpr int kMostOps = 8;
  constexpr size_t kSourceBytes = size_t{20} << 10;  // with what follows a row
  constexpr size_t kSlot = 256;
  Bench bench;
  Stream& stream = *bench.stream;
  const Slab sources = bench.backend->AllocateSlab(kSources * kSourceBytes).value();
  const SharedDeviceMemory shared = bench.backend->AllocateShared(kSources * kSourceBytes).value();
  std::mt19937 random(7);
  std::vector<int32_t> best;
  for (int s = 0; s < kSources; ++s) {
    const std::vector<float> logits = RandomLogits(kSourceBytes / 4, random);
    std::memcpy(sources.host + s * kSourceBytes, logits.data(), kSourceBytes);
    best.push_back(static_cast<int32_t>(
        std::max_element(logits.begin(), logits.begin() + Bench::kVocab) - logits.begin()));
  }
  ASSERT_TRUE(
      bench.backend->WriteShared(shared.data, {sources.host, kSources * kSourceBytes}).ok());
  *reinterpret_cast<SoftmaxTopKRow*>(bench.slab.host + Bench::kParamsAt) = {.temperature = 1,
                                                                            .k = 1};
  for (int round = 0; round < 400; ++round) {
    std::string steps;
    std::vector<int32_t> want;
    int now = -1;
    ASSERT_TRUE(stream.Upload(bench.slab, Bench::kParamsAt, sizeof(SoftmaxTopKRow)).ok());
    std::memset(bench.slab.host + Bench::kAnswersAt, 0x7f, Bench::kAnswersBytes);
    for (int step = 0; step < 10 || want.empty(); ++step) {
      const auto kind = random() % 7;
      steps += static_cast<char>('0' + kind);
      if (kind < 4) {
        now = static_cast<int>(random() % kSources);
        const Slab pair = {.host = sources.host + now * kSourceBytes,
                           .device = bench.slab.device,
                           .bytes = kSourceBytes};
        const RowsCopy copy = {.from = shared.data + now * kSourceBytes,
                               .from_stride = Bench::kRowBytes,
                               .to = bench.slab.device,
                               .to_stride = Bench::kRowBytes,
                               .row_bytes = Bench::kRowBytes,
                               .rows = 1,
                               .from_device = true};
        const absl::Status copied = kind == 0   ? stream.Upload(pair, 0, Bench::kRowBytes)
                                    : kind == 1 ? stream.Upload(pair, 0, kSourceBytes)
                                    : kind == 2
                                        ? stream.Fill(pair, 0, Bench::kRowBytes, bench.slab.device)
                                        : stream.Gather({&copy, 1});
        ASSERT_TRUE(copied.ok()) << copied;
      } else if (kind < 6 && now >= 0 && want.size() < kMostOps) {
        const size_t at = want.size() * kSlot;
        want.push_back(best[static_cast<size_t>(now)]);
        ASSERT_TRUE(bench.TopTokenAt(at).ok());
      } else if (!want.empty()) {
        ASSERT_TRUE(stream.Download(bench.slab, Bench::kAnswersAt, want.size() * kSlot).ok());
      }
    }
    if (random() % 2 == 0) {
      ASSERT_TRUE(stream.Wait().ok()) << steps;  // its end is that of the last op
      steps += 'w';
    }
    ASSERT_TRUE(stream.Download(bench.slab, Bench::kAnswersAt, want.size() * kSlot).ok());
    const auto times = stream.Wait();
    ASSERT_TRUE(times.ok()) << times.status();
    for (size_t i = 0; i < want.size(); ++i) {
      int32_t got = 0;
      std::memcpy(&got, bench.slab.host + Bench::kAnswersAt + i * kSlot, 4);
      ASSERT_EQ(got, want[i]) << "round " << round << ", op " << i << " of " << steps;
    }
  }
  bench.stream.reset();
  bench.backend->FreeSlab(sources);
  close(shared.fd);
  bench.backend->FreeShared(shared);
}

}  // namespace
}  // namespace logitd::testing
