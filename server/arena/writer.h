// Writes answers into arenas.
#ifndef LOGITD_SERVER_ARENA_WRITER_H_
#define LOGITD_SERVER_ARENA_WRITER_H_

#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"
#include "server/arena/leases.h"

namespace logitd::arena {

// An answer for an arena.
struct Answer {
  std::shared_ptr<const Arena> arena;
  int64_t offset = 0;
  absl::Span<const std::byte> bytes;
  std::shared_ptr<const void> keep;  // of `bytes`; dropped before `done` runs
  // Asked right before the write. False: CANCELLED, and nothing is written.
  absl::AnyInvocable<bool()> wanted;
  // Runs once: with OK when everything is written, else with the error of Arena::Write, or with
  // UNAVAILABLE where no thread could be started. What `wanted` uses may be destroyed with it.
  absl::AnyInvocable<void(const absl::Status&)> done;
};

// Each arena has a thread of its own while there is something to write, so that the large answers
// of one client keep nobody else's waiting. Thread-safe.
class Writer {
 public:
  Writer();
  // Waits until everything is written.
  ~Writer();
  Writer(const Writer&) = delete;
  Writer& operator=(const Writer&) = delete;

  // Answers of one arena are written in the order of these calls.
  void Write(Answer answer);

 private:
  struct Line;

  void Run(Line* line);

  absl::Mutex mutex_;
  bool stop_ ABSL_GUARDED_BY(mutex_) = false;
  absl::flat_hash_map<const Arena*, std::unique_ptr<Line>> lines_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace logitd::arena

#endif  // LOGITD_SERVER_ARENA_WRITER_H_
