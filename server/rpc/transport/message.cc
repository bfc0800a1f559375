#include "server/rpc/transport/message.h"

#include <grpcpp/support/proto_buffer_reader.h>

#include <algorithm>
#include <string>

#include "absl/container/inlined_vector.h"
#include "absl/strings/str_format.h"

// Of gRPC's library, but in none of its headers. Null in a version without it.
__attribute__((weak)) uint32_t grpc_call_test_only_get_message_flags(grpc_call* call);

namespace logitd::rpc {
namespace {

// How gRPC marks a message with the compressed flag that it has not inflated.
constexpr uint32_t kStillCompressed = 0x80000000u;

}  // namespace

void Message::Take(grpc::ByteBuffer* buffer) {
  Release();
  grpc::Slice only;
  if (buffer->TrySingleSlice(&only).ok()) {
    slices_.push_back(std::move(only));
  } else if (!buffer->Dump(&slices_).ok()) {
    slices_.clear();  // an empty message
  }
  buffer->Clear();
  pieces_.reserve(slices_.size());
  for (const grpc::Slice& slice : slices_) {
    pieces_.emplace_back(reinterpret_cast<const std::byte*>(slice.begin()), slice.size());
    bytes_ += slice.size();
  }
}

void Message::KeepOnly(absl::Span<const ByteRange> ranges) {
  absl::InlinedVector<bool, 16> wanted(pieces_.size(), false);
  for (const ByteRange& range : ranges) {
    size_t left = range.bytes;
    size_t offset = range.offset;
    for (size_t i = range.piece; left > 0; ++i, offset = 0) {
      wanted[i] = true;
      left -= std::min(left, pieces_[i].size() - offset);
    }
  }
  for (size_t i = 0; i < pieces_.size(); ++i) {
    if (wanted[i]) continue;
    bytes_ -= pieces_[i].size();
    slices_[i] = grpc::Slice();
    pieces_[i] = {};
  }
}

void Message::Release() {
  std::vector<grpc::Slice>().swap(slices_);
  std::vector<Piece>().swap(pieces_);
  bytes_ = 0;
}

absl::Status CheckNotCompressed(grpc::CallbackServerContext* context) {
  if (&grpc_call_test_only_get_message_flags == nullptr ||
      (grpc_call_test_only_get_message_flags(context->c_call()) & kStillCompressed) == 0) {
    return absl::OkStatus();
  }
  return absl::UnimplementedError(
      "request: got a message marked as compressed, in an encoding that is unknown or not stated; "
      "allowed are messages that are not compressed");
}

absl::Status NoMessageError() {
  return absl::UnimplementedError(
      "request: got the end of the call before a whole message (none, or it was truncated), "
      "allowed exactly one");
}

absl::Status ParseMessage(grpc::CallbackServerContext* context, const grpc::ByteBuffer& bytes,
                          google::protobuf::MessageLite* message) {
  if (!bytes.Valid()) return NoMessageError();
  if (absl::Status status = CheckNotCompressed(context); !status.ok()) return status;
  grpc::ByteBuffer copy = bytes;  // the reader wants one that may change; slices are shared
  grpc::ProtoBufferReader reader(&copy);
  if (reader.status().ok() && message->ParseFromZeroCopyStream(&reader)) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrFormat("request: got %d bytes that are not a protobuf message, allowed a %s",
                      bytes.Length(), std::string(message->GetTypeName())));
}

grpc::ByteBuffer ToBytes(const google::protobuf::MessageLite& message) {
  const grpc::Slice slice(message.SerializeAsString());
  return grpc::ByteBuffer(&slice, 1);
}

}  // namespace logitd::rpc
