// Tells ThreadSanitizer the order that Abseil's locks make. Debian's Abseil is built without it:
// the sanitizer then does not see these locks and reports a race for all that they guard. The
// programs of a ThreadSanitizer build define the functions that lock, so the libraries call these
// too; each calls Abseil's own.
#include <dlfcn.h>
#include <sanitizer/tsan_interface.h>

#include <cstring>

#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "absl/time/time.h"

extern "C" {
void AnnotateIgnoreReadsBegin(const char* file, int line);
void AnnotateIgnoreReadsEnd(const char* file, int line);

// Libraries that are not instrumented: each of their copies of memory would be reported as a race.
const char* __tsan_default_suppressions() {
  return "called_from_lib:libnghttp2.so\n"
         "called_from_lib:libabsl_status.so\n"
         "called_from_lib:libabsl_cord.so\n"
         "called_from_lib:libabsl_cord_internal.so\n"
         "called_from_lib:libabsl_strings.so\n"
         "called_from_lib:libabsl_time.so\n";
}
}

namespace {

// A member function that is not virtual is called as a function of its object.
template <typename Member>
void* AddressOf(Member member) {
  void* address;
  std::memcpy(&address, &member, sizeof(address));
  return address;
}

// The same function of the next library that has it.
template <typename R, typename C, typename... Args>
auto NextOf(R (C::*member)(Args...)) {
  Dl_info info;
  dladdr(AddressOf(member), &info);
  return reinterpret_cast<R (*)(C*, Args...)>(dlsym(RTLD_NEXT, info.dli_sname));
}

// An unlock, and a wait, evaluate the conditions of other threads, which the mutex guards although
// this thread's part of the order has ended.
class IgnoreReads {
 public:
  IgnoreReads() { AnnotateIgnoreReadsBegin(__FILE__, __LINE__); }
  ~IgnoreReads() { AnnotateIgnoreReadsEnd(__FILE__, __LINE__); }
};

void Released(void* mutex) { __tsan_release(mutex); }
void Acquired(void* mutex) { __tsan_acquire(mutex); }

}  // namespace

namespace absl {
ABSL_NAMESPACE_BEGIN

void Mutex::Lock() {
  static const auto next = NextOf(&Mutex::Lock);
  next(this);
  Acquired(this);
}

bool Mutex::TryLock() {
  static const auto next = NextOf(&Mutex::TryLock);
  const bool locked = next(this);
  if (locked) Acquired(this);
  return locked;
}

void Mutex::Unlock() {
  static const auto next = NextOf(&Mutex::Unlock);
  Released(this);
  const IgnoreReads ignore;
  next(this);
}

void Mutex::ReaderLock() {
  static const auto next = NextOf(&Mutex::ReaderLock);
  next(this);
  Acquired(this);
}

void Mutex::ReaderUnlock() {
  static const auto next = NextOf(&Mutex::ReaderUnlock);
  Released(this);
  const IgnoreReads ignore;
  next(this);
}

void Mutex::Await(const Condition& condition) {
  static const auto next = NextOf(&Mutex::Await);
  Released(this);
  {
    const IgnoreReads ignore;
    next(this, condition);
  }
  Acquired(this);
}

bool Mutex::AwaitWithTimeout(const Condition& condition, Duration timeout) {
  static const auto next = NextOf(&Mutex::AwaitWithTimeout);
  Released(this);
  bool held;
  {
    const IgnoreReads ignore;
    held = next(this, condition, timeout);
  }
  Acquired(this);
  return held;
}

bool Mutex::AwaitWithDeadline(const Condition& condition, Time deadline) {
  static const auto next = NextOf(&Mutex::AwaitWithDeadline);
  Released(this);
  bool held;
  {
    const IgnoreReads ignore;
    held = next(this, condition, deadline);
  }
  Acquired(this);
  return held;
}

void CondVar::Wait(Mutex* mutex) {
  static const auto next = NextOf(&CondVar::Wait);
  Released(mutex);
  next(this, mutex);
  Acquired(mutex);
}

bool CondVar::WaitWithTimeout(Mutex* mutex, Duration timeout) {
  static const auto next = NextOf(&CondVar::WaitWithTimeout);
  Released(mutex);
  const bool timed_out = next(this, mutex, timeout);
  Acquired(mutex);
  return timed_out;
}

bool CondVar::WaitWithDeadline(Mutex* mutex, Time deadline) {
  static const auto next = NextOf(&CondVar::WaitWithDeadline);
  Released(mutex);
  const bool timed_out = next(this, mutex, deadline);
  Acquired(mutex);
  return timed_out;
}

// HasBeenNotified reads the flag, which lies after the mutex, in code of the caller.
void Notification::Notify() {
  static const auto next = NextOf(&Notification::Notify);
  Released(reinterpret_cast<char*>(this) + sizeof(Mutex));
  next(this);
}

ABSL_NAMESPACE_END
}  // namespace absl
