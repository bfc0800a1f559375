// From the rows' sums to their gradients in linear_cross_entropy_training: answers, the factors
// from exponentials to gradients, and what becomes of rows for which no factor is enough.
//
// Cost: reads and writes the hidden states, and at the end d_hidden in fp32; and the exponentials
// of rows and tiles that have no factor of their row: in f16 all. Limited by: HBM. Measured as a
// part of training.cu.
#include <limits>

#include "kernels/cuda/dispatch.cuh"
#include "kernels/cuda/linear/training.cuh"
#include "kernels/cuda/linear/training_steps.h"
#include "kernels/cuda/loss/loss_row.cuh"

namespace logitd::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
static_assert(kTrainingRows % kWarps == 0);
constexpr int kTile = kTrainingTile;
constexpr int kLaneTokens = kTile / 32;
static_assert(kLaneTokens * 2 == 16);

// The factor that turns E of a tile into probabilities. It comes from the row's sums and not from
// its logsumexp, which is rounded: where that is large, p would be off by orders of magnitude.
__device__ inline float ProbabilityOfUnit(const Outcome& outcome) {  // where E is not relative
  return static_cast<float>(exp(outcome.AboveMax(0.0) - outcome.log_sum));
}
template <class T>
__device__ inline float ProbabilityOfMax(const Outcome& outcome, float log2e_over_temperature,
                                         float max) {
  if (max == -kInfinity) return 0.0f;  // all are 0
  if (IsModerateTile<T>(max, log2e_over_temperature)) return ProbabilityOfUnit(outcome);
  const Exponential exponential(max, log2e_over_temperature);
  const float p = static_cast<float>(exp(outcome.AboveMax(max) - outcome.log_sum));
  return exponential.plain
             ? p * Exp2(-fmaf(max, exponential.log2e_over_temperature, exponential.shift))
             : p;
}

// Infinities become finite, so that 0 times them is 0. NaN stays.
__device__ inline float Finite(float x) {
  constexpr float kMost = std::numeric_limits<float>::max();
  return fabsf(x) > kMost ? copysignf(kMost, x) : x;
}

// The factor of a row's G, if one is enough for all its tiles, and moderate, so that it can be a
// factor of the hidden state in bf16 (elements of 2^-66 to 2^97 keep their digits); else 0.
template <class T>
__device__ inline float FactorOfRow(const Outcome& outcome, const Gradient& gradient,
                                    float log2e_over_temperature) {
  constexpr float kLeast = 0x1p-60f;
  constexpr float kMost = 0x1p30f;
  if (!IsModerateTile<T>(outcome.max, log2e_over_temperature) || gradient.flat != 0.0f ||
      gradient.more != 1.0f) {
    return 0.0f;
  }
  const float factor = ProbabilityOfUnit(outcome) * gradient.weight * gradient.scale;
  return fabsf(factor) >= kLeast && fabsf(factor) <= kMost ? factor : 0.0f;  // NaN: 0
}

// Writes the rows' answers and makes their factors, a row by each warp. The maxima of rows that
// have no factor for all tiles become those of their tiles.
template <class T>
__global__ void __launch_bounds__(kThreads)
    ConcludeKernel(const __grid_constant__ CrossEntropyArgs args, const float* upstream,
                   const float* target_logits, RowState* rows, float* maxima, int tiles,
                   HalfScale* scale) {
  const int lane = threadIdx.x % 32;
  const int64_t r = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  RowState& row = rows[r];
  if (row.use == RowUse::kSkipped) return;
  const float target_logit = row.use == RowUse::kIgnored ? 0.0f : target_logits[r];
  const Outcome outcome =
      Conclude(args, row.at, {row.stats, 0.0f, row.total, 0}, target_logit, row.first_nan, lane);
  if (row.use != RowUse::kCounted) return;
  Gradient gradient = Gradient::Of(args.rows[row.at], static_cast<float>(outcome.LogSumExp()),
                                   upstream[row.at], args.logits.cols);
  const float factor = FactorOfRow<T>(outcome, gradient, row.log2e_over_temperature);
  float unit = 1.0f;  // E of the largest of a tile
  int exponent = kGradientExponent;
  if constexpr (!kHasRange<T>) {
    exponent = TakeExponent(gradient, scale);  // with that of `more`, which becomes 1
    gradient.scale *= ldexpf(gradient.more, kGradientExponent - exponent);
    gradient.more = 1.0f;
    unit = kHalfUnit;
  }
  for (int i = lane; i < tiles && factor == 0.0f; i += 32) {
    float& at = maxima[r * tiles + i];
    at = Finite(ProbabilityOfMax<T>(outcome, row.log2e_over_temperature, at) * gradient.weight *
                gradient.scale / unit);
  }
  if (lane != 0) return;
  const float p = static_cast<float>(exp(outcome.Logprob(target_logit)));
  row.factor = factor;
  row.flat = gradient.flat * gradient.scale;
  row.more = gradient.more;
  row.hit = (fmaf(p, gradient.weight, -gradient.flat) - gradient.hit) * gradient.scale * row.more;
  row.exponent = exponent;
}

// Brings the rows' factors into their packed hidden states, a block a row. Those of ignored rows
// become zeros. Also makes the target's E what its G is, over the factor. In f16 the factor is a
// power of two, from the row's exponent to the largest, which product 3 takes out.
template <class T>
__global__ void __launch_bounds__(kThreads)
    ScaleStatesKernel(const RowState* rows, T* states, int64_t stride, Chunk all,
                      float product_factor, HalfScale* scale) {
  const int64_t r = blockIdx.x;
  const RowState& row = rows[r];
  if (!kHasRange<T> && r == 0 && threadIdx.x == 0) scale->SetProduct(product_factor, 0.0f);
  if (row.use == RowUse::kSkipped) return;
  float factor = 0.0f;
  if (row.use == RowUse::kCounted) {
    factor = kHasRange<T> ? row.IsPlain() ? row.factor : 1.0f : scale->StateFactor(row.exponent);
    if (factor == 1.0f && !row.IsPlain()) return;
    if (row.IsPlain() && threadIdx.x == 0 && row.target >= 0)
      *all.e.At<T>(r, row.target) = FromFloat<T>(row.hit / factor);
  }
  uint4* vectors = reinterpret_cast<uint4*>(states + r * stride);
  for (int64_t i = threadIdx.x; i < stride / kLaneTokens; i += kThreads) {
    uint4 out = {};
    if (row.use == RowUse::kCounted) {
      const uint4 vector = vectors[i];
      const uint32_t words[4] = {vector.x, vector.y, vector.z, vector.w};
      uint32_t scaled[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        scaled[j] = PackPair<T>(WordElement<T>(words, 2 * j) * factor,
                                WordElement<T>(words, 2 * j + 1) * factor);
      }
      out = {scaled[0], scaled[1], scaled[2], scaled[3]};
    }
    vectors[i] = out;
  }
}

// Makes G of the E of a tile, in place, by one warp. A row that is not counted becomes zeros,
// whatever its memory holds.
template <class T>
__device__ inline void MakeGradient(const RowState& row, int64_t r, int tile, const Chunk& all,
                                    int lane) {
  const int64_t begin = int64_t{tile} * kTile + lane * kLaneTokens;
  uint4* at = reinterpret_cast<uint4*>(all.e.At<T>(r, begin));
  uint4 out = {};
  if (row.use == RowUse::kCounted) {
    const float max = all.maxima[r * all.maxima_stride + tile];
    const bool plain = row.IsPlain();  // then only E becomes what it is in other tiles
    const float factor = plain ? Exp2(__fmul_rn(max, row.log2e_over_temperature)) : max;
    const float flat = plain ? 0.0f : row.flat;
    const float more = plain ? 1.0f : row.more;
    const uint4 vector = *at;
    const uint32_t words[4] = {vector.x, vector.y, vector.z, vector.w};
    const int64_t place = plain ? -1 : row.target - begin;
    float g[kLaneTokens];
#pragma unroll
    for (int j = 0; j < kLaneTokens; ++j) {
      g[j] = __fmul_rn(fmaf(WordElement<T>(words, j), factor, -flat), more);
      if (place == j) g[j] = row.hit;
    }
    out = {PackPair<T>(g[0], g[1]), PackPair<T>(g[2], g[3]), PackPair<T>(g[4], g[5]),
           PackPair<T>(g[6], g[7])};
  }
  *at = out;
}

// Makes G of the E that have no factor for all tiles of their row, a warp for up to 32 tiles of a
// row. Comes before ScaleStatesKernel, which writes the targets of the others.
template <class T>
__global__ void __launch_bounds__(kThreads) GradientKernel(const RowState* rows, Chunk all) {
  const int lane = threadIdx.x % 32;
  const int first =
      (static_cast<int>(blockIdx.y) * kWarps + static_cast<int>(threadIdx.x) / 32) * 32;
  const int64_t r = blockIdx.x;
  const RowState& row = rows[r];
  const int tile = first + lane;
  bool wanted = tile < all.Tiles();
  if (wanted && row.use == RowUse::kCounted && row.IsPlain()) {
    const float max = all.maxima[r * all.maxima_stride + tile];
    wanted = max != -kInfinity && !IsModerateTile<T>(max, row.log2e_over_temperature);
  }
  for (unsigned left = __ballot_sync(kFullWarp, wanted); left != 0; left &= left - 1)
    MakeGradient<T>(row, r, first + __ffs(left) - 1, all, lane);
}

// Block r writes what row r gets where it is ignored.
template <class T>
__global__ void __launch_bounds__(kThreads)
    IgnoredKernel(const CrossEntropyRow* params, const __grid_constant__ CrossEntropyAnswers to,
                  int size, T* d_hidden, int64_t stride) {
  const int64_t r = blockIdx.x;
  if (params[r].active == 0 || params[r].target >= 0) return;
  for (int i = threadIdx.x; i < size; i += kThreads) d_hidden[r * stride + i] = FromFloat<T>(0.0f);
  if (threadIdx.x != 0) return;
  AnswerLeftOut(to, r);
}

}  // namespace

void ConcludeRows(Steps& steps, DType dtype, const CrossEntropyArgs& args, const float* upstream,
                  RowState* rows, int64_t count, const Chunk& all, HalfScale* scale) {
  Visit16Bit(dtype, [&]<class T>() {
    steps.Launch(&ConcludeKernel<T>, GridFor(count, kWarps), kThreads, args, upstream,
                 all.target_logits, rows, all.maxima, all.Tiles(), scale);
  });
}

void ScaleRows(Steps& steps, const RowState* rows, const MutableTensorView& states,
               const Chunk& all, float product_factor, HalfScale* scale) {
  const dim3 grid(static_cast<unsigned>(states.rows), GridFor(all.Tiles(), 32 * kWarps).x);
  Visit16Bit(states.dtype, [&]<class T>() {
    steps.Launch(&GradientKernel<T>, grid, kThreads, rows, all);
    steps.Launch(&ScaleStatesKernel<T>, GridFor(states.rows), kThreads, rows,
                 static_cast<T*>(states.data), states.row_stride, all, product_factor, scale);
  });
}

void WriteIgnored(Steps& steps, const CrossEntropyRow* params, int64_t rows,
                  const CrossEntropyAnswers& answers, const MutableTensorView& d_hidden) {
  const int size = d_hidden.data == nullptr ? 0 : static_cast<int>(d_hidden.cols);
  VisitDType(d_hidden.dtype, [&]<class T>() {
    steps.Launch(&IgnoredKernel<T>, GridFor(rows), kThreads, params, answers, size,
                 static_cast<T*>(d_hidden.data), d_hidden.row_stride);
  });
}

}  // namespace logitd::cuda
