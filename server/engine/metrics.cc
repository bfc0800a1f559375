#include "server/engine/metrics.h"

#include <array>
#include <string>
#include <utility>
#include <vector>

#include "prometheus/counter.h"
#include "prometheus/family.h"
#include "prometheus/gauge.h"
#include "prometheus/histogram.h"
#include "prometheus/registry.h"

namespace logitd::engine {
namespace {

using prometheus::Counter;
using prometheus::Gauge;
using prometheus::Histogram;

constexpr int kCodes = 17;  // absl::StatusCode::kOk .. kUnauthenticated
constexpr int kRefusals = 5;
constexpr std::array<const char*, kRefusals> kRefusalNames = {"draining", "deadline", "line_full",
                                                              "too_large", "invalid"};

// 1-2.5-5 steps from a microsecond to ten seconds: a kernel on one row and a slow call both fall
// inside.
const Histogram::BucketBoundaries& SecondsBuckets() {
  static const auto& buckets = *new Histogram::BucketBoundaries{
      1e-6, 2.5e-6, 5e-6,   1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3,
      5e-3, 1e-2,   2.5e-2, 5e-2, 0.1,    0.25, 0.5,  1,      2.5,  5,    10};
  return buckets;
}

const Histogram::BucketBoundaries& RowsBuckets() {
  static const auto& buckets = *new Histogram::BucketBoundaries{
      1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536};
  return buckets;
}

Counter& AddCounter(prometheus::Registry& registry, const char* name, const char* help,
                    const prometheus::Labels& labels) {
  return prometheus::BuildCounter().Name(name).Help(help).Register(registry).Add(labels);
}

Gauge& AddGauge(prometheus::Registry& registry, const char* name, const char* help) {
  return prometheus::BuildGauge().Name(name).Help(help).Register(registry).Add({});
}

Histogram& AddHistogram(prometheus::Registry& registry, const char* name, const char* help,
                        const Histogram::BucketBoundaries& buckets,
                        const prometheus::Labels& labels = {}) {
  return prometheus::BuildHistogram().Name(name).Help(help).Register(registry).Add(labels, buckets);
}

struct OpSeries {
  OpSeries(prometheus::Registry& registry, std::string_view op_name)
      : op(op_name),
        rows(AddCounter(registry, "logitd_rows_total", "Rows computed.", {{"op", op}})),
        batches(AddCounter(registry, "logitd_batches_total", "Batches computed.", {{"op", op}})),
        seconds(AddHistogram(registry, "logitd_request_seconds",
                             "Time of a call from its headers to its status.", SecondsBuckets(),
                             {{"op", op}})) {
    for (int code = 0; code < kCodes; ++code) {
      requests[code] = &AddCounter(
          registry, "logitd_requests_total", "Calls ended, by op and status.",
          {{"op", op}, {"code", absl::StatusCodeToString(static_cast<absl::StatusCode>(code))}});
    }
  }

  std::string op;
  std::array<Counter*, kCodes> requests;
  Counter& rows;
  Counter& batches;
  Histogram& seconds;
};

}  // namespace

struct Metrics::Series {
  Series(prometheus::Registry& registry, absl::Span<const std::string_view> op_names)
      : device_errors_batch(AddCounter(registry, "logitd_device_errors_total",
                                       "Batches the device failed.", {{"kind", "batch"}})),
        device_errors_lost(AddCounter(registry, "logitd_device_errors_total",
                                      "Batches the device failed.", {{"kind", "lost"}})),
        held_bytes(AddGauge(registry, "logitd_held_bytes", "Host memory charged to calls.")),
        held_bytes_limit(AddGauge(registry, "logitd_held_bytes_limit",
                                  "Most host memory that may be charged to calls.")),
        waiting_calls(AddGauge(registry, "logitd_waiting_calls",
                               "Calls not yet read for want of host memory.")),
        queued_jobs(AddGauge(registry, "logitd_queued_jobs", "Jobs without a place in a slab.")),
        open_jobs(AddGauge(registry, "logitd_open_jobs",
                           "Jobs with a place in a batch that does not run yet.")),
        slabs_in_use(AddGauge(registry, "logitd_slabs_in_use", "Slabs that hold a batch.")),
        slabs(AddGauge(registry, "logitd_slabs", "Slabs there are.")),
        slabs_kept(
            AddGauge(registry, "logitd_slabs_kept", "Slabs that hold an answer on its way.")),
        heads(AddGauge(registry, "logitd_heads", "Heads loaded.")),
        head_bytes(AddGauge(registry, "logitd_head_bytes",
                            "Device memory of heads, those unloaded that jobs still use "
                            "included.")),
        draining(AddGauge(registry, "logitd_draining", "1 from the start of the drain.")),
        batch_rows(AddHistogram(registry, "logitd_batch_rows", "Rows of a batch.", RowsBuckets())),
        queue(AddHistogram(registry, "logitd_batch_queue_seconds",
                           "Wait of a batch's oldest job for a place and a stream.",
                           SecondsBuckets())),
        copy(AddHistogram(registry, "logitd_batch_copy_seconds",
                          "Copy of the payload of a batch's oldest job into its slab.",
                          SecondsBuckets())),
        h2d(AddHistogram(registry, "logitd_batch_h2d_seconds", "Host to device copy of a batch.",
                         SecondsBuckets())),
        kernel(AddHistogram(registry, "logitd_batch_kernel_seconds", "The op of a batch.",
                            SecondsBuckets())),
        d2h(AddHistogram(registry, "logitd_batch_d2h_seconds", "Device to host copy of a batch.",
                         SecondsBuckets())) {
    for (int i = 0; i < kRefusals; ++i) {
      refused[i] = &AddCounter(registry, "logitd_refused_total",
                               "Calls turned away before their payload was copied.",
                               {{"reason", kRefusalNames[i]}});
    }
    ops.reserve(op_names.size() + 1);
    for (std::string_view op : op_names) ops.emplace_back(registry, op);
    ops.emplace_back(registry, "unknown");
  }

  OpSeries& Find(std::string_view op) {
    for (OpSeries& series : ops) {
      if (series.op == op) return series;
    }
    return ops.back();
  }

  Counter& device_errors_batch;
  Counter& device_errors_lost;
  Gauge& held_bytes;
  Gauge& held_bytes_limit;
  Gauge& waiting_calls;
  Gauge& queued_jobs;
  Gauge& open_jobs;
  Gauge& slabs_in_use;
  Gauge& slabs;
  Gauge& slabs_kept;
  Gauge& heads;
  Gauge& head_bytes;
  Gauge& draining;
  Histogram& batch_rows;
  Histogram& queue;
  Histogram& copy;
  Histogram& h2d;
  Histogram& kernel;
  Histogram& d2h;
  std::array<Counter*, kRefusals> refused;
  std::vector<OpSeries> ops;  // a handful, found by comparing; the last is "unknown"
};

Metrics::Metrics(absl::Span<const std::string_view> ops)
    : registry_(std::make_shared<prometheus::Registry>()),
      series_(std::make_unique<Series>(*registry_, ops)) {}

Metrics::~Metrics() = default;

void Metrics::CountRequest(std::string_view op, absl::StatusCode code, double seconds) {
  OpSeries& series = series_->Find(op);
  const int index = static_cast<int>(code);
  const bool known = index >= 0 && index < kCodes;
  series.requests[known ? index : static_cast<int>(absl::StatusCode::kUnknown)]->Increment();
  series.seconds.Observe(seconds);
}

void Metrics::CountRefused(Refusal reason) {
  series_->refused[static_cast<int>(reason)]->Increment();
}

void Metrics::CountBatch(std::string_view op, const JobTimes& oldest) {
  OpSeries& series = series_->Find(op);
  series.batches.Increment();
  series.rows.Increment(oldest.batch_rows);
  series_->batch_rows.Observe(oldest.batch_rows);
  series_->queue.Observe(oldest.queue_ns * 1e-9);
  series_->copy.Observe(oldest.copy_ns * 1e-9);
  series_->h2d.Observe(oldest.h2d_ns * 1e-9);
  series_->kernel.Observe(oldest.kernel_ns * 1e-9);
  series_->d2h.Observe(oldest.d2h_ns * 1e-9);
}

void Metrics::CountDeviceError(bool lost) {
  (lost ? series_->device_errors_lost : series_->device_errors_batch).Increment();
}

void Metrics::SetHeldBytes(int64_t bytes) { series_->held_bytes.Set(bytes); }
void Metrics::SetHeldBytesLimit(int64_t bytes) { series_->held_bytes_limit.Set(bytes); }
void Metrics::SetWaitingCalls(int64_t calls) { series_->waiting_calls.Set(calls); }
void Metrics::SetQueuedJobs(int64_t jobs) { series_->queued_jobs.Set(jobs); }
void Metrics::SetOpenJobs(int64_t jobs) { series_->open_jobs.Set(jobs); }
void Metrics::SetSlabsInUse(int64_t slabs) { series_->slabs_in_use.Set(slabs); }
void Metrics::SetSlabs(int64_t slabs) { series_->slabs.Set(slabs); }
void Metrics::SetSlabsKept(int64_t slabs) { series_->slabs_kept.Set(slabs); }
void Metrics::SetHeads(int64_t heads) { series_->heads.Set(static_cast<double>(heads)); }
void Metrics::AddHeadBytes(int64_t bytes) {
  series_->head_bytes.Increment(static_cast<double>(bytes));
}
void Metrics::SetDraining(bool draining) { series_->draining.Set(draining ? 1 : 0); }

}  // namespace logitd::engine
