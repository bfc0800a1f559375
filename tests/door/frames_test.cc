#include "server/door/frames.h"

#include <gtest/gtest.h>

#include <initializer_list>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "server/door/answer.h"
#include "server/door/edit.h"
#include "tests/door/bytes.h"

namespace logitd::door {
namespace {

using namespace std::string_literals;

constexpr int64_t kSecond = 1'000'000'000;

class FramesTest : public ::testing::Test {
 protected:
  FramesTest() { EXPECT_EQ(Get(Preface() + Frame(kSettings, 0, 0, "")), Limit::kNone); }

  // Also byte for byte, into a second object that must agree.
  Limit Get(const std::string& bytes) {
    const Limit whole = frames_.Received(Bytes(bytes), now_);
    Limit pieces = Limit::kNone;
    for (const char& byte : bytes) pieces = bytewise_.Received(Bytes({&byte, 1}), now_);
    EXPECT_EQ(whole, pieces);
    EXPECT_EQ(frames_.open(), bytewise_.open());
    EXPECT_EQ(frames_.under_way(), bytewise_.under_way());
    return whole;
  }
  Limit GetTimes(int times, const std::string& bytes) {
    Limit limit = Limit::kNone;
    for (int i = 0; i < times && limit == Limit::kNone; ++i) limit = Get(bytes);
    return limit;
  }
  void Send(const std::string& bytes) {
    std::string changed = bytes;
    iovec part = {changed.data(), changed.size()};
    frames_.Offer({&part, 1});
    frames_.Sent(Bytes(changed));
    changed = bytes;
    bytewise_.Offer({&part, 1});
    for (const char& byte : changed) bytewise_.Sent(Bytes({&byte, 1}));
  }
  // gRPC lets the peer send as much as it likes on stream 1.
  void OpenWindows() {
    Send(Frame(kWindowUpdate, 0, 0, "\x3f\xff\0\0"s));
    Send(Frame(kWindowUpdate, 0, 1, "\x3f\xff\0\0"s));
  }

  FrameLimits limits_ = {.max_streams = 4,
                         .streams_slack = 1,
                         .unread_frames = 100,
                         .tiny_frames = 20,
                         .tiny_rate = 10,
                         .control_frames = 50,
                         .control_rate = 100,
                         .pings = 3,
                         .min_ping_interval_ns = kSecond,
                         .resets = 3,
                         .reset_rate = 1,
                         .unread_answers = 40};
  int64_t now_ = 5 * kSecond;
  Frames frames_{limits_, now_};
  Frames bytewise_{limits_, now_};
};

// --- header lists

TEST_F(FramesTest, AListInOneFrameMayBeAbout8KiB) {
  EXPECT_EQ(Get(Frame(kHeaders, kEndHeaders, 1, "\0\1x\x7f\xf1\x3e"s + std::string(8048, 'y'))),
            Limit::kNone);
  EXPECT_EQ(Get(Frame(kHeaders, kEndHeaders, 3, "\0\1x\x7f\xf1\x6e"s + std::string(14192, 'y'))),
            Limit::kHeaderList);
}

TEST_F(FramesTest, AListInSeveralFramesIsCountedAsOne) {
  const std::string half = "\0\1x\x7f\xb1\x1f"s + std::string(4144, 'y');
  EXPECT_EQ(Get(Frame(kHeaders, 0, 1, half)), Limit::kNone);
  EXPECT_EQ(Get(Frame(kContinuation, kEndHeaders, 1, half)), Limit::kHeaderList);
}

TEST_F(FramesTest, ListsAreCountedOneByOne) {
  const std::string list = "\0\1x\x7f\xf1\x2e"s + std::string(6000, 'y');
  for (const uint32_t stream : {1U, 3U, 5U}) {
    EXPECT_EQ(Get(Frame(kHeaders, kEndHeaders, stream, list)), Limit::kNone);
  }
}

TEST_F(FramesTest, AListMayHaveFewContinuations) {
  EXPECT_EQ(Get(Frame(kHeaders, 0, 1, "\x82")), Limit::kNone);
  EXPECT_EQ(GetTimes(limits_.max_continuations, Frame(kContinuation, 0, 1, "")), Limit::kNone);
  EXPECT_EQ(Get(Frame(kContinuation, 0, 1, "")), Limit::kContinuations);
}

TEST_F(FramesTest, AListMayNotTakeManyBytesForFewFields) {
  EXPECT_EQ(Get(Frame(kHeaders, 0, 1, std::string(16000, '\x20'))), Limit::kNone);
  EXPECT_EQ(Get(Frame(kContinuation, 0, 1, std::string(16000, '\x20'))), Limit::kNone);
  EXPECT_EQ(Get(Frame(kContinuation, 0, 1, std::string(16000, '\x20'))), Limit::kHeaderBlock);
}

TEST_F(FramesTest, PriorityIsNotPartOfTheList) {
  const std::string block = "\xff\xff\xff\xff\xff\x82\x86\x84"s;
  EXPECT_EQ(Get(Frame(kHeaders, kEndHeaders | 0x20, 1, block)), Limit::kNone);
}

// --- streams

TEST_F(FramesTest, StreamsAreBounded) {
  for (const uint32_t stream : {1U, 3U, 5U, 7U, 9U}) EXPECT_EQ(Get(Open(stream)), Limit::kNone);
  EXPECT_EQ(frames_.open(), 5);
  EXPECT_EQ(Get(Open(11)), Limit::kStreams);
}

TEST_F(FramesTest, AStreamEndsWithTheServersAnswerOrAReset) {
  uint32_t stream = 1;
  for (const FrameType type : {kHeaders, kReset}) {
    EXPECT_EQ(Get(Open(stream)), Limit::kNone);
    EXPECT_EQ(frames_.open(), 1);
    Send(Frame(type, kEndStream | kEndHeaders, stream, "\0\0\0\0"s));
    EXPECT_EQ(frames_.open(), 0);
    stream += 2;
  }
  EXPECT_EQ(Get(Open(stream) + Frame(kReset, 0, stream, "\0\0\0\x8"s)), Limit::kNone);
  EXPECT_EQ(frames_.open(), 0);
}

TEST_F(FramesTest, AStreamThatOnlyThePeerHasEndedIsOpen) {
  EXPECT_EQ(Get(Open(1) + Frame(kData, kEndStream, 1, Message(10))), Limit::kNone);
  EXPECT_EQ(frames_.open(), 1);
}

TEST_F(FramesTest, ResetsOfOpenStreamsAreBounded) {
  const auto reset = [this](uint32_t stream) {
    return Get(Open(stream) + Frame(kReset, 0, stream, "\0\0\0\x8"s));
  };
  for (const uint32_t stream : {1U, 3U, 5U}) EXPECT_EQ(reset(stream), Limit::kNone);
  now_ += kSecond;  // one more
  EXPECT_EQ(reset(7), Limit::kNone);
  EXPECT_EQ(reset(9), Limit::kResets);
}

TEST_F(FramesTest, CallsThatEndAllowResetsOfOthers) {
  for (uint32_t stream = 1; stream < 60; stream += 4) {
    ASSERT_EQ(Get(Open(stream) + Open(stream + 2)), Limit::kNone);
    Send(Frame(kHeaders, kEndStream | kEndHeaders, stream, "\x88"));
    ASSERT_EQ(Get(Frame(kReset, 0, stream + 2, "\0\0\0\0"s)), Limit::kNone);
  }
}

// Under load an honest peer gives up every call that waits for too long.
TEST_F(FramesTest, ResetsAfterTheTimeoutOfACallAreFree) {
  std::string block;
  AppendField("grpc-timeout", "200m", &block);
  for (uint32_t stream = 1; stream < 100; stream += 2) {
    ASSERT_EQ(Get(Frame(kHeaders, kEndHeaders, stream, block)), Limit::kNone);
    now_ += kSecond / 5;
    ASSERT_EQ(Get(Frame(kReset, 0, stream, "\0\0\0\x8"s)), Limit::kNone);
  }
  Limit limit = Limit::kNone;
  for (uint32_t stream = 101; stream < 120 && limit == Limit::kNone; stream += 2) {
    ASSERT_EQ(Get(Frame(kHeaders, kEndHeaders, stream, block)), Limit::kNone);
    now_ += 1000;
    limit = Get(Frame(kReset, 0, stream, "\0\0\0\x8"s));
  }
  EXPECT_EQ(limit, Limit::kResets) << "before it they count";
}

TEST_F(FramesTest, ResetsOfEndedStreamsAreFree) {
  for (uint32_t stream = 1; stream < 60; stream += 2) {
    ASSERT_EQ(Get(Open(stream)), Limit::kNone);
    Send(Frame(kHeaders, kEndStream | kEndHeaders, stream, "\x88"));
    ASSERT_EQ(Get(Frame(kReset, 0, stream, "\0\0\0\0"s)), Limit::kNone);
  }
}

// --- messages

TEST_F(FramesTest, MessagesOfAnySizeAreUnderWayUntilTheyEnd) {
  EXPECT_EQ(Get(Open(1)), Limit::kNone);
  EXPECT_EQ(Get(Frame(kData, 0, 1, Message(40000).substr(0, 16384))), Limit::kNone);
  EXPECT_EQ(frames_.under_way(), 16384 + limits_.frame_cost);
  EXPECT_EQ(Get(Frame(kData, 0, 1, Message(40000).substr(16384, 16384))), Limit::kNone);
  EXPECT_EQ(Get(Frame(kData, 0, 1, Message(40000).substr(32768))), Limit::kNone);
  EXPECT_EQ(frames_.under_way(), 0);
  EXPECT_EQ(frames_.message_bytes(), 40005);
}

TEST_F(FramesTest, AStreamThatEndsTakesItsBytesWithIt) {
  EXPECT_EQ(Get(Open(1) + Frame(kData, 0, 1, Message(40000).substr(0, 16384))), Limit::kNone);
  Send(Frame(kReset, 0, 1, "\0\0\0\x8"s));
  EXPECT_EQ(frames_.under_way(), 0);
}

TEST_F(FramesTest, ManyMessagesInOneFrameAndSmallMessagesInTheirOwnAreFine) {
  std::string many;
  for (int i = 0; i < 400; ++i) many += Message(30);
  EXPECT_EQ(Get(Open(1)), Limit::kNone);
  OpenWindows();
  EXPECT_EQ(GetTimes(50, Frame(kData, 0, 1, many)), Limit::kNone);
  for (int i = 0; i < 50; ++i) {
    Send(Frame(kWindowUpdate, 0, 1, "\0\0\x10\0"s));
    EXPECT_EQ(GetTimes(20, Frame(kData, 0, 1, Message(30))), Limit::kNone);
  }
  EXPECT_EQ(frames_.under_way(), 0);
}

TEST_F(FramesTest, APrefixInAFrameOfItsOwnIsFine) {
  EXPECT_EQ(Get(Open(1)), Limit::kNone);
  for (int i = 0; i < 100; ++i) {
    Send(Frame(kWindowUpdate, 0, 1, "\0\0\x10\0"s));
    EXPECT_EQ(Get(Frame(kData, 0, 1, Prefix(20)) + Frame(kData, 0, 1, std::string(20, 'm'))),
              Limit::kNone);
  }
}

TEST_F(FramesTest, AMessageInFramesOfOneByteIsNot) {
  EXPECT_EQ(Get(Open(1) + Frame(kData, 0, 1, Prefix(1 << 26))), Limit::kNone);
  EXPECT_EQ(GetTimes(21, Frame(kData, 0, 1, "z")), Limit::kNone);
  EXPECT_EQ(Get(Frame(kData, 0, 1, "z")), Limit::kTinyFrames);
}

TEST_F(FramesTest, TinyFramesMayBeFewInASecondAndFewBesideLargeOnes) {
  EXPECT_EQ(Get(Open(1) + Frame(kData, 0, 1, Prefix(1 << 26))), Limit::kNone);
  OpenWindows();
  for (int second = 0; second < 10; ++second) {
    EXPECT_EQ(GetTimes(10, Frame(kData, 0, 1, "z")), Limit::kNone);
    now_ += kSecond;
  }
  for (int i = 0; i < 10; ++i) {
    EXPECT_EQ(GetTimes(10, Frame(kData, 0, 1, "z")), Limit::kNone);
    EXPECT_EQ(Get(Frame(kData, 0, 1, std::string(16384, 'z'))), Limit::kNone);
  }
}

TEST_F(FramesTest, EmptyFramesAreTinyUnlessTheyEndTheStream) {
  for (uint32_t stream = 1; stream < 100; stream += 2) {
    ASSERT_EQ(Get(Open(stream) + Frame(kData, kEndStream, stream, "")), Limit::kNone);
    Send(Frame(kHeaders, kEndStream | kEndHeaders, stream, "\x88"));
  }
  EXPECT_EQ(Get(Open(101)), Limit::kNone);
  EXPECT_EQ(GetTimes(30, Frame(kData, 0, 101, "")), Limit::kTinyFrames);
}

// Each message is one small frame, and nobody reads them.
TEST_F(FramesTest, SmallMessagesThatAreNotReadAreTiny) {
  EXPECT_EQ(Get(Open(1)), Limit::kNone);
  EXPECT_EQ(GetTimes(100, Frame(kData, 0, 1, Message(0))), Limit::kNone);
  EXPECT_EQ(GetTimes(30, Frame(kData, 0, 1, Message(0))), Limit::kTinyFrames);
}

TEST_F(FramesTest, FramesOfAnEndedStreamCountToo) {
  EXPECT_EQ(GetTimes(30, Frame(kData, 0, 1, "z")), Limit::kTinyFrames);
}

// --- what calls asked for

TEST_F(FramesTest, BytesThatNoCallAskedForAreBounded) {
  limits_.unasked_slack = 1000;
  limits_.unasked_stream = 500;
  const std::string kib(1024, 'z');
  EXPECT_EQ(Get(Open(1) + Frame(kData, 0, 1, Prefix(1 << 26) + kib)), Limit::kNone);
  for (Frames* frames : {&frames_, &bytewise_}) frames->Ask(4000);
  EXPECT_EQ(GetTimes(4, Frame(kData, 0, 1, kib)), Limit::kNone);
  for (Frames* frames : {&frames_, &bytewise_}) frames->Got(4000);
  EXPECT_EQ(Get(Frame(kData, 0, 1, "z")), Limit::kUnasked);
}

// The transport ends the call before the peer knows: no peer is cut for what it had begun to send.
TEST_F(FramesTest, BytesOfACallThatGaveUpMayStillCome) {
  limits_.unasked_slack = 1000;
  limits_.unasked_stream = 500;
  const std::string kib(1024, 'z');
  for (Frames* frames : {&frames_, &bytewise_}) frames->Ask(8000);
  EXPECT_EQ(Get(Open(1) + Frame(kData, 0, 1, Prefix(1 << 26) + kib + kib)), Limit::kNone);
  for (Frames* frames : {&frames_, &bytewise_}) frames->GiveUp(8000);
  EXPECT_EQ(Get(Frame(kData, 0, 1, kib)), Limit::kNone);
  now_ += kSecond;
  EXPECT_EQ(Get(Frame(kData, 0, 1, "z")), Limit::kNone);
  now_ += kSecond;
  EXPECT_EQ(Get(Frame(kData, 0, 1, "z")), Limit::kUnasked);
}

// --- control frames

TEST_F(FramesTest, ControlFramesAreBoundedInTime) {
  const std::string update = Frame(kWindowUpdate, 0, 0, "\0\0\0\1"s);
  EXPECT_EQ(GetTimes(49, update), Limit::kNone);  // and the settings
  now_ += kSecond / 10;
  EXPECT_EQ(GetTimes(10, update), Limit::kNone);
  EXPECT_EQ(Get(update), Limit::kControlFrames);
}

TEST_F(FramesTest, APeerThatTakesAnswersMayMoveItsWindow) {
  for (int i = 0; i < 100; ++i) {
    Send(Frame(kData, 0, 1, std::string(16384, 'a')));
    EXPECT_EQ(GetTimes(4, Frame(kWindowUpdate, 0, 0, "\0\0\0\1"s)), Limit::kNone);
  }
}

TEST_F(FramesTest, ConfirmationsThatThePeerDoesNotTakeAreBounded) {
  limits_.min_ping_interval_ns = 0;
  for (int i = 0; i < 20; ++i) {
    EXPECT_EQ(GetTimes(3, Frame(kPing, 0, 0, "12345678")), Limit::kNone);
    for (int ping = 0; ping < 3; ++ping) Send(Frame(kPing, kAck, 0, "12345678"));
    now_ += kSecond;
  }
  EXPECT_EQ(GetTimes(50, Frame(kPing, 0, 0, "12345678")), Limit::kUnreadAnswers);
}

const std::string kAPing = Frame(kPing, 0, 0, "12345678");

TEST_F(FramesTest, PingsAreBoundedInTime) {
  EXPECT_EQ(GetTimes(3, kAPing), Limit::kNone);
  now_ += kSecond;
  EXPECT_EQ(Get(kAPing), Limit::kNone);
  now_ += kSecond - 1;
  EXPECT_EQ(Get(kAPing), Limit::kPings);
}

TEST_F(FramesTest, APeerMayPingAtTheIntervalForever) {
  EXPECT_EQ(GetTimes(3, kAPing), Limit::kNone);
  for (int i = 0; i < 1000; ++i) {
    now_ += kSecond;
    ASSERT_EQ(Get(kAPing), Limit::kNone) << i;
    Send(Frame(kPing, kAck, 0, "12345678"));
  }
}

// A ping that is late is followed by one that seems early: the rate over a longer time counts.
TEST_F(FramesTest, PingsOfAnIntervalMayComeTogether) {
  for (int i = 0; i < 300; ++i) {
    now_ += 3 * kSecond;
    ASSERT_EQ(GetTimes(3, kAPing), Limit::kNone) << i;
    Send(Frame(kPing, kAck, 0, "12345678"));
    Send(Frame(kPing, kAck, 0, "12345678"));
    Send(Frame(kPing, kAck, 0, "12345678"));
  }
}

TEST_F(FramesTest, SilenceEarnsNoMorePingsThanMayComeAtOnce) {
  now_ += 3600 * kSecond;
  EXPECT_EQ(GetTimes(3, kAPing), Limit::kNone);
  EXPECT_EQ(Get(kAPing), Limit::kPings);
}

TEST_F(FramesTest, AClockThatGoesBackCutsNobody) {
  EXPECT_EQ(Get(kAPing), Limit::kNone);
  now_ -= 3600 * kSecond;
  EXPECT_EQ(GetTimes(2, kAPing), Limit::kNone);
  now_ += kSecond;
  EXPECT_EQ(Get(kAPing), Limit::kNone);
}

TEST_F(FramesTest, EachFrameOfAnAnswerAllowsAPing) {
  for (int i = 0; i < 30; ++i) {
    Send(i == 0 ? Frame(kHeaders, kEndHeaders, 1, "") : Frame(kData, 0, 1, "a"));
    ASSERT_EQ(Get(kAPing), Limit::kNone) << i;
    Send(Frame(kPing, kAck, 0, "12345678"));
  }
  EXPECT_EQ(GetTimes(2, kAPing), Limit::kNone);
  Send(Frame(kSettings, 0, 0, "") + Frame(kWindowUpdate, 0, 0, "\0\0\0\1"s));
  EXPECT_EQ(Get(kAPing), Limit::kPings);
}

TEST_F(FramesTest, ConfirmationsOfPingsAreNoPings) {
  EXPECT_EQ(GetTimes(30, Frame(kPing, kAck, 0, "12345678")), Limit::kNone);
  EXPECT_EQ(GetTimes(3, kAPing), Limit::kNone);
}

TEST_F(FramesTest, WithoutAnIntervalThereMayBeAnyNumberOfPings) {
  const FrameLimits any = {.min_ping_interval_ns = 0};
  Frames frames(any, now_);
  EXPECT_EQ(frames.Received(Bytes(Preface()), now_), Limit::kNone);
  for (int i = 0; i < 1000; ++i) ASSERT_EQ(frames.Received(Bytes(kAPing), now_), Limit::kNone);
}

TEST_F(FramesTest, ABrokenLimitStays) {
  EXPECT_EQ(GetTimes(30, Frame(kData, 0, 1, "z")), Limit::kTinyFrames);
  now_ += 100 * kSecond;
  EXPECT_EQ(Get(Open(1)), Limit::kTinyFrames);
}

// --- windows

// A connection whose calls on streams 4n + 3 are refused, and whose peer keeps to its windows.
class WindowsTest : public ::testing::Test {
 protected:
  static constexpr int64_t kUsual = 65535;

  WindowsTest() { Receive(Preface() + Frame(kSettings, 0, 0, "")); }

  // Returns what gRPC's bytes become.
  std::string Offer(std::string bytes) {
    iovec part = {bytes.data(), bytes.size()};
    frames_.Offer({&part, 1});
    frames_.Sent(Bytes(bytes));
    return bytes;
  }
  // Returns what gRPC gets.
  std::string Receive(std::string bytes) {
    frames_.BeginRead();
    const Limit limit = frames_.Received(
        Bytes(bytes), 0, [](uint32_t stream, bool, const auto&) { return stream % 4 == 3; });
    EXPECT_EQ(limit, Limit::kNone);
    iovec part = {bytes.data(), bytes.size()};
    std::string beyond;
    bytes.resize(ApplyEdits({&part, 1}, bytes.size(), frames_.edits(), &beyond));
    TakeReplies();
    return bytes + beyond;
  }
  void EndStreams(std::initializer_list<uint32_t> streams) {
    for (const uint32_t stream : streams) {
      frames_.Sent(Bytes(Frame(kHeaders, kEndHeaders | kEndStream, stream, "\x88")));
      windows_.erase(stream);
    }
  }
  // What the peer may send on a stream that it opens or has opened.
  int64_t WindowOf(uint32_t stream) { return windows_.try_emplace(stream, initial_).first->second; }
  void TakeReplies() {
    std::string replies = frames_.TakeReplies();
    while (!replies.empty()) {
      const auto number = [&](size_t at, int bytes) {
        int64_t value = 0;
        while (bytes-- > 0) value = value << 8 | static_cast<uint8_t>(replies[at++]);
        return value;
      };
      const auto size = static_cast<size_t>(number(0, 3));
      if (number(3, 1) == kSettings) {
        EXPECT_EQ(number(9, 2), 4) << "SETTINGS_INITIAL_WINDOW_SIZE";
        const int64_t change = number(11, 4) - std::exchange(initial_, number(11, 4));
        for (auto& [stream, window] : windows_) window += change;
        ++settings_;
      } else {
        EXPECT_EQ(number(3, 1), kWindowUpdate);
        const auto stream = static_cast<uint32_t>(number(5, 4));
        WindowOf(stream);
        windows_[stream] += number(9, 4);
      }
      replies.erase(0, 9 + size);
    }
  }

  const FrameLimits limits_;
  Frames frames_{limits_, 0};
  int64_t initial_ = kUsual;
  int settings_ = 0;
  std::map<uint32_t, int64_t> windows_;  // of open streams
};

TEST_F(WindowsTest, WithoutRefusalsNothingIsSaid) {
  Receive(Open(1) + Open(5));
  frames_.EndRefusals();
  TakeReplies();
  EXPECT_EQ(settings_, 0);
}

TEST_F(WindowsTest, AfterARefusalOnlyCallsThatPassMaySendMessages) {
  WindowOf(1);
  Receive(Open(1) + Open(3) + Open(5));
  EXPECT_EQ(settings_, 1);
  EXPECT_EQ(WindowOf(1), kUsual) << "open before";
  EXPECT_EQ(WindowOf(5), kUsual) << "in the same read";
  Receive(Open(7));
  EXPECT_EQ(WindowOf(7), 0);
  Receive(Open(9));
  EXPECT_EQ(WindowOf(9), kUsual);
  Receive(Frame(kHeaders, kEndHeaders | kEndStream, 13, "\x83\x86\x84"));
  EXPECT_EQ(WindowOf(13), 0) << "it has no message";
  EXPECT_EQ(settings_, 1) << "said once";
}

TEST_F(WindowsTest, TheUsualWindowComesBackWhenNoStreamIsOpen) {
  Receive(Open(1) + Open(3));
  EXPECT_EQ(initial_, 0);
  frames_.EndRefusals();
  EXPECT_FALSE(frames_.has_replies()) << "the peer has not acknowledged the first change";
  Receive(Frame(kSettings, kAck, 0, ""));
  frames_.EndRefusals();
  EXPECT_FALSE(frames_.has_replies()) << "stream 1 would get a second window";
  EndStreams({1});
  frames_.EndRefusals();
  TakeReplies();
  EXPECT_EQ(initial_, kUsual);
  Receive(Open(5));
  EXPECT_EQ(WindowOf(5), kUsual);
  // A refusal before the peer's acknowledgement changes nothing, one after it closes them again.
  Receive(Open(7));
  EXPECT_EQ(settings_, 2);
  Receive(Frame(kSettings, kAck, 0, "") + Open(11));
  EXPECT_EQ(settings_, 3);
  EXPECT_EQ(WindowOf(5), kUsual);
}

TEST_F(WindowsTest, AFrameThatGrpcSkipsTakesThePlaceOfARefusedList) {
  const std::string list = Open(3);
  const std::string message = Frame(kData, 0, 3, std::string(2000, 'm'));
  const std::string got = Receive(list + message);
  ASSERT_EQ(got.size(), list.size() + message.size()) << "nothing is moved";
  const char payload = static_cast<char>(list.size() - Frames::kHeadBytes);
  EXPECT_EQ(got.substr(0, Frames::kHeadBytes), std::string({0, 0, payload, '\xe7', 0, 0, 0, 0, 0}));
  EXPECT_EQ(got.substr(list.size()), message);
}

TEST_F(WindowsTest, GrpcSeesTheAcknowledgementsOfItsOwnSettingsOnly) {
  const std::string ack = Frame(kSettings, kAck, 0, "");
  Offer(Frame(kSettings, 0, 0, ""));
  EXPECT_EQ(Receive(ack), ack);
  Offer(Frame(kSettings, 0, 0, ""));
  Receive(Open(3));
  EXPECT_EQ(Receive(ack.substr(0, 5)), "");
  EXPECT_EQ(Receive(ack.substr(5)), ack) << "the second of gRPC";
  EXPECT_EQ(Receive(ack), "") << "the door's";
  EXPECT_EQ(Receive(ack), ack) << "of nothing: gRPC decides";
}

// --- messages that are too large

// What gRPC gets of `bytes`, which come in reads of `size` bytes, and the calls that ended.
class TooLargeTest : public ::testing::Test {
 protected:
  std::string Receive(const std::string& bytes, size_t size) {
    std::string got;
    for (size_t at = 0; at < bytes.size() && broken_ == Limit::kNone; at += size) {
      std::string read = bytes.substr(at, size);
      frames_->BeginRead();
      broken_ = frames_->Received(Bytes(read), 0);
      iovec part = {read.data(), read.size()};
      std::string beyond;
      read.resize(ApplyEdits({&part, 1}, read.size(), frames_->edits(), &beyond));
      got += read + beyond;
    }
    return got;
  }
  // Returns what the peer gets of gRPC's bytes.
  std::string Send(std::string bytes) {
    iovec part = {bytes.data(), bytes.size()};
    frames_->Offer({&part, 1});
    frames_->Sent(Bytes(bytes));
    for (const auto& call : frames_->too_large()) ended_.push_back(call);
    frames_->too_large().clear();
    return bytes;
  }
  // gRPC confirms SETTINGS.
  std::string Confirm() { return Send(Confirmation()); }
  static std::string Confirmation() { return Frame(kSettings, kAck, 0, ""); }

  const FrameLimits limits_ = {.max_message = 100};
  std::optional<Frames> frames_{std::in_place, limits_, 0};
  Limit broken_ = Limit::kNone;
  std::vector<Frames::TooLarge> ended_;
};

TEST_F(TooLargeTest, ACallEndsWhereTheLengthIsReadHoweverItIsCut) {
  const std::string before = Preface() + Open(1) + Open(3) + Frame(kData, 0, 3, Message(100));
  const std::string rest = std::string(80, 'm');
  const std::string after = Frame(kData, 0, 1, rest) + Frame(kData, 0, 3, Message(7));
  const std::string sent = before + Frame(kData, 0, 1, Prefix(101) + rest) + after;
  std::string reset;
  AppendReset(1, 8, &reset);
  const std::string wanted =
      before + Frame(kData, 0, 1, Prefix(81) + rest) + reset + Frame(kSettings, 0, 0, "") + after;
  for (size_t size = 1; size <= sent.size(); ++size) {
    frames_.emplace(limits_, 0);
    ended_.clear();
    EXPECT_EQ(Receive(sent, size), wanted) << size;
    EXPECT_TRUE(ended_.empty()) << "gRPC may still send headers";
    Confirm();
    ASSERT_EQ(ended_.size(), 1) << size;
    EXPECT_EQ(ended_[0].stream, 1);
    EXPECT_EQ(ended_[0].bytes, 101);
    EXPECT_FALSE(ended_[0].ended);
    EXPECT_FALSE(ended_[0].answered);
    EXPECT_EQ(frames_->open(), 1) << size;
    EXPECT_EQ(frames_->under_way(), 0) << size;
    EXPECT_EQ(broken_, Limit::kNone);
  }
}

TEST_F(TooLargeTest, APrefixInTwoFramesReachesGrpcWhole) {
  const std::string message = Message(100);
  const std::string sent = Preface() + Open(1) + Frame(kData, 0, 1, message.substr(0, 3)) +
                           Frame(kData, 0, 1, message.substr(3));
  for (size_t size = 1; size <= sent.size(); ++size) {
    frames_.emplace(limits_, 0);
    EXPECT_EQ(Receive(sent, size), sent) << size;
    EXPECT_EQ(broken_, Limit::kNone);
  }
  const std::string large = Preface() + Open(1) + Frame(kData, 0, 1, "\0\xff\xff"s);
  for (const size_t size : {size_t{1}, size_t{50}, size_t{1000}}) {
    frames_.emplace(limits_, 0);
    broken_ = Limit::kNone;
    Receive(large + Frame(kData, 0, 1, "\xff\xff"s), size);
    EXPECT_EQ(broken_, Limit::kUnasked) << "gRPC has a part of the length";
    EXPECT_TRUE(ended_.empty());
  }
}

TEST_F(TooLargeTest, SaysWhatThePeerKnowsOfTheCall) {
  Receive(Preface() + Open(1) + Open(3), 1000);
  Send(Frame(kHeaders, kEndHeaders, 1, "\x88"));
  Receive(Frame(kData, 0, 1, Message(100)), 1000);
  Receive(Frame(kData, 0, 1, Prefix(4294967295)), 1000);
  Receive(Frame(kData, kEndStream, 3, Prefix(101)), 1000);
  Send(Confirmation() + Confirmation());
  ASSERT_EQ(ended_.size(), 2);
  EXPECT_TRUE(ended_[0].answered);
  EXPECT_EQ(ended_[0].bytes, 4294967295);
  EXPECT_FALSE(ended_[0].ended);
  EXPECT_FALSE(ended_[1].answered);
  EXPECT_TRUE(ended_[1].ended);
}

// A strict peer ends the connection where frames follow the end of a stream.
TEST_F(TooLargeTest, NoFrameOfGrpcFollowsTheEndThatThePeerGets) {
  Receive(Preface() + Frame(kSettings, 0, 0, "") + Open(1) + Open(3) + Open(5), 1000);
  for (const uint32_t stream : {1U, 3U, 5U}) Receive(Frame(kData, 0, stream, Prefix(101)), 1000);
  Receive(Frame(kSettings, 0, 0, ""), 1000);
  EXPECT_EQ(Confirm(), Confirmation()) << "of the peer's";
  Send(Frame(kHeaders, kEndHeaders, 1, "\x88"));
  Send(Frame(kHeaders, kEndHeaders | kEndStream, 3, "\x88"));
  EXPECT_TRUE(ended_.empty()) << "gRPC has not read the resets";
  const std::string own = Confirm();
  EXPECT_EQ(own.substr(0, 3), Confirmation().substr(0, 3)) << "an empty frame";
  EXPECT_EQ(own.substr(3, 2), "\xe7\1") << "of a type that peers ignore";
  ASSERT_EQ(ended_.size(), 1);
  EXPECT_EQ(ended_[0].stream, 1);
  EXPECT_TRUE(ended_[0].answered) << "so it is reset";
  Confirm();
  EXPECT_EQ(ended_.size(), 1) << "gRPC has ended stream 3";
  Confirm();
  ASSERT_EQ(ended_.size(), 2);
  EXPECT_EQ(ended_[1].stream, 5);
  EXPECT_FALSE(ended_[1].answered);
  EXPECT_EQ(Confirm(), Confirmation()) << "of the peer's second";
}

TEST_F(TooLargeTest, ACallThatTheServerEndsFirstIsNotEndedTwice) {
  Receive(Preface() + Open(1), 1000);
  const std::string frame = Frame(kData, 0, 1, Prefix(101) + "mmm");
  Receive(frame.substr(0, frame.size() - 1), 1000);
  frames_->Sent(Bytes(Frame(kHeaders, kEndHeaders | kEndStream, 1, "\x88")));
  EXPECT_EQ(Receive(frame.substr(frame.size() - 1), 1000), "m");
  EXPECT_TRUE(ended_.empty());
}

TEST_F(TooLargeTest, ACallThatTheServerEndsInsideALengthLosesNoByte) {
  const std::string frame = Frame(kData, 0, 1, Message(10));
  for (size_t cut = 10; cut < frame.size(); ++cut) {
    frames_.emplace(limits_, 0);
    Receive(Preface() + Open(1), 1000);
    std::string got = Receive(frame.substr(0, cut), 1);
    frames_->Sent(Bytes(Frame(kHeaders, kEndHeaders | kEndStream, 1, "\x88")));
    got += Receive(frame.substr(cut) + Open(3), 1000);
    EXPECT_EQ(got, frame + Open(3)) << cut;
  }
}

TEST_F(TooLargeTest, SuchCallsAreBoundedLikeResets) {
  std::string flood = Preface();
  for (uint32_t i = 0; i <= limits_.resets; ++i) {
    flood += Open(2 * i + 1) + Frame(kData, 0, 2 * i + 1, Prefix(101));
  }
  Receive(flood, 1000);
  EXPECT_EQ(broken_, Limit::kResets);
}

}  // namespace
}  // namespace logitd::door
