// linear_*: ops on the logits of hidden states under a head, without a [rows, vocab] tensor.
#ifndef LOGITD_KERNELS_LINEAR_H_
#define LOGITD_KERNELS_LINEAR_H_

#include <cstdint>

#include "kernels/cross_entropy.h"
#include "kernels/divergence.h"
#include "kernels/head.h"
#include "kernels/sample.h"
#include "kernels/softmax_topk.h"
#include "kernels/types.h"
#include "kernels/verify.h"

namespace logitd {

// Each op computes the logits of kernels/head.h in fp32, then runs the op of that name on them,
// with its order, ties, statuses and accuracy. The product adds its own rounding: |error of x_i| <=
// hidden * 2^-24 * sum_d |weight_id g_d| at most; in practice about sqrt(hidden) takes the place of
// hidden. NaN or infinities in a hidden state affect only the logits and the status of their own
// row. A row's bits depend only on its hidden state, its parameters and the head. Scratch is
// bounded: a block of rows by the vocabulary, or a block of the vocabulary, at a time; ops that
// make gradients may also hold d_hidden in f32.
//
// A head may be cut over several devices: kernels/shards.h has the two halves of each op.
//
// All pointers are in the memory of the backend that runs the op. `logits` of the inner arguments
// is ignored.
struct LinearTopKArgs {
  TensorView hidden;  // [rows, head.hidden()], the weight's dtype, 16-byte aligned rows
  HeadView head;
  SoftmaxTopKArgs topk;
};

struct LinearSampleArgs {
  TensorView hidden;  // as in LinearTopKArgs
  HeadView head;
  SampleArgs sample;
  // The largest KeptTokens (kernels/sampling_rules.h) of all rows; 0: unknown, or a row has 0. It
  // tells devices that have to exchange what they know how little is enough: it picks the way,
  // never the bits.
  int32_t max_kept = 0;
};

// Blocks of rows may end inside a sequence.
struct LinearVerifyArgs {
  TensorView hidden;  // as in LinearTopKArgs
  HeadView head;
  VerifyArgs verify;
};

struct LinearCrossEntropyArgs {
  TensorView hidden;  // as in LinearTopKArgs
  HeadView head;
  CrossEntropyArgs cross_entropy;  // row.softcap is 0: the head has its own
};

// The arguments of the rows [first, first + count).
inline LinearCrossEntropyArgs RowsOf(const LinearCrossEntropyArgs& args, int64_t first,
                                     int64_t count) {
  return {.hidden = RowsOf(args.hidden, first, count),
          .head = args.head,
          .cross_entropy = RowsFrom(args.cross_entropy, first)};
}

// Two heads of one vocabulary, of any sizes and types. One of the two may be empty (0 tokens): then
// that input is its logits in `divergence`, in f32. Where one is cut over several devices, the
// other may be cut over them too, or whole on the first of them.
struct LinearDivergenceArgs {
  TensorView hidden;  // as in LinearTopKArgs
  HeadView head;
  TensorView reference_hidden;  // as many rows, of reference_head
  HeadView reference_head;
  DivergenceArgs divergence;  // logits beside a head are ignored

  int64_t rows() const { return head.vocab() > 0 ? hidden.rows : reference_hidden.rows; }
  int64_t vocab() const { return head.vocab() > 0 ? head.vocab() : reference_head.vocab(); }
};

// Writes the gradients of sum_r upstream_r loss_r. G is the [rows, vocab] gradient of the logits x:
// that of CrossEntropyBackwardArgs, times the derivative of the head's softcap. It never exists as
// a whole. d_hidden = scale G weight, d_weight = scale G^T hidden, d_bias = sum over rows of G.
// Sums are fp32; blocks of G may be rounded to the weight's dtype before the products, and 16-bit
// results are rounded once more. The head has no norm. A row of d_hidden has bits of its own;
// d_weight and d_bias sum over rows, in an order fixed by the number of rows, or where counted_rows
// is not -1 by which rows are counted.
//
// f16 has few exponents. Under an f16 weight an element of G may also be off by 2^-37 b, where b of
// its row is |upstream / temperature| (|1 + 2 z_loss logsumexp| + 1); and in d_weight an element of
// the row's hidden state by 2^-24 B / b, where B is the largest b of all rows.
//
// Ignored and skipped rows add nothing; d_hidden of an ignored row is zeros, of a skipped row it is
// not written. A row whose logsumexp is not finite makes its d_hidden, and all d_weight and d_bias,
// NaN.
struct LinearCrossEntropyBackwardArgs {
  TensorView hidden;  // as in LinearTopKArgs
  HeadView head;
  const CrossEntropyRow* rows = nullptr;  // [rows]
  const float* logsumexp = nullptr;       // [rows], as the forward wrote it
  const float* upstream = nullptr;        // [rows]
  MutableTensorView d_hidden;             // [rows, hidden], the weight's dtype or f32
  MutableTensorView d_weight;             // [vocab, hidden], the weight's dtype or f32
  float* d_bias = nullptr;                // [vocab], or null: not wanted
  int64_t counted_rows = -1;              // as in CrossEntropyArgs
};

// linear_cross_entropy, then its backward with the logsumexp just written, in one call that may
// make the logits once for both. Answers, statuses and accuracy are those of the two ops, except
// that G may have two roundings to the weight's dtype: of probabilities, and of its other factors.
// A hidden state's elements below 2^-66, or of 2^97 and more, may lose digits or overflow in
// d_weight.
//
// Rows want no rank, entropy, top tokens or extra ids. No output overlaps another or an input, as
// d_weight may serve as scratch before it holds gradients. Among calls with the same head and
// types, all with or all without d_bias, and with the same stride and alignment of d_weight, the
// bits of a row's answers and d_hidden depend only on that row. The exception are calls with more
// rows than d_weight and scratch have room for: they run the two ops one after the other, with
// other bits.
struct LinearCrossEntropyTrainingArgs {
  LinearCrossEntropyBackwardArgs gradient;  // its logsumexp is ignored
  CrossEntropyAnswers answers;              // only loss, logsumexp, target_logprob, status

  LinearCrossEntropyArgs Forward() const {
    return {.hidden = gradient.hidden,
            .head = gradient.head,
            .cross_entropy = {.rows = gradient.rows,
                              .want = 0,
                              .max_top_logprobs = 0,
                              .counted_rows = gradient.counted_rows,
                              .answers = answers}};
  }
  LinearCrossEntropyBackwardArgs Backward() const {
    LinearCrossEntropyBackwardArgs args = gradient;
    args.logsumexp = answers.logsumexp;
    return args;
  }
};

}  // namespace logitd

#endif  // LOGITD_KERNELS_LINEAR_H_
