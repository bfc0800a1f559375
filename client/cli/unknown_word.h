// Which word of a command line is misspelt.
#ifndef LOGITD_CLIENT_CLI_UNKNOWN_WORD_H_
#define LOGITD_CLIENT_CLI_UNKNOWN_WORD_H_

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

namespace logitd::cli {

// The first of `words` that should be a subcommand or a flag of `app` and is none, and the nearest
// one, as a sentence. "": there is no such word. `words` are the arguments without the program's
// name.
std::string UnknownWord(const CLI::App& app, const std::vector<std::string>& words);

// All options of a command, those of its groups included.
std::vector<const CLI::Option*> OptionsOf(const CLI::App& command);

// Its subcommands that have names.
std::vector<const CLI::App*> SubcommandsOf(const CLI::App& command);

}  // namespace logitd::cli

#endif  // LOGITD_CLIENT_CLI_UNKNOWN_WORD_H_
