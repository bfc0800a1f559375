#include "server/serve.h"

#include <malloc.h>
#include <poll.h>
#include <signal.h>
#include <spdlog/spdlog.h>
#include <sys/eventfd.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <thread>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "kernels/backend.h"
#include "prometheus/exposer.h"
#include "prometheus/registry.h"
#include "server/engine/admission.h"
#include "server/engine/engine.h"
#include "server/engine/heads.h"
#include "server/engine/metrics.h"
#include "server/log.h"
#include "server/ops/ops.h"
#include "server/rpc/rpc_server.h"

namespace logitd {
namespace {

constexpr int kCannotStart = 1;
constexpr int kDeviceLost = 3;

constexpr absl::Duration kPoll = absl::Milliseconds(10);
// For answers already encoded to reach their peers, and for those who watch the health to hear of
// it. Calls that come meanwhile are refused.
constexpr absl::Duration kLastWrites = absl::Milliseconds(250);
// For a batch that runs to end when the grace is over and nobody waits for it any more.
constexpr absl::Duration kLastBatch = absl::Seconds(5);
// How long the process may take to end after the device was lost, whatever hangs in its driver.
constexpr unsigned kDeviceLostSeconds = 10;

// What the main thread waits for. Made before any other thread, so that all of them inherit the
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

  Kind Wait(absl::Duration timeout) {
    pollfd fds[] = {{signal_, POLLIN, 0}, {lost_, POLLIN, 0}};
    const int ms = timeout == absl::InfiniteDuration()
                       ? -1
                       : static_cast<int>(absl::ToInt64Milliseconds(timeout));
    if (poll(fds, 2, ms) <= 0) return kNothing;
    if (fds[1].revents != 0) return kLost;
    signalfd_siginfo info;
    [[maybe_unused]] const ssize_t taken = read(signal_, &info, sizeof(info));
    return kSignal;
  }

 private:
  int signal_;
  int lost_;
};

// Messages of megabytes come and go; giving their memory back to the system and faulting it in
// again each time halves the rate from socket to slab. Few arenas, because what one keeps free
// another cannot use: with one for each thread the process would keep several times what it ever
// held at once.
void TuneMalloc() {
  mallopt(M_ARENA_MAX, 2);
  mallopt(M_MMAP_THRESHOLD, 32 << 20);
  mallopt(M_TRIM_THRESHOLD, 256 << 20);
  mallopt(M_TOP_PAD, 16 << 20);
}

int CannotStart(const absl::Status& status) {
  spdlog::error("cannot start: {}", status.ToString());
  return kCannotStart;
}

// Ends the process where tearing it down could hang or crash, for it stands on a lost device. The
// end of the process hangs up on every peer.
[[noreturn]] void LeaveLostDevice() {
  alarm(kDeviceLostSeconds);
  absl::SleepFor(kLastWrites);
  spdlog::error("ended: the device was lost");
  std::_Exit(kDeviceLost);
}

// Ends the process where a stream cannot be joined: its batch does not end. The device is no good
// to whoever comes next either, as far as anyone can tell from here.
[[noreturn]] void LeaveBatch(const engine::RunningBatch& batch) {
  spdlog::error("ended: a batch of {} with {} rows is left to the device, which has had it for {}",
                batch.op, batch.rows,
                absl::FormatDuration(absl::Trunc(batch.age, absl::Milliseconds(1))));
  std::_Exit(kDeviceLost);
}

// Ends the process where the thread that loads heads cannot be joined: it waits for a disk, or for
// the device, that does not answer.
[[noreturn]] void LeaveLoad() {
  spdlog::warn("a load of a head has not ended in time; it ends with the process");
  std::_Exit(EXIT_SUCCESS);
}

// A value: the process is to end with it.
std::optional<int> LoadHeads(const Config& config, engine::Heads* heads, Events* events) {
  if (config.heads.empty()) return std::nullopt;
  absl::Status status;
  std::atomic<bool> wanted = true;
  absl::Notification done;
  std::thread loads([&] {
    for (const engine::HeadRequest& request : config.heads) {
      status =
          heads->Load(request, [&](const engine::HeadProgress&) { return wanted.load(); }).status();
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
  if (absl::IsInternal(status)) {
    spdlog::error("device lost: {}", status.ToString());
    LeaveLostDevice();
  }
  if (!wanted) {
    spdlog::info("ended by a signal before it served");
    return EXIT_SUCCESS;
  }
  return status.ok() ? std::nullopt : std::optional<int>(CannotStart(status));
}

}  // namespace

int Serve(const Config& config, MakeBackend make_backend) {
  Events events;
  TuneMalloc();
  spdlog::info("logitd {}", Version());

  absl::StatusOr<std::unique_ptr<Backend>> backend = make_backend();
  if (!backend.ok()) return CannotStart(backend.status());
  const DeviceInfo& device = (*backend)->device();
  spdlog::info("backend {}: {}, {} MiB", device.backend, device.name, device.memory_bytes >> 20);

  engine::Metrics metrics(ops::AllNames());
  engine::Admission admission(
      {.max_request_bytes = rpc::MaxMessageBytes(config.max_request_bytes, config.max_batch_rows),
       .max_held_bytes = config.max_held_bytes,
       .max_waiting_calls = config.max_waiting_calls},
      &metrics);
  engine::Heads heads(backend->get(), &metrics);
  absl::StatusOr<std::unique_ptr<engine::Engine>> engine =
      engine::Engine::Create(backend->get(),
                             {.streams = config.streams,
                              .slab_payload_bytes = config.slab_bytes,
                              .slab_answer_bytes = config.slab_bytes,
                              .max_batch_rows = config.max_batch_rows,
                              .max_batch_delay = config.max_batch_delay,
                              .ops = ops::AllTraits()},
                             &metrics, [&events](const absl::Status& status) {
                               spdlog::error("device lost: {}", status.ToString());
                               events.DeviceLost();
                             });
  if (!engine.ok()) return CannotStart(engine.status());
  spdlog::info(
      "limits: request {} B, held {} B, waiting calls {}, batch {} rows and {} B, streams {}",
      config.max_request_bytes, config.max_held_bytes, config.max_waiting_calls,
      config.max_batch_rows, config.slab_bytes, config.streams);

  if (const std::optional<int> code = LoadHeads(config, &heads, &events)) return *code;
  std::string head_root;
  if (!config.head_root.empty()) {
    std::error_code error;
    head_root = std::filesystem::canonical(config.head_root, error).string();
    if (error) {
      return CannotStart(absl::NotFoundError(
          absl::StrCat("--head-root: ", config.head_root, ": ", error.message())));
    }
    spdlog::info("clients may load heads from {}", head_root);
  }

  std::unique_ptr<prometheus::Exposer> exposer;
  if (config.metrics_listen != "off") {
    try {
      exposer = std::make_unique<prometheus::Exposer>(config.metrics_listen);
    } catch (const std::exception& error) {
      return CannotStart(absl::UnavailableError(
          absl::StrCat("metrics: cannot listen on ", config.metrics_listen, ": ", error.what())));
    }
    exposer->RegisterCollectable(metrics.registry());
    spdlog::info("metrics on {}:{}",
                 config.metrics_listen.substr(0, config.metrics_listen.rfind(':')),
                 absl::StrJoin(exposer->GetListeningPorts(), ","));
  }

  absl::StatusOr<std::unique_ptr<rpc::RpcServer>> server =
      rpc::RpcServer::Start({.listen = config.listen,
                             .version = std::string(Version()),
                             .max_request_bytes = config.max_request_bytes,
                             .head_root = head_root,
                             .peer_timeout = config.receive_timeout},
                            device, &admission, engine->get(), &heads, &metrics);
  if (!server.ok()) return CannotStart(server.status());
  spdlog::info("listening on {}", absl::StrJoin((*server)->listening(), " "));

  Events::Kind event = Events::kNothing;
  while (event == Events::kNothing) event = events.Wait(absl::InfiniteDuration());

  (*server)->SetServing(false);
  admission.BeginDrain();
  (*server)->Drain();
  if (event == Events::kSignal) {
    spdlog::info("draining: {} calls to finish, at most {}", (*server)->calls(),
                 absl::FormatDuration(config.drain_grace));
    const absl::Time end = absl::Now() + config.drain_grace;
    event = Events::kNothing;
    // A batch whose callers have all gone has the grace as well: it may be slow and nothing worse.
    const auto busy = [&] {
      return (*server)->calls() > 0 || (*server)->loading() ||
             !(*engine)->WaitIdle(absl::InfinitePast());
    };
    while (busy() && absl::Now() < end && event == Events::kNothing) {
      event = events.Wait(kPoll);
    }
  }
  const int cut = (*server)->calls();
  if (event == Events::kLost) LeaveLostDevice();
  if (cut == 0) absl::SleepFor(kLastWrites);
  GrpcIsEnding();
  (*server)->Shutdown();
  if (!(*engine)->WaitIdle(absl::Now() + kLastBatch)) {
    if (const auto batch = (*engine)->OldestRunning()) LeaveBatch(*batch);
  }
  (*engine)->Stop();
  // Its HTTP server takes two seconds to end; the process ends it faster. It holds the registry
  // weakly. Volatile, because a compiler drops a static nobody reads, and leak checkers miss it
  // then.
  [[maybe_unused]] static prometheus::Exposer* volatile left_to_exit;
  left_to_exit = exposer.release();
  spdlog::info("drained: {} calls cut short", cut);
  const absl::Time end = absl::Now() + kLastWrites;
  while ((*server)->loading() && absl::Now() < end) absl::SleepFor(kPoll);
  // The last batch, or the last chunk of a load, may be what lost it.
  if (events.Wait(absl::ZeroDuration()) == Events::kLost) LeaveLostDevice();
  if ((*server)->loading()) LeaveLoad();
  return EXIT_SUCCESS;
}

}  // namespace logitd
