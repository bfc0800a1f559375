#include "kernels/usable_cores.h"

#include <sched.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <limits>
#include <thread>

namespace logitd {
namespace {

// The cores that a group's cpu.max allows, "QUOTA PERIOD" in microseconds; infinite without a
// quota.
double CoresOf(const std::filesystem::path& group) {
  std::ifstream file(group / "cpu.max");
  double quota = 0;
  double period = 0;
  // "max" is no number.
  if (!(file >> quota >> period) || quota <= 0 || period <= 0) {
    return std::numeric_limits<double>::infinity();
  }
  return quota / period;
}

}  // namespace

int CoresOfQuota(const std::string& root) {
  const std::filesystem::path all = root + "/sys/fs/cgroup";
  std::ifstream groups(root + "/proc/self/cgroup");
  double cores = std::numeric_limits<double>::infinity();
  for (std::string line; std::getline(groups, line);) {
    if (line.rfind("0::/", 0) != 0) continue;  // a hierarchy of version 1
    // A group's quota holds for the groups in it too.
    for (std::filesystem::path group = line.substr(4);; group = group.parent_path()) {
      cores = std::min(cores, CoresOf(all / group));
      if (group.empty()) break;
    }
  }
  return std::isinf(cores) ? 0 : static_cast<int>(std::min(std::ceil(cores), 1e6));
}

int UsableCores() {
  int cores = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  cpu_set_t set;
  CPU_ZERO(&set);
  // It fails where there are more cores than a cpu_set_t names.
  if (sched_getaffinity(0, sizeof(set), &set) == 0) cores = std::max(1, CPU_COUNT(&set));
  const int quota = CoresOfQuota("");
  return quota > 0 ? std::min(cores, quota) : cores;
}

}  // namespace logitd
