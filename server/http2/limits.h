// Limits on what a peer may do on a connection, and hold.
#ifndef LOGITD_SERVER_HTTP2_LIMITS_H_
#define LOGITD_SERVER_HTTP2_LIMITS_H_

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "absl/time/time.h"

namespace logitd::http2 {

// The reason why the server ended a connection before its peer did.
enum class Cut : uint8_t {
  kNone,
  kProtocol,       // frames or header fields that RFC 9113 forbids
  kHeaderList,     // a header list larger than Limits::hard_header_list
  kControlFrames,  // frames that carry nothing, faster than control_rate
  kPings,          // pings faster than min_ping_interval
  kTinyFrames,     // messages in many frames of a few bytes
  kResets,         // streams that the peer cancels, faster than reset_rate
  kUnread,         // it does not take what it asked for
  kKeepalive,      // it did not answer a ping
  kMemory,         // it held most without moving while connections held too much
};

struct CutName {
  Cut cut;
  std::string_view name;  // label of the metric
  std::string_view text;  // for the log
};
inline constexpr auto kCutNames = std::to_array<CutName>({
    {Cut::kProtocol, "protocol", "it broke the protocol"},
    {Cut::kHeaderList, "header_list", "its header list is far larger than advertised"},
    {Cut::kControlFrames, "control_frames", "it sends too many frames that carry nothing"},
    {Cut::kPings, "pings", "it sends pings too often"},
    {Cut::kTinyFrames, "tiny_frames", "it sends messages in tiny frames"},
    {Cut::kResets, "resets", "it cancels too many calls"},
    {Cut::kUnread, "unread_answers", "it does not read what it asks for"},
    {Cut::kKeepalive, "keepalive", "it did not answer a ping"},
    {Cut::kMemory, "memory", "it held most without moving while memory was short"},
});

// The row of a reason other than kNone.
constexpr const CutName& NameOf(Cut cut) { return kCutNames[static_cast<size_t>(cut) - 1]; }

// Honest peers (gRPC in C++, Python, Go, Java and node) stay far below these.
struct Limits {
  // Advertised. A call with a larger list is refused; its bytes are not kept.
  uint32_t max_header_list = 8 << 10;
  // Beyond this the connection ends: reading it costs processor time that others need.
  size_t hard_header_list = size_t{256} << 10;
  uint32_t max_streams = 2048;             // advertised
  uint32_t max_frame = uint32_t{1} << 20;  // advertised: large frames need few reads
  // Body bytes that the peer may send on a stream before more are granted.
  uint32_t early_window = 65535;  // the protocol's own value, so a setting costs no round trip
  // Body bytes of all streams of a connection that came unasked and are still held. The call that
  // exceeds them is refused.
  int64_t max_early_bytes = int64_t{16} << 20;

  // Frames that carry nothing (answers to pings too): all kinds except DATA and HEADERS.
  // control_frames at once, control_rate more each second, four more for each DATA or HEADERS frame
  // in either direction. A SETTINGS frame costs one more for each 16 open streams, since nghttp2
  // visits them all; a header list one for each KiB, since a few bytes can stand for a long one.
  double control_frames = 20000;
  double control_rate = 5000;
  // PING frames that ask: pings at once, one more for each min_ping_interval, and one more for each
  // DATA or HEADERS frame that goes to the peer: clients measure their round trip when one comes.
  double pings = 10;
  absl::Duration min_ping_interval = absl::Seconds(5);
  // DATA frames of less than tiny_frame bytes: tiny_frames, tiny_rate more each second, two more
  // for each message, and one more for each KiB.
  size_t tiny_frame = 256;
  double tiny_frames = 2048;
  double tiny_rate = 1000;
  // Calls that the peer cancels: resets, reset_rate more each second, and one more for each call
  // that was answered.
  double resets = 2048;
  double reset_rate = 500;
  uint32_t unread_acks = 10000;  // PING and SETTINGS frames whose acks the peer does not take
};

// A limit on how often something happens: `most` times at once, `rate` more each second. Not
// thread-safe.
class Budget {
 public:
  Budget(double most, double rate, int64_t now_ns)
      : most_(most), per_ns_(rate * 1e-9), left_(most), at_ns_(now_ns) {}

  // False: it happened too often.
  bool Take(int64_t now_ns, double cost = 1) {
    left_ = std::min(most_, left_ + static_cast<double>(now_ns - at_ns_) * per_ns_);
    at_ns_ = now_ns;
    left_ -= cost;
    return left_ >= 0;
  }
  void Add(double more) { left_ = std::min(most_, left_ + more); }

 private:
  double most_;
  double per_ns_;
  double left_;
  int64_t at_ns_;
};

}  // namespace logitd::http2

#endif  // LOGITD_SERVER_HTTP2_LIMITS_H_
