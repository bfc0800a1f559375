// Checks of arguments that several ops share.
#ifndef LOGITD_KERNELS_CHECKS_H_
#define LOGITD_KERNELS_CHECKS_H_

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "kernels/types.h"

namespace logitd {

// OK where `dtype` is one of the enum's values, else INVALID_ARGUMENT with the field.
absl::Status CheckDType(std::string_view field, DType dtype);

// OK where `got` is in [least, most], else INVALID_ARGUMENT with the field and both bounds.
absl::Status CheckRange(std::string_view field, int64_t got, int64_t least, int64_t most);

// The same for a value of row `row`.
absl::Status CheckInt(std::string_view field, size_t row, int64_t got, int64_t least, int64_t most);

// OK where every row is active.
template <typename Row>
absl::Status CheckActive(absl::Span<const Row> rows) {
  for (size_t r = 0; r < rows.size(); ++r) {
    if (rows[r].active != 1) return CheckInt("active", r, rows[r].active, 1, 1);
  }
  return absl::OkStatus();
}

// OK where [first, first + count) is inside [0, size) and count inside [0, most]. An empty slice
// may start anywhere.
absl::Status CheckSlice(std::string_view field, size_t row, int64_t first, int64_t count,
                        int64_t most, size_t size);

// The entries of a slice that CheckSlice let through.
template <typename T>
absl::Span<const T> Slice(absl::Span<const T> all, int64_t first, int64_t count) {
  return count == 0 ? absl::Span<const T>() : all.subspan(first, count);
}

// OK where all are in 0..vocab-1, else INVALID_ARGUMENT with the field, the row and the entry.
absl::Status CheckIds(std::string_view field, size_t row, absl::Span<const int32_t> ids,
                      int64_t vocab);

// A payload that came in: rows of `cols` elements, and the name of `cols` in errors.
struct Payload {
  std::string_view field;
  int64_t bytes;
  int64_t rows;
  std::string_view cols_name;
  int64_t cols;
  DType dtype;
};

// OK where there are rows and as many bytes as they have, else INVALID_ARGUMENT with both.
absl::Status CheckPayload(const Payload& payload);

// The shape of a batch of logits as it came in.
struct LogitsShape {
  DType dtype = DType::kF32;
  int64_t rows = 0;
  int64_t vocab = 0;
  int64_t payload_bytes = 0;  // must be rows * vocab * SizeOf(dtype)
};

// OK, or INVALID_ARGUMENT with the field, the value and what is allowed.
absl::Status CheckLogits(const LogitsShape& shape);

}  // namespace logitd

#endif  // LOGITD_KERNELS_CHECKS_H_
