// RFC 9113, section 8: requests as HTTP has them.
#include <gtest/gtest.h>

#include <string>

#include "tests/http2/rfc9113.h"

namespace logitd::http2::testing {
namespace {

const Row kRows[] = {
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
    {"8_1", "trailers_in_upper_case_are_malformed", SendsTrailers({{"Trailer", "yes"}}),
     kMalformed},
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
    {"8_2_1", "name_with_a_control_byte_is_malformed", Asks(With({"a\x01name", "value"})),
     kMalformed},
    {"8_2_1", "name_beyond_ascii_is_malformed", Asks(With({"n\xc3\xa4me", "value"})), kMalformed},
    {"8_2_1", "value_with_a_zero_byte_is_malformed", Asks(With({"name", std::string("a\0b", 3)})),
     kMalformed},
    {"8_2_1", "value_with_a_line_end_is_malformed", Asks(With({"name", "a\nb"})), kMalformed},
    {"8_2_1", "value_with_a_carriage_return_is_malformed", Asks(With({"name", "a\rb"})),
     kMalformed},
    {"8_2_1", "value_that_begins_with_a_space_is_malformed", Asks(With({"name", " a"})),
     kMalformed},
    {"8_2_1", "value_that_ends_with_a_tab_is_malformed", Asks(With({"name", "a\t"})), kMalformed},
    {"8_2_2", "connection_is_malformed", Asks(With({"connection", "close"})), kMalformed},
    {"8_2_2", "proxy_connection_is_malformed", Asks(With({"proxy-connection", "close"})),
     kMalformed},
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
    {"8_3_1", "asterisk_of_another_method_than_options_is_malformed", Asks(Request("*")),
     kMalformed},
    {"8_3_1", "protocol_without_its_setting_is_malformed", Asks(With({":protocol", "websocket"})),
     kMalformed},
    {"8_5", "connect_with_a_scheme_and_a_path_is_malformed",
     Asks({{":method", "CONNECT"}, {":scheme", "http"}, {":path", "/"}, {":authority", "a:1"}}),
     kMalformed},
    {"8_5", "connect_without_an_authority_is_malformed", Asks({{":method", "CONNECT"}}),
     kMalformed},
    {"8_5", "connect_is_a_request_like_others",
     Asks({{":method", "CONNECT"}, {":authority", "a:1"}}), kGoesOn},
};

class Rfc9113MessagesTest : public ::testing::TestWithParam<Row> {};
TEST_P(Rfc9113MessagesTest, Holds) { CheckRow(GetParam()); }
INSTANTIATE_TEST_SUITE_P(Table, Rfc9113MessagesTest, ::testing::ValuesIn(kRows), NameOfRow);

// The malformed lists do not reach the layer above.
TEST(Rfc9113Messages, MalformedListsAreNoRequests) {
  for (const Fields& fields :
       {With({"Name", "value"}), With({"connection", "close"}), Without(":path"),
        With({"content-length", "5"}), With({":status", "200"})}) {
    Peer peer;
    peer.Begin();
    peer.SendHeaders(fields);
    EXPECT_EQ(peer.requests(), 0) << fields.back().first;
  }
}

}  // namespace
}  // namespace logitd::http2::testing
