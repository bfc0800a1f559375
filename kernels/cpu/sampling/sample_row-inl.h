// The per-target half of sample_row.h: a row is read, filtered, drawn from and reported.
//
//   read:    sketch of the row as sent, at temperature 1: NaN, logsumexp. A row with bias,
//   penalties
//            or a mask is written, edited, to scratch and sketched again, 32 cells at a time, so
//            that the second look is at cached memory; so is a row whose sums are needed at another
//            temperature.
//   filter:  top-k, or the first 256 for a top-p that needs no more, come sorted from the sketch.
//            A flat top-p lists all tokens that weigh anything, and narrows the key of the last one
//            by histograms of integer mass over the keys' leading bits: no sort, no cap.
//   draw:    over the list in index order, or over the whole row: a cell by the sketch's sums, then
//            a token of that cell.
//   report:  top tokens and the rank from the sketch of the mode's logits; groups that hold nothing
//            large enough are not looked at.
//
// Every step has one fixed order inside a row, so its bits do not depend on the thread.
#if defined(LOGITD_KERNELS_CPU_SAMPLING_SAMPLE_ROW_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef LOGITD_KERNELS_CPU_SAMPLING_SAMPLE_ROW_INL_H_
#undef LOGITD_KERNELS_CPU_SAMPLING_SAMPLE_ROW_INL_H_
#else
#define LOGITD_KERNELS_CPU_SAMPLING_SAMPLE_ROW_INL_H_
#endif

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "hwy/highway.h"
#include "kernels/cpu/rows/sketch-inl.h"
#include "kernels/cpu/sampling/sample_row.h"

HWY_BEFORE_NAMESPACE();
namespace logitd::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// ---- Read

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

// Writes elements [begin, end) of the row as f32, but -inf where the mask forbids. Both are
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

inline void MaskedCopyOf(const Row& row, const uint32_t* mask, int64_t begin, int64_t end,
                         float* to) {
  switch (row.dtype) {
    case DType::kF32:
      return MaskedCopy(static_cast<const float*>(row.logits), mask, begin, end, to);
    case DType::kF16:
      return MaskedCopy(static_cast<const hwy::float16_t*>(row.logits), mask, begin, end, to);
    case DType::kBF16:
      return MaskedCopy(static_cast<const hwy::bfloat16_t*>(row.logits), mask, begin, end, to);
  }
}

// A row as sent and after bias, penalties and mask; one and the same where there are none and the
// sums are not needed at another temperature.
struct Rows {
  Row raw;
  Row processed;
};

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
  // Lists of tokens have sums of their own.
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
      MaskedCopyOf(rows.raw, mask, c * kCellElements, end, copy);
      for (; patch != patches_end && patch->id < end; ++patch) {
        const bool allowed = mask == nullptr || (mask[patch->id / 32] >> (patch->id % 32) & 1) != 0;
        if (allowed) copy[patch->id] = EditLogit(Element(rows.raw, patch->id), *patch, ask);
      }
    }
    SketchCells(rows.processed, c, end_cell);
  }
  return rows;
}

// ---- Filter and draw

// What the draw was from: tokens whose keys are `last` or more, -inf excepted.
struct Support {
  uint64_t last;
  float max;
  double temperature;
  double log_sum;  // of exp((x - max) / temperature); of +inf, of their number

  // -inf where not in the support.
  double Logprob(float x, int64_t index) const {
    if (x == -kInf || MakeKey(x, index) < last) return -std::numeric_limits<double>::infinity();
    if (max == kInf) return x == kInf ? -log_sum : -std::numeric_limits<double>::infinity();
    return (double{x} - max) / temperature - log_sum;
  }
};

struct Drawn {
  int32_t token;
  Support support;
};

// exp((x - max) / temperature) of `count` values, in place; room for whole vectors. max = +inf: all
// are.
inline void Exponentials(float* values, int64_t count, float max, const Exponent& e) {
  const DF d;
  if (max == kInf) {
    for (int64_t i = 0; i < count; ++i) values[i] = values[i] == kInf ? 1.0f : 0.0f;
    return;
  }
  const VF vmax = hn::Set(d, max);
  for (int64_t i = 0; i < count; i += hn::Lanes(d)) {
    hn::StoreU(PreciseExp(d, hn::LoadU(d, values + i), vmax, e), d, values + i);
  }
}

inline float* WeightsOf(const uint64_t* keys, int64_t count, float max, const Exponent& e,
                        Buffer<float>& buffer) {
  float* weights = buffer.Get(count + kMaxLanes);
  for (int64_t i = 0; i < count; ++i) weights[i] = KeyLogit(keys[i]);
  std::fill_n(weights + count, kMaxLanes, -kInf);
  Exponentials(weights, count, max, e);
  return weights;
}

// Keys of all logits that are `least` or more, which is not -inf, in index order. Returns how many.
// Pick is for few of them, this is for many.
template <typename T>
int64_t PickMany(const Row& row, float least, uint64_t* keys) {
  const DF d;
  const hn::CappedTag<uint64_t, kMaxLanes / 2> d64;
  const hn::Rebind<float, decltype(d64)> df;
  const hn::Rebind<uint32_t, decltype(d64)> du;
  const hn::Rebind<int32_t, decltype(d64)> di;
  const int64_t lanes = hn::Lanes(d64);
  const auto below = hn::Set(d64, MakeKey(least, std::numeric_limits<uint32_t>::max()) - 1);
  const auto sign = hn::Set(du, 0x80000000u);
  HWY_ALIGN T padded[kCellElements];
  HWY_ALIGN float values[kCellElements];
  int64_t count = 0;
  for (int64_t c = 0; c < CellCount(row.vocab); ++c) {
    if (row.sketch.max[c] < least) continue;
    const T* cell = CellAt(static_cast<const T*>(row.logits), row.vocab, c, padded);
    for (int64_t i = 0; i < kCellElements; i += hn::Lanes(d)) {
      hn::Store(LoadF32(d, cell + i), d, values + i);
    }
    for (int64_t i = 0; i < kCellElements; i += lanes) {
      // MakeKey, lane by lane: adding 0 makes +0 of -0.
      const auto bits = hn::BitCast(di, hn::Add(hn::Load(df, values + i), hn::Zero(df)));
      const auto negative = hn::BitCast(du, hn::BroadcastSignBit(bits));
      const auto order = hn::Xor(hn::BitCast(du, bits), hn::Or(negative, sign));
      const auto index = hn::Iota(du, static_cast<uint32_t>(c * kCellElements + i));
      const auto key =
          hn::Or(hn::ShiftLeft<32>(hn::PromoteTo(d64, order)), hn::PromoteTo(d64, hn::Not(index)));
      count += static_cast<int64_t>(hn::CompressStore(key, hn::Gt(key, below), d64, keys + count));
    }
  }
  return count;
}

// `keys` has room for the row and one vector.
inline int64_t PickManyOf(const Row& row, float least, uint64_t* keys) {
  switch (row.dtype) {
    case DType::kF32:
      return PickMany<float>(row, least, keys);
    case DType::kF16:
      return PickMany<hwy::float16_t>(row, least, keys);
    case DType::kBF16:
      return PickMany<hwy::bfloat16_t>(row, least, keys);
  }
  return 0;
}

// The key that ends the shortest prefix of the sorted tokens with mass `need`; kLowestKey where all
// of them have less.
inline uint64_t LastOfSorted(const uint64_t* keys, const float* weights, int64_t count,
                             uint64_t need) {
  uint64_t mass = 0;
  for (int64_t i = 0; i < count; ++i) {
    mass += FixedWeight(weights[i]);
    if (mass >= need) return keys[i];
  }
  return kLowestKey;
}

// The same for tokens in any order, with keys in [low, high]: histograms of mass over leading bits
// of the keys, each over the members of the last one's decisive bin.
inline uint64_t LastOfUnsorted(const uint64_t* keys, const float* weights, int64_t count,
                               uint64_t low, uint64_t high, uint64_t need, float max,
                               const Exponent& e, SampleScratch& scratch) {
  uint64_t* kept = scratch.narrow_keys.Get(count);
  float* kept_weights = scratch.narrow_weights.Get(count);
  uint64_t* bins = scratch.bins.Get(1 << kBinBits);
  while (count > kSortable) {
    int shift = 0;
    while ((high - low) >> shift >> kBinBits != 0) ++shift;
    std::fill_n(bins, 1 << kBinBits, 0);
    for (int64_t i = 0; i < count; ++i) bins[(keys[i] - low) >> shift] += FixedWeight(weights[i]);
    int64_t bin = static_cast<int64_t>((high - low) >> shift);
    while (bin >= 0 && bins[bin] < need) need -= bins[bin--];
    if (bin < 0) return kLowestKey;
    low += static_cast<uint64_t>(bin) << shift;
    high = low + ((uint64_t{1} << shift) - 1);
    int64_t members = 0;
    for (int64_t i = 0; i < count; ++i) {
      kept[members] = keys[i];
      kept_weights[members] = weights[i];
      members += keys[i] >= low && keys[i] <= high;
    }
    keys = kept;
    weights = kept_weights;
    count = members;
  }
  if (keys != kept) std::copy_n(keys, count, kept);
  scratch.sorter(kept, static_cast<size_t>(count), hwy::SortDescending());
  return LastOfSorted(kept, WeightsOf(kept, count, max, e, scratch.narrow_weights), count, need);
}

// A list in index order that holds all tokens that may be drawn, those whose keys are `last` or
// more, with their weights.
struct Candidates {
  const uint64_t* keys;
  const float* weights;
  int64_t count;
  uint64_t last;

  uint64_t Weight(int64_t i) const {
    return FixedWeight(weights[i]) & (uint64_t{0} - uint64_t{keys[i] >= last});
  }
  uint64_t Total() const {
    uint64_t total = 0;
    for (int64_t i = 0; i < count; ++i) total += Weight(i);
    return total;
  }
  Support SupportOf(uint64_t total, float max, double temperature) const {
    return {.last = last,
            .max = max,
            .temperature = temperature,
            .log_sum = std::log(static_cast<double>(total) / kWeightOne)};
  }
};

inline Drawn DrawListed(const Candidates& from, uint64_t bits, float max, float temperature) {
  const uint64_t total = from.Total();
  const uint64_t target = DrawTarget(bits, total);
  uint64_t mass = 0;
  int64_t i = -1;
  while (mass <= target) mass += from.Weight(++i);
  return {.token = KeyIndex(from.keys[i]), .support = from.SupportOf(total, max, temperature)};
}

// The sorted tokens [0, count), brought into index order.
inline Candidates InIndexOrder(const uint64_t* keys, const float* weights, int64_t count,
                               SampleScratch& scratch) {
  uint64_t* order = scratch.order.Get(count);
  for (int64_t i = 0; i < count; ++i) {
    order[i] = static_cast<uint64_t>(KeyIndex(keys[i])) << 32 | static_cast<uint64_t>(i);
  }
  scratch.sorter(order, static_cast<size_t>(count), hwy::SortAscending());
  float* ordered = scratch.narrow_weights.Get(count);
  const uint64_t last = keys[count - 1];
  for (int64_t i = 0; i < count; ++i) {
    const auto from = static_cast<uint32_t>(order[i]);
    ordered[i] = weights[from];
    order[i] = keys[from];
  }
  return {.keys = order, .weights = ordered, .count = count, .last = last};
}

inline uint64_t FixedSum(const float* weights, int64_t count) {
  uint64_t total = 0;
  for (int64_t i = 0; i < count; ++i) total += FixedWeight(weights[i]);
  return total;
}

// Writes the prefix sums of exp((x - max) / temperature) by cells to scratch.prefix. Returns the
// last one.
inline double CellPrefix(const Row& row, float max, const Exponent& e, SampleScratch& scratch) {
  const DF d;
  const int64_t lanes = hn::Lanes(d);
  const int64_t cells = CellCount(row.vocab);
  double* prefix = scratch.prefix.Get(cells + kMaxLanes);
  HWY_ALIGN float share[kMaxLanes];
  double total = 0;
  for (int64_t c = 0; c < cells; c += lanes) {
    const VF cell_max = hn::LoadU(d, row.sketch.max + c);
    hn::Store(max == kInf ? hn::IfThenElseZero(hn::Eq(cell_max, hn::Set(d, kInf)), hn::Set(d, 1.0f))
                          : PreciseExp(d, cell_max, hn::Set(d, max), e),
              d, share);
    for (int64_t j = 0; j < lanes; ++j) {
      total += double{share[j]} * row.sketch.sum[c + j];
      prefix[c + j] = total;
    }
  }
  return total;
}

// The lowest logit whose weight may be more than 0, and not below `least`.
inline float WeightyFloor(float max, float temperature, float least) {
  const double weightless = max - kWeightlessBelow * std::max(double{temperature}, 0x1p-118);
  return static_cast<float>(std::max(double{least}, weightless));
}

// What min_p, top_k and top_p leave. At least one of them is on.
inline Candidates ListFiltered(const Row& row, const SampleRow& ask, float max,
                               SampleScratch& scratch) {
  const Exponent e = MakeExponent(ask.temperature);
  const float least = max == kInf     ? kInf
                      : ask.min_p > 0 ? MinPFloor(max, ask.temperature, ask.min_p)
                                      : -FLT_MAX;
  uint64_t* keys = scratch.keys.Get(row.vocab + kMaxLanes);
  if (TopKIsOn(ask, row.vocab)) {
    int64_t count = TopKeys(row, ask.top_k, max, least, keys, scratch.sorter);
    const float* weights = WeightsOf(keys, count, max, e, scratch.weights);
    if (ask.top_p < 1) {
      const uint64_t need = MassNeeded(ask.top_p, FixedSum(weights, count));
      const uint64_t last = LastOfSorted(keys, weights, count, need);
      while (keys[count - 1] < last) --count;
    }
    return InIndexOrder(keys, weights, count, scratch);
  }
  uint64_t need = 0;
  float weighty = least;
  if (ask.min_p == 0) {
    const double total = CellPrefix(row, max, e, scratch);
    need = MassNeeded(ask.top_p, static_cast<uint64_t>(total * kWeightOne));
    int64_t count =
        TopKeys(row, std::min(kShortPrefix, row.vocab), max, least, keys, scratch.sorter);
    const float* weights = WeightsOf(keys, count, max, e, scratch.weights);
    if (const uint64_t last = LastOfSorted(keys, weights, count, need); last != kLowestKey) {
      while (keys[count - 1] < last) --count;
      return InIndexOrder(keys, weights, count, scratch);
    }
    weighty = WeightyFloor(max, ask.temperature, least);
  }
  const int64_t count = PickManyOf(row, weighty, keys);
  const float* weights = WeightsOf(keys, count, max, e, scratch.weights);
  uint64_t last = MakeKey(least, std::numeric_limits<uint32_t>::max());
  if (ask.top_p < 1) {
    if (ask.min_p > 0) need = MassNeeded(ask.top_p, FixedSum(weights, count));
    const uint64_t low = MakeKey(weighty, row.vocab), high = MakeKey(max, 0);
    last = std::max(last, LastOfUnsorted(keys, weights, count, low, high, need, max, e, scratch));
  }
  return {.keys = keys, .weights = weights, .count = count, .last = last};
}

// The weights of cell c against the cell's own maximum.
template <typename T>
void CellWeights(const Row& row, int64_t c, const Exponent& e, float* weights) {
  const DF d;
  HWY_ALIGN T padded[kCellElements];
  const T* cell = CellAt(static_cast<const T*>(row.logits), row.vocab, c, padded);
  for (int64_t i = 0; i < kCellElements; i += hn::Lanes(d)) {
    hn::Store(LoadF32(d, cell + i), d, weights + i);
  }
  Exponentials(weights, kCellElements, row.sketch.max[c], e);
}

inline void CellWeightsOf(const Row& row, int64_t c, const Exponent& e, float* weights) {
  switch (row.dtype) {
    case DType::kF32:
      return CellWeights<float>(row, c, e, weights);
    case DType::kF16:
      return CellWeights<hwy::float16_t>(row, c, e, weights);
    case DType::kBF16:
      return CellWeights<hwy::bfloat16_t>(row, c, e, weights);
  }
}

// A draw from the whole row: a cell, then a token of it. The sketch is at the row's temperature.
inline Drawn DrawUnfiltered(const Row& row, const SampleRow& ask, uint64_t bits, float max,
                            SampleScratch& scratch) {
  const Exponent e = MakeExponent(ask.temperature);
  const double total = CellPrefix(row, max, e, scratch);
  const double* prefix = scratch.prefix.Get(0);
  // Less than the total, so some cell's prefix exceeds it, and the first that does has mass.
  const double reach = static_cast<double>(bits >> 11) * 0x1p-53 * total;
  int64_t c = 0;
  while (prefix[c] <= reach) ++c;
  const double before = c == 0 ? 0 : prefix[c - 1];

  HWY_ALIGN float weights[kCellElements];
  CellWeightsOf(row, c, e, weights);
  const uint64_t sum = FixedSum(weights, kCellElements);
  const double part = (reach - before) / (prefix[c] - before);
  const uint64_t target = std::min(static_cast<uint64_t>(part * static_cast<double>(sum)), sum - 1);
  uint64_t mass = 0;
  int64_t i = -1;
  while (mass <= target) mass += FixedWeight(weights[++i]);
  return {.token = static_cast<int32_t>(c * kCellElements + i),
          .support = {.last = kLowestKey,
                      .max = max,
                      .temperature = ask.temperature,
                      .log_sum = std::log(total)}};
}

// The highest logit, the lowest index of equals.
inline Drawn DrawGreedy(const Row& row, float max) {
  uint64_t key = kLowestKey;
  Pick(row, max, 1, &key);
  return {.token = KeyIndex(key),
          .support = {.last = key, .max = max, .temperature = 1, .log_sum = 0}};
}

// ---- Report

inline void Refuse(const SampleArgs& args, int64_t r, RowStatus status) {
  const SampleRow& ask = args.rows[r];
  args.status[r] = status;
  args.tokens[r] = -1;
  args.logprobs[r] = -kInf;
  args.ranks[r] = 0;
  std::fill_n(args.top_ids + ask.first_top_entry, ask.top_logprobs, -1);
  std::fill_n(args.top_logprobs + ask.first_top_entry, ask.top_logprobs, -kInf);
  std::fill_n(args.extra_logprobs + ask.first_extra_entry, ask.extra_count, -kInf);
}

// A row that has been read and has something to draw.
struct OpenRow {
  Rows rows;
  Support raw;
  float max;  // after bias, penalties and mask
};

// Reads row r and writes its logsumexp. False: there is nothing to draw, and its answers are
// written.
inline bool Open(const SampleArgs& args, int64_t r, SampleScratch& scratch, OpenRow& opened) {
  opened.rows = ReadRow(args, r, scratch);
  const Peak raw_peak = FindPeak(opened.rows.raw);
  if (HWY_UNLIKELY(raw_peak.nan_cell >= 0)) {
    args.logsumexp[r] = std::numeric_limits<float>::quiet_NaN();
    Refuse(args, r, {RowCode::kNanLogit, FirstNanOf(opened.rows.raw, raw_peak.nan_cell)});
    return false;
  }
  opened.raw = {.last = kLowestKey, .max = raw_peak.max, .temperature = 1, .log_sum = 0};
  args.logsumexp[r] = raw_peak.max;
  if (raw_peak.max > -kInf) {
    opened.raw.log_sum = std::log(double{TotalSum(opened.rows.raw, raw_peak.max, MakeExponent(1))});
    args.logsumexp[r] = static_cast<float>(raw_peak.max + opened.raw.log_sum);
  }
  opened.max = FindPeak(opened.rows.processed).max;
  if (HWY_LIKELY(opened.max > -kInf)) return true;
  Refuse(args, r, {RowCode::kEmptySupport, -1});
  return false;
}

inline bool IsFiltered(const SampleRow& ask, int64_t vocab) {
  return TopKIsOn(ask, vocab) || ask.top_p < 1 || ask.min_p > 0;
}

inline Drawn Draw(const OpenRow& opened, const SampleRow& ask, SampleScratch& scratch) {
  const Row& row = opened.rows.processed;
  if (ask.temperature == 0) return DrawGreedy(row, opened.max);
  const uint64_t bits = UniformBits(ask.seed, ask.position);
  if (!IsFiltered(ask, row.vocab)) return DrawUnfiltered(row, ask, bits, opened.max, scratch);
  return DrawListed(ListFiltered(row, ask, opened.max, scratch), bits, opened.max, ask.temperature);
}

// Writes all answers of the row but its logsumexp.
inline void Report(const SampleArgs& args, int64_t r, const OpenRow& opened, const Drawn& drawn,
                   SampleScratch& scratch) {
  const SampleRow& ask = args.rows[r];
  const bool is_raw = ask.logprob_mode == LogprobMode::kRaw;
  const Row& row = is_raw ? opened.rows.raw : opened.rows.processed;
  const Support& support = is_raw ? opened.raw : drawn.support;
  const float x = Element(row, drawn.token);
  args.status[r] = {RowCode::kOk, -1};
  args.tokens[r] = drawn.token;
  args.logprobs[r] = static_cast<float>(support.Logprob(x, drawn.token));
  args.ranks[r] = static_cast<int32_t>(1 + CountBeforeOf(row, x, drawn.token));
  if (ask.top_logprobs > 0) {
    uint64_t* keys = scratch.keys.Get(row.vocab);
    TopKeys(row, ask.top_logprobs, support.max, -kInf, keys, scratch.sorter);
    for (int32_t i = 0; i < ask.top_logprobs; ++i) {
      const int32_t id = KeyIndex(keys[i]);
      args.top_ids[ask.first_top_entry + i] = id;
      args.top_logprobs[ask.first_top_entry + i] =
          static_cast<float>(support.Logprob(KeyLogit(keys[i]), id));
    }
  }
  for (int32_t i = 0; i < ask.extra_count; ++i) {
    const int32_t id = args.extra_ids[ask.first_extra + i];
    args.extra_logprobs[ask.first_extra_entry + i] =
        static_cast<float>(support.Logprob(Element(row, id), id));
  }
}

}  // namespace logitd::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // LOGITD_KERNELS_CPU_SAMPLING_SAMPLE_ROW_INL_H_
