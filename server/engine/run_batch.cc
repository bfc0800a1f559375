#include "server/engine/run_batch.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "kernels/status_macros.h"
#include "server/engine/batcher.h"

namespace logitd::engine {
namespace {

// Payload of dropped jobs between rows that run is not uploaded if there is at least this much of
// it: a second copy costs about as much as this takes on the bus.
constexpr size_t kWorthSkippingBytes = size_t{256} << 10;

using PlaneArray = std::array<std::byte*, kMaxPlanes>;

// What is left of a batch when dropped jobs are taken off both its ends.
struct Extent {
  size_t first_slot = 0;
  size_t end_slot = 0;
  int64_t first_row = 0;
  int64_t end_row = 0;
  int64_t rows() const { return end_row - first_row; }
};

// Ends the jobs that are late.
void EndLate(Batch& batch, int64_t taken_ns) {
  const absl::Time now = absl::Now();
  for (Slot& slot : batch.slots) {
    if (slot.job == nullptr || slot.job->spec().deadline > now) continue;
    JobTimes times;
    Batcher::Finish(slot.job,
                    absl::DeadlineExceededError("the deadline passed before a stream was free"), {},
                    taken_ns, &times);
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
  size_t params_offset = 0;
  size_t upload_end = 0;
  int64_t entries = 0;
  int32_t max_entries = 0;
  size_t answer_end = 0;
  std::array<size_t, kMaxPlanes> plane_offsets = {};
};

// Writes the parameters behind the payload and lays out the outputs.
Plan Prepare(const Batch& batch, const SlabLayout& layout, const Extent& extent) {
  const OpTraits& op = *batch.key.op;
  Plan plan{.extent = extent, .row_stride = RowStride(batch.key)};
  plan.params_offset = static_cast<size_t>(extent.end_row) * plan.row_stride;
  plan.upload_end = plan.params_offset + static_cast<size_t>(extent.rows()) * op.param_bytes;
  std::byte* params = batch.slab.host + plan.params_offset;
  for (size_t i = extent.first_slot; i < extent.end_slot; ++i) {
    const Slot& slot = batch.slots[i];
    std::byte* to =
        params + static_cast<size_t>(slot.first_row - extent.first_row) * op.param_bytes;
    if (slot.job == nullptr) {
      std::memset(to, 0, static_cast<size_t>(slot.rows) * op.param_bytes);
      continue;
    }
    const JobSpec& spec = slot.job->spec();
    slot.job->WriteParams(to, plan.entries);
    plan.entries += spec.entries;
    plan.max_entries = std::max(plan.max_entries, spec.max_row_entries);
  }
  size_t offset = layout.answer_offset;
  for (const Plane::Per per : {Plane::Per::kRow, Plane::Per::kEntry}) {
    const int64_t count = per == Plane::Per::kRow ? extent.rows() : plan.entries;
    for (size_t i = 0; i < op.planes.size(); ++i) {
      if (op.planes[i].per != per) continue;
      plan.plane_offsets[i] = offset;
      offset = AlignUp(offset + static_cast<size_t>(count) * op.planes[i].bytes);
    }
  }
  plan.answer_end = offset;
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
  PlaneArray planes;
  for (size_t i = 0; i < op.planes.size(); ++i) {
    planes[i] = batch.slab.device + plan.plane_offsets[i];
  }
  const BatchView view{
      .dtype = batch.key.dtype,
      .rows = plan.extent.rows(),
      .row_elements = batch.key.row_elements,
      .row_stride = plan.row_stride,
      .payload = batch.slab.device + static_cast<size_t>(plan.extent.first_row) * plan.row_stride,
      .params = batch.slab.device + plan.params_offset,
      .max_entries = plan.max_entries,
      .planes = absl::MakeConstSpan(planes.data(), op.planes.size()),
  };
  LOGITD_RETURN_IF_ERROR(op.enqueue(stream, view));
  return stream.Download(batch.slab, layout.answer_offset, plan.answer_end - layout.answer_offset);
}

}  // namespace

absl::Status RunBatch(Stream& stream, const SlabLayout& layout, Batch& batch,
                      absl::FunctionRef<void(const absl::Status&)> lost, JobTimes* oldest) {
  *oldest = JobTimes{};
  const int64_t taken_ns = MonotonicNanos();
  EndLate(batch, taken_ns);
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

  const absl::Span<const Plane> planes = batch.key.op->planes;
  std::array<absl::Span<const std::byte>, kMaxPlanes> slices;
  int64_t first_entry = 0;
  for (size_t i = extent.first_slot; i < extent.end_slot; ++i) {
    const Slot& slot = batch.slots[i];
    if (slot.job == nullptr) continue;
    const int64_t entries = slot.job->spec().entries;
    for (size_t p = 0; p < planes.size(); ++p) {
      const bool per_row = planes[p].per == Plane::Per::kRow;
      const int64_t first = per_row ? slot.first_row - extent.first_row : first_entry;
      const int64_t count = per_row ? slot.rows : entries;
      slices[p] = absl::MakeConstSpan(
          batch.slab.host + plan.plane_offsets[p] + static_cast<size_t>(first) * planes[p].bytes,
          static_cast<size_t>(count) * planes[p].bytes);
    }
    JobTimes job_times = times;
    Batcher::Finish(slot.job, answer,
                    absl::MakeConstSpan(slices.data(), status.ok() ? planes.size() : 0), taken_ns,
                    &job_times);
    if (i == extent.first_slot) *oldest = job_times;
    first_entry += entries;
  }
  return status;
}

}  // namespace logitd::engine
