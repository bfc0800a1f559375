// One connection over a socket pair, with a client that writes any frames. The test's thread runs
// the loop, whose clock the test sets.
#ifndef LOGITD_TESTS_HTTP2_ONE_CONNECTION_H_
#define LOGITD_TESTS_HTTP2_ONE_CONNECTION_H_

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/door/tls_context.h"
#include "server/http2/connection.h"
#include "tests/http2/echo.h"
#include "tests/http2/raw_client.h"

namespace logitd::http2 {

using ::testing::Contains;
using ::testing::Each;
using testing::Echo;
using ::testing::ElementsAre;
using testing::Fields;
using testing::Frame;
using ::testing::IsEmpty;
using ::testing::Pair;
using testing::RawClient;
using testing::Read32;
using testing::Request;
using ::testing::SizeIs;

inline int64_t now_ns = 1'000'000'000;
inline int64_t TestClock() { return now_ns; }

// Names its memory, so that large frames are received there.
class Direct final : public Echo {
 public:
  Direct(Stream* stream, size_t bytes) : Echo(stream), memory_(bytes) { stream->Grant(bytes); }
  absl::Span<std::byte> Room(size_t) override { return absl::MakeSpan(memory_).subspan(taken_); }
  void OnBody(absl::Span<const std::byte> bytes) override {
    in_place_ += bytes.data() == memory_.data() + taken_ ? bytes.size() : 0;
    taken_ += bytes.size();
    Echo::OnBody(bytes);
  }
  size_t in_place() const { return in_place_; }

 private:
  std::vector<std::byte> memory_;
  size_t taken_ = 0;
  size_t in_place_ = 0;
};

// Does not answer until the test says so.
class Silent final : public Echo {
 public:
  using Echo::Echo;
  void OnEnd() override {}
};

// A server's end and its client.
class OneConnection : public ConnectionHost {
 protected:
  ~OneConnection() override {
    if (connection_ != nullptr) connection_->Close();
    loop_.Turn(/*wait=*/false);
    EXPECT_EQ(total_, 0) << "bytes held without a connection";
    for (const auto& echo : echoes_) EXPECT_EQ(echo->times_closed(), 1);
    if (connection_ != nullptr) {
      EXPECT_EQ(connection_->account().held(), 0);
    }
  }

  // ConnectionHost
  std::shared_ptr<StreamEvents> OnStream(Stream* stream) override {
    const std::string_view path = stream->headers().Find(":path");
    refusals_.push_back(stream->refusal());
    std::shared_ptr<Echo> echo;
    if (path == "/hold") {
      echo = std::make_shared<Silent>(stream);
    } else if (path == "/direct") {
      echo = std::make_shared<Direct>(stream, size_t{1} << 20);
    } else {
      echo = std::make_shared<Echo>(stream);
    }
    echoes_.push_back(echo);
    return echo;
  }
  void OnConnectionClosed(Connection*, Cut cut) override { cut_ = cut; }
  bool TakeHandshake() override { return may_handshake_; }

  // Both sides have said hello; the client's part is not looked at.
  void Open() {
    Connect();
    ASSERT_TRUE(client_->Begin());
    Run();
  }
  void Connect(const door::TlsContext* tls = nullptr) {
    int fds[2];
    ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds), 0);
    for (const int fd : fds) {
      const int large = 4 << 20;
      setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &large, sizeof(large));
    }
    ASSERT_EQ(fcntl(fds[0], F_SETFL, O_NONBLOCK), 0);
    client_.emplace(fds[1]);
    connection_ = std::make_shared<Connection>(
        &loop_, this, &held_, limits_, times_, fds[0], PeerInfo{.id = 1, .name = "test"},
        tls == nullptr ? nullptr : TlsSession::Create(*tls, fds[0]));
    connection_->Start();
  }

  // Turns until nothing moves. What came back is in `frames_`.
  void Run() {
    int64_t before = -1;
    const Account& account = connection_->account();
    while (account.received + account.sent != before || before < 0) {
      before = account.received + account.sent;
      for (int i = 0; i < 3; ++i) loop_.Turn(/*wait=*/false);
      for (Frame& frame : client_->Take()) frames_.push_back(std::move(frame));
    }
  }
  // The clock goes on in small steps, as it does while a loop runs.
  void Pass(absl::Duration time) {
    for (absl::Duration step = absl::Milliseconds(250); time > absl::ZeroDuration(); time -= step) {
      now_ns += absl::ToInt64Nanoseconds(std::min(step, time));
      Run();
    }
  }
  template <typename... Sent>
  void Send(const Sent&... sent) {
    EXPECT_TRUE((client_->Send(sent) && ...));
    Run();
  }

  std::vector<Frame> TakeFrames(uint8_t type) {
    std::vector<Frame> found;
    std::vector<Frame> others;
    for (Frame& frame : frames_) {
      (frame.type == type ? found : others).push_back(std::move(frame));
    }
    frames_ = std::move(others);
    return found;
  }

  struct Answer {
    Fields headers;
    std::string body;
    Fields trailers;
    bool ended = false;
    std::optional<uint32_t> reset;
  };
  // The frames that came back on a stream, read. HEADERS of all streams are read in their order.
  Answer AnswerOf(int32_t stream) {
    for (Frame& frame : std::exchange(frames_, {})) {
      Answer& answer = answers_[frame.stream];
      if (frame.type == NGHTTP2_HEADERS) {
        (answer.headers.empty() ? answer.headers : answer.trailers) = client_->Decode(frame);
      } else if (frame.type == NGHTTP2_DATA) {
        answer.body += frame.payload;
      } else if (frame.type == NGHTTP2_RST_STREAM) {
        answer.reset = Read32(frame.payload);
      } else {
        frames_.push_back(std::move(frame));
        continue;
      }
      answer.ended = answer.ended || (frame.type <= NGHTTP2_HEADERS && frame.ends_stream());
    }
    return answers_[stream];
  }
  // A call that is answered; it costs no budget.
  void Call(int32_t stream) {
    Send(client_->Headers(stream, Request("/echo")), RawClient::Data(stream, "hello", true));
    const Answer answer = AnswerOf(stream);
    EXPECT_EQ(answer.body, "hello") << "stream " << stream;
    EXPECT_TRUE(answer.ended);
  }

  Limits limits_;
  Times times_ = {.keepalive = absl::InfiniteDuration()};
  std::atomic<int64_t> total_ = 0;
  Held held_{&total_, int64_t{64} << 20};
  Loop loop_{0, &TestClock};
  std::optional<RawClient> client_;
  std::shared_ptr<Connection> connection_;
  std::vector<std::shared_ptr<Echo>> echoes_;  // of all streams, in their order
  std::vector<Refusal> refusals_;
  std::vector<Frame> frames_;
  std::map<int32_t, Answer> answers_;
  std::optional<Cut> cut_;  // nullopt: open
  bool may_handshake_ = true;
};

class ConnectionTest : public ::testing::Test, public OneConnection {
 protected:
  using OneConnection::Run;  // not ::testing::Test's
};

}  // namespace logitd::http2

#endif  // LOGITD_TESTS_HTTP2_ONE_CONNECTION_H_
