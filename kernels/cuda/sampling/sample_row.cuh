// What the stages of sample share: the parameters of a launch, and what a block keeps of its row.
#ifndef LOGITD_KERNELS_CUDA_SAMPLING_SAMPLE_ROW_CUH_
#define LOGITD_KERNELS_CUDA_SAMPLING_SAMPLE_ROW_CUH_

#include <type_traits>

#include "kernels/cuda/ops.h"
#include "kernels/cuda/rows/candidates.cuh"
#include "kernels/cuda/sampling/weights.cuh"
#include "kernels/verify.h"

namespace logitd::cuda {

constexpr int kListed = 128;     // tokens that come sorted
constexpr int kDrawBins = 1024;  // of a histogram of keys
constexpr int kMassBins = 4096;  // of a histogram that tells the mass approximately
// Keys from about the k-th of a row up, in scratch, for a k to kMostFirst.
constexpr int kFirstKeys = 16384;
constexpr int kMostFirst = 12288;
// OfferGroups numbers a block's groups in 16 bits, and a block here may hold all of a row.
static_assert(kMaxVocab / kCell <= SmallPool::kMostCells);

// verify: where a row is in a sequence with block verification, once that is decided.
enum class BlockPlace : int8_t {
  kNone,    // its sequence has no block verification
  kBefore,  // its draft is accepted; also until it is decided
  kBonus,
  kAfter,
};

// A row's numbers in block verification, by the step that finds them.
struct BlockRow {
  uint64_t weight;  // kWeigh: of the draft's token in the target
  uint64_t mass;    // kWeigh: of its q
  double share;     // s
  uint64_t left;    // kSum: the sum of R
  uint64_t total;   // kSum: the sum of W
  BlockPlace place;
};

// The step of block verification that a launch of SampleRows takes.
enum class BlockStep : int8_t { kWeigh, kSum, kEmit };

// The rows that a kernel serves. Code that is there for other rows makes it slower: its own code is
// farther apart, and is fetched from device memory.
enum class Serves : int8_t {
  kPlain,   // rows without edits that do not AsksMore
  kEdited,  // rows that do not AsksMore
  kAll,
};

struct SampleParams {
  SampleArgs args;
  int32_t cells;   // of a row
  int32_t blocks;  // of a row's cluster
  // For edited rows, in scratch: [rows, edited_stride] each.
  float* edited;       // null: no row is edited
  uint32_t* counts;    // sightings of tokens in the history, while patches are made
  float* bias_values;  // null: no row has bias
  int64_t edited_stride;
  int* patch_counts;  // [rows, cells]
  // The first keys of a row (nucleus.cuh), in scratch: room for first_keys of each of first_rows
  // rows.
  Key* first_lists;
  int64_t first_rows;
  int32_t first_keys;

  __device__ Key* FirstList(int64_t row) const {
    return row < first_rows ? first_lists + row * first_keys : nullptr;
  }
  // verify: drafts and whether they were accepted; null in sample.
  const VerifyDraft* drafts;  // [rows]
  const int32_t* draft_ids;
  const float* draft_probs;
  uint8_t* has_draft;    // [rows]
  uint8_t* accepted;     // [rows]
  BlockRow* block_rows;  // [rows]; null: no sequence has block verification
  BlockStep block_step;
};

// The top tokens that come from a sorted list; where the row wants more, none do.
__device__ inline int ListedTops(const SampleRow& ask) {
  return ask.top_logprobs <= kListed ? ask.top_logprobs : 0;
}

// Enqueues sample for all rows of p.args, by p.drafts where there are any. Sets what p says of
// cells, blocks and edited rows.
cudaError_t SampleRows(SampleParams p, Scratch scratch, cudaStream_t stream);

// True where the row's edits are applied late (late_edits.cuh): they only lower logits, no sum over
// the row needs them, the list usually holds what the filters leave, and no more is asked of that.
template <bool kMayAskMore = true>
__device__ inline bool IsEditedLate(const SampleParams& p, const SampleRow& ask) {
  const bool asks_more =
      kMayAskMore && (ask.want_entropy || ask.want_support > 0 || ask.draws > 0 || MarkIsOn(ask));
  return IsEdited(ask) && EditsOnlyLower(ask) &&
         FirstTokensTell(ask, p.args.logits.cols, kListed) &&
         ask.logprob_mode == LogprobMode::kRaw && !asks_more && p.drafts == nullptr;
}

// True where this step of block verification needs nothing of row r: it is after the bonus token;
// before the last step, it has no draft, or its sequence has no block verification.
__device__ inline bool IsIdle(const SampleParams& p, int64_t r) {
  if (p.block_rows == nullptr) return false;
  const BlockPlace place = p.block_rows[r].place;
  if (p.block_step == BlockStep::kEmit) return place == BlockPlace::kAfter;
  return place == BlockPlace::kNone || p.has_draft[r] == 0;
}

// What the first block of a cluster asks the others for, to find the prefix of a flat top_p
// (nucleus.cuh).
struct NucleusAsk {
  Key floor;
  uint64_t whole;  // 0: nothing is asked for
  uint64_t left_out;
  Weigher weigh;
};

// ---- memory ------------------------------------------------------------------------------------

struct DrawShared {
  union {
    uint64_t bin_mass[kDrawBins];
    uint32_t mass_bins[kMassBins];
    struct {  // once the bins are not needed
      Key sorted_pool[SmallPool::kPool];
      Key spare[SmallPool::kPool];
    };
    struct {  // of further draws, and of watermarks
      double value_of_warp[SelectScratch::kMaxWarps];
      int32_t index_of_warp[SelectScratch::kMaxWarps];
      uint64_t through[kListed];  // the weight up to each of the listed, by index
    };
  };
  uint32_t bin_count[kDrawBins];
  uint64_t warp_sums[SelectScratch::kMaxWarps];
  uint64_t weights[kListed];
  Key sorted[kListed];  // the largest, in order
  Key key;              // what one thread tells the others
  uint64_t mass;
  double reach;
  double share;
  int32_t token;
  int32_t cell;
  int32_t count;
  int32_t found;
  // All blocks of a cluster look for the rank of a token (-1: no look is needed) with this logit.
  int32_t ranked_token;
  float ranked_logit;
  int32_t rank;
  NucleusAsk nucleus;
  uint64_t above;
  float first_logit;  // the least of the list of first keys
  int first_count;
  ChosenTokens chosen;  // where typical_p or xtc is on
};

// Many rows: a block each. Few rows: a cluster each, whose first block draws.
template <class T, bool kInCluster, class PoolShapeOfBlock>
using DrawBlock = std::conditional_t<kInCluster, BlockShape<T, PoolShapeOfBlock, 16, 2, 1, true>,
                                     BlockShape<T, PoolShapeOfBlock, 4, 2, 4>>;

// A row that may be edited has two sketches, of groups twice as large: as sent, and after edits.
using EditPool = PoolShape<128, 1>;
template <bool kEditable>
using DrawPool = std::conditional_t<kEditable, EditPool, SmallPool>;
static_assert(2 * sizeof(EditPool::Sketch) == sizeof(SmallPool::Sketch) &&
              sizeof(EditPool::Shared) == sizeof(SmallPool::Shared));

struct DrawFinish {
  typename SmallPool::Shared pool;
  DrawShared draw;
};

// The rings, and for 16-bit rows that may be edited a cell of each warp as floats; later the pool
// and what draws.
template <class T, bool kInCluster, bool kEditable>
union DrawMemory {
  using Block = DrawBlock<T, kInCluster, DrawPool<kEditable>>;
  static constexpr bool kHasCells = sizeof(T) == 2 && kEditable;
  struct {
    typename Block::Shared stream;
    float cells[kHasCells ? Block::kWarps : 1][kHasCells ? kCell : 1];
  };
  DrawFinish finish;
  // The warp's cell.
  __device__ float* OfWarp() { return cells[kHasCells ? threadIdx.x / 32 : 0]; }
  // Blocks that have begun to list write to warp_bests of those that still read, or list.
  static_assert(!kInCluster || sizeof(DrawFinish) <= sizeof(Block::Shared::rings));
};

__device__ inline DrawFinish& Finish() {
  extern __shared__ __align__(128) uint4 dynamic[];
  return *reinterpret_cast<DrawFinish*>(dynamic);
}

// In a function that is not inlined: these pointers are to shared memory. The compiler does not
// know, and loads and atomics by generic addresses take longer.
template <class... U>
__device__ __forceinline__ void AreInShared(const U*... pointers) {
  (__builtin_assume(__isShared(pointers)), ...);
}

__device__ inline uint64_t BlockSum(uint64_t v, DrawShared& s) {
  v = WarpSum(v);
  __syncthreads();
  if (threadIdx.x % 32 == 0) s.warp_sums[threadIdx.x / 32] = v;
  __syncthreads();
  uint64_t sum = 0;
  for (int w = 0; w < blockDim.x / 32; ++w) sum += s.warp_sums[w];
  return sum;
}

// ---- the row's logits --------------------------------------------------------------------------

// The lane's part of the cell at `first` of a row, from device memory; -inf from `end` on, and in
// vector v of it where bit v of `wanted` is 0.
template <class Element>
__device__ inline void ReadCell(const Element* row, int first, int end, uint32_t wanted,
                                LaneCell<Element>& x) {
  constexpr int kVectors = kLaneElements / kVector<Element>;
  constexpr uint32_t kNothing = kMinusInfinities<Element>;
  const int lane = threadIdx.x % 32;
  const bool aligned = (reinterpret_cast<uintptr_t>(row) & 15) == 0;
  const bool whole = aligned && first + kCell <= end;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int i = first + CellIndex<Element>(lane, v * kVector<Element>);
    const bool is_wanted = (wanted >> v & 1) != 0;
    uint4 words{kNothing, kNothing, kNothing, kNothing};
    if (whole) {
      if (is_wanted) words = *reinterpret_cast<const uint4*>(row + i);
    } else if (is_wanted && i < end) {
      words = LoadVector(row + i, aligned, end - i, kNothing);
    }
    x.SetVector(v, words);
  }
}

// Calls visit(x, i) for the elements of vector v of the lane's part of the cell at `first`.
template <class Element, class Visit>
__device__ __forceinline__ void EachOfVector(const LaneCell<Element>& x, int first, int v,
                                             Visit visit) {
  const uint4 vector = x.Vector(v);
  const uint32_t words[4] = {vector.x, vector.y, vector.z, vector.w};
  const int i = first + CellIndex<Element>(threadIdx.x % 32, v * kVector<Element>);
#pragma unroll
  for (int e = 0; e < kVector<Element>; ++e) visit(WordElement<Element>(words, e), i + e);
}
// The same for all vectors, in a loop: code that is rarely run is read from device memory, and
// takes longer than the loop.
template <class Element, class Visit>
__device__ __forceinline__ void EachOfCell(const LaneCell<Element>& x, int first, Visit visit) {
#pragma unroll 1
  for (int v = 0; v < kLaneElements / kVector<Element>; ++v) EachOfVector(x, first, v, visit);
}

// The row after edits: as sent where there are none. Cells of a row that may be edited are visited
// as f32, so that there is one body for both.
template <class T, Serves kServes>
class Logits {
 public:
  static constexpr bool kMayBeEdited = kServes != Serves::kPlain;
  static constexpr bool kMayAskMore = kServes == Serves::kAll;
  using Element = std::conditional_t<kMayBeEdited, float, T>;

  __device__ Logits(const T* as_sent, int count) : sent(as_sent), vocab(count) {}

  const T* sent;
  const float* edited = nullptr;
  int vocab;

  __device__ float operator[](int i) const {
    if constexpr (kMayBeEdited) {
      if (edited != nullptr) return edited[i];
    }
    return ToFloat(sent[i]);
  }

  // Calls visit(x, first) for the cell at `first`: x is the lane's part of it, -inf beyond the row.
  template <class Visit>
  __device__ void Cell(int first, Visit visit) const {
    LaneCell<Element> x;
    if (HasElements()) {
      ReadCell(Elements(), first, vocab, ~0u, x);
    } else {
#pragma unroll
      for (int v = 0; v < kVectors; ++v)
        x.SetVector(v, Vector(first + CellIndex<Element>(threadIdx.x % 32, v * kVector<Element>)));
    }
    visit(x, first);
  }
  // The same for every cell of [begin, end) that is the warp's. `begin` is a cell's border.
  template <class Visit>
  __device__ void EachCellOf(int begin, int end, Visit visit) const {
    const int warps = static_cast<int>(blockDim.x) / 32;
#pragma unroll 1
    for (int first = begin + static_cast<int>(threadIdx.x) / 32 * kCell; first < end;
         first += warps * kCell)
      Cell(first, visit);
  }
  // The same for the whole row.
  template <class Visit>
  __device__ void EachCell(Visit visit) const {
    EachCellOf(0, vocab, visit);
  }
  // Calls visit(x) for the elements of every kSampleStep-th of the row's stretches of 32 vectors,
  // each of another place in its cell; -inf beyond the row.
  static constexpr int kVectors = kLaneElements / kVector<Element>;
  static constexpr int kSampleStep = kVectors + 1;
  template <class Visit>
  __device__ void EachSampled(Visit visit) const {
    constexpr int kStretch = 32 * kVector<Element>;
    constexpr int kAtOnce = 4;
    const int turn = static_cast<int>(blockDim.x) / 32 * kSampleStep * kStretch;
#pragma unroll 1
    for (int first = static_cast<int>(threadIdx.x) / 32 * kSampleStep * kStretch; first < vocab;
         first += kAtOnce * turn) {
      uint4 vectors[kAtOnce];
      const int own = first + static_cast<int>(threadIdx.x) % 32 * kVector<Element>;
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) vectors[j] = Vector(own + j * turn);
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
#pragma unroll
        for (int e = 0; e < kVector<Element>; ++e)
          visit(WordElement<Element>(reinterpret_cast<const uint32_t*>(&vectors[j]), e));
      }
    }
  }
  // Calls visit(key, x) for the lane's elements of the row.
  template <class Visit>
  __device__ void EachKey(Visit visit) const {
    EachCell([&](const LaneCell<Element>& x, int first) {
      EachOfCell(x, first, [&](float logit, int i) { visit(MakeKey(logit, i), logit); });
    });
  }

 private:
  __device__ bool HasElements() const { return std::is_same_v<T, Element> || edited != nullptr; }
  __device__ const Element* Elements() const {
    if constexpr (!kMayBeEdited) {
      return sent;
    } else if constexpr (std::is_same_v<T, Element>) {
      return edited != nullptr ? edited : sent;
    } else {
      return edited;
    }
  }
  // A vector of Elements from i on, -inf beyond the row.
  __device__ uint4 Vector(int i) const {
    if (HasElements()) {
      const Element* row = Elements();
      return LoadVector(row + i, (reinterpret_cast<uintptr_t>(row) & 15) == 0, vocab - i,
                        kMinusInfinities<Element>);
    }
    const auto word = [&](int at) {
      return __float_as_uint(at < vocab ? ToFloat(sent[at]) : -kInfinity);
    };
    return {word(i), word(i + 1), word(i + 2), word(i + 3)};  // as f32
  }
};

// ---- the list ----------------------------------------------------------------------------------

// Sorts n keys, at most the pool's room of them, into places [0, most) of `to`, which may be
// another block's; `spare` as in EmitByRank. Called by all threads; ends with a barrier passed.
template <int kThreads>
__device__ __noinline__ void SortKeys(Key* keys, int n, Key* spare, int most, Key* to) {
  EmitByRank<kThreads>(keys, n, spare, Finish().pool.select, [&](int rank, Key key) {
    if (rank < most) to[rank] = key;
  });
  __syncthreads();
}

// True where all tokens of a row from `last` up are among the first `listed`, in s.sorted.
__device__ inline bool AreListed(int vocab, int listed, Key last, const DrawShared& s) {
  return listed == vocab || (listed > 0 && s.sorted[listed - 1] <= last);
}

// Leaves the first `count` <= kListed tokens of the row just read in s.sorted of the first block,
// in order. Then all that the cluster's blocks wrote there is there. `stream` is what the row was
// read with. Called by all threads after a barrier; ends with a barrier passed.
template <class Block, class Stream>
__device__ inline void List(const typename Block::Element* row, const Part& part,
                            const typename Block::Pool::Sketch* sketch, float lane_best, int count,
                            Stream& stream) {
  using Shape = typename Block::Pool;
  constexpr int kThreads = Block::kThreads;
  DrawShared& s = Finish().draw;
  auto& pool = Pool<Shape>();
  GatherRow<Block>(row, part, sketch, lane_best, count, stream, [] {});
  if (Block::kCluster && part.block != 0) return;
  const int n = Trim<kThreads, Shape>(count, Shape::kPool / 2);
  EmitByRank<kThreads>(pool.pool, n, pool.pool + Shape::kPool / 2, pool.select,
                       [&](int rank, Key key) {
                         if (rank < count) s.sorted[rank] = key;
                       });
  __syncthreads();
}

}  // namespace logitd::cuda

#endif  // LOGITD_KERNELS_CUDA_SAMPLING_SAMPLE_ROW_CUH_
