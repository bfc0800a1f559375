#include "server/rpc/services.h"

#include <google/protobuf/descriptor.h>

#include <memory>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "logitd/v1/attention.pb.h"
#include "logitd/v1/sampler.pb.h"
#include "logitd/v1/scorer.pb.h"
#include "server/rpc/codecs/attention_codec.h"
#include "server/rpc/codecs/sample_codec.h"
#include "server/rpc/codecs/score_codec.h"
#include "server/rpc/codecs/topk_codec.h"
#include "server/rpc/codecs/verify_codec.h"
#include "server/rpc/transport/stream_call.h"

namespace logitd::rpc {
namespace {

std::function<RawReactor*(grpc::CallbackServerContext*)> JobMethod(
    const CallEnvironment& environment, const StreamCall::MakeCodec& make_codec) {
  return [environment, make_codec](grpc::CallbackServerContext* context) {
    return std::make_shared<UnaryCall>(context, environment, make_codec())->Start();
  };
}

FindHead FindIn(const CallEnvironment& environment) {
  return [heads = environment.heads](std::string_view name) { return heads->Find(name); };
}

// Of an op that has a linear form.
template <typename Codec>
StreamCall::MakeCodec Make(const CallEnvironment& environment) {
  return [find_head = FindIn(environment)] { return std::make_unique<Codec>(find_head); };
}

// "/logitd.v1.Sampler/TopK" of "TopK". Going by the descriptor also links it in, for reflection to
// serve.
class MethodNames {
 public:
  MethodNames(const google::protobuf::Descriptor* message, const char* service)
      : service_(message->file()->FindServiceByName(service)) {}
  std::string operator()(const char* method) const {
    return absl::StrCat("/", service_->full_name(), "/",
                        service_->FindMethodByName(method)->name());
  }

 private:
  const google::protobuf::ServiceDescriptor* const service_;
};

}  // namespace

SamplerService::SamplerService(const CallEnvironment& environment) {
  const MethodNames name(v1::TopKRequest::descriptor(), "Sampler");
  AddRawMethod(name("TopK"), JobMethod(environment, Make<TopKCodec>(environment)));
  AddRawMethod(name("Sample"), JobMethod(environment, Make<SampleCodec>(environment)));
  AddRawMethod(name("SampleStream"), [environment](grpc::CallbackServerContext* context) {
    return std::make_shared<StreamCall>(context, environment, Make<SampleCodec>(environment))
        ->Start();
  });
  AddRawMethod(name("Verify"),
               JobMethod(environment, [] { return std::make_unique<VerifyCodec>(); }));
}

ScorerService::ScorerService(const CallEnvironment& environment) {
  const MethodNames name(v1::ScoreRequest::descriptor(), "Scorer");
  AddRawMethod(name("Score"), JobMethod(environment, Make<ScoreCodec>(environment)));
  AddRawMethod(name("ScoreStream"), [environment](grpc::CallbackServerContext* context) {
    return std::make_shared<StreamCall>(
               context, environment,
               [find_head = FindIn(environment), sequence = std::make_shared<ScoreSequence>()] {
                 return std::make_unique<ScoreCodec>(find_head, sequence);
               })
        ->Start();
  });
}

AttentionService::AttentionService(const CallEnvironment& environment) {
  const MethodNames name(v1::AttentionSoftmaxRequest::descriptor(), "Attention");
  struct Op {
    AttentionDirection direction;
    const char* call;
    const char* stream;
  };
  for (const Op& op :
       {Op{AttentionDirection::kForward, "Softmax", "SoftmaxStream"},
        Op{AttentionDirection::kBackward, "SoftmaxBackward", "SoftmaxBackwardStream"}}) {
    AddRawMethod(name(op.call), JobMethod(environment, [direction = op.direction] {
                   return std::make_unique<AttentionCodec>(direction);
                 }));
    AddRawMethod(name(op.stream),
                 [environment, direction = op.direction](grpc::CallbackServerContext* context) {
                   auto tensor = std::make_shared<AttentionTensor>();
                   return std::make_shared<StreamCall>(context, environment,
                                                       [direction, tensor] {
                                                         return std::make_unique<AttentionCodec>(
                                                             direction, tensor);
                                                       })
                       ->Start();
                 });
  }
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
