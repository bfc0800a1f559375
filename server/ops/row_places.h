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

// A slice of an output array: `count` elements of `axis`, from `first` on.
template <typename Row>
struct AnswerSlice {
  int64_t Row::*first;
  int32_t Row::*count;
  size_t axis;
};

// Lays out the slices of the rows one after another, and counts the elements of their axes.
template <typename Row, size_t N>
void PlaceAnswers(absl::Span<Row> rows, const AnswerSlice<Row> (&slices)[N],
                  engine::AxisCounts* counts) {
  for (const AnswerSlice<Row>& slice : slices) {
    int64_t& next = (*counts)[slice.axis];
    for (Row& row : rows) {
      row.*slice.first = next;
      next += row.*slice.count;
    }
  }
}

// A member that is a place in an array, counted from the job's first element of `axis`. A negative
// one stands for no place.
template <typename Row>
struct RowPlace {
  int64_t Row::*first;
  size_t axis;
};

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
