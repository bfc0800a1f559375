// Metrics of what the process uses of its machine: the series that Prometheus' own client libraries
// name.
#ifndef LOGITD_SERVER_PROCESS_METRICS_H_
#define LOGITD_SERVER_PROCESS_METRICS_H_

#include <vector>

#include "prometheus/metric_family.h"

namespace logitd {

//   process_cpu_seconds_total       user and system time
//   process_resident_memory_bytes, process_virtual_memory_bytes
//   process_open_fds, process_max_fds
//   process_start_time_seconds      since the epoch
// Series that cannot be read are left out. Any thread.
std::vector<prometheus::MetricFamily> ProcessMetrics();

}  // namespace logitd

#endif  // LOGITD_SERVER_PROCESS_METRICS_H_
