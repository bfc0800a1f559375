// The socket on which clients lease arenas. formats/arena_protocol.h has the protocol.
#ifndef LOGITD_SERVER_ARENA_ARENA_SERVER_H_
#define LOGITD_SERVER_ARENA_ARENA_SERVER_H_

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "server/arena/leases.h"
#include "server/arena/ring.h"
#include "server/base/clock.h"
#include "server/door/address.h"
#include "server/door/listening_socket.h"

namespace prometheus {
class Counter;
class Gauge;
class Registry;
}  // namespace prometheus

namespace logitd::arena {

struct ArenaServerOptions {
  door::Address address;  // a Unix socket
  // Permissions of the socket's file, which say who may connect.
  mode_t mode = 0600;
  // OK: this user may lease. The socket's file has already let it in.
  std::function<absl::Status(uid_t)> check_user = [](uid_t) { return absl::OkStatus(); };
  // A peer that has connected must ask within this time.
  absl::Duration ask_timeout = absl::Seconds(5);
  Clock* clock = &SteadyClock();  // of that time, and of the rings; outlives the server
};

// Serves leases with one thread. Every connection is watched until it ends, and its lease with it.
// Nothing waits for a peer. Only a few peers that have not asked yet may be connected. One more
// closes the oldest of them, so silent peers do not keep others out.
//
// A lease may have a ring (ring.h), which ends with it.
//
// Counters  logitd_arena_leases_total, logitd_arena_refused_total, logitd_arena_rings_total
// Gauges    logitd_arena_leases, logitd_arena_bytes, logitd_arena_bytes_limit,
//           logitd_arena_leaving_bytes, logitd_arena_device_bytes, logitd_arena_rings
class ArenaServer {
 public:
  // `leases` outlives the server. UNAVAILABLE: cannot listen there, or cannot write into leases.
  static absl::StatusOr<std::unique_ptr<ArenaServer>> Start(
      const ArenaServerOptions& options, Leases* leases,
      std::shared_ptr<prometheus::Registry> registry);

  // From here on leases may have rings; `serve` serves their calls. `cores`: how many the process
  // may use. Called once.
  void ServeRings(ServeRing serve, int cores);
  // Ends every ring, and waits for their threads, at most so long. False: one still runs. No more
  // rings are opened.
  bool EndRings(absl::Duration most);

  // Ends every lease and ring, and removes the socket's file.
  ~ArenaServer();
  ArenaServer(const ArenaServer&) = delete;
  ArenaServer& operator=(const ArenaServer&) = delete;

 private:
  struct Peer;

  ArenaServer(const ArenaServerOptions& options, Leases* leases,
              std::shared_ptr<prometheus::Registry> registry, door::ListeningSocket socket,
              int wake_fd);

  void Run();
  void Accept();
  // Closes the oldest peers that have not asked yet, where there are too many.
  void MakePlace();
  // Reads what a peer has sent. False: the connection is over.
  bool Hear(Peer& peer);
  absl::Status GiveLease(Peer& peer, const ArenaAsk& ask, size_t bytes);
  // For a packet on a lease's connection. False: the connection is over.
  bool HearLeased(Peer& peer, const RingAsk& ask, size_t bytes);
  absl::Status OpenRing(Peer& peer, const RingAsk& ask, size_t bytes);
  void EndPeer(Peer& peer);
  void Refuse(const Peer& peer, const absl::Status& why);
  void ShowLeases();

  const ArenaServerOptions options_;
  Leases* const leases_;
  const std::shared_ptr<prometheus::Registry> registry_;
  const door::ListeningSocket socket_;
  const WakeEvent wake_;  // of the thread, where it stops or time was moved by hand
  prometheus::Gauge* open_;
  prometheus::Gauge* bytes_;
  prometheus::Gauge* leaving_bytes_;
  prometheus::Gauge* device_bytes_;
  prometheus::Counter* opened_;
  prometheus::Counter* refused_;
  prometheus::Gauge* rings_open_;
  prometheus::Counter* rings_opened_;
  mutable absl::Mutex rings_mutex_;
  std::unique_ptr<Rings> rings_ ABSL_GUARDED_BY(rings_mutex_);
  std::unique_ptr<Rings> ending_rings_;  // used by EndRings, which one thread calls at a time
  // Used by the thread only.
  std::vector<Peer> peers_;
  int64_t accept_again_ns_ = 0;  // after a failure for lack of descriptors
  std::atomic<bool> stopping_ = false;
  std::shared_ptr<void> moved_;  // see Clock::WhenMoved
  std::thread thread_;
};

}  // namespace logitd::arena

#endif  // LOGITD_SERVER_ARENA_ARENA_SERVER_H_
