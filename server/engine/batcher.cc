#include "server/engine/batcher.h"

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include "absl/hash/hash.h"
#include "absl/time/clock.h"
#include "server/engine/metrics.h"

namespace logitd::engine {
namespace {

// Keys kept without a job: clients come back with the vocabulary they had.
constexpr size_t kMaxIdleKeys = 256;

// A brief copy takes about as long as a sleeping thread takes to wake. So a stream is woken when
// the copy begins, and polls until it ends. That saves 30 us of 400 for a call of 512 KiB on two
// quiet cores, and nothing on busy cores. A smaller payload is copied before the thread is awake;
// polling for a larger one keeps a core busy.
constexpr int64_t kMinBriefCopyBytes = int64_t{128} << 10;
constexpr int64_t kMaxBriefCopyBytes = int64_t{1} << 20;

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

}  // namespace

size_t Batcher::KeyHash::operator()(const BatchKey& key) const {
  return absl::HashOf(key.op, key.dtype, key.row_elements, key.head);
}

void Batcher::JobList::PushBack(Job* job) {
  job->place_.previous = last;
  job->place_.next = nullptr;
  (last != nullptr ? last->place_.next : first) = job;
  last = job;
  ++size;
}

void Batcher::JobList::Remove(Job* job) {
  Job::Place& place = job->place_;
  (place.previous != nullptr ? place.previous->place_.next : first) = place.next;
  (place.next != nullptr ? place.next->place_.previous : last) = place.previous;
  --size;
}

Job* Batcher::JobList::PopFront() {
  Job* job = first;
  if (job != nullptr) Remove(job);
  return job;
}

Batcher::Batcher(const EngineOptions& options, const std::vector<Slab>& slabs, Metrics* metrics)
    : options_(options),
      max_batch_delay_ns_(absl::ToInt64Nanoseconds(options.max_batch_delay)),
      idle_spin_ns_(absl::ToInt64Nanoseconds(options.idle_spin)),
      metrics_(metrics),
      max_kept_(static_cast<int64_t>(slabs.size()) - options.streams),
      desk_(std::make_shared<ReturnDesk>()),
      batches_(slabs.size()) {
  {
    MutexLock lock(desk_->mutex);
    desk_->batcher = this;
  }
  for (size_t i = 0; i < slabs.size(); ++i) batches_[i].slab = slabs[i];
  if (metrics_ != nullptr) metrics_->Set(Gauge::kSlabs, static_cast<int64_t>(slabs.size()));
}

// ---- submission ----

void Batcher::Submit(std::shared_ptr<Job> submitted) {
  CallerScope scope(callers_);
  Job* job = submitted.get();
  Job::Place& place = job->place_;
  const JobSpec& spec = job->spec();
  const JobSize& size = spec.size;
  if (absl::Status fits = CheckFits(spec, options_); !fits.ok()) {
    return job->Done(fits, JobAnswer{}, JobTimes{});
  }
  place.submitted_ns = MonotonicNanos();
  place.self = std::move(submitted);

  JobList ended;
  std::byte* to = nullptr;
  bool brief = false;
  const size_t row_stride = RowStride(spec.key);
  {
    MutexLock lock(mutex_);
    place.sequence = next_sequence_++;
    ++unfinished_;
    if (closed_) {
      place.state = Job::Place::State::kDone;
      place.why = absl::StatusCode::kUnavailable;
      ended.PushBack(job);
    } else {
      KeyQueue* queue = QueueOf(spec.key);
      if (queue->open != nullptr && !Fits(*queue->open, spec)) {
        Seal(queue->open);
        if (SealForIdleStreams() > 0) WakeStream();
      }
      if (queue->open == nullptr) {
        // If jobs wait, no slab is free: see PlacePending.
        if (Batch* batch = FreeBatch()) Open(batch, queue, *job);
      }
      if (queue->open != nullptr) {
        Batch* batch = queue->open;
        to = batch->slab.host + static_cast<size_t>(batch->rows) * row_stride;
        Reserve(batch, job, spec);
        place.state = Job::Place::State::kCopying;
        brief = idle_spin_ns_ > 0 && max_batch_delay_ns_ == 0 &&
                size.payload_bytes >= kMinBriefCopyBytes &&
                size.payload_bytes <= kMaxBriefCopyBytes;
        if (brief) {
          ++brief_copies_;
          if (idle_streams_ > 0 && !roused_) {
            WakeStream();
            roused_ = !spinning_;
          }
        }
      } else {
        PushPending(queue, job);
        // An open batch gives up its max_batch_delay when jobs wait for slabs.
        if (SealForIdleStreams() > 0) WakeStream();
      }
      if (spec.deadline < next_expiry_) {
        next_expiry_ = spec.deadline;
        timer_wake_.Signal();
      }
    }
    Publish();
  }
  if (to != nullptr) {
    Copy(job, to, row_stride, brief);
  } else {
    End(ended);
  }
}

bool Batcher::Fits(const Batch& batch, const JobSpec& spec) const {
  return (spec.key.op->exclusive_batch || batch.rows + spec.rows() <= options_.max_batch_rows) &&
         batch.payload_bytes + spec.size.payload_bytes <= options_.slab_payload_bytes &&
         batch.answer_bytes + spec.size.answer_bytes <= options_.slab_answer_bytes;
}

KeyQueue* Batcher::QueueOf(const BatchKey& key) {
  auto it = queues_.find(key);
  if (it == queues_.end()) {
    if (queues_.size() >= kMaxIdleKeys) {
      absl::erase_if(queues_, [](const auto& entry) {
        return entry.second->open == nullptr && entry.second->first == nullptr;
      });
    }
    it = queues_.emplace(key, std::make_unique<KeyQueue>()).first;
    it->second->key = key;
  }
  return it->second.get();
}

Batch* Batcher::FreeBatch() {
  for (Batch& batch : batches_) {
    if (batch.state == Batch::State::kFree) return &batch;
  }
  return nullptr;
}

void Batcher::Open(Batch* batch, KeyQueue* queue, const Job& oldest) {
  batch->state = Batch::State::kOpen;
  batch->key = queue->key;
  batch->queue = queue;
  batch->sequence = oldest.place_.sequence;
  batch->opened_ns = oldest.place_.submitted_ns;
  batch->rows = 0;
  batch->payload_bytes = 0;
  batch->answer_bytes = 0;
  batch->copying = 0;
  batch->copied = 0;
  batch->live = 0;
  batch->kept = false;
  batch->slots.clear();
  queue->open = batch;
}

void Batcher::Reserve(Batch* batch, Job* job, const JobSpec& spec) {
  job->place_.batch = batch;
  job->place_.slot = batch->slots.size();
  batch->slots.push_back({.job = job, .first_row = batch->rows, .rows = spec.rows()});
  batch->rows += spec.rows();
  batch->payload_bytes += spec.size.payload_bytes;
  batch->answer_bytes += spec.size.answer_bytes;
  ++batch->copying;
  ++batch->live;
  ++open_jobs_;
  if (batch->rows == options_.max_batch_rows || spec.key.op->exclusive_batch) Seal(batch);
}

void Batcher::Seal(Batch* batch) {
  batch->state = Batch::State::kSealed;
  batch->queue->open = nullptr;
}

void Batcher::PushPending(KeyQueue* queue, Job* job) {
  Job::Place& place = job->place_;
  place.state = Job::Place::State::kPending;
  pending_.PushBack(job);
  place.key_previous = queue->last;
  place.key_next = nullptr;
  (queue->last != nullptr ? queue->last->place_.key_next : queue->first) = job;
  queue->last = job;
}

void Batcher::RemovePending(KeyQueue* queue, Job* job) {
  Job::Place& place = job->place_;
  pending_.Remove(job);
  (place.key_previous != nullptr ? place.key_previous->place_.key_next : queue->first) =
      place.key_next;
  (place.key_next != nullptr ? place.key_next->place_.key_previous : queue->last) =
      place.key_previous;
}

// Runs whenever a slab becomes free. So while a slab is free, no job waits for one.
void Batcher::PlacePending() {
  while (pending_.first != nullptr) {
    Batch* batch = FreeBatch();
    if (batch == nullptr) return;
    KeyQueue* queue = QueueOf(pending_.first->spec().key);
    Open(batch, queue, *queue->first);
    while (queue->first != nullptr && queue->open != nullptr) {
      Job* job = queue->first;
      const JobSpec& spec = job->spec();
      if (!Fits(*batch, spec)) {
        Seal(batch);
        break;
      }
      RemovePending(queue, job);
      Reserve(batch, job, spec);
      job->place_.state = Job::Place::State::kPlaced;
      to_copy_.PushBack(job);
      copy_wake_.Signal();
    }
  }
}

void Batcher::Copy(Job* job, std::byte* to, size_t row_stride, bool brief) {
  const int64_t start = MonotonicNanos();
  job->CopyPayload(to, row_stride);
  const int64_t end = MonotonicNanos();

  Job::Place& place = job->place_;
  JobList ended;
  {
    MutexLock lock(mutex_);
    Batch* batch = place.batch;
    place.copy_ns = end - start;
    --batch->copying;
    ++batch->copied;
    if (brief) --brief_copies_;
    if (place.dropped) {
      place.state = Job::Place::State::kDone;
      ended.PushBack(job);
      ReleaseIfEmpty(batch);
    } else {
      place.state = Job::Place::State::kCopied;
    }
    // A stream that sleeps until max_batch_delay is over must be woken once for a new batch.
    if (SealForIdleStreams() > 0 || (max_batch_delay_ns_ > 0 && batch->copied == 1)) WakeStream();
    if (ended.first != nullptr) Publish();
  }
  End(ended);
}

void Batcher::CopyLoop() {
  mutex_.Lock();
  while (true) {
    Job* job = to_copy_.PopFront();
    if (job != nullptr) {
      Job::Place& place = job->place_;
      place.state = Job::Place::State::kCopying;
      const Batch& batch = *place.batch;
      const size_t row_stride = RowStride(batch.key);
      std::byte* to =
          batch.slab.host + static_cast<size_t>(batch.slots[place.slot].first_row) * row_stride;
      mutex_.Unlock();
      Copy(job, to, row_stride, /*brief=*/false);
      mutex_.Lock();
    } else if (stopping_) {
      break;
    } else {
      copy_wake_.Wait(mutex_);
    }
  }
  mutex_.Unlock();
}

// ---- streams ----

// While jobs wait for slabs, every batch that holds one is due.
bool Batcher::IsDue(const Batch& batch, int64_t now_ns) const {
  return max_batch_delay_ns_ == 0 || pending_.first != nullptr ||
         now_ns - batch.opened_ns >= max_batch_delay_ns_;
}

// Seals as many open batches as idle streams could take, oldest first. A batch whose payloads are
// all copied is sealed if a stream can run it now. A batch with copies under way is sealed if a
// stream has no other batch to wait for: sealed, it waits only for those copies, not for those of
// later jobs. Returns how many batches are ready to run, or 0 if no stream is idle.
int Batcher::SealForIdleStreams() {
  if (idle_streams_ == 0) return 0;
  const int64_t now_ns = max_batch_delay_ns_ > 0 ? MonotonicNanos() : 0;
  int ready = 0;
  int sealed = 0;
  for (const Batch& batch : batches_) {
    if (batch.state != Batch::State::kSealed) continue;
    ++sealed;
    if (batch.copying == 0) ++ready;
  }
  for (const bool complete : {true, false}) {
    while ((complete ? ready : sealed) < idle_streams_) {
      Batch* oldest = nullptr;
      for (Batch& batch : batches_) {
        if (batch.state == Batch::State::kOpen && batch.copied > 0 && batch.live > 0 &&
            (batch.copying == 0) == complete && IsDue(batch, now_ns) &&
            (oldest == nullptr || batch.sequence < oldest->sequence)) {
          oldest = &batch;
        }
      }
      if (oldest == nullptr) break;
      Seal(oldest);
      ++sealed;
      if (complete) ++ready;
    }
  }
  return ready;
}

// An open batch counts if it is due and its payloads are copied. If only sealed batches counted, a
// key whose batches keep filling up always comes first.
Batch* Batcher::TakeOldest() {
  const int64_t now_ns = max_batch_delay_ns_ > 0 ? MonotonicNanos() : 0;
  Batch* oldest = nullptr;
  for (Batch& batch : batches_) {
    const bool ready = batch.state == Batch::State::kSealed ||
                       (batch.state == Batch::State::kOpen && IsDue(batch, now_ns));
    if (ready && batch.copying == 0 && batch.live > 0 &&
        (oldest == nullptr || batch.sequence < oldest->sequence)) {
      oldest = &batch;
    }
  }
  if (oldest == nullptr) return nullptr;
  if (oldest->state == Batch::State::kOpen) Seal(oldest);
  oldest->state = Batch::State::kRunning;
  oldest->taken_ns = MonotonicNanos();
  open_jobs_ -= oldest->live;
  return oldest;
}

// When max_batch_delay is next over for an open batch. A batch that is due already waits for a
// copy, whose end wakes a stream.
absl::Time Batcher::NextDue() const {
  if (max_batch_delay_ns_ == 0) return absl::InfiniteFuture();
  const int64_t now_ns = MonotonicNanos();
  absl::Duration wait = absl::InfiniteDuration();
  for (const Batch& batch : batches_) {
    if (batch.state != Batch::State::kOpen || IsDue(batch, now_ns)) continue;
    wait = std::min(wait, absl::Nanoseconds(batch.opened_ns + max_batch_delay_ns_ - now_ns));
  }
  return absl::Now() + wait;
}

void Batcher::WakeStream() {
  wakes_.fetch_add(1, std::memory_order_relaxed);
  if (!spinning_ && !roused_) stream_wake_.Signal();
}

Batch* Batcher::Next(Batch* finished) {
  MutexLock lock(mutex_);
  if (finished != nullptr) {
    unfinished_ -= finished->live;
    if (unfinished_ == 0) all_done_.SignalAll();
    if (finished->kept) {
      finished->state = Batch::State::kKept;
    } else {
      Release(finished);
    }
  }
  ++idle_streams_;
  bool spun = idle_spin_ns_ == 0;
  Batch* batch = nullptr;
  while (!stopping_) {
    batch = TakeOldest();
    if (batch != nullptr) break;
    SealForIdleStreams();
    if ((!spun || brief_copies_ > 0) && !spinning_) {
      // The next request of a busy client comes within microseconds, and a sleeping thread takes
      // longer to wake. The stream also polls while a brief copy runs.
      spun = spinning_ = true;
      const uint32_t seen = wakes_.load(std::memory_order_relaxed);
      mutex_.Unlock();
      const int64_t until = MonotonicNanos() + idle_spin_ns_;
      while (wakes_.load(std::memory_order_relaxed) == seen && MonotonicNanos() < until) {
        std::this_thread::yield();  // on few cores, the thread that wakes us may need this one
      }
      mutex_.Lock();
      spinning_ = false;
    } else {
      Publish();
      stream_wake_.WaitUntil(mutex_, NextDue());
      roused_ = false;
    }
  }
  --idle_streams_;
  // One wake may stand for several batches. And if batches may be delayed, another stream must now
  // wait for the next one to become due.
  if (batch != nullptr && idle_streams_ > 0 &&
      (SealForIdleStreams() > 0 || max_batch_delay_ns_ > 0)) {
    WakeStream();
  }
  Publish();
  return batch;
}

void Batcher::Finish(Job* job, const absl::Status& status, const JobAnswer& answer,
                     int64_t taken_ns, JobTimes* times) {
  Job::Place& place = job->place_;
  times->copy_ns = place.copy_ns;
  times->queue_ns = taken_ns - place.submitted_ns - place.copy_ns;
  place.state.store(Job::Place::State::kDone, std::memory_order_relaxed);
  const std::shared_ptr<Job> self = std::move(place.self);
  self->Done(status, answer, *times);
}

std::shared_ptr<const void> Batcher::Keep(Batch* batch) {
  {
    MutexLock lock(mutex_);
    if (kept_ == max_kept_) return nullptr;
    ++kept_;
    batch->kept = true;
    Publish();
  }
  return {batch->slab.host, [desk = desk_, batch](const void*) {
            MutexLock lock(desk->mutex);
            if (desk->batcher != nullptr) desk->batcher->TakeBack(batch);
          }};
}

void Batcher::TakeBack(Batch* batch) {
  MutexLock lock(mutex_);
  batch->kept = false;
  if (--kept_ == 0) all_back_.SignalAll();
  // If the answer is dropped within Done, the stream gives the batch back.
  if (batch->state == Batch::State::kKept) Release(batch);
  Publish();
}

bool Batcher::WaitForKept(absl::Time deadline) {
  {
    MutexLock lock(mutex_);
    while (kept_ > 0 && absl::Now() < deadline) all_back_.WaitUntil(mutex_, deadline);
  }
  {
    MutexLock lock(desk_->mutex);
    desk_->batcher = nullptr;
  }
  MutexLock lock(mutex_);
  return kept_ == 0;
}

void Batcher::Release(Batch* batch) {
  batch->state = Batch::State::kFree;
  PlacePending();
}

void Batcher::ReleaseIfEmpty(Batch* batch) {
  if (batch->live > 0 || batch->copying > 0) return;
  if (batch->state == Batch::State::kOpen) batch->queue->open = nullptr;
  Release(batch);
}

// ---- cancel, deadline, close ----

// Takes a waiting job out of its list or batch. Does nothing to a job that runs or is done.
void Batcher::Drop(Job* job, absl::StatusCode why, JobList& ended) {
  using State = Job::Place::State;
  Job::Place& place = job->place_;
  const State state = place.state;
  if (state == State::kNew || state == State::kDone || place.dropped) return;
  if (state == State::kPending) {
    RemovePending(QueueOf(job->spec().key), job);
    place.state = State::kDone;
    place.why = why;
    ended.PushBack(job);
    return;
  }
  Batch* batch = place.batch;
  if (batch->state == Batch::State::kRunning) return;
  batch->slots[place.slot].job = nullptr;
  --batch->live;
  --open_jobs_;
  place.why = why;
  if (state == State::kCopying) {
    place.dropped = true;
    return;
  }
  if (state == State::kPlaced) {
    to_copy_.Remove(job);
    --batch->copying;
  }
  place.state = State::kDone;
  ended.PushBack(job);
  ReleaseIfEmpty(batch);
}

// Drops every waiting job whose deadline is not after `due_by`, and finds the next deadline of the
// other jobs.
void Batcher::DropAll(absl::StatusCode why, absl::Time due_by, JobList& ended) {
  bool again = true;
  while (again) {  // a drop may free a slab and so move jobs to a place this pass has already seen
    again = false;
    next_expiry_ = absl::InfiniteFuture();
    const auto visit = [&](Job* job) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
      const absl::Time deadline = job->spec().deadline;
      if (deadline <= due_by) {
        Drop(job, why, ended);
        again = true;
      } else {
        next_expiry_ = std::min(next_expiry_, deadline);
      }
    };
    for (Job* job = pending_.first; job != nullptr;) {
      Job* next = job->place_.next;
      visit(job);
      job = next;
    }
    for (Batch& batch : batches_) {
      if (batch.state != Batch::State::kOpen && batch.state != Batch::State::kSealed) continue;
      for (size_t i = 0; i < batch.slots.size(); ++i) {
        if (batch.slots[i].job != nullptr) visit(batch.slots[i].job);
      }
    }
  }
  // The dropped copy may be the last one that a sealed batch waited for.
  if (SealForIdleStreams() > 0) WakeStream();
}

void Batcher::End(JobList& ended) {
  if (ended.first == nullptr) return;
  std::string unavailable;
  {
    MutexLock lock(mutex_);
    unavailable = closed_message_;
  }
  const int64_t now_ns = MonotonicNanos();
  int64_t count = 0;
  while (Job* job = ended.PopFront()) {
    Job::Place& place = job->place_;
    absl::Status status;
    switch (place.why) {
      case absl::StatusCode::kCancelled:
        status = absl::CancelledError("cancelled before it ran");
        break;
      case absl::StatusCode::kDeadlineExceeded:
        status = absl::DeadlineExceededError("the deadline passed before a stream was free");
        break;
      default:
        status = absl::UnavailableError(unavailable);
    }
    JobTimes times;
    Finish(job, status, JobAnswer{}, now_ns, &times);
    ++count;
  }
  MutexLock lock(mutex_);
  unfinished_ -= count;
  if (unfinished_ == 0) all_done_.SignalAll();
}

void Batcher::Cancel(const Job& job) {
  CallerScope scope(callers_);
  JobList ended;
  {
    MutexLock lock(mutex_);
    // The job is constant to its caller, except the place that the engine keeps in it.
    Drop(const_cast<Job*>(&job), absl::StatusCode::kCancelled, ended);
    if (SealForIdleStreams() > 0) WakeStream();
    Publish();
  }
  End(ended);
}

void Batcher::ExpireLoop() {
  mutex_.Lock();
  while (!stopping_) {
    const absl::Time now = absl::Now();
    if (next_expiry_ > now) {
      timer_wake_.WaitUntil(mutex_, next_expiry_);
      continue;
    }
    JobList ended;
    DropAll(absl::StatusCode::kDeadlineExceeded, now, ended);
    Publish();
    mutex_.Unlock();
    End(ended);
    mutex_.Lock();
  }
  mutex_.Unlock();
}

void Batcher::Close(std::string_view message) {
  JobList ended;
  {
    MutexLock lock(mutex_);
    if (!closed_) closed_message_ = std::string(message);
    closed_ = true;
    DropAll(absl::StatusCode::kUnavailable, absl::InfiniteFuture(), ended);
    Publish();
  }
  End(ended);
}

void Batcher::Stop() {
  Close("the engine has stopped");
  MutexLock lock(mutex_);
  stopping_ = true;
  stream_wake_.SignalAll();
  copy_wake_.SignalAll();
  timer_wake_.SignalAll();
}

void Batcher::WaitForCallers() {
  while (callers_.load(std::memory_order_acquire) > 0) {
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
}

bool Batcher::WaitIdle(absl::Time deadline) {
  CallerScope scope(callers_);
  MutexLock lock(mutex_);
  while (unfinished_ > 0 && absl::Now() < deadline) all_done_.WaitUntil(mutex_, deadline);
  return unfinished_ == 0;
}

std::optional<RunningBatch> Batcher::OldestRunning() {
  CallerScope scope(callers_);
  MutexLock lock(mutex_);
  const Batch* oldest = nullptr;
  for (const Batch& batch : batches_) {
    if (batch.state == Batch::State::kRunning &&
        (oldest == nullptr || batch.taken_ns < oldest->taken_ns)) {
      oldest = &batch;
    }
  }
  if (oldest == nullptr) return std::nullopt;
  return RunningBatch{.op = oldest->key.op->name,
                      .rows = oldest->rows,
                      .age = absl::Nanoseconds(MonotonicNanos() - oldest->taken_ns)};
}

void Batcher::Publish() {
  if (metrics_ == nullptr) return;
  int64_t slabs = 0;
  for (const Batch& batch : batches_) slabs += batch.state != Batch::State::kFree ? 1 : 0;
  metrics_->Set(Gauge::kSlabsInUse, slabs);
  metrics_->Set(Gauge::kSlabsKept, kept_);
  metrics_->Set(Gauge::kQueuedJobs, pending_.size);
  metrics_->Set(Gauge::kOpenJobs, open_jobs_);
}

}  // namespace logitd::engine
