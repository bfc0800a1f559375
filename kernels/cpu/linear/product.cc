// Products of hidden states with weights on the CPU.
//
//   logits:  12 tokens at a time, as f32 in L1 by chunks of 256 columns (512 where that is all of
//            them), against tiles of 4 rows out of L2. An element is a vector of sums, each over
//            the columns of its lane. It takes one chunk after another, and its lanes are added at
//            the end in one order.
//   add:     a tile of c stays in registers while k runs.
//
// Cost of logits: two operations for each row, token and column, which is the floor; one read of
// the weights, and one of the packed rows out of L2 for every 12 tokens.
//
// Limited by: the multipliers from some 16 rows on; below that by widening and by memory.
//
// Measured: one core of a Sapphire Rapids, 16 lanes, 4096 columns, GFLOP/s: 64 rows 144 (bf16), 130
// (f32); 16 rows 105, 67; 4 rows 46, 23. OpenBLAS 0.3.21 from f32: 111, 53, 17, and 170 at 256
// rows.
//
// Tried and dropped: OpenBLAS itself. Its kernels for Haswell and Zen round a row differently by
// its place in the call (the first six of every twelve rows, where tokens are at a tile's edge), in
// either orientation and with any padding. So a row's bits depended on its batch. No prefetch of
// the weights widened next, with chunks of 512 columns (64 rows: 132, 106); chunks of 1024 (121,
// 98); 96 rows (135, 123). On a Zen 4, one core, 64 rows of bf16 (92): a tile as a function that is
// not inlined (74), prefetch into L2 only (80); 2048 columns, 16 rows (73): chunks of 512 (67).
#include "kernels/cpu/linear/product.h"

#include <cmath>
#include <cstring>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/linear/product.cc"
#include "hwy/cache_control.h"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/cpu/rows/lanes-inl.h"
#include "kernels/cpu/rows/softcap-inl.h"

#ifndef LOGITD_KERNELS_CPU_PRODUCT_ONCE_
#define LOGITD_KERNELS_CPU_PRODUCT_ONCE_

namespace logitd::cpu {

// Tokens whose weights are widened together.
inline constexpr int64_t kPanelTokens = 12;

// Scratch of one thread.
struct ProductScratch {
  AlignedBuffer sums;
  AlignedBuffer row;
};

ProductScratch& ProductScratchOfThisThread();

}  // namespace logitd::cpu

#endif  // LOGITD_KERNELS_CPU_PRODUCT_ONCE_

HWY_BEFORE_NAMESPACE();
namespace logitd::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// The part of a tile that the registers hold at once.
constexpr bool kManyRegisters = HWY_TARGET <= HWY_AVX3;
constexpr int64_t kRegisterRows = kManyRegisters ? 4 : 2;
constexpr int64_t kRegisterTokens = kManyRegisters ? 6 : 4;
constexpr int64_t kRegisterElements = kRegisterRows * kRegisterTokens;
static_assert(kTileRows % kRegisterRows == 0 && kPanelTokens % kRegisterTokens == 0);
static_assert(kRegisterRows % 2 == 0 && (kRegisterTokens == 6 || kRegisterTokens == 4));

// `count` elements as f32, then zeros to `padded`, a multiple of the lanes.
template <typename T>
void Widen(const T* from, int64_t count, int64_t padded, float* to) {
  const DF d;
  const int64_t lanes = hn::Lanes(d);
  int64_t i = 0;
  for (; i + lanes <= count; i += lanes) hn::StoreU(LoadF32(d, from + i), d, to + i);
  if (i < count) {
    T last[kMaxLanes];
    CopyTail(from + i, count - i, last);
    hn::StoreU(LoadF32(d, last), d, to + i);
    i += lanes;
  }
  for (; i < padded; i += lanes) hn::StoreU(hn::Zero(d), d, to + i);
}

template <typename T>
void Narrow(const float* from, int64_t count, float scale, T* to) {
  const DF d;
  const int64_t lanes = hn::Lanes(d);
  const VF vscale = hn::Set(d, scale);
  for (int64_t i = 0; i < count; i += lanes) {
    StoreAs(d, hn::Mul(hn::LoadU(d, from + i), vscale), count - i, to + i);
  }
}

const std::byte* RowAt(const TensorView& tensor, int64_t r) {
  return static_cast<const std::byte*>(tensor.data) +
         r * tensor.row_stride * static_cast<int64_t>(SizeOf(tensor.dtype));
}

void WidenRowTo(const TensorView& from, int64_t r, float* to, int64_t padded_cols) {
  AsType(from.dtype, RowAt(from, r),
         [&](const auto* row) { Widen(row, from.cols, padded_cols, to); });
}

void StoreRowTo(const float* from, float scale, const MutableTensorView& to, int64_t r) {
  auto* at =
      static_cast<std::byte*>(to.data) + r * to.row_stride * static_cast<int64_t>(SizeOf(to.dtype));
  AsType(to.dtype, at, [&](auto* row) { Narrow(from, to.cols, scale, row); });
}

// x rsqrt(mean x^2 + epsilon) weight, in place.
void Normalize(float* x, int64_t count, const RowNorm& norm) {
  double squares = 0;
  for (int64_t i = 0; i < count; ++i) squares += double{x[i]} * x[i];
  const double mean = squares / static_cast<double>(count);
  const auto factor = static_cast<float>(1 / std::sqrt(mean + norm.epsilon));
  for (int64_t i = 0; i < count; ++i) x[i] = x[i] * factor * norm.weight[i];
}

void PackRowTo(const TensorView& from, const RowNorm& norm, int64_t r, const PackedRows& to,
               ProductScratch& scratch) {
  const int64_t padded = RoundUp(to.cols, kMaxLanes);
  float* row = scratch.row.Get(padded);
  if (r >= to.rows) {
    std::fill(row, row + padded, 0.0f);
  } else {
    WidenRowTo(from, r, row, padded);
    if (norm.weight != nullptr) {
      Normalize(row, to.cols, norm);
      AsType(from.dtype, static_cast<std::byte*>(nullptr), [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        if constexpr (!std::is_same_v<T, float>) {
          T rounded[kMaxLanes];
          for (int64_t i = 0; i < padded; i += kMaxLanes) {
            Narrow(row + i, kMaxLanes, 1, rounded);
            Widen(rounded, kMaxLanes, kMaxLanes, row + i);
          }
        }
      });
    }
  }
  for (int64_t first = 0; first < to.cols; first += to.chunk()) {
    std::copy_n(row + first, to.ChunkCols(first), to.At(r, first));
  }
}

// The lanes' sums of four vectors, each in the same order.
HWY_INLINE void AddUpFour(DF d, VF a, VF b, VF c, VF e, float* to) {
#if HWY_TARGET == HWY_SCALAR
  const VF sums[4] = {a, b, c, e};
  for (int64_t i = 0; i < 4; ++i) hn::Store(sums[i], d, to + i);
#else
  const hn::CappedTag<float, 4> d4;
  const hn::RepartitionToWide<DF> d64;
  const VF ab = hn::Add(hn::InterleaveLower(d, a, b), hn::InterleaveUpper(d, a, b));
  const VF ce = hn::Add(hn::InterleaveLower(d, c, e), hn::InterleaveUpper(d, c, e));
  const auto ab64 = hn::BitCast(d64, ab), ce64 = hn::BitCast(d64, ce);
  const VF all = hn::Add(hn::BitCast(d, hn::InterleaveLower(d64, ab64, ce64)),
                         hn::BitCast(d, hn::InterleaveUpper(d64, ab64, ce64)));
  HWY_ALIGN float blocks[kMaxLanes];  // blocks of four lanes, each a part of the four sums
  hn::Store(all, d, blocks);
  auto sum = hn::Load(d4, blocks);
  for (size_t i = 4; i < hn::Lanes(d); i += 4) sum = hn::Add(sum, hn::Load(d4, blocks + i));
  hn::StoreU(sum, d4, to);
#endif
}

// The place of a chunk in a product.
struct ChunkPlace {
  bool is_first;
  bool is_last;
};

// Takes a chunk of kRegisterRows rows and kRegisterTokens tokens, `cols` elements each. The vectors
// of sums wait in `sums` from one chunk to the next; after the last one `elements` has their lanes'
// sums.
HWY_INLINE void TakeTile(const float* HWY_RESTRICT rows, const float* HWY_RESTRICT tokens,
                         int64_t cols, ChunkPlace at, float* HWY_RESTRICT sums,
                         float* HWY_RESTRICT elements) {
  const DF d;
  const int64_t lanes = hn::Lanes(d);
  VF s[kRegisterRows][kRegisterTokens];
  for (int64_t i = 0; i < kRegisterRows; ++i) {
    for (int64_t j = 0; j < kRegisterTokens; ++j) {
      s[i][j] = at.is_first ? hn::Zero(d) : hn::Load(d, sums + (i * kRegisterTokens + j) * lanes);
    }
  }
  for (int64_t c = 0; c < cols; c += lanes) {
    VF w[kRegisterTokens];
    for (int64_t j = 0; j < kRegisterTokens; ++j) w[j] = hn::Load(d, tokens + j * cols + c);
    for (int64_t i = 0; i < kRegisterRows; ++i) {
      const VF h = hn::Load(d, rows + i * cols + c);
      for (int64_t j = 0; j < kRegisterTokens; ++j) s[i][j] = hn::MulAdd(h, w[j], s[i][j]);
    }
  }
  if (!at.is_last) {
    for (int64_t i = 0; i < kRegisterRows; ++i) {
      for (int64_t j = 0; j < kRegisterTokens; ++j) {
        hn::Store(s[i][j], d, sums + (i * kRegisterTokens + j) * lanes);
      }
    }
    return;
  }
  for (int64_t i = 0; i < kRegisterRows; i += 2) {
    const VF(&a)[kRegisterTokens] = s[i];
    const VF(&b)[kRegisterTokens] = s[i + 1];
    float* const to = elements + i * kRegisterTokens;
    AddUpFour(d, a[0], a[1], a[2], a[3], to);
    if constexpr (kRegisterTokens == 6) {
      AddUpFour(d, a[4], a[5], b[0], b[1], to + 4);
      AddUpFour(d, b[2], b[3], b[4], b[5], to + 8);
    } else {
      AddUpFour(d, b[0], b[1], b[2], b[3], to + 4);
    }
  }
}

// The products of up to kPanelTokens tokens from `token` on, for all rows.
template <typename T>
void Panel(const PackedRows& rows, const T* weight, int64_t stride, int64_t tokens, float* sums,
           float* to, int64_t to_stride) {
  HWY_ALIGN float widened[kPanelTokens * kMostChunk];
  const int64_t tile_sums = kRegisterElements * static_cast<int64_t>(hn::Lanes(DF()));
  for (int64_t first = 0; first < rows.cols; first += rows.chunk()) {
    const int64_t cols = rows.ChunkCols(first);
    const int64_t there = std::min(rows.chunk(), rows.cols - first);
    for (int64_t j = 0; j < kPanelTokens; ++j) {
      if (j < tokens) {
        Widen(weight + j * stride + first, there, cols, widened + j * cols);
      } else {
        std::fill_n(widened + j * cols, cols, 0.0f);
      }
    }
    // The weights widened next: the following chunk, or the first one of the following panel. They
    // are prefetched while the tiles run. After the last panel there is nothing; a prefetch there
    // is harmless.
    const ChunkPlace at = {.is_first = first == 0, .is_last = first + rows.chunk() >= rows.cols};
    const T* next = at.is_last ? weight + kPanelTokens * stride : weight + first + rows.chunk();
    const int64_t lines = RoundUp(cols * static_cast<int64_t>(sizeof(T)), 64) / 64;
    const int64_t tiles = rows.padded_rows() / kRegisterRows;
    int64_t line = 0;
    float* tile = sums;
    for (int64_t r = 0; r < rows.padded_rows(); r += kRegisterRows) {
      const int64_t due = (r / kRegisterRows + 1) * lines * kPanelTokens / tiles;
      for (; line < due; ++line) {
        const auto* ahead = reinterpret_cast<const std::byte*>(next + line / lines * stride);
        hwy::Prefetch(ahead + line % lines * 64);
      }
      for (int64_t j = 0; j < kPanelTokens; j += kRegisterTokens, tile += tile_sums) {
        float elements[kRegisterElements];
        TakeTile(rows.At(r, first), widened + j * cols, cols, at, tile, elements);
        if (!at.is_last) continue;
        const int64_t count = std::min(kRegisterTokens, tokens - j);
        for (int64_t i = 0; i < std::min(kRegisterRows, rows.rows - r); ++i) {
          for (int64_t e = 0; e < count; ++e) {
            to[(r + i) * to_stride + j + e] = elements[i * kRegisterTokens + e];
          }
        }
      }
    }
  }
}

void Finish(const LogitsEpilogue& epilogue, const float* bias, int64_t count, float* x) {
  const DF d;
  const int64_t lanes = hn::Lanes(d);
  const VF scale = hn::Set(d, epilogue.scale);
  const SoftCap cap(epilogue.softcap);
  for (int64_t i = 0; i < count; i += lanes) {
    const VF add = bias == nullptr ? hn::Zero(d) : LoadUpTo(d, bias + i, count - i);
    VF v = hn::MulAdd(LoadUpTo(d, x + i, count - i), scale, add);
    if (epilogue.softcap > 0) v = cap(d, v);
    StoreAs(d, v, count - i, x + i);
  }
}

void LogitsOf(const PackedRows& rows, const TensorView& weight, int64_t begin, int64_t end,
              const LogitsEpilogue& epilogue, float* to, int64_t to_stride,
              ProductScratch& scratch) {
  float* sums = scratch.sums.Get(rows.padded_rows() * kPanelTokens * hn::Lanes(DF()));
  AsType(weight.dtype, static_cast<const std::byte*>(weight.data), [&](const auto* w) {
    for (int64_t t = begin; t < end; t += kPanelTokens) {
      Panel(rows, w + t * weight.row_stride, weight.row_stride, std::min(kPanelTokens, end - t),
            sums, to + t - begin, to_stride);
    }
  });
  if (epilogue.scale == 1 && epilogue.bias == nullptr && epilogue.softcap == 0) return;
  const float* bias = epilogue.bias == nullptr ? nullptr : epilogue.bias + begin;
  for (int64_t r = 0; r < rows.rows; ++r) Finish(epilogue, bias, end - begin, to + r * to_stride);
}

// kM rows of c by one strip of columns.
template <int64_t kM>
HWY_INLINE void AddStrip(const Operand& a, int64_t ks, const float* HWY_RESTRICT b,
                         int64_t b_stride, float* HWY_RESTRICT c, int64_t c_stride) {
  const DF d;
  const int64_t lanes = hn::Lanes(d);
  VF s[kM][4];
  for (int64_t m = 0; m < kM; ++m) {
    for (int64_t j = 0; j < 4; ++j) s[m][j] = hn::LoadU(d, c + m * c_stride + j * lanes);
  }
  for (int64_t k = 0; k < ks; ++k) {
    VF v[4];
    for (int64_t j = 0; j < 4; ++j) v[j] = hn::LoadU(d, b + k * b_stride + j * lanes);
    for (int64_t m = 0; m < kM; ++m) {
      const VF w = hn::Set(d, a.data[m * a.m_stride + k * a.k_stride]);
      for (int64_t j = 0; j < 4; ++j) s[m][j] = hn::MulAdd(w, v[j], s[m][j]);
    }
  }
  for (int64_t m = 0; m < kM; ++m) {
    for (int64_t j = 0; j < 4; ++j) hn::StoreU(s[m][j], d, c + m * c_stride + j * lanes);
  }
}

void AddProductTo(const Operand& a, int64_t ms, int64_t ks, const float* b, int64_t b_stride,
                  float* c, int64_t c_stride, int64_t cols) {
  constexpr int64_t kM = kManyRegisters ? 6 : 2;
  for (int64_t i = 0; i < cols; i += 4 * static_cast<int64_t>(hn::Lanes(DF()))) {
    int64_t m = 0;
    for (; m + kM <= ms; m += kM) {
      AddStrip<kM>({a.data + m * a.m_stride, a.m_stride, a.k_stride}, ks, b + i, b_stride,
                   c + m * c_stride + i, c_stride);
    }
    for (; m < ms; ++m) {
      AddStrip<1>({a.data + m * a.m_stride, a.m_stride, a.k_stride}, ks, b + i, b_stride,
                  c + m * c_stride + i, c_stride);
    }
  }
}

}  // namespace logitd::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace logitd::cpu {

HWY_EXPORT(PackRowTo);
HWY_EXPORT(LogitsOf);
HWY_EXPORT(AddProductTo);
HWY_EXPORT(WidenRowTo);
HWY_EXPORT(StoreRowTo);

ProductScratch& ProductScratchOfThisThread() {
  thread_local ProductScratch scratch;
  return scratch;
}

void PackRow(const TensorView& from, const RowNorm& norm, int64_t r, const PackedRows& to) {
  HWY_DYNAMIC_DISPATCH(PackRowTo)(from, norm, r, to, ProductScratchOfThisThread());
}

void Logits(const PackedRows& rows, const TensorView& weight, int64_t begin, int64_t end,
            const LogitsEpilogue& epilogue, float* to, int64_t to_stride) {
  HWY_DYNAMIC_DISPATCH(LogitsOf)
  (rows, weight, begin, end, epilogue, to, to_stride, ProductScratchOfThisThread());
}

void AddProduct(const Operand& a, int64_t ms, int64_t ks, const float* b, int64_t b_stride,
                float* c, int64_t c_stride, int64_t cols) {
  HWY_DYNAMIC_DISPATCH(AddProductTo)(a, ms, ks, b, b_stride, c, c_stride, cols);
}

void WidenRow(const TensorView& from, int64_t r, float* to, int64_t padded_cols) {
  HWY_DYNAMIC_DISPATCH(WidenRowTo)(from, r, to, padded_cols);
}

void StoreRow(const float* from, float scale, const MutableTensorView& to, int64_t r) {
  HWY_DYNAMIC_DISPATCH(StoreRowTo)(from, scale, to, r);
}

}  // namespace logitd::cpu
#endif  // HWY_ONCE
