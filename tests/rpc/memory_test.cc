#include "server/memory.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <string>

namespace logitd {
namespace {

TEST(MemoryTest, TheLeastLimitOfTheGroupsAndTheMachineCounts) {
  const std::string root = ::testing::TempDir() + "/logitd_memory_test";
  std::filesystem::create_directories(root + "/a/b");
  const auto write = [&](const std::string& file, const std::string& text) {
    std::ofstream(root + "/" + file) << text;
  };
  write("proc", "1:cpu:/a\n0::/a/b\n");
  const auto usable = [&] { return UsableMemory(1000, root + "/proc", root); };
  EXPECT_EQ(usable(), 1000);
  write("a/b/memory.max", "max\n");
  EXPECT_EQ(usable(), 1000);
  write("a/memory.max", "700\n");
  EXPECT_EQ(usable(), 700);
  write("a/b/memory.max", "600\n");
  EXPECT_EQ(usable(), 600);
  write("memory.max", "500\n");  // a container sees its own group as the root
  EXPECT_EQ(usable(), 500);
  EXPECT_EQ(UsableMemory(1000, root + "/none", root), 1000);
  std::filesystem::remove_all(root);
}

}  // namespace
}  // namespace logitd
