#include "client/codec.h"

#include <google/protobuf/arena.h>
#include <google/protobuf/io/coded_stream.h>
#include <google/protobuf/wire_format_lite.h>
#include <grpcpp/support/proto_buffer_reader.h>

#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_format.h"
#include "logitd/v1/sampler.pb.h"

namespace logitd::client {
namespace {

using google::protobuf::internal::WireFormatLite;
using google::protobuf::io::CodedOutputStream;

// A slice over memory that `owner` keeps alive.
grpc::Slice SliceOver(absl::string_view bytes, std::shared_ptr<const void> owner) {
  using Owner = std::shared_ptr<const void>;
  return grpc::Slice(
      const_cast<char*>(bytes.data()), bytes.size(),
      [](void* shared) { delete static_cast<Owner*>(shared); }, new Owner(std::move(owner)));
}

template <typename T, typename Repeated>
std::vector<T> ToVector(const Repeated& field) {
  std::vector<T> out;
  out.reserve(field.size());
  for (const auto& value : field) out.push_back(static_cast<T>(value));
  return out;
}

}  // namespace

absl::StatusOr<grpc::ByteBuffer> EncodeTopKRequest(const TopKRequest& request,
                                                   const std::shared_ptr<const void>& owner) {
  v1::TopKRequest fields;
  fields.set_dtype(request.dtype);
  fields.set_rows(request.rows);
  fields.set_vocab(request.vocab);
  fields.mutable_k()->Add(request.k.begin(), request.k.end());
  fields.mutable_temperature()->Add(request.temperature.begin(), request.temperature.end());
  std::string header = fields.SerializeAsString();

  uint64_t payload = 0;
  for (absl::string_view piece : request.logits) payload += piece.size();
  const uint64_t total = header.size() + payload;
  constexpr uint64_t kMaxMessage = std::numeric_limits<int32_t>::max() - 16;  // protobuf's own
  if (total > kMaxMessage) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "request of %d bytes is more than one message carries (%d); send fewer rows a call", total,
        kMaxMessage));
  }
  uint8_t prefix[16];
  uint8_t* end = CodedOutputStream::WriteTagToArray(
      WireFormatLite::MakeTag(v1::TopKRequest::kLogitsFieldNumber,
                              WireFormatLite::WIRETYPE_LENGTH_DELIMITED),
      prefix);
  end = CodedOutputStream::WriteVarint32ToArray(static_cast<uint32_t>(payload), end);
  header.append(reinterpret_cast<const char*>(prefix), end - prefix);

  std::vector<grpc::Slice> slices;
  slices.reserve(1 + request.logits.size());
  slices.emplace_back(header);
  for (absl::string_view piece : request.logits) {
    if (!piece.empty()) slices.push_back(SliceOver(piece, owner));
  }
  return grpc::ByteBuffer(slices.data(), slices.size());
}

absl::StatusOr<TopKResult> DecodeTopKResponse(grpc::ByteBuffer* response) {
  google::protobuf::Arena arena;
  auto* message = google::protobuf::Arena::CreateMessage<v1::TopKResponse>(&arena);
  {
    grpc::ProtoBufferReader reader(response);
    if (!reader.status().ok() || !message->ParseFromZeroCopyStream(&reader)) {
      return absl::InternalError("the server's answer is not a logitd.v1.TopKResponse");
    }
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
