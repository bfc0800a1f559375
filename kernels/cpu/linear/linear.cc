// linear_* on the CPU.
//
//   topk, sample:   for up to 64 rows at a time their logits in f32 (product.h), then the op of
//                   that name on the logits; divergence: those of both heads.
//   verify:         the same, also of rows that no draft reaches; twice for block verification
//                   where the rows do not fit into one block.
//   cross_entropy:  a thread takes the logits of up to 64 rows for one cell of the vocabulary,
//                   reads them for the loss while they are in L2, and goes on to the next cell. So
//                   logits never go to memory. What is left of a cell is its partials, which are
//                   merged as those of shards are: a whole head is its only shard. A rank needs its
//                   target's logit first, which is one product of two vectors a row.
//   backward:       gradients.h, from logits that are made again.
//
// Cost: the product, 2 rows hidden vocab operations, which is the floor. topk and sample read the
// weights once for every 64 rows (16 at the largest vocabulary), and write and read 4 bytes a
// logit. The loss reads them from memory once for every 256 rows, and from a cache for every 64
// (128 rows of 512 columns or fewer).
//
// Limited by: the product from some 16 rows on, by the read of the weights below.
//
// Measured: bench/results/cpu/linear.json, two cores of a Zen 4, loss of f32 over OpenBLAS's bare
// product of f32 on the same cores: 1.15 to 1.29 times its time at 512 columns from 256 rows on
// (goal 1.4), 0.88 at 64 rows, 0.44 at one; 1.09 to 1.27 at more columns (goal 1.5).
//
// Tried and dropped: full logits in memory (1.29 to 1.44 times at 512 columns). For top tokens,
// stretches of one cell, each of which starts a list of its own (128 tokens of 16 x 512 x 128256:
// 10% more time).
#include "kernels/cpu/linear/linear.h"

#include <algorithm>
#include <cmath>

#include "kernels/cpu/linear/block_logits.h"
#include "kernels/cpu/linear/gradients.h"
#include "kernels/cpu/sampling/sample.h"
#include "kernels/cpu/sampling/softmax_topk.h"

namespace logitd::cpu {
namespace {

// ---- Loss

// The size of parts of rows, about equal, whole tiles and at most `most` rows each.
int64_t EvenPart(int64_t rows, int64_t most) {
  const int64_t parts = std::max<int64_t>(1, (rows + most - 1) / most);
  return RoundUp((rows + parts - 1) / parts, kTileRows);
}

// Rows whose partials are in memory at once. The more they are, the less often the weights come
// from memory.
int64_t LossRowsAtOnce(int64_t rows, int64_t hidden) {
  constexpr int64_t kMostLossRows = 256;
  constexpr int64_t kMostPacked = int64_t{1} << 22;
  return EvenPart(
      rows, std::clamp(kMostPacked / hidden / kMostRows * kMostRows, kMostRows, kMostLossRows));
}

// How some rows of a shard are shared out: an item is a group of rows, for a stretch of the shard.
struct LossItems {
  int64_t group_rows;  // or fewer, in the last group
  int64_t groups;
  VocabShards stretches;  // of the shard's tokens
};

LossItems ItemsOf(int64_t rows, int64_t hidden, const VocabShard& shard, bool any_top,
                  int64_t threads) {
  constexpr int64_t kLeastRows = 16;
  // More rows share a widened weight, as long as they and their logits stay in the second cache.
  constexpr int64_t kMostGroupRows = 128;
  constexpr int64_t kMostGroupHidden = 512;
  constexpr int64_t kMostStretches = 64;
  const int64_t most = std::clamp<int64_t>(shard.cells(), 1, kMostStretches);
  // Smaller groups where there is too little else to share out.
  int64_t most_rows = hidden <= kMostGroupHidden ? kMostGroupRows : kMostRows;
  while (most_rows > kLeastRows && (rows + most_rows - 1) / most_rows * most < 4 * threads) {
    most_rows /= 2;
  }
  LossItems items;
  items.group_rows = EvenPart(rows, most_rows);
  items.groups = (rows + items.group_rows - 1) / items.group_rows;
  // A stretch has a list of top tokens of its own: long ones add little to it. Short ones leave
  // little to wait for at the end.
  const int64_t count = any_top ? std::min(most, 12 * threads / items.groups + 1) : most;
  items.stretches = {.vocab = shard.tokens, .count = static_cast<int>(count)};
  return items;
}

// The logits of a cell are in rows that do not start in the same set of a cache.
constexpr int64_t kCellStride = kVocabCell + kMaxLanes;

// Reads a stretch of the shard for some rows.
void ReadStretch(const LossShard& of, int stretch, const PackedRows& rows, int64_t first_row,
                 const HeadView& head, const std::atomic<bool>* abandoned) {
  thread_local AlignedBuffer memory;
  float* const logits = memory.Get(rows.rows * kCellStride);
  const VocabShard tokens = of.stretches.at(stretch);
  StartStretch(of, stretch, first_row, rows.rows);
  for (int64_t begin = tokens.first; begin < tokens.first + tokens.tokens; begin += kVocabCell) {
    if (IsAbandoned(abandoned)) return;
    const int64_t end = std::min(tokens.first + tokens.tokens, begin + kVocabCell);
    Logits(rows, head.weight, begin, end, EpilogueOf(head), logits, kCellStride);
    ReadLossCell(of, {.stretch = stretch,
                      .first = begin,
                      .tokens = end - begin,
                      .first_row = first_row,
                      .rows = rows.rows,
                      .logits = logits,
                      .row_stride = kCellStride});
  }
}

// Writes the block's part of rows [begin, begin + count).
void PartialOfRows(const LinearCrossEntropyPartialArgs& args, int64_t begin, int64_t count,
                   ThreadPool& pool, LinearScratch& scratch, const std::atomic<bool>* abandoned) {
  const LossItems items = ItemsOf(count, args.hidden.cols, args.shape.shards.at(args.shard),
                                  args.shape.max_top > 0, pool.threads());
  const int64_t parts = count * items.stretches.count;
  const LossShard of = {.index = args.shard,
                        .shape = args.shape,
                        .rows = args.rows,
                        .extra_ids = args.extra_ids,
                        .targets = args.targets,
                        .to = args.shape.At(args.block),
                        .stretches = items.stretches,
                        .first_row = begin,
                        .parts = scratch.stretches.Get(parts),
                        .keys = scratch.stretch_keys.Get(parts * args.shape.max_top)};
  const int64_t group_size = PackedRows{.rows = items.group_rows, .cols = args.hidden.cols}.size();
  float* const packed = scratch.packed.Get(items.groups * group_size);
  const auto group = [&](int64_t g) {
    return PackedRows{.data = packed + g * group_size,
                      .rows = std::min(items.group_rows, count - g * items.group_rows),
                      .cols = args.hidden.cols};
  };
  for (int64_t g = 0; g < items.groups && items.stretches.vocab > 0; ++g) {
    Pack(args.hidden, args.head, begin + g * items.group_rows, group(g), pool);
  }
  // The groups of a stretch read the same weights at about the same time.
  pool.ParallelFor(items.stretches.count * items.groups, [&](int64_t item) {
    const int64_t g = item % items.groups;
    ReadStretch(of, static_cast<int>(item / items.groups), group(g), begin + g * items.group_rows,
                args.head, abandoned);
  });
  if (IsAbandoned(abandoned)) return;
  pool.ParallelFor(count, [&](int64_t r) { JoinStretches(of, begin + r); });
}

// What a whole head's partials of these rows hold: it is its only shard.
LossPartialShape ShapeOf(const LinearCrossEntropyArgs& args) {
  LossPartialShape shape = {.shards = {.vocab = args.head.vocab(), .count = 1},
                            .rows = args.hidden.rows};
  for (int64_t r = 0; r < args.hidden.rows; ++r) {
    const CrossEntropyRow& row = args.cross_entropy.rows[r];
    if (row.active == 0) continue;
    shape.totals |= row.label_smoothing > 0;
    shape.want |= row.want;
    shape.max_top = std::max(shape.max_top, row.top_logprobs);
    shape.max_extra = std::max(shape.max_extra, row.extra_count);
  }
  return shape;
}

// Writes the answers of all rows, which are few enough to be in memory at once.
void LossOfRows(const LinearCrossEntropyArgs& args, ThreadPool& pool, LinearScratch& scratch,
                const std::atomic<bool>* abandoned) {
  const LossPartialShape shape = ShapeOf(args);
  const CrossEntropyRow* const rows = args.cross_entropy.rows;
  float* const targets = scratch.targets.Get(shape.rows);
  if ((shape.want & kWantRank) != 0) {
    LinearCrossEntropyTargets({.hidden = args.hidden,
                               .head = args.head,
                               .shards = shape.shards,
                               .rows = rows,
                               .targets = targets},
                              pool);
  }
  std::byte* const block = scratch.block.Get(static_cast<int64_t>(shape.bytes()));
  PartialOfRows({.hidden = args.hidden,
                 .head = args.head,
                 .shape = shape,
                 .rows = rows,
                 .extra_ids = args.cross_entropy.extra_ids,
                 .targets = targets,
                 .block = block},
                0, shape.rows, pool, scratch, abandoned);
  if (IsAbandoned(abandoned)) return;
  CrossEntropyMerge({.shape = shape, .blocks = block, .cross_entropy = args.cross_entropy}, pool);
}

// The hidden states of `count` of the rows, one after another.
TensorView GatherStates(const TensorView& hidden, const int64_t* rows, int64_t count,
                        Buffer<std::byte>& memory) {
  const auto size = static_cast<int64_t>(SizeOf(hidden.dtype));
  const int64_t stride = RoundUp(hidden.cols, 16);
  std::byte* const to = memory.Get(count * stride * size);
  for (int64_t i = 0; i < count; ++i) {
    std::copy_n(static_cast<const std::byte*>(hidden.data) + rows[i] * hidden.row_stride * size,
                hidden.cols * size, to + i * stride * size);
  }
  return {to, hidden.dtype, count, hidden.cols, stride};
}

// Writes the answers of the rows with supports, from the logits that linear_sample makes.
void LossOfSupported(const LinearCrossEntropyArgs& args, ThreadPool& pool, LinearScratch& scratch,
                     const std::atomic<bool>* abandoned) {
  constexpr int64_t kAtOnce = 256;
  CountedScratch& own = scratch.counted;
  int64_t* const supported = own.places.Get(args.hidden.rows);
  int64_t all = 0;
  for (int64_t r = 0; r < args.hidden.rows; ++r) {
    const CrossEntropyRow& ask = args.cross_entropy.rows[r];
    if (ask.active != 0 && !IsWhole(ask)) supported[all++] = r;
  }
  for (int64_t begin = 0; begin < all && !IsAbandoned(abandoned); begin += kAtOnce) {
    const int64_t* const rows = supported + begin;
    const TensorView hidden =
        GatherStates(args.hidden, rows, std::min(kAtOnce, all - begin), own.hidden);
    ForEachBlock(hidden, args.head, pool, scratch, abandoned,
                 [&](int64_t first, const TensorView& logits) {
                   CrossEntropyArgs part = args.cross_entropy;
                   part.logits = logits;
                   pool.ParallelFor(logits.rows, [&](int64_t i) {
                     CrossEntropyOfSupport(part, rows[first + i], RowData(logits, i));
                   });
                 });
  }
}

// Writes the answers of all rows without supports, and multiplies those that are not left out.
void LossOfCounted(const LinearCrossEntropyArgs& args, ThreadPool& pool, LinearScratch& scratch,
                   const std::atomic<bool>* abandoned) {
  const TensorView& hidden = args.hidden;
  const CrossEntropyAnswers& to = args.cross_entropy.answers;
  CountedScratch& own = scratch.counted;
  int64_t* const counted = own.places.Get(hidden.rows);
  int64_t all = 0;
  for (int64_t r = 0; r < hidden.rows; ++r) {
    const CrossEntropyRow& ask = args.cross_entropy.rows[r];
    if (!IsWhole(ask)) continue;
    if (IsLeftOut(args.cross_entropy, ask)) {
      AnswerLeftOut(to, r);
    } else {
      counted[all++] = r;
    }
  }
  const int64_t at_once = LossRowsAtOnce(all, hidden.cols);
  for (int64_t begin = 0; begin < all && !IsAbandoned(abandoned); begin += at_once) {
    const int64_t count = std::min(at_once, all - begin);
    const int64_t* const at = counted + begin;
    CrossEntropyRow* const rows = own.rows.Get(count);
    for (int64_t i = 0; i < count; ++i) rows[i] = args.cross_entropy.rows[at[i]];
    LinearCrossEntropyArgs part = args;
    part.hidden = GatherStates(hidden, at, count, own.hidden);
    part.cross_entropy.rows = rows;
    CrossEntropyAnswers& answers = part.cross_entropy.answers;
    answers.loss = own.values.Get(4 * count);
    answers.logsumexp = answers.loss + count;
    answers.target_logprob = answers.loss + 2 * count;
    answers.status = own.status.Get(count);
    if (to.entropy != nullptr) answers.entropy = answers.loss + 3 * count;
    if (to.rank != nullptr) answers.rank = own.rank.Get(count);
    LossOfRows(part, pool, scratch, abandoned);
    if (IsAbandoned(abandoned)) return;
    for (int64_t i = 0; i < count; ++i) {
      to.loss[at[i]] = answers.loss[i];
      to.logsumexp[at[i]] = answers.logsumexp[i];
      to.target_logprob[at[i]] = answers.target_logprob[i];
      to.status[at[i]] = answers.status[i];
      if (to.entropy != nullptr) to.entropy[at[i]] = answers.entropy[i];
      if (to.rank != nullptr) to.rank[at[i]] = answers.rank[i];
    }
  }
}

// ---- Backward

// The gradients of cross_entropy's logits, for Gradients; of the tokens of a vocabulary that the
// head has.
struct LossGradient {
  const LinearCrossEntropyBackwardArgs& args;
  int64_t first_token;  // of args.head
  int64_t vocab;        // of the whole head

  RowUse Use(int64_t r) const {
    if (args.rows[r].active == 0) return RowUse::kSkipped;
    return args.rows[r].target == kIgnoredTarget ? RowUse::kIgnored : RowUse::kCounted;
  }

  void Make(const GradientBlock& of, ThreadPool& pool, LinearScratch& scratch) const {
    const int64_t tokens = of.tokens();
    const HeadView& head = args.head;
    ComputeBlock(
        args.hidden, head, {.scale = head.scale, .bias = head.bias}, of, of.to,
        [&](int64_t r) { return Use(r) == RowUse::kCounted; }, pool, scratch);
    CrossEntropyBackwardOfTokens(
        {.logits = {of.to, DType::kF32, of.rows, tokens, tokens},
         .rows = args.rows + of.first,
         .logsumexp = args.logsumexp + of.first,
         .upstream = args.upstream + of.first,
         .d_logits = {of.to, DType::kF32, of.rows, tokens, tokens}},
        {.first_token = first_token + of.begin, .vocab = vocab, .softcap = head.softcap}, pool);
  }
};

void AddLossGradients(const LinearCrossEntropyBackwardArgs& args, int64_t first_token,
                      int64_t vocab, ThreadPool& pool, LinearScratch& scratch) {
  const LossGradient of = {.args = args, .first_token = first_token, .vocab = vocab};
  Gradients(HeadGradients{.hidden = args.hidden,
                          .head = args.head,
                          .d_hidden = args.d_hidden,
                          .d_weight = args.d_weight,
                          .d_bias = args.d_bias},
            of, pool, scratch)
      .Run();
}

}  // namespace

void LinearTopK(const LinearTopKArgs& args, ThreadPool& pool, LinearScratch& scratch,
                const std::atomic<bool>* abandoned) {
  ForEachBlock(args.hidden, args.head, pool, scratch, abandoned,
               [&](int64_t first, const TensorView& logits) {
                 SoftmaxTopKArgs part = RowsFrom(args.topk, first);
                 part.logits = logits;
                 SoftmaxTopK(part, pool, scratch.topk);
               });
}

void LinearSample(const LinearSampleArgs& args, ThreadPool& pool, LinearScratch& scratch,
                  const std::atomic<bool>* abandoned) {
  ForEachBlock(args.hidden, args.head, pool, scratch, abandoned,
               [&](int64_t first, const TensorView& logits) {
                 SampleArgs part = RowsFrom(args.sample, first);
                 part.logits = logits;
                 Sample(part, pool, scratch.sample);
               });
}

void LinearVerify(const LinearVerifyArgs& args, ThreadPool& pool, LinearScratch& scratch,
                  const std::atomic<bool>* abandoned) {
  // One block stays for all passes.
  const int passes = VerifyPasses(args.verify);
  const int at_once = args.hidden.rows <= RowsAtOnce(args.head.vocab()) ? passes : 1;
  for (int pass = 0; pass < passes; pass += at_once) {
    ForEachBlock(args.hidden, args.head, pool, scratch, abandoned,
                 [&](int64_t first, const TensorView& logits) {
                   VerifyArgs part = args.verify;
                   part.sample.logits = logits;
                   for (int i = pass; i < pass + at_once; ++i)
                     VerifyRows(part, i, first, pool, scratch.verify);
                 });
    if (IsAbandoned(abandoned)) return;
  }
}

void LinearDivergence(const LinearDivergenceArgs& args, ThreadPool& pool, LinearScratch& scratch,
                      const std::atomic<bool>* abandoned) {
  const int64_t vocab = args.vocab();
  const int64_t at_once = RowsAtOnce(2 * vocab);  // both inputs share the room of one
  for (int64_t first = 0; first < args.rows(); first += at_once) {
    const int64_t rows = std::min(at_once, args.rows() - first);
    const int64_t half = RoundUp(rows * vocab, kMaxLanes);
    float* const room = scratch.logits.Get(2 * half);
    const auto logits_of = [&](const TensorView& hidden, const HeadView& head,
                               const TensorView& given, float* to) {
      if (head.vocab() == 0) return RowsOf(given, first, rows);
      ComputeRows(hidden, head, first, rows, to, vocab, pool, scratch, abandoned);
      return TensorView{to, DType::kF32, rows, vocab, vocab};
    };
    DivergenceArgs part = RowsFrom(args.divergence, first);
    part.logits = logits_of(args.hidden, args.head, part.logits, room);
    part.reference_logits =
        logits_of(args.reference_hidden, args.reference_head, part.reference_logits, room + half);
    if (IsAbandoned(abandoned)) return;
    Divergence(part, pool, scratch.divergence);
  }
}

void LinearCrossEntropy(const LinearCrossEntropyArgs& args, ThreadPool& pool,
                        LinearScratch& scratch, const std::atomic<bool>* abandoned) {
  const bool supported = args.cross_entropy.max_support > 0;
  if (supported) LossOfSupported(args, pool, scratch, abandoned);
  if (args.cross_entropy.counted_rows >= 0 || supported) {
    LossOfCounted(args, pool, scratch, abandoned);
    return;
  }
  const int64_t at_once = LossRowsAtOnce(args.hidden.rows, args.hidden.cols);
  for (int64_t begin = 0; begin < args.hidden.rows; begin += at_once) {
    LossOfRows(RowsOf(args, begin, std::min(at_once, args.hidden.rows - begin)), pool, scratch,
               abandoned);
    if (IsAbandoned(abandoned)) return;
  }
}

void LinearCrossEntropyBackward(const LinearCrossEntropyBackwardArgs& args, ThreadPool& pool,
                                LinearScratch& scratch) {
  AddLossGradients(args, /*first_token=*/0, args.head.vocab(), pool, scratch);
}

void LinearCrossEntropyTraining(const LinearCrossEntropyTrainingArgs& args, ThreadPool& pool,
                                LinearScratch& scratch, const std::atomic<bool>* abandoned) {
  LinearCrossEntropy(args.Forward(), pool, scratch, abandoned);
  LinearCrossEntropyBackward(args.Backward(), pool, scratch);
}

// ---- Shards

void LinearTopKPartial(const LinearTopKPartialArgs& args, ThreadPool& pool, LinearScratch& scratch,
                       const std::atomic<bool>* abandoned) {
  const TopKPartials to = args.shape.At(args.block);
  ForEachBlock(args.hidden, args.head, pool, scratch, abandoned,
               [&](int64_t first, const TensorView& logits) {
                 TopKPartial(
                     {.logits = logits, .rows = args.rows + first},
                     {.index = args.shard, .shape = args.shape, .first_row = first, .to = to}, pool,
                     scratch.topk);
               });
}

void LinearCrossEntropyPartial(const LinearCrossEntropyPartialArgs& args, ThreadPool& pool,
                               LinearScratch& scratch, const std::atomic<bool>* abandoned) {
  const int64_t at_once = LossRowsAtOnce(args.hidden.rows, args.hidden.cols);
  for (int64_t begin = 0; begin < args.hidden.rows; begin += at_once) {
    PartialOfRows(args, begin, std::min(at_once, args.hidden.rows - begin), pool, scratch,
                  abandoned);
    if (IsAbandoned(abandoned)) return;
  }
}

void LinearCrossEntropyBackwardPartial(const LinearCrossEntropyBackwardPartialArgs& args,
                                       ThreadPool& pool, LinearScratch& scratch) {
  AddLossGradients(args.gradient, args.shard.first, args.vocab, pool, scratch);
}

void LinearCrossEntropyBackwardMerge(const LinearCrossEntropyBackwardMergeArgs& args,
                                     ThreadPool& pool, LinearScratch& scratch) {
  const int64_t rows = args.d_hidden.rows;
  const int64_t hidden = args.d_hidden.cols;
  float* const sums = scratch.d_hidden.Get(rows * hidden);
  pool.ParallelFor(rows, [&](int64_t r) {
    if (args.rows[r].active == 0) return;
    float* const sum = sums + r * hidden;
    std::copy_n(args.parts + r * hidden, hidden, sum);
    for (int64_t s = 1; s < args.shards; ++s) {
      const float* const part = args.parts + (s * rows + r) * hidden;
      for (int64_t d = 0; d < hidden; ++d) sum[d] += part[d];
    }
    StoreRow(sum, /*scale=*/1, args.d_hidden, r);
  });
}

void LinearCrossEntropyTargets(const LinearCrossEntropyTargetsArgs& args, ThreadPool& pool) {
  const VocabShard shard = args.shards.at(args.shard);
  pool.ParallelFor(args.hidden.rows, [&](int64_t r) {
    const CrossEntropyRow& ask = args.rows[r];
    if (ask.active == 0 || !shard.Holds(ask.target)) return;
    thread_local AlignedBuffer memory;
    PackedRows row = {.rows = 1, .cols = args.head.hidden()};
    row.data = memory.Get(row.size());
    const TensorView from = RowsOf(args.hidden, r, 1);
    for (int64_t i = 0; i < row.padded_rows(); ++i) PackRow(from, NormOf(args.head), i, row);
    const int64_t token = ask.target - shard.first;
    Logits(row, args.head.weight, token, token + 1, EpilogueOf(args.head), args.targets + r, 1);
  });
}

}  // namespace logitd::cpu
