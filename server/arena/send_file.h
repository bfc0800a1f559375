// A message with a file, over a Unix socket.
#ifndef LOGITD_SERVER_ARENA_SEND_FILE_H_
#define LOGITD_SERVER_ARENA_SEND_FILE_H_

#include <sys/socket.h>
#include <sys/uio.h>

#include <array>
#include <cstring>

#include "absl/types/span.h"

namespace logitd::arena {

// Never waits. `fd`: below 0, the message has no file. False: the peer does not take it now, or is
// gone.
inline bool SendWithFile(int socket, absl::Span<iovec> parts, int fd) {
  msghdr message = {};
  message.msg_iov = parts.data();
  message.msg_iovlen = parts.size();
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control = {};
  if (fd >= 0) {
    message.msg_control = control.data();
    message.msg_controllen = control.size();
    cmsghdr* const header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(header), &fd, sizeof(fd));
  }
  return sendmsg(socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT) >= 0;
}

}  // namespace logitd::arena

#endif  // LOGITD_SERVER_ARENA_SEND_FILE_H_
