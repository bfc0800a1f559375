#include "server/engine/numa.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <stdlib.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "server/engine/devices.h"
#include "tests/fake_backend.h"

namespace logitd::engine {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

// A folder like sysfs.
class NumaNodesTest : public ::testing::Test {
 protected:
  NumaNodesTest() {
    std::string made = ::testing::TempDir() + "/logitd_numa_XXXXXX";
    root_ = mkdtemp(made.data());
  }
  ~NumaNodesTest() override { std::filesystem::remove_all(root_); }

  void Write(const std::string& path, const std::string& text) {
    std::filesystem::create_directories(std::filesystem::path(root_ + path).parent_path());
    std::ofstream(root_ + path) << text << "\n";
  }

  void WriteTwoNodes() {
    Write("/devices/system/node/online", "0-1");
    Write("/devices/system/node/node0/cpulist", "0-2,8");
    Write("/devices/system/node/node1/cpulist", "4-6");
    Write("/bus/pci/devices/0000:1b:00.0/numa_node", "1");
    Write("/bus/pci/devices/10000:01:00.0/numa_node", "0");
    Write("/bus/pci/devices/0000:2c:00.0/numa_node", "-1");
  }

  std::string root_;
};

TEST_F(NumaNodesTest, FindsTheNodeOfADeviceByItsPciAddress) {
  WriteTwoNodes();
  const NumaNodes nodes(root_);
  EXPECT_EQ(nodes.NodeOf("00000000:1b:00.0"), 1);
  EXPECT_EQ(nodes.NodeOf("00000000:1B:00.0"), 1);  // sysfs has small letters
  EXPECT_EQ(nodes.NodeOf("00010000:01:00.0"), 0);
  EXPECT_EQ(nodes.NodeOf("00000000:2c:00.0"), -1);  // the firmware does not say
  EXPECT_EQ(nodes.NodeOf("00000000:77:00.0"), -1);
  EXPECT_EQ(nodes.NodeOf(""), -1);
}

TEST_F(NumaNodesTest, KnowsTheProcessorsOfANode) {
  WriteTwoNodes();
  const NumaNodes nodes(root_);
  EXPECT_THAT(nodes.CpusOf(0), ElementsAre(0, 1, 2, 8));
  EXPECT_THAT(nodes.CpusOf(1), ElementsAre(4, 5, 6));
  EXPECT_THAT(nodes.CpusOf(2), IsEmpty());
  EXPECT_THAT(nodes.CpusOf(-1), IsEmpty());
}

TEST_F(NumaNodesTest, OneNodeNeedsNoPlaces) {
  Write("/devices/system/node/online", "0");
  Write("/devices/system/node/node0/cpulist", "0-7");
  Write("/bus/pci/devices/0000:1b:00.0/numa_node", "0");
  EXPECT_THAT(NumaNodes(root_).CpusOf(0), IsEmpty());
  FakeBackend backend({.backend = "fake", .pci_bus_id = "00000000:1b:00.0"});
  const Devices devices({&backend}, NumaNodes(root_));
  EXPECT_EQ(devices.node(0), -1);
}

TEST_F(NumaNodesTest, ASystemWithoutSuchFilesHasNoNodes) {
  EXPECT_EQ(NumaNodes(root_).NodeOf("00000000:1b:00.0"), -1);
  EXPECT_THAT(NumaNodes(root_).CpusOf(0), IsEmpty());
}

TEST(CpuListTest, ReadsWhatTheKernelWritesAndNothingElse) {
  EXPECT_THAT(ParseCpuList("3"), ElementsAre(3));
  EXPECT_THAT(ParseCpuList("8-9,0-1,4"), ElementsAre(0, 1, 4, 8, 9));
  for (const char* bad : {"", "x", "1-", "-1", "3-1", "1,,2", "1-2-3", "99999999999", "0-4096"}) {
    EXPECT_THAT(ParseCpuList(bad), IsEmpty()) << bad;
  }
}

int AllowedCpus() {
  cpu_set_t set;
  EXPECT_EQ(sched_getaffinity(0, sizeof(set), &set), 0);
  return CPU_COUNT(&set);
}

TEST(CpuScopeTest, KeepsTheThreadThereUntilItEnds) {
  const int before = AllowedCpus();
  const int here = sched_getcpu();
  {
    const CpuScope scope({here, CPU_SETSIZE - 1});
    EXPECT_EQ(AllowedCpus(), 1);
    EXPECT_EQ(sched_getcpu(), here);
  }
  EXPECT_EQ(AllowedCpus(), before);
}

TEST(CpuScopeTest, DoesNothingWhereTheThreadMayUseNoneOfThem) {
  const int before = AllowedCpus();
  const CpuScope nowhere({CPU_SETSIZE - 1});
  EXPECT_EQ(AllowedCpus(), before);
  const CpuScope none({});
  EXPECT_EQ(AllowedCpus(), before);
}

}  // namespace
}  // namespace logitd::engine
