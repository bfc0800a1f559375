#include "server/metrics_page.h"

#include <iterator>
#include <utility>
#include <vector>

#include "prometheus/collectable.h"
#include "prometheus/gauge.h"
#include "prometheus/metric_family.h"
#include "prometheus/registry.h"
#include "prometheus/text_serializer.h"
#include "server/gpu_metrics.h"
#include "server/log/limited.h"
#include "server/process_metrics.h"

namespace logitd {
namespace {

prometheus::MetricFamily Counter(const char* name, const char* help) {
  return {.name = name, .help = help, .type = prometheus::MetricType::Counter};
}

void AddSample(prometheus::MetricFamily* family, double value,
               std::vector<prometheus::ClientMetric::Label> labels = {}) {
  prometheus::ClientMetric sample;
  sample.label = std::move(labels);
  sample.counter.value = value;
  family->metric.push_back(std::move(sample));
}

// The counters of the log, which counts before there are metrics.
prometheus::MetricFamily LogMetrics() {
  prometheus::MetricFamily family = Counter("logitd_log_lines_suppressed_total",
                                            "Log lines not written, because there were too many.");
  for (const log::Source source : log::kSources) {
    AddSample(&family, static_cast<double>(log::LimitOf(source).suppressed()),
              {{"source", std::string(log::Name(source))}});
  }
  return family;
}

void AddTraffic(const http2::Traffic& traffic, std::vector<prometheus::MetricFamily>* families) {
  families->push_back(Counter("logitd_received_bytes_total", "Bytes received on all connections."));
  AddSample(&families->back(), static_cast<double>(traffic.received));
  families->push_back(Counter("logitd_sent_bytes_total", "Bytes sent on all connections."));
  AddSample(&families->back(), static_cast<double>(traffic.sent));
  prometheus::MetricFamily& held = families->emplace_back();
  held.name = "logitd_connection_bytes";
  held.help = "Bytes that connections hold, beside messages that were admitted.";
  held.type = prometheus::MetricType::Gauge;
  held.metric.emplace_back().gauge.value = static_cast<double>(traffic.held);
}

void Append(std::vector<prometheus::MetricFamily> more,
            std::vector<prometheus::MetricFamily>* families) {
  families->insert(families->end(), std::make_move_iterator(more.begin()),
                   std::make_move_iterator(more.end()));
}

}  // namespace

std::function<std::string()> MakeMetricsPage(const engine::Metrics& metrics,
                                             std::shared_ptr<const ServerTraffic> traffic,
                                             std::string_view version,
                                             std::string_view transport_version,
                                             const std::vector<DeviceInfo>& devices) {
  prometheus::BuildGauge()
      .Name("logitd_build_info")
      .Help("1; the labels say what runs.")
      .Register(*metrics.registry())
      .Add({{"version", std::string(version)},
            {"grpc", std::string(transport_version)},
            {"backend", devices.front().backend}})
      .Set(1);
  std::shared_ptr<const GpuMetrics> gpu;
  if (!devices.front().pci_bus_id.empty()) gpu = GpuMetrics::Create(Nvml::Load(), devices);
  return [page = metrics.page(), traffic = std::move(traffic), gpu = std::move(gpu)] {
    std::vector<prometheus::MetricFamily> families = page->Collect();
    families.push_back(LogMetrics());
    AddTraffic(traffic->Get(), &families);
    Append(ProcessMetrics(), &families);
    if (gpu != nullptr) Append(gpu->Collect(), &families);
    return prometheus::TextSerializer().Serialize(families);
  };
}

}  // namespace logitd
