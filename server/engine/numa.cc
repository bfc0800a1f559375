#include "server/engine/numa.h"

#include <algorithm>
#include <fstream>
#include <iterator>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace logitd::engine {
namespace {

constexpr int kMaxCpu = CPU_SETSIZE - 1;  // what the system call takes without more memory

// Empty where there is no such file.
std::string Read(const std::string& path) {
  std::ifstream file(path);
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  return std::string(absl::StripAsciiWhitespace(text));
}

}  // namespace

CpuSet ParseCpuList(std::string_view text) {
  CpuSet cpus;
  const std::vector<std::string> ranges = absl::StrSplit(std::string(text), ',');
  for (const std::string& range : ranges) {
    const std::vector<std::string> ends = absl::StrSplit(range, absl::MaxSplits('-', 1));
    int first = 0;
    int last = 0;
    if (!absl::SimpleAtoi(ends.front(), &first) || !absl::SimpleAtoi(ends.back(), &last) ||
        first < 0 || last < first || last > kMaxCpu) {
      return {};
    }
    for (int cpu = first; cpu <= last; ++cpu) cpus.push_back(cpu);
  }
  std::sort(cpus.begin(), cpus.end());
  return cpus;
}

int NumaNodes::NodeOf(std::string_view pci_bus_id) const {
  const size_t domain_end = pci_bus_id.find(':');
  if (domain_end == std::string_view::npos) return -1;
  // sysfs writes the domain with four digits, or more where it needs them.
  std::string_view domain = pci_bus_id.substr(0, domain_end);
  while (domain.size() > 4 && domain.front() == '0') domain.remove_prefix(1);
  const std::string address = absl::AsciiStrToLower(
      absl::StrCat(std::string(domain), std::string(pci_bus_id.substr(domain_end))));
  int node = -1;
  const std::string text = Read(absl::StrCat(root_, "/bus/pci/devices/", address, "/numa_node"));
  return absl::SimpleAtoi(text, &node) && node >= 0 ? node : -1;
}

CpuSet NumaNodes::CpusOf(int node) const {
  const std::string nodes = absl::StrCat(root_, "/devices/system/node/");
  if (node < 0 || ParseCpuList(Read(nodes + "online")).size() < 2) return {};
  return ParseCpuList(Read(absl::StrCat(nodes, "node", node, "/cpulist")));
}

CpuScope::CpuScope(const CpuSet& cpus) {
  if (cpus.empty()) return;
  cpu_set_t allowed;
  if (sched_getaffinity(0, sizeof(allowed), &allowed) != 0) return;
  cpu_set_t wanted;
  CPU_ZERO(&wanted);
  for (const int cpu : cpus) {
    if (CPU_ISSET(cpu, &allowed)) CPU_SET(cpu, &wanted);
  }
  if (CPU_COUNT(&wanted) == 0 || sched_setaffinity(0, sizeof(wanted), &wanted) != 0) return;
  before_ = allowed;
}

CpuScope::~CpuScope() {
  if (before_.has_value()) (void)sched_setaffinity(0, sizeof(*before_), &*before_);
}

}  // namespace logitd::engine
