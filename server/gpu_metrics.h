// What the driver knows of the GPU: its memory and how busy it is.
#ifndef LOGITD_SERVER_GPU_METRICS_H_
#define LOGITD_SERVER_GPU_METRICS_H_

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "prometheus/metric_family.h"

namespace logitd {

// The functions of NVML that we use. They have been in every version of it since 2013, and their
// types are written here, so that a build needs no header of it. 0 is success.
struct Nvml {
  struct Memory {  // nvmlMemory_t
    unsigned long long total, free, used;
  };
  struct Utilization {  // nvmlUtilization_t: percent of the driver's last sample period
    unsigned gpu, memory;
  };
  int (*init)();                                            // nvmlInit_v2
  int (*device_by_pci)(const char* bus_id, void** device);  // nvmlDeviceGetHandleByPciBusId_v2
  int (*memory)(void* device, Memory* out);                 // nvmlDeviceGetMemoryInfo
  int (*utilization)(void* device, Utilization* out);       // nvmlDeviceGetUtilizationRates

  // The functions of the driver's library, which stays loaded; nullopt where it is not installed.
  static std::optional<Nvml> Load(const std::string& library = "libnvidia-ml.so.1");
};

//   logitd_device_memory_bytes, logitd_device_memory_used_bytes  of all processes
//   logitd_device_utilization                                    0..1: time with a kernel running
// Thread-safe.
class GpuMetrics {
 public:
  // `pci_bus_id`: DeviceInfo's. Null: NVML does not know the device, or there is none.
  static std::unique_ptr<GpuMetrics> Create(const std::optional<Nvml>& nvml,
                                            const std::string& pci_bus_id);

  // What the driver does not tell (on a part of a GPU, it has no utilization) is left out.
  std::vector<prometheus::MetricFamily> Collect() const;

 private:
  GpuMetrics(const Nvml& nvml, void* device) : nvml_(nvml), device_(device) {}

  const Nvml nvml_;
  void* const device_;
};

}  // namespace logitd

#endif  // LOGITD_SERVER_GPU_METRICS_H_
