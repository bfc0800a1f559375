// The text that a scrape of /metrics gets.
#ifndef LOGITD_SERVER_METRICS_PAGE_H_
#define LOGITD_SERVER_METRICS_PAGE_H_

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "kernels/backend.h"
#include "server/engine/metrics.h"
#include "server/rpc/rpc_server.h"

namespace logitd {

// Bytes of the server's connections, for a page that exists before the server does. Thread-safe.
class ServerTraffic {
 public:
  // From here on the server is asked; null: no longer.
  void Set(const rpc::RpcServer* server) {
    absl::MutexLock lock(&mutex_);
    if (server_ != nullptr) last_ = server_->traffic();
    server_ = server;
  }
  http2::Traffic Get() const {
    absl::MutexLock lock(&mutex_);
    return server_ == nullptr ? last_ : server_->traffic();
  }

 private:
  mutable absl::Mutex mutex_;
  const rpc::RpcServer* server_ ABSL_GUARDED_BY(mutex_) = nullptr;
  http2::Traffic last_ ABSL_GUARDED_BY(mutex_);
};

// The page's text: the series of `metrics`, to which this adds the build's, and those that are read
// when the page is asked for.
//
//   logitd_build_info{version,grpc,backend}  1
//   logitd_received_bytes_total, logitd_sent_bytes_total  of all connections
//   logitd_connection_bytes  that they hold beside messages that were admitted
//   logitd_log_lines_suppressed_total{source}             see log/limited.h
//   process_*                                             see process_metrics.h
//   logitd_device_*                                       see gpu_metrics.h; only with a GPU
// `devices`: at least one.
//
// The function may run on any thread, and keeps what it needs.
std::function<std::string()> MakeMetricsPage(const engine::Metrics& metrics,
                                             std::shared_ptr<const ServerTraffic> traffic,
                                             std::string_view version,
                                             std::string_view transport_version,
                                             const std::vector<DeviceInfo>& devices);

}  // namespace logitd

#endif  // LOGITD_SERVER_METRICS_PAGE_H_
