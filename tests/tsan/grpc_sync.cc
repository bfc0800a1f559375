// Tells ThreadSanitizer the order that gRPC makes: what a thread does before it starts an operation is before what
// another one does after it has taken the operation's tag from a completion queue. Debian's gRPC is built without the
// sanitizer, and hands operations over in queues without locks.
#include <dlfcn.h>
#include <grpc/grpc.h>
#include <grpc/slice.h>
#include <grpcpp/support/server_callback.h>
#include <sanitizer/tsan_interface.h>

#include <cstddef>

namespace {

using grpc::internal::ServerReactor;

template <typename Function>
Function* NextOf(Function*, const char* name) {
  return reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name));
}

grpc_event Taken(const grpc_event& event) {
  if (event.type == GRPC_OP_COMPLETE) __tsan_acquire(event.tag);
  return event;
}

// grpc::internal::ServerCallbackCall counts in two atomic integers after the pointer to its virtual functions.
char* Counts(char* call) { return call + sizeof(void*); }

// Tells a reactor of its call's end, in one of gRPC's threads. gRPC's library counts that down.
class Cancelled final : public ServerReactor {
 public:
  Cancelled(char* call, ServerReactor* reactor) : call_(call), reactor_(reactor) {}
  void OnDone() override {}
  void OnCancel() override {
    reactor_->OnCancel();
    __tsan_release(Counts(call_));
    delete this;
  }

 private:
  char* const call_;
  ServerReactor* const reactor_;
};

}  // namespace

extern "C" {

// What uninstrumented libraries do with memory is their own affair; each of their copies of it would be a race. This
// program's own close() makes a system call (server/door/sockets.cc), so the sanitizer takes a descriptor that is used
// again, here for a directory, for the one before.
const char* __tsan_default_suppressions() {
  return "called_from_lib:libgrpc.so\n"
         "called_from_lib:libgrpc++.so\n"
         "called_from_lib:libgpr.so\n"
         "called_from_lib:libupb.so\n"
         "called_from_lib:libabsl_status.so\n"
         "called_from_lib:libabsl_cord.so\n"
         "called_from_lib:libabsl_cord_internal.so\n"
         "called_from_lib:libabsl_strings.so\n"
         "called_from_lib:libabsl_time.so\n"
         "race:OpenDescriptors\n";
}

grpc_call_error grpc_call_start_batch(grpc_call* call, const grpc_op* ops, size_t count, void* tag,
                                      void* reserved) {
  static const auto next = NextOf(&grpc_call_start_batch, "grpc_call_start_batch");
  __tsan_release(tag);
  return next(call, ops, count, tag, reserved);
}

grpc_event grpc_completion_queue_next(grpc_completion_queue* queue, gpr_timespec deadline,
                                      void* reserved) {
  static const auto next = NextOf(&grpc_completion_queue_next, "grpc_completion_queue_next");
  return Taken(next(queue, deadline, reserved));
}

grpc_event grpc_completion_queue_pluck(grpc_completion_queue* queue, void* tag,
                                       gpr_timespec deadline, void* reserved) {
  static const auto next = NextOf(&grpc_completion_queue_pluck, "grpc_completion_queue_pluck");
  return Taken(next(queue, tag, deadline, reserved));
}

// A slice's memory is freed by whoever drops the last reference to it.
void grpc_slice_unref(grpc_slice slice) {
  static const auto next = NextOf(&grpc_slice_unref, "grpc_slice_unref");
  __tsan_release(slice.refcount);
  __tsan_acquire(slice.refcount);
  next(slice);
}

// The last of a call's callbacks has ended. Each counts itself down, in gRPC's library or in its headers.
constexpr char kScheduleOnDone[] = "_ZN4grpc8internal18ServerCallbackCall14ScheduleOnDoneEb";
void ScheduleOnDone(char* call, bool inline_done) __asm__(
    "_ZN4grpc8internal18ServerCallbackCall14ScheduleOnDoneEb");
void ScheduleOnDone(char* call, bool inline_done) {
  static const auto next = NextOf(&ScheduleOnDone, kScheduleOnDone);
  __tsan_acquire(Counts(call));
  __tsan_acquire(Counts(call) + sizeof(int));
  next(call, inline_done);
}

constexpr char kCallOnCancel[] =
    "_ZN4grpc8internal18ServerCallbackCall12CallOnCancelEPNS0_13ServerReactorE";
void CallOnCancel(char* call, ServerReactor* reactor) __asm__(
    "_ZN4grpc8internal18ServerCallbackCall12CallOnCancelEPNS0_13ServerReactorE");
void CallOnCancel(char* call, ServerReactor* reactor) {
  static const auto next = NextOf(&CallOnCancel, kCallOnCancel);
  next(call, new Cancelled(call, reactor));
}

}  // extern "C"
