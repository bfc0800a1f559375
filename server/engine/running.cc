#include "server/engine/running.h"

#include <algorithm>
#include <utility>

#include "server/engine/waiting.h"

namespace logitd::engine {

RunningBatches::RunningBatches(const EngineOptions& options, const SliceRules& rules, int devices,
                               const std::vector<Slab>& slabs)
    : options_(options),
      rules_(rules),
      devices_(static_cast<size_t>(devices)),
      batches_(slabs.size()),
      slabs_of_each_(static_cast<int>(slabs.size()) / devices),
      devices_left_(devices) {
  for (size_t i = 0; i < slabs.size(); ++i) {
    batches_[i].slab = slabs[i];
    batches_[i].device = static_cast<int>(i) / slabs_of_each_;
    ++DeviceOf(batches_[i]).free;
  }
}

bool RunningBatches::CanRun(const BatchKey& key) const {
  if (IsSharded(key)) return devices_left_ == static_cast<int>(devices_.size());
  return key.device == kAnyDevice ? devices_left_ > 0 : !lost(key.device);
}

// True: one more slice on the device may take longer than kSlowSlice.
bool RunningBatches::MayBeSlow(int device) const {
  return devices_[static_cast<size_t>(device)].slow < std::max(1, options_.streams - 1) &&
         slow_ < std::max(1, options_.streams * devices_left_ - 1);
}

bool RunningBatches::MayBegin(int device, const Job& job) const {
  const Device& at = devices_[static_cast<size_t>(device)];
  const KeyQueue& queue = *job.place_.queue;
  if (at.lost || at.free == 0) return false;
  if (IsSharded(queue.kind->key.key) && (sharding_ || device != 0)) return false;
  if (queue.length == Length::kSlow && !MayBeSlow(device)) return false;
  if (at.free > 1 || at.at_work == 0) return true;
  if (queue.kind->key.priority == Priority::kBatch) return false;
  if (slabs_of_each_ == 2) return job.place_.cost_ns <= absl::ToDoubleNanoseconds(kSlowSlice);
  return queue.length == Length::kShort;
}

Batch* RunningBatches::FreeBatch(int device) {
  for (Batch& batch : batches_) {
    if (batch.device == device && batch.state == Batch::State::kFree) return &batch;
  }
  return nullptr;
}

Batch* RunningBatches::Paused(int device) {
  Batch* first = nullptr;
  const bool may_be_slow = MayBeSlow(device);
  for (Batch& batch : batches_) {
    if (batch.state != Batch::State::kPaused || batch.device != device) continue;
    if ((batch.sharded && sharding_) || (!may_be_slow && IsSlow(batch))) continue;
    if (first == nullptr || batch.urgency < first->urgency) first = &batch;
  }
  return first;
}

// True: the batch's next slice may take longer than kSlowSlice.
bool RunningBatches::IsSlow(const Batch& batch) const {
  const Progress& progress = batch.progress;
  const double row_ns = progress.row_ns > 0 ? progress.row_ns : batch.queue->kind->row_ns;
  const int64_t rows =
      RowsOfSlice(batch.key, batch.whole, batch.rows - progress.next_row, row_ns, rules_);
  return static_cast<double>(rows) * row_ns > absl::ToDoubleNanoseconds(kSlowSlice);
}

void RunningBatches::BeginSlice(Batch* batch) {
  Device& device = DeviceOf(*batch);
  if (batch->state == Batch::State::kFree) {
    --device.free;
    ++device.at_work;
    ++batch->queue->kind->batches;
  }
  batch->state = Batch::State::kRunning;
  if (batch->sharded) sharding_ = true;
  batch->slow = IsSlow(*batch);
  slow_ += batch->slow ? 1 : 0;
  device.slow += batch->slow ? 1 : 0;
}

void RunningBatches::EndSlice(Batch* batch) {
  batch->state = Batch::State::kPaused;
  if (batch->sharded) sharding_ = false;
  if (!batch->slow || lost(batch->device)) return;
  --slow_;
  --DeviceOf(*batch).slow;
}

void RunningBatches::End(Batch* batch) {
  Device& device = DeviceOf(*batch);
  --batch->queue->kind->batches;
  --device.at_work;
  batch->state = batch->kept ? Batch::State::kKept : Batch::State::kFree;
  device.free += batch->kept ? 0 : 1;
}

bool RunningBatches::Keep(Batch* batch) {
  Device& device = DeviceOf(*batch);
  if (device.kept >= slabs_of_each_ - options_.streams) return false;
  ++device.kept;
  ++kept_;
  batch->kept = true;
  return true;
}

// An answer that is dropped while its batch runs leaves the slab to End.
void RunningBatches::TakeBack(Batch* batch) {
  batch->kept = false;
  --DeviceOf(*batch).kept;
  --kept_;
  if (batch->state != Batch::State::kKept) return;
  batch->state = Batch::State::kFree;
  ++DeviceOf(*batch).free;
}

void RunningBatches::Lose(int device) {
  devices_[static_cast<size_t>(device)].lost = true;
  slow_ -= std::exchange(devices_[static_cast<size_t>(device)].slow, 0);
  --devices_left_;
}

bool RunningBatches::IsLost(const Batch& batch) const {
  return lost(batch.device) || (batch.sharded && devices_left_ < static_cast<int>(devices_.size()));
}

void RunningBatches::ForEach(Batch::State state, absl::FunctionRef<void(Batch*)> visit) {
  for (Batch& batch : batches_) {
    if (batch.state == state) visit(&batch);
  }
}

std::optional<RunningBatch> RunningBatches::Oldest(int64_t now_ns) const {
  const Batch* oldest = nullptr;
  for (const Batch& batch : batches_) {
    if (batch.state == Batch::State::kRunning &&
        (oldest == nullptr || batch.taken_ns < oldest->taken_ns)) {
      oldest = &batch;
    }
  }
  if (oldest == nullptr) return std::nullopt;
  return RunningBatch{.op = oldest->key.op->name,
                      .rows = oldest->rows,
                      .age = absl::Nanoseconds(now_ns - oldest->taken_ns),
                      .device = oldest->device};
}

int64_t RunningBatches::slabs_in_use() const {
  return std::count_if(batches_.begin(), batches_.end(),
                       [](const Batch& batch) { return batch.state != Batch::State::kFree; });
}

int64_t RunningBatches::usable_slabs() const {
  return std::count_if(batches_.begin(), batches_.end(),
                       [this](const Batch& batch) { return !lost(batch.device); });
}

}  // namespace logitd::engine
