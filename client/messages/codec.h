// Between the client's structs and the bytes on the wire.
#ifndef LOGITD_CLIENT_MESSAGES_CODEC_H_
#define LOGITD_CLIENT_MESSAGES_CODEC_H_

#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/slice.h>

#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "client/client.h"

namespace logitd::client {

// A payload: pieces that follow each other, and what keeps them alive.
using Pieces = std::vector<absl::string_view>;
using Owner = std::shared_ptr<const void>;

// A slice over memory that `owner` keeps alive.
grpc::Slice SliceOver(absl::string_view bytes, Owner owner);

// What the rows of a request are: logits, or hidden states of a head.
template <typename Params>
const Pieces& PayloadOf(const LogitsRequest<Params>& request) {
  return request.head.empty() ? request.logits : request.hidden;
}

inline const Pieces& ReferenceOf(const DivergenceRequest& request) {
  return request.reference_head.empty() ? request.reference_logits : request.reference_hidden;
}
inline v1::DType ReferenceDType(const DivergenceRequest& request) {
  return request.reference_dtype == v1::DTYPE_UNSPECIFIED ? request.dtype : request.reference_dtype;
}

// With an arena: the request as one small slice, which says where in the arena the payload lies.
// INVALID_ARGUMENT: see Arena::Find.
//
// Otherwise: the request as one small slice (every field except the payload, then the payload's tag
// and length) and one slice per piece of `payload`, over the caller's own memory. Each of those
// shares `owner` until gRPC drops it. The payload comes last, so that a server has read all that it
// checks before the first payload byte. INVALID_ARGUMENT: 2 GiB or more, which protobuf cannot
// carry.
//
// Params: v1::TopKRequest, SampleRequest, VerifyRequest or ScoreRequest.
template <typename Params>
absl::StatusOr<grpc::ByteBuffer> EncodeRequest(const LogitsRequest<Params>& request,
                                               const Pieces& payload, const Owner& owner);
template <typename Params>
absl::StatusOr<grpc::ByteBuffer> EncodeRequest(const LogitsRequest<Params>& request,
                                               const Owner& owner) {
  return EncodeRequest(request, PayloadOf(request), owner);
}

// Encodes a request of two inputs, one payload after the other.
absl::StatusOr<grpc::ByteBuffer> EncodeRequest(const DivergenceRequest& request,
                                               const Pieces& payload, const Pieces& reference,
                                               const Owner& owner);
inline absl::StatusOr<grpc::ByteBuffer> EncodeRequest(const DivergenceRequest& request,
                                                      const Owner& owner) {
  return EncodeRequest(request, PayloadOf(request), ReferenceOf(request), owner);
}

// Consumes `response`. INTERNAL: not an `Answer`, or its arrays disagree in size.
//
// Answer: v1::TopKResponse, SampleResponse, VerifyResponse, ScoreResponse or DivergenceResponse.
template <typename Answer>
absl::StatusOr<LogitsResult<Answer>> DecodeResponse(grpc::ByteBuffer* response);

// Phases are summed; the largest batch stays.
void AddTimings(const v1::Timings& part, v1::Timings* all);

}  // namespace logitd::client

#endif  // LOGITD_CLIENT_MESSAGES_CODEC_H_
