#include "server/door/call_timeout.h"

namespace logitd::door {

std::optional<int64_t> ParseTimeout(std::string_view text) {
  constexpr size_t kMostDigits = 8;
  if (text.size() < 2 || text.size() > kMostDigits + 1) return std::nullopt;
  int64_t number = 0;
  for (const char c : text.substr(0, text.size() - 1)) {
    if (c < '0' || c > '9') return std::nullopt;
    number = number * 10 + (c - '0');
  }
  switch (text.back()) {
    case 'n':
      return number;
    case 'u':
      return number * 1'000;
    case 'm':
      return number * 1'000'000;
    case 'S':
      return number * 1'000'000'000;
    default:  // minutes and hours: longer than any refusal
      return std::nullopt;
  }
}

}  // namespace logitd::door
