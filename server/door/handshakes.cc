#include "server/door/handshakes.h"

#include <sys/epoll.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "absl/time/clock.h"
#include "server/log/limited.h"

namespace logitd::door {
namespace {

// Handshakes that continue in one Step. Each may cost a signature, and accepting waits meanwhile.
constexpr int kStepEvents = 16;

}  // namespace

Handshakes::Handshakes(std::shared_ptr<Connections> connections,
                       std::shared_ptr<const TlsSource> source, HandshakeLimits limits, Take take)
    : connections_(std::move(connections)),
      source_(std::move(source)),
      limits_(limits),
      take_(std::move(take)),
      epoll_(epoll_create1(EPOLL_CLOEXEC)) {}

Handshakes::~Handshakes() {
  for (const Unfinished& unfinished : all_) close(unfinished.fd);
  close(epoll_);
}

void Handshakes::Add(int fd, int listening_fd, std::shared_ptr<Connection> connection) {
  if (all_.size() >= limits_.max_unfinished) {
    End(Oldest(), HandshakeEnd::kEvicted, "newer connections needed its place");
  }
  const std::shared_ptr<const TlsContext> context = source_->Get();
  std::unique_ptr<TlsSession> session =
      context == nullptr ? nullptr : TlsSession::Create(*context, fd);
  epoll_event event = {.events = EPOLLIN, .data = {.fd = fd}};
  if (session == nullptr || epoll_ctl(epoll_, EPOLL_CTL_ADD, fd, &event) != 0) {
    connections_->CountRefused();
    close(fd);
    return;
  }
  all_.push_back({.fd = fd,
                  .listening_fd = listening_fd,
                  .connection = std::move(connection),
                  .session = std::move(session),
                  .end = absl::Now() + limits_.timeout});
  by_fd_[fd] = std::prev(all_.end());
}

void Handshakes::Step() {
  epoll_event events[kStepEvents];
  const int ready = epoll_wait(epoll_, events, kStepEvents, 0);
  for (int i = 0; i < ready; ++i) {
    const auto found = by_fd_.find(events[i].data.fd);
    if (found != by_fd_.end()) Continue(found->second);
  }
  const absl::Time now = absl::Now();
  while (!all_.empty() && all_.front().end <= now) {
    End(all_.begin(), HandshakeEnd::kTimeout, "it took too long");
  }
}

absl::Time Handshakes::due() const {
  return all_.empty() ? absl::InfiniteFuture() : all_.front().end;
}

void Handshakes::Continue(Place place) {
  const TlsSession::Step step = place->session->Handshake();
  if (step == TlsSession::Step::kFailed) {
    const HandshakeEnd why = place->session->failure();
    return End(place, why, place->session->failure_text());
  }
  if (step == TlsSession::Step::kDone) {
    Unfinished done = std::move(*place);
    epoll_ctl(epoll_, EPOLL_CTL_DEL, done.fd, nullptr);
    by_fd_.erase(done.fd);
    all_.erase(place);
    connections_->CountHandshake(HandshakeEnd::kOk);
    done.connection->SetTls(std::move(done.session));
    return take_(done.fd, done.listening_fd);
  }
  place->begun = place->session->has_begun();
  const bool wants_write = step == TlsSession::Step::kWantWrite;
  if (std::exchange(place->wants_write, wants_write) != wants_write) {
    epoll_event event = {.events = wants_write ? EPOLLOUT : EPOLLIN, .data = {.fd = place->fd}};
    epoll_ctl(epoll_, EPOLL_CTL_MOD, place->fd, &event);
  }
}

void Handshakes::End(Place place, HandshakeEnd why, std::string_view text) {
  connections_->CountHandshake(why);
  log::Limited(log::Source::kConnections, spdlog::level::info,
               "connection {} of {} was closed: its TLS handshake failed: {}",
               place->connection->id(), place->connection->peer(), text);
  const int fd = place->fd;
  by_fd_.erase(fd);
  all_.erase(place);
  close(fd);  // also leaves the epoll set
}

// A peer that has sent its hello has cost a signature, and is probably honest.
Handshakes::Place Handshakes::Oldest() {
  const auto silent =
      std::find_if(all_.begin(), all_.end(), [](const Unfinished& one) { return !one.begun; });
  return silent == all_.end() ? all_.begin() : silent;
}

}  // namespace logitd::door
