// Model folders as people have them: which tensor of a folder is the head, what is said where more
// than one could be, and what is said where none is. The folders are written here.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <stdlib.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "server/engine/heads.h"
#include "server/engine/metrics.h"
#include "tests/fake_backend.h"

namespace logitd::engine {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

constexpr char kEmbeddings[] = "model.embed_tokens.weight";
constexpr char kPointer[] =
    "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n";

// The names of tensors, each with its dtype; "": F16. All are [4,8].
using Tensors = std::map<std::string, std::string>;

std::string Safetensors(const Tensors& tensors) {
  const std::map<std::string, int64_t> sizes = {{"", 2}, {"I32", 4}, {"I64", 8}};
  std::string header;
  int64_t end = 0;
  for (const auto& [name, dtype] : tensors) {
    const auto size = sizes.find(dtype);
    const int64_t begin = end;
    end += 32 * (size != sizes.end() ? size->second : 1);
    absl::StrAppendFormat(&header, R"(%s"%s":{"dtype":"%s","shape":[4,8],"data_offsets":[%d,%d]})",
                          header.empty() ? "{" : ",", name, dtype.empty() ? "F16" : dtype, begin,
                          end);
  }
  header += "}";
  std::string length(8, '\0');
  for (size_t i = 0; i < 8; ++i) length[i] = static_cast<char>(header.size() >> 8 * i & 0xff);
  return length + header + std::string(static_cast<size_t>(end), '\0');
}

std::string Config(const std::string& type) {
  return absl::StrCat(R"({"model_type":")", type, R"("})");
}

class ModelFoldersTest : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = (std::filesystem::temp_directory_path() / "logitd-folder-XXXXXX").string();
    ASSERT_NE(mkdtemp(folder_.data()), nullptr);
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  void Write(const std::string& name, const std::string& content) {
    std::ofstream(folder_ + "/" + name, std::ios::binary) << content;
  }
  // The tensor that was loaded, or the error's text. Keeps the warnings.
  std::string Load(const std::string& path = "") {
    const auto head = heads_.Load({.name = "h", .path = folder_ + path},
                                  [](const HeadProgress&) { return true; });
    warnings_.clear();
    if (!head.ok()) return head.status().ToString();
    warnings_ = (*head)->info().warnings;
    EXPECT_TRUE(heads_.Unload("h").ok());
    return (*head)->info().tensor;
  }
  std::string Load(const std::string& config, const Tensors& tensors) {
    Write("config.json", config);
    Write("model.safetensors", Safetensors(tensors));
    return Load();
  }
  // Two files and an index that hold these tensors.
  std::string LoadSharded(const std::string& config, const Tensors& tensors) {
    Write("config.json", config);
    std::filesystem::remove(folder_ + "/model.safetensors");
    std::string map;
    Tensors shards[2];
    for (const auto& [name, dtype] : tensors) {
      const size_t shard = map.size() % 2;
      shards[shard][name] = dtype;
      absl::StrAppend(&map, map.empty() ? "" : ",", "\"", name, "\":\"", shard, ".safetensors\"");
    }
    for (size_t shard = 0; shard < 2; ++shard) {
      Write(absl::StrCat(shard, ".safetensors"),
            Safetensors(shards[shard].empty() ? Tensors{{"x", ""}} : shards[shard]));
    }
    Write("model.safetensors.index.json", absl::StrCat("{\"weight_map\":{", map, "}}"));
    const std::string loaded = Load();
    std::filesystem::remove(folder_ + "/model.safetensors.index.json");
    return loaded;
  }

  std::vector<std::string> LoadBoth(const std::string& config, const Tensors& tensors) {
    return {Load(config, tensors), LoadSharded(config, tensors)};
  }

  std::string folder_;
  FakeBackend backend_;
  Metrics metrics_;
  Heads heads_{&backend_, &metrics_};
  std::vector<std::string> warnings_;
};

TEST_F(ModelFoldersTest, TheModelTypeDecidesWhetherUnstatedEmbeddingsAreTheHead) {
  const Tensors tensors = {{kEmbeddings, ""}, {"model.norm.weight", ""}};
  for (const char* type : {"gpt2", "gemma", "gemma2", "gemma3_text", "cohere", "opt", "bloom",
                           "falcon", "starcoder2", "smollm3", "ernie4_5", "lfm2", "mamba"}) {
    const std::string config = absl::StrCat(R"({"model_type":")", type,
                                            R"(","logit_scale":1,"final_logit_softcapping":null})");
    EXPECT_EQ(Load(config, tensors), kEmbeddings) << type;
    EXPECT_THAT(warnings_, IsEmpty());
    EXPECT_EQ(LoadSharded(config, tensors), kEmbeddings) << type;
  }
  for (const char* type :
       {"llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "phi3", "phi", "gpt_neox",
        "gpt_oss", "granite", "olmo2", "deepseek_v3", "glm4", "mamba2", "qwen2_vl", "llava"}) {
    const std::string wanted = absl::StrCat(
        "config.json: tie_word_embeddings: got none, which means false for model_type '", type,
        "', allowed true if there is no head; looked for lm_head.weight, ");
    const std::string there = "; there: 'model.embed_tokens.weight', 'model.norm.weight'";
    EXPECT_THAT(LoadBoth(Config(type), tensors), Each(AllOf(HasSubstr(wanted), HasSubstr(there))));
  }
}

TEST_F(ModelFoldersTest, WhatIsStatedWinsOverTheModelType) {
  const Tensors tensors = {{kEmbeddings, ""}};
  for (
      const char* config : {
          R"({"model_type":"llama","tie_word_embeddings":true})",
          R"({"model_type":"llava","text_config":{"model_type":"llama","tie_word_embeddings":true}})",
          R"({"model_type":"llava","tie_word_embeddings":true,"text_config":{"model_type":"llama"}})",
          R"({"model_type":"qwen2_vl","tie_word_embeddings":true})",
          R"({"model_type":"never_seen","tie_word_embeddings":true})",
          R"({"model_type":"lfm2","tie_word_embeddings":false,"tie_embedding":true})",
      }) {
    EXPECT_EQ(Load(config, tensors), kEmbeddings) << config;
  }
  for (
      const char* config : {
          R"({"model_type":"gpt2","tie_word_embeddings":false})",
          R"({"model_type":"gpt2","tie_word_embeddings":null})",
          R"({"model_type":"gemma3","text_config":{"model_type":"gemma3_text","tie_word_embeddings":false}})",
          R"({"model_type":"gemma3","tie_word_embeddings":false,"text_config":{"model_type":"gemma3_text"}})",
      }) {
    EXPECT_THAT(Load(config, tensors),
                HasSubstr("tie_word_embeddings: got false, allowed true if there is no head"))
        << config;
  }
  EXPECT_THAT(Load(R"({"model_type":"lfm2","tie_embedding":false})", tensors),
              HasSubstr("config.json: tie_embedding: got false, allowed true if there is no head"));
  for (const char* value : {"1", "\"true\"", "{}", "[true]"}) {
    EXPECT_THAT(
        Load(absl::StrCat(R"({"model_type":"gpt2","tie_word_embeddings":)", value, "}"), tensors),
        HasSubstr("config.json: tie_word_embeddings: got "))
        << value;
  }
}

// The text model's type counts before that of the whole model, as transformers 4 builds them. What
// transformers 5 saves states the setting.
TEST_F(ModelFoldersTest, TheTypeOfATextModelCountsFirst) {
  const Tensors tensors = {{"model.language_model.embed_tokens.weight", ""}};
  for (const char* config : {
           R"({"model_type":"paligemma","text_config":{"model_type":"gemma"}})",
           R"({"model_type":"llava","text_config":{"model_type":"gemma"}})",
           R"({"model_type":"blip-2","text_config":{"model_type":"opt"}})",
           R"({"model_type":"gemma3","text_config":{}})",
           R"({"model_type":"never_seen","text_config":{"model_type":"gemma3_text"}})",
       }) {
    EXPECT_EQ(Load(config, tensors), "model.language_model.embed_tokens.weight") << config;
  }
  for (const char* config : {
           R"({"model_type":"mistral3","text_config":{"model_type":"mistral"}})",
           R"({"model_type":"internvl","text_config":{"model_type":"qwen2"}})",
           R"({"model_type":"gemma3","text_config":{"model_type":"llama"}})",
           R"({"model_type":"llava","text_config":{"vocab_size":4}})",
           R"({"model_type":"qwen2_5_vl","text_config":{"model_type":"qwen2_5_vl_text"}})",
           R"({"model_type":"llama","text_config":{"model_type":"never_seen"}})",
       }) {
    EXPECT_THAT(Load(config, tensors), HasSubstr("got none, which means false for model_type '"))
        << config;
  }
}

TEST_F(ModelFoldersTest, WhereNoTypeTellsOnlyAFolderWithoutOneIsLoadedWithAWarning) {
  const Tensors tensors = {{kEmbeddings, ""}};
  EXPECT_THAT(Load(Config("never_seen"), tensors),
              HasSubstr("tie_word_embeddings: got none, and the default of model_type 'never_seen' "
                        "is not known, allowed true if there is no head"));
  EXPECT_EQ(Load("{}", tensors), kEmbeddings);
  const auto warned = ElementsAre(HasSubstr("model.embed_tokens.weight is taken as the head"));
  EXPECT_THAT(warnings_, warned);
  EXPECT_EQ(Load("/model.safetensors"), kEmbeddings);
  EXPECT_THAT(warnings_, warned);
}

struct Quantised {
  const char* tensors;  // "name:dtype ..."; without a dtype F16
  const char* scheme;
};
constexpr Quantised kQuantised[] = {
    {"lm_head.qweight:I32 lm_head.qzeros:I32 lm_head.scales lm_head.g_idx:I32",
     "quantised by GPTQ,"},
    {"lm_head.qweight:I32 lm_head.qzeros:I32 lm_head.scales", "quantised by GPTQ or AWQ"},
    {"language_model.lm_head.qweight:I32", "quantised by GPTQ or AWQ"},
    {"lm_head.weight_packed:I32 lm_head.weight_scale lm_head.weight_shape:I64",
     "quantised by compressed-tensors"},
    {"lm_head.weight:U8 lm_head.weight.absmax lm_head.weight.quant_map",
     "quantised by bitsandbytes in 4 bits"},
    {"lm_head.weight:I8 lm_head.SCB", "quantised by bitsandbytes in 8 bits"},
    {"lm_head.weight:F8_E4M3 lm_head.weight_scale_inv", "quantised by fp8 with scales"},
    {"lm_head.weight:F8_E4M3 lm_head.weight_scale", "quantised by fp8 or int8"},
    {"lm_head.weight:U8 lm_head.weight_scale:F8_E4M3 lm_head.weight_scale_2", "quantised by NVFP4"},
    {"embed_out.qweight:I32", "quantised by GPTQ or AWQ"},
    {"lm_head.W_q:U8 lm_head.scale lm_head.zero", "quantised by HQQ"},
    {"lm_head.weight:U8 lm_head.scales lm_head.biases", "quantised by MLX"},
    {"lm_head.weight:F8_E5M2",
     "dtype of tensor 'lm_head.weight': got 'F8_E5M2', allowed F32, F16, BF16; a weight quantised "
     "to fp8 is not read"},
    {"lm_head.weight:I8", "a weight quantised to integers is not read"},
};

Tensors Parse(const char* text) {
  Tensors tensors;
  std::istringstream words(text);
  for (std::string word; words >> word;) {
    const size_t end = std::min(word.find(':'), word.size());
    tensors[word.substr(0, end)] = word.substr(std::min(end + 1, word.size()));
  }
  return tensors;
}

TEST_F(ModelFoldersTest, AQuantisedHeadIsRefusedWithItsScheme) {
  for (const Quantised& test : kQuantised) {
    SCOPED_TRACE(test.scheme);
    Tensors tensors = Parse(test.tensors);
    EXPECT_THAT(Load(Config("llama"), tensors), HasSubstr(test.scheme));
    tensors[kEmbeddings] = "";
    for (const char* config : {R"({"model_type":"llama"})", R"({"tie_word_embeddings":false})",
                               "{}", R"({"model_type":"never_seen"})"}) {
      EXPECT_THAT(LoadBoth(config, tensors), Each(HasSubstr(test.scheme))) << config;
    }
    Load("{}", tensors);
    EXPECT_THAT(Load("/model.safetensors"), HasSubstr(test.scheme));
  }
  EXPECT_THAT(
      Load(R"({"model_type":"llama","quantization_config":{"quant_method":"awq","bits":4}})",
           {{kEmbeddings, ""}, {"lm_head.qweight", "I32"}}),
      AllOf(HasSubstr("there: 'lm_head.qweight', 'model.embed_tokens.weight'; "),
            HasSubstr("'lm_head.qweight' is of a matrix quantised by GPTQ or AWQ (quant_method: "
                      "'awq'), allowed F32, F16, BF16")));
}

TEST_F(ModelFoldersTest, QuantisedEmbeddingsAreNotAHead) {
  EXPECT_THAT(
      Load(R"({"model_type":"gpt2"})",
           {{"wte.weight", "U8"}, {"wte.scales", ""}, {"wte.biases", ""}}),
      HasSubstr("head: got 'wte.weight', and 'wte.biases' is of a matrix quantised by MLX"));
  EXPECT_EQ(Load(R"({"model_type":"gemma","tie_word_embeddings":true})",
                 {{kEmbeddings, ""}, {"lm_head.qweight", "I32"}}),
            kEmbeddings);
  EXPECT_THAT(warnings_,
              ElementsAre(HasSubstr("lm_head.qweight, of a quantised head, is not read")));
}

TEST_F(ModelFoldersTest, AHeadBesideTiedEmbeddingsIsTakenWithAWarning) {
  const Tensors both = {{kEmbeddings, ""}, {"lm_head.weight", ""}};
  for (const char* config :
       {R"({"model_type":"llama","tie_word_embeddings":true})",
        R"({"model_type":"gemma3","text_config":{"tie_word_embeddings":true}})",
        R"({"tie_word_embeddings":true})", R"({"model_type":"gpt2"})"}) {
    EXPECT_EQ(Load(config, both), "lm_head.weight");
    ASSERT_THAT(warnings_,
                ElementsAre(AllOf(HasSubstr("tie_word_embeddings is true"),
                                  HasSubstr("lm_head.weight and model.embed_tokens.weight"))));
    EXPECT_EQ(LoadSharded(config, both), "lm_head.weight");
    EXPECT_EQ(warnings_.size(), 1u);
  }
  for (const char* config :
       {R"({"model_type":"llama"})", R"({"tie_word_embeddings":false})", "{}"}) {
    EXPECT_EQ(Load(config, both), "lm_head.weight");
    EXPECT_THAT(warnings_, IsEmpty());
  }
  EXPECT_EQ(Load(R"({"tie_word_embeddings":true})", {{"lm_head.weight", ""}}), "lm_head.weight");
  EXPECT_THAT(warnings_, IsEmpty());
}

TEST_F(ModelFoldersTest, AHeadUnderAnUnknownNameIsListed) {
  Tensors tensors = {{kEmbeddings, ""}, {"output.weight", ""}, {"model.layers.0.w.weight", ""}};
  for (int i = 10; i < 30; ++i) tensors[absl::StrCat("tower.part", i)] = "";
  EXPECT_THAT(LoadBoth(Config("llama"), tensors),
              Each(AllOf(HasSubstr("there: 'model.embed_tokens.weight', 'output.weight', 'tower"),
                         HasSubstr(" and 14 more"), Not(HasSubstr("layers")))));
  EXPECT_THAT(Load("{}", {{"output.weight", ""}, {"tok.weight", ""}}),
              HasSubstr("or another name of a known head; there: 'output.weight', 'tok.weight'"));
}

TEST_F(ModelFoldersTest, WrappersThatAllNamesBeginWithAreLeftOut) {
  for (const std::string wrapper :
       {"_orig_mod.", "module.", "_orig_mod.module.", "module._orig_mod.", "module.module.",
        "_orig_mod._orig_mod.module."}) {
    const Tensors tensors = {{wrapper + kEmbeddings, ""},
                             {wrapper + "lm_head.weight", ""},
                             {wrapper + "model.layers.0.w.weight", ""}};
    EXPECT_THAT(LoadBoth(Config("llama"), tensors), Each(wrapper + "lm_head.weight"));
    const Tensors tied = {{wrapper + "wte.weight", ""}, {wrapper + "h.0.w", ""}};
    EXPECT_THAT(LoadBoth(Config("gpt2"), tied), Each(wrapper + "wte.weight"));
    EXPECT_THAT(
        Load(Config("llama"), {{wrapper + kEmbeddings, ""}, {wrapper + "lm_head.qweight", "I32"}}),
        HasSubstr("'" + wrapper + "lm_head.qweight' is of a matrix quantised"));
    // Not all names begin with it.
    Tensors some = tensors;
    some["model.layers.1.w.weight"] = "";
    EXPECT_THAT(Load(Config("llama"), some), HasSubstr("no tensor 'lm_head.weight'"));
    Load(Config("llama"), tensors);
    EXPECT_EQ(Load("/model.safetensors"), wrapper + "lm_head.weight");
    EXPECT_THAT(LoadSharded(Config("llama"), some), AllOf(HasSubstr("no tensor 'lm_head.weight'"),
                                                          HasSubstr(wrapper + "lm_head.weight")));
  }
  EXPECT_EQ(Load(Config("llama"), {{"module.lm_head.weight", ""}, {"module._orig_mod.x", ""}}),
            "module.lm_head.weight");
}

TEST_F(ModelFoldersTest, OfASingleFileAndAnIndexTheFileIsTakenAndSaid) {
  Write("model.safetensors.index.json", R"({"weight_map":{"lm_head.weight":"none.safetensors"}})");
  EXPECT_EQ(Load(Config("llama"), {{"lm_head.weight", ""}}), "lm_head.weight");
  ASSERT_THAT(warnings_,
              ElementsAre(AllOf(HasSubstr("model.safetensors and model.safetensors.index.json"),
                                HasSubstr("model.safetensors is taken"))));
  EXPECT_EQ(Load("/model.safetensors"), "lm_head.weight");
  EXPECT_THAT(warnings_, IsEmpty());
}

TEST_F(ModelFoldersTest, APointerOfGitLfsIsNamedWhereverItIs) {
  const Tensors head = {{"lm_head.weight", ""}};
  const auto pointer = [](const char* file) {
    return HasSubstr(absl::StrCat("/", file, ": got a Git LFS pointer, allowed the file"));
  };
  Write("config.json", Config("llama"));
  Write("model.safetensors", kPointer);
  EXPECT_THAT(Load(), pointer("model.safetensors"));
  EXPECT_THAT(Load("/model.safetensors"), pointer("model.safetensors"));
  EXPECT_THAT(Load(kPointer, head), pointer("config.json"));
  std::filesystem::remove(folder_ + "/model.safetensors");
  Write("config.json", Config("llama"));
  Write("model.safetensors.index.json", R"({"weight_map":{"lm_head.weight":"a.safetensors"}})");
  Write("a.safetensors", kPointer);
  EXPECT_THAT(Load(), pointer("a.safetensors"));
  Write("model.safetensors.index.json", kPointer);
  EXPECT_THAT(Load(), pointer("model.safetensors.index.json"));
}

// Each pair: what transformers 4.57 and 5.23 write.
TEST_F(ModelFoldersTest, NumbersThatOnlyPythonWritesDoNotStopALoad) {
  const Tensors head = {{"lm_head.weight", ""}};
  for (const char* value :
       {R"("time_step_limit": [0.0, Infinity])",
        R"("time_step_limit": [0.0, {"__float__": "Infinity"}])", R"("a": -Infinity)",
        R"("a": {"__float__": "-Infinity"})", R"("a": [[NaN]], "b": {"c": NaN})",
        R"("a": {"__float__": "NaN"})", R"("text_config": {"x": Infinity, "y": 1e999})"}) {
    EXPECT_EQ(Load(absl::StrCat("{\n  \"model_type\": \"mamba2\",\n  ", value, "\n}"), head),
              "lm_head.weight")
        << value;
  }
  for (const char* value : {"NaN", "Infinity", R"({"__float__": "-Infinity"})", "1e999"}) {
    EXPECT_THAT(Load(absl::StrCat(R"({"logit_scale": )", value, "}"), head), HasSubstr("scale"))
        << value;
  }
  EXPECT_THAT(Load("{\n  \"a\": [0.0, Infinity],\n  \"b\": Infinite\n}", head),
              HasSubstr("config.json: not a JSON object: syntax error at line 3, column "));
}

}  // namespace
}  // namespace logitd::engine
