#include "formats/json_fields.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"

namespace logitd::formats {
namespace {

using ::testing::ElementsAre;
using ::testing::Pair;

bool All(std::string_view, std::string_view) { return true; }

TEST(JsonFieldsTest, KeepsTheMembersOfTwoLevelsByKind) {
  const auto fields = ReadJsonFields(
      "f", R"( {"a":1,"b":-2.5,"c":"x","d":null,"e":true,"f":[1,{"a":2}],"g":18446744073709551615,
               "o":{"a":3,"p":{"a":4},"q":[{"a":5}],"z":"last"},"":{"a":6}} )",
      All);
  ASSERT_TRUE(fields.ok()) << fields.status();
  const auto at = [&](const char* object, const char* key) { return fields->at({object, key}); };
  EXPECT_EQ(std::get<int64_t>(at("", "a")), 1);
  EXPECT_EQ(std::get<double>(at("", "b")), -2.5);
  EXPECT_EQ(std::get<std::string>(at("", "c")), "x");
  EXPECT_TRUE(std::holds_alternative<std::monostate>(at("", "d")));
  EXPECT_EQ(std::get<bool>(at("", "e")), true);
  EXPECT_FALSE(std::get<JsonParts>(at("", "f")).object);
  EXPECT_EQ(std::get<double>(at("", "g")), 18446744073709551615.0);
  EXPECT_TRUE(std::get<JsonParts>(at("", "o")).object);
  EXPECT_EQ(std::get<int64_t>(at("o", "a")), 3);
  EXPECT_TRUE(std::get<JsonParts>(at("o", "p")).object);
  EXPECT_FALSE(std::get<JsonParts>(at("o", "q")).object);
  EXPECT_EQ(std::get<std::string>(at("o", "z")), "last");
  EXPECT_EQ(fields->size(),
            13u);  // those, and the object of the empty key, which is not looked into
}

TEST(JsonFieldsTest, KeepsWhatIsWantedAndTheLastOfTwo) {
  const auto fields =
      ReadJsonFields("f", R"({"a":1,"o":{"a":1,"b":2},"a":3,"o":{"a":4,"c":5},"x":{"a":6}})",
                     [](std::string_view object, std::string_view key) {
                       return (object.empty() && key == "a") || object == "o";
                     });
  ASSERT_TRUE(fields.ok()) << fields.status();
  EXPECT_THAT(*fields, ElementsAre(Pair(Pair("", "a"), JsonValue(int64_t{3})),
                                   Pair(Pair("o", "a"), JsonValue(int64_t{4})),
                                   Pair(Pair("o", "c"), JsonValue(int64_t{5}))));
}

TEST(JsonFieldsTest, WhatIsNoObjectIsRefused) {
  for (const std::string& text :
       {std::string(), std::string("1"), std::string("[]"), std::string("[{}]"), std::string("{"),
        std::string(R"({"a":1,})"), std::string(R"({"a":1} 2)"), std::string(R"({"a":1e999})"),
        std::string("{}\0", 3), std::string("{}\0{", 4), std::string("{\"a\":\"\xff\"}")}) {
    const auto fields = ReadJsonFields("f", text, All);
    EXPECT_EQ(fields.status(), absl::InvalidArgumentError("f: not a JSON object")) << text;
  }
}

std::string Many(int count, const std::string& begin, const std::string& piece,
                 const std::string& end) {
  std::string text = begin;
  for (int i = 0; i < count; ++i) absl::StrAppend(&text, i > 0 ? "," : "", piece);
  return text + end;
}

// A quadratic reader takes minutes.
TEST(JsonFieldsTest, NestsAndSiblingsTakeLinearTime) {
  constexpr int kCount = 300'000;
  const absl::Time start = absl::Now();
  for (const std::string& text :
       {Many(kCount, R"({"o":{)", R"("a":{})", "}}"), Many(kCount, R"({"o":[)", "{}", "]}"),
        Many(kCount, "{", R"("o":{"a":1})", "}"),
        absl::StrCat(R"({"o":)", std::string(kCount, '['), std::string(kCount, ']'), "}")}) {
    const auto fields = ReadJsonFields(
        "f", text, [](std::string_view, std::string_view key) { return key == "o" || key == "a"; });
    EXPECT_TRUE(fields.ok()) << fields.status();
  }
  EXPECT_LT(absl::Now() - start, absl::Seconds(20));
}

TEST(JsonFieldsTest, ShowsAValueOnOneBoundedLine) {
  EXPECT_EQ(ShownValue(JsonValue()), "null");
  EXPECT_EQ(ShownValue(JsonValue(true)), "true");
  EXPECT_EQ(ShownValue(JsonValue(int64_t{-5})), "-5");
  EXPECT_EQ(ShownValue(JsonValue(0.5)), "0.5");
  EXPECT_EQ(ShownValue(JsonValue("a\n")), "'a\\n'");
  EXPECT_EQ(ShownValue(JsonValue(JsonParts{})), "an array");
  EXPECT_LT(ShownValue(JsonValue(std::string(1000, 'x'))).size(), 200u);
}

}  // namespace
}  // namespace logitd::formats
