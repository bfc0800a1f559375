// linear_divergence_training: the logits of both heads in blocks of rows, for the losses; their
// gradients G in the weight's dtype; and the products for d_hidden and d_weight.
//
// Losses come from divergence on the block's logits. For kJensenShannon ConcludeKernel reads them
// once more, a block of threads a row: m needs both logsumexps. DivergenceGradientKernel turns
// logits of both heads into G of the student. ln p and ln q are pairs of floats, so that p and q
// are as exact as in cross_entropy's backward. Two forms: G of all rows is kept (kept_chunks.h),
// made from the logits of the losses, where a 16-bit student of Hopper's kernels has room for it;
// else the logits are made again, chunk by chunk of the vocabulary (gradient_chunks.cuh).
//
// Cost: four products, which are the floor, or six. Besides, bytes of a token and row: 16 for both
// logits and the losses (8 more for kJensenShannon), 8 for G to read them (16 where they are made
// again), and G, written once and read twice. Limited by: the tensor cores, then HBM.
// Measured on an H200 (bench/results/h200/divergence_training.json), 4096 rows, heads of 128256 x
// 4096, bf16: 86% of the four products; kJensenShannon 72%, f16 88%. 512 rows of f32 heads of 32000
// x 2048, whose logits are made again: 35%.
#include <algorithm>

#include "kernels/cuda/linear/gradient_chunks.cuh"
#include "kernels/cuda/linear/kept_chunks.h"
#include "kernels/cuda/linear/logit.cuh"
#include "kernels/cuda/linear/pair_logits.h"
#include "kernels/cuda/linear/routes.h"
#include "kernels/cuda/loss/divergence_token.cuh"
#include "kernels/cuda/ops.h"
#include "kernels/cuda/rows/reductions.cuh"

namespace logitd::cuda {
namespace {

constexpr int kThreads = kCopyThreads;
constexpr int kWarps = kThreads / 32;

// ---- losses ------------------------------------------------------------------------------------

// The answers of divergence for a block of rows, and the losses made of them.
struct ConcludeArgs {
  DivergenceLoss kind;
  Mixture mixture;
  const DivergenceRow* rows;
  const float* forward_kl;
  const float* reverse_kl;
  const DivergenceNorms* norms;
  const RowStatus* status;
  float* loss;
  DivergenceTrainingRow* memory;
};

// KL(p || m) and KL(q || m).
struct MixtureSums {
  double p, q;
};

// Sums them over a row, by a block. Every thread gets the same bits, which depend only on the row.
__device__ inline MixtureSums SumMixture(const RowLogprobs& of_p, const RowLogprobs& of_q,
                                         const Mixture& mixture, const float* __restrict__ x,
                                         const float* __restrict__ y, int vocab) {
  constexpr int kAhead = 8;  // tokens of a thread that are added up in f32
  __shared__ MixtureSums parts[kWarps];
  MixtureSums sums = {0.0, 0.0};
#pragma unroll 1
  for (int base = 0; base < vocab; base += kAhead * kThreads) {
    float of_x[kAhead], of_y[kAhead];
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      const int i = base + j * kThreads + static_cast<int>(threadIdx.x);
      of_x[j] = i < vocab ? x[i] : -kInfinity;
      of_y[j] = i < vocab ? y[i] : -kInfinity;
    }
    float sum_p = 0.0f, sum_q = 0.0f;
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      const Logprob ln_p = of_p.At(of_x[j]), ln_q = of_q.At(of_y[j]);
      const float p = ln_p.P(), q = ln_q.P();
      if (p == 0.0f && q == 0.0f) continue;  // both may be -inf
      const AboveMixture above = mixture.At(ln_p, ln_q);
      if (p > 0.0f) sum_p = fmaf(p, above.p, sum_p);
      if (q > 0.0f) sum_q = fmaf(q, above.q, sum_q);
    }
    sums.p += sum_p;
    sums.q += sum_q;
  }
  sums = {WarpSum(sums.p), WarpSum(sums.q)};
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = sums;
  __syncthreads();
  sums = {0.0, 0.0};
  for (const MixtureSums& part : parts) {
    sums.p += part.p;
    sums.q += part.q;
  }
  return sums;
}

// Block r writes the loss of row r and what its gradients need. The logits are read only for a
// mixture.
__global__ void __launch_bounds__(kThreads)
    ConcludeKernel(const __grid_constant__ ConcludeArgs args, const float* x, int64_t x_stride,
                   const float* y, int64_t y_stride, int vocab) {
  const int64_t r = blockIdx.x;
  const DivergenceRow& ask = args.rows[r];
  if (ask.active == 0) return;
  const DivergenceNorms& norms = args.norms[r];
  const bool forward = args.kind == DivergenceLoss::kForwardKl;
  float loss = forward ? args.forward_kl[r] : args.reverse_kl[r];
  float divergence = forward ? loss : 0.0f;
  if (args.kind == DivergenceLoss::kJensenShannon && args.status[r].code == RowCode::kOk) {
    const MixtureSums sums = SumMixture(
        RowLogprobs::Of(norms.max, ask.temperature, norms.log_sum),
        RowLogprobs::Of(norms.reference_max, ask.reference_temperature, norms.reference_log_sum),
        args.mixture, x + r * x_stride, y + r * y_stride, vocab);
    const double beta = args.mixture.beta;
    loss = static_cast<float>(fmax(beta * sums.q + (1.0 - beta) * sums.p, 0.0));
    divergence = static_cast<float>(sums.p);
  }
  if (threadIdx.x != 0) return;
  args.loss[r] = loss;
  const bool counts = isfinite(loss) && norms.max < kInfinity;
  args.memory[r] = {.norms = norms, .divergence = divergence, .counts = counts ? 1 : 0};
}

// Makes the losses, block by block of rows.
class LossBlocks {
 public:
  LossBlocks(const LinearDivergenceTrainingArgs& args, Products& products, Scratch& scratch,
             cudaStream_t stream)
      : args_(args),
        stream_(stream),
        logits_(args.head, args.reference_head, products, scratch, stream),
        norms_(scratch.Take<DivergenceNorms>(static_cast<size_t>(rows()))),
        values_(scratch.Take<float>(static_cast<size_t>(8 * rows()))) {}

  // Rows of a block. They do not depend on the call.
  int64_t rows() const { return logits_.rows(); }

  // Writes losses, statuses and memory of all rows, and calls then(first row, logits, reference
  // logits), which returns a cudaError_t, after each block. `scratch` is what the constructor left.
  template <class Then>
  cudaError_t Run(const Scratch& scratch, const Then& then) const {
    for (int64_t first = 0; first < args_.hidden.rows; first += rows()) {
      const int64_t count = std::min(rows(), args_.hidden.rows - first);
      TensorView x, y;
      cudaError_t error =
          logits_.Make(args_.hidden, args_.reference_hidden, first, count, scratch, &x, &y);
      if (error == cudaSuccess) error = Measure(first, x, y, scratch);
      if (error == cudaSuccess) error = then(first, x, y);
      if (error != cudaSuccess) return error;
    }
    return cudaSuccess;
  }

 private:
  cudaError_t Measure(int64_t first, const TensorView& x, const TensorView& y,
                      const Scratch& scratch) const {
    DivergenceAnswers measured = {.status = args_.status + first, .norms = norms_};
    float* next = values_;
    for (float** answer :
         {&measured.forward_kl, &measured.reverse_kl, &measured.entropy,
          &measured.reference_entropy, &measured.logsumexp, &measured.reference_logsumexp,
          &measured.target_logprob, &measured.reference_target_logprob}) {
      *answer = next;
      next += rows();
    }
    const DivergenceRow* const asks = args_.rows + first;
    const cudaError_t error = Divergence(
        {.logits = x, .reference_logits = y, .rows = asks, .answers = measured}, scratch, stream_);
    if (error != cudaSuccess) return error;
    const ConcludeArgs conclude = {.kind = args_.kind,
                                   .mixture = {.beta = args_.beta, .less = 1 - args_.beta},
                                   .rows = asks,
                                   .forward_kl = measured.forward_kl,
                                   .reverse_kl = measured.reverse_kl,
                                   .norms = norms_,
                                   .status = measured.status,
                                   .loss = args_.loss + first,
                                   .memory = args_.memory + first};
    return LaunchKernel(&ConcludeKernel, {.grid = GridFor(x.rows), .threads = kThreads}, stream_,
                        conclude, static_cast<const float*>(x.data), x.row_stride,
                        static_cast<const float*>(y.data), y.row_stride, static_cast<int>(x.cols));
  }

  const LinearDivergenceTrainingArgs& args_;
  const cudaStream_t stream_;
  const PairLogits logits_;
  DivergenceNorms* const norms_;
  float* const values_;  // answers of divergence that are not asked for
};

// ---- gradients ---------------------------------------------------------------------------------

// A row between the passes. G is g * scale * more, times the softcap's derivative.
struct alignas(16) DivergencePlan {
  RowLogprobs p, q;
  float divergence;
  float scale;  // upstream / temperature is scale * more: it may be more than a float holds where
  float more;   // g is small
  int32_t exponent;  // as RowState::exponent
  int32_t at;        // of its hidden state
  RowUse use;

  __device__ float OfHidden() const { return HiddenFactor(exponent); }

  template <DivergenceLoss kKind>
  __device__ float At(float x, float y, const Mixture& mixture) const {
    const Logprob ln_p = p.At(x), ln_q = q.At(y);
    const float of_p = ln_p.P();
    float g = 0.0f;
    if constexpr (kKind == DivergenceLoss::kReverseKl) {
      g = __fsub_rn(of_p, ln_q.P());  // not of a product that is not rounded: 0 where p is q
    } else if (of_p > 0.0f) {
      g = kKind == DivergenceLoss::kForwardKl
              ? of_p * (ln_p.Above(ln_q) - divergence)
              : mixture.less * of_p * (mixture.At(ln_p, ln_q).p - divergence);
    }
    return __fmul_rn(__fmul_rn(g, scale), more);
  }
};

// The arrays of a call, for all its rows.
struct DivergenceCall {
  const DivergenceRow* rows;
  const float* upstream;
  const DivergenceTrainingRow* memory;
  int64_t count;
};

// Plans `count` rows from `first` on; rows after the call's last one are skipped. first_at: of the
// first one's hidden state. scale: null unless the head is f16.
__global__ void __launch_bounds__(kThreads)
    PlanDivergenceKernel(const DivergenceCall call, int64_t first, int64_t count, int64_t first_at,
                         DivergencePlan* to, HalfScale* scale) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= count) return;
  const int64_t r = first + i;
  DivergencePlan plan = {};
  plan.exponent = kGradientExponent;
  plan.at = static_cast<int32_t>(first_at + i);
  plan.use = RowUse::kSkipped;
  if (r < call.count && call.rows[r].active != 0) {
    const DivergenceRow& ask = call.rows[r];
    const DivergenceTrainingRow& row = call.memory[r];
    plan.use = row.counts != 0 ? RowUse::kCounted : RowUse::kIgnored;
    if (row.counts != 0) {
      const DivergenceNorms& norms = row.norms;
      plan.p = RowLogprobs::Of(norms.max, ask.temperature, norms.log_sum);
      plan.q =
          RowLogprobs::Of(norms.reference_max, ask.reference_temperature, norms.reference_log_sum);
      plan.divergence = row.divergence;
      const double factor = call.upstream[r] / ActingTemperature(ask.temperature);
      plan.more = fabs(factor) > 1e30 ? 0x1p64f : 1.0f;
      plan.scale = static_cast<float>(factor / plan.more);
      if (scale != nullptr)
        plan.exponent = TakeExponent(fabsf(plan.scale) * (1.0f + row.divergence), plan.more, scale);
    }
  }
  to[i] = plan;
}

// Logits of the student and of its reference: a row every `stride` elements.
struct PairOfLogits {
  const float* x;
  int64_t x_stride;
  const float* y;
  int64_t y_stride;
  bool capped;  // whether softcaps were applied
};

struct Softcaps {
  float head, reference;  // 0: none
};

// Turns logits into gradients of the student's, [rows, columns], from row `to_row` of `to` on. A
// thread takes two columns of all rows of a group. It writes the columns' sums to `column_sums`
// [groups, to.chunk] unless that is null. `columns` may be odd: there is memory for one more.
template <class T, DivergenceLoss kKind>
__global__ void __launch_bounds__(kThreads)
    DivergenceGradientKernel(const PairOfLogits logits, int columns, const Softcaps softcaps,
                             const Mixture mixture, const DivergencePlan* __restrict__ plans,
                             const KeptMemory to, int64_t to_row, float* __restrict__ column_sums) {
  constexpr int kAhead = kRowsAhead / 2;  // there are two logits
  __shared__ DivergencePlan rows[kGroupRows];
  const int64_t first_row = static_cast<int64_t>(blockIdx.y) * kGroupRows;
  if (threadIdx.x < kGroupRows) rows[threadIdx.x] = plans[first_row + threadIdx.x];
  __syncthreads();
  const int column = 2 * static_cast<int>(blockIdx.x * kThreads + threadIdx.x);
  if (column >= columns) return;
  const auto at = [&](const DivergencePlan& row, float of_x, float of_y) {
    if (row.use != RowUse::kCounted) return 0.0f;
    float bend = 1.0f;
    if (softcaps.head > 0) {
      float value = of_x / softcaps.head;
      if (!logits.capped) {
        value = tanhf(value);
        of_x = softcaps.head * value;
      }
      bend = fmaf(-value, value, 1.0f);
    }
    if (softcaps.reference > 0 && !logits.capped) of_y = ApplySoftcap(of_y, softcaps.reference);
    return row.At<kKind>(of_x, of_y, mixture) * bend;
  };
  float sum0 = 0.0f;
  float sum1 = 0.0f;
  const float* const __restrict__ x = logits.x + first_row * logits.x_stride + column;
  const float* const __restrict__ y = logits.y + first_row * logits.y_stride + column;
  T* const gradients = to.At<T>(to_row + first_row, column);
#pragma unroll 1
  for (int begin = 0; begin < kGroupRows; begin += kAhead) {
    float2 of_x[kAhead], of_y[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      of_x[i] = *reinterpret_cast<const float2*>(x + (begin + i) * logits.x_stride);
      of_y[i] = *reinterpret_cast<const float2*>(y + (begin + i) * logits.y_stride);
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const DivergencePlan& row = rows[begin + i];
      const float g0 = at(row, of_x[i].x, of_y[i].x);
      const float g1 = at(row, of_x[i].y, of_y[i].y);
      sum0 += g0;
      sum1 += g1;
      WriteGradients(gradients + (begin + i) * to.chunk, g0, g1, row.exponent);
    }
  }
  if (column_sums == nullptr) return;
  *reinterpret_cast<float2*>(column_sums + blockIdx.y * to.chunk + column) = {sum0, sum1};
}

// Calls visit.operator()<kind>().
template <class Visit>
void VisitKind(DivergenceLoss kind, const Visit& visit) {
  switch (kind) {
    case DivergenceLoss::kForwardKl:
      return visit.template operator()<DivergenceLoss::kForwardKl>();
    case DivergenceLoss::kReverseKl:
      return visit.template operator()<DivergenceLoss::kReverseKl>();
    case DivergenceLoss::kJensenShannon:
      return visit.template operator()<DivergenceLoss::kJensenShannon>();
  }
  __builtin_unreachable();
}

void PlanRows(Steps& steps, const LinearDivergenceTrainingArgs& args, int64_t first, int64_t count,
              int64_t first_at, DivergencePlan* rows, HalfScale* scale) {
  const DivergenceCall call = {.rows = args.rows,
                               .upstream = args.upstream,
                               .memory = args.memory,
                               .count = args.hidden.rows};
  steps.Launch(&PlanDivergenceKernel, GridFor(count, kThreads), kThreads, call, first, count,
               first_at, rows, scale);
}

// The place of G of some rows.
struct GradientPlace {
  KeptMemory memory;
  int64_t row;         // the first one
  float* column_sums;  // null: not wanted
};

// Writes G of `rows` rows, a multiple of kGroupRows, and `columns` tokens.
void MakeGradients(Steps& steps, const LinearDivergenceTrainingArgs& args,
                   const PairOfLogits& logits, int64_t rows, int64_t columns,
                   const DivergencePlan* plans, const GradientPlace& to) {
  const Mixture mixture = {.beta = args.beta, .less = 1 - args.beta};
  const Softcaps softcaps = {.head = args.head.softcap, .reference = args.reference_head.softcap};
  VisitDType(args.head.weight.dtype, [&]<class T>() {
    VisitKind(args.kind, [&]<DivergenceLoss kKind>() {
      steps.Launch(&DivergenceGradientKernel<T, kKind>, GradientGrid(rows, columns), kThreads,
                   logits, static_cast<int>(columns), softcaps, mixture, plans, to.memory, to.row,
                   to.column_sums);
    });
  });
}

// ---- gradients from logits that are made again --------------------------------------------------

// The loss of GradientChunks.
class DivergenceChunks {
 public:
  using Row = DivergencePlan;

  explicit DivergenceChunks(const LinearDivergenceTrainingArgs& args) : args_(args) {}

  const HeadView* reference() const { return &args_.reference_head; }

  void Take(Scratch& scratch, const ChunkCut& cut) {
    const HeadView& head = args_.reference_head;
    const DType dtype = head.weight.dtype;
    const int64_t stride = PreparedStride(head);
    const size_t bytes = static_cast<size_t>(cut.group * stride) * SizeOf(dtype);
    states_ = {scratch.Take<std::byte>(bytes), dtype, cut.group, head.hidden(), stride};
    logits_ = {scratch.Take<float>(static_cast<size_t>(cut.block * cut.chunk)), DType::kF32,
               cut.block, cut.chunk, cut.chunk};
  }

  void Plan(Steps& steps, int64_t first, int64_t count, DivergencePlan* rows,
            HalfScale* scale) const {
    PlanRows(steps, args_, first, count, /*first_at=*/0, rows, scale);
    TensorView states =
        RowsOf(args_.reference_hidden, first, std::min(count, args_.hidden.rows - first));
    steps.Do([&] {
      return Prepare(args_.reference_head, count, static_cast<std::byte*>(states_.data), states,
                     steps.stream());
    });
  }

  void Make(Steps& steps, const GradientBlock<DivergencePlan>& block) const {
    const HeadView& head = args_.reference_head;
    steps.Multiply({.a = RowsOf(states_, block.first_row, block.rows),
                    .b = RowsOf(head.weight, block.first_token, block.tokens),
                    .transpose_b = true,
                    .out = logits_,
                    .bias = head.bias == nullptr ? nullptr : head.bias + block.first_token,
                    .alpha = head.scale});
    const KeptMemory memory = {.first = static_cast<std::byte*>(block.gradients.data),
                               .others = nullptr,
                               .in_first = 1,
                               .chunk = block.stride,
                               .chunk_bytes = 0};
    MakeGradients(steps, args_,
                  {.x = block.logits,
                   .x_stride = block.stride,
                   .y = static_cast<const float*>(logits_.data),
                   .y_stride = block.stride,
                   .capped = false},
                  block.rows, block.tokens, block.plans,
                  {.memory = memory, .row = 0, .column_sums = block.column_sums});
  }

 private:
  const LinearDivergenceTrainingArgs& args_;
  MutableTensorView states_;  // [group, hidden] of the reference
  MutableTensorView logits_;  // [block, chunk], f32, likewise
};

// ---- gradients that are kept --------------------------------------------------------------------

struct KeptCut : KeptChunks {
  KeptCut(const LinearDivergenceTrainingArgs& args, int64_t bytes)
      : KeptChunks(args.head, args.d_weight.dtype, [&](const KeptChunks& of, int64_t rows) {
          return Bytes(of, rows, /*in_first=*/1) <= bytes;
        }) {}

  // Bytes of scratch for a call with so many rows.
  static int64_t Bytes(const KeptChunks& of, int64_t rows, int64_t in_first) {
    constexpr int64_t kSlack = 4096;  // for the alignment of the pieces
    constexpr auto kPlan = static_cast<int64_t>(sizeof(DivergencePlan));
    const int64_t of_row = of.hidden_stride * (kKeptElement + 4) + kPlan;
    return Padded(rows) * of_row + in_first * of.ChunkBytes(rows) + kSlack;
  }
  int64_t Bytes(int64_t rows) const { return Bytes(*this, rows, InFirst(rows)); }
};
static_assert(kTrainingRows % kGroupRows == 0);

class KeptGradients {
 public:
  KeptGradients(const LinearDivergenceTrainingArgs& args, const KeptCut& cut, Products& products,
                Scratch& scratch, cudaStream_t stream)
      : args_(args),
        cut_(cut),
        padded_(KeptChunks::Padded(args.hidden.rows)),
        steps_(products, scratch, stream),
        plans_(scratch.Take<DivergencePlan>(static_cast<size_t>(padded_))),
        scale_(IsHalf() ? scratch.Take<HalfScale>(1) : nullptr) {
    const auto rows = static_cast<size_t>(padded_), stride = static_cast<size_t>(cut.hidden_stride);
    const int64_t hidden = args.head.hidden();
    states_ = {scratch.Take<std::byte>(rows * stride * kKeptElement), dtype(), padded_, hidden,
               cut.hidden_stride};
    d_states_ = {scratch.Take<float>(rows * stride), DType::kF32, padded_, hidden,
                 cut.hidden_stride};
    const int64_t first_bytes = cut.InFirst(args.hidden.rows) * cut.ChunkBytes(args.hidden.rows);
    kept_ = cut.Memory(args.hidden.rows, scratch.Take<std::byte>(static_cast<size_t>(first_bytes)),
                       args.d_weight);
    if (IsHalf()) steps_.Do([&] { return HalfScale::Clear(scale_, steps_.stream()); });
  }

  // Makes G of rows whose losses are known, from their logits after softcaps. There is memory of
  // logits for as many rows as fill whole groups.
  cudaError_t Add(int64_t first, const TensorView& x, const TensorView& y) {
    const int64_t rows = RoundUp(x.rows, kGroupRows);
    PlanRows(steps_, args_, first, rows, /*first_at=*/first, plans_ + first, scale_);
    MakeGradients(steps_, args_,
                  {.x = static_cast<const float*>(x.data),
                   .x_stride = x.row_stride,
                   .y = static_cast<const float*>(y.data),
                   .y_stride = y.row_stride,
                   .capped = true},
                  rows, x.cols, plans_ + first,
                  {.memory = kept_, .row = first, .column_sums = nullptr});
    return steps_.error();
  }

  // The products, after all rows.
  cudaError_t Finish() {
    PackStates();
    const bool hidden = args_.d_hidden.data != nullptr;
    const int64_t last = (cut_.chunks - 1) * cut_.chunk;
    for (int64_t v = last; v >= 0; v -= cut_.chunk) {
      const MutableTensorView gradients = GradientsOf(v);
      if (hidden) {
        steps_.Multiply({.a = gradients,
                         .b = RowsOf(args_.head.weight, v, gradients.cols),
                         .out = d_states_,
                         .alpha = args_.head.scale,
                         .beta = v == last ? 0.0f : 1.0f});
      }
      steps_.Multiply({.a = gradients,
                       .transpose_a = true,
                       .b = states_,
                       .out = RowsOf(args_.d_weight, v, gradients.cols),
                       .alpha = args_.head.scale,
                       .device_factors = IsHalf() ? scale_->product : nullptr});
    }
    if (hidden) steps_.Store(d_states_, plans_, args_.d_hidden);
    return steps_.error();
  }

 private:
  DType dtype() const { return args_.head.weight.dtype; }
  bool IsHalf() const { return dtype() == DType::kF16; }

  // G of the chunk at token v.
  MutableTensorView GradientsOf(int64_t v) const {
    return {kept_.At<uint16_t>(0, v), dtype(), padded_,
            std::min(cut_.chunk, args_.head.vocab() - v), cut_.chunk};
  }

  // Copies the hidden states of counted rows, in f16 with the factors that product 3 takes out.
  void PackStates() {
    const int size = static_cast<int>(args_.head.hidden());
    Visit16Bit(dtype(), [&]<class T>() {
      steps_.Launch(&PackKernel<T, DivergencePlan>, GridFor(padded_), kThreads,
                    static_cast<const T*>(args_.hidden.data), args_.hidden.row_stride, size, plans_,
                    RowUse::kCounted, static_cast<T*>(states_.data), states_.row_stride);
    });
    if (!IsHalf()) return;
    __half* const states = static_cast<__half*>(states_.data);
    steps_.Launch(&ScaleKernel<DivergencePlan>, GridFor(padded_), kThreads, states,
                  states_.row_stride, size, plans_, args_.head.scale, /*fresh=*/true, states,
                  scale_);
  }

  const LinearDivergenceTrainingArgs& args_;
  const KeptCut cut_;
  const int64_t padded_;  // rows, with skipped ones
  Steps steps_;
  DivergencePlan* const plans_;  // [padded]
  HalfScale* const scale_;
  MutableTensorView states_;    // [padded, hidden], the weight's dtype
  MutableTensorView d_states_;  // [padded, hidden], f32
  KeptMemory kept_;
};

// True where G of a call's rows is kept. A row then has other bits.
bool Keeps(const LinearDivergenceTrainingArgs& args, const LossBlocks& losses, const KeptCut& cut,
           const Scratch& scratch, int64_t room) {
  const LinearRoute route = RouteOf(LinearOp::kTokens, args.head, scratch, /*logits=*/true);
  return route.kernel == LinearKernel::kHopperLogits && args.d_bias == nullptr &&
         HoldsKeptChunks(args.d_weight, args.head.hidden()) && losses.rows() % kGroupRows == 0 &&
         cut.Bytes(args.hidden.rows) <= room;
}

}  // namespace

cudaError_t LinearDivergenceTraining(const LinearDivergenceTrainingArgs& args, Products& products,
                                     const Scratch& scratch, cudaStream_t stream) {
  const HeadGradients gradients = {.hidden = args.hidden,
                                   .head = args.head,
                                   .d_hidden = args.d_hidden,
                                   .d_weight = args.d_weight,
                                   .d_bias = args.d_bias};
  if (args.hidden.rows == 0) return ClearSums(gradients, stream);
  Scratch rest = scratch;
  const LossBlocks losses(args, products, rest, stream);
  const auto room = static_cast<int64_t>(rest.left() - products.workspace_bytes());
  const KeptCut cut(args, room);
  if (Keeps(args, losses, cut, scratch, room)) {
    KeptGradients kept(args, cut, products, rest, stream);
    const cudaError_t error =
        losses.Run(rest, [&](int64_t first, const TensorView& x, const TensorView& y) {
          return kept.Add(first, x, y);
        });
    return error == cudaSuccess ? kept.Finish() : error;
  }
  const cudaError_t error =
      losses.Run(rest, [](int64_t, const TensorView&, const TensorView&) { return cudaSuccess; });
  if (error != cudaSuccess) return error;
  DivergenceChunks loss(args);
  return GradientChunks(gradients, loss, products, scratch, stream).Run();
}

}  // namespace logitd::cuda
