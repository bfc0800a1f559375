// One client of several servers.
#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/client.h"
#include "tests/becomes.h"
#include "tests/client/fake_server.h"
#include "tests/client/running_logitd.h"
#include "tests/client/test_values.h"

// gRPC's client looks names up with c-ares, which never frees a few bytes of each lookup.
extern "C" const char* __lsan_default_suppressions() { return "leak:libcares.so"; }

namespace logitd {
namespace {

using ::logitd::testing::Becomes;
using ::logitd::testing::Daemon;
using ::logitd::testing::FakeServer;
using ::logitd::testing::LogitdFlags;
using ::logitd::testing::TopKParams;
using ::logitd::testing::ViewOf;
using ::logitd::testing::WaitUntilServing;
using ::testing::HasSubstr;

const std::vector<float> kRow = {0, 5, 1};

absl::Status AskOnce(client::Client& client) {
  const auto answer =
      client.TopK({.rows = 1, .vocab = 3, .logits = {ViewOf(kRow)}, .params = TopKParams({1})});
  if (!answer.ok()) return answer.status();
  return answer->answer.indices(0) == 1 ? absl::OkStatus() : absl::InternalError("a wrong token");
}

std::unique_ptr<client::Client> ClientOf(const std::string& address, bool round_robin) {
  auto client = client::Client::Create({.address = address, .round_robin = round_robin});
  EXPECT_TRUE(client.ok()) << client.status();
  return *std::move(client);
}

std::string FreeAddress() {
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address = {.sin_family = AF_INET};
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof(address);
  EXPECT_EQ(bind(fd, reinterpret_cast<sockaddr*>(&address), length), 0);
  getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length);
  close(fd);
  return absl::StrCat("127.0.0.1:", ntohs(address.sin_port));
}

TEST(RoundRobinTest, CallsGoToAllServersOnlyWhereAsked) {
  for (const bool round_robin : {false, true}) {
    FakeServer first, second;
    const auto client =
        ClientOf(absl::StrCat("ipv4:", first.address(), ",", second.address()), round_robin);
    const bool both = Becomes([&] {
      EXPECT_TRUE(AskOnce(*client).ok());
      const int all = first.calls() + second.calls();
      return first.calls() >= 5 && second.calls() >= 5 ? true : !round_robin && all > 50;
    });
    EXPECT_TRUE(both);
    if (!round_robin) {
      EXPECT_EQ(std::min(first.calls(), second.calls()), 0);
    }
  }
}

TEST(RoundRobinTest, AServerThatIsNotServingGetsNoCalls) {
  FakeServer first, second;
  const auto client = ClientOf(absl::StrCat("ipv4:", first.address(), ",", second.address()), true);
  ASSERT_TRUE(Becomes([&] {
    EXPECT_TRUE(AskOnce(*client).ok());
    return first.calls() >= 2 && second.calls() >= 2;
  }));
  first.SetServing(false);
  // It takes a while until the client's watch of its health hears of it.
  ASSERT_TRUE(Becomes([&] {
    const int before = first.calls();
    for (int i = 0; i < 6; ++i) EXPECT_TRUE(AskOnce(*client).ok());
    return first.calls() == before;
  }));
  const int before = first.calls();
  for (int i = 0; i < 20; ++i) EXPECT_TRUE(AskOnce(*client).ok());
  EXPECT_EQ(first.calls(), before);
}

TEST(RoundRobinTest, ADrainedServerLosesNoCall) {
  const std::string addresses[] = {FreeAddress(), FreeAddress()};
  std::unique_ptr<Daemon> servers[2];
  for (int i = 0; i < 2; ++i) {
    servers[i] = std::make_unique<Daemon>("logitd", LogitdFlags(addresses[i], {}));
    ASSERT_TRUE(WaitUntilServing(*ClientOf(addresses[i], false)));
  }
  const auto client = ClientOf(absl::StrCat("ipv4:", addresses[0], ",", addresses[1]), true);
  std::atomic<bool> stop = false;
  std::atomic<int> good = 0;
  std::atomic<int> bad = 0;
  std::vector<std::thread> callers;
  for (int i = 0; i < 4; ++i) {
    callers.emplace_back([&] {
      while (!stop) {
        const absl::Status status = AskOnce(*client);
        ++(status.ok() ? good : bad);
        if (!status.ok()) ADD_FAILURE() << status;
      }
    });
  }
  const auto works = [](const std::string& address) {
    const auto load = ClientOf(address, false)->GetLoad();
    return load.ok() && load->ops_size() > 0 && load->ops(0).rows_per_s() > 0;
  };
  for (const std::string& address : addresses) {
    EXPECT_TRUE(Becomes([&] { return works(address); })) << address;
  }
  servers[0].reset();  // SIGTERM; returns when the process has ended
  const int after = good;
  EXPECT_TRUE(Becomes([&] { return good > after + 50; }));
  stop = true;
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(bad, 0);
}

TEST(RoundRobinTest, ANameMayStandForSeveralServers) {
  FakeServer server;
  const std::string port = server.address().substr(server.address().rfind(':'));
  const auto client = ClientOf("dns:///localhost" + port, true);
  EXPECT_TRUE(AskOnce(*client).ok());
}

TEST(RoundRobinTest, EveryServerNeedsAPortAndATokenStaysOnThisMachine) {
  for (const char* address :
       {"ipv4:127.0.0.1", "ipv4:127.0.0.1:1,127.0.0.2", "dns:///name", "ipv4:", "ipv6:[::1]:0"}) {
    EXPECT_THAT(std::string(client::Client::Create({.address = address}).status().message()),
                HasSubstr("allowed HOST:PORT, [IPv6]:PORT, unix:PATH, ipv4:A:PORT,B:PORT"));
  }
  const std::string token(32, 'a');
  EXPECT_TRUE(
      client::Client::Create({.address = "ipv4:127.0.0.1:1,127.0.0.2:1", .token = token}).ok());
  EXPECT_FALSE(
      client::Client::Create({.address = "ipv4:127.0.0.1:1,10.0.0.1:1", .token = token}).ok());
  EXPECT_FALSE(client::Client::Create({.address = "dns:///host:1", .token = token}).ok());
}

}  // namespace
}  // namespace logitd
