#include "server/engine/activity.h"

#include <algorithm>
#include <cmath>

namespace logitd::engine {
namespace {

double Memories(int64_t ns) {
  return static_cast<double>(ns) / absl::ToDoubleNanoseconds(Activity::kMemory);
}

// The weight of the `ns` that just passed.
double WeightOfLast(int64_t ns) { return -std::expm1(-Memories(std::max<int64_t>(ns, 0))); }

}  // namespace

Activity::Activity(int streams, absl::Span<const OpTraits* const> ops)
    : ops_(ops), streams_(static_cast<size_t>(streams)), means_(ops.size()) {}

void Activity::DecayTo(int64_t now_ns) {
  const double left = 1 - WeightOfLast(now_ns - at_ns_);
  at_ns_ = std::max(at_ns_, now_ns);
  for (Means& means : means_) {
    means.rows *= left;
    means.busy *= left;
  }
}

void Activity::Remove(int stream) {
  MutexLock lock(mutex_);
  streams_[static_cast<size_t>(stream)].removed = true;
}

void Activity::Begin(int stream, const OpTraits* op, int64_t now_ns, int as_many) {
  const auto named = std::find_if(ops_.begin(), ops_.end(),
                                  [op](const OpTraits* of) { return of->name == op->name; });
  const auto index = static_cast<size_t>(named - ops_.begin());
  MutexLock lock(mutex_);
  Running& running = streams_[static_cast<size_t>(stream)];
  running.op = index;
  running.begun_ns = now_ns;
  running.as_many = as_many;
}

void Activity::End(int stream, int64_t rows, int64_t now_ns) {
  MutexLock lock(mutex_);
  DecayTo(now_ns);
  Running& running = streams_[static_cast<size_t>(stream)];
  Means& means = means_[running.op];
  means.rows += static_cast<double>(rows);
  means.busy += running.as_many * WeightOfLast(now_ns - running.begun_ns);
  running.begun_ns = 0;
}

Activity::View Activity::Read(int64_t now_ns) const {
  MutexLock lock(mutex_);
  const double left = 1 - WeightOfLast(now_ns - at_ns_);
  const auto streams = static_cast<double>(
      std::max<int64_t>(1, std::count_if(streams_.begin(), streams_.end(),
                                         [](const Running& stream) { return !stream.removed; })));
  View view;
  view.ops.reserve(ops_.size());
  for (size_t i = 0; i < ops_.size(); ++i) {
    double busy = means_[i].busy * left;
    for (const Running& running : streams_) {
      if (running.begun_ns == 0 || running.op != i) continue;
      busy += running.as_many * WeightOfLast(now_ns - running.begun_ns);
    }
    view.ops.push_back({.op = ops_[i]->name,
                        .rows_per_s = means_[i].rows * left / absl::ToDoubleSeconds(kMemory),
                        .busy = busy / streams});
    view.busy += view.ops.back().busy;
  }
  view.busy = std::min(view.busy, 1.0);  // rounding, and slices beside one that counts as all
  return view;
}

absl::Duration Activity::Stalled(int64_t now_ns) const {
  MutexLock lock(mutex_);
  int64_t newest = 0;
  for (const Running& running : streams_) {
    if (running.removed) continue;
    if (running.begun_ns == 0) return absl::ZeroDuration();
    newest = std::max(newest, running.begun_ns);
  }
  if (newest == 0) return absl::ZeroDuration();
  return absl::Nanoseconds(std::max<int64_t>(now_ns - newest, 0));
}

}  // namespace logitd::engine
