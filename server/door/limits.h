// What a connection may send. Each limit has a name, which the metric and the log use.
#ifndef LOGITD_SERVER_DOOR_LIMITS_H_
#define LOGITD_SERVER_DOOR_LIMITS_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string_view>

namespace logitd::door {

// Why a connection was cut.
enum class Limit {
  kNone,
  kHeaderList,     // a header list larger than max_header_list, or max_split_list in several frames
  kHeaderBlock,    // a header list that takes more than max_header_block bytes on the wire
  kContinuations,  // a header list in more than max_continuations CONTINUATION frames
  kHeaderFormat,   // a header list that no encoder sends
  kStreams,        // more than max_streams open streams
  kTinyFrames,     // messages in many frames of a few bytes
  kControlFrames,  // frames that carry nothing, faster than control_rate
  kPings,          // pings, faster than one in min_ping_interval_ns
  kResets,         // streams that the peer cancels, faster than reset_rate
  kUnreadAnswers,  // PING and SETTINGS frames whose confirmations the peer does not take
  kUnasked,        // message bytes beyond what calls asked for
  kMemory,         // the largest sender while the process had too much memory
};

struct LimitName {
  Limit limit;
  std::string_view name;
  std::string_view text;
};
inline constexpr auto kLimitNames = std::to_array<LimitName>({
    {Limit::kHeaderList, "header_list", "its header list is larger than advertised"},
    {Limit::kHeaderBlock, "header_block", "its header list takes too many bytes"},
    {Limit::kContinuations, "continuations", "its header list is in too many frames"},
    {Limit::kHeaderFormat, "header_format", "its header list is malformed"},
    {Limit::kStreams, "streams", "it has too many open calls"},
    {Limit::kTinyFrames, "tiny_frames", "it sends messages in tiny frames"},
    {Limit::kControlFrames, "control_frames", "it sends too many frames that carry nothing"},
    {Limit::kPings, "pings", "it pings too often"},
    {Limit::kResets, "resets", "it cancels too many calls"},
    {Limit::kUnreadAnswers, "unread_answers", "it does not read what it asks for"},
    {Limit::kUnasked, "unasked", "it sends messages larger than it said"},
    {Limit::kMemory, "memory", "it sent most while memory was short"},
});

// The row of a limit; `limit` is not kNone.
constexpr const LimitName& NameOf(Limit limit) {
  return kLimitNames[static_cast<size_t>(limit) - 1];
}

// Honest peers (gRPC in C++, Python, Go, Java and node) stay far below these.
struct FrameLimits {
  // gRPC advertises 8 KiB of header list and refuses more itself, except for lists in several
  // frames and before the peer has confirmed the setting. An honest list of 8 KiB fits one frame.
  // Base64 makes a binary value that gRPC counts as 8 KiB up to a third larger.
  size_t max_header_list = size_t{12} << 10;
  size_t max_split_list = size_t{8} << 10;
  // A list of 8 KiB in the worst Huffman code takes 30 KiB.
  size_t max_header_block = size_t{32} << 10;
  int max_continuations = 4;

  // Advertised. A call that has ended here may still be open there, so the cut comes later.
  int max_streams = 2048;
  int streams_slack = 512;

  // A frame costs gRPC about frame_cost bytes beside its payload. A DATA frame below tiny_frame
  // bytes is tiny if it is neither the first nor the second of its message, or is empty and does
  // not end its stream, or comes after unread_frames frames that did not move HTTP/2's window (a
  // window of 64 KiB then costs at most twice that). There may be tiny_frames of them, one more for
  // each KiB of payload, and tiny_rate more each second.
  int64_t frame_cost = 64;
  size_t tiny_frame = 256;
  uint32_t unread_frames = 1024;
  int64_t tiny_frames = 2048;
  int64_t tiny_rate = 1000;

  // A message may have so many bytes. The call of a larger one ends where its length is read.
  uint32_t max_message = std::numeric_limits<uint32_t>::max();

  // PING, SETTINGS, PRIORITY, WINDOW_UPDATE, GOAWAY and unknown frames: control_frames, control_rate
  // more each second, and four more for each DATA or HEADERS frame in either direction.
  int64_t control_frames = 20000;
  int64_t control_rate = 5000;
  // PING frames that ask: pings at once, one more after each min_ping_interval_ns (0: any number), and
  // one more for each DATA or HEADERS frame that goes to the peer. Clients that measure their round trip
  // ping when such a frame comes; others ping at an interval to learn that the server is there.
  int64_t pings = 10;
  int64_t min_ping_interval_ns = 5'000'000'000;
  // Calls that the peer cancels before they end: resets, reset_rate more each second, and one more for
  // each call that was answered or refused. Each costs gRPC processor time that others wait for. A
  // call whose timeout is over does not count: it ends here at the same time.
  int64_t resets = 2048;
  int64_t reset_rate = 500;
  int64_t unread_answers = 10000;

  // Bytes of messages under way beyond what calls asked for: 64 KiB for each open stream, which is
  // HTTP/2's window, and unasked_slack.
  int64_t unasked_stream = int64_t{64} << 10;
  int64_t unasked_slack = int64_t{1} << 20;
};

}  // namespace logitd::door

#endif  // LOGITD_SERVER_DOOR_LIMITS_H_
