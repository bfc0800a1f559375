#include "server/rpc/codecs/attention_codec.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

#include "absl/strings/str_format.h"
#include "kernels/status_macros.h"
#include "logitd/v1/attention.pb.h"
#include "server/ops/job_rows.h"
#include "server/rpc/codecs/answer_fields.h"
#include "server/rpc/codecs/dtype.h"
#include "server/rpc/codecs/field_table.h"

namespace logitd::rpc {
namespace {

constexpr NamedField<AttentionFields> kCommonFields[] = {
    {"dtype", &AttentionFields::dtype},
    {"batch", &AttentionFields::batch},
    {"heads", &AttentionFields::heads},
    {"queries", &AttentionFields::queries},
    {"keys", &AttentionFields::keys},
    {"scale", &AttentionFields::scale},
    {"window_left", &AttentionFields::window_left},
    {"window_right", &AttentionFields::window_right},
    {"sinks", &AttentionFields::sinks},
    {"out_dtype", &AttentionFields::out_dtype},
    {"shared_rows", &AttentionFields::shared_rows},
    {"shared", &AttentionFields::payload},
    {"shared_output", &AttentionFields::output},
};
constexpr NamedField<AttentionFields> kForwardFields[] = {
    {"scores", &AttentionFields::payload},
    {"mask_kind", &AttentionFields::mask_kind},
    {"mask_dtype", &AttentionFields::mask_dtype},
    {"mask_shape", &AttentionFields::mask_shape},
    {"mask", &AttentionFields::mask},
    {"want_logsumexp", &AttentionFields::want_logsumexp},
};
constexpr NamedField<AttentionFields> kBackwardFields[] = {
    {"probs", &AttentionFields::payload},
    {"d_probs", &AttentionFields::d_probs},
    {"shared_d_probs", &AttentionFields::d_probs},
    {"logsumexp", &AttentionFields::logsumexp},
};

// Choice tells what it holds by the number, which must be the same in both directions.
constexpr uint32_t kSharedNumber = v1::AttentionSoftmaxRequest::kSharedFieldNumber;
static_assert(v1::AttentionSoftmaxBackwardRequest::kSharedFieldNumber == int{kSharedNumber});
constexpr uint32_t kSharedDProbsNumber =
    v1::AttentionSoftmaxBackwardRequest::kSharedDProbsFieldNumber;

static_assert(v1::MASK_KIND_NONE == static_cast<int>(MaskKind::kNone));
static_assert(v1::MASK_KIND_BOOL == static_cast<int>(MaskKind::kBool));
static_assert(v1::MASK_KIND_ADDITIVE == static_cast<int>(MaskKind::kAdditive));

// A size below 0 counts as too much.
int64_t SaturatingProduct(std::initializer_list<int64_t> sizes) {
  constexpr int64_t kHuge = std::numeric_limits<int64_t>::max();
  int64_t product = 1;
  for (int64_t size : sizes) {
    if (size < 0 || __builtin_mul_overflow(product, size, &product)) return kHuge;
  }
  return product;
}

// The elements of the mask that the rows of `shape` use, from the first to the last.
struct MaskExtent {
  int64_t first = 0;
  int64_t end = 0;
};

// Takes the same time for any shape. The mask's part for a head starts at or after that of the head
// before it, except where a batch item begins and the items share one mask. So the first element is
// used by the first head, by the next one (of which all queries are there), or by the first head of
// a later item; the last element likewise.
MaskExtent FindMaskExtent(const AttentionShape& shape, const AttentionMask& mask) {
  const int64_t last_row = shape.first_row + shape.rows - 1;
  const int64_t first = shape.first_row / shape.queries;  // heads, counted over the items
  const int64_t last = last_row / shape.queries;
  const auto start = [&](int64_t head) {
    return head / shape.heads * mask.batch_stride + head % shape.heads * mask.head_stride;
  };
  MaskExtent extent{.first = std::numeric_limits<int64_t>::max()};
  for (const int64_t head : {first, first + 1, (first / shape.heads + 1) * shape.heads}) {
    if (head > last) continue;
    const int64_t query = head == first ? shape.first_row % shape.queries : 0;
    extent.first = std::min(extent.first, start(head) + query * mask.query_stride);
  }
  for (const int64_t head : {last, last - 1, last / shape.heads * shape.heads - 1}) {
    if (head < first) continue;
    const int64_t query = head == last ? last_row % shape.queries : shape.queries - 1;
    extent.end = std::max(extent.end, start(head) + query * mask.query_stride + shape.keys);
  }
  return extent;
}

// The bytes of one row in the answer.
constexpr int64_t kFaultBytes = sizeof(int64_t) + kMaxStatusBytes;
constexpr int64_t kFixedBytes = 10 * kMaxLengthHead + kMaxFixedBytes;

// The first fields of an answer, which have the same numbers in both directions.
void WriteHead(WireWriter& writer, const ops::AttentionCall& call,
               absl::Span<const RowStatus> status) {
  using Answer = v1::AttentionSoftmaxResponse;
  writer.VarintField(Answer::kFirstRowFieldNumber, call.shape.first_row);
  writer.VarintField(Answer::kRowsFieldNumber, call.shape.rows);
  writer.VarintField(Answer::kDtypeFieldNumber, DTypeToWire(call.out_dtype));
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
static_assert(Response::kOutputBytesFieldNumber == int{BackwardResponse::kOutputBytesFieldNumber});

}  // namespace

absl::Status ParseAttentionFields(AttentionDirection direction, Pieces pieces, size_t max_list,
                                  AttentionFields* fields) {
  static const auto* const forward =
      new auto(FieldTable<AttentionFields>(v1::AttentionSoftmaxRequest::descriptor())
                   .Add(kCommonFields)
                   .Add(kForwardFields));
  static const auto* const backward =
      new auto(FieldTable<AttentionFields>(v1::AttentionSoftmaxBackwardRequest::descriptor())
                   .Add(kCommonFields)
                   .Add(kBackwardFields));
  return ParseMessage<AttentionFields>(
      pieces, direction == AttentionDirection::kForward ? *forward : *backward, max_list, fields);
}

absl::Status AttentionCodec::Parse(Pieces pieces, int64_t max_rows, engine::JobSpec* spec) {
  AttentionFields fields;
  const auto direction = backward() ? AttentionDirection::kBackward : AttentionDirection::kForward;
  LOGITD_RETURN_IF_ERROR(
      ParseAttentionFields(direction, pieces, static_cast<size_t>(max_rows), &fields));
  const bool continues = tensor_ != nullptr && tensor_->next_row > 0;
  if (continues && static_cast<const AttentionHeader&>(fields) != AttentionHeader{}) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "message: got a shape or a parameter at row %d of a tensor, allowed only in the tensor's "
        "first message",
        tensor_->next_row));
  }
  header_ = continues ? tensor_->header : static_cast<const AttentionHeader&>(fields);
  // A stream keeps them for as long as its tensor takes.
  if (header_.sinks.size() > static_cast<size_t>(max_rows)) {
    return absl::InvalidArgumentError(
        absl::StrFormat("sinks: got %d values, allowed 0..%d", header_.sinks.size(), max_rows));
  }
  LOGITD_RETURN_IF_ERROR(DTypeFromWire("dtype", header_.dtype, &call_.dtype));
  LOGITD_RETURN_IF_ERROR(ReadRows(fields));

  AttentionSoftmaxRequest request;
  LOGITD_RETURN_IF_ERROR(ReadParameters(&request));
  if (!backward()) LOGITD_RETURN_IF_ERROR(ReadMask(fields.mask, &request));
  LOGITD_RETURN_IF_ERROR(CheckAttentionSoftmax(request));
  if (call_.mask.kind != MaskKind::kNone) LOGITD_RETURN_IF_ERROR(CheckMaskRows(fields.mask.bytes));
  if (backward()) LOGITD_RETURN_IF_ERROR(CheckBackwardInputs(fields));
  LOGITD_RETURN_IF_ERROR(Locate(pieces, fields));

  call_.FillSpec(spec);
  answer_bytes_ = call_.out_bytes() + call_.shape.rows * kFaultBytes + kFixedBytes;
  if (backward()) answer_bytes_ += call_.sinks * static_cast<int64_t>(sizeof(double));
  if (call_.want_logsumexp) answer_bytes_ += call_.shape.rows * static_cast<int64_t>(sizeof(float));
  if (tensor_ != nullptr) {
    tensor_->next_row += call_.shape.rows;
    const AttentionShape& shape = call_.shape;
    const bool complete = tensor_->next_row == shape.batch * shape.heads * shape.queries;
    if (complete) {
      tensor_->next_row = 0;
      tensor_->header.sinks = ValueList();
    } else if (!continues) {
      tensor_->header = header_;
    }
  }
  return absl::OkStatus();
}

// Where the arrays lie. Runs after the checks of the shape, so that nothing overflows.
absl::Status AttentionCodec::Locate(Pieces pieces, const AttentionFields& fields) {
  const auto plain = [](const ByteRange& range) {
    return Payload{.range = range, .rows = 1, .row_bytes = range.bytes};
  };
  const size_t element = SizeOf(call_.dtype);
  if (fields.payload.number == kSharedNumber) {
    LOGITD_RETURN_IF_ERROR(LocateRows("shared", pieces, fields.payload.message.parts, element,
                                      find_lease_, &payload_));
  }
  copied_[0] = plain(backward() ? fields.d_probs.range : fields.mask);
  copied_[1] = plain(fields.logsumexp);
  if (fields.d_probs.number == kSharedDProbsNumber) {
    copied_[0] = {
        .rows = payload_.rows, .row_bytes = payload_.row_bytes, .field = "shared_d_probs"};
    LOGITD_RETURN_IF_ERROR(LocateRows("shared_d_probs", pieces, fields.d_probs.message.parts,
                                      element, find_lease_, &copied_[0]));
  }
  if (fields.output.number == 0) return absl::OkStatus();
  const size_t out_element = SizeOf(call_.out_dtype);
  LOGITD_RETURN_IF_ERROR(LocateOutput(
      "shared_output", pieces, fields.output.message.parts, out_element, call_.shape.rows,
      static_cast<size_t>(call_.shape.keys) * out_element, find_lease_, &output_));
  LOGITD_RETURN_IF_ERROR(CheckApart("shared", payload_, output_));
  return CheckApart("shared_d_probs", copied_[0], output_);
}

absl::Status AttentionCodec::CheckBackwardInputs(const AttentionFields& fields) const {
  const bool shared = fields.d_probs.number == kSharedDProbsNumber;
  if (!shared && fields.d_probs.range.bytes != payload_.range.bytes) {
    return absl::InvalidArgumentError(
        absl::StrFormat("d_probs: got %d bytes, allowed %d, as many as probs",
                        fields.d_probs.range.bytes, payload_.range.bytes));
  }
  const size_t wanted = header_.sinks.empty() ? 0 : call_.shape.rows * sizeof(float);
  if (fields.logsumexp.bytes == wanted) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrFormat(
      "logsumexp: got %d bytes, allowed %d: a float for each of %d rows where there are sinks, "
      "else none",
      fields.logsumexp.bytes, wanted, call_.shape.rows));
}

// Reads the shape, and the rows that the message brings. CheckAttentionSoftmax checks the sizes.
absl::Status AttentionCodec::ReadRows(const AttentionFields& fields) {
  const bool shared = fields.payload.number == kSharedNumber;
  const size_t row_bytes =
      static_cast<size_t>(std::clamp<int64_t>(header_.keys, 1, kMaxKeys)) * SizeOf(call_.dtype);
  const int64_t total = SaturatingProduct({header_.batch, header_.heads, header_.queries});
  AttentionShape& shape = call_.shape;
  shape = {.batch = header_.batch,
           .heads = header_.heads,
           .queries = header_.queries,
           .keys = header_.keys,
           .rows = total};
  const bool sized = total > 0 && header_.keys > 0 && header_.keys <= kMaxKeys;
  if (tensor_ != nullptr && sized) {
    shape.first_row = tensor_->next_row;
    shape.rows = total - shape.first_row;
  }
  const int64_t left = shape.rows;
  if (!shared && fields.shared_rows != 0) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "shared_rows: got %d without shared, allowed only with it", fields.shared_rows));
  }
  if (shared && fields.shared_rows != 0) {
    const int64_t least = tensor_ == nullptr ? left : 1;
    if (fields.shared_rows < least || fields.shared_rows > left) {
      return absl::InvalidArgumentError(
          absl::StrFormat("shared_rows: got %d at row %d, allowed 0, or %d..%d", fields.shared_rows,
                          shape.first_row, least, left));
    }
    shape.rows = fields.shared_rows;
  }
  if (!shared && tensor_ != nullptr && sized) {
    const size_t bytes = fields.payload.range.bytes;
    shape.rows = static_cast<int64_t>(bytes / row_bytes);
    if (bytes % row_bytes != 0 || shape.rows < 1 || shape.rows > left) {
      return absl::InvalidArgumentError(absl::StrFormat(
          "%s: got %d bytes at row %d, allowed 1..%d whole rows of %d bytes",
          backward() ? "probs" : "scores", bytes, shape.first_row, left, row_bytes));
    }
  }
  payload_ = {.range = fields.payload.range, .rows = shape.rows, .row_bytes = row_bytes};
  // A lease has no size of its own to compare with: the shape says how many bytes there must be.
  // The product may wrap around only where the checks refuse the shape before they compare.
  if (shared) payload_.range = {.bytes = static_cast<size_t>(shape.rows) * row_bytes};
  return absl::OkStatus();
}

absl::Status AttentionCodec::ReadParameters(AttentionSoftmaxRequest* request) {
  call_.out_dtype = call_.dtype;
  if (header_.out_dtype != v1::DTYPE_UNSPECIFIED) {
    LOGITD_RETURN_IF_ERROR(DTypeFromWire("out_dtype", header_.out_dtype, &call_.out_dtype));
  }
  call_.scale = header_.scale.value_or(1.0f);
  call_.window = {.left = header_.window_left.value_or(AttentionWindow::kUnbounded),
                  .right = header_.window_right.value_or(AttentionWindow::kUnbounded)};
  call_.sinks = static_cast<int64_t>(header_.sinks.size());
  call_.want_logsumexp = header_.want_logsumexp;
  *request = {.shape = call_.shape,
              .dtype = call_.dtype,
              .out_dtype = call_.out_dtype,
              .backward = backward(),
              .payload_bytes = static_cast<int64_t>(payload_.range.bytes),
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
    LOGITD_RETURN_IF_ERROR(DTypeFromWire("mask_dtype", header_.mask_dtype, &view.dtype));
  } else if (header_.mask_dtype != v1::DTYPE_UNSPECIFIED) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "mask_dtype: got %d with mask_kind %d, allowed only with MASK_KIND_ADDITIVE",
        header_.mask_dtype, header_.mask_kind));
  }
  request->mask = view.kind;
  request->mask_dtype = view.dtype;
  call_.mask_bytes = static_cast<int64_t>(mask.bytes);
  request->mask_bytes = call_.mask_bytes;
  if (!has_mask) return absl::OkStatus();
  std::copy(shape.begin(), shape.end(), request->mask_shape);
  // CheckAttentionSoftmax expects a whole mask; CheckMaskRows checks the part that a message of a
  // stream brings.
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

// Also finds where the mask begins. Runs after CheckAttentionSoftmax, so that nothing overflows.
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

void AttentionCodec::WriteInputs(absl::Span<std::byte* const> inputs, const engine::AxisCounts&) {
  ops::MoveOut(header_.sinks, backward() ? ops::kAttentionBackwardInSinks : ops::kAttentionInSinks,
               inputs);
}

SharedAnswer AttentionCodec::shared_answer(const engine::JobAnswer& answer) const {
  if (output_.arena == nullptr) return {};
  return {.arena = output_.arena,
          .offset = output_.offset,
          .bytes = answer.Out(backward() ? ops::kAttentionBackwardDScores : ops::kAttentionProbs)};
}

// The large array comes last, in a slice of its own, which refers to the slab where that is kept.
EncodedMessage AttentionCodec::Encode(const engine::JobAnswer& answer, const CallTimes& times) {
  const bool shared = output_.arena != nullptr;
  const absl::Span<const std::byte> large =
      answer.Out(backward() ? ops::kAttentionBackwardDScores : ops::kAttentionProbs);
  EncodedMessage head = EncodedMessage::Make(
      answer_bytes_ - static_cast<int64_t>(large.size()), [&](WireWriter& writer) {
        WriteHead(writer, call_,
                  answer.Out(backward() ? ops::kAttentionBackwardStatus : ops::kAttentionStatus));
        if (backward()) {
          WriteArray(writer, BackwardResponse::kDSinksFieldNumber,
                     answer.Out(ops::kAttentionBackwardDSinks));
        } else {
          WriteArray(writer, Response::kLogsumexpFieldNumber, answer.Out(ops::kAttentionLogsumexp));
        }
        WriteTimings(writer, Response::kTimingsFieldNumber, times);
        if (shared) {
          writer.VarintField(Response::kOutputBytesFieldNumber, static_cast<int64_t>(large.size()));
        } else {
          writer.LengthHead(Response::kProbsFieldNumber, large.size());
        }
      });
  if (shared) return head;
  if (answer.keep != nullptr) {
    head.Append({.span = large, .keep = answer.keep, .payer = http2::Payer::kKeep});
  } else {  // the slab takes the next batch
    head.Append(EncodedMessage::Copy({reinterpret_cast<const char*>(large.data()), large.size()}));
  }
  return head;
}

}  // namespace logitd::rpc
