// ScoreStream and DivergenceStream: a sequence as one stream after another, until every row has its
// answer.
#include <chrono>

#include "absl/strings/str_cat.h"
#include "client/client.h"
#include "client/messages/sequence_messages.h"
#include "client/transport/transport.h"

namespace logitd::client {

namespace {

template <typename Method>
absl::StatusOr<typename Method::Result> Run(
    Transport& transport, const typename Method::Request& request,
    const std::function<bool(const typename Method::Progress&)>& progress) {
  using Messages = SequenceMessages<Method>;
  const auto start = std::chrono::steady_clock::now();
  absl::StatusOr<v1::Limits> limits = transport.Limits(transport.Deadline());
  if (!limits.ok()) return limits.status();
  const auto plan = [&] { return Messages::Plan(request, *limits, transport.options(), progress); };
  absl::StatusOr<std::unique_ptr<Messages>> planned = plan();
  if (transport.LimitsChanged(planned.status(), &*limits, transport.Deadline())) planned = plan();
  if (!planned.ok()) return planned.status();
  Messages& messages = **planned;

  int streams = 0;
  const auto send = [&]() -> absl::Status {
    return transport
        .Retry(absl::InfiniteFuture(),
               [&](absl::Time deadline) {
                 messages.Begin();
                 ++streams;
                 const int64_t before = messages.taken_rows();
                 PayloadHold hold(request.owner);
                 Attempt attempt = transport.Stream(Method::kPath, &messages, deadline,
                                                    transport.options().deadline, &hold);
                 attempt.progressed = messages.taken_rows() > before;
                 // This is how a server ends a stream whose answers the client did not read in
                 // time, because `progress` took long.
                 if (attempt.cancelled_by_server) {
                   attempt.status = absl::UnavailableError(
                       absl::StrCat("the server gave the stream up: ", attempt.status.message()));
                 }
                 return attempt;
               })
        .status;
  };
  absl::Status status = send();
  int64_t replanned_at = -1;  // not twice at one row
  while (messages.taken_rows() > replanned_at &&
         transport.LimitsChanged(status, &*limits, transport.Deadline())) {
    replanned_at = messages.taken_rows();
    status = messages.Replan(*limits);
    if (status.ok()) status = send();
  }
  if (!status.ok()) return status;
  typename Method::Result result = messages.Finish();
  result.round_trip = absl::FromChrono(std::chrono::steady_clock::now() - start);
  result.attempts = streams;
  return result;
}

}  // namespace

absl::StatusOr<ScoreResult> Client::ScoreStream(
    const ScoreRequest& request, const std::function<bool(const ScoreProgress&)>& progress) {
  return Run<ScoreMethod>(*transport_, request, progress);
}

absl::StatusOr<DivergenceResult> Client::DivergenceStream(
    const DivergenceRequest& request,
    const std::function<bool(const DivergenceProgress&)>& progress) {
  return Run<DivergenceMethod>(*transport_, request, progress);
}

}  // namespace logitd::client
