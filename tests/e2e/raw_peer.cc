#include "tests/e2e/raw_peer.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <stdexcept>

#include "absl/time/clock.h"

namespace logitd::e2e {
namespace {

void AppendBigEndian(std::string* out, uint32_t value, int bytes) {
  for (int i = bytes - 1; i >= 0; --i) out->push_back(static_cast<char>(value >> (8 * i)));
}

// An HPACK string without Huffman code.
void AppendString(std::string* out, std::string_view text) {
  if (text.size() < 127) {
    out->push_back(static_cast<char>(text.size()));
  } else {
    out->push_back(127);
    size_t left = text.size() - 127;
    for (; left >= 128; left /= 128) out->push_back(static_cast<char>(left % 128 + 128));
    out->push_back(static_cast<char>(left));
  }
  *out += text;
}

}  // namespace

std::string Frame(uint8_t type, uint8_t flags, uint32_t stream, std::string_view payload) {
  std::string frame;
  AppendBigEndian(&frame, static_cast<uint32_t>(payload.size()), 3);
  frame.push_back(static_cast<char>(type));
  frame.push_back(static_cast<char>(flags));
  AppendBigEndian(&frame, stream, 4);
  frame += payload;
  return frame;
}

std::string Field(std::string_view name, std::string_view value) {
  std::string field(1, '\0');
  AppendString(&field, name);
  AppendString(&field, value);
  return field;
}

std::string CallHeaders(const std::string& method) {
  return "\x83\x86" +  // :method POST, :scheme http
         Field(":path", method) + Field(":authority", "localhost") +
         Field("content-type", "application/grpc") + Field("te", "trailers");
}

RawPeer::RawPeer(int port, bool confirm) : fd_(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  const timeval second = {.tv_sec = 1};
  setsockopt(fd_, SOL_SOCKET, SO_SNDTIMEO, &second, sizeof(second));
  if (connect(fd_, reinterpret_cast<sockaddr*>(&address), sizeof(address)) != 0) {
    throw std::runtime_error("connect: " + std::string(std::strerror(errno)));
  }
  const int on = 1;
  setsockopt(fd_, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
  Send("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + Frame(kSettings, 0, 0, ""));
  if (confirm) Send(Frame(kSettings, kAck, 0, ""));
}

RawPeer::~RawPeer() { close(fd_); }

bool RawPeer::Send(std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t sent = send(fd_, bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (sent <= 0) return false;
    bytes.remove_prefix(static_cast<size_t>(sent));
  }
  return true;
}

bool RawPeer::EndsWithin(absl::Duration timeout) {
  const absl::Time end = absl::Now() + timeout;
  char buffer[65536];
  while (absl::Now() < end) {
    pollfd waiting = {fd_, POLLIN, 0};
    if (poll(&waiting, 1, 5) <= 0) continue;
    if (recv(fd_, buffer, sizeof(buffer), 0) <= 0) return true;
  }
  return false;
}

bool RawPeer::Gets(uint8_t type, uint32_t stream, absl::Duration timeout, std::string* payload) {
  const absl::Time end = absl::Now() + timeout;
  std::string bytes;
  while (absl::Now() < end) {
    while (bytes.size() >= 9) {
      const auto byte = [&bytes](size_t i) { return static_cast<uint8_t>(bytes[i]); };
      const size_t size = size_t{byte(0)} << 16 | size_t{byte(1)} << 8 | byte(2);
      const uint32_t id = uint32_t{byte(7)} << 8 | byte(8);
      const bool wanted = byte(3) == type && id == stream;
      if (wanted && payload == nullptr) return true;
      if (bytes.size() < 9 + size) break;
      if (wanted) {
        *payload = bytes.substr(9, size);
        return true;
      }
      bytes.erase(0, 9 + size);
    }
    pollfd waiting = {fd_, POLLIN, 0};
    if (poll(&waiting, 1, 5) <= 0) continue;
    char buffer[4096];
    const ssize_t got = recv(fd_, buffer, sizeof(buffer), 0);
    if (got <= 0) return false;
    bytes.append(buffer, static_cast<size_t>(got));
  }
  return false;
}

}  // namespace logitd::e2e
