// Reads the HTTP/2 frames of one connection in both directions and says when the peer breaks a
// limit, and which bytes gRPC must not see because a call is refused here. It keeps counts, not bytes.
// Source: RFC 9113 (frames), and gRPC over HTTP/2 (the five bytes before a message).
#ifndef LOGITD_SERVER_DOOR_FRAMES_H_
#define LOGITD_SERVER_DOOR_FRAMES_H_

#include <sys/uio.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/functional/function_ref.h"
#include "absl/types/span.h"
#include "server/door/header_list.h"
#include "server/door/limits.h"
#include "server/door/windows.h"

namespace logitd::door {

// Frames that HTTP/2 forbids are left to gRPC, which ends the connection.
//
// A call is refused by its headers: gRPC sees none of them, and takes the stream's other frames for
// those of a stream that has ended. Two things follow from it:
// - A header list may change the table that both sides keep (HPACK). If gRPC misses such a list, it
//   cannot read those that follow. From the first refusal on it gets every list anew, in an encoding
//   that needs no table: see Edit::put.
// - The stream was never open. A second header list on it opens it.
//
// From the first refusal on, the peer may send nothing of a message before its call has passed: see
// Windows.
//
// A message says its length first. If that is too large, its call ends here: gRPC would make room for
// all of it, or receive all of it, before it refuses it. gRPC gets a reset of the stream, and the peer
// is told only when gRPC has read it: after the end of a stream no frame of gRPC may follow on it. So
// gRPC gets an empty SETTINGS after the reset. What it sends before it confirms that goes out; the
// confirmation becomes a frame of a type that no peer knows, and that every peer must ignore.
//
// Memory: about 56 bytes for each open stream. Cost: constant for each frame and each message,
// besides that of HeaderList. Not thread-safe. Knows no sockets.
class Frames {
 public:
  static constexpr size_t kHeadBytes = 9;  // of a frame
  // A type that HTTP/2 does not know: every peer skips such frames.
  static constexpr uint8_t kIgnored = 0xe7;

  // `limits` outlives the object. `now_ns`: any clock that does not go back.
  // `room` may be null: no peer sends early. It outlives the object too.
  Frames(const FrameLimits& limits, int64_t now_ns, EarlyRoom* room = nullptr);

  // Reads the next bytes from the peer. Returns the limit that they break; from then on every call
  // returns it.
  Limit Received(absl::Span<const uint8_t> bytes, int64_t now_ns);
  // Reads what gRPC is about to send, and changes the windows in it to those that the peer gets. After
  // a write that took a part, the next one begins with the rest.
  void Offer(absl::Span<const iovec> parts);
  // Reads the next bytes that were sent to the peer. All of them were offered.
  void Sent(absl::Span<const uint8_t> bytes);
  // All that was offered has been sent, and other frames may follow it.
  bool between_sent_frames() const { return offered_ == 0 && AtEnd(out_, sent_headers_); }
  // The same, when all that is offered will have been sent.
  bool offers_whole_frames() const { return AtEnd(offer_, offered_headers_); }

  // Decides about a call by its whole header list. `ends`: no message follows. True: it is refused.
  using Judge = absl::FunctionRef<bool(uint32_t stream, bool ends, const HeaderList& list)>;
  // What gRPC gets in place of bytes that were received: `put` instead of [begin, end), counted from
  // the last BeginRead. A frame may stand in `put` before the byte at `frame`, if that is not kNoFrame.
  struct Edit {
    static constexpr size_t kNoFrame = std::numeric_limits<size_t>::max();
    size_t begin = 0;
    size_t end = 0;
    std::string put;
    size_t frame = kNoFrame;
  };
  // Before the first Received of a read.
  void BeginRead();
  // As Received, and asks `judge` about each call whose headers came whole in this read.
  Limit Received(absl::Span<const uint8_t> bytes, int64_t now_ns, Judge judge);
  // Of this read so far: in order, apart from each other.
  std::vector<Edit>& edits() { return edits_; }
  // A call whose message is larger than FrameLimits::max_message. gRPC gets a reset of its stream
  // after the frame with the length, a length that ends one byte after that frame, and SETTINGS.
  struct TooLarge {
    uint32_t stream = 0;
    uint32_t bytes = 0;     // of the message
    bool ended = false;     // the peer has ended its side
    bool answered = false;  // headers of an answer were sent
  };
  // Those whose reset gRPC has read, and that it has not ended itself. After Sent; the caller takes
  // them and tells the peer.
  std::vector<TooLarge>& too_large() { return too_large_; }
  // Calls that ended so, in all.
  int64_t too_large_calls() const { return too_large_calls_; }
  // Whole frames for the peer, after which gRPC's own may follow. The caller sends them, before what
  // gRPC offers later.
  bool has_replies() const { return windows_.has_frames(); }
  std::string TakeReplies() { return windows_.TakeFrames(); }
  // See Windows.
  const Windows& windows() const { return windows_; }
  bool TakeLackOfRoom() { return windows_.TakeLackOfRoom(); }
  void Narrow() { windows_.Narrow(); }
  // No call is refused any longer, so the peer may send messages with their headers again.
  void EndRefusals() {
    if (windows_.closed() && !windows_.changing() && streams_.empty()) windows_.Open();
  }

  // A call wants a message of at most `bytes`. See FrameLimits::unasked_slack.
  void Ask(int64_t bytes) { asked_ += bytes; }
  // The message has come.
  void Got(int64_t bytes) { asked_ -= bytes; }
  // The call ended without it. The peer sends on until it learns that, so for one to two seconds
  // such bytes are still expected.
  void GiveUp(int64_t bytes) { given_up_ += bytes; }

  int64_t frames() const { return frames_; }
  int64_t message_bytes() const { return message_bytes_; }  // DATA, in all
  int64_t opened() const { return opened_; }                // streams that gRPC saw, in all
  int64_t refused() const { return refused_; }              // streams, in all
  // Open streams whose list gRPC gets when all of it is here: 0 or 1.
  int64_t held_back() const { return rewrites_ && opens_ != 0 ? 1 : 0; }
  int64_t open() const { return static_cast<int64_t>(streams_.size()); }
  // Bytes of messages that have begun and not ended, and the cost of their frames.
  int64_t under_way() const { return under_way_; }

 private:
  static constexpr size_t kPrefixBytes = 5;
  static constexpr uint8_t kNoType = 0xff;  // of the preface; HTTP/2 defines no such frame

  // One direction: a frame's head, then its payload.
  struct Direction {
    std::array<uint8_t, kHeadBytes> head;
    size_t head_bytes = 0;
    size_t skip = 0;  // bytes before the next head
    uint8_t type = kNoType;
    uint8_t flags = 0;
    uint32_t stream = 0;

    // Takes bytes of a head. True when it is complete.
    bool TakeHead(absl::Span<const uint8_t>* bytes);
  };

  // A stream that neither side has ended.
  struct Stream {
    uint32_t left = 0;                              // payload of the message that has not come
    std::array<uint8_t, kPrefixBytes> prefix = {};  // of the message
    uint8_t prefix_bytes = 0;                       // of it that have come
    uint8_t frames = 0;                             // of the message, counted up to 2
    bool answered = false;                          // the server has sent headers
    uint32_t unread_frames = 0;                     // since the last WINDOW_UPDATE to the peer
    int64_t under_way = 0;
    Windows::Stream window;
    int64_t timeout_end_ns = std::numeric_limits<int64_t>::max();
  };

  // A number of events that grows by a rate.
  struct Budget {
    int64_t left = 0;
    int64_t most = 0;
    bool Take(int64_t n) {
      left -= n;
      return left >= 0;
    }
    void Give(int64_t n) { left = left + n < most ? left + n : most; }
  };

  Limit Read(absl::Span<const uint8_t> bytes, int64_t now_ns, const Judge* judge);
  void Refill(int64_t now_ns);
  void BeginFrame();
  void BeginHeaders(bool continuation);
  void BeginData();
  void ReadHeaders(absl::Span<const uint8_t> bytes);
  bool IsHeaders() const;  // the frame that is received
  void EndHeaderFrame(const Judge* judge);
  void Advance(size_t bytes) {
    read_ += bytes;
    frame_bytes_ += bytes;
  }
  bool MayJudge() const;
  // The last `bytes` bytes of this read do not go to gRPC.
  void TakeOut(size_t bytes) { Replace(read_ - bytes, read_, {}); }
  void PutIn(std::string_view bytes) { Replace(read_, read_, bytes); }
  // gRPC gets `put` instead of [begin, end) of this read; not before an earlier edit.
  void Replace(size_t begin, size_t end, std::string_view put);
  void ReadMessages(Stream* stream, absl::Span<const uint8_t> bytes);
  size_t ReadPrefix(Stream* stream, absl::Span<const uint8_t> bytes);
  void EndTooLarge();
  void EndMessage(Stream* stream);
  void TakeControl();
  void TakePing();
  void RefuseList();
  void CloseWindows();
  void SetTimeout(uint32_t stream);
  void BeginSentFrame();
  void EndStream(uint32_t id);
  void CheckUnasked();
  static bool AtEnd(const Direction& direction, bool in_headers) {
    return direction.skip == 0 && direction.head_bytes == 0 && !in_headers;
  }
  void ReadOffer(absl::Span<uint8_t> bytes);
  void BeginOffer(uint8_t* type);
  void ConfirmedByGrpc();
  void EndOfferedField();
  void Break(Limit limit) {
    if (broken_ == Limit::kNone) broken_ = limit;
  }

  const FrameLimits& limits_;
  Limit broken_ = Limit::kNone;

  Direction in_;
  Direction out_;
  HeaderList headers_;
  bool in_headers_ = false;  // END_HEADERS has not come
  uint32_t list_stream_ = 0;
  int continuations_ = 0;
  size_t header_bytes_ = 0;    // of this list, on the wire
  size_t priority_bytes_ = 0;  // before the list
  uint32_t last_stream_ = 0;   // the highest that gRPC has seen
  uint32_t seen_before_ = 0;   // before this list
  uint32_t opens_ = 0;         // the stream that this list opens; 0: none
  bool ends_ = false;          // the stream, with this list
  bool padded_ = false;
  bool sent_headers_ = false;  // without END_HEADERS yet

  Direction offer_;
  size_t offered_ = 0;                // bytes that were not sent
  size_t offered_confirmations_ = 0;  // of unconfirmed_, in these bytes
  bool offered_headers_ = false;
  uint8_t* offered_type_ = nullptr;  // of the head that is offered; null: it may have been sent
  // A field of SETTINGS (6 bytes) or of WINDOW_UPDATE (4), and where its bytes are.
  struct Field {
    std::array<uint8_t*, 6> at = {};
    std::array<uint8_t, 6> value = {};
    size_t bytes = 0;
    size_t whole = 0;  // 0: the frame has none

    // All of it lies in what is offered now.
    bool writable() const;
    // Four bytes from `begin` on.
    void Write(size_t begin, uint32_t value) const;
  };
  Field field_;
  Field connection_field_;  // the last WINDOW_UPDATE of the connection in this offer

  int64_t now_ns_ = 0;      // of this read
  size_t read_ = 0;         // bytes since BeginRead
  size_t frame_bytes_ = 0;  // of the frame so far, with its head
  bool rewrites_ = false;   // a call was refused
  bool hidden_ = false;     // gRPC does not get this frame
  std::vector<Edit> edits_;
  std::string held_;  // of the frame that is received: bytes of a prefix that gRPC has not got yet
  TooLarge ending_;   // a call that ends with the frame that is received; stream 0: none
  std::deque<TooLarge>
      resets_of_grpc_;  // whose SETTINGS gRPC has not confirmed; stream 0: it is over
  std::vector<TooLarge> too_large_;
  int64_t too_large_calls_ = 0;
  // SETTINGS that gRPC has not confirmed, in their order: the door's or the peer's.
  std::deque<bool> unconfirmed_;
  absl::flat_hash_map<uint32_t, Stream> streams_;
  Windows windows_;

  int64_t refilled_ns_;
  Budget tiny_;  // in units of 1/1024 frame
  Budget control_;
  Budget pings_;          // in nanoseconds, min_ping_interval_ns for each ping
  int64_t pings_ns_ = 0;  // when time was last added to it
  Budget resets_;
  int64_t unread_answers_ = 0;
  int64_t asked_ = 0;          // with what calls gave up lately
  int64_t given_up_ = 0;       // in this period
  int64_t given_up_then_ = 0;  // in the period before
  int64_t period_ns_;          // when this one began
  int64_t under_way_ = 0;

  int64_t frames_ = 0;
  int64_t message_bytes_ = 0;
  int64_t opened_ = 0;
  int64_t refused_ = 0;
};

}  // namespace logitd::door

#endif  // LOGITD_SERVER_DOOR_FRAMES_H_
