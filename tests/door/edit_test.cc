#include "server/door/edit.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <string>
#include <utility>
#include <vector>

namespace logitd::door {
namespace {

// `text` in parts of these sizes and a rest.
class Parts {
 public:
  Parts(std::string text, const std::vector<size_t>& sizes) : text_(std::move(text)) {
    size_t at = 0;
    for (const size_t size : sizes) {
      const size_t run = std::min(size, text_.size() - at);
      parts_.push_back({text_.data() + at, run});
      at += run;
    }
    parts_.push_back({text_.data() + at, text_.size() - at});
  }
  // What a reader gets.
  std::string Apply(const std::vector<Frames::Edit>& edits) {
    std::string beyond;
    const size_t left = ApplyEdits(parts_, text_.size(), edits, &beyond);
    return text_.substr(0, left) + "|" + beyond;
  }

 private:
  std::string text_;
  std::vector<iovec> parts_;
};

TEST(EditTest, OfTheSameSizeMovesNothing) {
  EXPECT_EQ(Parts("abcdefgh", {3}).Apply({{2, 5, "XYZ"}}), "abXYZfgh|");
}

TEST(EditTest, RemovesBytes) {
  EXPECT_EQ(Parts("abcdefgh", {1, 0, 3}).Apply({{0, 2, ""}, {5, 6, ""}}), "cdegh|");
  EXPECT_EQ(Parts("abc", {}).Apply({{0, 3, ""}}), "|");
}

TEST(EditTest, WhatHasNoPlaceComesAfterwards) {
  EXPECT_EQ(Parts("abcdef", {2}).Apply({{2, 3, "XY"}}), "ab|XYdef");
  EXPECT_EQ(Parts("abcdef", {2}).Apply({{6, 6, "X"}}), "abcdef|X");
}

TEST(EditTest, UsesThePlaceOfRemovedBytes) {
  EXPECT_EQ(Parts("abcdef", {1, 2}).Apply({{0, 2, ""}, {4, 4, "XY"}}), "cdXYef|");
}

// The frame that gRPC skips: its head, and a payload of anything.
TEST(EditTest, AFrameTakesThePlaceOfARefusedOne) {
  const std::string before(50, 'b');
  const std::string refused(40, 'r');
  const std::string after(2000, 'a');
  const std::string got =
      Parts(before + refused + after, {60, 7}).Apply({{50, 90, "XYZ", /*frame=*/1}});
  const std::string head = {0, 0, 40 - 3 - 9, '\xe7', 0, 0, 0, 0, 0};
  ASSERT_EQ(got.size(), before.size() + refused.size() + after.size() + 1) << "nothing is moved";
  EXPECT_EQ(got.substr(0, 50), before);
  EXPECT_EQ(got.substr(50, 1), "X");
  EXPECT_EQ(got.substr(51, 9), head);
  EXPECT_EQ(got.substr(60 + 28, 2), "YZ");
  EXPECT_EQ(got.substr(90), after + "|");
}

TEST(EditTest, NoFrameStandsWhereItHasNoPlaceOrSavesNothing) {
  const std::string after(2000, 'a');
  EXPECT_EQ(Parts("0123456789" + after, {}).Apply({{0, 8, "", /*frame=*/0}}), "89" + after + "|");
  EXPECT_EQ(Parts("0123456789012345", {}).Apply({{0, 12, "", /*frame=*/0}}), "2345|");
  EXPECT_EQ(Parts(std::string(17000, 'r') + after, {}).Apply({{0, 17000, "", /*frame=*/0}}),
            after + "|");
  EXPECT_EQ(Parts("0123456789012345" + after, {}).Apply({{0, 12, ""}}), "2345" + after + "|");
}

TEST(EditTest, IsThatOfAStringForRandomEditsAndParts) {
  const uint32_t seed = std::random_device{}();
  SCOPED_TRACE(seed);
  std::mt19937 random(seed);
  for (int round = 0; round < 20000; ++round) {
    std::string text;
    for (size_t i = random() % 40; i > 0; --i) {
      text.push_back(static_cast<char>('a' + random() % 26));
    }
    const std::string after(random() % 2 == 0 ? 2000 : 0, 'a');  // enough that a frame saves work
    std::vector<Frames::Edit> edits;
    std::string expected;
    std::vector<std::pair<size_t, size_t>> anything;  // where the payloads of frames are
    size_t at = 0;
    while (at < text.size() && random() % 5 != 0) {
      const size_t begin = at + random() % (text.size() - at + 1);
      const size_t end = begin + random() % (text.size() - begin + 1) / (1 + random() % 2);
      const std::string put(random() % 3 == 0 ? end - begin : random() % 6, 'X');
      expected += text.substr(at, begin - at);
      edits.push_back({begin, end, put});
      const bool apart = begin > at || edits.size() == 1;
      if (apart && random() % 2 == 0) edits.back().frame = random() % (put.size() + 1);
      const bool fits = end - begin >= put.size() + Frames::kHeadBytes;
      const bool in_place = expected.size() == begin;
      if (edits.back().frame != Frames::Edit::kNoFrame && fits && in_place && !after.empty()) {
        const size_t payload = end - begin - put.size() - Frames::kHeadBytes;
        const std::string head = {0, 0, static_cast<char>(payload), '\xe7', 0, 0, 0, 0, 0};
        expected += put.substr(0, edits.back().frame) + head;
        anything.emplace_back(expected.size(), payload);
        expected += std::string(payload, '?') + put.substr(edits.back().frame);
      } else {
        expected += put;
      }
      at = end;
    }
    expected += text.substr(at) + after;
    std::string got = Parts(text + after, {random() % 9, random() % 9, random() % 9}).Apply(edits);
    got.erase(got.find('|'), 1);
    for (const auto& [begin, bytes] : anything) {
      ASSERT_LE(begin + bytes, got.size());
      got.replace(begin, bytes, bytes, '?');
    }
    ASSERT_EQ(got, expected);
  }
}

}  // namespace
}  // namespace logitd::door
