// verify: sample for every row of the target, with a test of the row's draft (draft.cuh); then a
// block per sequence counts the drafts that are accepted.
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/ops.h"
#include "kernels/cuda/sampling/report.cuh"
#include "kernels/cuda/sampling/sample_row.cuh"

namespace logitd::cuda {
namespace {

constexpr int kThreads = 128;

__global__ void MarkDraftsKernel(const VerifySequence* sequences, int64_t count,
                                 uint8_t* has_draft) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= count) return;
  const VerifySequence& sequence = sequences[i];
  for (int j = 0; j < sequence.rows; ++j) has_draft[sequence.first_row + j] = j + 1 < sequence.rows;
}

// A block per sequence: how many drafts are accepted, and refusals for the rows after the first
// that is not.
__global__ void CountAcceptedKernel(const __grid_constant__ SampleParams p,
                                    const VerifySequence* sequences, int32_t* accepted) {
  const VerifySequence& sequence = sequences[blockIdx.x];
  if (sequence.rows == 0) return;
  int count = 0;
  while (count + 1 < sequence.rows) {
    const int64_t r = sequence.first_row + count;
    if (p.args.status[r].code != RowCode::kOk || p.accepted[r] == 0) break;
    ++count;
  }
  __syncthreads();  // before the status of rows that are not reached is written
  if (threadIdx.x == 0) accepted[blockIdx.x] = count;
  for (int j = count + 1; j < sequence.rows; ++j) {
    const int64_t r = sequence.first_row + j;
    Refuse(p.args, r, p.args.rows[r], {RowCode::kNotReached, -1}, threadIdx.x, blockDim.x);
    if (threadIdx.x == 0) p.args.logsumexp[r] = __int_as_float(0x7fffffff);
  }
}

}  // namespace

cudaError_t Verify(const VerifyArgs& args, const Scratch& scratch, cudaStream_t stream) {
  const int64_t rows = args.sample.logits.rows;
  if (args.sequence_count == 0 || rows == 0) return cudaSuccess;
  Scratch left = scratch;
  const SampleParams p{.args = args.sample,
                       .drafts = args.drafts,
                       .draft_ids = args.draft_ids,
                       .draft_probs = args.draft_probs,
                       .has_draft = left.Take<uint8_t>(rows),
                       .accepted = left.Take<uint8_t>(rows)};
  if (p.accepted == nullptr) return cudaErrorMemoryAllocation;
  cudaError_t error = LaunchKernel(
      &MarkDraftsKernel, {.grid = GridFor(args.sequence_count, kThreads), .threads = kThreads},
      stream, args.sequences, args.sequence_count, p.has_draft);
  if (error != cudaSuccess) return error;
  error = SampleRows(p, left, stream);
  if (error != cudaSuccess) return error;
  return LaunchKernel(&CountAcceptedKernel,
                      {.grid = GridFor(args.sequence_count), .threads = kThreads}, stream, p,
                      args.sequences, args.accepted);
}

}  // namespace logitd::cuda
