#include "formats/nearest.h"

#include <gtest/gtest.h>

namespace logitd::formats {
namespace {

TEST(NearestTest, FewestStepsWin) {
  EXPECT_EQ(Nearest("smaple", {"topk", "sample", "simple"}), "sample");
  EXPECT_EQ(Nearest("--topk", {"--help", "--top-k", "--top-p"}), "--top-k");
  EXPECT_EQ(Nearest("sample", {"topk", "sample"}), "sample");
}

TEST(NearestTest, TheFirstOfEqualsWins) {
  EXPECT_EQ(Nearest("bat", {"cat", "rat"}), "cat");
  EXPECT_EQ(Nearest("bat", {"rat", "cat"}), "rat");
}

TEST(NearestTest, WhatResemblesNothingHasNone) {
  EXPECT_EQ(Nearest("dance", {"topk", "sample"}), "");
  EXPECT_EQ(Nearest("abcd", {"abxy"}), "abxy");  // 2 steps of 4 characters
  EXPECT_EQ(Nearest("abcd", {"axyz"}), "");      // 3
  EXPECT_EQ(Nearest("", {"a"}), "");
  EXPECT_EQ(Nearest("a", {}), "");
}

}  // namespace
}  // namespace logitd::formats
