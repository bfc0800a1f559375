// AttentionSoftmax and its gradient: one message where the tensor fits, otherwise a stream.
#include "client/attention.h"

#include "client/client.h"
#include "client/messages/attention_messages.h"
#include "client/transport/transport.h"

namespace logitd::client {
namespace {

template <typename Request>
absl::StatusOr<AttentionResult> CallWithLimits(Transport& transport, const Request& request,
                                               const v1::Limits& limits, absl::Time end) {
  absl::StatusOr<AttentionMessages> messages =
      AttentionMessages::Plan(request, limits, transport.options());
  if (!messages.ok()) return messages.status();
  const bool backward = messages->backward();
  const Attempt attempt = transport.Retry(end, [&](absl::Time deadline) {
    messages->Begin();
    PayloadHold hold(request.owner);
    if (messages->size() > 1) {
      return transport.Stream(backward ? "/logitd.v1.Attention/SoftmaxBackwardStream"
                                       : "/logitd.v1.Attention/SoftmaxStream",
                              &*messages, deadline, absl::InfiniteDuration(), &hold);
    }
    absl::StatusOr<grpc::ByteBuffer> message = messages->Encode(0, hold.owner());
    if (!message.ok()) return Attempt{.status = message.status()};
    hold.Drop();
    Attempt unary = transport.Call(
        backward ? "/logitd.v1.Attention/SoftmaxBackward" : "/logitd.v1.Attention/Softmax",
        &*message, deadline, &hold);
    if (unary.status.ok()) unary.status = messages->Take(0, &unary.response);
    return unary;
  });
  if (!attempt.status.ok()) return attempt.status;
  AttentionResult result = messages->Finish();
  result.round_trip = attempt.round_trip;
  result.attempts = attempt.attempts;
  return result;
}

template <typename Request>
absl::StatusOr<AttentionResult> Call(Transport& transport, const Request& request) {
  const absl::Time end = transport.Deadline();
  absl::StatusOr<v1::Limits> limits = transport.Limits(end);
  if (!limits.ok()) return limits.status();
  absl::StatusOr<AttentionResult> result = CallWithLimits(transport, request, *limits, end);
  if (!transport.LimitsChanged(result.status(), &*limits, end)) return result;
  return CallWithLimits(transport, request, *limits, end);
}

}  // namespace

absl::StatusOr<AttentionResult> Client::AttentionSoftmax(const AttentionSoftmaxRequest& request) {
  return Call(*transport_, request);
}

absl::StatusOr<AttentionResult> Client::AttentionSoftmaxBackward(
    const AttentionSoftmaxBackwardRequest& request) {
  return Call(*transport_, request);
}

}  // namespace logitd::client
