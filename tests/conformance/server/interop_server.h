// The service of gRPC's interoperability cases, on server/http2 and server/rpc: a test of gRPC's
// wire that needs no engine. interop.proto has what it serves.
#ifndef LOGITD_TESTS_CONFORMANCE_SERVER_INTEROP_SERVER_H_
#define LOGITD_TESTS_CONFORMANCE_SERVER_INTEROP_SERVER_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "server/door/tls_context.h"
#include "server/http2/server.h"
#include "server/rpc/registry.h"
#include "server/rpc/transport/call_tracker.h"

namespace logitd::conformance {

// Methods from one thread, except those that say "any thread".
class InteropServer final : private http2::ServerEvents {
 public:
  // `tls`: of connections over TCP; null: none.
  explicit InteropServer(std::shared_ptr<const door::TlsSource> tls = nullptr);
  // Does what Shutdown does.
  ~InteropServer() override;

  // Serves from here on: "host:port" (port 0 picks one). Once.
  absl::Status Start(const std::string& address);
  const std::string& listening() const { return server_.listening().front(); }
  void Shutdown();

  // Any thread. All are 0 when no client has a connection.
  int calls() const { return tracker_.alive(); }
  int64_t connections() const { return server_.open(); }
  int64_t held_bytes() const { return server_.held_bytes(); }
  // Connections that the server has cut.
  int64_t cuts() const { return cuts_; }

 private:
  std::shared_ptr<http2::StreamEvents> OnStream(http2::Stream* stream) override {
    return registry_.Start(stream, tracker_);
  }
  void OnCut(http2::Cut) override { ++cuts_; }

  rpc::CallTracker tracker_;
  rpc::Registry registry_;
  std::atomic<int64_t> cuts_ = 0;
  http2::Server server_;  // ends first: its loops use the others
};

}  // namespace logitd::conformance

#endif  // LOGITD_TESTS_CONFORMANCE_SERVER_INTEROP_SERVER_H_
