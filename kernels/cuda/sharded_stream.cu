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
//   kPeers   The kernels of a partial write the block into the first device's memory, and a signal
//            tells it so: no kernel spins. Logits are stored in place of a block for linear_topk and
//            linear_sample while they are few. They go to their place in a matrix of the whole
//            vocabulary, on which the first device runs the op that takes logits. The stores overlap
//            the product, and there are fewer kernels after it.
//   kNccl    Each device writes the block into its own memory, and one all-gather brings all blocks to
//            all devices. The first device packs what the others need of a call, and a copy brings it
//            to each, through the host where there is no other way.
//
// The block is that of kernels/shards.h. For linear_sample this is logits, so where every row needs only
// a few of its first tokens the block has these tokens (linear/kept_sample.cu).
//
// Training has two exchanges. Each device computes pass 1 (linear/training.cu) and writes its sums into
// a block. Every device reads the blocks of all, and makes the gradients of its own tokens. By kPeers a
// copy engine brings d_hidden's part to the first device while the last product runs, by kNccl one
// reduce adds the parts at that time.
//
// A device that fails or hangs holds up no other: the host watches the signals, and where one does not
// come it ends all waits and the collective. The driver may wait for a device when it loads a kernel, so
// a call of a new kind waits on the host before it enqueues what depends on other devices.
//
// Measured: bench/results/h100/shards.json. Tried and dropped: blocks in place of logits for 1 to 64
// rows of linear_topk by kPeers (0.97 to 1.43 times as long).
//
// Long because all calls share the state of the devices.
#include "kernels/cuda/sharded_stream.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <compare>
#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "kernels/cuda/gather.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/linear/shard_training.h"
#include "kernels/cuda/nccl.h"
#include "kernels/cuda/patience.h"
#include "kernels/cuda/signals.h"
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
constexpr absl::Duration kLookForErrors = absl::Microseconds(50);
// How long NCCL gets to make communicators: it takes about a second, more on many devices.
constexpr absl::Duration kJoinFor = absl::Seconds(30);
// How long devices get to end what they have when all waits have been ended because none moved. After
// an error of one the others get at least as long, also at the start of the stream.
constexpr absl::Duration kDrainFor = absl::Seconds(2);

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

// Where Device::gradients has what a device needs of a call that makes gradients. The first device has
// only parts of d_hidden there.
struct GradientPlaces {
  size_t rows = 0;  // after the hidden states
  size_t upstream = 0;
  size_t logsumexp = 0;
  size_t loss = 0;
  size_t target_logprob = 0;
  size_t status = 0;
  size_t parts = 0;  // f32 [rows, stride] each
  size_t bytes = 0;
  int64_t stride;

  GradientPlaces(const LinearCrossEntropyBackwardArgs& args, bool has_inputs, int part_count)
      : stride(RoundUp(args.hidden.cols, 64)) {
    const auto count = static_cast<size_t>(args.hidden.rows);
    size_t next = 0;
    const auto take = [&next](size_t size) { return std::exchange(next, next + ToBorder(size)); };
    if (has_inputs) {
      take(count * static_cast<size_t>(args.hidden.row_stride) * SizeOf(args.hidden.dtype));
      rows = take(count * sizeof(CrossEntropyRow));
      upstream = take(count * sizeof(float));
      logsumexp = take(count * sizeof(float));
      loss = take(count * sizeof(float));
      target_logprob = take(count * sizeof(float));
      status = take(count * sizeof(RowStatus));
    }
    parts = take(static_cast<size_t>(part_count) * part_bytes(args.hidden.rows));
    bytes = next;
  }

  size_t part_bytes(int64_t count) const {
    return static_cast<size_t>(count * stride) * sizeof(float);
  }
};

class CudaShardedStream final : public ShardedStream {
 public:
  ~CudaShardedStream() override {
    nccl_.reset();  // first: it may use all devices
    // From the last on: cudaFree waits for the device, and all write into the first one's memory.
    for (size_t i = devices_.size(); i-- > 0;) {
      Device& device = devices_[i];
      const int number = device.stream->device();
      // By kPeers one that hangs may still write into the memory of the first.
      if (IsHung(number) || (!hung_.ok() && i == 0)) continue;
      cudaSetDevice(number);
      if (device.mover != nullptr) cudaStreamDestroy(device.mover);
      if (device.hidden_done != nullptr) cudaEventDestroy(device.hidden_done);
      if (device.moved != nullptr) cudaEventDestroy(device.moved);
      cudaFree(device.gradients.data);
      cudaFree(device.inputs);
      if (i > 0 && exchange_ == ShardExchange::kPeers) continue;  // the first one's
      cudaFree(device.blocks);
      cudaFree(device.targets);
    }
    cudaGetLastError();
    if (!hung_.ok()) static_cast<void>(signals_.release());  // it may still raise its own
  }

  absl::Status Init(absl::Span<Backend* const> backends, const ShardOptions& options) {
    const absl::StatusOr<ShardExchange> exchange = ChooseExchange(backends, options.exchange);
    if (!exchange.ok()) return exchange.status();
    exchange_ = *exchange;
    hang_after_ = options.hang_after;
    // Else the signals' memory makes a context on another device.
    LOGITD_RETURN_IF_ERROR(
        ToStatus(cudaSetDevice(backends.front()->device().number), "select device"));
    absl::StatusOr<std::unique_ptr<Signals>> signals =
        Signals::Create(static_cast<int>(backends.size()));
    if (!signals.ok()) return OfShard(0, signals.status());
    signals_ = *std::move(signals);
    for (size_t i = 0; i < backends.size(); ++i) {
      const absl::Status status = Add(backends[i]);
      if (!status.ok()) return Stop(OfShard(static_cast<int>(i), status));  // others may hang
    }
    LOGITD_RETURN_IF_ERROR(TrySignals());
    return exchange_ == ShardExchange::kNccl ? JoinNccl() : absl::OkStatus();
  }

  absl::Status Upload(const Slab& slab, size_t offset, size_t bytes) override {
    LOGITD_RETURN_IF_ERROR(hung_);
    return OfShard(0, lead().Upload(slab, offset, bytes));
  }
  absl::Status Download(const Slab& slab, size_t offset, size_t bytes) override {
    LOGITD_RETURN_IF_ERROR(hung_);
    return OfShard(0, lead().Download(slab, offset, bytes));
  }
  absl::Status Fill(const Slab& slab, size_t offset, size_t bytes, std::byte* to) override {
    LOGITD_RETURN_IF_ERROR(hung_);
    return OfShard(0, lead().Fill(slab, offset, bytes, to));
  }
  absl::Status Gather(absl::Span<const RowsCopy> copies) override {
    LOGITD_RETURN_IF_ERROR(hung_);
    return OfShard(0, lead().Gather(copies));
  }
  absl::Status Deliver(std::byte* to, const std::byte* from, size_t bytes) override {
    LOGITD_RETURN_IF_ERROR(hung_);
    return OfShard(0, lead().Deliver(to, from, bytes));
  }

  absl::Status LinearTopK(const LinearTopKArgs& args) override {
    const bool few = AreLogitsFew(args.hidden, args.head);
    return Run({Kind::kTopK, args.hidden, args.head, args.topk.max_k, few ? 1u : 0u}, [&] {
      return few ? OnLogits(args.hidden, args.head, args.topk, &Stream::SoftmaxTopK)
                 : OnTokens<LinearTopKPartialArgs, LinearTopKMergeArgs>(
                       args.hidden, args.head, args.topk.max_k, args.topk,
                       &Stream::LinearTopKPartial, &Stream::LinearTopKMerge);
    });
  }
  absl::Status LinearSample(const LinearSampleArgs& args) override {
    return LinearSampleOfKept(args, 0);
  }
  absl::Status LinearSampleOfKept(const LinearSampleArgs& args, int32_t max_kept) override {
    // Where the vocabulary has no more tokens than that, top_k may be off.
    const bool kept =
        max_kept > 0 && max_kept < args.head.vocab() && !AreLogitsFew(args.hidden, args.head);
    const uint32_t options = (args.sample.edited ? 1u : 0u) + (kept ? 2u : 0u);
    return Run({Kind::kSample, args.hidden, args.head, kept ? max_kept : 0, options}, [&] {
      if (kept) {
        return OnTokens<KeptSamplePartialArgs, KeptSampleMergeArgs>(
            args.hidden, args.head, max_kept, args.sample, &DeviceStream::KeptSamplePartial,
            &DeviceStream::KeptSampleMerge);
      }
      return exchange_ == ShardExchange::kPeers
                 ? OnLogits(args.hidden, args.head, args.sample, &Stream::Sample)
                 : RunLinearSample(args);
    });
  }
  absl::Status LinearCrossEntropy(const LinearCrossEntropyArgs& args) override {
    const CrossEntropyArgs& loss = args.cross_entropy;
    const uint32_t options =
        static_cast<uint32_t>(loss.want) * 2 + (loss.max_extra_ids > 0 ? 1u : 0u);
    return Run({Kind::kLosses, args.hidden, args.head, loss.max_top_logprobs, options},
               [&] { return RunLinearCrossEntropy(args); });
  }
  absl::Status ShardedBackward(const ShardedBackwardArgs& args) override {
    LOGITD_RETURN_IF_ERROR(hung_);
    LOGITD_RETURN_IF_ERROR(CheckShardGradients(args.gradient, args.shards, count()));
    return Backward(args.gradient, args.shards);
  }
  absl::Status ShardedTraining(const ShardedTrainingArgs& args) override {
    LOGITD_RETURN_IF_ERROR(hung_);
    LOGITD_RETURN_IF_ERROR(CheckShardGradients(args.training.gradient, args.shards, count()));
    if (TrainingFits(args)) {
      return Run(GradientCall(Kind::kTraining, args.training.gradient, args.shards),
                 [&] { return RunTraining(args); });
    }
    LOGITD_RETURN_IF_ERROR(LinearCrossEntropy(args.training.Forward()));
    return Backward(args.training.Backward(), args.shards);
  }

  absl::StatusOr<StreamTimes> Wait() override {
    LOGITD_RETURN_IF_ERROR(hung_);
    absl::StatusOr<StreamTimes> waited = WaitForAll();
    const absl::Status given_up = std::exchange(given_up_, absl::OkStatus());
    LOGITD_RETURN_IF_ERROR(hung_);
    LOGITD_RETURN_IF_ERROR(given_up);
    return waited;
  }

 private:
  struct Device {
    std::unique_ptr<DeviceStream> stream;
    // What Inputs are packed in. By kPeers the first device has none.
    std::byte* inputs = nullptr;  // [kHiddenBytes + kRowBytes], by kNccl kExtraBytes more
    // Of all shards. By kPeers all devices have those of the first.
    std::byte* blocks = nullptr;   // [kBlockBytes]
    std::byte* targets = nullptr;  // [kTargetBytes]
    // For gradients, from the first call on that makes some: see GradientPlaces.
    Backend* backend = nullptr;
    DeviceMemory gradients;
    cudaStream_t mover = nullptr;  // moves d_hidden
    cudaEvent_t hidden_done = nullptr;
    cudaEvent_t moved = nullptr;
  };
  using Gathered = std::byte* Device::*;
  enum class Kind { kTopK, kSample, kLosses, kBackward, kTraining };
  // What chooses the kernels of a call, sizes as powers of two.
  struct Call {
    Kind kind;
    DType dtype;
    int64_t vocab;
    int64_t hidden;
    int rows_bits;
    int k_bits;
    bool bias;
    bool norm;
    bool softcap;
    uint32_t options;  // of the kind

    Call(Kind of, const TensorView& states, const HeadView& head, int32_t max_k, uint32_t of_kind)
        : kind(of),
          dtype(head.weight.dtype),
          vocab(head.vocab()),
          hidden(head.hidden()),
          rows_bits(std::bit_width(static_cast<uint64_t>(states.rows))),
          k_bits(std::bit_width(static_cast<uint32_t>(max_k))),
          bias(head.shards->bias != nullptr),
          norm(head.shards->norm != nullptr),
          softcap(head.softcap > 0),
          options(of_kind) {}
    auto operator<=>(const Call&) const = default;
  };
  // The options are the types of the gradients, and whether d_bias is wanted.
  Call GradientCall(Kind kind, const LinearCrossEntropyBackwardArgs& args,
                    const ShardGradient* shards) const {
    uint32_t options = args.d_hidden.dtype == DType::kF32 ? 1 : 0;
    for (int i = 0; i < count(); ++i) {
      if (shards[i].d_weight.rows == 0) continue;
      options |= shards[i].d_weight.dtype == DType::kF32 ? 2 : 4;
      if (shards[i].d_bias != nullptr) options |= 8;
    }
    return {kind, args.hidden, args.head, 0, options};
  }

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
    device.backend = backend;
    const int number = device.stream->device();
    LOGITD_RETURN_IF_ERROR(ToStatus(cudaSetDevice(number), "select device"));
    if (devices_.size() == 1) device.stream->LimitWait(hang_after_);
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
    const size_t extra_bytes = exchange_ == ShardExchange::kNccl ? kExtraBytes : 0;
    return ToStatus(cudaMalloc(&device.inputs, kHiddenBytes + kRowBytes + extra_bytes),
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
    if (nccl_ != nullptr) return absl::OkStatus();
    std::vector<int> numbers;
    for (int i = 0; i < count(); ++i) numbers.push_back(stream(i).device());
    absl::StatusOr<std::unique_ptr<NcclGather>> nccl = NcclGather::Create(numbers, kJoinFor);
    if (!nccl.ok()) return nccl.status();
    nccl_ = *std::move(nccl);
    LOGITD_RETURN_IF_ERROR(GatherBlocks(&Device::blocks, kBorder));
    const absl::Status joined = Settle("NCCL: the devices are not joined");
    if (!joined.ok()) LeaveNccl();
    return joined;
  }

  // Tries what everything else relies on: that streams raise signals, and wait for those of others.
  absl::Status TrySignals() {
    const auto refused = [](absl::string_view why) {
      return absl::UnavailableError(
          absl::StrCat("a stream cannot wait for one of another device: ", why));
    };
    if (const absl::Status status = EnqueueSignals(); !status.ok()) {
      const absl::Status stopped = Stop(status);
      return absl::IsUnavailable(stopped) ? refused(stopped.message()) : stopped;
    }
    LOGITD_RETURN_IF_ERROR(Settle("a stream cannot wait for one of another device: none came"));
    for (int i = 0; i < count(); ++i) {
      if (!signals_->Raised(i)) return refused("the host does not see its signal");
    }
    return lead().Wait().status();
  }
  absl::Status EnqueueSignals() {
    LOGITD_RETURN_IF_ERROR(lead().BeginOps());
    LOGITD_RETURN_IF_ERROR(Raise(kReady, lead()));
    for (int i = 1; i < count(); ++i) {
      LOGITD_RETURN_IF_ERROR(stream(i).BeginOps());
      LOGITD_RETURN_IF_ERROR(Await(kReady, stream(i)));
      LOGITD_RETURN_IF_ERROR(Raise(i, stream(i)));
    }
    LOGITD_RETURN_IF_ERROR(lead().BeginOps());
    for (int i = 1; i < count(); ++i) LOGITD_RETURN_IF_ERROR(Await(i, lead()));
    return absl::OkStatus();
  }

  // Waits until all devices have ended what they have. Where one does not in time, the waits of all
  // are ended. UNAVAILABLE without a shard: that helped, `why` is what failed. Else the error of a
  // device; INTERNAL, and hung_, where one hangs.
  absl::Status Settle(absl::string_view why) {
    absl::Status settled = WaitUntil([this] { return Busy().empty(); });
    settled.Update(FirstError());
    if (settled.ok()) return settled;
    absl::Status stopped = Stop(settled);
    return FailedShard(stopped).has_value() ? stopped : absl::UnavailableError(why);
  }

  void LeaveNccl() {
    if (nccl_ != nullptr) nccl_->Abort();
    nccl_.reset();
  }
  // Leaves NCCL after an error, which ends the exchanges of earlier calls as well.
  absl::Status KeepNccl(absl::Status status) {
    if (status.ok()) return status;
    LeaveNccl();
    given_up_.Update(status);
    return status;
  }

  // `row_bytes`: of what is exchanged for a row, by all devices; `packed_extras`: extra ids of a row
  // that Pack takes.
  int64_t RowsAtOnce(size_t row_bytes, const TensorView& hidden, int32_t packed_extras = 0) const {
    const size_t hidden_bytes = static_cast<size_t>(hidden.row_stride) * SizeOf(hidden.dtype);
    const size_t target_bytes = sizeof(float) * devices_.size();
    const auto most = static_cast<int64_t>(std::min(
        {kBlockBytes / row_bytes, kHiddenBytes / hidden_bytes, kTargetBytes / target_bytes,
         kRowBytes / std::max(sizeof(CrossEntropyRow), sizeof(SampleRow)),
         kExtraBytes / (sizeof(int32_t) * static_cast<size_t>(std::max(1, packed_extras)))}));
    return most >= kRowStep ? most / kRowStep * kRowStep : std::max<int64_t>(1, most);
  }

  template <class Shape>
  std::byte* BlockAt(const Shape& shape, int shard) {
    return devices_[static_cast<size_t>(shard)].blocks + static_cast<size_t>(shard) * shape.bytes();
  }

  // Ops whose block has the first `max_k` tokens of a row. `args` are those of all rows, without
  // logits.
  template <class PartialArgs, class MergeArgs, class Args, class Partial, class Merge>
  absl::Status OnTokens(const TensorView& hidden, const HeadView& head, int32_t max_k,
                        const Args& args, Partial partial, Merge merge) {
    TopKPartialShape shape = {.shards = ShardsOf(head), .rows = 1, .max_k = max_k};
    const int64_t step = RowsAtOnce(shape.bytes() * devices_.size(), hidden);
    for (int64_t first = 0; first < hidden.rows && !IsAbandoned(); first += step) {
      shape.rows = std::min(step, hidden.rows - first);
      const Args part = RowsFrom(args, first);
      const Inputs<std::remove_cvref_t<decltype(*part.rows)>> inputs = {
          .hidden = RowsOf(hidden, first, shape.rows), .rows = part.rows};
      LOGITD_RETURN_IF_ERROR(Pack(inputs));
      LOGITD_RETURN_IF_ERROR(OnAll([&](int shard) -> absl::Status {
        auto at = inputs;
        LOGITD_RETURN_IF_ERROR(Bring(shard, at));
        return (stream(shard).*partial)(PartialArgs{.hidden = at.hidden,
                                                    .head = head.shards[shard],
                                                    .shard = shard,
                                                    .shape = shape,
                                                    .rows = at.rows,
                                                    .block = BlockAt(shape, shard)});
      }));
      LOGITD_RETURN_IF_ERROR(Exchange(&Device::blocks, shape.bytes()));
      LOGITD_RETURN_IF_ERROR(OfShard(0, (lead().*merge)(MergeArgs{shape, blocks(), part})));
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
    const int32_t packed_extras = exchange_ == ShardExchange::kNccl ? shape.max_extra : 0;
    const int64_t step = RowsAtOnce(shape.bytes() * devices_.size(), args.hidden, packed_extras);
    for (int64_t first = 0; first < args.hidden.rows && !IsAbandoned(); first += step) {
      shape.rows = std::min(step, args.hidden.rows - first);
      LOGITD_RETURN_IF_ERROR(LossOfRows(RowsOf(args, first, shape.rows), shape));
    }
    return absl::OkStatus();
  }

  // Enqueues part(shard) on all devices, after what the first one has so far.
  absl::Status OnAll(absl::FunctionRef<absl::Status(int)> part) {
    LOGITD_RETURN_IF_ERROR(hung_);
    if (exchange_ == ShardExchange::kNccl) LOGITD_RETURN_IF_ERROR(JoinNccl());  // after a Stop
    LOGITD_RETURN_IF_ERROR(OfShard(0, lead().BeginOps()));
    LOGITD_RETURN_IF_ERROR(OfShard(0, Raise(kReady, lead())));
    if (waits_on_host_) LOGITD_RETURN_IF_ERROR(StopUnless(WaitFor(kReady, kReady + 1)));
    for (int i = 1; i < count(); ++i) {
      LOGITD_RETURN_IF_ERROR(OfShard(i, stream(i).BeginOps()));
      LOGITD_RETURN_IF_ERROR(OfShard(i, Await(kReady, stream(i))));
      const absl::Status status = part(i);
      // Also where a part of it was enqueued before an error: Wait waits for that.
      LOGITD_RETURN_IF_ERROR(OfShard(i, Raise(i, stream(i))));
      LOGITD_RETURN_IF_ERROR(OfShard(i, status));
    }
    LOGITD_RETURN_IF_ERROR(OfShard(0, lead().BeginOps()));
    return OfShard(0, part(0));
  }
  // Runs a call: enqueue(). One of a new kind may have to load kernels, which may wait for all that a
  // device has: it waits on the host, which knows how to give up.
  absl::Status Run(const Call& call, absl::FunctionRef<absl::Status()> enqueue) {
    waits_on_host_ = !seen_.contains(call);
    absl::Status status = enqueue();
    if (waits_on_host_ && status.ok() && !IsAbandoned()) seen_.insert(call);
    return status;
  }
  absl::Status StopUnless(const absl::Status& waited) {
    return waited.ok() ? waited : Stop(waited);
  }

  absl::Status Raise(int signal, DeviceStream& stream) {
    return ToStatus(signals_->Raise(signal, stream.native()), "raise a signal");
  }
  absl::Status Await(int signal, DeviceStream& stream) {
    return ToStatus(signals_->Await(signal, stream.native()), "wait for a device");
  }

  // What the first device does next has the blocks, or targets, of all devices, each of `bytes`.
  absl::Status Exchange(Gathered gathered, size_t bytes) {
    if (waits_on_host_) LOGITD_RETURN_IF_ERROR(StopUnless(WaitFor(1, count())));
    if (exchange_ == ShardExchange::kNccl) return GatherBlocks(gathered, bytes);
    for (int i = 1; i < count(); ++i) LOGITD_RETURN_IF_ERROR(OfShard(0, Await(i, lead())));
    return absl::OkStatus();
  }
  absl::Status GatherBlocks(Gathered gathered, size_t bytes) {
    for (size_t i = 0; i < devices_.size(); ++i)
      places_[i] = {devices_[i].*gathered, devices_[i].stream->native()};
    return KeepNccl(nccl_->Enqueue(places_, bytes));
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

  // Whether by kPeers logits are exchanged in place of blocks.
  bool AreLogitsFew(const TensorView& hidden, const HeadView& head) const {
    return exchange_ == ShardExchange::kPeers &&
           static_cast<size_t>(hidden.rows) * LogitsBytes(head) <= kFewLogitsBytes;
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

  // ---- gradients

  // By kPeers the parts of d_hidden are on the first device, those of all shards or of the others; by
  // kNccl a device has its own, where it needs one.
  GradientPlaces PlacesOf(int shard, const LinearCrossEntropyBackwardArgs& args, bool own_parts) {
    const bool peers = exchange_ == ShardExchange::kPeers;
    const int own = own_parts ? 1 : 0;
    const int parts = !peers ? own : shard == 0 ? count() - 1 + own : 0;
    return GradientPlaces(args, /*has_inputs=*/shard > 0, parts);
  }
  float* PartsOf(int shard, const GradientPlaces& at) {
    return reinterpret_cast<float*>(devices_[static_cast<size_t>(shard)].gradients.data + at.parts);
  }

  // Gives all devices memory for the call, and what moves d_hidden.
  absl::Status ReserveGradients(const LinearCrossEntropyBackwardArgs& args, bool own_parts) {
    for (int i = 0; i < count(); ++i) {
      const size_t bytes = PlacesOf(i, args, own_parts).bytes;
      Device& device = devices_[static_cast<size_t>(i)];
      if (bytes > device.gradients.bytes) {
        if (device.gradients.data != nullptr) {
          LOGITD_RETURN_IF_ERROR(Settle("earlier work has not ended"));  // it may use what is freed
          device.backend->FreeDevice(std::exchange(device.gradients, {}));
        }
        absl::StatusOr<DeviceMemory> memory = device.backend->AllocateDevice(bytes);
        if (!memory.ok()) return OfShard(i, memory.status());
        device.gradients = *memory;
      }
      if (device.moved != nullptr) continue;
      LOGITD_RETURN_IF_ERROR(ToStatus(cudaSetDevice(stream(i).device()), "select device"));
      int least = 0;
      int most = 0;
      cudaError_t error = cudaDeviceGetStreamPriorityRange(&least, &most);
      if (error == cudaSuccess && device.mover == nullptr)
        error = cudaStreamCreateWithPriority(&device.mover, cudaStreamNonBlocking, most);
      if (error == cudaSuccess && device.hidden_done == nullptr)
        error = cudaEventCreateWithFlags(&device.hidden_done, cudaEventDisableTiming);
      if (error == cudaSuccess)
        error = cudaEventCreateWithFlags(&device.moved, cudaEventDisableTiming);
      LOGITD_RETURN_IF_ERROR(OfShard(i, ToStatus(error, "create what moves gradients")));
    }
    return absl::OkStatus();
  }

  // What the shard's device computes of a call: its part of the head, and inputs where BringGradients
  // puts them.
  LinearCrossEntropyBackwardArgs GradientOf(int shard, const GradientPlaces& at,
                                            const LinearCrossEntropyBackwardArgs& args,
                                            const ShardGradient* shards) {
    LinearCrossEntropyBackwardArgs of = args;
    of.head = args.head.shards[shard];
    of.d_weight = shards[shard].d_weight;
    of.d_bias = shards[shard].d_bias;
    if (shard == 0) return of;
    const std::byte* const inputs = devices_[static_cast<size_t>(shard)].gradients.data;
    of.hidden.data = inputs;
    of.rows = reinterpret_cast<const CrossEntropyRow*>(inputs + at.rows);
    of.upstream = reinterpret_cast<const float*>(inputs + at.upstream);
    of.logsumexp = reinterpret_cast<const float*>(inputs + at.logsumexp);
    return of;
  }

  absl::Status BringGradients(int shard, const GradientPlaces& at,
                              const LinearCrossEntropyBackwardArgs& args, bool logsumexp) {
    if (shard == 0 || args.hidden.rows == 0) return absl::OkStatus();
    std::byte* const to = devices_[static_cast<size_t>(shard)].gradients.data;
    const Inputs<CrossEntropyRow> inputs = {.hidden = args.hidden, .rows = args.rows};
    const size_t floats = static_cast<size_t>(args.hidden.rows) * sizeof(float);
    const struct {
      std::byte* to;
      const void* from;
      size_t bytes;
    } copies[] = {{to, args.hidden.data, inputs.hidden_bytes()},
                  {to + at.rows, args.rows, inputs.row_bytes()},
                  {to + at.upstream, args.upstream, floats},
                  {to + at.logsumexp, args.logsumexp, logsumexp ? floats : 0}};
    for (const auto& copy : copies) {
      if (copy.bytes == 0) continue;
      LOGITD_RETURN_IF_ERROR(ToStatus(cudaMemcpyAsync(copy.to, copy.from, copy.bytes,
                                                      cudaMemcpyDefault, stream(shard).native()),
                                      "copy rows"));
    }
    return absl::OkStatus();
  }

  // On the first device, whose own part is at `first`; by kPeers the others are at `others`.
  absl::Status WriteHidden(const float* first, const float* others, int64_t stride,
                           const LinearCrossEntropyBackwardArgs& args) {
    LOGITD_RETURN_IF_ERROR(OfShard(0, lead().BeginOps()));
    const AddPartsArgs parts = {.first = first,
                                .others = others,
                                .shards = exchange_ == ShardExchange::kPeers ? count() : 1,
                                .stride = stride,
                                .rows = args.rows,
                                .d_hidden = args.d_hidden};
    return OfShard(0, ToStatus(AddParts(parts, lead().native()), "add gradients"));
  }

  absl::Status Backward(const LinearCrossEntropyBackwardArgs& args, const ShardGradient* shards) {
    return Run(GradientCall(Kind::kBackward, args, shards),
               [&] { return RunBackward(args, shards); });
  }
  absl::Status RunBackward(const LinearCrossEntropyBackwardArgs& args,
                           const ShardGradient* shards) {
    if (IsAbandoned()) return absl::OkStatus();
    LOGITD_RETURN_IF_ERROR(ReserveGradients(args, /*own_parts=*/true));
    const bool peers = exchange_ == ShardExchange::kPeers;
    const int64_t rows = args.hidden.rows;
    const int64_t stride = PlacesOf(0, args, true).stride;
    LOGITD_RETURN_IF_ERROR(OnAll([&](int shard) -> absl::Status {
      const GradientPlaces at = PlacesOf(shard, args, true);
      LOGITD_RETURN_IF_ERROR(BringGradients(shard, at, args, /*logsumexp=*/true));
      LinearCrossEntropyBackwardArgs of = GradientOf(shard, at, args, shards);
      float* const part =
          peers ? PartsOf(0, PlacesOf(0, args, true)) + shard * rows * stride : PartsOf(shard, at);
      of.d_hidden = {part, DType::kF32, rows, args.hidden.cols, stride};
      places_[static_cast<size_t>(shard)] = {reinterpret_cast<std::byte*>(part),
                                             stream(shard).native()};
      return stream(shard).LinearCrossEntropyBackwardPartial(
          {.shard = shard, .shards = ShardsOf(args.head), .gradient = of});
    }));
    LOGITD_RETURN_IF_ERROR(ExchangeSums(rows * stride));
    const float* const parts = PartsOf(0, PlacesOf(0, args, true));
    return WriteHidden(parts, parts + rows * stride, stride, args);
  }

  // The first device gets the parts at places_, each of `count` floats: by kPeers they are there.
  absl::Status ExchangeSums(int64_t count) {
    if (exchange_ == ShardExchange::kPeers) return Exchange(&Device::blocks, 0);
    if (count == 0) return absl::OkStatus();
    if (waits_on_host_) LOGITD_RETURN_IF_ERROR(StopUnless(WaitFor(1, this->count())));
    return KeepNccl(nccl_->EnqueueSum(places_, static_cast<size_t>(count)));
  }

  ShardTrainingArgs TrainingOf(int shard, const ShardedTrainingArgs& args) {
    const GradientPlaces at = PlacesOf(shard, args.training.gradient, false);
    ShardTrainingArgs of = {.training = args.training,
                            .shards = ShardsOf(args.training.gradient.head),
                            .shard = shard,
                            .blocks = devices_[static_cast<size_t>(shard)].blocks};
    of.training.gradient = GradientOf(shard, at, args.training.gradient, args.shards);
    if (shard == 0) return of;
    std::byte* const answers = devices_[static_cast<size_t>(shard)].gradients.data;
    of.training.answers = {.loss = reinterpret_cast<float*>(answers + at.loss),
                           .logsumexp = reinterpret_cast<float*>(answers + at.logsumexp),
                           .target_logprob = reinterpret_cast<float*>(answers + at.target_logprob),
                           .status = reinterpret_cast<RowStatus*>(answers + at.status)};
    return of;
  }

  // Whether all devices can make the logits once.
  bool TrainingFits(const ShardedTrainingArgs& args) {
    const LinearCrossEntropyBackwardArgs& gradient = args.training.gradient;
    const size_t block = ShardTrainingBytes(ShardsOf(gradient.head), gradient.hidden.rows);
    bool fits = block * devices_.size() <= kBlockBytes;
    for (int i = 0; i < count() && fits; ++i) fits = stream(i).TrainingFits(TrainingOf(i, args));
    return fits;
  }

  absl::Status RunTraining(const ShardedTrainingArgs& args) {
    const LinearCrossEntropyBackwardArgs& gradient = args.training.gradient;
    if (IsAbandoned()) return absl::OkStatus();
    LOGITD_RETURN_IF_ERROR(ReserveGradients(gradient, /*own_parts=*/false));
    LOGITD_RETURN_IF_ERROR(OnAll([&](int shard) -> absl::Status {
      const GradientPlaces at = PlacesOf(shard, gradient, false);
      LOGITD_RETURN_IF_ERROR(BringGradients(shard, at, gradient, /*logsumexp=*/false));
      return stream(shard).BeginTraining(TrainingOf(shard, args));
    }));
    const int64_t rows = gradient.hidden.rows;
    LOGITD_RETURN_IF_ERROR(
        Exchange(&Device::blocks, ShardTrainingBytes(ShardsOf(gradient.head), rows)));
    const GradientPlaces at = PlacesOf(0, gradient, false);
    LOGITD_RETURN_IF_ERROR(OnAll([&](int shard) -> absl::Status {
      absl::Status status = stream(shard).EndTraining(
          TrainingOf(shard, args),
          [&](const MutableTensorView& part) { return MoveHidden(shard, part, at); });
      // Also after an error: the part may be on its way already.
      if (shard > 0 && exchange_ == ShardExchange::kPeers) status.Update(JoinMover(shard));
      return status;
    }));
    const auto* const first = reinterpret_cast<const float*>(places_.front().blocks);
    LOGITD_RETURN_IF_ERROR(ExchangeSums(rows * at.stride));
    if (exchange_ == ShardExchange::kNccl) {
      for (int i = 0; i < count(); ++i) LOGITD_RETURN_IF_ERROR(OfShard(i, JoinMover(i)));
    }
    return WriteHidden(first, PartsOf(0, at), at.stride, gradient);
  }

  // Begins to move the shard's part of d_hidden, which the stream has made. By kNccl all parts begin
  // later, at the same time.
  cudaError_t MoveHidden(int shard, const MutableTensorView& part, const GradientPlaces& at) {
    const Device& device = devices_[static_cast<size_t>(shard)];
    const bool peers = exchange_ == ShardExchange::kPeers;
    places_[static_cast<size_t>(shard)] = {static_cast<std::byte*>(part.data), device.mover};
    if (peers && shard == 0) return cudaSuccess;
    cudaError_t error = cudaEventRecord(device.hidden_done, device.stream->native());
    if (error == cudaSuccess) error = cudaStreamWaitEvent(device.mover, device.hidden_done, 0);
    if (error != cudaSuccess || !peers) return error;
    float* const to = PartsOf(0, at) + (shard - 1) * part.rows * at.stride;
    return cudaMemcpyAsync(to, part.data, at.part_bytes(part.rows), cudaMemcpyDefault,
                           device.mover);
  }

  // What the shard's stream does next comes after what moves its part.
  absl::Status JoinMover(int shard) {
    const Device& device = devices_[static_cast<size_t>(shard)];
    cudaError_t error = cudaSetDevice(device.stream->device());
    if (error == cudaSuccess) error = cudaEventRecord(device.moved, device.mover);
    if (error == cudaSuccess) error = cudaStreamWaitEvent(device.stream->native(), device.moved, 0);
    return ToStatus(error, "move gradients");
  }

  // Waits until the signals [first, end) have risen. Errors: those of WaitUntil.
  absl::Status WaitFor(int first, int end) {
    return WaitUntil([&] {
      while (first < end && signals_->Raised(first)) ++first;
      return first == end;
    });
  }

  // Waits until `done`: polls at first, because the wake-up of a blocked thread takes as long as a
  // decode step. DEADLINE_EXCEEDED: no device has ended a part for hang_after_. Other errors are of a
  // device.
  absl::Status WaitUntil(absl::FunctionRef<bool()> done) {
    const absl::Time poll_until = absl::Now() + kPollFor;
    absl::Time look = absl::Now() + kLookForErrors;
    Patience patience(hang_after_);
    uint32_t risen = signals_->Risen();
    while (!done()) {
      const absl::Time now = absl::Now();
      if (now >= look) {  // a device that has failed raises no signal
        look = now + kLookForErrors;
        LOGITD_RETURN_IF_ERROR(FirstError());
      }
      const uint32_t risen_now = signals_->Risen();
      if (std::exchange(risen, risen_now) != risen_now) patience.Renew();
      if (now < poll_until) continue;
      if (!patience.Sleep()) return absl::DeadlineExceededError("a part has not ended");
    }
    return absl::OkStatus();
  }

  // OK where the device works, or has nothing to do.
  absl::Status ErrorOf(int shard) {
    const cudaError_t state = cudaStreamQuery(stream(shard).native());
    return OfShard(shard, ToStatus(state == cudaErrorNotReady ? cudaSuccess : state, "batch"));
  }

  absl::Status FirstError() {
    for (int i = 0; i < count(); ++i) LOGITD_RETURN_IF_ERROR(ErrorOf(i));
    return absl::OkStatus();
  }

  // Ends what the devices have, because one has failed, or none has moved for hang_after_
  // (DEADLINE_EXCEEDED). Returns the status of the batch, which the next Wait returns too. Afterwards
  // the devices have nothing to do, except those that hang; where one does, the stream is of no use
  // any more.
  absl::Status Stop(const absl::Status& failed) {
    absl::Status ended = EndAll(failed);
    given_up_.Update(ended);
    return ended;
  }
  absl::Status EndAll(const absl::Status& failed) {
    std::vector<bool> late;
    for (int i = 0; i < count(); ++i) late.push_back(i > 0 && !signals_->Raised(i));
    LeaveNccl();
    // After an error of one, the others may be in the middle of their parts.
    const bool none_moved = absl::IsDeadlineExceeded(failed);
    const absl::Duration limit = none_moved ? kDrainFor : std::max(kDrainFor, hang_after_);
    std::vector<int> hung = Drain(limit);
    if (hung.empty()) {
      if (count() > 0 && cudaStreamQuery(lead().native()) == cudaSuccess)
        (void)lead().Wait();  // ends its phases
      cudaGetLastError();
      if (!none_moved) return failed;
      LOGITD_RETURN_IF_ERROR(FirstError());
      return absl::UnavailableError(absl::StrFormat(
          "shards: no device has ended a part for %s, and all have ended when their exchange was "
          "given up",
          absl::FormatDuration(hang_after_)));
    }
    for (const int i : hung) SetHung(stream(i).device());
    // First one that has not ended its part, rather than one that still waits for it.
    std::stable_partition(hung.begin(), hung.end(),
                          [&](int i) { return late[static_cast<size_t>(i)]; });
    if (none_moved) {
      hung_.Update(OfShards(hung, absl::InternalError(absl::StrFormat(
                                      "CUDA: the device has ended no part of its work for %s",
                                      absl::FormatDuration(hang_after_)))));
      return hung_;
    }
    if (const std::optional<int> first = FailedShard(failed)) {
      std::erase(hung, *first);
      hung.insert(hung.begin(), *first);
    }
    const absl::Status lost =
        absl::IsInternal(failed)
            ? failed
            : absl::InternalError(
                  absl::StrFormat("CUDA: a device has not ended its work for %s after an error: %s",
                                  absl::FormatDuration(limit), failed.message()));
    hung_.Update(OfShards(hung, lost));
    return hung_;
  }

  // Ends all waits, and gives the devices some time to end what they have. Returns those that have
  // not.
  std::vector<int> Drain(absl::Duration limit) {
    Patience patience(limit);
    std::vector<int> left;
    do {
      signals_->RaiseAll();
      left = Busy();
    } while (!left.empty() && patience.Sleep());
    return left;
  }
  // The devices that have not ended what they have.
  std::vector<int> Busy() {
    std::vector<int> busy;
    for (int i = 0; i < count(); ++i) {
      const cudaStream_t mover = devices_[static_cast<size_t>(i)].mover;
      if (cudaStreamQuery(stream(i).native()) == cudaErrorNotReady ||
          (mover != nullptr && cudaStreamQuery(mover) == cudaErrorNotReady)) {
        busy.push_back(i);
      }
    }
    cudaGetLastError();
    return busy;
  }

  // The parts of other devices are waited for first: what the first device has enqueued may depend on
  // them.
  absl::StatusOr<StreamTimes> WaitForAll() {
    if (const absl::Status failed = WaitFor(1, count()); !failed.ok()) return Stop(failed);
    absl::StatusOr<StreamTimes> waited = lead().Wait();
    if (waited.ok()) return waited;
    const absl::Status& failed = waited.status();
    return Stop(absl::IsDeadlineExceeded(failed) ? failed : OfShard(0, failed));
  }

  static constexpr int kReady = 0;  // the first device's signal; those of others: their parts

  absl::Duration hang_after_;
  std::unique_ptr<Signals> signals_;  // of each device one
  ShardExchange exchange_ = ShardExchange::kPeers;
  std::vector<Device> devices_;
  std::unique_ptr<NcclGather> nccl_;  // null: kPeers
  std::vector<NcclGather::Place> places_;
  absl::Status hung_;  // not OK: a device hangs; the answer of all calls
  // Not OK: waits or exchanges of this batch were ended, so what its calls have merged is not whole.
  // The answer of the next Wait.
  absl::Status given_up_;
  // The calls that have been enqueued before: with another, the host waits in place of streams.
  std::set<Call> seen_;
  bool waits_on_host_ = false;
};

}  // namespace

absl::StatusOr<std::unique_ptr<ShardedStream>> CreateShardedStream(
    absl::Span<Backend* const> backends, const ShardOptions& options) {
  auto stream = std::make_unique<CudaShardedStream>();
  LOGITD_RETURN_IF_ERROR(stream->Init(backends, options));
  return stream;
}

}  // namespace logitd::cuda
