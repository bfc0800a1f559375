// linear_cross_entropy and its backward in one: three products, because the logits are made once.
//
// Between the passes the logits are kept as their exponentials E, in bf16: of the logit itself where
// the largest of its tile, 256 tokens of a row, is moderate, else relative to that one, so that no E
// that matters over- or underflows. E is kept in the memory of d_weight, which is unused until
// d_weight is written. The vocabulary is processed in chunks, and E of a chunk is where d_weight of
// the chunk before it will be; E of the first chunk is in scratch, and so is a maximum for every row
// and tile.
//
//   pass 1, for every chunk   logits (product 1), E, their maxima, the rows' sums. On Hopper one
//                             kernel does it for all chunks (hopper/training.cu), without logits.
//   then                      losses and statuses, and the factor from a row's E to its gradients G.
//                             It becomes a part of the row's hidden state, in bf16, and of its
//                             d_hidden at the end. Where no factor serves all of a row (logits or
//                             factors that are not moderate, label smoothing) its E becomes G
//   pass 2, chunks backwards  E weight is added to d_hidden in fp32 (product 2), and E^T hidden is
//                             the chunk's d_weight (product 3), written over E of the chunk after it
//
// A target's E is made from its G, and that from its logit, as in the backward: near a probability
// of 1 the rounded E loses its digits.
//
// The head and the device fix chunks and the products' algorithms, so that the bits of a row's
// answers and d_hidden do not depend on other rows. Ignored and skipped rows are rows of zeros in
// products 2 and 3.
//
// Serves bf16 heads without bias and softcap (linear/routes.cu), where d_bias is not wanted,
// d_weight has no gaps, and the rows' E fit into it (up to `hidden` rows, twice as many where it is
// f32), the rest into scratch. Any other call is the two ops, one after the other.
//
// On a shard of a head the passes are two calls, on Hopper only (shard_training.h). Each shard sends
// the maxima and sums of its tiles to all others, and all add the tiles of the vocabulary in the
// order of one device, so that losses have its bits. d_hidden is whole before the last product 3,
// which its exchange overlaps.
//
// Cost: three products, the floor; in addition a write of E, one read and write of d_hidden in fp32
// for every chunk of up to 16384 tokens, and except on Hopper a write and a read of the logits, in
// part out of L2. Where E becomes G, a read and a write of it. Memory in addition to inputs and
// outputs: at 4096 rows of 4096, a chunk's E (128 MiB), d_hidden in fp32 (64; in pass 1 the tiles'
// sums are there), hidden states (32), the library's workspace (18 to 32), maxima (8; except on
// Hopper 16 of logits). Limited by: the tensor cores, at the clock that the power limit allows
// (bench/results/h100/products_power.json).
// Measured on an H100 (the same file, run 3), within 290 MiB: 4096 x 4096 x 128256 18.4 ms, 97% of
// three bare products of the run; 2048 x 5120 x 151936 14.1 ms, 94%.
// Tried and dropped: pass 1 by cuBLASLt and a kernel on its logits (4% slower on an H200). G in place
// of every E, by a kernel before product 2 (3% slower on an H100; 8% where product 2 takes 1024 rows
// at a time). Product 2 by the algorithm for 4096 rows (the same), chunks of 8192 tokens (1%
// slower), cuBLASLt's second choices (the same within 1%).
#include <algorithm>

#include "kernels/cuda/linear/backward.cuh"
#include "kernels/cuda/linear/hopper/kernels.h"
#include "kernels/cuda/linear/routes.h"
#include "kernels/cuda/linear/shard_training.h"
#include "kernels/cuda/linear/training.cuh"
#include "kernels/cuda/linear/training_steps.h"
#include "kernels/cuda/ops.h"

namespace logitd::cuda {
namespace {

constexpr int kTile = kTrainingTile;

// How the work is cut. The head and the device fix it.
struct Cut {
  int64_t block = kTrainingRows;  // rows of product 1, and those that product 2 is chosen for
  int64_t chunk = 16384;          // tokens, a multiple of kTile
  bool in_one = false;            // pass 1 is one kernel, which takes the whole vocabulary
  int64_t part = 0;               // else: tokens of product 1, in a chunk, a multiple of kTile
  int64_t tiles = 0;              // tiles of the vocabulary
  int64_t part_tiles = 0;         // tiles whose sums a row has at once
  int64_t hidden_stride = 0;

  // The largest chunk with which as many rows as `hidden` fit into `bytes`.
  Cut(const HeadView& head, int64_t bytes, bool one_kernel) : in_one(one_kernel) {
    constexpr int64_t kMostRows = 1024;
    constexpr int64_t kMostLogits = int64_t{4} << 20;  // L2 holds them, and the weights of a part
    constexpr int64_t kLeastChunk = 2048;
    hidden_stride = RoundUp(head.hidden(), 64);
    tiles = CeilDiv(head.vocab(), kTile);
    while (block < kMostRows && 2 * block <= head.hidden()) block *= 2;
    const auto set_chunk = [&](int64_t tokens) {
      chunk = tokens;
      part = std::min(chunk, kMostLogits / block);
      part_tiles = in_one ? tiles : chunk / kTile;
    };
    set_chunk(std::min(chunk, tiles * kTile));
    while (chunk > kLeastChunk && Bytes(head.hidden()) > bytes)
      set_chunk(RoundUp(chunk / 2, kTile));
  }

  int64_t Padded(int64_t rows) const { return RoundUp(rows, in_one ? kTrainingRows : block); }

  // Bytes of a row's sums: of its tiles in pass 1, and of d_hidden in pass 2, in the same memory.
  int64_t SumsBytes() const {
    return std::max<int64_t>(hidden_stride * 4,
                             part_tiles * static_cast<int64_t>(sizeof(TilePart)));
  }

  // Bytes of scratch for a call with so many rows.
  int64_t Bytes(int64_t rows) const {
    constexpr int64_t kSlack = 4096;  // for the alignment of the pieces
    const int64_t size = static_cast<int64_t>(sizeof(Bf16));
    const int64_t of_row = hidden_stride * size + SumsBytes() + chunk * size + tiles * 4 + 4 +
                           static_cast<int64_t>(sizeof(RowState));
    return (in_one ? 0 : block * part * 4) + Padded(rows) * of_row + kSlack;
  }
};

// Whether a call on a route of training fits.
bool Fits(const LinearCrossEntropyBackwardArgs& args, const Cut& cut, int64_t room) {
  const int64_t hidden = args.head.hidden();
  const MutableTensorView& d_weight = args.d_weight;
  const int64_t row_bytes = hidden * static_cast<int64_t>(SizeOf(d_weight.dtype));
  return args.d_bias == nullptr &&
         // A product can write d_weight, and its memory has no gaps that belong to others.
         reinterpret_cast<uintptr_t>(d_weight.data) % 16 == 0 && row_bytes % 16 == 0 &&
         d_weight.row_stride == hidden &&
         cut.Padded(args.hidden.rows) * static_cast<int64_t>(sizeof(Bf16)) <= row_bytes &&
         cut.Bytes(args.hidden.rows) <= room;
}

// The tokens that a call has of a vocabulary, which may be a shard.
struct Place {
  int64_t first_token = 0;
  int64_t vocab = 0;
};

class Training {
 public:
  Training(const LinearCrossEntropyTrainingArgs& args, const Place& place, const Cut& cut,
           Products& products, Scratch scratch, cudaStream_t stream)
      : args_(args.gradient),
        forward_(args.Forward().cross_entropy),
        place_(place),
        cut_(cut),
        padded_(cut.Padded(args.gradient.hidden.rows)),
        device_(scratch),
        steps_(products, scratch, stream),
        rows_(scratch.Take<RowState>(padded_)),
        target_logits_(scratch.Take<float>(padded_)),
        maxima_(scratch.Take<float>(padded_ * cut.tiles)),
        sums_(scratch.Take<std::byte>(padded_ * cut.SumsBytes())),
        states_(scratch.Take<Bf16>(padded_ * cut.hidden_stride)),
        first_e_(scratch.Take<Bf16>(padded_ * cut.chunk)),
        logits_(scratch.Take<float>(cut.in_one ? 0 : cut.block * cut.part)) {
    forward_.logits.cols = place.vocab;
  }

  cudaError_t Run() {
    MakeSums();
    Conclude();
    MakeAllGradients([] {});
    const int64_t rows = args_.hidden.rows;
    WriteHidden(RowsOf(args_.d_hidden, 0, rows));
    return steps_.error();
  }

  // The first call of a shard: cut_.in_one.
  cudaError_t Begin(const TrainingBlock& block) {
    MakeSums();
    TellShards(steps_, rows_, args_.hidden.rows, AllTokens(),
               static_cast<int32_t>(place_.first_token), block);
    return steps_.error();
  }

  // The second, in the same scratch. `first`: the block of the first shard.
  cudaError_t End(const VocabShards& shards, const TrainingBlock& first,
                  absl::FunctionRef<cudaError_t(const MutableTensorView&)> hidden_done) {
    const int64_t rows = args_.hidden.rows;
    AddShards(steps_, rows_, rows, args_.rows, first, shards, target_logits_);
    Conclude();
    MakeAllGradients([&] {
      WriteHidden(DStates(0, rows));
      steps_.Do([&] { return hidden_done(DStates(0, rows)); });
    });
    return steps_.error();
  }

 private:
  // Pass 1.
  void MakeSums() {
    const int64_t vocab = args_.head.vocab();
    BeginRows(steps_, args_.rows, args_.hidden.rows, padded_,
              static_cast<int32_t>(place_.first_token), static_cast<int32_t>(vocab), rows_);
    Pack();
    if (cut_.in_one) {
      MakeAllExponentials();
      AddToRows(steps_, rows_, padded_, AllTokens());
      return;
    }
    for (int64_t v = 0; v < vocab; v += cut_.chunk) {
      const Chunk chunk = TokensAt(v, cut_.chunk);
      MakeChunkExponentials(chunk);
      AddToRows(steps_, rows_, padded_, chunk);
    }
  }

  void Conclude() {
    ConcludeRows(steps_, forward_, args_.upstream, rows_, padded_, AllTokens());
    const MutableTensorView states = {states_, DType::kBF16, padded_, cut_.hidden_stride,
                                      cut_.hidden_stride};
    ScaleRows(steps_, rows_, states, AllTokens());
  }

  // Pass 2. hidden_is_whole() is called before the last product 3: all of d_hidden is added up.
  template <class HiddenIsWhole>
  void MakeAllGradients(const HiddenIsWhole& hidden_is_whole) {
    const int64_t last = (args_.head.vocab() - 1) / cut_.chunk * cut_.chunk;
    for (int64_t v = last; v >= 0; v -= cut_.chunk) {
      const Chunk chunk = TokensAt(v, cut_.chunk);
      AddToHidden(chunk, /*fresh=*/v == last);
      if (v == 0) hidden_is_whole();
      WriteWeight(chunk);
    }
  }

  Chunk TokensAt(int64_t v, int64_t count) const {
    return {.first = v,
            .tokens = std::min(count, args_.head.vocab() - v),
            .e = {.first = first_e_,
                  .others = static_cast<std::byte*>(args_.d_weight.data),
                  .chunk = cut_.chunk,
                  .chunk_bytes = cut_.chunk * args_.head.hidden() *
                                 static_cast<int64_t>(SizeOf(args_.d_weight.dtype))},
            .maxima = maxima_ + v / kTile,
            .maxima_stride = cut_.tiles,
            .parts = reinterpret_cast<TilePart*>(sums_),
            .parts_stride = cut_.part_tiles,
            .target_logits = target_logits_};
  }

  Chunk AllTokens() const { return TokensAt(0, args_.head.vocab()); }

  TensorView Weights(const Chunk& chunk) const {
    return RowsOf(args_.head.weight, chunk.first, chunk.tokens);
  }
  TensorView States(int64_t first, int64_t count) const {
    return {states_ + first * cut_.hidden_stride, DType::kBF16, count, args_.head.hidden(),
            cut_.hidden_stride};
  }
  MutableTensorView DStates(int64_t first, int64_t count) const {
    return {reinterpret_cast<float*>(sums_) + first * cut_.hidden_stride, DType::kF32, count,
            args_.head.hidden(), cut_.hidden_stride};
  }
  static TensorView Gradients(const Chunk& chunk, int64_t first, int64_t count) {
    return {chunk.e.At(first, chunk.first), DType::kBF16, count, chunk.tokens, chunk.e.chunk};
  }

  // Copies the hidden states of all rows except skipped ones. Those of ignored rows become zeros
  // later: an ignored row has a logsumexp and a status.
  void Pack() {
    steps_.Launch(&PackKernel<Bf16, RowState>, GridFor(padded_), kCopyThreads,
                  static_cast<const Bf16*>(args_.hidden.data), args_.hidden.row_stride,
                  static_cast<int>(args_.head.hidden()), rows_, RowUse::kIgnored, states_,
                  cut_.hidden_stride);
  }

  void MakeAllExponentials() {
    steps_.Do([&] {
      return hopper::Exponentials(States(0, args_.hidden.rows), args_.head, rows_, AllTokens(),
                                  device_, steps_.stream());
    });
  }

  // Product 1 and the exponentials of its logits.
  void MakeChunkExponentials(const Chunk& chunk) {
    for (int64_t offset = 0; offset < chunk.tokens; offset += cut_.part) {
      const Chunk part = chunk.Part(offset, cut_.part);
      for (int64_t r = 0; r < padded_; r += cut_.block) {
        const MutableTensorView logits = {logits_, DType::kF32, cut_.block, part.tokens, cut_.part};
        steps_.Multiply({.a = States(r, cut_.block),
                         .b = Weights(part),
                         .transpose_b = true,
                         .out = logits,
                         .alpha = args_.head.scale});
        MakeExponentials(steps_, logits, rows_, r, part);
      }
    }
  }

  // Writes or, in place, scales d_hidden.
  void WriteHidden(const MutableTensorView& to) {
    StoreHidden(steps_, DStates(0, to.rows), rows_, to);
  }

  // Product 2.
  void AddToHidden(const Chunk& chunk, bool fresh) {
    steps_.Multiply({.a = Gradients(chunk, 0, padded_),
                     .b = Weights(chunk),
                     .out = DStates(0, padded_),
                     .asked_rows = cut_.block,
                     .alpha = args_.head.scale,
                     .beta = fresh ? 0.0f : 1.0f});
  }

  // Product 3.
  void WriteWeight(const Chunk& chunk) {
    const int64_t rows = RoundUp(args_.hidden.rows, kTrainingRows);
    steps_.Multiply({.a = Gradients(chunk, 0, rows),
                     .transpose_a = true,
                     .b = States(0, rows),
                     .out = RowsOf(args_.d_weight, chunk.first, chunk.tokens),
                     .alpha = args_.head.scale});
  }

  const LinearCrossEntropyBackwardArgs& args_;
  CrossEntropyArgs forward_;
  const Place place_;
  const Cut cut_;
  const int64_t padded_;  // rows, in whole blocks or, where all are taken at once, in groups
  const Scratch device_;  // only what it says of the device is used
  Steps steps_;
  RowState* const rows_;        // [padded]
  float* const target_logits_;  // [padded]
  float* const
      maxima_;  // [padded, tiles]; later the factors of G, of rows that have no factor for all tiles
  std::byte* const sums_;  // [padded, part_tiles] of TilePart, then d_hidden as f32
  Bf16* const states_;     // [padded, hidden_stride]
  Bf16* const first_e_;    // [padded, chunk]
  float* const logits_;    // [block, part]
};

int64_t RoomFor(const Products& products, const Scratch& scratch) {
  return static_cast<int64_t>(scratch.left() - products.workspace_bytes());
}

// The work of a shard's call, in scratch that is cut the same way in both calls.
Training ShardTraining(const ShardTrainingArgs& args, Products& products, const Scratch& scratch,
                       cudaStream_t stream) {
  const Cut cut(args.training.gradient.head, RoomFor(products, scratch), /*one_kernel=*/true);
  const Place place = {.first_token = args.shards.at(args.shard).first, .vocab = args.shards.vocab};
  return Training(args.training, place, cut, products, scratch, stream);
}

// Where a shard without tokens has its part of d_hidden; no data where there is no room for it.
MutableTensorView ZerosOf(const LinearCrossEntropyBackwardArgs& args, Scratch scratch) {
  const int64_t hidden = args.hidden.cols;
  const int64_t stride = RoundUp(hidden, 64);
  const int64_t rows = args.hidden.rows;
  return {scratch.Take<float>(static_cast<size_t>(rows * stride)), DType::kF32, rows, hidden,
          stride};
}

}  // namespace

cudaError_t LinearCrossEntropyTraining(const LinearCrossEntropyTrainingArgs& args,
                                       Products& products, const Scratch& scratch,
                                       cudaStream_t stream) {
  if (args.gradient.hidden.rows == 0)
    return LinearCrossEntropyBackward(args.Backward(), products, scratch, stream);
  const LinearRoute& route = RouteOf(LinearOp::kTraining, args.gradient.head, scratch);
  if (route.kernel != LinearKernel::kTwoOps) {
    const int64_t room = RoomFor(products, scratch);
    const Cut cut(args.gradient.head, room, route.kernel == LinearKernel::kHopperTraining);
    const Place place = {.first_token = 0, .vocab = args.gradient.head.vocab()};
    if (Fits(args.gradient, cut, room))
      return Training(args, place, cut, products, scratch, stream).Run();
  }
  const cudaError_t error = LinearCrossEntropy(args.Forward(), products, scratch, stream);
  if (error != cudaSuccess) return error;
  return LinearCrossEntropyBackward(args.Backward(), products, scratch, stream);
}

size_t ShardTrainingBytes(const VocabShards& shards, int64_t rows) {
  return TrainingBlock(nullptr, shards, rows).bytes;
}

bool ShardTrainingFits(const ShardTrainingArgs& args, const Products& products,
                       const Scratch& scratch) {
  const LinearCrossEntropyBackwardArgs& gradient = args.training.gradient;
  const int64_t rows = gradient.hidden.rows;
  if (rows == 0 || RouteOf(LinearOp::kTraining, gradient.head, scratch).kernel !=
                       LinearKernel::kHopperTraining) {
    return false;
  }
  if (gradient.head.vocab() == 0) return ZerosOf(gradient, scratch).data != nullptr;
  const int64_t room = RoomFor(products, scratch);
  return Fits(gradient, Cut(gradient.head, room, /*one_kernel=*/true), room);
}

cudaError_t BeginShardTraining(const ShardTrainingArgs& args, Products& products, Scratch scratch,
                               cudaStream_t stream) {
  const int64_t rows = args.training.gradient.hidden.rows;
  const size_t bytes = ShardTrainingBytes(args.shards, rows);
  const TrainingBlock block(args.blocks + static_cast<size_t>(args.shard) * bytes, args.shards,
                            rows);
  if (args.training.gradient.head.vocab() == 0)  // -1 for every row; the rest is not read
    return cudaMemsetAsync(block.nan, 0xff, static_cast<size_t>(rows) * sizeof(int32_t), stream);
  return ShardTraining(args, products, scratch, stream).Begin(block);
}

cudaError_t EndShardTraining(const ShardTrainingArgs& args,
                             absl::FunctionRef<cudaError_t(const MutableTensorView&)> hidden_done,
                             Products& products, Scratch scratch, cudaStream_t stream) {
  const LinearCrossEntropyBackwardArgs& gradient = args.training.gradient;
  if (gradient.head.vocab() == 0) {
    const MutableTensorView part = ZerosOf(gradient, scratch);
    const size_t bytes = static_cast<size_t>(part.rows * part.row_stride) * sizeof(float);
    const cudaError_t error = cudaMemsetAsync(part.data, 0, bytes, stream);
    return error == cudaSuccess ? hidden_done(part) : error;
  }
  const TrainingBlock first(args.blocks, args.shards, gradient.hidden.rows);
  return ShardTraining(args, products, scratch, stream).End(args.shards, first, hidden_done);
}

}  // namespace logitd::cuda
