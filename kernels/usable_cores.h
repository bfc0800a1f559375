// How many cores the process may keep busy.
#ifndef LOGITD_KERNELS_USABLE_CORES_H_
#define LOGITD_KERNELS_USABLE_CORES_H_

#include <string>

namespace logitd {

// The least of what the affinity mask (`taskset`, a cpuset) and the quotas of the process's control
// groups (`docker run --cpus`, a Kubernetes limit) allow; a part of a core counts as one. At least
// 1.
int UsableCores();

// What the quotas allow, whatever the mask is; 0: there is none. `root` stands before /proc and
// /sys/fs/cgroup.
// Source: Linux, Documentation/admin-guide/cgroup-v2.rst (cpu.max).
int CoresOfQuota(const std::string& root);

}  // namespace logitd

#endif  // LOGITD_KERNELS_USABLE_CORES_H_
