#include "server/watch_memory.h"

#include <malloc.h>

#include <algorithm>
#include <utility>

#include "absl/base/config.h"
#include "server/memory.h"

namespace logitd {
namespace {

// Memory of the process itself beyond its start: threads, and free memory that malloc keeps.
// AddressSanitizer keeps freed memory, and it and ThreadSanitizer keep shadows of all memory.
#if defined(ABSL_HAVE_ADDRESS_SANITIZER) || defined(ABSL_HAVE_THREAD_SANITIZER)
constexpr int64_t kProcessGrowth = int64_t{16} << 30;
#else
constexpr int64_t kProcessGrowth = int64_t{64} << 20;
#endif

}  // namespace

std::unique_ptr<MemoryWatch> WatchMemory(const Config& config, const engine::Devices& devices,
                                         int64_t base, const engine::Admission& admission,
                                         const engine::Metrics& metrics,
                                         std::shared_ptr<door::DoorMetrics> door_metrics,
                                         engine::Places* places, rpc::RpcServer* server) {
  const bool cpu = devices.info(0).backend == "cpu";
  const HostMemory most = MostHostMemory(config, cpu, devices.count(), /*max_head_bytes=*/0);
  const int64_t heads_at_start = metrics.Get(engine::Gauge::kHeadBytes);
  const auto device_growth = [=, &metrics]() -> int64_t {
    if (!cpu) return places->pinned();
    const int64_t heads = metrics.Get(engine::Gauge::kHeadBytes);
    const int64_t scratch = heads > 0 ? most.head_scratch : 0;
    return most.slabs + heads - heads_at_start + scratch;
  };
  const int64_t held = most.messages + most.connections + kProcessGrowth;
  const auto limit = [=] { return base + device_growth() + held; };
  return std::make_unique<MemoryWatch>(MemoryWatchOptions{
      .base = base,
      .allowed_growth = [=] { return limit() - base; },
      .held = [=, &admission] { return device_growth() + admission.held_bytes(); },
      .shed = [server](bool shed) { server->RefuseConnections(shed); },
      .saw = [=](int64_t resident) { door_metrics->SetResident(resident, limit()); },
      .give_back =
          [places] {
            malloc_trim(0);
            places->GiveBack();
          }});
}

}  // namespace logitd
