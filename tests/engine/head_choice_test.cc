// Which matrix of a model's folder is its head, and what is said where that is not sure.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "tests/engine/heads_fixture.h"

namespace logitd::engine {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr char kEmbeddings[] = "model.embed_tokens.weight";
constexpr char kHead[] = "lm_head.weight";

class HeadChoiceTest : public HeadsTest {
 protected:
  // A folder with a configuration, and matrices of 4 x 4 f32.
  std::string Folder(const std::string& config, const std::vector<std::string>& tensors) {
    const std::string name = absl::StrCat("choice", ++folders_);
    std::filesystem::create_directory(absl::StrCat(files_, "/", name));
    Write(name, "config.json", config);
    Write(name, "model.safetensors", Safetensors(tensors));
    return name;
  }
  void Write(const std::string& folder, const std::string& file, const std::string& bytes) {
    std::ofstream(absl::StrCat(files_, "/", folder, "/", file), std::ios::binary) << bytes;
  }
  static std::string Safetensors(const std::vector<std::string>& tensors) {
    constexpr int kBytes = 64;
    std::vector<std::string> entries;
    for (size_t i = 0; i < tensors.size(); ++i) {
      entries.push_back(
          absl::StrFormat(R"("%s":{"dtype":"F32","shape":[4,4],"data_offsets":[%d,%d]})",
                          tensors[i], i * kBytes, (i + 1) * kBytes));
    }
    const std::string header = absl::StrCat("{", absl::StrJoin(entries, ","), "}");
    const auto length = static_cast<uint64_t>(header.size());
    return absl::StrCat(std::string(reinterpret_cast<const char*>(&length), sizeof(length)), header,
                        std::string(tensors.size() * kBytes, '\0'));
  }

  std::string TensorOf(const std::string& folder) {
    const auto head = Load(Request(folder));
    if (!head.ok()) return std::string(head.status().message());
    warnings_ = (*head)->info().warnings;
    const std::string tensor = (*head)->info().tensor;
    EXPECT_TRUE(heads_.Unload("h").ok());
    return tensor;
  }

  int folders_ = 0;
  std::vector<std::string> warnings_;
};

// The defaults are transformers', of 4.57 and of 5.
TEST_F(HeadChoiceTest, TheTypeDecidesWhereTyingIsNotStated) {
  for (const char* type : {"gpt2", "gemma", "opt", "bloom", "gpt_neo", "mpt"}) {
    const std::string config = absl::StrFormat(R"({"model_type": "%s", "vocab_size": 4})", type);
    EXPECT_EQ(TensorOf(Folder(config, {kEmbeddings})), kEmbeddings) << type;
  }
  for (const char* type : {"llama", "mistral", "qwen2", "qwen3", "phi3", "olmo2", "mixtral"}) {
    const std::string config = absl::StrFormat(R"({"model_type": "%s", "vocab_size": 4})", type);
    EXPECT_THAT(TensorOf(Folder(config, {kEmbeddings, "model.norm.weight"})),
                AllOf(HasSubstr("tie_word_embeddings: got none, which means false for model_type"),
                      HasSubstr("looked for "), HasSubstr(kHead), HasSubstr("there: "),
                      HasSubstr(kEmbeddings)))
        << type;
    EXPECT_EQ(TensorOf(Folder(config, {kEmbeddings, kHead})), kHead) << type;
    EXPECT_THAT(warnings_, IsEmpty()) << type;
  }
}

TEST_F(HeadChoiceTest, WhatIsStatedWinsAlsoInTheTextModel) {
  EXPECT_EQ(
      TensorOf(Folder(R"({"model_type": "llama", "tie_word_embeddings": true})", {kEmbeddings})),
      kEmbeddings);
  EXPECT_THAT(TensorOf(Folder(R"({"model_type": "gpt2", "tie_word_embeddings": false})",
                              {"transformer.wte.weight"})),
              HasSubstr("tie_word_embeddings: got false"));
  EXPECT_EQ(
      TensorOf(Folder(R"({"model_type": "gemma3", "text_config": {"tie_word_embeddings": true}})",
                      {"model.language_model.embed_tokens.weight"})),
      "model.language_model.embed_tokens.weight");
  EXPECT_THAT(TensorOf(Folder(R"({"model_type": "llava", "text_config": {"model_type": "llama"}})",
                              {"model.language_model.embed_tokens.weight"})),
              HasSubstr("allowed true if there is no head"));
}

TEST_F(HeadChoiceTest, AQuantisedHeadIsNamedWithItsScheme) {
  struct Case {
    const char* tensor;
    const char* method;
    const char* scheme;
  };
  const Case cases[] = {
      {"lm_head.qweight", "gptq", "GPTQ"},
      {"lm_head.qweight", "awq", "AWQ"},
      {"lm_head.weight_packed", "compressed-tensors", "compressed-tensors"},
      {"lm_head.weight.absmax", "bitsandbytes", "bitsandbytes"},
  };
  for (const Case& c : cases) {
    const std::string config = absl::StrFormat(
        R"({"model_type": "llama", "quantization_config": {"quant_method": "%s"}})", c.method);
    EXPECT_THAT(TensorOf(Folder(config, {kEmbeddings, c.tensor})),
                AllOf(HasSubstr("quantised by"), HasSubstr(c.tensor), HasSubstr(c.scheme),
                      HasSubstr(c.method)))
        << c.tensor;
  }
}

TEST_F(HeadChoiceTest, ATiedModelsOwnHeadIsTakenWithAWarning) {
  EXPECT_EQ(TensorOf(Folder(R"({"model_type": "llama", "tie_word_embeddings": true})",
                            {kEmbeddings, kHead})),
            kHead);
  EXPECT_THAT(warnings_, ElementsAre(AllOf(HasSubstr("tie_word_embeddings is true"),
                                           HasSubstr(kHead), HasSubstr(kEmbeddings))));
}

TEST_F(HeadChoiceTest, AWrapperOfAllNamesIsLeftOut) {
  const std::string config = R"({"model_type": "llama"})";
  for (const std::string wrapper : {"_orig_mod.", "module.", "module._orig_mod."}) {
    EXPECT_EQ(TensorOf(Folder(config, {wrapper + kEmbeddings, wrapper + kHead})), wrapper + kHead);
  }
  EXPECT_THAT(TensorOf(Folder(config, {kEmbeddings, std::string("module.") + kHead})),
              HasSubstr("looked for "));
}

TEST_F(HeadChoiceTest, ASingleFileIsTakenBesideAnIndexAndAWarningSaysSo) {
  const std::string folder = Folder(R"({"model_type": "llama"})", {kHead});
  Write(folder, "model.safetensors.index.json",
        R"({"weight_map": {"lm_head.weight": "other.safetensors"}})");
  EXPECT_EQ(TensorOf(folder), kHead);
  EXPECT_THAT(warnings_, ElementsAre(AllOf(HasSubstr("model.safetensors"), HasSubstr("index"))));
}

TEST_F(HeadChoiceTest, AGitLfsPointerIsCalledOne) {
  const std::string pointer =
      "version https://git-lfs.github.com/spec/v1\n"
      "oid sha256:4665a5ea423c2713d436b5ee50593a9640e0018c1550b5a0002f74190d6caea8\nsize 135\n";
  const std::string config = R"({"model_type": "llama"})";
  for (const char* file : {"model.safetensors", "config.json"}) {
    const std::string folder = Folder(config, {kHead});
    Write(folder, file, pointer);
    EXPECT_THAT(TensorOf(folder), AllOf(HasSubstr(file), HasSubstr("Git LFS"))) << file;
  }
  const std::string folder = Folder(config, {kHead});
  std::filesystem::remove(absl::StrCat(files_, "/", folder, "/model.safetensors"));
  Write(folder, "model.safetensors.index.json", pointer);
  EXPECT_THAT(TensorOf(folder), HasSubstr("Git LFS"));
}

// As Python's json module writes them, and transformers 4 with it.
TEST_F(HeadChoiceTest, NumbersThatAreNotFiniteAreRead) {
  for (const char* value : {"Infinity", "-Infinity", "NaN"}) {
    const std::string config =
        absl::StrFormat(R"({"model_type": "llama", "time_step_limit": [0.0, %s]})", value);
    EXPECT_EQ(TensorOf(Folder(config, {kHead})), kHead) << value;
  }
  EXPECT_THAT(TensorOf(Folder("{\n \"a\": Infinit\n}", {kHead})), HasSubstr("line 2"));
}

}  // namespace
}  // namespace logitd::engine
