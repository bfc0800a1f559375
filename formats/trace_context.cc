#include "formats/trace_context.h"

#include <algorithm>
#include <cstddef>

namespace logitd::formats {
namespace {

constexpr size_t kMaxLength = 128;

// Lower case: an upper-case traceparent is malformed.
bool IsHex(std::string_view text) {
  return std::all_of(text.begin(), text.end(),
                     [](char c) { return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f'); });
}

bool IsZero(std::string_view text) {
  return std::all_of(text.begin(), text.end(), [](char c) { return c == '0'; });
}

}  // namespace

bool IsRequestId(std::string_view text) {
  return !text.empty() && text.size() <= kMaxLength &&
         std::all_of(text.begin(), text.end(), [](char c) { return c > ' ' && c <= '~'; });
}

bool IsTraceparent(std::string_view text) {
  // "00-" trace of 32 digits "-" parent of 16 "-" flags of 2
  constexpr size_t kLength = 55;
  if (text.size() < kLength || text.size() > kMaxLength) return false;
  const std::string_view version = text.substr(0, 2);
  const std::string_view trace = text.substr(3, 32);
  const std::string_view parent = text.substr(36, 16);
  const std::string_view flags = text.substr(53, 2);
  if (text[2] != '-' || text[35] != '-' || text[52] != '-') return false;
  if (!IsHex(version) || version == "ff" || !IsHex(trace) || !IsHex(parent) || !IsHex(flags)) {
    return false;
  }
  if (IsZero(trace) || IsZero(parent)) return false;
  if (text.size() == kLength) return true;
  return version != "00" && text[kLength] == '-' && IsRequestId(text);
}

}  // namespace logitd::formats
