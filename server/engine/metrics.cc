#include "server/engine/metrics.h"

#include <algorithm>
#include <array>
#include <atomic>
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

constexpr int kCodes = 17;  // absl::StatusCode::kOk .. kUnauthenticated
constexpr int kRefusals = 17;
constexpr std::array<const char*, kRefusals> kRefusalNames = {
    "draining",     "deadline",    "line_full",   "too_large",        "invalid",    "caller_share",
    "slow_receive", "hopeless",    "overloaded",  "unauthenticated",  "role",       "quota_bytes",
    "quota_rows",   "quota_calls", "header_list", "connection_bytes", "early_bytes"};

// In the order of Proof.
constexpr std::array<const char*, 4> kProofNames = {"none", "token", "certificate", "user"};

struct Help {
  const char* name;
  const char* text;
};

constexpr Help kGauges[] = {
    // in the order of Gauge
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
    {"logitd_predicted_delay_seconds", "Predicted time of the last call from headers to its end."},
    {"logitd_draining", "1 from the start of the drain."},
};
static_assert(std::size(kGauges) == static_cast<size_t>(Gauge::kDraining) + 1);

struct BatchTime {
  Help help;
  int64_t JobTimes::*time;
};
constexpr BatchTime kBatchTimes[] = {
    {{"logitd_batch_queue_seconds", "Wait of a batch's oldest job for a place and a stream."},
     &JobTimes::queue_ns},
    {{"logitd_batch_copy_seconds", "Copy of a batch's rows into its slab."}, &JobTimes::copy_ns},
    {{"logitd_batch_h2d_seconds", "Host to device copy of a batch."}, &JobTimes::h2d_ns},
    {{"logitd_batch_kernel_seconds", "The op of a batch."}, &JobTimes::kernel_ns},
    {{"logitd_batch_d2h_seconds", "Device to host copy of a batch."}, &JobTimes::d2h_ns},
};

constexpr Help kPhases[] = {
    // in the order of CallPhase
    {"logitd_admission_wait_seconds", "From when a call asks for room until its message may come."},
    {"logitd_receive_seconds", "From headers until the message is there, without that wait."},
    {"logitd_send_seconds", "From the answer of a unary call until the transport has sent it."},
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
  Histogram(prometheus::Registry& registry, const char* name, const char* help,
            absl::Span<const double> buckets, double sum_units,
            const prometheus::Labels& labels = {})
      : buckets_(buckets),
        sum_units_(sum_units),
        published_(prometheus::BuildHistogram().Name(name).Help(help).Register(registry).Add(
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

Counter& AddCounter(prometheus::Registry& registry, const char* name, const char* help,
                    const prometheus::Labels& labels) {
  return prometheus::BuildCounter().Name(name).Help(help).Register(registry).Add(labels);
}

prometheus::Gauge& AddGauge(prometheus::Registry& registry, const char* name, const char* help,
                            const prometheus::Labels& labels = {}) {
  return prometheus::BuildGauge().Name(name).Help(help).Register(registry).Add(labels);
}

struct OpSeries {
  OpSeries(prometheus::Registry& registry, std::string_view op_name)
      : op(op_name),
        rows(AddCounter(registry, "logitd_rows_total", "Rows computed.", {{"op", op}})),
        batches(AddCounter(registry, "logitd_batches_total", "Batches computed.", {{"op", op}})),
        slices(AddCounter(registry, "logitd_slices_total", "Slices computed.", {{"op", op}})),
        busy(AddCounter(registry, "logitd_stream_busy_seconds_total",
                        "Time that streams spent on slices.", {{"op", op}})),
        stopped(AddCounter(registry, "logitd_stopped_total",
                           "Requests that ended between slices of their batch.", {{"op", op}})),
        seconds(registry, "logitd_request_seconds",
                "Time of a call from its headers to its status.", kSecondsBuckets, kNanos,
                {{"op", op}}) {
    for (int code = 0; code < kCodes; ++code) {
      requests[code] = &AddCounter(
          registry, "logitd_requests_total", "Calls ended, by op and status.",
          {{"op", op}, {"code", absl::StatusCodeToString(static_cast<absl::StatusCode>(code))}});
    }
    for (size_t i = 0; i < std::size(kBatchTimes); ++i) {
      const Help& help = kBatchTimes[i].help;
      batch_times[i] = std::make_unique<Histogram>(registry, help.name, help.text, kSecondsBuckets,
                                                   kNanos, prometheus::Labels{{"op", op}});
    }
  }

  void Flush() {
    for (size_t code = 0; code < kCodes; ++code) {
      requests[code]->Increment(static_cast<double>(ended.Take(code)));
    }
    seconds.Flush();
    for (const auto& times : batch_times) times->Flush();
  }

  std::string op;
  std::array<Counter*, kCodes> requests;
  Counter& rows;
  Counter& batches;
  Counter& slices;
  Counter& busy;
  Counter& stopped;
  ShardedCounts<kCodes> ended;  // by code, since the last Flush
  Histogram seconds;
  std::array<std::unique_ptr<Histogram>, std::size(kBatchTimes)> batch_times;
};

struct DeviceSeries {
  DeviceSeries(prometheus::Registry& registry, const std::string& device)
      : errors_batch(AddCounter(registry, "logitd_device_errors_total",
                                "Batches the device failed.",
                                {{"device", device}, {"kind", "batch"}})),
        errors_lost(AddCounter(registry, "logitd_device_errors_total", "Batches the device failed.",
                               {{"device", device}, {"kind", "lost"}})),
        rows(AddCounter(registry, "logitd_device_rows_total", "Rows computed.",
                        {{"device", device}})),
        busy(AddCounter(registry, "logitd_device_busy_seconds_total",
                        "Time that the device's streams spent on slices.", {{"device", device}})),
        up(AddGauge(registry, "logitd_device_up", "1; 0: the device is lost.",
                    {{"device", device}})),
        head_bytes(AddGauge(registry, "logitd_device_head_bytes",
                            "Memory of heads on the device, as in logitd_head_bytes.",
                            {{"device", device}})) {
    up.Set(1);
  }

  Counter& errors_batch;
  Counter& errors_lost;
  Counter& rows;
  Counter& busy;
  prometheus::Gauge& up;
  prometheus::Gauge& head_bytes;
};

}  // namespace

struct Metrics::Series final : prometheus::Collectable {
  Series(std::shared_ptr<prometheus::Registry> all, absl::Span<const std::string_view> op_names,
         absl::Span<const int> device_numbers)
      : published(std::move(all)),
        batch_rows(*published, "logitd_batch_rows", "Rows of a batch.", kRowsBuckets,
                   /*sum_units=*/1) {
    prometheus::Registry& registry = *published;
    devices.reserve(device_numbers.size());
    for (const int number : device_numbers) {
      devices.emplace_back(registry, std::to_string(number));
    }
    for (size_t i = 0; i < std::size(kGauges); ++i) {
      gauges[i] = &AddGauge(registry, kGauges[i].name, kGauges[i].text);
    }
    for (size_t i = 0; i < std::size(kPhases); ++i) {
      phases[i] = std::make_unique<Histogram>(registry, kPhases[i].name, kPhases[i].text,
                                              kSecondsBuckets, kNanos);
    }
    for (int i = 0; i < kRefusals; ++i) {
      for (size_t proof = 0; proof < kProofNames.size(); ++proof) {
        refused[i][proof] =
            &AddCounter(registry, "logitd_refused_total",
                        "Calls refused before their payload was copied, by reason and by how the "
                        "caller showed who it is.",
                        {{"reason", kRefusalNames[i]}, {"identity", kProofNames[proof]}});
      }
    }
    for (std::string_view op : op_names) ops.push_back(std::make_unique<OpSeries>(registry, op));
    ops.push_back(std::make_unique<OpSeries>(registry, "unknown"));
  }

  OpSeries& Find(std::string_view op) {
    for (const auto& series : ops) {
      if (series->op == op) return *series;
    }
    return *ops.back();
  }

  std::vector<prometheus::MetricFamily> Collect() const override {
    absl::MutexLock lock(&collecting);
    batch_rows.Flush();
    for (const auto& phase : phases) phase->Flush();
    for (const auto& op : ops) op->Flush();
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
  std::vector<DeviceSeries> devices;
  std::array<prometheus::Gauge*, std::size(kGauges)> gauges;
  // A gauge's value is the sum of both; each gauge uses one of them.
  std::array<std::atomic<double>, std::size(kGauges)> set = {};
  ShardedCounts<std::size(kGauges)> added;
  std::array<std::unique_ptr<Histogram>, std::size(kPhases)> phases;
  std::array<std::array<Counter*, kProofNames.size()>, kRefusals> refused;
  std::vector<std::unique_ptr<OpSeries>> ops;  // few, found by comparing; the last is "unknown"
};

Metrics::Metrics(absl::Span<const std::string_view> ops, absl::Span<const int> devices)
    : registry_(std::make_shared<prometheus::Registry>()),
      series_(std::make_shared<Series>(registry_, ops, devices)) {}

Metrics::~Metrics() = default;

std::shared_ptr<prometheus::Collectable> Metrics::page() const { return series_; }

void Metrics::CountRequest(std::string_view op, absl::StatusCode code, double seconds) {
  OpSeries& series = series_->Find(op);
  const int index = static_cast<int>(code);
  const bool known = index >= 0 && index < kCodes;
  series.ended.Add(
      static_cast<size_t>(known ? index : static_cast<int>(absl::StatusCode::kUnknown)), 1);
  series.seconds.Observe(seconds);
}

void Metrics::CountPhase(CallPhase phase, double seconds) {
  series_->phases[static_cast<size_t>(phase)]->Observe(seconds);
}

void Metrics::CountRefused(Refusal reason, Proof proof) {
  series_->refused[static_cast<int>(reason)][static_cast<size_t>(proof)]->Increment();
}

void Metrics::CountBatch(std::string_view op, const JobTimes& oldest) {
  OpSeries& series = series_->Find(op);
  series.batches.Increment();
  series.rows.Increment(oldest.batch_rows);
  series_->batch_rows.Observe(oldest.batch_rows);
  for (size_t i = 0; i < std::size(kBatchTimes); ++i) {
    series.batch_times[i]->Observe(static_cast<double>(oldest.*kBatchTimes[i].time) * 1e-9);
  }
}

void Metrics::CountSlice(std::string_view op, int device, int64_t rows, double seconds) {
  OpSeries& series = series_->Find(op);
  series.slices.Increment();
  series.busy.Increment(seconds);
  const auto count = [&](DeviceSeries& of_device) {
    of_device.rows.Increment(static_cast<double>(rows));
    of_device.busy.Increment(seconds);
  };
  if (device != kAllDevices) return count(series_->Of(device));
  for (DeviceSeries& of_device : series_->devices) count(of_device);
}

void Metrics::CountStopped(std::string_view op) { series_->Find(op).stopped.Increment(); }

void Metrics::CountDeviceError(int device, bool lost) {
  DeviceSeries& series = series_->Of(device);
  (lost ? series.errors_lost : series.errors_batch).Increment();
}

void Metrics::SetDeviceLost(int device) { series_->Of(device).up.Set(0); }

void Metrics::AddHeadBytes(int device, int64_t change) {
  Add(Gauge::kHeadBytes, change);
  series_->Of(device).head_bytes.Increment(static_cast<double>(change));
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
