#include "server/door/listening_socket.h"

#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstring>
#include <filesystem>
#include <optional>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "server/base/clock.h"

namespace logitd::door {
namespace {

constexpr int kBacklog = 4096;  // the system's own limit is usually lower

absl::Status Failed(absl::string_view what) {
  return absl::UnavailableError(absl::StrCat(what, ": ", std::strerror(errno)));
}

// The port in an address of IPv4 or IPv6, in the network's order.
in_port_t& PortIn(sockaddr_storage* address) {
  static_assert(offsetof(sockaddr_in, sin_port) == offsetof(sockaddr_in6, sin6_port));
  return reinterpret_cast<sockaddr_in*>(address)->sin_port;
}

// Returns a socket, or the error's number below zero.
int BindTcp(const addrinfo& at, uint16_t port, bool both_families) {
  const int fd = socket(at.ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (fd < 0) return -errno;
  const int on = 1;
  const int only_v6 = both_families ? 0 : 1;
  setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  sockaddr_storage address = {};
  std::memcpy(&address, at.ai_addr, at.ai_addrlen);
  if (at.ai_family == AF_INET6) {
    setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &only_v6, sizeof(only_v6));
  }
  PortIn(&address) = htons(port);
  if (bind(fd, reinterpret_cast<sockaddr*>(&address), at.ai_addrlen) == 0 &&
      listen(fd, kBacklog) == 0) {
    return fd;
  }
  const int error = errno;
  close(fd);
  return -error;
}

uint16_t PortOf(int fd) {
  sockaddr_storage address = {};
  socklen_t length = sizeof(address);
  getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length);
  return ntohs(PortIn(&address));
}

bool HasIpv6() {
  const int fd = socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd >= 0) close(fd);
  return fd >= 0;
}

absl::StatusOr<std::vector<ListeningSocket>> ListenOnTcp(const Address& address) {
  const bool both = (address.host == "0.0.0.0" || address.host == "::") && HasIpv6();
  addrinfo hints = {};
  hints.ai_flags = AI_PASSIVE;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (const int error = getaddrinfo(both ? "::" : address.host.c_str(), "0", &hints, &found)) {
    return absl::UnavailableError(gai_strerror(error));
  }
  const absl::Cleanup free_found = [found] { freeaddrinfo(found); };
  std::vector<ListeningSocket> sockets;
  auto port = static_cast<uint16_t>(address.port);
  int error = 0;
  for (const addrinfo* at = found; at != nullptr; at = at->ai_next) {
    const int fd = BindTcp(*at, port, both);
    if (fd >= 0) {
      port = PortOf(fd);
      sockets.push_back({.fd = fd, .port = port});
      continue;
    }
    error = -fd;
    // A name may have addresses that this machine does not have.
    if (error == EADDRNOTAVAIL || error == EAFNOSUPPORT) continue;
    for (const ListeningSocket& socket : sockets) close(socket.fd);
    return absl::UnavailableError(std::strerror(error));
  }
  if (!sockets.empty()) return sockets;
  return absl::UnavailableError(std::strerror(error));
}

sockaddr_un UnixAddress(const std::string& path) {
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, path.data(), path.size());
  return address;
}

// Checks what is at the path of a Unix socket, by connecting to it. OK: nothing, or a file that no
// process listens on.
absl::Status CheckStale(const std::string& path, const sockaddr_un& address, int type) {
  struct stat file = {};
  if (lstat(path.c_str(), &file) != 0) {
    return errno == ENOENT ? absl::OkStatus() : Failed("stat");
  }
  if (!S_ISSOCK(file.st_mode)) return absl::UnavailableError("the file there is not a socket");
  const int fd = socket(AF_UNIX, type | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (fd < 0) return Failed("socket");
  absl::Cleanup close_fd = [fd] { close(fd); };
  if (connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0) {
    ucred holder = {};
    socklen_t length = sizeof(holder);
    getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &holder, &length);
    return absl::UnavailableError(
        absl::StrFormat("another process (pid %d) listens there", holder.pid));
  }
  if (errno == ECONNREFUSED || errno == ENOENT) return absl::OkStatus();
  // EPROTOTYPE: it listens with a socket of another type.
  if (errno == EAGAIN || errno == EPROTOTYPE) {
    return absl::UnavailableError("another process listens there");
  }
  return Failed("connect");
}

// Keeps two processes from replacing the same file at the same time. A directory that cannot be
// locked is no reason not to serve.
class DirectoryLock {
 public:
  explicit DirectoryLock(const std::string& path) {
    const std::string directory = std::filesystem::path(path).parent_path().string();
    fd_ = open(directory.empty() ? "." : directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    const absl::Time end = SteadyNow() + absl::Seconds(1);
    while (fd_ >= 0 && flock(fd_, LOCK_EX | LOCK_NB) != 0 && SteadyNow() < end) {
      absl::SleepFor(absl::Milliseconds(10));
    }
  }
  ~DirectoryLock() {
    if (fd_ >= 0) close(fd_);
  }
  DirectoryLock(const DirectoryLock&) = delete;
  DirectoryLock& operator=(const DirectoryLock&) = delete;

 private:
  int fd_ = -1;
};

absl::StatusOr<std::vector<ListeningSocket>> ListenOnUnix(const std::string& path,
                                                          const UnixSocketOptions& options) {
  const sockaddr_un address = UnixAddress(path);
  const DirectoryLock lock(path);
  if (absl::Status status = CheckStale(path, address, options.type); !status.ok()) return status;
  const int fd = socket(AF_UNIX, options.type | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (fd < 0) return Failed("socket");
  absl::Cleanup close_fd = [fd] { close(fd); };
  if (unlink(path.c_str()) != 0 && errno != ENOENT) return Failed("unlink");
  if (bind(fd, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) {
    return Failed("bind");
  }
  struct stat file = {};
  if (lstat(path.c_str(), &file) != 0) return Failed("stat");
  // Peers of Unix sockets may send descriptors along, and closing one may take as long as its owner
  // likes (SO_LINGER). Connections inherit that none are taken. Linux before 6.16 does not know
  // this.
  constexpr int kPassRights = 83;  // SO_PASSRIGHTS of newer headers
  const int none = 0;
  setsockopt(fd, SOL_SOCKET, kPassRights, &none, sizeof(none));
  // Nobody can connect before listen.
  if (options.mode.has_value() && chmod(path.c_str(), *options.mode) != 0) return Failed("chmod");
  if (listen(fd, kBacklog) != 0) return Failed("listen");
  std::move(close_fd).Cancel();
  return std::vector<ListeningSocket>{{.fd = fd, .device = file.st_dev, .inode = file.st_ino}};
}

}  // namespace

absl::StatusOr<std::vector<ListeningSocket>> ListenOn(const Address& address,
                                                      const UnixSocketOptions& options) {
  return address.path.empty() ? ListenOnTcp(address) : ListenOnUnix(address.path, options);
}

void RemoveSocketFile(const Address& address, const ListeningSocket& socket) {
  if (address.path.empty()) return;
  struct stat file = {};
  if (lstat(address.path.c_str(), &file) == 0 && file.st_dev == socket.device &&
      file.st_ino == socket.inode) {
    unlink(address.path.c_str());
  }
}

}  // namespace logitd::door
