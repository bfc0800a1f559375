#include "server/rpc/ring_service.h"

#include <memory>
#include <string_view>
#include <utility>

#include "server/rpc/codecs/sample_codec.h"
#include "server/rpc/codecs/topk_codec.h"
#include "server/rpc/services.h"
#include "server/rpc/transport/ring_call.h"

namespace logitd::rpc {
namespace {

constexpr std::string_view kTopK = "/logitd.v1.Sampler/TopK";
constexpr std::string_view kSample = "/logitd.v1.Sampler/Sample";

}  // namespace

arena::ServeRing MakeRingService(const CallEnvironment& environment) {
  return [environment, find = FindersOf(environment)](const std::shared_ptr<arena::Ring>& ring,
                                                      uint64_t serial, arena::RingRequest request) {
    const bool is_topk = request.method == RingMethod::kTopK;
    std::unique_ptr<OpCodec> codec;
    if (is_topk) {
      codec = std::make_unique<TopKCodec>(find);
    } else {
      codec = std::make_unique<SampleCodec>(find);
    }
    auto call = std::make_shared<RingCall>(environment, ring, serial, is_topk ? kTopK : kSample,
                                           std::move(codec));
    call->Start(std::move(request));
    return call;
  };
}

}  // namespace logitd::rpc
