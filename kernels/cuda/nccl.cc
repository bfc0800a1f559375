#include "kernels/cuda/nccl.h"

#include <dlfcn.h>
#include <stdlib.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "absl/time/time.h"

namespace logitd::cuda {
namespace {

// NCCL's types as they are in memory: its header is not needed to build, nor the library to run.
using Communicator = void*;        // ncclComm_t
using Result = int;                // ncclResult_t
constexpr Result kSuccess = 0;     // ncclSuccess
constexpr Result kInProgress = 7;  // ncclInProgress
constexpr int kInt8 = 0;           // ncclInt8
constexpr int kFloat32 = 7;        // ncclFloat32
constexpr int kSum = 0;            // ncclSum

// Opens the library; null, and why, where there is none. It is never closed: its threads use it
// until the process ends.
void* Open(std::string& error) {
  // NVLink multicast leaves state behind in the switches when a process is killed.
  setenv("NCCL_NVLS_ENABLE", "0", /*overwrite=*/1);
  for (const char* name : {"libnccl.so.2", "/usr/local/cuda/lib64/libnccl.so.2"}) {
    if (void* handle = dlopen(name, RTLD_NOW | RTLD_LOCAL)) {
      error.clear();
      return handle;
    }
    if (error.empty()) error = dlerror();
  }
  return nullptr;
}

// The functions of the library that are used here.
struct Library {
  std::string error;  // empty: all were found
  void* handle = Open(error);
  Result (*init_all)(Communicator*, int, const int*) = nullptr;
  Result (*destroy)(Communicator) = nullptr;
  Result (*abort)(Communicator) = nullptr;
  Result (*group_start)() = nullptr;
  Result (*group_end)() = nullptr;
  Result (*all_gather)(const void*, void*, size_t, int, Communicator, cudaStream_t) = nullptr;
  Result (*reduce)(const void*, void*, size_t, int, int, int, Communicator, cudaStream_t) = nullptr;
  const char* (*error_string)(Result) = nullptr;
  const char* (*last_error)(Communicator) = nullptr;

  Library() {
    Find("ncclCommInitAll", init_all);
    Find("ncclCommDestroy", destroy);
    Find("ncclCommAbort", abort);
    Find("ncclGroupStart", group_start);
    Find("ncclGroupEnd", group_end);
    Find("ncclAllGather", all_gather);
    Find("ncclReduce", reduce);
    Find("ncclGetErrorString", error_string);
    Find("ncclGetLastError", last_error);
  }

 private:
  template <class F>
  void Find(const char* name, F*& function) {
    if (handle == nullptr) return;
    function = reinterpret_cast<F*>(dlsym(handle, name));
    if (function == nullptr && error.empty()) error = absl::StrCat("libnccl.so.2 has no ", name);
  }
};

const Library& TheLibrary() {
  static const Library* const library = new Library;
  return *library;
}

absl::Status ToStatus(Result result, std::string_view what) {
  if (result == kSuccess || result == kInProgress) return absl::OkStatus();
  const Library& nccl = TheLibrary();
  std::string why = nccl.error_string(result);
  if (const std::string more = nccl.last_error(nullptr); !more.empty())
    absl::StrAppend(&why, ", ", more);
  return absl::UnavailableError(absl::StrFormat("NCCL: %s: %s", what, why));
}

// The making of communicators, by a thread of its own. Whoever claims first decides: the thread,
// then the caller takes the communicators; the caller after `limit`, then the thread aborts them.
struct Joining {
  std::vector<int> devices;
  std::vector<Communicator> communicators;
  absl::Status status;
  absl::Notification ended;
  std::atomic<bool> claimed = false;

  explicit Joining(absl::Span<const int> numbers)
      : devices(numbers.begin(), numbers.end()), communicators(numbers.size()) {}

  // Whether nobody has before.
  bool Claim() { return !claimed.exchange(true); }

  void Join() {
    status.Update(ToStatus(TheLibrary().init_all(communicators.data(),
                                                 static_cast<int>(devices.size()), devices.data()),
                           "make communicators"));
    if (!Claim() && status.ok()) {
      for (Communicator communicator : communicators) TheLibrary().abort(communicator);
    }
    ended.Notify();
  }
};

// Joinings that their callers gave up. Thread-safe.
class GivenUp {
 public:
  void Add(std::shared_ptr<const Joining> joining) {
    absl::MutexLock lock(&mutex_);
    joinings_.push_back(std::move(joining));
  }
  // Whether one of these devices has not ended.
  bool StillRuns(absl::Span<const int> devices) {
    absl::MutexLock lock(&mutex_);
    std::erase_if(joinings_, [](const auto& joining) { return joining->ended.HasBeenNotified(); });
    return std::any_of(joinings_.begin(), joinings_.end(),
                       [&](const auto& joining) { return joining->devices == devices; });
  }

 private:
  absl::Mutex mutex_;
  std::vector<std::shared_ptr<const Joining>> joinings_ ABSL_GUARDED_BY(mutex_);
};

GivenUp& TheGivenUp() {
  static GivenUp* const given_up = new GivenUp;
  return *given_up;
}

}  // namespace

absl::Status NcclGather::Check() {
  const Library& nccl = TheLibrary();
  if (nccl.error.empty()) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat("NCCL cannot be loaded: ", nccl.error));
}

absl::StatusOr<std::unique_ptr<NcclGather>> NcclGather::Create(absl::Span<const int> devices,
                                                               absl::Duration limit) {
  if (absl::Status status = Check(); !status.ok()) return status;
  if (StillJoins(devices)) {
    return absl::UnavailableError("NCCL: make communicators: an earlier attempt has not ended");
  }
  // The library's call ends when all devices have answered it, and one that hangs does not. So a
  // thread makes it, which nobody has to wait for.
  auto joining = std::make_shared<Joining>(devices);
  std::thread([joining] { joining->Join(); }).detach();
  if (!joining->ended.WaitForNotificationWithTimeout(limit) && joining->Claim()) {
    TheGivenUp().Add(joining);
    return absl::UnavailableError(absl::StrFormat("NCCL: make communicators: not done after %s",
                                                  absl::FormatDuration(limit)));
  }
  joining->ended.WaitForNotification();
  if (!joining->status.ok()) return joining->status;
  auto gather = std::unique_ptr<NcclGather>(new NcclGather);
  gather->communicators_ = std::move(joining->communicators);
  return gather;
}

bool NcclGather::StillJoins(absl::Span<const int> devices) {
  return TheGivenUp().StillRuns(devices);
}

NcclGather::~NcclGather() {
  for (Communicator communicator : communicators_) TheLibrary().destroy(communicator);
}

absl::Status NcclGather::Enqueue(absl::Span<const Place> places, size_t bytes) {
  return OnAll("all-gather", [&](size_t i) {
    return TheLibrary().all_gather(places[i].blocks + i * bytes, places[i].blocks, bytes, kInt8,
                                   communicators_[i], places[i].stream);
  });
}

absl::Status NcclGather::EnqueueSum(absl::Span<const Place> places, size_t count) {
  return OnAll("reduce", [&](size_t i) {
    return TheLibrary().reduce(places[i].blocks, places[i].blocks, count, kFloat32, kSum,
                               /*root=*/0, communicators_[i], places[i].stream);
  });
}

absl::Status NcclGather::OnAll(std::string_view what, absl::FunctionRef<int(size_t)> enqueue) {
  const Library& nccl = TheLibrary();
  if (communicators_.empty()) return absl::UnavailableError("NCCL: the communicators are gone");
  Result result = nccl.group_start();
  for (size_t i = 0; i < communicators_.size() && result == kSuccess; ++i) result = enqueue(i);
  const Result ended = nccl.group_end();
  return ToStatus(result == kSuccess ? ended : result, what);
}

void NcclGather::Abort() {
  // A call may wait for a device that hangs, and the devices may wait for each other's: so none of
  // the calls waits for another, and nobody waits for them.
  for (Communicator communicator : communicators_)
    std::thread([communicator] { TheLibrary().abort(communicator); }).detach();
  communicators_.clear();
}

}  // namespace logitd::cuda
