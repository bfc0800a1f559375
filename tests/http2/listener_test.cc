#include "server/http2/listener.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "server/http2/connection.h"
#include "server/http2/tls_session.h"
#include "tests/becomes.h"

namespace logitd::http2 {
namespace {

using ::logitd::testing::Becomes;
using ::testing::HasSubstr;

TEST(ConnectionLimitTest, LeavesAReserve) {
  constexpr int64_t kPlenty = int64_t{64} << 30;
  const auto limit = [](int64_t asked, int64_t descriptors) {
    return ConnectionLimit(asked, descriptors, kPlenty, /*tls=*/false);
  };
  EXPECT_EQ(limit(0, 1024), 1024 - 128);
  EXPECT_EQ(limit(0, 200), 100);
  EXPECT_EQ(limit(0, 1 << 20), 65536);
  EXPECT_EQ(limit(5, 1024), 5);
  EXPECT_EQ(limit(5000, 1024), 1024 - 128);
  EXPECT_EQ(limit(0, 1), 1);
}

TEST(ConnectionLimitTest, IdleConnectionsFitIntoTheirMemory) {
  constexpr int64_t kBytes = int64_t{256} << 20;
  for (const int64_t asked : {0, 65536}) {
    const int64_t plain = ConnectionLimit(asked, 1 << 20, kBytes, /*tls=*/false);
    EXPECT_LE(plain * kIdleBytes, kBytes / 4 * 3);
    EXPECT_GT(plain, 4000);
    const int64_t tls = ConnectionLimit(asked, 1 << 20, kBytes, /*tls=*/true);
    EXPECT_LE(tls * (kIdleBytes + TlsSession::kIdleBytes), kBytes / 4 * 3);
    EXPECT_GT(tls, 3000);
  }
  EXPECT_EQ(ConnectionLimit(100, 1 << 20, kBytes, true), 100);
}

int ConnectTo(const std::string& listening, int family = AF_INET) {
  const std::vector<std::string> parts = absl::StrSplit(listening, ':');
  const auto port = htons(static_cast<uint16_t>(std::stoi(parts.back())));
  const int fd = socket(family, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in v4 = {.sin_family = AF_INET, .sin_port = port};
  v4.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  sockaddr_in6 v6 = {.sin6_family = AF_INET6, .sin6_port = port};
  v6.sin6_addr = in6addr_loopback;
  const bool four = family == AF_INET;
  if (connect(fd, four ? reinterpret_cast<sockaddr*>(&v4) : reinterpret_cast<sockaddr*>(&v6),
              four ? sizeof(v4) : sizeof(v6)) == 0) {
    return fd;
  }
  close(fd);
  return -1;
}

class ListenerTest : public ::testing::Test {
 protected:
  ~ListenerTest() override {
    Stop();
    for (const int fd : taken_) close(fd);
  }

  void Start() {
    listener_.Start(
        &loop_,
        [this](int fd, const sockaddr_storage&, socklen_t) {
          taken_.push_back(fd);
          ++count_;
        },
        [this] { ++refused_; });
    loop_.Start("listener");
  }
  void Stop() {
    loop_.Stop();
    listener_.Stop();
    loop_.Stop();  // it closes the sockets
  }

  Loop loop_;
  std::vector<int> taken_;  // of the loop until it ends
  std::atomic<int> count_ = 0;
  std::atomic<int> refused_ = 0;
  Listener listener_;
};

TEST_F(ListenerTest, AUnixSocketsFileHasThePermissionsThatAreAskedFor) {
  std::string directory = (std::filesystem::temp_directory_path() / "listener-XXXXXX").string();
  ASSERT_NE(mkdtemp(directory.data()), nullptr);
  for (const mode_t mode : {0600, 0666}) {
    const std::string path = absl::StrCat(directory, "/", mode);
    Listener listener;
    ASSERT_TRUE(listener.Listen({"unix:" + path}, mode).ok());
    struct stat file = {};
    ASSERT_EQ(stat(path.c_str(), &file), 0);
    EXPECT_EQ(file.st_mode & 0777, mode);
  }
  std::filesystem::remove_all(directory);
}

TEST_F(ListenerTest, HandsOutWhatConnects) {
  ASSERT_TRUE(listener_.Listen({"127.0.0.1:0"}).ok());
  const int early = ConnectTo(listener_.listening()[0]);
  Start();
  const int late = ConnectTo(listener_.listening()[0]);
  EXPECT_TRUE(Becomes([&] { return count_ == 2; }));
  Stop();
  EXPECT_EQ(ConnectTo(listener_.listening()[0]), -1);
  close(early);
  close(late);
}

TEST_F(ListenerTest, AnAddressWithoutAFamilyTakesBoth) {
  ASSERT_TRUE(listener_.Listen({"0.0.0.0:0"}).ok());
  Start();
  const int v4 = ConnectTo(listener_.listening()[0]);
  const int v6 = ConnectTo(listener_.listening()[0], AF_INET6);
  EXPECT_GE(v4, 0);
  EXPECT_TRUE(v6 >= 0 || socket(AF_INET6, SOCK_STREAM, 0) < 0 || errno == EADDRNOTAVAIL);
  close(v4);
  if (v6 >= 0) close(v6);
}

TEST_F(ListenerTest, ANameMayBeSeveralAddressesOfOnePort) {
  ASSERT_TRUE(listener_.Listen({"localhost:0"}).ok());
  Start();
  const int v4 = ConnectTo(listener_.listening()[0]);
  EXPECT_GE(v4, 0);
  close(v4);
}

TEST_F(ListenerTest, AnErrorNamesTheAddress) {
  for (const char* address : {"192.0.2.1:0", "no.such.host.invalid:80", "127.0.0.1:70000"}) {
    EXPECT_THAT(listener_.Listen({address}).message(), HasSubstr(address));
  }
}

TEST_F(ListenerTest, ATakenPortIsRefused) {
  ASSERT_TRUE(listener_.Listen({"127.0.0.1:0"}).ok());
  Listener second;
  EXPECT_THAT(second.Listen(listener_.listening()).message(), HasSubstr("in use"));
}

// The process has no descriptor left for a while.
TEST_F(ListenerTest, RecoversWhenThereWereNoDescriptors) {
  ASSERT_TRUE(listener_.Listen({"127.0.0.1:0"}).ok());
  Start();
  const int fd = ConnectTo(listener_.listening()[0]);
  EXPECT_TRUE(Becomes([&] { return count_ == 1; }));
  const int last = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  rlimit before = {};
  getrlimit(RLIMIT_NOFILE, &before);
  const rlimit none = {.rlim_cur = static_cast<rlim_t>(last), .rlim_max = before.rlim_max};
  setrlimit(RLIMIT_NOFILE, &none);
  sockaddr_in address = {.sin_family = AF_INET};
  const std::vector<std::string> parts = absl::StrSplit(listener_.listening()[0], ':');
  address.sin_port = htons(static_cast<uint16_t>(std::stoi(parts.back())));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  EXPECT_EQ(connect(last, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  char byte = 0;
  EXPECT_LE(recv(last, &byte, 1, 0), 0) << "refused, not left in the queue";
  EXPECT_EQ(refused_, 1);
  setrlimit(RLIMIT_NOFILE, &before);
  const int next = ConnectTo(listener_.listening()[0]);
  EXPECT_TRUE(Becomes([&] { return count_ == 2; }));
  close(fd);
  close(last);
  close(next);
}

}  // namespace
}  // namespace logitd::http2
