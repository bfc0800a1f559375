// sample, the support: how many tokens a row can be drawn from, and the first of them. Only rows
// that ask for it come here, after the draw.
//
// Cost: where the sorted list does not hold what is asked for, one more read of the row for the
// size and one for the keys; two or three between them where the support is longer than asked for.
// 64 x 131072 f32, floor one read, 7.4 us: 64 tokens of a list 34 us (21%; without a support 23),
// 1024 of a flat top_p 371 (2%; without 87). Measured: bench/results/h200/sample_b5435172.json.
#ifndef LOGITD_KERNELS_CUDA_SAMPLING_SUPPORT_CUH_
#define LOGITD_KERNELS_CUDA_SAMPLING_SUPPORT_CUH_

#include "kernels/cuda/sampling/nucleus.cuh"
#include "kernels/cuda/sampling/sample_row.cuh"
#include "kernels/cuda/sampling/weights.cuh"

namespace logitd::cuda {

static_assert(kMaxSupport <= SmallPool::kPool, "the pool holds what a row may ask for");

// The keys of a row's support.
template <class Row>
struct SupportKeys {
  Row row;
  Support support;

  template <class Visit>
  __device__ void EachKey(Visit visit) const {
    row.EachKey([&](Key key, float x) {
      if (support.Has(x, KeyIndex(key))) visit(key, x);
    });
  }
};

// Writes the size of the support, and its first tokens, of a row after edits whose first `listed`
// tokens are in s.sorted. It stays, except in a greedy row. Called by all threads.
template <int kThreads, class Row>
__device__ __noinline__ void ReportSupport(const SampleArgs& args, int64_t r, const SampleRow& ask,
                                           Row row, Support support, int listed) {
  DrawShared& s = Finish().draw;
  auto& pool = Finish().pool;
  const int thread = static_cast<int>(threadIdx.x);
  const SupportKeys<Row> keys{row, support};
  const auto is_in = [&](Key key) { return support.Has(KeyLogit(key), KeyIndex(key)); };
  const auto write = [&](int place, Key key) {
    const int64_t to = ask.first_support_entry + place;
    args.support_ids[to] = KeyIndex(key);
    args.support_logprobs[to] = support.Logprob(KeyLogit(key), KeyIndex(key));
  };
  __syncthreads();
  if (IsGreedy(ask)) {
    listed = 1;
    if (thread == 0) s.sorted[0] = support.last;
    __syncthreads();
  }
  uint32_t own = 0;
  for (int i = thread; i < listed; i += kThreads) own += is_in(s.sorted[i]);
  const int held = static_cast<int>(BlockSum(own, s));
  int size = held;
  if (listed < row.vocab && (listed == 0 || s.sorted[listed - 1] > support.last)) {
    own = 0;
    keys.EachKey([&](Key, float) { ++own; });
    size = static_cast<int>(BlockSum(own, s));
  }
  const int count = min(size, ask.want_support);
  if (thread == 0) args.support_size[r] = size;
  for (int i = count + thread; i < ask.want_support; i += kThreads) {
    args.support_ids[ask.first_support_entry + i] = -1;
    args.support_logprobs[ask.first_support_entry + i] = -kInfinity;
  }
  if (count <= held) {
    for (int i = thread; i < listed; i += kThreads) {
      if (!is_in(s.sorted[i])) continue;
      int place = 0;
      for (int j = 0; j < i; ++j) place += is_in(s.sorted[j]);
      if (place < count) write(place, s.sorted[i]);
    }
    return;
  }
  Key floor = support.last;
  if (count < size) {
    floor =
        LastOfPrefix<kThreads>(keys, floor, MakeKey(support.max, 0), static_cast<uint64_t>(count),
                               Measure{Weigher(support.max, ask), /*counts=*/true});
  }
  __syncthreads();
  if (thread == 0) pool.count = 0;
  __syncthreads();
  keys.EachKey([&](Key key, float) {
    if (key >= floor) pool.pool[atomicAdd(&pool.count, 1)] = key;
  });
  __syncthreads();
  SortKeys<kThreads>(pool.pool, count, s.spare, count, s.sorted_pool);
  for (int i = thread; i < count; i += kThreads) write(i, s.sorted_pool[i]);
}

}  // namespace logitd::cuda

#endif  // LOGITD_KERNELS_CUDA_SAMPLING_SUPPORT_CUH_
