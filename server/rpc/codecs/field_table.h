// Tables of fields for ParseMessage, from the names of the fields: the message's descriptor knows
// their numbers.
#ifndef LOGITD_SERVER_RPC_CODECS_FIELD_TABLE_H_
#define LOGITD_SERVER_RPC_CODECS_FIELD_TABLE_H_

#include <google/protobuf/descriptor.h>

#include <cstdlib>
#include <iostream>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "absl/types/span.h"
#include "kernels/row_params.h"
#include "server/rpc/wire/reader.h"

namespace logitd::rpc {

// A field and where it goes in M. What stands before a '.' names the message in errors only.
template <typename M>
struct NamedField {
  std::string_view name;
  typename Field<M>::Member member;
};

// The table of message `descriptor`, read into an M. Made once for each message.
template <typename M>
class FieldTable {
 public:
  explicit FieldTable(const google::protobuf::Descriptor* descriptor) : descriptor_(descriptor) {}

  // Fields of M, or of a struct that M extends. Each must be in the message.
  template <typename Base, size_t N>
  FieldTable& Add(const NamedField<Base> (&fields)[N]) {
    for (const NamedField<Base>& field : fields) {
      std::visit([&](auto member) { Add(field.name, Of(member)); }, field.member);
    }
    return *this;
  }

  // List i of `lists` is parameter i of `params`.
  template <typename Base, typename Row, size_t N>
  FieldTable& Add(const RowParam<Row> (&params)[N], AnyLists Base::*lists) {
    for (size_t i = 0; i < N; ++i) Add(params[i].name, ListOf<M>{lists, i});
    return *this;
  }

  operator absl::Span<const Field<M>>() const { return fields_; }

 private:
  template <typename Base, typename T>
  static T M::*Of(T Base::*member) {
    return member;
  }
  template <typename Base>
  static ListOf<M> Of(const ListOf<Base>& list) {
    return {list.lists, list.index};
  }

  void Add(std::string_view name, typename Field<M>::Member member) {
    const auto* field = descriptor_->FindFieldByName(std::string(name.substr(name.rfind('.') + 1)));
    if (field == nullptr) {
      std::cerr << descriptor_->full_name() << " has no field " << name << "\n";
      std::abort();
    }
    const bool is_message = field->type() == google::protobuf::FieldDescriptor::TYPE_MESSAGE;
    fields_.push_back({static_cast<uint32_t>(field->number()), name, member, is_message});
  }

  const google::protobuf::Descriptor* const descriptor_;
  std::vector<Field<M>> fields_;
};

}  // namespace logitd::rpc

#endif  // LOGITD_SERVER_RPC_CODECS_FIELD_TABLE_H_
