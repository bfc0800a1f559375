// Which way of exchange GPUs use for sharded heads, out of what they can do.
#ifndef LOGITD_KERNELS_CHOOSE_EXCHANGE_H_
#define LOGITD_KERNELS_CHOOSE_EXCHANGE_H_

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/sharded_stream.h"

namespace logitd {

// `peers` and `nccl` say whether the devices can exchange so: OK, or why not. They are asked only
// where `wanted` allows that way, peers first. The result is never kAuto. FAILED_PRECONDITION: no
// way is left, and the text says why for each; INTERNAL: a device has failed.
absl::StatusOr<ShardExchange> ChooseExchange(ShardExchange wanted,
                                             absl::FunctionRef<absl::Status()> peers,
                                             absl::FunctionRef<absl::Status()> nccl);

}  // namespace logitd

#endif  // LOGITD_KERNELS_CHOOSE_EXCHANGE_H_
