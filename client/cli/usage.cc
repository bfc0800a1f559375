#include "client/cli/usage.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <regex>

#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"

namespace logitd::cli {
namespace {

// `type`: what help says of the values.
CLI::Option* Allow(CLI::Option* option, const std::string& allowed, const std::string& type,
                   const std::function<bool(const std::string&)>& good) {
  return option->type_name(type)->check([allowed, good](const std::string& value) {
    return good(value)
               ? std::string()
               : absl::StrFormat("got \"%s\", allowed %s", absl::CHexEscape(value), allowed);
  });
}

// A form of CLI11's texts, and ours; $1 is its first group.
struct Form {
  const char* theirs;
  const char* ours;
};
constexpr Form kForms[] = {
    {R"(Exactly 1 option from (\[.*\]) is required)", "$1: got none of these, allowed exactly 1"},
    {R"(Exactly 1 option from (\[.*\]) is required and (\d+) were given)",
     "$1: got $2 of these, allowed exactly 1"},
    {R"(A subcommand is required)", "subcommand: got none, allowed are those of --help"},
    {R"((\S+) is required)", "$1: got nothing, allowed a value: it is required"},
    {R"((\S+): \d+ required (.*) missing)", "$1: got no value, allowed $2"},
    {R"((\S+) requires (\S+))", "$1: got without $2, allowed with it"},
    {R"((\S+) excludes (\S+))", "$1: got beside $2, allowed one of the two"},
    {R"(The value (.*) is not an allowed value for (.*))",
     "$2: got \"$1\", allowed no value, true or false"},
    {R"(Could not convert: (\S+) = (.*))", "$1: got \"$2\", allowed no value, true or false"},
    {R"((\S+): Should be true/false or a number)",
     "$1: got another value, allowed no value, true or false"},
    {R"((?:\S+: )?The following arguments? (?:was|were) not expected: (.*))",
     "$1: got an unexpected word, allowed are those of --help"},
};

}  // namespace

CLI::Option* Integers(CLI::Option* option, absl::int128 low, absl::int128 high) {
  const std::string range = absl::StrFormat("%d..%d", low, high);
  Allow(option, absl::StrCat("integers ", range), range, [low, high](const std::string& text) {
    absl::int128 value = 0;
    return absl::SimpleAtoi(text, &value) && value >= low && value <= high;
  });
  // CLI11 would read 010 as octal.
  return option->transform([](const std::string& text) {
    absl::int128 value = 0;
    return absl::SimpleAtoi(text, &value) ? absl::StrFormat("%d", value) : text;
  });
}

CLI::Option* Numbers(CLI::Option* option, double low, double high) {
  const std::string range = absl::StrFormat("%g..%g", low, high);
  return Allow(option, absl::StrCat("numbers ", range), range,
               [low, high](const std::string& text) {
                 double value = 0;
                 return absl::SimpleAtod(text, &value) && value >= low && value <= high;
               });
}

CLI::Option* FiniteNumbers(CLI::Option* option) {
  return Allow(option, "any finite number", "NUMBER", [](const std::string& text) {
    float value = 0;
    return absl::SimpleAtof(text, &value) && std::isfinite(value);
  });
}

CLI::Option* Words(CLI::Option* option, const std::vector<std::string>& words) {
  return Allow(option, absl::StrJoin(words, ", "),
               absl::StrCat("{", absl::StrJoin(words, ","), "}"), [words](const std::string& text) {
                 return std::find(words.begin(), words.end(), text) != words.end();
               });
}

std::string UsageText(const CLI::ParseError& error) {
  const std::string text = error.what();
  std::smatch match;
  for (const Form& form : kForms) {
    if (std::regex_match(text, match, std::regex(form.theirs))) return match.format(form.ours);
  }
  return text;
}

}  // namespace logitd::cli
