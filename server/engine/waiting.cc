#include "server/engine/waiting.h"

#include <algorithm>

namespace logitd::engine {
namespace {

// The cost of a byte of payload, in nanoseconds, where nothing like it has run.
constexpr double kUnknownByteNs = 1;

bool IsIdle(const Kind& kind) {
  return kind.batches == 0 &&
         std::all_of(kind.queues.begin(), kind.queues.end(),
                     [](const KeyQueue& queue) { return queue.jobs.top() == nullptr; });
}

}  // namespace

void JobList::PushBack(Job* job) {
  job->place_.previous = last;
  job->place_.next = nullptr;
  (last != nullptr ? last->place_.next : first) = job;
  last = job;
  ++size;
}

void JobList::Remove(Job* job) {
  Job::Place& place = job->place_;
  (place.previous != nullptr ? place.previous->place_.next : first) = place.next;
  (place.next != nullptr ? place.next->place_.previous : last) = place.previous;
  --size;
}

Job* JobList::PopFront() {
  Job* job = first;
  if (job != nullptr) Remove(job);
  return job;
}

WaitingJobs::WaitingJobs(const EngineOptions& options, const SliceRules& rules, int devices,
                         const Costs& costs)
    : options_(options),
      max_batch_delay_ns_(absl::ToInt64Nanoseconds(options.max_batch_delay)),
      rules_(rules),
      costs_(costs),
      lanes_(static_cast<size_t>(devices) + 2) {}

Kind* WaitingJobs::KindOf(const KindKey& key) {
  auto it = kinds_.find(key);
  if (it == kinds_.end()) {
    if (kinds_.size() >= forget_at_) {
      absl::erase_if(kinds_, [](const auto& entry) { return IsIdle(*entry.second); });
      forget_at_ = std::max(kMaxIdleKeys, 2 * kinds_.size());
    }
    it = kinds_.emplace(key, std::make_unique<Kind>()).first;
    Kind* kind = it->second.get();
    kind->key = key;
    kind->row_ns = costs_.PerRow(key.key);
    for (size_t length = 0; length < kLengths; ++length) {
      kind->queues[length].kind = kind;
      kind->queues[length].length = static_cast<Length>(length);
    }
  }
  return it->second.get();
}

Length WaitingJobs::LengthOf(const JobSpec& spec, double cost_ns, double row_ns) const {
  if (cost_ns <= static_cast<double>(rules_.max_slice_ns)) return Length::kShort;
  const double slice_ns =
      row_ns * static_cast<double>(RowsOfSlice(spec.key, spec.whole, spec.rows(), row_ns, rules_));
  return slice_ns > absl::ToDoubleNanoseconds(kSlowSlice) ? Length::kSlow : Length::kLong;
}

WaitingJobs::Lane& WaitingJobs::LaneOf(const KeyQueue& queue) {
  const BatchKey& key = queue.kind->key.key;
  const size_t any = lanes_.size() - (IsSharded(key) ? 2 : 1);
  const size_t of = key.device != kAnyDevice ? static_cast<size_t>(key.device) : any;
  return lanes_[of][static_cast<size_t>(queue.length)];
}

// Estimates the job's cost, gives it its place in the order, and queues it.
void WaitingJobs::Add(Job* job, int64_t now_ns) {
  const JobSpec& spec = job->spec();
  Job::Place& place = job->place_;
  Kind* const kind = KindOf({.key = spec.key, .priority = spec.caller.priority});
  place.cost_ns = kind->row_ns > 0 ? kind->row_ns * static_cast<double>(spec.rows())
                                   : kUnknownByteNs * static_cast<double>(spec.size.payload_bytes);
  const Length length = LengthOf(spec, place.cost_ns, kind->row_ns);
  place.urgency = {.priority = spec.caller.priority,
                   .start = clock_.Arrive(spec.caller, length != Length::kShort, place.cost_ns),
                   .sequence = next_sequence_++};
  KeyQueue* const queue = &kind->queues[static_cast<size_t>(length)];
  place.queue = queue;
  place.state = Job::Place::State::kWaiting;
  all_.PushBack(job);
  const bool first = queue->jobs.top() == nullptr;
  queue->jobs.Push(job);
  queue->rows += spec.rows();
  ++queue->count;
  if (spec.deadline < absl::InfiniteFuture()) by_deadline_.Push(job);
  if (queue->due) {
    if (queue->jobs.top() != job) return;
    LaneOf(*queue).Remove(queue);
    LaneOf(*queue).Push(queue);
  } else if (max_batch_delay_ns_ == 0 || queue->rows >= options_.max_batch_rows ||
             spec.key.op->exclusive_batch) {
    BecomeDue(queue);
  } else if (first) {
    queue->due_ns = now_ns + max_batch_delay_ns_;
    by_due_.insert({queue->due_ns, queue});
  }
}

void WaitingJobs::BecomeDue(KeyQueue* queue) {
  by_due_.erase({queue->due_ns, queue});
  queue->due = true;
  LaneOf(*queue).Push(queue);
}

void WaitingJobs::MakeDue(int64_t now_ns) {
  while (next_due_ns() <= now_ns) BecomeDue(by_due_.begin()->second);
}

void WaitingJobs::Remove(Job* job) {
  Job::Place& place = job->place_;
  KeyQueue* const queue = place.queue;
  const bool first = job == queue->jobs.top();
  all_.Remove(job);
  if (job->spec().deadline < absl::InfiniteFuture()) by_deadline_.Remove(job);
  queue->jobs.Remove(job);
  queue->rows -= job->spec().rows();
  --queue->count;
  if (queue->due && first) LaneOf(*queue).Remove(queue);
  if (queue->jobs.top() != nullptr) {
    if (queue->due && first) LaneOf(*queue).Push(queue);
    return;
  }
  by_due_.erase({queue->due_ns, queue});
  queue->due = false;
}

Job* WaitingJobs::First(int device, absl::FunctionRef<bool(const Job&)> may) {
  Job* first = nullptr;
  const size_t all = lanes_.size();
  for (const size_t of : {static_cast<size_t>(device), all - 2, all - 1}) {
    for (const Lane& lane : lanes_[of]) {
      if (lane.top() == nullptr) continue;
      Job* const job = lane.top()->jobs.top();
      if (first != nullptr && first->place_.urgency < job->place_.urgency) continue;
      if (may(*job)) first = job;
    }
  }
  return first;
}

JobList WaitingJobs::Fill(Batch* batch, Job* first, absl::Time now) {
  KeyQueue* const queue = first->place_.queue;
  JobList late;
  batch->Begin(queue);
  for (Job* job = first; job != nullptr; job = queue->jobs.top()) {
    const JobSpec& spec = job->spec();
    if (spec.deadline <= now) {
      Remove(job);
      late.PushBack(job);
      continue;
    }
    if (batch->live == 0 && job != first) break;  // others may go before it
    const int64_t rows = batch->rows + spec.rows();
    const bool one_slice =
        RowsOfSlice(spec.key, /*whole=*/false, rows, queue->kind->row_ns, rules_) == rows;
    if (batch->live > 0 && !(one_slice && Fits(*batch, spec, options_))) break;
    Remove(job);
    batch->Add(job);
    if (spec.key.op->exclusive_batch) break;
  }
  return late;
}

void WaitingJobs::ForEach(absl::FunctionRef<void(Job*)> visit) {
  for (Job* job = all_.first; job != nullptr;) {
    Job* const next = job->place_.next;
    visit(job);
    job = next;
  }
}

}  // namespace logitd::engine
