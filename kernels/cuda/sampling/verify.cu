// verify: sample for every row of the target, with a test of the row's draft (draft.cuh); then a
// block per sequence counts the drafts that are accepted. Block verification is three of these
// passes: each row's s follows from the weights of the drafts before it, the choice from sums of
// all rows by their s, and the tokens from the choice. Between passes a thread per sequence goes
// over its rows.
//
// Cost: that of sample on all rows. Block verification does it three times for rows with a draft,
// in the last pass up to the bonus token; other rows are done in the last pass only. A draft with
// probabilities reads its row two or three times more, from a cache where it fits.
// 16 sequences of 5 drafts, nearly all refused, 96 x 131072 f32, top_k 50, floor one read, 11 us:
// greedy drafts 35 us (32%), lists of 64 tokens 103 (11%), by blocks 272; lists, unfiltered, 361.
// Through a head of 4096 x 128256 in bf16 389 us, 69% of its product, by blocks 556.
// Measured: bench/results/h200/sample_b5435172.json.
#include "kernels/cuda/sampling/verify.h"

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/ops.h"
#include "kernels/cuda/sampling/report.cuh"
#include "kernels/cuda/sampling/sample_row.cuh"
#include "kernels/shards.h"

namespace logitd::cuda {
namespace {

constexpr int kThreads = 128;

// blocks: null where no sequence has block verification.
__global__ void MarkDraftsKernel(const VerifySequence* sequences, int64_t count, uint8_t* has_draft,
                                 BlockRow* blocks) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= count) return;
  const VerifySequence& sequence = sequences[i];
  for (int j = 0; j < sequence.rows; ++j) {
    const int64_t r = sequence.first_row + j;
    has_draft[r] = j + 1 < sequence.rows;
    if (blocks != nullptr)
      blocks[r].place = sequence.block != 0 ? BlockPlace::kBefore : BlockPlace::kNone;
  }
}

// True: no draft of the sequence after row r can be verified.
__device__ bool EndsAt(const SampleArgs& args, const VerifySequence& sequence, int64_t r) {
  return r + 1 == sequence.first_row + sequence.rows || args.status[r].code != RowCode::kOk;
}

// Block verification after kWeigh, a thread per sequence: every row's s.
__global__ void ShareKernel(const __grid_constant__ SampleArgs args,
                            const VerifySequence* sequences, int64_t count, BlockRow* blocks) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= count || sequences[i].block == 0) return;
  const VerifySequence& sequence = sequences[i];
  double share = 1;
  for (int64_t r = sequence.first_row; r < sequence.first_row + sequence.rows; ++r) {
    blocks[r].share = share;
    share = EndsAt(args, sequence, r) ? 0 : ShareAfter(share, blocks[r].weight, blocks[r].mass);
  }
}

// Block verification after kSum, a thread per sequence: how many drafts are accepted, and where
// that leaves the rows.
__global__ void ChooseKernel(const __grid_constant__ SampleArgs args,
                             const VerifySequence* sequences, int64_t count, BlockRow* blocks,
                             int32_t* accepted) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= count || sequences[i].block == 0) return;
  const VerifySequence& sequence = sequences[i];
  int chosen = 0;
  for (int j = 0; j < sequence.rows; ++j) {
    const int64_t r = sequence.first_row + j;
    const BlockRow& block = blocks[r];
    const bool is_last = EndsAt(args, sequence, r);
    if (j > 0) {
      const SampleRow& before = args.rows[r - 1];
      const uint64_t coin = CoinBits(before.seed, before.position);
      if (is_last ? CoinChoosesLast(block.share, coin)
                  : CoinChooses(block.share, block.left, block.total, coin)) {
        chosen = j;
      }
    }
    if (is_last) break;
  }
  for (int j = 0; j < sequence.rows; ++j) {
    blocks[sequence.first_row + j].place = j < chosen    ? BlockPlace::kBefore
                                           : j == chosen ? BlockPlace::kBonus
                                                         : BlockPlace::kAfter;
  }
  accepted[i] = chosen;
}

// A block per sequence: how many drafts are accepted, unless ChooseKernel has decided; and refusals
// for the rows after the bonus token.
__global__ void CountAcceptedKernel(const __grid_constant__ SampleArgs args,
                                    const VerifySequence* sequences, const uint8_t* row_accepted,
                                    int32_t* accepted) {
  const VerifySequence& sequence = sequences[blockIdx.x];
  if (sequence.rows == 0) return;
  int count = 0;
  if (sequence.block != 0) {
    count = accepted[blockIdx.x];
  } else {
    while (count + 1 < sequence.rows) {
      const int64_t r = sequence.first_row + count;
      if (args.status[r].code != RowCode::kOk || row_accepted[r] == 0) break;
      ++count;
    }
    __syncthreads();  // before the status of rows that are not reached is written
    if (threadIdx.x == 0) accepted[blockIdx.x] = count;
  }
  for (int j = count + 1; j < sequence.rows; ++j) {
    const int64_t r = sequence.first_row + j;
    Refuse(args, r, args.rows[r], {RowCode::kNotReached, -1}, threadIdx.x, blockDim.x);
    if (threadIdx.x == 0) args.logsumexp[r] = __int_as_float(0x7fffffff);
  }
}

}  // namespace

// A merge on a sharded head has this memory for the pieces below.
static_assert(VerifyStateBytes(1) - VerifyStateBytes(0) >= 2 + sizeof(BlockRow));

VerifySteps::VerifySteps(const VerifyArgs& args, int64_t rows, Scratch& scratch,
                         cudaStream_t stream)
    : args_(args),
      stream_(stream),
      has_draft_(scratch.Take<uint8_t>(rows)),
      accepted_(scratch.Take<uint8_t>(rows)) {
  if (args.blocks) blocks_ = scratch.Take<BlockRow>(rows);
}

cudaError_t VerifySteps::Begin() const {
  if (accepted_ == nullptr || (args_.blocks && blocks_ == nullptr)) {
    return cudaErrorMemoryAllocation;
  }
  return LaunchKernel(&MarkDraftsKernel,
                      {.grid = GridFor(args_.sequence_count, kThreads), .threads = kThreads},
                      stream_, args_.sequences, args_.sequence_count, has_draft_, blocks_);
}

cudaError_t VerifySteps::Rows(int pass, const TensorView& logits, int64_t first,
                              const Scratch& scratch) const {
  SampleParams p{.args = RowsFrom(args_.sample, first),
                 .drafts = args_.drafts + first,
                 .draft_ids = args_.draft_ids,
                 .draft_probs = args_.draft_probs,
                 .has_draft = has_draft_ + first,
                 .accepted = accepted_ + first};
  p.args.logits = logits;
  if (args_.blocks) {
    p.block_rows = blocks_ + first;
    p.block_step = pass == 0 ? BlockStep::kWeigh : pass == 1 ? BlockStep::kSum : BlockStep::kEmit;
  }
  return SampleRows(p, scratch, stream_);
}

cudaError_t VerifySteps::End(int pass) const {
  const LaunchShape by_thread = {.grid = GridFor(args_.sequence_count, kThreads),
                                 .threads = kThreads};
  if (pass + 1 == passes()) {
    return LaunchKernel(&CountAcceptedKernel,
                        {.grid = GridFor(args_.sequence_count), .threads = kThreads}, stream_,
                        args_.sample, args_.sequences, accepted_, args_.accepted);
  }
  if (pass == 0) {
    return LaunchKernel(&ShareKernel, by_thread, stream_, args_.sample, args_.sequences,
                        args_.sequence_count, blocks_);
  }
  return LaunchKernel(&ChooseKernel, by_thread, stream_, args_.sample, args_.sequences,
                      args_.sequence_count, blocks_, args_.accepted);
}

cudaError_t Verify(const VerifyArgs& args, const Scratch& scratch, cudaStream_t stream) {
  const TensorView& logits = args.sample.logits;
  if (args.sequence_count == 0 || logits.rows == 0) return cudaSuccess;
  Scratch left = scratch;
  const VerifySteps steps(args, logits.rows, left, stream);
  cudaError_t error = steps.Begin();
  for (int pass = 0; pass < steps.passes() && error == cudaSuccess; ++pass) {
    error = steps.Rows(pass, logits, /*first=*/0, left);
    if (error == cudaSuccess) error = steps.End(pass);
  }
  return error;
}

}  // namespace logitd::cuda
