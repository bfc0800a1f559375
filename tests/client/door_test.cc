// TLS and tokens of the client library, logitctl and load_bench, against the real server.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <openssl/sha.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "client/client.h"
#include "tests/becomes.h"
#include "tests/certificates.h"
#include "tests/client/running_logitd.h"
#include "tests/client/subprocess.h"
#include "tests/client/test_files.h"

namespace logitd {
namespace {

using ::logitd::testing::Ran;
using ::logitd::testing::RunBinary;
using ::logitd::testing::TempDir;
using ::testing::HasSubstr;

constexpr char kToken[] = "a-token-of-the-tests-0123456789";

std::string HashOf(const std::string& token) {
  unsigned char hash[SHA256_DIGEST_LENGTH];
  SHA256(reinterpret_cast<const unsigned char*>(token.data()), token.size(), hash);
  return absl::BytesToHexString(
      absl::string_view(reinterpret_cast<const char*>(hash), sizeof(hash)));
}

int FreePort() {
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address = {.sin_family = AF_INET};
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof(address);
  EXPECT_EQ(bind(fd, reinterpret_cast<sockaddr*>(&address), length), 0);
  getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length);
  close(fd);
  return ntohs(address.sin_port);
}

// A server with mutual TLS and one token, and the files of its client.
class SecureLogitdTest : public ::logitd::testing::RunningLogitd {
 protected:
  SecureLogitdTest() : SecureLogitdTest(FreePort()) {}

  std::string tcp() const { return absl::StrCat("127.0.0.1:", port_); }
  client::ClientOptions Options() const {
    client::ClientOptions options;
    options.address = tcp();
    options.tls = {.ca_file = dir_.path("ca"),
                   .cert_file = dir_.path("own-cert"),
                   .key_file = dir_.path("own-key")};
    options.token = kToken;
    options.deadline = absl::Seconds(10);
    return options;
  }
  std::vector<std::string> TlsFlags() const {
    return {"--addr",     tcp(),
            "--tls-ca",   dir_.path("ca"),
            "--tls-cert", dir_.path("own-cert"),
            "--tls-key",  dir_.path("own-key")};
  }

  const int port_;
  const std::shared_ptr<const testing::Authority> authority_;

 private:
  explicit SecureLogitdTest(int port)
      : SecureLogitdTest(port, std::make_shared<const testing::Authority>()) {}
  SecureLogitdTest(int port, const std::shared_ptr<const testing::Authority>& authority)
      : RunningLogitd([port, &authority](const TempDir& dir) {
          const testing::Issued server = authority->IssueServer();
          const testing::Issued own = authority->Issue({.common_name = "test"});
          dir.Write("own-cert", own.certificate);
          dir.Write("own-key", own.key);
          dir.Write("token", absl::StrCat(kToken, "\n"));
          const std::string ca = dir.Write("ca", authority->pem());
          return Flags{"--listen",
                       absl::StrCat("127.0.0.1:", port),
                       "--tls-cert",
                       dir.Write("cert", server.certificate),
                       "--tls-key",
                       dir.Write("key", server.key),
                       "--tls-client-ca",
                       ca,
                       "--tokens",
                       dir.Write("tokens", absl::StrCat(R"({"identities": [{"name": "test", )",
                                                        R"("roles": ["infer"], "token_sha256": [")",
                                                        HashOf(kToken), R"("]}]})"))};
        }),
        port_(port),
        authority_(authority) {}
};

TEST_F(SecureLogitdTest, TheLibraryCallsWithCertificateAndToken) {
  const auto client = client::Client::Create(Options());
  ASSERT_TRUE(client.ok()) << client.status();
  const auto info = (*client)->Info();
  EXPECT_TRUE(info.ok()) << info.status();
  EXPECT_TRUE((*client)->ListHeads().ok());
  EXPECT_TRUE((*client)->Health("").ok());
  v1::LoadHeadRequest load;
  load.set_name("x");
  EXPECT_EQ((*client)->LoadHead(load, nullptr).status().code(),
            absl::StatusCode::kPermissionDenied);
}

TEST_F(SecureLogitdTest, WithoutEitherItIsRefused) {
  client::ClientOptions options = Options();
  options.token = "another-token-0123456789";
  EXPECT_EQ((*client::Client::Create(options))->Info().status().code(),
            absl::StatusCode::kUnauthenticated);
  options.token = "";
  EXPECT_EQ((*client::Client::Create(options))->Info().status().code(),
            absl::StatusCode::kUnauthenticated);
  options = Options();
  options.deadline = absl::Seconds(2);
  options.tls->cert_file = options.tls->key_file = "";
  EXPECT_FALSE((*client::Client::Create(options))->Info().ok());
}

TEST_F(SecureLogitdTest, AServerOfAnotherNameOrAuthorityIsRefused) {
  client::ClientOptions options = Options();
  options.deadline = absl::Seconds(2);
  options.tls->server_name = "localhost";
  EXPECT_TRUE((*client::Client::Create(options))->Info().ok());
  options.tls->server_name = "other.example";
  EXPECT_EQ((*client::Client::Create(options))->Info().status().code(),
            absl::StatusCode::kUnavailable);
  options = Options();
  options.deadline = absl::Seconds(2);
  options.tls->ca_file = dir_.Write("other-ca", testing::Authority("other").pem());
  EXPECT_EQ((*client::Client::Create(options))->Info().status().code(),
            absl::StatusCode::kUnavailable);
}

TEST_F(SecureLogitdTest, ANewCertificateIsUsedByTheNextConnection) {
  const testing::Issued expired = authority_->Issue({.common_name = "test", .to_seconds = -60});
  client::ClientOptions options = Options();
  options.tls->cert_file = dir_.Write("rotated-cert", expired.certificate);
  options.tls->key_file = dir_.Write("rotated-key", expired.key);
  options.deadline = absl::Seconds(2);
  const auto client = client::Client::Create(options);
  ASSERT_TRUE(client.ok()) << client.status();
  EXPECT_FALSE((*client)->Info().ok());
  const testing::Issued fresh = authority_->Issue({.common_name = "test"});
  dir_.Write("rotated-key", fresh.key);
  dir_.Write("rotated-cert", fresh.certificate);
  EXPECT_TRUE(testing::Becomes([&] { return (*client)->Info().ok(); }));
}

TEST_F(SecureLogitdTest, LogitctlAndLoadBenchTakeFlags) {
  std::vector<std::string> info = TlsFlags();
  info.insert(info.begin(), "info");
  const Ran none = RunBinary("logitctl", info);
  EXPECT_EQ(none.code, 1);
  EXPECT_THAT(none.err, HasSubstr("--token-file or $LOGITD_TOKEN"));
  setenv("LOGITD_TOKEN", kToken, 1);
  EXPECT_EQ(RunBinary("logitctl", info).code, 0);
  unsetenv("LOGITD_TOKEN");
  info.insert(info.end(), {"--token-file", dir_.path("token")});
  const Ran ran = RunBinary("logitctl", info);
  EXPECT_EQ(ran.code, 0) << ran.err;
  std::vector<std::string> bench = TlsFlags();
  bench.insert(bench.end(), {"--token-file", dir_.path("token"), "--vocab", "100", "--k", "5",
                             "--warmup", "0", "--duration", "0.2"});
  const Ran load = RunBinary("load_bench", bench);
  EXPECT_EQ(load.code, 0) << load.err;
}

TEST(TokenTest, LogitctlMakesATokenAndItsHash) {
  const Ran ran = RunBinary("logitctl", {"token", "--format", "json"});
  ASSERT_EQ(ran.code, 0) << ran.err;
  const auto json = nlohmann::json::parse(ran.out);
  EXPECT_EQ(json["token"].get<std::string>().size(), 64u);
  EXPECT_EQ(json["token_sha256"], HashOf(json["token"]));
  EXPECT_NE(RunBinary("logitctl", {"token", "--format", "json"}).out, ran.out);
}

TEST(TokenTest, ATokenDoesNotTravelInPlaintextToOtherMachines) {
  client::ClientOptions options;
  options.address = "10.1.2.3:7450";
  options.token = kToken;
  EXPECT_THAT(std::string(client::Client::Create(options).status().message()),
              HasSubstr("without TLS"));
  options.address = "127.another.machine:7450";
  EXPECT_FALSE(client::Client::Create(options).ok());
  options.token_over_plaintext = true;
  EXPECT_TRUE(client::Client::Create(options).ok());
  options.token_over_plaintext = false;
  for (const char* local : {"127.0.0.1:1", "localhost:1", "[::1]:1", "unix:/tmp/x"}) {
    options.address = local;
    EXPECT_TRUE(client::Client::Create(options).ok()) << local;
  }
  for (const char* wrong : {"short", "a token with spaces in it", "a-token-with-a-line-end\n"}) {
    options.token = wrong;
    EXPECT_THAT(std::string(client::Client::Create(options).status().message()),
                HasSubstr("allowed 16 to 512 printable"));
  }
}

TEST(TlsOptionsTest, FilesThatCannotBeReadAreNamed) {
  client::ClientOptions options;
  options.tls = {.ca_file = "/nonexistent/ca"};
  EXPECT_THAT(std::string(client::Client::Create(options).status().message()),
              HasSubstr("/nonexistent/ca"));
  options.tls = {.cert_file = "/nonexistent/cert"};
  EXPECT_THAT(std::string(client::Client::Create(options).status().message()),
              HasSubstr("allowed both"));
}

TEST(TlsOptionsTest, FilesWithoutPemOfTheirKindAreRefused) {
  const testing::Authority authority;
  const testing::Issued mine = authority.Issue({});
  const testing::Issued other = authority.Issue({});
  testing::TempDir dir;
  const std::string ca = dir.Write("ca", authority.pem());
  const std::string cert = dir.Write("cert", mine.certificate);
  const std::string key = dir.Write("key", mine.key);
  const std::string wrong = dir.Write("wrong", "\x93NUMPY");
  const struct {
    client::TlsOptions tls;
    const char* error;  // nullptr: none
  } cases[] = {
      {{.ca_file = ca, .cert_file = cert, .key_file = key}, nullptr},
      {{.ca_file = wrong}, "wrong, allowed certificates in PEM"},
      {{.ca_file = key}, "key, allowed certificates in PEM"},
      {{.ca_file = ca, .cert_file = wrong, .key_file = key}, "wrong, allowed certificates in PEM"},
      {{.cert_file = cert, .key_file = wrong}, "wrong, allowed a private key in PEM"},
      {{.cert_file = cert, .key_file = dir.Write("other", other.key)},
       "other, allowed the key of the certificate in "},
  };
  for (const auto& test : cases) {
    client::ClientOptions options;
    options.tls = test.tls;
    const absl::Status status = client::Client::Create(options).status();
    if (test.error == nullptr) {
      EXPECT_TRUE(status.ok()) << status;
    } else {
      EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
      EXPECT_THAT(std::string(status.message()), HasSubstr(test.error));
    }
  }
}

}  // namespace
}  // namespace logitd
