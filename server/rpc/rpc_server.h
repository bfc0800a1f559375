// The gRPC server: services, health, reflection, on server/http2.
#ifndef LOGITD_SERVER_RPC_RPC_SERVER_H_
#define LOGITD_SERVER_RPC_RPC_SERVER_H_

#include <sys/types.h>

#include <cstdint>
#include <functional>
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
#include "server/engine/admission.h"
#include "server/engine/engine.h"
#include "server/engine/heads.h"
#include "server/engine/load.h"
#include "server/engine/metrics.h"
#include "server/engine/places.h"
#include "server/http2/server.h"
#include "server/rpc/heads_service.h"
#include "server/rpc/health_service.h"
#include "server/rpc/registry.h"
#include "server/rpc/services.h"
#include "server/rpc/transport/call_log.h"
#include "server/rpc/transport/call_tracker.h"
#include "server/rpc/transport/turn_jobs.h"

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
  absl::Duration slow_call = absl::InfiniteDuration();  // see CallLog
  http2::ServerOptions http2;  // a peer has `times.send` to send a message, too
  std::shared_ptr<door::DoorMetrics> door_metrics;  // null: none
  // Who may call what; null: everybody everything. Outlives the server.
  const door::Identities* identities = nullptr;
  const arena::Leases* leases = nullptr;  // that requests may refer to; outlives the server
  engine::Places* places = nullptr;       // for large messages; outlives the server
};

// Bytes of the largest message: a payload of `max_request_bytes` and the other fields of
// `max_batch_rows` rows.
int64_t MaxMessageBytes(int64_t max_request_bytes, int64_t max_batch_rows);

// Thread-safe.
class RpcServer final : private http2::ServerEvents {
 public:
  // Serves from here on. `admission` (its max_request_bytes is MaxMessageBytes), `engine` and
  // `heads` outlive the server. UNAVAILABLE names the address that it cannot listen on.
  static absl::StatusOr<std::unique_ptr<RpcServer>> Start(const RpcServerOptions& options,
                                                          engine::Admission* admission,
                                                          engine::Engine* engine,
                                                          engine::Heads* heads,
                                                          engine::Metrics* metrics);
  ~RpcServer() override {
    Shutdown();
    heads_.Join();  // while the loops are there, to which its last steps post
  }

  // The addresses of the options, with the ports that were bound.
  const std::vector<std::string>& listening() const { return server_.listening(); }
  const std::vector<std::string>& probes_listening() const { return probes_.listening(); }

  // Sets what grpc.health.v1 answers for the server and for each service, and for "logitd.device.N"
  // of each device: a lost one is never serving.
  void SetServing(bool serving);

  // Ends idle streams and loads of heads with UNAVAILABLE. A busy stream ends when the messages it
  // has read are answered. A unary call whose message has not arrived after `receive_timeout` ends
  // with UNAVAILABLE.
  void Drain(absl::Duration receive_timeout);

  // The identities have changed: ends the streams of callers that may not call any longer.
  void RecheckIdentities();

  // The function with which rings serve their calls; the rings end before the server does.
  arena::ServeRing ring_service() { return MakeRingService(environment_); }

  // Calls of ops and loads of heads that are not over.
  int calls() const { return tracker_.alive(); }

  http2::Traffic traffic() const { return server_.traffic(); }

  // While true, new connections are closed at once.
  void RefuseConnections(bool refuse) { server_.Refuse(refuse); }

  // See HeadsService. The destructor waits until it is false.
  bool loading() const { return heads_.loading(); }

  // Stops listening, ends every connection and returns when no call runs. Peers see UNAVAILABLE for
  // calls that are not over and for calls they still send. The calls here see a cancel. Once.
  void Shutdown();

 private:
  RpcServer(const RpcServerOptions& options, engine::Admission* admission, engine::Engine* engine,
            engine::Heads* heads, engine::Metrics* metrics);
  void EachCall(std::function<void(ServerCall*)> use);

  // http2::ServerEvents
  std::shared_ptr<http2::StreamEvents> OnStream(http2::Stream* stream) override;
  void OnOpen(int64_t open) override;
  void OnRefused() override;
  void OnCut(http2::Cut cut) override;
  void OnHandshake(http2::HandshakeEnd end) override;

  const std::shared_ptr<door::DoorMetrics> door_metrics_;  // null: none
  engine::Load load_;
  const CallLog log_;
  CallTracker tracker_;
  arena::Writer writer_;
  TurnJobs turn_jobs_;
  const CallEnvironment environment_;
  Registry registry_;
  std::vector<std::string> services_;
  HeadsService heads_;
  HealthService health_;
  ProbeServer probes_;
  http2::Server server_;  // ends first: its loops use the others
};

}  // namespace logitd::rpc

#endif  // LOGITD_SERVER_RPC_RPC_SERVER_H_
