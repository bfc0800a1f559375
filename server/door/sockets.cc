#include "server/door/sockets.h"

#include <dlfcn.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstring>

#include "absl/base/config.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "server/door/connection.h"

#ifdef ABSL_HAVE_THREAD_SANITIZER
#include <sanitizer/tsan_interface.h>
#endif

namespace logitd::door {
namespace {

// Zeros until they are used, so only the pages of descriptors in use take memory.
std::atomic<Connection*> by_descriptor[kMaxDescriptors];

Connection* Lookup(int fd) {
  if (fd < 0 || fd >= kMaxDescriptors) return nullptr;
  return by_descriptor[fd].load(std::memory_order_acquire);
}

// A use of a descriptor's connection by gRPC, which closes a descriptor after its last use. That order
// is made inside gRPC, where ThreadSanitizer does not see it.
class Use {
 public:
  explicit Use(int fd) : connection_(Lookup(fd)), fd_(fd) {}
  ~Use() {
#ifdef ABSL_HAVE_THREAD_SANITIZER
    if (connection_ != nullptr) __tsan_release(&by_descriptor[fd_]);
#endif
  }
  Use(const Use&) = delete;
  Use& operator=(const Use&) = delete;

  Connection* connection() const { return connection_; }

 private:
  Connection* const connection_;
  [[maybe_unused]] const int fd_;
};

void UsesEnded([[maybe_unused]] int fd) {
#ifdef ABSL_HAVE_THREAD_SANITIZER
  __tsan_acquire(&by_descriptor[fd]);
#endif
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
         dlsym(RTLD_DEFAULT, "shutdown") == reinterpret_cast<void*>(&shutdown) &&
         dlsym(RTLD_DEFAULT, "setsockopt") == reinterpret_cast<void*>(&setsockopt) &&
         dlsym(RTLD_DEFAULT, "close") == reinterpret_cast<void*>(&close);
}

}  // namespace logitd::door

using logitd::door::Connection;
using logitd::door::Lookup;
using logitd::door::TlsSession;
using logitd::door::Use;

extern "C" {

ssize_t recvmsg(int fd, msghdr* message, int flags) {
  const Use use(fd);
  Connection* const connection = use.connection();
  const bool data = (flags & (MSG_ERRQUEUE | MSG_PEEK)) == 0;
  if (connection != nullptr && data) return connection->Receive(fd, message, flags);
  if (connection != nullptr && connection->tls() != nullptr && (flags & MSG_PEEK) != 0) {
    errno = EOPNOTSUPP;
    return -1;
  }
  return syscall(SYS_recvmsg, fd, message, flags);
}

ssize_t sendmsg(int fd, const msghdr* message, int flags) {
  const Use use(fd);
  Connection* const connection = use.connection();
  return connection != nullptr ? connection->Send(fd, message, flags)
                               : syscall(SYS_sendmsg, fd, message, flags);
}

int getpeername(int fd, sockaddr* __restrict address, socklen_t* __restrict length) noexcept {
  const Use use(fd);
  Connection* const connection = use.connection();
  const socklen_t room = length == nullptr ? 0 : *length;
  const auto result = static_cast<int>(syscall(SYS_getpeername, fd, address, length));
  if (connection != nullptr && result == 0 && address->sa_family == AF_UNIX) {
    logitd::door::NameUnixPeer(*connection, address, room, length);
  }
  return result;
}

int setsockopt(int fd, int level, int option, const void* value, socklen_t bytes) noexcept {
  // Newer gRPC sets the bytes it waits for. They are plain bytes, of which OpenSSL may have read
  // some already: the kernel could wait for bytes that never come.
  const Use use(level == SOL_SOCKET && option == SO_RCVLOWAT ? fd : -1);
  const Connection* const connection = use.connection();
  if (connection != nullptr && connection->tls() != nullptr) return 0;
  return static_cast<int>(syscall(SYS_setsockopt, fd, level, option, value, bytes));
}

int shutdown(int fd, int how) noexcept {
  const Use use(how == SHUT_RD ? -1 : fd);
  const Connection* const connection = use.connection();
  TlsSession* const tls = connection == nullptr ? nullptr : connection->tls();
  if (tls != nullptr) tls->SendEnd();
  return static_cast<int>(syscall(SYS_shutdown, fd, how));
}

int close(int fd) {
  // The descriptor may be in use again as soon as it is closed.
  if (Connection* const connection = Lookup(fd)) {
    logitd::door::UsesEnded(fd);
    logitd::door::SetConnection(fd, nullptr);
    connection->Closed();
  }
  return static_cast<int>(syscall(SYS_close, fd));
}

}  // extern "C"
