#include "server/engine/load.h"

#include <algorithm>
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

// Calls with so little time that may be outstanding before there is an estimate. A flood must not
// keep a server that just started from ever finishing a call.
constexpr int kUnknownCalls = 256;
constexpr absl::Duration kUnknownTime = absl::Seconds(5);
constexpr absl::Duration kUnknownRetry = absl::Milliseconds(10);

// Deviations above the mean that a prediction allows for.
constexpr double kMargin = 2.0;

// The part of its time that a call may take by prediction. The rest is for what the server does not
// see: its headers wait in the caller and in the socket before they are read.
constexpr double kUsableTime = 0.8;

// Up to so many active callers, one without outstanding calls is always let in.
constexpr size_t kFewCallers = 16;

// Where no call has ended for so long, one call in kProbeEvery is let in.
constexpr absl::Duration kStale = absl::Milliseconds(500);
constexpr absl::Duration kProbeEvery = absl::Milliseconds(100);

constexpr absl::Duration kMinRetry = absl::Milliseconds(1);

// A call with so much time may take more of it in a short line: a client that sends its next call
// when one has ended makes no long line, and must not be refused for ever after one wrong estimate.
constexpr absl::Duration kMuchTime = absl::Seconds(1);
constexpr double kShortTimeOfMuch = 0.1;

// A short line always holds this many calls of a caller: while one runs, another comes. With 1, and
// 8 callers on a core, threads slept and woke more often: 5% fewer calls.
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

absl::Status Load::Refuse(const Caller& caller, Refusal reason, const std::string& text,
                          absl::Duration delay) const {
  if (metrics_ != nullptr) metrics_->CountRefused(reason, caller.proof);
  delay = std::max(kMinRetry, delay);
  return WithRetryDelay(absl::ResourceExhaustedError(absl::StrCat(
                            text, "; retry after ", absl::ToInt64Milliseconds(delay), " ms")),
                        delay);
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

bool Load::IsShort(const Call& call, const CallerWork& caller, absl::Time now,
                   absl::Duration left) const {
  const auto line = shortened_.find(call.caller.id);
  return line != shortened_.end() && now < line->second.until && left < line->second.below &&
         caller.calls >= kShortLineFree;
}

// OK: the call may come.
absl::Status Load::Judge(const Call& call, const CallerWork& caller, int64_t cost, double ahead,
                         absl::Time now) {
  const absl::Duration left = call.deadline - now;
  const std::optional<double> predicted = slowness_.Predict(ahead, kMargin);
  if (!predicted.has_value()) {
    if (left >= kUnknownTime || calls_ < kUnknownCalls) return absl::OkStatus();
    return Refuse(call.caller, Refusal::kOverloaded,
                  absl::StrCat(calls_, " calls are not over, allowed ", kUnknownCalls,
                               " before the first calls have shown how long they take"),
                  kUnknownRetry);
  }
  if (metrics_ != nullptr) metrics_->Set(Gauge::kPredictedDelay, *predicted * 1e-9);
  const absl::Duration takes = absl::Nanoseconds(*predicted);
  const bool light = caller.calls == 0 && callers_.size() <= kFewCallers;
  if (!light && takes > left * kUsableTime) {
    if (now - last_end_ > kStale && now - last_probe_ > kProbeEvery) {
      last_probe_ = now;
      return absl::OkStatus();
    }
    Shorten(call.caller.id, now, left);
    const absl::Duration end = takes / kUsableTime;
    return Refuse(call.caller, Refusal::kHopeless,
                  absl::StrCat("predicted ", absl::ToInt64Milliseconds(end),
                               " ms, the deadline leaves ", absl::ToInt64Milliseconds(left), " ms"),
                  end - std::max(left, kMinRetry));
  }
  if (!IsShort(call, caller, now, left)) return absl::OkStatus();
  // A small call may wait for as many of the caller's large ones as a large one may.
  const auto priority = static_cast<size_t>(call.caller.priority);
  const double usual = static_cast<double>(caller.share.work[priority]) / caller.calls;
  const double alone = *slowness_.Predict(std::max(static_cast<double>(cost), usual), kMargin);
  const double part = left < kMuchTime ? kShortTime : kShortTimeOfMuch;
  const absl::Duration allowed = std::max(left * part, absl::Nanoseconds(alone) * short_calls_);
  if (takes <= allowed) return absl::OkStatus();
  Shorten(call.caller.id, now, left);
  return Refuse(call.caller, Refusal::kOverloaded,
                absl::StrCat("predicted ", absl::ToInt64Milliseconds(takes), " ms, allowed ",
                             absl::ToInt64Milliseconds(allowed),
                             " ms while more calls come than can be done"),
                takes - allowed);
}

absl::Status Load::Begin(const Call& call, Work* work) {
  const absl::Time now = clock_.Now();
  const int64_t cost = CostOf(*call.op, call.bytes);
  MutexLock lock(mutex_);
  const auto it = callers_.try_emplace(call.caller.id).first;
  CallerWork& caller = it->second;
  if (caller.calls == 0) caller.share.weight = call.caller.weight;
  const double all = ahead_.Of(caller.share, call.caller.priority, cost);
  const double ahead = Ahead(all, cost);
  absl::Status refusal = Judge(call, caller, cost, ahead, now);
  if (!refusal.ok()) {
    if (caller.calls == 0) callers_.erase(it);
    return refusal;
  }
  ++calls_;
  ++caller.calls;
  ahead_.Add(&caller.share, call.caller.priority, cost);
  work->data_ = {.load = this, .call = call, .cost = cost, .ahead = ahead, .since = now};
  return absl::OkStatus();
}

void Load::Arrived(Work::Data* work, int64_t bytes) {
  work->arrived = true;
  if (bytes == work->call.bytes) return;
  const int64_t cost = CostOf(*work->call.op, bytes);
  MutexLock lock(mutex_);
  ahead_.Add(&callers_.at(work->call.caller.id).share, work->call.caller.priority,
             cost - work->cost);
  work->ahead += static_cast<double>(cost - work->cost);  // what it takes is compared with it
  work->cost = cost;
}

void Load::End(const Work::Data& work, bool complete) {
  const absl::Time now = clock_.Now();
  MutexLock lock(mutex_);
  const auto it = callers_.find(work.call.caller.id);
  ahead_.Add(&it->second.share, work.call.caller.priority, -work.cost);
  if (work.arrived) {
    slowness_.Sample(work.ahead, absl::ToDoubleNanoseconds(now - work.since),
                     static_cast<double>(work.cost), complete);
  }
  if (complete) last_end_ = now;
  --calls_;
  if (--it->second.calls == 0) callers_.erase(it);
}

int Load::callers() const {
  MutexLock lock(mutex_);
  return static_cast<int>(callers_.size());
}

std::optional<absl::Duration> Load::PredictNext() const {
  MutexLock lock(mutex_);
  const auto cost = static_cast<int64_t>(slowness_.mean_cost());
  const double all = ahead_.Of(WorkAhead::Share(), Priority::kInteractive, cost);
  const std::optional<double> predicted = slowness_.Predict(Ahead(all, cost), /*deviations=*/0);
  if (!predicted.has_value()) return std::nullopt;
  return absl::Nanoseconds(*predicted);
}

void Load::Work::Arrived(int64_t bytes) {
  if (data_.load != nullptr) data_.load->Arrived(&data_, bytes);
}

void Load::Work::End(bool complete) {
  const Data data = std::exchange(data_, {});
  if (data.load != nullptr) data.load->End(data, complete);
}

}  // namespace logitd::engine
