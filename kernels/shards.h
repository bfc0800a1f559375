// Heads whose vocabulary is cut over several devices: the parts, what the devices exchange, and the
// two halves of each linear op.
#ifndef LOGITD_KERNELS_SHARDS_H_
#define LOGITD_KERNELS_SHARDS_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "kernels/cross_entropy.h"
#include "kernels/divergence.h"
#include "kernels/head.h"
#include "kernels/sample.h"
#include "kernels/softmax_topk.h"
#include "kernels/types.h"
#include "kernels/verify.h"

namespace logitd {

// A call on a sharded head has three steps:
//
//   partial   Each device reads the same hidden states and its own rows of the head, and writes a
//             block of bytes.
//   exchange  One all-gather: the blocks of all shards, in the order of the shards, one after
//             another. All blocks of a call have the same size.
//   merge     Turns the blocks into answers. Any device may do it, or all.
//
// The answers are those of the linear op on one device (kernels/linear.h), to the bit, whatever the
// number of shards. This holds because shards are cut at cells, which are the unit of every sum
// over a row: partials are per cell, and the merge adds the cells in the order of one device. It
// holds within one backend and one model of device, as for any op. linear_divergence has the bits
// of divergence on the logits that linear_sample makes under the two heads: those of one device
// where that makes logits, as it always does on the CPU.
//
// A block is made of arrays, each on a 16-byte border, row after row. Elements that a comment does
// not mention are unspecified. On CUDA `sum` and `moment` are relative to a value near `max`, and
// the units of `total` and `moment` are those of its kernels: blocks of one backend are for that
// backend's merge only.
//
// A training framework can call the halves with an exchange of its own, NCCL's all-gather for
// instance: a Stream (kernels/backend.h) runs each. On CUDA blocks are device memory, and
// may be memory of a peer that the device has access to.

// Tokens that one partial sum covers, counted from token 0.
inline constexpr int64_t kVocabCell = 1024;

// The tokens [first, first + tokens) of a vocabulary.
struct VocabShard {
  int64_t first = 0;   // a multiple of kVocabCell
  int64_t tokens = 0;  // 0 where there are more shards than cells

  int64_t cells() const { return (tokens + kVocabCell - 1) / kVocabCell; }
  bool Holds(int64_t token) const { return token >= first && token < first + tokens; }
};

// A vocabulary in `count` shards, in the order of their tokens. Each has whole cells (the last cell
// of the vocabulary may be short), and at most one cell more than another.
struct VocabShards {
  int64_t vocab = 0;  // 1..kMaxVocab
  int count = 1;      // 1..kMaxShards

  int64_t cells() const { return (vocab + kVocabCell - 1) / kVocabCell; }
  int64_t most_cells() const { return (cells() + count - 1) / count; }                // of a shard
  int64_t most_tokens() const { return std::min(vocab, most_cells() * kVocabCell); }  // of a shard
  VocabShard at(int index) const {
    const int64_t more = cells() % count;  // shards with one cell more
    const int64_t first = cells() / count * index + std::min<int64_t>(index, more);
    const int64_t end = first + cells() / count + (index < more ? 1 : 0);
    const int64_t first_token = std::min(vocab, first * kVocabCell);
    return {.first = first_token, .tokens = std::min(vocab, end * kVocabCell) - first_token};
  }
  // The shard that holds the token.
  int OwnerOf(int64_t token) const {
    const int64_t cell = token / kVocabCell;
    const int64_t each = cells() / count;
    const int64_t in_larger = cells() % count * (each + 1);  // cells of the shards with one more
    return static_cast<int>(cell < in_larger ? cell / (each + 1)
                                             : cells() % count + (cell - in_larger) / each);
  }
};

inline constexpr int kMaxShards = 64;

// The head of a shard, in every struct below, has the weight [tokens, hidden] and the bias [tokens]
// of the shard; norm, scale and softcap are those of the whole head. Where the shard has no tokens,
// no pointer of its head is read.

// ---- linear_topk

struct TopKPartials {
  float* max;    // [rows, most_cells]: of each cell of the shard, the largest logit
  float* sum;    // [rows, most_cells]: sum of exp((x - max) / temperature); where max is +inf, the
                 // number of +inf; where it is -inf, 0; NaN where a logit is NaN
  int32_t* nan;  // [rows]: the lowest token of the shard whose logit is NaN; -1: none is
  uint64_t* keys;  // [rows, keys()]: the first min(k, tokens of the shard) tokens of the shard, in
      // the op's order. Unspecified where `nan` has one. High 32 bits: the logit (-0 as +0), its
      // sign bit flipped if it is positive, else all its bits. Low: ~token
};

// Bytes of a block: about 8 for each row and cell, and 8 for each row and key: 1 KiB a row at
// 128256 tokens on one device with k = 1, half of it on each of two.
struct TopKPartialShape {
  VocabShards shards;
  int64_t rows = 0;
  int32_t max_k = 0;  // >= every row's k

  int64_t keys() const { return std::min<int64_t>(max_k, shards.most_tokens()); }
  size_t bytes() const;  // of a block
  TopKPartials At(std::byte* block) const;
  // The arrays of one shard in `blocks`, those of all shards. Read-only.
  TopKPartials Of(const std::byte* blocks, int shard) const;
};

// Writes the block of one shard. A row with k = 0 is skipped.
struct LinearTopKPartialArgs {
  TensorView hidden;  // [shape.rows, hidden], as in LinearTopKArgs
  HeadView head;      // the shard's
  int shard = 0;      // its index
  TopKPartialShape shape;
  const SoftmaxTopKRow* rows = nullptr;  // [rows]; places of answers are ignored
  std::byte* block = nullptr;            // [shape.bytes()], 16-byte aligned
};

struct LinearTopKMergeArgs {
  TopKPartialShape shape;
  const std::byte* blocks = nullptr;  // [shards, shape.bytes()], 16-byte aligned
  SoftmaxTopKArgs topk;               // rows as in the partial; its logits are ignored
};

// ---- linear_sample
//
// What a row may be drawn from depends on edits, filters and a random number, so its logits are
// exchanged: 4 bytes for each row and token. For many rows, send them in several calls. Other ops
// have the same partial, and merges of their own: linear_verify, linear_divergence, and
// linear_cross_entropy of rows with supports.

struct SamplePartialShape {
  VocabShards shards;
  int64_t rows = 0;
  int inputs = 1;  // 2: a block has the logits of both inputs of linear_divergence

  // A block: for each input, from a 16-byte border on, f32 logits [rows, shards.most_tokens()].
  size_t input_bytes() const;
  size_t bytes() const { return static_cast<size_t>(inputs) * input_bytes(); }
  float* At(std::byte* block, int input) const;
  // The logits of one shard in `blocks`, those of all shards.
  const float* Of(const std::byte* blocks, int shard, int input = 0) const;
};

struct LinearSamplePartialArgs {
  TensorView hidden;  // [shape.rows, hidden], as in LinearSampleArgs
  HeadView head;      // the shard's
  int shard = 0;      // its index
  SamplePartialShape shape;
  int input = 0;               // the one of shape.inputs that is written
  std::byte* block = nullptr;  // [shape.bytes()], 16-byte aligned
};

struct LinearSampleMergeArgs {
  SamplePartialShape shape;
  const std::byte* blocks = nullptr;  // [shards, shape.bytes()], 16-byte aligned
  SampleArgs sample;                  // its logits are ignored
};

// ---- linear_verify
//
// The partial is that of linear_sample. The rows of a call may come in several merges, as many in
// each as there is room for; a sequence may be cut anywhere. They run on one stream, with no other
// call's between them: in each pass, from 0 on, all rows in their order.

// Passes over all rows. is_host: DeviceInfo::is_host of the merges' backend.
constexpr int VerifyMergePasses(const VerifyArgs& verify, bool is_host) {
  return !verify.blocks ? 1 : is_host ? 2 : 3;
}

// Bytes of device memory that one merge of a call leaves for the next; the call has `rows` rows.
constexpr size_t VerifyStateBytes(int64_t rows) {
  return (size_t{32} << 10) + static_cast<size_t>(rows) * 64;
}

struct LinearVerifyMergeArgs {
  SamplePartialShape shape;  // of the blocks: `rows` of the call
  // [shards, shape.bytes()], 16-byte aligned; null: `verify` has the logits of these rows, in f32.
  const std::byte* blocks = nullptr;
  VerifyArgs verify;      // of all rows of the call
  int64_t all_rows = 0;   // of the call
  int64_t first_row = 0;  // the call's row that is the blocks' first
  int pass = 0;
  std::byte* state = nullptr;  // [VerifyStateBytes(all_rows)], 256-byte aligned; null on the CPU
};

// ---- linear_divergence
//
// The partial is that of linear_sample, run for each input that is hidden states. One exchange
// brings the logits of both.

struct LinearDivergenceMergeArgs {
  SamplePartialShape shape;           // inputs: those in the blocks, the first before the reference
  const std::byte* blocks = nullptr;  // [shards, shape.bytes()], 16-byte aligned
  // The inputs that the blocks have. `divergence` has the logits of the others, in f32.
  bool has_first = true;
  bool has_reference = true;
  DivergenceArgs divergence;
};

// ---- linear_cross_entropy
//
// Rows with supports go another way, see below; partials and merges of the others may write
// anything for them.

struct LossPartials {
  float* max;     // [rows, most_cells]: as in TopKPartials, of the logits before the temperature
  float* sum;     // [rows, most_cells]: as in TopKPartials
  float* total;   // [rows, most_cells]: sum of x / 4096; null: no row is smoothed
  float* moment;  // [rows, most_cells]: sum of exp((x - max) / temperature) (x - max), in a unit of
                  // its backend; 0 where max is not finite; null: no row wants its entropy
  int32_t* nan;   // [rows]: as in TopKPartials
  // The rest is unspecified where `nan` has a token.
  float* target;    // [rows]: the target's logit, where the shard has the target
  int32_t* before;  // [rows]: tokens of the shard before the target, in the op's order, for rows
                    // that want a rank; null: none does
  uint64_t* keys;  // [rows, keys()]: the first min(top_logprobs, tokens of the shard) tokens, as in
                   // TopKPartials
  float* extra;    // [rows, max_extra]: logits of those extra ids that the shard has
};

// Bytes of a block: for each row and cell 8, 4 more with smoothing and 4 more with entropy; for
// each row about 16, 8 for each top token and 4 for each extra id.
struct LossPartialShape {
  VocabShards shards;
  int64_t rows = 0;
  bool totals = false;    // a row has label smoothing
  int32_t want = 0;       // what any row wants
  int32_t max_top = 0;    // >= every row's top_logprobs
  int32_t max_extra = 0;  // >= every row's extra_count

  int64_t keys() const { return std::min<int64_t>(max_top, shards.most_tokens()); }
  size_t bytes() const;  // of a block
  LossPartials At(std::byte* block) const;
  // The arrays of one shard in `blocks`, those of all shards. Read-only.
  LossPartials Of(const std::byte* blocks, int shard) const;
};

// A rank counts the tokens before the target on every shard, and only one has the target. So where
// a row wants a rank, there is a step before the partial, with an all-gather of its own of 4 bytes
// a row: writes the logits of the targets that the shard has. It costs one product of two vectors a
// row. The partials cannot carry ranks without this step: how many tokens of a shard come before a
// logit that the shard does not know may be any number, so it would have to send all of its logits,
// 4 bytes for each row and token.
struct LinearCrossEntropyTargetsArgs {
  TensorView hidden;  // [rows, hidden], as in LinearCrossEntropyArgs
  HeadView head;      // the shard's
  int shard = 0;      // its index
  VocabShards shards;
  const CrossEntropyRow* rows = nullptr;  // [rows]
  float* targets = nullptr;               // [rows]; not written where the shard lacks the target
};

// Writes the block of one shard.
struct LinearCrossEntropyPartialArgs {
  TensorView hidden;  // [shape.rows, hidden], as in LinearCrossEntropyArgs
  HeadView head;      // the shard's
  int shard = 0;      // its index
  LossPartialShape shape;
  const CrossEntropyRow* rows = nullptr;  // [rows]; softcap is 0; places of answers are ignored
  const int32_t* extra_ids = nullptr;     // of all rows
  const float* targets = nullptr;  // [shards, rows], gathered; read for rows that want a rank
  std::byte* block = nullptr;      // [shape.bytes()], 16-byte aligned
};

struct LinearCrossEntropyMergeArgs {
  LossPartialShape shape;
  const std::byte* blocks = nullptr;  // [shards, shape.bytes()], 16-byte aligned
  CrossEntropyArgs cross_entropy;     // rows as in the partial; its logits are ignored
};

// Rows with supports have the logits of linear_sample, whose partial this merge takes, after the
// other one where there are other rows too. Writes the answers of rows that have supports or are
// left out.
struct LinearSupportMergeArgs {
  SamplePartialShape shape;
  // [shards, shape.bytes()], 16-byte aligned; null: `cross_entropy` has the logits, in f32.
  const std::byte* blocks = nullptr;
  CrossEntropyArgs cross_entropy;
};

}  // namespace logitd

#endif  // LOGITD_KERNELS_SHARDS_H_
