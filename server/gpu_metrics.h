// Metrics of the GPUs from their driver: their memory and how busy they are.
#ifndef LOGITD_SERVER_GPU_METRICS_H_
#define LOGITD_SERVER_GPU_METRICS_H_

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "kernels/backend.h"
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

//   logitd_device_memory_bytes{device}, logitd_device_memory_used_bytes{device}  of all processes
//   logitd_device_utilization{device}  0..1: time with a kernel running
// The label is DeviceInfo::number. Thread-safe.
class GpuMetrics {
 public:
  // Metrics of the devices that have a PCI bus id and that NVML knows. Null: there is none.
  static std::unique_ptr<GpuMetrics> Create(const std::optional<Nvml>& nvml,
                                            const std::vector<DeviceInfo>& devices);

  // Leaves out what the driver does not report: a part of a GPU (MIG) has no utilization.
  std::vector<prometheus::MetricFamily> Collect() const;

 private:
  struct Gpu {
    std::string number;
    void* handle;
  };
  GpuMetrics(const Nvml& nvml, std::vector<Gpu> gpus) : nvml_(nvml), gpus_(std::move(gpus)) {}

  const Nvml nvml_;
  const std::vector<Gpu> gpus_;
};

}  // namespace logitd

#endif  // LOGITD_SERVER_GPU_METRICS_H_
