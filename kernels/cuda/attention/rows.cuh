// The rows of a pass over a tensor of scores: where each is in the tensor, and which keys its query
// sees.
#ifndef LOGITD_KERNELS_CUDA_ATTENTION_ROWS_CUH_
#define LOGITD_KERNELS_CUDA_ATTENTION_ROWS_CUH_

#include <algorithm>
#include <bit>
#include <cstdint>

#include "kernels/attention_softmax.h"

namespace logitd::cuda::attention {

// The keys [begin, end) that a query sees; begin == end: it sees nothing.
struct Seen {
  int begin;
  int end;

  // Whether some, or all, of the E keys from `index` on are seen.
  template <int E>
  __device__ bool Some(int index) const {
    return index < end && index + E > begin;
  }
  template <int E>
  __device__ bool All(int index) const {
    return index >= begin && index + E <= end;
  }
  __device__ bool Has(int key) const { return key >= begin && key < end; }
};

// n / divisor for n < 2^31, by a multiplication.
struct Divider {
  uint32_t divisor = 1;
  uint32_t factor = 0;
  uint32_t shift = 0;

  Divider() = default;
  explicit Divider(uint32_t by) : divisor(by) {
    if (by == 1) return;
    const int bits = 31 + std::bit_width(by - 1);
    factor = static_cast<uint32_t>(((uint64_t{1} << bits) + by - 1) / by);
    shift = static_cast<uint32_t>(bits - 32);
  }
  __device__ uint32_t operator()(uint32_t n) const {
    return divisor == 1 ? n : __umulhi(n, factor) >> shift;
  }
};

// Which row of the tensor.
struct Place {
  int64_t batch;
  int64_t head;
  int64_t query;
};

// The rows of a launch, at most kMost: a pass over a part of the call's rows.
struct PassRows {
  static constexpr int64_t kMost = int64_t{1} << 27;
  static constexpr int64_t kNarrow = int64_t{1} << 30;  // below it, 32 bits hold a place's numbers

  uint32_t count;
  int32_t keys;
  int64_t queries;
  int64_t heads;
  Place first;
  Divider by_queries;
  Divider by_heads;
  bool narrow;
  bool windowed;
  int64_t left;  // bounded so that sums with it fit
  int64_t right;

  PassRows() = default;
  // Rows [begin, begin + rows) of the call's.
  PassRows(const AttentionShape& shape, const AttentionWindow& window, int64_t begin,
           int64_t rows) {
    count = static_cast<uint32_t>(rows);
    keys = static_cast<int32_t>(shape.keys);
    queries = shape.queries;
    heads = shape.heads;
    const int64_t row = shape.first_row + begin;
    first = {row / queries / heads, row / queries % heads, row % queries};
    narrow = queries < kNarrow && heads < kNarrow;
    if (narrow) {
      by_queries = Divider(static_cast<uint32_t>(queries));
      by_heads = Divider(static_cast<uint32_t>(heads));
    }
    left = window.left < 0 ? -1 : std::min(window.left, shape.keys);
    right = window.right < 0 ? -1 : std::min(window.right, queries);
    windowed = left >= 0 || right >= 0;
  }

  __device__ Place PlaceOf(uint32_t row) const {
    if (narrow) {
      const uint32_t query = row + static_cast<uint32_t>(first.query);
      const uint32_t queries_before = by_queries(query);
      const uint32_t head = queries_before + static_cast<uint32_t>(first.head);
      const uint32_t heads_before = by_heads(head);
      return {first.batch + heads_before, head - heads_before * by_heads.divisor,
              query - queries_before * by_queries.divisor};
    }
    const int64_t query = row + first.query;
    const int64_t head = query / queries + first.head;
    return {first.batch + head / heads, head % heads, query % queries};
  }

  // What the row's query sees.
  __device__ Seen SeenBy(uint32_t row) const {
    if (!windowed) return {0, keys};
    if (narrow) {
      const uint32_t at = row + static_cast<uint32_t>(first.query);
      const uint32_t query = at - by_queries(at) * by_queries.divisor;
      return Within(static_cast<int>(query) + keys - static_cast<int>(queries),
                    static_cast<int>(left), static_cast<int>(right));
    }
    return Within((row + first.query) % queries + keys - queries, left, right);
  }

 private:
  // `at`: the key that the query is aligned with.
  template <class Int>
  __device__ Seen Within(Int at, Int to_left, Int to_right) const {
    const Int begin = to_left < 0 ? 0 : max(at - to_left, Int{0});
    const Int end = to_right < 0 ? keys : min(at + to_right + 1, static_cast<Int>(keys));
    if (begin >= end) return {0, 0};
    return {static_cast<int>(begin), static_cast<int>(end)};
  }
};

// The order in which blocks take the rows of a pass: the tensor's, or query by query with the rows
// of all heads after each other. Then the mask's row that they share comes from memory once.
class RowOrder {
 public:
  RowOrder() = default;
  // For a pass of whole batches.
  static RowOrder ByQueries(int64_t heads, int64_t queries) {
    RowOrder order;
    order.by_batch_ = Divider(static_cast<uint32_t>(heads * queries));
    order.by_heads_ = Divider(static_cast<uint32_t>(heads));
    order.queries_ = static_cast<uint32_t>(queries);
    return order;
  }
  __device__ uint32_t operator()(uint32_t i) const {
    if (queries_ == 0) return i;
    const uint32_t before = by_batch_(i) * by_batch_.divisor;
    const uint32_t query = by_heads_(i - before);
    const uint32_t head = i - before - query * by_heads_.divisor;
    return before + head * queries_ + query;
  }

 private:
  Divider by_batch_;
  Divider by_heads_;
  uint32_t queries_ = 0;  // 0: the tensor's order
};

// A row as its threads know it.
struct Row {
  uint32_t index;
  bool in_pass;  // else the index is 0 and nothing is seen
  Seen seen;
};

__device__ inline Row RowAt(const PassRows& rows, uint32_t index) {
  Row row{.index = index, .in_pass = index < rows.count};
  if (!row.in_pass) row.index = 0;
  row.seen = rows.SeenBy(row.index);
  if (!row.in_pass) row.seen = {0, 0};
  return row;
}

}  // namespace logitd::cuda::attention

#endif  // LOGITD_KERNELS_CUDA_ATTENTION_ROWS_CUH_
