// The server's certificate, key and rules for TLS; OpenSSL's objects with owners, and its errors as
// text.
#ifndef LOGITD_SERVER_DOOR_TLS_CONTEXT_H_
#define LOGITD_SERVER_DOOR_TLS_CONTEXT_H_

#include <openssl/bio.h>
#include <openssl/err.h>
#include <openssl/evp.h>
#include <openssl/ssl.h>
#include <openssl/x509.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace logitd::door {

template <auto free>
struct OpensslFree {
  template <typename T>
  void operator()(T* object) const {
    free(object);
  }
};
using OwnedBio = std::unique_ptr<BIO, OpensslFree<&BIO_free_all>>;
using OwnedKey = std::unique_ptr<EVP_PKEY, OpensslFree<&EVP_PKEY_free>>;
using OwnedCertificate = std::unique_ptr<X509, OpensslFree<&X509_free>>;
using OwnedContext = std::unique_ptr<SSL_CTX, OpensslFree<&SSL_CTX_free>>;
using OwnedSsl = std::unique_ptr<SSL, OpensslFree<&SSL_free>>;

// The reason of the thread's newest error, which is cleared with all others: "bad decrypt".
inline std::string TakeOpensslError() {
  const unsigned long error = ERR_peek_last_error();
  const char* const reason = ERR_reason_error_string(error);
  ERR_clear_error();
  return reason == nullptr ? "unknown error" : reason;
}

// Contents of PEM files.
struct TlsPems {
  std::string certificate;  // the server's, and then those that lead to its root
  std::string key;          // of the server's certificate, without a passphrase
  // Whose certificates clients must have; nullopt: clients need none.
  std::optional<std::string> client_ca;
};

// Immutable, so thread-safe. TLS 1.2 and 1.3 with forward secrecy and authenticated ciphers, HTTP/2
// only (ALPN), no renegotiation, no compression and no resumption: a resumed session would skip the
// check of the client's certificate.
class TlsContext {
 public:
  // INVALID_ARGUMENT says which part of `pems` is wrong. A certificate that has expired is refused.
  static absl::StatusOr<std::shared_ptr<const TlsContext>> Create(const TlsPems& pems);

  // A new connection's end, in its server role.
  OwnedSsl NewSsl() const;
  // When the server's certificate expires.
  absl::Time expiry() const { return expiry_; }

 private:
  TlsContext(OwnedContext context, absl::Time expiry)
      : context_(std::move(context)), expiry_(expiry) {}

  const OwnedContext context_;
  const absl::Time expiry_;
};

// The context for the next handshake. Thread-safe.
class TlsSource {
 public:
  // Replaces the context; where `pems` are wrong, as TlsContext::Create says, the old one stays.
  absl::Status Set(const TlsPems& pems);
  // Null before the first Set.
  std::shared_ptr<const TlsContext> Get() const;

 private:
  mutable absl::Mutex mutex_;
  std::shared_ptr<const TlsContext> context_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace logitd::door

#endif  // LOGITD_SERVER_DOOR_TLS_CONTEXT_H_
