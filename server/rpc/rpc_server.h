// The gRPC server: services, health, reflection, limits of the transport.
#ifndef LOGITD_SERVER_RPC_RPC_SERVER_H_
#define LOGITD_SERVER_RPC_RPC_SERVER_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "kernels/backend.h"
#include "server/engine/admission.h"
#include "server/engine/engine.h"
#include "server/engine/heads.h"
#include "server/engine/metrics.h"

namespace logitd::rpc {

struct RpcServerOptions {
  std::vector<std::string> listen;  // "host:port" (port 0 picks one) or "unix:PATH"
  std::string version;
  int64_t max_request_bytes = 0;                    // payload; also what GetInfo says
  std::string head_root;                            // see HeadsService
  absl::Duration peer_timeout = absl::Seconds(30);  // to send a message, and to take an answer
};

// Largest message for a payload of `max_request_bytes`: the other fields of the largest batch fit
// beside it.
int64_t MaxMessageBytes(int64_t max_request_bytes, int64_t max_batch_rows);

// Thread-safe.
class RpcServer {
 public:
  // Serves from here on. `admission` (whose max_request_bytes is that of MaxMessageBytes), `engine`
  // and `heads` outlive it. INVALID_ARGUMENT or UNAVAILABLE naming the address that cannot be
  // listened on.
  static absl::StatusOr<std::unique_ptr<RpcServer>> Start(
      const RpcServerOptions& options, const DeviceInfo& device, engine::Admission* admission,
      engine::Engine* engine, engine::Heads* heads, engine::Metrics* metrics);
  virtual ~RpcServer() = default;

  // As asked for, with the ports that were bound.
  virtual const std::vector<std::string>& listening() const = 0;

  // What grpc.health.v1 answers, for the server and for each service.
  virtual void SetServing(bool serving) = 0;

  // Streams that wait for their peers are ended, with UNAVAILABLE, and so are loads of heads; busy
  // streams when what was read is answered.
  virtual void Drain() = 0;

  // Calls of ops, and loads of heads, that are not over.
  virtual int calls() const = 0;

  // See HeadsService. The destructor waits for it.
  virtual bool loading() const = 0;

  // Stops listening, hangs up on every peer and returns when nothing runs. To the peers, a call
  // that is not over, or still comes, is UNAVAILABLE; to calls here it is as if their callers had
  // gone. Once.
  virtual void Shutdown() = 0;
};

}  // namespace logitd::rpc

#endif  // LOGITD_SERVER_RPC_RPC_SERVER_H_
