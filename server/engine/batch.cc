#include "server/engine/batch.h"

#include <limits>

#include "absl/strings/str_format.h"

namespace logitd::engine {
namespace {

constexpr int64_t kHuge = std::numeric_limits<int64_t>::max();

// For values >= 0; anything negative counts as too much.
int64_t SaturatingMultiply(int64_t a, int64_t b) {
  int64_t product;
  return a < 0 || b < 0 || __builtin_mul_overflow(a, b, &product) ? kHuge : product;
}

int64_t SaturatingAdd(int64_t a, int64_t b) {
  int64_t sum;
  return __builtin_add_overflow(a, b, &sum) ? kHuge : sum;
}

}  // namespace

SlabLayout::SlabLayout(const EngineOptions& options) {
  const size_t rows = static_cast<size_t>(options.max_batch_rows);
  const size_t payload = static_cast<size_t>(options.slab_payload_bytes) + rows * kAlignment;
  answer_offset = AlignUp(payload) + AlignUp(rows * options.max_param_bytes);
  bytes = answer_offset + AlignUp(static_cast<size_t>(options.slab_answer_bytes)) +
          kMaxPlanes * kAlignment;
}

JobSize SizeOfJob(const JobSpec& spec) {
  JobSize size;
  const auto element_bytes = static_cast<int64_t>(SizeOf(spec.key.dtype));
  size.payload_bytes =
      SaturatingMultiply(spec.rows, SaturatingMultiply(spec.key.row_elements, element_bytes));
  for (const Plane& plane : spec.key.op->planes) {
    const int64_t count = plane.per == Plane::Per::kRow ? spec.rows : spec.entries;
    size.answer_bytes = SaturatingAdd(size.answer_bytes,
                                      SaturatingMultiply(count, static_cast<int64_t>(plane.bytes)));
  }
  return size;
}

absl::Status CheckFits(const JobSpec& spec, const JobSize& size, const EngineOptions& options) {
  const OpTraits& op = *spec.key.op;
  if (op.param_bytes > options.max_param_bytes || op.planes.size() > kMaxPlanes) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "op %s: %d bytes of parameters a row and %d outputs, allowed %d and %d", op.name,
        op.param_bytes, op.planes.size(), options.max_param_bytes, kMaxPlanes));
  }
  if (spec.rows < 1 || spec.rows > options.max_batch_rows) {
    return absl::InvalidArgumentError(
        absl::StrFormat("rows: %d, allowed 1..%d", spec.rows, options.max_batch_rows));
  }
  if (size.payload_bytes < 1 || size.payload_bytes > options.slab_payload_bytes) {
    return absl::InvalidArgumentError(
        absl::StrFormat("payload: %d rows of %d %s elements are %d bytes, allowed 1..%d", spec.rows,
                        spec.key.row_elements, Name(spec.key.dtype), size.payload_bytes,
                        options.slab_payload_bytes));
  }
  if (size.answer_bytes > options.slab_answer_bytes) {
    return absl::InvalidArgumentError(
        absl::StrFormat("answer: %d rows with %d entries in all are %d bytes, allowed 0..%d",
                        spec.rows, spec.entries, size.answer_bytes, options.slab_answer_bytes));
  }
  return absl::OkStatus();
}

}  // namespace logitd::engine
