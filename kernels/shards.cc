#include "kernels/shards.h"

namespace logitd {
namespace {

// Lays arrays out one after another, each on a 16-byte border.
class Block {
 public:
  explicit Block(std::byte* block) : block_(reinterpret_cast<uintptr_t>(block)) {}

  // Null where there are no elements.
  template <typename T>
  T* Next(int64_t count) {
    constexpr size_t kBorder = 16;
    const uintptr_t at = block_ + bytes_;
    bytes_ += (static_cast<size_t>(count) * sizeof(T) + kBorder - 1) / kBorder * kBorder;
    return count == 0 ? nullptr : reinterpret_cast<T*>(at);
  }
  size_t bytes() const { return bytes_; }

 private:
  const uintptr_t block_;
  size_t bytes_ = 0;
};

TopKPartials LayOut(const TopKPartialShape& shape, Block& block) {
  const int64_t cells = shape.rows * shape.shards.most_cells();
  TopKPartials partials;
  partials.max = block.Next<float>(cells);
  partials.sum = block.Next<float>(cells);
  partials.nan = block.Next<int32_t>(shape.rows);
  partials.keys = block.Next<uint64_t>(shape.rows * shape.keys());
  return partials;
}

LossPartials LayOut(const LossPartialShape& shape, Block& block) {
  const int64_t cells = shape.rows * shape.shards.most_cells();
  LossPartials partials;
  partials.max = block.Next<float>(cells);
  partials.sum = block.Next<float>(cells);
  partials.total = block.Next<float>(shape.totals ? cells : 0);
  partials.moment = block.Next<float>((shape.want & kWantEntropy) != 0 ? cells : 0);
  partials.nan = block.Next<int32_t>(shape.rows);
  partials.target = block.Next<float>(shape.rows);
  partials.before = block.Next<int32_t>((shape.want & kWantRank) != 0 ? shape.rows : 0);
  partials.keys = block.Next<uint64_t>(shape.rows * shape.keys());
  partials.extra = block.Next<float>(shape.rows * shape.max_extra);
  return partials;
}

template <class Shape>
size_t BytesOf(const Shape& shape) {
  Block block(nullptr);
  LayOut(shape, block);
  return block.bytes();
}

template <class Shape>
auto PartialsAt(const Shape& shape, std::byte* at) {
  Block block(at);
  return LayOut(shape, block);
}

const std::byte* BlockOf(const std::byte* blocks, int shard, size_t bytes) {
  return blocks + static_cast<size_t>(shard) * bytes;
}

}  // namespace

size_t TopKPartialShape::bytes() const { return BytesOf(*this); }
TopKPartials TopKPartialShape::At(std::byte* block) const { return PartialsAt(*this, block); }
TopKPartials TopKPartialShape::Of(const std::byte* blocks, int shard) const {
  return At(const_cast<std::byte*>(BlockOf(blocks, shard, bytes())));
}

size_t LossPartialShape::bytes() const { return BytesOf(*this); }
LossPartials LossPartialShape::At(std::byte* block) const { return PartialsAt(*this, block); }
LossPartials LossPartialShape::Of(const std::byte* blocks, int shard) const {
  return At(const_cast<std::byte*>(BlockOf(blocks, shard, bytes())));
}

size_t SamplePartialShape::input_bytes() const {
  Block block(nullptr);
  block.Next<float>(rows * shards.most_tokens());
  return block.bytes();
}
float* SamplePartialShape::At(std::byte* block, int input) const {
  return reinterpret_cast<float*>(block + static_cast<size_t>(input) * input_bytes());
}
const float* SamplePartialShape::Of(const std::byte* blocks, int shard, int input) const {
  return At(const_cast<std::byte*>(BlockOf(blocks, shard, bytes())), input);
}

}  // namespace logitd
