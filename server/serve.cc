#include "server/serve.h"

#include <malloc.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "kernels/backend.h"
#include "kernels/status_macros.h"
#include "kernels/usable_cores.h"
#include "server/arena/arena_server.h"
#include "server/arena/leases.h"
#include "server/arena/page_remover.h"
#include "server/base/clock.h"
#include "server/device_arenas.h"
#include "server/door/door_metrics.h"
#include "server/door/watched_files.h"
#include "server/engine/activity.h"
#include "server/engine/admission.h"
#include "server/engine/devices.h"
#include "server/engine/engine.h"
#include "server/engine/heads.h"
#include "server/engine/metrics.h"
#include "server/engine/sync.h"
#include "server/entrances.h"
#include "server/events.h"
#include "server/exit.h"
#include "server/log.h"
#include "server/log/limited.h"
#include "server/memory.h"
#include "server/memory_watch.h"
#include "server/metrics_page.h"
#include "server/metrics_server.h"
#include "server/ops/ops.h"
#include "server/rpc/rpc_server.h"
#include "server/watch_memory.h"

namespace logitd {
namespace {

constexpr absl::Duration kPoll = absl::Milliseconds(10);
constexpr absl::Duration kLogReports = absl::Seconds(1);
// Messages that are received at the same time. Without this bound, half-received messages share the
// cores, and under overload many of them end too late.
constexpr int64_t kReceivingBytesPerCore = int64_t{4} << 20;
// The share of the grace for messages that are being received.
constexpr int64_t kReceiveShare = 10;
// Time for a running batch to end after the grace.
constexpr absl::Duration kLastBatch = absl::Seconds(5);

// The parts of the server, in the order in which they start. They are destroyed in the reverse
// order.
struct Parts {
  Events events;
  const int cores = UsableCores();
  int64_t max_connections = 0;

  // What computes.
  std::vector<std::unique_ptr<Backend>> backends;
  std::shared_ptr<engine::Devices> devices;
  std::unique_ptr<engine::Places> places;
  std::unique_ptr<engine::Metrics> metrics;
  std::unique_ptr<engine::Admission> admission;
  std::unique_ptr<engine::Heads> heads;
  std::unique_ptr<engine::Engine> engine;

  // What clients and operators use. Calls use leases until the server has ended.
  std::string head_root;
  std::shared_ptr<door::DoorMetrics> door_metrics;
  // Null before the server starts. The page of metrics asks it.
  std::shared_ptr<ServerTraffic> traffic = std::make_shared<ServerTraffic>();
  std::unique_ptr<MetricsServer> metrics_server;
  Door front_door;
  std::atomic<rpc::RpcServer*> rechecked = nullptr;  // after a change of the identities
  std::unique_ptr<door::WatchedFiles> files;
  std::unique_ptr<arena::PageRemover> page_remover;  // null without --arena-listen
  std::unique_ptr<arena::ArenaDevices> arena_devices;
  std::unique_ptr<arena::Leases> leases;
  std::unique_ptr<arena::ArenaServer> arenas;  // null without --arena-listen

  std::unique_ptr<rpc::RpcServer> server;
  std::unique_ptr<MemoryWatch> memory_watch;
};

// ---- before the start

// Answers of megabytes come and go: returning their memory to the system and faulting it in again
// each time takes as long as writing them. One arena for each core, because threads wait for each
// other in one that they share; no more, because one arena cannot use memory that another keeps
// free.
void TuneMalloc(int cores) {
  mallopt(M_ARENA_MAX, std::max(2, cores));
  mallopt(M_MMAP_THRESHOLD, 32 << 20);
  mallopt(M_TRIM_THRESHOLD, 256 << 20);
  mallopt(M_TOP_PAD, 16 << 20);
}

// Debian's Abseil looks for deadlocks at every lock. In a profile of refused calls that was 4 to 7%
// of the samples.
void TuneMutexes() { absl::SetMutexDeadlockDetectionMode(absl::OnDeadlockCycle::kIgnore); }

// Forks a process, so it comes before threads, devices and memory.
absl::Status StartPageRemover(const Config& config, Parts& parts) {
  if (config.arena_listen.empty()) return absl::OkStatus();
  absl::StatusOr<std::unique_ptr<arena::PageRemover>> remover = arena::PageRemover::Start();
  LOGITD_RETURN_IF_ERROR(remover.status());
  parts.page_remover = *std::move(remover);
  return absl::OkStatus();
}

// ---- what computes

std::shared_ptr<engine::Devices> DevicesOf(const std::vector<std::unique_ptr<Backend>>& backends,
                                           const ShardOptions& shards) {
  std::vector<Backend*> pointers;
  for (const std::unique_ptr<Backend>& backend : backends) pointers.push_back(backend.get());
  auto devices =
      std::make_shared<engine::Devices>(std::move(pointers), engine::NumaNodes(), shards);
  for (int i = 0; i < devices->count(); ++i) {
    const DeviceInfo& device = devices->info(i);
    const int node = devices->node(i);
    spdlog::info("backend {}: {}: {}, {} MiB{}", device.backend, devices->NameOf(i), device.name,
                 device.memory_bytes >> 20, node < 0 ? "" : absl::StrCat(", NUMA node ", node));
  }
  return devices;
}

std::vector<DeviceInfo> InfosOf(const engine::Devices& devices) {
  std::vector<DeviceInfo> infos;
  for (int i = 0; i < devices.count(); ++i) infos.push_back(devices.info(i));
  return infos;
}

std::vector<int> NumbersOf(const engine::Devices& devices) {
  std::vector<int> numbers;
  for (int i = 0; i < devices.count(); ++i) numbers.push_back(devices.info(i).number);
  return numbers;
}

// The most memory of heads on each device. On the CPU it is memory of the host, where more than
// there is ends the process instead of failing the load.
int64_t MaxHeadBytes(const Config& config, const engine::Devices& devices) {
  if (config.max_head_bytes > 0) return config.max_head_bytes;
  if (devices.info(0).backend != "cpu") return std::numeric_limits<int64_t>::max();
  return UsableMemory(MachineMemory()) / 2 / devices.count();
}

// Makes the devices, and the engine on them.
absl::Status StartEngine(const Config& config, MakeBackends make_backends, Parts& parts) {
  absl::StatusOr<std::vector<std::unique_ptr<Backend>>> backends = make_backends();
  LOGITD_RETURN_IF_ERROR(backends.status());
  parts.backends = *std::move(backends);
  parts.devices = DevicesOf(parts.backends, {.exchange = config.shard_exchange});
  parts.metrics = std::make_unique<engine::Metrics>(ops::AllNames(), NumbersOf(*parts.devices));
  parts.admission = std::make_unique<engine::Admission>(
      engine::AdmissionOptions{.max_request_bytes = rpc::MaxMessageBytes(config.max_request_bytes,
                                                                         config.max_batch_rows),
                               .max_held_bytes = config.max_held_bytes,
                               .max_waiting_calls = config.max_waiting_calls,
                               .min_receive_rate = config.min_receive_rate,
                               .max_receiving_bytes = kReceivingBytesPerCore * parts.cores,
                               .min_receiving_calls = std::max(2, parts.cores / 2)},
      parts.metrics.get());
  parts.heads = std::make_unique<engine::Heads>(parts.devices, parts.metrics.get(),
                                                MaxHeadBytes(config, *parts.devices),
                                                /*first_update=*/absl::ToUnixMicros(absl::Now()));
  absl::StatusOr<std::unique_ptr<engine::Engine>> engine = engine::Engine::Create(
      parts.devices,
      {.streams = config.streams,
       .slab_payload_bytes = config.slab_bytes,
       .slab_answer_bytes = config.slab_bytes,
       .max_batch_rows = config.max_batch_rows,
       .max_batch_delay = config.max_batch_delay,
       .ops = ops::AllTraits()},
      parts.metrics.get(), [&events = parts.events](const absl::Status& status) {
        spdlog::error("device lost: {}",
                      status.ToString(absl::StatusToStringMode::kWithNoExtraData));
        events.DeviceLost();
      });
  LOGITD_RETURN_IF_ERROR(engine.status());
  parts.engine = *std::move(engine);
  parts.places = std::make_unique<engine::Places>(
      *parts.devices, PlacesBytes(config, parts.devices->info(0).backend == "cpu"));
  spdlog::info(
      "limits: request {} B, held {} B, waiting calls {}, batch {} rows and {} B, devices {} with "
      "{} streams each, connections {}",
      config.max_request_bytes, config.max_held_bytes, config.max_waiting_calls,
      config.max_batch_rows, config.slab_bytes, parts.devices->count(), config.streams,
      parts.max_connections);
  return absl::OkStatus();
}

// Loads a head of --head, again where a device is lost while others are left.
absl::Status LoadHead(const engine::HeadRequest& request, const std::atomic<bool>& wanted,
                      engine::Heads* heads, engine::Engine* engine) {
  while (true) {
    const absl::Status status =
        heads->Load(request, [&](const engine::HeadProgress&) { return wanted.load(); }).status();
    if (!absl::IsInternal(status)) return status;
    engine->DeviceLost(status);
    if (engine->devices().left() == 0) return status;
  }
}

// Loads the heads of --head. A value: the process must end with it.
std::optional<int> LoadHeads(const Config& config, engine::Heads* heads, engine::Engine* engine,
                             Events* events) {
  if (config.heads.empty()) return std::nullopt;
  absl::Status status;
  std::atomic<bool> wanted = true;
  absl::Notification done;
  std::thread loads([&] {
    for (const engine::HeadRequest& request : config.heads) {
      status = LoadHead(request, wanted, heads, engine);
      if (!status.ok()) break;
    }
    done.Notify();
  });
  while (!done.HasBeenNotified()) {
    if (events->Wait(kPoll) != Events::kSignal) continue;
    wanted = false;
    if (!done.WaitForNotificationWithTimeout(config.drain_grace)) LeaveLoad();
  }
  loads.join();
  if (absl::IsInternal(status)) LeaveLostDevice();
  if (!wanted) {
    spdlog::info("a signal ended the process before it served");
    return EXIT_SUCCESS;
  }
  return status.ok() ? std::nullopt : std::optional<int>(CannotStart(status));
}

// ---- what clients use

std::vector<std::string_view> CutReasons() {
  std::vector<std::string_view> reasons;
  for (const http2::CutName& name : http2::kCutNames) reasons.push_back(name.name);
  return reasons;
}

absl::Status OpenEntrances(const Config& config, Parts& parts) {
  absl::StatusOr<std::string> head_root = ResolveHeadRoot(config);
  LOGITD_RETURN_IF_ERROR(head_root.status());
  parts.head_root = *std::move(head_root);
  parts.door_metrics = std::make_shared<door::DoorMetrics>(
      parts.metrics->registry(), parts.max_connections, config.max_connection_bytes, CutReasons());
  absl::StatusOr<std::unique_ptr<MetricsServer>> metrics_server =
      ServeMetrics(config, MakeMetricsPage(*parts.metrics, parts.traffic, Version(),
                                           TransportVersion(), InfosOf(*parts.devices)));
  LOGITD_RETURN_IF_ERROR(metrics_server.status());
  parts.metrics_server = *std::move(metrics_server);
  const auto recheck = [&rechecked = parts.rechecked] {
    if (rpc::RpcServer* const server = rechecked) server->RecheckIdentities();
  };
  LOGITD_RETURN_IF_ERROR(
      OpenDoor(config, parts.door_metrics, recheck, &parts.front_door, &parts.files));
  parts.arena_devices = MakeArenaDevices(parts.devices);
  parts.leases = std::make_unique<arena::Leases>(
      arena::LeaseLimits{.max_bytes = config.max_arena_bytes,
                         .max_leases = config.max_leases,
                         .max_device_bytes = config.max_device_arena_bytes},
      parts.arena_devices.get(), parts.page_remover.get());
  absl::StatusOr<std::unique_ptr<arena::ArenaServer>> arenas = ServeArenas(
      config, parts.front_door.identities.get(), parts.leases.get(), parts.metrics->registry());
  LOGITD_RETURN_IF_ERROR(arenas.status());
  parts.arenas = *std::move(arenas);
  return absl::OkStatus();
}

// One event loop for every two cores: the others compute.
int DefaultLoops(int cores) { return std::clamp(cores / 2, 1, 16); }

http2::Limits LimitsOf(const Config& config) {
  http2::Limits limits;
  limits.max_streams = static_cast<uint32_t>(config.max_streams);
  limits.min_ping_interval = config.min_ping_interval;
  return limits;
}

rpc::RpcServerOptions ServerOptions(const Config& config, const Parts& parts) {
  return {.listen = config.listen,
          .socket_mode = config.socket_mode,
          .probe_listen = config.probe_listen,
          .version = std::string(Version()),
          .grpc_version = std::string(TransportVersion()),
          .max_request_bytes = config.max_request_bytes,
          .head_root = parts.head_root,
          .remote_listen = RemoteListen(config),
          .slow_call = config.slow_call,
          .http2 = {.loops = config.loops > 0 ? config.loops : DefaultLoops(parts.cores),
                    .limits = LimitsOf(config),
                    .times = {.send = config.receive_timeout,
                              .max_age = config.max_connection_age,
                              .max_idle = config.max_connection_idle,
                              .keepalive = config.keepalive_time},
                    .max_connections = parts.max_connections,
                    .max_held_bytes = config.max_connection_bytes,
                    .tls = parts.front_door.tls},
          .door_metrics = parts.door_metrics,
          .identities = parts.front_door.identities.get(),
          .leases = parts.arenas == nullptr ? nullptr : parts.leases.get(),
          .places = parts.places.get()};
}

void LogHostMemory(const Config& config, const engine::Devices& devices) {
  const HostMemory most = MostHostMemory(config, devices.info(0).backend == "cpu", devices.count(),
                                         MaxHeadBytes(config, devices));
  const int64_t usable = UsableMemory(MachineMemory());
  spdlog::log(most.Sum() <= usable ? spdlog::level::info : spdlog::level::warn, "{}",
              most.Text(usable));
}

absl::Status StartServer(const Config& config, Parts& parts) {
  const int64_t base_bytes = ResidentBytes() - parts.places->pinned();
  absl::StatusOr<std::unique_ptr<rpc::RpcServer>> server =
      rpc::RpcServer::Start(ServerOptions(config, parts), parts.admission.get(), parts.engine.get(),
                            parts.heads.get(), parts.metrics.get());
  LOGITD_RETURN_IF_ERROR(server.status());
  parts.server = *std::move(server);
  parts.memory_watch =
      WatchMemory(config, *parts.devices, base_bytes, *parts.admission, *parts.metrics,
                  parts.door_metrics, parts.places.get(), parts.server.get());
  parts.traffic->Set(parts.server.get());
  parts.rechecked = parts.server.get();
  if (parts.arenas != nullptr) parts.arenas->ServeRings(parts.server->ring_service(), parts.cores);
  parts.files->Start();
  LogHostMemory(config, *parts.devices);
  if (config.insecure) spdlog::warn("--insecure: see docs/operations.md, \"Who may call\"");
  if (!config.probe_listen.empty()) {
    spdlog::info("probes on {}", absl::StrJoin(parts.server->probes_listening(), " "));
  }
  spdlog::info("listening on {}", absl::StrJoin(parts.server->listening(), " "));
  return absl::OkStatus();
}

// ---- until the end

// Serves until something ends it. Health is NOT_SERVING while no device moves: every stream has
// been in one slice for --stall-timeout.
Events::Kind ServeUntilEvent(const Config& config, Events& events, const engine::Engine& engine,
                             rpc::RpcServer& server) {
  bool serving = true;
  int left = engine.devices().count();
  while (true) {
    const Events::Kind event = events.Wait(kLogReports);
    log::ReportSuppressed();
    if (event != Events::kNothing) return event;
    if (engine.devices().left() != left) {
      left = engine.devices().left();
      server.SetServing(serving);  // says which device is lost
    }
    const absl::Duration stalled = engine.activity().Stalled(engine::MonotonicNanos());
    if (serving == (stalled < config.stall_timeout)) continue;
    serving = !serving;
    server.SetServing(serving);
    if (serving) {
      spdlog::info("the device moves again: health is SERVING");
    } else {
      spdlog::error("no stream has ended a slice for {}: health is NOT_SERVING",
                    absl::FormatDuration(absl::Trunc(stalled, absl::Milliseconds(1))));
    }
  }
}

// Refuses new calls and waits until the admitted ones are done, the grace is over, a second signal
// comes or the device is lost, which `event` also says before.
Events::Kind Drain(const Config& config, Events::Kind event, Events& events,
                   engine::Admission& admission, engine::Engine& engine, rpc::RpcServer& server) {
  server.SetServing(false);
  admission.BeginDrain();
  server.Drain(config.drain_grace / kReceiveShare);
  if (event == Events::kLost) return event;
  spdlog::info("draining: {} calls to finish within {}", server.calls(),
               absl::FormatDuration(config.drain_grace));
  const absl::Time end = SteadyNow() + config.drain_grace;
  // A slice without a caller also gets the grace: it may be slow, and the device may be well.
  const auto busy = [&] {
    return server.calls() > 0 || server.loading() || !engine.WaitIdle(absl::InfinitePast());
  };
  event = Events::kNothing;
  while (busy() && SteadyNow() < end && event == Events::kNothing) event = events.Wait(kPoll);
  return event;
}

// Waits until no device runs a batch. One that does not end ends the process.
void EndBatches(Parts& parts) {
  const auto leave = [&parts] {
    if (const auto batch = parts.engine->OldestRunning()) LeaveBatch(*batch, *parts.devices);
  };
  // A ring's thread runs batches too.
  if (parts.arenas != nullptr && !parts.arenas->EndRings(kLastBatch)) leave();
  parts.server->Shutdown();
  if (!parts.engine->WaitIdle(SteadyNow() + kLastBatch)) leave();
  parts.engine->Stop();
}

// Ends what the drain has left. Returns the exit code.
int End(Events::Kind drained, Parts& parts) {
  const int cut = parts.server->calls();
  if (drained == Events::kLost) LeaveLostDevice();
  if (cut == 0) absl::SleepFor(kLastWrites);
  parts.files.reset();  // its thread uses the server
  EndBatches(parts);
  log::ReportSuppressed();
  spdlog::info("drained: {} calls cut short", cut);
  const absl::Time end = SteadyNow() + kLastWrites;
  while (parts.server->loading() && SteadyNow() < end) absl::SleepFor(kPoll);
  // The last batch, or the last chunk of a load, may have lost the device.
  if (parts.events.Wait(absl::ZeroDuration()) == Events::kLost) LeaveLostDevice();
  if (parts.server->loading()) LeaveLoad();
  if (parts.devices->left() < parts.devices->count()) LeaveAfterLoss();
  return EXIT_SUCCESS;
}

}  // namespace

int Serve(const Config& config, MakeBackends make_backends) {
  Parts parts;
  TuneMalloc(UsableCores());
  TuneMutexes();
  spdlog::info("logitd {}, {}", Version(), TransportVersion());
  const absl::StatusOr<int64_t> max_connections = MaxConnections(config);
  if (!max_connections.ok()) return CannotStart(max_connections.status());
  parts.max_connections = *max_connections;
  if (absl::Status s = StartPageRemover(config, parts); !s.ok()) return CannotStart(s);
  if (absl::Status s = StartEngine(config, make_backends, parts); !s.ok()) return CannotStart(s);
  if (const auto code = LoadHeads(config, parts.heads.get(), parts.engine.get(), &parts.events)) {
    return *code;
  }
  if (absl::Status s = OpenEntrances(config, parts); !s.ok()) return CannotStart(s);
  if (absl::Status s = StartServer(config, parts); !s.ok()) return CannotStart(s);
  const Events::Kind event = ServeUntilEvent(config, parts.events, *parts.engine, *parts.server);
  parts.leases->BeginDrain();
  return End(Drain(config, event, parts.events, *parts.admission, *parts.engine, *parts.server),
             parts);
}

}  // namespace logitd
