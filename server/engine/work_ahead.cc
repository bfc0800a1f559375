#include "server/engine/work_ahead.h"

#include <algorithm>
#include <bit>
#include <cmath>

namespace logitd::engine {
namespace {

// No estimate before so many calls.
constexpr int kMinSamples = 16;
// A sample of mean cost moves the estimate by 1/32, none by more than 1/8.
constexpr double kShare = 1.0 / 32;
constexpr double kMaxShare = 1.0 / 8;
// The farthest a sample may lie from the mean, as a logarithm.
constexpr double kMaxStep = 1.0;

}  // namespace

void WorkAhead::Add(Share* share, Priority priority, int64_t cost) {
  const auto p = static_cast<size_t>(priority);
  int64_t& work = share->work[p];
  const auto count = [&](int callers) {
    if (work == 0) return;
    const double by_weight = std::min(static_cast<double>(work) / share->weight, 9e18);  // 63 bits
    const auto index = static_cast<size_t>(std::bit_width(static_cast<uint64_t>(by_weight)));
    Bucket& bucket = buckets_[p][index];
    bucket.work += callers * work;
    bucket.weight += callers * share->weight;
    bucket.callers += callers;
    if (bucket.callers > 0) {
      used_[p] |= uint64_t{1} << index;
    } else {
      used_[p] &= ~(uint64_t{1} << index);
      bucket.weight = 0;
    }
  };
  count(-1);
  work += cost;
  total_[p] += cost;
  count(1);
}

double WorkAhead::Of(const Share& share, Priority priority, int64_t cost) const {
  const auto p = static_cast<size_t>(priority);
  const double mine = static_cast<double>(share.work[p] + cost) / share.weight;
  double ahead = static_cast<double>(cost);
  for (uint64_t left = used_[p]; left != 0; left &= left - 1) {
    const Bucket& bucket = buckets_[p][static_cast<size_t>(std::countr_zero(left))];
    ahead += std::min(static_cast<double>(bucket.work), bucket.weight * mine);
  }
  if (priority == Priority::kInteractive) return ahead;
  return ahead + static_cast<double>(total_[static_cast<size_t>(Priority::kInteractive)]);
}

void Slowness::Sample(double ahead, double took, double cost, bool complete) {
  if (ahead <= 0 || took <= 0 || cost <= 0) return;
  const double ratio = std::log(took / ahead);
  if (samples_ == 0) {
    if (!complete) return;
    mean_ = ratio;
    mean_cost_ = cost;
  }
  if (!complete && ratio <= mean_) return;
  mean_cost_ += (cost - mean_cost_) * kShare;
  // The first samples count as in a plain mean.
  const double first = samples_ < 1 / kMaxShare ? 1.0 / (samples_ + 1) : 0.0;
  const double share = std::max(first, std::min(kMaxShare, kShare * cost / mean_cost_));
  const double step = std::clamp(ratio - mean_, -kMaxStep, kMaxStep);
  mean_ += share * step;
  deviation_ += share * (std::abs(step) - deviation_);
  samples_ = std::min(samples_ + 1, kMinSamples);
}

std::optional<double> Slowness::Predict(double ahead, double deviations) const {
  if (samples_ < kMinSamples) return std::nullopt;
  return ahead * std::exp(mean_ + deviations * deviation_);
}

}  // namespace logitd::engine
