// The connection to one server.
#ifndef LOGITD_CLIENT_TRANSPORT_CHANNEL_H_
#define LOGITD_CLIENT_TRANSPORT_CHANNEL_H_

#include <grpcpp/channel.h>

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/options.h"

namespace logitd::client {

// INVALID_ARGUMENT: an address or an option that cannot work.
absl::Status CheckOptions(const ClientOptions& options);

// Connects at the first call. The channel is not shared with other channels to the same address.
// NOT_FOUND or INVALID_ARGUMENT: a file of the TLS options cannot be read.
absl::StatusOr<std::shared_ptr<grpc::Channel>> MakeChannel(const ClientOptions& options);

}  // namespace logitd::client

#endif  // LOGITD_CLIENT_TRANSPORT_CHANNEL_H_
