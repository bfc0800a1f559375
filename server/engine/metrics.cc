#include "server/engine/metrics.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <deque>
#include <iterator>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/synchronization/mutex.h"
#include "prometheus/collectable.h"
#include "prometheus/counter.h"
#include "prometheus/family.h"
#include "prometheus/gauge.h"
#include "prometheus/histogram.h"
#include "prometheus/metric_family.h"
#include "prometheus/registry.h"
#include "server/engine/sharded_counts.h"

namespace logitd::engine {
namespace {

using prometheus::Counter;

constexpr size_t kCodes = 17;  // absl::StatusCode::kOk .. kUnauthenticated

// In the order of Refusal.
constexpr const char* kRefusals[] = {
    "draining",     "deadline",    "line_full",   "too_large",        "invalid",    "caller_share",
    "slow_receive", "hopeless",    "overloaded",  "unauthenticated",  "role",       "quota_bytes",
    "quota_rows",   "quota_calls", "header_list", "connection_bytes", "early_bytes"};
static_assert(std::size(kRefusals) == static_cast<size_t>(Refusal::kEarlyBytes) + 1);

// In the order of Proof.
constexpr const char* kProofs[] = {"none", "token", "certificate", "user"};
static_assert(std::size(kProofs) == static_cast<size_t>(Proof::kUser) + 1);

struct Help {
  const char* name;
  const char* text;
};

// In the order of Gauge.
constexpr Help kGauges[] = {
    {"logitd_held_bytes", "Host memory charged to calls."},
    {"logitd_held_bytes_limit", "Most host memory that may be charged to calls."},
    {"logitd_waiting_calls", "Calls left unread until host memory is free, or their turn comes."},
    {"logitd_queued_jobs", "Jobs that wait for a stream."},
    {"logitd_slabs_in_use", "Slabs that hold a batch."},
    {"logitd_slabs", "All slabs."},
    {"logitd_slabs_kept", "Slabs in use whose answer is still being sent."},
    {"logitd_heads", "Heads loaded."},
    {"logitd_head_bytes",
     "Memory of heads on all devices: loading, loaded, and unloaded ones that jobs still use."},
    {"logitd_open_calls", "Calls of ops that are not over."},
    {"logitd_open_streams", "Open calls that are streams."},
    {"logitd_predicted_delay_seconds",
     "Predicted time of the last call, from when its size is known to its end."},
    {"logitd_draining", "1 from the start of the drain."},
};
static_assert(std::size(kGauges) == static_cast<size_t>(Gauge::kDraining) + 1);

constexpr Help kHeadUpdates = {"logitd_head_updates_total", "Updates of heads, by status."};
constexpr Help kHeadUpdateSeconds = {"logitd_head_update_seconds",
                                     "Time of an update of a head that succeeded."};
constexpr Help kHeadVersion = {"logitd_head_version", "Version of each head that is loaded."};

// In the order of CallPhase.
constexpr Help kPhases[] = {
    {"logitd_admission_wait_seconds", "From when a call asks for room until its message may come."},
    {"logitd_receive_seconds", "From headers until the message is there, without that wait."},
    {"logitd_send_seconds", "From the answer of a unary call until the transport has sent it."},
};

// One series for each op.
enum OpCounter : size_t { kRows, kBatches, kSlices, kBusySeconds, kStopped };
constexpr Help kOpCounters[] = {
    {"logitd_rows_total", "Rows computed."},
    {"logitd_batches_total", "Batches computed."},
    {"logitd_slices_total", "Slices computed."},
    {"logitd_stream_busy_seconds_total", "Time that streams spent on slices."},
    {"logitd_stopped_total", "Requests that ended between slices of their batch."},
};
constexpr Help kOpSeconds[] = {
    {"logitd_request_seconds", "Time of a call from its headers to its status."},
    {"logitd_batch_queue_seconds", "Wait of a batch's oldest job for a place and a stream."},
    {"logitd_batch_copy_seconds", "Copy of a batch's rows into its slab."},
    {"logitd_batch_h2d_seconds", "Host to device copy of a batch."},
    {"logitd_batch_kernel_seconds", "The op of a batch."},
    {"logitd_batch_d2h_seconds", "Device to host copy of a batch."},
};
// Those of kOpSeconds after the first.
constexpr int64_t JobTimes::*kBatchTimes[] = {&JobTimes::queue_ns, &JobTimes::copy_ns,
                                              &JobTimes::h2d_ns, &JobTimes::kernel_ns,
                                              &JobTimes::d2h_ns};
static_assert(std::size(kBatchTimes) + 1 == std::size(kOpSeconds));

// One series for each device.
enum DeviceCounter : size_t { kDeviceRows, kDeviceBusySeconds };
constexpr Help kDeviceCounters[] = {
    {"logitd_device_rows_total", "Rows computed."},
    {"logitd_device_busy_seconds_total", "Time that the device's streams spent on slices."},
};
enum DeviceGauge : size_t { kUp, kDeviceHeadBytes };
constexpr Help kDeviceGauges[] = {
    {"logitd_device_up", "1; 0: the device is lost."},
    {"logitd_device_head_bytes", "Memory of heads on the device, as in logitd_head_bytes."},
};

// Steps of 1, 2.5 and 5 from a microsecond (a kernel on one row) to ten seconds (a slow call).
constexpr double kSecondsBuckets[] = {1e-6, 2.5e-6, 5e-6,   1e-5, 2.5e-5, 5e-5,   1e-4, 2.5e-4,
                                      5e-4, 1e-3,   2.5e-3, 5e-3, 1e-2,   2.5e-2, 5e-2, 0.1,
                                      0.25, 0.5,    1,      2.5,  5,      10};
constexpr double kRowsBuckets[] = {1,   2,    4,    8,    16,   32,    64,    128,  256,
                                   512, 1024, 2048, 4096, 8192, 16384, 32768, 65536};

constexpr double kNanos = 1e9;

// A histogram of Prometheus whose observations wait in shards until Flush.
class Histogram {
 public:
  // `sum_units`: a value of 1 in the shards' sums of integers.
  Histogram(prometheus::Registry& registry, const Help& help, const prometheus::Labels& labels = {},
            absl::Span<const double> buckets = kSecondsBuckets, double sum_units = kNanos)
      : buckets_(buckets),
        sum_units_(sum_units),
        published_(
            prometheus::BuildHistogram().Name(help.name).Help(help.text).Register(registry).Add(
                labels, prometheus::Histogram::BucketBoundaries(buckets.begin(), buckets.end()))) {}

  void Observe(double value) {
    const auto bucket = std::lower_bound(buckets_.begin(), buckets_.end(), value);
    counts_.Add(static_cast<size_t>(bucket - buckets_.begin()), 1);
    counts_.Add(kSum, static_cast<int64_t>(value * sum_units_));
  }

  void Flush() {
    std::vector<double> more(buckets_.size() + 1);
    for (size_t i = 0; i < more.size(); ++i) more[i] = static_cast<double>(counts_.Take(i));
    published_.ObserveMultiple(more, static_cast<double>(counts_.Take(kSum)) / sum_units_);
  }

 private:
  static constexpr size_t kSum = std::size(kSecondsBuckets) + 1;  // after the buckets' counts
  const absl::Span<const double> buckets_;
  const double sum_units_;
  prometheus::Histogram& published_;
  ShardedCounts<kSum + 1> counts_;
};
static_assert(std::size(kRowsBuckets) <= std::size(kSecondsBuckets));

Counter& AddCounter(prometheus::Registry& registry, const Help& help,
                    const prometheus::Labels& labels) {
  return prometheus::BuildCounter().Name(help.name).Help(help.text).Register(registry).Add(labels);
}

prometheus::Gauge& AddGauge(prometheus::Registry& registry, const Help& help,
                            const prometheus::Labels& labels = {}) {
  return prometheus::BuildGauge().Name(help.name).Help(help.text).Register(registry).Add(labels);
}

struct OpSeries {
  OpSeries(prometheus::Registry& registry, std::string_view op_name) : op(op_name) {
    const prometheus::Labels labels = {{"op", op}};
    for (const Help& help : kOpCounters) counters.push_back(&AddCounter(registry, help, labels));
    for (const Help& help : kOpSeconds) seconds.emplace_back(registry, help, labels);
    for (size_t code = 0; code < kCodes; ++code) {
      const std::string name = absl::StatusCodeToString(static_cast<absl::StatusCode>(code));
      requests.push_back(&AddCounter(registry,
                                     {"logitd_requests_total", "Calls ended, by op and status."},
                                     {{"op", op}, {"code", name}}));
    }
  }

  void Flush() {
    for (size_t code = 0; code < kCodes; ++code) {
      requests[code]->Increment(static_cast<double>(ended.Take(code)));
    }
    for (Histogram& histogram : seconds) histogram.Flush();
  }

  const std::string op;
  std::vector<Counter*> counters;  // by OpCounter
  std::deque<Histogram> seconds;   // as kOpSeconds
  std::vector<Counter*> requests;  // by code
  ShardedCounts<kCodes> ended;     // by code, since the last Flush
};

struct DeviceSeries {
  DeviceSeries(prometheus::Registry& registry, const std::string& device) {
    const prometheus::Labels labels = {{"device", device}};
    for (const Help& help : kDeviceCounters) {
      counters.push_back(&AddCounter(registry, help, labels));
    }
    for (const Help& help : kDeviceGauges) gauges.push_back(&AddGauge(registry, help, labels));
    for (const char* kind : {"batch", "lost"}) {
      errors.push_back(&AddCounter(registry,
                                   {"logitd_device_errors_total", "Batches the device failed."},
                                   {{"device", device}, {"kind", kind}}));
    }
    gauges[kUp]->Set(1);
  }

  std::vector<Counter*> counters;          // by DeviceCounter
  std::vector<prometheus::Gauge*> gauges;  // by DeviceGauge
  std::vector<Counter*> errors;            // batch, lost
};

}  // namespace

struct Metrics::Series final : prometheus::Collectable {
  Series(std::shared_ptr<prometheus::Registry> all, absl::Span<const std::string_view> op_names,
         absl::Span<const int> device_numbers)
      : published(std::move(all)),
        batch_rows(*published, {"logitd_batch_rows", "Rows of a batch."}, {}, kRowsBuckets,
                   /*sum_units=*/1),
        head_update_seconds(*published, kHeadUpdateSeconds),
        head_versions(prometheus::BuildGauge()
                          .Name(kHeadVersion.name)
                          .Help(kHeadVersion.text)
                          .Register(*published)) {
    prometheus::Registry& registry = *published;
    for (const int number : device_numbers) devices.emplace_back(registry, std::to_string(number));
    for (const Help& help : kGauges) gauges.push_back(&AddGauge(registry, help));
    for (const Help& help : kPhases) phases.emplace_back(registry, help);
    for (const char* reason : kRefusals) {
      for (const char* proof : kProofs) {
        refused.push_back(&AddCounter(registry,
                                      {"logitd_refused_total",
                                       "Calls refused before their payload was copied, by reason "
                                       "and by how the caller showed who it is."},
                                      {{"reason", reason}, {"identity", proof}}));
      }
    }
    for (std::string_view op : op_names) ops.emplace_back(registry, op);
    ops.emplace_back(registry, "unknown");
    for (size_t code = 0; code < kCodes; ++code) {
      head_updates.push_back(
          &AddCounter(registry, kHeadUpdates,
                      {{"code", absl::StatusCodeToString(static_cast<absl::StatusCode>(code))}}));
    }
  }

  OpSeries& Find(std::string_view op) {
    return *std::find_if(ops.begin(), std::prev(ops.end()),
                         [&](const OpSeries& series) { return series.op == op; });
  }

  std::vector<prometheus::MetricFamily> Collect() const override {
    absl::MutexLock lock(&collecting);
    batch_rows.Flush();
    head_update_seconds.Flush();
    for (Histogram& phase : phases) phase.Flush();
    for (OpSeries& op : ops) op.Flush();
    for (size_t i = 0; i < gauges.size(); ++i) gauges[i]->Set(ValueOf(i));
    return published->Collect();
  }

  double ValueOf(size_t gauge) const {
    return set[gauge].load(std::memory_order_relaxed) + static_cast<double>(added.Sum(gauge));
  }

  DeviceSeries& Of(int device) { return devices[static_cast<size_t>(device)]; }

  const std::shared_ptr<prometheus::Registry> published;
  // Held while counts move to `published`, where otherwise they would be nowhere for a moment.
  mutable absl::Mutex collecting;
  mutable Histogram batch_rows;
  std::vector<Counter*> head_updates;  // by code
  mutable Histogram head_update_seconds;
  prometheus::Family<prometheus::Gauge>& head_versions;
  std::vector<DeviceSeries> devices;
  std::vector<prometheus::Gauge*> gauges;
  // A gauge's value is the sum of both; each gauge uses one of them.
  std::array<std::atomic<double>, std::size(kGauges)> set = {};
  ShardedCounts<std::size(kGauges)> added;
  mutable std::deque<Histogram> phases;
  std::vector<Counter*> refused;     // by reason, then by proof
  mutable std::deque<OpSeries> ops;  // few, found by comparing; the last is "unknown"
};

Metrics::Metrics(absl::Span<const std::string_view> ops, absl::Span<const int> devices)
    : registry_(std::make_shared<prometheus::Registry>()),
      series_(std::make_shared<Series>(registry_, ops, devices)) {}

Metrics::~Metrics() = default;

std::shared_ptr<prometheus::Collectable> Metrics::page() const { return series_; }

void Metrics::CountRequest(std::string_view op, absl::StatusCode code, double seconds) {
  OpSeries& series = series_->Find(op);
  const auto index = static_cast<size_t>(code);  // a negative one is large
  series.ended.Add(index < kCodes ? index : static_cast<size_t>(absl::StatusCode::kUnknown), 1);
  series.seconds.front().Observe(seconds);
}

void Metrics::CountPhase(CallPhase phase, double seconds) {
  series_->phases[static_cast<size_t>(phase)].Observe(seconds);
}

void Metrics::CountRefused(Refusal reason, Proof proof) {
  const size_t first = static_cast<size_t>(reason) * std::size(kProofs);
  series_->refused[first + static_cast<size_t>(proof)]->Increment();
}

void Metrics::CountBatch(std::string_view op, const JobTimes& oldest) {
  OpSeries& series = series_->Find(op);
  series.counters[kBatches]->Increment();
  series.counters[kRows]->Increment(oldest.batch_rows);
  series_->batch_rows.Observe(oldest.batch_rows);
  for (size_t i = 0; i < std::size(kBatchTimes); ++i) {
    series.seconds[i + 1].Observe(static_cast<double>(oldest.*kBatchTimes[i]) / kNanos);
  }
}

void Metrics::CountSlice(std::string_view op, int device, int64_t rows, double seconds) {
  OpSeries& series = series_->Find(op);
  series.counters[kSlices]->Increment();
  series.counters[kBusySeconds]->Increment(seconds);
  const auto count = [&](DeviceSeries& of_device) {
    of_device.counters[kDeviceRows]->Increment(static_cast<double>(rows));
    of_device.counters[kDeviceBusySeconds]->Increment(seconds);
  };
  if (device != kAllDevices) return count(series_->Of(device));
  for (DeviceSeries& of_device : series_->devices) count(of_device);
}

void Metrics::CountStopped(std::string_view op) {
  series_->Find(op).counters[kStopped]->Increment();
}

void Metrics::CountDeviceError(int device, bool lost) {
  series_->Of(device).errors[lost ? 1 : 0]->Increment();
}

void Metrics::SetDeviceLost(int device) { series_->Of(device).gauges[kUp]->Set(0); }

void Metrics::CountHeadUpdate(absl::StatusCode code, double seconds) {
  series_->head_updates[static_cast<size_t>(code)]->Increment();
  if (code == absl::StatusCode::kOk) series_->head_update_seconds.Observe(seconds);
}

void Metrics::SetHeadVersion(const std::string& name, int64_t version) {
  prometheus::Gauge& gauge = series_->head_versions.Add({{"head", name}});
  gauge.Set(static_cast<double>(version));
  if (version == 0) series_->head_versions.Remove(&gauge);
}

void Metrics::AddHeadBytes(int device, int64_t change) {
  Add(Gauge::kHeadBytes, change);
  series_->Of(device).gauges[kDeviceHeadBytes]->Increment(static_cast<double>(change));
}

void Metrics::Set(Gauge gauge, double value) {
  series_->set[static_cast<size_t>(gauge)].store(value, std::memory_order_relaxed);
}

void Metrics::Add(Gauge gauge, int64_t change) {
  series_->added.Add(static_cast<size_t>(gauge), change);
}

int64_t Metrics::Get(Gauge gauge) const {
  return static_cast<int64_t>(series_->ValueOf(static_cast<size_t>(gauge)));
}

}  // namespace logitd::engine
