// kernel_bench: every op as a share of its floor, the floor taken from the device's own ceilings in
// the same run.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <iostream>
#include <nlohmann/json.hpp>

#include "absl/strings/str_format.h"
#include "bench/kernels/device.h"

namespace logitd::bench {
namespace {

// What a peer takes for the same work on an H200, and what we set out to reach there
// (microseconds).
struct Anchor {
  const char* peer = nullptr;
  double peer_us = 0;
  double goal_us = 0;
  double goal_share = 0;  // of the read floor; of the product where there is a head
};

struct Entry {
  const char* name;  // why it is there
  TopKCase shape;
  Anchor h200;
};

constexpr TopKCase Packed(int64_t rows, int64_t vocab, DType dtype, int32_t k) {
  return {rows, vocab, dtype, k, vocab};
}

const Entry kCuda[] = {
    {"classic: GPT-2 vocabulary, rows packed so that most are misaligned",
     Packed(8192, 50257, DType::kF32, 10),
     {"torch softmax+topk", 6191, 420, 0.90}},
    {"classic, rows padded to 16 bytes as the server lays them",
     {8192, 50257, DType::kF32, 10, 50260},
     {"torch softmax+topk", 6191, 420, 0.90}},
    {"decode, large batch",
     Packed(512, 131072, DType::kF32, 64),
     {"FlashInfer top-k + softmax", 430, 70, 0.85}},
    {"decode, large batch, bf16",
     Packed(512, 131072, DType::kBF16, 64),
     {"FlashInfer top-k + softmax", 476, 38, 0.80}},
    {"decode, large batch, f16", Packed(512, 131072, DType::kF16, 64), {}},
    {"large K",
     Packed(512, 131072, DType::kF32, 1024),
     {"CUB batched top-k (no softmax, unsorted)", 332, 90, 0.65}},
    {"scoring, small K",
     Packed(2048, 131072, DType::kF32, 10),
     {"FlashInfer top-k + softmax", 1602, 275, 0}},
    {"decode, medium batch",
     Packed(64, 131072, DType::kF32, 64),
     {"CUB batched top-k (no softmax, unsorted)", 49, 14, 0}},
    {"decode, medium batch, bf16", Packed(64, 131072, DType::kBF16, 64), {}},
    {"decode, one row",
     Packed(1, 131072, DType::kF32, 64),
     {"CUB batched top-k (no softmax, unsorted)", 21, 8, 0}},
    {"decode, one row, bf16", Packed(1, 131072, DType::kBF16, 64), {}},
    {"classifier head: many short rows",
     Packed(65536, 1000, DType::kF32, 10),
     {"torch softmax+topk", 2338, 70, 0}},
    {"short rows, packed off alignment", Packed(65536, 1001, DType::kF32, 10), {}},
    {"rows of 4096", Packed(16384, 4096, DType::kF32, 50), {}},
    {"between one wave and two", Packed(300, 131072, DType::kF32, 64), {}},
    {"longest rows", Packed(64, 1 << 20, DType::kF32, 64), {}},
    {"K above the pool: sorted", Packed(64, 131072, DType::kF32, 131072), {}},
};

const Entry kCpu[] = {
    {"decode, medium batch", Packed(64, 131072, DType::kF32, 64), {nullptr, 0, 0, 0.70}},
    {"decode, medium batch, bf16", Packed(64, 131072, DType::kBF16, 64), {}},
    {"decode, medium batch, f16", Packed(64, 131072, DType::kF16, 64), {}},
    {"decode, one row", Packed(1, 131072, DType::kF32, 64), {}},
    {"GPT-2 vocabulary", Packed(512, 50257, DType::kF32, 10), {}},
    {"large K", Packed(64, 131072, DType::kF32, 1024), {}},
    {"short rows", Packed(32768, 1000, DType::kF32, 10), {}},
};

struct SampleEntry {
  const char* name;  // why it is there
  SampleCase shape;
};

constexpr SampleRow Asking(float temperature, int32_t top_k, float top_p, int32_t top_logprobs) {
  return {.active = 1,
          .temperature = temperature,
          .top_k = top_k,
          .top_p = top_p,
          .repetition = 1.1f,  // of what history there is
          .top_logprobs = top_logprobs};
}

// What frontends send, alone and together.
constexpr SampleEntry kSample[] = {
    {"top-k 50, top-p 0.9", {64, 131072, DType::kF32, Asking(1, 50, 0.9f, 0), {}}},
    {"top-k 50, top-p 0.9, bf16", {64, 131072, DType::kBF16, Asking(1, 50, 0.9f, 0), {}}},
    {"with temperature, 20 top log-probs",
     {64, 131072, DType::kF32, Asking(0.8f, 64, 0.9f, 20), {}}},
    {"with history 4096, mask",
     {64, 131072, DType::kF32, Asking(0.8f, 64, 0.9f, 20), {.history = 4096, .mask = true}}},
    {"greedy", {64, 131072, DType::kF32, Asking(0, 0, 1, 0), {}}},
    {"unfiltered", {64, 131072, DType::kF32, Asking(1, 0, 1, 0), {}}},
    {"unfiltered, temperature 0.8", {64, 131072, DType::kF32, Asking(0.8f, 0, 1, 0), {}}},
    {"top-p 0.9 alone, flat row", {64, 131072, DType::kF32, Asking(1, 0, 0.9f, 0), {}}},
    {"top-k 50, top-p 0.9, one row", {1, 131072, DType::kF32, Asking(1, 50, 0.9f, 0), {}}},
    {"with temperature, 20 top log-probs",
     {1, 131072, DType::kF32, Asking(0.8f, 64, 0.9f, 20), {}}},
    {"with temperature, 20 top log-probs",
     {512, 131072, DType::kF32, Asking(0.8f, 64, 0.9f, 20), {}}},
    {"with history 4096, mask",
     {512, 131072, DType::kF32, Asking(0.8f, 64, 0.9f, 20), {.history = 4096, .mask = true}}},
    {"unfiltered", {512, 131072, DType::kF32, Asking(1, 0, 1, 0), {}}},
    {"top-p 0.9 alone, flat row", {512, 131072, DType::kF32, Asking(1, 0, 0.9f, 0), {}}},
};

struct AttentionEntry {
  const char* name;  // why it is there
  AttentionCase shape;
  Anchor h200 = {};
};

constexpr AttentionWindow kCausal = {.left = AttentionWindow::kUnbounded, .right = 0};

constexpr AttentionCase Attention(int64_t heads, int64_t length, DType dtype,
                                  AttentionWindow window = {}, MaskKind mask = MaskKind::kNone) {
  return {1, heads, length, length, dtype, window, mask};
}

constexpr AttentionCase Backward(int64_t heads, int64_t length, DType dtype,
                                 AttentionWindow window = {}) {
  return {1, heads, length, length, dtype, window, MaskKind::kNone, /*backward=*/true};
}

const AttentionEntry kCudaAttention[] = {
    // What peers were measured at.
    {"causal, decode batch", Attention(32, 128, DType::kBF16, kCausal), {nullptr, 0, 6, 0}},
    {"causal", Attention(32, 512, DType::kBF16, kCausal), {"torch.compile", 18, 8, 0}},
    {"causal", Attention(32, 1024, DType::kBF16, kCausal), {"torch.compile", 44, 27, 0}},
    {"causal", Attention(32, 2048, DType::kBF16, kCausal), {"torch.compile", 365, 105, 0}},
    {"causal", Attention(32, 4096, DType::kBF16, kCausal), {"torch.compile", 1436, 415, 0.90}},
    {"causal", Attention(8, 8192, DType::kBF16, kCausal), {"eager", 33638, 420, 0.90}},
    {"causal", Attention(8, 16384, DType::kBF16, kCausal), {"Apex, Megatron", 21582, 1700, 0.90}},
    // A gigabyte and more of each form.
    {"causal", Attention(1024, 512, DType::kBF16, kCausal), {nullptr, 0, 0, 0.80}},
    {"causal", Attention(256, 1024, DType::kBF16, kCausal), {nullptr, 0, 0, 0.90}},
    {"causal", Attention(64, 2048, DType::kBF16, kCausal), {nullptr, 0, 0, 0.90}},
    {"causal", Attention(2, 32768, DType::kBF16, kCausal), {}},
    {"causal", Attention(1, 65536, DType::kBF16, kCausal), {nullptr, 0, 0, 0.80}},
    {"window of 256", Attention(32, 4096, DType::kBF16, {255, 0}), {}},
    {"unmasked", Attention(65536, 64, DType::kBF16), {nullptr, 0, 0, 0.92}},
    {"unmasked", Attention(16384, 128, DType::kBF16), {nullptr, 0, 0, 0.92}},
    {"unmasked", Attention(1024, 512, DType::kBF16), {nullptr, 0, 0, 0.92}},
    {"unmasked", Attention(256, 1024, DType::kBF16), {nullptr, 0, 0, 0.92}},
    {"unmasked", Attention(32, 4096, DType::kBF16), {nullptr, 0, 0, 0.92}},
    {"unmasked", Attention(4, 16384, DType::kBF16), {nullptr, 0, 0, 0.92}},
    {"unmasked, long rows", {1, 1, 16384, 65536, DType::kBF16}, {nullptr, 0, 0, 0.92}},
    {"unmasked, long rows", {1, 1, 8192, 131072, DType::kBF16}, {}},
    {"unmasked, longest rows", {1, 1, 1024, 1 << 20, DType::kBF16}, {}},
    {"unmasked, rows off alignment", Attention(256, 1023, DType::kBF16), {}},
    {"causal, rows off alignment", Attention(16, 4097, DType::kBF16, kCausal), {}},
    {"bool mask", Attention(256, 1024, DType::kBF16, {}, MaskKind::kBool), {nullptr, 0, 0, 0.85}},
    {"bool mask", Attention(32, 4096, DType::kBF16, {}, MaskKind::kBool), {nullptr, 0, 0, 0.85}},
    {"bool mask", Attention(4, 16384, DType::kBF16, {}, MaskKind::kBool), {nullptr, 0, 0, 0.85}},
    {"additive mask", Attention(32, 4096, DType::kBF16, {}, MaskKind::kAdditive), {}},
    {"causal, f16", Attention(32, 4096, DType::kF16, kCausal), {nullptr, 0, 0, 0.90}},
    {"causal, f32", Attention(512, 512, DType::kF32, kCausal), {nullptr, 0, 0, 0.80}},
    {"causal, f32", Attention(128, 1024, DType::kF32, kCausal), {nullptr, 0, 0, 0.90}},
    {"causal, f32", Attention(16, 4096, DType::kF32, kCausal), {nullptr, 0, 0, 0.90}},
    {"causal, f32", Attention(2, 16384, DType::kF32, kCausal), {nullptr, 0, 0, 0.90}},
    {"unmasked, f32", Attention(16, 4096, DType::kF32), {nullptr, 0, 0, 0.92}},
    {"bool mask, f32",
     Attention(16, 4096, DType::kF32, {}, MaskKind::kBool),
     {nullptr, 0, 0, 0.85}},
    {"backward", Backward(65536, 64, DType::kBF16), {"Apex", 372, 0, 0.88}},
    {"backward", Backward(256, 1024, DType::kBF16), {nullptr, 0, 0, 0.88}},
    {"backward", Backward(16, 4096, DType::kBF16), {"Apex", 766, 0, 0.88}},
    {"backward", Backward(8, 16384, DType::kBF16), {"Apex", 22267, 0, 0.88}},
    {"backward, causal", Backward(256, 1024, DType::kBF16, kCausal), {nullptr, 0, 0, 0.88}},
    {"backward, causal", Backward(16, 4096, DType::kBF16, kCausal), {nullptr, 0, 0, 0.88}},
    {"backward, causal", Backward(4, 16384, DType::kBF16, kCausal), {nullptr, 0, 0, 0.88}},
    {"backward, f32", Backward(16, 4096, DType::kF32), {nullptr, 0, 0, 0.88}},
    {"backward, rows off alignment", Backward(256, 1023, DType::kBF16), {}},
};

const AttentionEntry kCpuAttention[] = {
    {"unmasked", {1, 16, 1024, 1024, DType::kF32, {}}},
    {"unmasked, bf16", {1, 16, 1024, 1024, DType::kBF16, {}}},
    {"unmasked, f16", {1, 16, 1024, 1024, DType::kF16, {}}},
    {"causal", {1, 16, 1024, 1024, DType::kF32, kCausal}},
    {"causal, bf16", {1, 16, 1024, 1024, DType::kBF16, kCausal}},
    {"window of 256", {1, 16, 1024, 1024, DType::kBF16, {255, 0}}},
    {"bool mask", {1, 16, 1024, 1024, DType::kBF16, {}, MaskKind::kBool}},
    {"additive mask", {1, 16, 1024, 1024, DType::kBF16, {}, MaskKind::kAdditive}},
    {"short rows", {64, 16, 64, 64, DType::kBF16, kCausal}},
    {"odd rows", {1, 16, 1001, 1001, DType::kBF16, kCausal}},
    {"long rows", {1, 1, 128, 131072, DType::kBF16, {}}},
    {"longest rows, f32", {1, 1, 16, 1 << 20, DType::kF32, {}}},
    {"backward, causal",
     {1, 16, 1024, 1024, DType::kF32, kCausal, MaskKind::kNone, /*backward=*/true}},
    {"backward, causal, bf16",
     {1, 16, 1024, 1024, DType::kBF16, kCausal, MaskKind::kNone, /*backward=*/true}},
    {"backward, long rows, bf16",
     {1, 1, 128, 131072, DType::kBF16, {}, MaskKind::kNone, /*backward=*/true}},
};

struct LossEntry {
  const char* name;  // why it is there
  LossCase shape;
  Anchor h200 = {};
};

constexpr CrossEntropyRow Losing(int32_t want = 0, int32_t top_logprobs = 0,
                                 float label_smoothing = 0, float softcap = 0) {
  return {.active = 1,
          .temperature = 1,
          .softcap = softcap,
          .label_smoothing = label_smoothing,
          .top_logprobs = top_logprobs,
          .want = want};
}

const LossEntry kCudaLoss[] = {
    // What peers were measured at.
    {"training", {8192, 32000, DType::kBF16, Losing()}, {"torch.compile", 367, 0, 0.91}},
    {"training", {8192, 128256, DType::kBF16, Losing()}, {"torch.compile", 1324, 0, 0.91}},
    {"training", {4096, 256000, DType::kBF16, Losing()}, {"torch.compile", 1240, 0, 0.91}},
    {"backward", {8192, 32000, DType::kBF16, Losing(), true}, {nullptr, 0, 0, 0.91}},
    {"backward", {8192, 128256, DType::kBF16, Losing(), true}, {nullptr, 0, 0, 0.91}},
    {"backward", {4096, 256000, DType::kBF16, Losing(), true}, {nullptr, 0, 0, 0.91}},
    {"f32", {4096, 128256, DType::kF32, Losing()}, {nullptr, 0, 0, 0.91}},
    {"f16", {8192, 128256, DType::kF16, Losing()}, {nullptr, 0, 0, 0.91}},
    {"rows off alignment", {8192, 50257, DType::kBF16, Losing()}, {}},
    {"backward, rows off alignment", {8192, 50257, DType::kBF16, Losing(), true}, {}},
    {"rank", {8192, 128256, DType::kBF16, Losing(kWantRank)}, {}},
    {"rank, entropy, 5 tops",
     {8192, 128256, DType::kBF16, Losing(kWantRank | kWantEntropy, 5)},
     {}},
    {"label smoothing", {8192, 128256, DType::kBF16, Losing(0, 0, 0.1f)}, {}},
    {"softcap", {8192, 128256, DType::kBF16, Losing(0, 0, 0, 30)}, {}},
    {"backward, softcap", {8192, 128256, DType::kBF16, Losing(0, 0, 0, 30), true}, {}},
    {"scoring, few rows", {64, 128256, DType::kBF16, Losing()}, {}},
    {"scoring, one row", {1, 128256, DType::kBF16, Losing()}, {}},
    {"short rows", {65536, 1000, DType::kBF16, Losing()}, {}},
};

const LossEntry kCpuLoss[] = {
    {"loss alone", {64, 131072, DType::kF32, Losing(0, 0, 0, 0)}},
    {"loss alone, bf16", {64, 131072, DType::kBF16, Losing(0, 0, 0, 0)}},
    {"with rank, entropy, 20 top log-probs",
     {64, 131072, DType::kF32, Losing(kWantRank | kWantEntropy, 20, 0, 0)}},
    {"label smoothing", {64, 131072, DType::kF32, Losing(0, 0, 0.1f, 0)}},
    {"softcap", {64, 131072, DType::kF32, Losing(0, 0, 0, 30)}},
    {"softcap, rank", {64, 131072, DType::kBF16, Losing(kWantRank, 0, 0, 30)}},
    {"loss alone, one row", {1, 131072, DType::kF32, Losing(0, 0, 0, 0)}},
    {"short rows", {32768, 1000, DType::kF32, Losing(0, 0, 0, 0)}},
    {"backward", {64, 131072, DType::kF32, Losing(0, 0, 0, 0), /*backward=*/true}},
    {"backward, bf16", {64, 131072, DType::kBF16, Losing(0, 0, 0, 0), /*backward=*/true}},
    {"backward, softcap", {64, 131072, DType::kF32, Losing(0, 0, 0, 30), /*backward=*/true}},
};

struct HeadEntry {
  const char* name;  // why it is there
  HeadCase shape;
  Anchor h200 = {};
};

const HeadEntry kCudaHead[] = {
    // What peers were measured at; goal shares are of the product.
    {"training",
     {HeadOp::kLoss, 4096, 4096, 128256, DType::kBF16},
     {"Liger native", 6750, 6500, 0.90}},
    {"training",
     {HeadOp::kLoss, 16384, 4096, 128256, DType::kBF16},
     {"torch.compile", 28300, 26400, 0.90}},
    {"training",
     {HeadOp::kLoss, 8192, 2048, 256000, DType::kBF16},
     {"Liger native", 13900, 13300, 0.90}},
    {"scoring, few rows",
     {HeadOp::kLoss, 256, 4096, 128256, DType::kBF16},
     {"torch.compile", 498, 450, 0}},
    {"scoring, few rows", {HeadOp::kLoss, 128, 4096, 128256, DType::kBF16}, {}},
    {"scoring, few rows", {HeadOp::kLoss, 64, 4096, 128256, DType::kBF16}, {}},
    {"scoring, one row", {HeadOp::kLoss, 1, 4096, 128256, DType::kBF16}, {}},
    {"forward and backward",
     {HeadOp::kLossBackward, 4096, 4096, 128256, DType::kBF16},
     {"torch.compile", 20000, 20000, 0}},
    {"forward, then backward: f16", {HeadOp::kLossBackward, 4096, 4096, 128256, DType::kF16}, {}},
    {"decode", {HeadOp::kSample, 1, 4096, 128256, DType::kBF16}, {nullptr, 0, 280, 0}},
    {"decode", {HeadOp::kSample, 8, 4096, 128256, DType::kBF16}, {nullptr, 0, 280, 0}},
    {"decode", {HeadOp::kSample, 32, 4096, 128256, DType::kBF16}, {nullptr, 0, 280, 0}},
    {"decode", {HeadOp::kSample, 64, 4096, 128256, DType::kBF16}, {nullptr, 0, 280, 0}},
    {"decode", {HeadOp::kSample, 128, 4096, 128256, DType::kBF16}, {}},
    {"decode", {HeadOp::kSample, 256, 4096, 128256, DType::kBF16}, {}},
    {"decode, f16", {HeadOp::kSample, 64, 4096, 128256, DType::kF16}, {}},
    {"decode, f32", {HeadOp::kSample, 64, 4096, 128256, DType::kF32}, {}},
    {"top 20", {HeadOp::kTopK, 64, 4096, 128256, DType::kBF16}, {}},
};

// Within 1.5 times the product's time.
constexpr Anchor kNearProduct = {nullptr, 0, 0, 1 / 1.5};
const HeadEntry kCpuHead[] = {
    {"scoring", {HeadOp::kLoss, 256, 4096, 32000, DType::kF32}, kNearProduct},
    {"scoring, bf16", {HeadOp::kLoss, 256, 4096, 32000, DType::kBF16}, kNearProduct},
    {"scoring, f16", {HeadOp::kLoss, 256, 4096, 32000, DType::kF16}, kNearProduct},
    {"large batch, bf16", {HeadOp::kLoss, 1024, 2048, 32000, DType::kBF16}, kNearProduct},
    {"small model", {HeadOp::kLoss, 256, 512, 50257, DType::kF32}, kNearProduct},
    {"decode, bf16", {HeadOp::kLoss, 64, 4096, 32000, DType::kBF16}, kNearProduct},
    {"one row", {HeadOp::kLoss, 1, 4096, 32000, DType::kF32}, kNearProduct},
    {"one row, bf16", {HeadOp::kLoss, 1, 4096, 32000, DType::kBF16}, kNearProduct},
    {"training", {HeadOp::kLossBackward, 256, 2048, 32000, DType::kF32}},
    {"training, bf16", {HeadOp::kLossBackward, 256, 2048, 32000, DType::kBF16}},
};

std::string_view Name(HeadOp op) {
  switch (op) {
    case HeadOp::kTopK:
      return "linear_topk";
    case HeadOp::kSample:
      return "linear_sample";
    case HeadOp::kLoss:
      return "linear_cross_entropy";
    case HeadOp::kLossBackward:
      return "linear_cross_entropy forward and backward";
  }
  return "unknown";
}

std::string Shape(const LossEntry& entry) {
  return absl::StrFormat("loss %dx%d %s %s", entry.shape.rows, entry.shape.vocab,
                         Name(entry.shape.dtype), entry.name);
}

std::string Shape(const HeadEntry& entry) {
  const HeadCase& c = entry.shape;
  return absl::StrFormat("%s %dx%dx%d %s %s", Name(c.op), c.rows, c.hidden, c.vocab, Name(c.dtype),
                         entry.name);
}

std::string_view Name(MaskKind kind) {
  return kind == MaskKind::kNone ? "none" : kind == MaskKind::kBool ? "bool" : "additive";
}

std::string Shape(const AttentionEntry& entry) {
  const AttentionCase& c = entry.shape;
  return absl::StrFormat("attention [%d,%d,%d,%d] %s %s", c.batch, c.heads, c.queries, c.keys,
                         Name(c.dtype), entry.name);
}

std::string Shape(const SampleEntry& entry) {
  return absl::StrFormat("%dx%d %s %s", entry.shape.rows, entry.shape.vocab,
                         Name(entry.shape.dtype), entry.name);
}

// Of the table; none is 0.
std::string Number(double value) {
  return value == 0 ? std::string("-") : absl::StrFormat("%.0f", value);
}

std::string Shape(const TopKCase& c) {
  return absl::StrFormat("%dx%d %s K=%d%s", c.rows, c.vocab, Name(c.dtype), c.k,
                         c.row_stride == c.vocab ? "" : " padded");
}

}  // namespace

double AttentionCase::FloorBytes() const {
  double seen = 0;
  for (int64_t i = 0; i < queries; ++i) {
    const int64_t aligned = i + keys - queries;
    const bool all_left = window.left == AttentionWindow::kUnbounded;
    const bool all_right = window.right == AttentionWindow::kUnbounded;
    const int64_t begin = all_left ? 0 : std::max<int64_t>(0, aligned - window.left);
    const int64_t end = all_right ? keys : std::min(keys, aligned + window.right + 1);
    seen += static_cast<double>(std::max<int64_t>(0, end - begin));
  }
  const double size = static_cast<double>(SizeOf(dtype));
  const double tensors = static_cast<double>(batch * heads);
  const double mask_size = mask == MaskKind::kNone ? 0 : mask == MaskKind::kBool ? 1 : size;
  const double written = static_cast<double>(queries) * static_cast<double>(keys);
  return tensors * size * ((backward ? 2 : 1) * seen + written) +
         static_cast<double>(batch) * mask_size * seen;
}

namespace {

int Main(int argc, char** argv) {
  CLI::App app(
      "Times every op on one device and prints it as a share of its floor, at rates measured in "
      "the "
      "same run: one read of the logits at the rate of a plain read; for attention and gradients, "
      "the bytes that must be read and written at the rate of a plain copy; for heads, the bare "
      "product.");
  std::string backend = "auto", json_path, only, commit;
  app.add_option("--backend", backend, "auto, cpu or cuda")
      ->check(CLI::IsMember({"auto", "cpu", "cuda"}));
  app.add_option("--json", json_path, "also write the results there");
  app.add_option("--only", only, "entries whose shape contains this text, e.g. K=64");
  app.add_option("--commit", commit, "commit the figures belong to, for the JSON");
  CLI11_PARSE(app, argc, argv);

  absl::StatusOr<std::unique_ptr<Device>> device =
      absl::UnavailableError("this build has the CPU backend alone");
#if LOGITD_WITH_CUDA
  if (backend != "cpu") device = CreateCudaDevice();
#endif
  const bool cuda = device.ok();
  if (!cuda && backend != "cuda") device = CreateCpuDevice();
  if (!device.ok()) {
    std::cerr << "kernel_bench: " << device.status().message() << "\n";
    return 1;
  }
  const auto read = (*device)->ReadCeiling();
  const auto copy = (*device)->CopyCeiling();
  if (!read.ok() || !copy.ok()) {
    std::cerr << "kernel_bench: " << (read.ok() ? copy.status() : read.status()) << "\n";
    return 1;
  }
  absl::PrintF("%s: read %.2f GB/s, copy %.2f GB/s\n\n", (*device)->name(), *read / 1e9,
               *copy / 1e9);
  absl::PrintF("%-36s %10s %10s %9s %7s %8s %9s  %s\n", "softmax_topk", "us", "floor us", "GB/s",
               "share", "goal us", "peer us", "peer (on an H200)");
  nlohmann::json out = {{"device", (*device)->name()},
                        {"commit", commit},
                        {"read_bytes_per_s", *read},
                        {"copy_bytes_per_s", *copy},
                        {"entries", nlohmann::json::array()}};
  int failed = 0;
  const absl::Span<const Entry> entries =
      cuda ? absl::MakeConstSpan(kCuda) : absl::MakeConstSpan(kCpu);
  for (const Entry& entry : entries) {
    const TopKCase& c = entry.shape;
    if (!only.empty() && Shape(c).find(only) == std::string::npos) continue;
    const auto us = (*device)->TimeTopK(c);
    if (!us.ok()) {
      absl::PrintF("%-36s %s\n", Shape(c), us.status().ToString());
      ++failed;
      continue;
    }
    const double bytes = static_cast<double>(c.rows) * c.vocab * SizeOf(c.dtype);
    const double floor_us = bytes / *read * 1e6;
    absl::PrintF("%-36s %10.2f %10.2f %9.1f %6.1f%% %8s %9s  %s\n", Shape(c), *us, floor_us,
                 bytes / *us / 1e3, 100 * floor_us / *us, Number(entry.h200.goal_us),
                 Number(entry.h200.peer_us), entry.h200.peer == nullptr ? "" : entry.h200.peer);
    out["entries"].push_back({{"op", "softmax_topk"},
                              {"why", entry.name},
                              {"rows", c.rows},
                              {"vocab", c.vocab},
                              {"dtype", std::string(Name(c.dtype))},
                              {"k", c.k},
                              {"row_stride", c.row_stride},
                              {"us", *us},
                              {"floor_us", floor_us},
                              {"share_of_floor", floor_us / *us},
                              {"goal_us", entry.h200.goal_us},
                              {"goal_share", entry.h200.goal_share},
                              {"peer", entry.h200.peer == nullptr ? "" : entry.h200.peer},
                              {"peer_us_h200", entry.h200.peer_us}});
  }
  absl::PrintF("\n%-60s %10s %10s %9s %7s\n", "sample", "us", "floor us", "GB/s", "share");
  for (const SampleEntry& entry : kSample) {
    const SampleCase& c = entry.shape;
    if (!only.empty() && Shape(entry).find(only) == std::string::npos) continue;
    const auto us = (*device)->TimeSample(c);
    if (!us.ok()) {
      absl::PrintF("%-60s %s\n", Shape(entry), us.status().ToString());
      ++failed;
      continue;
    }
    const double bytes = static_cast<double>(c.rows) * c.vocab * SizeOf(c.dtype);
    const double floor_us = bytes / *read * 1e6;
    absl::PrintF("%-60s %10.2f %10.2f %9.1f %6.1f%%\n", Shape(entry), *us, floor_us,
                 bytes / *us / 1e3, 100 * floor_us / *us);
    out["entries"].push_back({{"op", "sample"},
                              {"why", entry.name},
                              {"rows", c.rows},
                              {"vocab", c.vocab},
                              {"dtype", std::string(Name(c.dtype))},
                              {"us", *us},
                              {"floor_us", floor_us},
                              {"share_of_floor", floor_us / *us}});
  }
  absl::PrintF("\n%-60s %10s %10s %9s %7s %8s %9s  %s\n", "attention_softmax", "us", "floor us",
               "GB/s", "share", "goal us", "peer us", "peer (on an H200)");
  for (const AttentionEntry& entry :
       cuda ? absl::MakeConstSpan(kCudaAttention) : absl::MakeConstSpan(kCpuAttention)) {
    const AttentionCase& c = entry.shape;
    if (!only.empty() && Shape(entry).find(only) == std::string::npos) continue;
    const auto us = (*device)->TimeAttention(c);
    if (!us.ok()) {
      absl::PrintF("%-60s %s\n", Shape(entry), us.status().ToString());
      ++failed;
      continue;
    }
    const double floor_us = c.FloorBytes() / *copy * 1e6;
    absl::PrintF("%-60s %10.2f %10.2f %9.1f %6.1f%% %8s %9s  %s\n", Shape(entry), *us, floor_us,
                 c.FloorBytes() / *us / 1e3, 100 * floor_us / *us, Number(entry.h200.goal_us),
                 Number(entry.h200.peer_us), entry.h200.peer == nullptr ? "" : entry.h200.peer);
    out["entries"].push_back(
        {{"op", c.backward ? "attention_softmax_backward" : "attention_softmax"},
         {"why", entry.name},
         {"batch", c.batch},
         {"heads", c.heads},
         {"queries", c.queries},
         {"keys", c.keys},
         {"dtype", std::string(Name(c.dtype))},
         {"window", {c.window.left, c.window.right}},
         {"mask", std::string(Name(c.mask))},
         {"us", *us},
         {"floor_us", floor_us},
         {"share_of_floor", floor_us / *us},
         {"goal_us", entry.h200.goal_us},
         {"goal_share", entry.h200.goal_share},
         {"peer", entry.h200.peer == nullptr ? "" : entry.h200.peer},
         {"peer_us_h200", entry.h200.peer_us}});
  }
  absl::PrintF("\n%-60s %10s %10s %9s %7s %8s %9s  %s\n", "cross_entropy", "us", "floor us", "GB/s",
               "share", "goal us", "peer us", "peer (on an H200)");
  for (const LossEntry& entry :
       cuda ? absl::MakeConstSpan(kCudaLoss) : absl::MakeConstSpan(kCpuLoss)) {
    const LossCase& c = entry.shape;
    if (!only.empty() && Shape(entry).find(only) == std::string::npos) continue;
    const auto us = (*device)->TimeLoss(c);
    if (!us.ok()) {
      absl::PrintF("%-60s %s\n", Shape(entry), us.status().ToString());
      ++failed;
      continue;
    }
    const double bytes = c.FloorBytes();
    const double floor_us = bytes / (c.backward ? *copy : *read) * 1e6;
    absl::PrintF("%-60s %10.2f %10.2f %9.1f %6.1f%% %8s %9s  %s\n", Shape(entry), *us, floor_us,
                 bytes / *us / 1e3, 100 * floor_us / *us, Number(entry.h200.goal_us),
                 Number(entry.h200.peer_us), entry.h200.peer == nullptr ? "" : entry.h200.peer);
    out["entries"].push_back({{"op", c.backward ? "cross_entropy_backward" : "cross_entropy"},
                              {"why", entry.name},
                              {"rows", c.rows},
                              {"vocab", c.vocab},
                              {"dtype", std::string(Name(c.dtype))},
                              {"us", *us},
                              {"floor_us", floor_us},
                              {"share_of_floor", floor_us / *us},
                              {"goal_us", entry.h200.goal_us},
                              {"goal_share", entry.h200.goal_share},
                              {"peer", entry.h200.peer == nullptr ? "" : entry.h200.peer},
                              {"peer_us_h200", entry.h200.peer_us}});
  }
  // Floors: one read of the weight, and the bare product (three of them with the backward).
  absl::PrintF("\n%-72s %10s %10s %10s %7s %8s %9s  %s\n", "heads", "us", "read us", "product us",
               "product", "goal us", "peer us", "peer (on an H200)");
  for (const HeadEntry& entry :
       cuda ? absl::MakeConstSpan(kCudaHead) : absl::MakeConstSpan(kCpuHead)) {
    const HeadCase& c = entry.shape;
    if (!only.empty() && Shape(entry).find(only) == std::string::npos) continue;
    const auto us = (*device)->TimeHead(c);
    const auto product = (*device)->TimeProduct(c);
    if (!us.ok() || !product.ok()) {
      absl::PrintF("%-72s %s\n", Shape(entry),
                   (us.ok() ? product.status() : us.status()).ToString());
      ++failed;
      continue;
    }
    const double bytes = static_cast<double>(c.vocab) * c.hidden * SizeOf(c.dtype);
    const double read_us = bytes / *read * 1e6;
    const double product_us = *product * (c.op == HeadOp::kLossBackward ? 3 : 1);
    absl::PrintF("%-72s %10.2f %10.2f %10.2f %6.1f%% %8s %9s  %s\n", Shape(entry), *us, read_us,
                 product_us, 100 * product_us / *us, Number(entry.h200.goal_us),
                 Number(entry.h200.peer_us), entry.h200.peer == nullptr ? "" : entry.h200.peer);
    out["entries"].push_back({{"op", std::string(Name(c.op))},
                              {"why", entry.name},
                              {"rows", c.rows},
                              {"hidden", c.hidden},
                              {"vocab", c.vocab},
                              {"dtype", std::string(Name(c.dtype))},
                              {"us", *us},
                              {"read_us", read_us},
                              {"product_us", product_us},
                              {"share_of_product", product_us / *us},
                              {"goal_us", entry.h200.goal_us},
                              {"goal_share", entry.h200.goal_share},
                              {"peer", entry.h200.peer == nullptr ? "" : entry.h200.peer},
                              {"peer_us_h200", entry.h200.peer_us}});
  }
  if (!json_path.empty()) std::ofstream(json_path) << out.dump(1) << "\n";
  return failed == 0 ? 0 : 1;
}

}  // namespace
}  // namespace logitd::bench

int main(int argc, char** argv) { return logitd::bench::Main(argc, argv); }
