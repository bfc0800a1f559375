// A backend whose streams run linear ops as a caller of kernels/shards.h does who has an exchange
// of his own: partials of all shards, one after another on one device, then the merge.
#ifndef LOGITD_TESTS_KERNELS_PARTIAL_BACKEND_H_
#define LOGITD_TESTS_KERNELS_PARTIAL_BACKEND_H_

#include <algorithm>
#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/backend.h"
#include "kernels/shards.h"
#include "kernels/status_macros.h"
#include "tests/kernels/cutting_backend.h"

namespace logitd::testing {

class PartialStream final : public Stream {
 public:
  PartialStream(Backend* backend, std::unique_ptr<Stream> stream, int shards)
      : backend_(backend), stream_(std::move(stream)), shards_(shards) {}
  ~PartialStream() override { FreeAll(); }

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
        Overloaded{[this](const LinearTopKArgs& args) { return TopK(args); },
                   [this](const LinearSampleArgs& args) { return Sample(args); },
                   [this](const LinearVerifyArgs& args) { return Verify(args); },
                   [this](const LinearDivergenceArgs& args) { return Divergence(args); },
                   [this](const LinearCrossEntropyArgs& args) { return Losses(args); },
                   [this](const LinearCrossEntropyBackwardArgs& args) { return Backward(args); }});
  }

  absl::Status TopK(const LinearTopKArgs& args) {
    const TopKPartialShape shape = {
        .shards = Cut(args.head), .rows = args.hidden.rows, .max_k = args.topk.max_k};
    return Join(
        shape, args.head,
        [&](const HeadView& head, int shard, std::byte* block) {
          return stream_->Run(LinearTopKPartialArgs{.hidden = args.hidden,
                                                    .head = head,
                                                    .shard = shard,
                                                    .shape = shape,
                                                    .rows = args.topk.rows,
                                                    .block = block});
        },
        [&](const std::byte* blocks) {
          return stream_->Run(
              LinearTopKMergeArgs{.shape = shape, .blocks = blocks, .topk = args.topk});
        });
  }

  absl::Status Sample(const LinearSampleArgs& args) {
    return JoinLogits(args.hidden, args.head, [&](const auto& shape, const std::byte* blocks) {
      return stream_->Run(
          LinearSampleMergeArgs{.shape = shape, .blocks = blocks, .sample = args.sample});
    });
  }

  absl::Status Verify(const LinearVerifyArgs& args) {
    const int64_t rows = args.hidden.rows;
    const auto state = Allocate(VerifyStateBytes(rows));
    if (!state.ok()) return state.status();
    return JoinLogits(args.hidden, args.head, [&](const auto& shape, const std::byte* blocks) {
      LinearVerifyMergeArgs merge = {.shape = shape,
                                     .blocks = blocks,
                                     .verify = args.verify,
                                     .all_rows = rows,
                                     .state = *state};
      const int passes = VerifyMergePasses(args.verify, backend_->device().is_host);
      for (; merge.pass < passes; ++merge.pass) LOGITD_RETURN_IF_ERROR(stream_->Run(merge));
      return absl::OkStatus();
    });
  }

  absl::Status Divergence(const LinearDivergenceArgs& args) {
    const bool first = args.head.vocab() > 0;
    const bool reference = args.reference_head.vocab() > 0;
    const SamplePartialShape shape = {.shards = {.vocab = args.vocab(), .count = shards_},
                                      .rows = args.rows(),
                                      .inputs = (first ? 1 : 0) + (reference ? 1 : 0)};
    const auto blocks = Allocate(shape.bytes() * static_cast<size_t>(shards_));
    if (!blocks.ok()) return blocks.status();
    int input = 0;
    const auto add = [&](const TensorView& hidden, const HeadView& head) {
      const std::vector<HeadView> parts = CutHead(head, shards_);
      for (int s = 0; s < shards_; ++s) {
        LOGITD_RETURN_IF_ERROR(stream_->Run(
            LinearSamplePartialArgs{.hidden = hidden,
                                    .head = parts[static_cast<size_t>(s)],
                                    .shard = s,
                                    .shape = shape,
                                    .input = input,
                                    .block = *blocks + static_cast<size_t>(s) * shape.bytes()}));
      }
      ++input;
      return absl::OkStatus();
    };
    if (first) LOGITD_RETURN_IF_ERROR(add(args.hidden, args.head));
    if (reference) LOGITD_RETURN_IF_ERROR(add(args.reference_hidden, args.reference_head));
    return stream_->Run(LinearDivergenceMergeArgs{.shape = shape,
                                                  .blocks = *blocks,
                                                  .has_first = first,
                                                  .has_reference = reference,
                                                  .divergence = args.divergence});
  }

  absl::Status Losses(const LinearCrossEntropyArgs& args) {
    LOGITD_RETURN_IF_ERROR(WholeLosses(args));
    if (args.cross_entropy.max_support == 0) return absl::OkStatus();
    return JoinLogits(args.hidden, args.head, [&](const auto& shape, const std::byte* blocks) {
      return stream_->Run(LinearSupportMergeArgs{
          .shape = shape, .blocks = blocks, .cross_entropy = args.cross_entropy});
    });
  }

  absl::Status WholeLosses(const LinearCrossEntropyArgs& args) {
    const CrossEntropyArgs& loss = args.cross_entropy;
    const LossPartialShape shape = {.shards = Cut(args.head),
                                    .rows = args.hidden.rows,
                                    .totals = true,
                                    .want = loss.want,
                                    .max_top = loss.max_top_logprobs,
                                    .max_extra = loss.max_extra_ids};
    float* targets = nullptr;
    if ((shape.want & kWantRank) != 0) {
      const auto memory = Allocate(static_cast<size_t>(shape.rows * shards_) * sizeof(float));
      if (!memory.ok()) return memory.status();
      targets = reinterpret_cast<float*>(*memory);
      const std::vector<HeadView> parts = CutHead(args.head, shards_);
      for (int s = 0; s < shards_; ++s) {
        LOGITD_RETURN_IF_ERROR(
            stream_->Run(LinearCrossEntropyTargetsArgs{.hidden = args.hidden,
                                                       .head = parts[static_cast<size_t>(s)],
                                                       .shard = s,
                                                       .shards = shape.shards,
                                                       .rows = loss.rows,
                                                       .targets = targets + s * shape.rows}));
      }
    }
    return Join(
        shape, args.head,
        [&](const HeadView& head, int shard, std::byte* block) {
          return stream_->Run(LinearCrossEntropyPartialArgs{.hidden = args.hidden,
                                                            .head = head,
                                                            .shard = shard,
                                                            .shape = shape,
                                                            .rows = loss.rows,
                                                            .extra_ids = loss.extra_ids,
                                                            .targets = targets,
                                                            .block = block});
        },
        [&](const std::byte* blocks) {
          return stream_->Run(
              LinearCrossEntropyMergeArgs{.shape = shape, .blocks = blocks, .cross_entropy = loss});
        });
  }

  absl::Status Backward(const LinearCrossEntropyBackwardArgs& args) {
    const VocabShards cut = Cut(args.head);
    const std::vector<HeadView> parts = CutHead(args.head, shards_);
    const int64_t rows = args.hidden.rows;
    const int64_t hidden = args.head.hidden();
    const auto memory = Allocate(static_cast<size_t>(shards_ * rows * hidden) * sizeof(float));
    if (!memory.ok()) return memory.status();
    auto* const d_hidden = reinterpret_cast<float*>(*memory);
    for (int s = 0; s < shards_; ++s) {
      const VocabShard shard = cut.at(s);
      LinearCrossEntropyBackwardArgs gradient = args;
      gradient.head = parts[static_cast<size_t>(s)];
      gradient.d_hidden = {d_hidden + s * rows * hidden, DType::kF32, rows, hidden, hidden};
      gradient.d_weight = RowsOf(args.d_weight, shard.first, shard.tokens);
      if (args.d_bias != nullptr) gradient.d_bias += shard.first;
      if (shard.tokens == 0) {  // nothing of it may be written
        gradient.d_weight.data = nullptr;
        gradient.d_bias = nullptr;
      }
      LOGITD_RETURN_IF_ERROR(stream_->Run(LinearCrossEntropyBackwardPartialArgs{
          .shard = shard, .vocab = cut.vocab, .gradient = gradient}));
    }
    return stream_->Run(LinearCrossEntropyBackwardMergeArgs{
        .shards = shards_, .parts = d_hidden, .rows = args.rows, .d_hidden = args.d_hidden});
  }

  absl::StatusOr<StreamTimes> Wait() override {
    auto times = stream_->Wait();
    FreeAll();
    return times;
  }

 private:
  VocabShards Cut(const HeadView& head) const { return {.vocab = head.vocab(), .count = shards_}; }

  absl::StatusOr<std::byte*> Allocate(size_t bytes) {
    const auto memory = backend_->AllocateDevice(std::max<size_t>(bytes, 16));
    if (!memory.ok()) return memory.status();
    memories_.push_back(*memory);
    return memory->data;
  }
  void FreeAll() {
    for (const DeviceMemory& memory : memories_) backend_->FreeDevice(memory);
    memories_.clear();
  }

  template <class Shape, class Partial, class Merge>
  absl::Status Join(const Shape& shape, const HeadView& head, const Partial& partial,
                    const Merge& merge) {
    const std::vector<HeadView> parts = CutHead(head, shards_);
    const auto blocks = Allocate(shape.bytes() * static_cast<size_t>(shards_));
    if (!blocks.ok()) return blocks.status();
    for (int s = 0; s < shards_; ++s) {
      LOGITD_RETURN_IF_ERROR(partial(parts[static_cast<size_t>(s)], s,
                                     *blocks + static_cast<size_t>(s) * shape.bytes()));
    }
    return merge(*blocks);
  }

  template <class Merge>
  absl::Status JoinLogits(const TensorView& hidden, const HeadView& head, const Merge& merge) {
    const SamplePartialShape shape = {.shards = Cut(head), .rows = hidden.rows};
    return Join(
        shape, head,
        [&](const HeadView& part, int shard, std::byte* block) {
          return stream_->Run(LinearSamplePartialArgs{
              .hidden = hidden, .head = part, .shard = shard, .shape = shape, .block = block});
        },
        [&](const std::byte* blocks) { return merge(shape, blocks); });
  }

  Backend* const backend_;
  const std::unique_ptr<Stream> stream_;
  const int shards_;
  std::vector<DeviceMemory> memories_;  // until Wait
};

class PartialBackend final : public Backend {
 public:
  // `backend` outlives this.
  PartialBackend(Backend* backend, int shards) : backend_(backend), shards_(shards) {}

  const DeviceInfo& device() const override { return backend_->device(); }
  absl::StatusOr<Slab> AllocateSlab(size_t bytes) override { return backend_->AllocateSlab(bytes); }
  void FreeSlab(const Slab& slab) override { backend_->FreeSlab(slab); }
  absl::StatusOr<DeviceMemory> AllocateDevice(size_t bytes) override {
    return backend_->AllocateDevice(bytes);
  }
  void FreeDevice(const DeviceMemory& memory) override { backend_->FreeDevice(memory); }
  absl::StatusOr<std::unique_ptr<Stream>> CreateStream(StreamUse use) override {
    absl::StatusOr<std::unique_ptr<Stream>> stream = backend_->CreateStream(use);
    if (!stream.ok()) return stream.status();
    return std::make_unique<PartialStream>(backend_, *std::move(stream), shards_);
  }

 private:
  Backend* const backend_;
  const int shards_;
};

}  // namespace logitd::testing

#endif  // LOGITD_TESTS_KERNELS_PARTIAL_BACKEND_H_
