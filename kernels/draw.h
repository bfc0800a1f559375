// The random number of a draw, and the integer arithmetic that turns it into a token. Every backend
// includes this file, so that a draw can be replayed bit by bit; docs/semantics.md says it in
// words.
#ifndef LOGITD_KERNELS_DRAW_H_
#define LOGITD_KERNELS_DRAW_H_

#include <cmath>
#include <cstdint>

namespace logitd {

// 128 bits of Philox4x32-10.
struct PhiloxBlock {
  uint32_t word[4];
};

// Source: Salmon et al., Parallel random numbers: as easy as 1, 2, 3, SC'11.
constexpr PhiloxBlock Philox4x32(uint64_t key, uint64_t counter_low, uint64_t counter_high) {
  uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
  uint32_t c0 = static_cast<uint32_t>(counter_low), c1 = static_cast<uint32_t>(counter_low >> 32);
  uint32_t c2 = static_cast<uint32_t>(counter_high), c3 = static_cast<uint32_t>(counter_high >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t{0xD2511F53u} * c0;
    const uint64_t b = uint64_t{0xCD9E8D57u} * c2;
    c0 = static_cast<uint32_t>(b >> 32) ^ c1 ^ k0;
    c1 = static_cast<uint32_t>(b);
    c2 = static_cast<uint32_t>(a >> 32) ^ c3 ^ k1;
    c3 = static_cast<uint32_t>(a);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

// The 64 uniform bits of draw `draw`, from 0, at `position` of the sequence `seed`.
constexpr uint64_t UniformBits(uint64_t seed, uint64_t position, uint32_t draw = 0) {
  const PhiloxBlock block = Philox4x32(seed, position, draw);
  return block.word[0] | uint64_t{block.word[1]} << 32;
}

// Another 64 uniform bits of the same position: they decide whether a draft is accepted, or whether
// xtc removes tokens.
constexpr uint64_t CoinBits(uint64_t seed, uint64_t position) {
  const PhiloxBlock block = Philox4x32(seed, position, 0);
  return block.word[2] | uint64_t{block.word[3]} << 32;
}

// floor(a * b / 2^64).
constexpr uint64_t MulHigh(uint64_t a, uint64_t b) {
  const uint64_t a0 = static_cast<uint32_t>(a), a1 = a >> 32;
  const uint64_t b0 = static_cast<uint32_t>(b), b1 = b >> 32;
  const uint64_t middle = a1 * b0 + (a0 * b0 >> 32);
  return a1 * b1 + (middle >> 32) + ((a0 * b1 + static_cast<uint32_t>(middle)) >> 32);
}

// Weights of tokens are integers: exp((x - max) / temperature) * 2^43, rounded to nearest, ties to
// even. Sums of at most 2^20 of them are exact in 64 bits, in any order.
inline constexpr int kWeightBits = 43;
inline constexpr double kWeightOne = double{int64_t{1} << kWeightBits};

// ln(2^-44): lower weights round to 0. A filtered row keeps no token below it.
inline constexpr double kLogLeastWeight = -(kWeightBits + 1) * 0.6931471805599453;

// The integer a sum must exceed for its token to be drawn: floor(bits / 2^64 * total), < total.
constexpr uint64_t DrawTarget(uint64_t bits, uint64_t total) { return MulHigh(bits, total); }

// The upper 53 bits as a fraction, below 1.
constexpr double UnitOf(uint64_t bits) { return static_cast<double>(bits >> 11) * 0x1p-53; }

// The integer a sum inside a cell must exceed, at the share `part` of its `total`.
constexpr uint64_t TargetInCell(double part, uint64_t total) {
  const auto target = static_cast<uint64_t>(part * static_cast<double>(total));
  return target < total ? target : total - 1;
}

// True for a share `probability` of all bits: those below floor(probability * 2^64).
constexpr bool CoinShows(float probability, uint64_t bits) {
  return probability >= 1 || bits < static_cast<uint64_t>(probability * 0x1p64f);
}

// A sum of exp((x - max) / temperature), as a sum of weights.
constexpr uint64_t WholeOf(double sum) { return static_cast<uint64_t>(sum * kWeightOne); }

// The probability q of a draft's token as a weight among weights that sum up to `total`.
constexpr uint64_t DraftWeight(float q, double total) {
  if (!(q > 0)) return 0;
  return static_cast<uint64_t>(std::nearbyint((q < 1 ? q : 1.0) * total));
}

// ---- Block verification (kernels/verify.h)

// A weight times `share`, at most 1.
constexpr uint64_t WeightOfShare(double share, uint64_t weight) {
  return static_cast<uint64_t>(std::nearbyint(share * static_cast<double>(weight)));
}

// s after a draft whose target has this weight, and whose q has this mass.
constexpr double ShareAfter(double share, uint64_t weight, uint64_t mass) {
  const double reach = share * static_cast<double>(weight);
  if (reach == 0) return 0;
  const auto most = static_cast<double>(mass);
  return reach < most ? reach / most : 1;
}

// True where the coin chooses the draft before a row with this s: `left` is the row's sum of R,
// `total` that of W.
constexpr bool CoinChooses(double share, uint64_t left, uint64_t total, uint64_t coin) {
  return share == 1 || MulHigh(coin, left + WeightOfShare(1 - share, total)) < left;
}

// True where the coin chooses the last draft.
constexpr bool CoinChoosesLast(double share, uint64_t coin) {
  return share == 1 || coin < static_cast<uint64_t>(share * 0x1p64);
}

// The mass that is `share` of `total`: ceil(share * total), at least 1. 0 <= share < 1.
constexpr uint64_t MassNeeded(float share, uint64_t total) {
  // Exact from a share of 2^-40 up. A smaller top_p keeps only the first token either way, which
  // weighs 2^43 of a total below 2^63.
  const uint64_t fraction = static_cast<uint64_t>(share * 0x1p64f);
  const uint64_t mass = MulHigh(fraction, total) + (fraction * total != 0);
  return mass == 0 ? 1 : mass;
}

}  // namespace logitd

#endif  // LOGITD_KERNELS_DRAW_H_
