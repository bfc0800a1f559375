#include "server/rpc/codecs/topk_codec.h"

#include "kernels/status_macros.h"
#include "logitd/v1/sampler.pb.h"
#include "server/rpc/codecs/answer_fields.h"

namespace logitd::rpc {

absl::Status ParseTopKFields(Pieces pieces, size_t max_list, TopKFields* fields) {
  static const auto* const table = new auto(FieldTable<TopKFields>(v1::TopKRequest::descriptor())
                                                .Add(kLogitsFields)
                                                .Add(kHiddenFields)
                                                .Add(kSoftmaxTopKParams, &TopKFields::params));
  return ParseMessage<TopKFields>(pieces, *table, max_list, fields);
}

absl::Status TopKCodec::Parse(Pieces pieces, int64_t max_rows, engine::JobSpec* spec) {
  TopKFields fields;
  LOGITD_RETURN_IF_ERROR(ParseTopKFields(pieces, static_cast<size_t>(max_rows), &fields));
  LOGITD_RETURN_IF_ERROR(input_.Read(pieces, fields, max_rows, find_));
  rows_.rows.resize(static_cast<size_t>(input_.rows()));
  LOGITD_RETURN_IF_ERROR(
      FillParams<SoftmaxTopKRow>(kSoftmaxTopKParams, fields.params, absl::MakeSpan(rows_.rows)));
  LOGITD_RETURN_IF_ERROR(CheckSoftmaxTopK({.vocab = input_.vocab(), .params = rows_.rows}));
  FillSpec(spec);
  return absl::OkStatus();
}

EncodedMessage TopKCodec::Encode(const engine::JobAnswer& answer, const CallTimes& times) {
  using Response = v1::TopKResponse;
  return EncodedMessage::Make(answer_bytes_, [&](WireWriter& writer) {
    WriteVarints(writer, Response::kKFieldNumber, rows_.rows,
                 [](const SoftmaxTopKRow& row) { return row.k; });
    WriteArray(writer, Response::kIndicesFieldNumber, answer.Out(ops::kTopKIndices));
    WriteArray(writer, Response::kProbsFieldNumber, answer.Out(ops::kTopKProbs));
    WriteArray(writer, Response::kLogsumexpFieldNumber, answer.Out(ops::kTopKLogsumexp));
    WriteStatus(writer, Response::kStatusFieldNumber, Response::kStatusPositionFieldNumber,
                answer.Out(ops::kTopKStatus));
    WriteTimings(writer, Response::kTimingsFieldNumber, times);
    writer.VarintField(kHeadVersionNumber, input_.head_version());
  });
}

}  // namespace logitd::rpc
