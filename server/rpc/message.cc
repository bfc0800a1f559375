#include "server/rpc/message.h"

namespace logitd::rpc {

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

void Message::Release() {
  std::vector<grpc::Slice>().swap(slices_);
  std::vector<Piece>().swap(pieces_);
  bytes_ = 0;
}

}  // namespace logitd::rpc
