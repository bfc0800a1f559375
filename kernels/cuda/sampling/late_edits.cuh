// sample, edits applied late: a mask and penalties that only lower logits, applied to candidates.
//
// A row is read once, as one without edits, and nothing is written. The sketch of the row as sent
// and the sketch of what the mask allows both bound the edited logits from above. So a floor that
// enough allowed logits reach is lowered until enough logits reach it after their penalties too;
// only the tokens of the few groups that reach the floor are looked at, and only they are counted
// in the history. The blocks of a cluster look by one floor of the whole row; where too few logits
// reach it after their penalties, each looks for the first of its part. Where the mask allows a
// fair share, the same look finds the top tokens of the row as sent, and the rank of the token
// drawn.
//
// Where that does not end (rows of many equal logits, or nearly all candidates in the history), the
// block writes the edited logits of its part to scratch (WriteEdited), and goes on as for other
// edits.
#ifndef LOGITD_KERNELS_CUDA_SAMPLING_LATE_EDITS_CUH_
#define LOGITD_KERNELS_CUDA_SAMPLING_LATE_EDITS_CUH_

#include <cstddef>

#include "kernels/cuda/sampling/edit.cuh"
#include "kernels/cuda/sampling/sample_row.cuh"
#include "kernels/cuda/sampling/weights.cuh"

namespace logitd::cuda {

// ---- a row's edits -----------------------------------------------------------------------------

// A row's mask and penalties.
struct LateEdits {
  const uint32_t* mask;    // null: none
  const int32_t* history;  // null: no penalties
  int history_count;
  int prompt_tokens;
  Penalties penalties;

  __device__ LateEdits(const SampleArgs& args, const SampleRow& ask)
      : mask(ask.first_mask_word < 0 ? nullptr : args.mask_words + ask.first_mask_word),
        history(PenaltiesAreOn(ask) ? args.history + ask.first_history : nullptr),
        history_count(ask.history_count),
        prompt_tokens(ask.prompt_tokens),
        penalties(ask) {}

  // The lane's word of the mask of the cell at `first`, in a row that ends at `end`.
  __device__ uint32_t MaskWord(int first, int end, int lane) const {
    const int word = first / 32 + lane;
    return word < MaskWords(end) ? mask[word] : 0;
  }
  __device__ bool Allows(int token) const {
    return mask == nullptr || (mask[token / 32] >> token % 32 & 1) != 0;
  }
  // Requests the block's share of the history from device memory.
  __device__ void Prefetch() const {
    if (history == nullptr) return;
    constexpr int kLine = 32;  // tokens
    for (int i = threadIdx.x * kLine; i < history_count; i += blockDim.x * kLine)
      asm volatile("prefetch.global.L2 [%0];" ::"l"(history + i));
  }
};

// Makes the lane's logits that the mask bans -inf. `word`: the lane's MaskWord().
template <class T>
__device__ __forceinline__ void MaskCell(uint32_t word, int lane, LaneCell<T>& x) {
  if constexpr (sizeof(T) == 4) {
#pragma unroll
    for (int v = 0; v < kLaneElements / 4; ++v) {
      const uint32_t allowed = __shfl_sync(kFullWarp, word, 4 * v + lane / 8) >> (lane % 8 * 4);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if ((allowed & 1u << e) == 0) x.words[4 * v + e] = 0xff800000u;
      }
    }
  } else {
    constexpr uint32_t kNothing =
        std::is_same_v<T, __nv_bfloat16> ? 0xff80ff80u : 0xfc00fc00u;  // two of -inf
#pragma unroll
    for (int v = 0; v < kLaneElements / 8; ++v) {
      const uint32_t allowed = __shfl_sync(kFullWarp, word, 8 * v + lane / 4) >> (lane % 4 * 8);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const uint32_t two = allowed >> (2 * e);
        const uint32_t keep = ((two & 1) | (two & 2) << 15) * 0xffffu;
        x.words[4 * v + e] = (x.words[4 * v + e] & keep) | (kNothing & ~keep);
      }
    }
  }
}

// ---- reading -----------------------------------------------------------------------------------

// Reads the warp's cells of a row: the statistics and the sketch of the row as sent, and the sketch
// of what the mask allows, which without a mask is not written.
template <class Block>
__device__ __forceinline__ LaneBests ReadLate(RowStream<Block>& stream, const LateEdits& edits,
                                              int begin, int end, CellStats raw,
                                              EditPool::Sketch* raw_sketch,
                                              EditPool::Sketch* sketch) {
  const int lane = threadIdx.x % 32;
  constexpr int kRound = Block::kWarps * kCell;
  const bool masked = edits.mask != nullptr;
  uint32_t word = masked ? edits.MaskWord(stream.first(), end, lane) : 0;
  LaneBests bests{-kInfinity, -kInfinity};
  Stats late{-kInfinity, 0.0f};  // as in RowStream::Run
  int late_cell = -1;
  const auto merge_late = [&] {
    const Stats stats = MergeLanes(late, raw.log2e_over_temperature);
    if (lane == 0 && late_cell >= 0) raw.cells[late_cell] = stats;
  };
  LaneCell<typename Block::Element> x;
  while (stream.Next(x)) {
    const int first = stream.first();
    const int at = (first - begin) / 32 + lane;
    stream.Release();
    const uint32_t word_here = word;
    if (masked) word = edits.MaskWord(first + kRound, end, lane);
    merge_late();
    float max;
    raw_sketch[at] = SketchOf<EditPool>(x, max);
    late = LaneStats(x, max, raw.log2e_over_temperature);
    late_cell = first / kCell;
    bests.raw = fmaxf(bests.raw, max);
    if (masked) {
      MaskCell(word_here, lane, x);
      sketch[at] = SketchOf<EditPool>(x, max);
      bests.edited = fmaxf(bests.edited, max);
    }
  }
  merge_late();
  if (!masked) bests.edited = bests.raw;
  return bests;
}

// ---- candidates --------------------------------------------------------------------------------

// Edited candidates, in memory that filters of unlisted tokens use later.
struct Candidates {
  static constexpr int kMax = 512;
  static constexpr int kSlots = kDrawBins;
  static constexpr uint32_t kFree = ~0u;
  static constexpr int kTokenBits = 20;
  static_assert(kMaxVocab <= 1 << kTokenBits && kMax <= 1 << (31 - kTokenBits));
  static_assert(2 * kMax * sizeof(Key) <= sizeof(DrawShared::bin_mass));
  static_assert(offsetof(DrawShared, sorted) ==
                    offsetof(DrawShared, weights) + sizeof(DrawShared::weights) &&
                sizeof(DrawShared::weights) + sizeof(DrawShared::sorted) >= kMax * 4);

  Key* keys;         // [2 * kMax]
  uint32_t* slots;   // of a table by token: the token, and above it its place among the keys
  uint32_t* counts;  // sightings of each in the history

  __device__ explicit Candidates(DrawShared& s)
      : keys(s.bin_mass), slots(s.bin_count), counts(reinterpret_cast<uint32_t*>(s.weights)) {}

  __device__ static uint32_t SlotOf(uint32_t token) { return token * 2654435761u >> 22; }
  static_assert(kSlots == 1 << (32 - 22));

  template <int kThreads>
  __device__ void Clear() const {
    for (int i = threadIdx.x; i < kSlots; i += kThreads) slots[i] = kFree;
    for (int i = threadIdx.x; i < kMax; i += kThreads) counts[i] = 0;
  }
  __device__ void Add(int at, Key key, bool in_table) const {
    keys[at] = key;
    if (!in_table) return;
    const uint32_t token = KeyIndex(key);
    uint32_t slot = SlotOf(token);
    while (atomicCAS(&slots[slot], kFree, static_cast<uint32_t>(at) << kTokenBits | token) != kFree)
      slot = (slot + 1) % kSlots;
  }
  __device__ void Count(uint32_t token, uint32_t sighting) const {
    uint32_t slot = SlotOf(token);
    uint32_t held = slots[slot];
#pragma unroll 1
    while (held != kFree) {
      if (((held ^ token) & ((1u << kTokenBits) - 1)) == 0) {
        AddSighting(&counts[held >> kTokenBits], sighting);
        return;
      }
      slot = (slot + 1) % kSlots;
      held = slots[slot];
    }
  }
};

// Makes those of `count` keys of the pool that the mask allows candidates. Returns how many they
// are; only Candidates::kMax of them are kept. Called by all threads; ends with a barrier passed.
template <int kThreads>
__device__ __noinline__ int TakeAllowed(const LateEdits& edits, int count) {
  auto& s = Pool<EditPool>();
  const Candidates found(Finish().draw);
  const bool counted = edits.history != nullptr;
  if (counted) found.Clear<kThreads>();
  if (threadIdx.x == 0) s.kept = 0;
  __syncthreads();
  for (int i = threadIdx.x; i < count; i += kThreads) {
    const Key key = s.pool[i];
    if (!edits.Allows(KeyIndex(key))) continue;
    const int at = atomicAdd(&s.kept, 1);
    if (at < Candidates::kMax) found.Add(at, key, counted);
  }
  __syncthreads();
  return s.kept;
}

// Counts the candidates among tokens [begin, end) of the history, whose sightings are kSighting. A
// thread's next tokens are on the way while it looks at a few: more at once would be more code, and
// code that is run once takes the time of its fetches. Called by all threads.
template <int kThreads, uint32_t kSighting>
__device__ __forceinline__ void CountSightings(const Candidates& found, const int32_t* history,
                                               int begin, int end) {
  constexpr int kAtOnce = 4;
  int next[kAtOnce];
  const auto load = [&](int first) {
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const int i = first + j * kThreads;
      next[j] = i < end ? history[i] : -1;
    }
  };
  const int first = begin + static_cast<int>(threadIdx.x);
  load(first);
#pragma unroll 1
  for (int round = first; round < end; round += kAtOnce * kThreads) {
    int tokens[kAtOnce];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) tokens[j] = next[j];
    load(round + kAtOnce * kThreads);
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      if (tokens[j] >= 0) found.Count(tokens[j], kSighting);
    }
  }
}

// Applies the penalties to `count` candidates. Returns how many still reach the floor. Called by
// all threads after a barrier; ends with a barrier passed.
template <int kThreads>
__device__ __noinline__ int PenalizeCandidates(const LateEdits& edits, int count, Key floor) {
  const Candidates found(Finish().draw);
  const int thread = threadIdx.x;
  if (edits.history == nullptr) return count;
  const int prompt = edits.prompt_tokens;
  if (prompt > 0) CountSightings<kThreads, kSeenInPrompt>(found, edits.history, 0, prompt);
  CountSightings<kThreads, 1>(found, edits.history, prompt, edits.history_count);
  __syncthreads();
  int survivors = 0;
  for (int base = 0; base < count; base += kThreads) {
    const int i = base + thread;
    bool survives = false;
    if (i < count) {
      Key key = found.keys[i];
      if (found.counts[i] != 0) {
        key = MakeKey(edits.penalties.Of(KeyLogit(key), found.counts[i]), KeyIndex(key));
        found.keys[i] = key;
      }
      survives = key >= floor;
    }
    survivors += __syncthreads_count(survives);
  }
  return survivors;
}

// ---- what a block has found --------------------------------------------------------------------

// In a cluster's first block, the first tokens of every block's part: as sent, and after edits.
struct alignas(16) LateInbox {
  Key raw[kMaxClusterBlocks][kListed];
  Key edited[kMaxClusterBlocks][kListed];
  int raw_counts[kMaxClusterBlocks];
  int edited_counts[kMaxClusterBlocks];
  // 1: raw has all logits as sent of the part that reach the cluster's floor.
  int raw_is_whole[kMaxClusterBlocks];
  // In every block: the survivors of each block's part.
  int survivors[kMaxClusterBlocks];
  static_assert(kMaxClusterBlocks * kListed <= 2 * Candidates::kMax);

  // True where k logits of the row reach the cluster's floor after edits, and every block found its
  // own.
  __device__ bool Reaches(int k, int blocks) const {
    int all = 0;
    bool found = true;
    for (int block = 0; block < blocks; ++block) {
      all += survivors[block];
      found &= survivors[block] >= 0;
    }
    return found && all >= k;
  }
  __device__ bool HasRawOf(int blocks) const {
    bool has = true;
    for (int block = 0; block < blocks; ++block) has &= raw_is_whole[block] != 0;
    return has;
  }
  // The thread's count of the logits as sent that reach the key.
  template <int kThreads>
  __device__ int CountRaw(Key key, int blocks) const {
    int count = 0;
    for (int block = 0; block < blocks; ++block) {
      for (int i = threadIdx.x; i < raw_counts[block]; i += kThreads) count += raw[block][i] >= key;
    }
    return count;
  }
};

struct LateFound {
  int raw;     // logits as sent that are in the pool: all of the part's from the floor up; -1: none
  int edited;  // candidates, all of the part's k largest after edits among them; -1: not found
  int survivors;  // candidates that reach the floor; -1: not found
  Key floor;
};

// The k-th largest of the threads' values, 1 <= k <= kThreads, in the pool's memory. Called by all
// threads after a barrier; ends with a barrier passed.
template <int kThreads>
__device__ __forceinline__ float LaneFloor(float value, int k) {
  auto& s = Pool<EditPool>();
  const int thread = threadIdx.x;
  auto* values = reinterpret_cast<float*>(s.pool);
  static_assert(kThreads * sizeof(float) <= sizeof(s.pool) && kThreads % 4 == 0);
  values[thread] = value;
  __syncthreads();
  const auto* fours = reinterpret_cast<const float4*>(values);
  int rank = 0;
#pragma unroll 8
  for (int j = 0; j < kThreads / 4; ++j) {
    const float4 four = fours[j];
    rank += four.x > value || (four.x == value && 4 * j < thread);
    rank += four.y > value || (four.y == value && 4 * j + 1 < thread);
    rank += four.z > value || (four.z == value && 4 * j + 2 < thread);
    rank += four.w > value || (four.w == value && 4 * j + 3 < thread);
  }
  if (rank == k - 1) s.warp_floor[0] = value;
  __syncthreads();
  return s.warp_floor[0];
}

// How many logits before the penalties reach the first floor, for k to reach it after them.
__device__ inline int LateReaching(const LateEdits& edits, int k, int raw_k) {
  const int want = max(k, raw_k);
  return want + (edits.history != nullptr ? want / 8 : 0);
}

// Looks for the part's k largest logits after edits, and at best finds the `raw_k` largest as sent
// as well. `sketch`: of what the mask allows. Where `row_floor` is above -inf, it is a floor of a
// cluster's: the row's k largest may be in other blocks' parts, and there is one look. Called by
// all threads after a barrier; ends with a barrier passed.
template <class Block>
__device__ __noinline__ LateFound FindLate(const typename Block::Element* row, const Part& part,
                                           const EditPool::Sketch* raw_sketch,
                                           const EditPool::Sketch* sketch, float lane_best,
                                           const LateEdits& edits, int k, int raw_k,
                                           float row_floor) {
  using Shape = EditPool;
  using T = typename Block::Element;
  constexpr int kThreads = Block::kThreads;
  auto& s = Pool<Shape>();
  const int groups = part.cells() * Shape::kGroupsOfCell;
  const int all = part.elements();
  int want = max(k, raw_k);
  // The first floor is the one of the lanes' best that enough others reach.
  const bool of_row = row_floor > -kInfinity;
  const int reaching = LateReaching(edits, k, raw_k);
  float logit = row_floor;
  if (!of_row && reaching <= kThreads * 3 / 4) logit = LaneFloor<kThreads>(lane_best, reaching);
#pragma unroll 1
  for (int look = 0; look < 3; ++look) {
    Floor floor;
    floor.RaiseToLogit(logit);
    bool is_lowest = false;  // the floor leaves out only -inf
    if (floor.key == 0) {
      const uint32_t coarse =
          want > groups ? 0
                        : SelectThreshold<kThreads>(reinterpret_cast<const uint16_t*>(sketch),
                                                    groups, want, want / 8, s.select);
      is_lowest = coarse <= OrderedBits(-kInfinity) >> 16;
      floor.Raise(is_lowest ? AboveMinusInfinity() : static_cast<Key>(coarse) << 48);
    }
    const auto offer = [&](const EditPool::Sketch* by) {
      __syncthreads();
      if (threadIdx.x == 0) s.count = 0;
      const bool is_whole =
          OfferGroups<T, kThreads, Shape>(row + part.begin, part.begin, part.elements(), by, 0,
                                          part.cells(), floor) &&
          s.count <= Shape::kPool;
      __syncthreads();
      return is_whole;
    };
    bool offered = offer(raw_sketch);
    const bool from_raw = offered;
    if (!offered && sketch != raw_sketch) offered = offer(sketch);
    if (!offered) break;
    const int raw = s.count;
    const int count = TakeAllowed<kThreads>(edits, raw);
    if (count > Candidates::kMax) break;
    const int survivors = PenalizeCandidates<kThreads>(edits, count, floor.key);
    if (of_row || is_lowest || survivors >= k) {
      const bool holds_raw = from_raw && raw <= Shape::kPool / 2;
      return {holds_raw && (of_row || raw >= min(raw_k, all)) ? raw : -1, count, survivors,
              floor.key};
    }
    logit = -kInfinity;
    want = 3 * max(want, 32);
  }
  return {-1, -1, -1, 0};
}

// Writes the edited logits of elements [begin, end) of the row to `edited`, and their sketch, in
// the layout of f32, where `sketch` is not null. `counts`: room for the row, in device memory.
// Called by all threads; ends with a barrier passed.
template <class T>
__device__ __noinline__ void WriteEdited(const T* row, int begin, int end, LateEdits edits,
                                         uint32_t* counts, float* edited,
                                         EditPool::Sketch* sketch) {
  const int lane = threadIdx.x % 32;
  const int threads = static_cast<int>(blockDim.x);
  __syncthreads();
  if (edits.history != nullptr) {
    for (int i = begin + static_cast<int>(threadIdx.x); i < end; i += threads) counts[i] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < edits.history_count; i += threads) {
      const int token = edits.history[i];
      if (token >= begin && token < end)
        AddSighting(&counts[token], SightingAt(i, edits.prompt_tokens));
    }
    __syncthreads();
  }
#pragma unroll 1
  for (int first = begin + static_cast<int>(threadIdx.x) / 32 * kCell; first < end;
       first += threads / 32 * kCell) {
    LaneCell<float> y;
#pragma unroll 4
    for (int e = 0; e < kLaneElements; ++e) {
      const int i = first + CellIndex<float>(lane, e);
      float x = -kInfinity;
      if (i < end && edits.Allows(i)) {
        x = ToFloat(row[i]);
        if (edits.history != nullptr) x = edits.penalties.Of(x, __ldcg(&counts[i]));
      }
      if (i < end) edited[i] = x;
      y.words[e] = __float_as_uint(x);
    }
    float max;
    const EditPool::Sketch sketched = SketchOf<EditPool>(y, max);
    if (sketch != nullptr) sketch[(first - begin) / 32 + lane] = sketched;
  }
  __syncthreads();
}

}  // namespace logitd::cuda

#endif  // LOGITD_KERNELS_CUDA_SAMPLING_LATE_EDITS_CUH_
