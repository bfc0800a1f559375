// A case's inputs, drawn with one seed, room for its answers, and the launches of its op.
#include "bench/kernels/cases.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>

namespace logitd::bench {
namespace {

// Launches of an op that moves so many bytes: enough that the inputs are walked through and none is
// found in a cache, and that the first launch's start weighs little.
Repeat RepeatFor(double bytes) {
  return {.launches = static_cast<int>(std::clamp(0x1p30 / bytes, 8.0, 200.0))};
}

Repeat RepeatForProduct(int64_t rows) { return {.launches = rows <= 512 ? 8 : 2, .slow = true}; }

// `overwritten`: the op writes among its inputs. run(set) launches it on one set of them.
template <class Run>
absl::StatusOr<double> TimeOverSets(Device& device, Inputs& inputs, const Arrays& arrays,
                                    DType dtype, double set_bytes, bool overwritten,
                                    const Repeat& repeat, Run run) {
  LOGITD_RETURN_IF_ERROR(arrays.status());
  const auto sets = inputs.Cut(dtype, static_cast<size_t>(set_bytes), overwritten);
  if (!sets.ok()) return sets.status();
  return device.Time(repeat, [&](int i) { return run(sets->At(i)); });
}

TensorView View(const void* data, DType dtype, int64_t rows, int64_t cols) {
  return {data, dtype, rows, cols, cols};
}
MutableTensorView MutableView(void* data, DType dtype, int64_t rows, int64_t cols) {
  return {data, dtype, rows, cols, cols};
}

SoftmaxTopKArgs TopKArgs(Arrays& arrays, int64_t count, int32_t k) {
  std::vector<SoftmaxTopKRow> rows(count);
  for (int64_t i = 0; i < count; ++i) rows[i] = {.first_entry = i * k, .temperature = 1, .k = k};
  return {.rows = arrays.Put(rows),
          .max_k = k,
          .indices = arrays.Room<int32_t>(count * k),
          .probs = arrays.Room<float>(count * k),
          .logsumexp = arrays.Room<float>(count),
          .status = arrays.Room<RowStatus>(count)};
}

SampleArgs ArgsOf(Arrays& arrays, const SampleCase& c) {
  const int64_t words = c.mask ? MaskWords(c.vocab) : 0;
  std::mt19937_64 random(1);
  std::vector<int32_t> history(c.rows * c.history);
  for (int32_t& id : history) id = static_cast<int32_t>(random() % c.vocab);
  std::vector<uint32_t> mask(c.rows * words);
  for (uint32_t& word : mask) word = static_cast<uint32_t>(random());
  std::vector<SampleRow> rows(c.rows, c.row);
  for (int64_t i = 0; i < c.rows; ++i) {
    rows[i].seed = i;
    rows[i].first_history = i * c.history;
    rows[i].history_count = c.history;
    rows[i].first_mask_word = c.mask ? i * words : -1;
    rows[i].first_top_entry = i * c.row.top_logprobs;
    rows[i].first_support_entry = i * c.row.want_support;
    rows[i].first_draw_entry = i * c.row.draws;
  }
  return {.logits = View(nullptr, c.dtype, c.rows, c.vocab),
          .rows = arrays.Put(rows),
          .history = arrays.Put(history),
          .mask_words = arrays.Put(mask),
          .edited = c.mask || c.history > 0 || AsksMore(c.row),
          .asks_more = AsksMore(c.row),
          .tokens = arrays.Room<int32_t>(c.rows),
          .logprobs = arrays.Room<float>(c.rows),
          .ranks = arrays.Room<int32_t>(c.rows),
          .logsumexp = arrays.Room<float>(c.rows),
          .top_ids = arrays.Room<int32_t>(c.rows * c.row.top_logprobs),
          .top_logprobs = arrays.Room<float>(c.rows * c.row.top_logprobs),
          .status = arrays.Room<RowStatus>(c.rows),
          .support_size = arrays.Room<int32_t>(c.rows),
          .support_ids = arrays.Room<int32_t>(c.rows * c.row.want_support),
          .support_logprobs = arrays.Room<float>(c.rows * c.row.want_support),
          .entropies = arrays.Room<float>(c.rows),
          .raw_entropies = arrays.Room<float>(c.rows),
          .draw_tokens = arrays.Room<int32_t>(c.rows * c.row.draws),
          .draw_logprobs = arrays.Room<float>(c.rows * c.row.draws)};
}

VerifyArgs ArgsOf(Arrays& arrays, const VerifyCase& c) {
  constexpr int32_t kListedDrafts = 64;
  const int64_t rows = c.rows.rows;
  const bool dense = c.kind == DraftKind::kDense;
  const auto count = static_cast<int32_t>(dense ? c.rows.vocab : kListedDrafts);
  const auto step = static_cast<int32_t>(c.rows.vocab / kListedDrafts);
  std::mt19937_64 random(1);
  std::vector<VerifyDraft> drafts(rows);
  std::vector<int32_t> ids;
  for (int64_t i = 0; i < rows; ++i) {
    const auto first_id = static_cast<int64_t>(ids.size());
    const auto drawn = static_cast<int32_t>(random() % kListedDrafts);
    for (int32_t j = 0; !dense && j < kListedDrafts; ++j)
      ids.push_back(j * step + static_cast<int32_t>(random() % step));
    drafts[i] = {.first_id = dense ? 0 : first_id,
                 .first_prob = i * count,
                 .token = dense ? drawn * step : ids[first_id + drawn],
                 .count = dense ? 0 : count,
                 .kind = c.kind};
  }
  const bool blocks = c.blocks != BlockSequences::kNone;
  std::vector<VerifySequence> sequences(rows / c.length);
  for (size_t i = 0; i < sequences.size(); ++i) {
    const bool block = blocks && (c.blocks == BlockSequences::kAll || i % 2 == 0);
    sequences[i] = {
        .first_row = static_cast<int64_t>(i) * c.length, .rows = c.length, .block = block ? 1 : 0};
  }
  SampleArgs sample = ArgsOf(arrays, c.rows);
  sample.edited |= blocks;
  sample.asks_more |= blocks;
  return {
      .sample = sample,
      .drafts = arrays.Put(drafts),
      .draft_ids = arrays.Put(ids),
      .draft_probs = arrays.Put(std::vector<float>(rows * count, 1 / static_cast<float>(count))),
      .sequences = arrays.Put(sequences),
      .sequence_count = static_cast<int64_t>(sequences.size()),
      .blocks = blocks,
      .accepted = arrays.Room<int32_t>(sequences.size())};
}

CrossEntropyArgs ArgsOf(Arrays& arrays, const CrossEntropyCase& c, int64_t ignored = 0) {
  std::mt19937_64 random(1);
  std::vector<CrossEntropyRow> rows(c.rows, c.row);
  for (int64_t i = 0; i < c.rows; ++i) {
    rows[i].target = static_cast<int32_t>(random() % static_cast<uint64_t>(c.vocab));
    rows[i].first_top_entry = i * c.row.top_logprobs;
    if ((i + 1) * ignored / c.rows > i * ignored / c.rows) rows[i].target = kIgnoredTarget;
  }
  return {.logits = View(nullptr, c.dtype, c.rows, c.vocab),
          .rows = arrays.Put(rows),
          .want = c.row.want,
          .max_top_logprobs = c.row.top_logprobs,
          .max_extra_ids = 0,
          .counted_rows = ignored > 0 ? c.rows - ignored : -1,
          .answers = {.loss = arrays.Room<float>(c.rows),
                      .logsumexp = arrays.Room<float>(c.rows),
                      .target_logprob = arrays.Room<float>(c.rows),
                      .rank = arrays.Room<int32_t>(c.rows),
                      .entropy = arrays.Room<float>(c.rows),
                      .top_ids = arrays.Room<int32_t>(c.rows * c.row.top_logprobs),
                      .top_logprobs = arrays.Room<float>(c.rows * c.row.top_logprobs),
                      .status = arrays.Room<RowStatus>(c.rows)}};
}

DivergenceArgs ArgsOf(Arrays& arrays, const DivergenceCase& c) {
  std::vector<DivergenceRow> rows(c.rows);
  for (int64_t i = 0; i < c.rows; ++i) {
    rows[i] = {1, static_cast<int32_t>(i % c.vocab), 1, 1};
  }
  return {.logits = View(nullptr, c.dtype, c.rows, c.vocab),
          .reference_logits = View(nullptr, c.dtype, c.rows, c.vocab),
          .rows = arrays.Put(rows),
          .answers = {.forward_kl = arrays.Room<float>(c.rows),
                      .reverse_kl = arrays.Room<float>(c.rows),
                      .entropy = arrays.Room<float>(c.rows),
                      .reference_entropy = arrays.Room<float>(c.rows),
                      .logsumexp = arrays.Room<float>(c.rows),
                      .reference_logsumexp = arrays.Room<float>(c.rows),
                      .target_logprob = arrays.Room<float>(c.rows),
                      .reference_target_logprob = arrays.Room<float>(c.rows),
                      .status = arrays.Room<RowStatus>(c.rows)}};
}

// A quarter of the elements hides its key.
std::vector<std::byte> MaskBytes(const AttentionCase& c) {
  if (c.mask == MaskKind::kNone) return {};
  const size_t size = c.mask == MaskKind::kBool ? 1 : SizeOf(c.dtype);
  const uint32_t hides = c.mask == MaskKind::kBool ? 1
                         : c.dtype == DType::kF32  ? 0xff800000u  // -inf, by its bits
                         : c.dtype == DType::kF16  ? 0xfc00u
                                                   : 0xff80u;
  std::vector<std::byte> mask(c.batch * c.queries * c.keys * size);
  std::mt19937 random(1);
  for (size_t at = 0; at < mask.size(); at += size) {
    if (random() % 4 == 0) std::memcpy(&mask[at], &hides, size);
  }
  return mask;
}

absl::StatusOr<double> TimeCase(const TopKCase& c, Device& device, Inputs& inputs) {
  Arrays arrays(device);
  SoftmaxTopKArgs args = TopKArgs(arrays, c.rows, c.k);
  args.logits = {nullptr, c.dtype, c.rows, c.vocab, c.row_stride};
  return TimeOverSets(device, inputs, arrays, c.dtype, TensorBytes(c.rows, c.row_stride, c.dtype),
                      /*overwritten=*/false, RepeatFor(c.FloorBytes()), [&](std::byte* set) {
                        args.logits.data = set;
                        return device.Run(args);
                      });
}

absl::StatusOr<double> TimeCase(const SampleCase& c, Device& device, Inputs& inputs) {
  Arrays arrays(device);
  SampleArgs args = ArgsOf(arrays, c);
  return TimeOverSets(device, inputs, arrays, c.dtype, TensorBytes(c.rows, c.vocab, c.dtype),
                      /*overwritten=*/false, RepeatFor(c.FloorBytes()), [&](std::byte* set) {
                        args.logits.data = set;
                        return device.Run(args);
                      });
}

absl::StatusOr<double> TimeCase(const VerifyCase& c, Device& device, Inputs& inputs) {
  Arrays arrays(device);
  VerifyArgs args = ArgsOf(arrays, c);
  const DType dtype = c.rows.dtype;
  return TimeOverSets(device, inputs, arrays, dtype, c.rows.FloorBytes(),
                      /*overwritten=*/false, RepeatFor(c.FloorBytes()), [&](std::byte* set) {
                        args.sample.logits.data = set;
                        return device.Run(args);
                      });
}

// Bytes of a tensor whose successor in a set is aligned.
size_t AlignedBytes(int64_t rows, int64_t cols, DType dtype) {
  return (static_cast<size_t>(TensorBytes(rows, cols, dtype)) + 255) / 256 * 256;
}

absl::StatusOr<double> TimeCase(const AttentionCase& c, Device& device, Inputs& inputs) {
  const int64_t rows = c.rows();
  const size_t bytes = AlignedBytes(rows, c.keys, c.dtype);
  const AttentionShape shape = {
      .batch = c.batch, .heads = c.heads, .queries = c.queries, .keys = c.keys, .rows = rows};
  Arrays arrays(device);
  // In memory of their own: in the buffer of inputs, tensors a power of two apart, two reads and a
  // write take up to 10% longer on an H200.
  const size_t set_bytes = (c.backward ? 3 : 2) * bytes;
  const size_t sets = std::max<size_t>(1, device.input_bytes() / set_bytes);
  std::byte* const tensors = arrays.Normals(c.dtype, sets * set_bytes / SizeOf(c.dtype));
  const std::byte* mask = arrays.Put(MaskBytes(c));
  float* logsumexp = arrays.Room<float>(rows);
  RowStatus* status = arrays.Room<RowStatus>(rows);
  const auto forward = [&](std::byte* set) {
    return device.Run(AttentionSoftmaxArgs{.shape = shape,
                                           .scores = View(set, c.dtype, rows, c.keys),
                                           .window = c.window,
                                           .mask = {.kind = c.mask,
                                                    .dtype = c.dtype,
                                                    .data = mask,
                                                    .batch_stride = c.queries * c.keys,
                                                    .query_stride = c.keys},
                                           .probs = MutableView(set + bytes, c.dtype, rows, c.keys),
                                           .logsumexp = logsumexp,
                                           .status = status});
  };
  const auto backward = [&](std::byte* set) {
    return device.Run(AttentionSoftmaxBackwardArgs{
        .shape = shape,
        .probs = View(set, c.dtype, rows, c.keys),
        .d_probs = View(set + bytes, c.dtype, rows, c.keys),
        .window = c.window,
        .d_scores = MutableView(set + 2 * bytes, c.dtype, rows, c.keys),
        .status = status});
  };
  LOGITD_RETURN_IF_ERROR(arrays.status());
  return device.Time(RepeatFor(c.FloorBytes()), [&](int i) {
    std::byte* const set = tensors + static_cast<size_t>(i) % sets * set_bytes;
    return c.backward ? backward(set) : forward(set);
  });
}

absl::StatusOr<double> TimeCase(const CrossEntropyCase& c, Device& device, Inputs& inputs) {
  const size_t bytes = AlignedBytes(c.rows, c.vocab, c.dtype);
  Arrays arrays(device);
  CrossEntropyArgs args = ArgsOf(arrays, c);
  CrossEntropyBackwardArgs backward = {.logits = args.logits,
                                       .rows = args.rows,
                                       // The logsumexp of normals, nearly.
                                       .logsumexp = arrays.Put(std::vector<float>(
                                           c.rows, std::log(static_cast<float>(c.vocab)) + 0.5f)),
                                       .upstream = arrays.Put(std::vector<float>(c.rows, 1.0f)),
                                       .d_logits = MutableView(nullptr, c.dtype, c.rows, c.vocab)};
  const bool has_gradient = c.op != LossOp::kForward;
  return TimeOverSets(device, inputs, arrays, c.dtype, (has_gradient ? 2 : 1) * bytes,
                      /*overwritten=*/has_gradient, RepeatFor(c.FloorBytes()), [&](std::byte* set) {
                        args.logits.data = backward.logits.data = set;
                        backward.d_logits.data = set + bytes;
                        if (c.op == LossOp::kForward) return device.Run(args);
                        if (c.op == LossOp::kBackward) return device.Run(backward);
                        const CrossEntropyTrainingArgs both = {
                            args, backward.upstream, backward.d_logits, c.row.softcap > 0};
                        if (c.op == LossOp::kTraining) return device.Run(both);
                        const absl::Status status = device.Run(both.loss);
                        return status.ok() ? device.Run(both.Backward()) : status;
                      });
}

absl::StatusOr<double> TimeCase(const DivergenceCase& c, Device& device, Inputs& inputs) {
  const size_t bytes = AlignedBytes(c.rows, c.vocab, c.dtype);
  Arrays arrays(device);
  DivergenceArgs args = ArgsOf(arrays, c);
  return TimeOverSets(device, inputs, arrays, c.dtype, 2 * bytes, /*overwritten=*/false,
                      RepeatFor(c.FloorBytes()), [&](std::byte* set) {
                        args.logits.data = set;
                        args.reference_logits.data = set + bytes;
                        return device.Run(args);
                      });
}

absl::StatusOr<double> TimeCase(const HeadCase& c, Device& device, Inputs& inputs) {
  Arrays arrays(device);
  // The device's normals are one sequence, which is the weights too: from half a row on, no state
  // is a token's weights, whose logit would be far above all others.
  std::byte* const states = arrays.Normals(c.dtype, (c.rows + 1) * c.hidden);
  const auto half = static_cast<size_t>(c.hidden / 2) * SizeOf(c.dtype);
  const TensorView hidden =
      View(states == nullptr ? nullptr : states + half, c.dtype, c.rows, c.hidden);
  // Small enough that the logits are a model's.
  HeadView head = {.weight = View(nullptr, c.dtype, c.vocab, c.hidden),
                   .scale = 1 / std::sqrt(static_cast<float>(c.hidden))};
  HeadView reference = head;
  const size_t weight_bytes = AlignedBytes(c.vocab, c.hidden, c.dtype);
  const size_t set_bytes = (HasTwoHeads(c.op) ? 2 : 1) * weight_bytes;
  const auto time = [&](const auto& launch) {
    return TimeOverSets(device, inputs, arrays, c.dtype, set_bytes,
                        /*overwritten=*/false, RepeatForProduct(c.rows), [&](std::byte* set) {
                          head.weight.data = set;
                          reference.weight.data = set + weight_bytes;
                          return launch();
                        });
  };
  if (c.op == HeadOp::kTopK) {
    const SoftmaxTopKArgs topk = TopKArgs(arrays, c.rows, /*k=*/20);
    return time([&] { return device.Run(LinearTopKArgs{hidden, head, topk}); });
  }
  const SampleCase rows = {.rows = c.rows,
                           .vocab = c.vocab,
                           .dtype = DType::kF32,
                           .row = {.active = 1,
                                   .temperature = 1,
                                   .top_k = 50,
                                   .top_p = 0.9f,
                                   .repetition = 1,
                                   .typical_p = 1,
                                   .want_rank = true}};
  if (c.op == HeadOp::kSample) {
    const SampleArgs sample = ArgsOf(arrays, rows);
    return time([&] { return device.Run(LinearSampleArgs{hidden, head, sample}); });
  }
  if (c.op == HeadOp::kVerify || c.op == HeadOp::kBlockVerify) {
    const VerifyArgs verify =
        ArgsOf(arrays, VerifyCase{.rows = rows,
                                  .length = kHeadSequenceRows,
                                  .blocks = c.op == HeadOp::kBlockVerify ? BlockSequences::kAll
                                                                         : BlockSequences::kNone});
    return time([&] { return device.Run(LinearVerifyArgs{hidden, head, verify}); });
  }
  if (c.op == HeadOp::kDivergence) {
    const DivergenceArgs divergence =
        ArgsOf(arrays, DivergenceCase{.rows = c.rows, .vocab = c.vocab, .dtype = DType::kF32});
    return time([&] {
      return device.Run(LinearDivergenceArgs{hidden, head, hidden, reference, divergence});
    });
  }
  const auto tensor = [&](int64_t rows, int64_t cols) {
    const DType dtype = device.product_dtype(c.dtype);
    std::byte* data = arrays.Room<std::byte>(rows * cols * SizeOf(dtype));
    return MutableView(data, dtype, rows, cols);
  };
  const auto upstream = [&] {
    return arrays.Put(std::vector<float>(c.rows, 1 / static_cast<float>(c.rows)));
  };
  if (c.op == HeadOp::kDivergenceTraining) {
    LinearDivergenceTrainingArgs training = {
        .hidden = hidden,
        .reference_hidden = hidden,
        .rows = arrays.Put(std::vector<DivergenceRow>(c.rows, {1, kIgnoredTarget, 1, 1})),
        .upstream = upstream(),
        .kind = c.loss,
        .loss = arrays.Room<float>(c.rows),
        .status = arrays.Room<RowStatus>(c.rows),
        .memory = arrays.Room<DivergenceTrainingRow>(c.rows),
        .d_hidden = tensor(c.rows, c.hidden),
        .d_weight = tensor(c.vocab, c.hidden)};
    return time([&] {
      training.head = head;
      training.reference_head = reference;
      return device.Run(training);
    });
  }
  const CrossEntropyArgs loss = ArgsOf(
      arrays,
      CrossEntropyCase{.rows = c.rows, .vocab = c.vocab, .row = {.active = 1, .temperature = 1}},
      c.ignored);
  if (c.op == HeadOp::kCrossEntropy)
    return time([&] { return device.Run(LinearCrossEntropyArgs{hidden, head, loss}); });
  LinearCrossEntropyTrainingArgs training = {.gradient = {.hidden = hidden,
                                                          .rows = loss.rows,
                                                          .upstream = upstream(),
                                                          .d_hidden = tensor(c.rows, c.hidden),
                                                          .d_weight = tensor(c.vocab, c.hidden),
                                                          .counted_rows = loss.counted_rows},
                                             .answers = loss.answers};
  return time([&] {
    training.gradient.head = head;
    return device.Run(training);
  });
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

absl::StatusOr<double> Time(const Case& shape, Device& device, Inputs& inputs) {
  return std::visit([&](const auto& c) { return TimeCase(c, device, inputs); }, shape);
}

absl::StatusOr<double> TimeProduct(const HeadCase& c, Device& device, Inputs& inputs) {
  const DType dtype = device.product_dtype(c.dtype);
  Arrays arrays(device);
  BareProduct product = {.dtype = dtype,
                         .rows = c.rows,
                         .hidden = c.hidden,
                         .vocab = c.vocab,
                         .states = arrays.Normals(dtype, c.rows * c.hidden),
                         .logits_stride = (c.vocab + 31) / 32 * 32};
  product.logits = arrays.Room<std::byte>(c.rows * product.logits_stride * SizeOf(dtype));
  return TimeOverSets(device, inputs, arrays, dtype, TensorBytes(c.vocab, c.hidden, dtype),
                      /*overwritten=*/false, RepeatForProduct(c.rows), [&](std::byte* set) {
                        product.weight = set;
                        return device.Run(product);
                      });
}

}  // namespace logitd::bench
