// The batcher decides which job goes into which batch and which batch runs next. It owns no
// threads: the engine's threads call it.
#ifndef LOGITD_SERVER_ENGINE_BATCHER_H_
#define LOGITD_SERVER_ENGINE_BATCHER_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "server/engine/batch.h"
#include "server/engine/engine.h"
#include "server/engine/job.h"
#include "server/engine/sync.h"

namespace logitd::engine {

class Metrics;

// The jobs of one key that wait for a slab, in order, and the key's open batch. Never both: a job
// that does not fit seals the open batch.
struct KeyQueue {
  BatchKey key;
  Batch* open = nullptr;
  Job* first = nullptr;
  Job* last = nullptr;
};

// Thread-safe. One lock. Under it the batcher calls only spec() of a job.
//
// Order. The job that waits longest goes first. Streams take the batch with the oldest first job. A
// free slab goes to the oldest job without one, and the jobs of its key that fit join it. So no key
// starves another.
//
// Sealing. A batch is sealed
//   - when a job of its key does not fit,
//   - when it has max_batch_rows rows,
//   - when a stream is idle, at least one payload is copied, and max_batch_delay is over or jobs
//     wait for slabs.
// It runs when all its payloads are copied. A batch stays open while its first payload is copied,
// since it cannot run before.
class Batcher {
 public:
  // One batch per slab. `metrics` may be null. Both outlive this.
  Batcher(const EngineOptions& options, const std::vector<Slab>& slabs, Metrics* metrics);

  // See Engine.
  void Submit(std::shared_ptr<Job> job);
  void Cancel(const Job& job);
  bool WaitIdle(absl::Time deadline);
  std::optional<RunningBatch> OldestRunning();

  // For stream threads: gives `finished` back (null at first; all its jobs are done) and waits for
  // the next batch, which belongs to the caller until it is given back. Null: the engine stops.
  Batch* Next(Batch* finished);

  // For stream threads: JobAnswer::keep for a batch of the caller's. Null if fewer slabs than
  // streams would be left. It may outlive the batcher.
  std::shared_ptr<const void> Keep(Batch* batch);

  // For stream threads: runs Done of a job in a batch of the caller's. The job may be destroyed
  // afterwards. Adds to `times` what the batcher knows: copy_ns, and queue_ns up to `taken_ns`.
  static void Finish(Job* job, const absl::Status& status, const JobAnswer& answer,
                     int64_t taken_ns, JobTimes* times);

  // For copy threads: copies the payloads of jobs that waited for a slab, until Stop.
  void CopyLoop();

  // For the timer thread: ends waiting jobs whose deadline has passed, until Stop.
  void ExpireLoop();

  // From here on every job that is not running ends with UNAVAILABLE and `message`. The message of
  // the first Close stays.
  void Close(std::string_view message);

  // Close, and the loops end when their current work is done.
  void Stop();

  // After Stop. Returns when no other thread is inside Submit, Cancel, WaitIdle or OldestRunning.
  void WaitForCallers();

  // After Stop. Waits until no answer is kept, or until `deadline`. False: answers are still kept.
  // Dropping them later does not touch the batcher, but their slabs must stay allocated.
  bool WaitForKept(absl::Time deadline);

 private:
  struct KeyHash {
    size_t operator()(const BatchKey& key) const;
  };

  // Kept answers reach the batcher through this, because they may outlive it.
  struct ReturnDesk {
    Mutex mutex;
    Batcher* batcher ABSL_GUARDED_BY(mutex);
  };
  void TakeBack(Batch* batch);

  // Jobs linked through Place::previous and next.
  struct JobList {
    void PushBack(Job* job);
    void Remove(Job* job);
    Job* PopFront();
    Job* first = nullptr;
    Job* last = nullptr;
    int64_t size = 0;
  };

  bool Fits(const Batch& batch, const JobSpec& spec) const;
  KeyQueue* QueueOf(const BatchKey& key) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  Batch* FreeBatch() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Open(Batch* batch, KeyQueue* queue, const Job& oldest) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Reserve(Batch* batch, Job* job, const JobSpec& spec) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Seal(Batch* batch) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Release(Batch* batch) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void ReleaseIfEmpty(Batch* batch) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void PlacePending() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void PushPending(KeyQueue* queue, Job* job) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void RemovePending(KeyQueue* queue, Job* job) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Drop(Job* job, absl::StatusCode why, JobList& ended) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void DropAll(absl::StatusCode why, absl::Time due_by, JobList& ended)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Copy(Job* job, std::byte* to, size_t row_stride, bool brief);
  void End(JobList& ended);
  bool IsDue(const Batch& batch, int64_t now_ns) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  int SealForIdleStreams() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  Batch* TakeOldest() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Time NextDue() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void WakeStream() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Publish() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const EngineOptions options_;
  const int64_t max_batch_delay_ns_;
  const int64_t idle_spin_ns_;
  Metrics* const metrics_;
  const int64_t max_kept_;  // slabs
  const std::shared_ptr<ReturnDesk> desk_;

  Mutex mutex_;
  CondVar stream_wake_;
  CondVar copy_wake_;
  CondVar timer_wake_;
  CondVar all_done_;
  CondVar all_back_;
  std::vector<Batch> batches_ ABSL_GUARDED_BY(mutex_);
  absl::flat_hash_map<BatchKey, std::unique_ptr<KeyQueue>, KeyHash> queues_ ABSL_GUARDED_BY(mutex_);
  JobList pending_ ABSL_GUARDED_BY(mutex_);  // without a slab, all keys
  JobList to_copy_ ABSL_GUARDED_BY(mutex_);  // kPlaced
  uint64_t next_sequence_ ABSL_GUARDED_BY(mutex_) = 1;
  int64_t unfinished_ ABSL_GUARDED_BY(mutex_) = 0;  // submitted, Done has not returned
  int64_t open_jobs_ ABSL_GUARDED_BY(mutex_) = 0;   // in a batch that does not run yet
  int64_t kept_ ABSL_GUARDED_BY(mutex_) = 0;        // slabs
  int idle_streams_ ABSL_GUARDED_BY(mutex_) = 0;    // inside Next, without a batch
  bool spinning_ ABSL_GUARDED_BY(mutex_) = false;   // an idle stream polls wakes_
  bool roused_ ABSL_GUARDED_BY(mutex_) = false;     // an idle stream was woken for a brief copy
  int brief_copies_ ABSL_GUARDED_BY(mutex_) = 0;    // under way; see kMinBriefCopyBytes
  // No waiting job has an earlier deadline.
  absl::Time next_expiry_ ABSL_GUARDED_BY(mutex_) = absl::InfiniteFuture();
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::string closed_message_ ABSL_GUARDED_BY(mutex_);
  std::atomic<uint32_t> wakes_ = 0;
  std::atomic<int> callers_ = 0;  // threads of others inside a public call
};

}  // namespace logitd::engine

#endif  // LOGITD_SERVER_ENGINE_BATCHER_H_
