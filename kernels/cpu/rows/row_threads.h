// How threads share rows: to read them, whole or by runs of cells; and to finish a row after it was
// read, which the thread does that has it, or all of a pool, each taking pieces of it.
//
// Pieces are cut by the row's length only, and what they find is merged exactly: lists by index,
// counts and integer masses. So a row's bits do not depend on the threads.
#ifndef LOGITD_KERNELS_CPU_ROWS_ROW_THREADS_H_
#define LOGITD_KERNELS_CPU_ROWS_ROW_THREADS_H_

#include <algorithm>
#include <cstdint>

#include "absl/functional/function_ref.h"
#include "kernels/cpu/rows/sketch.h"
#include "kernels/cpu/thread_pool.h"

namespace logitd::cpu {

// A shorter row is never cut: to wake a thread takes about 4 us, in which one thread lists a few
// thousand tokens.
inline constexpr int64_t kLeastCutCells = 32;
inline constexpr int64_t kLeastPieceCells = 8;
inline constexpr int64_t kMostPieces = 16;

inline bool MayBeCut(int64_t vocab) { return CellCount(vocab) >= kLeastCutCells; }

// ---- To read rows

// With fewer rows per thread than this, several threads read a row; else a thread takes whole rows.
inline constexpr int64_t kWholeRowsPerThread = 4;

inline bool TakesWholeRows(int64_t rows, int64_t vocab, const ThreadPool& pool,
                           int64_t per_thread = kWholeRowsPerThread) {
  return pool.threads() == 1 || rows >= per_thread * pool.threads() ||
         rows * CellCount(vocab) <= kMostItemCells;
}

// Calls take(r, begin, end) for every row, `at_once` of its cells at a time; a thread takes about
// as many cells of shorter rows.
template <class Take>
void ForRowParts(int64_t rows, int64_t vocab, int64_t at_once, ThreadPool& pool, const Take& take) {
  const int64_t cells = std::max<int64_t>(1, CellCount(vocab));
  const int64_t per_row = (cells + at_once - 1) / at_once;
  const int64_t rows_at_once = std::max<int64_t>(1, at_once / cells);
  pool.ParallelFor((rows + rows_at_once - 1) / rows_at_once * per_row, [&](int64_t item) {
    const int64_t begin = item % per_row * at_once;
    const int64_t first = item / per_row * rows_at_once;
    for (int64_t r = first; r < std::min(rows, first + rows_at_once); ++r) {
      take(r, begin, std::min(cells, begin + at_once));
    }
  });
}

// Calls take(r) for every row.
template <class Take>
void ForWholeRows(int64_t rows, int64_t vocab, ThreadPool& pool, const Take& take) {
  ForRowParts(rows, vocab, std::max(kMostItemCells, CellCount(vocab)), pool,
              [&](int64_t r, int64_t, int64_t) { take(r); });
}

// Calls take(r, begin, end) for the cells of few rows, so that every thread gets some.
template <class Take>
void ForCells(int64_t rows, int64_t vocab, ThreadPool& pool, const Take& take) {
  ForRowParts(rows, vocab, ItemCells(rows * CellCount(vocab), pool.threads()), pool, take);
}

// ---- To finish rows

// The pieces of a row: runs of cells, in order.
struct RowPieces {
  int64_t count;
  int64_t cells;      // of the row
  int64_t per_piece;  // cells, or fewer in the last piece

  int64_t begin(int64_t piece) const { return piece * per_piece; }
  int64_t end(int64_t piece) const { return std::min(cells, begin(piece) + per_piece); }
};

// Copyable; used by the thread that has the row.
class RowThreads {
 public:
  RowThreads() = default;                                 // this thread only
  explicit RowThreads(ThreadPool* pool) : pool_(pool) {}  // this one and those of the pool

  RowPieces Cut(int64_t vocab) const {
    const int64_t cells = CellCount(vocab);
    if (pool_ == nullptr || cells < kLeastCutCells) return {1, cells, cells};
    const int64_t per_piece = std::max(kLeastPieceCells, (cells + kMostPieces - 1) / kMostPieces);
    return {(cells + per_piece - 1) / per_piece, cells, per_piece};
  }

  // Calls body(i) for every i in [0, count); returns when all calls have returned. With one thread,
  // in order.
  void For(int64_t count, absl::FunctionRef<void(int64_t)> body) const {
    if (pool_ != nullptr) return pool_->ParallelFor(count, body);
    for (int64_t i = 0; i < count; ++i) body(i);
  }

 private:
  ThreadPool* pool_ = nullptr;
};

// Calls finish(r, threads) once for every row. Rows that take long are shared out whole as long as
// every thread gets one. Those left over go one after another, on all threads, if they are at most
// half as many as the threads that one can use; else each takes a thread.
template <class TakesLong, class Finish>
void FinishRows(int64_t rows, ThreadPool& pool, const TakesLong& takes_long, const Finish& finish) {
  int64_t left_over = 0;
  for (int64_t r = 0; r < rows; ++r) left_over += takes_long(r) ? 1 : 0;
  left_over %= pool.threads();
  if (2 * left_over > std::min<int64_t>(pool.threads(), kMostPieces)) left_over = 0;
  int64_t first_cut = rows;  // of the rows from here on, those that take long are left over
  while (left_over > 0) left_over -= takes_long(--first_cut) ? 1 : 0;
  pool.ParallelFor(rows, [&](int64_t r) {
    if (r < first_cut || !takes_long(r)) finish(r, RowThreads());
  });
  for (int64_t r = first_cut; r < rows; ++r) {
    if (takes_long(r)) finish(r, RowThreads(&pool));
  }
}

}  // namespace logitd::cpu

#endif  // LOGITD_KERNELS_CPU_ROWS_ROW_THREADS_H_
