#include "client/transport/channel.h"

#include <grpcpp/create_channel.h>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_format.h"
#include "absl/strings/string_view.h"

namespace logitd::client {
namespace {

bool IsAddress(const std::string& address) {
  if (absl::StartsWith(address, "unix:")) return address.size() > 5;
  const size_t colon = address.rfind(':');
  int port = 0;
  return colon != std::string::npos && colon > 0 &&
         absl::SimpleAtoi(absl::string_view(address).substr(colon + 1), &port) && port > 0 &&
         port <= 65535;
}

}  // namespace

absl::Status CheckOptions(const ClientOptions& options) {
  if (!IsAddress(options.address)) {
    return absl::InvalidArgumentError(
        absl::StrFormat("address: got \"%s\", allowed HOST:PORT or unix:PATH", options.address));
  }
  if (options.retry.max_attempts < 1) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "retry.max_attempts: got %d, allowed 1 or more", options.retry.max_attempts));
  }
  if (options.deadline <= absl::ZeroDuration() || options.deadline > absl::Hours(24 * 365)) {
    return absl::InvalidArgumentError(
        absl::StrFormat("deadline: got %s, allowed above 0 and up to a year",
                        absl::FormatDuration(options.deadline)));
  }
  return absl::OkStatus();
}

std::shared_ptr<grpc::Channel> MakeChannel(const std::string& address) {
  grpc::ChannelArguments args;
  args.SetMaxReceiveMessageSize(-1);
  args.SetMaxSendMessageSize(-1);
  args.SetInt(GRPC_ARG_ENABLE_RETRIES, 0);  // Transport::Retry knows the delay and the deadline
  args.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);  // a Client is a connection
  args.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);          // tensors do not go through a web proxy
  // Between two tries to connect, calls fail at once. These values bound how long a server that has
  // come back stays unnoticed. The "minimum" is how long one try may take.
  args.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 100);
  args.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, 1000);
  args.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 250);
  // Keepalive also sets TCP_USER_TIMEOUT. Without it, a peer that stopped reading holds our payload
  // for ever.
  args.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, 60000);
  args.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 20000);
  return grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), args);
}

}  // namespace logitd::client
