// A warp's ring of cells that are being copied from device to shared memory.
#ifndef LOGITD_KERNELS_CUDA_ROWS_RING_CUH_
#define LOGITD_KERNELS_CUDA_ROWS_RING_CUH_

#include <cstdint>
#include <utility>

#include "kernels/cuda/rows/cell.cuh"

namespace logitd::cuda {

// Copies 16 bytes into shared memory asynchronously. Only the first `valid` are read, the rest
// become zero.
__device__ inline void CopyAsync16(uint32_t shared, const void* global, int valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global),
               "r"(valid)
               : "memory");
}
__device__ inline void CopyAsync16(void* shared, const void* global, int valid) {
  CopyAsync16(static_cast<uint32_t>(__cvta_generic_to_shared(shared)), global, valid);
}
__device__ inline void CommitAsync() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kPending>
__device__ inline void WaitAsync() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Loads vectors that begin in word kWord of a block of 16 bytes: out of that block and the next
// one. 16 bits by whole blocks: narrower loads, 16 bytes apart over the lanes, take as long each.
// f32 by its words, as whole blocks need registers that rows of two cells do not have.
template <class T, int kVectors, int kWord>
__device__ inline void ReadMisaligned(const uint4* blocks, int misaligned, LaneCell<T>& x) {
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if constexpr (sizeof(T) == 4) {
      const uint32_t* from = reinterpret_cast<const uint32_t*>(blocks + 32 * v) + kWord;
      constexpr int kPair = kWord % 2;  // the first word that two can be loaded from
      const uint2 pair = *reinterpret_cast<const uint2*>(from + kPair);
      if constexpr (kPair == 0) {
        const uint2 rest = *reinterpret_cast<const uint2*>(from + 2);
        x.SetVector(v, {pair.x, pair.y, rest.x, rest.y});
      } else {
        x.SetVector(v, {from[0], pair.x, pair.y, from[3]});
      }
    } else {
      const uint4 low = blocks[32 * v], high = blocks[32 * v + 1];
      const uint32_t words[] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        x.words[4 * v + i] = __funnelshift_r(words[kWord + i], words[kWord + i + 1],
                                             static_cast<uint32_t>(misaligned % 4 * 8));
      }
    }
  }
}

// Loads a lane's part of the cell at `cell` in shared memory, `misaligned` bytes after a block's
// begin; of its vectors the first kVectors. Reads all blocks of 16 bytes in which there is any of
// it.
template <class T, int kVectors = kCell / kVector<T> / 32>
__device__ inline void ReadCellAt(const char* cell, int misaligned, int lane, LaneCell<T>& x) {
  const uint4* blocks = reinterpret_cast<const uint4*>(cell - misaligned) + lane;
  if (misaligned == 0) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) x.SetVector(v, blocks[32 * v]);
    return;
  }
  switch (misaligned / 4) {
    case 0:
      return ReadMisaligned<T, kVectors, 0>(blocks, misaligned, x);
    case 1:
      return ReadMisaligned<T, kVectors, 1>(blocks, misaligned, x);
    case 2:
      return ReadMisaligned<T, kVectors, 2>(blocks, misaligned, x);
    default:
      return ReadMisaligned<T, kVectors, 3>(blocks, misaligned, x);
  }
}

// Cells of any alignment: whole lines of 128 bytes keep their place in the line, and the shift to
// the element's border happens on the way into registers. Every call is made by the whole warp, and
// there is one Pop for each Push.
template <class T, int kStages>
class CellRing {
 public:
  static constexpr int kBlocks = kCell / kVector<T>;  // of 16 bytes
  static constexpr int kLineBlocks = 8;               // of a line
  struct alignas(128) Storage {
    uint4 slots[kStages][kBlocks + kLineBlocks];  // a misaligned cell touches one line more
  };

  __device__ CellRing(Storage& storage, int lane) : slots_(storage.slots), lane_(lane) {}

  // Starts the copy of elements [0, count) from `first`, 1 <= count; of a cell at most. Reads no
  // block of 16 bytes in which there is none of them, and no byte beyond a row's last.
  __device__ void Push(const T* first, int count) {
    const int offset = InLine(first);
    CopyCell(BlockInShared(push_), reinterpret_cast<const char*>(first) - offset + 16 * lane_,
             offset, count);
    PushNothing();
  }

  // Takes a turn without copying.
  __device__ void PushNothing() {
    CommitAsync();
    push_ = push_ + 1 == kStages ? 0 : push_ + 1;
  }

  // Waits for the oldest of kStages cells and loads it. Places from `count` on are -inf.
  __device__ void Pop(const T* first, int count, LaneCell<T>& x) {
    WaitAsync<kStages - 1>();
    char* cell = reinterpret_cast<char*>(slots_[pop_]) + InLine(first);
    if (count < kCell) {
      __syncwarp();
#pragma unroll 1
      for (int i = count + lane_; i < kCell; i += 32)
        reinterpret_cast<T*>(cell)[i] = static_cast<T>(-kInfinity);
    }
    __syncwarp();
    ReadCell(cell, InLine(first) % 16, x);
    FreeSlot();
  }

  // As Pop, for rows of few cells: in shared memory only the quarter that the row ends in is filled
  // with -inf.
  __device__ void PopQuarters(const T* first, int count, LaneCell<T>& x) {
    WaitAsync<kStages - 1>();
    char* cell = reinterpret_cast<char*>(slots_[pop_]) + InLine(first);
    if (count < kCell) {
      __syncwarp();
      const int end = (count + kQuarter - 1) / kQuarter * kQuarter;
#pragma unroll 1
      for (int i = count + lane_; i < end; i += 32)
        reinterpret_cast<T*>(cell)[i] = static_cast<T>(-kInfinity);
    }
    __syncwarp();
    ReadQuarters(cell, InLine(first) % 16, count, x);
    FreeSlot();
  }

  // As Pop, for a cell of which only the first quarter, or less, is in the row: loads the lane's
  // elements of that quarter, and leaves the others as they are in x.
  void __device__ PopQuarter(const T* first, int count, LaneCell<T>& x) {
    WaitAsync<kStages - 1>();
    __syncwarp();
    ReadQuarter(reinterpret_cast<const char*>(slots_[pop_]) + InLine(first), InLine(first) % 16,
                count, x);
    FreeSlot();
  }

  // As Pop, with one way to read misaligned words, which leaves aligned ones in the registers they
  // came to: fewer instructions and registers, more shared memory cycles where misaligned.
  __device__ void PopShort(const T* first, int count, LaneCell<T>& x) {
    if constexpr (sizeof(T) != 4) {
      Pop(first, count, x);
    } else {
      WaitAsync<kStages - 1>();
      char* cell = reinterpret_cast<char*>(slots_[pop_]) + InLine(first);
      __syncwarp();
      uint32_t* words = reinterpret_cast<uint32_t*>(cell);
#pragma unroll 1
      for (int i = count + lane_; i < kCell; i += 32) words[i] = __float_as_uint(-kInfinity);
      __syncwarp();
      LoadCell(reinterpret_cast<const float*>(words), lane_, x);
      FreeSlot();
    }
  }

  // Instead of a Push for each Pop: starts the copies of all cells of a row of `count` elements, up
  // to kStages cells; then each is popped, with a PushNothing after it. Until the next PushRow all
  // of them stay in shared memory. Every earlier Push has been popped.
  __device__ void PushRow(const T* first, int count) {
    push_ = pop_ = 0;
    const int offset = InLine(first);
    const char* from = reinterpret_cast<const char*>(first) - offset + 16 * lane_;
    uint32_t to = BlockInShared(0);
    int turns = kStages;
#pragma unroll 1
    for (; count > 0; count -= kCell) {
      CopyCell(to, from, offset, count);
      CommitAsync();
      --turns;
      from += kCell * sizeof(T);
      to += kCellBytes;
    }
#pragma unroll 1
    for (; turns > 0; --turns) CommitAsync();
  }
  // Then the place in shared memory of the row's first element, and the bytes from a cell to the
  // next.
  __device__ T* Row(const T* first) {
    return reinterpret_cast<T*>(reinterpret_cast<char*>(slots_[0]) + InLine(first));
  }
  static constexpr int kCellBytes = 16 * (kBlocks + kLineBlocks);
  // The cell that the last Pop loaded from `first`, in shared memory: of any alignment, and the
  // warp's until the next Push.
  __device__ T* Cell(const T* first) {
    char* slot = reinterpret_cast<char*>(slots_[pop_ == 0 ? kStages - 1 : pop_ - 1]);
    return reinterpret_cast<T*>(slot + InLine(first));
  }

 private:
  // The shared memory address of the lane's first block of a slot.
  __device__ uint32_t BlockInShared(int slot) const {
    return static_cast<uint32_t>(__cvta_generic_to_shared(slots_[slot])) + 16 * lane_;
  }
  // Copies the first `count` elements of a cell that begins `offset` bytes after the line of lane
  // 0's first block. The addresses are of the lane's first block.
  __device__ void CopyCell(uint32_t to, const char* from, int offset, int count) const {
    constexpr int kWhole = kBlocks / 32;
    if (count >= kCell + kVector<T>) {  // the last block is in the row
      if (16 * lane_ + 15 >= offset) CopyBlock<0>(to, from);
      CopyBlocks(std::make_integer_sequence<int, kWhole - 1>(), to, from, kBlocks);
      if (16 * lane_ < offset) CopyBlock<kWhole>(to, from);
      return;
    }
    const unsigned bytes = offset + min(count, kCell) * static_cast<unsigned>(sizeof(T));
    const int whole = static_cast<int>(bytes / 16) - lane_;  // blocks from the lane's first
    if (whole > 0 && 16 * lane_ + 15 >= offset) CopyBlock<0>(to, from);
    CopyBlocks(std::make_integer_sequence<int, kWhole>(), to, from, whole);
    const int tail = static_cast<int>(bytes % 16);
    if (tail != 0 && lane_ == 0) CopyAsync16(to + bytes - tail, from + (bytes - tail), tail);
  }
  // Copies the lane's block v. The address in shared memory is computed once for all v.
  template <int v>
  __device__ static void CopyBlock(uint32_t to, const char* from) {
    asm volatile("cp.async.cg.shared.global [%0 + %2], [%1 + %2], 16;" ::"r"(to), "l"(from),
                 "n"(512 * v)
                 : "memory");
  }
  template <int... v>
  __device__ static void CopyBlocks(std::integer_sequence<int, v...>, uint32_t to, const char* from,
                                    int whole) {
    ((whole > 32 * (v + 1) ? CopyBlock<v + 1>(to, from) : void()), ...);
  }

  // Loads the lane's part of the cell at `cell` in shared memory, `misaligned` bytes after a
  // block's begin; of its vectors the first kVectors.
  template <int kVectors = kBlocks / 32>
  __device__ void ReadCell(const char* cell, int misaligned, LaneCell<T>& x) const {
    ReadCellAt<T, kVectors>(cell, misaligned, lane_, x);
  }

  // The same of the first quarter; its elements from `count` on are -inf.
  __device__ void ReadQuarter(const char* cell, int misaligned, int count, LaneCell<T>& x) const {
    constexpr int kVectors = kQuarter / (32 * kVector<T>);
    ReadCell<kVectors>(cell, misaligned, x);
    if constexpr (sizeof(T) == 4) {
#pragma unroll
      for (int e = 0; e < kSumElements; ++e)
        x.words[e] = CellIndex<T>(lane_, e) < count ? x.words[e] : kMinusInfinities<T>;
    } else {
      static_assert(kVectors == 1);
      const int bits = 16 * (count - CellIndex<T>(lane_, 0));  // of the lane's that are in the row
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const uint32_t in_row = __funnelshift_lc(~0u, 0u, max(0, bits - 32 * w));
        x.words[w] = (x.words[w] & in_row) | (kMinusInfinities<T> & ~in_row);
      }
    }
  }

  // The same; quarters after the cell's first `count` elements are -inf, whatever is in memory.
  __device__ void ReadQuarters(const char* cell, int misaligned, int count, LaneCell<T>& x) const {
    ReadCell(cell, misaligned, x);
    if (count > (kSums - 1) * kQuarter) return;
    constexpr int kWords = kSumElements / LaneCell<T>::kPerWord;  // of a quarter
#pragma unroll
    for (int q = 1; q < kSums; ++q) {
      if (count > q * kQuarter) continue;
#pragma unroll
      for (int w = q * kWords; w < (q + 1) * kWords; ++w) x.words[w] = kMinusInfinities<T>;
    }
  }

  // Ends a Pop: the slot may be copied into again.
  __device__ void FreeSlot() {
    pop_ = pop_ + 1 == kStages ? 0 : pop_ + 1;
    __syncwarp();
  }

  // Place of an address in its line of 128 bytes.
  __device__ static int InLine(const T* p) {
    return static_cast<int>(reinterpret_cast<uintptr_t>(p) & 127);
  }

  uint4 (&slots_)[kStages][kBlocks + kLineBlocks];
  const int lane_;
  int push_ = 0;
  int pop_ = 0;
};

}  // namespace logitd::cuda

#endif  // LOGITD_KERNELS_CUDA_ROWS_RING_CUH_
