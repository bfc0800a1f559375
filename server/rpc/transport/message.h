// A received message: as the slices that the transport gave, or as a protobuf message.
#ifndef LOGITD_SERVER_RPC_TRANSPORT_MESSAGE_H_
#define LOGITD_SERVER_RPC_TRANSPORT_MESSAGE_H_

#include <google/protobuf/message_lite.h>
#include <grpcpp/server_context.h>
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/slice.h>

#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "server/rpc/wire/reader.h"

namespace logitd::rpc {

// Owns the slices. `pieces` points into them and is valid until Release or destruction. Not
// thread-safe.
class Message {
 public:
  Message() = default;
  Message(const Message&) = delete;
  Message& operator=(const Message&) = delete;

  // Takes the slices of `buffer`, which is empty afterwards.
  void Take(grpc::ByteBuffer* buffer);
  // Frees every slice that has no byte of `ranges`. The ranges stay valid.
  void KeepOnly(absl::Span<const ByteRange> ranges);
  // Frees all slices.
  void Release();

  Pieces pieces() const { return pieces_; }
  size_t bytes() const { return bytes_; }

 private:
  std::vector<grpc::Slice> slices_;
  std::vector<Piece> pieces_;
  size_t bytes_ = 0;
};

// UNIMPLEMENTED if the peer marked the message that was read last as compressed. The transport
// itself refuses the encodings it knows, but hands on a marked message whose encoding is unknown or
// not stated, as if it were plain. Call it in OnReadDone, before the next read.
absl::Status CheckNotCompressed(grpc::CallbackServerContext* context);

// For a unary call whose peer has ended its side. The transport does not say whether it sent a part
// of a message before.
absl::Status NoMessageError();

// Parses the one message of a call with small messages. UNIMPLEMENTED: there is none, or it is
// compressed. INVALID_ARGUMENT: it is malformed.
absl::Status ParseMessage(grpc::CallbackServerContext* context, const grpc::ByteBuffer& bytes,
                          google::protobuf::MessageLite* message);

grpc::ByteBuffer ToBytes(const google::protobuf::MessageLite& message);

}  // namespace logitd::rpc

#endif  // LOGITD_SERVER_RPC_TRANSPORT_MESSAGE_H_
