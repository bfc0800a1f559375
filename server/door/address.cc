#include "server/door/address.h"

#include <arpa/inet.h>
#include <sys/un.h>

#include <algorithm>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace logitd::door {
namespace {

constexpr size_t kMaxPath = sizeof(sockaddr_un::sun_path) - 1;

absl::Status Allowed(const std::string& what) { return absl::InvalidArgumentError(what); }

bool IsIpv6(const std::string& host) {
  in6_addr address;
  return inet_pton(AF_INET6, host.substr(0, host.find('%')).c_str(), &address) == 1;
}

bool IsName(absl::string_view host) {
  return std::all_of(host.begin(), host.end(), [](char c) {
    return absl::ascii_isalnum(static_cast<unsigned char>(c)) || c == '.' || c == '-' || c == '_';
  });
}

}  // namespace

absl::StatusOr<Address> ParseAddress(absl::string_view text) {
  constexpr absl::string_view kUnix = "unix:";
  if (text.substr(0, kUnix.size()) == kUnix) {
    text.remove_prefix(kUnix.size());
    if (absl::StartsWith(text, "//")) text.remove_prefix(2);  // unix:///PATH, as gRPC's clients
    if (text.empty()) return Allowed("a path after unix:");
    if (text.size() > kMaxPath || absl::StrContains(text, '\0')) {
      return Allowed(absl::StrCat("a path of at most ", kMaxPath, " bytes after unix:"));
    }
    return Address{.path = std::string(text)};
  }
  const size_t colon = text.rfind(':');
  if (colon == absl::string_view::npos) return Allowed("HOST:PORT, [IPv6]:PORT or unix:PATH");
  std::string host(text.substr(0, colon));
  const std::string port_text(text.substr(colon + 1));
  if (host.empty()) return Allowed("a host before the port; 0.0.0.0 and [::] are every address");
  if (absl::StartsWith(host, "[") && absl::EndsWith(host, "]")) {
    host = host.substr(1, host.size() - 2);
    if (!IsIpv6(host)) return Allowed("an IPv6 address in the brackets");
  } else if (absl::StrContains(host, ':')) {
    return Allowed("brackets around an IPv6 address: [::1]:7450");
  } else if (!IsName(host)) {
    return Allowed("a name or an address as the host");
  }
  int port = 0;
  const bool digits = std::all_of(port_text.begin(), port_text.end(),
                                  [](char c) { return absl::ascii_isdigit(c); });
  if (!digits || !absl::SimpleAtoi(port_text, &port) || port > 65535) {
    return Allowed("a port of 0 to 65535");
  }
  return Address{.host = std::move(host), .port = port};
}

bool IsLocal(const Address& address) {
  if (!address.path.empty()) return true;
  in_addr ip;
  if (inet_pton(AF_INET, address.host.c_str(), &ip) == 1) return ntohl(ip.s_addr) >> 24 == 127;
  return absl::EqualsIgnoreCase(address.host, "localhost") || address.host == "::1";
}

}  // namespace logitd::door
