// Linear ops on a head that is cut over CUDA devices, for as many rows at a time as buffers have room
// for:
//
//   every other device   copies hidden states and parameters of rows from the first device; computes
//                        its partial
//   exchange             the first device gets the blocks of all
//   the first            computes its own partial, and merges
//
// One thread enqueues all of it, the first device last, because the others have more to do before
// their product. There are two ways to exchange (ShardExchange):
//
//   kPeers   The kernels of a partial write the block into the first device's memory, and a signal
//            tells it so: no kernel spins. Logits are stored in place of a block for linear_topk and
//            linear_sample while they are few. They go to their place in a matrix of the whole
//            vocabulary, on which the first device runs the op that takes logits. The stores overlap
//            the product, and there are fewer kernels after it.
//   kNccl    Each device writes the block into its own memory, and one all-gather brings all blocks to
//            all devices. The first device packs what the others need of a call, and a copy brings it
//            to each, through the host where there is no other way.
//
// The block is that of kernels/shards.h. For linear_sample this is logits, so where every row needs only
// a few of its first tokens the block has these tokens (linear/kept_sample.cu).
//
// Training has two exchanges. Each device computes pass 1 (linear/training.cu) and writes its sums into
// a block. Every device reads the blocks of all, and makes the gradients of its own tokens. By kPeers a
// copy engine brings d_hidden's part to the first device while the last product runs, by kNccl one
// reduce adds the parts at that time.
//
// A device that fails or hangs holds up no other: the host watches the signals, and where one does not
// come it ends all waits and the collective. The driver may wait for a device when it loads a kernel, so
// a call of a new kind waits on the host before it enqueues what depends on other devices.
//
// The files: shard_devices is how the devices work at the same time, exchange and are waited for,
// shard_inputs what gets to them, sharded_gradients training; here are the other ops.
//
// Measured: bench/results/h100/shards.json. Tried and dropped: blocks in place of logits for 1 to 64
// rows of linear_topk by kPeers (0.97 to 1.43 times as long).
#include "kernels/cuda/sharded_stream.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <type_traits>

#include "absl/functional/function_ref.h"
#include "kernels/cuda/shard_devices.h"
#include "kernels/cuda/shard_inputs.h"
#include "kernels/cuda/sharded_gradients.h"
#include "kernels/cuda/stream.h"
#include "kernels/sharded_stream.h"
#include "kernels/shards.h"
#include "kernels/status_macros.h"

namespace logitd::cuda {
namespace {

// Up to so many bytes of logits, they are exchanged: about 64 rows at a time.
constexpr size_t kFewLogitsBytes = size_t{64} << 20;

class CudaShardedStream final : public ShardedStream {
 public:
  absl::Status Init(absl::Span<Backend* const> backends, const ShardOptions& options) {
    return devices_.Init(backends, options);
  }

  absl::Status Upload(const Slab& slab, size_t offset, size_t bytes) override {
    LOGITD_RETURN_IF_ERROR(devices_.hung());
    return OfShard(0, lead().Upload(slab, offset, bytes));
  }
  absl::Status Download(const Slab& slab, size_t offset, size_t bytes) override {
    LOGITD_RETURN_IF_ERROR(devices_.hung());
    return OfShard(0, lead().Download(slab, offset, bytes));
  }
  absl::Status Fill(const Slab& slab, size_t offset, size_t bytes, std::byte* to) override {
    LOGITD_RETURN_IF_ERROR(devices_.hung());
    return OfShard(0, lead().Fill(slab, offset, bytes, to));
  }
  absl::Status Gather(absl::Span<const RowsCopy> copies) override {
    LOGITD_RETURN_IF_ERROR(devices_.hung());
    return OfShard(0, lead().Gather(copies));
  }
  absl::Status Deliver(std::byte* to, const std::byte* from, size_t bytes) override {
    LOGITD_RETURN_IF_ERROR(devices_.hung());
    return OfShard(0, lead().Deliver(to, from, bytes));
  }

  absl::Status LinearTopK(const LinearTopKArgs& args) override {
    const bool few = AreLogitsFew(args.hidden, args.head);
    return Run({Kind::kTopK, args.hidden, args.head, args.topk.max_k, few ? 1u : 0u}, [&] {
      return few ? OnLogits(args.hidden, args.head, args.topk, &Stream::SoftmaxTopK)
                 : OnTokens<LinearTopKPartialArgs, LinearTopKMergeArgs>(
                       args.hidden, args.head, args.topk.max_k, args.topk,
                       &Stream::LinearTopKPartial, &Stream::LinearTopKMerge);
    });
  }
  absl::Status LinearSample(const LinearSampleArgs& args) override {
    return LinearSampleOfKept(args, 0);
  }
  absl::Status LinearSampleOfKept(const LinearSampleArgs& args, int32_t max_kept) override {
    // Where the vocabulary has no more tokens than that, top_k may be off.
    const bool kept =
        max_kept > 0 && max_kept < args.head.vocab() && !AreLogitsFew(args.hidden, args.head);
    const uint32_t options = (args.sample.edited ? 1u : 0u) + (kept ? 2u : 0u);
    return Run({Kind::kSample, args.hidden, args.head, kept ? max_kept : 0, options}, [&] {
      if (kept) {
        return OnTokens<KeptSamplePartialArgs, KeptSampleMergeArgs>(
            args.hidden, args.head, max_kept, args.sample, &DeviceStream::KeptSamplePartial,
            &DeviceStream::KeptSampleMerge);
      }
      return devices_.by_peers() ? OnLogits(args.hidden, args.head, args.sample, &Stream::Sample)
                                 : RunLinearSample(args);
    });
  }
  absl::Status LinearCrossEntropy(const LinearCrossEntropyArgs& args) override {
    const CrossEntropyArgs& loss = args.cross_entropy;
    const uint32_t options =
        static_cast<uint32_t>(loss.want) * 2 + (loss.max_extra_ids > 0 ? 1u : 0u);
    return Run({Kind::kLosses, args.hidden, args.head, loss.max_top_logprobs, options},
               [&] { return RunLinearCrossEntropy(args); });
  }
  absl::Status ShardedBackward(const ShardedBackwardArgs& args) override {
    LOGITD_RETURN_IF_ERROR(devices_.hung());
    LOGITD_RETURN_IF_ERROR(CheckShardGradients(args.gradient, args.shards, devices_.count()));
    return Backward(args.gradient, args.shards);
  }
  absl::Status ShardedTraining(const ShardedTrainingArgs& args) override {
    LOGITD_RETURN_IF_ERROR(devices_.hung());
    LOGITD_RETURN_IF_ERROR(
        CheckShardGradients(args.training.gradient, args.shards, devices_.count()));
    if (gradients_.TrainingFits(args)) {
      return Run(gradients_.CallOf(Kind::kTraining, args.training.gradient, args.shards),
                 [&] { return IsAbandoned() ? absl::OkStatus() : gradients_.Training(args); });
    }
    LOGITD_RETURN_IF_ERROR(LinearCrossEntropy(args.training.Forward()));
    return Backward(args.training.Backward(), args.shards);
  }

  absl::StatusOr<StreamTimes> Wait() override { return devices_.Wait(); }

 private:
  using Device = ShardDevices::Device;
  using Kind = ShardCall::Kind;

  size_t shards() const { return static_cast<size_t>(devices_.count()); }
  DeviceStream& lead() { return devices_.lead(); }
  DeviceStream& stream(int shard) { return devices_.stream(shard); }
  bool IsAbandoned() const {
    return abandoned() != nullptr && abandoned()->load(std::memory_order_relaxed);
  }

  // Runs a call: enqueue().
  absl::Status Run(const ShardCall& call, absl::FunctionRef<absl::Status()> enqueue) {
    devices_.Begin(call);
    absl::Status status = enqueue();
    if (status.ok() && !IsAbandoned()) devices_.Know(call);
    return status;
  }

  // Ops whose block has the first `max_k` tokens of a row. `args` are those of all rows, without
  // logits.
  template <class PartialArgs, class MergeArgs, class Args, class Partial, class Merge>
  absl::Status OnTokens(const TensorView& hidden, const HeadView& head, int32_t max_k,
                        const Args& args, Partial partial, Merge merge) {
    TopKPartialShape shape = {.shards = devices_.ShardsOf(head), .rows = 1, .max_k = max_k};
    const int64_t step = devices_.RowsAtOnce(shape.bytes() * shards(), hidden);
    for (int64_t first = 0; first < hidden.rows && !IsAbandoned(); first += step) {
      shape.rows = std::min(step, hidden.rows - first);
      const Args part = RowsFrom(args, first);
      const ShardInputs<std::remove_cvref_t<decltype(*part.rows)>> inputs = {
          .hidden = RowsOf(hidden, first, shape.rows), .rows = part.rows};
      LOGITD_RETURN_IF_ERROR(Pack(inputs, devices_));
      LOGITD_RETURN_IF_ERROR(devices_.OnAll([&](int shard) -> absl::Status {
        auto at = inputs;
        LOGITD_RETURN_IF_ERROR(Bring(shard, devices_, at));
        return (stream(shard).*partial)(PartialArgs{.hidden = at.hidden,
                                                    .head = head.shards[shard],
                                                    .shard = shard,
                                                    .shape = shape,
                                                    .rows = at.rows,
                                                    .block = devices_.BlockAt(shape, shard)});
      }));
      LOGITD_RETURN_IF_ERROR(devices_.Exchange(&Device::blocks, shape.bytes()));
      LOGITD_RETURN_IF_ERROR(
          OfShard(0, (lead().*merge)(MergeArgs{shape, devices_.blocks(), part})));
    }
    return absl::OkStatus();
  }

  absl::Status RunLinearSample(const LinearSampleArgs& args) {
    SamplePartialShape shape = {.shards = devices_.ShardsOf(args.head), .rows = 1};
    const int64_t step = devices_.RowsAtOnce(shape.bytes() * shards(), args.hidden);
    for (int64_t first = 0; first < args.hidden.rows && !IsAbandoned(); first += step) {
      shape.rows = std::min(step, args.hidden.rows - first);
      const ShardInputs<std::byte> inputs = {.hidden = RowsOf(args.hidden, first, shape.rows)};
      LOGITD_RETURN_IF_ERROR(Pack(inputs, devices_));
      LOGITD_RETURN_IF_ERROR(devices_.OnAll([&](int shard) -> absl::Status {
        ShardInputs<std::byte> at = inputs;
        LOGITD_RETURN_IF_ERROR(Bring(shard, devices_, at));
        return stream(shard).LinearSamplePartial({.hidden = at.hidden,
                                                  .head = args.head.shards[shard],
                                                  .shard = shard,
                                                  .shape = shape,
                                                  .block = devices_.BlockAt(shape, shard)});
      }));
      LOGITD_RETURN_IF_ERROR(devices_.Exchange(&Device::blocks, shape.bytes()));
      LOGITD_RETURN_IF_ERROR(
          OfShard(0, lead().LinearSampleMerge({.shape = shape,
                                               .blocks = devices_.blocks(),
                                               .sample = RowsFrom(args.sample, first)})));
    }
    return absl::OkStatus();
  }

  absl::Status RunLinearCrossEntropy(const LinearCrossEntropyArgs& args) {
    LossPartialShape shape = {.shards = devices_.ShardsOf(args.head),
                              .rows = 1,
                              .totals = true,  // the host does not read rows
                              .want = args.cross_entropy.want,
                              .max_top = args.cross_entropy.max_top_logprobs,
                              .max_extra = args.cross_entropy.max_extra_ids};
    const int32_t packed_extras = !devices_.by_peers() ? shape.max_extra : 0;
    const int64_t step = devices_.RowsAtOnce(shape.bytes() * shards(), args.hidden, packed_extras);
    for (int64_t first = 0; first < args.hidden.rows && !IsAbandoned(); first += step) {
      shape.rows = std::min(step, args.hidden.rows - first);
      LOGITD_RETURN_IF_ERROR(LossOfRows(RowsOf(args, first, shape.rows), shape));
    }
    return absl::OkStatus();
  }

  static int64_t LogitsStride(const HeadView& head) { return (head.vocab() + 31) / 32 * 32; }
  // Bytes of a row of logits, where they are exchanged.
  static size_t LogitsBytes(const HeadView& head) {
    return static_cast<size_t>(LogitsStride(head)) * sizeof(float);
  }

  // Whether by kPeers logits are exchanged in place of blocks.
  bool AreLogitsFew(const TensorView& hidden, const HeadView& head) const {
    return devices_.by_peers() &&
           static_cast<size_t>(hidden.rows) * LogitsBytes(head) <= kFewLogitsBytes;
  }

  // By kPeers: runs `op`, which takes logits, on the first device. `args` are those of all rows.
  template <class Args>
  absl::Status OnLogits(const TensorView& hidden, const HeadView& head, const Args& args,
                        absl::Status (Stream::*op)(const Args&)) {
    auto* const logits = reinterpret_cast<float*>(devices_.at(0).blocks);
    const int64_t step = devices_.RowsAtOnce(LogitsBytes(head), hidden);
    for (int64_t first = 0; first < hidden.rows && !IsAbandoned(); first += step) {
      const int64_t rows = std::min(step, hidden.rows - first);
      LOGITD_RETURN_IF_ERROR(devices_.OnAll([&](int shard) -> absl::Status {
        ShardInputs<std::byte> at = {.hidden = RowsOf(hidden, first, rows)};
        LOGITD_RETURN_IF_ERROR(Bring(shard, devices_, at));
        return stream(shard).ShardLogits({.hidden = at.hidden,
                                          .head = head.shards[shard],
                                          .shard = shard,
                                          .shards = devices_.ShardsOf(head),
                                          .logits = logits,
                                          .stride = LogitsStride(head)});
      }));
      LOGITD_RETURN_IF_ERROR(devices_.Exchange(&Device::blocks, 0));
      Args part = RowsFrom(args, first);
      part.logits = {logits, DType::kF32, rows, head.vocab(), LogitsStride(head)};
      LOGITD_RETURN_IF_ERROR(OfShard(0, (lead().*op)(part)));
    }
    return absl::OkStatus();
  }

  absl::Status LossOfRows(const LinearCrossEntropyArgs& args, const LossPartialShape& shape) {
    const bool ranks = (shape.want & kWantRank) != 0;
    const CrossEntropyArgs& loss = args.cross_entropy;
    const ShardInputs<CrossEntropyRow> inputs = {
        .hidden = args.hidden,
        .rows = loss.rows,
        .extra_ids = shape.max_extra > 0 ? loss.extra_ids : nullptr,
        .max_extra = shape.max_extra};
    LOGITD_RETURN_IF_ERROR(Pack(inputs, devices_));
    const auto targets_of = [this](int shard) {
      return reinterpret_cast<float*>(devices_.at(shard).targets);
    };
    if (ranks) {
      LOGITD_RETURN_IF_ERROR(devices_.OnAll([&](int shard) -> absl::Status {
        ShardInputs<CrossEntropyRow> at = inputs;
        LOGITD_RETURN_IF_ERROR(Bring(shard, devices_, at));
        return stream(shard).LinearCrossEntropyTargets(
            {.hidden = at.hidden,
             .head = args.head.shards[shard],
             .shard = shard,
             .shards = shape.shards,
             .rows = at.rows,
             .targets = targets_of(shard) + shard * shape.rows});
      }));
      LOGITD_RETURN_IF_ERROR(
          devices_.Exchange(&Device::targets, static_cast<size_t>(shape.rows) * sizeof(float)));
    }
    LOGITD_RETURN_IF_ERROR(devices_.OnAll([&](int shard) -> absl::Status {
      ShardInputs<CrossEntropyRow> at = inputs;
      if (ranks) {  // they are there already
        MoveTo(shard, devices_, at);
      } else {
        LOGITD_RETURN_IF_ERROR(Bring(shard, devices_, at));
      }
      return stream(shard).LinearCrossEntropyPartial(
          {.hidden = at.hidden,
           .head = args.head.shards[shard],
           .shard = shard,
           .shape = shape,
           .rows = at.rows,
           .extra_ids = at.extra_ids,
           .targets = ranks ? targets_of(shard) : nullptr,
           .block = devices_.BlockAt(shape, shard)});
    }));
    LOGITD_RETURN_IF_ERROR(devices_.Exchange(&Device::blocks, shape.bytes()));
    return OfShard(0, lead().LinearCrossEntropyMerge(
                          {.shape = shape, .blocks = devices_.blocks(), .cross_entropy = loss}));
  }

  absl::Status Backward(const LinearCrossEntropyBackwardArgs& args, const ShardGradient* shards) {
    return Run(gradients_.CallOf(Kind::kBackward, args, shards), [&] {
      return IsAbandoned() ? absl::OkStatus() : gradients_.Backward(args, shards);
    });
  }

  ShardDevices devices_;
  ShardedGradients gradients_{&devices_};
};

}  // namespace

absl::StatusOr<std::unique_ptr<ShardedStream>> CreateShardedStream(
    absl::Span<Backend* const> backends, const ShardOptions& options) {
  auto stream = std::make_unique<CudaShardedStream>();
  LOGITD_RETURN_IF_ERROR(stream->Init(backends, options));
  return stream;
}

}  // namespace logitd::cuda
