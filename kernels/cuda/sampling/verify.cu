// verify: sample for every row of the target, with a test of the row's draft (draft.cuh); then a
// block per sequence counts the drafts that are accepted.
#include "kernels/cuda/sampling/verify.h"

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
__global__ void CountAcceptedKernel(const __grid_constant__ SampleArgs args,
                                    const VerifySequence* sequences, const uint8_t* row_accepted,
                                    int32_t* accepted) {
  const VerifySequence& sequence = sequences[blockIdx.x];
  if (sequence.rows == 0) return;
  int count = 0;
  while (count + 1 < sequence.rows) {
    const int64_t r = sequence.first_row + count;
    if (args.status[r].code != RowCode::kOk || row_accepted[r] == 0) break;
    ++count;
  }
  __syncthreads();  // before the status of rows that are not reached is written
  if (threadIdx.x == 0) accepted[blockIdx.x] = count;
  for (int j = count + 1; j < sequence.rows; ++j) {
    const int64_t r = sequence.first_row + j;
    Refuse(args, r, args.rows[r], {RowCode::kNotReached, -1}, threadIdx.x, blockDim.x);
    if (threadIdx.x == 0) args.logsumexp[r] = __int_as_float(0x7fffffff);
  }
}

}  // namespace

VerifySteps::VerifySteps(const VerifyArgs& args, int64_t rows, Scratch& scratch,
                         cudaStream_t stream)
    : args_(args),
      stream_(stream),
      has_draft_(scratch.Take<uint8_t>(rows)),
      accepted_(scratch.Take<uint8_t>(rows)) {}

cudaError_t VerifySteps::Begin() const {
  if (accepted_ == nullptr) return cudaErrorMemoryAllocation;
  return LaunchKernel(&MarkDraftsKernel,
                      {.grid = GridFor(args_.sequence_count, kThreads), .threads = kThreads},
                      stream_, args_.sequences, args_.sequence_count, has_draft_);
}

cudaError_t VerifySteps::Rows(const TensorView& logits, int64_t first,
                              const Scratch& scratch) const {
  SampleParams p{.args = RowsFrom(args_.sample, first),
                 .drafts = args_.drafts + first,
                 .draft_ids = args_.draft_ids,
                 .draft_probs = args_.draft_probs,
                 .has_draft = has_draft_ + first,
                 .accepted = accepted_ + first};
  p.args.logits = logits;
  return SampleRows(p, scratch, stream_);
}

cudaError_t VerifySteps::End() const {
  return LaunchKernel(&CountAcceptedKernel,
                      {.grid = GridFor(args_.sequence_count), .threads = kThreads}, stream_,
                      args_.sample, args_.sequences, accepted_, args_.accepted);
}

cudaError_t Verify(const VerifyArgs& args, const Scratch& scratch, cudaStream_t stream) {
  const TensorView& logits = args.sample.logits;
  if (args.sequence_count == 0 || logits.rows == 0) return cudaSuccess;
  Scratch left = scratch;
  const VerifySteps steps(args, logits.rows, left, stream);
  cudaError_t error = steps.Begin();
  if (error == cudaSuccess) error = steps.Rows(logits, /*first=*/0, left);
  if (error == cudaSuccess) error = steps.End();
  return error;
}

}  // namespace logitd::cuda
