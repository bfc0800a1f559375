// logitctl score, and what other commands do with heads: tables, files, plots and bad usage.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <png.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <limits>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/client.h"
#include "client/tensor_file.h"
#include "tests/client/scoring_logitd.h"
#include "tests/client/subprocess.h"
#include "tests/client/test_files.h"
#include "tests/client/test_model.h"
#include "tests/client/test_values.h"
#include "tests/tree.h"

namespace logitd {
namespace {

using ::logitd::testing::BytesOf;
using ::logitd::testing::InTree;
using ::logitd::testing::Npy;
using ::logitd::testing::NpyF32;
using ::logitd::testing::Ran;
using ::logitd::testing::RunBinary;
using ::logitd::testing::Safetensors;
using ::logitd::testing::TempDir;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

std::string Ids(const std::vector<int64_t>& ids) {
  return Npy(
      absl::StrCat("{'descr': '<i8', 'fortran_order': False, 'shape': (", ids.size(), ",), }\n"),
      BytesOf(ids));
}

struct Rgb {
  uint8_t red, green, blue;
};
constexpr Rgb kPlotLine = {30, 90, 180};
constexpr Rgb kPlotDots = {190, 205, 230};

// A PNG as another program reads it.
class Picture {
 public:
  explicit Picture(const std::string& path) {
    png_image image = {};
    image.version = PNG_IMAGE_VERSION;
    EXPECT_NE(png_image_begin_read_from_file(&image, path.c_str()), 0) << image.message;
    image.format = PNG_FORMAT_RGB;
    pixels_.resize(PNG_IMAGE_SIZE(image));
    EXPECT_NE(png_image_finish_read(&image, nullptr, pixels_.data(), 0, nullptr), 0)
        << image.message;
    width_ = static_cast<int>(image.width);
  }

  int width() const { return width_; }

  // The pixels of a color in columns [begin, end), from the top.
  struct Found {
    int count = 0;
    double mean_y = 0;
  };
  Found Find(Rgb color, int begin = 0, int end = std::numeric_limits<int>::max()) const {
    Found found;
    for (size_t i = 0; i + 2 < pixels_.size(); i += 3) {
      const int x = static_cast<int>(i / 3) % width_;
      if (x < begin || x >= end || pixels_[i] != color.red || pixels_[i + 1] != color.green ||
          pixels_[i + 2] != color.blue) {
        continue;
      }
      ++found.count;
      found.mean_y += static_cast<int>(i / 3) / width_;
    }
    found.mean_y /= std::max(1, found.count);
    return found;
  }

 private:
  int width_ = 1;
  std::vector<uint8_t> pixels_;
};

class ScoreCliTest : public testing::ScoringLogitd {};

TEST_F(ScoreCliTest, LogitctlScoresFiles) {
  const std::vector<float> logits = {0.0f, 0.69314718f, 1.60943791f, 0, 0, 0};  // 1/8, 2/8, 5/8
  const std::string npy = dir_.Write("a.npy", NpyF32(2, 3, logits));
  const std::string ids = dir_.Write("t.npy", Ids({1, 2}));
  const std::string out = dir_.path("losses.npy");
  const std::string plot = dir_.path("loss.png");
  const nlohmann::json read =
      Json({"score", "--logits", npy, "--targets", ids, "--rank", "--entropy", "--top-logprobs",
            "1", "--out", out, "--plot", plot});
  EXPECT_NEAR(read["losses"][0].get<double>(), std::log(4.0), 1e-5);
  EXPECT_NEAR(read["losses"][1].get<double>(), std::log(3.0), 1e-5);
  EXPECT_EQ(read["ranks"], nlohmann::json({2, 3}));
  EXPECT_EQ(read["top_ids"], nlohmann::json({2, 0}));
  EXPECT_EQ(read["targets"], nlohmann::json({1, 2}));
  EXPECT_NEAR(read["entropies"][1].get<double>(), std::log(3.0), 1e-5);
  EXPECT_NEAR(read["totals"]["perplexity"].get<double>(), std::sqrt(12.0), 1e-4);
  const auto losses = client::LoadTensor(out);
  ASSERT_TRUE(losses.ok()) << losses.status();
  EXPECT_THAT(losses->shape, ElementsAre(2));
  float first = 0;
  std::memcpy(&first, losses->bytes.data(), sizeof(first));
  EXPECT_NEAR(first, std::log(4.0), 1e-5);
  EXPECT_GT(Picture(plot).Find(kPlotLine).count, 0);

  const Ran table = Logitctl({"score", "--logits", npy, "--targets", ids, "--ignore-index", "2"});
  ASSERT_EQ(table.code, 0) << table.err;
  EXPECT_THAT(table.out, AllOf(HasSubstr("2 rows: 1 counted, 1 ignored, 0 faulty"),
                               HasSubstr("perplexity 4\n")));
  const Ran totals = Logitctl({"score", "--logits", npy, "--targets", ids, "--totals"});
  EXPECT_THAT(totals.out, ::testing::StartsWith("2 rows: 2 counted"));
}

// Losses of 800, and of infinity. JSON has no number for an infinity.
TEST_F(ScoreCliTest, LogitctlPrintsAPerplexityBeyondEveryDouble) {
  const std::string ids = dir_.Write("t.npy", Ids({1, 0, 0}));
  const std::string plot = dir_.path("loss.png");
  for (const float low : {-800.0f, -3e38f, -INFINITY}) {
    const std::string npy = dir_.Write("a.npy", NpyF32(3, 2, {0, low, low, 0, low, 0}));
    const nlohmann::json read = Json({"score", "--logits", npy, "--targets", ids});
    EXPECT_EQ(read["totals"]["perplexity"], "Infinity") << low;
    const nlohmann::json mean = read["totals"]["loss_mean"];
    EXPECT_EQ(mean, std::isinf(low) ? nlohmann::json("Infinity") : nlohmann::json(-double{low}));
    const Ran table =
        Logitctl({"score", "--logits", npy, "--targets", ids, "--totals", "--plot", plot});
    ASSERT_EQ(table.code, 0) << table.err;
    EXPECT_THAT(table.out, HasSubstr("perplexity inf\n"));
  }
}

// One row of two logits for each loss; their target is token 0.
struct Losses {
  explicit Losses(const std::vector<double>& losses) {
    for (double loss : losses) {
      logits.push_back(0);
      logits.push_back(static_cast<float>(std::log(std::expm1(loss))));
    }
  }
  std::vector<float> logits;
};

TEST_F(ScoreCliTest, LogitctlPlotsHigherLossesHigher) {
  // Rows of no number and of an infinite loss among them, which leave no mark.
  std::vector<double> losses;
  for (int row = 0; row < 60; ++row) losses.push_back(row < 30 ? 1 : row < 45 ? 4 : 2);
  Losses rows(losses);
  rows.logits[2 * 10] = NAN;
  rows.logits[2 * 50] = -INFINITY;
  const std::string plot = dir_.path("loss.png");
  const Ran ran =
      Logitctl({"score", "--logits", dir_.Write("a.npy", NpyF32(60, 2, rows.logits)), "--targets",
                dir_.Write("t.npy", Ids(std::vector<int64_t>(60, 0))), "--totals", "--plot", plot});
  ASSERT_EQ(ran.code, 0) << ran.err;
  const Picture picture(plot);
  const auto part = [&](double begin, double end) {
    return picture.Find(kPlotLine, static_cast<int>(begin * picture.width()),
                        static_cast<int>(end * picture.width()));
  };
  const Picture::Found low = part(0.1, 0.45);
  const Picture::Found high = part(0.6, 0.7);
  const Picture::Found middle = part(0.85, 0.95);
  EXPECT_GT(low.count, 100);
  EXPECT_GT(high.count, 50);
  EXPECT_GT(middle.count, 50);
  EXPECT_LT(high.mean_y, middle.mean_y);  // rows of pixels count from the top
  EXPECT_LT(middle.mean_y, low.mean_y);
  // In proportion: 1, 2 and 4 above the axis.
  EXPECT_NEAR((low.mean_y - middle.mean_y) * 2, middle.mean_y - high.mean_y, 3);
}

TEST_F(ScoreCliTest, LogitctlPlotsOneLossOrNone) {
  const std::string ids = dir_.Write("t.npy", Ids({0}));
  const std::string plot = dir_.path("loss.png");
  const auto run = [&](const std::vector<float>& logits) {
    const Ran ran = Logitctl({"score", "--logits", dir_.Write("a.npy", NpyF32(1, 2, logits)),
                              "--targets", ids, "--plot", plot});
    EXPECT_EQ(ran.code, 0) << ran.err;
    return Picture(plot).Find(kPlotDots).count;
  };
  EXPECT_GT(run(Losses({2}).logits), 0);
  EXPECT_EQ(run({NAN, 0}), 0);
  EXPECT_EQ(run({-INFINITY, 0}), 0);
}

// A disk that is full by then. The exit code is that of other output that is lost.
TEST_F(ScoreCliTest, LogitctlPrintsItsResultsAlsoWhereAFileCannotBeWritten) {
  const std::string npy = dir_.Write("a.npy", NpyF32(2, 3, {0, 1, 2, 3, 4, 5}));
  const std::string ids = dir_.Write("t.npy", Ids({1, 2}));
  for (const auto& [flag, name] : {std::pair("--out", "full.npy"), {"--plot", "full.png"}}) {
    std::filesystem::create_symlink("/dev/full", dir_.path(name));
    const Ran ran = Logitctl({"score", "--logits", npy, "--targets", ids, flag, dir_.path(name)});
    EXPECT_EQ(ran.code, 1) << flag;
    EXPECT_THAT(ran.err, AllOf(HasSubstr("output was lost: "), HasSubstr(name)));
    EXPECT_THAT(ran.out, HasSubstr("2 rows: 2 counted"));
  }
}

TEST_F(ScoreCliTest, AFailedCallLeavesTheFilesAsTheyWere) {
  const std::string npy = dir_.Write("a.npy", NpyF32(1, 3, {0, 1, 2}));
  const std::string ids = dir_.Write("t.npy", Ids({3}));  // not of this vocabulary
  const std::string old = dir_.Write("old.npy", "precious");
  const std::string fresh = dir_.path("new.png");
  const Ran ran =
      Logitctl({"score", "--logits", npy, "--targets", ids, "--out", old, "--plot", fresh});
  EXPECT_EQ(ran.code, 2) << ran.err;
  std::ifstream in(old);
  EXPECT_EQ((std::string{std::istreambuf_iterator<char>(in), {}}), "precious");
  EXPECT_FALSE(std::filesystem::exists(fresh));
}

TEST_F(ScoreCliTest, AHeadThatDoesNotFitTheModelIsBadUsage) {
  const std::string model = testing::TinyModel().Write(dir_);
  for (const char* command : {"score", "topk", "sample", "generate"}) {
    const Ran ran = Logitctl({command, "--text", "x", "--model", model, "--head", "demo"});
    EXPECT_EQ(ran.code, 2) << command;
    EXPECT_THAT(ran.err, HasSubstr("--head demo is of 4096 tokens by 144; the model of --model has "
                                   "259 by 1"));
  }
}

TEST_F(ScoreCliTest, LogitctlTakesTargetsOfBothWidthsFromBothKindsOfFile) {
  const std::string npy = dir_.Write("a.npy", NpyF32(2, 3, {0, 1, 2, 3, 4, 5}));
  const std::vector<int32_t> narrow = {1, 2};
  const std::string files[] = {
      dir_.Write("narrow.npy", Npy("{'descr': '<i4', 'fortran_order': False, 'shape': (2,), }\n",
                                   BytesOf(narrow))),
      dir_.Write("narrow.safetensors",
                 Safetensors(R"({"t":{"dtype":"I32","shape":[2],"data_offsets":[0,8]}})",
                             BytesOf(narrow))),
      dir_.Write("wide.safetensors",
                 Safetensors(R"({"t":{"dtype":"I64","shape":[2],"data_offsets":[0,16]}})",
                             BytesOf<int64_t>({1, 2})))};
  for (const std::string& file : files) {
    EXPECT_EQ(Json({"score", "--logits", npy, "--targets", file})["targets"],
              nlohmann::json({1, 2}));
  }
}

TEST_F(ScoreCliTest, LogitctlScoresATextThroughTheModelsOwnLogits) {
  const nlohmann::json read = Json(
      {"score", "--text", "It is a truth", "--model", InTree("demo/model"), "--top-logprobs", "1"});
  std::string text;
  for (const auto& token : read["text"]) text += token.get<std::string>();
  EXPECT_EQ(text, "It is a truth");
  EXPECT_EQ(read["top_text"].size(), read["losses"].size());
  EXPECT_GT(read["totals"]["perplexity"].get<double>(), 1);
  EXPECT_LT(read["totals"]["perplexity"].get<double>(), 500);  // of 4096 tokens: it knows English
}

// The state after an "a" is NaN, and so is every one that follows: their top ids are -1.
TEST_F(ScoreCliTest, LogitctlPrintsTheTextOfRowsWithoutTopTokens) {
  testing::TinyModel model;
  model.tensors["model.embed_tokens.weight"].values['a'] = NAN;
  const std::vector<std::string> args = {"score",           "--text",         "xay", "--model",
                                         model.Write(dir_), "--top-logprobs", "2"};
  const Ran table = Logitctl(args);
  ASSERT_EQ(table.code, 0) << table.err;
  EXPECT_THAT(table.out, HasSubstr("3 rows: 2 counted, 0 ignored, 1 faulty"));
  const nlohmann::json read = Json(args);
  EXPECT_EQ(read["status"][2], "ROW_STATUS_NAN_LOGIT");
  EXPECT_EQ(read["text"], nlohmann::json({"x", "a", "y"}));
  EXPECT_EQ(read["top_ids"][4], -1);
  EXPECT_EQ(read["top_ids"][5], -1);
  ASSERT_EQ(read["top_text"].size(), 6u);
  EXPECT_EQ(read["top_text"][4], "");
  EXPECT_EQ(read["top_text"][5], "");
}

// The server's head is the model's own, so that both ways mean the same text.
TEST_F(ScoreCliTest, LogitctlSendsHiddenStatesForAHeadInsteadOfLogits) {
  const std::string model = InTree("demo/model");
  using Args = std::vector<std::string>;
  const Args score = {"score", "--text", "It is a truth universally", "--model", model};
  const Args topk = {"topk", "--text", "It is", "--model", model, "--k", "3"};
  const Args generate = {"generate", "--text", "It is",         "--model", model,
                         "--tokens", "5",      "--temperature", "0"};
  const auto run = [&](Args args, bool head) {
    if (head) args.insert(args.end(), {"--head", "demo"});
    return Json(args);
  };
  const nlohmann::json own = run(score, false);
  const nlohmann::json sent = run(score, true);
  ASSERT_EQ(own["losses"].size(), sent["losses"].size());
  for (size_t i = 0; i < own["losses"].size(); ++i) {
    // The states are rounded to the head's bf16.
    EXPECT_NEAR(own["losses"][i].get<double>(), sent["losses"][i].get<double>(), 0.05);
  }
  EXPECT_EQ(run(topk, false)["indices"], run(topk, true)["indices"]);
  EXPECT_EQ(run(generate, false)["tokens"], run(generate, true)["tokens"]);
  const Args sample = {"sample", "--text",        "It is", "--model",        model, "--seed",
                       "3",      "--temperature", "0",     "--top-logprobs", "2"};
  const nlohmann::json drawn = run(sample, true);
  for (const char* same : {"tokens", "text", "top_ids"}) {
    EXPECT_EQ(drawn[same], run(sample, false)[same]) << same;
  }

  std::vector<std::string> unknown = score;
  unknown.insert(unknown.end(), {"--head", "nobody"});
  const Ran refused = Logitctl(unknown);
  EXPECT_EQ(refused.code, 1);
  EXPECT_THAT(refused.err, AllOf(HasSubstr("NOT_FOUND"), HasSubstr("demo")));
}

TEST_F(ScoreCliTest, LogitctlSamplesFromAFileOfHiddenStates) {
  const std::string states = dir_.Write("states.npy", NpyF32(2, 2, {2, 1, -1, -1}));
  std::vector<std::string> args = {"sample", "--hidden",      states, "--head",
                                   "tiny",   "--temperature", "0"};
  const nlohmann::json read = Json(args);
  EXPECT_EQ(read["tokens"], nlohmann::json({0, 2}));
  EXPECT_NEAR(read["logsumexp"][0].get<double>(),
              std::log(std::exp(2.0) + std::exp(1.0) + std::exp(-3.0)), 1e-5);
  args.insert(args.end(), {"--allow", "1"});  // one of the head's three tokens
  EXPECT_EQ(Json(args)["tokens"], nlohmann::json({1, 1}));

  struct Case {
    std::vector<std::string> more;
    int code;
    const char* error;
  };
  const Case cases[] = {
      {{"--head", "tiny", "--allow", "3"}, 2, "--allow: got token 3, allowed 0..2"},
      {{}, 2, "--head is missing; with --hidden it names a head"},
      {{"--head", "nobody"}, 1, "NOT_FOUND"},
      {{"--head", "demo"}, 2, "INVALID_ARGUMENT: dtype: got f32, allowed bf16"},
      {{"--head", "tiny", "--text", "x"}, 2, "--hidden"},
  };
  for (const Case& test : cases) {
    args = {"sample", "--hidden", states};
    args.insert(args.end(), test.more.begin(), test.more.end());
    const Ran ran = Logitctl(args);
    EXPECT_EQ(ran.code, test.code) << test.error;
    EXPECT_THAT(ran.err, HasSubstr(test.error));
  }
}

TEST_F(ScoreCliTest, ALongSequenceOfHiddenStatesIsOneOfTheHead) {
  // 3000 states of 144 zeros: their logits are the head's bias, whatever the row.
  const std::string states(size_t{3000} * 144 * 2, '\0');
  client::ScoreRequest request = {.dtype = v1::DTYPE_BF16,
                                  .rows = 3000,
                                  .head = "demo",
                                  .hidden_size = 144,
                                  .hidden = {states}};
  for (int row = 0; row < 3000; ++row) request.params.add_targets(281);
  const auto result = ConnectWith(200000)->ScoreStream(request);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->messages, 5);
  EXPECT_THAT(result->answer.losses(), ::testing::Each(result->answer.losses(0)));
  EXPECT_NEAR(result->answer.totals().loss_mean(), result->answer.losses(0), 1e-9);
}

TEST(ScoreUsageTest, BadUsageIs2AndSaysWhy) {
  TempDir dir;
  const std::string npy = dir.Write("a.npy", NpyF32(2, 3, {0, 1, 2, 3, 4, 5}));
  const std::string ids = dir.Write("t.npy", Ids({1, 2}));
  const std::string model = testing::TinyModel().Write(dir);
  struct Case {
    std::vector<std::string> args;
    const char* error;
  };
  const Case cases[] = {
      {{"score"}, "[--logits,--hidden,--text,--text-file]: got none of these, allowed exactly 1"},
      {{"score", "--logits", npy}, "--targets is missing"},
      {{"score", "--hidden", npy, "--targets", ids}, "--head is missing"},
      {{"score", "--logits", npy, "--targets", ids, "--head", "h"}, "--head next to --logits"},
      {{"score", "--text", "x", "--targets", ids}, "--targets next to a text"},
      {{"score", "--logits", npy, "--targets", npy}, "dtype '<f4'; allowed: <i4, <i8"},
      {{"score", "--logits", ids, "--targets", ids}, "dtype '<i8'; allowed: <f4, <f2"},
      {{"score", "--logits", npy, "--targets", dir.Write("s.npy", Ids({1}))},
       "s.npy: got 1 values, allowed 2 (rows)"},
      {{"score", "--logits", npy, "--targets", dir.Write("w.npy", Ids({1, int64_t{1} << 40}))},
       "w.npy: got 1099511627776 at place 1, allowed numbers of 32 bits"},
      {{"score", "--text-file", dir.path("none")}, "none cannot be read, or is empty"},
      {{"score", "--text-file", dir.path("")}, "cannot be read, or is empty"},
      {{"score", "--text-file", dir.Write("long.txt", std::string(1100000, 'x')), "--model", model},
       "text: got 1100000 tokens, allowed 1..1036430, because all their logits are kept"},
      {{"score", "--logits", npy, "--targets", ids, "--smoothing", "x"}, "--smoothing"},
      {{"score", "--logits", npy, "--targets", ids, "--out", "x.txt"}, "x.txt"},
      {{"score", "--logits", npy, "--targets", ids, "--out", dir.path("none/x.npy")},
       "none/x.npy (No such file or directory), allowed a file that can be written"},
      {{"score", "--logits", npy, "--targets", ids, "--plot", dir.path("none/x.png")},
       "none/x.png (No such file or directory), allowed a file that can be written"},
      {{"score", "--logits", npy, "--targets", ids, "--plot", dir.path("")},
       " (Is a directory), allowed a file that can be written"},
      {{"topk", "--logits", npy, "--head", "h"}, "--logits"},
      {{"sample", "--logits", npy, "--head", "h"}, "--logits"},
  };
  for (const Case& test : cases) {
    const Ran ran = RunBinary("logitctl", test.args);
    EXPECT_EQ(ran.code, 2) << test.error;
    EXPECT_THAT(ran.err, HasSubstr(test.error));
    EXPECT_THAT(ran.out, IsEmpty());
  }
}

}  // namespace
}  // namespace logitd
