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
#include <numeric>
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

// Devices hand out memory in such units.
constexpr int64_t kDeviceUnit = int64_t{2} << 20;

int64_t WholeUnits(int64_t bytes) { return (bytes + kDeviceUnit - 1) / kDeviceUnit * kDeviceUnit; }

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

// Gives the file all its pages, to be pinned. Before the client has the file: nothing that it does
// can then make this wait, or take memory later.
absl::Status FillPages(int fd, int64_t bytes) {
  int failed = fallocate(fd, 0, 0, bytes);
  while (failed != 0 && errno == EINTR) failed = fallocate(fd, 0, 0, bytes);
  return failed != 0 ? NoMemory("there are no pages", bytes, errno) : absl::OkStatus();
}

// Writes to this process's own memory. The bytes that were written, or -1. Not process_vm_writev,
// which does the same: container runtimes forbid it.
ssize_t WriteMapped(std::byte* to, absl::Span<const std::byte> from) {
  static const int memory = open("/proc/self/mem", O_RDWR | O_CLOEXEC);
  return pwrite(memory, from.data(), from.size(),
                static_cast<off_t>(reinterpret_cast<uintptr_t>(to)));
}

}  // namespace

absl::Status CheckMappedWrites() {
  std::byte to{};
  const std::byte from{1};
  if (WriteMapped(&to, {&from, 1}) == 1) return absl::OkStatus();
  return absl::UnavailableError(absl::StrFormat(
      "arena: /proc/self/mem cannot be written (%s): answers get into leases through it",
      std::strerror(errno)));
}

absl::StatusOr<std::shared_ptr<Arena>> Arena::Map(int fd, int64_t bytes) {
  const auto size = static_cast<size_t>(bytes);
  void* const pages = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (pages == MAP_FAILED) {
    const absl::Status status = NoMemory("it cannot be mapped", bytes, errno);
    close(fd);
    return status;
  }
  madvise(pages, size, MADV_DONTFORK);
  return std::shared_ptr<Arena>(new Arena(fd, bytes, static_cast<std::byte*>(pages)));
}

Arena::~Arena() {
  pin_.reset();
  if (pages_ != nullptr) munmap(pages_, static_cast<size_t>(bytes_));
  if (fd_ >= 0) close(fd_);
}

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
  if (on_device()) return device_memory_->Write(offset, from);
  while (!from.empty()) {
    const ssize_t put = WriteMapped(pages_ + offset, from);
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

Leases::Leases(LeaseLimits limits, ArenaDevices* devices, PageRemover* remover)
    : limits_({.max_bytes = WholePages(limits.max_bytes),
               .max_leases = limits.max_leases,
               .max_device_bytes = WholeUnits(limits.max_device_bytes)}),
      devices_(devices),
      remover_(remover),
      device_bytes_(devices == nullptr ? 0 : static_cast<size_t>(devices->count())) {}

Leases::~Leases() {
  FreeEnded();
  absl::MutexLock lock(&mutex_);
  for (const auto& [_, leaving] : leaving_) close(leaving.fd);
}

// Whether there may be one lease more.
absl::Status Leases::CheckDoor() const {
  if (draining_) {
    return absl::UnavailableError("arena: the server is shutting down; lease from another one");
  }
  const size_t leases = leases_.size() + ended_.size() + leaving_.size();
  if (leases >= static_cast<size_t>(limits_.max_leases)) {
    return absl::ResourceExhaustedError(
        absl::StrFormat("arena: got one lease more than the %d in use, allowed %d (--max-leases)",
                        leases, limits_.max_leases));
  }
  return absl::OkStatus();
}

absl::Status Leases::CheckRoom(int64_t bytes) const {
  if (absl::Status status = CheckDoor(); !status.ok()) return status;
  if (bytes > limits_.max_bytes - bytes_) {
    return absl::ResourceExhaustedError(absl::StrFormat(
        "arena: got %d bytes to lease, allowed %d: %d of %d (--max-arena-bytes) are leased", bytes,
        limits_.max_bytes - bytes_, bytes_, limits_.max_bytes));
  }
  return absl::OkStatus();
}

void Leases::Count(const Arena& arena, int sign) {
  const int64_t bytes = sign * arena.bytes();
  if (arena.on_device()) {
    device_bytes_[static_cast<size_t>(arena.device())] += bytes;
    return;
  }
  bytes_ += bytes;
}

absl::Status Leases::Add(const LeaseId& id, std::shared_ptr<Arena> arena) {
  if (absl::Status status = CheckDoor(); !status.ok()) return status;  // a drain may have begun
  Count(*arena, 1);
  leases_.emplace(id, std::move(arena));
  return absl::OkStatus();
}

absl::StatusOr<Leases::Lease> Leases::Open(int64_t bytes) {
  if (bytes < 1 || bytes > limits_.max_bytes) {
    return absl::InvalidArgumentError(
        absl::StrFormat("arena: got %d bytes to lease, allowed 1..%d (--max-arena-bytes)", bytes,
                        limits_.max_bytes));
  }
  bytes = WholePages(bytes);
  {
    absl::MutexLock lock(&mutex_);
    if (absl::Status status = CheckRoom(bytes); !status.ok()) return status;
  }
  // Without the lock: requests look for their leases meanwhile.
  Lease lease = {.id = {}, .bytes = bytes, .fd = -1};
  if (absl::Status status = FillRandom(&lease.id); !status.ok()) return status;
  const int fd = MakeFile();
  if (fd < 0) return NoMemory("there is no memfd", bytes, errno);
  absl::Cleanup close_fd = [fd] { close(fd); };
  if (ftruncate(fd, bytes) != 0) return NoMemory("it cannot be so large", bytes, errno);
  if (fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    return NoMemory("it cannot be sealed", bytes, errno);
  }
  const bool pins = devices_ != nullptr && devices_->pins();
  if (pins) {
    if (absl::Status status = FillPages(fd, bytes); !status.ok()) return status;
  }
  std::move(close_fd).Cancel();
  absl::StatusOr<std::shared_ptr<Arena>> arena = Arena::Map(fd, bytes);
  if (!arena.ok()) return arena.status();
  if (pins) (*arena)->Pin(devices_);
  lease.fd = fcntl(fd, F_DUPFD_CLOEXEC, 0);
  if (lease.fd < 0) return NoMemory("there is no descriptor for it", bytes, errno);
  absl::MutexLock lock(&mutex_);
  if (absl::Status status = Add(lease.id, *std::move(arena)); !status.ok()) {
    close(lease.fd);
    return status;
  }
  return lease;
}

absl::StatusOr<int> Leases::ChooseDevice(uint32_t asked) const {
  int chosen = -1;
  for (int device = 0; device < devices_->count(); ++device) {
    if (devices_->lost(device)) continue;
    if (asked != 0) {
      if (asked - 1 == devices_->number(device)) return device;
    } else if (chosen < 0 || device_bytes_[static_cast<size_t>(device)] <
                                 device_bytes_[static_cast<size_t>(chosen)]) {
      chosen = device;
    }
  }
  if (chosen >= 0) return chosen;
  if (asked == 0) return absl::UnavailableError("arena: the server has no device left");
  return absl::NotFoundError(
      absl::StrFormat("arena: got device %d, allowed a device that serves here", asked - 1));
}

absl::StatusOr<Leases::Lease> Leases::OpenOnDevice(uint32_t asked, int64_t bytes) {
  if (devices_ == nullptr || devices_->count() == 0) {
    return absl::UnimplementedError(absl::StrFormat(
        "arena: got kind %d (memory of a GPU), allowed %d (memory of the host): the server has no "
        "CUDA device",
        kCudaArena, kHostArena));
  }
  if (bytes < 1 || bytes > limits_.max_device_bytes) {
    return absl::InvalidArgumentError(
        absl::StrFormat("arena: got %d bytes of a GPU to lease, allowed 1..%d "
                        "(--max-device-arena-bytes)",
                        bytes, limits_.max_device_bytes));
  }
  bytes = WholeUnits(bytes);
  int device = 0;
  {
    absl::MutexLock lock(&mutex_);
    if (absl::Status status = CheckDoor(); !status.ok()) return status;
    const absl::StatusOr<int> chosen = ChooseDevice(asked);
    if (!chosen.ok()) return chosen.status();
    device = *chosen;
    const int64_t leased = device_bytes_[static_cast<size_t>(device)];
    if (bytes > limits_.max_device_bytes - leased) {
      return absl::ResourceExhaustedError(
          absl::StrFormat("arena: got %d bytes of device %d to lease, allowed %d: %d of %d "
                          "(--max-device-arena-bytes) are leased",
                          bytes, devices_->number(device), limits_.max_device_bytes - leased,
                          leased, limits_.max_device_bytes));
    }
  }
  absl::StatusOr<std::unique_ptr<DeviceArena>> memory = devices_->Make(device, bytes);
  if (!memory.ok()) return memory.status();
  Lease lease = {.id = {},
                 .bytes = (*memory)->bytes(),
                 .fd = (*memory)->TakeDescriptor(),
                 .device = (*memory)->description()};
  absl::Cleanup close_fd = [&lease] { close(lease.fd); };
  if (absl::Status status = FillRandom(&lease.id); !status.ok()) return status;
  absl::MutexLock lock(&mutex_);
  if (absl::Status status = Add(lease.id, std::make_shared<Arena>(*std::move(memory)));
      !status.ok()) {
    return status;
  }
  std::move(close_fd).Cancel();
  return lease;
}

void Leases::End(const LeaseId& id) {
  absl::MutexLock lock(&mutex_);
  const auto it = leases_.find(id);
  if (it == leases_.end()) return;
  ended_.push_back(std::move(it->second));
  leases_.erase(it);
}

std::vector<std::shared_ptr<Arena>> Leases::TakeUnused() {
  absl::MutexLock lock(&mutex_);
  // Find does not know an ended lease, so an arena that only this vector has stays so.
  const auto first = std::partition(ended_.begin(), ended_.end(),
                                    [](const auto& arena) { return arena.use_count() > 1; });
  std::vector<std::shared_ptr<Arena>> unused(std::make_move_iterator(first),
                                             std::make_move_iterator(ended_.end()));
  ended_.erase(first, ended_.end());
  return unused;
}

void Leases::Free(std::shared_ptr<Arena> arena) {
  if (remover_ == nullptr || arena->on_device()) {
    absl::MutexLock lock(&mutex_);
    return Count(*arena, -1);
  }
  const Leaving leaving = {.fd = arena->TakeFile(), .bytes = arena->bytes(), .asked = false};
  arena.reset();  // unpins and unmaps the pages
  absl::MutexLock lock(&mutex_);
  leaving_bytes_ += leaving.bytes;
  leaving_[next_leaving_++] = leaving;
}

void Leases::ForgetRemoved() {
  for (const auto& [id, removed] : remover_->TakeEnded()) {
    const auto it = leaving_.find(id);
    it->second.asked = false;
    if (!removed) continue;
    close(it->second.fd);
    bytes_ -= it->second.bytes;
    leaving_bytes_ -= it->second.bytes;
    leaving_.erase(it);
  }
}

bool Leases::FreeEnded() {
  std::vector<std::shared_ptr<Arena>> unused = TakeUnused();
  for (auto& arena : unused) Free(std::move(arena));
  absl::MutexLock lock(&mutex_);
  if (remover_ != nullptr) ForgetRemoved();
  bool waits = !ended_.empty();
  for (auto& [id, leaving] : leaving_) {
    if (!leaving.asked) leaving.asked = remover_->Remove(leaving.fd, leaving.bytes, id);
    waits = waits || !leaving.asked;
  }
  return waits;
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

int64_t Leases::device_bytes() const {
  absl::MutexLock lock(&mutex_);
  return std::accumulate(device_bytes_.begin(), device_bytes_.end(), int64_t{0});
}

int64_t Leases::leaving_bytes() const {
  absl::MutexLock lock(&mutex_);
  return leaving_bytes_;
}

int Leases::leases() const {
  absl::MutexLock lock(&mutex_);
  return static_cast<int>(leases_.size());
}

}  // namespace logitd::arena
