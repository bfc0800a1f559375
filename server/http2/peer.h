// Who is at the other end of a connection, as far as the transport proves it.
#ifndef LOGITD_SERVER_HTTP2_PEER_H_
#define LOGITD_SERVER_HTTP2_PEER_H_

#include <sys/socket.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace logitd::http2 {

struct PeerInfo {
  uint64_t id = 0;   // from 1; never used again
  std::string name;  // "ipv4:127.0.0.1:40123", "ipv6:[::1]:40123", "unix:connection-ID"
  // Connections of one origin share limits: an address without its port (of IPv6 its first 64
  // bits), "localhost", or "uid:UID" of a Unix socket.
  std::string origin;
  std::optional<uint32_t> uid;                 // of the process at the other end of a Unix socket
  std::vector<std::string> certificate_names;  // TlsSession::CertificateNames
};

// `fd`: connected, with this address.
PeerInfo DescribePeer(int fd, const sockaddr_storage& address, socklen_t length, uint64_t id);

}  // namespace logitd::http2

#endif  // LOGITD_SERVER_HTTP2_PEER_H_
