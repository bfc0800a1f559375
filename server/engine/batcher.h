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
#include "absl/container/inlined_vector.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "server/engine/batch.h"
#include "server/engine/costs.h"
#include "server/engine/devices.h"
#include "server/engine/engine.h"
#include "server/engine/fair_queue.h"
#include "server/engine/job.h"
#include "server/engine/run_slice.h"
#include "server/engine/sync.h"

namespace logitd::engine {

class Metrics;

// Counts the threads inside a public call, from before it first uses the object to after it last
// does.
class CallerScope {
 public:
  explicit CallerScope(std::atomic<int>& callers) : callers_(callers) {
    callers_.fetch_add(1, std::memory_order_relaxed);
  }
  ~CallerScope() { callers_.fetch_sub(1, std::memory_order_release); }

 private:
  std::atomic<int>& callers_;
};

// The links of Job::Place, for heaps of jobs by urgency.
struct QueueLinks {
  static auto& Of(Job& job) { return job.place_.in_queue; }
  static bool Before(const Job& a, const Job& b) { return a.place_.urgency < b.place_.urgency; }
};
struct AllLinks {
  static auto& Of(Job& job) { return job.place_.in_all; }
  static bool Before(const Job& a, const Job& b) { return a.place_.urgency < b.place_.urgency; }
};

// Jobs that may share a batch: those that wait for a slab, and their open batch. Never both: a job
// that does not fit seals the open batch.
struct Kind;
struct KeyQueue {
  Kind* kind = nullptr;
  bool is_long = false;
  Batch* open = nullptr;
  FairHeap<Job, QueueLinks> pending;
};

struct KindKey {
  BatchKey key;
  Priority priority = Priority::kInteractive;
  friend bool operator==(const KindKey&, const KindKey&) = default;
};

// Jobs of one key and priority. A job is long if it is expected to take more than one slice. Long
// and short jobs do not share batches: a short job never waits for the rows of a long one.
struct Kind {
  KindKey key;
  double row_ns = 0;     // a row's time on a stream, as estimated; 0: unknown
  bool has_run = false;  // the estimate is not only that of other kinds
  double kernel_ns = 0;  // of its last batches that read a head once; 0: there was none
  KeyQueue of_short;
  KeyQueue of_long;
  int batches = 0;  // slabs that hold one of its batches
};

// Thread-safe. One lock. Under it the batcher calls only spec() of a job.
//
// Order. By urgency (fair_queue.h): by priority, then fairly by caller, by estimated cost. Streams
// take the batch with the most urgent job. A free slab goes to the most urgent job without one, and
// the jobs of its key that fit join it, the most urgent first. Long jobs of one caller go
// in the order of their arrival, and so do its short ones.
//
// Devices. A batch gathers in host memory, which all devices can read, and belongs to none. The first
// stream that is free takes it, whichever device it is of, and gives it some of its device's memory.
// From then on only streams of that device run its slices. A batch whose key names a device
// (BatchKey::device) is taken by that one only. Where the system has several nodes, a
// device prefers batches whose host memory is near, as if they had arrived one slice earlier.
// A lost device runs nothing; the slabs that are near it are not used again, so that work that has
// not begun always finds memory on a device.
//
// Sharded heads. A batch on one runs on all devices together, and counts as work of the first. One
// slice of them runs at a time. So a batch on one is sealed only when that turn is free. When any
// device is lost, all work on sharded heads ends.
//
// Slices. A batch that ran a slice waits for its next one like any other batch, as if its work had
// arrived later by what it has had. Between slices jobs end whose caller has left, whose deadline
// has passed, or that Close finds; a batch without jobs ends.
//
// Room for short work. While slabs hold work, the last free one is kept from long jobs, from
// kBatch, and from a caller that opened all other batches. Where there are only two slabs, long
// jobs up to kSlowSlice may take it, since a stream then needs it to copy while it runs. Slices
// that may take longer than kSlowSlice never run on all streams of a device at the same time, if it
// has several, nor on all streams of all devices.
//
// Sealing. A batch is sealed
//   - when a job of its key does not fit,
//   - when it has max_batch_rows rows,
//   - when a stream is idle, at least one payload is copied, and max_batch_delay is over or jobs
//     wait for slabs.
// It runs when all its payloads are copied. A batch stays open while its first payload is copied,
// since it cannot run before.
//
// Heads on a device. A batch of few rows reads all weights of its head and takes as long with 64 rows
// as with one: 150 us on an H100, where two at the same time take 200. So where there are more jobs
// than streams to run them, the next one on the head of a batch that runs stays open, until the
// kernels that run are about to end: a stream then takes it, and its rows get to the device
// meanwhile. It does not wait where that would take longer than kMostHeld, nor past the time at which
// its own kernels must begin to meet a job's deadline. 64 rings make 1.17 times as many calls so, 3
// rings 0.92 times, and 2 would make 0.9 times as many (bench/results/h100/latency.json).
class Batcher {
 public:
  // A slice that is not expected to take longer is soon over: others wait for it.
  static constexpr absl::Duration kSlowSlice = absl::Milliseconds(50);
  // A batch that is expected to take longer is not lent: beside it, two hand-overs are nothing.
  static constexpr absl::Duration kMostLent = absl::Microseconds(300);
  // No batch waits longer for the kernels of another one on its head.
  static constexpr absl::Duration kMostHeld = absl::Milliseconds(2);
  // Nor is one held if both together have fewer jobs than this.
  static constexpr int kHeldJobs = 3;

  // One batch per slab; each device has as many, and those of a device follow each other. `metrics`
  // may be null. All outlive this.
  Batcher(const EngineOptions& options, const SliceRules& rules, const Devices& devices,
          const std::vector<Slab>& slabs, const Costs* costs, Metrics* metrics);

  // A batch that another thread runs in the place of an idle stream's. Its stream, counted over all
  // devices, is lent to that thread until Return.
  struct Loan {
    Batch* batch = nullptr;  // null: there is none
    int stream = 0;
  };

  // See Engine.
  void Submit(absl::Span<std::shared_ptr<Job>> jobs);
  Loan SubmitAlone(std::shared_ptr<Job> job);
  // After a slice of the batch.
  void Return(const Loan& loan);
  // For a thread that has a Loan, or asks for one.
  CallerScope EnterCall() { return CallerScope(callers_); }
  void Cancel(const Job& job);
  bool WaitIdle(absl::Time deadline);
  std::optional<RunningBatch> OldestRunning();

  // For the thread of `stream`, counted over all devices: gives `batch` back after a slice (null at
  // first) and waits for the next one to run, which may be the same. It belongs to the caller until
  // it is given back. Null: the engine stops, or the device is lost.
  Batch* Next(int stream, Batch* batch);

  // For stream threads: JobAnswer::keep for a batch of the caller's. Null if fewer slabs than
  // streams would be left. It may outlive the batcher.
  std::shared_ptr<const void> Keep(Batch* batch);

  // For stream threads: runs Done of a job in a batch of the caller's. The job may be destroyed
  // afterwards. Adds to `times` what the batcher knows: copy_ns, and queue_ns up to `taken_ns`.
  static void Finish(Job* job, const absl::Status& status, const JobAnswer& answer,
                     int64_t taken_ns, JobTimes* times);

  // For stream threads: whether the caller of a job has left since its batch was taken.
  static bool IsGone(const Job& job);

  // For copy threads: copies the payloads of jobs that waited for a slab, first to slabs near
  // `device`, until Stop.
  void CopyLoop(int device);

  // For the timer thread: ends waiting jobs whose deadline has passed, until Stop.
  void ExpireLoop();

  // From here on `device` runs nothing. Jobs of its batches that have begun, those that only it can
  // run, and all on sharded heads, end with UNAVAILABLE and `message`: now, or after the slice that
  // they are in, unless that is their last. Other work is not affected. Not for the last device:
  // see Close.
  void Lose(int device, std::string_view message);

  // From here on every job ends with UNAVAILABLE and `message`: now, or after the slice that it is
  // in, unless that is its last. The message of the first Close stays.
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
    size_t operator()(const KindKey& key) const;
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

  // A payload that this thread copies, without the lock.
  struct PayloadCopy {
    Job* job;
    std::byte* to;
    size_t row_stride;
  };
  using Copies = absl::InlinedVector<PayloadCopy, 8>;

  // The state of a stream.
  struct Seat {
    bool waits = false;  // its thread is inside Next
    bool lent = false;
  };

  // The state of a device.
  struct Device {
    int node = -1;
    bool lost = false;
    int idle_streams = 0;            // inside Next, without a batch, and not lent
    int slow = 0;                    // slices that may take longer than kSlowSlice
    int idle_copiers = 0;            // copy threads that wait
    std::vector<std::byte*> memory;  // for batches that have not begun; each as large as a slab
    JobList to_copy;                 // kPlaced, in slabs near it
    CondVar wake;                    // its streams
    CondVar copy_wake;               // its copy threads
  };

  bool Fits(const Batch& batch, const JobSpec& spec) const;
  Kind* KindOf(const KindKey& key) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool IsLost(const BatchKey& key) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool IsUsable(const Batch& batch) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  Batch* FreeBatch() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool MayOpen(const Job& job) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  KeyQueue* Arrive(Job* job) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Open(Batch* batch, KeyQueue* queue, const Job& first) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Reserve(Batch* batch, Job* job, const JobSpec& spec) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Seal(Batch* batch) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Release(Batch* batch) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void ReleaseIfEmpty(Batch* batch) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void WakeCopier(int home) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void PlacePending() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void PushPending(KeyQueue* queue, Job* job) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void RemovePending(Job* job) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void DropFrom(Batch* batch, Job* job, absl::StatusCode why, JobList& ended)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Drop(Job* job, absl::StatusCode why, JobList& ended) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void ExpireRunning(Batch& batch, absl::StatusCode why, absl::Time due_by)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void ForEachWaiting(absl::FunctionRef<void(Job*)> visit) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void DropLost(JobList& ended) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void DropAll(absl::StatusCode why, absl::Time due_by, JobList& ended)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void PlaceJob(std::shared_ptr<Job> submitted, Copies& copies, JobList& ended)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void LeaveToCopier(Batch* batch, Job* job) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  Loan Copy(absl::Span<const PayloadCopy> copies, bool borrow);
  bool Copied(Job* job, JobList& ended) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  Device& DeviceOf(int stream) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return devices_[static_cast<size_t>(stream / options_.streams)];
  }
  Loan Borrow(Batch* batch) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void End(JobList& ended);
  bool IsDue(const Batch& batch, int64_t now_ns) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool SomeDeviceIsLost() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool HasTurn(const Batch& batch, const Device& device) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  int64_t HeldUntil(const Batch& batch, const Device& device) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool IsHeld(const Batch& batch, const Device& device) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  int64_t FirstHeldUntil(const Device& device) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  int StreamsThatMayBegin(const Device& device) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void SealForIdleStreams() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool IsFor(const Batch& batch, const Device& device) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool MayRun(const Batch& batch, const Device& device, int64_t now_ns) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool ComesFirst(const Batch& a, const Batch& b, const Device& device) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  Batch* FindMostUrgent(const Device& device) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  Batch* TakeMostUrgent(Device& device) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void GiveMemory(Batch* batch, Device& device) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void TakeMemoryBack(Batch* batch) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool IsSlow(const Batch& batch) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void GiveBack(Batch* batch, JobList& ended) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void EndBetweenSlices(Batch* batch, JobList& ended) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Settle(const Batch& batch) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Time NextDue(int64_t held, int64_t now_ns) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Wake(Device& device) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  Device* MostIdle() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void SealAndWake(bool for_delay = false) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Publish() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const EngineOptions options_;
  const int64_t max_batch_delay_ns_;
  const int64_t idle_spin_ns_;
  const SliceRules rules_;
  const Costs* const costs_;
  Metrics* const metrics_;
  const bool on_host_;  // DeviceInfo::is_host
  const std::shared_ptr<ReturnDesk> desk_;

  Mutex mutex_;
  CondVar timer_wake_;
  CondVar all_done_;
  CondVar all_back_;
  std::vector<Device> devices_ ABSL_GUARDED_BY(mutex_);
  std::vector<Seat> seats_ ABSL_GUARDED_BY(mutex_);  // of all streams
  int devices_left_ ABSL_GUARDED_BY(mutex_);
  std::vector<Batch> batches_ ABSL_GUARDED_BY(mutex_);
  absl::flat_hash_map<KindKey, std::unique_ptr<Kind>, KeyHash> kinds_ ABSL_GUARDED_BY(mutex_);
  JobList pending_ ABSL_GUARDED_BY(mutex_);                        // without a slab, all keys
  FairHeap<Job, AllLinks> pending_short_ ABSL_GUARDED_BY(mutex_);  // the same jobs
  FairHeap<Job, AllLinks> pending_long_ ABSL_GUARDED_BY(mutex_);
  FairClock clock_ ABSL_GUARDED_BY(mutex_);
  uint64_t next_sequence_ ABSL_GUARDED_BY(mutex_) = 1;
  int64_t unfinished_ ABSL_GUARDED_BY(mutex_) = 0;  // submitted, Done has not returned
  int64_t open_jobs_ ABSL_GUARDED_BY(mutex_) = 0;   // in a batch that does not run yet
  int64_t kept_ ABSL_GUARDED_BY(mutex_) = 0;        // slabs
  bool sharding_ ABSL_GUARDED_BY(mutex_) = false;   // a slice on a sharded head runs
  int slow_ ABSL_GUARDED_BY(mutex_) = 0;            // slices that may take longer than kSlowSlice
  Device* spinner_ ABSL_GUARDED_BY(mutex_) = nullptr;  // whose idle stream polls wakes_; null: none
  // No job that waits, or is in a batch between slices, has an earlier deadline.
  absl::Time next_expiry_ ABSL_GUARDED_BY(mutex_) = absl::InfiniteFuture();
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::string closed_message_ ABSL_GUARDED_BY(mutex_);
  std::string lost_message_ ABSL_GUARDED_BY(mutex_);  // of the last Lose
  std::atomic<uint32_t> wakes_ = 0;
  std::atomic<int> callers_ = 0;  // threads of others inside a public call
};

}  // namespace logitd::engine

#endif  // LOGITD_SERVER_ENGINE_BATCHER_H_
