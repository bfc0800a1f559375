// attention_softmax on the CPU. A row takes two passes; between them its weights lie in the
// thread's scratch, 4 MiB at most, where most rows stay in the first or second cache. Large results
// are written while the next row is weighed, which takes a second such memory: so stores past the
// caches and arithmetic do not wait for each other.
//
//   weigh:  the values x = scale * score + mask become weights 2^(x log2(e)), summed by cells of
//           1024 keys, counted from the first key the row sees, and over cells in double precision.
//           That is right where the total is neither large nor small, which is known at the end.
//           Otherwise the row is weighed again by cells, each against the exponent of its maximum:
//           2^(x log2(e) - n) with a whole n, so that the subtraction loses no digit of x; then all
//           cells are brought to one exponent. NaN and infinities are seen there.
//   write:  the weights are multiplied by one factor, rounded and stored, and zeros with them, each
//           line of memory once and in order.
//
// bf16 keeps even and odd keys apart, as LoadTwo takes them, up to the result. A scale that is a
// power of two is left to the product with log2(e). Results of 2 MiB and more pass the caches,
// except for lines that two rows share, which are prefetched.
//
// Cost at [16, 1024, 1024] f32: reads and writes 67 MB once each, which is the floor; causal rows
// 0.75 of that, as the zeros must be written.
//
// Limited by: memory for f32; by arithmetic for f16 and bf16, whose vector takes 14.5 operations on
// two ports (11 to weigh it, 3.5 to write it; 6 without AVX512_BF16); by latencies for rows of a
// few vectors. On an Intel Xeon the processor reads one stream so little ahead that arithmetic and
// waits for memory add up: so rows that are seen whole are prefetched 2 or 4 KiB ahead there
// (bench/results/cpu/attention_ahead.json).
//
// Measured: one thread of a Zen 4 at 3.7 GHz, 16 lanes, by processor time, GB/s of scores and
// results, where a bare copy past the caches moves 28: f32 35, causal 19.5; bf16 19.8, causal 18.4,
// under a bool mask 18.0, rows of 131072 16.8, odd rows 16.7. All cores:
// bench/results/cpu/attention.json.
//
// Tried and dropped: no prefetch of bf16's next row (1.3 times the time of causal rows); on Zen
// 4 one into the first cache for f32 (1.2 times); on Intel 2 KiB ahead for causal f32 (1.2
// times); powers of two by a polynomial of the fifth degree instead of a table of sixteenths
// (13% more); clamping x by integers (the same); weighing eight short rows before the first is
// written (on an Intel Xeon 12% less for 64 keys, the same for 128); the weigher's constants set
// up once for all rows (the same).
#include "kernels/cpu/attention/attention_softmax.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>

#if HWY_ARCH_X86
#include <xmmintrin.h>
#endif

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/attention/attention_softmax.cc"
#include "hwy/cache_control.h"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/cpu/attention/attention_rows.h"
#include "kernels/cpu/attention/weigh-inl.h"
#include "kernels/cpu/attention/write-inl.h"
#include "kernels/cpu/rows/lanes-inl.h"

#ifndef LOGITD_KERNELS_CPU_ATTENTION_SOFTMAX_ONCE_
#define LOGITD_KERNELS_CPU_ATTENTION_SOFTMAX_ONCE_

namespace logitd::cpu {

struct ForwardScratch {
  AlignedBuffer weights;
  Buffer<Cell> cells;
};

// While it lives, this thread's arithmetic takes subnormal numbers for 0 and writes 0 for them:
// computing one takes a hundred times as long as another number.
class SubnormalsAreZero {
 public:
#if HWY_ARCH_X86
  SubnormalsAreZero() : before_(_mm_getcsr()) { _mm_setcsr(before_ | 0x8040); }
  ~SubnormalsAreZero() { _mm_setcsr(before_); }
  SubnormalsAreZero(const SubnormalsAreZero&) = delete;
  SubnormalsAreZero& operator=(const SubnormalsAreZero&) = delete;

 private:
  unsigned before_;
#endif
};

}  // namespace logitd::cpu

#endif  // LOGITD_KERNELS_CPU_ATTENTION_SOFTMAX_ONCE_

HWY_BEFORE_NAMESPACE();
namespace logitd::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

inline bool IsMasked(const AttentionMask& mask, int64_t at) {
  if (mask.kind == MaskKind::kNone) return false;
  if (mask.kind == MaskKind::kBool) return static_cast<const uint8_t*>(mask.data)[at] != 0;
  return AsType(mask.dtype, mask.data, [&](const auto* values) {
    using T = std::remove_cvref_t<decltype(*values)>;
    return std::memcmp(values + at, &ElementBits<T>::kMinusInf, sizeof(T)) == 0;
  });
}

// Writes NaN for every key of the range that is not masked, zeros for the row's other keys.
// `mask_at`: the mask's element of the range's first key.
inline void WriteNan(const AttentionSoftmaxArgs& args, int64_t row, KeyRange seen,
                     int64_t mask_at) {
  const MutableTensorView& probs = args.probs;
  Zero(probs, row, 0, args.shape.keys);
  AsType(probs.dtype, At(probs.data, probs.dtype, row * probs.row_stride), [&](auto* to) {
    using T = std::remove_pointer_t<decltype(to)>;
    for (int64_t j = seen.begin; j < seen.end; ++j) {
      if (!IsMasked(args.mask, mask_at + j - seen.begin)) to[j] = FromBits<T>(ElementBits<T>::kNan);
    }
  });
}

// Weights times a factor, as WriteRow takes results.
template <bool kPairs, bool kByInstruction, typename Out>
class Scaled {
 public:
  HWY_INLINE Scaled(const RowWeights& weights, VF factor)
      : even_(weights.first), odd_(weights.first + weights.odd), factor_(factor) {}

  HWY_INLINE auto operator()(int64_t key) const { return From(key).Next(); }

  // From some key on, vector after vector. Where the key is odd, a word of two bf16 begins with the
  // odd keys' weights.
  class Cursor {
   public:
    HWY_INLINE Cursor(const float* a, const float* b, VF factor) : a_(a), b_(b), factor_(factor) {}
    HWY_INLINE auto Next() {
      const DF d;
      const VF a = hn::Mul(hn::LoadU(d, a_), factor_);
      a_ += hn::Lanes(d);
      if constexpr (kPairs) {
        const VF b = hn::Mul(hn::LoadU(d, b_), factor_);
        b_ += hn::Lanes(d);
#if HWY_TARGET <= HWY_AVX3
        if constexpr (kByInstruction) return RoundTwoByInstruction(a, b);
#endif
        return RoundTwo(d, a, b);
      } else if constexpr (std::is_same_v<Out, float>) {
        return a;
      } else {
        return RoundTo(Out(), d, a);
      }
    }

   private:
    const float* a_;
    const float* b_;
    VF factor_;
  };
  HWY_INLINE Cursor From(int64_t key) const {
    if constexpr (!kPairs) return {even_ + key, nullptr, factor_};
    const int64_t pair = key >> 1;
    if (key & 1) return {odd_ + pair, even_ + pair + 1, factor_};
    return {even_ + pair, odd_ + pair, factor_};
  }

 private:
  const float* even_;  // as they lie, where they are not apart
  const float* odd_;
  VF factor_;
};

// Calls write(results) for a row's weights times a factor.
template <bool kPairs, typename Out, class Write>
HWY_INLINE void WithScaled(const RowWeights& weights, float factor, bool by_instruction,
                           const Write& write) {
  const VF vfactor = hn::Set(DF(), factor);
  if constexpr (kPairs && HWY_TARGET <= HWY_AVX3) {
    if (by_instruction) return write(Scaled<kPairs, true, Out>(weights, vfactor));
  }
  write(Scaled<kPairs, false, Out>(weights, vfactor));
}

// A row that is written past the caches while the next one is weighed.
template <bool kPairs, typename Out>
class RowInFlight {
 public:
  RowInFlight() = default;  // nothing is left to write
  HWY_INLINE RowInFlight(const RowWeights& weights, float factor, bool by_instruction, Out* row,
                         int64_t keys, KeyRange seen)
      : weights_(weights),
        factor_(factor),
        by_instruction_(by_instruction),
        is_there_(true),
        stream_(row, keys, seen) {}

  // Cuts what is left into this many steps, if there are any.
  HWY_INLINE void Cut(int64_t steps) {
    if (steps == 0) return;
    per_step_ =
        (stream_.left() + steps * Stream::kLine - 1) / (steps * Stream::kLine) * Stream::kLine;
  }
  HWY_INLINE void Step() {
    if (stream_.left() == 0) return;
    WithScaled<kPairs, Out>(weights_, factor_, by_instruction_, [&](const auto& results) HWY_ATTR {
      stream_.Write(results, per_step_);
    });
  }
  HWY_INLINE void Finish() {
    if (!is_there_) return;
    WithScaled<kPairs, Out>(weights_, factor_, by_instruction_,
                            [&](const auto& results) HWY_ATTR { stream_.Finish(results); });
    is_there_ = false;
  }

 private:
  using Stream = RowStream<typename OutOf<kPairs, Out>::D, Out>;

  RowWeights weights_ = {};
  float factor_ = 1;
  bool by_instruction_ = false;
  bool is_there_ = false;
  Stream stream_;
  int64_t per_step_ = 0;
};

// Rows [begin, end) of a call whose scores, mask and results have these types.
template <typename T, typename M, typename Out, bool kScaleLater>
void ForwardRowsOf(const AttentionSoftmaxArgs& args, int64_t begin, int64_t end, const Writing& how,
                   ForwardScratch& scratch) {
  constexpr bool kPairs = kPaired<T, M, Out>;
  const AttentionShape& shape = args.shape;
  const int64_t keys = shape.keys;
  const int64_t room = RowWeights::RoomFor(keys);
  float* const memory = scratch.weights.Get((how.stream ? 2 : 1) * room);
  RowWeights weights = RowWeights::In(memory, keys);
  RowWeights other_weights = how.stream ? RowWeights::In(memory + room, keys) : weights;
  RowInFlight<kPairs, Out> in_flight;
  const int64_t step_keys = 4 * static_cast<int64_t>(hn::Lanes(DF()));
  const int64_t whole_ahead = BytesAhead(args.scores.dtype);
  RowPlace place = PlaceOf(shape, begin);
  for (int64_t row = begin; row < end; ++row, Advance(shape, place)) {
    const KeyRange seen = SeenKeys(shape, args.window, place.query);
    const int64_t count = seen.end - seen.begin;
    const int64_t mask_at = place.batch * args.mask.batch_stride +
                            place.head * args.mask.head_stride +
                            place.query * args.mask.query_stride + seen.begin - args.mask.origin;
    const T* scores =
        static_cast<const T*>(args.scores.data) + row * args.scores.row_stride + seen.begin;
    const M* mask = From(static_cast<const M*>(args.mask.data), mask_at);
    Out* to = static_cast<Out*>(args.probs.data) + row * args.probs.row_stride;
    if (how.stream) PrefetchEnds(to, keys);
    const float sink = args.sinks == nullptr ? -kInf : args.sinks[place.head];
    const int64_t ahead = count == keys ? whole_ahead : 0;
    const bool prefetch = Is16Bit(args.scores.dtype) || count < keys;
    const T* next_row = prefetch ? scores + args.scores.row_stride : nullptr;
    in_flight.Cut(count / step_keys);
    const double total =
        WeighAtOnce<kPairs, kScaleLater>(scores, mask, count, args.scale, next_row, ahead, weights,
                                         [&]() HWY_ATTR { in_flight.Step(); }) +
        (sink == -kInf ? 0 : std::exp(double{sink}));
    in_flight.Finish();
    RowTotal of_row;
    RowStatus status;
    if (HWY_LIKELY(total >= kLeastTotal && total <= kMostTotal)) {
      of_row = {.denominator = {0, total}, .factor = static_cast<float>(1 / total)};
    } else {
      of_row = WeighByCells<kPairs>(scores, mask, count, args.scale, sink,
                                    scratch.cells.Get((keys + kCellKeys - 1) / kCellKeys), weights);
      if (of_row.denominator.unit == -kInf) status.code = RowCode::kEmptySupport;
    }
    if (HWY_UNLIKELY(of_row.nan >= 0)) {
      status = {RowCode::kNanLogit, static_cast<int32_t>(seen.begin + of_row.nan)};
      WriteNan(args, row, seen, mask_at);
    } else if (how.stream) {
      in_flight = {weights, of_row.factor, how.by_instruction, to, keys, seen};
      std::swap(weights, other_weights);
    } else {
      WithScaled<kPairs, Out>(weights, of_row.factor, how.by_instruction,
                              [&](const auto& results) HWY_ATTR {
                                using D = typename OutOf<kPairs, Out>::D;
                                WriteRow<D, false>(results, to, keys, seen);
                              });
    }
    if (args.logsumexp != nullptr) {
      args.logsumexp[row] = static_cast<float>(of_row.denominator.Log());
    }
    args.status[row] = status;
  }
  in_flight.Finish();
}

void ForwardRows(const AttentionSoftmaxArgs& args, int64_t begin, int64_t end, const Writing& how,
                 ForwardScratch& scratch) {
  const SubnormalsAreZero zero;
  const auto with = [&](auto score, auto mask, auto out) {
    using T = decltype(score);
    using M = decltype(mask);
    using Out = decltype(out);
    if constexpr (HWY_NATIVE_FMA && (std::is_same_v<M, NoMask> || std::is_same_v<M, uint8_t>)) {
      if (IsPlainPower(args.scale)) {
        return ForwardRowsOf<T, M, Out, true>(args, begin, end, how, scratch);
      }
    }
    ForwardRowsOf<T, M, Out, false>(args, begin, end, how, scratch);
  };
  AsType(args.scores.dtype, args.scores.data, [&](const auto* scores) {
    using T = std::remove_cvref_t<decltype(*scores)>;
    const auto under = [&](auto mask) {
      // Results have the scores' type, or are f32.
      args.probs.dtype == DType::kF32 ? with(T(), mask, float()) : with(T(), mask, T());
    };
    switch (args.mask.kind) {
      case MaskKind::kNone:
        return under(NoMask());
      case MaskKind::kBool:
        return under(uint8_t());
      case MaskKind::kAdditive:
        return AsType(args.mask.dtype, args.mask.data, [&](const auto* mask) {
          return under(std::remove_cvref_t<decltype(*mask)>());
        });
    }
    HWY_ABORT("mask kind %d", static_cast<int>(args.mask.kind));  // the op's check has refused it
  });
  if (how.stream) hwy::FlushStream();
}

}  // namespace logitd::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace logitd::cpu {

HWY_EXPORT(ForwardRows);

namespace {

ForwardScratch& ScratchOfThisThread() {
  thread_local ForwardScratch scratch;
  return scratch;
}

}  // namespace

void AttentionSoftmax(const AttentionSoftmaxArgs& args, ThreadPool& pool) {
  const Writing how = WritingOf(args.shape, args.probs, args.probs.data == args.scores.data);
  ForEachPiece(pool, args.shape.keys, 0, args.shape.rows, [&](int64_t begin, int64_t end) {
    HWY_DYNAMIC_DISPATCH(ForwardRows)(args, begin, end, how, ScratchOfThisThread());
  });
}

}  // namespace logitd::cpu
#endif  // HWY_ONCE
