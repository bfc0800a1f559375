#include "client/cli/unknown_word.h"

#include <algorithm>
#include <cstddef>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "formats/nearest.h"

namespace logitd::cli {
namespace {

// "logitctl heads load"
std::string PathOf(const CLI::App& command) {
  const CLI::App* parent = command.get_parent();
  return parent == nullptr ? command.get_name()
                           : absl::StrCat(PathOf(*parent), " ", command.get_name());
}

std::string UnknownFlag(const CLI::App& command, const std::string& flag) {
  const std::vector<const CLI::App*> subcommands = SubcommandsOf(command);
  for (const CLI::App* subcommand : subcommands) {
    if (subcommand->get_option_no_throw(flag) == nullptr) continue;
    return absl::StrFormat("%s: got before a subcommand, allowed after it: %s %s ...", flag,
                           PathOf(*subcommand), flag);
  }
  std::vector<std::string> flags;
  for (const CLI::Option* option : OptionsOf(command)) {
    for (const std::string& name : option->get_lnames()) flags.push_back("--" + name);
  }
  const std::string nearest = formats::Nearest(flag, flags);
  return absl::StrFormat(
      "%s: got an unknown flag of %s, %s", flag, PathOf(command),
      nearest.empty() ? "allowed are those of --help" : absl::StrCat("the nearest is ", nearest));
}

std::string UnknownSubcommand(const CLI::App& command, const std::string& word) {
  std::vector<std::string> names;
  for (const CLI::App* subcommand : SubcommandsOf(command)) names.push_back(subcommand->get_name());
  const std::string nearest = formats::Nearest(word, names);
  return absl::StrFormat("%s: got an unknown subcommand of %s, %s", word, PathOf(command),
                         nearest.empty() ? absl::StrCat("allowed ", absl::StrJoin(names, ", "))
                                         : absl::StrCat("the nearest is ", nearest));
}

}  // namespace

std::vector<const CLI::Option*> OptionsOf(const CLI::App& command) {
  std::vector<const CLI::Option*> options = command.get_options();
  for (const CLI::App* group : command.get_subcommands([](const CLI::App*) { return true; })) {
    if (!group->get_name().empty()) continue;
    for (const CLI::Option* option : OptionsOf(*group)) {
      if (option != group->get_help_ptr()) options.push_back(option);
    }
  }
  return options;
}

std::vector<const CLI::App*> SubcommandsOf(const CLI::App& command) {
  return command.get_subcommands([](const CLI::App* app) { return !app->get_name().empty(); });
}

std::string UnknownWord(const CLI::App& app, const std::vector<std::string>& words) {
  const CLI::App* command = &app;
  for (size_t i = 0; i < words.size(); ++i) {
    const std::string& word = words[i];
    if (word == "--") return "";  // positionals follow
    if (absl::StartsWith(word, "--")) {
      const std::string flag = word.substr(0, word.find('='));
      const CLI::Option* option = command->get_option_no_throw(flag);
      if (option == nullptr) return UnknownFlag(*command, flag);
      if (flag.size() < word.size() || option->get_items_expected_max() == 0) continue;
      ++i;  // its value
      // A flag that takes several values has all words up to the next flag.
      while (option->get_items_expected_max() > 1 && i + 1 < words.size() &&
             !absl::StartsWith(words[i + 1], "-")) {
        ++i;
      }
    } else if (!SubcommandsOf(*command).empty() && !absl::StartsWith(word, "-")) {
      const auto all = SubcommandsOf(*command);
      const auto found = std::find_if(all.begin(), all.end(), [&](const CLI::App* subcommand) {
        return subcommand->get_name() == word;
      });
      if (found == all.end()) return UnknownSubcommand(*command, word);
      command = *found;
    }
  }
  return "";
}

}  // namespace logitd::cli
