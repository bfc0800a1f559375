// sample, the filters: the tokens that they leave of a row, where the listed tokens do not hold all
// of them.
//
// Nothing is sorted beyond a pool, and no filter has a cap: LastOfPrefix narrows a range of keys by
// histograms of a count or a mass. Fast ways: FilterFirst lists the keys from about the k-th up,
// and filters among them; FindNucleus looks twice at a row with a flat top_p, for a histogram of
// counts, which tells the mass approximately, then for exact sums of what is above its last bin.
//
// Measured (bench/results/h100/sample_equal_logits.json), 512 rows x 131072 f32 of equal logits,
// top_p 0.9: 2.1 ms by LastOfPrefix, limited by atomics that meet in one bin. top_k 5000, top_p 0.9
// of 512 rows (bench/results/h200/sample_filters.json): 280 us, 845 by LastOfPrefix and
// FindNucleus.
#ifndef LOGITD_KERNELS_CUDA_SAMPLING_NUCLEUS_CUH_
#define LOGITD_KERNELS_CUDA_SAMPLING_NUCLEUS_CUH_

#include "kernels/cuda/sampling/sample_row.cuh"
#include "kernels/cuda/sampling/weights.cuh"

namespace logitd::cuda {

// What a prefix of keys adds up: weights, or 1 for each key.
struct Measure {
  Weigher weigh;
  bool counts;

  __device__ uint64_t operator()(float x) const { return counts ? 1 : weigh(x); }
  __device__ uint64_t OfKey(Key key) const { return (*this)(KeyLogit(key)); }
};

// Sorts the keys of the pool into s.sorted_pool. Leaves the first of them at which the sum of
// measure.OfKey(key), from `before` on, reaches `need` in s.key, kLowestKey where it does not; the
// sum in s.mass, the number of keys up to it in s.count. Called by all threads; ends with a barrier
// passed.
template <int kThreads, class KeyMeasure>
__device__ __noinline__ void EndInPool(uint64_t before, uint64_t need, KeyMeasure measure) {
  DrawShared& s = Finish().draw;
  auto& pool = Finish().pool;
  const int n = pool.count;
  SortKeys<kThreads>(pool.pool, n, s.spare, n, s.sorted_pool);
  if (threadIdx.x < 32) {
    const PrefixEnd end = FindPrefixEnd(
        0, n, before, need, [&](int i) -> uint64_t { return measure.OfKey(s.sorted_pool[i]); });
    if (threadIdx.x == 0) {
      s.key = end.index < 0 ? kLowestKey : s.sorted_pool[end.index];
      s.mass = end.through;
      s.count = end.index + 1;
    }
  }
  __syncthreads();
}

// ---- by histograms of keys ---------------------------------------------------------------------

// Adds to a sum in shared memory that other threads add to as well: its halves one after the other.
// The device has no such instruction, and a loop of compare-and-swap is slow where sums meet. An
// atomic by a generic address takes longer, and the compiler does not know where a pointer points.
__device__ __forceinline__ void AddShared(uint64_t* sum, uint64_t value) {
  const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(sum));
  const uint32_t low = static_cast<uint32_t>(value);
  uint32_t before;
  asm volatile("atom.shared.add.u32 %0, [%1], %2;"
               : "=r"(before)
               : "r"(address), "r"(low)
               : "memory");
  const uint32_t high = static_cast<uint32_t>(value >> 32) + (before + low < low);
  if (high != 0)
    asm volatile("red.shared.add.u32 [%0 + 4], %1;" ::"r"(address), "r"(high) : "memory");
}

// A lane's neighbouring keys of one bin, added to it together: rows of equal logits have long runs.
struct BinRun {
  int bin = -1;
  uint32_t count = 0;
  uint64_t mass = 0;

  __device__ void Add(int key_bin, uint64_t key_mass, DrawShared& s) {
    if (key_bin != bin) {
      Flush(s);
      bin = key_bin;
      count = 0;
      mass = 0;
    }
    ++count;
    mass += key_mass;
  }
  __device__ void Flush(DrawShared& s) const {
    if (count == 0) return;
    if (mass != 0) AddShared(&s.bin_mass[bin], mass);
    atomicAdd(&s.bin_count[bin], count);
  }
};

// From the top bin down: leaves the bin in which the mass reaches `need` in s.found and the mass
// above it in s.mass. By one warp.
__device__ __forceinline__ void FindMassBin(uint64_t need, DrawShared& s) {
  constexpr int kPerLane = kDrawBins / 32;
  const int lane = threadIdx.x;
  const int top = kDrawBins - 1 - lane * kPerLane;
  uint64_t sum = 0;
  for (int b = 0; b < kPerLane; ++b) sum += s.bin_mass[top - b];
  uint64_t before = WarpPrefix(sum, lane) - sum;
  if (before >= need || before + sum < need) return;
  int b = 0;
  for (; before + s.bin_mass[top - b] < need; ++b) before += s.bin_mass[top - b];
  s.found = top - b;
  s.mass = before;
}

// The key that ends the shortest prefix, by descending key, of keys in [low, high] in which
// measure(x) adds up to `need` or more; kLowestKey where all of them have less. `keys` is a row, or
// a list of its keys. Called by all threads.
template <int kThreads, class Keys, class KeyMeasure>
__device__ __noinline__ Key LastOfPrefix(Keys keys, Key low, Key high, uint64_t need,
                                         KeyMeasure measure) {
  DrawShared& s = Finish().draw;
  auto& pool = Finish().pool;
  const int thread = threadIdx.x;
  while (true) {
    const int shift = BitsToShift(high - low, 10);
    for (int b = thread; b < kDrawBins; b += kThreads) {
      s.bin_mass[b] = 0;
      s.bin_count[b] = 0;
    }
    if (thread == 0) s.found = -1;
    __syncthreads();
    BinRun run;
    keys.EachKey([&](Key key, float x) {
      if (key >= low && key <= high) run.Add(static_cast<int>((key - low) >> shift), measure(x), s);
    });
    run.Flush(s);
    __syncthreads();
    if (thread < 32) FindMassBin(need, s);
    __syncthreads();
    const int bin = s.found;
    if (bin < 0) return kLowestKey;
    need -= s.mass;
    low += static_cast<Key>(bin) << shift;
    high = low + min(high - low, (Key{1} << shift) - 1);
    const uint32_t members = s.bin_count[bin];
    if (shift == 0) return low;
    __syncthreads();
    if (members > SmallPool::kPool) continue;
    // Few enough to sort.
    if (thread == 0) pool.count = 0;
    __syncthreads();
    keys.EachKey([&](Key key, float) {
      if (key >= low && key <= high) pool.pool[atomicAdd(&pool.count, 1)] = key;
    });
    __syncthreads();
    EndInPool<kThreads>(0, need, measure);
    return s.key;
  }
}

// ---- among the first keys ----------------------------------------------------------------------

// Keys in scratch.
struct KeyList {
  const Key* keys;
  int count;

  // Calls visit(key, logit) for the thread's share.
  template <class Visit>
  __device__ void EachKey(Visit visit) const {
    constexpr int kAtOnce = 8;
    const int threads = static_cast<int>(blockDim.x);
#pragma unroll 1
    for (int round = threadIdx.x; round < count; round += kAtOnce * threads) {
      Key own[kAtOnce];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const int i = round + j * threads;
        own[j] = i < count ? __ldcg(&keys[i]) : kLowestKey;
      }
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) visit(own[j], KeyLogit(own[j]));
    }
  }
};

// Filters by top_k and top_p among the keys from about the k-th up: a sample of the row tells from
// which logit on, and one read lists them. Leaves the last key kept in s.key, the weight of all of
// them in s.mass, and by cells in cell_sums. False: there is no room, or the sample told too few or
// too many; then nothing is left. Called by all threads.
template <int kThreads, class Row>
__device__ __noinline__ bool FilterFirst(Row row, const SampleRow& ask, Key floor, Weigher weigh,
                                         Key* list, int list_keys, uint64_t* cell_sums) {
  AreInShared(cell_sums);
  DrawShared& s = Finish().draw;
  const int thread = threadIdx.x;
  const int lane = thread % 32;
  if (list == nullptr || ask.top_k > kMostFirst || weigh.max == kInfinity) return false;
  const auto k = static_cast<uint64_t>(ask.top_k);
  const float floor_logit = KeyLogit(floor);
  // Weights below the floor are 0, or nearly.
  const float bins_a_logit =
      fminf(kDrawBins / static_cast<float>(-kLogLeastWeight) * weigh.inv_temperature, 1e38f);
  __syncthreads();
  for (int b = thread; b < kDrawBins; b += kThreads) s.bin_count[b] = 0;
  for (int c = thread; c < CellsOf(row.vocab); c += kThreads) cell_sums[c] = 0;
  if (thread == 0) s.first_count = 0;
  __syncthreads();
  row.EachSampled([&](float x) {
    const float bin = fminf((weigh.max - x) * bins_a_logit, kDrawBins - 1);
    if (x >= floor_logit) atomicAdd(&s.bin_count[static_cast<int>(bin)], 1u);
  });
  __syncthreads();
  if (thread < 32) {
    const float expected = static_cast<float>(ask.top_k) / Row::kSampleStep;
    const auto enough = static_cast<uint64_t>(expected + 5 * sqrtf(expected) + 8);
    const int bin = FindPrefixEnd(0, kDrawBins, 0, enough, [&](int b) -> uint64_t {
                      return s.bin_count[b];
                    }).index;
    const float least = weigh.max - static_cast<float>(bin + 1) / bins_a_logit;
    if (thread == 0) s.first_logit = bin < 0 ? floor_logit : fmaxf(least, floor_logit);
  }
  __syncthreads();
  const float least = s.first_logit;
  row.EachCell([&]<class Element>(const LaneCell<Element>& x, int first) {
    int count = 0;
#pragma unroll
    for (int e = 0; e < kLaneElements; ++e) count += x[e] >= least;
    if (!__any_sync(kFullWarp, count != 0)) return;
    const int at = WarpReserve(&s.first_count, count, lane);
    if (at + count > list_keys) return;
    Key* to = list + at;
#pragma unroll
    for (int e = 0; e < kLaneElements; ++e) {
      if (x[e] >= least) *to++ = MakeKey(x[e], first + CellIndex<Element>(lane, e));
    }
  });
  __syncthreads();
  const KeyList first{list, s.first_count};
  if (first.count > list_keys || (first.count < k && least > floor_logit)) return false;
  const Key high = MakeKey(weigh.max, 0);
  Key last = LastOfPrefix<kThreads>(first, max(floor, MakeKey(least, -1)), high, k,
                                    Measure{weigh, /*counts=*/true});
  last = max(last, floor);  // there may be fewer than k
  const auto weight_of = [&](Key key, float x) { return key >= last ? weigh(x) : 0; };
  if (ask.top_p < 1) {
    uint64_t whole = 0;
    first.EachKey([&](Key key, float x) { whole += weight_of(key, x); });
    const uint64_t need = MassNeeded(ask.top_p, BlockSum(whole, s));
    last = max(last, LastOfPrefix<kThreads>(first, last, high, need, Measure{weigh, false}));
  }
  uint64_t total = 0;
  first.EachKey([&](Key key, float x) {
    const uint64_t weight = weight_of(key, x);
    total += weight;
    if (weight != 0) AddShared(&cell_sums[KeyIndex(key) / kCell], weight);
  });
  total = BlockSum(total, s);
  if (thread == 0) {
    s.key = last;
    s.mass = total;
  }
  __syncthreads();
  return true;
}

// ---- by approximate mass -----------------------------------------------------------------------

// Bins of logits by their distance from the row's largest.
struct MassBins {
  float peak;
  float bins_a_logit;
  float log2_a_bin;  // by which a bin's weights are below those of the bin before

  // All logits beyond the last bin weigh less, together, than the prefix may leave out.
  __device__ MassBins(const Weigher& weigh, int vocab, uint64_t left_out) : peak(weigh.max) {
    const float spare = static_cast<float>(static_cast<double>(left_out) / kWeightOne);
    const float depth = logf(2.0f * static_cast<float>(vocab) / spare);
    bins_a_logit = fminf(kMassBins / depth * weigh.inv_temperature, 1e38f);  // 0 times it is 0
    log2_a_bin = kLog2E * weigh.inv_temperature / bins_a_logit;
  }
  // Rounded by adding a float whose last place is one. Larger floats have larger bits. From
  // kMassBins on: beyond the last bin.
  __device__ uint32_t operator()(float x) const {
    constexpr uint32_t kBitsOfRound = 0x4b000000;
    return __float_as_uint(__fmaf_rn(peak - x, bins_a_logit, 0x1p23f)) - kBitsOfRound;
  }
  // Every logit in a bin before `bin` is at least this, up to roundings.
  __device__ float Border(int bin) const {
    return peak - (static_cast<float>(bin) - 0.5f) / bins_a_logit;
  }
  // A weight in the middle of the bin, in units of 2^-kMassBits.
  static constexpr int kMassBits = 31;
  __device__ uint32_t Middle(int bin) const {
    return __float2uint_rz(Exp2(-static_cast<float>(bin) * log2_a_bin) * 0x1p31f);
  }
};

// Leaves the first bin in which the last key of the prefix can be in s.found, the last one in
// s.cell. No weight is more than half a bin from its bin's middle. But where many keys would be
// between, the bins are some of those near the likely one. By one warp.
__device__ __forceinline__ void FindMassBins(const NucleusAsk& ask, const MassBins& bin_of,
                                             uint64_t need, DrawShared& s) {
  const int lane = threadIdx.x;
  constexpr int kPerLane = kMassBins / 32;
  const auto mass = [&](int b) { return uint64_t{s.mass_bins[b]} * bin_of.Middle(b); };
  uint64_t own = 0;  // of the lane's bins; lanes begin at different banks
#pragma unroll 8
  for (int b = 0; b < kPerLane; ++b) own += mass(lane * kPerLane + (b + lane) % kPerLane);
  const uint64_t through = WarpPrefix(own, lane);
  const auto find = [&](uint64_t share) {
    const unsigned reached = __ballot_sync(kFullWarp, through >= share);
    if (reached == 0) return kMassBins - 1;
    const int part = __ffs(reached) - 1;
    const uint64_t before = __shfl_sync(kFullWarp, through - own, part);
    return FindPrefixEnd(part * kPerLane, (part + 1) * kPerLane, before, share, mass).index;
  };
  // No key below the floor counts, but some are in its bin, and all in later ones.
  const int floor_bin = static_cast<int>(min(bin_of(KeyLogit(ask.floor)), kMassBins - 1u));
  const uint64_t middle = need >> (kWeightBits - MassBins::kMassBits);
  uint64_t slack =
      static_cast<uint64_t>(static_cast<float>(middle) * 0.35f * bin_of.log2_a_bin) + kMaxVocab;
  int first, last;
#pragma unroll 1
  for (int round = 0; round < 8; ++round) {
    first = find(middle - min(middle, slack));
    last = min(find(middle + slack), floor_bin);
    uint32_t between = 0;
    for (int b = first + lane; b <= last; b += 32) between += s.mass_bins[b];
    if (__reduce_add_sync(kFullWarp, between) <= SmallPool::kPool / 4) break;
    slack /= 2;
  }
  if (lane == 0) {
    s.found = first;
    s.cell = last;
  }
}

// The second look, at the block's part: leaves the exact sums of what is above bin `first`, by
// cells, in cell_sums, and the places of what is in bins [first, last] in the pool, which may
// overflow. Both are those of the cluster's first block. Returns the thread's share of the sum.
template <class Row>
__device__ __forceinline__ uint64_t SumAbove(const Row& row, const Part& part, Key floor,
                                             const Weigher& weigh, const MassBins& bin_of,
                                             int first, int last, SmallPool::Shared& pool,
                                             uint64_t* cell_sums) {
  const int lane = threadIdx.x % 32;
  // A tie with the floor is looked at again, wherever it is.
  const float upper = fmaxf(bin_of.Border(first), KeyLogit(floor));
  const float lower = fmaxf(bin_of.Border(last + 1), KeyLogit(floor));
  uint64_t above = 0;
  row.EachCellOf(part.begin, part.end, [&]<class Element>(const LaneCell<Element>& x, int begin) {
    WeightSum weights;
    uint32_t between = 0;
#pragma unroll
    for (int e = 0; e < kLaneElements; ++e) {
      const bool is_above = x[e] > upper;
      weights.Add(weigh.BeforeRounding(is_above ? x[e] : -kInfinity));  // without a branch
      if (x[e] >= lower && !is_above) between |= 1u << e;
    }
#pragma unroll 1
    for (; between != 0; between &= between - 1) {
      const int at = atomicAdd(&pool.count, 1);
      if (at < SmallPool::kPool)
        pool.pool[at] = begin + CellIndex<Element>(lane, __ffs(between) - 1);
    }
    const uint64_t sum = WarpSum(weights.total());
    if (lane == 0) {
      cell_sums[begin / kCell] = sum;
      above += sum;
    }
  });
  return above;
}

// The shortest prefix of keys that reaches a mass, its tokens' sums left by cells.
struct Nucleus {
  Key last;  // of the prefix; kLowestKey: not found
  uint64_t total;
};

// The first look: counts the keys of the block's part by bins, those below the floor as well.
// Called by all threads; ends with a barrier passed.
template <int kThreads, class Row>
__device__ __forceinline__ void LookForBins(const Row& row, const Part& part,
                                            const MassBins& bin_of) {
  DrawShared& s = Finish().draw;
  __syncthreads();
  for (int b = threadIdx.x; b < kMassBins; b += kThreads) s.mass_bins[b] = 0;
  __syncthreads();
  row.EachCellOf(part.begin, part.end, [&]<class Element>(const LaneCell<Element>& x, int) {
#pragma unroll
    for (int e = 0; e < kLaneElements; ++e) {
      const uint32_t bin = bin_of(x[e]);
      if (bin < kMassBins) atomicAdd(&s.mass_bins[bin], 1u);
    }
  });
  __syncthreads();
}

// The second look at the block's part, whose sums are added to those of the cluster's first block.
template <class Row>
__device__ __forceinline__ void LookForSums(const Row& row, const Part& part, const NucleusAsk& ask,
                                            const MassBins& bin_of, uint64_t* cell_sums) {
  DrawFinish& own = Finish();
  DrawFinish& first = part.blocks > 1 ? *InBlock(&own, 0) : own;
  const uint64_t above =
      BlockSum(SumAbove(row, part, ask.floor, ask.weigh, bin_of, own.draw.found, own.draw.cell,
                        first.pool, part.blocks > 1 ? InBlock(cell_sums, 0) : cell_sums),
               own.draw);
  if (threadIdx.x == 0) {
    atomicAdd(reinterpret_cast<unsigned long long*>(&first.draw.above),
              static_cast<unsigned long long>(above));
  }
}

// In a cluster, what the blocks after the first one do once they have listed and the first one may
// have asked for this. Called by all threads.
template <int kThreads, class Row>
__device__ __noinline__ void HelpWithNucleus(const Row& row, const Part& part,
                                             uint64_t* cell_sums) {
  const NucleusAsk ask = Finish().draw.nucleus;
  if (ask.whole == 0) return;
  const MassBins bin_of(ask.weigh, row.vocab, ask.left_out);
  LookForBins<kThreads>(row, part, bin_of);
  ClusterArrive();
  ClusterWait();  // the first block adds up the bins
  ClusterArrive();
  ClusterWait();
  LookForSums(row, part, ask, bin_of, cell_sums);
  ClusterArrive();
  ClusterWait();
  ClusterArrive();
  ClusterWait();  // as where nothing was asked for
}

// The prefix of the row's keys from `floor` up, which weigh `whole` in all, that reaches `need`.
// The first look leaves a bin or two in which the last key can be. The second adds up what is above
// them exactly, and collects the keys between. Each block of a cluster looks at its part. Not found
// where those keys are too many, or the mass needed is nearly the whole. Called by all threads of
// the first block.
template <int kThreads, class Row>
__device__ __noinline__ Nucleus FindNucleus(const Row& row, const Part& part, Key floor,
                                            Weigher weigh, uint64_t whole, uint64_t need,
                                            uint64_t* cell_sums) {
  DrawShared& s = Finish().draw;
  auto& pool = Finish().pool;
  const Nucleus none{kLowestKey, 0};
  if (weigh.max == kInfinity || need >= whole) return none;
  const int thread = threadIdx.x;
  const NucleusAsk ask{floor, whole, whole - need, weigh};
  const auto await_all = [&] {
    if (part.blocks == 1) return __syncthreads();
    ClusterArrive();
    ClusterWait();
  };
  __syncthreads();
  if (thread == 0) {
    pool.count = 0;
    s.above = 0;
  }
  if (part.blocks > 1) {
    if (thread > 0 && thread < part.blocks) *InBlock(&s.nucleus, thread) = ask;
    await_all();
  }
  const MassBins bin_of(weigh, row.vocab, ask.left_out);
  LookForBins<kThreads>(row, part, bin_of);
  if (part.blocks > 1) {
    await_all();
    for (int b = thread; b < kMassBins; b += kThreads) {
      uint32_t count = s.mass_bins[b];
      for (int block = 1; block < part.blocks; ++block) count += *InBlock(&s.mass_bins[b], block);
      s.mass_bins[b] = count;
    }
    __syncthreads();
  }
  if (thread < 32) {
    FindMassBins(ask, bin_of, need, s);
    __syncwarp();
    if (thread > 0 && thread < part.blocks) {
      *InBlock(&s.found, thread) = s.found;
      *InBlock(&s.cell, thread) = s.cell;
    }
  }
  await_all();
  LookForSums(row, part, ask, bin_of, cell_sums);
  await_all();
  const uint64_t above = s.above;
  const int between = pool.count;
  if (between > SmallPool::kPool || above >= need) return none;
  for (int i = thread; i < between; i += kThreads) {
    const int token = static_cast<int>(pool.pool[i]);
    pool.pool[i] = MakeKey(row[token], token);
  }
  __syncthreads();
  CompactKeys<kThreads>(pool.pool, between, pool.count, [=](Key key) { return key >= floor; });
  EndInPool<kThreads>(above, need, Measure{weigh, /*counts=*/false});
  const Nucleus nucleus{s.key, s.mass};
  if (nucleus.last == kLowestKey) return none;
  for (int i = thread; i < s.count; i += kThreads) {
    const Key key = s.sorted_pool[i];
    AddShared(&cell_sums[KeyIndex(key) / kCell], weigh(KeyLogit(key)));
  }
  __syncthreads();
  return nucleus;
}

}  // namespace logitd::cuda

#endif  // LOGITD_KERNELS_CUDA_SAMPLING_NUCLEUS_CUH_
