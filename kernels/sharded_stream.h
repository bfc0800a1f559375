// One stream over several devices, for heads that are cut over them.
#ifndef LOGITD_KERNELS_SHARDED_STREAM_H_
#define LOGITD_KERNELS_SHARDED_STREAM_H_

#include <cstdint>
#include <memory>
#include <optional>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "kernels/backend.h"

namespace logitd {

// How CUDA devices exchange their blocks (kernels/shards.h). The bits are the same. On the CPU all
// devices have the host's memory, and nothing is exchanged.
enum class ShardExchange : uint8_t {
  kAuto,   // kPeers where devices can reach each other's memory, else kNccl
  kPeers,  // kernels store into the memory of the first device
  kNccl,  // NCCL's all-gather, once for each block, and once for the targets of rows that want ranks
};

struct ShardOptions {
  ShardExchange exchange = ShardExchange::kAuto;
  // A device hangs, and is lost, where it ends no part of its work for so long: on CUDA while no other
  // ends one either, on the CPU after another has ended its own.
  absl::Duration hang_after = absl::Seconds(10);
};

// A stream that runs linear_topk, linear_sample and linear_cross_entropy on heads with one shard on
// each of `backends`, in that order. Its slabs and the answers are those of the first device. Each
// op runs the partial on all devices at the same time, gathers the blocks and merges them on the
// first device (kernels/shards.h), 64 MiB of blocks at a time (128 on CUDA). Other ops are
// UNIMPLEMENTED.
//
// A device that fails or hangs does not hold up the others: the op, or on CUDA Wait, ends with the
// status of the first that failed, and FailedShard names it; on CUDA a fault may show in a call for
// another device, which is named then. The answers are unspecified then. INTERNAL and a device that
// hangs: all later calls end with the same status; the memory of the call, the head and the backend
// must stay as long as the device may still use them. UNAVAILABLE: a device was so late that the call
// was given up, but has ended its work after that; or as for any stream.
//
// Holds a stream for each device; on the CPU also a thread for each, on CUDA 136 MiB of the first
// device and 68 MiB of each other, with NCCL 208 MiB of each and what NCCL takes. Errors: those of
// CheckCanShard, and of the devices; UNAVAILABLE: NCCL gives no communicators.
absl::StatusOr<std::unique_ptr<Stream>> CreateShardedStream(absl::Span<Backend* const> backends,
                                                            const ShardOptions& options = {});

// Whether heads may be cut over these devices, and how they exchange then: kAuto on the CPU, else
// kPeers or kNccl. FAILED_PRECONDITION: the devices are of several
// backends, or can exchange nothing in the way that is asked for: they cannot reach each other's
// memory, or NCCL is not there, or is to join a device with itself. The text says why.
// INVALID_ARGUMENT: no device, or more than kMaxShards.
absl::StatusOr<ShardExchange> CheckCanShard(absl::Span<Backend* const> backends,
                                            const ShardOptions& options = {});

// An error of the device with this index in such a stream; OK stays OK.
absl::Status OfShard(int shard, absl::Status status);

// The index of the device that an error of such a stream came from. nullopt: it does not say.
std::optional<int> FailedShard(const absl::Status& status);

}  // namespace logitd

#endif  // LOGITD_KERNELS_SHARDED_STREAM_H_
