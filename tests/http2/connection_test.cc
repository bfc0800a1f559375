// Tests of one connection with right and wrong frames.
#include "server/http2/connection.h"

#include "tests/http2/one_connection.h"

namespace logitd::http2 {
namespace {

TEST_F(ConnectionTest, SaysItsLimitsFirstAndAcknowledgesThePeers) {
  limits_.max_streams = 77;
  limits_.max_header_list = 5000;
  Open();
  const std::vector<Frame> settings = TakeFrames(NGHTTP2_SETTINGS);
  ASSERT_THAT(settings, SizeIs(2));
  std::map<uint32_t, uint32_t> values;
  for (size_t at = 0; at < settings[0].payload.size(); at += 6) {
    const std::string_view entry = std::string_view(settings[0].payload).substr(at, 6);
    values[Read32(entry) >> 16] = Read32(entry.substr(2));
  }
  EXPECT_EQ(values[NGHTTP2_SETTINGS_MAX_CONCURRENT_STREAMS], 77u);
  EXPECT_EQ(values[NGHTTP2_SETTINGS_MAX_HEADER_LIST_SIZE], 5000u);
  EXPECT_EQ(values[NGHTTP2_SETTINGS_MAX_FRAME_SIZE], limits_.max_frame);
  EXPECT_EQ(settings[1].flags, NGHTTP2_FLAG_ACK);
}

TEST_F(ConnectionTest, ACallIsAnsweredWithHeadersBodyAndTrailers) {
  Open();
  Send(client_->Headers(1, Request("/echo")), RawClient::Data(1, "some "),
       RawClient::Data(1, "bytes", true));
  const Answer answer = AnswerOf(1);
  EXPECT_THAT(answer.headers, ElementsAre(Pair(":status", "200"), Pair("content-type", "test")));
  EXPECT_EQ(answer.body, "some bytes");
  EXPECT_THAT(answer.trailers, ElementsAre(Pair("result", "done")));
  EXPECT_TRUE(answer.ended);
  EXPECT_FALSE(answer.reset.has_value());
  EXPECT_EQ(echoes_[0]->closed(), Closed::kEnded);
  EXPECT_EQ(connection_->account().streams, 0);
}

TEST_F(ConnectionTest, AnswersOfAllSizesAndPiecesArriveWhole) {
  Open();
  Send(RawClient::Window(0, 1 << 30));
  int32_t id = 1;
  for (const size_t bytes : {1, 2048, 2049, 16'384, 65'000}) {
    for (const size_t pieces : {1, 2, 7}) {
      Send(client_->Headers(id, Request("/hold")),
           RawClient::Data(id, std::string(bytes, 'x'), true));
      echoes_.back()->Answer(pieces);
      Run();
      const Answer answer = AnswerOf(id);
      EXPECT_EQ(answer.body, std::string(bytes, 'x')) << bytes << " in " << pieces;
      EXPECT_TRUE(answer.ended);
      id += 2;
    }
  }
}

TEST_F(ConnectionTest, EverySendOfAStreamThatGoesOnIsTold) {
  Open();
  Send(client_->Headers(1, Request("/hold")));
  Stream* const stream = echoes_[0]->stream();
  const Field headers[] = {{":status", "200"}};
  stream->Respond(headers);
  for (const size_t bytes : {1, 5000}) {
    const int before = echoes_[0]->sent();
    auto part = std::make_shared<std::vector<std::byte>>(bytes);
    stream->Send({*part, part, /*ends_message=*/false});
    Run();
    EXPECT_EQ(echoes_[0]->sent(), before);
    stream->Send({*part, part});
    Run();
    EXPECT_EQ(echoes_[0]->sent(), before + 1);
    EXPECT_EQ(part.use_count(), 1) << "given back";
  }
  EXPECT_EQ(AnswerOf(1).body.size(), 10'002u);
  stream->End({});
  Run();
  EXPECT_TRUE(AnswerOf(1).ended);
}

TEST_F(ConnectionTest, AnEndWithoutAnAnswerIsTrailersOnlyAndStopsThePeerLater) {
  Open();
  Send(client_->Headers(1, Request("/hold")));
  const Field refusal[] = {{":status", "200"}, {"result", "no"}};
  echoes_[0]->stream()->End(refusal);
  Run();
  const Answer answer = AnswerOf(1);
  EXPECT_THAT(answer.headers, Contains(Pair("result", "no")));
  EXPECT_TRUE(answer.ended);
  EXPECT_EQ(answer.reset, std::nullopt) << "a proxy would drop the answer";
  Pass(times_.stop + absl::Milliseconds(2));
  EXPECT_EQ(AnswerOf(1).reset, uint32_t{NGHTTP2_NO_ERROR});
  EXPECT_EQ(echoes_[0]->times_closed(), 1);
  Call(3);
}

TEST_F(ConnectionTest, APeerThatEndsSoonAfterItsAnswerIsNotReset) {
  Open();
  for (const int32_t id : {1, 3}) Send(client_->Headers(id, Request("/hold")));
  for (const auto& echo : echoes_) echo->Answer();
  Send(RawClient::Data(1, "late", true));
  EXPECT_EQ(echoes_[0]->closed(), Closed::kEnded);
  Pass(times_.stop + absl::Milliseconds(2));
  EXPECT_EQ(AnswerOf(1).reset, std::nullopt);
  EXPECT_EQ(AnswerOf(3).reset, uint32_t{NGHTTP2_NO_ERROR});
}

TEST_F(ConnectionTest, ALargeBodyWaitsForItsGrant) {
  Open();
  Send(client_->Headers(1, Request("/hold")));
  TakeFrames(NGHTTP2_WINDOW_UPDATE);
  Stream* const stream = echoes_[0]->stream();
  EXPECT_EQ(stream->granted(), 65535);
  stream->Grant(65000);  // less than before
  Run();
  EXPECT_THAT(TakeFrames(NGHTTP2_WINDOW_UPDATE), IsEmpty());
  stream->Grant(1'000'000);
  Run();
  const std::vector<Frame> updates = TakeFrames(NGHTTP2_WINDOW_UPDATE);
  ASSERT_THAT(updates, SizeIs(1));
  EXPECT_EQ(updates[0].stream, 1);
  EXPECT_EQ(Read32(updates[0].payload), 1'000'000u - 65535u);
  Send(RawClient::Data(1, std::string(1'000'000, 'x'), true));
  EXPECT_EQ(echoes_[0]->body().size(), 1'000'000u);
  EXPECT_EQ(cut_, std::nullopt);
}

TEST_F(ConnectionTest, LargeFramesAreReceivedWhereTheStreamWantsThem) {
  Open();
  Send(client_->Headers(1, Request("/direct")));
  std::string bytes(1 << 20, '\0');
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<char>(i * 31 >> 8);
  // Its parts come one by one: the first of each frame comes with the frame's head.
  const std::string frame = testing::Encoded(RawClient::Data(1, bytes, true));
  for (size_t at = 0; at < frame.size(); at += 100'000) Send(frame.substr(at, 100'000));
  auto& direct = dynamic_cast<Direct&>(*echoes_[0]);
  EXPECT_TRUE(direct.body() == bytes);
  EXPECT_GT(direct.in_place(), bytes.size() / 2);
}

TEST_F(ConnectionTest, AListLargerThanAdvertisedIsRefusedAndOtherCallsLive) {
  Open();
  Send(client_->Headers(1, Request("/hold")));
  Fields large = Request("/echo");
  for (int i = 0; i < 20; ++i) large.emplace_back(absl::StrCat("x-", i), std::string(1000, 'y'));
  Send(client_->Headers(3, large));
  EXPECT_THAT(refusals_, ElementsAre(Refusal::kNone, Refusal::kHeaderList));
  EXPECT_GT(echoes_[1]->stream()->header_list_bytes(), 20'000u);
  EXPECT_LT(echoes_[1]->stream()->headers().held_bytes(), 3u * limits_.max_header_list);
  echoes_[1]->stream()->End({});
  Send(RawClient::Data(1, "still here", true));
  echoes_[0]->Answer();
  Run();
  EXPECT_EQ(AnswerOf(1).body, "still here");
  Call(5);
}

TEST_F(ConnectionTest, AMalformedListResetsItsCallAndCostsNothing) {
  Open();
  Fields wrong = Request("/echo");
  wrong.emplace_back("Upper", std::string(100, 'x'));
  Send(client_->Headers(1, wrong));
  EXPECT_EQ(AnswerOf(1).reset, uint32_t{NGHTTP2_PROTOCOL_ERROR});
  EXPECT_THAT(echoes_, IsEmpty());
  EXPECT_EQ(connection_->account().streams, 0);
  EXPECT_EQ(connection_->account().headers, 0);
  Call(3);
  EXPECT_EQ(connection_->account().headers, 0);
}

TEST_F(ConnectionTest, AListFarBeyondTheLimitCutsTheConnection) {
  Open();
  Fields huge = Request("/echo");
  for (int i = 0; i < 70; ++i) huge.emplace_back(absl::StrCat("x-", i), std::string(4000, 'y'));
  Send(client_->Headers(1, huge));
  EXPECT_EQ(cut_, Cut::kHeaderList);
  EXPECT_TRUE(client_->ended());
}

TEST_F(ConnectionTest, ManyCancelledCallsCutItAnsweredOnesDoNot) {
  limits_.resets = 10;
  limits_.reset_rate = 0;
  Open();
  int32_t id = 1;
  for (int i = 0; i < 10; ++i, id += 2) {
    Send(client_->Headers(id, Request("/hold")), RawClient::Reset(id));
    EXPECT_EQ(echoes_.back()->closed(), Closed::kReset);
  }
  ASSERT_EQ(cut_, std::nullopt);
  for (int i = 0; i < 3; ++i, id += 2) Call(id);  // three more may be cancelled
  for (int i = 0; i < 3; ++i, id += 2) {
    Send(client_->Headers(id, Request("/hold")), RawClient::Reset(id));
  }
  ASSERT_EQ(cut_, std::nullopt);
  Send(client_->Headers(id, Request("/hold")), RawClient::Reset(id));
  EXPECT_EQ(cut_, Cut::kResets);
  EXPECT_EQ(Read32(TakeFrames(NGHTTP2_GOAWAY).at(0).payload.substr(4)),
            uint32_t{NGHTTP2_ENHANCE_YOUR_CALM});
}

TEST_F(ConnectionTest, MessagesInTinyFramesCutIt) {
  limits_.tiny_frames = 20;
  limits_.tiny_rate = 4;
  for (const std::string body : {"x", ""}) {
    cut_.reset();
    Open();
    Send(client_->Headers(1, Request("/hold")));
    for (int i = 0; i < 20; ++i) Send(RawClient::Data(1, body));
    ASSERT_EQ(cut_, std::nullopt);
    Pass(absl::Seconds(1));
    for (int i = 0; i < 4; ++i) Send(RawClient::Data(1, body));
    ASSERT_EQ(cut_, std::nullopt);
    echoes_.back()->stream()->CountMessage();
    for (int i = 0; i < 2; ++i) Send(RawClient::Data(1, body));
    ASSERT_EQ(cut_, std::nullopt);
    Send(RawClient::Data(1, body));
    EXPECT_EQ(cut_, Cut::kTinyFrames);
  }
}

TEST_F(ConnectionTest, PingsWithoutCallsCutItBetweenCallsTheyDoNot) {
  Open();
  int32_t id = 1;
  for (int i = 0; i < 10; ++i, id += 2) {
    for (int ping = 0; ping < 3; ++ping) Send(RawClient::Ping());
    Call(id);  // the answer's three frames allow three more
  }
  for (int i = 0; i < 10; ++i) Send(RawClient::Ping());
  for (int i = 0; i < 5; ++i) {  // one in five seconds
    Pass(absl::Seconds(5));
    Send(RawClient::Ping());
  }
  ASSERT_EQ(cut_, std::nullopt);
  Send(RawClient::Ping());
  EXPECT_EQ(cut_, Cut::kPings);
  // The last stream, the reason, and a text, which gRPC's clients know.
  const std::vector<Frame> goaway = TakeFrames(NGHTTP2_GOAWAY);
  ASSERT_THAT(goaway, SizeIs(1));
  EXPECT_EQ(goaway[0].payload.substr(4),
            testing::Big32(NGHTTP2_ENHANCE_YOUR_CALM) + "too_many_pings");
}

TEST_F(ConnectionTest, WithoutAnIntervalPingsAreNotCounted) {
  limits_.min_ping_interval = absl::ZeroDuration();
  Open();
  for (int i = 0; i < 100; ++i) {
    Pass(absl::Milliseconds(1));
    Send(RawClient::Ping());
  }
  EXPECT_EQ(cut_, std::nullopt);
}

// gRPC's clients ping so where routers drop silent connections.
TEST_F(ConnectionTest, APingEveryTenSecondsOfSilenceIsWelcome) {
  for (const bool in_a_call : {false, true}) {
    Open();
    if (in_a_call) Send(client_->Headers(1, Request("/hold")));
    for (int i = 0; i < 200; ++i) {
      Pass(absl::Seconds(10));
      Send(RawClient::Ping());
      ASSERT_EQ(cut_, std::nullopt) << i;
    }
    EXPECT_THAT(TakeFrames(NGHTTP2_PING), SizeIs(200));
    connection_->Close();
    cut_.reset();
  }
}

TEST_F(ConnectionTest, SettingsCostMoreWithOpenStreams) {
  limits_.control_frames = 1000;
  limits_.control_rate = 0;
  Open();
  for (int32_t id = 1; id < 321; id += 2) Send(client_->Headers(id, Request("/hold")));
  int sent = 0;
  while (!cut_.has_value() && sent < 200) {
    ASSERT_TRUE(client_->Send({.type = NGHTTP2_SETTINGS}));
    Run();
    ++sent;
  }
  EXPECT_EQ(cut_, Cut::kControlFrames);
  EXPECT_EQ(sent, 91) << "160 streams: each costs 11 of 1000";
}

TEST_F(ConnectionTest, LongListsOfFewBytesCutIt) {
  limits_.control_frames = 1000;
  limits_.control_rate = 0;
  Open();
  Fields fields = Request("/hold");
  for (int i = 0; i < 60; ++i)
    fields.emplace_back("long", std::string(3900, 'x'));  // one in the table
  int lists = 0;
  for (int32_t id = 1; !cut_.has_value() && lists < 100; id += 2, ++lists) {
    ASSERT_TRUE(client_->Send(client_->Headers(id, fields)));
    Run();
  }
  EXPECT_EQ(cut_, Cut::kControlFrames);
  EXPECT_LT(lists, 10);
}

TEST_F(ConnectionTest, PaddingDoesNotUseUpTheWindow) {
  Open();
  Send(client_->Headers(1, Request("/direct")));
  constexpr size_t kPadding = 255;
  constexpr size_t kBody = 1024;
  const std::string payload =
      std::string(1, '\xff') + std::string(kBody, 'x') + std::string(kPadding, '\0');
  int64_t window = limits_.early_window;
  for (size_t sent = 0; sent < size_t{1} << 20; sent += kBody) {
    for (const Frame& frame : TakeFrames(NGHTTP2_WINDOW_UPDATE)) {
      if (frame.stream == 1) window += Read32(frame.payload);
    }
    window -= static_cast<int64_t>(payload.size());
    ASSERT_GE(window, -(16 << 10)) << "after " << sent << " bytes: less than 16 KiB may wait";
    Send(
        Frame{.type = NGHTTP2_DATA, .flags = NGHTTP2_FLAG_PADDED, .stream = 1, .payload = payload});
  }
}

TEST_F(ConnectionTest, FramesThatCarryNothingCutIt) {
  limits_.control_frames = 50;
  limits_.control_rate = 0;
  const std::vector<Frame> kinds = {
      {.type = NGHTTP2_SETTINGS},
      {.type = NGHTTP2_PRIORITY, .stream = 1, .payload = std::string(5, '\0')},
      RawClient::Window(0, 1),
      RawClient::Reset(7),  // of a stream that has not begun
      {.type = NGHTTP2_PING, .flags = NGHTTP2_FLAG_ACK, .payload = std::string(8, 'x')},
      {.type = 0xfa, .stream = 5, .payload = "unknown"}};
  for (const Frame& kind : kinds) {
    cut_.reset();
    Open();
    int sent = 0;
    while (!cut_.has_value() && sent < 200) {
      ASSERT_TRUE(client_->Send(kind));
      Run();
      ++sent;
    }
    EXPECT_EQ(cut_, Cut::kControlFrames) << "type " << int{kind.type};
    EXPECT_GE(sent, 49);
    EXPECT_LE(sent, 51);
  }
}

TEST_F(ConnectionTest, ADrainLetsCallsEndAndTakesNoMore) {
  Open();
  Send(client_->Headers(1, Request("/hold")));
  connection_->Drain();
  Run();
  std::vector<Frame> goaway = TakeFrames(NGHTTP2_GOAWAY);
  ASSERT_THAT(goaway, SizeIs(1));
  EXPECT_EQ(Read32(goaway[0].payload), 0x7fffffffu) << "calls on their way are taken";
  Send(client_->Headers(3, Request("/hold")));
  EXPECT_THAT(echoes_, SizeIs(2));
  Pass(absl::Seconds(3));
  goaway = TakeFrames(NGHTTP2_GOAWAY);
  ASSERT_THAT(goaway, SizeIs(1));
  EXPECT_EQ(Read32(goaway[0].payload), 3u);
  Send(client_->Headers(5, Request("/hold")));
  EXPECT_THAT(echoes_, SizeIs(2)) << "no more";
  EXPECT_EQ(cut_, std::nullopt);
  for (const int32_t id : {1, 3}) Send(RawClient::Data(id, "late", true));
  for (const auto& echo : echoes_) echo->Answer();
  Run();
  EXPECT_EQ(AnswerOf(1).body, "late");
  EXPECT_EQ(AnswerOf(3).body, "late");
  EXPECT_EQ(cut_, Cut::kNone);
  EXPECT_TRUE(client_->ended());
}

TEST_F(ConnectionTest, ADrainWithoutCallsClosesIt) {
  Open();
  connection_->Drain();
  Pass(absl::Seconds(3));
  EXPECT_EQ(cut_, Cut::kNone);
  EXPECT_TRUE(client_->ended());
}

TEST_F(ConnectionTest, AfterSilenceItPingsAndAPeerThatAnswersStays) {
  times_.keepalive = absl::Seconds(60);
  times_.keepalive_timeout = absl::Seconds(20);
  Open();
  for (int i = 0; i < 3; ++i) {
    Pass(absl::Seconds(59));
    EXPECT_THAT(TakeFrames(NGHTTP2_PING), IsEmpty());
    Pass(absl::Seconds(3));
    const std::vector<Frame> pings = TakeFrames(NGHTTP2_PING);
    ASSERT_THAT(pings, SizeIs(1));
    Send(Frame{.type = NGHTTP2_PING, .flags = NGHTTP2_FLAG_ACK, .payload = pings[0].payload});
  }
  EXPECT_EQ(cut_, std::nullopt);
}

TEST_F(ConnectionTest, APeerThatDoesNotAnswerAPingIsCut) {
  times_.keepalive = absl::Seconds(60);
  times_.keepalive_timeout = absl::Seconds(20);
  Open();
  Pass(absl::Seconds(62));
  EXPECT_THAT(TakeFrames(NGHTTP2_PING), SizeIs(1));
  Pass(absl::Seconds(17));
  EXPECT_EQ(cut_, std::nullopt);
  Pass(absl::Seconds(5));
  EXPECT_EQ(cut_, Cut::kKeepalive);
}

TEST_F(ConnectionTest, WithoutAPrefaceInTimeItCloses) {
  times_.preface = absl::Seconds(20);
  Connect();
  Send(std::string_view(NGHTTP2_CLIENT_MAGIC).substr(0, 10));
  Pass(absl::Seconds(19));
  EXPECT_EQ(cut_, std::nullopt);
  Pass(absl::Seconds(2));
  EXPECT_EQ(cut_, Cut::kNone);
}

TEST_F(ConnectionTest, IdleOrOldConnectionsDrain) {
  times_.max_idle = absl::Seconds(30);
  times_.max_age = absl::Seconds(100);
  Open();
  Send(client_->Headers(1, Request("/hold")));
  Pass(absl::Seconds(60));
  EXPECT_THAT(TakeFrames(NGHTTP2_GOAWAY), IsEmpty()) << "it has a call";
  Send(RawClient::Data(1, "x", true));
  echoes_[0]->Answer();
  Pass(absl::Seconds(28));
  EXPECT_EQ(cut_, std::nullopt);
  Pass(absl::Seconds(6));
  EXPECT_EQ(cut_, Cut::kNone) << "idle";
  EXPECT_THAT(TakeFrames(NGHTTP2_GOAWAY), SizeIs(2));

  cut_.reset();
  Open();
  Send(client_->Headers(1, Request("/hold")));
  Pass(absl::Seconds(112));  // an age has a tenth of jitter
  EXPECT_THAT(TakeFrames(NGHTTP2_GOAWAY), SizeIs(2)) << "old";
  EXPECT_EQ(cut_, std::nullopt);
}

TEST_F(ConnectionTest, APeerThatGrantsNoWindowLosesTheCallOnly) {
  times_.send = absl::Seconds(30);
  Open();
  Send(client_->Headers(1, Request("/hold")), RawClient::Data(1, std::string(60'000, 'x')));
  Send(RawClient::Data(1, std::string(5'000, 'x'), true));
  echoes_[0]->Answer();
  Run();
  EXPECT_EQ(AnswerOf(1).body.size(), 65'000u);  // the first window takes it
  Send(client_->Headers(3, Request("/hold")), RawClient::Data(3, std::string(65'000, 'x'), true));
  echoes_[1]->Answer();
  Run();
  EXPECT_EQ(AnswerOf(3).body.size(), 535u) << "what is left of the connection's window";
  EXPECT_GT(connection_->account().unsent, 60'000);
  Pass(absl::Seconds(33));
  EXPECT_EQ(AnswerOf(3).reset, uint32_t{NGHTTP2_CANCEL});
  EXPECT_EQ(connection_->account().unsent, 0);
  EXPECT_EQ(cut_, std::nullopt);
}

TEST_F(ConnectionTest, TrailersDoNotWaitForAWindowForEver) {
  times_.send = absl::Seconds(30);
  Open();
  Send(client_->Headers(1, Request("/hold")));
  const Field headers[] = {{":status", "200"}};
  const Field trailers[] = {{"result", "done"}};
  const auto body = std::make_shared<std::string>(65'535, 'x');  // all of the window
  Stream* const stream = echoes_[0]->stream();
  stream->Respond(headers);
  stream->Send(
      {absl::MakeConstSpan(reinterpret_cast<const std::byte*>(body->data()), body->size()), body});
  Run();
  stream->End(trailers);
  Run();
  EXPECT_EQ(AnswerOf(1).body.size(), body->size());
  Pass(absl::Seconds(33));
  EXPECT_EQ(echoes_[0]->times_closed(), 1);
  EXPECT_EQ(cut_, std::nullopt);
}

TEST_F(ConnectionTest, APeerThatReadsNothingIsCut) {
  times_.send = absl::Seconds(30);
  Open();
  Send(RawClient::Window(0, 1 << 30));
  const int small = 4096;
  int id = 1;
  // More than the sockets take: the client does not read.
  ASSERT_TRUE(client_->Send(
      Frame{.type = NGHTTP2_SETTINGS,
            .payload = std::string("\0\4", 2) + testing::Big32(1 << 30)}));  // the streams' window
  const auto turns = [&] {
    for (int i = 0; i < 4; ++i) loop_.Turn(/*wait=*/false);
  };
  turns();
  for (; id < 400; id += 2) {
    ASSERT_TRUE(client_->Send(client_->Headers(id, Request("/hold"))));
    ASSERT_TRUE(client_->Send(RawClient::Data(id, std::string(60'000, 'x'), true)));
    turns();
    echoes_.back()->Answer();
    turns();
  }
  EXPECT_GT(connection_->account().unsent, small);
  for (int i = 0; i < 32 && !cut_.has_value(); ++i) {
    now_ns += 1'000'000'000;
    turns();
  }
  EXPECT_EQ(cut_, Cut::kUnread);
}

TEST_F(ConnectionTest, BodiesThatNobodyAskedForHaveALimit) {
  limits_.max_early_bytes = 100;
  Open();
  for (const int32_t id : {1, 3}) Send(client_->Headers(id, Request("/hold")));
  EXPECT_TRUE(echoes_[0]->stream()->HoldEarly(60));
  EXPECT_FALSE(echoes_[1]->stream()->HoldEarly(50));
  EXPECT_TRUE(echoes_[1]->stream()->HoldEarly(40));
  EXPECT_EQ(connection_->account().early, 100);
  echoes_[0]->stream()->ReleaseEarly();
  EXPECT_TRUE(echoes_[1]->stream()->HoldEarly(60));
  Send(RawClient::Reset(3));
  EXPECT_EQ(connection_->account().early, 0);
}

TEST_F(ConnectionTest, WhileTooMuchIsHeldStreamsAreRefused) {
  Open();
  total_ += int64_t{65} << 20;
  Send(client_->Headers(1, Request("/hold")));
  EXPECT_FALSE(echoes_[0]->stream()->HoldEarly(1));
  total_ -= int64_t{65} << 20;
  Send(client_->Headers(3, Request("/hold")));
  EXPECT_THAT(refusals_, ElementsAre(Refusal::kMemory, Refusal::kNone));
}

TEST_F(ConnectionTest, WhatItHoldsIsCounted) {
  Open();
  const int64_t idle = connection_->account().held();
  EXPECT_GT(idle, 1000) << "nghttp2's memory";
  Send(client_->Headers(1, Request("/hold")));
  EXPECT_GT(connection_->account().headers, 1000);
  EXPECT_GT(connection_->account().held(), idle);
  client_->Close();
  Run();
  EXPECT_EQ(cut_, Cut::kNone);
  EXPECT_EQ(echoes_[0]->closed(), Closed::kLostPeer);
  EXPECT_EQ(connection_->account().held(), 0);
}

}  // namespace
}  // namespace logitd::http2
