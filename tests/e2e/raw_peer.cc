#include "tests/e2e/raw_peer.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <stdexcept>

namespace logitd::e2e {
namespace {

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

RawPeer::RawPeer(int port, bool confirm)
    : fd_(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)), reader_(fd_) {
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
  reader_.Find([](const ServerFrame&) { return false; }, timeout);
  return reader_.ended();
}

bool RawPeer::Gets(uint8_t type, uint32_t stream, absl::Duration timeout, std::string* text) {
  return reader_.Find(
      [&](const ServerFrame& frame) {
        if (frame.type != type || frame.stream != stream) return false;
        if (text != nullptr) *text = frame.text;
        return true;
      },
      timeout);
}

}  // namespace logitd::e2e
