// What kernels of cross_entropy_training share: a warp holds cells of a row in shared memory, sums them,
// and writes their gradients over what the next row's cells are copied to.
#ifndef LOGITD_KERNELS_CUDA_LOSS_HELD_CELLS_CUH_
#define LOGITD_KERNELS_CUDA_LOSS_HELD_CELLS_CUH_

#include <cstdint>
#include <type_traits>

#include "kernels/cross_entropy_training.h"
#include "kernels/cuda/loss/cell_sums.cuh"
#include "kernels/cuda/loss/loss_row.cuh"
#include "kernels/cuda/loss/quick_gradient.cuh"
#include "kernels/cuda/loss/softcap.cuh"
#include "kernels/cuda/rows/ring.cuh"

namespace logitd::cuda {

template <class T>
__device__ inline const T* RowOf(const CrossEntropyTrainingArgs& args, int64_t r) {
  return static_cast<const T*>(args.loss.logits.data) + r * args.loss.logits.row_stride;
}

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

// Fills in all of a row's gradient except its target's logit, which is there where it has a target.
template <class T>
__device__ inline void FillIn(RowGradient<T>& gradient, const CrossEntropyRow& ask,
                              const Outcome& outcome, float upstream, int64_t vocab) {
  gradient.target = ask.target;
  if (ask.target < 0) return;
  const float logit = gradient.target_logit;
  const Gradient exact =
      Gradient::Of(ask, static_cast<float>(outcome.LogSumExp()), upstream, vocab);
  gradient.exact = exact;
  gradient.plain = PlainGradient::Of(exact);
  gradient.capped = CappedGradient::Of(exact, ask.softcap);
  if (ask.softcap > 0) gradient.tanh = MildTanh<T>::Of(ask.softcap);
  gradient.of_target = exact.cap.on() ? exact.At<true>(logit, true) : exact.At<false>(logit, true);
}

// A cell's sums, and where it has a NaN.
struct alignas(8) KnownCell {
  CellSums sums;
  int32_t nan;  // where the sum is NaN: the lowest index of one in the row; vocab: none in the cell
};
static_assert(sizeof(KnownCell) == 24);

// A warp's cells of a row, from the copies' begin until they are written. They have `turns` places of
// the warp's ring, from first_place on; an object is for one pass over them. The cells begin at
// `begin` and every `step` elements after it.
template <class T, int kStages>
class HeldCells {
 public:
  using Ring = CellRing<T, kStages>;

  struct Places {
    int first_place;
    int turns;
    int begin;
    int step;
    int end;
  };

  __device__ HeldCells(typename Ring::Storage& storage, const Places& at, int vocab)
      // A ring that begins at the first place, and never gets to the end of the warp's ring.
      : ring_(reinterpret_cast<typename Ring::Storage&>(storage.slots[at.first_place]),
              static_cast<int>(threadIdx.x % 32)),
        lane_(threadIdx.x % 32),
        at_(at),
        vocab_(vocab) {}

  // Begins the copies of a row's cells.
  __device__ void Fill(const T* row) {
#pragma unroll
    for (int s = 0; s < at_.turns; ++s) Push(row, s);
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
    for (int first = at_.begin; first < at_.end; first += at_.step) {
      ring_.Pop(row + first, at_.end - first, x);
      if (target >= first && target < first + kCell)
        store_target(ToFloat(ring_.Cell(row + first)[target - first]));
      ring_.PushNothing();
      const float lane_max = x.Max(0, kLaneElements);
      if constexpr (kSumming != Summing::kPlain) {
        if (ask.target >= 0) rank.Add(x, first, lane_);
      }
      CellSums sums = SumCell<kSumming, T>(x, lane_max, ask, first, at_.end, lane_);
      if (isnan(sums.stats.sum)) nan = NanOf(x, first);
      if constexpr (kSumming != Summing::kPlain) {
        if (ask.target >= 0 && first + at_.step >= at_.end) sums.before = rank.Total();
      }
      store(first / kCell, sums, nan);
    }
  }

  // Instead of Sum and Write: the row is not needed.
  __device__ void Skip(const T* next) {
    WaitAsync<0>();
    __syncwarp();
    Fill(next);
  }

  // Writes the gradients at(logit, is_target) of the logits, brought in order by prepare(word), and
  // begins the copies of the next row's cells; null: there is none.
  template <class Prepare, class At>
  __device__ void Write(const T* row, T* to, const T* next, Prepare prepare, At at, int target,
                        float of_target) {
    const bool alike =
        ((reinterpret_cast<uintptr_t>(row) ^ reinterpret_cast<uintptr_t>(to)) & 15) == 0;
    const T* cell = ring_.Row(row + at_.begin);
#pragma unroll 1
    for (int s = 0; s < at_.turns; ++s, cell = After(cell)) {
      const int first = at_.begin + s * at_.step;
      if (first < at_.end) {
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
    const int first = at_.begin + s * at_.step;
    if (row == nullptr || first >= at_.end) return ring_.PushNothing();
    ring_.PushShort(row + first, at_.end - first);
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
  const Places at_;
  const int vocab_;
};

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

// Writes the gradient of the warp's cells of row r, and begins the copies of row `next`, unless that is
// null.
template <Writing kWriting, class T, int kStages>
__device__ inline void WriteHeld(const CrossEntropyTrainingArgs& args, int64_t r, const T* next,
                                 const RowGradient<T>& gradient, HeldCells<T, kStages>& cells) {
  if constexpr (kWriting == Writing::kNot) return cells.Skip(next);
  T* to = static_cast<T*>(args.d_logits.data) + r * args.d_logits.row_stride;
  const auto write = [&](auto prepare, auto at) {
    const int target = kWriting == Writing::kZeros ? kIgnoredTarget : gradient.target;
    cells.Write(RowOf<T>(args, r), to, next, prepare, at, target, gradient.of_target);
  };
  const auto as_is = [](uint32_t word) { return word; };
  if constexpr (kWriting == Writing::kZeros) {
    write(as_is, [](float, bool) { return 0.0f; });
  } else if constexpr (kWriting == Writing::kPlain) {
    const PlainGradient plain = gradient.plain;
    write(as_is, [&](float logit, bool) { return plain.At(logit); });
  } else if constexpr (kWriting == Writing::kCapped) {
    const CappedGradient capped = gradient.capped;
    const MildTanh<T> tanh = gradient.tanh;
    write([&](uint32_t word) { return tanh.Bounded(word); },
          [&](float logit, bool) { return capped.At(tanh.OfBounded(logit)); });
  } else {
    const Gradient exact = gradient.exact;
    write(as_is, [&](float logit, bool) {
      return exact.At<kWriting == Writing::kExactCapped>(logit, false);
    });
  }
}

// Calls write(std::integral_constant<Writing, writing>).
template <class Write>
__device__ inline void VisitWriting(Writing writing, const Write& write) {
  switch (writing) {
    case Writing::kNot:
      return write(std::integral_constant<Writing, Writing::kNot>());
    case Writing::kZeros:
      return write(std::integral_constant<Writing, Writing::kZeros>());
    case Writing::kPlain:
      return write(std::integral_constant<Writing, Writing::kPlain>());
    case Writing::kExact:
      return write(std::integral_constant<Writing, Writing::kExact>());
    case Writing::kExactCapped:
      return write(std::integral_constant<Writing, Writing::kExactCapped>());
    case Writing::kCapped:
      return write(std::integral_constant<Writing, Writing::kCapped>());
  }
  __builtin_unreachable();
}
// The same for how a row's cells are summed.
template <class Sum>
__device__ inline void VisitSumming(Summing summing, const Sum& sum) {
  switch (summing) {
    case Summing::kPlain:
      return sum(std::integral_constant<Summing, Summing::kPlain>());
    case Summing::kWithRankOrTotal:
      return sum(std::integral_constant<Summing, Summing::kWithRankOrTotal>());
    case Summing::kWeighted:
      return sum(std::integral_constant<Summing, Summing::kWeighted>());
    case Summing::kMildlyCapped:
      return sum(std::integral_constant<Summing, Summing::kMildlyCapped>());
    case Summing::kMildlyCappedAll:
      return sum(std::integral_constant<Summing, Summing::kMildlyCappedAll>());
    case Summing::kCapped:
      return sum(std::integral_constant<Summing, Summing::kCapped>());
  }
  __builtin_unreachable();
}

__device__ inline void PrefetchToL2(const void* global) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(global));
}

}  // namespace logitd::cuda

#endif  // LOGITD_KERNELS_CUDA_LOSS_HELD_CELLS_CUH_
