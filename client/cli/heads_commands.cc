// logitctl heads.
#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/cli/commands.h"
#include "client/cli/output.h"
#include "client/client.h"

namespace logitd::cli {
namespace {

using HeadProgress = std::function<bool(int64_t done_bytes, int64_t total_bytes)>;

// Runs a load or an update, `change`, and shows its progress and the head.
int ChangeHead(const Session& session, const std::string& name,
               const std::function<absl::StatusOr<v1::Head>(const HeadProgress&)>& change) {
  // Calls are tried again, loads are not: this call waits for a server that is not there yet.
  if (const absl::Status there = session.client().Info().status(); !there.ok()) {
    return session.CallFailed(there);
  }
  absl::StatusOr<v1::Head> head = absl::UnknownError("");
  {
    Progress progress(name);
    head = change([&](int64_t done_bytes, int64_t total_bytes) {
      progress.Show(done_bytes, total_bytes,
                    total_bytes <= 0 ? "waits for another load"
                                     : absl::StrCat(Bytes(done_bytes), " of ", Bytes(total_bytes)));
      return true;
    });
  }
  if (head.ok()) return session.Show(HeadOutput{*head});
  if (absl::IsResourceExhausted(head.status())) {
    Complain(absl::StrCat("RESOURCE_EXHAUSTED: ", head.status().message()),
             "logitctl heads unload NAME frees the memory of another head");
    return kExitCallFailed;
  }
  return session.CallFailed(head.status());
}

}  // namespace

int RunLoadHead(const Session& session, const LoadHeadFlags& flags) {
  v1::LoadHeadRequest request;
  request.set_name(flags.name);
  request.set_path(flags.path);
  request.set_final_norm(flags.final_norm);
  request.set_vocab(flags.vocab);
  request.set_shard(flags.shard);
  return ChangeHead(session, flags.name, [&](const HeadProgress& progress) {
    return session.client().LoadHead(request, progress);
  });
}

int RunUpdateHead(const Session& session, const LoadHeadFlags& flags) {
  v1::UpdateHeadRequest request;
  request.set_name(flags.name);
  request.set_path(flags.path);
  return ChangeHead(session, flags.name, [&](const HeadProgress& progress) {
    return session.client().UpdateHead(request, progress);
  });
}

int RunUnloadHead(const Session& session, const std::string& name) {
  if (absl::Status status = session.client().UnloadHead(name); !status.ok()) {
    return session.CallFailed(status);
  }
  Print(session.json() ? "{}\n" : absl::StrFormat("%s is unloaded\n", name));
  return kExitOk;
}

int RunListHeads(const Session& session) {
  const absl::StatusOr<std::vector<v1::Head>> heads = session.client().ListHeads();
  if (!heads.ok()) return session.CallFailed(heads.status());
  return session.Show(HeadsOutput{*heads});
}

int RunGetHead(const Session& session, const std::string& name) {
  const absl::StatusOr<v1::Head> head = session.client().GetHead(name);
  if (!head.ok()) return session.CallFailed(head.status());
  return session.Show(HeadOutput{*head});
}

}  // namespace logitd::cli
