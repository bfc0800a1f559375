// The jobs that wait: who is next, and who shares a batch with it.
#ifndef LOGITD_SERVER_ENGINE_WAITING_H_
#define LOGITD_SERVER_ENGINE_WAITING_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <set>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/functional/function_ref.h"
#include "server/engine/batch.h"
#include "server/engine/costs.h"
#include "server/engine/engine.h"
#include "server/engine/fair_queue.h"
#include "server/engine/job.h"
#include "server/engine/run_slice.h"

namespace logitd::engine {

// How much of a stream's time a job takes by estimate. kShort: one slice. kLong: several. kSlow:
// one slice of more than kSlowSlice, because the job may not be cut, or not so often.
enum class Length : uint8_t { kShort, kLong, kSlow };
inline constexpr size_t kLengths = 3;

// A slice that is not expected to take longer is soon over: others wait for it.
inline constexpr absl::Duration kSlowSlice = absl::Milliseconds(50);

struct KindKey {
  BatchKey key;
  Priority priority = Priority::kInteractive;
  friend bool operator==(const KindKey&, const KindKey&) = default;
  template <typename H>
  friend H AbslHashValue(H hash, const KindKey& kind) {
    return H::combine(std::move(hash), kind.key, kind.priority);
  }
};

// The links of Job::Place, for heaps of jobs.
struct QueueLinks {
  static auto& Of(Job& job) { return job.place_.in_queue; }
  static bool Before(const Job& a, const Job& b) { return a.place_.urgency < b.place_.urgency; }
};
struct DeadlineLinks {
  static auto& Of(Job& job) { return job.place_.by_deadline; }
  static bool Before(const Job& a, const Job& b) { return a.spec().deadline < b.spec().deadline; }
};

// Waiting jobs that may share a batch: of one kind and one length, so that a short job never waits
// for the rows of a long one.
struct KeyQueue {
  struct Kind* kind = nullptr;
  Length length = Length::kShort;
  FairHeap<Job, QueueLinks> jobs;
  int64_t rows = 0;
  int count = 0;  // of jobs
  // It is in its lane. Otherwise it will be from `due_ns` on.
  bool due = false;
  int64_t due_ns = 0;
  HeapLinks<KeyQueue> in_lane;
};

// For heaps of queues, by the urgency of their first jobs.
struct LaneLinks {
  static auto& Of(KeyQueue& queue) { return queue.in_lane; }
  static bool Before(const KeyQueue& a, const KeyQueue& b) {
    return QueueLinks::Before(*a.jobs.top(), *b.jobs.top());
  }
};

// Jobs of one key and priority.
struct Kind {
  KindKey key;
  double row_ns = 0;                      // a row's time on a stream, as estimated; 0: unknown
  bool has_run = false;                   // the estimate is not only that of other kinds
  std::array<KeyQueue, kLengths> queues;  // by Length
  int batches = 0;                        // that have begun
};

// Order. By urgency (fair_queue.h): by priority, then fairly by caller, by estimated cost. A batch
// is the most urgent job and those of its queue that fit beside it, the most urgent first, as far
// as one slice goes. Others lose nothing by waiting. Long jobs of one caller go in the order of
// their arrival, and so do its short ones.
//
// A queue becomes due EngineOptions::max_batch_delay after its first job, or as soon as it fills a
// batch. Only jobs of due queues are found.
//
// Not thread-safe.
class WaitingJobs {
 public:
  // Keys kept without a job: clients come back with the vocabulary they had.
  static constexpr size_t kMaxIdleKeys = 256;
  static constexpr int64_t kNever = std::numeric_limits<int64_t>::max();

  // `costs` outlives this.
  WaitingJobs(const EngineOptions& options, const SliceRules& rules, int devices,
              const Costs& costs);

  void Add(Job* job, int64_t now_ns);
  void Remove(Job* job);

  // Queues whose time has come become due.
  void MakeDue(int64_t now_ns);
  // When the next one does; kNever: none waits for its time.
  int64_t next_due_ns() const { return by_due_.empty() ? kNever : by_due_.begin()->first; }

  // The most urgent job that the device can run and `may` allows. Only the most urgent job of each
  // length is looked at. Null: there is none.
  Job* First(int device, absl::FunctionRef<bool(const Job&)> may);

  // Moves `first`, and what fits beside it, into `batch`, which is empty. Returns the jobs that
  // were found late; they wait no longer. If `first` was late, the batch has none.
  JobList Fill(Batch* batch, Job* first, absl::Time now);

  // The job with the earliest deadline. Null: none has one.
  Job* FirstByDeadline() const { return by_deadline_.top(); }
  // `visit` may remove its job.
  void ForEach(absl::FunctionRef<void(Job*)> visit);
  int64_t count() const { return all_.size; }

  // The time that each caller has had.
  FairClock& clock() { return clock_; }

 private:
  // Due queues with the same choice of devices, by length.
  using Lane = FairHeap<KeyQueue, LaneLinks>;
  using Lanes = std::array<Lane, kLengths>;

  Kind* KindOf(const KindKey& key);
  Length LengthOf(const JobSpec& spec, double cost_ns, double row_ns) const;
  Lane& LaneOf(const KeyQueue& queue);
  void BecomeDue(KeyQueue* queue);

  const EngineOptions options_;
  const int64_t max_batch_delay_ns_;
  const SliceRules rules_;
  const Costs& costs_;
  absl::flat_hash_map<KindKey, std::unique_ptr<Kind>> kinds_;
  // One entry for each device, with the jobs that only it can run; then jobs on sharded heads; then
  // all others.
  std::vector<Lanes> lanes_;
  std::set<std::pair<int64_t, KeyQueue*>> by_due_;  // queues that are not due
  FairHeap<Job, DeadlineLinks> by_deadline_;
  JobList all_;
  FairClock clock_;
  uint64_t next_sequence_ = 1;
  size_t forget_at_ = kMaxIdleKeys;  // kinds, before the next search for idle ones
};

}  // namespace logitd::engine

#endif  // LOGITD_SERVER_ENGINE_WAITING_H_
