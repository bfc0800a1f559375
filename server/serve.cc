#include "server/serve.h"

#include <malloc.h>
#include <poll.h>
#include <signal.h>
#include <spdlog/spdlog.h>
#include <sys/eventfd.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/config.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "kernels/backend.h"
#include "kernels/usable_cores.h"
#include "server/arena/arena_server.h"
#include "server/arena/leases.h"
#include "server/device_arenas.h"
#include "server/door/address.h"
#include "server/door/connection.h"
#include "server/door/door_metrics.h"
#include "server/door/identities.h"
#include "server/door/listener.h"
#include "server/door/memory_watch.h"
#include "server/door/tls_context.h"
#include "server/door/watched_files.h"
#include "server/engine/activity.h"
#include "server/engine/admission.h"
#include "server/engine/devices.h"
#include "server/engine/engine.h"
#include "server/engine/heads.h"
#include "server/engine/metrics.h"
#include "server/engine/sync.h"
#include "server/log.h"
#include "server/log/limited.h"
#include "server/memory.h"
#include "server/metrics_page.h"
#include "server/metrics_server.h"
#include "server/ops/ops.h"
#include "server/rpc/rpc_server.h"

namespace logitd {
namespace {

constexpr int kCannotStart = 1;
constexpr int kBadInput = 2;
constexpr int kDeviceLost = 3;

constexpr absl::Duration kPoll = absl::Milliseconds(10);
constexpr absl::Duration kLogReports = absl::Seconds(1);
// Time for encoded answers to reach their peers, and for health watchers to see the change. Calls
// that come meanwhile are refused.
constexpr absl::Duration kLastWrites = absl::Milliseconds(250);
// Messages that are received at the same time. Without this bound, half-received messages share the
// cores, and under overload many of them end too late.
constexpr int64_t kReceivingBytesPerCore = int64_t{4} << 20;
// The share of the grace for messages that are being received.
constexpr int64_t kReceiveShare = 10;
// Time for a running batch to end after the grace.
constexpr absl::Duration kLastBatch = absl::Seconds(5);
// Longest time for the process to end after the device was lost, even if its driver hangs.
constexpr unsigned kDeviceLostSeconds = 10;

// What the main thread waits for. Created before any other thread, so that all threads inherit the
// blocked signals.
class Events {
 public:
  enum Kind { kNothing, kSignal, kLost };

  Events() {
    signal(SIGPIPE, SIG_IGN);
    sigset_t signals;
    sigemptyset(&signals);
    sigaddset(&signals, SIGTERM);
    sigaddset(&signals, SIGINT);
    sigaddset(&signals, SIGUSR1);
    sigaddset(&signals, SIGUSR2);
    pthread_sigmask(SIG_BLOCK, &signals, nullptr);
    signal_ = signalfd(-1, &signals, SFD_CLOEXEC);
    lost_ = eventfd(0, EFD_CLOEXEC);
  }
  ~Events() {
    close(signal_);
    close(lost_);
  }

  // Any thread.
  void DeviceLost() {
    const uint64_t one = 1;
    [[maybe_unused]] const ssize_t written = write(lost_, &one, sizeof(one));
  }

  // SIGUSR1 and SIGUSR2 change the level of the log here, and are nothing to the caller.
  Kind Wait(absl::Duration timeout) {
    pollfd fds[] = {{signal_, POLLIN, 0}, {lost_, POLLIN, 0}};
    const int ms = timeout == absl::InfiniteDuration()
                       ? -1
                       : static_cast<int>(absl::ToInt64Milliseconds(timeout));
    if (poll(fds, 2, ms) <= 0) return kNothing;
    if (fds[1].revents != 0) return kLost;
    signalfd_siginfo info;
    if (read(signal_, &info, sizeof(info)) != ssize_t{sizeof(info)}) return kNothing;
    if (info.ssi_signo != SIGUSR1 && info.ssi_signo != SIGUSR2) return kSignal;
    SetLogLevel(info.ssi_signo == SIGUSR1 ? spdlog::level::debug : usual_level_);
    return kNothing;
  }

 private:
  static void SetLogLevel(spdlog::level::level_enum level) {
    // Said at the more talkative of the two levels, or nobody sees it.
    const auto say = [level] {
      spdlog::info("log level {}", spdlog::level::to_string_view(level));
    };
    const bool quieter = level > spdlog::get_level();
    if (quieter) say();
    spdlog::set_level(level);
    if (!quieter) say();
  }

  const spdlog::level::level_enum usual_level_ = spdlog::get_level();
  int signal_;
  int lost_;
};

// Messages of megabytes come and go. Returning their memory to the system and faulting it in again
// each time halves the rate from socket to slab. Few arenas, because one arena cannot use memory
// that another keeps free: with one for each thread the process keeps several times its peak use.
void TuneMalloc() {
  mallopt(M_ARENA_MAX, 2);
  mallopt(M_MMAP_THRESHOLD, 32 << 20);
  mallopt(M_TRIM_THRESHOLD, 256 << 20);
  mallopt(M_TOP_PAD, 16 << 20);
}

// Debian's Abseil looks for deadlocks at every lock, and gRPC takes many. In a profile of refused
// calls that was 4 to 7% of the samples.
void TuneMutexes() { absl::SetMutexDeadlockDetectionMode(absl::OnDeadlockCycle::kIgnore); }

// Whether a flag, or a file that a flag names, must be mended first: no later start finds it better.
// An address in use, memory or a device that does not answer may be there then.
bool IsBadInput(const absl::Status& status) {
  return absl::IsInvalidArgument(status) || absl::IsNotFound(status) ||
         absl::IsPermissionDenied(status) || absl::IsFailedPrecondition(status) ||
         absl::IsOutOfRange(status) || absl::IsUnimplemented(status);
}

// Returns the exit code.
int CannotStart(const absl::Status& status) {
  spdlog::error("the server cannot start: {}", status.ToString());
  return IsBadInput(status) ? kBadInput : kCannotStart;
}

// Ends the process without destroying objects that use the lost device, which could hang or crash.
// The end of the process closes every connection.
[[noreturn]] void LeaveLostDevice() {
  alarm(kDeviceLostSeconds);
  absl::SleepFor(kLastWrites);
  spdlog::error("the process ends: the device was lost");
  std::_Exit(kDeviceLost);
}

// Ends the process after a drain without destroying objects that use a lost device.
[[noreturn]] void LeaveAfterLoss() {
  spdlog::default_logger()->flush();
  std::_Exit(EXIT_SUCCESS);
}

// Ends the process when a stream thread cannot be joined because its batch does not end. The exit
// code is that of a lost device: the next batch would probably hang too.
[[noreturn]] void LeaveBatch(const engine::RunningBatch& batch, const engine::Devices& devices) {
  const std::string name = devices.count() == 1 ? "the device" : devices.NameOf(batch.device);
  spdlog::error("the process ends: a batch of {} with {} rows has been on {} for {}", batch.op,
                batch.rows, name,
                absl::FormatDuration(absl::Trunc(batch.age, absl::Milliseconds(1))));
  std::_Exit(kDeviceLost);
}

// Ends the process when the thread that loads heads cannot be joined because the disk or the device
// does not answer.
[[noreturn]] void LeaveLoad() {
  spdlog::warn("the process ends: a load of a head did not end in time");
  std::_Exit(EXIT_SUCCESS);
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

// The most memory of heads on each device. On the CPU it is memory of the host, where more than there
// is ends the process instead of failing the load.
int64_t MaxHeadBytes(const Config& config, const engine::Devices& devices) {
  if (config.max_head_bytes > 0) return config.max_head_bytes;
  const DeviceInfo& device = devices.info(0);
  if (device.backend != "cpu") return std::numeric_limits<int64_t>::max();
  return UsableMemory(device.memory_bytes) / 2 / devices.count();
}

// The first address for which clients may not load and unload heads; "" if there is none.
std::string RemoteListen(const Config& config) {
  // Where there are identities, their roles say who may.
  if (config.allow_remote_heads || !config.tokens.empty()) return "";
  for (const std::string& text : config.listen) {
    const absl::StatusOr<door::Address> address = door::ParseAddress(text);
    if (!address.ok() || !door::IsLocal(*address)) return text;
  }
  return "";
}

// --head-root with its links resolved; "" if there is none.
absl::StatusOr<std::string> ResolveHeadRoot(const Config& config) {
  if (config.head_root.empty()) return "";
  std::error_code error;
  std::string root = std::filesystem::canonical(config.head_root, error).string();
  if (error) {
    return absl::NotFoundError(
        absl::StrCat("--head-root: ", config.head_root, ": ", error.message()));
  }
  if (const std::string remote = RemoteListen(config); remote.empty()) {
    spdlog::info("clients may load heads from {}", root);
  } else {
    spdlog::warn(
        "clients may not load or unload heads: {} is not local, and there is no "
        "--allow-remote-heads",
        remote);
  }
  return root;
}

// Null if --metrics-listen is off.
absl::StatusOr<std::unique_ptr<MetricsServer>> ServeMetrics(const Config& config,
                                                            std::function<std::string()> page) {
  if (config.metrics_listen == "off") return nullptr;
  absl::StatusOr<door::Address> address = door::ParseAddress(config.metrics_listen);
  if (!address.ok()) return address.status();
  absl::StatusOr<std::unique_ptr<MetricsServer>> server =
      MetricsServer::Start(*address, std::move(page));
  if (!server.ok()) {
    return absl::UnavailableError(absl::StrCat("--metrics-listen: cannot listen on ",
                                               config.metrics_listen, ": ",
                                               server.status().message()));
  }
  spdlog::info("metrics on {}:{}",
               config.metrics_listen.substr(0, config.metrics_listen.rfind(':')),
               (*server)->port());
  return server;
}

// The files that say who may come in, as they are now.
struct Door {
  std::shared_ptr<door::TlsSource> tls;          // null: no TLS
  std::unique_ptr<door::Identities> identities;  // null: everybody may call everything
};

// Fills `door` and `files`. `on_identities` runs after each change of the identities.
absl::Status OpenDoor(const Config& config, const std::shared_ptr<door::DoorMetrics>& metrics,
                      std::function<void()> on_identities, Door* door,
                      std::unique_ptr<door::WatchedFiles>* files) {
  std::vector<door::FileGroup> groups;
  const auto on_read = [&metrics](const std::string& file) {
    metrics->AddFile(file);
    return [metrics, file](bool used) { metrics->OnRead(file, used); };
  };
  if (!config.tls_cert.empty()) {
    door->tls = std::make_shared<door::TlsSource>();
    metrics->AddTls();
    const bool mutual = !config.tls_client_ca.empty();
    std::vector<std::string> paths = {config.tls_cert, config.tls_key};
    if (mutual) paths.push_back(config.tls_client_ca);
    const auto use = [tls = door->tls, metrics, mutual](const std::vector<std::string>& contents) {
      door::TlsPems pems = {.certificate = contents[0], .key = contents[1]};
      if (mutual) pems.client_ca = contents[2];
      absl::Status status = tls->Set(pems);
      if (status.ok()) metrics->SetCertificateExpiry(tls->Get()->expiry());
      return status;
    };
    groups.push_back({.name = absl::StrJoin(paths, ", "),
                      .paths = paths,
                      .use = use,
                      .on_read = on_read("tls")});
  }
  if (!config.tokens.empty()) {
    door->identities = std::make_unique<door::Identities>();
    const auto use = [identities = door->identities.get(),
                      on_identities](const std::vector<std::string>& contents) {
      absl::Status status = identities->Set(contents[0]);
      if (status.ok()) on_identities();
      return status;
    };
    groups.push_back({.name = config.tokens,
                      .paths = {config.tokens},
                      .use = use,
                      .on_read = on_read("tokens")});
  }
  *files = std::make_unique<door::WatchedFiles>(std::move(groups));
  return (*files)->Load();
}

// Connections that may be open beside the descriptors of leases: each lease has its memory and its
// own connection, and its ring a copy of the connection and what wakes its thread.
absl::StatusOr<int64_t> MaxConnections(const Config& config) {
  const int64_t descriptors = door::RaiseDescriptorLimit();
  constexpr int64_t kOfLease = 4;
  const int64_t of_leases = config.arena_listen.empty() ? 0 : kOfLease * config.max_leases;
  if (of_leases > descriptors / 2) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "--max-leases: got %d, allowed at most %d: each takes up to %d of the %d files that the "
        "process may open, and connections need half of them",
        config.max_leases, descriptors / 2 / kOfLease, kOfLease, descriptors));
  }
  return door::ConnectionLimit(config.max_connections, descriptors - of_leases);
}

// Null without --arena-listen. `identities` may be null.
absl::StatusOr<std::unique_ptr<arena::ArenaServer>> ServeArenas(
    const Config& config, const door::Identities* identities, arena::Leases* leases,
    std::shared_ptr<prometheus::Registry> registry) {
  if (config.arena_listen.empty()) return nullptr;
  const absl::StatusOr<door::Address> address = door::ParseAddress(config.arena_listen);
  if (!address.ok()) return address.status();
  // Where there are identities, only their users may lease: not all who may open the file.
  const auto check_user = [identities](uid_t uid) -> absl::Status {
    if (identities == nullptr) return absl::OkStatus();
    door::Credentials shown;
    shown.uid = uid;
    const auto found = identities->Find(shown);
    if (!found.ok()) {
      return absl::UnauthenticatedError(
          absl::StrCat("arena: got user ", uid, ", allowed users of an identity in --tokens"));
    }
    const door::Identity& identity = *found->identity;
    if (identity.Has(door::Role::kInfer) || identity.Has(door::Role::kScore)) {
      return absl::OkStatus();
    }
    return absl::PermissionDeniedError(absl::StrCat("arena: got identity ", identity.name,
                                                    " with the roles ", identity.RoleList(),
                                                    ", allowed one with infer or score"));
  };
  absl::StatusOr<std::unique_ptr<arena::ArenaServer>> server = arena::ArenaServer::Start(
      {.address = *address, .mode = config.arena_mode, .check_user = check_user}, leases,
      std::move(registry));
  if (!server.ok()) {
    return absl::UnavailableError(absl::StrCat(
        "--arena-listen: cannot listen on ", config.arena_listen, ": ", server.status().message()));
  }
  spdlog::info("arenas on {}: at most {} leases, {} B of the host and {} B of each GPU",
               config.arena_listen, config.max_leases, config.max_arena_bytes,
               config.max_device_arena_bytes);
  return server;
}

// Memory of a CPU stream that uses a head.
constexpr int64_t kHeadScratch = int64_t{64} << 20;
// What the process itself needs beyond its start: threads, gRPC's own state, what malloc keeps.
// AddressSanitizer keeps freed memory, and shadows of all memory.
#ifdef ABSL_HAVE_ADDRESS_SANITIZER
constexpr int64_t kProcessGrowth = int64_t{16} << 30;
#else
constexpr int64_t kProcessGrowth = int64_t{64} << 20;
#endif
// Parameters and padding of a row, in a slab.
constexpr int64_t kSlabRowBytes = 168;

// Watches the memory of the process from here on. What the process may have besides its start is
// what docs/operations.md says: the transport's quota and, on the CPU, memory that becomes resident
// when it is first used.
std::unique_ptr<door::MemoryWatch> WatchMemory(const Config& config, const engine::Devices& devices,
                                               int64_t base, const engine::Admission& admission,
                                               const engine::Metrics& metrics,
                                               std::shared_ptr<door::Connections> connections,
                                               std::shared_ptr<door::DoorMetrics> door_metrics,
                                               const arena::Leases& leases,
                                               rpc::RpcServer* server) {
  const bool cpu = devices.info(0).backend == "cpu";
  const int64_t streams = int64_t{config.streams} * devices.count();
  const int64_t slabs =
      streams * (4 * config.slab_bytes + 2 * kSlabRowBytes * config.max_batch_rows);
  const int64_t heads_at_start = metrics.Get(engine::Gauge::kHeadBytes);
  const auto device_growth = [=, &metrics]() -> int64_t {
    if (!cpu) return 0;
    const int64_t heads = metrics.Get(engine::Gauge::kHeadBytes);
    const int64_t scratch = heads > 0 ? streams * kHeadScratch : 0;
    return slabs + heads - heads_at_start + scratch;
  };
  const int64_t messages = rpc::TransportBytes(config.max_held_bytes) + kProcessGrowth;
  const auto limit = [=] { return base + device_growth() + messages; };
  return std::make_unique<door::MemoryWatch>(
      std::move(connections),
      door::MemoryWatchOptions{
          .base = base,
          .allowed_growth = [=] { return limit() - base; },
          .held = [=, &admission] { return device_growth() + admission.held_bytes(); },
          .shed = [server](bool shed) { server->RefuseConnections(shed); },
          .saw = [=](int64_t resident) { door_metrics->SetResident(resident, limit()); },
          // Pinned arenas have a limit of their own.
          .resident = [&leases] { return door::ResidentBytes() - leases.pinned_bytes(); }});
}

// Serves until something ends it. Health is NOT_SERVING while no device moves: every stream has been
// in one slice for --stall-timeout.
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
  const absl::Time end = absl::Now() + config.drain_grace;
  // A slice without a caller also gets the grace: it may be slow, and the device may be well.
  const auto busy = [&] {
    return server.calls() > 0 || server.loading() || !engine.WaitIdle(absl::InfinitePast());
  };
  event = Events::kNothing;
  while (busy() && absl::Now() < end && event == Events::kNothing) event = events.Wait(kPoll);
  return event;
}

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

// `leases` may be null: clients cannot lease memory.
rpc::RpcServerOptions ServerOptions(const Config& config, const std::string& head_root,
                                    const std::shared_ptr<door::Connections>& connections,
                                    const Door& door, arena::Leases* leases) {
  return {.listen = config.listen,
          .socket_mode = config.socket_mode,
          .version = std::string(Version()),
          .grpc_version = std::string(GrpcVersion()),
          .max_request_bytes = config.max_request_bytes,
          .head_root = head_root,
          .remote_listen = RemoteListen(config),
          .peer_timeout = config.receive_timeout,
          .slow_call = config.slow_call,
          .connections = connections,
          .tls = door.tls,
          .identities = door.identities.get(),
          .leases = leases,
          .max_connection_age = config.max_connection_age,
          .max_connection_idle = config.max_connection_idle,
          .keepalive_time = config.keepalive_time};
}

}  // namespace

int Serve(const Config& config, MakeBackends make_backends) {
  Events events;
  TuneMalloc();
  TuneMutexes();
  spdlog::info("logitd {}, gRPC {}", Version(), GrpcVersion());
  const absl::StatusOr<int64_t> max_connections = MaxConnections(config);
  if (!max_connections.ok()) return CannotStart(max_connections.status());

  const absl::StatusOr<std::vector<std::unique_ptr<Backend>>> backends = make_backends();
  if (!backends.ok()) return CannotStart(backends.status());
  const std::shared_ptr<engine::Devices> devices =
      DevicesOf(*backends, {.exchange = config.shard_exchange});

  engine::Metrics metrics(ops::AllNames(), NumbersOf(*devices));
  const int cores = UsableCores();
  engine::Admission admission(
      {.max_request_bytes = rpc::MaxMessageBytes(config.max_request_bytes, config.max_batch_rows),
       .max_held_bytes = config.max_held_bytes,
       .max_waiting_calls = config.max_waiting_calls,
       .min_receive_rate = config.min_receive_rate,
       .max_receiving_bytes = kReceivingBytesPerCore * cores,
       .min_receiving_calls = std::max(2, cores / 2)},
      &metrics);
  engine::Heads heads(devices, &metrics, MaxHeadBytes(config, *devices));
  absl::StatusOr<std::unique_ptr<engine::Engine>> engine = engine::Engine::Create(
      devices,
      {.streams = config.streams,
       .slab_payload_bytes = config.slab_bytes,
       .slab_answer_bytes = config.slab_bytes,
       .max_batch_rows = config.max_batch_rows,
       .max_batch_delay = config.max_batch_delay,
       .ops = ops::AllTraits()},
      &metrics, [&events](const absl::Status& status) {
        spdlog::error("device lost: {}",
                      status.ToString(absl::StatusToStringMode::kWithNoExtraData));
        events.DeviceLost();
      });
  if (!engine.ok()) return CannotStart(engine.status());
  spdlog::info(
      "limits: request {} B, held {} B, waiting calls {}, batch {} rows and {} B, devices {} with "
      "{} streams each, connections {}",
      config.max_request_bytes, config.max_held_bytes, config.max_waiting_calls,
      config.max_batch_rows, config.slab_bytes, devices->count(), config.streams, *max_connections);

  if (const auto code = LoadHeads(config, &heads, engine->get(), &events)) return *code;
  const absl::StatusOr<std::string> head_root = ResolveHeadRoot(config);
  if (!head_root.ok()) return CannotStart(head_root.status());
  const auto door_metrics =
      std::make_shared<door::DoorMetrics>(metrics.registry(), *max_connections);
  const int64_t max_message = rpc::MaxMessageBytes(config.max_request_bytes, config.max_batch_rows);
  const std::shared_ptr<door::Connections> connections =
      door::Connections::Create({.frames = {.max_streams = config.max_streams,
                                            .max_message = static_cast<uint32_t>(max_message)},
                                 .max_connections = *max_connections,
                                 .early_bytes = config.max_held_bytes / 16},
                                door_metrics);
  const absl::StatusOr<std::unique_ptr<MetricsServer>> metrics_server =
      ServeMetrics(config, MakeMetricsPage(metrics.registry(), connections, Version(),
                                           GrpcVersion(), InfosOf(*devices)));
  if (!metrics_server.ok()) return CannotStart(metrics_server.status());
  // Before the server, which ends first.
  Door door;
  std::atomic<rpc::RpcServer*> rechecked = nullptr;
  std::unique_ptr<door::WatchedFiles> files;
  const auto recheck = [&rechecked] {
    if (rpc::RpcServer* const server = rechecked) server->RecheckIdentities();
  };
  if (absl::Status s = OpenDoor(config, door_metrics, recheck, &door, &files); !s.ok()) {
    return CannotStart(s);
  }
  // Calls use leases until the server has ended.
  const std::unique_ptr<arena::ArenaDevices> arena_devices = MakeArenaDevices(devices);
  arena::Leases leases({.max_bytes = config.max_arena_bytes,
                        .max_leases = config.max_leases,
                        .max_device_bytes = config.max_device_arena_bytes},
                       arena_devices.get());
  const absl::StatusOr<std::unique_ptr<arena::ArenaServer>> arenas =
      ServeArenas(config, door.identities.get(), &leases, metrics.registry());
  if (!arenas.ok()) return CannotStart(arenas.status());
  const int64_t base_bytes = door::ResidentBytes();
  absl::StatusOr<std::unique_ptr<rpc::RpcServer>> server = rpc::RpcServer::Start(
      ServerOptions(config, *head_root, connections, door, *arenas == nullptr ? nullptr : &leases),
      &admission, engine->get(), &heads, &metrics);
  if (!server.ok()) return CannotStart(server.status());
  const std::unique_ptr<door::MemoryWatch> memory_watch =
      WatchMemory(config, *devices, base_bytes, admission, metrics, connections, door_metrics,
                  leases, server->get());
  rechecked = server->get();
  if (*arenas != nullptr) (*arenas)->ServeRings((*server)->ring_service(), cores);
  files->Start();
  if (config.insecure) spdlog::warn("--insecure: see docs/operations.md, \"Who may call\"");
  spdlog::info("listening on {}", absl::StrJoin((*server)->listening(), " "));

  Events::Kind event = ServeUntilEvent(config, events, **engine, **server);
  leases.BeginDrain();
  event = Drain(config, event, events, admission, **engine, **server);
  const int cut = (*server)->calls();
  if (event == Events::kLost) LeaveLostDevice();
  if (cut == 0) absl::SleepFor(kLastWrites);
  GrpcIsEnding();
  files.reset();  // its thread uses the server
  if (*arenas != nullptr && !(*arenas)->EndRings(absl::Now() + kLastBatch)) {
    // A ring's thread runs a batch.
    if (const auto batch = (*engine)->OldestRunning()) LeaveBatch(*batch, *devices);
  }
  (*server)->Shutdown();
  if (!(*engine)->WaitIdle(absl::Now() + kLastBatch)) {
    if (const auto batch = (*engine)->OldestRunning()) LeaveBatch(*batch, *devices);
  }
  (*engine)->Stop();
  log::ReportSuppressed();
  spdlog::info("drained: {} calls cut short", cut);
  const absl::Time end = absl::Now() + kLastWrites;
  while ((*server)->loading() && absl::Now() < end) absl::SleepFor(kPoll);
  // The last batch, or the last chunk of a load, may have lost the device.
  if (events.Wait(absl::ZeroDuration()) == Events::kLost) LeaveLostDevice();
  if ((*server)->loading()) LeaveLoad();
  if (devices->left() < devices->count()) LeaveAfterLoss();
  return EXIT_SUCCESS;
}

}  // namespace logitd
