#include "client/client.h"

#include <utility>

#include "client/transport/channel.h"
#include "client/transport/transport.h"

namespace logitd::client {

absl::StatusOr<std::unique_ptr<Client>> Client::Create(ClientOptions options) {
  if (absl::Status status = CheckOptions(options); !status.ok()) return status;
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
