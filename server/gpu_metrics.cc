#include "server/gpu_metrics.h"

#include <dlfcn.h>

#include <utility>

namespace logitd {
namespace {

template <typename Function>
bool Find(void* library, const char* name, Function* function) {
  *function = reinterpret_cast<Function>(dlsym(library, name));
  return *function != nullptr;
}

prometheus::MetricFamily Gauge(const char* name, const char* help) {
  return {.name = name, .help = help, .type = prometheus::MetricType::Gauge};
}

void AddSample(const std::string& device, double value, prometheus::MetricFamily* family) {
  prometheus::ClientMetric sample;
  sample.label = {{"device", device}};
  sample.gauge.value = value;
  family->metric.push_back(std::move(sample));
}

}  // namespace

std::optional<Nvml> Nvml::Load(const std::string& library) {
  void* const handle = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) return std::nullopt;
  Nvml nvml = {};
  if (Find(handle, "nvmlInit_v2", &nvml.init) &&
      Find(handle, "nvmlDeviceGetHandleByPciBusId_v2", &nvml.device_by_pci) &&
      Find(handle, "nvmlDeviceGetMemoryInfo", &nvml.memory) &&
      Find(handle, "nvmlDeviceGetUtilizationRates", &nvml.utilization)) {
    return nvml;
  }
  dlclose(handle);
  return std::nullopt;
}

std::unique_ptr<GpuMetrics> GpuMetrics::Create(const std::optional<Nvml>& nvml,
                                               const std::vector<DeviceInfo>& devices) {
  std::vector<Gpu> gpus;
  bool begun = false;
  for (const DeviceInfo& device : devices) {
    if (!nvml.has_value() || device.pci_bus_id.empty()) continue;
    if (!std::exchange(begun, true) && nvml->init() != 0) return nullptr;
    void* handle = nullptr;
    if (nvml->device_by_pci(device.pci_bus_id.c_str(), &handle) != 0) continue;
    gpus.push_back({std::to_string(device.number), handle});
  }
  if (gpus.empty()) return nullptr;
  return std::unique_ptr<GpuMetrics>(new GpuMetrics(*nvml, std::move(gpus)));
}

std::vector<prometheus::MetricFamily> GpuMetrics::Collect() const {
  prometheus::MetricFamily total = Gauge("logitd_device_memory_bytes", "Memory of the GPU.");
  prometheus::MetricFamily used =
      Gauge("logitd_device_memory_used_bytes", "Memory of the GPU in use, by all processes.");
  prometheus::MetricFamily busy =
      Gauge("logitd_device_utilization", "Share of time in which a kernel ran, by all processes.");
  for (const Gpu& gpu : gpus_) {
    if (Nvml::Memory memory = {}; nvml_.memory(gpu.handle, &memory) == 0) {
      AddSample(gpu.number, static_cast<double>(memory.total), &total);
      AddSample(gpu.number, static_cast<double>(memory.used), &used);
    }
    if (Nvml::Utilization share = {}; nvml_.utilization(gpu.handle, &share) == 0) {
      AddSample(gpu.number, static_cast<double>(share.gpu) / 100, &busy);
    }
  }
  std::vector<prometheus::MetricFamily> families;
  for (prometheus::MetricFamily* family : {&total, &used, &busy}) {
    if (!family->metric.empty()) families.push_back(std::move(*family));
  }
  return families;
}

}  // namespace logitd
