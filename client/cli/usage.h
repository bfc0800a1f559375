// How a wrong command line is answered: "FLAG: got VALUE, allowed ...".
#ifndef LOGITD_CLIENT_CLI_USAGE_H_
#define LOGITD_CLIENT_CLI_USAGE_H_

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

#include "absl/numeric/int128.h"

namespace logitd::cli {

// Each returns `option`, which from then on takes only such values; each of them where it takes
// several. Help shows the allowed ones.

// Whole numbers from `low` to `high`.
CLI::Option* Integers(CLI::Option* option, absl::int128 low, absl::int128 high);
// Numbers from `low` to `high`, both finite; no NaN.
CLI::Option* Numbers(CLI::Option* option, double low, double high);
// All finite numbers.
CLI::Option* FiniteNumbers(CLI::Option* option);
// These words. The completion offers them.
CLI::Option* Words(CLI::Option* option, const std::vector<std::string>& words);

// The text for a command line that `error` refuses, in one form, where CLI11 has many.
std::string UsageText(const CLI::ParseError& error);

}  // namespace logitd::cli

#endif  // LOGITD_CLIENT_CLI_USAGE_H_
