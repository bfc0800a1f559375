// Memory that the process may use.
#ifndef LOGITD_SERVER_MEMORY_H_
#define LOGITD_SERVER_MEMORY_H_

#include <cstdint>
#include <string>

namespace logitd {

// The smaller of `machine_bytes` and the limits of the control groups (version 2) that the process
// is in: in a container, the container's. `proc` and `groups` are where the kernel shows them.
int64_t UsableMemory(int64_t machine_bytes, const std::string& proc = "/proc/self/cgroup",
                     const std::string& groups = "/sys/fs/cgroup");

}  // namespace logitd

#endif  // LOGITD_SERVER_MEMORY_H_
