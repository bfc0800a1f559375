#include "kernels/ops.h"

#include "absl/strings/str_format.h"

namespace logitd {

std::string_view NameOf(const Op& op) {
  // In the order of Op.
  constexpr std::string_view kNames[] = {"softmax_topk",
                                         "sample",
                                         "verify",
                                         "attention_softmax",
                                         "attention_softmax_backward",
                                         "cross_entropy",
                                         "cross_entropy_backward",
                                         "cross_entropy_training",
                                         "divergence",
                                         "linear_topk",
                                         "linear_sample",
                                         "linear_verify",
                                         "linear_cross_entropy",
                                         "linear_cross_entropy_backward",
                                         "linear_cross_entropy_training",
                                         "linear_divergence",
                                         "linear_divergence_training",
                                         "linear_topk on a shard",
                                         "linear_topk on shards",
                                         "linear_sample on a shard",
                                         "linear_sample on shards",
                                         "linear_verify on shards",
                                         "linear_divergence on shards",
                                         "linear_cross_entropy's targets",
                                         "linear_cross_entropy on a shard",
                                         "linear_cross_entropy on shards",
                                         "linear_cross_entropy of supports on shards",
                                         "linear_cross_entropy_backward on a shard",
                                         "linear_cross_entropy_backward on shards",
                                         "logits of a shard",
                                         "linear_sample of kept tokens on a shard",
                                         "linear_sample of kept tokens on shards"};
  static_assert(std::size(kNames) == std::variant_size_v<Op>);
  return kNames[op.index()];
}

absl::Status NoSuchOp(const Op& op) {
  return absl::UnimplementedError(absl::StrFormat("%s: this backend has no such op", NameOf(op)));
}

}  // namespace logitd
