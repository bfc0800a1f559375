// load_bench against the real server: mixes of calls, open loops by connection, and the sweep that
// scripts/plot_load draws.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/client/scoring_logitd.h"
#include "tests/client/subprocess.h"
#include "tests/tree.h"

namespace logitd::testing {
namespace {

using ::testing::HasSubstr;

class LoadMixTest : public ScoringLogitd {
 protected:
  Ran LoadBench(std::vector<std::string> args) const {
    args.insert(args.end(), {"--addr", address_, "--vocab", "50", "--k", "3", "--warmup", "0",
                             "--json", dir_.path("report.json")});
    return RunBinary("load_bench", args);
  }
  nlohmann::json Report() const {
    return nlohmann::json::parse(std::ifstream(dir_.path("report.json")));
  }
};

TEST_F(LoadMixTest, EveryKindOfCallIsSentByItsWeight) {
  const Ran ran =
      LoadBench({"--mix", "topk=4,sample=2,score,hidden_topk,hidden_sample,hidden_score", "--head",
                 "tiny", "--rows", "2", "--connections", "2", "--duration", "2"});
  ASSERT_EQ(ran.code, 0) << ran.err;
  const nlohmann::json result = Report()["results"][0];
  EXPECT_TRUE(result["errors"].empty()) << result["errors"];
  const nlohmann::json& mix = result["mix"];
  ASSERT_EQ(mix.size(), 6u);
  const double all = result["answers"];
  ASSERT_GT(all, 200);
  double sum = 0;
  for (const auto& [name, part] : mix.items()) {
    const double answers = part["answers"];
    const double expected = all * part["weight"].get<double>() / 10;
    EXPECT_NEAR(answers, expected, 5 * std::sqrt(expected) + 1) << name;
    EXPECT_GT(part["latency_ns"]["p50"], 0) << name;
    sum += answers;
  }
  EXPECT_EQ(sum, all);
  EXPECT_EQ(mix["topk"]["payload_bytes"], 2 * 50 * 4);
  EXPECT_EQ(mix["hidden_sample"]["payload_bytes"], 2 * 2 * 4);  // the head's two elements
  EXPECT_EQ(result["payload_bytes"], 285);                      // (7 * 400 + 3 * 16) / 10
  // The server's own count.
  const Ran info = Logitctl({"load", "--format", "json"});
  ASSERT_EQ(info.code, 0) << info.err;
  const nlohmann::json load = nlohmann::json::parse(info.out);
  EXPECT_EQ(load["ops"].size(), 6u);
  EXPECT_GT(load["busy"], 0);
  EXPECT_THAT(Logitctl({"load"}).out, HasSubstr("linear_cross_entropy"));
}

TEST_F(LoadMixTest, SamplesGoThroughStreams) {
  const Ran ran =
      LoadBench({"--mix", "sample,hidden_sample", "--head", "tiny", "--stream", "--rows", "2",
                 "--connections", "2", "--in-flight", "3", "--duration", "1"});
  ASSERT_EQ(ran.code, 0) << ran.err;
  const nlohmann::json result = Report()["results"][0];
  EXPECT_TRUE(result["errors"].empty()) << result["errors"];
  EXPECT_TRUE(result["stream"]);
  EXPECT_GT(result["answers"], 200);
  EXPECT_GT(result["mix"]["hidden_sample"]["answers"], 50);
  EXPECT_GT(result["latency_ns"]["p50"], 0);
  EXPECT_THAT(LoadBench({"--mix", "sample,topk", "--stream"}).err,
              HasSubstr("topk: a stream takes sample and hidden_sample only"));
  EXPECT_THAT(LoadBench({"--mix", "sample", "--stream", "--rate", "10"}).err,
              HasSubstr("a stream needs a closed loop"));
}

TEST_F(LoadMixTest, AnOpenLoopKeepsItsRateWithAMix) {
  const Ran ran = LoadBench({"--mix", "topk,score", "--rows", "1", "--connections", "3", "--rate",
                             "300", "--duration", "2"});
  ASSERT_EQ(ran.code, 0) << ran.err;
  const nlohmann::json result = Report()["results"][0];
  EXPECT_TRUE(result["errors"].empty()) << result["errors"];
  EXPECT_NEAR(result["answers"].get<double>(), 600, 150);  // Poisson: a deviation of 25
  EXPECT_GE(result["sent_late_ns"]["p50"], 0);
  EXPECT_LE(result["sent_late_ns"]["p50"], result["latency_ns"]["p50"]);
}

TEST_F(LoadMixTest, WrongMixesAreRefusedWithWhatIsAllowed) {
  for (const char* mix : {"topk=0", "topk=-1", "topk=x", "topk=inf", "verify", "", "topk,topk",
                          "topk=1=2", "topk,,score"}) {
    const Ran ran = LoadBench({"--mix", mix});
    EXPECT_EQ(ran.code, 2) << mix;
    EXPECT_THAT(ran.err, HasSubstr(absl::StrCat("got \"", mix, "\", allowed NAME=WEIGHT"))) << mix;
  }
  EXPECT_THAT(LoadBench({"--mix", "hidden_topk"}).err, HasSubstr("--head: allowed with a hidden_"));
  EXPECT_EQ(LoadBench({"--head", "tiny"}).code, 2);
  const Ran missing = LoadBench({"--mix", "hidden_topk", "--head", "none"});
  EXPECT_EQ(missing.code, 1);
  EXPECT_THAT(missing.err, HasSubstr("NOT_FOUND"));
}

TEST_F(LoadMixTest, ASweepOffersSharesOfThePeakAndCanBeDrawn) {
  const Ran ran = LoadBench({"--preset", "sweep", "--mix", "topk,sample", "--connections", "2",
                             "--duration", "0.3", "--deadline", "0.2"});
  ASSERT_EQ(ran.code, 0) << ran.err;
  const nlohmann::json results = Report()["results"];
  ASSERT_EQ(results.size(), 25u);  // three peaks, eleven shares and the best peak after each
  int best = 0;
  std::vector<double> peaks = {0};
  for (size_t i = 0; i < 3; ++i) {
    const double in_time = results[i]["goodput_per_s"];
    EXPECT_EQ(results[i]["mode"], "closed");
    if (in_time > peaks[0]) best = results[i]["in_flight"];
    peaks[0] = std::max(peaks[0], in_time);
  }
  EXPECT_DOUBLE_EQ(results[3]["offered_per_s"], 0.1 * peaks[0]);
  for (size_t i = 4; i < results.size(); i += 2) {
    EXPECT_EQ(results[i]["in_flight"], best) << i;
    peaks.push_back(results[i]["goodput_per_s"]);
  }
  std::vector<double> sorted = peaks;
  std::sort(sorted.begin(), sorted.end());
  const double peak = (sorted[5] + sorted[6]) / 2;
  for (size_t i = 3; i < results.size(); i += 2) {
    EXPECT_EQ(results[i]["mode"], "open");
    EXPECT_DOUBLE_EQ(results[i]["peak_per_s"], peak);
    // A share compares an offer with the closed loops just before and after it.
    const double beside = (peaks[(i - 3) / 2] + peaks[(i - 1) / 2]) / 2;
    EXPECT_DOUBLE_EQ(results[i]["peak_beside_per_s"], beside);
    EXPECT_DOUBLE_EQ(results[i]["goodput_share_of_peak"],
                     results[i]["goodput_per_s"].get<double>() / beside);
  }
  EXPECT_EQ(results[3]["peaks_per_s"].size(), 12u);
  ASSERT_EQ(Report()["shares"].size(), 11u);
  EXPECT_EQ(Report()["shares"][0]["name"], "sweep_x0.1");
  EXPECT_DOUBLE_EQ(Report()["shares"][0]["median"], results[3]["goodput_share_of_peak"]);

  const std::string picture = dir_.path("load.png");
  const std::string command =
      absl::StrCat("/usr/bin/python3 ", InTree("scripts/plot_load").string(), " ",
                   dir_.path("report.json"), " --out ", picture, " 2> ", dir_.path("errors"));
  const int code = std::system(command.c_str());
  std::ifstream errors(dir_.path("errors"));
  const std::string text((std::istreambuf_iterator<char>(errors)), {});
  if (code != 0 && text.find("install with") != std::string::npos) GTEST_SKIP() << text;
  ASSERT_EQ(code, 0) << text;
  EXPECT_GT(std::filesystem::file_size(picture), 10'000u);
}

TEST_F(LoadMixTest, TurnsMakeTheSameOffersAgainInTheOtherOrder) {
  const Ran ran = LoadBench({"--preset", "sweep", "--turns", "2", "--connections", "2",
                             "--duration", "0.1", "--deadline", "0.2"});
  ASSERT_EQ(ran.code, 0) << ran.err;
  const nlohmann::json report = Report();
  const nlohmann::json& results = report["results"];
  ASSERT_EQ(results.size(), 47u);
  for (size_t i = 0; i < 11; ++i) {
    const nlohmann::json& first = results[3 + 2 * i];
    const nlohmann::json& again = results[results.size() - 2 - 2 * i];
    EXPECT_EQ(first["name"], again["name"]) << i;
    const nlohmann::json& shares = report["shares"][i];
    EXPECT_EQ(shares["name"], first["name"]);
    EXPECT_EQ(shares["turns"],
              nlohmann::json({first["goodput_share_of_peak"], again["goodput_share_of_peak"]}));
    EXPECT_DOUBLE_EQ(shares["median"],
                     (shares["turns"][0].get<double>() + shares["turns"][1].get<double>()) / 2);
  }
}

}  // namespace
}  // namespace logitd::testing
