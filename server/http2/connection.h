// One HTTP/2 connection: nghttp2's session on a socket, plain or with TLS.
//
// Reading: each read goes to a buffer of the loop, through nghttp2 and on to the streams. Inside a
// large DATA frame whose stream has named memory for it (StreamEvents::Room), the read goes there
// instead: nghttp2 is shown the bytes where they lie, and nothing copies them.
//
// Writing: one write sends all that a turn has submitted, and bodies from where they lie. While the
// kernel does not take it, nghttp2 is asked for no more.
#ifndef LOGITD_SERVER_HTTP2_CONNECTION_H_
#define LOGITD_SERVER_HTTP2_CONNECTION_H_

#include <nghttp2/nghttp2.h>
#include <sys/uio.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/inlined_vector.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "server/http2/frame_heads.h"
#include "server/http2/limits.h"
#include "server/http2/loop.h"
#include "server/http2/peer.h"
#include "server/http2/stream.h"
#include "server/http2/tls_session.h"

namespace logitd::http2 {

// The bytes that a connection holds, by kind. Written by its loop, read by any thread.
struct Account {
  std::atomic<int64_t> session = 0;  // the connection, and nghttp2's memory, to the byte
  std::atomic<int64_t> tls = 0;
  std::atomic<int64_t> headers = 0;  // header lists of open streams, and the streams themselves
  std::atomic<int64_t> early = 0;    // body bytes that nobody asked for
  std::atomic<int64_t> unsent =
      0;  // of responses: what the peer has not taken and no other pays for
  // Bytes received and sent since the start. A connection that moves is not the first to be cut.
  std::atomic<int64_t> received = 0;
  std::atomic<int64_t> sent = 0;
  std::atomic<int> streams = 0;

  int64_t held() const;
};

// Limits of time. InfiniteDuration: none.
struct Times {
  absl::Duration preface = absl::Seconds(20);  // until the peer's settings, after the handshake
  absl::Duration handshake = absl::Seconds(10);
  absl::Duration send = absl::Seconds(30);  // until the peer takes something of a response
  // From the end of a response until a peer that has not ended its request is told to stop. HAProxy
  // (2.6) drops a response whose stream is reset before it has passed it on.
  absl::Duration stop = absl::Milliseconds(100);
  absl::Duration max_age = absl::InfiniteDuration();
  absl::Duration max_idle = absl::InfiniteDuration();
  absl::Duration keepalive = absl::Minutes(1);  // of silence until a ping
  absl::Duration keepalive_timeout = absl::Seconds(20);
};

// The server, as its connections see it. Called on the loop of the connection.
class ConnectionHost {
 public:
  virtual ~ConnectionHost() = default;
  // The header list of a request is there. Null: the stream has been ended already.
  virtual std::shared_ptr<StreamEvents> OnStream(Stream* stream) = 0;
  // `text`: why it failed, for the log.
  virtual void OnHandshake(Connection* /*connection*/, HandshakeEnd /*end*/,
                           std::string_view /*text*/) {}
  // False: this turn has had its handshakes. The connection asks again in the next one.
  virtual bool TakeHandshake() { return true; }
  virtual void OnConnectionClosed(Connection* connection, Cut cut) = 0;
};

// Sums over all connections: bytes held and bytes moved. One object for each loop, whose thread
// counts into it.
class Held {
 public:
  // `total`: of all loops. `limit`: beyond it no stream begins and no early bytes are taken; beyond
  // 7/8 of it, none of a connection that holds more than kSmall.
  Held(std::atomic<int64_t>* total, int64_t limit) : total_(total), limit_(limit) {}

  void Add(int64_t bytes) {
    unflushed_ += bytes;
    if (unflushed_ > kUnflushed || unflushed_ < -kUnflushed) Flush();
  }
  void Flush() {
    if (unflushed_ != 0) total_->fetch_add(std::exchange(unflushed_, 0), std::memory_order_relaxed);
  }
  bool over(int64_t own) const {
    return total_->load(std::memory_order_relaxed) > (own > kSmall ? limit_ / 8 * 7 : limit_);
  }

  // Bytes of all connections of the loop since the start, closed ones included.
  std::atomic<int64_t> received = 0;
  std::atomic<int64_t> sent = 0;

 private:
  static constexpr int64_t kSmall = int64_t{128} << 10;
  static constexpr int64_t kUnflushed = int64_t{64} << 10;
  std::atomic<int64_t>* const total_;
  const int64_t limit_;
  int64_t unflushed_ = 0;
};

// The memory of an idle connection of a usual client, without TLS: nghttp2's session with its
// tables of header fields, and Connection.
inline constexpr int64_t kIdleBytes = int64_t{44} << 10;

// Used on its loop only, except account() and peer().
class Connection final : public Source, public std::enable_shared_from_this<Connection> {
 public:
  // Owns `fd`, a connected socket that does not block. `tls`: null: its bytes are plain.
  Connection(Loop* loop, ConnectionHost* host, Held* held, const Limits& limits, const Times& times,
             int fd, PeerInfo peer, std::unique_ptr<TlsSession> tls);
  ~Connection() override;

  // From here on it reads. Once.
  void Start();
  // Tells the peer to open no more streams here, and closes when those that are open have ended.
  void Drain();
  // Ends the connection at once. All streams are closed.
  void Close(Cut cut = Cut::kNone);

  Loop& loop() { return *loop_; }
  const PeerInfo& peer() const { return peer_; }
  const Account& account() const { return account_; }
  bool in_handshake() const { return handshaking_; }
  // The peer's hello has come: it has cost a signature, and the peer is probably honest.
  bool handshake_begun() const { return tls_ != nullptr && tls_->has_begun(); }

  void OnReady(uint32_t events) override;
  void OnTurnEnd() override;

 private:
  friend class Stream;
  struct Callbacks;

  void ContinueHandshake();
  void StartSession();
  void ReadSome();
  absl::Span<std::byte> DirectRoom();
  bool Feed(absl::Span<const std::byte> bytes);
  // Collects what nghttp2 has to send, as much as one write takes.
  void Fill();
  bool full() const;
  void Append(const void* data, size_t bytes);
  // False: the kernel does not take more, or the connection is closed.
  bool WriteOut();
  void KeepRest();
  void CountTls();
  void Shrink();
  bool over() const { return held_->over(account_.held()); }
  void HoldRest(int64_t bytes);  // in Account::unsent
  void CountWritten(size_t bytes);
  void Tick();
  void SetTick();
  void CheckStuck();
  void StopLate();
  void EndIfDone();
  void SubmitReason();  // tells the peer why its connection ends

  // nghttp2's callbacks.
  int OnBeginFrame(const nghttp2_frame_hd* frame);
  int OnBeginHeaders(const nghttp2_frame* frame);
  int OnHeader(const nghttp2_frame* frame, const uint8_t* name, size_t name_bytes,
               const uint8_t* value, size_t value_bytes, uint8_t flags);
  int OnFrame(const nghttp2_frame* frame);
  int OnData(uint8_t flags, int32_t id, const uint8_t* data, size_t bytes);
  void OnFrameSent(const nghttp2_frame* frame);
  void OnStreamClose(int32_t id, uint32_t error);
  static ssize_t ReadBody(nghttp2_session* session, int32_t id, uint8_t* buffer, size_t most,
                          uint32_t* flags, nghttp2_data_source* source, void* user);
  int SendBody(nghttp2_frame* frame, const uint8_t* head, size_t bytes,
               nghttp2_data_source* source);

  // RFC 9113 forbids the frame on its stream, which nghttp2 does not see.
  bool Misplaced(const nghttp2_frame_hd& frame) const;
  // Counts a frame against a budget. 0, or an error that ends the connection.
  int CountControl(const nghttp2_frame_hd& frame);
  int Refuse(Cut cut);
  Stream* Find(int32_t id);
  void Wake();
  void Hold(std::atomic<int64_t>* count, int64_t more) {
    count->store(count->load(std::memory_order_relaxed) + more, std::memory_order_relaxed);
    held_->Add(more);
  }

  Loop* const loop_;
  ConnectionHost* const host_;
  Held* const held_;
  const Limits& limits_;
  const Times& times_;
  int fd_;
  PeerInfo peer_;
  const std::unique_ptr<TlsSession> tls_;
  Account account_;
  nghttp2_mem memory_ = {};
  nghttp2_session* session_ = nullptr;
  absl::flat_hash_map<int32_t, std::unique_ptr<Stream>> streams_;

  bool handshaking_ = false;
  bool feeding_ = false;  // inside nghttp2_session_mem_recv
  bool closing_ = false;
  bool preface_ = false;  // the peer's first settings are there
  bool draining_ = false;
  bool going_away_ = false;  // the last GOAWAY was submitted
  bool told_ = false;  // a GOAWAY with an error was sent, by nghttp2 if the peer broke the protocol
  Cut cut_ = Cut::kNone;

  // Streams that the peer has passed over: they are closed. As far as so many gaps say.
  static constexpr size_t kGaps = 8;
  struct Gap {
    int32_t first;
    int32_t end;
  };
  absl::InlinedVector<Gap, kGaps> gaps_;
  int32_t last_stream_ = -1;

  FrameHeads heads_;
  // The DATA frame that is being received.
  Stream* data_stream_ = nullptr;  // null: none, or a short one
  size_t data_left_ = 0;

  // A part of one write, or what is left of it.
  struct Piece {
    const std::byte* data;
    size_t bytes;
    std::shared_ptr<const void> keep;  // null: in `rest_`, or in the loop's scratch
    bool paid;                         // Payer::kKeep
  };
  struct Mark {  // the end of a Send
    uint64_t at;
    int32_t stream;
  };
  std::vector<Piece> pieces_;
  std::vector<Mark> marks_;
  std::vector<std::byte> rest_;
  int64_t rest_bytes_ = 0;  // that `pieces_` keep while the kernel does not take them
  size_t scratch_used_ = 0;
  size_t filled_ = 0;
  uint64_t queued_ = 0;       // bytes given to `pieces_`, in all
  uint64_t written_ = 0;      // bytes of them that the kernel has taken
  bool blocked_ = false;      // EPOLLOUT is watched
  bool reads_on_ = false;     // a task of the loop reads next
  bool ending_turn_ = false;  // inside OnTurnEnd

  int64_t begun_ns_;
  int64_t age_ends_ns_;
  int64_t idle_since_ns_;
  int64_t received_ns_;
  int64_t pinged_ns_ = 0;
  int64_t blocked_ns_ = 0;
  int64_t drained_ns_ = 0;
  Budget control_;
  Budget pings_;
  Budget tiny_;
  Budget resets_;
  Timer tick_;
  Timer stop_;  // set while a response has ended before its request
};

}  // namespace logitd::http2

#endif  // LOGITD_SERVER_HTTP2_CONNECTION_H_
