#include "server/http2/loop.h"

#include <pthread.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>

namespace logitd::http2 {
namespace {

constexpr int kEventsPerTurn = 256;
constexpr int64_t kNoTick = std::numeric_limits<int64_t>::max();

class FunctionTask final : public Task {
 public:
  explicit FunctionTask(absl::AnyInvocable<void()> work) : work_(std::move(work)) {}
  void Run() override {
    work_();
    delete this;
  }

 private:
  absl::AnyInvocable<void()> work_;
};

}  // namespace

void Timers::Timer::Cancel() {
  if (!set()) return;
  previous->next = next;
  next->previous = previous;
  previous = next = nullptr;
}

Timers::Timers(int64_t now_ns)
    : slots_(std::make_unique<Link[]>(kSlots)), tick_(now_ns / kSlotNs), next_tick_(kNoTick) {
  for (int64_t i = 0; i < kSlots; ++i) slots_[i].previous = slots_[i].next = &slots_[i];
}

void Timers::Insert(Link* slot, Timer* timer) {
  timer->next = slot;
  timer->previous = slot->previous;
  slot->previous->next = timer;
  slot->previous = timer;
}

void Timers::Set(Timer* timer, int64_t due_ns) {
  timer->Cancel();
  timer->due_ns_ = due_ns;
  // The slot after the due time: all of it is past when the slot is looked at.
  const int64_t tick = std::max(due_ns / kSlotNs, tick_) + 1;
  Insert(SlotOf(tick), timer);
  next_tick_ = std::min(next_tick_, tick);
}

void Timers::Advance(int64_t now_ns) {
  const int64_t now = now_ns / kSlotNs;
  if (next_tick_ > now) {
    tick_ = std::max(tick_, now);
    return;
  }
  const int64_t last = std::min(now, tick_ + kSlots);  // one round sees every timer
  Link due;  // what the callbacks set comes into the slots, not into this ring
  due.previous = due.next = &due;
  for (int64_t tick = std::max(tick_ + 1, std::min(next_tick_, last)); tick <= last; ++tick) {
    Link* const slot = SlotOf(tick);
    for (Link* at = slot->next; at != slot;) {
      auto* const timer = static_cast<Timer*>(at);
      at = at->next;
      if (timer->due_ns_ / kSlotNs >= now) continue;  // of a later round
      timer->Cancel();
      Insert(&due, timer);
    }
  }
  tick_ = now;
  FindNext();
  while (due.next != &due) {
    auto* const timer = static_cast<Timer*>(due.next);
    timer->Cancel();
    timer->fire_();  // may destroy it
  }
}

void Timers::FindNext() {
  for (int64_t tick = tick_ + 1; tick <= tick_ + kSlots; ++tick) {
    const Link* const slot = SlotOf(tick);
    if (slot->next == slot) continue;
    next_tick_ = tick;
    return;
  }
  next_tick_ = kNoTick;
}

int Timers::WaitMs(int64_t now_ns) const {
  if (next_tick_ == kNoTick) return -1;
  return static_cast<int>(std::max<int64_t>(0, next_tick_ * kSlotNs - now_ns + kSlotNs - 1) /
                          kSlotNs);
}

Loop::Loop(int index, Clock clock)
    : index_(index),
      clock_(clock),
      epoll_(epoll_create1(EPOLL_CLOEXEC)),
      wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      now_ns_(clock()),
      timers_(now_ns_),
      read_scratch_(new std::byte[kScratchBytes]),
      write_scratch_(new std::byte[kScratchBytes]) {
  epoll_event event = {.events = EPOLLIN, .data = {.ptr = nullptr}};
  epoll_ctl(epoll_, EPOLL_CTL_ADD, wake_, &event);
}

Loop::~Loop() {
  Stop();
  close(wake_);
  close(epoll_);
}

void Loop::Start(const char* name) {
  thread_ = std::thread([this] { Run(); });
  pthread_setname_np(thread_.native_handle(), name);
}

void Loop::Stop() {
  if (thread_.joinable()) {
    Post([this] { stop_ = true; });
    thread_.join();
  }
  RunTasks();
  EndTurn();
}

void Loop::Post(Task* task) {
  Task* head = posted_.load(std::memory_order_relaxed);
  do {
    task->next_ = head;
  } while (!posted_.compare_exchange_weak(head, task, std::memory_order_seq_cst));
  // The thread looks at the tasks once more after it has said that it sleeps.
  if (asleep_.load(std::memory_order_seq_cst) && asleep_.exchange(false)) {
    const uint64_t one = 1;
    [[maybe_unused]] const ssize_t written = write(wake_, &one, sizeof(one));
  }
}

void Loop::Post(absl::AnyInvocable<void()> work) { Post(new FunctionTask(std::move(work))); }

void Loop::Watch(Source* source, int fd, uint32_t events) {
  epoll_event event = {.events = events, .data = {.ptr = source}};
  epoll_ctl(epoll_, EPOLL_CTL_ADD, fd, &event);
}

void Loop::Change(Source* source, int fd, uint32_t events) {
  epoll_event event = {.events = events, .data = {.ptr = source}};
  epoll_ctl(epoll_, EPOLL_CTL_MOD, fd, &event);
}

void Loop::Unwatch(int fd) { epoll_ctl(epoll_, EPOLL_CTL_DEL, fd, nullptr); }

void Loop::AtTurnEnd(Source* source) {
  if (source->at_turn_end_) return;
  source->at_turn_end_ = true;
  turn_end_.push_back(source);
}

void Loop::RunTasks() {
  Task* newest = posted_.exchange(nullptr, std::memory_order_seq_cst);
  Task* oldest = nullptr;
  while (newest != nullptr) {
    Task* const next = newest->next_;
    newest->next_ = oldest;
    oldest = newest;
    newest = next;
  }
  while (oldest != nullptr) {
    Task* const task = oldest;
    oldest = task->next_;
    task->Run();
  }
}

void Loop::EndTurn() {
  for (size_t i = 0; i < turn_end_.size(); ++i) {
    turn_end_[i]->at_turn_end_ = false;
    turn_end_[i]->OnTurnEnd();  // may ask for the turn's end again
  }
  turn_end_.clear();
  if (!retired_.empty()) std::vector<std::shared_ptr<void>>().swap(retired_);
}

void Loop::Run() {
  while (!stop_) Turn(/*wait=*/true);
}

void Loop::Turn(bool wait) {
  epoll_event events[kEventsPerTurn];
  asleep_.store(true, std::memory_order_seq_cst);
  const bool work = !wait || posted_.load(std::memory_order_seq_cst) != nullptr;
  const int ready = epoll_wait(epoll_, events, kEventsPerTurn, work ? 0 : timers_.WaitMs(clock_()));
  asleep_.store(false, std::memory_order_relaxed);
  now_ns_ = clock_();
  turn_ns_.store(now_ns_, std::memory_order_relaxed);
  for (int i = 0; i < ready; ++i) {
    if (events[i].data.ptr != nullptr) {
      static_cast<Source*>(events[i].data.ptr)->OnReady(events[i].events);
      continue;
    }
    uint64_t count = 0;
    [[maybe_unused]] const ssize_t got = read(wake_, &count, sizeof(count));
  }
  RunTasks();
  timers_.Advance(now_ns_);
  EndTurn();
  turn_ns_.store(0, std::memory_order_relaxed);
}

}  // namespace logitd::http2
