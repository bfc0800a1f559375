// What the forward and the backward of attention_softmax share: where rows are, and which keys they
// see.
#ifndef LOGITD_KERNELS_CPU_ATTENTION_ATTENTION_ROWS_H_
#define LOGITD_KERNELS_CPU_ATTENTION_ATTENTION_ROWS_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernels/attention_softmax.h"
#include "kernels/cpu/thread_pool.h"

namespace logitd::cpu {

// Keys that one fixed code path reduces.
inline constexpr int64_t kCellKeys = 1024;

// Keys [begin, end) that the window lets a row see.
struct KeyRange {
  int64_t begin;
  int64_t end;
};

// The row's place in [batch, heads, queries].
struct RowPlace {
  int64_t batch;
  int64_t head;
  int64_t query;
};

inline RowPlace PlaceOf(const AttentionShape& shape, int64_t row) {
  const int64_t all = shape.first_row + row;
  return {.batch = all / shape.queries / shape.heads,
          .head = all / shape.queries % shape.heads,
          .query = all % shape.queries};
}

// Moves to the next row. PlaceOf's divisions take a good part of a short row's time.
inline void Advance(const AttentionShape& shape, RowPlace& place) {
  if (++place.query < shape.queries) return;
  place.query = 0;
  if (++place.head < shape.heads) return;
  place.head = 0;
  ++place.batch;
}

inline KeyRange SeenKeys(const AttentionShape& shape, const AttentionWindow& window,
                         int64_t query) {
  const int64_t aligned = query + shape.keys - shape.queries;
  KeyRange seen = {0, shape.keys};
  // Written so that nothing overflows, however large the window.
  if (window.left != AttentionWindow::kUnbounded && window.left < aligned) {
    seen.begin = aligned - window.left;
  }
  if (window.right != AttentionWindow::kUnbounded && window.right < shape.keys - aligned) {
    seen.end = std::max(seen.begin, aligned + window.right + 1);
  }
  return seen;
}

inline std::byte* At(void* data, DType dtype, int64_t element) {
  return static_cast<std::byte*>(data) + element * static_cast<int64_t>(SizeOf(dtype));
}
inline const std::byte* At(const void* data, DType dtype, int64_t element) {
  return static_cast<const std::byte*>(data) + element * static_cast<int64_t>(SizeOf(dtype));
}

inline void Zero(const MutableTensorView& to, int64_t row, int64_t begin, int64_t end) {
  const size_t bytes = static_cast<size_t>(end - begin) * SizeOf(to.dtype);
  std::memset(At(to.data, to.dtype, row * to.row_stride + begin), 0, bytes);
}

// Whether the processor has AVX512_BF16, which no SIMD target of ours implies.
inline bool HasBF16Instructions() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("avx512bf16");
#else
  return false;
#endif
}

// How far ahead rows that are seen whole are prefetched, in bytes; 0: not so. Intel's own
// prefetches begin anew at every page, and what they miss is not hidden by arithmetic. Zen's do
// better (see attention_softmax.cc).
inline int64_t BytesAhead(DType dtype) {
#if defined(__x86_64__)
  if (__builtin_cpu_is("intel")) return dtype == DType::kF32 ? 2048 : 4096;
#endif
  return 0;
}

// How a call's rows are written.
struct Writing {
  bool stream;          // past the caches
  bool by_instruction;  // AVX512_BF16 rounds to bf16
};

// Results of this size or more are written past the caches, the second of which they would fill.
inline constexpr int64_t kStreamBytes = int64_t{2} << 20;
// Shorter rows have too few whole lines of memory.
inline constexpr int64_t kStreamRowBytes = 512;

inline Writing WritingOf(const AttentionShape& shape, const MutableTensorView& to, bool in_place) {
  const int64_t row_bytes = shape.keys * static_cast<int64_t>(SizeOf(to.dtype));
  const bool large = row_bytes >= kStreamRowBytes && shape.rows * row_bytes >= kStreamBytes;
  return {.stream = large && !in_place, .by_instruction = HasBF16Instructions()};
}

// Keys handed to a thread at once: few enough to balance, enough to hide the cost of taking them.
// Pieces are larger where every thread still gets kLeastItems of them: the last row of a piece is
// written with no other row to weigh meanwhile.
inline constexpr int64_t kItemKeys = 32768;
inline constexpr int64_t kMostItemKeys = 131072;
inline constexpr int64_t kLeastItems = 16;

// Calls body(begin, end) for pieces of the rows [first, last), on all threads.
template <class Body>
void ForEachPiece(ThreadPool& pool, int64_t keys, int64_t first, int64_t last, const Body& body) {
  const int64_t balanced = (last - first) / (kLeastItems * pool.threads());
  const int64_t per_item =
      std::max({int64_t{1}, kItemKeys / keys, std::min(balanced, kMostItemKeys / keys)});
  pool.ParallelFor((last - first + per_item - 1) / per_item, [&](int64_t item) {
    const int64_t begin = first + item * per_item;
    body(begin, std::min(last, begin + per_item));
  });
}

}  // namespace logitd::cpu

#endif  // LOGITD_KERNELS_CPU_ATTENTION_ATTENTION_ROWS_H_
