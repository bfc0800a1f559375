// logitd.v1.DType and the kernels' DType.
#ifndef LOGITD_SERVER_RPC_CODECS_DTYPE_H_
#define LOGITD_SERVER_RPC_CODECS_DTYPE_H_

#include <cstdint>
#include <string_view>

#include "absl/status/status.h"
#include "kernels/types.h"

namespace logitd::rpc {

// `wire`: a logitd.v1.DType. INVALID_ARGUMENT naming `field` and what is allowed.
absl::Status DTypeFromWire(std::string_view field, int32_t wire, DType* dtype);

int32_t DTypeToWire(DType dtype);

}  // namespace logitd::rpc

#endif  // LOGITD_SERVER_RPC_CODECS_DTYPE_H_
