// Which batch a stream runs next, and which stream is woken for a batch.
#include <algorithm>
#include <thread>
#include <utility>

#include "absl/time/clock.h"
#include "server/engine/batcher.h"
#include "server/engine/metrics.h"

namespace logitd::engine {

// While jobs wait for slabs, every batch that holds one is due.
bool Batcher::IsDue(const Batch& batch, int64_t now_ns) const {
  return max_batch_delay_ns_ == 0 || pending_.first != nullptr ||
         now_ns - batch.opened_ns >= max_batch_delay_ns_;
}

bool Batcher::SomeDeviceIsLost() const { return devices_left_ < static_cast<int>(devices_.size()); }

// Whether the batch may run on the device as far as sharded heads go: see "Sharded heads".
bool Batcher::HasTurn(const Batch& batch, const Device& device) const {
  return !batch.sharded || (&device == &devices_.front() && !sharding_);
}

// Until when an open batch waits for the kernels of another one on its head, as a time of
// MonotonicNanos; see "Heads on a device". 0: for none.
//
// The kernels of a batch that is taken `kernel_ns` after another one begin when those of that end: both
// take as long to get to the device. A batch with a deadline waits only as long as its own kernels can
// still end in time.
int64_t Batcher::HeldUntil(const Batch& batch, const Device& device) const {
  if (on_host_ || batch.key.head == nullptr || batch.sharded ||
      batch.state != Batch::State::kOpen) {
    return 0;
  }
  int64_t until = 0;
  for (const Batch& other : batches_) {
    if (other.state != Batch::State::kRunning || other.key.head != batch.key.head ||
        other.rows > rules_.linear_rows || other.live + batch.live < kHeldJobs ||
        &devices_[static_cast<size_t>(other.device)] != &device) {
      continue;
    }
    const double kernel_ns = other.queue->kind->kernel_ns;
    if (kernel_ns > absl::ToDoubleNanoseconds(kMostHeld)) continue;
    until = std::max(until, other.taken_ns + static_cast<int64_t>(kernel_ns));
  }
  if (until == 0 || batch.first_deadline == absl::InfiniteFuture()) return until;
  const absl::Duration takes = absl::Nanoseconds(batch.queue->kind->kernel_ns);
  const absl::Duration spare = batch.first_deadline - takes - absl::Now();
  if (spare <= absl::ZeroDuration()) return 0;
  return std::min(until, MonotonicNanos() + absl::ToInt64Nanoseconds(spare));
}

bool Batcher::IsHeld(const Batch& batch, const Device& device) const {
  const int64_t until = HeldUntil(batch, device);
  return until > 0 && MonotonicNanos() < until;
}

// The first time at which the device may begin a batch that is held now. 0: there is none.
int64_t Batcher::FirstHeldUntil(const Device& device) const {
  int64_t first = 0;
  for (const Batch& batch : batches_) {
    if (batch.live == 0 || !IsFor(batch, device)) continue;
    const int64_t until = HeldUntil(batch, device);
    if (until <= MonotonicNanos()) continue;
    if (first == 0 || until < first) first = until;
  }
  return first;
}

// Idle streams of the device that no batch between two slices waits for, and that have memory for a
// batch that has not begun.
int Batcher::StreamsThatMayBegin(const Device& device) const {
  if (device.idle_streams == 0 || device.lost) return 0;
  int free = device.idle_streams;
  for (const Batch& batch : batches_) {
    if (batch.state == Batch::State::kPaused &&
        &devices_[static_cast<size_t>(batch.device)] == &device) {
      --free;
    }
  }
  return std::clamp(free, 0, static_cast<int>(device.memory.size()));
}

// Seals as many open batches as idle streams could take, the most urgent first. A batch whose payloads are
// all copied is sealed if a stream can run it now. A batch with copies under way is sealed if a
// stream has no other batch to wait for: sealed, it waits only for those copies, not for those of
// later jobs.
void Batcher::SealForIdleStreams() {
  int streams = 0;
  for (const Device& device : devices_) streams += StreamsThatMayBegin(device);
  if (streams == 0) return;
  const int64_t now_ns = max_batch_delay_ns_ > 0 ? MonotonicNanos() : 0;
  // A batch that only a busy device can run takes no idle stream, nor does one that is held.
  const auto can_begin = [this](const Batch& batch) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return std::any_of(devices_.begin(), devices_.end(),
                       [&](const Device& device) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
                         return IsFor(batch, device) && StreamsThatMayBegin(device) > 0 &&
                                !IsHeld(batch, device);
                       });
  };
  int ready = 0;
  int sealed = 0;
  // Whether the turn of sharded heads is free. Their batches that wait for it are not counted: no
  // idle stream could take them.
  bool turn = !sharding_ && StreamsThatMayBegin(devices_.front()) > 0;
  for (const Batch& batch : batches_) {
    if (batch.sharded && batch.state == Batch::State::kPaused) turn = false;
    if (batch.state != Batch::State::kSealed || !can_begin(batch)) continue;
    if (batch.sharded && !std::exchange(turn, false)) continue;
    ++sealed;
    if (batch.copying == 0) ++ready;
  }
  for (const bool complete : {true, false}) {
    while ((complete ? ready : sealed) < streams) {
      Batch* first = nullptr;
      for (Batch& batch : batches_) {
        if (batch.state == Batch::State::kOpen && batch.copied > 0 && batch.live > 0 &&
            (batch.copying == 0) == complete && IsDue(batch, now_ns) && can_begin(batch) &&
            (turn || !batch.sharded) && (first == nullptr || batch.urgency < first->urgency)) {
          first = &batch;
        }
      }
      if (first == nullptr) break;
      Seal(first);
      if (first->sharded) turn = false;
      ++sealed;
      if (complete) ++ready;
    }
  }
}

// Whether the batch's next slice may take longer than kSlowSlice.
bool Batcher::IsSlow(const Batch& batch) const {
  const Progress& progress = batch.progress;
  const double row_ns = progress.row_ns > 0 ? progress.row_ns : batch.queue->kind->row_ns;
  const int64_t left = progress.begun ? progress.end_row - progress.next_row : batch.rows;
  const int64_t rows = RowsOfSlice(batch, left, batch.queue->kind->row_ns, rules_);
  return static_cast<double>(rows) * row_ns > absl::ToDoubleNanoseconds(kSlowSlice);
}

// Whether the device can read the batch's rows.
bool Batcher::IsFor(const Batch& batch, const Device& device) const {
  return batch.key.device == kAnyDevice ||
         &devices_[static_cast<size_t>(batch.key.device)] == &device;
}

// Whether a stream of the device may run the batch's next slice, unless the slice is too slow. An
// open batch counts if it is due and its payloads are copied. If only sealed batches counted, a key
// whose batches keep filling up always comes first.
bool Batcher::MayRun(const Batch& batch, const Device& device, int64_t now_ns) const {
  if (batch.copying > 0 || batch.live == 0) return false;
  if (!IsFor(batch, device) || !HasTurn(batch, device)) return false;
  switch (batch.state) {
    case Batch::State::kPaused:
      return &devices_[static_cast<size_t>(batch.device)] == &device;
    case Batch::State::kSealed:
      return !device.memory.empty();
    case Batch::State::kOpen:
      return !device.memory.empty() && IsDue(batch, now_ns) && !IsHeld(batch, device);
    default:
      return false;
  }
}

// Whether a stream of the device takes `a` rather than `b`.
bool Batcher::ComesFirst(const Batch& a, const Batch& b, const Device& device) const {
  const int node_of_a = devices_[static_cast<size_t>(a.home)].node;
  const int node_of_b = devices_[static_cast<size_t>(b.home)].node;
  if (node_of_a == node_of_b) return a.urgency < b.urgency;
  Urgency of_a = a.urgency;
  Urgency of_b = b.urgency;
  const auto lead = static_cast<double>(rules_.max_slice_ns);
  if (node_of_a == device.node) of_a.start -= lead;
  if (node_of_b == device.node) of_b.start -= lead;
  return of_a < of_b;
}

// The batch that a stream of the device runs next. Null: there is none that it may run.
Batch* Batcher::FindMostUrgent(const Device& device) {
  if (device.lost) return nullptr;
  const int64_t now_ns = max_batch_delay_ns_ > 0 ? MonotonicNanos() : 0;
  const bool spare = device.slow < std::max(1, options_.streams - 1) &&
                     slow_ < std::max(1, options_.streams * devices_left_ - 1);
  Batch* first = nullptr;
  for (Batch& batch : batches_) {
    if (MayRun(batch, device, now_ns) && (first == nullptr || ComesFirst(batch, *first, device)) &&
        (spare || !IsSlow(batch))) {
      first = &batch;
    }
  }
  return first;
}

Batch* Batcher::TakeMostUrgent(Device& device) {
  Batch* first = FindMostUrgent(device);
  if (first == nullptr) return nullptr;
  if (first->state == Batch::State::kOpen) Seal(first);
  if (first->state == Batch::State::kSealed) {
    GiveMemory(first, device);
    first->taken_ns = MonotonicNanos();
    open_jobs_ -= first->live;
  }
  first->state = Batch::State::kRunning;
  if (first->sharded) sharding_ = true;
  first->slow = IsSlow(*first);
  if (first->slow) {
    ++slow_;
    ++device.slow;
  }
  clock_.Serve(first->urgency.start);
  return first;
}

// Lends an idle stream for the batch of a job that just came, where no other job is there.
Batcher::Loan Batcher::Borrow(Batch* batch) {
  const Kind& kind = *batch->queue->kind;
  const double cost_ns = kind.row_ns * static_cast<double>(batch->rows);
  // On the host, each thread that runs ops keeps memory for them.
  if (on_host_ || unfinished_ != 1 || batch->sharded || !kind.has_run || cost_ns <= 0 ||
      cost_ns > absl::ToDoubleNanoseconds(kMostLent)) {
    return {};
  }
  const int only = batch->key.device;
  Device* const device = only == kAnyDevice ? MostIdle() : &devices_[static_cast<size_t>(only)];
  if (device == nullptr || FindMostUrgent(*device) != batch) return {};
  for (int stream = 0; stream < static_cast<int>(seats_.size()); ++stream) {
    Seat& seat = seats_[static_cast<size_t>(stream)];
    if (&DeviceOf(stream) != device || !seat.waits || seat.lent) continue;
    seat.lent = true;
    --device->idle_streams;
    return {.batch = TakeMostUrgent(*device), .stream = stream};
  }
  return {};
}

void Batcher::Return(const Loan& loan) {
  JobList ended;
  {
    MutexLock lock(mutex_);
    GiveBack(loan.batch, ended);
    Seat& seat = seats_[static_cast<size_t>(loan.stream)];
    seat.lent = false;
    if (seat.waits) ++DeviceOf(loan.stream).idle_streams;
    SealAndWake(/*for_delay=*/true);
    Publish();
  }
  End(ended);
}

void Batcher::GiveMemory(Batch* batch, Device& device) {
  batch->device = static_cast<int>(&device - devices_.data());
  batch->memory = device.memory.back();
  device.memory.pop_back();
  batch->slab.device = on_host_ ? batch->slab.host : batch->memory;
}

// Does nothing to a batch that has none.
void Batcher::TakeMemoryBack(Batch* batch) {
  if (batch->device == kNoDevice) return;
  devices_[static_cast<size_t>(batch->device)].memory.push_back(batch->memory);
  batch->device = kNoDevice;
  batch->memory = nullptr;
}

// When max_batch_delay is next over for an open batch that was not due at `now_ns`, or one is not held
// any longer: at `held`, if not 0. Another batch waits for a copy or for a stream, whose end wakes a
// stream.
absl::Time Batcher::NextDue(int64_t held, int64_t now_ns) const {
  absl::Duration wait = absl::InfiniteDuration();
  if (held > 0) wait = absl::Nanoseconds(held - MonotonicNanos());
  if (max_batch_delay_ns_ == 0) return absl::Now() + wait;
  for (const Batch& batch : batches_) {
    if (batch.state != Batch::State::kOpen || IsDue(batch, now_ns)) continue;
    wait = std::min(wait, absl::Nanoseconds(batch.opened_ns + max_batch_delay_ns_ - now_ns));
  }
  return absl::Now() + wait;
}

void Batcher::Wake(Device& device) {
  if (&device == spinner_) {
    wakes_.fetch_add(1, std::memory_order_relaxed);
  } else {
    device.wake.Signal();
  }
}

// The device with the most idle streams that have memory for a batch; null: there is none.
Batcher::Device* Batcher::MostIdle() {
  Device* most = nullptr;
  for (Device& device : devices_) {
    if (device.lost || device.idle_streams == 0 || device.memory.empty()) continue;
    if (most == nullptr || device.idle_streams > most->idle_streams) most = &device;
  }
  return most;
}

// Seals what idle streams could take, and wakes one of them if there is a batch that it may run: one
// that is awake, else of the device with the most idle streams. Whoever takes a batch, or finds none
// for its device, calls this again; so one wake is enough for several batches. `for_delay`: one must
// be woken in any case, to see when max_batch_delay is over, or a batch is not held any longer.
void Batcher::SealAndWake(bool for_delay) {
  SealForIdleStreams();
  Device* holder = nullptr;  // looked up before the batches: see Next
  for (Device& device : devices_) {
    if (!for_delay || device.idle_streams == 0 || device.lost) continue;
    if (FirstHeldUntil(device) > 0) holder = &device;
  }
  Device* best = nullptr;
  for (Device& device : devices_) {
    if (device.idle_streams == 0) continue;
    if (best != nullptr) {
      const bool idler = device.idle_streams > best->idle_streams;
      if (best == spinner_ || (&device != spinner_ && !idler)) continue;
    }
    if (FindMostUrgent(device) != nullptr) best = &device;
  }
  if (best == nullptr && for_delay) {
    best = holder == nullptr && max_batch_delay_ns_ > 0 ? MostIdle() : holder;
  }
  if (best != nullptr) Wake(*best);
}

void Batcher::GiveBack(Batch* batch, JobList& ended) {
  const Progress& progress = batch->progress;
  if (batch->sharded) sharding_ = false;
  if (batch->slow) {
    --slow_;
    --devices_[static_cast<size_t>(batch->device)].slow;
  }
  if (progress.slice_rows > 0) {
    if (progress.kind_row_ns > 0) {
      batch->queue->kind->row_ns = progress.kind_row_ns;
      batch->queue->kind->has_run = true;
      if (progress.done && progress.rows_run <= rules_.linear_rows) {
        double& kernel_ns = batch->queue->kind->kernel_ns;
        const auto now = static_cast<double>(progress.times.kernel_ns);
        kernel_ns += (now - kernel_ns) / (kernel_ns == 0 ? 1 : 4);
      }
    }
    batch->urgency.start += static_cast<double>(progress.slice_ns) / batch->weight;
  }
  unfinished_ -= progress.finished;
  batch->live -= progress.finished;
  if (unfinished_ == 0) all_done_.SignalAll();
  if (!progress.done) {
    batch->state = Batch::State::kPaused;
    return EndBetweenSlices(batch, ended);
  }
  TakeMemoryBack(batch);
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

Batch* Batcher::Next(int stream, Batch* given_back) {
  MutexLock lock(mutex_);
  Seat& seat = seats_[static_cast<size_t>(stream)];
  Device& device = DeviceOf(stream);
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
  seat.waits = true;
  ++device.idle_streams;
  bool spun = idle_spin_ns_ == 0;
  Batch* batch = nullptr;
  while (!stopping_ && !device.lost) {
    const int64_t now_ns = max_batch_delay_ns_ > 0 ? MonotonicNanos() : 0;
    // Looked up before the take: a batch whose hold ends after the take must not be slept through.
    const int64_t held = seat.lent ? 0 : FirstHeldUntil(device);
    if (!seat.lent) batch = TakeMostUrgent(device);
    if (batch != nullptr) break;
    SealAndWake();  // for streams of other devices; where this one is lent, also for its own
    if (!seat.lent && max_batch_delay_ns_ > 0 && FindMostUrgent(device) != nullptr) {
      continue;  // due just now
    }
    if (!seat.lent && (!spun || held > 0) && spinner_ == nullptr) {
      // The next request of a busy client comes within microseconds, and a sleeping thread takes
      // longer to wake. The stream also polls while a batch is held.
      spun = true;
      spinner_ = &device;
      const uint32_t seen = wakes_.load(std::memory_order_relaxed);
      mutex_.Unlock();
      const int64_t until = held > 0 ? held : MonotonicNanos() + idle_spin_ns_;
      while (wakes_.load(std::memory_order_relaxed) == seen && MonotonicNanos() < until) {
        std::this_thread::yield();  // on few cores, the thread that wakes us may need this one
      }
      mutex_.Lock();
      spinner_ = nullptr;
    } else {
      Publish();
      device.wake.WaitUntil(mutex_, NextDue(held, now_ns));
    }
  }
  seat.waits = false;
  if (!seat.lent) --device.idle_streams;
  // One wake may stand for several batches. And if batches may be delayed, another stream must now
  // wait for the next one to become due.
  SealAndWake(/*for_delay=*/true);
  Publish();
  return batch;
}

}  // namespace logitd::engine
