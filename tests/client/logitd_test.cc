// The client library and logitctl against the real server, as a process of its own.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <vector>

#include "absl/time/clock.h"
#include "client/client.h"
#include "client/half.h"
#include "client/language_model.h"
#include "logitd/v1/sampler.pb.h"
#include "tests/client/fake_server.h"
#include "tests/client/subprocess.h"
#include "tests/client/test_files.h"
#include "tests/tree.h"

namespace logitd {
namespace {

using ::logitd::testing::BytesOf;
using ::logitd::testing::Daemon;
using ::logitd::testing::LittleEndian;
using ::logitd::testing::Ran;
using ::logitd::testing::ReferenceTopK;
using ::logitd::testing::RunBinary;
using ::logitd::testing::TempDir;

class LogitdTest : public ::testing::Test {
 protected:
  LogitdTest()
      : address_("unix:" + dir_.path("socket")),
        daemon_("logitd", {"--backend", "cpu", "--listen", address_, "--metrics-listen", "off",
                           "--log-level", "warn", "--max-request-bytes", "1MiB"}) {
    const absl::Time end = absl::Now() + absl::Seconds(30);
    while (absl::Now() < end) {
      // A new client each time: an old one would wait out its channel's reconnect backoff.
      client_ = *client::Client::Create({.address = address_, .deadline = absl::Seconds(20)});
      const auto health = client_->Health();
      if (health.ok() && *health == client::ServingStatus::kServing) return;
      absl::SleepFor(absl::Milliseconds(10));
    }
    ADD_FAILURE() << "logitd does not serve";
  }

  TempDir dir_;
  const std::string address_;
  Daemon daemon_;
  std::unique_ptr<client::Client> client_;
};

TEST_F(LogitdTest, AnswersAsTheDefinitionSays) {
  constexpr int kRows = 5;
  constexpr int kVocab = 1000;
  std::mt19937 random(7);
  std::normal_distribution<float> normal(0, 3);
  for (v1::DType dtype : {v1::DTYPE_F32, v1::DTYPE_F16, v1::DTYPE_BF16}) {
    std::string bytes;
    for (int i = 0; i < kRows * kVocab; ++i) {
      const float value = normal(random);
      if (dtype == v1::DTYPE_F32) bytes += BytesOf<float>({value});
      if (dtype == v1::DTYPE_F16) bytes += LittleEndian(client::FloatToF16(value), 2);
      if (dtype == v1::DTYPE_BF16) bytes += LittleEndian(client::FloatToBF16(value), 2);
    }
    const client::TopKRequest request = {.dtype = dtype,
                                         .rows = kRows,
                                         .vocab = kVocab,
                                         .logits = {bytes},
                                         .k = {1, 2, 10, 100, 1000},
                                         .temperature = {1.0f, 0.5f, 2.0f, 1.0f, 3.0f}};
    const absl::StatusOr<client::TopKResult> got = client_->TopK(request);
    ASSERT_TRUE(got.ok()) << got.status();
    v1::TopKRequest message;
    message.set_dtype(dtype);
    message.set_rows(kRows);
    message.set_vocab(kVocab);
    message.set_logits(bytes);
    message.mutable_k()->Add(request.k.begin(), request.k.end());
    message.mutable_temperature()->Add(request.temperature.begin(), request.temperature.end());
    v1::TopKResponse want;
    ReferenceTopK(message, &want);
    EXPECT_EQ(got->k, std::vector<int32_t>(want.k().begin(), want.k().end()));
    // Where double precision tells two logits apart and their quotients by the temperature in f32
    // do not, the order may differ; ties of the logits themselves may not. Temperatures of powers
    // of two keep them apart.
    for (int row : {0, 1, 2, 3}) {
      for (int i = 0; i < request.k[row]; ++i) {
        EXPECT_EQ(got->RowIndices(row)[i], want.indices(got->offsets[row] + i)) << row << " " << i;
      }
    }
    for (size_t i = 0; i < got->probs.size(); ++i) {
      EXPECT_NEAR(got->probs[i], want.probs(i), 1e-5 * want.probs(i) + 1e-9) << i;
    }
    for (int row = 0; row < kRows; ++row) {
      EXPECT_NEAR(got->logsumexp[row], want.logsumexp(row), 1e-4);
    }
  }
}

TEST_F(LogitdTest, ARefusalKeepsTheServersWords) {
  const std::string bytes(4 * 10, '\0');
  const absl::StatusOr<client::TopKResult> got =
      client_->TopK({.dtype = v1::DTYPE_F32, .rows = 1, .vocab = 10, .logits = {bytes}, .k = {11}});
  EXPECT_EQ(got.status().code(), absl::StatusCode::kInvalidArgument) << got.status();
  EXPECT_THAT(std::string(got.status().message()), ::testing::HasSubstr("11"));
}

// 3 MiB in requests of at most 1 MiB.
TEST_F(LogitdTest, LogitctlSendsAFileLargerThanOneRequest) {
  constexpr int kRows = 30;
  constexpr int kVocab = 26214;
  std::vector<float> logits(kRows * kVocab, 0.0f);
  for (int row = 0; row < kRows; ++row) logits[row * kVocab + 100 * row] = 20.0f;
  const std::string npy = dir_.Write("a.npy", ::logitd::testing::NpyF32(kRows, kVocab, logits));
  const Ran ran = RunBinary(
      "logitctl", {"topk", "--addr", address_, "--logits", npy, "--k", "1", "--format", "json"});
  ASSERT_EQ(ran.code, 0) << ran.err;
  const nlohmann::json json = nlohmann::json::parse(ran.out);
  ASSERT_EQ(json["indices"].size(), size_t{kRows});
  for (int row = 0; row < kRows; ++row) EXPECT_EQ(json["indices"][row], 100 * row);
}

// The demo: prompt, hidden states, logits, the server's top tokens, text.
TEST_F(LogitdTest, TheDemoModelContinuesAPrompt) {
  const std::string model_dir = ::logitd::testing::InTree("demo/model");
  const std::string prompt = "It is a truth universally";
  const Ran ran = RunBinary("logitctl", {"topk", "--addr", address_, "--text", prompt, "--model",
                                         model_dir, "--k", "10", "--format", "json"});
  ASSERT_EQ(ran.code, 0) << ran.err;
  const nlohmann::json json = nlohmann::json::parse(ran.out);

  absl::StatusOr<client::LanguageModel> model = client::LanguageModel::Load(model_dir);
  ASSERT_TRUE(model.ok()) << model.status();
  client::LanguageModel::State state = model->InitialState();
  std::vector<float> hidden = model->Step(state, model->bos_token_id());
  for (int32_t token : model->Tokenize(prompt)) hidden = model->Step(state, token);
  v1::TopKRequest message;
  message.set_dtype(v1::DTYPE_F32);
  message.set_rows(1);
  message.set_vocab(model->vocab_size());
  message.set_logits(BytesOf(model->Logits(hidden)));
  message.add_k(10);
  v1::TopKResponse want;
  ReferenceTopK(message, &want);
  for (int i = 0; i < 10; ++i) {
    EXPECT_EQ(json["indices"][i], want.indices(i));
    EXPECT_NEAR(json["probs"][i], want.probs(i), 1e-5);
    EXPECT_EQ(json["text"][i], model->TokenBytes(want.indices(i)));
  }
}

}  // namespace
}  // namespace logitd
