// A call's place in the line of the admission.
#ifndef LOGITD_SERVER_RPC_TRANSPORT_ADMISSION_WAIT_H_
#define LOGITD_SERVER_RPC_TRANSPORT_ADMISSION_WAIT_H_

#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "server/engine/admission.h"

namespace logitd::rpc {

// Thread-safe. The admission outlives it.
class AdmissionWait {
 public:
  explicit AdmissionWait(engine::Admission* admission) : admission_(admission) {}

  // See Admission::Enter. The call waits at one place at a time.
  void Enter(engine::RoomAsk ask, engine::Admission::Ready ready) {
    const engine::Admission::WaiterId waiter = admission_->Enter(std::move(ask), std::move(ready));
    if (waiter == 0) return;
    {
      absl::MutexLock lock(&mutex_);
      waiter_ = waiter;
      if (!abandoned_) return;
    }
    admission_->Abandon(waiter);
  }

  // The call is gone: a `ready` that still waits, or comes to wait, never runs.
  void Abandon() {
    engine::Admission::WaiterId waiter = 0;
    {
      absl::MutexLock lock(&mutex_);
      abandoned_ = true;
      waiter = waiter_;
    }
    if (waiter != 0) admission_->Abandon(waiter);
  }

 private:
  engine::Admission* const admission_;
  absl::Mutex mutex_;
  bool abandoned_ ABSL_GUARDED_BY(mutex_) = false;
  engine::Admission::WaiterId waiter_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace logitd::rpc

#endif  // LOGITD_SERVER_RPC_TRANSPORT_ADMISSION_WAIT_H_
