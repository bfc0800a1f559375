// HTTP/2 frames: what bare peers write, and what a server sends them.
#ifndef LOGITD_TESTS_E2E_FRAMES_H_
#define LOGITD_TESTS_E2E_FRAMES_H_

#include <nghttp2/nghttp2.h>

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "absl/functional/function_ref.h"
#include "absl/time/time.h"

namespace logitd::e2e {

inline constexpr uint8_t kData = 0;
inline constexpr uint8_t kHeaders = 1;
inline constexpr uint8_t kReset = 3;
inline constexpr uint8_t kSettings = 4;
inline constexpr uint8_t kPing = 6;
inline constexpr uint8_t kGoAway = 7;
inline constexpr uint8_t kWindowUpdate = 8;
inline constexpr uint8_t kContinuation = 9;
inline constexpr uint8_t kAck = 1;  // flag of SETTINGS and PING
inline constexpr uint8_t kEndStream = 1;
inline constexpr uint8_t kEndHeaders = 4;

void AppendBigEndian(std::string* out, uint32_t value, int bytes);
std::string Frame(uint8_t type, uint8_t flags, uint32_t stream, std::string_view payload);

struct ServerFrame {
  uint8_t type;
  uint32_t stream;
  std::string text;  // of HEADERS: a line "name: value" for each field; else the payload
};

// The frames that come on a socket, in their order.
class FrameReader {
 public:
  // `fd` outlives it.
  explicit FrameReader(int fd);

  // Reads until a frame comes that is `wanted`. False: none came within `timeout`, or before the
  // connection's end. Frames before it are gone.
  bool Find(absl::FunctionRef<bool(const ServerFrame&)> wanted, absl::Duration timeout);
  // The server has ended the connection.
  bool ended() const { return ended_; }

 private:
  struct DeleteInflater {
    void operator()(nghttp2_hd_inflater* inflater) const { nghttp2_hd_inflate_del(inflater); }
  };

  // False: a whole frame is not there yet.
  bool TakeFrame(ServerFrame* frame);
  std::string ReadFields(std::string_view block);

  const int fd_;
  std::string bytes_;
  std::unique_ptr<nghttp2_hd_inflater, DeleteInflater> inflater_;
  bool ended_ = false;
};

}  // namespace logitd::e2e

#endif  // LOGITD_TESTS_E2E_FRAMES_H_
