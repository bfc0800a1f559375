// What the devices of a sharded stream read of a call, and how it gets from the first device to the
// others.
#ifndef LOGITD_KERNELS_CUDA_SHARD_INPUTS_H_
#define LOGITD_KERNELS_CUDA_SHARD_INPUTS_H_

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "kernels/cuda/shard_devices.h"
#include "kernels/sharded_ops.h"
#include "kernels/types.h"

namespace logitd::cuda {

// Borders of what is packed.
inline size_t ToBorder(size_t bytes) {
  constexpr size_t kBorder = 256;
  return (bytes + kBorder - 1) / kBorder * kBorder;
}

// Bytes of hidden states; 0: none.
inline size_t HiddenBytes(const TensorView& hidden) {
  if (hidden.data == nullptr) return 0;
  return (static_cast<size_t>(hidden.rows - 1) * static_cast<size_t>(hidden.row_stride) +
          static_cast<size_t>(hidden.cols)) *
         SizeOf(hidden.dtype);
}

// By kNccl, puts what the other devices copy together on the first device.
absl::Status Pack(const ShardInputs& inputs, ShardDevices& devices);

// Brings the inputs to the shard's device, and makes them those that are there. By kNccl they have
// been packed.
absl::Status Bring(int shard, ShardDevices& devices, ShardInputs& inputs);

// Makes the inputs those that Bring has brought to the shard's device. By kPeers it reads the extra
// ids where they are.
void MoveTo(int shard, ShardDevices& devices, ShardInputs& inputs);

}  // namespace logitd::cuda

#endif  // LOGITD_KERNELS_CUDA_SHARD_INPUTS_H_
