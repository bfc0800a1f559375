#include "server/rpc/codecs/attention_codec.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

#include "absl/strings/str_format.h"
#include "kernels/status_macros.h"
#include "logitd/v1/attention.pb.h"
#include "server/rpc/codecs/codec_parts.h"

namespace logitd::rpc {
namespace {

using Forward = v1::AttentionSoftmaxRequest;
using Backward = v1::AttentionSoftmaxBackwardRequest;

constexpr engine::Array kInputs[] = {
    {kAttentionMaskBytes, 1},         // kAttentionInMask
    {kAttentionSinks, sizeof(float)}  // kAttentionInSinks
};
constexpr engine::Array kOutputs[] = {
    {kAttentionOutBytes, 1},                // kAttentionProbs
    {kAttentionLogsumexps, sizeof(float)},  // kAttentionLogsumexp
    {kAttentionRows, sizeof(RowStatus)}     // kAttentionStatus
};
constexpr engine::Array kBackwardInputs[] = {
    {kAttentionDProbBytes, 1},              // kAttentionBackwardInDProbs
    {kAttentionLogsumexps, sizeof(float)},  // kAttentionBackwardInLogsumexp
    {kAttentionSinks, sizeof(float)}        // kAttentionBackwardInSinks
};
constexpr engine::Array kBackwardOutputs[] = {
    {kAttentionOutBytes, 1},             // kAttentionBackwardDScores
    {kAttentionSinks, sizeof(double)},   // kAttentionBackwardDSinks
    {kAttentionRows, sizeof(RowStatus)}  // kAttentionBackwardStatus
};

TensorView ViewOf(const std::byte* data, const engine::BatchView& batch) {
  return {.data = data,
          .dtype = batch.dtype,
          .rows = batch.rows(),
          .cols = batch.row_elements,
          .row_stride = batch.row_elements};
}

MutableTensorView OutOf(std::byte* data, DType dtype, const engine::BatchView& batch) {
  return {.data = data,
          .dtype = dtype,
          .rows = batch.rows(),
          .cols = batch.row_elements,
          .row_stride = batch.row_elements};
}

// An array that the call may lack.
template <typename T>
T* OrNull(std::byte* array, int64_t count) {
  return count > 0 ? reinterpret_cast<T*>(array) : nullptr;
}

absl::Status EnqueueSoftmax(Stream& stream, const engine::BatchView& batch) {
  const auto& call = *static_cast<const AttentionCall*>(batch.call);
  AttentionMask mask = call.mask;
  if (mask.kind != MaskKind::kNone) mask.data = batch.inputs[kAttentionInMask];
  return stream.AttentionSoftmax({
      .shape = call.shape,
      .scores = ViewOf(batch.payload, batch),
      .scale = call.scale,
      .window = call.window,
      .mask = mask,
      .sinks = OrNull<float>(batch.inputs[kAttentionInSinks], batch.counts[kAttentionSinks]),
      .probs = OutOf(batch.outputs[kAttentionProbs], call.out_dtype, batch),
      .logsumexp =
          OrNull<float>(batch.outputs[kAttentionLogsumexp], batch.counts[kAttentionLogsumexps]),
      .status = reinterpret_cast<RowStatus*>(batch.outputs[kAttentionStatus]),
  });
}

absl::Status EnqueueSoftmaxBackward(Stream& stream, const engine::BatchView& batch) {
  const auto& call = *static_cast<const AttentionCall*>(batch.call);
  const int64_t sinks = batch.counts[kAttentionSinks];
  return stream.AttentionSoftmaxBackward({
      .shape = call.shape,
      .probs = ViewOf(batch.payload, batch),
      .d_probs = ViewOf(batch.inputs[kAttentionBackwardInDProbs], batch),
      .scale = call.scale,
      .window = call.window,
      .d_scores = OutOf(batch.outputs[kAttentionBackwardDScores], call.out_dtype, batch),
      .sinks = OrNull<float>(batch.inputs[kAttentionBackwardInSinks], sinks),
      .logsumexp = OrNull<float>(batch.inputs[kAttentionBackwardInLogsumexp], sinks),
      .d_sinks = OrNull<double>(batch.outputs[kAttentionBackwardDSinks], sinks),
      .status = reinterpret_cast<RowStatus*>(batch.outputs[kAttentionBackwardStatus]),
  });
}

constexpr Field<AttentionFields> kFields[] = {
    {Forward::kDtypeFieldNumber, "dtype", &AttentionFields::dtype},
    {Forward::kBatchFieldNumber, "batch", &AttentionFields::batch},
    {Forward::kHeadsFieldNumber, "heads", &AttentionFields::heads},
    {Forward::kQueriesFieldNumber, "queries", &AttentionFields::queries},
    {Forward::kKeysFieldNumber, "keys", &AttentionFields::keys},
    {Forward::kScoresFieldNumber, "scores", &AttentionFields::payload},
    {Forward::kScaleFieldNumber, "scale", &AttentionFields::scale},
    {Forward::kWindowLeftFieldNumber, "window_left", &AttentionFields::window_left},
    {Forward::kWindowRightFieldNumber, "window_right", &AttentionFields::window_right},
    {Forward::kMaskKindFieldNumber, "mask_kind", &AttentionFields::mask_kind},
    {Forward::kMaskDtypeFieldNumber, "mask_dtype", &AttentionFields::mask_dtype},
    {Forward::kMaskShapeFieldNumber, "mask_shape", &AttentionFields::mask_shape},
    {Forward::kMaskFieldNumber, "mask", &AttentionFields::mask},
    {Forward::kSinksFieldNumber, "sinks", &AttentionFields::sinks},
    {Forward::kOutDtypeFieldNumber, "out_dtype", &AttentionFields::out_dtype},
    {Forward::kWantLogsumexpFieldNumber, "want_logsumexp", &AttentionFields::want_logsumexp},
};

constexpr Field<AttentionFields> kBackwardFields[] = {
    {Backward::kDtypeFieldNumber, "dtype", &AttentionFields::dtype},
    {Backward::kBatchFieldNumber, "batch", &AttentionFields::batch},
    {Backward::kHeadsFieldNumber, "heads", &AttentionFields::heads},
    {Backward::kQueriesFieldNumber, "queries", &AttentionFields::queries},
    {Backward::kKeysFieldNumber, "keys", &AttentionFields::keys},
    {Backward::kProbsFieldNumber, "probs", &AttentionFields::payload},
    {Backward::kDProbsFieldNumber, "d_probs", &AttentionFields::d_probs},
    {Backward::kScaleFieldNumber, "scale", &AttentionFields::scale},
    {Backward::kWindowLeftFieldNumber, "window_left", &AttentionFields::window_left},
    {Backward::kWindowRightFieldNumber, "window_right", &AttentionFields::window_right},
    {Backward::kSinksFieldNumber, "sinks", &AttentionFields::sinks},
    {Backward::kOutDtypeFieldNumber, "out_dtype", &AttentionFields::out_dtype},
    {Backward::kLogsumexpFieldNumber, "logsumexp", &AttentionFields::logsumexp},
};

static_assert(v1::MASK_KIND_NONE == static_cast<int>(MaskKind::kNone));
static_assert(v1::MASK_KIND_BOOL == static_cast<int>(MaskKind::kBool));
static_assert(v1::MASK_KIND_ADDITIVE == static_cast<int>(MaskKind::kAdditive));

// Of sizes as they came: anything below 0 counts as too much.
int64_t SaturatingProduct(std::initializer_list<int64_t> sizes) {
  constexpr int64_t kHuge = std::numeric_limits<int64_t>::max();
  int64_t product = 1;
  for (int64_t size : sizes) {
    if (size < 0 || __builtin_mul_overflow(product, size, &product)) return kHuge;
  }
  return product;
}

int32_t ToWire(DType dtype) {
  return dtype == DType::kF32   ? v1::DTYPE_F32
         : dtype == DType::kF16 ? v1::DTYPE_F16
                                : v1::DTYPE_BF16;
}

// The elements of the mask that the rows of `shape` use, from the first to the last.
struct MaskExtent {
  int64_t first = 0;
  int64_t end = 0;
};

MaskExtent FindMaskExtent(const AttentionShape& shape, const AttentionMask& mask) {
  MaskExtent extent{.first = std::numeric_limits<int64_t>::max()};
  const int64_t end_row = shape.first_row + shape.rows;
  for (int64_t row = shape.first_row; row < end_row;) {
    const int64_t query = row % shape.queries;
    const int64_t head = row / shape.queries % shape.heads;
    const int64_t item = row / shape.queries / shape.heads;
    const int64_t rows = std::min(shape.queries - query, end_row - row);
    const int64_t start = item * mask.batch_stride + head * mask.head_stride;
    extent.first = std::min(extent.first, start + query * mask.query_stride);
    extent.end = std::max(extent.end, start + (query + rows - 1) * mask.query_stride + shape.keys);
    row += rows;
  }
  return extent;
}

// A slice that keeps what it points to.
grpc::Slice SliceOver(absl::Span<const std::byte> bytes, std::shared_ptr<const void> keep) {
  using Keep = std::shared_ptr<const void>;
  return grpc::Slice(
      const_cast<std::byte*>(bytes.data()), bytes.size(),
      [](void* held) { delete static_cast<Keep*>(held); }, new Keep(std::move(keep)));
}

// Of a row, in the answer.
constexpr int64_t kFaultBytes = sizeof(int64_t) + kMaxStatusBytes;
constexpr int64_t kFixedBytes = 9 * kMaxLengthHead + kMaxFixedBytes;

// The fields that answers begin with; the numbers are those of both.
void WriteHead(WireWriter& writer, const AttentionCall& call, absl::Span<const RowStatus> status) {
  using Answer = v1::AttentionSoftmaxResponse;
  writer.VarintField(Answer::kFirstRowFieldNumber, call.shape.first_row);
  writer.VarintField(Answer::kRowsFieldNumber, call.shape.rows);
  writer.VarintField(Answer::kDtypeFieldNumber, ToWire(call.out_dtype));
  const auto is_fault = [](const RowStatus& row) { return row.code != RowCode::kOk; };
  const auto faults = static_cast<size_t>(std::count_if(status.begin(), status.end(), is_fault));
  if (faults == 0) return;
  writer.LengthHead(Answer::kFaultRowsFieldNumber, faults * sizeof(int64_t));
  for (size_t i = 0; i < status.size(); ++i) {
    if (is_fault(status[i])) writer.Fixed(call.shape.first_row + static_cast<int64_t>(i));
  }
  writer.LengthHead(Answer::kFaultStatusFieldNumber, faults);
  for (const RowStatus& row : status) {
    if (is_fault(row)) writer.Varint(static_cast<uint64_t>(row.code));
  }
  writer.LengthHead(Answer::kFaultPositionsFieldNumber, faults * sizeof(int32_t));
  for (const RowStatus& row : status) {
    if (is_fault(row)) writer.Fixed(row.position);
  }
}

using Response = v1::AttentionSoftmaxResponse;
using BackwardResponse = v1::AttentionSoftmaxBackwardResponse;
static_assert(Response::kFirstRowFieldNumber == int{BackwardResponse::kFirstRowFieldNumber});
static_assert(Response::kRowsFieldNumber == int{BackwardResponse::kRowsFieldNumber});
static_assert(Response::kDtypeFieldNumber == int{BackwardResponse::kDtypeFieldNumber});
static_assert(Response::kFaultRowsFieldNumber == int{BackwardResponse::kFaultRowsFieldNumber});
static_assert(Response::kFaultStatusFieldNumber == int{BackwardResponse::kFaultStatusFieldNumber});
static_assert(Response::kFaultPositionsFieldNumber ==
              int{BackwardResponse::kFaultPositionsFieldNumber});
static_assert(Response::kTimingsFieldNumber == int{BackwardResponse::kTimingsFieldNumber});
static_assert(Response::kProbsFieldNumber == int{BackwardResponse::kDScoresFieldNumber});

}  // namespace

const engine::OpTraits kAttentionSoftmaxTraits = {
    .name = "attention_softmax",
    .inputs = kInputs,
    .outputs = kOutputs,
    .enqueue = &EnqueueSoftmax,
    .alone = true,
};

const engine::OpTraits kAttentionSoftmaxBackwardTraits = {
    .name = "attention_softmax_backward",
    .inputs = kBackwardInputs,
    .outputs = kBackwardOutputs,
    .enqueue = &EnqueueSoftmaxBackward,
    .alone = true,
};

absl::Status ParseAttentionFields(AttentionDirection direction, Pieces pieces, size_t max_list,
                                  AttentionFields* fields) {
  if (direction == AttentionDirection::kForward) {
    return ParseMessage<AttentionFields>(pieces, kFields, max_list, fields);
  }
  return ParseMessage<AttentionFields>(pieces, kBackwardFields, max_list, fields);
}

const engine::OpTraits& AttentionCodec::op() const {
  return backward() ? kAttentionSoftmaxBackwardTraits : kAttentionSoftmaxTraits;
}

absl::Status AttentionCodec::Parse(Pieces pieces, int64_t max_rows, engine::JobSpec* spec) {
  AttentionFields fields;
  LOGITD_RETURN_IF_ERROR(
      ParseAttentionFields(direction_, pieces, static_cast<size_t>(max_rows), &fields));
  const bool continues = tensor_ != nullptr && tensor_->next_row > 0;
  if (continues && static_cast<const AttentionHeader&>(fields) != AttentionHeader{}) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "a message at row %d of a tensor sets the shape or a parameter: allowed in the tensor's "
        "first message alone",
        tensor_->next_row));
  }
  header_ = continues ? tensor_->header : static_cast<const AttentionHeader&>(fields);
  // A stream keeps them for as long as its tensor takes.
  if (header_.sinks.size() > static_cast<size_t>(max_rows)) {
    return absl::InvalidArgumentError(
        absl::StrFormat("sinks: got %d values, allowed 0..%d", header_.sinks.size(), max_rows));
  }
  payload_ = fields.payload;
  LOGITD_RETURN_IF_ERROR(ReadDType(header_.dtype, &dtype_));
  LOGITD_RETURN_IF_ERROR(ReadRows(fields.payload.bytes));

  AttentionSoftmaxRequest request;
  LOGITD_RETURN_IF_ERROR(ReadParameters(&request));
  if (!backward()) LOGITD_RETURN_IF_ERROR(ReadMask(fields.mask, &request));
  LOGITD_RETURN_IF_ERROR(CheckAttentionSoftmax(request));
  if (call_.mask.kind != MaskKind::kNone) LOGITD_RETURN_IF_ERROR(CheckMaskRows(fields.mask.bytes));
  if (backward()) {
    if (fields.d_probs.bytes != payload_.bytes) {
      return absl::InvalidArgumentError(
          absl::StrFormat("d_probs: got %d bytes, allowed %d, as many as probs",
                          fields.d_probs.bytes, payload_.bytes));
    }
    const size_t wanted = header_.sinks.empty() ? 0 : call_.shape.rows * sizeof(float);
    if (fields.logsumexp.bytes != wanted) {
      return absl::InvalidArgumentError(absl::StrFormat(
          "logsumexp: got %d bytes, allowed %d: a float for each of %d rows where there are sinks, "
          "else none",
          fields.logsumexp.bytes, wanted, call_.shape.rows));
    }
  }
  FillSpec(fields, spec);
  if (tensor_ != nullptr) {
    tensor_->next_row += call_.shape.rows;
    const AttentionShape& shape = call_.shape;
    const bool complete = tensor_->next_row == shape.batch * shape.heads * shape.queries;
    if (complete) *tensor_ = {};
    if (!complete && !continues) tensor_->header = header_;
  }
  return absl::OkStatus();
}

// The shape, and the rows that the message brings. What the sizes must be is for the check to say.
absl::Status AttentionCodec::ReadRows(size_t bytes) {
  row_bytes_ = static_cast<size_t>(std::clamp<int64_t>(header_.keys, 1, kMaxKeys)) * SizeOf(dtype_);
  const int64_t total = SaturatingProduct({header_.batch, header_.heads, header_.queries});
  call_.shape = {.batch = header_.batch,
                 .heads = header_.heads,
                 .queries = header_.queries,
                 .keys = header_.keys,
                 .rows = total};
  const bool sized = total > 0 && header_.keys > 0 && header_.keys <= kMaxKeys;
  if (tensor_ == nullptr || !sized) return absl::OkStatus();
  call_.shape.first_row = tensor_->next_row;
  call_.shape.rows = static_cast<int64_t>(bytes / row_bytes_);
  const int64_t left = total - call_.shape.first_row;
  if (bytes % row_bytes_ != 0 || call_.shape.rows < 1 || call_.shape.rows > left) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "%s: got %d bytes at row %d, allowed whole rows of %d bytes, 1 to the %d that are left",
        backward() ? "probs" : "scores", bytes, call_.shape.first_row, row_bytes_, left));
  }
  return absl::OkStatus();
}

absl::Status AttentionCodec::ReadParameters(AttentionSoftmaxRequest* request) {
  call_.out_dtype = dtype_;
  if (header_.out_dtype != v1::DTYPE_UNSPECIFIED) {
    LOGITD_RETURN_IF_ERROR(ReadDType(header_.out_dtype, &call_.out_dtype, "out_dtype"));
  }
  call_.scale = header_.scale.value_or(1.0f);
  call_.window = {.left = header_.window_left.value_or(AttentionWindow::kUnbounded),
                  .right = header_.window_right.value_or(AttentionWindow::kUnbounded)};
  *request = {.shape = call_.shape,
              .dtype = dtype_,
              .out_dtype = call_.out_dtype,
              .backward = backward(),
              .payload_bytes = static_cast<int64_t>(payload_.bytes),
              .scale = call_.scale,
              .window = call_.window,
              .sinks = header_.sinks};
  return absl::OkStatus();
}

absl::Status AttentionCodec::ReadMask(const ByteRange& mask, AttentionSoftmaxRequest* request) {
  const auto& shape = header_.mask_shape;
  if (header_.mask_kind < v1::MASK_KIND_NONE || header_.mask_kind > v1::MASK_KIND_ADDITIVE) {
    return absl::InvalidArgumentError(
        absl::StrFormat("mask_kind: got %d, allowed MASK_KIND_NONE (0), MASK_KIND_BOOL (1), "
                        "MASK_KIND_ADDITIVE (2)",
                        header_.mask_kind));
  }
  AttentionMask& view = call_.mask;
  view.kind = static_cast<MaskKind>(header_.mask_kind);
  const bool has_mask = view.kind != MaskKind::kNone;
  if (shape.size() != (has_mask ? 4 : 0)) {
    return absl::InvalidArgumentError(
        absl::StrFormat("mask_shape: got %d values, allowed %d with mask_kind %d", shape.size(),
                        has_mask ? 4 : 0, header_.mask_kind));
  }
  if (view.kind == MaskKind::kAdditive) {
    LOGITD_RETURN_IF_ERROR(ReadDType(header_.mask_dtype, &view.dtype, "mask_dtype"));
  } else if (header_.mask_dtype != v1::DTYPE_UNSPECIFIED) {
    return absl::InvalidArgumentError(
        absl::StrFormat("mask_dtype: got %d, allowed with MASK_KIND_ADDITIVE alone, not with "
                        "mask_kind %d",
                        header_.mask_dtype, header_.mask_kind));
  }
  request->mask = view.kind;
  request->mask_dtype = view.dtype;
  request->mask_bytes = static_cast<int64_t>(mask.bytes);
  if (!has_mask) return absl::OkStatus();
  std::copy(shape.begin(), shape.end(), request->mask_shape);
  // The check is of whole masks; what a message of a stream brings of one is for CheckMaskRows.
  const auto element =
      view.kind == MaskKind::kBool ? int64_t{1} : static_cast<int64_t>(SizeOf(view.dtype));
  if (tensor_ != nullptr) {
    request->mask_bytes = SaturatingProduct({shape[0], shape[1], shape[2], shape[3], element});
  }
  view.query_stride = shape[2] == 1 ? 0 : shape[3];
  view.head_stride = shape[1] == 1 ? 0 : SaturatingProduct({shape[2], shape[3]});
  view.batch_stride = shape[0] == 1 ? 0 : SaturatingProduct({shape[1], shape[2], shape[3]});
  return absl::OkStatus();
}

// And finds where the mask begins. After the check, so that nothing overflows.
absl::Status AttentionCodec::CheckMaskRows(size_t bytes) {
  const MaskExtent extent = FindMaskExtent(call_.shape, call_.mask);
  call_.mask.origin = extent.first;
  const size_t element = call_.mask.kind == MaskKind::kBool ? 1 : SizeOf(call_.mask.dtype);
  const size_t wanted = static_cast<size_t>(extent.end - extent.first) * element;
  if (bytes == wanted) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrFormat(
      "mask: got %d bytes, allowed %d: rows %d to %d of the mask, which rows %d to %d use", bytes,
      wanted, extent.first / call_.shape.keys, extent.end / call_.shape.keys - 1,
      call_.shape.first_row, call_.shape.first_row + call_.shape.rows - 1));
}

void AttentionCodec::FillSpec(const AttentionFields& fields, engine::JobSpec* spec) {
  const int64_t rows = call_.shape.rows;
  const auto sinks = static_cast<int64_t>(header_.sinks.size());
  const int64_t out_bytes = rows * call_.shape.keys * static_cast<int64_t>(SizeOf(call_.out_dtype));
  spec->key = {.op = &op(), .dtype = dtype_, .row_elements = call_.shape.keys};
  spec->counts[kAttentionRows] = rows;
  spec->counts[kAttentionOutBytes] = out_bytes;
  spec->counts[kAttentionSinks] = sinks;
  spec->counts[kAttentionMaskBytes] = static_cast<int64_t>(fields.mask.bytes);
  spec->counts[kAttentionDProbBytes] = static_cast<int64_t>(fields.d_probs.bytes);
  const bool logsumexp = backward() ? sinks > 0 : header_.want_logsumexp;
  spec->counts[kAttentionLogsumexps] = logsumexp ? rows : 0;
  spec->in_place = call_.out_dtype == dtype_;
  spec->call = &call_;
  if (backward()) {
    copied_ = {fields.d_probs, fields.logsumexp};
  } else {
    copied_ = {fields.mask};
  }
  answer_bytes_ = out_bytes + rows * kFaultBytes + kFixedBytes;
  if (backward()) answer_bytes_ += sinks * static_cast<int64_t>(sizeof(double));
  if (!backward() && logsumexp) answer_bytes_ += rows * static_cast<int64_t>(sizeof(float));
}

void AttentionCodec::WriteInputs(absl::Span<std::byte* const> inputs, const engine::AxisCounts&) {
  MoveOut(header_.sinks,
          inputs[backward() ? size_t{kAttentionBackwardInSinks} : size_t{kAttentionInSinks}]);
}

// The large array comes last, in a slice of its own: where it lies, if it is kept there.
grpc::ByteBuffer AttentionCodec::Encode(const engine::JobAnswer& answer, const CallTimes& times) {
  const absl::Span<const std::byte> large = answer.outputs[0];
  const absl::Span<const std::byte> status_bytes =
      answer.outputs[backward() ? size_t{kAttentionBackwardStatus} : size_t{kAttentionStatus}];
  const absl::Span<const RowStatus> status(reinterpret_cast<const RowStatus*>(status_bytes.data()),
                                           status_bytes.size() / sizeof(RowStatus));
  grpc::ByteBuffer head =
      WriteMessage(answer_bytes_ - static_cast<int64_t>(large.size()), [&](WireWriter& writer) {
        WriteHead(writer, call_, status);
        if (backward()) {
          WriteArray(writer, BackwardResponse::kDSinksFieldNumber,
                     answer.outputs[kAttentionBackwardDSinks]);
        } else {
          WriteArray(writer, Response::kLogsumexpFieldNumber, answer.outputs[kAttentionLogsumexp]);
        }
        WriteTimings(writer, Response::kTimingsFieldNumber, times);
        writer.LengthHead(Response::kProbsFieldNumber, large.size());
      });
  grpc::Slice slices[2];
  head.DumpToSingleSlice(&slices[0]).IgnoreError();
  slices[1] = answer.keep == nullptr ? grpc::Slice(large.data(), large.size())
                                     : SliceOver(large, answer.keep);
  return grpc::ByteBuffer(slices, 2);
}

}  // namespace logitd::rpc
