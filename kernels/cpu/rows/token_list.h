// Lists of a row's tokens, and memory for them. The per-target code is in find-inl.h, for few
// tokens, and token_list-inl.h, for many.
#ifndef LOGITD_KERNELS_CPU_ROWS_TOKEN_LIST_H_
#define LOGITD_KERNELS_CPU_ROWS_TOKEN_LIST_H_

#include <cstdint>
#include <cstring>

#include "kernels/cpu/rows/key_sorter.h"
#include "kernels/cpu/rows/row_threads.h"
#include "kernels/cpu/rows/sketch.h"
#include "kernels/draw.h"

namespace logitd::cpu {

// From so many wanted tokens on, they are listed a vector at a time rather than one by one; sorted
// ones, where the sketch bounds them well, only from more on (131072 logits: 1024 tokens take 20 us
// one by one and 29 as a list, 8192 take 161 and 152).
inline constexpr int64_t kManyTokens = 512;
inline constexpr int64_t kManySorted = 4096;

// A list this short is sorted rather than narrowed.
inline constexpr int64_t kSortable = 2048;

// Leading bits of the keys that one histogram tells apart.
inline constexpr int kBinBits = 11;

// The key of no token, below all others.
inline constexpr uint64_t kLowestKey = 0;

// Entries whose mass has a sum of its own, so that a draw looks at only so many.
inline constexpr int64_t kBlockEntries = 1024;

// The integer of a weight in [0, 1]: to nearest, ties to even, as adding 2^52 to a double rounds.
inline uint64_t FixedWeight(float weight) {
  const double shifted = double{weight} * kWeightOne + 0x1p52;
  uint64_t bits;
  std::memcpy(&bits, &shifted, sizeof(bits));
  return bits & ((uint64_t{1} << 52) - 1);
}

// Tokens by ascending index, as the pieces of a row found them. After each piece's entries there is
// room for a vector, which may be written at any time.
struct TokenList {
  uint64_t* keys;
  float* weights;  // null: there are none
  int64_t stride;  // from the start of one piece's entries to the next one's
  int64_t pieces;
  int64_t counts[kMostPieces];

  uint64_t* KeysOf(int64_t piece) const { return keys + piece * stride; }
  float* WeightsOf(int64_t piece) const {
    return weights == nullptr ? nullptr : weights + piece * stride;
  }
  int64_t Count() const {
    int64_t count = 0;
    for (int64_t p = 0; p < pieces; ++p) count += counts[p];
    return count;
  }
  int64_t BlocksPerPiece() const { return (stride + kBlockEntries - 1) / kBlockEntries; }
};

// Memory of the lists of one row at a time. Belongs to the thread that has the row.
struct ListScratch {
  Buffer<uint64_t> keys, kept_keys, few, bins, blocks;
  Buffer<float> weights, kept_weights, sample;
  KeySorter sorter;
};

// For pieces, which may run on any thread.
inline const KeySorter& SorterOfThisThread() {
  thread_local KeySorter sorter;
  return sorter;
}

// The first tokens of a row, sorted.
struct SortedKeys {
  const uint64_t* keys;
  int64_t count;
};

}  // namespace logitd::cpu

#endif  // LOGITD_KERNELS_CPU_ROWS_TOKEN_LIST_H_
