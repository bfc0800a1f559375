#include "client/transport/channel.h"

#include <arpa/inet.h>
#include <grpcpp/create_channel.h>
#include <grpcpp/security/credentials.h>
#include <grpcpp/security/tls_certificate_provider.h>
#include <grpcpp/security/tls_credentials_options.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "client/transport/pem_files.h"

namespace logitd::client {
namespace {

// gRPC's names of addresses that may stand for several servers.
constexpr absl::string_view kSchemes[] = {"ipv4:", "ipv6:", "dns:///"};

// HOST:PORT of every server.
std::vector<absl::string_view> Servers(absl::string_view address) {
  for (const absl::string_view scheme : kSchemes) {
    if (!absl::ConsumePrefix(&address, scheme)) continue;
    if (scheme == "dns:///") return {address};
    return absl::StrSplit(address, ',');
  }
  return {address};
}

// A name or an IPv4 address as it may be in DNS, or [IPv6]: not a URL, and no address whose own
// colons hide where the port begins.
bool IsHost(absl::string_view host) {
  if (absl::ConsumePrefix(&host, "[") && absl::ConsumeSuffix(&host, "]")) {
    const std::string ip(host.substr(0, host.find('%')));  // after it a zone: fe80::1%eth0
    in6_addr parsed = {};
    return inet_pton(AF_INET6, ip.c_str(), &parsed) == 1;
  }
  return !host.empty() && std::all_of(host.begin(), host.end(), [](char c) {
    return absl::ascii_isalnum(static_cast<unsigned char>(c)) || c == '.' || c == '-' || c == '_';
  });
}

bool IsHostAndPort(absl::string_view server) {
  const size_t colon = server.rfind(':');
  if (colon == absl::string_view::npos) return false;
  const absl::string_view digits = server.substr(colon + 1);
  const bool number = std::all_of(digits.begin(), digits.end(), [](char c) {
    return absl::ascii_isdigit(static_cast<unsigned char>(c));
  });
  int port = 0;
  return number && absl::SimpleAtoi(digits, &port) && port > 0 && port <= 65535 &&
         IsHost(server.substr(0, colon));
}

bool IsAddress(const std::string& address) {
  if (absl::StartsWith(address, "unix:")) return address.size() > 5;
  const std::vector<absl::string_view> servers = Servers(address);
  return std::all_of(servers.begin(), servers.end(), IsHostAndPort);
}

bool IsThisMachine(const std::string& address) {
  if (absl::StartsWith(address, "unix:")) return true;
  const std::vector<absl::string_view> servers = Servers(address);
  return std::all_of(servers.begin(), servers.end(), [](absl::string_view server) {
    const std::string host(server.substr(0, server.rfind(':')));
    in_addr ip = {};
    // Of 127.0.0.0/8; a name may begin with 127. too.
    const bool loopback =
        inet_pton(AF_INET, host.c_str(), &ip) == 1 && ntohl(ip.s_addr) >> 24 == 127;
    return loopback || host == "localhost" || host == "[::1]";
  });
}

absl::Status CheckToken(const ClientOptions& options) {
  const std::string& token = options.token;
  if (token.empty()) return absl::OkStatus();
  const bool plain = std::all_of(token.begin(), token.end(), [](char c) {
    return absl::ascii_isgraph(static_cast<unsigned char>(c));
  });
  if (token.size() < 16 || token.size() > 512 || !plain) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "token: got %d characters%s, allowed 16 to 512 printable ones without spaces", token.size(),
        plain ? "" : ", some not printable"));
  }
  if (!options.tls.has_value() && !options.token_over_plaintext &&
      !IsThisMachine(options.address)) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "token: got one for %s without TLS, where others can read it; allowed with TLS, or where "
        "token_over_plaintext says so",
        options.address));
  }
  return absl::OkStatus();
}

// How often the files of the TLS options are looked at.
constexpr unsigned kRefreshSeconds = 1;

absl::StatusOr<std::shared_ptr<grpc::ChannelCredentials>> MakeCredentials(
    const ClientOptions& options) {
  if (!options.tls.has_value()) return grpc::InsecureChannelCredentials();
  const TlsOptions& tls = *options.tls;
  if (absl::Status status = CheckPemFiles(tls); !status.ok()) return status;
  // gRPC's own reader of files: it looks at them every second and hands on a certificate and a key
  // only if both were read. Without a file of authorities, its default ones count.
  grpc::experimental::TlsChannelCredentialsOptions tls_options;
  if (!tls.ca_file.empty() || !tls.cert_file.empty()) {
    tls_options.set_certificate_provider(
        std::make_shared<grpc::experimental::FileWatcherCertificateProvider>(
            tls.key_file, tls.cert_file, tls.ca_file, kRefreshSeconds));
  }
  if (!tls.ca_file.empty()) tls_options.watch_root_certs();
  if (!tls.cert_file.empty()) tls_options.watch_identity_key_cert_pairs();
  return grpc::experimental::TlsCredentials(tls_options);
}

}  // namespace

absl::Status CheckOptions(const ClientOptions& options) {
  if (!IsAddress(options.address)) {
    return absl::InvalidArgumentError(
        absl::StrFormat("address: got \"%s\", allowed HOST:PORT, [IPv6]:PORT, unix:PATH, "
                        "ipv4:A:PORT,B:PORT, ipv6:[A]:PORT,[B]:PORT or dns:///HOST:PORT",
                        absl::CHexEscape(options.address)));
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
  return CheckToken(options);
}

absl::StatusOr<std::shared_ptr<grpc::Channel>> MakeChannel(const ClientOptions& options) {
  auto credentials = MakeCredentials(options);
  if (!credentials.ok()) return credentials.status();
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
  if (options.round_robin) {
    // The empty name asks for the health of the whole server.
    args.SetServiceConfigJSON(
        R"({"loadBalancingConfig": [{"round_robin": {}}], "healthCheckConfig": {"serviceName": ""}})");
  }
  if (options.tls.has_value() && !options.tls->server_name.empty()) {
    args.SetSslTargetNameOverride(options.tls->server_name);
  }
  return grpc::CreateCustomChannel(options.address, *credentials, args);
}

}  // namespace logitd::client
