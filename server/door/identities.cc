#include "server/door/identities.h"

#include <openssl/crypto.h>
#include <openssl/sha.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"

namespace logitd::door {
namespace {

using Json = nlohmann::json;

// Ids of connections count from 1.
constexpr uint64_t kFirstId = uint64_t{1} << 63;
constexpr size_t kMaxName = 64;
constexpr int64_t kMaxLimit = int64_t{1} << 50;
constexpr double kMaxWeight = 1000;
// Linux's number for a user of another namespace who has none in this one.
constexpr uint64_t kUnknownUser = 65534;

constexpr const char* kKeys[] = {
    "name",   "token_sha256",   "certificates",        "uids",     "roles",
    "weight", "max_held_bytes", "max_rows_per_second", "max_calls"};

absl::Status Refuse(const std::string& place, const Json& got, absl::string_view allowed) {
  std::string text = got.dump(-1, ' ', true, Json::error_handler_t::replace);
  if (text.size() > 80) text = absl::StrCat(text.substr(0, 80), "...");
  return absl::InvalidArgumentError(absl::StrCat(place, ": got ", text, ", allowed ", allowed));
}

// nlohmann::json keeps the last of two equal keys. Here that could give a caller the roles that
// the operator believes to have taken away.
std::optional<std::string> DoubleKey(std::string_view text, Json* json) {
  std::vector<std::set<std::string>> open;
  std::optional<std::string> twice;
  *json = Json::parse(
      text,
      [&](int, Json::parse_event_t event, Json& value) {
        if (event == Json::parse_event_t::object_start) open.emplace_back();
        if (event == Json::parse_event_t::object_end) open.pop_back();
        if (event == Json::parse_event_t::key &&
            !open.back().insert(value.get<std::string>()).second) {
          twice = value.get<std::string>();
        }
        return true;
      },
      /*allow_exceptions=*/false);
  return twice;
}

bool IsName(const std::string& name) {
  return !name.empty() && name.size() <= kMaxName &&
         std::all_of(name.begin(), name.end(), [](char c) {
           return absl::ascii_isalnum(static_cast<unsigned char>(c)) ||
                  absl::StrContains("._-@:/", absl::string_view(&c, 1));
         });
}

absl::Status ReadNumber(const Json& entry, const std::string& place, const char* key, double low,
                        double high, double* value) {
  const auto it = entry.find(key);
  if (it == entry.end()) return absl::OkStatus();
  const double number = it->is_number() ? it->get<double>() : std::nan("");
  if (!(number >= low && number <= high)) {
    return Refuse(absl::StrCat(place, ".", key), *it,
                  absl::StrFormat("a number of %g to %g", low, high));
  }
  *value = number;
  return absl::OkStatus();
}

// 0 in the file would be "no calls", or "no limit": a limit that is not wanted is left out.
absl::Status ReadCount(const Json& entry, const std::string& place, const char* key,
                       int64_t* value) {
  const auto it = entry.find(key);
  if (it == entry.end()) return absl::OkStatus();
  const bool whole = it->is_number_unsigned() && it->get<uint64_t>() <= uint64_t{kMaxLimit};
  if (!whole || it->get<int64_t>() < 1) {
    return Refuse(absl::StrCat(place, ".", key), *it,
                  absl::StrFormat("a whole number of 1 to %d", kMaxLimit));
  }
  *value = it->get<int64_t>();
  return absl::OkStatus();
}

// The strings of an array that may be left out. `read`: false for one that is not allowed.
template <typename Read>
absl::Status ReadList(const Json& entry, const std::string& place, const char* key,
                      const char* allowed, Read read) {
  const auto it = entry.find(key);
  if (it == entry.end()) return absl::OkStatus();
  const std::string list_place = absl::StrCat(place, ".", key);
  if (!it->is_array() || it->empty()) {
    return Refuse(list_place, *it, absl::StrCat("a list of one or more: ", allowed));
  }
  for (size_t i = 0; i < it->size(); ++i) {
    if (!read((*it)[i])) return Refuse(absl::StrFormat("%s[%d]", list_place, i), (*it)[i], allowed);
  }
  return absl::OkStatus();
}

}  // namespace

bool Usage::BeginCall(int64_t most) {
  if (calls_.fetch_add(1, std::memory_order_relaxed) < most || most == 0) return true;
  EndCall();
  return false;
}

absl::Duration Usage::TakeRows(int64_t rows, double rows_per_second, int64_t now_ns) {
  if (rows_per_second <= 0) return absl::ZeroDuration();
  absl::MutexLock lock(&mutex_);
  const int64_t full_ns = std::max(full_ns_, now_ns);
  // Above 0: nothing is left.
  const absl::Duration empty = absl::Nanoseconds(full_ns - now_ns) - absl::Seconds(1);
  if (empty >= absl::ZeroDuration()) return std::max(empty, absl::Milliseconds(1));
  // A year stands for longer ones.
  const absl::Duration takes =
      std::min(absl::Seconds(static_cast<double>(rows) / rows_per_second), absl::Hours(24 * 365));
  full_ns_ = full_ns + absl::ToInt64Nanoseconds(takes);
  return absl::ZeroDuration();
}

std::string Identity::RoleList() const {
  std::vector<absl::string_view> names;
  for (size_t i = 0; i < roles.size(); ++i) {
    if (roles[i]) names.push_back(kRoleNames[i]);
  }
  return absl::StrJoin(names, ", ");
}

TokenHash HashToken(std::string_view token) {
  TokenHash hash;
  SHA256(reinterpret_cast<const unsigned char*>(token.data()), token.size(), hash.data());
  return hash;
}

struct Identities::Table {
  std::vector<std::shared_ptr<Identity>> identities;
  std::vector<std::pair<TokenHash, size_t>> tokens;  // with the index of the identity
  absl::flat_hash_map<std::string, size_t> certificates;
  absl::flat_hash_map<uint32_t, size_t> uids;
};

absl::StatusOr<Identities::Table> Identities::Parse(std::string_view text) {
  Json json;
  if (const auto twice = DoubleKey(text, &json); twice.has_value()) {
    return absl::InvalidArgumentError(
        absl::StrCat("got the key \"", absl::CHexEscape(*twice), "\" twice, allowed once"));
  }
  if (!json.is_object() || json.size() != 1 || !json.contains("identities") ||
      !json["identities"].is_array() || json["identities"].empty() ||
      json["identities"].size() > kMost) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "got another text, allowed {\"identities\": [...]} with 1 to %d identities", kMost));
  }
  Table table;
  std::set<std::string> names;
  for (size_t i = 0; i < json["identities"].size(); ++i) {
    const Json& entry = json["identities"][i];
    const std::string place = absl::StrFormat("identities[%d]", i);
    if (!entry.is_object()) return Refuse(place, entry, "an object");
    for (const auto& [key, value] : entry.items()) {
      if (std::find(std::begin(kKeys), std::end(kKeys), key) == std::end(kKeys)) {
        return Refuse(place, Json(key), absl::StrJoin(kKeys, ", "));
      }
    }
    auto identity = std::make_shared<Identity>();
    const Json name = entry.value("name", Json());
    if (!name.is_string() || !IsName(name.get<std::string>())) {
      return Refuse(absl::StrCat(place, ".name"), name, "1 to 64 letters, digits and . _ - @ : /");
    }
    identity->name = name.get<std::string>();
    if (!names.insert(identity->name).second) {
      return Refuse(absl::StrCat(place, ".name"), name, "a name that no other identity has");
    }
    const auto read_token = [&](const Json& value) {
      if (!value.is_string() || value.get<std::string>().size() != 64) return false;
      const auto& hex = value.get_ref<const std::string&>();
      if (!std::all_of(hex.begin(), hex.end(), [](char c) { return absl::ascii_isxdigit(c); })) {
        return false;
      }
      const std::string bytes = absl::HexStringToBytes(hex);
      TokenHash hash;
      std::copy(bytes.begin(), bytes.end(), hash.begin());
      const bool known = std::any_of(table.tokens.begin(), table.tokens.end(),
                                     [&](const auto& other) { return other.first == hash; });
      table.tokens.emplace_back(hash, i);
      return !known;
    };
    const auto read_certificate = [&](const Json& value) {
      if (!value.is_string()) return false;
      const auto& text = value.get_ref<const std::string&>();
      const bool typed = absl::StartsWith(text, "uri:") || absl::StartsWith(text, "dns:") ||
                         absl::StartsWith(text, "cn:");
      return typed && text.back() != ':' && table.certificates.emplace(text, i).second;
    };
    const auto read_uid = [&](const Json& value) {
      return value.is_number_unsigned() &&
             value.get<uint64_t>() < std::numeric_limits<uint32_t>::max() &&
             value.get<uint64_t>() != kUnknownUser &&
             table.uids.emplace(value.get<uint32_t>(), i).second;
    };
    const auto read_role = [&](const Json& value) {
      const auto role = value.is_string()
                            ? std::find(kRoleNames.begin(), kRoleNames.end(),
                                        absl::string_view(value.get_ref<const std::string&>()))
                            : kRoleNames.end();
      if (role == kRoleNames.end()) return false;
      identity->roles[static_cast<size_t>(role - kRoleNames.begin())] = true;
      return true;
    };
    absl::Status status = ReadList(
        entry, place, "token_sha256",
        "64 hexadecimal digits, the SHA-256 of a token that no other identity has", read_token);
    status.Update(ReadList(entry, place, "certificates",
                           "uri:..., dns:... or cn:... that no other identity has",
                           read_certificate));
    status.Update(ReadList(entry, place, "uids",
                           "a user's number, not 65534 (nobody), that no other identity has",
                           read_uid));
    status.Update(
        ReadList(entry, place, "roles", absl::StrJoin(kRoleNames, ", ").c_str(), read_role));
    status.Update(
        ReadNumber(entry, place, "weight", 1 / kMaxWeight, kMaxWeight, &identity->weight));
    status.Update(ReadNumber(entry, place, "max_rows_per_second", 1e-3, 1e12,
                             &identity->max_rows_per_second));
    status.Update(ReadCount(entry, place, "max_held_bytes", &identity->max_held_bytes));
    status.Update(ReadCount(entry, place, "max_calls", &identity->max_calls));
    if (!status.ok()) return status;
    const bool credential =
        entry.contains("token_sha256") || entry.contains("certificates") || entry.contains("uids");
    if (!credential) {
      return Refuse(place, name, "an identity with token_sha256, certificates or uids");
    }
    if (!entry.contains("roles")) return Refuse(place, name, "an identity with roles");
    table.identities.push_back(std::move(identity));
  }
  return table;
}

absl::Status Identities::Set(std::string_view text) {
  absl::StatusOr<Table> table = Parse(text);
  if (!table.ok()) return table.status();
  absl::MutexLock lock(&mutex_);
  for (const std::shared_ptr<Identity>& identity : table->identities) {
    const auto [it, added] = persistent_.try_emplace(identity->name);
    if (added) it->second = {kFirstId + persistent_.size(), std::make_shared<Usage>()};
    identity->id = it->second.id;
    identity->usage = it->second.usage;
  }
  table_ = std::make_shared<const Table>(*std::move(table));
  return absl::OkStatus();
}

absl::StatusOr<Identities::Found> Identities::Find(const Credentials& credentials) const {
  std::shared_ptr<const Table> table;
  {
    absl::MutexLock lock(&mutex_);
    table = table_;
  }
  constexpr absl::string_view kNone =
      "no identity: allowed \"authorization: Bearer TOKEN\", or a client certificate or Unix user "
      "that the server knows";
  if (table == nullptr) return absl::UnauthenticatedError(kNone);
  if (credentials.token.has_value()) {
    // Every hash is looked at, so the time says nothing about where they differ.
    std::shared_ptr<const Identity> found;
    for (const auto& [hash, index] : table->tokens) {
      if (CRYPTO_memcmp(hash.data(), credentials.token->data(), hash.size()) == 0) {
        found = table->identities[index];
      }
    }
    if (found == nullptr) return absl::UnauthenticatedError("the token is unknown");
    return Found{found, Proof::kToken};
  }
  Proof proof = Proof::kCertificate;
  std::optional<size_t> found;
  for (const std::string& name : credentials.certificate_names) {
    const auto it = table->certificates.find(name);
    if (it == table->certificates.end()) continue;
    if (found.has_value() && *found != it->second) {
      return absl::UnauthenticatedError("the names in the certificate are of two identities");
    }
    found = it->second;
  }
  if (!found.has_value() && credentials.uid.has_value()) {
    if (const auto it = table->uids.find(*credentials.uid); it != table->uids.end()) {
      found = it->second;
      proof = Proof::kUser;
    }
  }
  if (!found.has_value()) return absl::UnauthenticatedError(kNone);
  return Found{table->identities[*found], proof};
}

}  // namespace logitd::door
