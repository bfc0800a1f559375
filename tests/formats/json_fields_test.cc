#include "formats/json_fields.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
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
  for (const char* text : {"1", "[]", "[{}]", "NaN", "1e999"}) {
    EXPECT_EQ(ReadJsonFields("f", text, All).status(),
              absl::InvalidArgumentError("f: not a JSON object"))
        << text;
  }
}

TEST(JsonFieldsTest, ASyntaxErrorIsRefusedWithItsLineAndColumn) {
  const std::string huge(400, '9');
  struct Case {
    std::string text;
    const char* where;
  };
  for (const Case& test : {
           Case{"", "line 1, column 1"},
           {"{", "line 1, column 2"},
           {R"({"a":1,})", "line 1, column 8"},
           {R"({"a":1} 2)", "line 1, column 9"},
           {"{\n  \"a\": NaN,\n  \"b\": Infinity, x\n}", "line 3, column 18"},
           {"{\"a\":[NaN,NaN,-Infinity,1e999],\n\n\"b\" 1}", "line 3, column 5"},
           {"{\"a\":\"\xff\"}", "line 1, column 7"},
           {std::string("{}\0", 3), "line 1, column 3"},
           {std::string("{}\n\0{", 5), "line 2, column 1"},
           {R"({"a":nan})", "line 1, column 7"},
           {R"({"a":inf})", "line 1, column 6"},
           {R"({"a":Infinit})", "line 1, column 6"},
           {R"({"a":-Infinit})", "line 1, column 7"},
           {R"({"a":-NaN})", "line 1, column 7"},
           {R"({"a":+Infinity})", "line 1, column 6"},
           {R"({"a":NaNs})", "line 1, column 6"},
           {R"({"a":01e999})", "line 1, column 11"},
           {R"({"a":1.e999})", "line 1, column 8"},
           {R"({"a":0)" + huge + "}", "line 1, column 406"},
           {R"({"a":falsE})", "line 1, column 10"},
           {R"({NaN:1})", "line 1, column 4"},
       }) {
    EXPECT_EQ(ReadJsonFields("f", test.text, All).status(),
              absl::InvalidArgumentError(
                  absl::StrCat("f: not a JSON object: syntax error at ", test.where)))
        << test.text;
  }
}

// The numbers are those that transformers 4 and 5, and Python's json module, write.
TEST(JsonFieldsTest, NumbersThatOnlyPythonWritesAreRead) {
  constexpr double kInf = std::numeric_limits<double>::infinity();
  const std::string huge(400, '9');
  struct Case {
    std::string text;
    double value;
  };
  for (const Case& test : {
           Case{"Infinity", kInf},
           {"-Infinity", -kInf},
           {R"({"__float__": "Infinity"})", kInf},
           {R"({ "__float__" : "-Infinity" })", -kInf},
           {huge, kInf},
           {"-" + huge, -kInf},
           {"1e999", kInf},
           {"-1.5E+400", -kInf},
           {"1e-999", 0.0},
           {"1e-05", 1e-05},
           {"1E5", 1e5},
           {"0E0", 0.0},
           {"-0E000000", 0.0},
           {"1e+16", 1e16},
           {"-0.0", 0.0},
           {"1000000000000000019884624838656", 1e30},
       }) {
    SCOPED_TRACE(test.text);
    const auto fields =
        ReadJsonFields("f",
                       absl::StrCat(R"({"s":"NaN \" Infinity","a":)", test.text, R"(,"o":{"b":[1,)",
                                    test.text, R"(],"a":)", test.text, R"(},"last":"1E5"})"),
                       All);
    ASSERT_TRUE(fields.ok()) << fields.status();
    EXPECT_EQ(std::get<double>(fields->at({"", "a"})), test.value);
    EXPECT_EQ(std::get<double>(fields->at({"o", "a"})), test.value);
    EXPECT_FALSE(std::get<JsonParts>(fields->at({"o", "b"})).object);
    EXPECT_EQ(std::get<std::string>(fields->at({"", "s"})), "NaN \" Infinity");
    EXPECT_EQ(std::get<std::string>(fields->at({"", "last"})), "1E5");
  }
  for (const char* text : {"NaN", R"({"__float__":"NaN"})"}) {
    const auto fields = ReadJsonFields("f", absl::StrCat(R"({"a":)", text, "}"), All);
    ASSERT_TRUE(fields.ok()) << fields.status();
    EXPECT_TRUE(std::isnan(std::get<double>(fields->at({"", "a"}))));
  }
}

TEST(JsonFieldsTest, OnlyAnObjectWithNothingElseStandsForANumber) {
  for (const char* text :
       {R"({"__float__":"nan"})", R"({"__float__":1})", R"({"__float__":["NaN"]})",
        R"({"__float__":"NaN","b":1})", R"({"b":{},"__float__":"NaN"})",
        R"({"b":[],"__float__":"NaN"})", R"({"b":{"__float__":"NaN"}})", R"({"float":"NaN"})"}) {
    const auto fields = ReadJsonFields("f", absl::StrCat(R"({"a":)", text, "}"), All);
    ASSERT_TRUE(fields.ok()) << fields.status();
    EXPECT_TRUE(std::get<JsonParts>(fields->at({"", "a"})).object) << text;
  }
  const auto fields = ReadJsonFields("f", R"({"__float__":"NaN","a":[{"__float__":"NaN"}]})", All);
  ASSERT_TRUE(fields.ok()) << fields.status();
  EXPECT_EQ(std::get<std::string>(fields->at({"", "__float__"})), "NaN");
  EXPECT_FALSE(std::get<JsonParts>(fields->at({"", "a"})).object);
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
