#include "client/transport/throttle.h"

#include <cmath>

#include "absl/strings/str_format.h"

namespace logitd::client {

void Throttle::Forget(absl::Time now) {
  if (now <= counted_) return;
  const double left = std::exp(-absl::FDivDuration(now - counted_, kMemory));
  taken_ *= left;
  refused_ *= left;
  counted_ = now;
}

absl::Status Throttle::Ask(absl::Time now) {
  absl::MutexLock lock(&mutex_);
  Forget(now);
  const double all = taken_ + refused_;
  const double too_many = all - kSent * taken_ - kFree;
  if (too_many <= 0) return absl::OkStatus();
  if (std::uniform_real_distribution<double>(0, all + 1)(random_) >= too_many) {
    return absl::OkStatus();
  }
  refused_ += 1;
  return absl::ResourceExhaustedError(absl::StrFormat(
      "not sent: of the last %d calls the server took %d, and about %.1f are sent for each that it "
      "takes",
      std::lround(all), std::lround(taken_), kSent));
}

void Throttle::Ended(const absl::Status& status, std::optional<int64_t> pushback_ms,
                     absl::Time now) {
  if (absl::IsDeadlineExceeded(status) || absl::IsCancelled(status) ||
      absl::IsUnavailable(status)) {
    return;
  }
  const bool refused = absl::IsResourceExhausted(status) && pushback_ms.has_value();
  absl::MutexLock lock(&mutex_);
  Forget(now);
  (refused ? refused_ : taken_) += 1;
  if (refused) pushback_ms_ = pushback_ms;
}

std::optional<int64_t> Throttle::pushback_ms() const {
  absl::MutexLock lock(&mutex_);
  return pushback_ms_;
}

}  // namespace logitd::client
