// The parameters of rows as data. Next to each row struct a table says of every value: its name
// on the wire, its place in the row, its value where the caller sends none, and the values allowed.
// The checks here and the codecs of the server go by these tables.
#ifndef LOGITD_KERNELS_ROW_PARAMS_H_
#define LOGITD_KERNELS_ROW_PARAMS_H_

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string_view>
#include <type_traits>
#include <variant>

#include "absl/status/status.h"
#include "absl/types/span.h"

namespace logitd {

enum class LogprobMode : int32_t;
enum class Smoothing : int32_t;

// The values that a parameter may have: finite ones, from `low` to `high`.
struct ParamRange {
  double low = -std::numeric_limits<double>::infinity();
  double high = std::numeric_limits<double>::infinity();
  bool above_low = false;       // `low` itself is refused
  bool below_high = false;      // `high` itself is refused
  bool up_to_vocab = false;     // the vocabulary is an upper bound as well
  std::string_view names = {};  // of the values, where an enum has names for them
};

inline constexpr ParamRange kFinite = {};
inline constexpr ParamRange kZeroOrMore = {.low = 0};
inline constexpr ParamRange kAboveZero = {.low = 0, .above_low = true};

template <typename Row>
struct RowParam {
  using Member = std::variant<float Row::*, int32_t Row::*, uint64_t Row::*, bool Row::*,
                              LogprobMode Row::*, Smoothing Row::*>;
  std::string_view name;
  Member member;
  double default_value;  // outside of `allowed`: the caller must send a value
  ParamRange allowed;
};

template <typename Row>
using RowParams = absl::Span<const RowParam<Row>>;

// INVALID_ARGUMENT: "<name>: got <value> at row <row>, allowed <range>".
absl::Status RefuseParam(std::string_view name, double got, bool is_integer, size_t row,
                         const ParamRange& allowed, int64_t vocab);

// OK where every parameter of every row is allowed, else RefuseParam's status.
template <typename Row>
absl::Status CheckParams(RowParams<Row> params, absl::Span<const Row> rows, int64_t vocab) {
  for (const RowParam<Row>& param : params) {
    const ParamRange& allowed = param.allowed;
    const double high = allowed.up_to_vocab && static_cast<double>(vocab) < allowed.high
                            ? static_cast<double>(vocab)
                            : allowed.high;
    absl::Status status = std::visit(
        [&]<typename T>(T Row::*member) {
          for (size_t r = 0; r < rows.size(); ++r) {
            const auto got = static_cast<double>(rows[r].*member);
            const bool is_inside = (allowed.above_low ? got > allowed.low : got >= allowed.low) &&
                                   (allowed.below_high ? got < high : got <= high);
            if (is_inside && std::isfinite(got)) continue;
            return RefuseParam(param.name, got, !std::is_same_v<T, float>, r, allowed, vocab);
          }
          return absl::OkStatus();
        },
        param.member);
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

}  // namespace logitd

#endif  // LOGITD_KERNELS_ROW_PARAMS_H_
