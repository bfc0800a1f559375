#include "server/rpc/services.h"

#include <google/protobuf/descriptor.h>

#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "logitd/v1/sampler.pb.h"
#include "server/rpc/job_stream.h"
#include "server/rpc/sample_codec.h"
#include "server/rpc/topk_codec.h"
#include "server/rpc/verify_codec.h"

namespace logitd::rpc {
namespace {

template <typename Codec>
RawUnaryService::Factory JobMethod(const CallEnvironment& environment) {
  return [environment](grpc::CallbackServerContext* context) {
    return std::make_shared<JobCall>(context, environment, std::make_unique<Codec>());
  };
}

}  // namespace

SamplerService::SamplerService(const CallEnvironment& environment) {
  // Going by the descriptor also links it in, for reflection to serve.
  const google::protobuf::ServiceDescriptor* const service =
      v1::TopKRequest::descriptor()->file()->FindServiceByName("Sampler");
  const auto name = [service](const char* method) {
    return absl::StrCat("/", service->full_name(), "/", service->FindMethodByName(method)->name());
  };
  AddRawUnary(name("TopK"), JobMethod<TopKCodec>(environment));
  AddRawUnary(name("Sample"), JobMethod<SampleCodec>(environment));
  AddRawStream(name("SampleStream"), [environment](grpc::CallbackServerContext* context) {
    return std::make_shared<JobStream>(context, environment,
                                       [] { return std::make_unique<SampleCodec>(); })
        ->Start();
  });
  AddRawUnary(name("Verify"), JobMethod<VerifyCodec>(environment));
}

ServerService::ServerService(v1::GetInfoResponse info, const engine::Admission* admission)
    : info_(std::move(info)), admission_(admission) {}

grpc::ServerUnaryReactor* ServerService::GetInfo(grpc::CallbackServerContext* context,
                                                 const v1::GetInfoRequest*,
                                                 v1::GetInfoResponse* response) {
  *response = info_;
  response->set_draining(admission_->draining());
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  reactor->Finish(grpc::Status::OK);
  return reactor;
}

}  // namespace logitd::rpc
