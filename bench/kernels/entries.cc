// The entries of the bench: the cases that peers were measured at, what callers send, and every
// path of a kernel.
#include "bench/kernels/cases.h"

namespace logitd::bench {
namespace {

using enum DType;
using enum HeadOp;

constexpr Anchor Within(double goal_us) { return {.goal_us = goal_us}; }
constexpr Anchor Share(double goal_share) { return {.goal_share = goal_share}; }

// ---- softmax_topk ------------------------------------------------------------------------------

// `row_stride` 0: packed.
constexpr TopKCase TopK(int64_t rows, int64_t vocab, DType dtype, int32_t k,
                        int64_t row_stride = 0) {
  return {rows, vocab, dtype, k, row_stride == 0 ? vocab : row_stride};
}

constexpr Entry kCudaTopK[] = {
    {"classic: GPT-2 vocabulary, rows packed so that most are misaligned",
     TopK(8192, 50257, kF32, 10),
     {"FlashInfer top-k + softmax", 3494, 420, 0.90}},
    {"classic, rows padded to 16 bytes as the server lays them",
     TopK(8192, 50257, kF32, 10, /*row_stride=*/50260),
     {"FlashInfer top-k + softmax", 3494, 420, 0.90}},
    {"decode, large batch",
     TopK(512, 131072, kF32, 64),
     {"FlashInfer top-k + softmax", 337, 70, 0.85}},
    {"decode, large batch, bf16",
     TopK(512, 131072, kBF16, 64),
     {"torch softmax + topk", 1303, 38, 0.80}},
    {"decode, large batch, f16", TopK(512, 131072, kF16, 64)},
    {"large K",
     TopK(512, 131072, kF32, 1024),
     {"CUB batched top-k (no softmax, unsorted)", 332, 90, 0.65}},
    {"scoring, small K", TopK(2048, 131072, kF32, 10), Within(275)},
    {"decode, medium batch", TopK(64, 131072, kF32, 64), {"FlashInfer top-k + softmax", 78, 14}},
    {"decode, medium batch, bf16", TopK(64, 131072, kBF16, 64)},
    {"decode, one row", TopK(1, 131072, kF32, 64), {"FlashInfer top-k + softmax", 40, 8}},
    {"decode, one row, bf16", TopK(1, 131072, kBF16, 64)},
    {"classifier head: many short rows",
     TopK(65536, 1000, kF32, 10),
     {"FlashInfer top-k + softmax", 1681, 70}},
    {"short rows, packed off alignment", TopK(65536, 1001, kF32, 10)},
    {"short rows, K above a warp's lanes", TopK(65536, 1000, kF32, 50)},
    {"rows of two cells", TopK(32768, 2000, kF32, 20)},
    {"rows of three cells, packed off alignment", TopK(20000, 3001, kF32, 50)},
    {"rows of 4096", TopK(16384, 4096, kF32, 50)},
    {"rows of 4096, bf16", TopK(16384, 4096, kBF16, 50)},
    {"rows of 4096, small K", TopK(16384, 4096, kF32, 5)},
    {"rows of 4096, large K", TopK(16384, 4096, kF32, 128)},
    {"rows of 4096, fewer than fill the device", TopK(300, 4096, kF32, 50)},
    {"rows of 8192", TopK(16384, 8192, kF32, 50)},
    {"rows of 8192, bf16", TopK(16384, 8192, kBF16, 50)},
    {"between one wave and two", TopK(300, 131072, kF32, 64)},
    {"fewer rows than multiprocessors", TopK(100, 131072, kF32, 64)},
    {"between one wave and two, bf16", TopK(777, 151936, kBF16, 50)},
    {"between one wave and two, bf16", TopK(1024, 151936, kBF16, 50)},
    {"between one wave and two", TopK(700, 131072, kF32, 64)},
    {"few long rows: clusters of fewer blocks", TopK(16, 201088, kF32, 64)},
    {"decode, few rows", TopK(16, 131072, kF32, 64)},
    {"decode, few rows", TopK(20, 131072, kF32, 64)},
    {"decode, few rows", TopK(32, 131072, kF32, 64)},
    {"longest rows", TopK(64, 1 << 20, kF32, 64)},
    {"K above the pool: sorted", TopK(64, 131072, kF32, 131072)},
};

constexpr Entry kCpuTopK[] = {
    {"decode, medium batch", TopK(64, 131072, kF32, 64), Share(0.70)},
    {"decode, medium batch, bf16", TopK(64, 131072, kBF16, 64)},
    {"decode, medium batch, f16", TopK(64, 131072, kF16, 64)},
    {"decode, one row", TopK(1, 131072, kF32, 64)},
    {"GPT-2 vocabulary", TopK(512, 50257, kF32, 10)},
    {"large K", TopK(64, 131072, kF32, 1024)},
    {"short rows", TopK(32768, 1000, kF32, 10)},
    // Fewer rows than threads: what all threads gain, and what short rows must not lose.
    {"few rows", TopK(1, 131072, kF32, 1)},
    {"few rows", TopK(1, 131072, kF32, 1024)},
    {"few rows", TopK(1, 131072, kF32, 20000)},
    {"few rows, bf16", TopK(1, 131072, kBF16, 20000)},
    {"few rows", TopK(2, 131072, kF32, 64)},
    {"few rows", TopK(2, 131072, kF32, 1024)},
    {"few rows", TopK(2, 131072, kF32, 20000)},
    {"few rows", TopK(3, 131072, kF32, 20000)},
    {"few rows", TopK(1, 50257, kF32, 1)},
    {"few rows", TopK(1, 50257, kF32, 64)},
    {"few rows", TopK(1, 50257, kF32, 1024)},
    {"few rows", TopK(1, 50257, kF32, 20000)},
    {"few rows", TopK(2, 50257, kF32, 20000)},
    {"few rows", TopK(1, 8192, kF32, 64)},
    {"few rows", TopK(1, 8192, kF32, 1024)},
    {"few rows", TopK(1, 1000, kF32, 1)},
    {"few rows", TopK(1, 1000, kF32, 64)},
    {"few rows", TopK(2, 1000, kF32, 64)},
};

// ---- sample ------------------------------------------------------------------------------------

constexpr SampleRow Asking(float temperature, int32_t top_k, float top_p, int32_t top_logprobs) {
  return {.active = 1,
          .temperature = temperature,
          .top_k = top_k,
          .top_p = top_p,
          .repetition = 1.1f,  // for rows with a history
          .typical_p = 1,
          .top_logprobs = top_logprobs,
          .want_rank = true};
}

constexpr SampleRow WithoutRank(SampleRow row) {
  row.want_rank = false;
  return row;
}

constexpr SampleCase SampleOf(int64_t rows, int64_t vocab, DType dtype, SampleRow row,
                              int32_t history = 0, bool mask = false) {
  return {rows, vocab, dtype, row, history, mask};
}

constexpr SampleCase Sample(int64_t rows, DType dtype, SampleRow row, int32_t history = 0,
                            bool mask = false) {
  return SampleOf(rows, 131072, dtype, row, history, mask);
}

// What frontends send, one option at a time and together. For both backends.
constexpr Entry kSampleEntries[] = {
    {"top-k 50, top-p 0.9", Sample(64, kF32, Asking(1, 50, 0.9f, 0))},
    {"top-k 50, top-p 0.9, bf16", Sample(64, kBF16, Asking(1, 50, 0.9f, 0))},
    {"with temperature, 20 top log-probs",
     Sample(64, kF32, Asking(0.8f, 64, 0.9f, 20)),
     {"FlashInfer, log-probs by torch", 291}},
    {"with history 4096, mask",
     Sample(64, kF32, Asking(0.8f, 64, 0.9f, 20), /*history=*/4096, /*mask=*/true)},
    {"greedy", Sample(64, kF32, Asking(0, 0, 1, 0))},
    {"unfiltered", Sample(64, kF32, Asking(1, 0, 1, 0))},
    {"unfiltered, temperature 0.8", Sample(64, kF32, Asking(0.8f, 0, 1, 0))},
    {"top-p 0.9 alone, flat row", Sample(64, kF32, Asking(1, 0, 0.9f, 0))},
    {"top-k 50, top-p 0.9, one row", Sample(1, kF32, Asking(1, 50, 0.9f, 0))},
    {"with temperature, 20 top log-probs",
     Sample(1, kF32, Asking(0.8f, 64, 0.9f, 20)),
     {"FlashInfer, log-probs by torch", 125}},
    {"with history 4096, mask, one row",
     Sample(1, kF32, Asking(0.8f, 64, 0.9f, 20), /*history=*/4096, /*mask=*/true)},
    {"with temperature, 20 top log-probs",
     Sample(512, kF32, Asking(0.8f, 64, 0.9f, 20)),
     {"FlashInfer, log-probs by torch", 1464}},
    {"with history 4096, mask",
     Sample(512, kF32, Asking(0.8f, 64, 0.9f, 20), /*history=*/4096, /*mask=*/true)},
    {"unfiltered", Sample(512, kF32, Asking(1, 0, 1, 0))},
    {"top-p 0.9 alone, flat row", Sample(512, kF32, Asking(1, 0, 0.9f, 0))},
    {"top-p 0.9 alone, flat row, no rank", Sample(64, kF32, WithoutRank(Asking(1, 0, 0.9f, 0)))},
    {"top-p 0.9 alone, flat row, no rank", Sample(512, kF32, WithoutRank(Asking(1, 0, 0.9f, 0)))},
    {"top-p 0.9 alone, flat row, no rank",
     SampleOf(777, 151936, kBF16, WithoutRank(Asking(1, 0, 0.9f, 0)))},
    {"top-p 0.9 alone, flat odd row, no rank",
     SampleOf(512, 50257, kF32, WithoutRank(Asking(1, 0, 0.9f, 0)))},
    {"top-k 5000, top-p 0.9, no rank", Sample(512, kF32, WithoutRank(Asking(1, 5000, 0.9f, 0)))},
    {"unfiltered, no rank", Sample(512, kF32, WithoutRank(Asking(1, 0, 1, 0)))},
    {"unfiltered, no rank", Sample(64, kF32, WithoutRank(Asking(1, 0, 1, 0)))},
    {"with a mask", Sample(512, kF32, Asking(0.8f, 64, 0.9f, 20), /*history=*/0, /*mask=*/true)},
    {"with history 500, no top log-probs", Sample(512, kF32, Asking(0.8f, 50, 0.9f, 0), 500)},
    {"with history 20000", SampleOf(64, 151936, kBF16, Asking(0.8f, 50, 0.9f, 0), 20000)},
    {"unfiltered, no rank, with history 4096",
     Sample(512, kF32, WithoutRank(Asking(1, 0, 1, 0)), /*history=*/4096)},
    {"with temperature, 20 top log-probs", SampleOf(16, 201088, kF32, Asking(0.8f, 64, 0.9f, 20))},
    {"greedy", SampleOf(16, 201088, kF32, Asking(0, 0, 1, 0))},
    {"few rows, 20 top log-probs", Sample(16, kF32, Asking(0.8f, 64, 0.9f, 20))},
    {"few rows, 20 top log-probs", Sample(20, kF32, Asking(0.8f, 64, 0.9f, 20))},
    {"few rows, 20 top log-probs", Sample(32, kF32, Asking(0.8f, 64, 0.9f, 20))},
    {"unfiltered, no rank", Sample(1, kF32, WithoutRank(Asking(1, 0, 1, 0)))},
    {"unfiltered, no rank", Sample(20, kF32, WithoutRank(Asking(1, 0, 1, 0)))},
    {"unfiltered, no rank, temperature 0.8", Sample(512, kF32, WithoutRank(Asking(0.8f, 0, 1, 0)))},
    {"unfiltered, no rank", Sample(512, kBF16, WithoutRank(Asking(1, 0, 1, 0)))},
    {"unfiltered, no rank", SampleOf(777, 50257, kF32, WithoutRank(Asking(1, 0, 1, 0)))},
    {"fewer rows than multiprocessors", Sample(100, kF32, Asking(1, 50, 0.9f, 0))},
    {"top-k 50, top-p 0.9", SampleOf(777, 151936, kBF16, Asking(1, 50, 0.9f, 0))},
    {"top-k 50, top-p 0.9", SampleOf(777, 151936, kF32, Asking(1, 50, 0.9f, 0))},
};

// A row of what only few rows ask for, by `set`.
template <class Set>
constexpr SampleRow With(SampleRow row, Set set) {
  row.want_rank = false;
  row.repetition = 1;
  set(row);
  return row;
}
constexpr auto k16Draws = [](SampleRow& row) { row.draws = 16; };
constexpr auto kWatermark = [](SampleRow& row) {
  row.watermark_key = 1;
  row.watermark_width = 4;
};
constexpr auto kXtc = [](SampleRow& row) {
  row.xtc_probability = 1;
  row.xtc_threshold = 0.1f;
};
constexpr auto kTypicalP = [](SampleRow& row) { row.typical_p = 0.9f; };
constexpr auto kTopNSigma = [](SampleRow& row) { row.top_n_sigma = 1; };
constexpr auto kSupport = [](SampleRow& row) { row.want_support = 64; };
constexpr auto kLongSupport = [](SampleRow& row) { row.want_support = 1024; };
constexpr auto kEntropy = [](SampleRow& row) { row.want_entropy = true; };

constexpr SampleRow kFewLeft = Asking(1, 50, 0.9f, 0);  // the list holds what the filters leave
constexpr SampleRow kManyLeft = Asking(1, 0, 0.9f, 0);  // it does not
constexpr SampleRow kAllLeft = Asking(1, 0, 1, 0);      // unfiltered

constexpr Entry kSampleMoreEntries[] = {
    {"top-k 50, top-p 0.9, 16 draws", Sample(64, kF32, With(kFewLeft, k16Draws))},
    {"unfiltered, 16 draws", Sample(64, kF32, With(kAllLeft, k16Draws))},
    {"top-p 0.9 alone, flat row, 16 draws", Sample(64, kF32, With(kManyLeft, k16Draws))},
    {"top-k 50, top-p 0.9, 16 draws", Sample(512, kF32, With(kFewLeft, k16Draws))},
    {"unfiltered, 16 draws", Sample(512, kF32, With(kAllLeft, k16Draws))},
    {"top-k 50, top-p 0.9, watermark", Sample(64, kF32, With(kFewLeft, kWatermark), 8)},
    {"unfiltered, watermark", Sample(64, kF32, With(kAllLeft, kWatermark), 8)},
    {"unfiltered, watermark", Sample(512, kF32, With(kAllLeft, kWatermark), 8)},
    {"top-k 50, top-p 0.9, xtc", Sample(64, kF32, With(kFewLeft, kXtc))},
    {"xtc alone, flat row", Sample(64, kF32, With(kAllLeft, kXtc))},
    {"top-k 50, top-p 0.9, typical-p 0.9", Sample(64, kF32, With(kFewLeft, kTypicalP))},
    {"typical-p 0.9 alone, flat row", Sample(64, kF32, With(kAllLeft, kTypicalP))},
    {"top-n-sigma 1", Sample(64, kF32, With(kAllLeft, kTopNSigma))},
    {"top-n-sigma 1", Sample(512, kF32, With(kAllLeft, kTopNSigma))},
    {"top-k 50, top-p 0.9, a support of 64", Sample(64, kF32, With(kFewLeft, kSupport))},
    {"top-p 0.9 alone, flat row, a support of 1024",
     Sample(64, kF32, With(kManyLeft, kLongSupport))},
    {"top-k 50, top-p 0.9, entropies", Sample(64, kF32, With(kFewLeft, kEntropy))},
    {"unfiltered, entropies", Sample(512, kF32, With(kAllLeft, kEntropy))},
};

// ---- verify ------------------------------------------------------------------------------------

// 16 sequences of 5 drafts.
constexpr VerifyCase Verify(SampleRow row, DraftKind kind = DraftKind::kList,
                            BlockSequences blocks = BlockSequences::kNone) {
  return {Sample(96, kF32, WithoutRank(row)), /*length=*/6, kind, blocks};
}

constexpr Entry kVerifyEntries[] = {
    {"top-k 50, top-p 0.9, greedy drafts", Verify(kFewLeft, DraftKind::kGreedy)},
    {"top-k 50, top-p 0.9, listed drafts", Verify(kFewLeft)},
    {"top-k 50, top-p 0.9, dense drafts", Verify(kFewLeft, DraftKind::kDense)},
    {"unfiltered, listed drafts", Verify(kAllLeft)},
    {"top-k 50, top-p 0.9, listed drafts, block",
     Verify(kFewLeft, DraftKind::kList, BlockSequences::kAll)},
    {"top-k 50, top-p 0.9, listed drafts, block in every other sequence",
     Verify(kFewLeft, DraftKind::kList, BlockSequences::kEveryOther)},
    {"top-k 50, top-p 0.9, dense drafts, block",
     Verify(kFewLeft, DraftKind::kDense, BlockSequences::kAll)},
};

constexpr SampleRow WithMinP(SampleRow row) {
  row.min_p = 0.1f;
  return row;
}

// Fewer rows than threads, as for softmax_topk.
constexpr Entry kCpuSample[] = {
    {"few rows, greedy", Sample(1, kF32, WithoutRank(Asking(0, 0, 1, 0)))},
    {"few rows, top-p 0.9, flat", Sample(1, kF32, WithoutRank(Asking(1, 0, 0.9f, 0)))},
    {"few rows, top-p 0.9, flat, bf16", Sample(1, kBF16, WithoutRank(Asking(1, 0, 0.9f, 0)))},
    {"few rows, top-p 0.9, flat, rank", Sample(1, kF32, Asking(1, 0, 0.9f, 0))},
    {"few rows, min-p 0.1", Sample(1, kF32, WithoutRank(WithMinP(Asking(1, 0, 1, 0))))},
    {"few rows, top-k 1024, top-p 0.9", Sample(1, kF32, WithoutRank(Asking(1, 1024, 0.9f, 0)))},
    {"few rows, top-k 20000", Sample(1, kF32, WithoutRank(Asking(1, 20000, 1, 0)))},
    {"few rows, top-k 20000, top-p 0.9", Sample(1, kF32, WithoutRank(Asking(1, 20000, 0.9f, 0)))},
    {"few rows, greedy", Sample(2, kF32, WithoutRank(Asking(0, 0, 1, 0)))},
    {"few rows, top-p 0.9, flat", Sample(2, kF32, WithoutRank(Asking(1, 0, 0.9f, 0)))},
    {"few rows, top-p 0.9, flat", Sample(3, kF32, WithoutRank(Asking(1, 0, 0.9f, 0)))},
    {"few rows, min-p 0.1", Sample(2, kF32, WithoutRank(WithMinP(Asking(1, 0, 1, 0))))},
    {"few rows, top-p 0.9, flat", SampleOf(1, 50257, kF32, WithoutRank(Asking(1, 0, 0.9f, 0)))},
    {"few rows, min-p 0.1", SampleOf(1, 50257, kF32, WithoutRank(WithMinP(Asking(1, 0, 1, 0))))},
    {"few rows, greedy", SampleOf(1, 50257, kF32, WithoutRank(Asking(0, 0, 1, 0)))},
    {"few rows, top-p 0.9, flat", SampleOf(1, 1000, kF32, WithoutRank(Asking(1, 0, 0.9f, 0)))},
    {"few rows, min-p 0.1", SampleOf(1, 1000, kF32, WithoutRank(WithMinP(Asking(1, 0, 1, 0))))},
    {"few rows, greedy", SampleOf(1, 1000, kF32, WithoutRank(Asking(0, 0, 1, 0)))},
    {"few rows, greedy", SampleOf(2, 1000, kF32, WithoutRank(Asking(0, 0, 1, 0)))},
};

// ---- attention_softmax -------------------------------------------------------------------------

constexpr AttentionWindow kCausal = {.left = AttentionWindow::kUnbounded, .right = 0};

constexpr AttentionCase Scores(int64_t heads, int64_t length, DType dtype,
                               AttentionWindow window = {}, MaskKind mask = MaskKind::kNone) {
  return {1, heads, length, length, dtype, window, mask};
}

constexpr AttentionCase ScoresBackward(int64_t heads, int64_t length, DType dtype,
                                       AttentionWindow window = {}) {
  return {1, heads, length, length, dtype, window, MaskKind::kNone, /*backward=*/true};
}

constexpr Entry kCudaAttention[] = {
    {"causal, decode batch", Scores(32, 128, kBF16, kCausal), Within(6)},
    {"causal", Scores(32, 512, kBF16, kCausal), Within(8)},
    {"causal", Scores(32, 1024, kBF16, kCausal), {"torch.compile", 41, 27}},
    {"causal", Scores(32, 2048, kBF16, kCausal), Within(105)},
    {"causal", Scores(32, 4096, kBF16, kCausal), {"torch.compile", 1427, 415, 0.90}},
    {"causal", Scores(8, 8192, kBF16, kCausal), {.goal_us = 420, .goal_share = 0.90}},
    {"causal", Scores(8, 16384, kBF16, kCausal), {"Apex, Megatron", 21582, 1700, 0.90}},
    // A gigabyte and more of each form.
    {"causal", Scores(1024, 512, kBF16, kCausal), Share(0.80)},
    {"causal", Scores(256, 1024, kBF16, kCausal), Share(0.90)},
    {"causal", Scores(64, 2048, kBF16, kCausal), Share(0.90)},
    {"causal", Scores(2, 32768, kBF16, kCausal)},
    {"causal", Scores(1, 65536, kBF16, kCausal), Share(0.80)},
    {"window of 256", Scores(32, 4096, kBF16, {255, 0})},
    {"unmasked", Scores(65536, 64, kBF16), Share(0.92)},
    {"unmasked", Scores(16384, 128, kBF16), Share(0.92)},
    {"unmasked", Scores(1024, 512, kBF16), Share(0.92)},
    {"unmasked", Scores(256, 1024, kBF16), Share(0.92)},
    {"unmasked", Scores(32, 4096, kBF16), {"QuACK", 516, 0, 0.92}},
    {"unmasked", Scores(4, 16384, kBF16), Share(0.92)},
    {"unmasked, long rows", AttentionCase{1, 1, 16384, 65536, kBF16}, Share(0.92)},
    {"unmasked, long rows", AttentionCase{1, 1, 8192, 131072, kBF16}},
    {"unmasked, longest rows", AttentionCase{1, 1, 1024, 1 << 20, kBF16}},
    {"unmasked, longest rows, between two sizes", AttentionCase{1, 1, 1024, 700000, kBF16}},
    {"unmasked, rows off alignment", Scores(1024, 511, kBF16)},
    {"unmasked, rows off alignment", Scores(256, 1023, kBF16)},
    {"unmasked, rows off alignment", Scores(64, 2047, kBF16)},
    {"unmasked, rows off alignment", Scores(16, 4097, kBF16)},
    {"unmasked, rows off alignment", Scores(4, 12345, kBF16), {"Liger CuTe", 1393}},
    {"unmasked, rows off alignment", Scores(2, 32767, kBF16)},
    {"unmasked, rows off alignment, f32", Scores(16, 4097, kF32)},
    {"causal, rows off alignment", Scores(64, 2047, kBF16, kCausal)},
    {"causal, rows off alignment", Scores(16, 4097, kBF16, kCausal)},
    {"causal, rows off alignment", Scores(4, 12345, kBF16, kCausal), {"torch.compile", 2397}},
    {"unmasked, between two sizes", Scores(4, 12344, kBF16)},
    {"causal, between two sizes", Scores(4, 12344, kBF16, kCausal)},
    {"causal, between two sizes", Scores(1, 40000, kBF16, kCausal)},
    {"bool mask", Scores(256, 1024, kBF16, {}, MaskKind::kBool), Share(0.85)},
    {"bool mask", Scores(32, 4096, kBF16, {}, MaskKind::kBool), Share(0.85)},
    {"bool mask", Scores(4, 16384, kBF16, {}, MaskKind::kBool), Share(0.85)},
    {"additive mask", Scores(32, 4096, kBF16, {}, MaskKind::kAdditive)},
    {"additive mask, between two sizes",
     AttentionCase{1, 1, 16384, 17408, kBF16, {}, MaskKind::kAdditive}},
    {"causal, f16", Scores(32, 4096, kF16, kCausal), Share(0.90)},
    {"causal, f32", Scores(512, 512, kF32, kCausal), Share(0.80)},
    {"causal, f32", Scores(128, 1024, kF32, kCausal), Share(0.90)},
    {"causal, f32", Scores(16, 4096, kF32, kCausal), Share(0.90)},
    {"causal, f32", Scores(2, 16384, kF32, kCausal), Share(0.90)},
    {"unmasked, f32", Scores(16, 4096, kF32), Share(0.92)},
    {"bool mask, f32", Scores(16, 4096, kF32, {}, MaskKind::kBool), Share(0.85)},
    {"backward", ScoresBackward(65536, 64, kBF16), {"Apex", 372, 0, 0.88}},
    {"backward", ScoresBackward(256, 1024, kBF16), Share(0.88)},
    {"backward", ScoresBackward(16, 4096, kBF16), {"Apex", 766, 0, 0.88}},
    {"backward", ScoresBackward(8, 16384, kBF16), {"Apex", 22267, 0, 0.88}},
    {"backward, causal", ScoresBackward(256, 1024, kBF16, kCausal), Share(0.88)},
    {"backward, causal", ScoresBackward(16, 4096, kBF16, kCausal), Share(0.88)},
    {"backward, causal", ScoresBackward(4, 16384, kBF16, kCausal), Share(0.88)},
    {"backward, f32", ScoresBackward(16, 4096, kF32), Share(0.88)},
    {"backward, rows off alignment", ScoresBackward(256, 1023, kBF16)},
    {"backward, rows off alignment", ScoresBackward(4, 12345, kBF16)},
    {"backward, causal, rows off alignment", ScoresBackward(16, 4097, kBF16, kCausal)},
};

constexpr Entry kCpuAttention[] = {
    {"unmasked", Scores(16, 1024, kF32)},
    {"unmasked, bf16", Scores(16, 1024, kBF16)},
    {"unmasked, f16", Scores(16, 1024, kF16)},
    {"causal", Scores(16, 1024, kF32, kCausal)},
    {"causal, bf16", Scores(16, 1024, kBF16, kCausal)},
    {"window of 256", Scores(16, 1024, kBF16, {255, 0})},
    {"bool mask", Scores(16, 1024, kBF16, {}, MaskKind::kBool)},
    {"additive mask", Scores(16, 1024, kBF16, {}, MaskKind::kAdditive)},
    {"short rows", AttentionCase{64, 16, 64, 64, kBF16, kCausal}},
    {"odd rows", Scores(16, 1001, kBF16, kCausal)},
    {"odd rows, unmasked", Scores(16, 1023, kBF16)},
    {"odd rows, unmasked, f32", Scores(16, 1023, kF32)},
    {"odd rows of thirteen cells", Scores(1, 12345, kBF16)},
    {"shorter rows", Scores(32, 512, kBF16)},
    {"shorter rows, f32", Scores(32, 512, kF32)},
    {"rows of four cells, causal", Scores(4, 4096, kBF16, kCausal)},
    {"rows of four cells, f32", Scores(4, 4096, kF32)},
    {"additive mask, f16", Scores(16, 1024, kF16, {}, MaskKind::kAdditive)},
    {"a small call", AttentionCase{1, 8, 64, 512, kBF16}},
    {"long rows", AttentionCase{1, 1, 128, 131072, kBF16}},
    {"longest rows, f32", AttentionCase{1, 1, 16, 1 << 20, kF32}},
    {"backward, causal", ScoresBackward(16, 1024, kF32, kCausal)},
    {"backward, causal, bf16", ScoresBackward(16, 1024, kBF16, kCausal)},
    {"backward, f32", ScoresBackward(16, 1024, kF32)},
    {"backward, odd rows, bf16", ScoresBackward(16, 1023, kBF16)},
    {"backward, long rows, bf16",
     AttentionCase{1, 1, 128, 131072, kBF16, {}, MaskKind::kNone, /*backward=*/true}},
};

// ---- cross_entropy -----------------------------------------------------------------------------

constexpr CrossEntropyCase Losses(int64_t rows, int64_t vocab, DType dtype,
                                  CrossEntropyRow row = {}) {
  row.active = 1;
  row.temperature = 1;
  return {rows, vocab, dtype, row};
}

constexpr CrossEntropyCase LossesBackward(int64_t rows, int64_t vocab, DType dtype,
                                          CrossEntropyRow row = {}) {
  CrossEntropyCase c = Losses(rows, vocab, dtype, row);
  c.op = LossOp::kBackward;
  return c;
}

constexpr CrossEntropyCase LossesTraining(int64_t rows, int64_t vocab, DType dtype,
                                          CrossEntropyRow row = {}) {
  CrossEntropyCase c = Losses(rows, vocab, dtype, row);
  c.op = LossOp::kTraining;
  return c;
}

constexpr CrossEntropyCase InTwoCalls(CrossEntropyCase c) {
  c.op = LossOp::kTwoCalls;
  return c;
}

constexpr Entry kCudaCrossEntropy[] = {
    {"training", Losses(8192, 32000, kBF16), {"QuACK", 130, 0, 0.91}},
    {"training", Losses(8192, 128256, kBF16), {"QuACK", 576, 0, 0.91}},
    {"training", Losses(4096, 256000, kBF16), Share(0.91)},
    {"backward", LossesBackward(8192, 32000, kBF16), {"QuACK", 269, 0, 0.91}},
    {"backward", LossesBackward(8192, 128256, kBF16), {"QuACK", 1073, 0, 0.91}},
    {"backward", LossesBackward(4096, 256000, kBF16), Share(0.91)},
    {"f32", Losses(4096, 128256, kF32), Share(0.91)},
    {"f16", Losses(8192, 128256, kF16), Share(0.91)},
    {"rows off alignment", Losses(8192, 50257, kBF16)},
    {"backward, rows off alignment", LossesBackward(8192, 50257, kBF16)},
    {"rank", Losses(8192, 128256, kBF16, {.want = kWantRank})},
    {"rank, entropy, 5 tops",
     Losses(8192, 128256, kBF16, {.top_logprobs = 5, .want = kWantRank | kWantEntropy})},
    {"label smoothing", Losses(8192, 128256, kBF16, {.label_smoothing = 0.1f})},
    {"entropy", Losses(8192, 128256, kBF16, {.want = kWantEntropy})},
    {"softcap", Losses(8192, 128256, kBF16, {.softcap = 30})},
    {"softcap, logits up to twice it", Losses(8192, 128256, kBF16, {.softcap = 3})},
    {"softcap, rows off alignment", Losses(8192, 50257, kBF16, {.softcap = 30})},
    {"softcap, between two waves", Losses(777, 151936, kBF16, {.softcap = 30})},
    {"softcap and entropy", Losses(8192, 128256, kBF16, {.softcap = 30, .want = kWantEntropy})},
    {"backward, softcap", LossesBackward(8192, 128256, kBF16, {.softcap = 30})},
    {"backward, softcap, rows off alignment", LossesBackward(8192, 50257, kBF16, {.softcap = 30})},
    {"scoring, few rows", Losses(64, 128256, kBF16)},
    {"scoring, few rows", Losses(16, 128256, kBF16)},
    {"scoring, few rows", Losses(20, 128256, kBF16)},
    {"scoring, few rows", Losses(32, 128256, kBF16)},
    {"scoring, one row", Losses(1, 128256, kBF16)},
    {"short rows", Losses(65536, 1000, kBF16)},
    {"short rows, off alignment", Losses(65536, 1001, kBF16)},
    {"rows of two cells", Losses(32768, 2000, kBF16)},
    {"rows of five cells", Losses(32768, 5000, kBF16)},
    {"padded vocabulary", Losses(16384, 50304, kBF16)},
    {"rows off alignment by an element", Losses(8192, 32001, kBF16)},
};

// Loss and gradient in one call, and in two.
constexpr Entry kCudaCrossEntropyTraining[] = {
    {"one call", LossesTraining(8192, 32000, kBF16), {"QuACK", 308, 285, 0.93}},
    {"two calls", InTwoCalls(LossesTraining(8192, 32000, kBF16))},
    {"one call", LossesTraining(8192, 128256, kBF16), {"QuACK", 1421, 1200, 0.89}},
    {"two calls", InTwoCalls(LossesTraining(8192, 128256, kBF16))},
    {"one call", LossesTraining(4096, 151936, kBF16), {"QuACK", 803}},
    {"two calls", InTwoCalls(LossesTraining(4096, 151936, kBF16))},
    {"one call", LossesTraining(8192, 32000, kF16)},
    {"two calls", InTwoCalls(LossesTraining(8192, 32000, kF16))},
    {"one call", LossesTraining(8192, 32000, kF32)},
    {"two calls", InTwoCalls(LossesTraining(8192, 32000, kF32))},
    {"one call", LossesTraining(8192, 128256, kF32)},
    {"two calls", InTwoCalls(LossesTraining(8192, 128256, kF32))},
    {"rows off alignment", LossesTraining(8192, 50257, kBF16)},
    {"rows off alignment", InTwoCalls(LossesTraining(8192, 50257, kBF16))},
    {"rows off alignment by an element", LossesTraining(8192, 32001, kBF16)},
    {"rows off alignment by an element", InTwoCalls(LossesTraining(8192, 32001, kBF16))},
    {"padded vocabulary", LossesTraining(16384, 50304, kBF16)},
    {"softcap", LossesTraining(8192, 32000, kBF16, {.softcap = 30})},
    {"softcap", InTwoCalls(LossesTraining(8192, 32000, kBF16, {.softcap = 30}))},
    {"softcap", LossesTraining(8192, 128256, kBF16, {.softcap = 30})},
    {"softcap", InTwoCalls(LossesTraining(8192, 128256, kBF16, {.softcap = 30}))},
    {"label smoothing", LossesTraining(8192, 128256, kBF16, {.label_smoothing = 0.1f})},
    {"label smoothing", InTwoCalls(LossesTraining(8192, 128256, kBF16, {.label_smoothing = 0.1f}))},
    {"z-loss", LossesTraining(8192, 128256, kBF16, {.z_loss = 1e-4f})},
    {"z-loss", InTwoCalls(LossesTraining(8192, 128256, kBF16, {.z_loss = 1e-4f}))},
    {"rank and entropy", LossesTraining(8192, 128256, kBF16, {.want = kWantRank | kWantEntropy})},
    {"rank and entropy",
     InTwoCalls(LossesTraining(8192, 128256, kBF16, {.want = kWantRank | kWantEntropy}))},
    {"longest rows in a cluster", LossesTraining(2048, 262144, kBF16)},
    {"longest rows in a cluster", InTwoCalls(LossesTraining(2048, 262144, kBF16))},
    {"longer rows", LossesTraining(512, 1 << 20, kBF16)},
    {"short rows", LossesTraining(65536, 1000, kBF16)},
    {"short rows", InTwoCalls(LossesTraining(65536, 1000, kBF16))},
    {"rows of five cells", LossesTraining(32768, 5000, kBF16)},
    {"rows of five cells", InTwoCalls(LossesTraining(32768, 5000, kBF16))},
    {"rows of sixteen cells", LossesTraining(16384, 16384, kBF16)},
    {"between two waves", LossesTraining(777, 151936, kBF16)},
    {"between two waves", InTwoCalls(LossesTraining(777, 151936, kBF16))},
    {"few rows", LossesTraining(64, 128256, kBF16)},
    {"few rows", InTwoCalls(LossesTraining(64, 128256, kBF16))},
    {"one row", LossesTraining(1, 128256, kBF16)},
    {"one row", InTwoCalls(LossesTraining(1, 128256, kBF16))},
};

constexpr Entry kCpuCrossEntropy[] = {
    {"loss alone", Losses(64, 131072, kF32)},
    {"loss alone, bf16", Losses(64, 131072, kBF16)},
    {"with rank, entropy, 20 top log-probs",
     Losses(64, 131072, kF32, {.top_logprobs = 20, .want = kWantRank | kWantEntropy})},
    {"label smoothing", Losses(64, 131072, kF32, {.label_smoothing = 0.1f})},
    {"softcap", Losses(64, 131072, kF32, {.softcap = 30})},
    {"softcap, rank", Losses(64, 131072, kBF16, {.softcap = 30, .want = kWantRank})},
    {"loss alone, one row", Losses(1, 131072, kF32)},
    {"short rows", Losses(32768, 1000, kF32)},
    {"backward", LossesBackward(64, 131072, kF32)},
    {"backward, bf16", LossesBackward(64, 131072, kBF16)},
    {"backward, softcap", LossesBackward(64, 131072, kF32, {.softcap = 30})},
    {"loss and gradient in one call", LossesTraining(64, 131072, kF32)},
    {"loss and gradient in one call, bf16", LossesTraining(64, 131072, kBF16)},
};

// ---- heads -------------------------------------------------------------------------------------

constexpr Entry kCudaHead[] = {
    // Goal shares are of the product.
    {"training", HeadCase{kCrossEntropy, 4096, 4096, 128256, kBF16}, {"QuACK", 5940, 6500, 0.90}},
    {"training",
     HeadCase{kCrossEntropy, 16384, 4096, 128256, kBF16},
     {.goal_us = 26400, .goal_share = 0.90}},
    {"training", HeadCase{kCrossEntropy, 8192, 2048, 256000, kBF16}, {"QuACK", 12270, 13300, 0.90}},
    {"scoring, few rows", HeadCase{kCrossEntropy, 256, 4096, 128256, kBF16}, Within(450)},
    {"scoring, few rows", HeadCase{kCrossEntropy, 128, 4096, 128256, kBF16}},
    {"scoring, few rows", HeadCase{kCrossEntropy, 64, 4096, 128256, kBF16}},
    {"scoring, one row", HeadCase{kCrossEntropy, 1, 4096, 128256, kBF16}},
    {"forward and backward",
     HeadCase{kTraining, 4096, 4096, 128256, kBF16},
     {"QuACK", 19400, 20000}},
    {"forward and backward, f16", HeadCase{kTraining, 4096, 4096, 128256, kF16}},
    {"forward and backward, 3 of 4 rows ignored",
     HeadCase{kTraining, 4096, 4096, 128256, kBF16, 3072}},
    {"3 of 4 rows ignored", HeadCase{kCrossEntropy, 4096, 4096, 128256, kBF16, 3072}},
    {"decode",
     HeadCase{kSample, 1, 4096, 128256, kBF16},
     {"torch + FlashInfer, token only", 285, 280}},
    {"decode",
     HeadCase{kSample, 8, 4096, 128256, kBF16},
     {"torch + FlashInfer, token only", 288, 280}},
    {"decode", HeadCase{kSample, 32, 4096, 128256, kBF16}, Within(280)},
    {"decode",
     HeadCase{kSample, 64, 4096, 128256, kBF16},
     {"torch + FlashInfer, token only", 358, 280}},
    {"decode", HeadCase{kSample, 128, 4096, 128256, kBF16}},
    {"decode", HeadCase{kSample, 256, 4096, 128256, kBF16}},
    {"decode, f16", HeadCase{kSample, 64, 4096, 128256, kF16}},
    {"decode, f32", HeadCase{kSample, 64, 4096, 128256, kF32}},
    {"top 20", HeadCase{kTopK, 64, 4096, 128256, kBF16}},
    {"16 sequences of 5 drafts", HeadCase{kVerify, 96, 4096, 128256, kBF16}},
    {"16 sequences of 5 drafts, block", HeadCase{kBlockVerify, 96, 4096, 128256, kBF16}},
    {"128 sequences of 5 drafts", HeadCase{kVerify, 768, 4096, 128256, kBF16}},
    // Rows between the sizes of tiles, and other heads: how much of a padded tile is paid for.
    {"other head", HeadCase{kCrossEntropy, 4096, 7168, 129280, kBF16}, {"QuACK", 11030}},
    {"any rows", HeadCase{kCrossEntropy, 3, 5120, 151936, kBF16}},
    {"any rows", HeadCase{kCrossEntropy, 100, 5120, 151936, kBF16}},
    {"any rows", HeadCase{kCrossEntropy, 200, 5120, 151936, kBF16}},
    {"any rows", HeadCase{kCrossEntropy, 300, 5120, 151936, kBF16}},
    {"any rows", HeadCase{kCrossEntropy, 520, 5120, 151936, kBF16}},
    {"any rows", HeadCase{kCrossEntropy, 777, 5120, 151936, kBF16}, {"torch.compile", 1740}},
    {"any rows", HeadCase{kCrossEntropy, 1100, 5120, 151936, kBF16}},
    {"any rows", HeadCase{kCrossEntropy, 2048, 5120, 151936, kBF16}},
    {"any rows, odd vocabulary", HeadCase{kCrossEntropy, 200, 2048, 50257, kBF16}},
    {"any rows, odd vocabulary", HeadCase{kCrossEntropy, 777, 4096, 128255, kBF16}},
    {"any rows, forward and backward", HeadCase{kTraining, 2048, 5120, 151936, kBF16}},
    {"any rows, forward and backward", HeadCase{kTraining, 1100, 4096, 128256, kBF16}},
    {"any rows, forward and backward", HeadCase{kTraining, 4096, 2048, 128256, kBF16}},
    {"any rows, decode",
     HeadCase{kSample, 1, 5120, 151936, kBF16},
     {"torch + FlashInfer, token only", 400}},
    {"any rows, decode", HeadCase{kSample, 17, 5120, 151936, kBF16}},
    {"any rows, decode", HeadCase{kSample, 100, 5120, 151936, kBF16}},
    {"any rows, decode", HeadCase{kSample, 200, 5120, 151936, kBF16}},
    {"any rows, decode", HeadCase{kSample, 300, 5120, 151936, kBF16}},
    {"any rows, decode", HeadCase{kSample, 17, 2048, 50257, kBF16}},
};

// Within 1.5 times the product's time, or 1.4 times.
constexpr Anchor kNearProduct = Share(1 / 1.5);
constexpr Anchor kSmallHidden = Share(1 / 1.4);
constexpr Entry kCpuHead[] = {
    {"scoring", HeadCase{kCrossEntropy, 256, 4096, 32000, kF32}, kNearProduct},
    {"scoring, bf16", HeadCase{kCrossEntropy, 256, 4096, 32000, kBF16}, kNearProduct},
    {"scoring, f16", HeadCase{kCrossEntropy, 256, 4096, 32000, kF16}, kNearProduct},
    {"large batch, bf16", HeadCase{kCrossEntropy, 1024, 2048, 32000, kBF16}, kNearProduct},
    {"small model", HeadCase{kCrossEntropy, 1, 512, 50257, kF32}},
    {"small model", HeadCase{kCrossEntropy, 16, 512, 50257, kF32}},
    {"small model", HeadCase{kCrossEntropy, 64, 512, 50257, kF32}, kSmallHidden},
    {"small model", HeadCase{kCrossEntropy, 256, 512, 50257, kF32}, kSmallHidden},
    {"small model", HeadCase{kCrossEntropy, 777, 512, 50257, kF32}, kSmallHidden},
    {"small model", HeadCase{kCrossEntropy, 2048, 512, 32000, kF32}, kSmallHidden},
    {"small model, bf16", HeadCase{kCrossEntropy, 1, 512, 50257, kBF16}},
    {"small model, bf16", HeadCase{kCrossEntropy, 64, 512, 50257, kBF16}, kSmallHidden},
    {"small model, bf16", HeadCase{kCrossEntropy, 777, 512, 50257, kBF16}, kSmallHidden},
    {"small model, large vocabulary", HeadCase{kCrossEntropy, 64, 512, 128256, kF32}, kSmallHidden},
    {"any rows", HeadCase{kCrossEntropy, 777, 2048, 50257, kF32}, kNearProduct},
    {"any rows", HeadCase{kCrossEntropy, 16, 2048, 128256, kBF16}, kNearProduct},
    {"any rows", HeadCase{kCrossEntropy, 100, 4096, 50257, kBF16}, kNearProduct},
    {"any hidden size", HeadCase{kCrossEntropy, 256, 768, 50257, kF32}, kNearProduct},
    {"any hidden size", HeadCase{kCrossEntropy, 256, 1100, 32000, kF32}, kNearProduct},
    {"short vocabulary", HeadCase{kCrossEntropy, 2048, 512, 1000, kF32}},
    {"decode, bf16", HeadCase{kCrossEntropy, 64, 4096, 32000, kBF16}, kNearProduct},
    {"one row", HeadCase{kCrossEntropy, 1, 4096, 32000, kF32}, kNearProduct},
    {"one row, bf16", HeadCase{kCrossEntropy, 1, 4096, 32000, kBF16}, kNearProduct},
    {"training", HeadCase{kTraining, 256, 2048, 32000, kF32}},
    {"training, bf16", HeadCase{kTraining, 256, 2048, 32000, kBF16}},
};

// ---- divergence --------------------------------------------------------------------------------

constexpr Entry kDivergenceEntries[] = {
    {"a student beside its teacher", DivergenceCase{512, 131072, kF32}},
    {"a student beside its teacher, bf16", DivergenceCase{512, 131072, kBF16}},
    {"one row, bf16", DivergenceCase{1, 131072, kBF16}},
};
constexpr HeadCase StudentOf(int64_t rows, int64_t hidden, int64_t vocab, DType dtype,
                             DivergenceLoss loss = DivergenceLoss::kReverseKl) {
  return {kDivergenceTraining, rows, hidden, vocab, dtype, /*ignored=*/0, loss};
}
constexpr Entry kCudaDivergence[] = {
    {"two heads of a model", HeadCase{kDivergence, 4096, 4096, 128256, kBF16}, Share(0.95)},
    {"two heads of a model, f16", HeadCase{kDivergence, 4096, 4096, 128256, kF16}},
    {"two heads of a model, more rows", HeadCase{kDivergence, 8192, 4096, 128256, kBF16}},
    {"two heads of a small model", HeadCase{kDivergence, 4096, 2048, 128256, kBF16}},
    {"two heads of a model, 1024 rows", HeadCase{kDivergence, 1024, 4096, 128256, kBF16}},
    {"two heads of a model, 300 rows", HeadCase{kDivergence, 300, 4096, 128256, kBF16}},
    {"two heads of a model, 256 rows", HeadCase{kDivergence, 256, 4096, 128256, kBF16}},
    {"two heads of a model, few rows", HeadCase{kDivergence, 64, 4096, 128256, kBF16}},
    {"two heads of a model, one row", HeadCase{kDivergence, 1, 4096, 128256, kBF16}},
    {"a student's gradients", StudentOf(4096, 4096, 128256, kBF16)},
    {"a student's gradients, jensen_shannon",
     StudentOf(4096, 4096, 128256, kBF16, DivergenceLoss::kJensenShannon)},
    {"a student's gradients, f16", StudentOf(4096, 4096, 128256, kF16)},
    {"a student's gradients, f32", StudentOf(512, 2048, 32000, kF32)},
};
constexpr Entry kCpuDivergence[] = {
    {"two small heads", HeadCase{kDivergence, 256, 512, 32000, kF32}},
    {"a student's gradients", StudentOf(256, 512, 32000, kF32)},
    {"a student's gradients, jensen_shannon",
     StudentOf(256, 512, 32000, kF32, DivergenceLoss::kJensenShannon)},
};

}  // namespace

std::vector<absl::Span<const Entry>> CpuEntries() {
  return {kCpuTopK,      kSampleEntries,   kSampleMoreEntries, kVerifyEntries,     kCpuSample,
          kCpuAttention, kCpuCrossEntropy, kCpuHead,           kDivergenceEntries, kCpuDivergence};
}

std::vector<absl::Span<const Entry>> CudaEntries() {
  return {kCudaTopK,          kSampleEntries,    kSampleMoreEntries,        kVerifyEntries,
          kCudaAttention,     kCudaCrossEntropy, kCudaCrossEntropyTraining, kCudaHead,
          kDivergenceEntries, kCudaDivergence};
}

}  // namespace logitd::bench
