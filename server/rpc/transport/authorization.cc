#include "server/rpc/transport/authorization.h"

#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_format.h"
#include "server/base/clock.h"
#include "server/engine/load.h"
#include "server/log/limited.h"

namespace logitd::rpc {
namespace {

constexpr absl::string_view kScheme = "bearer ";

// A shorter token can be guessed, whatever its hash is.
constexpr size_t kMinToken = 16;
constexpr size_t kMaxToken = 512;

absl::StatusOr<door::Credentials> ReadCredentials(const http2::HeaderList* metadata,
                                                  const http2::PeerInfo& peer) {
  door::Credentials credentials;
  credentials.certificate_names = peer.certificate_names;
  credentials.uid = peer.uid;
  absl::string_view value;
  for (size_t i = 0; metadata != nullptr && i < metadata->size(); ++i) {
    const http2::Field field = (*metadata)[i];
    if (field.name != kAuthorization) continue;
    if (value.data() != nullptr) {
      return absl::UnauthenticatedError("authorization: got it more than once, allowed once");
    }
    value = {field.value.data(), field.value.size()};
  }
  if (value.data() == nullptr) return credentials;
  if (!absl::StartsWithIgnoreCase(value, kScheme)) {
    return absl::UnauthenticatedError(
        "authorization: got another scheme, allowed \"Bearer TOKEN\"");
  }
  const absl::string_view token = value.substr(kScheme.size());
  if (token.size() < kMinToken || token.size() > kMaxToken) {
    return absl::UnauthenticatedError(
        absl::StrFormat("authorization: got a token of %d characters, allowed %d to %d",
                        token.size(), kMinToken, kMaxToken));
  }
  credentials.token = door::HashToken({token.data(), token.size()});
  return credentials;
}

absl::Status CheckRole(const door::Identity& identity, const Access& access) {
  if (!access.role.has_value() || identity.Has(*access.role)) return absl::OkStatus();
  return absl::PermissionDeniedError(
      absl::StrFormat("%s may not call %s: got the roles %s, allowed %s", identity.name,
                      access.method, identity.RoleList(), door::NameOf(*access.role)));
}

engine::Proof ProofOf(door::Identities::Proof proof) {
  switch (proof) {
    case door::Identities::Proof::kToken:
      return engine::Proof::kToken;
    case door::Identities::Proof::kCertificate:
      return engine::Proof::kCertificate;
    case door::Identities::Proof::kUser:
      return engine::Proof::kUser;
  }
  return engine::Proof::kNone;
}

}  // namespace

absl::StatusOr<Authorization> Authorize(const http2::HeaderList* metadata,
                                        const http2::PeerInfo& peer,
                                        const door::Identities* identities, const Access& access,
                                        engine::Metrics* metrics) {
  if (identities == nullptr) return Authorization();
  absl::StatusOr<door::Credentials> credentials = ReadCredentials(metadata, peer);
  Authorization authorization;
  absl::Status status = credentials.status();
  if (status.ok()) {
    authorization.credentials = *std::move(credentials);
    auto found = identities->Find(authorization.credentials);
    status = found.status();
    if (status.ok()) {
      authorization.identity = std::move(found->identity);
      authorization.proof = ProofOf(found->proof);
    }
  }
  if (status.ok()) status = CheckRole(*authorization.identity, access);
  if (status.ok()) return authorization;
  metrics->CountRefused(
      absl::IsUnauthenticated(status) ? engine::Refusal::kUnauthenticated : engine::Refusal::kRole,
      authorization.proof);
  log::Limited(log::Source::kCallers, spdlog::level::warn, "{} of {} was refused: {}",
               std::string(access.method), peer.name, std::string(status.message()));
  return status;
}

absl::Status CheckStillAuthorized(const Authorization& authorization,
                                  const door::Identities* identities, const Access& access) {
  if (identities == nullptr) return absl::OkStatus();
  const auto found = identities->Find(authorization.credentials);
  if (!found.ok()) return found.status();
  if (found->identity->name != authorization.identity->name) {
    return absl::UnauthenticatedError("the token, certificate or user is now another identity");
  }
  return CheckRole(*found->identity, access);
}

absl::StatusOr<std::shared_ptr<const void>> TakePlace(const Authorization& authorization,
                                                      engine::Metrics* metrics) {
  const door::Identity* const identity = authorization.identity.get();
  if (identity == nullptr || identity->max_calls == 0) return nullptr;
  if (identity->usage->BeginCall(identity->max_calls)) {
    const std::shared_ptr<door::Usage>& usage = identity->usage;
    return std::shared_ptr<const void>(usage.get(), [usage](const void*) { usage->EndCall(); });
  }
  metrics->CountRefused(engine::Refusal::kQuotaCalls, authorization.proof);
  return absl::ResourceExhaustedError(absl::StrFormat(
      "%s: got one more call at the same time, allowed %d", identity->name, identity->max_calls));
}

absl::Status TakeRows(const Authorization& authorization, int64_t rows, engine::Metrics* metrics) {
  const door::Identity* const identity = authorization.identity.get();
  if (identity == nullptr) return absl::OkStatus();
  const absl::Duration wait =
      identity->usage->TakeRows(rows, identity->max_rows_per_second, MonotonicNanos());
  if (wait == absl::ZeroDuration()) return absl::OkStatus();
  metrics->CountRefused(engine::Refusal::kQuotaRows, authorization.proof);
  return engine::WithRetryDelay(
      absl::ResourceExhaustedError(absl::StrFormat(
          "%s: got %d rows after those of the last second, allowed %g rows per second; retry after "
          "%d ms",
          identity->name, rows, identity->max_rows_per_second, absl::ToInt64Milliseconds(wait))),
      wait);
}

}  // namespace logitd::rpc
