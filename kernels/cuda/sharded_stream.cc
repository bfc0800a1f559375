// Linear ops on a head that is cut over CUDA devices, for as many rows at a time as buffers have
// room for:
//
//   every other device   copies hidden states and parameters of rows from the first device;
//                        computes its partial
//   exchange             the first device gets the blocks of all
//   the first            computes its own partial, and merges
//
// One thread enqueues all of it, the first device last, because the others have more to do before
// their product. There are two ways to exchange (ShardExchange):
//
//   kPeers   The kernels of a partial write the block into the first device's memory, and a signal
//            tells it so: no kernel spins. Logits are stored in place of a block for linear_topk
//            while they are few, and where a block is logits. They go to their place in a matrix of
//            the whole vocabulary, on which the first device runs the op that takes logits. The
//            stores overlap the product, and there are fewer kernels after it.
//   kNccl    Each device writes the block into its own memory, and one all-gather brings all blocks
//            to all devices. The first device packs what the others need of a call, and a copy
//            brings it to each, through the host where there is no other way.
//
// The block is that of kernels/shards.h. For linear_sample this is logits, so where every row needs
// only a few of its first tokens the block has these tokens (linear/kept_sample.cu).
//
// Training has two exchanges. Each device computes pass 1 (linear/training.cu) and writes its sums
// into a block. Every device reads the blocks of all, and makes the gradients of its own tokens. By
// kPeers a copy engine brings d_hidden's part to the first device while the last product runs, by
// kNccl one reduce adds the parts at that time.
//
// A device that fails or hangs holds up no other: the host watches the signals, and where one does
// not come it ends all waits and the collective. The driver may wait for a device when it loads a
// kernel, so a call of a new kind waits on the host before it enqueues what depends on other
// devices.
//
// The files: shard_devices is how the devices work at the same time, exchange and are waited for,
// shard_inputs what gets to them, sharded_gradients training; here are the other ops.
//
// Measured: bench/results/h100/shards.json. Tried and dropped: blocks in place of logits for 1 to
// 64 rows of linear_topk by kPeers (0.97 to 1.43 times as long).
#include "kernels/cuda/sharded_stream.h"

#include <algorithm>
#include <cstdint>
#include <memory>

#include "absl/container/inlined_vector.h"
#include "absl/functional/function_ref.h"
#include "absl/strings/str_format.h"
#include "absl/types/span.h"
#include "kernels/cuda/shard_devices.h"
#include "kernels/cuda/shard_inputs.h"
#include "kernels/cuda/sharded_gradients.h"
#include "kernels/cuda/stream.h"
#include "kernels/sharded_ops.h"
#include "kernels/sharded_stream.h"
#include "kernels/shards.h"
#include "kernels/status_macros.h"

namespace logitd::cuda {
namespace {

// Up to so many bytes of logits, they are exchanged: about 64 rows at a time.
constexpr size_t kFewLogitsBytes = size_t{64} << 20;

class CudaShardedStream final : public ShardedOps {
 public:
  absl::Status Init(absl::Span<Backend* const> backends, const ShardOptions& options) {
    return devices_.Init(backends, options);
  }

  absl::Status RunOp(const Op& op) override {
    return RunIfKnown(
        op, Overloaded{[this](const LinearTopKArgs& args) { return TopKOf(args); },
                       [this](const LinearSampleArgs& args) { return SampleOf(args); },
                       [this](const LinearVerifyArgs& args) { return VerifyOf(args); },
                       [this](const LinearCrossEntropyArgs& args) { return LossesOf(args); },
                       [this](const LinearDivergenceArgs& args) { return DivergenceOf(args); }});
  }
  absl::StatusOr<StreamTimes> Wait() override { return devices_.Wait(); }

 private:
  using Device = ShardDevices::Device;
  using Kind = ShardCall::Kind;

  Stream& lead() override { return devices_.lead(); }
  int count() const override { return devices_.count(); }
  const absl::Status& hung() const override { return devices_.hung(); }
  std::byte* blocks() const override { return devices_.blocks(); }

  int64_t RowsAtOnce(size_t row_bytes, const ShardInputs& inputs) override {
    const auto row = [](const TensorView& hidden) {
      return static_cast<size_t>(hidden.row_stride) * SizeOf(hidden.dtype);
    };
    return devices_.RowsAtOnce(row_bytes, row(inputs.hidden) + row(inputs.second_hidden),
                               devices_.by_peers() ? 0 : inputs.max_extra);
  }
  absl::Status BeginStep(const ShardInputs& inputs, size_t) override {
    return Pack(inputs, devices_);
  }
  absl::Status OnAll(const ShardInputs& inputs, bool again, const Part& part) override {
    return devices_.OnAll([&](int shard) -> absl::Status {
      ShardPlace at = {devices_.stream(shard), shard, inputs, devices_.at(shard).blocks,
                       reinterpret_cast<float*>(devices_.at(shard).targets)};
      if (again) {
        MoveTo(shard, devices_, at.inputs);
      } else {
        LOGITD_RETURN_IF_ERROR(Bring(shard, devices_, at.inputs));
      }
      return part(at);
    });
  }
  absl::Status ExchangeBlocks(size_t bytes) override {
    return devices_.Exchange(&Device::blocks, bytes);
  }
  absl::Status ExchangeTargets(size_t bytes) override {
    return devices_.Exchange(&Device::targets, bytes);
  }

  // Targets are not exchanged meanwhile.
  absl::StatusOr<std::byte*> VerifyState(int64_t rows) override {
    if (VerifyStateBytes(rows) <= ShardDevices::kTargetBytes) return devices_.at(0).targets;
    return absl::ResourceExhaustedError(absl::StrFormat(
        "rows: got %d, allowed 1..%d of one linear_verify on a head that is cut over the devices",
        rows,
        (ShardDevices::kTargetBytes - VerifyStateBytes(0)) /
            (VerifyStateBytes(1) - VerifyStateBytes(0))));
  }
  int VerifyPasses(const VerifyArgs& verify) const override {
    return VerifyMergePasses(verify, /*is_host=*/false);
  }

  // By kPeers the logits of a head are a matrix of the first device.
  size_t LogitsBytes(const StatesList& states) const override {
    if (!devices_.by_peers()) return ShardedOps::LogitsBytes(states);
    return states.size() * LogitsRowBytes(states.front().head);
  }
  absl::StatusOr<ExchangedLogits> ExchangeLogits(const StatesList& states) override {
    if (!devices_.by_peers()) return ShardedOps::ExchangeLogits(states);
    const HeadView& head = states.front().head;
    const int64_t rows = states.front().hidden.rows;
    const int64_t stride = LogitsStride(head);
    const size_t matrix_bytes = ToBorder(static_cast<size_t>(rows) * LogitsRowBytes(head));
    ExchangedLogits to = {.shape = {.shards = ShardsOf(head), .rows = rows}};
    for (size_t i = 0; i < states.size(); ++i)
      to.whole[i] = {blocks() + i * matrix_bytes, DType::kF32, rows, head.vocab(), stride};
    // Whole heads are the first device's part.
    LOGITD_RETURN_IF_ERROR(OnAll(InputsOf(states), /*again=*/false, [&](const ShardPlace& at) {
      bool is_second = false;
      for (size_t i = 0; i < states.size(); ++i) {
        const HeadStates& of = states[i];
        const bool is_whole = of.head.shards == nullptr;
        if (is_whole && at.shard > 0) continue;
        ShardLogitsArgs part = {.hidden = of.hidden,
                                .head = is_whole ? of.head : of.head.shards[at.shard],
                                .shard = at.shard,
                                .shards = {.vocab = head.vocab(), .count = is_whole ? 1 : count()},
                                .logits = reinterpret_cast<float*>(blocks() + i * matrix_bytes),
                                .stride = stride};
        if (!is_whole) {
          part.hidden = is_second ? at.inputs.second_hidden : at.inputs.hidden;
          is_second = true;
        }
        LOGITD_RETURN_IF_ERROR(at.stream.Run(part));
      }
      return absl::OkStatus();
    }));
    LOGITD_RETURN_IF_ERROR(ExchangeBlocks(0));
    return to;
  }

  // Runs a call: enqueue().
  absl::Status Enqueue(absl::Span<const ShardCall> calls,
                       absl::FunctionRef<absl::Status()> enqueue) {
    devices_.Begin(calls);
    absl::Status status = enqueue();
    if (status.ok() && !IsAbandoned()) devices_.Know(calls);
    return status;
  }

  absl::Status TopKOf(const LinearTopKArgs& args) {
    const bool few = AreLogitsFew(args.hidden, args.head);
    return Enqueue({{Kind::kTopK, args.hidden, args.head, args.topk.max_k, few ? 1u : 0u}}, [&] {
      return few ? OnWholeRows(args.hidden, args.head, args.topk) : TopK(args);
    });
  }
  absl::Status SampleOf(const LinearSampleArgs& args) {
    // top_k may be off where the vocabulary has no more tokens than that.
    const bool kept = args.max_kept > 0 && args.max_kept < args.head.vocab() &&
                      !AreLogitsFew(args.hidden, args.head);
    const uint32_t options =
        (args.sample.edited ? 1u : 0u) + (kept ? 2u : 0u) + (args.sample.asks_more ? 4u : 0u);
    const ShardCall call(Kind::kSample, args.hidden, args.head, kept ? args.max_kept : 0, options);
    return Enqueue({call}, [&] {
      if (kept) {
        return OnShards<KeptSamplePartialArgs, KeptSampleMergeArgs>(
            args.hidden, args.head,
            TopKPartialShape{.shards = ShardsOf(args.head), .max_k = args.max_kept}, args.sample);
      }
      return devices_.by_peers() ? OnWholeRows(args.hidden, args.head, args.sample) : Sample(args);
    });
  }
  absl::Status VerifyOf(const LinearVerifyArgs& args) {
    const SampleArgs& sample = args.verify.sample;
    const uint32_t options =
        (sample.edited ? 1u : 0u) + (args.verify.blocks ? 2u : 0u) + (sample.asks_more ? 4u : 0u);
    return Enqueue({{Kind::kVerify, args.hidden, args.head, 0, options}},
                   [&] { return Verify(args); });
  }
  absl::Status DivergenceOf(const LinearDivergenceArgs& args) {
    absl::InlinedVector<ShardCall, 2> calls;
    const uint32_t options = WantsTops(args.divergence) ? 1 : 0;
    if (args.head.vocab() > 0)
      calls.push_back({Kind::kDivergence, args.hidden, args.head, 0, options});
    if (args.reference_head.vocab() > 0)
      calls.push_back({Kind::kDivergence, args.reference_hidden, args.reference_head, 0, options});
    return Enqueue(calls, [&] { return Divergence(args); });
  }
  absl::Status LossesOf(const LinearCrossEntropyArgs& args) {
    const CrossEntropyArgs& loss = args.cross_entropy;
    const bool supported = loss.max_support > 0;
    if (!supported || !loss.all_supported) {
      const uint32_t options =
          static_cast<uint32_t>(loss.want) * 2 + (loss.max_extra_ids > 0 ? 1u : 0u);
      // The host does not read rows: one may be smoothed.
      LOGITD_RETURN_IF_ERROR(
          Enqueue({{Kind::kLosses, args.hidden, args.head, loss.max_top_logprobs, options}},
                  [&] { return Losses(args, /*totals=*/true, loss.max_extra_ids); }));
    }
    if (!supported) return absl::OkStatus();
    return Enqueue({{Kind::kSupports, args.hidden, args.head, 0, 0}},
                   [&] { return SupportedLosses(args); });
  }
  absl::Status Backward(const LinearCrossEntropyBackwardArgs& args,
                        const ShardGradient* shards) override {
    return Enqueue({gradients_.CallOf(Kind::kBackward, args, shards)}, [&] {
      return IsAbandoned() ? absl::OkStatus() : gradients_.Backward(args, shards);
    });
  }
  absl::Status Training(const ShardedTrainingArgs& args) override {
    if (!gradients_.TrainingFits(args)) return ShardedOps::Training(args);
    return Enqueue({gradients_.CallOf(Kind::kTraining, args.training.gradient, args.shards)},
                   [&] { return IsAbandoned() ? absl::OkStatus() : gradients_.Training(args); });
  }

  static int64_t LogitsStride(const HeadView& head) { return (head.vocab() + 31) / 32 * 32; }
  // Bytes of a row of logits, where they are exchanged.
  static size_t LogitsRowBytes(const HeadView& head) {
    return static_cast<size_t>(LogitsStride(head)) * sizeof(float);
  }

  // True where, by kPeers, logits are exchanged in place of blocks.
  bool AreLogitsFew(const TensorView& hidden, const HeadView& head) const {
    return devices_.by_peers() &&
           static_cast<size_t>(hidden.rows) * LogitsRowBytes(head) <= kFewLogitsBytes;
  }

  // By kPeers: runs the op of `args`, which takes logits, on the first device. `args` are those of
  // all rows.
  template <class Args>
  absl::Status OnWholeRows(const TensorView& hidden, const HeadView& head, const Args& args) {
    return OnLogits({{hidden, head}}, [&](int64_t first, const ExchangedLogits& logits) {
      Args part = RowsFrom(args, first);
      part.logits = logits.whole[0];
      return OfShard(0, lead().Run(part));
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
