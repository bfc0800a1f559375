// The kernel of sample and verify: a row's stages in order (sample.cu says what they cost).
#ifndef LOGITD_KERNELS_CUDA_SAMPLING_SAMPLE_KERNEL_CUH_
#define LOGITD_KERNELS_CUDA_SAMPLING_SAMPLE_KERNEL_CUH_

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/sampling/draft.cuh"
#include "kernels/cuda/sampling/draw_row.cuh"
#include "kernels/cuda/sampling/draws.cuh"
#include "kernels/cuda/sampling/edit.cuh"
#include "kernels/cuda/sampling/late_edits.cuh"
#include "kernels/cuda/sampling/moments.cuh"
#include "kernels/cuda/sampling/report.cuh"
#include "kernels/cuda/sampling/sample_row.cuh"
#include "kernels/cuda/sampling/support.cuh"
#include "kernels/cuda/sampling/watermark.cuh"

namespace logitd::cuda {

// A row's parameters, as its stages need them.
struct RowNeeds {
  bool edited;
  bool greedy;
  bool is_sent;      // ReportsSent
  bool sums_needed;  // SumsAreOfRow
  bool twice;        // the row as sent is summed at temperature 1 and at its own
  float log2e_over_temperature;
  // Tokens that come sorted: for the report, and what filters usually leave. 0: none are needed.
  int listed;
  bool sketched;          // the list or a rank needs the sketch
  bool lists_are_sorted;  // those are of the logits that the report is of

  // `row`: the kernel's type of it.
  template <class Row>
  __device__ RowNeeds(const SampleParams& p, const SampleRow& ask, const Row& row)
      : edited(Row::kMayBeEdited && IsEdited(ask)),
        greedy(IsGreedy(ask)),
        is_sent(ReportsSent(ask)),
        sums_needed(SumsAreOfRow(ask, row.vocab)),
        twice(!edited && sums_needed && ask.temperature != 1),
        log2e_over_temperature(kLog2E / (sums_needed ? ActingTemperature(ask) : 1.0f)),
        lists_are_sorted(!is_sent || !edited) {
    listed = lists_are_sorted ? max(1, ListedTops(ask)) : 1;
    const bool late = Row::kMayBeEdited && IsEditedLate<Row::kMayAskMore>(p, ask);
    // Such a row is not looked at again, except in the cell of the token.
    const bool unreported =
        !lists_are_sorted ||
        (ask.top_logprobs == 0 && (!edited || (!ask.want_rank && ask.extra_count == 0)));
    bool is_read_again = late || p.drafts != nullptr;
    if constexpr (Row::kMayAskMore) {
      const bool draws_again = !greedy && (ask.draws > 1 || MarkIsOn(ask));
      is_read_again |=
          (edited && (ask.want_entropy || draws_again)) || (!greedy && ask.want_support > 0);
    }
    if (unreported && !is_read_again && (greedy || !IsFiltered(ask, row.vocab))) {
      listed = 0;
    } else if (TopKIsOn(ask, row.vocab)) {
      listed = max(listed, min(ask.top_k, kListed));
    } else if (IsFiltered(ask, row.vocab) && !greedy) {
      listed = kListed;
    }
    listed = min(listed, row.vocab);
    sketched = listed > 0 || (ask.want_rank && !greedy);
  }
};

// A block's memory after DrawMemory and the row's parameters.
template <class Pool>
struct RowMemory {
  using Sketch = typename Pool::Sketch;
  Stats* raw_cells;       // [cells], of the row as sent, at temperature 1
  Stats* cells;           // [cells], of the row after edits, at its temperature
  LateInbox* inbox;       // in a cluster, where rows are edited; in one place in all its blocks
  Sketch* raw_sketch;     // [cells of the part, 32]
  Sketch* edited_sketch;  // the same, in an EditPool

  __device__ RowMemory(void* begin, int row_cells, int part_cells, bool has_inbox)
      : raw_cells(static_cast<Stats*>(begin)),
        cells(raw_cells + row_cells + row_cells % 2),
        inbox(reinterpret_cast<LateInbox*>(cells + row_cells + row_cells % 2)),
        raw_sketch(reinterpret_cast<Sketch*>(inbox + (has_inbox ? 1 : 0))),
        edited_sketch(raw_sketch + part_cells * 32) {}
};

// The largest logit of a row by its cells. The same in every thread.
__device__ inline float MaxOfCells(const Stats* cells, int count) {
  float max = -kInfinity;
#pragma unroll 4
  for (int i = static_cast<int>(threadIdx.x % 32); i < count; i += 32)
    max = fmaxf(max, cells[i].max);
  return WarpMax(max);
}

// Writes logsumexp and status, and zeros where a row that AsksMore will write what it wants. False:
// the row is refused, for nothing can be drawn from it.
template <class T, Serves kServes>
__device__ __forceinline__ bool AcceptRow(const SampleArgs& args, int r, const SampleRow& ask,
                                          const Logits<T, kServes>& row, const Stats* raw_cells,
                                          Stats raw, float peak) {
  const bool has_nan = isnan(raw.sum);
  if (threadIdx.x == 0 && !has_nan) {
    args.logsumexp[r] =
        raw.max == -kInfinity ? -kInfinity : Exponential(raw.max, kLog2E).LogSum(raw.sum, 1.0f);
    args.status[r] = {RowCode::kOk, -1};
    if constexpr (kServes != Serves::kPlain) {
      args.support_size[r] = 0;
      args.entropies[r] = args.raw_entropies[r] = 0;
    }
  }
  const bool accepted = !has_nan && peak != -kInfinity;
  if (!accepted) RefuseRow<T, kServes == Serves::kAll>(args, r, ask, row.sent, raw_cells, has_nan);
  return accepted;
}

// The distribution that `drawn` was drawn from, of a row with the largest logit `peak`.
template <class Row>
__device__ __forceinline__ Support DrawnFrom(const SampleRow& ask, float peak, const Drawn& drawn) {
  Support support{drawn.last, peak, IsGreedy(ask) ? 1.0 : ActingTemperature(ask), drawn.log_sum};
  if constexpr (Row::kMayAskMore) {
    if (ChoiceIsOn(ask)) support.chosen = &Finish().draw.chosen;
  }
  return support;
}

// Filters the row and draws from it; in verify, tests the row's draft. `write_cell`: as in
// DrawUnfiltered.
template <int kThreads, class Row, class WriteCell>
__device__ __forceinline__ Drawn DrawToken(const SampleParams& p, int r, const SampleRow& ask,
                                           const Row& row, const DrawInput& in, DrawShared& s,
                                           WriteCell write_cell) {
  const Weigher weigh(in.peak, ask);
  Drawn drawn;
  if (IsGreedy(ask)) {
    drawn = in.listed > 0 ? DrawGreedy(s) : DrawGreedyByCells(row, in, s, write_cell);
  } else if (!IsFiltered(ask, row.vocab)) {
    drawn = DrawUnfiltered(ask, row, in, s, write_cell);
  } else {
    drawn = DrawFiltered<kThreads>(ask, row, weigh, in, s);
  }
  if constexpr (Row::kMayAskMore) {
    if (MarkIsOn(ask)) {
      drawn.token = DrawMarked(p.args, ask, row, DrawnFrom<Row>(ask, in.peak, drawn), in.listed);
    }
  }
  if (p.drafts != nullptr && p.has_draft[r] != 0) {
    const VerifyDraft& draft = p.drafts[r];
    if (draft.kind != DraftKind::kGreedy) drawn = TestDraft(p, ask, draft, row, weigh, in, drawn);
    if (threadIdx.x == 0) p.accepted[r] = drawn.token == draft.token;
  }
  return drawn;
}

// Filters a row whose edits are applied late, and whose first tokens are listed, and draws from it.
// `raw_is_pooled` becomes false where the pool is used.
template <int kThreads, class T, Serves kServes>
__device__ __forceinline__ Drawn DrawLate(const SampleParams& p, int r, const SampleRow& ask,
                                          const RowNeeds& needs, const RowMemory<EditPool>& m,
                                          const LateEdits& edits, float peak,
                                          Logits<T, kServes> row, bool& raw_is_pooled) {
  DrawShared& s = Finish().draw;
  if (needs.greedy) return DrawGreedy(s);
  const bool all_are_listed = (TopKIsOn(ask, row.vocab) && ask.top_k <= needs.listed) ||
                              needs.listed == row.vocab ||
                              s.sorted[needs.listed - 1] < LowestKept(ask, peak);
  if (!all_are_listed) {
    float* const edited = p.edited + r * p.edited_stride;
    WriteEdited(row.sent, 0, row.vocab, edits, p.counts + r * p.edited_stride, edited, nullptr);
    row.edited = edited;
    raw_is_pooled = false;
  }
  return DrawFiltered<kThreads>(ask, row, Weigher(peak, ask),
                                {.part = Part::Of(0, 1, p.cells, row.vocab),
                                 .peak = peak,
                                 .stats = m.cells,
                                 .cells = p.cells,
                                 .sums_needed = false,
                                 .log2e_over_temperature = needs.log2e_over_temperature,
                                 .listed = needs.listed,
                                 .cell_sums = reinterpret_cast<uint64_t*>(m.cells),
                                 .first_list = p.FirstList(r),
                                 .first_keys = p.first_keys,
                                 .bits = UniformBits(ask.seed, ask.position)},
                                s);
}

// Reports the lists of a row as sent, whose first tokens are in s.sorted. kMayBeTempered: the row's
// logprob_mode may be kTempered. Called by all threads; ends with a barrier passed.
template <bool kMayBeTempered, class Row>
__device__ __forceinline__ void ReportRawLists(const SampleParams& p, const SampleRow& ask,
                                               const Row& row, const Stats* raw_cells,
                                               DrawShared& s) {
  if (ListedTops(ask) + ask.extra_count > 0) {
    const Stats raw = MergeCells(raw_cells, p.cells, kLog2E);
    if constexpr (kMayBeTempered) {
      ReportLists(p.args, ask, row, SentSupport(ask, row, raw, /*is_summed=*/false), s);
    } else {
      ReportLists(p.args, ask, row, RawSupport(raw), s);
    }
  }
  __syncthreads();
}

// What a block has listed of a row whose edits are applied late.
struct LateListed {
  LateFound found;
  int raw_count;       // logits as sent in the pool
  bool raw_is_pooled;  // they are all of the part's from found.floor up
  int count;           // of the list after edits
  float row_floor;     // a floor of the whole row; -inf: the lists are of the first of the part
};

// Lists the first tokens, as sent and after edits, of the block's part: a lone block in s.sorted
// one after the other, reporting the first; a cluster's in the inbox of its first block. A cluster
// first looks for those of the row, by a floor of all its blocks. Called by all threads after a
// barrier; in a cluster it ends with a barrier of the cluster.
template <bool kInCluster, class T, Serves kServes, class Stream>
__device__ __forceinline__ LateListed ListLate(const SampleParams& p, int r, const SampleRow& ask,
                                               const RowNeeds& needs, const Part& part,
                                               const RowMemory<EditPool>& m, const LaneBests& bests,
                                               const LateEdits& edits,
                                               const Logits<T, kServes>& row, Stream& stream) {
  using Block = DrawBlock<T, kInCluster, EditPool>;
  constexpr int kThreads = Block::kThreads;
  constexpr int kHalf = EditPool::kPool / 2;
  const T* const sent = row.sent;
  DrawShared& s = Finish().draw;
  auto& pool = Pool<EditPool>();
  const Candidates candidates(s);
  const int tops = ListedTops(ask);
  // Leaves keys in `to`: the first `most` in order; in a cluster, where they are few, all in any
  // order. Returns how many.
  const auto list = [&](Key* keys, int n, Key* spare, int most, Key* to) {
    if (kInCluster && n <= kListed) {
      for (int i = threadIdx.x; i < n; i += kThreads) to[i] = keys[i];
      return n;
    }
    SortKeys<kThreads>(keys, n, spare, most, to);
    return min(n, most);
  };
  LateListed listed;
  listed.row_floor = -kInfinity;
  if constexpr (kInCluster) {
    listed.row_floor =
        ClusterFloor<Block>(bests.edited, part, LateReaching(edits, needs.listed, tops),
                            stream.warp_bests, stream.row_floor);
  }
#pragma unroll 1
  while (true) {
    const bool of_row = listed.row_floor > -kInfinity;
    const LateFound found = FindLate<Block>(
        sent, part, m.raw_sketch, edits.mask != nullptr ? m.edited_sketch : m.raw_sketch,
        bests.edited, edits, needs.listed, tops, listed.row_floor);
    int raw_count = found.raw;
    int count = found.edited;
    listed.found = found;
    listed.raw_is_pooled = found.raw >= 0;
    Key* keys = candidates.keys;
    Key* spare = keys + Candidates::kMax;
    const bool given_up = of_row && count < 0;
    if (tops > 0 && !listed.raw_is_pooled && !given_up) {
      Floor floor;
      floor.RaiseToLogit(BlockFloor<Block>(bests.raw, part.elements() / kCell, tops));
      Gather<T, kThreads, EditPool>(sent + part.begin, part.begin, part.elements(), m.raw_sketch,
                                    floor, tops);
      raw_count = Trim<kThreads, EditPool>(tops, kHalf);
    }
    int raw_listed = 0;
    if (raw_count > 0 && (tops > 0 || (of_row && ask.want_rank))) {
      raw_listed = list(pool.pool, raw_count, pool.pool + kHalf, max(tops, 1),
                        kInCluster ? InBlock(m.inbox->raw[part.block], 0) : s.sorted);
    }
    if constexpr (!kInCluster)
      ReportRawLists</*kMayBeTempered=*/false>(p, ask, row, m.raw_cells, s);
    if (count < 0 && !of_row) {
      float* const edited = p.edited + r * p.edited_stride;
      WriteEdited(sent, part.begin, part.end, edits, p.counts + r * p.edited_stride, edited,
                  m.edited_sketch);
      Gather<float, kThreads, EditPool>(edited + part.begin, part.begin, part.elements(),
                                        m.edited_sketch, Floor{}, needs.listed);
      count = Trim<kThreads, EditPool>(needs.listed, kHalf);
      keys = pool.pool;
      spare = pool.pool + kHalf;
      listed.raw_is_pooled = false;
    }
    if (!given_up) {
      count = list(keys, count, spare, needs.listed,
                   kInCluster ? InBlock(m.inbox->edited[part.block], 0) : s.sorted);
    }
    listed.raw_count = raw_count;
    listed.count = count;
    if constexpr (!kInCluster) return listed;
    if (threadIdx.x == 0) {
      LateInbox& first = *InBlock(m.inbox, 0);
      first.raw_counts[part.block] = raw_listed;
      first.edited_counts[part.block] = max(count, 0);
      first.raw_is_whole[part.block] = listed.raw_is_pooled && raw_listed == raw_count;
    }
    if (of_row && threadIdx.x < part.blocks)
      InBlock(m.inbox, threadIdx.x)->survivors[part.block] = found.survivors;
    ClusterArrive();
    ClusterWait();
    if (!of_row || m.inbox->Reaches(needs.listed, part.blocks)) return listed;
    listed.row_floor = -kInfinity;  // each block looks for the first of its part
    __syncthreads();
  }
}

// The stages after the read of a row whose edits are applied late. `stream` is what the row was
// read with. Called by all threads after a barrier.
template <bool kInCluster, class T, Serves kServes, class Stream>
__device__ __forceinline__ void FinishLate(const SampleParams& p, int r, const SampleRow& ask,
                                           const RowNeeds& needs, const Part& part,
                                           const RowMemory<EditPool>& m, const LaneBests& bests,
                                           const LateEdits& edits, const Logits<T, kServes>& row,
                                           Stream& stream) {
  constexpr int kThreads = DrawBlock<T, kInCluster, EditPool>::kThreads;
  const SampleArgs& args = p.args;
  DrawShared& s = Finish().draw;
  auto& pool = Pool<EditPool>();
  const T* const sent = row.sent;
  if (kInCluster && threadIdx.x == 0) s.ranked_token = -1;
  LateListed listed = ListLate<kInCluster>(p, r, ask, needs, part, m, bests, edits, row, stream);
  // How many tokens of the block's part, as sent, are no later in the order than this one.
  const auto count_in_part = [&](float logit, int last) {
    const Key key = MakeKey(logit, last);
    if (!listed.raw_is_pooled || key < listed.found.floor)
      return CountFrom<kThreads, EditPool>(sent, part, m.raw_sketch, logit, last);
    int reached = 0;
    for (int i = threadIdx.x; i < listed.raw_count; i += kThreads) reached += pool.pool[i] >= key;
    return static_cast<int>(BlockSum(reached, s));
  };
  if constexpr (kInCluster) {
    if (part.block != 0) {
      ClusterArrive();
      ClusterWait();
      return HelpToRank(s, count_in_part);
    }
    // The row's lists from those of its parts.
    const auto merge = [&](const Key(*lists)[kListed], const int* list_counts, int most) {
      Key* keys = Candidates(s).keys;
      int n = 0;
      for (int block = 0; block < part.blocks; ++block) {
        for (int i = threadIdx.x; i < list_counts[block]; i += kThreads)
          keys[n + i] = lists[block][i];
        n += list_counts[block];
      }
      __syncthreads();
      SortKeys<kThreads>(keys, n, stream.inbox[0], most, s.sorted);
      return n;
    };
    if (ListedTops(ask) > 0) merge(m.inbox->raw, m.inbox->raw_counts, ListedTops(ask));
    ReportRawLists</*kMayBeTempered=*/false>(p, ask, row, m.raw_cells, s);
    listed.count = merge(m.inbox->edited, m.inbox->edited_counts, needs.listed);
  }
  for (int i = listed.count + static_cast<int>(threadIdx.x); i < needs.listed; i += kThreads)
    s.sorted[i] = kLowestKey;  // there are no more above -inf
  __syncthreads();

  // Filter and draw.
  const Stats raw = MergeCells(m.raw_cells, p.cells, kLog2E);
  const Key first = s.sorted[0];
  const float peak = first == kLowestKey ? -kInfinity : KeyLogit(first);
  if (!AcceptRow(args, r, ask, row, m.raw_cells, raw, peak)) return;
  const Drawn drawn =
      DrawLate<kThreads>(p, r, ask, needs, m, edits, peak, row, listed.raw_is_pooled);

  // Report.
  const float x = ToFloat(sent[drawn.token]);
  const Key key = MakeKey(x, drawn.token);
  int rank = 0;
  if (kInCluster && listed.row_floor > -kInfinity && key >= listed.found.floor &&
      m.inbox->HasRawOf(part.blocks)) {
    ClusterArrive();  // the other blocks need not help
    if (ask.want_rank)
      rank = static_cast<int>(BlockSum(m.inbox->CountRaw<kThreads>(key, part.blocks), s));
  } else {
    rank = FindRank<kInCluster, kThreads>(ask.want_rank, x, drawn.token, 0, part.blocks, s,
                                          count_in_part);
  }
  if (threadIdx.x == 0) {
    args.tokens[r] = drawn.token;
    args.logprobs[r] = RawSupport(raw).Logprob(x, drawn.token);
    args.ranks[r] = rank;
  }
  if (kServes == Serves::kAll && ask.top_logprobs > kListed)
    ReportManyTops<kThreads>(args, ask, row, RawSupport(raw));
}

// Lists the first tokens of the row just read; before them those of an edited row as sent, and
// reports them. Returns the row after edits. `stream` is what the row was read with. Called by all
// threads after a barrier; in a cluster it passes a barrier of the cluster.
template <class T, bool kInCluster, class Pool, class Row, class Stream>
__device__ __forceinline__ Row ListRow(const SampleParams& p, int r, const SampleRow& ask,
                                       const RowNeeds& needs, const Part& part,
                                       const RowMemory<Pool>& m, const LaneBests& bests, Row row,
                                       Stream& stream) {
  const int raw_listed = !needs.edited ? needs.listed
                         : needs.is_sent && ListedTops(ask) + ask.extra_count > 0
                             ? max(1, ListedTops(ask))
                             : 0;
  if (raw_listed > 0) {
    List<DrawBlock<T, kInCluster, Pool>>(row.sent, part, m.raw_sketch, bests.raw, raw_listed,
                                         stream);
  }
  if (needs.edited) {
    if (raw_listed > 0 && part.block == 0)
      ReportRawLists<Row::kMayAskMore>(p, ask, row, m.raw_cells, Finish().draw);
    row.edited = p.edited + r * p.edited_stride;
    if (needs.listed > 0) {
      List<DrawBlock<float, kInCluster, Pool>>(row.edited, part, m.edited_sketch, bests.edited,
                                               needs.listed, stream);
    }
  }
  if constexpr (kInCluster) {
    if (needs.listed == 0) {
      ClusterArrive();
      ClusterWait();
    }
  }
  return row;
}

// Reports what only rows that AsksMore want. Returns the distribution that log-probabilities are
// of. `in` is what `row` was drawn from. Called by all threads.
template <int kThreads, class Row>
__device__ __forceinline__ Support ReportMore(const SampleArgs& args, int r, const SampleRow& ask,
                                              const RowNeeds& needs, const Row& sent, Stats raw,
                                              const Row& row, const DrawInput& in,
                                              const Drawn& drawn) {
  const Support drawn_from = DrawnFrom<Row>(ask, in.peak, drawn);
  if constexpr (Row::kMayAskMore) {
    if (ask.want_support > 0) ReportSupport<kThreads>(args, r, ask, row, drawn_from, needs.listed);
    if (ask.want_entropy) WriteEntropies(args, r, ask, sent, raw, row, drawn_from);
    const Support support =
        needs.is_sent ? SentSupport(ask, sent, raw, /*is_summed=*/needs.twice) : drawn_from;
    if (ask.draws > 0) {
      ReportDraws<kThreads>(args, ask, row, in, drawn, needs.is_sent ? sent : row, support);
    }
    return support;
  } else {
    return needs.is_sent ? RawSupport(raw) : drawn_from;
  }
}

// Copies a row's parameters into shared memory: each of their lines in device memory would be
// waited for when it is first looked at. By all threads, which see the copy after a barrier.
__device__ __forceinline__ void CopyRow(const SampleRow& from, SampleRow* to) {
  constexpr int kWords = sizeof(SampleRow) / sizeof(uint64_t);
  static_assert(sizeof(SampleRow) % 16 == 0, "what comes after it is aligned");
  if (threadIdx.x < kWords) {
    reinterpret_cast<uint64_t*>(to)[threadIdx.x] =
        reinterpret_cast<const uint64_t*>(&from)[threadIdx.x];
  }
}

template <class T, bool kInCluster, Serves kServes>
using BlockServing = DrawBlock<T, kInCluster, DrawPool<kServes != Serves::kPlain>>;

// Rows whose edits are applied late come first in the code: they take longer where their code is
// far from the kernel's start (64 rows with history and mask 54.8 us for 47.4).
template <class T, bool kInCluster, Serves kServes>
__global__ void __launch_bounds__(BlockServing<T, kInCluster, kServes>::kThreads,
                                  BlockServing<T, kInCluster, kServes>::kResident)
    SampleRowKernel(const __grid_constant__ SampleParams p) {
  using Block = BlockServing<T, kInCluster, kServes>;
  using Pool = typename Block::Pool;
  using Row = Logits<T, kServes>;
  constexpr bool kEditable = Row::kMayBeEdited;
  constexpr int kThreads = Block::kThreads;
  extern __shared__ __align__(128) uint4 dynamic[];
  auto& memory = *reinterpret_cast<DrawMemory<T, kInCluster, kEditable>*>(dynamic);
  if constexpr (kInCluster) ClusterArriveEmpty();
  AwaitEarlierKernels();
  const SampleArgs& args = p.args;
  const int r = static_cast<int>(blockIdx.x) / p.blocks;
  auto& ask = *reinterpret_cast<SampleRow*>(&memory + 1);
  CopyRow(args.rows[r], &ask);
  const int vocab = static_cast<int>(args.logits.cols);
  const Part part = Part::Of(static_cast<int>(blockIdx.x) - r * p.blocks, p.blocks, p.cells, vocab);
  DrawShared& s = memory.finish.draw;
  const RowMemory<Pool> m(&ask + 1, p.cells, part.cells(), kInCluster && kEditable);
  const Row raw_row(static_cast<const T*>(args.logits.data) + r * args.logits.row_stride, vocab);

  // Read.
  RowStream<Block> stream(memory.stream, raw_row.sent, part.begin, part.end);
  __syncthreads();                          // `ask` is there
  if constexpr (kInCluster) ClusterWait();  // all blocks have begun: their memory is there
  if (ask.active == 0 || (Row::kMayAskMore && IsIdle(p, r))) return stream.Abandon();
  const RowNeeds needs(p, ask, raw_row);
  const auto in_first = [](Stats* here) { return kInCluster ? InBlock(here, 0) : here; };
  const CellStats raw_stats{kLog2E, in_first(m.raw_cells)};
  const CellStats own_stats{needs.log2e_over_temperature, in_first(m.cells)};
  LaneBests bests;
  if constexpr (kEditable) {
    if (IsEditedLate<Row::kMayAskMore>(p, ask)) [[likely]] {
      const LateEdits edits(args, ask);
      if constexpr (kInCluster) edits.Prefetch();
      bests = ReadLate<Block>(stream, edits, part.begin, part.end, raw_stats, m.raw_sketch,
                              m.edited_sketch);
      if constexpr (!kInCluster) edits.Prefetch();
      __syncthreads();  // from here on the rings' memory is the pool's
      return FinishLate<kInCluster>(p, r, ask, needs, part, m, bests, edits, raw_row,
                                    memory.stream);
    }
    if (needs.edited) {
      const bool raw_sketched = needs.is_sent && (ask.want_rank || ask.top_logprobs > 0);
      bests = ReadEdited<Block>(stream, Edits(p, ask, r, part.end), part.begin, raw_stats,
                                own_stats, raw_sketched ? m.raw_sketch : nullptr,
                                needs.listed > 0 ? m.edited_sketch : nullptr, memory.OfWarp());
    }
  }
  if (!needs.edited) {
    bests.raw = stream.template Run<true>(raw_stats, needs.sketched ? m.raw_sketch : nullptr,
                                          needs.twice ? own_stats : CellStats{});
  }
  __syncthreads();  // from here on the rings' memory is the pool's

  // List.
  if (kInCluster && threadIdx.x == 0) {
    s.ranked_token = -1;
    s.nucleus.whole = 0;
  }
  const Row row = ListRow<T, kInCluster>(p, r, ask, needs, part, m, bests, raw_row, memory.stream);
  const Row& mode_row = needs.is_sent ? raw_row : row;
  // How many tokens of the block's part are no later in the mode's order than this one.
  const auto count_in_part = [&](float logit, int last) {
    if constexpr (kEditable) {
      if (needs.edited && !needs.is_sent)
        return CountFrom<kThreads, Pool>(row.edited, part, m.edited_sketch, logit, last);
    }
    return CountFrom<kThreads, Pool>(raw_row.sent, part, m.raw_sketch, logit, last);
  };
  if constexpr (kInCluster) {
    if (part.block != 0) {
      ClusterArrive();
      ClusterWait();
      HelpWithNucleus<kThreads>(row, part, reinterpret_cast<uint64_t*>(m.cells));
      return HelpToRank(s, count_in_part);
    }
  }

  // Filter and draw.
  const Stats raw = MergeCells(m.raw_cells, p.cells, kLog2E);
  const float peak = needs.edited ? MaxOfCells(m.cells, p.cells) : raw.max;
  if (!AcceptRow(args, r, ask, raw_row, m.raw_cells, raw, peak)) return;
  const DrawInput in{.part = part,
                     .peak = peak,
                     .stats = needs.twice || needs.edited ? m.cells : m.raw_cells,
                     .cells = p.cells,
                     .sums_needed = needs.sums_needed,
                     .log2e_over_temperature = needs.log2e_over_temperature,
                     .listed = needs.listed,
                     .cell_sums = reinterpret_cast<uint64_t*>(m.cells),
                     .first_list = p.FirstList(r),
                     .first_keys = p.first_keys,
                     .bits = UniformBits(ask.seed, ask.position)};
  const Drawn drawn = DrawToken<kThreads>(p, r, ask, row, in, s, [&](int first) {
    if constexpr (kEditable) {
      if (needs.edited && needs.listed == 0)
        WriteCell(raw_row.sent, Edits(p, ask, r, vocab), first,
                  reinterpret_cast<float*>(s.bin_mass));
    }
  });

  // Report.
  const Support support = ReportMore<kThreads>(args, r, ask, needs, raw_row, raw, row, in, drawn);
  const float x = mode_row[drawn.token];
  const bool is_first = needs.greedy && needs.listed == 0 && needs.lists_are_sorted;
  const int rank = FindRank<kInCluster, kThreads>(ask.want_rank && !is_first, x, drawn.token,
                                                  needs.lists_are_sorted ? needs.listed : 0,
                                                  part.blocks, s, count_in_part);
  if (threadIdx.x == 0) {
    args.tokens[r] = drawn.token;
    args.logprobs[r] = support.Logprob(x, drawn.token);
    args.ranks[r] = is_first && ask.want_rank ? 1 : rank;
  }
  if (needs.lists_are_sorted) ReportLists(args, ask, mode_row, support, s);
  if (Row::kMayAskMore && ask.top_logprobs > kListed)
    ReportManyTops<kThreads>(args, ask, mode_row, support);
}

// ---- launch ------------------------------------------------------------------------------------

// Enqueues sample, or verify, for all rows of p.args, p.blocks blocks a row. Those of edited rows,
// and those of all rows, are compiled in files of their own (sample_edited_f32.cu and so on).
template <class T, bool kInCluster, Serves kServes>
cudaError_t LaunchPass(const SampleParams& p, const LaunchShape& shape, cudaStream_t stream) {
  return LaunchKernel(&SampleRowKernel<T, kInCluster, kServes>, shape, stream, p);
}
using PassLauncher = cudaError_t(const SampleParams&, const LaunchShape&, cudaStream_t);

}  // namespace logitd::cuda

#endif  // LOGITD_KERNELS_CUDA_SAMPLING_SAMPLE_KERNEL_CUH_
