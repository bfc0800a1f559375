// TopK, Sample, Verify, Score and Divergence: one message of rows, one answer.
#include <utility>

#include "client/client.h"
#include "client/messages/codec.h"
#include "client/transport/transport.h"

namespace logitd::client {
namespace {

constexpr char kTopKMethod[] = "/logitd.v1.Sampler/TopK";
constexpr char kSampleMethod[] = "/logitd.v1.Sampler/Sample";
constexpr char kScoreMethod[] = "/logitd.v1.Scorer/Score";

template <typename Request>
absl::StatusOr<grpc::ByteBuffer> Encode(const Transport& transport, const Request& request,
                                        const std::shared_ptr<const void>& owner) {
  absl::StatusOr<grpc::ByteBuffer> buffer = EncodeRequest(request, owner);
  if (!buffer.ok()) return buffer;
  if (absl::Status size = transport.CheckSize(*buffer); !size.ok()) return size;
  return buffer;
}

template <typename Answer, typename Request>
absl::StatusOr<LogitsResult<Answer>> Call(Transport& transport, const char* method,
                                          const Request& request) {
  Attempt attempt = transport.Retry(transport.Deadline(), [&](absl::Time deadline) {
    PayloadHold hold(request.owner);
    absl::StatusOr<grpc::ByteBuffer> buffer = Encode(transport, request, hold.owner());
    if (!buffer.ok()) return Attempt{.status = buffer.status()};
    hold.Drop();
    return transport.Call(method, &*buffer, deadline, &hold);
  });
  if (!attempt.status.ok()) return attempt.status;
  absl::StatusOr<LogitsResult<Answer>> result = DecodeResponse<Answer>(&attempt.response);
  if (result.ok()) {
    result->round_trip = attempt.round_trip;
    result->attempts = attempt.attempts;
  }
  return result;
}

template <typename Answer, typename Params>
void CallAsync(Transport& transport, const char* method, const LogitsRequest<Params>& request,
               std::function<void(absl::StatusOr<LogitsResult<Answer>>)> done) {
  if (request.owner == nullptr && request.arena == nullptr) {
    return done(
        absl::InvalidArgumentError("owner: got none, allowed the payload's owner, or an arena"));
  }
  Throttle* const throttle = transport.ThrottleOf(method);
  if (throttle != nullptr) {
    const absl::Time now = transport.clock().Now();
    if (absl::Status status = throttle->Ask(now); !status.ok()) return done(status);
  }
  absl::StatusOr<grpc::ByteBuffer> buffer = Encode(transport, request, request.owner);
  if (!buffer.ok()) return done(buffer.status());
  struct InFlight {
    grpc::ClientContext context;
    grpc::ByteBuffer request;
    grpc::ByteBuffer response;
    absl::Time start;
    std::function<void(absl::StatusOr<LogitsResult<Answer>>)> done;
  };
  auto call = std::make_shared<InFlight>();
  call->request.Swap(&*buffer);
  call->start = transport.clock().Now();
  call->done = std::move(done);
  transport.Describe(&call->context, transport.Deadline(),
                     static_cast<int64_t>(call->request.Length()));
  transport.stub().UnaryCall(
      &call->context, method, {}, &call->request, &call->response,
      [call, throttle, &clock = transport.clock()](const grpc::Status& grpc_status) {
        const absl::Duration round_trip = clock.Now() - call->start;
        const absl::Status status = ToAbsl(grpc_status);
        if (throttle != nullptr) {
          throttle->Ended(status, PushbackOf(call->context), clock.Now());
        }
        if (!status.ok()) return call->done(status);
        absl::StatusOr<LogitsResult<Answer>> result = DecodeResponse<Answer>(&call->response);
        if (result.ok()) {
          result->round_trip = round_trip;
          result->attempts = 1;
        }
        call->done(std::move(result));
      });
}

}  // namespace

absl::StatusOr<TopKResult> Client::TopK(const TopKRequest& request) {
  return Call<v1::TopKResponse>(*transport_, kTopKMethod, request);
}

absl::StatusOr<SampleResult> Client::Sample(const SampleRequest& request) {
  return Call<v1::SampleResponse>(*transport_, kSampleMethod, request);
}

absl::StatusOr<VerifyResult> Client::Verify(const VerifyRequest& request) {
  return Call<v1::VerifyResponse>(*transport_, "/logitd.v1.Sampler/Verify", request);
}

absl::StatusOr<ScoreResult> Client::Score(const ScoreRequest& request) {
  return Call<v1::ScoreResponse>(*transport_, kScoreMethod, request);
}

absl::StatusOr<DivergenceResult> Client::Divergence(const DivergenceRequest& request) {
  return Call<v1::DivergenceResponse>(*transport_, "/logitd.v1.Scorer/Divergence", request);
}

void Client::TopKAsync(const TopKRequest& request,
                       std::function<void(absl::StatusOr<TopKResult>)> done) {
  CallAsync<v1::TopKResponse>(*transport_, kTopKMethod, request, std::move(done));
}

void Client::SampleAsync(const SampleRequest& request,
                         std::function<void(absl::StatusOr<SampleResult>)> done) {
  CallAsync<v1::SampleResponse>(*transport_, kSampleMethod, request, std::move(done));
}

void Client::ScoreAsync(const ScoreRequest& request,
                        std::function<void(absl::StatusOr<ScoreResult>)> done) {
  CallAsync<v1::ScoreResponse>(*transport_, kScoreMethod, request, std::move(done));
}

}  // namespace logitd::client
