#include "kernels/cuda/sharded_gradients.h"

#include <cuda_runtime.h>

#include <utility>

#include "kernels/cross_entropy.h"
#include "kernels/cuda/shard_inputs.h"
#include "kernels/shards.h"
#include "kernels/status_macros.h"

namespace logitd::cuda {

// The places in Device::gradients of what a device needs of a call. The first device has only parts
// of d_hidden there.
struct ShardedGradients::Places {
  size_t rows = 0;  // after the hidden states
  size_t upstream = 0;
  size_t logsumexp = 0;
  size_t loss = 0;
  size_t target_logprob = 0;
  size_t status = 0;
  size_t parts = 0;  // f32 [rows, stride] each
  size_t bytes = 0;
  int64_t stride;

  Places(const LinearCrossEntropyBackwardArgs& args, bool has_inputs, int part_count)
      : stride((args.hidden.cols + 63) / 64 * 64) {
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

ShardCall ShardedGradients::CallOf(ShardCall::Kind kind, const LinearCrossEntropyBackwardArgs& args,
                                   const ShardGradient* shards) const {
  uint32_t options = args.d_hidden.dtype == DType::kF32 ? 1 : 0;
  for (int i = 0; i < devices_.count(); ++i) {
    if (shards[i].d_weight.rows == 0) continue;
    options |= shards[i].d_weight.dtype == DType::kF32 ? 2 : 4;
    if (shards[i].d_bias != nullptr) options |= 8;
  }
  return {kind, args.hidden, args.head, 0, options};
}

// ---- memory

// By kPeers the parts of d_hidden are on the first device, those of all shards or of the others; by
// kNccl a device has its own, where it needs one.
ShardedGradients::Places ShardedGradients::PlacesOf(int shard,
                                                    const LinearCrossEntropyBackwardArgs& args,
                                                    bool own_parts) {
  const int own = own_parts ? 1 : 0;
  const int parts = !devices_.by_peers() ? own : shard == 0 ? devices_.count() - 1 + own : 0;
  return Places(args, /*has_inputs=*/shard > 0, parts);
}
float* ShardedGradients::PartsOf(int shard, const Places& at) {
  return reinterpret_cast<float*>(devices_.at(shard).gradients.data + at.parts);
}

// Gives all devices memory for the call, and what moves d_hidden.
absl::Status ShardedGradients::Reserve(const LinearCrossEntropyBackwardArgs& args, bool own_parts) {
  parts_.resize(static_cast<size_t>(devices_.count()));
  for (int i = 0; i < devices_.count(); ++i) {
    LOGITD_RETURN_IF_ERROR(ReserveMemory(i, PlacesOf(i, args, own_parts).bytes));
    LOGITD_RETURN_IF_ERROR(ReserveMover(i));
  }
  return absl::OkStatus();
}

absl::Status ShardedGradients::ReserveMemory(int shard, size_t bytes) {
  ShardDevices::Device& device = devices_.at(shard);
  if (bytes <= device.gradients.bytes) return absl::OkStatus();
  if (device.gradients.data != nullptr) {
    LOGITD_RETURN_IF_ERROR(
        devices_.Settle("earlier work has not ended"));  // it may use what is freed
    device.backend->FreeDevice(std::exchange(device.gradients, {}));
  }
  absl::StatusOr<DeviceMemory> memory = device.backend->AllocateDevice(bytes);
  if (!memory.ok()) return OfShard(shard, memory.status());
  device.gradients = *memory;
  return absl::OkStatus();
}

absl::Status ShardedGradients::ReserveMover(int shard) {
  ShardDevices::Device& device = devices_.at(shard);
  if (device.moved != nullptr) return absl::OkStatus();
  LOGITD_RETURN_IF_ERROR(ToStatus(cudaSetDevice(device.stream->device()), "select device"));
  int least = 0;
  int most = 0;
  cudaError_t error = cudaDeviceGetStreamPriorityRange(&least, &most);
  if (error == cudaSuccess && device.mover == nullptr)
    error = cudaStreamCreateWithPriority(&device.mover, cudaStreamNonBlocking, most);
  if (error == cudaSuccess && device.hidden_done == nullptr)
    error = cudaEventCreateWithFlags(&device.hidden_done, cudaEventDisableTiming);
  if (error == cudaSuccess) error = cudaEventCreateWithFlags(&device.moved, cudaEventDisableTiming);
  return OfShard(shard, ToStatus(error, "create what moves gradients"));
}

// ---- what a device gets of a call

// The shard's part of a call: its part of the head, and inputs where Bring puts them.
LinearCrossEntropyBackwardArgs ShardedGradients::GradientOf(
    int shard, const Places& at, const LinearCrossEntropyBackwardArgs& args,
    const ShardGradient* shards) {
  LinearCrossEntropyBackwardArgs of = args;
  of.head = args.head.shards[shard];
  of.d_weight = shards[shard].d_weight;
  of.d_bias = shards[shard].d_bias;
  if (shard == 0) return of;
  const std::byte* const inputs = devices_.at(shard).gradients.data;
  of.hidden.data = inputs;
  of.rows = reinterpret_cast<const CrossEntropyRow*>(inputs + at.rows);
  of.upstream = reinterpret_cast<const float*>(inputs + at.upstream);
  of.logsumexp = reinterpret_cast<const float*>(inputs + at.logsumexp);
  return of;
}

ShardTrainingArgs ShardedGradients::TrainingOf(int shard, const ShardedTrainingArgs& args) {
  const Places at = PlacesOf(shard, args.training.gradient, false);
  ShardTrainingArgs of = {.training = args.training,
                          .shards = devices_.ShardsOf(args.training.gradient.head),
                          .shard = shard,
                          .blocks = devices_.at(shard).blocks};
  of.training.gradient = GradientOf(shard, at, args.training.gradient, args.shards);
  if (shard == 0) return of;
  std::byte* const answers = devices_.at(shard).gradients.data;
  of.training.answers = {.loss = reinterpret_cast<float*>(answers + at.loss),
                         .logsumexp = reinterpret_cast<float*>(answers + at.logsumexp),
                         .target_logprob = reinterpret_cast<float*>(answers + at.target_logprob),
                         .status = reinterpret_cast<RowStatus*>(answers + at.status)};
  return of;
}

absl::Status ShardedGradients::Bring(int shard, const Places& at,
                                     const LinearCrossEntropyBackwardArgs& args, bool logsumexp) {
  if (shard == 0 || args.hidden.rows == 0) return absl::OkStatus();
  std::byte* const to = devices_.at(shard).gradients.data;
  const size_t floats = static_cast<size_t>(args.hidden.rows) * sizeof(float);
  const struct {
    std::byte* to;
    const void* from;
    size_t bytes;
  } copies[] = {
      {to, args.hidden.data, HiddenBytes(args.hidden)},
      {to + at.rows, args.rows, static_cast<size_t>(args.hidden.rows) * sizeof(CrossEntropyRow)},
      {to + at.upstream, args.upstream, floats},
      {to + at.logsumexp, args.logsumexp, logsumexp ? floats : 0}};
  for (const auto& copy : copies) {
    if (copy.bytes == 0) continue;
    LOGITD_RETURN_IF_ERROR(
        ToStatus(cudaMemcpyAsync(copy.to, copy.from, copy.bytes, cudaMemcpyDefault,
                                 devices_.stream(shard).native()),
                 "copy rows"));
  }
  return absl::OkStatus();
}

// ---- the backward

absl::Status ShardedGradients::Backward(const LinearCrossEntropyBackwardArgs& args,
                                        const ShardGradient* shards) {
  LOGITD_RETURN_IF_ERROR(Reserve(args, /*own_parts=*/true));
  const int64_t rows = args.hidden.rows;
  const int64_t stride = PlacesOf(0, args, true).stride;
  LOGITD_RETURN_IF_ERROR(devices_.OnAll([&](int shard) -> absl::Status {
    const Places at = PlacesOf(shard, args, true);
    LOGITD_RETURN_IF_ERROR(Bring(shard, at, args, /*logsumexp=*/true));
    LinearCrossEntropyBackwardArgs of = GradientOf(shard, at, args, shards);
    float* const part = devices_.by_peers()
                            ? PartsOf(0, PlacesOf(0, args, true)) + shard * rows * stride
                            : PartsOf(shard, at);
    of.d_hidden = {part, DType::kF32, rows, args.hidden.cols, stride};
    parts_[static_cast<size_t>(shard)] = {reinterpret_cast<std::byte*>(part),
                                          devices_.stream(shard).native()};
    const VocabShards cut = devices_.ShardsOf(args.head);
    return devices_.stream(shard).Run(LinearCrossEntropyBackwardPartialArgs{
        .shard = cut.at(shard), .vocab = cut.vocab, .gradient = of});
  }));
  LOGITD_RETURN_IF_ERROR(devices_.ExchangeSums(parts_, static_cast<size_t>(rows * stride)));
  const float* const parts = PartsOf(0, PlacesOf(0, args, true));
  return WriteHidden(parts, parts + rows * stride, stride, args);
}

// On the first device, whose own part is at `first`; by kPeers the others are at `others`.
absl::Status ShardedGradients::WriteHidden(const float* first, const float* others, int64_t stride,
                                           const LinearCrossEntropyBackwardArgs& args) {
  LOGITD_RETURN_IF_ERROR(OfShard(0, devices_.lead().BeginOps()));
  const AddPartsArgs parts = {.first = first,
                              .others = others,
                              .shards = devices_.by_peers() ? devices_.count() : 1,
                              .stride = stride,
                              .rows = args.rows,
                              .d_hidden = args.d_hidden};
  return OfShard(0, ToStatus(AddParts(parts, devices_.lead().native()), "add gradients"));
}

// ---- training

bool ShardedGradients::TrainingFits(const ShardedTrainingArgs& args) {
  const LinearCrossEntropyBackwardArgs& gradient = args.training.gradient;
  const size_t block = ShardTrainingBytes(devices_.ShardsOf(gradient.head), gradient.hidden.rows);
  bool fits = block * static_cast<size_t>(devices_.count()) <= ShardDevices::kBlockBytes;
  for (int i = 0; i < devices_.count() && fits; ++i)
    fits = devices_.stream(i).TrainingFits(TrainingOf(i, args));
  return fits;
}

absl::Status ShardedGradients::Training(const ShardedTrainingArgs& args) {
  const LinearCrossEntropyBackwardArgs& gradient = args.training.gradient;
  LOGITD_RETURN_IF_ERROR(Reserve(gradient, /*own_parts=*/false));
  LOGITD_RETURN_IF_ERROR(devices_.OnAll([&](int shard) -> absl::Status {
    const Places at = PlacesOf(shard, gradient, false);
    LOGITD_RETURN_IF_ERROR(Bring(shard, at, gradient, /*logsumexp=*/false));
    return devices_.stream(shard).BeginTraining(TrainingOf(shard, args));
  }));
  const int64_t rows = gradient.hidden.rows;
  LOGITD_RETURN_IF_ERROR(devices_.Exchange(
      &ShardDevices::Device::blocks, ShardTrainingBytes(devices_.ShardsOf(gradient.head), rows)));
  const Places at = PlacesOf(0, gradient, false);
  LOGITD_RETURN_IF_ERROR(devices_.OnAll([&](int shard) -> absl::Status {
    absl::Status status = devices_.stream(shard).EndTraining(
        TrainingOf(shard, args),
        [&](const MutableTensorView& part) { return MoveHidden(shard, part, at); });
    // Also after an error: the part may be on its way already.
    if (shard > 0 && devices_.by_peers()) status.Update(JoinMover(shard));
    return status;
  }));
  const auto* const first = reinterpret_cast<const float*>(parts_.front().blocks);
  LOGITD_RETURN_IF_ERROR(devices_.ExchangeSums(parts_, static_cast<size_t>(rows * at.stride)));
  if (!devices_.by_peers()) {
    for (int i = 0; i < devices_.count(); ++i) LOGITD_RETURN_IF_ERROR(OfShard(i, JoinMover(i)));
  }
  return WriteHidden(first, PartsOf(0, at), at.stride, gradient);
}

// Begins to move the shard's part of d_hidden, which the stream has made. By kNccl all parts begin
// later, at the same time.
cudaError_t ShardedGradients::MoveHidden(int shard, const MutableTensorView& part,
                                         const Places& at) {
  const ShardDevices::Device& device = devices_.at(shard);
  const bool peers = devices_.by_peers();
  parts_[static_cast<size_t>(shard)] = {static_cast<std::byte*>(part.data), device.mover};
  if (peers && shard == 0) return cudaSuccess;
  cudaError_t error = cudaEventRecord(device.hidden_done, device.stream->native());
  if (error == cudaSuccess) error = cudaStreamWaitEvent(device.mover, device.hidden_done, 0);
  if (error != cudaSuccess || !peers) return error;
  float* const to = PartsOf(0, at) + (shard - 1) * part.rows * at.stride;
  return cudaMemcpyAsync(to, part.data, at.part_bytes(part.rows), cudaMemcpyDefault, device.mover);
}

// What the shard's stream does next comes after what moves its part.
absl::Status ShardedGradients::JoinMover(int shard) {
  const ShardDevices::Device& device = devices_.at(shard);
  cudaError_t error = cudaSetDevice(device.stream->device());
  if (error == cudaSuccess) error = cudaEventRecord(device.moved, device.mover);
  if (error == cudaSuccess) error = cudaStreamWaitEvent(device.stream->native(), device.moved, 0);
  return ToStatus(error, "move gradients");
}

}  // namespace logitd::cuda
