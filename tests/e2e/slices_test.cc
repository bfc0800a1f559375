// Long work on the real server: what ends with its callers, and who comes in between.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/ptrace.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "logitd/v1/sampler.grpc.pb.h"
#include "tests/e2e/elements.h"
#include "tests/e2e/peers.h"
#include "tests/e2e/server_process.h"
#include "tests/e2e/topk_calls.h"

namespace logitd::e2e {
namespace {

constexpr int64_t kVocab = 262144;
constexpr int64_t kHidden = 64;
constexpr int64_t kRows = 65536;  // with this head, ten seconds or more on a few cores

// A file with a head of zeros, which takes no room on the disk.
class ZeroHead {
 public:
  ZeroHead() : path_(absl::StrCat(::testing::TempDir(), "/zero_head.", getpid())) {
    const int64_t bytes = kVocab * kHidden * 4;
    std::string header = absl::StrCat(R"({"lm_head.weight":{"dtype":"F32","shape":[)", kVocab, ",",
                                      kHidden, R"(],"data_offsets":[0,)", bytes, "]}}");
    header.resize((header.size() + 7) / 8 * 8, ' ');
    const auto size = static_cast<uint64_t>(header.size());
    std::ofstream out(path_, std::ios::binary);
    out.write(reinterpret_cast<const char*>(&size), sizeof(size));
    out << header;
    out.close();
    std::filesystem::resize_file(path_, sizeof(size) + size + static_cast<uint64_t>(bytes));
  }
  ~ZeroHead() { std::filesystem::remove(path_); }
  std::string flag() const { return absl::StrCat("--head=zero=", path_); }

 private:
  const std::string path_;
};

// Calls of many seconds, whose callers stay until Leave.
class LongCalls {
 public:
  LongCalls(const ServerProcess& server, int count) {
    v1::TopKRequest request;
    request.set_dtype(v1::DTYPE_F32);
    request.set_rows(kRows);
    request.set_head("zero");
    request.set_hidden_size(kHidden);
    request.set_hidden(std::string(kRows * kHidden * 4, '\0'));
    request.add_k(1);
    const grpc::ByteBuffer message = ToBuffer(request.SerializeAsString());
    for (int i = 0; i < count; ++i) {
      calls_.push_back(std::make_unique<GenericCall>(Connect(server.tcp()), kTopK));
      EXPECT_TRUE(calls_.back()->Start());
      EXPECT_TRUE(calls_.back()->Write(message, /*last=*/true));
    }
    EXPECT_TRUE(server.WaitForMetric(kSlices, '>', 2, absl::Minutes(1)));  // a sanitizer's are slow
    EXPECT_TRUE(server.WaitForMetric("logitd_slabs_in_use", '=', count));
  }
  void Leave() { calls_.clear(); }
  std::vector<grpc::StatusCode> Finish() {
    std::vector<grpc::StatusCode> codes;
    for (const auto& call : calls_) codes.push_back(call->Finish().error_code());
    return codes;
  }

  static constexpr const char* kSlices = "logitd_slices_total{op=\"linear_topk\"}";

 private:
  std::vector<std::unique_ptr<GenericCall>> calls_;
};

// A device that hangs: the one thread that computes stands still, held by ptrace, until the process
// ends.
class HangingDevice {
 public:
  explicit HangingDevice(ServerProcess* server) : server_(server), thread_(Busiest(*server)) {
    const int64_t seized = ptrace(PTRACE_SEIZE, thread_, nullptr, nullptr);
    permitted_ = seized == 0 || errno != EPERM;
    if (!permitted_) return;
    Require(seized);
    Require(ptrace(PTRACE_INTERRUPT, thread_, nullptr, nullptr));
    Require(waitpid(thread_, nullptr, __WALL));
    // Until a traced thread has been waited for, its process cannot be.
    waiter_ = std::thread([this] { waitpid(thread_, nullptr, __WALL); });
  }
  ~HangingDevice() {
    if (!server_->Wait(absl::ZeroDuration()).has_value()) server_->Signal(SIGKILL);
    if (waiter_.joinable()) waiter_.join();
  }

  bool permitted() const { return permitted_; }  // false: the system lets nobody hold threads

 private:
  static void Require(int64_t result) {
    if (result < 0) throw std::runtime_error(absl::StrCat("ptrace: ", strerror(errno)));
  }
  // The time that each thread has computed.
  static std::map<pid_t, int64_t> Ticks(const ServerProcess& server) {
    std::map<pid_t, int64_t> ticks;
    for (const auto& task :
         std::filesystem::directory_iterator(absl::StrCat("/proc/", server.pid(), "/task"))) {
      std::stringstream text;
      text << std::ifstream(task.path() / "stat").rdbuf();
      const std::string stat = text.str();
      std::istringstream fields(stat.substr(stat.rfind(')') + 1));
      const std::vector<std::string> words{std::istream_iterator<std::string>(fields), {}};
      ticks[std::stoi(task.path().filename())] = std::stoll(words.at(11)) + std::stoll(words[12]);
    }
    return ticks;
  }
  static pid_t Busiest(const ServerProcess& server) {
    std::map<pid_t, int64_t> before = Ticks(server);
    absl::SleepFor(absl::Seconds(1));
    pid_t busiest = 0;
    int64_t most = -1;
    for (const auto& [thread, ticks] : Ticks(server)) {
      if (ticks - before[thread] <= most) continue;
      most = ticks - before[thread];
      busiest = thread;
    }
    return busiest;
  }

  ServerProcess* const server_;
  const pid_t thread_;
  bool permitted_ = false;
  std::thread waiter_;
};

TEST(SlicesTest, ADeviceThatHangsEndsTheProcessWithThree) {
  const ZeroHead head;
  ServerProcess server({head.flag(), "--drain-grace=200ms", "--streams=1", "--cpu-threads=1"});
  LongCalls calls(server, 1);
  const HangingDevice hangs(&server);
  if (!hangs.permitted()) GTEST_SKIP() << "ptrace is not permitted";
  server.Signal(SIGTERM);
  EXPECT_EQ(server.Wait(kPatience), 3) << server.Log();
  EXPECT_THAT(server.Log(),
              ::testing::ContainsRegex("the process ends: a batch of linear_topk with 65536 rows "
                                       "has been on the device for ([5-9]|[1-9][0-9]|[0-9]+m)"));
  EXPECT_THAT(calls.Finish(), ::testing::ElementsAre(grpc::StatusCode::UNAVAILABLE));
}

TEST(SlicesTest, CallsWithoutACallerGiveTheDeviceBackAtOnce) {
  const ZeroHead head;
  ServerProcess server({head.flag()});
  LongCalls calls(server, 2);

  // A short call comes in between.
  EXPECT_TRUE(SmallTopK(Connect(server.tcp())).ok());
  EXPECT_TRUE(server.WaitForMetric("logitd_slabs_in_use", '=', 2));

  calls.Leave();
  EXPECT_TRUE(server.WaitForMetric("logitd_slabs_in_use", '=', 0));
  EXPECT_EQ(server.Metric("logitd_stopped_total{op=\"linear_topk\"}"), 2);
  server.Signal(SIGTERM);
  EXPECT_EQ(server.Wait(kPatience), 0) << server.Log();
}

TEST(SlicesTest, TheEndOfTheGraceEndsWorkThatRuns) {
  const ZeroHead head;
  ServerProcess server({head.flag(), "--drain-grace=200ms"});
  LongCalls calls(server, 2);
  server.Signal(SIGTERM);
  EXPECT_EQ(server.Wait(kPatience), 0) << server.Log();
}

}  // namespace
}  // namespace logitd::e2e
