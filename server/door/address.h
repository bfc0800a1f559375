// The addresses that flags give.
#ifndef LOGITD_SERVER_DOOR_ADDRESS_H_
#define LOGITD_SERVER_DOOR_ADDRESS_H_

#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace logitd::door {

struct Address {
  std::string host;  // a name or an address, an IPv6 one without its brackets; empty: `path` counts
  int port = 0;      // 0: any that is free
  std::string path;  // of a Unix socket
};

// HOST:PORT, [IPv6]:PORT or unix:PATH. INVALID_ARGUMENT says what is allowed instead, e.g. "a port
// of 0 to 65535".
absl::StatusOr<Address> ParseAddress(absl::string_view text);

// True if only this machine reaches it: a Unix socket, "localhost", 127.0.0.0/8 or ::1. A name
// other than localhost counts as not local.
bool IsLocal(const Address& address);

}  // namespace logitd::door

#endif  // LOGITD_SERVER_DOOR_ADDRESS_H_
