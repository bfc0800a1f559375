// Sockets that listen on the operator's addresses.
#ifndef LOGITD_SERVER_DOOR_LISTENING_SOCKET_H_
#define LOGITD_SERVER_DOOR_LISTENING_SOCKET_H_

#include <sys/socket.h>
#include <sys/types.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/status/statusor.h"
#include "server/door/address.h"

namespace logitd::door {

// A socket that listens.
struct ListeningSocket {
  int fd = -1;
  uint16_t port = 0;    // as bound
  uint64_t device = 0;  // of a Unix socket's file, with `inode`
  uint64_t inode = 0;
};

// Options of a Unix socket. Other sockets ignore them.
struct UnixSocketOptions {
  int type = SOCK_STREAM;
  std::optional<mode_t> mode;  // of its file; nullopt: what the process's umask leaves
};

// Opens the sockets of an address. A name may stand for several; an address without a family
// ("0.0.0.0", "::") takes IPv4 and IPv6. Port 0 picks one port for all.
//
// A Unix socket's file that no process listens on is replaced. The path is refused if a process
// listens there, which the error names, or if it is not a socket. UNAVAILABLE: anything the system
// refuses.
absl::StatusOr<std::vector<ListeningSocket>> ListenOn(const Address& address,
                                                      const UnixSocketOptions& options = {});

// Removes the file of a Unix socket if it is still the one of `socket`.
void RemoveSocketFile(const Address& address, const ListeningSocket& socket);

}  // namespace logitd::door

#endif  // LOGITD_SERVER_DOOR_LISTENING_SOCKET_H_
