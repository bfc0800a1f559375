#include "server/rpc/services.h"

#include <google/protobuf/descriptor.h>

#include <algorithm>
#include <iterator>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "logitd/v1/attention.pb.h"
#include "logitd/v1/sampler.pb.h"
#include "logitd/v1/scorer.pb.h"
#include "server/engine/activity.h"
#include "server/engine/devices.h"
#include "server/engine/sync.h"
#include "server/ops/ops.h"
#include "server/rpc/codecs/attention_codec.h"
#include "server/rpc/codecs/divergence_codec.h"
#include "server/rpc/codecs/sample_codec.h"
#include "server/rpc/codecs/score_codec.h"
#include "server/rpc/codecs/topk_codec.h"
#include "server/rpc/codecs/verify_codec.h"
#include "server/rpc/transport/plain_call.h"
#include "server/rpc/transport/ring_call.h"
#include "server/rpc/transport/stream_call.h"
#include "server/rpc/transport/unary_call.h"

namespace logitd::rpc {
namespace {

using MakeCodec = StreamCall::MakeCodec;

// For one call of a method: makes the codec of each of its messages.
template <typename Codec>
MakeCodec ForTokens(const Finders& find, bool /*is_stream*/) {
  return [find] { return std::make_unique<Codec>(find); };
}

template <typename Codec, typename Sequence>
MakeCodec ForSequence(const Finders& find, bool /*is_stream*/) {
  return [find, sequence = std::make_shared<Sequence>()] {
    return std::make_unique<Codec>(find, sequence);
  };
}

template <AttentionDirection direction>
MakeCodec ForAttention(const Finders& find, bool is_stream) {
  return [find, tensor = is_stream ? std::make_shared<AttentionTensor>() : nullptr] {
    return std::make_unique<AttentionCodec>(direction, find.lease, tensor);
  };
}

// The codec of each op, and a message of its service's file.
struct OpCodecs {
  const engine::OpTraits* op;
  door::Role role;
  MakeCodec (*for_call)(const Finders& find, bool is_stream);
  const google::protobuf::Descriptor* (*message)();
};
constexpr OpCodecs kCodecs[] = {
    {&ops::kSoftmaxTopKTraits, door::Role::kInfer, &ForTokens<TopKCodec>,
     &v1::TopKRequest::descriptor},
    {&ops::kSampleTraits, door::Role::kInfer, &ForTokens<SampleCodec>,
     &v1::SampleRequest::descriptor},
    {&ops::kVerifyTraits, door::Role::kInfer, &ForTokens<VerifyCodec>,
     &v1::VerifyRequest::descriptor},
    {&ops::kCrossEntropyTraits, door::Role::kScore, &ForSequence<ScoreCodec, ScoreSequence>,
     &v1::ScoreRequest::descriptor},
    {&ops::kDivergenceTraits, door::Role::kScore, &ForSequence<DivergenceCodec, DivergenceSequence>,
     &v1::DivergenceRequest::descriptor},
    {&ops::kAttentionSoftmaxTraits, door::Role::kInfer, &ForAttention<AttentionDirection::kForward>,
     &v1::AttentionSoftmaxRequest::descriptor},
    {&ops::kAttentionSoftmaxBackwardTraits, door::Role::kInfer,
     &ForAttention<AttentionDirection::kBackward>,
     &v1::AttentionSoftmaxBackwardRequest::descriptor},
};
static_assert(std::size(kCodecs) == std::size(ops::kOps));

// What requests of a server refer to.
Finders FindersOf(const CallEnvironment& environment) {
  Finders find = {
      .head = [heads = environment.heads](std::string_view name) { return heads->Find(name); },
      .lease = nullptr};
  if (environment.leases != nullptr) {
    find.lease = [leases = environment.leases](std::string_view id) { return leases->Find(id); };
  }
  return find;
}

// Less than this is what is left of work that ended long ago.
constexpr double kLately = 1e-6;

v1::GetLoadResponse LoadOf(const CallEnvironment& environment) {
  const engine::Metrics& metrics = *environment.metrics;
  const engine::Admission& admission = *environment.admission;
  v1::GetLoadResponse load;
  load.set_draining(admission.draining());
  load.set_open_calls(metrics.Get(engine::Gauge::kOpenCalls));
  load.set_open_streams(metrics.Get(engine::Gauge::kOpenStreams));
  load.set_waiting_calls(metrics.Get(engine::Gauge::kWaitingCalls));
  load.set_queued_jobs(metrics.Get(engine::Gauge::kQueuedJobs));
  load.set_held_bytes(admission.held_bytes());
  load.set_max_held_bytes(admission.options().max_held_bytes);
  if (const auto predicted = environment.load->PredictNext()) {
    load.set_predicted_call_ns(absl::ToInt64Nanoseconds(*predicted));
  }
  const engine::Activity::View view = environment.engine->activity().Read(engine::MonotonicNanos());
  load.set_busy(view.busy);
  load.set_devices(environment.engine->devices().left());
  for (const engine::Activity::OfOp& op : view.ops) {
    if (op.busy < kLately) continue;
    v1::OpLoad* ran = load.add_ops();
    ran->set_name(std::string(op.op));
    ran->set_rows_per_s(op.rows_per_s);
    ran->set_busy(op.busy);
  }
  return load;
}

constexpr PlainMethod kGetInfo = {.path = "/logitd.v1.Server/GetInfo"};
constexpr PlainMethod kGetLoad = {.path = "/logitd.v1.Server/GetLoad"};

constexpr std::string_view kTopK = "/logitd.v1.Sampler/TopK";
constexpr std::string_view kSample = "/logitd.v1.Sampler/Sample";

}  // namespace

std::vector<std::string> RegisterOps(const CallEnvironment& environment, Registry* registry) {
  const Finders find = FindersOf(environment);
  std::vector<std::string> services;
  for (const ops::Op& op : ops::kOps) {
    const OpCodecs& codecs = *std::find_if(std::begin(kCodecs), std::end(kCodecs),
                                           [&](const OpCodecs& c) { return c.op == op.op; });
    // Naming the descriptor links the file in, for reflection to serve.
    const std::string service(
        codecs.message()->file()->pool()->FindServiceByName(std::string(op.service))->full_name());
    if (!absl::c_linear_search(services, service)) services.push_back(service);
    const auto access = [&](std::string_view method) {
      return Access{.method = {method.data(), method.size()}, .role = codecs.role};
    };
    const auto path = [&](std::string_view method) {
      return absl::StrCat("/", service, "/", std::string(method));
    };
    registry->Add(path(op.method), [=, &environment, path = path(op.method),
                                    access = access(op.method)](http2::Stream* stream) {
      return std::make_shared<UnaryCall>(stream, path, environment, access,
                                         codecs.for_call(find, /*is_stream=*/false)());
    });
    if (op.stream_method.empty()) continue;
    registry->Add(path(op.stream_method),
                  [=, &environment, path = path(op.stream_method),
                   access = access(op.stream_method)](http2::Stream* stream) {
                    return std::make_shared<StreamCall>(stream, path, environment, access,
                                                        codecs.for_call(find, /*is_stream=*/true));
                  });
  }
  return services;
}

void RegisterServer(v1::GetInfoResponse info, const CallEnvironment& environment,
                    Registry* registry) {
  AddUnary<v1::GetInfoRequest, v1::GetInfoResponse>(
      kGetInfo, environment, registry,
      [&environment, info = std::move(info)](const auto& /*request*/, auto* answer) {
        *answer = info;
        answer->set_draining(environment.admission->draining());
        const engine::Devices& devices = environment.engine->devices();
        for (int i = 0; i < devices.count(); ++i) {
          answer->mutable_devices(i)->set_lost(devices.lost(i));
          answer->mutable_devices(i)->set_head_bytes(environment.heads->bytes(i));
        }
        *answer->mutable_device() = answer->devices(0);
        return absl::OkStatus();
      });
  AddUnary<v1::GetLoadRequest, v1::GetLoadResponse>(
      kGetLoad, environment, registry, [&environment](const auto& /*request*/, auto* answer) {
        *answer = LoadOf(environment);
        return absl::OkStatus();
      });
}

arena::ServeRing MakeRingService(const CallEnvironment& environment) {
  const Finders find = FindersOf(environment);
  return
      [environment, topk = ForTokens<TopKCodec>(find, /*is_stream=*/false),
       sample = ForTokens<SampleCodec>(find, /*is_stream=*/false)](
          const std::shared_ptr<arena::Ring>& ring, uint64_t serial, arena::RingRequest request) {
        const bool is_topk = request.method == RingMethod::kTopK;
        auto call = std::make_shared<RingCall>(environment, ring, serial, is_topk ? kTopK : kSample,
                                               is_topk ? topk() : sample());
        call->Start(std::move(request));
        return call;
      };
}

}  // namespace logitd::rpc
