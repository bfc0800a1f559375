// The connections of the server: who they are, what they sent, and an end to those that break a
// limit.
//
// gRPC reads and writes the sockets. sockets.cc stands in its way: each read and write of a
// connection that is known here passes its account.
#ifndef LOGITD_SERVER_DOOR_CONNECTION_H_
#define LOGITD_SERVER_DOOR_CONNECTION_H_

#include <sys/socket.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"
#include "server/door/frames.h"
#include "server/door/limits.h"
#include "server/door/tls_session.h"
#include "server/door/turnstile.h"

namespace logitd::door {

class Connections;

// One connection, from its acceptance until its descriptor is closed; calls may hold it longer.
// Thread-safe. Locks are held for the time it takes to read the frames of one read, or to write.
//
// Calls that are like one that was just refused (Refuse) are answered here, and gRPC does not see
// them. The answers go out where gRPC's own frames end. While the kernel does not take them, no
// further call is refused here, so they are bounded.
class Connection {
 public:
  Connection(std::shared_ptr<Connections> owner, uint64_t id, int fd, std::string peer,
             std::string host, std::optional<uint32_t> uid = std::nullopt);

  uint64_t id() const { return id_; }  // from 1; never used again
  // As grpc::ServerContext::peer() names it, without percent signs: "ipv4:127.0.0.1:40123",
  // "ipv6:[::1]:40123". All peers on a Unix socket have the same address, so they are named
  // "unix:connection-ID".
  const std::string& peer() const { return peer_; }

  // Who the peer is, as far as the transport proves it: the names in its certificate, in the form of
  // TlsSession::CertificateNames, and the user of a process at the other end of a Unix socket.
  absl::Span<const std::string> certificate_names() const { return certificate_names_; }
  std::optional<uint32_t> uid() const { return uid_; }

  // Once, when the handshake is done and before gRPC has the connection.
  void SetTls(std::unique_ptr<TlsSession> session);
  // Null: the bytes of the socket are plain.
  TlsSession* tls() const { return tls_.load(std::memory_order_acquire); }

  // Of plain bytes, without what TLS adds.
  int64_t received_bytes() const { return received_.load(std::memory_order_relaxed); }
  int64_t sent_bytes() const { return sent_.load(std::memory_order_relaxed); }
  // The kernel has bytes of the peer that nobody has read, or they are being read just now. False:
  // there are none, or it is closed. Does not block: the caller may hold any lock.
  bool HasUnread() const;
  int64_t message_bytes() const;  // DATA frames' payload, in all
  int64_t open_streams() const;
  // Bytes of messages that have begun and not arrived, and the cost of their frames.
  int64_t under_way() const;

  // A call will read a message of at most `bytes`. Before the message is asked for.
  void Allow(int64_t bytes);
  // Takes it back: the message has come, or the call ended without it.
  void Settle(int64_t bytes, bool arrived);

  // Ends the connection. Its calls are cancelled and its peer sees the end. Does nothing if it is
  // cut or closed. Does not block. Not while the caller holds a lock that gRPC's callbacks take.
  void Cut(Limit reason);

  // A call was refused: from here on its judge decides which calls like it are.
  void Refuse(LikeCalls calls) { turnstile_.Add(std::move(calls), MonotonicNanos()); }
  // The headers of a call of this connection are here. Once for every call that could be refused so.
  void CallBegan() { turnstile_.Began(); }
  int64_t refused() const;  // calls that were refused so, in all

  // The hooks of sockets.cc: as recvmsg and sendmsg on `fd`, with errno. One read at a time, and one
  // write. ECONNRESET of a read: the connection was cut.
  ssize_t Receive(int fd, msghdr* message, int flags);
  ssize_t Send(int fd, const msghdr* message, int flags);
  // The descriptor is about to be closed.
  void Closed();
  // Ends the sending side: written bytes still go out, and then the peer sees the end.
  void EndSending();

 private:
  friend class Connections;

  // True if this call cut it.
  bool ShutDown(Limit reason) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // A call that was refused here.
  struct Refused {
    uint32_t stream;
    bool ended;  // its peer sends nothing more
    Turnstile::Answer answer;
  };
  ssize_t ReadSome(int fd, msghdr* message, int flags);
  // Reads the frames of what was received. `edits`: what gRPC gets instead; `tells`: frames_ has
  // replies. False: cut.
  bool Account(int fd, absl::Span<const iovec> parts, size_t bytes,
               std::vector<Frames::Edit>* edits, std::vector<Refused>* refused, bool* tells);
  // Sends the replies of frames_, and then the ends of the calls.
  void Answer(int fd, const std::vector<Refused>& refused);
  // The last frame for a peer that pings too often: gRPC's clients then ping half as often.
  void TellTooManyPings(int fd);
  // Writes answers and frames of windows, as far as the kernel takes them and gRPC's frames leave a place.
  void WriteAnswers(int fd) ABSL_EXCLUSIVE_LOCKS_REQUIRED(send_mutex_);
  // What gRPC has sent, and then the ends of calls that wait for it.
  void CountSent(absl::Span<const iovec> parts, size_t bytes)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(send_mutex_);
  ssize_t SendBoth(int fd, const msghdr& message, int flags)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(send_mutex_);
  // So many of the answers' bytes were written.
  void CountAnswered(size_t bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(send_mutex_);
  // Ends wide windows that no large message used for a while. False: there are none. Any thread.
  bool NarrowIfUnused(int64_t now_ns);

  const std::shared_ptr<Connections> owner_;
  const uint64_t id_;
  const std::string peer_;
  const std::string host_;  // the peer's address without its port; empty if it is on this machine
  const std::optional<uint32_t> uid_;
  std::unique_ptr<TlsSession> tls_owner_;  // written by SetTls, then only read
  std::vector<std::string> certificate_names_;
  std::atomic<TlsSession*> tls_ = nullptr;
  std::atomic<int64_t> received_ = 0;
  std::atomic<int64_t> sent_ = 0;
  Turnstile turnstile_;
  std::string ready_;  // bytes for the next reads; only Receive uses it

  absl::Mutex send_mutex_ ABSL_ACQUIRED_BEFORE(mutex_);
  std::string answers_ ABSL_GUARDED_BY(send_mutex_);  // whole frames that were not written
  size_t answered_ ABSL_GUARDED_BY(send_mutex_) = 0;  // bytes of them that were
  // Some bytes went out, or are encrypted: nothing else may be written before the others.
  bool answers_begun_ ABSL_GUARDED_BY(send_mutex_) = false;
  std::atomic<bool> answers_wait_ = false;

  int64_t received_at_look_ = 0;  // of Connections::CutLargest, under its lock
  mutable absl::Mutex mutex_;
  int fd_ ABSL_GUARDED_BY(mutex_);  // -1: closed
  Limit cut_ ABSL_GUARDED_BY(mutex_) = Limit::kNone;
  Frames frames_ ABSL_GUARDED_BY(mutex_);
  int64_t too_large_calls_ ABSL_GUARDED_BY(mutex_) = 0;  // of frames_, as far as they are counted
};

// What a call may receive on its connection, as long as this lives. Movable. Not thread-safe.
class Grant {
 public:
  Grant() = default;
  // `connection` may be null: one that is not known here.
  Grant(std::shared_ptr<Connection> connection, int64_t bytes);
  Grant(Grant&& other) noexcept { *this = std::move(other); }
  Grant& operator=(Grant&& other) noexcept;
  ~Grant() { End(/*arrived=*/false); }

  // The message has come.
  void Arrived() { End(/*arrived=*/true); }

 private:
  void End(bool arrived);

  std::shared_ptr<Connection> connection_;
  int64_t bytes_ = 0;
};

// What happened to connections. Methods run on any thread, without a lock of Connections.
class ConnectionEvents {
 public:
  virtual ~ConnectionEvents() = default;
  virtual void OnOpen(int64_t open) {}
  virtual void OnRefused() {}
  virtual void OnCut(Limit reason) {}
  // Calls were ended, each for a message larger than FrameLimits::max_message.
  virtual void OnTooLarge(int64_t calls) {}
  virtual void OnHandshake(HandshakeEnd end) {}
};

// Of all connections since the start, closed ones included.
struct Traffic {
  int64_t received = 0;       // bytes
  int64_t sent = 0;           // bytes
  int64_t refused_calls = 0;  // see Connection::Refuse
};

struct ConnectionOptions {
  FrameLimits frames;
  int64_t max_connections = 1024;
  // Bytes that peers may send before a call reads them, beside 64 KiB for each call: Windows.
  int64_t early_bytes = 0;
};

// All connections of a server. Thread-safe. Closed connections leave by themselves. It lives until
// the last of them is gone, because gRPC closes sockets after its server has ended.
class Connections : public std::enable_shared_from_this<Connections> {
 public:
  // `events` may be null.
  static std::shared_ptr<Connections> Create(const ConnectionOptions& options,
                                             std::shared_ptr<ConnectionEvents> events = nullptr);

  const ConnectionOptions& options() const { return options_; }

  // Takes on the account of a connected socket. Null: there are max_connections, or half of them
  // come from the same address of another machine; or an open connection has the same address and
  // port, so that calls could not tell them apart. The caller then closes `fd`.
  std::shared_ptr<Connection> Add(int fd, const sockaddr* address, socklen_t length);
  // By the text of grpc::ServerContext::peer(). Null: not a connection of the listener, or closed.
  std::shared_ptr<Connection> Find(absl::string_view peer) const;

  int64_t open() const;

  // Costs a step for each open connection.
  Traffic traffic() const;

  // Counts a connection that was closed without an account.
  void CountRefused();

  void CountHandshake(HandshakeEnd end);

  // Cuts the connection that sent most since the last call, with Limit::kMemory. Of those that sent
  // nothing, the one with most under way. False: no connection has anything of either.
  bool CutLargest();

  // A connection has no room for early bytes: takes it back from one that did not use it lately.
  void ReclaimEarlyRoom();

  // Ends the sending side of all, for the end of the process. See Connection::EndSending. Cuts are
  // not logged from here on: threads of gRPC may outlive the logger.
  void EndAll();

 private:
  friend class Connection;

  Connections(const ConnectionOptions& options, std::shared_ptr<ConnectionEvents> events);

  void Remove(Connection* connection);
  void CountCut(const Connection& connection, Limit reason);
  void CountTooLarge(size_t calls);

  const ConnectionOptions options_;
  const std::shared_ptr<ConnectionEvents> events_;
  std::atomic<bool> ended_ = false;
  EarlyRoom early_room_;
  std::atomic<int64_t> reclaimed_ns_ = 0;  // the last look for unused room

  mutable absl::Mutex mutex_;
  uint64_t last_id_ ABSL_GUARDED_BY(mutex_) = 0;
  Traffic of_closed_ ABSL_GUARDED_BY(mutex_);
  absl::flat_hash_map<const Connection*, std::shared_ptr<Connection>> all_ ABSL_GUARDED_BY(mutex_);
  absl::flat_hash_map<std::string, Connection*> by_peer_ ABSL_GUARDED_BY(mutex_);
  absl::flat_hash_map<std::string, int64_t> by_host_ ABSL_GUARDED_BY(mutex_);

  // The log has one line for each reason and second.
  struct Logged {
    int64_t second = -1;
    int64_t unlogged = 0;
  };
  absl::Mutex log_mutex_;
  std::array<Logged, kLimitNames.size() + 1> logged_ ABSL_GUARDED_BY(log_mutex_);
};

}  // namespace logitd::door

#endif  // LOGITD_SERVER_DOOR_CONNECTION_H_
