// TLS handshakes that are not finished.
#ifndef LOGITD_SERVER_DOOR_HANDSHAKES_H_
#define LOGITD_SERVER_DOOR_HANDSHAKES_H_

#include <cstddef>
#include <functional>
#include <list>
#include <memory>
#include <string_view>

#include "absl/container/flat_hash_map.h"
#include "absl/time/time.h"
#include "server/door/connection.h"
#include "server/door/tls_context.h"
#include "server/door/tls_session.h"

namespace logitd::door {

struct HandshakeLimits {
  // A further handshake ends the oldest one: of those that have sent nothing, or else of all. Each
  // holds at most about 200 KiB: OpenSSL's buffers, a hello and a client's certificates.
  size_t max_unfinished = 512;
  absl::Duration timeout = absl::Seconds(10);
};

// All handshakes run on one thread, so floods of them take at most one core. Not thread-safe.
class Handshakes {
 public:
  // Takes the descriptor of a connection whose handshake is done.
  using Take = std::function<void(int fd, int listening_fd)>;

  Handshakes(std::shared_ptr<Connections> connections, std::shared_ptr<const TlsSource> source,
             HandshakeLimits limits, Take take);
  // Closes the unfinished ones.
  ~Handshakes();
  Handshakes(const Handshakes&) = delete;
  Handshakes& operator=(const Handshakes&) = delete;

  // Readable when Step has work.
  int fd() const { return epoll_; }
  // Owns `fd` until it is taken. `connection` is its account.
  void Add(int fd, int listening_fd, std::shared_ptr<Connection> connection);
  // Continues some handshakes that can go on, and ends those that took too long.
  void Step();
  // When Step has work at the latest.
  absl::Time due() const;
  size_t unfinished() const { return all_.size(); }

 private:
  struct Unfinished {
    int fd;
    int listening_fd;
    std::shared_ptr<Connection> connection;
    std::unique_ptr<TlsSession> session;
    absl::Time end;
    bool begun = false;
    bool wants_write = false;
  };
  using Place = std::list<Unfinished>::iterator;

  void Continue(Place place);
  void End(Place place, HandshakeEnd why, std::string_view text);
  Place Oldest();

  const std::shared_ptr<Connections> connections_;
  const std::shared_ptr<const TlsSource> source_;
  const HandshakeLimits limits_;
  const Take take_;
  const int epoll_;
  std::list<Unfinished> all_;  // the oldest first
  absl::flat_hash_map<int, Place> by_fd_;
};

}  // namespace logitd::door

#endif  // LOGITD_SERVER_DOOR_HANDSHAKES_H_
