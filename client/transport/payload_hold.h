// The caller's memory while gRPC holds slices of it.
#ifndef LOGITD_CLIENT_TRANSPORT_PAYLOAD_HOLD_H_
#define LOGITD_CLIENT_TRANSPORT_PAYLOAD_HOLD_H_

#include <memory>
#include <utility>

#include "absl/synchronization/notification.h"

namespace logitd::client {

// One attempt's share of a payload. gRPC may still hold the payload after a call has ended. With an
// owner, gRPC's slices share it and no call waits. Without one, the attempt ends only after gRPC
// has dropped every slice. Not thread-safe, except that gRPC drops slices on any thread.
class PayloadHold {
 public:
  explicit PayloadHold(std::shared_ptr<const void> owner) : owner_(std::move(owner)) {
    if (owner_ != nullptr) return;
    released_ = std::make_shared<absl::Notification>();
    owner_ = std::make_shared<const NotifyAtEnd>(released_);
  }

  // Every slice over the payload shares this. Null after Drop.
  const std::shared_ptr<const void>& owner() const { return owner_; }

  // From here on only the slices share the owner.
  void Drop() { owner_.reset(); }

  // Becomes true when gRPC has dropped the last slice. Null: no call waits.
  absl::Notification* released() const { return released_.get(); }

 private:
  struct NotifyAtEnd {
    explicit NotifyAtEnd(std::shared_ptr<absl::Notification> n) : notification(std::move(n)) {}
    ~NotifyAtEnd() { notification->Notify(); }
    NotifyAtEnd(const NotifyAtEnd&) = delete;
    NotifyAtEnd& operator=(const NotifyAtEnd&) = delete;
    std::shared_ptr<absl::Notification> notification;
  };

  std::shared_ptr<const void> owner_;
  std::shared_ptr<absl::Notification> released_;
};

}  // namespace logitd::client

#endif  // LOGITD_CLIENT_TRANSPORT_PAYLOAD_HOLD_H_
