// A call's place in the line of the admission.
#ifndef LOGITD_SERVER_RPC_TRANSPORT_ADMISSION_WAIT_H_
#define LOGITD_SERVER_RPC_TRANSPORT_ADMISSION_WAIT_H_

#include <cstdint>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "server/engine/admission.h"

namespace logitd::rpc {

// Thread-safe. The admission, of a type like engine::Admission, outlives it.
template <typename Admission>
class WaitAt {
 public:
  explicit WaitAt(Admission* admission) : admission_(admission) {}

  // See Admission::Enter. The call waits at one place at a time; `ready` may enter again, also before
  // this returns.
  void Enter(engine::RoomAsk ask, typename Admission::Ready ready) {
    uint64_t entry = 0;
    {
      absl::MutexLock lock(&mutex_);
      entry = ++entries_;
      waiter_ = 0;
    }
    const typename Admission::WaiterId waiter = admission_->Enter(std::move(ask), std::move(ready));
    if (waiter == 0) return;
    {
      absl::MutexLock lock(&mutex_);
      if (entry != entries_) return;  // `ready` has run meanwhile, and waits at another place
      waiter_ = waiter;
      if (!abandoned_) return;
    }
    admission_->Abandon(waiter);
  }

  // The call is gone: a `ready` that still waits, or comes to wait, never runs.
  void Abandon() {
    typename Admission::WaiterId waiter = 0;
    {
      absl::MutexLock lock(&mutex_);
      abandoned_ = true;
      waiter = waiter_;
    }
    if (waiter != 0) admission_->Abandon(waiter);
  }

 private:
  Admission* const admission_;
  absl::Mutex mutex_;
  bool abandoned_ ABSL_GUARDED_BY(mutex_) = false;
  uint64_t entries_ ABSL_GUARDED_BY(mutex_) = 0;
  typename Admission::WaiterId waiter_ ABSL_GUARDED_BY(mutex_) = 0;
};

using AdmissionWait = WaitAt<engine::Admission>;

}  // namespace logitd::rpc

#endif  // LOGITD_SERVER_RPC_TRANSPORT_ADMISSION_WAIT_H_
