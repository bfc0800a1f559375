// logitd.v1.Heads
#ifndef LOGITD_SERVER_RPC_HEADS_SERVICE_H_
#define LOGITD_SERVER_RPC_HEADS_SERVICE_H_

#include <deque>
#include <memory>
#include <string>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "logitd/v1/heads.pb.h"
#include "server/engine/heads.h"
#include "server/rpc/codecs/shared_rows.h"
#include "server/rpc/registry.h"
#include "server/rpc/transport/plain_call.h"
#include "server/rpc/transport/request_job.h"

namespace logitd::rpc {

class ChangeCall;

// Messages are small, so a call begins when its message is there. Loads and updates from files run
// in their order on a thread of the service, so no event loop waits for a disk; updates by leases
// on another one, so that they wait for no disk either. Thread-safe.
class HeadsService {
 public:
  // `root`: the directory that contains the paths of Load and Update, with its links resolved;
  // empty: Load, Update and Unload are refused. `remote_listen`: an address that others than this
  // machine reach, for which they are refused too; empty: none. The objects of `environment`
  // outlive this.
  HeadsService(std::string root, std::string remote_listen, const CallEnvironment& environment);
  // No call may be left.
  ~HeadsService();
  // Waits while loading() is true; then nothing is left to post to a call's loop. Once, after the
  // last call has ended.
  void Join();

  // True while a head is read or copied. Its call may be over: a call ends as soon as it is
  // cancelled or the server drains, and its load ends when it next reports progress.
  bool loading() const;

  void Register(Registry* registry);

 private:
  friend class ChangeCall;
  friend class LoadCall;
  friend class UpdateCall;

  // Calls that wait for a thread, and the one that it works for.
  struct Line {
    std::shared_ptr<ChangeCall> running;
    std::deque<std::shared_ptr<ChangeCall>> waiting;
  };

  // OK: clients may change which heads are loaded.
  absl::Status CheckMayChange() const;
  // Into the line of files, where a name is at most once.
  absl::Status EnqueueFile(const std::shared_ptr<ChangeCall>& call);
  // Into the line of leases.
  void EnqueueLease(const std::shared_ptr<ChangeCall>& call);
  void LeaveLine(const ChangeCall& call);    // of files, if it waits there
  void StopRunning(const ChangeCall& call);  // if it runs
  void RunLine(Line* line);

  const std::string root_;
  const std::string remote_listen_;
  const CallEnvironment& environment_;
  const FindLease find_lease_;  // null: the server leases nothing
  mutable absl::Mutex mutex_;
  Line files_ ABSL_GUARDED_BY(mutex_);
  Line leases_ ABSL_GUARDED_BY(mutex_);
  bool ending_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread files_thread_;
  std::thread leases_thread_;
};

}  // namespace logitd::rpc

#endif  // LOGITD_SERVER_RPC_HEADS_SERVICE_H_
