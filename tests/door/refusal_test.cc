// Calls that a connection refuses itself: what gRPC reads, and what the peer reads, for random calls,
// reads and writes, plain and with TLS.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <openssl/ssl.h>
#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "server/door/connection.h"
#include "server/door/sockets.h"
#include "tests/certificates.h"
#include "tests/door/bytes.h"
#include "tests/door/hpack_encoder.h"

namespace logitd::door {
namespace {

using namespace std::string_literals;

class RefuseAll final : public Judge {
 public:
  std::optional<Verdict> Ask(const Call&) override {
    return Verdict{.code = 8, .text = "no", .trailers = {}};
  }
  void OnRefused(int, absl::Span<const std::string>) override { ++refused_; }
  std::atomic<int> refused_ = 0;
};

LikeCalls BadCalls(std::shared_ptr<Judge> judge) {
  LikeCalls calls;
  calls.path = "/s/Bad";
  calls.size = "bytes";
  calls.judge = std::move(judge);
  return calls;
}

// Frames, read from bytes as they come.
struct ReadFrame {
  uint8_t type;
  uint8_t flags;
  uint32_t stream;
  std::string payload;
};
class FrameReader {
 public:
  void Skip(size_t bytes) { skip_ = bytes; }
  std::vector<ReadFrame> Read(std::string_view bytes) {
    pending_ += bytes;
    const size_t skipped = std::min(skip_, pending_.size());
    pending_.erase(0, skipped);
    skip_ -= skipped;
    std::vector<ReadFrame> frames;
    size_t at = 0;
    while (skip_ == 0 && pending_.size() - at >= 9) {
      const auto byte = [&](size_t i) { return static_cast<uint8_t>(pending_[at + i]); };
      const size_t size = byte(0) << 16 | byte(1) << 8 | byte(2);
      if (pending_.size() - at < 9 + size) break;
      frames.push_back(
          {.type = byte(3),
           .flags = byte(4),
           .stream = static_cast<uint32_t>(byte(5) << 24 | byte(6) << 16 | byte(7) << 8 | byte(8)),
           .payload = pending_.substr(at + 9, size)});
      at += 9 + size;
    }
    pending_.erase(0, at);
    return frames;
  }
  bool empty() const { return pending_.empty(); }

 private:
  std::string pending_;
  size_t skip_ = 0;
};

struct Call {
  HeaderFields fields;
  bool ends = false;
  std::string data;
};

// One end of a socket pair, without blocking, plain or with TLS.
class Peer {
 public:
  Peer(int fd, bool tls) : fd_(fd) {
    fcntl(fd_, F_SETFL, O_NONBLOCK);
    if (!tls) return;
    context_.reset(SSL_CTX_new(TLS_client_method()));
    static constexpr unsigned char kProtocols[] = {2, 'h', '2'};
    SSL_CTX_set_alpn_protos(context_.get(), kProtocols, sizeof(kProtocols));
    ssl_.reset(SSL_new(context_.get()));
    SSL_set_mode(ssl_.get(), SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER);
    SSL_set_fd(ssl_.get(), fd_);
    SSL_set_connect_state(ssl_.get());
  }
  // Bytes that were taken or read; 0: none now.
  size_t Write(std::string_view bytes) {
    size_t put = 0;
    if (ssl_ == nullptr) {
      return static_cast<size_t>(std::max<ssize_t>(0, write(fd_, bytes.data(), bytes.size())));
    }
    return SSL_write_ex(ssl_.get(), bytes.data(), bytes.size(), &put) == 1 ? put : 0;
  }
  size_t Read(absl::Span<char> into) {
    size_t got = 0;
    if (ssl_ == nullptr) {
      return static_cast<size_t>(std::max<ssize_t>(0, read(fd_, into.data(), into.size())));
    }
    return SSL_read_ex(ssl_.get(), into.data(), into.size(), &got) == 1 ? got : 0;
  }

 private:
  OwnedContext context_;
  OwnedSsl ssl_;
  const int fd_;
};

struct Way {
  std::string name;
  bool tls;
  int inserts;  // see HpackEncoder
};

class RefusalTest : public ::testing::TestWithParam<Way> {
 protected:
  static constexpr int kCalls = 600;
  static constexpr int kGrpcFrames = 300;

  RefusalTest() {
    signal(SIGPIPE, SIG_IGN);
    int fds[2];
    EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, fds), 0);
    fd_ = fds[0];
    peer_fd_ = fds[1];
    const int small = 4096;  // so that writes are cut everywhere
    setsockopt(fd_, SOL_SOCKET, SO_SNDBUF, &small, sizeof(small));
    sockaddr address = {.sa_family = AF_UNIX, .sa_data = {}};
    connection_ = connections_->Add(fd_, &address, sizeof(address.sa_family));
    connection_->Refuse(BadCalls(judge_));
  }
  ~RefusalTest() override {
    if (fd_ >= 0) close(fd_);
    close(peer_fd_);
  }

  void Handshake(const TlsContext& context) {
    auto session = TlsSession::Create(context, fd_);
    TlsSession::Step step = TlsSession::Step::kWantRead;
    while (step != TlsSession::Step::kDone) {
      pollfd waiting = {
          fd_, static_cast<int16_t>(step == TlsSession::Step::kWantWrite ? POLLOUT : POLLIN), 0};
      ASSERT_EQ(poll(&waiting, 1, 10000), 1);
      step = session->Handshake();
      ASSERT_NE(step, TlsSession::Step::kFailed) << session->failure_text();
    }
    connection_->SetTls(std::move(session));
  }

  // What the peer sends: each call is a header list, sometimes in several frames, and a message.
  std::string MakeCalls(std::mt19937& random) {
    HpackEncoder encoder(random(), GetParam().inserts);
    std::string bytes = Preface() + Frame(kSettings, 0, 0, "");
    for (uint32_t stream = 1; stream < 2 * kCalls; stream += 2) {
      Call& call = calls_[stream];
      call.fields = {{":method", "POST"},
                     {":path", random() % 2 == 0 ? "/s/Bad" : "/s/Good"},
                     {"content-type", "application/grpc"},
                     {"grpc-timeout", absl::StrCat(random() % 50, "m")},
                     {"x", std::string(random() % 30, 'x')},
                     {absl::StrCat("name", random() % 5), std::string(random() % 300, 'y')}};
      call.ends = random() % 4 == 0;
      const std::string block = encoder.Encode(call.fields);
      const uint8_t ends = call.ends ? kEndStream : 0;
      if (random() % 6 == 0) {
        const size_t cut = random() % block.size();
        bytes += Frame(kHeaders, ends, stream, block.substr(0, cut)) +
                 Frame(kContinuation, kEndHeaders, stream, block.substr(cut));
      } else if (random() % 6 == 0) {
        bytes += Frame(kHeaders, ends | kEndHeaders | 0x20, stream, "prior" + block);
      } else {
        bytes += Frame(kHeaders, ends | kEndHeaders, stream, block);
      }
      if (!call.ends) {
        call.data = Message(random() % 5 == 0 ? random() % 9000 : random() % 60);
        bytes += Frame(kData, kEndStream, stream, call.data);
      }
      if (random() % 10 == 0) bytes += Frame(kPing, 0, 0, "12345678");
    }
    return bytes + Frame(kPing, 0, 0, "the last");
  }

  // Reads as gRPC does, and answers each call that it sees. True: the last byte has come.
  bool ReadOnce(std::mt19937& random) {
    char buffer[20000];
    const size_t first = 1 + random() % 2000;
    const size_t second = random() % (sizeof(buffer) - 2000);
    iovec parts[] = {{buffer, first}, {buffer + first, second}};
    alignas(cmsghdr) char control[64];
    msghdr message = {};
    message.msg_iov = parts;
    message.msg_iovlen = 2;
    message.msg_control = control;
    message.msg_controllen = sizeof(control);
    const ssize_t got = recvmsg(fd_, &message, 0);
    if (got < 0 && errno == EAGAIN) {
      pollfd waiting = {fd_, POLLIN, 0};
      poll(&waiting, 1, 20);
      return false;
    }
    EXPECT_GT(got, 0) << errno;
    if (got <= 0) return true;
    for (const ReadFrame& frame : grpc_frames_.Read({buffer, static_cast<size_t>(got)})) {
      if (frame.type == kPing && frame.payload == "the last") return true;
      SeeFrame(frame);
    }
    return false;
  }
  void SeeFrame(const ReadFrame& frame) {
    if (frame.type == kData) seen_[frame.stream].data += frame.payload;
    if (frame.type != kHeaders && frame.type != kContinuation) return;
    std::string_view block = frame.payload;
    if (frame.type == kHeaders) {
      grpc_list_.Begin();
      if ((frame.flags & 0x20) != 0) block.remove_prefix(5);
      seen_[frame.stream].ends = (frame.flags & kEndStream) != 0;
    }
    EXPECT_TRUE(grpc_list_.Read(Bytes(block)));
    if ((frame.flags & kEndHeaders) == 0) return;
    EXPECT_TRUE(grpc_list_.whole()) << "gRPC cannot read stream " << frame.stream;
    Call& call = seen_[frame.stream];
    for (size_t i = 0; i < grpc_list_.size(); ++i) {
      call.fields.emplace_back(grpc_list_[i].name, grpc_list_[i].value);
    }
  }

  // Writes as gRPC does: in pieces, and again what was not taken.
  void WriteAll(std::string bytes, std::mt19937& random) {
    while (!bytes.empty()) {
      const size_t first = 1 + random() % bytes.size();
      iovec parts[] = {{bytes.data(), first}, {bytes.data() + first, bytes.size() - first}};
      msghdr message = {.msg_iov = parts, .msg_iovlen = 2};
      const ssize_t put = sendmsg(fd_, &message, MSG_NOSIGNAL);
      if (put > 0) {
        bytes.erase(0, static_cast<size_t>(put));
        continue;
      }
      ASSERT_EQ(errno, EAGAIN);
      pollfd waiting = {fd_, POLLOUT, 0};
      poll(&waiting, 1, 5);
    }
  }

  // The peer: sends `bytes` and reads until `done`.
  void RunPeer(Peer& peer, std::string_view bytes, std::mt19937 random) {
    std::vector<char> buffer(10000);
    size_t piece = 0;  // kept until it is written, as OpenSSL asks for
    while (!peer_done_) {
      size_t moved = 0;
      if (!bytes.empty()) {
        if (piece == 0) piece = std::min(1 + random() % 3000, bytes.size());
        moved = peer.Write(bytes.substr(0, piece));
        bytes.remove_prefix(moved);
        piece -= moved;
      }
      const size_t got = random() % 3 == 0 ? 0 : peer.Read(absl::MakeSpan(buffer));
      for (ReadFrame& frame : peer_frames_.Read({buffer.data(), got})) {
        if (frame.type == kHeaders) ++answers_;
        if (frame.type == kData) ++messages_;
        peer_saw_.push_back(std::move(frame));
      }
      if (moved + got == 0) absl::SleepFor(absl::Microseconds(200));
    }
  }

  const std::shared_ptr<RefuseAll> judge_ = std::make_shared<RefuseAll>();
  const std::shared_ptr<Connections> connections_ =
      Connections::Create({.frames = {.min_ping_interval_ns = 0}});
  std::shared_ptr<Connection> connection_;
  int fd_ = -1;
  int peer_fd_ = -1;
  std::map<uint32_t, Call> calls_;
  FrameReader grpc_frames_;
  HeaderList grpc_list_;
  std::map<uint32_t, Call> seen_;
  std::atomic<bool> peer_done_ = false;
  std::atomic<int64_t> answers_ = 0;   // that the peer has read
  std::atomic<int64_t> messages_ = 0;  // of gRPC, that the peer has read
  FrameReader peer_frames_;
  std::vector<ReadFrame> peer_saw_;
};

TEST_P(RefusalTest, EachCallIsSeenByGrpcAsItWasOrIsAnsweredAtOnce) {
  const uint32_t seed = std::random_device{}();
  SCOPED_TRACE(seed);
  std::mt19937 random(seed);
  const std::string bytes = MakeCalls(random);
  Peer peer(peer_fd_, GetParam().tls);
  grpc_frames_.Skip(Preface().size());
  std::thread peer_thread([&] { RunPeer(peer, bytes, std::mt19937(seed + 1)); });
  if (GetParam().tls) {
    const testing::Authority authority;
    const testing::Issued issued = authority.IssueServer();
    auto context = TlsContext::Create({.certificate = issued.certificate, .key = issued.key});
    ASSERT_TRUE(context.ok());
    Handshake(**context);
  }
  WriteAll(Frame(kWindowUpdate, 0, 0, "\x3f\xff\xff\xff"),
           random);  // as gRPC gives its connections
  std::thread writer([&] {
    std::mt19937 own(seed + 2);
    for (int i = 0; i < kGrpcFrames; ++i) {
      WriteAll(Frame(kData, 0, 999999, absl::StrCat(i, ":") + std::string(own() % 3000, 'd')), own);
    }
  });
  while (!ReadOnce(random)) {
  }
  writer.join();
  const absl::Time end = absl::Now() + absl::Seconds(60);
  while ((answers_ < connection_->refused() || messages_ < kGrpcFrames) && absl::Now() < end) {
    WriteAll(Frame(kPing, kAck, 0, "12345678"), random);  // takes what is left with it
    absl::SleepFor(absl::Milliseconds(1));
  }
  peer_done_ = true;
  peer_thread.join();

  // The peer saw gRPC's frames as they were, and between them whole answers.
  std::set<uint32_t> answered;
  std::set<uint32_t> granted;
  bool closed = false;
  HeaderList list;
  int next = 0;
  for (const ReadFrame& frame : peer_saw_) {
    if (frame.type == kData) {
      const std::string begin = absl::StrCat(next++, ":");
      ASSERT_EQ(frame.payload.substr(0, begin.size()), begin);
      ASSERT_EQ(frame.payload.find_first_not_of('d', begin.size()), std::string::npos);
    } else if (frame.type == kHeaders) {
      EXPECT_EQ(frame.flags, kEndStream | kEndHeaders);
      list.Begin();
      EXPECT_TRUE(list.Read(Bytes(frame.payload)) && list.whole());
      EXPECT_TRUE(answered.insert(frame.stream).second) << "answered twice";
    } else if (frame.type == kReset) {
      EXPECT_TRUE(answered.contains(frame.stream));
      EXPECT_FALSE(calls_[frame.stream].ends);
      EXPECT_EQ(frame.payload, "\0\0\0\0"s);
    } else if (frame.type == kSettings) {
      EXPECT_EQ(frame.payload, "\0\4\0\0\0\0"s) << "the initial window is 0";
      EXPECT_FALSE(std::exchange(closed, true));
    } else if (frame.type == kWindowUpdate && frame.stream == 0) {
      EXPECT_LE(frame.payload, "\0\0\xff\xff"s) << "of the connection, in its turn";
    } else if (frame.type == kWindowUpdate) {
      EXPECT_TRUE(closed);
      EXPECT_EQ(frame.payload, "\0\0\xff\xff"s);
      EXPECT_TRUE(granted.insert(frame.stream).second) << "twice";
    } else {
      EXPECT_EQ(frame.type, kPing);
    }
  }
  EXPECT_EQ(next, kGrpcFrames);
  EXPECT_EQ(static_cast<int64_t>(answered.size()), connection_->refused());
  EXPECT_EQ(judge_->refused_, connection_->refused());
  EXPECT_GT(connection_->refused(), 0);  // how many depends on how the bytes were cut
  // gRPC saw all others.
  for (const auto& [stream, call] : calls_) {
    SCOPED_TRACE(stream);
    ASSERT_EQ(seen_[stream].data, call.data) << "also of refused calls";
    if (answered.contains(stream)) {
      EXPECT_EQ(call.fields[1].second, "/s/Bad");
      EXPECT_TRUE(seen_[stream].fields.empty());
      EXPECT_FALSE(granted.contains(stream));
    } else {
      ASSERT_EQ(seen_[stream].fields, call.fields);
      EXPECT_EQ(seen_[stream].ends, call.ends);
      EXPECT_TRUE(call.ends || granted.contains(stream)) << "its message would never come";
    }
  }
  EXPECT_EQ(connection_->open_streams(), kCalls - connection_->refused());
}

INSTANTIATE_TEST_SUITE_P(All, RefusalTest,
                         ::testing::Values(Way{"plain", false, 0}, Way{"plain_inserts", false, 40},
                                           Way{"tls", true, 0}, Way{"tls_inserts", true, 40}),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace logitd::door
