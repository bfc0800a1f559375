#include "server/address.h"

#include <gtest/gtest.h>

#include <string>

namespace logitd {
namespace {

TEST(AddressTest, HasAHostAndAPortOrAPath) {
  const auto tcp = ParseAddress("127.0.0.1:7450");
  ASSERT_TRUE(tcp.ok());
  EXPECT_EQ(tcp->host, "127.0.0.1");
  EXPECT_EQ(tcp->port, 7450);
  const auto ipv6 = ParseAddress("[::1]:0");
  ASSERT_TRUE(ipv6.ok());
  EXPECT_EQ(ipv6->host, "::1");
  EXPECT_EQ(ipv6->port, 0);
  const auto socket = ParseAddress("unix:/run/a:1");
  ASSERT_TRUE(socket.ok());
  EXPECT_EQ(socket->path, "/run/a:1");
  EXPECT_TRUE(ParseAddress("unix:" + std::string(107, 'a')).ok());
  EXPECT_FALSE(ParseAddress("unix:" + std::string(108, 'a')).ok());
}

TEST(AddressTest, OnlyThisMachineReachesALocalOne) {
  for (const char* local :
       {"127.0.0.1:1", "127.8.9.1:1", "[::1]:1", "localhost:1", "LocalHost:1", "unix:/a"}) {
    EXPECT_TRUE(IsLocal(*ParseAddress(local))) << local;
  }
  for (const char* remote : {"0.0.0.0:1", "[::]:1", "10.0.0.1:1", "128.0.0.1:1", "host:1",
                             "127.0.0.1.example.com:1", "localhost.example.com:1"}) {
    EXPECT_FALSE(IsLocal(*ParseAddress(remote))) << remote;
  }
}

}  // namespace
}  // namespace logitd
