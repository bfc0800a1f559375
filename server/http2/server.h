// The loops, what listens, and all connections of a server.
#ifndef LOGITD_SERVER_HTTP2_SERVER_H_
#define LOGITD_SERVER_HTTP2_SERVER_H_

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"
#include "server/door/tls_context.h"
#include "server/http2/connection.h"
#include "server/http2/limits.h"
#include "server/http2/listener.h"
#include "server/http2/loop.h"
#include "server/http2/stream.h"

namespace logitd::http2 {

struct ServerOptions {
  int loops = 1;
  int first_loop = 0;  // the number of the first; others count on
  Limits limits;
  Times times;
  // An origin (PeerInfo::origin) may have about half of them: as many as are left for others.
  int64_t max_connections = 1024;
  // The most that all connections hold beside admitted bodies: the sum of Account::held. Beyond 7/8
  // of it connections are closed: of the origin that holds most without moving, the one that does.
  int64_t max_held_bytes = int64_t{256} << 20;
  // TLS handshakes that are not finished. Each loop has its part of them; one more there ends the
  // oldest that has sent nothing, or else the oldest.
  int64_t max_handshakes = 512;
  std::shared_ptr<const door::TlsSource> tls;  // of connections over TCP; null: none
};

// The layer above, as the server sees it. Called on the loop of the connection, or the listener's.
class ServerEvents {
 public:
  virtual ~ServerEvents() = default;
  // See ConnectionHost::OnStream.
  virtual std::shared_ptr<StreamEvents> OnStream(Stream* stream) = 0;
  virtual void OnOpen(int64_t /*open*/) {}
  virtual void OnRefused() {}  // closed as soon as it was accepted
  virtual void OnCut(Cut /*cut*/) {}
  virtual void OnHandshake(HandshakeEnd /*end*/) {}
};

// Bytes of all connections.
struct Traffic {
  int64_t received = 0;  // since the start, and
  int64_t sent = 0;
  int64_t held = 0;  // now: Account::held
};

// Methods from one thread, except those that say "any thread".
class Server {
 public:
  // `events` outlives it.
  Server(const ServerOptions& options, ServerEvents* events);
  // Calls Shutdown.
  ~Server();
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;

  // See Listener::Listen.
  absl::Status Listen(absl::Span<const std::string> addresses, std::optional<mode_t> unix_mode);
  const std::vector<std::string>& listening() const { return listener_.listening(); }
  // Starts the loops, which accept from here on.
  void Start();
  // Connections take no more streams, and close when theirs have ended. New ones are still
  // accepted: their calls learn from the layer above that the server drains.
  void Drain();
  // Stops listening, closes all connections and ends the loops.
  void Shutdown();

  // Runs `use` on every loop, with its number, later.
  void OnEachLoop(const std::function<void(int loop)>& use);

  // While true, new connections are closed at once. Any thread.
  void Refuse(bool refuse) { refuse_ = refuse; }
  // Any thread.
  int64_t open() const;
  int64_t held_bytes() const { return held_.load(std::memory_order_relaxed); }
  Traffic traffic() const;
  int loops() const { return static_cast<int>(hosts_.size()); }

 private:
  class Host;

  void Accept(int fd, const sockaddr_storage& address, socklen_t length);
  bool Enter(const PeerInfo& peer);
  void Leave(const Connection& connection);
  struct Still;
  void Guard();
  void CutStillest(std::vector<Still> all);

  const ServerOptions options_;
  ServerEvents* const events_;
  std::atomic<int64_t> held_ = 0;
  std::atomic<bool> refuse_ = false;
  std::vector<std::unique_ptr<Host>> hosts_;
  Listener listener_;
  std::unique_ptr<Timer> guard_;
  uint64_t last_id_ = 0;  // of the listener's loop
  bool running_ = false;

  mutable absl::Mutex mutex_;
  int64_t open_ ABSL_GUARDED_BY(mutex_) = 0;
  absl::flat_hash_map<std::string, int64_t> by_origin_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace logitd::http2

#endif  // LOGITD_SERVER_HTTP2_SERVER_H_
