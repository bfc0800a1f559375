#include "client/cli/session.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <iostream>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"

namespace logitd::cli {

namespace {

// Options of the client, and the flags that set them here.
struct FlagOf {
  const char* option;
  const char* flag;
};
constexpr FlagOf kFlags[] = {{"address", "--addr"},           {"tls.ca_file", "--tls-ca"},
                             {"tls.cert_file", "--tls-cert"}, {"tls.key_file", "--tls-key"},
                             {"request_id", "--request-id"},  {"traceparent", "--traceparent"}};

// The same error with the name of the flag in place of the option's.
absl::Status OfFlag(const absl::Status& status) {
  for (const FlagOf& each : kFlags) {
    absl::string_view text = status.message();
    if (!absl::ConsumePrefix(&text, absl::StrCat(each.option, ": "))) continue;
    return absl::Status(status.code(), absl::StrCat(each.flag, ": ", text));
  }
  return status;
}

bool lost = false;
int lost_error = 0;  // the first errno of output that was lost; 0: not known

void NoteLost() {
  lost = true;
  if (lost_error == 0) lost_error = errno;
}

}  // namespace

void HoldStandardStreams() {
  for (const int fd : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
    if (fcntl(fd, F_GETFD) >= 0) continue;
    (void)!open("/dev/null", fd == STDOUT_FILENO ? O_RDONLY : O_WRONLY);  // the lowest free number
  }
}

void Print(absl::string_view text) {
  if (std::fwrite(text.data(), 1, text.size(), stdout) != text.size() || std::fflush(stdout) != 0) {
    NoteLost();
  }
}

bool OutputLost() { return lost || std::ferror(stdout) != 0; }

int ExitCodeOf(int code) {
  errno = 0;
  if (!std::cout.flush() || std::fflush(stdout) != 0) NoteLost();
  if (!OutputLost()) return code;
  const std::string why = lost_error == 0 ? "" : absl::StrCat(": ", std::strerror(lost_error));
  Complain(absl::StrCat("output was lost: stdout", why));
  return code == kExitOk ? kExitCallFailed : code;
}

void Complain(absl::string_view text, absl::string_view hint) {
  absl::FPrintF(stderr, "logitctl: %s\n", text);
  if (!hint.empty()) absl::FPrintF(stderr, "  hint: %s\n", hint);
}

int BadInput(const absl::Status& status) {
  Complain(status.message());
  return kExitBadInput;
}

Progress::Progress(std::string name, absl::Duration delay)
    : name_(name.substr(0, 24)),
      terminal_(isatty(STDERR_FILENO) == 1),
      next_(absl::Now() + delay) {}

Progress::~Progress() {
  if (shown_) absl::FPrintF(stderr, "\r\x1b[K");
}

void Progress::Show(int64_t done, int64_t total, const std::string& note) {
  constexpr int64_t kCells = 20;
  const absl::Time now = absl::Now();
  const bool end = shown_ && done >= total;
  if (!terminal_ || (now < next_ && !end)) return;
  next_ = now + absl::Milliseconds(100);
  shown_ = true;
  std::string bar;
  if (total > 0) {
    const auto full = static_cast<size_t>(kCells * done / total);
    bar = absl::StrFormat("[%s%s] %3d%%, ", std::string(full, '#'), std::string(kCells - full, '-'),
                          100 * done / total);
  }
  absl::FPrintF(stderr, "\r%s: %s%s\x1b[K", name_, bar, note);
}

absl::StatusOr<Session> Session::Open(const CommonFlags& common) {
  absl::StatusOr<client::ClientOptions> options = OptionsOf(common.connection);
  if (!options.ok()) return options.status();
  options->deadline = absl::Seconds(common.deadline_s);
  options->retry.max_attempts = common.max_attempts;
  options->priority =
      common.priority == "batch" ? client::Priority::kBatch : client::Priority::kInteractive;
  options->request_id = common.request_id;
  options->traceparent = common.traceparent;
  absl::StatusOr<std::unique_ptr<client::Client>> client = client::Client::Create(*options);
  if (!client.ok()) return OfFlag(client.status());
  Session session;
  session.client_ = *std::move(client);
  session.address_ = common.connection.address;
  session.json_ = common.format == "json";
  return session;
}

int Session::CallFailed(const absl::Status& status) const {
  const std::string text =
      absl::StrCat(absl::StatusCodeToString(status.code()), ": ", status.message());
  switch (status.code()) {
    case absl::StatusCode::kUnavailable:
      Complain(text, absl::StrCat("is logitd running at ", address_,
                                  "? --addr or $LOGITD_ADDR names another place"));
      return kExitUnavailable;
    case absl::StatusCode::kResourceExhausted:
      Complain(text, "the server is full; more --max-attempts or a longer --deadline may help");
      return kExitCallFailed;
    case absl::StatusCode::kInvalidArgument:
    case absl::StatusCode::kOutOfRange:
      Complain(text);
      return kExitBadInput;
    case absl::StatusCode::kUnauthenticated:
      Complain(text, "--token-file or $LOGITD_TOKEN has the token that shows who calls");
      return kExitCallFailed;
    case absl::StatusCode::kDeadlineExceeded:
      Complain(text, "a longer --deadline gives the call more time");
      return kExitCallFailed;
    case absl::StatusCode::kUnimplemented:
      Complain(text, absl::StrCat("is it logitd that listens at ", address_, "?"));
      return kExitCallFailed;
    default:
      Complain(text);
      return kExitCallFailed;
  }
}

}  // namespace logitd::cli
