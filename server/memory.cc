#include "server/memory.h"

#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>

#include "absl/strings/match.h"
#include "absl/strings/str_format.h"
#include "server/rpc/rpc_server.h"

namespace logitd {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;
// Scratch of a CPU stream that uses a head.
constexpr int64_t kHeadScratch = 64 * kMiB;
// Parameters and padding of a row, in a slab.
constexpr int64_t kSlabRowBytes = 224;
// The program, its threads and the buffers of its loops, what malloc keeps.
constexpr int64_t kProcess = 200 * kMiB;

// Pinned memory for large messages, which stays.
constexpr int64_t kPinnedPlaces = 512 * kMiB;

}  // namespace

int64_t PlacesBytes(const Config& config, bool cpu) {
  return cpu ? config.max_held_bytes : std::min(config.max_held_bytes, kPinnedPlaces);
}

int64_t MachineMemory() { return int64_t{sysconf(_SC_PHYS_PAGES)} * sysconf(_SC_PAGESIZE); }

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

std::string HostMemory::Text(int64_t usable_bytes) const {
  const auto mib = [](int64_t bytes) { return (bytes + kMiB - 1) / kMiB; };
  return absl::StrFormat(
      "host memory: at most %d MiB of %d, which the process may use: slabs %d, messages %d, "
      "connections %d, heads %d, their scratch %d, leases %d, process %d%s",
      mib(Sum()), usable_bytes / kMiB, mib(slabs), mib(messages), mib(connections), mib(heads),
      mib(head_scratch), mib(leases), mib(process),
      Sum() <= usable_bytes ? "" : "; lower --max-head-bytes or --max-held-bytes");
}

HostMemory MostHostMemory(const Config& config, bool cpu, int devices, int64_t max_head_bytes) {
  const int64_t streams = int64_t{config.streams} * devices;
  HostMemory most = {
      .slabs = streams * (4 * config.slab_bytes + 2 * kSlabRowBytes * config.max_batch_rows),
      .messages = config.max_held_bytes,
      .connections = config.max_connection_bytes,
      .process = kProcess};
  if (cpu) {
    most.heads = max_head_bytes * devices;
    most.head_scratch = streams * kHeadScratch;
  } else {
    most.slabs += PlacesBytes(config, cpu);
  }
  if (!config.arena_listen.empty()) most.leases = config.max_arena_bytes;
  return most;
}

}  // namespace logitd
