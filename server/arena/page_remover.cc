#include "server/arena/page_remover.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "server/arena/send_file.h"

namespace logitd::arena {
namespace {

struct Ask {
  uint64_t id;
  int64_t bytes;
};

// ---- in the other processes: only system calls, because other threads of the server may have held
// any lock at the fork

void RemovePages(int socket, int file, const Ask& ask) {
  constexpr int kRemove = FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE;
  int failed = fallocate(file, kRemove, 0, ask.bytes);
  while (failed != 0 && errno == EINTR) failed = fallocate(file, kRemove, 0, ask.bytes);
  const PageRemover::Ended ended = {.id = ask.id, .removed = failed == 0};
  send(socket, &ended, sizeof(ended), MSG_NOSIGNAL);
}

// The file of an ask; -1: there is none.
int ReceiveAsk(int socket, Ask* ask, ssize_t* got) {
  iovec part = {ask, sizeof(*ask)};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control = {};
  msghdr message = {};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  *got = recvmsg(socket, &message, MSG_CMSG_CLOEXEC);
  const cmsghdr* const header = *got > 0 ? CMSG_FIRSTHDR(&message) : nullptr;
  int file = -1;
  if (header != nullptr) std::memcpy(&file, CMSG_DATA(header), sizeof(file));
  return file;
}

[[noreturn]] void ServeAsks(int socket) {
  prctl(PR_SET_NAME, "logitd-pages");
  // The server ends it. Signals for the server's group are not meant for it.
  for (const int ignored : {SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2, SIGCHLD}) {
    signal(ignored, SIG_IGN);
  }
  // It keeps nothing of the server open, also not a pipe that somebody reads to its end.
  const int null = open("/dev/null", O_RDWR);
  for (int standard = 0; standard <= 2; ++standard) dup2(null, standard);
  constexpr int kSocket = 3;
  dup2(socket, kSocket);
  close_range(kSocket + 1, ~0U, 0);
  while (true) {
    Ask ask = {};
    ssize_t got = 0;
    const int file = ReceiveAsk(kSocket, &ask, &got);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) _exit(0);
    const pid_t process = _Fork();
    if (process == 0) {
      RemovePages(kSocket, file, ask);
      _exit(0);
    }
    if (process < 0) {
      const PageRemover::Ended ended = {.id = ask.id, .removed = false};
      send(kSocket, &ended, sizeof(ended), MSG_NOSIGNAL);
    }
    close(file);
  }
}

}  // namespace

absl::StatusOr<std::unique_ptr<PageRemover>> PageRemover::Start() {
  int sockets[2];
  if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, sockets) != 0) {
    return absl::UnavailableError(absl::StrCat("arena: socketpair: ", std::strerror(errno)));
  }
  const pid_t process = _Fork();
  if (process == 0) ServeAsks(sockets[1]);
  close(sockets[1]);
  if (process < 0) {
    close(sockets[0]);
    return absl::UnavailableError(
        absl::StrCat("arena: there is no process to free memory: ", std::strerror(errno)));
  }
  return std::unique_ptr<PageRemover>(new PageRemover(process, sockets[0]));
}

PageRemover::~PageRemover() {
  close(socket_);
  while (waitpid(process_, nullptr, 0) < 0 && errno == EINTR) continue;
}

bool PageRemover::Remove(int fd, int64_t bytes, uint64_t id) {
  Ask ask = {.id = id, .bytes = bytes};
  iovec part = {&ask, sizeof(ask)};
  return SendWithFile(socket_, {&part, 1}, fd);
}

std::vector<PageRemover::Ended> PageRemover::TakeEnded() {
  std::vector<Ended> all;
  Ended ended = {};
  while (recv(socket_, &ended, sizeof(ended), MSG_DONTWAIT) == ssize_t{sizeof(ended)}) {
    all.push_back(ended);
  }
  return all;
}

}  // namespace logitd::arena
