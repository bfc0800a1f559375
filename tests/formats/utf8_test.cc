#include "formats/utf8.h"

#include <gtest/gtest.h>

#include <string>

namespace logitd::formats {
namespace {

TEST(Utf8Test, EveryCharacterIsReadInItsOneForm) {
  struct Case {
    const char* bytes;
    uint32_t code;
  };
  for (const Case& test : {Case{"a", 'a'},
                           {"\x7f", 0x7f},
                           {"\xc2\x80", 0x80},
                           {"\xdf\xbf", 0x7ff},
                           {"\xe0\xa0\x80", 0x800},
                           {"\xed\x9f\xbf", 0xd7ff},
                           {"\xee\x80\x80", 0xe000},
                           {"\xef\xbf\xbf", 0xffff},
                           {"\xf0\x90\x80\x80", 0x10000},
                           {"\xf4\x8f\xbf\xbf", 0x10ffff}}) {
    uint32_t code = 0;
    EXPECT_EQ(ReadUtf8(std::string(test.bytes) + "z", &code), std::string(test.bytes).size());
    EXPECT_EQ(code, test.code);
    EXPECT_TRUE(IsUtf8(test.bytes));
  }
  EXPECT_TRUE(IsUtf8(""));
  EXPECT_TRUE(IsUtf8(std::string(1, '\0')));
}

TEST(Utf8Test, OtherBytesAreRefused) {
  for (const char* bytes :
       {"\x80", "\xbf", "\xc0\x80", "\xc1\xbf", "\xc2", "\xc2z", "\xe0\x9f\xbf", "\xe2\x82",
        "\xed\xa0\x80", "\xed\xbf\xbf", "\xf0\x8f\xbf\xbf", "\xf4\x90\x80\x80",
        "\xf8\x88\x80\x80\x80", "\xfe", "\xff", "good\xff"}) {
    EXPECT_FALSE(IsUtf8(bytes)) << std::string(bytes).size();
  }
}

}  // namespace
}  // namespace logitd::formats
