#include "server/rpc/codecs/dtype.h"

#include "absl/strings/str_format.h"
#include "logitd/v1/types.pb.h"

namespace logitd::rpc {
namespace {

constexpr DType kDTypes[] = {DType::kF32, DType::kF16, DType::kBF16};

}  // namespace

int32_t DTypeToWire(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return v1::DTYPE_F32;
    case DType::kF16:
      return v1::DTYPE_F16;
    case DType::kBF16:
      return v1::DTYPE_BF16;
  }
  return v1::DTYPE_UNSPECIFIED;
}

absl::Status DTypeFromWire(std::string_view field, int32_t wire, DType* dtype) {
  for (const DType candidate : kDTypes) {
    if (DTypeToWire(candidate) != wire) continue;
    *dtype = candidate;
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrFormat(
      "%s: got %d, allowed DTYPE_F32 (1), DTYPE_F16 (2), DTYPE_BF16 (3)", field, wire));
}

}  // namespace logitd::rpc
