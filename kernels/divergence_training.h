// linear_divergence_training: how far a student is from its reference, both given as hidden states
// under heads, and the gradients for the student, in one call.
#ifndef LOGITD_KERNELS_DIVERGENCE_TRAINING_H_
#define LOGITD_KERNELS_DIVERGENCE_TRAINING_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "kernels/divergence.h"
#include "kernels/head.h"
#include "kernels/types.h"

namespace logitd {

// The loss of a row: p is the student's distribution, q the reference's, m = (1 - beta) p + beta q.
enum class DivergenceLoss : int32_t {
  kForwardKl = 0,      // KL(p || q)
  kReverseKl = 1,      // KL(q || p)
  kJensenShannon = 2,  // beta KL(q || m) + (1 - beta) KL(p || m)
};

// How many are named above.
inline constexpr int32_t kDivergenceLosses = 3;

// A row's numbers that the op keeps for its gradients. They are read again within the call, and
// may be dropped after it.
struct DivergenceTrainingRow {
  DivergenceNorms norms;
  float divergence;  // KL(p || q); of kJensenShannon KL(p || m), of kReverseKl 0
  int32_t counts;    // 0: the row's gradients are zeros
};
static_assert(sizeof(DivergenceTrainingRow) == 32);

// Writes the loss of every row, and the gradients of sum_r upstream_r loss_r for the student. With
// x and y the logits of kernels/head.h of the two heads, p = softmax(x / temperature) and
// q = softmax(y / reference_temperature), as kernels/divergence.h defines them, also where a logit
// is infinite. The reference is a constant: it has no gradient. G is the [rows, vocab] gradient of
// x before the head's softcap, and never exists as a whole:
//
//   G_i = upstream / temperature * s_i g_i
//   g_i = p_i (ln p_i - ln q_i - KL(p || q))               kForwardKl
//       = p_i - q_i                                        kReverseKl
//       = (1 - beta) p_i (ln p_i - ln m_i - KL(p || m))    kJensenShannon
//   s_i = 1 - (x_i / softcap)^2 where the head has a softcap, else 1
//
//   d_hidden = scale G weight, d_weight = scale G^T hidden, d_bias = sum over rows of G
//
// The g_i follow from dp_j / dz_i = p_j ([i = j] - p_i), z = x / temperature: a loss L(p) has
// dL / dz_i = p_i (L_i - sum_j p_j L_j) with L_i = dL / dp_i. The L_i are ln p_i - ln q_i + 1;
// -q_i / p_i; and (1 - beta) (ln p_i - ln m_i), because what the change of m adds, (1 - beta) -
// (1 - beta) m_i / m_i, is 0. A token with p_i = 0 has g_i = 0, or -q_i in kReverseKl.
//
// A row has gradients of zeros where its loss is not finite or the student has a logit of +inf; its
// hidden state, which may hold NaN or infinities, then adds nothing to d_weight. Such are a row
// with NaN (kNanLogit, its loss NaN), an empty row (kEmptySupport, NaN), and a row with status kOk
// whose loss is +inf, because one distribution lacks a token of the other (kForwardKl, kReverseKl).
// kJensenShannon is finite wherever neither row is empty. Upstream may be 0 for a row that is only
// measured. A skipped row adds nothing, and neither its answers nor its d_hidden are written.
// Weights that are not finite make d_hidden of the other rows NaN.
//
// Losses are never below 0. A student beside itself (one hidden state, head and temperature) has a
// loss of exactly 0 and gradients of exactly 0.
//
// Accuracy against double precision, from the same logits: |error of a loss| <= 4e-6 max(1, loss,
// ln V); |error of G_i| <= 6e-6 |upstream| / temperature t_i, of which 2e-6 are those of a
// logsumexp and 4e-6 those of cross_entropy's backward, with
//
//   t_i = p_i + q_i                                                       kReverseKl
//       = p_i (1 + ln V + |ln p_i| + |ln q_i| + KL(p || q))               kForwardKl
//       = p_i (1 + ln V + |ln p_i| + |ln q_i| + |ln (beta - beta^2)|)     kJensenShannon
//
// without |ln q_i| where q_i = 0. p_i and q_i below 2^-126 may count as 0. The products have the
// accuracy, and G the rounding to the weight's dtype, of LinearCrossEntropyBackwardArgs. Under an
// f16 weight an element of G may also be off by 2^-37 b, where b of its row is |upstream /
// temperature| (1 + divergence), and in d_weight an element of the row's hidden state by 2^-24 B /
// b, where B is the largest b of all rows.
//
// The bits of a row's loss and status depend only on its two hidden states, its parameters and the
// heads; those of its d_hidden too, among calls with the same heads, types and kind, all with or
// all without d_weight, with the same stride and alignment of it, and likewise of d_bias. The
// exception are calls with more rows than d_weight, which may serve as scratch before it holds
// gradients, and scratch have room for. d_weight and d_bias sum over rows, in an order fixed by
// their number. Sources: Kullback & Leibler, 1951; Lin, Divergence measures based on the Shannon
// entropy, 1991; Agarwal et al., arXiv:2306.13649 (generalized JSD, as TRL's GKDTrainer has it: its
// beta, with the limits 0 and 1, which it takes for kReverseKl and kForwardKl, left out).
//
// Errors: CheckDivergenceTraining checks the parameters. All pointers are in the memory of the
// backend that runs the op. No output overlaps another or an input.
struct LinearDivergenceTrainingArgs {
  TensorView hidden;            // the student's, [rows, head.hidden()], as in LinearTopKArgs
  HeadView head;                // without a norm; as the other one, not cut over several devices
  TensorView reference_hidden;  // as many rows, of reference_head
  HeadView reference_head;      // of the same vocabulary; hidden size, type and options of its own
  const DivergenceRow* rows = nullptr;  // [rows]; targets have no effect
  const float* upstream = nullptr;      // [rows], d total / d loss of the row
  DivergenceLoss kind = DivergenceLoss::kReverseKl;
  float beta = 0.5f;  // in (0, 1); of kJensenShannon
  // Answers.
  float* loss = nullptr;                    // [rows], in nats
  RowStatus* status = nullptr;              // [rows]
  DivergenceTrainingRow* memory = nullptr;  // [rows]
  MutableTensorView d_hidden;  // [rows, hidden], the weight's dtype or f32; data null: not wanted
  MutableTensorView d_weight;  // [vocab, hidden], the weight's dtype or f32; data null: not wanted
  float* d_bias = nullptr;     // [vocab], or null: not wanted
};

// A request as it came in.
struct DivergenceTrainingRequest {
  DivergenceRequest rows;
  DivergenceLoss kind = DivergenceLoss::kReverseKl;
  float beta = 0.5f;
  bool head_has_norm = false;
};

// OK, or INVALID_ARGUMENT with the field, the row, the value and what is allowed. CheckHead checks
// heads, CheckHidden hidden states. Thread-safe.
absl::Status CheckDivergenceTraining(const DivergenceTrainingRequest& request);

}  // namespace logitd

#endif  // LOGITD_KERNELS_DIVERGENCE_TRAINING_H_
