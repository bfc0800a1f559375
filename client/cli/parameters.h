// Flags for the parameters of a request, made from its descriptor: a parameter that the proto gains
// is a flag without a change here.
#ifndef LOGITD_CLIENT_CLI_PARAMETERS_H_
#define LOGITD_CLIENT_CLI_PARAMETERS_H_

#include <google/protobuf/descriptor.h>
#include <google/protobuf/message.h>

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace logitd::cli {

// One parameter. Its value is one for all rows, or V,V,...: one per row, or a list for all rows.
struct ParameterFlag {
  const google::protobuf::FieldDescriptor* field;
  std::string names;  // "--top-k"; "--rank,--want-rank" for want_rank
  std::string type;   // of its values, for the help
  std::string help;   // the first sentence of the proto's comment
  std::string text;   // its value; empty: not given

  // A flag without a value, which means true.
  bool is_switch() const;

  // What is wrong with `value`, as "got ..., allowed ..."; empty: nothing.
  std::string Fault(const std::string& value) const;
};

// A flag for each parameter of `message` that is a number, a bool or an enum, except the counts of
// lists and the fields in `except`. A field without a comment has that of the field with its name
// in `commented`.
std::vector<ParameterFlag> FlagsOf(const google::protobuf::Descriptor& message,
                                   const std::vector<absl::string_view>& except = {},
                                   const google::protobuf::Descriptor* commented = nullptr);

// Sets in `params` what was given, in place of what is there. A list is then the same for all rows.
// INVALID_ARGUMENT: a value, with the name of its flag.
absl::Status Apply(const std::vector<ParameterFlag>& flags, google::protobuf::Message* params);

}  // namespace logitd::cli

#endif  // LOGITD_CLIENT_CLI_PARAMETERS_H_
