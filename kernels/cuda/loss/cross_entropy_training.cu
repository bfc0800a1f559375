// cross_entropy_training: a block, or a cluster, reads a row as cross_entropy does, then reads it
// again, out of L2, and writes its gradient as the backward does: one read of HBM, one write.
//
// The planner gives a row so many blocks that L2 holds the rows under way (RowForm::rereads). Rows
// outside of kForms take two calls: cross_entropy, then its backward.
//
// Cost: reads rows * vocab * sizeof(T) once and writes as much: the floor is a copy. Limited by:
// what L2 holds; a row's blocks neither read nor write between its last cell and its first gradient
// (about a quarter of its cycles, by the clocks of one thread); label smoothing by instructions.
// Measured on an H200 (bench/results/h200/cross_entropy_training.json), bf16, as a share of the
// copy, in brackets the two calls: 8192 x 32000 86% (65%), 50257 80% (64%), 128256 81% (68%), with
// rank and entropy 71% (65%); 4096 x 151936 84% (67%). Dropped: rows held in shared memory by a
// cluster (2% faster to 15% slower, f32 10% slower: few rows find room); blocks of 4 warps, 6 a
// multiprocessor, 8 a row (2% faster at 128256 tokens, smoothing 5% slower); a ring of rows with
// warps by role (61%).
#include "kernels/cuda/dispatch.cuh"
#include "kernels/cuda/loss/cell_sums.cuh"
#include "kernels/cuda/loss/cross_entropy_training.h"
#include "kernels/cuda/loss/row_gradient.cuh"
#include "kernels/cuda/ops.h"
#include "kernels/cuda/rows/row_kernel.cuh"

namespace logitd::cuda {
namespace {

// A cell's sums, and where it has a NaN.
struct alignas(8) KnownCell : CellSums {
  int32_t nan;  // where the sum is NaN: the lowest index of one in the row; vocab: none in the cell
};
static_assert(sizeof(KnownCell) == 24);

// The lowest index of a NaN in the cell at `first`; `none` where it has none.
template <class T>
__device__ inline int NanOf(const LaneCell<T>& x, int first, int none, int lane) {
  int nan = none;
#pragma unroll
  for (int e = 0; e < kLaneElements; ++e) {
    if (isnan(x[e])) nan = min(nan, first + CellIndex<T>(lane, e));
  }
  return __reduce_min_sync(kFullWarp, nan);
}

// Leaves the logits of a row's extra ids in the place of their answers, by one warp. A gradient in
// place overwrites them before the answers are known.
template <class T>
__device__ inline void KeepExtras(const CrossEntropyArgs& args, const CrossEntropyRow& ask,
                                  const T* row, int lane) {
  for (int i = lane; i < ask.extra_count; i += 32) {
    args.answers.extra_logprobs[ask.first_extra_entry + i] =
        ToFloat(row[args.extra_ids[ask.first_extra + i]]);
  }
}
// Makes answers of them, by the same lanes.
__device__ inline void WriteExtras(const CrossEntropyArgs& args, const CrossEntropyRow& ask,
                                   const Outcome& outcome, int lane) {
  for (int i = lane; i < ask.extra_count; i += 32) {
    float* logprob = args.answers.extra_logprobs + ask.first_extra_entry + i;
    *logprob = static_cast<float>(outcome.Logprob(*logprob));
  }
}

// A row's loss and gradient, on the skeleton of rows: every block of a cluster merges the row's
// cells and writes the gradient of its part.
template <class T>
class TrainingOp : public RowOp {
 public:
  using Element = T;
  using Params = CrossEntropyTrainingArgs;
  using Cell = KnownCell;
  struct Shared {
    CrossEntropyRow ask;
    RowGradient<T> gradient;
  };
  static constexpr bool kAllFinish = true;

  __host__ __device__ static const TensorView& Logits(const Params& p) { return p.loss.logits; }

  __device__ TrainingOp(const Params& p, int64_t r)
      : p_(p),
        r_(r),
        row_(static_cast<const T*>(p.loss.logits.data) + r * p.loss.logits.row_stride),
        active_(p.loss.rows[r].active) {
    if (threadIdx.x < kAskParts)
      asked_ = reinterpret_cast<const uint2*>(p.loss.rows + r)[threadIdx.x];
  }
  __device__ bool Active() const { return active_ != 0; }

  template <class Block>
  __device__ __forceinline__ float Read(RowStream<Block>& stream, const Part& part,
                                        KnownCell* cells,
                                        const OpMemory<TrainingOp, Block>& memory) {
    const int lane = threadIdx.x % 32;
    const CrossEntropyRow& ask = memory.of_op.ask;
    if (threadIdx.x < kAskParts) reinterpret_cast<uint2*>(&memory.of_op.ask)[threadIdx.x] = asked_;
    __syncthreads();
    const auto target_logit = [&] { return ToFloat(row_[ask.target]); };
    // One thread prepares the gradient. It reads its inputs before the blocks meet: after that,
    // another block may have written the target's gradient over its logit.
    const bool prepares = threadIdx.x == Block::kThreads - 1;
    const float upstream = prepares ? p_.upstream[r_] : 0.0f;
    const float prepared_logit = prepares && ask.target >= 0 ? target_logit() : 0.0f;
    cell_ask_ = CellAsk::Of(ask, target_logit);
    if (Answers(part)) KeepExtras(p_.loss, ask, row_, lane);
    const auto max_of = [](const LaneCell<T>& x) { return x.Max(0, kLaneElements); };
    const auto known = [=, vocab = part.row_elements](const CellSums& sums, const LaneCell<T>& x,
                                                      int first) {
      return KnownCell{sums, isnan(sums.stats.sum) ? NanOf(x, first, vocab, lane) : vocab};
    };
    VisitSumming(SummingOf(cell_ask_), [&](auto summing) {
      SumCells<summing, T>(stream, cell_ask_, part.end, lane < part.blocks, cells, max_of, known);
    });
    if (prepares) {
      memory.of_op.gradient.Prepare(ask, upstream, ask.target >= 0, prepared_logit,
                                    part.row_elements);
    }
    return 0;
  }

  template <class Block>
  __device__ __forceinline__ void FinishBlock(const Params& p, int64_t r, const Part& part,
                                              const OpMemory<TrainingOp, Block>& memory) {
    RowGradient<T>& gradient = memory.of_op.gradient;
    T* to = static_cast<T*>(p.d_logits.data) + r * p.d_logits.row_stride;
    GradientWriter<T, Block::kThreads> writer(row_, to, part.begin, part.end);
    if (threadIdx.x < 32) {
      const int lane = threadIdx.x;
      const int count = CellsOf(part.row_elements);
      const KnownCell* cells = memory.cells;
      const CrossEntropyRow& ask = memory.of_op.ask;
      const float log2e_over_temperature = cell_ask_.log2e_over_temperature;
      const Stats stats =
          MergeCells(count, log2e_over_temperature, lane, [=](int i) { return cells[i].stats; });
      const double log_of_sum = log(static_cast<double>(stats.sum));
      const Outcome outcome = OutcomeOf(ask, stats, log_of_sum);
      if (lane == 0) gradient.Finish(static_cast<float>(outcome.LogSumExp()));
      __syncthreads();
      if (Answers(part)) {
        RowSums sums{.stats = stats};
        if (SummingOf(cell_ask_) != Summing::kPlain) {
          sums = MergeMore(stats, count, log2e_over_temperature, lane,
                           [=](int i) -> const CellSums& { return cells[i]; });
        }
        int nan = part.row_elements;
        for (int i = 0; isnan(stats.sum) && i < count; ++i) nan = min(nan, cells[i].nan);
        WriteExtras(p.loss, ask, outcome, lane);
        const float logit = ask.target >= 0 ? gradient.target_logit : 0.0f;
        if (lane == 0) WriteAnswers(p.loss, ask, r, sums, log_of_sum, outcome, logit, nan);
      }
    } else {
      __syncthreads();
    }
    writer.Write(true, gradient);
  }

 private:
  static constexpr unsigned kAskParts = sizeof(CrossEntropyRow) / sizeof(uint2);

  // The warp that writes the row's answers.
  __device__ static bool Answers(const Part& part) { return threadIdx.x < 32 && part.block == 0; }

  const Params& p_;
  const int64_t r_;
  const T* const row_;
  const int active_;
  uint2 asked_;  // a part of the row's ask
  CellAsk cell_ask_;
};

// ---- launch ------------------------------------------------------------------------------------

template <class T>
using TrainingStream = StreamShape<T, 8, sizeof(T) == 4 ? 2 : 3, 3, true>;

template <class T>
constexpr RowForm FormOfBlocks(int most_blocks, int most_bytes) {
  RowForm form = FormOf<TrainingOp<T>, TrainingStream<T>>(CostOf::kTraining);
  form.least_cells = 9;
  form.most_cells = most_bytes / (kCell * sizeof(T));
  form.most_blocks = most_blocks;
  form.rereads = true;
  return form;
}
// Shorter and longer rows take less time in two calls. The second is for devices without clusters.
template <class T>
constexpr RowForm kForms[] = {FormOfBlocks<T>(kMaxClusterBlocks, 1 << 20),
                              FormOfBlocks<T>(1, 112 << 10)};

template <class T>
cudaError_t InOneCall(const CrossEntropyTrainingArgs& args, const Scratch& scratch,
                      cudaStream_t stream) {
  RowsShape shape = ShapeOf(args.loss.logits);
  shape.row_bytes *= 2;  // written too
  const RowsPlan plan = PlanRows(shape, kForms<T>, scratch);
  if (plan.form < 0) return cudaErrorNotSupported;
  return LaunchRowKernel<TrainingOp<T>, TrainingStream<T>>(args, plan, scratch, stream);
}

}  // namespace

cudaError_t CrossEntropyTraining(const CrossEntropyTrainingArgs& args, const Scratch& scratch,
                                 cudaStream_t stream) {
  const CrossEntropyArgs& loss = args.loss;
  const DType dtype = loss.logits.dtype;
  if (loss.logits.rows == 0) return cudaSuccess;
  // A softcap takes more instructions an element than fit beside the reading of 16 bits.
  if (loss.max_top_logprobs == 0 && !(args.softcap && SizeOf(dtype) == 2)) {
    const cudaError_t error =
        VisitDType(dtype, [&]<class T>() { return InOneCall<T>(args, scratch, stream); });
    if (error != cudaErrorNotSupported || IsForced()) return error;
  }
  const cudaError_t error = CrossEntropy(loss, scratch, stream);
  return error != cudaSuccess ? error : CrossEntropyBackward(args.Backward(), stream);
}

}  // namespace logitd::cuda
