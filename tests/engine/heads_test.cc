// Heads on a fake device, from real files. write_heads.py writes the files and shares no code with
// our reader. The expected memory is computed here from the same pattern.
#include "server/engine/heads.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <spdlog/sinks/ostream_sink.h>
#include <spdlog/spdlog.h>
#include <sys/stat.h>

#include <atomic>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "server/engine/metrics.h"
#include "tests/engine/heads_fixture.h"
#include "tests/engine/test_job.h"
#include "tests/tree.h"

namespace logitd::engine {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

TEST_F(HeadsTest, AFileWithTheUsualNamesIsRead) {
  const auto head = Load(Request("named.safetensors"));
  ASSERT_TRUE(head.ok()) << head.status();
  const HeadView& view = (*head)->view();
  EXPECT_EQ(view.weight.dtype, DType::kF32);
  EXPECT_EQ(view.vocab(), 5);
  EXPECT_EQ(view.hidden(), 3);
  EXPECT_EQ(view.weight.row_stride, 4);  // 12 bytes, and 4 to the next border of 16
  EXPECT_EQ(Wrong(view), "");
  ASSERT_NE(view.bias, nullptr);
  for (int i = 0; i < 5; ++i) EXPECT_EQ(view.bias[i], Pattern(i, 0));
  EXPECT_EQ(view.norm, nullptr);
  EXPECT_EQ(view.scale, 1.0f);
  EXPECT_EQ(view.softcap, 0.0f);
  const HeadInfo& info = (*head)->info();
  EXPECT_EQ(info.name, "h");
  EXPECT_EQ(info.path, files_ + "/named.safetensors");
  EXPECT_EQ(info.tensor, "lm_head.weight");
  EXPECT_EQ(info.stored_vocab, 5);
  EXPECT_EQ(info.device_bytes, static_cast<int64_t>(backend_.device_bytes()));
  EXPECT_GE(info.device_bytes, 5 * 16 + 5 * 4);
  EXPECT_LT(absl::AbsDuration(absl::Now() - info.loaded), absl::Minutes(1));
  EXPECT_EQ(backend_.live_slabs(), 0);
}

TEST_F(HeadsTest, AFilesOnlyMatrixIsAHeadWithSettingsFromItsMetadata) {
  const auto head = Load(Request("only.safetensors"));
  ASSERT_TRUE(head.ok()) << head.status();
  const HeadView& view = (*head)->view();
  EXPECT_EQ((*head)->info().tensor, "w");
  EXPECT_EQ(view.weight.dtype, DType::kBF16);
  EXPECT_EQ(view.vocab(), 3);
  EXPECT_EQ((*head)->info().stored_vocab, 4);
  EXPECT_EQ(Wrong(view), "");
  EXPECT_EQ(view.scale, 0.5f);
  EXPECT_EQ(view.softcap, 30.0f);
}

TEST_F(HeadsTest, ABiasIsFoundNextToItsWeight) {
  const auto head = Load(Request("half.safetensors"));
  ASSERT_TRUE(head.ok()) << head.status();
  EXPECT_EQ(Wrong((*head)->view()), "");
  EXPECT_EQ((*head)->view().weight.dtype, DType::kF16);
  ASSERT_NE((*head)->view().bias, nullptr);
  for (int i = 0; i < 4; ++i) EXPECT_EQ((*head)->view().bias[i], Pattern(i, 0));
}

TEST_F(HeadsTest, ATensorWithoutANameIsNotABias) {
  const auto head = Load(Request("nameless.safetensors"));
  ASSERT_TRUE(head.ok()) << head.status();
  EXPECT_EQ((*head)->view().bias, nullptr);
}

TEST_F(HeadsTest, AFoldersPaddedVocabularyIsTrimmedAndItsNormLoaded) {
  const auto head = Load(Request("padded", /*norm=*/true));
  ASSERT_TRUE(head.ok()) << head.status();
  const HeadView& view = (*head)->view();
  EXPECT_EQ(view.vocab(), 6);
  EXPECT_EQ((*head)->info().stored_vocab, 8);
  EXPECT_EQ((*head)->info().tensor, "lm_head.weight");
  EXPECT_EQ(Wrong(view), "");
  ASSERT_NE(view.norm, nullptr);
  for (int i = 0; i < 16; ++i) EXPECT_EQ(view.norm[i], Pattern(i, 0));
  EXPECT_EQ(view.norm_epsilon, 1e-5f);
}

TEST_F(HeadsTest, TheNormIsLoadedOnlyIfItIsRequested) {
  const auto head = Load(Request("padded"));
  ASSERT_TRUE(head.ok()) << head.status();
  EXPECT_EQ((*head)->view().norm, nullptr);
}

TEST_F(HeadsTest, TheRequestsVocabOverridesTheConfigs) {
  const auto head = Load(Request("padded", /*norm=*/false, /*vocab=*/7));
  ASSERT_TRUE(head.ok()) << head.status();
  EXPECT_EQ((*head)->view().vocab(), 7);
  EXPECT_EQ(Wrong((*head)->view()), "");
}

TEST_F(HeadsTest, TiedEmbeddingsOfANestedModelAreAHeadWithANormOfOnePlusWeight) {
  const auto head = Load(Request("tied", /*norm=*/true));
  ASSERT_TRUE(head.ok()) << head.status();
  const HeadView& view = (*head)->view();
  EXPECT_EQ((*head)->info().tensor, "language_model.model.embed_tokens.weight");
  EXPECT_EQ(view.vocab(), 7);  // from text_config, not from the outer config
  EXPECT_EQ(Wrong(view), "");
  EXPECT_EQ(view.softcap, 30.0f);
  for (int i = 0; i < 4; ++i) EXPECT_EQ(view.norm[i], 1.0f + Pattern(i, 0));
}

TEST_F(HeadsTest, EveryKnownScaleIsMultiplied) {
  // 3 (Cohere) x 0.5 (Falcon-H1) / 4 (Granite) x 2 of 8 (MiniCPM)
  const auto head = Load(Request("scales.safetensors"));
  ASSERT_TRUE(head.ok()) << head.status();
  EXPECT_EQ((*head)->view().scale, 0.09375f);
}

TEST_F(HeadsTest, TheModelTypeDecidesWhetherTheNormIsOnePlusWeight) {
  for (const char* type : {"qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe",
                           "qwen3_5_moe_text", "gemma", "gemma2"}) {
    const auto head = Load(Request(absl::StrCat("norm_of_", type), /*norm=*/true));
    ASSERT_TRUE(head.ok()) << head.status();
    for (int i = 0; i < 8; ++i) EXPECT_EQ((*head)->view().norm[i], 1.0f + Pattern(i, 0)) << type;
    ASSERT_TRUE(heads_.Unload("h").ok());
  }
  for (const char* type : {"qwen3", "qwen3_moe", "gemma3n"}) {
    const auto head = Load(Request(absl::StrCat("norm_of_", type), /*norm=*/true));
    ASSERT_TRUE(head.ok()) << head.status();
    for (int i = 0; i < 8; ++i) EXPECT_EQ((*head)->view().norm[i], Pattern(i, 0)) << type;
    ASSERT_TRUE(heads_.Unload("h").ok());
  }
}

TEST_F(HeadsTest, ShardsAreFoundByTheirIndexAndTheBiasIsScaledWithTheLogits) {
  const auto head = Load(Request("sharded"));
  ASSERT_TRUE(head.ok()) << head.status();
  const HeadView& view = (*head)->view();
  EXPECT_EQ((*head)->info().tensor, "lm_head.weight");
  EXPECT_EQ(Wrong(view), "");
  EXPECT_EQ(view.scale, 0.25f);
  for (int i = 0; i < 5; ++i) EXPECT_EQ(view.bias[i], Pattern(i, 0) / 4);
}

TEST_F(HeadsTest, ManyChunksArriveInPlaceAndProgressOnlyRises) {
  std::vector<HeadProgress> seen;
  const auto head = heads_.Load(Request("big.safetensors"), [&](const HeadProgress& progress) {
    seen.push_back(progress);
    return true;
  });
  ASSERT_TRUE(head.ok()) << head.status();
  EXPECT_EQ(Wrong((*head)->view()), "");
  ASSERT_GE(seen.size(), 4u);
  for (size_t i = 0; i < seen.size(); ++i) {
    EXPECT_EQ(seen[i].total_bytes, 13000 * 1001 * 2);
    EXPECT_GT(seen[i].done_bytes, i > 0 ? seen[i - 1].done_bytes : 0);
  }
  EXPECT_EQ(seen.back().done_bytes, seen.back().total_bytes);
}

struct Bad {
  const char* path;
  absl::StatusCode code;
  std::vector<const char*> text;
  bool norm = false;
};

TEST_F(HeadsTest, ABadHeadIsRefusedWithItsReasonAndLeavesNothing) {
  constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
  constexpr auto kMissing = absl::StatusCode::kNotFound;
  for (const Bad& test : {
           Bad{"none.safetensors", kMissing, {"none.safetensors: No such file"}},
           {"no_files", kMissing, {"no_files: the folder has neither model.safetensors nor"}},
           {"cut.safetensors", kInvalid, {"allowed inside the file's"}},
           {"longer.safetensors", kInvalid, {"end of the tensors: got"}},
           {"empty.safetensors", kInvalid, {"shorter than the 8 bytes"}},
           {"huge_header.safetensors", kInvalid, {"header length: got 1099511627776"}},
           {"no_json.safetensors", kInvalid, {"header is not a JSON object"}},
           {"overlapping.safetensors",
            kInvalid,
            {"overlapping.safetensors: tensor 'lm_head.bias'", "got begin 60", "allowed 64"}},
           {"negative.safetensors", kInvalid, {"'lm_head.weight'", "got [-64,64], allowed inside"}},
           {"beyond.safetensors", kInvalid, {"'lm_head.weight'", "allowed inside the file's 64"}},
           {"overflowing.safetensors", kInvalid, {"allowed one with its 64 data bytes"}},
           {"integers.safetensors",
            kInvalid,
            {"dtype of tensor 'lm_head.weight': got 'I32', allowed F32, F16, BF16"}},
           {"unknown_dtype.safetensors", kInvalid, {"got 'F7', allowed F32"}},
           {"cube.safetensors", kInvalid, {"got [4,2,4], allowed [-1,-1]; -1: any size above 0"}},
           {"no_rows.safetensors", kInvalid, {"got [0,8], allowed [-1,-1]"}},
           {"two_matrices.safetensors", kInvalid, {"tensors of 2 dimensions: got 2, allowed 1"}},
           {"long_bias.safetensors",
            kInvalid,
            {"shape of tensor 'lm_head.bias': got [5], allowed [4]"}},
           {"too_wide.safetensors", kInvalid, {"too_wide.safetensors: hidden", "65537"}},
           {"scale_nan.safetensors", kInvalid, {"scale", "nan"}},
           {"scale_word.safetensors", kInvalid, {"logit_scale: got 'much', allowed a number"}},
           {"scaling_0.safetensors", kInvalid, {"logits_scaling: got 0"}},
           {"scale_tiny.safetensors", kInvalid, {"scale of the logits: got 1e-60, allowed 0, or"}},
           {"scale_huge.safetensors", kInvalid, {"scale of the logits: got 1e+60, allowed 0, or"}},
           {"cap_tiny.safetensors",
            kInvalid,
            {"final_logit_softcapping: got 1e-60, allowed 0, or"}},
           {"base_0.safetensors", kInvalid, {"dim_model_base: got 0, allowed"}},
           {"base_and_bias.safetensors", kInvalid, {"dim_model_base: got one and a bias"}},
           {"other_scale.safetensors", kInvalid, {"mup_width_multiplier: got 8, allowed none"}},
           {"other_multiplier",
            kInvalid,
            {"config.json: output_multiplier_scale: got 30, allowed none"}},
           {"no_softcap", kInvalid, {"final_logit_softcapping: got none", "type gemma2"}},
           {"no_scale", kInvalid, {"logit_scale: got none", "type cohere2"}},
           {"mup_and_bias", kInvalid, {"logits_mup_width_multiplier: got one and a bias"}},
           {"tied_encoder_decoder", kInvalid, {"is_encoder_decoder: got true with tied"}},
           {"final_logits_bias", kInvalid, {"tensor 'final_logits_bias': got one"}},
           {"vocab_beyond", kInvalid, {"config.json: vocab_size: got 5, allowed 1 to 4"}},
           {"other_width.safetensors", kInvalid, {"mup_width_scale: got 0.1, allowed none"}},
           {"baichuan2",
            kInvalid,
            {"model_type: got 'baichuan', which normalises the weight of its head", "64000"}},
           {"baichuan_of_unknown_size", kInvalid, {"model_type: got 'baichuan', which normalises"}},
           {"baichuan_m1", kInvalid, {"model_type: got 'baichuan_m1', which normalises"}},
           {"norm_head", kInvalid, {"norm_head: got true, allowed false"}},
           {"vocab_negative", kInvalid, {"vocab_size: got -5, allowed an integer of 1 or more"}},
           {"not_tied", kInvalid, {"tie_word_embeddings: got false, allowed true"}},
           {"no_head", kInvalid, {"no_head: no tensor 'lm_head.weight'"}},
           {"no_config", kMissing, {"no_config/config.json: No such file"}},
           {"config_list", kInvalid, {"config.json: not a JSON object"}},
           {"deep", kInvalid, {"logit_scale: got an array, allowed a number"}},
           {"missing_shard", kMissing, {"b.safetensors: No such file", "the file of tensor"}},
           {"shard_without", kInvalid, {"a.safetensors: no tensor 'lm_head.weight'"}},
           {"leaving", kInvalid, {"tensor 'lm_head.weight': got '../named.safetensors', allowed"}},
           {"absolute", kInvalid, {"got '/etc/passwd', allowed a file in the folder"}},
           {"parent", kInvalid, {"got '..', allowed a file in the folder"}},
           {"index_of_objects", kMissing, {"none.safetensors: No such file"}},
           {"index_of_names", kMissing, {"none.safetensors: No such file"}},
           {"large_index", kInvalid, {"index.json: got 16777217 bytes, allowed up to 16777216"}},
           {"large_config", kInvalid, {"config.json: got 1048577 bytes, allowed up to 1048576"}},
           {"long_header.safetensors",
            kInvalid,
            {"header length: got 16777217, allowed 0..16777216"}},
           {"long_shard", kInvalid, {"got 'aaaaaaa", "allowed a file in the folder"}},
           {"two_lines", kInvalid, {"got 'a\\nb', allowed a file in the folder"}},
           {"long_name.safetensors", kInvalid, {"of 129 bytes, allowed 1 to 128"}},
           {"name_of_two_lines.safetensors",
            kInvalid,
            {"name of the weight: got 'a\\nb'", "printable"}},
           {"name_of_nothing.safetensors", kInvalid, {"name of the weight: got ''"}},
           {"no_map", kInvalid, {"weight_map: got none"}},
           {"no_norm",
            kInvalid,
            {"final norm: got none, allowed one of the tensors model.norm.weight"},
            true},
           {"layer_norm", kInvalid, {"got a LayerNorm with the bias 'model.norm.bias'"}, true},
           {"norm_unknown", kInvalid, {"rms_norm_eps: got none"}, true},
           {"gemma_unknown", kInvalid, {"model_type: got 'gemma9'", "gemma2"}, true},
           {"qwen_unknown", kInvalid, {"model_type: got 'qwen3_5_other'", "qwen3_5_moe"}, true},
           {"long_norm",
            kInvalid,
            {"shape of tensor 'model.norm.weight': got [9], allowed [8]"},
            true},
       }) {
    SCOPED_TRACE(test.path);
    const auto head = Load(Request(test.path, test.norm));
    ASSERT_FALSE(head.ok());
    EXPECT_EQ(head.status().code(), test.code) << head.status();
    for (const char* text : test.text) {
      EXPECT_THAT(std::string(head.status().message()), HasSubstr(text));
    }
    EXPECT_EQ(backend_.device_bytes(), 0u);
    EXPECT_EQ(backend_.live_slabs(), 0);
    EXPECT_TRUE(heads_.List().empty());
  }
}

TEST_F(HeadsTest, WarningsOfALoadAreInItsAnswerAndInTheLog) {
  const auto logged = [&](const std::string& model_type, const std::string& more = "") {
    const std::string folder = absl::StrCat(files_, "/typed");
    std::filesystem::create_directories(folder);
    std::filesystem::copy(files_ + "/named.safetensors", folder + "/model.safetensors",
                          std::filesystem::copy_options::overwrite_existing);
    std::ofstream(folder + "/config.json")
        << absl::StrCat("{\"model_type\": \"", model_type, "\"", more, "}");
    std::ostringstream text;
    const auto usual = spdlog::default_logger();
    spdlog::set_default_logger(std::make_shared<spdlog::logger>(
        "", std::make_shared<spdlog::sinks::ostream_sink_mt>(text)));
    const auto head = Load(Request("typed"));
    spdlog::set_default_logger(usual);
    EXPECT_TRUE(head.ok()) << head.status();
    for (const std::string& warning : (*head)->info().warnings) {
      EXPECT_THAT(text.str(), HasSubstr("head h: " + warning + "\n"));
    }
    EXPECT_TRUE(heads_.Unload("h").ok());
    return absl::StrJoin((*head)->info().warnings, "\n");
  };
  EXPECT_THAT(logged("llama"), Not(HasSubstr("is not known")));
  EXPECT_THAT(logged("bailing", ", \"norm_head\": false"),
              HasSubstr("model_type 'bailing' is not known"));
  EXPECT_THAT(logged("qwen99"), AllOf(HasSubstr("'qwen99' is not known"), HasSubstr("lm_head")));
  std::ofstream(files_ + "/typed/model.safetensors.index.json") << "{}";
  EXPECT_THAT(logged("qwen99"),
              AllOf(HasSubstr("'qwen99' is not known"), HasSubstr("model.safetensors is taken")));
}

TEST_F(HeadsTest, AnInvalidRequestIsRefused) {
  for (const std::string& name : {std::string(), std::string("a b"), std::string("a/b"),
                                  std::string(129, 'a'), std::string("\n")}) {
    HeadRequest request = Request("named.safetensors");
    request.name = name;
    EXPECT_THAT(std::string(Load(request).status().message()),
                AllOf(HasSubstr("name: got "), HasSubstr("allowed 1 to 128")));
  }
  EXPECT_THAT(std::string(Load(Request("padded", false, 9)).status().message()),
              HasSubstr("vocab: got 9, allowed 1 to 8, the rows of tensor 'lm_head.weight'"));
  EXPECT_THAT(std::string(Load(Request("padded", false, -1)).status().message()),
              HasSubstr("vocab: got -1, allowed 1 to 1048576"));
}

TEST_F(HeadsTest, ALoadDoesNotWaitForAPipe) {
  const std::string path = files_ + "/pipe.safetensors";
  ASSERT_EQ(mkfifo(path.c_str(), 0600), 0);
  EXPECT_THAT(std::string(Load(Request("pipe.safetensors")).status().message()),
              HasSubstr("not a regular file"));
}

// With a mapped file the process would end here.
TEST_F(HeadsTest, AFileThatIsCutWhileItIsReadIsAnErrorAndNoSignal) {
  const std::string path = files_ + "/cut_later.safetensors";
  std::filesystem::copy_file(files_ + "/big.safetensors", path);
  const auto head = heads_.Load(Request("cut_later.safetensors"), [&](const HeadProgress&) {
    std::filesystem::resize_file(path, 1 << 20);
    return true;
  });
  EXPECT_EQ(head.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(head.status().message()),
              AllOf(HasSubstr("cut_later.safetensors"), HasSubstr("cut while it was read")));
  EXPECT_EQ(backend_.device_bytes(), 0u);
  EXPECT_EQ(backend_.live_slabs(), 0);
}

TEST_F(HeadsTest, WithoutDeviceMemoryTheLoadedHeadsStay) {
  ASSERT_TRUE(Load(Request("named.safetensors")).ok());
  const size_t before = backend_.device_bytes();
  backend_.LimitDeviceBytes(before + 1000);
  HeadRequest request = Request("big.safetensors");
  request.name = "big";
  const auto head = Load(request);
  EXPECT_EQ(head.status().code(), absl::StatusCode::kResourceExhausted);
  // 13000 rows of 2002 bytes, each to the next border of 16.
  EXPECT_THAT(std::string(head.status().message()),
              AllOf(HasSubstr("head big: needs 26208000 bytes of device memory")));
  EXPECT_EQ(backend_.device_bytes(), before);
  EXPECT_TRUE(heads_.Find("h").ok());
  backend_.LimitDeviceBytes(before + (size_t{27} << 20));
  EXPECT_TRUE(Load(request).ok());
}

TEST_F(HeadsTest, AllHeadsTogetherStayWithinTheirBytes) {
  HeadRequest request = Request("named.safetensors");
  const int64_t bytes = (*Load(request))->info().device_bytes;
  Heads heads(&backend_, &metrics_, /*max_bytes=*/2 * bytes + 1);
  const auto load = [&](const std::string& name) {
    request.name = name;
    return heads.Load(request, Always);
  };
  auto first = load("first");
  ASSERT_TRUE(first.ok()) << first.status();
  ASSERT_TRUE(load("second").ok());
  const absl::Status refused = load("third").status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(refused.message()),
              HasSubstr(absl::StrFormat(
                  "needs %d bytes of device memory, heads hold %d of %d (--max-head-bytes)", bytes,
                  2 * bytes, 2 * bytes + 1)));
  // An unloaded head that is in use still counts.
  ASSERT_TRUE(heads.Unload("first").ok());
  EXPECT_FALSE(load("third").ok());
  first = absl::NotFoundError("");
  EXPECT_TRUE(load("third").ok());
  // A load that fails gives its bytes back.
  ASSERT_TRUE(heads.Unload("third").ok());
  backend_.FailNext(FaultPoint::kWait, absl::UnavailableError("no"));
  EXPECT_FALSE(load("third").ok());
  EXPECT_TRUE(load("third").ok());
}

TEST_F(HeadsTest, WithoutSlabsForTheCopyNothingIsKept) {
  backend_.LimitSlabs(1);
  EXPECT_EQ(Load(Request("named.safetensors")).status().code(),
            absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(backend_.live_slabs(), 0);
  EXPECT_EQ(backend_.device_bytes(), 0u);
}

TEST_F(HeadsTest, ADeviceErrorIsReturnedWithItsCodeAndText) {
  for (const FaultPoint point : {FaultPoint::kUpload, FaultPoint::kWait}) {
    for (const absl::Status& fault :
         {absl::UnavailableError("once"), absl::InternalError("for good")}) {
      backend_.FailNext(point, fault);
      const auto head = Load(Request("big.safetensors"));
      EXPECT_EQ(head.status().code(), fault.code());
      EXPECT_THAT(std::string(head.status().message()), HasSubstr(std::string(fault.message())));
      EXPECT_EQ(backend_.device_bytes(), 0u);
      EXPECT_EQ(backend_.live_slabs(), 0);
    }
  }
  EXPECT_TRUE(Load(Request("big.safetensors")).ok());
}

TEST_F(HeadsTest, ALoadEndsWhenItsCallerCancelsIt) {
  int calls = 0;
  const auto head =
      heads_.Load(Request("big.safetensors"), [&](const HeadProgress&) { return ++calls < 2; });
  EXPECT_EQ(head.status().code(), absl::StatusCode::kCancelled);
  EXPECT_EQ(calls, 2);
  EXPECT_EQ(backend_.device_bytes(), 0u);
  EXPECT_TRUE(Load(Request("named.safetensors")).ok());
}

TEST_F(HeadsTest, ANameIsTakenUntilItIsUnloaded) {
  ASSERT_TRUE(Load(Request("named.safetensors")).ok());
  const auto again = Load(Request("only.safetensors"));
  EXPECT_EQ(again.status().code(), absl::StatusCode::kAlreadyExists);
  EXPECT_THAT(std::string(again.status().message()), HasSubstr("head h is loaded"));
  ASSERT_TRUE(heads_.Unload("h").ok());
  EXPECT_EQ(backend_.device_bytes(), 0u);
  EXPECT_TRUE(Load(Request("only.safetensors")).ok());
}

TEST_F(HeadsTest, AnUnloadedHeadStaysValidForItsUsers) {
  auto head = *Load(Request("named.safetensors"));
  const auto bytes = head->info().device_bytes;
  EXPECT_THAT(Scrape(metrics_), AllOf(HasSubstr("logitd_heads 1\n"),
                                      HasSubstr(absl::StrCat("logitd_head_bytes ", bytes, "\n"))));
  ASSERT_TRUE(heads_.Unload("h").ok());
  EXPECT_EQ(heads_.Find("h").status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(Wrong(head->view()), "");
  EXPECT_THAT(Scrape(metrics_), AllOf(HasSubstr("logitd_heads 0\n"),
                                      HasSubstr(absl::StrCat("logitd_head_bytes ", bytes, "\n"))));
  head = nullptr;
  EXPECT_EQ(backend_.device_bytes(), 0u);
  EXPECT_THAT(Scrape(metrics_), HasSubstr("logitd_head_bytes 0\n"));
}

TEST_F(HeadsTest, AnUnknownNameIsAnsweredWithTheLoadedNames) {
  EXPECT_THAT(std::string(heads_.Find("x").status().message()),
              HasSubstr("no head \"x\"; loaded: none"));
  for (const char* name : {"b", "a"}) {
    HeadRequest request = Request("named.safetensors");
    request.name = name;
    ASSERT_TRUE(Load(request).ok());
  }
  EXPECT_THAT(std::string(heads_.Unload("x").message()), HasSubstr("loaded: a, b"));
  std::vector<std::string> names;
  for (const auto& head : heads_.List()) names.push_back(head->info().name);
  EXPECT_THAT(names, ElementsAre("a", "b"));
}

TEST_F(HeadsTest, AnUnknownNameIsAnsweredInBoundedText) {
  for (int i = 10; i < 22; ++i) {
    HeadRequest request = Request("named.safetensors");
    request.name = absl::StrCat("h", i);
    ASSERT_TRUE(Load(request).ok());
  }
  EXPECT_EQ(heads_.Find(std::string(5000, 'x') + "\n").status(),
            absl::NotFoundError("no head \"" + std::string(128, 'x') +
                                "\"...; loaded: h10, h11, h12, h13, h14, h15, h16, h17, h18, h19 "
                                "and 2 more"));
  EXPECT_THAT(std::string(heads_.Find("a\n").status().message()), HasSubstr("no head \"a\\n\""));
}

TEST_F(HeadsTest, NoFileOfAFolderMayLeaveTheRoot) {
  namespace fs = std::filesystem;
  const std::string root = fs::canonical(files_).string() + "/root";
  const std::string outside = fs::canonical(files_).string() + "/sharded";
  fs::create_directories(root + "/blobs");
  const char* const files[] = {"config.json", "model.safetensors.index.json",
                               "model-00002-of-00002.safetensors"};
  for (const char* file : files) fs::copy_file(outside + "/" + file, root + "/blobs/" + file);
  // All links stay inside, or all except one.
  for (const std::string leaves : {"", files[0], files[1], files[2]}) {
    const std::string folder = absl::StrCat("model", leaves);
    fs::create_directory(root + "/" + folder);
    for (const std::string file : files) {
      fs::create_symlink(file == leaves ? outside + "/" + file : "../blobs/" + file,
                         absl::StrCat(root, "/", folder, "/", file));
    }
    const auto head = heads_.Load(
        {.name = absl::StrCat("h", leaves.substr(0, 8)), .path = folder, .root = root}, Always);
    if (leaves.empty()) {
      ASSERT_TRUE(head.ok()) << head.status();
      EXPECT_EQ((*head)->info().path, "model");
      continue;
    }
    EXPECT_EQ(head.status().code(), absl::StatusCode::kPermissionDenied) << head.status();
    EXPECT_THAT(std::string(head.status().message()),
                AllOf(HasSubstr(folder + "/" + leaves), HasSubstr("--head-root"),
                      ::testing::Not(HasSubstr(root))));
  }
  fs::create_directory(root + "/single");
  fs::copy_file(root + "/blobs/config.json", root + "/single/config.json");
  fs::create_symlink("../../named.safetensors", root + "/single/model.safetensors");
  HeadRequest request{.name = "single", .path = "single", .root = root};
  EXPECT_EQ(Load(request).status().code(), absl::StatusCode::kPermissionDenied);
  // Without a root any path is allowed.
  request = {.name = "single", .path = root + "/single"};
  EXPECT_TRUE(Load(request).ok());
}

TEST_F(HeadsTest, APathThatNoFileCanHaveIsAnInvalidArgument) {
  HeadRequest request{.name = "a", .path = "/" + std::string(300, 'a')};
  EXPECT_EQ(Load(request).status().code(), absl::StatusCode::kInvalidArgument);
  const std::string root = std::filesystem::canonical(files_).string();
  request = {.name = "a", .path = std::string(300, 'a'), .root = root};
  EXPECT_EQ(Load(request).status().code(), absl::StatusCode::kInvalidArgument);
  std::filesystem::create_symlink("loop", root + "/loop");
  request = {.name = "a", .path = "loop", .root = root};
  EXPECT_EQ(Load(request).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(Load(request).status().message()), HasSubstr("head a: loop: Too many"));
}

TEST_F(HeadsTest, OneHeadLoadsAtATimeAndOtherLoadsWait) {
  std::atomic<bool> inside = false;
  std::atomic<bool> go_on = false;
  std::thread first([&] {
    const auto head = heads_.Load(Request("named.safetensors"), [&](const HeadProgress&) {
      inside = true;
      while (!go_on) absl::SleepFor(absl::Milliseconds(1));
      return true;
    });
    EXPECT_TRUE(head.ok()) << head.status();
  });
  for (int ms = 0; ms < 20'000 && !inside; ++ms) absl::SleepFor(absl::Milliseconds(1));
  EXPECT_TRUE(inside);
  EXPECT_THAT(std::string(Load(Request("only.safetensors")).status().message()),
              HasSubstr("head h is being loaded"));
  HeadRequest second = Request("only.safetensors");
  second.name = "second";
  // Waits, is asked whether to go on, and cancels. Its place in the line is free then.
  for (int i = 0; i < 2; ++i) {
    const auto given_up = heads_.Load(second, [](const HeadProgress& progress) {
      EXPECT_EQ(progress.total_bytes, 0);
      return false;
    });
    EXPECT_EQ(given_up.status().code(), absl::StatusCode::kCancelled);
  }
  EXPECT_EQ(heads_.Find("h").status().code(), absl::StatusCode::kNotFound);  // Find does not wait
  go_on = true;
  EXPECT_TRUE(Load(second).ok());
  first.join();
  EXPECT_TRUE(heads_.Find("h").ok());
}

TEST_F(HeadsTest, LoadsUnloadsAndUsersOnManyThreadsSeeNoWrongNumber) {
  constexpr int kRounds = 60;
  const char* const paths[] = {"named.safetensors", "only.safetensors", "half.safetensors"};
  std::atomic<int> loaders = 3;
  std::atomic<int> found = 0;
  std::vector<std::thread> threads;
  for (int t = 0; t < 3; ++t) {
    threads.emplace_back([&, t] {
      HeadRequest request = Request(paths[t]);
      for (int round = 0; round < kRounds; ++round) {
        request.name = absl::StrCat("h", (t + round) % 3);
        const auto head = Load(request);
        if (head.ok()) {
          EXPECT_TRUE(heads_.Unload(request.name).ok());
        } else {
          EXPECT_EQ(head.status().code(), absl::StatusCode::kAlreadyExists);
        }
      }
      --loaders;
    });
  }
  for (int t = 0; t < 2; ++t) {
    threads.emplace_back([&, t] {
      while (loaders > 0) {
        const auto head = heads_.Find(absl::StrCat("h", t));
        if (!head.ok()) continue;
        ++found;
        EXPECT_EQ(Wrong((*head)->view()), "");
        EXPECT_LE(heads_.List().size(), 3u);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_TRUE(heads_.List().empty());
  EXPECT_EQ(backend_.device_bytes(), 0u);
  EXPECT_EQ(backend_.live_slabs(), 0);
  EXPECT_THAT(Scrape(metrics_),
              AllOf(HasSubstr("logitd_heads 0\n"), HasSubstr("logitd_head_bytes 0\n")));
}

TEST_F(HeadsTest, TheDemoModelLoadsAsAHead) {
  HeadRequest request;
  request.name = "demo";
  request.path = logitd::testing::InTree("demo/model").string();
  const auto head = Load(request);
  ASSERT_TRUE(head.ok()) << head.status();
  EXPECT_EQ((*head)->info().tensor, "model.embed_tokens.weight");
  EXPECT_EQ((*head)->view().vocab(), 4096);
  EXPECT_EQ((*head)->view().hidden(), 144);
  EXPECT_NE((*head)->view().bias, nullptr);
}

}  // namespace
}  // namespace logitd::engine
