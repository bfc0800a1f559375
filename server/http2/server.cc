#include "server/http2/server.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <unistd.h>

#include <algorithm>
#include <iterator>
#include <list>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "server/log/limited.h"

namespace logitd::http2 {
namespace {

constexpr int64_t kGuardNs = 20'000'000;
// Bytes that a connection moved in the last one to two of these periods count for it.
constexpr int64_t kMovedLatelyNs = 2'000'000'000;
constexpr int kCutsAtOnce = 64;
// Steps of handshakes in a turn of a loop: one takes up to some milliseconds, which others wait.
constexpr int kHandshakesPerTurn = 2;

}  // namespace

// Bytes that a connection holds beyond an idle connection's, less the bytes that it moved lately.
// Received bytes that are still held do not count as moved.
struct Server::Still {
  int64_t bytes;
  std::shared_ptr<Connection> connection;
};

// One loop and its connections. The methods run on the loop, or before Start.
class Server::Host final : public ConnectionHost {
 public:
  Host(Server* server, int index)
      : server_(server), held_(&server->held_, server->options_.max_held_bytes), loop_(index) {}

  Loop& loop() { return loop_; }
  void Start() { loop_.Start(absl::StrCat("http2-", loop_.index()).c_str()); }
  int64_t count() const { return count_.load(std::memory_order_relaxed); }

  // Counts a connection before Add, so that the next one goes to another loop.
  void Expect() { count_.fetch_add(1, std::memory_order_relaxed); }

  void Add(int fd, PeerInfo peer, std::unique_ptr<TlsSession> tls) {
    auto connection =
        std::make_shared<Connection>(&loop_, this, &held_, server_->options_.limits,
                                     server_->options_.times, fd, std::move(peer), std::move(tls));
    Known& known = all_[connection.get()];
    known.connection = connection;
    if (connection->in_handshake()) {
      MakeRoomForHandshake();
      handshakes_.push_back(connection.get());
    }
    connection->Start();
  }

  void DrainAll() {
    for (const auto& connection : Everyone()) connection->Drain();
  }
  void CloseAll() {
    for (const auto& connection : Everyone()) connection->Close();
  }

  void AddStill(std::vector<Still>* all) {
    for (auto& [connection, known] : all_) {
      const Account& account = connection->account();
      const int64_t moved = account.received + account.sent - account.early;
      if (loop_.now_ns() - known.looked_ns > kMovedLatelyNs) {
        known.moved_before = known.moved;
        known.moved = moved;
        known.looked_ns = loop_.now_ns();
      }
      const int64_t place = kIdleBytes + (account.tls > 0 ? TlsSession::kIdleBytes : 0);
      const int64_t still = account.held() - place - (moved - known.moved_before);
      if (still > 0) all->push_back({still, known.connection});
    }
  }

  const Held& held() const { return held_; }

  std::shared_ptr<StreamEvents> OnStream(Stream* stream) override {
    return server_->events_->OnStream(stream);
  }
  void OnHandshake(Connection* connection, HandshakeEnd end, std::string_view text) override {
    server_->events_->OnHandshake(end);
    if (end == HandshakeEnd::kOk) return;
    log::Limited(log::Source::kConnections, spdlog::level::info,
                 "connection {} of {} was closed: its TLS handshake failed: {}",
                 connection->peer().id, connection->peer().name, text);
  }
  bool TakeHandshake() override {
    if (std::exchange(handshake_turn_ns_, loop_.now_ns()) != loop_.now_ns()) handshakes_now_ = 0;
    return ++handshakes_now_ <= kHandshakesPerTurn;
  }
  void OnConnectionClosed(Connection* connection, Cut cut) override {
    handshakes_.remove(connection);
    if (cut != Cut::kNone) {
      server_->events_->OnCut(cut);
      log::Limited(log::Source::kConnections, spdlog::level::warn,
                   "connection {} of {} was cut: {} ({})", connection->peer().id,
                   connection->peer().name, NameOf(cut).text, NameOf(cut).name);
    }
    server_->Leave(*connection);
    count_.fetch_sub(1, std::memory_order_relaxed);
    all_.erase(connection);
  }

 private:
  struct Known {
    std::shared_ptr<Connection> connection;
    int64_t moved = 0;  // bytes in and out, when it was looked at
    int64_t moved_before = 0;
    int64_t looked_ns = 0;
  };

  // Closes the oldest connection in a handshake if there are too many, at first of those whose
  // peers are silent.
  void MakeRoomForHandshake() {
    const auto most = std::max<int64_t>(1, server_->options_.max_handshakes / server_->loops());
    const auto full = [&] { return static_cast<int64_t>(handshakes_.size()) >= most; };
    if (full()) handshakes_.remove_if([](const Connection* c) { return !c->in_handshake(); });
    if (!full()) return;
    const auto silent = std::find_if(handshakes_.begin(), handshakes_.end(),
                                     [](const Connection* c) { return !c->handshake_begun(); });
    Connection* const out = silent == handshakes_.end() ? handshakes_.front() : *silent;
    OnHandshake(out, HandshakeEnd::kEvicted, "newer connections needed its place");
    out->Close();
  }

  std::vector<std::shared_ptr<Connection>> Everyone() const {
    std::vector<std::shared_ptr<Connection>> all;
    for (const auto& [_, known] : all_) all.push_back(known.connection);
    return all;
  }

  Server* const server_;
  Held held_;
  std::atomic<int64_t> count_ = 0;
  absl::flat_hash_map<Connection*, Known> all_;
  int64_t handshake_turn_ns_ = 0;  // of the turn that `handshakes_now_` counts
  int handshakes_now_ = 0;
  std::list<Connection*> handshakes_;  // unfinished or ended lately, the oldest first
  Loop loop_;                          // ends first: its tasks use the others
};

Server::Server(const ServerOptions& options, ServerEvents* events)
    : options_(options), events_(events) {
  for (int i = 0; i < options_.loops; ++i) {
    hosts_.push_back(std::make_unique<Host>(this, options_.first_loop + i));
  }
}

Server::~Server() { Shutdown(); }

absl::Status Server::Listen(absl::Span<const std::string> addresses,
                            std::optional<mode_t> unix_mode) {
  return listener_.Listen(addresses, unix_mode);
}

void Server::Start() {
  running_ = true;
  Loop& loop = hosts_.front()->loop();
  listener_.Start(
      &loop,
      [this](int fd, const sockaddr_storage& address, socklen_t length) {
        Accept(fd, address, length);
      },
      [this] { events_->OnRefused(); });
  guard_ = std::make_unique<Timer>([this] { Guard(); });
  loop.timers().Set(guard_.get(), loop.now_ns() + kGuardNs);
  for (const auto& host : hosts_) host->Start();
}

void Server::Accept(int fd, const sockaddr_storage& address, socklen_t length) {
  PeerInfo peer = DescribePeer(fd, address, length, ++last_id_);
  std::unique_ptr<TlsSession> tls;
  bool usable = !refuse_;
  if (usable && address.ss_family != AF_UNIX) {
    const int on = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
    if (options_.tls != nullptr) {
      tls = TlsSession::Create(*options_.tls->Get(), fd);
      usable = tls != nullptr;
    }
  }
  if (!usable || !Enter(peer)) {
    events_->OnRefused();
    close(fd);
    return;
  }
  Host* const host =
      std::min_element(hosts_.begin(), hosts_.end(), [](const auto& a, const auto& b) {
        return a->count() < b->count();
      })->get();
  host->Expect();
  host->loop().Post([host, fd, peer = std::move(peer), tls = std::move(tls)]() mutable {
    host->Add(fd, std::move(peer), std::move(tls));
  });
}

bool Server::Enter(const PeerInfo& peer) {
  int64_t open = 0;
  {
    absl::MutexLock lock(&mutex_);
    if (open_ >= options_.max_connections) return false;
    const auto from = by_origin_.find(peer.origin);
    if (from != by_origin_.end() && from->second > options_.max_connections - open_) return false;
    ++by_origin_[peer.origin];
    open = ++open_;
  }
  events_->OnOpen(open);
  return true;
}

void Server::Leave(const Connection& connection) {
  int64_t open = 0;
  {
    absl::MutexLock lock(&mutex_);
    const auto from = by_origin_.find(connection.peer().origin);
    if (--from->second == 0) by_origin_.erase(from);
    open = --open_;
  }
  events_->OnOpen(open);
}

// While too much is held, connections are closed that hold and do not move, of all loops.
void Server::Guard() {
  Loop& loop = hosts_.front()->loop();
  loop.timers().Set(guard_.get(), loop.now_ns() + kGuardNs);
  if (held_bytes() <= options_.max_held_bytes / 8 * 7) return;
  struct Search {
    absl::Mutex mutex;
    std::vector<Still> all ABSL_GUARDED_BY(mutex);
    size_t answers ABSL_GUARDED_BY(mutex) = 0;
  };
  auto search = std::make_shared<Search>();
  for (const auto& host : hosts_) {
    host->loop().Post([this, host = host.get(), search] {
      absl::MutexLock lock(&search->mutex);
      host->AddStill(&search->all);
      if (++search->answers == hosts_.size()) CutStillest(std::move(search->all));
    });
  }
}

// Any loop. The origin that holds most loses first: there the connection that holds most.
void Server::CutStillest(std::vector<Still> all) {
  std::sort(all.begin(), all.end(),
            [](const Still& a, const Still& b) { return a.bytes > b.bytes; });
  struct Origin {
    int64_t bytes = 0;
    std::vector<size_t> left;  // of `all`, the least first
  };
  absl::flat_hash_map<absl::string_view, Origin> origins;
  for (size_t i = all.size(); i-- > 0;) {
    Origin& origin = origins[all[i].connection->peer().origin];
    origin.bytes += all[i].bytes;
    origin.left.push_back(i);
  }
  int64_t excess = held_bytes() - options_.max_held_bytes / 8 * 7;
  for (int cuts = 0; cuts < kCutsAtOnce && excess > 0; ++cuts) {
    const auto most = std::max_element(
        origins.begin(), origins.end(),
        [](const auto& a, const auto& b) { return a.second.bytes < b.second.bytes; });
    if (most == origins.end() || most->second.bytes == 0) return;
    const Still& still = all[most->second.left.back()];
    most->second.left.pop_back();
    most->second.bytes -= still.bytes;
    excess -= still.connection->account().held();
    still.connection->loop().Post([cut = still.connection] { cut->Close(Cut::kMemory); });
  }
}

int64_t Server::open() const {
  absl::MutexLock lock(&mutex_);
  return open_;
}

Traffic Server::traffic() const {
  Traffic all = {.held = held_bytes()};
  for (const auto& host : hosts_) {
    all.received += host->held().received.load(std::memory_order_relaxed);
    all.sent += host->held().sent.load(std::memory_order_relaxed);
  }
  return all;
}

void Server::OnEachLoop(const std::function<void(int loop)>& use) {
  for (const auto& host : hosts_) {
    host->loop().Post([use, loop = host->loop().index()] { use(loop); });
  }
}

void Server::Drain() {
  for (const auto& host : hosts_) host->loop().Post([host = host.get()] { host->DrainAll(); });
}

void Server::Shutdown() {
  if (!std::exchange(running_, false)) return;
  Loop& first = hosts_.front()->loop();
  absl::Notification stopped;
  first.Post([this, &stopped] {
    listener_.Stop();
    guard_.reset();
    stopped.Notify();
  });
  stopped.WaitForNotification();
  for (const auto& host : hosts_) {
    host->loop().Post([host = host.get()] { host->CloseAll(); });
  }
  for (const auto& host : hosts_) host->loop().Stop();
  for (const auto& host : hosts_) host->loop().Stop();  // what one loop has posted to another
}

}  // namespace logitd::http2
