#include "server/door/sockets.h"

#include <dlfcn.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "server/door/connection.h"

namespace logitd::door {
namespace {

// Zeros until they are used, so only the pages of descriptors in use take memory.
std::atomic<Connection*> by_descriptor[kMaxDescriptors];

Connection* Lookup(int fd) {
  if (fd < 0 || fd >= kMaxDescriptors) return nullptr;
  return by_descriptor[fd].load(std::memory_order_acquire);
}

// Names a peer of a Unix socket, which has no name of its own.
void NameUnixPeer(const Connection& connection, sockaddr* address, socklen_t room,
                  socklen_t* length) {
  sockaddr_un named = {};
  named.sun_family = AF_UNIX;
  const std::string name(absl::StripPrefix(connection.peer(), "unix:"));
  const size_t bytes = std::min(name.size(), sizeof(named.sun_path) - 1);
  std::memcpy(named.sun_path, name.data(), bytes);
  *length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + bytes + 1);
  std::memcpy(address, &named, std::min(room, *length));
}

}  // namespace

void SetConnection(int fd, Connection* connection) {
  by_descriptor[fd].store(connection, std::memory_order_release);
}

bool SocketsAreWatched() {
  return dlsym(RTLD_DEFAULT, "recvmsg") == reinterpret_cast<void*>(&recvmsg) &&
         dlsym(RTLD_DEFAULT, "sendmsg") == reinterpret_cast<void*>(&sendmsg) &&
         dlsym(RTLD_DEFAULT, "getpeername") == reinterpret_cast<void*>(&getpeername) &&
         dlsym(RTLD_DEFAULT, "close") == reinterpret_cast<void*>(&close);
}

}  // namespace logitd::door

using logitd::door::Connection;
using logitd::door::Lookup;

extern "C" {

ssize_t recvmsg(int fd, msghdr* message, int flags) {
  Connection* const connection = Lookup(fd);
  const ssize_t got = syscall(SYS_recvmsg, fd, message, flags);
  if (connection == nullptr || got <= 0 || (flags & (MSG_ERRQUEUE | MSG_PEEK)) != 0) return got;
  if (connection->Received({message->msg_iov, message->msg_iovlen}, static_cast<size_t>(got))) {
    return got;
  }
  errno = ECONNRESET;
  return -1;
}

ssize_t sendmsg(int fd, const msghdr* message, int flags) {
  Connection* const connection = Lookup(fd);
  const ssize_t put = syscall(SYS_sendmsg, fd, message, flags);
  if (connection == nullptr || put <= 0) return put;
  connection->Sent({message->msg_iov, message->msg_iovlen}, static_cast<size_t>(put));
  return put;
}

int getpeername(int fd, sockaddr* __restrict address, socklen_t* __restrict length) noexcept {
  Connection* const connection = Lookup(fd);
  const socklen_t room = length == nullptr ? 0 : *length;
  const auto result = static_cast<int>(syscall(SYS_getpeername, fd, address, length));
  if (connection != nullptr && result == 0 && address->sa_family == AF_UNIX) {
    logitd::door::NameUnixPeer(*connection, address, room, length);
  }
  return result;
}

int close(int fd) {
  // The descriptor may be in use again as soon as it is closed.
  if (Connection* const connection = Lookup(fd)) {
    logitd::door::SetConnection(fd, nullptr);
    connection->Closed();
  }
  return static_cast<int>(syscall(SYS_close, fd));
}

}  // extern "C"
