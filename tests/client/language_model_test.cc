#include "client/language_model.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "formats/half.h"
#include "tests/client/test_model.h"

namespace logitd::client {
namespace {

using ::logitd::testing::TempDir;
using ::logitd::testing::TinyModel;
using ::testing::ElementsAre;
using ::testing::FloatNear;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

// 256 bytes, then "ab" = 256, "abc" = 257, bos = 258.
TEST(LanguageModelTest, TokenizesByTheLongestMatch) {
  TempDir dir;
  absl::StatusOr<LanguageModel> model = LanguageModel::Load(TinyModel().Write(dir));
  ASSERT_TRUE(model.ok()) << model.status();
  EXPECT_THAT(model->Tokenize("abcabxa"), ElementsAre(257, 256, 'x', 'a'));
  EXPECT_THAT(model->Tokenize(""), IsEmpty());
  EXPECT_THAT(model->Tokenize("\xe9"), ElementsAre(0xe9));
  EXPECT_THAT(model->Tokenize("<bos>"), ElementsAre('<', 'b', 'o', 's', '>'));
  const std::string text = std::string("abc\0 \xff abab", 11);
  EXPECT_EQ(model->Detokenize(model->Tokenize(text)), text);
  EXPECT_EQ(model->Detokenize({258, 'a'}), "a");
}

// Expected values: the header's formulas in double precision, with the weights of TinyModel:
// bos (embedding 0.5): r = s(.5), z = s(1.75), n = tanh(-.125 + r * .0625), h = (1 - z) n
// 'a' (embedding -1): the same line again from that h.
TEST(LanguageModelTest, StepsByTheGruFormulas) {
  TempDir dir;
  absl::StatusOr<LanguageModel> model = LanguageModel::Load(TinyModel().Write(dir));
  ASSERT_TRUE(model.ok()) << model.status();
  LanguageModel::State state = model->InitialState();
  EXPECT_THAT(model->Step(state, model->bos_token_id()),
              ElementsAre(FloatNear(-0.0127149135f, 1e-7f)));
  EXPECT_THAT(model->Step(state, 'a'), ElementsAre(FloatNear(0.6828194762f, 1e-6f)));
  // The head: weight 2 for 'a', -3 for 'b', bias 1 for 'b'.
  const std::vector<float> logits = model->Logits(std::vector<float>{0.5f});
  ASSERT_EQ(logits.size(), 259u);
  EXPECT_EQ(logits['a'], 1.0f);
  EXPECT_EQ(logits['b'], -0.5f);
  EXPECT_EQ(logits['c'], 0.0f);
}

TEST(LanguageModelTest, StatesAreApart) {
  TempDir dir;
  absl::StatusOr<LanguageModel> model = LanguageModel::Load(TinyModel().Write(dir));
  ASSERT_TRUE(model.ok()) << model.status();
  LanguageModel::State one = model->InitialState();
  model->Step(one, 'a');
  LanguageModel::State two = model->InitialState();
  EXPECT_NE(model->Step(one, 'a'), model->Step(two, 'a'));
}

TEST(LanguageModelTest, ProjectionAndTiedHead) {
  TempDir dir;
  TinyModel tiny;
  tiny.config["tie_embeddings"] = true;  // D == E == 1
  tiny.tensors.erase("lm_head.weight");
  tiny.tensors["model.proj.weight"] = {{1, 1}, {4.0f}};
  tiny.tensors["model.proj.bias"] = {{1}, {0.25f}};
  absl::StatusOr<LanguageModel> model = LanguageModel::Load(tiny.Write(dir));
  ASSERT_TRUE(model.ok()) << model.status();
  LanguageModel::State state = model->InitialState();
  EXPECT_THAT(model->Step(state, 258), ElementsAre(FloatNear(4 * -0.0127149135f + 0.25f, 1e-6f)));
  EXPECT_EQ(model->Logits(std::vector<float>{2.0f})['a'], -2.0f);  // embedding of 'a' is -1
}

TEST(LanguageModelTest, TheSecondLayerReadsTheFirst) {
  TempDir dir;
  TinyModel tiny;
  tiny.config["num_layers"] = 2;
  // Zero weights and z = s(0): h' = n / 2 with n = tanh(w_in * h_of_layer_0).
  tiny.tensors["model.layers.1.weight_ih"] = {{3, 1}, {0, 0, 100}};
  tiny.tensors["model.layers.1.weight_hh"] = {{3, 1}, {0, 0, 0}};
  tiny.tensors["model.layers.1.bias_ih"] = {{3}, {0, 0, 0}};
  tiny.tensors["model.layers.1.bias_hh"] = {{3}, {0, 0, 0}};
  absl::StatusOr<LanguageModel> model = LanguageModel::Load(tiny.Write(dir));
  ASSERT_TRUE(model.ok()) << model.status();
  LanguageModel::State state = model->InitialState();
  EXPECT_THAT(model->Step(state, 258),
              ElementsAre(FloatNear(0.5f * std::tanh(100 * -0.0127149135f), 1e-6f)));
}

TEST(LanguageModelTest, ReadsHalfPrecision) {
  for (const char* dtype : {"F16", "BF16"}) {
    TempDir dir;
    TinyModel tiny;
    tiny.dtype = dtype;  // every weight of the tiny model is exact in both
    absl::StatusOr<LanguageModel> model = LanguageModel::Load(tiny.Write(dir));
    ASSERT_TRUE(model.ok()) << model.status();
    LanguageModel::State state = model->InitialState();
    EXPECT_THAT(model->Step(state, 258), ElementsAre(FloatNear(-0.0127149135f, 1e-7f))) << dtype;
  }
}

TEST(LanguageModelTest, SaysWhatDoesNotFit) {
  struct Case {
    const char* name;
    void (*change)(TinyModel&);
    const char* error;
  };
  const Case cases[] = {
      {"architecture", [](TinyModel& m) { m.config["architecture"] = "lstm"; },
       "architecture is not \"gru_lm\""},
      {"no_hidden_size", [](TinyModel& m) { m.config.erase("hidden_size"); },
       "hidden_size is missing"},
      {"layers_zero", [](TinyModel& m) { m.config["num_layers"] = 0; },
       "num_layers is 0; allowed: 1..64"},
      {"hidden_size_text", [](TinyModel& m) { m.config["hidden_size"] = "1"; },
       "hidden_size is \"1\""},
      {"bos_outside", [](TinyModel& m) { m.config["bos_token_id"] = 259; },
       "bos_token_id is 259; allowed: 0..258"},
      {"tie_not_bool", [](TinyModel& m) { m.config["tie_embeddings"] = 1; }, "tie_embeddings is 1"},
      {"tensor_missing", [](TinyModel& m) { m.tensors.erase("model.layers.0.bias_hh"); },
       "no tensor 'model.layers.0.bias_hh'"},
      {"tensor_shape",
       [](TinyModel& m) {
         m.tensors["model.layers.0.bias_hh"] = {{2}, {0, 0}};
       },
       "bias_hh has shape [2]; by config.json it is [3]"},
      {"tensor_rank",
       [](TinyModel& m) {
         m.tensors["model.layers.0.bias_hh"] = {{3, 1}, {0, 0, 0}};
       },
       "bias_hh has shape [3,1]"},
      {"proj_without_bias",
       [](TinyModel& m) {
         m.tensors["model.proj.weight"] = {{1, 1}, {1}};
       },
       "no tensor 'model.proj.bias'"},
      {"head_against_proj",
       [](TinyModel& m) {
         m.tensors["model.proj.weight"] = {{2, 1}, {1, 1}};
         m.tensors["model.proj.bias"] = {{2}, {1, 1}};
       },
       "lm_head.weight has shape [259,1]; by config.json it is [259,2]"},
      {"vocab_short", [](TinyModel& m) { m.vocab.erase(257); }, "not an array of the 259 strings"},
      {"vocab_twice", [](TinyModel& m) { m.vocab[257] = "ab"; },
       "entry 257 is empty or there twice"},
      {"vocab_empty_token", [](TinyModel& m) { m.vocab[257] = ""; }, "entry 257 is empty"},
      {"vocab_code_point", [](TinyModel& m) { m.vocab[257] = "\xe2\x82\xac"; },
       "entry 257 is not a string of code points"},
      {"vocab_number", [](TinyModel& m) { m.vocab[257] = 5; },
       "entry 257 is not a string of code points"},
      {"vocab_byte_missing", [](TinyModel& m) { m.vocab[7] = "xyz"; }, "byte 7 is not a token"},
  };
  for (const Case& test : cases) {
    SCOPED_TRACE(test.name);
    TempDir dir;
    TinyModel tiny;
    test.change(tiny);
    absl::StatusOr<LanguageModel> model = LanguageModel::Load(tiny.Write(dir));
    ASSERT_FALSE(model.ok());
    EXPECT_THAT(std::string(model.status().message()), HasSubstr(test.error));
  }
}

TEST(LanguageModelTest, NamesTheMissingFile) {
  TempDir dir;
  EXPECT_THAT(std::string(LanguageModel::Load(dir.path("none")).status().message()),
              HasSubstr("none/config.json"));
  dir.Write("config.json", "{");
  EXPECT_THAT(std::string(LanguageModel::Load(dir.path("")).status().message()),
              HasSubstr("not JSON"));
}

}  // namespace
}  // namespace logitd::client
