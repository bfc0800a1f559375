// The metrics port as its peers see it: right answers, and peers that finish nothing.
#include "server/metrics_server.h"

#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/time/clock.h"
#include "absl/time/time.h"

namespace logitd {
namespace {

using ::testing::AllOf;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

// A socket to the server.
class Peer {
 public:
  explicit Peer(int port) : fd_(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_in address = {};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<uint16_t>(port));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    EXPECT_EQ(connect(fd_, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  }
  ~Peer() { close(fd_); }
  Peer(const Peer&) = delete;
  Peer& operator=(const Peer&) = delete;

  void Send(const std::string& text) const { send(fd_, text.data(), text.size(), MSG_NOSIGNAL); }
  // To the end of the connection.
  std::string ReadAll() const {
    std::string all;
    char buffer[4096];
    for (ssize_t got = 0; (got = recv(fd_, buffer, sizeof(buffer), 0)) > 0;) {
      all.append(buffer, static_cast<size_t>(got));
    }
    return all;
  }

 private:
  const int fd_;
};

std::unique_ptr<MetricsServer> Serve(const std::string& host = "127.0.0.1") {
  auto server = MetricsServer::Start({.host = host}, [] { return "logitd_heads 3\n"; });
  EXPECT_TRUE(server.ok()) << server.status();
  return *std::move(server);
}

std::string Ask(const MetricsServer& server, const std::string& line) {
  const Peer peer(server.port());
  peer.Send(line + " HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n");
  return peer.ReadAll();
}

TEST(MetricsServerTest, AnswersGetAndHeadOfItsOnePath) {
  const auto server = Serve();
  EXPECT_THAT(Ask(*server, "GET /metrics"),
              AllOf(StartsWith("HTTP/1.1 200"), HasSubstr("text/plain; version=0.0.4"),
                    EndsWith("\r\n\r\nlogitd_heads 3\n")));
  EXPECT_THAT(Ask(*server, "GET /metrics?name=a"), HasSubstr("logitd_heads 3"));
  EXPECT_THAT(
      Ask(*server, "HEAD /metrics"),
      AllOf(StartsWith("HTTP/1.1 200"), HasSubstr("Content-Length: 15"), EndsWith("\r\n\r\n")));
  EXPECT_THAT(Ask(*server, "GET /"), StartsWith("HTTP/1.1 404"));
  EXPECT_THAT(Ask(*server, "GET /metrics/x"), StartsWith("HTTP/1.1 404"));
  EXPECT_THAT(Ask(*server, "DELETE /metrics"),
              AllOf(StartsWith("HTTP/1.1 405"), HasSubstr("Allow: GET, HEAD")));
  const Peer post(server->port());
  post.Send(
      "POST /metrics HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: 3\r\n\r\nabc");
  EXPECT_THAT(post.ReadAll(), StartsWith("HTTP/1.1 405"));
}

TEST(MetricsServerTest, AConnectionServesManyRequests) {
  const auto server = Serve();
  const Peer peer(server->port());
  peer.Send("GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n");
  peer.Send("GET /metrics HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n");
  const std::string answers = peer.ReadAll();
  EXPECT_NE(answers.find("logitd_heads 3"), answers.rfind("logitd_heads 3"));
}

TEST(MetricsServerTest, PeersThatFinishNothingKeepNobodyOut) {
  const auto server = Serve();
  std::vector<std::unique_ptr<Peer>> peers;
  for (int i = 0; i < 500; ++i) {
    peers.push_back(std::make_unique<Peer>(server->port()));
    peers.back()->Send(i % 2 == 0 ? "GET /metrics HTTP/1.1\r\nHost:" : "");
  }
  EXPECT_THAT(Ask(*server, "GET /metrics"), HasSubstr("logitd_heads 3"));
  EXPECT_EQ(peers.front()->ReadAll(), "") << "the oldest were not closed";
}

TEST(MetricsServerTest, AHeadTooLargeForItsRoomIsRefused) {
  const auto server = Serve();
  const Peer peer(server->port());
  peer.Send("GET /metrics HTTP/1.1\r\nA: " + std::string(100000, 'a') + "\r\n\r\n");
  EXPECT_THAT(peer.ReadAll(), Not(HasSubstr("logitd_heads")));
  EXPECT_THAT(Ask(*server, "GET /metrics"), HasSubstr("logitd_heads 3"));
}

TEST(MetricsServerTest, EndsAtOnceWhilePeersAreConnected) {
  auto server = Serve();
  const Peer peer(server->port());
  peer.Send("GET /metr");
  const absl::Time start = absl::Now();
  server.reset();
  EXPECT_LT(absl::Now() - start, absl::Seconds(9));  // an idle peer has ten
  EXPECT_EQ(peer.ReadAll(), "");
}

TEST(MetricsServerTest, ListensOnNamesAndOnIpv6) {
  EXPECT_GT(Serve("localhost")->port(), 0);
  EXPECT_GT(Serve("::1")->port(), 0);
}

TEST(MetricsServerTest, AnAddressThatCannotBeListenedOnIsAnError) {
  const auto server = Serve();
  const auto page = [] { return std::string(); };
  EXPECT_THAT(
      MetricsServer::Start({.host = "127.0.0.1", .port = server->port()}, page).status().message(),
      HasSubstr("in use"));
  EXPECT_FALSE(MetricsServer::Start({.host = "192.0.2.1"}, page).ok());
  EXPECT_FALSE(MetricsServer::Start({.host = "no-such-host.invalid"}, page).ok());
}

}  // namespace
}  // namespace logitd
