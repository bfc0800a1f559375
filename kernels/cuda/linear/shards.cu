// The partial of one shard, of the linear ops on a sharded head (kernels/shards.h).
//
// A logit and a cell have the bits that they have on one device: the product sums a logit in an
// order that only the head fixes, where cuBLASLt makes it by the algorithm of the whole head
// (product.h), and cells are counted from the vocabulary's start.
//
// linear_cross_entropy's plain rows on Hopper go through hopper/loss.cu, which leaves cells
// and no logits. All others make the logits of a block of rows as forward.cc does; then one kernel
// reads them once more and leaves cells, and softmax_topk chooses the shard's tokens.
//
// Cost: the op's on the shard's tokens, and where logits are made one more read of them, of which
// L2 takes most. Losses through logits, in the skeleton of rows and beside a kernel of their own
// before it, on an H200 with a hidden size of 64: 64 rows 10% less time, 4096 rows 2% more.
#include "kernels/cuda/linear/shards.h"

#include <algorithm>

#include "kernels/cuda/element.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/linear/block_logits.h"
#include "kernels/cuda/linear/hopper/kernels.h"
#include "kernels/cuda/linear/product.h"
#include "kernels/cuda/linear/routes.h"
#include "kernels/cuda/linear/shards.cuh"
#include "kernels/cuda/linear/split_rows.h"
#include "kernels/cuda/loss/cell_sums.cuh"
#include "kernels/cuda/loss/loss_row.cuh"
#include "kernels/cuda/ops.h"
#include "kernels/cuda/rows/row_kernel.cuh"

namespace logitd::cuda {
namespace {

// ---- partial: cells of logits ------------------------------------------------------------------

struct TopKPartialParams {
  TensorView logits = {};                // [rows, tokens]; of one token where no cells are wanted
  const SoftmaxTopKRow* asks = nullptr;  // [rows]: k of the shard, entries [r * most_k, ...)
  const int32_t* indices = nullptr;      // of softmax_topk by `asks`
  const RowStatus* status = nullptr;
  // Arrays of the block. They begin at the first of these rows.
  float* max = nullptr;  // null: no cells are wanted
  float* sum = nullptr;
  int32_t* nan = nullptr;
  uint64_t* keys;
  int32_t row_cells = 0;
  int32_t row_keys;
  int32_t first_token;
};

// Leaves a row's cells and its keys in the block.
struct TopKPartialOp : RowOp {
  using Element = float;
  using Params = TopKPartialParams;
  using Cell = Stats;
  const SoftmaxTopKRow ask;
  const float log2e_over_temperature;

  __device__ TopKPartialOp(const Params& p, int64_t r)
      : ask(p.asks[r]), log2e_over_temperature(kLog2E / ask.temperature) {}
  __device__ bool Active() const { return ask.k != 0; }
  __device__ Stats Add(const LaneCell<float>& x, int, int, int) const {
    return MergeLanes(LaneStats(x, x.Max(0, kLaneElements), log2e_over_temperature),
                      log2e_over_temperature);
  }
  template <class Block>
  __device__ void FinishBlock(const Params& p, int64_t r, const Part&,
                              const OpMemory<TopKPartialOp, Block>& memory) const {
    const float* row = static_cast<const float*>(p.logits.data) + r * p.logits.row_stride;
    const int cells = p.max == nullptr ? 0 : CellsOf(static_cast<int>(p.logits.cols));
    for (int i = threadIdx.x; i < cells; i += Block::kThreads) {
      p.max[r * p.row_cells + i] = memory.cells[i].max;
      p.sum[r * p.row_cells + i] = memory.cells[i].sum;
    }
    const bool is_nan = p.status[r].code == RowCode::kNanLogit;
    if (p.nan != nullptr && threadIdx.x == 0)
      p.nan[r] = is_nan ? p.first_token + p.status[r].position : -1;
    if (is_nan) return;
    for (int i = threadIdx.x; i < ask.k; i += Block::kThreads) {
      const int token = p.indices[ask.first_entry + i];
      p.keys[r * p.row_keys + i] = MakeKey(row[token], p.first_token + token);
    }
  }
};

// The first tokens that a row needs, and the temperature of its cells.
__device__ inline SoftmaxTopKRow AskOf(const SoftmaxTopKRow& row) { return row; }
__device__ inline SoftmaxTopKRow AskOf(const SampleRow& row) {
  return {.temperature = 1.0f, .k = row.active == 0 ? 0 : KeptTokens(row)};
}
__device__ inline SoftmaxTopKRow AskOf(const CrossEntropyRow& row) {
  return {.temperature = 1.0f, .k = row.active == 0 ? 0 : row.top_logprobs};
}

// What softmax_topk is asked for on a shard, by a thread for each row.
template <class Row>
__global__ void AsksKernel(const Row* rows, int64_t count, int tokens, int most_k,
                           SoftmaxTopKRow* asks) {
  const int64_t r = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (r >= count) return;
  const SoftmaxTopKRow ask = AskOf(rows[r]);
  asks[r] = {.first_entry = r * most_k, .temperature = ask.temperature, .k = min(ask.k, tokens)};
}

struct LossPartialParams {
  TensorView logits;            // [rows, tokens]
  const CrossEntropyRow* rows;  // [rows]
  const int32_t* extra_ids;
  const float* targets;  // the gathered targets of these rows
  int64_t target_rows;   // from those of a shard to the next
  Shards shards;
  LossPartials to;  // from the first of these rows on
  int32_t row_cells;
  int32_t max_extra;
  int32_t first_token;
};

// A row's part except its keys, on the skeleton of rows.
class LossPartialOp : public RowOp {
 public:
  using Element = float;
  using Params = LossPartialParams;
  using Cell = CellSums;

  __device__ LossPartialOp(const Params& p, int64_t r) : p_(p), r_(r), row_(p.rows[r]) {}
  __device__ bool Active() const { return row_.active != 0; }

  template <class Block>
  __device__ __forceinline__ float Read(RowStream<Block>& stream, const Part& part, CellSums* cells,
                                        const OpMemory<LossPartialOp, Block>&) {
    auto ask = CellAsk::Of(
        row_, [&] { return p_.targets[p_.shards.OwnerOf(row_.target) * p_.target_rows + r_]; });
    // The target counts from the shard's first token. It may be after the last; one before the
    // first ranks as the first does.
    if (ask.target >= 0) ask.target = max(0, ask.target - p_.first_token);
    const auto sum = [&](auto summing) {
      SumCells<summing, float>(
          stream, ask, part.end, threadIdx.x % 32 == 0, cells,
          [](const LaneCell<float>& x) { return x.Max(0, kLaneElements); },
          [](const CellSums& sums, const auto&...) { return sums; });
    };
    if (ask.weighted) {
      sum(std::integral_constant<Summing, Summing::kWeighted>());
    } else {
      sum(std::integral_constant<Summing, Summing::kWithRankOrTotal>());
    }
    return 0;
  }

  __device__ void Finish(const Params& p, int64_t r, const CellSums* cells, int count,
                         int lane) const {
    const CrossEntropyRow& row = p.rows[r];
    const int tokens = static_cast<int>(p.logits.cols);
    const float* logits = static_cast<const float*>(p.logits.data) + r * p.logits.row_stride;
    int before = 0;
    int first_nan = count;  // a cell
    for (int i = lane; i < count; i += 32) {
      const CellSums sums = cells[i];
      const int64_t at = r * p.row_cells + i;
      p.to.max[at] = sums.stats.max;
      p.to.sum[at] = sums.stats.sum;
      if (row.label_smoothing > 0) p.to.total[at] = sums.total;
      if ((row.want & kWantEntropy) != 0) p.to.moment[at] = sums.weighted;
      before += sums.before;
      if (isnan(sums.stats.sum)) first_nan = min(first_nan, i);
    }
    before = __reduce_add_sync(kFullWarp, before);
    first_nan = __reduce_min_sync(kFullWarp, first_nan);
    int nan = -1;
    if (first_nan < count) nan = p.first_token + FindNan(logits, first_nan * kCell, tokens, lane);
    if (lane == 0) {
      p.to.nan[r] = nan;
      if (row.target >= p.first_token && row.target - p.first_token < tokens)
        p.to.target[r] = logits[row.target - p.first_token];
      if (p.to.before != nullptr) p.to.before[r] = before;
    }
    for (int i = lane; i < row.extra_count; i += 32) {
      const int token = p.extra_ids[row.first_extra + i] - p.first_token;
      if (token >= 0 && token < tokens) p.to.extra[r * p.max_extra + i] = logits[token];
    }
  }

 private:
  const Params& p_;
  const int64_t r_;
  const CrossEntropyRow row_;
};

// The block of a shard without tokens.
__global__ void EmptyPartialKernel(int64_t rows, int32_t* nan, int32_t* before) {
  const int64_t r = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (r >= rows) return;
  nan[r] = -1;
  if (before != nullptr) before[r] = 0;
}

// ---- targets -----------------------------------------------------------------------------------

constexpr int kCopyThreads = 256;

// Block r copies the weight and the bias of row r's target; where the shard has it not, of its
// first token.
__global__ void __launch_bounds__(kCopyThreads)
    GatherTargetsKernel(const CrossEntropyRow* rows, int first_token, HeadView head,
                        uint16_t* weight, int64_t stride_halves, float* bias) {
  const int64_t r = blockIdx.x;
  const int64_t target = rows[r].target - first_token;
  const int64_t token =
      rows[r].active != 0 && target >= 0 && target < head.weight.rows ? target : 0;
  const int64_t halves = head.weight.dtype == DType::kF32 ? 2 : 1;  // of 16 bits in an element
  const uint16_t* from =
      static_cast<const uint16_t*>(head.weight.data) + token * head.weight.row_stride * halves;
  for (int64_t i = threadIdx.x; i < head.weight.cols * halves; i += kCopyThreads)
    weight[r * stride_halves + i] = from[i];
  if (head.bias != nullptr && threadIdx.x == 0) bias[r] = head.bias[token];
}

__global__ void DiagonalKernel(const CrossEntropyRow* rows, int64_t count, int first_token,
                               int64_t tokens, const float* logits, int64_t stride,
                               float* targets) {
  const int64_t r = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (r >= count || rows[r].active == 0) return;
  const int64_t target = rows[r].target - first_token;
  if (target >= 0 && target < tokens) targets[r] = logits[r * stride + r];
}

// ---- launch ------------------------------------------------------------------------------------

// As TopKPartials and LossPartials, from row `first` on.
LossPartials RowsFrom(const LossPartials& partials, const LossPartialShape& shape, int64_t first) {
  const int64_t cells = first * shape.shards.most_cells();
  return {.max = partials.max + cells,
          .sum = partials.sum + cells,
          .total = From(partials.total, cells),
          .moment = From(partials.moment, cells),
          .nan = partials.nan + first,
          .target = partials.target + first,
          .before = From(partials.before, first),
          .keys = From(partials.keys, first * shape.keys()),
          .extra = From(partials.extra, first * shape.max_extra)};
}

cudaError_t LaunchEmpty(int64_t rows, int32_t* nan, int32_t* before, cudaStream_t stream) {
  return LaunchKernel(&EmptyPartialKernel,
                      {.grid = GridFor(rows, kCopyThreads), .threads = kCopyThreads}, stream, rows,
                      nan, before);
}

// Chooses the shard's first tokens of every row of `logits`, as many rows at a time as scratch has
// room for, and writes their keys, and the cells and NaNs where they are wanted. `to`: from the
// first row of `logits` on.
template <class Row>
cudaError_t ChooseTokens(const TensorView& logits, const Row* rows, int64_t keys,
                         TopKPartialParams to, Scratch scratch, cudaStream_t stream) {
  const int64_t tokens = logits.cols;
  const int64_t most_k = std::min(keys, tokens);
  const int64_t row_bytes = most_k * 8 + static_cast<int64_t>(sizeof(SoftmaxTopKRow)) + 16;
  const int64_t room = static_cast<int64_t>(scratch.bytes) / 8;
  const int64_t step = std::clamp<int64_t>(room / row_bytes, 1, logits.rows);
  SoftmaxTopKRow* asks = scratch.Take<SoftmaxTopKRow>(static_cast<size_t>(step));
  RowStatus* status = scratch.Take<RowStatus>(static_cast<size_t>(step));
  float* logsumexp = scratch.Take<float>(static_cast<size_t>(step));
  int32_t* indices = scratch.Take<int32_t>(static_cast<size_t>(step * most_k));
  float* probs = scratch.Take<float>(static_cast<size_t>(step * most_k));
  if (asks == nullptr || status == nullptr || logsumexp == nullptr || indices == nullptr ||
      probs == nullptr) {
    return cudaErrorMemoryAllocation;
  }
  to.asks = asks;
  to.indices = indices;
  to.status = status;
  for (int64_t first = 0; first < logits.rows; first += step) {
    const int64_t count = std::min(step, logits.rows - first);
    to.logits = RowsOf(logits, first, count);
    cudaError_t error = LaunchKernel(
        &AsksKernel<Row>, {.grid = GridFor(count, kCopyThreads), .threads = kCopyThreads}, stream,
        rows + first, count, ToInt(tokens), ToInt(most_k), asks);
    if (error != cudaSuccess) return error;
    error = SoftmaxTopK({.logits = to.logits,
                         .rows = asks,
                         .max_k = ToInt(most_k),
                         .indices = indices,
                         .probs = probs,
                         .logsumexp = logsumexp,
                         .status = status},
                        scratch, stream);
    if (error != cudaSuccess) return error;
    if (to.max == nullptr) to.logits.cols = 1;
    error = RunRows<TopKPartialOp>(to, scratch, stream);
    if (error != cudaSuccess) return error;
    to.max = From(to.max, count * to.row_cells);
    to.sum = From(to.sum, count * to.row_cells);
    to.nan = From(to.nan, count);
    to.keys = From(to.keys, count * to.row_keys);
  }
  return cudaSuccess;
}

// Writes the logits of all rows of a shard with tokens to `to`, which may be a peer's, of row
// stride `stride`. Blocks of rows that can be written there themselves are not copied: a product
// writes all rows of a block, and only with a stride of 32 by the algorithm of the head; other
// kernels write a multiple of 4.
template <class Args>
cudaError_t WriteLogits(const Args& args, const VocabShards& shards, float* to, int64_t stride,
                        Products& products, Scratch scratch, cudaStream_t stream) {
  const LinearRoute route = RouteOf(LinearOp::kTokens, args.head, scratch, /*logits=*/true);
  const bool is_product = route.kernel == LinearKernel::kProduct;
  const BlockLogits block(args.head, shards.vocab, route, 4, products, scratch, stream);
  for (int64_t first = 0; first < args.hidden.rows; first += block.rows()) {
    const int64_t count = std::min(block.rows(), args.hidden.rows - first);
    const bool in_place = is_product ? stride % 32 == 0 && count == block.rows() : stride % 4 == 0;
    const TensorView states = RowsOf(args.hidden, first, count);
    float* const at = to + first * stride;
    cudaError_t error =
        in_place ? block.Make(states, args.head, at, stride, scratch) : block.Make(states, scratch);
    if (error == cudaSuccess && !in_place) {
      const TensorView logits = block.View(count);
      error = cudaMemcpy2DAsync(at, static_cast<size_t>(stride) * 4, logits.data,
                                static_cast<size_t>(logits.row_stride) * 4,
                                static_cast<size_t>(logits.cols) * 4, static_cast<size_t>(count),
                                cudaMemcpyDefault, stream);
    }
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

// The parts of rows through logits. `targets`: the gathered ones of these rows.
cudaError_t LossesFromShardLogits(const LinearCrossEntropyPartialArgs& args,
                                  const CrossEntropyRow* rows, const BlockLogits& block,
                                  const Scratch& scratch, cudaStream_t stream) {
  const LossPartialShape& shape = args.shape;
  const VocabShard shard = shape.shards.at(args.shard);
  const LossPartials all = shape.At(args.block);
  for (int64_t first = 0; first < shape.rows; first += block.rows()) {
    const int64_t count = std::min(block.rows(), shape.rows - first);
    cudaError_t error = block.Make(RowsOf(args.hidden, first, count), scratch);
    if (error != cudaSuccess) return error;
    const LossPartials to = RowsFrom(all, shape, first);
    const TensorView logits = block.View(count);
    const LossPartialParams p{.logits = logits,
                              .rows = rows + first,
                              .extra_ids = args.extra_ids,
                              .targets = From(args.targets, first),
                              .target_rows = shape.rows,
                              .shards = Shards(shape.shards, 0),
                              .to = to,
                              .row_cells = ToInt(shape.shards.most_cells()),
                              .max_extra = shape.max_extra,
                              .first_token = ToInt(shard.first)};
    error = RunRows<LossPartialOp>(p, scratch, stream);
    if (error != cudaSuccess) return error;
    if (shape.max_top == 0) continue;
    error = ChooseTokens(
        logits, rows + first, shape.keys(),
        {.keys = to.keys, .row_keys = ToInt(shape.keys()), .first_token = ToInt(shard.first)},
        scratch, stream);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

// The parts of the rows by hopper/loss.cu. Where the call wants more than losses and extras, rows
// that do go through logits.
cudaError_t HopperShardLosses(const LinearCrossEntropyPartialArgs& args, Products& products,
                              Scratch scratch, cudaStream_t stream) {
  const LossPartialShape& shape = args.shape;
  hopper::ShardLossArgs losses{.hidden = args.hidden,
                               .head = args.head,
                               .rows = args.rows,
                               .extra_ids = args.extra_ids,
                               .first_token = ToInt(shape.shards.at(args.shard).first),
                               .max_extra = shape.max_extra,
                               .row_cells = shape.shards.most_cells(),
                               .to = shape.At(args.block)};
  cudaError_t error = cudaSuccess;
  const int32_t* plain_groups = nullptr;
  if (shape.want != 0 || shape.max_top > 0) {
    SplitRowLists lists;
    error = SplitRows(args.rows, shape.rows, lists, scratch, stream);
    if (error != cudaSuccess) return error;
    const LinearRoute route = RouteOf(LinearOp::kLosses, args.head, scratch, /*logits=*/true);
    Scratch left = scratch;
    const BlockLogits block(args.head, shape.shards.vocab, route, 2, products, left, stream);
    error = LossesFromShardLogits(args, lists.more, block, left, stream);
    if (error != cudaSuccess) return error;
    losses.rows = lists.plain;
    plain_groups = lists.plain_groups;
  }
  if (args.head.norm != nullptr) {
    std::byte* states = scratch.Take<std::byte>(static_cast<size_t>(
        shape.rows * PreparedStride(args.head) * static_cast<int64_t>(SizeOf(args.hidden.dtype))));
    if (states == nullptr) return cudaErrorMemoryAllocation;
    error = Prepare(args.head, shape.rows, states, losses.hidden, stream);
    if (error != cudaSuccess) return error;
  }
  return hopper::ShardLosses(losses, plain_groups, scratch, stream);
}

// Args: LinearTopKPartialArgs, or another struct with its members.
template <class Args>
cudaError_t TokensPartial(const Args& args, Products& products, Scratch scratch,
                          cudaStream_t stream) {
  const TopKPartialShape& shape = args.shape;
  const VocabShard shard = shape.shards.at(args.shard);
  const TopKPartials to = shape.At(args.block);
  if (shape.rows == 0) return cudaSuccess;
  if (shard.tokens == 0) return LaunchEmpty(shape.rows, to.nan, nullptr, stream);
  const LinearRoute route = RouteOf(LinearOp::kTokens, args.head, scratch, /*logits=*/true);
  const BlockLogits block(args.head, shape.shards.vocab, route, 4, products, scratch, stream);
  for (int64_t first = 0; first < shape.rows; first += block.rows()) {
    const int64_t count = std::min(block.rows(), shape.rows - first);
    cudaError_t error = block.Make(RowsOf(args.hidden, first, count), scratch);
    if (error != cudaSuccess) return error;
    const int64_t cells = first * shape.shards.most_cells();
    error = ChooseTokens(block.View(count), args.rows + first, shape.keys(),
                         {.max = to.max + cells,
                          .sum = to.sum + cells,
                          .nan = to.nan + first,
                          .keys = From(to.keys, first * shape.keys()),
                          .row_cells = ToInt(shape.shards.most_cells()),
                          .row_keys = ToInt(shape.keys()),
                          .first_token = ToInt(shard.first)},
                         scratch, stream);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace

cudaError_t LinearTopKPartial(const LinearTopKPartialArgs& args, Products& products,
                              Scratch scratch, cudaStream_t stream) {
  return TokensPartial(args, products, scratch, stream);
}

cudaError_t KeptSamplePartial(const KeptSamplePartialArgs& args, Products& products,
                              Scratch scratch, cudaStream_t stream) {
  return TokensPartial(args, products, scratch, stream);
}

cudaError_t ShardLogits(const ShardLogitsArgs& args, Products& products, Scratch scratch,
                        cudaStream_t stream) {
  const VocabShard shard = args.shards.at(args.shard);
  if (shard.tokens == 0) return cudaSuccess;
  return WriteLogits(args, args.shards, args.logits + shard.first, args.stride, products, scratch,
                     stream);
}

cudaError_t LinearSamplePartial(const LinearSamplePartialArgs& args, Products& products,
                                Scratch scratch, cudaStream_t stream) {
  const VocabShards& shards = args.shape.shards;
  if (args.shape.rows == 0 || shards.at(args.shard).tokens == 0) return cudaSuccess;
  return WriteLogits(args, shards, args.shape.At(args.block, args.input), shards.most_tokens(),
                     products, scratch, stream);
}

cudaError_t LinearCrossEntropyTargets(const LinearCrossEntropyTargetsArgs& args, Products& products,
                                      Scratch scratch, cudaStream_t stream) {
  const VocabShard shard = args.shards.at(args.shard);
  if (shard.tokens == 0) return cudaSuccess;
  const LinearRoute route = RouteOf(LinearOp::kLosses, args.head, scratch, /*logits=*/true);
  const BlockLogits block(args.head, args.shards.vocab, route, 2, products, scratch, stream);
  const int64_t stride = PreparedStride(args.head);
  const auto element = static_cast<int64_t>(SizeOf(args.head.weight.dtype));
  // The algorithm of a product serves no more columns than the vocabulary has. And a product of few
  // rows reads few weights at the rate of memory, where one of many rows would leave most of the
  // device idle.
  constexpr int64_t kTargetRows = 128;
  const int64_t step = std::min({block.rows(), args.shards.vocab, kTargetRows});
  const auto most = static_cast<size_t>(block.rows());
  std::byte* weight = scratch.Take<std::byte>(most * static_cast<size_t>(stride * element));
  float* bias = scratch.Take<float>(most);
  float* logits = scratch.Take<float>(most * most);
  if (weight == nullptr || bias == nullptr || logits == nullptr) return cudaErrorMemoryAllocation;
  for (int64_t first = 0; first < args.hidden.rows; first += step) {
    const int64_t count = std::min(step, args.hidden.rows - first);
    cudaError_t error =
        LaunchKernel(&GatherTargetsKernel, {.grid = GridFor(count), .threads = kCopyThreads},
                     stream, args.rows + first, ToInt(shard.first), args.head,
                     reinterpret_cast<uint16_t*>(weight), stride * element / 2, bias);
    if (error != cudaSuccess) return error;
    HeadView targets = args.head;  // a head of the targets: their logits are its diagonal
    targets.weight.data = weight;
    targets.weight.rows = count;
    targets.weight.row_stride = stride;
    if (args.head.bias != nullptr) targets.bias = bias;
    error = block.Make(RowsOf(args.hidden, first, count), targets, logits, block.rows(), scratch);
    if (error != cudaSuccess) return error;
    error = LaunchKernel(&DiagonalKernel,
                         {.grid = GridFor(count, kCopyThreads), .threads = kCopyThreads}, stream,
                         args.rows + first, count, ToInt(shard.first), shard.tokens, logits,
                         block.rows(), args.targets + first);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

cudaError_t LinearCrossEntropyPartial(const LinearCrossEntropyPartialArgs& args, Products& products,
                                      Scratch scratch, cudaStream_t stream) {
  const LossPartialShape& shape = args.shape;
  if (shape.rows == 0) return cudaSuccess;
  if (shape.shards.at(args.shard).tokens == 0) {
    const LossPartials to = shape.At(args.block);
    return LaunchEmpty(shape.rows, to.nan, to.before, stream);
  }
  if (RouteOf(LinearOp::kLosses, args.head, scratch).kernel == LinearKernel::kHopperLosses)
    return HopperShardLosses(args, products, scratch, stream);
  const LinearRoute route = RouteOf(LinearOp::kLosses, args.head, scratch, /*logits=*/true);
  const BlockLogits block(args.head, shape.shards.vocab, route, 2, products, scratch, stream);
  return LossesFromShardLogits(args, args.rows, block, scratch, stream);
}

}  // namespace logitd::cuda
