#include "server/engine/job.h"

#include <limits>

namespace logitd::engine {
namespace {

constexpr int64_t kHuge = std::numeric_limits<int64_t>::max();

// A negative value counts as too much.
int64_t SaturatingMultiply(int64_t a, int64_t b) {
  int64_t product;
  return a < 0 || b < 0 || __builtin_mul_overflow(a, b, &product) ? kHuge : product;
}

int64_t SaturatingAdd(int64_t a, int64_t b) {
  int64_t sum;
  return __builtin_add_overflow(a, b, &sum) ? kHuge : sum;
}

int64_t BytesOf(const Array& array, const JobSpec& spec) {
  return SaturatingMultiply(spec.counts[array.axis], static_cast<int64_t>(array.bytes));
}

}  // namespace

JobSize SizeOfJob(const JobSpec& spec) {
  JobSize size;
  const auto element_bytes = static_cast<int64_t>(SizeOf(spec.key.dtype));
  size.payload_bytes =
      SaturatingMultiply(spec.rows(), SaturatingMultiply(spec.key.row_elements, element_bytes));
  for (const Array& array : spec.key.op->inputs) {
    if (array.axis != kRowAxis) {
      size.payload_bytes = SaturatingAdd(size.payload_bytes, BytesOf(array, spec));
    }
  }
  for (const Array& array : spec.key.op->outputs.subspan(spec.in_place ? 1 : 0)) {
    size.answer_bytes = SaturatingAdd(size.answer_bytes, BytesOf(array, spec));
  }
  return size;
}

}  // namespace logitd::engine
