// Heads of the models of transformers, as its versions 4 and 5 save them: the logits of a loaded
// head are those that transformers computes. families_4.json and families_5.json have the saved
// files (see write_families.py), and write_heads.py writes them out.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/engine/heads.h"
#include "server/engine/model_types.h"
#include "tests/engine/heads_fixture.h"

namespace logitd::engine {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;

// What transformers gave.
struct Expected {
  explicit Expected(const std::string& path) {
    std::ifstream file(path);
    file >> rows >> hidden >> vocab;
    states.resize(rows * hidden);
    logits.resize(rows * vocab);
    for (float& value : states) file >> value;
    for (float& value : logits) file >> value;
    good = static_cast<bool>(file);
  }

  size_t rows = 0, hidden = 0, vocab = 0;
  std::vector<float> states, logits;
  bool good = false;
};

// The largest difference of the head's logits from the expected ones.
double WorstError(const HeadView& head, const Expected& expected) {
  const auto* weight = static_cast<const float*>(head.weight.data);
  double worst = 0;
  for (size_t row = 0; row < expected.rows; ++row) {
    for (size_t token = 0; token < expected.vocab; ++token) {
      double logit = head.bias != nullptr ? head.bias[token] : 0.0;
      for (size_t i = 0; i < expected.hidden; ++i) {
        logit += static_cast<double>(expected.states[row * expected.hidden + i]) *
                 weight[token * head.weight.row_stride + i];
      }
      logit *= head.scale;
      if (head.softcap > 0) logit = head.softcap * std::tanh(logit / head.softcap);
      worst = std::max(worst, std::abs(logit - expected.logits[row * expected.vocab + token]));
    }
  }
  return worst;
}

class HeadFamiliesTest : public HeadsTest {};

TEST_F(HeadFamiliesTest, LogitsAreThoseOfTransformersOrTheHeadIsRefused) {
  // Masked language models: between the last states and the matrix is another layer.
  const std::map<std::string, std::string> refused = {
      {"bert", "no tensor 'lm_head.weight'"},
      {"modernbert-decoder", "tensor 'lm_head.dense.weight': got one"},
      {"roberta", "tensor 'lm_head.dense.weight': got one"},
  };
  for (const auto& [version, least] : std::map<std::string, int>{{"4", 60}, {"5", 69}}) {
    int loaded = 0;
    std::set<std::string> seen;
    for (const auto& entry : std::filesystem::directory_iterator(files_ + "/families/" + version)) {
      const std::string name = entry.path().filename();
      SCOPED_TRACE(absl::StrCat(name, " of transformers ", version));
      const auto head = Load({.name = absl::StrCat(name, ".", version), .path = entry.path()});
      if (const auto it = refused.find(name); it != refused.end()) {
        EXPECT_THAT(std::string(head.status().message()), HasSubstr(it->second));
        seen.insert(name);
        continue;
      }
      if (!head.ok()) {
        ADD_FAILURE() << head.status();
        continue;
      }
      EXPECT_THAT((*head)->info().warnings, IsEmpty());
      const Expected expected((entry.path() / "expected.txt").string());
      ASSERT_TRUE(expected.good);
      const HeadView& view = (*head)->view();
      ASSERT_EQ(view.weight.dtype, DType::kF32);
      ASSERT_EQ(view.hidden(), static_cast<int64_t>(expected.hidden));
      ASSERT_EQ(view.vocab(), static_cast<int64_t>(expected.vocab));
      const float largest =
          std::abs(*std::max_element(expected.logits.begin(), expected.logits.end(),
                                     [](float a, float b) { return std::abs(a) < std::abs(b); }));
      EXPECT_GT(largest, 0.05);  // zeros would pass with any weight
      EXPECT_LE(WorstError(view, expected), 1e-5 * (1 + largest));
      ++loaded;
    }
    EXPECT_EQ(seen.size(), refused.size());
    EXPECT_GE(loaded, least);
  }
}

TEST_F(HeadFamiliesTest, EmbeddingsAreTiedByDefaultWhereTransformersTiesThem) {
  std::ifstream file(files_ + "/ties.txt");
  int types = 0;
  std::string version, type;
  for (bool tied; file >> version >> type >> tied; ++types) {
    const std::optional<ModelFamily> family = FamilyOf(type);
    EXPECT_TRUE(family.has_value() && family->ties == tied)
        << type << " of transformers " << version;
  }
  EXPECT_GE(types, 188 + 305);
  EXPECT_FALSE(FamilyOf("never_seen").has_value());
  EXPECT_FALSE(FamilyOf("").has_value());
}

}  // namespace
}  // namespace logitd::engine
