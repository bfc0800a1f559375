// Leases in the life of the server: what a drain leaves, and what its page shows.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstring>
#include <memory>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "formats/arena_protocol.h"
#include "formats/ring_protocol.h"
#include "tests/arena/held_file.h"
#include "tests/e2e/server_process.h"

namespace logitd::e2e {
namespace {

// A connection that has asked for a page, or -1.
int AskForPage(const std::string& path) {
  const int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  std::strncpy(address.sun_path, path.c_str(), sizeof(address.sun_path) - 1);
  const ArenaAsk ask = {.bytes = 4096};
  if (connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0 &&
      send(fd, &ask, sizeof(ask), MSG_NOSIGNAL) == ssize_t{sizeof(ask)}) {
    return fd;
  }
  close(fd);
  return -1;
}

// The code of the answer; -1: the connection has ended.
int64_t CodeOf(int fd) {
  ArenaAnswer answer;
  const ssize_t bytes = recv(fd, &answer, sizeof(answer), 0);
  return bytes < ssize_t{sizeof(answer)} ? -1 : int64_t{answer.code};
}

// The file of a lease; -1: there is none.
int ReceiveFile(int client) {
  ArenaAnswer answer;
  iovec part = {&answer, sizeof(answer)};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message = {};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  int file = -1;
  if (recvmsg(client, &message, MSG_CMSG_CLOEXEC) != ssize_t{sizeof(answer)}) return file;
  if (const cmsghdr* header = CMSG_FIRSTHDR(&message); header != nullptr) {
    std::memcpy(&file, CMSG_DATA(header), sizeof(file));
  }
  return file;
}

TEST(ArenaTest, ThePageCountsLeasesAndADrainEndsThem) {
  const std::string path = absl::StrCat(::testing::TempDir(), "/logitd_arena_", getpid());
  ServerProcess server(
      {"--arena-listen", absl::StrCat("unix:", path), "--max-arena-bytes", "1MiB"});
  EXPECT_EQ(server.Metric("logitd_arena_bytes_limit"), 1 << 20);
  const int first = AskForPage(path);
  const int second = AskForPage(path);
  EXPECT_EQ(CodeOf(first), 0);
  EXPECT_EQ(CodeOf(second), 0);
  EXPECT_TRUE(server.WaitForMetric("logitd_arena_leases", '=', 2));
  EXPECT_EQ(server.Metric("logitd_arena_bytes"), 8192);
  EXPECT_EQ(server.Metric("logitd_arena_leases_total"), 2);
  close(first);
  EXPECT_TRUE(server.WaitForMetric("logitd_arena_leases", '=', 1));
  EXPECT_TRUE(server.WaitForMetric("logitd_arena_bytes", '=', 4096));

  server.Signal(SIGTERM);
  EXPECT_EQ(server.Wait(absl::Seconds(20)), 0) << server.Log();
  EXPECT_EQ(CodeOf(second), -1);
  EXPECT_EQ(access(path.c_str(), F_OK), -1) << "the socket's file is still there";
  close(second);
}

// A lease of a page with a ring in it, whose client holds the lock of its file.
class HoldingClientTest : public ::testing::Test {
 protected:
  HoldingClientTest()
      : path_(absl::StrCat(::testing::TempDir(), "/logitd_arena_held_", getpid())),
        server_({"--arena-listen", absl::StrCat("unix:", path_), "--drain-grace", "1s"}) {}
  ~HoldingClientTest() override {
    held_.reset();
    close(client_);
    close(file_);
  }

  // False: this system cannot hold one.
  bool Hold() {
    client_ = AskForPage(path_);
    file_ = ReceiveFile(client_);
    EXPECT_GE(file_, 0);
    held_ = std::make_unique<HeldFile>(file_);
    return held_->holds();
  }
  void OpenRing() {
    const RingAsk ask = {.slots = 1, .entry_bytes = 128, .answer_bytes = 128};
    EXPECT_EQ(send(client_, &ask, sizeof(ask), MSG_NOSIGNAL), ssize_t{sizeof(ask)});
    RingAnswer answer;
    EXPECT_EQ(recv(client_, &answer, sizeof(answer), 0), ssize_t{sizeof(answer)});
    EXPECT_EQ(answer.code, 0u);
    // Its thread writes there before it sleeps.
    char asleep = 0;
    const absl::Time end = absl::Now() + absl::Seconds(10);
    while (asleep == 0 && absl::Now() < end) {
      ASSERT_EQ(pread(file_, &asleep, 1, kServerAsleepAt), 1);
    }
    EXPECT_EQ(asleep, 1) << "the server waits for its client";
  }

  const std::string path_;
  ServerProcess server_;
  int client_ = -1;
  int file_ = -1;
  std::unique_ptr<HeldFile> held_;
};

TEST_F(HoldingClientTest, DoesNotDelayADrain) {
  if (!Hold()) GTEST_SKIP() << HeldFile::kUnavailable;
  OpenRing();
  server_.Signal(SIGTERM);
  EXPECT_EQ(server_.Wait(absl::Seconds(20)), 0) << server_.Log();
}

TEST_F(HoldingClientTest, DoesNotOutliveAKill) {
  if (!Hold()) GTEST_SKIP() << HeldFile::kUnavailable;
  OpenRing();
  server_.Signal(SIGKILL);
  EXPECT_EQ(server_.Wait(absl::Seconds(20)), 128 + SIGKILL);
}

TEST_F(HoldingClientTest, KeepsOnlyItsOwnMemoryAfterItsLease) {
  if (!Hold()) GTEST_SKIP() << HeldFile::kUnavailable;
  shutdown(client_, SHUT_RDWR);
  EXPECT_TRUE(server_.WaitForMetric("logitd_arena_leaving_bytes", '=', 4096));
  const int other = AskForPage(path_);
  EXPECT_EQ(CodeOf(other), 0);
  close(other);
  server_.Signal(SIGTERM);
  EXPECT_EQ(server_.Wait(absl::Seconds(20)), 0) << server_.Log();
}

}  // namespace
}  // namespace logitd::e2e
