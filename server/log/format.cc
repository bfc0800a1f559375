#include "server/log/format.h"

#include <spdlog/pattern_formatter.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <string_view>
#include <utility>

#include "formats/utf8.h"

namespace logitd::log {
namespace {

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
      const size_t bytes = formats::ReadUtf8(text, &code);
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
