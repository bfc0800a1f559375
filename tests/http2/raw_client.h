// A client that writes frames of HTTP/2 one by one, right or wrong, and shows those that come back.
#ifndef LOGITD_TESTS_HTTP2_RAW_CLIENT_H_
#define LOGITD_TESTS_HTTP2_RAW_CLIENT_H_

#include <nghttp2/nghttp2.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace logitd::http2::testing {

struct Frame {
  uint8_t type = 0;
  uint8_t flags = 0;
  int32_t stream = 0;
  std::string payload;

  bool ends_stream() const { return (flags & NGHTTP2_FLAG_END_STREAM) != 0; }
};

using Fields = std::vector<std::pair<std::string, std::string>>;

inline std::string Big32(uint32_t value) {
  return {static_cast<char>(value >> 24), static_cast<char>(value >> 16),
          static_cast<char>(value >> 8), static_cast<char>(value)};
}
inline uint32_t Read32(std::string_view bytes) {
  uint32_t value = 0;
  for (const char c : bytes.substr(0, 4)) value = value << 8 | static_cast<uint8_t>(c);
  return value;
}

inline std::string Encoded(const Frame& frame) {
  std::string head = Big32(static_cast<uint32_t>(frame.payload.size())).substr(1);
  head += static_cast<char>(frame.type);
  head += static_cast<char>(frame.flags);
  return head + Big32(static_cast<uint32_t>(frame.stream)) + frame.payload;
}

// The header list of a call that asks for `path`.
inline Fields Request(const std::string& path) {
  return {{":method", "POST"}, {":scheme", "http"}, {":path", path}, {":authority", "test"}};
}

// Not thread-safe. Owns `fd`, a connected socket.
class RawClient {
 public:
  explicit RawClient(int fd) : fd_(fd) {
    nghttp2_hd_deflate_new(&deflater_, 4096);
    nghttp2_hd_inflate_new(&inflater_);
  }
  ~RawClient() {
    Close();
    nghttp2_hd_deflate_del(deflater_);
    nghttp2_hd_inflate_del(inflater_);
  }
  RawClient(const RawClient&) = delete;
  RawClient& operator=(const RawClient&) = delete;

  void Close() {
    if (fd_ >= 0) close(fd_);
    fd_ = -1;
  }

  // False: the socket does not take all of it, or is closed.
  bool Send(std::string_view bytes) {
    return send(fd_, bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT) ==
           static_cast<ssize_t>(bytes.size());
  }
  bool Send(const Frame& frame) { return Send(Encoded(frame)); }
  // The preface, settings that say nothing, and yes to the server's.
  bool Begin() {
    return Send(NGHTTP2_CLIENT_MAGIC) && Send({.type = NGHTTP2_SETTINGS}) &&
           Send({.type = NGHTTP2_SETTINGS, .flags = NGHTTP2_FLAG_ACK});
  }

  // HEADERS of a stream, as the connection's table has it now.
  Frame Headers(int32_t stream, const Fields& fields, bool ends = false) {
    std::vector<nghttp2_nv> list;
    for (const auto& [name, value] : fields) {
      list.push_back({.name = reinterpret_cast<uint8_t*>(const_cast<char*>(name.data())),
                      .value = reinterpret_cast<uint8_t*>(const_cast<char*>(value.data())),
                      .namelen = name.size(),
                      .valuelen = value.size(),
                      .flags = NGHTTP2_NV_FLAG_NONE});
    }
    std::string block(nghttp2_hd_deflate_bound(deflater_, list.data(), list.size()), '\0');
    const ssize_t bytes = nghttp2_hd_deflate_hd(deflater_, reinterpret_cast<uint8_t*>(block.data()),
                                                block.size(), list.data(), list.size());
    block.resize(static_cast<size_t>(bytes));
    const uint8_t end = ends ? NGHTTP2_FLAG_END_STREAM : NGHTTP2_FLAG_NONE;
    return {.type = NGHTTP2_HEADERS,
            .flags = static_cast<uint8_t>(NGHTTP2_FLAG_END_HEADERS | end),
            .stream = stream,
            .payload = std::move(block)};
  }
  static Frame Data(int32_t stream, std::string bytes, bool ends = false) {
    const uint8_t end = ends ? NGHTTP2_FLAG_END_STREAM : NGHTTP2_FLAG_NONE;
    return {.type = NGHTTP2_DATA, .flags = end, .stream = stream, .payload = std::move(bytes)};
  }
  static Frame Reset(int32_t stream) {
    return {.type = NGHTTP2_RST_STREAM, .stream = stream, .payload = Big32(NGHTTP2_CANCEL)};
  }
  static Frame Ping() { return {.type = NGHTTP2_PING, .payload = "12345678"}; }
  static Frame Window(int32_t stream, uint32_t more) {
    return {.type = NGHTTP2_WINDOW_UPDATE, .stream = stream, .payload = Big32(more)};
  }

  // The whole frames that are there now; does not wait.
  std::vector<Frame> Take() {
    char buffer[65536];
    ssize_t got = 0;
    while ((got = recv(fd_, buffer, sizeof(buffer), MSG_DONTWAIT)) > 0) {
      input_.append(buffer, static_cast<size_t>(got));
    }
    ended_ = ended_ || got == 0 || (errno != EAGAIN && errno != EINTR);
    std::vector<Frame> frames;
    constexpr size_t kHead = 9;
    size_t at = 0;
    while (input_.size() - at >= kHead) {
      const std::string_view head = std::string_view(input_).substr(at, kHead);
      const size_t bytes = Read32(head) >> 8;
      if (input_.size() - at < kHead + bytes) break;
      frames.push_back({.type = static_cast<uint8_t>(head[3]),
                        .flags = static_cast<uint8_t>(head[4]),
                        .stream = static_cast<int32_t>(Read32(head.substr(5)) & 0x7fffffff),
                        .payload = input_.substr(at + kHead, bytes)});
      at += kHead + bytes;
    }
    input_.erase(0, at);
    return frames;
  }
  // The server has closed the connection; after a Take.
  bool ended() const { return ended_; }

  // The list of a HEADERS frame; each once, in the order of the frames.
  Fields Decode(const Frame& frame) {
    Fields fields;
    const auto* in = reinterpret_cast<const uint8_t*>(frame.payload.data());
    size_t left = frame.payload.size();
    while (true) {
      nghttp2_nv field = {};
      int flags = 0;
      const ssize_t used = nghttp2_hd_inflate_hd2(inflater_, &field, &flags, in, left, 1);
      if (used < 0) break;
      in += used;
      left -= static_cast<size_t>(used);
      if ((flags & NGHTTP2_HD_INFLATE_EMIT) != 0) {
        fields.emplace_back(
            std::string(reinterpret_cast<const char*>(field.name), field.namelen),
            std::string(reinterpret_cast<const char*>(field.value), field.valuelen));
      }
      if ((flags & NGHTTP2_HD_INFLATE_FINAL) != 0) break;
    }
    nghttp2_hd_inflate_end_headers(inflater_);
    return fields;
  }

 private:
  int fd_;
  nghttp2_hd_deflater* deflater_ = nullptr;
  nghttp2_hd_inflater* inflater_ = nullptr;
  std::string input_;
  bool ended_ = false;
};

}  // namespace logitd::http2::testing

#endif  // LOGITD_TESTS_HTTP2_RAW_CLIENT_H_
