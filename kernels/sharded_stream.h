// One stream over several devices, for heads that are cut over them.
#ifndef LOGITD_KERNELS_SHARDED_STREAM_H_
#define LOGITD_KERNELS_SHARDED_STREAM_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "kernels/backend.h"
#include "kernels/linear.h"
#include "kernels/types.h"

namespace logitd {

// How CUDA devices exchange their blocks (kernels/shards.h). Both ways give the same bits, except
// those of d_hidden, which NCCL adds in an order of its own. On the CPU all devices have the host's
// memory, and nothing is exchanged.
enum class ShardExchange : uint8_t {
  kAuto,   // kPeers where devices can reach each other's memory, else kNccl
  kPeers,  // kernels store into the memory of the first device; where training makes the logits
           // once, copy engines bring the parts of d_hidden there
  kNccl,   // NCCL's all-gather, once for each block, and once for the targets of rows that want
           // ranks; its reduce for d_hidden
};

struct ShardOptions {
  ShardExchange exchange = ShardExchange::kAuto;
  // A device hangs, and is lost, where it ends no part of its work for this long: on CUDA while no
  // other device ends one either, on the CPU after another device has ended its part.
  absl::Duration hang_after = absl::Seconds(10);
};

// Where the gradients of one shard's weight and bias go: memory of its device.
struct ShardGradient {
  MutableTensorView d_weight;  // [tokens of the shard, hidden], the weight's dtype or f32
  float* d_bias = nullptr;     // [tokens of the shard], or null: not wanted
};

// linear_cross_entropy's backward, and both in one, on a head that is cut over devices. All is as
// in kernels/linear.h and in the memory of the first device, except that d_weight and d_bias of
// `gradient` and `training.gradient` are not looked at: `shards` has them, of each shard.
struct ShardedBackwardArgs {
  LinearCrossEntropyBackwardArgs gradient;
  const ShardGradient* shards = nullptr;  // [gradient.head.shard_count]
};
struct ShardedTrainingArgs {
  LinearCrossEntropyTrainingArgs training;
  const ShardGradient* shards = nullptr;  // [training.gradient.head.shard_count]
};

// A stream that runs linear_topk, linear_sample, linear_verify, linear_cross_entropy and
// linear_divergence on heads with one shard on each of several devices, in their order. Its slabs
// and the answers are those of the first device. Each op runs the partial on all devices at the
// same time, gathers the blocks and merges them on the first device (kernels/shards.h), 64 MiB of
// blocks at a time (128 on CUDA); the blocks of two heads share that. linear_verify with block
// verification makes the logits of rows that do not fit at once anew in each of its passes. One
// head of linear_divergence is cut at least; one that is not is multiplied on the first device.
//
// It also runs the two ops below, which make gradients; others are UNIMPLEMENTED.
//
// A device that fails or hangs does not hold up the others: the op, or on CUDA Wait, ends with the
// status of the first that failed, and FailedShards names it; on CUDA a fault may show in a call
// for another device, which is named then. Where a call on CUDA is given up, Wait ends with its
// status too, because earlier calls may have merged blocks that were not there. The answers are
// unspecified then. INTERNAL and devices that hang, which are all named: all later calls end with
// the same status; the memory of the call, the head and the backend must stay as long as the
// devices may still use them. UNAVAILABLE: a device was so late that the call was given up, but has
// ended its work after that; or as for any stream.
//
// Holds a stream for each device; on the CPU also a thread for each, on CUDA 136 MiB of the first
// device and 68 MiB of each other, with NCCL 208 MiB of each and what NCCL takes. Gradients take
// more, from the first call on that makes some: parts of d_hidden (f32 [rows, hidden]), and on
// CUDA, on every device except the first, the hidden states and parameters of the call. On the CPU
// there is a part for each device. By kPeers the first device has a part for each device, and by
// kNccl each device has one; where training makes the logits once, the first has a part for each of
// the others by kPeers, and none has one by kNccl. RESOURCE_EXHAUSTED: a CUDA device has no room
// for it; on CUDA also a linear_verify of more than 130560 rows.
class ShardedStream : public Stream {
 public:
  // Errors of both: those of CheckShardGradients, before anything is done, and as for any op.
  //
  // Writes the gradients of each shard's weight and bias on its device, and d_hidden on the first:
  // the sum of parts that the devices exchange (kernels/shard_gradients.h says what bits it has; by
  // NCCL they are those of its reduce). All rows of a call run at once.
  virtual absl::Status ShardedBackward(const ShardedBackwardArgs& args) = 0;

  // The same after linear_cross_entropy. On sm_90, under a bf16 head without bias and softcap,
  // where no d_bias is wanted and the rows fit, it makes the logits once as
  // linear_cross_entropy_training does on one device, and the exchange of d_hidden overlaps the
  // last of the three products. The answers have the bits of one device, if the rows fit there too.
  // Else, and on the CPU, it is linear_cross_entropy, with its bits, and then ShardedBackward.
  virtual absl::Status ShardedTraining(const ShardedTrainingArgs& args) = 0;
};

// The check of ShardedBackward and ShardedTraining on `devices` devices: OK, or INVALID_ARGUMENT
// with what is wrong, what it is and what is allowed. `gradient.head` must be cut over the devices.
// Each shard with tokens must have a d_weight of its shape, with rows that do not overlap, in the
// weight's dtype or f32; all of them have a d_bias, or none has. What a shard without tokens has is
// not looked at. Thread-safe.
absl::Status CheckShardGradients(const LinearCrossEntropyBackwardArgs& gradient,
                                 const ShardGradient* shards, int devices);

// `backends`: the devices. Errors: those of CheckCanShard, and of the devices; UNAVAILABLE without
// a shard: NCCL gives no communicators, or streams of these devices cannot wait for each other.
absl::StatusOr<std::unique_ptr<ShardedStream>> CreateShardedStream(
    absl::Span<Backend* const> backends, const ShardOptions& options = {});

// Whether heads may be cut over these devices, and how they exchange then: kAuto on the CPU, else
// kPeers or kNccl. FAILED_PRECONDITION: the devices are of several
// backends, or can exchange nothing in the way that is asked for: they cannot reach each other's
// memory, or NCCL is not there, or is to join a device with itself. The text says why.
// INVALID_ARGUMENT: no device, or more than kMaxShards.
absl::StatusOr<ShardExchange> CheckCanShard(absl::Span<Backend* const> backends,
                                            const ShardOptions& options = {});

// An error of the devices with these indices in such a stream; OK stays OK.
absl::Status OfShards(absl::Span<const int> shards, absl::Status status);
absl::Status OfShard(int shard, absl::Status status);

// The indices of the devices that an error of such a stream came from, the first cause first.
// Empty: it does not say.
std::vector<int> FailedShards(const absl::Status& status);
std::optional<int> FailedShard(const absl::Status& status);  // the first of them

}  // namespace logitd

#endif  // LOGITD_KERNELS_SHARDED_STREAM_H_
