#include "server/memory_watch.h"

#include <fcntl.h>
#include <spdlog/spdlog.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <utility>

namespace logitd {
namespace {

// While memory is short, looks follow each other like this, but giving back takes at most a fifth
// of the time: it locks the heap.
constexpr absl::Duration kShortPeriod = absl::Milliseconds(5);
constexpr int kGiveBackShare = 4;

}  // namespace

int64_t ResidentBytes() {
  const int fd = open("/proc/self/statm", O_RDONLY | O_CLOEXEC);
  if (fd < 0) return 0;
  char text[128] = {};
  const ssize_t got = read(fd, text, sizeof(text) - 1);
  close(fd);
  long long pages = 0;
  long long shared = 0;
  if (got <= 0 || std::sscanf(text, "%*d %lld %lld", &pages, &shared) != 2) return 0;
  return static_cast<int64_t>(pages - shared) * sysconf(_SC_PAGESIZE);
}

MemoryWatch::MemoryWatch(MemoryWatchOptions options)
    : options_(std::move(options)), look_(*options_.clock, [this](absl::Time) {
        const absl::Duration next = Look();
        return options_.clock->Now() + next;  // Look may take long
      }) {
  look_.RunBy(options_.clock->Now() + options_.period);
}

absl::Duration MemoryWatch::Look() {
  const int64_t most = limit() - options_.margin;
  int64_t resident = options_.resident();
  if (resident <= most) {
    // Shedding ends a margin lower, so that it does not start again at once.
    if (resident <= most - options_.margin) Shed(false);
    GiveBackUnused(resident);
    options_.saw(resident);
    return shedding_ ? kShortPeriod : options_.period;
  }
  const absl::Time start = options_.clock->Now();
  options_.give_back();
  const absl::Duration taken = options_.clock->Now() - start;
  resident = options_.resident();
  options_.saw(resident);
  if (resident > most) Shed(true);
  return std::max(kShortPeriod, kGiveBackShare * taken);
}

void MemoryWatch::GiveBackUnused(int64_t resident) {
  const int64_t now_ns = options_.clock->Nanos();
  if (resident - options_.base <= options_.held() + options_.spare) {
    unused_since_ns_ = 0;
  } else if (unused_since_ns_ == 0) {
    unused_since_ns_ = now_ns;
  } else if (now_ns - unused_since_ns_ >= absl::ToInt64Nanoseconds(options_.quiet)) {
    options_.give_back();
    unused_since_ns_ = 0;
  }
}

void MemoryWatch::Shed(bool shed) {
  if (shedding_ == shed) return;
  shedding_ = shed;
  if (shed) {
    spdlog::warn("memory: above the limit of {} MiB less {} MiB, new connections are closed",
                 limit() >> 20, options_.margin >> 20);
  } else {
    spdlog::info("memory: below the limit again");
  }
  options_.shed(shed);
}

}  // namespace logitd
