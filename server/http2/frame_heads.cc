#include "server/http2/frame_heads.h"

#include <nghttp2/nghttp2.h>

#include <algorithm>
#include <cstring>

namespace logitd::http2 {
namespace {

uint32_t Big(const std::byte* at, size_t bytes) {
  uint32_t value = 0;
  for (size_t i = 0; i < bytes; ++i) value = value << 8 | std::to_integer<uint32_t>(at[i]);
  return value;
}

}  // namespace

bool FrameHeads::Read(const std::byte* head) {
  const uint32_t bytes = Big(head, 3);
  const auto type = std::to_integer<uint8_t>(head[3]);
  const uint32_t stream = Big(head + 5, 4) & 0x7fffffff;
  if (type == NGHTTP2_RST_STREAM && bytes == 4 && stream % 2 == 1 && stream > last_stream_) {
    skip_ = bytes;
    return true;
  }
  if (type == NGHTTP2_HEADERS) last_stream_ = std::max(last_stream_, stream);
  rest_ = bytes;
  return false;
}

absl::Span<const std::byte> FrameHeads::Next(absl::Span<const std::byte>* bytes) {
  if (skip_ > 0) {
    const size_t run = std::min(skip_, bytes->size());
    skip_ -= run;
    bytes->remove_prefix(run);
    return {};
  }
  if (head_bytes_ > 0 || (rest_ == 0 && bytes->size() < kHeadBytes)) {
    const size_t run = std::min(kHeadBytes - head_bytes_, bytes->size());
    std::memcpy(head_.data() + head_bytes_, bytes->data(), run);
    head_bytes_ += run;
    bytes->remove_prefix(run);
    if (head_bytes_ < kHeadBytes) return {};
    head_bytes_ = 0;
    left_out_ = Read(head_.data());
    return left_out_ ? absl::Span<const std::byte>() : absl::MakeConstSpan(head_);
  }
  size_t at = 0;
  while (at < bytes->size()) {
    if (rest_ > 0) {
      const size_t run = std::min(rest_, bytes->size() - at);
      rest_ -= run;
      at += run;
      continue;
    }
    if (bytes->size() - at < kHeadBytes) break;  // kept by the next call
    if (Read(bytes->data() + at)) {
      left_out_ = true;
      const absl::Span<const std::byte> before = bytes->first(at);
      bytes->remove_prefix(at + kHeadBytes);
      return before;
    }
    at += kHeadBytes;
  }
  const absl::Span<const std::byte> all = bytes->first(at);
  bytes->remove_prefix(at);
  return all;
}

}  // namespace logitd::http2
