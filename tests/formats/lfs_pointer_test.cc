#include "formats/lfs_pointer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

namespace logitd::formats {
namespace {

TEST(LfsPointerTest, APointerIsRefusedWithWhatToDo) {
  for (const char* text :
       {"version https://git-lfs.github.com/spec/v1\noid "
        "sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f"
        "32b1258daaa5e2ca24d17e2393\nsize 12345\n",
        "version https://git-lfs.github.com/spec/v1\next-0-foo sha256:4d7a\noid sha256:4d7a\nsize "
        "1\n",
        "version https://git-lfs.github.com/spec/v1\r\noid",
        "version https://hawser.github.com/spec/v1\noid sha256:4d7a\nsize 1\n"}) {
    const absl::Status status = CheckNoLfsPointer("m/model.safetensors", text);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << text;
    EXPECT_THAT(
        std::string(status.message()),
        ::testing::HasSubstr("m/model.safetensors: got a Git LFS pointer, allowed the file"));
  }
}

TEST(LfsPointerTest, AnyOtherTextIsNone) {
  for (const char* text :
       {"", "version", "version ", "{\"version\": \"https://git-lfs.github.com\"}",
        " version https://git-lfs.github.com/spec/v1"}) {
    EXPECT_TRUE(CheckNoLfsPointer("f", text).ok()) << text;
  }
}

}  // namespace
}  // namespace logitd::formats
