#include "kernels/row_params.h"

#include <algorithm>
#include <string>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace logitd {
namespace {

std::string TextOf(const ParamRange& allowed, bool is_integer, int64_t vocab) {
  if (!allowed.names.empty()) return std::string(allowed.names);
  if (is_integer) {
    const double high =
        allowed.up_to_vocab ? std::min(allowed.high, static_cast<double>(vocab)) : allowed.high;
    if (std::isinf(high)) return absl::StrFormat("%.0f or more", allowed.low);
    return absl::StrFormat("%.0f..%.0f", allowed.low, high);
  }
  std::string text = std::isfinite(allowed.high) ? "" : "finite";
  if (std::isfinite(allowed.low)) {
    absl::StrAppend(&text, text.empty() ? "" : " and ",
                    allowed.above_low ? "> " : ">= ", allowed.low);
  }
  if (std::isfinite(allowed.high)) {
    absl::StrAppend(&text, " and ", allowed.below_high ? "< " : "<= ", allowed.high);
  }
  return text;
}

}  // namespace

absl::Status RefuseParam(std::string_view name, double got, bool is_integer, size_t row,
                         const ParamRange& allowed, int64_t vocab) {
  std::string value = is_integer ? absl::StrFormat("%.0f", got) : absl::StrFormat("%g", got);
  float shown;  // six digits may show a value beyond a bound as the bound
  if (!is_integer && absl::SimpleAtof(value, &shown) && shown != static_cast<float>(got)) {
    value = absl::StrFormat("%.9g", got);
  }
  return absl::InvalidArgumentError(absl::StrFormat("%s: got %s at row %d, allowed %s", name, value,
                                                    row, TextOf(allowed, is_integer, vocab)));
}

}  // namespace logitd
