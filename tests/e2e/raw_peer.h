// A peer that sends any bytes: HTTP/2 frames that no client library writes.
#ifndef LOGITD_TESTS_E2E_RAW_PEER_H_
#define LOGITD_TESTS_E2E_RAW_PEER_H_

#include <cstdint>
#include <string>
#include <string_view>

#include "absl/time/time.h"

namespace logitd::e2e {

inline constexpr uint8_t kData = 0;
inline constexpr uint8_t kHeaders = 1;
inline constexpr uint8_t kSettings = 4;
inline constexpr uint8_t kPing = 6;
inline constexpr uint8_t kGoAway = 7;
inline constexpr uint8_t kWindowUpdate = 8;
inline constexpr uint8_t kContinuation = 9;
inline constexpr uint8_t kAck = 1;  // flag of SETTINGS and PING
inline constexpr uint8_t kEndHeaders = 4;

std::string Frame(uint8_t type, uint8_t flags, uint32_t stream, std::string_view payload);

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
  // Reads until a frame of `type` comes for `stream`. False: it did not within `timeout`. `payload`, if
  // not null, gets what the frame holds.
  bool Gets(uint8_t type, uint32_t stream, absl::Duration timeout, std::string* payload = nullptr);

 private:
  int fd_;
};

}  // namespace logitd::e2e

#endif  // LOGITD_TESTS_E2E_RAW_PEER_H_
