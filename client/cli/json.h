// Answers as one line of JSON.
#ifndef LOGITD_CLIENT_CLI_JSON_H_
#define LOGITD_CLIENT_CLI_JSON_H_

#include <google/protobuf/message.h>

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace logitd::cli {

// All fields of `message`, set or not, in protobuf's JSON mapping with the proto's own names, but
// with 64-bit integers as numbers. NaN and infinities are the strings "NaN", "Infinity" and
// "-Infinity".
nlohmann::ordered_json ToJson(const google::protobuf::Message& message);
nlohmann::ordered_json ToJson(float value);
nlohmann::ordered_json ToJson(double value);
template <typename T>
nlohmann::ordered_json ToJson(const std::vector<T>& values) {
  nlohmann::ordered_json out = nlohmann::ordered_json::array();
  for (const T& value : values) out.push_back(ToJson(value));
  return out;
}

// With a line feed. A token may be half a character: what is not UTF-8 becomes U+FFFD.
std::string Line(const nlohmann::ordered_json& json);

}  // namespace logitd::cli

#endif  // LOGITD_CLIENT_CLI_JSON_H_
