#include "server/engine/run_slice.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include "absl/container/inlined_vector.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "kernels/status_macros.h"
#include "server/engine/costs.h"
#include "server/engine/heads.h"
#include "server/engine/scheduler.h"

namespace logitd::engine {
namespace {

// A gap of the slab between two parts that are uploaded is left out if it is at least this large: a
// second copy costs about as much as this takes on the bus.
constexpr size_t kWorthSkippingBytes = size_t{256} << 10;

// The first slice of a kind that never ran.
constexpr int64_t kUnknownSliceBytes = int64_t{1} << 20;

using Pointers = std::array<std::byte*, kMaxArrays>;
using Copies = absl::InlinedVector<RowsCopy, 16>;  // one for each job whose rows have a place

void Finish(Batch& batch, Slot& slot, const absl::Status& status, const JobAnswer& answer,
            JobTimes* times) {
  Scheduler::Finish(slot.job, status, answer, batch.taken_ns, times);
  slot.job = nullptr;
  ++batch.progress.finished;
}

// The offset in its array at which a job's elements start.
size_t SliceOffset(const Array& array, const AxisCounts& first) {
  return static_cast<size_t>(first[array.axis]) * array.bytes;
}

// The elements of a job are followed by those of the next, but its rows keep their places.
void Advance(const AxisCounts& counts, AxisCounts* first) {
  for (size_t axis = kRowAxis + 1; axis < kMaxAxes; ++axis) (*first)[axis] += counts[axis];
}

// Copies rows that have no place to the slab.
void GatherRows(const Batch& batch, Progress& plan) {
  const int64_t begun_ns = MonotonicNanos();
  for (const Slot& slot : batch.slots) {
    slot.job->CopyRowsTo(batch.slab.host + static_cast<size_t>(slot.first_row) * plan.row_stride,
                         plan.row_stride);
  }
  plan.times.copy_ns = MonotonicNanos() - begun_ns;
}

// Number `index` of Job::places.
RowsPlace PlaceOf(const Job& job, size_t index) {
  const absl::Span<const RowsPlace> places = job.places();
  return index < places.size() ? places[index] : RowsPlace{};
}

// True: the host's op can read the job's rows in their own memory.
bool IsReadable(const BatchKey& key, const RowsPlace& place) {
  const size_t element = SizeOf(key.dtype);
  return place.data != nullptr && place.steady && place.row_stride % element == 0 &&
         reinterpret_cast<uintptr_t>(place.data) % element == 0;
}

// On the host: finds the rows that the op reads where they lie. The others are in the slab.
void FindRowsApart(Batch& batch) {
  const bool on_host = batch.slab.host == batch.slab.device;
  if (!on_host || !batch.key.op->rows_apart) return;
  const auto is_readable = [&](const Slot& slot) {
    return IsReadable(batch.key, PlaceOf(*slot.job, 0));
  };
  if (std::none_of(batch.slots.begin(), batch.slots.end(), is_readable)) return;
  for (const Slot& slot : batch.slots) {
    RowsPlace place = PlaceOf(*slot.job, 0);
    if (!IsReadable(batch.key, place)) {
      place.row_stride = batch.progress.row_stride;
      place.data = batch.slab.host + static_cast<size_t>(slot.first_row) * place.row_stride;
    }
    for (int64_t r = 0; r < slot.rows; ++r) {
      batch.row_data.push_back(place.data + static_cast<size_t>(r) * place.row_stride);
    }
  }
}

// Gathers the rows, writes the inputs after them and lays out the outputs.
void Prepare(Batch& batch, const SlabLayout& layout, Progress& plan) {
  const OpTraits& op = *batch.key.op;
  plan.row_stride = RowStride(batch.key);
  for (const Slot& slot : batch.slots) {
    const JobSpec& spec = slot.job->spec();
    plan.counts[kRowAxis] += slot.rows;
    Advance(spec.counts, &plan.counts);
    plan.max_row_entries = std::max(plan.max_row_entries, spec.max_row_entries);
    plan.wanted |= spec.wanted;
    plan.in_place = spec.in_place;
    plan.call = spec.call;
  }
  plan.upload_end = LayOut(op.inputs, plan.counts,
                           static_cast<size_t>(batch.rows) * plan.row_stride, plan.inputs.data());
  const size_t in_place = plan.in_place ? 1 : 0;  // outputs, at offset 0 of the payload
  plan.answer_end = LayOut(op.outputs.subspan(in_place), plan.counts, layout.answer_offset,
                           plan.outputs.data() + in_place);
  GatherRows(batch, plan);
  FindRowsApart(batch);

  AxisCounts first = {};
  Pointers inputs;
  for (const Slot& slot : batch.slots) {
    first[kRowAxis] = slot.first_row;
    for (size_t a = 0; a < op.inputs.size(); ++a) {
      inputs[a] = batch.slab.host + plan.inputs[a] + SliceOffset(op.inputs[a], first);
    }
    slot.job->WriteInputs(absl::MakeConstSpan(inputs.data(), op.inputs.size()), first);
    Advance(slot.job->spec().counts, &first);
  }
}

// Uploads ranges of a slab in ascending order, as one piece except where there is much between.
class Uploads {
 public:
  Uploads(Stream& stream, const Slab& slab) : stream_(stream), slab_(slab) {}

  // What is not in a range may be uploaded or not.
  absl::Status Add(size_t begin, size_t end) {
    if (begin == end) return absl::OkStatus();
    if (end_ > begin_ && begin - end_ < kWorthSkippingBytes) {
      end_ = end;
      return absl::OkStatus();
    }
    LOGITD_RETURN_IF_ERROR(Finish());
    begin_ = begin;
    end_ = end;
    return absl::OkStatus();
  }
  absl::Status Finish() {
    return end_ > begin_ ? stream_.Upload(slab_, begin_, end_ - begin_) : absl::OkStatus();
  }

 private:
  Stream& stream_;
  const Slab& slab_;
  size_t begin_ = 0;
  size_t end_ = 0;
};

// Adds the copy of a place to `offset` of the slab on the device.
void AddCopy(const RowsPlace& place, const Batch& batch, size_t offset, size_t row_stride,
             Copies* copies) {
  copies->push_back({.from = place.data,
                     .from_stride = place.row_stride,
                     .to = batch.slab.device + offset,
                     .to_stride = row_stride,
                     .row_bytes = place.row_bytes,
                     .rows = place.rows,
                     .from_device = place.on_device});
}

// Brings what runs to the device: payload and inputs from the slab, and rows from their places.
absl::Status Upload(Stream& stream, const Batch& batch) {
  const Progress& plan = batch.progress;
  const size_t stride = plan.row_stride;
  Uploads uploads(stream, batch.slab);
  Copies copies;
  for (const Slot& slot : batch.slots) {
    const size_t begin = static_cast<size_t>(slot.first_row) * stride;
    if (const RowsPlace place = PlaceOf(*slot.job, 0); place.data != nullptr) {
      if (!batch.row_data.empty() && IsReadable(batch.key, place)) continue;
      AddCopy(place, batch, begin, stride, &copies);
    } else {
      LOGITD_RETURN_IF_ERROR(uploads.Add(begin, begin + static_cast<size_t>(slot.rows) * stride));
    }
  }
  size_t begin = static_cast<size_t>(batch.rows) * stride;  // where the inputs start
  const Job* const only = batch.key.op->exclusive_batch ? batch.slots.front().job : nullptr;
  for (size_t a = 0; only != nullptr && a + 1 < only->places().size(); ++a) {
    const RowsPlace place = PlaceOf(*only, a + 1);
    if (place.data == nullptr) continue;
    LOGITD_RETURN_IF_ERROR(uploads.Add(begin, plan.inputs[a]));
    AddCopy(place, batch, plan.inputs[a], place.slab_stride, &copies);
    begin = plan.inputs[a] + static_cast<size_t>(place.rows) * place.slab_stride;
  }
  LOGITD_RETURN_IF_ERROR(uploads.Add(begin, plan.upload_end));
  LOGITD_RETURN_IF_ERROR(uploads.Finish());
  return copies.empty() ? absl::OkStatus() : stream.Gather(copies);
}

// Enqueues the op on the next `rows` rows.
absl::Status EnqueueRows(Stream& stream, const Batch& batch, int64_t rows) {
  const Progress& plan = batch.progress;
  const OpTraits& op = *batch.key.op;
  const int64_t first_row = plan.next_row;
  const AxisCounts skipped = {first_row};
  Pointers inputs;
  Pointers outputs;
  for (size_t i = 0; i < op.inputs.size(); ++i) {
    inputs[i] = batch.slab.device + plan.inputs[i] + SliceOffset(op.inputs[i], skipped);
  }
  for (size_t i = 0; i < op.outputs.size(); ++i) {
    outputs[i] = batch.slab.device + plan.outputs[i] + SliceOffset(op.outputs[i], skipped);
  }
  AxisCounts counts = plan.counts;
  counts[kRowAxis] = rows;
  const auto view_of = [&](const Head* head) {
    return head == nullptr ? nullptr : &head->view(batch.device);
  };
  const BatchView view{
      .dtype = batch.key.dtype,
      .counts = counts,
      .first_row = first_row,
      .row_elements = batch.key.row_elements,
      .row_stride = plan.row_stride,
      .payload = batch.slab.device + static_cast<size_t>(plan.next_row) * plan.row_stride,
      .row_data =
          batch.row_data.empty() ? nullptr : &batch.row_data[static_cast<size_t>(plan.next_row)],
      .max_row_entries = plan.max_row_entries,
      .wanted = plan.wanted,
      .inputs = absl::MakeConstSpan(inputs.data(), op.inputs.size()),
      .outputs = absl::MakeConstSpan(outputs.data(), op.outputs.size()),
      .head = view_of(batch.key.head),
      .reference_head = view_of(batch.key.reference_head),
  };
  return op.exclusive_batch ? plan.call->Enqueue(stream, view) : op.enqueue(stream, view);
}

absl::Status Download(Stream& stream, const Batch& batch, const SlabLayout& layout) {
  const Progress& plan = batch.progress;
  const OpTraits& op = *batch.key.op;
  size_t begin = layout.answer_offset;
  if (op.exclusive_batch) {
    const size_t bytes = static_cast<size_t>(plan.counts[op.outputs[0].axis]) * op.outputs[0].bytes;
    const Job* const job = batch.slots.front().job;
    std::byte* const place = job == nullptr ? nullptr : job->answer_place();
    if (place != nullptr) {
      LOGITD_RETURN_IF_ERROR(stream.Deliver(place, batch.slab.device + plan.outputs[0], bytes));
      if (!plan.in_place) begin = std::min(plan.outputs[0] + AlignUp(bytes), plan.answer_end);
    } else if (plan.in_place) {
      LOGITD_RETURN_IF_ERROR(stream.Download(batch.slab, 0, bytes));
    }
  }
  return stream.Download(batch.slab, begin, plan.answer_end - begin);
}

absl::Status Enqueue(Stream& stream, const Batch& batch, const SlabLayout& layout, bool first,
                     int64_t rows) {
  if (first) LOGITD_RETURN_IF_ERROR(Upload(stream, batch));
  if (rows > 0) LOGITD_RETURN_IF_ERROR(EnqueueRows(stream, batch, rows));
  if (batch.progress.next_row + rows < batch.rows) return absl::OkStatus();
  return Download(stream, batch, layout);
}

// The status of a job whose rows have run. If the batch was abandoned, its answer is not complete.
absl::Status EndOf(const Batch& batch, const Job& job) {
  const bool abandoned = batch.abandoned.load(std::memory_order_acquire);
  if (Scheduler::IsGone(job)) return absl::CancelledError("cancelled while it ran");
  if (abandoned) {
    return absl::DeadlineExceededError("the deadline passed while it ran");
  }
  return absl::OkStatus();
}

// Ends every job that is left: with `failure`, or with its answer if that is OK.
void FinishAll(Batch& batch, const absl::Status& failure,
               absl::FunctionRef<std::shared_ptr<const void>()> keep, JobTimes* oldest) {
  Progress& progress = batch.progress;
  progress.times.batch_rows = static_cast<int32_t>(progress.rows_run);
  const absl::Span<const Array> outputs = batch.key.op->outputs;
  std::array<absl::Span<const std::byte>, kMaxArrays> answers;
  AxisCounts first = {};
  for (Slot& slot : batch.slots) {
    const AxisCounts counts = slot.job->spec().counts;  // the job may be gone after Finish
    first[kRowAxis] = slot.first_row;
    for (size_t a = 0; a < outputs.size(); ++a) {
      answers[a] = absl::MakeConstSpan(
          batch.slab.host + progress.outputs[a] + SliceOffset(outputs[a], first),
          static_cast<size_t>(counts[outputs[a].axis]) * outputs[a].bytes);
    }
    Advance(counts, &first);
    JobTimes times = progress.times;
    JobAnswer given;
    const absl::Status status = failure.ok() ? EndOf(batch, *slot.job) : failure;
    if (status.ok()) {
      given.outputs = absl::MakeConstSpan(answers.data(), outputs.size());
      if (batch.key.op->exclusive_batch) given.keep = keep();
    }
    slot.has_run = failure.ok();
    Finish(batch, slot, status, given, &times);
    if (oldest->batch_rows == 0) *oldest = times;
  }
  progress.done = true;
}

}  // namespace

int64_t RowsOfSlice(const BatchKey& key, bool whole, int64_t left, double row_ns,
                    const SliceRules& rules) {
  if (whole || left == 0) return left;
  const bool linear = key.head != nullptr || key.reference_head != nullptr;
  const int64_t step = linear ? rules.linear_rows : 1;
  int64_t rows = 1;
  if (row_ns > 0) {
    const double slices =
        std::round(static_cast<double>(left) * row_ns / static_cast<double>(rules.max_slice_ns));
    if (slices <= 1) return left;
    rows = static_cast<int64_t>(std::ceil(static_cast<double>(left) / slices));
  } else if (!linear) {
    rows = kUnknownSliceBytes / static_cast<int64_t>(RowStride(key));
  }
  return std::min(left, (std::max<int64_t>(rows, 1) + step - 1) / step * step);
}

absl::Status RunSlice(Stream& stream, const SlabLayout& layout, const SliceRules& rules,
                      Costs& costs, Batch& batch, absl::FunctionRef<void(const absl::Status&)> lost,
                      absl::FunctionRef<std::shared_ptr<const void>()> keep, JobTimes* oldest) {
  *oldest = JobTimes{};
  Progress& progress = batch.progress;
  const bool first = !progress.begun;
  progress.slice_rows = 0;
  progress.slice_ns = 0;
  progress.finished = 0;
  if (first) {
    Prepare(batch, layout, progress);
    progress.begun = true;
  }

  const double row_ns = progress.row_ns > 0 ? progress.row_ns : costs.PerRow(batch.key);
  const int64_t rows =
      RowsOfSlice(batch.key, batch.whole, batch.rows - progress.next_row, row_ns, rules);
  stream.Watch(&batch.abandoned);
  absl::Status status = Enqueue(stream, batch, layout, first, rows);
  // Also after an error: what was enqueued before it still uses the slab.
  const absl::StatusOr<StreamTimes> device_times = stream.Wait();
  if (!device_times.ok() && (status.ok() || absl::IsInternal(device_times.status()))) {
    status = device_times.status();
  }
  progress.next_row += rows;
  progress.rows_run += rows;
  if (!status.ok()) {
    progress.times = JobTimes{};
    if (absl::IsInternal(status)) lost(status);
    FinishAll(batch, absl::UnavailableError(absl::StrCat("the device failed: ", status.message())),
              keep, oldest);
    return status;
  }
  progress.slice_rows = rows;
  progress.slice_ns = device_times->h2d_ns + device_times->kernel_ns + device_times->d2h_ns;
  progress.times.h2d_ns += device_times->h2d_ns;
  progress.times.kernel_ns += device_times->kernel_ns;
  progress.times.d2h_ns += device_times->d2h_ns;
  // A slice that was cut short says nothing of its cost.
  if (rows > 0 && !batch.abandoned.load(std::memory_order_relaxed)) {
    progress.row_ns = static_cast<double>(device_times->kernel_ns) / static_cast<double>(rows);
    progress.kind_row_ns =
        costs.Ran(batch.key, rows, rows * static_cast<int64_t>(RowBytes(batch.key)),
                  absl::Nanoseconds(progress.slice_ns));
  }
  if (progress.next_row == batch.rows) FinishAll(batch, absl::OkStatus(), keep, oldest);
  return status;
}

}  // namespace logitd::engine
