// verify on the CPU: a thread takes a sequence, and reads its rows in order, each as sample reads
// it. Rows after a refused draft are never read. All threads take the long rows of the last few
// sequences (rows/row_threads.h).
//
// Cost: one read of each row up to the first refused draft. A draft with probabilities on an
// unfiltered row lists every token of the row whose weight is not 0, as a flat top-p does.
#include "kernels/cpu/sampling/verify.h"

#include <algorithm>
#include <cmath>
#include <limits>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/sampling/verify.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/cpu/sampling/draw-inl.h"
#include "kernels/cpu/sampling/report-inl.h"

#ifndef LOGITD_KERNELS_CPU_VERIFY_ONCE_
#define LOGITD_KERNELS_CPU_VERIFY_ONCE_

namespace logitd::cpu {

// The draft's probabilities q as integers of the target's scale. Asked by ascending token.
class DraftMass {
 public:
  DraftMass(const VerifyArgs& args, const VerifyDraft& draft, uint64_t total)
      : probs_(args.draft_probs + draft.first_prob), scale_(static_cast<double>(total)) {
    if (draft.kind == DraftKind::kDense) return;
    id_ = args.draft_ids + draft.first_id;
    ids_end_ = id_ + draft.count;
  }

  uint64_t Of(int32_t token) {
    if (id_ == nullptr) return DraftWeight(probs_[token], scale_);
    while (id_ != ids_end_ && *id_ < token) {
      ++id_;
      ++probs_;
    }
    return id_ != ids_end_ && *id_ == token ? DraftWeight(*probs_, scale_) : 0;
  }

 private:
  const float* probs_;
  double scale_;
  const int32_t* id_ = nullptr;
  const int32_t* ids_end_ = nullptr;
};

}  // namespace logitd::cpu

#endif  // LOGITD_KERNELS_CPU_VERIFY_ONCE_

HWY_BEFORE_NAMESPACE();
namespace logitd::cpu::HWY_NAMESPACE {

// All that may be drawn from the row, as a list.
Candidates ListAll(const Row& row, const SampleRow& ask, float max, const RowThreads& threads,
                   SampleScratch& scratch) {
  if (IsGreedy(ask)) {
    uint64_t* const key = scratch.list.keys.Get(1 + kMaxLanes);
    float* const weight = scratch.list.weights.Get(1 + kMaxLanes);
    Pick(row, max, 1, key);
    *weight = 1;
    return {.list = {.keys = key, .weights = weight, .stride = 1, .pieces = 1, .counts = {1}},
            .last = *key};
  }
  if (IsFiltered(ask, row.vocab)) return ListFiltered(row, ask, max, threads, scratch);
  const MassOfWeights mass = {.max = max, .e = MakeExponent(ask.temperature)};
  return {.list = ListTokens(row, {.least = LeastKept(ask, max)}, mass, threads, scratch.list),
          .last = kLowestKey};
}

// Keeps the draft or draws another token, so that the token's distribution is the row's.
Drawn Reject(const VerifyArgs& args, const VerifyDraft& draft, const SampleRow& ask,
             const OpenRow& opened, const RowThreads& threads, SampleScratch& scratch) {
  const Candidates target = ListAll(opened.rows.processed, ask, opened.max, threads, scratch);
  const uint64_t total = TotalOf(target, threads, scratch.list);
  const double temperature = IsGreedy(ask) ? 1 : ActingTemperature(ask);
  Drawn drawn{.token = draft.token, .support = target.SupportOf(total, opened.max, temperature)};

  DraftMass draft_mass(args, draft, total);
  uint64_t draft_weight = 0, left = 0;
  for (int64_t p = 0; p < target.list.pieces; ++p) {
    for (int64_t i = 0; i < target.list.counts[p]; ++i) {
      const int32_t token = KeyIndex(target.list.KeysOf(p)[i]);
      const uint64_t weight = target.Weight(p, i), mass = draft_mass.Of(token);
      if (token == draft.token) draft_weight = weight;
      left += weight - std::min(weight, mass);
    }
  }
  const uint64_t mass = DraftMass(args, draft, total).Of(draft.token);
  if (MulHigh(CoinBits(ask.seed, ask.position), mass) < draft_weight) return drawn;

  // Nothing is left where p equals q up to rounding. Then the draw is from p.
  const bool all = left == 0;
  const uint64_t goal = DrawTarget(UniformBits(ask.seed, ask.position), all ? total : left);
  DraftMass again(args, draft, total);
  uint64_t sum = 0;
  for (int64_t p = 0, i = 0; sum <= goal;) {
    if (i == target.list.counts[p]) {
      ++p;
      i = 0;
      continue;
    }
    drawn.token = KeyIndex(target.list.KeysOf(p)[i]);
    const uint64_t weight = target.Weight(p, i++);
    sum += weight - (all ? 0 : std::min(weight, again.Of(drawn.token)));
  }
  return drawn;
}

// Emits the token of a row that is reached. True: it is the row's draft, so that the next row is
// reached too. `r` counts from the first row of `block`.
bool Emit(const VerifyArgs& args, const SampleArgs& block, int64_t r, const VerifyDraft* draft,
          const RowThreads& threads, SampleScratch& scratch) {
  const SampleRow& ask = block.rows[r];
  OpenRow opened;
  const Rows rows = ReadRow(block, r, threads, scratch);
  if (!Open(block, r, rows, threads, scratch, opened)) return false;
  const Drawn drawn = draft != nullptr && draft->kind != DraftKind::kGreedy
                          ? Reject(args, *draft, ask, opened, threads, scratch)
                          : Draw(opened.rows.processed, ask, block.history, opened.max,
                                  threads, scratch);
  Report(block, r, opened, drawn, threads, scratch);
  return draft != nullptr && drawn.token == draft->token;
}

// The part of sequence s in the block of rows from `first` on.
void VerifyOne(const VerifyArgs& args, int64_t first, int64_t s, const RowThreads& threads,
               SampleScratch& scratch) {
  const VerifySequence& sequence = args.sequences[s];
  const SampleArgs block = RowsFrom(args.sample, first);
  const int64_t sequence_end = sequence.first_row + sequence.rows;
  const int64_t end = std::min(sequence_end, first + block.logits.rows);
  int64_t r = std::max(sequence.first_row, first);
  int32_t& accepted = args.accepted[s];
  if (r == sequence.first_row) accepted = 0;
  while (r < end && accepted == r - sequence.first_row) {
    const VerifyDraft* const draft = r + 1 < sequence_end ? &args.drafts[r] : nullptr;
    accepted += Emit(args, block, r - first, draft, threads, scratch) ? 1 : 0;
    ++r;
  }
  for (; r < end; ++r) {
    block.logsumexp[r - first] = std::numeric_limits<float>::quiet_NaN();
    Refuse(block, r - first, block.rows[r - first], {RowCode::kNotReached, -1});
  }
}

}  // namespace logitd::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace logitd::cpu {

HWY_EXPORT(VerifyOne);

void Verify(const VerifyArgs& args, ThreadPool& pool) { VerifyRows(args, /*first=*/0, pool); }

void VerifyRows(const VerifyArgs& args, int64_t first, ThreadPool& pool) {
  const bool cut = MayBeCut(args.sample.logits.cols);
  const auto has_rows = [&](int64_t s) {
    const VerifySequence& sequence = args.sequences[s];
    return std::max(sequence.first_row, first) <
           std::min(sequence.first_row + sequence.rows, first + args.sample.logits.rows);
  };
  FinishRows(
      args.sequence_count, pool, [&](int64_t s) { return cut && has_rows(s); },
      [&](int64_t s, const RowThreads& threads) {
        if (!has_rows(s)) return;
        HWY_DYNAMIC_DISPATCH(VerifyOne)(args, first, s, threads, SampleScratchOfThisThread());
      });
}

}  // namespace logitd::cpu
#endif  // HWY_ONCE
