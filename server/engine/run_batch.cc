#include "server/engine/run_batch.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "kernels/status_macros.h"
#include "server/engine/batcher.h"
#include "server/engine/heads.h"

namespace logitd::engine {
namespace {

// Payload of dropped jobs between rows that run is not uploaded if there is at least this much of
// it: a second copy costs about as much as this takes on the bus.
constexpr size_t kWorthSkippingBytes = size_t{256} << 10;

using Pointers = std::array<std::byte*, kMaxArrays>;
using Offsets = std::array<size_t, kMaxArrays>;

// What is left of a batch when dropped jobs are taken off both its ends.
struct Extent {
  size_t first_slot = 0;
  size_t end_slot = 0;
  int64_t first_row = 0;
  int64_t end_row = 0;
  int64_t rows() const { return end_row - first_row; }
};

// Ends the jobs that are late.
void EndLate(Batch& batch) {
  const absl::Time now = absl::Now();
  for (Slot& slot : batch.slots) {
    if (slot.job == nullptr || slot.job->spec().deadline > now) continue;
    JobTimes times;
    Batcher::Finish(slot.job,
                    absl::DeadlineExceededError("the deadline passed before a stream was free"),
                    JobAnswer{}, batch.taken_ns, &times);
    slot.job = nullptr;
  }
}

Extent FindExtent(const Batch& batch) {
  Extent extent;
  size_t first = 0;
  size_t end = batch.slots.size();
  while (first < end && batch.slots[first].job == nullptr) ++first;
  while (end > first && batch.slots[end - 1].job == nullptr) --end;
  if (first == end) return extent;
  extent.first_slot = first;
  extent.end_slot = end;
  extent.first_row = batch.slots[first].first_row;
  extent.end_row = batch.slots[end - 1].first_row + batch.slots[end - 1].rows;
  return extent;
}

struct Plan {
  Extent extent;
  size_t row_stride = 0;
  AxisCounts counts = {};
  int32_t max_row_entries = 0;
  uint32_t wanted = 0;
  bool in_place = false;  // the next two: only of an exclusive op
  const ExclusiveCall* call = nullptr;
  Offsets inputs = {};
  size_t upload_end = 0;
  Offsets outputs = {};
  size_t answer_end = 0;
};

// Where in its array a job's slice starts.
size_t SliceOffset(const Array& array, const AxisCounts& first) {
  return static_cast<size_t>(first[array.axis]) * array.bytes;
}

// The elements of a job are followed by those of the next, but its rows keep their places.
void Advance(const JobSpec& spec, AxisCounts* first) {
  for (size_t axis = kRowAxis + 1; axis < kMaxAxes; ++axis) (*first)[axis] += spec.counts[axis];
}

// Writes the inputs after the payload and lays out the outputs.
Plan Prepare(const Batch& batch, const SlabLayout& layout, const Extent& extent) {
  const OpTraits& op = *batch.key.op;
  Plan plan{.extent = extent, .row_stride = RowStride(batch.key)};
  plan.counts[kRowAxis] = extent.rows();
  for (size_t i = extent.first_slot; i < extent.end_slot; ++i) {
    if (batch.slots[i].job == nullptr) continue;
    const JobSpec& spec = batch.slots[i].job->spec();
    Advance(spec, &plan.counts);
    plan.max_row_entries = std::max(plan.max_row_entries, spec.max_row_entries);
    plan.wanted |= spec.wanted;
    plan.in_place = spec.in_place;
    plan.call = spec.call;
  }
  plan.upload_end =
      LayOut(op.inputs, plan.counts, static_cast<size_t>(extent.end_row) * plan.row_stride,
             plan.inputs.data());
  const size_t in_place = plan.in_place ? 1 : 0;  // outputs, at offset 0 of the payload
  plan.answer_end = LayOut(op.outputs.subspan(in_place), plan.counts, layout.answer_offset,
                           plan.outputs.data() + in_place);

  AxisCounts first = {};
  Pointers inputs;
  for (size_t i = extent.first_slot; i < extent.end_slot; ++i) {
    const Slot& slot = batch.slots[i];
    first[kRowAxis] = slot.first_row - extent.first_row;
    for (size_t a = 0; a < op.inputs.size(); ++a) {
      inputs[a] = batch.slab.host + plan.inputs[a] + SliceOffset(op.inputs[a], first);
      if (slot.job == nullptr && op.inputs[a].axis == kRowAxis) {
        std::memset(inputs[a], 0, static_cast<size_t>(slot.rows) * op.inputs[a].bytes);
      }
    }
    if (slot.job == nullptr) continue;
    slot.job->WriteInputs(absl::MakeConstSpan(inputs.data(), op.inputs.size()), first);
    Advance(slot.job->spec(), &first);
  }
  return plan;
}

// Uploads what runs: payload and parameters as one piece, or as several around large dropped
// ranges.
absl::Status Upload(Stream& stream, const Batch& batch, const Plan& plan) {
  const Extent& extent = plan.extent;
  size_t begin = static_cast<size_t>(extent.first_row) * plan.row_stride;
  int64_t gap_row = -1;  // where the dropped range before the current slot starts
  for (size_t i = extent.first_slot; i < extent.end_slot; ++i) {
    const Slot& slot = batch.slots[i];
    if (slot.job == nullptr) {
      if (gap_row < 0) gap_row = slot.first_row;
      continue;
    }
    if (gap_row >= 0) {
      const size_t gap_begin = static_cast<size_t>(gap_row) * plan.row_stride;
      const size_t gap_end = static_cast<size_t>(slot.first_row) * plan.row_stride;
      if (gap_end - gap_begin >= kWorthSkippingBytes) {
        LOGITD_RETURN_IF_ERROR(stream.Upload(batch.slab, begin, gap_begin - begin));
        begin = gap_end;
      }
      gap_row = -1;
    }
  }
  return stream.Upload(batch.slab, begin, plan.upload_end - begin);
}

absl::Status Enqueue(Stream& stream, const Batch& batch, const SlabLayout& layout,
                     const Plan& plan) {
  LOGITD_RETURN_IF_ERROR(Upload(stream, batch, plan));
  const OpTraits& op = *batch.key.op;
  Pointers inputs;
  Pointers outputs;
  for (size_t i = 0; i < op.inputs.size(); ++i) inputs[i] = batch.slab.device + plan.inputs[i];
  for (size_t i = 0; i < op.outputs.size(); ++i) outputs[i] = batch.slab.device + plan.outputs[i];
  const BatchView view{
      .dtype = batch.key.dtype,
      .counts = plan.counts,
      .row_elements = batch.key.row_elements,
      .row_stride = plan.row_stride,
      .payload = batch.slab.device + static_cast<size_t>(plan.extent.first_row) * plan.row_stride,
      .max_row_entries = plan.max_row_entries,
      .wanted = plan.wanted,
      .inputs = absl::MakeConstSpan(inputs.data(), op.inputs.size()),
      .outputs = absl::MakeConstSpan(outputs.data(), op.outputs.size()),
      .head = batch.key.head == nullptr ? nullptr : &batch.key.head->view(),
  };
  LOGITD_RETURN_IF_ERROR(op.exclusive_batch ? plan.call->Enqueue(stream, view)
                                            : op.enqueue(stream, view));
  if (plan.in_place) {
    const Array& first = op.outputs[0];
    LOGITD_RETURN_IF_ERROR(
        stream.Download(batch.slab, 0, static_cast<size_t>(plan.counts[first.axis]) * first.bytes));
  }
  return stream.Download(batch.slab, layout.answer_offset, plan.answer_end - layout.answer_offset);
}

}  // namespace

absl::Status RunBatch(Stream& stream, const SlabLayout& layout, Batch& batch,
                      absl::FunctionRef<void(const absl::Status&)> lost,
                      absl::FunctionRef<std::shared_ptr<const void>()> keep, JobTimes* oldest) {
  *oldest = JobTimes{};
  EndLate(batch);
  const Extent extent = FindExtent(batch);
  if (extent.rows() == 0) return absl::OkStatus();

  const Plan plan = Prepare(batch, layout, extent);
  absl::Status status = Enqueue(stream, batch, layout, plan);
  // Also after an error: what was enqueued before it still uses the slab.
  const absl::StatusOr<StreamTimes> device_times = stream.Wait();
  if (!device_times.ok() && (status.ok() || absl::IsInternal(device_times.status()))) {
    status = device_times.status();
  }
  JobTimes times{.batch_rows = static_cast<int32_t>(extent.rows())};
  absl::Status answer;
  if (status.ok()) {
    times.h2d_ns = device_times->h2d_ns;
    times.kernel_ns = device_times->kernel_ns;
    times.d2h_ns = device_times->d2h_ns;
  } else {
    answer = absl::UnavailableError(absl::StrCat("the device failed: ", status.message()));
    if (absl::IsInternal(status)) lost(status);
  }

  const absl::Span<const Array> outputs = batch.key.op->outputs;
  std::array<absl::Span<const std::byte>, kMaxArrays> slices;
  AxisCounts first = {};
  for (size_t i = extent.first_slot; i < extent.end_slot; ++i) {
    const Slot& slot = batch.slots[i];
    if (slot.job == nullptr) continue;
    const JobSpec& spec = slot.job->spec();
    first[kRowAxis] = slot.first_row - extent.first_row;
    for (size_t a = 0; a < outputs.size(); ++a) {
      slices[a] =
          absl::MakeConstSpan(batch.slab.host + plan.outputs[a] + SliceOffset(outputs[a], first),
                              static_cast<size_t>(spec.counts[outputs[a].axis]) * outputs[a].bytes);
    }
    Advance(spec, &first);  // the job may be gone after Finish
    JobTimes job_times = times;
    JobAnswer given;
    if (status.ok()) {
      given.outputs = absl::MakeConstSpan(slices.data(), outputs.size());
      if (batch.key.op->exclusive_batch) given.keep = keep();
    }
    Batcher::Finish(slot.job, answer, given, batch.taken_ns, &job_times);
    if (i == extent.first_slot) *oldest = job_times;
  }
  return status;
}

}  // namespace logitd::engine
