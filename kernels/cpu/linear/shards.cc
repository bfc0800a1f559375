// The halves of linear ops on the CPU that exchange logits (kernels/shards.h): the logits of a
// shard's tokens, and the merges, each of which is the op that takes logits, on whole rows.
//
// Cost: the partial is the product of the shard; a merge copies 4 bytes for each row and token,
// then runs its op.
#include <algorithm>
#include <array>

#include "kernels/cpu/linear/block_logits.h"
#include "kernels/cpu/linear/linear.h"
#include "kernels/cpu/sampling/sample.h"

namespace logitd::cpu {
namespace {

using WholeRows = std::array<TensorView, 2>;  // of each input

// Puts the logits of all shards together, a block of rows at a time, and calls run(first row,
// logits). Without blocks there is one input, whose logits are `given`.
template <class Run>
void ForWholeRows(const SamplePartialShape& shape, const std::byte* blocks, const TensorView& given,
                  ThreadPool& pool, LinearScratch& scratch, const Run& run) {
  WholeRows whole;
  if (blocks == nullptr) {
    whole[0] = given;
    return run(int64_t{0}, whole);
  }
  const VocabShards& shards = shape.shards;
  const int64_t at_once = RowsAtOnce(shape.inputs * shards.vocab);
  for (int64_t begin = 0; begin < shape.rows; begin += at_once) {
    const int64_t rows = std::min(at_once, shape.rows - begin);
    const int64_t of_input = RoundUp(rows * shards.vocab, kMaxLanes);
    float* const logits = scratch.logits.Get(shape.inputs * of_input);
    pool.ParallelFor(shape.inputs * rows * shards.count, [&](int64_t item) {
      const auto s = static_cast<int>(item % shards.count);
      const int64_t r = item / shards.count % rows;
      const auto input = static_cast<int>(item / shards.count / rows);
      const VocabShard shard = shards.at(s);
      const float* const from = shape.Of(blocks, s, input) + (begin + r) * shards.most_tokens();
      std::copy_n(from, shard.tokens, logits + input * of_input + r * shards.vocab + shard.first);
    });
    for (int i = 0; i < shape.inputs; ++i)
      whole[static_cast<size_t>(i)] = {logits + i * of_input, DType::kF32, rows, shards.vocab,
                                       shards.vocab};
    run(begin, whole);
  }
}

}  // namespace

void LinearSamplePartial(const LinearSamplePartialArgs& args, ThreadPool& pool,
                         LinearScratch& scratch, const std::atomic<bool>* abandoned) {
  const int64_t tokens = args.head.vocab();
  const int64_t stride = args.shape.shards.most_tokens();
  float* const to = args.shape.At(args.block, args.input);
  for (int64_t begin = 0; tokens > 0 && begin < args.hidden.rows; begin += kMostRows) {
    const int64_t rows = std::min(kMostRows, args.hidden.rows - begin);
    ComputeRows(args.hidden, args.head, begin, rows, to + begin * stride, stride, pool, scratch,
                abandoned);
    if (IsAbandoned(abandoned)) return;
  }
}

void LinearSampleMerge(const LinearSampleMergeArgs& args, ThreadPool& pool,
                       LinearScratch& scratch) {
  ForWholeRows(args.shape, args.blocks, {}, pool, scratch,
               [&](int64_t first, const WholeRows& logits) {
                 SampleArgs part = RowsFrom(args.sample, first);
                 part.logits = logits[0];
                 Sample(part, pool, scratch.sample);
               });
}

void LinearVerifyMerge(const LinearVerifyMergeArgs& args, ThreadPool& pool,
                       LinearScratch& scratch) {
  ForWholeRows(args.shape, args.blocks, args.verify.sample.logits, pool, scratch,
               [&](int64_t first, const WholeRows& logits) {
                 VerifyArgs part = args.verify;
                 part.sample.logits = logits[0];
                 VerifyRows(part, args.pass, args.first_row + first, pool, scratch.verify);
               });
}

void LinearDivergenceMerge(const LinearDivergenceMergeArgs& args, ThreadPool& pool,
                           LinearScratch& scratch) {
  ForWholeRows(args.shape, args.blocks, {}, pool, scratch,
               [&](int64_t first, const WholeRows& logits) {
                 DivergenceArgs part = RowsFrom(args.divergence, first);
                 const TensorView* next = logits.data();
                 const int64_t rows = next->rows;
                 part.logits = args.has_first ? *next++ : RowsOf(part.logits, first, rows);
                 part.reference_logits =
                     args.has_reference ? *next : RowsOf(part.reference_logits, first, rows);
                 Divergence(part, pool, scratch.divergence);
               });
}

void LinearSupportMerge(const LinearSupportMergeArgs& args, ThreadPool& pool,
                        LinearScratch& scratch) {
  ForWholeRows(args.shape, args.blocks, args.cross_entropy.logits, pool, scratch,
               [&](int64_t first, const WholeRows& logits) {
                 CrossEntropyArgs part = RowsFrom(args.cross_entropy, first);
                 part.logits = logits[0];
                 pool.ParallelFor(part.logits.rows, [&](int64_t r) {
                   const CrossEntropyRow& ask = part.rows[r];
                   if (ask.active == 0) return;
                   if (IsLeftOut(part, ask)) return AnswerLeftOut(part.answers, r);
                   if (!IsWhole(ask)) CrossEntropyOfSupport(part, r, RowData(part.logits, r));
                 });
               });
}

}  // namespace logitd::cpu
