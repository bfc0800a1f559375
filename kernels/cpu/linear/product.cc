// Products of hidden states with weights on the CPU.
//
//   logits:  12 tokens at a time, as f32 in L1 by chunks of 256 columns, against tiles of 4 rows
//            out of L2. An element is a vector of sums, each over the columns of its lane. It takes
//            one chunk after another, and its lanes are added at the end in one order.
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
// 98); 96 rows (135, 123).
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
static_assert(kTileRows % kRegisterRows == 0 && kPanelTokens % kRegisterTokens == 0);

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
  for (int64_t first = 0; first < to.cols; first += kChunk) {
    std::copy_n(row + first, to.ChunkCols(first), to.At(r, first));
  }
}

// Adds a chunk's products to the sums of kRegisterRows x kRegisterTokens elements.
HWY_INLINE void AddTile(const float* HWY_RESTRICT rows, const float* HWY_RESTRICT tokens,
                        int64_t cols, bool first, float* HWY_RESTRICT sums) {
  const DF d;
  const int64_t lanes = hn::Lanes(d);
  VF s[kRegisterRows][kRegisterTokens];
  for (int64_t i = 0; i < kRegisterRows; ++i) {
    for (int64_t j = 0; j < kRegisterTokens; ++j) {
      s[i][j] = first ? hn::Zero(d) : hn::Load(d, sums + (i * kRegisterTokens + j) * lanes);
    }
  }
  for (int64_t c = 0; c < cols; c += lanes) {
    VF w[kRegisterTokens];
    for (int64_t j = 0; j < kRegisterTokens; ++j) w[j] = hn::Load(d, tokens + j * kChunk + c);
    for (int64_t i = 0; i < kRegisterRows; ++i) {
      const VF h = hn::Load(d, rows + i * cols + c);
      for (int64_t j = 0; j < kRegisterTokens; ++j) s[i][j] = hn::MulAdd(h, w[j], s[i][j]);
    }
  }
  for (int64_t i = 0; i < kRegisterRows; ++i) {
    for (int64_t j = 0; j < kRegisterTokens; ++j) {
      hn::Store(s[i][j], d, sums + (i * kRegisterTokens + j) * lanes);
    }
  }
}

// Where the sums of row r and token j of a panel are: one register tile after another.
HWY_INLINE int64_t SumsAt(int64_t r, int64_t j) {
  const int64_t tile = r / kRegisterRows * (kPanelTokens / kRegisterTokens) + j / kRegisterTokens;
  return ((tile * kRegisterRows + r % kRegisterRows) * kRegisterTokens + j % kRegisterTokens) *
         static_cast<int64_t>(hn::Lanes(DF()));
}

// The lanes' sums of four elements, each in the same order.
HWY_INLINE void AddUpFour(const float* a, const float* b, const float* c, const float* e,
                          float* to) {
#if HWY_TARGET == HWY_SCALAR
  to[0] = *a, to[1] = *b, to[2] = *c, to[3] = *e;
#else
  const DF d;
  const hn::CappedTag<float, 4> d4;
  const hn::RepartitionToWide<DF> d64;
  const VF va = hn::Load(d, a), vb = hn::Load(d, b), vc = hn::Load(d, c), ve = hn::Load(d, e);
  const VF ab = hn::Add(hn::InterleaveLower(d, va, vb), hn::InterleaveUpper(d, va, vb));
  const VF ce = hn::Add(hn::InterleaveLower(d, vc, ve), hn::InterleaveUpper(d, vc, ve));
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

// The products of up to kPanelTokens tokens from `token` on, for all rows.
template <typename T>
void Panel(const PackedRows& rows, const T* weight, int64_t stride, int64_t tokens, float* sums,
           float* to, int64_t to_stride) {
  HWY_ALIGN float widened[kPanelTokens * kChunk];
  for (int64_t first = 0; first < rows.cols; first += kChunk) {
    const int64_t cols = rows.ChunkCols(first);
    const int64_t there = std::min(kChunk, rows.cols - first);
    for (int64_t j = 0; j < kPanelTokens; ++j) {
      if (j < tokens) {
        Widen(weight + j * stride + first, there, cols, widened + j * kChunk);
      } else {
        std::fill_n(widened + j * kChunk, cols, 0.0f);
      }
    }
    // The weights widened next: the following chunk, or the first one of the following panel. They
    // are prefetched while the tiles run. After the last panel there is nothing; a prefetch there
    // is harmless.
    const bool is_last = first + kChunk >= rows.cols;
    const T* next = is_last ? weight + kPanelTokens * stride : weight + first + kChunk;
    const int64_t lines = RoundUp(cols * static_cast<int64_t>(sizeof(T)), 64) / 64;
    const int64_t tiles = rows.padded_rows() / kRegisterRows;
    int64_t line = 0;
    for (int64_t r = 0; r < rows.padded_rows(); r += kRegisterRows) {
      const int64_t due = (r / kRegisterRows + 1) * lines * kPanelTokens / tiles;
      for (; line < due; ++line) {
        const auto* at = reinterpret_cast<const std::byte*>(next + line / lines * stride);
        hwy::Prefetch(at + line % lines * 64);
      }
      for (int64_t j = 0; j < kPanelTokens; j += kRegisterTokens) {
        AddTile(rows.At(r, first), widened + j * kChunk, cols, first == 0, sums + SumsAt(r, j));
      }
    }
  }
  for (int64_t r = 0; r < rows.rows; ++r) {
    float elements[kPanelTokens];
    for (int64_t j = 0; j < kPanelTokens; j += 4) {
      AddUpFour(sums + SumsAt(r, j), sums + SumsAt(r, j + 1), sums + SumsAt(r, j + 2),
                sums + SumsAt(r, j + 3), elements + j);
    }
    std::copy_n(elements, tokens, to + r * to_stride);
  }
}

void Finish(const LogitsEpilogue& epilogue, const float* bias, int64_t count, float* x) {
  const DF d;
  const int64_t lanes = hn::Lanes(d);
  const VF scale = hn::Set(d, epilogue.scale);
  const SoftCap cap(epilogue.softcap);
  for (int64_t i = 0; i < count; i += lanes) {
    const int64_t n = std::min(lanes, count - i);
    float in[kMaxLanes] = {}, add[kMaxLanes] = {};
    std::copy_n(x + i, n, in);
    if (bias != nullptr) std::copy_n(bias + i, n, add);
    VF v = hn::MulAdd(hn::LoadU(d, in), scale, hn::LoadU(d, add));
    if (epilogue.softcap > 0) v = cap(d, v);
    StoreAs(d, v, n, x + i);
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
