// The devices of a sharded stream: how they work at the same time, exchange what they have made,
// and are waited for, though one may fail or hang.
#ifndef LOGITD_KERNELS_CUDA_SHARD_DEVICES_H_
#define LOGITD_KERNELS_CUDA_SHARD_DEVICES_H_

#include <cuda_runtime_api.h>

#include <algorithm>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <set>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "kernels/backend.h"
#include "kernels/cuda/nccl.h"
#include "kernels/cuda/signals.h"
#include "kernels/cuda/stream.h"
#include "kernels/head.h"
#include "kernels/sharded_stream.h"
#include "kernels/shards.h"
#include "kernels/types.h"

namespace logitd::cuda {

// What chooses the kernels of a call, sizes as powers of two.
struct ShardCall {
  enum class Kind : uint8_t {
    kTopK,
    kSample,
    kVerify,
    kLosses,
    kSupports,
    kDivergence,  // one of its inputs; logits are a call too
    kBackward,
    kTraining
  };

  Kind kind;
  DType dtype;
  int64_t vocab;
  int64_t hidden;
  int rows_bits;
  int k_bits;
  bool bias;
  bool norm;
  bool softcap;
  uint32_t options;  // of the kind

  ShardCall(Kind of, const TensorView& states, const HeadView& head, int32_t max_k,
            uint32_t of_kind);
  auto operator<=>(const ShardCall&) const = default;
};

// Used by one thread at a time. The head comment of sharded_stream.cc says how devices exchange.
//
// A part is what a device enqueues of a call between two exchanges. Where a part does not end, the
// host ends all waits and the collective, and the call ends with an error; the contract of
// ShardedStream says with which.
class ShardDevices {
 public:
  // Memory for the blocks of all shards.
  static constexpr size_t kBlockBytes = size_t{128} << 20;
  // Memory for the targets of all shards; on the first device also for linear_verify.
  static constexpr size_t kTargetBytes = kBlockBytes / 16;

  struct Device {
    std::unique_ptr<DeviceStream> stream;
    // What ShardInputs are packed in. By kPeers the first device has none.
    std::byte* inputs = nullptr;
    // Of all shards. By kPeers all devices have those of the first.
    std::byte* blocks = nullptr;  // [kBlockBytes]
    std::byte* targets = nullptr;
    // For gradients, from the first call on that makes some: see sharded_gradients.h.
    Backend* backend = nullptr;
    DeviceMemory gradients;
    cudaStream_t mover = nullptr;  // moves d_hidden
    cudaEvent_t hidden_done = nullptr;
    cudaEvent_t moved = nullptr;
  };
  using Gathered = std::byte* Device::*;

  ShardDevices() = default;
  // Waits for what the devices have, as Wait does. What may still be used by a device that hangs,
  // or by NCCL's joining, is left as it is.
  ~ShardDevices();
  ShardDevices(const ShardDevices&) = delete;
  ShardDevices& operator=(const ShardDevices&) = delete;

  // Once, before all others. Errors: those of CreateShardedStream.
  absl::Status Init(absl::Span<Backend* const> backends, const ShardOptions& options);

  int count() const { return static_cast<int>(devices_.size()); }
  Device& at(int shard) { return devices_[static_cast<size_t>(shard)]; }
  DeviceStream& stream(int shard) { return *at(shard).stream; }
  DeviceStream& lead() { return stream(0); }
  bool by_peers() const { return exchange_ == ShardExchange::kPeers; }
  // Not OK: a device hangs. The answer of all calls then.
  const absl::Status& hung() const { return hung_; }

  VocabShards ShardsOf(const HeadView& head) const {
    return {.vocab = head.vocab(), .count = count()};
  }
  std::byte* blocks() const { return devices_.front().blocks; }  // of all shards
  // Rows that an exchange, and what inputs are packed in, have room for. `row_bytes`: of what is
  // exchanged for a row, by all devices; `hidden_bytes`: of a row's hidden states; `packed_extras`:
  // extra ids of a row that are packed.
  int64_t RowsAtOnce(size_t row_bytes, size_t hidden_bytes, int32_t packed_extras = 0) const;

  // Before and after what enqueues a call, which may be as many as it has heads. One of a new kind
  // may have to load kernels, which may wait for all that a device has: it waits on the host, which
  // knows how to give up.
  void Begin(absl::Span<const ShardCall> calls) {
    waits_on_host_ = std::any_of(calls.begin(), calls.end(),
                                 [this](const ShardCall& call) { return !seen_.contains(call); });
  }
  void Know(absl::Span<const ShardCall> calls) {
    if (waits_on_host_) seen_.insert(calls.begin(), calls.end());
  }

  // Enqueues part(shard) on all devices, after what the first one has so far.
  absl::Status OnAll(absl::FunctionRef<absl::Status(int)> part);
  // What the first device does next has the blocks, or targets, of all devices, each of `bytes`.
  absl::Status Exchange(Gathered gathered, size_t bytes);
  // The first device gets the sum of the arrays at `places`, each of `floats`. By kPeers each is
  // already in a place of its own on the first device, which then only waits.
  absl::Status ExchangeSums(absl::Span<const NcclGather::Place> places, size_t floats);

  // Waits until all devices have ended what they have. Where one does not in time, the waits of all
  // are ended. UNAVAILABLE without a shard: that helped, `why` is what failed. Else the error of a
  // device; INTERNAL, and hung(), where one hangs.
  absl::Status Settle(absl::string_view why);
  // As Stream::Wait.
  absl::StatusOr<StreamTimes> Wait();

 private:
  absl::Status Add(Backend* backend);
  absl::Status ReachFirst(int number);
  absl::Status TrySignals();
  absl::Status EnqueueSignals();
  absl::Status JoinNccl();
  std::vector<int> Numbers();
  void LeaveNccl();
  absl::Status KeepNccl(absl::Status status);
  absl::Status GatherBlocks(Gathered gathered, size_t bytes);

  absl::Status Raise(int signal, DeviceStream& stream);
  absl::Status Await(int signal, DeviceStream& stream);
  absl::StatusOr<StreamTimes> WaitForAll();
  absl::Status WaitFor(int first, int end);
  absl::Status WaitUntil(absl::FunctionRef<bool()> done);
  absl::Status ErrorOf(int shard);
  absl::Status FirstError();
  std::vector<int> Busy();

  absl::Status Stop(const absl::Status& failed);
  absl::Status StopUnless(const absl::Status& waited);
  absl::Status EndAll(const absl::Status& failed);
  std::vector<int> Drain(absl::Duration limit);
  absl::Status Lose(std::vector<int> hung, absl::Duration limit, const absl::Status& failed);

  void Free(int shard);

  static constexpr int kReady = 0;  // the first device's signal; those of others: their parts

  absl::Duration hang_after_;
  std::unique_ptr<Signals> signals_;  // of each device one
  ShardExchange exchange_ = ShardExchange::kPeers;
  std::vector<Device> devices_;
  std::unique_ptr<NcclGather> nccl_;  // null: kPeers
  std::vector<NcclGather::Place> places_;
  absl::Status hung_;
  // Not OK: waits or exchanges of this batch were ended, so what its calls have merged is not
  // whole. The answer of the next Wait.
  absl::Status given_up_;
  // The calls that have been enqueued before: with another, the host waits in place of streams.
  std::set<ShardCall> seen_;
  bool waits_on_host_ = false;
};

}  // namespace logitd::cuda

#endif  // LOGITD_KERNELS_CUDA_SHARD_DEVICES_H_
