#include "server/rpc/message.h"

#include <algorithm>

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

void Message::KeepOnly(const ByteRange& range) {
  size_t left = range.bytes;
  size_t offset = range.offset;
  for (size_t i = 0; i < pieces_.size(); ++i) {
    const size_t size = pieces_[i].size();
    if (i >= range.piece && left > 0) {
      left -= std::min(left, size - offset);
      offset = 0;
    } else {
      slices_[i] = grpc::Slice();
      pieces_[i] = {};
      bytes_ -= size;
    }
  }
}

void Message::Release() {
  std::vector<grpc::Slice>().swap(slices_);
  std::vector<Piece>().swap(pieces_);
  bytes_ = 0;
}

}  // namespace logitd::rpc
