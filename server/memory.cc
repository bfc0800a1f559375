#include "server/memory.h"

#include <algorithm>
#include <filesystem>
#include <fstream>

#include "absl/strings/match.h"

namespace logitd {

int64_t UsableMemory(int64_t machine_bytes, const std::string& proc, const std::string& groups) {
  int64_t least = machine_bytes;
  std::ifstream file(proc);
  for (std::string line; std::getline(file, line);) {
    if (!absl::StartsWith(line, "0::/")) continue;  // "0::" is version 2
    // A group's limit holds for the groups in it.
    for (std::filesystem::path group = line.substr(3);; group = group.parent_path()) {
      int64_t limit = 0;
      if (std::ifstream(groups + group.string() + "/memory.max") >> limit) {
        least = std::min(least, limit);
      }
      if (group == group.parent_path()) break;
    }
  }
  return least;
}

}  // namespace logitd
