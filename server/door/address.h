// Addresses to listen on, as the operator writes them.
#ifndef LOGITD_SERVER_DOOR_ADDRESS_H_
#define LOGITD_SERVER_DOOR_ADDRESS_H_

#include <sys/socket.h>

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace logitd::door {

struct Address {
  std::string path;  // of a Unix socket; empty: TCP
  std::string host;  // without the brackets of IPv6
  uint16_t port = 0;
};

// Parses "HOST:PORT", "[IPV6]:PORT" or "unix:PATH". INVALID_ARGUMENT names what is wrong and what
// is allowed.
absl::StatusOr<Address> ParseAddress(absl::string_view text);

// A socket that listens.
struct ListeningSocket {
  int fd = -1;
  uint16_t port = 0;    // as bound
  uint64_t device = 0;  // of a Unix socket's file, with `inode`
  uint64_t inode = 0;
};

// Opens the sockets of an address. A name may stand for several; an address without a family
// ("0.0.0.0", "::") takes IPv4 and IPv6. Port 0 picks one port for all.
//
// A Unix socket's file that no process listens on is replaced. The path is refused if a process
// listens there, which the error names, or if it is not a socket. UNAVAILABLE: anything the system
// refuses.
absl::StatusOr<std::vector<ListeningSocket>> ListenOn(const Address& address);

// Removes the file of a Unix socket if it is still the one of `socket`.
void RemoveSocketFile(const Address& address, const ListeningSocket& socket);

}  // namespace logitd::door

#endif  // LOGITD_SERVER_DOOR_ADDRESS_H_
