#include "server/rpc/codecs/topk_codec.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <numeric>

#include "kernels/status_macros.h"
#include "logitd/v1/sampler.pb.h"
#include "server/rpc/codecs/codec_parts.h"

namespace logitd::rpc {
namespace {

constexpr engine::Array kInputs[] = {{kTopKRows, sizeof(SoftmaxTopKRow)}};

constexpr engine::Array kOutputs[kTopKOutputs] = {
    {kTopKRows, sizeof(float)},       // kTopKLogsumexp
    {kTopKRows, sizeof(RowStatus)},   // kTopKStatus
    {kTopKEntries, sizeof(int32_t)},  // kTopKIndices
    {kTopKEntries, sizeof(float)},    // kTopKProbs
};

SoftmaxTopKArgs ArgsOf(const engine::BatchView& batch) {
  return {
      .logits = PayloadOf(batch),
      .rows = reinterpret_cast<const SoftmaxTopKRow*>(batch.inputs[0]),
      .max_k = batch.max_row_entries,
      .indices = reinterpret_cast<int32_t*>(batch.outputs[kTopKIndices]),
      .probs = reinterpret_cast<float*>(batch.outputs[kTopKProbs]),
      .logsumexp = reinterpret_cast<float*>(batch.outputs[kTopKLogsumexp]),
      .status = reinterpret_cast<RowStatus*>(batch.outputs[kTopKStatus]),
  };
}

absl::Status EnqueueSoftmaxTopK(Stream& stream, const engine::BatchView& batch) {
  return stream.SoftmaxTopK(ArgsOf(batch));
}

absl::Status EnqueueLinearTopK(Stream& stream, const engine::BatchView& batch) {
  return stream.LinearTopK(
      {.hidden = PayloadOf(batch), .head = *batch.head, .topk = ArgsOf(batch)});
}

constexpr auto kFields = JoinTables(
    JoinTables(LogitsFieldTable<TopKFields>(), HiddenFieldTable<TopKFields>()),
    std::array<Field<TopKFields>, 2>{
        {{v1::TopKRequest::kKFieldNumber, "k", &TopKFields::k},
         {v1::TopKRequest::kTemperatureFieldNumber, "temperature", &TopKFields::temperature}}});

// k, logsumexp, status of a row, at most.
constexpr size_t kMaxRowBytes = 3 + sizeof(float) + kMaxStatusBytes;
constexpr size_t kEntryBytes = sizeof(int32_t) + sizeof(float);

}  // namespace

const engine::OpTraits kSoftmaxTopKTraits = {
    .name = "softmax_topk",
    .inputs = kInputs,
    .outputs = kOutputs,
    .enqueue = &EnqueueSoftmaxTopK,
};

const engine::OpTraits kLinearTopKTraits = {
    .name = "linear_topk",
    .inputs = kInputs,
    .outputs = kOutputs,
    .enqueue = &EnqueueLinearTopK,
};

absl::Status ParseTopKFields(Pieces pieces, size_t max_list, TopKFields* fields) {
  return ParseMessage<TopKFields>(pieces, kFields, max_list, fields);
}

absl::Status TopKCodec::Parse(Pieces pieces, int64_t max_rows, engine::JobSpec* spec) {
  LOGITD_RETURN_IF_ERROR(ParseTopKFields(pieces, static_cast<size_t>(max_rows), &fields_));
  LOGITD_RETURN_IF_ERROR(input_.Read(fields_, max_rows, find_head_));
  LOGITD_RETURN_IF_ERROR(CheckSoftmaxTopK({
      .dtype = input_.dtype(),
      .rows = input_.rows(),
      .vocab = input_.vocab(),
      .payload_bytes = input_.logits_bytes(),
      .k = fields_.k,
      .temperature = fields_.temperature,
  }));
  input_.FillKey(kSoftmaxTopKTraits, kLinearTopKTraits, &spec->key);
  spec->counts[kTopKRows] = fields_.rows;
  if (fields_.k.size() == 1) {
    spec->counts[kTopKEntries] = fields_.rows * fields_.k[0];
    spec->max_row_entries = fields_.k[0];
  } else {
    spec->counts[kTopKEntries] = std::accumulate(fields_.k.begin(), fields_.k.end(), int64_t{0});
    spec->max_row_entries = *std::max_element(fields_.k.begin(), fields_.k.end());
  }
  answer_bytes_ = static_cast<int64_t>(kEntryBytes) * spec->counts[kTopKEntries] +
                  static_cast<int64_t>(kMaxRowBytes) * spec->rows() + 5 * kMaxLengthHead +
                  kMaxFixedBytes;
  return absl::OkStatus();
}

float TopKCodec::temperature_of(int64_t row) const {
  const FloatList& t = fields_.temperature;
  if (t.empty()) return 1.0f;
  return t[t.size() == 1 ? 0 : static_cast<size_t>(row)];
}

void TopKCodec::WriteInputs(absl::Span<std::byte* const> inputs, const engine::AxisCounts& first) {
  std::byte* dst = inputs[0];
  int64_t first_entry = first[kTopKEntries];
  for (int64_t row = 0; row < fields_.rows; ++row) {
    const SoftmaxTopKRow params = {
        .first_entry = first_entry, .temperature = temperature_of(row), .k = k_of(row)};
    std::memcpy(dst, &params, sizeof(params));
    dst += sizeof(params);
    first_entry += params.k;
  }
}

grpc::ByteBuffer TopKCodec::Encode(const engine::JobAnswer& answer, const CallTimes& times) {
  using Response = v1::TopKResponse;
  return WriteMessage(answer_bytes_, [&](WireWriter& writer) {
    WriteVarints(writer, Response::kKFieldNumber, fields_.rows,
                 [this](int64_t row) { return k_of(row); });
    WriteArray(writer, Response::kIndicesFieldNumber, answer.outputs[kTopKIndices]);
    WriteArray(writer, Response::kProbsFieldNumber, answer.outputs[kTopKProbs]);
    WriteArray(writer, Response::kLogsumexpFieldNumber, answer.outputs[kTopKLogsumexp]);
    WriteStatus(writer, Response::kStatusFieldNumber, Response::kStatusPositionFieldNumber,
                answer.outputs[kTopKStatus]);
    WriteTimings(writer, Response::kTimingsFieldNumber, times);
  });
}

}  // namespace logitd::rpc
