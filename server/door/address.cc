#include "server/door/address.h"

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
#include <memory>
#include <optional>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"

namespace logitd::door {
namespace {

constexpr int kBacklog = 4096;  // the system's own limit is usually lower
constexpr size_t kMaxPath = sizeof(sockaddr_un::sun_path) - 1;

absl::Status Failed(absl::string_view what) {
  return absl::UnavailableError(absl::StrCat(what, ": ", std::strerror(errno)));
}

struct CloseAddresses {
  void operator()(addrinfo* list) const { freeaddrinfo(list); }
};

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
    reinterpret_cast<sockaddr_in6*>(&address)->sin6_port = htons(port);
  } else {
    reinterpret_cast<sockaddr_in*>(&address)->sin_port = htons(port);
  }
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
  return ntohs(address.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6*>(&address)->sin6_port
                                             : reinterpret_cast<sockaddr_in*>(&address)->sin_port);
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
  const std::unique_ptr<addrinfo, CloseAddresses> list(found);
  std::vector<ListeningSocket> sockets;
  uint16_t port = address.port;
  int error = 0;
  for (const addrinfo* at = list.get(); at != nullptr; at = at->ai_next) {
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

// What is at the path of a Unix socket, seen by connecting to it. OK: a file that no process
// listens on.
absl::Status CheckStale(const std::string& path, const sockaddr_un& address) {
  struct stat file = {};
  if (lstat(path.c_str(), &file) != 0) {
    return errno == ENOENT ? absl::OkStatus() : Failed("stat");
  }
  if (!S_ISSOCK(file.st_mode)) return absl::UnavailableError("the file there is not a socket");
  const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
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
  if (errno == EAGAIN) return absl::UnavailableError("another process listens there");
  return Failed("connect");
}

// Keeps two processes from replacing the same file at the same time. A directory that cannot be
// locked is no reason not to serve.
class DirectoryLock {
 public:
  explicit DirectoryLock(const std::string& path) {
    const std::string directory = std::filesystem::path(path).parent_path().string();
    fd_ = open(directory.empty() ? "." : directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    const absl::Time end = absl::Now() + absl::Seconds(1);
    while (fd_ >= 0 && flock(fd_, LOCK_EX | LOCK_NB) != 0 && absl::Now() < end) {
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

absl::StatusOr<std::vector<ListeningSocket>> ListenOnUnix(const std::string& path) {
  const sockaddr_un address = UnixAddress(path);
  const DirectoryLock lock(path);
  if (absl::Status status = CheckStale(path, address); !status.ok()) return status;
  const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (fd < 0) return Failed("socket");
  absl::Cleanup close_fd = [fd] { close(fd); };
  if (unlink(path.c_str()) != 0 && errno != ENOENT) return Failed("unlink");
  if (bind(fd, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) {
    return Failed("bind");
  }
  struct stat file = {};
  if (lstat(path.c_str(), &file) != 0) return Failed("stat");
  if (listen(fd, kBacklog) != 0) return Failed("listen");
  std::move(close_fd).Cancel();
  return std::vector<ListeningSocket>{{.fd = fd, .device = file.st_dev, .inode = file.st_ino}};
}

}  // namespace

absl::StatusOr<Address> ParseAddress(absl::string_view text) {
  const auto wrong = [text](absl::string_view allowed) {
    return absl::InvalidArgumentError(absl::StrFormat("got \"%s\", allowed %s", text, allowed));
  };
  if (absl::ConsumePrefix(&text, "unix:")) {
    if (absl::StartsWith(text, "//")) text.remove_prefix(2);  // unix:///PATH, as gRPC's clients
    if (text.empty() || text.size() > kMaxPath || absl::StrContains(text, '\0')) {
      return absl::InvalidArgumentError(absl::StrFormat(
          "got a path of %d bytes in \"unix:%s\", allowed 1 to %d", text.size(), text, kMaxPath));
    }
    return Address{.path = std::string(text)};
  }
  const size_t colon = text.rfind(':');
  if (colon == absl::string_view::npos) return wrong("HOST:PORT or unix:PATH");
  absl::string_view host = text.substr(0, colon);
  const absl::string_view digits = text.substr(colon + 1);
  int port = 0;
  if (!absl::SimpleAtoi(digits, &port) || port < 0 || port > 65535 ||
      digits.find_first_not_of("0123456789") != absl::string_view::npos) {
    return wrong("a port of 0 to 65535 after the last colon");
  }
  const bool brackets = absl::ConsumePrefix(&host, "[");
  if (brackets != absl::ConsumeSuffix(&host, "]") || host.empty() ||
      (!brackets && absl::StrContains(host, ':'))) {
    return wrong("HOST:PORT with the brackets of [IPV6]:PORT");
  }
  return Address{.host = std::string(host), .port = static_cast<uint16_t>(port)};
}

absl::StatusOr<std::vector<ListeningSocket>> ListenOn(const Address& address) {
  return address.path.empty() ? ListenOnTcp(address) : ListenOnUnix(address.path);
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
