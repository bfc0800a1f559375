// Which job runs when: the state of the engine, without threads, locks or time of its own.
#ifndef LOGITD_SERVER_ENGINE_SCHEDULER_H_
#define LOGITD_SERVER_ENGINE_SCHEDULER_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "server/engine/batch.h"
#include "server/engine/costs.h"
#include "server/engine/engine.h"
#include "server/engine/job.h"
#include "server/engine/run_slice.h"
#include "server/engine/running.h"
#include "server/engine/waiting.h"

namespace logitd::engine {

// A job waits (waiting.h) until a stream is free. The stream then takes the most urgent work that
// its device may run (running.h): a batch between two slices, or a new batch of the most urgent job
// and those that fit beside it. Its last slice ends the batch's jobs.
//
// A job that ends without that (its caller has left, its deadline has passed, its device is lost,
// the engine is closed, it can never run) is handed out by TakeEnded: at once if it waits or is
// between two slices, else after the slice. If that was the last one, the stream has ended it.
//
// Not thread-safe: one lock, the engine's. Under it only spec() of jobs is called.
class Scheduler {
 public:
  // `slabs`: the same number for each device, in the order of devices. All outlive this.
  Scheduler(const EngineOptions& options, const SliceRules& rules, int devices,
            const std::vector<Slab>& slabs, const Costs& costs);

  void Submit(std::shared_ptr<Job> job, int64_t now_ns);
  // Its caller has left.
  void Cancel(Job* job);

  // The work of a free stream of the device: a batch, which belongs to the caller until GiveBack.
  // Null: there is none.
  Batch* Take(int device, int64_t now_ns);
  // True: Take finds something.
  bool HasWork(int device, int64_t now_ns);
  // After a slice.
  void GiveBack(Batch* batch, absl::Time now);
  // Does what time has brought: ends jobs whose deadline has passed, and lets Take find jobs whose
  // delay is over.
  void MakeDue(absl::Time now);
  // When there is more of it, if nothing else happens; it may be earlier.
  absl::Time next_due() const;

  // From here on `device` runs nothing. Jobs of its batches, those that only it can run, and all on
  // sharded heads, end with UNAVAILABLE and `message`, unless their last slice runs. Other work is
  // not affected. Not for the last device: see Close.
  void Lose(int device, std::string_view message, absl::Time now);
  // From here on every job ends with UNAVAILABLE and `message`, unless its last slice runs. The
  // message of the first Close stays.
  void Close(std::string_view message, absl::Time now);

  // Jobs that have ended. Tell must be called for each, without the lock, and Told afterwards.
  JobList TakeEnded();
  static void Tell(Job* job, int64_t now_ns);
  // True: a slice of the job's batch has run.
  static bool HasBegun(const Job& job) { return job.place_.begun; }
  void Told(int64_t jobs);

  // For the stream that runs a batch, without the lock: runs Done of a job, which may be destroyed
  // afterwards. Adds queue_ns to `times`.
  static void Finish(Job* job, const absl::Status& status, const JobAnswer& answer,
                     int64_t taken_ns, JobTimes* times);
  // True: the caller of a job has left since its batch was taken.
  static bool IsGone(const Job& job);

  // True: the job is the only one, it waits, and it is expected to take no longer than `most`.
  bool IsAloneAndBrief(const Job& job, absl::Duration most) const;

  bool idle() const { return unfinished_ == 0; }
  int64_t waiting() const { return waiting_.count(); }
  RunningBatches& running() { return running_; }

 private:
  struct Choice {
    Batch* paused = nullptr;
    Job* first = nullptr;  // of a new batch; where both are set, it is the more urgent one
  };
  Choice Choose(int device, int64_t now_ns);
  void End(Job* job, absl::Status status);
  void EndPaused(Batch* batch, absl::Status status);
  void EndBetweenSlices(Batch* batch, absl::Time now);
  void ExpireRunning(Batch* batch, absl::Time now);
  void EndWaiting(absl::FunctionRef<absl::Status(const Job&)> why);
  void Learn(Batch* batch);
  void Settle(const Batch& batch);

  const EngineOptions options_;
  WaitingJobs waiting_;
  RunningBatches running_;
  JobList ended_;
  int64_t unfinished_ = 0;  // submitted, Done has not returned
  // No batch is to be abandoned or ended earlier, because its jobs are late.
  absl::Time batches_expire_ = absl::InfiniteFuture();
  absl::Status closed_;  // OK: it is not
  absl::Status lost_;    // of the last Lose
};

}  // namespace logitd::engine

#endif  // LOGITD_SERVER_ENGINE_SCHEDULER_H_
