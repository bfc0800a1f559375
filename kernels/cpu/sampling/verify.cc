// verify on the CPU: a thread takes a sequence, and reads its rows in order, each as sample reads
// it. Rows after a refused draft are never read. All threads take the long rows of the last few
// sequences (rows/row_threads.h).
//
// Cost: one read of each row up to the first refused draft; block verification first reads
// rows until s is 0, then those up to the bonus token. A draft with probabilities on an unfiltered
// row lists every token of the row whose weight is not 0, as a flat top-p does.
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

// The tokens that may be drawn from a row, with integer weights.
struct Target {
  Candidates tokens;
  uint64_t total;
  Support support;
};

Target TargetOf(const SampleRow& ask, const OpenRow& opened, const RowThreads& threads,
                SampleScratch& scratch) {
  const Candidates tokens = ListAll(opened.rows.processed, ask, opened.max, threads, scratch);
  const uint64_t total = TotalOf(tokens, threads, scratch.list);
  const double temperature = IsGreedy(ask) ? 1 : ActingTemperature(ask);
  return {tokens, total, tokens.SupportOf(total, opened.max, temperature)};
}

// A draft against its target, whose weights count `share` times.
struct Weighed {
  uint64_t weight = 0;  // of the draft's token in the target, counted once
  uint64_t mass;        // of its q
  uint64_t left = 0;    // the sum of what q leaves
};

// A weight less that of q.
uint64_t LeftOf(uint64_t weight, double share, uint64_t mass) {
  if (share < 1) weight = WeightOfShare(share, weight);
  return weight - std::min(weight, mass);
}

Weighed Weigh(const VerifyArgs& args, const VerifyDraft& draft, const Target& target,
              double share) {
  DraftMass draft_mass(args, draft, target.total);
  Weighed weighed{.mass = DraftMass(args, draft, target.total).Of(draft.token)};
  for (int64_t p = 0; p < target.tokens.list.pieces; ++p) {
    for (int64_t i = 0; i < target.tokens.list.counts[p]; ++i) {
      const int32_t token = KeyIndex(target.tokens.list.KeysOf(p)[i]);
      const uint64_t weight = target.tokens.Weight(p, i);
      if (token == draft.token) weighed.weight = weight;
      weighed.left += LeftOf(weight, share, draft_mass.Of(token));
    }
  }
  return weighed;
}

// A token from what q leaves, whose sum is `left`.
int32_t DrawLeft(const VerifyArgs& args, const VerifyDraft& draft, const Target& target,
                 double share, uint64_t left, uint64_t bits) {
  // Nothing is left where p equals q up to rounding. Then the draw is from p.
  const bool all = left == 0;
  const uint64_t goal = DrawTarget(bits, all ? target.total : left);
  DraftMass draft_mass(args, draft, target.total);
  int32_t token = -1;
  uint64_t sum = 0;
  for (int64_t p = 0, i = 0; sum <= goal;) {
    if (i == target.tokens.list.counts[p]) {
      ++p;
      i = 0;
      continue;
    }
    token = KeyIndex(target.tokens.list.KeysOf(p)[i]);
    const uint64_t weight = target.tokens.Weight(p, i++);
    sum += all ? weight : LeftOf(weight, share, draft_mass.Of(token));
  }
  return token;
}

// Keeps the draft or draws another token, so that the token's distribution is the row's.
Drawn Reject(const VerifyArgs& args, const VerifyDraft& draft, const SampleRow& ask,
             const OpenRow& opened, const RowThreads& threads, SampleScratch& scratch) {
  const Target target = TargetOf(ask, opened, threads, scratch);
  const Weighed weighed = Weigh(args, draft, target, /*share=*/1);
  Drawn drawn{.token = draft.token, .support = target.support};
  if (MulHigh(CoinBits(ask.seed, ask.position), weighed.mass) < weighed.weight) return drawn;
  drawn.token =
      DrawLeft(args, draft, target, /*share=*/1, weighed.left, UniformBits(ask.seed, ask.position));
  return drawn;
}

// The token of a row with a draft, in a sequence about which `choice` has decided.
Drawn Decided(const VerifyArgs& args, const VerifyDraft& draft, const SampleRow& ask,
              const BlockChoice& choice, bool is_accepted, const OpenRow& opened,
              const RowThreads& threads, SampleScratch& scratch) {
  const Target target = TargetOf(ask, opened, threads, scratch);
  if (is_accepted) return {.token = draft.token, .support = target.support};
  const double share = choice.chosen_share;
  const uint64_t left = Weigh(args, draft, target, share).left;
  return {.token = DrawLeft(args, draft, target, share, left, UniformBits(ask.seed, ask.position)),
          .support = target.support};
}

// A sequence's rows in the block of rows from `first` on, all of which `block` has.
struct RowsOfBlock {
  const VerifySequence& sequence;
  SampleArgs block;
  int64_t first;
  int64_t begin, end;  // the rows, counted from the call's first

  RowsOfBlock(const VerifyArgs& args, int64_t first, int64_t s)
      : sequence(args.sequences[s]),
        block(RowsFrom(args.sample, first)),
        first(first),
        begin(std::max(sequence.first_row, first)),
        end(std::min(sequence_end(), first + block.logits.rows)) {}

  int64_t sequence_end() const { return sequence.first_row + sequence.rows; }
  const SampleRow& ask(int64_t r) const { return block.rows[r - first]; }
  // The row's draft; null: it is the sequence's last.
  const VerifyDraft* DraftOf(const VerifyArgs& args, int64_t r) const {
    return r + 1 < sequence_end() ? &args.drafts[r] : nullptr;
  }
  // False: the row is refused, and its answers are written.
  bool OpenRowAt(int64_t r, const RowThreads& threads, SampleScratch& scratch,
                 OpenRow& opened) const {
    const Rows rows = ReadRow(block, r - first, threads, scratch);
    return Open(block, r - first, rows, threads, scratch, opened);
  }
};

// Takes row r into the choice.
void ChooseAt(const VerifyArgs& args, const RowsOfBlock& rows, int64_t r, const RowThreads& threads,
              SampleScratch& scratch, BlockChoice& choice) {
  const VerifyDraft* const draft = rows.DraftOf(args, r);
  const double share = choice.share;
  OpenRow opened;
  choice.ended = !rows.OpenRowAt(r, threads, scratch, opened) || draft == nullptr;
  Target target;
  Weighed weighed;
  if (!choice.ended) {
    target = TargetOf(rows.ask(r), opened, threads, scratch);
    weighed = Weigh(args, *draft, target, share);
  }
  if (r > rows.sequence.first_row) {
    const SampleRow& before = args.sample.rows[r - 1];
    const uint64_t coin = CoinBits(before.seed, before.position);
    if (choice.ended ? CoinChoosesLast(share, coin)
                     : CoinChooses(share, weighed.left, target.total, coin)) {
      choice.chosen = static_cast<int32_t>(r - rows.sequence.first_row);
      choice.chosen_share = share;
    }
  }
  if (choice.ended) return;
  choice.share = ShareAfter(share, weighed.weight, weighed.mass);
  choice.ended = choice.share == 0;  // no later row can be chosen
}

// The part of sequence s in the block of rows from `first` on: what its choice is so far.
void ChooseOne(const VerifyArgs& args, int64_t first, int64_t s, const RowThreads& threads,
               SampleScratch& scratch, BlockChoice& choice) {
  const RowsOfBlock rows(args, first, s);
  if (rows.begin == rows.sequence.first_row)
    choice = {.share = 1, .chosen_share = 1, .chosen = 0, .ended = false};
  for (int64_t r = rows.begin; r < rows.end && !choice.ended; ++r)
    ChooseAt(args, rows, r, threads, scratch, choice);
}

// Emits the token of a row that is reached. True: it is the row's draft, and it is accepted.
bool Emit(const VerifyArgs& args, const RowsOfBlock& rows, int64_t r, const BlockChoice* choice,
          const RowThreads& threads, SampleScratch& scratch) {
  const SampleRow& ask = rows.ask(r);
  const VerifyDraft* const draft = rows.DraftOf(args, r);
  OpenRow opened;
  if (!rows.OpenRowAt(r, threads, scratch, opened)) return false;
  bool is_accepted = choice != nullptr && r - rows.sequence.first_row < choice->chosen;
  Drawn drawn;
  if (draft == nullptr || draft->kind == DraftKind::kGreedy) {
    drawn = Draw(opened.rows.processed, ask, rows.block.history, opened.max, threads, scratch);
  } else if (choice != nullptr) {
    drawn = Decided(args, *draft, ask, *choice, is_accepted, opened, threads, scratch);
  } else {
    drawn = Reject(args, *draft, ask, opened, threads, scratch);
  }
  Report(rows.block, r - rows.first, opened, drawn, threads, scratch);
  if (choice == nullptr) is_accepted = draft != nullptr && drawn.token == draft->token;
  return is_accepted;
}

// The part of sequence s in the block of rows from `first` on. `choice`: with block verification,
// what was chosen.
void VerifyOne(const VerifyArgs& args, int64_t first, int64_t s, const RowThreads& threads,
               SampleScratch& scratch, const BlockChoice* choice) {
  const RowsOfBlock rows(args, first, s);
  int32_t& accepted = args.accepted[s];
  int64_t r = rows.begin;
  if (r == rows.sequence.first_row) accepted = 0;
  while (r < rows.end && accepted == r - rows.sequence.first_row) {
    accepted += Emit(args, rows, r, choice, threads, scratch) ? 1 : 0;
    ++r;
  }
  for (; r < rows.end; ++r) {
    rows.block.logsumexp[r - first] = std::numeric_limits<float>::quiet_NaN();
    Refuse(rows.block, r - first, rows.ask(r), {RowCode::kNotReached, -1});
  }
}

}  // namespace logitd::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace logitd::cpu {

HWY_EXPORT(ChooseOne);
HWY_EXPORT(VerifyOne);

void Verify(const VerifyArgs& args, ThreadPool& pool, VerifyScratch& scratch) {
  for (int pass = 0; pass < VerifyPasses(args); ++pass)
    VerifyRows(args, pass, /*first=*/0, pool, scratch);
}

void VerifyRows(const VerifyArgs& args, int pass, int64_t first, ThreadPool& pool,
                VerifyScratch& scratch) {
  const bool cut = MayBeCut(args.sample.logits.cols);
  const bool chooses = pass + 1 < VerifyPasses(args);
  BlockChoice* const choices = args.blocks ? scratch.choices.Get(args.sequence_count) : nullptr;
  const auto takes_part = [&](int64_t s) {
    const VerifySequence& sequence = args.sequences[s];
    return (!chooses || sequence.block != 0) &&
           std::max(sequence.first_row, first) <
               std::min(sequence.first_row + sequence.rows, first + args.sample.logits.rows);
  };
  FinishRows(
      args.sequence_count, pool, [&](int64_t s) { return cut && takes_part(s); },
      [&](int64_t s, const RowThreads& threads) {
        if (!takes_part(s)) return;
        SampleScratch& of_thread = SampleScratchOfThisThread();
        if (chooses) {
          HWY_DYNAMIC_DISPATCH(ChooseOne)(args, first, s, threads, of_thread, choices[s]);
        } else {
          HWY_DYNAMIC_DISPATCH(VerifyOne)
          (args, first, s, threads, of_thread,
           args.sequences[s].block != 0 ? &choices[s] : nullptr);
        }
      });
}

}  // namespace logitd::cpu
#endif  // HWY_ONCE
