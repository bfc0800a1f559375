// TLS, identities and quotas, on the real server with real clients.
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <openssl/err.h>
#include <openssl/sha.h>
#include <openssl/ssl.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <deque>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "logitd/v1/attention.grpc.pb.h"
#include "logitd/v1/heads.grpc.pb.h"
#include "logitd/v1/sampler.grpc.pb.h"
#include "logitd/v1/scorer.grpc.pb.h"
#include "logitd/v1/server.grpc.pb.h"
#include "tests/certificates.h"
#include "tests/e2e/peers.h"
#include "tests/e2e/raw_peer.h"
#include "tests/e2e/server_process.h"
#include "tests/e2e/topk_calls.h"

namespace logitd::e2e {
namespace {

namespace fs = std::filesystem;
using testing::Authority;
using ::testing::HasSubstr;
using testing::Issued;
using ::testing::Not;

constexpr char kInferToken[] = "token-that-may-infer-0123456789";
constexpr char kScoreToken[] = "token-that-may-score-0123456789";

std::string Handshakes(const std::string& result) {
  return "logitd_tls_handshakes_total{result=\"" + result + "\"}";
}
std::string Refused(const std::string& reason, const std::string& identity = "token") {
  return "logitd_refused_total{identity=\"" + identity + "\",reason=\"" + reason + "\"}";
}

std::string HashOf(const std::string& token) {
  unsigned char hash[SHA256_DIGEST_LENGTH];
  SHA256(reinterpret_cast<const unsigned char*>(token.data()), token.size(), hash);
  return absl::BytesToHexString(
      absl::string_view(reinterpret_cast<const char*>(hash), sizeof(hash)));
}

// An identity of the tokens file; `more`: further members.
std::string Entry(const std::string& name, const std::string& roles, const std::string& token,
                  const std::string& more = "") {
  return absl::StrCat("{\"name\": \"", name, "\", \"roles\": [", roles, "], \"token_sha256\": [\"",
                      HashOf(token), "\"]", more, "}");
}

// A directory of files, each replaced at once.
class Files {
 public:
  Files() {
    std::string pattern = ::testing::TempDir() + "/logitd_tls_XXXXXX";
    directory_ = mkdtemp(pattern.data());
  }
  ~Files() { fs::remove_all(directory_); }

  std::string Path(const std::string& name) const { return (directory_ / name).string(); }
  void Write(const std::string& name, const std::string& text) const {
    std::ofstream(Path("next")) << text;
    fs::rename(Path("next"), Path(name));
  }
  void WriteServer(const Issued& issued) const {
    Write("key", issued.key);
    Write("cert", issued.certificate);
  }
  void WriteTokens(const std::vector<std::string>& entries) const {
    Write("tokens", absl::StrCat("{\"identities\": [", absl::StrJoin(entries, ","), "]}"));
  }
  std::vector<std::string> TlsFlags(bool mutual = false) const {
    std::vector<std::string> flags = {"--tls-cert=" + Path("cert"), "--tls-key=" + Path("key")};
    if (mutual) flags.push_back("--tls-client-ca=" + Path("ca"));
    return flags;
  }

 private:
  fs::path directory_;
};

std::shared_ptr<grpc::Channel> ConnectTls(const ServerProcess& server, const Authority& authority,
                                          const Issued& own = {}) {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  arguments.SetMaxReceiveMessageSize(-1);
  return grpc::CreateCustomChannel(server.tcp(),
                                   grpc::SslCredentials({.pem_root_certs = authority.pem(),
                                                         .pem_private_key = own.key,
                                                         .pem_cert_chain = own.certificate}),
                                   arguments);
}

std::unique_ptr<grpc::ClientContext> WithToken(const std::string& token) {
  auto context = Context();
  if (!token.empty()) context->AddMetadata("authorization", "Bearer " + token);
  return context;
}

grpc::Status TopKAs(const std::shared_ptr<grpc::Channel>& channel, const std::string& token,
                    int rows = 1, std::unique_ptr<grpc::ClientContext> context = nullptr) {
  if (context == nullptr) context = WithToken(token);
  v1::TopKResponse response;
  return v1::Sampler::NewStub(channel)->TopK(
      context.get(), Request(std::vector<float>(static_cast<size_t>(2 * rows)), rows, 1),
      &response);
}

class TlsTest : public ::testing::Test {
 protected:
  TlsTest() {
    files_.WriteServer(authority_.IssueServer());
    files_.Write("ca", authority_.pem());
  }

  const Authority authority_;
  const Files files_;
};

// --- TLS

TEST_F(TlsTest, MutualTlsGivesTheSameBitsAsPlaintext) {
  const ServerProcess server(files_.TlsFlags(/*mutual=*/true));
  std::vector<float> logits(3 * 5000);
  for (size_t i = 0; i < logits.size(); ++i) logits[i] = std::sin(static_cast<float>(i) * 7) * 5;
  const v1::TopKRequest request = Request(logits, 3, 50);
  v1::TopKResponse plain;
  v1::TopKResponse tls;
  ASSERT_TRUE(TopK(Connect(server.unix_socket()), request, &plain).ok());
  const Issued own = authority_.Issue({.common_name = "job"});
  const grpc::Status status = TopK(ConnectTls(server, authority_, own), request, &tls);
  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(Bits(plain), Bits(tls));
  ExpectRight(logits, 3, {50}, {}, tls);
  EXPECT_EQ(server.Metric(Handshakes("ok")), 1);
}

TEST_F(TlsTest, ACertificateMustBeThereAndValid) {
  const ServerProcess server(files_.TlsFlags(/*mutual=*/true));
  const Issued expired = authority_.Issue({.common_name = "job", .to_seconds = -60});
  const Issued early = authority_.Issue({.common_name = "job", .from_seconds = 600});
  const Issued stranger = Authority().Issue({.common_name = "job"});
  for (const Issued& own : {Issued{}, expired, early, stranger}) {
    const grpc::Status status = SmallTopK(ConnectTls(server, authority_, own), kPatience);
    EXPECT_EQ(status.error_code(), grpc::StatusCode::UNAVAILABLE) << status.error_message();
  }
  EXPECT_GE(server.Metric(Handshakes("certificate")), 4);
  EXPECT_EQ(server.Metric(Handshakes("ok")), 0);
  // And the client checks the server.
  const Issued own = authority_.Issue({.common_name = "job"});
  EXPECT_FALSE(SmallTopK(ConnectTls(server, Authority(), own), absl::Seconds(2)).ok());
  EXPECT_TRUE(SmallTopK(ConnectTls(server, authority_, own)).ok());
}

TEST_F(TlsTest, PlaintextAndGarbageDoNotComeIn) {
  const ServerProcess server(files_.TlsFlags());
  const auto honest = ConnectTls(server, authority_);
  ASSERT_TRUE(SmallTopK(honest).ok());
  EXPECT_FALSE(SmallTopK(Connect(server.tcp()), absl::Seconds(1)).ok());
  RawPeer peer(server.port());
  peer.Send(std::string(1000, 'x'));
  EXPECT_TRUE(peer.EndsWithin(kPatience));
  EXPECT_GE(server.Metric(Handshakes("protocol")), 2);
  EXPECT_THAT(server.Log(), HasSubstr(" was closed: its TLS handshake failed: "));
  EXPECT_TRUE(SmallTopK(honest).ok());
}

TEST_F(TlsTest, LargeMessagesPassBothWays) {
  const ServerProcess server(files_.TlsFlags());
  const auto channel = ConnectTls(server, authority_);
  v1::AttentionSoftmaxRequest request;
  request.set_dtype(v1::DTYPE_F32);
  request.set_batch(1);
  request.set_heads(1);
  request.set_queries(4096);
  request.set_keys(4096);  // 64 MiB
  std::vector<float> scores(size_t{4096} * 4096);
  for (size_t i = 0; i < scores.size(); ++i) scores[i] = static_cast<float>(i * 31 % 1000) * 0.01f;
  request.set_scores(scores.data(), scores.size() * sizeof(float));
  const auto stub = v1::Attention::NewStub(channel);
  v1::AttentionSoftmaxResponse tls;
  v1::AttentionSoftmaxResponse plain;
  grpc::Status status = stub->Softmax(Context().get(), request, &tls);
  ASSERT_TRUE(status.ok()) << status.error_message();
  status = v1::Attention::NewStub(Connect(server.unix_socket()))
               ->Softmax(Context().get(), request, &plain);
  ASSERT_TRUE(status.ok()) << status.error_message();
  ASSERT_EQ(tls.probs().size(), scores.size() * sizeof(float));
  EXPECT_TRUE(tls.probs() == plain.probs());
}

TEST_F(TlsTest, ManySmallCallsOnManyConnections) {
  const ServerProcess server(files_.TlsFlags());
  std::vector<std::thread> threads;
  std::atomic<int> failed = 0;
  for (int t = 0; t < 8; ++t) {
    threads.emplace_back([&] {
      const auto channel = ConnectTls(server, authority_);
      for (int i = 0; i < 250; ++i) {
        if (!SmallTopK(channel).ok()) ++failed;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(failed, 0);
  EXPECT_EQ(server.Metric(Requests("OK")), 2000);
}

// A TLS client that sends any bytes.
class RawTlsPeer {
 public:
  explicit RawTlsPeer(int port)
      : context_(SSL_CTX_new(TLS_client_method()), &SSL_CTX_free),
        ssl_(SSL_new(context_.get()), &SSL_free),
        fd_(ConnectSocket(port)) {
    static constexpr unsigned char kProtocols[] = {2, 'h', '2'};
    SSL_set_alpn_protos(ssl_.get(), kProtocols, sizeof(kProtocols));
    SSL_set_fd(ssl_.get(), fd_);
  }
  ~RawTlsPeer() { close(fd_); }
  RawTlsPeer(const RawTlsPeer&) = delete;
  RawTlsPeer& operator=(const RawTlsPeer&) = delete;

  bool Handshake() { return SSL_connect(ssl_.get()) == 1; }
  bool Send(const std::string& bytes) {
    return SSL_write(ssl_.get(), bytes.data(), static_cast<int>(bytes.size())) > 0;
  }

 private:
  const std::unique_ptr<SSL_CTX, decltype(&SSL_CTX_free)> context_;
  const std::unique_ptr<SSL, decltype(&SSL_free)> ssl_;
  const int fd_;
};

// The frames of a connection are checked after its TLS.
TEST_F(TlsTest, AnAttackOnHttp2IsCutThroughTls) {
  const ServerProcess server(files_.TlsFlags());
  RawTlsPeer peer(server.port());
  ASSERT_TRUE(peer.Handshake());
  std::string bytes = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + Frame(kSettings, 0, 0, "");
  for (int i = 0; i < 64; ++i) bytes += Frame(kPing, 0, 0, "12345678");
  ASSERT_TRUE(peer.Send(bytes));
  EXPECT_TRUE(server.WaitForMetric("logitd_connections_cut_total{reason=\"pings\"}", '=', 1));
}

// The limit of handshakes counts those that are not finished.
TEST_F(TlsTest, MoreConnectionsThanHandshakesMayBeOpen) {
  const ServerProcess server(files_.TlsFlags());
  std::deque<RawTlsPeer> peers;
  for (int i = 0; i < 700; ++i) {
    peers.emplace_back(server.port());
    ASSERT_TRUE(peers.back().Handshake()) << i;
  }
  EXPECT_TRUE(server.WaitForMetric(Handshakes("ok"), '=', 700));
  EXPECT_EQ(server.Metric("logitd_connections"), 700);
  EXPECT_LE(server.Metric(Handshakes("evicted")), 0);
}

void AllowFiles(rlim_t files) {
  rlimit limit = {};
  getrlimit(RLIMIT_NOFILE, &limit);
  limit.rlim_cur = std::min(limit.rlim_max, files);
  setrlimit(RLIMIT_NOFILE, &limit);
}

TEST(ResidentMemoryTest, AFloodOfUnfinishedHandshakesIsBounded) {
  constexpr int kPeers = 3000;
  AllowFiles(kPeers + 200);
  const Authority authority;
  const Files files;
  files.WriteServer(authority.IssueServer());
  ServerProcess server(files.TlsFlags());
  const auto before_flood = ConnectTls(server, authority);
  ASSERT_TRUE(SmallTopK(before_flood).ok());
  const int64_t before = server.RssBytes();
  std::vector<int> peers;
  // The first bytes of a ClientHello that says it is long.
  const std::string start("\x16\x03\x01\x40\x00\x01\x00\x3f\xf0\x03\x03", 11);
  for (int i = 0; i < kPeers; ++i) {
    peers.push_back(ConnectSocket(server.port()));
    if (i % 2 == 0) send(peers.back(), start.data(), start.size(), MSG_NOSIGNAL);
    if (i % 500 == 250) {
      EXPECT_TRUE(SmallTopK(ConnectTls(server, authority), kPatience).ok()) << i;
    }
  }
  EXPECT_TRUE(server.WaitForMetric(Handshakes("evicted"), '>', kPeers - 512 - 1));
  EXPECT_LE(server.Metric("logitd_connections"), 512 + 10);
  EXPECT_TRUE(SmallTopK(before_flood).ok());
  server.ExpectGrownLess(before, 128);
  // Those that are left end by themselves.
  EXPECT_TRUE(server.WaitForMetric(Handshakes("timeout"), '>', 100));
  EXPECT_TRUE(server.WaitForMetric("logitd_connections", '=', 1));
  for (const int fd : peers) close(fd);
}

// --- rotation

TEST_F(TlsTest, ARotatedCertificateDropsNoCall) {
  // As Kubernetes does it: links into a directory behind a link.
  const Authority next_authority("next");
  for (const char* version : {"1", "2"}) fs::create_directories(files_.Path(version));
  const Issued first = authority_.IssueServer();
  const Issued second = next_authority.IssueServer();
  files_.Write("1/cert", first.certificate);
  files_.Write("1/key", first.key);
  files_.Write("2/cert", second.certificate);
  files_.Write("2/key", second.key);
  fs::create_directory_symlink("1", files_.Path("data"));
  for (const char* name : {"cert", "key"}) {
    fs::remove(files_.Path(name));
    fs::create_symlink(absl::StrCat("data/", name), files_.Path(name));
  }
  const ServerProcess server(files_.TlsFlags());
  std::atomic<bool> stop = false;
  std::atomic<int> failed = 0;
  std::atomic<int> calls = 0;
  std::vector<std::thread> threads;
  for (int t = 0; t < 2; ++t) {  // on one connection, and on many
    threads.emplace_back([&, reconnect = t == 1] {
      const auto connect = [&] {
        return grpc::CreateCustomChannel(
            server.tcp(),
            grpc::SslCredentials({.pem_root_certs = authority_.pem() + next_authority.pem()}), [] {
              grpc::ChannelArguments arguments;
              arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
              return arguments;
            }());
      };
      auto channel = connect();
      while (!stop) {
        if (reconnect) channel = connect();
        if (!SmallTopK(channel).ok()) ++failed;
        ++calls;
      }
    });
  }
  EXPECT_TRUE(server.WaitForMetric(Handshakes("ok"), '>', 5));
  fs::create_directory_symlink("2", files_.Path("data2"));
  fs::rename(files_.Path("data2"), files_.Path("data"));
  EXPECT_TRUE(
      server.WaitForMetric("logitd_file_reads_total{file=\"tls\",result=\"used\"}", '=', 2));
  EXPECT_TRUE(SmallTopK(ConnectTls(server, next_authority)).ok());
  EXPECT_FALSE(SmallTopK(ConnectTls(server, authority_), absl::Seconds(1)).ok());
  absl::SleepFor(absl::Milliseconds(200));
  stop = true;
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(failed, 0) << "of " << calls;
}

TEST_F(TlsTest, ABrokenCertificateLeavesTheOldOne) {
  const ServerProcess server(files_.TlsFlags());
  constexpr char kStale[] = "logitd_file_stale{file=\"tls\"}";
  const double expiry = server.Metric("logitd_tls_certificate_expiry_seconds");
  EXPECT_NEAR(expiry, static_cast<double>(absl::ToUnixSeconds(absl::Now())) + 3600, 120);
  files_.Write("cert", "broken");
  EXPECT_TRUE(server.WaitForMetric(kStale, '=', 1));
  EXPECT_TRUE(SmallTopK(ConnectTls(server, authority_)).ok());
  EXPECT_THAT(server.Log(), HasSubstr("cannot be used"));
  EXPECT_EQ(server.Metric("logitd_tls_certificate_expiry_seconds"), expiry);
  files_.WriteServer(authority_.IssueServer(/*to_seconds=*/7200));
  EXPECT_TRUE(server.WaitForMetric(kStale, '=', 0));
  EXPECT_NEAR(server.Metric("logitd_tls_certificate_expiry_seconds"), expiry + 3600, 120);
}

TEST_F(TlsTest, AWrongFileAtTheStartSaysSo) {
  std::vector<std::string> flags = files_.TlsFlags();
  flags.push_back("--backend=cpu");
  flags.push_back("--metrics-listen=off");
  files_.WriteServer(authority_.IssueServer(/*to_seconds=*/-1));
  const Ended expired = RunToEnd(flags);
  EXPECT_EQ(expired.exit_code, 2);
  EXPECT_THAT(expired.text, HasSubstr("expired"));
  files_.Write("cert", "broken");
  const Ended broken = RunToEnd(flags);
  EXPECT_EQ(broken.exit_code, 2);
  EXPECT_THAT(broken.text, HasSubstr("got no certificate, allowed PEM"));
  fs::remove(files_.Path("cert"));
  const Ended missing = RunToEnd(flags);
  EXPECT_EQ(missing.exit_code, 2);
  EXPECT_THAT(missing.text, HasSubstr("allowed a file that exists"));
}

// --- the life of connections

TEST_F(TlsTest, AnOldConnectionEndsWithoutADroppedCall) {
  const ServerProcess server(With(files_.TlsFlags(), {"--max-connection-age=1s"}));
  const auto channel = ConnectTls(server, authority_);
  const absl::Time end = absl::Now() + kPatience;
  int calls = 0;
  for (; server.Metric(Handshakes("ok")) < 3 && absl::Now() < end; ++calls) {
    const grpc::Status status = SmallTopK(channel);
    ASSERT_TRUE(status.ok()) << status.error_message() << " after " << calls;
  }
  EXPECT_LT(absl::Now(), end) << "one connection served all";
}

TEST_F(TlsTest, AnIdleConnectionEnds) {
  const ServerProcess server(With(files_.TlsFlags(), {"--max-connection-idle=1s"}));
  const auto channel = ConnectTls(server, authority_);
  ASSERT_TRUE(SmallTopK(channel).ok());
  EXPECT_TRUE(server.WaitForMetric("logitd_connections", '=', 0));
  EXPECT_TRUE(SmallTopK(channel).ok());
}

// --- identities

class IdentityTest : public TlsTest {
 protected:
  IdentityTest() {
    files_.WriteTokens(
        {Entry("frontend", "\"infer\"", kInferToken), Entry("scorer", "\"score\"", kScoreToken)});
  }
  std::vector<std::string> Flags() const {
    return With(files_.TlsFlags(), {"--tokens=" + files_.Path("tokens")});
  }
};

TEST_F(IdentityTest, OnlyAKnownTokenMayCall) {
  const ServerProcess server(Flags());
  const auto channel = ConnectTls(server, authority_);
  EXPECT_TRUE(TopKAs(channel, kInferToken).ok());
  const std::string wrong = "token-that-is-wrong-0123456789";
  for (const std::string& token : {std::string(), wrong, std::string("short")}) {
    const grpc::Status status = TopKAs(channel, token);
    EXPECT_EQ(status.error_code(), grpc::StatusCode::UNAUTHENTICATED) << token;
    EXPECT_THAT(status.error_message(), Not(HasSubstr(wrong)));
  }
  auto basic = Context();
  basic->AddMetadata("authorization", absl::StrCat("Basic ", kInferToken));
  EXPECT_EQ(TopKAs(channel, "", 1, std::move(basic)).error_code(),
            grpc::StatusCode::UNAUTHENTICATED);
  auto twice = WithToken(kInferToken);
  twice->AddMetadata("authorization", absl::StrCat("Bearer ", kInferToken));
  EXPECT_EQ(TopKAs(channel, "", 1, std::move(twice)).error_code(),
            grpc::StatusCode::UNAUTHENTICATED);
  // A Unix socket is no way around.
  EXPECT_EQ(TopKAs(Connect(server.unix_socket()), "").error_code(),
            grpc::StatusCode::UNAUTHENTICATED);
  EXPECT_EQ(server.Metric(Refused("unauthenticated", "none")), 6);
  EXPECT_THAT(server.Log(), HasSubstr("TopK of ipv4:127.0.0.1:"));
  EXPECT_THAT(server.Log(), Not(HasSubstr(wrong)));
}

TEST_F(IdentityTest, ARoleAllowsItsMethodsOnly) {
  const ServerProcess server(With(Flags(), {"--head-root=" + ::testing::TempDir()}));
  const auto channel = ConnectTls(server, authority_);
  const grpc::Status denied = TopKAs(channel, kScoreToken);
  EXPECT_EQ(denied.error_code(), grpc::StatusCode::PERMISSION_DENIED);
  EXPECT_EQ(denied.error_message(), "scorer may not call TopK: got the roles score, allowed infer");
  EXPECT_EQ(server.Metric(Refused("role")), 1);

  v1::ScoreRequest score = Of<v1::ScoreRequest>({1, 2, 3, 4}, 2);
  score.add_targets(0);
  score.add_targets(1);
  v1::ScoreResponse scored;
  const auto scorer = v1::Scorer::NewStub(channel);
  EXPECT_TRUE(scorer->Score(WithToken(kScoreToken).get(), score, &scored).ok());
  EXPECT_EQ(scorer->Score(WithToken(kInferToken).get(), score, &scored).error_code(),
            grpc::StatusCode::PERMISSION_DENIED);
  v1::DivergenceRequest pair = Of<v1::DivergenceRequest>({1, 2, 3, 4}, 2);
  pair.set_reference_logits(pair.logits());
  v1::DivergenceResponse compared;
  EXPECT_TRUE(scorer->Divergence(WithToken(kScoreToken).get(), pair, &compared).ok());
  EXPECT_EQ(scorer->Divergence(WithToken(kInferToken).get(), pair, &compared).error_code(),
            grpc::StatusCode::PERMISSION_DENIED);
  auto context = WithToken(kScoreToken);
  auto stream = v1::Sampler::NewStub(channel)->SampleStream(context.get());
  EXPECT_EQ(stream->Finish().error_code(), grpc::StatusCode::PERMISSION_DENIED);

  const auto heads = v1::Heads::NewStub(channel);
  v1::ListHeadsResponse list;
  v1::UnloadHeadResponse unloaded;
  v1::UnloadHeadRequest unload;
  unload.set_name("x");
  EXPECT_TRUE(heads->List(WithToken(kInferToken).get(), {}, &list).ok());
  EXPECT_EQ(heads->List(Context().get(), {}, &list).error_code(),
            grpc::StatusCode::UNAUTHENTICATED);
  EXPECT_EQ(heads->Unload(WithToken(kInferToken).get(), unload, &unloaded).error_code(),
            grpc::StatusCode::PERMISSION_DENIED);
  v1::LoadHeadRequest load;
  load.set_name("x");
  load.set_path("none");
  auto load_context = WithToken(kInferToken);
  EXPECT_EQ(heads->Load(load_context.get(), load)->Finish().error_code(),
            grpc::StatusCode::PERMISSION_DENIED);
  v1::GetInfoResponse info;
  const auto about = v1::Server::NewStub(channel);
  EXPECT_TRUE(about->GetInfo(WithToken(kScoreToken).get(), {}, &info).ok());
  EXPECT_EQ(about->GetInfo(Context().get(), {}, &info).error_code(),
            grpc::StatusCode::UNAUTHENTICATED);
}

TEST_F(IdentityTest, CertificatesAndUsersAreIdentitiesToo) {
  files_.WriteTokens(
      {R"({"name": "job", "roles": ["infer"], "certificates": ["uri:spiffe://job"]})",
       absl::StrCat(R"({"name": "local", "roles": ["infer"], "uids": [)", geteuid(), "]}")});
  const ServerProcess server(
      With(files_.TlsFlags(/*mutual=*/true), {"--tokens=" + files_.Path("tokens")}));
  const Issued job = authority_.Issue({.alternative_names = "URI:spiffe://job"});
  const Issued other = authority_.Issue({.alternative_names = "URI:spiffe://other"});
  EXPECT_TRUE(SmallTopK(ConnectTls(server, authority_, job)).ok());
  EXPECT_EQ(SmallTopK(ConnectTls(server, authority_, other)).error_code(),
            grpc::StatusCode::UNAUTHENTICATED);
  EXPECT_TRUE(SmallTopK(Connect(server.unix_socket())).ok());
}

TEST_F(IdentityTest, ARemovedTokenEndsItsStreamsAndCalls) {
  const ServerProcess server(Flags());
  const auto channel = ConnectTls(server, authority_);
  auto context = WithToken(kInferToken);
  auto stream = v1::Sampler::NewStub(channel)->SampleStream(context.get());
  v1::SampleRequest request = Of<v1::SampleRequest>({1, 2}, 1);
  request.add_seed(0);
  request.add_position(0);
  v1::SampleResponse response;
  ASSERT_TRUE(stream->Write(request));
  ASSERT_TRUE(stream->Read(&response));
  files_.Write("tokens", "broken");
  EXPECT_TRUE(server.WaitForMetric("logitd_file_stale{file=\"tokens\"}", '=', 1));
  ASSERT_TRUE(stream->Write(request));
  ASSERT_TRUE(stream->Read(&response));
  files_.WriteTokens({Entry("scorer", "\"score\"", kScoreToken)});
  EXPECT_FALSE(stream->Read(&response));
  EXPECT_EQ(stream->Finish().error_code(), grpc::StatusCode::UNAUTHENTICATED);
  EXPECT_EQ(TopKAs(channel, kInferToken).error_code(), grpc::StatusCode::UNAUTHENTICATED);
}

// --- quotas

TEST_F(IdentityTest, TheQuotaOfCallsHoldsForCallsAndStreams) {
  files_.WriteTokens({Entry("one", "\"infer\"", kInferToken, R"(, "max_calls": 1)"),
                      Entry("two", "\"infer\"", kScoreToken)});
  const ServerProcess server(Flags());
  const auto channel = ConnectTls(server, authority_);
  for (int i = 0; i < 50; ++i) {
    ASSERT_TRUE(TopKAs(channel, kInferToken).ok()) << "one after another, call " << i;
  }
  {
    auto context = WithToken(kInferToken);
    auto stream = v1::Sampler::NewStub(channel)->SampleStream(context.get());
    v1::SampleRequest request = Of<v1::SampleRequest>({1, 2}, 1);
    request.add_seed(0);
    request.add_position(0);
    v1::SampleResponse response;
    ASSERT_TRUE(stream->Write(request));
    ASSERT_TRUE(stream->Read(&response));
    const grpc::Status refused = TopKAs(channel, kInferToken);
    EXPECT_EQ(refused.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
    EXPECT_THAT(refused.error_message(), HasSubstr("allowed 1"));
    auto second = WithToken(kInferToken);
    EXPECT_EQ(v1::Sampler::NewStub(channel)->SampleStream(second.get())->Finish().error_code(),
              grpc::StatusCode::RESOURCE_EXHAUSTED);
    EXPECT_TRUE(TopKAs(channel, kScoreToken).ok());
    stream->WritesDone();
    EXPECT_TRUE(stream->Finish().ok());
  }
  EXPECT_TRUE(TopKAs(channel, kInferToken).ok());
  EXPECT_EQ(server.Metric(Refused("quota_calls")), 2);
}

TEST_F(IdentityTest, TheQuotaOfRowsTellsWhenToRetry) {
  files_.WriteTokens({Entry("one", "\"infer\"", kInferToken, R"(, "max_rows_per_second": 10)")});
  const ServerProcess server(Flags());
  const auto channel = ConnectTls(server, authority_);
  EXPECT_TRUE(TopKAs(channel, kInferToken, /*rows=*/30).ok());
  auto owned = WithToken(kInferToken);
  grpc::ClientContext& context = *owned;
  v1::TopKResponse response;
  const grpc::Status refused =
      v1::Sampler::NewStub(channel)->TopK(&context, Request({1, 2}, 1, 1), &response);
  EXPECT_EQ(refused.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_THAT(refused.error_message(), HasSubstr("allowed 10 rows per second"));
  const auto& trailers = context.GetServerTrailingMetadata();
  const auto delay = trailers.find("grpc-retry-pushback-ms");
  ASSERT_NE(delay, trailers.end());
  const int ms = std::stoi(std::string(delay->second.data(), delay->second.size()));
  EXPECT_GT(ms, 500);
  EXPECT_LE(ms, 2000);
  absl::SleepFor(absl::Milliseconds(ms + 20));
  EXPECT_TRUE(TopKAs(channel, kInferToken).ok());
  EXPECT_EQ(server.Metric(Refused("quota_rows")), 1);
}

TEST_F(IdentityTest, TheQuotaOfBytesCountsWhatCallsHold) {
  files_.WriteTokens({Entry("one", "\"infer\"", kInferToken, R"(, "max_held_bytes": 1000000)"),
                      Entry("two", "\"infer\"", kScoreToken)});
  const ServerProcess server(Flags());
  const auto channel = ConnectTls(server, authority_);
  EXPECT_TRUE(TopKAs(channel, kInferToken).ok());  // its message tells its size
  v1::TopKResponse response;
  const grpc::Status large = v1::Sampler::NewStub(channel)->TopK(
      WithToken(kInferToken).get(), Request(std::vector<float>(250'000), 1, 1), &response);
  EXPECT_EQ(large.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_THAT(large.error_message(), HasSubstr(", allowed 1000000; retry after "));
  const auto stated = [] {
    auto context = WithToken(kInferToken);
    context->AddMetadata("logitd-payload-bytes", "600000");
    return context;
  };
  {
    GenericCall holds(channel, kTopK);
    holds.context().AddMetadata("authorization", absl::StrCat("Bearer ", kInferToken));
    holds.context().AddMetadata("logitd-payload-bytes", "600000");
    ASSERT_TRUE(holds.Start());
    EXPECT_TRUE(server.WaitForMetric(kHeldBytes, '>', 0));
    EXPECT_EQ(TopKAs(channel, "", 1, stated()).error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
    EXPECT_TRUE(TopKAs(channel, kScoreToken).ok());
  }
  EXPECT_TRUE(server.WaitForMetric(kHeldBytes, '=', 0));
  EXPECT_TRUE(TopKAs(channel, "", 1, stated()).ok());
  EXPECT_EQ(server.Metric(Refused("quota_bytes")), 2);
}

// --- what the server refuses to be

TEST_F(TlsTest, OtherMachinesReachItOnlyWithTlsAndIdentities) {
  const std::vector<std::string> remote = {"--listen=0.0.0.0:0", "--backend=cpu",
                                           "--metrics-listen=off"};
  files_.WriteTokens({Entry("one", "\"infer\"", kInferToken)});
  for (const auto& more : {std::vector<std::string>{}, files_.TlsFlags(),
                           std::vector<std::string>{"--tokens=" + files_.Path("tokens")}}) {
    const Ended ended = RunToEnd(With(remote, more));
    EXPECT_EQ(ended.exit_code, 2) << ended.text;
    EXPECT_THAT(ended.text, HasSubstr("--insecure"));
  }
  for (const auto& more : {std::vector<std::string>{"--insecure"}, files_.TlsFlags(/*mutual=*/true),
                           With(files_.TlsFlags(), {"--tokens=" + files_.Path("tokens")})}) {
    const ServerProcess server(With({"--listen=0.0.0.0:0"}, more));
    EXPECT_THAT(server.Log(), HasSubstr("listening on 0.0.0.0:"));
  }
}

}  // namespace
}  // namespace logitd::e2e
