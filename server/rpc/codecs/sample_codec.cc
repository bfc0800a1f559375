#include "server/rpc/codecs/sample_codec.h"

#include <algorithm>
#include <cstring>
#include <string_view>
#include <utility>

#include "absl/strings/str_format.h"
#include "kernels/status_macros.h"
#include "logitd/v1/sampler.pb.h"
#include "server/rpc/codecs/codec_parts.h"

namespace logitd::rpc {
namespace {

absl::Status EnqueueSample(Stream& stream, const engine::BatchView& batch) {
  return stream.Sample(SampleArgsOf(batch));
}

absl::Status EnqueueLinearSample(Stream& stream, const engine::BatchView& batch) {
  return stream.LinearSample(
      {.hidden = PayloadOf(batch), .head = *batch.head, .sample = SampleArgsOf(batch)});
}

constexpr auto kFields =
    JoinTables(JoinTables(LogitsFieldTable<SampleFields>(), HiddenFieldTable<SampleFields>()),
               SampleParameterTable<SampleFields>());

// The table goes by numbers; these are what they must be.
static_assert(v1::SampleRequest::kSeedFieldNumber == 16);
static_assert(v1::SampleRequest::kLogprobModeFieldNumber == 26);
static_assert(v1::SampleRequest::kHistoryFieldNumber == 28);
static_assert(v1::SampleRequest::kLogitBiasFieldNumber == 31);
static_assert(v1::SampleRequest::kAllowedTokensMaskFieldNumber == 35);
static_assert(v1::LOGPROB_MODE_RAW == static_cast<int>(LogprobMode::kRaw));
static_assert(v1::LOGPROB_MODE_PROCESSED == static_cast<int>(LogprobMode::kProcessed));

}  // namespace

const engine::OpTraits kSampleTraits = {
    .name = "sample",
    .inputs = kSampleInputArrays,
    .outputs = kSampleOutputArrays,
    .enqueue = &EnqueueSample,
};

const engine::OpTraits kLinearSampleTraits = {
    .name = "linear_sample",
    .inputs = kSampleInputArrays,
    .outputs = kSampleOutputArrays,
    .enqueue = &EnqueueLinearSample,
};

// An input array, or null where the batch has nothing for it.
template <class T>
static const T* InputOrNull(const engine::BatchView& batch, int array, int axis) {
  return batch.counts[axis] == 0 ? nullptr : reinterpret_cast<const T*>(batch.inputs[array]);
}

SampleArgs SampleArgsOf(const engine::BatchView& batch) {
  return {
      .logits = PayloadOf(batch),
      .rows = reinterpret_cast<const SampleRow*>(batch.inputs[kSampleInRows]),
      .history = InputOrNull<int32_t>(batch, kSampleInHistory, kSampleHistory),
      .bias = InputOrNull<SampleBias>(batch, kSampleInBias, kSampleBias),
      .extra_ids = reinterpret_cast<const int32_t*>(batch.inputs[kSampleInExtraIds]),
      .mask_words = reinterpret_cast<const uint32_t*>(batch.inputs[kSampleInMaskWords]),
      .edited = batch.counts[kSampleHistory] > 0 || batch.counts[kSampleBias] > 0 ||
                batch.counts[kSampleMaskWords] > 0,
      .tokens = reinterpret_cast<int32_t*>(batch.outputs[kSampleTokens]),
      .logprobs = reinterpret_cast<float*>(batch.outputs[kSampleLogprobs]),
      .ranks = reinterpret_cast<int32_t*>(batch.outputs[kSampleRanks]),
      .logsumexp = reinterpret_cast<float*>(batch.outputs[kSampleLogsumexp]),
      .top_ids = reinterpret_cast<int32_t*>(batch.outputs[kSampleTopIds]),
      .top_logprobs = reinterpret_cast<float*>(batch.outputs[kSampleTopLogprobs]),
      .extra_logprobs = reinterpret_cast<float*>(batch.outputs[kSampleExtraLogprobs]),
      .status = reinterpret_cast<RowStatus*>(batch.outputs[kSampleStatus]),
  };
}

absl::Status ParseSampleFields(Pieces pieces, size_t max_list, SampleFields* fields) {
  return ParseMessage<SampleFields>(pieces, kFields, max_list, fields);
}

absl::Status SampleBody::Build(Pieces pieces, int64_t max_rows, const FindHead& find_head,
                               SampleFields* fields, engine::JobSpec* spec) {
  LOGITD_RETURN_IF_ERROR(input_.Read(*fields, max_rows, find_head));
  const int64_t rows = input_.rows();
  LOGITD_RETURN_IF_ERROR(CheckCount("seed", fields->seed, rows));
  LOGITD_RETURN_IF_ERROR(CheckCount("position", fields->position, rows));
  LOGITD_RETURN_IF_ERROR(CheckCount("temperature", fields->temperature, rows));
  LOGITD_RETURN_IF_ERROR(CheckCount("top_k", fields->top_k, rows));
  LOGITD_RETURN_IF_ERROR(CheckCount("top_p", fields->top_p, rows));
  LOGITD_RETURN_IF_ERROR(CheckCount("min_p", fields->min_p, rows));
  LOGITD_RETURN_IF_ERROR(CheckCount("repetition_penalty", fields->repetition_penalty, rows));
  LOGITD_RETURN_IF_ERROR(CheckCount("presence_penalty", fields->presence_penalty, rows));
  LOGITD_RETURN_IF_ERROR(CheckCount("frequency_penalty", fields->frequency_penalty, rows));
  LOGITD_RETURN_IF_ERROR(CheckCount("top_logprobs", fields->top_logprobs, rows));
  LOGITD_RETURN_IF_ERROR(CheckCount("logprob_mode", fields->logprob_mode, rows));
  rows_.resize(static_cast<size_t>(rows));
  for (int64_t r = 0; r < rows; ++r) {
    rows_[r] = {
        .seed = ValueAt(fields->seed, r, uint64_t{0}),
        .position = ValueAt(fields->position, r, uint64_t{0}),
        .first_mask_word = -1,
        .first_top_entry = top_entries_,
        .active = 1,
        .temperature = ValueAt(fields->temperature, r, 1.0f),
        .top_k = ValueAt(fields->top_k, r, 0),
        .top_p = ValueAt(fields->top_p, r, 1.0f),
        .min_p = ValueAt(fields->min_p, r, 0.0f),
        .repetition = ValueAt(fields->repetition_penalty, r, 1.0f),
        .presence = ValueAt(fields->presence_penalty, r, 0.0f),
        .frequency = ValueAt(fields->frequency_penalty, r, 0.0f),
        .top_logprobs = ValueAt(fields->top_logprobs, r, 0),
        .logprob_mode = ValueAt(fields->logprob_mode, r, LogprobMode::kRaw),
    };
    top_entries_ += rows_[r].top_logprobs;
    if (fields->seed.empty() && rows_[r].temperature != 0) {
      return absl::InvalidArgumentError(
          absl::StrFormat("seed: none sent, but temperature is %g at row %d: a row that is drawn "
                          "at random needs one; allowed: 1 or %d (rows) values",
                          rows_[r].temperature, r, rows));
    }
  }
  LOGITD_RETURN_IF_ERROR(BuildLists(fields));
  LOGITD_RETURN_IF_ERROR(BuildMasks(pieces, *fields));
  spec->counts[kSampleRows] = rows;
  spec->counts[kSampleHistory] = static_cast<int64_t>(history_.size());
  spec->counts[kSampleBias] = static_cast<int64_t>(bias_.size());
  spec->counts[kSampleExtraIds] = static_cast<int64_t>(extra_ids_.size());
  spec->counts[kSampleMaskWords] = static_cast<int64_t>(mask_words_.size());
  spec->counts[kSampleTopEntries] = top_entries_;
  spec->counts[kSampleExtraEntries] = extra_entries_;
  return absl::OkStatus();
}

absl::Status SampleBody::BuildLists(SampleFields* fields) {
  const absl::Span<SampleRow> rows = absl::MakeSpan(rows_);
  history_ = std::move(fields->history);
  extra_ids_ = std::move(fields->extra_ids);
  LOGITD_RETURN_IF_ERROR(CutList("history", fields->history_count, history_.size(), rows,
                                 &SampleRow::first_history, &SampleRow::history_count));
  LOGITD_RETURN_IF_ERROR(CutList("extra", fields->extra_count, extra_ids_.size(), rows,
                                 &SampleRow::first_extra, &SampleRow::extra_count));
  for (SampleRow& row : rows) {
    row.first_extra_entry = extra_entries_;
    extra_entries_ += row.extra_count;
  }
  const size_t biases = fields->logit_bias_ids.size();
  if (fields->logit_bias.size() != biases) {
    return absl::InvalidArgumentError(
        absl::StrFormat("logit_bias: got %d values for %d logit_bias_ids, allowed one for each",
                        fields->logit_bias.size(), biases));
  }
  bias_.resize(biases);
  for (size_t i = 0; i < biases; ++i) {
    bias_[i] = {.id = fields->logit_bias_ids[i], .value = fields->logit_bias[i]};
  }
  return CutList("logit_bias", fields->logit_bias_count, biases, rows, &SampleRow::first_bias,
                 &SampleRow::bias_count);
}

absl::Status SampleBody::BuildMasks(Pieces pieces, const SampleFields& fields) {
  const auto rows = static_cast<int64_t>(rows_.size());
  const int64_t words = MaskWords(input_.vocab());
  const auto mask_bytes = words * static_cast<int64_t>(sizeof(uint32_t));
  const auto bytes = static_cast<int64_t>(fields.allowed_tokens.bytes);
  const int64_t masks = bytes / mask_bytes;
  if (bytes % mask_bytes != 0) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "allowed_tokens: got %d bytes, allowed a multiple of %d, the bytes of a mask of %d tokens",
        bytes, mask_bytes, input_.vocab()));
  }
  const IdList& of_row = fields.allowed_tokens_mask;
  LOGITD_RETURN_IF_ERROR(CheckCount("allowed_tokens_mask", of_row, rows));
  if (of_row.empty() && masks > 1 && masks != rows) {
    return absl::InvalidArgumentError(
        absl::StrFormat("allowed_tokens: got %d masks without allowed_tokens_mask to say whose "
                        "they are, allowed 1 or %d (rows)",
                        masks, rows));
  }
  for (int64_t r = 0; r < rows; ++r) {
    int64_t mask = masks > 1 ? r : masks - 1;
    if (!of_row.empty()) mask = ValueAt(of_row, r, int64_t{-1});
    if (mask < -1 || mask >= masks) {
      return absl::InvalidArgumentError(absl::StrFormat(
          "allowed_tokens_mask: got %d at row %d, allowed -1..%d: allowed_tokens holds %d masks",
          mask, r, masks - 1, masks));
    }
    rows_[r].first_mask_word = mask < 0 ? -1 : mask * words;
  }
  mask_words_.resize(static_cast<size_t>(masks * words));
  if (masks > 0) CopyRange(pieces, fields.allowed_tokens, mask_words_.data());
  return absl::OkStatus();
}

SampleRequest SampleBody::request() const {
  return {.dtype = input_.dtype(),
          .rows = input_.rows(),
          .vocab = input_.vocab(),
          .payload_bytes = input_.logits_bytes(),
          .params = rows_,
          .history = history_,
          .bias = bias_,
          .extra_ids = extra_ids_,
          .mask_words = mask_words_};
}

int64_t SampleBody::list_bytes() const {
  return static_cast<int64_t>(rows_.size() * sizeof(SampleRow) + history_.size() * sizeof(int32_t) +
                              bias_.size() * sizeof(SampleBias) +
                              extra_ids_.size() * sizeof(int32_t) +
                              mask_words_.size() * sizeof(uint32_t));
}

int64_t SampleBody::answer_bytes() const {
  constexpr int64_t kRowBytes = 4 * sizeof(float) + kMaxStatusBytes + 2 * 2;  // counts below 2^14
  constexpr int64_t kTopBytes = sizeof(int32_t) + sizeof(float);
  return kRowBytes * rows() + kTopBytes * top_entries_ +
         static_cast<int64_t>(sizeof(float)) * extra_entries_ + 9 * kMaxLengthHead + kMaxFixedBytes;
}

void SampleBody::WriteInputs(absl::Span<std::byte* const> inputs, const engine::AxisCounts& first) {
  std::byte* to = inputs[kSampleInRows];
  for (SampleRow row : rows_) {
    row.first_history += first[kSampleHistory];
    row.first_bias += first[kSampleBias];
    row.first_extra += first[kSampleExtraIds];
    if (row.first_mask_word >= 0) row.first_mask_word += first[kSampleMaskWords];
    row.first_top_entry += first[kSampleTopEntries];
    row.first_extra_entry += first[kSampleExtraEntries];
    std::memcpy(to, &row, sizeof(row));
    to += sizeof(row);
  }
  MoveOut(history_, inputs[kSampleInHistory]);
  MoveOut(bias_, inputs[kSampleInBias]);
  MoveOut(extra_ids_, inputs[kSampleInExtraIds]);
  MoveOut(mask_words_, inputs[kSampleInMaskWords]);
}

void SampleBody::Encode(absl::Span<const absl::Span<const std::byte>> outputs,
                        const CallTimes& times, WireWriter& writer) const {
  using Response = v1::SampleResponse;
  WriteArray(writer, Response::kTokensFieldNumber, outputs[kSampleTokens]);
  WriteArray(writer, Response::kLogprobsFieldNumber, outputs[kSampleLogprobs]);
  WriteArray(writer, Response::kRanksFieldNumber, outputs[kSampleRanks]);
  WriteArray(writer, Response::kLogsumexpFieldNumber, outputs[kSampleLogsumexp]);
  WriteStatus(writer, Response::kStatusFieldNumber, Response::kStatusPositionFieldNumber,
              outputs[kSampleStatus]);
  WriteVarints(writer, Response::kTopCountFieldNumber, rows(),
               [this](int64_t r) { return rows_[r].top_logprobs; });
  WriteArray(writer, Response::kTopIdsFieldNumber, outputs[kSampleTopIds]);
  WriteArray(writer, Response::kTopLogprobsFieldNumber, outputs[kSampleTopLogprobs]);
  WriteVarints(writer, Response::kExtraCountFieldNumber, rows(),
               [this](int64_t r) { return rows_[r].extra_count; });
  WriteArray(writer, Response::kExtraLogprobsFieldNumber, outputs[kSampleExtraLogprobs]);
  WriteTimings(writer, Response::kTimingsFieldNumber, times);
}

absl::Status SampleCodec::Parse(Pieces pieces, int64_t max_rows, engine::JobSpec* spec) {
  SampleFields fields;
  LOGITD_RETURN_IF_ERROR(ParseSampleFields(pieces, static_cast<size_t>(max_rows), &fields));
  LOGITD_RETURN_IF_ERROR(body_.Build(pieces, max_rows, find_head_, &fields, spec));
  body_.input().FillKey(kSampleTraits, kLinearSampleTraits, &spec->key);
  return CheckSample(body_.request());
}

// By hand into one slice, as TopKCodec does.
grpc::ByteBuffer SampleCodec::Encode(const engine::JobAnswer& answer, const CallTimes& times) {
  return WriteMessage(answer_bytes(),
                      [&](WireWriter& writer) { body_.Encode(answer.outputs, times, writer); });
}

}  // namespace logitd::rpc
