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
#include "logitd/v1/heads.grpc.pb.h"
#include "server/engine/heads.h"
#include "server/rpc/transport/request_job.h"

namespace logitd::rpc {

class LoadCall;

// Messages are small, so the code is generated. Loads run on a thread of the service's own, in the
// order they came: gRPC's threads never wait for a disk.
class HeadsService final : public v1::Heads::CallbackService {
 public:
  // `root`: the directory that paths of Load are in, without links in it; empty: none, and Load is
  // refused. What `environment` points to outlives this.
  HeadsService(std::string root, const CallEnvironment& environment);
  // No call may be left. Waits for as long as loading() is true.
  ~HeadsService() override;

  // A head is being read and copied, perhaps for a call that is over: a call ends as soon as it is
  // cancelled or the server drains, its load when it next looks.
  bool loading() const;

  grpc::ServerWriteReactor<v1::LoadHeadResponse>* Load(grpc::CallbackServerContext* context,
                                                       const v1::LoadHeadRequest* request) override;
  grpc::ServerUnaryReactor* Unload(grpc::CallbackServerContext* context,
                                   const v1::UnloadHeadRequest* request,
                                   v1::UnloadHeadResponse* response) override;
  grpc::ServerUnaryReactor* List(grpc::CallbackServerContext* context,
                                 const v1::ListHeadsRequest* request,
                                 v1::ListHeadsResponse* response) override;
  grpc::ServerUnaryReactor* Get(grpc::CallbackServerContext* context,
                                const v1::GetHeadRequest* request,
                                v1::GetHeadResponse* response) override;

 private:
  engine::HeadRequest RequestOf(const LoadCall& call) const;
  absl::Status Enqueue(const std::shared_ptr<LoadCall>& call);
  friend class LoadCall;
  void Leave(const LoadCall& call);  // the line, if it is in it
  void RunLoads();
  void Run(LoadCall& call);

  const std::string root_;
  const CallEnvironment environment_;
  mutable absl::Mutex mutex_;
  std::shared_ptr<LoadCall> running_ ABSL_GUARDED_BY(mutex_);
  std::deque<std::shared_ptr<LoadCall>> loads_ ABSL_GUARDED_BY(mutex_);
  bool ending_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;  // RunLoads
};

}  // namespace logitd::rpc

#endif  // LOGITD_SERVER_RPC_HEADS_SERVICE_H_
