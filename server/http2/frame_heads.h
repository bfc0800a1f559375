// The frames in a connection's bytes, looked at before nghttp2 has them.
//
// gRPC's C core (1.33 to 1.51 do, 1.85 does not) resets a stream that it has not begun when a call
// is cancelled, or its deadline passes, before its header list is sent. RFC 9113 ends the
// connection for that, and so all other calls on it. Such a frame means nothing, and is left out.
#ifndef LOGITD_SERVER_HTTP2_FRAME_HEADS_H_
#define LOGITD_SERVER_HTTP2_FRAME_HEADS_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "absl/types/span.h"

namespace logitd::http2 {

// Not thread-safe.
class FrameHeads {
 public:
  // Takes bytes from the start of `*bytes`, which is not empty, and returns those of them that go
  // on: a part of `*bytes`, or a frame's head that came in pieces. Empty: none of those that were
  // taken.
  absl::Span<const std::byte> Next(absl::Span<const std::byte>* bytes);

  // True: the last Next found a frame to leave out.
  bool TakeLeftOut() { return std::exchange(left_out_, false); }

 private:
  static constexpr size_t kHeadBytes = 9;
  static constexpr size_t kPrefaceBytes = 24;

  // Reads the head of the frame that comes. True: the frame is to be left out.
  bool Read(const std::byte* head);

  size_t rest_ = kPrefaceBytes;  // of the current frame
  size_t skip_ = 0;              // of a frame that is left out
  std::array<std::byte, kHeadBytes> head_;
  size_t head_bytes_ = 0;  // of a head in pieces
  uint32_t last_stream_ = 0;
  bool left_out_ = false;
};

}  // namespace logitd::http2

#endif  // LOGITD_SERVER_HTTP2_FRAME_HEADS_H_
