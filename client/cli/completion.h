// Shell completion, written from the definitions of the command line.
#ifndef LOGITD_CLIENT_CLI_COMPLETION_H_
#define LOGITD_CLIENT_CLI_COMPLETION_H_

#include <CLI/CLI.hpp>
#include <string>

namespace logitd::cli {

// A script for bash (4.4 or newer) that completes `app`: subcommands, flags, the values of flags
// that have a list of them, and paths for flags of the types FILE and DIR.
std::string BashCompletion(const CLI::App& app);

}  // namespace logitd::cli

#endif  // LOGITD_CLIENT_CLI_COMPLETION_H_
