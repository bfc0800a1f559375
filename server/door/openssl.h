// OpenSSL's objects with owners, and its errors as text.
#ifndef LOGITD_SERVER_DOOR_OPENSSL_H_
#define LOGITD_SERVER_DOOR_OPENSSL_H_

#include <openssl/bio.h>
#include <openssl/err.h>
#include <openssl/evp.h>
#include <openssl/ssl.h>
#include <openssl/x509.h>

#include <memory>
#include <string>

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

}  // namespace logitd::door

#endif  // LOGITD_SERVER_DOOR_OPENSSL_H_
