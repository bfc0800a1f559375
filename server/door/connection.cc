#include "server/door/connection.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <spdlog/spdlog.h>
#include <sys/ioctl.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/time/clock.h"
#include "server/door/sockets.h"

namespace logitd::door {
namespace {

// The peer's address with and without its port. Addresses of this machine have no host.
struct PeerName {
  std::string peer;
  std::string host;
};

PeerName NameV4(in_addr address, in_port_t port) {
  char text[INET_ADDRSTRLEN] = {};
  inet_ntop(AF_INET, &address, text, sizeof(text));
  const bool local = ntohl(address.s_addr) >> 24 == IN_LOOPBACKNET;
  return {.peer = absl::StrCat("ipv4:", text, ":", ntohs(port)), .host = local ? "" : text};
}

PeerName NamePeer(const sockaddr* address, socklen_t length, uint64_t id) {
  if (length >= sizeof(sockaddr_in) && address->sa_family == AF_INET) {
    sockaddr_in in;
    std::memcpy(&in, address, sizeof(in));
    return NameV4(in.sin_addr, in.sin_port);
  }
  if (length >= sizeof(sockaddr_in6) && address->sa_family == AF_INET6) {
    sockaddr_in6 in;
    std::memcpy(&in, address, sizeof(in));
    if (IN6_IS_ADDR_V4MAPPED(&in.sin6_addr)) {
      in_addr v4;
      std::memcpy(&v4, in.sin6_addr.s6_addr + 12, sizeof(v4));
      return NameV4(v4, in.sin6_port);
    }
    char text[INET6_ADDRSTRLEN] = {};
    inet_ntop(AF_INET6, &in.sin6_addr, text, sizeof(text));
    const std::string zone = in.sin6_scope_id == 0 ? "" : absl::StrCat("%", in.sin6_scope_id);
    const bool local = IN6_IS_ADDR_LOOPBACK(&in.sin6_addr);
    return {.peer = absl::StrCat("ipv6:[", text, zone, "]:", ntohs(in.sin6_port)),
            .host = local ? "" : text};
  }
  return {.peer = absl::StrCat("unix:connection-", id)};
}

// The user of the process that connected to a Unix socket.
std::optional<uint32_t> UserOf(int fd, const sockaddr* address) {
  ucred peer = {};
  socklen_t length = sizeof(peer);
  if (address->sa_family != AF_UNIX ||
      getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &length) != 0) {
    return std::nullopt;
  }
  return peer.uid;
}

}  // namespace

Connection::Connection(std::shared_ptr<Connections> owner, uint64_t id, int fd, std::string peer,
                       std::string host, std::optional<uint32_t> uid)
    : owner_(std::move(owner)),
      id_(id),
      peer_(std::move(peer)),
      host_(std::move(host)),
      uid_(uid),
      fd_(fd),
      frames_(owner_->options().frames, absl::GetCurrentTimeNanos(), &owner_->early_room_) {}

void Connection::SetTls(std::unique_ptr<TlsSession> session) {
  tls_owner_ = std::move(session);
  certificate_names_ = tls_owner_->CertificateNames();
  tls_.store(tls_owner_.get(), std::memory_order_release);
}

bool Connection::HasUnread() const {
  if (!mutex_.TryLock()) return true;
  int unread = 0;
  const bool has = fd_ >= 0 && ioctl(fd_, FIONREAD, &unread) == 0 && unread > 0;
  mutex_.Unlock();
  return has;
}

int64_t Connection::message_bytes() const {
  absl::MutexLock lock(&mutex_);
  return frames_.message_bytes();
}

int64_t Connection::open_streams() const {
  absl::MutexLock lock(&mutex_);
  return frames_.open();
}

int64_t Connection::refused() const {
  absl::MutexLock lock(&mutex_);
  return frames_.refused();
}

int64_t Connection::under_way() const {
  absl::MutexLock lock(&mutex_);
  return frames_.under_way();
}

void Connection::Allow(int64_t bytes) {
  absl::MutexLock lock(&mutex_);
  frames_.Ask(bytes);
}

void Connection::Settle(int64_t bytes, bool arrived) {
  absl::MutexLock lock(&mutex_);
  arrived ? frames_.Got(bytes) : frames_.GiveUp(bytes);
}

Grant::Grant(std::shared_ptr<Connection> connection, int64_t bytes)
    : connection_(std::move(connection)), bytes_(bytes) {
  if (connection_ != nullptr) connection_->Allow(bytes_);
}

Grant& Grant::operator=(Grant&& other) noexcept {
  if (this != &other) {
    End(/*arrived=*/false);
    connection_ = std::exchange(other.connection_, nullptr);
    bytes_ = other.bytes_;
  }
  return *this;
}

void Grant::End(bool arrived) {
  if (connection_ != nullptr) std::exchange(connection_, nullptr)->Settle(bytes_, arrived);
}

bool Connection::ShutDown(Limit reason) {
  if (fd_ < 0 || cut_ != Limit::kNone) return false;
  cut_ = reason;
  shutdown(fd_, SHUT_RDWR);
  return true;
}

void Connection::Cut(Limit reason) {
  {
    absl::MutexLock lock(&mutex_);
    if (!ShutDown(reason)) return;
  }
  owner_->CountCut(*this, reason);
}

void Connection::Closed() {
  {
    absl::MutexLock send_lock(&send_mutex_);  // another thread may write: NarrowIfUnused
    absl::MutexLock lock(&mutex_);
    fd_ = -1;
  }
  if (TlsSession* const session = tls()) session->Release();
  const std::shared_ptr<Connections> owner = owner_;  // `this` may end in Remove
  owner->Remove(this);
}

void Connection::EndSending() {
  absl::MutexLock lock(&mutex_);
  if (fd_ >= 0) shutdown(fd_, SHUT_WR);
}

Connections::Connections(const ConnectionOptions& options, std::shared_ptr<ConnectionEvents> events)
    : options_(options), events_(std::move(events)), early_room_(options.early_bytes) {}

std::shared_ptr<Connections> Connections::Create(const ConnectionOptions& options,
                                                 std::shared_ptr<ConnectionEvents> events) {
  return std::shared_ptr<Connections>(new Connections(options, std::move(events)));
}

std::shared_ptr<Connection> Connections::Add(int fd, const sockaddr* address, socklen_t length) {
  std::shared_ptr<Connection> connection;
  int64_t open = 0;
  {
    absl::MutexLock lock(&mutex_);
    PeerName name = NamePeer(address, length, last_id_ + 1);
    const auto from_host = name.host.empty() ? by_host_.end() : by_host_.find(name.host);
    const bool full =
        static_cast<int64_t>(all_.size()) >= options_.max_connections ||
        by_peer_.contains(name.peer) ||
        (from_host != by_host_.end() && from_host->second >= (options_.max_connections + 1) / 2);
    if (!full && fd < kMaxDescriptors) {
      connection = std::make_shared<Connection>(shared_from_this(), ++last_id_, fd, name.peer,
                                                name.host, UserOf(fd, address));
      all_.emplace(connection.get(), connection);
      by_peer_[connection->peer()] = connection.get();
      if (!name.host.empty()) ++by_host_[name.host];
    }
    open = static_cast<int64_t>(all_.size());
  }
  if (connection != nullptr) SetConnection(fd, connection.get());
  if (connection == nullptr) {
    CountRefused();
  } else if (events_ != nullptr) {
    events_->OnOpen(open);
  }
  return connection;
}

std::shared_ptr<Connection> Connections::Find(absl::string_view peer) const {
  // gRPC writes the brackets of an IPv6 address as %5B and %5D.
  const bool quoted = absl::StrContains(peer, '%');
  const std::string plain =
      quoted ? absl::StrReplaceAll(peer, {{"%5B", "["}, {"%5D", "]"}, {"%25", "%"}})
             : std::string();
  absl::MutexLock lock(&mutex_);
  const auto found = by_peer_.find(quoted ? absl::string_view(plain) : peer);
  if (found == by_peer_.end()) return nullptr;
  return all_.at(found->second);
}

int64_t Connections::open() const {
  absl::MutexLock lock(&mutex_);
  return static_cast<int64_t>(all_.size());
}

Traffic Connections::traffic() const {
  absl::MutexLock lock(&mutex_);
  Traffic sum = of_closed_;
  for (const auto& [_, connection] : all_) {
    sum.received += connection->received_bytes();
    sum.sent += connection->sent_bytes();
    sum.refused_calls += connection->refused();
  }
  return sum;
}

void Connections::CountRefused() {
  if (events_ != nullptr) events_->OnRefused();
}

void Connections::CountTooLarge(size_t calls) {
  if (events_ != nullptr) events_->OnTooLarge(static_cast<int64_t>(calls));
}

void Connections::CountHandshake(HandshakeEnd end) {
  if (events_ != nullptr) events_->OnHandshake(end);
}

bool Connections::CutLargest() {
  std::shared_ptr<Connection> largest;
  {
    absl::MutexLock lock(&mutex_);
    std::pair<int64_t, int64_t> most = {0, 0};
    for (const auto& [_, connection] : all_) {
      const int64_t received = connection->received_bytes();
      absl::MutexLock connection_lock(&connection->mutex_);
      const std::pair<int64_t, int64_t> size = {received - connection->received_at_look_,
                                                connection->frames_.under_way()};
      connection->received_at_look_ = received;
      if (connection->cut_ != Limit::kNone || size <= most) continue;
      most = size;
      largest = connection;
    }
  }
  if (largest == nullptr) return false;
  largest->Cut(Limit::kMemory);
  return true;
}

void Connections::ReclaimEarlyRoom() {
  constexpr int64_t kPeriodNs = 50'000'000;
  const int64_t now_ns = absl::GetCurrentTimeNanos();
  int64_t last = reclaimed_ns_.load(std::memory_order_relaxed);
  if (now_ns - last < kPeriodNs || !reclaimed_ns_.compare_exchange_strong(last, now_ns)) return;
  std::vector<std::shared_ptr<Connection>> connections;
  {
    absl::MutexLock lock(&mutex_);
    for (const auto& [_, connection] : all_) connections.push_back(connection);
  }
  for (const auto& connection : connections) connection->NarrowIfUnused(now_ns);
}

void Connections::EndAll() {
  ended_ = true;
  std::vector<std::shared_ptr<Connection>> connections;
  {
    absl::MutexLock lock(&mutex_);
    for (const auto& [_, connection] : all_) connections.push_back(connection);
  }
  for (const auto& connection : connections) connection->EndSending();
}

void Connections::Remove(Connection* connection) {
  std::shared_ptr<Connection> removed;  // destroyed after the lock
  int64_t open = 0;
  {
    absl::MutexLock lock(&mutex_);
    const auto found = all_.find(connection);
    if (found == all_.end()) return;
    removed = std::move(found->second);
    all_.erase(found);
    of_closed_.received += removed->received_bytes();
    of_closed_.sent += removed->sent_bytes();
    of_closed_.refused_calls += removed->refused();
    const auto named = by_peer_.find(removed->peer());
    if (named != by_peer_.end() && named->second == connection) by_peer_.erase(named);
    const auto host = by_host_.find(removed->host_);
    if (host != by_host_.end() && --host->second == 0) by_host_.erase(host);
    open = static_cast<int64_t>(all_.size());
  }
  if (events_ != nullptr) events_->OnOpen(open);
}

void Connections::CountCut(const Connection& connection, Limit reason) {
  if (events_ != nullptr) events_->OnCut(reason);
  if (ended_) return;
  const int64_t second = absl::GetCurrentTimeNanos() / 1'000'000'000;
  int64_t unlogged = 0;
  {
    absl::MutexLock lock(&log_mutex_);
    Logged& logged = logged_[static_cast<size_t>(reason)];
    if (logged.second == second) {
      ++logged.unlogged;
      return;
    }
    unlogged = std::exchange(logged.unlogged, 0);
    logged.second = second;
  }
  const LimitName& name = NameOf(reason);
  spdlog::warn("connection {} of {} was cut: {} ({}); {} more without a line", connection.id(),
               connection.peer(), name.text, name.name, unlogged);
}

}  // namespace logitd::door
