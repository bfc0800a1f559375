// How a Client connects, waits, tries again and cuts.
#ifndef LOGITD_CLIENT_OPTIONS_H_
#define LOGITD_CLIENT_OPTIONS_H_

#include <cstdint>
#include <optional>
#include <string>

#include "absl/time/time.h"

namespace logitd::client {

// The defaults outlast a server that starts, or starts again: the waits between the attempts last
// 3.5 to 6 s together, where the server states none.
struct RetryOptions {
  int max_attempts = 12;  // of one call, the first included; 1 or more
  absl::Duration initial_backoff = absl::Milliseconds(20);
  absl::Duration max_backoff = absl::Seconds(1);
};

// Batch work runs when the server has no interactive work.
enum class Priority { kInteractive, kBatch };

// Files are PEM. They must be good when the Client is made, and are read again when they change:
// the next connection uses what they hold then, open connections stay.
struct TlsOptions {
  std::string ca_file;    // authorities of the server's certificate; empty: those of the system
  std::string cert_file;  // of the client, for mutual TLS, with `key_file`; empty: none
  std::string key_file;
  std::string server_name;  // in the server's certificate; empty: the host of the address
};

struct ClientOptions {
  // HOST:PORT or unix:PATH; for several servers ipv4:A:PORT,B:PORT, ipv6:[A]:PORT,[B]:PORT or
  // dns:///HOST:PORT, a name with several addresses.
  std::string address = "127.0.0.1:7450";
  // With several servers: calls go to them in turn, as gRPC's round_robin does it; a server that is
  // away, or whose health is not SERVING because it drains, is left out. A stream stays with one.
  // The servers must have the same limits and heads: LoadHead, UnloadHead and an Arena are for one
  // server, so use a client of its own address for them. Without, all calls go to the first that
  // answers. With TLS and an ipv4: or ipv6: address, `tls` must state the server's name.
  bool round_robin = false;
  std::optional<TlsOptions> tls;  // nullopt: none
  // Shows the server who calls, in all calls except those of Health. Empty: none. Without TLS it is
  // only sent to this machine, unless `token_over_plaintext`: everybody on the way can read it.
  std::string token;
  bool token_over_plaintext = false;
  absl::Duration deadline = absl::Seconds(30);  // of a whole call, all attempts and waits included
  RetryOptions retry;
  Priority priority = Priority::kInteractive;  // of all calls
  // Names of all calls in the server's log; empty: none. server.proto says what is allowed.
  std::string request_id;
  std::string traceparent;
  // Some calls fail here and are not sent, while the server refuses most calls of the method for
  // its load: RESOURCE_EXHAUSTED, "not sent: ...". About three are sent for every two that the
  // server takes.
  bool throttle = true;
  // Unary calls tell the server the size of their message in their headers: it decides before the
  // message comes.
  bool state_sizes = true;
  int64_t max_message_bytes =
      0;  // larger requests are refused here, unsent; 0: this client sets no limit
  // Payload of one message of a stream, about. The server works on some messages while others
  // travel.
  int64_t attention_message_bytes = int64_t{8} << 20;  // larger tensors go as a stream
  int64_t score_message_bytes = int64_t{4} << 20;      // of ScoreStream; 4096 rows at most
};

}  // namespace logitd::client

#endif  // LOGITD_CLIENT_OPTIONS_H_
