#include "client/client.h"

#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_format.h"
#include "client/transport/channel.h"
#include "client/transport/transport.h"
#include "formats/trace_context.h"

namespace logitd::client {
namespace {

// The server would ignore other ones.
absl::Status CheckNamesOfCalls(const ClientOptions& options) {
  if (!options.request_id.empty() && !formats::IsRequestId(options.request_id)) {
    return absl::InvalidArgumentError(
        absl::StrFormat("request_id: got \"%s\", allowed 1 to 128 visible characters of ASCII",
                        absl::CHexEscape(options.request_id)));
  }
  if (!options.traceparent.empty() && !formats::IsTraceparent(options.traceparent)) {
    return absl::InvalidArgumentError(
        absl::StrFormat("traceparent: got \"%s\", allowed 00-TRACE-PARENT-FLAGS of 32, 16 and 2 "
                        "digits 0-9 and a-f, with a trace and a parent that are not zero",
                        absl::CHexEscape(options.traceparent)));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<Client>> Client::Create(ClientOptions options) {
  if (absl::Status status = CheckOptions(options); !status.ok()) return status;
  if (absl::Status status = CheckNamesOfCalls(options); !status.ok()) return status;
  auto channel = MakeChannel(options);
  if (!channel.ok()) return channel.status();
  return std::unique_ptr<Client>(
      new Client(std::make_unique<Transport>(std::move(options), *std::move(channel))));
}

Client::Client(std::unique_ptr<Transport> transport) : transport_(std::move(transport)) {}
Client::~Client() = default;
const ClientOptions& Client::options() const { return transport_->options(); }

absl::StatusOr<v1::GetInfoResponse> Client::Info() {
  return transport_->Info(transport_->Deadline());
}

absl::StatusOr<v1::GetLoadResponse> Client::GetLoad() {
  return transport_->CallSmall<v1::GetLoadResponse>("/logitd.v1.Server/GetLoad",
                                                    v1::GetLoadRequest(), transport_->Deadline());
}

}  // namespace logitd::client
