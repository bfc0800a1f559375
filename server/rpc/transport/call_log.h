// Lines of the log about calls: one for every call at debug, and one for every slow call at info.
// Also the names that a caller gives to its call, so that it can be found there.
#ifndef LOGITD_SERVER_RPC_TRANSPORT_CALL_LOG_H_
#define LOGITD_SERVER_RPC_TRANSPORT_CALL_LOG_H_

#include <cstdint>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "server/engine/job.h"
#include "server/http2/stream.h"

namespace logitd::rpc {

inline constexpr char kRequestId[] = "x-request-id";
inline constexpr char kTraceparent[] = "traceparent";

// server.proto has the metadata's meaning. Empty: the call has none, or a malformed one.
struct Trace {
  std::string request_id;
  std::string traceparent;
};

// The names in the call's metadata. They are sent back in the trailing metadata.
Trace ReadTrace(const http2::HeaderList& metadata);

// A call, or one message of a stream, that has ended. Times are nanoseconds; those of phases that
// it did not reach are 0.
struct CallReport {
  std::string_view method;  // "/logitd.v1.Sampler/TopK"
  std::string peer;         // http2::PeerInfo::name
  const Trace* trace = nullptr;
  absl::StatusCode code = absl::StatusCode::kUnknown;
  int64_t messages = 1;
  int64_t rows = 0;
  int64_t received_bytes = 0;  // of messages
  int64_t sent_bytes = 0;
  int64_t total_ns = 0;
  int64_t wait_ns = 0;     // for room and its turn
  int64_t receive_ns = 0;  // until the message was there, without that wait
  engine::JobTimes job;
  int64_t encode_ns = 0;
  int64_t send_ns = 0;  // until the transport was done with the answer
};

// Thread-safe.
class CallLog {
 public:
  // `slow`: a call that takes as long is slow; InfiniteDuration: none is.
  explicit CallLog(absl::Duration slow) : slow_ns_(absl::ToInt64Nanoseconds(slow)) {}

  // True if a unary call that took so long has a line. Cheap: a report is made only then.
  bool Wants(int64_t total_ns) const;
  // For one message of a stream, which has a line only if it is slow; and for a whole stream, which
  // is never slow.
  bool WantsMessage(int64_t total_ns) const;
  bool WantsStream() const;

  void Write(const CallReport& report) const;  // of a unary call, or of a message
  void WriteStream(const CallReport& report) const;

 private:
  const int64_t slow_ns_;
};

}  // namespace logitd::rpc

#endif  // LOGITD_SERVER_RPC_TRANSPORT_CALL_LOG_H_
