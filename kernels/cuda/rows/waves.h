// Waves of blocks: how many blocks run at once on a multiprocessor.
#ifndef LOGITD_KERNELS_CUDA_ROWS_WAVES_H_
#define LOGITD_KERNELS_CUDA_ROWS_WAVES_H_

#include <algorithm>
#include <cstdint>

#include "kernels/cuda/scratch.h"

namespace logitd::cuda {

// The dynamic shared memory to ask for, per block, for a launch of `blocks` blocks that need
// `shared_bytes` each, and of which `resident` may run at once on a multiprocessor. More than they
// need where fewer at once make the last of a few waves clearly fuller: a few blocks do not keep the
// memory busy.
inline int SharedBytesForWaves(int64_t blocks, int resident, int shared_bytes,
                               const Scratch& scratch) {
  constexpr int kReserved = 1024;  // of each block, by the device
  constexpr int64_t kFewWaves = 3;
  const int all = scratch.block_shared_bytes + kReserved;
  const int most = std::min(resident, all / (shared_bytes + kReserved));
  const auto fill = [&](int at_once) {  // of the waves' places, the share that is taken
    const int64_t wave = int64_t{at_once} * scratch.multiprocessors;
    return static_cast<double>(blocks) / static_cast<double>((blocks + wave - 1) / wave * wave);
  };
  const int64_t wave = int64_t{most} * scratch.multiprocessors;
  if (blocks <= wave || blocks > kFewWaves * wave) return shared_bytes;
  int best = most;
  for (int at_once = most - 1; 3 * at_once >= 2 * most; --at_once) {
    if (fill(at_once) > 1.1 * fill(best)) best = at_once;
  }
  if (best == most) return shared_bytes;
  return std::max(shared_bytes, (all / best - kReserved) / 128 * 128);
}

}  // namespace logitd::cuda

#endif  // LOGITD_KERNELS_CUDA_ROWS_WAVES_H_
