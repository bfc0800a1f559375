#include "server/rpc/transport/close_connections.h"

#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <filesystem>
#include <system_error>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"

namespace logitd::rpc {
namespace {

// The end of the socket's own address: ":PORT" or a path. An accepted socket has its listener's.
// Empty if the descriptor has no such address.
std::string OwnAddressEnd(int fd) {
  sockaddr_storage address = {};
  socklen_t length = sizeof(address);
  if (getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length) != 0) return "";
  switch (address.ss_family) {
    case AF_INET:
      return absl::StrCat(":", ntohs(reinterpret_cast<sockaddr_in*>(&address)->sin_port));
    case AF_INET6:
      return absl::StrCat(":", ntohs(reinterpret_cast<sockaddr_in6*>(&address)->sin6_port));
    case AF_UNIX: {
      const char* path = reinterpret_cast<sockaddr_un*>(&address)->sun_path;
      const size_t bytes = length - std::min<size_t>(length, offsetof(sockaddr_un, sun_path));
      return std::string(path, strnlen(path, bytes));
    }
    default:
      return "";
  }
}

void ShutDownSockets(absl::Span<const std::string> addresses) {
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd", error)) {
    int fd = -1;
    if (!absl::SimpleAtoi(entry.path().filename().string(), &fd)) continue;
    const std::string end = OwnAddressEnd(fd);
    if (end.empty() || std::none_of(addresses.begin(), addresses.end(), [&](const auto& address) {
          return absl::EndsWith(address, end);
        })) {
      continue;
    }
    int listens = 0;
    socklen_t length = sizeof(listens);
    getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listens, &length);
    shutdown(fd, listens != 0 ? SHUT_RDWR : SHUT_WR);
  }
}

}  // namespace

void CloseConnections(absl::Span<const std::string> addresses) {
  ShutDownSockets(addresses);
  // Again for connections that were being accepted meanwhile.
  absl::SleepFor(absl::Milliseconds(10));
  ShutDownSockets(addresses);
}

}  // namespace logitd::rpc
