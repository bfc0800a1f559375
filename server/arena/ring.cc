#include "server/arena/ring.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "server/log/limited.h"

namespace logitd::arena {
namespace {

// How long a thread looks for work after the last of it, and while its own calls run. A thread that
// sleeps takes 5 to 50 us to wake.
constexpr int64_t kSpinNs = 100 * 1000;
constexpr int64_t kSpinRunningNs = 2 * 1000 * 1000;

// One thread that wakes others for so many cores, and how long it looks for the next one to wake.
constexpr int kCoresPerWaker = 8;
constexpr int64_t kWakerSpinNs = 50 * 1000;

// A ring has one call at a time if so many came when no other was open.
constexpr int kLoneCalls = 16;

// Ids of callers: connections count from below, and identities from 2^63.
constexpr uint64_t kFirstId = uint64_t{1} << 62;

uint64_t NextId() {
  static std::atomic<uint64_t> next = kFirstId;
  return next.fetch_add(1, std::memory_order_relaxed);
}

absl::Status NoRoom(const char* what) {
  return absl::ResourceExhaustedError(absl::StrCat("ring: ", what, ": ", std::strerror(errno)));
}

}  // namespace

WakeEvent::~WakeEvent() { close(fd_); }

void WakeEvent::Raise() const {
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = write(fd_, &one, sizeof(one));
}

void WakeEvent::Lower() const {
  uint64_t count = 0;
  [[maybe_unused]] const ssize_t got = read(fd_, &count, sizeof(count));
}

Ring::Ring(Rings* rings, std::shared_ptr<WakeList> wakes, std::shared_ptr<const Arena> arena,
           const RingAsk& shape, int socket, std::shared_ptr<const WakeEvent> wake, ucred user)
    : rings_(rings),
      wakes_(std::move(wakes)),
      id_(NextId()),
      user_(user),
      max_message_bytes_(shape.answer_bytes - sizeof(RingCompletion)),
      socket_(socket),
      wake_(std::move(wake)),
      pages_(std::move(arena), shape) {}

Ring::~Ring() { close(socket_); }

void Ring::Complete(uint64_t serial, RingReply reply, std::shared_ptr<const void> keep,
                    MakeMessage make) {
  std::shared_ptr<RingWork> work;  // dropped after the lock
  {
    absl::MutexLock lock(&mutex_);
    const auto it = open_.find(serial);
    if (it == open_.end()) return;
    work = std::move(it->second);
    open_.erase(it);
    if (stop_) return;
    postings_.push_back({std::move(reply), std::move(keep), std::move(make)});
  }
  replies_.fetch_add(1);
  if (asleep_) wakes_->Wake(wake_);
}

void Ring::Stop() {
  stop_ = true;
  wake_->Raise();
  std::vector<std::shared_ptr<RingWork>> works;
  {
    absl::MutexLock lock(&mutex_);
    for (const auto& [serial, work] : open_) {
      if (work != nullptr) works.push_back(work);
    }
  }
  for (const auto& work : works) work->Drop();
}

absl::StatusOr<bool> Ring::TakeAll() {
  bool worked = false;
  for (uint32_t i = 0; i < pages_.slots() && !stop_; ++i) {
    const uint64_t serial = next_serial_;
    bool lone = false;
    {
      absl::MutexLock lock(&mutex_);
      if (open_.size() + postings_.size() >= pages_.slots()) break;
      lone = open_.empty() && postings_.empty();
    }
    RingRequest request;
    const absl::StatusOr<bool> taken = pages_.Take(&request);
    if (!taken.ok()) return taken;
    if (!*taken) break;
    lone = lone && !std::exchange(one_waits_, false);
    lone_calls_ = lone ? std::min(lone_calls_ + 1, kLoneCalls) : 0;
    request.alone = lone_calls_ == kLoneCalls;
    worked = true;
    ++next_serial_;
    ++calls_;
    rings_->calls_.fetch_add(1, std::memory_order_relaxed);
    {
      absl::MutexLock lock(&mutex_);
      open_[serial] = nullptr;
    }
    std::shared_ptr<RingWork> work = rings_->serve_(shared_from_this(), serial, std::move(request));
    {
      absl::MutexLock lock(&mutex_);
      if (const auto it = open_.find(serial); it != open_.end()) it->second = work;
    }
    if (stop_ && work != nullptr) work->Drop();    // Stop may not have seen it
    if (!posted_now_.ok() || replies_ > 0) break;  // first of all
  }
  return worked;
}

absl::StatusOr<bool> Ring::PostAll() {
  if (replies_ == 0) return false;
  std::vector<Posting> postings;
  {
    absl::MutexLock lock(&mutex_);
    postings.swap(postings_);
  }
  replies_.fetch_sub(static_cast<int64_t>(postings.size()));
  calls_ -= static_cast<int>(postings.size());
  rings_->calls_.fetch_sub(static_cast<int>(postings.size()), std::memory_order_relaxed);
  for (Posting& posting : postings) {
    if (posting.make != nullptr) posting.reply.message = posting.make();
    if (absl::Status status = pages_.Post(posting.reply); !status.ok()) return status;
  }
  RingFence();
  if (pages_.client_asleep()) {
    // A full socket has a doorbell in it.
    const char bell = 0;
    [[maybe_unused]] const ssize_t sent = send(socket_, &bell, 1, MSG_DONTWAIT | MSG_NOSIGNAL);
  }
  return !postings.empty();
}

void Ring::PostNow() {
  posted_now_ = PostAll().status();
  // What is there so soon did not wait for the reply.
  one_waits_ = pages_.Ready();
}

bool Ring::MaySpin() {
  const int64_t idle = rings_->clock_.Nanos() - worked_ns_;
  if (idle < kSpinNs) return true;
  absl::MutexLock lock(&mutex_);
  return idle < kSpinRunningNs && !open_.empty();
}

absl::Status Ring::Sleep() {
  asleep_ = true;
  if (absl::Status status = pages_.SetAsleep(true); !status.ok()) return status;
  RingFence();
  bool full = false;
  {
    absl::MutexLock lock(&mutex_);
    full = open_.size() + postings_.size() >= pages_.slots();
  }
  if (!stop_ && replies_ == 0 && (full || !pages_.Ready())) {
    std::array<pollfd, 2> fds = {pollfd{.fd = socket_, .events = POLLIN},
                                 pollfd{.fd = wake_->fd(), .events = POLLIN}};
    poll(fds.data(), fds.size(), -1);
    if ((fds[1].revents & POLLIN) != 0) wake_->Lower();
  }
  asleep_ = false;
  return pages_.SetAsleep(false);
}

void Ring::CutOff(const absl::Status& why) {
  log::Limited(log::Source::kArenas, spdlog::level::info,
               "arena: the ring of pid {}, uid {} is cut off: {}", user_.pid, user_.uid,
               std::string(why.message()));
  const std::string text(why.message().substr(0, kMaxArenaText));
  RingAnswer answer = {.code = static_cast<uint32_t>(why.code()),
                       .text_bytes = static_cast<uint32_t>(text.size())};
  std::array<iovec, 2> parts = {iovec{&answer, sizeof(answer)},
                                iovec{const_cast<char*>(text.data()), text.size()}};
  msghdr message = {};
  message.msg_iov = parts.data();
  message.msg_iovlen = parts.size();
  sendmsg(socket_, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
  shutdown(socket_, SHUT_RDWR);  // the arena's server sees it, and ends the lease
}

void Ring::Run() {
  thread_ = std::this_thread::get_id();
  worked_ns_ = rings_->clock_.Nanos();
  while (!stop_) {
    // Doorbells only wake; an end of the connection shows here too, as 0 bytes.
    std::array<char, sizeof(RingAsk)> bell;
    const absl::StatusOr<bool> posted = posted_now_.ok() ? PostAll() : posted_now_;
    const absl::StatusOr<bool> taken = posted.ok() ? TakeAll() : posted;
    if (!taken.ok()) {
      CutOff(taken.status());
      break;
    }
    if (*posted || *taken) {
      worked_ns_ = rings_->clock_.Nanos();
      continue;
    }
    if (!rings_->Crowded() && MaySpin() && (spins_ || (spins_ = rings_->TakeSpin()))) {
      std::this_thread::yield();
      continue;
    }
    if (std::exchange(spins_, false)) rings_->EndSpin();
    if (absl::Status slept = Sleep(); !slept.ok()) {
      CutOff(slept);
      break;
    }
    ssize_t heard = -1;
    for (int i = 0; i < 64; ++i) {
      heard = recv(socket_, bell.data(), bell.size(), MSG_DONTWAIT);
      if (heard != 1) break;
    }
    if (heard == 0) break;
    if (heard > 1) {
      CutOff(absl::InvalidArgumentError(
          "ring: got a packet of more than 1 byte, allowed doorbells; a lease has one ring"));
      break;
    }
    worked_ns_ = rings_->clock_.Nanos();
  }
  if (std::exchange(spins_, false)) rings_->EndSpin();
  rings_->calls_.fetch_sub(std::exchange(calls_, 0), std::memory_order_relaxed);
  Stop();
  std::vector<Posting> postings;
  {
    absl::MutexLock lock(&mutex_);
    postings.swap(postings_);
  }
}

void WakeList::Wake(std::shared_ptr<const WakeEvent> ring) {
  if (open_ > few_) {
    absl::MutexLock lock(&mutex_);
    if (!ended_) {
      rings_.push_back(std::move(ring));
      size_ = rings_.size();
      return;
    }
  }
  ring->Raise();
}

void WakeList::Run() {
  const auto some = [this]()
                        ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return ended_ || !rings_.empty(); };
  int64_t look_until = 0;
  while (true) {
    std::shared_ptr<const WakeEvent> ring;
    while (size_ == 0 && !ended_ && clock_.Nanos() < look_until) std::this_thread::yield();
    {
      absl::MutexLock lock(&mutex_);
      mutex_.Await(absl::Condition(&some));
      if (rings_.empty()) return;
      ring = std::move(rings_.front());
      rings_.pop_front();
      size_ = rings_.size();
    }
    ring->Raise();
    look_until = clock_.Nanos() + kWakerSpinNs;
  }
}

void WakeList::End() {
  absl::MutexLock lock(&mutex_);
  ended_ = true;
}

Rings::Rings(ServeRing serve, int cores, const Clock& clock)
    : serve_(std::move(serve)),
      clock_(clock),
      max_spinning_(std::max(1, cores / 4)),
      wakes_(std::make_shared<WakeList>(max_spinning_, clock)) {
  try {
    for (int i = 0; i < std::max(1, cores / kCoresPerWaker); ++i) {
      wakers_.emplace_back([this] { wakes_->Run(); });
    }
  } catch (const std::system_error&) {
    // The system gives no more threads. Those that are there are enough, and none is needed.
  }
  if (wakers_.empty()) wakes_->End();
}

Rings::~Rings() {
  Stop(absl::InfiniteDuration());
  wakes_->End();
  for (std::thread& waker : wakers_) waker.join();
}

bool Rings::Stop(absl::Duration most) {
  std::vector<std::shared_ptr<Ring>> rings;
  {
    absl::MutexLock lock(&mutex_);
    for (Ring* ring : rings_) {
      if (auto held = ring->weak_from_this().lock()) rings.push_back(std::move(held));
    }
  }
  for (const auto& ring : rings) ring->Stop();
  rings.clear();
  absl::MutexLock lock(&mutex_);
  const auto none = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return rings_.empty(); };
  return mutex_.AwaitWithTimeout(absl::Condition(&none), most);
}

absl::StatusOr<std::shared_ptr<Ring>> Rings::Open(std::shared_ptr<const Arena> arena,
                                                  const RingAsk& shape, int socket, ucred user) {
  const int own = fcntl(socket, F_DUPFD_CLOEXEC, 0);
  if (own < 0) return NoRoom("there is no descriptor for it");
  const int wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (wake_fd < 0) {
    const absl::Status status = NoRoom("there is no eventfd for it");
    close(own);
    return status;
  }
  auto ring = std::make_shared<Ring>(this, wakes_, std::move(arena), shape, own,
                                     std::make_shared<const WakeEvent>(wake_fd), user);
  absl::MutexLock lock(&mutex_);
  rings_.insert(ring.get());
  wakes_->Count(1);
  try {
    std::thread([this, ring] {
      ring->Run();
      Ended(ring.get());
    }).detach();
  } catch (const std::system_error&) {
    rings_.erase(ring.get());
    wakes_->Count(-1);
    return absl::ResourceExhaustedError("ring: there is no thread for it");
  }
  return ring;
}

bool Rings::TakeSpin() {
  if (spinning_.fetch_add(1, std::memory_order_relaxed) < max_spinning_) return true;
  EndSpin();
  return false;
}

void Rings::Ended(Ring* ring) {
  absl::MutexLock lock(&mutex_);
  rings_.erase(ring);
  wakes_->Count(-1);
}

int Rings::open() const {
  absl::MutexLock lock(&mutex_);
  return static_cast<int>(rings_.size());
}

}  // namespace logitd::arena
