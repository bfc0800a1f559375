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

// Messages are small, so this uses the generated service. Loads run in their order on a thread of
// the service, so gRPC's threads never wait for a disk.
class HeadsService final : public v1::Heads::CallbackService {
 public:
  // `root`: the directory that contains the paths of Load, with its links resolved; empty: Load is
  // refused. The objects of `environment` outlive this.
  HeadsService(std::string root, const CallEnvironment& environment);
  // No call may be left. Waits while loading() is true.
  ~HeadsService() override;

  // True while a head is read and copied. Its call may be over: a call ends as soon as it is
  // cancelled or the server drains, and its load ends when it next reports progress.
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
  void LeaveLine(const LoadCall& call);  // if it waits
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
