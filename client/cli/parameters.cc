#include "client/cli/parameters.h"

#include <google/protobuf/reflection.h>

#include <algorithm>
#include <limits>
#include <type_traits>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "client/cli/proto_comments.h"
#include "client/messages/params.h"

namespace logitd::cli {
namespace {

using google::protobuf::EnumDescriptor;
using google::protobuf::FieldDescriptor;
using google::protobuf::Message;

// "raw" for LOGPROB_MODE_RAW: what the names of an enum have in common is left out.
std::string ShortName(const EnumDescriptor& type, int value) {
  absl::string_view common = type.value(0)->name();
  for (int i = 1; i < type.value_count(); ++i) {
    while (!absl::StartsWith(type.value(i)->name(), common)) common.remove_suffix(1);
  }
  common = common.substr(0, common.rfind('_') + 1);
  return absl::AsciiStrToLower(absl::StripPrefix(type.value(value)->name(), common));
}

std::vector<std::string> ShortNames(const EnumDescriptor& type) {
  std::vector<std::string> names;
  for (int i = 0; i < type.value_count(); ++i) names.push_back(ShortName(type, i));
  return names;
}

bool Parse(absl::string_view text, const FieldDescriptor&, float* value) {
  return absl::SimpleAtof(text, value);
}
bool Parse(absl::string_view text, const FieldDescriptor&, double* value) {
  return absl::SimpleAtod(text, value);
}
bool Parse(absl::string_view text, const FieldDescriptor&, bool* value) {
  return absl::SimpleAtob(text, value);
}
template <typename Integer>
bool Parse(absl::string_view text, const FieldDescriptor& field, Integer* value) {
  if (field.enum_type() == nullptr) return absl::SimpleAtoi(text, value);
  const std::vector<std::string> names = ShortNames(*field.enum_type());
  const auto name = std::find(names.begin(), names.end(), text);
  if (name == names.end()) return false;
  *value = static_cast<Integer>(field.enum_type()->value(name - names.begin())->number());
  return true;
}

std::string TypeName(const FieldDescriptor& field) {
  switch (field.cpp_type()) {
    case FieldDescriptor::CPPTYPE_ENUM:
      return absl::StrJoin(ShortNames(*field.enum_type()), "|");
    case FieldDescriptor::CPPTYPE_FLOAT:
    case FieldDescriptor::CPPTYPE_DOUBLE:
      return "NUMBER";
    case FieldDescriptor::CPPTYPE_BOOL:
      return "true|false";
    default:
      return "INTEGER";
  }
}

// The values that a flag of this type can have. The server knows which of them make sense.
std::string AllowedValues(const FieldDescriptor& field, const std::string& type) {
  std::string allowed = type;
  client::VisitType(field, [&](auto zero) {
    using T = decltype(zero);
    if constexpr (std::is_integral_v<T> && !std::is_same_v<T, bool>) {
      if (field.enum_type() != nullptr) return;
      allowed = absl::StrCat("integers ", std::numeric_limits<T>::min(), "..",
                             std::numeric_limits<T>::max());
    }
  });
  return allowed;
}

// Sets `field` of `params` to the values in `text`; with null only looks whether that is possible.
// Returns the first value that is not one; empty: none.
std::string SetValues(const FieldDescriptor& field, absl::string_view text, Message* params) {
  std::string wrong;
  client::VisitType(field, [&](auto type) {
    using T = decltype(type);
    std::vector<T> values;
    for (absl::string_view piece : absl::StrSplit(text, ',')) {
      T value = {};
      if (!Parse(piece, field, &value) && wrong.empty()) wrong = absl::StrCat("\"", piece, "\"");
      values.push_back(value);
    }
    if (wrong.empty() && !field.is_repeated() && values.size() > 1) {
      wrong = absl::StrCat(values.size(), " values");
    }
    if (params == nullptr || !wrong.empty()) return;
    const auto* reflection = params->GetReflection();
    if (field.is_repeated()) {
      reflection->ClearField(params, &field);
      const auto all = reflection->GetMutableRepeatedFieldRef<T>(params, &field);
      for (T value : values) all.Add(value);
    } else if constexpr (std::is_same_v<T, bool>) {
      reflection->SetBool(params, &field, values[0]);
    } else if constexpr (std::is_same_v<T, int64_t>) {
      reflection->SetInt64(params, &field, values[0]);
    } else if constexpr (std::is_same_v<T, float>) {
      reflection->SetFloat(params, &field, values[0]);
    } else if constexpr (std::is_same_v<T, int32_t>) {
      if (field.enum_type() != nullptr) return reflection->SetEnumValue(params, &field, values[0]);
      reflection->SetInt32(params, &field, values[0]);
    }
  });
  return wrong;
}

bool IsCount(const FieldDescriptor& field) {
  return field.is_repeated() && absl::EndsWith(field.name(), "_count");
}

}  // namespace

bool ParameterFlag::is_switch() const { return field->cpp_type() == FieldDescriptor::CPPTYPE_BOOL; }

std::string ParameterFlag::Fault(const std::string& value) const {
  const std::string wrong = SetValues(*field, value, nullptr);
  if (wrong.empty()) return "";
  return absl::StrFormat("got %s, allowed %s", wrong, AllowedValues(*field, type));
}

std::vector<ParameterFlag> FlagsOf(const google::protobuf::Descriptor& message,
                                   const std::vector<absl::string_view>& except,
                                   const google::protobuf::Descriptor* commented) {
  std::vector<ParameterFlag> flags;
  for (const FieldDescriptor* field : client::RowParams(message)) {
    const auto cpp_type = field->cpp_type();
    if (cpp_type == FieldDescriptor::CPPTYPE_STRING ||
        cpp_type == FieldDescriptor::CPPTYPE_MESSAGE || IsCount(*field) ||
        std::find(except.begin(), except.end(), field->name()) != except.end()) {
      continue;
    }
    const std::string name = absl::StrReplaceAll(field->name(), {{"_", "-"}});
    absl::string_view wanted = name;
    std::string names = absl::StrCat("--", name);
    if (absl::ConsumePrefix(&wanted, "want-")) names = absl::StrCat("--", wanted, ",", names);
    std::string help = FirstSentence(*field);
    const FieldDescriptor* const same =
        commented == nullptr ? nullptr : commented->FindFieldByName(field->name());
    if (help.empty() && same != nullptr) help = FirstSentence(*same);
    flags.push_back(
        {.field = field, .names = names, .type = TypeName(*field), .help = std::move(help)});
  }
  return flags;
}

absl::Status Apply(const std::vector<ParameterFlag>& flags, Message* params) {
  for (const ParameterFlag& flag : flags) {
    if (flag.text.empty()) continue;
    if (std::string fault = flag.Fault(flag.text); !fault.empty()) {
      return absl::InvalidArgumentError(absl::StrCat(flag.names, ": ", fault));
    }
    SetValues(*flag.field, flag.text, params);
    if (const FieldDescriptor* count = client::CountOf(*flag.field)) {
      params->GetReflection()->ClearField(params, count);
    }
  }
  return absl::OkStatus();
}

}  // namespace logitd::cli
