// The gradients of a row's logits, in fewer steps than Gradient::At where the row's factors are not
// extreme: they are multiplied before.
#ifndef LOGITD_KERNELS_CUDA_LOSS_ROW_GRADIENT_CUH_
#define LOGITD_KERNELS_CUDA_LOSS_ROW_GRADIENT_CUH_

#include <cstdint>
#include <type_traits>

#include "kernels/cuda/loss/loss_row.cuh"
#include "kernels/cuda/loss/softcap.cuh"

namespace logitd::cuda {

// A factor that is 0, or far inside the range of fp32 also when multiplied with another.
__device__ inline bool IsModerate(float factor) {
  return factor == 0.0f || (fabsf(factor) >= 0x1p-50f && fabsf(factor) <= 0x1p50f);
}
__device__ inline bool IsModerate(const Gradient& row) {
  return fabsf(row.shift) <= 0x1p12f && IsModerate(row.weight) && IsModerate(row.scale) &&
         row.more == 1.0f;
}

// The gradient of a row without a softcap whose factors are moderate. What rounding took from
// log2(e) times logsumexp is in the factors. So is what it took from log2e_over_temperature, for a
// probability of 2^-kMiddle; how far this is off at others decides whether it serves.
struct PlainGradient {
  bool serves;
  float log2e_over_temperature;
  float shift;
  float weight;  // times upstream / temperature
  float flat;    // likewise

  __device__ static PlainGradient Of(const Gradient& row) {
    constexpr float kMiddle = 63.0f;   // smaller probabilities than 2^-126 may count as 0
    constexpr float kMostOff = 6e-7f;  // relative; with the rounding of the power below 4e-6
    const float scaled = __fmul_rn(row.weight, row.scale);
    const float low = row.log2e_over_temperature_low / row.log2e_over_temperature;
    const float off = fmaf(row.shift - kMiddle, low, -row.shift_low);  // a power of two
    return {.serves = !row.cap.on() && IsModerate(row) && kMiddle * kLn2 * fabsf(low) <= kMostOff,
            .log2e_over_temperature = row.log2e_over_temperature,
            .shift = row.shift,
            .weight = fmaf(scaled, off * kLn2, scaled),
            .flat = __fmul_rn(row.flat, row.scale)};
  }

  // The gradient of a logit that is not the target's.
  __device__ float At(float logit) const {
    return fmaf(Exp2(fmaf(logit, log2e_over_temperature, -shift)), weight, -flat);
  }
};

// The gradient of a row whose softcap is mild and whose factors are moderate. What rounding took
// from log2(e) times logsumexp is in the factors. What it took from log2e_over_temperature is left
// out: at most 4e-8 of it.
struct CappedGradient {
  bool serves;
  float log2e_over_temperature;
  float shift;
  float weight;  // times upstream / temperature
  float flat;    // likewise

  __device__ static CappedGradient Of(const Gradient& row, float softcap) {
    constexpr float kMostPower = 80.0f;  // with more the rounding is more than the header allows
    const float scaled = __fmul_rn(row.weight, row.scale);
    return {.serves = row.cap.on() && IsMildSoftcap(softcap, row.log2e_over_temperature) &&
                      row.log2e_over_temperature <= kMostPower && IsModerate(row),
            .log2e_over_temperature = row.log2e_over_temperature,
            .shift = row.shift,
            .weight = fmaf(scaled, -row.shift_low * kLn2, scaled),
            .flat = __fmul_rn(row.flat, row.scale)};
  }

  // The gradient of a logit that is not the target's. `value`: tanh(logit / softcap).
  __device__ float At(float value) const {
    const float p = Exp2(fmaf(value, log2e_over_temperature, -shift));
    return __fmul_rn(fmaf(p, weight, -flat), fmaf(-value, value, 1.0f));
  }
};

// The factors that the gradients of a row's elements share.
template <class T>
struct alignas(16) RowGradient {
  int target;
  bool has_target;     // its gradient is needed
  float target_logit;  // where it is
  float of_target;     // likewise
  float softcap;
  Gradient exact;
  PlainGradient plain;
  CappedGradient capped;
  MildTanh<T> tanh;

  // By one thread: Prepare, then Finish, which takes less time. `logit` is the target's, where its
  // gradient is needed.
  __device__ void Prepare(const CrossEntropyRow& ask, float upstream, bool needs_target,
                          float logit, int64_t vocab) {
    target = ask.target;
    if (target < 0) return;
    has_target = needs_target;
    target_logit = logit;
    softcap = ask.softcap;
    exact = Gradient::WithoutSum(ask, upstream, vocab);
    if (softcap > 0) tanh = MildTanh<T>::Of(softcap);
  }
  __device__ void Finish(float logsumexp) {
    if (target < 0) return;
    Gradient row = exact;
    row.SetLogSumExp(logsumexp);
    exact = row;
    plain.serves = false;
    capped.serves = false;
    if (row.cap.on()) {
      capped = CappedGradient::Of(row, softcap);
    } else {
      plain = PlainGradient::Of(row);
    }
    if (has_target)
      of_target =
          row.cap.on() ? row.At<true>(target_logit, true) : row.At<false>(target_logit, true);
  }
};

// How the elements of a row become their gradients. The target's is overwritten.
enum class Writing { kNot, kZeros, kPlain, kExact, kExactCapped, kCapped };

template <class T>
__device__ inline Writing WritingOf(bool active, const RowGradient<T>& row) {
  if (!active) return Writing::kNot;
  if (row.target < 0) return Writing::kZeros;
  if (row.plain.serves) return Writing::kPlain;
  if (!row.exact.cap.on()) return Writing::kExact;
  return row.capped.serves ? Writing::kCapped : Writing::kExactCapped;
}

// The gradients of a row that is written in one way, as functions of the logit's bits.
template <Writing kWriting, class T>
class GradientsOf {
 public:
  __device__ explicit GradientsOf(const RowGradient<T>& row) {
    if constexpr (kWriting == Writing::kPlain) {
      by_ = row.plain;
    } else if constexpr (kWriting == Writing::kCapped) {
      by_ = row.capped;
      tanh_ = row.tanh;
    } else {
      by_ = row.exact;
    }
  }

  // The gradients of 16 bytes of logits.
  __device__ uint4 operator()(const uint4& logits) const {
    return {OfWord(logits.x), OfWord(logits.y), OfWord(logits.z), OfWord(logits.w)};
  }
  __device__ T operator()(T logit) const {
    uint32_t word;
    if constexpr (sizeof(T) == 4) {
      word = __float_as_uint(logit);
    } else {
      word = reinterpret_cast<const uint16_t&>(logit);
    }
    word = Prepared(word);
    return FromFloat<T>(At(WordElement<T>(&word, 0)));
  }

 private:
  using By = std::conditional_t<
      kWriting == Writing::kPlain, PlainGradient,
      std::conditional_t<kWriting == Writing::kCapped, CappedGradient, Gradient>>;

  __device__ uint32_t Prepared(uint32_t word) const {
    if constexpr (kWriting == Writing::kCapped) return tanh_.Bounded(word);
    return word;
  }
  __device__ float At(float logit) const {
    if constexpr (kWriting == Writing::kZeros) {
      return 0.0f;
    } else if constexpr (kWriting == Writing::kPlain) {
      return by_.At(logit);
    } else if constexpr (kWriting == Writing::kCapped) {
      return by_.At(tanh_.OfBounded(logit));
    } else {
      return by_.template At<kWriting == Writing::kExactCapped>(logit, false);
    }
  }
  // The gradients of one or two logits.
  __device__ uint32_t OfWord(uint32_t word) const {
    word = Prepared(word);
    if constexpr (sizeof(T) == 4) {
      return __float_as_uint(At(__uint_as_float(word)));
    } else {
      return PackPair<T>(At(WordElement<T>(&word, 0)), At(WordElement<T>(&word, 1)));
    }
  }

  By by_;
  MildTanh<T> tanh_;
};

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

// Writes the gradients of elements [begin, end) of a row by a block or a warp. Threads take vectors
// of 16 bytes, aligned as the output is; an input that is aligned differently is read by elements.
// A vector is loaded as soon as the one before it in its registers is used.
template <class T, int kThreads>
class GradientWriter {
 public:
  static constexpr int kTake = kVector<T>;
  static constexpr int kVectors = 4;  // of a thread, all loaded at once
  static constexpr int kStep = kThreads * kTake;
  static constexpr int kBatch = kVectors * kStep;

  // Loads the first vectors.
  __device__ GradientWriter(const T* from, T* to, int begin, int end)
      : thread_(static_cast<int>(threadIdx.x) % kThreads),
        from_(from),
        to_(to),
        begin_(begin),
        head_(min(end, begin + static_cast<int>((-reinterpret_cast<uintptr_t>(to + begin) & 15) /
                                                sizeof(T)))),
        end_(end),
        aligned_((reinterpret_cast<uintptr_t>(from + head_) & 15) == 0) {
    const int first = head_ + thread_ * kTake;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) vectors_[i] = Load(first + i * kStep);
  }

  __device__ void Write(bool active, const RowGradient<T>& row) {
    VisitWriting(WritingOf(active, row), [&](auto writing) { WriteBy<writing>(row); });
  }

 private:
  __device__ uint4 Load(int at) const {
    if (at + kTake > end_) return uint4{};
    return aligned_ ? __ldcs(reinterpret_cast<const uint4*>(from_ + at))
                    : LoadVector(from_ + at, false, kTake);
  }

  template <Writing kWriting>
  __device__ void WriteBy(const RowGradient<T>& row) {
    if constexpr (kWriting == Writing::kNot) return;
    const GradientsOf<kWriting, T> gradients(row);
    const int target = row.target;
    // By the thread that has written the elements.
    const auto write_target = [&](int begin, int end) {
      if (target >= begin && target < end) to_[target] = FromFloat<T>(row.of_target);
    };
    const auto write_some = [&](int begin, int end) {
      for (int j = begin; j < end; ++j) to_[j] = gradients(from_[j]);
      write_target(begin, end);
    };
    const int own = begin_ + thread_;
    if (own < head_) write_some(own, own + 1);
#pragma unroll 1
    for (int first = head_ + thread_ * kTake;; first += kBatch) {
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        const int begin = first + i * kStep;
        if (begin >= end_) return;
        if (begin + kTake > end_) return write_some(begin, end_);
        const uint4 logits = vectors_[i];
        vectors_[i] = Load(begin + kBatch);
        __stcs(reinterpret_cast<uint4*>(to_ + begin), gradients(logits));
        write_target(begin, begin + kTake);
      }
    }
  }

  const int thread_;
  const T* const from_;
  T* const to_;
  const int begin_;
  const int head_;  // where the vectors begin
  const int end_;
  const bool aligned_;
  uint4 vectors_[kVectors];
};

}  // namespace logitd::cuda

#endif  // LOGITD_KERNELS_CUDA_LOSS_ROW_GRADIENT_CUH_
