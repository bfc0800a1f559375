// Linear ops on a head that is cut over CUDA devices, for as many rows at a time as buffers have room
// for:
//
//   every other device   copies hidden states and parameters of rows from the first device; computes
//                        its partial; its kernels write the block into the first device's memory
//   the first            computes its own, waits for all of them, and merges
//
// So the exchange is stores into the memory of a peer, and an event for each device: nothing spins,
// and a device that fails holds up no other. One thread enqueues all of it, the first device last,
// because the others have more to do before their product.
//
// What is stored is the block of kernels/shards.h, or logits: those of linear_sample, and of
// linear_topk while they are few. They go to their place in a matrix of the whole vocabulary, on
// which the first device runs the op that takes logits. The stores overlap the product, and there
// are fewer kernels after it.
#include "kernels/cuda/sharded_stream.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "kernels/cuda/gather.h"
#include "kernels/cuda/stream.h"
#include "kernels/sharded_stream.h"
#include "kernels/shards.h"
#include "kernels/status_macros.h"

namespace logitd::cuda {
namespace {

// Memory of the first device for the blocks of all shards.
constexpr size_t kBlockBytes = size_t{128} << 20;
// Memory of every other device for hidden states.
constexpr size_t kHiddenBytes = size_t{64} << 20;
// Memory of every other device for parameters of rows.
constexpr size_t kRowBytes = size_t{4} << 20;
// Rows that a product takes together.
constexpr int64_t kRowStep = 256;
// Up to so many bytes of logits, they are exchanged: about 64 rows at a time.
constexpr size_t kFewLogitsBytes = size_t{64} << 20;
// Up to so many bytes a kernel brings hidden states sooner than a copy engine does.
constexpr size_t kKernelCopyBytes = size_t{1} << 20;

constexpr absl::Duration kPollFor = absl::Microseconds(200);
// How long a failed device's peers get to end what they have.
constexpr absl::Duration kDrainFor = absl::Seconds(2);
constexpr absl::Duration kDrainPoll = absl::Milliseconds(1);

class ShardedStream final : public Stream {
 public:
  ~ShardedStream() override {
    // From the last on: cudaFree waits for the device, and all write into the first one's memory.
    for (size_t i = devices_.size(); i-- > 0;) {
      Device& device = devices_[i];
      cudaSetDevice(device.stream->device());
      if (device.ended != nullptr) cudaEventDestroy(device.ended);
      if (device.ready != nullptr) cudaEventDestroy(device.ready);
      cudaFree(device.hidden);
      cudaFree(device.rows);
      if (i > 0) continue;
      cudaFree(blocks_);
      cudaFree(targets_);
    }
    cudaGetLastError();
  }

  absl::Status Init(absl::Span<Backend* const> backends) {
    for (size_t i = 0; i < backends.size(); ++i) {
      const absl::Status status = Add(backends[i]);
      if (!status.ok()) return OfShard(static_cast<int>(i), status);
    }
    return absl::OkStatus();
  }

  absl::Status Upload(const Slab& slab, size_t offset, size_t bytes) override {
    return OfShard(0, lead().Upload(slab, offset, bytes));
  }
  absl::Status Download(const Slab& slab, size_t offset, size_t bytes) override {
    return OfShard(0, lead().Download(slab, offset, bytes));
  }
  absl::Status Fill(const Slab& slab, size_t offset, size_t bytes, std::byte* to) override {
    return OfShard(0, lead().Fill(slab, offset, bytes, to));
  }
  absl::Status Gather(absl::Span<const RowsCopy> copies) override {
    return OfShard(0, lead().Gather(copies));
  }
  absl::Status Deliver(std::byte* to, const std::byte* from, size_t bytes) override {
    return OfShard(0, lead().Deliver(to, from, bytes));
  }

  absl::Status LinearTopK(const LinearTopKArgs& args) override { return RunLinearTopK(args); }
  absl::Status LinearSample(const LinearSampleArgs& args) override {
    return OnLogits(args.hidden, args.head, args.sample, &Stream::Sample);
  }
  absl::Status LinearCrossEntropy(const LinearCrossEntropyArgs& args) override {
    return RunLinearCrossEntropy(args);
  }

  // A device that fails is waited for first: what the first device has enqueued may depend on it.
  absl::StatusOr<StreamTimes> Wait() override {
    absl::Status failed;
    for (int i = 1; i < count(); ++i) {
      const cudaEvent_t ended = devices_[static_cast<size_t>(i)].ended;
      failed.Update(OfShard(i, ToStatus(WaitFor(ended), "batch")));
    }
    if (!failed.ok()) {
      Drain();
      return failed;
    }
    absl::StatusOr<StreamTimes> waited = lead().Wait();
    if (!waited.ok()) return OfShard(0, waited.status());
    return waited;
  }

 private:
  struct Device {
    std::unique_ptr<DeviceStream> stream;
    cudaEvent_t ended = nullptr;  // its partial
    cudaEvent_t ready = nullptr;  // of the first device: what partials read is there
    std::byte* hidden = nullptr;  // [kHiddenBytes]; null on the first device
    std::byte* rows = nullptr;    // [kRowBytes]; null on the first device
  };

  int count() const { return static_cast<int>(devices_.size()); }
  DeviceStream& stream(int shard) { return *devices_[static_cast<size_t>(shard)].stream; }
  DeviceStream& lead() { return stream(0); }
  VocabShards ShardsOf(const HeadView& head) const {
    return {.vocab = head.vocab(), .count = count()};
  }
  bool IsAbandoned() const {
    return abandoned() != nullptr && abandoned()->load(std::memory_order_relaxed);
  }

  absl::Status Add(Backend* backend) {
    absl::StatusOr<std::unique_ptr<Stream>> made = backend->CreateStream();
    if (!made.ok()) return made.status();
    Device& device = devices_.emplace_back();
    device.stream.reset(static_cast<DeviceStream*>(made->release()));
    const int number = device.stream->device();
    LOGITD_RETURN_IF_ERROR(ToStatus(cudaSetDevice(number), "select device"));
    LOGITD_RETURN_IF_ERROR(ToStatus(
        cudaEventCreateWithFlags(&device.ended, cudaEventDisableTiming | cudaEventBlockingSync),
        "create event"));
    if (devices_.size() == 1) {
      LOGITD_RETURN_IF_ERROR(ToStatus(
          cudaEventCreateWithFlags(&device.ready, cudaEventDisableTiming), "create event"));
      LOGITD_RETURN_IF_ERROR(ToStatus(cudaMalloc(&blocks_, kBlockBytes), "allocate blocks"));
      return ToStatus(cudaMalloc(&targets_, kBlockBytes / 16), "allocate targets");
    }
    if (const int first = lead().device(); number != first) {
      const cudaError_t error = cudaDeviceEnablePeerAccess(first, 0);
      if (error != cudaErrorPeerAccessAlreadyEnabled) {
        LOGITD_RETURN_IF_ERROR(ToStatus(error, "reach the first device's memory"));
      }
      cudaGetLastError();
    }
    LOGITD_RETURN_IF_ERROR(
        ToStatus(cudaMalloc(&device.rows, kRowBytes), "allocate parameters of rows"));
    return ToStatus(cudaMalloc(&device.hidden, kHiddenBytes), "allocate hidden states");
  }

  // `row_bytes`: of what is exchanged for a row, by all devices.
  int64_t RowsAtOnce(size_t row_bytes, const TensorView& hidden) const {
    const size_t hidden_bytes = static_cast<size_t>(hidden.row_stride) * SizeOf(hidden.dtype);
    const size_t target_bytes = sizeof(float) * devices_.size();
    const auto most = static_cast<int64_t>(
        std::min({kBlockBytes / row_bytes, kHiddenBytes / hidden_bytes,
                  kBlockBytes / 16 / target_bytes, kRowBytes / sizeof(CrossEntropyRow)}));
    return most >= kRowStep ? most / kRowStep * kRowStep : std::max<int64_t>(1, most);
  }

  template <class Shape>
  std::byte* BlockAt(const Shape& shape, int shard) {
    return blocks_ + static_cast<size_t>(shard) * shape.bytes();
  }

  absl::Status RunLinearTopK(const LinearTopKArgs& args) {
    if (static_cast<size_t>(args.hidden.rows) * LogitsBytes(args.head) <= kFewLogitsBytes) {
      return OnLogits(args.hidden, args.head, args.topk, &Stream::SoftmaxTopK);
    }
    TopKPartialShape shape = {.shards = ShardsOf(args.head), .rows = 1, .max_k = args.topk.max_k};
    const int64_t step = RowsAtOnce(shape.bytes() * devices_.size(), args.hidden);
    for (int64_t first = 0; first < args.hidden.rows && !IsAbandoned(); first += step) {
      shape.rows = std::min(step, args.hidden.rows - first);
      const SoftmaxTopKArgs topk = RowsFrom(args.topk, first);
      LOGITD_RETURN_IF_ERROR(OnAll([&](int shard) -> absl::Status {
        TensorView hidden = RowsOf(args.hidden, first, shape.rows);
        const SoftmaxTopKRow* rows = topk.rows;
        LOGITD_RETURN_IF_ERROR(Bring(shard, hidden, rows));
        return stream(shard).LinearTopKPartial({.hidden = hidden,
                                                .head = args.head.shards[shard],
                                                .shard = shard,
                                                .shape = shape,
                                                .rows = rows,
                                                .block = BlockAt(shape, shard)});
      }));
      LOGITD_RETURN_IF_ERROR(
          OfShard(0, lead().LinearTopKMerge({.shape = shape, .blocks = blocks_, .topk = topk})));
    }
    return absl::OkStatus();
  }

  absl::Status RunLinearCrossEntropy(const LinearCrossEntropyArgs& args) {
    LossPartialShape shape = {.shards = ShardsOf(args.head),
                              .rows = 1,
                              .totals = true,  // the host does not read rows
                              .want = args.cross_entropy.want,
                              .max_top = args.cross_entropy.max_top_logprobs,
                              .max_extra = args.cross_entropy.max_extra_ids};
    const int64_t step = RowsAtOnce(shape.bytes() * devices_.size(), args.hidden);
    for (int64_t first = 0; first < args.hidden.rows && !IsAbandoned(); first += step) {
      shape.rows = std::min(step, args.hidden.rows - first);
      LOGITD_RETURN_IF_ERROR(LossOfRows(RowsOf(args, first, shape.rows), shape));
    }
    return absl::OkStatus();
  }

  // What the first device has so far comes before what the others enqueue next.
  absl::Status Begin() {
    LOGITD_RETURN_IF_ERROR(OfShard(0, lead().BeginOps()));
    const cudaEvent_t ready = devices_.front().ready;
    LOGITD_RETURN_IF_ERROR(
        OfShard(0, ToStatus(cudaEventRecord(ready, lead().native()), "record event")));
    for (int i = 1; i < count(); ++i) {
      LOGITD_RETURN_IF_ERROR(OfShard(
          i, ToStatus(cudaStreamWaitEvent(stream(i).native(), ready, 0), "wait for a device")));
    }
    return absl::OkStatus();
  }

  // Enqueues part(shard) on all devices, after what the first one has so far; then the first waits
  // for the others.
  absl::Status OnAll(absl::FunctionRef<absl::Status(int)> part) {
    LOGITD_RETURN_IF_ERROR(Begin());
    for (int i = 1; i < count(); ++i) {
      LOGITD_RETURN_IF_ERROR(OfShard(i, stream(i).BeginOps()));
      const absl::Status status = part(i);
      // Also where a part of it was enqueued before an error: Wait waits for that.
      LOGITD_RETURN_IF_ERROR(OfShard(
          i, ToStatus(cudaEventRecord(devices_[static_cast<size_t>(i)].ended, stream(i).native()),
                      "record event")));
      LOGITD_RETURN_IF_ERROR(OfShard(i, status));
    }
    LOGITD_RETURN_IF_ERROR(OfShard(0, lead().BeginOps()));
    LOGITD_RETURN_IF_ERROR(OfShard(0, part(0)));
    for (int i = 1; i < count(); ++i) {
      LOGITD_RETURN_IF_ERROR(OfShard(
          0,
          ToStatus(cudaStreamWaitEvent(lead().native(), devices_[static_cast<size_t>(i)].ended, 0),
                   "wait for a device")));
    }
    return absl::OkStatus();
  }

  // Copies the hidden states, and the parameters of as many rows unless they are null, to the
  // shard's device, and makes the arguments those of the copies.
  template <class Row>
  absl::Status Bring(int shard, TensorView& hidden, const Row*& rows) {
    if (shard == 0) return absl::OkStatus();
    const Device& device = devices_[static_cast<size_t>(shard)];
    const size_t row_bytes = static_cast<size_t>(hidden.row_stride) * SizeOf(hidden.dtype);
    const size_t bytes = static_cast<size_t>(hidden.rows - 1) * row_bytes +
                         static_cast<size_t>(hidden.cols) * SizeOf(hidden.dtype);
    RowsCopy copies[2];
    size_t count = 0;
    const auto copy = [&](const void* from, size_t size, std::byte* to) {
      copies[count++] = {.from = static_cast<const std::byte*>(from),
                         .from_stride = size,
                         .to = to,
                         .to_stride = size,
                         .row_bytes = size,
                         .rows = 1,
                         .from_device = true};
    };
    if (bytes <= kKernelCopyBytes) {
      copy(hidden.data, bytes, device.hidden);
    } else {
      LOGITD_RETURN_IF_ERROR(ToStatus(cudaMemcpyAsync(device.hidden, hidden.data, bytes,
                                                      cudaMemcpyDefault, device.stream->native()),
                                      "copy hidden states"));
    }
    hidden.data = device.hidden;
    if (rows != nullptr) {
      copy(rows, static_cast<size_t>(hidden.rows) * sizeof(Row), device.rows);
      rows = reinterpret_cast<const Row*>(device.rows);
    }
    if (count == 0) return absl::OkStatus();
    return ToStatus(GatherRows({copies, count}, device.stream->native()), "copy rows");
  }

  // Bytes of a row of logits, where they are exchanged.
  static int64_t LogitsStride(const HeadView& head) { return (head.vocab() + 31) / 32 * 32; }
  static size_t LogitsBytes(const HeadView& head) {
    return static_cast<size_t>(LogitsStride(head)) * sizeof(float);
  }

  // Runs `op`, which takes logits, on the first device. `args` are those of all rows.
  template <class Args>
  absl::Status OnLogits(const TensorView& hidden, const HeadView& head, const Args& args,
                        absl::Status (Stream::*op)(const Args&)) {
    auto* const logits = reinterpret_cast<float*>(blocks_);
    const int64_t step = RowsAtOnce(LogitsBytes(head), hidden);
    for (int64_t first = 0; first < hidden.rows && !IsAbandoned(); first += step) {
      const int64_t rows = std::min(step, hidden.rows - first);
      LOGITD_RETURN_IF_ERROR(OnAll([&](int shard) -> absl::Status {
        TensorView states = RowsOf(hidden, first, rows);
        const std::byte* no_rows = nullptr;
        LOGITD_RETURN_IF_ERROR(Bring(shard, states, no_rows));
        return stream(shard).ShardLogits({.hidden = states,
                                          .head = head.shards[shard],
                                          .shard = shard,
                                          .shards = ShardsOf(head),
                                          .logits = logits,
                                          .stride = LogitsStride(head)});
      }));
      Args part = RowsFrom(args, first);
      part.logits = {logits, DType::kF32, rows, head.vocab(), LogitsStride(head)};
      LOGITD_RETURN_IF_ERROR(OfShard(0, (lead().*op)(part)));
    }
    return absl::OkStatus();
  }

  absl::Status LossOfRows(const LinearCrossEntropyArgs& args, const LossPartialShape& shape) {
    const bool ranks = (shape.want & kWantRank) != 0;
    const auto bring = [&](int shard, TensorView& hidden, const CrossEntropyRow*& rows) {
      hidden = args.hidden;
      rows = args.cross_entropy.rows;
      return Bring(shard, hidden, rows);
    };
    if (ranks) {
      LOGITD_RETURN_IF_ERROR(OnAll([&](int shard) -> absl::Status {
        TensorView hidden;
        const CrossEntropyRow* rows;
        LOGITD_RETURN_IF_ERROR(bring(shard, hidden, rows));
        return stream(shard).LinearCrossEntropyTargets({.hidden = hidden,
                                                        .head = args.head.shards[shard],
                                                        .shard = shard,
                                                        .shards = shape.shards,
                                                        .rows = rows,
                                                        .targets = targets_ + shard * shape.rows});
      }));
    }
    LOGITD_RETURN_IF_ERROR(OnAll([&](int shard) -> absl::Status {
      TensorView hidden = args.hidden;
      const CrossEntropyRow* rows = args.cross_entropy.rows;
      if (ranks && shard > 0) {  // they are there already
        hidden.data = devices_[static_cast<size_t>(shard)].hidden;
        rows = reinterpret_cast<const CrossEntropyRow*>(devices_[static_cast<size_t>(shard)].rows);
      } else {
        LOGITD_RETURN_IF_ERROR(bring(shard, hidden, rows));
      }
      return stream(shard).LinearCrossEntropyPartial({.hidden = hidden,
                                                      .head = args.head.shards[shard],
                                                      .shard = shard,
                                                      .shape = shape,
                                                      .rows = rows,
                                                      .extra_ids = args.cross_entropy.extra_ids,
                                                      .targets = ranks ? targets_ : nullptr,
                                                      .block = BlockAt(shape, shard)});
    }));
    return OfShard(0,
                   lead().LinearCrossEntropyMerge(
                       {.shape = shape, .blocks = blocks_, .cross_entropy = args.cross_entropy}));
  }

  // Waits for an event: polls at first, because the wake-up of a blocked thread takes as long as a
  // decode step.
  static cudaError_t WaitFor(cudaEvent_t event) {
    const absl::Time poll_until = absl::Now() + kPollFor;
    cudaError_t state;
    while ((state = cudaEventQuery(event)) == cudaErrorNotReady && absl::Now() < poll_until) {
    }
    return state == cudaErrorNotReady ? cudaEventSynchronize(event) : state;
  }

  // Waits until the devices that still work have ended what they have, but not for ever: the first
  // one may wait for the one that failed.
  void Drain() {
    const absl::Time deadline = absl::Now() + kDrainFor;
    for (int i = 0; i < count(); ++i) {
      while (cudaSetDevice(stream(i).device()) == cudaSuccess &&
             cudaStreamQuery(stream(i).native()) == cudaErrorNotReady && absl::Now() < deadline) {
        absl::SleepFor(kDrainPoll);
      }
    }
    cudaGetLastError();
    // Ends the phases of its work.
    if (cudaStreamQuery(lead().native()) == cudaSuccess) (void)lead().Wait();
    cudaGetLastError();
  }

  std::vector<Device> devices_;
  std::byte* blocks_ = nullptr;  // [kBlockBytes], of all shards
  float* targets_ = nullptr;     // [kBlockBytes / 16], of all shards
};

}  // namespace

absl::Status CheckPeers(absl::Span<Backend* const> backends) {
  const int first = backends.front()->device().number;
  for (const Backend* backend : backends) {
    const int number = backend->device().number;
    int can = 0;
    if (number == first) continue;
    LOGITD_RETURN_IF_ERROR(ToStatus(cudaDeviceCanAccessPeer(&can, number, first), "ask for peers"));
    if (can != 0) continue;
    return absl::FailedPreconditionError(absl::StrFormat(
        "shard: device %d cannot reach the memory of device %d, allowed devices with peer access "
        "(NVLink, or PCIe where the machine lets it); on others each device holds the whole head",
        number, first));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<Stream>> CreateShardedStream(absl::Span<Backend* const> backends) {
  auto stream = std::make_unique<ShardedStream>();
  LOGITD_RETURN_IF_ERROR(stream->Init(backends));
  return stream;
}

}  // namespace logitd::cuda
