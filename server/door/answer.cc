#include "server/door/answer.h"

#include <algorithm>
#include <array>

#include "absl/strings/str_cat.h"

namespace logitd::door {
namespace {

constexpr uint8_t kHeaders = 1;
constexpr uint8_t kReset = 3;
constexpr uint8_t kSettings = 4;
constexpr uint8_t kGoAway = 7;
constexpr uint8_t kWindowUpdate = 8;
constexpr uint8_t kEndStream = 1;
constexpr uint8_t kEndHeaders = 4;

// A number whose first byte has `prefix_bits` bits left. The others are 0.
void AppendNumber(size_t number, int prefix_bits, std::string* out) {
  const size_t mask = (size_t{1} << prefix_bits) - 1;
  if (number < mask) {
    out->push_back(static_cast<char>(number));
    return;
  }
  out->push_back(static_cast<char>(mask));
  for (number -= mask; number >= 0x80; number >>= 7) {
    out->push_back(static_cast<char>(0x80 | (number & 0x7f)));
  }
  out->push_back(static_cast<char>(number));
}

void AppendString(std::string_view text, std::string* out) {
  AppendNumber(text.size(), 7, out);
  *out += text;
}

void AppendBytes(uint32_t number, int bytes, std::string* out) {
  while (bytes-- > 0) out->push_back(static_cast<char>(number >> (8 * bytes)));
}

// As a gRPC status text is sent.
std::string PercentEncode(std::string_view text) {
  constexpr char kDigits[] = "0123456789ABCDEF";
  const auto plain = [](char c) { return c >= ' ' && c <= '~' && c != '%'; };
  if (std::all_of(text.begin(), text.end(), plain)) return std::string(text);
  std::string out;
  for (const char c : text) {
    const auto byte = static_cast<uint8_t>(c);
    if (plain(c)) {
      out.push_back(c);
    } else {
      out += {'%', kDigits[byte >> 4], kDigits[byte & 15]};
    }
  }
  return out;
}

}  // namespace

void AppendFrameHead(size_t bytes, uint8_t type, uint8_t flags, uint32_t stream, std::string* out) {
  const std::array<size_t, 9> head = {bytes >> 16,  bytes >> 8,   bytes,       type,  flags,
                                      stream >> 24, stream >> 16, stream >> 8, stream};
  for (const size_t byte : head) out->push_back(static_cast<char>(byte));
}

void AppendField(std::string_view name, std::string_view value, std::string* out) {
  out->push_back('\0');  // a literal that is not added to the table, with its name
  AppendString(name, out);
  AppendString(value, out);
}

std::string EncodeList(const HeaderList& list) {
  std::string out;
  out.reserve(list.bytes());
  for (size_t i = 0; i < list.size(); ++i) AppendField(list[i].name, list[i].value, &out);
  return out;
}

std::string EncodeStatus(int code, std::string_view text) {
  constexpr size_t kRoom = 192;  // with the fields that a caller adds
  std::string out;
  out.reserve(text.size() + kRoom);
  out = "\x88";  // :status 200
  AppendField("content-type", "application/grpc", &out);
  AppendField("grpc-status", absl::StrCat(code), &out);
  AppendField("grpc-message", PercentEncode(text), &out);
  return out;
}

void AppendEnd(uint32_t stream, std::string_view fields, bool ended, std::string* out) {
  AppendFrameHead(fields.size(), kHeaders, kEndHeaders | kEndStream, stream, out);
  *out += fields;
  constexpr uint32_t kNoError = 0;
  if (!ended) AppendReset(stream, kNoError, out);
}

void AppendReset(uint32_t stream, uint32_t why, std::string* out) {
  AppendFrameHead(4, kReset, 0, stream, out);
  AppendBytes(why, 4, out);
}

void AppendGoAway(uint32_t why, std::string_view text, std::string* out) {
  constexpr uint32_t kAnyStream = 0x7fffffff;
  AppendFrameHead(8 + text.size(), kGoAway, 0, 0, out);
  AppendBytes(kAnyStream, 4, out);
  AppendBytes(why, 4, out);
  *out += text;
}

void AppendInitialWindow(uint32_t bytes, std::string* out) {
  constexpr uint32_t kInitialWindowSize = 4;
  AppendFrameHead(6, kSettings, 0, 0, out);
  AppendBytes(kInitialWindowSize, 2, out);
  AppendBytes(bytes, 4, out);
}

void AppendWindowUpdate(uint32_t stream, uint32_t bytes, std::string* out) {
  AppendFrameHead(4, kWindowUpdate, 0, stream, out);
  AppendBytes(bytes, 4, out);
}

}  // namespace logitd::door
