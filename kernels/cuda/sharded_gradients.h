// The gradients of a sharded stream on CUDA devices: the backward of linear_cross_entropy, and
// training.
#ifndef LOGITD_KERNELS_CUDA_SHARDED_GRADIENTS_H_
#define LOGITD_KERNELS_CUDA_SHARDED_GRADIENTS_H_

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "kernels/cuda/linear/shard_training.h"
#include "kernels/cuda/nccl.h"
#include "kernels/cuda/shard_devices.h"
#include "kernels/linear.h"
#include "kernels/sharded_stream.h"

namespace logitd::cuda {

// Used by one thread at a time, the one that uses the devices.
class ShardedGradients {
 public:
  explicit ShardedGradients(ShardDevices* devices) : devices_(*devices) {}

  // The call as the devices know it. The options are the types of the gradients, and whether d_bias
  // is wanted.
  ShardCall CallOf(ShardCall::Kind kind, const LinearCrossEntropyBackwardArgs& args,
                   const ShardGradient* shards) const;

  // Enqueues ShardedStream::ShardedBackward.
  absl::Status Backward(const LinearCrossEntropyBackwardArgs& args, const ShardGradient* shards);

  // Whether all devices can make the logits once, and enqueues ShardedStream::ShardedTraining so.
  bool TrainingFits(const ShardedTrainingArgs& args);
  absl::Status Training(const ShardedTrainingArgs& args);

 private:
  struct Places;

  Places PlacesOf(int shard, const LinearCrossEntropyBackwardArgs& args, bool own_parts);
  float* PartsOf(int shard, const Places& at);
  absl::Status Reserve(const LinearCrossEntropyBackwardArgs& args, bool own_parts);
  absl::Status ReserveMemory(int shard, size_t bytes);
  absl::Status ReserveMover(int shard);

  LinearCrossEntropyBackwardArgs GradientOf(int shard, const Places& at,
                                            const LinearCrossEntropyBackwardArgs& args,
                                            const ShardGradient* shards);
  ShardTrainingArgs TrainingOf(int shard, const ShardedTrainingArgs& args);

  absl::Status Bring(int shard, const Places& at, const LinearCrossEntropyBackwardArgs& args,
                     bool logsumexp);
  cudaError_t MoveHidden(int shard, const MutableTensorView& part, const Places& at);
  absl::Status JoinMover(int shard);
  absl::Status WriteHidden(const float* first, const float* others, int64_t stride,
                           const LinearCrossEntropyBackwardArgs& args);

  ShardDevices& devices_;
  std::vector<NcclGather::Place> parts_;  // of d_hidden, in the last call
};

}  // namespace logitd::cuda

#endif  // LOGITD_KERNELS_CUDA_SHARDED_GRADIENTS_H_
