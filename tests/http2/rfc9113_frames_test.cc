// RFC 9113, sections 3 to 7: frames, streams and windows.
#include <gtest/gtest.h>

#include <string>
#include <utility>

#include "tests/http2/rfc9113.h"

namespace logitd::http2::testing {
namespace {

void SendBlockInPieces(Peer& peer) {
  Frame headers = peer.Headers(Request("/echo"));
  const std::string block = std::exchange(headers.payload, "");
  headers.flags = NGHTTP2_FLAG_END_STREAM;
  peer.Send(headers);
  for (const char byte : block.substr(0, 5)) {
    peer.Send(Of(NGHTTP2_CONTINUATION, kStream, std::string(1, byte)));
  }
  peer.Send(Of(NGHTTP2_CONTINUATION, kStream, block.substr(5), NGHTTP2_FLAG_END_HEADERS));
  EXPECT_TRUE(peer.Answered(kStream));
}

void ExpectAcknowledgement(Peer& peer) {
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
}

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
     SendBlockInPieces, kGoesOn},
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
     ExpectAcknowledgement, kGoesOn},
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
};

class Rfc9113FramesTest : public ::testing::TestWithParam<Row> {};
TEST_P(Rfc9113FramesTest, Holds) { CheckRow(GetParam()); }
INSTANTIATE_TEST_SUITE_P(Table, Rfc9113FramesTest, ::testing::ValuesIn(kRows), NameOfRow);

// ---- what takes more than frames and an outcome

TEST(Rfc9113Frames, Section3_4_TheServersSettingsComeFirst) {
  Peer peer;
  peer.Run();
  ASSERT_FALSE(peer.frames().empty());
  EXPECT_EQ(peer.frames()[0].type, NGHTTP2_SETTINGS);
  EXPECT_EQ(peer.frames()[0].flags, NGHTTP2_FLAG_NONE);
}

TEST(Rfc9113Frames, Section3_4_OtherBytesThanThePrefaceEndTheConnection) {
  for (const std::string first :
       {"GET / HTTP/1.1\r\nhost: test\r\n\r\n", "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\r"}) {
    Peer peer;
    peer.Send(first);
    EXPECT_EQ(peer.cut(), Cut::kProtocol) << first;
    EXPECT_EQ(peer.requests(), 0);
  }
}

TEST(Rfc9113Frames, Section3_4_AnotherFrameThanSettingsAfterThePrefaceEndsTheConnection) {
  for (const Frame& first : {RawClient::Ping(), Of(NGHTTP2_HEADERS, 1, "\x83", 5),
                             Of(NGHTTP2_SETTINGS, 0, "", NGHTTP2_FLAG_ACK)}) {
    Peer peer;
    peer.Send(kMagic + Encoded(first));
    EXPECT_EQ(peer.CodeOf(NGHTTP2_GOAWAY, 0), uint32_t{NGHTTP2_PROTOCOL_ERROR}) << int{first.type};
    EXPECT_TRUE(peer.closed());
  }
}

TEST(Rfc9113Frames, Section3_4_ThePrefaceMayComeInBytes) {
  Peer peer;
  const std::string bytes = kMagic + Encoded({.type = NGHTTP2_SETTINGS});
  for (const char byte : bytes) peer.Send(std::string(1, byte));
  peer.Call();
  EXPECT_TRUE(peer.Answered(kStream));
}

// gRPC's C core sends them when a call is cancelled before its header list is sent.
TEST(Rfc9113Frames, Section5_1_ResetsOfStreamsThatNeverBeganAreLeftOutHoweverTheyArrive) {
  for (size_t part = 1; part < 40; ++part) {
    Peer peer;
    std::string bytes = kMagic + Encoded({.type = NGHTTP2_SETTINGS});
    bytes += Encoded(peer.Headers(Request("/echo"), /*ends=*/false));
    bytes += Encoded(RawClient::Reset(3));
    bytes += Encoded(RawClient::Data(kStream, "hello", true));
    bytes += Encoded(RawClient::Reset(3)) + Encoded(RawClient::Reset(5));
    bytes += Encoded(peer.Headers(Request("/echo"), /*ends=*/true, 7));
    for (size_t at = 0; at < bytes.size(); at += part) peer.Send(bytes.substr(at, part));
    EXPECT_EQ(peer.BodyOf(kStream), "hello") << part;
    EXPECT_TRUE(peer.Answered(7)) << part;
    EXPECT_FALSE(peer.closed());
  }
}

// A client that has not read the setting yet may try again elsewhere; one that has breaks the
// protocol.
TEST(Rfc9113Frames, Section5_1_2_StreamsBeyondTheSettingAreRefused) {
  Peer early(/*max_streams=*/2);
  early.Send(kMagic + Encoded({.type = NGHTTP2_SETTINGS}));
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

TEST(Rfc9113Frames, Section5_4_1_GoAwayNamesTheLastStreamThatWasTaken) {
  Peer peer;
  peer.Begin();
  peer.Call(1);
  peer.Call(9);
  peer.Send(RawClient::Data(0, "x"));
  ASSERT_EQ(peer.frames().back().type, NGHTTP2_GOAWAY);
  EXPECT_EQ(Read32(peer.frames().back().payload), 9u);
}

TEST(Rfc9113Frames, Section6_1_PaddingTakesOfTheWindowsAndIsGivenBack) {
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

TEST(Rfc9113Frames, Section6_5_2_FramesAreNoLargerThanThePeerTakes) {
  Peer peer;
  peer.Begin();
  peer.SendHeaders(Request("/echo"), /*ends=*/false);
  peer.Send(RawClient::Data(kStream, std::string(60000, 'x'), /*ends=*/true));
  EXPECT_EQ(peer.BodyOf(kStream).size(), 60000u);
  for (const Frame& frame : peer.frames()) EXPECT_LE(frame.payload.size(), 16384u);
}

TEST(Rfc9113Frames, Section6_5_2_ATableOfNoBytesIsSaidInTheNextBlock) {
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

TEST(Rfc9113Frames, Section6_8_CallsThatAreOpenAtAGoAwayAreAnswered) {
  Peer peer;
  peer.Begin();
  peer.Hold(/*ends=*/true);
  peer.Send(Of(NGHTTP2_GOAWAY, 0, std::string(8, '\0')));
  ASSERT_FALSE(peer.closed());
  peer.last()->Answer();
  peer.Run();
  EXPECT_TRUE(peer.Answered(kStream));
}

TEST(Rfc9113Frames, Section6_9_BodiesKeepToBothWindows) {
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

TEST(Rfc9113Frames, Section6_9_2_ASettingChangesTheWindowsOfOpenStreamsBelowZeroToo) {
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
}  // namespace logitd::http2::testing
