#include "server/door/address.h"

#include <gtest/gtest.h>

#include <string>

namespace logitd::door {
namespace {

struct Parsed {
  const char* text;
  const char* path;
  const char* host;
  int port;  // -1: refused
};

TEST(AddressTest, IsHostAndPortOrAPath) {
  for (const Parsed& wanted :
       {Parsed{"127.0.0.1:80", "", "127.0.0.1", 80}, Parsed{"[::1]:0", "", "::1", 0},
        Parsed{"localhost:65535", "", "localhost", 65535},
        Parsed{"unix:/run/a b", "/run/a b", "", 0}, Parsed{"unix:///run/x", "/run/x", "", 0},
        Parsed{"unix:relative", "relative", "", 0}, Parsed{"unix:", "", "", -1},
        Parsed{"nowhere", "", "", -1}, Parsed{":80", "", "", -1}, Parsed{"::1:80", "", "", -1},
        Parsed{"[::1:80", "", "", -1}, Parsed{"127.0.0.1:", "", "", -1},
        Parsed{"127.0.0.1:-1", "", "", -1}, Parsed{"127.0.0.1:+1", "", "", -1},
        Parsed{"127.0.0.1:65536", "", "", -1}, Parsed{"127.0.0.1:http", "", "", -1}}) {
    const auto address = ParseAddress(wanted.text);
    EXPECT_EQ(address.ok(), wanted.port >= 0) << wanted.text;
    if (!address.ok()) continue;
    EXPECT_EQ(address->path, wanted.path);
    EXPECT_EQ(address->host, wanted.host);
    EXPECT_EQ(address->port, wanted.port);
  }
  EXPECT_TRUE(ParseAddress("unix:" + std::string(107, 'a')).ok());
  EXPECT_EQ(ParseAddress("unix:" + std::string(108, 'a')).status().message(),
            "a path of at most 107 bytes after unix:");
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
}  // namespace logitd::door
