// cross_entropy, its backward, both in one, and divergence_training.
#include <cstdint>

#include "absl/strings/str_format.h"
#include "kernels/c_api/fields.h"
#include "kernels/checks.h"
#include "kernels/cross_entropy_training.h"
#include "kernels/divergence_training.h"
#include "kernels/linear.h"
#include "kernels/shard_gradients.h"
#include "kernels/status_macros.h"

namespace logitd::c_api {
namespace {

using LossRows = RowMaker<CrossEntropyRow>;

// The tokens that targets are of: all, or more than a shard has.
int64_t VocabOf(const logitd_loss_rows& from, const Input& input) {
  return from.vocab == 0 ? input.vocab() : from.vocab;
}

absl::Status CheckShard(const logitd_loss_rows& from, const Input& input, bool allowed) {
  if (from.vocab == 0 && from.first_token == 0) return absl::OkStatus();
  if (!allowed) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "rows.vocab: got a shard of %d, allowed 0: only the backward with a head takes shards",
        from.vocab));
  }
  LOGITD_RETURN_IF_ERROR(CheckRange("rows.vocab", from.vocab, input.vocab(), kMaxVocab));
  return CheckRange("rows.first_token", from.first_token, 0, from.vocab - input.vocab());
}

// Parameters 1 to 4.
absl::Status ReadRows(const logitd_loss_rows& from, const Input& input, int32_t top_logprobs,
                      LossRows& to) {
  LOGITD_RETURN_IF_ERROR(CheckPointer("targets", from.targets));
  const int64_t vocab = VocabOf(from, input);
  if (from.ignore_index >= 0 && from.ignore_index < vocab) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "ignore_index: got %d, allowed below 0, or %d or more", from.ignore_index, vocab));
  }
  if (input.linear && from.softcap != 0) {
    return absl::InvalidArgumentError(
        absl::StrFormat("rows.softcap: got %g, allowed 0: the head has its own", from.softcap));
  }
  LOGITD_RETURN_IF_ERROR(CheckRange("counted_rows", from.counted_rows, 0, input.tensor.rows));
  to.row.active = 1;
  to.row.target = kIgnoredTarget;
  to.row.temperature = 1;
  to.row.softcap = from.softcap;
  to.row.smoothing = static_cast<Smoothing>(from.smoothing);
  to.row.top_logprobs = top_logprobs;
  to.AddTarget(from.targets, from.ignore_index, to.row.target);
  to.Add("temperature", from.temperature, kCrossEntropyParams);
  to.Add("label_smoothing", from.label_smoothing, kCrossEntropyParams);
  to.Add("z_loss", from.z_loss, kCrossEntropyParams);
  return CheckCrossEntropy({.vocab = input.vocab(), .params = {&to.row, 1}});
}

// 0 stands for "not known".
int64_t CountedRows(const logitd_loss_rows& from) {
  return from.counted_rows == 0 ? -1 : from.counted_rows;
}

// The reduction that an op asks for, with its weights made; rows 0 where it asks for none.
absl::Status ReadReduction(Device& device, int32_t kind, float* total, const logitd_loss_rows& from,
                           int64_t rows, Reduction& to) {
  LOGITD_RETURN_IF_ERROR(CheckRange("reduction", kind, LOGITD_REDUCE_NONE, LOGITD_REDUCE_MEAN));
  if (kind == LOGITD_REDUCE_NONE) return absl::OkStatus();
  LOGITD_RETURN_IF_ERROR(CheckPointer("total", total));
  to = {.rows = rows,
        .targets = from.targets,
        .ignored = from.ignore_index,
        .mean = kind == LOGITD_REDUCE_MEAN,
        .weights = device.Take<float>(rows + 1),
        .total = total};
  return device.Weigh(to);
}

// Runs an op that writes losses, then reduces them.
absl::Status RunAndReduce(Device& device, const Op& op, Reduction& reduction, const float* losses) {
  LOGITD_RETURN_IF_ERROR(device.Run(op));
  if (reduction.rows == 0) return absl::OkStatus();
  reduction.losses = losses;
  return device.Total(reduction);
}

absl::Status Run(Device& device, const logitd_call& call, const logitd_cross_entropy& op) {
  Input input;
  LOGITD_RETURN_IF_ERROR(ReadInput(op.input, op.head, input));
  LOGITD_RETURN_IF_ERROR(CheckShard(op.rows, input, /*allowed=*/false));
  if (op.top_logprobs > 0) {
    LOGITD_RETURN_IF_ERROR(CheckPointer("top_ids", op.top_ids));
    LOGITD_RETURN_IF_ERROR(CheckPointer("top_values", op.top_values));
  }
  LOGITD_RETURN_IF_ERROR(device.Begin(call, input.tensor.rows));
  LossRows rows(device, input.tensor.rows, VocabOf(op.rows, input));
  LOGITD_RETURN_IF_ERROR(ReadRows(op.rows, input, op.top_logprobs, rows));
  rows.row.want = (op.rank != nullptr ? kWantRank : 0) | (op.entropy != nullptr ? kWantEntropy : 0);
  if (op.top_logprobs > 0) rows.Step(rows.row.first_top_entry, op.top_logprobs);
  CrossEntropyArgs args = {.want = rows.row.want,
                           .max_top_logprobs = op.top_logprobs,
                           .max_extra_ids = 0,
                           .counted_rows = CountedRows(op.rows)};
  args.answers = {.loss = rows.Answer(op.loss),
                  .logsumexp = rows.Answer(op.logsumexp),
                  .target_logprob = rows.Answer(op.target_logprob),
                  .rank = rows.Answer(op.rank),
                  .entropy = rows.Answer(op.entropy),
                  .top_ids = rows.Wanted(op.top_ids, op.top_logprobs),
                  .top_logprobs = rows.Wanted(op.top_values, op.top_logprobs),
                  .status = rows.Status(op.status)};
  Reduction reduction;
  LOGITD_RETURN_IF_ERROR(
      ReadReduction(device, op.reduction, op.total, op.rows, input.tensor.rows, reduction));
  LOGITD_RETURN_IF_ERROR(rows.Fill(args.rows));
  if (input.linear) {
    const LinearCrossEntropyArgs linear = {
        .hidden = input.tensor, .head = input.head, .cross_entropy = args};
    return RunAndReduce(device, &linear, reduction, args.answers.loss);
  }
  args.logits = input.tensor;
  return RunAndReduce(device, &args, reduction, args.answers.loss);
}

absl::Status CheckNoNorm(const HeadView& head) {
  if (head.norm == nullptr) return absl::OkStatus();
  return absl::InvalidArgumentError("norm: got one, allowed none where gradients are wanted");
}

// Destinations of gradients. `logits` is set where there is no head.
struct Gradients {
  MutableTensorView logits, hidden, weight;
  float* bias = nullptr;
};

absl::Status ReadGradients(const Input& input, const logitd_tensor& d_input,
                           const logitd_tensor& d_weight, float* d_bias, LossRows& rows,
                           Gradients& to) {
  const TensorView& of = input.tensor;
  if (!input.linear) {
    LOGITD_RETURN_IF_ERROR(
        ReadOutput("d_input", d_input, of.rows, of.cols, of.dtype, /*or_f32=*/false, to.logits));
    rows.Answer(to.logits);
    return absl::OkStatus();
  }
  LOGITD_RETURN_IF_ERROR(CheckNoNorm(input.head));
  if (d_input.data != nullptr) {
    LOGITD_RETURN_IF_ERROR(
        ReadOutput("d_input", d_input, of.rows, of.cols, of.dtype, /*or_f32=*/true, to.hidden));
    rows.Answer(to.hidden);
  }
  if (d_weight.data != nullptr) {
    LOGITD_RETURN_IF_ERROR(ReadOutput("d_weight", d_weight, input.head.vocab(), of.cols, of.dtype,
                                      /*or_f32=*/true, to.weight));
  }
  to.bias = d_bias;
  return absl::OkStatus();
}

LinearCrossEntropyBackwardArgs LinearBackward(const Input& input, const Gradients& to,
                                              const float* upstream, int64_t counted_rows) {
  return {.hidden = input.tensor,
          .head = input.head,
          .upstream = upstream,
          .d_hidden = to.hidden,
          .d_weight = to.weight,
          .d_bias = to.bias,
          .counted_rows = counted_rows};
}

absl::Status Run(Device& device, const logitd_call& call, const logitd_cross_entropy_backward& op) {
  Input input;
  LOGITD_RETURN_IF_ERROR(ReadInput(op.input, op.head, input));
  LOGITD_RETURN_IF_ERROR(CheckShard(op.rows, input, /*allowed=*/input.linear));
  LOGITD_RETURN_IF_ERROR(CheckPointer("logsumexp", op.logsumexp));
  LOGITD_RETURN_IF_ERROR(CheckPointer("upstream", op.upstream));
  LOGITD_RETURN_IF_ERROR(device.Begin(call, input.tensor.rows));
  LossRows rows(device, input.tensor.rows, VocabOf(op.rows, input));
  LOGITD_RETURN_IF_ERROR(ReadRows(op.rows, input, 0, rows));
  Gradients to;
  LOGITD_RETURN_IF_ERROR(ReadGradients(input, op.d_input, op.d_weight, op.d_bias, rows, to));
  rows.Status(nullptr);
  const CrossEntropyRow* made = nullptr;
  LOGITD_RETURN_IF_ERROR(rows.Fill(made));
  if (!input.linear) {
    const CrossEntropyBackwardArgs args = {.logits = input.tensor,
                                           .rows = made,
                                           .logsumexp = op.logsumexp,
                                           .upstream = op.upstream,
                                           .d_logits = to.logits};
    return device.Run(&args);
  }
  LinearCrossEntropyBackwardArgs args =
      LinearBackward(input, to, op.upstream, CountedRows(op.rows));
  args.rows = made;
  args.logsumexp = op.logsumexp;
  if (op.rows.vocab == 0) return device.Run(&args);
  if (to.hidden.data == nullptr || to.hidden.dtype != DType::kF32) {
    return absl::InvalidArgumentError("d_input: got none or 16 bits, allowed f32 for a shard");
  }
  const LinearCrossEntropyBackwardPartialArgs partial = {
      .shard = {.first = op.rows.first_token, .tokens = input.vocab()},
      .vocab = op.rows.vocab,
      .gradient = args};
  return device.Run(&partial);
}

absl::Status Run(Device& device, const logitd_call& call, const logitd_cross_entropy_training& op) {
  Input input;
  LOGITD_RETURN_IF_ERROR(ReadInput(op.input, op.head, input));
  LOGITD_RETURN_IF_ERROR(CheckShard(op.rows, input, /*allowed=*/false));
  LOGITD_RETURN_IF_ERROR(CheckPointer("d_input", op.d_input.data));
  LOGITD_RETURN_IF_ERROR(device.Begin(call, input.tensor.rows));
  LossRows rows(device, input.tensor.rows, VocabOf(op.rows, input));
  LOGITD_RETURN_IF_ERROR(ReadRows(op.rows, input, 0, rows));
  Gradients to;
  LOGITD_RETURN_IF_ERROR(ReadGradients(input, op.d_input, op.d_weight, op.d_bias, rows, to));
  const CrossEntropyAnswers answers = {.loss = rows.Answer(op.loss),
                                       .logsumexp = rows.Answer(op.logsumexp),
                                       .target_logprob = rows.Answer(op.target_logprob),
                                       .status = rows.Status(op.status)};
  Reduction reduction;
  LOGITD_RETURN_IF_ERROR(
      ReadReduction(device, op.reduction, op.total, op.rows, input.tensor.rows, reduction));
  const float* const upstream = reduction.rows > 0 ? reduction.weights : op.upstream;
  LOGITD_RETURN_IF_ERROR(CheckPointer("upstream", upstream));
  const CrossEntropyRow* made = nullptr;
  LOGITD_RETURN_IF_ERROR(rows.Fill(made));
  if (!input.linear) {
    const CrossEntropyTrainingArgs args = {.loss = {.logits = input.tensor,
                                                    .rows = made,
                                                    .want = 0,
                                                    .max_top_logprobs = 0,
                                                    .max_extra_ids = 0,
                                                    .counted_rows = CountedRows(op.rows),
                                                    .answers = answers},
                                           .upstream = upstream,
                                           .d_logits = to.logits,
                                           .softcap = op.rows.softcap > 0};
    return RunAndReduce(device, &args, reduction, answers.loss);
  }
  LinearCrossEntropyTrainingArgs args = {
      .gradient = LinearBackward(input, to, upstream, CountedRows(op.rows)), .answers = answers};
  args.gradient.rows = made;
  return RunAndReduce(device, &args, reduction, answers.loss);
}

absl::Status Run(Device& device, const logitd_call& call, const logitd_divergence_training& op) {
  LOGITD_RETURN_IF_ERROR(CheckPointer("head", op.head));
  LOGITD_RETURN_IF_ERROR(CheckPointer("reference_head", op.reference_head));
  LOGITD_RETURN_IF_ERROR(CheckPointer("upstream", op.upstream));
  LinearDivergenceTrainingArgs args;
  LOGITD_RETURN_IF_ERROR(ReadHead(*op.head, args.head));
  LOGITD_RETURN_IF_ERROR(ReadHead(*op.reference_head, args.reference_head));
  LOGITD_RETURN_IF_ERROR(ReadHidden("hidden", op.hidden, args.head, args.hidden));
  LOGITD_RETURN_IF_ERROR(ReadHidden("reference_hidden", op.reference_hidden, args.reference_head,
                                    args.reference_hidden));
  const int64_t count = args.hidden.rows;
  LOGITD_RETURN_IF_ERROR(
      CheckRange("reference_hidden rows", args.reference_hidden.rows, count, count));
  const int64_t vocab = args.head.vocab();
  LOGITD_RETURN_IF_ERROR(CheckRange("reference vocab", args.reference_head.vocab(), vocab, vocab));
  LOGITD_RETURN_IF_ERROR(device.Begin(call, count));
  RowMaker<DivergenceRow> rows(device, count, vocab);
  rows.row = {.active = 1, .target = kIgnoredTarget, .temperature = 1, .reference_temperature = 1};
  rows.Add("temperature", op.temperature, kDivergenceParams);
  rows.Add("reference_temperature", op.reference_temperature, kDivergenceParams);
  args.kind = static_cast<DivergenceLoss>(op.kind);
  args.beta = args.kind == DivergenceLoss::kJensenShannon ? op.beta : 0.5f;
  LOGITD_RETURN_IF_ERROR(CheckRange("kind", op.kind, 0, kDivergenceLosses - 1));
  LOGITD_RETURN_IF_ERROR(
      CheckDivergenceTraining({.rows = {.vocab = vocab, .params = {&rows.row, 1}},
                               .kind = args.kind,
                               .beta = args.beta,
                               .head_has_norm = args.head.norm != nullptr}));
  const DType dtype = args.head.weight.dtype;
  const int64_t hidden = args.head.hidden();
  if (op.d_hidden.data != nullptr) {
    LOGITD_RETURN_IF_ERROR(ReadOutput("d_hidden", op.d_hidden, count, hidden, dtype,
                                      /*or_f32=*/true, args.d_hidden));
    rows.Answer(args.d_hidden);
  }
  if (op.d_weight.data != nullptr) {
    LOGITD_RETURN_IF_ERROR(ReadOutput("d_weight", op.d_weight, vocab, hidden, dtype,
                                      /*or_f32=*/true, args.d_weight));
  }
  args.d_bias = op.d_bias;
  args.upstream = op.upstream;
  args.loss = rows.Answer(op.loss);
  args.status = rows.Status(op.status);
  args.memory = device.Take<DivergenceTrainingRow>(count);
  LOGITD_RETURN_IF_ERROR(rows.Fill(args.rows));
  return device.Run(&args);
}

}  // namespace
}  // namespace logitd::c_api

using logitd::c_api::Enter;

int32_t logitd_run_cross_entropy(logitd_context* context, const logitd_call* call,
                                 const logitd_cross_entropy* op) {
  return Enter<logitd_cross_entropy, logitd::c_api::Run>(context, call, op);
}

int32_t logitd_run_cross_entropy_backward(logitd_context* context, const logitd_call* call,
                                          const logitd_cross_entropy_backward* op) {
  return Enter<logitd_cross_entropy_backward, logitd::c_api::Run>(context, call, op);
}

int32_t logitd_run_cross_entropy_training(logitd_context* context, const logitd_call* call,
                                          const logitd_cross_entropy_training* op) {
  return Enter<logitd_cross_entropy_training, logitd::c_api::Run>(context, call, op);
}

int32_t logitd_run_divergence_training(logitd_context* context, const logitd_call* call,
                                       const logitd_divergence_training* op) {
  return Enter<logitd_divergence_training, logitd::c_api::Run>(context, call, op);
}
