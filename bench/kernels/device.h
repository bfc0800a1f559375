// What the bench needs of a device: its own ceilings, and the median time of one op over inputs
// that defeat the caches.
#ifndef LOGITD_BENCH_KERNELS_DEVICE_H_
#define LOGITD_BENCH_KERNELS_DEVICE_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/attention_softmax.h"
#include "kernels/cross_entropy.h"
#include "kernels/sample.h"
#include "kernels/types.h"

namespace logitd::bench {

struct TopKCase {
  int64_t rows;
  int64_t vocab;
  DType dtype;
  int32_t k;
  int64_t row_stride;  // elements
};

// What a row of a sample entry has besides its parameters.
struct SampleLists {
  int32_t history = 0;  // tokens
  bool mask = false;    // half the tokens allowed
};

struct SampleCase {
  int64_t rows;
  int64_t vocab;
  DType dtype;
  SampleRow row;  // of every row; seeds and positions differ
  SampleLists lists;
};

// All rows of a tensor of scores; a mask is [batch, 1, queries, keys], which the heads share, a
// quarter of it hidden. Backward: probs and their gradient in, the gradient of the scores out, all
// of one type.
struct AttentionCase {
  int64_t batch;
  int64_t heads;
  int64_t queries;
  int64_t keys;
  DType dtype;
  AttentionWindow window;
  MaskKind mask = MaskKind::kNone;  // kAdditive: in dtype
  bool backward = false;

  int64_t rows() const { return batch * heads * queries; }
  // The fewest bytes that move: what the rows see is read, all keys are written.
  double FloorBytes() const;
};

struct LossCase {
  int64_t rows;
  int64_t vocab;
  DType dtype;
  CrossEntropyRow row;  // of every row; targets differ
  bool backward = false;

  // The fewest bytes that move: one read of the logits; backward, a read and a write.
  double FloorBytes() const {
    const double bytes = static_cast<double>(rows * vocab) * static_cast<double>(SizeOf(dtype));
    return backward ? 2 * bytes : bytes;
  }
};

// An op on hidden states under a head without bias, norm or softcap. kLossBackward is loss and
// gradients in one call, by which d_hidden and d_weight are of the case's dtype on CUDA, f32 on the
// CPU.
enum class HeadOp { kTopK, kSample, kLoss, kLossBackward };
struct HeadCase {
  HeadOp op;
  int64_t rows;
  int64_t hidden;
  int64_t vocab;
  DType dtype;
};

// Times are medians in microseconds; rates are bytes per second.
class Device {
 public:
  virtual ~Device() = default;
  virtual std::string name() const = 0;
  virtual absl::StatusOr<double> ReadCeiling() = 0;  // a read of far more than the caches hold
  virtual absl::StatusOr<double> CopyCeiling() = 0;  // bytes read plus bytes written, per second
  virtual absl::StatusOr<double> TimeTopK(const TopKCase& c) = 0;
  virtual absl::StatusOr<double> TimeSample(const SampleCase& c) = 0;
  virtual absl::StatusOr<double> TimeAttention(const AttentionCase& c) = 0;
  virtual absl::StatusOr<double> TimeLoss(const LossCase& c) = 0;
  virtual absl::StatusOr<double> TimeHead(const HeadCase& c) = 0;
  // The bare product of that shape, whatever the op, by the device's own library: on CUDA in the
  // case's dtype, logits too, as peers have it; on the CPU in f32 whatever the dtype.
  virtual absl::StatusOr<double> TimeProduct(const HeadCase& c) = 0;
};

absl::StatusOr<std::unique_ptr<Device>> CreateCpuDevice();
absl::StatusOr<std::unique_ptr<Device>> CreateCudaDevice();  // in builds with CUDA

}  // namespace logitd::bench

#endif  // LOGITD_BENCH_KERNELS_DEVICE_H_
