// What the devices of a sharded stream read of a call, and how it gets from the first device to the
// others.
#ifndef LOGITD_KERNELS_CUDA_SHARD_INPUTS_H_
#define LOGITD_KERNELS_CUDA_SHARD_INPUTS_H_

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "kernels/cuda/shard_devices.h"
#include "kernels/types.h"

namespace logitd::cuda {

// Borders of what is packed.
inline size_t ToBorder(size_t bytes) {
  constexpr size_t kBorder = 256;
  return (bytes + kBorder - 1) / kBorder * kBorder;
}

// What a partial reads of a call: hidden states, parameters of as many rows, and the extra ids that
// those name. Null: not wanted. `Row` is SoftmaxTopKRow, SampleRow, CrossEntropyRow, or std::byte where
// there are only hidden states.
template <class Row>
struct ShardInputs {
  TensorView hidden;
  const Row* rows = nullptr;
  const int32_t* extra_ids = nullptr;
  int32_t max_extra = 0;

  size_t stride_bytes() const {
    return static_cast<size_t>(hidden.row_stride) * SizeOf(hidden.dtype);
  }
  size_t hidden_bytes() const {
    return static_cast<size_t>(hidden.rows - 1) * stride_bytes() +
           static_cast<size_t>(hidden.cols) * SizeOf(hidden.dtype);
  }
  size_t row_bytes() const {
    return rows == nullptr ? 0 : static_cast<size_t>(hidden.rows) * sizeof(Row);
  }
  size_t extra_bytes() const {
    return extra_ids == nullptr ? 0 : static_cast<size_t>(hidden.rows * max_extra) * 4;
  }
};

// By kNccl, puts what the other devices copy together on the first device.
template <class Row>
absl::Status Pack(const ShardInputs<Row>& inputs, ShardDevices& devices);

// Brings the inputs to the shard's device, and makes them those that are there. By kNccl they have
// been packed.
template <class Row>
absl::Status Bring(int shard, ShardDevices& devices, ShardInputs<Row>& inputs);

// Makes the inputs those that Bring has brought to the shard's device. By kPeers it reads the extra ids
// where they are.
template <class Row>
void MoveTo(int shard, ShardDevices& devices, ShardInputs<Row>& inputs);

}  // namespace logitd::cuda

#endif  // LOGITD_KERNELS_CUDA_SHARD_INPUTS_H_
