// Reads a few members of a JSON file that may hold anything else too.
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

// An object or array. Its contents are not kept.
struct JsonParts {
  bool object = false;
  bool operator==(const JsonParts&) const = default;
};

// null: std::monostate. An integer beyond int64_t is a double.
using JsonValue = std::variant<std::monostate, bool, int64_t, double, std::string, JsonParts>;

// By (object, key). The object is "" for the outermost one, or the key of an object inside it.
using JsonFields = std::map<std::pair<std::string, std::string>, JsonValue>;

// Returns the members for which `wanted` is true: those of the outermost object, and those of the
// objects inside it whose key is not empty. Where a key is there twice, the last one counts.
//
// Numbers are also those that Python's json module writes and JSON does not have: NaN, Infinity,
// -Infinity, and any number of digits. transformers 5 writes the first three as an object, such as
// {"__float__": "NaN"}, which is a double here. A number beyond a double is an infinity.
//
// INVALID_ARGUMENT with `path`: the text is not one JSON object; for a syntax error, the line
// and column of the last character that was read, from 1. For any text, time is in proportion to
// its length, and memory to its length and the wanted members. Thread-safe.
absl::StatusOr<JsonFields> ReadJsonFields(
    std::string_view path, std::string_view text,
    absl::FunctionRef<bool(std::string_view object, std::string_view key)> wanted);

// The value for an error text: as in JSON, of bounded length; "an object" or "an array" for
// JsonParts.
std::string ShownValue(const JsonValue& value);

}  // namespace logitd::formats

#endif  // LOGITD_FORMATS_JSON_FIELDS_H_
