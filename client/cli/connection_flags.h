// Flags for the way to a server, which logitctl and load_bench share.
#ifndef LOGITD_CLIENT_CLI_CONNECTION_FLAGS_H_
#define LOGITD_CLIENT_CLI_CONNECTION_FLAGS_H_

#include <string>

#include "absl/status/statusor.h"
#include "client/options.h"

namespace CLI {
class App;  // its header takes 15 s to compile
}  // namespace CLI

namespace logitd::cli {

struct ConnectionFlags {
  std::string address = "127.0.0.1:7450";
  bool round_robin = false;
  bool tls = false;
  client::TlsOptions tls_files;
  std::string token_file;
  bool token_over_plaintext = false;
};

void AddConnectionFlags(CLI::App* command, ConnectionFlags* flags);

// INVALID_ARGUMENT: the token's file cannot be read.
absl::StatusOr<client::ClientOptions> OptionsOf(const ConnectionFlags& flags);

}  // namespace logitd::cli

#endif  // LOGITD_CLIENT_CLI_CONNECTION_FLAGS_H_
