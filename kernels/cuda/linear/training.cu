// linear_cross_entropy and its backward in one: three products, because the logits are made once.
//
// Pass 1 makes the exponentials E of the logits (training.cuh) and their sums by one kernel
// (hopper/training.cu); then the losses, and the factor from a row's E to its gradients G, a part
// of the row's hidden state and of its d_hidden. Where no factor serves all of a row, E becomes G:
// in f16, and under large logits or label smoothing. Pass 2 takes chunks of the vocabulary,
// backwards: d_hidden += E weight in fp32, d_weight = E^T hidden. E is kept where d_weight of
// earlier chunks will be, and in scratch. The head and the device fix chunks: a row's bits do not
// depend on others. A target's E is made from its G: near a probability of 1 the rounded E loses
// digits. Serves 16-bit heads without bias and softcap on sm_90a. f32 products are bound by
// cuBLASLt's fp32 rate.
//
// Cost: three products; a write of E, a read and write of d_hidden for every chunk, in f16 of E.
// Limited by: the tensor cores. Measured: bench/results/h200/kernels.json. Dropped: pass 1 by
// cuBLASLt and a kernel (4% slower), G for every bf16 E (3%), chunks of 8192 tokens (1%).
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

// How the work is cut.
struct Cut : KeptChunks {
  int64_t tiles;  // of the vocabulary

  Cut(const LinearCrossEntropyBackwardArgs& args, int64_t bytes)
      : KeptChunks(args.head, args.d_weight.dtype,
                   [&](const KeptChunks& of, int64_t rows) {
                     return Bytes(of, Tiles(args.head), rows, /*in_first=*/1) <= bytes;
                   }),
        tiles(Tiles(args.head)) {}

  static int64_t Tiles(const HeadView& head) { return CeilDiv(head.vocab(), kTile); }

  // Bytes of a row's sums: of its tiles in pass 1, and of d_hidden in pass 2, in the same memory.
  static int64_t SumsBytes(const KeptChunks& of, int64_t tiles) {
    return std::max<int64_t>(of.hidden_stride * 4, tiles * static_cast<int64_t>(sizeof(TilePart)));
  }
  int64_t SumsBytes() const { return SumsBytes(*this, tiles); }

  // Bytes of scratch for a call with so many rows.
  static int64_t Bytes(const KeptChunks& of, int64_t tiles, int64_t rows, int64_t in_first) {
    constexpr int64_t kSlack = 4096;  // for the alignment of the pieces
    const int64_t of_row = of.hidden_stride * kKeptElement + SumsBytes(of, tiles) + tiles * 4 + 4 +
                           static_cast<int64_t>(sizeof(RowState));
    return Padded(rows) * of_row + in_first * of.ChunkBytes(rows) + kSlack;
  }
  int64_t Bytes(int64_t rows) const { return Bytes(*this, tiles, rows, InFirst(rows)); }
};

// Whether a call on a route of training fits.
bool Fits(const LinearCrossEntropyBackwardArgs& args, int64_t rows, const Cut& cut, int64_t room) {
  return args.d_bias == nullptr && HoldsKeptChunks(args.d_weight, args.head.hidden()) &&
         cut.Bytes(rows) <= room;
}

// The tokens that a call has of a vocabulary, which may be a shard.
struct Place {
  int64_t first_token = 0;
  int64_t vocab = 0;
};

class Training {
 public:
  // rows: of the call; or fewer, where only those that are counted are taken.
  Training(const LinearCrossEntropyTrainingArgs& args, int64_t rows, const Place& place,
           const Cut& cut, Products& products, Scratch scratch, cudaStream_t stream)
      : args_(args.gradient),
        forward_(args.Forward().cross_entropy),
        rows_(rows),
        place_(place),
        cut_(cut),
        padded_(Cut::Padded(rows)),
        device_(scratch),
        steps_(products, scratch, stream),
        states_of_rows_(scratch.Take<RowState>(padded_)),
        target_logits_(scratch.Take<float>(padded_)),
        maxima_(scratch.Take<float>(padded_ * cut.tiles)),
        sums_(scratch.Take<std::byte>(padded_ * cut.SumsBytes())),
        states_(scratch.Take<std::byte>(padded_ * cut.hidden_stride * kKeptElement)),
        first_e_(scratch.Take<std::byte>(cut.InFirst(rows) * cut.ChunkBytes(rows))),
        scale_(scratch.Take<HalfScale>(1)) {
    forward_.logits.cols = place.vocab;
  }

  cudaError_t Run() {
    MakeSums();
    Conclude();
    MakeAllGradients([] {});
    steps_.Store(DStates(rows_), states_of_rows_, args_.d_hidden);
    if (args_.counted_rows >= 0)
      WriteIgnored(steps_, args_.rows, args_.hidden.rows, forward_.answers, args_.d_hidden);
    return steps_.error();
  }

  // The first call of a shard.
  cudaError_t Begin(const TrainingBlock& block) {
    MakeSums();
    TellShards(steps_, states_of_rows_, rows_, AllTokens(),
               static_cast<int32_t>(place_.first_token), block);
    return steps_.error();
  }

  // The second, in the same scratch. `first`: the block of the first shard.
  cudaError_t End(const VocabShards& shards, const TrainingBlock& first,
                  absl::FunctionRef<cudaError_t(const MutableTensorView&)> hidden_done) {
    AddShards(steps_, states_of_rows_, rows_, args_.rows, first, shards, target_logits_);
    Conclude();
    MakeAllGradients([&] {
      steps_.Store(DStates(rows_), states_of_rows_, DStates(rows_));
      steps_.Do([&] { return hidden_done(DStates(rows_)); });
    });
    if (args_.counted_rows >= 0) WriteIgnored(steps_, args_.rows, rows_, forward_.answers, {});
    return steps_.error();
  }

 private:
  DType dtype() const { return args_.head.weight.dtype; }

  // Pass 1.
  void MakeSums() {
    steps_.Do([&] { return HalfScale::Clear(scale_, steps_.stream()); });
    BeginRows(steps_, args_.rows, args_.hidden.rows, /*counted_only=*/rows_ < args_.hidden.rows,
              padded_, static_cast<int32_t>(place_.first_token),
              static_cast<int32_t>(args_.head.vocab()), states_of_rows_);
    Pack();
    steps_.Do([&] {
      return hopper::Exponentials(States(rows_), args_.head, states_of_rows_, AllTokens(), device_,
                                  steps_.stream());
    });
    AddToRows(steps_, dtype(), states_of_rows_, padded_, AllTokens());
  }

  void Conclude() {
    ConcludeRows(steps_, dtype(), forward_, args_.upstream, states_of_rows_, padded_, AllTokens(),
                 scale_);
    const MutableTensorView states = {states_, dtype(), padded_, cut_.hidden_stride,
                                      cut_.hidden_stride};
    ScaleRows(steps_, states_of_rows_, states, AllTokens(), args_.head.scale, scale_);
  }

  // Pass 2. hidden_is_whole() is called before the last product 3: all of d_hidden is added up.
  template <class HiddenIsWhole>
  void MakeAllGradients(const HiddenIsWhole& hidden_is_whole) {
    const int64_t last = (cut_.chunks - 1) * cut_.chunk;
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
            .e = cut_.Memory(rows_, first_e_, args_.d_weight),
            .maxima = maxima_ + v / kTile,
            .maxima_stride = cut_.tiles,
            .parts = reinterpret_cast<TilePart*>(sums_),
            .parts_stride = cut_.tiles,
            .target_logits = target_logits_};
  }

  Chunk AllTokens() const { return TokensAt(0, args_.head.vocab()); }

  TensorView Weights(const Chunk& chunk) const {
    return RowsOf(args_.head.weight, chunk.first, chunk.tokens);
  }
  TensorView States(int64_t count) const {
    return {states_, dtype(), count, args_.head.hidden(), cut_.hidden_stride};
  }
  MutableTensorView DStates(int64_t count) const {
    return {sums_, DType::kF32, count, args_.head.hidden(), cut_.hidden_stride};
  }
  TensorView Gradients(const Chunk& chunk) const {
    return {chunk.e.At<uint16_t>(0, chunk.first), dtype(), padded_, chunk.tokens, chunk.e.chunk};
  }

  // Copies the hidden states of all rows except skipped ones. Those of ignored rows become zeros
  // later: an ignored row has a logsumexp and a status.
  void Pack() {
    Visit16Bit(dtype(), [&]<class T>() {
      steps_.Launch(&PackKernel<T, RowState>, GridFor(padded_), kCopyThreads,
                    static_cast<const T*>(args_.hidden.data), args_.hidden.row_stride,
                    static_cast<int>(args_.head.hidden()), states_of_rows_, RowUse::kIgnored,
                    reinterpret_cast<T*>(states_), cut_.hidden_stride);
    });
  }

  // Product 2.
  void AddToHidden(const Chunk& chunk, bool fresh) {
    steps_.Multiply({.a = Gradients(chunk),
                     .b = Weights(chunk),
                     .out = DStates(padded_),
                     .alpha = args_.head.scale,
                     .beta = fresh ? 0.0f : 1.0f});
  }

  // Product 3.
  void WriteWeight(const Chunk& chunk) {
    steps_.Multiply({.a = Gradients(chunk),
                     .transpose_a = true,
                     .b = States(padded_),
                     .out = RowsOf(args_.d_weight, chunk.first, chunk.tokens),
                     .alpha = args_.head.scale,
                     .device_factors = dtype() == DType::kF16 ? scale_->product : nullptr});
  }

  const LinearCrossEntropyBackwardArgs& args_;
  CrossEntropyArgs forward_;
  const int64_t rows_;
  const Place place_;
  const Cut cut_;
  const int64_t padded_;  // rows, with skipped ones
  const Scratch device_;  // only what it says of the device is used
  Steps steps_;
  RowState* const states_of_rows_;  // [padded]
  float* const target_logits_;      // [padded]
  float* const maxima_;    // [padded, tiles]; later factors of G, of rows without one for all tiles
  std::byte* const sums_;  // [padded, tiles] of TilePart, then d_hidden as f32
  std::byte* const states_;  // [padded, hidden_stride]
  std::byte* const first_e_;
  HalfScale* const scale_;
};

int64_t RoomFor(const Products& products, const Scratch& scratch) {
  return static_cast<int64_t>(scratch.left() - products.workspace_bytes());
}

// The work of a shard's call, in scratch that is cut the same way in both calls.
Training ShardTraining(const ShardTrainingArgs& args, Products& products, const Scratch& scratch,
                       cudaStream_t stream) {
  const LinearCrossEntropyBackwardArgs& gradient = args.training.gradient;
  const Cut cut(gradient, RoomFor(products, scratch));
  const Place place = {.first_token = args.shards.at(args.shard).first, .vocab = args.shards.vocab};
  return Training(args.training, gradient.hidden.rows, place, cut, products, scratch, stream);
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
  const LinearCrossEntropyBackwardArgs& gradient = args.gradient;
  int64_t rows = gradient.hidden.rows;
  if (rows == 0) return LinearCrossEntropyBackward(args.Backward(), products, scratch, stream);
  if (gradient.counted_rows >= 0) rows = std::clamp<int64_t>(gradient.counted_rows, 1, rows);
  if (RouteOf(LinearOp::kTraining, gradient.head, scratch).kernel != LinearKernel::kTwoOps) {
    const int64_t room = RoomFor(products, scratch);
    const Cut cut(gradient, room);
    const Place place = {.first_token = 0, .vocab = gradient.head.vocab()};
    if (Fits(gradient, rows, cut, room))
      return Training(args, rows, place, cut, products, scratch, stream).Run();
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
  return Fits(gradient, rows, Cut(gradient, room), room);
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
