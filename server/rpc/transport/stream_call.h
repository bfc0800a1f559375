// A bidirectional stream. Every message is a job of the engine, as a unary call's message is.
// Answers go out in the order of the messages.
#ifndef LOGITD_SERVER_RPC_TRANSPORT_STREAM_CALL_H_
#define LOGITD_SERVER_RPC_TRANSPORT_STREAM_CALL_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "server/engine/admission.h"
#include "server/rpc/codecs/codec.h"
#include "server/rpc/transport/call_headers.h"
#include "server/rpc/transport/request_job.h"
#include "server/rpc/transport/server_call.h"

namespace logitd::rpc {

// Flow control: the server holds at most kMaxInFlight messages without an answer; further ones stay
// unread at the peer. A message asks the admission for room when its size is known: the first one
// from the headers, if they state it. Between messages a stream holds no room.
//
// The first status that is not OK, of a message or of the admission, ends the stream after the
// answers to all earlier messages. While the server drains, an idle stream ends with UNAVAILABLE,
// and a busy one ends when the messages it has read are answered.
//
// On its loop only; its messages tell it there when they are done.
class StreamCall final : public ServerCall {
 public:
  static constexpr size_t kMaxInFlight = 4;
  using MakeCodec = std::function<std::unique_ptr<OpCodec>()>;

  // `method`: as in the log; outlives the call.
  StreamCall(http2::Stream* stream, std::string_view method, const CallEnvironment& environment,
             const Access& access, MakeCodec make_codec);

  void OnDrain(absl::Duration receive_timeout) override;
  void OnIdentities() override;

 private:
  class Item;

  // ServerCall
  void Begin() override;
  void OnMessageSize(size_t bytes) override;
  void OnMessage(MessageMemory message) override;
  void OnHalfClose() override;
  void OnCancelled(const absl::Status& why) override;
  void End(const absl::Status& status) override;
  // Reads no more messages. The stream ends with `status` after the answers to those it has read.
  void EndInput(const absl::Status& status) override;
  void OnWritten() override;
  void OnOver() override;

  // Starts what can start now: answers, the end, the next message.
  void Advance();
  // Asks for room for the next message.
  void AskFor(size_t message_bytes);
  void AskForRoom(engine::RoomAsk ask);
  void Admitted(absl::StatusOr<engine::Admission::Ticket> ticket);
  void ReceiveMessage();
  void SubmitWith(const std::shared_ptr<Item>& item, engine::Admission::Ticket ticket);

  const std::string_view method_;
  const CallEnvironment environment_;
  const Access access_;
  const MakeCodec make_codec_;
  CallHeaders headers_;
  engine::Admission::WaiterId waiter_ = 0;
  std::deque<std::shared_ptr<Item>> items_;          // unanswered, in order
  std::optional<engine::Admission::Ticket> ticket_;  // room for the next message
  bool asking_ = false;                              // the admission is asked for it
  std::shared_ptr<Item> next_;                       // the next message, of a known size
  std::shared_ptr<Item> submitting_;                 // the last message, which waits for more room
  size_t written_ = 0;                               // of `items_`: their answers are being sent
  bool input_over_ = false;
  absl::Status end_status_;
  absl::StatusCode code_ = absl::StatusCode::kUnknown;
  // For the log.
  int64_t asked_ns_ = 0;  // the call's age when the first message asked for room
  int64_t wait_ns_ = 0;   // of the first message
  int64_t messages_ = 0;
  int64_t rows_ = 0;
};

}  // namespace logitd::rpc

#endif  // LOGITD_SERVER_RPC_TRANSPORT_STREAM_CALL_H_
