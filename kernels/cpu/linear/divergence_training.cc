// linear_divergence_training on the CPU.
//
//   losses:     for up to 64 rows at a time the logits of both heads, then divergence; of
//               kJensenShannon a second read of both, because m needs both logsumexps.
//   gradients:  gradients.h, from logits of both heads that are made again, in double precision
//               token by token.
//
// Cost: six products of the forward's size, which is the floor of this order; five exponentials or
// logarithms a token at most. Limited by: the products where a hidden state is long, else by the
// arithmetic of a token.
#include <algorithm>
#include <cmath>
#include <cstdint>

#include "kernels/cpu/linear/block_logits.h"
#include "kernels/cpu/linear/gradients.h"
#include "kernels/cpu/linear/linear.h"
#include "kernels/divergence_mixture.h"
#include "kernels/divergence_sums.h"

namespace logitd::cpu {
namespace {

// ln p of a row's tokens.
struct RowLogprobs {
  double max, over_temperature, log_sum;

  RowLogprobs(float max, float temperature, double log_sum)
      : max(max), over_temperature(1 / ActingTemperature(temperature)), log_sum(log_sum) {}

  double At(float x) const {
    if (max < kInf) return (x - max) * over_temperature - log_sum;
    return x < kInf ? -kInf : -log_sum;  // beside a certain token all others have nothing
  }
};

// The log-probabilities of a row of the student and of its reference.
struct PairLogprobs {
  RowLogprobs of_p, of_q;

  PairLogprobs(const DivergenceRow& ask, const DivergenceNorms& norms)
      : of_p(norms.max, ask.temperature, norms.log_sum),
        of_q(norms.reference_max, ask.reference_temperature, norms.reference_log_sum) {}
};

// A token of both: its probabilities, one of which may be 0, and ln p - ln q.
struct Token {
  double p, q, apart;

  Token(const PairLogprobs& row, float x, float y) {
    const double ln_p = row.of_p.At(x), ln_q = row.of_q.At(y);
    p = std::exp(ln_p);
    q = std::exp(ln_q);
    apart = ln_p - ln_q;
  }

  // ln p - ln m and ln q - ln m, where p or q is above 0.
  struct Above {
    double p, q;
  };
  Above Mixture(double beta) const {
    const auto token = MixtureToken<double>::Of(apart, beta, 1 - beta);
    const double more = std::max(p, q), less = std::min(p, q);
    const double above = token.IsNear() ? -std::log1p(token.share * ((less - more) / more))
                                        : -std::log(token.rest + token.share * (less / more));
    return {token.OfP(above), token.OfQ(above)};
  }
};

// KL(p || m) and KL(q || m) of a row.
struct MixtureSums {
  double p = 0, q = 0;
};
MixtureSums SumMixture(const PairLogprobs& row, const float* x, const float* y, int64_t vocab,
                       double beta) {
  MixtureSums sums;
  for (int64_t i = 0; i < vocab; ++i) {
    const Token token(row, x[i], y[i]);
    if (token.p == 0 && token.q == 0) continue;
    const Token::Above above = token.Mixture(beta);
    if (token.p > 0) sums.p += token.p * above.p;
    if (token.q > 0) sums.q += token.q * above.q;
  }
  return sums;
}

// Writes the loss of row r, and what its gradients need. `measured` holds the answers of divergence
// for it.
void ConcludeRow(const LinearDivergenceTrainingArgs& args, int64_t r, const float* x,
                 const float* y, const DivergenceAnswers& measured, int64_t at) {
  DivergenceTrainingRow& to = args.memory[r];
  to.norms = measured.norms[at];
  float loss =
      args.kind == DivergenceLoss::kForwardKl ? measured.forward_kl[at] : measured.reverse_kl[at];
  to.divergence = args.kind == DivergenceLoss::kForwardKl ? loss : 0;
  if (args.kind == DivergenceLoss::kJensenShannon && args.status[r].code == RowCode::kOk) {
    const double beta = args.beta;
    const MixtureSums sums =
        SumMixture(PairLogprobs(args.rows[r], to.norms), x, y, args.head.vocab(), beta);
    loss = static_cast<float>(std::max(0.0, beta * sums.q + (1 - beta) * sums.p));
    to.divergence = static_cast<float>(sums.p);
  }
  args.loss[r] = loss;
  to.counts = std::isfinite(loss) && to.norms.max < kInf ? 1 : 0;
}

// The gradients of the student's logits, for Gradients.
struct DivergenceGradient {
  const LinearDivergenceTrainingArgs& args;

  RowUse Use(int64_t r) const {
    if (args.rows[r].active == 0) return RowUse::kSkipped;
    return args.memory[r].counts != 0 ? RowUse::kCounted : RowUse::kIgnored;
  }

  void Make(const GradientBlock& of, ThreadPool& pool, LinearScratch& scratch) const {
    const auto counts = [&](int64_t r) { return Use(r) == RowUse::kCounted; };
    float* const reference =
        scratch.divergence_training.reference_logits.Get(of.rows * of.tokens());
    ComputeBlock(args.hidden, args.head, EpilogueOf(args.head), of, of.to, counts, pool, scratch);
    ComputeBlock(args.reference_hidden, args.reference_head, EpilogueOf(args.reference_head), of,
                 reference, counts, pool, scratch);
    pool.ParallelFor(of.rows, [&](int64_t r) {
      if (!counts(of.first + r)) return;
      MakeRow(of.first + r, of.tokens(), of.to + r * of.tokens(), reference + r * of.tokens());
    });
  }

 private:
  // Turns logits of the student into their gradients.
  void MakeRow(int64_t r, int64_t tokens, float* x, const float* y) const {
    const DivergenceTrainingRow& of = args.memory[r];
    const PairLogprobs row(args.rows[r], of.norms);
    const double scale = args.upstream[r] * row.of_p.over_temperature;
    const double softcap = args.head.softcap;
    for (int64_t i = 0; i < tokens; ++i) {
      double gradient = scale * OfToken(Token(row, x[i], y[i]), of.divergence);
      if (softcap > 0) gradient *= 1 - x[i] / softcap * (x[i] / softcap);
      x[i] = static_cast<float>(gradient);
    }
  }

  double OfToken(const Token& token, double divergence) const {
    switch (args.kind) {
      case DivergenceLoss::kForwardKl:
        return token.p == 0 ? 0 : token.p * (token.apart - divergence);
      case DivergenceLoss::kReverseKl:
        return token.p - token.q;
      case DivergenceLoss::kJensenShannon:
        return token.p == 0
                   ? 0
                   : (1 - double{args.beta}) * token.p * (token.Mixture(args.beta).p - divergence);
    }
    __builtin_unreachable();
  }
};

}  // namespace

void LinearDivergenceTraining(const LinearDivergenceTrainingArgs& args, ThreadPool& pool,
                              LinearScratch& scratch, const std::atomic<bool>* abandoned) {
  ForEachBlock(
      args.hidden, args.head, pool, scratch, abandoned,
      [&](int64_t first, const TensorView& logits) {
        const int64_t rows = logits.rows, vocab = logits.cols;
        float* const reference = scratch.divergence_training.reference_logits.Get(rows * vocab);
        ComputeRows(args.reference_hidden, args.reference_head, first, rows, reference, vocab, pool,
                    scratch, abandoned);
        if (IsAbandoned(abandoned)) return;
        float* const values = scratch.divergence_training.measured.Get(8 * rows);
        const DivergenceAnswers measured = {.forward_kl = values,
                                            .reverse_kl = values + rows,
                                            .entropy = values + 2 * rows,
                                            .reference_entropy = values + 3 * rows,
                                            .logsumexp = values + 4 * rows,
                                            .reference_logsumexp = values + 5 * rows,
                                            .target_logprob = values + 6 * rows,
                                            .reference_target_logprob = values + 7 * rows,
                                            .status = args.status + first,
                                            .norms = scratch.divergence_training.norms.Get(rows)};
        Divergence({.logits = logits,
                    .reference_logits = {reference, DType::kF32, rows, vocab, vocab},
                    .rows = args.rows + first,
                    .answers = measured},
                   pool, scratch.divergence);
        pool.ParallelFor(rows, [&](int64_t r) {
          if (args.rows[first + r].active == 0) return;
          ConcludeRow(args, first + r, static_cast<const float*>(logits.data) + r * vocab,
                      reference + r * vocab, measured, r);
        });
      });
  const bool any =
      args.d_hidden.data != nullptr || args.d_weight.data != nullptr || args.d_bias != nullptr;
  if (!any || IsAbandoned(abandoned)) return;
  const DivergenceGradient of = {.args = args};
  Gradients(HeadGradients{.hidden = args.hidden,
                          .head = args.head,
                          .d_hidden = args.d_hidden,
                          .d_weight = args.d_weight,
                          .d_bias = args.d_bias},
            of, pool, scratch)
      .Run();
}

}  // namespace logitd::cpu
