#include "server/ops/ops.h"

namespace logitd::ops {

absl::Span<const engine::OpTraits* const> AllTraits() {
  static const auto* const all = [] {
    auto* traits = new std::vector<const engine::OpTraits*>;
    for (const Op& op : kOps) {
      traits->push_back(op.op);
      if (op.linear != nullptr) traits->push_back(op.linear);
    }
    return traits;
  }();
  return *all;
}

std::vector<std::string_view> AllNames() {
  std::vector<std::string_view> names;
  for (const engine::OpTraits* op : AllTraits()) names.push_back(op->name);
  return names;
}

}  // namespace logitd::ops
