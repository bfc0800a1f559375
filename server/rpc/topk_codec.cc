#include "server/rpc/topk_codec.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <numeric>

#include "absl/strings/str_format.h"
#include "kernels/status_macros.h"
#include "logitd/v1/sampler.pb.h"
#include "logitd/v1/types.pb.h"
#include "server/rpc/encode.h"

namespace logitd::rpc {
namespace {

constexpr engine::Array kInputs[] = {{kTopKRows, sizeof(SoftmaxTopKRow)}};

constexpr engine::Array kOutputs[kTopKOutputs] = {
    {kTopKRows, sizeof(float)},       // kTopKLogsumexp
    {kTopKRows, sizeof(RowStatus)},   // kTopKStatus
    {kTopKEntries, sizeof(int32_t)},  // kTopKIndices
    {kTopKEntries, sizeof(float)},    // kTopKProbs
};

absl::Status EnqueueSoftmaxTopK(Stream& stream, const engine::BatchView& batch) {
  return stream.SoftmaxTopK({
      .logits = {.data = batch.payload,
                 .dtype = batch.dtype,
                 .rows = batch.rows(),
                 .cols = batch.row_elements,
                 .row_stride = static_cast<int64_t>(batch.row_stride / SizeOf(batch.dtype))},
      .rows = reinterpret_cast<const SoftmaxTopKRow*>(batch.inputs[0]),
      .max_k = batch.max_row_entries,
      .indices = reinterpret_cast<int32_t*>(batch.outputs[kTopKIndices]),
      .probs = reinterpret_cast<float*>(batch.outputs[kTopKProbs]),
      .logsumexp = reinterpret_cast<float*>(batch.outputs[kTopKLogsumexp]),
      .status = reinterpret_cast<RowStatus*>(batch.outputs[kTopKStatus]),
  });
}

constexpr Field<TopKFields> kFields[] = {
    {v1::TopKRequest::kDtypeFieldNumber, "dtype", &TopKFields::dtype},
    {v1::TopKRequest::kRowsFieldNumber, "rows", &TopKFields::rows},
    {v1::TopKRequest::kVocabFieldNumber, "vocab", &TopKFields::vocab},
    {v1::TopKRequest::kLogitsFieldNumber, "logits", &TopKFields::logits},
    {v1::TopKRequest::kKFieldNumber, "k", &TopKFields::k},
    {v1::TopKRequest::kTemperatureFieldNumber, "temperature", &TopKFields::temperature},
};

struct DTypePair {
  int32_t wire;
  DType dtype;
};
constexpr DTypePair kDTypes[] = {
    {v1::DTYPE_F32, DType::kF32}, {v1::DTYPE_F16, DType::kF16}, {v1::DTYPE_BF16, DType::kBF16}};

// The enum on the wire has the values of the one in the kernels.
static_assert(v1::ROW_STATUS_OK == static_cast<int>(RowCode::kOk));
static_assert(v1::ROW_STATUS_NAN_LOGIT == static_cast<int>(RowCode::kNanLogit));
static_assert(v1::ROW_STATUS_EMPTY_SUPPORT == static_cast<int>(RowCode::kEmptySupport));
static_assert(sizeof(RowStatus) == 8);

constexpr size_t kTimingsFields = 8;
constexpr size_t kMaxTimings = kTimingsFields * (1 + kMaxVarintSize);
constexpr size_t kLengthHead = 2 * kMaxVarintSize;  // more than any head takes

// k, logsumexp, status, status_position of a row, at most.
constexpr size_t kMaxRowBytes = 3 + sizeof(float) + 1 + sizeof(int32_t);
constexpr size_t kEntryBytes = sizeof(int32_t) + sizeof(float);

size_t WriteTimings(const CallTimes& times, uint8_t* at) {
  WireWriter writer(at);
  writer.VarintField(v1::Timings::kReceiveNsFieldNumber, times.receive_ns);
  writer.VarintField(v1::Timings::kCopyNsFieldNumber, times.job.copy_ns);
  writer.VarintField(v1::Timings::kQueueNsFieldNumber, times.job.queue_ns);
  writer.VarintField(v1::Timings::kH2DNsFieldNumber, times.job.h2d_ns);
  writer.VarintField(v1::Timings::kKernelNsFieldNumber, times.job.kernel_ns);
  writer.VarintField(v1::Timings::kD2HNsFieldNumber, times.job.d2h_ns);
  writer.VarintField(v1::Timings::kBatchRowsFieldNumber, times.job.batch_rows);
  writer.VarintField(v1::Timings::kTotalNsFieldNumber, times.total_ns);
  return static_cast<size_t>(writer.at() - at);
}

}  // namespace

const engine::OpTraits kSoftmaxTopKTraits = {
    .name = "softmax_topk",
    .inputs = kInputs,
    .outputs = kOutputs,
    .enqueue = &EnqueueSoftmaxTopK,
};

absl::Status ParseTopKFields(Pieces pieces, size_t max_list, TopKFields* fields) {
  return ParseMessage<TopKFields>(pieces, kFields, max_list, fields);
}

absl::Status TopKCodec::Parse(Pieces pieces, int64_t max_rows, engine::JobSpec* spec) {
  LOGITD_RETURN_IF_ERROR(ParseTopKFields(pieces, static_cast<size_t>(max_rows), &fields_));
  const auto* pair = std::find_if(std::begin(kDTypes), std::end(kDTypes),
                                  [&](const DTypePair& d) { return d.wire == fields_.dtype; });
  if (pair == std::end(kDTypes)) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "dtype: got %d, allowed DTYPE_F32 (1), DTYPE_F16 (2), DTYPE_BF16 (3)", fields_.dtype));
  }
  LOGITD_RETURN_IF_ERROR(CheckSoftmaxTopK({
      .dtype = pair->dtype,
      .rows = fields_.rows,
      .vocab = fields_.vocab,
      .payload_bytes = static_cast<int64_t>(fields_.logits.bytes),
      .k = fields_.k,
      .temperature = fields_.temperature,
  }));
  row_bytes_ = static_cast<size_t>(fields_.vocab) * SizeOf(pair->dtype);
  spec->key = {.op = &kSoftmaxTopKTraits, .dtype = pair->dtype, .row_elements = fields_.vocab};
  spec->counts[kTopKRows] = fields_.rows;
  if (fields_.k.size() == 1) {
    spec->counts[kTopKEntries] = fields_.rows * fields_.k[0];
    spec->max_row_entries = fields_.k[0];
  } else {
    spec->counts[kTopKEntries] = std::accumulate(fields_.k.begin(), fields_.k.end(), int64_t{0});
    spec->max_row_entries = *std::max_element(fields_.k.begin(), fields_.k.end());
  }
  answer_bytes_ = static_cast<int64_t>(kEntryBytes) * spec->counts[kTopKEntries] +
                  static_cast<int64_t>(kMaxRowBytes) * spec->rows() + 7 * kLengthHead + kMaxTimings;
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

// By hand into one slice: the packed fixed-width fields, nearly all of the answer, are copied from
// the slab as they are.
grpc::ByteBuffer TopKCodec::Encode(absl::Span<const absl::Span<const std::byte>> outputs,
                                   const CallTimes& times) {
  const int64_t rows = fields_.rows;
  const absl::Span<const std::byte> logsumexp = outputs[kTopKLogsumexp];
  const absl::Span<const std::byte> indices = outputs[kTopKIndices];
  const absl::Span<const std::byte> probs = outputs[kTopKProbs];
  const auto* status = reinterpret_cast<const RowStatus*>(outputs[kTopKStatus].data());

  grpc::Slice slice(static_cast<size_t>(answer_bytes_));
  auto* const begin = const_cast<uint8_t*>(slice.begin());
  WireWriter writer(begin);

  size_t k_bytes = 0;
  for (int64_t row = 0; row < rows; ++row) k_bytes += VarintSize(static_cast<uint64_t>(k_of(row)));
  writer.LengthHead(v1::TopKResponse::kKFieldNumber, k_bytes);
  for (int64_t row = 0; row < rows; ++row) writer.Varint(static_cast<uint64_t>(k_of(row)));

  writer.LengthHead(v1::TopKResponse::kIndicesFieldNumber, indices.size());
  writer.Raw(indices.data(), indices.size());
  writer.LengthHead(v1::TopKResponse::kProbsFieldNumber, probs.size());
  writer.Raw(probs.data(), probs.size());
  writer.LengthHead(v1::TopKResponse::kLogsumexpFieldNumber, logsumexp.size());
  writer.Raw(logsumexp.data(), logsumexp.size());

  writer.LengthHead(v1::TopKResponse::kStatusFieldNumber, static_cast<size_t>(rows));
  for (int64_t row = 0; row < rows; ++row) writer.Varint(static_cast<uint64_t>(status[row].code));
  writer.LengthHead(v1::TopKResponse::kStatusPositionFieldNumber,
                    static_cast<size_t>(rows) * sizeof(int32_t));
  for (int64_t row = 0; row < rows; ++row) writer.Fixed(status[row].position);

  std::array<uint8_t, kMaxTimings> timings;
  const size_t timings_bytes = WriteTimings(times, timings.data());
  writer.LengthHead(v1::TopKResponse::kTimingsFieldNumber, timings_bytes);
  writer.Raw(timings.data(), timings_bytes);

  const grpc::Slice used = slice.sub(0, static_cast<size_t>(writer.at() - begin));
  return grpc::ByteBuffer(&used, 1);
}

}  // namespace logitd::rpc
