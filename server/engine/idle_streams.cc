#include "server/engine/idle_streams.h"

#include <thread>

#include "server/engine/job.h"

namespace logitd::engine {

IdleStreams::IdleStreams(int devices, int streams_of_each, absl::Duration spin)
    : streams_of_each_(streams_of_each),
      spin_ns_(absl::ToInt64Nanoseconds(spin)),
      devices_(static_cast<size_t>(devices)),
      seats_(static_cast<size_t>(devices * streams_of_each)) {}

void IdleStreams::Begin(int stream) {
  seats_[static_cast<size_t>(stream)].waits = true;
  ++OfStream(stream).idle;
}

void IdleStreams::End(int stream) {
  Seat& seat = seats_[static_cast<size_t>(stream)];
  seat.waits = false;
  OfStream(stream).called = false;  // whoever ends looks for the others next
  if (!seat.lent) --OfStream(stream).idle;
}

void IdleStreams::Sleep(Mutex& mutex, int stream, bool may_poll) {
  Device& device = OfStream(stream);
  if (!may_poll || spin_ns_ == 0 || spinner_ != nullptr || lent(stream)) {
    return device.wake.Wait(mutex);
  }
  spinner_ = &device;
  const uint32_t seen = wakes_.load(std::memory_order_relaxed);
  mutex.Unlock();
  const int64_t until_ns = MonotonicNanos() + spin_ns_;
  while (wakes_.load(std::memory_order_relaxed) == seen && MonotonicNanos() < until_ns) {
    std::this_thread::yield();  // on few cores, the thread that wakes us may need this one
  }
  mutex.Lock();
  spinner_ = nullptr;
}

void IdleStreams::WakeOne(absl::FunctionRef<bool(int device)> has_work, int except) {
  Device* woken = nullptr;
  for (size_t i = 0; i < devices_.size(); ++i) {
    Device& device = devices_[i];
    const bool leave_out = except != kNone && &OfStream(except) == &device && !lent(except);
    const int idle = device.idle - (leave_out ? 1 : 0);
    if (idle == 0 || !has_work(static_cast<int>(i))) continue;
    if (device.called) return;
    const bool most = woken == nullptr || (woken != spinner_ && idle > woken->idle);
    if (most || &device == spinner_) woken = &device;
  }
  if (woken == nullptr) return;
  woken->called = true;
  if (woken == spinner_) {
    wakes_.fetch_add(1, std::memory_order_relaxed);
  } else {
    woken->wake.Signal();
  }
}

void IdleStreams::WakeAll() {
  wakes_.fetch_add(1, std::memory_order_relaxed);
  for (Device& device : devices_) device.wake.SignalAll();
}

int IdleStreams::Lend(int device) {
  int best = kNone;
  for (int stream = 0; stream < static_cast<int>(seats_.size()); ++stream) {
    Seat& seat = seats_[static_cast<size_t>(stream)];
    if (!seat.waits || seat.lent || (device != kAnyDevice && DeviceOf(stream) != device)) continue;
    if (best == kNone || OfStream(stream).idle > OfStream(best).idle) best = stream;
  }
  if (best == kNone) return kNone;
  seats_[static_cast<size_t>(best)].lent = true;
  --OfStream(best).idle;
  return best;
}

void IdleStreams::TakeBack(int stream) {
  Seat& seat = seats_[static_cast<size_t>(stream)];
  seat.lent = false;
  if (seat.waits) ++OfStream(stream).idle;
}

}  // namespace logitd::engine
