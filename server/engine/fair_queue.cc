#include "server/engine/fair_queue.h"

#include <algorithm>

namespace logitd::engine {
namespace {

// Fewer accounts than this are not worth a search for those to forget.
constexpr size_t kFewAccounts = 64;

// Accounts beyond this are forgotten even if their work is not served yet.
constexpr size_t kMaxAccounts = size_t{1} << 16;

}  // namespace

double FairClock::Arrive(const Caller& caller, bool is_long, double cost_ns) {
  if (ends_.size() >= forget_at_) Forget();
  double& end = ends_[{caller.id, caller.priority, is_long}];
  const double start = std::max(now_, end);
  end = start + cost_ns / caller.weight;
  latest_ = std::max(latest_, end);
  return start;
}

void FairClock::Serve(double start) { now_ = std::max(now_, start); }

void FairClock::Correct(const Caller& caller, bool is_long, double by_ns) {
  const auto it = ends_.find({caller.id, caller.priority, is_long});
  if (it == ends_.end()) return;
  it->second += by_ns / caller.weight;
  latest_ = std::max(latest_, it->second);
}

void FairClock::Forget() {
  absl::erase_if(ends_, [this](const auto& entry) { return entry.second <= now_; });
  if (ends_.size() >= kMaxAccounts) ends_.clear();
  forget_at_ = std::max(kFewAccounts, 2 * ends_.size());
}

}  // namespace logitd::engine
