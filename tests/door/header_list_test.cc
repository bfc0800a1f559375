#include "server/door/header_list.h"

#include <gtest/gtest.h>

#include <string>

#include "tests/door/bytes.h"

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

}  // namespace
}  // namespace logitd::door
