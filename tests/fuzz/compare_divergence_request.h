// The hand-written reader of DivergenceRequest against the generated one, as
// compare_sample_request.h.
#ifndef LOGITD_TESTS_FUZZ_COMPARE_DIVERGENCE_REQUEST_H_
#define LOGITD_TESTS_FUZZ_COMPARE_DIVERGENCE_REQUEST_H_

#include <memory>
#include <string>
#include <string_view>

#include "logitd/v1/scorer.pb.h"
#include "server/rpc/codecs/divergence_codec.h"
#include "tests/fuzz/compare_sample_request.h"

namespace logitd::rpc::testing {

inline void Compare(const v1::DivergenceRequest& expected, const DivergenceFields& ours,
                    FieldComparison* compare) {
  compare->Input(expected, ours);
  compare->Note("reference_dtype",
                ours.reference_dtype == static_cast<int>(expected.reference_dtype()));
  compare->Note("reference_head", ours.reference_head == expected.reference_head());
  compare->Note("reference_hidden_size",
                ours.reference_hidden_size == expected.reference_hidden_size());
  compare->Note("reference_head_version",
                ours.reference_head_version == expected.reference_head_version());
  compare->Note("reference", static_cast<int>(ours.reference.number) ==
                                 static_cast<int>(expected.reference_case()));
  compare->Bytes(
      "reference",
      expected.has_reference_hidden() ? expected.reference_hidden() : expected.reference_logits(),
      ours.reference.range);
  if (expected.has_reference_shared()) {
    compare->Shared(expected.reference_shared(), ours.reference);
  }
  compare->Params(expected, kDivergenceParams, ours.params);
  compare->List("targets", expected.targets(), ours.targets);
  compare->Optional("ignore_index", expected.has_ignore_index(), expected.ignore_index(),
                    ours.ignore_index);
  compare->Optional("offset", expected.has_offset(), expected.offset(), ours.offset);
  compare->Note("totals", ours.totals_parts.parts.empty() != expected.has_totals());
  const v1::DivergenceTotals& totals = expected.totals();
  compare->Counts(totals, ours.totals);
  compare->Double("totals.forward_kl_sum", totals.forward_kl_sum(), ours.totals.forward_kl_sum);
  compare->Double("totals.reverse_kl_sum", totals.reverse_kl_sum(), ours.totals.reverse_kl_sum);
}

inline std::string DivergenceRequestDisagreement(std::string_view bytes) {
  ReadTwice<DivergenceCodec, DivergenceSequence>(bytes);
  return SampleDisagreement<v1::DivergenceRequest, DivergenceCodec>(bytes, &ParseDivergenceFields);
}

}  // namespace logitd::rpc::testing

#endif  // LOGITD_TESTS_FUZZ_COMPARE_DIVERGENCE_REQUEST_H_
