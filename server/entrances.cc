#include "server/entrances.h"

#include <spdlog/spdlog.h>

#include <filesystem>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "server/door/address.h"
#include "server/http2/listener.h"
#include "server/http2/tls_session.h"
#include "server/rpc/health_service.h"

namespace logitd {

absl::StatusOr<int64_t> MaxConnections(const Config& config) {
  const int64_t descriptors = http2::RaiseDescriptorLimit();
  constexpr int64_t kOfLease = 4;
  const int64_t of_leases = config.arena_listen.empty() ? 0 : kOfLease * config.max_leases;
  if (of_leases > descriptors / 2) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "--max-leases: got %d, allowed at most %d: each takes up to %d of the %d files that the "
        "process may open, and connections need half of them",
        config.max_leases, descriptors / 2 / kOfLease, kOfLease, descriptors));
  }
  const int64_t of_probes = config.probe_listen.empty() ? 0 : rpc::ProbeServer::kMaxConnections;
  return http2::ConnectionLimit(config.max_connections, descriptors - of_leases - of_probes,
                                config.max_connection_bytes, !config.tls_cert.empty());
}

absl::Status OpenDoor(const Config& config, const std::shared_ptr<door::DoorMetrics>& metrics,
                      std::function<void()> on_identities, Door* door,
                      std::unique_ptr<door::WatchedFiles>* files) {
  std::vector<door::FileGroup> groups;
  const auto on_read = [&metrics](const std::string& file) {
    metrics->AddFile(file);
    return [metrics, file](bool used) { metrics->OnRead(file, used); };
  };
  if (!config.tls_cert.empty()) {
    door->tls = std::make_shared<door::TlsSource>();
    metrics->AddTls(http2::kHandshakeEndNames);
    const bool mutual = !config.tls_client_ca.empty();
    std::vector<std::string> paths = {config.tls_cert, config.tls_key};
    if (mutual) paths.push_back(config.tls_client_ca);
    const auto use = [tls = door->tls, metrics, mutual](const std::vector<std::string>& contents) {
      door::TlsPems pems = {.certificate = contents[0], .key = contents[1]};
      if (mutual) pems.client_ca = contents[2];
      absl::Status status = tls->Set(pems);
      if (status.ok()) metrics->SetCertificateExpiry(tls->Get()->expiry());
      return status;
    };
    groups.push_back({.name = absl::StrJoin(paths, ", "),
                      .paths = paths,
                      .use = use,
                      .on_read = on_read("tls")});
  }
  if (!config.tokens.empty()) {
    door->identities = std::make_unique<door::Identities>();
    const auto use = [identities = door->identities.get(),
                      on_identities](const std::vector<std::string>& contents) {
      absl::Status status = identities->Set(contents[0]);
      if (status.ok()) on_identities();
      return status;
    };
    groups.push_back({.name = config.tokens,
                      .paths = {config.tokens},
                      .use = use,
                      .on_read = on_read("tokens")});
  }
  *files = std::make_unique<door::WatchedFiles>(std::move(groups));
  return (*files)->Load();
}

std::string RemoteListen(const Config& config) {
  // Where there are identities, their roles say who may.
  if (config.allow_remote_heads || !config.tokens.empty()) return "";
  for (const std::string& text : config.listen) {
    const absl::StatusOr<door::Address> address = door::ParseAddress(text);
    if (!address.ok() || !door::IsLocal(*address)) return text;
  }
  return "";
}

absl::StatusOr<std::string> ResolveHeadRoot(const Config& config) {
  if (config.head_root.empty()) return "";
  std::error_code error;
  std::string root = std::filesystem::canonical(config.head_root, error).string();
  if (error) {
    return absl::NotFoundError(
        absl::StrCat("--head-root: ", config.head_root, ": ", error.message()));
  }
  if (const std::string remote = RemoteListen(config); remote.empty()) {
    spdlog::info("clients may load heads from {}", root);
  } else {
    spdlog::warn(
        "clients may not load or unload heads: {} is not local, and there is no "
        "--allow-remote-heads",
        remote);
  }
  return root;
}

absl::StatusOr<std::unique_ptr<MetricsServer>> ServeMetrics(const Config& config,
                                                            std::function<std::string()> page) {
  if (config.metrics_listen == "off") return nullptr;
  absl::StatusOr<door::Address> address = door::ParseAddress(config.metrics_listen);
  if (!address.ok()) return address.status();
  absl::StatusOr<std::unique_ptr<MetricsServer>> server =
      MetricsServer::Start(*address, std::move(page));
  if (!server.ok()) {
    return absl::UnavailableError(absl::StrCat("--metrics-listen: cannot listen on ",
                                               config.metrics_listen, ": ",
                                               server.status().message()));
  }
  spdlog::info("metrics on {}:{}",
               config.metrics_listen.substr(0, config.metrics_listen.rfind(':')),
               (*server)->port());
  return server;
}

absl::StatusOr<std::unique_ptr<arena::ArenaServer>> ServeArenas(
    const Config& config, const door::Identities* identities, arena::Leases* leases,
    std::shared_ptr<prometheus::Registry> registry) {
  if (config.arena_listen.empty()) return nullptr;
  const absl::StatusOr<door::Address> address = door::ParseAddress(config.arena_listen);
  if (!address.ok()) return address.status();
  // Where there are identities, only their users may lease: not all who may open the file.
  const auto check_user = [identities](uid_t uid) -> absl::Status {
    if (identities == nullptr) return absl::OkStatus();
    door::Credentials shown;
    shown.uid = uid;
    const auto found = identities->Find(shown);
    if (!found.ok()) {
      return absl::UnauthenticatedError(
          absl::StrCat("arena: got user ", uid, ", allowed users of an identity in --tokens"));
    }
    const door::Identity& identity = *found->identity;
    if (identity.Has(door::Role::kInfer) || identity.Has(door::Role::kScore)) {
      return absl::OkStatus();
    }
    return absl::PermissionDeniedError(absl::StrCat("arena: got identity ", identity.name,
                                                    " with the roles ", identity.RoleList(),
                                                    ", allowed one with infer or score"));
  };
  absl::StatusOr<std::unique_ptr<arena::ArenaServer>> server = arena::ArenaServer::Start(
      {.address = *address, .mode = config.arena_mode, .check_user = check_user}, leases,
      std::move(registry));
  if (!server.ok()) {
    return absl::UnavailableError(absl::StrCat(
        "--arena-listen: cannot listen on ", config.arena_listen, ": ", server.status().message()));
  }
  spdlog::info("arenas on {}: at most {} leases, {} B of the host and {} B of each GPU",
               config.arena_listen, config.max_leases, config.max_arena_bytes,
               config.max_device_arena_bytes);
  return server;
}

}  // namespace logitd
