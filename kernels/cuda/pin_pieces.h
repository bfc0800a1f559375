// Host memory is pinned in pieces, because the driver lets nothing else run while it pins one: 9
// ms.
#ifndef LOGITD_KERNELS_CUDA_PIN_PIECES_H_
#define LOGITD_KERNELS_CUDA_PIN_PIECES_H_

#include <cstddef>
#include <cstdint>

namespace logitd::cuda {

// Pieces end at multiples of this. A copy stays within a piece.
inline constexpr size_t kPinPieceBytes = size_t{32} << 20;

// Bytes from `at` to the end of its piece.
inline size_t LeftOfPiece(const std::byte* at) {
  return kPinPieceBytes - reinterpret_cast<uintptr_t>(at) % kPinPieceBytes;
}

}  // namespace logitd::cuda

#endif  // LOGITD_KERNELS_CUDA_PIN_PIECES_H_
