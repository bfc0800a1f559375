// logitd.v1.DType and the kernels' DType.
#ifndef LOGITD_SERVER_RPC_CODECS_DTYPE_H_
#define LOGITD_SERVER_RPC_CODECS_DTYPE_H_

#include <cstdint>
#include <string_view>

#include "absl/status/status.h"
#include "absl/strings/str_format.h"
#include "kernels/types.h"
#include "logitd/v1/types.pb.h"

namespace logitd::rpc {

constexpr int32_t DTypeToWire(DType dtype) { return static_cast<int32_t>(dtype) + v1::DTYPE_F32; }
static_assert(DTypeToWire(DType::kF16) == v1::DTYPE_F16);
static_assert(DTypeToWire(DType::kBF16) == v1::DTYPE_BF16);

// `wire`: a logitd.v1.DType. INVALID_ARGUMENT naming `field` and what is allowed.
inline absl::Status DTypeFromWire(std::string_view field, int32_t wire, DType* dtype) {
  *dtype = static_cast<DType>(wire - v1::DTYPE_F32);
  if (wire >= v1::DTYPE_F32 && wire <= v1::DTYPE_BF16) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrFormat(
      "%s: got %d, allowed DTYPE_F32 (1), DTYPE_F16 (2), DTYPE_BF16 (3)", field, wire));
}

}  // namespace logitd::rpc

#endif  // LOGITD_SERVER_RPC_CODECS_DTYPE_H_
