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

int64_t InMiB(int64_t bytes) { return bytes >> 20; }

TEST(MemoryTest, TheSumOfAServerOnTheCpu) {
  const HostMemory most = MostHostMemory({}, /*cpu=*/true, /*devices=*/1, int64_t{2048} << 20);
  EXPECT_EQ(InMiB(most.slabs), 568);
  EXPECT_EQ(InMiB(most.messages), 1024);
  EXPECT_EQ(InMiB(most.connections), 256);
  EXPECT_EQ(InMiB(most.heads), 2048);
  EXPECT_EQ(InMiB(most.head_scratch), 128);
  EXPECT_EQ(InMiB(most.leases), 0);
  EXPECT_EQ(InMiB(most.Sum()), 568 + 1024 + 256 + 2048 + 128 + 200);
}

TEST(MemoryTest, TheSumOfAServerOnGpusHasNoHeadsAndAnyHasItsLeases) {
  Config config;
  EXPECT_EQ(MostHostMemory(config, /*cpu=*/false, 8, int64_t{1} << 62).Sum(),
            int64_t{8 * 568 + 512 + 1024 + 256 + 200} << 20);
  config.arena_listen = "unix:/run/arena";
  EXPECT_EQ(MostHostMemory(config, /*cpu=*/false, 8, int64_t{1} << 62).Sum(),
            int64_t{8 * 568 + 512 + 1024 + 256 + 200 + 1024} << 20);
  EXPECT_EQ(InMiB(MostHostMemory(config, /*cpu=*/true, 2, int64_t{100} << 20).Sum()),
            2 * 568 + 1024 + 256 + 2 * 100 + 2 * 128 + 200 + 1024);
}

TEST(MemoryTest, ASumThatDoesNotFitSaysWhatHelps) {
  const HostMemory most = MostHostMemory({}, /*cpu=*/true, 1, int64_t{2048} << 20);
  const std::string sum =
      ", which the process may use: slabs 568, messages 1024, connections 256, heads 2048, "
      "their scratch 128, leases 0, process 200";
  EXPECT_EQ(most.Text(int64_t{4224} << 20), "host memory: at most 4224 MiB of 4224" + sum);
  EXPECT_EQ(most.Text(int64_t{4096} << 20), "host memory: at most 4224 MiB of 4096" + sum +
                                                "; lower --max-head-bytes or --max-held-bytes");
}

}  // namespace
}  // namespace logitd
