#include "server/arena/leases.h"

#include <fcntl.h>
#include <limits.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <iterator>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace logitd::arena {
namespace {

#ifdef MFD_NOEXEC_SEAL
constexpr unsigned kNoExec = MFD_NOEXEC_SEAL;
#else
constexpr unsigned kNoExec = 0x0008;  // of newer headers
#endif

int64_t WholePages(int64_t bytes) {
  const int64_t page = sysconf(_SC_PAGESIZE);
  return (bytes + page - 1) / page * page;
}

absl::Status NoMemory(absl::string_view what, int64_t bytes, int error) {
  return absl::ResourceExhaustedError(absl::StrFormat(
      "arena: got %d bytes to lease, allowed none now: %s: %s", bytes, what, std::strerror(error)));
}

absl::Status FillRandom(LeaseId* id) {
  // Never interrupted, and whole, for so few bytes.
  if (getrandom(id->data(), id->size(), 0) == static_cast<ssize_t>(id->size())) {
    return absl::OkStatus();
  }
  return absl::InternalError(absl::StrCat("getrandom: ", std::strerror(errno)));
}

// A file in memory. Older kernels do not know that it cannot be run.
int MakeFile() {
  constexpr unsigned kFlags = MFD_CLOEXEC | MFD_ALLOW_SEALING;
  const int fd = memfd_create("logitd-arena", kFlags | kNoExec);
  return fd < 0 && errno == EINVAL ? memfd_create("logitd-arena", kFlags) : fd;
}

}  // namespace

Arena::~Arena() { close(fd_); }

void Arena::Read(int64_t offset, absl::Span<const absl::Span<std::byte>> to) const {
  std::array<iovec, IOV_MAX> parts;
  size_t done = 0;  // bytes of to[0] that are there
  while (!to.empty()) {
    const size_t count = std::min(to.size(), parts.size());
    for (size_t i = 0; i < count; ++i) parts[i] = {to[i].data(), to[i].size()};
    parts[0] = {to[0].data() + done, to[0].size() - done};
    ssize_t got = preadv(fd_, parts.data(), static_cast<int>(count), offset);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) {  // for example, what was swapped out cannot be read
      std::memset(parts[0].iov_base, 0xff, parts[0].iov_len);
      got = static_cast<ssize_t>(parts[0].iov_len);
    }
    offset += got;
    done += static_cast<size_t>(got);
    while (!to.empty() && done >= to[0].size()) {
      done -= to[0].size();
      to.remove_prefix(1);
    }
  }
}

absl::Status Arena::Write(int64_t offset, absl::Span<const std::byte> from) const {
  while (!from.empty()) {
    const ssize_t put = pwrite(fd_, from.data(), from.size(), offset);
    if (put < 0 && errno == EINTR) continue;
    if (put <= 0) {
      return absl::ResourceExhaustedError(
          absl::StrFormat("shared_output: got %d bytes that cannot be written to the lease: %s",
                          from.size(), std::strerror(put < 0 ? errno : ENOSPC)));
    }
    offset += put;
    from.remove_prefix(static_cast<size_t>(put));
  }
  return absl::OkStatus();
}

Leases::Leases(LeaseLimits limits)
    : limits_({.max_bytes = WholePages(limits.max_bytes), .max_leases = limits.max_leases}) {}

absl::Status Leases::CheckRoom(int64_t bytes) const {
  if (draining_) {
    return absl::UnavailableError("arena: the server is shutting down; lease from another one");
  }
  const size_t leases = leases_.size() + ended_.size();
  if (leases >= static_cast<size_t>(limits_.max_leases)) {
    return absl::ResourceExhaustedError(
        absl::StrFormat("arena: got one lease more than the %d in use, allowed %d (--max-leases)",
                        leases, limits_.max_leases));
  }
  if (bytes > limits_.max_bytes - bytes_) {
    return absl::ResourceExhaustedError(absl::StrFormat(
        "arena: got %d bytes to lease, allowed %d: %d of %d (--max-arena-bytes) are leased", bytes,
        limits_.max_bytes - bytes_, bytes_, limits_.max_bytes));
  }
  return absl::OkStatus();
}

absl::StatusOr<Leases::Lease> Leases::Open(int64_t bytes) {
  if (bytes < 1 || bytes > limits_.max_bytes) {
    return absl::InvalidArgumentError(
        absl::StrFormat("arena: got %d bytes to lease, allowed 1..%d (--max-arena-bytes)", bytes,
                        limits_.max_bytes));
  }
  bytes = WholePages(bytes);
  absl::MutexLock lock(&mutex_);
  if (absl::Status status = CheckRoom(bytes); !status.ok()) return status;
  Lease lease = {.id = {}, .bytes = bytes, .fd = -1};
  if (absl::Status status = FillRandom(&lease.id); !status.ok()) return status;
  const int fd = MakeFile();
  if (fd < 0) return NoMemory("there is no memfd", bytes, errno);
  absl::Cleanup close_fd = [fd] { close(fd); };
  if (ftruncate(fd, bytes) != 0) return NoMemory("it cannot be so large", bytes, errno);
  if (fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    return NoMemory("it cannot be sealed", bytes, errno);
  }
  lease.fd = fcntl(fd, F_DUPFD_CLOEXEC, 0);
  if (lease.fd < 0) return NoMemory("there is no descriptor for it", bytes, errno);
  std::move(close_fd).Cancel();
  leases_.emplace(lease.id, std::make_shared<const Arena>(fd, bytes));
  bytes_ += bytes;
  return lease;
}

void Leases::End(const LeaseId& id) {
  absl::MutexLock lock(&mutex_);
  const auto it = leases_.find(id);
  if (it == leases_.end()) return;
  ended_.push_back(std::move(it->second));
  leases_.erase(it);
}

bool Leases::FreeEnded() {
  std::vector<std::shared_ptr<const Arena>> unused;  // freed after the lock
  absl::MutexLock lock(&mutex_);
  // Find does not know an ended lease, so an arena that only this vector has stays so.
  const auto first = std::partition(ended_.begin(), ended_.end(),
                                    [](const auto& arena) { return arena.use_count() > 1; });
  unused.assign(std::make_move_iterator(first), std::make_move_iterator(ended_.end()));
  ended_.erase(first, ended_.end());
  for (const auto& arena : unused) bytes_ -= arena->bytes();
  return !ended_.empty();
}

absl::StatusOr<std::shared_ptr<const Arena>> Leases::Find(std::string_view id) const {
  LeaseId key;
  if (id.size() == key.size()) {
    std::memcpy(key.data(), id.data(), key.size());
    absl::MutexLock lock(&mutex_);
    if (const auto it = leases_.find(key); it != leases_.end()) return it->second;
  }
  return absl::NotFoundError(
      "shared.lease: got one that is unknown here, allowed one whose connection is open");
}

void Leases::BeginDrain() {
  absl::MutexLock lock(&mutex_);
  draining_ = true;
}

int64_t Leases::bytes() const {
  absl::MutexLock lock(&mutex_);
  return bytes_;
}

int Leases::leases() const {
  absl::MutexLock lock(&mutex_);
  return static_cast<int>(leases_.size());
}

}  // namespace logitd::arena
