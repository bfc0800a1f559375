// gather: rows of many places, one table, one launch for every kMaxCopies of them. A warp copies a
// piece of a row with all its loads in flight.
//
// Cost: reads and writes each byte once. Each byte is read once into a register, so a client that
// writes the rows meanwhile changes only what is copied, and no kernel sees two values of one byte.
// The marks are one store by one thread at the begin. At the end of an upload, each block raises a
// time in device memory and waits for nothing. Only the end of the turn waits until the host can
// see what was written, once. On an H100 (bench/results/h100/latency.json) a graph of a gather of
// one row of 512 KiB, an op of 3 us and a download takes 11.1 us until the host sees its end, and
// took 17.2 where blocks waited for the host and counted each other at both ends.
#include "kernels/cuda/gather.h"

#include <algorithm>
#include <array>
#include <cstdint>

#include "kernels/cuda/launch.cuh"

namespace logitd::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
// A piece: of a launch that copies much, all that a warp's lanes hold at once; else less, so that
// more warps share it. A small download stays one block, which needs nobody else to end a turn.
constexpr int64_t kPieceBytes = 2048;
constexpr int64_t kSmallPieceBytes = 512;
constexpr int64_t kSmallBytes = int64_t{1} << 20;
// Copies of one launch, which has 4 KiB for its arguments. Few are usual, and small arguments make
// a launch cheaper.
constexpr size_t kMaxCopies = 56;
constexpr size_t kCopiesOfShortLaunch = 2;
// Blocks of a launch: enough to fill the largest device, each with several pieces in turn.
constexpr int64_t kMostBlocks = 2048;

struct Copy {
  const std::byte* from;
  std::byte* to;
  int64_t from_stride;
  int64_t to_stride;
  int64_t row_bytes;
  int64_t rows;
  int64_t pieces;  // of a row
  int32_t word;    // bytes of an access: the alignment of both sides
  int32_t piece_bytes;
};

template <size_t n>
struct Table {
  std::array<Copy, n> copies;
  Marks marks;
};
static_assert(sizeof(Table<kMaxCopies>) <= 4096);

// Copies `bytes` bytes, at most a piece, which are a multiple of 2.
template <class Word>
__device__ void CopyPiece(const std::byte* from, std::byte* to, int bytes, int lane) {
  constexpr int kStep = 32 * sizeof(Word);
  constexpr int kLoads = kPieceBytes / kStep;
  const int words = bytes / int{sizeof(Word)};
  Word word[kLoads];
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    const int at = i * 32 + lane;
    if (at < words) word[i] = reinterpret_cast<const Word*>(from)[at];
  }
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    const int at = i * 32 + lane;
    if (at < words) reinterpret_cast<Word*>(to)[at] = word[i];
  }
  const int at = words * int{sizeof(Word)} + lane * 2;  // the last bytes, less than a word
  if (at < bytes) {
    *reinterpret_cast<uint16_t*>(to + at) = *reinterpret_cast<const uint16_t*>(from + at);
  }
}

// For a launch that begins while the one before it ends: what that one wrote can be seen after it.
// Elsewhere it costs nothing.
__device__ void AwaitLaunchBefore() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ uint64_t NowNs() {
  uint64_t ns;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns)::"memory");
  return ns;
}

template <class T>
__device__ void Tell(T& host, T value) {
  *static_cast<volatile T*>(&host) = value;
}

// One thread of a launch calls it first.
__device__ void MarkBegin(const Marks& marks) {
  if (marks.upload_begins) Tell(marks.host->uploading_ns, NowNs());
  if (marks.download_begins) Tell(marks.host->downloading_ns, NowNs());
}

// What the end of a turn reads. Asked for at the begin of a launch, long before it is needed.
struct Turn {
  uint64_t computing_ns = 0;
  uint32_t done = 0;
  __device__ explicit Turn(const Marks& marks) {
    if (!marks.download_ends || threadIdx.x != 0) return;
    computing_ns = marks.device->computing_ns;
    done = marks.device->done + 1;
  }
};

// One thread calls it when all else that the turn wrote happened before.
__device__ void EndTurn(const Marks& marks, const Turn& turn) {
  Tell(marks.host->computing_ns, turn.computing_ns);
  Tell(marks.host->done_ns, NowNs());
  marks.device->done = turn.done;
  __threadfence_system();
  Tell(marks.host->done, turn.done);
}

// The time of a launch's last block stays.
__device__ void RaiseComputing(const Marks& marks) {
  atomicMax(reinterpret_cast<unsigned long long*>(&marks.device->computing_ns),
            static_cast<unsigned long long>(NowNs()));
}

// Whether the block is the last of the launch to get here, where it sees what the others wrote. One
// thread of each block calls it.
__device__ bool LastBlock(const Marks& marks) {
  const uint32_t count = gridDim.x * gridDim.y;
  if (count == 1) return true;
  __threadfence_system();  // of what the whole block wrote
  if (atomicAdd(&marks.device->blocks, 1) != count - 1) return false;
  marks.device->blocks = 0;
  return true;
}

__global__ void MarkKernel(Marks marks) {
  MarkBegin(marks);
  if (marks.upload_ends) RaiseComputing(marks);
  if (marks.download_ends) EndTurn(marks, Turn(marks));
}

template <size_t n>
__global__ void __launch_bounds__(kThreads) GatherKernel(const __grid_constant__ Table<n> table) {
  AwaitLaunchBefore();
  const Marks& marks = table.marks;
  if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) MarkBegin(marks);
  const Turn turn(marks);
  const Copy& copy = table.copies[blockIdx.y];
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int64_t pieces = copy.rows * copy.pieces;
  for (int64_t p = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32; p < pieces;
       p += int64_t{gridDim.x} * kWarps) {
    const int64_t row = p / copy.pieces;
    const int64_t in_row = (p - row * copy.pieces) * copy.piece_bytes;
    const int64_t left = copy.row_bytes - in_row;
    const int bytes = static_cast<int>(left < copy.piece_bytes ? left : copy.piece_bytes);
    const std::byte* from = copy.from + row * copy.from_stride + in_row;
    std::byte* to = copy.to + row * copy.to_stride + in_row;
    switch (copy.word) {
      case 16:
        CopyPiece<uint4>(from, to, bytes, lane);
        break;
      case 8:
        CopyPiece<uint2>(from, to, bytes, lane);
        break;
      case 4:
        CopyPiece<uint32_t>(from, to, bytes, lane);
        break;
      default:
        CopyPiece<uint16_t>(from, to, bytes, lane);
        break;
    }
  }
  if (!marks.upload_ends && !marks.download_ends) return;
  __syncthreads();
  if (threadIdx.x != 0) return;
  if (marks.upload_ends) RaiseComputing(marks);
  if (marks.download_ends && LastBlock(marks)) EndTurn(marks, turn);
}

Copy CopyOf(const RowsCopy& rows) {
  Copy copy = {.from = rows.from,
               .to = rows.to,
               .from_stride = static_cast<int64_t>(rows.from_stride),
               .to_stride = static_cast<int64_t>(rows.to_stride),
               .row_bytes = static_cast<int64_t>(rows.row_bytes),
               .rows = rows.rows,
               .pieces = 0,
               .word = 16,
               .piece_bytes = kPieceBytes};
  if (copy.from_stride == copy.row_bytes && copy.to_stride == copy.row_bytes) {
    copy.row_bytes *= copy.rows;  // one long row
    copy.rows = 1;
  }
  uint64_t together = reinterpret_cast<uintptr_t>(copy.from) | reinterpret_cast<uintptr_t>(copy.to);
  if (copy.rows > 1) together |= static_cast<uint64_t>(copy.from_stride | copy.to_stride);
  while (copy.word > 2 && together % static_cast<uint64_t>(copy.word) != 0) copy.word /= 2;
  return copy;
}

// Enqueues at most n copies.
template <size_t n>
cudaError_t Launch(absl::Span<const RowsCopy> copies, cudaStream_t stream, const Marks& marks) {
  Table<n> table = {};
  table.marks = marks;
  int64_t bytes = 0;
  for (size_t i = 0; i < copies.size(); ++i) {
    table.copies[i] = CopyOf(copies[i]);
    bytes += table.copies[i].rows * table.copies[i].row_bytes;
  }
  int64_t most = 1;  // pieces of one copy
  for (size_t i = 0; i < copies.size(); ++i) {
    Copy& copy = table.copies[i];
    if (bytes <= kSmallBytes && !marks.download_ends) copy.piece_bytes = kSmallPieceBytes;
    copy.pieces = CeilDiv(copy.row_bytes, copy.piece_bytes);
    most = std::max(most, copy.rows * copy.pieces);
  }
  const auto count = static_cast<int64_t>(copies.size());
  const int64_t blocks = std::min(CeilDiv(most, kWarps), CeilDiv(kMostBlocks, count));
  const LaunchShape shape = {
      .grid = dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(count)),
      .threads = kThreads};
  return LaunchKernel(GatherKernel<n>, shape, stream, table);
}

}  // namespace

cudaError_t GatherRows(absl::Span<const RowsCopy> copies, cudaStream_t stream, const Marks& marks) {
  bool first = true;
  while (!copies.empty()) {
    const absl::Span<const RowsCopy> now = copies.first(std::min(copies.size(), kMaxCopies));
    copies.remove_prefix(now.size());
    Marks of_launch = marks;
    of_launch.upload_begins = marks.upload_begins && first;
    of_launch.download_begins = marks.download_begins && first;
    of_launch.upload_ends = marks.upload_ends && copies.empty();
    of_launch.download_ends = marks.download_ends && copies.empty();
    first = false;
    const cudaError_t error = now.size() <= kCopiesOfShortLaunch
                                  ? Launch<kCopiesOfShortLaunch>(now, stream, of_launch)
                                  : Launch<kMaxCopies>(now, stream, of_launch);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

cudaError_t Mark(const Marks& marks, cudaStream_t stream) {
  return LaunchKernel(MarkKernel, {.grid = dim3(1), .threads = 1}, stream, marks);
}

}  // namespace logitd::cuda
