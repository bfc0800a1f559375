// One request and its response on a connection, as HTTP/2 sees them: header lists and bodies of
// bytes. Everything here happens on the connection's loop.
#ifndef LOGITD_SERVER_HTTP2_STREAM_H_
#define LOGITD_SERVER_HTTP2_STREAM_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "absl/container/inlined_vector.h"
#include "absl/types/span.h"

namespace logitd::http2 {

class Connection;
class Loop;

// A field of a header list. Names are in lower case.
struct Field {
  std::string_view name;
  std::string_view value;
};

// A received header list, in its order. Owns its bytes.
class HeaderList {
 public:
  void Add(std::string_view name, std::string_view value);

  size_t size() const { return ends_.size(); }
  Field operator[](size_t i) const;
  // The value of the first field of this name; nullptr data: there is none.
  std::string_view Find(std::string_view name) const;
  size_t held_bytes() const { return text_.capacity() + sizeof(End) * ends_.capacity(); }

 private:
  struct End {
    uint32_t name;   // where it ends in `text_`
    uint32_t value;  // where it ends
  };
  std::string text_;
  absl::InlinedVector<End, 16> ends_;
};

// Whose account bytes of a response are in until the kernel has taken them.
enum class Payer : uint8_t {
  kConnection,
  kOwner,  // the stream's owner's, until OnClosed
  kKeep,   // that of Bytes::keep
};

// Bytes of a response's body, and what keeps them.
struct Bytes {
  absl::Span<const std::byte> span;
  std::shared_ptr<const void> keep;
  bool ends_message = true;  // see StreamEvents::OnSent
  Payer payer = Payer::kConnection;
};

// The reason to refuse a stream, whatever it asks for.
enum class Refusal : uint8_t {
  kNone,
  kHeaderList,  // its header list is larger than advertised
  kMemory,      // connections hold as much as they may
};

enum class Closed : uint8_t {
  kEnded,     // both sides have ended
  kReset,     // the peer has cancelled it, or this server has reset it
  kLostPeer,  // the connection is gone
};

// The owner of a stream, as the stream sees it. The connection keeps it until OnClosed.
class StreamEvents {
 public:
  virtual ~StreamEvents() = default;

  // Memory for body bytes that come next, at least `least` of them, as far as the owner knows where
  // they belong: they are received there. Empty: OnBody gets them from a buffer of the loop.
  virtual absl::Span<std::byte> Room(size_t /*least*/) { return {}; }
  // Body bytes: at the start of what Room gave last, or in a buffer that is used again afterwards.
  virtual void OnBody(absl::Span<const std::byte> bytes) = 0;
  // The peer's body has ended.
  virtual void OnEnd() = 0;
  // Bytes up to a Bytes::ends_message have been given to the kernel. Once for each, except for
  // those that went out with the stream's end.
  virtual void OnSent() {}
  // Once, at the end. The stream is gone afterwards.
  virtual void OnClosed(Closed why) = 0;
};

class Stream {
 public:
  Stream(Connection* connection, int32_t id) : connection_(connection), id_(id) {}
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  Connection& connection() { return *connection_; }
  const HeaderList& headers() const { return headers_; }
  // A stream that must be refused keeps only the beginning of its headers().
  Refusal refusal() const { return refusal_; }
  size_t header_list_bytes() const { return header_list_bytes_; }  // as HTTP/2 counts
  size_t max_header_list() const;                                  // as advertised

  // The peer may send `bytes` of body from the beginning, in all. Less than before has no effect.
  void Grant(int64_t bytes);
  int64_t granted() const { return granted_; }
  // Body bytes that the owner holds without having asked for them; see Limits::max_early_bytes.
  // False: the connection holds too many, and these are not counted.
  bool HoldEarly(int64_t bytes);
  void ReleaseEarly();
  // A message was complete: see Limits::tiny_frames.
  void CountMessage();

  // The response: its header list, any number of Sends, then the end. All go out at the turn's end.
  void Respond(absl::Span<const Field> headers);
  void Send(Bytes bytes);
  // A response that has only trailers if Respond was not called. A peer that has not ended its
  // request is told to stop sending after Times::stop.
  void End(absl::Span<const Field> trailers);
  void Reset(uint32_t error);

 private:
  friend class Connection;

  // nghttp2 returns padding only when it has used up half of the window, which Grant makes large.
  void ReturnPadding(size_t bytes);

  void HoldUnpaid(int64_t more);
  void SubmitTrailers();

  Connection* const connection_;
  const int32_t id_;
  std::shared_ptr<StreamEvents> events_;
  HeaderList headers_;
  size_t header_list_bytes_ = 0;
  int64_t counted_ = 0;  // in Account::headers
  Refusal refusal_ = Refusal::kNone;
  bool peer_ended_ = false;
  int64_t granted_ = 0;
  int64_t early_ = 0;
  size_t padding_ = 0;  // received, and not returned to the peer's window

  bool responded_ = false;
  bool ended_ = false;     // End was called
  bool deferred_ = false;  // nghttp2 waits for bytes
  absl::InlinedVector<Bytes, 1> unsent_;
  size_t sent_of_first_ = 0;
  int64_t unsent_bytes_ = 0;  // of Sends: those that no write has been given
  int64_t unpaid_bytes_ = 0;  // of them in Account::unsent
  // When the peer last took something of the response, or Send was called with nothing unsent.
  int64_t moved_ns_ = 0;
  int64_t stop_ns_ = 0;  // when the peer is told to stop; 0: it has ended, or the response goes on
  absl::InlinedVector<std::pair<std::string, std::string>, 2> trailers_;
};

}  // namespace logitd::http2

#endif  // LOGITD_SERVER_HTTP2_STREAM_H_
