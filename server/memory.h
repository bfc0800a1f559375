// Memory that the process may use, and memory that it may need.
#ifndef LOGITD_SERVER_MEMORY_H_
#define LOGITD_SERVER_MEMORY_H_

#include <cstdint>
#include <string>

#include "server/config.h"

namespace logitd {

// Memory of the machine, in bytes.
int64_t MachineMemory();

// The smaller of `machine_bytes` and the limits of the control groups (version 2) that the process
// is in: in a container, the container's. `proc` and `groups` are where the kernel shows them.
int64_t UsableMemory(int64_t machine_bytes, const std::string& proc = "/proc/self/cgroup",
                     const std::string& groups = "/sys/fs/cgroup");

// The most host memory of a server, in bytes, by what it is for: the sum of docs/operations.md,
// "Memory".
struct HostMemory {
  int64_t slabs = 0;     // and for GPUs PlacesBytes
  int64_t messages = 0;  // charged to calls: messages, their lists, answers
  int64_t connections =
      0;              // http2::Account of all: sessions, header lists, early bytes, unsent answers
  int64_t heads = 0;  // on the CPU
  int64_t head_scratch = 0;  // of the CPU's streams that use a head
  int64_t leases = 0;        // pinned for a GPU; on the CPU pages that only the server has written
  int64_t process = 0;       // without what CUDA takes

  int64_t Sum() const {
    return slabs + messages + connections + heads + head_scratch + leases + process;
  }
  // "host memory: at most ... MiB of ..., which the process may use: ...", with each part in MiB.
  std::string Text(int64_t usable_bytes) const;
};

// The range of engine::Places. On the CPU its memory is what `messages` counts; for GPUs it is
// pinned.
int64_t PlacesBytes(const Config& config, bool cpu);

// `cpu`: the devices are the CPU backend's. `max_head_bytes`: of each device.
HostMemory MostHostMemory(const Config& config, bool cpu, int devices, int64_t max_head_bytes);

}  // namespace logitd

#endif  // LOGITD_SERVER_MEMORY_H_
