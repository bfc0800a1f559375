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

// Bias and history by ascending token. Returns how many tokens they touch.
inline int64_t MakePatches(const SampleArgs& args, const SampleRow& ask, int32_t history_count,
                           SampleScratch& scratch) {
  int32_t* history = scratch.history.Get(history_count);
  SampleBias* bias = scratch.bias.Get(ask.bias_count);
  Patch* patches = scratch.patches.Get(int64_t{history_count} + ask.bias_count);
  std::copy_n(args.history + ask.first_history, history_count, history);
  std::copy_n(args.bias + ask.first_bias, ask.bias_count, bias);
  scratch.sorter(history, static_cast<size_t>(history_count), hwy::SortAscending());
  std::sort(bias, bias + ask.bias_count,
            [](const SampleBias& a, const SampleBias& b) { return a.id < b.id; });
  int64_t patch_count = 0;
  for (int32_t h = 0, b = 0; h < history_count || b < ask.bias_count;) {
    const int32_t seen = h < history_count ? history[h] : std::numeric_limits<int32_t>::max();
    const int32_t biased = b < ask.bias_count ? bias[b].id : std::numeric_limits<int32_t>::max();
    Patch patch{.id = std::min(seen, biased), .count = 0, .bias = 0};
    for (; h < history_count && history[h] == patch.id; ++h) ++patch.count;
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

// A row as sent, and after bias, penalties and mask. Both are the same memory where there are no
// edits and the sums are not needed at another temperature.
struct Rows {
  Row raw;
  Row processed;
};

// Reads row r once. An edited row is written to scratch, and sketched from there, kChunkCells cells
// at a time: so the second look is at cached memory. The same holds for a row whose sums are needed
// at another temperature.
inline Rows ReadRow(const SampleArgs& args, int64_t r, SampleScratch& scratch) {
  const SampleRow& ask = args.rows[r];
  const TensorView& logits = args.logits;
  const size_t offset = static_cast<size_t>(r * logits.row_stride) * SizeOf(logits.dtype);
  const int64_t vocab = logits.cols;
  const int64_t cells = CellCount(vocab);
  Rows rows;
  rows.raw = {.logits = static_cast<const std::byte*>(logits.data) + offset,
              .dtype = logits.dtype,
              .vocab = vocab,
              .temperature = 1,
              .sketch = SketchAt(scratch.raw, 1, 0, vocab)};
  rows.processed = rows.raw;
  const uint32_t* mask = ask.first_mask_word < 0 ? nullptr : args.mask_words + ask.first_mask_word;
  const int32_t history_count = PenaltiesAreOn(ask) ? ask.history_count : 0;
  const bool edited = mask != nullptr || history_count > 0 || ask.bias_count > 0;
  // A list of tokens (top_k, min_p) has a sum of its own.
  const bool sums_needed = !TopKIsOn(ask, vocab) && ask.min_p == 0 && ask.temperature > 0;
  if (!edited && (!sums_needed || ask.temperature == 1)) {
    SketchCells(rows.raw, 0, cells);
    return rows;
  }
  rows.processed.sketch = SketchAt(scratch.processed, 1, 0, vocab);
  if (sums_needed) rows.processed.temperature = ask.temperature;
  float* copy = nullptr;
  const Patch* patch = nullptr;
  const Patch* patches_end = nullptr;
  if (edited) {
    copy = scratch.edited.Get(vocab);
    rows.processed.logits = copy;
    rows.processed.dtype = DType::kF32;
    const int64_t count = MakePatches(args, ask, history_count, scratch);
    patch = scratch.patches.Get(count);
    patches_end = patch + count;
  }
  for (int64_t c = 0; c < cells; c += kChunkCells) {
    const int64_t end_cell = std::min(cells, c + kChunkCells);
    SketchCells(rows.raw, c, end_cell);
    if (edited) {
      const int64_t end = std::min(vocab, end_cell * kCellElements);
      AsType(rows.raw.dtype, rows.raw.logits,
             [&](const auto* logits) { MaskedCopy(logits, mask, c * kCellElements, end, copy); });
      for (; patch != patches_end && patch->id < end; ++patch) {
        const bool allowed = mask == nullptr || (mask[patch->id / 32] >> (patch->id % 32) & 1) != 0;
        if (allowed) copy[patch->id] = EditLogit(Element(rows.raw, patch->id), *patch, ask);
      }
    }
    SketchCells(rows.processed, c, end_cell);
  }
  return rows;
}

}  // namespace logitd::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
