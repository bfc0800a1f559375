#include "formats/json_fields.h"

#include <nlohmann/json.hpp>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "formats/safetensors.h"

namespace logitd::formats {
namespace {

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
  bool number_float(double value, const std::string&) override { return Put(value); }
  bool string(std::string& value) override { return Put(std::move(value)); }
  bool binary(nlohmann::json::binary_t&) override { return false; }

  bool start_object(size_t) override {
    if (depth_ > 0) Put(JsonParts{.object = true});
    if (++depth_ == 2) inside_ = !outer_.empty();
    return true;
  }
  bool start_array(size_t) override {
    if (!Put(JsonParts{})) return false;
    if (++depth_ == 2) inside_ = false;
    return true;
  }
  bool end_object() override { return --depth_, true; }
  bool end_array() override { return --depth_, true; }

  bool key(std::string& key) override {
    if (depth_ == 2) inner_ = std::move(key);
    if (depth_ != 1) return true;
    outer_ = std::move(key);
    if (!outer_.empty()) {  // drops the members of an earlier object with this key
      std::erase_if(fields_, [&](const auto& field) { return field.first.first == outer_; });
    }
    return true;
  }

  bool parse_error(size_t, const std::string&, const nlohmann::json::exception&) override {
    return false;
  }

 private:
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
};

}  // namespace

absl::StatusOr<JsonFields> ReadJsonFields(
    std::string_view path, std::string_view text,
    absl::FunctionRef<bool(std::string_view object, std::string_view key)> wanted) {
  FieldsReader reader(wanted);
  // The parser takes a NUL as the end of the text.
  if (text.find('\0') != std::string_view::npos ||
      !nlohmann::json::sax_parse(text.begin(), text.end(), &reader)) {
    return absl::InvalidArgumentError(absl::StrFormat("%s: not a JSON object", path));
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
