// A client's clock that the test has, and clients that use it.
#ifndef LOGITD_TESTS_CLIENT_TEST_CLOCK_H_
#define LOGITD_TESTS_CLIENT_TEST_CLOCK_H_

#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "client/client.h"
#include "client/transport/channel.h"
#include "client/transport/transport.h"

namespace logitd::testing {

// Every wait is over at once, except while `stands_still` says that time does not pass.
// Thread-safe; `stands_still` and `waits` are of the test and of the one thread that waits.
class TestClock final : public client::Clock {
 public:
  absl::Time Now() const override {
    absl::MutexLock lock(&mutex_);
    return now_;
  }
  absl::Duration SleepUntil(absl::Time time) override {
    if (time == absl::InfiniteFuture()) return absl::InfiniteDuration();
    if (stands_still && stands_still()) return absl::Milliseconds(5);  // until it is asked again
    waits.push_back(time - Now());
    Advance(waits.back());
    return absl::ZeroDuration();
  }
  void Advance(absl::Duration by) {
    absl::MutexLock lock(&mutex_);
    now_ += by;
  }

  std::function<bool()> stands_still;
  std::vector<absl::Duration> waits;  // that were over at once

 private:
  mutable absl::Mutex mutex_;
  absl::Time now_ ABSL_GUARDED_BY(mutex_) = absl::UnixEpoch() + absl::Hours(1);
};

// `clock` outlives the client.
inline std::unique_ptr<client::Client> ClientOf(const client::ClientOptions& options,
                                                client::Clock& clock) {
  return std::make_unique<client::Client>(
      std::make_unique<client::Transport>(options, *client::MakeChannel(options), clock));
}

}  // namespace logitd::testing

#endif  // LOGITD_TESTS_CLIENT_TEST_CLOCK_H_
