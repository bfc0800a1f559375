// What drawing a token from a row needs on the CPU; shared by sample and verify. The per-target
// code is in edit-inl.h, filter-inl.h, draw-inl.h and report-inl.h, in the order a row goes through
// them. Every step has one fixed order inside a row, so its bits do not depend on the thread.
#ifndef LOGITD_KERNELS_CPU_SAMPLING_SAMPLE_ROW_H_
#define LOGITD_KERNELS_CPU_SAMPLING_SAMPLE_ROW_H_

#include <algorithm>
#include <cstdint>

#include "kernels/cpu/rows/row_threads.h"
#include "kernels/cpu/rows/sketch.h"
#include "kernels/cpu/rows/token_list.h"
#include "kernels/sample.h"

namespace logitd::cpu {

// Cells read before they are looked at again.
inline constexpr int64_t kChunkCells = 32;

// A top-p that needs no more tokens than this is found among the sorted first ones.
inline constexpr int64_t kShortPrefix = 256;

// The bias and the history of one token.
struct Patch {
  int32_t id;
  uint32_t sightings;  // in the history
  float bias;
};

// Memory of rows that are read: of one row, or of the rows of a call.
struct RowMemory {
  SketchScratch raw, processed;
  Buffer<float> edited;
};

// Scratch of one thread.
struct SampleScratch {
  RowMemory row;
  Buffer<int32_t> history;
  Buffer<SampleBias> bias;
  Buffer<Patch> patches;
  Buffer<double> prefix;
  Buffer<Moments> moments;
  Buffer<uint64_t> typical;
  Buffer<int32_t> draws;  // the tokens of a row with several
  ListScratch list;
};

// Each thread has its own.
SampleScratch& SampleScratchOfThisThread();

// A row as sent, and after bias, penalties and mask. Both are the same memory where there are no
// edits and the sums are not needed at another temperature.
struct Rows {
  Row raw;
  Row processed;
};

// What reading a row has to do, for each of its cells.
struct RowRead {
  Rows rows;
  bool has_two = false;            // sketches: of rows.raw and of rows.processed
  float* edited = nullptr;         // where the read writes rows.processed; null: there are no edits
  const uint32_t* mask = nullptr;  // null: none
  const Patch* patches = nullptr;  // by ascending token
  int64_t patch_count = 0;
};

// Memory of a call whose rows are read by several threads each.
struct SampleCallScratch {
  RowMemory rows;
  Buffer<Patch> patches;
  Buffer<RowRead> reads;
};

// The most patches that a row can have.
inline int64_t MaxPatches(const SampleRow& ask) {
  return int64_t{CountedHistory(ask)} + ask.bias_count;
}

}  // namespace logitd::cpu

#endif  // LOGITD_KERNELS_CPU_SAMPLING_SAMPLE_ROW_H_
