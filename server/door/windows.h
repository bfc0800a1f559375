// How many bytes of messages a peer may send before a call asks for them.
// Source: RFC 9113, sections 5.2 and 6.9 (flow control).
#ifndef LOGITD_SERVER_DOOR_WINDOWS_H_
#define LOGITD_SERVER_DOOR_WINDOWS_H_

#include <atomic>
#include <cstdint>
#include <string>
#include <utility>

#include "absl/container/inlined_vector.h"

namespace logitd::door {

// Bytes that all connections together may receive early. Thread-safe.
class EarlyRoom {
 public:
  explicit EarlyRoom(int64_t bytes) : left_(bytes) {}

  // False: there are not so many, and none is taken.
  bool Take(int64_t bytes);
  void Give(int64_t bytes) { left_.fetch_add(bytes, std::memory_order_relaxed); }
  int64_t left() const { return left_.load(std::memory_order_relaxed); }

 private:
  std::atomic<int64_t> left_;
};

// The windows of one connection. gRPC has its own, of megabytes for each stream and each connection,
// and would give them to every peer. (Newer versions than 1.51 are set to 64 KiB for each stream, see
// RpcServer; then no window is wide.) The peer gets smaller ones:
//
// - Usual: 64 KiB for each stream, and what gRPC asks for while a call reads its message. A larger
//   message waits for its call, and costs one more round trip.
// - Wide: a peer that sends larger messages gets a window that one of them fits, at most kWidest. What
//   it sends beyond the usual windows comes early. The connection's window keeps all early bytes
//   within a share of EarlyRoom, of which the connection takes its part before and gives it back
//   after. When the share is full, the windows become the usual ones, so that unread calls do not
//   keep the connection from those that are read.
// - Closed: 0 for new streams. A peer may send the first 64 KiB of a message with its headers, and of
//   a refused call they are wasted: at high load they cost both sides more than all else. A call
//   that passes gets the usual window (Grant).
//
// gRPC believes that the peer has all that gRPC announced, so what the peer may send is never more.
// A peer that sends more than it may is found here.
//
// Bound: messages that no call reads hold at most 64 KiB for each open stream, early_room(), 64 KiB for
// the connection, and what gRPC asked for on other streams and has not got: at most 1 MiB for each.
// Not thread-safe.
class Windows {
 public:
  static constexpr int64_t kUsual = 65535;  // where no SETTINGS say otherwise
  static constexpr int64_t kWidest = int64_t{1} << 20;

  // What was received on a stream less what gRPC asked for with WINDOW_UPDATE.
  struct Stream {
    int64_t ahead = 0;
    bool over = false;  // the server ends it
  };

  // `room` outlives the object. Null: never wide.
  explicit Windows(EarlyRoom* room = nullptr) : room_(room) {}
  Windows(const Windows&) = delete;
  Windows& operator=(const Windows&) = delete;
  ~Windows();

  bool closed() const { return initial_ == 0; }
  bool wide() const { return initial_ > kUsual; }
  // The peer has not acknowledged the last change: none may be made.
  bool changing() const { return changing_; }
  // Of EarlyRoom, taken by this connection.
  int64_t early_room() const { return taken_; }
  // Bytes of open streams that came early. Calls that read may have lent the connection more than the
  // share for a while, so it can be more than early_room().
  int64_t early() const { return early_; }
  // The connection would be wide if there were more of it. True once for each time.
  bool TakeLackOfRoom() { return std::exchange(lacks_room_, false); }
  // When the last large message began.
  int64_t last_large_ns() const { return last_large_ns_; }

  // New streams get no window. Streams that are open need their grant: Grant each.
  void Close() { Announce(0); }
  // New streams get the usual window. No stream is open that has its grant.
  void Open() { Announce(kUsual); }
  // Gives a stream the usual window. Once for each stream of closed windows.
  void Grant(uint32_t stream);
  // A message of `bytes` has begun. If it is large, the next ones get wide windows.
  void Began(int64_t bytes, int64_t now_ns);
  // The usual windows in place of wide ones.
  void Narrow();

  // A DATA frame with `bytes` was received; `stream` is null if no such stream is open. False: the
  // peer may not send so many.
  bool Received(Stream* stream, int64_t bytes);
  // gRPC asks for `bytes` more of a message.
  void Asked(Stream* stream, int64_t bytes) { Move(stream, -bytes); }
  // Its bytes are no longer held.
  void Ended(Stream* stream);
  // After a read, and before a write: gives the connection's window and ends wide windows where needed.
  void Settle(int64_t now_ns);

  // gRPC sends SETTINGS.
  void OffersSettings() { unacknowledged_.push_back(false); }
  // gRPC sends this initial window. Returns what the peer gets in its place.
  uint32_t OffersInitialWindow(uint32_t bytes);
  // gRPC gives the connection a window of `bytes` more.
  void OffersConnection(int64_t bytes) { kept_ += bytes; }
  // The same, and the peer gets them all.
  void GivesConnection(int64_t bytes) { connection_ += bytes; }
  // Bytes for the peer in place of what gRPC gave, at least 1.
  uint32_t TakeConnection();

  // The peer has acknowledged SETTINGS. True: the door's, so gRPC must not see it.
  bool TakeAcknowledgement();

  bool has_frames() const { return !frames_.empty(); }
  // Whole frames for the peer, in their order. They are sent before any SETTINGS that gRPC offers later.
  std::string TakeFrames();

 private:
  void Announce(int64_t initial);
  void Move(Stream* stream, int64_t bytes);
  int64_t Allowed() const;  // window of the connection
  void GiveBack();

  EarlyRoom* const room_;
  int64_t initial_ = kUsual;  // announced, or less if gRPC's is less
  int64_t grpcs_initial_ = kUsual;
  bool changing_ = false;
  bool counts_early_ = false;  // from wide windows on until the peer has acknowledged their end
  int64_t taken_ = 0;
  int64_t messages_ = 1;  // that the share is for
  int64_t not_before_ns_ = 0;
  int64_t last_large_ns_ = 0;
  bool lacks_room_ = false;

  int64_t early_ = 0;            // bytes of streams beyond the usual window
  int64_t asked_ = 0;            // bytes that gRPC asked for and that have not come
  int64_t connection_ = kUsual;  // the peer may send so many
  int64_t kept_ = 0;             // gRPC would let it send so many more

  absl::InlinedVector<bool, 4> unacknowledged_;  // SETTINGS in their order: the door's or gRPC's
  std::string frames_;
  int settings_in_frames_ = 0;
};

}  // namespace logitd::door

#endif  // LOGITD_SERVER_DOOR_WINDOWS_H_
