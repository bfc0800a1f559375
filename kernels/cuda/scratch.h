// The scratch memory of a stream, and what its launchers must know of the device.
#ifndef LOGITD_KERNELS_CUDA_SCRATCH_H_
#define LOGITD_KERNELS_CUDA_SCRATCH_H_

#include <algorithm>
#include <cstddef>

namespace logitd::cuda {

// Device memory of one stream, used by one op at a time. It is handed out from the end: an op takes
// pieces from a copy, and hands that copy on as the scratch of an op inside it.
//
// The first kCounterBytes are never handed out. They are zero between ops: a kernel that counts
// there leaves zeros when it ends.
struct Scratch {
  static constexpr size_t kCounterBytes = size_t{16} << 10;
  static constexpr size_t kMinBytes = size_t{96} << 20;  // one row of any op at its largest

  // A share of the device's memory. An op whose rows do not fit works on them in several passes.
  static constexpr size_t BytesFor(size_t device_bytes) {
    return std::clamp(device_bytes / 64, kMinBytes, size_t{1} << 30);
  }

  // Bytes that are not handed out yet.
  size_t left() const { return bytes - kCounterBytes; }

  // A piece of `count` elements, aligned to 256 bytes; null where there is no room for it.
  template <class U>
  U* Take(size_t count) {
    if (count * sizeof(U) > left()) return nullptr;
    const size_t begin = (bytes - count * sizeof(U)) / 256 * 256;
    if (begin < kCounterBytes) return nullptr;
    bytes = begin;
    return reinterpret_cast<U*>(data + begin);
  }

  std::byte* data = nullptr;
  size_t bytes = 0;  // counters and what is left
  // The device.
  int multiprocessors = 0;
  int block_shared_bytes = 0;  // the most dynamic shared memory a block may ask for
  bool clusters = false;       // blocks of a cluster can share memory: sm_90 and newer
};

}  // namespace logitd::cuda

#endif  // LOGITD_KERNELS_CUDA_SCRATCH_H_
