// The gRPC server: services, health, reflection, on server/http2.
#ifndef LOGITD_SERVER_RPC_RPC_SERVER_H_
#define LOGITD_SERVER_RPC_RPC_SERVER_H_

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "server/arena/leases.h"
#include "server/arena/ring.h"
#include "server/door/door_metrics.h"
#include "server/door/identities.h"
#include "server/door/tls_context.h"
#include "server/engine/admission.h"
#include "server/engine/engine.h"
#include "server/engine/heads.h"
#include "server/engine/metrics.h"
#include "server/engine/places.h"
#include "server/http2/server.h"

namespace logitd::rpc {

struct RpcServerOptions {
  std::vector<std::string> listen;        // "host:port" (port 0 picks one) or "unix:PATH"
  std::optional<mode_t> socket_mode;      // of the files of Unix sockets; nullopt: by the umask
  std::vector<std::string> probe_listen;  // see ProbeServer; may be empty
  std::string version;
  std::string grpc_version;
  int64_t max_request_bytes = 0;                        // payload of a request; GetInfo reports it
  std::string head_root;                                // see HeadsService
  std::string remote_listen;                            // see HeadsService
  absl::Duration peer_timeout = absl::Seconds(30);      // to send a message, then to take an answer
  absl::Duration slow_call = absl::InfiniteDuration();  // see CallLog
  int loops = 1;                                        // event loops, one thread each
  http2::Limits limits;                                 // of a connection
  int64_t max_connections = 1024;
  int64_t max_connection_bytes = int64_t{256} << 20;  // http2::ServerOptions::max_held_bytes
  std::shared_ptr<door::DoorMetrics> door_metrics;    // null: none
  std::shared_ptr<const door::TlsSource> tls;         // null: no TLS
  // Who may call what; null: everybody everything. Outlives the server.
  const door::Identities* identities = nullptr;
  const arena::Leases* leases = nullptr;  // that requests may refer to; outlives the server
  engine::Places* places = nullptr;       // for large messages; outlives the server
  // See the flags of the same names. InfiniteDuration: never.
  absl::Duration max_connection_age = absl::InfiniteDuration();
  absl::Duration max_connection_idle = absl::InfiniteDuration();
  absl::Duration keepalive_time = absl::Minutes(1);
};

// Bytes of the largest message: a payload of `max_request_bytes` and the other fields of
// `max_batch_rows` rows.
int64_t MaxMessageBytes(int64_t max_request_bytes, int64_t max_batch_rows);

// Thread-safe.
class RpcServer {
 public:
  // Serves from here on. `admission` (its max_request_bytes is MaxMessageBytes), `engine` and
  // `heads` outlive the server. UNAVAILABLE names the address that it cannot listen on.
  static absl::StatusOr<std::unique_ptr<RpcServer>> Start(const RpcServerOptions& options,
                                                          engine::Admission* admission,
                                                          engine::Engine* engine,
                                                          engine::Heads* heads,
                                                          engine::Metrics* metrics);
  virtual ~RpcServer() = default;

  // The addresses of the options, with the ports that were bound.
  virtual const std::vector<std::string>& listening() const = 0;
  virtual const std::vector<std::string>& probes_listening() const = 0;

  // Sets what grpc.health.v1 answers for the server and for each service, and for "logitd.device.N"
  // of each device: a lost one is never serving.
  virtual void SetServing(bool serving) = 0;

  // Ends idle streams and loads of heads with UNAVAILABLE. A busy stream ends when the messages it
  // has read are answered. A unary call whose message has not arrived after `receive_timeout` ends
  // with UNAVAILABLE.
  virtual void Drain(absl::Duration receive_timeout) = 0;

  // The identities have changed: ends the streams of callers that may not call any longer.
  virtual void RecheckIdentities() = 0;

  // The function with which rings serve their calls; the rings end before the server does.
  virtual arena::ServeRing ring_service() = 0;

  // Calls of ops and loads of heads that are not over.
  virtual int calls() const = 0;

  virtual http2::Traffic traffic() const = 0;

  // While true, new connections are closed at once.
  virtual void RefuseConnections(bool refuse) = 0;

  // See HeadsService. The destructor waits until it is false.
  virtual bool loading() const = 0;

  // Stops listening, ends every connection and returns when no call runs. Peers see UNAVAILABLE for
  // calls that are not over and for calls they still send. The calls here see a cancel. Once.
  virtual void Shutdown() = 0;
};

}  // namespace logitd::rpc

#endif  // LOGITD_SERVER_RPC_RPC_SERVER_H_
