// Metrics of connections, TLS and memory. Names are stable. Every series exists from the start.
//
// Counters
//   logitd_connections_cut_total{reason}  connections that the server ended; see docs/operations.md
//   logitd_connections_refused_total      connections closed as soon as they were accepted
//   logitd_messages_too_large_total       calls ended for a message larger than the server takes
// Gauges
//   logitd_connections, logitd_connections_limit  open connections, and the most there may be
//   logitd_resident_bytes, logitd_resident_bytes_limit
//                                         resident memory, and the limit of the last guard
//   logitd_connection_bytes_limit         the most that connections may hold
#ifndef LOGITD_SERVER_DOOR_DOOR_METRICS_H_
#define LOGITD_SERVER_DOOR_DOOR_METRICS_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>

#include "absl/time/time.h"
#include "absl/types/span.h"

namespace prometheus {
class Counter;
class Gauge;
class Registry;
}  // namespace prometheus

namespace logitd::door {

// Thread-safe.
class DoorMetrics {
 public:
  // Adds the series to `registry`, which has none of them yet. `reasons`: of OnCut.
  DoorMetrics(std::shared_ptr<prometheus::Registry> registry, int64_t max_connections,
              int64_t max_connection_bytes, absl::Span<const std::string_view> reasons);

  void OnOpen(int64_t open);
  void OnRefused();
  void OnCut(std::string_view reason);
  void OnTooLarge();
  void OnHandshake(std::string_view end);
  void SetResident(int64_t bytes, int64_t limit);

  // Adds the series of TLS. Before the first connection. `ends`: of OnHandshake.
  void AddTls(absl::Span<const std::string_view> ends);
  void SetCertificateExpiry(absl::Time expiry);
  // Adds the series of a file that is read again when it changes: "tls" or "tokens".
  void AddFile(const std::string& file);
  // The file was read again. `used`: the server uses what it holds now.
  void OnRead(const std::string& file, bool used);

 private:
  const std::shared_ptr<prometheus::Registry> registry_;
  prometheus::Gauge* open_;
  prometheus::Gauge* resident_;
  prometheus::Gauge* resident_limit_;
  prometheus::Counter* refused_;
  prometheus::Counter* too_large_;
  std::map<std::string_view, prometheus::Counter*> cut_;
  std::map<std::string_view, prometheus::Counter*> handshakes_;
  prometheus::Gauge* expiry_ = nullptr;
  struct FileSeries {
    prometheus::Gauge* stale;
    prometheus::Counter* used;
    prometheus::Counter* refused;
  };
  std::map<std::string, FileSeries> files_;
};

}  // namespace logitd::door

#endif  // LOGITD_SERVER_DOOR_DOOR_METRICS_H_
