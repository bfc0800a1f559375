// A gRPC call on an HTTP/2 stream: metadata, deadline, messages, status.
//
// The wire is that of the gRPC specification (PROTOCOL-HTTP2.md of grpc/grpc): messages are not
// compressed, a refusal is only trailers, and a peer that has not ended is told to stop.
#ifndef LOGITD_SERVER_RPC_TRANSPORT_SERVER_CALL_H_
#define LOGITD_SERVER_RPC_TRANSPORT_SERVER_CALL_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "server/engine/admission.h"
#include "server/http2/connection.h"
#include "server/http2/loop.h"
#include "server/http2/stream.h"
#include "server/rpc/transport/call_log.h"
#include "server/rpc/transport/call_tracker.h"
#include "server/rpc/wire/encoded_message.h"

namespace logitd::rpc {

// Memory for one message.
struct MessageMemory {
  absl::Span<std::byte> bytes;
  std::shared_ptr<void> keep;
  bool is_place = false;  // streams copy rows from it
};

// Used on its connection's loop, except where a method says otherwise. The stream keeps it until
// OnOver; then whoever else has a reference.
class ServerCall : public http2::StreamEvents,
                   public engine::Sender,
                   public std::enable_shared_from_this<ServerCall> {
 public:
  // `tracker` outlives it.
  ServerCall(http2::Stream* stream, CallTracker* tracker);
  ~ServerCall() override;

  // Once, when a shared_ptr owns it: counts the call and runs Begin.
  void Start();

  // The server drains. A message that is being received has at most `receive_timeout` from here on.
  virtual void OnDrain(absl::Duration receive_timeout);
  // True: a drain waits for this call's end.
  virtual bool counts() const { return true; }

  // The identities have changed: a long call ends if its caller may not call any longer.
  virtual void OnIdentities() {}

  // Any thread: `work` runs on the loop, after what runs there now, if the call is not over by
  // then.
  void OnLoop(absl::AnyInvocable<void()> work);

  // engine::Sender
  uint64_t connection_id() const final { return connection_id_; }
  std::optional<int64_t> connection_bytes() const final;
  void OnTooSlow(const absl::Status& why) final;

  const http2::HeaderList& metadata() const { return stream_->headers(); }
  http2::Connection& connection() { return stream_->connection(); }
  const std::string& peer() const { return peer_; }
  const Trace& trace() const { return trace_; }
  absl::Time deadline() const { return deadline_; }

 protected:
  // ---- what a kind of call does
  // The metadata is there. May finish the call.
  virtual void Begin() = 0;
  // A message of `bytes` bytes comes. Receive gives it memory, now or later; until then the peer
  // may send no more than HTTP/2's first window.
  virtual void OnMessageSize(size_t bytes) = 0;
  // The message is in the memory of Receive.
  virtual void OnMessage(MessageMemory message) = 0;
  // The peer sends no more messages.
  virtual void OnHalfClose() = 0;
  // The peer cancelled the call or is gone, or its deadline has passed. After a deadline the call
  // still has to be finished.
  virtual void OnCancelled(const absl::Status& why) = 0;
  // Ends the call with a status: by Finish, with what its kind counts.
  virtual void End(const absl::Status& status) = 0;
  // Takes no more messages, and ends with a status when those that have come are answered.
  virtual void EndInput(const absl::Status& status) { End(status); }
  virtual void OnWritten() {}  // a message of Write has been given to the kernel
  virtual void OnOver() {}     // once, at the end

  // ---- what it may use Memory for the message that OnMessageSize told, `bytes` of it. The time of
  // StartReceiveTimer counts from here on until the message is there, if it does not count yet.
  void Receive(MessageMemory memory);
  // Instead of Receive, for small messages: what has come is kept and counted as early bytes, and
  // OnMessage gets the whole message in memory that lives until it returns.
  void ReceiveWhole();
  // Bytes of that message that have come already.
  absl::Span<const std::byte> Seen() const {
    return taking_ ? at_hand_ : absl::Span<const std::byte>(seen_.data(), seen_.size());
  }
  // The peer may send a message of so many bytes, beside what it may send unasked.
  void Grant(size_t bytes);
  // From here on the message has message_timeout(); then LateStatus ends the call.
  void StartReceiveTimer();
  void StopReceiveTimer();
  // Drops what has come of an unfinished message, and all bytes that still come.
  void DropInput();
  // While true, the next message stays with the peer.
  void Pause(bool pause);
  // A ticket pays for the answers until OnOver.
  void PayForAnswers() { pays_ = true; }

  void Write(EncodedMessage message);
  // Ends the call: the first one counts. `message`: the last one to write.
  void Finish(const absl::Status& status, EncodedMessage message = {});

  bool began() const { return began_; }
  bool finished() const { return finished_; }
  bool over() const { return stream_ == nullptr; }
  http2::Loop& loop() { return *loop_; }
  int64_t age_ns() const;
  int64_t received_bytes() const { return received_bytes_; }  // of messages, in all
  int64_t sent_bytes() const { return sent_bytes_; }

 private:
  friend class CallTracker;

  // http2::StreamEvents
  absl::Span<std::byte> Room(size_t least) final;
  void OnBody(absl::Span<const std::byte> bytes) final;
  void OnEnd() final;
  void OnSent() final { OnWritten(); }
  void OnClosed(http2::Closed why) final;

  void Absorb(absl::Span<const std::byte> bytes);
  // Takes what a prefix needs from the start of `bytes`.
  void TakePrefix(absl::Span<const std::byte>* bytes);
  void EndMessage();
  void GoOn();  // absorbs what has come meanwhile
  bool Keep(absl::Span<const std::byte> bytes);

  http2::Stream* stream_;  // null: over
  http2::Loop* const loop_;
  CallTracker* const tracker_;
  const std::weak_ptr<http2::Connection> connection_;
  const uint64_t connection_id_;
  const std::string peer_;
  const int64_t started_ns_;
  absl::Time deadline_;
  Trace trace_;

  // The message that is being received.
  enum class State { kPrefix, kWaiting, kReceiving, kWhole };
  State state_ = State::kPrefix;
  std::array<std::byte, kPrefixBytes> prefix_;
  size_t prefix_bytes_ = 0;
  size_t message_bytes_ = 0;
  MessageMemory memory_;
  size_t have_ = 0;
  std::vector<std::byte> seen_;          // came before there was memory or while paused
  absl::Span<const std::byte> at_hand_;  // what Absorb has not taken
  bool taking_ = false;
  bool paused_ = false;
  bool dropping_ = false;  // see DropInput
  bool half_closed_ = false;
  bool told_half_close_ = false;

  int64_t granted_;
  int64_t body_bytes_ = 0;  // of whole messages with their prefixes
  int64_t received_bytes_ = 0;
  int64_t sent_bytes_ = 0;
  bool pays_ = false;
  bool head_sent_ = false;
  bool began_ = false;
  bool finished_ = false;
  http2::Timer deadline_timer_;
  http2::Timer receive_timer_;
  bool receiving_ = false;  // the timer's time counts, though it may be infinite before a drain
  ServerCall* previous_ = nullptr;  // in the tracker's list
  ServerCall* next_ = nullptr;
};

// The status of a call that ends without a whole message.
absl::Status TruncatedError();

// The beginning of a call's content-type.
inline constexpr std::string_view kContentType = "application/grpc";

// Ends a stream with a status only.
void EndStream(http2::Stream* stream, const absl::Status& status, const CallTracker& tracker,
               const Trace* trace);

}  // namespace logitd::rpc

#endif  // LOGITD_SERVER_RPC_TRANSPORT_SERVER_CALL_H_
