// A few members of a JSON file that may hold anything beside them.
#ifndef LOGITD_FORMATS_JSON_FIELDS_H_
#define LOGITD_FORMATS_JSON_FIELDS_H_

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <variant>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"

namespace logitd::formats {

// An object or array, whose inside is not kept.
struct JsonParts {
  bool object = false;
  bool operator==(const JsonParts&) const = default;
};

// null: std::monostate. An integer beyond int64_t is a double.
using JsonValue = std::variant<std::monostate, bool, int64_t, double, std::string, JsonParts>;

// By (object, key): of the outermost object, "", or of an object that is a member of it, its key.
using JsonFields = std::map<std::pair<std::string, std::string>, JsonValue>;

// The members that `wanted` says, of the outermost object and of the objects that are members of
// it by a key that is not empty. Of a key that is there twice the last one counts. INVALID_ARGUMENT
// naming `path`: not one JSON object. Takes time in proportion to the text, and memory to what is
// wanted of it and its longest string, whatever it says. Thread-safe.
absl::StatusOr<JsonFields> ReadJsonFields(
    std::string_view path, std::string_view text,
    absl::FunctionRef<bool(std::string_view object, std::string_view key)> wanted);

// For an error: as JSON has it, of bounded length, without what is inside of a JsonParts.
std::string ShownValue(const JsonValue& value);

}  // namespace logitd::formats

#endif  // LOGITD_FORMATS_JSON_FIELDS_H_
