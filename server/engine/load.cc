#include "server/engine/load.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <string>
#include <utility>

#include "absl/strings/cord.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "server/engine/devices.h"
#include "server/engine/metrics.h"

namespace logitd::engine {
namespace {

constexpr char kRetryDelay[] = "logitd/retry-delay-ms";

// Cost of a call besides the op's own, in nanoseconds: rough, because slowness corrects it. What
// matters is the ratio between small and large calls.
constexpr double kCallCost = 100e3;
constexpr double kByteCost = 0.4;

// No estimate before so many calls.
constexpr int kMinSamples = 16;
// Calls with so little time that may be outstanding before there is an estimate. A flood must not keep
// a server that just started from ever finishing a call.
constexpr int kUnknownCalls = 256;
constexpr absl::Duration kUnknownTime = absl::Seconds(5);
constexpr absl::Duration kUnknownRetry = absl::Milliseconds(10);
// A sample of mean cost moves the estimate by 1/32, none by more than 1/8.
constexpr double kShare = 1.0 / 32;
constexpr double kMaxShare = 1.0 / 8;
// The farthest a sample may lie from the mean, as a logarithm.
constexpr double kMaxStep = 1.0;

// Deviations above the mean that a call must leave at its headers, and when its message is there:
// by then most of its cost is paid, and only calls that are late for sure are dropped.
constexpr double kHeaderMargin = 2.0;
constexpr double kArrivedMargin = 0.0;

// The part of its time that a call may take by prediction. The rest is for what the server does not
// see: its headers wait in the caller and in the socket before they are read.
constexpr double kUsableTime = 0.8;

// Up to so many active callers, one without outstanding calls is always let in.
constexpr size_t kFewCallers = 16;

// Where no call has ended for so long, one call in kProbeEvery is let in.
constexpr absl::Duration kStale = absl::Milliseconds(500);
constexpr absl::Duration kProbeEvery = absl::Milliseconds(100);

constexpr absl::Duration kMinRetry = absl::Milliseconds(1);

// A call with so much time may take more of it in a short line: a client that sends its next call when
// one has ended makes no long line, and must not be refused for ever after one wrong estimate.
constexpr absl::Duration kMuchTime = absl::Seconds(1);
constexpr double kShortTimeOfMuch = 0.1;

// So many outstanding calls of a caller are never too many for a short line: while one runs, another
// comes. With 1, and 8 callers on a core, threads slept and woke more often: 5% fewer calls.
constexpr int kShortLineFree = 2;

}  // namespace

absl::Status WithRetryDelay(absl::Status status, absl::Duration delay) {
  status.SetPayload(kRetryDelay, absl::Cord(absl::StrCat(absl::ToInt64Milliseconds(delay))));
  return status;
}

std::optional<absl::Duration> RetryDelayOf(const absl::Status& status) {
  const absl::optional<absl::Cord> payload = status.GetPayload(kRetryDelay);
  int64_t ms = 0;
  if (!payload.has_value() || !absl::SimpleAtoi(std::string(*payload), &ms)) return std::nullopt;
  return absl::Milliseconds(ms);
}

size_t WorkAhead::BucketOf(const Share& share, size_t priority) {
  const double work = static_cast<double>(share.work[priority]) / share.weight;
  return std::min<size_t>(std::bit_width(static_cast<uint64_t>(std::min(work, 9e18))), 63);
}

void WorkAhead::Move(Share* share, Priority priority, int64_t change) {
  const auto p = static_cast<size_t>(priority);
  if (share->work[p] > 0) {
    Bucket& from = buckets_[p][BucketOf(*share, p)];
    from.work -= share->work[p];
    if (--from.callers == 0) {
      from.weight = 0;
      used_[p] &= ~(uint64_t{1} << BucketOf(*share, p));
    } else {
      from.weight -= share->weight;
    }
  }
  share->work[p] += change;
  if (share->work[p] > 0) {
    Bucket& to = buckets_[p][BucketOf(*share, p)];
    to.work += share->work[p];
    to.weight += share->weight;
    ++to.callers;
    used_[p] |= uint64_t{1} << BucketOf(*share, p);
  }
}

void WorkAhead::Add(Share* share, Priority priority, int64_t cost) { Move(share, priority, cost); }

void WorkAhead::Remove(Share* share, Priority priority, int64_t cost) {
  Move(share, priority, -cost);
}

double WorkAhead::Of(const Share& share, Priority priority, int64_t cost) const {
  const auto p = static_cast<size_t>(priority);
  const double mine = static_cast<double>(share.work[p] + cost) / share.weight;
  double ahead = static_cast<double>(cost);
  for (uint64_t left = used_[p]; left != 0; left &= left - 1) {
    const Bucket& bucket = buckets_[p][static_cast<size_t>(std::countr_zero(left))];
    ahead += std::min(static_cast<double>(bucket.work), bucket.weight * mine);
  }
  if (priority == Priority::kBatch) {
    constexpr auto kFirst = static_cast<size_t>(Priority::kInteractive);
    for (uint64_t left = used_[kFirst]; left != 0; left &= left - 1) {
      ahead +=
          static_cast<double>(buckets_[kFirst][static_cast<size_t>(std::countr_zero(left))].work);
    }
  }
  return ahead;
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

Load::Load(const Costs* costs, Metrics* metrics, const Clock& clock, const Devices* devices,
           int short_calls)
    : costs_(costs),
      metrics_(metrics),
      clock_(clock),
      devices_(devices),
      short_calls_(short_calls) {}

int64_t Load::CostOf(const OpTraits& op, int64_t bytes) const {
  double cost = kCallCost + kByteCost * static_cast<double>(bytes);
  if (costs_ != nullptr) cost += absl::ToDoubleNanoseconds(costs_->OfCall(op, bytes));
  return static_cast<int64_t>(std::min(cost, 1e15));
}

double Load::Ahead(double all, int64_t cost) const {
  const int devices = devices_ == nullptr ? 1 : std::max(1, devices_->left());
  const auto own = static_cast<double>(cost);
  return own + (all - own) / devices;
}

std::string Load::Refused::Text() const {
  const int64_t retry_ms = absl::ToInt64Milliseconds(delay);
  switch (why) {
    case Why::kLate:
      return absl::StrCat("predicted ", got, " ms, the deadline leaves ", allowed,
                          " ms; retry after ", retry_ms, " ms");
    case Why::kLongLine:
      return absl::StrCat("predicted ", got, " ms, allowed ", allowed,
                          " ms while more calls come than can be done; retry after ", retry_ms,
                          " ms");
    case Why::kUnknown:
      break;
  }
  return absl::StrCat(got, " calls are not over, allowed ", allowed,
                      " before the first calls have shown how long they take; retry after ",
                      retry_ms, " ms");
}

absl::Status Load::Refused::ToStatus() const {
  return WithRetryDelay(absl::ResourceExhaustedError(Text()), delay);
}

Load::Refused Load::Hopeless(absl::Duration predicted, absl::Duration left) {
  return {.why = Refused::Why::kLate,
          .reason = Refusal::kHopeless,
          .got = absl::ToInt64Milliseconds(predicted),
          .allowed = absl::ToInt64Milliseconds(left),
          .delay = std::max(kMinRetry, predicted - std::max(left, kMinRetry))};
}

Load::Refused Load::Unknown(int calls) {
  return {.why = Refused::Why::kUnknown,
          .reason = Refusal::kOverloaded,
          .got = calls,
          .allowed = kUnknownCalls,
          .delay = kUnknownRetry};
}

void Load::Shorten(uint64_t caller, absl::Time now, absl::Duration left) {
  if (now - shortened_swept_ > kShortLine) {
    shortened_swept_ = now;
    absl::erase_if(shortened_, [now](const auto& entry) { return entry.second.until <= now; });
  }
  Shortened& line = shortened_[caller];
  // A refused call that came late must not let the calls that came in time wait longer.
  line.below = now < line.until ? std::max(line.below, left * 2) : left * 2;
  line.until = now + kShortLine;
}

bool Load::IsShort(uint64_t caller, int calls, absl::Time now, absl::Duration left) const {
  const auto line = shortened_.find(caller);
  return line != shortened_.end() && now < line->second.until && left < line->second.below &&
         calls >= kShortLineFree;
}

Load::Refused Load::TooLong(absl::Duration predicted, absl::Duration allowed) {
  return {.why = Refused::Why::kLongLine,
          .reason = Refusal::kOverloaded,
          .got = absl::ToInt64Milliseconds(predicted),
          .allowed = absl::ToInt64Milliseconds(allowed),
          .delay = std::max(kMinRetry, predicted - allowed)};
}

Load::Decision Load::Decide(const Call& call, absl::Time now) {
  Decision decision;
  if (call.bytes.has_value()) {
    decision.bytes = *call.bytes;
  } else if (const auto mean = mean_bytes_.find(call.op); mean != mean_bytes_.end()) {
    decision.bytes = static_cast<int64_t>(mean->second);
  }
  decision.cost = CostOf(*call.op, decision.bytes);
  const auto cost = static_cast<double>(decision.cost);
  const auto known = callers_.find(call.caller.id);
  const bool active = known != callers_.end();
  WorkAhead::Share share;
  share.weight = call.caller.weight;
  if (active) share = known->second.share[kCall];
  const int calls = active ? known->second.calls : 0;
  const size_t callers = callers_.size() + (active ? 0 : 1);
  const Priority priority = call.caller.priority;
  const auto all = ahead_[kCall].Of(share, priority, decision.cost);
  decision.ahead = Ahead(all, decision.cost);

  const absl::Duration left = call.deadline - now;
  const std::optional<double> predicted = slowness_[kCall].Predict(decision.ahead, kHeaderMargin);
  if (!predicted.has_value()) {
    if (left < kUnknownTime && calls_ >= kUnknownCalls) {
      decision.refused = Unknown(calls_);
    }
    return decision;
  }
  if (metrics_ != nullptr) metrics_->Set(Gauge::kPredictedDelay, *predicted * 1e-9);
  const absl::Duration takes = absl::Nanoseconds(*predicted);
  const bool light = calls == 0 && callers <= kFewCallers;
  if (call.deadline != absl::InfiniteFuture() && !light && takes > left * kUsableTime) {
    decision.probe = now - last_end_ > kStale && now - last_probe_ > kProbeEvery;
    if (decision.probe) return decision;
    Shorten(call.caller.id, now, left);
    decision.refused = Hopeless(takes / kUsableTime, left);
    return decision;
  }
  if (!IsShort(call.caller.id, calls, now, left)) return decision;
  // A small call may wait for as many of the caller's large ones as a large one may.
  const double usual = static_cast<double>(share.work[static_cast<size_t>(priority)]) / calls;
  const double alone = *slowness_[kCall].Predict(std::max(cost, usual), kHeaderMargin);
  const double part = left < kMuchTime ? kShortTime : kShortTimeOfMuch;
  const absl::Duration allowed = std::max(left * part, absl::Nanoseconds(alone) * short_calls_);
  if (takes > allowed) {
    Shorten(call.caller.id, now, left);
    decision.refused = TooLong(takes, allowed);
  }
  return decision;
}

absl::Status Load::Begin(const Call& call, Work* work) {
  const absl::Time now = clock_.Now();
  MutexLock lock(mutex_);
  const Decision decision = Decide(call, now);
  if (decision.refused.has_value()) {
    if (metrics_ != nullptr) metrics_->CountRefused(decision.refused->reason, call.caller.proof);
    return decision.refused->ToStatus();
  }
  if (decision.probe) last_probe_ = now;
  CallerWork& caller = callers_[call.caller.id];
  if (caller.calls == 0) {
    for (WorkAhead::Share& share : caller.share) share.weight = call.caller.weight;
  }
  ++calls_;
  ++caller.calls;
  ahead_[kCall].Add(&caller.share[kCall], call.caller.priority, decision.cost);
  work->load_ = this;
  work->caller_ = call.caller;
  work->op_ = call.op;
  work->deadline_ = call.deadline;
  work->expected_bytes_ = decision.bytes;
  work->stated_ = call.bytes.has_value();
  work->received_ = call.received;
  work->cost_ = {decision.cost, 0};
  work->ahead_ = {decision.ahead, 0};
  work->since_ = {now, now};
  return absl::OkStatus();
}

absl::Status Load::Arrived(Work* work, int64_t message_bytes, const JobSpec& spec) {
  const absl::Time now = clock_.Now();
  const int64_t cost = CostOf(*work->op_, message_bytes);
  const int64_t job_cost = std::max<int64_t>(
      costs_ == nullptr ? 0 : absl::ToInt64Nanoseconds(costs_->OfJob(spec)), cost / 4);
  MutexLock lock(mutex_);
  if (!work->stated_) {
    const auto bytes = static_cast<double>(message_bytes);
    const auto [mean, first] = mean_bytes_.try_emplace(work->op_, bytes);
    mean->second += (bytes - mean->second) * kShare;
  }
  CallerWork& caller = callers_[work->caller_.id];
  const Priority priority = work->caller_.priority;
  // From here on the true size counts.
  if (cost != work->cost_[kCall]) {
    ahead_[kCall].Remove(&caller.share[kCall], priority, work->cost_[kCall]);
    ahead_[kCall].Add(&caller.share[kCall], priority, cost);
    work->cost_[kCall] = cost;
  }
  const double ahead = Ahead(ahead_[kJob].Of(caller.share[kJob], priority, job_cost), job_cost);
  work->arrived_ = true;
  work->cost_[kJob] = job_cost;
  work->ahead_[kJob] = ahead;
  work->since_[kJob] = now;
  const bool alone = caller.share[kJob].work[static_cast<size_t>(priority)] == 0;
  ahead_[kJob].Add(&caller.share[kJob], priority, job_cost);
  const std::optional<double> predicted = slowness_[kJob].Predict(ahead, kArrivedMargin);
  if (!predicted.has_value() || work->deadline_ == absl::InfiniteFuture() || alone) {
    return absl::OkStatus();
  }
  const absl::Duration takes = absl::Nanoseconds(*predicted);
  if (takes <= work->deadline_ - now) return absl::OkStatus();
  if (metrics_ != nullptr) metrics_->CountRefused(Refusal::kHopelessLate, work->caller_.proof);
  return Hopeless(takes, work->deadline_ - now).ToStatus();
}

void Load::End(Work* work, bool complete) {
  const absl::Time now = clock_.Now();
  MutexLock lock(mutex_);
  const auto it = callers_.find(work->caller_.id);
  CallerWork& caller = it->second;
  const Priority priority = work->caller_.priority;
  const int stages = work->arrived_ ? 2 : 1;
  for (int stage = 0; stage < stages; ++stage) {
    ahead_[stage].Remove(&caller.share[stage], priority, work->cost_[stage]);
    if (!work->arrived_ || (stage == kCall && work->received_)) continue;
    slowness_[stage].Sample(work->ahead_[stage],
                            absl::ToDoubleNanoseconds(now - work->since_[stage]),
                            static_cast<double>(work->cost_[stage]), complete);
  }
  if (complete) last_end_ = now;
  --calls_;
  if (--caller.calls == 0) callers_.erase(it);
}

int Load::callers() const {
  MutexLock lock(mutex_);
  return static_cast<int>(callers_.size());
}

std::optional<absl::Duration> Load::PredictNext() const {
  MutexLock lock(mutex_);
  const Slowness& slowness = slowness_[kCall];
  const auto cost = static_cast<int64_t>(slowness.mean_cost());
  const double ahead =
      Ahead(ahead_[kCall].Of(WorkAhead::Share(), Priority::kInteractive, cost), cost);
  const std::optional<double> predicted = slowness.Predict(ahead, /*deviations=*/0);
  if (!predicted.has_value()) return std::nullopt;
  return absl::Nanoseconds(*predicted);
}

Load::Work& Load::Work::operator=(Work&& other) noexcept {
  if (this != &other) {
    End(false);
    load_ = std::exchange(other.load_, nullptr);
    caller_ = other.caller_;
    op_ = other.op_;
    deadline_ = other.deadline_;
    expected_bytes_ = other.expected_bytes_;
    stated_ = other.stated_;
    received_ = other.received_;
    arrived_ = other.arrived_;
    cost_ = other.cost_;
    ahead_ = other.ahead_;
    since_ = other.since_;
  }
  return *this;
}

absl::Status Load::Work::Arrived(int64_t message_bytes, const JobSpec& spec) {
  return load_ == nullptr ? absl::OkStatus() : load_->Arrived(this, message_bytes, spec);
}

void Load::Work::End(bool complete) {
  if (load_ != nullptr) std::exchange(load_, nullptr)->End(this, complete);
}

}  // namespace logitd::engine
