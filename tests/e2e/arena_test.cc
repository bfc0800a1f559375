// Leases in the life of the server: what a drain leaves, and what its page shows.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstring>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "formats/arena_protocol.h"
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

}  // namespace
}  // namespace logitd::e2e
