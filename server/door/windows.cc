#include "server/door/windows.h"

#include "server/door/answer.h"

namespace logitd::door {
namespace {

constexpr uint32_t kUsual = 65535;  // where no SETTINGS say otherwise

}  // namespace

void Windows::Announce(bool closed) {
  AppendInitialWindow(closed ? 0 : kUsual, &frames_);
  closed_ = closed;
  changing_ = true;
  unacknowledged_.push_back(true);
}

void Windows::Grant(uint32_t stream) { AppendWindowUpdate(stream, kUsual, &frames_); }

bool Windows::TakeAcknowledgement() {
  if (unacknowledged_.empty()) return false;
  const bool own = unacknowledged_.front();
  unacknowledged_.erase(unacknowledged_.begin());
  if (own) changing_ = false;
  return own;
}

}  // namespace logitd::door
