// HTTP/2 bytes for tests.
#ifndef LOGITD_TESTS_DOOR_BYTES_H_
#define LOGITD_TESTS_DOOR_BYTES_H_

#include <cstdint>
#include <string>
#include <string_view>

#include "absl/types/span.h"

namespace logitd::door {

enum FrameType : uint8_t {
  kData = 0,
  kHeaders = 1,
  kReset = 3,
  kSettings = 4,
  kPing = 6,
  kWindowUpdate = 8,
  kContinuation = 9,
};
inline constexpr uint8_t kAck = 1;
inline constexpr uint8_t kEndStream = 1;
inline constexpr uint8_t kEndHeaders = 4;

inline absl::Span<const uint8_t> Bytes(std::string_view text) {
  return {reinterpret_cast<const uint8_t*>(text.data()), text.size()};
}

inline std::string Preface() { return "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"; }

inline std::string Frame(FrameType type, uint8_t flags, uint32_t stream, std::string_view payload) {
  std::string frame;
  const auto add = [&frame](size_t value, int bytes) {
    for (int i = bytes - 1; i >= 0; --i) frame.push_back(static_cast<char>(value >> (8 * i)));
  };
  add(payload.size(), 3);
  add(type, 1);
  add(flags, 1);
  add(stream, 4);
  frame += payload;
  return frame;
}

// The five bytes before a gRPC message of `bytes`.
inline std::string Prefix(uint32_t bytes) {
  std::string prefix(1, '\0');
  for (int shift = 24; shift >= 0; shift -= 8) prefix.push_back(static_cast<char>(bytes >> shift));
  return prefix;
}

inline std::string Message(size_t bytes) {
  return Prefix(static_cast<uint32_t>(bytes)) + std::string(bytes, 'm');
}

// A call's headers, all from the static table.
inline std::string Open(uint32_t stream) {
  return Frame(kHeaders, kEndHeaders, stream, "\x83\x86\x84");
}

}  // namespace logitd::door

#endif  // LOGITD_TESTS_DOOR_BYTES_H_
