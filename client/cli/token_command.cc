// logitctl token.
#include <openssl/rand.h>
#include <openssl/sha.h>

#include <string>

#include "absl/strings/escaping.h"
#include "absl/strings/str_format.h"
#include "client/cli/commands.h"

namespace logitd::cli {

int RunToken(const Session& session) {
  unsigned char random[32];
  if (RAND_bytes(random, sizeof(random)) != 1) {
    Complain("the system has no random numbers now");
    return kExitCallFailed;
  }
  const std::string token = absl::BytesToHexString(
      absl::string_view(reinterpret_cast<const char*>(random), sizeof(random)));
  unsigned char hash[SHA256_DIGEST_LENGTH];
  SHA256(reinterpret_cast<const unsigned char*>(token.data()), token.size(), hash);
  const std::string hex =
      absl::BytesToHexString(absl::string_view(reinterpret_cast<const char*>(hash), sizeof(hash)));
  Print(session.json() ? absl::StrFormat("{\"token\":\"%s\",\"token_sha256\":\"%s\"}\n", token, hex)
                       : absl::StrFormat("token         %s\ntoken_sha256  %s\n", token, hex));
  return kExitOk;
}

}  // namespace logitd::cli
