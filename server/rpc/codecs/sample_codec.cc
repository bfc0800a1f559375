#include "server/rpc/codecs/sample_codec.h"

#include <algorithm>
#include <utility>
#include <variant>

#include "absl/strings/str_format.h"
#include "kernels/status_macros.h"
#include "logitd/v1/sampler.pb.h"
#include "server/rpc/codecs/answer_fields.h"

namespace logitd::rpc {
namespace {

static_assert(v1::LOGPROB_MODE_RAW == static_cast<int>(LogprobMode::kRaw));
static_assert(v1::LOGPROB_MODE_PROCESSED == static_cast<int>(LogprobMode::kProcessed));
static_assert(v1::LOGPROB_MODE_TEMPERED == static_cast<int>(LogprobMode::kTempered));

constexpr RowList<SampleRow> kHistory = {"history", "history_count", &SampleRow::first_history,
                                         &SampleRow::history_count};
constexpr RowList<SampleRow> kExtraIds = {"extra_ids", "extra_count", &SampleRow::first_extra,
                                          &SampleRow::extra_count};
constexpr RowList<SampleRow> kLogitBias = {"logit_bias", "logit_bias_count", &SampleRow::first_bias,
                                           &SampleRow::bias_count};

absl::Status BuildLists(SampleFields* fields, ops::SampleRows* rows) {
  const absl::Span<SampleRow> all = absl::MakeSpan(rows->rows);
  rows->history = std::move(fields->history);
  rows->extra_ids = std::move(fields->extra_ids);
  LOGITD_RETURN_IF_ERROR(CutList(kHistory, fields->history_count, rows->history.size(), all));
  LOGITD_RETURN_IF_ERROR(CutList(kExtraIds, fields->extra_count, rows->extra_ids.size(), all));
  const size_t biases = fields->logit_bias_ids.size();
  if (fields->logit_bias.size() != biases) {
    return absl::InvalidArgumentError(
        absl::StrFormat("logit_bias: got %d values, allowed %d, one for each of logit_bias_ids",
                        fields->logit_bias.size(), biases));
  }
  rows->bias.resize(biases);
  for (size_t i = 0; i < biases; ++i) {
    rows->bias[i] = {.id = fields->logit_bias_ids[i], .value = fields->logit_bias[i]};
  }
  return CutList(kLogitBias, fields->logit_bias_count, biases, all);
}

absl::Status BuildMasks(Pieces pieces, const SampleFields& fields, int64_t vocab,
                        ops::SampleRows* rows) {
  const auto row_count = static_cast<int64_t>(rows->rows.size());
  const int64_t words = MaskWords(vocab);
  const auto mask_bytes = words * static_cast<int64_t>(sizeof(uint32_t));
  const auto bytes = static_cast<int64_t>(fields.allowed_tokens.bytes);
  const int64_t masks = bytes / mask_bytes;
  if (bytes % mask_bytes != 0) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "allowed_tokens: got %d bytes, allowed a multiple of %d, the bytes of a mask of %d tokens",
        bytes, mask_bytes, vocab));
  }
  const IdList& mask_of_row = fields.allowed_tokens_mask;
  LOGITD_RETURN_IF_ERROR(CheckCount("allowed_tokens_mask", mask_of_row, row_count));
  if (mask_of_row.empty() && masks > 1 && masks != row_count) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "allowed_tokens: got %d masks without allowed_tokens_mask, allowed 1 or %d (rows)", masks,
        row_count));
  }
  for (int64_t r = 0; r < row_count; ++r) {
    int64_t mask = masks > 1 ? r : masks - 1;
    if (!mask_of_row.empty()) mask = ValueAt(mask_of_row, r, int64_t{-1});
    if (mask < -1 || mask >= masks) {
      return absl::InvalidArgumentError(absl::StrFormat(
          "allowed_tokens_mask: got %d at row %d, allowed -1..%d: allowed_tokens holds %d masks",
          mask, r, masks - 1, masks));
    }
    rows->rows[r].first_mask_word = mask < 0 ? -1 : mask * words;
  }
  rows->mask_words.resize(static_cast<size_t>(masks * words));
  if (masks > 0) CopyRange(pieces, fields.allowed_tokens, rows->mask_words.data());
  return absl::OkStatus();
}

// The tokens that a row reports of its support: as many as there are and as it asks for.
int32_t SupportCount(const SampleRow& row, int32_t size) {
  return std::min(row.want_support, size);
}

}  // namespace

absl::Status ParseSampleFields(Pieces pieces, size_t max_list, SampleFields* fields) {
  static const auto* const table =
      new auto(FieldTable<SampleFields>(v1::SampleRequest::descriptor())
                   .Add(kLogitsFields)
                   .Add(kHiddenFields)
                   .Add(kSampleListFields)
                   .Add(kSampleParams, &SampleFields::params));
  return ParseMessage<SampleFields>(pieces, *table, max_list, fields);
}

absl::Status BuildSampleRows(Pieces pieces, const LogitsOrHidden& input, SampleFields* fields,
                             ops::SampleRows* rows) {
  rows->rows.resize(static_cast<size_t>(input.rows()), SampleRow{.active = 1});
  LOGITD_RETURN_IF_ERROR(
      FillParams<SampleRow>(kSampleParams, fields->params, absl::MakeSpan(rows->rows)));
  static_assert(kSampleParams[0].name == "seed");
  const bool has_seed = !std::get<Uint64List>(fields->params[0]).empty();
  for (size_t r = 0; r < rows->rows.size() && !has_seed; ++r) {
    const SampleRow& row = rows->rows[r];
    if (!UsesSeed(row)) continue;
    return absl::InvalidArgumentError(
        absl::StrFormat("seed: got none with %s %g at row %d, allowed 1 or %d (rows) values",
                        MarkIsOn(row) ? "xtc_probability" : "temperature",
                        MarkIsOn(row) ? row.xtc_probability : row.temperature, r, input.rows()));
  }
  LOGITD_RETURN_IF_ERROR(BuildLists(fields, rows));
  return BuildMasks(pieces, *fields, input.vocab(), rows);
}

void WriteSampleAnswer(const ops::SampleRows& rows, const engine::JobAnswer& answer,
                       const CallTimes& times, WireWriter& writer) {
  using Response = v1::SampleResponse;
  WriteArray(writer, Response::kTokensFieldNumber, answer.Out(ops::kSampleTokens));
  WriteArray(writer, Response::kLogprobsFieldNumber, answer.Out(ops::kSampleLogprobs));
  WriteArray(writer, Response::kRanksFieldNumber, answer.Out(ops::kSampleRanks));
  WriteArray(writer, Response::kLogsumexpFieldNumber, answer.Out(ops::kSampleLogsumexp));
  WriteStatus(writer, Response::kStatusFieldNumber, Response::kStatusPositionFieldNumber,
              answer.Out(ops::kSampleStatus));
  WriteVarints(writer, Response::kTopCountFieldNumber, rows.rows,
               [](const SampleRow& row) { return row.top_logprobs; });
  WriteArray(writer, Response::kTopIdsFieldNumber, answer.Out(ops::kSampleTopIds));
  WriteArray(writer, Response::kTopLogprobsFieldNumber, answer.Out(ops::kSampleTopLogprobs));
  WriteVarints(writer, Response::kExtraCountFieldNumber, rows.rows,
               [](const SampleRow& row) { return row.extra_count; });
  WriteArray(writer, Response::kExtraLogprobsFieldNumber, answer.Out(ops::kSampleExtraLogprobs));
  WriteTimings(writer, Response::kTimingsFieldNumber, times);
}

void WriteSampleWanted(const ops::SampleRows& rows, const engine::JobAnswer& answer,
                       WireWriter& writer) {
  using Response = v1::SampleResponse;
  const auto any = [&](auto wants) {
    return std::any_of(rows.rows.begin(), rows.rows.end(), wants);
  };
  if (any([](const SampleRow& row) { return row.want_support > 0; })) {
    const auto sizes = answer.Out(ops::kSampleSupportSizes);
    WriteArray(writer, Response::kSupportSizeFieldNumber, sizes);
    WriteVarints(writer, Response::kSupportCountFieldNumber, rows.rows, [&](const SampleRow& row) {
      return SupportCount(row, sizes[&row - rows.rows.data()]);
    });
    const auto entries = [&](uint32_t number, auto output) {
      const auto values = answer.Out(output);
      size_t count = 0;
      for (size_t r = 0; r < sizes.size(); ++r) count += SupportCount(rows.rows[r], sizes[r]);
      if (count == 0) return;
      writer.LengthHead(number, count * sizeof(values[0]));
      size_t first = 0;
      for (size_t r = 0; r < sizes.size(); ++r) {
        writer.Raw(values.data() + first, SupportCount(rows.rows[r], sizes[r]) * sizeof(values[0]));
        first += rows.rows[r].want_support;
      }
    };
    entries(Response::kSupportIdsFieldNumber, ops::kSampleSupportIds);
    entries(Response::kSupportLogprobsFieldNumber, ops::kSampleSupportLogprobs);
  }
  if (any([](const SampleRow& row) { return row.want_entropy; })) {
    WriteArray(writer, Response::kEntropiesFieldNumber, answer.Out(ops::kSampleEntropies));
    WriteArray(writer, Response::kRawEntropiesFieldNumber, answer.Out(ops::kSampleRawEntropies));
  }
  if (any([](const SampleRow& row) { return row.draws > 0; })) {
    WriteVarints(writer, Response::kDrawCountFieldNumber, rows.rows,
                 [](const SampleRow& row) { return row.draws; });
    WriteArray(writer, Response::kDrawTokensFieldNumber, answer.Out(ops::kSampleDrawTokens));
    WriteArray(writer, Response::kDrawLogprobsFieldNumber, answer.Out(ops::kSampleDrawLogprobs));
  }
}

absl::Status SampleCodec::Parse(Pieces pieces, int64_t max_rows, engine::JobSpec* spec) {
  SampleFields fields;
  LOGITD_RETURN_IF_ERROR(ParseSampleFields(pieces, static_cast<size_t>(max_rows), &fields));
  LOGITD_RETURN_IF_ERROR(input_.Read(pieces, fields, max_rows, find_));
  LOGITD_RETURN_IF_ERROR(BuildSampleRows(pieces, input_, &fields, &rows_));
  LOGITD_RETURN_IF_ERROR(CheckSample(rows_.Request(input_.vocab())));
  FillSpec(spec);
  return absl::OkStatus();
}

EncodedMessage SampleCodec::Encode(const engine::JobAnswer& answer, const CallTimes& times) {
  return EncodedMessage::Make(answer_bytes_, [&](WireWriter& writer) {
    WriteSampleAnswer(rows_, answer, times, writer);
    writer.VarintField(kHeadVersionNumber, input_.head_version());
    WriteSampleWanted(rows_, answer, writer);
  });
}

}  // namespace logitd::rpc
