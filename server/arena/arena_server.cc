#include "server/arena/arena_server.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <limits>
#include <optional>
#include <string>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "prometheus/counter.h"
#include "prometheus/family.h"
#include "prometheus/gauge.h"
#include "prometheus/registry.h"
#include "server/arena/send_file.h"
#include "server/log/limited.h"

namespace logitd::arena {
namespace {

// Connections that may be open without a lease.
constexpr int64_t kSilentPeers = 64;
// How often unused memory is looked for while there is some that calls still use, and how long no
// connection is accepted after one failed for lack of descriptors.
constexpr int64_t kSoonNs = 20'000'000;
constexpr int64_t kNever = std::numeric_limits<int64_t>::max();

prometheus::Gauge* AddGauge(prometheus::Registry& registry, const char* name, const char* help) {
  return &prometheus::BuildGauge().Name(name).Help(help).Register(registry).Add({});
}

prometheus::Counter* AddCounter(prometheus::Registry& registry, const char* name,
                                const char* help) {
  return &prometheus::BuildCounter().Name(name).Help(help).Register(registry).Add({});
}

// One packet, with `text` or other bytes at its end, with `fd` if it is not below 0. False: the
// peer does not take it.
bool Send(int socket, ArenaAnswer answer, absl::string_view text, int fd) {
  text = text.substr(0, kMaxArenaText);
  answer.text_bytes = static_cast<uint32_t>(text.size());
  std::array<iovec, 2> parts = {iovec{&answer, sizeof(answer)},
                                iovec{const_cast<char*>(text.data()), text.size()}};
  return SendWithFile(socket, absl::MakeSpan(parts), fd);
}

// False: the peer does not take it.
bool SendRingAnswer(int socket, const absl::Status& status) {
  const absl::string_view text = status.message().substr(0, kMaxArenaText);
  RingAnswer answer = {.code = static_cast<uint32_t>(status.code()),
                       .text_bytes = static_cast<uint32_t>(text.size())};
  std::array<iovec, 2> parts = {iovec{&answer, sizeof(answer)},
                                iovec{const_cast<char*>(text.data()), text.size()}};
  msghdr message = {};
  message.msg_iov = parts.data();
  message.msg_iovlen = parts.size();
  return sendmsg(socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT) >= 0;
}

absl::Status CheckAsk(const ArenaAsk& ask, size_t bytes) {
  if (bytes != sizeof(ask)) {
    return absl::InvalidArgumentError(
        absl::StrFormat("arena: got a request of %d bytes, allowed %d", bytes, sizeof(ask)));
  }
  if (ask.magic != kArenaMagic) {
    return absl::InvalidArgumentError(
        absl::StrFormat("arena: got a request that begins with \"%s\", allowed \"%s\"",
                        absl::CHexEscape(absl::string_view(ask.magic.data(), ask.magic.size())),
                        absl::string_view(kArenaMagic.data(), kArenaMagic.size())));
  }
  if (ask.version != kArenaVersion) {
    return absl::UnimplementedError(absl::StrFormat(
        "arena: got version %d of the protocol, allowed %d", ask.version, kArenaVersion));
  }
  if (ask.kind != kHostArena && ask.kind != kCudaArena) {
    return absl::UnimplementedError(
        absl::StrFormat("arena: got kind %d, allowed %d (memory of the host) or %d (of a GPU)",
                        ask.kind, kHostArena, kCudaArena));
  }
  if (ask.kind == kHostArena && ask.device != 0) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "arena: got %d in the field device, allowed 0 for memory of the host", ask.device));
  }
  if (ask.bytes > static_cast<uint64_t>(INT64_MAX)) {
    return absl::InvalidArgumentError(
        absl::StrFormat("arena: got %d bytes to lease, allowed 1..%d", ask.bytes, INT64_MAX));
  }
  return absl::OkStatus();
}

}  // namespace

// A connection.
struct ArenaServer::Peer {
  int fd;
  ucred user;
  int64_t ask_by_ns;             // if it has no lease
  std::optional<LeaseId> lease;  // since it has asked
  std::shared_ptr<Ring> ring;    // null: none; its thread reads the connection
};

ArenaServer::ArenaServer(const ArenaServerOptions& options, Leases* leases,
                         std::shared_ptr<prometheus::Registry> registry,
                         door::ListeningSocket socket, int wake_fd)
    : options_(options),
      leases_(leases),
      registry_(std::move(registry)),
      socket_(socket),
      wake_(wake_fd),
      open_(AddGauge(*registry_, "logitd_arena_leases", "Leased arenas.")),
      bytes_(AddGauge(*registry_, "logitd_arena_bytes",
                      "Host memory of arenas, also of ended leases until it is free.")),
      leaving_bytes_(AddGauge(*registry_, "logitd_arena_leaving_bytes",
                              "Host memory of ended leases that no call uses and that is not free "
                              "yet. A client whose own call holds its file keeps it.")),
      device_bytes_(AddGauge(*registry_, "logitd_arena_device_bytes",
                             "Memory of arenas on all devices, also of ended leases that calls "
                             "still use.")),
      opened_(AddCounter(*registry_, "logitd_arena_leases_total", "Arenas that were leased.")),
      refused_(AddCounter(*registry_, "logitd_arena_refused_total",
                          "Connections for a lease that got none.")),
      rings_open_(AddGauge(*registry_, "logitd_arena_rings", "Open rings.")),
      rings_opened_(AddCounter(*registry_, "logitd_arena_rings_total", "Rings that were opened.")) {
  AddGauge(*registry_, "logitd_arena_bytes_limit", "Most host memory of all arenas.")
      ->Set(static_cast<double>(leases_->limits().max_bytes));
  moved_ = options_.clock->WhenMoved([this] { wake_.Raise(); });
  thread_ = std::thread([this] { Run(); });
}

absl::StatusOr<std::unique_ptr<ArenaServer>> ArenaServer::Start(
    const ArenaServerOptions& options, Leases* leases,
    std::shared_ptr<prometheus::Registry> registry) {
  if (absl::Status status = CheckMappedWrites(); !status.ok()) return status;
  const absl::StatusOr<std::vector<door::ListeningSocket>> sockets =
      door::ListenOn(options.address, {.type = SOCK_SEQPACKET, .mode = options.mode});
  if (!sockets.ok()) return sockets.status();
  const int wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (wake_fd < 0) {
    door::RemoveSocketFile(options.address, sockets->front());
    close(sockets->front().fd);
    return absl::UnavailableError(absl::StrCat("eventfd: ", std::strerror(errno)));
  }
  return std::unique_ptr<ArenaServer>(
      new ArenaServer(options, leases, std::move(registry), sockets->front(), wake_fd));
}

ArenaServer::~ArenaServer() {
  moved_ = nullptr;
  stopping_ = true;
  wake_.Raise();
  thread_.join();
  for (Peer& peer : peers_) EndPeer(peer);
  EndRings(absl::InfiniteDuration());
  door::RemoveSocketFile(options_.address, socket_);
  close(socket_.fd);
}

void ArenaServer::ServeRings(ServeRing serve, int cores) {
  absl::MutexLock lock(&rings_mutex_);
  rings_ = std::make_unique<Rings>(std::move(serve), cores, *options_.clock);
}

bool ArenaServer::EndRings(absl::Duration most) {
  {
    absl::MutexLock lock(&rings_mutex_);
    if (rings_ != nullptr) ending_rings_ = std::move(rings_);
  }
  return ending_rings_ == nullptr || ending_rings_->Stop(most);
}

void ArenaServer::Run() {
  bool some_used = false;  // memory of ended leases
  std::vector<pollfd> fds;
  while (true) {
    const int64_t now_ns = options_.clock->Nanos();
    int64_t wake_ns = some_used ? now_ns + kSoonNs : kNever;
    const bool accepts = accept_again_ns_ <= now_ns;
    if (!accepts) wake_ns = std::min(wake_ns, accept_again_ns_);
    fds.assign({{.fd = wake_.fd(), .events = POLLIN},
                {.fd = accepts ? socket_.fd : -1, .events = POLLIN},
                {.fd = leases_->freed_fd(), .events = POLLIN}});
    const size_t before_peers = fds.size();
    for (const Peer& peer : peers_) {
      // Without events, poll still tells the end of the connection.
      const bool reads = peer.ring == nullptr;
      fds.push_back({.fd = peer.fd, .events = reads ? int16_t{POLLIN} : int16_t{0}});
      if (!peer.lease.has_value()) wake_ns = std::min(wake_ns, peer.ask_by_ns);
    }
    const absl::Duration most = options_.clock->SleepUntil(wake_ns);
    const int wait_ms = most == absl::InfiniteDuration()
                            ? -1
                            : static_cast<int>(absl::ToInt64Milliseconds(most)) + 1;
    if (poll(fds.data(), fds.size(), wait_ms) < 0) continue;
    if (stopping_) return;
    if (fds[0].revents != 0) wake_.Lower();
    for (size_t i = 0; i < peers_.size(); ++i) {
      Peer& peer = peers_[i];
      const bool heard = fds[before_peers + i].revents != 0;
      const bool late = !peer.lease.has_value() && options_.clock->Nanos() >= peer.ask_by_ns;
      if (!heard && late) {
        Refuse(peer, absl::DeadlineExceededError(absl::StrFormat(
                         "arena: got no request in %s, allowed one right after the connection",
                         absl::FormatDuration(options_.ask_timeout))));
      }
      if (heard ? !Hear(peer) : late) EndPeer(peer);
    }
    peers_.erase(
        std::remove_if(peers_.begin(), peers_.end(), [](const Peer& peer) { return peer.fd < 0; }),
        peers_.end());
    if (fds[1].revents != 0) Accept();
    some_used = leases_->FreeEnded();
    ShowLeases();
  }
}

void ArenaServer::Accept() {
  const int fd = accept4(socket_.fd, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
  if (fd < 0) {
    // Without a descriptor for it the connection stays in the queue, and would wake this thread
    // again and again.
    if (errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == ENOBUFS) {
      accept_again_ns_ = options_.clock->Nanos() + kSoonNs;
    }
    return;
  }
  const int64_t ask_by_ns =
      options_.clock->Nanos() + absl::ToInt64Nanoseconds(options_.ask_timeout);
  Peer peer = {.fd = fd, .user = {}, .ask_by_ns = ask_by_ns, .lease = {}};
  socklen_t length = sizeof(peer.user);
  absl::Status allowed =
      getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer.user, &length) == 0
          ? options_.check_user(peer.user.uid)
          : absl::InternalError(absl::StrCat("arena: SO_PEERCRED: ", std::strerror(errno)));
  if (!allowed.ok()) {
    Refuse(peer, allowed);
    close(fd);
    return;
  }
  MakePlace();
  peers_.push_back(peer);
}

void ArenaServer::MakePlace() {
  const auto silent = [](const Peer& peer) { return !peer.lease.has_value(); };
  if (std::count_if(peers_.begin(), peers_.end(), silent) < kSilentPeers) return;
  const auto oldest = std::find_if(peers_.begin(), peers_.end(), silent);
  Refuse(*oldest, absl::ResourceExhaustedError(absl::StrFormat(
                      "arena: got a connection without a request, while %d more came; allowed "
                      "are %d",
                      kSilentPeers, kSilentPeers)));
  EndPeer(*oldest);
  peers_.erase(oldest);
}

bool ArenaServer::Hear(Peer& peer) {
  if (peer.ring != nullptr) return false;  // only its end is heard
  union {
    ArenaAsk lease;
    RingAsk ring;
  } ask = {.ring = {}};
  const ssize_t bytes = recv(peer.fd, &ask, sizeof(ask), MSG_DONTWAIT | MSG_TRUNC);
  if (bytes < 0 && (errno == EAGAIN || errno == EINTR)) return true;
  if (bytes <= 0) return false;
  if (peer.lease.has_value()) return HearLeased(peer, ask.ring, static_cast<size_t>(bytes));
  const absl::Status status = GiveLease(peer, ask.lease, static_cast<size_t>(bytes));
  if (!status.ok()) Refuse(peer, status);
  return status.ok();
}

bool ArenaServer::HearLeased(Peer& peer, const RingAsk& ask, size_t bytes) {
  if (bytes != sizeof(ask) || ask.magic != kRingMagic) {
    log::Limited(log::Source::kArenas, spdlog::level::info,
                 "arena: a peer (pid {}, uid {}) sent {} bytes after its request: its lease ends",
                 peer.user.pid, peer.user.uid, bytes);
    return false;
  }
  const absl::Status status = OpenRing(peer, ask, bytes);
  log::Limited(log::Source::kArenas, spdlog::level::info, "arena: a ring for pid {}, uid {}: {}",
               peer.user.pid, peer.user.uid, status.ok() ? "open" : std::string(status.message()));
  return SendRingAnswer(peer.fd, status);
}

// The answer goes out before the ring's thread may send a doorbell: it sends none before its first
// submission, which comes after the answer.
absl::Status ArenaServer::OpenRing(Peer& peer, const RingAsk& ask, size_t bytes) {
  const absl::string_view id(reinterpret_cast<const char*>(peer.lease->data()), peer.lease->size());
  absl::StatusOr<std::shared_ptr<const Arena>> arena = leases_->Find({id.data(), id.size()});
  if (!arena.ok()) return arena.status();
  if ((*arena)->on_device()) {
    return absl::InvalidArgumentError(
        "ring: got a lease of a GPU's memory, allowed one of the host; rows of the ring's calls "
        "may "
        "lie in both");
  }
  if (absl::Status status = CheckRing(ask, bytes, (*arena)->bytes()); !status.ok()) return status;
  absl::MutexLock lock(&rings_mutex_);
  if (rings_ == nullptr) {
    return absl::UnavailableError("ring: the server opens none now: it starts, or shuts down");
  }
  absl::StatusOr<std::shared_ptr<Ring>> ring =
      rings_->Open(*std::move(arena), ask, peer.fd, peer.user);
  if (!ring.ok()) return ring.status();
  peer.ring = *std::move(ring);
  rings_opened_->Increment();
  return absl::OkStatus();
}

absl::Status ArenaServer::GiveLease(Peer& peer, const ArenaAsk& ask, size_t bytes) {
  if (absl::Status status = CheckAsk(ask, bytes); !status.ok()) return status;
  const auto wanted = static_cast<int64_t>(ask.bytes);
  const absl::StatusOr<Leases::Lease> lease =
      ask.kind == kCudaArena ? leases_->OpenOnDevice(ask.device, wanted) : leases_->Open(wanted);
  if (!lease.ok()) return lease.status();
  peer.lease = lease->id;
  const ArenaAnswer answer = {.bytes = static_cast<uint64_t>(lease->bytes), .lease = lease->id};
  absl::string_view rest;
  if (lease->device.has_value()) {
    rest = absl::string_view(reinterpret_cast<const char*>(&*lease->device), sizeof(ArenaDevice));
  }
  const bool sent = Send(peer.fd, answer, rest, lease->fd);
  const int error = errno;
  close(lease->fd);
  // ETOOMANYREFS: other peers have left the descriptors unread that were sent to them.
  if (!sent) {
    return absl::ResourceExhaustedError(
        absl::StrCat("arena: its descriptor cannot be sent: ", std::strerror(error)));
  }
  opened_->Increment();
  log::Limited(log::Source::kArenas, spdlog::level::info,
               "arena: {} bytes{} leased to pid {}, uid {}", lease->bytes,
               lease->device.has_value() ? absl::StrCat(" of device ", lease->device->number) : "",
               peer.user.pid, peer.user.uid);
  return absl::OkStatus();
}

void ArenaServer::Refuse(const Peer& peer, const absl::Status& why) {
  refused_->Increment();
  log::Limited(log::Source::kArenas, spdlog::level::info, "arena: no lease for pid {}, uid {}: {}",
               peer.user.pid, peer.user.uid, std::string(why.message()));
  const ArenaAnswer answer = {.code = static_cast<uint32_t>(why.code())};
  Send(peer.fd, answer, why.message(), -1);
}

void ArenaServer::EndPeer(Peer& peer) {
  if (peer.fd < 0) return;
  if (peer.ring != nullptr) {
    // Its thread has a copy of the connection, and lets go of it when it can.
    shutdown(peer.fd, SHUT_RDWR);
    peer.ring->Stop();
    peer.ring.reset();
  }
  close(peer.fd);
  peer.fd = -1;
  if (!peer.lease.has_value()) return;
  leases_->End(*peer.lease);
  log::Limited(log::Source::kArenas, spdlog::level::info, "arena: the lease of pid {} has ended",
               peer.user.pid);
}

void ArenaServer::ShowLeases() {
  open_->Set(static_cast<double>(leases_->leases()));
  bytes_->Set(static_cast<double>(leases_->bytes()));
  leaving_bytes_->Set(static_cast<double>(leases_->leaving_bytes()));
  device_bytes_->Set(static_cast<double>(leases_->device_bytes()));
  absl::MutexLock lock(&rings_mutex_);
  rings_open_->Set(rings_ == nullptr ? 0 : rings_->open());
}

}  // namespace logitd::arena
