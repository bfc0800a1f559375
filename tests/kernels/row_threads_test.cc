// A long row that all threads of a pool finish has the bits of one that a single thread finishes.
#include "kernels/cpu/rows/row_threads.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "tests/kernels/cpu_test.h"
#include "tests/kernels/sample_cases.h"
#include "tests/kernels/softmax_topk_cases.h"

namespace logitd::testing {
namespace {

constexpr Fill kFills[] = {Fill::kNormal,      Fill::kAllEqual, Fill::kAscending,
                           Fill::kDescending,  Fill::kManyTies, Fill::kMostlyMinusInf,
                           Fill::kAllMinusInf, Fill::kWithNan,  Fill::kWithPlusInf,
                           Fill::kHuge,        Fill::kOneHot};

// The last cell is whole, has one token, or is almost whole; the last row is too short to be cut.
constexpr int64_t kVocabs[] = {131072, 33 * 1024 + 1, 50257, 31 * 1024};

TEST(RowThreadsTest, PiecesCoverARowAndAreCutByItsLengthOnly) {
  cpu::ThreadPool two(2), eight(8);
  for (const int64_t vocab : {1, 1024, 32 * 1024 - 1023, 32 * 1024, 50257, 131072, 1 << 20}) {
    const cpu::RowPieces pieces = cpu::RowThreads(&two).Cut(vocab);
    EXPECT_EQ(pieces.per_piece, cpu::RowThreads(&eight).Cut(vocab).per_piece);
    EXPECT_LE(pieces.count, cpu::kMostPieces);
    int64_t next = 0;
    for (int64_t p = 0; p < pieces.count; ++p) {
      EXPECT_EQ(pieces.begin(p), next);
      EXPECT_GT(pieces.end(p), next);
      next = pieces.end(p);
    }
    EXPECT_EQ(next, cpu::CellCount(vocab));
    EXPECT_EQ(cpu::RowThreads().Cut(vocab).count, 1);
  }
}

// Which rows take all threads, by their number among those that take long.
std::vector<int> CutRows(int threads, const std::vector<bool>& takes_long) {
  cpu::ThreadPool pool(threads);
  std::vector<int> calls(takes_long.size()), cut(takes_long.size());
  cpu::FinishRows(
      static_cast<int64_t>(takes_long.size()), pool, [&](int64_t r) { return takes_long[r]; },
      [&](int64_t r, const cpu::RowThreads& row_threads) {
        ++calls[r];
        cut[r] = row_threads.Cut(131072).count > 1 ? 1 : 0;
      });
  EXPECT_EQ(calls, std::vector<int>(takes_long.size(), 1));
  return cut;
}

TEST(RowThreadsTest, OnlyLongRowsThatWouldLeaveThreadsIdleAreCut) {
  using Rows = std::vector<bool>;
  EXPECT_EQ(CutRows(1, Rows{true, true}), (std::vector<int>{0, 0}));
  EXPECT_EQ(CutRows(2, Rows{true}), (std::vector<int>{1}));
  EXPECT_EQ(CutRows(2, Rows{false}), (std::vector<int>{0}));
  EXPECT_EQ(CutRows(2, Rows{true, true}), (std::vector<int>{0, 0}));
  EXPECT_EQ(CutRows(2, Rows{true, false, true, true, false}), (std::vector<int>{0, 0, 0, 1, 0}));
  EXPECT_EQ(CutRows(8, Rows{true, true, true, true, false}), (std::vector<int>{1, 1, 1, 1, 0}));
  EXPECT_EQ(CutRows(8, Rows{true, true, true, true, true}), (std::vector<int>{0, 0, 0, 0, 0}));
  // A row has work for 16 threads at most.
  EXPECT_EQ(CutRows(64, Rows(8, true)), std::vector<int>(8, 1));
  EXPECT_EQ(CutRows(64, Rows(9, true)), std::vector<int>(9, 0));
}

// ---- softmax_topk

TEST(RowThreadsTest, TopKOfALongRowHasTheSameBitsOnAnyNumberOfThreads) {
  const auto one = CreateBackend("cpu", {.cpu_threads = 1}).value();
  const auto alone = OpRunner::Create(one.get()).value();
  int n = 0;
  for (const int threads : {2, 3, 8}) {
    const auto backend = CreateBackend("cpu", {.cpu_threads = threads}).value();
    const auto runner = OpRunner::Create(backend.get()).value();
    for (const Fill fill : kFills) {
      for (const int64_t vocab : kVocabs) {
        for (const int32_t k : {1, 64, 1024, 5000, 20000, 31 * 1024}) {
          if (++n % 3 != 0 && fill != Fill::kNormal) continue;
          const InvarianceCase c = {kAllDTypes[n % 3], vocab, k, 0.8f, fill};
          const RowBits want = BitsInBatch(*alone, c, {}).value();
          for (const RowBatch& batch :
               {RowBatch{.rows = 1}, RowBatch{.rows = 3, .place = 2, .others_k = 5000}}) {
            EXPECT_TRUE(SameBits(want, BitsInBatch(*runner, c, batch).value()))
                << threads << " threads, row " << batch.place << " of " << batch.rows << ", vocab "
                << vocab << " " << Name(c.dtype) << " k " << k << " " << Name(fill);
          }
        }
      }
    }
  }
}

// ---- sample

// Rows whose filters leave many tokens, or that look at many for their answers.
std::vector<SampleRow> LongAsks(int64_t vocab) {
  const auto with = [](auto change) {
    SampleRow row = PlainRow();
    row.want_rank = true;
    change(row);
    return row;
  };
  const auto half = static_cast<int32_t>(vocab / 2);
  return {
      with([](SampleRow& row) { row.top_p = 0.9f; }),
      with([](SampleRow& row) { row.top_p = 0.99f, row.temperature = 3; }),
      with([](SampleRow& row) { row.min_p = 1e-3f; }),
      with([](SampleRow& row) { row.min_p = 1e-6f, row.top_p = 0.7f; }),
      with([](SampleRow& row) { row.top_n_sigma = 2; }),
      with([](SampleRow& row) { row.top_k = 600; }),
      with([&](SampleRow& row) { row.top_k = half; }),
      with([&](SampleRow& row) { row.top_k = half, row.top_p = 0.8f, row.min_p = 1e-4f; }),
      with([](SampleRow&) {}),
      with([](SampleRow& row) { row.temperature = 0; }),
  };
}

// A row's answer bits under `ask`, as the last of rows with other logits and asks.
std::string BitsOfAsk(OpRunner& runner, DType dtype, int64_t vocab, Fill fill, const SampleRow& ask,
                      int64_t rows, bool edited) {
  HostTensor tensor(dtype, rows, vocab, vocab + 3, 1), last(dtype, 1, vocab, vocab, 0);
  FillRow(last, 0, fill, /*seed=*/17);
  SampleBatch batch;
  for (int64_t r = 0; r < rows; ++r) {
    FillRow(tensor, r, Fill::kNormal, /*seed=*/18);
    if (r == rows - 1) {
      for (int64_t i = 0; i < vocab; ++i) tensor.Set(r, i, last.At(0, i));
    }
    SampleRow row = r == rows - 1 ? ask : LongAsks(vocab)[r % 9];
    row.seed = 5;
    row.position = 3;
    row.top_logprobs = 20;
    row.first_top_entry = r * 20;
    if (edited) {
      row.repetition = 1.3f;
      row.frequency = 0.1f;
      row.first_history = static_cast<int64_t>(batch.history.size());
      row.history_count = 3000;
      std::mt19937_64 random(9);
      for (int i = 0; i < 3000; ++i)
        batch.history.push_back(static_cast<int32_t>(random() % vocab));
      row.first_mask_word = static_cast<int64_t>(batch.mask_words.size());
      for (int64_t w = 0; w < MaskWords(vocab); ++w) {
        batch.mask_words.push_back(static_cast<uint32_t>(random()));
      }
    }
    batch.rows.push_back(row);
  }
  batch.top_entries = rows * 20;
  const SampleAnswer got = runner.Sample(tensor, batch).value();
  return SampleBits(got, batch.rows.back(), rows - 1);
}

TEST(RowThreadsTest, SamplesOfALongRowHaveTheSameBitsOnAnyNumberOfThreads) {
  const auto one = CreateBackend("cpu", {.cpu_threads = 1}).value();
  const auto alone = OpRunner::Create(one.get()).value();
  int n = 0;
  for (const int threads : {2, 3, 8}) {
    const auto backend = CreateBackend("cpu", {.cpu_threads = threads}).value();
    const auto runner = OpRunner::Create(backend.get()).value();
    for (const Fill fill : kFills) {
      for (const int64_t vocab : kVocabs) {
        for (const SampleRow& ask : LongAsks(vocab)) {
          if (++n % 4 != 0 && fill != Fill::kNormal) continue;
          const DType dtype = kAllDTypes[n % 3];
          SampleRow row = ask;
          row.logprob_mode = n % 2 == 0 ? LogprobMode::kRaw : LogprobMode::kProcessed;
          const bool edited = n % 5 < 2;
          const std::string want = BitsOfAsk(*alone, dtype, vocab, fill, row, 1, edited);
          for (const int64_t rows : {1, 3}) {
            EXPECT_TRUE(want == BitsOfAsk(*runner, dtype, vocab, fill, row, rows, edited))
                << threads << " threads, the last of " << rows << " rows, vocab " << vocab << " "
                << Name(dtype) << " " << Name(fill) << ", " << Describe(row)
                << (edited ? ", edited" : "");
          }
        }
      }
    }
  }
}

// ---- verify

TEST(RowThreadsTest, VerifyOfLongRowsHasTheSameBitsOnAnyNumberOfThreads) {
  const int64_t vocab = 70001, rows = 9;
  HostTensor tensor(DType::kF32, rows, vocab, vocab, 0);
  SampleBatch batch;
  VerifyBatch verify{.draft_probs = std::vector<float>(vocab, 1.0f / vocab)};
  for (int64_t r = 0; r < rows; ++r) {
    FillRow(tensor, r, Fill::kNormal, 21);
    batch.rows.push_back(LongAsks(vocab)[r]);
    batch.rows.back().seed = r;
    const auto token = static_cast<int32_t>((r * 7919) % vocab);
    tensor.Set(r, token, 12);  // likely enough that some drafts are kept
    verify.drafts.push_back(
        {.token = token, .count = 0, .kind = r % 2 == 0 ? DraftKind::kDense : DraftKind::kGreedy});
  }
  for (const std::vector<int32_t>& lengths :
       {std::vector<int32_t>{9}, {4, 5}, {3, 3, 3}, {1, 1, 1, 1, 1, 1, 1, 1, 1}, {-9}, {-4, 5}}) {
    verify.sequences.clear();
    int64_t first = 0;
    for (const int32_t length : lengths) {  // below 0: with block verification
      const int32_t count = std::abs(length);
      verify.sequences.push_back({.first_row = first, .rows = count, .block = length < 0 ? 1 : 0});
      for (int64_t r = first; length < 0 && r < first + count; ++r)
        verify.drafts[r].kind = DraftKind::kDense;
      first += count;
    }
    const auto one = CreateBackend("cpu", {.cpu_threads = 1}).value();
    const VerifyAnswer want =
        OpRunner::Create(one.get()).value()->Verify(tensor, batch, verify).value();
    for (const int threads : {2, 3, 8}) {
      const auto backend = CreateBackend("cpu", {.cpu_threads = threads}).value();
      const VerifyAnswer got =
          OpRunner::Create(backend.get()).value()->Verify(tensor, batch, verify).value();
      EXPECT_EQ(got.accepted, want.accepted) << threads << " threads";
      for (int64_t r = 0; r < rows; ++r) {
        EXPECT_EQ(SampleBits(got.rows, batch.rows[r], r), SampleBits(want.rows, batch.rows[r], r))
            << threads << " threads, row " << r << ", " << lengths.size() << " sequences";
      }
    }
  }
}

}  // namespace
}  // namespace logitd::testing
