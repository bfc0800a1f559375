// Takes pages out of files that clients may still have.
#ifndef LOGITD_SERVER_ARENA_PAGE_REMOVER_H_
#define LOGITD_SERVER_ARENA_PAGE_REMOVER_H_

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"

namespace logitd::arena {

// A process that does nothing else. To take pages out of a file the kernel needs the file's lock,
// and whoever has the file can hold that lock for as long as it likes (a write from memory whose
// page does not come). A thread that waits for it cannot be killed, and would keep its process and
// all of the process's sockets. So each file gets a process of its own, which has nothing but that
// file. Thread-safe.
class PageRemover {
 public:
  // Best before the caller has threads and much memory, because the process is a fork. It ends with
  // the object, or with the caller's process. UNAVAILABLE: the system gives no process.
  static absl::StatusOr<std::unique_ptr<PageRemover>> Start();
  // Files that were handed over lose their pages all the same.
  ~PageRemover();
  PageRemover(const PageRemover&) = delete;
  PageRemover& operator=(const PageRemover&) = delete;

  // Begins to take all pages out of `fd`, a memfd of `bytes` bytes, which the caller keeps. Never
  // waits. False: not now.
  bool Remove(int fd, int64_t bytes, uint64_t id);

  struct Ended {
    uint64_t id;
    bool removed;  // false: the system could not, and may be asked again
  };
  // Every Remove that has ended since the last call.
  std::vector<Ended> TakeEnded();
  // Readable when TakeEnded has something.
  int ended_fd() const { return socket_; }

 private:
  PageRemover(pid_t process, int socket) : process_(process), socket_(socket) {}

  const pid_t process_;
  const int socket_;
};

}  // namespace logitd::arena

#endif  // LOGITD_SERVER_ARENA_PAGE_REMOVER_H_
