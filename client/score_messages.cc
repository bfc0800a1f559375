#include "client/score_messages.h"

#include <algorithm>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_format.h"
#include "client/codec.h"
#include "client/tensor_file.h"

namespace logitd::client {
namespace {

// Of an answer, at most, beside the lists.
constexpr int64_t kAnswerRowBytes = 40;
constexpr int64_t kMaxRows = std::numeric_limits<int32_t>::max();  // of an array of protobuf's

// Of a message: an answer is a step of progress, and what is lost with a stream.
constexpr int64_t kMaxMessageRows = 4096;

// Protobuf carries 2 GiB; small fields fit beside it.
constexpr int64_t kMaxPayload = std::numeric_limits<int32_t>::max() - (int64_t{64} << 20);

int64_t BytesOf(const std::vector<absl::string_view>& pieces) {
  int64_t bytes = 0;
  for (absl::string_view piece : pieces) bytes += static_cast<int64_t>(piece.size());
  return bytes;
}

// Bytes [offset, offset + bytes) of the pieces that follow each other.
std::vector<absl::string_view> Cut(const std::vector<absl::string_view>& pieces, int64_t offset,
                                   int64_t bytes) {
  std::vector<absl::string_view> cut;
  for (absl::string_view piece : pieces) {
    const auto size = static_cast<int64_t>(piece.size());
    if (offset < size && bytes > 0) {
      cut.push_back(piece.substr(static_cast<size_t>(offset),
                                 static_cast<size_t>(std::min(bytes, size - offset))));
      bytes -= static_cast<int64_t>(cut.back().size());
    }
    offset = std::max<int64_t>(0, offset - size);
  }
  return cut;
}

// Values [begin, end) of a list.
template <typename Repeated>
void CutList(const Repeated& from, int64_t begin, int64_t end, Repeated* to) {
  to->Reserve(static_cast<int>(end - begin));
  for (int64_t i = begin; i < end; ++i) to->Add(from.Get(static_cast<int>(i)));
}

// Calls visit(list, bytes of a value at most) for each parameter with one value for all rows, or
// one a row.
template <typename Visit>
void ForEachList(const v1::ScoreRequest& params, Visit visit) {
  constexpr int64_t kVarintBytes = 10;
  visit(params.temperature(), sizeof(float));
  visit(params.softcap(), sizeof(float));
  visit(params.label_smoothing(), sizeof(float));
  visit(params.smoothing(), kVarintBytes);
  visit(params.z_loss(), sizeof(float));
  visit(params.top_logprobs(), kVarintBytes);
  visit(params.extra_count(), kVarintBytes);
}

// Of a row beside its payload and its own extra ids, at most.
int64_t FieldRowBytes(const v1::ScoreRequest& params) {
  int64_t bytes = sizeof(int32_t);  // its target
  ForEachList(params,
              [&](const auto& list, int64_t value) { bytes += list.size() > 1 ? value : 0; });
  return bytes;
}

// Of a message of no rows, at most.
int64_t SmallBytes(const ScoreRequest& request) {
  constexpr int64_t kFieldHead = 2 + 5;  // a tag, and a length
  const v1::ScoreRequest& params = request.params;
  v1::ScoreRequest small;
  small.set_dtype(request.dtype);
  small.set_rows(request.rows);
  small.set_vocab(request.vocab);
  small.set_head(request.head);
  small.set_hidden_size(request.hidden_size);
  small.set_ignore_index(params.ignore_index());
  small.set_want_rank(params.want_rank());
  small.set_want_entropy(params.want_entropy());
  small.set_offset(-1);  // of all numbers the longest
  v1::ScoreTotals* totals = small.mutable_totals();
  for (auto set : {&v1::ScoreTotals::set_rows, &v1::ScoreTotals::set_counted,
                   &v1::ScoreTotals::set_ignored, &v1::ScoreTotals::set_faulty}) {
    (totals->*set)(-1);
  }
  for (auto set : {&v1::ScoreTotals::set_loss_sum, &v1::ScoreTotals::set_target_logprob_sum,
                   &v1::ScoreTotals::set_loss_mean, &v1::ScoreTotals::set_perplexity}) {
    (totals->*set)(1);
  }
  auto bytes = static_cast<int64_t>(small.ByteSizeLong());
  bytes += 3 * kFieldHead;  // payload, targets, extra ids
  if (params.extra_count_size() <= 1) bytes += 4 * int64_t{params.extra_ids_size()};
  ForEachList(params, [&](const auto& list, int64_t value) {
    if (!list.empty()) bytes += kFieldHead + (list.size() == 1 ? value : 0);
  });
  return bytes;
}

template <typename Repeated>
void Join(const Repeated& part, Repeated* all) {
  all->Add(part.begin(), part.end());
}

}  // namespace

ScoreMessages::ScoreMessages(const ScoreRequest& request, int64_t row_bytes, Sizes sizes,
                             const std::function<bool(const ScoreProgress&)>& progress)
    : request_(&request), row_bytes_(row_bytes), sizes_(sizes), progress_(progress) {
  result_.top_offsets = {0};
  result_.extra_offsets = {0};
  const auto& counts = request.params.extra_count();
  if (counts.size() > 1) {
    first_extra_ = {0};
    for (int32_t count : counts) first_extra_.push_back(first_extra_.back() + count);
  }
}

absl::StatusOr<ScoreMessages> ScoreMessages::Plan(
    const ScoreRequest& request, const v1::Limits& limits, Sizes sizes,
    const std::function<bool(const ScoreProgress&)>& progress) {
  const bool hidden = !request.head.empty();
  const int64_t elements = hidden ? request.hidden_size : request.vocab;
  if (request.rows < 1 || request.rows > kMaxRows) {
    return absl::InvalidArgumentError(
        absl::StrFormat("rows: got %d, allowed 1..%d", request.rows, kMaxRows));
  }
  if (elements < 1 || elements > (int64_t{1} << 20)) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "%s: got %d, allowed 1..%d", hidden ? "hidden_size" : "vocab", elements, 1 << 20));
  }
  if (!v1::DType_IsValid(request.dtype) || request.dtype == v1::DTYPE_UNSPECIFIED) {
    return absl::InvalidArgumentError(
        absl::StrFormat("dtype: got %d, allowed f32, f16, bf16", static_cast<int>(request.dtype)));
  }
  const int64_t row_bytes = elements * DTypeSize(request.dtype);
  const int64_t bytes = BytesOf(hidden ? request.hidden : request.logits);
  if (bytes != request.rows * row_bytes) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "%s: got %d bytes, allowed %d: %d rows of %d elements", hidden ? "hidden" : "logits", bytes,
        request.rows * row_bytes, request.rows, elements));
  }
  const v1::ScoreRequest& params = request.params;
  if (params.targets_size() != request.rows) {
    return absl::InvalidArgumentError(absl::StrFormat("targets: got %d values, allowed %d (rows)",
                                                      params.targets_size(), request.rows));
  }
  // What is cut must be there; all else the server judges.
  const std::pair<const char*, int> lists[] = {{"temperature", params.temperature_size()},
                                               {"softcap", params.softcap_size()},
                                               {"label_smoothing", params.label_smoothing_size()},
                                               {"smoothing", params.smoothing_size()},
                                               {"z_loss", params.z_loss_size()},
                                               {"top_logprobs", params.top_logprobs_size()},
                                               {"extra_count", params.extra_count_size()}};
  for (const auto& [name, size] : lists) {
    if (size <= 1 || size == request.rows) continue;
    return absl::InvalidArgumentError(absl::StrFormat(
        "%s: got %d values, allowed none, 1 or %d (rows)", name, size, request.rows));
  }
  int64_t extra = 0;
  for (int32_t count : params.extra_count()) {
    extra += count;
    if (count >= 0) continue;
    return absl::InvalidArgumentError(
        absl::StrFormat("extra_count: got %d, allowed 0 or more", count));
  }
  if (params.extra_count_size() > 1 && extra != params.extra_ids_size()) {
    return absl::InvalidArgumentError(
        absl::StrFormat("extra_count: adds up to %d, but extra has %d values: allowed is their "
                        "number",
                        extra, params.extra_ids_size()));
  }
  ScoreMessages messages(request, row_bytes, sizes, progress);
  if (absl::Status fits = messages.Replan(limits); !fits.ok()) return fits;
  return messages;
}

absl::Status ScoreMessages::Replan(const v1::Limits& limits) {
  const v1::ScoreRequest& params = request_->params;
  // Lists of a row, in a request and in an answer; where they differ from row to row, the largest.
  const int64_t extra_ids =
      params.extra_count_size() > 1
          ? *std::max_element(params.extra_count().begin(), params.extra_count().end())
          : params.extra_ids_size();
  const int64_t top =
      params.top_logprobs_size() > 0
          ? *std::max_element(params.top_logprobs().begin(), params.top_logprobs().end())
          : 0;
  const int64_t sent_bytes = row_bytes_ + 4 * (params.extra_count_size() > 1 ? extra_ids : 0);
  const int64_t shared_bytes = 4 * (params.extra_count_size() > 1 ? 0 : extra_ids);
  const int64_t answer_bytes = kAnswerRowBytes + 8 * std::max<int64_t>(top, 0) + 4 * extra_ids;
  int64_t largest = kMaxPayload;
  if (limits.max_request_bytes() > 0) largest = std::min(largest, limits.max_request_bytes());
  largest -= shared_bytes;
  int64_t rows = largest / sent_bytes;
  if (limits.max_answer_bytes() > 0) {
    rows = std::min(rows, limits.max_answer_bytes() / answer_bytes);
  }
  if (sizes_.most > 0) {
    rows = std::min(rows,
                    (sizes_.most - SmallBytes(*request_)) / (sent_bytes + FieldRowBytes(params)));
  }
  if (rows < 1 || largest < 0) {
    return absl::InvalidArgumentError(
        absl::StrFormat("one row of %d bytes, and %d of its answer, is more than a message takes: "
                        "max_request_bytes %d, max_answer_bytes %d, max_message_bytes %d",
                        sent_bytes + shared_bytes, answer_bytes, limits.max_request_bytes(),
                        limits.max_answer_bytes(), sizes_.most));
  }
  rows = std::min(rows, kMaxMessageRows);
  if (limits.max_batch_rows() > 0) rows = std::min(rows, limits.max_batch_rows());
  rows_ = std::min(rows, std::max<int64_t>(1, sizes_.about / row_bytes_));
  return absl::OkStatus();
}

int ScoreMessages::size() const {
  return static_cast<int>((request_->rows - first_row_ + rows_ - 1) / rows_);
}

// One value for all rows, or none, as it is; of one a row those of the message.
v1::ScoreRequest ScoreMessages::ParametersOf(int64_t row, int64_t rows) const {
  const v1::ScoreRequest& all = request_->params;
  v1::ScoreRequest params;
  const auto cut = [&](const auto& from, auto* to) {
    if (from.size() > 1) return CutList(from, row, row + rows, to);
    to->CopyFrom(from);
  };
  CutList(all.targets(), row, row + rows, params.mutable_targets());
  if (all.has_ignore_index()) params.set_ignore_index(all.ignore_index());
  cut(all.temperature(), params.mutable_temperature());
  cut(all.softcap(), params.mutable_softcap());
  cut(all.label_smoothing(), params.mutable_label_smoothing());
  cut(all.smoothing(), params.mutable_smoothing());
  cut(all.z_loss(), params.mutable_z_loss());
  cut(all.top_logprobs(), params.mutable_top_logprobs());
  cut(all.extra_count(), params.mutable_extra_count());
  if (first_extra_.empty()) {
    params.mutable_extra_ids()->CopyFrom(all.extra_ids());
  } else {
    CutList(all.extra_ids(), first_extra_[static_cast<size_t>(row)],
            first_extra_[static_cast<size_t>(row + rows)], params.mutable_extra_ids());
  }
  params.set_want_rank(all.want_rank());
  params.set_want_entropy(all.want_entropy());
  return params;
}

absl::StatusOr<grpc::ByteBuffer> ScoreMessages::Encode(
    int i, const std::shared_ptr<const void>& owner) const {
  const int64_t row = first_row_ + i * rows_;
  const int64_t rows = std::min(rows_, request_->rows - row);
  ScoreRequest message = {.dtype = request_->dtype,
                          .rows = rows,
                          .vocab = request_->vocab,
                          .head = request_->head,
                          .hidden_size = request_->hidden_size,
                          .params = ParametersOf(row, rows)};
  std::vector<absl::string_view>& payload =
      request_->head.empty() ? message.logits : message.hidden;
  payload = Cut(request_->head.empty() ? request_->logits : request_->hidden, row * row_bytes_,
                rows * row_bytes_);
  message.params.set_offset(request_->params.offset() + row);
  if (i == 0 && row > 0) *message.params.mutable_totals() = result_.answer.totals();
  if (i == 0 && row == 0 && request_->params.has_totals()) {
    *message.params.mutable_totals() = request_->params.totals();
  }
  return EncodeScoreRequest(message, owner);
}

absl::Status ScoreMessages::Take(int i, grpc::ByteBuffer* answer) {
  const int64_t row = first_row_ + i * rows_;
  const int64_t rows = std::min(rows_, request_->rows - row);
  absl::StatusOr<ScoreResult> part = DecodeScoreResponse(answer);
  if (!part.ok()) return part.status();
  const v1::ScoreResponse& from = part->answer;
  v1::ScoreResponse& to = result_.answer;
  const int64_t offset = request_->params.offset() + row;
  const auto wanted = [rows](bool want) { return want ? rows : 0; };
  if (part->rows() != rows || from.offset() != offset ||
      from.ranks_size() != wanted(request_->params.want_rank()) ||
      from.entropies_size() != wanted(request_->params.want_entropy())) {
    return absl::InternalError(
        absl::StrFormat("the server's answer is not to what was asked: %d rows at %d, for %d at %d",
                        part->rows(), from.offset(), rows, offset));
  }
  if (row == 0) to.set_offset(from.offset());
  Join(from.losses(), to.mutable_losses());
  Join(from.target_logprobs(), to.mutable_target_logprobs());
  Join(from.ranks(), to.mutable_ranks());
  Join(from.logsumexp(), to.mutable_logsumexp());
  Join(from.status(), to.mutable_status());
  Join(from.status_position(), to.mutable_status_position());
  Join(from.top_count(), to.mutable_top_count());
  Join(from.top_ids(), to.mutable_top_ids());
  Join(from.top_logprobs(), to.mutable_top_logprobs());
  Join(from.extra_count(), to.mutable_extra_count());
  Join(from.extra_logprobs(), to.mutable_extra_logprobs());
  Join(from.entropies(), to.mutable_entropies());
  for (int32_t count : from.top_count()) {
    result_.top_offsets.push_back(result_.top_offsets.back() + count);
  }
  for (int32_t count : from.extra_count()) {
    result_.extra_offsets.push_back(result_.extra_offsets.back() + count);
  }
  AddTimings(from.timings(), to.mutable_timings());
  *to.mutable_totals() = from.totals();
  ++result_.messages;
  taken_rows_ = row + rows;
  if (progress_ == nullptr ||
      progress_({.rows = taken_rows_, .total_rows = request_->rows, .totals = from.totals()})) {
    return absl::OkStatus();
  }
  return absl::CancelledError(
      absl::StrFormat("stopped after %d of %d rows", taken_rows_, request_->rows));
}

}  // namespace logitd::client
