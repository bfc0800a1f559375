#include "server/engine/batch.h"

#include <algorithm>

#include "absl/strings/str_format.h"

namespace logitd::engine {
namespace {

// Of one row, in all input arrays that have an element for each row.
size_t ParamBytes(const OpTraits& op) {
  size_t bytes = 0;
  for (const Array& array : op.inputs) bytes += array.axis == kRowAxis ? array.bytes : 0;
  return bytes;
}

}  // namespace

size_t LayOut(absl::Span<const Array> arrays, const AxisCounts& counts, size_t offset,
              size_t* offsets) {
  for (size_t i = 0; i < arrays.size(); ++i) {
    offsets[i] = AlignUp(offset);
    offset = offsets[i] + static_cast<size_t>(counts[arrays[i].axis]) * arrays[i].bytes;
  }
  return offset;
}

SlabLayout::SlabLayout(const EngineOptions& options) {
  size_t param_bytes = 0;
  for (const OpTraits* op : options.ops) param_bytes = std::max(param_bytes, ParamBytes(*op));
  const size_t rows = static_cast<size_t>(options.max_batch_rows);
  const size_t payload = static_cast<size_t>(options.slab_payload_bytes) + rows * kAlignment;
  answer_offset = AlignUp(payload) + AlignUp(rows * param_bytes) + kMaxArrays * kAlignment;
  bytes = answer_offset + AlignUp(static_cast<size_t>(options.slab_answer_bytes)) +
          kMaxArrays * kAlignment;
}

absl::Status CheckFits(const JobSpec& spec, const EngineOptions& options) {
  const JobSize& size = spec.size;
  if (spec.rows() < 1 || (!spec.key.op->exclusive_batch && spec.rows() > options.max_batch_rows)) {
    return absl::InvalidArgumentError(
        absl::StrFormat("rows: got %d, allowed 1..%d", spec.rows(), options.max_batch_rows));
  }
  if (size.payload_bytes < 1 || size.payload_bytes > options.slab_payload_bytes) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "payload: got %d bytes (%d rows of %d %s elements and their lists), allowed 1..%d",
        size.payload_bytes, spec.rows(), spec.key.row_elements, Name(spec.key.dtype),
        options.slab_payload_bytes));
  }
  if (size.answer_bytes > options.slab_answer_bytes) {
    return absl::InvalidArgumentError(
        absl::StrFormat("answer: got %d bytes for %d rows, allowed 0..%d", size.answer_bytes,
                        spec.rows(), options.slab_answer_bytes));
  }
  return absl::OkStatus();
}

}  // namespace logitd::engine
