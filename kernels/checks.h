// Checks of arguments that several ops share.
#ifndef LOGITD_KERNELS_CHECKS_H_
#define LOGITD_KERNELS_CHECKS_H_

#include <cstdint>
#include <string_view>

#include "absl/status/status.h"
#include "kernels/types.h"

namespace logitd {

// OK where `dtype` is one there is, else INVALID_ARGUMENT naming the field.
absl::Status CheckDType(std::string_view field, DType dtype);

// OK where `got` is in [least, most], else INVALID_ARGUMENT naming the field and both.
absl::Status CheckRange(std::string_view field, int64_t got, int64_t least, int64_t most);

// A batch of logits as it came over a border.
struct LogitsShape {
  DType dtype = DType::kF32;
  int64_t rows = 0;
  int64_t vocab = 0;
  int64_t payload_bytes = 0;  // must be rows * vocab * SizeOf(dtype)
};

// OK, or INVALID_ARGUMENT naming the field, the value and what is allowed.
absl::Status CheckLogits(const LogitsShape& shape);

}  // namespace logitd

#endif  // LOGITD_KERNELS_CHECKS_H_
