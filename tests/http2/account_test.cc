// Tests of a connection's account: it counts everything that the connection holds.
#include "server/http2/connection.h"

#include "tests/certificates.h"
#include "tests/http2/client_hello.h"
#include "tests/http2/one_connection.h"

namespace logitd::http2 {
namespace {

absl::Span<const std::byte> BytesOf(const std::string& text) {
  return {reinterpret_cast<const std::byte*>(text.data()), text.size()};
}

TEST_F(ConnectionTest, TrailersFarBeyondTheLimitCutTheConnectionToo) {
  Open();
  Send(client_->Headers(1, Request("/hold")));
  Fields huge;
  for (int i = 0; i < 70; ++i) huge.emplace_back(absl::StrCat("x-", i), std::string(4000, 'y'));
  Send(client_->Headers(1, huge, true));
  EXPECT_EQ(cut_, Cut::kHeaderList);
}

TEST_F(ConnectionTest, AResponseThatOthersPayForIsNotCounted) {
  Open();
  const auto body = std::make_shared<std::string>(200'000, 'x');
  int32_t id = 1;
  for (const Payer payer : {Payer::kOwner, Payer::kKeep, Payer::kConnection}) {
    Send(client_->Headers(id, Request("/hold")));
    Stream* const stream = echoes_.back()->stream();
    const Field headers[] = {{":status", "200"}};
    stream->Respond(headers);
    stream->Send({.span = BytesOf(*body), .keep = body, .payer = payer});
    Run();
    EXPECT_EQ(connection_->account().unsent, payer == Payer::kConnection ? 200'000 : 0)
        << "the first window takes less";
    id += 2;
  }
  for (const auto& echo : echoes_) echo->stream()->Reset(NGHTTP2_CANCEL);
  Run();
  EXPECT_EQ(connection_->account().unsent, 0);
}

TEST_F(ConnectionTest, WhatAWriteKeepsIsCountedUntilTheKernelTakesIt) {
  const auto body = std::make_shared<std::string>(size_t{32} << 20, 'x');
  const auto turns = [&] {
    for (int i = 0; i < 4; ++i) loop_.Turn(/*wait=*/false);
  };
  for (const Payer payer : {Payer::kOwner, Payer::kKeep}) {
    Open();
    Send(RawClient::Window(0, 1 << 30), client_->Headers(1, Request("/hold")),
         RawClient::Window(1, 1 << 30));
    Stream* const stream = echoes_.back()->stream();
    const Field headers[] = {{":status", "200"}};
    stream->Respond(headers);
    stream->Send({.span = BytesOf(*body), .keep = body, .payer = payer});
    turns();  // the client does not read
    const auto [least, most] =
        payer == Payer::kOwner ? std::pair(1024, 2 << 20) : std::pair(0, 1024);
    EXPECT_GT(connection_->account().unsent, least);
    EXPECT_LT(connection_->account().unsent, most);
    for (int i = 0; i < 100; ++i) Run();
    EXPECT_EQ(connection_->account().unsent, 0);
    connection_->Close();
    frames_.clear();
    loop_.Turn(/*wait=*/false);
  }
}

TEST_F(ConnectionTest, AnIdleConnectionHoldsNoMoreThanItsPlace) {
  Open();
  for (int32_t id = 1; id < 200; id += 2) {
    Fields fields = Request("/logitd.v1.Sampler/TopK");
    fields.insert(fields.end(), {{"te", "trailers"},
                                 {"content-type", "application/grpc"},
                                 {"user-agent", "grpc-c++/1.51.1 grpc-c/29.0.0 (linux; chttp2)"},
                                 {"authorization", std::string(71, 't')},
                                 {"x-request-id", absl::StrCat("request-", id)}});
    Send(client_->Headers(id, fields), RawClient::Data(id, std::string(100, 'x'), true));
  }
  Pass(absl::Seconds(2));
  EXPECT_EQ(connection_->account().streams, 0);
  EXPECT_GT(connection_->account().held(), 20'000);
  EXPECT_LE(connection_->account().held(), kIdleBytes);
}

// ---- handshakes

TEST_F(ConnectionTest, AHandshakeWaitsForItsTurn) {
  static const auto& authority = *new ::logitd::testing::Authority();
  const auto server = authority.IssueServer();
  const auto context =
      door::TlsContext::Create({.certificate = server.certificate, .key = server.key});
  ASSERT_TRUE(context.ok()) << context.status();
  Connect(context->get());
  EXPECT_GE(connection_->account().held(), TlsSession::kHandshakeBytes);
  ASSERT_TRUE(client_->Send(testing::ClientHello()));
  may_handshake_ = false;
  for (int i = 0; i < 3; ++i) loop_.Turn(/*wait=*/false);
  EXPECT_FALSE(connection_->handshake_begun());
  may_handshake_ = true;
  loop_.Turn(/*wait=*/false);
  EXPECT_TRUE(connection_->handshake_begun());
}

}  // namespace
}  // namespace logitd::http2
