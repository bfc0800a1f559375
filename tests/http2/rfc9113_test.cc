// RFC 9113: for every MUST of a server that a peer can see, the frames that break or use it and what comes
// back. One connection over a socket pair; the test's thread runs its loop.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/http2/connection.h"
#include "tests/http2/echo.h"
#include "tests/http2/raw_client.h"

namespace logitd::http2 {
namespace {

using testing::Big32;
using testing::Echo;
using testing::Fields;
using testing::Frame;
using testing::RawClient;
using testing::Read32;
using testing::Request;

// The stream that frames are about, and one that no row uses.
constexpr int32_t kStream = 1;
constexpr int32_t kNext = 101;

constexpr char kMagic[] = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

int64_t now_ns = 1'000'000'000;
int64_t TestClock() { return now_ns; }

class Silent final : public Echo {
 public:
  using Echo::Echo;
  void OnEnd() override {}
};

// A connection and what comes back on it.
class Peer : public ConnectionHost {
 public:
  explicit Peer(uint32_t max_streams = 2048) {
    limits_.max_streams = max_streams;
    int fds[2];
    EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds), 0);
    for (const int fd : fds) {
      const int large = 4 << 20;
      setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &large, sizeof(large));
    }
    EXPECT_EQ(fcntl(fds[0], F_SETFL, O_NONBLOCK), 0);
    client_ = std::make_unique<RawClient>(fds[1]);
    connection_ = std::make_shared<Connection>(&loop_, this, &held_, limits_, times_, fds[0],
                                               PeerInfo{.id = 1, .name = "test"}, nullptr);
    connection_->Start();
  }
  ~Peer() override {
    connection_->Close();
    loop_.Turn(/*wait=*/false);
    EXPECT_EQ(total_, 0) << "bytes held without a connection";
  }

  std::shared_ptr<StreamEvents> OnStream(Stream* stream) override {
    ++requests_;
    const bool silent = stream->headers().Find(":path") == "/hold";
    last_ = silent ? std::make_shared<Silent>(stream) : std::make_shared<Echo>(stream);
    return last_;
  }
  void OnConnectionClosed(Connection*, Cut) override { closed_ = true; }

  // ---- what it sends
  void Begin() {
    client_->Begin();
    Run();
  }
  void Send(std::string_view bytes) {
    client_->Send(bytes);
    Run();
  }
  void Send(const Frame& frame) { Send(testing::Encoded(frame)); }
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
  int requests() const { return requests_; }
  bool closed() const { return closed_; }
  Echo* last() const { return last_.get(); }

  // Turns until nothing moves.
  void Run() {
    int64_t before = -1;
    const Account& account = connection_->account();
    while (account.received + account.sent != before) {
      before = account.received + account.sent;
      for (int i = 0; i < 3; ++i) loop_.Turn(/*wait=*/false);
      for (Frame& frame : client_->Take()) frames_.push_back(std::move(frame));
    }
  }

 private:
  Limits limits_;
  Times times_ = {.keepalive = absl::InfiniteDuration()};
  std::atomic<int64_t> total_ = 0;
  Held held_{&total_, int64_t{64} << 20};
  Loop loop_{0, &TestClock};
  std::unique_ptr<RawClient> client_;
  std::shared_ptr<Connection> connection_;
  std::shared_ptr<Echo> last_;
  std::vector<Frame> frames_;
  int requests_ = 0;
  bool closed_ = false;
};

// ---- the table

enum class Ends : uint8_t { kNothing, kStream, kConnection };

// What must come back. Section 5.4.1 lets a server end the connection where a stream's end would do.
struct Outcome {
  Ends ends;
  uint32_t code = 0;
};
constexpr Outcome kGoesOn = {Ends::kNothing};
constexpr Outcome Reset(uint32_t code) { return {Ends::kStream, code}; }
constexpr Outcome GoAway(uint32_t code) { return {Ends::kConnection, code}; }
// The request does not reach the layer above.
constexpr Outcome kMalformed = Reset(NGHTTP2_PROTOCOL_ERROR);
constexpr Outcome kProtocol = GoAway(NGHTTP2_PROTOCOL_ERROR);
constexpr Outcome kFrameSize = GoAway(NGHTTP2_FRAME_SIZE_ERROR);
constexpr Outcome kCompression = GoAway(NGHTTP2_COMPRESSION_ERROR);

struct Row {
  const char* section;
  const char* claim;
  std::function<void(Peer&)> send;  // after the connection's beginning
  Outcome outcome;
};
std::ostream& operator<<(std::ostream& out, const Row& row) {
  return out << row.section << " " << row.claim;
}

Frame Settings(uint16_t id, uint32_t value) {
  std::string payload = {static_cast<char>(id >> 8), static_cast<char>(id)};
  return {.type = NGHTTP2_SETTINGS, .payload = payload + Big32(value)};
}
Frame Of(uint8_t type, int32_t stream, std::string payload, uint8_t flags = 0) {
  return {.type = type, .flags = flags, .stream = stream, .payload = std::move(payload)};
}
Fields With(std::pair<std::string, std::string> field) {
  Fields fields = Request("/echo");
  fields.push_back(std::move(field));
  return fields;
}
Fields Without(const std::string& name) {
  Fields fields;
  for (const auto& field : Request("/echo")) {
    if (field.first != name) fields.push_back(field);
  }
  return fields;
}
// A request whose list is as given.
std::function<void(Peer&)> Asks(Fields fields) {
  return [fields = std::move(fields)](Peer& peer) { peer.SendHeaders(fields); };
}
std::function<void(Peer&)> Sends(Frame frame) {
  return [frame = std::move(frame)](Peer& peer) { peer.Send(frame); };
}
// A frame on a stream whose request is open.
std::function<void(Peer&)> SendsToOpen(Frame frame) {
  return [frame = std::move(frame)](Peer& peer) {
    peer.Hold();
    peer.Send(frame);
  };
}
// A frame on a stream whose request has ended and whose response has not.
std::function<void(Peer&)> SendsToHalfClosed(Frame frame) {
  return [frame = std::move(frame)](Peer& peer) {
    peer.Hold(/*ends=*/true);
    peer.Send(frame);
  };
}
// A frame on a stream that is answered.
std::function<void(Peer&)> SendsToClosed(Frame frame) {
  return [frame = std::move(frame)](Peer& peer) {
    peer.Call();
    peer.Send(frame);
  };
}
// A frame between HEADERS and what is left of its field block.
std::function<void(Peer&)> SendsInsideBlock(Frame inside) {
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
std::function<void(Peer&)> SendsBody(Fields fields, std::vector<std::string> parts) {
  return [fields = std::move(fields), parts = std::move(parts)](Peer& peer) {
    peer.SendHeaders(fields, /*ends=*/false);
    for (size_t i = 0; i < parts.size(); ++i) {
      peer.Send(RawClient::Data(kStream, parts[i], i + 1 == parts.size()));
    }
  };
}
std::function<void(Peer&)> SendsTrailers(Fields trailers, bool ends = true) {
  return [trailers = std::move(trailers), ends](Peer& peer) {
    peer.Hold();
    peer.Send(RawClient::Data(kStream, "body"));
    peer.SendHeaders(trailers, ends);
  };
}

constexpr uint8_t kUnknownType = 0xbe;
const std::string kNoIncrement(4, '\0');
const std::string kPriority("\0\0\0\0\x10", 5);

const Row kRows[] = {
    {"4_1", "unknown_type_is_ignored", Sends(Of(kUnknownType, 0, "anything")), kGoesOn},
    {"4_1", "unknown_type_on_an_idle_stream_is_ignored", Sends(Of(kUnknownType, 7, "any")), kGoesOn},
    {"4_1", "undefined_flags_are_ignored", Sends(Of(NGHTTP2_PING, 0, "12345678", 0xf6)), kGoesOn},
    {"4_1", "reserved_bit_of_the_stream_is_ignored",
     [](Peer& peer) {
       Frame headers = peer.Headers(Request("/echo"));
       headers.stream |= INT32_MIN;
       peer.Send(headers);
       EXPECT_TRUE(peer.Answered(kStream));
     },
     kGoesOn},
    {"4_2", "largest_frame_is_taken", Sends(Of(kUnknownType, 0, std::string(1 << 20, 'x'))), kGoesOn},
    {"4_2", "larger_headers_are_refused",
     [](Peer& peer) { peer.SendHead((1 << 20) + 1, NGHTTP2_HEADERS, NGHTTP2_FLAG_END_HEADERS, 1); },
     kFrameSize},
    {"4_2", "larger_data_is_refused",
     [](Peer& peer) {
       peer.Hold();
       peer.SendHead((1 << 20) + 1, NGHTTP2_DATA, 0, kStream);
     },
     kFrameSize},
    {"4_2", "larger_unknown_frame_is_refused",
     [](Peer& peer) { peer.SendHead((1 << 20) + 1, kUnknownType, 0, 0); }, kFrameSize},
    {"4_3", "index_0_is_a_compression_error", Sends(Of(NGHTTP2_HEADERS, 1, "\x80", 5)), kCompression},
    {"4_3", "index_beyond_the_table_is_a_compression_error",
     Sends(Of(NGHTTP2_HEADERS, 1, "\xff\x80\x10", 5)), kCompression},
    {"4_3", "table_larger_than_its_setting_is_a_compression_error",
     Sends(Of(NGHTTP2_HEADERS, 1, "\x3f\xe2\x1f", 5)), kCompression},
    {"4_3", "size_update_after_a_field_is_a_compression_error",
     Sends(Of(NGHTTP2_HEADERS, 1, "\x83\x20", 5)), kCompression},
    {"4_3", "field_cut_at_the_block_end_is_a_compression_error",
     Sends(Of(NGHTTP2_HEADERS, 1, std::string("\x83\0\x05nam", 6), 5)), kCompression},
    {"4_3", "malformed_huffman_is_a_compression_error",
     Sends(Of(NGHTTP2_HEADERS, 1, std::string("\x83\0\x84\xff\xff\xff\xff\x01x", 9), 5)), kCompression},
    {"4_3", "block_in_pieces_is_one_list",
     [](Peer& peer) {
       Frame headers = peer.Headers(Request("/echo"));
       const std::string block = std::exchange(headers.payload, "");
       headers.flags = NGHTTP2_FLAG_END_STREAM;
       peer.Send(headers);
       for (const char byte : block.substr(0, 5)) {
         peer.Send(Of(NGHTTP2_CONTINUATION, kStream, std::string(1, byte)));
       }
       peer.Send(Of(NGHTTP2_CONTINUATION, kStream, block.substr(5), NGHTTP2_FLAG_END_HEADERS));
       EXPECT_TRUE(peer.Answered(kStream));
     },
     kGoesOn},
    {"4_3", "data_inside_a_block_is_refused", SendsInsideBlock(RawClient::Data(1, "x")), kProtocol},
    {"4_3", "ping_inside_a_block_is_refused", SendsInsideBlock(RawClient::Ping()), kProtocol},
    {"4_3", "headers_inside_a_block_are_refused",
     SendsInsideBlock(Of(NGHTTP2_HEADERS, 3, "\x83", 5)), kProtocol},
    {"4_3", "other_streams_continuation_inside_a_block_is_refused",
     SendsInsideBlock(Of(NGHTTP2_CONTINUATION, 3, "\x83", NGHTTP2_FLAG_END_HEADERS)), kProtocol},
    {"5_5", "unknown_frame_inside_a_block_is_refused", SendsInsideBlock(Of(kUnknownType, 0, "x")),
     kProtocol},

    {"5_1", "data_on_an_idle_stream_is_refused", Sends(RawClient::Data(1, "x")), kProtocol},
    // Not as section 6.4 has it: see frame_heads.h.
    {"5_1", "reset_of_an_idle_stream_is_left_out", Sends(RawClient::Reset(1)), kGoesOn},
    {"5_1", "window_of_an_idle_stream_is_refused", Sends(RawClient::Window(1, 1)), kProtocol},
    {"5_1", "continuation_on_an_idle_stream_is_refused",
     Sends(Of(NGHTTP2_CONTINUATION, 1, "\x83", NGHTTP2_FLAG_END_HEADERS)), kProtocol},
    {"5_1", "priority_of_an_idle_stream_is_taken", Sends(Of(NGHTTP2_PRIORITY, 1, kPriority)), kGoesOn},
    {"5_1", "data_after_the_requests_end_is_refused", SendsToHalfClosed(RawClient::Data(1, "x")),
     GoAway(NGHTTP2_STREAM_CLOSED)},
    {"5_1", "headers_after_the_requests_end_are_refused",
     [](Peer& peer) {
       peer.Hold(/*ends=*/true);
       peer.SendHeaders({{"late", "trailer"}});
     },
     GoAway(NGHTTP2_STREAM_CLOSED)},
    {"5_1", "window_after_the_requests_end_is_taken", SendsToHalfClosed(RawClient::Window(1, 1)),
     kGoesOn},
    {"5_1", "priority_after_the_requests_end_is_taken",
     SendsToHalfClosed(Of(NGHTTP2_PRIORITY, 1, kPriority)), kGoesOn},
    {"5_1", "reset_after_the_requests_end_is_taken", SendsToHalfClosed(RawClient::Reset(1)), kGoesOn},
    {"5_1", "window_of_a_closed_stream_is_ignored", SendsToClosed(RawClient::Window(1, 1)), kGoesOn},
    {"5_1", "reset_of_a_closed_stream_is_ignored", SendsToClosed(RawClient::Reset(1)), kGoesOn},
    {"5_1", "priority_of_a_closed_stream_is_taken",
     SendsToClosed(Of(NGHTTP2_PRIORITY, 1, kPriority)), kGoesOn},
    {"5_1", "data_of_a_closed_stream_is_ignored", SendsToClosed(RawClient::Data(1, "x")), kGoesOn},
    {"5_1", "headers_of_a_closed_stream_are_no_request",
     [](Peer& peer) {
       peer.Call();
       peer.Call();
       EXPECT_EQ(peer.requests(), 1);
     },
     kGoesOn},
    {"5_1", "data_that_crosses_this_servers_reset_is_ignored",
     [](Peer& peer) {
       peer.Hold();
       peer.last()->stream()->Reset(NGHTTP2_CANCEL);
       peer.Run();
       peer.Send(RawClient::Data(kStream, "on its way"));
       peer.SendHeaders({{"also", "on its way"}});
     },
     Reset(NGHTTP2_CANCEL)},
    {"5_1_1", "even_stream_is_refused",
     [](Peer& peer) { peer.SendHeaders(Request("/echo"), true, 2); }, kProtocol},
    {"5_1_1", "skipped_streams_are_no_error", [](Peer& peer) { peer.Call(77); }, kGoesOn},
    {"5_1_1", "lower_stream_that_was_skipped_is_refused",
     [](Peer& peer) {
       peer.Call(3);
       peer.Call(9);
       peer.Call(7);
     },
     kProtocol},
    {"5_3_1", "stream_that_depends_on_itself_harms_no_other",
     Sends(Of(NGHTTP2_PRIORITY, 1, std::string("\0\0\0\1\x10", 5))), kGoesOn},

    {"6_1", "data_on_stream_0_is_refused", Sends(RawClient::Data(0, "x")), kProtocol},
    {"6_1", "padding_as_long_as_the_payload_is_refused",
     SendsToOpen(Of(NGHTTP2_DATA, 1, "\5four", NGHTTP2_FLAG_PADDED)), kProtocol},
    {"6_1", "padding_is_no_part_of_the_body",
     [](Peer& peer) {
       peer.SendHeaders(Request("/echo"), /*ends=*/false);
       peer.Send(Of(NGHTTP2_DATA, 1, std::string("\3hello\0\0\0", 9), NGHTTP2_FLAG_PADDED));
       peer.Send(Of(NGHTTP2_DATA, 1, std::string("\2\0\0", 3),
                    NGHTTP2_FLAG_PADDED | NGHTTP2_FLAG_END_STREAM));
       EXPECT_EQ(peer.BodyOf(kStream), "hello");
     },
     kGoesOn},
    {"6_2", "headers_on_stream_0_are_refused", Sends(Of(NGHTTP2_HEADERS, 0, "\x83", 5)), kProtocol},
    {"6_2", "padding_longer_than_the_payload_is_refused",
     Sends(Of(NGHTTP2_HEADERS, 1, "\x09\x83", NGHTTP2_FLAG_END_HEADERS | NGHTTP2_FLAG_PADDED)),
     kProtocol},
    {"6_2", "padding_and_priority_are_no_part_of_the_block",
     [](Peer& peer) {
       Frame headers = peer.Headers(Request("/echo"));
       headers.payload = '\4' + kPriority + headers.payload + std::string(4, '\0');
       headers.flags |= NGHTTP2_FLAG_PADDED | NGHTTP2_FLAG_PRIORITY;
       peer.Send(headers);
       EXPECT_TRUE(peer.Answered(kStream));
     },
     kGoesOn},
    {"6_2", "headers_too_short_for_their_priority_are_refused",
     Sends(Of(NGHTTP2_HEADERS, 1, "\0\0", NGHTTP2_FLAG_END_HEADERS | NGHTTP2_FLAG_PRIORITY)),
     kFrameSize},
    {"6_3", "priority_on_stream_0_is_refused", Sends(Of(NGHTTP2_PRIORITY, 0, kPriority)), kProtocol},
    {"6_3", "priority_of_4_bytes_is_refused", Sends(Of(NGHTTP2_PRIORITY, 1, "four")), kFrameSize},
    {"6_4", "reset_on_stream_0_is_refused", Sends(RawClient::Reset(0)), kProtocol},
    {"6_4", "reset_of_3_bytes_is_refused", SendsToOpen(Of(NGHTTP2_RST_STREAM, 1, "one")), kFrameSize},
    {"6_5", "settings_on_a_stream_are_refused", Sends(Of(NGHTTP2_SETTINGS, 1, "")), kProtocol},
    {"6_5", "acknowledgement_with_a_payload_is_refused",
     Sends(Of(NGHTTP2_SETTINGS, 0, "123456", NGHTTP2_FLAG_ACK)), kFrameSize},
    {"6_5", "settings_of_5_bytes_are_refused", Sends(Of(NGHTTP2_SETTINGS, 0, "12345")), kFrameSize},
    {"6_5_2", "push_of_2_is_refused", Sends(Settings(NGHTTP2_SETTINGS_ENABLE_PUSH, 2)), kProtocol},
    {"6_5_2", "window_beyond_31_bits_is_refused",
     Sends(Settings(NGHTTP2_SETTINGS_INITIAL_WINDOW_SIZE, 0x80000000)),
     GoAway(NGHTTP2_FLOW_CONTROL_ERROR)},
    {"6_5_2", "frame_size_below_16384_is_refused",
     Sends(Settings(NGHTTP2_SETTINGS_MAX_FRAME_SIZE, 16383)), kProtocol},
    {"6_5_2", "frame_size_beyond_24_bits_is_refused",
     Sends(Settings(NGHTTP2_SETTINGS_MAX_FRAME_SIZE, 1 << 24)), kProtocol},
    {"6_5_2", "unknown_setting_is_ignored", Sends(Settings(0x7e57, 0xffffffff)), kGoesOn},
    {"6_5_3", "settings_are_acknowledged",
     [](Peer& peer) {
       const auto acks = [&peer] {
         int count = 0;
         for (const Frame& frame : peer.frames()) {
           count += frame.type == NGHTTP2_SETTINGS && (frame.flags & NGHTTP2_FLAG_ACK) != 0 ? 1 : 0;
         }
         return count;
       };
       const int before = acks();
       peer.Send(Settings(NGHTTP2_SETTINGS_ENABLE_PUSH, 0));
       EXPECT_EQ(acks(), before + 1);
     },
     kGoesOn},
    {"6_6", "push_promise_is_refused",
     SendsToOpen(Of(NGHTTP2_PUSH_PROMISE, 1, std::string("\0\0\0\2\x83", 5), 4)), kProtocol},
    {"6_7", "ping_on_a_stream_is_refused", Sends(Of(NGHTTP2_PING, 1, "12345678")), kProtocol},
    {"6_7", "ping_of_7_bytes_is_refused", Sends(Of(NGHTTP2_PING, 0, "1234567")), kFrameSize},
    {"6_7", "ping_comes_back_with_its_bytes",
     [](Peer& peer) {
       peer.Send(Of(NGHTTP2_PING, 0, "any eigh"));
       EXPECT_EQ(peer.frames().back().payload, "any eigh");
       EXPECT_EQ(peer.frames().back().flags, NGHTTP2_FLAG_ACK);
     },
     kGoesOn},
    {"6_7", "acknowledged_ping_is_not_answered",
     [](Peer& peer) {
       const size_t before = peer.frames().size();
       peer.Send(Of(NGHTTP2_PING, 0, "12345678", NGHTTP2_FLAG_ACK));
       EXPECT_EQ(peer.frames().size(), before);
     },
     kGoesOn},
    {"6_8", "goaway_on_a_stream_is_refused", Sends(Of(NGHTTP2_GOAWAY, 1, std::string(8, '\0'))),
     kProtocol},
    {"6_8", "goaway_of_7_bytes_is_refused", Sends(Of(NGHTTP2_GOAWAY, 0, std::string(7, '\0'))),
     kFrameSize},
    {"6_9", "window_of_0_of_a_stream_is_refused", SendsToOpen(Of(NGHTTP2_WINDOW_UPDATE, 1, kNoIncrement)), kProtocol},
    {"6_9", "window_of_0_of_the_connection_is_refused",
     Sends(Of(NGHTTP2_WINDOW_UPDATE, 0, kNoIncrement)), kProtocol},
    {"6_9", "window_of_3_bytes_is_refused", SendsToOpen(Of(NGHTTP2_WINDOW_UPDATE, 1, "one")),
     kFrameSize},
    {"6_9_1", "window_of_a_stream_beyond_31_bits_resets_it",
     SendsToOpen(RawClient::Window(1, 0x7fffffff)), Reset(NGHTTP2_FLOW_CONTROL_ERROR)},
    {"6_9_1", "window_of_the_connection_beyond_31_bits_is_refused",
     Sends(RawClient::Window(0, 0x7fffffff)), GoAway(NGHTTP2_FLOW_CONTROL_ERROR)},
    {"6_9_1", "body_beyond_the_window_resets_the_stream",
     SendsToOpen(RawClient::Data(1, std::string(65536, 'x'))), Reset(NGHTTP2_FLOW_CONTROL_ERROR)},
    {"6_9_2", "setting_that_lifts_a_window_beyond_31_bits_is_refused",
     [](Peer& peer) {
       peer.Hold();
       peer.Send(RawClient::Window(kStream, 0x7fffffff - 65535));
       peer.Send(Settings(NGHTTP2_SETTINGS_INITIAL_WINDOW_SIZE, 65536));
     },
     Reset(NGHTTP2_FLOW_CONTROL_ERROR)},
    {"6_10", "continuation_on_stream_0_is_refused",
     Sends(Of(NGHTTP2_CONTINUATION, 0, "\x83", NGHTTP2_FLAG_END_HEADERS)), kProtocol},
    {"6_10", "continuation_of_a_whole_block_is_refused",
     SendsToOpen(Of(NGHTTP2_CONTINUATION, 1, "\x83", NGHTTP2_FLAG_END_HEADERS)), kProtocol},
    {"7", "unknown_error_code_is_a_reset", SendsToOpen(Of(NGHTTP2_RST_STREAM, 1, Big32(0xdead))),
     kGoesOn},

    {"8_1", "trailers_end_a_request",
     [](Peer& peer) {
       peer.SendHeaders(Request("/echo"), /*ends=*/false);
       peer.Send(RawClient::Data(kStream, "body"));
       peer.SendHeaders({{"trailer", "yes"}});
       EXPECT_EQ(peer.BodyOf(kStream), "body");
     },
     kGoesOn},
    {"8_1", "trailers_without_an_end_are_malformed", SendsTrailers({{"trailer", "yes"}}, false),
     kMalformed},
    {"8_1", "trailers_with_a_pseudo_field_are_malformed", SendsTrailers({{":method", "POST"}}),
     kMalformed},
    {"8_1", "trailers_with_a_connection_field_are_malformed",
     SendsTrailers({{"connection", "close"}}), kMalformed},
    {"8_1", "trailers_in_upper_case_are_malformed", SendsTrailers({{"Trailer", "yes"}}), kMalformed},
    {"8_1_1", "body_shorter_than_its_length_is_malformed",
     SendsBody(With({"content-length", "5"}), {"four"}), kMalformed},
    {"8_1_1", "body_longer_than_its_length_is_malformed",
     SendsBody(With({"content-length", "5"}), {"four", "more"}), kMalformed},
    {"8_1_1", "no_body_of_a_length_is_malformed", Asks(With({"content-length", "5"})), kMalformed},
    {"8_1_1", "length_that_is_no_number_is_malformed", Asks(With({"content-length", "0x0"})),
     kMalformed},
    {"8_1_1", "body_of_its_length_is_taken",
     [](Peer& peer) {
       SendsBody(With({"content-length", "8"}), {"four", "more"})(peer);
       EXPECT_EQ(peer.BodyOf(kStream), "fourmore");
     },
     kGoesOn},
    {"8_1_1", "two_lengths_are_malformed",
     [](Peer& peer) {
       Fields fields = With({"content-length", "4"});
       fields.emplace_back("content-length", "5");
       SendsBody(fields, {"four"})(peer);
     },
     kMalformed},
    {"8_2", "name_in_upper_case_is_malformed", Asks(With({"Name", "value"})), kMalformed},
    {"8_2_1", "name_with_a_space_is_malformed", Asks(With({"a name", "value"})), kMalformed},
    {"8_2_1", "name_with_a_colon_is_malformed", Asks(With({"a:name", "value"})), kMalformed},
    {"8_2_1", "name_with_a_control_byte_is_malformed", Asks(With({"a\x01name", "value"})), kMalformed},
    {"8_2_1", "name_beyond_ascii_is_malformed", Asks(With({"n\xc3\xa4me", "value"})), kMalformed},
    {"8_2_1", "value_with_a_zero_byte_is_malformed",
     Asks(With({"name", std::string("a\0b", 3)})), kMalformed},
    {"8_2_1", "value_with_a_line_end_is_malformed", Asks(With({"name", "a\nb"})), kMalformed},
    {"8_2_1", "value_with_a_carriage_return_is_malformed", Asks(With({"name", "a\rb"})), kMalformed},
    {"8_2_1", "value_that_begins_with_a_space_is_malformed", Asks(With({"name", " a"})), kMalformed},
    {"8_2_1", "value_that_ends_with_a_tab_is_malformed", Asks(With({"name", "a\t"})), kMalformed},
    {"8_2_2", "connection_is_malformed", Asks(With({"connection", "close"})), kMalformed},
    {"8_2_2", "proxy_connection_is_malformed", Asks(With({"proxy-connection", "close"})), kMalformed},
    {"8_2_2", "keep_alive_is_malformed", Asks(With({"keep-alive", "timeout=5"})), kMalformed},
    {"8_2_2", "transfer_encoding_is_malformed", Asks(With({"transfer-encoding", "chunked"})),
     kMalformed},
    {"8_2_2", "upgrade_is_malformed", Asks(With({"upgrade", "h2c"})), kMalformed},
    {"8_2_2", "te_other_than_trailers_is_malformed", Asks(With({"te", "gzip"})), kMalformed},
    {"8_2_2", "te_trailers_is_taken", Asks(With({"te", "trailers"})), kGoesOn},
    {"8_3", "pseudo_field_after_a_field_is_malformed",
     [](Peer& peer) {
       Fields fields = Without(":path");
       fields.emplace_back("name", "value");
       fields.emplace_back(":path", "/echo");
       peer.SendHeaders(fields);
     },
     kMalformed},
    {"8_3", "unknown_pseudo_field_is_malformed", Asks(With({":color", "red"})), kMalformed},
    {"8_3", "status_of_a_request_is_malformed", Asks(With({":status", "200"})), kMalformed},
    {"8_3_1", "two_methods_are_malformed", Asks(With({":method", "POST"})), kMalformed},
    {"8_3_1", "two_schemes_are_malformed", Asks(With({":scheme", "http"})), kMalformed},
    {"8_3_1", "two_paths_are_malformed", Asks(With({":path", "/echo"})), kMalformed},
    {"8_3_1", "two_authorities_are_malformed", Asks(With({":authority", "test"})), kMalformed},
    {"8_3_1", "no_method_is_malformed", Asks(Without(":method")), kMalformed},
    {"8_3_1", "no_scheme_is_malformed", Asks(Without(":scheme")), kMalformed},
    {"8_3_1", "no_path_is_malformed", Asks(Without(":path")), kMalformed},
    {"8_3_1", "empty_path_is_malformed", Asks(Request("")), kMalformed},
    {"8_3_1", "path_without_a_slash_is_malformed", Asks(Request("echo")), kMalformed},
    {"8_3_1", "asterisk_of_another_method_than_options_is_malformed", Asks(Request("*")), kMalformed},
    {"8_3_1", "protocol_without_its_setting_is_malformed", Asks(With({":protocol", "websocket"})),
     kMalformed},
    {"8_5", "connect_with_a_scheme_and_a_path_is_malformed",
     Asks({{":method", "CONNECT"}, {":scheme", "http"}, {":path", "/"}, {":authority", "a:1"}}),
     kMalformed},
    {"8_5", "connect_without_an_authority_is_malformed", Asks({{":method", "CONNECT"}}), kMalformed},
    {"8_5", "connect_is_a_request_like_others",
     Asks({{":method", "CONNECT"}, {":authority", "a:1"}}), kGoesOn},
};

class Rfc9113Test : public ::testing::TestWithParam<Row> {};

TEST_P(Rfc9113Test, Holds) {
  const Row& row = GetParam();
  Peer peer;
  peer.Begin();
  ASSERT_FALSE(peer.closed());
  row.send(peer);
  const std::optional<uint32_t> goaway = peer.CodeOf(NGHTTP2_GOAWAY, 0);
  if (row.outcome.ends == Ends::kConnection) {
    EXPECT_EQ(goaway, row.outcome.code);
    EXPECT_TRUE(peer.closed());
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

INSTANTIATE_TEST_SUITE_P(Table, Rfc9113Test, ::testing::ValuesIn(kRows), [](const auto& info) {
  return absl::StrCat("section_", info.param.section, "_", info.param.claim);
});

// ---- what takes more than frames and an outcome

// The malformed lists do not reach the layer above.
TEST(Rfc9113, MalformedListsAreNoRequests) {
  for (const Fields& fields :
       {With({"Name", "value"}), With({"connection", "close"}), Without(":path"),
        With({"content-length", "5"}), With({":status", "200"})}) {
    Peer peer;
    peer.Begin();
    peer.SendHeaders(fields);
    EXPECT_EQ(peer.requests(), 0) << fields.back().first;
  }
}

TEST(Rfc9113, Section3_4_TheServersSettingsComeFirst) {
  Peer peer;
  peer.Run();
  ASSERT_FALSE(peer.frames().empty());
  EXPECT_EQ(peer.frames()[0].type, NGHTTP2_SETTINGS);
  EXPECT_EQ(peer.frames()[0].flags, NGHTTP2_FLAG_NONE);
}

TEST(Rfc9113, Section3_4_OtherBytesThanThePrefaceEndTheConnection) {
  for (const std::string first :
       {"GET / HTTP/1.1\r\nhost: test\r\n\r\n", "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\r"}) {
    Peer peer;
    peer.Send(first);
    EXPECT_TRUE(peer.closed()) << first;
    EXPECT_EQ(peer.requests(), 0);
  }
}

TEST(Rfc9113, Section3_4_AnotherFrameThanSettingsAfterThePrefaceEndsTheConnection) {
  for (const Frame& first : {RawClient::Ping(), Of(NGHTTP2_HEADERS, 1, "\x83", 5),
                             Of(NGHTTP2_SETTINGS, 0, "", NGHTTP2_FLAG_ACK)}) {
    Peer peer;
    peer.Send(kMagic + testing::Encoded(first));
    EXPECT_EQ(peer.CodeOf(NGHTTP2_GOAWAY, 0), uint32_t{NGHTTP2_PROTOCOL_ERROR}) << int{first.type};
    EXPECT_TRUE(peer.closed());
  }
}

TEST(Rfc9113, Section3_4_ThePrefaceMayComeInBytes) {
  Peer peer;
  const std::string bytes = kMagic + testing::Encoded({.type = NGHTTP2_SETTINGS});
  for (const char byte : bytes) peer.Send(std::string(1, byte));
  peer.Call();
  EXPECT_TRUE(peer.Answered(kStream));
}

// A client that has not read the setting yet may try again elsewhere; one that has breaks the protocol.
TEST(Rfc9113, Section5_1_2_StreamsBeyondTheSettingAreRefused) {
  Peer early(/*max_streams=*/2);
  early.Send(kMagic + testing::Encoded({.type = NGHTTP2_SETTINGS}));
  for (const int32_t stream : {1, 3, 5}) early.SendHeaders(Request("/hold"), true, stream);
  EXPECT_EQ(early.CodeOf(NGHTTP2_RST_STREAM, 5), uint32_t{NGHTTP2_REFUSED_STREAM});
  EXPECT_EQ(early.requests(), 2);
  early.last()->Answer();
  early.Run();
  EXPECT_TRUE(early.Answered(3));
  early.Call(7);
  EXPECT_TRUE(early.Answered(7));

  Peer late(/*max_streams=*/2);
  late.Begin();
  for (const int32_t stream : {1, 3, 5}) late.SendHeaders(Request("/hold"), true, stream);
  EXPECT_EQ(late.CodeOf(NGHTTP2_GOAWAY, 0), uint32_t{NGHTTP2_PROTOCOL_ERROR});
  EXPECT_EQ(late.requests(), 2);
}

TEST(Rfc9113, Section5_4_1_GoAwayNamesTheLastStreamThatWasTaken) {
  Peer peer;
  peer.Begin();
  peer.Call(1);
  peer.Call(9);
  peer.Send(RawClient::Data(0, "x"));
  ASSERT_EQ(peer.frames().back().type, NGHTTP2_GOAWAY);
  EXPECT_EQ(Read32(peer.frames().back().payload), 9u);
}

TEST(Rfc9113, Section6_1_PaddingTakesOfTheWindowsAndIsGivenBack) {
  Peer peer;
  peer.Begin();
  peer.Hold();
  const uint64_t before = peer.WindowOf(0);
  const std::string padded = "\xffx" + std::string(255, '\0');
  constexpr int kFrames = 250;  // 64250 bytes, of which 250 are body
  for (int i = 0; i < kFrames; ++i) peer.Send(Of(NGHTTP2_DATA, 1, padded, NGHTTP2_FLAG_PADDED));
  EXPECT_GE(peer.WindowOf(kStream), 32768u);
  EXPECT_LT(peer.WindowOf(kStream), 256u * kFrames);
  peer.Send(Of(NGHTTP2_DATA, 1, padded, NGHTTP2_FLAG_PADDED | NGHTTP2_FLAG_END_STREAM));
  EXPECT_EQ(peer.last()->body(), std::string(kFrames + 1, 'x'));
  EXPECT_EQ(peer.WindowOf(0), before) << "the connection's window is far from used";
}

TEST(Rfc9113, Section6_5_2_FramesAreNoLargerThanThePeerTakes) {
  Peer peer;
  peer.Begin();
  peer.SendHeaders(Request("/echo"), /*ends=*/false);
  peer.Send(RawClient::Data(kStream, std::string(60000, 'x'), /*ends=*/true));
  EXPECT_EQ(peer.BodyOf(kStream).size(), 60000u);
  for (const Frame& frame : peer.frames()) EXPECT_LE(frame.payload.size(), 16384u);
}

TEST(Rfc9113, Section6_5_2_ATableOfNoBytesIsSaidInTheNextBlock) {
  Peer peer;
  peer.Begin();
  peer.Send(Settings(NGHTTP2_SETTINGS_HEADER_TABLE_SIZE, 0));
  peer.Call();
  bool said = false;
  for (const Frame& frame : peer.frames()) {
    if (frame.type != NGHTTP2_HEADERS) continue;
    said = frame.payload[0] == '\x20';
    break;
  }
  EXPECT_TRUE(said);
}

TEST(Rfc9113, Section6_8_CallsThatAreOpenAtAGoAwayAreAnswered) {
  Peer peer;
  peer.Begin();
  peer.Hold(/*ends=*/true);
  peer.Send(Of(NGHTTP2_GOAWAY, 0, std::string(8, '\0')));
  ASSERT_FALSE(peer.closed());
  peer.last()->Answer();
  peer.Run();
  EXPECT_TRUE(peer.Answered(kStream));
}

TEST(Rfc9113, Section6_9_BodiesKeepToBothWindows) {
  Peer peer;
  peer.Begin();
  peer.Send(Settings(NGHTTP2_SETTINGS_INITIAL_WINDOW_SIZE, 10));
  peer.SendHeaders(Request("/echo"), /*ends=*/false);
  peer.Send(RawClient::Data(kStream, "0123456789abcdef", /*ends=*/true));
  EXPECT_EQ(peer.BodyOf(kStream), "0123456789");
  peer.Send(RawClient::Window(kStream, 2));
  EXPECT_EQ(peer.BodyOf(kStream), "0123456789ab");
  peer.Send(RawClient::Window(kStream, 100));
  EXPECT_EQ(peer.BodyOf(kStream), "0123456789abcdef");
  EXPECT_TRUE(peer.Answered(kStream));

  peer.Send(Settings(NGHTTP2_SETTINGS_INITIAL_WINDOW_SIZE, 1 << 20));
  const std::string large(60000, 'x');
  for (const int32_t stream : {3, 5}) {
    peer.SendHeaders(Request("/echo"), /*ends=*/false, stream);
    peer.Send(RawClient::Data(stream, large, /*ends=*/true));
  }
  constexpr size_t kFirst = 65535;  // the connection's
  EXPECT_EQ(peer.BodyOf(3).size() + peer.BodyOf(5).size(), kFirst - 16);
  peer.Send(RawClient::Window(0, 1 << 20));
  EXPECT_EQ(peer.BodyOf(3) + peer.BodyOf(5), large + large);
}

TEST(Rfc9113, Section6_9_2_ASettingChangesTheWindowsOfOpenStreamsBelowZeroToo) {
  Peer peer;
  peer.Begin();
  peer.Send(Settings(NGHTTP2_SETTINGS_INITIAL_WINDOW_SIZE, 10));
  peer.SendHeaders(Request("/echo"), /*ends=*/false);
  peer.Send(RawClient::Data(kStream, "0123456789abcdef", /*ends=*/true));
  peer.Send(Settings(NGHTTP2_SETTINGS_INITIAL_WINDOW_SIZE, 4));  // the stream's is now -6
  peer.Send(RawClient::Window(kStream, 6));
  EXPECT_EQ(peer.BodyOf(kStream), "0123456789");
  peer.Send(RawClient::Window(kStream, 1));
  EXPECT_EQ(peer.BodyOf(kStream), "0123456789a");
  peer.Send(Settings(NGHTTP2_SETTINGS_INITIAL_WINDOW_SIZE, 1000));
  EXPECT_EQ(peer.BodyOf(kStream), "0123456789abcdef");
}

}  // namespace
}  // namespace logitd::http2
