// Log lines that peers can cause. Each source may write only some lines a second; what is beyond
// them is counted instead of written.
#ifndef LOGITD_SERVER_LOG_LIMITED_H_
#define LOGITD_SERVER_LOG_LIMITED_H_

#include <spdlog/spdlog.h>

#include <atomic>
#include <cstdint>
#include <string_view>
#include <utility>

namespace logitd::log {

// Who writes the lines. Each has its own limit.
enum class Source {
  kHeads,        // loads and unloads of heads
  kConnections,  // connections that were refused or cut
  kCallers,      // calls without an identity, or without the role
  kSlowCalls,    // calls that took long
  kArenas,       // leases of shared memory
};
inline constexpr Source kSources[] = {Source::kHeads, Source::kConnections, Source::kCallers,
                                      Source::kSlowCalls, Source::kArenas};
std::string_view Name(Source source);  // "heads"

// A source may write kBurst lines at once, and kLinesPerSecond in the long run.
inline constexpr int64_t kLinesPerSecond = 20;
inline constexpr int64_t kBurst = 100;

// A token bucket of lines. Thread-safe, without a lock.
class LineLimit {
 public:
  // False: the line is counted as suppressed. `now_ns`: a clock that never goes back.
  bool Allow(int64_t now_ns);

  // Since the start.
  int64_t suppressed() const { return suppressed_; }

  // Suppressed lines since the last call.
  int64_t TakeNews() {
    const int64_t total = suppressed_;
    return total - reported_.exchange(total);
  }

 private:
  std::atomic<int64_t> next_ns_ = 0;  // when the bucket is full again
  std::atomic<int64_t> suppressed_ = 0;
  std::atomic<int64_t> reported_ = 0;
};

// The limits of this process, one for each source.
LineLimit& LimitOf(Source source);

// True if the source may write a line now. Any thread.
bool Allow(Source source);

// spdlog::log, if the level is on and the source may write a line now. Any thread.
template <typename... Args>
void Limited(Source source, spdlog::level::level_enum level,
             spdlog::format_string_t<Args...> format, Args&&... args) {
  if (!spdlog::should_log(level) || !Allow(source)) return;
  spdlog::log(level, format, std::forward<Args>(args)...);
}

// Logs one line for each source that has suppressed lines since the last call. Call it once a
// second and at the end. Any thread.
void ReportSuppressed();

}  // namespace logitd::log

#endif  // LOGITD_SERVER_LOG_LIMITED_H_
