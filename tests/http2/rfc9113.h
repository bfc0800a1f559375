// RFC 9113 as rows: frames that break or use a rule, and what must come back.
#ifndef LOGITD_TESTS_HTTP2_RFC9113_H_
#define LOGITD_TESTS_HTTP2_RFC9113_H_

#include <gtest/gtest.h>

#include <functional>
#include <optional>
#include <ostream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/http2/one_connection.h"

namespace logitd::http2::testing {

// The stream that frames are about, and one that no row uses.
inline constexpr int32_t kStream = 1;
inline constexpr int32_t kNext = 101;

inline constexpr char kMagic[] = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

// A connection and what comes back on it.
class Peer : public OneConnection {
 public:
  explicit Peer(uint32_t max_streams = 2048) {
    limits_.max_streams = max_streams;
    Connect();
  }

  // ---- what it sends
  void Begin() {
    client_->Begin();
    Run();
  }
  void Send(std::string_view bytes) {
    client_->Send(bytes);
    Run();
  }
  void Send(const Frame& frame) { Send(Encoded(frame)); }
  Frame Headers(const Fields& fields, bool ends = true, int32_t stream = kStream) {
    return client_->Headers(stream, fields, ends);
  }
  void SendHeaders(const Fields& fields, bool ends = true, int32_t stream = kStream) {
    Send(Headers(fields, ends, stream));
  }
  // A call whose request is open, or whole, and that is not answered.
  void Hold(bool ends = false) { SendHeaders(Request("/hold"), ends); }
  void Call(int32_t stream = kStream) { SendHeaders(Request("/echo"), true, stream); }
  // A frame in whose head `length` stands.
  void SendHead(uint32_t length, uint8_t type, uint8_t flags, int32_t stream) {
    std::string head = Big32(length).substr(1);
    head += static_cast<char>(type);
    head += static_cast<char>(flags);
    Send(head + Big32(static_cast<uint32_t>(stream)));
  }

  // ---- what came back
  const std::vector<Frame>& frames() const { return frames_; }
  std::optional<uint32_t> CodeOf(uint8_t type, int32_t stream) const {
    for (const Frame& frame : frames_) {
      if (frame.type != type || frame.stream != stream) continue;
      return Read32(std::string_view(frame.payload).substr(type == NGHTTP2_GOAWAY ? 4 : 0));
    }
    return std::nullopt;
  }
  bool Answered(int32_t stream) const {
    for (const Frame& frame : frames_) {
      if (frame.stream == stream && frame.type <= NGHTTP2_HEADERS && frame.ends_stream())
        return true;
    }
    return false;
  }
  std::string BodyOf(int32_t stream) const {
    std::string body;
    for (const Frame& frame : frames_) {
      if (frame.stream == stream && frame.type == NGHTTP2_DATA) body += frame.payload;
    }
    return body;
  }
  uint64_t WindowOf(int32_t stream) const {
    uint64_t sum = 0;
    for (const Frame& frame : frames_) {
      if (frame.type == NGHTTP2_WINDOW_UPDATE && frame.stream == stream)
        sum += Read32(frame.payload);
    }
    return sum;
  }
  int requests() const { return static_cast<int>(echoes_.size()); }
  bool closed() const { return cut_.has_value(); }
  std::optional<Cut> cut() const { return cut_; }
  Echo* last() const { return echoes_.empty() ? nullptr : echoes_.back().get(); }
  using OneConnection::Run;
};

// ---- the table

enum class Ends : uint8_t { kNothing, kStream, kConnection };

// The answer that a row demands. Section 5.4.1 lets a server end the connection where a stream's
// end would do.
struct Outcome {
  Ends ends;
  uint32_t code = 0;
};
inline constexpr Outcome kGoesOn = {Ends::kNothing};
inline constexpr Outcome Reset(uint32_t code) { return {Ends::kStream, code}; }
inline constexpr Outcome GoAway(uint32_t code) { return {Ends::kConnection, code}; }
// The request does not reach the layer above.
inline constexpr Outcome kMalformed = Reset(NGHTTP2_PROTOCOL_ERROR);
inline constexpr Outcome kProtocol = GoAway(NGHTTP2_PROTOCOL_ERROR);
inline constexpr Outcome kFrameSize = GoAway(NGHTTP2_FRAME_SIZE_ERROR);
inline constexpr Outcome kCompression = GoAway(NGHTTP2_COMPRESSION_ERROR);

struct Row {
  const char* section;
  const char* claim;
  std::function<void(Peer&)> send;  // after the connection's beginning
  Outcome outcome;
};
inline std::ostream& operator<<(std::ostream& out, const Row& row) {
  return out << row.section << " " << row.claim;
}

inline Frame Settings(uint16_t id, uint32_t value) {
  std::string payload = {static_cast<char>(id >> 8), static_cast<char>(id)};
  return {.type = NGHTTP2_SETTINGS, .payload = payload + Big32(value)};
}
inline Frame Of(uint8_t type, int32_t stream, std::string payload, uint8_t flags = 0) {
  return {.type = type, .flags = flags, .stream = stream, .payload = std::move(payload)};
}
inline Fields With(std::pair<std::string, std::string> field) {
  Fields fields = Request("/echo");
  fields.push_back(std::move(field));
  return fields;
}
inline Fields Without(const std::string& name) {
  Fields fields;
  for (const auto& field : Request("/echo")) {
    if (field.first != name) fields.push_back(field);
  }
  return fields;
}
// A request whose list is as given.
inline std::function<void(Peer&)> Asks(Fields fields) {
  return [fields = std::move(fields)](Peer& peer) { peer.SendHeaders(fields); };
}
inline std::function<void(Peer&)> Sends(Frame frame) {
  return [frame = std::move(frame)](Peer& peer) { peer.Send(frame); };
}
// A frame on a stream whose request is open.
inline std::function<void(Peer&)> SendsToOpen(Frame frame) {
  return [frame = std::move(frame)](Peer& peer) {
    peer.Hold();
    peer.Send(frame);
  };
}
// A frame on a stream whose request has ended and whose response has not.
inline std::function<void(Peer&)> SendsToHalfClosed(Frame frame) {
  return [frame = std::move(frame)](Peer& peer) {
    peer.Hold(/*ends=*/true);
    peer.Send(frame);
  };
}
// A frame on a stream that is answered.
inline std::function<void(Peer&)> SendsToClosed(Frame frame) {
  return [frame = std::move(frame)](Peer& peer) {
    peer.Call();
    peer.Send(frame);
  };
}
// A frame between HEADERS and what is left of its field block.
inline std::function<void(Peer&)> SendsInsideBlock(Frame inside) {
  return [inside = std::move(inside)](Peer& peer) {
    Frame headers = peer.Headers(Request("/echo"));
    headers.flags = NGHTTP2_FLAG_END_STREAM;
    Frame rest =
        Of(NGHTTP2_CONTINUATION, kStream, headers.payload.substr(3), NGHTTP2_FLAG_END_HEADERS);
    headers.payload.resize(3);
    peer.Send(headers);
    peer.Send(inside);
    peer.Send(rest);
  };
}
inline std::function<void(Peer&)> SendsBody(Fields fields, std::vector<std::string> parts) {
  return [fields = std::move(fields), parts = std::move(parts)](Peer& peer) {
    peer.SendHeaders(fields, /*ends=*/false);
    for (size_t i = 0; i < parts.size(); ++i) {
      peer.Send(RawClient::Data(kStream, parts[i], i + 1 == parts.size()));
    }
  };
}
inline std::function<void(Peer&)> SendsTrailers(Fields trailers, bool ends = true) {
  return [trailers = std::move(trailers), ends](Peer& peer) {
    peer.Hold();
    peer.Send(RawClient::Data(kStream, "body"));
    peer.SendHeaders(trailers, ends);
  };
}

inline constexpr uint8_t kUnknownType = 0xbe;
inline const std::string kNoIncrement(4, '\0');
inline const std::string kPriority("\0\0\0\0\x10", 5);

inline void CheckRow(const Row& row) {
  Peer peer;
  peer.Begin();
  ASSERT_FALSE(peer.closed());
  row.send(peer);
  const std::optional<uint32_t> goaway = peer.CodeOf(NGHTTP2_GOAWAY, 0);
  if (row.outcome.ends == Ends::kConnection) {
    EXPECT_EQ(goaway, row.outcome.code);
    EXPECT_EQ(peer.cut(), Cut::kProtocol);
    EXPECT_EQ(peer.CodeOf(NGHTTP2_RST_STREAM, kStream), std::nullopt);
    return;
  }
  EXPECT_EQ(goaway, std::nullopt);
  std::optional<uint32_t> reset;
  if (row.outcome.ends == Ends::kStream) reset = row.outcome.code;
  EXPECT_EQ(peer.CodeOf(NGHTTP2_RST_STREAM, kStream), reset);
  if (row.outcome.ends == Ends::kStream) {
    EXPECT_FALSE(peer.Answered(kStream));
  }
  peer.Call(kNext);
  EXPECT_TRUE(peer.Answered(kNext)) << "other streams go on";
}

inline std::string NameOfRow(const ::testing::TestParamInfo<Row>& info) {
  return absl::StrCat("section_", info.param.section, "_", info.param.claim);
}

}  // namespace logitd::http2::testing

#endif  // LOGITD_TESTS_HTTP2_RFC9113_H_
