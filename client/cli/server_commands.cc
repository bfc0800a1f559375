// logitctl info, logitctl load and logitctl health.
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_format.h"
#include "client/cli/commands.h"
#include "client/cli/output.h"
#include "client/client.h"

namespace logitd::cli {

int RunInfo(const Session& session) {
  const absl::StatusOr<v1::GetInfoResponse> info = session.client().Info();
  if (!info.ok()) return session.CallFailed(info.status());
  return session.Show(InfoOutput{.info = *info, .address = session.address()});
}

int RunLoad(const Session& session) {
  const absl::StatusOr<v1::GetLoadResponse> load = session.client().GetLoad();
  if (!load.ok()) return session.CallFailed(load.status());
  return session.Show(LoadOutput{*load});
}

int RunHealth(const Session& session, const HealthFlags& flags) {
  const auto print = [&](client::ServingStatus status) {
    const std::string name(client::ServingStatusName(status));
    Print(session.json() ? absl::StrFormat("{\"status\":\"%s\"}\n", name) : name + "\n");
    return !OutputLost();
  };
  if (flags.watch) {
    const absl::Status ended = session.client().WatchHealth(flags.service, print);
    if (OutputLost()) return kExitCallFailed;
    // The watch ends with the server: no server is there any more, however it ended.
    if (ended.ok() || absl::IsCancelled(ended)) {
      Complain("the server has ended the watch");
      return kExitUnavailable;
    }
    return session.CallFailed(ended);
  }
  const absl::StatusOr<client::ServingStatus> status = session.client().Health(flags.service);
  if (!status.ok()) return session.CallFailed(status.status());
  print(*status);
  return *status == client::ServingStatus::kServing ? kExitOk : kExitUnavailable;
}

}  // namespace logitd::cli
