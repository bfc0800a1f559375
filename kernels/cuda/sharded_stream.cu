// Linear ops on a head that is cut over CUDA devices, for as many rows at a time as buffers have room
// for:
//
//   every other device   copies hidden states and parameters of rows from the first device; computes
//                        its partial
//   exchange             the first device gets the blocks of all
//   the first            computes its own partial, and merges
//
// One thread enqueues all of it, the first device last, because the others have more to do before
// their product. There are two ways to exchange (ShardExchange):
//
//   kPeers   The kernels of a partial write the block into the first device's memory, and an event
//            tells it so: nothing spins, and a device that fails holds up no other. What is stored is
//            the block of kernels/shards.h, or logits: those of linear_sample, and of linear_topk
//            while they are few. They go to their place in a matrix of the whole vocabulary, on which
//            the first device runs the op that takes logits. The stores overlap the product, and
//            there are fewer kernels after it.
//   kNccl    Each device writes the block into its own memory, and one all-gather brings all blocks to
//            all devices. The first device packs what the others need of a call, and a copy brings it
//            to each, through the host where there is no other way.
#include "kernels/cuda/sharded_stream.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "kernels/cuda/gather.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/nccl.h"
#include "kernels/cuda/stream.h"
#include "kernels/sharded_stream.h"
#include "kernels/shards.h"
#include "kernels/status_macros.h"

namespace logitd::cuda {
namespace {

// Memory for the blocks of all shards.
constexpr size_t kBlockBytes = size_t{128} << 20;
// Memory for the targets of all shards.
constexpr size_t kTargetBytes = kBlockBytes / 16;
// Memory of every other device for hidden states, parameters of rows, and extra ids where they are
// brought too.
constexpr size_t kHiddenBytes = size_t{64} << 20;
constexpr size_t kRowBytes = size_t{4} << 20;
constexpr size_t kExtraBytes = size_t{4} << 20;
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

constexpr size_t kBorder = 256;  // of what is packed
size_t ToBorder(size_t bytes) { return (bytes + kBorder - 1) / kBorder * kBorder; }

constexpr int kPackThreads = 128;

// Block r packs the parameters and the extra ids of row r: `max_extra` places for each row.
__global__ void __launch_bounds__(kPackThreads)
    PackExtrasKernel(const CrossEntropyRow* rows, const int32_t* ids, int32_t max_extra,
                     CrossEntropyRow* to_rows, int32_t* to_ids) {
  const int64_t r = blockIdx.x;
  const CrossEntropyRow& row = rows[r];
  const int64_t first = r * max_extra;
  for (int i = threadIdx.x; i < row.extra_count; i += kPackThreads)
    to_ids[first + i] = ids[row.first_extra + i];
  if (threadIdx.x != 0) return;
  CrossEntropyRow packed = row;
  if (packed.active != 0) packed.first_extra = first;
  to_rows[r] = packed;
}

// What a partial reads of a call: hidden states, parameters of as many rows, and the extra ids that
// those name. Null: not wanted.
template <class Row>
struct Inputs {
  TensorView hidden;
  const Row* rows = nullptr;
  const int32_t* extra_ids = nullptr;
  int32_t max_extra = 0;

  size_t stride_bytes() const {
    return static_cast<size_t>(hidden.row_stride) * SizeOf(hidden.dtype);
  }
  size_t hidden_bytes() const {
    return static_cast<size_t>(hidden.rows - 1) * stride_bytes() +
           static_cast<size_t>(hidden.cols) * SizeOf(hidden.dtype);
  }
  size_t row_bytes() const {
    return rows == nullptr ? 0 : static_cast<size_t>(hidden.rows) * sizeof(Row);
  }
  size_t extra_bytes() const {
    return extra_ids == nullptr ? 0 : static_cast<size_t>(hidden.rows * max_extra) * 4;
  }
};

RowsCopy CopyOf(const void* from, size_t bytes, std::byte* to) {
  return {.from = static_cast<const std::byte*>(from),
          .from_stride = bytes,
          .to = to,
          .to_stride = bytes,
          .row_bytes = bytes,
          .rows = 1,
          .from_device = true};
}

class ShardedStream final : public Stream {
 public:
  ~ShardedStream() override {
    nccl_.reset();  // first: it may use all devices
    // From the last on: cudaFree waits for the device, and all write into the first one's memory.
    for (size_t i = devices_.size(); i-- > 0;) {
      Device& device = devices_[i];
      cudaSetDevice(device.stream->device());
      if (device.ended != nullptr) cudaEventDestroy(device.ended);
      if (device.ready != nullptr) cudaEventDestroy(device.ready);
      cudaFree(device.inputs);
      if (i > 0 && exchange_ == ShardExchange::kPeers) continue;  // the first one's
      cudaFree(device.blocks);
      cudaFree(device.targets);
    }
    cudaGetLastError();
  }

  absl::Status Init(absl::Span<Backend* const> backends, const ShardOptions& options) {
    const absl::StatusOr<ShardExchange> exchange = ChooseExchange(backends, options.exchange);
    if (!exchange.ok()) return exchange.status();
    exchange_ = *exchange;
    for (size_t i = 0; i < backends.size(); ++i) {
      const absl::Status status = Add(backends[i]);
      if (!status.ok()) return OfShard(static_cast<int>(i), status);
    }
    return exchange_ == ShardExchange::kNccl ? JoinNccl() : absl::OkStatus();
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
    return exchange_ == ShardExchange::kPeers
               ? OnLogits(args.hidden, args.head, args.sample, &Stream::Sample)
               : RunLinearSample(args);
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
    // What Inputs are packed in. By kPeers the first device has none.
    std::byte* inputs = nullptr;  // [kHiddenBytes + kRowBytes + kExtraBytes]
    // Of all shards. By kPeers all devices have those of the first.
    std::byte* blocks = nullptr;   // [kBlockBytes]
    std::byte* targets = nullptr;  // [kTargetBytes]
  };
  using Gathered = std::byte* Device::*;

  int count() const { return static_cast<int>(devices_.size()); }
  DeviceStream& stream(int shard) { return *devices_[static_cast<size_t>(shard)].stream; }
  DeviceStream& lead() { return stream(0); }
  const std::byte* blocks() const { return devices_.front().blocks; }  // of all shards
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
    places_.resize(devices_.size());
    device.stream.reset(static_cast<DeviceStream*>(made->release()));
    const int number = device.stream->device();
    LOGITD_RETURN_IF_ERROR(ToStatus(cudaSetDevice(number), "select device"));
    LOGITD_RETURN_IF_ERROR(ToStatus(
        cudaEventCreateWithFlags(&device.ended, cudaEventDisableTiming | cudaEventBlockingSync),
        "create event"));
    if (devices_.size() == 1) {
      LOGITD_RETURN_IF_ERROR(ToStatus(
          cudaEventCreateWithFlags(&device.ready, cudaEventDisableTiming), "create event"));
    }
    if (devices_.size() == 1 || exchange_ == ShardExchange::kNccl) {
      LOGITD_RETURN_IF_ERROR(ToStatus(cudaMalloc(&device.blocks, kBlockBytes), "allocate blocks"));
      LOGITD_RETURN_IF_ERROR(
          ToStatus(cudaMalloc(&device.targets, kTargetBytes), "allocate targets"));
    } else {
      device.blocks = devices_.front().blocks;
      device.targets = devices_.front().targets;
      LOGITD_RETURN_IF_ERROR(ReachFirst(number));
    }
    if (devices_.size() == 1 && exchange_ == ShardExchange::kPeers) return absl::OkStatus();
    return ToStatus(cudaMalloc(&device.inputs, kHiddenBytes + kRowBytes + kExtraBytes),
                    "allocate hidden states");
  }

  // Lets device `number`, which is the thread's, use the first one's memory.
  absl::Status ReachFirst(int number) {
    if (number == lead().device()) return absl::OkStatus();
    const cudaError_t error = cudaDeviceEnablePeerAccess(lead().device(), 0);
    if (error != cudaErrorPeerAccessAlreadyEnabled) {
      LOGITD_RETURN_IF_ERROR(ToStatus(error, "reach the first device's memory"));
    }
    cudaGetLastError();
    return absl::OkStatus();
  }

  // Makes the communicators, and has NCCL connect the devices, which its first all-gather does.
  absl::Status JoinNccl() {
    std::vector<int> numbers;
    for (int i = 0; i < count(); ++i) numbers.push_back(stream(i).device());
    absl::StatusOr<std::unique_ptr<NcclGather>> nccl = NcclGather::Create(numbers);
    if (!nccl.ok()) return nccl.status();
    nccl_ = *std::move(nccl);
    LOGITD_RETURN_IF_ERROR(GatherBlocks(&Device::blocks, kBorder));
    for (int i = 0; i < count(); ++i) {
      LOGITD_RETURN_IF_ERROR(
          OfShard(i, ToStatus(cudaStreamSynchronize(stream(i).native()), "join by NCCL")));
    }
    return absl::OkStatus();
  }

  // `row_bytes`: of what is exchanged for a row, by all devices.
  int64_t RowsAtOnce(size_t row_bytes, const TensorView& hidden, int32_t max_extra = 0) const {
    const size_t hidden_bytes = static_cast<size_t>(hidden.row_stride) * SizeOf(hidden.dtype);
    const size_t target_bytes = sizeof(float) * devices_.size();
    const auto most = static_cast<int64_t>(
        std::min({kBlockBytes / row_bytes, kHiddenBytes / hidden_bytes, kTargetBytes / target_bytes,
                  kRowBytes / sizeof(CrossEntropyRow),
                  kExtraBytes / (sizeof(int32_t) * static_cast<size_t>(std::max(1, max_extra)))}));
    return most >= kRowStep ? most / kRowStep * kRowStep : std::max<int64_t>(1, most);
  }

  template <class Shape>
  std::byte* BlockAt(const Shape& shape, int shard) {
    return devices_[static_cast<size_t>(shard)].blocks + static_cast<size_t>(shard) * shape.bytes();
  }

  absl::Status RunLinearTopK(const LinearTopKArgs& args) {
    if (exchange_ == ShardExchange::kPeers &&
        static_cast<size_t>(args.hidden.rows) * LogitsBytes(args.head) <= kFewLogitsBytes) {
      return OnLogits(args.hidden, args.head, args.topk, &Stream::SoftmaxTopK);
    }
    TopKPartialShape shape = {.shards = ShardsOf(args.head), .rows = 1, .max_k = args.topk.max_k};
    const int64_t step = RowsAtOnce(shape.bytes() * devices_.size(), args.hidden);
    for (int64_t first = 0; first < args.hidden.rows && !IsAbandoned(); first += step) {
      shape.rows = std::min(step, args.hidden.rows - first);
      const SoftmaxTopKArgs topk = RowsFrom(args.topk, first);
      const Inputs<SoftmaxTopKRow> inputs = {.hidden = RowsOf(args.hidden, first, shape.rows),
                                             .rows = topk.rows};
      LOGITD_RETURN_IF_ERROR(Pack(inputs));
      LOGITD_RETURN_IF_ERROR(OnAll([&](int shard) -> absl::Status {
        Inputs<SoftmaxTopKRow> at = inputs;
        LOGITD_RETURN_IF_ERROR(Bring(shard, at));
        return stream(shard).LinearTopKPartial({.hidden = at.hidden,
                                                .head = args.head.shards[shard],
                                                .shard = shard,
                                                .shape = shape,
                                                .rows = at.rows,
                                                .block = BlockAt(shape, shard)});
      }));
      LOGITD_RETURN_IF_ERROR(Exchange(&Device::blocks, shape.bytes()));
      LOGITD_RETURN_IF_ERROR(
          OfShard(0, lead().LinearTopKMerge({.shape = shape, .blocks = blocks(), .topk = topk})));
    }
    return absl::OkStatus();
  }

  absl::Status RunLinearSample(const LinearSampleArgs& args) {
    SamplePartialShape shape = {.shards = ShardsOf(args.head), .rows = 1};
    const int64_t step = RowsAtOnce(shape.bytes() * devices_.size(), args.hidden);
    for (int64_t first = 0; first < args.hidden.rows && !IsAbandoned(); first += step) {
      shape.rows = std::min(step, args.hidden.rows - first);
      const Inputs<std::byte> inputs = {.hidden = RowsOf(args.hidden, first, shape.rows)};
      LOGITD_RETURN_IF_ERROR(Pack(inputs));
      LOGITD_RETURN_IF_ERROR(OnAll([&](int shard) -> absl::Status {
        Inputs<std::byte> at = inputs;
        LOGITD_RETURN_IF_ERROR(Bring(shard, at));
        return stream(shard).LinearSamplePartial({.hidden = at.hidden,
                                                  .head = args.head.shards[shard],
                                                  .shard = shard,
                                                  .shape = shape,
                                                  .block = BlockAt(shape, shard)});
      }));
      LOGITD_RETURN_IF_ERROR(Exchange(&Device::blocks, shape.bytes()));
      LOGITD_RETURN_IF_ERROR(OfShard(
          0, lead().LinearSampleMerge(
                 {.shape = shape, .blocks = blocks(), .sample = RowsFrom(args.sample, first)})));
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
    const int64_t step = RowsAtOnce(shape.bytes() * devices_.size(), args.hidden, shape.max_extra);
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

  // Enqueues part(shard) on all devices, after what the first one has so far.
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
    return OfShard(0, part(0));
  }

  // What the first device does next has the blocks, or targets, of all devices, each of `bytes`.
  absl::Status Exchange(Gathered gathered, size_t bytes) {
    if (exchange_ == ShardExchange::kNccl) return GatherBlocks(gathered, bytes);
    for (int i = 1; i < count(); ++i) {
      LOGITD_RETURN_IF_ERROR(OfShard(
          0,
          ToStatus(cudaStreamWaitEvent(lead().native(), devices_[static_cast<size_t>(i)].ended, 0),
                   "wait for a device")));
    }
    return absl::OkStatus();
  }
  absl::Status GatherBlocks(Gathered gathered, size_t bytes) {
    for (size_t i = 0; i < devices_.size(); ++i)
      places_[i] = {devices_[i].*gathered, devices_[i].stream->native()};
    return nccl_->Enqueue(places_, bytes);
  }

  // By kNccl, puts what the other devices copy together on the first device.
  template <class Row>
  absl::Status Pack(const Inputs<Row>& inputs) {
    if (exchange_ == ShardExchange::kPeers || count() == 1) return absl::OkStatus();
    LOGITD_RETURN_IF_ERROR(OfShard(0, lead().BeginOps()));
    std::byte* const to = devices_.front().inputs;
    std::byte* const rows = to + ToBorder(inputs.hidden_bytes());
    std::byte* const extras = rows + ToBorder(inputs.row_bytes());
    RowsCopy copies[2] = {CopyOf(inputs.hidden.data, inputs.hidden_bytes(), to)};
    size_t copied = 1;
    cudaError_t error = cudaSuccess;
    if constexpr (std::is_same_v<Row, CrossEntropyRow>) {
      error = LaunchKernel(
          &PackExtrasKernel, {.grid = GridFor(inputs.hidden.rows), .threads = kPackThreads},
          lead().native(), inputs.rows, inputs.extra_ids, inputs.max_extra,
          reinterpret_cast<CrossEntropyRow*>(rows), reinterpret_cast<int32_t*>(extras));
    } else if (inputs.rows != nullptr) {
      copies[copied++] = CopyOf(inputs.rows, inputs.row_bytes(), rows);
    }
    if (error == cudaSuccess) error = GatherRows({copies, copied}, lead().native());
    return OfShard(0, ToStatus(error, "pack rows"));
  }

  // Brings the inputs to the shard's device, and makes them those that are there. By kNccl they have
  // been packed.
  template <class Row>
  absl::Status Bring(int shard, Inputs<Row>& inputs) {
    if (shard == 0) return absl::OkStatus();
    const Device& device = devices_[static_cast<size_t>(shard)];
    const cudaStream_t to = device.stream->native();
    const size_t bytes = inputs.hidden_bytes();
    const size_t rows_at = ToBorder(bytes);
    const size_t extras_at = rows_at + ToBorder(inputs.row_bytes());
    if (exchange_ == ShardExchange::kNccl) {
      LOGITD_RETURN_IF_ERROR(
          ToStatus(cudaMemcpyAsync(device.inputs, devices_.front().inputs,
                                   extras_at + inputs.extra_bytes(), cudaMemcpyDefault, to),
                   "copy rows"));
      MoveTo(shard, inputs);
      return absl::OkStatus();
    }
    RowsCopy copies[2];
    size_t count = 0;
    if (bytes <= kKernelCopyBytes) {
      copies[count++] = CopyOf(inputs.hidden.data, bytes, device.inputs);
    } else {
      LOGITD_RETURN_IF_ERROR(
          ToStatus(cudaMemcpyAsync(device.inputs, inputs.hidden.data, bytes, cudaMemcpyDefault, to),
                   "copy hidden states"));
    }
    if (inputs.rows != nullptr)
      copies[count++] = CopyOf(inputs.rows, inputs.row_bytes(), device.inputs + rows_at);
    MoveTo(shard, inputs);
    if (count == 0) return absl::OkStatus();
    return ToStatus(GatherRows({copies, count}, to), "copy rows");
  }

  // Makes the inputs those that the shard's device has. By kPeers it reads the extra ids where they
  // are.
  template <class Row>
  void MoveTo(int shard, Inputs<Row>& inputs) {
    if (shard == 0) return;
    std::byte* const at = devices_[static_cast<size_t>(shard)].inputs;
    const size_t rows_at = ToBorder(inputs.hidden_bytes());
    inputs.hidden.data = at;
    if (inputs.rows != nullptr) inputs.rows = reinterpret_cast<const Row*>(at + rows_at);
    if (inputs.extra_ids != nullptr && exchange_ == ShardExchange::kNccl) {
      inputs.extra_ids =
          reinterpret_cast<const int32_t*>(at + rows_at + ToBorder(inputs.row_bytes()));
    }
  }

  // Bytes of a row of logits, where they are exchanged.
  static int64_t LogitsStride(const HeadView& head) { return (head.vocab() + 31) / 32 * 32; }
  static size_t LogitsBytes(const HeadView& head) {
    return static_cast<size_t>(LogitsStride(head)) * sizeof(float);
  }

  // By kPeers: runs `op`, which takes logits, on the first device. `args` are those of all rows.
  template <class Args>
  absl::Status OnLogits(const TensorView& hidden, const HeadView& head, const Args& args,
                        absl::Status (Stream::*op)(const Args&)) {
    auto* const logits = reinterpret_cast<float*>(devices_.front().blocks);
    const int64_t step = RowsAtOnce(LogitsBytes(head), hidden);
    for (int64_t first = 0; first < hidden.rows && !IsAbandoned(); first += step) {
      const int64_t rows = std::min(step, hidden.rows - first);
      LOGITD_RETURN_IF_ERROR(OnAll([&](int shard) -> absl::Status {
        Inputs<std::byte> at = {.hidden = RowsOf(hidden, first, rows)};
        LOGITD_RETURN_IF_ERROR(Bring(shard, at));
        return stream(shard).ShardLogits({.hidden = at.hidden,
                                          .head = head.shards[shard],
                                          .shard = shard,
                                          .shards = ShardsOf(head),
                                          .logits = logits,
                                          .stride = LogitsStride(head)});
      }));
      LOGITD_RETURN_IF_ERROR(Exchange(&Device::blocks, 0));
      Args part = RowsFrom(args, first);
      part.logits = {logits, DType::kF32, rows, head.vocab(), LogitsStride(head)};
      LOGITD_RETURN_IF_ERROR(OfShard(0, (lead().*op)(part)));
    }
    return absl::OkStatus();
  }

  absl::Status LossOfRows(const LinearCrossEntropyArgs& args, const LossPartialShape& shape) {
    const bool ranks = (shape.want & kWantRank) != 0;
    const CrossEntropyArgs& loss = args.cross_entropy;
    const Inputs<CrossEntropyRow> inputs = {
        .hidden = args.hidden,
        .rows = loss.rows,
        .extra_ids = shape.max_extra > 0 ? loss.extra_ids : nullptr,
        .max_extra = shape.max_extra};
    LOGITD_RETURN_IF_ERROR(Pack(inputs));
    const auto targets_of = [this](int shard) {
      return reinterpret_cast<float*>(devices_[static_cast<size_t>(shard)].targets);
    };
    if (ranks) {
      LOGITD_RETURN_IF_ERROR(OnAll([&](int shard) -> absl::Status {
        Inputs<CrossEntropyRow> at = inputs;
        LOGITD_RETURN_IF_ERROR(Bring(shard, at));
        return stream(shard).LinearCrossEntropyTargets(
            {.hidden = at.hidden,
             .head = args.head.shards[shard],
             .shard = shard,
             .shards = shape.shards,
             .rows = at.rows,
             .targets = targets_of(shard) + shard * shape.rows});
      }));
      LOGITD_RETURN_IF_ERROR(
          Exchange(&Device::targets, static_cast<size_t>(shape.rows) * sizeof(float)));
    }
    LOGITD_RETURN_IF_ERROR(OnAll([&](int shard) -> absl::Status {
      Inputs<CrossEntropyRow> at = inputs;
      if (ranks) {  // they are there already
        MoveTo(shard, at);
      } else {
        LOGITD_RETURN_IF_ERROR(Bring(shard, at));
      }
      return stream(shard).LinearCrossEntropyPartial(
          {.hidden = at.hidden,
           .head = args.head.shards[shard],
           .shard = shard,
           .shape = shape,
           .rows = at.rows,
           .extra_ids = at.extra_ids,
           .targets = ranks ? targets_of(shard) : nullptr,
           .block = BlockAt(shape, shard)});
    }));
    LOGITD_RETURN_IF_ERROR(Exchange(&Device::blocks, shape.bytes()));
    return OfShard(0, lead().LinearCrossEntropyMerge(
                          {.shape = shape, .blocks = blocks(), .cross_entropy = loss}));
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

  ShardExchange exchange_ = ShardExchange::kPeers;
  std::vector<Device> devices_;
  std::unique_ptr<NcclGather> nccl_;  // null: kPeers
  std::vector<NcclGather::Place> places_;
};

}  // namespace

namespace {

// Whether the memory of the first device can be reached from all others.
absl::Status CheckPeers(absl::Span<Backend* const> backends) {
  const int first = backends.front()->device().number;
  for (const Backend* backend : backends) {
    const int number = backend->device().number;
    int can = 0;
    if (number == first) continue;
    LOGITD_RETURN_IF_ERROR(ToStatus(cudaDeviceCanAccessPeer(&can, number, first), "ask for peers"));
    if (can != 0) continue;
    return absl::FailedPreconditionError(
        absl::StrFormat("device %d cannot reach the memory of device %d", number, first));
  }
  return absl::OkStatus();
}

// Whether NCCL is there, and can join the devices.
absl::Status CheckNccl(absl::Span<Backend* const> backends) {
  std::set<int> numbers;
  for (const Backend* backend : backends) {
    if (numbers.insert(backend->device().number).second) continue;
    return absl::FailedPreconditionError(absl::StrFormat(
        "NCCL joins no device with itself: device %d is named twice", backend->device().number));
  }
  return NcclGather::Check();
}

}  // namespace

absl::StatusOr<ShardExchange> ChooseExchange(absl::Span<Backend* const> backends,
                                             ShardExchange wanted) {
  constexpr char kOtherwise[] = "on others each device holds the whole head";
  std::string peers, nccl;  // why not
  if (wanted != ShardExchange::kNccl) {
    const absl::Status status = CheckPeers(backends);
    if (status.ok()) return ShardExchange::kPeers;
    if (absl::IsInternal(status)) return status;
    peers = std::string(status.message());
  }
  if (wanted != ShardExchange::kPeers) {
    const absl::Status status = CheckNccl(backends);
    if (status.ok()) return ShardExchange::kNccl;
    nccl = std::string(status.message());
  }
  if (wanted == ShardExchange::kPeers) {
    return absl::FailedPreconditionError(
        absl::StrFormat("shard: %s, allowed devices with peer access (NVLink, or PCIe where the "
                        "machine lets it); %s",
                        peers, kOtherwise));
  }
  if (wanted == ShardExchange::kNccl)
    return absl::FailedPreconditionError(absl::StrFormat("shard: %s; %s", nccl, kOtherwise));
  return absl::FailedPreconditionError(
      absl::StrFormat("shard: %s, and %s, allowed devices with peer access (NVLink, or PCIe where "
                      "the machine lets it) or with NCCL; %s",
                      peers, nccl, kOtherwise));
}

absl::StatusOr<std::unique_ptr<Stream>> CreateShardedStream(absl::Span<Backend* const> backends,
                                                            const ShardOptions& options) {
  auto stream = std::make_unique<ShardedStream>();
  LOGITD_RETURN_IF_ERROR(stream->Init(backends, options));
  return stream;
}

}  // namespace logitd::cuda
