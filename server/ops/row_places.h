// How the rows of a job get their places in the arrays of an op.
#ifndef LOGITD_SERVER_OPS_ROW_PLACES_H_
#define LOGITD_SERVER_OPS_ROW_PLACES_H_

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

#include "absl/types/span.h"
#include "server/engine/job.h"

namespace logitd::ops {

// A member of a row that is an index into the arrays of `axis`, counted from the job's first element;
// a negative value means none. With `count`, the row's answers start there, and `count` says how
// many they are.
template <typename Row>
struct RowPlace {
  size_t axis;
  int64_t Row::*first;
  int32_t Row::*count = nullptr;
};

// Lays out the answers of the rows one after another, and counts the elements of their axes.
template <typename Row, size_t N>
void PlaceAnswers(absl::Span<Row> rows, const RowPlace<Row> (&places)[N],
                  engine::AxisCounts* counts) {
  for (const RowPlace<Row>& place : places) {
    if (place.count == nullptr) continue;
    int64_t& next = (*counts)[place.axis];
    for (Row& row : rows) {
      row.*place.first = next;
      next += row.*place.count;
    }
  }
}

// Writes `rows` to their array, with places that count from the batch's first elements.
template <typename Row, size_t N>
void WriteRows(absl::Span<const Row> rows, const RowPlace<Row> (&places)[N],
               const engine::AxisCounts& first, engine::Input<Row> array,
               absl::Span<std::byte* const> inputs) {
  std::byte* to = inputs[array.index];
  for (Row row : rows) {
    for (const RowPlace<Row>& place : places) {
      if (row.*place.first >= 0) row.*place.first += first[place.axis];
    }
    std::memcpy(to, &row, sizeof(row));
    to += sizeof(row);
  }
}

// Writes the values of `list` to their array and frees the list.
template <typename List, typename T>
void MoveOut(List& list, engine::Input<T> array, absl::Span<std::byte* const> inputs) {
  static_assert(sizeof(T) == sizeof(typename List::value_type));
  const List values = std::exchange(list, List());
  if (!values.empty()) std::memcpy(inputs[array.index], values.data(), values.size() * sizeof(T));
}

}  // namespace logitd::ops

#endif  // LOGITD_SERVER_OPS_ROW_PLACES_H_
