// sample, the edit stage: bias, penalties and mask, applied while the row is read.
//
// Before it reads, a block sorts the history and the bias of its part of the row by cells: two looks
// at the list, counts in shared memory. A warp then counts a cell's history in the cell itself: it
// adds 1 to the bits of a token's logit for each time the token was seen, and the difference to the
// bits before is the count. Later looks find an edited token by a bit (RowEdits). The row is never
// written again.
#ifndef LOGITD_KERNELS_CUDA_SAMPLING_EDIT_CUH_
#define LOGITD_KERNELS_CUDA_SAMPLING_EDIT_CUH_

#include "kernels/cuda/sampling/sample_row.cuh"

namespace logitd::cuda {

// ---- the lists by cells ------------------------------------------------------------------------

// Sorts items [0, count) by the cells of the block's part, which begins with cell `first_cell`:
// `token_of(i)` is an item's token. Items of earlier parts come first. put(at, i, token) is called
// for the items of the part; those of its cell c are at [ends[c - 1], ends[c]), where ends[-1] is
// what is returned. Called by all threads; ends with a barrier passed.
template <int kThreads, class TokenOf, class Put>
__device__ __forceinline__ int SortByCells(int count, int first_cell, int cells, uint32_t* ends,
                                           int& shared_before, TokenOf token_of, Put put) {
  constexpr int kAtOnce = 8;
  const int thread = static_cast<int>(threadIdx.x);
  const auto each = [&](auto visit) {
#pragma unroll 1
    for (int round = thread; round < count; round += kAtOnce * kThreads) {
      int tokens[kAtOnce];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const int i = round + j * kThreads;
        tokens[j] = i < count ? token_of(i) : static_cast<int>(2 * kMaxVocab);  // of no part
      }
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j)
        visit((tokens[j] >> kCellBits) - first_cell, round + j * kThreads, tokens[j]);
    }
  };
  for (int cell = thread; cell < cells; cell += kThreads) ends[cell] = 0;
  if (thread == 0) shared_before = 0;
  __syncthreads();
  int earlier = 0;
  each([&](int cell, int, int) {
    if (cell < 0) {
      ++earlier;
    } else if (cell < cells) {
      atomicAdd(&ends[cell], 1u);
    }
  });
  earlier = __reduce_add_sync(kFullWarp, earlier);
  if (thread % 32 == 0 && earlier > 0) atomicAdd(&shared_before, earlier);
  __syncthreads();
  const int begin = shared_before;
  if (thread < 32) {
    uint32_t before = begin;
    for (int base = 0; base < cells; base += 32) {
      const int cell = base + thread;
      const uint32_t own = cell < cells ? ends[cell] : 0;
      const uint32_t through = before + WarpPrefix(own, thread);
      if (cell < cells) ends[cell] = through - own;
      before = __shfl_sync(kFullWarp, through, 31);
    }
  }
  __syncthreads();
  each([&](int cell, int i, int token) {
    if (cell >= 0 && cell < cells) put(atomicAdd(&ends[cell], 1u), i, token);
  });
  __syncthreads();
  return begin;
}

// Where the block keeps the ends of its cells' lists, in shared memory.
struct EditEnds {
  uint32_t* history;  // [cells of the part]
  uint32_t* bias;     // [cells of the part]
  int* before;        // one place

  __device__ EditEnds(void* begin, int part_cells)
      : history(static_cast<uint32_t*>(begin)),
        bias(history + part_cells),
        before(reinterpret_cast<int*>(bias + part_cells)) {}
  static constexpr int Bytes(int part_cells) { return 4 * (2 * part_cells + 1); }
};

// Items [begin, end) of a list.
struct ListRange {
  uint32_t begin = 0;
  uint32_t end = 0;
  __device__ uint32_t count() const { return end - begin; }
};

// ---- a row's edits -----------------------------------------------------------------------------

// Where infinities of both signs met, the ban wins.
__device__ inline float BanIfNan(float x) { return isnan(x) ? -kInfinity : x; }

struct Penalties {
  float repetition;
  float presence;
  float frequency;

  // A logit whose token was seen `count` > 0 times. -inf stays -inf.
  __device__ float operator()(float x, uint32_t count) const {
    x = x > 0 ? __fdiv_rn(x, repetition) : __fmul_rn(x, repetition);
    x = BanIfNan(__fsub_rn(x, __fmul_rn(frequency, static_cast<float>(count))));
    return __fsub_rn(x, presence);
  }
};

// A row's edits, for the warps that read it.
struct Edits {
  const uint32_t* mask;  // null: none
  bool patched;          // there is bias or history
  bool counted;          // the history is longer than its list's room: counts of tokens instead
  const SampleBias* bias;
  const uint16_t* history_places;  // of tokens in their cells, sorted by cells
  const uint32_t* history_counts;  // [vocab], in the same memory, where `counted`
  const uint32_t* bias_items;      // of `bias`, sorted by cells
  EditedTokens* tokens;            // [vocab / 32], what is left for later looks
  float* values;                   // [vocab]
  Penalties penalties;
  int begin;  // of the block's part of the row
  int end;
  ListRange history_range;  // of the whole part
  ListRange bias_range;
  const uint32_t* history_ends;
  const uint32_t* bias_ends;

  // Sorts the row's lists. Called by all threads; ends with a barrier passed where there are lists.
  template <int kThreads>
  __device__ static Edits Prepare(const SampleParams& p, const SampleRow& ask, int row,
                                  const Part& part, const EditEnds& ends) {
    const int64_t at = static_cast<int64_t>(row) * p.edited_stride;
    const int vocab = static_cast<int>(p.args.logits.cols);
    const int cells = part.cells();
    Edits edits{};
    edits.mask = ask.first_mask_word < 0 ? nullptr : p.args.mask_words + ask.first_mask_word;
    edits.patched = HasPatches(ask);
    edits.penalties = {ask.repetition, ask.presence, ask.frequency};
    edits.begin = part.begin;
    edits.end = part.end;
    edits.history_ends = ends.history;
    edits.bias_ends = ends.bias;
    if (!edits.patched) return edits;
    edits.tokens = p.edited_tokens + at / 32;
    edits.values = p.edited_values + at;
    const int first_cell = part.begin / kCell;
    if (PenaltiesAreOn(ask)) {
      const int32_t* history = p.args.history + ask.first_history;
      uint32_t* counts = p.history + at;
      auto* places = reinterpret_cast<uint16_t*>(counts);
      const int count = ask.history_count;
      edits.counted = count > 2 * vocab;
      edits.history_counts = counts;
      edits.history_places = places;
      if (edits.counted) {
        for (int i = part.begin + static_cast<int>(threadIdx.x); i < part.end; i += kThreads)
          counts[i] = 0;
        __syncthreads();
        for (int i = threadIdx.x; i < count; i += kThreads) {
          const int token = history[i];
          if (token >= part.begin && token < part.end) atomicAdd(&counts[token], 1u);
        }
        __syncthreads();
      } else {
        edits.history_range.begin = SortByCells<kThreads>(
            count, first_cell, cells, ends.history, *ends.before, [&](int i) { return history[i]; },
            [&](uint32_t to, int, int token) {
              places[to] = static_cast<uint16_t>(token % kCell);
            });
        edits.history_range.end = ends.history[cells - 1];
      }
    }
    if (ask.bias_count > 0) {
      const SampleBias* bias = p.args.bias + ask.first_bias;
      uint32_t* items = p.bias_items + at;
      edits.bias = bias;
      edits.bias_items = items;
      edits.bias_range.begin = SortByCells<kThreads>(
          ask.bias_count, first_cell, cells, ends.bias, *ends.before,
          [&](int i) { return bias[i].id; },
          [&](uint32_t to, int i, int) { items[to] = static_cast<uint32_t>(i); });
      edits.bias_range.end = ends.bias[cells - 1];
    }
    return edits;
  }

  // The items of the cell at `first`; none beyond the part.
  __device__ ListRange HistoryOf(int first) const {
    return RangeOf(history_range, history_ends, first);
  }
  __device__ ListRange BiasOf(int first) const { return RangeOf(bias_range, bias_ends, first); }

  // The lane's word of the mask of the cell at `first`.
  __device__ uint32_t MaskWord(int first, int lane) const {
    const int word = first / 32 + lane;
    return mask != nullptr && word < MaskWords(end) ? mask[word] : ~0u;
  }
  // Makes the lane's logits that the mask bans -inf. `word`: the lane's MaskWord().
  __device__ void Mask(uint32_t word, int lane, LaneCell<float>& y) const {
    if (mask == nullptr) return;
#pragma unroll
    for (int v = 0; v < kLaneElements / 4; ++v) {
      const uint32_t allowed = __shfl_sync(kFullWarp, word, 4 * v + lane / 8) >> (lane % 8 * 4);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if ((allowed & 1u << e) == 0) y.words[4 * v + e] = __float_as_uint(-kInfinity);
      }
    }
  }

 private:
  __device__ ListRange RangeOf(const ListRange& all, const uint32_t* ends, int first) const {
    if (all.count() == 0 || first >= end) return {};
    const int cell = (first - begin) >> kCellBits;
    return {cell == 0 ? all.begin : ends[cell - 1], ends[cell]};
  }
};

// ---- a cell ------------------------------------------------------------------------------------

// A warp's cell in shared memory while it is edited.
struct CellEditor {
  float* values;   // [kCell], of any alignment
  uint32_t* bits;  // [32], zero between cells: which tokens are edited
  int lane;

  __device__ uint32_t* words() const { return reinterpret_cast<uint32_t*>(values); }
  __device__ void SetBit(int place) const { atomicOr(&bits[place / 32], 1u << place % 32); }

  __device__ void AddBias(const Edits& edits, ListRange range) const {
    for (uint32_t i = range.begin + lane; i < range.end; i += 32) {
      const SampleBias bias = edits.bias[edits.bias_items[i]];
      const int place = bias.id % kCell;
      values[place] = BanIfNan(__fadd_rn(values[place], bias.value));
      SetBit(place);
    }
    __syncwarp();
  }

  // A cell with at most 64 items of history; `first` and `second` are the lane's, -1 for none.
  __device__ void PenalizeFew(const Penalties& penalties, int first, int second) const {
    uint32_t* const word = words();
    const uint32_t before_first = first >= 0 ? word[first] : 0;
    const uint32_t before_second = second >= 0 ? word[second] : 0;
    __syncwarp();
    // Whoever still finds the bits before is the first of its token, and edits it.
    const bool leads_first = first >= 0 && atomicAdd(&word[first], 1u) == before_first;
    const bool leads_second = second >= 0 && atomicAdd(&word[second], 1u) == before_second;
    __syncwarp();
    const uint32_t count_first = leads_first ? word[first] - before_first : 0;
    const uint32_t count_second = leads_second ? word[second] - before_second : 0;
    if (leads_first) {
      values[first] = penalties(__uint_as_float(before_first), count_first);
      SetBit(first);
    }
    if (leads_second) {
      values[second] = penalties(__uint_as_float(before_second), count_second);
      SetBit(second);
    }
    __syncwarp();
  }

  // A cell with any number of them, whose lengths do not matter here.
  __device__ __noinline__ void PenalizeMany(const Edits& edits, int first, ListRange range) const {
    uint32_t* const word = words();
    LaneCell<float> before;
    LoadCell(values, lane, before);
    __syncwarp();
    if (edits.counted) {
      for (int i = lane; i < min(kCell, edits.end - first); i += 32)
        word[i] += __ldcg(&edits.history_counts[first + i]);  // atomics have left them in L2
    } else {
      for (uint32_t i = range.begin + lane; i < range.end; i += 32)
        atomicAdd(&word[edits.history_places[i]], 1u);
    }
    __syncwarp();
#pragma unroll
    for (int e = 0; e < kLaneElements; ++e) {
      const int place = CellIndex<float>(lane, e);
      const uint32_t count = word[place] - before.words[e];
      if (count != 0) {
        values[place] = edits.penalties(before[e], count);
        SetBit(place);
      }
    }
    __syncwarp();
  }

  // Leaves the edited tokens of the cell at `first` for later looks, and the bits zero.
  __device__ void Leave(const Edits& edits, int first) const {
    const uint32_t mine = bits[lane];
    const uint32_t count = __popc(mine);
    uint32_t at = first + WarpPrefix(count, lane) - count;
    if (first + 32 * lane < edits.end) edits.tokens[first / 32 + lane] = {mine, at};
    for (uint32_t left = mine; left != 0; left &= left - 1)
      edits.values[at++] = values[32 * lane + __ffs(left) - 1];
    bits[lane] = 0;
  }
};

// ---- the row -----------------------------------------------------------------------------------

// What a lane has seen of a row: its largest logits as sent and after edits.
struct LaneBests {
  float raw;
  float edited;
};

// What is left of an edited row's read.
struct EditedTo {
  CellStats raw;
  CellStats own;  // only its maxima where sums are not needed
  bool sums_needed;
  EditPool::Sketch* raw_sketch;  // null: not needed
  EditPool::Sketch* sketch;
};

// Reads the warp's cells of an edited row. `cell_floats`: room for the warp's cell as floats, for
// 16-bit rows. `bits`: 32 words of the warp's.
template <class Block, class T>
__device__ __forceinline__ LaneBests ReadEdited(RowStream<Block>& stream, const Edits& edits,
                                                const EditedTo& to, float* cell_floats,
                                                uint32_t* bits) {
  const int lane = threadIdx.x % 32;
  constexpr int kRound = Block::kWarps * kCell;
  // A cell's list and mask are requested a turn before.
  ListRange history;
  ListRange bias;
  int items[2];
  uint32_t word;
  const auto request = [&](int first) {
    word = edits.MaskWord(first, lane);
    if (!edits.patched) return;
    bias = edits.BiasOf(first);
    history = edits.HistoryOf(first);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const uint32_t i = history.begin + lane + 32 * j;
      items[j] = i < history.end ? edits.history_places[i] : -1;
    }
  };
  bits[lane] = 0;
  request(stream.first());
  LaneBests bests{-kInfinity, -kInfinity};
  LaneCell<T> x;
  while (stream.Next(x)) {
    const int first = stream.first();
    const int at = (first - edits.begin) / 32 + lane;
    float raw_max;
    const EditPool::Sketch raw_sketched = SketchOf<EditPool>(x, raw_max);
    if (to.raw_sketch != nullptr) to.raw_sketch[at] = raw_sketched;
    const Stats raw_lane = LaneStats(x, raw_max, to.raw.log2e_over_temperature);
    LaneCell<float> y;
    const auto edit = [&](float* values) {
      const CellEditor editor{values, bits, lane};
      if (bias.count() > 0) editor.AddBias(edits, bias);
      if (edits.counted || history.count() > 64) {
        editor.PenalizeMany(edits, first, history);
      } else if (history.count() > 0) {
        editor.PenalizeFew(edits.penalties, items[0], items[1]);
      }
      editor.Leave(edits, first);
      LoadCell(values, lane, y);
      __syncwarp();
    };
    if constexpr (sizeof(T) == 4) {
      if (edits.patched) {
        edit(stream.InShared());
      } else {
        y = x;
      }
    } else {
#pragma unroll
      for (int e = 0; e < kLaneElements; e += 4) {
        *reinterpret_cast<float4*>(cell_floats + CellIndex<T>(lane, e)) = {x[e], x[e + 1], x[e + 2],
                                                                           x[e + 3]};
      }
      __syncwarp();
      if (edits.patched) {
        edit(cell_floats);
      } else {
        LoadCell(cell_floats, lane, y);
        __syncwarp();
      }
    }
    stream.Release();
    const uint32_t word_here = word;
    request(first + kRound);
    edits.Mask(word_here, lane, y);
    float max;
    to.sketch[at] = SketchOf<EditPool>(y, max);
    const Stats raw_cell = MergeLanes(raw_lane, to.raw.log2e_over_temperature);
    Stats own_cell{FromOrderedBits(WarpMax(OrderedBits(max))), 0.0f};
    if (to.sums_needed) {
      own_cell = MergeLanes(LaneStats(y, max, to.own.log2e_over_temperature),
                            to.own.log2e_over_temperature);
    }
    if (lane == 0) {
      to.raw.cells[first / kCell] = raw_cell;
      to.own.cells[first / kCell] = own_cell;
    }
    bests.raw = fmaxf(bests.raw, raw_max);
    bests.edited = fmaxf(bests.edited, max);
  }
  return bests;
}

}  // namespace logitd::cuda

#endif  // LOGITD_KERNELS_CUDA_SAMPLING_EDIT_CUH_
