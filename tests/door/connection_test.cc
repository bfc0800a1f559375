#include "server/door/connection.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "server/door/sockets.h"
#include "tests/door/bytes.h"

namespace logitd::door {
namespace {

class Counts final : public ConnectionEvents {
 public:
  void OnOpen(int64_t open) override { open_ = open; }
  void OnRefused() override { ++refused_; }
  void OnCut(Limit reason) override { cut_.push_back(reason); }

  int64_t open_ = 0;
  int refused_ = 0;
  std::vector<Limit> cut_;
};

// An address of another machine.
sockaddr_in From(const char* host, uint16_t port) {
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_port = htons(port);
  inet_pton(AF_INET, host, &address.sin_addr);
  return address;
}

// Both ends of a socket; `fd` is the server's.
struct Pair {
  Pair() {
    int both[2] = {};
    EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, both), 0);
    fd = both[0];
    peer = both[1];
  }
  ~Pair() {
    if (fd >= 0) close(fd);
    close(peer);
  }
  void Close() {
    close(fd);
    fd = -1;
  }
  void Write(const std::string& bytes) const {
    ASSERT_EQ(write(peer, bytes.data(), bytes.size()), static_cast<ssize_t>(bytes.size()));
  }
  // As gRPC reads: the result of recvmsg.
  ssize_t Read() const {
    char buffer[65536];
    iovec parts[] = {{buffer, 10}, {buffer + 10, sizeof(buffer) - 10}};
    msghdr message = {.msg_iov = parts, .msg_iovlen = 2};
    return recvmsg(fd, &message, 0);
  }
  ssize_t Send(std::string bytes) const {
    iovec part = {bytes.data(), bytes.size()};
    msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
    return sendmsg(fd, &message, MSG_NOSIGNAL);
  }

  int fd;
  int peer;
};

class ConnectionTest : public ::testing::Test {
 protected:
  std::shared_ptr<Connection> Add(int fd, const sockaddr_in& from) {
    return connections_->Add(fd, reinterpret_cast<const sockaddr*>(&from), sizeof(from));
  }
  std::shared_ptr<Connection> Add(const Pair& pair) {
    return Add(pair.fd, From("127.0.0.1", next_port_++));
  }

  uint16_t next_port_ = 1000;
  const std::shared_ptr<Counts> counts_ = std::make_shared<Counts>();
  const std::shared_ptr<Connections> connections_ =
      Connections::Create({.max_connections = 4}, counts_);
};

TEST_F(ConnectionTest, CountsWhatIsReadAndWritten) {
  EXPECT_TRUE(SocketsAreWatched());
  const Pair pair;
  const auto connection = Add(pair);
  const std::string bytes =
      Preface() + Frame(kSettings, 0, 0, "") + Open(1) + Frame(kData, 0, 1, Message(100));
  EXPECT_FALSE(connection->HasUnread());
  pair.Write(bytes);
  EXPECT_TRUE(connection->HasUnread());
  EXPECT_EQ(pair.Read(), static_cast<ssize_t>(bytes.size()));
  EXPECT_FALSE(connection->HasUnread());
  EXPECT_EQ(connection->received_bytes(), static_cast<int64_t>(bytes.size()));
  EXPECT_EQ(connection->message_bytes(), 105);
  EXPECT_EQ(connection->open_streams(), 1);
  EXPECT_GT(pair.Send(Frame(kHeaders, kEndStream | kEndHeaders, 1, "\x88")), 0);
  EXPECT_EQ(connection->open_streams(), 0);
}

// Calls find their connection, and so the identity of its certificate, by the peer's address.
TEST_F(ConnectionTest, ASecondConnectionOfAnOpenAddressIsRefused) {
  auto first = std::make_unique<Pair>();
  const Pair second;
  const auto connection = Add(first->fd, From("10.0.0.1", 5000));
  ASSERT_NE(connection, nullptr);
  EXPECT_EQ(Add(second.fd, From("10.0.0.1", 5000)), nullptr);
  EXPECT_EQ(connections_->Find("ipv4:10.0.0.1:5000"), connection);
  first.reset();  // closes it
  EXPECT_NE(Add(second.fd, From("10.0.0.1", 5000)), nullptr);
}

TEST_F(ConnectionTest, IsCutByTheReadThatBreaksALimit) {
  const Pair pair;
  const auto connection = Add(pair);
  pair.Write(Preface() + Frame(kHeaders, 0, 1, std::string(1, '\0') + "\1x\x7f\x80\x80\x80\x01"));
  EXPECT_EQ(pair.Read(), -1);
  EXPECT_EQ(errno, ECONNRESET);
  EXPECT_EQ(counts_->cut_, std::vector<Limit>{Limit::kHeaderList});
  char byte = 0;
  EXPECT_EQ(read(pair.peer, &byte, 1), 0) << "the peer sees the end";
  connection->Cut(Limit::kMemory);
  EXPECT_EQ(counts_->cut_.size(), 1U) << "it is cut once";
}

TEST_F(ConnectionTest, CanBeCutByAnyone) {
  const Pair pair;
  Add(pair)->Cut(Limit::kMemory);
  char byte = 0;
  EXPECT_EQ(read(pair.peer, &byte, 1), 0);
  EXPECT_EQ(pair.Read(), 0);
}

TEST_F(ConnectionTest, ACutAfterTheCloseHarmsNoOtherDescriptor) {
  Pair pair;
  const auto connection = Add(pair);
  pair.Close();
  const Pair other;  // gets the same descriptor
  connection->Cut(Limit::kMemory);
  other.Write("x");
  EXPECT_EQ(other.Read(), 1);
  EXPECT_TRUE(counts_->cut_.empty());
}

TEST_F(ConnectionTest, LeavesWhenItsDescriptorIsClosed) {
  Pair pair;
  const std::string peer = Add(pair)->peer();
  EXPECT_EQ(counts_->open_, 1);
  EXPECT_NE(connections_->Find(peer), nullptr);
  pair.Close();
  EXPECT_EQ(counts_->open_, 0);
  EXPECT_EQ(connections_->open(), 0);
  EXPECT_EQ(connections_->Find(peer), nullptr);
}

TEST_F(ConnectionTest, IsFoundByThePeerAsGrpcNamesIt) {
  const Pair v4;
  const Pair v6;
  const Pair mapped;
  const Pair local;
  EXPECT_EQ(Add(v4.fd, From("10.1.2.3", 77))->peer(), "ipv4:10.1.2.3:77");
  sockaddr_in6 six = {};
  six.sin6_family = AF_INET6;
  six.sin6_port = htons(99);
  const auto add = [&](int fd, const char* address) {
    inet_pton(AF_INET6, address, &six.sin6_addr);
    return connections_->Add(fd, reinterpret_cast<const sockaddr*>(&six), sizeof(six));
  };
  const auto six_peer = add(v6.fd, "2001:db8::1");
  EXPECT_EQ(six_peer, connections_->Find("ipv6:%5B2001:db8::1%5D:99"));
  const auto mapped_peer = add(mapped.fd, "::ffff:10.1.2.3");
  EXPECT_EQ(mapped_peer, connections_->Find("ipv4:10.1.2.3:99"));
  const sockaddr unnamed = {.sa_family = AF_UNIX};
  const auto unix_peer = connections_->Add(local.fd, &unnamed, sizeof(sa_family_t));
  EXPECT_EQ(unix_peer, connections_->Find("unix:connection-4"));
  sockaddr_un named = {};
  socklen_t length = sizeof(named);
  ASSERT_EQ(getpeername(local.fd, reinterpret_cast<sockaddr*>(&named), &length), 0);
  EXPECT_STREQ(named.sun_path, "connection-4");
  EXPECT_EQ(connections_->Find("ipv4:10.1.2.3:1"), nullptr);
}

TEST_F(ConnectionTest, ConnectionsAreBounded) {
  std::vector<std::unique_ptr<Pair>> pairs;
  for (int i = 0; i < 5; ++i) pairs.push_back(std::make_unique<Pair>());
  for (int i = 0; i < 4; ++i) EXPECT_NE(Add(*pairs[i]), nullptr);
  EXPECT_EQ(Add(*pairs[4]), nullptr);
  EXPECT_EQ(counts_->refused_, 1);
  pairs[0]->Close();
  EXPECT_NE(Add(*pairs[4]), nullptr);
}

TEST_F(ConnectionTest, AnotherMachineMayHaveHalfOfThem) {
  Pair a;
  const Pair b;
  const Pair c;
  EXPECT_NE(Add(a.fd, From("10.0.0.1", 1)), nullptr);
  EXPECT_NE(Add(b.fd, From("10.0.0.1", 2)), nullptr);
  EXPECT_EQ(Add(c.fd, From("10.0.0.1", 3)), nullptr);
  EXPECT_NE(Add(c.fd, From("10.0.0.2", 3)), nullptr);
  a.Close();
  const Pair d;
  EXPECT_NE(Add(d.fd, From("10.0.0.1", 4)), nullptr);
}

TEST_F(ConnectionTest, TheLargestSenderSinceTheLastLookIsCut) {
  const Pair first;
  const Pair second;
  const auto one = Add(first);
  const auto two = Add(second);
  EXPECT_FALSE(connections_->CutLargest());
  first.Write(Preface());
  second.Write(Preface() + Frame(kSettings, 0, 0, ""));
  first.Read();
  second.Read();
  EXPECT_TRUE(connections_->CutLargest());
  char byte = 0;
  EXPECT_EQ(read(second.peer, &byte, 1), 0);
  EXPECT_EQ(read(first.peer, &byte, 1), -1) << "still open";
  EXPECT_FALSE(connections_->CutLargest()) << "nothing came since";
}

TEST_F(ConnectionTest, BytesBeyondTheGrantsCutIt) {
  const auto connections =
      Connections::Create({.frames = {.unasked_stream = 100, .unasked_slack = 100}}, counts_);
  const Pair pair;
  const sockaddr_in from = From("127.0.0.1", 1);
  const auto connection =
      connections->Add(pair.fd, reinterpret_cast<const sockaddr*>(&from), sizeof(from));
  std::optional<Grant> grant(std::in_place, connection, 10000);
  pair.Write(Preface() + Open(1) + Frame(kData, 0, 1, Message(10000)));
  EXPECT_GT(pair.Read(), 0);
  grant->Arrived();
  pair.Write(Frame(kData, 0, 1, Message(10000)));
  EXPECT_EQ(pair.Read(), -1);
  EXPECT_EQ(counts_->cut_, std::vector<Limit>{Limit::kUnasked});
}

TEST_F(ConnectionTest, TheEndOfAllLetsWrittenBytesOut) {
  const Pair pair;
  Add(pair);
  EXPECT_GT(pair.Send("last"), 0);
  connections_->EndAll();
  char bytes[8] = {};
  EXPECT_EQ(read(pair.peer, bytes, sizeof(bytes)), 4);
  EXPECT_EQ(read(pair.peer, bytes, sizeof(bytes)), 0);
}

}  // namespace
}  // namespace logitd::door
