// softmax_topk and sample.
#include <cstdint>

#include "kernels/c_api/fields.h"
#include "kernels/checks.h"
#include "kernels/linear.h"
#include "kernels/sample.h"
#include "kernels/softmax_topk.h"
#include "kernels/status_macros.h"

namespace logitd::c_api {
namespace {

absl::Status Run(Device& device, const logitd_call& call, const logitd_softmax_topk& op) {
  Input input;
  LOGITD_RETURN_IF_ERROR(ReadInput(op.input, op.head, input));
  LOGITD_RETURN_IF_ERROR(CheckRange("k", op.k, 1, input.vocab()));
  LOGITD_RETURN_IF_ERROR(CheckPointer("indices", op.indices));
  LOGITD_RETURN_IF_ERROR(CheckPointer("probs", op.probs));
  LOGITD_RETURN_IF_ERROR(device.Begin(call, input.tensor.rows));
  RowMaker<SoftmaxTopKRow> rows(device, input.tensor.rows, input.vocab());
  rows.row = {.temperature = 1, .k = static_cast<int32_t>(op.k)};
  rows.Add("temperature", op.temperature, kSoftmaxTopKParams);
  LOGITD_RETURN_IF_ERROR(CheckSoftmaxTopK({.vocab = input.vocab(), .params = {&rows.row, 1}}));
  rows.Step(rows.row.first_entry, op.k);
  SoftmaxTopKArgs args = {.max_k = rows.row.k,
                          .indices = rows.Answer(op.indices, op.k),
                          .probs = rows.Answer(op.probs, op.k),
                          .logsumexp = rows.Answer(op.logsumexp),
                          .status = rows.Status(op.status)};
  LOGITD_RETURN_IF_ERROR(rows.Fill(args.rows));
  if (input.linear) {
    const LinearTopKArgs linear = {.hidden = input.tensor, .head = input.head, .topk = args};
    return device.Run(&linear);
  }
  args.logits = input.tensor;
  return device.Run(&args);
}

using SampleRows = RowMaker<SampleRow>;

absl::Status CheckWanted(std::string_view field, int32_t count, const void* answers) {
  return count > 0 ? CheckPointer(field, answers) : absl::OkStatus();
}

absl::Status CheckAnswers(const logitd_sample& op) {
  LOGITD_RETURN_IF_ERROR(CheckWanted("top_ids", op.top_logprobs, op.top_ids));
  LOGITD_RETURN_IF_ERROR(CheckWanted("top_values", op.top_logprobs, op.top_values));
  LOGITD_RETURN_IF_ERROR(CheckRange("extra_count", op.extra_count, 0, kMaxExtraIds));
  LOGITD_RETURN_IF_ERROR(CheckWanted("extra_ids", op.extra_count, op.extra_ids));
  LOGITD_RETURN_IF_ERROR(CheckWanted("extra_logprobs", op.extra_count, op.extra_logprobs));
  LOGITD_RETURN_IF_ERROR(CheckWanted("support_ids", op.want_support, op.support_ids));
  LOGITD_RETURN_IF_ERROR(CheckWanted("support_logprobs", op.want_support, op.support_logprobs));
  LOGITD_RETURN_IF_ERROR(CheckWanted("draw_tokens", op.draws, op.draw_tokens));
  LOGITD_RETURN_IF_ERROR(CheckWanted("draw_logprobs", op.draws, op.draw_logprobs));
  LOGITD_RETURN_IF_ERROR(CheckRange("want_rank", op.want_rank, 0, 1));
  return CheckRange("want_entropy", op.want_entropy, 0, 1);
}

absl::Status CheckLists(const logitd_sample& op) {
  if (op.history.values != nullptr)
    LOGITD_RETURN_IF_ERROR(CheckPointer("history offsets", op.history.offsets));
  if (op.bias.values != nullptr)
    LOGITD_RETURN_IF_ERROR(CheckPointer("bias offsets", op.bias.offsets));
  return absl::OkStatus();
}

// Parameters 1 to 17, and what all rows want.
absl::Status ReadRows(const logitd_sample& op, int64_t vocab, SampleRows& to) {
  SampleRow& row = to.row;
  row.first_mask_word = -1;
  row.active = 1;
  row.temperature = row.top_p = row.typical_p = row.repetition = 1;
  to.Add("seed", op.seed, kSampleParams);
  to.Add("position", op.position, kSampleParams);
  to.Add("temperature", op.temperature, kSampleParams);
  to.Add("top_k", op.top_k, kSampleParams);
  to.Add("top_p", op.top_p, kSampleParams);
  to.Add("top_n_sigma", op.top_n_sigma, kSampleParams);
  to.Add("min_p", op.min_p, kSampleParams);
  to.Add("typical_p", op.typical_p, kSampleParams);
  to.Add("xtc_threshold", op.xtc_threshold, kSampleParams);
  to.Add("xtc_probability", op.xtc_probability, kSampleParams);
  to.Add("repetition_penalty", op.repetition_penalty, kSampleParams);
  to.Add("presence_penalty", op.presence_penalty, kSampleParams);
  to.Add("frequency_penalty", op.frequency_penalty, kSampleParams);
  to.Add("prompt_tokens", op.prompt_tokens, kSampleParams);
  to.AddLists(op.history, kMaxHistory, row.first_history, row.history_count);
  to.AddLists(op.bias, vocab, row.first_bias, row.bias_count);
  to.AddExtra(op.extra_ids, op.extra_count);
  constexpr int32_t kPromptTokens = 14;
  to.KeepBelow(kPromptTokens, row.prompt_tokens, row.history_count);
  row.top_logprobs = op.top_logprobs;
  row.logprob_mode = static_cast<LogprobMode>(op.logprob_mode);
  row.want_support = op.want_support;
  row.draws = op.draws;
  row.watermark_key = op.watermark_key;
  row.watermark_width = op.watermark_width;
  row.want_rank = op.want_rank != 0;
  row.want_entropy = op.want_entropy != 0;
  SampleRow checked = row;
  if (op.history.values != nullptr) checked.prompt_tokens = 0;  // the device knows the histories
  LOGITD_RETURN_IF_ERROR(CheckSample({.vocab = vocab, .params = {&checked, 1}}));
  row.extra_count = op.extra_count;
  if (op.extra_count > 0) {
    to.Step(row.first_extra, op.extra_count);
    to.Step(row.first_extra_entry, op.extra_count);
  }
  if (op.mask != nullptr) to.Step(row.first_mask_word, MaskWords(vocab));
  if (op.top_logprobs > 0) to.Step(row.first_top_entry, op.top_logprobs);
  if (op.want_support > 0) to.Step(row.first_support_entry, op.want_support);
  if (op.draws > 0) to.Step(row.first_draw_entry, op.draws);
  return absl::OkStatus();
}

absl::Status Run(Device& device, const logitd_call& call, const logitd_sample& op) {
  Input input;
  LOGITD_RETURN_IF_ERROR(ReadInput(op.input, op.head, input));
  LOGITD_RETURN_IF_ERROR(CheckAnswers(op));
  LOGITD_RETURN_IF_ERROR(CheckLists(op));
  LOGITD_RETURN_IF_ERROR(device.Begin(call, input.tensor.rows));
  const int64_t vocab = input.vocab();
  SampleRows rows(device, input.tensor.rows, vocab);
  LOGITD_RETURN_IF_ERROR(ReadRows(op, vocab, rows));
  const SampleRow& row = rows.row;
  const bool edits =
      op.history.values != nullptr || op.bias.values != nullptr || op.mask != nullptr;
  const bool asks_more =
      AsksMore(row) || op.typical_p.each != nullptr || op.xtc_probability.each != nullptr;
  SampleArgs args = {.history = op.history.values,
                     .bias = reinterpret_cast<const SampleBias*>(op.bias.values),
                     .extra_ids = op.extra_ids,
                     .mask_words = op.mask,
                     .edited = edits || asks_more,
                     .asks_more = asks_more,
                     .tokens = rows.Answer(op.tokens),
                     .logprobs = rows.Answer(op.logprobs),
                     .ranks = rows.Answer(op.ranks),
                     .logsumexp = rows.Answer(op.logsumexp),
                     .top_ids = rows.Wanted(op.top_ids, op.top_logprobs),
                     .top_logprobs = rows.Wanted(op.top_values, op.top_logprobs),
                     .extra_logprobs = rows.Wanted(op.extra_logprobs, op.extra_count),
                     .status = rows.Status(op.status),
                     .support_size = rows.Answer(op.support_size),
                     .support_ids = rows.Wanted(op.support_ids, op.want_support),
                     .support_logprobs = rows.Wanted(op.support_logprobs, op.want_support),
                     .entropies = rows.Answer(op.entropies),
                     .raw_entropies = rows.Answer(op.raw_entropies),
                     .draw_tokens = rows.Wanted(op.draw_tokens, op.draws),
                     .draw_logprobs = rows.Wanted(op.draw_logprobs, op.draws)};
  LOGITD_RETURN_IF_ERROR(rows.Fill(args.rows));
  if (input.linear) {
    const LinearSampleArgs linear = {.hidden = input.tensor, .head = input.head, .sample = args};
    return device.Run(&linear);
  }
  args.logits = input.tensor;
  return device.Run(&args);
}

}  // namespace
}  // namespace logitd::c_api

using logitd::c_api::Enter;

int32_t logitd_run_softmax_topk(logitd_context* context, const logitd_call* call,
                                const logitd_softmax_topk* op) {
  return Enter<logitd_softmax_topk, logitd::c_api::Run>(context, call, op);
}

int32_t logitd_run_sample(logitd_context* context, const logitd_call* call,
                          const logitd_sample* op) {
  return Enter<logitd_sample, logitd::c_api::Run>(context, call, op);
}
