#include <unistd.h>

#include <cstdio>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/cli/commands.h"
#include "client/cli/output.h"
#include "client/cli/session.h"
#include "client/client.h"

namespace logitd::cli {
namespace {

// One line on a terminal that is written over and over, and gone at the end.
class ProgressBar {
 public:
  explicit ProgressBar(std::string name)
      : name_(std::move(name)), terminal_(isatty(STDERR_FILENO) == 1) {}
  ~ProgressBar() { Write(""); }
  ProgressBar(const ProgressBar&) = delete;
  ProgressBar& operator=(const ProgressBar&) = delete;

  void Show(int64_t done_bytes, int64_t total_bytes) {
    Write(ProgressLine(name_, done_bytes, total_bytes));
  }

 private:
  void Write(const std::string& line) {
    constexpr char kClearToEnd[] = "\x1b[K";
    if (terminal_) absl::FPrintF(stderr, "\r%s%s", line, kClearToEnd);
  }

  const std::string name_;
  const bool terminal_;
};

int PrintHeads(const CommonFlags& common, const std::vector<v1::Head>& heads) {
  Print(common.format == "json" ? HeadsJson(heads) : HeadsTable(heads));
  return kExitOk;
}

int PrintHead(const CommonFlags& common, const v1::Head& head) {
  Print(common.format == "json" ? HeadJson(head) : HeadsTable({head}));
  return kExitOk;
}

}  // namespace

int RunLoadHead(const CommonFlags& common, const LoadHeadFlags& flags) {
  absl::StatusOr<std::unique_ptr<client::Client>> client = Connect(common);
  if (!client.ok()) return BadInput(client.status());
  v1::LoadHeadRequest request;
  request.set_name(flags.name);
  request.set_path(flags.path);
  request.set_final_norm(flags.final_norm);
  request.set_vocab(flags.vocab);
  absl::StatusOr<v1::Head> head = absl::UnknownError("");
  {
    ProgressBar bar(flags.name);
    head = (*client)->LoadHead(request, [&bar](int64_t done_bytes, int64_t total_bytes) {
      bar.Show(done_bytes, total_bytes);
      return true;
    });
  }
  if (head.ok()) return PrintHead(common, *head);
  if (absl::IsResourceExhausted(head.status())) {
    Complain(absl::StrCat("RESOURCE_EXHAUSTED: ", head.status().message()),
             "logitctl heads unload NAME gives the memory of another head back");
    return kExitCallFailed;
  }
  return CallFailed(head.status(), common.address);
}

int RunUnloadHead(const CommonFlags& common, const std::string& name) {
  absl::StatusOr<std::unique_ptr<client::Client>> client = Connect(common);
  if (!client.ok()) return BadInput(client.status());
  if (absl::Status status = (*client)->UnloadHead(name); !status.ok()) {
    return CallFailed(status, common.address);
  }
  Print(common.format == "json" ? "{}\n" : absl::StrFormat("%s is unloaded\n", name));
  return kExitOk;
}

int RunListHeads(const CommonFlags& common) {
  absl::StatusOr<std::unique_ptr<client::Client>> client = Connect(common);
  if (!client.ok()) return BadInput(client.status());
  const absl::StatusOr<std::vector<v1::Head>> heads = (*client)->ListHeads();
  if (!heads.ok()) return CallFailed(heads.status(), common.address);
  return PrintHeads(common, *heads);
}

int RunGetHead(const CommonFlags& common, const std::string& name) {
  absl::StatusOr<std::unique_ptr<client::Client>> client = Connect(common);
  if (!client.ok()) return BadInput(client.status());
  const absl::StatusOr<v1::Head> head = (*client)->GetHead(name);
  if (!head.ok()) return CallFailed(head.status(), common.address);
  return PrintHead(common, *head);
}

}  // namespace logitd::cli
