#ifndef LOGITD_TESTS_HTTP2_CLIENT_HELLO_H_
#define LOGITD_TESTS_HTTP2_CLIENT_HELLO_H_

#include <openssl/ssl.h>

#include <string>

#include "server/door/tls_context.h"

namespace logitd::http2::testing {

// The first bytes that a client of TLS sends.
inline std::string ClientHello() {
  const door::OwnedContext context(SSL_CTX_new(TLS_client_method()));
  const door::OwnedSsl ssl(SSL_new(context.get()));
  BIO* const out = BIO_new(BIO_s_mem());
  SSL_set_bio(ssl.get(), BIO_new(BIO_s_mem()), out);
  SSL_connect(ssl.get());
  char* bytes = nullptr;
  const long size = BIO_get_mem_data(out, &bytes);
  return {bytes, static_cast<size_t>(size)};
}

}  // namespace logitd::http2::testing

#endif  // LOGITD_TESTS_HTTP2_CLIENT_HELLO_H_
