// The parameters of a request message, as its descriptor lists them. A new parameter in the proto
// is cut into messages, and becomes a flag of logitctl, without a change here.
#ifndef LOGITD_CLIENT_MESSAGES_PARAMS_H_
#define LOGITD_CLIENT_MESSAGES_PARAMS_H_

#include <google/protobuf/descriptor.h>
#include <google/protobuf/field_mask.pb.h>
#include <google/protobuf/message.h>

#include <cstdint>
#include <vector>

#include "absl/status/status.h"

namespace logitd::client {

// The fields of `message` that are parameters of rows: numbers 16 to 39 and 50 on, as sampler.proto
// says, and supports.
std::vector<const google::protobuf::FieldDescriptor*> RowParams(
    const google::protobuf::Descriptor& message);

// The field that says how many values of the list `field` each row has ("history_count" for
// "history"). Null: `field` has one value for all rows, or one per row.
const google::protobuf::FieldDescriptor* CountOf(const google::protobuf::FieldDescriptor& field);

// Calls visit(T()) with the C++ type of the elements of `field`, a number, bool or enum (int32_t).
template <typename Visit>
auto VisitType(const google::protobuf::FieldDescriptor& field, Visit visit) {
  using google::protobuf::FieldDescriptor;
  switch (field.cpp_type()) {
    case FieldDescriptor::CPPTYPE_INT64:
      return visit(int64_t());
    case FieldDescriptor::CPPTYPE_UINT32:
      return visit(uint32_t());
    case FieldDescriptor::CPPTYPE_UINT64:
      return visit(uint64_t());
    case FieldDescriptor::CPPTYPE_FLOAT:
      return visit(float());
    case FieldDescriptor::CPPTYPE_DOUBLE:
      return visit(double());
    case FieldDescriptor::CPPTYPE_BOOL:
      return visit(bool());
    default:
      return visit(int32_t());
  }
}

// Takes the parameters of some rows out of those of all rows. `params` outlives it. Immutable,
// hence thread-safe.
class ParamCutter {
 public:
  explicit ParamCutter(const google::protobuf::Message& params);

  // INVALID_ARGUMENT: a parameter that cannot be cut, because its size is not that of `rows` rows.
  absl::Status Check(int64_t rows) const;

  // Sets in `part` every parameter of rows [row, row + rows): a value or list for all rows as it
  // is; of values and lists per row those of the rows.
  void Cut(int64_t row, int64_t rows, google::protobuf::Message* part) const;

  // Encoded size of the parameters of one row, without its lists, at most.
  int64_t bytes_per_row() const;

 private:
  struct Field {
    const google::protobuf::FieldDescriptor* descriptor;
    const google::protobuf::FieldDescriptor* count;  // null: no list
    std::vector<int64_t> first;                      // [rows + 1] of a list per row; else empty
  };
  int SizeOf(const Field& field) const;

  const google::protobuf::Message* params_;
  std::vector<Field> fields_;  // the repeated ones
  google::protobuf::FieldMask singular_fields_;
};

}  // namespace logitd::client

#endif  // LOGITD_CLIENT_MESSAGES_PARAMS_H_
