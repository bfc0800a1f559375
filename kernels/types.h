// Types that all ops share: element types, views of tensors, and the status of a row.
#ifndef LOGITD_KERNELS_TYPES_H_
#define LOGITD_KERNELS_TYPES_H_

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace logitd {

// Element type of a tensor. All ops compute in fp32 whatever they are given. A switch over it names
// every type and has no default, so that a new type does not compile until each switch handles it.
enum class DType : uint8_t { kF32, kF16, kBF16 };

// Whether elements are 16 bits wide.
constexpr bool Is16Bit(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return false;
    case DType::kF16:
    case DType::kBF16:
      return true;
  }
  return false;
}

// Bytes of an element.
constexpr size_t SizeOf(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return 4;
    case DType::kF16:
    case DType::kBF16:
      return 2;
  }
  return 0;
}

constexpr std::string_view Name(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return "f32";
    case DType::kF16:
      return "f16";
    case DType::kBF16:
      return "bf16";
  }
  return "unknown";
}

// A matrix in the memory of the backend that runs the op. Owns nothing. `data` needs only the
// alignment of an element.
struct TensorView {
  const void* data = nullptr;
  DType dtype = DType::kF32;
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t row_stride = 0;  // elements, >= cols
  // Rows that lie apart: row r is at row_data[r], and neither `data` nor `row_stride` is used. Only
  // the CPU backend's ops on logits (SoftmaxTopK, Sample, Verify, CrossEntropy, Divergence) take
  // such logits, and RowsOf does not. Null: all rows are in `data`.
  const void* const* row_data = nullptr;
};

inline const std::byte* RowData(const TensorView& view, int64_t r) {
  if (view.row_data != nullptr) return static_cast<const std::byte*>(view.row_data[r]);
  return static_cast<const std::byte*>(view.data) +
         static_cast<size_t>(r * view.row_stride) * SizeOf(view.dtype);
}

// A matrix that is written; otherwise as TensorView.
struct MutableTensorView {
  void* data = nullptr;
  DType dtype = DType::kF32;
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t row_stride = 0;  // elements, >= cols

  operator TensorView() const { return {data, dtype, rows, cols, row_stride, nullptr}; }
};

// Rows [first, first + count) of a TensorView or a MutableTensorView.
template <class View>
View RowsOf(View view, int64_t first, int64_t count) {
  const int64_t offset = first * view.row_stride * static_cast<int64_t>(SizeOf(view.dtype));
  view.data =
      reinterpret_cast<decltype(view.data)>(reinterpret_cast<uintptr_t>(view.data) + offset);
  view.rows = count;
  return view;
}

// Largest vocabulary any op takes.
inline constexpr int64_t kMaxVocab = int64_t{1} << 20;

// sample and verify: a lower temperature acts as this one, so that log2(e) / temperature stays far
// inside f32's range. Only logits less than 1e-33 apart can tell.
inline constexpr float kLeastTemperature = 0x1p-118f;

// The status of one row. A faulty row never affects another.
enum class RowCode : int32_t {
  kOk = 0,
  kNanLogit = 1,      // a logit is NaN; the op says what its other outputs are
  kEmptySupport = 2,  // every logit is -inf, as sent or after masks: there is no distribution
  kNotReached = 3,    // verify: the sequence ended at an earlier row; nothing was drawn
};

struct RowStatus {
  RowCode code = RowCode::kOk;
  int32_t position = -1;  // kNanLogit: the lowest vocabulary index that is NaN; otherwise -1
};

}  // namespace logitd

#endif  // LOGITD_KERNELS_TYPES_H_
