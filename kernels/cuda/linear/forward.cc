// linear_topk, _sample, _verify, _cross_entropy, _divergence: the logits of a block of rows are
// made in scratch, in fp32, of both heads for a divergence, and the op that takes logits runs on
// them. hopper/loss.cu computes losses without logits for the rows that want only losses and
// extras, and hopper/divergence.cu the divergences of two 16-bit heads of one type. Rows with
// supports take theirs from the logits that linear_sample makes. routes.cc says which kernel makes
// logits.
//
// A row's bits do not depend on other rows. Products of cuBLASLt have one fixed shape and use one
// algorithm, which splits no sum: the head and the device decide the number of rows in a block, and
// rows after the last are zeros.
//
// Cost of linear_cross_entropy: the product, and one write and one read of the logits of a block.
// Limited by: the product, 256 rows at a time. On Hopper, a call in which any row wants rank,
// entropy or top tokens multiplies twice: all rows through logits, and in hopper/loss.cu the groups
// of 256 rows that have a row that wants none of these. Measured where the product is; an f32 head
// with sample after it, 64 rows of 4096 x 128256, 92% of the product
// (bench/results/h200/kernels.json).
#include <algorithm>
#include <utility>

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/linear/block_logits.h"
#include "kernels/cuda/linear/counted_rows.h"
#include "kernels/cuda/linear/hopper/kernels.h"
#include "kernels/cuda/linear/pair_logits.h"
#include "kernels/cuda/linear/product.h"
#include "kernels/cuda/linear/routes.h"
#include "kernels/cuda/linear/split_rows.h"
#include "kernels/cuda/loss/support.h"
#include "kernels/cuda/ops.h"
#include "kernels/cuda/sampling/verify.h"

namespace logitd::cuda {
namespace {

// Ops that choose tokens need more scratch of their own than cross_entropy.
constexpr int kTokensScratchShare = 4;

// Runs `op`, which takes logits, on blocks of rows; `args` are those of all rows.
template <class Args>
cudaError_t RunOnLogits(LinearOp linear_op, const TensorView& hidden, const HeadView& head,
                        const Args& args,
                        cudaError_t (*op)(const Args&, const Scratch&, cudaStream_t),
                        Products& products, Scratch scratch, cudaStream_t stream) {
  const LinearRoute route = RouteOf(linear_op, head, scratch, /*logits=*/true);
  const int scratch_share = linear_op == LinearOp::kTokens ? kTokensScratchShare : 2;
  const BlockLogits block(head, head.vocab(), route, scratch_share, products, scratch, stream);
  for (int64_t first = 0; first < hidden.rows; first += block.rows()) {
    const int64_t rows = std::min(block.rows(), hidden.rows - first);
    cudaError_t error = block.Make(RowsOf(hidden, first, rows), scratch);
    if (error != cudaSuccess) return error;
    Args block_args = RowsFrom(args, first);
    block_args.logits = block.View(rows);
    error = op(block_args, scratch, stream);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

cudaError_t LossesFromLogits(const LinearCrossEntropyArgs& args, Products& products,
                             const Scratch& scratch, cudaStream_t stream) {
  return RunOnLogits(LinearOp::kLosses, args.hidden, args.head, args.cross_entropy, &CrossEntropy,
                     products, scratch, stream);
}

// The rows of `args` by hopper/loss.cu. Where `mixed`, rows that want more than losses and extras
// go through logits.
cudaError_t HopperLosses(LinearCrossEntropyArgs args, bool mixed, Products& products,
                         Scratch scratch, cudaStream_t stream) {
  const int64_t rows = args.hidden.rows;
  cudaError_t error = cudaSuccess;
  int32_t* plain_groups = nullptr;
  if (mixed) {
    SplitRowLists lists;
    error = SplitRows(args.cross_entropy.rows, rows, lists, scratch, stream);
    if (error != cudaSuccess) return error;
    args.cross_entropy.rows = lists.more;
    error = LossesFromLogits(args, products, scratch, stream);
    if (error != cudaSuccess) return error;
    args.cross_entropy.rows = lists.plain;
    plain_groups = lists.plain_groups;
  }
  if (args.head.norm != nullptr) {
    std::byte* states = scratch.Take<std::byte>(rows * PreparedStride(args.head) *
                                                static_cast<int64_t>(SizeOf(args.hidden.dtype)));
    error = Prepare(args.head, rows, states, args.hidden, stream);
    if (error != cudaSuccess) return error;
  }
  return hopper::Losses(args, plain_groups, scratch, stream);
}

}  // namespace

cudaError_t LinearTopK(const LinearTopKArgs& args, Products& products, const Scratch& scratch,
                       cudaStream_t stream) {
  return RunOnLogits(LinearOp::kTokens, args.hidden, args.head, args.topk, &SoftmaxTopK, products,
                     scratch, stream);
}

cudaError_t LinearSample(const LinearSampleArgs& args, Products& products, const Scratch& scratch,
                         cudaStream_t stream) {
  return RunOnLogits(LinearOp::kTokens, args.hidden, args.head, args.sample, &Sample, products,
                     scratch, stream);
}

// A block has as many rows as that of linear_sample, so the logits have the same bits.
cudaError_t LinearVerify(const LinearVerifyArgs& args, Products& products, const Scratch& given,
                         cudaStream_t stream) {
  const int64_t all = args.hidden.rows;
  if (args.verify.sequence_count == 0 || all == 0) return cudaSuccess;
  Scratch scratch = given;
  const LinearRoute route = RouteOf(LinearOp::kTokens, args.head, scratch, /*logits=*/true);
  const BlockLogits block(args.head, args.head.vocab(), route, kTokensScratchShare, products,
                          scratch, stream);
  const VerifySteps steps(args.verify, all, scratch, stream);
  cudaError_t error = steps.Begin();
  for (int pass = 0; pass < steps.passes() && error == cudaSuccess; ++pass) {
    for (int64_t first = 0; first < all && error == cudaSuccess; first += block.rows()) {
      const int64_t rows = std::min(block.rows(), all - first);
      const bool is_made = pass > 0 && all <= block.rows();
      if (!is_made) error = block.Make(RowsOf(args.hidden, first, rows), scratch);
      if (error == cudaSuccess) error = steps.Rows(pass, block.View(rows), first, scratch);
    }
    if (error == cudaSuccess) error = steps.End(pass);
  }
  return error;
}

namespace {

// The rows of `args` by hopper/divergence.cu, with hidden states after the norms in scratch.
cudaError_t HopperDivergences(const LinearDivergenceArgs& args, const Scratch& scratch,
                              cudaStream_t stream) {
  const std::pair<const HeadView*, TensorView LinearDivergenceArgs::*> inputs[] = {
      {&args.head, &LinearDivergenceArgs::hidden},
      {&args.reference_head, &LinearDivergenceArgs::reference_hidden}};
  int64_t row_bytes = 0;  // of states
  for (const auto& [head, hidden] : inputs) {
    if (head->norm != nullptr)
      row_bytes += PreparedStride(*head) * static_cast<int64_t>(SizeOf(head->weight.dtype));
  }
  int64_t pass = args.rows();
  if (row_bytes > 0) {
    constexpr int64_t kGroup = hopper::kLossGroupRows;
    pass = std::max(static_cast<int64_t>(scratch.bytes) / 4 / row_bytes / kGroup * kGroup, kGroup);
  }
  for (int64_t first = 0; first < args.rows(); first += pass) {
    Scratch rest = scratch;
    LinearDivergenceArgs part = args;
    part.divergence = RowsFrom(args.divergence, first);
    for (const auto& [head, hidden] : inputs) {
      TensorView& states = part.*hidden;
      states = RowsOf(states, first, std::min(pass, args.rows() - first));
      if (head->norm == nullptr) continue;
      std::byte* to = rest.Take<std::byte>(states.rows * PreparedStride(*head) *
                                           static_cast<int64_t>(SizeOf(states.dtype)));
      const cudaError_t error = Prepare(*head, states.rows, to, states, stream);
      if (error != cudaSuccess) return error;
    }
    const cudaError_t error = hopper::Divergences(part, rest, stream);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

// Runs `op` on the logits of both inputs, a block of rows at a time.
cudaError_t OnPairLogits(const LinearDivergenceArgs& args,
                         cudaError_t (*op)(const DivergenceArgs&, const Scratch&, cudaStream_t),
                         Products& products, Scratch scratch, cudaStream_t stream) {
  const PairLogits pair(args.head, args.reference_head, products, scratch, stream);
  for (int64_t first = 0; first < args.rows(); first += pair.rows()) {
    const int64_t rows = std::min(pair.rows(), args.rows() - first);
    DivergenceArgs block = RowsFrom(args.divergence, first);
    cudaError_t error = pair.Make(args.hidden, args.reference_hidden, first, rows, scratch,
                                  &block.logits, &block.reference_logits);
    if (error == cudaSuccess) error = op(block, scratch, stream);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

// Makes the products again for top tokens. The other answers then have the same bits with and
// without them.
cudaError_t HopperTops(LinearDivergenceArgs args, Products& products, const Scratch& given,
                       cudaStream_t stream) {
  constexpr int64_t kMostRows = 32768;  // DivergenceNorms of so many are in scratch
  const LinearDivergenceArgs all = args;
  for (int64_t first = 0; first < all.rows(); first += kMostRows) {
    const int64_t rows = std::min(kMostRows, all.rows() - first);
    Scratch scratch = given;
    args.hidden = RowsOf(all.hidden, first, rows);
    args.reference_hidden = RowsOf(all.reference_hidden, first, rows);
    args.divergence = RowsFrom(all.divergence, first);
    DivergenceNorms*& norms = args.divergence.answers.norms;
    if (norms == nullptr) norms = scratch.Take<DivergenceNorms>(static_cast<size_t>(rows));
    if (norms == nullptr) return cudaErrorMemoryAllocation;
    cudaError_t error = HopperDivergences(args, scratch, stream);
    if (error == cudaSuccess)
      error = OnPairLogits(args, &TopsOfDivergence, products, scratch, stream);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace

cudaError_t LinearDivergence(const LinearDivergenceArgs& args, Products& products,
                             const Scratch& scratch, cudaStream_t stream) {
  if (!IsHopperDivergence(args.head, args.reference_head, scratch))
    return OnPairLogits(args, &Divergence, products, scratch, stream);
  return WantsTops(args.divergence) ? HopperTops(args, products, scratch, stream)
                                    : HopperDivergences(args, scratch, stream);
}

namespace {

cudaError_t WholeLosses(const LinearCrossEntropyArgs& args, Products& products,
                        const Scratch& scratch, cudaStream_t stream) {
  const LinearRoute route = RouteOf(LinearOp::kLosses, args.head, scratch);
  if (route.kernel != LinearKernel::kHopperLosses)
    return LossesFromLogits(args, products, scratch, stream);
  const bool mixed = args.cross_entropy.want != 0 || args.cross_entropy.max_top_logprobs > 0;
  int64_t pass = 16384;
  if (mixed || args.head.norm != nullptr) {
    // Scratch holds the pass's lists and prepared states.
    constexpr int64_t kGroup = hopper::kLossGroupRows;
    const int64_t state_bytes =
        PreparedStride(args.head) * static_cast<int64_t>(SizeOf(args.head.weight.dtype));
    pass = std::clamp<int64_t>(
        static_cast<int64_t>(scratch.bytes) / 4 / state_bytes / kGroup * kGroup, kGroup, pass);
  }
  for (int64_t first = 0; first < args.hidden.rows; first += pass) {
    const int64_t rows = std::min(pass, args.hidden.rows - first);
    const cudaError_t error =
        HopperLosses(RowsOf(args, first, rows), mixed, products, scratch, stream);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

// Rows with supports have the logits of linear_sample, and so its bits. Where other rows come with
// them, all rows are multiplied twice.
cudaError_t AllLosses(const LinearCrossEntropyArgs& args, Products& products,
                      const Scratch& scratch, cudaStream_t stream) {
  const CrossEntropyArgs& losses = args.cross_entropy;
  const bool supported = losses.max_support > 0;
  cudaError_t error = cudaSuccess;
  if (!supported || !losses.all_supported) error = WholeLosses(args, products, scratch, stream);
  if (error == cudaSuccess && supported) {
    error = RunOnLogits(LinearOp::kTokens, args.hidden, args.head, losses, &SupportedCrossEntropy,
                        products, scratch, stream);
  }
  return error;
}

}  // namespace

// Rows that are left out are not multiplied by Hopper's kernels, whose bits do not depend on
// scratch.
cudaError_t LinearCrossEntropy(const LinearCrossEntropyArgs& args, Products& products,
                               const Scratch& scratch, cudaStream_t stream) {
  if (args.cross_entropy.counted_rows < 0 ||
      RouteOf(LinearOp::kLosses, args.head, scratch).kernel == LinearKernel::kProduct) {
    return AllLosses(args, products, scratch, stream);
  }
  const int64_t step = CountedRows::MostRows(args, scratch);
  for (int64_t first = 0; first < args.hidden.rows; first += step) {
    const LinearCrossEntropyArgs part =
        RowsOf(args, first, std::min(step, args.hidden.rows - first));
    Scratch rest = scratch;
    CountedRows counted;
    cudaError_t error = counted.Gather(part, rest, stream);
    if (error == cudaSuccess) error = AllLosses(counted.args(), products, rest, stream);
    if (error == cudaSuccess) error = counted.Scatter(part, stream);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace logitd::cuda
