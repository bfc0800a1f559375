// gather: rows of many places, one table, one launch for every kMaxCopies of them. A warp copies a piece of
// a row with all its loads in flight.
//
// Cost: reads and writes each byte once. Each byte is read once into a register, so a client that
// writes the rows meanwhile changes only what is copied, and no kernel sees two values of one byte.
// The marks are one store by one thread at the begin, and a count of blocks at the end.
#include "kernels/cuda/gather.h"

#include <algorithm>
#include <array>
#include <cstdint>

#include "kernels/cuda/launch.cuh"

namespace logitd::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int64_t kPieceBytes = 2048;
// Copies of one launch, which has 4 KiB for its arguments. Few are usual, and small arguments make a
// launch cheaper.
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
  int32_t unused;
};

template <size_t n>
struct Table {
  std::array<Copy, n> copies;
  Marks marks;
  uint32_t* blocks;  // counts the blocks that have ended; the last one clears it
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

__device__ uint64_t NowNs() {
  uint64_t ns;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns)::"memory");
  return ns;
}

// One thread calls it when all else that it marks can be seen by the host.
__device__ void WriteEnd(const Marks& marks) {
  if (marks.ended_ns != nullptr) *static_cast<volatile uint64_t*>(marks.ended_ns) = NowNs();
  if (marks.done == nullptr) return;
  const uint32_t value = ++*marks.count;
  __threadfence_system();
  *static_cast<volatile uint32_t*>(marks.done) = value;
}

// Every thread of every block calls it after its last write.
__device__ void EndBlock(const Marks& marks, uint32_t* blocks) {
  if (marks.ended_ns == nullptr && marks.done == nullptr) return;
  __syncthreads();
  if (threadIdx.x != 0) return;
  __threadfence_system();  // of what the whole block wrote
  const uint32_t count = gridDim.x * gridDim.y;
  if (count > 1) {
    if (atomicAdd(blocks, 1) != count - 1) return;
    *blocks = 0;
    __threadfence_system();
  }
  WriteEnd(marks);
}

__global__ void MarkKernel(Marks marks) {
  if (marks.begun_ns != nullptr) *static_cast<volatile uint64_t*>(marks.begun_ns) = NowNs();
  __threadfence_system();
  WriteEnd(marks);
}

template <size_t n>
__global__ void __launch_bounds__(kThreads) GatherKernel(const __grid_constant__ Table<n> table) {
  if (table.marks.begun_ns != nullptr && blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) {
    *static_cast<volatile uint64_t*>(table.marks.begun_ns) = NowNs();
  }
  const Copy& copy = table.copies[blockIdx.y];
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int64_t pieces = copy.rows * copy.pieces;
  for (int64_t p = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32; p < pieces;
       p += int64_t{gridDim.x} * kWarps) {
    const int64_t row = p / copy.pieces;
    const int64_t in_row = (p - row * copy.pieces) * kPieceBytes;
    const int64_t left = copy.row_bytes - in_row;
    const int bytes = static_cast<int>(left < kPieceBytes ? left : kPieceBytes);
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
  EndBlock(table.marks, table.blocks);
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
               .unused = 0};
  if (copy.from_stride == copy.row_bytes && copy.to_stride == copy.row_bytes) {
    copy.row_bytes *= copy.rows;  // one long row
    copy.rows = 1;
  }
  uint64_t together = reinterpret_cast<uintptr_t>(copy.from) | reinterpret_cast<uintptr_t>(copy.to);
  if (copy.rows > 1) together |= static_cast<uint64_t>(copy.from_stride | copy.to_stride);
  while (copy.word > 2 && together % static_cast<uint64_t>(copy.word) != 0) copy.word /= 2;
  copy.pieces = CeilDiv(copy.row_bytes, kPieceBytes);
  return copy;
}

// Enqueues at most n copies.
template <size_t n>
cudaError_t Launch(absl::Span<const RowsCopy> copies, cudaStream_t stream, const Marks& marks,
                   uint32_t* blocks_ended) {
  Table<n> table = {};
  table.marks = marks;
  table.blocks = blocks_ended;
  int64_t most = 1;  // pieces of one copy
  for (size_t i = 0; i < copies.size(); ++i) {
    table.copies[i] = CopyOf(copies[i]);
    most = std::max(most, table.copies[i].rows * table.copies[i].pieces);
  }
  const auto count = static_cast<int64_t>(copies.size());
  const int64_t blocks = std::min(CeilDiv(most, kWarps), CeilDiv(kMostBlocks, count));
  const LaunchShape shape = {
      .grid = dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(count)),
      .threads = kThreads};
  return LaunchKernel(GatherKernel<n>, shape, stream, table);
}

}  // namespace

cudaError_t GatherRows(absl::Span<const RowsCopy> copies, cudaStream_t stream, const Marks& marks,
                       uint32_t* blocks) {
  bool first = true;
  while (!copies.empty()) {
    const absl::Span<const RowsCopy> now = copies.first(std::min(copies.size(), kMaxCopies));
    copies.remove_prefix(now.size());
    Marks of_launch;
    if (copies.empty()) of_launch = marks;
    of_launch.begun_ns = first ? marks.begun_ns : nullptr;
    first = false;
    const cudaError_t error = now.size() <= kCopiesOfShortLaunch
                                  ? Launch<kCopiesOfShortLaunch>(now, stream, of_launch, blocks)
                                  : Launch<kMaxCopies>(now, stream, of_launch, blocks);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

cudaError_t Mark(const Marks& marks, cudaStream_t stream) {
  return LaunchKernel(MarkKernel, {.grid = dim3(1), .threads = 1}, stream, marks);
}

}  // namespace logitd::cuda
