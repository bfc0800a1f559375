// The hand-written reader of TopKRequest against the generated one: same bytes in, same verdict and
// same fields out.
#ifndef LOGITD_TESTS_FUZZ_COMPARE_TOPK_REQUEST_H_
#define LOGITD_TESTS_FUZZ_COMPARE_TOPK_REQUEST_H_

#include <string>
#include <string_view>

#include "logitd/v1/sampler.pb.h"
#include "server/rpc/codecs/topk_codec.h"
#include "tests/fuzz/field_comparison.h"

namespace logitd::rpc::testing {

inline void Compare(const v1::TopKRequest& expected, const TopKFields& ours,
                    FieldComparison* compare) {
  compare->Input(expected, ours);
  compare->Params(expected, kSoftmaxTopKParams, ours.params);
}

inline std::string TopKRequestDisagreement(std::string_view bytes) {
  return Disagreement<v1::TopKRequest, TopKFields>(bytes, &ParseTopKFields,
                                                   [](Pieces) { return std::string(); });
}

}  // namespace logitd::rpc::testing

#endif  // LOGITD_TESTS_FUZZ_COMPARE_TOPK_REQUEST_H_
