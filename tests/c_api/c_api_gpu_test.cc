// The C interface on a CUDA device beside the CPU: the same answers within the ops' accuracy, and
// the same rows refused.
#include <cuda_runtime.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/c_api.h"

namespace {

constexpr int64_t kRows = 37;
constexpr int64_t kVocab = 1111;
constexpr int64_t kHidden = 64;

// Host memory and its copy on the device.
template <class T>
class Both {
 public:
  explicit Both(size_t count, T value = {}) : host(count, value) {}
  ~Both() { cudaFree(device_); }
  Both(const Both&) = delete;
  Both& operator=(const Both&) = delete;

  // Its address for a call on the device or the CPU.
  T* On(bool device) {
    if (!device) return host.data();
    // Whole blocks of 16 bytes, which ops read.
    if (device_ == nullptr) cudaMalloc(&device_, (host.size() * sizeof(T) + 15) / 16 * 16);
    cudaMemcpy(device_, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice);
    return device_;
  }
  std::vector<T> Answers(bool device) {
    if (device) cudaMemcpy(host.data(), device_, host.size() * sizeof(T), cudaMemcpyDeviceToHost);
    return host;
  }

  std::vector<T> host;

 private:
  T* device_ = nullptr;
};

std::unique_ptr<Both<float>> Random(int64_t count, double scale) {
  auto values = std::make_unique<Both<float>>(static_cast<size_t>(count));
  uint64_t state = 88172645463325252u + static_cast<uint64_t>(count);
  for (float& value : values->host) {
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    value = static_cast<float>(scale * (static_cast<double>(state >> 11) * 0x1p-52 - 1));
  }
  return values;
}

// A context with its workspace.
class Place {
 public:
  explicit Place(bool device) : device(device) {
    code = logitd_open(device ? "cuda" : "cpu", 0, 2, 0, &context);
    if (code != LOGITD_OK || !device) return;
    call.workspace_bytes = logitd_workspace_bytes(context, kRows);
    cudaMalloc(&call.workspace, call.workspace_bytes);
    code = logitd_prepare_workspace(context, &call);
  }
  ~Place() {
    logitd_close(context);
    cudaFree(call.workspace);
  }

  const bool device;
  int32_t code;
  logitd_context* context = nullptr;
  logitd_call call = {};
};

class CApiGpuTest : public testing::Test {
 protected:
  void SetUp() override {
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
      GTEST_SKIP() << "no CUDA device: every test skipped";
    }
  }

  void ExpectNear(const std::vector<float>& got, const std::vector<float>& expected,
                  double relative) {
    for (size_t i = 0; i < got.size(); ++i) {
      if (std::isnan(expected[i])) {
        EXPECT_TRUE(std::isnan(got[i])) << i;
      } else if (got[i] != expected[i]) {
        EXPECT_NEAR(got[i], expected[i], relative * std::max(1.0f, std::abs(expected[i]))) << i;
      }
    }
  }

  logitd_tensor Tensor(float* data, int64_t rows, int64_t cols) {
    return {data, rows, cols, cols, LOGITD_F32, 0};
  }
};

TEST_F(CApiGpuTest, TrainingUnderAHeadIsThatOfTheCpu) {
  std::vector<std::vector<float>> answers[2];
  for (const bool device : {false, true}) {
    Place place(device);
    ASSERT_EQ(place.code, LOGITD_OK) << logitd_error();
    auto hidden = Random(kRows * kHidden, 1);
    auto weight = Random(kVocab * kHidden, 0.3);
    Both<int64_t> targets(kRows);
    Both<float> temperature(kRows, 1), upstream(kRows, 0.5f), loss(kRows), lse(kRows);
    Both<float> d_hidden(kRows * kHidden), d_weight(kVocab * kHidden), d_bias(kVocab);
    Both<logitd_row_status> status(kRows);
    for (int64_t r = 0; r < kRows; ++r) targets.host[static_cast<size_t>(r)] = r * 29 % kVocab;
    targets.host[4] = -100;
    targets.host[7] = kVocab;
    temperature.host[9] = -1;
    const logitd_head head = {
        .weight = Tensor(weight->On(device), kVocab, kHidden), .scale = 1, .softcap = 20};
    logitd_cross_entropy_training op = {.struct_size = sizeof(op)};
    op.input = Tensor(hidden->On(device), kRows, kHidden);
    op.head = &head;
    op.rows.targets = targets.On(device);
    op.rows.ignore_index = -100;
    op.rows.temperature.each = temperature.On(device);
    op.rows.label_smoothing.all = 0.1f;
    op.rows.z_loss.all = 1e-3f;
    op.upstream = upstream.On(device);
    op.loss = loss.On(device);
    op.logsumexp = lse.On(device);
    op.status = status.On(device);
    op.d_input = Tensor(d_hidden.On(device), kRows, kHidden);
    op.d_weight = Tensor(d_weight.On(device), kVocab, kHidden);
    op.d_bias = d_bias.On(device);
    ASSERT_EQ(logitd_run_cross_entropy_training(place.context, &place.call, &op), LOGITD_OK)
        << logitd_error();
    ASSERT_EQ(device ? cudaDeviceSynchronize() : cudaSuccess, cudaSuccess);
    answers[device] = {loss.Answers(device), lse.Answers(device), d_hidden.Answers(device),
                       d_weight.Answers(device), d_bias.Answers(device)};
    const std::vector<logitd_row_status> rows = status.Answers(device);
    EXPECT_EQ(rows[7].code, LOGITD_ROW_REFUSED);
    EXPECT_EQ(rows[7].position, 1);
    EXPECT_EQ(rows[9].position, 2);
    EXPECT_EQ(rows[8].code, LOGITD_ROW_OK);
  }
  for (size_t i = 0; i < answers[0].size(); ++i) {
    SCOPED_TRACE(i);
    ExpectNear(answers[1][i], answers[0][i], 2e-5);
  }
  EXPECT_TRUE(std::isnan(answers[1][0][7]));
  EXPECT_TRUE(std::isnan(answers[1][2][7 * kHidden + 3]));
}

TEST_F(CApiGpuTest, SampleDrawsTheTokensOfTheCpu) {
  std::vector<int32_t> answers[2];
  for (const bool device : {false, true}) {
    Place place(device);
    ASSERT_EQ(place.code, LOGITD_OK) << logitd_error();
    auto logits = Random(kRows * kVocab, 6);
    Both<int64_t> seed(kRows), offsets(kRows + 1);
    Both<int32_t> history(2 * kRows), tokens(kRows, 9), tops(kRows * 3);
    Both<float> values(kRows * 3), top_p(kRows, 0.9f);
    Both<logitd_row_status> status(kRows);
    for (int64_t r = 0; r < kRows; ++r) {
      const auto i = static_cast<size_t>(r);
      seed.host[i] = r * 77;
      offsets.host[i + 1] = 2 * (r + 1);
      history.host[2 * i] = history.host[2 * i + 1] = static_cast<int32_t>(r * 31 % kVocab);
    }
    history.host[11] = -5;  // row 5
    top_p.host[6] = 1.5f;
    logitd_sample op = {.struct_size = sizeof(op),
                        .input = Tensor(logits->On(device), kRows, kVocab)};
    op.seed.each = seed.On(device);
    op.temperature.all = 0.7f;
    op.top_k.all = 50;
    op.top_p.each = top_p.On(device);
    op.typical_p.all = 1;
    op.repetition_penalty.all = 1.3f;
    op.frequency_penalty.all = 0.5f;
    op.history = {history.On(device), offsets.On(device), 2 * kRows};
    op.top_logprobs = 3;
    op.top_ids = tops.On(device);
    op.top_values = values.On(device);
    op.tokens = tokens.On(device);
    op.status = status.On(device);
    ASSERT_EQ(logitd_run_sample(place.context, &place.call, &op), LOGITD_OK) << logitd_error();
    ASSERT_EQ(device ? cudaDeviceSynchronize() : cudaSuccess, cudaSuccess);
    answers[device] = tokens.Answers(device);
    const std::vector<int32_t> ids = tops.Answers(device);
    answers[device].insert(answers[device].end(), ids.begin(), ids.end());
    EXPECT_EQ(status.Answers(device)[5].position, 15);
    EXPECT_EQ(status.Answers(device)[6].position, 5);
  }
  EXPECT_EQ(answers[1], answers[0]);
  EXPECT_EQ(answers[1][5], -1);
  EXPECT_EQ(answers[1][6], -1);
}

TEST_F(CApiGpuTest, RefusesAWorkspaceThatIsTooSmall) {
  Place place(/*device=*/true);
  ASSERT_EQ(place.code, LOGITD_OK) << logitd_error();
  auto logits = Random(kRows * kVocab, 1);
  Both<int32_t> ids(kRows);
  Both<float> probs(kRows);
  logitd_softmax_topk op = {.struct_size = sizeof(op),
                            .input = Tensor(logits->On(true), kRows, kVocab)};
  op.temperature.all = 1;
  op.k = 1;
  op.indices = ids.On(true);
  op.probs = probs.On(true);
  logitd_call call = place.call;
  call.workspace_bytes = 4096;
  EXPECT_EQ(logitd_run_softmax_topk(place.context, &call, &op), LOGITD_RESOURCE_EXHAUSTED);
  EXPECT_THAT(logitd_error(), testing::HasSubstr("workspace_bytes: got 4096, allowed "));
  call = place.call;
  call.workspace = static_cast<char*>(call.workspace) + 16;
  EXPECT_EQ(logitd_run_softmax_topk(place.context, &call, &op), LOGITD_INVALID_ARGUMENT);
  EXPECT_THAT(logitd_error(), testing::HasSubstr("allowed a multiple of 256"));
  EXPECT_EQ(logitd_run_softmax_topk(place.context, &place.call, &op), LOGITD_OK);
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  logitd_context* none = nullptr;
  EXPECT_EQ(logitd_open("cuda", 0, 0, 4096, &none), LOGITD_INVALID_ARGUMENT);
  EXPECT_THAT(logitd_error(), testing::HasSubstr("scratch_bytes: got 4096, allowed "));
}

}  // namespace
