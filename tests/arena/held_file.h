// A client that holds its file's lock in the kernel.
#ifndef LOGITD_TESTS_ARENA_HELD_FILE_H_
#define LOGITD_TESTS_ARENA_HELD_FILE_H_

#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>
#include <thread>

namespace logitd {

// While this lives, and until LetGo, a write to the file is under way that has the file's lock and
// waits for a page of what it writes.
class HeldFile {
 public:
  static constexpr const char* kUnavailable = "this system lets nobody delay a page (userfaultfd)";

  explicit HeldFile(int fd)
      : faults_(static_cast<int>(syscall(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK))) {
    if (faults_ < 0) return;
    page_ = mmap(nullptr, kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    uffdio_api api = {};
    api.api = UFFD_API;
    uffdio_register all = {};
    all.range = Range();
    all.mode = UFFDIO_REGISTER_MODE_MISSING;
    if (ioctl(faults_, UFFDIO_API, &api) != 0 || ioctl(faults_, UFFDIO_REGISTER, &all) != 0) return;
    writer_ = std::thread([this, fd] { [[maybe_unused]] ssize_t put = pwrite(fd, page_, 1, 0); });
    pollfd waits = {.fd = faults_, .events = POLLIN, .revents = 0};
    holds_ = poll(&waits, 1, 20000) == 1;
  }
  ~HeldFile() {
    LetGo();
    if (page_ != nullptr) munmap(page_, kPage);
    if (faults_ >= 0) close(faults_);
  }
  HeldFile(const HeldFile&) = delete;
  HeldFile& operator=(const HeldFile&) = delete;

  bool holds() const { return holds_; }

  void LetGo() {
    if (!writer_.joinable()) return;
    uffdio_zeropage zero = {};
    zero.range = Range();
    ioctl(faults_, UFFDIO_ZEROPAGE, &zero);
    writer_.join();
    holds_ = false;
  }

 private:
  static constexpr uint64_t kPage = 4096;
  uffdio_range Range() const { return {.start = reinterpret_cast<uint64_t>(page_), .len = kPage}; }

  const int faults_;
  void* page_ = nullptr;
  bool holds_ = false;
  std::thread writer_;
};

}  // namespace logitd

#endif  // LOGITD_TESTS_ARENA_HELD_FILE_H_
