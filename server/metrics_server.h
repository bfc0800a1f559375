// The HTTP server of /metrics.
#ifndef LOGITD_SERVER_METRICS_SERVER_H_
#define LOGITD_SERVER_METRICS_SERVER_H_

#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "server/door/address.h"

namespace logitd {

// Answers GET and HEAD of /metrics, another path with 404, another method with 405.
//
// One thread serves all connections and waits for none of them: a peer that sends half a request,
// or takes no answer, costs only its connection. At most kConnections are open: a further one
// closes the oldest, so peers that hold connections open do not keep a new one out. A connection
// on which nothing moves for ten seconds is closed.
//
// Thread-safe. The destructor closes every connection and does not wait for peers.
class MetricsServer {
 public:
  static constexpr int kConnections = 64;

  // `page` makes the text of a page, on the server's thread; it must be valid while the server is.
  // UNAVAILABLE: it cannot listen there, and why. `address` has a host.
  static absl::StatusOr<std::unique_ptr<MetricsServer>> Start(const door::Address& address,
                                                              std::function<std::string()> page);
  virtual ~MetricsServer() = default;

  // The port that was bound.
  virtual int port() const = 0;
};

}  // namespace logitd

#endif  // LOGITD_SERVER_METRICS_SERVER_H_
