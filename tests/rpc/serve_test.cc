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

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "client/client.h"
#include "kernels/backend.h"
#include "server/log.h"

namespace logitd {
namespace {

using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::ExitedWithCode;
using ::testing::HasSubstr;

// What becomes of a batch on a device that is about to fail.
using Fate = std::function<absl::Status()>;

// The CPU, where fate has nothing against it.
class DoomedStream final : public Stream {
 public:
  DoomedStream(std::unique_ptr<Stream> stream, Fate fate)
      : stream_(std::move(stream)), fate_(std::move(fate)) {}

  absl::Status Upload(const Slab& slab, size_t offset, size_t bytes) override {
    return stream_->Upload(slab, offset, bytes);
  }
  absl::Status Download(const Slab& slab, size_t offset, size_t bytes) override {
    return stream_->Download(slab, offset, bytes);
  }
  absl::Status Fill(const Slab& slab, size_t offset, size_t bytes, std::byte* to) override {
    return stream_->Fill(slab, offset, bytes, to);
  }
  absl::Status SoftmaxTopK(const SoftmaxTopKArgs& args) override {
    return stream_->SoftmaxTopK(args);
  }
  absl::StatusOr<StreamTimes> Wait() override {
    if (absl::Status status = fate_(); !status.ok()) return status;
    return stream_->Wait();
  }

 private:
  const std::unique_ptr<Stream> stream_;
  const Fate fate_;
};

class DoomedBackend final : public Backend {
 public:
  explicit DoomedBackend(Fate fate) : fate_(std::move(fate)) {}

  const DeviceInfo& device() const override { return backend_->device(); }
  absl::StatusOr<Slab> AllocateSlab(size_t bytes) override { return backend_->AllocateSlab(bytes); }
  void FreeSlab(const Slab& slab) override { backend_->FreeSlab(slab); }
  absl::StatusOr<DeviceMemory> AllocateDevice(size_t bytes) override {
    return backend_->AllocateDevice(bytes);
  }
  void FreeDevice(const DeviceMemory& memory) override { backend_->FreeDevice(memory); }
  absl::StatusOr<std::unique_ptr<Stream>> CreateStream(StreamUse use) override {
    absl::StatusOr<std::unique_ptr<Stream>> stream = backend_->CreateStream(use);
    if (!stream.ok()) return stream.status();
    return std::make_unique<DoomedStream>(*std::move(stream), fate_);
  }

 private:
  const std::unique_ptr<Backend> backend_ = *CreateCpuBackend({.cpu_threads = 1});
  const Fate fate_;
};

// Each dies in a process that begins the test anew, and cannot clean up: the directory is that of
// the process that waits for it.
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

// Of one row, over logits that live as long as the process.
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
  while (!(*client)->Info().ok()) absl::SleepFor(absl::Milliseconds(5));
  return *std::move(client);
}

Config SmallConfig(const std::string& directory) {
  Config config;
  config.listen = {Address(directory)};
  config.metrics_listen = "off";
  config.slab_bytes = config.max_request_bytes = 1 << 20;
  return config;
}

// What callers see, line by line on standard error.
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

void ServeOnADeviceThatIsLost(const std::string& directory) {
  alarm(60);
  SetUpLogging("info", "text");
  std::atomic<bool> lost = false;
  const int code = Serve(SmallConfig(directory), [&] {
    // By now Serve has done what must come before threads.
    std::thread(CallAndLose, directory, &lost).detach();
    return std::make_unique<DoomedBackend>(
        [&lost] { return lost ? absl::InternalError("fell off the bus") : absl::OkStatus(); });
  });
  std::_Exit(code);
}

TEST_F(ServeDeathTest, ALostDeviceEndsTheProcessAndTellsEveryone) {
  EXPECT_EXIT(ServeOnADeviceThatIsLost(directory()), ExitedWithCode(3),
              AllOf(HasSubstr("health SERVING"), HasSubstr("before: OK"),
                    HasSubstr("losing: UNAVAILABLE: the device failed: fell off the bus"),
                    HasSubstr("after: UNAVAILABLE"), HasSubstr("health NOT_SERVING"),
                    HasSubstr("ended: the device was lost")));
}

void ServeABatchThatHangs(const std::string& directory) {
  alarm(60);
  Config config = SmallConfig(directory);
  config.drain_grace = absl::Milliseconds(200);
  SetUpLogging("info", "text");
  const int code = Serve(config, [&] {
    std::thread([directory] {
      const absl::Status status = Connected(directory)->TopK(OneRow()).status();
      std::fprintf(stderr, "call: %s\n", status.ToString().c_str());
      pause();  // the main thread ends the process
    }).detach();
    return std::make_unique<DoomedBackend>([]() -> absl::Status {
      kill(getpid(), SIGTERM);
      while (true) pause();
    });
  });
  std::_Exit(code + 100);  // it is not to come back
}

TEST_F(ServeDeathTest, ABatchThatHangsDoesNotKeepTheProcess) {
  EXPECT_EXIT(ServeABatchThatHangs(directory()), ExitedWithCode(3),
              AllOf(HasSubstr("draining: 1 calls to finish"), HasSubstr("call: UNAVAILABLE"),
                    ContainsRegex("ended: a batch of softmax_topk with 1 rows is left to the "
                                  "device, which has had it for [5-9]\\.[0-9]+s")));
}

// Its caller has gone before the signal, and no call is left to wait for.
void ServeASlowBatchThatNobodyWaitsFor(const std::string& directory) {
  alarm(60);
  SetUpLogging("info", "text");
  std::atomic<bool> runs = false;
  const int code = Serve(SmallConfig(directory), [&] {
    std::thread([directory, &runs] {
      Connected(directory);  // so that the deadline is for the batch alone
      auto client = client::Client::Create({.address = Address(directory),
                                            .deadline = absl::Seconds(1),
                                            .retry = {.max_attempts = 1}});
      const absl::Status status = (*client)->TopK(OneRow()).status();
      std::fprintf(stderr, "call: %s, batch: %d\n", status.ToString().c_str(), runs.load());
      kill(getpid(), SIGTERM);
    }).detach();
    return std::make_unique<DoomedBackend>([&runs] {
      runs = true;
      absl::SleepFor(absl::Seconds(8));
      return absl::OkStatus();
    });
  });
  std::_Exit(code);
}

TEST_F(ServeDeathTest, ASlowBatchThatNobodyWaitsForIsNoDeviceThatHangs) {
  EXPECT_EXIT(ServeASlowBatchThatNobodyWaitsFor(directory()), ExitedWithCode(0),
              AllOf(ContainsRegex("call: DEADLINE_EXCEEDED.*, batch: 1"),
                    HasSubstr("drained: 0 calls cut short")));
}

// The CPU, on which memory for a head takes for ever.
class StuckBackend final : public Backend {
 public:
  const DeviceInfo& device() const override { return backend_->device(); }
  absl::StatusOr<Slab> AllocateSlab(size_t bytes) override { return backend_->AllocateSlab(bytes); }
  void FreeSlab(const Slab& slab) override { backend_->FreeSlab(slab); }
  absl::StatusOr<DeviceMemory> AllocateDevice(size_t) override {
    std::fprintf(stderr, "stuck\n");
    kill(getpid(), SIGTERM);
    while (true) pause();
  }
  void FreeDevice(const DeviceMemory& memory) override { backend_->FreeDevice(memory); }
  absl::StatusOr<std::unique_ptr<Stream>> CreateStream(StreamUse use) override {
    return backend_->CreateStream(use);
  }

 private:
  const std::unique_ptr<Backend> backend_ = *CreateCpuBackend({.cpu_threads = 1});
};

// A safetensors file with a head of one token.
std::string HeadFile() {
  const std::string header = R"({"w":{"dtype":"F32","shape":[1,4],"data_offsets":[0,16]}})";
  return absl::StrCat(std::string(1, static_cast<char>(header.size())), std::string(7, '\0'),
                      header, std::string(16, '\0'));
}

// Its path, in memory alone: the process ends before anything could clean up.
std::string HeadInMemory() {
  const std::string file = HeadFile();
  const int fd = memfd_create("head", 0);
  if (write(fd, file.data(), file.size()) != static_cast<ssize_t>(file.size())) std::abort();
  return absl::StrCat("/proc/self/fd/", fd);
}

void LoadOnADeviceThatIsLost() {
  alarm(60);
  Config config;
  config.metrics_listen = "off";
  config.slab_bytes = config.max_request_bytes = 1 << 20;
  config.heads = {{.name = "a", .path = HeadInMemory()}};
  SetUpLogging("info", "text");
  const int code = Serve(config, [] {
    return std::make_unique<DoomedBackend>([] { return absl::InternalError("fell off the bus"); });
  });
  std::_Exit(code + 100);  // it is not to come back
}

TEST_F(ServeDeathTest, ADeviceLostByAHeadAtStartEndsTheProcess) {
  EXPECT_EXIT(LoadOnADeviceThatIsLost(), ExitedWithCode(3),
              AllOf(HasSubstr("fell off the bus"), HasSubstr("ended: the device was lost")));
}

void ServeALoadThatIsStuck(const std::string& directory, bool at_start) {
  alarm(60);
  std::ofstream(directory + "/head", std::ios::binary) << HeadFile();
  Config config = SmallConfig(directory);
  // Its caller hears of the drain within this, also on a busy machine.
  config.drain_grace = at_start ? absl::Milliseconds(200) : absl::Seconds(3);
  config.head_root = directory;
  if (at_start) config.heads = {{.name = "a", .path = directory + "/head"}};
  SetUpLogging("info", "text");
  const int code = Serve(config, [&] {
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
    return std::make_unique<StuckBackend>();
  });
  std::_Exit(code + 100);  // it is not to come back
}

TEST_F(ServeDeathTest, ALoadThatIsStuckDoesNotKeepTheProcess) {
  EXPECT_EXIT(ServeALoadThatIsStuck(directory(), /*at_start=*/true), ExitedWithCode(0),
              AllOf(HasSubstr("stuck"), HasSubstr("it ends with the process")));
  EXPECT_EXIT(ServeALoadThatIsStuck(directory(), /*at_start=*/false), ExitedWithCode(0),
              AllOf(HasSubstr("stuck"), HasSubstr("load: UNAVAILABLE: the server is draining"),
                    HasSubstr("it ends with the process")));
}

TEST(ServeTest, ABackendThatCannotBeHadIsAnError) {
  EXPECT_EQ(Serve({}, [] { return absl::UnavailableError("no device answers"); }), 1);
}

}  // namespace
}  // namespace logitd
