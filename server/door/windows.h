// Keeps a peer from sending messages of calls that will be refused.
// Source: RFC 9113, sections 5.2 and 6.9 (flow control).
#ifndef LOGITD_SERVER_DOOR_WINDOWS_H_
#define LOGITD_SERVER_DOOR_WINDOWS_H_

#include <cstdint>
#include <string>

#include "absl/container/inlined_vector.h"

namespace logitd::door {

// A peer may send the first 64 KiB of a message with its headers, and of a refused call they are
// wasted: at high load they cost both sides more than all else. So while the windows are closed, the
// peer is told that a new stream has a window of 0. A call that passes gets the window that gRPC
// believes it has.
//
// gRPC must not announce a window of its own in SETTINGS: it does so only with BDP probing.
// Not thread-safe.
class Windows {
 public:
  bool closed() const { return closed_; }
  // The peer has not acknowledged the last change: none may be made.
  bool changing() const { return changing_; }

  // New streams get no window. Streams that are open need their grant: Grant each.
  void Close() { Announce(true); }
  // New streams get the usual window. No stream is open that has its grant.
  void Open() { Announce(false); }
  // Gives a stream the usual window. Once for each stream of closed windows.
  void Grant(uint32_t stream);

  // gRPC has sent SETTINGS.
  void SentSettings() { unacknowledged_.push_back(false); }
  // The peer has acknowledged SETTINGS. True: the door's, so gRPC must not see it.
  bool TakeAcknowledgement();

  // Whole frames for the peer, in their order. The caller takes them.
  std::string& frames() { return frames_; }

 private:
  void Announce(bool closed);

  bool closed_ = false;
  bool changing_ = false;
  absl::InlinedVector<bool, 4> unacknowledged_;  // SETTINGS in their order: the door's or gRPC's
  std::string frames_;
};

}  // namespace logitd::door

#endif  // LOGITD_SERVER_DOOR_WINDOWS_H_
