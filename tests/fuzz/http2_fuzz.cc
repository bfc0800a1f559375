// Any bytes on one plain connection, whose streams are read and answered: nothing breaks. After
// every part the connection's account is what its streams hold, and at the end it is nothing.
//
// The first byte says how the rest arrives: 1: after the preface and empty settings; 2: the client
// does not read; 4: time passes between the parts; 8: the server drains in the middle. Its upper
// half is the parts' size.
#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "server/http2/connection.h"
#include "tests/http2/echo.h"

namespace {

using logitd::http2::Account;
using logitd::http2::Connection;
using logitd::http2::ConnectionHost;
using logitd::http2::Cut;
using logitd::http2::Field;
using logitd::http2::Held;
using logitd::http2::Limits;
using logitd::http2::Loop;
using logitd::http2::Refusal;
using logitd::http2::Stream;
using logitd::http2::StreamEvents;
using logitd::http2::Times;
using logitd::http2::testing::Echo;

constexpr std::string_view kHello("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0", 33);
constexpr int64_t kLimit = int64_t{4} << 20;

int64_t now_ns = 1;
int64_t FuzzClock() { return now_ns; }

void Check(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "%s\n", what);
  std::abort();
}

// Grants more, holds what it was not asked for, and answers.
class Reader final : public Echo {
 public:
  explicit Reader(Stream* stream) : Echo(stream), memory_(1 << 15) {}
  absl::Span<std::byte> Room(size_t) override { return absl::MakeSpan(memory_); }
  void OnBody(absl::Span<const std::byte> bytes) override {
    Check(stream() != nullptr, "a body after the end");
    if (ended_) return;
    if (!stream()->HoldEarly(static_cast<int64_t>(bytes.size()))) return Refuse();
    early_ += static_cast<int64_t>(bytes.size());
    if (body().size() > 1000) {
      stream()->ReleaseEarly();
      early_ = 0;
    }
    stream()->CountMessage();
    stream()->Grant(static_cast<int64_t>(body().size()) + 100'000);
    Echo::OnBody(bytes);
  }
  void OnEnd() override {
    Check(stream() != nullptr, "an end after the end");
    if (!ended_) Answer(2);
    ended_ = true;
  }
  int64_t early() const { return early_; }
  void Refuse() {
    const Field status[] = {{":status", "200"}, {"grpc-status", "8"}};
    stream()->End(status);
    ended_ = true;
  }

 private:
  std::vector<std::byte> memory_;
  int64_t early_ = 0;
  bool ended_ = false;
};

class Host final : public ConnectionHost {
 public:
  std::shared_ptr<StreamEvents> OnStream(Stream* stream) override {
    auto reader = std::make_shared<Reader>(stream);
    readers_.push_back(reader);
    if (stream->refusal() != Refusal::kNone) reader->Refuse();
    if (stream->headers().size() == 1) stream->Reset(2);
    return reader;
  }
  void OnConnectionClosed(Connection*, Cut) override { ++closed_; }

  void CheckAccount(const Account& account) {
    int64_t streams = 0;
    int64_t early = 0;
    for (const auto& reader : readers_) {
      if (reader->stream() == nullptr) continue;
      ++streams;
      early += reader->early();
    }
    Check(account.early == early, "not the early bytes of the streams");
    Check(account.unsent >= 0 && (account.streams != 0 || account.unsent == 0),
          "a response without its stream");
    Check(account.streams >= streams, "fewer streams than the owners have");
    Check(account.headers >= 1024 * account.streams, "streams without their lists");
    Check((account.streams == 0) == (account.headers == 0), "lists without their streams");
    Check(account.session >= 0 && account.tls == 0, "held less than nothing");
  }
  void CheckEnd() const {
    Check(closed_ == 1, "not closed once");
    for (const auto& reader : readers_) {
      Check(reader->times_closed() == 1, "a stream that was not told of its end once");
    }
  }

 private:
  std::vector<std::shared_ptr<Reader>> readers_;
  int closed_ = 0;
};

void Drain(int fd) {
  char buffer[4096];
  while (recv(fd, buffer, sizeof(buffer), MSG_DONTWAIT) > 0) {
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const uint8_t how = data[0];
  std::string input = (how & 1) != 0 ? std::string(kHello) : "";
  input.append(reinterpret_cast<const char*>(data) + 1, size - 1);
  static const Limits limits;
  static const Times times;
  std::atomic<int64_t> total = 0;
  Held held(&total, kLimit);
  Host host;
  Loop loop(0, &FuzzClock);
  int fds[2];
  Check(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds) == 0, "no sockets");
  fcntl(fds[0], F_SETFL, O_NONBLOCK);
  const auto connection =
      std::make_shared<Connection>(&loop, &host, &held, limits, times, fds[0],
                                   logitd::http2::PeerInfo{.id = 1, .name = "fuzz"}, nullptr);
  connection->Start();
  const size_t part = size_t{1} << (how >> 4);
  for (size_t at = 0; at < input.size(); at += part) {
    const size_t bytes = std::min(part, input.size() - at);
    if (send(fds[1], input.data() + at, bytes, MSG_DONTWAIT | MSG_NOSIGNAL) < 0) break;
    if ((how & 4) != 0) now_ns += 100'000'000;
    if ((how & 8) != 0 && at <= input.size() / 2) connection->Drain();
    loop.Turn(/*wait=*/false);
    if ((how & 2) == 0) Drain(fds[1]);
    host.CheckAccount(connection->account());
    held.Flush();
    Check(total == connection->account().held(), "the server's sum is not the connection's");
  }
  connection->Close();
  loop.Turn(/*wait=*/false);
  close(fds[1]);
  host.CheckEnd();
  Check(connection->account().held() == 0, "held after the end");
  Check(total == 0, "the server still counts something");
  return 0;
}
