// Certificates made by the test itself.
#ifndef LOGITD_TESTS_CERTIFICATES_H_
#define LOGITD_TESTS_CERTIFICATES_H_

#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/x509v3.h>

#include <atomic>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>

namespace logitd::testing {

// PEM.
struct Issued {
  std::string certificate;
  std::string key;
};

struct CertificateOptions {
  std::string common_name = "localhost";
  std::string alternative_names;  // as in OpenSSL's configuration: "DNS:localhost,IP:127.0.0.1"
  int from_seconds = -3600;       // from now
  int to_seconds = 3600;
};

// Issues certificates. Keys are on the curve P-256.
class Authority {
 public:
  explicit Authority(const std::string& name = "test authority") : key_(MakeKey()) {
    certificate_ = Sign(key_.get(), {.common_name = name}, /*is_authority=*/true);
  }

  std::string pem() const { return ToPem(certificate_.get()); }

  Issued Issue(const CertificateOptions& options) const {
    const Key key = MakeKey();
    const Certificate certificate = Sign(key.get(), options, /*is_authority=*/false);
    return {.certificate = ToPem(certificate.get()), .key = ToPem(key.get())};
  }

  // For a server on this machine.
  Issued IssueServer(int to_seconds = 3600) const {
    return Issue({.alternative_names = "DNS:localhost,IP:127.0.0.1", .to_seconds = to_seconds});
  }

 private:
  using Key = std::unique_ptr<EVP_PKEY, decltype(&EVP_PKEY_free)>;
  using Certificate = std::unique_ptr<X509, decltype(&X509_free)>;

  static Key MakeKey() { return Key(EVP_EC_gen("P-256"), &EVP_PKEY_free); }

  template <typename Write>
  static std::string Pem(Write write) {
    BIO* const bio = BIO_new(BIO_s_mem());
    if (write(bio) != 1) throw std::runtime_error("PEM");
    char* data = nullptr;
    const long bytes = BIO_get_mem_data(bio, &data);
    std::string text(data, static_cast<size_t>(bytes));
    BIO_free(bio);
    return text;
  }
  static std::string ToPem(X509* certificate) {
    return Pem([&](BIO* bio) { return PEM_write_bio_X509(bio, certificate); });
  }
  static std::string ToPem(EVP_PKEY* key) {
    return Pem([&](BIO* bio) {
      return PEM_write_bio_PrivateKey(bio, key, nullptr, nullptr, 0, nullptr, nullptr);
    });
  }

  static void AddExtension(X509* certificate, X509* issuer, int id, const std::string& value) {
    X509V3_CTX context;
    X509V3_set_ctx(&context, issuer, certificate, nullptr, nullptr, 0);
    X509_EXTENSION* const extension = X509V3_EXT_conf_nid(nullptr, &context, id, value.c_str());
    if (extension == nullptr) throw std::runtime_error("extension " + value);
    X509_add_ext(certificate, extension, -1);
    X509_EXTENSION_free(extension);
  }

  Certificate Sign(EVP_PKEY* key, const CertificateOptions& options, bool is_authority) const {
    static std::atomic<long> serial = 1;
    Certificate made(X509_new(), &X509_free);
    X509* const certificate = made.get();
    X509_set_version(certificate, X509_VERSION_3);
    ASN1_INTEGER_set(X509_get_serialNumber(certificate), serial++);
    X509_gmtime_adj(X509_getm_notBefore(certificate), options.from_seconds);
    X509_gmtime_adj(X509_getm_notAfter(certificate), options.to_seconds);
    X509_set_pubkey(certificate, key);
    X509_NAME_add_entry_by_txt(X509_get_subject_name(certificate), "CN", MBSTRING_UTF8,
                               reinterpret_cast<const unsigned char*>(options.common_name.data()),
                               static_cast<int>(options.common_name.size()), -1, 0);
    X509* const issuer = is_authority ? certificate : certificate_.get();
    X509_set_issuer_name(certificate, X509_get_subject_name(issuer));
    AddExtension(certificate, issuer, NID_basic_constraints,
                 is_authority ? "critical,CA:TRUE" : "CA:FALSE");
    AddExtension(certificate, issuer, NID_subject_key_identifier, "hash");
    if (!is_authority) AddExtension(certificate, issuer, NID_authority_key_identifier, "keyid");
    if (!options.alternative_names.empty()) {
      AddExtension(certificate, issuer, NID_subject_alt_name, options.alternative_names);
    }
    if (X509_sign(certificate, key_.get(), EVP_sha256()) == 0) throw std::runtime_error("sign");
    return made;
  }

  const Key key_;
  Certificate certificate_{nullptr, &X509_free};
};

}  // namespace logitd::testing

#endif  // LOGITD_TESTS_CERTIFICATES_H_
