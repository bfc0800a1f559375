// attention_softmax of rows of up to 1536 keys that are not staged: 4 to 32 lanes hold a row.
// attention_softmax.cu has the cost, the limits and the measurements.
#include <algorithm>

#include "kernels/cuda/attention/forward.cuh"

namespace logitd::cuda::attention {
namespace {

// Blocks per multiprocessor, by the elements that a lane holds: registers limit them.
constexpr int ResidentFor(int held) { return held > 32 ? 5 : kLanesResident; }

// kLanes lanes hold a row, and each lane a part of kRows rows.
template <class In, class Out, Form kForm, int kLanes, int kCount, int kRows>
__global__ void __launch_bounds__(kLanesThreads, ResidentFor(kCount* kElements<In, Out>))
    LanesKernel(const __grid_constant__ Params p) {
  constexpr int kGroups = 32 / kLanes;
  using Vectors = ForwardVectors<In, Out, kForm, kLanes, kCount, true>;
  const int lane = threadIdx.x % 32;
  const uint32_t warp = blockIdx.x * (kLanesThreads / 32) + WarpInBlock();
  const uint32_t first_row = warp * kGroups * kRows + lane / kLanes;
  const Vectors vectors(0);
  ForwardRow rows[kRows];
  typename Vectors::Raw raw[kRows] = {};
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    rows[r] = ForwardRowAt<kForm>(p, first_row + r * kGroups);
    vectors.Load(p, rows[r], raw[r]);
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r)
    vectors.WriteUnseen(p.rows, rows[r], p.probs.Row<Out>(rows[r].index));
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const ForwardRow& row = rows[r];
    float x[Vectors::kHeld];
    const float max = vectors.Logits(p, row, raw[r], x);
    Part all{.max = fmaxf(LanesMax<kLanes>(max), row.sink)};
    const ExpFrom from = kLanes == 32 ? ExpFrom::OfWarp(all.max) : ExpFrom(all.max);
    all.sum = LanesSum<kLanes>(vectors.Exponentials(from, row, x));
    if (__any_sync(kFullWarp, isnan(all.sum))) {
      all.nan_key = LanesMin<kLanes>(vectors.NanKey(row, x));
      if (isnan(all.sum)) vectors.SetNan(p, row, x);
    }
    if (p.sinks != nullptr) all.sum += from(row.sink);
    vectors.Store(p, row, x, WeightOf(all));
    if (row.in_pass && lane % kLanes == 0) WriteRow(p, first_row + r * kGroups, from, all);
  }
}

// Elements that a lane holds of all its rows.
template <class In, class Out, Form kForm>
constexpr int kLaneHeld = kForm == Form::kWhole&& kElements<In, Out> == 8 ? 32 : 16;

// kHeld: elements of one row that a lane holds.
template <class In, class Out, Form kForm, int kLanes, int kHeld>
cudaError_t Launch(const Params& p, cudaStream_t stream) {
  constexpr int kRows = std::max(1, kLaneHeld<In, Out, kForm> / kHeld);
  return LaunchLanes<kLanes, kRows>(
      &LanesKernel<In, Out, kForm, kLanes, kHeld / kElements<In, Out>, kRows>, p, stream);
}

struct Variant {
  int64_t max_keys;
  cudaError_t (*launch)(const Params&, cudaStream_t);
};

template <class In, class Out, Form kForm>
constexpr Variant kVariants[] = {
    {64, &Launch<In, Out, kForm, 4, 16>},
    {128, &Launch<In, Out, kForm, 4, 32>},
    {256, &Launch<In, Out, kForm, 8, 32>},
    {320, &Launch<In, Out, kForm, 8, 40>},
    {512, &Launch<In, Out, kForm, 16, 32>},
    {640, &Launch<In, Out, kForm, 16, 40>},
    {1024, &Launch<In, Out, kForm, 32, 32>},
    {1280, &Launch<In, Out, kForm, 32, 40>},
    {kMaxNarrowKeys, &Launch<In, Out, kForm, 32, 48>},
};

// Of rows that are not whole vectors: lengths just past those where a warp holds half as many rows.
template <class In, class Out, Form kForm>
constexpr Variant kRaggedVariants[] = {
    {64, &Launch<In, Out, kForm, 4, 16>},
    {96, &Launch<In, Out, kForm, 4, 24>},
    {128, &Launch<In, Out, kForm, 4, 32>},
    {192, &Launch<In, Out, kForm, 8, 24>},
    {256, &Launch<In, Out, kForm, 8, 32>},
    {320, &Launch<In, Out, kForm, 8, 40>},
    {512, &Launch<In, Out, kForm, 16, 32>},
    {640, &Launch<In, Out, kForm, 16, 40>},
    {1024, &Launch<In, Out, kForm, 32, 32>},
    {1280, &Launch<In, Out, kForm, 32, 40>},
    {kMaxNarrowKeys, &Launch<In, Out, kForm, 32, 48>},
};

template <class In, class Out, Form kForm>
const Variant* VariantsFor(int64_t keys) {
  if constexpr (!IsWhole(kForm) && kElements<In, Out> == 8) {
    if (keys % 8 != 0) return kRaggedVariants<In, Out, kForm>;
  }
  return kVariants<In, Out, kForm>;
}

}  // namespace

cudaError_t LaunchNarrowRows(const KernelTypes& types, const Params& p, cudaStream_t stream) {
  return VisitTypes(types, [&]<class In, class Out, Form kForm>() {
    const Variant* variant = VariantsFor<In, Out, kForm>(p.rows.keys);
    while (p.rows.keys > variant->max_keys) ++variant;
    return variant->launch(p, stream);
  });
}

}  // namespace logitd::cuda::attention
