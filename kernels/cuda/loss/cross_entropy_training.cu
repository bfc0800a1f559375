// cross_entropy_training: a row stays in shared memory between its loss and its gradient: one read,
// one write.
//
// A block, or a cluster of up to 8 for a longer row, holds the row's cells. It sums them as
// cross_entropy does (cell_sums.cuh), one warp merges them and writes the answers, and all warps
// write the gradient from shared memory. Each cell's place is filled with the next row's as soon as
// it has been read for the last time, so that a row is read while the one before it is written.
// Blocks stay for many rows; two or three of them share a multiprocessor, so that one row's merge
// runs during another's copies.
//
//   reading    a warp takes cells of 1024 logits from its ring of copies and leaves their sums in
//              every block of the cluster
//   merging    one warp of every block merges them all: the blocks need not wait for an answer
//   writing    vectors of 16 bytes, aligned as the output is; a row's few elements before and
//              after them one by one
//
// Rows longer than a cluster holds (393,216 tokens of 16 bits, 196,608 of f32; without clusters
// 49,152 and 24,576) and calls with top tokens take cross_entropy's and its backward's kernels one
// after the other.
//
// Cost: reads rows * vocab * sizeof(T) once and writes as much: the floor is a copy. Limited by: HBM
// for f32; for 16 bits also by about 12 instructions and two ex2 an element, at 24 warps a
// multiprocessor. With a softcap, about 40 instructions an element, it takes longer than the two
// calls. Rows of a few cells are limited by what a row costs besides its elements.
// Measured: bench/results/h100/cross_entropy_training.json, beside the two calls.
// Tried and dropped, on an H100: 4 blocks a multiprocessor with 64 registers (4 to 14% slower:
// spills); 4 warps with twice the cells each (0 to 7%; f32 1 to 3% faster); Gradient::At for all rows
// (8 to 14%). All loops in one function, and a barrier of the cluster to exchange sums (together 8%
// at 32000 tokens, 13% at 128256): spills find no room in L1 beside the rows, and the barrier waits
// for the gradients' writes.
#include "kernels/cuda/loss/cross_entropy_training.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>

#include "kernels/cuda/dispatch.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/loss/cell_sums.cuh"
#include "kernels/cuda/loss/loss_row.cuh"
#include "kernels/cuda/loss/quick_gradient.cuh"
#include "kernels/cuda/ops.h"
#include "kernels/cuda/rows/cluster_blocks.h"
#include "kernels/cuda/rows/cluster_inbox.cuh"
#include "kernels/cuda/rows/clusters_at_once.h"
#include "kernels/cuda/rows/row_block.cuh"

namespace logitd::cuda {
namespace {

struct Params {
  CrossEntropyTrainingArgs args;
  int32_t cells;   // of a row
  int32_t blocks;  // of a row's cluster
};

constexpr int kMostWarps = 8;
constexpr int kResident = 3;

// ---- a block's shared memory -------------------------------------------------------------------

// What the gradients of a row's elements share.
template <class T>
struct alignas(16) RowGradient {
  int target;
  float upstream;
  float target_logit;
  float of_target;
  Gradient exact;
  PlainGradient plain;
  CappedGradient capped;
  MildTanh<T> tanh;
};

// A row that is merged, until its answers are written.
struct Merged {
  ClusterInbox inbox;  // of the row's cells and its target's logit
  Outcome outcome;
  double log_of_sum;
  RowSums sums;
  float target_logit;
  int nan;  // as KnownCell's, of the row
};

// A cell as every block of the cluster knows it.
struct alignas(8) KnownCell {
  CellSums sums;
  int32_t nan;  // where the sum is NaN: the lowest index of one in the row; vocab: none in the cell
};
static_assert(sizeof(KnownCell) == 24);

template <class T, int kStages>
struct BlockMemory {
  Merged* merged;
  RowGradient<T>* gradient;
  KnownCell* cells;                               // [of the row]
  typename CellRing<T, kStages>::Storage* rings;  // [warps]

  __device__ static BlockMemory Of() {
    extern __shared__ __align__(128) uint4 dynamic[];
    auto* rings = reinterpret_cast<typename CellRing<T, kStages>::Storage*>(dynamic);
    auto* merged = reinterpret_cast<Merged*>(rings + blockDim.x / 32);
    auto* gradient = reinterpret_cast<RowGradient<T>*>(merged + 1);
    return {merged, gradient, reinterpret_cast<KnownCell*>(gradient + 1), rings};
  }
  static int Bytes(int warps, int blocks) {
    return static_cast<int>(warps * sizeof(typename CellRing<T, kStages>::Storage) +
                            sizeof(Merged) + sizeof(RowGradient<T>) +
                            blocks * warps * kStages * sizeof(KnownCell));
  }
};

// ---- a warp's cells ----------------------------------------------------------------------------

// A warp's cells of a row, from the copies' begin until they are written.
template <class T, int kStages>
class HeldCells {
 public:
  using Ring = CellRing<T, kStages>;

  __device__ HeldCells(const BlockMemory<T, kStages>& memory, const Part& part, int vocab)
      : ring_(memory.rings[threadIdx.x / 32], static_cast<int>(threadIdx.x % 32)),
        lane_(threadIdx.x % 32),
        begin_(part.begin + static_cast<int>(threadIdx.x) / 32 * kCell),
        end_(part.end),
        step_(static_cast<int>(blockDim.x) / 32 * kCell),
        vocab_(vocab) {}

  // Begins the copies of a row's cells.
  __device__ void Fill(const T* row) {
    ring_.Restart();
#pragma unroll
    for (int s = 0; s < kStages; ++s) Push(row, s);
  }

  // Sums the cells of a row: store(i, sums, nan) by all lanes for its cell i, and store_target(logit)
  // where the target is among them.
  template <Summing kSumming, class Store, class StoreTarget>
  __device__ void Sum(const T* row, const CellAsk& ask, int target, Store store,
                      StoreTarget store_target) {
    LaneCell<T> x;
    RankCounter<T> rank(ask.target, ask.target_logit);
    int nan = vocab_;
#pragma unroll 1
    for (int first = begin_; first < end_; first += step_) {
      ring_.Pop(row + first, end_ - first, x);
      if (target >= first && target < first + kCell)
        store_target(ToFloat(ring_.Cell(row + first)[target - first]));
      ring_.PushNothing();
      const float lane_max = x.Max(0, kLaneElements);
      if constexpr (kSumming != Summing::kPlain) {
        if (ask.target >= 0) rank.Add(x, first, lane_);
      }
      CellSums sums = SumCell<kSumming, T>(x, lane_max, ask, first, end_, lane_);
      if (isnan(sums.stats.sum)) nan = NanOf(x, first);
      if constexpr (kSumming != Summing::kPlain) {
        if (ask.target >= 0 && first + step_ >= end_) sums.before = rank.Total();
      }
      store(first / kCell, sums, nan);
    }
  }

  // Instead of Sum: the row is not needed.
  __device__ void Abandon() {
    WaitAsync<0>();
    __syncwarp();
  }

  // Writes the gradients at(logit, is_target) of the logits, brought in order by prepare(word), and
  // begins the copies of the next row's cells; null: there is none.
  template <class Prepare, class At>
  __device__ void Write(const T* row, T* to, const T* next, Prepare prepare, At at, int target,
                        float of_target) {
    const bool alike =
        ((reinterpret_cast<uintptr_t>(row) ^ reinterpret_cast<uintptr_t>(to)) & 15) == 0;
    const T* cell = ring_.Row(row + begin_);
    ring_.Restart();
#pragma unroll 1
    for (int s = 0; s < kStages; ++s, cell = After(cell)) {
      const int first = begin_ + s * step_;
      if (first < end_) {
        const Stretch stretch = StretchOf(to + first, first, alike);
        WriteStretch(cell, to + first, stretch, alike, prepare, at);
        __syncwarp();
        // It overwrites what the stretch has left there.
        if (lane_ == 0 && target >= first + stretch.begin && target < first + stretch.end)
          to[target] = FromFloat<T>(of_target);
        Push(next, s);
      } else {
        ring_.PushNothing();
      }
    }
  }

 private:
  static constexpr int kVectors = kLaneElements / kVector<T>;

  // What a warp writes of a cell, in elements from the cell's first. Where input and output are
  // aligned alike, a vector on a cell's border belongs to the later cell, whose copy has all of it.
  struct Stretch {
    int begin;
    int first_vector;
    int vectors;
    int end;
  };
  __device__ static const T* After(const T* cell) {
    return reinterpret_cast<const T*>(reinterpret_cast<const char*>(cell) + Ring::kCellBytes);
  }

  __device__ void Push(const T* row, int s) {
    const int first = begin_ + s * step_;
    if (row == nullptr || first >= end_) return ring_.PushNothing();
    ring_.Push(row + first, end_ - first);
  }

  __device__ Stretch StretchOf(const T* to, int first, bool alike) const {
    const int misaligned = static_cast<int>((reinterpret_cast<uintptr_t>(to) & 15) / sizeof(T));
    const int left = vocab_ - first;
    Stretch stretch;
    stretch.begin = alike && first > 0 ? -misaligned : 0;
    stretch.end = left <= kCell ? left : alike ? kCell - misaligned : kCell;
    stretch.first_vector =
        min(stretch.end,
            stretch.begin == 0 && misaligned != 0 ? kVector<T> - misaligned : stretch.begin);
    stretch.vectors = (stretch.end - stretch.first_vector) / kVector<T>;
    return stretch;
  }

  // `cell` and `to` are of the cell's first element, in shared and in device memory.
  template <class Prepare, class At>
  __device__ void WriteStretch(const T* cell, T* to, const Stretch& stretch, bool alike,
                               Prepare prepare, At at) const {
    const int first = stretch.first_vector + lane_ * kVector<T>;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (lane_ + 32 * v >= stretch.vectors) continue;
      const int i = first + 32 * v * kVector<T>;
      const uint4 vector = LoadVector(cell + i, alike, kVector<T>);
      const uint32_t words[4] = {prepare(vector.x), prepare(vector.y), prepare(vector.z),
                                 prepare(vector.w)};
      __stcs(reinterpret_cast<uint4*>(to + i), GradientsOf<T>(words, /*place=*/-1, at));
    }
    // The elements before and after the vectors.
    const bool before = lane_ < kVector<T>;
    const int after_vectors = stretch.first_vector + stretch.vectors * kVector<T>;
    const int i = before ? stretch.begin + lane_ : after_vectors + lane_ - kVector<T>;
    if (before ? i < stretch.first_vector : lane_ < 2 * kVector<T> && i < stretch.end) {
      const uint32_t word = prepare(WordOf(cell[i]));
      to[i] = FromFloat<T>(at(WordElement<T>(&word, 0), false));
    }
  }

  // The lowest index of a NaN in the cell at `first`; vocab where it has none.
  __device__ int NanOf(const LaneCell<T>& x, int first) const {
    int nan = vocab_;
#pragma unroll
    for (int e = 0; e < kLaneElements; ++e) {
      if (isnan(x[e])) nan = min(nan, first + CellIndex<T>(lane_, e));
    }
    return __reduce_min_sync(kFullWarp, nan);
  }

  Ring ring_;
  const int lane_;
  const int begin_;
  const int end_;
  const int step_;
  const int vocab_;
};

// ---- stages of a row ---------------------------------------------------------------------------

// The loops over cells are functions of their own, and so are the merge and the answers: each has all
// registers of a thread.

template <class T>
__device__ inline const T* RowOf(const Params& p, int64_t r) {
  return static_cast<const T*>(p.args.loss.logits.data) + r * p.args.loss.logits.row_stride;
}

// Sums the warp's cells of a row for every block of the cluster.
template <class T, int kStages, Summing kSumming>
__device__ __noinline__ void SumCells(const Params& p, int64_t r, Part part, CellAsk ask,
                                      int target) {
  const auto memory = BlockMemory<T, kStages>::Of();
  const int lane = threadIdx.x % 32;
  // Leaves a value at `here` in every block, by a lane for each.
  const auto leave = [&](auto* here, const auto& value) {
    if (lane >= part.blocks) return;
    if (part.blocks == 1) {
      *here = value;
    } else {
      uint32_t words[sizeof(value) / 4];
      memcpy(words, &value, sizeof(value));
      memory.merged->inbox.Send(here, words, lane);
    }
  };
  HeldCells<T, kStages> cells(memory, part, static_cast<int>(p.args.loss.logits.cols));
  cells.template Sum<kSumming>(
      RowOf<T>(p, r), ask, target,
      [&](int i, const CellSums& sums, int nan) {
        leave(memory.cells + i, KnownCell{sums, nan});
      },
      [&](float logit) { leave(&memory.gradient->target_logit, logit); });
}

template <class T, int kStages>
__device__ inline void SumRow(const Params& p, int64_t r, const Part& part, const CellAsk& ask,
                              int target) {
  switch (SummingOf(ask)) {
    case Summing::kPlain:
      return SumCells<T, kStages, Summing::kPlain>(p, r, part, ask, target);
    case Summing::kWithRankOrTotal:
      return SumCells<T, kStages, Summing::kWithRankOrTotal>(p, r, part, ask, target);
    case Summing::kWeighted:
      return SumCells<T, kStages, Summing::kWeighted>(p, r, part, ask, target);
    case Summing::kMildlyCapped:
      return SumCells<T, kStages, Summing::kMildlyCapped>(p, r, part, ask, target);
    case Summing::kCapped:
      return SumCells<T, kStages, Summing::kCapped>(p, r, part, ask, target);
  }
  __builtin_unreachable();
}

// Leaves the logits of the row's extra ids in the place of their answers, by one warp: a gradient in
// place overwrites them before the answers are known.
template <class T>
__device__ inline void KeepExtras(const CrossEntropyArgs& args, const CrossEntropyRow& ask,
                                  const T* row) {
  for (int i = static_cast<int>(threadIdx.x % 32); i < ask.extra_count; i += 32) {
    args.answers.extra_logprobs[ask.first_extra_entry + i] =
        ToFloat(row[args.extra_ids[ask.first_extra + i]]);
  }
}
// Makes answers of them, by the same lanes.
__device__ inline void WriteExtras(const CrossEntropyArgs& args, const CrossEntropyRow& ask,
                                   const Outcome& outcome) {
  for (int i = static_cast<int>(threadIdx.x % 32); i < ask.extra_count; i += 32) {
    float* logprob = args.answers.extra_logprobs + ask.first_extra_entry + i;
    *logprob = static_cast<float>(outcome.Logprob(*logprob));
  }
}

// Merges a row's cells and leaves what its answers and its gradient need, by one warp.
template <class T, int kStages>
__device__ __noinline__ void MergeRow(const Params& p, int64_t r) {
  const auto memory = BlockMemory<T, kStages>::Of();
  const int lane = threadIdx.x % 32;
  const KnownCell* cells = memory.cells;
  const CrossEntropyRow& ask = p.args.loss.rows[r];
  const int32_t vocab = static_cast<int32_t>(p.args.loss.logits.cols);
  const float log2e_over_temperature = Log2EOverTemperature(ask.softcap, ask.temperature);
  const RowSums sums =
      cuda::MergeRow(p.cells, log2e_over_temperature, lane, [=](int i) { return cells[i].sums; });
  int nan = vocab;
  if (isnan(sums.stats.sum)) {
    for (int i = lane; i < p.cells; i += 32) {
      if (isnan(cells[i].sums.stats.sum)) nan = min(nan, cells[i].nan);
    }
    nan = __reduce_min_sync(kFullWarp, nan);
  }
  if (lane != 0) return;
  const double log_of_sum = log(static_cast<double>(sums.stats.sum));
  const Outcome outcome = OutcomeOf(ask, sums.stats, log_of_sum);
  RowGradient<T>& gradient = *memory.gradient;
  const float logit = ask.target < 0 ? 0.0f : gradient.target_logit;
  Merged& merged = *memory.merged;
  merged.outcome = outcome;
  merged.log_of_sum = log_of_sum;
  merged.sums = sums;
  merged.target_logit = logit;
  merged.nan = nan;
  gradient.target = ask.target;
  if (ask.target < 0) return;
  const Gradient exact =
      Gradient::Of(ask, static_cast<float>(outcome.LogSumExp()), gradient.upstream, vocab);
  gradient.exact = exact;
  gradient.plain = PlainGradient::Of(exact);
  gradient.capped = CappedGradient::Of(exact, ask.softcap);
  if (ask.softcap > 0) gradient.tanh = MildTanh<T>::Of(ask.softcap);
  gradient.of_target = exact.cap.on() ? exact.At<true>(logit, true) : exact.At<false>(logit, true);
}

// Writes the answers of a merged row, by one warp.
template <class T, int kStages>
__device__ __noinline__ void AnswerRow(const Params& p, int64_t r) {
  const Merged& merged = *BlockMemory<T, kStages>::Of().merged;
  WriteExtras(p.args.loss, p.args.loss.rows[r], merged.outcome);
  if (threadIdx.x % 32 != 0) return;
  WriteAnswers(p.args.loss, r, merged.sums, merged.log_of_sum, merged.outcome, merged.target_logit,
               merged.nan);
}

// How a row's gradient is written.
enum class Writing { kNot, kZeros, kPlain, kExact, kExactCapped, kCapped };

template <class T>
__device__ inline Writing WritingOf(bool active, const RowGradient<T>& gradient) {
  if (!active) return Writing::kNot;
  if (gradient.target < 0) return Writing::kZeros;
  if (gradient.plain.serves) return Writing::kPlain;
  if (!gradient.exact.cap.on()) return Writing::kExact;
  return gradient.capped.serves ? Writing::kCapped : Writing::kExactCapped;
}

// Writes the gradient of the warp's cells of row r, and begins the copies of row `next`, if there is
// one.
template <class T, int kStages, Writing kWriting>
__device__ __noinline__ void WriteCells(const Params& p, int64_t r, int64_t next, Part part) {
  const auto memory = BlockMemory<T, kStages>::Of();
  const TensorView& logits = p.args.loss.logits;
  HeldCells<T, kStages> cells(memory, part, static_cast<int>(logits.cols));
  const T* next_row = next < logits.rows ? RowOf<T>(p, next) : nullptr;
  if constexpr (kWriting == Writing::kNot) {
    cells.Abandon();
    return cells.Fill(next_row);
  }
  T* to = static_cast<T*>(p.args.d_logits.data) + r * p.args.d_logits.row_stride;
  const auto write = [&](auto prepare, auto at) {
    const int target = kWriting == Writing::kZeros ? kIgnoredTarget : memory.gradient->target;
    cells.Write(RowOf<T>(p, r), to, next_row, prepare, at, target, memory.gradient->of_target);
  };
  const auto as_is = [](uint32_t word) { return word; };
  if constexpr (kWriting == Writing::kZeros) {
    write(as_is, [](float, bool) { return 0.0f; });
  } else if constexpr (kWriting == Writing::kPlain) {
    const PlainGradient plain = memory.gradient->plain;
    write(as_is, [&](float logit, bool) { return plain.At(logit); });
  } else if constexpr (kWriting == Writing::kCapped) {
    const CappedGradient capped = memory.gradient->capped;
    const MildTanh<T> tanh = memory.gradient->tanh;
    write([&](uint32_t word) { return tanh.Bounded(word); },
          [&](float logit, bool) { return capped.At(tanh.OfBounded(logit)); });
  } else {
    const Gradient exact = memory.gradient->exact;
    write(as_is, [&](float logit, bool) {
      return exact.At<kWriting == Writing::kExactCapped>(logit, false);
    });
  }
}

template <class T, int kStages>
__device__ inline void WriteRow(const Params& p, int64_t r, int64_t next, const Part& part,
                                Writing writing) {
  switch (writing) {
    case Writing::kNot:
      return WriteCells<T, kStages, Writing::kNot>(p, r, next, part);
    case Writing::kZeros:
      return WriteCells<T, kStages, Writing::kZeros>(p, r, next, part);
    case Writing::kPlain:
      return WriteCells<T, kStages, Writing::kPlain>(p, r, next, part);
    case Writing::kExact:
      return WriteCells<T, kStages, Writing::kExact>(p, r, next, part);
    case Writing::kExactCapped:
      return WriteCells<T, kStages, Writing::kExactCapped>(p, r, next, part);
    case Writing::kCapped:
      return WriteCells<T, kStages, Writing::kCapped>(p, r, next, part);
  }
  __builtin_unreachable();
}

// ---- the kernel --------------------------------------------------------------------------------

// Copies 4 bytes into shared memory asynchronously.
__device__ inline void CopyAsync4(void* shared, const void* global) {
  const uint32_t to = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(global) : "memory");
}

__device__ inline void PrefetchToL2(const void* global) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(global));
}

// Clusters take every teams-th row.
template <class T, int kStages>
__global__ void __launch_bounds__(kMostWarps * 32, kResident)
    TrainingKernel(const __grid_constant__ Params p) {
  const int warp = threadIdx.x / 32;
  const CrossEntropyArgs& loss = p.args.loss;
  const int32_t vocab = static_cast<int32_t>(loss.logits.cols);
  const int teams = static_cast<int>(gridDim.x) / p.blocks;
  const int team = static_cast<int>(blockIdx.x) / p.blocks;
  const Part part =
      Part::Of(static_cast<int>(blockIdx.x) - team * p.blocks, p.blocks, p.cells, vocab);
  const auto memory = BlockMemory<T, kStages>::Of();
  if (p.blocks > 1) {
    if (threadIdx.x == 0) memory.merged->inbox.Open();
    ClusterArrive();
  }
  HeldCells<T, kStages>(memory, part, vocab).Fill(RowOf<T>(p, team));
  int round = 0;  // of the inbox
#pragma unroll 1
  for (int64_t r = team; r < loss.logits.rows; r += teams) {
    const CrossEntropyRow& ask = loss.rows[r];
    const bool active = ask.active != 0;
    // All blocks have begun, or merged the row before: they are ready to get the row's cells.
    if (p.blocks > 1) ClusterWait();
    if (active) {
      if (threadIdx.x == 0) {
        CopyAsync4(&memory.gradient->upstream, p.args.upstream + r);
        const size_t bytes = p.cells * sizeof(KnownCell) + (ask.target >= 0 ? sizeof(float) : 0);
        if (p.blocks > 1) memory.merged->inbox.Expect(static_cast<int>(bytes));
      }
      const int ranked = (ask.want & kWantRank) != 0 ? ask.target : kIgnoredTarget;
      const CellAsk cell_ask{
          .target = ranked,
          .target_logit = ranked >= 0 ? ToFloat(RowOf<T>(p, r)[ranked]) : 0.0f,
          .weighted = (ask.want & kWantEntropy) != 0,
          .total = ask.label_smoothing > 0,
          .softcap = ask.softcap,
          .log2e_over_temperature = Log2EOverTemperature(ask.softcap, ask.temperature)};
      if (warp == 0 && part.block == 0) KeepExtras(loss, ask, RowOf<T>(p, r));
      SumRow<T, kStages>(p, r, part, cell_ask, ask.target);
      if (p.blocks == 1) __syncthreads();
      if (warp == 0) {
        if (p.blocks > 1) memory.merged->inbox.Wait(round);
        WaitAsync<0>();  // for upstream
        MergeRow<T, kStages>(p, r);
      }
      ++round;
      __syncthreads();
      if (warp == 0 && part.block == 0) AnswerRow<T, kStages>(p, r);
    }
    const int64_t next = r + teams;
    if (next < loss.logits.rows) {
      if (p.blocks > 1) ClusterArriveEmpty();
      PrefetchToL2(loss.rows + next);
    }
    WriteRow<T, kStages>(p, r, next, part, WritingOf(active, *memory.gradient));
  }
  WaitAsync<0>();
}

// ---- launch ------------------------------------------------------------------------------------

// The shape of a launch; no threads: a row does not fit into a cluster.
template <class T, int kStages>
LaunchShape ShapeOf(Params& p, const Scratch& scratch) {
  const int64_t rows = p.args.loss.logits.rows;
  p.blocks = static_cast<int32_t>(CeilDiv(p.cells, kMostWarps * kStages));
  int64_t stages = kStages;
  if (scratch.clusters && rows <= scratch.multiprocessors) {
    // More blocks and warps end a row sooner.
    p.blocks = std::max(p.blocks, std::min(p.cells, ClusterBlocksAtOnce(rows, scratch)));
    stages = 1;
  }
  const int64_t part = CeilDiv(p.cells, p.blocks);
  const int warps = static_cast<int>(std::min<int64_t>(kMostWarps, CeilDiv(part, stages)));
  const LaunchShape shape{.threads = warps * 32,
                          .cluster = p.blocks,
                          .shared_bytes = BlockMemory<T, kStages>::Bytes(warps, p.blocks),
                          .most_shared_bytes = scratch.block_shared_bytes};
  const bool fits = p.blocks <= (scratch.clusters ? kMaxClusterBlocks : 1) &&
                    shape.shared_bytes <= scratch.block_shared_bytes;
  return fits ? shape : LaunchShape{};
}

// ClustersAtOnce, asked once for every shape of a device.
template <class T, int kStages>
cudaError_t TeamsAtOnce(const LaunchShape& shape, const Scratch& scratch, int* teams) {
  constexpr int kDevices = 64;
  static std::array<std::array<std::array<std::atomic<int>, kMaxClusterBlocks>, kMostWarps>,
                    kDevices>
      known;
  int device = 0;
  if (const cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
  std::atomic<int>& of_shape = known[device % kDevices][shape.threads / 32 - 1][shape.cluster - 1];
  *teams = of_shape.load(std::memory_order_relaxed);
  if (*teams > 0 && device < kDevices) return cudaSuccess;
  const cudaError_t error = ClustersAtOnce(
      reinterpret_cast<const void*>(&TrainingKernel<T, kStages>), shape, scratch, teams);
  of_shape.store(*teams, std::memory_order_relaxed);
  return error;
}

template <class T, int kStages>
cudaError_t Launch(const Params& p, LaunchShape shape, const Scratch& scratch,
                   cudaStream_t stream) {
  int teams = 0;
  const cudaError_t error = TeamsAtOnce<T, kStages>(shape, scratch, &teams);
  if (error != cudaSuccess) return error;
  if (teams == 0) return cudaErrorNotSupported;
  shape.grid = GridFor(std::min<int64_t>(teams, p.args.loss.logits.rows) * p.blocks);
  return LaunchKernel(&TrainingKernel<T, kStages>, shape, stream, p);
}

}  // namespace

cudaError_t CrossEntropyTraining(const CrossEntropyTrainingArgs& args, const Scratch& scratch,
                                 cudaStream_t stream) {
  const CrossEntropyArgs& loss = args.loss;
  if (loss.logits.rows == 0) return cudaSuccess;
  if (loss.max_top_logprobs == 0) {
    Params p{.args = args, .cells = static_cast<int32_t>(CeilDiv(loss.logits.cols, kCell))};
    bool launched = false;
    const cudaError_t error = VisitDType(loss.logits.dtype, [&]<class T>() {
      constexpr int kStages = sizeof(T) == 4 ? 2 : 4;
      constexpr int kMoreStages = sizeof(T) == 4 ? 3 : 6;  // two blocks on a multiprocessor
      if (const LaunchShape shape = ShapeOf<T, kStages>(p, scratch); shape.threads > 0) {
        launched = true;
        return Launch<T, kStages>(p, shape, scratch, stream);
      }
      if (const LaunchShape shape = ShapeOf<T, kMoreStages>(p, scratch); shape.threads > 0) {
        launched = true;
        return Launch<T, kMoreStages>(p, shape, scratch, stream);
      }
      return cudaSuccess;
    });
    if (launched) return error;
  }
  const cudaError_t error = CrossEntropy(loss, scratch, stream);
  return error != cudaSuccess ? error : CrossEntropyBackward(args.Backward(), stream);
}

}  // namespace logitd::cuda
