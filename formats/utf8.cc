#include "formats/utf8.h"

#include <iterator>

namespace logitd::formats {
namespace {

struct Length {
  uint8_t mask, lead;  // of the first byte
  uint32_t least;      // smaller numbers have a shorter form, which is the only valid one
};
constexpr Length kLengths[] = {
    {0x80, 0x00, 0}, {0xe0, 0xc0, 0x80}, {0xf0, 0xe0, 0x800}, {0xf8, 0xf0, 0x10000}};

}  // namespace

size_t ReadUtf8(std::string_view text, uint32_t* code) {
  const auto first = static_cast<uint8_t>(text[0]);
  for (size_t bytes = 1; bytes <= std::size(kLengths); ++bytes) {
    const Length& length = kLengths[bytes - 1];
    if ((first & length.mask) != length.lead) continue;
    if (text.size() < bytes) return 0;
    *code = first & static_cast<uint8_t>(~length.mask);
    for (size_t i = 1; i < bytes; ++i) {
      const auto next = static_cast<uint8_t>(text[i]);
      if ((next & 0xc0) != 0x80) return 0;
      *code = *code << 6 | (next & 0x3f);
    }
    const bool surrogate = *code >= 0xd800 && *code < 0xe000;
    return *code < length.least || *code > 0x10ffff || surrogate ? 0 : bytes;
  }
  return 0;
}

bool IsUtf8(std::string_view text) {
  uint32_t code = 0;
  while (!text.empty()) {
    const size_t bytes = ReadUtf8(text, &code);
    if (bytes == 0) return false;
    text.remove_prefix(bytes);
  }
  return true;
}

}  // namespace logitd::formats
