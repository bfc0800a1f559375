// attention_softmax of short 16-bit rows that are not whole vectors. A block brings its rows to
// shared memory as the aligned vectors in which they lie, and lanes take single elements from
// there: at no alignment does a lane need a part of another lane's vector. Results go back the same
// way. attention_softmax.cu has the measurements.
#include <algorithm>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "kernels/cuda/attention/forward.cuh"

namespace logitd::cuda::attention {
namespace {

constexpr int kOfVector = 8;  // elements
constexpr int kWarps = kLanesThreads / 32;

// Blocks per multiprocessor, by the elements that a lane holds: registers limit them. A mask needs
// as many again.
constexpr int ResidentFor(Form form, int held) { return IsMasked(form) ? 8 : held > 24 ? 10 : 12; }

// A block's rows in memory.
template <class T>
struct BlockRows {
  T* data;         // of the first row
  int64_t stride;  // elements
  bool joined;     // rows follow each other without a gap
  int offset;      // of the first row in its aligned vector; 0 where rows are not joined

  __device__ BlockRows(const Matrix& matrix, uint32_t first, int keys)
      : data(matrix.Row<T>(first)),
        stride(matrix.row_bytes / static_cast<int64_t>(sizeof(T))),
        joined(stride == keys),
        offset(joined ? static_cast<int>(reinterpret_cast<uintptr_t>(data) / sizeof(T) % kOfVector)
                      : 0) {}
};

// Calls over(row, key) for every element of the block's rows, neighbours in neighbouring lanes.
template <class Over>
__device__ inline void ForElements(int rows, int keys, Over over) {
  for (int row = WarpInBlock(); row < rows; row += kWarps) {
    for (int key = static_cast<int>(threadIdx.x % 32); key < keys; key += 32) over(row, key);
  }
}

// Loads the mask's addends to a lane's elements; -inf hides a key. `mask`: of the first. has(i):
// there is an i-th one.
template <int kLanes, class M, int kHeld, class Has>
__device__ inline void LoadMask(const M* mask, Has has, float (&added)[kHeld]) {
  M elements[kHeld];
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    if (has(i)) elements[i] = mask[i * kLanes];
  }
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    if constexpr (std::is_same_v<M, uint8_t>) {
      added[i] = elements[i] != 0 ? -kInfinity : 0.0f;
    } else {
      added[i] = ToFloat(elements[i]);
    }
  }
}

// Writes the block's results, which lie in `staged` as they do in their vectors.
template <int kCopies, class T>
__device__ inline void WriteRows(const T* staged, const BlockRows<T>& to, int rows, int keys) {
  if (!to.joined) {
    ForElements(rows, keys,
                [&](int r, int key) { to.data[r * to.stride + key] = staged[r * keys + key]; });
    return;
  }
  T* out = to.data - to.offset;
  const int end = to.offset + rows * keys;
#pragma unroll
  for (int c = 0; c < kCopies; ++c) {
    const int i = static_cast<int>(threadIdx.x) + c * kLanesThreads;
    const int begin = i * kOfVector;
    if (begin >= to.offset && begin + kOfVector <= end) {
      __stcs(reinterpret_cast<uint4*>(out) + i, reinterpret_cast<const uint4*>(staged)[i]);
    } else {
      const int stop = min(begin + kOfVector, end);
      for (int e = max(begin, to.offset); e < stop; ++e) out[e] = staged[e];
    }
  }
}

// kLanes lanes hold a row, and a lane every kLanes-th element of it. Keys: more than those that the
// lanes hold without their last 4 elements.
template <class In, Form kForm, int kLanes, int kHeld>
__global__ void __launch_bounds__(kLanesThreads, ResidentFor(kForm, kHeld))
    StagedKernel(const __grid_constant__ Params p) {
  static_assert(sizeof(In) == 2);
  constexpr int kRows = kLanesThreads / kLanes;
  constexpr int kSure = kHeld - 4;  // every lane has so many
  constexpr int kVectors = kRows * kLanes * kHeld / kOfVector + 1;
  constexpr int kCopies = (kVectors + kLanesThreads - 1) / kLanesThreads;
  __shared__ alignas(16) In staged[kVectors * kOfVector];

  const int thread = static_cast<int>(threadIdx.x);
  const int place = thread % kLanes;
  const int keys = p.rows.keys;
  const uint32_t first = blockIdx.x * kRows;
  const int rows = static_cast<int>(min(p.rows.count - first, uint32_t{kRows}));
  // Rows of a warp are apart, so that their elements are in different banks.
  const int in_block = WarpInBlock() + thread % 32 / kLanes * kWarps;
  const ForwardRow row = ForwardRowAt<kForm>(p, first + in_block);
  const auto has = [&](int i) { return i < kSure || place + i * kLanes < keys; };

  const BlockRows<const In> from(p.scores, first, keys);
  uint4 vectors[kCopies];
  const int used = (from.offset + rows * keys + kOfVector - 1) / kOfVector;
  if (from.joined) {
#pragma unroll
    for (int c = 0; c < kCopies; ++c) {
      const int i = thread + c * kLanesThreads;
      if (i < used) vectors[c] = reinterpret_cast<const uint4*>(from.data - from.offset)[i];
    }
  } else {
    ForElements(rows, keys,
                [&](int r, int key) { staged[r * keys + key] = from.data[r * from.stride + key]; });
  }
  float added[kHeld];
  if constexpr (IsMasked(kForm)) {
    VisitMask(p.mask, [&]<class M>() {
      LoadMask<kLanes>(
          reinterpret_cast<const M*>(row.mask) + place,
          [&](int i) { return row.in_pass && has(i); }, added);
      return 0;
    });
  }
  if (from.joined) {
#pragma unroll
    for (int c = 0; c < kCopies; ++c) {
      const int i = thread + c * kLanesThreads;
      if (i < used) reinterpret_cast<uint4*>(staged)[i] = vectors[c];
    }
  }
  __syncthreads();

  // A row after the last one holds whatever is there, and is not written.
  const In* scores = staged + from.offset + in_block * keys + place;
  float x[kHeld];
  float largest = -kInfinity;
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    x[i] = -kInfinity;
    if (!has(i)) continue;
    x[i] = __fmul_rn(p.scale, ToFloat(scores[i * kLanes]));
    if constexpr (IsMasked(kForm))
      x[i] = added[i] == -kInfinity ? -kInfinity : __fadd_rn(x[i], added[i]);
    largest = fmaxf(largest, x[i]);
  }
  Part all{.max = fmaxf(LanesMax<kLanes>(largest), row.sink)};
  const ExpFrom relative(all.max);
  float sums[4] = {};
  relative.Choose([&](auto exponential) {
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      if (i >= kSure && i * kLanes >= keys) continue;  // of no lane
      x[i] = exponential(x[i]);
      sums[i % 4] += x[i];
    }
  });
  all.sum = LanesSum<kLanes>((sums[0] + sums[1]) + (sums[2] + sums[3]));
  if (__any_sync(kFullWarp, isnan(all.sum))) {
    int key = kNoPosition;
#pragma unroll
    for (int i = kHeld - 1; i >= 0; --i) {
      if (has(i) && isnan(x[i])) key = place + i * kLanes;
    }
    all.nan_key = LanesMin<kLanes>(key);
    if (isnan(all.sum)) {
#pragma unroll
      for (int i = 0; i < kHeld; ++i) {
        const bool hidden = IsMasked(kForm) && added[i] == -kInfinity;
        x[i] = hidden ? 0.0f : std::numeric_limits<float>::quiet_NaN();
      }
    }
  }
  if (p.sinks != nullptr) all.sum += relative(row.sink);
  const float weight = WeightOf(all);
  if (row.in_pass && place == 0) WriteRow(p, row.index, relative, all);

  // Each lane writes where it has read, unless results begin elsewhere in their vector.
  const BlockRows<In> to(p.probs, first, keys);
  if (to.offset != from.offset) __syncthreads();
  In* probs = staged + to.offset + in_block * keys + place;
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    if (has(i)) probs[i * kLanes] = FromFloat<In>(x[i] * weight);
  }
  __syncthreads();
  WriteRows<kCopies>(staged, to, rows, keys);
}

template <class In, Form kForm, int kLanes, int kHeld>
cudaError_t Launch(const Params& p, cudaStream_t stream) {
  return LaunchLanes<kLanes, 1>(&StagedKernel<In, kForm, kLanes, kHeld>, p, stream);
}

struct Variant {
  int64_t max_keys;
  cudaError_t (*launch)(const Params&, cudaStream_t);
};

// Each holds 4 elements a lane more than the one before.
template <class In, Form kForm>
constexpr Variant kVariants[] = {
    {80, &Launch<In, kForm, 4, 20>},  {96, &Launch<In, kForm, 4, 24>},
    {112, &Launch<In, kForm, 4, 28>}, {128, &Launch<In, kForm, 4, 32>},
    {160, &Launch<In, kForm, 8, 20>}, {kMaxStagedKeys, &Launch<In, kForm, 8, 24>},
};

}  // namespace

cudaError_t LaunchStagedRows(const KernelTypes& types, const Params& p, cudaStream_t stream) {
  return VisitTypes(types, [&]<class In, class Out, Form kForm>() {
    if constexpr (kElements<In, Out> == kOfVector && !IsWhole(kForm)) {
      const Variant* variant = kVariants<In, kForm>;
      while (p.rows.keys > variant->max_keys) ++variant;
      return variant->launch(p, stream);
    } else {
      return cudaErrorInvalidValue;
    }
  });
}

}  // namespace logitd::cuda::attention
