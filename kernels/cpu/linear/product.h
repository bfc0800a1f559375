// Products of hidden states with weights, in fp32. Every element is summed in one order: its bits
// depend only on its two vectors, not on how many vectors there are or where they are.
#ifndef LOGITD_KERNELS_CPU_LINEAR_PRODUCT_H_
#define LOGITD_KERNELS_CPU_LINEAR_PRODUCT_H_

#include <algorithm>
#include <cstdint>

#include "kernels/cpu/rows/lanes.h"
#include "kernels/types.h"

namespace logitd::cpu {

// Rows as Logits reads them: f32, in chunks of columns: all rows' first chunks, then all rows'
// second ones. Zeros fill columns up to whole vectors and rows up to whole tiles.
inline constexpr int64_t kMostChunk = 512;
inline constexpr int64_t kTileRows = 4;

inline int64_t RoundUp(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

struct PackedRows {
  float* data = nullptr;  // [RoundUp(rows, kTileRows) * RoundUp(cols, kMaxLanes)], aligned
  int64_t rows = 0;
  int64_t cols = 0;

  int64_t padded_rows() const { return RoundUp(rows, kTileRows); }
  int64_t size() const { return padded_rows() * RoundUp(cols, kMaxLanes); }
  // Short rows are one chunk, whose sums never leave the registers. No element's bits depend on it.
  int64_t chunk() const { return cols <= kMostChunk ? kMostChunk : kMostChunk / 2; }
  // Columns of the chunk at column `first`, zeros included.
  int64_t ChunkCols(int64_t first) const {
    return std::min(chunk(), RoundUp(cols - first, kMaxLanes));
  }
  float* At(int64_t row, int64_t first) const {
    return data + first * padded_rows() + row * ChunkCols(first);
  }
};

// Packs row r of `from`; zeros where r is after the last row. With norm.weight (null: none) the row
// goes through an RMSNorm first, and is rounded to its type again. Thread-safe for different rows.
struct RowNorm {
  const float* weight = nullptr;  // [cols]
  float epsilon = 0;
};
void PackRow(const TensorView& from, const RowNorm& norm, int64_t r, const PackedRows& to);

// A logit from its sum: scale * sum + bias, then the softcap.
struct LogitsEpilogue {
  float scale = 1;
  const float* bias = nullptr;  // [vocab], or null
  float softcap = 0;            // 0 = off
};

// Writes the logits of tokens [begin, end) for the packed rows: to[r * to_stride + i - begin].
// Cost: 2 rows (end - begin) cols operations; the weights are read once.
void Logits(const PackedRows& rows, const TensorView& weight, int64_t begin, int64_t end,
            const LogitsEpilogue& epilogue, float* to, int64_t to_stride);

// c(m, i) += sum over k in order of a(m, k) b(k, i), for `cols` columns, a multiple of
// kStripCols. Rows of `b` and `c` hold as many.
inline constexpr int64_t kStripCols = 4 * kMaxLanes;
struct Operand {
  const float* data;
  int64_t m_stride;  // elements from m to m + 1
  int64_t k_stride;
};
void AddProduct(const Operand& a, int64_t ms, int64_t ks, const float* b, int64_t b_stride,
                float* c, int64_t c_stride, int64_t cols);

// Writes row r of a tensor as f32, then zeros to `padded_cols`; and back, times `scale`.
void WidenRow(const TensorView& from, int64_t r, float* to, int64_t padded_cols);
void StoreRow(const float* from, float scale, const MutableTensorView& to, int64_t r);

}  // namespace logitd::cpu

#endif  // LOGITD_KERNELS_CPU_LINEAR_PRODUCT_H_
