#include "kernels/cuda/shard_inputs.h"

#include <cuda_runtime.h>

#include "kernels/cross_entropy.h"
#include "kernels/cuda/gather.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/sample.h"
#include "kernels/sharded_stream.h"
#include "kernels/softmax_topk.h"
#include "kernels/status_macros.h"

namespace logitd::cuda {
namespace {

// Up to so many bytes a kernel brings hidden states sooner than a copy engine does.
constexpr size_t kKernelCopyBytes = size_t{1} << 20;

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

const std::byte* Bytes(const void* data) { return static_cast<const std::byte*>(data); }

// The places of inputs that lie one after the other.
struct Packed {
  explicit Packed(const ShardInputs& of)
      : hidden_bytes(HiddenBytes(of.hidden)),
        second_bytes(HiddenBytes(of.second_hidden)),
        row_bytes(static_cast<size_t>(of.hidden.rows) * of.row_size),
        second(ToBorder(hidden_bytes)),
        rows(second + ToBorder(second_bytes)),
        extras(rows + ToBorder(row_bytes)),
        end(extras + (of.extra_ids == nullptr
                          ? 0
                          : static_cast<size_t>(of.hidden.rows * of.max_extra) * 4)) {}

  size_t hidden_bytes;
  size_t second_bytes;
  size_t row_bytes;
  size_t second;
  size_t rows;
  size_t extras;
  size_t end;
};

}  // namespace

absl::Status Pack(const ShardInputs& inputs, ShardDevices& devices) {
  if (devices.by_peers() || devices.count() == 1) return absl::OkStatus();
  DeviceStream& lead = devices.lead();
  LOGITD_RETURN_IF_ERROR(OfShard(0, lead.BeginOps()));
  std::byte* const to = devices.at(0).inputs;
  const Packed packed(inputs);
  RowsCopy copies[3] = {OneRow(to, Bytes(inputs.hidden.data), packed.hidden_bytes)};
  size_t copied = 1;
  if (packed.second_bytes > 0) {
    copies[copied++] =
        OneRow(to + packed.second, Bytes(inputs.second_hidden.data), packed.second_bytes);
  }
  cudaError_t error = cudaSuccess;
  if (inputs.extra_ids != nullptr) {
    error = LaunchKernel(
        &PackExtrasKernel, {.grid = GridFor(inputs.hidden.rows), .threads = kPackThreads},
        lead.native(), static_cast<const CrossEntropyRow*>(inputs.rows), inputs.extra_ids,
        inputs.max_extra, reinterpret_cast<CrossEntropyRow*>(to + packed.rows),
        reinterpret_cast<int32_t*>(to + packed.extras));
  } else if (inputs.rows != nullptr) {
    copies[copied++] = OneRow(to + packed.rows, Bytes(inputs.rows), packed.row_bytes);
  }
  if (error == cudaSuccess) error = GatherRows({copies, copied}, lead.native());
  return OfShard(0, ToStatus(error, "pack rows"));
}

absl::Status Bring(int shard, ShardDevices& devices, ShardInputs& inputs) {
  if (shard == 0) return absl::OkStatus();
  std::byte* const at = devices.at(shard).inputs;
  const cudaStream_t to = devices.stream(shard).native();
  const Packed packed(inputs);
  if (!devices.by_peers()) {
    LOGITD_RETURN_IF_ERROR(ToStatus(
        cudaMemcpyAsync(at, devices.at(0).inputs, packed.end, cudaMemcpyDefault, to), "copy rows"));
    MoveTo(shard, devices, inputs);
    return absl::OkStatus();
  }
  RowsCopy copies[3];
  size_t count = 0;
  const auto bring = [&](std::byte* place, const void* hidden, size_t bytes) {
    if (bytes > kKernelCopyBytes) {
      return ToStatus(cudaMemcpyAsync(place, hidden, bytes, cudaMemcpyDefault, to),
                      "copy hidden states");
    }
    if (bytes > 0) copies[count++] = OneRow(place, Bytes(hidden), bytes);
    return absl::OkStatus();
  };
  LOGITD_RETURN_IF_ERROR(bring(at, inputs.hidden.data, packed.hidden_bytes));
  LOGITD_RETURN_IF_ERROR(bring(at + packed.second, inputs.second_hidden.data, packed.second_bytes));
  if (inputs.rows != nullptr)
    copies[count++] = OneRow(at + packed.rows, Bytes(inputs.rows), packed.row_bytes);
  MoveTo(shard, devices, inputs);
  if (count == 0) return absl::OkStatus();
  return ToStatus(GatherRows({copies, count}, to), "copy rows");
}

void MoveTo(int shard, ShardDevices& devices, ShardInputs& inputs) {
  if (shard == 0) return;
  std::byte* const at = devices.at(shard).inputs;
  const Packed packed(inputs);
  inputs.hidden.data = at;
  if (packed.second_bytes > 0) inputs.second_hidden.data = at + packed.second;
  if (inputs.rows != nullptr) inputs.rows = at + packed.rows;
  if (inputs.extra_ids != nullptr && !devices.by_peers())
    inputs.extra_ids = reinterpret_cast<const int32_t*>(at + packed.extras);
}

}  // namespace logitd::cuda
