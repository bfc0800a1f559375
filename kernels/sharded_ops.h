// The linear ops of a ShardedStream, for devices of any kind: rows of a call go through the
// partials of all devices, an exchange and a merge (kernels/shards.h), as many at a time as there
// is room for. Where the merge takes logits, devices may exchange them in ways of their own.
#ifndef LOGITD_KERNELS_SHARDED_OPS_H_
#define LOGITD_KERNELS_SHARDED_OPS_H_

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <type_traits>

#include "absl/container/inlined_vector.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
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
  TensorView second_hidden;  // of another head: those of linear_divergence's second sharded head
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

// Hidden states of a head, which is cut over the devices, or whole on the first one.
struct HeadStates {
  TensorView hidden;
  HeadView head;
};
using StatesList = absl::InlinedVector<HeadStates, 2>;  // of one vocabulary, and one or two

// Logits on the first device: in blocks, or whole.
struct ExchangedLogits {
  SamplePartialShape shape;           // of those that are in blocks, in their order
  const std::byte* blocks = nullptr;  // null: none are
  std::array<TensorView, 2> whole;    // f32 [rows, vocab]; null where they are in blocks
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

  // Rows that there is room for at once. `row_bytes`: of what blocks() has of one row; `inputs`
  // says what is read.
  virtual int64_t RowsAtOnce(size_t row_bytes, const ShardInputs& inputs) = 0;
  // Before the parts of a step, for which blocks() has `bytes`.
  virtual absl::Status BeginStep(const ShardInputs& inputs, size_t bytes) = 0;
  // Runs the part on all devices, at the same time. `again`: the inputs are those of the last part.
  virtual absl::Status OnAll(const ShardInputs& inputs, bool again, const Part& part) = 0;
  // Later work of the first device has the blocks of all devices, or their targets, each of
  // `bytes`.
  virtual absl::Status ExchangeBlocks(size_t bytes) = 0;
  virtual absl::Status ExchangeTargets(size_t bytes) = 0;
  virtual std::byte* blocks() const = 0;  // of all shards, on the first device
  // Bytes of blocks() that a row of exchanged logits takes.
  virtual size_t LogitsBytes(const StatesList& states) const;
  // Makes the logits of all rows of `states`, for which there is room. Incomplete where the work is
  // abandoned.
  virtual absl::StatusOr<ExchangedLogits> ExchangeLogits(const StatesList& states);
  // Memory for the merges of a linear_verify of so many rows, if the device needs any.
  virtual absl::StatusOr<std::byte*> VerifyState(int64_t rows) = 0;
  virtual int VerifyPasses(const VerifyArgs& verify) const = 0;

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
  // Hidden states that fit into one exchange are multiplied once for all passes.
  absl::Status Verify(const LinearVerifyArgs& args) {
    LinearVerifyMergeArgs merge = {.verify = args.verify, .all_rows = args.hidden.rows};
    if (merge.all_rows == 0 || args.verify.sequence_count == 0) return absl::OkStatus();
    const absl::StatusOr<std::byte*> state = VerifyState(merge.all_rows);
    if (!state.ok()) return state.status();
    merge.state = *state;
    for (; merge.pass < VerifyPasses(args.verify); ++merge.pass) {
      const bool is_made = merge.pass > 0 && merge.shape.rows == merge.all_rows;
      const auto run = [&](int64_t first, const ExchangedLogits& logits) {
        merge.first_row = first;
        merge.shape = logits.shape;
        merge.blocks = logits.blocks;
        merge.verify.sample.logits = logits.whole[0];
        return OfShard(0, lead().Run(merge));
      };
      LOGITD_RETURN_IF_ERROR(is_made ? OfShard(0, lead().Run(merge))
                                     : OnLogits({{args.hidden, args.head}}, run));
      if (IsAbandoned()) break;
    }
    return absl::OkStatus();
  }
  absl::Status Divergence(const LinearDivergenceArgs& args) {
    StatesList states;
    if (args.head.vocab() > 0) states.push_back({args.hidden, args.head});
    if (args.reference_head.vocab() > 0)
      states.push_back({args.reference_hidden, args.reference_head});
    return OnLogits(states, [&](int64_t first, const ExchangedLogits& logits) {
      LinearDivergenceMergeArgs merge = {.shape = logits.shape,
                                         .blocks = logits.blocks,
                                         .divergence = RowsFrom(args.divergence, first)};
      const TensorView* next = logits.whole.data();
      const auto take = [&](const HeadView& head, TensorView& given) {
        given = head.vocab() > 0 ? *next++ : RowsOf(given, first, logits.shape.rows);
        return given.data == nullptr;
      };
      merge.has_first = take(args.head, merge.divergence.logits);
      merge.has_reference = take(args.reference_head, merge.divergence.reference_logits);
      return OfShard(0, merge.blocks == nullptr ? lead().Run(merge.divergence) : lead().Run(merge));
    });
  }
  // The losses of rows that have supports, and of rows that are left out.
  absl::Status SupportedLosses(const LinearCrossEntropyArgs& args) {
    return OnLogits({{args.hidden, args.head}}, [&](int64_t first, const ExchangedLogits& logits) {
      LinearSupportMergeArgs merge = {.shape = logits.shape,
                                      .blocks = logits.blocks,
                                      .cross_entropy = RowsFrom(args.cross_entropy, first)};
      merge.cross_entropy.logits = logits.whole[0];
      return OfShard(0, lead().Run(merge));
    });
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
    ShardInputs inputs = {.hidden = hidden};
    if constexpr (kIsLoss) inputs.max_extra = shape.max_extra;
    shape.rows = 1;
    const int64_t most = RowsAtOnce(shape.bytes() * static_cast<size_t>(count()), inputs);
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
      LOGITD_RETURN_IF_ERROR(BeginStep(inputs, shape.bytes() * static_cast<size_t>(count())));
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

  // Calls run(first row, logits) for as many rows at a time as there is room for.
  template <class Run>
  absl::Status OnLogits(const StatesList& states, const Run& run) {
    const int64_t all = states.front().hidden.rows;
    const int64_t most = RowsAtOnce(LogitsBytes(states), InputsOf(states));
    for (int64_t first = 0; first < all && !IsAbandoned(); first += most) {
      StatesList part = states;
      for (HeadStates& of : part) of.hidden = RowsOf(of.hidden, first, std::min(most, all - first));
      const absl::StatusOr<ExchangedLogits> logits = ExchangeLogits(part);
      if (!logits.ok()) return logits.status();
      if (IsAbandoned()) break;
      LOGITD_RETURN_IF_ERROR(run(first, *logits));
    }
    return absl::OkStatus();
  }

  // The hidden states that all devices read: those of sharded heads.
  static ShardInputs InputsOf(const StatesList& states) {
    ShardInputs inputs;
    for (const HeadStates& of : states) {
      if (of.head.shards == nullptr) continue;
      (inputs.hidden.data == nullptr ? inputs.hidden : inputs.second_hidden) = of.hidden;
    }
    return inputs;
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

  // The shape of the blocks of sharded heads.
  SamplePartialShape ShapeOf(const StatesList& states, int64_t rows) const {
    const auto cut = std::count_if(states.begin(), states.end(),
                                   [](const HeadStates& of) { return of.head.shards != nullptr; });
    return {.shards = ShardsOf(states.front().head), .rows = rows, .inputs = static_cast<int>(cut)};
  }
};

// The logits of whole heads are after the blocks.
inline size_t ShardedOps::LogitsBytes(const StatesList& states) const {
  const SamplePartialShape shape = ShapeOf(states, 1);
  const size_t whole = states.size() - static_cast<size_t>(shape.inputs);
  return shape.bytes() * static_cast<size_t>(count()) +
         whole * static_cast<size_t>(shape.shards.vocab) * sizeof(float);
}

inline absl::StatusOr<ExchangedLogits> ShardedOps::ExchangeLogits(const StatesList& states) {
  const int64_t rows = states.front().hidden.rows;
  ExchangedLogits to = {.shape = ShapeOf(states, rows)};
  const ShardInputs inputs = InputsOf(states);
  LOGITD_RETURN_IF_ERROR(BeginStep(inputs, static_cast<size_t>(rows) * LogitsBytes(states)));
  LOGITD_RETURN_IF_ERROR(
      OnAll(inputs, /*again=*/false, [states, shape = to.shape](const ShardPlace& at) {
        std::byte* const block = at.blocks + static_cast<size_t>(at.shard) * shape.bytes();
        int input = 0;
        for (const HeadStates& of : states) {
          if (of.head.shards == nullptr) continue;
          LOGITD_RETURN_IF_ERROR(at.stream.Run(LinearSamplePartialArgs{
              .hidden = input == 0 ? at.inputs.hidden : at.inputs.second_hidden,
              .head = of.head.shards[at.shard],
              .shard = at.shard,
              .shape = shape,
              .input = input,
              .block = block}));
          ++input;
        }
        return absl::OkStatus();
      }));
  if (IsAbandoned()) return to;
  to.blocks = blocks();
  const VocabShards one = {.vocab = to.shape.shards.vocab, .count = 1};
  for (size_t i = 0; i < states.size(); ++i) {  // at most one is whole
    if (states[i].head.shards != nullptr) continue;
    std::byte* const at = blocks() + to.shape.bytes() * static_cast<size_t>(count());
    LOGITD_RETURN_IF_ERROR(
        OfShard(0, lead().Run(LinearSamplePartialArgs{.hidden = states[i].hidden,
                                                      .head = states[i].head,
                                                      .shape = {.shards = one, .rows = rows},
                                                      .block = at})));
    to.whole[i] = {at, DType::kF32, rows, one.vocab, one.vocab};
  }
  LOGITD_RETURN_IF_ERROR(ExchangeBlocks(to.shape.bytes()));
  return to;
}

}  // namespace logitd

#endif  // LOGITD_KERNELS_SHARDED_OPS_H_
