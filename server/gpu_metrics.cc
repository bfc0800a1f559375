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

prometheus::MetricFamily Gauge(const char* name, const char* help, double value) {
  prometheus::ClientMetric sample;
  sample.gauge.value = value;
  return {.name = name,
          .help = help,
          .type = prometheus::MetricType::Gauge,
          .metric = {std::move(sample)}};
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
                                               const std::string& pci_bus_id) {
  void* device = nullptr;
  if (!nvml.has_value() || pci_bus_id.empty() || nvml->init() != 0 ||
      nvml->device_by_pci(pci_bus_id.c_str(), &device) != 0) {
    return nullptr;
  }
  return std::unique_ptr<GpuMetrics>(new GpuMetrics(*nvml, device));
}

std::vector<prometheus::MetricFamily> GpuMetrics::Collect() const {
  std::vector<prometheus::MetricFamily> families;
  if (Nvml::Memory memory = {}; nvml_.memory(device_, &memory) == 0) {
    families.push_back(Gauge("logitd_device_memory_bytes", "Memory of the GPU.",
                             static_cast<double>(memory.total)));
    families.push_back(Gauge("logitd_device_memory_used_bytes",
                             "Memory of the GPU in use, by all processes.",
                             static_cast<double>(memory.used)));
  }
  if (Nvml::Utilization busy = {}; nvml_.utilization(device_, &busy) == 0) {
    families.push_back(Gauge("logitd_device_utilization",
                             "Share of time in which a kernel ran, by all processes.",
                             static_cast<double>(busy.gpu) / 100));
  }
  return families;
}

}  // namespace logitd
