#include "server/events.h"

#include <poll.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <cstdint>

namespace logitd {
namespace {

void SetLogLevel(spdlog::level::level_enum level) {
  // Logged while the more verbose of the two levels is set, or it would not be seen.
  const auto say = [level] { spdlog::info("log level {}", spdlog::level::to_string_view(level)); };
  const bool quieter = level > spdlog::get_level();
  if (quieter) say();
  spdlog::set_level(level);
  if (!quieter) say();
}

}  // namespace

Events::Events() {
  signal(SIGPIPE, SIG_IGN);
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGTERM);
  sigaddset(&signals, SIGINT);
  sigaddset(&signals, SIGUSR1);
  sigaddset(&signals, SIGUSR2);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  signal_ = signalfd(-1, &signals, SFD_CLOEXEC);
  lost_ = eventfd(0, EFD_CLOEXEC);
}

Events::~Events() {
  close(signal_);
  close(lost_);
}

void Events::DeviceLost() {
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = write(lost_, &one, sizeof(one));
}

Events::Kind Events::Wait(absl::Duration timeout) {
  pollfd fds[] = {{signal_, POLLIN, 0}, {lost_, POLLIN, 0}};
  const int ms = timeout == absl::InfiniteDuration()
                     ? -1
                     : static_cast<int>(absl::ToInt64Milliseconds(timeout));
  if (poll(fds, 2, ms) <= 0) return kNothing;
  if (fds[1].revents != 0) return kLost;
  signalfd_siginfo info;
  if (read(signal_, &info, sizeof(info)) != ssize_t{sizeof(info)}) return kNothing;
  if (info.ssi_signo != SIGUSR1 && info.ssi_signo != SIGUSR2) return kSignal;
  SetLogLevel(info.ssi_signo == SIGUSR1 ? spdlog::level::debug : usual_level_);
  return kNothing;
}

}  // namespace logitd
