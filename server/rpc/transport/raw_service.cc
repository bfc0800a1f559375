#include "server/rpc/transport/raw_service.h"

#include <grpcpp/impl/codegen/server_callback_handlers.h>
#include <grpcpp/impl/rpc_method.h>
#include <grpcpp/impl/rpc_service_method.h>

#include <utility>

namespace logitd::rpc {

void RawService::AddRawMethod(const std::string& method,
                              std::function<RawReactor*(grpc::CallbackServerContext*)> start) {
  names_.push_back(std::make_unique<std::string>(method));
  AddMethod(new grpc::internal::RpcServiceMethod(
      names_.back()->c_str(), grpc::internal::RpcMethod::BIDI_STREAMING, nullptr));
  MarkMethodRawCallback(static_cast<int>(names_.size()) - 1,
                        new grpc::internal::CallbackBidiHandler<grpc::ByteBuffer, grpc::ByteBuffer>(
                            std::move(start)));
}

}  // namespace logitd::rpc
