#include "server/door/windows.h"

#include <algorithm>
#include <utility>

#include "server/door/answer.h"

namespace logitd::door {
namespace {

constexpr int64_t kStep = int64_t{64} << 10;
constexpr int64_t kMostMessages = 4;
constexpr int64_t kAgainNs = 1'000'000'000;  // from the end of wide windows to the next

// The window that a message fits.
int64_t WindowFor(int64_t bytes) {
  return std::min((bytes + kStep - 1) / kStep * kStep, Windows::kWidest);
}

}  // namespace

bool EarlyRoom::Take(int64_t bytes) {
  int64_t left = left_.load(std::memory_order_relaxed);
  do {
    if (left < bytes) return false;
  } while (!left_.compare_exchange_weak(left, left - bytes, std::memory_order_relaxed));
  return true;
}

Windows::~Windows() {
  if (taken_ > 0) room_->Give(taken_);
}

void Windows::Announce(int64_t initial) {
  initial_ = initial;
  changing_ = true;
  AppendInitialWindow(static_cast<uint32_t>(std::min(initial, grpcs_initial_)), &frames_);
  ++settings_in_frames_;
}

void Windows::Grant(uint32_t stream) {
  const int64_t bytes = std::min(kUsual, grpcs_initial_);
  if (bytes > 0) AppendWindowUpdate(stream, static_cast<uint32_t>(bytes), &frames_);
}

void Windows::Began(int64_t bytes, int64_t now_ns) {
  if (bytes <= kUsual || room_ == nullptr) return;
  last_large_ns_ = now_ns;
  const int64_t window = WindowFor(bytes);
  if (closed() || changing_ || window <= initial_ || window > grpcs_initial_) return;
  if (now_ns < not_before_ns_ || (taken_ > 0 && !counts_early_)) return;
  int64_t share = window * messages_ - taken_;
  if (!room_->Take(share)) {
    share = window - taken_;
    if (share > 0 && !room_->Take(share)) {
      lacks_room_ = true;
      return;
    }
    share = std::max<int64_t>(share, 0);
  }
  taken_ += share;
  counts_early_ = true;
  Announce(window);
}

void Windows::Narrow() {
  if (wide() && !changing_) Announce(kUsual);
}

// Moves what a stream is ahead by.
void Windows::Move(Stream* stream, int64_t bytes) {
  if (stream->over) return;
  const auto early = [](int64_t ahead) { return std::max<int64_t>(ahead - kUsual, 0); };
  const auto asked = [](int64_t ahead) { return std::max<int64_t>(-ahead, 0); };
  const int64_t before = stream->ahead;
  stream->ahead += bytes;
  early_ += early(stream->ahead) - early(before);
  asked_ += asked(stream->ahead) - asked(before);
}

bool Windows::Received(Stream* stream, int64_t bytes) {
  connection_ -= bytes;
  if (connection_ < 0) return false;
  if (stream == nullptr) return true;
  const int64_t early = early_;
  Move(stream, bytes);
  return counts_early_ || early_ <= early;
}

void Windows::Ended(Stream* stream) {
  Move(stream, -stream->ahead);
  stream->over = true;
  GiveBack();
}

int64_t Windows::Allowed() const {
  return std::max<int64_t>(kUsual + asked_ + (counts_early_ ? taken_ - early_ : 0), 0);
}

void Windows::Settle(int64_t now_ns) {
  if (wide() && !changing_ && early_ >= taken_) {
    messages_ = std::min(messages_ * 2, kMostMessages);
    not_before_ns_ = now_ns + kAgainNs;
    Narrow();
  }
  const int64_t allowed = Allowed();
  if (kept_ == 0 || connection_ > allowed / 2 || connection_ >= allowed) return;
  const int64_t more = std::min(allowed - connection_, kept_);
  connection_ += more;
  kept_ -= more;
  AppendWindowUpdate(0, static_cast<uint32_t>(more), &frames_);
}

uint32_t Windows::OffersInitialWindow(uint32_t bytes) {
  grpcs_initial_ = bytes;
  return static_cast<uint32_t>(std::min(initial_, grpcs_initial_));
}

uint32_t Windows::TakeConnection() {
  const int64_t more = std::max<int64_t>(std::min(Allowed() - connection_, kept_), 1);
  connection_ += more;
  kept_ -= more;
  return static_cast<uint32_t>(more);
}

bool Windows::TakeAcknowledgement() {
  if (unacknowledged_.empty()) return false;
  const bool own = unacknowledged_.front();
  unacknowledged_.erase(unacknowledged_.begin());
  if (!own) return false;
  changing_ = false;
  if (!wide()) {
    counts_early_ = false;
    GiveBack();
  }
  return true;
}

// The share, when no byte is early and none can be.
void Windows::GiveBack() {
  if (taken_ == 0 || counts_early_ || early_ > 0) return;
  room_->Give(taken_);
  taken_ = 0;
}

std::string Windows::TakeFrames() {
  unacknowledged_.insert(unacknowledged_.end(), static_cast<size_t>(settings_in_frames_), true);
  settings_in_frames_ = 0;
  return std::exchange(frames_, {});
}

}  // namespace logitd::door
