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
#include "server/engine/admission.h"
#include "server/engine/heads.h"

namespace logitd::rpc {

class LoadCall;

// Messages are small, so the code is generated. Loads run on a thread of the service's own, in the
// order they came: gRPC's threads never wait for a disk.
class HeadsService final : public v1::Heads::CallbackService {
 public:
  // `root`: the directory that paths of Load are in, without links in it; empty: none, and Load is
  // refused. The other two outlive this; `admission` knows whether the server drains.
  HeadsService(std::string root, const engine::Admission* admission, engine::Heads* heads);
  // No call may be left.
  ~HeadsService() override;

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
  v1::Head Describe(const engine::Head& head) const;
  absl::Status Enqueue(const std::shared_ptr<LoadCall>& call);
  void RunLoads();
  void Run(LoadCall& call);

  const std::string root_;
  const engine::Admission* const admission_;
  engine::Heads* const heads_;
  absl::Mutex mutex_;
  std::deque<std::shared_ptr<LoadCall>> loads_ ABSL_GUARDED_BY(mutex_);
  bool ending_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;  // RunLoads
};

}  // namespace logitd::rpc

#endif  // LOGITD_SERVER_RPC_HEADS_SERVICE_H_
