#include "client/cli/connection_flags.h"

#include <CLI/CLI.hpp>
#include <cstdlib>
#include <fstream>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"

namespace logitd::cli {

void AddConnectionFlags(CLI::App* command, ConnectionFlags* flags) {
  command
      ->add_option(
          "--addr", flags->address,
          "HOST:PORT or unix:PATH of the server; ipv4:A:PORT,B:PORT or dns:///HOST:PORT of several")
      ->envname("LOGITD_ADDR")
      ->capture_default_str();
  command->add_flag("--round-robin", flags->round_robin, "calls go to all of several servers");
  const char* const kGroup = "TLS and token";
  command->add_flag("--tls", flags->tls, "TLS, with the system's authorities unless --tls-ca")
      ->group(kGroup);
  command
      ->add_option("--tls-ca", flags->tls_files.ca_file,
                   "PEM file of the authorities of the server's certificate; implies --tls")
      ->type_name("FILE")
      ->group(kGroup);
  command
      ->add_option("--tls-cert", flags->tls_files.cert_file,
                   "PEM file of the client's certificate, for mutual TLS; implies --tls")
      ->type_name("FILE")
      ->group(kGroup);
  command->add_option("--tls-key", flags->tls_files.key_file, "PEM file of its key")
      ->type_name("FILE")
      ->group(kGroup);
  command
      ->add_option("--tls-server-name", flags->tls_files.server_name,
                   "the name in the server's certificate, if it is not the address's host")
      ->group(kGroup);
  command
      ->add_option("--token-file", flags->token_file,
                   "a file with the token that shows who calls; without it $LOGITD_TOKEN")
      ->type_name("FILE")
      ->group(kGroup);
  command
      ->add_flag("--token-over-plaintext", flags->token_over_plaintext,
                 "send the token to another machine although there is no TLS")
      ->group(kGroup);
}

absl::StatusOr<client::ClientOptions> OptionsOf(const ConnectionFlags& flags) {
  client::ClientOptions options;
  options.address = flags.address;
  options.round_robin = flags.round_robin;
  const client::TlsOptions& files = flags.tls_files;
  if (flags.tls || !files.ca_file.empty() || !files.cert_file.empty() || !files.key_file.empty()) {
    options.tls = files;
  }
  if (!flags.token_file.empty()) {
    std::ifstream file(flags.token_file);
    if (!std::getline(file, options.token)) {
      return absl::InvalidArgumentError(
          absl::StrCat("--token-file: got ", flags.token_file, ", allowed a file with a token"));
    }
  } else if (const char* const token = std::getenv("LOGITD_TOKEN")) {
    options.token = token;
  }
  absl::StripAsciiWhitespace(&options.token);
  options.token_over_plaintext = flags.token_over_plaintext;
  return options;
}

}  // namespace logitd::cli
