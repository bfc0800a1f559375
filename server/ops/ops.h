// All ops that clients can call, and the methods that call them. The one list: services, GetInfo,
// metrics and the engine's slabs go by it.
#ifndef LOGITD_SERVER_OPS_OPS_H_
#define LOGITD_SERVER_OPS_OPS_H_

#include <string_view>
#include <vector>

#include "absl/types/span.h"
#include "server/engine/job.h"
#include "server/ops/attention_softmax.h"
#include "server/ops/cross_entropy.h"
#include "server/ops/divergence.h"
#include "server/ops/sample.h"
#include "server/ops/softmax_topk.h"
#include "server/ops/verify.h"

namespace logitd::ops {

struct Op {
  const engine::OpTraits* op;      // on logits, or on attention's scores
  const engine::OpTraits* linear;  // the same on hidden states of a head; null: none
  std::string_view service;
  std::string_view method;         // a call sends one message
  std::string_view stream_method;  // a stream of such messages; empty: there is none
};

inline constexpr Op kOps[] = {
    {&kSoftmaxTopKTraits, &kLinearTopKTraits, "logitd.v1.Sampler", "TopK", ""},
    {&kSampleTraits, &kLinearSampleTraits, "logitd.v1.Sampler", "Sample", "SampleStream"},
    {&kVerifyTraits, &kLinearVerifyTraits, "logitd.v1.Sampler", "Verify", ""},
    {&kCrossEntropyTraits, &kLinearCrossEntropyTraits, "logitd.v1.Scorer", "Score", "ScoreStream"},
    {&kDivergenceTraits, &kLinearDivergenceTraits, "logitd.v1.Scorer", "Divergence",
     "DivergenceStream"},
    {&kAttentionSoftmaxTraits, nullptr, "logitd.v1.Attention", "Softmax", "SoftmaxStream"},
    {&kAttentionSoftmaxBackwardTraits, nullptr, "logitd.v1.Attention", "SoftmaxBackward",
     "SoftmaxBackwardStream"},
};

// The traits of kOps, in order: op, then linear where there is one.
absl::Span<const engine::OpTraits* const> AllTraits();

// Their names.
std::vector<std::string_view> AllNames();

}  // namespace logitd::ops

#endif  // LOGITD_SERVER_OPS_OPS_H_
