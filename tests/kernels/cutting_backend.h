// A backend whose streams cut every head over simulated devices: what runs on a whole head runs on
// its shards.
#ifndef LOGITD_TESTS_KERNELS_CUTTING_BACKEND_H_
#define LOGITD_TESTS_KERNELS_CUTTING_BACKEND_H_

#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/backend.h"
#include "kernels/sharded_stream.h"
#include "kernels/shards.h"

namespace logitd::testing {

// The parts of a head that is whole, and in memory that all devices read.
inline std::vector<HeadView> CutHead(const HeadView& head, int shards) {
  const VocabShards cut = {.vocab = head.vocab(), .count = shards};
  std::vector<HeadView> parts(static_cast<size_t>(shards), head);
  for (int s = 0; s < shards; ++s) {
    const VocabShard shard = cut.at(s);
    HeadView& part = parts[static_cast<size_t>(s)];
    part.weight = RowsOf(head.weight, shard.first, shard.tokens);
    if (head.bias != nullptr) part.bias = head.bias + shard.first;
    if (shard.tokens > 0) continue;
    // Nothing of it may be read.
    part.weight.data = nullptr;
    part.bias = part.norm = nullptr;
  }
  return parts;
}

inline HeadView WithShards(const HeadView& head, const std::vector<HeadView>& parts) {
  HeadView whole = head;
  whole.weight.data = nullptr;
  whole.shards = parts.data();
  whole.shard_count = static_cast<int>(parts.size());
  return whole;
}

// Where the gradients of the parts go, in those of the whole.
inline std::vector<ShardGradient> CutGradient(const LinearCrossEntropyBackwardArgs& whole,
                                              int shards) {
  const VocabShards cut = {.vocab = whole.head.vocab(), .count = shards};
  std::vector<ShardGradient> parts(static_cast<size_t>(shards));
  for (int s = 0; s < shards; ++s) {
    const VocabShard shard = cut.at(s);
    ShardGradient& part = parts[static_cast<size_t>(s)];
    part.d_weight = RowsOf(whole.d_weight, shard.first, shard.tokens);
    if (whole.d_bias != nullptr) part.d_bias = whole.d_bias + shard.first;
    if (shard.tokens == 0) part = {};  // nothing of it may be written
  }
  return parts;
}

// The heads of linear_divergence that are cut; others stay whole.
enum class CutHeads { kBoth, kFirst, kReference };

class CuttingStream final : public Stream {
 public:
  CuttingStream(std::unique_ptr<ShardedStream> stream, int shards, CutHeads cut_heads)
      : stream_(std::move(stream)), shards_(shards), cut_heads_(cut_heads) {}

  absl::Status Upload(const Slab& slab, size_t offset, size_t bytes) override {
    return stream_->Upload(slab, offset, bytes);
  }
  absl::Status Download(const Slab& slab, size_t offset, size_t bytes) override {
    return stream_->Download(slab, offset, bytes);
  }
  absl::Status Fill(const Slab& slab, size_t offset, size_t bytes, std::byte* to) override {
    return stream_->Fill(slab, offset, bytes, to);
  }
  absl::Status RunOp(const Op& op) override {
    return RunIfKnown(
        op,
        Overloaded{[this](const LinearTopKArgs& args) { return Cut(args); },
                   [this](const LinearSampleArgs& args) { return Cut(args); },
                   [this](const LinearVerifyArgs& args) { return Cut(args); },
                   [this](const LinearCrossEntropyArgs& args) { return Cut(args); },
                   [this](const LinearDivergenceArgs& args) { return Divergence(args); },
                   [this](const LinearCrossEntropyBackwardArgs& args) { return Backward(args); },
                   [this](const LinearCrossEntropyTrainingArgs& args) { return Training(args); }});
  }
  absl::StatusOr<StreamTimes> Wait() override { return stream_->Wait(); }

 private:
  template <class Args>
  absl::Status Cut(Args args) {
    const std::vector<HeadView> parts = CutHead(args.head, shards_);
    args.head = WithShards(args.head, parts);
    stream_->Watch(abandoned());
    return stream_->Run(args);
  }
  absl::Status Divergence(LinearDivergenceArgs args) {
    const std::vector<HeadView> parts = CutHead(args.head, shards_);
    const std::vector<HeadView> reference_parts = CutHead(args.reference_head, shards_);
    if (args.head.vocab() > 0 && cut_heads_ != CutHeads::kReference)
      args.head = WithShards(args.head, parts);
    if (args.reference_head.vocab() > 0 && cut_heads_ != CutHeads::kFirst)
      args.reference_head = WithShards(args.reference_head, reference_parts);
    stream_->Watch(abandoned());
    return stream_->Run(args);
  }
  absl::Status Backward(const LinearCrossEntropyBackwardArgs& args) {
    const std::vector<HeadView> parts = CutHead(args.head, shards_);
    const std::vector<ShardGradient> to = CutGradient(args, shards_);
    ShardedBackwardArgs cut = {.gradient = args, .shards = to.data()};
    cut.gradient.head = WithShards(args.head, parts);
    cut.gradient.d_weight = {};
    cut.gradient.d_bias = nullptr;
    return stream_->ShardedBackward(cut);
  }
  absl::Status Training(const LinearCrossEntropyTrainingArgs& args) {
    const std::vector<HeadView> parts = CutHead(args.gradient.head, shards_);
    const std::vector<ShardGradient> to = CutGradient(args.gradient, shards_);
    ShardedTrainingArgs cut = {.training = args, .shards = to.data()};
    cut.training.gradient.head = WithShards(args.gradient.head, parts);
    cut.training.gradient.d_weight = {};
    cut.training.gradient.d_bias = nullptr;
    return stream_->ShardedTraining(cut);
  }

  const std::unique_ptr<ShardedStream> stream_;
  const int shards_;
  const CutHeads cut_heads_;
};

class CuttingBackend final : public Backend {
 public:
  // `threads`: of each device.
  CuttingBackend(int shards, int threads, CutHeads cut_heads = CutHeads::kBoth)
      : cut_heads_(cut_heads) {
    for (int i = 0; i < shards; ++i) {
      devices_.push_back(CreateCpuBackend({.device = i, .cpu_threads = threads}).value());
    }
  }

  // Devices that read the first one's memory.
  explicit CuttingBackend(std::vector<std::unique_ptr<Backend>> devices,
                          const ShardOptions& options = {}, CutHeads cut_heads = CutHeads::kBoth)
      : devices_(std::move(devices)), options_(options), cut_heads_(cut_heads) {}

  const DeviceInfo& device() const override { return devices_.front()->device(); }
  absl::StatusOr<Slab> AllocateSlab(size_t bytes) override {
    return devices_.front()->AllocateSlab(bytes);
  }
  void FreeSlab(const Slab& slab) override { devices_.front()->FreeSlab(slab); }
  absl::StatusOr<DeviceMemory> AllocateDevice(size_t bytes) override {
    return devices_.front()->AllocateDevice(bytes);
  }
  void FreeDevice(const DeviceMemory& memory) override { devices_.front()->FreeDevice(memory); }
  absl::StatusOr<std::unique_ptr<Stream>> CreateStream(StreamUse) override {
    std::vector<Backend*> backends;
    for (const auto& device : devices_) backends.push_back(device.get());
    absl::StatusOr<std::unique_ptr<ShardedStream>> stream = CreateShardedStream(backends, options_);
    if (!stream.ok()) return stream.status();
    return std::make_unique<CuttingStream>(*std::move(stream), static_cast<int>(devices_.size()),
                                           cut_heads_);
  }

 private:
  std::vector<std::unique_ptr<Backend>> devices_;
  const ShardOptions options_;
  const CutHeads cut_heads_;
};

}  // namespace logitd::testing

#endif  // LOGITD_TESTS_KERNELS_CUTTING_BACKEND_H_
