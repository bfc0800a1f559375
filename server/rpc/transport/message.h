// A received message as the slices that the transport gave.
#ifndef LOGITD_SERVER_RPC_TRANSPORT_MESSAGE_H_
#define LOGITD_SERVER_RPC_TRANSPORT_MESSAGE_H_

#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/slice.h>

#include <vector>

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

}  // namespace logitd::rpc

#endif  // LOGITD_SERVER_RPC_TRANSPORT_MESSAGE_H_
