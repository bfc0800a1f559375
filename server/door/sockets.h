// Which connection a descriptor belongs to.
//
// This room defines recvmsg, sendmsg, getpeername, shutdown and close for the whole process. The linker binds
// the calls of gRPC to them, whether gRPC is a shared library or linked statically. For descriptors
// that are no connection of the listener they do what the C library does, for the price of one load.
// It is exact: gRPC sees no byte that was not counted, and a connection that breaks a limit is cut
// within the read that broke it. Nothing else shows the frames of a connection to the process
// before gRPC acts on them, on any version of gRPC. With TLS the functions decrypt and encrypt, so
// that the frames are seen there too.
#ifndef LOGITD_SERVER_DOOR_SOCKETS_H_
#define LOGITD_SERVER_DOOR_SOCKETS_H_

namespace logitd::door {

class Connection;

// The largest descriptor that a connection can have, plus one.
inline constexpr int kMaxDescriptors = 1 << 20;

// From here on the account of `connection` sees what passes through `fd`, until it is closed.
// `connection` lives at least until then. `fd` is in [0, kMaxDescriptors).
void SetConnection(int fd, Connection* connection);

// True if the calls of shared libraries reach the functions of this room.
bool SocketsAreWatched();

}  // namespace logitd::door

#endif  // LOGITD_SERVER_DOOR_SOCKETS_H_
