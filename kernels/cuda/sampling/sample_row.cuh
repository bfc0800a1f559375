// What the stages of sample share: the parameters of a launch, and what a block keeps of its row.
#ifndef LOGITD_KERNELS_CUDA_SAMPLING_SAMPLE_ROW_CUH_
#define LOGITD_KERNELS_CUDA_SAMPLING_SAMPLE_ROW_CUH_

#include <type_traits>

#include "kernels/cuda/ops.h"
#include "kernels/cuda/rows/candidates.cuh"
#include "kernels/draw.h"
#include "kernels/verify.h"

namespace logitd::cuda {

constexpr int kListed = 128;     // tokens that come sorted
constexpr int kDrawBins = 1024;  // of a histogram of keys
constexpr int kMassBins = 2048;  // of a histogram of approximate mass
// OfferGroups numbers a block's groups in 16 bits, and a block here may hold all of a row.
static_assert(kMaxVocab / kCell * SmallPool::kGroupsOfCell <= 65536);

// Which of 32 tokens are edited, and where the logits of those are, in order.
struct alignas(8) EditedTokens {
  uint32_t bits;
  uint32_t first;

  __device__ uint32_t ValueAt(int token) const {
    return first + __popc(bits & ((1u << token) - 1));
  }
};

struct SampleParams {
  SampleArgs args;
  int32_t cells;   // of a row
  int32_t blocks;  // of a row's cluster
  // For edited rows, in scratch (edit.cuh): [rows, edited_stride] each.
  uint32_t* history;            // sorted by cells
  uint32_t* bias_items;         // null: no row has bias
  float* edited_values;         // of the tokens that bias and history change
  EditedTokens* edited_tokens;  // [rows, edited_stride / 32]: which tokens those are
  int64_t edited_stride;        // a multiple of 32
  // verify: drafts and whether they were accepted; null in sample.
  const VerifyDraft* drafts;  // [rows]
  const int32_t* draft_ids;
  const float* draft_probs;
  uint8_t* has_draft;  // [rows]
  uint8_t* accepted;   // [rows]
};

// Enqueues sample for all rows of p.args, by p.drafts where there are any. Sets what p says of
// cells, blocks and edited rows.
cudaError_t SampleRows(SampleParams p, Scratch scratch, cudaStream_t stream);

__device__ inline bool TopKIsOn(const SampleRow& ask, int64_t vocab) {
  return ask.top_k > 0 && ask.top_k < vocab;
}
__device__ inline bool PenaltiesAreOn(const SampleRow& ask) {
  return ask.history_count > 0 && (ask.repetition != 1 || ask.presence != 0 || ask.frequency != 0);
}
__device__ inline bool HasPatches(const SampleRow& ask) {
  return ask.bias_count > 0 || PenaltiesAreOn(ask);
}
__device__ inline bool IsEdited(const SampleRow& ask) {
  return ask.first_mask_word >= 0 || HasPatches(ask);
}
__device__ inline bool IsFiltered(const SampleRow& ask, int64_t vocab) {
  return TopKIsOn(ask, vocab) || ask.top_p < 1 || ask.min_p > 0;
}

// ---- memory ------------------------------------------------------------------------------------

struct DrawShared {
  union {
    uint64_t bin_mass[kDrawBins];
    uint32_t bin_share[kMassBins];
    Key sorted_pool[SmallPool::kPool / 2];  // once the bins are not needed
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
};

// Many rows: a block each. Few rows: a cluster each, whose first block draws.
template <class T, bool kInCluster, class PoolShapeOfBlock = SmallPool>
using DrawBlock = std::conditional_t<kInCluster, BlockShape<T, PoolShapeOfBlock, 16, 2, 1, true>,
                                     BlockShape<T, PoolShapeOfBlock, 4, 2, 4>>;

// An edited row has two sketches, of groups twice as large: as sent, and after edits.
using EditPool = PoolShape<128, 1>;
static_assert(2 * sizeof(EditPool::Sketch) == sizeof(SmallPool::Sketch) &&
              sizeof(EditPool::Shared) == sizeof(SmallPool::Shared));

struct DrawFinish {
  typename SmallPool::Shared pool;
  DrawShared draw;
};

// The rings, and where rows are edited what a warp edits its cell with: for 16-bit rows the cell as
// floats, and a bit for each token. Later the pool and what draws.
template <class T, bool kInCluster, bool kEditable>
union DrawMemory {
  using Block = DrawBlock<T, kInCluster>;
  static constexpr int kEditWarps = kEditable ? Block::kWarps : 1;
  static constexpr bool kFloats = kEditable && sizeof(T) == 2;
  struct {
    typename Block::Shared stream;
    float cells[kFloats ? Block::kWarps : 1][kFloats ? kCell : 1];
    uint32_t edited_bits[kEditWarps][32];
  };
  DrawFinish finish;
  // Blocks that have begun to list write to warp_bests of those that still read, or list.
  static_assert(!kInCluster || sizeof(DrawFinish) <= sizeof(Block::Shared::rings));
};

__device__ inline DrawFinish& Finish() {
  extern __shared__ __align__(128) uint4 dynamic[];
  return *reinterpret_cast<DrawFinish*>(dynamic);
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

// The lane's part of the cell at `first` of a row, from device memory; -inf from `end` on, and in a
// half of it that is not wanted.
template <class Element>
__device__ inline void ReadCell(const Element* row, int first, int end, bool low, bool high,
                                LaneCell<Element>& x) {
  constexpr int kVectors = kLaneElements / kVector<Element>;
  constexpr uint32_t kNothing = sizeof(Element) == 4                     ? 0xff800000u
                                : std::is_same_v<Element, __nv_bfloat16> ? 0xff80ff80u
                                                                         : 0xfc00fc00u;
  const int lane = threadIdx.x % 32;
  const bool aligned = (reinterpret_cast<uintptr_t>(row) & 15) == 0;
  const bool whole = aligned && first + kCell <= end;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int i = first + CellIndex<Element>(lane, v * kVector<Element>);
    const bool wanted = 2 * v < kVectors ? low : high;
    uint4 words{kNothing, kNothing, kNothing, kNothing};
    if (whole) {
      if (wanted) words = *reinterpret_cast<const uint4*>(row + i);
    } else if (wanted && i < end) {
      words = LoadVector(row + i, aligned, end - i, kNothing);
    }
    x.SetVector(v, words);
  }
}

// A row as sent.
template <class T>
struct SentRow {
  using Layout = T;
  const T* elements;

  __device__ float operator[](int i) const { return ToFloat(elements[i]); }
  __device__ SentItem<T> Item(const Part& part) const {
    return {elements + part.begin, part.begin, part.elements()};
  }
  __device__ void ReadCell(int first, int end, bool low, bool high, LaneCell<T>& x) const {
    cuda::ReadCell(elements, first, end, low, high, x);
  }
};

template <class T>
struct EditedItem;

// A row after edits: what the mask allows of it, with the logits that bias and history have changed
// in their places.
template <class T>
struct EditedRow {
  using Layout = float;
  const T* elements;           // as sent
  const uint32_t* mask;        // null: all are allowed
  const EditedTokens* tokens;  // null: no logits were changed
  const float* values;

  __device__ float operator[](int i) const {
    if (mask != nullptr && (mask[i / 32] >> i % 32 & 1) == 0) return -kInfinity;
    if (tokens != nullptr) {
      const EditedTokens here = tokens[i / 32];
      if ((here.bits >> i % 32 & 1) != 0) return values[here.ValueAt(i % 32)];
    }
    return ToFloat(elements[i]);
  }
  // The logits of tokens [i, i + 4), i a multiple of 4, as words; -inf from i + valid on.
  __device__ uint4 Four(int i, int valid) const {
    constexpr uint32_t kNothing = 0xff800000u;
    uint32_t words[4] = {kNothing, kNothing, kNothing, kNothing};
    uint32_t allowed = (1u << max(0, min(valid, 4))) - 1;
    if (mask != nullptr && allowed != 0) allowed &= mask[i / 32] >> i % 32;
    if (allowed == 0) return {kNothing, kNothing, kNothing, kNothing};
    EditedTokens here{};
    if (tokens != nullptr) here = tokens[i / 32];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if ((allowed >> e & 1) != 0) words[e] = __float_as_uint(ToFloat(elements[i + e]));
    }
    const uint32_t changed = here.bits >> i % 32 & allowed;
    if (changed != 0) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if ((changed >> e & 1) != 0) words[e] = __float_as_uint(values[here.ValueAt(i % 32 + e)]);
      }
    }
    return {words[0], words[1], words[2], words[3]};
  }
  __device__ EditedItem<T> Item(const Part& part) const {
    return {*this, part.begin, part.elements()};
  }
  __device__ void ReadCell(int first, int end, bool low, bool high, LaneCell<float>& x) const {
    constexpr int kVectors = kLaneElements / 4;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int i = first + CellIndex<float>(threadIdx.x % 32, 4 * v);
      x.SetVector(v, Four(i, (2 * v < kVectors ? low : high) ? end - i : 0));
    }
  }
};

// As SentItem.
template <class T>
struct EditedItem {
  using Layout = float;
  EditedRow<T> row;
  int begin;
  int count;

  __device__ uint4 Load(int index, int valid) const { return row.Four(begin + index, valid); }
};

// The row after edits: as sent where there are none.
template <class T, bool kMayBeEdited>
class Logits {
 public:
  static constexpr bool kEditable = kMayBeEdited;

  __device__ Logits(const T* as_sent, int count) : sent(as_sent), vocab(count) {}

  const T* sent;
  int vocab;

  // As the members of EditedRow.
  __device__ void SetEdits(const uint32_t* mask, const EditedTokens* tokens, const float* values) {
    is_edited_ = true;
    edited_ = {sent, mask, tokens, values};
  }
  __device__ const EditedRow<T>& Edited() const { return edited_; }

  // Returns visit(row), with a SentRow or an EditedRow.
  template <class Visit>
  __device__ auto Visited(Visit visit) const {
    if constexpr (kEditable) {
      if (is_edited_) return visit(edited_);
    }
    return visit(SentRow<T>{sent});
  }

  __device__ float operator[](int i) const {
    return Visited([=](const auto& row) { return row[i]; });
  }

  // Calls visit(x, first) for the cell at `first`: x is the lane's part of it, -inf beyond the row.
  template <class Visit>
  __device__ void Cell(int first, Visit visit) const {
    Visited([&]<class Source>(const Source& row) {
      LaneCell<typename Source::Layout> x;
      row.ReadCell(first, vocab, true, true, x);
      visit(x, first);
    });
  }
  // The same for every cell that is the warp's. The next one is under way while one is visited.
  template <class Visit>
  __device__ void EachCell(Visit visit) const {
    Visited([&]<class Source>(const Source& row) {
      const int round = static_cast<int>(blockDim.x) / 32 * kCell;
      int first = static_cast<int>(threadIdx.x) / 32 * kCell;
      LaneCell<typename Source::Layout> x;
      LaneCell<typename Source::Layout> next;
      if (first < vocab) row.ReadCell(first, vocab, true, true, next);
#pragma unroll 1
      for (; first < vocab; first += round) {
        x = next;
        if (first + round < vocab) row.ReadCell(first + round, vocab, true, true, next);
        visit(x, first);
      }
    });
  }
  // Calls visit(x, i) for the lane's elements of those cells.
  template <class Visit>
  __device__ void Each(Visit visit) const {
    EachCell([&]<class Element>(const LaneCell<Element>& x, int first) {
#pragma unroll
      for (int e = 0; e < kLaneElements; ++e)
        visit(x[e], first + CellIndex<Element>(threadIdx.x % 32, e));
    });
  }

 private:
  bool is_edited_ = false;
  EditedRow<T> edited_ = {};
};

// ---- the list ----------------------------------------------------------------------------------

// Leaves the first `count` <= kListed tokens of the row just read in s.sorted of the first block,
// in order. Then all that the cluster's blocks wrote there is there. `stream` is what the row was
// read with. Called by all threads after a barrier; ends with a barrier passed.
template <class Block, class Row, class Stream>
__device__ inline void List(const Row& row, const Part& part,
                            const typename Block::Pool::Sketch* sketch, float lane_best, int count,
                            Stream& stream) {
  using Shape = typename Block::Pool;
  constexpr int kThreads = Block::kThreads;
  DrawShared& s = Finish().draw;
  auto& pool = Pool<Shape>();
  GatherItem<Block>(row.Item(part), part, sketch, lane_best, count, stream);
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
