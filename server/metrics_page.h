// What a scrape of /metrics gets.
#ifndef LOGITD_SERVER_METRICS_PAGE_H_
#define LOGITD_SERVER_METRICS_PAGE_H_

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/backend.h"
#include "server/door/connection.h"

namespace prometheus {
class Registry;
}

namespace logitd {

// The page's text: the series of `registry`, to which this adds the build's, and those that are
// read when the page is asked for.
//
//   logitd_build_info{version,grpc,backend}  1
//   logitd_received_bytes_total, logitd_sent_bytes_total  of all connections
//   logitd_log_lines_suppressed_total{source}             see log/limited.h
//   process_*                                             see process_metrics.h
//   logitd_device_*                                       see gpu_metrics.h; only with a GPU
// `devices`: at least one.
//
// The function may run on any thread, and keeps what it needs.
std::function<std::string()> MakeMetricsPage(std::shared_ptr<prometheus::Registry> registry,
                                             std::shared_ptr<const door::Connections> connections,
                                             std::string_view version,
                                             std::string_view grpc_version,
                                             const std::vector<DeviceInfo>& devices);

}  // namespace logitd

#endif  // LOGITD_SERVER_METRICS_PAGE_H_
