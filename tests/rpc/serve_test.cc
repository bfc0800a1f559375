#include "server/serve.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "client/arena.h"
#include "client/client.h"
#include "client/ring.h"
#include "server/log.h"
#include "tests/becomes.h"
#include "tests/fake_backend.h"

namespace logitd {
namespace {

using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::ExitedWithCode;
using ::testing::HasSubstr;

// A device on which `fate` decides what happens at `point`.
std::unique_ptr<Backend> DoomedDevice(int number, FaultPoint point,
                                      std::function<absl::Status()> fate) {
  auto backend = std::make_unique<FakeBackend>(
      DeviceInfo{.backend = "fake", .number = number, .name = "fake"});
  backend->SetFaults([point, fate = std::move(fate)](FaultPoint at) {
    return at == point ? fate() : absl::OkStatus();
  });
  return backend;
}

std::vector<std::unique_ptr<Backend>> Doomed(FaultPoint point, std::function<absl::Status()> fate) {
  std::vector<std::unique_ptr<Backend>> backends;
  backends.push_back(DoomedDevice(0, point, std::move(fate)));
  return backends;
}

[[noreturn]] absl::Status Hang() {
  kill(getpid(), SIGTERM);
  while (true) pause();
}

// Each test dies in a process that runs the test from its start and cannot clean up. The directory
// belongs to the process that waits for it.
class ServeDeathTest : public ::testing::Test {
 protected:
  ServeDeathTest() {
    GTEST_FLAG_SET(death_test_style, "threadsafe");
    if (const char* of_parent = getenv(kVariable)) {
      directory_ = of_parent;
      return;
    }
    std::string made = ::testing::TempDir() + "/logitd_serve_XXXXXX";
    if (mkdtemp(made.data()) == nullptr) std::abort();
    directory_ = std::filesystem::canonical(made).string();
    setenv(kVariable, directory_.c_str(), /*overwrite=*/1);
    owned_ = true;
  }
  ~ServeDeathTest() override {
    if (!owned_) return;
    unsetenv(kVariable);
    std::filesystem::remove_all(directory_);
  }

  const std::string& directory() const { return directory_; }

 private:
  static constexpr char kVariable[] = "LOGITD_SERVE_TEST_DIRECTORY";
  std::string directory_;
  bool owned_ = false;
};

std::string Address(const std::string& directory) { return "unix:" + directory + "/socket"; }

// One row, over logits that live as long as the process.
client::TopKRequest OneRow() {
  static const float logits[] = {1, 3, 2};
  client::TopKRequest request = {
      .rows = 1, .vocab = 3, .logits = {{reinterpret_cast<const char*>(logits), sizeof(logits)}}};
  request.params.add_k(1);
  return request;
}

std::unique_ptr<client::Client> Connected(const std::string& directory) {
  auto client =
      client::Client::Create({.address = Address(directory), .retry = {.max_attempts = 1}});
  EXPECT_TRUE(testing::Becomes([&] { return (*client)->Info().ok(); }));
  return *std::move(client);
}

Config SmallConfig(const std::string& directory) {
  Config config;
  config.listen = {Address(directory)};
  config.metrics_listen = "off";
  config.slab_bytes = config.max_request_bytes = 1 << 20;
  return config;
}

// Prints what callers see on standard error, one line each.
void CallAndLose(const std::string& directory, std::atomic<bool>* lost) {
  const std::unique_ptr<client::Client> client = Connected(directory);
  absl::Notification watching;
  std::thread([&client = *client, &watching] {
    client
        .WatchHealth("",
                     [&watching](client::ServingStatus status) {
                       const std::string name(client::ServingStatusName(status));
                       std::fprintf(stderr, "health %s\n", name.c_str());
                       if (!watching.HasBeenNotified()) watching.Notify();
                       return true;
                     })
        .IgnoreError();
  }).detach();
  watching.WaitForNotification();
  for (const char* call : {"before", "losing", "after"}) {
    const absl::Status status = client->TopK(OneRow()).status();
    std::fprintf(stderr, "%s: %s\n", call, status.ToString().c_str());
    *lost = true;
  }
  pause();  // the main thread ends the process
}

// Ends the process with what Serve returns.
[[noreturn]] void ServeToTheEnd(const Config& config, MakeBackends make) {
  alarm(60);
  SetUpLogging("info", "text");
  std::_Exit(Serve(config, make));
}

// For a server that must end the process itself: Serve must not return.
[[noreturn]] void ServeAndFail(const Config& config, MakeBackends make) {
  alarm(60);
  SetUpLogging("info", "text");
  std::_Exit(Serve(config, make) + 100);
}

void ServeOnADeviceThatIsLost(const std::string& directory) {
  std::atomic<bool> lost = false;
  ServeToTheEnd(SmallConfig(directory), [&] {
    // By now Serve has blocked the signals, so threads may start.
    std::thread(CallAndLose, directory, &lost).detach();
    return Doomed(FaultPoint::kWait, [&lost] {
      return lost ? absl::InternalError("fell off the bus") : absl::OkStatus();
    });
  });
}

TEST_F(ServeDeathTest, ALostDeviceEndsTheProcessAndTellsEveryone) {
  EXPECT_EXIT(ServeOnADeviceThatIsLost(directory()), ExitedWithCode(3),
              AllOf(HasSubstr("health SERVING"), HasSubstr("before: OK"),
                    HasSubstr("losing: UNAVAILABLE: the device failed: fell off the bus"),
                    HasSubstr("after: UNAVAILABLE"), HasSubstr("health NOT_SERVING"),
                    HasSubstr("the process ends: the device was lost")));
}

// Device 1 of two is lost in a batch; then calls go on, and a signal ends the server.
void ServeOnTwoDevicesAndLoseOne(const std::string& directory) {
  Config config = SmallConfig(directory);
  config.streams = 1;
  FakeBackend* held = nullptr;  // device 0
  ServeToTheEnd(config, [&] {
    std::thread([directory, &held] {
      const std::unique_ptr<client::Client> client = Connected(directory);
      // Device 0 stands still, so the second call runs on device 1.
      std::thread first([&client = *client] {
        const absl::Status status = client.TopK(OneRow()).status();
        std::fprintf(stderr, "first: %s\n", status.ToString().c_str());
      });
      EXPECT_TRUE(testing::Becomes([&] { return held->held() == 1; }));
      std::fprintf(stderr, "losing: %s\n", client->TopK(OneRow()).status().ToString().c_str());
      held->Release();
      first.join();
      for (int i = 0; i < 5; ++i) {
        std::fprintf(stderr, "after %d: %s\n", i,
                     client->TopK(OneRow()).status().ToString().c_str());
      }
      const auto info = client->Info();
      for (const auto& device : info->devices()) {
        std::fprintf(stderr, "device %d lost %d\n", device.number(), device.lost());
      }
      for (const char* service : {"", "logitd.device.0", "logitd.device.1"}) {
        client
            ->WatchHealth(service,
                          [service](client::ServingStatus status) {
                            const std::string name(client::ServingStatusName(status));
                            std::fprintf(stderr, "health of \"%s\" %s\n", service, name.c_str());
                            // The server says so within a second.
                            return std::string(service) == "logitd.device.1" && name == "SERVING";
                          })
            .IgnoreError();
      }
      kill(getpid(), SIGTERM);
    }).detach();
    std::vector<std::unique_ptr<Backend>> backends;
    auto first = std::make_unique<FakeBackend>(DeviceInfo{.backend = "fake", .name = "fake"});
    held = first.get();
    held->Hold(FaultPoint::kWait);
    backends.push_back(std::move(first));
    backends.push_back(
        DoomedDevice(1, FaultPoint::kWait, [] { return absl::InternalError("fell off the bus"); }));
    return backends;
  });
}

TEST_F(ServeDeathTest, ALostDeviceOfSeveralIsTakenOutAndTheOthersServe) {
  EXPECT_EXIT(
      ServeOnTwoDevicesAndLoseOne(directory()), ExitedWithCode(0),
      AllOf(HasSubstr("losing: UNAVAILABLE: the device failed: fell off the bus"),
            HasSubstr("first: OK"), HasSubstr("after 0: OK"), HasSubstr("after 4: OK"),
            HasSubstr("device 1 is lost, 1 of 2 devices serve on"), HasSubstr("device 0 lost 0"),
            HasSubstr("device 1 lost 1"), HasSubstr("health of \"\" SERVING"),
            HasSubstr("health of \"logitd.device.0\" SERVING"),
            HasSubstr("health of \"logitd.device.1\" NOT_SERVING"),
            HasSubstr("drained: 0 calls cut short")));
}

void ServeABatchThatHangs(const std::string& directory) {
  Config config = SmallConfig(directory);
  config.drain_grace = absl::Milliseconds(200);
  ServeAndFail(config, [&] {
    std::thread([directory] {
      const absl::Status status = Connected(directory)->TopK(OneRow()).status();
      std::fprintf(stderr, "call: %s\n", status.ToString().c_str());
      pause();  // the main thread ends the process
    }).detach();
    return Doomed(FaultPoint::kWait, &Hang);
  });
}

TEST_F(ServeDeathTest, ABatchThatHangsDoesNotKeepTheProcess) {
  EXPECT_EXIT(ServeABatchThatHangs(directory()), ExitedWithCode(3),
              AllOf(HasSubstr("draining: 1 calls to finish"), HasSubstr("call: UNAVAILABLE"),
                    ContainsRegex("the process ends: a batch of softmax_topk with 1 rows has been "
                                  "on the device for [5-9]\\.[0-9]+s")));
}

// Calls of a ring one after another, until one runs on the ring's thread: not on an engine thread,
// of which there is one, and which runs the first call. That call hangs.
void ServeALoneCallThatHangs(const std::string& directory) {
  Config config = SmallConfig(directory);
  config.drain_grace = absl::Milliseconds(200);
  config.arena_listen = "unix:" + directory + "/arena";
  config.max_arena_bytes = 1 << 20;
  config.max_leases = 1;
  config.streams = 1;
  std::atomic<pid_t> engine_thread = 0;
  ServeAndFail(config, [&] {
    std::thread([directory] {
      Connected(directory);
      const auto lease = client::Arena::Lease("unix:" + directory + "/arena", 1 << 17);
      const auto ring = client::Ring::Open(lease->get(), 0, {.slots = 4});
      while ((*ring)->TopK(OneRow()).ok()) {
      }
      pause();  // the main thread ends the process
    }).detach();
    return Doomed(FaultPoint::kWait, [&engine_thread] {
      pid_t first = 0;
      engine_thread.compare_exchange_strong(first, gettid());
      return first != 0 && first != gettid() ? Hang() : absl::OkStatus();
    });
  });
}

TEST_F(ServeDeathTest, ALoneCallThatHangsDoesNotKeepTheProcess) {
  EXPECT_EXIT(ServeALoneCallThatHangs(directory()), ExitedWithCode(3),
              ContainsRegex("the process ends: a batch of softmax_topk with 1 rows has been on the "
                            "device for [5-9]\\.[0-9]+s"));
}

// The caller goes before the signal, so no call is left to wait for.
void ServeASlowBatchWithoutACaller(const std::string& directory) {
  std::atomic<bool> runs = false;
  ServeToTheEnd(SmallConfig(directory), [&] {
    std::thread([directory, &runs] {
      Connected(directory);  // so that only the batch uses up the deadline
      auto client = client::Client::Create({.address = Address(directory),
                                            .deadline = absl::Seconds(1),
                                            .retry = {.max_attempts = 1}});
      const absl::Status status = (*client)->TopK(OneRow()).status();
      std::fprintf(stderr, "call: %s, batch: %d\n", status.ToString().c_str(), runs.load());
      kill(getpid(), SIGTERM);
    }).detach();
    return Doomed(FaultPoint::kWait, [&runs] {
      runs = true;
      absl::SleepFor(absl::Seconds(8));  // longer than a device that hangs is waited for
      return absl::OkStatus();
    });
  });
}

TEST_F(ServeDeathTest, ASlowBatchWithoutACallerIsNotTakenForADeviceThatHangs) {
  EXPECT_EXIT(ServeASlowBatchWithoutACaller(directory()), ExitedWithCode(0),
              AllOf(ContainsRegex("call: DEADLINE_EXCEEDED.*, batch: 1"),
                    HasSubstr("drained: 0 calls cut short")));
}

// Prints every change of health while one slice takes until that is seen.
void WatchASlowSlice(const std::string& directory, absl::Notification* seen) {
  const std::unique_ptr<client::Client> client = Connected(directory);
  std::thread call;
  client
      ->WatchHealth("logitd.v1.Sampler",
                    [&](client::ServingStatus status) {
                      const std::string name(client::ServingStatusName(status));
                      std::fprintf(stderr, "health %s\n", name.c_str());
                      const bool serving = status == client::ServingStatus::kServing;
                      if (serving && !call.joinable()) {
                        call = std::thread([&] {
                          const absl::Status done = client->TopK(OneRow()).status();
                          std::fprintf(stderr, "call: %s\n", done.ToString().c_str());
                        });
                      }
                      // A status may come twice.
                      if (!serving && !seen->HasBeenNotified()) seen->Notify();
                      return !serving || !seen->HasBeenNotified();
                    })
      .IgnoreError();
  call.join();
  kill(getpid(), SIGTERM);
}

void ServeASlowSlice(const std::string& directory) {
  alarm(60);
  SetUpLogging("info", "text");
  Config config = SmallConfig(directory);
  config.streams = 1;
  config.stall_timeout = absl::Milliseconds(500);
  std::thread watcher;
  absl::Notification seen;
  const int code = Serve(config, [&] {
    watcher = std::thread(WatchASlowSlice, directory, &seen);
    return Doomed(FaultPoint::kWait, [&seen] {
      seen.WaitForNotification();
      return absl::OkStatus();
    });
  });
  watcher.join();
  std::_Exit(code);
}

TEST_F(ServeDeathTest, HealthIsNotServingWhileNoStreamMoves) {
  EXPECT_EXIT(ServeASlowSlice(directory()), ExitedWithCode(0),
              AllOf(ContainsRegex("health SERVING(.|\n)*health NOT_SERVING(.|\n)*health SERVING"
                                  "(.|\n)*drained: 0 calls"),
                    HasSubstr("no stream has ended a slice for"), HasSubstr("call: OK")));
}

// A safetensors file with a head of one token.
std::string HeadFile() {
  const std::string header = R"({"w":{"dtype":"F32","shape":[1,4],"data_offsets":[0,16]}})";
  return absl::StrCat(std::string(1, static_cast<char>(header.size())), std::string(7, '\0'),
                      header, std::string(16, '\0'));
}

// The path of a head in memory: the process ends before anything could clean up a file.
std::string HeadInMemory() {
  const std::string file = HeadFile();
  const int fd = memfd_create("head", 0);
  if (write(fd, file.data(), file.size()) != static_cast<ssize_t>(file.size())) std::abort();
  return absl::StrCat("/proc/self/fd/", fd);
}

void LoadOnADeviceThatIsLost() {
  Config config;
  config.metrics_listen = "off";
  config.slab_bytes = config.max_request_bytes = 1 << 20;
  config.heads = {{.name = "a", .path = HeadInMemory()}};
  ServeAndFail(config, [] {
    return Doomed(FaultPoint::kWait, [] { return absl::InternalError("fell off the bus"); });
  });
}

TEST_F(ServeDeathTest, ADeviceLostWhileAHeadLoadsAtStartEndsTheProcess) {
  EXPECT_EXIT(
      LoadOnADeviceThatIsLost(), ExitedWithCode(3),
      AllOf(HasSubstr("fell off the bus"), HasSubstr("the process ends: the device was lost")));
}

void ServeALoadThatIsStuck(const std::string& directory, bool at_start) {
  std::ofstream(directory + "/head", std::ios::binary) << HeadFile();
  Config config = SmallConfig(directory);
  // Long enough for the caller to hear of the drain, also on a busy machine.
  config.drain_grace = at_start ? absl::Milliseconds(200) : absl::Seconds(3);
  config.head_root = directory;
  if (at_start) config.heads = {{.name = "a", .path = directory + "/head"}};
  ServeAndFail(config, [&] {
    if (!at_start) {
      std::thread([&] {
        const std::unique_ptr<client::Client> client = Connected(directory);
        v1::LoadHeadRequest request;
        request.set_name("a");
        request.set_path("head");
        const absl::Status status = client->LoadHead(request).status();
        std::fprintf(stderr, "load: %s\n", status.ToString().c_str());
        pause();  // the main thread ends the process
      }).detach();
    }
    return Doomed(FaultPoint::kAllocateDevice, [] {
      std::fprintf(stderr, "stuck\n");
      return Hang();
    });
  });
}

TEST_F(ServeDeathTest, ALoadThatIsStuckDoesNotKeepTheProcess) {
  EXPECT_EXIT(ServeALoadThatIsStuck(directory(), /*at_start=*/true), ExitedWithCode(0),
              AllOf(HasSubstr("stuck"), HasSubstr("a load of a head did not end in time")));
  EXPECT_EXIT(ServeALoadThatIsStuck(directory(), /*at_start=*/false), ExitedWithCode(0),
              AllOf(HasSubstr("stuck"), HasSubstr("load: UNAVAILABLE: the server is draining"),
                    HasSubstr("a load of a head did not end in time")));
}

TEST(ServeTest, ABackendThatCannotBeCreatedIsAnError) {
  EXPECT_EQ(Serve({}, [] { return absl::UnavailableError("no device answers"); }), 1);
}

}  // namespace
}  // namespace logitd
