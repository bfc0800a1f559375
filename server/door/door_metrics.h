// What an operator sees of connections and memory. Names are stable. Every series exists from the
// start.
//
// Counters
//   logitd_connections_cut_total{reason}  connections that broke a limit; see kLimitNames
//   logitd_connections_refused_total      connections closed as soon as they were accepted
//   logitd_messages_too_large_total       calls ended for a message larger than the server takes
// Gauges
//   logitd_connections, logitd_connections_limit  open connections, and the most there may be
//   logitd_resident_bytes, logitd_resident_bytes_limit
//                                         resident memory, and the most that the watch allows
#ifndef LOGITD_SERVER_DOOR_DOOR_METRICS_H_
#define LOGITD_SERVER_DOOR_DOOR_METRICS_H_

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "absl/time/time.h"

#include "server/door/connection.h"
#include "server/door/limits.h"

namespace prometheus {
class Counter;
class Gauge;
class Registry;
}  // namespace prometheus

namespace logitd::door {

// Thread-safe.
class DoorMetrics final : public ConnectionEvents {
 public:
  // Adds the series to `registry`, which has none of them yet.
  DoorMetrics(std::shared_ptr<prometheus::Registry> registry, int64_t max_connections);

  void OnOpen(int64_t open) override;
  void OnRefused() override;
  void OnCut(Limit reason) override;
  void OnTooLarge(int64_t calls) override;
  void OnHandshake(HandshakeEnd end) override;
  void SetResident(int64_t bytes, int64_t limit);

  // Adds the series of TLS. Before the first connection.
  void AddTls();
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
  std::array<prometheus::Counter*, kLimitNames.size()> cut_;
  std::array<prometheus::Counter*, kHandshakeEndNames.size()> handshakes_ = {};
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
