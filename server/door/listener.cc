#include "server/door/listener.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "server/door/sockets.h"

namespace logitd::door {
namespace {

constexpr absl::Duration kRest = absl::Milliseconds(20);

int OpenSpare() { return open("/dev/null", O_RDONLY | O_CLOEXEC); }

}  // namespace

int64_t RaiseDescriptorLimit() {
  rlimit limit = {};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return kReservedDescriptors;
  const rlim_t wanted = std::min<rlim_t>(limit.rlim_max, kMaxDescriptors);
  if (limit.rlim_cur < wanted) {
    rlimit raised = limit;
    raised.rlim_cur = wanted;
    if (setrlimit(RLIMIT_NOFILE, &raised) == 0) limit = raised;
  }
  return static_cast<int64_t>(std::min<rlim_t>(limit.rlim_cur, kMaxDescriptors));
}

int64_t ConnectionLimit(int64_t asked, int64_t descriptors) {
  const int64_t room =
      std::max<int64_t>(1, descriptors - std::min(kReservedDescriptors, descriptors / 2));
  return std::min({asked == 0 ? kMostConnections : asked, room, kMostConnections});
}

Listener::Listener(std::shared_ptr<Connections> connections, std::shared_ptr<const TlsSource> tls,
                   HandshakeLimits limits)
    : connections_(std::move(connections)),
      tls_(std::move(tls)),
      limits_(limits),
      stop_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      spare_(OpenSpare()) {}

Listener::~Listener() {
  Stop();
  close(stop_);
  if (spare_ >= 0) close(spare_);
}

absl::Status Listener::Listen(absl::Span<const std::string> addresses,
                              std::optional<mode_t> unix_mode) {
  for (const std::string& text : addresses) {
    const auto refused = [&text](const absl::Status& status) {
      return absl::Status(status.code(),
                          absl::StrCat("cannot listen on ", text, ": ", status.message()));
    };
    const absl::StatusOr<Address> address = ParseAddress(text);
    if (!address.ok()) return refused(address.status());
    const absl::StatusOr<std::vector<ListeningSocket>> sockets =
        ListenOn(*address, {.mode = unix_mode});
    if (!sockets.ok()) return refused(sockets.status());
    for (const ListeningSocket& socket : *sockets) places_.push_back({*address, socket});
    listening_.push_back(address->path.empty() ? absl::StrCat(text.substr(0, text.rfind(':')), ":",
                                                              sockets->front().port)
                                               : text);
  }
  return absl::OkStatus();
}

void Listener::Start(Take take) {
  take_ = std::move(take);
  if (tls_ != nullptr) {
    handshakes_ = std::make_unique<Handshakes>(connections_, tls_, limits_, take_);
  }
  thread_ = std::thread([this] { Run(); });
}

void Listener::Stop() {
  if (thread_.joinable()) {
    const uint64_t one = 1;
    [[maybe_unused]] const ssize_t written = write(stop_, &one, sizeof(one));
    thread_.join();
  }
  handshakes_.reset();
  for (const Place& place : places_) {
    RemoveSocketFile(place.address, place.socket);
    close(place.socket.fd);
  }
  places_.clear();
}

void Listener::Run() {
  std::vector<pollfd> fds = {{.fd = stop_, .events = POLLIN}};
  for (const Place& place : places_) fds.push_back({.fd = place.socket.fd, .events = POLLIN});
  const size_t listening = fds.size();
  if (handshakes_ != nullptr) fds.push_back({.fd = handshakes_->fd(), .events = POLLIN});
  while (true) {
    if (poll(fds.data(), fds.size(), WaitMs()) < 0) continue;
    if (fds[0].revents != 0) return;
    if (handshakes_ != nullptr) handshakes_->Step();
    bool rest = false;
    for (size_t i = 1; i < listening; ++i) {
      if (fds[i].revents != 0 && !AcceptAll(fds[i].fd)) rest = true;
    }
    if (rest) poll(fds.data(), 1, static_cast<int>(absl::ToInt64Milliseconds(kRest)));
  }
}

int Listener::WaitMs() const {
  const absl::Time due = handshakes_ == nullptr ? absl::InfiniteFuture() : handshakes_->due();
  if (due == absl::InfiniteFuture()) return -1;
  const absl::Duration wait = std::max(due - absl::Now(), absl::ZeroDuration());
  return static_cast<int>(absl::ToInt64Milliseconds(wait)) + 1;
}

bool Listener::AcceptAll(int listening_fd) {
  // A bound, so that one busy address does not keep the others or the end waiting. With TLS a lower
  // one: handshakes that can go on do so before many newer connections need their places.
  const int most = handshakes_ == nullptr ? 256 : 16;
  for (int i = 0; i < most; ++i) {
    const int fd = accept4(listening_fd, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (fd >= 0) {
      Admit(fd, listening_fd);
      continue;
    }
    switch (errno) {
      case EAGAIN:
        return true;
      case EMFILE:
      case ENFILE: {
        // The connection would stay in the queue and wake this thread again and again. So it is
        // accepted in the place of the spare descriptor, and closed.
        if (spare_ >= 0) close(spare_);
        const int refused = accept4(listening_fd, nullptr, nullptr, SOCK_CLOEXEC);
        if (refused >= 0) {
          connections_->CountRefused();
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

void Listener::Admit(int fd, int listening_fd) {
  sockaddr_storage address = {};
  socklen_t length = sizeof(address);
  auto* const peer = reinterpret_cast<sockaddr*>(&address);
  if (getpeername(fd, peer, &length) != 0) {  // it has ended already
    close(fd);
    return;
  }
  if (address.ss_family != AF_UNIX) {
    const int on = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
  }
  if (refuse_) {
    connections_->CountRefused();
    close(fd);
  } else if (auto connection = connections_->Add(fd, peer, length); connection != nullptr) {
    if (handshakes_ != nullptr && address.ss_family != AF_UNIX) {
      handshakes_->Add(fd, listening_fd, std::move(connection));
    } else {
      take_(fd, listening_fd);
    }
  } else {
    close(fd);
  }
}

}  // namespace logitd::door
