#include "server/http2/peer.h"

#include <arpa/inet.h>
#include <netinet/in.h>

#include <cstring>

#include "absl/strings/str_cat.h"

namespace logitd::http2 {
namespace {

void NameV4(in_addr address, in_port_t port, PeerInfo* peer) {
  char text[INET_ADDRSTRLEN] = {};
  inet_ntop(AF_INET, &address, text, sizeof(text));
  peer->name = absl::StrCat("ipv4:", text, ":", ntohs(port));
  peer->origin = ntohl(address.s_addr) >> 24 == IN_LOOPBACKNET ? "localhost" : text;
}

void NameV6(const sockaddr_in6& in, PeerInfo* peer) {
  if (IN6_IS_ADDR_V4MAPPED(&in.sin6_addr)) {
    in_addr v4;
    std::memcpy(&v4, in.sin6_addr.s6_addr + 12, sizeof(v4));
    return NameV4(v4, in.sin6_port, peer);
  }
  char text[INET6_ADDRSTRLEN] = {};
  inet_ntop(AF_INET6, &in.sin6_addr, text, sizeof(text));
  const std::string zone = in.sin6_scope_id == 0 ? "" : absl::StrCat("%", in.sin6_scope_id);
  peer->name = absl::StrCat("ipv6:[", text, zone, "]:", ntohs(in.sin6_port));
  if (IN6_IS_ADDR_LOOPBACK(&in.sin6_addr)) {
    peer->origin = "localhost";
    return;
  }
  in6_addr network = in.sin6_addr;
  std::memset(network.s6_addr + 8, 0, 8);
  inet_ntop(AF_INET6, &network, text, sizeof(text));
  peer->origin = absl::StrCat(text, "/64");
}

}  // namespace

PeerInfo DescribePeer(int fd, const sockaddr_storage& address, socklen_t length, uint64_t id) {
  PeerInfo peer = {.id = id};
  if (length >= sizeof(sockaddr_in) && address.ss_family == AF_INET) {
    const auto& in = reinterpret_cast<const sockaddr_in&>(address);
    NameV4(in.sin_addr, in.sin_port, &peer);
  } else if (length >= sizeof(sockaddr_in6) && address.ss_family == AF_INET6) {
    NameV6(reinterpret_cast<const sockaddr_in6&>(address), &peer);
  } else {
    peer.name = absl::StrCat("unix:connection-", id);
    ucred user = {};
    socklen_t bytes = sizeof(user);
    if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &user, &bytes) == 0) peer.uid = user.uid;
    peer.origin = absl::StrCat("uid:", user.uid);
  }
  return peer;
}

}  // namespace logitd::http2
