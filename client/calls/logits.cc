// TopK, Sample, Verify and Score: one message of rows, one answer.
#include <chrono>
#include <utility>

#include "client/client.h"
#include "client/messages/codec.h"
#include "client/transport/transport.h"

namespace logitd::client {
namespace {

using Clock = std::chrono::steady_clock;

constexpr char kTopKMethod[] = "/logitd.v1.Sampler/TopK";

template <typename Params>
absl::StatusOr<grpc::ByteBuffer> Encode(const Transport& transport,
                                        const LogitsRequest<Params>& request,
                                        const std::shared_ptr<const void>& owner) {
  absl::StatusOr<grpc::ByteBuffer> buffer = EncodeRequest(request, owner);
  if (!buffer.ok()) return buffer;
  if (absl::Status size = transport.CheckSize(*buffer); !size.ok()) return size;
  return buffer;
}

template <typename Answer, typename Params>
absl::StatusOr<LogitsResult<Answer>> Call(Transport& transport, const char* method,
                                          const LogitsRequest<Params>& request) {
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

}  // namespace

absl::StatusOr<TopKResult> Client::TopK(const TopKRequest& request) {
  return Call<v1::TopKResponse>(*transport_, kTopKMethod, request);
}

absl::StatusOr<SampleResult> Client::Sample(const SampleRequest& request) {
  return Call<v1::SampleResponse>(*transport_, "/logitd.v1.Sampler/Sample", request);
}

absl::StatusOr<VerifyResult> Client::Verify(const VerifyRequest& request) {
  return Call<v1::VerifyResponse>(*transport_, "/logitd.v1.Sampler/Verify", request);
}

absl::StatusOr<ScoreResult> Client::Score(const ScoreRequest& request) {
  return Call<v1::ScoreResponse>(*transport_, "/logitd.v1.Scorer/Score", request);
}

void Client::TopKAsync(const TopKRequest& request,
                       std::function<void(absl::StatusOr<TopKResult>)> done) {
  if (request.owner == nullptr) {
    return done(absl::InvalidArgumentError("owner: got none, allowed the payload's owner"));
  }
  absl::StatusOr<grpc::ByteBuffer> buffer = Encode(*transport_, request, request.owner);
  if (!buffer.ok()) return done(buffer.status());
  struct InFlight {
    grpc::ClientContext context;
    grpc::ByteBuffer request;
    grpc::ByteBuffer response;
    Clock::time_point start;
    std::function<void(absl::StatusOr<TopKResult>)> done;
  };
  auto call = std::make_shared<InFlight>();
  call->request.Swap(&*buffer);
  call->start = Clock::now();
  call->done = std::move(done);
  call->context.set_deadline(absl::ToChronoTime(transport_->Deadline()));
  transport_->Describe(&call->context, static_cast<int64_t>(call->request.Length()));
  transport_->stub().UnaryCall(
      &call->context, kTopKMethod, {}, &call->request, &call->response,
      [call](const grpc::Status& status) {
        const absl::Duration round_trip = absl::FromChrono(Clock::now() - call->start);
        if (!status.ok()) return call->done(ToAbsl(status));
        absl::StatusOr<TopKResult> result = DecodeResponse<v1::TopKResponse>(&call->response);
        if (result.ok()) {
          result->round_trip = round_trip;
          result->attempts = 1;
        }
        call->done(std::move(result));
      });
}

}  // namespace logitd::client
