#include "server/door/windows.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <map>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "server/door/edit.h"
#include "server/door/frames.h"
#include "tests/door/bytes.h"

namespace logitd::door {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;
constexpr int64_t kUsual = Windows::kUsual;

std::string Number(int64_t value, int bytes) {
  std::string out;
  while (bytes-- > 0) out.push_back(static_cast<char>(value >> (8 * bytes)));
  return out;
}
int64_t NumberAt(std::string_view text, size_t at, int bytes) {
  int64_t value = 0;
  while (bytes-- > 0) value = value << 8 | static_cast<uint8_t>(text[at++]);
  return value;
}
std::string Initial(int64_t bytes) {
  return Frame(kSettings, 0, 0, Number(5, 2) + Number(16384, 4) + Number(4, 2) + Number(bytes, 4));
}
std::string Update(uint32_t stream, int64_t bytes) {
  return Frame(kWindowUpdate, 0, stream, Number(bytes, 4));
}
std::string End(uint32_t stream) {
  return Frame(kHeaders, kEndHeaders | kEndStream, stream, "\x88");
}

// A peer, the door and gRPC. The peer and gRPC count their windows as RFC 9113 says; gRPC announces
// 4 MiB as gRPC 1.51 does, and asks for messages as it does.
class Line {
 public:
  explicit Line(int64_t room) : room_(room) {
    frames_.emplace(limits_, 0, &room_);
    ToGrpc(Preface() + Frame(kSettings, 0, 0, ""));
    ToPeer(Initial(4 * kMiB) + Update(0, 4 * kMiB - kUsual));
  }

  // --- the peer

  void OpenStream(uint32_t stream) {
    ToGrpc(Open(stream));
    peer_.try_emplace(stream, peer_initial_);
    grpc_.try_emplace(stream);
  }
  int64_t MaySend(uint32_t stream) { return std::min(peer_connection_, peer_.at(stream)); }
  // A DATA frame. It must fit the windows of both sides.
  void SendData(uint32_t stream, const std::string& bytes) {
    const auto size = static_cast<int64_t>(bytes.size());
    peer_connection_ -= size;
    peer_.at(stream) -= size;
    EXPECT_GE(peer_connection_, 0);
    EXPECT_GE(peer_.at(stream), 0);
    grpc_connection_ -= size;
    EXPECT_GE(grpc_connection_, 0) << "gRPC would end the connection";
    if (const auto call = grpc_.find(stream); call != grpc_.end()) {
      call->second.delta -= size;
      call->second.came += size;
      EXPECT_GE(call->second.delta + grpc_initial_, 0) << "gRPC would end the connection";
    }
    ToGrpc(Frame(kData, 0, stream, bytes));
  }
  void Acknowledge() {
    for (; unacknowledged_ > 0; --unacknowledged_) ToGrpc(Frame(kSettings, kAck, 0, ""));
  }

  // --- gRPC

  // A call reads its message, of which `left` bytes have not come.
  void Ask(uint32_t stream, int64_t left) {
    Call& call = grpc_.at(stream);
    if (!std::exchange(call.reads, true)) {
      call.asked = call.came + left;
      frames_->Ask(call.asked);
    }
    // As gRPC 1.51 does: when what it asked for before has come.
    const int64_t wanted = std::min(left, kMiB);
    if (call.delta >= 0 || wanted <= call.delta) return;
    const int64_t more = wanted - call.delta;
    call.delta += more;
    ToPeer(Update(stream, more));
  }
  void EndCall(uint32_t stream) {
    frames_->Got(grpc_.at(stream).asked);
    ToPeer(End(stream));
    grpc_.erase(stream);
    peer_.erase(stream);
  }
  void GiveConnection() {
    if (grpc_connection_ > 2 * kMiB) return;
    ToPeer(Update(0, 4 * kMiB - grpc_connection_));
  }
  // Bytes that came and that no call reads.
  int64_t unread() const {
    int64_t sum = 0;
    for (const auto& [_, call] : grpc_) sum += call.reads ? 0 : call.came;
    return sum;
  }

  Frames& frames() { return *frames_; }
  int64_t room() const { return room_.left(); }
  int64_t initial() const { return peer_initial_; }
  int64_t connection() const { return peer_connection_; }
  Limit broken() const { return broken_; }
  void Disconnect() { frames_.reset(); }
  void Wait(int64_t ns) { now_ += ns; }
  bool refuses_ = false;

  void ToGrpc(std::string bytes) {
    frames_->BeginRead();
    broken_ = frames_->Received(Bytes(bytes), now_,
                                [this](uint32_t, bool, const HeaderList&) { return refuses_; });
    TellPeer(frames_->TakeReplies());
  }

  // Bytes of gRPC, in two parts as if of two slices.
  void ToPeer(std::string bytes) {
    for (std::string_view rest = bytes; !rest.empty();
         rest.remove_prefix(9 + NumberAt(rest, 0, 3))) {
      const int64_t type = NumberAt(rest, 3, 1);
      const auto stream = static_cast<uint32_t>(NumberAt(rest, 5, 4));
      if (type == kWindowUpdate && stream == 0) grpc_connection_ += NumberAt(rest, 9, 4);
    }
    const size_t cut = bytes.size() / 2;
    iovec parts[] = {{bytes.data(), cut}, {bytes.data() + cut, bytes.size() - cut}};
    frames_->Offer(parts);
    EXPECT_TRUE(frames_->offers_whole_frames());
    EXPECT_FALSE(frames_->between_sent_frames());
    frames_->Offer(parts);  // again after a write that took nothing: changes nothing
    frames_->Sent(Bytes(bytes));
    EXPECT_TRUE(frames_->between_sent_frames());
    TellPeer(bytes + frames_->TakeReplies());
  }

 private:
  struct Call {
    int64_t delta = 0;  // what gRPC asked for less what came
    int64_t came = 0;
    int64_t asked = 0;
    bool reads = false;
  };

  void TellPeer(std::string_view bytes) {
    for (; !bytes.empty(); bytes.remove_prefix(9 + NumberAt(bytes, 0, 3))) {
      const int64_t type = NumberAt(bytes, 3, 1);
      const auto stream = static_cast<uint32_t>(NumberAt(bytes, 5, 4));
      if (type == kSettings) {
        ++unacknowledged_;
        for (int64_t at = 9; at < 9 + NumberAt(bytes, 0, 3); at += 6) {
          if (NumberAt(bytes, at, 2) != 4) continue;
          const int64_t change = NumberAt(bytes, at + 2, 4) - peer_initial_;
          peer_initial_ += change;
          for (auto& [_, window] : peer_) window += change;
        }
      } else if (type == kWindowUpdate) {
        const int64_t more = NumberAt(bytes, 9, 4);
        EXPECT_GT(more, 0) << "a protocol error";
        if (stream == 0) {
          peer_connection_ += more;
        } else if (const auto open = peer_.find(stream); open != peer_.end()) {
          open->second += more;
        }
      }
    }
  }

  const FrameLimits limits_;
  EarlyRoom room_;
  std::optional<Frames> frames_;
  int64_t now_ = 1;
  Limit broken_ = Limit::kNone;
  int64_t peer_initial_ = kUsual;
  int64_t peer_connection_ = kUsual;
  std::map<uint32_t, int64_t> peer_;
  int unacknowledged_ = 0;
  const int64_t grpc_initial_ = 4 * kMiB;
  int64_t grpc_connection_ = kUsual;
  std::map<uint32_t, Call> grpc_;
};

// Sends a message as far as the windows allow. Returns what is left.
std::string SendSome(Line& line, uint32_t stream, std::string message) {
  while (!message.empty() && line.MaySend(stream) > 0) {
    const int64_t run = std::min<int64_t>({line.MaySend(stream), 16384, std::ssize(message)});
    line.SendData(stream, message.substr(0, run));
    message.erase(0, run);
  }
  return message;
}

// One call with a message of `bytes`, which is read when as much came as may.
void Call(Line& line, uint32_t stream, size_t bytes) {
  line.OpenStream(stream);
  std::string rest = SendSome(line, stream, Message(bytes));
  while (!rest.empty()) {
    line.Ask(stream, std::ssize(rest));
    line.GiveConnection();
    const size_t before = rest.size();
    rest = SendSome(line, stream, std::move(rest));
    ASSERT_LT(rest.size(), before);
  }
  line.EndCall(stream);
}

TEST(WindowsOfPeersTest, APeerGetsTheUsualWindowsInPlaceOfGrpcs) {
  Line line(64 * kMiB);
  EXPECT_EQ(line.initial(), kUsual);
  EXPECT_LE(line.connection(), kUsual + 1);
  line.Acknowledge();
  line.OpenStream(1);
  EXPECT_EQ(SendSome(line, 1, std::string(100000, '\0')).size(), 100000 - kUsual);
}

TEST(WindowsOfPeersTest, AMessageThatIsReadComesInParts) {
  Line line(0);
  line.Acknowledge();
  Call(line, 1, 30 * kMiB);
  EXPECT_EQ(line.initial(), kUsual) << "there is no room for early bytes";
  EXPECT_EQ(line.broken(), Limit::kNone);
}

TEST(WindowsOfPeersTest, AfterALargeMessageTheNextOneComesWithItsHeaders) {
  Line line(64 * kMiB);
  line.Acknowledge();
  Call(line, 1, 512 << 10);
  line.Acknowledge();
  EXPECT_EQ(line.initial(), 9 << 16);
  for (uint32_t stream = 3; stream < 100; stream += 2) {
    line.OpenStream(stream);
    ASSERT_EQ(SendSome(line, stream, Message(512 << 10)), "") << stream;
    line.GiveConnection();
    line.EndCall(stream);
  }
  EXPECT_EQ(line.initial(), 9 << 16);
  EXPECT_EQ(line.room(), 64 * kMiB - (9 << 16));
  line.Disconnect();
  EXPECT_EQ(line.room(), 64 * kMiB);
}

TEST(WindowsOfPeersTest, UnreadCallsFillTheShareAndThenGetTheUsualWindow) {
  Line line(64 * kMiB);
  line.Acknowledge();
  Call(line, 1, 512 << 10);
  line.Acknowledge();
  const int64_t share = 64 * kMiB - line.room();
  std::map<uint32_t, std::string> rest;
  for (uint32_t stream = 3; stream < 203; stream += 2) {
    line.OpenStream(stream);
    rest[stream] = SendSome(line, stream, Message(512 << 10));
    line.GiveConnection();
    line.Acknowledge();
  }
  for (auto& [stream, bytes] : rest) bytes = SendSome(line, stream, std::move(bytes));
  EXPECT_EQ(line.initial(), kUsual);
  EXPECT_GT(line.unread(), 100 * kUsual);
  EXPECT_LE(line.unread(), 101 * kUsual + share);
  // Each can still be read, the last first.
  for (auto call = rest.rbegin(); call != rest.rend(); ++call) {
    auto& [stream, bytes] = *call;
    while (!bytes.empty()) {
      line.Ask(stream, std::ssize(bytes));
      line.GiveConnection();
      const size_t before = bytes.size();
      bytes = SendSome(line, stream, std::move(bytes));
      ASSERT_LT(bytes.size(), before) << "the call would wait for ever";
    }
    line.EndCall(stream);
  }
  EXPECT_EQ(line.room(), 64 * kMiB);
  Call(line, 1001, 512 << 10);
  EXPECT_EQ(line.initial(), kUsual) << "not at once again";
  line.Wait(1'000'000'001);
  Call(line, 1003, 512 << 10);
  EXPECT_EQ(line.initial(), 9 << 16);
  EXPECT_EQ(line.room(), 64 * kMiB - 2 * (9 << 16)) << "for two messages";
}

TEST(WindowsOfPeersTest, WithoutAnAcknowledgementTheShareStaysTheBound) {
  Line line(64 * kMiB);
  line.Acknowledge();
  Call(line, 1, kMiB);
  line.Acknowledge();
  const int64_t share = 64 * kMiB - line.room();
  for (uint32_t stream = 3; stream < 203; stream += 2) {
    line.OpenStream(stream);
    SendSome(line, stream, Message(kMiB));
    line.GiveConnection();
  }
  EXPECT_LE(line.unread(), 101 * kUsual + share);
  EXPECT_EQ(line.room(), 64 * kMiB - share);
}

TEST(WindowsOfPeersTest, MoreThanTheConnectionsWindowCutsIt) {
  Line line(64 * kMiB);
  line.OpenStream(1);
  line.OpenStream(3);
  line.ToGrpc(Frame(kData, 0, 1, std::string(50000, '\0')));
  EXPECT_EQ(line.broken(), Limit::kNone);
  line.ToGrpc(Frame(kData, 0, 3, std::string(200000, '\0')));
  EXPECT_EQ(line.broken(), Limit::kUnasked);
}

TEST(WindowsOfPeersTest, MoreThanTheStreamsWindowCutsIt) {
  Line line(64 * kMiB);
  line.OpenStream(1);
  line.ToGrpc(Frame(kData, 0, 1, std::string(50000, '\0')));
  line.ToGrpc(Frame(kData, 0, 1, std::string(15535, '\0')));
  EXPECT_EQ(line.broken(), Limit::kNone);
  line.ToGrpc(Frame(kData, 0, 1, "0"));
  EXPECT_EQ(line.broken(), Limit::kUnasked);
}

TEST(WindowsOfPeersTest, RefusalsEndWideWindowsAndGiveTheirRoomBack) {
  Line line(64 * kMiB);
  line.Acknowledge();
  Call(line, 1, 512 << 10);
  line.Acknowledge();
  line.OpenStream(3);
  const std::string rest = SendSome(line, 3, Message(kMiB));
  EXPECT_LT(rest.size(), kMiB / 2);
  line.Acknowledge();
  line.refuses_ = true;
  line.ToGrpc(Open(5));
  line.refuses_ = false;
  line.Acknowledge();
  EXPECT_EQ(line.initial(), 0);
  EXPECT_EQ(SendSome(line, 3, rest), rest);
  line.Ask(3, std::ssize(rest));
  EXPECT_LT(SendSome(line, 3, rest).size(), rest.size());
  line.EndCall(3);
  EXPECT_EQ(line.room(), 64 * kMiB);
}

// Calls of all sizes, of which few are read at a time, in any order of events.
TEST(WindowsOfPeersTest, EveryCallIsReadInTheEnd) {
  const uint32_t seed = std::random_device{}();
  SCOPED_TRACE(seed);
  std::mt19937 random(seed);
  for (int round = 0; round < 6; ++round) {
    Line line(int64_t{4} << (10 + random() % 14));
    struct Sent {
      std::string rest;
      bool reads = false;
    };
    std::map<uint32_t, Sent> calls;
    uint32_t next = 1;
    int ended = 0;
    int idle = 0;
    while (ended < 100 && idle < 10000) {
      ++idle;
      const auto any = [&] { return std::next(calls.begin(), random() % calls.size()); };
      switch (random() % 6) {
        case 0:
          if (calls.size() >= 30) break;
          line.OpenStream(next);
          calls[next].rest = Message(random() % 3 == 0 ? random() % 3000000 : random() % 700000);
          next += 2;
          break;
        case 1:
        case 2: {
          if (calls.empty()) break;
          const auto chosen = any();
          const size_t before = chosen->second.rest.size();
          chosen->second.rest = SendSome(line, chosen->first, std::move(chosen->second.rest));
          if (chosen->second.rest.size() < before) idle = 0;
          break;
        }
        case 3: {  // at most two are read at a time
          int reading = 0;
          for (auto& [_, call] : calls) reading += call.reads ? 1 : 0;
          if (reading < 2 && !calls.empty()) any()->second.reads = true;
          for (auto& [stream, call] : calls) {
            if (call.reads && !call.rest.empty()) line.Ask(stream, std::ssize(call.rest));
          }
          break;
        }
        case 4:
          line.GiveConnection();
          if (random() % 4 == 0) line.Acknowledge();
          line.Wait(random() % 100'000'000);
          break;
        default:
          for (auto call = calls.begin(); call != calls.end(); ++call) {
            if (!call->second.reads || !call->second.rest.empty()) continue;
            line.EndCall(call->first);
            calls.erase(call);
            ++ended;
            idle = 0;
            break;
          }
      }
      ASSERT_EQ(line.broken(), Limit::kNone);
      constexpr int64_t kAsked = 2 * kMiB;  // by the two, and other calls may take it
      ASSERT_LE(line.unread(),
                (std::ssize(calls) + 1) * kUsual + kAsked + line.frames().windows().early_room());
    }
    ASSERT_EQ(ended, 100) << "stuck";
  }
}

}  // namespace
}  // namespace logitd::door
