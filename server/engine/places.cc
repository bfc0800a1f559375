#include "server/engine/places.h"

#include <sys/mman.h>

#include <algorithm>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "server/engine/sync.h"
#include "spdlog/spdlog.h"

namespace logitd::engine {
namespace {

constexpr size_t kPage = 4096;
constexpr size_t kPinnedPiece = size_t{64} << 20;

size_t WholePages(size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

}  // namespace

// The free runs of a mapping. No two of them touch.
class Places::Runs {
 public:
  explicit Runs(size_t bytes) : mapped_bytes_(bytes + kPinnedPiece) {
    mapped_ = mmap(nullptr, mapped_bytes_, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapped_ == MAP_FAILED) return;
    // Pinning cuts memory at multiples of the piece too.
    const uintptr_t at = reinterpret_cast<uintptr_t>(mapped_) + kPinnedPiece - 1;
    data_ = reinterpret_cast<std::byte*>(at / kPinnedPiece * kPinnedPiece);
    madvise(data_, bytes, MADV_HUGEPAGE);
  }
  ~Runs() {
    if (data_ != nullptr) munmap(mapped_, mapped_bytes_);
  }
  Runs(const Runs&) = delete;
  Runs& operator=(const Runs&) = delete;

  std::byte* data() const { return data_; }

  std::byte* Take(size_t bytes) {
    MutexLock lock(mutex_);
    const auto it = by_size_.lower_bound({bytes, 0});
    if (it == by_size_.end()) return nullptr;
    const auto [size, offset] = *it;
    Remove(offset, size);
    if (size > bytes) Insert(offset + bytes, size - bytes);
    return data_ + offset;
  }

  void Free(std::byte* at, size_t bytes) {
    MutexLock lock(mutex_);
    auto offset = static_cast<size_t>(at - data_);
    const auto next = by_place_.lower_bound(offset);
    if (next != by_place_.begin()) {
      const auto [before, size] = *std::prev(next);
      if (before + size == offset) {
        Remove(before, size);
        offset = before;
        bytes += size;
      }
    }
    if (const auto after = by_place_.find(offset + bytes); after != by_place_.end()) {
      const size_t size = after->second;
      Remove(offset + bytes, size);
      bytes += size;
    }
    Insert(offset, bytes);
  }

  void GiveBack() {
    std::vector<std::pair<size_t, size_t>> free;
    {
      MutexLock lock(mutex_);
      free.assign(by_place_.begin(), by_place_.end());
      for (const auto& [offset, size] : free) Remove(offset, size);
    }
    for (const auto& [offset, size] : free) {
      madvise(data_ + offset, size, MADV_DONTNEED);
      Free(data_ + offset, size);
    }
  }

 private:
  void Insert(size_t offset, size_t size) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    by_place_.emplace(offset, size);
    by_size_.emplace(size, offset);
  }
  void Remove(size_t offset, size_t size) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    by_place_.erase(offset);
    by_size_.erase({size, offset});
  }

  const size_t mapped_bytes_;
  void* mapped_;
  std::byte* data_ = nullptr;  // null: there are no addresses, and never a free run
  Mutex mutex_;
  std::map<size_t, size_t> by_place_ ABSL_GUARDED_BY(mutex_);            // offset -> bytes
  std::set<std::pair<size_t, size_t>> by_size_ ABSL_GUARDED_BY(mutex_);  // bytes, offset
};

Places::Places(const Devices& devices, int64_t bytes)
    : devices_(devices),
      bytes_(WholePages(static_cast<size_t>(bytes))),
      runs_(std::make_shared<Runs>(bytes_)) {
  if (runs_->data() == nullptr) return;
  if (devices_.info(0).is_host) {
    runs_->Free(runs_->data(), bytes_);
  } else {
    pinner_ = std::thread([this] { Pin(); });
  }
}

Places::~Places() {
  stop_ = true;
  if (pinner_.joinable()) pinner_.join();
  Unpin();
}

std::shared_ptr<std::byte> Places::Take(size_t bytes) {
  bytes = WholePages(bytes);
  std::byte* const at = runs_->Take(bytes);
  if (at == nullptr) return nullptr;
  return {at, [runs = runs_, bytes](std::byte* taken) { runs->Free(taken, bytes); }};
}

void Places::GiveBack() {
  if (devices_.info(0).is_host) runs_->GiveBack();
}

void Places::Pin() {
  for (size_t done = 0; done < bytes_ && !stop_;) {
    const size_t now = std::min(bytes_ - done, kPinnedPiece);
    const absl::Status status = devices_.backend(0)->PinHost(runs_->data() + done, now);
    if (!status.ok()) {
      if (!absl::IsUnimplemented(status)) {
        spdlog::warn("{}; messages beyond {} MiB are copied by the CPU",
                     std::string(status.message()), done >> 20);
      }
      return;
    }
    runs_->Free(runs_->data() + done, now);
    done += now;
    pinned_ = static_cast<int64_t>(done);
  }
}

void Places::Unpin() {
  const auto pinned = static_cast<size_t>(pinned_.load());
  for (size_t done = 0; done < pinned; done += kPinnedPiece) {
    devices_.backend(0)->UnpinHost(runs_->data() + done);
  }
}

}  // namespace logitd::engine
