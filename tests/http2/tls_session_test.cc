#include "server/http2/tls_session.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <openssl/ssl.h>
#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/time/clock.h"
#include "tests/certificates.h"

namespace logitd::http2 {
namespace {

using door::OwnedBio;
using door::OwnedCertificate;
using door::OwnedContext;
using door::OwnedKey;
using door::OwnedSsl;
using door::TlsContext;
using door::TlsPems;
using door::TlsSource;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

const testing::Authority& Ca() {
  static const auto& authority = *new testing::Authority();
  return authority;
}

std::shared_ptr<const TlsContext> MakeContext(bool mutual = false) {
  const testing::Issued server = Ca().IssueServer();
  TlsPems pems = {.certificate = server.certificate, .key = server.key};
  if (mutual) pems.client_ca = Ca().pem();
  auto context = TlsContext::Create(pems);
  EXPECT_TRUE(context.ok()) << context.status();
  return *std::move(context);
}

// A client that uses OpenSSL directly, on a blocking socket.
class PlainClient {
 public:
  explicit PlainClient(int fd, bool h2 = true, const testing::Issued* own = nullptr,
                       int version = TLS1_3_VERSION)
      : context_(SSL_CTX_new(TLS_client_method())), fd_(fd) {
    static constexpr unsigned char kProtocols[] = {2, 'h', '2'};
    SSL_CTX_set_max_proto_version(context_.get(), version);
    if (h2) SSL_CTX_set_alpn_protos(context_.get(), kProtocols, sizeof(kProtocols));
    if (own != nullptr) {
      const OwnedBio cert(BIO_new_mem_buf(own->certificate.data(), -1));
      const OwnedBio key(BIO_new_mem_buf(own->key.data(), -1));
      const OwnedCertificate x509(PEM_read_bio_X509(cert.get(), nullptr, nullptr, nullptr));
      const OwnedKey pkey(PEM_read_bio_PrivateKey(key.get(), nullptr, nullptr, nullptr));
      SSL_CTX_use_certificate(context_.get(), x509.get());
      SSL_CTX_use_PrivateKey(context_.get(), pkey.get());
    }
    ssl_.reset(SSL_new(context_.get()));
    SSL_set_fd(ssl_.get(), fd_);
  }
  ~PlainClient() { close(fd_); }

  SSL* ssl() { return ssl_.get(); }
  bool Connect() { return SSL_connect(ssl_.get()) == 1; }

 private:
  const OwnedContext context_;
  OwnedSsl ssl_;
  const int fd_;
};

class TlsSessionTest : public ::testing::Test {
 protected:
  TlsSessionTest() {
    signal(SIGPIPE, SIG_IGN);  // OpenSSL's own clients write without MSG_NOSIGNAL
    Reset(MakeContext());
  }
  ~TlsSessionTest() override {
    session_.reset();
    close(server_fd_);
  }

  void Reset(const std::shared_ptr<const TlsContext>& context) {
    if (server_fd_ >= 0) close(server_fd_);
    int fds[2];
    ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds), 0);
    server_fd_ = fds[0];
    client_fd_ = fds[1];
    const int small = 4096;  // so that writes are cut everywhere
    setsockopt(server_fd_, SOL_SOCKET, SO_SNDBUF, &small, sizeof(small));
    ASSERT_EQ(fcntl(server_fd_, F_SETFL, O_NONBLOCK), 0);
    session_ = TlsSession::Create(*context, server_fd_);
  }

  // The handshake to its end. False: it failed.
  bool Handshake() {
    while (true) {
      switch (session_->Handshake()) {
        case TlsSession::Step::kDone:
          return true;
        case TlsSession::Step::kFailed:
          return false;
        case TlsSession::Step::kWantRead:
          Wait(POLLIN);
          break;
        case TlsSession::Step::kWantWrite:
          Wait(POLLOUT);
          break;
      }
    }
  }

  void Wait(int16_t events) {
    pollfd waiting = {server_fd_, events, 0};
    ASSERT_EQ(poll(&waiting, 1, 10000), 1) << "nothing moves";
  }

  int server_fd_ = -1;
  int client_fd_ = -1;
  std::unique_ptr<TlsSession> session_;
};

std::string RandomBytes(size_t bytes, uint32_t seed) {
  std::mt19937 random(seed);
  std::string text(bytes, '\0');
  for (char& c : text) c = static_cast<char>(random());
  return text;
}

// `bytes` as parts of odd sizes: frame headers of nine bytes among large ones.
std::vector<iovec> Cut(std::string& bytes, std::mt19937* random) {
  std::vector<iovec> parts;
  for (size_t at = 0; at < bytes.size();) {
    const size_t wanted = (*random)() % 3 == 0 ? 9 : (*random)() % 40000;
    const size_t run = std::min(wanted, bytes.size() - at);
    parts.push_back({.iov_base = bytes.data() + at, .iov_len = run});
    at += run;
  }
  return parts;
}

TEST_F(TlsSessionTest, CarriesBytesBothWaysAtTheSameTimeThroughASmallSocket) {
  const uint32_t seed = std::random_device{}();
  SCOPED_TRACE(seed);
  std::string to_client = RandomBytes(3 << 20, seed);
  const std::string to_server = RandomBytes(3 << 20, seed + 1);
  std::string at_client(to_client.size(), '\0');
  std::string at_server;
  PlainClient client(client_fd_);
  std::thread peer([&] {
    ASSERT_TRUE(client.Connect());
    size_t sent = 0;
    size_t got = 0;
    std::mt19937 random(seed + 2);
    while (got < at_client.size() || sent < to_server.size()) {
      if (sent < to_server.size()) {
        const auto run = std::min<size_t>(random() % 3000 + 1, to_server.size() - sent);
        ASSERT_EQ(SSL_write(client.ssl(), to_server.data() + sent, static_cast<int>(run)),
                  static_cast<int>(run));
        sent += run;
      }
      if (got < at_client.size()) {
        const int read = SSL_read(client.ssl(), at_client.data() + got,
                                  static_cast<int>(std::min<size_t>(at_client.size() - got, 5000)));
        ASSERT_GT(read, 0);
        got += static_cast<size_t>(read);
      }
    }
  });
  ASSERT_TRUE(Handshake());
  std::mt19937 random(seed + 3);
  std::string buffer(50000, '\0');
  // False: nothing more comes for now.
  const auto read_some = [&] {
    const size_t half = random() % 20000 + 1;
    const iovec parts[] = {{buffer.data(), half}, {buffer.data() + half, random() % 20000}};
    bool drained = false;
    const ssize_t got = session_->Read(parts, &drained);
    if (got < 0) {
      EXPECT_EQ(errno, EAGAIN);
      EXPECT_TRUE(drained);
      return false;
    }
    at_server.append(buffer, 0, static_cast<size_t>(got));
    return got > 0;
  };
  std::vector<iovec> parts = Cut(to_client, &random);
  absl::Span<iovec> left = absl::MakeSpan(parts);
  int blocked = 0;
  while (!left.empty() || at_server.size() < to_server.size()) {
    while (read_some()) {
    }
    if (left.empty()) {
      if (at_server.size() < to_server.size()) Wait(POLLIN);
      continue;
    }
    ssize_t put = session_->Write(left.subspan(0, std::min<size_t>(left.size(), 64)));
    if (put < 0) {
      ASSERT_EQ(errno, EAGAIN);
      ++blocked;
      Wait(POLLIN | POLLOUT);
      continue;
    }
    ASSERT_GT(put, 0);
    while (put > 0 || (!left.empty() && left.front().iov_len == 0)) {
      const auto run = std::min(static_cast<size_t>(put), left.front().iov_len);
      left.front().iov_base = static_cast<char*>(left.front().iov_base) + run;
      left.front().iov_len -= run;
      put -= static_cast<ssize_t>(run);
      if (left.front().iov_len == 0) left.remove_prefix(1);
    }
  }
  peer.join();
  EXPECT_TRUE(at_client == to_client);
  EXPECT_TRUE(at_server == to_server);
  EXPECT_GT(blocked, 0) << "the socket never filled, so the test shows too little";
}

TEST_F(TlsSessionTest, WhatCameWithTheHandshakesEndIsReadNext) {
  PlainClient client(client_fd_);
  std::thread peer([&] {
    ASSERT_TRUE(client.Connect());
    ASSERT_EQ(SSL_write(client.ssl(), "hello", 5), 5);
  });
  // The client's last flight and its first bytes are there together.
  while (!session_->has_begun()) {
    Wait(POLLIN);
    session_->Handshake();
  }
  peer.join();
  ASSERT_TRUE(Handshake());
  char bytes[6] = {};
  const iovec part = {bytes, 5};
  bool drained = false;
  EXPECT_EQ(session_->Read({&part, 1}, &drained), 5);
  EXPECT_STREQ(bytes, "hello");
}

TEST_F(TlsSessionTest, AClientWithoutH2IsRefused) {
  PlainClient client(client_fd_, /*h2=*/false);
  std::thread peer([&] { client.Connect(); });
  EXPECT_FALSE(Handshake());
  EXPECT_EQ(session_->failure(), HandshakeEnd::kProtocol);
  EXPECT_THAT(session_->failure_text(), HasSubstr("h2"));
  peer.join();
}

TEST_F(TlsSessionTest, Tls11IsRefused) {
  PlainClient client(client_fd_, /*h2=*/true, nullptr, TLS1_1_VERSION);
  std::thread peer([&] { EXPECT_FALSE(client.Connect()); });
  EXPECT_FALSE(Handshake());
  EXPECT_EQ(session_->failure(), HandshakeEnd::kProtocol);
  peer.join();
}

TEST_F(TlsSessionTest, BytesThatAreNoTlsAreRefused) {
  const std::string text = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
  ASSERT_EQ(send(client_fd_, text.data(), text.size(), 0), static_cast<ssize_t>(text.size()));
  EXPECT_FALSE(Handshake());
  EXPECT_EQ(session_->failure(), HandshakeEnd::kProtocol);
  close(client_fd_);
}

TEST_F(TlsSessionTest, TheNamesOfACertificateHaveTheirKinds) {
  Reset(MakeContext(/*mutual=*/true));
  const testing::Issued own = Ca().Issue(
      {.common_name = "job", .alternative_names = "DNS:job.local,URI:spiffe://cluster/job"});
  PlainClient client(client_fd_, /*h2=*/true, &own);
  std::thread peer([&] { EXPECT_TRUE(client.Connect()); });
  EXPECT_TRUE(Handshake()) << session_->failure_text();
  peer.join();
  EXPECT_THAT(session_->CertificateNames(),
              ElementsAre("dns:job.local", "uri:spiffe://cluster/job", "cn:job"));
}

TEST_F(TlsSessionTest, AClientOfAnotherAuthorityIsRefused) {
  Reset(MakeContext(/*mutual=*/true));
  const testing::Issued own = testing::Authority().Issue({.common_name = "job"});
  PlainClient client(client_fd_, /*h2=*/true, &own);
  std::thread peer([&] { client.Connect(); });
  EXPECT_FALSE(Handshake());
  EXPECT_EQ(session_->failure(), HandshakeEnd::kCertificate);
  EXPECT_THAT(session_->CertificateNames(), IsEmpty());
  peer.join();
}

// Each asks for a new key and an answer, and costs the server more than the peer.
TEST_F(TlsSessionTest, AFloodOfKeyUpdatesEndsTheConnection) {
  PlainClient client(client_fd_);
  std::thread peer([&] {
    ASSERT_TRUE(client.Connect());
    for (int i = 0; i < 1000; ++i) {
      SSL_key_update(client.ssl(), SSL_KEY_UPDATE_NOT_REQUESTED);
      if (SSL_do_handshake(client.ssl()) != 1) return;
    }
  });
  ASSERT_TRUE(Handshake());
  char byte = 0;
  const iovec part = {&byte, 1};
  ssize_t got = 0;
  bool drained = false;
  while ((got = session_->Read({&part, 1}, &drained)) < 0 && errno == EAGAIN) Wait(POLLIN);
  EXPECT_EQ(got, -1);
  EXPECT_EQ(errno, ECONNRESET);
  shutdown(server_fd_, SHUT_RDWR);
  peer.join();
}

TEST_F(TlsSessionTest, SomeKeyUpdatesAreFine) {
  PlainClient client(client_fd_);
  std::thread peer([&] {
    ASSERT_TRUE(client.Connect());
    for (int i = 0; i < 10; ++i) {
      SSL_key_update(client.ssl(), SSL_KEY_UPDATE_REQUESTED);
      ASSERT_EQ(SSL_do_handshake(client.ssl()), 1);
    }
    ASSERT_EQ(SSL_write(client.ssl(), "x", 1), 1);
    char echoed = 0;
    ASSERT_EQ(SSL_read(client.ssl(), &echoed, 1), 1);
    EXPECT_EQ(echoed, 'x');
  });
  ASSERT_TRUE(Handshake());
  char byte = 0;
  const iovec part = {&byte, 1};
  bool drained = false;
  while (session_->Read({&part, 1}, &drained) != 1) Wait(POLLIN);
  EXPECT_EQ(session_->Write({&part, 1}), 1);
  peer.join();
}

TEST_F(TlsSessionTest, TheEndOfThePeerIsAnEnd) {
  auto client = std::make_unique<PlainClient>(client_fd_);
  std::thread peer([&] {
    ASSERT_TRUE(client->Connect());
    client.reset();  // without TLS's own end
  });
  ASSERT_TRUE(Handshake());
  peer.join();
  char byte = 0;
  const iovec part = {&byte, 1};
  bool drained = false;
  EXPECT_EQ(session_->Read({&part, 1}, &drained), 0);
  session_->Release();
  EXPECT_EQ(session_->Read({&part, 1}, &drained), -1);
  EXPECT_EQ(session_->Write({&part, 1}), -1);
}

TEST(TlsContextTest, SaysWhatIsWrong) {
  const testing::Issued server = Ca().IssueServer();
  const testing::Issued other = Ca().IssueServer();
  const testing::Issued expired = Ca().IssueServer(/*to_seconds=*/-1);
  const auto error = [](const TlsPems& pems) {
    const auto context = TlsContext::Create(pems);
    return std::string(context.status().message());
  };
  EXPECT_THAT(error({"", server.key, {}}), HasSubstr("certificate: got no certificate"));
  EXPECT_THAT(error({"text", server.key, {}}), HasSubstr("certificate"));
  EXPECT_THAT(error({server.certificate, "", {}}), HasSubstr("key"));
  EXPECT_THAT(error({server.certificate, other.key, {}}), HasSubstr("key"));
  EXPECT_THAT(error({expired.certificate, expired.key, {}}), HasSubstr("expired"));
  // An empty file must not mean that clients need no certificate.
  EXPECT_THAT(error({server.certificate, server.key, ""}), HasSubstr("client CA"));
  EXPECT_EQ(error({server.certificate, server.key, {}}), "");
}

TEST(TlsContextTest, KnowsWhenItsCertificateExpires) {
  const testing::Issued server = Ca().IssueServer(/*to_seconds=*/1000);
  const auto context = TlsContext::Create({server.certificate, server.key, {}});
  ASSERT_TRUE(context.ok());
  const absl::Duration left = (*context)->expiry() - absl::Now();
  EXPECT_GT(left, absl::Seconds(980));
  EXPECT_LE(left, absl::Seconds(1001));
}

TEST(TlsSourceTest, AWrongCertificateLeavesTheOldOne) {
  TlsSource source;
  const testing::Issued server = Ca().IssueServer();
  ASSERT_TRUE(source.Set({server.certificate, server.key, {}}).ok());
  const auto before = source.Get();
  EXPECT_FALSE(source.Set({server.certificate, "broken", {}}).ok());
  EXPECT_EQ(source.Get(), before);
}

}  // namespace
}  // namespace logitd::http2
