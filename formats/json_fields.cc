#include "formats/json_fields.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <system_error>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/charconv.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "formats/safetensors.h"

namespace logitd::formats {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Numbers of Python's json module that JSON does not have.
struct NamedNumber {
  std::string_view name;
  double value;
};
constexpr NamedNumber kNamedNumbers[] = {
    {"NaN", std::numeric_limits<double>::quiet_NaN()},
    {"Infinity", kInfinity},
    {"-Infinity", -kInfinity},
};
// The only key of an object that holds such a name.
constexpr std::string_view kNumberKey = "__float__";

std::optional<double> NumberOfName(std::string_view name) {
  const auto* row = std::find_if(std::begin(kNamedNumbers), std::end(kNamedNumbers),
                                 [&](const NamedNumber& r) { return r.name == name; });
  return row != std::end(kNamedNumbers) ? std::optional<double>(row->value) : std::nullopt;
}

// RFC 8259, section 6.
bool IsJsonNumber(std::string_view token) {
  size_t at = token.starts_with('-') ? 1 : 0;
  const auto at_is = [&](std::string_view any) {
    return at < token.size() && any.find(token[at]) != any.npos;
  };
  const auto digits = [&] {
    const size_t start = at;
    while (at_is("0123456789")) ++at;
    return at - start;
  };
  const bool zero = at_is("0");
  const size_t whole = digits();
  if (whole == 0 || (zero && whole > 1)) return false;
  if (at_is(".") && (++at, digits() == 0)) return false;
  if (at_is("eE")) {
    ++at;
    if (at_is("+-")) ++at;
    if (digits() == 0) return false;
  }
  return at == token.size();
}

// The value of `token` if it is a number that the parser refuses: a named one, or one that is
// larger than a double.
std::optional<double> OddNumber(std::string_view token) {
  if (const std::optional<double> named = NumberOfName(token)) return named;
  double value = 0;
  const std::errc error = absl::from_chars(token.data(), token.data() + token.size(), value).ec;
  if (error != std::errc::result_out_of_range || std::abs(value) < 1) return std::nullopt;
  return IsJsonNumber(token) ? std::optional<double>(std::copysign(kInfinity, value))
                             : std::nullopt;
}

// Returns the text with every number that the parser refuses replaced by a zero of the same length,
// so that positions stay. Such a zero is the only number with an upper-case E: 0E0 for NaN, a
// longer one for an infinity. Values go through `number_float`, which is told the token.
std::string WithPlainNumbers(std::string_view text) {
  constexpr std::string_view kStart = "-0123456789NI";
  const auto in_token = [](char c) {
    return absl::ascii_isalnum(static_cast<unsigned char>(c)) || c == '+' || c == '-' || c == '.';
  };
  std::string plain(text);
  for (size_t at = 0; at < plain.size();) {
    if (plain[at] == '"') {  // to the end of the string
      for (++at; at < plain.size() && plain[at] != '"'; ++at) at += plain[at] == '\\' ? 1 : 0;
      ++at;
      continue;
    }
    size_t end = at;
    while (end < plain.size() && in_token(plain[end])) ++end;
    if (kStart.find(plain[at]) != kStart.npos) {
      const std::optional<double> value = OddNumber(text.substr(at, end - at));
      for (size_t i = at; i < end; ++i) {
        if (value.has_value()) plain[i] = '0';
        if (plain[i] == 'E') plain[i] = 'e';
      }
      if (value.has_value()) {
        const bool minus = *value < 0;
        if (minus) plain[at] = '-';
        plain[at + (minus ? 2 : 1)] = 'E';
      }
    }
    at = std::max(end, at + 1);
  }
  return plain;
}

// Takes the text piece by piece. A tree would need ten times the text's memory, and the library's
// tree parser with a filter searches the whole tree for each part it leaves out.
class FieldsReader final : public nlohmann::json_sax<nlohmann::json> {
 public:
  explicit FieldsReader(absl::FunctionRef<bool(std::string_view, std::string_view)> wanted)
      : wanted_(wanted) {}

  JsonFields& fields() { return fields_; }

  bool null() override { return Put({}); }
  bool boolean(bool value) override { return Put(value); }
  bool number_integer(int64_t value) override { return Put(value); }
  bool number_unsigned(uint64_t value) override {
    return value >> 63 == 0 ? Put(static_cast<int64_t>(value)) : Put(static_cast<double>(value));
  }
  // See WithPlainNumbers.
  bool number_float(double value, const std::string& token) override {
    if (token == "0E0") return Put(std::numeric_limits<double>::quiet_NaN());
    if (token.find('E') != token.npos) return Put(token[0] == '-' ? -kInfinity : kInfinity);
    return Put(value);
  }
  bool string(std::string& value) override {
    if (number_key_) number_ = NumberOfName(value);
    return Put(std::move(value));
  }
  bool binary(nlohmann::json::binary_t&) override { return false; }

  bool start_object(size_t) override {
    if (depth_ > 0) Put(JsonParts{.object = true});
    if (++depth_ == 2) inside_ = !outer_.empty();
    members_ = 0;
    return true;
  }
  bool start_array(size_t) override {
    if (!Put(JsonParts{})) return false;
    if (++depth_ == 2) inside_ = false;
    return true;
  }
  bool end_object() override {
    --depth_;
    if (members_ == 1 && number_.has_value() && depth_ > 0) Put(*number_);
    EndMember();
    return true;
  }
  bool end_array() override {
    --depth_;
    EndMember();
    return true;
  }

  bool key(std::string& key) override {
    ++members_;
    number_key_ = key == kNumberKey;
    number_.reset();
    if (depth_ == 2) inner_ = std::move(key);
    if (depth_ != 1) return true;
    outer_ = std::move(key);
    if (!outer_.empty()) {  // drops the members of an earlier object with this key
      std::erase_if(fields_, [&](const auto& field) { return field.first.first == outer_; });
    }
    return true;
  }

  bool parse_error(size_t position, const std::string&, const nlohmann::json::exception&) override {
    error_position_ = position;
    return false;
  }

  // Characters up to a syntax error, the wrong one included; 0: none.
  size_t error_position() const { return error_position_; }

 private:
  // After an object or array: the object around it has this member at least.
  void EndMember() {
    members_ = 1;
    number_key_ = false;
    number_.reset();
  }

  bool Put(JsonValue value) {
    if (depth_ == 1 && wanted_("", outer_)) fields_[{"", outer_}] = std::move(value);
    if (depth_ == 2 && inside_ && wanted_(outer_, inner_)) {
      fields_[{outer_, inner_}] = std::move(value);
    }
    return depth_ > 0;
  }

  const absl::FunctionRef<bool(std::string_view, std::string_view)> wanted_;
  JsonFields fields_;
  int64_t depth_ = 0;    // open objects and arrays
  bool inside_ = false;  // at depth 2: inside an object whose key is not empty
  std::string outer_;    // the last key at depth 1
  std::string inner_;    // the last key at depth 2
  // The innermost open object:
  int64_t members_ = 0;           // so far; after an object inside it, 1
  bool number_key_ = false;       // the last key is kNumberKey
  std::optional<double> number_;  // its value
  size_t error_position_ = 0;
};

absl::Status NoObject(std::string_view path, std::string_view text, size_t position) {
  if (position == 0) {
    return absl::InvalidArgumentError(absl::StrFormat("%s: not a JSON object", path));
  }
  const std::string_view before = text.substr(0, position - 1);
  const size_t line_start = before.rfind('\n') == before.npos ? 0 : before.rfind('\n') + 1;
  return absl::InvalidArgumentError(absl::StrFormat(
      "%s: not a JSON object: syntax error at line %d, column %d", path,
      std::count(before.begin(), before.end(), '\n') + 1, before.size() - line_start + 1));
}

}  // namespace

absl::StatusOr<JsonFields> ReadJsonFields(
    std::string_view path, std::string_view text,
    absl::FunctionRef<bool(std::string_view object, std::string_view key)> wanted) {
  // The parser takes a NUL as the end of the text.
  if (const size_t nul = text.find('\0'); nul != text.npos) return NoObject(path, text, nul + 1);
  FieldsReader reader(wanted);
  const std::string plain = WithPlainNumbers(text);
  if (!nlohmann::json::sax_parse(plain.begin(), plain.end(), &reader)) {
    return NoObject(path, text, reader.error_position());
  }
  return std::move(reader.fields());
}

std::string ShownValue(const JsonValue& value) {
  struct Writer {
    std::string operator()(std::monostate) const { return "null"; }
    std::string operator()(bool value) const { return value ? "true" : "false"; }
    std::string operator()(int64_t value) const { return absl::StrCat(value); }
    std::string operator()(double value) const { return absl::StrCat(value); }
    std::string operator()(const std::string& value) const { return Shown(value); }
    std::string operator()(JsonParts value) const {
      return value.object ? "an object" : "an array";
    }
  };
  return std::visit(Writer(), value);
}

}  // namespace logitd::formats
