// linear_cross_entropy on a shard of the vocabulary: what its cells say of a row, cell after cell,
// and the answers from the blocks of all shards. The contract is kernels/shards.h.
#if defined(LOGITD_KERNELS_CPU_LOSS_SHARD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef LOGITD_KERNELS_CPU_LOSS_SHARD_INL_H_
#undef LOGITD_KERNELS_CPU_LOSS_SHARD_INL_H_
#else
#define LOGITD_KERNELS_CPU_LOSS_SHARD_INL_H_
#endif

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>

#include "hwy/contrib/sort/vqsort.h"
#include "hwy/highway.h"
#include "kernels/cpu/loss/answer-inl.h"
#include "kernels/cpu/loss/cross_entropy.h"
#include "kernels/cpu/loss/loss_row.h"
#include "kernels/cpu/loss/read_cells-inl.h"
#include "kernels/cpu/rows/sketch-inl.h"
#include "kernels/cpu/rows/token_list-inl.h"

HWY_BEFORE_NAMESPACE();
namespace logitd::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Adds the cell's tokens to the first `k` of those read before, in order. `cell` is sketched.
inline void AddTop(const Row& cell, int64_t first_token, int64_t k, uint64_t* keys, int64_t& count,
                   LossThreadScratch& scratch) {
  const float max = *cell.sketch.max;
  const int64_t most = std::min(k, cell.vocab);
  const float bound = count < k ? BoundOf(cell, most, max) : KeyLogit(keys[k - 1]);
  if (max < bound) return;
  uint64_t* const own = scratch.keys.Get(kCellElements + 2 * k);
  const int64_t found = TopKeysFrom(cell, most, bound, own, scratch.list.sorter);
  for (int64_t i = 0; i < found; ++i) own[i] = LaterKey(own[i], first_token);
  uint64_t* const merged = own + kCellElements;
  std::merge(keys, keys + count, own, own + found, merged, std::greater<>());
  count = std::min(k, count + found);
  std::copy_n(merged, count, keys);
}

// Writes what a cell says of row r. No softcap: the head has its own.
inline void ReadCellOfRow(const LossShard& of, const LossCell& cell, int64_t r,
                          LossThreadScratch& scratch) {
  const CrossEntropyRow& ask = of.rows[r];
  const VocabShards& shards = of.shape.shards;
  const VocabShard here = {.first = shards.at(of.index).first + cell.first, .tokens = cell.tokens};
  const int64_t at = r * shards.most_cells() + cell.first / kCellElements;
  const auto place = [at](float* array) { return array == nullptr ? nullptr : array + at; };
  LossRow row = {};
  row.vocab = shards.vocab;
  row.x = {.logits = cell.logits + (r - cell.first_row) * cell.row_stride,
           .dtype = DType::kF32,
           .vocab = cell.tokens,
           .temperature = ask.temperature,
           .sketch = SketchAt(scratch.row.x, 1, 0, kCellElements)};
  row.x.sketch.max = place(of.to.max);
  row.x.sketch.sum = place(of.to.sum);
  row.total = place(of.to.total);
  row.moment = place(of.to.moment);
  const float* target = nullptr;
  if (RankIsWanted(ask)) {
    target = &of.targets[shards.OwnerOf(ask.target) * of.shape.rows + r];
  }
  const int64_t target_index = int64_t{ask.target} - here.first;
  int32_t before = 0;
  if (RankIsCounted(ask)) row.counted = {target, target_index, &before};
  ReadCells(row, ask, 0, 1, scratch);

  LossStretch& part = of.parts[of.PartOf(r, cell.stretch)];
  if (HWY_UNLIKELY(std::isnan(*row.x.sketch.sum))) {
    if (part.nan < 0) part.nan = static_cast<int32_t>(here.first + FirstNan(row.x, 0));
    return;
  }
  if (here.Holds(ask.target)) of.to.target[r] = Element(row.x, ask.target - here.first);
  if (target != nullptr && !RankIsCounted(ask)) {
    before = static_cast<int32_t>(CountBefore(row.x, *target, target_index));
  }
  part.before += before;
  if (ask.top_logprobs > 0) {
    uint64_t* const keys = of.keys + of.PartOf(r, cell.stretch) * of.shape.max_top;
    AddTop(row.x, here.first, ask.top_logprobs, keys, part.keys, scratch);
  }
  for (int32_t i = 0; i < ask.extra_count; ++i) {
    const int32_t id = of.extra_ids[ask.first_extra + i];
    if (!here.Holds(id)) continue;
    of.to.extra[r * of.shape.max_extra + i] = Element(row.x, id - here.first);
  }
}

inline void ReadCellOfRows(const LossShard& of, const LossCell& cell, LossThreadScratch& scratch) {
  for (int64_t r = cell.first_row; r < cell.first_row + cell.rows; ++r) {
    if (of.rows[r].active != 0) ReadCellOfRow(of, cell, r, scratch);
  }
}

inline void JoinStretchesOf(const LossShard& of, int64_t r, LossThreadScratch& scratch) {
  const CrossEntropyRow& ask = of.rows[r];
  uint64_t* const keys = scratch.keys.Get(of.stretches.count * int64_t{ask.top_logprobs});
  int64_t key_count = 0;
  int32_t before = 0;
  int32_t nan = -1;
  for (int s = 0; s < of.stretches.count; ++s) {
    const int64_t at = of.PartOf(r, s);
    const LossStretch& part = of.parts[at];
    if (nan < 0) nan = part.nan;
    before += part.before;
    if (part.keys > 0) std::copy_n(of.keys + at * of.shape.max_top, part.keys, keys + key_count);
    key_count += part.keys;
  }
  of.to.nan[r] = nan;
  if (RankIsWanted(ask)) of.to.before[r] = before;
  if (key_count == 0) return;
  scratch.list.sorter(keys, static_cast<size_t>(key_count), hwy::SortDescending());
  const int64_t top = std::min<int64_t>(ask.top_logprobs, key_count);
  std::copy_n(keys, top, of.to.keys + r * of.shape.keys());
}

// Writes the answers of row r from the blocks of all shards.
inline void AnswerMerged(const LinearCrossEntropyMergeArgs& args, int64_t r,
                         LossThreadScratch& scratch) {
  const CrossEntropyRow& ask = args.cross_entropy.rows[r];
  const VocabShards& shards = args.shape.shards;
  LossRow row = {};
  row.vocab = shards.vocab;
  row.x = {.logits = nullptr,
           .dtype = DType::kF32,
           .vocab = shards.vocab,
           .temperature = ask.temperature,
           .sketch = SketchAt(scratch.row.x, 1, 0, shards.vocab)};
  row.total = scratch.row.total.Get(shards.cells());
  row.moment = scratch.row.moment.Get(shards.cells());
  LossTokens tokens;
  float* const extra = scratch.extra.Get(ask.extra_count);
  uint64_t* const keys = scratch.keys.Get(shards.count * int64_t{ask.top_logprobs});
  int64_t key_count = 0;
  int32_t nan = -1;
  for (int s = 0; s < shards.count; ++s) {
    const VocabShard shard = shards.at(s);
    if (shard.tokens == 0) break;
    const LossPartials from = args.shape.Of(args.blocks, s);
    const int64_t cells = shard.cells();
    const int64_t first = r * shards.most_cells();
    const int64_t to = shard.first / kCellElements;
    std::copy_n(from.max + first, cells, row.x.sketch.max + to);
    std::copy_n(from.sum + first, cells, row.x.sketch.sum + to);
    if (EffectiveSmoothing(ask, row.vocab) > 0) {
      std::copy_n(from.total + first, cells, row.total + to);
    }
    if ((ask.want & kWantEntropy) != 0) std::copy_n(from.moment + first, cells, row.moment + to);
    if (nan < 0) nan = from.nan[r];
    if (shard.Holds(ask.target)) tokens.target = from.target[r];
    if (RankIsWanted(ask)) tokens.before += from.before[r];
    const int64_t top = std::min<int64_t>(ask.top_logprobs, shard.tokens);
    if (top > 0) std::copy_n(from.keys + r * args.shape.keys(), top, keys + key_count);
    key_count += top;
    for (int32_t i = 0; i < ask.extra_count; ++i) {
      if (!shard.Holds(args.cross_entropy.extra_ids[ask.first_extra + i])) continue;
      extra[i] = from.extra[r * args.shape.max_extra + i];
    }
  }
  if (HWY_UNLIKELY(nan >= 0)) return AnswerNan(args.cross_entropy, r, nan);
  if (key_count > 0) {
    scratch.list.sorter(keys, static_cast<size_t>(key_count), hwy::SortDescending());
  }
  tokens.keys = keys;
  tokens.extra = extra;
  AnswerWhole(args.cross_entropy, r, row, FindPeak(row.x).max, tokens);
}

}  // namespace logitd::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
