// attention_softmax: a row in the registers of the threads that own it, read once and written once.
//
// A warp finds its own maximum and sum, relative to a whole power of two; so warps meet only once,
// and a probability has the error of one rounded exponent. Which threads own a row: narrow_rows.cu
// (4 to 32 lanes), staged_rows.cu (short rows off alignment), wide_rows.cu (blocks, clusters, two
// reads).
//
// Cost: reads what the queries see and the mask, writes all keys; floor: those bytes at a plain
// copy's rate. H200, bf16: unmasked 91 to 105% (64 to 32768 keys), causal 86 to 97%, masks 87 to
// 103%; off alignment 68 to 95%, causal 60 to 80% (bench/results/h200/kernels.json,
// attention_plans.json). Limited by: HBM; up to some MB, by the launch; off alignment, by
// instructions; from 262144 keys on, by what L2 keeps of a row until its second read. Dropped on an
// H200 (attention_plans.json): next rows in shared memory, copied ahead by warps (4097 keys 47%
// instead of 71%) or in bulk (69%; 12345 keys 73% instead of 67, 1537 57% instead of 67); 16-bit
// elements kept as loaded for more warps (4097 67%); one kernel for blocks and clusters (off
// alignment 6 to 10% slower).
// H100: attention_odd.json.
#include <algorithm>
#include <iterator>

#include "kernels/cuda/attention/forward.cuh"
#include "kernels/cuda/ops.h"

namespace logitd::cuda {
namespace attention {
namespace {

// Whether the mask's rows are whole vectors of `elements` elements, each aligned.
bool MaskIsWhole(const AttentionMask& mask, int64_t keys, int elements) {
  const int64_t bytes = std::min<int64_t>(16, elements * MaskBytes(mask));
  const int64_t strides[] = {mask.batch_stride, mask.head_stride, mask.query_stride, mask.origin};
  return reinterpret_cast<uintptr_t>(mask.data) % bytes == 0 && keys % elements == 0 &&
         std::all_of(std::begin(strides), std::end(strides),
                     [&](int64_t stride) { return stride * MaskBytes(mask) % bytes == 0; });
}

Form FormOf(const Params& p, int64_t keys, int elements) {
  const bool whole = p.scores.whole && p.probs.whole;
  if (p.mask.kind == MaskKind::kNone) return whole ? Form::kWhole : Form::kAny;
  return whole && MaskIsWhole(p.mask, keys, elements) ? Form::kWholeMasked : Form::kAnyMasked;
}

// Heads that share a mask too large for L2 take each of its rows together.
RowOrder OrderOf(const AttentionSoftmaxArgs& args, int64_t first_row, int64_t rows) {
  constexpr int64_t kLargeMask = int64_t{8} << 20;  // bytes
  const AttentionShape& shape = args.shape;
  const bool shared =
      args.mask.kind != MaskKind::kNone && args.mask.head_stride == 0 && shape.heads > 1;
  const bool large = shape.queries * shape.keys * MaskBytes(args.mask) >= kLargeMask;
  const int64_t of_batch = shape.heads * shape.queries;
  const bool whole = first_row % of_batch == 0 && rows % of_batch == 0;
  return shared && large && whole ? RowOrder::ByQueries(shape.heads, shape.queries) : RowOrder{};
}

}  // namespace
}  // namespace attention

cudaError_t AttentionSoftmax(const AttentionSoftmaxArgs& args, const Scratch& scratch,
                             cudaStream_t stream) {
  using namespace attention;
  const int64_t keys = args.shape.keys;
  const int elements = ElementsOf(args.scores.dtype, args.probs.dtype);
  const Params p{.scores = MatrixOf(args.scores, keys, elements),
                 .probs = MatrixOf(args.probs, keys, elements),
                 .scale = args.scale,
                 .mask = args.mask,
                 .sinks = args.sinks,
                 .logsumexp = args.logsumexp,
                 .status = args.status};
  const KernelTypes types{args.scores.dtype, args.probs.dtype, FormOf(p, keys, elements)};
  for (int64_t begin = 0; begin < args.shape.rows; begin += PassRows::kMost) {
    Params pass = p;
    pass.rows = PassRows(args.shape, args.window, begin,
                         std::min(PassRows::kMost, args.shape.rows - begin));
    pass.order = OrderOf(args, args.shape.first_row + begin, pass.rows.count);
    pass.scores.Skip(begin);
    pass.probs.Skip(begin);
    if (pass.logsumexp != nullptr) pass.logsumexp += begin;
    pass.status += begin;
    const cudaError_t error = AreStaged(types, pass) ? LaunchStagedRows(types, pass, stream)
                              : keys <= kMaxNarrowKeys
                                  ? LaunchNarrowRows(types, pass, stream)
                                  : LaunchWideRows(types, pass, scratch, stream);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace logitd::cuda
