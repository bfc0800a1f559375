#include "server/http2/listener.h"

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/door/address.h"
#include "server/door/listening_socket.h"
#include "server/http2/connection.h"

namespace logitd::http2 {
namespace {

constexpr int64_t kRestNs = 20'000'000;

int OpenSpare() { return open("/dev/null", O_RDONLY | O_CLOEXEC); }

}  // namespace

int64_t RaiseDescriptorLimit() {
  rlimit limit = {};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return kReservedDescriptors;
  const rlim_t wanted = std::min<rlim_t>(limit.rlim_max, kMostDescriptors);
  if (limit.rlim_cur < wanted) {
    rlimit raised = limit;
    raised.rlim_cur = wanted;
    if (setrlimit(RLIMIT_NOFILE, &raised) == 0) limit = raised;
  }
  return static_cast<int64_t>(std::min<rlim_t>(limit.rlim_cur, kMostDescriptors));
}

int64_t ConnectionLimit(int64_t asked, int64_t descriptors, int64_t held_bytes, bool tls) {
  const int64_t room =
      std::max<int64_t>(1, descriptors - std::min(kReservedDescriptors, descriptors / 2));
  const int64_t idle = kIdleBytes + (tls ? TlsSession::kIdleBytes : 0);
  return std::min({asked == 0 ? kMostConnections : asked, room, kMostConnections,
                   std::max<int64_t>(1, held_bytes / 4 * 3 / idle)});
}

class Listener::Place final : public Source {
 public:
  Place(Listener* listener, const door::Address& address, const door::ListeningSocket& socket)
      : listener_(listener), address_(address), socket_(socket) {}
  ~Place() override {
    door::RemoveSocketFile(address_, socket_);
    close(socket_.fd);
  }
  int fd() const { return socket_.fd; }
  void OnReady(uint32_t) override {
    if (!listener_->AcceptAll(socket_.fd)) listener_->Rest();
  }

 private:
  Listener* const listener_;
  const door::Address address_;
  const door::ListeningSocket socket_;
};

Listener::Listener() : spare_(OpenSpare()) {}

Listener::~Listener() {
  Stop();
  if (spare_ >= 0) close(spare_);
}

absl::Status Listener::Listen(absl::Span<const std::string> addresses,
                              std::optional<mode_t> unix_mode) {
  for (const std::string& text : addresses) {
    const auto refused = [&text](const absl::Status& status) {
      return absl::Status(status.code(),
                          absl::StrCat("cannot listen on ", text, ": ", status.message()));
    };
    const absl::StatusOr<door::Address> address = door::ParseAddress(text);
    if (!address.ok()) return refused(address.status());
    const absl::StatusOr<std::vector<door::ListeningSocket>> sockets =
        door::ListenOn(*address, {.mode = unix_mode});
    if (!sockets.ok()) return refused(sockets.status());
    for (const door::ListeningSocket& socket : *sockets) {
      places_.push_back(std::make_unique<Place>(this, *address, socket));
    }
    listening_.push_back(address->path.empty() ? absl::StrCat(text.substr(0, text.rfind(':')), ":",
                                                              sockets->front().port)
                                               : text);
  }
  return absl::OkStatus();
}

void Listener::Start(Loop* loop, Accept accept, std::function<void()> refused) {
  loop_ = loop;
  accept_ = std::move(accept);
  refused_ = std::move(refused);
  rest_ = std::make_unique<Timer>([this] {
    for (const auto& place : places_) loop_->Watch(place.get(), place->fd(), EPOLLIN);
  });
  for (const auto& place : places_) loop->Watch(place.get(), place->fd(), EPOLLIN);
}

void Listener::Stop() {
  rest_.reset();
  for (auto& place : places_) {
    if (loop_ == nullptr) continue;
    loop_->Unwatch(place->fd());
    loop_->Retire(std::move(place));
  }
  places_.clear();
}

void Listener::Rest() {
  for (const auto& place : places_) loop_->Unwatch(place->fd());
  loop_->timers().Set(rest_.get(), loop_->now_ns() + kRestNs);
}

bool Listener::AcceptAll(int listening_fd) {
  constexpr int kMost = 64;  // so that the loop's connections do not wait
  for (int i = 0; i < kMost; ++i) {
    sockaddr_storage peer = {};
    socklen_t length = sizeof(peer);
    const int fd = accept4(listening_fd, reinterpret_cast<sockaddr*>(&peer), &length,
                           SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (fd >= 0) {
      accept_(fd, peer, length);
      continue;
    }
    switch (errno) {
      case EAGAIN:
        return true;
      case EMFILE:
      case ENFILE: {
        // The connection would stay in the queue and wake the loop again and again. So it is
        // accepted in the place of the spare descriptor, and closed.
        if (spare_ >= 0) close(spare_);
        const int refused = accept4(listening_fd, nullptr, nullptr, SOCK_CLOEXEC);
        if (refused >= 0) {
          refused_();
          close(refused);
        }
        spare_ = OpenSpare();
        if (refused < 0 || spare_ < 0) return false;
        break;
      }
      case ENOBUFS:
      case ENOMEM:
        return false;
      default:  // an error of the connection: it ended while it waited
        break;
    }
  }
  return true;
}

}  // namespace logitd::http2
