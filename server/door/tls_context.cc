#include "server/door/tls_context.h"

#include <openssl/pem.h>

#include <ctime>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"

namespace logitd::door {
namespace {

// AES-128 first: it is a quarter faster than AES-256, and hardware of both sides has it. A client
// that puts ChaCha20 first has no AES in hardware and gets ChaCha20.
constexpr char kTls13Ciphers[] =
    "TLS_AES_128_GCM_SHA256:TLS_AES_256_GCM_SHA384:TLS_CHACHA20_POLY1305_SHA256";
constexpr char kTls12Ciphers[] = "ECDHE+AESGCM:ECDHE+CHACHA20";

// Certificates that a client may send, in bytes. Until they are checked they are memory of anybody.
constexpr long kMaxClientChain = 32 << 10;

OwnedBio Open(const std::string& pem) {
  return OwnedBio(BIO_new_mem_buf(pem.data(), static_cast<int>(pem.size())));
}

// Without this OpenSSL would ask on the terminal.
int NoPassphrase(char*, int, int, void*) { return 0; }

absl::Status Wrong(absl::string_view what) {
  return absl::InvalidArgumentError(absl::StrCat(what, ": ", TakeOpensslError()));
}

absl::StatusOr<std::vector<OwnedCertificate>> ReadCertificates(const std::string& pem,
                                                               absl::string_view what) {
  const OwnedBio bio = Open(pem);
  std::vector<OwnedCertificate> certificates;
  ERR_clear_error();
  while (
      OwnedCertificate certificate{PEM_read_bio_X509(bio.get(), nullptr, NoPassphrase, nullptr)}) {
    certificates.push_back(std::move(certificate));
  }
  const bool at_end = ERR_GET_REASON(ERR_peek_last_error()) == PEM_R_NO_START_LINE;
  if (!at_end) return Wrong(what);
  ERR_clear_error();
  if (certificates.empty()) {
    return absl::InvalidArgumentError(absl::StrCat(what, ": got no certificate, allowed PEM"));
  }
  return certificates;
}

absl::Time ExpiryOf(X509* certificate) {
  std::tm time = {};
  if (ASN1_TIME_to_tm(X509_get0_notAfter(certificate), &time) != 1) return absl::InfinitePast();
  return absl::FromTM(time, absl::UTCTimeZone());
}

// Chooses h2. A client that does not offer it gets an alert.
int ChooseProtocol(SSL*, const unsigned char** chosen, unsigned char* chosen_bytes,
                   const unsigned char* offered, unsigned int offered_bytes, void*) {
  static constexpr unsigned char kH2[] = {2, 'h', '2'};
  unsigned char* found = nullptr;
  if (SSL_select_next_proto(&found, chosen_bytes, kH2, sizeof(kH2), offered, offered_bytes) !=
      OPENSSL_NPN_NEGOTIATED) {
    return SSL_TLSEXT_ERR_ALERT_FATAL;
  }
  *chosen = found;
  return SSL_TLSEXT_ERR_OK;
}

bool SetRules(SSL_CTX* context) {
  SSL_CTX_set_options(context, SSL_OP_NO_RENEGOTIATION | SSL_OP_NO_COMPRESSION | SSL_OP_NO_TICKET |
                                   SSL_OP_CIPHER_SERVER_PREFERENCE | SSL_OP_PRIORITIZE_CHACHA);
  SSL_CTX_set_session_cache_mode(context, SSL_SESS_CACHE_OFF);
  SSL_CTX_set_mode(context, SSL_MODE_RELEASE_BUFFERS);
  SSL_CTX_set_max_cert_list(context, kMaxClientChain);
  SSL_CTX_set_alpn_select_cb(context, &ChooseProtocol, nullptr);
  return SSL_CTX_set_min_proto_version(context, TLS1_2_VERSION) == 1 &&
         SSL_CTX_set_num_tickets(context, 0) == 1 &&
         SSL_CTX_set_ciphersuites(context, kTls13Ciphers) == 1 &&
         SSL_CTX_set_cipher_list(context, kTls12Ciphers) == 1;
}

// Clients must have a certificate of these authorities.
absl::Status DemandCertificates(SSL_CTX* context, const std::string& client_ca) {
  auto authorities = ReadCertificates(client_ca, "client CA");
  if (!authorities.ok()) return authorities.status();
  STACK_OF(X509_NAME)* const names = sk_X509_NAME_new_null();
  SSL_CTX_set_client_CA_list(context, names);  // owns them
  for (const OwnedCertificate& authority : *authorities) {
    if (X509_STORE_add_cert(SSL_CTX_get_cert_store(context), authority.get()) != 1) {
      return Wrong("client CA");
    }
    sk_X509_NAME_push(names, X509_NAME_dup(X509_get_subject_name(authority.get())));
  }
  SSL_CTX_set_verify(context, SSL_VERIFY_PEER | SSL_VERIFY_FAIL_IF_NO_PEER_CERT, nullptr);
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::shared_ptr<const TlsContext>> TlsContext::Create(const TlsPems& pems) {
  auto chain = ReadCertificates(pems.certificate, "certificate");
  if (!chain.ok()) return chain.status();
  const OwnedBio key_bio = Open(pems.key);
  const OwnedKey key(PEM_read_bio_PrivateKey(key_bio.get(), nullptr, NoPassphrase, nullptr));
  if (key == nullptr) return Wrong("key");
  OwnedContext context(SSL_CTX_new(TLS_server_method()));
  if (context == nullptr || !SetRules(context.get())) return Wrong("TLS");
  X509* const certificate = chain->front().get();
  if (SSL_CTX_use_certificate(context.get(), certificate) != 1) return Wrong("certificate");
  if (SSL_CTX_use_PrivateKey(context.get(), key.get()) != 1 ||
      SSL_CTX_check_private_key(context.get()) != 1) {
    return Wrong("key");
  }
  for (size_t i = 1; i < chain->size(); ++i) {
    if (SSL_CTX_add1_chain_cert(context.get(), (*chain)[i].get()) != 1) return Wrong("certificate");
  }
  if (pems.client_ca.has_value()) {
    if (absl::Status s = DemandCertificates(context.get(), *pems.client_ca); !s.ok()) return s;
  }
  const absl::Time expiry = ExpiryOf(certificate);
  if (expiry <= absl::Now()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "certificate: got one that expired at ",
        absl::FormatTime(absl::RFC3339_sec, expiry, absl::UTCTimeZone()), ", allowed a valid one"));
  }
  return std::shared_ptr<const TlsContext>(new TlsContext(std::move(context), expiry));
}

OwnedSsl TlsContext::NewSsl() const {
  OwnedSsl ssl(SSL_new(context_.get()));
  if (ssl != nullptr) SSL_set_accept_state(ssl.get());
  return ssl;
}

absl::Status TlsSource::Set(const TlsPems& pems) {
  auto context = TlsContext::Create(pems);
  if (!context.ok()) return context.status();
  absl::MutexLock lock(&mutex_);
  context_ = *std::move(context);
  return absl::OkStatus();
}

std::shared_ptr<const TlsContext> TlsSource::Get() const {
  absl::MutexLock lock(&mutex_);
  return context_;
}

}  // namespace logitd::door
