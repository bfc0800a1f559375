// The hand-written reader of ScoreRequest against the generated one, as compare_sample_request.h.
#ifndef LOGITD_TESTS_FUZZ_COMPARE_SCORE_REQUEST_H_
#define LOGITD_TESTS_FUZZ_COMPARE_SCORE_REQUEST_H_

#include <string>
#include <string_view>

#include "logitd/v1/scorer.pb.h"
#include "server/rpc/codecs/score_codec.h"
#include "tests/fuzz/compare_sample_request.h"

namespace logitd::rpc::testing {

inline void Compare(const v1::ScoreRequest& expected, const ScoreFields& ours,
                    FieldComparison* compare) {
  compare->Input(expected, ours);
  compare->Params(expected, kCrossEntropyParams, ours.params);
  compare->List("targets", expected.targets(), ours.targets);
  compare->Optional("ignore_index", expected.has_ignore_index(), expected.ignore_index(),
                    ours.ignore_index);
  compare->List("extra_count", expected.extra_count(), ours.extra_count);
  compare->List("extra_ids", expected.extra_ids(), ours.extra_ids);
  compare->List("support_count", expected.support_count(), ours.support_count);
  compare->List("support_ids", expected.support_ids(), ours.support_ids);
  compare->Note("want_rank", ours.want_rank == expected.want_rank());
  compare->Note("want_entropy", ours.want_entropy == expected.want_entropy());
  compare->Note("skip_ignored", ours.skip_ignored == expected.skip_ignored());
  compare->Optional("offset", expected.has_offset(), expected.offset(), ours.offset);
  compare->Note("totals", ours.totals_parts.parts.empty() != expected.has_totals());
  const v1::ScoreTotals& totals = expected.totals();
  compare->Counts(totals, ours.totals);
  compare->Double("totals.loss_sum", totals.loss_sum(), ours.totals.loss_sum);
  compare->Double("totals.target_logprob_sum", totals.target_logprob_sum(),
                  ours.totals.target_logprob_sum);
}

inline std::string ScoreRequestDisagreement(std::string_view bytes) {
  ReadTwice<ScoreCodec, ScoreSequence>(bytes);
  return SampleDisagreement<v1::ScoreRequest, ScoreCodec>(bytes, &ParseScoreFields);
}

}  // namespace logitd::rpc::testing

#endif  // LOGITD_TESTS_FUZZ_COMPARE_SCORE_REQUEST_H_
