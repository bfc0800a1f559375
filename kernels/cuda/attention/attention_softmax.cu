// attention_softmax: a row in the registers of the threads that own it, read once and written once.
//
// All loads of a row are under way before the first wait. Meanwhile vectors that its query does not
// see are written as zeros; they cost nothing else. A warp finds its own maximum and sum, relative
// to a whole power of two. So warps meet only once: factors between them are exact, and a
// probability has the error of one rounded exponent.
//
//   staged_rows.cu
//     staged     16-bit rows of 65 to 192 keys that are not whole vectors, without a window: a block's
//                rows go through shared memory, so that lanes need nothing of each other
//   narrow_rows.cu
//     lanes      other rows of up to 1536 keys: 4 to 32 lanes hold a row, 16 to 48 elements a lane
//   wide_rows.cu
//     block      a warp for every 1024 keys, 32 elements a thread
//     long       16-bit rows of over 8192 keys (16384 where they are not whole vectors, and no
//                window ends on their left) without a mask: 64 elements a thread, kept as they were
//                loaded; exponentials are taken twice
//     cluster    block and long, where a row needs more than one block (sm_90): its warps exchange
//                sums in shared memory
//     two reads  rows that do not fit a cluster of 16 blocks: over 524288 keys (none where long). Where
//                the device has no room for so many: over 262144 (524288); without clusters over
//                32768 (65536)
//
// Each has a form for rows that are whole aligned vectors, and one for any alignment. Where scores
// and probs have 16 bits and 8 or more lanes hold a row, that one loads a vector as the five words
// that hold it, and from 16 lanes on it stores words too. Fewer lanes, f32, long rows and narrow rows
// with a mask load and store aligned blocks, and lanes exchange the ends of their vectors. Masks of
// 16-bit rows are loaded by words. Both forms have one for rows with a mask.
//
// Just past a length at which a warp's lanes hold twice as many elements, or a row gets one more
// warp, most of what is held is empty. So there are more lengths in between, and narrow rows skip the
// turns in which no lane holds anything; a warp goes one way where the compiler knows it.
//
// Cost: reads what the queries see and the mask, writes all keys. Causal at full size is 0.75 of a
// read and a write.
// Measured on an H200 (bench/results/h200/kernels.json), in percent of those bytes at the rate of a
// plain copy of the same run (3.94 TB/s):
//
//   bf16, keys        64  128  512 1024 2048 4096 8192 16384 32768 65536 131072
//   unmasked          91   92   99  102       102         105          93     85
//   causal                      90   96   86   97   97    93    90    86
//   bool mask                       103        92          87
//   f32, unmasked                             105
//   f32, causal                 94   97        99         101
//   off alignment     unmasked 85 (1023), causal 70 (4097); additive mask 73 (4096)
//
// On an H100 (bench/results/h100/attention_lengths.json), bf16, without those lengths and turns, and
// with them; longer rows, which skip none, are in kernels_0aa536a.json: causal 95 (4097), 90 (12345).
//
//   keys          65      257      513     1025     1500
//   unmasked   51 63    64 84    66 84    57 86    85 92
//   causal     39 49    51 70    52 70    44 74    63 83
//
// On an H100 (bench/results/h100/attention_odd.json), bf16, 1024 matrices of 129 and 257 keys, 128 of 513
// and 1025, one of 12345. First with aligned blocks only, then with loads by words and more lengths:
//
//   keys            129      257      513     1025    12345
//   unmasked      64 72    88 92    84 92   93 101    86 92
//   causal        51 56    72 78    69 80    82 91    85 88
//   additive mask 48 53    62 70    60 66    70 74    89 97
//
// On an H100 (attention_odd.json, "staged"), bf16, 1024 matrices, with the lanes of other rows and staged:
//
//   keys             65      100      129
//   unmasked      49  73    71  88    71  88
//   additive mask 40  56    55  72    52  69
//   bool mask     42  57    60  74    55  69
//
// On an H100 (bench/results/h100/kernels.json; copy 2.84 TB/s), masks that heads share: bool 97 and
// 102 (4096 and 16384 keys), additive 97 (4096). Before heads took each row of a large mask together
// it came from memory for every head: 92, 90, 73.
//
// Limited by: HBM. Up to some MB, by the launch: [32,128,128] takes 3 us. From 65536 keys on, by
// how few rows are under way, because a row's blocks wait for each other.
//
// Tried and dropped:
// - exponentials relative to each warp's maximum itself: two rounded exponents, 5e-6
// - 16 elements a thread: 2048 keys 92% instead of 108%, 16384 57% instead of 102%; what a warp
//   does once for each row decides
// - vectors dealt out over all warps of a row, so that each has some work in a causal row: 4096
//   keys 90% instead of 100%; an idle warp is cheaper than a warp that is half busy
// - whole warps for rows of 64 to 512 keys, several rows each: 128 keys 85% instead of 97%
// - the long kernel from 1024 keys on: 2048 causal 83% instead of 89%
// - blocks of 256 threads above 8192 keys: 16384 82% instead of 100%
// - blocks of 1024 threads for unmasked rows above 32768 keys: 131072 77% instead of 88%
// - barriers with a computed name: 4096 68% instead of 105%; a block claims all 16 barriers
// - 16 lanes with 64 elements each up to 1024 keys: 1001 keys 82% instead of 94%
// - narrow rows that begin early: [1,256,256] 11% faster, [128,100,100] 26% slower; blocks that wait
//   stay unevenly spread (this and the line before: attention_lengths.json)
// - rows that are not whole vectors as single elements, neighbours in neighbouring lanes: 511 keys
//   unmasked 81% instead of 94%, causal 513 43% instead of 69%; backward 700 keys 93% instead of 104%
//   (this and the next three: attention_odd.json)
// - words for rows of 4 lanes: 100 keys unmasked 48% instead of 71%; only loaded 68%
// - words for rows of 64 elements a thread: 12345 keys unmasked 77% instead of 86%
// - words of f32: 511 keys unmasked 64% instead of 99%
// - staged masks, loaded a row at a time by whole warps: [1024,129,129] additive mask 46 us instead of
//   35; staged masked rows in 12 blocks per multiprocessor instead of 8: 100 keys 34 us
//   instead of 20 (attention_odd.json, "staged")
// - stores without a hint: backward 103% instead of 113% in one run, forward the same
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
