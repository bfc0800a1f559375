// linear_*: ops on the logits of hidden states under a head, without a [rows, vocab] tensor.
#ifndef LOGITD_KERNELS_LINEAR_H_
#define LOGITD_KERNELS_LINEAR_H_

#include <cstdint>

#include "kernels/cross_entropy.h"
#include "kernels/head.h"
#include "kernels/sample.h"
#include "kernels/softmax_topk.h"
#include "kernels/types.h"

namespace logitd {

// Each op means: the logits of kernels/head.h in fp32, then the op of that name on them, with its
// order, ties, statuses and accuracy, to which the product's rounding is added: |error of x_i| <=
// hidden * 2^-24 * sum_d |weight_id g_d| at most, and about its square root of hidden times that in
// practice. NaN or infinities in a hidden state show in its own row's logits, and its status,
// alone. A row's bits depend on its own hidden state, its parameters and the head. Scratch is
// bounded: a block of rows by the vocabulary, or a block of the vocabulary, at a time; ops that
// make gradients may also hold d_hidden in f32.
//
// All pointers are in the memory of the backend that runs the op. `logits` of the inner arguments
// is not looked at.
struct LinearTopKArgs {
  TensorView hidden;  // [rows, head.hidden()], the weight's dtype, 16-byte aligned rows
  HeadView head;
  SoftmaxTopKArgs topk;
};

struct LinearSampleArgs {
  TensorView hidden;  // as in LinearTopKArgs
  HeadView head;
  SampleArgs sample;
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

// Writes the gradients of sum_r upstream_r loss_r. With G the [rows, vocab] gradients of the logits
// x (CrossEntropyBackwardArgs, times the derivative of the head's softcap), which never exist as a
// whole: d_hidden = scale G weight, d_weight = scale G^T hidden, d_bias = sum over rows of G. Sums
// in fp32; blocks of G may be rounded to the weight's dtype before the products, and 16-bit results
// are rounded once more. The head has no norm. d_hidden's bits are a row's own; d_weight and d_bias
// sum over rows in an order fixed by the number of rows.
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
};

// linear_cross_entropy and its backward in one call, which may make the logits once for both. It
// means the one and then the other, with the logsumexp that was written: answers, statuses and
// accuracy are theirs, but that blocks of G may be rounded to the weight's dtype twice, the first
// time as probabilities.
//
// Rows want neither rank, entropy, tops nor extras. No output overlaps another or an input:
// d_weight may hold other things before its gradients. A row's answers and d_hidden have bits of
// its own among calls with the same head and types, all with or all without d_bias, and with
// d_weights of one stride and alignment; but calls of more rows than there is room for beside the
// logits' successors, in d_weight or in scratch, are the two ops, whose bits are others.
struct LinearCrossEntropyTrainingArgs {
  LinearCrossEntropyBackwardArgs gradient;  // its logsumexp is not looked at
  CrossEntropyAnswers answers;              // loss, logsumexp, target_logprob, status

  LinearCrossEntropyArgs Forward() const {
    return {.hidden = gradient.hidden,
            .head = gradient.head,
            .cross_entropy = {
                .rows = gradient.rows, .want = 0, .max_top_logprobs = 0, .answers = answers}};
  }
  LinearCrossEntropyBackwardArgs Backward() const {
    LinearCrossEntropyBackwardArgs args = gradient;
    args.logsumexp = answers.logsumexp;
    return args;
  }
};

}  // namespace logitd

#endif  // LOGITD_KERNELS_LINEAR_H_
