#include "client/cli/json.h"

#include <google/protobuf/descriptor.h>

#include <charconv>
#include <cmath>
#include <cstdlib>

namespace logitd::cli {
namespace {

using google::protobuf::EnumValueDescriptor;
using google::protobuf::FieldDescriptor;
using google::protobuf::Message;
using nlohmann::ordered_json;

// Value `i` of a repeated field; of any other field its value.
ordered_json ValueOf(const Message& m, const FieldDescriptor* f, int i) {
  const auto& r = *m.GetReflection();
  const bool one = !f->is_repeated();
  switch (f->cpp_type()) {
    case FieldDescriptor::CPPTYPE_INT32:
      return one ? r.GetInt32(m, f) : r.GetRepeatedInt32(m, f, i);
    case FieldDescriptor::CPPTYPE_INT64:
      return one ? r.GetInt64(m, f) : r.GetRepeatedInt64(m, f, i);
    case FieldDescriptor::CPPTYPE_UINT32:
      return one ? r.GetUInt32(m, f) : r.GetRepeatedUInt32(m, f, i);
    case FieldDescriptor::CPPTYPE_UINT64:
      return one ? r.GetUInt64(m, f) : r.GetRepeatedUInt64(m, f, i);
    case FieldDescriptor::CPPTYPE_FLOAT:
      return ToJson(one ? r.GetFloat(m, f) : r.GetRepeatedFloat(m, f, i));
    case FieldDescriptor::CPPTYPE_DOUBLE:
      return ToJson(one ? r.GetDouble(m, f) : r.GetRepeatedDouble(m, f, i));
    case FieldDescriptor::CPPTYPE_BOOL:
      return one ? r.GetBool(m, f) : r.GetRepeatedBool(m, f, i);
    case FieldDescriptor::CPPTYPE_STRING:
      return one ? r.GetString(m, f) : r.GetRepeatedString(m, f, i);
    case FieldDescriptor::CPPTYPE_MESSAGE:
      return ToJson(one ? r.GetMessage(m, f) : r.GetRepeatedMessage(m, f, i));
    case FieldDescriptor::CPPTYPE_ENUM:
      break;
  }
  const int number = one ? r.GetEnumValue(m, f) : r.GetRepeatedEnumValue(m, f, i);
  const EnumValueDescriptor* value = f->enum_type()->FindValueByNumber(number);
  return value == nullptr ? ordered_json(number) : ordered_json(value->name());
}

}  // namespace

// The shortest decimal that reads back as the same float, not as the same double.
ordered_json ToJson(float value) {
  if (!std::isfinite(value)) return ToJson(double{value});
  char text[32] = {};
  std::to_chars(text, text + sizeof(text) - 1, value);
  return std::strtod(text, nullptr);
}

ordered_json ToJson(double value) {
  if (std::isnan(value)) return "NaN";
  if (std::isinf(value)) return value > 0 ? "Infinity" : "-Infinity";
  return value;
}

ordered_json ToJson(const Message& message) {
  ordered_json out = ordered_json::object();
  for (int f = 0; f < message.GetDescriptor()->field_count(); ++f) {
    const FieldDescriptor* field = message.GetDescriptor()->field(f);
    if (!field->is_repeated()) {
      out[std::string(field->name())] = ValueOf(message, field, 0);
      continue;
    }
    ordered_json& array = out[std::string(field->name())] = ordered_json::array();
    const int size = message.GetReflection()->FieldSize(message, field);
    for (int i = 0; i < size; ++i) array.push_back(ValueOf(message, field, i));
  }
  return out;
}

std::string Line(const ordered_json& json) {
  return json.dump(-1, ' ', false, ordered_json::error_handler_t::replace) + "\n";
}

}  // namespace logitd::cli
