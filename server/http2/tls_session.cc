#include "server/http2/tls_session.h"

#include <openssl/x509v3.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"

namespace logitd::http2 {
namespace {

constexpr size_t kRecord = 16384;  // the most plaintext in a record of TLS

// Bytes that OpenSSL sends on its own: answers to key updates, alerts, a handshake's flight.
constexpr size_t kMaxPending = size_t{256} << 10;

// Messages that are no data after the handshake. Honest peers renew their keys after gigabytes.
constexpr int kFreeMessages = 16;
constexpr int64_t kBytesPerMessage = int64_t{64} << 20;

ssize_t FailWith(int error) {
  errno = error;
  return -1;
}

// Plaintext to write, as pieces for records.
class Pieces {
 public:
  explicit Pieces(absl::Span<const iovec> parts) : parts_(parts) { SkipEmpty(); }

  bool empty() const { return parts_.empty(); }

  // Returns how many bytes were there to skip.
  size_t Skip(size_t bytes) {
    size_t skipped = 0;
    while (skipped < bytes && !empty()) skipped += Advance(bytes - skipped);
    return skipped;
  }

  // The next record's plaintext: memory of the parts, or a copy of several in `staging`. Frames
  // come as nine bytes of a header and their payload; a record for each would cost more than the
  // copy.
  std::string_view Next(std::string* staging) {
    if (left() >= kRecord) return Take(kRecord);
    staging->clear();
    while (!empty() && staging->size() < kRecord) *staging += Take(kRecord - staging->size());
    return *staging;
  }

 private:
  size_t left() const { return empty() ? 0 : parts_.front().iov_len - at_; }
  std::string_view Take(size_t bytes) {
    const char* const begin = static_cast<const char*>(parts_.front().iov_base) + at_;
    return {begin, Advance(bytes)};
  }
  size_t Advance(size_t bytes) {
    const size_t run = std::min(bytes, left());
    at_ += run;
    SkipEmpty();
    return run;
  }
  void SkipEmpty() {
    while (!parts_.empty() && parts_.front().iov_len == at_) {
      parts_.remove_prefix(1);
      at_ = 0;
    }
  }

  absl::Span<const iovec> parts_;
  size_t at_ = 0;
};

// A name that may decide who calls: text without control characters, which a log or a comparison
// could misread.
bool IsPlain(absl::string_view name) {
  return !name.empty() && name.size() <= 1024 && std::all_of(name.begin(), name.end(), [](char c) {
    return absl::ascii_isgraph(static_cast<unsigned char>(c)) || c == ' ';
  });
}

void AddName(absl::string_view kind, const ASN1_STRING* value, std::vector<std::string>* names) {
  const absl::string_view text(reinterpret_cast<const char*>(ASN1_STRING_get0_data(value)),
                               static_cast<size_t>(ASN1_STRING_length(value)));
  if (IsPlain(text)) names->push_back(absl::StrCat(kind, ":", text));
}

}  // namespace

std::unique_ptr<TlsSession> TlsSession::Create(const door::TlsContext& context, int fd) {
  door::OwnedSsl ssl = context.NewSsl();
  BIO* const bio = ssl == nullptr ? nullptr : BIO_new(SocketMethod());
  if (bio == nullptr) return nullptr;
  std::unique_ptr<TlsSession> session(new TlsSession(std::move(ssl), fd));
  BIO_set_data(bio, session.get());
  BIO_set_init(bio, 1);
  SSL_set_bio(session->ssl_.get(), bio, bio);  // owns it
  SSL_set_msg_callback(session->ssl_.get(),
                       [](int sent, int, int type, const void*, size_t, SSL*, void* receiver) {
                         if (sent == 0 && type == SSL3_RT_HANDSHAKE)
                           ++static_cast<TlsSession*>(receiver)->messages_;
                       });
  SSL_set_msg_callback_arg(session->ssl_.get(), session.get());
  return session;
}

TlsSession::TlsSession(door::OwnedSsl ssl, int fd)
    : ssl_(std::move(ssl)), fd_(fd), out_(&pending_) {}

TlsSession::~TlsSession() = default;

// OpenSSL's way to the socket.
const BIO_METHOD* TlsSession::SocketMethod() {
  static const BIO_METHOD* const method = [] {
    BIO_METHOD* const made = BIO_meth_new(BIO_get_new_index() | BIO_TYPE_SOURCE_SINK, "logitd");
    BIO_meth_set_read(made, [](BIO* bio, char* data, int bytes) {
      BIO_clear_retry_flags(bio);
      return static_cast<TlsSession*>(BIO_get_data(bio))->ReadSocket(bio, data, bytes);
    });
    // Takes everything, so that OpenSSL never waits for the socket: the session knows what the
    // kernel has not taken.
    BIO_meth_set_write(made, [](BIO* bio, const char* data, int bytes) {
      auto* const session = static_cast<TlsSession*>(BIO_get_data(bio));
      BIO_clear_retry_flags(bio);
      if (session->out_->size() > kMaxPending) return -1;
      session->out_->append(data, static_cast<size_t>(bytes));
      return bytes;
    });
    BIO_meth_set_ctrl(made, [](BIO* bio, int command, long, void*) -> long {
      if (command == BIO_CTRL_EOF) return static_cast<TlsSession*>(BIO_get_data(bio))->eof_ ? 1 : 0;
      return command == BIO_CTRL_FLUSH ? 1 : 0;
    });
    return made;
  }();
  return method;
}

int TlsSession::ReadSocket(BIO* bio, char* data, int bytes) {
  if (TooManyMessages()) return -1;  // OpenSSL would take them as long as they come
  ssize_t got = 0;
  do {
    got = recv(fd_, data, static_cast<size_t>(bytes), 0);
  } while (got < 0 && errno == EINTR);
  if (got == 0) eof_ = true;
  if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
    BIO_set_retry_read(bio);
  } else if (got < 0) {
    socket_error_ = errno;
  }
  return static_cast<int>(got);
}

bool TlsSession::TooManyMessages() const {
  return established_ && messages_ > kFreeMessages + received_ / kBytesPerMessage;
}

ssize_t TlsSession::SendSome(std::string_view bytes) {
  size_t sent = 0;
  while (sent < bytes.size()) {
    const ssize_t put = send(fd_, bytes.data() + sent, bytes.size() - sent, MSG_NOSIGNAL);
    if (put >= 0) {
      sent += static_cast<size_t>(put);
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      break;
    } else if (errno != EINTR) {
      return -1;
    }
  }
  return static_cast<ssize_t>(sent);
}

TlsSession::Flush TlsSession::FlushPending() {
  if (pending_.empty()) return Flush::kDone;
  const ssize_t sent = SendSome(pending_);
  if (sent < 0) return Flush::kFailed;
  if (static_cast<size_t>(sent) < pending_.size()) {
    pending_.erase(0, static_cast<size_t>(sent));
    return Flush::kBlocked;
  }
  std::string().swap(pending_);
  return Flush::kDone;
}

TlsSession::Step TlsSession::Fail(HandshakeEnd why, std::string text) {
  failure_ = why;
  failure_text_ = std::move(text);
  broken_ = true;
  FlushPending();  // the alert, which tells the peer
  return Step::kFailed;
}

TlsSession::Step TlsSession::Handshake() {
  if (ssl_ == nullptr || broken_) return Step::kFailed;
  // No read-ahead yet: bytes that follow the handshake stay in the kernel, where epoll sees them.
  ERR_clear_error();
  const int done = SSL_do_handshake(ssl_.get());
  const int error = SSL_get_error(ssl_.get(), done);
  if (done != 1 && error != SSL_ERROR_WANT_READ) {
    if (eof_ || socket_error_ != 0) return Fail(HandshakeEnd::kClosed, "the peer has gone");
    const long verified = SSL_get_verify_result(ssl_.get());
    const unsigned long reason = ERR_GET_REASON(ERR_peek_last_error());
    if (verified != X509_V_OK) {
      return Fail(HandshakeEnd::kCertificate, X509_verify_cert_error_string(verified));
    }
    return Fail(reason == SSL_R_PEER_DID_NOT_RETURN_A_CERTIFICATE ? HandshakeEnd::kCertificate
                                                                  : HandshakeEnd::kProtocol,
                door::TakeOpensslError());
  }
  const Flush flushed = FlushPending();
  if (flushed == Flush::kFailed) return Fail(HandshakeEnd::kClosed, "the peer has gone");
  if (flushed == Flush::kBlocked) return Step::kWantWrite;
  if (done != 1) return Step::kWantRead;
  const unsigned char* protocol = nullptr;
  unsigned int protocol_bytes = 0;
  SSL_get0_alpn_selected(ssl_.get(), &protocol, &protocol_bytes);
  if (protocol_bytes == 0) return Fail(HandshakeEnd::kProtocol, "no protocol, allowed h2 (ALPN)");
  established_ = true;
  messages_ = 0;
  SSL_set_default_read_buffer_len(ssl_.get(), kReadBuffer);
  SSL_set_read_ahead(ssl_.get(), 1);
  return Step::kDone;
}

std::vector<std::string> TlsSession::CertificateNames() const {
  std::vector<std::string> names;
  X509* const certificate = ssl_ == nullptr ? nullptr : SSL_get0_peer_certificate(ssl_.get());
  if (certificate == nullptr) return names;
  auto* const alternatives = static_cast<GENERAL_NAMES*>(
      X509_get_ext_d2i(certificate, NID_subject_alt_name, nullptr, nullptr));
  for (int i = 0; i < sk_GENERAL_NAME_num(alternatives); ++i) {
    const GENERAL_NAME* const name = sk_GENERAL_NAME_value(alternatives, i);
    if (name->type == GEN_URI) AddName("uri", name->d.uniformResourceIdentifier, &names);
    if (name->type == GEN_DNS) AddName("dns", name->d.dNSName, &names);
  }
  GENERAL_NAMES_free(alternatives);
  const X509_NAME* const subject = X509_get_subject_name(certificate);
  for (int at = -1; (at = X509_NAME_get_index_by_NID(subject, NID_commonName, at)) >= 0;) {
    AddName("cn", X509_NAME_ENTRY_get_data(X509_NAME_get_entry(subject, at)), &names);
  }
  ERR_clear_error();
  return names;
}

ssize_t TlsSession::Read(absl::Span<const iovec> parts, bool* drained) {
  *drained = false;
  if (ssl_ == nullptr || broken_) return FailWith(ECONNRESET);
  const ssize_t got = ReadRecords(parts, drained);
  // An answer to a key update, say. Where the kernel does not take it now, the next write sends it.
  const int error = errno;
  FlushPending();
  errno = error;
  return got;
}

ssize_t TlsSession::ReadRecords(absl::Span<const iovec> parts, bool* drained) {
  size_t total = 0;
  for (const iovec& part : parts) {
    size_t filled = 0;
    while (filled < part.iov_len) {
      size_t got = 0;
      ERR_clear_error();
      const int read = SSL_read_ex(ssl_.get(), static_cast<char*>(part.iov_base) + filled,
                                   part.iov_len - filled, &got);
      received_ += static_cast<int64_t>(got);
      if (read == 1) {
        filled += got;
        total += got;
        continue;
      }
      const int error = SSL_get_error(ssl_.get(), read);
      if (error == SSL_ERROR_WANT_READ) {
        *drained = true;
        return total > 0 ? static_cast<ssize_t>(total) : FailWith(EAGAIN);
      }
      ERR_clear_error();
      if (total > 0) return static_cast<ssize_t>(total);  // the next read finds the end again
      // HTTP/2 knows where its messages end, so an end without TLS's own is only an end.
      if (error == SSL_ERROR_ZERO_RETURN || eof_) return 0;
      broken_ = true;
      return FailWith(socket_error_ != 0 ? socket_error_ : ECONNRESET);
    }
  }
  return static_cast<ssize_t>(total);
}

ssize_t TlsSession::Write(absl::Span<const iovec> parts) {
  if (ssl_ == nullptr || broken_) return FailWith(EPIPE);
  switch (FlushPending()) {
    case Flush::kFailed:
      return -1;
    case Flush::kBlocked:
      return FailWith(EAGAIN);
    case Flush::kDone:
      return WriteRecords(parts);
  }
  return FailWith(EPIPE);
}

ssize_t TlsSession::WriteRecords(absl::Span<const iovec> parts) {
  thread_local std::string staging;
  thread_local std::string records;
  Pieces pieces(parts);
  size_t done = pieces.Skip(ahead_);
  ahead_ -= done;
  while (!pieces.empty()) {
    records.clear();
    out_ = &records;
    size_t group = 0;
    bool encrypted = true;
    while (encrypted && group < kWriteGroup && !pieces.empty()) {
      const std::string_view piece = pieces.Next(&staging);
      size_t put = 0;
      ERR_clear_error();
      encrypted = SSL_write_ex(ssl_.get(), piece.data(), piece.size(), &put) == 1;
      group += piece.size();
    }
    out_ = &pending_;
    const ssize_t sent = encrypted ? SendSome(records) : FailWith(EPIPE);
    if (sent < 0) {
      ERR_clear_error();
      broken_ = true;  // records are lost, so nothing may follow
      return -1;
    }
    if (static_cast<size_t>(sent) < records.size()) {
      pending_.assign(records, static_cast<size_t>(sent));
      ahead_ = group;
      return done > 0 ? static_cast<ssize_t>(done) : FailWith(EAGAIN);
    }
    done += group;
  }
  return static_cast<ssize_t>(done);
}

int64_t TlsSession::held_bytes() const {
  if (ssl_ == nullptr) return 0;
  const int64_t reading = SSL_has_pending(ssl_.get()) != 0 ? int64_t{kReadBuffer} : 0;
  return (established_ ? kIdleBytes : kHandshakeBytes) + reading +
         static_cast<int64_t>(pending_.capacity());
}

void TlsSession::SendEnd() {
  if (ssl_ == nullptr || broken_ || !established_) return;
  ERR_clear_error();
  SSL_shutdown(ssl_.get());
  ERR_clear_error();
  FlushPending();
}

void TlsSession::Release() {
  ssl_.reset();
  std::string().swap(pending_);
}

}  // namespace logitd::http2
