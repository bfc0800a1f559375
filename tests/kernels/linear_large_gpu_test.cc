// The linear_* ops at the sizes of real heads, on the CUDA backend: what they add to the device's
// memory, their error, and bits that do not depend on other rows.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <initializer_list>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "kernels/backend.h"
#include "kernels/cuda/linear/product.h"
#include "kernels/cuda/ops.h"
#include "kernels/linear.h"
#include "tests/kernels/cross_entropy_cases.h"
#include "tests/kernels/cuda_test.h"
#include "tests/kernels/large_head.h"
#include "tests/kernels/reference.h"
#include "tests/kernels/sample_cases.h"

namespace logitd::testing {
namespace {

// ---- What the losses and their gradient add to the device's memory

constexpr int64_t kMiB = int64_t{1} << 20;
constexpr int64_t kLossRows = 4096;
constexpr int64_t kVocabs[] = {32000, 128256, 256000};

double MiB(int64_t bytes) { return static_cast<double>(bytes) / kMiB; }

// The device memory that this process holds, and the most that it held. The linker puts functions
// that count, at the end of this file, in place of the runtime's: the device's free memory would
// show other processes too. What cuBLASLt itself takes is not seen; it gets its workspace.
// Thread-safe.
class HeldMemory {
 public:
  void Add(const void* data, size_t bytes) {
    const std::lock_guard lock(mutex_);
    if (data == nullptr) return;
    sizes_[data] = static_cast<int64_t>(bytes);
    held_ += static_cast<int64_t>(bytes);
    most_ = std::max(most_, held_);
  }
  void Remove(const void* data) {
    const std::lock_guard lock(mutex_);
    const auto found = sizes_.find(data);
    if (found == sizes_.end()) return;
    held_ -= found->second;
    sizes_.erase(found);
  }

  // From here on the most that was held is what is held.
  int64_t Restart() {
    const std::lock_guard lock(mutex_);
    return most_ = held_;
  }
  int64_t most() const {
    const std::lock_guard lock(mutex_);
    return most_;
  }

 private:
  mutable std::mutex mutex_;
  // Guarded by mutex_.
  std::map<const void*, int64_t> sizes_;
  int64_t held_ = 0;
  int64_t most_ = 0;
};

HeldMemory& Held() {
  static auto& held = *new HeldMemory;
  return held;
}

// The most memory that `run` holds. A first run is not counted: it loads kernels and cuBLASLt, once
// a process.
template <class Run>
int64_t AddedBytes(Run run) {
  run();
  const int64_t before = Held().Restart();
  run();
  return Held().most() - before;
}

// Scratch of `bytes` in all. The last of them are a guard that the op must not write.
class OwnScratch {
 public:
  explicit OwnScratch(int64_t bytes) : memory_(bytes) {
    cudaDeviceProp properties;
    Must(cudaGetDeviceProperties(&properties, 0));
    scratch_ = {.data = memory_.data(),
                .bytes = static_cast<size_t>(bytes - kGuardBytes),
                .multiprocessors = properties.multiProcessorCount,
                .block_shared_bytes = static_cast<int>(properties.sharedMemPerBlockOptin),
                .clusters = properties.major >= 9};
    Must(cudaMemset(scratch_.data, 0, cuda::Scratch::kCounterBytes));
    const absl::Status made = products_.Init(cuda::ProductWorkspaceBytes(scratch_));
    if (!made.ok()) throw std::runtime_error(made.ToString());
  }

  const cuda::Scratch& scratch() const { return scratch_; }
  cuda::Products& products() { return products_; }
  bool IsGuardWhole() const {
    const auto guard = memory_.Download(static_cast<int64_t>(scratch_.bytes), kGuardBytes);
    return std::all_of(guard.begin(), guard.end(),
                       [](std::byte b) { return b == std::byte{0xff}; });
  }

 private:
  static constexpr int64_t kGuardBytes = int64_t{64} << 10;

  DeviceArray<std::byte> memory_;
  cuda::Scratch scratch_;
  cuda::Products products_;
};

// What is measured: the losses; with their gradients, by two ops or by one.
enum class Step { kForward, kForwardThenBackward, kTraining };

// Inputs and outputs of a training step's last layer, and the ways to do it.
class LossProblem {
 public:
  LossProblem(const DeviceArray<uint16_t>& weight, int64_t vocab)
      : vocab_(vocab),
        targets_(MakeTargets(vocab)),
        hidden_(absl::MakeConstSpan(MakeHidden(targets_))),
        weight_(weight),
        rows_(absl::MakeConstSpan(MakeRows(targets_))),
        upstream_(std::vector<float>(kLossRows, 1.0f / kLossRows)),
        loss_(kLossRows),
        logsumexp_(kLossRows),
        target_logprob_(kLossRows),
        status_(kLossRows),
        d_hidden_(kLossRows * kHidden),
        d_weight_(vocab * kHidden) {}

  // Fused and Unfused allocate what they need besides inputs and outputs. The gradients are those
  // of the mean of the losses.
  void Fused(int64_t scratch_bytes, Step step) {
    OwnScratch own(scratch_bytes);
    const LinearCrossEntropyTrainingArgs training{.gradient = {.hidden = Hidden(),
                                                               .head = Head(),
                                                               .rows = rows_.data(),
                                                               .upstream = upstream_.data(),
                                                               .d_hidden = DHidden(),
                                                               .d_weight = DWeight()},
                                                  .answers = Asks().answers};
    if (step == Step::kTraining) {
      Must(cuda::LinearCrossEntropyTraining(training, own.products(), own.scratch(), nullptr));
    } else {
      Must(cuda::LinearCrossEntropy(training.Forward(), own.products(), own.scratch(), nullptr));
    }
    if (step == Step::kForwardThenBackward) {
      Must(cuda::LinearCrossEntropyBackward(training.Backward(), own.products(), own.scratch(),
                                            nullptr));
    }
    Must(cudaDeviceSynchronize());
    EXPECT_TRUE(own.IsGuardWhole()) << "wrote after the end of scratch, V = " << vocab_;
  }

  // d_hidden of rows [first, first + rows) in a training call of their own.
  std::vector<uint16_t> OwnDHidden(int64_t first, int64_t rows) {
    OwnScratch own(296 * kMiB);
    const MutableTensorView d_hidden =
        MutableBf16View(d_hidden_.data() + first * kHidden, rows, kHidden);
    Must(cuda::LinearCrossEntropyTraining(
        {.gradient = {.hidden = Bf16View(hidden_.data() + first * kHidden, rows, kHidden),
                      .head = Head(),
                      .rows = rows_.data() + first,
                      .upstream = upstream_.data() + first,
                      .d_hidden = d_hidden,
                      .d_weight = DWeight()},
         .answers = Asks().answers},
        own.products(), own.scratch(), nullptr));
    Must(cudaDeviceSynchronize());
    return d_hidden_.Download(first * kHidden, rows * kHidden);
  }

  // Unfused with the least memory: logits of 16 bits, which their gradient overwrites.
  void Unfused(bool backward) {
    OwnScratch own(16 * kMiB);
    cuda::Scratch scratch = own.scratch();
    scratch.bytes -= own.products().workspace_bytes();
    std::byte* const workspace = scratch.data + scratch.bytes;
    const DeviceArray<uint16_t> logits(kLossRows * vocab_);
    const auto multiply = [&](cuda::MatrixProduct product) {
      product.workspace = workspace;
      Must(own.products().Enqueue(product, nullptr));
    };
    multiply({.a = Hidden(),
              .b = Head().weight,
              .transpose_b = true,
              .out = MutableBf16View(logits.data(), kLossRows, vocab_)});
    CrossEntropyArgs args = Asks();
    args.logits = Bf16View(logits.data(), kLossRows, vocab_);
    Must(cuda::CrossEntropy(args, scratch, nullptr));
    if (backward) {
      Must(cuda::CrossEntropyBackward(
          {.logits = args.logits,
           .rows = rows_.data(),
           .logsumexp = logsumexp_.data(),
           .upstream = upstream_.data(),
           .d_logits = MutableBf16View(logits.data(), kLossRows, vocab_)},
          nullptr));
      multiply({.a = args.logits, .b = Head().weight, .out = DHidden()});
      multiply({.a = args.logits, .transpose_a = true, .b = Hidden(), .out = DWeight()});
    }
    Must(cudaDeviceSynchronize());
  }

  struct Answers {
    std::vector<float> loss, logsumexp, target_logprob;
    std::vector<std::vector<float>> gradients;  // rows of d_hidden, then of d_weight
  };

  // Returns what the last run wrote, and wipes it.
  Answers TakeAnswers(bool gradients) {
    Answers answers{.loss = loss_.Download(),
                    .logsumexp = logsumexp_.Download(),
                    .target_logprob = target_logprob_.Download()};
    const auto take = [&](const DeviceArray<uint16_t>& from, int64_t row) {
      std::vector<float>& to = answers.gradients.emplace_back();
      for (uint16_t bits : from.Download(row * kHidden, kHidden)) to.push_back(FloatOfBf16(bits));
      Must(cudaMemset(from.data() + row * kHidden, 0xff, kHidden * sizeof(uint16_t)));
    };
    if (gradients) {
      for (int64_t r : {int64_t{0}, int64_t{1}, int64_t{2047}, int64_t{2048}, kLossRows - 1})
        take(d_hidden_, r);
      // Targets of a few rows, and tokens of none; around a quarter of the head and at its end.
      for (int64_t i : {int64_t{targets_[0]}, int64_t{targets_[1]}, int64_t{targets_[4000]},
                        vocab_ / 4 - 1, vocab_ / 4, vocab_ - 1}) {
        take(d_weight_, i);
      }
    }
    for (const DeviceArray<float>* from : {&loss_, &logsumexp_, &target_logprob_})
      Must(cudaMemset(from->data(), 0xff, kLossRows * sizeof(float)));
    return answers;
  }

 private:
  // Few, so that each has many rows.
  static std::vector<int32_t> MakeTargets(int64_t vocab) {
    std::vector<int32_t> targets(kLossRows);
    for (int64_t r = 0; r < kLossRows; ++r)
      targets[r] = static_cast<int32_t>(r * 31 % 97 * (vocab / 97) + 5);
    return targets;
  }

  static std::vector<CrossEntropyRow> MakeRows(absl::Span<const int32_t> targets) {
    std::vector<CrossEntropyRow> rows;
    for (int32_t target : targets) rows.push_back(PlainLoss(target));
    return rows;
  }

  TensorView Hidden() const { return Bf16View(hidden_.data(), kLossRows, kHidden); }
  HeadView Head() const { return {.weight = Bf16View(weight_.data(), vocab_, kHidden)}; }
  MutableTensorView DHidden() const {
    return MutableBf16View(d_hidden_.data(), kLossRows, kHidden);
  }
  MutableTensorView DWeight() const { return MutableBf16View(d_weight_.data(), vocab_, kHidden); }
  CrossEntropyArgs Asks() const {
    return {.rows = rows_.data(),
            .want = 0,
            .max_top_logprobs = 0,
            .answers = {.loss = loss_.data(),
                        .logsumexp = logsumexp_.data(),
                        .target_logprob = target_logprob_.data(),
                        .status = status_.data()}};
  }

  const int64_t vocab_;
  const std::vector<int32_t> targets_;
  const DeviceArray<uint16_t> hidden_;
  const DeviceArray<uint16_t>& weight_;
  const DeviceArray<CrossEntropyRow> rows_;
  const DeviceArray<float> upstream_;
  const DeviceArray<float> loss_, logsumexp_, target_logprob_;
  const DeviceArray<RowStatus> status_;
  const DeviceArray<uint16_t> d_hidden_, d_weight_;
};

// Losses differ by no more than the rounding of the unfused logits.
void ExpectSameLosses(const LossProblem::Answers& fused, const LossProblem::Answers& unfused,
                      int64_t vocab) {
  for (int64_t r = 0; r < kLossRows; ++r) {
    // A logit moves by 2^-8 of itself at most, a logsumexp by what its largest terms do, and no
    // logit is above it. The rest is for fp32.
    const double target_logit = fused.logsumexp[r] + fused.target_logprob[r];
    const double slack = 0x1p-8 * (std::fabs(fused.logsumexp[r]) + std::fabs(target_logit)) + 1e-3;
    ASSERT_NEAR(fused.loss[r], unfused.loss[r], slack) << "V = " << vocab << ", row " << r;
    ASSERT_NEAR(fused.logsumexp[r], unfused.logsumexp[r], slack)
        << "V = " << vocab << ", row " << r;
  }
}

void ExpectSameGradients(const LossProblem::Answers& fused, const LossProblem::Answers& unfused,
                         int64_t vocab) {
  for (size_t i = 0; i < fused.gradients.size(); ++i) {
    double apart = 0, size = 0;
    for (int64_t d = 0; d < kHidden; ++d) {
      const double want = unfused.gradients[i][d];
      apart += (fused.gradients[i][d] - want) * (fused.gradients[i][d] - want);
      size += want * want;
    }
    // Logits that matter are below 32: rounding moves one by 1/16 at most, and the ratio of two of
    // their exponentials by e^(1/8) - 1.
    EXPECT_GT(size, 0) << "V = " << vocab << ", gradient " << i;
    EXPECT_LE(std::sqrt(apart), 0.14 * std::sqrt(size)) << "V = " << vocab << ", gradient " << i;
  }
}

// ---- Error and bits

constexpr int64_t kRows = 1000;
constexpr int64_t kLargeVocabs[] = {128256, 151936};
// The first and the last, one inside, and those around a border of blocks of rows.
constexpr int64_t kChecked[] = {0, 127, 255, 256, 257, kRows - 1};
constexpr size_t kCheckedCount = std::size(kChecked);

class LargeInput {
 public:
  explicit LargeInput(const DeviceArray<uint16_t>& weight)
      : targets_(MakeTargets()),
        host_hidden_(MakeHidden(targets_)),
        hidden_(absl::MakeConstSpan(host_hidden_)),
        weight_(weight) {
    ComputeExact();
  }

  int32_t target(int64_t r) const { return targets_[r]; }
  TensorView Hidden(int64_t first, int64_t rows) const {
    return Bf16View(hidden_.data() + first * kHidden, rows, kHidden);
  }
  HeadView Head(int64_t vocab) const {
    return {.weight = Bf16View(weight_.data(), vocab, kHidden)};
  }
  // The logits of row kChecked[i] in double precision.
  absl::Span<const double> Exact(size_t i, int64_t vocab) const {
    return absl::MakeConstSpan(exact_[i]).first(vocab);
  }

 private:
  static std::vector<int32_t> MakeTargets() {
    std::vector<int32_t> targets(kRows);
    for (int64_t r = 0; r < kRows; ++r)
      targets[r] = static_cast<int32_t>((r * 128'000'003 + 77) % kLargeVocabs[0]);
    return targets;
  }

  void ComputeExact() {
    constexpr int64_t kTokens = *std::max_element(std::begin(kLargeVocabs), std::end(kLargeVocabs));
    std::vector<double> states(kHidden * kCheckedCount);  // the rows side by side
    for (size_t i = 0; i < kCheckedCount; ++i) {
      exact_[i].resize(kTokens);
      for (int64_t d = 0; d < kHidden; ++d)
        states[d * kCheckedCount + i] = FloatOfBf16(host_hidden_[kChecked[i] * kHidden + d]);
    }
    InParallel(kTokens, [&](int64_t token) {
      uint16_t weight[kHidden];
      Weights().Fill(token, weight);
      double sums[kCheckedCount] = {};
      for (int64_t d = 0; d < kHidden; ++d) {
        const double w = FloatOfBf16(weight[d]);
        for (size_t i = 0; i < kCheckedCount; ++i) sums[i] += w * states[d * kCheckedCount + i];
      }
      for (size_t i = 0; i < kCheckedCount; ++i) exact_[i][token] = sums[i];
    });
  }

  const std::vector<int32_t> targets_;
  const std::vector<uint16_t> host_hidden_;
  const DeviceArray<uint16_t> hidden_;
  const DeviceArray<uint16_t>& weight_;
  std::vector<double> exact_[kCheckedCount];  // of every token
};

class LinearLargeGpuTest : public CudaTest {
 protected:
  void SetUp() override {
    CudaTest::SetUp();
    if (IsSkipped() || HasFatalFailure()) return;
    if (weight_ == nullptr) weight_ = MakeWeight();
    if (input_ == nullptr) input_ = std::make_unique<LargeInput>(*weight_);
  }
  static void TearDownTestSuite() {
    input_.reset();
    weight_.reset();
  }

  // Measures fused and unfused for every vocabulary. The fused step must add at most `allowed`,
  // whatever the vocabulary, and the unfused one at least the logits.
  void Measure(const char* name, Step step, int64_t scratch_bytes, int64_t allowed) {
    const bool backward = step != Step::kForward;
    int64_t fused_before = 0, unfused_before = 0, vocab_before = 0;
    for (const int64_t vocab : kVocabs) {
      LossProblem problem(*weight_, vocab);
      const int64_t fused = AddedBytes([&] { problem.Fused(scratch_bytes, step); });
      const LossProblem::Answers fused_answers = problem.TakeAnswers(backward);
      const int64_t unfused = AddedBytes([&] { problem.Unfused(backward); });
      const LossProblem::Answers unfused_answers = problem.TakeAnswers(backward);
      std::printf("%s, V = %d: adds %.1f MiB fused, %.1f MiB unfused\n", name,
                  static_cast<int>(vocab), MiB(fused), MiB(unfused));
      RecordProperty(absl::StrCat("fused_", name, "_bytes_", vocab), absl::StrCat(fused));
      RecordProperty(absl::StrCat("unfused_", name, "_bytes_", vocab), absl::StrCat(unfused));
      ExpectSameLosses(fused_answers, unfused_answers, vocab);
      if (backward) ExpectSameGradients(fused_answers, unfused_answers, vocab);
      EXPECT_GE(fused, scratch_bytes) << "the measure misses what is there";
      EXPECT_LE(fused, allowed) << "V = " << vocab;
      EXPECT_GE(unfused, 2 * kLossRows * vocab);
      if (vocab_before > 0) {
        EXPECT_LE(std::abs(fused - fused_before), 4 * kMiB) << "V = " << vocab;
        EXPECT_GE(unfused - unfused_before, 2 * kLossRows * (vocab - vocab_before));
      }
      fused_before = fused;
      unfused_before = unfused;
      vocab_before = vocab;
    }
  }

  LossAnswer LossesOf(int64_t first, int64_t rows, int64_t vocab) {
    LossBatch batch;
    for (int64_t r = first; r < first + rows; ++r) {
      batch.rows.push_back(PlainLoss(input_->target(r)));
    }
    LinearCrossEntropyArgs args{.hidden = input_->Hidden(first, rows), .head = input_->Head(vocab)};
    LossAnswer answer;
    Add(runner_->arena(), batch, &args.cross_entropy, &answer);
    runner_->arena().Run(args).value();
    return answer;
  }

  static constexpr int32_t kTop = 20;  // entries of a row
  TopKAnswer TopsOf(int64_t first, int64_t rows, int64_t vocab) {
    std::vector<SoftmaxTopKRow> asks;
    for (int64_t i = 0; i < rows; ++i) {
      asks.push_back({.first_entry = i * kTop, .temperature = 1, .k = kTop});
    }
    LinearTopKArgs args{.hidden = input_->Hidden(first, rows), .head = input_->Head(vocab)};
    TopKAnswer answer;
    Add(runner_->arena(), asks, rows * kTop, &args.topk, &answer);
    runner_->arena().Run(args).value();
    return answer;
  }

  // In turn unfiltered, with top_p, with top_k and min_p.
  static SampleRow SampleOf(int64_t row) {
    SampleRow ask = PlainRow();
    ask.seed = static_cast<uint64_t>(row);
    ask.position = 7;
    ask.temperature = 0.8f;
    if (row % 3 == 1) ask.top_p = 0.95f;
    if (row % 3 == 2) {
      ask.top_k = 50;
      ask.min_p = 0.001f;
    }
    ask.top_logprobs = 5;
    return ask;
  }

  // The bits of the answers to rows [first, first + rows) as one call.
  std::vector<std::string> SampleBitsOf(int64_t first, int64_t rows, int64_t vocab) {
    SampleBatch batch;
    for (int64_t r = first; r < first + rows; ++r) {
      batch.rows.push_back(SampleOf(r));
      batch.rows.back().first_top_entry = batch.top_entries;
      batch.top_entries += batch.rows.back().top_logprobs;
    }
    LinearSampleArgs args{.hidden = input_->Hidden(first, rows), .head = input_->Head(vocab)};
    SampleAnswer answer;
    Add(runner_->arena(), batch, &args.sample, &answer);
    runner_->arena().Run(args).value();
    std::vector<std::string> bits;
    for (int64_t i = 0; i < rows; ++i) {
      EXPECT_EQ(answer.status[i].code, RowCode::kOk) << "V = " << vocab << ", row " << first + i;
      bits.push_back(SampleBits(answer, batch.rows[i], i));
    }
    return bits;
  }

  std::vector<std::string> LossBitsOf(int64_t first, int64_t rows, int64_t vocab) {
    const LossAnswer losses = LossesOf(first, rows, vocab);
    std::vector<std::string> bits;
    for (int64_t i = 0; i < rows; ++i) {
      EXPECT_EQ(losses.status[i].code, RowCode::kOk) << "V = " << vocab << ", row " << first + i;
      bits.push_back(LossBits(losses, PlainLoss(0), i));
    }
    return bits;
  }

  std::vector<std::string> TopBitsOf(int64_t first, int64_t rows, int64_t vocab) {
    const TopKAnswer tops = TopsOf(first, rows, vocab);
    std::vector<std::string> bits(rows);
    for (int64_t i = 0; i < rows; ++i) {
      EXPECT_EQ(tops.status[i].code, RowCode::kOk) << "V = " << vocab << ", row " << first + i;
      const auto add = [&](const auto* values, int64_t count) {
        bits[i].append(reinterpret_cast<const char*>(values), count * sizeof(*values));
      };
      add(&tops.status[i], 1);
      add(&tops.logsumexp[i], 1);
      add(&tops.indices[i * kTop], kTop);
      add(&tops.probs[i * kTop], kTop);
    }
    return bits;
  }

  // Expects that a row has the same bits in its own call and in calls of `row_counts` rows.
  // bits_of(first, rows) are those of a call of rows [first, first + rows).
  template <class BitsOf>
  static void ExpectOwnBits(std::initializer_list<int64_t> row_counts, int64_t vocab,
                            BitsOf bits_of) {
    for (const int64_t r : kChecked) {
      const std::string want = bits_of(r, 1)[0];
      for (const int64_t rows : row_counts) {
        const int64_t first = std::clamp<int64_t>(r - rows / 2, 0, kRows - rows);
        EXPECT_EQ(bits_of(first, rows)[r - first], want)
            << "V = " << vocab << ", row " << r << " as row " << r - first << " of " << rows;
      }
    }
  }

  static std::unique_ptr<DeviceArray<uint16_t>> weight_;
  static std::unique_ptr<LargeInput> input_;
};

std::unique_ptr<DeviceArray<uint16_t>> LinearLargeGpuTest::weight_;
std::unique_ptr<LargeInput> LinearLargeGpuTest::input_;

TEST_F(LinearLargeGpuTest, ForwardAddsAtMost16MiBWhateverTheVocabulary) {
  Measure("forward", Step::kForward, 14 * kMiB, 16 * kMiB);
}

TEST_F(LinearLargeGpuTest, ForwardAndBackwardAddAtMost300MiBWhateverTheVocabulary) {
  Measure("forward_then_backward", Step::kForwardThenBackward, 296 * kMiB, 300 * kMiB);
}

TEST_F(LinearLargeGpuTest, TrainingAddsAtMost300MiBWhateverTheVocabulary) {
  Measure("training", Step::kTraining, 296 * kMiB, 300 * kMiB);
}

double LogSumExpOf(absl::Span<const double> logits) {
  const double max = *std::max_element(logits.begin(), logits.end());
  double sum = 0;
  for (double x : logits) sum += std::exp(x - max);
  return max + std::log(sum);
}

TEST_F(LinearLargeGpuTest, LossesAreWithin1e4OfDoublePrecision) {
  double worst = 0;
  for (const int64_t vocab : kLargeVocabs) {
    const LossAnswer losses = LossesOf(0, kRows, vocab);
    double worst_loss = 0, worst_logsumexp = 0;
    for (size_t i = 0; i < kCheckedCount; ++i) {
      const int64_t r = kChecked[i];
      const absl::Span<const double> exact = input_->Exact(i, vocab);
      const double logsumexp = LogSumExpOf(exact);
      const double loss = logsumexp - exact[input_->target(r)];
      EXPECT_EQ(losses.status[r].code, RowCode::kOk) << "row " << r;
      EXPECT_NEAR(losses.loss[r], loss, 1e-4) << "V = " << vocab << ", row " << r;
      EXPECT_NEAR(losses.target_logprob[r], -loss, 1e-4) << "V = " << vocab << ", row " << r;
      EXPECT_NEAR(losses.logsumexp[r], logsumexp, 1e-4) << "V = " << vocab << ", row " << r;
      worst_loss = std::max(worst_loss, std::fabs(losses.loss[r] - loss));
      worst_logsumexp = std::max(worst_logsumexp, std::fabs(losses.logsumexp[r] - logsumexp));
    }
    std::printf("V = %d: errors of losses up to %.2g, of logsumexps up to %.2g\n",
                static_cast<int>(vocab), worst_loss, worst_logsumexp);
    worst = std::max({worst, worst_loss, worst_logsumexp});
  }
  RecordProperty("largest_error", absl::StrCat(worst));
}

TEST_F(LinearLargeGpuTest, TopsAreThoseOfDoublePrecision) {
  for (const int64_t vocab : kLargeVocabs) {
    for (size_t i = 0; i < kCheckedCount; ++i) {
      const absl::Span<const double> exact = input_->Exact(i, vocab);
      const double logsumexp = LogSumExpOf(exact);
      std::vector<double> sorted(exact.begin(), exact.end());
      std::partial_sort(sorted.begin(), sorted.begin() + kTop, sorted.end(), std::greater<>());
      const TopKAnswer tops = TopsOf(kChecked[i], 1, vocab);
      EXPECT_EQ(tops.status[0].code, RowCode::kOk) << "row " << kChecked[i];
      for (int32_t j = 0; j < kTop; ++j) {
        ASSERT_GE(tops.indices[j], 0);
        ASSERT_LT(tops.indices[j], vocab);
        // fp32 sums decide which of two close logits comes first.
        EXPECT_NEAR(exact[tops.indices[j]], sorted[j], 1e-4)
            << "V = " << vocab << ", row " << kChecked[i] << ", place " << j;
        EXPECT_NEAR(std::log(tops.probs[j]), exact[tops.indices[j]] - logsumexp, 1e-4)
            << "V = " << vocab << ", row " << kChecked[i] << ", place " << j;
      }
    }
  }
}

TEST_F(LinearLargeGpuTest, LossesOfARowDependOnlyOnTheRow) {
  for (const int64_t vocab : kLargeVocabs) {
    ExpectOwnBits({64, 65, 128, 129, 190, 256, 300, 320, 321, 600, 700, 777, 960, kRows}, vocab,
                  [&](int64_t first, int64_t rows) { return LossBitsOf(first, rows, vocab); });
  }
}

TEST_F(LinearLargeGpuTest, DHiddenOfARowDependsOnlyOnTheRow) {
  for (const int64_t vocab : {int64_t{32000}, kLargeVocabs[1]}) {
    LossProblem problem(*weight_, vocab);
    const std::vector<uint16_t> all = problem.OwnDHidden(0, kLossRows);
    for (const int64_t rows : {1, 64, 65, 500, 1024, 1025, 1100, 2048, 3000}) {
      for (const int64_t first : {int64_t{0}, (kLossRows - rows) / 2 + 1}) {
        const std::vector<uint16_t> own = problem.OwnDHidden(first, rows);
        EXPECT_TRUE(std::equal(own.begin(), own.end(), all.begin() + first * kHidden))
            << "V = " << vocab << ", rows " << first << " to " << first + rows;
      }
    }
  }
}

TEST_F(LinearLargeGpuTest, TopsOfARowDependOnlyOnTheRow) {
  for (const int64_t vocab : kLargeVocabs) {
    ExpectOwnBits(
        {8, 9, 16, 17, 32, 33, 64, 65, 96, 97, 128, 129, 150, 200, 256, 300, 320, 321, 500}, vocab,
        [&](int64_t first, int64_t rows) { return TopBitsOf(first, rows, vocab); });
  }
}

TEST_F(LinearLargeGpuTest, SamplesOfARowDependOnlyOnTheRow) {
  for (const int64_t vocab : kLargeVocabs) {
    ExpectOwnBits({64, 150, 200, 300}, vocab,
                  [&](int64_t first, int64_t rows) { return SampleBitsOf(first, rows, vocab); });
  }
}

}  // namespace
}  // namespace logitd::testing

// ---- What the linker puts in place of the runtime's functions (CMakeLists.txt)

extern "C" {

cudaError_t __real_cudaMalloc(void** data, size_t bytes);
cudaError_t __real_cudaMallocAsync(void** data, size_t bytes, cudaStream_t stream);
cudaError_t __real_cudaFree(void* data);
cudaError_t __real_cudaFreeAsync(void* data, cudaStream_t stream);

cudaError_t __wrap_cudaMalloc(void** data, size_t bytes) {
  const cudaError_t error = __real_cudaMalloc(data, bytes);
  if (error == cudaSuccess) logitd::testing::Held().Add(*data, bytes);
  return error;
}
cudaError_t __wrap_cudaMallocAsync(void** data, size_t bytes, cudaStream_t stream) {
  const cudaError_t error = __real_cudaMallocAsync(data, bytes, stream);
  if (error == cudaSuccess) logitd::testing::Held().Add(*data, bytes);
  return error;
}
// Forgotten first: another thread may get the same memory at once.
cudaError_t __wrap_cudaFree(void* data) {
  logitd::testing::Held().Remove(data);
  return __real_cudaFree(data);
}
cudaError_t __wrap_cudaFreeAsync(void* data, cudaStream_t stream) {
  logitd::testing::Held().Remove(data);
  return __real_cudaFreeAsync(data, stream);
}

}  // extern "C"
