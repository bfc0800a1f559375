// Digests of every op's answers to fixed inputs, compared with a file of digests recorded before: a
// change that keeps every bit keeps every line.
//
// Inputs come from a generator of this file, so that a digest depends on nothing but the op.
#ifndef LOGITD_TESTS_KERNELS_RECORDED_ANSWERS_H_
#define LOGITD_TESTS_KERNELS_RECORDED_ANSWERS_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/strings/str_format.h"
#include "kernels/backend.h"
#include "tests/kernels/op_runner.h"
#include "tests/kernels/reference.h"

namespace logitd::testing {

// ---- Inputs

// Number n of the sequence `seed`: splitmix64 of a counter.
constexpr uint64_t RecordedBits(uint64_t seed, uint64_t n) {
  uint64_t x = (seed << 40) + (n + 1) * 0x9e3779b97f4a7c15u;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
  x = (x ^ x >> 27) * 0x94d049bb133111ebu;
  return x ^ x >> 31;
}

// The same, in [0, below).
constexpr int32_t RecordedPick(uint64_t seed, uint64_t n, int64_t below) {
  return static_cast<int32_t>((RecordedBits(seed, n) >> 32) * static_cast<uint64_t>(below) >> 32);
}

// The same, about normal: the sum of four uniform numbers, with a standard deviation of 4.6 *
// scale. Exact in fp32 where `scale` is a power of two.
constexpr float RecordedNormal(uint64_t seed, uint64_t n, float scale) {
  const uint64_t bits = RecordedBits(seed, n);
  int32_t sum = -131070;
  for (int i = 0; i < 4; ++i) sum += static_cast<int32_t>(bits >> (16 * i) & 0xffff);
  return static_cast<float>(sum) * (scale / 8192);
}

inline HostTensor RecordedZeros(DType dtype, int64_t rows, int64_t cols, int64_t stride) {
  HostTensor tensor(dtype, rows, cols, stride, 0);
  for (int64_t i = 0; i < rows * cols; ++i) tensor.Set(i / cols, i % cols, 0);
  return tensor;
}

// Numbers of a sequence, cut to what the type holds; f16 has no subnormals.
inline HostTensor RecordedTensor(DType dtype, int64_t rows, int64_t cols, int64_t stride,
                                 uint64_t seed, float scale) {
  HostTensor tensor(dtype, rows, cols, stride, 0);
  const uint32_t kept = dtype == DType::kF32 ? ~0u : dtype == DType::kF16 ? ~0x1fffu : ~0xffffu;
  for (int64_t i = 0; i < rows * cols; ++i) {
    const float x = FloatOf(BitsOf(RecordedNormal(seed, i, scale)) & kept);
    const bool flushed = dtype == DType::kF16 && std::fabs(x) < 0x1p-14f;
    tensor.Set(i / cols, i % cols, flushed ? std::copysign(0.0f, x) : x);
  }
  return tensor;
}

// Rows want from 1 to `most` tokens.
inline std::vector<SoftmaxTopKRow> RecordedTopKRows(int64_t rows, int64_t vocab, int32_t most) {
  std::vector<SoftmaxTopKRow> asks;
  int64_t entries = 0;
  for (int64_t r = 0; r < rows; ++r) {
    const auto k = static_cast<int32_t>(std::min<int64_t>(vocab, 1 + (r * 37 + most - 1) % most));
    asks.push_back(
        {.first_entry = entries, .temperature = 0.5f + 0.25f * static_cast<float>(r % 5), .k = k});
    entries += k;
  }
  return asks;
}

struct RecordedVariant {
  std::string_view name;
  bool filters, edits, reports;
};
inline constexpr RecordedVariant kRecordedVariants[] = {
    {.name = "unfiltered"},
    {.name = "filtered", .filters = true},
    {.name = "edited", .edits = true},
    {.name = "filtered and edited", .filters = true, .edits = true},
    {.name = "reports", .reports = true},
    {.name = "all", .filters = true, .edits = true, .reports = true},
};

inline void AddRecordedEdits(SampleBatch& batch, SampleRow& row, int64_t r, int64_t vocab) {
  row.repetition = 1.25f;
  row.presence = 0.5f;
  row.frequency = 0.125f;
  row.first_history = static_cast<int64_t>(batch.history.size());
  row.history_count = static_cast<int32_t>(r % 40);
  for (int32_t i = 0; i < row.history_count; ++i) {
    batch.history.push_back(RecordedPick(/*seed=*/11, r * 64 + i / 2, vocab));
  }
  row.first_bias = static_cast<int64_t>(batch.bias.size());
  row.bias_count = static_cast<int32_t>(std::min<int64_t>(vocab, r % 4));
  for (int32_t i = 0; i < row.bias_count; ++i) {
    batch.bias.push_back({.id = static_cast<int32_t>(i * (vocab / row.bias_count)),
                          .value = i == 2 ? -kInf : 1.5f * static_cast<float>(i + 1)});
  }
  if (r % 3 != 1) return;
  row.first_mask_word = static_cast<int64_t>(batch.mask_words.size());
  for (int64_t w = 0; w < MaskWords(vocab); ++w) {
    batch.mask_words.push_back(static_cast<uint32_t>(RecordedBits(/*seed=*/12, r * 8192 + w)) | 1);
  }
}

inline SampleBatch RecordedSamples(int64_t rows, int64_t vocab, const RecordedVariant& variant) {
  SampleBatch batch;
  for (int64_t r = 0; r < rows; ++r) {
    SampleRow row{.seed = 77 + static_cast<uint64_t>(r),
                  .position = static_cast<uint64_t>(r * r),
                  .first_mask_word = -1,
                  .active = 1,
                  .temperature = r % 5 == 4 ? 0.0f : 0.5f + 0.25f * static_cast<float>(r % 7),
                  .top_p = 1.0f,
                  .repetition = 1.0f,
                  .typical_p = 1.0f,
                  .logprob_mode = r % 2 == 0 ? LogprobMode::kRaw : LogprobMode::kProcessed,
                  .want_rank = true};
    if (variant.filters) {
      if (r % 4 != 1) row.top_k = static_cast<int32_t>(std::min<int64_t>(vocab, 1 + r * 31 % 600));
      if (r % 4 != 2) row.top_p = 0.3f + 0.1f * static_cast<float>(r % 7);
      if (r % 4 != 3) row.min_p = 0.01f * static_cast<float>(r % 3);
    }
    if (variant.edits) AddRecordedEdits(batch, row, r, vocab);
    if (variant.reports) {
      // Filtered rows do not report unlikely tokens of the processed logits.
      const bool likely = variant.filters && row.logprob_mode == LogprobMode::kProcessed;
      const int64_t tops = likely ? 1 : r % 3 == 2 ? 128 : 1 + r % 20;
      row.first_top_entry = batch.top_entries;
      row.top_logprobs = static_cast<int32_t>(std::min(vocab, tops));
      batch.top_entries += row.top_logprobs;
      row.first_extra = row.first_extra_entry = batch.extra_entries;
      row.extra_count = likely ? 0 : 3;
      batch.extra_entries += row.extra_count;
      for (int32_t i = 0; i < row.extra_count; ++i) {
        batch.extra_ids.push_back(RecordedPick(/*seed=*/13, r * 8 + i, vocab));
      }
    }
    batch.rows.push_back(row);
  }
  return batch;
}

// Sequences have 1, 2, 3, 4 and 5 rows, again and again. Drafts are of every kind; every second one
// is a token that `sampled` drew.
inline VerifyBatch RecordedDrafts(int64_t rows, int64_t vocab,
                                  const std::vector<int32_t>& sampled) {
  VerifyBatch batch;
  for (int64_t r = 0; r < rows;) {
    const int64_t length = std::min(rows - r, 1 + static_cast<int64_t>(batch.sequences.size()) % 5);
    batch.sequences.push_back({.first_row = r, .rows = static_cast<int32_t>(length)});
    r += length;
  }
  for (int64_t r = 0; r < rows; ++r) {
    VerifyDraft draft{
        .first_prob = static_cast<int64_t>(batch.draft_probs.size()),
        .token = r % 2 == 0 ? std::max(sampled[r], 0) : RecordedPick(/*seed=*/14, r, vocab),
        .kind = static_cast<DraftKind>(r % 3)};
    if (draft.kind == DraftKind::kList) {  // the draft and the tokens next to it
      draft.count = static_cast<int32_t>(std::min<int64_t>(vocab, 5));
      draft.first_id = static_cast<int64_t>(batch.draft_ids.size());
      const int64_t first = std::clamp<int64_t>(draft.token - 2, 0, vocab - draft.count);
      for (int64_t id = first; id < first + draft.count; ++id) {
        batch.draft_ids.push_back(static_cast<int32_t>(id));
        batch.draft_probs.push_back(id == draft.token ? 0.6f : 0.1f);
      }
    } else if (draft.kind == DraftKind::kDense) {
      for (int64_t c = 0; c < vocab; ++c) {
        batch.draft_probs.push_back(static_cast<float>(RecordedPick(/*seed=*/15, c, 1024)) /
                                    (512.0f * static_cast<float>(vocab)));
      }
    }
    batch.drafts.push_back(draft);
  }
  return batch;
}

// `options`: every parameter is used, the softcap only without a head, which has its own.
// `reports`: rank, entropy, top tokens and extra tokens are wanted.
inline LossBatch RecordedLosses(int64_t rows, int64_t vocab, bool options, bool has_head,
                                bool reports) {
  LossBatch batch;
  for (int64_t r = 0; r < rows; ++r) {
    CrossEntropyRow row{
        .active = 1, .target = RecordedPick(/*seed=*/21, r, vocab), .temperature = 1.0f};
    if (options) {
      if (r % 6 == 5) row.target = kIgnoredTarget;
      row.temperature = 0.5f + 0.25f * static_cast<float>(r % 5);
      row.softcap = has_head || r % 3 == 0 ? 0.0f : 30.0f;
      row.label_smoothing = 0.1f * static_cast<float>(r % 3);
      row.smoothing = r % 2 == 0 ? Smoothing::kTorch : Smoothing::kMegatron;
      row.z_loss = r % 4 == 0 ? 0.0f : 1e-3f;
    }
    if (reports) {
      row.want = static_cast<int32_t>(r % 4);
      row.first_top_entry = batch.top_entries;
      row.top_logprobs = static_cast<int32_t>(std::min<int64_t>(vocab, r % 3 == 2 ? 128 : r % 20));
      batch.top_entries += row.top_logprobs;
      row.first_extra = row.first_extra_entry = batch.extra_entries;
      row.extra_count = 2;
      batch.extra_entries += row.extra_count;
      for (int32_t i = 0; i < row.extra_count; ++i) {
        batch.extra_ids.push_back(RecordedPick(/*seed=*/22, r * 8 + i, vocab));
      }
    }
    batch.rows.push_back(row);
  }
  return batch;
}

inline std::vector<float> RecordedUpstream(int64_t rows) {
  std::vector<float> upstream;
  for (int64_t r = 0; r < rows; ++r) upstream.push_back(RecordedNormal(/*seed=*/23, r, 0.25f));
  return upstream;
}

struct RecordedAttention {
  std::string_view name;
  AttentionWindow window;
  MaskKind mask = MaskKind::kNone;
  bool sinks = false;
};
inline constexpr RecordedAttention kRecordedAttention[] = {
    {.name = "plain"},
    {.name = "causal", .window = {.right = 0}},
    {.name = "window and sinks", .window = {.left = 40, .right = 3}, .sinks = true},
    {.name = "bool mask and sinks", .mask = MaskKind::kBool, .sinks = true},
    {.name = "added mask, causal", .window = {.right = 0}, .mask = MaskKind::kAdditive},
};

// ---- Answers

// One line: the call's name, a digest of its answer's integers and one of its floats, both 64-bit
// FNV-1a.
class RecordedLine {
 public:
  explicit RecordedLine(std::string name) : name_(std::move(name)) {}

  // Arrays count in the order of the calls. A NaN counts as one value, whatever its bits.
  template <typename T>
  void Add(const std::vector<T>& values) {
    for (T x : values) {
      if constexpr (std::is_floating_point_v<T>) {
        if (std::isnan(x)) x = 12345;
        Add(floats_, &x, sizeof(x));
      } else {
        Add(ints_, &x, sizeof(x));
      }
    }
  }
  void Add(const HostTensor& tensor) {
    const auto element = static_cast<int64_t>(SizeOf(tensor.dtype()));
    for (int64_t r = 0; r < tensor.rows(); ++r) {
      Add(floats_, &tensor.bytes()[r * tensor.row_stride() * element], tensor.cols() * element);
    }
  }
  void Add(const TopKAnswer& answer) {
    Add(answer.indices);
    Add(answer.status);
    Add(answer.probs);
    Add(answer.logsumexp);
  }
  void Add(const SampleAnswer& answer) {
    Add(answer.tokens);
    Add(answer.ranks);
    Add(answer.top_ids);
    Add(answer.status);
    Add(answer.logprobs);
    Add(answer.logsumexp);
    Add(answer.top_logprobs);
    Add(answer.extra_logprobs);
  }
  void Add(const LossAnswer& answer, int32_t want = 0) {
    if ((want & kWantRank) != 0) Add(answer.rank);
    Add(answer.top_ids);
    Add(answer.status);
    Add(answer.loss);
    Add(answer.logsumexp);
    Add(answer.target_logprob);
    if ((want & kWantEntropy) != 0) Add(answer.entropy);
    Add(answer.top_logprobs);
    Add(answer.extra_logprobs);
  }

  std::string Text() const { return absl::StrFormat("%s: %016x %016x", name_, ints_, floats_); }

 private:
  static void Add(uint64_t& digest, const void* data, size_t bytes) {
    const auto* from = static_cast<const unsigned char*>(data);
    for (size_t i = 0; i < bytes; ++i) digest = (digest ^ from[i]) * 0x100000001b3u;
  }

  std::string name_;
  uint64_t ints_ = 0xcbf29ce484222325u, floats_ = ints_;
};

// Runs every op on one backend. `large` adds the shapes that only a GPU answers in good time. Not
// thread-safe.
class RecordedAnswers {
 public:
  explicit RecordedAnswers(OpRunner& runner, bool large = false) : runner_(runner), large_(large) {}

  // A line for each call.
  std::vector<std::string> Lines() {
    for (DType dtype : kAllDTypes) {
      for (const auto& [rows, vocab] : LogitsShapes()) OpsOnLogits(dtype, rows, vocab);
      for (const auto& [queries, keys] : AttentionShapes()) {
        for (const RecordedAttention& variant : kRecordedAttention) {
          Attention(dtype, dtype, queries, keys, variant);
          if (dtype == DType::kBF16) Attention(dtype, DType::kF32, queries, keys, variant);
        }
      }
      for (const LinearShape& shape : LinearShapes()) OpsOnHidden(dtype, shape);
    }
    return std::move(lines_);
  }

 private:
  struct RowsAndCols {
    int64_t rows, cols;
  };
  struct LinearShape {
    int64_t rows, hidden, vocab;
  };

  std::vector<RowsAndCols> LogitsShapes() const {
    if (!large_) return {{1, 5}, {3, 257}, {7, 4099}, {40, 1000}, {2, 33001}};
    return {{1, 5},      {3, 257},   {7, 4099},   {40, 1000},   {2, 33001},
            {1, 151936}, {7, 32064}, {64, 32064}, {300, 32064}, {700, 8192}};
  }

  std::vector<RowsAndCols> AttentionShapes() const {  // queries and keys
    if (!large_) return {{5, 65}, {3, 1000}};
    return {{5, 65}, {3, 1000}, {1, 4096}, {130, 512}, {64, 2048}, {9, 20000}};
  }

  std::vector<LinearShape> LinearShapes() const {
    std::vector<LinearShape> shapes = {{1, 100, 257}, {9, 64, 1000}, {70, 100, 513}};
    if (large_) {
      for (int64_t rows : {1, 8, 30, 64, 100, 300, 700}) shapes.push_back({rows, 512, 32064});
      shapes.push_back({5, 520, 50001});
      shapes.push_back({300, 100, 5003});
    }
    return shapes;
  }

  // Adds a line of `answer`, as `add` adds it, and returns the answer.
  template <typename Answer, typename AddAnswer>
  Answer Record(const std::string& name, absl::StatusOr<Answer> answer, AddAnswer add) {
    RecordedLine line(name);
    add(line, answer.value());
    lines_.push_back(line.Text());
    return *std::move(answer);
  }
  template <typename Answer>
  Answer Record(const std::string& name, absl::StatusOr<Answer> answer) {
    return Record(name, std::move(answer),
                  [](RecordedLine& line, const Answer& a) { line.Add(a); });
  }

  void OpsOnLogits(DType dtype, int64_t rows, int64_t vocab) {
    HostTensor logits = RecordedTensor(dtype, rows, vocab, vocab + 3, /*seed=*/1, 1.0f);
    for (int64_t c = 0; rows > 2 && c < vocab; ++c) logits.Set(2, c, -kInf);
    if (rows > 5) logits.Set(5, vocab / 2, kInf);
    const std::string shape = absl::StrFormat(" %s %dx%d, ", Name(dtype), rows, vocab);
    for (int32_t most : {20, 128, 400}) {
      const auto asks = RecordedTopKRows(rows, vocab, most);
      Record(absl::StrFormat("softmax_topk%sk to %d", shape, most),
             runner_.SoftmaxTopK(logits, asks, asks.back().first_entry + asks.back().k));
    }
    for (const RecordedVariant& variant : kRecordedVariants) {
      const SampleBatch batch = RecordedSamples(rows, vocab, variant);
      const SampleAnswer sampled =
          Record(absl::StrFormat("sample%s%s", shape, variant.name), runner_.Sample(logits, batch));
      Record(absl::StrFormat("verify%s%s", shape, variant.name),
             runner_.Verify(logits, batch, RecordedDrafts(rows, vocab, sampled.tokens)),
             [](RecordedLine& line, const VerifyAnswer& answer) {
               line.Add(answer.rows);
               line.Add(answer.accepted);
             });
    }
    for (bool all : {false, true}) {
      CrossEntropyAndBackward(shape + (all ? "all options" : "plain"), logits, all);
    }
  }

  LossAnswer RecordLoss(const std::string& name, const LossBatch& batch,
                        absl::StatusOr<LossAnswer> answer) {
    int32_t want = 0;
    for (const CrossEntropyRow& row : batch.rows) want |= row.want;
    return Record(name, std::move(answer),
                  [want](RecordedLine& line, const LossAnswer& loss) { line.Add(loss, want); });
  }

  void CrossEntropyAndBackward(const std::string& name, const HostTensor& logits, bool all) {
    LossBatch batch =
        RecordedLosses(logits.rows(), logits.cols(), all, /*has_head=*/false, /*reports=*/all);
    const LossAnswer loss =
        RecordLoss("cross_entropy" + name, batch, runner_.CrossEntropy(logits, batch));
    // A row without a finite logsumexp has a gradient of NaN, whose bits are not promised.
    for (int64_t r = 0; r < logits.rows(); ++r) {
      if (!std::isfinite(loss.logsumexp[r])) batch.rows[r].active = 0;
    }
    Record("cross_entropy_backward" + name,
           runner_.CrossEntropyBackward(
               {.logits = logits,
                .rows = batch.rows,
                .logsumexp = loss.logsumexp,
                .upstream = RecordedUpstream(logits.rows()),
                .d_logits = RecordedZeros(logits.dtype(), logits.rows(), logits.cols(),
                                          logits.row_stride())}));
  }

  // The mask is that of one batch, with all heads.
  static std::vector<std::byte> Mask(MaskKind kind, DType dtype, int64_t queries, int64_t keys) {
    HostTensor added = RecordedTensor(dtype, 3 * queries, keys, keys, /*seed=*/32, 0.125f);
    std::vector<std::byte> masked;
    for (int64_t i = 0; i < 3 * queries * keys; ++i) {
      masked.push_back(std::byte{RecordedPick(/*seed=*/33, i, 4) == 0});
      if (i % 7 == 3) added.Set(i / keys, i % keys, -kInf);
    }
    return kind == MaskKind::kBool ? masked : added.mutable_bytes();
  }

  void Attention(DType in, DType out, int64_t queries, int64_t keys,
                 const RecordedAttention& variant) {
    const AttentionShape shape{
        .batch = 2, .heads = 3, .queries = queries, .keys = keys, .rows = 6 * queries};
    const std::string name =
        absl::StrFormat(" %s to %s %dx%d, %s", Name(in), Name(out), queries, keys, variant.name);
    AttentionCall call{.scores = RecordedTensor(in, shape.rows, keys, keys + 5, /*seed=*/31, 0.5f),
                       .mask = Mask(variant.mask, in, queries, keys),
                       .probs = RecordedZeros(out, shape.rows, keys, keys)};
    call.args.shape = shape;
    call.args.scale = 0.625f;
    call.args.window = variant.window;
    call.args.mask = {
        .kind = variant.mask, .dtype = in, .head_stride = queries * keys, .query_stride = keys};
    if (variant.sinks) call.sinks = {0.5f, -kInf, 3.0f};
    const AttentionAnswer answer =
        Record("attention_softmax" + name, runner_.AttentionSoftmax(call),
               [](RecordedLine& line, const AttentionAnswer& a) {
                 line.Add(a.probs);
                 line.Add(a.logsumexp);
                 line.Add(a.status);
               });

    AttentionBackwardCall backward{
        .probs = answer.probs,
        .d_probs = RecordedTensor(out, shape.rows, keys, keys + 2, /*seed=*/34, 0.25f),
        .sinks = call.sinks,
        .logsumexp = answer.logsumexp,
        .d_scores = RecordedZeros(out == DType::kF32 ? in : out, shape.rows, keys, keys)};
    backward.args.shape = shape;
    backward.args.scale = call.args.scale;
    backward.args.window = variant.window;
    Record("attention_softmax_backward" + name, runner_.AttentionSoftmaxBackward(backward),
           [&](RecordedLine& line, const AttentionBackwardAnswer& a) {
             line.Add(a.d_scores);
             if (variant.sinks) line.Add(a.d_sinks);
             line.Add(a.status);
           });
  }

  static int64_t LinearStride(int64_t cols) { return (cols + 7) / 8 * 8; }

  // All options: a bias, a scale, a softcap and, forward, a norm.
  void OpsOnHidden(DType dtype, const LinearShape& shape) {
    const int64_t stride = LinearStride(shape.hidden);
    const HostTensor hidden =
        RecordedTensor(dtype, shape.rows, shape.hidden, stride, /*seed=*/41, 0.25f);
    HostHead head{
        .weight = RecordedTensor(dtype, shape.vocab, shape.hidden, stride, /*seed=*/42, 0.03125f)};
    for (bool all : {false, true}) {
      const std::string name =
          absl::StrFormat(" %s %dx%dx%d, %s", Name(dtype), shape.rows, shape.hidden, shape.vocab,
                          all ? "all options" : "plain");
      if (all) {
        head.scale = 0.75f;
        head.softcap = 20.0f;
        for (int64_t i = 0; i < shape.vocab; ++i) {
          head.bias.push_back(RecordedNormal(/*seed=*/43, i, 0.125f));
        }
      }
      LinearBackwardAndTraining(name, hidden, head, all);
      if (all) {
        head.norm_epsilon = 1e-5f;
        for (int64_t i = 0; i < shape.hidden; ++i) {
          head.norm.push_back(1.0f + RecordedNormal(/*seed=*/44, i, 0.03125f));
        }
      }
      LinearForward(name, hidden, head, all);
    }
  }

  void LinearForward(const std::string& name, const HostTensor& hidden, const HostHead& head,
                     bool all) {
    const int64_t rows = hidden.rows(), vocab = head.weight.rows();
    const auto asks = RecordedTopKRows(rows, vocab, all ? 100 : 20);
    Record("linear_topk" + name,
           runner_.LinearTopK(hidden, head, asks, asks.back().first_entry + asks.back().k));
    const SampleBatch samples =
        RecordedSamples(rows, vocab, {.filters = all, .edits = all, .reports = all});
    Record("linear_sample" + name, runner_.LinearSample(hidden, head, samples));
    for (bool reports : {false, true}) {
      const LossBatch losses = RecordedLosses(rows, vocab, all, /*has_head=*/true, reports);
      RecordLoss(absl::StrFormat("linear_cross_entropy%s%s", name, reports ? ", reports" : ""),
                 losses, runner_.LinearCrossEntropy(hidden, head, losses));
    }
  }

  // Gradients have the weight's type where the options are on, else f32.
  void LinearBackwardAndTraining(const std::string& name, const HostTensor& hidden,
                                 const HostHead& head, bool all) {
    const int64_t rows = hidden.rows(), vocab = head.weight.rows(), cols = hidden.cols();
    const DType dtype = all ? head.weight.dtype() : DType::kF32;
    LinearBackwardCall call{
        .hidden = hidden,
        .head = head,
        .rows = RecordedLosses(rows, vocab, all, /*has_head=*/true, /*reports=*/false).rows,
        .upstream = RecordedUpstream(rows),
        .d_hidden = RecordedZeros(dtype, rows, cols, LinearStride(cols)),
        .d_weight = RecordedZeros(dtype, vocab, cols, LinearStride(cols)),
        .want_d_bias = all};
    const auto add = [all](RecordedLine& line, const LinearBackwardAnswer& answer) {
      line.Add(answer.d_hidden);
      line.Add(answer.d_weight);
      if (all) line.Add(answer.d_bias);
    };
    call.logsumexp =
        Record("linear_cross_entropy_training" + name, runner_.LinearCrossEntropyTraining(call),
               [&](RecordedLine& line, const LinearTrainingAnswer& answer) {
                 line.Add(answer.loss);
                 add(line, answer.gradient);
               })
            .loss.logsumexp;
    Record("linear_cross_entropy_backward" + name, runner_.LinearCrossEntropyBackward(call), add);
  }

  OpRunner& runner_;
  const bool large_;
  std::vector<std::string> lines_;
};

// Compares the runner's answers with the recording `name`. Where LOGITD_RECORD_ANSWERS names a
// directory, writes the recording there instead. The test is skipped where nothing was recorded by
// `compiler`, this build's: others may round some last bits in another way.
inline void CompareWithRecording(const std::string& name, std::string compiler, OpRunner& runner,
                                 bool large = false) {
  compiler = "# compiled by " + compiler;
  const char* directory = std::getenv("LOGITD_RECORD_ANSWERS");
  const std::string path =
      absl::StrFormat("%s/tests/kernels/recorded/%s.txt", LOGITD_SOURCE_DIR, name);
  std::vector<std::string> recorded;
  std::ifstream recording(path);
  for (std::string line; std::getline(recording, line);) recorded.push_back(line);
  std::sort(recorded.begin(), recorded.end());  // the compiler first
  if (directory == nullptr && (recorded.empty() || recorded[0] != compiler)) {
    GTEST_SKIP() << path << " has no answers '" << compiler
                 << "': run this test with LOGITD_RECORD_ANSWERS=DIR to write that file to DIR";
  }
  std::vector<std::string> lines = RecordedAnswers(runner, large).Lines();
  lines.push_back(compiler);
  std::sort(lines.begin(), lines.end());
  if (directory != nullptr) {
    std::ofstream file(absl::StrFormat("%s/%s.txt", directory, name));
    for (const std::string& line : lines) file << line << "\n";
    ASSERT_TRUE(file.flush().good()) << "cannot write " << name << ".txt to " << directory;
    return;
  }
  ASSERT_EQ(lines.size(), recorded.size()) << "calls of the test and lines of " << path;
  for (size_t i = 0; i < lines.size(); ++i) EXPECT_EQ(lines[i], recorded[i]);
}

}  // namespace logitd::testing

#endif  // LOGITD_TESTS_KERNELS_RECORDED_ANSWERS_H_
