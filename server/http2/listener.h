// Sockets that listen, on one loop.
#ifndef LOGITD_SERVER_HTTP2_LISTENER_H_
#define LOGITD_SERVER_HTTP2_LISTENER_H_

#include <sys/socket.h>
#include <sys/types.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "server/http2/loop.h"

namespace logitd::http2 {

// Raises the soft limit of descriptors to the hard one, at most to kMostDescriptors. Returns the
// limit. Once, before other threads start.
int64_t RaiseDescriptorLimit();

// Descriptors that are no connections: files of heads, streams of the device, metrics, epoll.
inline constexpr int64_t kReservedDescriptors = 128;
inline constexpr int64_t kMostConnections = 65536;
inline constexpr int64_t kMostDescriptors = 1 << 20;

// The limit of connections for `asked`, 0: as many as `descriptors` and `held_bytes` allow
// (ServerOptions::max_held_bytes). Keeps kReservedDescriptors back, or half where there are few.
// Connections without a call take at most three quarters of the bytes; with `tls` each holds more.
int64_t ConnectionLimit(int64_t asked, int64_t descriptors, int64_t held_bytes, bool tls);

// Owns the sockets that listen. Start and Stop on the loop, or while it does not run; Listen
// before.
class Listener {
 public:
  // Takes a connected socket that does not block, and its peer's address.
  using Accept = std::function<void(int fd, const sockaddr_storage& peer, socklen_t length)>;

  Listener();
  // Stops.
  ~Listener();
  Listener(const Listener&) = delete;
  Listener& operator=(const Listener&) = delete;

  // Opens the sockets; connections wait in the system's queue until Start. See door::ListenOn for
  // errors, which name the address. Once.
  absl::Status Listen(absl::Span<const std::string> addresses,
                      std::optional<mode_t> unix_mode = std::nullopt);
  // The addresses with the ports that were bound.
  const std::vector<std::string>& listening() const { return listening_; }

  // Accepts from here on. `refused` runs for each connection that is closed at once, because there
  // are no descriptors.
  void Start(Loop* loop, Accept accept, std::function<void()> refused);
  // Closes the sockets that listen and removes their files.
  void Stop();

 private:
  class Place;

  // False: there are no descriptors, so accepting rests for a while.
  bool AcceptAll(int fd);
  void Rest();

  std::vector<std::unique_ptr<Place>> places_;
  std::vector<std::string> listening_;
  Loop* loop_ = nullptr;
  Accept accept_;
  std::function<void()> refused_;
  std::unique_ptr<Timer> rest_;
  int spare_;  // closed to make room for one descriptor
};

}  // namespace logitd::http2

#endif  // LOGITD_SERVER_HTTP2_LISTENER_H_
