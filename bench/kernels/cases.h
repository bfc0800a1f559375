// What the bench times, why, and what to hold it against.
#ifndef LOGITD_BENCH_KERNELS_CASES_H_
#define LOGITD_BENCH_KERNELS_CASES_H_

#include <cstdint>
#include <variant>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "bench/kernels/device.h"
#include "kernels/attention_softmax.h"
#include "kernels/cross_entropy.h"
#include "kernels/divergence_training.h"
#include "kernels/sample.h"
#include "kernels/types.h"
#include "kernels/verify.h"

namespace logitd::bench {

inline double TensorBytes(int64_t rows, int64_t cols, DType dtype) {
  return static_cast<double>(rows) * static_cast<double>(cols) * static_cast<double>(SizeOf(dtype));
}

struct TopKCase {
  int64_t rows;
  int64_t vocab;
  DType dtype;
  int32_t k;
  int64_t row_stride;  // elements

  // The fewest bytes that move, here and below.
  double FloorBytes() const { return TensorBytes(rows, vocab, dtype); }
};

struct SampleCase {
  int64_t rows;
  int64_t vocab;
  DType dtype;
  SampleRow row;        // every row's; seeds differ
  int32_t history = 0;  // tokens of every row
  bool mask = false;    // half the tokens allowed

  double FloorBytes() const { return TensorBytes(rows, vocab, dtype); }
};

// Which sequences have block verification.
enum class BlockSequences { kNone, kEveryOther, kAll };

// Sequences of `length` rows, each with a draft that its filters cut, except the last: so a bonus
// token is drawn from what the draft's probabilities leave.
struct VerifyCase {
  SampleCase rows;  // whole sequences
  int32_t length;
  DraftKind kind = DraftKind::kList;  // kList: of 64 tokens
  BlockSequences blocks = BlockSequences::kNone;

  double FloorBytes() const {
    const double probs = kind == DraftKind::kDense ? sizeof(float) : 0;
    return rows.FloorBytes() +
           probs * static_cast<double>(rows.rows) * static_cast<double>(rows.vocab);
  }
};

// All rows of a tensor of scores; a mask is [batch, 1, queries, keys], which the heads share, a
// quarter of it hidden. Backward: probs and their gradient in, the gradient of the scores out, all
// of one type.
struct AttentionCase {
  int64_t batch;
  int64_t heads;
  int64_t queries;
  int64_t keys;
  DType dtype;
  AttentionWindow window;
  MaskKind mask = MaskKind::kNone;  // kAdditive: in dtype
  bool backward = false;

  int64_t rows() const { return batch * heads * queries; }
  double FloorBytes() const;  // reads what the rows see, writes all keys
};

// Training is loss and gradient in one call; kTwoCalls is the same by cross_entropy and its
// backward.
enum class LossOp { kForward, kBackward, kTwoCalls, kTraining };
struct CrossEntropyCase {
  int64_t rows;
  int64_t vocab;
  DType dtype;
  CrossEntropyRow row;  // every row's; targets differ
  LossOp op = LossOp::kForward;

  double FloorBytes() const {
    return (op == LossOp::kForward ? 1 : 2) * TensorBytes(rows, vocab, dtype);
  }
};

struct DivergenceCase {
  int64_t rows;
  int64_t vocab;
  DType dtype;

  double FloorBytes() const { return 2 * TensorBytes(rows, vocab, dtype); }
};

// An op on hidden states under a head without bias, norm or softcap. Training is loss and gradients
// in one call; a divergence is of two such heads; rows of verify are sequences of
// kHeadSequenceRows.
enum class HeadOp {
  kTopK,
  kSample,
  kVerify,
  kBlockVerify,  // with block verification in all sequences
  kCrossEntropy,
  kTraining,
  kDivergence,
  kDivergenceTraining
};
inline constexpr int32_t kHeadSequenceRows = 6;
constexpr bool HasTwoHeads(HeadOp op) {
  return op == HeadOp::kDivergence || op == HeadOp::kDivergenceTraining;
}
struct HeadCase {
  HeadOp op;
  int64_t rows;
  int64_t hidden;
  int64_t vocab;
  DType dtype;
  int64_t ignored = 0;  // rows of losses and training whose target is ignored, here and there
  DivergenceLoss loss = DivergenceLoss::kReverseKl;  // of kDivergenceTraining

  double FloorBytes() const {
    return (HasTwoHeads(op) ? 2 : 1) * TensorBytes(vocab, hidden, dtype);
  }
};

using Case = std::variant<TopKCase, SampleCase, VerifyCase, AttentionCase, CrossEntropyCase,
                          DivergenceCase, HeadCase>;

// The time of a peer for the same work on an H200 (bench/results/h200/peers.json says which card,
// and when), and our goals there.
struct Anchor {
  const char* peer = "";
  double peer_us = 0;
  double goal_us = 0;
  double goal_share = 0;  // of the floor; for heads, of the product
};

struct Entry {
  const char* why;  // it is there
  Case shape;
  Anchor h200 = {};
};

// The bench's tables, in order. Their entries live as long as the program.
std::vector<absl::Span<const Entry>> CpuEntries();
std::vector<absl::Span<const Entry>> CudaEntries();

// Median time of a launch of the case's op, in microseconds.
absl::StatusOr<double> Time(const Case& shape, Device& device, Inputs& inputs);

// The same of its bare product, whatever the op; logits in the product's dtype, as peers have it.
absl::StatusOr<double> TimeProduct(const HeadCase& c, Device& device, Inputs& inputs);

}  // namespace logitd::bench

#endif  // LOGITD_BENCH_KERNELS_CASES_H_
