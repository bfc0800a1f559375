// The arithmetic of watermarked draws: a keyed function of a token and of the tokens before it
// takes the place of the seed's random bits, so that whoever has the key can tell whether a text
// was drawn by it. Backends and detectors include this file; docs/semantics.md says it in words.
// Source: Aaronson, My AI safety lecture for UT effective altruism, 2022, "Gumbel-max" watermark.
#ifndef LOGITD_KERNELS_WATERMARK_H_
#define LOGITD_KERNELS_WATERMARK_H_

#include <bit>
#include <cmath>
#include <cstdint>

#include "kernels/draw.h"

namespace logitd {

// Most tokens that a mark depends on, besides the drawn one.
inline constexpr int32_t kMaxWatermarkWidth = 16;

// The last word of Philox's counter, so that no two kinds of numbers have a block in common.
inline constexpr uint64_t kContextBlock = uint64_t{1} << 32;
inline constexpr uint64_t kMarkBlock = uint64_t{2} << 32;

// The key of the place after the tokens [0, count): `key` where there are none.
constexpr uint64_t WatermarkState(uint64_t key, const int32_t* tokens, int32_t count) {
  uint64_t state = key;
  for (int32_t i = 0; i < count; ++i) {
    const uint64_t counter =
        static_cast<uint32_t>(tokens[i]) | uint64_t{static_cast<uint32_t>(count)} << 32;
    const PhiloxBlock block = Philox4x32(state, counter, kContextBlock);
    state = block.word[0] | uint64_t{block.word[1]} << 32;
  }
  return state;
}

// The 52 bits b of a token there. They stand for u = (2 b + 1) / 2^53, which is above 0 and below
// 1: u and 1 - u are doubles.
constexpr uint64_t WatermarkBits(uint64_t state, int32_t token) {
  const PhiloxBlock block = Philox4x32(state, static_cast<uint32_t>(token), kMarkBlock);
  return (block.word[0] | uint64_t{block.word[1]} << 32) >> 12;
}
constexpr double MarkUnit(uint64_t bits) { return static_cast<double>(2 * bits + 1) * 0x1p-53; }
constexpr double MarkUnitLeft(uint64_t bits) {  // 1 - u
  return static_cast<double>((uint64_t{1} << 53) - (2 * bits + 1)) * 0x1p-53;
}

// The score of a token whose logit, divided by the temperature, is `above` more than the row's
// largest: above - ln(-ln u). Of tokens with independent u, each has the largest score with its
// probability under the softmax.
constexpr double MarkScore(double above, uint64_t bits) {
  return above - std::log(-std::log(MarkUnit(bits)));
}

// At least the token's score, without a logarithm: -ln u >= 1 - u, and the exponent of 1 - u is at
// most its logarithm to base 2.
constexpr double MarkBound(double above, uint64_t bits) {
  constexpr double kAboveLn2 = 0.6932;
  const auto exponent =
      static_cast<int32_t>(std::bit_cast<uint64_t>(MarkUnitLeft(bits)) >> 52) - 1023;
  return above - kAboveLn2 * exponent;
}

// The token with the largest score so far, the lowest of equals.
struct MarkedToken {
  double score;
  int32_t token;

  constexpr bool ComesBefore(const MarkedToken& other) const {
    return score > other.score || (score == other.score && token < other.token);
  }
};

// A token's evidence for the mark: -ln(1 - u). Of tokens drawn without the key it has the
// exponential distribution with mean 1, of marked ones more.
constexpr double MarkEvidence(uint64_t bits) { return -std::log(MarkUnitLeft(bits)); }

}  // namespace logitd

#endif  // LOGITD_KERNELS_WATERMARK_H_
