// A job's place in the scheduler, and lists of jobs.
#ifndef LOGITD_SERVER_ENGINE_JOB_PLACE_H_
#define LOGITD_SERVER_ENGINE_JOB_PLACE_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "server/engine/fair_queue.h"

namespace logitd::engine {

struct Batch;
class Job;
struct KeyQueue;

// Each job has one, so that a job costs the engine no allocation and no look-up.
struct JobPlace {
  enum class State : uint8_t {
    kNew,      // not submitted
    kWaiting,  // in its queue
    kInBatch,  // that has begun
    kDone,     // ended, or about to
  };
  // Written under the engine's lock, except the last step, kDone, which the stream takes before
  // it gives the batch back.
  std::atomic<State> state = State::kNew;
  bool begun = false;  // it was dropped after a slice of its batch
  // Its caller left while its batch ran: it ends after the slice. Written under the lock.
  std::atomic<bool> gone = false;
  absl::Status ending;  // where it ends without its last slice
  KeyQueue* queue = nullptr;
  Batch* batch = nullptr;  // while kInBatch
  size_t slot = 0;         // index in the batch
  Urgency urgency;
  double cost_ns = 0;  // as estimated when it was submitted
  int64_t submitted_ns = 0;
  Job* previous = nullptr;  // neighbours in the one list the job is in
  Job* next = nullptr;
  HeapLinks<Job> in_queue;     // while kWaiting
  HeapLinks<Job> by_deadline;  // while kWaiting, if it has one
  std::shared_ptr<Job> self;   // keeps the job from Submit to Done
};

// Jobs linked through JobPlace::previous and next. A job is in one such list at most.
struct JobList {
  void PushBack(Job* job);
  void Remove(Job* job);
  Job* PopFront();
  Job* first = nullptr;
  Job* last = nullptr;
  int64_t size = 0;
};

}  // namespace logitd::engine

#endif  // LOGITD_SERVER_ENGINE_JOB_PLACE_H_
