#include "client/messages/params.h"

#include <google/protobuf/reflection.h>
#include <google/protobuf/util/field_mask_util.h>

#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/strip.h"

namespace logitd::client {
namespace {

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;
using google::protobuf::util::FieldMaskUtil;

// Encoded size of one value, at most.
int64_t ValueBytes(const FieldDescriptor& field) {
  switch (field.type()) {
    case FieldDescriptor::TYPE_FLOAT:
    case FieldDescriptor::TYPE_FIXED32:
    case FieldDescriptor::TYPE_SFIXED32:
      return 4;
    case FieldDescriptor::TYPE_DOUBLE:
    case FieldDescriptor::TYPE_FIXED64:
    case FieldDescriptor::TYPE_SFIXED64:
      return 8;
    case FieldDescriptor::TYPE_BOOL:
      return 1;
    default:
      return 10;  // a varint
  }
}

}  // namespace

std::vector<const FieldDescriptor*> RowParams(const google::protobuf::Descriptor& message) {
  std::vector<const FieldDescriptor*> params;
  for (int i = 0; i < message.field_count(); ++i) {
    const FieldDescriptor* field = message.field(i);
    const int number = field->number();
    if ((number >= 16 && number < 40) || number >= 50 ||
        absl::StartsWith(field->name(), "support_")) {
      params.push_back(field);
    }
  }
  return params;
}

const FieldDescriptor* CountOf(const FieldDescriptor& field) {
  const absl::string_view name(field.name());
  return field.containing_type()->FindFieldByName(
      absl::StrCat(absl::StripSuffix(name, "_ids"), "_count"));
}

ParamCutter::ParamCutter(const Message& params) : params_(&params) {
  for (const FieldDescriptor* field : RowParams(*params.GetDescriptor())) {
    if (!field->is_repeated()) {
      singular_fields_.add_paths(field->name());
      continue;
    }
    fields_.push_back({.descriptor = field, .count = CountOf(*field)});
    const FieldDescriptor* count = fields_.back().count;
    const auto* reflection = params.GetReflection();
    if (count == nullptr || reflection->FieldSize(params, count) <= 1) continue;
    std::vector<int64_t>& first = fields_.back().first;
    first = {0};
    for (int32_t values : reflection->GetRepeatedFieldRef<int32_t>(params, count)) {
      first.push_back(first.back() + values);
    }
  }
}

int ParamCutter::SizeOf(const Field& field) const {
  return params_->GetReflection()->FieldSize(*params_, field.descriptor);
}

absl::Status ParamCutter::Check(int64_t rows) const {
  for (const Field& field : fields_) {
    const int size = SizeOf(field);
    const std::string name(field.descriptor->name());
    if (field.count == nullptr && size > 1 && size != rows) {
      return absl::InvalidArgumentError(
          absl::StrFormat("%s: got %d values, allowed %s (rows)", name, size,
                          rows == 1 ? "none or 1" : absl::StrFormat("none, 1 or %d", rows)));
    }
    const std::vector<int64_t>& first = field.first;
    for (size_t row = 0; row + 1 < first.size(); ++row) {
      if (first[row + 1] >= first[row]) continue;
      return absl::InvalidArgumentError(absl::StrFormat("%s: got %d at row %d, allowed 0 or more",
                                                        field.count->name(),
                                                        first[row + 1] - first[row], row));
    }
    if (!first.empty() && first.back() != size) {
      return absl::InvalidArgumentError(absl::StrFormat(
          "%s: adds up to %d, but %s has %d values: allowed is their number", field.count->name(),
          first.back(), absl::StripSuffix(field.count->name(), "_count"), size));
    }
  }
  return absl::OkStatus();
}

void ParamCutter::Cut(int64_t row, int64_t rows, Message* part) const {
  FieldMaskUtil::MergeMessageTo(*params_, singular_fields_, FieldMaskUtil::MergeOptions(), part);
  const auto* reflection = params_->GetReflection();
  for (const Field& field : fields_) {
    int64_t begin = 0;
    int64_t end = SizeOf(field);
    if (field.count == nullptr && end > 1) {
      begin = row;
      end = row + rows;
    } else if (!field.first.empty()) {
      begin = field.first[static_cast<size_t>(row)];
      end = field.first[static_cast<size_t>(row + rows)];
    }
    VisitType(*field.descriptor, [&](auto type) {
      using T = decltype(type);
      const auto from = reflection->GetRepeatedFieldRef<T>(*params_, field.descriptor);
      const auto to = reflection->GetMutableRepeatedFieldRef<T>(part, field.descriptor);
      for (int64_t i = begin; i < end; ++i) to.Add(from.Get(static_cast<int>(i)));
    });
  }
}

int64_t ParamCutter::bytes_per_row() const {
  int64_t bytes = 0;
  for (const Field& field : fields_) {
    if (field.count == nullptr && SizeOf(field) > 1) bytes += ValueBytes(*field.descriptor);
  }
  return bytes;
}

}  // namespace logitd::client
