#include "client/messages/score_messages.h"

#include <algorithm>
#include <limits>
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

int64_t ElementsOf(const ScoreRequest& request) {
  return request.head.empty() ? request.vocab : request.hidden_size;
}

template <typename List>
int64_t LargestOf(const List& list) {
  return list.empty() ? 0 : *std::max_element(list.begin(), list.end());
}

}  // namespace

ScoreMessages::ScoreMessages(const ScoreRequest& request, const ClientOptions& options,
                             Progress progress)
    : request_(request),
      options_(options),
      progress_(std::move(progress)),
      params_(request.params),
      row_bytes_(ElementsOf(request) * DTypeSize(request.dtype)) {}

absl::StatusOr<std::unique_ptr<ScoreMessages>> ScoreMessages::Plan(const ScoreRequest& request,
                                                                   const v1::Limits& limits,
                                                                   const ClientOptions& options,
                                                                   Progress progress) {
  std::unique_ptr<ScoreMessages> messages(new ScoreMessages(request, options, std::move(progress)));
  if (absl::Status good = messages->Check(); !good.ok()) return good;
  if (absl::Status fits = messages->Replan(limits); !fits.ok()) return fits;
  return messages;
}

// What is cut must have the right size. The server checks everything else.
absl::Status ScoreMessages::Check() const {
  const bool hidden = !request_.head.empty();
  const int64_t elements = ElementsOf(request_);
  if (request_.rows < 1 || request_.rows > kMaxRows) {
    return absl::InvalidArgumentError(
        absl::StrFormat("rows: got %d, allowed 1..%d", request_.rows, kMaxRows));
  }
  if (elements < 1 || elements > (int64_t{1} << 20)) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "%s: got %d, allowed 1..%d", hidden ? "hidden_size" : "vocab", elements, 1 << 20));
  }
  if (!v1::DType_IsValid(request_.dtype) || request_.dtype == v1::DTYPE_UNSPECIFIED) {
    return absl::InvalidArgumentError(
        absl::StrFormat("dtype: got %d, allowed f32, f16, bf16", static_cast<int>(request_.dtype)));
  }
  int64_t bytes = 0;
  for (absl::string_view piece : PayloadOf(request_)) bytes += static_cast<int64_t>(piece.size());
  if (bytes != request_.rows * row_bytes_) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "%s: got %d bytes, allowed %d: %d rows of %d elements", hidden ? "hidden" : "logits", bytes,
        request_.rows * row_bytes_, request_.rows, elements));
  }
  if (request_.params.targets_size() != request_.rows) {
    return absl::InvalidArgumentError(absl::StrFormat("targets: got %d values, allowed %d (rows)",
                                                      request_.params.targets_size(),
                                                      request_.rows));
  }
  return params_.Check(request_.rows);
}

// Encoded size of a message, at most, without its payload and without the parameters of its rows.
int64_t ScoreMessages::FieldBytes() const {
  v1::ScoreRequest fields;
  params_.Cut(0, 1, &fields);
  fields.set_dtype(request_.dtype);
  fields.set_rows(request_.rows);
  fields.set_vocab(request_.vocab);
  fields.set_head(request_.head);
  fields.set_hidden_size(request_.hidden_size);
  fields.set_offset(-1);  // the longest number, as the next
  if (!request_.head.empty()) fields.set_head_version(-1);
  v1::ScoreTotals* totals = fields.mutable_totals();
  for (auto set : {&v1::ScoreTotals::set_rows, &v1::ScoreTotals::set_counted,
                   &v1::ScoreTotals::set_ignored, &v1::ScoreTotals::set_faulty}) {
    (totals->*set)(-1);
  }
  for (auto set : {&v1::ScoreTotals::set_loss_sum, &v1::ScoreTotals::set_target_logprob_sum,
                   &v1::ScoreTotals::set_loss_mean, &v1::ScoreTotals::set_perplexity}) {
    (totals->*set)(1);
  }
  // The payload's tag; vocab, head and hidden_size where they are 0; and per list, whose length is
  // encoded in 1 byte here and in 3 bytes at kMaxMessageRows, the difference.
  const auto other =
      static_cast<int64_t>(16 + 2 * RowParams(*v1::ScoreRequest::descriptor()).size());
  return static_cast<int64_t>(fields.ByteSizeLong()) + other;
}

absl::Status ScoreMessages::Replan(const v1::Limits& limits) {
  const v1::ScoreRequest& params = request_.params;
  const bool lists_per_row = params.extra_count_size() > 1;
  const int64_t extra_ids =
      lists_per_row ? LargestOf(params.extra_count()) : params.extra_ids_size();
  const bool own_supports = params.support_count_size() > 1;
  const int64_t support =
      own_supports ? LargestOf(params.support_count()) : params.support_ids_size();
  const int64_t list_bytes = 4 * ((lists_per_row ? 0 : extra_ids) + (own_supports ? 0 : support));
  const int64_t row_list_bytes =
      4 * ((lists_per_row ? extra_ids : 0) + (own_supports ? support : 0));
  const int64_t top = std::max<int64_t>(LargestOf(params.top_logprobs()), 0);
  const absl::StatusOr<int64_t> rows =
      RowsPerMessage(limits, options_.max_message_bytes,
                     {.bytes = list_bytes,
                      .row_bytes = row_bytes_ + row_list_bytes,
                      .answer_row_bytes = kAnswerRowBytes + 8 * top + 4 * extra_ids,
                      .field_bytes = FieldBytes(),
                      .field_row_bytes = params_.bytes_per_row()});
  if (!rows.ok()) return rows.status();
  message_rows_ = std::min(
      {*rows, kMaxMessageRows, std::max<int64_t>(1, options_.score_message_bytes / row_bytes_)});
  return absl::OkStatus();
}

int ScoreMessages::size() const {
  return static_cast<int>((request_.rows - first_row_ + message_rows_ - 1) / message_rows_);
}

ScoreMessages::Rows ScoreMessages::RowsOf(int i) const {
  const int64_t first = first_row_ + i * message_rows_;
  return {.first = first, .count = std::min(message_rows_, request_.rows - first)};
}

absl::StatusOr<grpc::ByteBuffer> ScoreMessages::Encode(
    int i, const std::shared_ptr<const void>& owner) const {
  const auto [row, rows] = RowsOf(i);
  ScoreRequest message = {.dtype = request_.dtype,
                          .rows = rows,
                          .vocab = request_.vocab,
                          .head = request_.head,
                          .hidden_size = request_.hidden_size,
                          .arena = request_.arena};
  params_.Cut(row, rows, &message.params);
  message.params.set_offset(request_.params.offset() + row);
  message.params.set_head_version(request_.params.head_version());
  if (i == 0 && row > 0) {
    *message.params.mutable_totals() = result_.answer.totals();
    message.params.set_head_version(result_.answer.head_version());
  }
  if (i == 0 && row == 0 && request_.params.has_totals()) {
    *message.params.mutable_totals() = request_.params.totals();
  }
  return EncodeRequest(message, CutPieces(PayloadOf(request_), row * row_bytes_, rows * row_bytes_),
                       owner);
}

absl::Status ScoreMessages::Take(int i, grpc::ByteBuffer* answer) {
  const auto [row, rows] = RowsOf(i);
  absl::StatusOr<ScoreResult> part = DecodeResponse<v1::ScoreResponse>(answer);
  if (!part.ok()) return part.status();
  const v1::ScoreResponse& from = part->answer;
  const int64_t offset = request_.params.offset() + row;
  const auto size_if = [rows = rows](bool wanted) { return wanted ? rows : 0; };
  if (part->rows() != rows || from.offset() != offset ||
      from.ranks_size() != size_if(request_.params.want_rank()) ||
      from.entropies_size() != size_if(request_.params.want_entropy())) {
    return absl::InternalError(absl::StrFormat(
        "the server's answer does not fit the message: got %d rows at %d, asked for %d at %d",
        part->rows(), from.offset(), rows, offset));
  }
  const ScoreProgress now = {
      .rows = row + rows, .total_rows = request_.rows, .totals = from.totals()};
  AppendRows(*std::move(part), &result_);
  taken_rows_ = now.rows;
  if (progress_ == nullptr || progress_(now)) return absl::OkStatus();
  return absl::CancelledError(
      absl::StrFormat("stopped after %d of %d rows", taken_rows_, request_.rows));
}

}  // namespace logitd::client
