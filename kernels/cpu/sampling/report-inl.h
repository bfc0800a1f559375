// sample, report: the answers of a row. Top tokens and the rank come from the sketch of the mode's
// logits; groups that hold nothing large enough are not looked at.
#if defined(LOGITD_KERNELS_CPU_SAMPLING_REPORT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef LOGITD_KERNELS_CPU_SAMPLING_REPORT_INL_H_
#undef LOGITD_KERNELS_CPU_SAMPLING_REPORT_INL_H_
#else
#define LOGITD_KERNELS_CPU_SAMPLING_REPORT_INL_H_
#endif

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

#include "hwy/highway.h"
#include "kernels/cpu/rows/sketch-inl.h"
#include "kernels/cpu/sampling/draw-inl.h"
#include "kernels/cpu/sampling/edit-inl.h"
#include "kernels/cpu/sampling/moments-inl.h"
#include "kernels/cpu/sampling/sample_row.h"

HWY_BEFORE_NAMESPACE();
namespace logitd::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// A row that has been read and has something to draw.
struct OpenRow {
  Rows rows;
  Support raw;
  float max;  // after bias, penalties and mask
};

// Writes the logsumexp of row r, which has been read. False: there is nothing to draw, and its
// answers are written.
inline bool Open(const SampleArgs& args, int64_t r, const Rows& rows, const RowThreads& threads,
                 SampleScratch& scratch, OpenRow& opened) {
  opened.rows = rows;
  const Peak raw_peak = FindPeak(opened.rows.raw);
  if (HWY_UNLIKELY(raw_peak.nan_cell >= 0)) {
    args.logsumexp[r] = std::numeric_limits<float>::quiet_NaN();
    Refuse(args, r, args.rows[r],
           {RowCode::kNanLogit, FirstNan(opened.rows.raw, raw_peak.nan_cell)});
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
  Refuse(args, r, args.rows[r], {RowCode::kEmptySupport, -1});
  if (args.rows[r].want_entropy && raw_peak.max > -kInf)
    args.raw_entropies[r] = EntropyOf(opened.rows.raw, opened.raw, threads, scratch);
  return false;
}

// The distribution of the row as sent that log-probabilities are of.
inline Support SentSupport(const SampleRow& ask, const OpenRow& opened, const RowThreads& threads,
                           SampleScratch& scratch) {
  Support sent = opened.raw;
  if (!IsTempered(ask) || sent.max == kInf) return sent;
  const Row& processed = opened.rows.processed;
  sent.temperature = ActingTemperature(ask);
  const bool is_summed = !IsEdited(ask) && processed.temperature == ask.temperature;
  const double sum = is_summed ? TotalSum(processed, sent.max, MakeExponent(ask.temperature))
                               : MomentsOf(opened.rows.raw, sent, threads, scratch).sum;
  sent.log_sum = std::log(sum);
  return sent;
}

// Writes how many tokens `support` has, and the first of them, as many as the row wants.
inline void ReportSupport(const SampleArgs& args, int64_t r, const Row& row, const Support& support,
                          const RowThreads& threads, ListScratch& scratch) {
  const SampleRow& ask = args.rows[r];
  TokenList list = ListTokens(row, {.least = support.Least()}, MassOfOnes(), threads, scratch);
  Join(list);
  uint64_t* const keys = list.keys;
  uint64_t* const end = std::remove_if(keys, keys + list.counts[0], [&](uint64_t key) {
    return !support.Has(KeyLogit(key), KeyIndex(key));
  });
  const int64_t size = end - keys;
  const int64_t count = std::min<int64_t>(size, ask.want_support);
  args.support_size[r] = static_cast<int32_t>(size);
  if (count < size) std::nth_element(keys, keys + count, end, std::greater<>());
  scratch.sorter(keys, static_cast<size_t>(count), hwy::SortDescending());
  for (int64_t i = 0; i < ask.want_support; ++i) {
    const int64_t to = ask.first_support_entry + i;
    args.support_ids[to] = i < count ? KeyIndex(keys[i]) : -1;
    args.support_logprobs[to] =
        i < count ? static_cast<float>(support.Logprob(KeyLogit(keys[i]), KeyIndex(keys[i])))
                  : -kInf;
  }
}

// Writes all answers of the row except its logsumexp.
inline void Report(const SampleArgs& args, int64_t r, const OpenRow& opened, const Drawn& drawn,
                   const RowThreads& threads, SampleScratch& scratch) {
  const SampleRow& ask = args.rows[r];
  const bool is_sent = ReportsSent(ask);
  const Row& row = is_sent ? opened.rows.raw : opened.rows.processed;
  const Support support = is_sent ? SentSupport(ask, opened, threads, scratch) : drawn.support;
  const float x = Element(row, drawn.token);
  args.status[r] = {RowCode::kOk, -1};
  args.tokens[r] = drawn.token;
  args.logprobs[r] = static_cast<float>(support.Logprob(x, drawn.token));
  args.ranks[r] =
      ask.want_rank ? static_cast<int32_t>(1 + CountBefore(row, x, drawn.token, threads)) : 0;
  if (args.edited) {
    args.support_size[r] = 0;
    args.entropies[r] = args.raw_entropies[r] = 0;
  }
  if (ask.want_entropy) {
    args.raw_entropies[r] = EntropyOf(opened.rows.raw, opened.raw, threads, scratch);
    if (!IsGreedy(ask))
      args.entropies[r] = EntropyOf(opened.rows.processed, drawn.support, threads, scratch);
  }
  if (ask.top_logprobs > 0) {
    const uint64_t* const keys =
        TopKeys(row, ask.top_logprobs, support.max, -kInf, threads, scratch.list).keys;
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
  for (int32_t j = 0; j < ask.draws; ++j) {
    const int32_t token = scratch.draws.Get(0)[j];
    args.draw_tokens[ask.first_draw_entry + j] = token;
    args.draw_logprobs[ask.first_draw_entry + j] =
        static_cast<float>(support.Logprob(Element(row, token), token));
  }
  if (ask.want_support > 0)
    ReportSupport(args, r, opened.rows.processed, drawn.support, threads, scratch.list);
}

}  // namespace logitd::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
