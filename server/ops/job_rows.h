// The rows of a job and their lists, which an op describes as a table of columns.
#ifndef LOGITD_SERVER_OPS_JOB_ROWS_H_
#define LOGITD_SERVER_OPS_JOB_ROWS_H_

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <tuple>
#include <utility>

#include "absl/types/span.h"
#include "server/engine/job.h"

namespace logitd::ops {

// A member of a row that is an index into the arrays of `axis`, counted from the job's first
// element; a negative value means none. With `count`, the row's answers start there, and `count`
// says how many they are.
template <typename Row>
struct RowPlace {
  size_t axis;
  int64_t Row::*first;
  int32_t Row::*count = nullptr;
};

// A list of a job and the input array that it fills.
template <typename Lists, typename List, typename T>
struct Column {
  constexpr Column(List Lists::*list, engine::Input<T> array) : list(list), array(array) {}
  List Lists::*list;
  engine::Input<T> array;
};

// A list whose elements have places, or that the answer is read beside. It is not freed.
template <typename Lists, typename List, typename Row>
struct RowColumn : Column<Lists, List, Row> {
  template <size_t N>
  constexpr RowColumn(List Lists::*list, engine::Input<Row> array, const RowPlace<Row> (&places)[N])
      : Column<Lists, List, Row>(list, array), places(places) {}
  constexpr RowColumn(List Lists::*list, engine::Input<Row> array)
      : Column<Lists, List, Row>(list, array) {}
  absl::Span<const RowPlace<Row>> places;
};

// Writes the values of `list` to their array and frees the list.
template <typename List, typename T>
void MoveOut(List& list, engine::Input<T> array, absl::Span<std::byte* const> inputs) {
  static_assert(sizeof(T) == sizeof(typename List::value_type));
  const List values = std::exchange(list, List());
  if (!values.empty()) std::memcpy(inputs[array.index], values.data(), values.size() * sizeof(T));
}

// The lists of a job are a struct `Lists` with
//   static constexpr auto Columns();               a tuple of Column<Lists, ...>
//   void FillHints(engine::JobSpec* spec) const;   sets the hints, and `whole`
// Places in them count from the job's own first elements. They have passed the op's check.

// Fills `spec`, except its deadline. Lays out the answers of the rows one after another.
template <typename Lists>
void FillSpec(Lists& lists, const engine::BatchKey& key, engine::JobSpec* spec) {
  spec->key = key;
  const auto count_and_place = [&](const auto& column) {
    auto& list = lists.*column.list;
    spec->counts[column.array.axis] = static_cast<int64_t>(list.size());
    if constexpr (requires { column.places; }) {
      for (const auto& place : column.places) {
        if (place.count == nullptr) continue;
        int64_t& next = spec->counts[place.axis];
        for (auto& row : list) {
          row.*place.first = next;
          next += row.*place.count;
        }
      }
    }
  };
  std::apply([&](const auto&... column) { (count_and_place(column), ...); }, Lists::Columns());
  lists.FillHints(spec);
  spec->size = engine::SizeOfJob(*spec);
}

// Implements engine::Job::WriteInputs. Frees the lists without places.
template <typename Lists>
void WriteInputs(Lists& lists, absl::Span<std::byte* const> inputs,
                 const engine::AxisCounts& first) {
  const auto write = [&](const auto& column) {
    auto& list = lists.*column.list;
    if constexpr (requires { column.places; }) {
      std::byte* to = inputs[column.array.index];
      for (auto row : list) {
        for (const auto& place : column.places) {
          if (row.*place.first >= 0) row.*place.first += first[place.axis];
        }
        std::memcpy(to, &row, sizeof(row));
        to += sizeof(row);
      }
    } else {
      MoveOut(list, column.array, inputs);
    }
  };
  std::apply([&](const auto&... column) { (write(column), ...); }, Lists::Columns());
}

// The bytes of the lists in memory now.
template <typename Lists>
int64_t BytesOf(const Lists& lists) {
  const auto bytes = [](const auto& list) { return list.size() * sizeof(*list.data()); };
  return static_cast<int64_t>(std::apply(
      [&](const auto&... column) { return (bytes(lists.*column.list) + ...); }, Lists::Columns()));
}

}  // namespace logitd::ops

#endif  // LOGITD_SERVER_OPS_JOB_ROWS_H_
