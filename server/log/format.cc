#include "server/log/format.h"

#include <spdlog/pattern_formatter.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <string_view>
#include <utility>

namespace logitd::log {
namespace {

// Bytes of the UTF-8 character at the start of `text`; 0 if there is none (RFC 3629). Sets `code`.
size_t ReadCharacter(std::string_view text, uint32_t* code) {
  struct Length {
    uint8_t mask, lead;  // of the first byte
    uint32_t least;      // smaller codes have a shorter form, which is the only valid one
  };
  constexpr Length kLengths[] = {
      {0x80, 0x00, 0}, {0xe0, 0xc0, 0x80}, {0xf0, 0xe0, 0x800}, {0xf8, 0xf0, 0x10000}};
  const auto first = static_cast<uint8_t>(text[0]);
  for (size_t bytes = 1; bytes <= std::size(kLengths); ++bytes) {
    const Length& length = kLengths[bytes - 1];
    if ((first & length.mask) != length.lead) continue;
    if (text.size() < bytes) return 0;
    *code = first & ~length.mask;
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

// Characters that end a line or change how a terminal shows it.
bool IsControl(uint32_t code) {
  return code < 0x20 || (code >= 0x7f && code < 0xa0) || code == 0x2028 || code == 0x2029;
}

// %*: the message, escaped.
class Message final : public spdlog::custom_flag_formatter {
 public:
  explicit Message(Format format) : format_(format) {}

  void format(const spdlog::details::log_msg& message, const std::tm&,
              spdlog::memory_buf_t& out) override {
    const std::string_view whole(message.payload.data(), message.payload.size());
    std::string_view text = whole.substr(0, kMaxMessage);
    while (!text.empty()) {
      uint32_t code = 0;
      const size_t bytes = ReadCharacter(text, &code);
      const std::string_view character = text.substr(0, std::max<size_t>(bytes, 1));
      text.remove_prefix(character.size());
      if (bytes == 0 || IsControl(code)) {
        for (const char c : character) {
          fmt::format_to(std::back_inserter(out), "{}\\x{:02x}",
                         format_ == Format::kJson ? "\\" : "", static_cast<uint8_t>(c));
        }
        continue;
      }
      if (format_ == Format::kJson && (code == '"' || code == '\\')) out.push_back('\\');
      out.append(character.data(), character.data() + character.size());
    }
    if (whole.size() > kMaxMessage) {
      fmt::format_to(std::back_inserter(out), "... ({} bytes)", whole.size());
    }
  }

  std::unique_ptr<custom_flag_formatter> clone() const override {
    return std::make_unique<Message>(format_);
  }

 private:
  const Format format_;
};

}  // namespace

std::unique_ptr<spdlog::formatter> MakeFormatter(Format format) {
  auto formatter = std::make_unique<spdlog::pattern_formatter>();
  formatter->add_flag<Message>('*', format)
      .set_pattern(format == Format::kJson
                       ? R"({"time":"%Y-%m-%dT%H:%M:%S.%e%z","level":"%l","message":"%*"})"
                       : "%Y-%m-%d %H:%M:%S.%e %l %*");
  return formatter;
}

}  // namespace logitd::log
