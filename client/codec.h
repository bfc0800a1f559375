// Between the client's structs and the bytes on the wire.
#ifndef LOGITD_CLIENT_CODEC_H_
#define LOGITD_CLIENT_CODEC_H_

#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/slice.h>

#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "client/client.h"

namespace logitd::client {

// A slice over memory that `owner` keeps alive.
grpc::Slice SliceOver(absl::string_view bytes, std::shared_ptr<const void> owner);

// Phases are summed; the largest batch stays.
void AddTimings(const v1::Timings& part, v1::Timings* all);

// The request as one small slice (every field but the payload, then the payload's tag and length)
// and one slice per piece of the payload over the caller's own memory. Each of those shares `owner`
// until gRPC drops it. The payload comes last, so that a server has read all it must judge before
// the first payload byte. INVALID_ARGUMENT: 2 GiB or more, which protobuf cannot carry.
absl::StatusOr<grpc::ByteBuffer> EncodeTopKRequest(const TopKRequest& request,
                                                   const std::shared_ptr<const void>& owner);

absl::StatusOr<grpc::ByteBuffer> EncodeSampleRequest(const SampleRequest& request,
                                                     const std::shared_ptr<const void>& owner);
absl::StatusOr<grpc::ByteBuffer> EncodeVerifyRequest(const VerifyRequest& request,
                                                     const std::shared_ptr<const void>& owner);
absl::StatusOr<grpc::ByteBuffer> EncodeScoreRequest(const ScoreRequest& request,
                                                    const std::shared_ptr<const void>& owner);

// Consumes `response`. INTERNAL: not a TopKResponse, or one whose fields disagree in size.
absl::StatusOr<TopKResult> DecodeTopKResponse(grpc::ByteBuffer* response);
absl::StatusOr<SampleResult> DecodeSampleResponse(grpc::ByteBuffer* response);
absl::StatusOr<VerifyResult> DecodeVerifyResponse(grpc::ByteBuffer* response);
absl::StatusOr<ScoreResult> DecodeScoreResponse(grpc::ByteBuffer* response);

}  // namespace logitd::client

#endif  // LOGITD_CLIENT_CODEC_H_
