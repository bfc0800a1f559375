#include "server/rpc/transport/message.h"

#include <algorithm>

#include "absl/container/inlined_vector.h"

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

}  // namespace logitd::rpc
