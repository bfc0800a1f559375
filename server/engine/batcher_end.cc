// How jobs end before their answer is there: cancel, deadline, lost device, close, stop.
#include <algorithm>
#include <chrono>
#include <memory>
#include <thread>
#include <utility>

#include "absl/time/clock.h"
#include "server/engine/batcher.h"
#include "server/engine/metrics.h"

namespace logitd::engine {

// Takes a waiting job out of its list or batch. A job that runs ends after the slice. Does nothing
// to a job that is done.
void Batcher::Drop(Job* job, absl::StatusCode why, JobList& ended) {
  using State = Job::Place::State;
  Job::Place& place = job->place_;
  const State state = place.state;
  if (state == State::kNew || state == State::kDone || place.dropped) return;
  if (state == State::kPending) {
    RemovePending(job);
    place.state = State::kDone;
    place.why = why;
    ended.PushBack(job);
    return;
  }
  Batch* batch = place.batch;
  if (batch->state != Batch::State::kRunning) return DropFrom(batch, job, why, ended);
  // A running batch is its stream's. Only a Cancel comes here: the others look at states first.
  if (place.gone.exchange(true, std::memory_order_relaxed)) return;
  if (++batch->gone == batch->live) batch->abandoned.store(true, std::memory_order_release);
}

// Takes a job out of a batch that does not run.
void Batcher::DropFrom(Batch* batch, Job* job, absl::StatusCode why, JobList& ended) {
  using State = Job::Place::State;
  Job::Place& place = job->place_;
  const State state = place.state;
  Slot& slot = batch->slots[place.slot];
  slot.job = nullptr;
  --batch->live;
  place.why = why;
  if (batch->state == Batch::State::kPaused) {
    place.begun = true;
    slot.left = std::make_unique<const AxisCounts>(job->spec().counts);
  } else {
    --open_jobs_;
  }
  if (state == State::kCopying) {
    place.dropped = true;
    return;
  }
  if (state == State::kPlaced) {
    devices_[static_cast<size_t>(batch->home)].to_copy.Remove(job);
    --batch->copying;
  }
  place.state = State::kDone;
  ended.PushBack(job);
  ReleaseIfEmpty(batch);
}

bool Batcher::IsGone(const Job& job) { return job.place_.gone.load(std::memory_order_relaxed); }

// Ends the jobs of a paused batch whose caller has left, whose deadline has passed, or all of them
// where the device is lost or the engine closed.
void Batcher::EndBetweenSlices(Batch* batch, JobList& ended) {
  const absl::Time now =
      batch->first_deadline == absl::InfiniteFuture() ? absl::InfinitePast() : absl::Now();
  const bool late = batch->first_deadline <= now || batch->abandoned;
  const bool closed = closed_ || devices_[static_cast<size_t>(batch->device)].lost ||
                      (batch->sharded && SomeDeviceIsLost());
  if (!closed && !late && batch->gone == 0) return;
  batch->gone = 0;
  batch->first_deadline = absl::InfiniteFuture();
  int live =
      batch->live;  // counted here: without a job, the batch may be opened for others at once
  for (size_t i = 0; live > 0; ++i) {
    Job* job = batch->slots[i].job;
    if (job == nullptr) continue;
    --live;
    const absl::Time deadline = job->spec().deadline;
    if (IsGone(*job)) {
      DropFrom(batch, job, absl::StatusCode::kCancelled, ended);
    } else if (closed) {
      DropFrom(batch, job, absl::StatusCode::kUnavailable, ended);
    } else if (deadline <= now || batch->abandoned) {
      DropFrom(batch, job, absl::StatusCode::kDeadlineExceeded, ended);
    } else {
      batch->first_deadline = std::min(batch->first_deadline, deadline);
      next_expiry_ = std::min(next_expiry_, deadline);
    }
  }
}

// A running batch is abandoned when the last of its jobs is late. Each of them ends after the slice.
void Batcher::ExpireRunning(Batch& batch, absl::StatusCode why, absl::Time due_by) {
  if (why != absl::StatusCode::kDeadlineExceeded || batch.abandoned) return;
  if (batch.last_deadline <= due_by) {
    batch.abandoned.store(true, std::memory_order_release);
  } else {
    next_expiry_ = std::min(next_expiry_, batch.last_deadline);
  }
}

// Calls visit for every job that waits for a slab or is in a batch that does not run. It may drop the
// job; that may free a slab, and so move other jobs to a place this pass has already seen.
void Batcher::ForEachWaiting(absl::FunctionRef<void(Job*)> visit) {
  for (Job* job = pending_.first; job != nullptr;) {
    Job* next = job->place_.next;
    visit(job);
    job = next;
  }
  for (Batch& batch : batches_) {
    if (batch.state == Batch::State::kRunning || batch.state == Batch::State::kFree ||
        batch.state == Batch::State::kKept) {
      continue;
    }
    for (size_t i = 0; i < batch.slots.size(); ++i) {
      if (batch.slots[i].job != nullptr) visit(batch.slots[i].job);
    }
  }
}

// Drops every waiting job whose deadline is not after `due_by`, and finds the next deadline of the
// other jobs.
void Batcher::DropAll(absl::StatusCode why, absl::Time due_by, JobList& ended) {
  bool again = true;
  while (again) {  // see ForEachWaiting
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
    for (Batch& batch : batches_) {
      if (batch.state == Batch::State::kRunning) ExpireRunning(batch, why, due_by);
    }
    ForEachWaiting(visit);
  }
  // The dropped copy may be the last one that a sealed batch waited for.
  SealAndWake();
}

void Batcher::End(JobList& ended) {
  if (ended.first == nullptr) return;
  std::string unavailable;
  {
    MutexLock lock(mutex_);
    unavailable = closed_ ? closed_message_ : lost_message_;
  }
  const int64_t now_ns = MonotonicNanos();
  int64_t count = 0;
  while (Job* job = ended.PopFront()) {
    Job::Place& place = job->place_;
    absl::Status status;
    switch (place.why) {
      case absl::StatusCode::kCancelled:
        status = absl::CancelledError(place.begun ? "cancelled while it ran"
                                                  : "cancelled before it ran");
        break;
      case absl::StatusCode::kDeadlineExceeded:
        status = absl::DeadlineExceededError(place.begun
                                                 ? "the deadline passed while it ran"
                                                 : "the deadline passed before a stream was free");
        break;
      case absl::StatusCode::kInvalidArgument:
        status = CheckFits(job->spec(), options_);
        break;
      default:
        status = absl::UnavailableError(unavailable);
    }
    if (place.begun && metrics_ != nullptr) metrics_->CountStopped(job->spec().key.op->name);
    JobTimes times;
    Finish(job, status, JobAnswer{}, now_ns, &times);
    ++count;
  }
  MutexLock lock(mutex_);
  unfinished_ -= count;
  if (unfinished_ > 0) return;
  clock_.Idle();
  all_done_.SignalAll();
}

void Batcher::Cancel(const Job& job) {
  CallerScope scope(callers_);
  JobList ended;
  {
    MutexLock lock(mutex_);
    // The job is constant to its caller, except the place that the engine keeps in it.
    Drop(const_cast<Job*>(&job), absl::StatusCode::kCancelled, ended);
    SealAndWake();
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

// Drops every waiting job that no device can run any more.
void Batcher::DropLost(JobList& ended) {
  std::vector<Job*> lost;
  ForEachWaiting([&](Job* job) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (IsLost(job->spec().key)) lost.push_back(job);
  });
  // A job that moves from the list to a batch meanwhile is still the same job.
  for (Job* job : lost) Drop(job, absl::StatusCode::kUnavailable, ended);
}

void Batcher::Lose(int index, std::string_view message) {
  JobList ended;
  {
    MutexLock lock(mutex_);
    Device& device = devices_[static_cast<size_t>(index)];
    device.lost = true;
    --devices_left_;
    lost_message_ = std::string(message);
    for (Batch& batch : batches_) {
      if (batch.state == Batch::State::kPaused && (batch.device == index || batch.sharded)) {
        EndBetweenSlices(&batch, ended);
      }
    }
    DropLost(ended);
    device.wake.SignalAll();
    SealAndWake();
    if (metrics_ != nullptr) {
      metrics_->Set(Gauge::kSlabs, static_cast<double>(std::count_if(
                                       batches_.begin(), batches_.end(),
                                       [this](const Batch& batch) ABSL_EXCLUSIVE_LOCKS_REQUIRED(
                                           mutex_) { return IsUsable(batch); })));
    }
    Publish();
  }
  End(ended);
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
  for (Device& device : devices_) {
    device.wake.SignalAll();
    device.copy_wake.SignalAll();
  }
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

}  // namespace logitd::engine
