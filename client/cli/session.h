// What the subcommands of logitctl share: the connection, what is printed, complaints, exit codes.
#ifndef LOGITD_CLIENT_CLI_SESSION_H_
#define LOGITD_CLIENT_CLI_SESSION_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "client/cli/connection_flags.h"
#include "client/client.h"

namespace logitd::cli {

enum ExitCode {
  kExitOk = 0,
  kExitCallFailed = 1,   // the server refused or failed the call
  kExitBadInput = 2,     // a flag, a value or a file, whether found here or by the server
  kExitUnavailable = 3,  // no answer, or not serving
};

struct CommonFlags {
  ConnectionFlags connection;
  double deadline_s = 30;
  int max_attempts = client::RetryOptions().max_attempts;
  std::string priority = "interactive";  // or "batch"
  std::string request_id;
  std::string traceparent;
  std::string format = "table";  // or "json"
};

// Opens /dev/null in place of each standard stream that the caller has closed. Otherwise a
// connection could get its number, and what is printed would go there. Reads and writes of it fail.
// Call it before anything else is opened.
void HoldStandardStreams();

void Print(absl::string_view text);
// True where something printed did not reach stdout: the disk is full, stdout is closed, or its
// reader has left.
bool OutputLost();
// The exit code of the program: `code`, or a failure where that is success and output was lost.
int ExitCodeOf(int code);

void Complain(absl::string_view text, absl::string_view hint = "");

// Complains about a flag or a file, and returns the exit code.
int BadInput(const absl::Status& status);

// A bar on stderr, where that is a terminal: one line, written again and again, and removed at the
// end. Work that is done within `delay` shows none.
class Progress {
 public:
  explicit Progress(std::string name, absl::Duration delay = absl::ZeroDuration());
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  // "name: [###---]  50%, note"; with a total of 0 "name: note". Not more than ten times a second.
  void Show(int64_t done, int64_t total, const std::string& note);

 private:
  const std::string name_;
  const bool terminal_;
  absl::Time next_;
  bool shown_ = false;
};

class Session {
 public:
  // INVALID_ARGUMENT: an address that cannot work. Connects at the first call.
  static absl::StatusOr<Session> Open(const CommonFlags& common);

  client::Client& client() const { return *client_; }
  const std::string& address() const { return address_; }
  bool json() const { return json_; }

  // Complains about a call that the server, or the way to it, failed; returns the exit code.
  int CallFailed(const absl::Status& status) const;

  // Prints Json(output) or Table(output), as --format says.
  template <typename Output>
  int Show(const Output& output) const {
    Print(json_ ? Json(output) : Table(output));
    return kExitOk;
  }

 private:
  std::unique_ptr<client::Client> client_;
  std::string address_;
  bool json_ = false;
};

}  // namespace logitd::cli

#endif  // LOGITD_CLIENT_CLI_SESSION_H_
