#include "server/engine/batcher.h"

#include <algorithm>
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

// A payload of more bytes is left to the copy threads: whoever submits it has other callers to serve.
constexpr int64_t kMostCopiedAtOnce = int64_t{256} << 10;

}  // namespace

size_t Batcher::KeyHash::operator()(const KindKey& kind) const {
  const BatchKey& key = kind.key;
  return absl::HashOf(key.op, key.dtype, key.row_elements, key.head, key.device, kind.priority);
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

Batcher::Batcher(const EngineOptions& options, const SliceRules& rules, const Devices& devices,
                 const std::vector<Slab>& slabs, const Costs* costs, Metrics* metrics)
    : options_(options),
      max_batch_delay_ns_(absl::ToInt64Nanoseconds(options.max_batch_delay)),
      idle_spin_ns_(absl::ToInt64Nanoseconds(options.idle_spin)),
      rules_(rules),
      costs_(costs),
      metrics_(metrics),
      on_host_(devices.info(0).is_host),
      desk_(std::make_shared<ReturnDesk>()),
      devices_(static_cast<size_t>(devices.count())),
      seats_(devices_.size() * static_cast<size_t>(options.streams)),
      devices_left_(devices.count()),
      batches_(slabs.size()) {
  {
    MutexLock lock(desk_->mutex);
    desk_->batcher = this;
  }
  const size_t of_each = slabs.size() / devices_.size();
  for (size_t d = 0; d < devices_.size(); ++d) {
    devices_[d].node = devices.node(static_cast<int>(d));
    devices_[d].memory.reserve(of_each);
    for (size_t i = d * of_each; i < (d + 1) * of_each; ++i) {
      batches_[i].slab = slabs[i];
      batches_[i].home = static_cast<int>(d);
      devices_[d].memory.push_back(slabs[i].device);
    }
  }
  if (metrics_ != nullptr) metrics_->Set(Gauge::kSlabs, static_cast<int64_t>(slabs.size()));
}

// ---- submission ----

void Batcher::Submit(absl::Span<std::shared_ptr<Job>> jobs) {
  CallerScope scope(callers_);
  Copies copies;
  JobList ended;
  {
    MutexLock lock(mutex_);
    for (std::shared_ptr<Job>& job : jobs) PlaceJob(std::move(job), copies, ended);
    Publish();
  }
  Copy(copies, /*borrow=*/false);
  End(ended);
}

Batcher::Loan Batcher::SubmitAlone(std::shared_ptr<Job> job) {
  CallerScope scope(callers_);
  Copies copies;
  JobList ended;
  {
    MutexLock lock(mutex_);
    PlaceJob(std::move(job), copies, ended);
    Publish();
  }
  const Loan loan = Copy(copies, /*borrow=*/true);
  End(ended);
  return loan;
}

// Gives the job a place in a batch, or in a line. `copies`: gets it if this thread copies its payload.
void Batcher::PlaceJob(std::shared_ptr<Job> submitted, Copies& copies, JobList& ended) {
  Job* const job = submitted.get();
  Job::Place& place = job->place_;
  const JobSpec& spec = job->spec();
  place.submitted_ns = MonotonicNanos();
  place.self = std::move(submitted);
  ++unfinished_;
  const bool fits = CheckFits(spec, options_).ok();
  if (!fits || closed_ || IsLost(spec.key)) {
    place.state = Job::Place::State::kDone;
    place.why = fits ? absl::StatusCode::kUnavailable : absl::StatusCode::kInvalidArgument;
    return ended.PushBack(job);
  }
  KeyQueue* queue = Arrive(job);
  if (queue->open != nullptr && !Fits(*queue->open, spec)) {
    Seal(queue->open);
    SealAndWake();
  }
  if (queue->open == nullptr && queue->pending.top() == nullptr && MayOpen(*job)) {
    Open(FreeBatch(), queue, *job);
  }
  if (queue->open != nullptr) {
    Batch* batch = queue->open;
    const size_t row_stride = RowStride(spec.key);
    std::byte* const to = batch->slab.host + static_cast<size_t>(batch->rows) * row_stride;
    Reserve(batch, job, spec);
    int64_t copied = spec.size.payload_bytes;
    for (const RowsPlace& rows : job->places()) {
      if (rows.data != nullptr) copied -= rows.rows * static_cast<int64_t>(rows.row_bytes);
    }
    if (copied > kMostCopiedAtOnce) {
      LeaveToCopier(batch, job);
    } else {
      place.state = Job::Place::State::kCopying;
      copies.push_back({.job = job, .to = to, .row_stride = row_stride});
    }
  } else {
    PushPending(queue, job);
    PlacePending();  // it may take a slab that the jobs before it may not
    // An open batch gives up its max_batch_delay when jobs wait for slabs.
    SealAndWake();
  }
  if (spec.deadline < next_expiry_) {
    next_expiry_ = spec.deadline;
    timer_wake_.Signal();
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

// Whether the only device that can run jobs of this key is lost.
bool Batcher::IsLost(const BatchKey& key) const {
  return (key.device != kAnyDevice && devices_[static_cast<size_t>(key.device)].lost) ||
         (IsSharded(key) && SomeDeviceIsLost());
}

bool Batcher::IsUsable(const Batch& batch) const {
  return !devices_[static_cast<size_t>(batch.home)].lost;
}

// A free slab near the device that will probably run it: the one with the most idle streams, then
// the one with the fewest batches. Null: there is none.
Batch* Batcher::FreeBatch() {
  Batch* best = nullptr;
  const auto idler = [&](const Batch& a, const Batch& b) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    const Device& of_a = devices_[static_cast<size_t>(a.home)];
    const Device& of_b = devices_[static_cast<size_t>(b.home)];
    return of_a.idle_streams != of_b.idle_streams ? of_a.idle_streams > of_b.idle_streams
                                                  : of_a.memory.size() > of_b.memory.size();
  };
  for (Batch& batch : batches_) {
    if (batch.state != Batch::State::kFree || !IsUsable(batch)) continue;
    if (best == nullptr || idler(batch, *best)) best = &batch;
  }
  return best;
}

// Whether the job may take a free slab, if there is one. See "Room for short work".
bool Batcher::MayOpen(const Job& job) const {
  const Job::Place& place = job.place_;
  const Caller& caller = job.spec().caller;
  int usable = 0;
  int free = 0;
  int at_work = 0;
  int of_caller = 0;
  for (const Batch& batch : batches_) {
    if (IsUsable(batch)) ++usable;
    if (batch.state == Batch::State::kFree) {
      if (IsUsable(batch)) ++free;
    } else if (batch.state != Batch::State::kKept) {
      ++at_work;
      if (batch.opened_by == caller.id) ++of_caller;
    }
  }
  if (free == 0) return false;
  if (free > 1 || at_work == 0) return true;
  if (caller.priority == Priority::kBatch) return false;
  if (usable == 2) return place.cost_ns <= absl::ToDoubleNanoseconds(kSlowSlice);
  return !place.queue->is_long && of_caller < at_work;
}

void Batcher::Open(Batch* batch, KeyQueue* queue, const Job& first) {
  batch->state = Batch::State::kOpen;
  batch->key = queue->kind->key.key;
  batch->sharded = IsSharded(batch->key);
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
      LeaveToCopier(batch, job);
    }
  }
}

void Batcher::LeaveToCopier(Batch* batch, Job* job) {
  job->place_.state = Job::Place::State::kPlaced;
  devices_[static_cast<size_t>(batch->home)].to_copy.PushBack(job);
  WakeCopier(batch->home);
}

// Prefers a copy thread near the slab.
void Batcher::WakeCopier(int home) {
  Device* waked = &devices_[static_cast<size_t>(home)];
  for (Device& device : devices_) {
    if (waked->idle_copiers == 0 && device.idle_copiers > 0) waked = &device;
  }
  waked->copy_wake.Signal();
}

// `borrow`: as in SubmitAlone.
Batcher::Loan Batcher::Copy(absl::Span<const PayloadCopy> copies, bool borrow) {
  if (copies.empty()) return {};
  int64_t begin = MonotonicNanos();
  for (const PayloadCopy& copy : copies) {
    copy.job->CopyPayload(copy.to, copy.row_stride);
    const int64_t end = MonotonicNanos();
    copy.job->place_.copy_ns = end - std::exchange(begin, end);
  }

  JobList ended;
  {
    MutexLock lock(mutex_);
    // A stream that sleeps until max_batch_delay or a hold is over must be woken once for a new batch,
    // and where the job's deadline makes the hold shorter.
    bool for_delay = false;
    for (const PayloadCopy& copy : copies) for_delay = Copied(copy.job, ended) || for_delay;
    if (borrow && ended.first == nullptr) {
      if (const Loan loan = Borrow(copies.front().job->place_.batch); loan.batch != nullptr) {
        Publish();
        return loan;
      }
    }
    SealAndWake(for_delay);
    if (ended.first != nullptr) Publish();
  }
  End(ended);
  return {};
}

// Counts the payload as copied. True: a sleeping stream must look again, because the batch is new or
// must begin earlier.
bool Batcher::Copied(Job* job, JobList& ended) {
  Job::Place& place = job->place_;
  Batch* const batch = place.batch;
  --batch->copying;
  ++batch->copied;
  const bool is_new = batch->copied == 1;
  if (place.dropped) {
    place.state = Job::Place::State::kDone;
    ended.PushBack(job);
    ReleaseIfEmpty(batch);
    return is_new;  // no stream may wait for its other jobs
  }
  place.state = Job::Place::State::kCopied;
  const absl::Time deadline = job->spec().deadline;
  return is_new || (deadline == batch->first_deadline && deadline != absl::InfiniteFuture());
}

void Batcher::CopyLoop(int index) {
  mutex_.Lock();
  Device& near = devices_[static_cast<size_t>(index)];
  while (true) {
    Job* job = near.to_copy.PopFront();
    for (size_t d = 0; d < devices_.size() && job == nullptr; ++d) {
      job = devices_[d].to_copy.PopFront();
    }
    if (job != nullptr) {
      Job::Place& place = job->place_;
      place.state = Job::Place::State::kCopying;
      const Batch& batch = *place.batch;
      const size_t row_stride = RowStride(batch.key);
      std::byte* to =
          batch.slab.host + static_cast<size_t>(batch.slots[place.slot].first_row) * row_stride;
      mutex_.Unlock();
      Copy({{.job = job, .to = to, .row_stride = row_stride}}, /*borrow=*/false);
      mutex_.Lock();
    } else if (stopping_) {
      break;
    } else {
      ++near.idle_copiers;
      near.copy_wake.Wait(mutex_);
      --near.idle_copiers;
    }
  }
  mutex_.Unlock();
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
    int64_t usable = 0;
    for (const Batch& other : batches_) usable += IsUsable(other) ? 1 : 0;
    if (kept_ >= usable - int64_t{options_.streams} * devices_left_) return nullptr;
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
  TakeMemoryBack(batch);
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
                      .age = absl::Nanoseconds(MonotonicNanos() - oldest->taken_ns),
                      .device = oldest->device};
}

void Batcher::Publish() {
  if (metrics_ == nullptr) return;
  int64_t in_use = 0;
  for (const Batch& batch : batches_) in_use += batch.state != Batch::State::kFree ? 1 : 0;
  metrics_->Set(Gauge::kSlabsInUse, in_use);
  metrics_->Set(Gauge::kSlabsKept, kept_);
  metrics_->Set(Gauge::kQueuedJobs, pending_.size);
  metrics_->Set(Gauge::kOpenJobs, open_jobs_);
}

}  // namespace logitd::engine
