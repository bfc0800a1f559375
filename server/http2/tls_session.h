// TLS of one connection: reads and writes a socket as if its bytes were plain.
#ifndef LOGITD_SERVER_HTTP2_TLS_SESSION_H_
#define LOGITD_SERVER_HTTP2_TLS_SESSION_H_

#include <sys/socket.h>
#include <sys/types.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/types/span.h"
#include "server/door/tls_context.h"

namespace logitd::http2 {

// How a handshake ended.
enum class HandshakeEnd {
  kOk,
  kTimeout,      // it took too long
  kEvicted,      // newer connections needed its place
  kClosed,       // the peer ended the connection
  kProtocol,     // the peer does not speak TLS, or no version, cipher or protocol (h2) of ours
  kCertificate,  // the client's certificate: none, expired, of another authority
};

// In the order of HandshakeEnd.
inline constexpr auto kHandshakeEndNames = std::to_array<std::string_view>(
    {"ok", "timeout", "evicted", "closed", "protocol", "certificate"});

// Used by one thread at a time. Never blocks.
class TlsSession {
 public:
  // Memory, measured and rounded up: during a handshake and after it. kReadBuffer more while a
  // record has come in part, and up to kWriteGroup while the peer does not take what was written.
  static constexpr int64_t kHandshakeBytes = int64_t{48} << 10;
  static constexpr int64_t kIdleBytes = int64_t{20} << 10;
  // Ciphertext that is read at once. OpenSSL decrypts it in place, so it should fit the cache.
  static constexpr size_t kReadBuffer = size_t{128} << 10;
  // Plaintext that is encrypted before the kernel gets it.
  static constexpr size_t kWriteGroup = size_t{64} << 10;

  // `fd` is non-blocking and outlives the session, or Release comes first. Null: no memory.
  static std::unique_ptr<TlsSession> Create(const door::TlsContext& context, int fd);
  TlsSession(const TlsSession&) = delete;
  TlsSession& operator=(const TlsSession&) = delete;
  ~TlsSession();

  // The next step of the handshake.
  enum class Step { kDone, kWantRead, kWantWrite, kFailed };
  Step Handshake();
  // The peer's hello has come.
  bool has_begun() const { return messages_ > 0; }
  // After kFailed: why, and in words.
  HandshakeEnd failure() const { return failure_; }
  const std::string& failure_text() const { return failure_text_; }

  // After kDone: the names in the peer's certificate, "uri:...", "dns:..." of its alternative
  // names, and "cn:...". Empty: it has none.
  std::vector<std::string> CertificateNames() const;

  // Like recvmsg, with errno. `drained`: the kernel has no more bytes, and said so (EAGAIN).
  ssize_t Read(absl::Span<const iovec> parts, bool* drained);
  // Like sendmsg, with errno. Bytes that are encrypted but not taken by the kernel count as not
  // written: as after any EAGAIN, the next write begins with the same bytes.
  ssize_t Write(absl::Span<const iovec> parts);
  // The memory that it holds now.
  int64_t held_bytes() const;
  // Tells the peer that no more bytes follow, if the kernel takes it now.
  void SendEnd();
  // The descriptor is about to be closed. Reads and writes fail from here on.
  void Release();

 private:
  TlsSession(door::OwnedSsl ssl, int fd);
  static const BIO_METHOD* SocketMethod();
  int ReadSocket(BIO* bio, char* data, int bytes);
  bool TooManyMessages() const;

  enum class Flush { kDone, kBlocked, kFailed };
  Flush FlushPending();
  // Sends as much of `bytes` as the kernel takes. Below 0: an error, with errno.
  ssize_t SendSome(std::string_view bytes);
  Step Fail(HandshakeEnd why, std::string text);
  ssize_t ReadRecords(absl::Span<const iovec> parts, bool* drained);
  ssize_t WriteRecords(absl::Span<const iovec> parts);

  door::OwnedSsl ssl_;
  const int fd_;
  std::string* out_;      // where OpenSSL's records go: `pending_`, or a write's own buffer
  std::string pending_;   // ciphertext that the kernel has not taken
  bool eof_ = false;      // the peer's side has ended
  int socket_error_ = 0;  // errno of a failed receive
  int messages_ = 0;      // handshake messages after the handshake
  int64_t received_ = 0;  // plaintext
  bool established_ = false;
  bool broken_ = false;
  size_t ahead_ = 0;  // plaintext in `pending_` that the caller will write again
  HandshakeEnd failure_ = HandshakeEnd::kOk;
  std::string failure_text_;
};

}  // namespace logitd::http2

#endif  // LOGITD_SERVER_HTTP2_TLS_SESSION_H_
