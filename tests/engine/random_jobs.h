// Jobs of all kinds, from a seed.
#ifndef LOGITD_TESTS_ENGINE_RANDOM_JOBS_H_
#define LOGITD_TESTS_ENGINE_RANDOM_JOBS_H_

#include <cstdint>
#include <memory>
#include <random>

#include "tests/engine/shift_job.h"
#include "tests/engine/test_job.h"

namespace logitd::engine {

class RandomJobs {
 public:
  explicit RandomJobs(uint32_t seed) : random_(seed) { random_.discard(3); }

  int Below(int n) { return static_cast<int>(random_() % static_cast<uint32_t>(n)); }
  bool OneIn(int n) { return Below(n) == 0; }

  // Sets what `shape` has no value for. Every fourth job has up to `most_rows` rows, the others up
  // to four. Every third has a deadline, up to `most_time` after `now`. Without a head and a
  // device, every fourth is exclusive.
  std::shared_ptr<CheckedJob> Next(TestJob::Shape shape, int most_rows, absl::Time now,
                                   absl::Duration most_time) {
    shape.row_elements = 3 + Below(3);
    shape.rows = 1 + (OneIn(4) ? Below(most_rows) : Below(4));
    shape.caller = {.id = static_cast<uint64_t>(Below(3)),
                    .weight = 1.0 + Below(2),
                    .priority = OneIn(4) ? Priority::kBatch : Priority::kInteractive};
    if (OneIn(3)) shape.deadline = now + most_time * Below(40) / 40;
    if (shape.head == nullptr && shape.device == kAnyDevice && OneIn(4)) {
      return std::make_shared<ShiftJob>(ShiftJob::Shape{.tag = shape.tag,
                                                        .rows = shape.rows,
                                                        .row_elements = shape.row_elements,
                                                        .notes = Below(6),
                                                        .in_place = OneIn(2),
                                                        .keep = !OneIn(3),
                                                        .placed = OneIn(3),
                                                        .caller = shape.caller,
                                                        .deadline = shape.deadline});
    }
    shape.entries_per_row = Below(3);
    shape.notes_per_row = Below(3);
    shape.whole = OneIn(8);
    return std::make_shared<TestJob>(shape);
  }

 private:
  std::minstd_rand random_;
};

}  // namespace logitd::engine

#endif  // LOGITD_TESTS_ENGINE_RANDOM_JOBS_H_
