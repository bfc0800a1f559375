// Accepts connections for gRPC. gRPC 1.51 stops accepting for good when it runs out of descriptors,
// and has no limit on connections.
#ifndef LOGITD_SERVER_DOOR_LISTENER_H_
#define LOGITD_SERVER_DOOR_LISTENER_H_

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "server/door/address.h"
#include "server/door/connection.h"
#include "server/door/handshakes.h"
#include "server/door/listening_socket.h"

namespace logitd::door {

// Raises the soft limit of descriptors to the hard one, at most to kMaxDescriptors. Returns the
// limit. Once, before other threads start.
int64_t RaiseDescriptorLimit();

// Descriptors that are no connections: files of heads, streams of the device, metrics, epoll.
inline constexpr int64_t kReservedDescriptors = 128;
inline constexpr int64_t kMostConnections = 65536;

// The limit of connections for `asked`, 0: as many as `descriptors` allow. A reserve stays, which
// is half of a small limit.
int64_t ConnectionLimit(int64_t asked, int64_t descriptors);

// Owns the sockets that listen and the thread that accepts. Listen, Start and Stop from one thread.
class Listener {
 public:
  // Takes a connected, non-blocking socket, whose TLS handshake is done if it has TLS, and owns it
  // from then on. Runs on the listener's thread.
  using Take = std::function<void(int fd, int listening_fd)>;

  // `connections` decides who comes in and keeps the accounts. With `tls`, connections that are not
  // over Unix sockets have TLS; null: none has.
  explicit Listener(std::shared_ptr<Connections> connections,
                    std::shared_ptr<const TlsSource> tls = nullptr, HandshakeLimits limits = {});
  // Stops.
  ~Listener();
  Listener(const Listener&) = delete;
  Listener& operator=(const Listener&) = delete;

  // Opens the sockets; connections wait in the system's queue until Start. See ListenOn for errors,
  // which name the address. Once.
  absl::Status Listen(absl::Span<const std::string> addresses,
                      std::optional<mode_t> unix_mode = std::nullopt);
  // The addresses with the ports that were bound.
  const std::vector<std::string>& listening() const { return listening_; }

  // Accepts from here on.
  void Start(Take take);
  // Closes the sockets that listen and removes their files. No `take` runs afterwards. Accepted
  // connections stay.
  void Stop();

  // While true, new connections are closed at once. Any thread.
  void Refuse(bool refuse) { refuse_ = refuse; }

 private:
  struct Place {
    Address address;
    ListeningSocket socket;
  };

  void Run();
  // False: there are no descriptors, so the thread rests before the next try.
  bool AcceptAll(int listening_fd);
  void Admit(int fd, int listening_fd);
  // For poll: until the first handshake takes too long.
  int WaitMs() const;

  const std::shared_ptr<Connections> connections_;
  const std::shared_ptr<const TlsSource> tls_;
  const HandshakeLimits limits_;
  std::vector<Place> places_;
  std::vector<std::string> listening_;
  Take take_;
  std::unique_ptr<Handshakes> handshakes_;  // of the thread; null: no TLS
  std::atomic<bool> refuse_ = false;
  int stop_ = -1;   // an eventfd
  int spare_ = -1;  // closed to make room for one descriptor
  std::thread thread_;
};

}  // namespace logitd::door

#endif  // LOGITD_SERVER_DOOR_LISTENER_H_
