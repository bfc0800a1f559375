#include "server/arena/leases.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <iterator>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace logitd::arena {
namespace {

constexpr int64_t kPageBytes = 4096;

int64_t WholePages(int64_t bytes) { return (bytes + kPageBytes - 1) / kPageBytes * kPageBytes; }

absl::Status NoMemory(absl::string_view what, int64_t bytes, int error) {
  return absl::ResourceExhaustedError(absl::StrFormat("arena: got %d bytes to lease, but %s: %s",
                                                      bytes, what, std::strerror(error)));
}

absl::Status FillRandom(LeaseId* id) {
  // Never interrupted, and whole, for so few bytes.
  if (getrandom(id->data(), id->size(), 0) == static_cast<ssize_t>(id->size())) {
    return absl::OkStatus();
  }
  return absl::InternalError(absl::StrCat("getrandom: ", std::strerror(errno)));
}

}  // namespace

// The memory of one lease. It outlives the lease while calls use it.
class Leases::Arena {
 public:
  // `bytes` are whole pages that `leases` has reserved; the arena gives them back.
  Arena(Leases* leases, int fd, void* at, int64_t bytes)
      : leases_(leases),
        fd_(fd),
        memory_(static_cast<const std::byte*>(at), static_cast<size_t>(bytes)) {}

  ~Arena() {
    const auto bytes = static_cast<int64_t>(memory_.size());
    munmap(const_cast<std::byte*>(memory_.data()), memory_.size());
    // The client may keep its descriptor for good. It must not keep memory that this process pays
    // for: pages that it writes after this are its own.
    fallocate(fd_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, bytes);
    close(fd_);
    leases_->Release(bytes);
  }

  const Memory& memory() const { return memory_; }

 private:
  Leases* const leases_;
  const int fd_;
  const Memory memory_;
};

Leases::Leases(LeaseLimits limits)
    : limits_({.max_bytes = WholePages(limits.max_bytes), .max_leases = limits.max_leases}) {}

// Outside the lock, which an Arena takes when it ends.
Leases::~Leases() {
  decltype(leases_) leases;
  decltype(ended_) ended;
  absl::MutexLock lock(&mutex_);
  leases.swap(leases_);
  ended.swap(ended_);
}

absl::Status Leases::Reserve(int64_t bytes) {
  absl::MutexLock lock(&mutex_);
  if (draining_) {
    return absl::UnavailableError("arena: the server is shutting down; lease from another one");
  }
  const int leases = static_cast<int>(leases_.size()) + opening_;
  if (leases >= limits_.max_leases) {
    return absl::ResourceExhaustedError(absl::StrFormat(
        "arena: got one lease more than the %d there are, allowed %d (--max-leases)", leases,
        limits_.max_leases));
  }
  if (bytes > limits_.max_bytes - bytes_) {
    return absl::ResourceExhaustedError(absl::StrFormat(
        "arena: got %d bytes to lease, allowed %d: %d of %d (--max-arena-bytes) are leased", bytes,
        limits_.max_bytes - bytes_, bytes_, limits_.max_bytes));
  }
  bytes_ += bytes;
  ++opening_;
  return absl::OkStatus();
}

void Leases::Release(int64_t bytes) {
  absl::MutexLock lock(&mutex_);
  bytes_ -= bytes;
}

absl::StatusOr<Leases::Lease> Leases::Open(int64_t bytes) {
  if (bytes < 1 || bytes > limits_.max_bytes) {
    return absl::InvalidArgumentError(
        absl::StrFormat("arena: got %d bytes to lease, allowed 1..%d (--max-arena-bytes)", bytes,
                        limits_.max_bytes));
  }
  bytes = WholePages(bytes);
  if (absl::Status status = Reserve(bytes); !status.ok()) return status;
  absl::Cleanup unreserve = [this, bytes] {
    Release(bytes);
    absl::MutexLock lock(&mutex_);
    --opening_;
  };
  Lease lease = {.bytes = bytes};
  if (absl::Status status = FillRandom(&lease.id); !status.ok()) return status;
  const int fd = memfd_create("logitd-arena", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd < 0) return NoMemory("there is no memfd", bytes, errno);
  absl::Cleanup close_fd = [fd] { close(fd); };
  // All pages now: a page that cannot be had later would be a SIGBUS.
  if (const int error = posix_fallocate(fd, 0, bytes); error != 0) {
    return NoMemory("there are no pages for it", bytes, error);
  }
  if (fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    return NoMemory("it cannot be sealed", bytes, errno);
  }
  lease.fd = fcntl(fd, F_DUPFD_CLOEXEC, 0);
  if (lease.fd < 0) return NoMemory("there is no descriptor for it", bytes, errno);
  absl::Cleanup close_lease_fd = [&lease] { close(lease.fd); };
  void* const at =
      mmap(nullptr, static_cast<size_t>(bytes), PROT_READ, MAP_SHARED | MAP_POPULATE, fd, 0);
  if (at == MAP_FAILED) return NoMemory("it cannot be mapped", bytes, errno);
  auto arena = std::make_shared<const Arena>(this, fd, at, bytes);
  std::move(close_lease_fd).Cancel();
  std::move(close_fd).Cancel();
  std::move(unreserve).Cancel();
  absl::MutexLock lock(&mutex_);
  --opening_;
  leases_.emplace(lease.id, std::move(arena));
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
  const auto used = std::partition(ended_.begin(), ended_.end(),
                                   [](const auto& arena) { return arena.use_count() > 1; });
  unused.assign(std::make_move_iterator(used), std::make_move_iterator(ended_.end()));
  ended_.erase(used, ended_.end());
  return !ended_.empty();
}

absl::StatusOr<std::shared_ptr<const Memory>> Leases::Find(std::string_view id) const {
  LeaseId key;
  if (id.size() == key.size()) {
    std::memcpy(key.data(), id.data(), key.size());
    absl::MutexLock lock(&mutex_);
    if (const auto it = leases_.find(key); it != leases_.end()) {
      return std::shared_ptr<const Memory>(it->second, &it->second->memory());
    }
  }
  return absl::NotFoundError(
      "shared.lease: got one that is not known here; a lease ends with its connection");
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
