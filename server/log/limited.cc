#include "server/log/limited.h"
#include <algorithm>
#include <array>
#include <iterator>

#include "server/base/clock.h"

namespace logitd::log {
namespace {

constexpr int64_t kSecondNs = 1'000'000'000;
constexpr int64_t kLineNs = kSecondNs / kLinesPerSecond;

constexpr std::string_view kNames[] = {"heads", "connections", "callers", "slow_calls", "arenas"};
static_assert(std::size(kNames) == std::size(kSources));

}  // namespace

std::string_view Name(Source source) { return kNames[static_cast<size_t>(source)]; }

bool LineLimit::Allow(int64_t now_ns) {
  int64_t next = next_ns_;
  while (true) {
    const int64_t start = std::max(next, now_ns);
    if (start - now_ns > (kBurst - 1) * kLineNs) {
      ++suppressed_;
      return false;
    }
    if (next_ns_.compare_exchange_weak(next, start + kLineNs)) return true;
  }
}

LineLimit& LimitOf(Source source) {
  static std::array<LineLimit, std::size(kSources)> limits;
  return limits[static_cast<size_t>(source)];
}

bool Allow(Source source) { return LimitOf(source).Allow(MonotonicNanos()); }

void ReportSuppressed() {
  for (const Source source : kSources) {
    if (const int64_t lines = LimitOf(source).TakeNews(); lines > 0) {
      spdlog::warn("suppressed {} log lines of {}: more than {} a second", lines, Name(source),
                   kLinesPerSecond);
    }
  }
}

}  // namespace logitd::log
