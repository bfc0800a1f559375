// Which names of calls are taken, and which are ignored.
#include "formats/trace_context.h"

#include <gtest/gtest.h>

#include <string>

namespace logitd::formats {
namespace {

constexpr char kParent[] = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

TEST(TraceTest, ARequestIdIsVisibleAsciiOfBoundedLength) {
  EXPECT_TRUE(IsRequestId("7"));
  EXPECT_TRUE(IsRequestId("01890a5d-ac96-774b-bcce-b302099a8057"));
  EXPECT_TRUE(IsRequestId("!\"=\\~"));
  EXPECT_TRUE(IsRequestId(std::string(128, 'x')));
  EXPECT_FALSE(IsRequestId(""));
  EXPECT_FALSE(IsRequestId(std::string(129, 'x')));
  EXPECT_FALSE(IsRequestId("a b"));
  EXPECT_FALSE(IsRequestId("a\n"));
  EXPECT_FALSE(IsRequestId("\x7f"));
  EXPECT_FALSE(IsRequestId("caf\xc3\xa9"));
  EXPECT_FALSE(IsRequestId(std::string_view("a\0b", 3)));
}

TEST(TraceTest, ATraceparentOfVersion00HasOneForm) {
  EXPECT_TRUE(IsTraceparent(kParent));
  EXPECT_TRUE(IsTraceparent("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-ff"));
  for (const char* wrong : {
           "",
           "00",
           "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331",      // no flags
           "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-1",    // cut
           "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01-",  // more than 00 has
           "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01-x",
           "00-0AF7651916CD43DD8448EB211C80319C-b7ad6b7169203331-01",  // upper case
           "00-0af7651916cd43dd8448eb211c80319g-b7ad6b7169203331-01",  // not a digit
           "00_0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
           "00-0af7651916cd43dd8448eb211c80319c_b7ad6b7169203331-01",
           "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331_01",
           "00-00000000000000000000000000000000-b7ad6b7169203331-01",
           "00-0af7651916cd43dd8448eb211c80319c-0000000000000000-01",
           "ff-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
           " 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-0",
       }) {
    EXPECT_FALSE(IsTraceparent(wrong)) << wrong;
  }
}

TEST(TraceTest, ALaterVersionMayHaveMore) {
  const std::string later = "cc" + std::string(kParent).substr(2);
  EXPECT_TRUE(IsTraceparent(later));
  EXPECT_TRUE(IsTraceparent(later + "-what-the-future-will-be-like"));
  EXPECT_FALSE(IsTraceparent(later + ".what-the-future-will-be-like"));
  EXPECT_FALSE(IsTraceparent(later + "-a b"));
  EXPECT_TRUE(IsTraceparent(later + "-" + std::string(128 - later.size() - 1, 'x')));
  EXPECT_FALSE(IsTraceparent(later + "-" + std::string(128 - later.size(), 'x')));
}

}  // namespace
}  // namespace logitd::formats
