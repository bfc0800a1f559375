// sample, read: the sketch of a row as sent, at temperature 1, which gives NaN and logsumexp, and
// the sketch after bias, penalties and mask, at the row's temperature.
#if defined(LOGITD_KERNELS_CPU_SAMPLING_EDIT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef LOGITD_KERNELS_CPU_SAMPLING_EDIT_INL_H_
#undef LOGITD_KERNELS_CPU_SAMPLING_EDIT_INL_H_
#else
#define LOGITD_KERNELS_CPU_SAMPLING_EDIT_INL_H_
#endif

#include <algorithm>
#include <cstring>
#include <limits>

#include "hwy/highway.h"
#include "kernels/cpu/rows/sketch-inl.h"
#include "kernels/cpu/sampling/sample_row.h"

HWY_BEFORE_NAMESPACE();
namespace logitd::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Writes bias and history by ascending token. Returns how many tokens they touch; `patches` has
// room for MaxPatches.
inline int64_t MakePatches(const SampleArgs& args, const SampleRow& ask, SampleScratch& scratch,
                           Patch* patches) {
  const int32_t history_count = CountedHistory(ask);
  int32_t* history = scratch.history.Get(history_count);
  SampleBias* bias = scratch.bias.Get(ask.bias_count);
  // A token and whether it comes after the prompt.
  for (int32_t i = 0; i < history_count; ++i)
    history[i] = 2 * args.history[ask.first_history + i] + (i >= ask.prompt_tokens ? 1 : 0);
  static_assert(kMaxVocab <= std::numeric_limits<int32_t>::max() / 2);
  std::copy_n(args.bias + ask.first_bias, ask.bias_count, bias);
  scratch.list.sorter(history, static_cast<size_t>(history_count), hwy::SortAscending());
  std::sort(bias, bias + ask.bias_count,
            [](const SampleBias& a, const SampleBias& b) { return a.id < b.id; });
  int64_t patch_count = 0;
  for (int32_t h = 0, b = 0; h < history_count || b < ask.bias_count;) {
    const int32_t seen = h < history_count ? history[h] / 2 : std::numeric_limits<int32_t>::max();
    const int32_t biased = b < ask.bias_count ? bias[b].id : std::numeric_limits<int32_t>::max();
    Patch patch{.id = std::min(seen, biased), .sightings = 0, .bias = 0};
    if (seen == patch.id && history[h] % 2 == 0) patch.sightings = kSeenInPrompt;
    for (; h < history_count && history[h] / 2 == patch.id; ++h)
      patch.sightings += static_cast<uint32_t>(history[h] % 2);
    if (biased == patch.id) patch.bias = bias[b++].value;
    patches[patch_count++] = patch;
  }
  return patch_count;
}

// Writes elements [begin, end) of the row as f32, and -inf where the mask forbids. Both are
// multiples of the lanes, or the row's end.
template <typename T>
void MaskedCopy(const T* logits, const uint32_t* mask, int64_t begin, int64_t end, float* to) {
  const DF d;
  const int64_t lanes = hn::Lanes(d);
  HWY_ALIGN T last[kMaxLanes] = {};
  HWY_ALIGN float last_f32[kMaxLanes];
  uint8_t bits[8] = {};
  for (int64_t i = begin; i < end; i += lanes) {
    const bool whole = i + lanes <= end;
    if (!whole) std::memcpy(last, logits + i, (end - i) * sizeof(T));
    VF x = LoadF32(d, whole ? logits + i : last);
    if (mask != nullptr) {
      const uint32_t allowed = mask[i / 32] >> (i % 32);
      std::memcpy(bits, &allowed, sizeof(allowed));
      x = hn::IfThenElse(hn::LoadMaskBits(d, bits), x, hn::Set(d, -kInf));
    }
    if (whole) {
      hn::StoreU(x, d, to + i);
    } else {
      hn::Store(x, d, last_f32);
      std::memcpy(to + i, last_f32, (end - i) * sizeof(float));
    }
  }
}

// What reading row r has to do. Its sketches and its copy are slot `slot` of `slots` in `memory`.
inline RowRead PlanRead(const SampleArgs& args, int64_t r, int64_t slots, int64_t slot,
                        RowMemory& memory, SampleScratch& scratch, Patch* patches) {
  const SampleRow& ask = args.rows[r];
  const TensorView& logits = args.logits;
  const int64_t vocab = logits.cols;
  RowRead read;
  read.rows.raw = {.logits = RowData(logits, r),
                   .dtype = logits.dtype,
                   .vocab = vocab,
                   .temperature = 1,
                   .sketch = SketchAt(memory.raw, slots, slot, vocab)};
  read.rows.processed = read.rows.raw;
  if (ask.first_mask_word >= 0) read.mask = args.mask_words + ask.first_mask_word;
  const bool sums_needed = SumsAreOfRow(ask, vocab);
  read.has_two = IsEdited(ask) || (sums_needed && ask.temperature != 1);
  if (!read.has_two) return read;
  read.rows.processed.sketch = SketchAt(memory.processed, slots, slot, vocab);
  if (sums_needed) read.rows.processed.temperature = ask.temperature;
  if (IsEdited(ask)) {
    read.edited = memory.edited.Get(slots * vocab) + slot * vocab;
    read.rows.processed.logits = read.edited;
    read.rows.processed.dtype = DType::kF32;
    read.patch_count = MakePatches(args, ask, scratch, patches);
    read.patches = patches;
  }
  return read;
}

// Reads cells [begin, end) of the row, at most kChunkCells. An edited row is written to scratch,
// and sketched from there: so the second look is at cached memory. The same holds for a row whose
// sums are needed at another temperature.
inline void ReadCells(const RowRead& read, const SampleRow& ask, int64_t begin, int64_t end) {
  const Row& raw = read.rows.raw;
  SketchCells(raw, begin, end);
  if (!read.has_two) return;
  if (read.edited != nullptr) {
    const int64_t first = begin * kCellElements;
    const int64_t last = std::min(raw.vocab, end * kCellElements);
    const uint32_t* mask = read.mask;
    float* copy = read.edited;
    AsType(raw.dtype, raw.logits,
           [&](const auto* logits) { MaskedCopy(logits, mask, first, last, copy); });
    const Patch* const patches_end = read.patches + read.patch_count;
    const auto comes_before = [](const Patch& patch, int64_t id) { return patch.id < id; };
    const Penalties penalties(ask);
    const Patch* patch = std::lower_bound(read.patches, patches_end, first, comes_before);
    for (; patch != patches_end && patch->id < last; ++patch) {
      const bool allowed = mask == nullptr || (mask[patch->id / 32] >> (patch->id % 32) & 1) != 0;
      if (allowed) {
        copy[patch->id] =
            penalties.Of(Biased(Element(raw, patch->id), patch->bias), patch->sightings);
      }
    }
  }
  SketchCells(read.rows.processed, begin, end);
}

// Reads row r.
inline Rows ReadRow(const SampleArgs& args, int64_t r, const RowThreads& threads,
                    SampleScratch& scratch) {
  const SampleRow& ask = args.rows[r];
  Patch* patches = scratch.patches.Get(MaxPatches(ask));
  const RowRead read = PlanRead(args, r, /*slots=*/1, /*slot=*/0, scratch.row, scratch, patches);
  const RowPieces pieces = threads.Cut(args.logits.cols);
  threads.For(pieces.count, [&](int64_t p) {
    for (int64_t c = pieces.begin(p); c < pieces.end(p); c += kChunkCells) {
      ReadCells(read, ask, c, std::min(pieces.end(p), c + kChunkCells));
    }
  });
  return read.rows;
}

}  // namespace logitd::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
