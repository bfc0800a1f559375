// The last guard of the process's memory: what connections and calls hold has limits of its own.
#ifndef LOGITD_SERVER_MEMORY_WATCH_H_
#define LOGITD_SERVER_MEMORY_WATCH_H_

#include <cstdint>
#include <functional>

#include "absl/time/time.h"
#include "server/base/alarm.h"
#include "server/base/clock.h"

namespace logitd {

// Resident memory of the process only: without leased memory, which other processes have too, and
// without pages of files. 0 if the system does not tell.
int64_t ResidentBytes();

struct MemoryWatchOptions {
  // Resident memory before the first connection.
  int64_t base = 0;
  // The most memory that the process may have beyond `base`. It may change, for instance with the
  // loaded heads.
  std::function<int64_t()> allowed_growth;
  // Bytes that calls hold now. Memory far beyond them is unused memory that malloc keeps.
  std::function<int64_t()> held;
  // With true: refuse new connections; with false: accept them again. On the watch's thread.
  std::function<void(bool)> shed;
  // After each look: what it saw. On the watch's thread.
  std::function<void(int64_t resident)> saw;

  // Acts this much before the limit: what 4 GB/s bring in between two looks, within the sum.
  int64_t margin = int64_t{64} << 20;
  absl::Duration period = absl::Milliseconds(50);
  // Unused memory beyond `spare` is given back to the system after it was unused for `quiet`. Less,
  // or sooner, would slow down a load that comes in bursts: memory that is given back costs a page
  // fault when it is used again.
  int64_t spare = int64_t{256} << 20;
  absl::Duration quiet = absl::Seconds(5);

  Clock* clock = &SteadyClock();  // outlives the watch
  std::function<int64_t()> resident = &ResidentBytes;
  std::function<void()> give_back;  // unused memory, to the system
};

// Looks at the resident memory in each period. Above the limit less the margin it gives unused
// memory back to the system and, if that is not enough, has new connections refused. It cuts
// nobody. Thread-safe.
class MemoryWatch {
 public:
  explicit MemoryWatch(MemoryWatchOptions options);

  int64_t limit() const { return options_.base + options_.allowed_growth(); }

 private:
  // One look. Returns the time until the next.
  absl::Duration Look();
  void GiveBackUnused(int64_t resident);
  void Shed(bool shed);

  const MemoryWatchOptions options_;

  // Only looks use these.
  bool shedding_ = false;
  int64_t unused_since_ns_ = 0;  // 0: it is not

  Alarm look_;
};

}  // namespace logitd

#endif  // LOGITD_SERVER_MEMORY_WATCH_H_
