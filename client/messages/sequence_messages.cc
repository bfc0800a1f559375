#include "client/messages/sequence_messages.h"

#include <google/protobuf/descriptor.h>

#include <algorithm>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_format.h"
#include "client/messages/codec.h"
#include "client/messages/plan.h"
#include "client/tensor_file.h"

namespace logitd::client {
namespace {

constexpr int64_t kAnswerRowBytes = 40;  // a row of an answer without its lists, at most
constexpr int64_t kMaxRows = std::numeric_limits<int32_t>::max();  // of an array of protobuf's
// Rows of a message at most: an answer is a step of progress, and what a lost stream costs.
constexpr int64_t kMaxMessageRows = 4096;

template <typename List>
int64_t LargestOf(const List& list) {
  return list.empty() ? 0 : *std::max_element(list.begin(), list.end());
}

// Bytes of a row's top tokens in an answer, at most.
template <typename List>
int64_t TopBytes(const List& counts) {
  return 8 * std::max<int64_t>(LargestOf(counts), 0);
}

// One input of a request.
struct RowInput {
  const char* prefix;  // of its fields
  v1::DType dtype;
  bool hidden;
  int64_t elements;
  const Pieces& payload;

  int64_t row_bytes() const { return elements * DTypeSize(dtype); }
};

template <typename Params>
RowInput FirstOf(const LogitsRequest<Params>& request) {
  const bool hidden = !request.head.empty();
  return {"", request.dtype, hidden, hidden ? request.hidden_size : request.vocab,
          PayloadOf(request)};
}
RowInput SecondOf(const DivergenceRequest& request) {
  const bool hidden = !request.reference_head.empty();
  return {"reference_", ReferenceDType(request), hidden,
          hidden ? request.reference_hidden_size : request.vocab, ReferenceOf(request)};
}

std::vector<RowInput> InputsOf(const ScoreRequest& request) { return {FirstOf(request)}; }
std::vector<RowInput> InputsOf(const DivergenceRequest& request) {
  return {FirstOf(request), SecondOf(request)};
}

// The server begins the reference's rows at multiples of this.
constexpr int64_t kReferenceBorder = 16;

int64_t RowBytesOf(const ScoreRequest& request) { return FirstOf(request).row_bytes(); }
int64_t RowBytesOf(const DivergenceRequest& request) {
  const int64_t reference = SecondOf(request).row_bytes();
  return FirstOf(request).row_bytes() +
         (reference + kReferenceBorder - 1) / kReferenceBorder * kReferenceBorder;
}

// The message of `rows` rows, without its payload and the parameters.
template <typename Params>
void CopyShape(const LogitsRequest<Params>& from, int64_t rows, LogitsRequest<Params>* to) {
  to->dtype = from.dtype;
  to->rows = rows;
  to->vocab = from.vocab;
  to->head = from.head;
  to->hidden_size = from.hidden_size;
  to->arena = from.arena;
  to->params.set_head_version(from.params.head_version());
}
ScoreRequest MessageOf(const ScoreRequest& request, int64_t rows) {
  ScoreRequest message;
  CopyShape(request, rows, &message);
  return message;
}
DivergenceRequest MessageOf(const DivergenceRequest& request, int64_t rows) {
  DivergenceRequest message;
  CopyShape(request, rows, &message);
  message.reference_dtype = request.reference_dtype;
  message.reference_head = request.reference_head;
  message.reference_hidden_size = request.reference_hidden_size;
  message.reference_arena = request.reference_arena;
  message.params.set_reference_head_version(request.params.reference_head_version());
  return message;
}

// Sets the fields of the request's inputs, for their size.
template <typename Params>
void SetShape(const LogitsRequest<Params>& request, Params* fields) {
  fields->set_dtype(request.dtype);
  fields->set_rows(request.rows);
  fields->set_vocab(request.vocab);
  fields->set_head(request.head);
  fields->set_hidden_size(request.hidden_size);
  if (!request.head.empty()) fields->set_head_version(-1);  // the longest number
}
void SetShape(const DivergenceRequest& request, v1::DivergenceRequest* fields) {
  SetShape<v1::DivergenceRequest>(request, fields);
  fields->set_reference_dtype(ReferenceDType(request));
  fields->set_reference_head(request.reference_head);
  fields->set_reference_hidden_size(request.reference_hidden_size);
  if (!request.reference_head.empty()) fields->set_reference_head_version(-1);
}

// The versions that a new stream demands: those of the answers so far.
void DemandHeads(const v1::ScoreResponse& answer, v1::ScoreRequest* params) {
  params->set_head_version(answer.head_version());
}
void DemandHeads(const v1::DivergenceResponse& answer, v1::DivergenceRequest* params) {
  params->set_head_version(answer.head_version());
  params->set_reference_head_version(answer.reference_head_version());
}

Pieces CutInput(const RowInput& input, int64_t row, int64_t rows) {
  return CutPieces(input.payload, row * input.row_bytes(), rows * input.row_bytes());
}
absl::StatusOr<grpc::ByteBuffer> EncodeRows(const ScoreRequest& message,
                                            const ScoreRequest& request, int64_t row,
                                            const Owner& owner) {
  return EncodeRequest(message, CutInput(FirstOf(request), row, message.rows), owner);
}
absl::StatusOr<grpc::ByteBuffer> EncodeRows(const DivergenceRequest& message,
                                            const DivergenceRequest& request, int64_t row,
                                            const Owner& owner) {
  return EncodeRequest(message, CutInput(FirstOf(request), row, message.rows),
                       CutInput(SecondOf(request), row, message.rows), owner);
}

// Costs beside those of the input's rows.
MessageCost CostOf(const v1::ScoreRequest& params) {
  const bool lists_per_row = params.extra_count_size() > 1;
  const int64_t extra_ids =
      lists_per_row ? LargestOf(params.extra_count()) : params.extra_ids_size();
  const bool own_supports = params.support_count_size() > 1;
  const int64_t support =
      own_supports ? LargestOf(params.support_count()) : params.support_ids_size();
  return {.bytes = 4 * ((lists_per_row ? 0 : extra_ids) + (own_supports ? 0 : support)),
          .row_bytes = 4 * ((lists_per_row ? extra_ids : 0) + (own_supports ? support : 0)),
          .answer_row_bytes = kAnswerRowBytes + TopBytes(params.top_logprobs()) + 4 * extra_ids};
}
MessageCost CostOf(const v1::DivergenceRequest& params) {
  return {.row_bytes = 0,
          .answer_row_bytes = kAnswerRowBytes + TopBytes(params.top_logprobs()) +
                              TopBytes(params.reference_top_logprobs())};
}

// True: the answer has what was asked for.
bool Fits(const v1::ScoreRequest& asked, const v1::ScoreResponse& answer, int64_t rows) {
  return answer.ranks_size() == (asked.want_rank() ? rows : 0) &&
         answer.entropies_size() == (asked.want_entropy() ? rows : 0);
}
bool Fits(const v1::DivergenceRequest& asked, const v1::DivergenceResponse& answer, int64_t rows) {
  return answer.target_logprobs_size() == (asked.targets_size() > 0 ? rows : 0);
}

constexpr bool NeedsTargets(const ScoreRequest&) { return true; }
constexpr bool NeedsTargets(const DivergenceRequest&) { return false; }

// Sets every field to a number that takes the most bytes.
void FillNumbers(google::protobuf::Message* message) {
  const auto& descriptor = *message->GetDescriptor();
  for (int i = 0; i < descriptor.field_count(); ++i) {
    const auto* const field = descriptor.field(i);
    if (field->cpp_type() == google::protobuf::FieldDescriptor::CPPTYPE_INT64) {
      message->GetReflection()->SetInt64(message, field, -1);
    } else {
      message->GetReflection()->SetDouble(message, field, 1);
    }
  }
}

absl::Status CheckInput(const RowInput& input, int64_t rows) {
  const char* const prefix = input.prefix;
  if (input.elements < 1 || input.elements > (int64_t{1} << 20)) {
    return absl::InvalidArgumentError(
        absl::StrFormat("%s: got %d, allowed 1..%d",
                        input.hidden ? absl::StrFormat("%shidden_size", prefix) : "vocab",
                        input.elements, 1 << 20));
  }
  if (!v1::DType_IsValid(input.dtype) || input.dtype == v1::DTYPE_UNSPECIFIED) {
    return absl::InvalidArgumentError(absl::StrFormat("%sdtype: got %d, allowed f32, f16, bf16",
                                                      prefix, static_cast<int>(input.dtype)));
  }
  int64_t bytes = 0;
  for (absl::string_view piece : input.payload) bytes += static_cast<int64_t>(piece.size());
  if (bytes == rows * input.row_bytes()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrFormat(
      "%s%s: got %d bytes, allowed %d: %d rows of %d elements", prefix,
      input.hidden ? "hidden" : "logits", bytes, rows * input.row_bytes(), rows, input.elements));
}

}  // namespace

template <typename Method>
SequenceMessages<Method>::SequenceMessages(const Request& request, const ClientOptions& options,
                                           Progress progress)
    : request_(request),
      options_(options),
      progress_(std::move(progress)),
      params_(request.params),
      row_bytes_(RowBytesOf(request)) {}

template <typename Method>
absl::StatusOr<std::unique_ptr<SequenceMessages<Method>>> SequenceMessages<Method>::Plan(
    const Request& request, const v1::Limits& limits, const ClientOptions& options,
    Progress progress) {
  std::unique_ptr<SequenceMessages> messages(
      new SequenceMessages(request, options, std::move(progress)));
  if (absl::Status good = messages->Check(); !good.ok()) return good;
  if (absl::Status fits = messages->Replan(limits); !fits.ok()) return fits;
  return messages;
}

// Checks the sizes that cutting relies on. The server checks everything else.
template <typename Method>
absl::Status SequenceMessages<Method>::Check() const {
  if (request_.rows < 1 || request_.rows > kMaxRows) {
    return absl::InvalidArgumentError(
        absl::StrFormat("rows: got %d, allowed 1..%d", request_.rows, kMaxRows));
  }
  for (const RowInput& input : InputsOf(request_)) {
    if (absl::Status good = CheckInput(input, request_.rows); !good.ok()) return good;
  }
  const int targets = request_.params.targets_size();
  if (targets != request_.rows && (targets > 0 || NeedsTargets(request_))) {
    return absl::InvalidArgumentError(
        absl::StrFormat("targets: got %d values, allowed %s%d (rows)", targets,
                        NeedsTargets(request_) ? "" : "none or ", request_.rows));
  }
  return params_.Check(request_.rows);
}

// Encoded size of a message, at most, without its payload and without the parameters of its rows.
template <typename Method>
int64_t SequenceMessages<Method>::FieldBytes() const {
  decltype(Request::params) fields;
  params_.Cut(0, 1, &fields);
  SetShape(request_, &fields);
  fields.set_offset(-1);  // the longest number
  FillNumbers(fields.mutable_totals());
  // Per input: the payload's tag; vocab, head and hidden_size where they are 0. Per list, whose
  // length is encoded in 1 byte here and in 3 bytes at kMaxMessageRows: the difference.
  const size_t other =
      16 * InputsOf(request_).size() + 2 * RowParams(*fields.GetDescriptor()).size();
  return static_cast<int64_t>(fields.ByteSizeLong() + other);
}

template <typename Method>
absl::Status SequenceMessages<Method>::Replan(const v1::Limits& limits) {
  MessageCost cost = CostOf(request_.params);
  cost.row_bytes += row_bytes_;
  cost.field_bytes = FieldBytes();
  cost.field_row_bytes = params_.bytes_per_row();
  const absl::StatusOr<int64_t> rows = RowsPerMessage(limits, options_.max_message_bytes, cost);
  if (!rows.ok()) return rows.status();
  message_rows_ = std::min(
      {*rows, kMaxMessageRows, std::max<int64_t>(1, options_.score_message_bytes / row_bytes_)});
  return absl::OkStatus();
}

template <typename Method>
int SequenceMessages<Method>::size() const {
  return static_cast<int>((request_.rows - first_row_ + message_rows_ - 1) / message_rows_);
}

template <typename Method>
typename SequenceMessages<Method>::Rows SequenceMessages<Method>::RowsOf(int i) const {
  const int64_t first = first_row_ + i * message_rows_;
  return {.first = first, .count = std::min(message_rows_, request_.rows - first)};
}

template <typename Method>
absl::StatusOr<grpc::ByteBuffer> SequenceMessages<Method>::Encode(
    int i, const std::shared_ptr<const void>& owner) const {
  const auto [row, rows] = RowsOf(i);
  Request message = MessageOf(request_, rows);
  params_.Cut(row, rows, &message.params);
  message.params.set_offset(request_.params.offset() + row);
  if (i == 0 && row > 0) {
    *message.params.mutable_totals() = result_.answer.totals();
    DemandHeads(result_.answer, &message.params);
  }
  if (i == 0 && row == 0 && request_.params.has_totals()) {
    *message.params.mutable_totals() = request_.params.totals();
  }
  return EncodeRows(message, request_, row, owner);
}

template <typename Method>
absl::Status SequenceMessages<Method>::Take(int i, grpc::ByteBuffer* answer) {
  const auto [row, rows] = RowsOf(i);
  absl::StatusOr<Result> part = DecodeResponse<decltype(Result::answer)>(answer);
  if (!part.ok()) return part.status();
  const auto& from = part->answer;
  const int64_t offset = request_.params.offset() + row;
  if (part->rows() != rows || from.offset() != offset || !Fits(request_.params, from, rows)) {
    return absl::InternalError(absl::StrFormat(
        "the server's answer does not fit the message: got %d rows at %d, asked for %d at %d",
        part->rows(), from.offset(), rows, offset));
  }
  const typename Method::Progress now = {
      .rows = row + rows, .total_rows = request_.rows, .totals = from.totals()};
  AppendRows(*std::move(part), &result_);
  taken_rows_ = now.rows;
  if (progress_ == nullptr || progress_(now)) return absl::OkStatus();
  return absl::CancelledError(
      absl::StrFormat("stopped after %d of %d rows", taken_rows_, request_.rows));
}

template class SequenceMessages<ScoreMethod>;
template class SequenceMessages<DivergenceMethod>;

}  // namespace logitd::client
