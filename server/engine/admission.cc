#include "server/engine/admission.h"

#include <map>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "server/engine/metrics.h"
#include "server/engine/sync.h"

namespace logitd::engine {
namespace {

absl::Status LateError() {
  return absl::DeadlineExceededError("the deadline passed before there was room for the message");
}

}  // namespace

absl::Status DrainingError() {
  return absl::UnavailableError(
      "the server is draining: it finishes admitted calls and takes no new ones");
}

struct Admission::State {
  struct Waiter {
    absl::Time deadline;
    Ready ready;
  };
  struct Answer {
    Ready ready;
    absl::Status refusal;  // OK: a ticket for max_request_bytes
  };

  State(Admission* admission, const AdmissionOptions& options, Metrics* metrics)
      : admission(admission), options(options), metrics(metrics) {
    if (metrics != nullptr) metrics->Set(Gauge::kHeldBytesLimit, options.max_held_bytes);
    timer = std::thread([this] { RunTimer(); });
  }

  ~State() {
    {
      MutexLock lock(mutex);
      stopping = true;
    }
    timer_wake.Signal();
    timer.join();
  }

  bool HasRoom() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) {
    return held + options.max_request_bytes <= options.max_held_bytes;
  }

  void Publish() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) {
    if (metrics == nullptr) return;
    metrics->Set(Gauge::kHeldBytes, held);
    metrics->Set(Gauge::kWaitingCalls, static_cast<int64_t>(waiters.size()));
  }

  void Count(Refusal reason) {
    if (metrics != nullptr) metrics->CountRefused(reason);
  }

  // Takes a call out of the line. Its answer is `refusal` or, if that is OK, a ticket.
  void Take(std::map<WaiterId, Waiter>::iterator it, absl::Status refusal,
            std::vector<Answer>& answers) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) {
    deadlines.erase({it->second.deadline, it->first});
    answers.push_back({std::move(it->second.ready), std::move(refusal)});
    waiters.erase(it);
  }

  void Run(std::vector<Answer>& answers) {
    for (Answer& answer : answers) {
      if (answer.refusal.ok()) {
        answer.ready(Ticket(admission, options.max_request_bytes));
      } else {
        answer.ready(std::move(answer.refusal));
      }
    }
    answers.clear();
  }

  // Gives `bytes` back and lets in the waiting calls that fit. One thread at a time lets calls in.
  // So answers go out in the order of the line, and a `ready` that drops its ticket at once does
  // not recurse through the whole line.
  void Release(int64_t bytes) {
    std::vector<Answer> answers;
    {
      MutexLock lock(mutex);
      held -= bytes;
      if (granting || waiters.empty()) return Publish();
      granting = true;
    }
    while (true) {
      {
        MutexLock lock(mutex);
        const absl::Time now = waiters.empty() ? absl::Time() : absl::Now();
        while (!waiters.empty()) {
          auto first = waiters.begin();
          if (first->second.deadline <= now) {
            Count(Refusal::kDeadline);
            Take(first, LateError(), answers);
          } else if (HasRoom()) {
            held += options.max_request_bytes;
            Take(first, absl::OkStatus(), answers);
          } else {
            break;
          }
        }
        if (answers.empty()) granting = false;
        Publish();
        if (answers.empty()) return;
      }
      Run(answers);
    }
  }

  void RunTimer() {
    std::vector<Answer> answers;
    mutex.Lock();
    while (!stopping) {
      if (given_back > 0) {
        const int64_t bytes = std::exchange(given_back, 0);
        mutex.Unlock();
        Release(bytes);
        mutex.Lock();
        continue;
      }
      timer_due = deadlines.empty() ? absl::InfiniteFuture() : deadlines.begin()->first;
      const absl::Time now = absl::Now();
      if (timer_due > now) {
        timer_wake.WaitUntil(mutex, timer_due);
        continue;
      }
      while (!deadlines.empty() && deadlines.begin()->first <= now) {
        Count(Refusal::kDeadline);
        Take(waiters.find(deadlines.begin()->second), LateError(), answers);
      }
      Publish();
      mutex.Unlock();
      Run(answers);
      mutex.Lock();
    }
    mutex.Unlock();
  }

  Admission* const admission;
  const AdmissionOptions options;
  Metrics* const metrics;

  mutable Mutex mutex;
  int64_t held ABSL_GUARDED_BY(mutex) = 0;
  int64_t given_back ABSL_GUARDED_BY(mutex) = 0;  // still part of `held`; the timer releases it
  bool draining ABSL_GUARDED_BY(mutex) = false;
  bool stopping ABSL_GUARDED_BY(mutex) = false;
  bool granting ABSL_GUARDED_BY(mutex) = false;  // a thread is inside the loop of Release
  WaiterId next_id ABSL_GUARDED_BY(mutex) = 1;
  std::map<WaiterId, Waiter> waiters ABSL_GUARDED_BY(mutex);  // the line: ids only grow
  std::set<std::pair<absl::Time, WaiterId>> deadlines ABSL_GUARDED_BY(mutex);  // finite ones
  absl::Time timer_due ABSL_GUARDED_BY(mutex) = absl::InfiniteFuture();  // the timer wakes then
  CondVar timer_wake;
  std::thread timer;
};

Admission::Ticket::Ticket(Ticket&& other) noexcept
    : admission_(std::exchange(other.admission_, nullptr)),
      bytes_(std::exchange(other.bytes_, 0)) {}

Admission::Ticket& Admission::Ticket::operator=(Ticket&& other) noexcept {
  if (this != &other) {
    ShrinkTo(0);
    admission_ = std::exchange(other.admission_, nullptr);
    bytes_ = std::exchange(other.bytes_, 0);
  }
  return *this;
}

Admission::Ticket::~Ticket() { ShrinkTo(0); }

void Admission::Ticket::ShrinkTo(int64_t bytes) {
  const int64_t freed = bytes_ - bytes;
  if (admission_ == nullptr || freed <= 0) return;
  bytes_ = bytes;
  admission_->state_->Release(freed);
}

void Admission::Ticket::GiveBackLater() {
  if (admission_ == nullptr || bytes_ == 0) return;
  State& state = *admission_->state_;
  MutexLock lock(state.mutex);
  state.given_back += std::exchange(bytes_, 0);
  state.timer_wake.Signal();
}

Admission::Admission(const AdmissionOptions& options, Metrics* metrics)
    : state_(std::make_unique<State>(this, options, metrics)) {}

Admission::~Admission() { BeginDrain(); }

Admission::WaiterId Admission::Enter(absl::Time deadline, Ready ready) {
  State& state = *state_;
  absl::Status refusal;
  {
    MutexLock lock(state.mutex);
    if (state.draining) {
      state.Count(Refusal::kDraining);
      refusal = DrainingError();
    } else if (deadline != absl::InfiniteFuture() && deadline <= absl::Now()) {
      state.Count(Refusal::kDeadline);
      refusal = LateError();
    } else if (state.waiters.empty() && state.HasRoom()) {
      state.held += state.options.max_request_bytes;
      state.Publish();
    } else if (static_cast<int64_t>(state.waiters.size()) < state.options.max_waiting_calls) {
      const WaiterId id = state.next_id++;
      state.waiters.emplace(id, State::Waiter{deadline, std::move(ready)});
      if (deadline != absl::InfiniteFuture()) state.deadlines.emplace(deadline, id);
      if (deadline < state.timer_due) state.timer_wake.Signal();
      state.Publish();
      return id;
    } else {
      state.Count(Refusal::kLineFull);
      refusal = absl::ResourceExhaustedError(absl::StrFormat(
          "held %d of %d bytes, %d of %d calls waiting; retry after %d ms", state.held,
          state.options.max_held_bytes, state.waiters.size(), state.options.max_waiting_calls,
          absl::ToInt64Milliseconds(state.options.retry_delay)));
    }
  }
  if (refusal.ok()) {
    ready(Ticket(this, state.options.max_request_bytes));
  } else {
    ready(std::move(refusal));
  }
  return 0;
}

bool Admission::Abandon(WaiterId id) {
  Ready gone;  // destroyed after the lock: its captures may call back
  MutexLock lock(state_->mutex);
  auto it = state_->waiters.find(id);
  if (it == state_->waiters.end()) return false;
  gone = std::move(it->second.ready);
  state_->deadlines.erase({it->second.deadline, id});
  state_->waiters.erase(it);
  state_->Publish();
  return true;
}

void Admission::BeginDrain() {
  std::vector<State::Answer> answers;
  {
    MutexLock lock(state_->mutex);
    if (!state_->draining && state_->metrics != nullptr) state_->metrics->Set(Gauge::kDraining, 1);
    state_->draining = true;
    while (!state_->waiters.empty()) {
      state_->Count(Refusal::kDraining);
      state_->Take(state_->waiters.begin(), DrainingError(), answers);
    }
    state_->Publish();
  }
  state_->Run(answers);
}

bool Admission::draining() const {
  MutexLock lock(state_->mutex);
  return state_->draining;
}

int64_t Admission::held_bytes() const {
  MutexLock lock(state_->mutex);
  return state_->held;
}

const AdmissionOptions& Admission::options() const { return state_->options; }

}  // namespace logitd::engine
