// Which processors and which memory are near a device, where a system has several nodes.
#ifndef LOGITD_SERVER_ENGINE_NUMA_H_
#define LOGITD_SERVER_ENGINE_NUMA_H_

#include <sched.h>

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace logitd::engine {

using CpuSet = std::vector<int>;  // numbers of processors, ascending

// "0-3,8,10-11", as the kernel writes it. Empty: the text is not such a list.
CpuSet ParseCpuList(std::string_view text);

// The nodes of the system, as sysfs describes them. Immutable.
class NumaNodes {
 public:
  // `root`: where sysfs is mounted.
  explicit NumaNodes(std::string root = "/sys") : root_(std::move(root)) {}

  // The node of a PCI device ("00000000:1b:00.0"); -1: the system does not say.
  int NodeOf(std::string_view pci_bus_id) const;

  // The processors of a node. Empty: there is no such node, or only one node.
  CpuSet CpusOf(int node) const;

 private:
  const std::string root_;
};

// Keeps the calling thread on some processors until it is destroyed. Memory that the thread
// allocates and first writes meanwhile is near them; so is memory that a driver pins for it. Does
// nothing where `cpus` is empty, where the thread may use none of them, or where the system
// refuses.
class CpuScope {
 public:
  explicit CpuScope(const CpuSet& cpus);
  ~CpuScope();
  CpuScope(const CpuScope&) = delete;
  CpuScope& operator=(const CpuScope&) = delete;

 private:
  std::optional<cpu_set_t> before_;
};

}  // namespace logitd::engine

#endif  // LOGITD_SERVER_ENGINE_NUMA_H_
