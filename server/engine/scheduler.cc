#include "server/engine/scheduler.h"

#include <algorithm>
#include <utility>

namespace logitd::engine {
namespace {

absl::Status Cancelled(bool begun) {
  return absl::CancelledError(begun ? "cancelled while it ran" : "cancelled before it ran");
}

absl::Status Late(bool begun) {
  return absl::DeadlineExceededError(begun ? "the deadline passed while it ran"
                                           : "the deadline passed before a stream was free");
}

}  // namespace

Scheduler::Scheduler(const EngineOptions& options, const SliceRules& rules, int devices,
                     const std::vector<Slab>& slabs, const Costs& costs)
    : options_(options),
      waiting_(options, rules, devices, costs),
      running_(options, rules, devices, slabs) {}

void Scheduler::Submit(std::shared_ptr<Job> submitted, int64_t now_ns) {
  Job* const job = submitted.get();
  const JobSpec& spec = job->spec();
  job->place_.submitted_ns = now_ns;
  job->place_.self = std::move(submitted);
  ++unfinished_;
  if (absl::Status fits = CheckFits(spec, options_); !fits.ok()) return End(job, std::move(fits));
  if (!closed_.ok()) return End(job, closed_);
  if (!running_.CanRun(spec.key)) return End(job, lost_);
  waiting_.Add(job, now_ns);
}

Scheduler::Choice Scheduler::Choose(int device, int64_t now_ns) {
  if (running_.lost(device)) return {};
  waiting_.MakeDue(now_ns);
  Choice choice = {
      .paused = running_.Paused(device),
      .first =
          waiting_.First(device, [&](const Job& job) { return running_.MayBegin(device, job); }),
  };
  if (choice.paused != nullptr && choice.first != nullptr &&
      choice.paused->urgency < choice.first->place_.urgency) {
    choice.first = nullptr;
  }
  return choice;
}

bool Scheduler::HasWork(int device, int64_t now_ns) {
  const Choice choice = Choose(device, now_ns);
  return choice.paused != nullptr || choice.first != nullptr;
}

Batch* Scheduler::Take(int device, int64_t now_ns) {
  while (true) {
    const Choice choice = Choose(device, now_ns);
    Batch* batch = choice.paused;
    if (choice.first != nullptr) {
      batch = running_.FreeBatch(device);
      JobList late = waiting_.Fill(batch, choice.first, absl::FromUnixNanos(now_ns));
      while (Job* job = late.PopFront()) End(job, Late(/*begun=*/false));
      if (batch->live == 0) continue;
      batch->taken_ns = now_ns;
    }
    if (batch == nullptr) return nullptr;
    running_.BeginSlice(batch);
    batches_expire_ = std::min(batches_expire_, batch->last_deadline);
    waiting_.clock().Serve(batch->urgency.start);
    return batch;
  }
}

void Scheduler::GiveBack(Batch* batch, absl::Time now) {
  running_.EndSlice(batch);
  Learn(batch);
  const Progress& progress = batch->progress;
  unfinished_ -= progress.finished;
  batch->live -= progress.finished;
  if (!progress.done) return EndBetweenSlices(batch, now);
  Settle(*batch);
  if (idle()) waiting_.clock().Idle();
  running_.End(batch);
}

// Takes over what the slice says of the batch's kind.
void Scheduler::Learn(Batch* batch) {
  const Progress& progress = batch->progress;
  if (progress.slice_rows > 0 && progress.kind_row_ns > 0) {
    Kind& kind = *batch->queue->kind;
    kind.row_ns = progress.kind_row_ns;
    kind.has_run = true;
  }
  if (progress.slice_rows > 0) {
    batch->urgency.start += static_cast<double>(progress.slice_ns) / batch->weight;
  }
}

// Tells the clock what the batch's jobs cost beyond the estimate.
void Scheduler::Settle(const Batch& batch) {
  const Progress& progress = batch.progress;
  if (progress.rows_run == 0) return;
  const JobTimes& times = progress.times;
  const double row_ns = static_cast<double>(times.h2d_ns + times.kernel_ns + times.d2h_ns) /
                        static_cast<double>(progress.rows_run);
  for (size_t i = 0; i < batch.slots.size();) {
    const Caller& caller = batch.slots[i].caller;
    double more_ns = 0;
    for (; i < batch.slots.size() && batch.slots[i].caller.id == caller.id; ++i) {
      const Slot& slot = batch.slots[i];
      if (slot.has_run) more_ns += static_cast<double>(slot.rows) * row_ns - slot.cost_ns;
    }
    waiting_.clock().Correct(caller, batch.queue->length != Length::kShort, more_ns);
  }
}

// ---- jobs that end without their last slice

void Scheduler::End(Job* job, absl::Status status) {
  job->place_.state = Job::Place::State::kDone;
  job->place_.ending = std::move(status);
  ended_.PushBack(job);
}

void Scheduler::Cancel(Job* job) {
  using State = Job::Place::State;
  Job::Place& place = job->place_;
  const State state = place.state;
  if (state == State::kWaiting) {
    waiting_.Remove(job);
    return End(job, Cancelled(/*begun=*/false));
  }
  if (state != State::kInBatch) return;
  Batch* const batch = place.batch;
  if (batch->state == Batch::State::kPaused) return EndPaused(batch, Cancelled(/*begun=*/true));
  // A running batch is its stream's.
  if (place.gone.exchange(true, std::memory_order_relaxed)) return;
  if (++batch->gone == batch->live) batch->abandoned.store(true, std::memory_order_release);
}

// Ends a batch between two slices, and its job: only a batch of one job has several slices.
void Scheduler::EndPaused(Batch* batch, absl::Status status) {
  Job* const job = batch->slots.front().job;
  job->place_.begun = true;
  End(job, std::move(status));
  running_.End(batch);
}

// Ends a paused batch if the job's caller has left, its deadline has passed, the device is lost or
// the engine is closed.
void Scheduler::EndBetweenSlices(Batch* batch, absl::Time now) {
  const Job& job = *batch->slots.front().job;
  if (IsGone(job)) {
    EndPaused(batch, Cancelled(/*begun=*/true));
  } else if (!closed_.ok()) {
    EndPaused(batch, closed_);
  } else if (running_.IsLost(*batch)) {
    EndPaused(batch, lost_);
  } else if (job.spec().deadline <= now || batch->abandoned) {
    EndPaused(batch, Late(/*begun=*/true));
  } else {
    batches_expire_ = std::min(batches_expire_, job.spec().deadline);
  }
}

// A running batch is abandoned when the last of its jobs is late. Each of them ends after the
// slice.
void Scheduler::ExpireRunning(Batch* batch, absl::Time now) {
  if (batch->abandoned) return;
  if (batch->last_deadline <= now) {
    batch->abandoned.store(true, std::memory_order_release);
  } else {
    batches_expire_ = std::min(batches_expire_, batch->last_deadline);
  }
}

// Ends every waiting job for which `why` is not OK.
void Scheduler::EndWaiting(absl::FunctionRef<absl::Status(const Job&)> why) {
  waiting_.ForEach([&](Job* job) {
    absl::Status status = why(*job);
    if (status.ok()) return;
    waiting_.Remove(job);
    End(job, std::move(status));
  });
}

absl::Time Scheduler::next_due() const {
  const Job* const late = waiting_.FirstByDeadline();
  return std::min({late == nullptr ? absl::InfiniteFuture() : late->spec().deadline,
                   batches_expire_, absl::FromUnixNanos(waiting_.next_due_ns())});
}

void Scheduler::MakeDue(absl::Time now) {
  waiting_.MakeDue(absl::ToUnixNanos(now));
  for (Job* job = waiting_.FirstByDeadline(); job != nullptr && job->spec().deadline <= now;
       job = waiting_.FirstByDeadline()) {
    waiting_.Remove(job);
    End(job, Late(/*begun=*/false));
  }
  if (now < batches_expire_) return;
  batches_expire_ = absl::InfiniteFuture();
  running_.ForEach(Batch::State::kPaused, [&](Batch* batch) { EndBetweenSlices(batch, now); });
  running_.ForEach(Batch::State::kRunning, [&](Batch* batch) { ExpireRunning(batch, now); });
}

void Scheduler::Lose(int device, std::string_view message, absl::Time now) {
  lost_ = absl::UnavailableError(std::string(message));
  running_.Lose(device);
  EndWaiting(
      [&](const Job& job) { return running_.CanRun(job.spec().key) ? absl::OkStatus() : lost_; });
  running_.ForEach(Batch::State::kPaused, [&](Batch* batch) { EndBetweenSlices(batch, now); });
}

void Scheduler::Close(std::string_view message, absl::Time now) {
  if (closed_.ok()) closed_ = absl::UnavailableError(std::string(message));
  EndWaiting([&](const Job&) { return closed_; });
  running_.ForEach(Batch::State::kPaused, [&](Batch* batch) { EndBetweenSlices(batch, now); });
}

JobList Scheduler::TakeEnded() { return std::exchange(ended_, JobList()); }

void Scheduler::Tell(Job* job, int64_t now_ns) {
  const absl::Status ending = job->place_.ending;
  JobTimes times;
  Finish(job, ending, JobAnswer{}, now_ns, &times);
}

void Scheduler::Told(int64_t jobs) {
  unfinished_ -= jobs;
  if (idle()) waiting_.clock().Idle();
}

// ---- for streams

void Scheduler::Finish(Job* job, const absl::Status& status, const JobAnswer& answer,
                       int64_t taken_ns, JobTimes* times) {
  Job::Place& place = job->place_;
  times->queue_ns = taken_ns - place.submitted_ns;
  place.state.store(Job::Place::State::kDone, std::memory_order_relaxed);
  const std::shared_ptr<Job> self = std::move(place.self);
  self->Done(status, answer, *times);
}

bool Scheduler::IsGone(const Job& job) { return job.place_.gone.load(std::memory_order_relaxed); }

bool Scheduler::IsAloneAndBrief(const Job& job, absl::Duration most) const {
  if (unfinished_ != 1 || job.place_.state != Job::Place::State::kWaiting) return false;
  const Kind& kind = *job.place_.queue->kind;
  return kind.has_run && job.place_.cost_ns <= absl::ToDoubleNanoseconds(most);
}

}  // namespace logitd::engine
