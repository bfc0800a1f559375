#include "client/cli/completion.h"

#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "client/cli/unknown_word.h"

namespace logitd::cli {
namespace {

// $1: the completion's text. bash splits --flag=value into three words; `path` has the subcommands
// so far; each case sets the words that may follow, and `paths` to the kind of path that may.
constexpr char kScript[] = R"(# Completes logitctl in bash. Written by: logitctl completion bash
_logitctl() {
  local cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD-1]} path= commands= flags= values= paths= i
  if [[ $cur == = ]]; then
    cur=
  elif [[ $prev == = ]]; then
    prev=${COMP_WORDS[COMP_CWORD-2]}
  fi
  for ((i = 1; i < COMP_CWORD; ++i)); do
    case "$path ${COMP_WORDS[i]}" in
      %s) path+=" ${COMP_WORDS[i]}" ;;
    esac
  done
  case "$path" in
%s  esac
  COMPREPLY=()
  if [[ -n $values || -n $paths ]]; then
    if [[ -n $values ]]; then mapfile -t COMPREPLY < <(compgen -W "$values" -- "$cur"); fi
    if [[ $paths == file || $paths == directory ]]; then
      compopt -o filenames 2>/dev/null
      mapfile -t -O "${#COMPREPLY[@]}" COMPREPLY < <(compgen -A "$paths" -- "$cur")
    fi
  elif [[ $cur == -* || -z $commands ]]; then
    mapfile -t COMPREPLY < <(compgen -W "$flags" -- "$cur")
  else
    mapfile -t COMPREPLY < <(compgen -W "$commands" -- "$cur")
  fi
}
complete -F _logitctl logitctl
)";

std::string FlagNames(const CLI::Option& option) {
  return absl::StrJoin(option.get_lnames(), "|", [](std::string* out, const std::string& name) {
    absl::StrAppend(out, "--", name);
  });
}

// The values that an option lists in its type: "raw|processed", "{table,json}" or
// "value in {batch->1,interactive->0} OR {1,0}"; empty: it lists none.
std::vector<std::string> ValuesOf(const std::string& type) {
  const size_t open = type.find('{');
  if (open != std::string::npos) {
    const std::string list = type.substr(open + 1, type.find('}', open) - open - 1);
    std::vector<std::string> values;
    for (absl::string_view value : absl::StrSplit(list, ',')) {
      values.emplace_back(value.substr(0, value.find("->")));
    }
    return values;
  }
  if (absl::StrContains(type, '|')) return absl::StrSplit(type, '|');
  return {};
}

// What may follow the option, as assignments of kScript's. FILE may be one of the values.
std::string AfterOption(const CLI::Option& option) {
  const std::string type = option.get_type_name();
  std::vector<std::string> values = ValuesOf(type);
  const bool file = type == "FILE" || std::erase(values, "FILE") > 0;
  return absl::StrFormat("values=\"%s\" paths=%s", absl::StrJoin(values, " "),
                         file            ? "file"
                         : type == "DIR" ? "directory"
                                         : "none");
}

// Adds the case of `command`, and of those below it. `path`: " heads load".
void AddCases(const CLI::App& command, const std::string& path, std::vector<std::string>* paths,
              std::string* cases) {
  std::vector<std::string> flags, names, after;
  for (const CLI::Option* option : OptionsOf(command)) {
    if (option->get_positional()) {
      const std::vector<std::string> values = ValuesOf(option->get_type_name());
      names.insert(names.end(), values.begin(), values.end());
      continue;
    }
    for (const std::string& name : option->get_lnames()) flags.push_back("--" + name);
    if (option->get_items_expected_max() == 0) continue;
    after.push_back(
        absl::StrFormat("        %s) %s ;;\n", FlagNames(*option), AfterOption(*option)));
  }
  for (const CLI::App* subcommand : SubcommandsOf(command)) {
    names.push_back(subcommand->get_name());
  }
  absl::StrAppendFormat(cases, "    \"%s\")\n      commands=\"%s\" flags=\"%s\"\n", path,
                        absl::StrJoin(names, " "), absl::StrJoin(flags, " "));
  if (!after.empty()) {
    absl::StrAppendFormat(cases, "      case \"$prev\" in\n%s      esac\n",
                          absl::StrJoin(after, ""));
  }
  absl::StrAppend(cases, "      ;;\n");
  for (const CLI::App* subcommand : SubcommandsOf(command)) {
    const std::string below = absl::StrCat(path, " ", subcommand->get_name());
    paths->push_back(absl::StrFormat("\"%s\"", below));
    AddCases(*subcommand, below, paths, cases);
  }
}

}  // namespace

std::string BashCompletion(const CLI::App& app) {
  std::vector<std::string> paths;
  std::string cases;
  AddCases(app, "", &paths, &cases);
  return absl::StrFormat(kScript, absl::StrJoin(paths, "|"), cases);
}

}  // namespace logitd::cli
