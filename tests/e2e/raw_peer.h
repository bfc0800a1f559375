// A peer that sends any bytes: HTTP/2 frames that no client library writes.
#ifndef LOGITD_TESTS_E2E_RAW_PEER_H_
#define LOGITD_TESTS_E2E_RAW_PEER_H_

#include <cstdint>
#include <string>
#include <string_view>

#include "absl/time/time.h"
#include "tests/e2e/frames.h"

namespace logitd::e2e {

// The header block of a call, and a field without compression. `more` values follow each other.
std::string CallHeaders(const std::string& method);
std::string Field(std::string_view name, std::string_view value);

// One connection. Sends without reading; the kernel keeps what the server sends.
class RawPeer {
 public:
  // Connects to 127.0.0.1:`port`, sends the preface and empty settings and, if `confirm`, the
  // confirmation of the server's settings.
  explicit RawPeer(int port, bool confirm = true);
  ~RawPeer();
  RawPeer(const RawPeer&) = delete;
  RawPeer& operator=(const RawPeer&) = delete;

  // Sends all of `bytes`. False: the server has ended the connection, or has taken nothing for a
  // second.
  bool Send(std::string_view bytes);
  // Reads until the server ends the connection. False: it did not within `timeout`.
  bool EndsWithin(absl::Duration timeout);
  // Reads until a frame of `type` comes for `stream`. False: it did not within `timeout`. `text`,
  // if not null, gets ServerFrame::text.
  bool Gets(uint8_t type, uint32_t stream, absl::Duration timeout, std::string* text = nullptr);

 private:
  const int fd_;
  FrameReader reader_;
};

}  // namespace logitd::e2e

#endif  // LOGITD_TESTS_E2E_RAW_PEER_H_
