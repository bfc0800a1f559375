// What drawing from a row needs on the CPU, whichever op draws. The per-target code, and how a row
// goes through it, is in sample_row-inl.h.
#ifndef LOGITD_KERNELS_CPU_SAMPLING_SAMPLE_ROW_H_
#define LOGITD_KERNELS_CPU_SAMPLING_SAMPLE_ROW_H_

#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "hwy/contrib/sort/vqsort.h"
#include "kernels/cpu/rows/sketch.h"
#include "kernels/draw.h"
#include "kernels/sample.h"

namespace logitd::cpu {

// Cells read before they are looked at again.
inline constexpr int64_t kChunkCells = 32;

// A top-p that needs no more tokens than this is found among the sorted first ones.
inline constexpr int64_t kShortPrefix = 256;

// A list this short is sorted rather than narrowed.
inline constexpr int64_t kSortable = 2048;

// Leading bits of the keys that one histogram tells apart.
inline constexpr int kBinBits = 11;

// Tokens this many temperatures below the maximum weigh nothing: exp(-31) < 2^-44.
inline constexpr double kWeightlessBelow = 31;

// The key of no token, below all.
inline constexpr uint64_t kLowestKey = 0;

// What bias and history do to one token.
struct Patch {
  int32_t id;
  int32_t count;  // in the history
  float bias;
};

// Scratch of one thread.
struct SampleScratch {
  SketchScratch raw, processed;
  Buffer<float> edited;
  Buffer<int32_t> history;
  Buffer<SampleBias> bias;
  Buffer<Patch> patches;
  Buffer<uint64_t> keys, narrow_keys, order;
  Buffer<float> weights, narrow_weights;
  Buffer<double> prefix;
  Buffer<uint64_t> bins;
  hwy::Sorter sorter;
};

// Each thread has its own.
SampleScratch& SampleScratchOfThisThread();

// A top_k of the whole vocabulary is off.
inline bool TopKIsOn(const SampleRow& ask, int64_t vocab) {
  return ask.top_k > 0 && ask.top_k < vocab;
}

inline bool PenaltiesAreOn(const SampleRow& ask) {
  return ask.repetition != 1 || ask.presence != 0 || ask.frequency != 0;
}

// By every operation's own rounding: not inlined, so that no target fuses two of them.
float EditLogit(float x, const Patch& patch, const SampleRow& ask);

// The integer of a weight in [0, 1]: to nearest, ties to even, as adding 2^52 to a double rounds.
inline uint64_t FixedWeight(float weight) {
  const double shifted = double{weight} * kWeightOne + 0x1p52;
  uint64_t bits;
  std::memcpy(&bits, &shifted, sizeof(bits));
  return bits & ((uint64_t{1} << 52) - 1);
}

// The lowest logit min_p keeps.
inline float MinPFloor(float max, float temperature, float min_p) {
  const double least = max + std::max(double{temperature}, 0x1p-118) * std::log(double{min_p});
  if (least < -FLT_MAX) return -FLT_MAX;
  const float rounded = static_cast<float>(least);
  return rounded < least ? std::nextafter(rounded, kInf) : rounded;
}

}  // namespace logitd::cpu

#endif  // LOGITD_KERNELS_CPU_SAMPLING_SAMPLE_ROW_H_
