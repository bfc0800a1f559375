#include "kernels/usable_cores.h"

#include <gtest/gtest.h>
#include <sched.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <thread>

namespace logitd {
namespace {

class UsableCoresTest : public ::testing::Test {
 protected:
  UsableCoresTest() : root_(::testing::TempDir() + "/cores") {
    std::filesystem::remove_all(root_);
    Write("/proc/self/cgroup", "0::/pod/container\n");
  }
  ~UsableCoresTest() override { std::filesystem::remove_all(root_); }

  void Write(const std::string& path, const std::string& text) {
    std::filesystem::create_directories(std::filesystem::path(root_ + path).parent_path());
    std::ofstream(root_ + path) << text;
  }

  const std::string root_;
};

TEST_F(UsableCoresTest, WithoutAQuotaThereIsNone) {
  EXPECT_EQ(CoresOfQuota(root_), 0) << "no control groups";
  Write("/sys/fs/cgroup/pod/container/cpu.max", "max 100000\n");
  EXPECT_EQ(CoresOfQuota(root_), 0);
  Write("/sys/fs/cgroup/pod/container/cpu.max", "");
  EXPECT_EQ(CoresOfQuota(root_), 0);
  Write("/proc/self/cgroup", "4:cpu,cpuacct:/pod\n");
  Write("/sys/fs/cgroup/pod/cpu.max", "100000 100000\n");
  EXPECT_EQ(CoresOfQuota(root_), 0) << "a hierarchy of version 1";
}

TEST_F(UsableCoresTest, TheSmallestQuotaOfTheGroupAndThoseAroundItCounts) {
  Write("/sys/fs/cgroup/pod/container/cpu.max", "250000 100000\n");
  EXPECT_EQ(CoresOfQuota(root_), 3) << "a part of a core counts as one";
  Write("/sys/fs/cgroup/pod/cpu.max", "200000 100000\n");
  EXPECT_EQ(CoresOfQuota(root_), 2);
  Write("/sys/fs/cgroup/cpu.max", "50000 100000\n");
  EXPECT_EQ(CoresOfQuota(root_), 1) << "as a container sees its own group";
}

TEST_F(UsableCoresTest, AContainerSeesItsGroupAsTheRoot) {
  Write("/proc/self/cgroup", "0::/\n");
  Write("/sys/fs/cgroup/cpu.max", "400000 100000\n");
  EXPECT_EQ(CoresOfQuota(root_), 4);
}

TEST_F(UsableCoresTest, TheAffinityMaskCounts) {
  EXPECT_GE(UsableCores(), 1);
  EXPECT_LE(UsableCores(), static_cast<int>(std::thread::hardware_concurrency()));
  std::thread([] {
    cpu_set_t set;
    ASSERT_EQ(sched_getaffinity(0, sizeof(set), &set), 0);
    const int first = [&] {
      int i = 0;
      while (!CPU_ISSET(i, &set)) ++i;
      return i;
    }();
    CPU_ZERO(&set);
    CPU_SET(first, &set);
    ASSERT_EQ(sched_setaffinity(0, sizeof(set), &set), 0);
    EXPECT_EQ(UsableCores(), 1);
  }).join();
}

}  // namespace
}  // namespace logitd
