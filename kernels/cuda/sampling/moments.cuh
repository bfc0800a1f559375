// sample, moments: sums over a row at a temperature that its cells' statistics are not at, for
// log-probabilities and entropies that only few rows ask for. A further read of the row, by the
// block that draws.
//
// Cost: one read of the row for each sum; entropies are two, of the row as sent and of what it is
// drawn from. 131072 f32 with both: 64 rows 122 us (floor 7.4), 512 unfiltered 509 (floor 59, 12%;
// without them 71). Measured: bench/results/h200/sample_b5435172.json.
#ifndef LOGITD_KERNELS_CUDA_SAMPLING_MOMENTS_CUH_
#define LOGITD_KERNELS_CUDA_SAMPLING_MOMENTS_CUH_

#include "kernels/cuda/sampling/sample_row.cuh"
#include "kernels/cuda/sampling/weights.cuh"

namespace logitd::cuda {

// The sums over the tokens of the row that are in the support, whose maximum is finite. They are in
// one order, by cells, whatever the element type and the number of threads. Called by all threads;
// uses the memory of bins.
template <class Row>
__device__ __noinline__ Moments MomentsOf(Row row, Support support) {
  constexpr int kMostCells = static_cast<int>(kMaxVocab) / kCell;
  static_assert(kMostCells * sizeof(Moments) <= sizeof(DrawShared::mass_bins));
  auto* const of_cells = reinterpret_cast<Moments*>(Finish().draw.mass_bins);  // [cells]
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int vocab = row.vocab;
  const int cells = CellsOf(vocab);
  const double inverse = 1.0 / support.temperature;
  constexpr int kAtOnce = 16;  // loads of a lane
  const auto fold = [](Moments sums) -> Moments {
#pragma unroll
    for (int half = 16; half > 0; half /= 2) {
      sums.sum += __shfl_xor_sync(kFullWarp, sums.sum, half);
      sums.below += __shfl_xor_sync(kFullWarp, sums.below, half);
    }
    return sums;
  };
  __syncthreads();
#pragma unroll 1
  for (int c = static_cast<int>(threadIdx.x) / 32; c < cells; c += blockDim.x / 32) {
    Moments sums{0, 0};
#pragma unroll 1
    for (int first = c * kCell + lane; first < (c + 1) * kCell; first += 32 * kAtOnce) {
      float x[kAtOnce];
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k)
        x[k] = first + 32 * k < vocab ? row[first + 32 * k] : -kInfinity;
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        if (!support.Has(x[k], first + 32 * k)) continue;
        const double below = (static_cast<double>(support.max) - x[k]) * inverse;
        const double weight = expf(-static_cast<float>(below));
        sums.sum += weight;
        if (weight > 0) sums.below += weight * below;
      }
    }
    sums = fold(sums);
    if (lane == 0) of_cells[c] = sums;
  }
  __syncthreads();
  Moments sums{0, 0};
  for (int c = lane; c < cells; c += 32) {
    sums.sum += of_cells[c].sum;
    sums.below += of_cells[c].below;
  }
  sums = fold(sums);
  __syncthreads();  // before the memory is used for something else
  return sums;
}

// The distribution of the row as sent that log-probabilities are of. `is_summed`: s.reach has the
// sum of its exponentials at its temperature. Called by all threads.
template <class Row>
__device__ __forceinline__ Support SentSupport(const SampleRow& ask, const Row& row, Stats raw,
                                               bool is_summed) {
  Support support = RawSupport(raw);
  if (IsTempered(ask) && raw.max < kInfinity) {
    support.temperature = ActingTemperature(ask);
    support.log_sum = log(is_summed ? Finish().draw.reach : MomentsOf(row, support).sum);
  }
  return support;
}

// The entropy of the support, which is of the row. Called by all threads.
template <class Row>
__device__ __noinline__ float EntropyOf(Row row, Support support) {
  if (support.max == kInfinity) return static_cast<float>(support.log_sum);
  return static_cast<float>(logitd::EntropyOf(MomentsOf(row, support)));
}

// Writes the entropies of a row that wants them: of the row as sent, and of what it is drawn from.
// Called by all threads.
template <class Row>
__device__ __noinline__ void WriteEntropies(const SampleArgs& args, int64_t r, const SampleRow& ask,
                                            Row sent, Stats raw, Row row, Support drawn_from) {
  const float of_sent = EntropyOf(sent, RawSupport(raw));
  const float of_drawn = IsGreedy(ask) ? 0.0f : EntropyOf(row, drawn_from);
  if (threadIdx.x != 0) return;
  args.raw_entropies[r] = of_sent;
  args.entropies[r] = of_drawn;
}

}  // namespace logitd::cuda

#endif  // LOGITD_KERNELS_CUDA_SAMPLING_MOMENTS_CUH_
