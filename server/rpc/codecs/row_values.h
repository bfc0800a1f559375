// Values of rows in a message: parameters, with one value for all rows or one for each, and lists,
// whole for all rows or cut into a piece for each.
#ifndef LOGITD_SERVER_RPC_CODECS_ROW_VALUES_H_
#define LOGITD_SERVER_RPC_CODECS_ROW_VALUES_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>
#include <variant>

#include "absl/status/status.h"
#include "absl/strings/str_format.h"
#include "absl/types/span.h"
#include "kernels/row_params.h"
#include "kernels/status_macros.h"
#include "server/rpc/wire/reader.h"

namespace logitd::rpc {

// The numbers of values that a parameter of rows may have.
inline std::string AllowedCounts(int64_t rows, bool required) {
  if (rows == 1) return required ? "1 (rows)" : "none or 1 (rows)";
  return absl::StrFormat("%s1 or %d (rows)", required ? "" : "none, ", rows);
}

// INVALID_ARGUMENT where `values` are neither one for all rows, nor one for each, nor none; and,
// where they are required, for none.
template <typename List>
absl::Status CheckCount(std::string_view name, const List& values, int64_t rows,
                        bool required = false) {
  const auto size = static_cast<int64_t>(values.size());
  if (size == 0 ? !required : size == 1 || size == rows) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrFormat(
      "%s: got %s, allowed %s", name, size == 0 ? "none" : absl::StrFormat("%d values", size),
      AllowedCounts(rows, required)));
}

// The value of row `row`.
template <typename List, typename T>
T ValueAt(const List& values, int64_t row, T default_value) {
  if (values.empty()) return default_value;
  return static_cast<T>(values[values.size() == 1 ? 0 : static_cast<size_t>(row)]);
}

// How values of a member of type T are read.
template <typename T>
using ParamList = std::conditional_t<
    std::is_same_v<T, float>, FloatList,
    std::conditional_t<std::is_same_v<T, uint64_t>, Uint64List,
                       std::conditional_t<std::is_same_v<T, bool>, BoolList, Int32List>>>;

// A list for each of `params`, of its type, empty.
template <typename Row, size_t N>
AnyLists ListsFor(const RowParam<Row> (&params)[N]) {
  static_assert(N <= kMaxParams);
  AnyLists lists(N);
  for (size_t i = 0; i < N; ++i) {
    std::visit([&]<typename T>(T Row::*) { lists[i] = ParamList<T>(); }, params[i].member);
  }
  return lists;
}

// True: the caller must send a value.
template <typename Row>
bool IsRequired(const RowParam<Row>& param) {
  return param.default_value < param.allowed.low;
}

// Writes every parameter of every row: its own value, the one for all rows, or the default. As
// CheckCount; the values are checked by CheckParams.
template <typename Row>
absl::Status FillParams(RowParams<Row> params, const AnyLists& lists, absl::Span<Row> rows) {
  for (size_t i = 0; i < params.size(); ++i) {
    absl::Status status = std::visit(
        [&]<typename T>(T Row::*member) {
          const auto& values = std::get<ParamList<T>>(lists[i]);
          const auto row_count = static_cast<int64_t>(rows.size());
          LOGITD_RETURN_IF_ERROR(
              CheckCount(params[i].name, values, row_count, IsRequired(params[i])));
          for (int64_t r = 0; r < row_count; ++r) {
            rows[r].*member = ValueAt(values, r, static_cast<T>(params[i].default_value));
          }
          return absl::OkStatus();
        },
        params[i].member);
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

// The most values of one list, over all rows: a list that all rows share must not multiply without
// bound.
inline constexpr int64_t kMaxListedValues = int64_t{1} << 24;

// A list of rows: the fields with its values and with their counts, and the rows' members for its
// pieces.
template <typename Row>
struct RowList {
  std::string_view name;
  std::string_view count_name;
  int64_t Row::*first;
  int32_t Row::*count;
};

// Cuts a list of `size` values into the rows' own pieces, or gives it whole to every row. `counts`:
// none, one, or one for each row. INVALID_ARGUMENT: counts that do not add up, or too many values.
template <typename Row>
absl::Status CutList(const RowList<Row>& list, const Int32List& counts, size_t size,
                     absl::Span<Row> rows) {
  const auto total = static_cast<int64_t>(size);
  const auto row_count = static_cast<int64_t>(rows.size());
  LOGITD_RETURN_IF_ERROR(CheckCount(list.count_name, counts, row_count));
  const bool shared = counts.size() <= 1;
  int64_t next = 0;
  for (int64_t r = 0; r < row_count; ++r) {
    const int64_t own = ValueAt(counts, r, total);
    if (own < 0) {
      return absl::InvalidArgumentError(
          absl::StrFormat("%s: got %d at row %d, allowed 0 or more", list.count_name, own, r));
    }
    // A row's count has 32 bits. A count that needs more is over the limit below as well.
    rows[r].*list.first = next;
    rows[r].*list.count = static_cast<int32_t>(std::min(own, kMaxListedValues + 1));
    if (!shared || r + 1 == row_count) next += own;
  }
  if (next != total) {
    return absl::InvalidArgumentError(
        absl::StrFormat("%s: got %d in total, allowed %d, the number of values of %s",
                        list.count_name, next, total, list.name));
  }
  const int64_t listed = shared ? total * row_count : total;
  if (listed > kMaxListedValues) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "%s: got %d values over all rows, allowed 0..%d", list.name, listed, kMaxListedValues));
  }
  return absl::OkStatus();
}

}  // namespace logitd::rpc

#endif  // LOGITD_SERVER_RPC_CODECS_ROW_VALUES_H_
