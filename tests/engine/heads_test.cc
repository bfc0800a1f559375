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
#include <future>
#include <memory>
#include <nlohmann/json.hpp>
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
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

struct Good {
  const char* claim;
  const char* path;
  bool norm;
  const char* tensor;
  DType dtype;
  int64_t vocab;
  int64_t stored_vocab;
  float bias = 0;         // a factor of what is stored; 0: there is none
  float norm_offset = 0;  // added to what is stored, if `norm`
  float scale = 1;
  float softcap = 0;
};
constexpr auto kF32 = DType::kF32;
constexpr auto kF16 = DType::kF16;
constexpr auto kBF16 = DType::kBF16;
constexpr char kHead[] = "lm_head.weight";

TEST_F(HeadsTest, AGoodHeadIsReadWithItsSettings) {
  for (const Good& test : {
           Good{"usual_names", "named.safetensors", false, kHead, kF32, 5, 5, 1},
           {"only_matrix_and_metadata", "only.safetensors", false, "w", kBF16, 3, 4, 0, 0, 0.5, 30},
           {"bias_next_to_its_weight", "half.safetensors", false, "head.weight", kF16, 4, 4, 1},
           {"tensor_without_a_name_is_no_bias", "nameless.safetensors", false, "w", kF16, 4, 4},
           {"padded_vocab_is_trimmed", "padded", true, kHead, kBF16, 6, 8},
           {"norm_only_if_requested", "padded", false, kHead, kBF16, 6, 8},
           {"nested_settings_win_and_gemmas_norm_is_one_plus_weight", "tied", true,
            "language_model.model.embed_tokens.weight", kBF16, 7, 7, 0, 1, 1, 30},
           // 3 (Cohere) x 0.5 (Falcon-H1) / 4 (Granite) x 2 of 8 (MiniCPM)
           {"all_scales_multiply", "scales.safetensors", false, "w", kF16, 4, 4, 0, 0, 0.09375},
           {"shards_by_index_and_bias_scaled_as_logits", "sharded", false, kHead, kF32, 5, 5, 0.25,
            0, 0.25},
       }) {
    SCOPED_TRACE(test.claim);
    const std::shared_ptr<const Head> head = Load(Request(test.path, test.norm)).value();
    const HeadView& view = head->view();
    EXPECT_EQ(head->info().tensor, test.tensor);
    EXPECT_EQ(view.weight.dtype, test.dtype);
    EXPECT_EQ(view.vocab(), test.vocab);
    EXPECT_EQ(head->info().stored_vocab, test.stored_vocab);
    EXPECT_EQ(Wrong(view), "");
    EXPECT_EQ(view.bias != nullptr, test.bias != 0);
    for (int i = 0; i < test.vocab && test.bias != 0; ++i) {
      EXPECT_EQ(view.bias[i], Pattern(i, 0) * test.bias);
    }
    EXPECT_EQ(view.norm != nullptr, test.norm);
    for (int i = 0; i < view.hidden() && test.norm; ++i) {
      EXPECT_EQ(view.norm[i], test.norm_offset + Pattern(i, 0));
    }
    EXPECT_EQ(view.scale, test.scale);
    EXPECT_EQ(view.softcap, test.softcap);
    EXPECT_TRUE(heads_.Unload("h").ok());
  }
}

TEST_F(HeadsTest, AHeadSaysWhatItIs) {
  const std::shared_ptr<const Head> head = Load(Request("named.safetensors")).value();
  EXPECT_EQ(head->view().hidden(), 3);
  EXPECT_EQ(head->view().weight.row_stride, 4);  // 12 bytes, and 4 to the next border of 16
  const HeadInfo& info = head->info();
  EXPECT_EQ(info.name, "h");
  EXPECT_EQ(info.path, files_ + "/named.safetensors");
  EXPECT_EQ(info.device_bytes, static_cast<int64_t>(backend_.device_bytes()));
  EXPECT_GE(info.device_bytes, 5 * 16 + 5 * 4);
  EXPECT_LT(absl::AbsDuration(absl::Now() - info.loaded), absl::Minutes(1));
  const std::shared_ptr<const Head> normed =
      heads_.Load(Named("normed", "padded", true), Always).value();
  EXPECT_EQ(normed->view().norm_epsilon, 1e-5f);
}

TEST_F(HeadsTest, TheRequestsVocabOverridesTheConfigs) {
  const auto head = Load(Request("padded", /*norm=*/false, /*vocab=*/7)).value();
  EXPECT_EQ(head->view().vocab(), 7);
  EXPECT_EQ(Wrong(head->view()), "");
}

TEST_F(HeadsTest, TheModelTypeDecidesWhetherTheNormIsOnePlusWeight) {
  for (const std::string type :
       {"qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "gemma",
        "gemma2", "qwen3", "qwen3_moe", "gemma3n"}) {
    const bool plain = type == "qwen3" || type == "qwen3_moe" || type == "gemma3n";
    const auto head = Load(Request("norm_of_" + type, /*norm=*/true)).value();
    for (int i = 0; i < 8; ++i) {
      EXPECT_EQ(head->view().norm[i], (plain ? 0.0f : 1.0f) + Pattern(i, 0)) << type;
    }
    ASSERT_TRUE(heads_.Unload("h").ok());
  }
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

// refused.json is by write_heads.py too.
TEST_F(HeadsTest, ABadHeadIsRefusedWithItsReasonAndLeavesNothing) {
  const auto said = nlohmann::json::parse(std::ifstream(files_ + "/refused.json"));
  EXPECT_GE(said.size(), 68u);
  for (const auto& test : said) {
    const auto path = test["path"].get<std::string>();
    SCOPED_TRACE(path);
    const absl::Status status = Load(Request(path, test["norm"])).status();
    EXPECT_EQ(status.code(),
              test["missing"] ? absl::StatusCode::kNotFound : absl::StatusCode::kInvalidArgument);
    for (const auto& text : test["texts"]) {
      EXPECT_THAT(std::string(status.message()), HasSubstr(text.get<std::string>()));
    }
    EXPECT_EQ(backend_.device_bytes(), 0u);
    EXPECT_TRUE(heads_.List().empty());
  }
}

TEST_F(HeadsTest, WarningsOfALoadAreInItsAnswerAndInTheLog) {
  const std::string folder = files_ + "/typed";
  std::filesystem::create_directory(folder);
  std::filesystem::copy(files_ + "/named.safetensors", folder + "/model.safetensors");
  const auto logged = [&](const std::string& model_type) {
    std::ofstream(folder + "/config.json")
        << absl::StrCat("{\"model_type\": \"", model_type, "\", \"norm_head\": false}");
    std::ostringstream text;
    const auto usual = spdlog::default_logger();
    spdlog::set_default_logger(std::make_shared<spdlog::logger>(
        "", std::make_shared<spdlog::sinks::ostream_sink_mt>(text)));
    const auto head = Load(Request("typed"));
    spdlog::set_default_logger(usual);
    const std::vector<std::string> warnings = head.value()->info().warnings;
    for (const std::string& warning : warnings) {
      EXPECT_THAT(text.str(), HasSubstr("head h: " + warning + "\n"));
    }
    EXPECT_TRUE(heads_.Unload("h").ok());
    return absl::StrJoin(warnings, "\n");
  };
  EXPECT_THAT(logged("llama"), Not(HasSubstr("is not known")));
  EXPECT_THAT(logged("bailing"), HasSubstr("model_type 'bailing' is not known"));
  EXPECT_THAT(logged("qwen99"), AllOf(HasSubstr("'qwen99' is not known"), HasSubstr("lm_head")));
  std::ofstream(files_ + "/typed/model.safetensors.index.json") << "{}";
  EXPECT_THAT(logged("qwen99"),
              AllOf(HasSubstr("'qwen99' is not known"), HasSubstr("model.safetensors is taken")));
}

TEST_F(HeadsTest, AnInvalidRequestIsRefused) {
  for (const std::string& name : {std::string(), std::string("a b"), std::string("a/b"),
                                  std::string(129, 'a'), std::string("\n")}) {
    EXPECT_THAT(ErrorOf(Named(name, "named.safetensors")),
                AllOf(HasSubstr("name: got "), HasSubstr("allowed 1 to 128")));
  }
  EXPECT_THAT(ErrorOf(Request("padded", false, 9)),
              HasSubstr("vocab: got 9, allowed 1 to 8, the rows of tensor 'lm_head.weight'"));
  EXPECT_THAT(ErrorOf(Request("padded", false, -1)),
              HasSubstr("vocab: got -1, allowed 1 to 1048576"));
}

TEST_F(HeadsTest, ALoadDoesNotWaitForAPipe) {
  const std::string path = files_ + "/pipe.safetensors";
  ASSERT_EQ(mkfifo(path.c_str(), 0600), 0);
  EXPECT_THAT(ErrorOf(Request("pipe.safetensors")), HasSubstr("not a regular file"));
}

// With a mapped file the process would end here.
TEST_F(HeadsTest, AFileThatIsCutWhileItIsReadIsAnErrorAndNoSignal) {
  const std::string path = files_ + "/cut_later.safetensors";
  std::filesystem::copy_file(files_ + "/big.safetensors", path);
  const auto head = heads_.Load(Request("cut_later.safetensors"), [&](const HeadProgress&) {
    std::filesystem::resize_file(path, 1 << 20);
    return true;
  });
  EXPECT_THAT(head.status().ToString(),
              AllOf(StartsWith("UNAVAILABLE: "), HasSubstr("cut_later.safetensors"),
                    HasSubstr("cut while it was read")));
  EXPECT_EQ(backend_.device_bytes(), 0u);
}

TEST_F(HeadsTest, WithoutDeviceMemoryTheLoadedHeadsStay) {
  ASSERT_TRUE(Load(Request("named.safetensors")).ok());
  const size_t before = backend_.device_bytes();
  backend_.LimitDeviceBytes(before + 1000);
  const HeadRequest request = Named("big", "big.safetensors");
  // 13000 rows of 2002 bytes, each to the next border of 16.
  EXPECT_THAT(ErrorOf(request),
              StartsWith("RESOURCE_EXHAUSTED: head big: needs 26208000 bytes of device memory"));
  EXPECT_EQ(backend_.device_bytes(), before);
  EXPECT_TRUE(heads_.Find("h").ok());
  backend_.LimitDeviceBytes(before + (size_t{27} << 20));
  EXPECT_TRUE(Load(request).ok());
}

TEST_F(HeadsTest, AllHeadsTogetherStayWithinTheirBytes) {
  const int64_t bytes = Load(Request("named.safetensors")).value()->info().device_bytes;
  Heads heads(&backend_, &metrics_, /*max_bytes=*/2 * bytes + 1);
  const auto load = [&](const std::string& name) {
    return heads.Load(Named(name, "named.safetensors"), Always);
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
  EXPECT_THAT(ErrorOf(Request("named.safetensors")), StartsWith("RESOURCE_EXHAUSTED: "));
  EXPECT_EQ(backend_.device_bytes(), 0u);
}

TEST_F(HeadsTest, ADeviceErrorIsReturnedWithItsCodeAndText) {
  for (const FaultPoint point : {FaultPoint::kUpload, FaultPoint::kWait}) {
    for (const absl::Status& fault :
         {absl::UnavailableError("once"), absl::InternalError("for good")}) {
      backend_.FailNext(point, fault);
      const absl::Status status = Load(Request("big.safetensors")).status();
      EXPECT_EQ(status.code(), fault.code());
      EXPECT_THAT(status.ToString(), HasSubstr(std::string(fault.message())));
      EXPECT_EQ(backend_.device_bytes(), 0u);
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
  EXPECT_THAT(ErrorOf(Request("only.safetensors")),
              StartsWith("ALREADY_EXISTS: head h is loaded, allowed another name"));
  ASSERT_TRUE(heads_.Unload("h").ok());
  EXPECT_EQ(backend_.device_bytes(), 0u);
  EXPECT_TRUE(Load(Request("only.safetensors")).ok());
}

TEST_F(HeadsTest, AVersionNeverMeansTwoHeadsOfAName) {
  const auto version = [&](const std::string& name) {
    return heads_.Load(Named(name, "named.safetensors"), Always).value()->info().version;
  };
  EXPECT_EQ(version("a"), 1);
  EXPECT_EQ(version("b"), 1);
  ASSERT_TRUE(heads_.Unload("a").ok());
  EXPECT_FALSE(heads_.Load(Named("a", "none"), Always).ok());  // takes no version
  EXPECT_EQ(version("a"), 2);
  // So many names are unloaded that the version of "a" is forgotten.
  ASSERT_TRUE(heads_.Unload("a").ok());
  for (int i = 0; i < 5000; ++i) {
    const std::string name = absl::StrCat("n", i);
    ASSERT_LE(version(name), 3);
    ASSERT_TRUE(heads_.Unload(name).ok());
  }
  EXPECT_EQ(version("a"), 3);
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

TEST_F(HeadsTest, AnUnknownNameIsAnsweredWithTheLoadedNamesInBoundedText) {
  EXPECT_EQ(heads_.Find("a\n").status(), absl::NotFoundError("no head \"a\\n\"; loaded: none"));
  for (int i = 21; i >= 10; --i) {
    ASSERT_TRUE(Load(Named(absl::StrCat("h", i), "named.safetensors")).ok());
  }
  const std::string listed =
      "; loaded: h10, h11, h12, h13, h14, h15, h16, h17, h18, h19 and 2 more";
  EXPECT_EQ(heads_.Unload("x"), absl::NotFoundError("no head \"x\"" + listed));
  EXPECT_EQ(heads_.Find(std::string(5000, 'x') + "\n").status(),
            absl::NotFoundError("no head \"" + std::string(128, 'x') + "\"..." + listed));
  ASSERT_EQ(heads_.List().size(), 12u);
  for (size_t i = 0; i < 12; ++i) {
    EXPECT_EQ(heads_.List()[i]->info().name, absl::StrCat("h", 10 + i));
  }
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
    const HeadRequest request = {.name = "h", .path = folder, .root = root};
    if (leaves.empty()) {
      EXPECT_EQ(Load(request).value()->info().path, "model");
      ASSERT_TRUE(heads_.Unload("h").ok());
      continue;
    }
    EXPECT_THAT(ErrorOf(request),
                AllOf(StartsWith("PERMISSION_DENIED: "), HasSubstr(folder + "/" + leaves),
                      HasSubstr("--head-root"), Not(HasSubstr(root))));
  }
  fs::create_directory(root + "/single");
  fs::copy_file(root + "/blobs/config.json", root + "/single/config.json");
  fs::create_symlink("../../named.safetensors", root + "/single/model.safetensors");
  HeadRequest request{.name = "single", .path = "single", .root = root};
  EXPECT_THAT(ErrorOf(request), StartsWith("PERMISSION_DENIED: "));
  // Without a root any path is allowed.
  request = {.name = "single", .path = root + "/single"};
  EXPECT_TRUE(Load(request).ok());
}

TEST_F(HeadsTest, APathThatNoFileCanHaveIsAnInvalidArgument) {
  const std::string root = std::filesystem::canonical(files_).string();
  std::filesystem::create_symlink("loop", root + "/loop");
  for (const HeadRequest& request : {HeadRequest{.name = "a", .path = "/" + std::string(300, 'a')},
                                     {.name = "a", .path = std::string(300, 'a'), .root = root},
                                     {.name = "a", .path = "loop", .root = root}}) {
    EXPECT_THAT(ErrorOf(request), StartsWith("INVALID_ARGUMENT: head a: " + request.path + ": "));
  }
}

TEST_F(HeadsTest, OneHeadLoadsAtATimeAndOtherLoadsWait) {
  std::promise<void> inside;
  std::promise<void> go_on;
  std::thread first([&] {
    int reports = 0;
    const auto head = heads_.Load(Request("named.safetensors"), [&](const HeadProgress&) {
      if (reports++ == 0) {
        inside.set_value();
        go_on.get_future().wait();
      }
      return true;
    });
    EXPECT_TRUE(head.ok()) << head.status();
  });
  inside.get_future().wait();
  EXPECT_THAT(ErrorOf(Request("only.safetensors")), HasSubstr("head h is being loaded"));
  const HeadRequest second = Named("second", "only.safetensors");
  // Waits, is asked whether to go on, and cancels. Its place in the line is free then.
  for (int i = 0; i < 2; ++i) {
    const auto given_up = heads_.Load(second, [](const HeadProgress& progress) {
      EXPECT_EQ(progress.total_bytes, 0);
      return false;
    });
    EXPECT_EQ(given_up.status().code(), absl::StatusCode::kCancelled);
  }
  EXPECT_EQ(heads_.Find("h").status().code(), absl::StatusCode::kNotFound);  // Find does not wait
  go_on.set_value();
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
      for (int round = 0; round < kRounds; ++round) {
        const std::string name = absl::StrCat("h", (t + round) % 3);
        const auto head = Load(Named(name, paths[t]));
        if (head.ok()) {
          EXPECT_TRUE(heads_.Unload(name).ok());
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
  EXPECT_THAT(Scrape(metrics_),
              AllOf(HasSubstr("logitd_heads 0\n"), HasSubstr("logitd_head_bytes 0\n")));
}

TEST_F(HeadsTest, TheDemoModelLoadsAsAHead) {
  const auto path = logitd::testing::InTree("demo/model").string();
  const auto head = Load({.name = "demo", .path = path}).value();
  EXPECT_EQ(head->info().tensor, "model.embed_tokens.weight");
  EXPECT_EQ(head->view().vocab(), 4096);
  EXPECT_EQ(head->view().hidden(), 144);
  EXPECT_NE(head->view().bias, nullptr);
}

}  // namespace
}  // namespace logitd::engine
