// The client library and logitctl against the real server, as a process of its own.
#include <gmock/gmock.h>
#include <google/protobuf/util/json_util.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <nlohmann/json.hpp>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "client/client.h"
#include "client/language_model.h"
#include "formats/half.h"
#include "logitd/v1/sampler.pb.h"
#include "tests/client/fake_server.h"
#include "tests/client/running_logitd.h"
#include "tests/client/subprocess.h"
#include "tests/client/test_files.h"
#include "tests/client/test_values.h"
#include "tests/tree.h"

namespace logitd {
namespace {

using ::logitd::testing::BytesOf;
using ::logitd::testing::LittleEndian;
using ::logitd::testing::Ran;
using ::logitd::testing::ReferenceTopK;
using ::logitd::testing::TopKParams;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

class LogitdTest : public ::logitd::testing::RunningLogitd {};

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
      if (dtype == v1::DTYPE_F16) bytes += LittleEndian(formats::FloatToF16(value), 2);
      if (dtype == v1::DTYPE_BF16) bytes += LittleEndian(formats::FloatToBF16(value), 2);
    }
    const client::TopKRequest request = {
        .dtype = dtype,
        .rows = kRows,
        .vocab = kVocab,
        .logits = {bytes},
        .params = TopKParams({1, 2, 10, 100, 1000}, {1.0f, 0.5f, 2.0f, 1.0f, 3.0f})};
    const absl::StatusOr<client::TopKResult> got = client_->TopK(request);
    ASSERT_TRUE(got.ok()) << got.status();
    v1::TopKRequest message = request.params;
    message.set_dtype(dtype);
    message.set_rows(kRows);
    message.set_vocab(kVocab);
    message.set_logits(bytes);
    v1::TopKResponse want;
    ReferenceTopK(message, &want);
    EXPECT_THAT(got->answer.k(), ::testing::ElementsAreArray(want.k()));
    // Where double precision tells two logits apart and their quotients by the temperature in f32
    // do not, the order may differ; ties of the logits themselves may not. Temperatures of powers
    // of two keep them apart.
    for (int row : {0, 1, 2, 3}) {
      for (int i = 0; i < want.k(row); ++i) {
        EXPECT_EQ(got->RowIndices(row)[i], want.indices(got->top_offsets[row] + i))
            << row << " " << i;
      }
    }
    for (int i = 0; i < want.probs_size(); ++i) {
      EXPECT_NEAR(got->answer.probs(i), want.probs(i), 1e-5 * want.probs(i) + 1e-9) << i;
    }
    for (int row = 0; row < kRows; ++row) {
      EXPECT_NEAR(got->answer.logsumexp(row), want.logsumexp(row), 1e-4);
    }
  }
}

TEST_F(LogitdTest, ARefusalKeepsTheServersWords) {
  const std::string bytes(4 * 10, '\0');
  const absl::StatusOr<client::TopKResult> got = client_->TopK({.dtype = v1::DTYPE_F32,
                                                                .rows = 1,
                                                                .vocab = 10,
                                                                .logits = {bytes},
                                                                .params = TopKParams({11})});
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
  const Ran ran = Logitctl({"topk", "--logits", npy, "--k", "1", "--format", "json"});
  ASSERT_EQ(ran.code, 0) << ran.err;
  const nlohmann::json json = nlohmann::json::parse(ran.out);
  ASSERT_EQ(json["indices"].size(), size_t{kRows});
  for (int row = 0; row < kRows; ++row) EXPECT_EQ(json["indices"][row], 100 * row);
}

// The demo: prompt, hidden states, logits, the server's top tokens, text.
TEST_F(LogitdTest, TheDemoModelContinuesAPrompt) {
  const std::string model_dir = ::logitd::testing::InTree("demo/model");
  const std::string prompt = "It is a truth universally";
  const Ran ran =
      Logitctl({"topk", "--text", prompt, "--model", model_dir, "--k", "10", "--format", "json"});
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

// Seed 0: 0.8805 at position 0, 0.3621 at position 1, as fractions of the total weight.
TEST_F(LogitdTest, SamplesAsTheDefinitionSays) {
  const std::string row = BytesOf<float>({std::log(0.5f), std::log(0.25f), std::log(0.25f)});
  client::SampleRequest request = {.rows = 2, .vocab = 3, .logits = {row, row}};
  request.params.add_seed(0);
  for (uint64_t position : {0, 1}) request.params.add_position(position);
  for (int n : {0, 2}) request.params.add_top_logprobs(n);
  for (int id : {0, 1}) request.params.add_extra_ids(id);
  for (int n : {4, 1}) request.params.add_draws(n);
  const absl::StatusOr<client::SampleResult> got = client_->Sample(request);
  ASSERT_TRUE(got.ok()) << got.status();
  EXPECT_THAT(got->answer.tokens(), ElementsAre(2, 0));
  EXPECT_THAT(got->top_offsets, ElementsAre(0, 0, 2));
  EXPECT_THAT(got->extra_offsets, ElementsAre(0, 2, 4));
  EXPECT_THAT(got->draw_offsets, ElementsAre(0, 4, 5));
  EXPECT_THAT(got->answer.draw_tokens(), ElementsAre(2, 2, 1, 0, 0));
  EXPECT_NEAR(got->answer.extra_logprobs(3), std::log(0.25), 1e-5);
  EXPECT_GT(got->round_trip, absl::ZeroDuration());
  EXPECT_EQ(got->attempts, 1);

  request.params.clear_seed();
  EXPECT_THAT(std::string(client_->Sample(request).status().message()),
              HasSubstr("seed: got none"));
}

TEST_F(LogitdTest, AStreamAnswersInOrderWithTheBitsOfUnaryCalls) {
  std::mt19937 random(9);
  std::normal_distribution<float> normal(0, 3);
  std::vector<float> logits(2000);
  for (float& logit : logits) logit = normal(random);
  const std::string row = BytesOf(logits);
  client::SampleRequest request = {.rows = 1, .vocab = 2000, .logits = {row}};
  request.params.add_seed(3);
  request.params.add_top_logprobs(2);
  const auto at = [&](int position) {
    request.params.clear_position();
    request.params.add_position(static_cast<uint64_t>(position));
    return request;
  };
  const auto bits = [](v1::SampleResponse answer) {
    answer.clear_timings();
    return answer.SerializeAsString();
  };
  const auto stream = client_->OpenSampleStream();
  constexpr int kMessages = 40;
  std::thread writer([&] {
    for (int i = 0; i < kMessages; ++i) {
      client::SampleRequest message = request;
      message.params.add_position(static_cast<uint64_t>(i));
      EXPECT_TRUE(stream->Write(message).ok());
    }
    stream->WritesDone();
  });
  std::vector<std::string> answers;
  for (int i = 0; i < kMessages; ++i) {
    const absl::StatusOr<client::SampleResult> got = stream->Read();
    ASSERT_TRUE(got.ok()) << got.status();
    EXPECT_GT(got->round_trip, absl::ZeroDuration());
    answers.push_back(bits(got->answer));
  }
  writer.join();
  EXPECT_TRUE(absl::IsOutOfRange(stream->Read().status())) << stream->Read().status();
  for (int i = 0; i < kMessages; ++i) {
    const absl::StatusOr<client::SampleResult> alone = client_->Sample(at(i));
    ASSERT_TRUE(alone.ok()) << alone.status();
    EXPECT_EQ(bits(alone->answer), answers[static_cast<size_t>(i)]) << i;
  }
}

TEST_F(LogitdTest, AStreamRefusesAWriteAfterItsLastRequest) {
  const std::string row = BytesOf<float>({1, 2, 3});
  client::SampleRequest request = {.rows = 1, .vocab = 3, .logits = {row}};
  request.params.add_temperature(0);
  const auto stream = client_->OpenSampleStream();
  ASSERT_TRUE(stream->Write(request).ok());
  stream->WritesDone();
  stream->WritesDone();
  EXPECT_EQ(stream->Write(request), absl::FailedPreconditionError(
                                        "stream: got a Write after WritesDone, allowed before it"));
  EXPECT_TRUE(stream->Read().ok());
  EXPECT_TRUE(absl::IsOutOfRange(stream->Read().status()));
}

TEST_F(LogitdTest, AStreamEndsWithTheStatusOfTheRequestThatIsRefused) {
  const std::string row = BytesOf<float>({1, 2, 3});
  client::SampleRequest request = {.rows = 1, .vocab = 3, .logits = {row}};
  request.params.add_temperature(0);
  const auto stream = client_->OpenSampleStream();
  ASSERT_TRUE(stream->Write(request).ok());
  request.params.set_temperature(0, -1);
  request.params.add_seed(1);
  ASSERT_TRUE(stream->Write(request).ok());
  const absl::StatusOr<client::SampleResult> first = stream->Read();
  ASSERT_TRUE(first.ok()) << first.status();
  EXPECT_THAT(first->answer.tokens(), ElementsAre(2));
  const absl::Status second = stream->Read().status();
  EXPECT_TRUE(absl::IsInvalidArgument(second)) << second;
  EXPECT_THAT(std::string(second.message()), HasSubstr("temperature: got -1"));
  EXPECT_EQ(stream->Read().status(), second);
}

TEST_F(LogitdTest, VerifiesDrafts) {
  const std::string row = BytesOf<float>({1, 3, 2});
  client::VerifyRequest request = {.rows = 3, .vocab = 3, .logits = {row, row, row}};
  request.params.add_temperature(0);
  request.params.add_sequence_rows(3);
  for (int draft : {1, 2}) request.params.add_drafts(draft);
  const absl::StatusOr<client::VerifyResult> got = client_->Verify(request);
  ASSERT_TRUE(got.ok()) << got.status();
  EXPECT_THAT(got->answer.accepted(), ElementsAre(1));
  EXPECT_THAT(got->answer.tokens(), ElementsAre(1, 1, -1));
}

TEST_F(LogitdTest, LogitctlSamples) {
  const std::string npy = dir_.Write(
      "a.npy", testing::NpyF32(2, 3, {std::log(0.5f), std::log(0.25f), std::log(0.25f), 1, 2, 3}));
  const Ran json = Logitctl({"sample", "--logits", npy, "--seed", "0", "--extra-ids", "0",
                             "--top-logprobs", "2", "--format", "json"});
  ASSERT_EQ(json.code, 0) << json.err;
  v1::SampleResponse response;
  const auto status = google::protobuf::util::JsonStringToMessage(json.out, &response);
  ASSERT_TRUE(status.ok()) << status.ToString() << json.out;
  EXPECT_EQ(response.tokens(0), 2);
  EXPECT_THAT(response.top_ids(), ElementsAre(0, 1, 2, 1));

  const std::string params =
      dir_.Write("p.json", R"({"temperature": [0], "logit_bias_ids": [0], "logit_bias": [9],
                    "logit_bias_count": [0, 1]})");
  const Ran table = Logitctl({"sample", "--logits", npy, "--params", params, "--rank"});
  ASSERT_EQ(table.code, 0) << table.err;
  EXPECT_THAT(table.out, AllOf(HasSubstr("     0        0      1"),
                               HasSubstr("     1        0      3"), HasSubstr("round trip")));
  const Ran flags = Logitctl(
      {"sample", "--logits", npy, "--params", params, "--allow", "1,2", "--logit-bias", "2=-inf"});
  ASSERT_EQ(flags.code, 0) << flags.err;
  EXPECT_THAT(flags.out, AllOf(HasSubstr("     0        1"), HasSubstr("     1        1")));
  const Ran draws = Logitctl({"sample", "--logits", npy, "--seed", "0", "--draws", "4,0"});
  ASSERT_EQ(draws.code, 0) << draws.err;
  EXPECT_THAT(draws.out, HasSubstr("  draw        2            -1.38629\n"
                                   "  draw        2            -1.38629\n"
                                   "  draw        1            -1.38629\n"
                                   "  draw        0           -0.693147\n"));
}

TEST_F(LogitdTest, LogitctlFindsTheWatermarkOfATextThatItGenerated) {
  const Ran text = Logitctl({"generate", "--model", testing::InTree("demo/model").string(),
                             "--text", "It is a truth", "--tokens", "200", "--format", "json",
                             "--watermark-key", "41", "--watermark-width", "3"});
  ASSERT_EQ(text.code, 0) << text.err;
  const auto tokens = nlohmann::json::parse(text.out)["tokens"].get<std::vector<int32_t>>();
  const auto p_value = [&](const std::string& key) {
    const Ran found =
        testing::RunBinary("logitctl", {"watermark", "detect", "--ids", absl::StrJoin(tokens, ","),
                                        "--key", key, "--width", "3", "--format", "json"});
    EXPECT_EQ(found.code, 0) << found.err;
    return nlohmann::json::parse(found.out)["p_value"].get<double>();
  };
  EXPECT_LT(p_value("41"), 1e-6);
  EXPECT_GT(p_value("42"), 1e-4);
}

TEST_F(LogitdTest, LogitctlTakesEveryTopKThatKeepsAll) {
  const std::string npy = dir_.Write("a.npy", testing::NpyF32(2, 3, {1, 2, 3, 4, 5, 6}));
  const auto drawn = [&](const std::string& top_k) {
    const nlohmann::json json = Json({"sample", "--logits", npy, "--seed", "3", "--logprob-mode",
                                      "processed", "--top-k", top_k});
    return std::pair(json["tokens"], json["logprobs"]);
  };
  const auto want = drawn("0");
  for (const char* top_k : {"-1", "3", "4", "2147483647", "-1,4"}) {
    EXPECT_EQ(drawn(top_k), want) << top_k;
  }
  EXPECT_NE(drawn("1"), want);
}

// The five numbers are the published outputs of SplitMix64 from 1234567.
TEST_F(LogitdTest, LogitctlSpreadsSeedsFromOneNumber) {
  const int rows = 64;
  const std::string equal =
      dir_.Write("equal.npy", testing::NpyF32(rows, 50, std::vector<float>(rows * 50, 0.5f)));
  const std::string five =
      dir_.Write("five.npy", testing::NpyF32(5, 50, std::vector<float>(5 * 50, 0.5f)));
  const auto sample = [&](const std::string& npy, const std::vector<std::string>& flags) {
    std::vector<std::string> args = {"sample", "--logits", npy};
    args.insert(args.end(), flags.begin(), flags.end());
    return Json(args)["tokens"].get<std::vector<int>>();
  };
  const std::vector<int> want = sample(
      five, {"--seed",
             "6457827717110365317,3203168211198807973,9817491932198370423,4593380528125082431,"
             "16408922859458223821"});
  for (const char* start : {"1234567", "+1234567", "01234567"}) {
    EXPECT_EQ(sample(five, {"--seeds", start}), want) << start;
  }
  const std::string params = dir_.Write("seed.json", R"({"seed": [1, 2, 3, 4, 5]})");
  EXPECT_EQ(sample(five, {"--seeds", "1234567", "--params", params}), want);

  const auto tokens = [&](const std::vector<std::string>& flags) {
    const std::vector<int> drawn = sample(equal, flags);
    EXPECT_EQ(drawn.size(), 64u);
    return std::set<int>(drawn.begin(), drawn.end()).size();
  };
  EXPECT_EQ(tokens({"--seed", "7"}), 1u);
  EXPECT_GT(tokens({"--seeds", "7"}), 20u);
  EXPECT_GT(tokens({"--seeds", "18446744073709551615"}), 20u);
}

TEST_F(LogitdTest, LogitctlSaysWhichParameterIsWrongAndWhy) {
  const std::string npy = dir_.Write("a.npy", testing::NpyF32(1, 3, {1, 2, 3}));
  struct Case {
    std::vector<std::string> flags;
    const char* error;
  };
  const Case cases[] = {
      {{"--top-p", "1.5"}, "top_p: got 1.5 at row 0, allowed > 0 and <= 1"},
      {{"--top-k", "-2"}, "top_k: got -2 at row 0, allowed -1 or more"},
      {{"--params", dir_.Write("q.json", R"({"logit_bias": [1]})")},
       "logit_bias: got 1 values, allowed 0"},
      {{"--params", dir_.Write("r.json", R"({"topk": [1]})")}, "r.json is not a"},
      {{"--params", dir_.Write("s.json", R"({"rows": 1})")}, "s.json has dtype, rows"},
      {{"--params", dir_.path("none")}, "none cannot be read"},
      {{"--logit-bias", "5"}, "--logit-bias: got \"5\", allowed ID=VALUE"},
      {{"--allow", "3"}, "--allow: got token 3, allowed 0..2"},
      {{"--logprob-mode", "cooked"}, "--logprob-mode"},
  };
  for (const Case& test : cases) {
    std::vector<std::string> args = {"sample", "--logits", npy};
    args.insert(args.end(), test.flags.begin(), test.flags.end());
    const Ran ran = Logitctl(args);
    EXPECT_EQ(ran.code, 2) << test.error;
    EXPECT_THAT(ran.err, HasSubstr(test.error));
  }
}

TEST_F(LogitdTest, LogitctlGeneratesTheSameTextForASeed) {
  const std::string model = testing::InTree("demo/model").string();
  const auto generate = [&](const std::vector<std::string>& more) {
    std::vector<std::string> args = {"generate", "--model", model,      "--text", "It is a truth",
                                     "--tokens", "12",      "--format", "json"};
    args.insert(args.end(), more.begin(), more.end());
    const Ran ran = Logitctl(args);
    EXPECT_EQ(ran.code, 0) << ran.err;
    return ran.out;
  };
  const std::string first = generate({"--seed", "7", "--temperature", "0.8", "--top-p", "0.9"});
  EXPECT_EQ(generate({"--seed", "7", "--temperature", "0.8", "--top-p", "0.9"}), first);
  EXPECT_NE(generate({"--seed", "8", "--temperature", "0.8", "--top-p", "0.9"}), first);
  const nlohmann::json json = nlohmann::json::parse(first);
  EXPECT_EQ(json["tokens"].size(), 12u);
  // Greedy is what the model itself finds most probable.
  const nlohmann::json greedy = nlohmann::json::parse(generate({"--temperature", "0"}));
  auto local = client::LanguageModel::Load(model);
  ASSERT_TRUE(local.ok()) << local.status();
  client::LanguageModel::State state = local->InitialState();
  std::vector<float> hidden = local->Step(state, local->bos_token_id());
  for (int32_t token : local->Tokenize("It is a truth")) hidden = local->Step(state, token);
  for (const int32_t token : greedy["tokens"].get<std::vector<int32_t>>()) {
    std::vector<float> logits = local->Logits(hidden);
    logits[static_cast<size_t>(local->bos_token_id())] = -1e30f;
    EXPECT_EQ(token, std::max_element(logits.begin(), logits.end()) - logits.begin());
    hidden = local->Step(state, token);
  }

  const Ran live = Logitctl({"generate", "--model", model, "--text", "It is a truth", "--tokens",
                             "12", "--seed", "7", "--temperature", "0.8", "--top-p", "0.9"});
  EXPECT_THAT(live.out, AllOf(HasSubstr("It is a truth" + json["text"].get<std::string>() + "\n"),
                              HasSubstr("12 tokens, mean logprob")));
  const Ran details = Logitctl({"generate", "--model", model, "--text", "It", "--tokens", "3",
                                "--details", "--top-logprobs", "2"});
  EXPECT_THAT(details.out, AllOf(HasSubstr("place"), HasSubstr("   of \"")));
}

}  // namespace
}  // namespace logitd
