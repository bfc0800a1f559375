// Headers by hand, good and hostile. The bytes around them are the client's and the engine's tests.
#include "formats/safetensors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace logitd::formats {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Pair;

TEST(SafetensorsTest, SaysWhatIsThereAndWhere) {
  const auto header = ParseSafetensorsHeader("f", R"({"__metadata__":{"format":"pt","scale":"2"},
               "b":{"shape":[2,3],"data_offsets":[8,20],"dtype":"BF16"},
               "a":{"dtype":"F32","shape":[],"data_offsets":[20,24]},
               "none":{"dtype":"F32","shape":[0,7],"data_offsets":[8,8]},
               "odd":{"dtype":"Q3","shape":[5],"data_offsets":[0,8]}}   )",
                                             24);
  ASSERT_TRUE(header.ok()) << header.status();
  EXPECT_THAT(header->metadata, ElementsAre(Pair("format", "pt"), Pair("scale", "2")));
  ASSERT_EQ(header->tensors.size(), 4u);
  const SafetensorsTensor& b = header->tensors.at("b");
  EXPECT_EQ(b.dtype, "BF16");
  EXPECT_THAT(b.shape, ElementsAre(2, 3));
  EXPECT_EQ(b.begin, 8);
  EXPECT_EQ(b.bytes, 12);
  EXPECT_EQ(header->tensors.at("a").bytes, 4);
  EXPECT_EQ(header->tensors.at("none").bytes, 0);
  EXPECT_EQ(header->tensors.at("odd").dtype, "Q3");
}

struct BadLength {
  const char* name;
  std::string first_bytes;
  int64_t file_bytes;
  const char* error;
};

TEST(SafetensorsTest, TheLengthIsHeldAgainstTheFile) {
  const std::string hundred("\x64\0\0\0\0\0\0\0", 8);
  EXPECT_EQ(*SafetensorsHeaderBytes("f", hundred, 108), 100);
  EXPECT_EQ(*SafetensorsHeaderBytes("f", hundred, 108, 100), 100);
  EXPECT_EQ(SafetensorsHeaderBytes("f", hundred, 108, 99).status(),
            absl::InvalidArgumentError("f: header length: got 100, allowed 0..99"));
  for (const BadLength& test : {
           BadLength{"empty", "", 0, "f: shorter than the 8 bytes"},
           {"seven", hundred.substr(0, 7), 7, "shorter than the 8 bytes"},
           {"one_beyond", hundred, 107,
            "header length: got 100, allowed 0..99, as the file has 107 bytes"},
           {"all_ones", std::string(8, '\xff'), 1 << 20,
            "header length: got 18446744073709551615, allowed"},
           {"beyond_the_format", std::string("\0\xe1\xf5\x06\0\0\0\0", 8), int64_t{1} << 40,
            "header length: got 116777216, allowed 0..100000000"},
       }) {
    const auto length = SafetensorsHeaderBytes("f", test.first_bytes, test.file_bytes);
    ASSERT_FALSE(length.ok()) << test.name;
    EXPECT_THAT(std::string(length.status().message()), HasSubstr(test.error)) << test.name;
  }
}

std::string F16(const char* name, int64_t begin, int64_t end) {
  return absl::StrFormat(R"("%s":{"dtype":"F16","shape":[%d],"data_offsets":[%d,%d]})", name,
                         (end - begin) / 2, begin, end);
}

struct Bad {
  const char* name;
  std::string header;
  const char* error;
};

// Files with 24 data bytes.
TEST(SafetensorsTest, NamesTheFault) {
  const std::string x = R"({"dtype":"F32","shape":[6],"data_offsets":[0,24]})";
  for (const Bad& test : {
           Bad{"overlap", absl::StrCat("{", F16("a", 0, 14), ",", F16("b", 12, 24), "}"),
               "tensor 'b': data_offsets: got begin 12, inside another tensor, allowed 14, where "
               "tensor 'a' ends"},
           {"one_inside_another", absl::StrCat("{", F16("a", 0, 24), ",", F16("b", 2, 4), "}"),
            "tensor 'b': data_offsets: got begin 2, inside another"},
           {"the_same_twice", absl::StrCat("{", F16("a", 0, 24), ",", F16("b", 0, 24), "}"),
            "got begin 0, inside another tensor, allowed 24"},
           {"gap", absl::StrCat("{", F16("a", 0, 12), ",", F16("b", 14, 24), "}"),
            "tensor 'b': data_offsets: got begin 14, after a gap, allowed 12"},
           {"gap_first", absl::StrCat("{", F16("a", 2, 24), "}"),
            "allowed 0, where the data start"},
           {"data_behind", absl::StrCat("{", F16("a", 0, 22), "}"),
            "end of the tensors: got 22, allowed 24, the file's data bytes"},
           {"past_the_end", absl::StrCat("{", F16("a", 0, 26), "}"),
            "tensor 'a': data_offsets: got [0,26], allowed inside the file's 24 data bytes"},
           {"name_twice", "{\"x\":" + x + ",\"x\":" + x + "}", "tensor 'x': there twice"},
           {"metadata_twice", R"({"__metadata__":{},"__metadata__":{}})", "there twice"},
           {"metadata_key_twice", R"({"__metadata__":{"k":"1","k":"2"}})", "key 'k' twice"},
           {"metadata_number", R"({"__metadata__":{"k":1}})", "value of 'k' is not a string"},
           {"metadata_array", R"({"__metadata__":[]})", "'__metadata__': not a JSON object"},
           {"field_twice", R"({"x":{"dtype":"F32","dtype":"F16"}})", "tensor 'x': dtype twice"},
           {"offsets_twice", R"({"x":{"data_offsets":[0,1],"data_offsets":[0,1]}})",
            "data_offsets twice"},
           {"field_unknown", R"({"x":{"stride":[1]}})",
            "key: got 'stride', allowed dtype, shape, data_offsets"},
           {"dtype_number", R"({"x":{"dtype":4}})", "tensor 'x': no dtype"},
           {"shape_string", R"({"x":{"shape":"6"}})", "tensor 'x': no shape"},
           {"offsets_three", R"({"x":{"data_offsets":[0,1,2]}})", "no data_offsets [begin, end]"},
           {"offsets_null", R"({"x":{"data_offsets":[null,1]}})", "no data_offsets [begin, end]"},
           {"dim_object", R"({"x":{"shape":[{}]}})", "a dimension of shape is not a size"},
           {"dim_past_int64", R"({"x":{"shape":[9223372036854775808]}})",
            "a dimension of shape is not a size"},
           {"half_a_byte", R"({"x":{"dtype":"F4","shape":[3],"data_offsets":[0,1]}})",
            "shape: got [3] of F4, allowed one with its 1 data bytes"},
           {"bits_overflow",
            R"({"x":{"dtype":"F32","shape":[576460752303423488,2],"data_offsets":[0,0]}})",
            "allowed one with its 0 data bytes"},
           {"cut", R"({"x":{"dtype":"F32")", "header is not a JSON object, at its byte"},
           {"text_behind", "{} {}", "header is not a JSON object"},
           {"bytes_that_are_no_utf8", "{\"\xff\":1}", "header is not a JSON object"},
           {"deep", "{\"x\":" + std::string(100000, '['), "tensor 'x': not a JSON object"},
       }) {
    const auto header = ParseSafetensorsHeader("f", test.header, 24);
    ASSERT_FALSE(header.ok()) << test.name;
    EXPECT_EQ(header.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(header.status().message()), HasSubstr(test.error)) << test.name;
    EXPECT_EQ(header.status().message().substr(0, 3), "f: ") << test.name;
  }
}

TEST(SafetensorsTest, NothingMayFollowANul) {
  const std::string good = R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})";
  ASSERT_TRUE(ParseSafetensorsHeader("f", good, 4).ok());
  for (const char* behind : {"", "{", "\"b\":1"}) {
    EXPECT_EQ(ParseSafetensorsHeader("f", good + '\0' + behind, 4).status(),
              absl::InvalidArgumentError(absl::StrFormat(
                  "f: header is not a JSON object, at its byte %d", good.size() + 1)));
  }
}

TEST(SafetensorsTest, ErrorsAreShortWhateverTheNames) {
  const std::string name(100000, 'n');
  const auto header = ParseSafetensorsHeader(
      "f", "{\"" + name + "\\n\":{\"shape\":[" + std::string(100000, '9') + "]}}", 24);
  ASSERT_FALSE(header.ok());
  EXPECT_LT(header.status().message().size(), 400u);
  EXPECT_EQ(Shown("a\nb"), "'a\\nb'");
  EXPECT_LT(ShapeName(std::vector<int64_t>(100000, 1)).size(), 60u);
}

}  // namespace
}  // namespace logitd::formats
