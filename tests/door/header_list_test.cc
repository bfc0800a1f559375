#include "server/door/header_list.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <string>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "tests/door/bytes.h"
#include "tests/door/hpack_encoder.h"

namespace logitd::door {
namespace {

using namespace std::string_literals;

struct Block {
  const char* name;
  std::string bytes;
  size_t size;
};

class HeaderListTest : public ::testing::TestWithParam<Block> {};

TEST_P(HeaderListTest, HasItsSizeInOnePieceAndByteForByte) {
  HeaderList whole;
  whole.Begin();
  EXPECT_TRUE(whole.Read(Bytes(GetParam().bytes)));
  EXPECT_EQ(whole.bytes(), GetParam().size);
  HeaderList pieces;
  pieces.Begin();
  for (const char& byte : GetParam().bytes) {
    EXPECT_TRUE(pieces.Read(Bytes({&byte, 1})));
  }
  EXPECT_EQ(pieces.bytes(), GetParam().size);
}

INSTANTIATE_TEST_SUITE_P(
    All, HeaderListTest,
    ::testing::Values(
        Block{"empty", "", 0},
        // :method GET is 7 + 3 + 32, :scheme http 7 + 4 + 32.
        Block{"fields_of_the_static_table", "\x82\x86", 42 + 43},
        Block{"a_literal_field", "\0\3abc\2de"s, 3 + 2 + 32},
        Block{"a_name_of_the_static_table", "\4\5/abcd"s, 5 + 5 + 32},  // :path
        Block{"a_long_value", "\0\1x\x7f\x81\1"s + std::string(256, 'y'), 1 + 256 + 32},
        // RFC 7541, C.4.1: :authority www.example.com (10 + 15 + 32) in 12 bytes of Huffman code.
        Block{"huffman", "\x41\x8c\xf1\xe3\xc2\xe5\xf2\x3a\x6b\xa0\xab\x90\xf4\xff"s, 57},
        Block{"an_added_field_again", "\x40\1x\1y\xbe\xbe"s, 3 * 34},
        Block{"the_newest_field_has_the_lowest_number", "\x40\1x\3yyy\x40\1z\0\xbe\xbf"s,
              36 + 33 + 33 + 36},
        Block{"a_field_that_is_never_added", "\x10\1x\1y"s, 34},
        Block{"an_unknown_field_counts_as_the_largest", "\xff\x7f"s, 4096},
        Block{"a_table_of_0_keeps_nothing", "\x20\x40\1x\1y\xbe"s, 34 + 4096}),
    [](const auto& info) { return info.param.name; });

// RFC 7541, C.4: three lists of one connection.
TEST(HeaderListsTest, ShareATable) {
  HeaderList list;
  const auto size = [&list](const std::string& bytes) {
    list.Begin();
    EXPECT_TRUE(list.Read(Bytes(bytes)));
    return list.bytes();
  };
  EXPECT_EQ(size("\x82\x86\x84\x41\x8c\xf1\xe3\xc2\xe5\xf2\x3a\x6b\xa0\xab\x90\xf4\xff"s),
            42U + 43 + 38 + 57);
  EXPECT_EQ(size("\x82\x86\x84\xbe\x58\x86\xa8\xeb\x10\x64\x9c\xbf"s), 42U + 43 + 38 + 57 + 53);
  EXPECT_EQ(size("\x82\x87\x85\xbf\x40\x88\x25\xa8\x49\xe9\x5b\xa9\x7d\x7f\x89\x25\xa8\x49\xe9\x5b"
                 "\xb8\xe8\xb4\xbf"s),
            42U + 44 + 48 + 57 + 54);
}

TEST(HeaderListsTest, CountAStringBeforeItHasCome) {
  HeaderList list;
  list.Begin();
  EXPECT_TRUE(list.Read(Bytes("\0\1x\x7f\x80\x80\x80\x80\1"s)));
  EXPECT_GT(list.bytes(), size_t{1} << 28);
}

TEST(HeaderListsTest, RefuseANumberBeyond32Bits) {
  HeaderList list;
  list.Begin();
  EXPECT_FALSE(list.Read(Bytes("\xff\x80\x80\x80\x80\x7f"s)));
  HeaderList endless;
  endless.Begin();
  EXPECT_FALSE(endless.Read(Bytes("\xff"s + std::string(12, '\x80'))));
}

// Old fields leave when the table is full, so memory is bounded.
TEST(HeaderListsTest, ForgetOldFields) {
  HeaderList list;
  list.Begin();
  std::string block = "\x40\1a\1b"s;
  for (int i = 0; i < 1000; ++i) block += "\x40\1x\x10" + std::string(16, 'y');
  EXPECT_TRUE(list.Read(Bytes(block)));
  const size_t before = list.bytes();
  EXPECT_TRUE(list.Read(Bytes("\xff\xa9\7"s)));  // number 62 + 1000, which was the first
  EXPECT_EQ(list.bytes() - before, 4096U);
}

// --- fields

HeaderFields FieldsOf(const HeaderList& list) {
  HeaderFields fields;
  for (size_t i = 0; i < list.size(); ++i) fields.emplace_back(list[i].name, list[i].value);
  return fields;
}

class HeaderFieldsTest : public ::testing::Test {
 protected:
  HeaderFields Read(const std::string& bytes) {
    list_.Begin();
    EXPECT_TRUE(list_.Read(Bytes(bytes)));
    return FieldsOf(list_);
  }

  HeaderList list_;
};

// RFC 7541, C.3: three lists of one connection, without Huffman code.
TEST_F(HeaderFieldsTest, OfRequestsWithoutHuffmanCode) {
  EXPECT_EQ(Read("\x82\x86\x84\x41\x0fwww.example.com"),
            (HeaderFields{{":method", "GET"},
                          {":scheme", "http"},
                          {":path", "/"},
                          {":authority", "www.example.com"}}));
  EXPECT_TRUE(list_.whole());
  EXPECT_EQ(Read("\x82\x86\x84\xbe\x58\x08no-cache"),
            (HeaderFields{{":method", "GET"},
                          {":scheme", "http"},
                          {":path", "/"},
                          {":authority", "www.example.com"},
                          {"cache-control", "no-cache"}}));
  EXPECT_EQ(Read("\x82\x87\x85\xbf\x40\x0a"
                 "custom-key\x0c"
                 "custom-value"),
            (HeaderFields{{":method", "GET"},
                          {":scheme", "https"},
                          {":path", "/index.html"},
                          {":authority", "www.example.com"},
                          {"custom-key", "custom-value"}}));
  EXPECT_EQ(Read("\x82\xbe"), (HeaderFields{{":method", "GET"}, {"custom-key", "custom-value"}}));
}

// RFC 7541, C.4: the same in Huffman code.
TEST_F(HeaderFieldsTest, OfRequestsInHuffmanCode) {
  EXPECT_EQ(Read("\x82\x86\x84\x41\x8c\xf1\xe3\xc2\xe5\xf2\x3a\x6b\xa0\xab\x90\xf4\xff"s).back(),
            (HeaderFields::value_type{":authority", "www.example.com"}));
  EXPECT_EQ(Read("\x82\x86\x84\xbe\x58\x86\xa8\xeb\x10\x64\x9c\xbf"s).back(),
            (HeaderFields::value_type{"cache-control", "no-cache"}));
  EXPECT_EQ(Read("\x82\x87\x85\xbf\x40\x88\x25\xa8\x49\xe9\x5b\xa9\x7d\x7f\x89\x25\xa8\x49\xe9"
                 "\x5b\xb8\xe8\xb4\xbf"s)
                .back(),
            (HeaderFields::value_type{"custom-key", "custom-value"}));
}

// All bytes from 0 to 255, as another implementation encodes them.
TEST_F(HeaderFieldsTest, EveryHuffmanCodeIsKnown) {
  const std::string code = absl::HexStringToBytes(
      "ffc7fffd8fffffe2fffffe3fffffe4fffffe5fffffe6fffffe7fffffe8ffffeafffffff3fffffa7fffffab"
      "ffffffdfffffebfffffecfffffedfffffeefffffefffffff0ffffff1ffffff2fffffffbfffffcffffffd3f"
      "ffffd7fffffdbfffffdffffffe3fffffe7fffffebfffffed4fe3f9ffaffcabf1febfafefe7fdfd2cbb0008"
      "9969b71d79fb9f7fff20ffbff3ff50ddbd7f061c58f265cd9f469d5af66dddbf871e5f9cff7ff7fffc3ff9"
      "ffe45fff4719242cb34e6e9d68a6a3d7dac426defe3cfaf7fffbfe7ffbffdffffffcfffe6ffff4bfff9fff"
      "fa3fffd3ffff53fffd5ffffb3fffeb7fffdaffffb7ffff73fffeeffffdeffffebffffbfffffd9ffffdbfff"
      "ebffffe0ffffeeffffc3ffff8bffff1ffffe4fffee7fffb1ffff97fffd9ffffcdffff9fffffbffffdafffe"
      "effff4ffffb7fffee7fffe8ffffd3fffdeffffd5fffeeffffbdffffe1fffdfffff7fffff5ffffecffff07f"
      "ff87fffe0ffff17fffedffff87ffff77fffeffffeaffff8bfffe3ffff93ffff87fffcbffff37ffff1fffff"
      "83ffffe1fffebfffe3ffff3fffff2ffffa3ffffd9fffff17ffffc7fffff27ffffdefffffbffffff2fffff8"
      "fffffb7fff97fff8fffffe6fffffc1fffff87ffffe7fffffc5ffffe5fffe4ffff2fffffd1fffff4ffffffe"
      "fffffe3fffffc9fffff97fffb3ffffcffffb7fffcdffff4ffff9ffffd1ffffcffffeaffffafffffddffffe"
      "ffffff4fffff5fffffabffffa7ffffd7fffff9bffffecfffffb7fffff3fffffe8fffffd3fffffabfffff5f"
      "ffffff7ffffecfffffdbfffffbbfffff7ffffff0fffffbbf");
  std::string all;
  for (int i = 0; i < 256; ++i) all.push_back(static_cast<char>(i));
  const std::string length = {'\xff', static_cast<char>(128 | (code.size() - 127) % 128),
                              static_cast<char>((code.size() - 127) / 128)};
  EXPECT_EQ(Read("\0\1x"s + length + code), (HeaderFields{{"x", all}}));
}

TEST_F(HeaderFieldsTest, ALiteralThatIsNotAddedLeavesTheTable) {
  EXPECT_EQ(Read("\0\1x\1y\x10\1z\0"s), (HeaderFields{{"x", "y"}, {"z", ""}}));
  Read("\x20"s);
}

TEST_F(HeaderFieldsTest, AListIsNotWholeBeforeItsLastByte) {
  for (const std::string& part : {"\0"s, "\0\1"s, "\0\1x"s, "\0\1x\2y"s, "\x7f"s}) {
    Read(part);
    EXPECT_FALSE(list_.whole()) << absl::CHexEscape(part);
  }
}

TEST_F(HeaderFieldsTest, AListWithUnknownFieldsIsNotWhole) {
  for (const std::string& unknown : {"\x80"s, "\xff\x7f"s, "\x7f\x70\1y"s}) {
    Read("\x82" + unknown + "\x82");
    EXPECT_FALSE(list_.whole()) << absl::CHexEscape(unknown);
  }
  Read("\0\1x\x84\xff\xff\xff\xff"s);
  EXPECT_FALSE(list_.whole()) << "the end of a string inside of it";
  Read("\x82");
  EXPECT_TRUE(list_.whole()) << "the next list is";
}

// One byte that stands for 4 KiB, many times: the text that is kept is bounded.
TEST_F(HeaderFieldsTest, ABombIsNotWhole) {
  Read("\x40\1x\x7f\x81\x1e"s + std::string(3968, 'y') + std::string(2000, '\xbe'));
  EXPECT_FALSE(list_.whole());
  EXPECT_GT(list_.bytes(), size_t{7} << 20);
}

TEST_F(HeaderFieldsTest, AreThoseOfTheEncoderHoweverTheBytesAreCut) {
  const uint32_t seed = std::random_device{}();
  SCOPED_TRACE(seed);
  std::mt19937 random(seed);
  HpackEncoder encoder(seed, /*inserts=*/50);
  for (int round = 0; round < 500; ++round) {
    HeaderFields fields;
    for (size_t i = random() % 12; i > 0; --i) {
      fields.emplace_back(absl::StrCat("name-", random() % 20),
                          std::string(random() % 9 == 0 ? random() % 900 : random() % 20,
                                      static_cast<char>('a' + random() % 3)));
    }
    const std::string block = encoder.Encode(fields);
    list_.Begin();
    for (size_t at = 0; at < block.size();) {
      const size_t run = std::min<size_t>(1 + random() % 40, block.size() - at);
      ASSERT_TRUE(list_.Read(Bytes({block.data() + at, run})));
      at += run;
    }
    ASSERT_TRUE(list_.whole());
    ASSERT_EQ(FieldsOf(list_), fields);
  }
}

}  // namespace
}  // namespace logitd::door
