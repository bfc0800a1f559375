// Digests of every op's answers to fixed inputs, compared with a file of digests recorded before: a
// change that should keep every bit must keep every line.
//
// Inputs come from a generator of this file's own, so that a digest depends on nothing but the op.
#ifndef LOGITD_TESTS_KERNELS_RECORDED_ANSWERS_H_
#define LOGITD_TESTS_KERNELS_RECORDED_ANSWERS_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <memory>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/strings/str_format.h"
#include "kernels/backend.h"
#include "tests/kernels/arena.h"

namespace logitd::testing {

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

// The same, about normal: the sum of four uniform numbers, with a standard deviation of 4.6 * scale.
// Exact in fp32 where `scale` is a power of two.
constexpr float RecordedNormal(uint64_t seed, uint64_t n, float scale) {
  const uint64_t bits = RecordedBits(seed, n);
  int32_t sum = -131070;
  for (int i = 0; i < 4; ++i) sum += static_cast<int32_t>(bits >> (16 * i) & 0xffff);
  return static_cast<float>(sum) * (scale / 8192);
}

// 64-bit FNV-1a.
class RecordedDigest {
 public:
  void Add(const void* data, size_t bytes) {
    const auto* from = static_cast<const unsigned char*>(data);
    for (size_t i = 0; i < bytes; ++i) value_ = (value_ ^ from[i]) * 0x100000001b3u;
  }
  uint64_t value() const { return value_; }

 private:
  uint64_t value_ = 0xcbf29ce484222325u;
};

// A [rows, cols] tensor in host memory, filled with numbers of a sequence.
struct RecordedTensor {
  DType dtype = DType::kF32;
  int64_t rows = 0, cols = 0, stride = 0;
  std::vector<std::byte> bytes;

  static RecordedTensor Of(DType dtype, int64_t rows, int64_t cols, int64_t stride, uint64_t seed,
                           float scale) {
    RecordedTensor tensor{dtype, rows, cols, stride};
    tensor.bytes.resize(rows * stride * SizeOf(dtype));
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < cols; ++c) {
        tensor.Set(r, c, RecordedNormal(seed, r * cols + c, scale));
      }
    }
    return tensor;
  }

  // Cuts what the type cannot hold.
  void Set(int64_t r, int64_t c, float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof(bits));
    const int64_t at = r * stride + c;
    if (dtype == DType::kF32) {
      std::memcpy(&bytes[at * 4], &bits, 4);
      return;
    }
    auto half = static_cast<uint16_t>(bits >> 16);
    if (dtype == DType::kF16) {
      const int exponent = static_cast<int>(bits >> 23 & 0xff) - 112;
      half = static_cast<uint16_t>(bits >> 16 & 0x8000);
      if (exponent >= 31) {
        half |= 0x7c00;
      } else if (exponent > 0) {
        half |= static_cast<uint16_t>(exponent << 10 | (bits >> 13 & 0x3ff));
      }
    }
    std::memcpy(&bytes[at * 2], &half, 2);
  }
};

// One line of a recording: the call's name, a digest of its answer's integers and one of its floats.
class RecordedLine {
 public:
  explicit RecordedLine(std::string name) : name_(std::move(name)) {}

  // In the order of the calls. A NaN counts as one value, whatever its bits.
  template <typename T>
  void Add(const std::vector<T>& values) {
    if constexpr (std::is_floating_point_v<T>) {
      for (T x : values) {
        if (std::isnan(x)) x = 12345;
        floats_.Add(&x, sizeof(x));
      }
    } else {
      ints_.Add(values.data(), values.size() * sizeof(T));
    }
  }
  void Add(const RecordedTensor& tensor) {
    const size_t element = SizeOf(tensor.dtype);
    for (int64_t r = 0; r < tensor.rows; ++r) {
      floats_.Add(&tensor.bytes[r * tensor.stride * element], tensor.cols * element);
    }
  }

  std::string Text() const {
    return absl::StrFormat("%s: %016x %016x", name_, ints_.value(), floats_.value());
  }

 private:
  std::string name_;
  RecordedDigest ints_, floats_;
};

inline void AddRecorded(Arena& arena, const RecordedTensor& tensor, TensorView& view) {
  view = {
      .dtype = tensor.dtype, .rows = tensor.rows, .cols = tensor.cols, .row_stride = tensor.stride};
  arena.In(absl::MakeConstSpan(tensor.bytes), 0, &view.data);
}
inline void AddRecorded(Arena& arena, RecordedTensor& tensor, MutableTensorView& view) {
  view = {
      .dtype = tensor.dtype, .rows = tensor.rows, .cols = tensor.cols, .row_stride = tensor.stride};
  arena.Out(absl::MakeSpan(tensor.bytes), 0, &view.data);
}

// What softmax_topk and linear_topk take and give, the logits excepted. Rows want from 1 to `most`
// tokens.
struct RecordedTopK {
  std::vector<SoftmaxTopKRow> params;
  int32_t max_k = 0;
  std::vector<int32_t> indices;
  std::vector<float> probs, logsumexp;
  std::vector<RowStatus> status;

  RecordedTopK(int64_t rows, int64_t vocab, int32_t most) : logsumexp(rows), status(rows) {
    int64_t entries = 0;
    for (int64_t r = 0; r < rows; ++r) {
      const auto k = static_cast<int32_t>(std::min<int64_t>(vocab, 1 + (r * 37 + most - 1) % most));
      params.push_back({.first_entry = entries,
                        .temperature = 0.5f + 0.25f * static_cast<float>(r % 5),
                        .k = k});
      max_k = std::max(max_k, k);
      entries += k;
    }
    indices.resize(entries);
    probs.resize(entries);
  }
  void AddTo(Arena& arena, SoftmaxTopKArgs& args) {
    args.max_k = max_k;
    arena.In(params, &args.rows);
    arena.Out(&indices, &args.indices);
    arena.Out(&probs, &args.probs);
    arena.Out(&logsumexp, &args.logsumexp);
    arena.Out(&status, &args.status);
  }
  void AddTo(RecordedLine& line) const {
    line.Add(indices);
    line.Add(status);
    line.Add(probs);
    line.Add(logsumexp);
  }
};

struct SampleVariant {
  std::string_view name;
  bool filters, edits, reports;
};
inline constexpr SampleVariant kRecordedSampleVariants[] = {
    {.name = "unfiltered"},
    {.name = "filtered", .filters = true},
    {.name = "edited", .edits = true},
    {.name = "filtered and edited", .filters = true, .edits = true},
    {.name = "reports", .reports = true},
    {.name = "all", .filters = true, .edits = true, .reports = true},
};

// The same for sample, verify and linear_sample.
struct RecordedSample {
  std::vector<SampleRow> params;
  std::vector<int32_t> history, extra_ids;
  std::vector<SampleBias> bias;
  std::vector<uint32_t> mask_words;
  std::vector<int32_t> tokens, ranks, top_ids;
  std::vector<float> logprobs, logsumexp, top_logprobs, extra_logprobs;
  std::vector<RowStatus> status;

  RecordedSample(int64_t rows, int64_t vocab, const SampleVariant& variant)
      : tokens(rows), ranks(rows), logprobs(rows), logsumexp(rows), status(rows) {
    for (int64_t r = 0; r < rows; ++r) {
      SampleRow row{.seed = 77 + static_cast<uint64_t>(r),
                    .position = static_cast<uint64_t>(r * r),
                    .first_mask_word = -1,
                    .active = 1,
                    .temperature = r % 5 == 4 ? 0.0f : 0.5f + 0.25f * static_cast<float>(r % 7),
                    .top_p = 1.0f,
                    .repetition = 1.0f,
                    .logprob_mode = r % 2 == 0 ? LogprobMode::kRaw : LogprobMode::kProcessed};
      if (variant.filters) Filter(row, r, vocab);
      if (variant.edits) Edit(row, r, vocab);
      if (variant.reports) Report(row, r, vocab);
      params.push_back(row);
    }
  }

  void Filter(SampleRow& row, int64_t r, int64_t vocab) {
    if (r % 4 != 1) row.top_k = static_cast<int32_t>(std::min<int64_t>(vocab, 1 + r * 31 % 600));
    if (r % 4 != 2) row.top_p = 0.3f + 0.1f * static_cast<float>(r % 7);
    if (r % 4 != 3) row.min_p = 0.01f * static_cast<float>(r % 3);
  }

  void Edit(SampleRow& row, int64_t r, int64_t vocab) {
    row.repetition = 1.25f;
    row.presence = 0.5f;
    row.frequency = 0.125f;
    row.first_history = static_cast<int64_t>(history.size());
    row.history_count = static_cast<int32_t>(r % 40);
    for (int32_t i = 0; i < row.history_count; ++i) {
      history.push_back(RecordedPick(/*seed=*/11, r * 64 + i / 2, vocab));
    }
    row.first_bias = static_cast<int64_t>(bias.size());
    row.bias_count = static_cast<int32_t>(std::min<int64_t>(vocab, r % 4));
    for (int32_t i = 0; i < row.bias_count; ++i) {
      bias.push_back({.id = static_cast<int32_t>(i * (vocab / row.bias_count)),
                      .value = i == 2 ? -HUGE_VALF : 1.5f * static_cast<float>(i + 1)});
    }
    if (r % 3 == 1) {
      row.first_mask_word = static_cast<int64_t>(mask_words.size());
      for (int64_t w = 0; w < MaskWords(vocab); ++w) {
        mask_words.push_back(static_cast<uint32_t>(RecordedBits(/*seed=*/12, r * 8192 + w)) | 1);
      }
    }
  }

  void Report(SampleRow& row, int64_t r, int64_t vocab) {
    row.first_top_entry = static_cast<int64_t>(top_ids.size());
    row.top_logprobs =
        static_cast<int32_t>(std::min<int64_t>(vocab, r % 3 == 2 ? 128 : 1 + r % 20));
    top_ids.resize(top_ids.size() + row.top_logprobs);
    top_logprobs.resize(top_ids.size());
    row.first_extra = row.first_extra_entry = static_cast<int64_t>(extra_ids.size());
    row.extra_count = 3;
    for (int32_t i = 0; i < row.extra_count; ++i) {
      extra_ids.push_back(RecordedPick(/*seed=*/13, r * 8 + i, vocab));
    }
    extra_logprobs.resize(extra_ids.size());
  }

  void AddTo(Arena& arena, SampleArgs& args) {
    args.edited = !history.empty() || !bias.empty() || !mask_words.empty();
    arena.In(params, &args.rows);
    arena.In(history, &args.history);
    arena.In(bias, &args.bias);
    arena.In(extra_ids, &args.extra_ids);
    arena.In(mask_words, &args.mask_words);
    arena.Out(&tokens, &args.tokens);
    arena.Out(&logprobs, &args.logprobs);
    arena.Out(&ranks, &args.ranks);
    arena.Out(&logsumexp, &args.logsumexp);
    arena.Out(&top_ids, &args.top_ids);
    arena.Out(&top_logprobs, &args.top_logprobs);
    arena.Out(&extra_logprobs, &args.extra_logprobs);
    arena.Out(&status, &args.status);
  }
  void AddTo(RecordedLine& line) const {
    line.Add(tokens);
    line.Add(ranks);
    line.Add(top_ids);
    line.Add(status);
    line.Add(logprobs);
    line.Add(logsumexp);
    line.Add(top_logprobs);
    line.Add(extra_logprobs);
  }
};

// What verify takes and gives besides. Sequences have 1, 2, 3, 4 and 5 rows, again and again; drafts
// are of every kind, about half of them likely.
struct RecordedDrafts {
  std::vector<VerifyDraft> drafts;
  std::vector<int32_t> ids;
  std::vector<float> probs;
  std::vector<VerifySequence> sequences;
  std::vector<int32_t> accepted;

  RecordedDrafts(int64_t rows, int64_t vocab, const std::vector<int32_t>& likely) {
    for (int64_t r = 0; r < rows;) {
      const int64_t length = std::min(rows - r, 1 + static_cast<int64_t>(sequences.size()) % 5);
      sequences.push_back({.first_row = r, .rows = static_cast<int32_t>(length)});
      r += length;
    }
    accepted.resize(sequences.size());
    for (int64_t r = 0; r < rows; ++r) Draft(r, vocab, likely[r]);
  }

  void Draft(int64_t r, int64_t vocab, int32_t likely) {
    VerifyDraft draft{.token = r % 2 == 0 ? likely : RecordedPick(/*seed=*/14, r, vocab),
                      .kind = static_cast<DraftKind>(r % 3)};
    draft.first_prob = static_cast<int64_t>(probs.size());
    if (draft.kind == DraftKind::kList) {  // the draft and the tokens next to it
      draft.count = static_cast<int32_t>(std::min<int64_t>(vocab, 5));
      draft.first_id = static_cast<int64_t>(ids.size());
      const int64_t first = std::clamp<int64_t>(draft.token - 2, 0, vocab - draft.count);
      for (int32_t i = 0; i < draft.count; ++i) {
        ids.push_back(static_cast<int32_t>(first + i));
        probs.push_back(ids.back() == draft.token ? 0.6f : 0.1f);
      }
    } else if (draft.kind == DraftKind::kDense) {
      for (int64_t c = 0; c < vocab; ++c) {
        probs.push_back(static_cast<float>(RecordedPick(/*seed=*/15, c, 1024)) /
                        (512.0f * static_cast<float>(vocab)));
      }
    }
    drafts.push_back(draft);
  }

  void AddTo(Arena& arena, VerifyArgs& args) {
    args.sequence_count = static_cast<int64_t>(sequences.size());
    arena.In(drafts, &args.drafts);
    arena.In(ids, &args.draft_ids);
    arena.In(probs, &args.draft_probs);
    arena.In(sequences, &args.sequences);
    arena.Out(&accepted, &args.accepted);
  }
  void AddTo(RecordedLine& line) const { line.Add(accepted); }
};

// What cross_entropy and linear_cross_entropy take and give, the logits excepted.
struct RecordedLoss {
  std::vector<CrossEntropyRow> params;
  int32_t want = 0, max_top_logprobs = 0;
  std::vector<int32_t> extra_ids, rank, top_ids;
  std::vector<float> loss, logsumexp, target_logprob, entropy, top_logprobs, extra_logprobs;
  std::vector<RowStatus> status;
  std::vector<float> upstream;

  // `options`: all parameters are used, the softcap only without a head. `reports`: rank, entropy,
  // top tokens and extra tokens are wanted.
  RecordedLoss(int64_t rows, int64_t vocab, bool options, bool has_head, bool reports)
      : loss(rows), logsumexp(rows), target_logprob(rows), status(rows) {
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
      if (reports) Report(row, r, vocab);
      params.push_back(row);
      upstream.push_back(RecordedNormal(/*seed=*/23, r, 0.25f));
    }
    rank.resize((want & kWantRank) != 0 ? rows : 0);
    entropy.resize((want & kWantEntropy) != 0 ? rows : 0);
  }

  void Report(CrossEntropyRow& row, int64_t r, int64_t vocab) {
    row.want = static_cast<int32_t>(r % 4);
    want |= row.want;
    row.first_top_entry = static_cast<int64_t>(top_ids.size());
    row.top_logprobs = static_cast<int32_t>(std::min<int64_t>(vocab, r % 3 == 2 ? 128 : r % 20));
    max_top_logprobs = std::max(max_top_logprobs, row.top_logprobs);
    top_ids.resize(top_ids.size() + row.top_logprobs);
    top_logprobs.resize(top_ids.size());
    row.first_extra = row.first_extra_entry = static_cast<int64_t>(extra_ids.size());
    row.extra_count = 2;
    for (int32_t i = 0; i < row.extra_count; ++i) {
      extra_ids.push_back(RecordedPick(/*seed=*/22, r * 8 + i, vocab));
    }
    extra_logprobs.resize(extra_ids.size());
  }

  void AddTo(Arena& arena, CrossEntropyAnswers& answers) {
    arena.Out(&loss, &answers.loss);
    arena.Out(&logsumexp, &answers.logsumexp);
    arena.Out(&target_logprob, &answers.target_logprob);
    arena.Out(&rank, &answers.rank);
    arena.Out(&entropy, &answers.entropy);
    arena.Out(&top_ids, &answers.top_ids);
    arena.Out(&top_logprobs, &answers.top_logprobs);
    arena.Out(&extra_logprobs, &answers.extra_logprobs);
    arena.Out(&status, &answers.status);
  }
  void AddTo(Arena& arena, CrossEntropyArgs& args) {
    args.want = want;
    args.max_top_logprobs = max_top_logprobs;
    arena.In(params, &args.rows);
    arena.In(extra_ids, &args.extra_ids);
    AddTo(arena, args.answers);
  }
  void AddTo(RecordedLine& line) const {
    line.Add(rank);
    line.Add(top_ids);
    line.Add(status);
    line.Add(loss);
    line.Add(logsumexp);
    line.Add(target_logprob);
    line.Add(entropy);
    line.Add(top_logprobs);
    line.Add(extra_logprobs);
  }
};

struct AttentionVariant {
  std::string_view name;
  AttentionWindow window;
  MaskKind mask = MaskKind::kNone;
  bool sinks = false;
};
inline constexpr AttentionVariant kRecordedAttentionVariants[] = {
    {.name = "plain"},
    {.name = "causal", .window = {.right = 0}},
    {.name = "window and sinks", .window = {.left = 40, .right = 3}, .sinks = true},
    {.name = "bool mask and sinks", .mask = MaskKind::kBool, .sinks = true},
    {.name = "added mask, causal", .window = {.right = 0}, .mask = MaskKind::kAdditive},
};

// A head and hidden states. All options: a bias, a scale, a softcap and, where asked, a norm.
struct RecordedHead {
  RecordedTensor hidden, weight;
  std::vector<float> bias, norm;
  bool options = false;

  void AddTo(Arena& arena, TensorView& to_hidden, HeadView& head, bool with_norm) const {
    AddRecorded(arena, hidden, to_hidden);
    AddRecorded(arena, weight, head.weight);
    if (!options) return;
    arena.In(bias, &head.bias);
    head.scale = 0.75f;
    head.softcap = 20.0f;
    if (!with_norm) return;
    arena.In(norm, &head.norm);
    head.norm_epsilon = 1e-5f;
  }
};

// Runs every op on one backend. `large` adds the shapes that only a GPU answers in good time. Not
// thread-safe.
class RecordedAnswers {
 public:
  explicit RecordedAnswers(Backend* backend, bool large = false)
      : arena_(Arena::Create(backend).value()), large_(large) {}

  // A line for each call.
  std::vector<std::string> Lines() {
    for (DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
      for (const auto& [rows, vocab] : LogitsShapes()) OpsOnLogits(dtype, rows, vocab);
      for (const auto& [queries, keys] : AttentionShapes()) {
        for (const AttentionVariant& variant : kRecordedAttentionVariants) {
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

  // Runs the op and adds its line: `answers` are vectors, tensors and the structs above.
  template <typename Args, typename... Answers>
  void Record(std::string name, absl::Status (Stream::*op)(const Args&), const Args& args,
              const Answers&... answers) {
    const auto times = arena_->Run(op, args);
    if (!times.ok()) {
      lines_.push_back(absl::StrFormat("%s: %s", name, times.status().ToString()));
      return;
    }
    RecordedLine line(std::move(name));
    const auto add = [&line](const auto& answer) {
      if constexpr (requires { answer.AddTo(line); }) {
        answer.AddTo(line);
      } else {
        line.Add(answer);
      }
    };
    (add(answers), ...);
    lines_.push_back(line.Text());
  }

  void OpsOnLogits(DType dtype, int64_t rows, int64_t vocab) {
    RecordedTensor logits = RecordedTensor::Of(dtype, rows, vocab, vocab + 3, /*seed=*/1, 1.0f);
    for (int64_t c = 0; rows > 2 && c < vocab; ++c) logits.Set(2, c, -HUGE_VALF);
    if (rows > 5) logits.Set(5, vocab / 2, HUGE_VALF);
    const std::string shape = absl::StrFormat(" %s %dx%d, ", Name(dtype), rows, vocab);
    for (int32_t most : {20, 128, 400}) {
      RecordedTopK topk(rows, vocab, most);
      SoftmaxTopKArgs args;
      AddRecorded(*arena_, logits, args.logits);
      topk.AddTo(*arena_, args);
      Record(absl::StrFormat("softmax_topk%sk to %d", shape, most), &Stream::SoftmaxTopK, args,
             topk);
    }
    for (const SampleVariant& variant : kRecordedSampleVariants) {
      SampleAndVerify(shape, logits, variant);
    }
    for (bool all : {false, true}) CrossEntropyAndBackward(shape, logits, all);
  }

  void SampleAndVerify(const std::string& shape, const RecordedTensor& logits,
                       const SampleVariant& variant) {
    RecordedSample sample(logits.rows, logits.cols, variant);
    SampleArgs args;
    AddRecorded(*arena_, logits, args.logits);
    sample.AddTo(*arena_, args);
    Record(absl::StrFormat("sample%s%s", shape, variant.name), &Stream::Sample, args, sample);

    std::vector<int32_t> likely;
    for (int64_t r = 0; r < logits.rows; ++r) likely.push_back(std::max(sample.tokens[r], 0));
    RecordedSample rows(logits.rows, logits.cols, variant);
    RecordedDrafts drafts(logits.rows, logits.cols, likely);
    VerifyArgs verify;
    AddRecorded(*arena_, logits, verify.sample.logits);
    rows.AddTo(*arena_, verify.sample);
    drafts.AddTo(*arena_, verify);
    Record(absl::StrFormat("verify%s%s", shape, variant.name), &Stream::Verify, verify, rows,
           drafts);
  }

  void CrossEntropyAndBackward(const std::string& shape, const RecordedTensor& logits, bool all) {
    const std::string_view variant = all ? "all options" : "plain";
    RecordedLoss loss(logits.rows, logits.cols, all, /*has_head=*/false, /*reports=*/all);
    CrossEntropyArgs args;
    AddRecorded(*arena_, logits, args.logits);
    loss.AddTo(*arena_, args);
    Record(absl::StrFormat("cross_entropy%s%s", shape, variant), &Stream::CrossEntropy, args, loss);

    // A row without a finite logsumexp has a gradient of NaN, whose bits are not promised.
    for (int64_t r = 0; r < logits.rows; ++r) {
      if (!std::isfinite(loss.logsumexp[r])) loss.params[r].active = 0;
    }
    RecordedTensor gradient{logits.dtype, logits.rows, logits.cols, logits.stride};
    gradient.bytes.resize(logits.bytes.size());
    CrossEntropyBackwardArgs backward;
    AddRecorded(*arena_, logits, backward.logits);
    arena_->In(loss.params, &backward.rows);
    arena_->In(loss.logsumexp, &backward.logsumexp);
    arena_->In(loss.upstream, &backward.upstream);
    AddRecorded(*arena_, gradient, backward.d_logits);
    Record(absl::StrFormat("cross_entropy_backward%s%s", shape, variant),
           &Stream::CrossEntropyBackward, backward, gradient);
  }

  void Attention(DType in, DType out, int64_t queries, int64_t keys,
                 const AttentionVariant& variant) {
    const AttentionShape shape{
        .batch = 2, .heads = 3, .queries = queries, .keys = keys, .rows = 6 * queries};
    const std::string name =
        absl::StrFormat(" %s to %s %dx%d, %s", Name(in), Name(out), queries, keys, variant.name);
    const RecordedTensor scores =
        RecordedTensor::Of(in, shape.rows, keys, keys + 5, /*seed=*/31, 0.5f);
    RecordedTensor probs = RecordedTensor::Of(out, shape.rows, keys, keys, /*seed=*/0, 0.0f);
    const std::vector<float> sinks = {0.5f, -HUGE_VALF, 3.0f};
    // Of one batch, with all heads.
    RecordedTensor added = RecordedTensor::Of(in, 3 * queries, keys, keys, /*seed=*/32, 0.125f);
    std::vector<std::byte> masked;
    for (int64_t i = 0; i < 3 * queries * keys; ++i) {
      masked.push_back(std::byte{RecordedPick(/*seed=*/33, i, 4) == 0});
      if (i % 7 == 3) added.Set(i / keys, i % keys, -HUGE_VALF);
    }
    std::vector<float> logsumexp(shape.rows);
    std::vector<RowStatus> status(shape.rows);
    AttentionSoftmaxArgs args{.shape = shape, .scale = 0.625f, .window = variant.window};
    AddRecorded(*arena_, scores, args.scores);
    args.mask = {
        .kind = variant.mask, .dtype = in, .head_stride = queries * keys, .query_stride = keys};
    const auto& mask = variant.mask == MaskKind::kBool ? masked : added.bytes;
    if (variant.mask != MaskKind::kNone) arena_->In(absl::MakeConstSpan(mask), 0, &args.mask.data);
    if (variant.sinks) arena_->In(sinks, &args.sinks);
    AddRecorded(*arena_, probs, args.probs);
    arena_->Out(&logsumexp, &args.logsumexp);
    arena_->Out(&status, &args.status);
    Record("attention_softmax" + name, &Stream::AttentionSoftmax, args, probs, logsumexp, status);

    const DType d_dtype = out == DType::kF32 ? in : out;
    const RecordedTensor d_probs =
        RecordedTensor::Of(out, shape.rows, keys, keys + 2, /*seed=*/34, 0.25f);
    RecordedTensor d_scores = RecordedTensor::Of(d_dtype, shape.rows, keys, keys, 0, 0.0f);
    std::vector<double> d_sinks(variant.sinks ? 3 : 0);
    AttentionSoftmaxBackwardArgs backward{
        .shape = shape, .scale = 0.625f, .window = variant.window};
    AddRecorded(*arena_, std::as_const(probs), backward.probs);
    AddRecorded(*arena_, d_probs, backward.d_probs);
    AddRecorded(*arena_, d_scores, backward.d_scores);
    if (variant.sinks) {
      arena_->In(sinks, &backward.sinks);
      arena_->In(logsumexp, &backward.logsumexp);
      arena_->Out(&d_sinks, &backward.d_sinks);
    }
    arena_->Out(&status, &backward.status);
    Record("attention_softmax_backward" + name, &Stream::AttentionSoftmaxBackward, backward,
           d_scores, d_sinks, status);
  }

  static int64_t LinearStride(int64_t cols) { return (cols + 7) / 8 * 8; }

  void OpsOnHidden(DType dtype, const LinearShape& shape) {
    const int64_t stride = LinearStride(shape.hidden);
    RecordedHead head{
        .hidden = RecordedTensor::Of(dtype, shape.rows, shape.hidden, stride, /*seed=*/41, 0.25f),
        .weight =
            RecordedTensor::Of(dtype, shape.vocab, shape.hidden, stride, /*seed=*/42, 0.03125f)};
    for (int64_t i = 0; i < shape.vocab; ++i) {
      head.bias.push_back(RecordedNormal(/*seed=*/43, i, 0.125f));
    }
    for (int64_t i = 0; i < shape.hidden; ++i) {
      head.norm.push_back(1.0f + RecordedNormal(/*seed=*/44, i, 0.03125f));
    }
    for (bool all : {false, true}) {
      head.options = all;
      const std::string name =
          absl::StrFormat(" %s %dx%dx%d, %s", Name(dtype), shape.rows, shape.hidden, shape.vocab,
                          all ? "all options" : "plain");
      Forward(name, head);
      BackwardAndTraining(name, head);
    }
  }

  void Forward(const std::string& name, const RecordedHead& head) {
    const int64_t rows = head.hidden.rows, vocab = head.weight.rows;
    const bool all = head.options;
    RecordedTopK topk(rows, vocab, all ? 100 : 20);
    LinearTopKArgs topk_args;
    head.AddTo(*arena_, topk_args.hidden, topk_args.head, /*with_norm=*/true);
    topk.AddTo(*arena_, topk_args.topk);
    Record("linear_topk" + name, &Stream::LinearTopK, topk_args, topk);

    RecordedSample sample(rows, vocab, {.filters = all, .edits = all, .reports = all});
    LinearSampleArgs sample_args;
    head.AddTo(*arena_, sample_args.hidden, sample_args.head, /*with_norm=*/true);
    sample.AddTo(*arena_, sample_args.sample);
    Record("linear_sample" + name, &Stream::LinearSample, sample_args, sample);

    for (bool reports : {false, true}) {
      RecordedLoss loss(rows, vocab, all, /*has_head=*/true, reports);
      LinearCrossEntropyArgs args;
      head.AddTo(*arena_, args.hidden, args.head, /*with_norm=*/true);
      loss.AddTo(*arena_, args.cross_entropy);
      Record(absl::StrFormat("linear_cross_entropy%s%s", name, reports ? ", reports" : ""),
             &Stream::LinearCrossEntropy, args, loss);
    }
  }

  // Gradients in the weight's type where the options are on, else in f32.
  void BackwardAndTraining(const std::string& name, const RecordedHead& head) {
    const int64_t rows = head.hidden.rows, vocab = head.weight.rows, hidden = head.hidden.cols;
    const DType dtype = head.options ? head.weight.dtype : DType::kF32;
    RecordedLoss loss(rows, vocab, head.options, /*has_head=*/true, /*reports=*/false);
    RecordedTensor d_hidden =
        RecordedTensor::Of(dtype, rows, hidden, LinearStride(hidden), /*seed=*/0, 0.0f);
    RecordedTensor d_weight =
        RecordedTensor::Of(dtype, vocab, hidden, LinearStride(hidden), /*seed=*/0, 0.0f);
    std::vector<float> d_bias(head.options ? vocab : 0);
    const auto add_gradient = [&](LinearCrossEntropyBackwardArgs& args) {
      head.AddTo(*arena_, args.hidden, args.head, /*with_norm=*/false);
      arena_->In(loss.params, &args.rows);
      arena_->In(loss.upstream, &args.upstream);
      AddRecorded(*arena_, d_hidden, args.d_hidden);
      AddRecorded(*arena_, d_weight, args.d_weight);
      if (head.options) arena_->Out(&d_bias, &args.d_bias);
    };

    LinearCrossEntropyTrainingArgs training;
    add_gradient(training.gradient);
    loss.AddTo(*arena_, training.answers);
    Record("linear_cross_entropy_training" + name, &Stream::LinearCrossEntropyTraining, training,
           loss, d_hidden, d_weight, d_bias);

    LinearCrossEntropyBackwardArgs backward;
    add_gradient(backward);
    arena_->In(loss.logsumexp, &backward.logsumexp);
    Record("linear_cross_entropy_backward" + name, &Stream::LinearCrossEntropyBackward, backward,
           d_hidden, d_weight, d_bias);
  }

  std::unique_ptr<Arena> arena_;
  const bool large_;
  std::vector<std::string> lines_;
};

// Compares `lines` with the recording `name`. Where LOGITD_RECORD_ANSWERS names a directory, writes
// the recording there instead. The test is skipped where nothing was recorded by this build's
// compiler: other compilers may fuse other multiplications and additions.
inline void CompareWithRecording(const std::string& name, const std::vector<std::string>& lines) {
  const std::string compiler = absl::StrFormat("# compiled by %s", __VERSION__);
  if (const char* directory = std::getenv("LOGITD_RECORD_ANSWERS")) {
    std::ofstream file(absl::StrFormat("%s/%s.txt", directory, name));
    file << compiler << "\n";
    for (const std::string& line : lines) file << line << "\n";
    ASSERT_TRUE(file.flush().good()) << "cannot write " << name << ".txt to " << directory;
    return;
  }
  const std::string path =
      absl::StrFormat("%s/tests/kernels/recorded/%s.txt", LOGITD_SOURCE_DIR, name);
  std::ifstream file(path);
  std::vector<std::string> recorded;
  for (std::string line; std::getline(file, line);) recorded.push_back(line);
  if (recorded.empty() || recorded[0] != compiler) {
    GTEST_SKIP() << path << " has no answers '" << compiler
                 << "': run this test with LOGITD_RECORD_ANSWERS=DIR to write that file to DIR";
  }
  recorded.erase(recorded.begin());
  ASSERT_EQ(lines.size(), recorded.size()) << "calls of the test and lines of " << path;
  for (size_t i = 0; i < lines.size(); ++i) EXPECT_EQ(lines[i], recorded[i]);
}

}  // namespace logitd::testing

#endif  // LOGITD_TESTS_KERNELS_RECORDED_ANSWERS_H_
