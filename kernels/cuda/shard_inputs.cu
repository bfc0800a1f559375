#include "kernels/cuda/shard_inputs.h"

#include <cuda_runtime.h>

#include <type_traits>

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

}  // namespace

template <class Row>
absl::Status Pack(const ShardInputs<Row>& inputs, ShardDevices& devices) {
  if (devices.by_peers() || devices.count() == 1) return absl::OkStatus();
  DeviceStream& lead = devices.lead();
  LOGITD_RETURN_IF_ERROR(OfShard(0, lead.BeginOps()));
  std::byte* const to = devices.at(0).inputs;
  std::byte* const rows = to + ToBorder(inputs.hidden_bytes());
  std::byte* const extras = rows + ToBorder(inputs.row_bytes());
  RowsCopy copies[2] = {OneRow(to, Bytes(inputs.hidden.data), inputs.hidden_bytes())};
  size_t copied = 1;
  cudaError_t error = cudaSuccess;
  if constexpr (std::is_same_v<Row, CrossEntropyRow>) {
    error = LaunchKernel(
        &PackExtrasKernel, {.grid = GridFor(inputs.hidden.rows), .threads = kPackThreads},
        lead.native(), inputs.rows, inputs.extra_ids, inputs.max_extra,
        reinterpret_cast<CrossEntropyRow*>(rows), reinterpret_cast<int32_t*>(extras));
  } else if (inputs.rows != nullptr) {
    copies[copied++] = OneRow(rows, Bytes(inputs.rows), inputs.row_bytes());
  }
  if (error == cudaSuccess) error = GatherRows({copies, copied}, lead.native());
  return OfShard(0, ToStatus(error, "pack rows"));
}

template <class Row>
absl::Status Bring(int shard, ShardDevices& devices, ShardInputs<Row>& inputs) {
  if (shard == 0) return absl::OkStatus();
  std::byte* const at = devices.at(shard).inputs;
  const cudaStream_t to = devices.stream(shard).native();
  const size_t bytes = inputs.hidden_bytes();
  const size_t rows_at = ToBorder(bytes);
  const size_t extras_at = rows_at + ToBorder(inputs.row_bytes());
  if (!devices.by_peers()) {
    LOGITD_RETURN_IF_ERROR(
        ToStatus(cudaMemcpyAsync(at, devices.at(0).inputs, extras_at + inputs.extra_bytes(),
                                 cudaMemcpyDefault, to),
                 "copy rows"));
    MoveTo(shard, devices, inputs);
    return absl::OkStatus();
  }
  RowsCopy copies[2];
  size_t count = 0;
  if (bytes <= kKernelCopyBytes) {
    copies[count++] = OneRow(at, Bytes(inputs.hidden.data), bytes);
  } else {
    LOGITD_RETURN_IF_ERROR(
        ToStatus(cudaMemcpyAsync(at, inputs.hidden.data, bytes, cudaMemcpyDefault, to),
                 "copy hidden states"));
  }
  if (inputs.rows != nullptr)
    copies[count++] = OneRow(at + rows_at, Bytes(inputs.rows), inputs.row_bytes());
  MoveTo(shard, devices, inputs);
  if (count == 0) return absl::OkStatus();
  return ToStatus(GatherRows({copies, count}, to), "copy rows");
}

template <class Row>
void MoveTo(int shard, ShardDevices& devices, ShardInputs<Row>& inputs) {
  if (shard == 0) return;
  std::byte* const at = devices.at(shard).inputs;
  const size_t rows_at = ToBorder(inputs.hidden_bytes());
  inputs.hidden.data = at;
  if (inputs.rows != nullptr) inputs.rows = reinterpret_cast<const Row*>(at + rows_at);
  if (inputs.extra_ids != nullptr && !devices.by_peers()) {
    inputs.extra_ids =
        reinterpret_cast<const int32_t*>(at + rows_at + ToBorder(inputs.row_bytes()));
  }
}

template absl::Status Pack(const ShardInputs<std::byte>&, ShardDevices&);
template absl::Status Pack(const ShardInputs<SoftmaxTopKRow>&, ShardDevices&);
template absl::Status Pack(const ShardInputs<SampleRow>&, ShardDevices&);
template absl::Status Pack(const ShardInputs<CrossEntropyRow>&, ShardDevices&);
template absl::Status Bring(int, ShardDevices&, ShardInputs<std::byte>&);
template absl::Status Bring(int, ShardDevices&, ShardInputs<SoftmaxTopKRow>&);
template absl::Status Bring(int, ShardDevices&, ShardInputs<SampleRow>&);
template absl::Status Bring(int, ShardDevices&, ShardInputs<CrossEntropyRow>&);
template void MoveTo(int, ShardDevices&, ShardInputs<CrossEntropyRow>&);

}  // namespace logitd::cuda
