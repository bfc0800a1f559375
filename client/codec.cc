#include "client/codec.h"

#include <google/protobuf/arena.h>
#include <google/protobuf/io/coded_stream.h>
#include <google/protobuf/wire_format_lite.h>
#include <grpcpp/support/proto_buffer_reader.h>

#include <algorithm>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_format.h"
#include "logitd/v1/sampler.pb.h"
#include "logitd/v1/scorer.pb.h"

namespace logitd::client {
namespace {

using google::protobuf::internal::WireFormatLite;
using google::protobuf::io::CodedOutputStream;

template <typename T, typename Repeated>
std::vector<T> ToVector(const Repeated& field) {
  std::vector<T> out;
  out.reserve(field.size());
  for (const auto& value : field) out.push_back(static_cast<T>(value));
  return out;
}

// Of every request; and the other of those that take hidden states.
constexpr int kLogitsFieldNumber = v1::TopKRequest::kLogitsFieldNumber;
static_assert(kLogitsFieldNumber == int{v1::SampleRequest::kLogitsFieldNumber});
static_assert(kLogitsFieldNumber == int{v1::VerifyRequest::kLogitsFieldNumber});
static_assert(kLogitsFieldNumber == int{v1::ScoreRequest::kLogitsFieldNumber});
constexpr int kHiddenFieldNumber = v1::TopKRequest::kHiddenFieldNumber;
static_assert(kHiddenFieldNumber == int{v1::SampleRequest::kHiddenFieldNumber});
static_assert(kHiddenFieldNumber == int{v1::ScoreRequest::kHiddenFieldNumber});

// `header`: all fields but the payload, which is that of `request`.
template <typename Request>
absl::StatusOr<grpc::ByteBuffer> AppendPayload(std::string header, const Request& request,
                                               const std::shared_ptr<const void>& owner) {
  const bool hidden = !request.head.empty();
  const std::vector<absl::string_view>& pieces = hidden ? request.hidden : request.logits;
  uint64_t payload = 0;
  for (absl::string_view piece : pieces) payload += piece.size();
  const uint64_t total = header.size() + payload;
  constexpr uint64_t kMaxMessage = std::numeric_limits<int32_t>::max() - 16;  // protobuf's own
  if (total > kMaxMessage) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "request of %d bytes is more than one message carries (%d); send fewer rows a call", total,
        kMaxMessage));
  }
  uint8_t prefix[16];
  uint8_t* end = CodedOutputStream::WriteTagToArray(
      WireFormatLite::MakeTag(hidden ? kHiddenFieldNumber : kLogitsFieldNumber,
                              WireFormatLite::WIRETYPE_LENGTH_DELIMITED),
      prefix);
  end = CodedOutputStream::WriteVarint32ToArray(static_cast<uint32_t>(payload), end);
  header.append(reinterpret_cast<const char*>(prefix), end - prefix);

  std::vector<grpc::Slice> slices;
  slices.reserve(1 + pieces.size());
  slices.emplace_back(header);
  for (absl::string_view piece : pieces) {
    if (!piece.empty()) slices.push_back(SliceOver(piece, owner));
  }
  return grpc::ByteBuffer(slices.data(), slices.size());
}

template <typename Params>
absl::StatusOr<grpc::ByteBuffer> EncodeRequest(const LogitsRequest<Params>& request,
                                               const std::shared_ptr<const void>& owner) {
  Params fields = request.params;
  fields.set_dtype(request.dtype);
  fields.set_rows(request.rows);
  fields.set_vocab(request.vocab);
  fields.clear_input();
  if constexpr (requires { fields.set_head(request.head); }) {
    fields.set_head(request.head);
    fields.set_hidden_size(request.hidden_size);
  } else if (!request.head.empty()) {
    return absl::InvalidArgumentError(
        absl::StrFormat("head is \"%s\"; allowed: none, for a %s takes logits alone", request.head,
                        Params::descriptor()->name()));
  }
  return AppendPayload(fields.SerializeAsString(), request, owner);
}

template <typename Message>
bool ParseMessage(grpc::ByteBuffer* buffer, Message* message) {
  grpc::ProtoBufferReader reader(buffer);
  return reader.status().ok() && message->ParseFromZeroCopyStream(&reader);
}

// Running sums of `counts` from 0. False: one is negative.
template <typename Counts>
bool Offsets(const Counts& counts, std::vector<int64_t>* offsets) {
  offsets->assign(1, 0);
  offsets->reserve(counts.size() + 1);
  for (int32_t count : counts) {
    if (count < 0) return false;
    offsets->push_back(offsets->back() + count);
  }
  return true;
}

template <typename Answer>
absl::StatusOr<SampledResult<Answer>> DecodeSampled(grpc::ByteBuffer* response) {
  SampledResult<Answer> result;
  Answer& answer = result.answer;
  const std::string& name = Answer::descriptor()->full_name();
  if (!ParseMessage(response, &answer)) {
    return absl::InternalError(absl::StrFormat("the server's answer is not a %s", name));
  }
  response->Clear();
  const int rows = answer.tokens_size();
  bool good = Offsets(answer.top_count(), &result.top_offsets) &&
              Offsets(answer.extra_count(), &result.extra_offsets);
  for (int size :
       {answer.logprobs_size(), answer.ranks_size(), answer.logsumexp_size(), answer.status_size(),
        answer.status_position_size(), answer.top_count_size(), answer.extra_count_size()}) {
    good &= size == rows;
  }
  if (!good || answer.top_ids_size() != result.top_offsets.back() ||
      answer.top_logprobs_size() != result.top_offsets.back() ||
      answer.extra_logprobs_size() != result.extra_offsets.back()) {
    return absl::InternalError(absl::StrFormat(
        "the server's answer disagrees with itself: a %s of %d rows with %d top_ids and %d "
        "extra_logprobs",
        name, rows, answer.top_ids_size(), answer.extra_logprobs_size()));
  }
  return result;
}

}  // namespace

grpc::Slice SliceOver(absl::string_view bytes, std::shared_ptr<const void> owner) {
  using Owner = std::shared_ptr<const void>;
  return grpc::Slice(
      const_cast<char*>(bytes.data()), bytes.size(),
      [](void* shared) { delete static_cast<Owner*>(shared); }, new Owner(std::move(owner)));
}

void AddTimings(const v1::Timings& part, v1::Timings* all) {
  all->set_receive_ns(all->receive_ns() + part.receive_ns());
  all->set_copy_ns(all->copy_ns() + part.copy_ns());
  all->set_queue_ns(all->queue_ns() + part.queue_ns());
  all->set_h2d_ns(all->h2d_ns() + part.h2d_ns());
  all->set_kernel_ns(all->kernel_ns() + part.kernel_ns());
  all->set_d2h_ns(all->d2h_ns() + part.d2h_ns());
  all->set_total_ns(all->total_ns() + part.total_ns());
  all->set_batch_rows(std::max(all->batch_rows(), part.batch_rows()));
}

absl::StatusOr<grpc::ByteBuffer> EncodeTopKRequest(const TopKRequest& request,
                                                   const std::shared_ptr<const void>& owner) {
  v1::TopKRequest fields;
  fields.set_dtype(request.dtype);
  fields.set_rows(request.rows);
  fields.set_vocab(request.vocab);
  fields.set_head(request.head);
  fields.set_hidden_size(request.hidden_size);
  fields.mutable_k()->Add(request.k.begin(), request.k.end());
  fields.mutable_temperature()->Add(request.temperature.begin(), request.temperature.end());
  return AppendPayload(fields.SerializeAsString(), request, owner);
}

absl::StatusOr<grpc::ByteBuffer> EncodeSampleRequest(const SampleRequest& request,
                                                     const std::shared_ptr<const void>& owner) {
  return EncodeRequest(request, owner);
}

absl::StatusOr<grpc::ByteBuffer> EncodeVerifyRequest(const VerifyRequest& request,
                                                     const std::shared_ptr<const void>& owner) {
  return EncodeRequest(request, owner);
}

absl::StatusOr<grpc::ByteBuffer> EncodeScoreRequest(const ScoreRequest& request,
                                                    const std::shared_ptr<const void>& owner) {
  return EncodeRequest(request, owner);
}

absl::StatusOr<SampleResult> DecodeSampleResponse(grpc::ByteBuffer* response) {
  return DecodeSampled<v1::SampleResponse>(response);
}

absl::StatusOr<VerifyResult> DecodeVerifyResponse(grpc::ByteBuffer* response) {
  return DecodeSampled<v1::VerifyResponse>(response);
}

absl::StatusOr<ScoreResult> DecodeScoreResponse(grpc::ByteBuffer* response) {
  ScoreResult result;
  v1::ScoreResponse& answer = result.answer;
  if (!ParseMessage(response, &answer)) {
    return absl::InternalError("the server's answer is not a logitd.v1.ScoreResponse");
  }
  response->Clear();
  const int rows = answer.losses_size();
  bool good = Offsets(answer.top_count(), &result.top_offsets) &&
              Offsets(answer.extra_count(), &result.extra_offsets);
  for (int size :
       {answer.target_logprobs_size(), answer.logsumexp_size(), answer.status_size(),
        answer.status_position_size(), answer.top_count_size(), answer.extra_count_size()}) {
    good &= size == rows;
  }
  for (int size : {answer.ranks_size(), answer.entropies_size()}) good &= size == 0 || size == rows;
  if (!good || answer.top_ids_size() != result.top_offsets.back() ||
      answer.top_logprobs_size() != result.top_offsets.back() ||
      answer.extra_logprobs_size() != result.extra_offsets.back()) {
    return absl::InternalError(absl::StrFormat(
        "the server's answer disagrees with itself: a logitd.v1.ScoreResponse of %d rows with %d "
        "top_ids and %d extra_logprobs",
        rows, answer.top_ids_size(), answer.extra_logprobs_size()));
  }
  result.messages = 1;
  return result;
}

absl::StatusOr<TopKResult> DecodeTopKResponse(grpc::ByteBuffer* response) {
  google::protobuf::Arena arena;
  auto* message = google::protobuf::Arena::CreateMessage<v1::TopKResponse>(&arena);
  if (!ParseMessage(response, message)) {
    return absl::InternalError("the server's answer is not a logitd.v1.TopKResponse");
  }
  response->Clear();
  TopKResult result;
  result.k = ToVector<int32_t>(message->k());
  result.offsets.reserve(result.k.size() + 1);
  result.offsets.push_back(0);
  bool negative = false;
  for (int32_t k : result.k) {
    negative |= k < 0;
    result.offsets.push_back(result.offsets.back() + k);
  }
  const int64_t rows = result.rows();
  const int64_t entries = result.offsets.back();
  if (negative || message->indices_size() != entries || message->probs_size() != entries ||
      message->logsumexp_size() != rows || message->status_size() != rows ||
      message->status_position_size() != rows) {
    return absl::InternalError(absl::StrFormat(
        "the server's answer disagrees with itself: %d rows with %d entries, but %d indices, %d "
        "probs, %d "
        "logsumexp, %d status, %d status_position",
        rows, entries, message->indices_size(), message->probs_size(), message->logsumexp_size(),
        message->status_size(), message->status_position_size()));
  }
  result.indices = ToVector<int32_t>(message->indices());
  result.probs = ToVector<float>(message->probs());
  result.logsumexp = ToVector<float>(message->logsumexp());
  result.status = ToVector<v1::RowStatus>(message->status());
  result.status_position = ToVector<int32_t>(message->status_position());
  result.timings = message->timings();
  return result;
}

}  // namespace logitd::client
