// cross_entropy's backward on the CPU: one pass, element by element.
//
// Cost at 64 x 131072 f32: reads and writes 33.6 MB once each, which is the floor.
//
// Limited by: arithmetic.
//
// Measured: bench/results/cpu/losses.json, as shares of a bare copy.
#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstring>
#include <limits>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/loss/cross_entropy_backward.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/cpu/loss/cross_entropy.h"
#include "kernels/cpu/rows/sketch-inl.h"
#include "kernels/cpu/rows/softcap-inl.h"

HWY_BEFORE_NAMESPACE();
namespace logitd::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// The gradient of a row: d_l = (p * share - other - [i = target] target) *
// upstream_over_temperature * more.
struct Gradient {
  Exponent exponent;
  float top;     // p = exp((x - top) / temperature)
  float most;    // a larger x counts as this one
  float share;   // what makes p a probability, times 1 + 2 z_loss logsumexp
  float target;  // 1 - e
  float other;   // e / vocab
  // In two factors: the quotient may be beyond f32's range where the gradient is small.
  float upstream_over_temperature;
  float more;
  float softcap;
};

Gradient MakeGradient(const CrossEntropyRow& ask, const TokenBlock& block, float logsumexp,
                      float upstream) {
  const double temperature = std::max(ask.temperature, kLeastTemperature);  // as in exponent
  const double e = EffectiveSmoothing(ask, block.vocab);
  Gradient g;
  g.exponent = MakeExponent(ask.temperature);
  g.top = static_cast<float>(std::clamp<double>(logsumexp * temperature, -FLT_MAX, FLT_MAX));
  g.most = static_cast<float>(g.top + 64 * temperature);
  const double lost = std::clamp(g.top / temperature - logsumexp, -80.0, 80.0);
  g.share = static_cast<float>(std::exp(lost) * (1 + 2.0 * ask.z_loss * logsumexp));
  g.target = static_cast<float>(1 - e);
  g.other = static_cast<float>(e / static_cast<double>(block.vocab));
  const double upstream_over_temperature = double{upstream} / ask.temperature;
  g.more = std::fabs(upstream_over_temperature) > 1e30 ? 0x1p64f : 1.0f;
  g.upstream_over_temperature = static_cast<float>(upstream_over_temperature / g.more);
  g.softcap = block.softcap > 0 ? block.softcap : EffectiveSoftcap(ask.softcap);
  return g;
}

// d total / d l of a vector of logits; `target` is 1 - e in the target's lane, else 0.
template <bool kSoftcap>
HWY_INLINE VF GradientOf(DF d, VF l, VF target, const Gradient& g, const SoftCap& cap) {
  VF x = l, bend = hn::Set(d, 1.0f);
  if constexpr (kSoftcap) {
    VF tanh[1] = {l};
    cap.TanhOf(d, tanh);
    x = hn::Mul(hn::Set(d, g.softcap), tanh[0]);
    bend = hn::NegMulAdd(tanh[0], tanh[0], bend);
  }
  const VF p = PreciseExp(d, hn::Min(x, hn::Set(d, g.most)), hn::Set(d, g.top), g.exponent);
  VF dx = hn::MulSub(p, hn::Set(d, g.share), hn::Set(d, g.other));
  dx = hn::Mul(hn::Sub(dx, target), hn::Set(d, g.upstream_over_temperature));
  dx = hn::Mul(dx, hn::Set(d, g.more));
  return kSoftcap ? hn::Mul(dx, bend) : dx;
}

// Elements [begin, end) of a row. `g` is a copy: so the compiler knows that no store changes it.
template <bool kSoftcap, typename T>
void Spread(const T* logits, int64_t begin, int64_t end, int64_t target, const Gradient g, T* to) {
  const DF d;
  const DI di;
  const int64_t lanes = hn::Lanes(d);
  const SoftCap cap(g.softcap);
  for (int64_t i = begin; i < end; i += lanes) {
    VF hit = hn::Zero(d);
    if (HWY_UNLIKELY(target >= i && target < i + lanes)) {
      const auto is_target = hn::Eq(hn::Iota(di, 0), hn::Set(di, static_cast<int32_t>(target - i)));
      hit = hn::IfThenElseZero(hn::RebindMask(d, is_target), hn::Set(d, g.target));
    }
    const VF l = LoadUpTo(d, logits + i, end - i);
    StoreAs(d, GradientOf<kSoftcap>(d, l, hit, g, cap), end - i, to + i);
  }
}

template <typename T>
void FillNan(T* to, int64_t count) {
  const DF d;
  const VF nan = hn::Set(d, std::numeric_limits<float>::quiet_NaN());
  for (int64_t i = 0; i < count; i += hn::Lanes(d)) StoreAs(d, nan, count - i, to + i);
}

// Elements [begin, end) of the gradient of row r.
void BackwardPart(const CrossEntropyBackwardArgs& args, const TokenBlock& block, int64_t r,
                  int64_t begin, int64_t end) {
  const CrossEntropyRow& ask = args.rows[r];
  const auto size = static_cast<int64_t>(SizeOf(args.logits.dtype));
  const auto* from =
      static_cast<const std::byte*>(args.logits.data) + r * args.logits.row_stride * size;
  auto* to = static_cast<std::byte*>(args.d_logits.data) + r * args.d_logits.row_stride * size;
  if (ask.target == kIgnoredTarget) {
    std::memset(to + begin * size, 0, static_cast<size_t>((end - begin) * size));
    return;
  }
  AsType(args.logits.dtype, from, [&](const auto* logits) {
    using T = std::remove_const_t<std::remove_pointer_t<decltype(logits)>>;
    T* d_logits = reinterpret_cast<T*>(to);
    if (!std::isfinite(args.logsumexp[r])) return FillNan(d_logits + begin, end - begin);
    const Gradient g = MakeGradient(ask, block, args.logsumexp[r], args.upstream[r]);
    const int64_t target = ask.target - block.first_token;
    if (g.softcap > 0) {
      Spread<true>(logits, begin, end, target, g, d_logits);
    } else {
      Spread<false>(logits, begin, end, target, g, d_logits);
    }
  });
}

}  // namespace logitd::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace logitd::cpu {

HWY_EXPORT(BackwardPart);

void CrossEntropyBackwardOfTokens(const CrossEntropyBackwardArgs& args, const TokenBlock& block,
                                  ThreadPool& pool) {
  const int64_t cols = args.logits.cols;
  ForRowParts(args.logits.rows, cols, kItemCells, pool, [&](int64_t r, int64_t begin, int64_t end) {
    if (args.rows[r].active == 0) return;
    HWY_DYNAMIC_DISPATCH(BackwardPart)
    (args, block, r, begin * kCellElements, std::min(cols, end * kCellElements));
  });
}

void CrossEntropyBackwardOfRow(const CrossEntropyBackwardArgs& args, int64_t r) {
  if (args.rows[r].active == 0) return;
  HWY_DYNAMIC_DISPATCH(BackwardPart)
  (args, {.vocab = args.logits.cols}, r, 0, args.logits.cols);
}

void CrossEntropyBackward(const CrossEntropyBackwardArgs& args, ThreadPool& pool) {
  CrossEntropyBackwardOfTokens(args, {.vocab = args.logits.cols}, pool);
}

}  // namespace logitd::cpu
#endif  // HWY_ONCE
