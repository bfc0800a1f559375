#include "client/transport/pem_files.h"

#include <openssl/bio.h>
#include <openssl/err.h>
#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/x509.h>

#include <fstream>
#include <iterator>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/str_format.h"
#include "absl/strings/string_view.h"

namespace logitd::client {
namespace {

template <auto Free>
struct Freed {
  template <typename T>
  void operator()(T* object) const {
    Free(object);
  }
};
using Bio = std::unique_ptr<BIO, Freed<&BIO_free_all>>;
using Certificate = std::unique_ptr<X509, Freed<&X509_free>>;
using Key = std::unique_ptr<EVP_PKEY, Freed<&EVP_PKEY_free>>;

// Without this OpenSSL would ask on the terminal.
int NoPassphrase(char*, int, int, void*) { return 0; }

absl::Status Wrong(absl::string_view field, const std::string& path, absl::string_view allowed) {
  ERR_clear_error();
  return absl::InvalidArgumentError(
      absl::StrFormat("%s: got %s, allowed %s", field, path, allowed));
}

// The file to parse. NOT_FOUND: it cannot be read, or is empty.
absl::StatusOr<Bio> Open(absl::string_view field, const std::string& path, std::string* contents) {
  std::ifstream file(path, std::ios::binary);
  if (file.peek() != std::ifstream::traits_type::eof()) {  // missing, a folder, or empty
    contents->assign(std::istreambuf_iterator<char>(file), {});
    return Bio(BIO_new_mem_buf(contents->data(), static_cast<int>(contents->size())));
  }
  return absl::NotFoundError(absl::StrFormat(
      "%s: got %s, which cannot be read, or is empty; allowed a PEM file", field, path));
}

// The first certificate of a file.
absl::StatusOr<Certificate> ReadCertificate(absl::string_view field, const std::string& path) {
  std::string contents;
  absl::StatusOr<Bio> bio = Open(field, path, &contents);
  if (!bio.ok()) return bio.status();
  Certificate certificate(PEM_read_bio_X509(bio->get(), nullptr, NoPassphrase, nullptr));
  if (certificate == nullptr) return Wrong(field, path, "certificates in PEM");
  return certificate;
}

absl::StatusOr<Key> ReadKey(absl::string_view field, const std::string& path) {
  std::string contents;
  absl::StatusOr<Bio> bio = Open(field, path, &contents);
  if (!bio.ok()) return bio.status();
  Key key(PEM_read_bio_PrivateKey(bio->get(), nullptr, NoPassphrase, nullptr));
  if (key == nullptr) return Wrong(field, path, "a private key in PEM, without a passphrase");
  return key;
}

}  // namespace

absl::Status CheckPemFiles(const TlsOptions& tls) {
  if (tls.cert_file.empty() != tls.key_file.empty()) {
    return absl::InvalidArgumentError(
        "tls: got a certificate without a key or a key without a certificate, allowed both");
  }
  if (!tls.ca_file.empty()) {
    const absl::StatusOr<Certificate> authority = ReadCertificate("tls.ca_file", tls.ca_file);
    if (!authority.ok()) return authority.status();
  }
  if (tls.cert_file.empty()) return absl::OkStatus();
  const absl::StatusOr<Certificate> certificate = ReadCertificate("tls.cert_file", tls.cert_file);
  if (!certificate.ok()) return certificate.status();
  const absl::StatusOr<Key> key = ReadKey("tls.key_file", tls.key_file);
  if (!key.ok()) return key.status();
  if (X509_check_private_key(certificate->get(), key->get()) != 1) {
    return Wrong("tls.key_file", tls.key_file,
                 absl::StrFormat("the key of the certificate in %s", tls.cert_file));
  }
  return absl::OkStatus();
}

}  // namespace logitd::client
