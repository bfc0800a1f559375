// A server with its loops, and clients that speak frames to it.
#include "server/http2/server.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/becomes.h"
#include "tests/certificates.h"
#include "tests/http2/client_hello.h"
#include "tests/http2/echo.h"
#include "tests/http2/raw_client.h"

namespace logitd::http2 {
namespace {

using ::logitd::testing::Becomes;
using ::testing::AnyOf;
using ::testing::Each;
using testing::Echo;
using testing::Frame;
using testing::RawClient;
using testing::Request;

class Early final : public Echo {
 public:
  using Echo::Echo;
  void OnBody(absl::Span<const std::byte> bytes) override {
    if (stream()->HoldEarly(static_cast<int64_t>(bytes.size()))) Echo::OnBody(bytes);
  }
};

class ServerTest : public ::testing::Test, public ServerEvents {
 protected:
  void Start(ServerOptions options) {
    path_ = absl::StrCat(::testing::TempDir(), "/logitd_http2_", getpid());
    server_ = std::make_unique<Server>(options, this);
    ASSERT_TRUE(server_->Listen({"unix:" + path_, "127.0.0.1:0"}, std::nullopt).ok());
    server_->Start();
  }
  void TearDown() override {  // the loops call this object's methods until then
    server_.reset();
    EXPECT_EQ(open_, 0);
  }

  std::shared_ptr<StreamEvents> OnStream(Stream* stream) override {
    return std::make_shared<Early>(stream);
  }
  void OnOpen(int64_t open) override { open_ = open; }
  void OnRefused() override { ++refused_; }
  void OnCut(Cut cut) override { cut_ = cut; }
  void OnHandshake(HandshakeEnd end) override { ++handshakes_[static_cast<size_t>(end)]; }

  std::unique_ptr<RawClient> Connect() {
    const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_un address = {.sun_family = AF_UNIX};
    path_.copy(address.sun_path, sizeof(address.sun_path) - 1);
    EXPECT_EQ(connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
    auto client = std::make_unique<RawClient>(fd);
    client->Begin();
    return client;
  }
  int TcpSocket() {
    const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    const std::string& listening = server_->listening().back();
    sockaddr_in to = {.sin_family = AF_INET,
                      .sin_port = htons(std::stoi(listening.substr(listening.rfind(':') + 1)))};
    to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    EXPECT_EQ(connect(fd, reinterpret_cast<sockaddr*>(&to), sizeof(to)), 0);
    return fd;
  }
  // From another origin.
  std::unique_ptr<RawClient> ConnectTcp() {
    auto client = std::make_unique<RawClient>(TcpSocket());
    client->Begin();
    return client;
  }
  static bool Ends(RawClient& client) {
    return Becomes([&] {
      client.Take();
      return client.ended();
    });
  }
  // The body that comes back.
  static std::string Call(RawClient& client, int32_t stream) {
    client.Send(client.Headers(stream, Request("/")));
    client.Send(RawClient::Data(stream, "hello", true));
    std::string body;
    bool ended = false;
    EXPECT_TRUE(Becomes([&] {
      for (const Frame& frame : client.Take()) {
        if (frame.type == NGHTTP2_DATA) body += frame.payload;
        ended = ended || (frame.type == NGHTTP2_HEADERS && frame.ends_stream());
      }
      return ended;
    }));
    return body;
  }

  std::string path_;
  std::atomic<int64_t> open_ = 0;
  std::atomic<int> refused_ = 0;
  std::atomic<Cut> cut_ = Cut::kNone;
  std::array<std::atomic<int>, kHandshakeEndNames.size()> handshakes_ = {};
  std::unique_ptr<Server> server_;
};

TEST_F(ServerTest, SpreadsConnectionsOverItsLoopsAndCountsThem) {
  Start({.loops = 3});
  std::vector<std::unique_ptr<RawClient>> clients;
  for (int i = 0; i < 6; ++i) {
    clients.push_back(Connect());
    EXPECT_EQ(Call(*clients.back(), 1), "hello");
  }
  EXPECT_EQ(server_->open(), 6);
  EXPECT_EQ(open_, 6);
  EXPECT_GT(server_->traffic().received, 6 * 33);
  EXPECT_GT(server_->traffic().sent, 6 * 33);
  EXPECT_TRUE(Becomes([&] { return server_->held_bytes() > 6 * 1000; })) << "nghttp2's memory";
  clients.clear();
  EXPECT_TRUE(Becomes([&] { return server_->open() == 0 && server_->held_bytes() == 0; }));
  EXPECT_EQ(cut_, Cut::kNone);
}

TEST_F(ServerTest, RefusesMoreConnectionsThanItsLimit) {
  Start({.max_connections = 2});
  auto first = Connect();
  auto second = Connect();
  EXPECT_EQ(Call(*first, 1), "hello");
  EXPECT_EQ(Call(*second, 1), "hello");
  auto third = Connect();
  EXPECT_TRUE(Ends(*third));
  EXPECT_EQ(refused_, 1);
  second.reset();
  EXPECT_TRUE(Becomes([&] { return open_ == 1; }));
  EXPECT_EQ(Call(*Connect(), 1), "hello");
}

TEST_F(ServerTest, AnOriginLeavesPlacesForOthers) {
  Start({.max_connections = 8});
  std::vector<std::unique_ptr<RawClient>> all;
  for (int i = 0; i < 5; ++i) {
    all.push_back(Connect());
    EXPECT_EQ(Call(*all.back(), 1), "hello");
  }
  EXPECT_TRUE(Ends(*Connect()));
  EXPECT_EQ(refused_, 1);
  for (int i = 0; i < 2; ++i) {
    all.push_back(ConnectTcp());
    EXPECT_EQ(Call(*all.back(), 1), "hello") << "another origin";
  }
}

TEST_F(ServerTest, SilentPeersDoNotEndAHandshakeThatHasBegun) {
  const logitd::testing::Authority authority;
  const logitd::testing::Issued own = authority.IssueServer();
  const auto tls = std::make_shared<door::TlsSource>();
  ASSERT_TRUE(tls->Set({.certificate = own.certificate, .key = own.key}).ok());
  Start({.max_handshakes = 2, .tls = tls});

  const int begun = TcpSocket();
  const std::string hello = testing::ClientHello();
  ASSERT_EQ(send(begun, hello.data(), hello.size(), 0), static_cast<ssize_t>(hello.size()));
  pollfd answer = {begun, POLLIN, 0};
  ASSERT_EQ(poll(&answer, 1, 20'000), 1);

  const int first = TcpSocket();
  const int second = TcpSocket();
  char bytes[8192];
  EXPECT_EQ(recv(first, bytes, 1, 0), 0) << "the silent one gave its place";
  EXPECT_EQ(handshakes_[static_cast<size_t>(HandshakeEnd::kEvicted)], 1);
  while (recv(begun, bytes, sizeof(bytes), MSG_DONTWAIT) > 0) continue;
  EXPECT_EQ(errno, EAGAIN) << "the other one is open";
  for (const int fd : {begun, first, second}) close(fd);
  EXPECT_TRUE(Becomes([&] { return open_ == 0; }));
}

TEST_F(ServerTest, RefusesWhileItIsTold) {
  Start({});
  auto before = Connect();
  EXPECT_EQ(Call(*before, 1), "hello");
  server_->Refuse(true);
  EXPECT_TRUE(Ends(*Connect()));
  EXPECT_EQ(Call(*before, 3), "hello");
  server_->Refuse(false);
  EXPECT_EQ(Call(*Connect(), 1), "hello");
}

TEST_F(ServerTest, WhileTooMuchIsHeldTheStillestConnectionIsCut) {
  Start({.loops = 2, .max_held_bytes = int64_t{1} << 20});
  auto honest = Connect();
  EXPECT_EQ(Call(*honest, 1), "hello");
  auto holder = Connect();
  int64_t sent = 0;
  for (int32_t stream = 1; cut_ != Cut::kMemory && stream < 100; stream += 2) {
    if (!holder->Send(holder->Headers(stream, Request("/")))) break;
    if (!holder->Send(RawClient::Data(stream, std::string(60'000, 'x')))) break;
    sent += 60'000;
    EXPECT_TRUE(
        Becomes([&] { return server_->traffic().received > sent || cut_ == Cut::kMemory; }));
  }
  EXPECT_TRUE(Ends(*holder));
  EXPECT_EQ(cut_, Cut::kMemory);
  EXPECT_EQ(Call(*honest, 3), "hello");
}

TEST_F(ServerTest, TheOriginThatHoldsMostLosesFirst) {
  Start({.loops = 2, .max_held_bytes = int64_t{2} << 20});
  int64_t sent = 0;
  const auto hold = [&](RawClient& client, int32_t stream) {
    EXPECT_TRUE(client.Send(client.Headers(stream, Request("/"))));
    EXPECT_TRUE(client.Send(RawClient::Data(stream, std::string(50'000, 'x'))));
    sent += 50'000;
    EXPECT_TRUE(Becomes([&] { return server_->traffic().received > sent; }));
  };
  auto honest = Connect();
  for (int32_t stream = 1; stream < 11; stream += 2) hold(*honest, stream);
  std::vector<std::unique_ptr<RawClient>> many;
  while (cut_ != Cut::kMemory && many.size() < 40) {
    many.push_back(ConnectTcp());
    hold(*many.back(), 1);  // less than the honest one
  }
  EXPECT_TRUE(Becomes([&] { return cut_ == Cut::kMemory; }));
  int32_t stream = 9;
  EXPECT_TRUE(Becomes([&] { return Call(*honest, stream += 2) == "hello"; }));
}

TEST_F(ServerTest, ADrainClosesConnectionsWithoutCalls) {
  Start({});
  auto idle = Connect();
  EXPECT_EQ(Call(*idle, 1), "hello");
  server_->Drain();
  EXPECT_TRUE(Ends(*idle));
  EXPECT_EQ(Call(*Connect(), 1), "hello") << "the layer above refuses calls";
}

TEST_F(ServerTest, AShutdownClosesAllAndTakesNoMore) {
  Start({.loops = 2});
  auto client = Connect();
  EXPECT_EQ(Call(*client, 1), "hello");
  client->Send(client->Headers(3, Request("/")));
  server_->Shutdown();
  EXPECT_TRUE(Ends(*client));
  EXPECT_EQ(server_->open(), 0);
  EXPECT_EQ(server_->held_bytes(), 0);
  EXPECT_NE(access(path_.c_str(), F_OK), 0) << "the socket's file is gone";
}

}  // namespace
}  // namespace logitd::http2
