// The linear ops of a ShardedStream, for devices of any kind: rows of a call go through the
// partials of all devices, an exchange and a merge (kernels/shards.h), as many at a time as there
// is room for.
#ifndef LOGITD_KERNELS_SHARDED_OPS_H_
#define LOGITD_KERNELS_SHARDED_OPS_H_

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <type_traits>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "kernels/ops.h"
#include "kernels/sharded_stream.h"
#include "kernels/shards.h"
#include "kernels/status_macros.h"

namespace logitd {

// The inputs of rows that devices read: hidden states, the parameters of as many rows, and the
// extra ids that those name. Null: not read.
struct ShardInputs {
  TensorView hidden;
  const void* rows = nullptr;
  size_t row_size = 0;
  const int32_t* extra_ids = nullptr;
  int32_t max_extra = 0;  // of a row
};

// A device in a step of a call, and what it has there.
struct ShardPlace {
  Stream& stream;
  int shard;
  ShardInputs inputs;
  std::byte* blocks;  // of all shards; it writes its own
  float* targets;     // [shards, rows]; likewise
};

class ShardedOps : public ShardedStream {
 public:
  absl::Status Upload(const Slab& slab, size_t offset, size_t bytes) override {
    return OnLead([&] { return lead().Upload(slab, offset, bytes); });
  }
  absl::Status Download(const Slab& slab, size_t offset, size_t bytes) override {
    return OnLead([&] { return lead().Download(slab, offset, bytes); });
  }
  absl::Status Fill(const Slab& slab, size_t offset, size_t bytes, std::byte* to) override {
    return OnLead([&] { return lead().Fill(slab, offset, bytes, to); });
  }
  absl::Status Gather(absl::Span<const RowsCopy> copies) override {
    return OnLead([&] { return lead().Gather(copies); });
  }
  absl::Status Deliver(std::byte* to, const std::byte* from, size_t bytes) override {
    return OnLead([&] { return lead().Deliver(to, from, bytes); });
  }
  absl::Status ShardedBackward(const ShardedBackwardArgs& args) override {
    LOGITD_RETURN_IF_ERROR(hung());
    LOGITD_RETURN_IF_ERROR(CheckShardGradients(args.gradient, args.shards, count()));
    return Backward(args.gradient, args.shards);
  }
  absl::Status ShardedTraining(const ShardedTrainingArgs& args) override {
    LOGITD_RETURN_IF_ERROR(hung());
    LOGITD_RETURN_IF_ERROR(CheckShardGradients(args.training.gradient, args.shards, count()));
    return Training(args);
  }

 protected:
  // Captures copies of all that it uses: a device that hangs may go on when nobody waits for it.
  using Part = std::function<absl::Status(const ShardPlace&)>;

  virtual Stream& lead() = 0;  // the first device's
  virtual int count() const = 0;
  // Not OK: a device hangs. The answer of all calls then.
  virtual const absl::Status& hung() const = 0;

  // Rows that there is room for at once. `row_bytes`: of one row's blocks, those of all shards.
  virtual int64_t RowsAtOnce(size_t row_bytes, const TensorView& hidden, int32_t max_extra) = 0;
  // Before the parts of a step, whose blocks have `block_bytes` each.
  virtual absl::Status BeginStep(const ShardInputs& inputs, size_t block_bytes) = 0;
  // Runs the part on all devices, at the same time. `again`: the inputs are those of the last part.
  virtual absl::Status OnAll(const ShardInputs& inputs, bool again, const Part& part) = 0;
  // Later work of the first device has the blocks of all devices, or their targets, each of
  // `bytes`.
  virtual absl::Status ExchangeBlocks(size_t bytes) = 0;
  virtual absl::Status ExchangeTargets(size_t bytes) = 0;
  virtual const std::byte* blocks() const = 0;  // of all shards, on the first device

  virtual absl::Status Backward(const LinearCrossEntropyBackwardArgs& args,
                                const ShardGradient* shards) = 0;
  virtual absl::Status Training(const ShardedTrainingArgs& args) {
    LOGITD_RETURN_IF_ERROR(Run(args.training.Forward()));
    return Backward(args.training.Backward(), args.shards);
  }

  VocabShards ShardsOf(const HeadView& head) const {
    return {.vocab = head.vocab(), .count = count()};
  }
  bool IsAbandoned() const {
    return abandoned() != nullptr && abandoned()->load(std::memory_order_relaxed);
  }

  absl::Status TopK(const LinearTopKArgs& args) {
    const TopKPartialShape shape = {.shards = ShardsOf(args.head), .max_k = args.topk.max_k};
    return OnShards<LinearTopKPartialArgs, LinearTopKMergeArgs>(args.hidden, args.head, shape,
                                                                args.topk);
  }
  absl::Status Sample(const LinearSampleArgs& args) {
    const SamplePartialShape shape = {.shards = ShardsOf(args.head)};
    return OnShards<LinearSamplePartialArgs, LinearSampleMergeArgs>(args.hidden, args.head, shape,
                                                                    args.sample);
  }
  // `totals`: as in LossPartialShape.
  absl::Status Losses(const LinearCrossEntropyArgs& args, bool totals, int32_t max_extra) {
    const LossPartialShape shape = {.shards = ShardsOf(args.head),
                                    .totals = totals,
                                    .want = args.cross_entropy.want,
                                    .max_top = args.cross_entropy.max_top_logprobs,
                                    .max_extra = max_extra};
    return OnShards<LinearCrossEntropyPartialArgs, LinearCrossEntropyMergeArgs>(
        args.hidden, args.head, shape, args.cross_entropy);
  }

  // Runs an op: its partials write blocks of `shape`, whose rows are set here. `args`: those of the
  // op on logits, for all rows.
  template <class PartialArgs, class MergeArgs, class Shape, class Args>
  absl::Status OnShards(const TensorView& hidden, const HeadView& head, Shape shape,
                        const Args& args) {
    constexpr bool kHasRows = requires(PartialArgs partial) { partial.rows; };
    constexpr bool kIsLoss = std::is_same_v<Args, CrossEntropyArgs>;
    ShardInputs inputs;
    if constexpr (kIsLoss) inputs.max_extra = shape.max_extra;
    shape.rows = 1;
    const int64_t most =
        RowsAtOnce(shape.bytes() * static_cast<size_t>(count()), hidden, inputs.max_extra);
    for (int64_t first = 0; first < hidden.rows && !IsAbandoned(); first += most) {
      shape.rows = std::min(most, hidden.rows - first);
      const Args part = RowsFrom(args, first);
      inputs.hidden = RowsOf(hidden, first, shape.rows);
      if constexpr (kHasRows) {
        inputs.rows = part.rows;
        inputs.row_size = sizeof(*part.rows);
      }
      bool ranks = false;
      if constexpr (kIsLoss) {
        if (shape.max_extra > 0) inputs.extra_ids = part.extra_ids;
        ranks = (shape.want & kWantRank) != 0;
      }
      LOGITD_RETURN_IF_ERROR(BeginStep(inputs, shape.bytes()));
      if (ranks) LOGITD_RETURN_IF_ERROR(Targets(inputs, head));
      LOGITD_RETURN_IF_ERROR(OnAll(inputs, /*again=*/ranks, [=](const ShardPlace& at) {
        PartialArgs partial = {.hidden = at.inputs.hidden,
                               .head = head.shards[at.shard],
                               .shard = at.shard,
                               .shape = shape};
        partial.block = at.blocks + static_cast<size_t>(at.shard) * shape.bytes();
        if constexpr (kHasRows) {
          partial.rows = static_cast<decltype(partial.rows)>(at.inputs.rows);
        }
        if constexpr (kIsLoss) {
          partial.extra_ids = at.inputs.extra_ids;
          partial.targets = ranks ? at.targets : nullptr;
        }
        return at.stream.Run(partial);
      }));
      if (IsAbandoned()) break;
      LOGITD_RETURN_IF_ERROR(ExchangeBlocks(shape.bytes()));
      LOGITD_RETURN_IF_ERROR(OfShard(0, lead().Run(MergeArgs{shape, blocks(), part})));
    }
    return absl::OkStatus();
  }

 private:
  template <class Call>
  absl::Status OnLead(const Call& call) {
    LOGITD_RETURN_IF_ERROR(hung());
    return OfShard(0, call());
  }

  // Exchanges the logits of the rows' targets.
  absl::Status Targets(const ShardInputs& inputs, const HeadView& head) {
    const int64_t rows = inputs.hidden.rows;
    LOGITD_RETURN_IF_ERROR(
        OnAll(inputs, /*again=*/false, [=, cut = ShardsOf(head)](const ShardPlace& at) {
          return at.stream.Run(LinearCrossEntropyTargetsArgs{
              .hidden = at.inputs.hidden,
              .head = head.shards[at.shard],
              .shard = at.shard,
              .shards = cut,
              .rows = static_cast<const CrossEntropyRow*>(at.inputs.rows),
              .targets = at.targets + at.shard * rows});
        }));
    return ExchangeTargets(static_cast<size_t>(rows) * sizeof(float));
  }
};

}  // namespace logitd

#endif  // LOGITD_KERNELS_SHARDED_OPS_H_
