#include "server/engine/costs.h"

#include <algorithm>

namespace logitd::engine {
namespace {

// Share of the past that stays when a slice is added.
constexpr double kMemory = 0.9;

// A slice counts at most so many times its kind's estimate.
constexpr double kMostOfEstimate = 16;

// Kinds kept. Clients choose vocabularies, so the number of kinds has a bound.
constexpr size_t kMaxKinds = 1024;

BatchKey KindOf(BatchKey key) {
  key.device = kAnyDevice;
  return key;
}

}  // namespace

void Costs::Average::Add(double ns, double of) {
  time_ns = time_ns * kMemory + ns;
  units = units * kMemory + of;
}

double Costs::Ran(const BatchKey& key, int64_t rows, int64_t payload_bytes, absl::Duration time) {
  double ns = absl::ToDoubleNanoseconds(time);
  MutexLock lock(mutex_);
  if (per_row_.size() >= kMaxKinds) per_row_.clear();
  Average& average = per_row_[KindOf(key)];
  const double estimate = average.PerUnit() * static_cast<double>(rows);
  if (estimate > 0) ns = std::min(ns, kMostOfEstimate * estimate);
  per_byte_[key.op].Add(ns, static_cast<double>(payload_bytes));
  average.Add(ns, static_cast<double>(rows));
  return average.PerUnit();
}

double Costs::PerRow(const BatchKey& key) const {
  MutexLock lock(mutex_);
  const auto kind = per_row_.find(KindOf(key));
  if (kind != per_row_.end()) return kind->second.PerUnit();
  const auto average = per_byte_.find(key.op);
  if (average == per_byte_.end()) return 0;
  return average->second.PerUnit() * static_cast<double>(key.row_elements) *
         static_cast<double>(SizeOf(key.dtype));
}

absl::Duration Costs::OfCall(const OpTraits& op, int64_t payload_bytes) const {
  MutexLock lock(mutex_);
  const auto average = per_byte_.find(&op);
  if (average == per_byte_.end()) return absl::ZeroDuration();
  return absl::Nanoseconds(average->second.PerUnit() * static_cast<double>(payload_bytes));
}

}  // namespace logitd::engine
