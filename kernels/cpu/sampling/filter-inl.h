// sample, filter: the tokens that the filters leave of a row, as a list with weights.
//
// The tokens of a small top_k, and the first 256 for a top_p that needs no more, come sorted from
// the sketch. Otherwise all tokens that may be left are listed, and histograms find the last one.
#if defined(LOGITD_KERNELS_CPU_SAMPLING_FILTER_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef LOGITD_KERNELS_CPU_SAMPLING_FILTER_INL_H_
#undef LOGITD_KERNELS_CPU_SAMPLING_FILTER_INL_H_
#else
#define LOGITD_KERNELS_CPU_SAMPLING_FILTER_INL_H_
#endif

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "hwy/highway.h"
#include "kernels/cpu/rows/sketch-inl.h"
#include "kernels/cpu/rows/token_list-inl.h"
#include "kernels/cpu/sampling/sample_row.h"

HWY_BEFORE_NAMESPACE();
namespace logitd::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// True where typical_p and xtc choose the token with this key.
inline bool IsChosen(const Choice& choice, uint64_t key, float max, double temperature) {
  return choice.Has(key, KeyLogit(key), max, temperature,
                    [=](float value) { return MakeKey(value, KeyIndex(key)); });
}

// The tokens that a draw is from: of those whose keys are `last` or more, except those of -inf, the
// chosen ones.
struct Support {
  uint64_t last;
  float max;
  double temperature;
  double log_sum;  // ln sum exp((x - max) / temperature); where max is +inf, ln of their number
  Choice choice = Choice::All();

  bool Has(float x, int64_t index) const {
    const uint64_t key = MakeKey(x, index);
    return x > -kInf && (max < kInf || x == kInf) && key >= last &&
           IsChosen(choice, key, max, temperature);
  }
  // No logit of the support is lower.
  float Least() const {
    return max == kInf ? max : last > MakeKey(-kInf, 0) ? KeyLogit(last) : -kInf;
  }
  // -inf where not in the support.
  double Logprob(float x, int64_t index) const {
    if (!Has(x, index)) return -std::numeric_limits<double>::infinity();
    return LogprobOf(x, max, temperature, log_sum);
  }
};

// One sum of those by kSigmaSums, in their order.
inline double FoldSigmaSums(double* sums) {
  for (int half = kSigmaSums / 2; half > 0; half /= 2) {
    for (int j = 0; j < half; ++j) sums[j] += sums[j + half];
  }
  return sums[0];
}

// Tokens in the shortest prefix of the sorted tokens with mass `need`; 0 where all of them have
// less.
inline int64_t PrefixWithMass(const float* weights, int64_t count, uint64_t need) {
  uint64_t mass = 0;
  for (int64_t i = 0; i < count; ++i) {
    mass += FixedWeight(weights[i]);
    if (mass >= need) return i + 1;
  }
  return 0;
}

// The list of what may be drawn: its tokens whose keys are `last` or more. It holds all of them;
// those that are not chosen weigh nothing.
struct Candidates {
  TokenList list;
  uint64_t last;
  Choice choice = Choice::All();

  uint64_t Weight(int64_t piece, int64_t i) const {
    const bool in = list.KeysOf(piece)[i] >= last;
    return FixedWeight(list.WeightsOf(piece)[i]) & (uint64_t{0} - uint64_t{in});
  }
  Support SupportOf(uint64_t total, float max, double temperature) const {
    return {.last = last,
            .max = max,
            .temperature = temperature,
            .log_sum = std::log(static_cast<double>(total) / kWeightOne),
            .choice = choice};
  }
};

// The total of the weights; scratch.blocks gets those of blocks.
inline uint64_t TotalOf(const Candidates& from, const RowThreads& threads, ListScratch& scratch) {
  const TokenList& list = from.list;
  uint64_t* const blocks = scratch.blocks.Get(list.pieces * list.BlocksPerPiece());
  return MassInBlocks(list, from.last, blocks, threads);
}

// The sorted tokens [0, count), brought into index order.
inline Candidates InIndexOrder(const uint64_t* keys, const float* weights, int64_t count,
                               ListScratch& scratch) {
  uint64_t* order = scratch.kept_keys.Get(count + kMaxLanes);
  for (int64_t i = 0; i < count; ++i) {
    order[i] = static_cast<uint64_t>(KeyIndex(keys[i])) << 32 | static_cast<uint64_t>(i);
  }
  scratch.sorter(order, static_cast<size_t>(count), hwy::SortAscending());
  float* ordered = scratch.kept_weights.Get(count + kMaxLanes);
  const uint64_t last = keys[count - 1];
  for (int64_t i = 0; i < count; ++i) {
    const auto from = static_cast<uint32_t>(order[i]);
    ordered[i] = weights[from];
    order[i] = keys[from];
  }
  return {
      .list = {.keys = order, .weights = ordered, .stride = count, .pieces = 1, .counts = {count}},
      .last = last};
}

inline uint64_t FixedSum(const float* weights, int64_t count) {
  uint64_t total = 0;
  for (int64_t i = 0; i < count; ++i) total += FixedWeight(weights[i]);
  return total;
}

// Writes the prefix sums, by cells, of exp((x - max) / temperature) to scratch.prefix. Returns the
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

// Writes the sums of cell c for top_n_sigma to `below` and `squares`. Returns its tokens above
// -inf.
template <typename T>
int64_t AddCell(const T* logits, const Row& row, int64_t c, float max, double* below,
                double* squares) {
  const DF d;
  HWY_ALIGN T padded[kCellElements];
  HWY_ALIGN float x[kCellElements];
  const T* cell = CellAt(logits, row.vocab, c, padded);
  for (int64_t i = 0; i < kCellElements; i += hn::Lanes(d))
    hn::Store(LoadF32(d, cell + i), d, x + i);
  double sums[kSigmaSums] = {}, square_sums[kSigmaSums] = {};
  int64_t count = 0;
  for (int64_t i = 0; i < kCellElements; i += kSigmaSums) {
    for (int64_t j = 0; j < kSigmaSums; ++j) {
      const double distance = BelowMax(max, x[i + j]);
      sums[j] += distance;
      square_sums[j] += distance * distance;
      count += x[i + j] > -kInf ? 1 : 0;
    }
  }
  *below = FoldSigmaSums(sums);
  *squares = FoldSigmaSums(square_sums);
  return count;
}

// The sums of the row for top_n_sigma; its largest logit is finite.
inline SigmaSums AddRow(const Row& row, float max, const RowThreads& threads,
                        SampleScratch& scratch) {
  const int64_t cells = CellCount(row.vocab);
  double* const below = scratch.prefix.Get(2 * cells);
  double* const squares = below + cells;
  int64_t counts[kMostPieces] = {};
  const RowPieces pieces = threads.Cut(row.vocab);
  threads.For(pieces.count, [&](int64_t p) {
    AsType(row.dtype, row.logits, [&](const auto* logits) {
      for (int64_t c = pieces.begin(p); c < pieces.end(p); ++c)
        counts[p] += AddCell(logits, row, c, max, below + c, squares + c);
    });
  });
  double sums[kSigmaSums] = {}, square_sums[kSigmaSums] = {};
  for (int64_t c = 0; c < cells; ++c) {
    sums[c % kSigmaSums] += below[c];
    square_sums[c % kSigmaSums] += squares[c];
  }
  return {.below = FoldSigmaSums(sums),
          .squares = FoldSigmaSums(square_sums),
          .count = std::accumulate(counts, counts + pieces.count, int64_t{0})};
}

// The tokens of a nucleus or of a small top_k, sorted, with weights; `mass` is a weight's.
inline float* WeighSorted(const SortedKeys& top, const MassOfWeights& mass, ListScratch& scratch) {
  float* const weights = scratch.weights.Get(top.count + kMaxLanes);
  mass.Weigh(top.keys, top.count, weights);
  return weights;
}

// What top_k leaves of many tokens, and top_p of those.
inline Candidates ListTopK(const Row& row, const SampleRow& ask, float max, float least,
                           const MassOfWeights& mass, const RowThreads& threads,
                           ListScratch& scratch) {
  KeyRange range;
  Candidates left;
  left.list = ListTop(row, ask.top_k, max, BoundOf(row, ask.top_k, max), least, range, mass,
                      threads, scratch);
  left.last = std::max(range.low, LastKey(left.list, range, static_cast<uint64_t>(ask.top_k),
                                          MassOfOnes(), threads, scratch));
  if (ask.top_p < 1) {
    const uint64_t need = MassNeeded(ask.top_p, TotalOf(left, threads, scratch));
    left.last = std::max(left.last, LastKey(left.list, range, need, mass, threads, scratch));
  }
  return left;
}

// The tokens that the filters before typical_p leave. At least one filter is on.
inline Candidates ListPrefix(const Row& row, const SampleRow& ask, float max,
                             const RowThreads& threads, SampleScratch& scratch) {
  ListScratch& lists = scratch.list;
  const MassOfWeights mass = {.max = max, .e = MakeExponent(ask.temperature)};
  float least = LeastKept(ask, max);
  if (SigmaIsOn(ask) && max < kInf) {
    least = std::max(least, SigmaBorder(ask, max, AddRow(row, max, threads, scratch)));
  }
  if (TopKIsOn(ask, row.vocab)) {
    if (ask.top_k >= kManyTokens) return ListTopK(row, ask, max, least, mass, threads, lists);
    const SortedKeys top = TopKeys(row, ask.top_k, max, least, threads, lists);
    const float* weights = WeighSorted(top, mass, lists);
    int64_t count = top.count;
    if (ask.top_p < 1) {
      const uint64_t need = MassNeeded(ask.top_p, FixedSum(weights, count));
      count = PrefixWithMass(weights, count, need);
    }
    return InIndexOrder(top.keys, weights, count, lists);
  }
  uint64_t need = 0;
  const bool sums_needed = SumsAreOfRow(ask, row.vocab);
  if (sums_needed) {
    const double total = CellPrefix(row, max, mass.e, scratch);
    need = MassNeeded(ask.top_p, WholeOf(total));
    // Most nuclei are short: then a few sorted tokens hold them.
    const int64_t k = std::min(kShortPrefix, row.vocab);
    const SortedKeys top = TopKeys(row, k, max, least, threads, lists);
    const float* weights = WeighSorted(top, mass, lists);
    const int64_t prefix = PrefixWithMass(weights, top.count, need);
    if (prefix > 0) return InIndexOrder(top.keys, weights, prefix, lists);
  }
  Candidates left;
  left.list = ListTokens(row, {.least = least}, mass, threads, lists);
  left.last = MakeKey(least, std::numeric_limits<uint32_t>::max());
  if (ask.top_p < 1) {
    if (!sums_needed) need = MassNeeded(ask.top_p, TotalOf(left, threads, lists));
    const KeyRange range = {.low = MakeKey(least, row.vocab), .high = MakeKey(max, 0)};
    left.last = std::max(left.last, LastKey(left.list, range, need, mass, threads, lists));
  }
  return left;
}

// Calls visit(i, key, weight) for the entries of piece p that weigh anything.
template <class Visit>
void EachWeighed(const Candidates& from, int64_t p, Visit visit) {
  for (int64_t i = 0; i < from.list.counts[p]; ++i) {
    const uint64_t weight = from.Weight(p, i);
    if (weight != 0) visit(i, from.list.KeysOf(p)[i], weight);
  }
}

// Finds what typical_p keeps: the mean of the surprises, and the last key of their order. Sorts all
// that the filters before it left, which is most often little.
inline void ChooseTypical(const Candidates& from, const SampleRow& ask, float max, uint64_t total,
                          const RowThreads& threads, SampleScratch& scratch, Choice& choice) {
  const TokenList& list = from.list;
  const double temperature = ActingTemperature(ask);
  uint64_t sums[kMostPieces] = {};
  threads.For(list.pieces, [&](int64_t p) {
    EachWeighed(from, p, [&](int64_t, uint64_t key, uint64_t weight) {
      sums[p] += WeighedSurprise(weight, Surprise(KeyLogit(key), max, temperature));
    });
  });
  choice.mean = MeanSurprise(std::accumulate(sums, sums + list.pieces, uint64_t{0}), total);
  // A key's token is replaced by its place in the list, whose order is that of the tokens.
  uint64_t* const keys = scratch.typical.Get(list.Count() + kMaxLanes);
  int64_t count = 0, first = 0;
  for (int64_t p = 0; p < list.pieces; first += list.stride, ++p) {
    EachWeighed(from, p, [&](int64_t i, uint64_t key, uint64_t) {
      const double surprise = Surprise(KeyLogit(key), max, temperature);
      keys[count++] = MakeKey(Typicality(surprise, choice.mean), first + i);
    });
  }
  scratch.list.sorter(keys, static_cast<size_t>(count), hwy::SortDescending());
  const uint64_t need = MassNeeded(ask.typical_p, total);
  uint64_t mass = 0;
  for (int64_t n = 0; n < count && mass < need; ++n) {
    const int64_t p = KeyIndex(keys[n]) / list.stride, i = KeyIndex(keys[n]) % list.stride;
    mass += from.Weight(p, i);
    choice.typical_last = MakeKey(KeyLogit(keys[n]), KeyIndex(list.KeysOf(p)[i]));
  }
}

// Applies typical_p and xtc. What they do not choose weighs nothing from then on.
inline void Choose(Candidates& from, const SampleRow& ask, float max, const RowThreads& threads,
                   SampleScratch& scratch) {
  const TokenList& list = from.list;
  const double temperature = ActingTemperature(ask);
  const auto remove = [&] {
    threads.For(list.pieces, [&](int64_t p) {
      EachWeighed(from, p, [&](int64_t i, uint64_t key, uint64_t) {
        if (!IsChosen(from.choice, key, max, temperature)) list.WeightsOf(p)[i] = 0;
      });
    });
  };
  if (TypicalIsOn(ask)) {
    ChooseTypical(from, ask, max, TotalOf(from, threads, scratch.list), threads, scratch,
                  from.choice);
    remove();
  }
  if (!XtcActs(ask)) return;
  const uint64_t need = MassNeeded(ask.xtc_threshold, TotalOf(from, threads, scratch.list));
  uint64_t first[kMostPieces];
  threads.For(list.pieces, [&](int64_t p) {
    first[p] = from.choice.first;
    EachWeighed(from, p, [&](int64_t, uint64_t key, uint64_t weight) {
      if (weight >= need) first[p] = std::min(first[p], key);
    });
  });
  from.choice.first = *std::min_element(first, first + list.pieces);
  remove();
}

// The tokens that the filters leave. At least one filter is on.
inline Candidates ListFiltered(const Row& row, const SampleRow& ask, float max,
                               const RowThreads& threads, SampleScratch& scratch) {
  Candidates left = ListPrefix(row, ask, max, threads, scratch);
  if (ChoiceIsOn(ask)) Choose(left, ask, max, threads, scratch);
  return left;
}

}  // namespace logitd::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
