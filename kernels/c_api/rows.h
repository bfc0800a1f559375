// Rows of an op from the parameters of the C interface: each row is a copy of one row, with values
// of arrays in it, and is refused where one of them is not allowed. Host and device run it.
#ifndef LOGITD_KERNELS_C_API_ROWS_H_
#define LOGITD_KERNELS_C_API_ROWS_H_

#include <cstddef>
#include <cstdint>

#include "kernels/sample.h"
#include "kernels/types.h"

namespace logitd::c_api {

// LOGITD_ROW_REFUSED.
inline constexpr int32_t kRowRefused = 4;

enum class ColumnKind : uint8_t {
  kFloat,   // float[rows] -> float
  kInt32,   // int64_t[rows] -> int32_t, held to its range
  kUint64,  // int64_t[rows] -> uint64_t
  kTarget,  // as kInt32; `ignored` becomes -1
  kTokens,  // int64_t offsets[rows + 1] -> int64_t first, int32_t count, of a list of tokens
  kBias,    // the same for a list of SampleBias
};

// One parameter whose values are in an array.
struct RowColumn {
  const void* each = nullptr;
  ColumnKind kind = ColumnKind::kFloat;
  bool above_low = false;
  bool below_high = false;
  int16_t parameter = 0;       // its number
  int32_t member = 0;          // offset in the row
  int32_t count_member = 0;    // of lists
  double low = 0;              // of lists: values in all
  double high = 0;             // of lists: the most values of a row
  int64_t ignored = 0;         // kTarget
  const void* list = nullptr;  // of lists: the values. Each id is in 0..vocab-1, no value is NaN
};

// A member of the row that is r * step.
struct RowStep {
  int32_t member = 0;
  int64_t step = 0;
};

// Elements of an answer that a refused row gets: `count` of them, of 2 or 4 bytes.
struct RefusedAnswer {
  void* data = nullptr;
  int64_t stride = 0;  // elements, between rows
  int64_t count = 0;
  int32_t bytes = 4;
  uint32_t bits = 0;
};

inline constexpr int kMostColumns = 17;
inline constexpr int kMostSteps = 6;
inline constexpr int kMostAnswers = 16;
inline constexpr int kMostRowBytes = 176;

struct RowFill {
  int64_t rows = 0;
  int64_t vocab = 0;
  std::byte* to = nullptr;  // [rows, row_bytes]
  int32_t row_bytes = 0;
  int32_t columns = 0;
  int32_t steps = 0;
  int32_t answers = 0;
  // Row r has extra[r * extra_count, + extra_count), tokens each in 0..vocab-1.
  const int32_t* extra = nullptr;
  int32_t extra_count = 0;
  int32_t extra_parameter = 0;
  // Not 0: refused unless the int32_t at `least` is at most that at `most`.
  int32_t least_parameter = 0;
  int32_t least = 0;
  int32_t most = 0;
  RowStatus* status = nullptr;  // [rows]; written where a row is refused
  alignas(8) std::byte row[kMostRowBytes];
  RowColumn column[kMostColumns];
  RowStep step[kMostSteps];
  RefusedAnswer answer[kMostAnswers];
};

// Functions are constexpr so that device code may call them, and templates because their casts are
// no constant expressions.
template <class T>
constexpr T& MemberOf(std::byte* row, int32_t offset) {
  return *reinterpret_cast<T*>(row + offset);
}

// NaN is not inside.
constexpr bool IsInside(const RowColumn& column, double got) {
  const bool finite = got - got == 0;
  return finite && (column.above_low ? got > column.low : got >= column.low) &&
         (column.below_high ? got < column.high : got <= column.high);
}

// Writes a value of row r, and tells if it is allowed. Lists: only their border.
template <class Column>
constexpr bool WriteColumn(const Column& column, int64_t r, std::byte* row) {
  const auto* const integers = static_cast<const int64_t*>(column.each);
  switch (column.kind) {
    case ColumnKind::kFloat: {
      const float got = static_cast<const float*>(column.each)[r];
      MemberOf<float>(row, column.member) = got;
      return IsInside(column, got);
    }
    case ColumnKind::kUint64:
      MemberOf<uint64_t>(row, column.member) = static_cast<uint64_t>(integers[r]);
      return true;
    case ColumnKind::kInt32:
    case ColumnKind::kTarget: {
      const int64_t got = integers[r];
      const bool ignored = column.kind == ColumnKind::kTarget && got == column.ignored;
      const int64_t held = got > INT32_MAX ? INT32_MAX : got < INT32_MIN ? INT32_MIN : got;
      MemberOf<int32_t>(row, column.member) = ignored ? -1 : static_cast<int32_t>(held);
      return ignored || IsInside(column, static_cast<double>(held));
    }
    case ColumnKind::kTokens:
    case ColumnKind::kBias: {
      const int64_t first = integers[r];
      const int64_t end = integers[r + 1];
      const bool good = first >= 0 && first <= end && static_cast<double>(end) <= column.low &&
                        static_cast<double>(end - first) <= column.high;
      MemberOf<int64_t>(row, column.member) = first;
      MemberOf<int32_t>(row, column.count_member) = good ? static_cast<int32_t>(end - first) : 0;
      return good;
    }
  }
  return false;
}

// True where value i of a list is allowed.
template <class Column>
constexpr bool IsListed(const Column& column, int64_t i, int64_t vocab) {
  if (column.kind == ColumnKind::kTokens) {
    const int32_t id = static_cast<const int32_t*>(column.list)[i];
    return id >= 0 && id < vocab;
  }
  const SampleBias& bias = static_cast<const SampleBias*>(column.list)[i];
  return bias.id >= 0 && bias.id < vocab && bias.value == bias.value;
}

// Makes row r by `threads` threads, of which this is one. Returns the number of the parameter that
// this thread finds not allowed, or 0. The first thread writes the row.
template <class Fill>
constexpr int32_t MakeRow(const Fill& fill, int64_t r, int thread, int threads) {
  std::byte* const row = fill.to + r * fill.row_bytes;
  int32_t refused = 0;
  if (thread == 0) {
    for (int i = 0; i < fill.row_bytes; i += 8)
      MemberOf<uint64_t>(row, i) = *reinterpret_cast<const uint64_t*>(fill.row + i);
    for (int i = 0; i < fill.steps; ++i)
      MemberOf<int64_t>(row, fill.step[i].member) = r * fill.step[i].step;
  }
  alignas(8) std::byte list[16] = {};
  for (int i = 0; i < fill.columns; ++i) {
    RowColumn column = fill.column[i];
    if (thread == 0 && !WriteColumn(column, r, row)) refused = column.parameter;
    if (column.list == nullptr) continue;
    column.member = 0;
    column.count_member = 8;
    if (!WriteColumn(column, r, list)) continue;  // its border is wrong: the first thread says so
    const int64_t first = MemberOf<int64_t>(list, 0);
    const int32_t count = MemberOf<int32_t>(list, 8);
    for (int32_t j = thread; j < count; j += threads) {
      if (!IsListed(column, first + j, fill.vocab)) refused = column.parameter;
    }
  }
  for (int32_t j = thread; j < fill.extra_count; j += threads) {
    const int32_t id = fill.extra[r * fill.extra_count + j];
    if (id < 0 || id >= fill.vocab) refused = fill.extra_parameter;
  }
  if (thread == 0 && fill.least_parameter != 0 &&
      MemberOf<int32_t>(row, fill.least) > MemberOf<int32_t>(row, fill.most)) {
    refused = fill.least_parameter;
  }
  return refused;
}

// Leaves row r out, and writes the answers of a refused row. As MakeRow, after all its threads.
template <class Fill>
constexpr void RefuseRow(const Fill& fill, int64_t r, int32_t parameter, int thread, int threads) {
  std::byte* const row = fill.to + r * fill.row_bytes;
  for (int i = 8 * thread; i < fill.row_bytes; i += 8 * threads) MemberOf<uint64_t>(row, i) = 0;
  for (int i = 0; i < fill.answers; ++i) {
    const RefusedAnswer& to = fill.answer[i];
    for (int64_t j = thread; j < to.count; j += threads) {
      const int64_t at = r * to.stride + j;
      if (to.bytes == 2) {
        static_cast<uint16_t*>(to.data)[at] = static_cast<uint16_t>(to.bits);
      } else {
        static_cast<uint32_t*>(to.data)[at] = to.bits;
      }
    }
  }
  if (thread == 0) fill.status[r] = {static_cast<RowCode>(kRowRefused), parameter};
}

}  // namespace logitd::c_api

#endif  // LOGITD_KERNELS_C_API_ROWS_H_
