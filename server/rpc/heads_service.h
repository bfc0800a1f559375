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
#include "server/rpc/registry.h"
#include "server/rpc/transport/plain_call.h"
#include "server/rpc/transport/request_job.h"

namespace logitd::rpc {

class LoadCall;

// Messages are small, so a call begins when its message is there. Loads run in their order on a
// thread of the service, so no event loop waits for a disk. Thread-safe.
class HeadsService {
 public:
  // `root`: the directory that contains the paths of Load, with its links resolved; empty: Load and
  // Unload are refused. `remote_listen`: an address that others than this machine reach, for which
  // they are refused too; empty: none. The objects of `environment` outlive this.
  HeadsService(std::string root, std::string remote_listen, const CallEnvironment& environment);
  // No call may be left. Waits while loading() is true.
  ~HeadsService();

  // True while a head is read and copied. Its call may be over: a call ends as soon as it is
  // cancelled or the server drains, and its load ends when it next reports progress.
  bool loading() const;

  void Register(Registry* registry);

 private:
  engine::HeadRequest RequestOf(const LoadCall& call) const;
  // OK: clients may change which heads are loaded.
  absl::Status CheckMayChange() const;
  absl::Status Enqueue(const std::shared_ptr<LoadCall>& call);
  friend class LoadCall;
  void LeaveLine(const LoadCall& call);  // if it waits
  void RunLoads();
  void Run(LoadCall& call);

  const std::string root_;
  const std::string remote_listen_;
  const CallEnvironment& environment_;
  mutable absl::Mutex mutex_;
  std::shared_ptr<LoadCall> running_ ABSL_GUARDED_BY(mutex_);
  std::deque<std::shared_ptr<LoadCall>> loads_ ABSL_GUARDED_BY(mutex_);
  bool ending_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;  // RunLoads
};

}  // namespace logitd::rpc

#endif  // LOGITD_SERVER_RPC_HEADS_SERVICE_H_
