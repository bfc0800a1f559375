// Tests of the names that logs and identities have for peers.
#include "server/http2/peer.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstring>
#include <string>

#include "absl/strings/str_cat.h"

namespace logitd::http2 {
namespace {

PeerInfo OfV6(const char* text, uint16_t port) {
  sockaddr_storage address = {};
  sockaddr_in6 v6 = {.sin6_family = AF_INET6, .sin6_port = htons(port)};
  EXPECT_EQ(inet_pton(AF_INET6, text, &v6.sin6_addr), 1);
  std::memcpy(&address, &v6, sizeof(v6));
  return DescribePeer(-1, address, sizeof(v6), 7);
}

TEST(PeerTest, ATcpPeerHasItsAddressAndItsHost) {
  sockaddr_storage address = {};
  sockaddr_in v4 = {.sin_family = AF_INET, .sin_port = htons(40123)};
  v4.sin_addr.s_addr = htonl(0xc0000205);
  std::memcpy(&address, &v4, sizeof(v4));
  const PeerInfo peer = DescribePeer(-1, address, sizeof(v4), 7);
  EXPECT_EQ(peer.id, 7u);
  EXPECT_EQ(peer.name, "ipv4:192.0.2.5:40123");
  EXPECT_EQ(peer.origin, "192.0.2.5");
  EXPECT_FALSE(peer.uid.has_value());
  EXPECT_EQ(OfV6("2001:db8::1", 9).name, "ipv6:[2001:db8::1]:9");
  EXPECT_EQ(OfV6("2001:db8::1", 9).origin, "2001:db8::/64");
  EXPECT_EQ(OfV6("2001:db8::ffff:1", 9).origin, "2001:db8::/64") << "one network";
  EXPECT_EQ(OfV6("2001:db8:0:1::1", 9).origin, "2001:db8:0:1::/64");
}

TEST(PeerTest, OneHostHasOneNameOverBothFamilies) {
  EXPECT_EQ(OfV6("::ffff:192.0.2.5", 9).name, "ipv4:192.0.2.5:9");
  EXPECT_EQ(OfV6("::ffff:192.0.2.5", 9).origin, "192.0.2.5");
}

TEST(PeerTest, PeersOnThisMachineHaveNoHost) {
  EXPECT_EQ(OfV6("::1", 9).origin, "localhost");
  EXPECT_EQ(OfV6("::ffff:127.0.0.1", 9).origin, "localhost");
}

TEST(PeerTest, AUnixPeerIsKnownByItsUser) {
  int fds[2];
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds), 0);
  sockaddr_storage address = {};
  address.ss_family = AF_UNIX;
  const PeerInfo peer = DescribePeer(fds[0], address, sizeof(sa_family_t), 3);
  EXPECT_EQ(peer.name, "unix:connection-3");
  EXPECT_EQ(peer.origin, absl::StrCat("uid:", getuid()));
  EXPECT_EQ(peer.uid, getuid());
  for (const int fd : fds) close(fd);
}

}  // namespace
}  // namespace logitd::http2
