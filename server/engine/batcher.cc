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

// What a byte of payload costs, in nanoseconds, where nothing like it has run.
constexpr double kUnknownByteNs = 1;

// A brief copy takes about as long as a sleeping thread takes to wake. So a stream is woken when
// the copy begins, and polls until it ends. That saves 30 us of 400 for a call of 512 KiB on two
// quiet cores, and nothing on busy cores. A smaller payload is copied before the thread is awake;
// polling for a larger one keeps a core busy.
constexpr int64_t kMinBriefCopyBytes = int64_t{128} << 10;
constexpr int64_t kMaxBriefCopyBytes = int64_t{1} << 20;

}  // namespace

size_t Batcher::KeyHash::operator()(const KindKey& kind) const {
  const BatchKey& key = kind.key;
  return absl::HashOf(key.op, key.dtype, key.row_elements, key.head, kind.priority);
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

Batcher::Batcher(const EngineOptions& options, const SliceRules& rules,
                 const std::vector<Slab>& slabs, const Costs* costs, Metrics* metrics)
    : options_(options),
      max_batch_delay_ns_(absl::ToInt64Nanoseconds(options.max_batch_delay)),
      idle_spin_ns_(absl::ToInt64Nanoseconds(options.idle_spin)),
      rules_(rules),
      costs_(costs),
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
    ++unfinished_;
    if (closed_) {
      place.state = Job::Place::State::kDone;
      place.why = absl::StatusCode::kUnavailable;
      ended.PushBack(job);
    } else {
      KeyQueue* queue = Arrive(job);
      if (queue->open != nullptr && !Fits(*queue->open, spec)) {
        Seal(queue->open);
        if (SealForIdleStreams() > 0) WakeStream();
      }
      if (queue->open == nullptr && queue->pending.top() == nullptr && MayOpen(*job)) {
        Open(FreeBatch(), queue, *job);
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
        PlacePending();  // it may take a slab that the jobs before it may not
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

Kind* Batcher::KindOf(const KindKey& key) {
  auto it = kinds_.find(key);
  if (it == kinds_.end()) {
    if (kinds_.size() >= kMaxIdleKeys) {
      absl::erase_if(kinds_, [](const auto& entry) {
        const Kind& kind = *entry.second;
        return kind.batches == 0 && kind.of_short.pending.top() == nullptr &&
               kind.of_long.pending.top() == nullptr;
      });
    }
    it = kinds_.emplace(key, std::make_unique<Kind>()).first;
    Kind* kind = it->second.get();
    kind->key = key;
    kind->row_ns = costs_->PerRow(key.key);
    kind->of_short.kind = kind->of_long.kind = kind;
    kind->of_long.is_long = true;
  }
  return it->second.get();
}

// Estimates the job's cost, and gives it its place in the order.
KeyQueue* Batcher::Arrive(Job* job) {
  const JobSpec& spec = job->spec();
  Job::Place& place = job->place_;
  Kind* kind = KindOf({.key = spec.key, .priority = spec.caller.priority});
  place.cost_ns = kind->row_ns > 0 ? kind->row_ns * static_cast<double>(spec.rows())
                                   : kUnknownByteNs * static_cast<double>(spec.size.payload_bytes);
  const bool is_long = place.cost_ns > static_cast<double>(rules_.max_slice_ns);
  place.urgency = {.priority = spec.caller.priority,
                   .start = clock_.Arrive(spec.caller, is_long, place.cost_ns),
                   .sequence = next_sequence_++};
  place.queue = is_long ? &kind->of_long : &kind->of_short;
  return place.queue;
}

Batch* Batcher::FreeBatch() {
  for (Batch& batch : batches_) {
    if (batch.state == Batch::State::kFree) return &batch;
  }
  return nullptr;
}

// Whether the job may take a free slab, if there is one. See "Room for short work".
bool Batcher::MayOpen(const Job& job) const {
  const Job::Place& place = job.place_;
  const Caller& caller = job.spec().caller;
  int free = 0;
  int at_work = 0;
  int of_caller = 0;
  for (const Batch& batch : batches_) {
    if (batch.state == Batch::State::kFree) {
      ++free;
    } else if (batch.state != Batch::State::kKept) {
      ++at_work;
      if (batch.opened_by == caller.id) ++of_caller;
    }
  }
  if (free == 0) return false;
  if (free > 1 || at_work == 0) return true;
  if (caller.priority == Priority::kBatch) return false;
  if (batches_.size() == 2) return place.cost_ns <= absl::ToDoubleNanoseconds(kSlowSlice);
  return !place.queue->is_long && of_caller < at_work;
}

void Batcher::Open(Batch* batch, KeyQueue* queue, const Job& first) {
  batch->state = Batch::State::kOpen;
  batch->key = queue->kind->key.key;
  batch->queue = queue;
  batch->urgency = first.place_.urgency;
  batch->weight = 0;
  batch->opened_by = first.spec().caller.id;
  batch->whole = false;
  batch->opened_ns = first.place_.submitted_ns;
  batch->taken_ns = 0;
  batch->first_deadline = absl::InfiniteFuture();
  batch->last_deadline = absl::InfinitePast();
  batch->rows = 0;
  batch->payload_bytes = 0;
  batch->answer_bytes = 0;
  batch->copying = 0;
  batch->copied = 0;
  batch->live = 0;
  batch->gone = 0;
  batch->kept = false;
  batch->abandoned = false;
  batch->slots.clear();
  batch->progress = Progress();
  queue->open = batch;
  ++queue->kind->batches;
}

void Batcher::Reserve(Batch* batch, Job* job, const JobSpec& spec) {
  Job::Place& place = job->place_;
  place.batch = batch;
  place.slot = batch->slots.size();
  // Jobs of one caller mostly come one after another.
  if (batch->slots.empty() || batch->slots.back().caller.id != spec.caller.id) {
    batch->weight += spec.caller.weight;
  }
  batch->slots.push_back({.job = job,
                          .first_row = batch->rows,
                          .rows = spec.rows(),
                          .caller = spec.caller,
                          .cost_ns = place.cost_ns,
                          .left = nullptr});
  batch->urgency = std::min(batch->urgency, place.urgency);
  batch->whole = batch->whole || spec.whole;
  batch->first_deadline = std::min(batch->first_deadline, spec.deadline);
  batch->last_deadline = std::max(batch->last_deadline, spec.deadline);
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
  job->place_.state = Job::Place::State::kPending;
  pending_.PushBack(job);
  queue->pending.Push(job);
  (queue->is_long ? pending_long_ : pending_short_).Push(job);
}

void Batcher::RemovePending(Job* job) {
  KeyQueue* queue = job->place_.queue;
  pending_.Remove(job);
  queue->pending.Remove(job);
  (queue->is_long ? pending_long_ : pending_short_).Remove(job);
}

// Runs whenever a slab is not at work any more, or a job waits for one. So no job waits that may take a slab.
void Batcher::PlacePending() {
  while (pending_.first != nullptr) {
    Job* next = nullptr;
    for (Job* job : {pending_short_.top(), pending_long_.top()}) {
      if (job == nullptr || !MayOpen(*job)) continue;
      if (next == nullptr || job->place_.urgency < next->place_.urgency) next = job;
    }
    if (next == nullptr) return;
    KeyQueue* queue = next->place_.queue;
    Batch* batch = FreeBatch();
    Open(batch, queue, *next);
    for (Job* job = next; job != nullptr && queue->open != nullptr; job = queue->pending.top()) {
      if (!Fits(*batch, job->spec())) {
        Seal(batch);
        break;
      }
      RemovePending(job);
      Reserve(batch, job, job->spec());
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

// Seals as many open batches as idle streams could take, the most urgent first. A batch whose payloads are
// all copied is sealed if a stream can run it now. A batch with copies under way is sealed if a
// stream has no other batch to wait for: sealed, it waits only for those copies, not for those of
// later jobs. Returns how many batches are ready to run, or 0 if no stream is idle.
int Batcher::SealForIdleStreams() {
  if (idle_streams_ == 0) return 0;
  const int64_t now_ns = max_batch_delay_ns_ > 0 ? MonotonicNanos() : 0;
  int ready = 0;
  int sealed = 0;
  for (const Batch& batch : batches_) {
    if (batch.state != Batch::State::kSealed && batch.state != Batch::State::kPaused) continue;
    ++sealed;
    if (batch.copying == 0) ++ready;
  }
  for (const bool complete : {true, false}) {
    while ((complete ? ready : sealed) < idle_streams_) {
      Batch* first = nullptr;
      for (Batch& batch : batches_) {
        if (batch.state == Batch::State::kOpen && batch.copied > 0 && batch.live > 0 &&
            (batch.copying == 0) == complete && IsDue(batch, now_ns) &&
            (first == nullptr || batch.urgency < first->urgency)) {
          first = &batch;
        }
      }
      if (first == nullptr) break;
      Seal(first);
      ++sealed;
      if (complete) ++ready;
    }
  }
  return ready;
}

// Whether the batch's next slice may take longer than kSlowSlice.
bool Batcher::IsSlow(const Batch& batch) const {
  const Progress& progress = batch.progress;
  const double row_ns = progress.row_ns > 0 ? progress.row_ns : batch.queue->kind->row_ns;
  const int64_t left = progress.begun ? progress.end_row - progress.next_row : batch.rows;
  const int64_t rows = RowsOfSlice(batch, left, batch.queue->kind->row_ns, rules_);
  return static_cast<double>(rows) * row_ns > absl::ToDoubleNanoseconds(kSlowSlice);
}

// An open batch counts if it is due and its payloads are copied. If only sealed batches counted, a
// key whose batches keep filling up always comes first.
Batch* Batcher::TakeMostUrgent() {
  const int64_t now_ns = max_batch_delay_ns_ > 0 ? MonotonicNanos() : 0;
  const bool spare = slow_ < std::max(1, options_.streams - 1);
  Batch* first = nullptr;
  for (Batch& batch : batches_) {
    const bool ready = batch.state == Batch::State::kSealed ||
                       batch.state == Batch::State::kPaused ||
                       (batch.state == Batch::State::kOpen && IsDue(batch, now_ns));
    if (ready && batch.copying == 0 && batch.live > 0 &&
        (first == nullptr || batch.urgency < first->urgency) && (spare || !IsSlow(batch))) {
      first = &batch;
    }
  }
  if (first == nullptr) return nullptr;
  if (first->state == Batch::State::kOpen) Seal(first);
  if (first->state == Batch::State::kSealed) {
    first->taken_ns = MonotonicNanos();
    open_jobs_ -= first->live;
  }
  first->state = Batch::State::kRunning;
  first->slow = IsSlow(*first);
  if (first->slow) ++slow_;
  clock_.Serve(first->urgency.start);
  return first;
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

void Batcher::GiveBack(Batch* batch, JobList& ended) {
  const Progress& progress = batch->progress;
  if (batch->slow) --slow_;
  if (progress.slice_rows > 0) {
    if (progress.kind_row_ns > 0) batch->queue->kind->row_ns = progress.kind_row_ns;
    batch->urgency.start += static_cast<double>(progress.slice_ns) / batch->weight;
  }
  unfinished_ -= progress.finished;
  batch->live -= progress.finished;
  if (unfinished_ == 0) all_done_.SignalAll();
  if (!progress.done) {
    batch->state = Batch::State::kPaused;
    return EndBetweenSlices(batch, ended);
  }
  Settle(*batch);
  if (unfinished_ == 0) clock_.Idle();
  if (batch->kept) {
    batch->state = Batch::State::kKept;
    PlacePending();  // a slab that is kept is not at work
  } else {
    Release(batch);
  }
}

// Tells the clock what the batch's jobs cost beyond the estimate.
void Batcher::Settle(const Batch& batch) {
  const Progress& progress = batch.progress;
  if (progress.rows_run == 0) return;
  const JobTimes& times = progress.times;
  const double row_ns = static_cast<double>(times.h2d_ns + times.kernel_ns + times.d2h_ns) /
                        static_cast<double>(progress.rows_run);
  for (size_t i = progress.first_slot; i < progress.end_slot;) {
    const Caller& caller = batch.slots[i].caller;
    double more_ns = 0;
    for (; i < progress.end_slot && batch.slots[i].caller.id == caller.id; ++i) {
      const Slot& slot = batch.slots[i];
      if (slot.has_run) more_ns += static_cast<double>(slot.rows) * row_ns - slot.cost_ns;
    }
    clock_.Correct(caller, batch.queue->is_long, more_ns);
  }
}

Batch* Batcher::Next(Batch* given_back) {
  MutexLock lock(mutex_);
  if (given_back != nullptr) {
    JobList ended;
    GiveBack(given_back, ended);
    if (ended.first != nullptr) {
      Publish();
      mutex_.Unlock();
      End(ended);
      mutex_.Lock();
    }
  }
  ++idle_streams_;
  bool spun = idle_spin_ns_ == 0;
  Batch* batch = nullptr;
  while (!stopping_) {
    batch = TakeMostUrgent();
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
  --batch->queue->kind->batches;
  PlacePending();
}

void Batcher::ReleaseIfEmpty(Batch* batch) {
  if (batch->live > 0 || batch->copying > 0) return;
  if (batch->state == Batch::State::kOpen) batch->queue->open = nullptr;
  Release(batch);
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
