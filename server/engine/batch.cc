#include "server/engine/batch.h"

#include <algorithm>
#include <limits>

#include "absl/strings/str_format.h"
#include "server/engine/heads.h"
#include "server/engine/waiting.h"

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

// The bytes of one row in all input arrays that have an element for each row.
size_t ParamBytes(const OpTraits& op) {
  size_t bytes = 0;
  for (const Array& array : op.inputs) bytes += array.axis == kRowAxis ? array.bytes : 0;
  return bytes;
}

}  // namespace

bool IsSharded(const BatchKey& key) {
  const auto sharded = [](const Head* head) { return head != nullptr && head->sharded(); };
  return sharded(key.head) || sharded(key.reference_head);
}

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
        "payload: got %d bytes (%d rows of %d %s elements and what comes with them), allowed 1..%d",
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

bool Fits(const Batch& batch, const JobSpec& spec, const EngineOptions& options) {
  return batch.rows + spec.rows() <= options.max_batch_rows &&
         batch.payload_bytes + spec.size.payload_bytes <= options.slab_payload_bytes &&
         batch.answer_bytes + spec.size.answer_bytes <= options.slab_answer_bytes;
}

void Batch::Begin(KeyQueue* of) {
  queue = of;
  key = of->kind->key.key;
  sharded = IsSharded(key);
  weight = 0;
  whole = false;
  taken_ns = 0;
  last_deadline = absl::InfinitePast();
  rows = 0;
  payload_bytes = 0;
  answer_bytes = 0;
  live = 0;
  gone = 0;
  kept = false;
  abandoned = false;
  slots.clear();
  row_data.clear();
  progress = Progress();
}

void Batch::Add(Job* job) {
  const JobSpec& spec = job->spec();
  Job::Place& place = job->place_;
  place.state = Job::Place::State::kInBatch;
  place.batch = this;
  place.slot = slots.size();
  if (slots.empty()) urgency = place.urgency;
  // Jobs of one caller mostly come one after another.
  if (slots.empty() || slots.back().caller.id != spec.caller.id) weight += spec.caller.weight;
  slots.push_back({.job = job,
                   .first_row = rows,
                   .rows = spec.rows(),
                   .caller = spec.caller,
                   .cost_ns = place.cost_ns});
  whole = whole || spec.whole || slots.size() > 1;
  last_deadline = std::max(last_deadline, spec.deadline);
  rows += spec.rows();
  payload_bytes += spec.size.payload_bytes;
  answer_bytes += spec.size.answer_bytes;
  ++live;
}

}  // namespace logitd::engine
