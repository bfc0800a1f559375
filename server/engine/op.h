// An op as the engine sees it: the sizes of its arrays, and how a slice of a batch runs. The engine
// never knows what an op means.
#ifndef LOGITD_SERVER_ENGINE_OP_H_
#define LOGITD_SERVER_ENGINE_OP_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "kernels/backend.h"
#include "kernels/types.h"

namespace logitd::engine {

// An axis is what an op's arrays have elements for: axis 0 is the rows; the others (answers, ids of
// lists, words of masks, ...) are the op's own.
inline constexpr size_t kRowAxis = 0;
inline constexpr size_t kMaxAxes = 12;
inline constexpr size_t kMaxArrays = 16;  // inputs of an op, or outputs

// A number for each axis: of elements, or of the first element. Axes that an op does not have are
// 0.
using AxisCounts = std::array<int64_t, kMaxAxes>;

// One array of an op: so many bytes for each element of an axis.
struct Array {
  size_t axis;
  size_t bytes;
};

// An array with a T for each element of `axis`: number `index` of OpTraits::inputs, or of
// OpTraits::outputs.
template <typename T>
struct Input {
  size_t index;
  size_t axis;
};
template <typename T>
struct Output {
  size_t index;
  size_t axis;
};

// The OpTraits::inputs, or outputs, of typed arrays, which must come in the order of their index.
template <template <typename> typename Kind, typename... T>
consteval std::array<Array, sizeof...(T)> ArraysOf(Kind<T>... typed) {
  static_assert(sizeof...(T) <= kMaxArrays);
  size_t next = 0;
  (([&] {
     if (typed.index != next++ || typed.axis >= kMaxAxes) throw "an index or axis is wrong";
   }()),
   ...);
  return {{{typed.axis, sizeof(T)}...}};
}

// A slice of a batch as an op sees it, in the memory of the backend: some of its rows, often all.
// Row r of the payload starts at payload + r * row_stride. Payload and arrays of kRowAxis start at
// the slice's first row. Arrays of other axes are those of the whole batch.
struct BatchView {
  DType dtype;
  AxisCounts counts;  // rows: of the slice; others: of the batch
  int64_t first_row;  // the slice's first row, counted from the batch's
  int64_t row_elements;
  size_t
      row_stride;  // bytes: a multiple of 16; of logits or scores of an exclusive op exactly a row
  const std::byte* payload;
  const void* const*
      row_data;             // where the payload's rows lie apart: row r is row_data[r]; else null
  int32_t max_row_entries;  // the largest JobSpec::max_row_entries
  uint32_t wanted;          // the bits of every JobSpec::wanted
  absl::Span<std::byte* const> inputs;   // one per OpTraits::inputs, each 16-byte aligned
  absl::Span<std::byte* const> outputs;  // one per OpTraits::outputs, each 16-byte aligned
  const HeadView* head;                  // that of BatchKey::head; null where there is none
  const HeadView* reference_head;        // likewise

  int64_t rows() const { return counts[kRowAxis]; }

  // The payload as a matrix.
  TensorView Payload() const {
    return {.data = payload,
            .dtype = dtype,
            .rows = rows(),
            .cols = row_elements,
            .row_stride = static_cast<int64_t>(row_stride / SizeOf(dtype)),
            .row_data = row_data};
  }

  // An array; null where the batch has no element for it.
  template <typename T>
  const T* In(Input<T> array) const {
    return counts[array.axis] == 0 ? nullptr : reinterpret_cast<const T*>(inputs[array.index]);
  }
  template <typename T>
  T* Out(Output<T> array) const {
    return counts[array.axis] == 0 ? nullptr : reinterpret_cast<T*>(outputs[array.index]);
  }
};

// How an op travels through the engine. One static object per op, compared by address.
struct OpTraits {
  std::string_view name;            // label in metrics and logs; variants of an op share it
  absl::Span<const Array> inputs;   // besides the payload; a row of zero bytes = skip the row
  absl::Span<const Array> outputs;  // in the order in which the job gets them back
  // Null where the op is exclusive: JobSpec::call has it.
  absl::Status (*enqueue)(Stream& stream, const BatchView& batch) = nullptr;
  // A batch holds one job: for ops whose jobs have more parameters (shapes, masks) than rows can
  // hold, and are large enough to fill a device. Its rows lie without padding, except hidden
  // states, and only bytes bound their number.
  bool exclusive_batch = false;
  // On the host its rows may lie apart, so that it reads them where they came in: for ops on
  // logits, whose rows are long. See TensorView::row_data.
  bool rows_apart = false;
};

// The parameters of a job of an exclusive op as a whole.
class ExclusiveCall {
 public:
  virtual ~ExclusiveCall() = default;

  // Does what OpTraits::enqueue does. Where the rows may be cut, it shifts arrays of axes that
  // follow the rows by BatchView::first_row.
  virtual absl::Status Enqueue(Stream& stream, const BatchView& batch) const = 0;
};

}  // namespace logitd::engine

#endif  // LOGITD_SERVER_ENGINE_OP_H_
